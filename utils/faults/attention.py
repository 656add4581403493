"""Lesson 02: mistakes in attention weights, masks and a head of self-attention."""

from utils.exercises.attention import (
    SelfAttention,
    attention,
    attention_weights,
    causal_mask,
    padding_mask,
)

# Scores and softmax -------------------------------------------------------------------

TURNED = "k.transpose(-2, -1)"
ROOT = "math.sqrt(q.shape[-1])"
WITHOUT_MASK = "torch.softmax(scores, dim=-1)"
WITH_MASK = "torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)"

attention_weights.fault(
    "keys_not_turned",
    "The product is taken of q and k as they are. It sums over the last dimension of "
    "the first and the last but one of the second: d_head must stand at both.",
    (TURNED, "k"),
)
attention_weights.fault(
    "keys_reshaped",
    "The keys get the shape `(d_head, T_k)` by a reshape, which mixes pieces of several "
    "keys in each column: dimensions have to be exchanged.",
    (TURNED, "k.reshape(*k.shape[:-2], k.shape[-1], k.shape[-2])"),
)
attention_weights.fault(
    "dimensions_from_the_front",
    "The dimensions to exchange are counted from the front. There may be two, three or "
    "four; the last two have fixed numbers only when counted from the end.",
    (TURNED, "k.transpose(1, 2)"),
)
attention_weights.fault(
    "softmax_over_queries",
    "The softmax runs over the queries, so the weights of each key sum to 1. It is the "
    "query that shares out its attention: its row, over all keys, sums to 1.",
    ("scores, dim=-1", "scores, dim=-2"),
    ("inf), dim=-1", "inf), dim=-2"),
)

attention_weights.fault(
    "no_scaling",
    "The scores are not divided by the root of d_head. They grow with d_head, the "
    "softmax sharpens and its gradient goes away.",
    (f"/ {ROOT}", ""),
)

SUM = "Each score sums over the d_head numbers of a vector, the last dimension of q"
for name, divisor, sentence in (
    (
        "multiplied_by_the_root",
        f"(1 / {ROOT})",
        "The scores are multiplied by the root of d_head, which makes large ones larger.",
    ),
    (
        "divided_by_d_head",
        "q.shape[-1]",
        "The scores are divided by d_head, not by its root (or by the root twice). Their "
        "variance grows like d_head, so their typical size grows like the root.",
    ),
    (
        "constant_divisor",
        "8",
        "The divisor is 8 whatever the width, which is right for d_head = 64 only.",
    ),
    (
        "root_of_d_model",
        "math.sqrt(q.shape[-1] * (q.shape[-3] if q.dim() > 3 else 1))",
        f"The divisor is the root of the width of all heads together. {SUM}.",
    ),
    (
        "root_of_the_length",
        "math.sqrt(k.shape[-2])",
        f"The divisor is the root of the number of keys. {SUM}.",
    ),
):
    attention_weights.fault(name, sentence, (ROOT, divisor))

attention_weights.fault(
    "scaled_after_softmax",
    "The weights are divided by the root of d_head after the softmax, so they no "
    "longer sum to 1, and large scores have saturated it already.",
    (f" / {ROOT}", ""),
    (WITHOUT_MASK, f"{WITHOUT_MASK} / {ROOT}"),
    (WITH_MASK, f"{WITH_MASK} / {ROOT}"),
)
attention_weights.fault(
    "no_softmax",
    "These are the scores. Softmax over the keys has yet to turn them into weights.",
    (WITHOUT_MASK, "scores"),
    (WITH_MASK, "scores.masked_fill(~mask, -torch.inf)"),
    ("return weights.masked_fill(~mask, 0)", "return weights"),
)
attention_weights.fault(
    "always_causal",
    "Later keys are hidden although no mask was given. Without one every query may "
    "look at every key; which mask applies is the caller's choice.",
    (
        WITHOUT_MASK,
        "torch.softmax(scores.masked_fill(torch.ones_like(scores).tril() == 0, "
        "-torch.inf), dim=-1)",
    ),
)

# The mask in the weights --------------------------------------------------------------

MASKED = "scores.masked_fill(~mask, -torch.inf)"
AFTER = "return weights.masked_fill(~mask, 0)"

attention_weights.fault(
    "mask_ignored", "The mask has no effect.", ("if mask is None", "if True")
)
attention_weights.fault(
    "mask_inverted",
    "The mask is read the other way round. Here True means “may look”; "
    "nn.MultiheadAttention means “hidden” by it, and much code follows that.",
    (MASKED, "scores.masked_fill(mask, -torch.inf)"),
    (AFTER, "return weights.masked_fill(mask, 0)"),
)
attention_weights.fault(
    "mask_added",
    "The mask is added to the scores as 0 and 1. A hidden key then has a score that is "
    "lower by 1, which is still a weight; it needs −inf.",
    (MASKED, "scores + mask"),
    (AFTER, "return weights"),
)
attention_weights.fault(
    "hidden_scores_are_zero",
    "A hidden key gets the score 0. After the exponential that is a weight like any "
    "other, exp(0) = 1 before the division.",
    (MASKED, "scores * mask"),
    (AFTER, "return weights"),
)
attention_weights.fault(
    "masked_after_softmax",
    "The weights are set to 0 after the softmax, and the rest no longer sums to 1. "
    "Hidden keys have to be out before the softmax divides.",
    (MASKED, "scores"),
)
attention_weights.fault(
    "renormalised_after_softmax",
    "The weights are set to 0 after the softmax and divided by their sum. If a hidden "
    "key has by far the largest score, all others are 0 by then: hide it before.",
    (MASKED, "scores"),
    (AFTER, "w = weights * mask\n    return w / w.sum(-1, keepdim=True)"),
)
for name, score, result in (
    ("hidden_scores_of_ten_thousand", "-1e4", "weights"),
    ("hidden_scores_end_at_65504", "-65504.0", "weights.masked_fill(~mask, 0)"),
):
    attention_weights.fault(
        name,
        "Hidden keys get a finite score, −10,000 or −65,504 or so. A score that is allowed "
        "can be lower than that; only −inf is below everything.",
        (MASKED, f"scores.masked_fill(~mask, {score})"),
        (AFTER, f"return {result}"),
    )
attention_weights.fault(
    "finite_instead_of_infinite",
    "Hidden keys get a very negative score in place of −inf. Where all are hidden these "
    "are equal, and the query gets the mean of what it may not see, not zeros.",
    (MASKED, "scores.masked_fill(~mask, torch.finfo(scores.dtype).min)"),
    (AFTER, "return weights"),
)
attention_weights.fault(
    "nan_where_all_is_hidden",
    "A row of −inf gives NaN, and one NaN spreads to everything that is computed from "
    "it. A query that may look at nothing should get zeros.",
    (AFTER, "return weights"),
)
attention_weights.fault(
    "nan_in_the_gradient",
    "The result is right, but a row of −inf has made NaN on the way, and its gradient "
    "reaches q and k through a sum or a product. What hides scores must cut it off.",
    (MASKED, "scores + torch.zeros_like(scores).masked_fill(~mask, -torch.inf)"),
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
    "softmax_twice",
    "Softmax is taken of weights that have been through it already, and they come out "
    "nearly equal. `attention_weights` gives what multiplies the values.",
    (WEIGHTS, f"torch.softmax({WEIGHTS}, -1)"),
)

# The causal mask ----------------------------------------------------------------------

for name, diagonal, sentence in (
    (
        "own_position_hidden",
        "t_k - t_q - 1",
        "A query does not see its own position, so the first one sees nothing at all.",
    ),
    (
        "sees_the_next",
        "t_k - t_q + 1",
        "Every query sees one position too far: the very token that it has to predict.",
    ),
    (
        "aligned_top_left",
        "0",
        "The queries are taken for the first positions. They are the last ones, so the "
        "first query already sees the keys before it.",
    ),
    (
        "offset_reversed",
        "t_q - t_k",
        "The diagonal is moved in the wrong direction, so the first queries see nothing. "
        "Print the mask for 2 queries and 5 keys: the last row should be all True.",
    ),
):
    causal_mask.fault(name, sentence, ("diagonal=t_k - t_q", f"diagonal={diagonal}"))

causal_mask.fault(
    "last_rows_of_none",
    "With no queries at all the slice `[-t_q:]` is `[0:]`, so every row comes back. "
    "Count from the front: the first row is number t_k − t_q.",
    (
        "torch.ones(t_q, t_k, dtype=torch.bool).tril(diagonal=t_k - t_q)",
        "torch.ones(t_k, t_k, dtype=torch.bool).tril()[-t_q:]",
    ),
)

# The padding mask ---------------------------------------------------------------------

REAL = "positions < lengths[:, None]"

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

LAYER = "nn.Linear(d_model, d_head, bias=False)"
CALL = "attention(self.w_q(x), self.w_k(x), self.w_v(x), mask)"

for name, shared in (("shared_projection", "k"), ("one_projection_for_all", "kv")):
    SelfAttention.fault(
        name,
        "Queries and keys go through one and the same layer. Then A looks at B exactly "
        "as much as B at A, before the softmax; all three need a matrix each.",
        *((f"self.w_{x} = {LAYER}", f"self.w_{x} = self.w_q") for x in shared),
    )
for name, (q, k, v) in (
    ("queries_and_keys_exchanged", "kqv"),
    ("keys_and_values_exchanged", "qvk"),
    ("queries_and_values_exchanged", "vkq"),
    ("queries_compared_with_queries", "qqv"),
    ("keys_averaged", "qkk"),
):
    SelfAttention.fault(
        name,
        f"Queries come from w_{q}, keys from w_{k} and values from w_{v}. Queries (who "
        "asks), keys (who is asked) and values (what is handed over) need w_q, w_k, w_v.",
        (CALL, f"attention(self.w_{q}(x), self.w_{k}(x), self.w_{v}(x), mask)"),
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
    ("self.w_q(x)", "self.w_q(x * (self.w_q.out_features / x.shape[-1]) ** 0.5)"),
)
SelfAttention.fault(
    "batch_and_time_exchanged",
    "Positions look at the same position of the other rows of the batch: batch and "
    "time are exchanged. Here the batch comes first.",
    (f"return {CALL}", f"x = x.transpose(0, 1)\n        return {CALL}.transpose(0, 1)"),
)
SelfAttention.inherits(
    attention_weights,
    "softmax_over_queries",
    "no_scaling",
    "divided_by_d_head",
    "root_of_the_length",
    "always_causal",
    "mask_ignored",
    "mask_inverted",
    "nan_where_all_is_hidden",
)
