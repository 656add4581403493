"""Lesson 11: the reference against PyTorch; other right and other wrong answers."""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import FlopCounterMode

from solutions import flash_attention as reference
from solutions.attention import attention, causal_mask
from tests.answers import fails, passes
from utils import build, syllabus
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
    """A learner's answer: the reference's text, each `(old, new)` exchanged in it."""
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


SIZES = (300, 300, 64, 64), (130, 517, 48, 80), (33, 40, 7, 5), (90, 130, 32, 48)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("t_q", "t_k", "block_q", "block_k"), SIZES)
def test_errors_are_at_most_twice_the_matrix_s(dtype, t_q, t_k, block_q, block_k):
    given = heads(2, 3, t_q=t_q, t_k=t_k, d_head=64, seed=t_q, dtype=dtype)
    d_output = probe(2, 3, t_q, 64, seed=9, dtype=dtype)

    def in_blocks(*x, mask):
        return reference.FlashAttention.apply(*x, mask is not None, block_q, block_k)

    def results(f, *given, mask):  # the output, and at one of the sizes the gradients
        leaves = [x.clone().requires_grad_() for x in given]
        found = [f(*leaves, mask=mask)]
        if t_q == 90:
            found += torch.autograd.grad(found[0], leaves, d_output.to(found[0].dtype))
        return [x.detach().double() for x in found]

    for mask in (None, causal_mask(t_q, t_k)):
        exact = results(attention, *(x.double() for x in given), mask=mask)
        naive = results(attention, *given, mask=mask)
        tiled = results(in_blocks, *given, mask=mask)
        for truth, theirs, ours in zip(exact, naive, tiled, strict=True):
            assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max()


def test_gradcheck():
    given = heads(1, t_q=3, t_k=4, d_head=2, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in given]
    for causal in (False, True):
        torch.autograd.gradcheck(
            lambda *x, c=causal: reference.FlashAttention.apply(*x, c, 2, 3), leaves
        )


def flops(f, *given):
    with FlopCounterMode(display=False) as counter:
        f(*given)
    return counter.get_total_flops()


def test_memory_is_linear_and_operations_are_quadratic():
    def step(*x):
        reference.FlashAttention.apply(*x, True, 128, 128).sum().backward()

    lengths = [256, 512, 1024]
    given = [heads(t_q=t, t_k=t, d_head=16) for t in lengths]
    leaves = [[x.clone().requires_grad_() for x in each] for each in given]
    for found in (
        [peak_bytes(right, *x, True) for x in given],
        [peak_bytes(step, *x) for x in leaves],
        [saved_bytes(reference.FlashAttention.apply, *x) for x in leaves],
    ):
        assert fitted_exponent(lengths, found) <= 1.1, found
    work = [flops(right, *x, False, 128, 128) for x in given]
    assert abs(fitted_exponent(lengths, work) - 2) < 1e-6
    assert fitted_exponent(lengths, [peak_bytes(attention, *x) for x in given]) > 1.9


def test_hbm_bytes_agrees_with_the_formula_of_the_paper():
    for t, d, block in ((4096, 64, 128), (8192, 128, 64)):
        expected = 2 * d * t * t // block + 2 * t * d
        assert reference.hbm_bytes(t, d, block) == 2 * expected + 4 * t
        assert reference.hbm_bytes(t, d) == 2 * (4 * t * t + 4 * t * d)
    causal = reference.hbm_bytes(4096, 64, 64, True)
    assert 0.5 < causal / reference.hbm_bytes(4096, 64, 64) < 0.53


def test_training_costs_seven_products_where_six_were():
    leaves = [x.requires_grad_() for x in heads(t_q=128, t_k=128, d_head=16)]
    ours, whole = (
        flops(lambda *x, f=f: f(*x).sum().backward(), *leaves)
        for f in (reference.FlashAttention.apply, attention)
    )
    assert ours / whole == pytest.approx(7 / 6)


# The kernel ---------------------------------------------------------------------------


SHAPES = (
    (37, 53, 16, False, ()),
    (37, 53, 32, True, (16, 16)),
    (64, 64, 64, True, (32, 16)),
    (1, 90, 128, False, (16, 64)),
)


@needs_triton
@pytest.mark.parametrize(("t_q", "t_k", "d_head", "causal", "blocks"), SHAPES)
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

    for says, args in (
        (["20", "16", "cut q"], (q, k, v, True)),
        (["bfloat16", "float32"], [x.bfloat16() for x in (q, k, v)]),
        (["float16", "float32"], (q.half(), k, v)),
        (["repeat_kv"], (q, k[:, :1], v[:, :1])),
        (["(1, 3, 16, 16)"], (q, k[:1], v[:1])),
        (["24"], [probe(1, 1, 5, 24)] * 3),
        *(([f" {n}:"], (q, k, v, False, n, 16)) for n in (0, -16, 24, 8)),
        ([" 24:"], (q, k, v, False, 16, 24)),
    ):
        refused(ValueError, says, *args)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    refused(RuntimeError, ["cpu", "CUDA", "TRITON_INTERPRET=1"], q, k, v)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    old = SimpleNamespace(device=torch.device("cuda", 0))  # on a card that is too old
    refused(RuntimeError, ["7.5", "8.0", "flash_attention"], old, old, old)
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


def online_by_lse(blocks):
    """Through the log-sum-exp, which is turned back at the end."""
    blocks = map(high, blocks)
    first = next(blocks, None)
    if first is None:
        raise ValueError("no block")
    m, lse = first.amax(-1), torch.logsumexp(first, -1)
    for block in blocks:
        m = torch.maximum(m, block.amax(-1))
        lse = torch.logaddexp(lse, torch.logsumexp(block, -1))
    return m, torch.where(m == -torch.inf, 0.0, torch.exp(lse - m))


def refuse(q, k, v, causal, *blocks):
    fits = q.shape[:-2] == k.shape[:-2] and k.shape[:-1] == v.shape[:-1]
    ahead = causal and q.shape[-2] > k.shape[-2]
    small = any(block is not None and block < 1 for block in blocks)
    if not fits or q.shape[-1] != k.shape[-1] or ahead or small:
        raise ValueError([*(tuple(x.shape) for x in (q, k, v)), *blocks])


def keys_outside(q, k, v, causal=False, block_q=64, block_k=64):
    """The first paper's order: keys in the outer loop, everything in place."""
    refuse(q, k, v, causal, block_q, block_k)
    t_q, t_k = q.shape[-2], k.shape[-2]
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
            s = q[..., rows, :].to(dtype) @ k_block.mT * q.shape[-1] ** -0.5
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


class KeysOutside(torch.autograd.Function):
    """Keys in the outer loop; hidden weights are multiplied, then cleaned."""

    @staticmethod
    def forward(ctx, q, k, v, causal=False, block_q=32, block_k=16):
        out, lse = keys_outside(q, k, v, causal, block_q, block_k)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = causal, block_q, block_k
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        *given, out, lse = ctx.saved_tensors
        (causal, block_q, block_k), wide = ctx.how, lse.dtype
        (n, d_head), t_k = given[0].shape[-2:], given[1].shape[-2]
        d_q, d_k, d_v = (torch.zeros_like(x, dtype=wide) for x in given)
        big_d = torch.einsum("...d,...d->...", d_out.to(wide), out.to(wide))
        at, keys = torch.arange(n) + t_k - n, torch.arange(t_k)
        for cols in (slice(i, i + block_k) for i in range(0, t_k, block_k)):
            k, v = (x[..., cols, :].to(wide) for x in given[1:])
            for rows in (slice(i, i + block_q) for i in range(0, n, block_q)):
                q, d_o = (x[..., rows, :].to(wide) for x in (given[0], d_out))
                p = torch.exp(q * d_head**-0.5 @ k.mT - lse[..., rows, None])
                if causal:
                    p = (p * (keys[cols] <= at[rows, None])).nan_to_num(0.0, 0.0)
                d_s = p * (d_o @ v.mT - big_d[..., rows, None]) * d_head**-0.5
                d_v[..., cols, :] += p.mT @ d_o
                d_k[..., cols, :] += d_s.mT @ q
                d_q[..., rows, :] += d_s @ k
        return *(x.to(d_out.dtype) for x in (d_q, d_k, d_v)), None, None, None


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
        CAUSAL: tl.constexpr,
        D: tl.constexpr,
        BQ: tl.constexpr,
        BK: tl.constexpr,
    ):
        """Contiguous heads, exp, one loop with masks."""
        head, c = tl.program_id(1), tl.arange(0, D)
        i = tl.program_id(0) * BQ + tl.arange(0, BQ)
        q_at = places(head, N, i, c, D)
        q = tl.load(q_ptr + q_at, mask=i[:, None] < N)
        m = tl.full((BQ,), HIDDEN, dtype=tl.float32)
        total = tl.full((BQ,), 0, dtype=tl.float32)
        acc = tl.full((BQ, D), 0, dtype=tl.float32)
        stop = M
        if CAUSAL:
            stop = tl.minimum(M, M - N + (tl.program_id(0) + 1) * BQ)
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


def by_one_loop(q, k, v, causal=False, block_q=None, block_k=None):
    refuse(q, k, v, causal, block_q, block_k)
    if q.dtype in (torch.bfloat16, torch.float64):
        raise ValueError(f"{q.dtype} cannot be computed here")
    block_q, block_k = block_q or 16, block_k or 16
    q, k, v = (x.contiguous() for x in (q, k, v))
    (b, h, n, d), m = q.shape, k.shape[2]
    out, lse = torch.empty_like(q), q.new_empty(b, h, n, dtype=torch.float32)
    one_loop[(triton.cdiv(n, block_q), b * h)](
        *(q, k, v, out, lse, n, m, d**-0.5, causal, d, block_q, block_k)
    )
    return out, lse


RIGHT = [
    ("online_softmax", online_by_lse),
    ("flash_attention", keys_outside),
    ("flash_attention", in_float64),
    ("FlashAttention", KeysOutside),
    ("hbm_bytes", bytes_in_closed_form),
    pytest.param("flash_kernel", by_one_loop, marks=needs_triton),
]


@pytest.mark.parametrize(("name", "answer"), RIGHT)
def test_right_answers_in_another_form_pass(name, answer):
    passes(answer, name)


def test_other_right_parts_fit_together():
    parts = dict(find("flash_in_the_model").reference)
    parts |= {"FlashAttention": KeysOutside, "flash_attention": keys_outside}
    passes({**parts, "online_softmax": online_by_lse}, "flash_in_the_model")


# Wrong answers that no fault lists ----------------------------------------------------


def online_of_a_list(blocks):
    """Two passes over a list: not side by side, and all in memory."""
    return online_by_lse(list(blocks))


class NotAFunction(torch.autograd.Function):
    """Differentiable because it is plain torch: everything is kept."""

    @staticmethod
    def apply(q, k, v, causal=False, block_q=64, block_k=64):
        return right(q, k, v, causal, block_q, block_k)[0]


class OutputOverwritten(KeysOutside):
    """Right gradients, and the output that others use is no longer what it was."""

    @staticmethod
    def backward(ctx, d_out):
        gradients = KeysOutside.backward(ctx, d_out)
        ctx.saved_tensors[3].zero_()
        return gradients


def zero_is_none(t, d_head, block=None, causal=False, bytes_per_number=2):
    return reference.hbm_bytes(t, d_head, block or None, causal, bytes_per_number)


def by_pytorch(q, k, v, causal=False, block_q=None, block_k=None):
    by_one_loop(q, k, v, causal, block_q, block_k)  # launched, and not used
    return right(q, k, v, causal, 64, 64)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("online_softmax", online_of_a_list),
        ("FlashAttention", NotAFunction),
        ("FlashAttention", OutputOverwritten),
        ("hbm_bytes", zero_is_none),
        pytest.param("flash_kernel", by_pytorch, marks=needs_triton),
    ],
)
def test_wrong_answers_are_rejected_under_no_name(name, answer):
    report = fails(answer, name)
    assert report.fault is None, report.message


TOLD = [  # an edit, and what is said of the result
    ("online_softmax", "total + torch.exp(block", "torch.exp(block", "is 1 · that of"),
    ("flash_attention", " / math.sqrt(d_head)", "", "2.65 times the scores"),
    ("flash_attention", "maximum + torch.log(t", "torch.log(t", "1 · log Σ"),
    ("flash_attention", "causal and right >", "causal and 0 >", "looks at keys 0 to 8"),
    ("flash_attention", "output * shrink[..., None]", "output", "for keys 0 to 5"),
    ("FlashAttention", "d_weights - row", "d_weights + row", "is 1 · P∘dP + 1 · P∘D"),
    ("FlashAttention", "d_v[..., keys, :] +=", "d_v[..., keys, :] =", "1 · block 2,"),
    ("hbm_bytes", "2 * t * t", "t * t", "difference is -1 · T·T numbers"),
    (
        "hbm_bytes",
        "2 * seen *",
        "seen *",
        "-1 · T·d_head numbers for each of 30 blocks",
    ),
]


@pytest.mark.parametrize(("name", "old", "new", "says"), TOLD)
def test_what_a_wrong_result_is_made_of_is_told(name, old, new, says, monkeypatch):
    monkeypatch.setattr(find(name), "faults", [])
    report = fails(changed(name, (old, new)), name)
    assert says in report.message, report.message
