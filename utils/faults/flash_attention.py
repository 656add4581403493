"""Lesson 11: mistakes in online softmax, FlashAttention, its traffic and its kernel."""

from utils.exercises.flash_attention import (
    FlashAttention,
    flash_attention,
    flash_in_the_model,
    flash_kernel,
    hbm_bytes,
    online_softmax,
)

# Online softmax -----------------------------------------------------------------------

OLD_SUM = "total * torch.exp(maximum - shift)"
NEW_TERMS = "torch.exp(block - shift[..., None])"
LARGEST = "torch.maximum(maximum, block.amax(dim=-1))"
BOTH = "return maximum, total"

online_softmax.fault(
    "hidden_first_block",
    "Where a row's first block is −inf throughout, the largest score so far is −inf too: "
    "exp(−inf − (−inf)) is NaN, and a NaN never leaves a sum again.",
    ("new.masked_fill(new == -torch.inf, 0)", "new"),
)
online_softmax.fault(
    "starts_at_zero",
    "The largest score starts at 0, so a row of negative scores seems to contain a 0. "
    "What is the maximum of nothing?",
    ("total - torch.inf", "total"),
)
online_softmax.fault(
    "starts_at_a_finite_number",
    "The largest score starts at a finite number. Only −inf is below everything.",
    ("total - torch.inf", "total - 1e9"),
)
online_softmax.fault(
    "not_rescaled",
    "The sum so far is not corrected when a larger score comes.",
    (OLD_SUM, "total"),
)
online_softmax.fault(
    "rescaling_inverted",
    "The sum so far is multiplied by exp(new − old) where exp(old − new) is right. A "
    "larger maximum makes every old term smaller.",
    (
        OLD_SUM,
        "torch.where(total == 0, total, total * torch.exp(shift - maximum))",
    ),
)
online_softmax.fault(
    "infinite_rescaling",
    "The sum so far is multiplied by exp(new − old) where exp(old − new) is right. At "
    "first old is −∞, so that the factor is ∞, and ∞ · 0 is NaN.",
    (OLD_SUM, "total * torch.exp(shift - maximum)"),
)
online_softmax.fault(
    "infinite_terms",
    "The new terms are relative to the maximum before this block, which begins at −∞. "
    "Update the maximum first, then take the exponentials.",
    ("block - shift[..., None]", "block - maximum[..., None]"),
)
online_softmax.fault(
    "maximum_not_updated",
    "The maximum stays what it was at the start: replace it at the end of each turn.",
    ("        maximum = new\n", ""),
)
online_softmax.fault(
    "mean_for_sum",
    "The terms of a block are averaged. Blocks differ in size: add them up.",
    (".sum(dim=-1)", ".mean(dim=-1)"),
)
online_softmax.fault(
    "softmax_of_each_block",
    "Each block goes through a softmax of its own. Take exp(score − maximum).",
    (NEW_TERMS, "torch.softmax(block, dim=-1)"),
)
online_softmax.fault(
    "one_sum_for_all_rows",
    "The terms of all rows are added up together, not along the last dimension alone.",
    (".sum(dim=-1)", ".sum()"),
)
online_softmax.fault(
    "one_maximum_for_all_rows",
    "One maximum is used for all rows. A row far below it loses all its terms; take "
    "the maximum over the last dimension.",
    ("block.amax(dim=-1)", "block.max()"),
)
online_softmax.fault(
    "last_blocks_maximum",
    "The maximum is that of the last block, not the largest of all so far.",
    (LARGEST, "block.amax(dim=-1)"),
)
online_softmax.fault(
    "each_block_by_its_own_maximum",
    "A block's terms are relative to the block's own maximum. Where an earlier block "
    "had a larger one, they must be relative to that.",
    (NEW_TERMS, "torch.exp(block - block.amax(dim=-1, keepdim=True))"),
)
online_softmax.fault(
    "earlier_blocks_dropped",
    "The total is that of the last block alone.",
    ("total = total + torch", "total = torch"),
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

START = "q_block.new_full((*batch, n), -torch.inf)"
LARGEST = "torch.maximum(maximum, scores.amax(dim=-1))"
FACTOR = "torch.exp(maximum - new)"
WEIGHTS = "torch.exp(scores - new[..., None])"
ADD_OUTPUT = "output = output * shrink[..., None] + "
LSE = "lses.append(maximum + torch.log(total))"
END = "t_k - t_q + top + n if causal"
ALL_KEYS = (f"{END} else t_k", "t_k")
EVERY_BLOCK = ("causal and right > end - n + 1", "causal")  # every block is masked
SEEN = "tril(end - n - left)"
POSITION = "t_k - t_q + top - left"
SEPARATE = (EVERY_BLOCK, (SEEN, f"tril({POSITION})"))  # the mask without the loop's end

flash_attention.fault(
    "half_precision_sums",
    "The sums, or the log-sum-exp alone, are in the dtype that came in. A long sum "
    "in float16 loses its small terms, and an error of 0.01 in the log-sum-exp is "
    "one of 1 % in every weight that the backward pass makes of it.",
    ("torch.promote_types(q.dtype, torch.float32)", "q.dtype"),
)
flash_attention.fault(
    "scaled_in_half_precision",
    "The queries are scaled in the dtype that came in, and rounded. Convert first, "
    "then scale.",
    (":].to(high) / math.sqrt(d_head)", ":] / math.sqrt(d_head)"),
    ("n = q_block.shape", "q_block = q_block.to(high)\n        n = q_block.shape"),
)
flash_attention.fault(
    "weights_in_half_precision",
    "The weights are converted to the dtype of v before the product. In float16 a "
    "weight below 3e-8 is 0; convert the values instead.",
    ("weights @ v_block", "weights.to(v.dtype).to(high) @ v_block"),
)
flash_attention.fault(
    "output_kept_in_half_precision",
    "The output so far is kept in the dtype of q, so that small terms vanish beside "
    "a large one. Convert it when the last block has come.",
    ("maximum = new\n", "maximum, output = new, output.to(q.dtype).to(high)\n"),
)
flash_attention.fault(
    "starts_at_zero",
    "The maximum starts at 0. Where all scores are far below 0, all exponentials "
    "underflow. It must start below every score.",
    (START, "q_block.new_zeros((*batch, n))"),
)
flash_attention.fault(
    "no_maximum",
    "No maximum is subtracted: beyond a score of 88 the exponential overflows.",
    (LARGEST, "torch.zeros_like(maximum)"),
)
flash_attention.fault(
    "hidden_scores_are_minus_1000",
    "Hidden scores get a negative number, and allowed ones can be lower. Not than −inf.",
    ("masked_fill(~seen, -torch.inf)", "masked_fill(~seen, -1000.0)"),
    EVERY_BLOCK,
)
flash_attention.fault(
    "hidden_scores_are_zero",
    "Hidden scores become 0, which is a score like any other. They become −inf.",
    ("masked_fill(~seen, -torch.inf)", "masked_fill(~seen, 0.0)"),
    EVERY_BLOCK,
)
flash_attention.fault(
    "mask_inverted",
    "The mask is used the other way round: it hides what may be seen.",
    ("~seen", "seen"),
    ALL_KEYS,
    *SEPARATE,
)
flash_attention.fault(
    "causal_ignored",
    "`causal` has no effect: the queries see everything.",
    ("causal and right > end - n + 1", "False"),
    ALL_KEYS,
)
flash_attention.fault(
    "causal_top_left",
    "The causal mask is aligned top-left: query i sees keys up to i. With fewer "
    "queries than keys they are the last positions, so query i stands at "
    "i + T_k − T_q.",
    (END, "top + n if causal"),
    (SEEN, "tril(top - left)"),
    EVERY_BLOCK,
)
flash_attention.fault(
    "key_blocks_all_at_the_start",
    "Every block of keys is masked as the first one: add where the block starts.",
    (SEEN, "tril(t_k - t_q + top)"),
    EVERY_BLOCK,
)
flash_attention.fault(
    "positions_within_the_block",
    "The mask compares places within the blocks: add where both blocks start.",
    (SEEN, "tril(t_k - t_q)"),
    EVERY_BLOCK,
)
flash_attention.fault(
    "own_position_hidden",
    "No query sees its own position: the comparison includes equality.",
    (SEEN, f"tril({POSITION} - 1)"),
    EVERY_BLOCK,
)
flash_attention.fault(
    "one_position_ahead",
    "Each query sees one position ahead: off by one.",
    (END, "min(t_k, t_k - t_q + top + n + 1) if causal"),
    (SEEN, f"tril({POSITION} + 1)"),
    EVERY_BLOCK,
)
flash_attention.fault(
    "diagonal_not_masked",
    "Blocks after the last query are left out, but within the last block a query "
    "still sees keys after its own position: those need the mask.",
    ("causal and right > end - n + 1", "False"),
)
flash_attention.fault(
    "loop_ends_too_early",
    "The loop over the keys ends with the block's first query. The others see more.",
    (END, "t_k - t_q + top + 1 if causal"),
    *SEPARATE,
)
flash_attention.fault(
    "missing_keys_score_zero",
    "The last block is filled up with zeros. A key of zeros has the score 0, which "
    "is a weight like any other: it needs −inf, or must not be there.",
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
    "last_keys_dropped",
    "The keys after the last whole block are left out.",
    ("range(0, end, block_k)", "range(0, end // block_k * block_k, block_k)"),
)
flash_attention.fault(
    "last_queries_dropped",
    "The queries after the last whole block are left out.",
    ("range(0, t_q, block_q)", "range(0, t_q // block_q * block_q, block_q)"),
)
flash_attention.fault(
    "rescaling_inverted",
    "What was summed so far is multiplied by exp(new − old) where exp(old − new) is "
    "right (one well-known paper prints it so). A larger maximum makes every old "
    "term smaller.",
    (FACTOR, "torch.exp(new - maximum).masked_fill(maximum == -torch.inf, 0)"),
)
flash_attention.fault(
    "infinite_rescaling",
    "What was summed so far is multiplied by exp(new − old) where exp(old − new) is "
    "right. At first old is −∞, so that the factor is ∞, and ∞ · 0 is NaN.",
    (FACTOR, "torch.exp(new - maximum)"),
)
flash_attention.fault(
    "old_maximum_subtracted",
    "The weights are relative to the maximum before this block, which begins at −∞. "
    "Update the maximum first, then take the exponentials.",
    ("scores - new[..., None]", "scores - maximum[..., None]"),
)
flash_attention.fault(
    "maximum_not_updated",
    "The old maximum is not replaced by the new one at the end of a block.",
    ("            maximum = new\n", ""),
)
flash_attention.fault(
    "one_maximum_for_all_rows",
    "One maximum is used for all queries. A query far below it loses all its terms: "
    "take the maximum over the last dimension.",
    ("scores.amax(dim=-1)", "scores.max()"),
)
flash_attention.fault(
    "softmax_of_each_block",
    "Each block of scores goes through a softmax of its own, so that every block "
    "counts the same. The weights are exp(score − maximum), divided at the end.",
    (WEIGHTS, "torch.softmax(scores, dim=-1)"),
)
flash_attention.fault(
    "nothing_rescaled",
    "Neither sum nor output are corrected when a larger score comes.",
    (FACTOR, "torch.ones_like(maximum)"),
)
flash_attention.fault(
    "sum_not_rescaled",
    "The output is corrected when a larger score comes, the sum is not.",
    ("total * shrink", "total"),
)
flash_attention.fault(
    "output_not_rescaled",
    "The sum is corrected when a larger score comes, the output is not.",
    (ADD_OUTPUT, "output = output + "),
)
flash_attention.fault(
    "output_overwritten",
    "The output is that of the last block of keys alone: each block adds to it.",
    (ADD_OUTPUT, "output = "),
)
flash_attention.fault(
    "first_block_again",
    "Every turn of the loop uses the first block of keys and values again.",
    ("k[..., left:right, :]", "k[..., : right - left, :]"),
    ("v[..., left:right, :]", "v[..., : right - left, :]"),
)
flash_attention.fault(
    "not_divided",
    "The output is not divided by the sum of the exponentials at the end.",
    ("output / total.clamp(min=1)[..., None]", "output"),
)
flash_attention.fault(
    "maximum_missing_in_lse",
    "The log-sum-exp lacks the maximum: log Σ exp(s) = m + log Σ exp(s − m).",
    (LSE, "lses.append(torch.log(total))"),
)
flash_attention.fault(
    "lse_without_logarithm",
    "The sum is added to the maximum without its logarithm.",
    (LSE, "lses.append(maximum + total)"),
)
flash_attention.fault(
    "no_scaling",
    "The scores are not divided by the root of d_head.",
    (" / math.sqrt(d_head)", ""),
)
flash_attention.fault(
    "divided_by_d_head",
    "The scores are divided by d_head, not by its root. Or by the root twice?",
    ("math.sqrt(d_head)", "d_head"),
)

# Its gradient -------------------------------------------------------------------------

MASKED = "ctx.causal and keys.stop > end - n + 1"
HIDDEN = "weights.masked_fill(~seen.tril(end - n - left), 0)"
AGAIN = "torch.exp(scores - lse[..., rows, None])"
THROUGH_SOFTMAX = "weights * (d_weights - row_sums[..., rows, None])"
TO_Q = "d_q[..., rows, :] += d_scores @ k_block * scale"
TO_K = "d_k[..., keys, :] += d_scores.mT @ q_block * scale"
TO_V = "d_v[..., keys, :] += weights.mT @ d_block"

FlashAttention.fault(
    "output_on_ctx",
    "The output is set on `ctx`. It knows its `ctx`, so the two hold each other, and "
    "are not freed when nobody else needs them.",
    ("return output\n", "ctx.output = output\n        return output\n"),
)
FlashAttention.fault(
    "settings_shared",
    "`causal` and the block sizes are kept where the next call overwrites them, on "
    "the class or in a global. Every layer of a model calls forward before the "
    "first backward comes: keep them on `ctx`.",
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
    "three_gradients",
    "Backward returns three gradients, and forward takes six arguments: PyTorch wants "
    "one for each, None for what has none.",
    ("return d_q, d_k, d_v, None, None, None", "return d_q, d_k, d_v"),
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
    (HIDDEN, "weights * seen.tril(end - n - left)"),
)
FlashAttention.fault(
    "mask_forgotten",
    "The backward pass computes its weights without the causal mask. exp(score − "
    "log-sum-exp) of a hidden key is not 0 by itself.",
    (MASKED, "False"),
)
FlashAttention.fault(
    "causal_top_left",
    "The mask of the backward pass is aligned top-left; query i is at i + T_k − T_q.",
    (MASKED, "ctx.causal"),
    ("tril(end - n - left)", "tril(top - left)"),
)
FlashAttention.fault(
    "own_position_hidden",
    "In the backward pass no query sees its own position.",
    (MASKED, "ctx.causal"),
    ("tril(end - n - left)", "tril(end - n - left - 1)"),
)
FlashAttention.fault(
    "positions_within_the_block",
    "The mask of the backward pass compares places within the blocks.",
    (MASKED, "ctx.causal"),
    ("tril(end - n - left)", "tril(t_k - t_q)"),
)
FlashAttention.fault(
    "query_gradient_overwritten",
    "A query's gradient is that of its last block of keys. Every block adds to it.",
    (TO_Q, TO_Q.replace("+=", "=")),
)
FlashAttention.fault(
    "key_gradient_overwritten",
    "A key's gradient is that of the last block of queries. Every block adds to it.",
    (TO_K, TO_K.replace("+=", "=")),
)
FlashAttention.fault(
    "value_gradient_overwritten",
    "A value's gradient is that of the last block of queries. Every block adds to it.",
    (TO_V, TO_V.replace("+=", "=")),
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
        THROUGH_SOFTMAX,
        "weights * (d_weights - (weights * d_weights).sum(dim=-1, keepdim=True))",
    ),
)
FlashAttention.fault(
    "not_normalised",
    "The weights are exp(score): the log-sum-exp has to be subtracted first.",
    (AGAIN, "torch.exp(scores)"),
)
FlashAttention.fault(
    "row_sums_forgotten",
    "dS = P ∘ dP lacks D. If one score rises, the softmax makes all other weights "
    "of the row fall; that is what D takes off.",
    (THROUGH_SOFTMAX, "weights * d_weights"),
)
FlashAttention.fault(
    "row_sums_added",
    "D is added where it must be subtracted: dS = P ∘ (dP − D).",
    ("d_weights - row_sums", "d_weights + row_sums"),
)
FlashAttention.fault(
    "row_sums_outside",
    "D is subtracted after the product with P: dS = P ∘ (dP − D), not P ∘ dP − D.",
    (THROUGH_SOFTMAX, "weights * d_weights - row_sums[..., rows, None]"),
)
FlashAttention.fault(
    "key_gradient_without_scale",
    "The keys' gradient lacks the division by the root of d_head.",
    (TO_K, TO_K.removesuffix(" * scale")),
)
FlashAttention.fault(
    "key_gradient_scaled_twice",
    "The keys' gradient has the scale twice: are the queries scaled already?",
    (TO_K, f"{TO_K} * scale"),
)
FlashAttention.fault(
    "query_gradient_without_scale",
    "The queries' gradient lacks the division by the root of d_head.",
    (TO_Q, TO_Q.removesuffix(" * scale")),
)
FlashAttention.fault(
    "no_scaling",
    "The scores of the backward pass are not divided by the root of d_head.",
    ("k_block.mT * scale", "k_block.mT"),
)

# Traffic ------------------------------------------------------------------------------

STEPS = "(scores + softmax + output) * bytes_per_number"
MOVED = "numbers * bytes_per_number + 4 * t"
CAUSAL_KEYS = "min(top + block, t)"
SOFTMAX = "softmax = 2 * t * t"
OUTPUT = "output = t * t + 2 * t * d_head"

hbm_bytes.fault(
    "lse_in_half_precision",
    "The log-sum-exp is counted in the size of the other numbers. It is float32.",
    (MOVED, "(numbers + t) * bytes_per_number"),
)
hbm_bytes.fault(
    "fixed_size",
    "`bytes_per_number` has no effect: 2 bytes are taken throughout.",
    (STEPS, "(scores + softmax + output) * 2"),
    (MOVED, "numbers * 2 + 4 * t"),
)
hbm_bytes.fault(
    "causal_halves_the_steps",
    "Without blocks, causal changes nothing: the three steps work on whole matrices "
    "all the same.",
    (STEPS, f"{STEPS} // (1 + causal)"),
)
hbm_bytes.fault(
    "causal_halves_the_keys_of_each_block",
    "Causal halves the keys of every block. The first sees few, the last one all.",
    (CAUSAL_KEYS, "t // 2"),
)
hbm_bytes.fault(
    "causal_ignored",
    "`causal` has no effect: the keys after a block's last query need not be read.",
    (CAUSAL_KEYS, "t"),
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
hbm_bytes.fault(
    "last_block_dropped",
    "The last, smaller block of queries is left out. All keys come for it too.",
    ("range(0, t, block)", "range(0, t // block * block, block)"),
)
hbm_bytes.fault(
    "lse_forgotten",
    "The log-sum-exp is missing: one float32 for each query.",
    (MOVED, "numbers * bytes_per_number"),
)
hbm_bytes.fault(
    "queries_for_each_block",
    "The queries are counted again for each block. Each belongs to one block.",
    ("numbers = 2 * t", "numbers = t"),
    ("+= 2 * seen * d_head", "+= (t + 2 * seen) * d_head"),
)
hbm_bytes.fault(
    "keys_and_values_once",
    "Keys and values are counted once. Every block of queries needs all of them.",
    ("range(0, t, block)", "range(t - 1, t)"),
)
hbm_bytes.fault(
    "values_forgotten",
    "With blocks, keys are counted and values are not (or the other way round).",
    ("+= 2 * seen", "+= seen"),
)
hbm_bytes.fault(
    "scores_counted",
    "With blocks, the scores are counted. They never leave the chip.",
    ("+= 2 * seen * d_head", "+= 2 * seen * d_head + block * seen"),
)

# The kernel ---------------------------------------------------------------------------

ONE_LOOP = ("(first + 1) // K * K", "0")  # every block is masked, as most write it
LAST_KEY = "tl.minimum(first + Q, t_k)"
EVERY_KEY = (LAST_KEY, "t_k")
ROW = "(t_k - t_q + rows)[:, None]"
GUARD = ("tl.where(total == 0, 1.0, total)", "total")  # which comes last
NO_MAXIMUM = 'tl.full([Q], float("-inf"), tl.float32)'
LARGEST = "tl.maximum(maximum, tl.max(scores, 1))"
UPDATE = "                    maximum = new\n"
LSE = "(maximum + tl.log2(total)) * 0.6931471805599453"
DOT_QK = 'tl.dot(q, k, input_precision="ieee")'
DOT_PV = 'tl.dot(weights, v, output, input_precision="ieee")'
STRIDES = "x.stride() for x in (q, k, v, out)"
SCALE = "math.log2(math.e) / math.sqrt(d_head)"
HEAD_OF = {x: f"b * {x}_b + h * {x}_h" for x in "qkvo"}
FIRST_KEYS = (
    ("k_at + left * k_t,", "k_at,"),
    ("tl.load(k_at + left * k_t)", "tl.load(k_at)"),
)
FIRST_VALUES = (
    ("v_at + left * v_t,", "v_at,"),
    ("tl.load(v_at + left * v_t)", "tl.load(v_at)"),
)

flash_kernel.fault(
    "values_left_out_are_not_zero",
    "What a mask leaves out of a `tl.load` can be anything, unless `other=0.0` says "
    "otherwise: NaN in this check. The weight 0 does not hide it, 0 · NaN is NaN.",
    ("mask=there[:, None], other=0.0", "mask=there[:, None]"),
)
flash_kernel.fault(
    "products_in_tf32",
    "`tl.dot` rounds float32 to 10 bits on a GPU unless it is told otherwise, and so "
    'does this check: `input_precision="ieee"`, in both products.',
    (DOT_QK, "tl.dot(q, k)"),
    (DOT_PV, "tl.dot(weights, v, output)"),
)
flash_kernel.fault(
    "scores_in_tf32",
    "`tl.dot(q, k)` rounds float32 to 10 bits on a GPU unless it is told otherwise, "
    'and so does this check: `input_precision="ieee"`.',
    (DOT_QK, "tl.dot(q, k)"),
)
flash_kernel.fault(
    "output_in_tf32",
    "The product with v rounds float32 to 10 bits on a GPU unless it is told "
    'otherwise, and so does this check: `input_precision="ieee"`.',
    (DOT_PV, "tl.dot(weights, v, output)"),
)
flash_kernel.fault(
    "q_scaled_in_half_precision",
    "The scaled queries are rounded to half precision before the product. Scale the "
    "scores, which are float32.",
    (f"{DOT_QK} * scale", DOT_QK.replace("q,", "(q * scale).to(q.dtype),")),
)
flash_kernel.fault(
    "output_kept_in_half_precision",
    "The output so far is kept in the dtype of q. Convert it after the last block.",
    (UPDATE, f"{UPDATE}{' ' * 20}output = output.to(q.dtype).to(tl.float32)\n"),
)
flash_kernel.fault(
    "starts_at_zero",
    "The maximum starts at 0. Far below it all exponentials underflow.",
    (NO_MAXIMUM, "tl.zeros([Q], tl.float32)"),
    GUARD,
)
flash_kernel.fault(
    "one_maximum_for_all_rows",
    "One maximum is used for all rows. A row far below it loses all its terms.",
    ("tl.max(scores, 1)", "tl.max(tl.max(scores, 1), 0)"),
    GUARD,
)
flash_kernel.fault(
    "maximum_not_updated",
    "The old maximum is not replaced by the new one at the end of a block.",
    (UPDATE, ""),
)
flash_kernel.fault(
    "old_maximum_subtracted",
    "The weights are relative to the maximum before this block, which begins at −∞. "
    "Update the maximum first, then take the exponentials.",
    ("scores - new[:, None]", "scores - maximum[:, None]"),
)
flash_kernel.fault(
    "missing_keys_score_zero",
    "Keys past the end are loaded as zeros, and their score of 0 is a weight like "
    "any other: it must become −inf.",
    ("seen = there[None, :]", "seen = (left + keys >= 0)[None, :]"),
)
flash_kernel.fault(
    "last_keys_dropped",
    "The keys after the last whole block are left out.",
    ("end, whole = t_k, t_k // K * K", "end, whole = t_k // K * K, t_k // K * K"),
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
    "heads_taken_for_neighbours",
    "Where a head begins is computed as if the heads of all batches followed each "
    "other. After a transpose they do not: use the batch's and the head's stride.",
    *((HEAD_OF[x], f"tl.program_id(1) * {x}_h") for x in "qkv"),
)
flash_kernel.fault(
    "contiguous_assumed",
    "Strides are computed from sizes, as if q, k and v were contiguous. Ask the "
    "tensors: `x.stride()`.",
    (STRIDES, STRIDES.replace("x.stride", "x.contiguous().stride")),
)
flash_kernel.fault(
    "values_with_strides_of_keys",
    "The strides of k are used for v too. The two may be laid out differently.",
    (STRIDES, STRIDES.replace("k, v,", "k, k,")),
)
flash_kernel.fault(
    "heads_of_the_first_batch",
    "Keys and values are those of the first batch for all batches: the second "
    "number of the grid counts heads through all of them.",
    *((HEAD_OF[x], f"h * {x}_h") for x in "kv"),
)
flash_kernel.fault(
    "batch_forgotten",
    "Every batch reads and writes the first batch's place.",
    *((HEAD_OF[x], f"h * {x}_h") for x in "qkvo"),
)
flash_kernel.fault(
    "lse_of_the_first_batch",
    "The log-sum-exps of all batches are stored in the first batch's place. The "
    "second number of the grid counts heads through all batches.",
    ("tl.program_id(1) * t_q", "h * t_q"),
)
flash_kernel.fault(
    "grid_without_batches",
    "The grid has programs for the heads of one batch alone, and the other batches "
    "are never written. It needs B · H of them.",
    ("n_batch * n_heads)](", "n_heads)]("),
)
flash_kernel.fault(
    "keys_of_the_first_block",
    "Every turn of the loop loads the first block of keys again.",
    *FIRST_KEYS,
)
flash_kernel.fault(
    "first_block_again",
    "Every turn of the loop loads the first block of keys and values again.",
    *FIRST_KEYS,
    *FIRST_VALUES,
)
flash_kernel.fault(
    "causal_ignored",
    "`causal` has no effect.",
    ("scale, causal, d_head", "scale, False, d_head"),
)
flash_kernel.fault(
    "causal_top_left",
    "The mask is aligned top-left. Row i stands at i + T_k − T_q.",
    (ROW, "rows[:, None]"),
    ONE_LOOP,
)
flash_kernel.fault(
    "own_position_hidden",
    "No query sees its own position.",
    ("keys <= (t_k - t_q", "keys < (t_k - t_q"),
    ONE_LOOP,
)
flash_kernel.fault(
    "one_position_ahead",
    "Each query sees one position ahead: off by one.",
    (ROW, "(t_k - t_q + rows + 1)[:, None]"),
    (LAST_KEY, "tl.minimum(first + Q + 1, t_k)"),
)
flash_kernel.fault(
    "diagonal_not_masked",
    "Blocks after the last query are left out, but within the last block a query "
    "still sees keys after its own position: those need the mask.",
    (ROW, "t_k"),
)
flash_kernel.fault(
    "loop_ends_too_early",
    "The loop over the keys ends with the block's first query. The others see more.",
    (LAST_KEY, "tl.minimum(first + 1, t_k)"),
)
flash_kernel.fault(
    "infinite_rescaling",
    "What was summed so far is multiplied by exp2(new − old) where exp2(old − new) "
    "is right. At first old is −∞, so that the factor is ∞, and ∞ · 0 is NaN.",
    ("tl.exp2(maximum - new)", "tl.exp2(new - maximum)"),
)
flash_kernel.fault(
    "sum_not_rescaled",
    "The output is corrected when a larger score comes, the sum is not.",
    ("total * shrink", "total"),
)
flash_kernel.fault(
    "output_not_rescaled",
    "The sum is corrected when a larger score comes, the output is not.",
    ("output *= shrink[:, None]", "output *= 1.0"),
)
flash_kernel.fault(
    "output_overwritten",
    "The output is that of the last block alone: each block adds to it.",
    (DOT_PV, DOT_PV.replace("v, output,", "v,")),
)
flash_kernel.fault(
    "not_divided",
    "The output is not divided by the sum of the exponentials.",
    ("output /= total[:, None]", "output *= 1.0"),
)
flash_kernel.fault(
    "lse_in_base_2",
    "The log-sum-exp is in base 2, as `tl.exp2` and `tl.log2` count. Multiply by ln 2.",
    (" * 0.6931471805599453", ""),
)
flash_kernel.fault(
    "maximum_not_converted",
    "The maximum is in base 2, as `tl.exp2` counts, and the logarithm beside it is "
    "natural: multiply the maximum by ln 2.",
    (LSE, "maximum + tl.log(total)"),
)
flash_kernel.fault(
    "maximum_missing_in_lse",
    "The log-sum-exp lacks the maximum.",
    ("(maximum + tl.log2(total))", "tl.log2(total)"),
)
flash_kernel.fault(
    "no_scaling",
    "The scores are not divided by the root of d_head.",
    (SCALE, "math.log2(math.e)"),
)
flash_kernel.fault(
    "divided_by_d_head",
    "The scores are divided by d_head, not by its root. Or by the root twice?",
    (SCALE, "math.log2(math.e) / d_head"),
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
    (END, "top + n if causal"),
    (SEEN, "tril(top - left)"),
    EVERY_BLOCK,
    edited="flash_attention",
)
flash_in_the_model.fault(
    "logarithms_of_two_bases",
    "`flash_attention` gives its log-sum-exp in base 2, `online_softmax` is natural.",
    ("maximum + torch.log(total)", "(maximum + torch.log(total)) / math.log(2)"),
    edited="flash_attention",
)
flash_in_the_model.fault(
    "contiguous_only",
    "`FlashAttention` wants contiguous heads, and split_heads gives a transposed view. "
    "`reshape`, or slices, take any layout where `view` does not.",
    ("output, lse = flash", "q.view(-1, q.shape[-1])\n        output, lse = flash"),
    edited="FlashAttention",
)
flash_in_the_model.fault(
    "backward_without_mask",
    "The logits agree, the gradients do not: the backward pass forgets the mask.",
    (MASKED, "False"),
    edited="FlashAttention",
)
flash_in_the_model.fault(
    "backward_without_row_sums",
    "The logits agree, the gradients do not: the backward pass lacks D, the sum of "
    "dO ∘ O.",
    (THROUGH_SOFTMAX, "weights * d_weights"),
    edited="FlashAttention",
)
flash_in_the_model.fault(
    "keys_and_values_tiled",
    "repeat_kv tiles the heads 0, 1, 0, 1; neighbouring query heads share: 0, 0, 1, 1.",
    ("x.repeat_interleave(group_size, dim=1)", "x.repeat(1, group_size, 1, 1)"),
    edited="repeat_kv",
)
flash_in_the_model.fault(
    "mask_means_hidden",
    "`causal_mask` says True where a query may not look. Here True means “may look”.",
    ("tril(diagonal=t_k - t_q)", "triu(diagonal=t_k - t_q + 1)"),
    edited="causal_mask",
)
