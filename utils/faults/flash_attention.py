"""Lesson 11: mistakes in online softmax, FlashAttention, its traffic and its kernel."""

from utils.exercises.flash_attention import (
    FlashAttention,
    flash_attention,
    flash_in_the_model,
    flash_kernel,
    hbm_bytes,
    online_softmax,
)

# What is said of more than one of them ------------------------------------------------

INVERTED = (
    "What was summed so far is multiplied by exp(new − old) where exp(old − new) is "
    "right (one well-known paper prints it so). A larger maximum makes old terms smaller."
)
INFINITE = (
    "What was summed so far is multiplied by exp(new − old) where exp(old − new) is "
    "right. At first old is −∞, so that the factor is ∞, and ∞ · 0 is NaN."
)
OLD_MAXIMUM = (
    "The exponentials are relative to the maximum before this block, which begins at "
    "−∞. Update the maximum first, then take the exponentials."
)
STARTS_AT_ZERO = (
    "The maximum starts at 0. Where all scores are far below 0, all exponentials "
    "underflow. What is the maximum of nothing?"
)
ONE_MAXIMUM = (
    "One maximum is used for all queries. A query far below it loses all its terms: take "
    "the maximum over the last dimension."
)
MISSING_KEYS = (
    "Keys past the end are filled up with zeros. A key of zeros has the score 0, which is "
    "a weight like any other: it needs −inf, or must not be there."
)
KEPT_IN_HALF = (
    "The output so far is kept in the dtype of q, so that small terms vanish beside a "
    "large one. Convert it when the last block has come."
)
SUM_NOT_RESCALED = "The output is corrected when a larger score comes, the sum is not."
OUTPUT_NOT_RESCALED = (
    "The sum is corrected when a larger score comes, the output is not."
)

# Online softmax -----------------------------------------------------------------------

OLD_SUM = "total * torch.exp(maximum - shift)"
NEW_TERMS = "torch.exp(block - shift[..., None])"
BOTH = "return maximum, total"

online_softmax.fault(
    "hidden_first_block",
    "Where a row's first block is −inf throughout, the largest score so far is −inf too: "
    "exp(−inf − (−inf)) is NaN, and a NaN never leaves a sum again.",
    ("new.masked_fill(new == -torch.inf, 0)", "new"),
)
online_softmax.fault(
    "half_precision_sums",
    "The sum is kept in the dtype that came in, and converted at the end. In float16 a "
    "long sum stops growing: 2048 + 1 is 2048.",
    ("torch.promote_types(block.dtype, torch.float32)", "block.dtype"),
    (
        BOTH,
        "high = torch.promote_types(block.dtype, torch.float32)\n"
        "    return maximum.to(high), total.to(high)",
    ),
)
online_softmax.fault(
    "not_rescaled",
    "The sum so far is not corrected when a larger score comes.",
    (OLD_SUM, "total"),
)
online_softmax.fault(
    "rescaling_inverted",
    INVERTED,
    (OLD_SUM, "torch.where(total == 0, total, total * torch.exp(shift - maximum))"),
)
online_softmax.fault(
    "infinite_rescaling", INFINITE, (OLD_SUM, "total * torch.exp(shift - maximum)")
)
online_softmax.fault(
    "infinite_terms",
    OLD_MAXIMUM,
    ("block - shift[..., None]", "block - maximum[..., None]"),
)
online_softmax.fault(
    "not_shifted",
    "The total sums exp(score), which overflows at 89, not exp(score − maximum).",
    (OLD_SUM, "total"),
    (NEW_TERMS, "torch.exp(block)"),
)
online_softmax.fault(
    "logarithm_returned",
    "The second result is the log-sum-exp. Return the sum relative to the maximum.",
    (BOTH, "return maximum, maximum + total.log()"),
)
online_softmax.fault(
    "results_exchanged",
    "The maximum is asked for first, then the total: they are exchanged.",
    (BOTH, "return total, maximum"),
)
online_softmax.fault(
    "two_passes",
    "The blocks are gone through twice, first for the maximum and then for the sum. "
    "They come once; the second time there is nothing left.",
    (OLD_SUM, "total"),
    (f"        total = total + {NEW_TERMS}.sum(dim=-1)\n", ""),
    (
        BOTH,
        "for block in blocks:\n"
        f"        total = total + {NEW_TERMS}.to(total.dtype).sum(dim=-1)\n"
        f"    {BOTH}",
    ),
)

# Attention in blocks ------------------------------------------------------------------

FACTOR = "torch.exp(maximum - new)"
EVERY_BLOCK = ("causal and right > end - n + 1", "causal")  # every block is masked

flash_attention.fault(
    "half_precision_sums",
    "The sums, or the log-sum-exp alone, are in the dtype that came in. A long sum in "
    "float16 loses small terms, and every weight of the backward pass its precision.",
    ("torch.promote_types(q.dtype, torch.float32)", "q.dtype"),
)
flash_attention.fault(
    "weights_in_half_precision",
    "The weights are converted to the dtype of v before the product. In float16 a "
    "weight below 3e-8 is 0; convert the values instead.",
    ("weights @ v_block", "weights.to(v.dtype).to(high) @ v_block"),
)
flash_attention.fault(
    "output_kept_in_half_precision",
    KEPT_IN_HALF,
    ("maximum = new\n", "maximum, output = new, output.to(q.dtype).to(high)\n"),
)
flash_attention.fault(
    "starts_at_zero",
    STARTS_AT_ZERO,
    ("q_block.new_full((*batch, n), -torch.inf)", "q_block.new_zeros((*batch, n))"),
)
flash_attention.fault(
    "no_maximum",
    "No maximum is subtracted: beyond a score of 88 the exponential overflows.",
    ("torch.maximum(maximum, scores.amax(dim=-1))", "torch.zeros_like(maximum)"),
)
flash_attention.fault(
    "hidden_scores_are_minus_1000",
    "Hidden scores get a negative number, and allowed ones can be lower. Not than −inf.",
    ("masked_fill(~seen, -torch.inf)", "masked_fill(~seen, -1000.0)"),
    EVERY_BLOCK,
)
flash_attention.fault(
    "missing_keys_score_zero",
    MISSING_KEYS,
    (
        "high = torch",
        "more = -t_k % block_k\n"
        "    k = torch.nn.functional.pad(k, (0, 0, 0, more))\n"
        "    v = torch.nn.functional.pad(v, (0, 0, 0, more))\n"
        "    t_k, t_q = t_k + more, t_q\n"
        "    high = torch",
    ),
)
flash_attention.fault(
    "rescaling_inverted",
    INVERTED,
    (FACTOR, "torch.exp(new - maximum).masked_fill(maximum == -torch.inf, 0)"),
)
flash_attention.fault(
    "infinite_rescaling", INFINITE, (FACTOR, "torch.exp(new - maximum)")
)
flash_attention.fault(
    "old_maximum_subtracted",
    OLD_MAXIMUM,
    ("scores - new[..., None]", "scores - maximum[..., None]"),
)
flash_attention.fault(
    "one_maximum_for_all_rows", ONE_MAXIMUM, ("scores.amax(dim=-1)", "scores.max()")
)
flash_attention.fault(
    "softmax_of_each_block",
    "Each block of scores goes through a softmax of its own, so that every block "
    "counts the same. The weights are exp(score − maximum), divided at the end.",
    ("torch.exp(scores - new[..., None])", "torch.softmax(scores, dim=-1)"),
)
flash_attention.fault("sum_not_rescaled", SUM_NOT_RESCALED, ("total * shrink", "total"))
flash_attention.fault(
    "output_not_rescaled", OUTPUT_NOT_RESCALED, ("output * shrink[..., None]", "output")
)

# Its gradient -------------------------------------------------------------------------

AGAIN = "torch.exp(scores - lse[..., rows, None])"

FlashAttention.fault(
    "settings_shared",
    "`causal` and the block sizes are kept where the next call overwrites them, on the "
    "class or in a global. All layers go forward before backward comes: use `ctx`.",
    ("ctx.causal, ctx.block_q", "FlashAttention.causal, ctx.block_q"),
    ("if ctx.causal else", "if FlashAttention.causal else"),
    ("if ctx.causal and", "if FlashAttention.causal and"),
)
FlashAttention.fault(
    "settings_not_passed_on",
    "Forward calls `flash_attention` with q, k and v alone: `causal` and the block "
    "sizes are not passed on.",
    ("flash_attention(q, k, v, causal, block_q, block_k)", "flash_attention(q, k, v)"),
)
FlashAttention.fault(
    "half_precision_sums",
    "The gradients are summed in half precision. A key collects a little from very "
    "many queries, and beside a large sum a little is lost: sum in float32.",
    ("torch.zeros_like(x, dtype=high)", "torch.zeros_like(x)"),
)
FlashAttention.fault(
    "lse_in_half_precision",
    "The log-sum-exp is kept in half precision. An error of 0.1 in it is one of 10 % "
    "in every weight.",
    ("(q, k, v, output, lse)", "(q, k, v, output, lse.to(q.dtype).to(lse.dtype))"),
)
FlashAttention.fault(
    "exponentials_overflow",
    "The weights are exp(score)/exp(log-sum-exp). Both overflow at a score of 89, "
    "and ∞/∞ is NaN: exp(score − log-sum-exp) does not.",
    (AGAIN, "torch.exp(scores) / torch.exp(lse[..., rows, None])"),
)
FlashAttention.fault(
    "hidden_weights_overflow",
    "The weights are multiplied by the mask. exp(score − log-sum-exp) of a hidden "
    "key may overflow, and inf · 0 is NaN: replace them, with `masked_fill`.",
    (
        "weights.masked_fill(~seen.tril(end - n - left), 0)",
        "weights * seen.tril(end - n - left)",
    ),
)
FlashAttention.fault(
    "softmax_of_the_block",
    "The weights are a softmax over the block's own keys. A weight is relative to "
    "all keys: exp(score − log-sum-exp), with the log-sum-exp that was kept.",
    (AGAIN, "torch.softmax(scores, dim=-1)"),
)
FlashAttention.fault(
    "row_sums_of_the_block",
    "D is summed over the block's own keys, Σ P ∘ dP. It runs over all of them; the "
    "sum of dO ∘ O is the same number and needs no keys.",
    (
        "weights * (d_weights - row_sums[..., rows, None])",
        "weights * (d_weights - (weights * d_weights).sum(dim=-1, keepdim=True))",
    ),
)

# Traffic ------------------------------------------------------------------------------

CAUSAL_KEYS = "min(top + block, t)"

hbm_bytes.fault(
    "fixed_size",
    "`bytes_per_number` has no effect: 2 bytes are taken throughout.",
    ("output) * bytes_per_number", "output) * 2"),
    ("numbers * bytes_per_number", "numbers * 2"),
)
hbm_bytes.fault(
    "causal_up_to_the_first_query",
    "Causal counts the keys up to the block's first query. The last one sees more.",
    (CAUSAL_KEYS, "top + 1"),
)
hbm_bytes.fault(
    "causal_past_the_end",
    "In the last, smaller block, keys are counted that do not exist.",
    (CAUSAL_KEYS, "top + block"),
)

# The kernel ---------------------------------------------------------------------------

GUARD = ("tl.where(total == 0, 1.0, total)", "total")  # which comes last
UPDATE = "                    maximum = new\n"
STRIDES = "x.stride() for x in (q, k, v, out)"
SCALE = "math.log2(math.e) / math.sqrt(d_head)"
HEAD_OF = {x: f"b * {x}_b + h * {x}_h" for x in "qkvo"}
DOT_QK = 'tl.dot(q, k, input_precision="ieee")'
DOT_PV = 'tl.dot(weights, v, output, input_precision="ieee")'
SCORES_IN_TF32 = (DOT_QK, "tl.dot(q, k)")
OUTPUT_IN_TF32 = (DOT_PV, "tl.dot(weights, v, output)")
TF32 = (
    "{} float32 to 10 bits on a GPU unless told otherwise, and so does this check: "
    '`input_precision="ieee"`.'
)

flash_kernel.fault(
    "values_left_out_are_not_zero",
    "What a mask leaves out of a `tl.load` can be anything, unless `other=0.0` says "
    "otherwise: NaN in this check. The weight 0 does not hide it, 0 · NaN is NaN.",
    ("mask=there[:, None], other=0.0", "mask=there[:, None]"),
)
flash_kernel.fault(
    "products_in_tf32",
    TF32.format("Both products with `tl.dot` round"),
    SCORES_IN_TF32,
    OUTPUT_IN_TF32,
)
flash_kernel.fault(
    "scores_in_tf32", TF32.format("`tl.dot(q, k)` rounds"), SCORES_IN_TF32
)
flash_kernel.fault(
    "output_in_tf32", TF32.format("The product with v rounds"), OUTPUT_IN_TF32
)
flash_kernel.fault(
    "q_scaled_in_half_precision",
    "The scaled queries are rounded to half precision before the product. Scale the "
    "scores, which are float32.",
    (f"{DOT_QK} * scale", DOT_QK.replace("q,", "(q * scale).to(q.dtype),")),
)
flash_kernel.fault(
    "output_kept_in_half_precision",
    KEPT_IN_HALF,
    (UPDATE, f"{UPDATE}{' ' * 20}output = output.to(q.dtype).to(tl.float32)\n"),
)
flash_kernel.fault(
    "starts_at_zero",
    STARTS_AT_ZERO,
    ('tl.full([Q], float("-inf"), tl.float32)', "tl.zeros([Q], tl.float32)"),
    GUARD,
)
flash_kernel.fault(
    "one_maximum_for_all_rows",
    ONE_MAXIMUM,
    ("tl.max(scores, 1)", "tl.max(tl.max(scores, 1), 0)"),
    GUARD,
)
flash_kernel.fault(
    "old_maximum_subtracted",
    OLD_MAXIMUM,
    ("scores - new[:, None]", "scores - maximum[:, None]"),
)
flash_kernel.fault(
    "missing_keys_score_zero",
    MISSING_KEYS,
    ("seen = there[None, :]", "seen = (left + keys >= 0)[None, :]"),
)
flash_kernel.fault(
    "last_queries_dropped",
    "The queries after the last whole block get no program: use `triton.cdiv`.",
    ("triton.cdiv(t_q, n), n_batch", "max(t_q // n, 1), n_batch"),
)
flash_kernel.fault(
    "columns_taken_for_neighbours",
    "The stride of the columns is taken for 1. Most tensors are laid out so, and "
    "some are not.",
    ("columns * q_d", "columns"),
    ("columns[:, None] * k_d", "columns[:, None]"),
    ("columns * v_d", "columns"),
)
flash_kernel.fault(
    "contiguous_assumed",
    "Strides are computed from sizes, as if q, k and v were contiguous. Ask the "
    "tensors: `x.stride()`.",
    (STRIDES, STRIDES.replace("x.stride", "x.contiguous().stride")),
)
flash_kernel.fault(
    "batch_forgotten",
    "Every batch reads and writes the first batch's place: the second number of the "
    "grid counts heads through all batches.",
    *((HEAD_OF[x], f"h * {x}_h") for x in "qkvo"),
)
flash_kernel.fault(
    "infinite_rescaling", INFINITE, ("tl.exp2(maximum - new)", "tl.exp2(new - maximum)")
)
flash_kernel.fault("sum_not_rescaled", SUM_NOT_RESCALED, ("total * shrink", "total"))
flash_kernel.fault(
    "output_not_rescaled",
    OUTPUT_NOT_RESCALED,
    ("output *= shrink[:, None]", "output *= 1.0"),
)
flash_kernel.fault(
    "exp2_taken_for_exp",
    "2ˣ is taken where eˣ is meant: `tl.exp2` needs the scores multiplied by log₂ e.",
    (SCALE, "1 / math.sqrt(d_head)"),
)
flash_kernel.fault(
    "exp_taken_for_exp2",
    "eˣ is taken where 2ˣ is meant: the scores are multiplied by log₂ e already, for "
    "`tl.exp2`.",
    ("tl.exp2(maximum - new)", "tl.exp(maximum - new)"),
    ("tl.exp2(scores - new", "tl.exp(scores - new"),
)

# Together with the parts of earlier lessons -------------------------------------------

flash_in_the_model.fault(
    "blocks_aligned_top_left",
    "The blocks' causal mask is aligned top-left, that of `causal_mask` bottom-right: "
    "with fewer queries than keys, the queries are the last positions.",
    ("t_k - t_q + top + n if causal", "top + n if causal"),
    ("tril(end - n - left)", "tril(top - left)"),
    EVERY_BLOCK,
    edited="flash_attention",
)
flash_in_the_model.fault(
    "backward_without_mask",
    "The logits agree, the gradients do not: the backward pass forgets the mask.",
    ("ctx.causal and keys.stop > end - n + 1", "False"),
    edited="FlashAttention",
)
flash_in_the_model.fault(
    "mask_means_hidden",
    "`causal_mask` says True where a query may not look. Here True means “may look”.",
    ("tril(diagonal=t_k - t_q)", "triu(diagonal=t_k - t_q + 1)"),
    edited="causal_mask",
)
