"""Lesson 02: mistakes in attention weights, masks and a head of self-attention."""

from utils.exercises.attention import (
    SelfAttention,
    attention,
    attention_weights,
    causal_mask,
    padding_mask,
)

# Attention weights --------------------------------------------------------------------

ROOT = "math.sqrt(q.shape[-1])"
WITHOUT_MASK = "torch.softmax(scores, dim=-1)"
WITH_MASK = "torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)"
HIDDEN_AFTER = "return weights.masked_fill(~mask, 0)"

attention_weights.fault(
    "nan_in_the_gradient",
    "The result is right, but the gradient is NaN: for a row that is all −inf the "
    "softmax has made NaN on the way, and the NaN of its gradient reaches q and k "
    "through a sum or a product. What overwrites the hidden scores must cut them off.",
    (
        "scores.masked_fill(~mask, -torch.inf)",
        "scores + torch.zeros_like(scores).masked_fill(~mask, -torch.inf)",
    ),
)
attention_weights.fault(
    "nan_where_all_is_hidden",
    "A row of −inf gives NaN, and one NaN spreads to everything that is computed from "
    "it. A query that may look at nothing should get zeros.",
    (HIDDEN_AFTER, "return weights"),
)
attention_weights.fault(
    "finite_instead_of_infinite",
    "Hidden keys get a very negative score, such as −1e9 or the dtype's least number, "
    "in place of −inf. Where all keys are hidden these scores are equal, and the query "
    "gets the mean of everything that it may not see. It should get zeros.",
    ("~mask, -torch.inf", "~mask, torch.finfo(scores.dtype).min"),
    (HIDDEN_AFTER, "return weights"),
)
attention_weights.fault(
    "too_large_for_half_precision",
    "Hidden keys get −1e9, which float16 cannot hold: its numbers end at 65,504. −inf "
    "exists in every floating-point dtype.",
    ("~mask, -torch.inf", "~mask, -1e9"),
)
attention_weights.fault(
    "hidden_scores_of_ten_thousand",
    "Hidden keys get the score −10,000. A score that is allowed can be lower than "
    "that, and then the hidden key wins; only −inf is below everything.",
    ("~mask, -torch.inf", "~mask, -1e4"),
    (HIDDEN_AFTER, "return weights"),
)
attention_weights.fault(
    "hidden_scores_end_at_65504",
    "Hidden keys get a finite score, −65,504 or so. A score that is allowed can be "
    "lower than that; only −inf is below everything.",
    ("~mask, -torch.inf", "~mask, -65504.0"),
)
attention_weights.fault(
    "keys_not_turned",
    "The product is taken of q and k as they are: `(T_q, d_head)` and `(T_k, d_head)`. "
    "A matrix product sums over the last dimension of the first and the last but one of "
    "the second, and d_head must stand at both.",
    ("k.transpose(-2, -1)", "k"),
)
attention_weights.fault(
    "keys_reshaped",
    "The keys get the shape `(d_head, T_k)` by a reshape. That reads the same numbers "
    "in the same order, so each column holds pieces of several keys: dimensions have "
    "to be exchanged.",
    (
        "k.transpose(-2, -1)",
        "k.reshape(*k.shape[:-2], k.shape[-1], k.shape[-2])",
    ),
)
attention_weights.fault(
    "dimensions_from_the_front",
    "The dimensions to exchange are counted from the front. There may be two, three or "
    "four; the last two have fixed numbers only when counted from the end.",
    ("k.transpose(-2, -1)", "k.transpose(1, 2)"),
)
attention_weights.fault(
    "first_two_exchanged",
    "The first two dimensions of the keys are exchanged. Without a batch these are the "
    "last two as well; with one they are not. Count from the end.",
    ("k.transpose(-2, -1)", "k.transpose(0, 1)"),
)
attention_weights.fault(
    "keys_turned_round_whole",
    "`.T` reverses all dimensions of the keys, which fits two of them only. Exchange "
    "the last two, whatever stands in front.",
    ("k.transpose(-2, -1)", "k.permute(*range(k.dim() - 1, -1, -1))"),
)
attention_weights.fault(
    "rows_are_keys",
    "The rows are the keys: keys times queries gives `(T_k, T_q)`. One row a query is "
    "asked for, `(T_q, T_k)`.",
    ("q @ k.transpose(-2, -1)", "k @ q.transpose(-2, -1)"),
)
attention_weights.fault(
    "softmax_over_queries",
    "The softmax runs over the queries, so the weights of each key sum to 1. It is the "
    "query that shares out its attention: its row, over all keys, sums to 1.",
    ("scores, dim=-1", "scores, dim=-2"),
    ("inf), dim=-1", "inf), dim=-2"),
)
attention_weights.fault(
    "softmax_over_the_batch",
    "The softmax runs over the first dimension. With a batch that is the batch, so "
    "its rows share out one sum between them.",
    ("scores, dim=-1", "scores, dim=0"),
    ("inf), dim=-1", "inf), dim=0"),
)
attention_weights.fault(
    "softmax_dimension_from_the_front",
    "The softmax runs over dimension 1 counted from the front. That is the keys for "
    "one matrix, the queries with a batch and the heads with heads: count from the end.",
    ("scores, dim=-1", "scores, dim=1"),
    ("inf), dim=-1", "inf), dim=1"),
)
attention_weights.fault(
    "no_scaling",
    "The scores are not divided by the root of d_head. They grow with d_head, the "
    "softmax sharpens and its gradient goes away.",
    (f" / {ROOT}", ""),
)
attention_weights.fault(
    "multiplied_by_the_root",
    "The scores are multiplied by the root of d_head. That makes large scores larger; "
    "division brings them back to the size they have at d_head = 1.",
    (f"/ {ROOT}", f"* {ROOT}"),
)
attention_weights.fault(
    "divided_by_d_head",
    "The scores are divided by d_head, not by its root (or by the root twice). Their "
    "variance grows like d_head, so their typical size grows like the root.",
    (ROOT, "q.shape[-1]"),
)
attention_weights.fault(
    "constant_divisor",
    "The divisor is 8 whatever the width. That is right for d_head = 64 only.",
    (ROOT, "8"),
)
attention_weights.fault(
    "root_of_d_model",
    "The divisor is the root of the width of all heads together. Each score sums over "
    "the d_head numbers of one head, so the last dimension of q alone counts.",
    (ROOT, "math.sqrt(q.shape[-1] * (q.shape[-3] if q.dim() > 3 else 1))"),
)
attention_weights.fault(
    "root_of_the_length",
    "The divisor is the root of the number of keys. Each score sums over the d_head "
    "numbers of a vector, so it is their number that counts.",
    (ROOT, "math.sqrt(k.shape[-2])"),
)
attention_weights.fault(
    "root_of_the_number_of_queries",
    "The divisor is the root of the number of queries. Each score sums over the d_head "
    "numbers of a vector: that is the last dimension of q, counted from the end.",
    (ROOT, "math.sqrt(q.shape[-2])"),
)
attention_weights.fault(
    "scaled_after_softmax",
    "The weights are divided by the root of d_head after the softmax, so they no "
    "longer sum to 1, and large scores have saturated it already.",
    (f" / {ROOT}", ""),
    (WITHOUT_MASK, f"{WITHOUT_MASK} / {ROOT}"),
    (WITH_MASK, f"{WITH_MASK} / {ROOT}"),
)
attention_weights.fault(
    "cosine",
    "The vectors are brought to length 1 first, so no score is larger than 1 and no "
    "look-up can be sharp. A score is the plain product q·k over the root of d_head.",
    (
        f"q @ k.transpose(-2, -1) / {ROOT}",
        "(q / q.norm(dim=-1, keepdim=True)) @ (k / k.norm(dim=-1, keepdim=True)).mT",
    ),
)
attention_weights.fault(
    "no_softmax",
    "These are the scores. Softmax over the keys has yet to turn them into weights.",
    (WITHOUT_MASK, "scores"),
    (WITH_MASK, "scores.masked_fill(~mask, -torch.inf)"),
    (HIDDEN_AFTER, "return weights"),
)
attention_weights.fault(
    "sigmoid",
    "Each score is squashed by itself. The weights of a query compete: they sum to 1.",
    (WITHOUT_MASK, "torch.sigmoid(scores)"),
    (WITH_MASK, "torch.sigmoid(scores)"),
)
attention_weights.fault(
    "no_shift",
    "The exponential is taken of the scores as they are; beyond 88 it overflows, and "
    "inf/inf is NaN. Your softmax of lesson 00 knows how to avoid that.",
    (WITHOUT_MASK, "scores.exp() / scores.exp().sum(-1, keepdim=True)"),
)
attention_weights.fault(
    "clamped",
    "The scores are cut off at a fixed size. Two large scores that differ then get "
    "the same weight.",
    (ROOT, f"{ROOT}\n    scores = scores.clamp(-80, 80)"),
)
attention_weights.fault(
    "always_causal",
    "Later keys are hidden although no mask was given. Without a mask every query may "
    "look at every key; which mask applies is the caller's choice.",
    (
        WITHOUT_MASK,
        "torch.softmax(scores.masked_fill(~torch.ones_like(scores).tril().bool(), "
        "-torch.inf), dim=-1)",
    ),
)
attention_weights.fault(
    "mask_ignored",
    "The mask has no effect.",
    ("if mask is None", "if True"),
)
attention_weights.fault(
    "mask_inverted",
    "The mask is read the other way round. Here True means “may look”; "
    "nn.MultiheadAttention means “hidden” by it, and much code follows that.",
    ("scores.masked_fill(~mask", "scores.masked_fill(mask"),
    ("weights.masked_fill(~mask", "weights.masked_fill(mask"),
)
attention_weights.fault(
    "mask_inverted_before_softmax",
    "Before the softmax the keys that may be looked at are hidden, after it the others: "
    "one of the two reads the mask the other way round, and nothing is left. "
    "`masked_fill` overwrites where it finds True, and here True means “may look”.",
    ("scores.masked_fill(~mask", "scores.masked_fill(mask"),
)
attention_weights.fault(
    "mask_inverted_after_softmax",
    "The hidden keys are out before the softmax, but after it the weights of those that "
    "may be looked at are overwritten. It is the others, where the mask is False, that "
    "should be 0.",
    ("weights.masked_fill(~mask", "weights.masked_fill(mask"),
)
attention_weights.fault(
    "mask_added",
    "The mask is added to the scores as 0 and 1. A hidden key then has a score that is "
    "lower by 1, which is still a weight; it needs −inf.",
    ("scores.masked_fill(~mask, -torch.inf)", "scores + mask"),
    (HIDDEN_AFTER, "return weights"),
)
attention_weights.fault(
    "hidden_scores_are_zero",
    "A hidden key gets the score 0. After the exponential that is a weight like any "
    "other, exp(0) = 1 before the division.",
    ("scores.masked_fill(~mask, -torch.inf)", "scores * mask"),
    (HIDDEN_AFTER, "return weights"),
)
attention_weights.fault(
    "hidden_scores_zero_then_hidden",
    "A hidden key gets the score 0, and its weight is set to 0 after the softmax. By "
    "then it has taken its share, which is missing from the others.",
    ("~mask, -torch.inf", "~mask, 0"),
)
attention_weights.fault(
    "mask_lifted_where_all_is_hidden",
    "A query that may look at nothing is allowed to look at everything. There is no "
    "NaN then, but it gets what was hidden from it; it should get zeros.",
    ("    weights =", "    mask = mask | ~mask.any(-1, keepdim=True)\n    weights ="),
)
attention_weights.fault(
    "masked_after_softmax",
    "The weights are set to 0 after the softmax, and the rest no longer sums to 1. "
    "Hidden keys have to be out before the softmax divides.",
    ("scores.masked_fill(~mask, -torch.inf)", "scores"),
)
attention_weights.fault(
    "renormalised_after_softmax",
    "The weights are set to 0 after the softmax and divided by their sum. Where a "
    "hidden key has the largest score by far, all others have underflowed to 0 by "
    "then, and nothing is left to divide: hide it before the softmax.",
    ("scores.masked_fill(~mask, -torch.inf)", "scores"),
    (HIDDEN_AFTER, "return weights * mask / (weights * mask).sum(-1, keepdim=True)"),
)
attention_weights.fault(
    "renormalised_without_nan",
    "The weights are set to 0 after the softmax and divided by their sum, and what was "
    "0/0 is 0. Where a hidden key has the largest score by far, all others have "
    "underflowed to 0 by then: hide it before the softmax.",
    ("scores.masked_fill(~mask, -torch.inf)", "scores"),
    (
        HIDDEN_AFTER,
        "return weights * mask / (weights * mask).sum(-1, keepdim=True).clamp(min=1e-9)",
    ),
)

# Attention ----------------------------------------------------------------------------

WEIGHTS = "attention_weights(q, k, mask)"

attention.inherits(attention_weights)
attention.fault(
    "root_of_d_v",
    "The divisor is the root of the values' width. The scores sum over the d_head "
    "numbers of queries and keys; the values take no part in them.",
    (WEIGHTS, "attention_weights(q * (q.shape[-1] / v.shape[-1]) ** 0.5, k, mask)"),
)
attention.fault(
    "weights_returned",
    "These are the attention weights. The values have yet to be averaged by them.",
    (f"{WEIGHTS} @ v", WEIGHTS),
)
attention.fault(
    "keys_averaged",
    "The keys are averaged. They say where to look; what is handed over are the values.",
    (f"{WEIGHTS} @ v", f"{WEIGHTS} @ k"),
)
attention.fault(
    "output_scaled",
    "The output is divided by the root of d_head as well. The scores have been, and an "
    "average of the values needs no scale.",
    (f"{WEIGHTS} @ v", f"{WEIGHTS} @ v / {ROOT}"),
)
attention.fault(
    "nan_replaced_in_the_output",
    "The result is right, but the gradient of v is NaN: the weights of a query that may "
    "look at nothing are NaN, and only the output is put in order. Overwrite the "
    "weights.",
    (
        f"return {WEIGHTS} @ v",
        f"weights = {WEIGHTS}\n"
        "    if mask is not None:\n"
        "        nothing = ~mask.any(-1, keepdim=True)\n"
        "        weights = weights.masked_fill(nothing, torch.nan)\n"
        "    return (weights @ v).nan_to_num(0.0)",
    ),
)
attention.fault(
    "softmax_twice",
    "Softmax is taken of weights that have been through it already, and they come out "
    "nearly equal. `attention_weights` gives what multiplies the values.",
    (WEIGHTS, f"torch.softmax({WEIGHTS}, -1)"),
)
attention.fault(
    "values_not_weighted",
    "Every query gets the plain mean of the values: the weights are not used.",
    (WEIGHTS, f"torch.full_like({WEIGHTS}, 1 / k.shape[-2])"),
)
attention.fault(
    "hard_choice",
    "Each query gets the one value whose score is largest. Attention blends all of "
    "them, so that a gradient can reach the scores.",
    (
        WEIGHTS,
        f"nn.functional.one_hot({WEIGHTS}.argmax(-1), k.shape[-2]).to(v.dtype)",
    ),
)

# The causal mask ----------------------------------------------------------------------

TRIANGLE = ".tril(diagonal=t_k - t_q)"

causal_mask.fault(
    "one_short_when_rectangular",
    "The rectangular mask ends one position early: a query does not see itself.",
    ("diagonal=t_k - t_q", "diagonal=max(t_k - t_q - 1, 0)"),
)
causal_mask.fault(
    "upper_triangle",
    "Past and future are exchanged: the first query sees everything, the last one only "
    "itself. Row = query, column = key.",
    (".tril(", ".triu("),
)
causal_mask.fault(
    "own_position_hidden",
    "A query does not see its own position, so the first one sees nothing at all.",
    ("diagonal=t_k - t_q", "diagonal=t_k - t_q - 1"),
)
causal_mask.fault(
    "sees_the_next",
    "Every query sees one position too far: the very token that it has to predict.",
    ("diagonal=t_k - t_q", "diagonal=t_k - t_q + 1"),
)
causal_mask.fault(
    "inverted",
    "True stands where a query may not look. Here True means “may look”; "
    "nn.MultiheadAttention means the opposite.",
    (TRIANGLE, ".triu(diagonal=t_k - t_q + 1)"),
)
causal_mask.fault(
    "rectangle_open",
    "With fewer queries than keys nothing is hidden. Only the last query sees every "
    "key; those before it have later positions among the keys.",
    ("diagonal=t_k - t_q", "diagonal=0 if t_q == t_k else t_k"),
)
causal_mask.fault(
    "own_position_alone",
    "Each query sees its own position and nothing else; the past is hidden too.",
    (TRIANGLE, f"{TRIANGLE}.triu(diagonal=t_k - t_q)"),
)
causal_mask.fault(
    "aligned_top_left",
    "The queries are taken for the first positions. With fewer queries than keys they "
    "are the last ones, so the first query already sees the keys before it.",
    ("diagonal=t_k - t_q", ""),
)
causal_mask.fault(
    "keys_ignored",
    "The mask is square whatever `t_k` says.",
    ("torch.ones(t_q, t_k", "torch.ones(t_q, t_q"),
    ("diagonal=t_k - t_q", ""),
)
causal_mask.fault(
    "offset_reversed",
    "The diagonal is moved in the wrong direction, so the first queries see nothing. "
    "Print the mask for 2 queries and 5 keys: the last row should be all True.",
    ("diagonal=t_k - t_q", "diagonal=t_q - t_k"),
)
causal_mask.fault(
    "too_many_queries_accepted",
    "More queries than keys go through. The first of them would be positions before "
    "the beginning and see nothing, which nobody notices until the output is zeros.",
    ("if t_q > t_k", "if False"),
)
causal_mask.fault(
    "zero_taken_for_missing",
    "A `t_k` of 0 is taken for a missing one, because 0 counts as false. It is missing "
    "only when it is None.",
    ("t_q if t_k is None else t_k", "t_k or t_q"),
)
causal_mask.fault(
    "last_rows_of_none",
    "With no queries at all the slice `[-t_q:]` is `[0:]`, so every row comes back. "
    "Count from the front: the first row is number t_k − t_q.",
    (
        f"torch.ones(t_q, t_k, dtype=torch.bool){TRIANGLE}",
        "torch.ones(t_k, t_k, dtype=torch.bool).tril()[-t_q:]",
    ),
)

# The padding mask ---------------------------------------------------------------------

REAL = "positions < lengths[:, None]"
PLACED = "[:, None, None, :]"

padding_mask.fault(
    "one_too_many",
    "A row of 3 tokens has the positions 0, 1 and 2; position 3 is padding already.",
    (REAL, "positions <= lengths[:, None]"),
)
padding_mask.fault(
    "one_too_few",
    "The last real token of every row is hidden: positions start at 0.",
    (REAL, "positions < lengths[:, None] - 1"),
)
padding_mask.fault(
    "inverted",
    "True stands on the padding. Here True means “may look”; the key_padding_mask of "
    "nn.MultiheadAttention means the opposite.",
    (REAL, "positions >= lengths[:, None]"),
)
padding_mask.fault(
    "two_dimensions",
    "The shape is (B, t_k). Against scores (B, H, T_q, T_k) its rows would be taken "
    "for queries; two dimensions of size 1 make room for heads and queries.",
    (PLACED, ""),
)
padding_mask.fault(
    "queries_hidden",
    "The positions lie along the queries, (B, 1, t_k, 1). What has to be hidden is the "
    "padding among the keys, the last dimension.",
    (PLACED, "[:, None, :, None]"),
)
padding_mask.fault(
    "queries_hidden_too",
    "The rows of padding are hidden as well, as queries. Hide keys only: what comes out "
    "of padding is ignored later, and the mask stays one row for all queries.",
    (
        f"return ({REAL}){PLACED}",
        f"real = {REAL}\n    return (real[:, :, None] & real[:, None])[:, None]",
    ),
)
padding_mask.fault(
    "padding_on_the_left",
    "The last `lengths[b]` keys are taken for the real ones. Here padding stands at "
    "the end.",
    (REAL, "positions >= t_k - lengths[:, None]"),
)
padding_mask.fault(
    "longest_row_decides",
    "The mask ends at the longest row. There are `t_k` keys, and all rows may be "
    "shorter than that.",
    ("torch.arange(t_k", "torch.arange(int(lengths.max())"),
)

# Self-attention -----------------------------------------------------------------------

QUERIES = "self.w_q = nn.Linear(d_model, d_head, bias=False)"
KEYS = "self.w_k = nn.Linear(d_model, d_head, bias=False)"
VALUES = "self.w_v = nn.Linear(d_model, d_head, bias=False)"
CALL = "attention(self.w_q(x), self.w_k(x), self.w_v(x), mask)"
OUT = f"return {CALL}"

SelfAttention.fault(
    "shared_projection",
    "Queries and keys go through one and the same layer. Then A looks at B exactly as "
    "much as B at A, before the softmax; they need a matrix each.",
    (KEYS, "self.w_k = self.w_q"),
)
SelfAttention.fault(
    "one_projection_for_all",
    "Queries, keys and values go through one and the same layer. They need a matrix "
    "each: three times `nn.Linear(…)`, not one under three names.",
    (KEYS, "self.w_k = self.w_q"),
    (VALUES, "self.w_v = self.w_q"),
)
SelfAttention.fault(
    "queries_and_keys_exchanged",
    "w_q makes the keys and w_k the queries. It is the query that asks: its rows are "
    "the rows of the weights.",
    ("self.w_q(x), self.w_k(x)", "self.w_k(x), self.w_q(x)"),
)
SelfAttention.fault(
    "keys_and_values_exchanged",
    "w_k makes the values and w_v the keys.",
    ("self.w_k(x), self.w_v(x)", "self.w_v(x), self.w_k(x)"),
)
SelfAttention.fault(
    "queries_and_values_exchanged",
    "w_q makes the values and w_v the queries.",
    (CALL, "attention(self.w_v(x), self.w_k(x), self.w_q(x), mask)"),
)
SelfAttention.fault(
    "queries_compared_with_queries",
    "The queries are compared with themselves; w_k is not used.",
    ("self.w_k(x), self.w_v", "self.w_q(x), self.w_v"),
)
SelfAttention.fault(
    "keys_averaged",
    "The keys are averaged in place of the values; w_v is not used.",
    ("self.w_v(x), mask", "self.w_k(x), mask"),
)
SelfAttention.fault(
    "values_not_projected",
    "x itself is averaged. The values are x·w_v: what a position hands over is not "
    "all that it holds.",
    ("self.w_v(x), mask", "x, mask"),
)
SelfAttention.fault(
    "root_of_d_model",
    "The scores are divided by the root of d_model. They sum over the d_head numbers "
    "of queries and keys, so it is d_head that counts.",
    (
        "attention(self.w_q(x)",
        "attention(self.w_q(x) * (self.w_q.out_features / x.shape[-1]) ** 0.5",
    ),
)
SelfAttention.fault(
    "root_of_the_length",
    "The scores are divided by the root of the number of positions. They sum over the "
    "d_head numbers of queries and keys, so it is d_head that counts.",
    (
        "attention(self.w_q(x)",
        "attention(self.w_q(x) * (self.w_q.out_features / x.shape[-2]) ** 0.5",
    ),
)
SelfAttention.fault(
    "no_scaling",
    "The scores are not divided by the root of d_head.",
    (
        "attention(self.w_q(x)",
        "attention(self.w_q(x) * self.w_q.out_features ** 0.5",
    ),
)
SelfAttention.fault(
    "scaled_twice",
    "The queries are divided by the root of d_head, and `attention` divides again.",
    (
        "attention(self.w_q(x)",
        "attention(self.w_q(x) / self.w_q.out_features ** 0.5",
    ),
)
SelfAttention.fault(
    "output_scaled",
    "The output is divided by the root of d_head. `attention` has divided the scores "
    "already, and the average of the values needs no scale.",
    (OUT, f"{OUT} / self.w_q.out_features ** 0.5"),
)
SelfAttention.fault(
    "batch_and_time_exchanged",
    "Positions look at the same position of the other rows of the batch: batch and "
    "time are exchanged. Here the batch comes first.",
    (OUT, f"x = x.transpose(0, 1)\n        {OUT}.transpose(0, 1)"),
)
SelfAttention.fault(
    "always_causal",
    "The future is hidden although no mask was given. Which mask applies is the "
    "caller's choice.",
    ("self.w_v(x), mask", "self.w_v(x), causal_mask(x.shape[-2])"),
)
SelfAttention.fault(
    "weights_returned",
    "These are the attention weights. The values have yet to be averaged by them.",
    (CALL, "attention_weights(self.w_q(x), self.w_k(x), mask)"),
)
SelfAttention.fault(
    "mask_ignored",
    "The mask does not reach `attention`.",
    ("self.w_v(x), mask", "self.w_v(x)"),
)
SelfAttention.fault(
    "mask_inverted",
    "The mask is read the other way round. Here True means “may look”.",
    ("self.w_v(x), mask", "self.w_v(x), None if mask is None else ~mask"),
)
SelfAttention.fault(
    "positions_masked_as_queries",
    "The mask is turned round, so that its rows are keys and its columns queries.",
    ("self.w_v(x), mask", "self.w_v(x), None if mask is None else mask.mT"),
)
SelfAttention.fault(
    "nan_where_all_is_hidden",
    "A position that may look at nothing gives NaN. Your `attention` gives zeros there; "
    "use it.",
    (
        OUT,
        f"out = {CALL}\n"
        "        if mask is None:\n"
        "            return out\n"
        "        return out.masked_fill(~mask.any(-1, keepdim=True), torch.nan)",
    ),
)
SelfAttention.fault(
    "residual",
    "x is added to the output. The residual connection comes in lesson 06, around the "
    "layer, not in it.",
    (OUT, f"return x + {CALL}"),
)
SelfAttention.fault(
    "mask_of_the_first_call",
    "The mask of the first call is kept and used again. Every call brings its own.",
    (OUT, f"mask = self.__dict__.setdefault('kept', mask)\n        {OUT}"),
)
SelfAttention.fault(
    "mask_left_out_in_eval",
    "In eval() the mask is left out. It says who may look at whom in training and after "
    "it alike.",
    ("self.w_v(x), mask", "self.w_v(x), mask if self.training else None"),
)
SelfAttention.inherits(attention_weights, "softmax_over_queries")
