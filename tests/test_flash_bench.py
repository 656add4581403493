"""The benchmark of attention, as far as a CPU can run it, and its recorded table."""

import json

import matplotlib.pyplot as plt
import pytest
import torch
import torch.nn.functional as F

from utils import flash_bench, syllabus
from utils.flash_bench import METHODS, RECORDED, draw, label, recorded, select
from utils.probe import probe


def exact(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def inputs(t=96, d_head=16, heads=2):
    return [probe(1, heads, t, d_head, seed=s) for s in range(3)]


@pytest.fixture(scope="module")
def small():
    """A table of this CPU, with every method."""
    return flash_bench.table("cpu", lengths=[32, 64], enough=0, say=lambda line: None)


def test_every_method_is_measured(small):
    assert {row["method"] for row in small["rows"]} == set(METHODS)
    for name in ("naive", "math", "flash", "tiled"):
        for row in select(small, method=name):
            assert row["status"] == "ok", row
            assert row["ms"] > 0 and row["tflops"] > 0
            assert row["error"] < 1e-4
    keys = ("method", "dtype", "t", "d_head", "n_heads", "causal", "pass")
    settings = [tuple(row[key] for key in keys) for row in small["rows"]]
    assert len(set(settings)) == len(settings)
    assert len(settings) == 2 * 2 * (2 * len(METHODS) - 1)  # lengths, causal, passes


def test_what_a_cpu_lacks_is_said_and_goes_on(small):
    for name in ("efficient", "cuDNN"):
        rows = select(small, method=name)
        assert rows and all(r["status"].startswith("not available: ") for r in rows)
        assert len({r["status"] for r in rows}) == 1 and len(rows[0]["status"]) < 90
    rows = select(small, method="Triton")
    assert {row["pass"] for row in rows} == {"forward"}
    assert {row["note"] for row in rows} == {"interpreted"}
    assert flash_bench.in_words(rows[0])


def test_where_when_and_versions_are_inside(small):
    about = small["about"]
    assert about["torch"] == torch.__version__
    assert len(about["date"]) == len("2026-01-31")
    assert {"device", "driver", "capability", "cuda", "triton", "python"} <= set(about)
    assert about["device"].startswith("CPU") and about["date"] in label(small)


def test_operations_and_tflops():
    assert flash_bench.operations(10, 4, 2, False, False) == 4 * 10 * 10 * 4 * 2
    assert flash_bench.operations(10, 4, 2, True, False) == 4 * 55 * 4 * 2
    ratio = flash_bench.operations(64, 8, 1, True, True) / flash_bench.operations(
        64, 8, 1, True, False
    )
    assert ratio == 3.5


def test_memory_of_the_whole_matrix_and_of_blocks(small):
    row = {"t": 64, "causal": False, "pass": "forward"}
    (naive,) = select(small, method="naive", **row)
    (flash,) = select(small, method="flash", **row)
    assert naive["peak_bytes"] >= 64 * 64 * 4 * naive["n_heads"]
    assert flash["peak_bytes"] < naive["peak_bytes"]


# Error --------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_exact_rows_are_those_of_attention_and_its_gradient(causal):
    q, k, v = (x.double().requires_grad_() for x in inputs())
    d_output, at = probe(1, 2, 96, 16, seed=7).double(), torch.tensor([0, 17, 95])
    out = exact(q, k, v, causal)
    (d_q,) = torch.autograd.grad(out, q, d_output)
    rows, slopes = flash_bench.exact_rows(q, k, v, causal, at, d_output)
    torch.testing.assert_close(rows, out[:, :, at])
    torch.testing.assert_close(slopes, d_q[:, :, at])


def test_errors_are_seen():
    q, k, v = inputs()

    def wrong(q, k, v, causal):
        return exact(q, k, v, causal) * 1.01

    assert flash_bench.error(exact, q, k, v, True, False) < 1e-5
    assert flash_bench.error(wrong, q, k, v, True, False) > 1e-3
    q.requires_grad_()
    assert flash_bench.error(exact, q, k, v, True, True) < 1e-5
    assert flash_bench.error(wrong, q, k, v, True, True) > 1e-4


def test_causal_taken_for_full_is_seen():
    q, k, v = inputs()
    assert (
        flash_bench.error(lambda *x: exact(*x[:3], False), q, k, v, True, False) > 0.1
    )


# Out of memory ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you…"),
    ],
)
def test_out_of_memory_is_recorded_and_goes_on(problem, monkeypatch):
    known = flash_bench.methods("cpu")

    def starved(q, k, v, causal):
        if q.shape[-2] > 32:
            raise problem
        return exact(q, k, v, causal)

    monkeypatch.setattr(
        flash_bench, "methods", lambda device: {**known, "naive": starved}
    )
    said = []
    found = flash_bench.table(
        "cpu", lengths=[32, 64], only=["naive", "math"], enough=0, say=said.append
    )
    for row in select(found, method="naive"):
        assert row["status"] == ("ok" if row["t"] == 32 else "out of memory")
        assert ("ms" in row) == (row["t"] == 32)
    assert all(row["status"] == "ok" for row in select(found, method="math"))
    assert any("out of memory" in line for line in said)


def test_out_of_memory_in_backward_alone():
    class Starving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return q * 1

        @staticmethod
        def backward(ctx, d_out):
            raise torch.OutOfMemoryError("CUDA out of memory")

    def method(q, k, v, causal):
        return Starving.apply(q, k, v)

    q, k, v = inputs()
    row = flash_bench.measure(method, q, k, v, False, True, "cpu", enough=0)
    assert row == {"status": "out of memory"}


def test_a_mistake_in_a_part_is_no_missing_memory():
    def broken(q, k, v, causal):
        raise ValueError("q, k and v do not\n fit")

    row = flash_bench.measure(broken, *inputs(), False, False, "cpu")
    assert row == {"status": "not available: q, k and v do not fit"}


def test_it_ends_in_time():
    found = flash_bench.table("cpu", lengths=[32], seconds=0.0, say=lambda line: None)
    assert found["rows"]
    assert all(r["status"].startswith("not measured: 0 s") for r in found["rows"])


def test_the_fastest_blocks_that_fit_are_taken(monkeypatch):
    times = {(128, 64): 2.0, (64, 64): 3.0}

    def kernel(q, k, v, causal, block_q, block_k):
        if (block_q, block_k) not in times:
            raise RuntimeError("blocks do not fit")
        return times[block_q, block_k]

    monkeypatch.setattr(flash_bench, "milliseconds", lambda f, *more: f())
    assert flash_bench.best_blocks(kernel, None, None, None, True) == (128, 64)
    times.clear()
    assert flash_bench.best_blocks(kernel, None, None, None, True) == (None, None)


# The command --------------------------------------------------------------------------


def test_the_command_writes_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_PARTS", "mine")
    out = tmp_path / "table.json"
    options = ["--out", str(out), "--device", "cpu", "--parts", "reference"]
    assert flash_bench.main([*options, "--lengths", "32", "--methods", "flash"]) == 0
    found = json.loads(out.read_text())
    assert found["about"]["parts"] == "reference"
    assert len(found["rows"]) == 4
    assert found == recorded(out)
    assert "4 rows in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--device cpu"),
        (["--device", "cpu", "--lengths", "0"], "at least 1"),
        (["--device", "cpu", "--out", "no/such/folder/x.json"], "no folder"),
    ],
)
def test_bad_options_are_one_sentence(options, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_PARTS", "reference")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = ["--out", str(tmp_path / "table.json")]
    assert flash_bench.main([*out, *options]) == 1
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert not (tmp_path / "table.json").exists()


# The recorded table -------------------------------------------------------------------


def test_the_recorded_table_is_a_gpus_or_empty_with_a_notice():
    found = recorded()
    if not found["rows"]:
        assert found["about"] is None
        assert "utils.flash_bench" in found["notice"]
        assert RECORDED.relative_to(syllabus.ROOT).as_posix() in found["notice"]
        return
    assert found["about"]["driver"] and found["about"]["capability"]
    assert not found["about"]["device"].startswith("CPU")
    assert {row["dtype"] for row in found["rows"]} == {"bfloat16", "float16"}


def synthetic():
    """Made up for this test alone."""
    about = {
        "device": "Test GPU",
        "date": "2001-02-03",
        "torch": "9.9",
        "driver": "1.2",
    }
    rows = []
    for t in (512, 1024, 2048):
        for name in ("naive", "flash"):
            row = {"method": name, "t": t, "d_head": 64, "causal": True}
            starved = name == "naive" and t == 2048
            rest = {"ms": t / 100, "peak_bytes": t * 64, "tflops": 1.0, "error": 0.0}
            status = (
                {"status": "out of memory"} if starved else {"status": "ok", **rest}
            )
            rows.append({**row, **status})
    return {"about": about, "rows": rows}


def test_a_table_is_drawn_with_its_label():
    made = synthetic()
    assert label(made) == "Test GPU, 2001-02-03, torch 9.9, driver 1.2"
    fig, axes = plt.subplots(1, 2)
    draw(axes, made, causal=True)
    for ax in axes:
        lines = {line.get_label(): line for line in ax.get_lines()}
        assert list(lines["flash"].get_xdata()) == [512, 1024, 2048]
        assert list(lines["naive"].get_xdata()) == [512, 1024]
        crosses = [line for line in ax.get_lines() if line.get_marker() == "x"]
        assert len(crosses) == 1  # where memory ended
        assert "T" in ax.get_xlabel() and ax.get_ylabel()
    plt.close(fig)


def test_nothing_is_drawn_of_an_empty_table():
    fig, axes = plt.subplots(1, 2)
    draw(axes, {"about": None, "rows": []})
    assert not any(ax.get_lines() for ax in axes)
    plt.close(fig)
