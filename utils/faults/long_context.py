"""Lesson 14: mistakes in masks for long texts and in attention that is not quadratic."""

from utils.exercises.long_context import (
    chunked_attention,
    feature_map,
    linear_attention,
    linear_attention_step,
    long_context_in_a_decoder,
    sink_mask,
    sliding_window_mask,
    strided_mask,
)

# Masks --------------------------------------------------------------------------------

QUERIES = "keys[t_k - t_q :, None]"
WINDOW = "(back >= 0) & (back < window)"
NEAR = "sliding_window_mask(t_q, t_k, window)"
FIRST = "torch.arange(t_k) < n_sinks"
STRIDED = "((back < stride) | (back % stride == 0))"
FROM_THE_TOP = {
    sliding_window_mask: [(QUERIES, "keys[:t_q, None]")],
    sink_mask: [
        (NEAR, "sliding_window_mask(t_k, t_k, window)[:t_q]"),
        ("causal_mask(t_q, t_k)", "causal_mask(t_k)[:t_q]"),
    ],
    strided_mask: [(QUERIES, "keys[:t_q, None]")],
}
for mask, edits in FROM_THE_TOP.items():
    mask.fault(
        "aligned_top_left",
        "The queries are taken for the first positions. They are the last `t_q` of the "
        "`t_k`, so query 0 stands at position t_k − t_q.",
        *edits,
    )
for mask in (sliding_window_mask, strided_mask):
    mask.fault(
        "rows_begin_too_late",
        "The rows begin too late. Query 0 stands at position t_k − t_q.",
        (QUERIES, "keys[t_q:, None]"),
    )
    mask.fault(
        "future_visible",
        "What comes later is not hidden.",
        ("(back >= 0) & ", ""),
    )
    mask.fault(
        "future_alone",
        "It shows what comes later in place of what came before.",
        ("back >= 0", "back <= 0"),
    )

for name, (sentence, *edits) in {
    "itself_not_counted": (
        "A query sees one position too many: its own counts.",
        ("back < window", "back <= window"),
    ),
    "itself_hidden": (
        "A query sees the positions before it and not itself.",
        (WINDOW, "(back > 0) & (back <= window)"),
    ),
    "one_too_few": (
        "The window is one too short.",
        ("back < window", "back < window - 1"),
    ),
    "both_sides": (
        "The window reaches ahead as far as back. Nobody may see what comes later.",
        (WINDOW, "back.abs() < window"),
    ),
    "outside_of_the_window": (
        "It shows what lies before the window and hides the window itself.",
        (WINDOW, "(back >= window)"),
    ),
    "window_ignored": ("This is the causal mask.", (" & (back < window)", "")),
    "blocks_instead_of_a_window": (
        "The text is cut into blocks, and a query sees its own block alone. The first "
        "query of a block sees just itself; a window moves along with every query.",
        ("back < window", f"{QUERIES} // window == keys // window"),
    ),
}.items():
    sliding_window_mask.fault(name, sentence, *edits)

for name, (sentence, *edits) in {
    "sinks_ahead": (
        "The first queries see sinks that come after them. A sink is hidden from those "
        "before it, like any position.",
        ("(causal_mask(t_q, t_k) & first)", "first"),
    ),
    "sinks_alone": (
        "A query sees sinks in its window alone: “or” became “and”.",
        ("near |", "near &"),
    ),
    "window_missing": ("A query sees the sinks alone.", ("near | ", "")),
    "one_sink_too_many": (
        "There is one sink more than asked for: positions count from 0.",
        ("< n_sinks", "<= n_sinks"),
    ),
    "rows_opened": (
        "The first *queries* see all before them. The first keys stay visible.",
        (FIRST, "(torch.arange(t_q) < n_sinks)[:, None]"),
    ),
}.items():
    sink_mask.fault(name, sentence, *edits)

for name, (sentence, *edits) in {
    "nearest_missing": (
        "Only every stride-th position is visible; the nearest ones are missing.",
        (STRIDED, "(back % stride == 0)"),
    ),
    "far_missing": ("This is a sliding window.", (STRIDED, "(back < stride)")),
    "both_conditions": (
        "“Or” became “and”: a query sees just itself.",
        ("stride) |", "stride) &"),
    ),
    "fixed_columns": (
        "The far positions are the same columns for every query, the multiples of the "
        "stride: the paper's “fixed” pattern. Count back from the query.",
        ("back % stride", "keys % stride"),
    ),
    "nearest_future_visible": (
        "Near positions that come later are visible: a difference may be negative.",
        (
            f"(back >= 0) & {STRIDED}",
            f"(back.abs() < stride) | (back >= 0) & {STRIDED}",
        ),
    ),
}.items():
    strided_mask.fault(name, sentence, *edits)

# Attention in blocks ------------------------------------------------------------------

START = "max(0, start + t_k - t_q - window + 1)"
MASK = "sliding_window_mask(end - start, last - first, window)"

for name, (sentence, *edits) in {
    "own_block_alone": (
        "A block sees its own keys and no others, so its first query sees just itself. "
        "Its window reaches into the blocks before.",
        (START, "start + t_k - t_q"),
    ),
    "one_block_back": (
        "A block sees itself and the block before. A long window reaches further.",
        (START, "max(0, start + t_k - t_q - block)"),
    ),
    "one_key_missing": (
        "The first query of a block misses the farthest key of its window: it stands "
        "window − 1 positions back.",
        ("- window + 1", "- window + 2"),
    ),
    "negative_start": (
        "A slice begins at a negative number, which counts from the end of the text. "
        "Take 0 where the window begins before the text.",
        (START, START[len("max(0, ") : -1]),
    ),
    "no_mask_in_the_block": (
        "All queries of a block see all keys of the slice. Each has its own window.",
        ("near_v, mask", "near_v"),
    ),
    "mask_inverted": ("The mask is read inverted.", ("near_v, mask", "near_v, ~mask")),
    "window_ignored_in_the_block": (
        "Within the slice only the future is hidden, so later queries of a block see "
        "more than their window.",
        (MASK, "causal_mask(end - start, last - first)"),
    ),
    "causal_from_the_top_left": (
        "Within a slice the mask takes the block's queries for the *first* positions, as "
        "`tril()` does. They are the last of the slice, and each has a window.",
        (MASK, "torch.ones(end - start, last - first).tril().bool()"),
    ),
    "window_one_too_long": (
        "The window is one too long: a query's own position counts.",
        ("- window + 1", "- window"),
        ("first, window)", "first, window + 1)"),
    ),
    "last_queries_lost": (
        "The last queries are missing where the text is no multiple of the block.",
        ("range(0, t_q, block)", "range(0, t_q // block * block, block)"),
    ),
    "aligned_top_left": (
        "The queries are taken for the first positions. They are the last `T_q`.",
        (START, "max(0, start - window + 1)"),
        ("last = end + t_k - t_q", "last = end"),
    ),
    "stacked": (
        "The blocks are stacked along a new dimension. `cat` joins along an old one.",
        ("torch.cat", "torch.stack"),
    ),
    "joined_along_the_first_dimension": (
        "The blocks are joined along dimension 0. Time is the last but one.",
        ("outputs, dim=-2", "outputs, dim=0"),
    ),
    "quadratic_of_few_queries": (
        "With fewer queries than keys the work is that of full attention: a slice begins "
        "where it would if query 0 stood at position 0. Shift both ends.",
        (START, "max(0, start - window + 1)"),
    ),
    "quadratic_work": (
        "The result is right, but the work is that of full attention: scores, or cells "
        "of a mask, are made for all T_q × T_k pairs, for all keys before a block, or for "
        "blocks that are not `block` long, and most of them thrown away.",
        (START, "0"),
    ),
    "block_ignored": (
        "The result is right, but `block` changes nothing. It says how many queries are "
        "treated at once.",
        ("range(0, t_q, block)", "range(0, t_q, 16)"),
        ("start + block", "start + 16"),
    ),
}.items():
    chunked_attention.fault(name, sentence, *edits)

# Features, in both forms of linear attention too --------------------------------------

PHI = {
    "rounds_to_zero": (
        "φ is elu(x) + 1, which is right on paper. But elu(−20) is −1 + 0.000000002, "
        "which rounds to −1, and the feature to 0: a query all below −17 then has no "
        "weight at all, and divides 0 by 0. Below 0 write e^x itself.",
        "torch.nn.functional.elu(x) + 1",
    ),
    "no_one_added": ("φ is elu(x). Add 1.", "torch.nn.functional.elu(x)"),
    "relu": ("φ is relu(x): flat below 0, and without a gradient.", "x.relu()"),
    "relu_plus_one": ("Below 0 φ is 1. There it should be e^x.", "x.relu() + 1"),
    "exponential": ("φ is e^x above 0 too; there it is x + 1.", "x.exp()"),
    "softplus": ("φ is softplus, log(1 + e^x).", "torch.nn.functional.softplus(x)"),
}
GRADIENTS = {
    "nan_in_the_gradient": (
        "e^x of a large x is infinite, on the side that is not chosen. Its gradient is 0 "
        "times infinity, NaN. Keep x from being large before the exponential.",
        "torch.where(x > 0, x + 1, x.exp())",
    ),
    "both_slopes_at_zero": (
        "The gradient at exactly 0 is 2: both parts of the sum count their slope there. "
        "It is 1 on either side, and at 0.",
        "x.clamp(min=0) + x.clamp(max=0).exp()",
    ),
}
for name, (sentence, formula) in (PHI | GRADIENTS).items():
    old = "torch.where(x > 0, x + 1, x.clamp(max=0).exp())"
    feature_map.fault(name, sentence, (old, formula))
linear_attention.inherits(feature_map, *PHI)
linear_attention_step.inherits(feature_map, *PHI)

# Linear attention, both forms ---------------------------------------------------------

MAPPED = "q, k = feature_map(q), feature_map(k)"
TOP = "top / (q * z).sum(dim=-1, keepdim=True)"
READ = "(q[..., None, :] @ s).squeeze(-2)"

for name, (sentence, *edit) in {
    "queries_not_mapped": (
        "The queries are used as they are, so weights are negative. φ belongs on both.",
        (MAPPED, "k = feature_map(k)"),
    ),
    "keys_not_mapped": (
        "The keys are used as they are, so weights are negative. φ belongs on both.",
        (MAPPED, "q = feature_map(q)"),
    ),
    "nothing_mapped": (
        "Queries and keys are used as they are, so weights are negative and their sum may "
        "be 0. φ makes them positive.",
        (MAPPED, ""),
    ),
    "scaled_like_scores": (
        "Queries are divided by the root of d before φ. That root belongs to the softmax.",
        (MAPPED, f"q = q / q.shape[-1] ** 0.5\n    {MAPPED}"),
    ),
    "dimension_left": (
        "The dimension of 1 that made a row of the query is still there.",
        (READ, READ.removesuffix(".squeeze(-2)")),
    ),
}.items():
    linear_attention.fault(name, sentence, *edit)
    linear_attention_step.fault(name, sentence, *edit)

for name, (sentence, divisor, divisor_of_all) in {
    "not_normalised": (
        "The sum of the weighted values is not divided by the sum of the weights.",
        "1",
        "1",
    ),
    "divided_by_the_sum_of_keys": (
        "The divisor is the sum of the key features alone. The weights are φ(q)·φ(k), so "
        "the query belongs into it.",
        "z.sum(dim=-1, keepdim=True)",
        "z.sum(dim=-1, keepdim=True)[..., None]",
    ),
    "divisor_without_its_last_dimension": (
        "The divisor has lost its last dimension, so its numbers, one a query, meet the "
        "columns of the values. Keep a dimension of 1, `keepdim=True` or `[..., None]`.",
        "(q * z).sum(dim=-1)",
        "(q @ z[..., None]).squeeze(-1)",
    ),
    "one_divisor_for_all": (
        "One divisor, summed over everything, serves all queries. Each has its own.",
        "(q * z).sum()",
        "(q @ z[..., None]).sum()",
    ),
    "something_added_to_the_divisor": (
        "Something like 1e-6 is added to the divisor, as the authors' code does, or a "
        "least value is set for it. Where all features are small, that is more than the "
        "sum itself, and the output is no average any more. φ is above 0: so is the sum.",
        "((q * z).sum(dim=-1, keepdim=True) + 1e-6)",
        "(q @ z[..., None] + 1e-6)",
    ),
}.items():
    at_once = ("q @ s / (q @ z[..., None])", f"q @ s / {divisor_of_all}")
    linear_attention.fault(name, sentence, (TOP, f"top / {divisor}"), at_once)
    linear_attention_step.fault(name, sentence, (TOP, f"top / {divisor}"))

# Linear attention, all at once --------------------------------------------------------

SUM_S = "s = (k[..., :, None] * v[..., None, :]).cumsum(dim=-3)"
SUM_Z = "k.cumsum(dim=-2)"
LAST_S, LAST_Z = "s[..., t_k - t_q :, :, :]", f"{SUM_Z}[..., t_k - t_q :, :]"

for name, (sentence, *edits) in {
    "divisor_not_causal": (
        "The divisor sums over all keys, those after the query too.",
        (LAST_Z, f"{SUM_Z}[..., -1:, :]"),
    ),
    "values_not_causal": (
        "The weighted values are summed over all keys, those after the query too.",
        (LAST_S, "s[..., -1:, :, :]"),
    ),
    "causal_ignored": (
        "Every query sees every key, with `causal=True` too.",
        ("if not causal", "if True"),
    ),
    "always_causal": (
        "Later keys are hidden with `causal=False` too.",
        ("if not causal", "if False"),
    ),
    "itself_left_out": (
        "A query does not see its own position, and the first one sees nothing: 0 / 0 is "
        "NaN. The sums run to the query's own position, which counts.",
        (SUM_S, SUM_S.replace(").cumsum", ")\n    s = s.cumsum") + " - s"),
        (SUM_Z, f"({SUM_Z} - k)"),
    ),
    "aligned_top_left": (
        "The queries are taken for the first positions. They are the last `T_q`.",
        (LAST_S, "s[..., :t_q, :, :]"),
        (LAST_Z, f"{SUM_Z}[..., :t_q, :]"),
    ),
    "earlier_keys_dropped": (
        "With fewer queries than keys the sums begin at the first query. They begin at "
        "the first key: the queries are last, and see all before them.",
        (SUM_S, f"k, v = k[..., -t_q:, :], v[..., -t_q:, :]\n    {SUM_S}"),
        (LAST_S, "s"),
        (LAST_Z, SUM_Z),
    ),
    "s_turned_round": (
        "S is turned round, (d_v, d). A query can be multiplied by φ(k)ᵀv, (d, d_v).",
        ("k.mT @ v", "v.mT @ k"),
    ),
    "softmax_attention": (
        "This is softmax attention. The weights are φ(q)·φ(k), divided by their sum.",
        (
            MAPPED,
            "return attention(q, k, v, causal_mask(t_q, t_k) if causal else None)",
        ),
    ),
    "table_of_weights": (
        "The result is right, but all T_q × T_k weights are computed, so the cost is that "
        "of softmax attention. Change the order of the products.",
        ("s, z = k.mT @ v, k.sum(dim=-2)", "s, z = q @ k.mT, k.sum(dim=-2)"),
        ("q @ s /", "s @ v /"),
    ),
    "table_of_weights_when_causal": (
        "Without a mask the cost grows with the length; causal, all T_q × T_k weights are "
        "computed. Keep running totals in place of the table.",
        (SUM_S, "w = (q @ k.mT).tril(t_k - t_q)\n    return w @ v / w.sum(-1, True)"),
    ),
}.items():
    linear_attention.fault(name, sentence, *edits)

# Linear attention, one step -----------------------------------------------------------

NEW = "k[..., :, None] * v[..., None, :]"
OLD_STATE = "s, z = (0, 0) if state is None else state"

for name, (sentence, *edits) in {
    "read_before_written": (
        "The state is read before the new position is in it, so a position does not see "
        "itself.",
        (f"s = s + {NEW}", f"old_s, s = s + 0 * {NEW}, s + {NEW}"),
        ("z = z + k", "old_z, z = z + 0 * k, z + k"),
        ("@ s)", "@ old_s)"),
        ("q * z", "q * old_z"),
    ),
    "s_overwritten": ("s holds the last position alone.", ("s + k", "k")),
    "z_overwritten": ("z holds the last position alone.", ("z + k", "k")),
    "both_overwritten": (
        "The state holds the last position alone. Both parts are sums over all so far.",
        (OLD_STATE, "s, z = 0, 0"),
    ),
    "outer_product_turned_round": (
        "The product is v down and φ(k) across, (d_v, d). s is (d, d_v).",
        (NEW, "v[..., :, None] * k[..., None, :]"),
    ),
    "vectors_alone": (
        "The product is one of two vectors. Batches and heads may stand in front.",
        (NEW, "torch.outer(k, v)"),
    ),
    "z_not_mapped": (
        "z is the sum of the keys as they are. Both sums take φ(k), so that the divisor "
        "is the sum of the same weights.",
        (MAPPED, f"unmapped = k\n    {MAPPED}"),
        ("z + k", "z + unmapped"),
    ),
    "no_start": (
        "The first step fails: `state` is None there, which cannot be unpacked.",
        (OLD_STATE, "s, z = state"),
    ),
}.items():
    linear_attention_step.fault(name, sentence, *edits)

# All parts together -------------------------------------------------------------------

for mask in (sliding_window_mask, sink_mask):
    long_context_in_a_decoder.fault(
        f"{mask.name}_from_the_top_left",
        f"`{mask.name}` takes the queries for the first positions: a few queries see the "
        "beginning of the text.",
        *FROM_THE_TOP[mask],
        edited=mask.name,
    )
for name, (part, sentence, *edits) in {
    "block_ignores_the_mask": (
        "Block",
        "The block gives the same under every mask: the mask does not reach attention.",
        ("mask=mask, ", ""),
    ),
    "block_reads_masks_inverted": (
        "Block",
        "The block reads True as “hidden”. In this course it means “may look”.",
        ("mask=mask", "mask=~mask"),
    ),
    "heads_not_in_front": (
        "split_heads",
        "`split_heads` cuts the stream as if it lay in memory head by head.",
        (
            ".unflatten(-1, (n_heads, -1)).transpose(1, 2)",
            ".view(len(x), n_heads, -1, 8)",
        ),
    ),
    "heads_tiled": (
        "repeat_kv",
        "`repeat_kv` gives the heads in turn, 0, 1, 0, 1. A group's are neighbours.",
        ("repeat_interleave(group_size, dim=1)", "repeat(1, group_size, 1, 1)"),
    ),
    "rope_in_halves": (
        "rope",
        "`rope` turns the halves of a head against each other. Neighbours are pairs.",
        ("x[..., 0::2], x[..., 1::2]", "x.chunk(2, dim=-1)"),
        ("torch.stack((", "torch.cat(("),
        ("turned.flatten(-2)", "turned"),
    ),
}.items():
    long_context_in_a_decoder.fault(name, sentence, *edits, edited=part)
