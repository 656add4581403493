"""Lesson 11: the reference against PyTorch; other right and other wrong answers."""

import inspect
import linecache
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import FlopCounterMode

from solutions import flash_attention as reference
from solutions.attention import attention, causal_mask
from utils import build, session, syllabus
from utils.check import CheckFailed, check, evaluate, evaluate_joint
from utils.check.exercise import Joint
from utils.check.triton_interpreter import OutsideTensor, strict
from utils.cost import Cost, peak_bytes, saved_bytes
from utils.exercises import flash_attention as exercises
from utils.exercises.flash_attention import blockwise, gradient_with, heads
from utils.probe import probe, strided
from utils.timing import fitted_exponent

triton = reference.triton
needs_triton = pytest.mark.skipif(triton is None, reason="Triton is not installed")
needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there Triton compiles"
)


def passes(answer, name):
    report = evaluate(answer, name)
    assert report.status == "passed", report.message


def fails(answer, name, fault=None):
    report = evaluate(answer, name)
    assert report.status == "failed", report.message
    if fault is not None:
        assert report.fault == fault, report.message


# The reference ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_error_is_at_most_twice_that_of_the_whole_matrix(dtype, causal):
    for seed, (t_q, t_k, blocks) in enumerate(
        [(300, 300, (64, 64)), (130, 517, (48, 80)), (33, 40, (7, 5))]
    ):
        q, k, v = heads(2, 3, t_q=t_q, t_k=t_k, d_head=64, seed=10 * seed, dtype=dtype)
        wide = [x.double() for x in (q, k, v)]
        mask = causal_mask(t_q, t_k) if causal else None
        exact = attention(*wide, mask)
        naive = (attention(q, k, v, mask).double() - exact).abs().max()
        tiled, _ = reference.flash_attention(q, k, v, causal, *blocks)
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
    q, k, v = heads(1, t_q=3, t_k=4, d_head=2, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for causal in (False, True):
        torch.autograd.gradcheck(
            lambda *x, c=causal: reference.FlashAttention.apply(*x, c, 2, 3), leaves
        )


def test_memory_is_linear_and_operations_are_quadratic():
    lengths, forward, training, kept, flops = [256, 512, 1024, 2048], [], [], [], []
    for t in lengths:
        q, k, v = heads(t_q=t, t_k=t, d_head=16)
        forward.append(peak_bytes(reference.flash_attention, q, k, v, True))
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def step(*x):
            reference.FlashAttention.apply(*x, True, 128, 128).sum().backward()

        training.append(peak_bytes(step, *leaves))
        kept.append(saved_bytes(reference.FlashAttention.apply, *leaves))
        with FlopCounterMode(display=False) as counter:
            reference.flash_attention(q, k, v, False, 128, 128)
        flops.append(counter.get_total_flops())
    for found in (forward, training, kept):
        assert fitted_exponent(lengths, found) <= 1.1, found
    assert abs(fitted_exponent(lengths, flops) - 2) < 1e-6


def test_the_whole_matrix_is_noticed_by_the_count():
    lengths = [256, 512, 1024]
    found = [peak_bytes(attention, *heads(t_q=t, t_k=t, d_head=8)) for t in lengths]
    assert fitted_exponent(lengths, found) > 1.9


def test_log_sum_exp_and_online_softmax_agree():
    q, k, v = heads(2, 3, t_q=7, t_k=50, d_head=8)
    scores = q @ k.mT / math.sqrt(8)
    maximum, total = reference.online_softmax(scores.split(9, dim=-1))
    _, lse = reference.flash_attention(q, k, v, False, 3, 11)
    torch.testing.assert_close(lse, maximum + total.log())
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1))


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
        (90, 90, 16, True, (64, 32)),
    ],
)
def test_kernel_is_within_1e_5_of_sdpa(t_q, t_k, d_head, causal, blocks):
    q, k, v = heads(2, 2, t_q=t_q, t_k=t_k, d_head=d_head, seed=t_q)
    mask = causal_mask(t_q, t_k) if causal else None
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for given in ((q, k, v), [strided(x) for x in (q, k, v)], turned):
        output, lse = reference.flash_kernel(*given, causal, *blocks)
        assert (output - expected).abs().max() <= 1e-5
        _, tiled = reference.flash_attention(q, k, v, causal)
        assert (lse - tiled).abs().max() <= 1e-5


@needs_triton
def test_kernel_refuses_what_it_cannot_compute(monkeypatch):
    q, k, v = heads(2, 3, t_q=20, t_k=16, d_head=16)
    kernel = reference.flash_kernel

    def refused(kind, says, *args, **kwargs):
        with pytest.raises(kind) as raised:
            kernel(*args, **kwargs)
        assert "\n" not in str(raised.value)
        for word in says:
            assert word in str(raised.value)

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
    meta = [x.to("meta") for x in (q, k, v)]
    refused(RuntimeError, ["meta"], *meta)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(reference, "triton", None)
    refused(RuntimeError, ["no Triton", "flash_attention"], q, k, v)


@needs_triton
def test_kernel_names_the_capability_of_an_old_card(monkeypatch):
    class Old:
        """Stands for a tensor on a card that is too old."""

        device = torch.device("cuda", 0)

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(RuntimeError, match=r"7\.5.*8\.0.*flash_attention"):
        reference.flash_kernel(Old, Old, Old)


@needs_triton
def test_kernel_tries_smaller_blocks_until_they_fit(monkeypatch):
    tried = []

    class Kernel:
        def __getitem__(self, grid):
            def launch(*args, **settings):
                tried.append(args[-2:])
                if len(tried) < 3:
                    raise triton.runtime.OutOfResources(
                        100_000, 65_536, "shared memory"
                    )

            return launch

    monkeypatch.setattr(reference.flash_kernel, "kernel", Kernel(), raising=False)
    q, k, v = heads(1, 1, t_q=16, t_k=16, d_head=128)
    reference.flash_kernel(q, k, v)
    assert tried == [(128, 64), (64, 64), (64, 32)]
    del tried[:]
    with pytest.raises(RuntimeError, match="128 × 128 do not fit"):
        reference.flash_kernel(q, k, v, False, 128, 128)


COMPILE = """
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from solutions.flash_attention import flash_kernel
torch.cuda.get_device_capability = lambda device: (9, 0)
size = {"shape": torch.Size((1, 1, 16, 64)), "dim": lambda: 4}
q = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, **size)
try:
    flash_kernel(q, q, q)  # defines its kernel, then finds that q is no tensor
except TypeError:
    pass
kernel = flash_kernel.kernel
for capability, d, n, m, stages in ((90, 64, 128, 64, 3), (80, 128, 64, 32, 2)):
    fixed = {"CAUSAL": True, "D": d, "Q": n, "K": m}
    kinds, values = {}, {}
    for i, name in enumerate(kernel.arg_names):
        kinds[name] = "i32"
        if name.endswith("_ptr"):
            kinds[name] = "*fp32" if name == "lse_ptr" else "*bf16"
        if name.endswith("_strides"):
            kinds[name] = ("i32", "i32", "i32", "constexpr")
            values[i, 3] = 1
        if name == "scale":
            kinds[name] = "fp32"
        if name in fixed:
            kinds[name] = "constexpr"
            values[(i,)] = fixed[name]
    options = {"num_warps": 4, "num_stages": stages, "enable_fp_fusion": True}
    target = GPUTarget("cuda", capability, 32)
    made = compile(ASTSource(kernel, kinds, values), target=target, options=options)
    print(capability, made.metadata.shared, "mma" in made.asm["ptx"])
"""


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is compiled anyway")
def test_kernel_compiles_without_a_gpu_and_fits_64_kilobytes(tmp_path):
    run = in_python(COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    lines = [line.split() for line in run.stdout.splitlines()]
    assert [line[0] for line in lines] == ["90", "80"], run.stderr
    for _, shared, uses_tensor_cores in lines:
        assert int(shared) <= 64 * 1024 and uses_tensor_cores == "True"


# Triton is missing, or was imported too early -----------------------------------------


def test_without_triton_the_exercise_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(exercises, "triton", None)
    for answer in (reference.flash_kernel, lambda q, k, v: None):
        report = evaluate(answer, "flash_kernel")
        assert (report.status, report.fault, report.left_out) == ("todo", None, True)
        assert "leave this exercise out" in report.message
    monkeypatch.delenv("COURSE_STRICT", raising=False)

    def flash_kernel(q, k, v, causal=False, block_q=None, block_k=None):
        raise NotImplementedError

    assert check(flash_kernel) is reference.flash_kernel
    shown = capsys.readouterr().out
    assert "flash_kernel: left out" in shown and "✗" not in shown


def test_what_was_left_out_earns_nothing(monkeypatch):
    def flash_kernel(q, k, v, causal=False, block_q=None, block_k=None):
        raise NotImplementedError

    monkeypatch.setattr(exercises, "triton", None)
    monkeypatch.setenv("COURSE_STRICT", "1")
    with pytest.raises(CheckFailed, match="left out"):
        check(flash_kernel)
    monkeypatch.setattr(session, "solved", True)
    check(flash_kernel)
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    with pytest.raises(CheckFailed, match="left out"):
        check(flash_kernel)


@needs_triton
def test_modes_that_cannot_run_are_left_out(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    report = evaluate(reference.flash_kernel, "flash_kernel")
    if not torch.cuda.is_available():
        assert report.left_out and "restart the kernel" in report.message
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (7, 0))
    report = evaluate(reference.flash_kernel, "flash_kernel")
    assert report.left_out and "7.0" in report.message


def in_python(code, **environment):
    environment = {k: v for k, v in {**os.environ, **environment}.items() if v}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=syllabus.ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="there Triton compiles")
def test_triton_imported_too_early_is_explained():
    run = in_python(
        "import triton, torch\n"
        "from solutions.flash_attention import flash_kernel\n"
        "from utils.check import evaluate\n"
        "report = evaluate(flash_kernel)\n"
        "print(report.left_out, report.message)\n"
        "q = torch.zeros(1, 1, 16, 16)\n"
        "try:\n"
        "    flash_kernel(q, q, q)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n",
        TRITON_INTERPRET="",
    )
    assert "True" in run.stdout, run.stderr
    assert "from its first cell" in run.stdout
    assert "restart Python" in run.stdout


def test_solutions_import_without_triton():
    run = in_python(
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from solutions.flash_attention import flash_attention, flash_kernel, triton\n"
        "import torch\n"
        "print(triton, flash_attention(*[torch.ones(3, 4)] * 3)[0].sum().item())\n"
        "from utils.check import evaluate\n"
        "print(evaluate(flash_kernel).title)\n",
        TRITON_INTERPRET="",
    )
    assert run.stdout.split("\n")[:2] == ["None 12.0", "flash_kernel: left out"], run


# Right answers in another form: online softmax ----------------------------------------


def high(x):
    return x if x.dtype == torch.float64 else x.float()


def online_by_reduce(blocks):
    """Each block by itself, then two summaries are merged."""
    state = None
    for block in blocks:
        block = high(block)
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


def online_in_float64(blocks):
    m = total = wanted = None
    for block in blocks:
        wanted = wanted or (
            block.dtype if block.dtype == torch.float64 else torch.float32
        )
        block = block.double()
        if m is None:
            m = torch.full(block.shape[:-1], -math.inf, dtype=torch.float64)
            m, total = m.to(block.device), torch.zeros_like(m).to(block.device)
        new = torch.stack([m, block.amax(-1)]).amax(0)
        shrink = torch.exp(m - new).nan_to_num(0.0)
        total = total * shrink + torch.exp(block - new[..., None]).nan_to_num(0.0).sum(
            -1
        )
        m = new
    if m is None:
        raise ValueError("no block")
    return [m.to(wanted), total.to(wanted)]


def online_by_lse(blocks):
    """Through the log-sum-exp, which is turned back at the end."""
    m = lse = None
    for block in blocks:
        block = high(block)
        both = block.amax(-1), torch.logsumexp(block, -1)
        m, lse = (
            both
            if m is None
            else (torch.maximum(m, both[0]), torch.logaddexp(lse, both[1]))
        )
    if m is None:
        raise ValueError("no block")
    return m, torch.where(m == -torch.inf, 0.0, torch.exp(lse - m))


def online_score_by_score(blocks):
    m, total = None, None
    for block in blocks:
        for score in high(block).unbind(-1):
            if m is None:
                m, total = torch.full_like(score, -torch.inf), torch.zeros_like(score)
            new = torch.maximum(m, score)
            hidden = new == -torch.inf
            total = torch.where(
                hidden, total, total * torch.exp(m - new) + torch.exp(score - new)
            )
            m = new
    if m is None:
        raise ValueError("no block")
    return m, total


def online_with_iterator(blocks):
    blocks = iter(blocks)
    first = next(blocks, None)
    if first is None:
        raise ValueError("no block")
    first = high(first)
    m = first.amax(-1)

    def clean(m):
        return torch.clamp(m, min=torch.finfo(m.dtype).min)

    total = (first - clean(m)[..., None]).exp().sum(-1)
    for block in blocks:
        block = high(block)
        old, m = m, torch.maximum(m, block.amax(-1))
        total = total.mul((old - clean(m)).exp())
        total = total.add((block - clean(m)[..., None]).exp().sum(-1))
    return m, total


@pytest.mark.parametrize(
    "answer",
    [
        online_by_reduce,
        online_in_float64,
        online_by_lse,
        online_score_by_score,
        online_with_iterator,
    ],
)
def test_other_right_online_softmaxes_pass(answer):
    passes(answer, "online_softmax")


# Right answers in another form: attention in blocks -----------------------------------


def refuse(q, k, v, causal, *blocks):
    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        raise ValueError(f"{q.shape}, {k.shape}, {v.shape}")
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(f"{q.shape}, {k.shape}, {v.shape}")
    if causal and q.shape[-2] > k.shape[-2]:
        raise ValueError(f"causal with {q.shape[-2]} queries and {k.shape[-2]} keys")
    for block in blocks:
        if block < 1:
            raise ValueError(f"block {block}")


def keys_outside(q, k, v, causal=False, block_q=64, block_k=64):
    """The first paper's order: keys in the outer loop, everything in place."""
    refuse(q, k, v, causal, block_q, block_k)
    t_q, t_k, dtype = (
        q.shape[-2],
        k.shape[-2],
        torch.promote_types(q.dtype, torch.float32),
    )
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
    total = torch.zeros(q.shape[:-1], dtype=dtype, device=q.device)
    m = torch.full_like(total, -math.inf)
    at = torch.arange(t_q, device=q.device) + t_k - t_q
    for left in range(0, t_k, block_k):
        keys = torch.arange(left, min(left + block_k, t_k), device=q.device)
        for top in range(0, t_q, block_q):
            rows = slice(top, top + block_q)
            if causal and left > t_k - t_q + min(top + block_q, t_q) - 1:
                continue
            s = (
                q[..., rows, :].to(dtype)
                @ k[..., left : left + block_k, :].to(dtype).mT
            )
            s = s * q.shape[-1] ** -0.5
            if causal:
                s = torch.where(keys <= at[rows, None], s, -math.inf)
            new = torch.maximum(m[..., rows], s.amax(-1))
            safe = torch.where(new == -math.inf, 0.0, new)
            p = torch.exp(s - safe[..., None])
            shrink = torch.exp(m[..., rows] - safe)
            total[..., rows] = total[..., rows] * shrink + p.sum(-1)
            part = p @ v[..., left : left + block_k, :].to(dtype)
            out[..., rows, :] = out[..., rows, :] * shrink[..., None] + part
            m[..., rows] = new
    seen = torch.where(total == 0, 1.0, total)
    return (out / seen[..., None]).to(q.dtype), m + torch.log(total)


def divided_as_it_goes(q, k, v, causal=False, block_q=64, block_k=64):
    """Outputs that are normalised all along, merged by their log-sum-exps."""
    refuse(q, k, v, causal, block_q, block_k)
    t_q, t_k = q.shape[-2:][0], k.shape[-2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    outs, lses = [], []
    for rows in torch.arange(t_q, device=q.device).split(block_q):
        first, last = int(rows[0]) if not rows.is_meta else 0, t_k
        top = len(outs) * block_q
        first, n = top, len(rows)
        last = t_k - t_q + first + n if causal else t_k
        out = torch.zeros(*q.shape[:-2], n, v.shape[-1], dtype=dtype, device=q.device)
        lse = torch.full(out.shape[:-1], -math.inf, dtype=dtype, device=q.device)
        for left in range(0, last, block_k):
            right = min(left + block_k, last)
            s = torch.einsum(
                "...qd,...kd->...qk",
                q[..., first : first + n, :].to(dtype),
                k[..., left:right, :].to(dtype) / math.sqrt(q.shape[-1]),
            )
            if causal:
                key = torch.arange(left, right, device=q.device)
                s = s.masked_fill(
                    key[None, :] > rows[:, None] + (t_k - t_q), float("-inf")
                )
            here = torch.logsumexp(s, -1)
            both = torch.logaddexp(lse, here)
            part = torch.softmax(s, -1).nan_to_num(0.0) @ v[..., left:right, :].to(
                dtype
            )
            out = (
                out * torch.exp(lse - both)[..., None]
                + part * torch.exp(here - both).nan_to_num(0.0)[..., None]
            )
            lse = both
        outs.append(out.to(q.dtype))
        lses.append(lse)
    return torch.cat(outs, -2), torch.cat(lses, -1)


def two_passes(q, k, v, causal=False, block_q=64, block_k=64):
    """The scores computed twice: once for the log-sum-exp, once for the output."""
    refuse(q, k, v, causal, block_q, block_k)
    t_q, t_k = q.shape[-2], k.shape[-2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=dtype, device=q.device)

    def scores(top, left, end):
        a = q[..., top : top + block_q, :].to(dtype) * q.shape[-1] ** -0.5
        b = k[..., left : min(left + block_k, end), :].to(dtype)
        s = a @ b.transpose(-1, -2)
        if causal:
            n, m = s.shape[-2:]
            hidden = torch.ones(n, m, dtype=torch.bool, device=q.device)
            s = s.masked_fill(hidden.triu(top + t_k - t_q - left + 1), -math.inf)
        return s

    for top in range(0, t_q, block_q):
        end = min(t_k, top + block_q + t_k - t_q) if causal else t_k
        rows = slice(top, top + block_q)
        for left in range(0, end, block_k):
            here = torch.logsumexp(scores(top, left, end), -1)
            lse[..., rows] = torch.logaddexp(lse[..., rows], here)
        total = 0.0
        for left in range(0, end, block_k):
            p = torch.exp(scores(top, left, end) - lse[..., rows, None])
            total = total + p @ v[..., left : min(left + block_k, end), :].to(dtype)
        out[..., rows, :] = total
    return out, lse


def in_float64(q, k, v, causal=False, block_q=64, block_k=64):
    out, lse = blockwise()(q.double(), k.double(), v.double(), causal, block_q, block_k)
    return [out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))]


@pytest.mark.parametrize(
    "answer",
    [keys_outside, divided_as_it_goes, two_passes, in_float64, blockwise()],
)
def test_other_right_flash_attentions_pass(answer):
    passes(answer, "flash_attention")


# Right answers in another form: the gradient ------------------------------------------


class KeysOutside(torch.autograd.Function):
    """Keys in the outer loop; finished gradients are joined, not added in place."""

    @staticmethod
    def forward(ctx, q, k, v, causal=False, block_q=64, block_k=64):
        out, lse = keys_outside(q, k, v, causal, block_q, block_k)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = causal, block_q, block_k
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        causal, block_q, block_k = ctx.how
        wide, n = lse.dtype, q.shape[-2]
        scale = q.shape[-1] ** -0.5
        big_d = torch.einsum("...d,...d->...", d_out.to(wide), out.to(wide))
        d_q, d_ks, d_vs = torch.zeros_like(q, dtype=wide), [], []
        at = torch.arange(n) + k.shape[-2] - n
        for left in range(0, k.shape[-2], block_k):
            k_b = k[..., left : left + block_k, :].to(wide)
            v_b = v[..., left : left + block_k, :].to(wide)
            d_k, d_v = torch.zeros_like(k_b), torch.zeros_like(v_b)
            for top in range(0, n, block_q):
                rows = slice(top, top + block_q)
                p = torch.exp(
                    q[..., rows, :].to(wide) * scale @ k_b.mT - lse[..., rows, None]
                )
                if causal:
                    key = torch.arange(left, left + k_b.shape[-2])
                    p = p * (key <= at[rows, None])
                    p = p.nan_to_num(0.0, 0.0)
                d_o = d_out[..., rows, :].to(wide)
                d_s = p * (d_o @ v_b.mT - big_d[..., rows, None]) * scale
                d_v, d_k = d_v + p.mT @ d_o, d_k + d_s.mT @ q[..., rows, :].to(wide)
                d_q[..., rows, :] += d_s @ k_b
            d_ks.append(d_k)
            d_vs.append(d_v)
        return (
            d_q.to(q.dtype),
            torch.cat(d_ks, -2).to(k.dtype),
            torch.cat(d_vs, -2).to(v.dtype),
            *[None] * 3,
        )


class Chunked(torch.autograd.Function):
    """Autograd inside: block rows are computed again under enable_grad."""

    @staticmethod
    def forward(ctx, q, k, v, causal=False, block_q=64, block_k=64):
        ctx.causal, ctx.block = causal, block_q
        ctx.save_for_backward(q, k, v)
        return reference.flash_attention(q, k, v, causal, block_q, block_k)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        leaves = [
            x.detach().to(torch.promote_types(x.dtype, torch.float32)).requires_grad_()
            for x in ctx.saved_tensors
        ]
        q, k, v = leaves
        n, t_k = q.shape[-2], k.shape[-2]
        grads = [torch.zeros_like(x) for x in leaves]
        for top in range(0, n, ctx.block):
            stop = min(top + ctx.block, n)
            end = t_k - n + stop if ctx.causal else t_k
            with torch.enable_grad():
                out, _ = reference.flash_attention(
                    q[..., top:stop, :], k[..., :end, :], v[..., :end, :], ctx.causal
                )
            d = d_out[..., top:stop, :].to(out.dtype)
            for total, part in zip(
                grads, torch.autograd.grad(out, leaves, d), strict=True
            ):
                total += part
        return *(g.to(d_out.dtype) for g in grads), None, None, None


class Remembering(KeysOutside):
    """Three more results are not needed when the arguments were left out."""

    @staticmethod
    def forward(ctx, q, k, v, causal=False, block_q=32, block_k=16):
        return KeysOutside.forward(ctx, q, k, v, causal, block_q, block_k)


@pytest.mark.parametrize("answer", [KeysOutside, Chunked, Remembering, gradient_with()])
def test_other_right_gradients_pass(answer):
    passes(answer, "FlashAttention")


# Right answers in another form: traffic -----------------------------------------------


def bytes_in_closed_form(t, d_head, block=None, causal=False, bytes_per_number=2):
    if block is None:
        return 4 * t * (t + d_head) * bytes_per_number
    if block < 1:
        raise ValueError(f"blocks of {block}")
    whole, rest = divmod(t, block)
    if causal:
        read = block * whole * (whole + 1) // 2 + (t if rest else 0)
    else:
        read = t * -(-t // block)
    return 2 * d_head * (t + read) * bytes_per_number + 4 * t


def bytes_by_loops(t, d_head, block=None, causal=False, bytes_per_number=2):
    if block is not None and block < 1:
        raise ValueError(block)
    if block is None:
        moved = [t * d_head] * 2 + [t * t] + [t * t] * 2 + [t * t] + [t * d_head] * 2
        return int(sum(moved)) * bytes_per_number
    total, top = 0, 0
    while top < t:
        n = min(block, t - top)
        total += 2 * n * d_head * bytes_per_number + n * 4
        total += 2 * (top + n if causal else t) * d_head * bytes_per_number
        top += n
    return total


@pytest.mark.parametrize("answer", [bytes_in_closed_form, bytes_by_loops])
def test_other_right_counts_pass(answer):
    passes(answer, "hbm_bytes")


# Right answers in another form: the kernel --------------------------------------------

if triton is not None:
    tl = reference.tl

    @triton.jit
    def one_loop(
        q_ptr,
        k_ptr,
        v_ptr,
        o_ptr,
        l_ptr,
        H,
        N,
        M,
        scale,
        CAUSAL: tl.constexpr,
        D: tl.constexpr,
        BQ: tl.constexpr,
        BK: tl.constexpr,
        MORE: tl.constexpr,
    ):
        """Contiguous heads, exp, one loop with masks; reads MORE keys than it needs."""
        head = tl.program_id(1)
        i = tl.program_id(0) * BQ + tl.arange(0, BQ)
        c = tl.arange(0, D)
        q = tl.load(
            q_ptr + (head * N + i)[:, None] * D + c, mask=i[:, None] < N, other=0
        )
        m = tl.full((BQ,), -float("inf"), dtype=tl.float32)
        total = tl.full((BQ,), 0, dtype=tl.float32)
        acc = tl.full((BQ, D), 0, dtype=tl.float32)
        stop = M
        if CAUSAL:
            stop = tl.minimum(M, M - N + (tl.program_id(0) + 1) * BQ + MORE)
        for left in range(0, stop, BK):
            j = left + tl.arange(0, BK)
            at = (head * M + j)[:, None] * D + c
            k = tl.load(k_ptr + at, mask=j[:, None] < M, other=0)
            v = tl.load(v_ptr + at, mask=j[:, None] < M, other=0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            allowed = j[None, :] < M
            if CAUSAL:
                allowed = allowed & (j[None, :] <= i[:, None] + M - N)
            s = tl.where(allowed, s, -float("inf"))
            new = tl.maximum(m, tl.max(s, axis=1))
            p = tl.exp(s - new[:, None])
            total = total * tl.exp(m - new) + tl.sum(p, axis=1)
            acc = acc * tl.exp(m - new)[:, None]
            acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
            m = new
        at = (head * N + i)[:, None] * D + c
        tl.store(o_ptr + at, acc / total[:, None], mask=i[:, None] < N)
        tl.store(l_ptr + head * N + i, m + tl.log(total), mask=i < N)


def refused(q, k, v, causal, *blocks):
    refuse(q, k, v, causal, *(b for b in blocks if b is not None))
    if q.dtype in (torch.bfloat16, torch.float64):
        raise ValueError(f"{q.dtype} cannot be computed here")


def by_one_loop(q, k, v, causal=False, block_q=None, block_k=None, more=0):
    refused(q, k, v, causal, block_q, block_k)
    block_q, block_k = block_q or 16, block_k or 16
    q, k, v = (x.contiguous() for x in (q, k, v))
    (b, h, n, d), m = q.shape, k.shape[2]
    out, lse = torch.empty_like(q), q.new_empty(b, h, n, dtype=torch.float32)
    one_loop[(triton.cdiv(n, block_q), b * h)](
        *(q, k, v, out, lse, h, n, m, d**-0.5, causal, d, block_q, block_k, more)
    )
    return out, lse


def defined_inside(q, k, v, causal=False, block_q=None, block_k=None):
    """The kernel as the example in the lesson has it; its own blocks always."""
    refused(q, k, v, causal, block_q, block_k)

    @triton.jit
    def kernel(
        q_ptr, k_ptr, v_ptr, o_ptr, l_ptr, n, m, scale, C: tl.constexpr, D: tl.constexpr
    ):
        head, i, c, j = (
            tl.program_id(1),
            tl.program_id(0),
            tl.arange(0, D),
            tl.arange(0, 16),
        )
        rows = i * 16 + j
        q = (
            tl.load(q_ptr + (head * n + rows)[:, None] * D + c, rows[:, None] < n, 0.0)
            * scale
        )
        best = tl.zeros([16], tl.float32) - float("inf")
        total, acc = tl.zeros([16], tl.float32), tl.zeros([16, D], tl.float32)
        end = m
        if C:
            end = tl.minimum(m, m - n + (i + 1) * 16)
        for left in range(0, end, 16):
            there = left + j < m
            at = (head * m + left + j)[:, None] * D + c
            k = tl.load(k_ptr + at, there[:, None], 0.0)
            v = tl.load(v_ptr + at, there[:, None], 0.0)
            s = tl.dot(q, k.T, input_precision="ieee")
            seen = there[None, :] & (
                (left + j)[None, :] - (m - n) <= rows[:, None] + (1 - C) * m
            )
            s = tl.where(seen, s, float("-inf"))
            old, best = best, tl.maximum(best, tl.max(s, 1))
            p = tl.exp2(s - best[:, None])
            total = tl.sum(p, 1) + tl.exp2(old - best) * total
            acc = tl.dot(
                p,
                v.to(tl.float32),
                acc * tl.exp2(old - best)[:, None],
                input_precision="ieee",
            )
        tl.store(
            o_ptr + (head * n + rows)[:, None] * D + c,
            acc / total[:, None],
            rows[:, None] < n,
        )
        tl.store(
            l_ptr + head * n + rows,
            (best + tl.log2(total)) / 1.4426950408889634,
            rows < n,
        )

    kind = q.dtype
    q, k, v = (x.float().contiguous() for x in (q, k, v))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
    b, h, n, d = q.shape
    scale = 1.4426950408889634 / d**0.5
    grid = (triton.cdiv(n, 16), b * h)
    kernel[grid](q, k, v, out, lse, n, k.shape[2], scale, int(causal), d)
    return out.to(kind), lse


@needs_triton
@pytest.mark.parametrize("answer", [by_one_loop, defined_inside])
def test_other_right_kernels_pass(answer):
    passes(answer, "flash_kernel")


# Wrong answers that no fault lists ----------------------------------------------------


def online_of_means(blocks):
    m = total = None
    for block in blocks:
        block = high(block)
        centre = block.mean(-1)
        m = centre if m is None else torch.maximum(m, centre)
        total = 0 if total is None else total
        total = total + (block - m[..., None]).exp().sum(-1)
    if m is None:
        raise ValueError
    return m, total


def online_of_two_blocks(blocks):
    """Right for two blocks; the third is merged with the wrong factor."""
    m, total = None, 0
    for i, block in enumerate(blocks):
        block = high(block)
        new = block.amax(-1) if m is None else torch.maximum(m, block.amax(-1))
        factor = 1 if i == 0 else torch.exp(m - new) ** (1 if i == 1 else 2)
        total = total * factor + (block - new[..., None]).exp().sum(-1)
        m = new
    if m is None:
        raise ValueError
    return m, total


def online_with_epsilon(blocks):
    m, total = online_by_reduce(blocks)
    return m, total + 1e-3


def online_sorted(blocks):
    """Keeps every block to sort them."""
    return online_by_reduce(sorted(blocks, key=lambda b: -float(b.sum())))


def online_as_list_only(blocks):
    return online_by_reduce([blocks[i] for i in range(len(blocks))])


def online_returns_lse(blocks):
    m, total = online_by_reduce(blocks)
    return torch.stack([m, total])


def online_in_place(blocks):
    for block in blocks:
        block.sub_(1.0)
    return online_by_reduce(blocks)


def online_of_absolute_scores(blocks):
    m, total = online_by_reduce(blocks)
    return m.abs(), total


def online_clamped(blocks):
    return online_by_reduce([b.clamp(-50, 50) for b in blocks])


@pytest.mark.parametrize(
    "wrong",
    [
        online_of_means,
        online_of_two_blocks,
        online_with_epsilon,
        online_sorted,
        online_as_list_only,
        online_returns_lse,
        online_in_place,
        online_of_absolute_scores,
        online_clamped,
    ],
)
def test_other_wrong_online_softmaxes_fail(wrong):
    fails(wrong, "online_softmax")


def attention_with(change):
    """The right answer with its arguments or results changed."""

    def flash_attention(q, k, v, causal=False, block_q=64, block_k=64):
        refuse(q, k, v, causal, block_q, block_k)
        return change(q, k, v, causal, block_q, block_k)

    return flash_attention


right = reference.flash_attention
WRONG_TILED = {
    "only the first block of keys": lambda q, k, v, c, n, m: right(
        q, k[..., :m, :], v[..., :m, :], c and q.shape[-2] <= m, n, m
    ),
    "blocks ignored": lambda q, k, v, c, n, m: right(q, k, v, c, 10_000, 10_000),
    "square only": lambda q, k, v, c, n, m: right(
        q, k, v, c and q.shape[-2] == k.shape[-2], n, m
    ),
    "causal by keyword of another": lambda q, k, v, c, n, m: (
        right(q, k, v, True, n, m)
        if q.shape[-2] == k.shape[-2]
        else right(q, k, v, c, n, m)
    ),
    "cosine": lambda q, k, v, c, n, m: right(
        F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, c, n, m
    ),
    "values scaled": lambda q, k, v, c, n, m: right(q, k, v * 1.001, c, n, m),
    "scores rounded": lambda q, k, v, c, n, m: right(
        q.half().to(q.dtype), k, v, c, n, m
    ),
    "lse of the first row": lambda q, k, v, c, n, m: (
        right(q, k, v, c, n, m)[0],
        right(q, k, v, c, n, m)[1][..., :1].expand(q.shape[:-1]),
    ),
    "lse with a dimension more": lambda q, k, v, c, n, m: (
        right(q, k, v, c, n, m)[0],
        right(q, k, v, c, n, m)[1][..., None],
    ),
    "a batch at a time only": lambda q, k, v, c, n, m: right(q[0], k[0], v[0], c, n, m),
    "blocks exchanged and no rest": lambda q, k, v, c, n, m: right(
        q[..., : max(n, q.shape[-2] // n * n), :], k, v, c, m, n
    ),
    "hidden by −1e4": lambda q, k, v, c, n, m: blockwise(hidden=-1e4)(q, k, v, c, n, m),
    "maximum from −100": lambda q, k, v, c, n, m: blockwise(start=-100.0)(
        q, k, v, c, n, m
    ),
    "stale factor": lambda q, k, v, c, n, m: blockwise(out_factor=lambda f: f.sqrt())(
        q, k, v, c, n, m
    ),
    "epsilon in the divisor": lambda q, k, v, c, n, m: blockwise(
        divisor=lambda x: x + 1e-3
    )(q, k, v, c, n, m),
    "memory of a mask": lambda q, k, v, c, n, m: (
        torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device),
        right(q, k, v, c, n, m),
    )[1],
}


@pytest.mark.parametrize("name", WRONG_TILED)
def test_other_wrong_flash_attentions_fail(name):
    fails(attention_with(WRONG_TILED[name]), "flash_attention")


def changed(name, *changes):
    """An answer of the reference in whose text each `(old, new)` was exchanged."""
    source = inspect.getsource(reference)
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    file = f"<{name} with {changes}>"  # Triton reads the text where tracebacks do
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    module = dict(vars(reference))
    exec(compile(source, file, "exec"), module)
    return module[name]


CHANGED = {  # one line of the reference, and the mistake that is named
    "online_softmax": [
        (
            "sum(dim=-1)\n        maximum = new",
            "half().sum(dim=-1)\n        maximum = new",
            None,
        ),
        (
            "return maximum, total\n",
            "return maximum.squeeze(), total.squeeze()\n",
            None,
        ),
        ("total - torch.inf", "total - 1e38", None),
        (
            "exp(block - shift[..., None])",
            "exp((block - shift[..., None]).clamp(-20))",
            None,
        ),
        (
            "total * torch.exp(maximum - shift)\n",
            "total * torch.exp(shift - maximum)\n",
            "infinite_rescaling",
        ),
        (
            "exp(block - shift[..., None])",
            "exp(block - maximum[..., None])",
            "infinite_terms",
        ),
        ("sum(dim=-1)\n        maximum = new", "sum(dim=-1)", "maximum_not_updated"),
        (
            "[..., None]).sum(dim=-1)\n        maximum",
            "[..., None]).mean(dim=-1)\n        maximum",
            "mean_for_sum",
        ),
        (
            "[..., None]).sum(dim=-1)\n        maximum",
            "[..., None]).sum()\n        maximum",
            "one_sum_for_all_rows",
        ),
        ("block.amax(dim=-1))", "block.amin(dim=-1))", "smallest_score"),
        (
            "return maximum, total\n",
            "return maximum.masked_fill(maximum == -torch.inf, 0), total\n",
            "hidden_row_has_maximum_zero",
        ),
    ],
    "flash_attention": [
        (
            "weights @ v_block",
            "weights.to(v.dtype).to(high) @ v_block",
            "weights_in_half_precision",
        ),
        (
            "maximum = new\n        outputs",
            "maximum, output = new, output.to(q.dtype).to(high)\n        outputs",
            "output_kept_in_half_precision",
        ),
        (
            " or (*batch, t_k) != tuple(v.shape[:-1])",
            " or t_k != v.shape[-2]",
            None,
        ),
        ("v.shape[-1]))  # … n d_v", "d_head))  # … n d", None),
        ("exp(maximum - new)", "exp(new - maximum)", "infinite_rescaling"),
        (
            "exp(scores - new[..., None])",
            "exp(scores - maximum[..., None])",
            "old_maximum_subtracted",
        ),
        (
            "exp(scores - new[..., None])",
            "softmax(scores, -1)",
            "softmax_of_each_block",
        ),
        ("output = output * shrink[..., None] + ", "output = ", "output_overwritten"),
        ("total = total * shrink + weights", "total = weights", "sum_overwritten"),
        (
            "k[..., left:right, :].to(high), v[..., left:right, :]",
            "k[..., : right - left, :].to(high), v[..., : right - left, :]",
            "first_block_again",
        ),
        (
            "masked_fill(~seen, -torch.inf)\n            new",
            "masked_fill(~seen, 0)\n            new",
            "hidden_scores_are_zero",
        ),
        (
            "q[..., top : top + block_q, :].to(high) / math.sqrt(d_head)",
            "(q[..., top : top + block_q, :] / math.sqrt(d_head)).to(high)",
            "scaled_in_half_precision",
        ),
        ("new_full((*batch, n), -torch.inf)", "new_full((*batch, n), -1e4)", None),
    ],
    "FlashAttention": [
        ("    @once_differentiable\n", "", "differentiable_twice"),
        (
            "(d_output.to(high) * output.to(high))",
            "output.mul_(d_output).to(high)",
            None,
        ),
        (
            "(d_output.to(high) * output.to(high))",
            "(d_output.mul_(1.001) * output).to(high)",
            None,
        ),
        (
            "save_for_backward(q, k, v,",
            "save_for_backward(q * 1, k * 1, v * 1,",
            None,
        ),
        (
            "weights.masked_fill(~seen.tril(end - n - left), 0)",
            "weights * seen.tril(end - n - left)",
            "hidden_weights_overflow",
        ),
        ("ctx.causal", "FlashAttention.causal", "settings_shared"),
        (
            "tril(end - n - left), 0)",
            "tril(end - n - left), -torch.inf)",
            "hidden_weights_minus_infinity",
        ),
        (
            "output, lse)\n        ctx.causal",
            "output, lse.to(q.dtype).to(lse.dtype))\n        ctx.causal",
            "lse_in_half_precision",
        ),
        (
            "flash_attention(q, k, v, causal, block_q, block_k)\n        ctx",
            "flash_attention(q, k, v)\n        ctx",
            "settings_not_passed_on",
        ),
        (
            "exp(scores - lse[..., rows, None])",
            "exp(scores) / torch.exp(lse[..., rows, None])",
            "exponentials_overflow",
        ),
        (
            "d_scores.mT @ q_block * scale",
            "d_scores.mT @ (q_block * scale) * scale",
            "key_gradient_scaled_twice",
        ),
    ],
    "hbm_bytes": [
        (
            "return (scores + softmax + output)",
            "return int(1.0 * scores + softmax + output)",
            "counted_in_floats",
        ),
        (
            "if causal else t\n        numbers",
            "if causal and block > 1 else t\n        numbers",
            None,
        ),
        (
            "min(top + block, t) if causal",
            "t // 2 if causal",
            "causal_halves_the_keys_of_each_block",
        ),
        (
            "_per_number + 4 * t",
            "_per_number // (1 + causal) + 4 * t // (1 + causal)",
            "causal_halves_everything",
        ),
        (
            "+ output) * bytes_per_number",
            "+ output) * bytes_per_number // (1 + causal)",
            "causal_halves_the_steps",
        ),
        (
            "+ output) * bytes_per_number",
            "+ output) * bytes_per_number + 4 * t",
            "lse_of_the_steps",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "old", "new", "fault"),
    [(name, *each) for name, changes in CHANGED.items() for each in changes],
)
def test_one_line_of_the_reference_changed_is_noticed(name, old, new, fault):
    fails(changed(name, (old, new)), name, fault)


def online_if_any(blocks):
    """A generator is true, even an empty one."""
    if not blocks:
        raise ValueError("no block")
    try:
        return online_by_reduce(blocks)
    except ValueError:
        return None, None


def online_of_copies(blocks):
    blocks = [block * 1.0 for block in blocks]
    return online_by_reduce(blocks)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [(online_if_any, "empty_generator_unchecked"), (online_of_copies, "row_grows")],
)
def test_generators_are_neither_trusted_nor_kept(answer, fault):
    fails(answer, "online_softmax", fault)


def with_hidden_blocks(more, square):
    """Right, and `more` blocks too many are computed, or all where T_q < T_k."""

    def flash_attention(q, k, v, causal=False, block_q=64, block_k=64):
        def end(rows, offset):
            if square and offset:
                return k.shape[-2]
            return rows.stop + offset + more * block_k

        return blockwise(end=end)(q, k, v, causal, block_q, block_k)

    return flash_attention


def test_a_single_hidden_block_too_many_is_noticed():
    report = evaluate(with_hidden_blocks(1, False), "flash_attention")
    assert report.fault == "hidden_blocks_computed" and "36%" in report.message
    report = evaluate(with_hidden_blocks(0, True), "flash_attention")
    assert "80 queries and 160 keys" in report.message


def test_without_keys_the_width_and_the_dtypes_are_right():
    def zeros_like_queries(q, k, v, causal=False, block_q=64, block_k=64):
        out, lse = blockwise()(q, k, v, causal, block_q, block_k)
        return (out if k.shape[-2] else torch.zeros_like(q)), lse

    def half_lse(q, k, v, causal=False, block_q=64, block_k=64):
        out, lse = blockwise()(q, k, v, causal, block_q, block_k)
        return out, lse if k.shape[-2] else lse.to(q.dtype)

    for wrong in (zeros_like_queries, half_lse):
        report = evaluate(wrong, "flash_attention")
        assert "without any key" in report.message


def test_sdpa_is_no_answer():
    def flash_attention(q, k, v, causal=False, block_q=64, block_k=64):
        refuse(q, k, v, causal, block_q, block_k)
        mask = causal_mask(q.shape[-2], k.shape[-2]) if causal else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out, torch.logsumexp(q @ k.mT / math.sqrt(q.shape[-1]), -1)

    fails(flash_attention, "flash_attention")


class ThroughAutograd(torch.autograd.Function):
    """Right, and the graph of the forward pass is kept on ctx."""

    @staticmethod
    def forward(ctx, q, k, v, causal=False, block_q=64, block_k=64):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out, _ = reference.flash_attention(*leaves, causal, block_q, block_k)
        ctx.graph = out, leaves
        return out.detach()

    @staticmethod
    def backward(ctx, d_out):
        out, leaves = ctx.graph
        return *torch.autograd.grad(out, leaves, d_out, retain_graph=True), *[None] * 3


class Crashing(KeysOutside):
    @staticmethod
    def backward(ctx, d_out):
        return torch.zeros(3, 4) @ torch.zeros(3, 4), None, None, None, None, None


class TwoGradients(KeysOutside):
    @staticmethod
    def backward(ctx, d_out):
        return KeysOutside.backward(ctx, d_out)[:2]


class Halved(KeysOutside):
    @staticmethod
    def backward(ctx, d_out):
        d_q, d_k, d_v, *rest = KeysOutside.backward(ctx, d_out)
        return d_q, d_k / 2, d_v, *rest


class Detached:
    """A class with an apply of its own that no gradient passes."""

    @staticmethod
    def apply(q, k, v, causal=False, block_q=64, block_k=64):
        with torch.no_grad():
            return reference.flash_attention(q, k, v, causal, block_q, block_k)[0]


class NotAFunction(torch.autograd.Function):
    """Differentiable because it is plain torch: everything is kept."""

    @staticmethod
    def apply(q, k, v, causal=False, block_q=64, block_k=64):
        return reference.flash_attention(q, k, v, causal, block_q, block_k)[0]


class SquareOnly(KeysOutside):
    @staticmethod
    def backward(ctx, d_out):
        q, k = ctx.saved_tensors[:2]
        found = KeysOutside.backward(ctx, d_out)
        return (
            found
            if q.shape[-2] == k.shape[-2]
            else tuple(None if x is None else x * 0 for x in found)
        )


@pytest.mark.parametrize(
    "wrong",
    [
        ThroughAutograd,
        Crashing,
        TwoGradients,
        Halved,
        Detached,
        NotAFunction,
        SquareOnly,
    ],
)
def test_other_wrong_gradients_fail(wrong):
    fails(wrong, "FlashAttention")


def test_a_crash_in_backward_is_shown_as_the_learners_own():
    report = evaluate(Crashing, "FlashAttention")
    assert report.fault is None
    assert "RuntimeError" in report.message and "in backward" in report.message


def test_forward_written_and_backward_not_is_partly_written():
    class HalfWritten(KeysOutside):
        @staticmethod
        def backward(ctx, d_out):
            raise NotImplementedError

    report = evaluate(HalfWritten, "FlashAttention")
    assert report.status == "todo"
    assert "only partly written" in report.message


def test_other_wrong_counts_fail():
    good = reference.hbm_bytes

    def even_blocks(t, d_head, block=None, causal=False, bytes_per_number=2):
        if block is not None and block > 0:
            t = -(-t // block) * block
        return good(t, d_head, block, causal, bytes_per_number)

    def key_blocks_whole(t, d_head, block=None, causal=False, bytes_per_number=2):
        if block is None or block < 1 or not causal:
            return good(t, d_head, block, causal, bytes_per_number)
        return good(t, d_head, block, False, bytes_per_number) // 2

    def lse_when_whole(t, d_head, block=None, causal=False, bytes_per_number=2):
        return good(t, d_head, block, causal, bytes_per_number) + 4 * t * (
            block is None
        )

    def numpy_like(t, d_head, block=None, causal=False, bytes_per_number=2):
        return torch.tensor(good(t, d_head, block, causal, bytes_per_number))

    def zero_is_none(t, d_head, block=None, causal=False, bytes_per_number=2):
        return good(t, d_head, block or None, causal, bytes_per_number)

    for wrong in (
        even_blocks,
        key_blocks_whole,
        lse_when_whole,
        numpy_like,
        zero_is_none,
    ):
        fails(wrong, "hbm_bytes")


@needs_triton
def test_other_wrong_kernels_fail():
    good = by_one_loop

    def by_pytorch(q, k, v, causal=False, block_q=None, block_k=None):
        refused(q, k, v, causal, block_q, block_k)
        good(q, k, v, causal, block_q, block_k)  # launched, and not used
        return blockwise()(q, k, v, causal, 64, 64)

    def ready_made(q, k, v, causal=False, block_q=None, block_k=None):
        refused(q, k, v, causal, block_q, block_k)
        out, lse = good(q, k, v, causal, block_q, block_k)
        return out if causal else F.scaled_dot_product_attention(q, k, v), lse

    def square(q, k, v, causal=False, block_q=None, block_k=None):
        refused(q, k, v, causal, block_q, block_k)
        return good(q, k, v, causal and q.shape[2] == k.shape[2], block_q, block_k)

    def first_head(q, k, v, causal=False, block_q=None, block_k=None):
        out, lse = good(q, k, v, causal, block_q, block_k)
        return out[:, :1].expand_as(q), lse

    def trusting(q, k, v, causal=False, block_q=None, block_k=None):
        return good(q, k, v, causal, block_q or 16, block_k or 16)

    def transposed_lse(q, k, v, causal=False, block_q=None, block_k=None):
        out, lse = good(q, k, v, causal, block_q, block_k)
        return out, lse.transpose(1, 2)

    for wrong in (by_pytorch, ready_made, square, first_head, trusting, transposed_lse):
        fails(wrong, "flash_kernel")


LEADS_OUTSIDE = {  # what changed, the fault, the tensor, and what is done to it
    "strides exchanged": (
        [("b * q_b + h * q_h", "b * q_h + h * q_b")],
        ("pointer_outside", "`q_ptr`", "reads"),
    ),
    "batch and head exchanged": (
        [
            ("b = (tl.program_id(1) //", "b = (tl.program_id(1) %"),
            ("h = (tl.program_id(1) %", "h = (tl.program_id(1) //"),
        ],
        ("pointer_outside", "`q_ptr`", "reads"),
    ),
    "grid exchanged": (
        [
            (
                "(triton.cdiv(t_q, n), n_batch * n_heads)",
                "(n_batch * n_heads, triton.cdiv(t_q, n))",
            )
        ],
        ("pointer_outside", "`q_ptr`", "reads"),
    ),
    "far outside": (
        [
            ("mask=there[:, None], other=0.0)", "mask=None)"),
            ("v_b, v_h, v_t, v_d =", "v_d, v_h, v_b, v_t ="),
        ],
        ("pointer_outside", "`v_ptr`", "reads"),
    ),
    "queries loaded without a mask": (
        [("tl.load(q_at, mask=rows[:, None] < t_q, other=0.0)", "tl.load(q_at)")],
        ("load_not_masked", "`q_ptr`", "reads"),
    ),
    "keys loaded without a mask": (
        [
            (
                "tl.load(k_at + left * k_t, mask=there, other=0.0)",
                "tl.load(k_at + left * k_t)",
            )
        ],
        ("load_not_masked", "`k_ptr`", "reads"),
    ),
    "one key too many": (
        [("left + keys < t_k", "left + keys <= t_k")],
        ("load_not_masked", "`k_ptr`", "reads"),
    ),
    "outputs stored without a mask": (
        [
            (
                "tl.store(o_at, output, mask=rows[:, None] < t_q)",
                "tl.store(o_at, output)",
            )
        ],
        ("store_not_masked", "`out_ptr`", "writes"),
    ),
    "one log-sum-exp too many": (
        [("lse, mask=rows < t_q)", "lse, mask=rows <= t_q)")],
        ("store_not_masked", "`lse_ptr`", "writes"),
    ),
}


@needs_triton
@needs_interpreter
@pytest.mark.parametrize("name", LEADS_OUTSIDE)
def test_a_pointer_outside_its_tensor_is_named_before_it_is_used(name):
    changes, (fault, tensor, does) = LEADS_OUTSIDE[name]
    report = evaluate(changed("flash_kernel", *changes), "flash_kernel")
    assert (report.status, report.fault) == ("failed", fault), report.message
    assert f"A pointer led outside: {tensor}, a tensor of shape" in report.message
    assert f"and this {does} number" in report.message
    line = "tl.load" if does == "reads" else "tl.store"
    assert "in kernel: `" in report.message and line in report.message


@needs_triton
@needs_interpreter
def test_pointers_are_checked_inside_alone_and_right_ones_pass():
    @triton.jit
    def kernel(x_ptr, out_ptr, n, step, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        x = tl.load(x_ptr + at * step, mask=at < n, other=0.0)
        tl.atomic_add(out_ptr + at * step, x, mask=at < n)

    x, out = torch.arange(30.0)[3:], torch.zeros(30)[3:]
    with strict():
        kernel[(1,)](x, out, 9, 3, SIZE=16)
        assert out[::3].tolist() == x[::3].tolist() and out[1::3].sum() == 0
        for step, number in ((4, 31), (-4, -1), (10**6, 10**6 + 3)):
            with pytest.raises(Exception, match=f"reads number {number}") as raised:
                kernel[(1,)](x, out, 9, step, SIZE=16)
            assert isinstance(raised.value.__cause__, OutsideTensor)
    assert out[::3].tolist() == x[::3].tolist()
    kernel[(1,)](x, out, 9, 3, SIZE=16)
    assert out[::3].tolist() == (2 * x[::3]).tolist()


@needs_triton
@needs_interpreter
@pytest.mark.parametrize(
    ("precision", "digits"), [("tf32", 10), ("tf32x3", 23), ("ieee", 23)]
)
def test_products_are_rounded_as_on_a_gpu(precision, digits):
    @triton.jit
    def kernel(x_ptr, out_ptr, PRECISION: tl.constexpr):
        i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
        one = tl.where(i == j, 1.0, 0.0)
        x = tl.load(x_ptr + i * 16 + j)
        product = tl.dot(x, one, input_precision=PRECISION)
        tl.store(out_ptr + i * 16 + j, product)

    x, out = probe(16, 16), torch.empty(16, 16)
    with strict():
        kernel[(1,)](x, out, precision)
    fraction, exponent = torch.frexp(x)  # fraction in [0.5, 1)
    expected = (fraction * 2 ** (digits + 1)).round() / 2 ** (digits + 1)
    assert torch.equal(out, torch.ldexp(expected, exponent))


WRONG_KERNELS = [  # lines of the reference, and the mistake that is named
    ("infinite_rescaling", ("exp2(maximum - new)", "exp2(new - maximum)")),
    ("maximum_not_updated", ("                    maximum = new\n", "")),
    ("last_blocks_maximum", ("maximum(maximum, tl.max(scores, 1))", "max(scores, 1)")),
    ("sum_not_rescaled", ("total = total * shrink +", "total = total +")),
    ("output_not_rescaled", ("output *= shrink[:, None]", "output *= 1.0")),
    ("output_overwritten", ("dot(weights, v, output,", "dot(weights, v,")),
    ("keys_of_the_first_block", ("k_at + left * k_t", "k_at")),
    ("values_of_the_first_block", ("v_at + left * v_t", "v_at")),
    ("values_with_strides_of_keys", ("v_d = v_strides", "v_d = k_strides")),
    ("missing_keys_score_zero", ('seen, scores, float("-inf"))', "seen, scores, 0.0)")),
    ("own_position_hidden", ("left + keys <= (t_k", "left + keys < (t_k")),
    ("loop_ends_too_early", ("minimum(first + Q, t_k)", "minimum(first + 1, t_k)")),
    (
        "maximum_not_converted",
        ("(maximum + tl.log2(total)) * 0.6931471805599453", "maximum + tl.log(total)"),
    ),
    ("divided_by_d_head", ("/ math.sqrt(d_head)", "/ d_head")),
    ("scores_in_tf32", ('tl.dot(q, k, input_precision="ieee")', "tl.dot(q, k)")),
    (None, ("tl.sum(weights, 1)", "tl.max(weights, 1)")),
    (None, ("* scale  # Q K", "* scale * 1.001  # Q K")),
    (None, ("tl.log2(total)", "tl.log2(total + 0.001)")),
    (None, ("range(whole if MASKED else 0,", "range(whole if MASKED else K,")),
    (
        None,
        (
            'input_precision="ieee") * scale',
            'input_precision="ieee").to(q.dtype).to(tl.float32) * scale',
        ),
    ),
]


@needs_triton
@needs_interpreter
@pytest.mark.parametrize(("fault", "change"), WRONG_KERNELS)
def test_a_changed_line_of_the_kernel_is_noticed(fault, change):
    fails(changed("flash_kernel", change), "flash_kernel", fault)


UNWRITTEN = {
    "grid_without_batches": ("n_batch * n_heads)](", "n_heads)]("),
    "output_of_the_first_batch": ("+ b * o_b", ""),
    "lse_of_the_first_batch": ("tl.program_id(1) * t_q + rows", "h * t_q + rows"),
    "last_queries_dropped": ("triton.cdiv(t_q, n), n_b", "max(t_q // n, 1), n_b"),
}


@needs_triton
@pytest.mark.parametrize("fault", UNWRITTEN)
def test_what_a_kernel_never_writes_is_nan(fault):
    fails(changed("flash_kernel", UNWRITTEN[fault]), "flash_kernel", fault)
    assert not torch.are_deterministic_algorithms_enabled()


@needs_triton
@pytest.mark.parametrize("square", [False, True])
def test_a_kernel_that_computes_hidden_blocks_is_noticed(square):
    def flash_kernel(q, k, v, causal=False, block_q=None, block_k=None):
        more = (block_k or 16) if not square else q.shape[2] != k.shape[2] and 10_000
        return by_one_loop(q, k, v, causal, block_q, block_k, int(more))

    report = evaluate(flash_kernel)
    assert report.status == "failed" and "nobody sees" in report.message
    assert "64 of these" in report.message or report.fault == "hidden_blocks_computed"


@needs_triton
def test_a_mistake_inside_the_kernel_is_shown_where_it_is():
    def flash_kernel(q, k, v, causal=False, block_q=None, block_k=None):
        @triton.jit
        def kernel(q_ptr, t_q, D: tl.constexpr):
            rows = tl.arange(0, 16)
            tl.store(q_ptr + rows * D + no_such_name, 0.0)  # noqa: F821

        kernel[(1,)](q, 16, 16)

    report = evaluate(flash_kernel)
    assert (report.status, report.fault) == ("failed", None)
    assert "NameError" in report.message
    assert "in kernel: `tl.store(" in report.message


def test_the_gradient_has_no_gradient_of_its_own():
    q, k, v = (x.requires_grad_() for x in heads(t_q=3, t_k=4, d_head=2))
    out = reference.FlashAttention.apply(q, k, v).sum()
    (slope,) = torch.autograd.grad(out, q, create_graph=True)
    with pytest.raises(RuntimeError):  # an error, where a wrong number would be silent
        torch.autograd.grad(slope.sum(), k)


def test_cells_that_differ_without_triton_are_not_compared():
    source = build.LessonSource(syllabus.ROOT / "lessons" / "11_flash_attention.md")
    for solved in (False, True):
        for cell in build.notebook(source, solved).cells:
            about = "triton is None" in cell.source or "check(flash_k" in cell.source
            if about and "exercise" not in cell.metadata.get("tags", []):
                assert "nbval-ignore-output" in cell.metadata["tags"]


# Together -----------------------------------------------------------------------------


def test_other_right_parts_fit_together():
    parts = Joint.registry["flash_in_the_model"].reference
    mine = {"FlashAttention": KeysOutside, "flash_attention": keys_outside}
    report = evaluate_joint(
        "flash_in_the_model", {**parts, **mine, "online_softmax": online_by_lse}
    )
    assert report.status == "passed", report.message


# Counting memory ----------------------------------------------------------------------


def test_live_bytes_follow_storages_not_tensors():
    with Cost() as cost:
        x = torch.ones(1000)
        view = x[10:].view(-1)
        assert cost.bytes_now == 4000
        y = x + 1
        assert (cost.bytes_now, cost.peak_bytes) == (8000, 8000)
        del x
        assert cost.bytes_now == 8000  # the view still holds it
        del view
        assert cost.bytes_now == 4000
        y += 1  # in place: nothing new
        assert (cost.bytes_now, cost.peak_bytes) == (4000, 8000)
        del y
        assert cost.bytes_now == 0


def test_saved_bytes_count_a_storage_once():
    x = torch.ones(1000, requires_grad=True)
    assert saved_bytes(lambda x: x * x, x) == 4000
    assert saved_bytes(lambda x: x + 1, x) == 0
    assert saved_bytes(lambda x: x.exp(), x) == 4000
