"""Kernels: interpreted as strictly as on a GPU, compiled without one, left out."""

import os
import subprocess
import sys

import pytest
import torch

from solutions import flash_attention as reference
from tests.answers import fails, passes
from tests.test_flash_attention import changed, needs_interpreter, needs_triton
from utils import syllabus
from utils.check import evaluate, triton_compiler, triton_interpreter
from utils.check.exercise import find
from utils.check.triton_compiler import compiled, launches
from utils.check.triton_interpreter import OutsideTensor, strict
from utils.exercises.flash_attention import heads
from utils.probe import probe

triton, tl = reference.triton, reference.tl


@needs_interpreter
def test_reference_compiles_without_a_gpu_and_fits_64_kilobytes(monkeypatch):
    monkeypatch.setattr(triton_compiler, "SECONDS", 120)
    with launches() as seen:
        for dtype, d_head, blocks in (
            (torch.float16, 64, (128, 64)),
            (torch.float32, 16, (16, 16)),
        ):
            given = heads(1, 1, t_q=19, t_k=37, d_head=d_head, dtype=dtype)
            reference.flash_kernel(*given, True, *blocks)
    assert 0 < compiled(seen)["shared"] <= 64 * 1024


LOOP = "for left in range(whole if MASKED else 0, end if MASKED else whole, K):\n"
NOT_COMPILED = {
    "breaks": (
        (LOOP, f"{LOOP}{' ' * 20}if left > 1000:\n{' ' * 24}break\n"),
        "`break`",
    ),
    "continues": (
        (LOOP, f"{LOOP}{' ' * 20}if left < 0:\n{' ' * 24}continue\n"),
        "`continue`",
    ),
    "number becomes a tensor": (
        ('tl.full([Q], float("-inf"), tl.float32)', 'float("-inf")'),
        "`maximum` is fp32 before the loop and fp32 of shape (16)",
    ),
    "accumulator of another dtype": (
        ("output = tl.zeros([Q, D], tl.float32)", "output = tl.zeros([Q, D], q.dtype)"),
        "`output` is fp16 of shape (16, 16) before the loop and fp32",
    ),
    "not in Triton's language": (
        (LOOP, f"{LOOP}{' ' * 20}unused = [left for _ in range(3)]\n"),
        "Triton stopped at `unused = [left for _ in range(3)]`",
    ),
    "global number": (
        ("maximum + tl.log2(total)", "maximum + tl.log2(total) * ONE"),
        "`ONE` is a global name",
    ),
}


@needs_interpreter
@pytest.mark.parametrize("name", NOT_COMPILED)
def test_a_kernel_that_runs_here_and_does_not_compile_is_refused(name):
    edit, says = NOT_COMPILED[name]
    edits = [edit, ("import math\n", "import math\n\nONE = 1.0\n")]
    report = fails(changed("flash_kernel", *edits), "flash_kernel")
    assert "cannot be compiled for a GPU (compute capability 8.0)" in report.message
    assert says in report.message, report.message
    assert report.unmet == find("flash_kernel").requirements[-1].sentence


@needs_interpreter
@pytest.mark.parametrize(("name", "value"), [("SECONDS", 0.01), ("CHILD", "import no")])
def test_where_triton_cannot_compile_nothing_is_refused(monkeypatch, name, value):
    triton_compiler._compiled.cache_clear()
    monkeypatch.setattr(triton_compiler, name, value)
    passes(changed("flash_kernel", NOT_COMPILED["breaks"][0]), "flash_kernel")


def test_without_triton_the_exercise_is_left_out(monkeypatch):
    monkeypatch.setattr(triton_interpreter, "triton", None)
    for answer in (reference.flash_kernel, lambda q, k, v: None):
        report = evaluate(answer, "flash_kernel")
        assert (report.status, report.fault, report.skipped) == ("todo", None, True)
        assert "leave this exercise out" in report.message


@needs_triton
def test_modes_that_cannot_run_are_left_out(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    report = evaluate(reference.flash_kernel, "flash_kernel")
    if not torch.cuda.is_available():
        assert report.skipped and "restart the kernel" in report.message
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (7, 0))
    report = evaluate(reference.flash_kernel, "flash_kernel")
    assert report.skipped and "7.0" in report.message


def in_python(code):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=syllabus.ROOT,
        env=environment,
        capture_output=True,
        text=True,
    ).stdout


@needs_interpreter
def test_triton_imported_too_early_is_explained():
    printed = in_python(
        "import triton, torch\n"
        "from solutions.flash_attention import flash_kernel\n"
        "from utils.check import evaluate\n"
        "report = evaluate(flash_kernel)\n"
        "print(report.skipped, report.message)\n"
        "q = torch.zeros(1, 1, 16, 16)\n"
        "try:\n"
        "    flash_kernel(q, q, q)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert "True" in printed and "from its first cell" in printed
    assert "restart Python" in printed


def test_solutions_import_without_triton():
    printed = in_python(
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from solutions.flash_attention import flash_attention, flash_kernel, triton\n"
        "import torch\n"
        "print(triton, flash_attention(*[torch.ones(3, 4)] * 3)[0].sum().item())\n"
        "from utils.check import evaluate\n"
        "print(evaluate(flash_kernel).title)\n"
    )
    assert printed.split("\n")[:2] == ["None 12.0", "flash_kernel: left out"]


LEADS_OUTSIDE = [  # what changed, the tensor, what is done to it, what to do about it
    ("b * q_b + h * q_h", "b * q_h + h * q_b", "`q_ptr`", "reads", "stride"),
    ("v_b, v_h, v_t, v_d =", "v_d, v_h, v_b, v_t =", "`v_ptr`", "reads", "stride"),
    ("t_q, other=0.0)", "t_q + 9, other=0.0)", "`q_ptr`", "reads", "need a mask"),
    ("left + keys < t_k", "left + keys <= t_k", "`k_ptr`", "reads", "need a mask"),
    ("lse, mask=rows < t_q)", "lse)", "`lse_ptr`", "writes", "need a mask"),
]


@needs_interpreter
@pytest.mark.parametrize(("old", "new", "tensor", "does", "remedy"), LEADS_OUTSIDE)
def test_a_pointer_outside_its_tensor_is_told(old, new, tensor, does, remedy):
    report = fails(changed("flash_kernel", (old, new)), "flash_kernel")
    assert report.fault is None
    assert f"A pointer led outside: {tensor}, a tensor of shape" in report.message
    assert f"and this {does} number" in report.message and remedy in report.message
    line = "tl.load" if does == "reads" else "tl.store"
    assert "in kernel: `" in report.message and line in report.message


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
    kernel[(1,)](x, out, 9, 3, SIZE=16)
    assert out[::3].tolist() == (2 * x[::3]).tolist()
    assert not torch.are_deterministic_algorithms_enabled()


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_what_a_mask_leaves_out_of_a_load_is_nan_unless_said_otherwise(dtype):
    @triton.jit
    def kernel(x_ptr, out_ptr, OTHER: tl.constexpr):
        at = tl.arange(0, 4)
        x = tl.load(x_ptr + at, mask=at < 2, other=OTHER)
        tl.store(out_ptr + at, x)

    x, out = torch.ones(4, dtype=dtype), torch.zeros(4, dtype=dtype)
    with strict():
        kernel[(1,)](x, out, None)
        assert out.isnan().tolist() == [False, False, True, True]
        kernel[(1,)](x, out, 5.0)
    assert out.tolist() == [1, 1, 5, 5]


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


@needs_triton
def test_a_mistake_inside_the_kernel_is_shown_where_it_is():
    edit = ("o_at = out_ptr", "o_at = no_such_name")
    report = fails(changed("flash_kernel", edit), "flash_kernel")
    assert report.fault is None and "NameError" in report.message
    assert "in kernel: `o_at = no_such_name" in report.message
