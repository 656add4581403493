"""Long experiments go on where they stopped, and their files say how they were made."""

import json
from types import SimpleNamespace

import pytest

from utils import long_runs
from utils.errors import CourseError
from utils.long_runs.__main__ import main

SETTINGS = [{"seed": 0}, {"seed": 1}]


@pytest.fixture
def experiment(monkeypatch):
    """An experiment of two runs, and the seeds that were run."""
    ran = []

    def measure(seed):
        ran.append(seed)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return {"loss": seed / 2}

    made = SimpleNamespace(ABOUT="…", MINUTES=1, SETTINGS=SETTINGS, measure=measure)
    monkeypatch.setattr(long_runs, "import_module", lambda name: made)
    monkeypatch.setattr(long_runs, "names", lambda: ["one"])
    return ran


def test_a_stopped_run_goes_on(experiment, tmp_path, capsys):
    out = tmp_path / "one.json"
    arguments = ["one", "--out", str(out)]
    assert main(arguments) == 1
    assert "the same command goes on" in capsys.readouterr().out
    assert main(arguments) == 0
    assert experiment == [0, 1, 1]
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["rows"] == [
        {"setting": {"seed": 0}, "loss": 0.0},
        {"setting": {"seed": 1}, "loss": 0.5},
    ]
    assert result["about"]["command"] == "python -m utils.long_runs one"


def test_a_folder_that_is_missing_is_said(experiment, tmp_path, capsys):
    assert main(["one", "--out", str(tmp_path / "none" / "one.json")]) == 1
    assert "Give another --out" in capsys.readouterr().out


def test_a_missing_record_names_its_command(monkeypatch, tmp_path):
    monkeypatch.setattr(long_runs, "FOLDER", tmp_path)
    with pytest.raises(CourseError, match=r"utils\.long_runs one$"):
        long_runs.recorded("one")


@pytest.mark.parametrize("name", long_runs.names())
def test_every_record_holds_every_run(name, monkeypatch):
    monkeypatch.setenv("COURSE_PARTS", "reference")
    experiment = long_runs.import_module(f"utils.long_runs.{name}")
    result = long_runs.recorded(name)
    assert [row["setting"] for row in result["rows"]] == experiment.SETTINGS
    assert result["about"]["what"] == experiment.ABOUT
