"""`python -m utils.train`: trains, stops, goes on, and says what is wrong."""

import re
import signal

import pytest
import torch

from utils import train

TINY = ["--size", "tiny", "--batch", "4", "--length", "16", "--vocabulary", "270"]
TINY += ["--parts", "reference", "--device", "cpu"]
TEXT = "".join(f"The {i} cats sat on mat {i * i}.\n" for i in range(400))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def run(file, tmp_path, capsys):
    """Runs the command with a folder of its own; returns its status and its words."""

    def command(*more, out="run"):
        status = train.main([str(file), "--out", str(tmp_path / out), *TINY, *more])
        shown = capsys.readouterr()
        return status, shown.out + shown.err

    return command


def saved(tmp_path, out="run"):
    return torch.load(tmp_path / out / "checkpoint.pt", weights_only=True)


def stop_at(monkeypatch, step):
    """Ctrl-C in the middle of a step."""
    batch_loss = train.batch_loss

    def interrupted(run, *args):
        loss = batch_loss(run, *args)
        if run.step == step:
            signal.raise_signal(signal.SIGINT)
        return loss

    monkeypatch.setattr(train, "batch_loss", interrupted)


def test_it_learns_and_says_how_well(run):
    status, shown = run("--steps", "60", "--every", "10")
    assert status == 0
    bits = [float(found) for found in re.findall(r"([\d.]+) bits per byte", shown)]
    assert len(bits) == 6
    assert bits[-1] < bits[0] - 0.5
    assert "reference" in shown


def test_a_stopped_run_ends_like_one_that_was_not(run, monkeypatch, tmp_path):
    settings = ("--steps", "12", "--every", "4")
    run(*settings, out="whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        status, shown = run(*settings)
    assert status == 0
    assert "Stopped and saved at step 7." in shown
    assert saved(tmp_path)["step"] == 7
    assert "step 7 of 12" in run(*settings)[1]
    whole, parts = saved(tmp_path, "whole")["model"], saved(tmp_path)["model"]
    for name, weights in whole.items():
        torch.testing.assert_close(parts[name], weights, rtol=0, atol=0)
    assert "Done before" in run(*settings)[1]


def test_accumulated_batches_are_one_large_batch(run, monkeypatch, tmp_path):
    """The same pieces in two halves give the same step, but for rounding."""
    pieces = torch.randint(270, (8, 17), generator=torch.Generator().manual_seed(0))
    drawn = []

    def get_batch(data, batch_size, t, generator=None):
        start = sum(drawn) % 8
        drawn.append(batch_size)
        rows = pieces[start : start + batch_size]
        return rows[:, :-1], rows[:, 1:]

    import my_transformer

    monkeypatch.setattr(my_transformer, "get_batch", get_batch, raising=False)
    settings = ("--steps", "1", "--every", "9")
    monkeypatch.setattr(train, "measure", lambda *_: None)
    run(*settings, "--batch", "8", out="one")
    drawn.clear()
    run(*settings, "--batch", "4", "--accumulate", "2", out="two")
    assert drawn == [4, 4]
    one, two = saved(tmp_path, "one")["optimizer"], saved(tmp_path, "two")["optimizer"]
    for i, state in one["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(two["state"][i][key], value)


def test_bfloat16_keeps_weights_in_float32(run, tmp_path):
    assert run("--steps", "2", "--precision", "bfloat16")[0] == 0
    assert {w.dtype for w in saved(tmp_path)["model"].values()} == {torch.float32}


def test_vectors_do_not_decay(run, tmp_path):
    run("--steps", "1")
    groups = saved(tmp_path)["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_another_setting_or_text_is_refused(run, file):
    run("--steps", "2")
    status, shown = run("--steps", "3")
    assert status == 1
    assert "is a run with --steps 2" in shown
    file.write_text(TEXT + "more", encoding="utf-8")
    assert "another text" in run("--steps", "2")[1]


def test_a_damaged_run_is_said(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"no zip file")
    status, shown = run("--steps", "2")
    assert status == 1
    assert "is no saved run, or damaged" in shown


def test_a_full_disk_costs_nothing_that_was_saved(run, monkeypatch, tmp_path):
    settings = ("--steps", "4", "--every", "2")
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        run(*settings)

    def full(state, path):
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        status, shown = run(*settings)
    assert status == 1
    assert "No space left on device" in shown
    assert saved(tmp_path)["step"] == 2
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe" * 2000, "byte 0 begins no character"),
        (b"short", "holds 5 characters"),
        (b"ab" * 1001, "Take a longer text, or a smaller --length"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_will_not_do(run, file, content, says):
    file.unlink() if content is None else file.write_bytes(content)
    status, shown = run("--length", "500")
    assert status == 1
    assert says in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("setting", [("--batch", "0"), ("--vocabulary", "9")])
def test_impossible_settings_are_refused(setting):
    with pytest.raises(SystemExit):
        train.options(setting)
