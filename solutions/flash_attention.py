"""Reference answers of lesson 11."""

import math
import os

import torch
from torch.autograd.function import once_differentiable

if not torch.cuda.is_available():  # Triton reads it when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
try:
    import triton
    import triton.language as tl
except ImportError:  # there is none for Windows and macOS
    triton = tl = None


def online_softmax(blocks):
    """The maximum of a row, and the sum of its exponentials, in one pass over pieces.

    Args:
        blocks: an iterable of scores `(…, n)`, at least one of them; n ≥ 1 may differ
            from block to block. Each is handed over once, and none need be kept.

    Returns:
        `(maximum, total)`, both `(…)`: over all blocks, the largest score m and
        Σ exp(score − m), so that a score's weight is exp(score − maximum) / total.
        −inf and 0 where every score is −inf. float64 for float64, else float32.

    Raises:
        ValueError: if there is no block.

    Milakov, Gimelshein (2018), "Online normalizer calculation for softmax".
    """
    ### BEGIN SOLUTION
    maximum = total = None
    for block in blocks:
        block = block.to(torch.promote_types(block.dtype, torch.float32))  # … n
        if maximum is None:
            total = torch.zeros_like(block[..., 0])  # …
            maximum = total - torch.inf  # …
        new = torch.maximum(maximum, block.amax(dim=-1))  # …
        shift = new.masked_fill(new == -torch.inf, 0)  # −inf − (−inf) would be NaN
        total = total * torch.exp(maximum - shift)
        total = total + torch.exp(block - shift[..., None]).sum(dim=-1)
        maximum = new
    if maximum is None:
        raise ValueError("there is no block, so no score to take a softmax of")
    return maximum, total
    ### END SOLUTION


def flash_attention(q, k, v, causal=False, block_q=64, block_k=64):
    """Attention block by block: no more than `block_q` × `block_k` scores at once.

    Args:
        q: queries `(…, T_q, d_head)`.
        k: keys `(…, T_k, d_head)`.
        v: values `(…, T_k, d_v)`.
        causal: may each query look only at its own position and those before it? The
            queries are the last T_q of the T_k positions.
        block_q: how many queries are worked on together.
        block_k: how many keys and values are fetched at a time.

    Returns:
        The output `(…, T_q, d_v)` in the dtype of `q`, and the log-sum-exp of each
        query's scaled scores, `(…, T_q)`, float64 for float64, else float32. All sums
        are in that dtype too. Without any key: zeros, and −inf.

    Raises:
        ValueError: if q, k and v differ in a dimension that they should share (names
            the shapes), if causal and T_q > T_k (names both), or if a block is smaller
            than 1 (names it).

    Dao et al. (2022), "FlashAttention", algorithm 1; Dao (2023), "FlashAttention-2".
    """
    (*batch, t_q, d_head), t_k = q.shape, k.shape[-2]
    if (*batch, t_k, d_head) != tuple(k.shape) or (*batch, t_k) != tuple(v.shape[:-1]):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"q, k and v do not fit together: {shapes}; repeat_kv gives each query "
            "head its keys and values"
        )
    if causal and t_q > t_k:
        raise ValueError(
            f"{t_q} queries cannot be the last of {t_k} positions: cut q, or leave out "
            "causal"
        )
    if min(block_q, block_k) < 1:
        raise ValueError(f"blocks of {block_q} × {block_k}, at least 1 needed")
    ### BEGIN SOLUTION
    high = torch.promote_types(q.dtype, torch.float32)
    outputs, lses = [], []
    for top in range(0, t_q, block_q):
        q_block = q[..., top : top + block_q, :].to(high) / math.sqrt(d_head)  # … n d
        n = q_block.shape[-2]
        # A causal block needs no key after its last query's own.
        end = t_k - t_q + top + n if causal else t_k
        maximum = q_block.new_full((*batch, n), -torch.inf)  # … n
        total = q_block.new_zeros((*batch, n))  # … n
        output = q_block.new_zeros((*batch, n, v.shape[-1]))  # … n d_v
        for left in range(0, end, block_k):
            right = min(left + block_k, end)
            k_block, v_block = k[..., left:right, :].to(high), v[..., left:right, :]
            scores = q_block @ k_block.mT  # … n m
            if causal and right > end - n + 1:  # some are hidden from the first query
                seen = torch.ones_like(scores, dtype=torch.bool).tril(end - n - left)
                scores = scores.masked_fill(~seen, -torch.inf)
            new = torch.maximum(maximum, scores.amax(dim=-1))  # … n
            shrink = torch.exp(maximum - new)  # … n
            weights = torch.exp(scores - new[..., None])  # … n m
            total = total * shrink + weights.sum(dim=-1)
            output = output * shrink[..., None] + weights @ v_block.to(high)
            maximum = new
        outputs.append((output / total.clamp(min=1)[..., None]).to(q.dtype))
        lses.append(maximum + torch.log(total))
    if not outputs:  # no queries
        return q.new_zeros((*batch, 0, v.shape[-1])), q.new_zeros((*batch, 0)).to(high)
    return torch.cat(outputs, dim=-2), torch.cat(lses, dim=-1)
    ### END SOLUTION


class FlashAttention(torch.autograd.Function):
    """`flash_attention` with a backward pass that computes its weights again.

    `FlashAttention.apply(q, k, v, causal, block_q, block_k)` gives the output alone;
    the last three may be left out. Kept for the backward pass are q, k, v, the output
    and the log-sum-exp, nothing else that grows with the length.

    Dao et al. (2022), "FlashAttention", appendix B.
    """

    @staticmethod
    def forward(ctx, q, k, v, causal=False, block_q=64, block_k=64):
        """As `flash_attention`: `(…, T_q, d_v)`."""
        ### BEGIN SOLUTION
        output, lse = flash_attention(q, k, v, causal, block_q, block_k)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.causal, ctx.block_q, ctx.block_k = causal, block_q, block_k
        return output
        ### END SOLUTION

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output):
        """The gradient of the output → those of q, k and v, and None for the rest."""
        ### BEGIN SOLUTION
        q, k, v, output, lse = ctx.saved_tensors
        t_q, t_k, high = q.shape[-2], k.shape[-2], lse.dtype
        scale = 1 / math.sqrt(q.shape[-1])
        d_q, d_k, d_v = (torch.zeros_like(x, dtype=high) for x in (q, k, v))
        row_sums = (d_output.to(high) * output.to(high)).sum(dim=-1)  # … T_q
        for top in range(0, t_q, ctx.block_q):
            rows = slice(top, min(top + ctx.block_q, t_q))
            n = rows.stop - top
            end = t_k - t_q + rows.stop if ctx.causal else t_k
            q_block = q[..., rows, :].to(high)  # … n d
            d_block = d_output[..., rows, :].to(high)  # … n d_v
            for left in range(0, end, ctx.block_k):
                keys = slice(left, min(left + ctx.block_k, end))
                k_block, v_block = k[..., keys, :].to(high), v[..., keys, :].to(high)
                scores = q_block @ k_block.mT * scale  # … n m
                weights = torch.exp(scores - lse[..., rows, None])  # … n m
                if ctx.causal and keys.stop > end - n + 1:
                    seen = torch.ones_like(weights, dtype=torch.bool)
                    weights = weights.masked_fill(~seen.tril(end - n - left), 0)
                d_weights = d_block @ v_block.mT  # … n m
                d_scores = weights * (d_weights - row_sums[..., rows, None])  # … n m
                d_v[..., keys, :] += weights.mT @ d_block
                d_q[..., rows, :] += d_scores @ k_block * scale
                d_k[..., keys, :] += d_scores.mT @ q_block * scale
        d_q, d_k, d_v = d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)
        return d_q, d_k, d_v, None, None, None
        ### END SOLUTION


def hbm_bytes(t, d_head, block=None, causal=False, bytes_per_number=2):
    """How many bytes one head's forward pass moves to and from the large memory.

    Args:
        t: number of queries, and of keys.
        d_head: width of queries, keys and values.
        block: queries that stay on the chip together, while the keys and values that
            they look at come past once. None: scores and weights are written out, as
            matrices, between three separate steps.
        causal: does no query look ahead? With blocks, keys after a block's last query
            are not read. The separate steps work on whole matrices all the same.
        bytes_per_number: 2 for float16. The log-sum-exp is float32 always.

    Returns:
        An int: what is read plus what is written. With blocks: the queries once, keys
        and values once for each block of queries, output and log-sum-exp once. Without:
        the three steps' arguments and results (scores = q·kᵀ; weights = softmax of the
        scores; output = weights·v).

    Raises:
        ValueError: if `block` is smaller than 1; names it.

    Dao et al. (2022), "FlashAttention", section 3.2.
    """
    if block is not None and block < 1:
        raise ValueError(f"block is {block}, at least 1 needed")
    ### BEGIN SOLUTION
    if block is None:
        scores = 2 * t * d_head + t * t
        softmax = 2 * t * t
        output = t * t + 2 * t * d_head
        return (scores + softmax + output) * bytes_per_number
    numbers = 2 * t * d_head  # queries and output
    for top in range(0, t, block):
        seen = min(top + block, t) if causal else t
        numbers += 2 * seen * d_head  # keys and values
    return numbers * bytes_per_number + 4 * t
    ### END SOLUTION


def flash_kernel(q, k, v, causal=False, block_q=None, block_k=None):
    """The forward pass of `flash_attention` as one Triton kernel.

    Args:
        q: queries `(B, H, T_q, d_head)`, with any strides.
        k, v: keys and values `(B, H, T_k, d_head)`, likewise.
        causal: as in `flash_attention`.
        block_q, block_k: powers of two from 16. If not given: the first of a few pairs
            for which the GPU has enough shared memory.

    Returns:
        The output `(B, H, T_q, d_head)` in the dtype of `q` and the log-sum-exp
        `(B, H, T_q)`, float32, as `flash_attention` does.

    Raises:
        RuntimeError: without Triton, or without a device that can run the kernel; says
            what is missing.
        ValueError: for sizes, dtypes or blocks that it cannot compute; names them.

    Dao (2023), "FlashAttention-2", algorithm 1.
    """
    if triton is None:
        raise RuntimeError("there is no Triton here: use flash_attention")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted and isinstance(tl.max, triton.runtime.JITFunction):
        raise RuntimeError(
            "Triton was imported before TRITON_INTERPRET=1 was set: restart Python and "
            "set it first"
        )
    if not interpreted and q.device.type != "cuda":
        raise RuntimeError(
            f"q is on {q.device}: move q, k and v to a CUDA device, or set "
            "TRITON_INTERPRET=1 before Triton is imported"
        )
    if not interpreted and torch.cuda.get_device_capability(q.device) < (8, 0):
        has = ".".join(map(str, torch.cuda.get_device_capability(q.device)))
        raise RuntimeError(
            f"this GPU has compute capability {has} and the kernel needs 8.0: use "
            "flash_attention"
        )
    if len({q.device, k.device, v.device}) > 1:
        raise ValueError(
            f"q, k and v are on {q.device}, {k.device} and {v.device}: move them to "
            "one device"
        )
    if interpreted and torch.bfloat16 in (q.dtype, k.dtype, v.dtype):
        raise ValueError(
            "Triton's interpreter computes bfloat16 wrongly: convert q, k and v to "
            "float32, or use flash_attention"
        )
    half = (torch.float16, torch.bfloat16)
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float32, *half):
        raise ValueError(
            f"the dtypes are {q.dtype}, {k.dtype} and {v.dtype}: convert all three to "
            "float32, float16 or bfloat16"
        )
    if q.dim() != 4 or q.shape[:2] != k.shape[:2] or k.shape != v.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"q, k and v must be (B, H, T, d_head) with equal B and H, not {shapes}: "
            "repeat_kv gives each query head its own keys and values"
        )
    (n_batch, n_heads, t_q, d_head), t_k = q.shape, k.shape[2]
    if d_head != k.shape[3] or d_head not in (16, 32, 64, 128, 256):
        raise ValueError(
            f"d_head is {d_head} in q and {k.shape[3]} in k, and must be 16, 32, 64, "
            "128 or 256 in both: use flash_attention"
        )
    if causal and t_q > t_k:
        raise ValueError(
            f"{t_q} queries cannot be the last of {t_k} positions: cut q, or leave out "
            "causal"
        )
    for block in (block_q, block_k):
        if block is not None and (block < 16 or block & (block - 1)):
            raise ValueError(f"a block of {block}: take a power of two from 16 on")
    ### BEGIN SOLUTION
    if not hasattr(flash_kernel, "kernel"):  # made once: compiling it takes seconds

        @triton.jit
        def kernel(
            q_ptr,
            k_ptr,
            v_ptr,
            out_ptr,
            lse_ptr,
            q_strides,
            k_strides,
            v_strides,
            out_strides,
            n_heads,
            t_q,
            t_k,
            scale,
            CAUSAL: tl.constexpr,
            D: tl.constexpr,
            Q: tl.constexpr,
            K: tl.constexpr,
        ):
            top = (tl.num_programs(0) - 1 - tl.program_id(0)) * Q  # longest rows first
            b = (tl.program_id(1) // n_heads).to(tl.int64)
            h = (tl.program_id(1) % n_heads).to(tl.int64)
            rows = top + tl.arange(0, Q)
            columns, keys = tl.arange(0, D), tl.arange(0, K)
            q_b, q_h, q_t, q_d = q_strides
            k_b, k_h, k_t, k_d = k_strides
            v_b, v_h, v_t, v_d = v_strides
            o_b, o_h, o_t, o_d = out_strides
            q_at = q_ptr + b * q_b + h * q_h + rows[:, None] * q_t + columns * q_d
            k_at = k_ptr + b * k_b + h * k_h + keys * k_t + columns[:, None] * k_d
            v_at = v_ptr + b * v_b + h * v_h + keys[:, None] * v_t + columns * v_d
            q = tl.load(q_at, mask=rows[:, None] < t_q, other=0.0)  # Q D
            maximum = tl.full([Q], float("-inf"), tl.float32)
            total = tl.zeros([Q], tl.float32)
            output = tl.zeros([Q, D], tl.float32)
            end, whole = t_k, t_k // K * K  # up to `whole` nothing is hidden
            if CAUSAL:
                first = t_k - t_q + top  # position of the block's first query
                end, whole = tl.minimum(first + Q, t_k), (first + 1) // K * K
            for MASKED in tl.static_range(2):
                for left in range(whole if MASKED else 0, end if MASKED else whole, K):
                    if MASKED:
                        there = left + keys < t_k
                        k = tl.load(k_at + left * k_t, mask=there, other=0.0)  # D K
                        v = tl.load(v_at + left * v_t, mask=there[:, None], other=0.0)
                    else:
                        k = tl.load(k_at + left * k_t)  # D K
                        v = tl.load(v_at + left * v_t)  # K D
                    scores = tl.dot(q, k, input_precision="ieee") * scale  # Q K
                    if MASKED:
                        seen = there[None, :]
                        if CAUSAL:
                            seen &= left + keys <= (t_k - t_q + rows)[:, None]
                        scores = tl.where(seen, scores, float("-inf"))
                    new = tl.maximum(maximum, tl.max(scores, 1))
                    shrink = tl.exp2(maximum - new)
                    weights = tl.exp2(scores - new[:, None])  # Q K
                    total = total * shrink + tl.sum(weights, 1)
                    output *= shrink[:, None]
                    weights = weights.to(v.dtype)
                    output = tl.dot(weights, v, output, input_precision="ieee")  # Q D
                    maximum = new
            total = tl.where(total == 0, 1.0, total)  # without any key
            output /= total[:, None]
            lse = (maximum + tl.log2(total)) * 0.6931471805599453  # ln 2
            o_at = out_ptr + b * o_b + h * o_h + rows[:, None] * o_t + columns * o_d
            output = output.to(out_ptr.dtype.element_ty)
            tl.store(o_at, output, mask=rows[:, None] < t_q)
            tl.store(lse_ptr + tl.program_id(1) * t_q + rows, lse, mask=rows < t_q)

        flash_kernel.kernel = kernel

    out = torch.empty_like(q)  # B H T_q Dh
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    scale = math.log2(math.e) / math.sqrt(d_head)  # for exp2 in place of exp
    pairs = [(128, 64), (64, 64), (64, 32), (32, 32), (16, 16)]  # large ones first
    pairs = [(block_q or n, block_k or m) for n, m in pairs]
    for n, m in pairs:
        settings = {
            "num_warps": 8 if n * d_head > 8192 else 4,
            "num_stages": 2 + (n > 64),
            "enable_fp_fusion": True,
        }
        try:
            with torch.cuda.device_of(q):
                flash_kernel.kernel[(triton.cdiv(t_q, n), n_batch * n_heads)](
                    *(q, k, v, out, lse),
                    *(x.stride() for x in (q, k, v, out)),
                    *(n_heads, t_q, t_k, scale, causal, d_head, n, m),
                    **settings,
                )
            return out, lse
        except triton.runtime.OutOfResources as error:
            if (n, m) == pairs[-1]:
                raise RuntimeError(
                    f"blocks of {n} × {m} do not fit: {error}"
                ) from error
    ### END SOLUTION
