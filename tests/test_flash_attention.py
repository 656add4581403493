"""Lesson 11: the reference against PyTorch; other right and other wrong answers."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import FlopCounterMode

from solutions import flash_attention as reference
from solutions.attention import attention, causal_mask
from tests.answers import fails, passes
from utils import build, syllabus
from utils.check import evaluate
from utils.check.exercise import find
from utils.check.recording import register_source
from utils.cost import peak_bytes, saved_bytes
from utils.exercises.flash_attention import heads, visible
from utils.probe import probe, strided
from utils.timing import fitted_exponent

triton = reference.triton
right = reference.flash_attention
needs_triton = pytest.mark.skipif(triton is None, reason="Triton is not installed")
needs_interpreter = pytest.mark.skipif(
    triton is None or torch.cuda.is_available(), reason="there Triton compiles"
)


def changed(name, *edits):
    """An answer of the reference in whose text each `(old, new)` was exchanged.

    It looks like a learner's own: its module is not the course's.
    """
    source = inspect.getsource(reference)
    for old, new in edits:
        assert old in source, old
        source = source.replace(old, new)
    file = f"<{name} with {edits}>"
    register_source(file, source)
    module = {**vars(reference), "__name__": "__main__"}
    exec(compile(source, file, "exec", dont_inherit=True), module)
    return module[name]


# The reference ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_error_is_at_most_twice_that_of_the_whole_matrix(dtype, causal):
    for t_q, t_k, blocks in (
        (300, 300, (64, 64)),
        (130, 517, (48, 80)),
        (33, 40, (7, 5)),
    ):
        q, k, v = heads(2, 3, t_q=t_q, t_k=t_k, d_head=64, seed=t_q, dtype=dtype)
        mask = causal_mask(t_q, t_k) if causal else None
        exact = attention(*(x.double() for x in (q, k, v)), mask)
        naive = (attention(q, k, v, mask).double() - exact).abs().max()
        tiled, _ = right(q, k, v, causal, *blocks)
        assert (tiled.double() - exact).abs().max() <= 2 * naive


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_err_at_most_twice_as_much(dtype):
    q, k, v = heads(2, 3, t_q=90, t_k=130, d_head=32, seed=5, dtype=dtype)
    mask, d_output = causal_mask(90, 130), probe(2, 3, 90, 32, seed=9, dtype=dtype)

    def gradients(f, *given):
        leaves = [x.clone().requires_grad_() for x in given]
        out = f(*leaves)
        return torch.autograd.grad(out, leaves, d_output.to(out.dtype))

    exact = gradients(lambda *x: attention(*x, mask), *(x.double() for x in (q, k, v)))
    naive = gradients(lambda *x: attention(*x, mask), q, k, v)
    tiled = gradients(
        lambda *x: reference.FlashAttention.apply(*x, True, 32, 48), q, k, v
    )
    for truth, whole, ours in zip(exact, naive, tiled, strict=True):
        allowed = 2 * (whole.double() - truth).abs().max()
        assert (ours.double() - truth).abs().max() <= allowed


def test_gradcheck():
    given = heads(1, t_q=3, t_k=4, d_head=2, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in given]
    for causal in (False, True):
        torch.autograd.gradcheck(
            lambda *x, c=causal: reference.FlashAttention.apply(*x, c, 2, 3), leaves
        )


def test_memory_is_linear_and_operations_are_quadratic():
    lengths, forward, training, kept, flops = [256, 512, 1024], [], [], [], []
    for t in lengths:
        q, k, v = heads(t_q=t, t_k=t, d_head=16)
        forward.append(peak_bytes(right, q, k, v, True))
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def step(*x):
            reference.FlashAttention.apply(*x, True, 128, 128).sum().backward()

        training.append(peak_bytes(step, *leaves))
        kept.append(saved_bytes(reference.FlashAttention.apply, *leaves))
        with FlopCounterMode(display=False) as counter:
            right(q, k, v, False, 128, 128)
        flops.append(counter.get_total_flops())
    for found in (forward, training, kept):
        assert fitted_exponent(lengths, found) <= 1.1, found
    assert abs(fitted_exponent(lengths, flops) - 2) < 1e-6
    whole = [peak_bytes(attention, *heads(t_q=t, t_k=t, d_head=8)) for t in lengths]
    assert fitted_exponent(lengths, whole) > 1.9


def test_hbm_bytes_agrees_with_the_formula_of_the_paper():
    for t, d, block in ((4096, 64, 128), (8192, 128, 64)):
        expected = 2 * d * t * t // block + 2 * t * d
        assert reference.hbm_bytes(t, d, block) == 2 * expected + 4 * t
        assert reference.hbm_bytes(t, d) == 2 * (4 * t * t + 4 * t * d)
    causal = reference.hbm_bytes(4096, 64, 64, True)
    assert 0.5 < causal / reference.hbm_bytes(4096, 64, 64) < 0.53


def test_training_costs_seven_products_where_six_were():
    def flops(f):
        leaves = [x.requires_grad_() for x in heads(t_q=128, t_k=128, d_head=16)]
        with FlopCounterMode(display=False) as counter:
            f(*leaves).sum().backward()
        return counter.get_total_flops()

    ratio = flops(reference.FlashAttention.apply) / flops(attention)
    assert ratio == pytest.approx(7 / 6)


# The kernel ---------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize(
    ("t_q", "t_k", "d_head", "causal", "blocks"),
    [
        (37, 53, 16, False, (None, None)),
        (37, 53, 32, True, (16, 16)),
        (64, 64, 64, True, (32, 16)),
        (1, 90, 128, False, (16, 64)),
    ],
)
def test_kernel_is_within_1e_5_of_sdpa(t_q, t_k, d_head, causal, blocks):
    q, k, v = heads(2, 2, t_q=t_q, t_k=t_k, d_head=d_head, seed=t_q)
    mask = visible(t_q, t_k, causal)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for given in ((q, k, v), [strided(x) for x in (q, k, v)], turned):
        output, lse = reference.flash_kernel(*given, causal, *blocks)
        assert (output - expected).abs().max() <= 1e-5
        assert (lse - right(q, k, v, causal)[1]).abs().max() <= 1e-5


@needs_triton
def test_kernel_refuses_what_it_cannot_compute(monkeypatch):
    q, k, v = heads(2, 3, t_q=20, t_k=16, d_head=16)

    def refused(kind, says, *args):
        with pytest.raises(kind) as raised:
            reference.flash_kernel(*args)
        assert "\n" not in str(raised.value)
        assert all(word in str(raised.value) for word in says)

    refused(ValueError, ["20", "16", "cut q"], q, k, v, True)
    refused(ValueError, ["bfloat16", "float32"], *(x.bfloat16() for x in (q, k, v)))
    refused(ValueError, ["float64"], *(x.double() for x in (q, k, v)))
    refused(ValueError, ["float16", "float32"], q.half(), k, v)
    refused(ValueError, ["repeat_kv"], q, k[:, :1], v[:, :1])
    refused(ValueError, ["(1, 3, 16, 16)"], q, k[:1], v[:1])
    refused(ValueError, ["(3, 20, 16)"], q[0], k[0], v[0])
    refused(ValueError, ["24"], *(probe(1, 1, 5, 24) for _ in range(3)))
    for block in (0, -16, 24, 8):
        refused(ValueError, [f" {block}:"], q, k, v, False, block, 16)
        refused(ValueError, [f" {block}:"], q, k, v, False, 16, block)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    refused(RuntimeError, ["cpu", "CUDA", "TRITON_INTERPRET=1"], q, k, v)
    refused(RuntimeError, ["meta"], *(x.to("meta") for x in (q, k, v)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    class Old:
        """Stands for a tensor on a card that is too old."""

        device = torch.device("cuda", 0)

    refused(RuntimeError, ["7.5", "8.0", "flash_attention"], Old, Old, Old)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(reference, "triton", None)
    refused(RuntimeError, ["no Triton", "flash_attention"], q, k, v)


@needs_triton
def test_kernel_tries_smaller_blocks_until_they_fit(monkeypatch):
    tried = []

    class Kernel:
        def __getitem__(self, grid):
            def launch(*args, **settings):
                tried.append(args[-2:])
                if len(tried) < 3:
                    raise triton.runtime.OutOfResources(100_000, 65_536, "memory")

            return launch

    monkeypatch.setattr(reference.flash_kernel, "kernel", Kernel(), raising=False)
    q, k, v = heads(1, 1, t_q=16, t_k=16, d_head=128)
    reference.flash_kernel(q, k, v)
    assert tried == [(128, 64), (64, 64), (64, 32)]
    del tried[:]
    with pytest.raises(RuntimeError, match="128 × 128 do not fit"):
        reference.flash_kernel(q, k, v, False, 128, 128)


def test_cells_that_differ_without_triton_are_not_compared():
    source = build.LessonSource(syllabus.ROOT / "lessons" / "11_flash_attention.md")
    for solved in (False, True):
        for cell in build.notebook(source, solved).cells:
            about = "triton is None" in cell.source or "check(flash_k" in cell.source
            if about and "exercise" not in cell.metadata.get("tags", []):
                assert "nbval-ignore-output" in cell.metadata["tags"]


# Right answers in another form --------------------------------------------------------


def high(x):
    return x if x.dtype == torch.float64 else x.float()


def online_by_reduce(blocks):
    """Each block by itself, then two summaries are merged."""
    state = None
    for block in map(high, blocks):
        m = block.max(dim=-1).values
        safe = torch.where(m == -torch.inf, 0.0, m)
        here = m, torch.exp(block - safe.unsqueeze(-1)).sum(-1)
        if state is None:
            state = here
            continue
        (m_1, l_1), (m_2, l_2) = state, here
        m = torch.maximum(m_1, m_2)
        safe = torch.where(m == -torch.inf, 0.0, m)
        state = m, l_1 * torch.exp(m_1 - safe) + l_2 * torch.exp(m_2 - safe)
    if state is None:
        raise ValueError("at least one block is needed")
    return state


def online_by_lse(blocks):
    """Through the log-sum-exp, which is turned back at the end."""
    m = lse = None
    for block in map(high, blocks):
        both = block.amax(-1), torch.logsumexp(block, -1)
        m, lse = (
            (torch.maximum(m, both[0]), torch.logaddexp(lse, both[1]))
            if m is not None
            else both
        )
    if m is None:
        raise ValueError("no block")
    return m, torch.where(m == -torch.inf, 0.0, torch.exp(lse - m))


def online_with_iterator(blocks):
    blocks = iter(blocks)
    first = next(blocks, None)
    if first is None:
        raise ValueError("no block")
    m = high(first).amax(-1)

    def clean(m):
        return torch.clamp(m, min=torch.finfo(m.dtype).min)

    total = (high(first) - clean(m)[..., None]).exp().sum(-1)
    for block in map(high, blocks):
        old, m = m, torch.maximum(m, block.amax(-1))
        total = total.mul((old - clean(m)).exp())
        total = total.add((block - clean(m)[..., None]).exp().sum(-1))
    return m, total


def refuse(q, k, v, causal, *blocks):
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        raise ValueError(shapes)
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(shapes)
    if causal and q.shape[-2] > k.shape[-2]:
        raise ValueError(shapes)
    for block in blocks:
        if block is not None and block < 1:
            raise ValueError(f"block {block}")


def keys_outside(q, k, v, causal=False, block_q=64, block_k=64):
    """The first paper's order: keys in the outer loop, everything in place."""
    refuse(q, k, v, causal, block_q, block_k)
    (t_q, d_head), t_k = q.shape[-2:], k.shape[-2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
    total = torch.zeros(q.shape[:-1], dtype=dtype, device=q.device)
    m = torch.full_like(total, -math.inf)
    at = torch.arange(t_q, device=q.device) + t_k - t_q
    for left in range(0, t_k, block_k):
        keys = torch.arange(left, min(left + block_k, t_k), device=q.device)
        k_block, v_block = (x[..., left : left + block_k, :].to(dtype) for x in (k, v))
        for top in range(0, t_q, block_q):
            rows = slice(top, top + block_q)
            if causal and left > t_k - t_q + min(top + block_q, t_q) - 1:
                continue
            s = q[..., rows, :].to(dtype) @ k_block.mT * d_head**-0.5
            if causal:
                s = torch.where(keys <= at[rows, None], s, -math.inf)
            new = torch.maximum(m[..., rows], s.amax(-1))
            safe = torch.where(new == -math.inf, 0.0, new)
            p = torch.exp(s - safe[..., None])
            shrink = torch.exp(m[..., rows] - safe)
            total[..., rows] = total[..., rows] * shrink + p.sum(-1)
            out[..., rows, :] = out[..., rows, :] * shrink[..., None] + p @ v_block
            m[..., rows] = new
    seen = torch.where(total == 0, 1.0, total)
    return (out / seen[..., None]).to(q.dtype), m + torch.log(total)


def in_float64(q, k, v, causal=False, block_q=64, block_k=64):
    out, lse = right(q.double(), k.double(), v.double(), causal, block_q, block_k)
    return [out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))]


def blocks_split(q, k, v, causal=False, block_q=64, block_k=64):
    """Blocks are split further, so that sums round more often."""
    refuse(q, k, v, causal, block_q, block_k)
    return right(q, k, v, causal, block_q, max(block_k // 4, 1))


def sizes_exchanged(q, k, v, causal=False, block_q=64, block_k=64):
    """No worse: as many scores are in memory at once."""
    return right(q, k, v, causal, block_k, block_q)


class KeysOutside(torch.autograd.Function):
    """Keys in the outer loop; finished gradients are joined, not added in place."""

    @staticmethod
    def forward(ctx, q, k, v, causal=False, block_q=32, block_k=16):
        out, lse = keys_outside(q, k, v, causal, block_q, block_k)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = causal, block_q, block_k
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        causal, block_q, block_k = ctx.how
        wide, n, scale = lse.dtype, q.shape[-2], q.shape[-1] ** -0.5
        big_d = torch.einsum("...d,...d->...", d_out.to(wide), out.to(wide))
        d_q, d_ks, d_vs = torch.zeros_like(q, dtype=wide), [], []
        at = torch.arange(n) + k.shape[-2] - n
        for left in range(0, k.shape[-2], block_k):
            k_b, v_b = (x[..., left : left + block_k, :].to(wide) for x in (k, v))
            d_k, d_v = torch.zeros_like(k_b), torch.zeros_like(v_b)
            for top in range(0, n, block_q):
                rows = slice(top, top + block_q)
                q_b, d_o = q[..., rows, :].to(wide), d_out[..., rows, :].to(wide)
                p = torch.exp(q_b * scale @ k_b.mT - lse[..., rows, None])
                if causal:
                    p = p * (torch.arange(left, left + k_b.shape[-2]) <= at[rows, None])
                    p = p.nan_to_num(0.0, 0.0)
                d_s = p * (d_o @ v_b.mT - big_d[..., rows, None]) * scale
                d_v, d_k = d_v + p.mT @ d_o, d_k + d_s.mT @ q_b
                d_q[..., rows, :] += d_s @ k_b
            d_ks.append(d_k)
            d_vs.append(d_v)
        joined = torch.cat(d_ks, -2).to(k.dtype), torch.cat(d_vs, -2).to(v.dtype)
        return d_q.to(q.dtype), *joined, None, None, None


class Chunked(torch.autograd.Function):
    """Autograd inside: block rows are computed again under enable_grad."""

    @staticmethod
    def forward(ctx, q, k, v, causal=False, block_q=64, block_k=64):
        ctx.causal, ctx.block = causal, block_q
        ctx.save_for_backward(q, k, v)
        return right(q, k, v, causal, block_q, block_k)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        leaves = [high(x).detach().requires_grad_() for x in ctx.saved_tensors]
        q, k, v = leaves
        n, t_k = q.shape[-2], k.shape[-2]
        grads = [torch.zeros_like(x) for x in leaves]
        for top in range(0, n, ctx.block):
            stop = min(top + ctx.block, n)
            end = t_k - n + stop if ctx.causal else t_k
            with torch.enable_grad():
                block = q[..., top:stop, :], k[..., :end, :], v[..., :end, :]
                out, _ = right(*block, ctx.causal)
            d = d_out[..., top:stop, :].to(out.dtype)
            for total, part in zip(
                grads, torch.autograd.grad(out, leaves, d), strict=True
            ):
                total += part
        return *(g.to(d_out.dtype) for g in grads), None, None, None


def bytes_in_closed_form(t, d_head, block=None, causal=False, bytes_per_number=2):
    if block is None:
        return 4 * t * (t + d_head) * bytes_per_number
    if block < 1:
        raise ValueError(f"blocks of {block}")
    whole, rest = divmod(t, block)
    read = block * whole * (whole + 1) // 2 + (t if rest else 0)
    read = read if causal else t * -(-t // block)
    return 2 * d_head * (t + read) * bytes_per_number + 4 * t


if triton is not None:
    tl = reference.tl
    HIDDEN = tl.constexpr(float("-inf"))

    @triton.jit
    def places(head, n, rows, columns, D: tl.constexpr):
        return (head * n + rows)[:, None] * D + columns

    @triton.jit
    def one_loop(
        q_ptr,
        k_ptr,
        v_ptr,
        o_ptr,
        l_ptr,
        N,
        M,
        scale,
        MORE,
        CAUSAL: tl.constexpr,
        D: tl.constexpr,
        BQ: tl.constexpr,
        BK: tl.constexpr,
    ):
        """Contiguous heads, exp, one loop with masks; reads MORE keys than it needs."""
        head, c = tl.program_id(1), tl.arange(0, D)
        i = tl.program_id(0) * BQ + tl.arange(0, BQ)
        q_at = places(head, N, i, c, D)
        q = tl.load(q_ptr + q_at, mask=i[:, None] < N)
        m = tl.full((BQ,), HIDDEN, dtype=tl.float32)
        total = tl.full((BQ,), 0, dtype=tl.float32)
        acc = tl.full((BQ, D), 0, dtype=tl.float32)
        stop = M
        if CAUSAL:
            stop = tl.minimum(M, M - N + (tl.program_id(0) + 1) * BQ + MORE)
        for left in range(0, stop, BK):
            j = left + tl.arange(0, BK)
            at = places(head, M, j, c, D)
            k = tl.load(k_ptr + at, mask=j[:, None] < M)  # hidden, so NaN does no harm
            v = tl.load(v_ptr + at, mask=j[:, None] < M, other=0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            allowed = j[None, :] < M
            if CAUSAL:
                allowed = allowed & (j[None, :] <= i[:, None] + M - N)
            s = tl.where(allowed, s, HIDDEN)
            new = tl.maximum(m, tl.max(s, axis=1))
            p = tl.exp(s - new[:, None])
            total = total * tl.exp(m - new) + tl.sum(p, axis=1)
            acc = acc * tl.exp(m - new)[:, None]
            acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
            m = new
        out = acc / tl.maximum(total, 1)[:, None]
        tl.store(o_ptr + q_at, out, mask=i[:, None] < N)
        tl.store(l_ptr + head * N + i, m + tl.log(total), mask=i < N)


def by_one_loop(q, k, v, causal=False, block_q=None, block_k=None, more=0):
    refused(q, k, v, causal, block_q, block_k)
    block_q, block_k = block_q or 16, block_k or 16
    q, k, v = (x.contiguous() for x in (q, k, v))
    (b, h, n, d), m = q.shape, k.shape[2]
    out, lse = torch.empty_like(q), q.new_empty(b, h, n, dtype=torch.float32)
    one_loop[(triton.cdiv(n, block_q), b * h)](
        *(q, k, v, out, lse, n, m, d**-0.5, more, causal, d, block_q, block_k)
    )
    return out, lse


def refused(q, k, v, causal, *blocks):
    refuse(q, k, v, causal, *blocks)
    if q.dtype in (torch.bfloat16, torch.float64):
        raise ValueError(f"{q.dtype} cannot be computed here")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("online_softmax", online_by_reduce),
        ("online_softmax", online_by_lse),
        ("online_softmax", online_with_iterator),
        ("flash_attention", keys_outside),
        ("flash_attention", in_float64),
        ("flash_attention", blocks_split),
        ("flash_attention", sizes_exchanged),
        ("FlashAttention", KeysOutside),
        ("FlashAttention", Chunked),
        ("hbm_bytes", bytes_in_closed_form),
        pytest.param("flash_kernel", by_one_loop, marks=needs_triton),
    ],
)
def test_right_answers_in_another_form_pass(name, answer):
    passes(answer, name)


def test_other_right_parts_fit_together():
    parts = dict(find("flash_in_the_model").reference)
    parts |= {"FlashAttention": KeysOutside, "flash_attention": keys_outside}
    passes({**parts, "online_softmax": online_by_lse}, "flash_in_the_model")


# Wrong answers that no fault lists ----------------------------------------------------


def online_of_two_blocks(blocks):
    """Right for two blocks; the third is merged with the wrong factor."""
    m, total = None, 0
    for i, block in enumerate(map(high, blocks)):
        new = block.amax(-1) if m is None else torch.maximum(m, block.amax(-1))
        factor = 1 if i == 0 else torch.exp(m - new) ** min(i, 2)
        total = total * factor + (block - new[..., None]).exp().sum(-1)
        m = new
    if m is None:
        raise ValueError
    return m, total


def online_of_a_list(blocks):
    """Two passes over a list: not side by side, and all in memory."""
    return online_by_reduce(list(blocks))


def online_of_copies(blocks):
    return online_by_reduce([block * 1.0 for block in blocks])


def online_if_any(blocks):
    """A generator is true, even an empty one."""
    if not blocks:
        raise ValueError("no block")
    try:
        return online_by_reduce(blocks)
    except ValueError:
        return None, None


def matrix(q, k, v, causal=False, block_q=64, block_k=64):
    """Blocks ignored."""
    return right(q, k, v, causal, 10_000, 10_000)


def mask_in_memory(q, k, v, causal=False, block_q=64, block_k=64):
    whole = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    out, lse = right(q, k, v, causal, block_q, block_k)
    return out, lse if whole.any() is not None else whole


def square_only(q, k, v, causal=False, block_q=64, block_k=64):
    causal_here = causal and q.shape[-2] == k.shape[-2]
    refuse(q, k, v, causal, block_q, block_k)
    return right(q, k, v, causal_here, block_q, block_k)


def scores_rounded(q, k, v, causal=False, block_q=64, block_k=64):
    return right(q.half().to(q.dtype), k, v, causal, block_q, block_k)


def zeros_like_queries(q, k, v, causal=False, block_q=64, block_k=64):
    """Without keys, the output is as wide as a query."""
    out, lse = right(q, k, v, causal, block_q, block_k)
    return (out if k.shape[-2] else torch.zeros_like(q)), lse


class ThroughAutograd(torch.autograd.Function):
    """Right, and the graph of the forward pass is kept on ctx."""

    @staticmethod
    def forward(ctx, q, k, v, causal=False, block_q=64, block_k=64):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out, _ = right(*leaves, causal, block_q, block_k)
        ctx.graph = out, leaves
        return out.detach()

    @staticmethod
    def backward(ctx, d_out):
        out, leaves = ctx.graph
        return *torch.autograd.grad(out, leaves, d_out, retain_graph=True), *[None] * 3


class NotAFunction(torch.autograd.Function):
    """Differentiable because it is plain torch: everything is kept."""

    @staticmethod
    def apply(q, k, v, causal=False, block_q=64, block_k=64):
        return right(q, k, v, causal, block_q, block_k)[0]


def rounded_up(t, d_head, block=None, causal=False, bytes_per_number=2):
    if block is not None and block > 0:
        t = -(-t // block) * block
    return reference.hbm_bytes(t, d_head, block, causal, bytes_per_number)


def zero_is_none(t, d_head, block=None, causal=False, bytes_per_number=2):
    return reference.hbm_bytes(t, d_head, block or None, causal, bytes_per_number)


def by_pytorch(q, k, v, causal=False, block_q=None, block_k=None):
    by_one_loop(q, k, v, causal, block_q, block_k)  # launched, and not used
    return right(q, k, v, causal, 64, 64)


def hidden_blocks(q, k, v, causal=False, block_q=None, block_k=None):
    return by_one_loop(q, k, v, causal, block_q, block_k, more=block_k or 16)


@pytest.mark.parametrize(
    ("name", "answer", "fault"),
    [
        ("online_softmax", online_of_two_blocks, None),
        ("online_softmax", online_of_a_list, None),
        ("online_softmax", online_of_copies, None),
        ("online_softmax", online_if_any, None),
        ("flash_attention", matrix, None),
        ("flash_attention", mask_in_memory, None),
        ("flash_attention", square_only, None),
        ("flash_attention", scores_rounded, None),
        ("flash_attention", zeros_like_queries, None),
        ("FlashAttention", ThroughAutograd, None),
        ("FlashAttention", NotAFunction, None),
        ("hbm_bytes", rounded_up, None),
        ("hbm_bytes", zero_is_none, None),
        pytest.param("flash_kernel", by_pytorch, None, marks=needs_triton),
        pytest.param("flash_kernel", hidden_blocks, None, marks=needs_triton),
    ],
)
def test_wrong_answers_are_rejected(name, answer, fault):
    report = fails(answer, name, fault)
    assert fault or report.fault is None, report.message  # no untrue name


def test_half_of_flash_attention_is_shown_as_what_it_is():
    class Crashing(KeysOutside):
        @staticmethod
        def backward(ctx, d_out):
            return torch.zeros(3, 4) @ torch.zeros(3, 4), None, None, None, None, None

    report = fails(Crashing, "FlashAttention")
    assert report.fault is None
    assert "RuntimeError" in report.message and "in backward" in report.message

    class HalfWritten(KeysOutside):
        @staticmethod
        def backward(ctx, d_out):
            raise NotImplementedError

    report = evaluate(HalfWritten, "FlashAttention")
    assert report.status == "todo" and "only partly written" in report.message
