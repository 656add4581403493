"""The list of lessons hangs on no notebook, and the map shows how far a learner is."""

import json
import shutil
import subprocess
import sys

import pytest

import conftest
from tests.notebooks import copy_of_the_course, environment
from utils import course, syllabus
from utils.errors import CourseError
from utils.imports import lesson_imports


def test_lessons_and_exercises_come_in_the_order_of_the_course():
    assert [each.number for each in syllabus.lessons()] == [
        f"{number:02}" for number in range(len(syllabus.lessons()))
    ]
    assert syllabus.lesson_of("softmax").file == "00_start"
    assert syllabus.lesson_of("no_such_exercise") is None
    lesson = syllabus.lesson_of("rnn_cell")
    assert (lesson.slug, next(iter(lesson.exercises))) == ("rnn_baseline", "rnn_cell")
    assert "from torch import nn" in lesson.imports


def test_the_map_says_what_comes_next(capsys):
    course.course_map()
    shown = capsys.readouterr().out
    assert "Next: lesson 00" in shown
    assert "How this course works" in shown


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"lessons": [{"file": 1}]}'])
def test_a_damaged_list_is_named(tmp_path, monkeypatch, text):
    (tmp_path / "syllabus.json").write_text(text)
    monkeypatch.setattr(syllabus, "FILE", tmp_path / "syllabus.json")
    syllabus.lessons.cache_clear()
    with pytest.raises(CourseError, match=r"syllabus\.json is missing or damaged"):
        syllabus.lessons()
    monkeypatch.undo()
    assert syllabus.lessons()


def test_what_a_lesson_imports():
    cells = [
        "import os, math\nfrom utils import plots\nif os.name:\n    os.x = 1\n"
        "try:\n    import triton\nexcept ImportError:\n    triton = None",
        "%matplotlib inline\nfrom torch import nn as n, optim\nx = 1\nif x:\n    x = 2",
        "if x:\n    x = 3",
    ]
    assert lesson_imports(cells) == [
        "import os",
        "import math",
        "if os.name:\n    os.x = 1",
        "try:\n    import triton\nexcept ImportError:\n    triton = None",
        "from torch import nn as n",
        "from torch import optim",
    ]


# What a learner does with notebooks ---------------------------------------------------


@pytest.fixture
def copy(tmp_path):
    return copy_of_the_course(tmp_path / "course")


def python(*arguments, folder):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


def attempted(folder):
    result = python("-S", "-m", "utils.attempted", folder=folder)  # -S: no package
    assert result.returncode == 0, result.stderr
    return result.stdout.split(), result.stderr


def answer(path, beginning, source):
    made = json.loads(path.read_text(encoding="utf-8"))
    for cell in made["cells"]:
        if "".join(cell["source"]).startswith(beginning):
            cell["source"] = source
    path.write_text(json.dumps(made), encoding="utf-8")


CHECK = """
import os
os.environ["COURSE_PARTS"] = "mine"
from utils.check import evaluate
print(evaluate(lambda scores, dim=-1: scores.softmax(dim), "softmax").status)
from my_transformer import causal_mask
print(causal_mask(3))
"""
SAVED = "# part: causal_mask\ndef causal_mask(t):\n    return t\n"


def test_copies_and_lost_notebooks_take_nothing_with_them(copy):
    notebooks = copy / "notebooks"
    for name in ("00_backup", "02_attempt", "00_start-Copy1", "99_notes"):
        shutil.copy(notebooks / "00_start.ipynb", notebooks / f"{name}.ipynb")
    (notebooks / "01_rnn_baseline.ipynb").unlink()
    (notebooks / "02_attention.ipynb").write_text("{", encoding="utf-8")
    (copy / "my_transformer" / "attention.py").write_text(SAVED)
    result = python("-c", CHECK, folder=copy)
    assert result.stdout.split() == ["passed", "3"], result.stderr
    shown = python("-c", "import utils.course as c; c.course_map()", folder=copy)
    assert shown.stdout.count(" min ") == len(syllabus.lessons())


def test_copies_are_no_tests():
    notebooks = syllabus.ROOT / "notebooks"
    assert conftest.pytest_ignore_collect(notebooks / "00_start.ipynb") is None
    assert conftest.pytest_ignore_collect(notebooks / "00_backup.ipynb") is True


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": [1]}', '{"cells": [{}]}'])
def test_of_a_damaged_notebook_what_is_written_is_not_lost(copy, text):
    path = copy / "notebooks" / "02_attention.ipynb"
    assert attempted(copy) == ([], "")
    answer(path, "def causal_mask", "def causal_mask(t_q, t_k=None):\n    return 1")
    assert attempted(copy) == (["notebooks/02_attention.ipynb"], "")
    path.write_text(text, encoding="utf-8")
    (copy / "notebooks" / "01_rnn_baseline.ipynb").unlink()
    found, said = attempted(copy)
    assert found == []
    assert "01_rnn_baseline.ipynb is not there" in said
    assert "02_attention.ipynb cannot be read" in said
    assert "Give it another name" in said and "git" not in said
