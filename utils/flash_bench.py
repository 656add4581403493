"""Measures attention: `python -m utils.flash_bench --out FILE.json`.

Seven methods, lengths from 512 to 32K: time by CUDA events, peak memory, error. To run
out of memory is a result like any other. `--device cpu` measures what a CPU can.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from datetime import date
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from utils import triton_mode  # noqa: F401, before anything imports Triton
from utils.cost import peak_bytes
from utils.display import any_encoding
from utils.errors import CourseError

RECORDED = Path(__file__).parent / "recorded" / "flash_attention.json"

BACK_ENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}
METHODS = ("naive", *BACK_ENDS, "tiled", "Triton")
FORWARD_ONLY = ("Triton",)

LENGTHS = {
    "cuda": [512, 1024, 2048, 4096, 8192, 16_384, 32_768],
    "cpu": [256, 512, 1024, 2048],
}
D_HEADS = {"cuda": [64, 128], "cpu": [64]}
DTYPES = {"cuda": ["bfloat16", "float16"], "cpu": ["float32"]}
WIDTH = {"cuda": 2048, "cpu": 128}  # n_heads · d_head; one sequence
TILE = {"cuda": 1024, "cpu": 128}  # of the tiled version
BLOCKS = [(128, 128), (128, 64), (64, 64)]  # tried for the Triton kernel
ROWS = 64  # queries whose output is compared with float64
REPEATS = 20
ENOUGH = 0.15  # seconds of one measurement


# What is measured ---------------------------------------------------------------------


def methods(device):
    """Each method as a function of q, k, v `(1, H, T, d_head)` and causal.

    The parts are the learner's own or the reference, as `my_transformer` gives them.
    """
    from my_transformer import FlashAttention, attention, causal_mask, flash_kernel

    tile, tuned = TILE[device], {}

    @lru_cache(maxsize=1)  # a mask is made once, and is an input like q
    def mask_of(t):
        return causal_mask(t).to(device)

    def naive(q, k, v, causal):
        return attention(q, k, v, mask_of(q.shape[-2]) if causal else None)

    def tiled(q, k, v, causal):
        return FlashAttention.apply(q, k, v, causal, tile, tile)

    def triton(q, k, v, causal):
        key = (q.shape[-1], causal)
        if device == "cpu":
            tuned[key] = (None, None)
        elif key not in tuned:
            tuned[key] = best_blocks(flash_kernel, q, k, v, causal)
        return flash_kernel(q, k, v, causal, *tuned[key])[0]

    def back_end(name):
        def attend(q, k, v, causal):
            with sdpa_kernel(BACK_ENDS[name]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return attend

    found = {"naive": naive, **{name: back_end(name) for name in BACK_ENDS}}
    return {**found, "tiled": tiled, "Triton": triton}


def best_blocks(kernel, q, k, v, causal):
    """The fastest of the block sizes that fit this GPU; (None, None) if none does."""
    times = {}
    for blocks in BLOCKS:
        try:
            times[blocks] = milliseconds(
                lambda b=blocks: kernel(q, k, v, causal, *b), "cuda", 3
            )
        except RuntimeError:  # too much shared memory
            continue
    return min(times, key=times.get) if times else (None, None)


def visible_pairs(t, causal):
    """How many pairs of query and key are looked at."""
    return t * (t + 1) // 2 if causal else t * t


def operations(t, d_head, n_heads, causal, backward):
    """Floating-point operations of the matrix products: two forward, five backward."""
    return (7 if backward else 2) * 2 * visible_pairs(t, causal) * d_head * n_heads


# How ----------------------------------------------------------------------------------


def milliseconds(f, device, repeats=REPEATS, enough=ENOUGH):
    """The median time of `f()`: by CUDA events on a GPU, else by the clock."""
    f()  # compiles, allocates, warms up
    cuda = device == "cuda"
    times, started = [], time.perf_counter()
    while len(times) < 3 or (
        len(times) < repeats and time.perf_counter() - started < enough
    ):
        if cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            f()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            before = time.perf_counter()
            f()
            times.append(1000 * (time.perf_counter() - before))
    return statistics.median(times)


def peak(f, device):
    """The most bytes beyond what was there before that are in use while `f()` runs."""
    if device != "cuda":
        return peak_bytes(f)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def exact_rows(q, k, v, causal, at, d_output=None):
    """Output of the queries `at` in float64, and their gradient if one comes in."""
    q, k, v = (x.detach().double() for x in (q[:, :, at], k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5  # 1 H n T
    if causal:
        later = torch.arange(k.shape[-2], device=q.device) > at[:, None]
        scores = scores.masked_fill(later, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    output = weights @ v
    if d_output is None:
        return output, None
    d_output = d_output[:, :, at].double()
    d_weights = d_output @ v.mT
    d_scores = weights * (d_weights - (d_output * output).sum(-1, keepdim=True))
    return output, d_scores @ k / q.shape[-1] ** 0.5


def error(method, q, k, v, causal, backward):
    """Largest difference to float64, over some queries: of the output, or of d_q."""
    t = q.shape[-2]
    at = torch.linspace(0, t - 1, min(ROWS, t), device=q.device).long()
    out = method(q, k, v, causal)
    if not backward:
        exact, _ = exact_rows(q, k, v, causal, at)
        return (out[:, :, at].double() - exact).abs().max().item()
    d_output = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, q, d_output)
    _, exact = exact_rows(q, k, v, causal, at, d_output)
    return (found[:, :, at].double() - exact).abs().max().item()


def measure(method, q, k, v, causal, backward, device, enough=ENOUGH):
    """What one method costs on these inputs: ms, peak_bytes, error; or why it cannot.

    Out of memory and back ends that refuse come back as `status`, and are no errors.
    """
    leaves = [x.requires_grad_(backward) for x in (q, k, v)]
    d_output = torch.randn_like(q)

    def once():
        out = method(q, k, v, causal)
        if backward:
            torch.autograd.grad(out, leaves, d_output)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a back end refuses comes as warnings
            found = {
                "ms": milliseconds(once, device, enough=enough),
                "peak_bytes": peak(once, device),
            }
            found["error"] = error(method, q, k, v, causal, backward)
        return {"status": "ok", **found}
    except (RuntimeError, ValueError, MemoryError) as problem:
        return {"status": why_not(problem)}
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()


def why_not(problem) -> str:
    """ "out of memory", or “not available” with the reason."""
    text = " ".join(str(problem).split())
    starved = isinstance(problem, (torch.OutOfMemoryError, MemoryError))
    if starved or "can't allocate memory" in text or "out of memory" in text.lower():
        return "out of memory"
    if "No available kernel" in text or "No viable backend" in text:
        return "not available: PyTorch has no such kernel for these inputs here"
    return f"not available: {text[:160]}"


def table(
    device,
    lengths=None,
    seconds=270.0,
    only=None,
    causal=(True, False),
    enough=ENOUGH,
    say=print,
) -> dict:
    """Measure everything, as long as `seconds` last: {"about": …, "rows": […]}.

    only: names of methods; all if not given. causal: with mask, without, or both.
    enough: seconds after which one measurement is not repeated further.
    """
    started = time.perf_counter()
    torch.manual_seed(0)
    known, rows = methods(device), []
    for dtype, t, d_head, hidden, name in settings(device, lengths, only, causal):
        n_heads = WIDTH[device] // d_head
        given = {"method": name, "dtype": dtype, "t": t, "d_head": d_head}
        given |= {"n_heads": n_heads, "causal": hidden}
        for backward in (False, True):
            if backward and name in FORWARD_ONLY:
                continue
            row = {**given, "pass": "forward + backward" if backward else "forward"}
            if time.perf_counter() - started > seconds:
                rows.append({**row, "status": f"not measured: {seconds:g} s were over"})
                continue
            q, k, v = (
                torch.randn(1, n_heads, t, d_head, device=device).to(
                    getattr(torch, dtype)
                )
                for _ in range(3)
            )
            if name == "Triton" and device == "cpu":
                row["note"] = "interpreted"  # a time of the interpreter's, no kernel's
            row |= measure(known[name], q, k, v, hidden, backward, device, enough)
            if row["status"] == "ok":
                work = operations(t, d_head, n_heads, hidden, backward)
                row["tflops"] = work / row["ms"] / 1e9
            rows.append(row)
            say(in_words(row))
    return {"about": about(device), "rows": rows}


def settings(device, lengths=None, only=None, causal=(True, False)):
    """What is measured, the most interesting first."""
    for dtype in DTYPES[device]:
        for t in lengths or LENGTHS[device]:
            for d_head in D_HEADS[device]:
                for hidden in causal:
                    for name in only or METHODS:
                        yield dtype, t, d_head, hidden, name


def in_words(row) -> str:
    mask = "causal" if row["causal"] else "full"
    head = (
        f"{row['method']:<9} {row['dtype']:<8} T {row['t']:>6} d {row['d_head']:>3} "
        f"{mask:<6} {row['pass']:<18}"
    )
    if row["status"] != "ok":
        return f"{head} {row['status']}"
    return (
        f"{head} {row['ms']:9.3f} ms {row['tflops']:8.3g} TFLOP/s "
        f"{row['peak_bytes'] / 2**20:9.1f} MiB  error {row['error']:.1e}"
        + (f"  ({row['note']})" if "note" in row else "")
    )


# Where and when -----------------------------------------------------------------------


def about(device) -> dict:
    """Device, driver, versions, date."""
    threads = torch.get_num_threads()
    found = {
        "device": f"CPU, {threads} thread{'s' * (threads != 1)}",
        "driver": None,
        "capability": None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["driver"] = _driver()
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return found


def _version(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver():
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip().splitlines()[0] if said.stdout.strip() else None


def label(measured) -> str:
    """One line that says where a table comes from."""
    a = measured["about"]
    parts = [a["device"], a["date"], f"torch {a['torch']}"]
    if a["driver"]:
        parts.append(f"driver {a['driver']}")
    return ", ".join(parts)


# The table, read again ----------------------------------------------------------------


def recorded(path=RECORDED) -> dict:
    """The recorded table of a GPU; without rows, `notice` says how to make one."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def select(measured, **wanted) -> list[dict]:
    """The rows with these values, such as `select(table, method="flash", t=4096)`."""
    return [
        row
        for row in measured["rows"]
        if all(row[name] == value for name, value in wanted.items())
    ]


def draw(axes, measured, **wanted) -> None:
    """Time and peak memory against length, a line a method, on two axes.

    A method that runs out of memory ends there, with a cross.
    """
    for name in METHODS:
        rows = [r for r in select(measured, method=name, **wanted)]
        good = [r for r in rows if r["status"] == "ok"]
        if not good:
            continue
        lengths = [r["t"] for r in good]
        for ax, values in zip(
            axes,
            ([r["ms"] for r in good], [max(r["peak_bytes"], 1) / 2**20 for r in good]),
            strict=True,
        ):
            (line,) = ax.plot(lengths, values, marker="o", markersize=3, label=name)
            if any(r["status"] == "out of memory" for r in rows):
                ax.plot(lengths[-1], values[-1], "x", color=line.get_color(), ms=9)
    axes[0].set_ylabel("time, ms")
    axes[1].set_ylabel("peak memory, MiB")
    for ax in axes:
        ax.set(xscale="log", yscale="log", xlabel="length T, tokens")
        ax.set_xscale("log", base=2)


# The command --------------------------------------------------------------------------


def main(arguments=None) -> int:
    any_encoding()
    parser = argparse.ArgumentParser(
        prog="python -m utils.flash_bench", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the JSON file to write"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--parts",
        choices=("mine", "reference"),
        default=os.environ.get("COURSE_PARTS", "mine"),
        help="whose attention, FlashAttention and flash_kernel run",
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="instead of the usual")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, help="all if not given"
    )
    parser.add_argument(
        "--seconds", type=float, default=270.0, help="start nothing new after these"
    )
    chosen = parser.parse_args(arguments)
    os.environ["COURSE_PARTS"] = chosen.parts
    try:
        if chosen.device == "cuda" and not torch.cuda.is_available():
            raise CourseError("PyTorch finds no CUDA device here: give --device cpu.")
        if min(chosen.lengths or [1]) < 1:
            raise CourseError(
                f"A length of {min(chosen.lengths)}: give lengths of at least 1."
            )
        if not chosen.out.resolve().parent.is_dir():
            raise CourseError(f"There is no folder {chosen.out.resolve().parent}.")
        measured = table(chosen.device, chosen.lengths, chosen.seconds, chosen.methods)
        measured["about"]["parts"] = chosen.parts
        text = json.dumps(measured, indent=1) + "\n"
        chosen.out.write_text(text, encoding="utf-8")
        print(f"{len(measured['rows'])} rows in {chosen.out}: {label(measured)}")
    except (CourseError, OSError, AttributeError) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
