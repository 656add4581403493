"""The list of lessons and the map, derived from the notebooks that are there."""

import json
import shutil

import pytest

from utils import syllabus
from utils.errors import CourseError


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    for path in (syllabus.ROOT / "notebooks").glob("0[01]_*.ipynb"):
        shutil.copy(path, tmp_path / "notebooks")
    monkeypatch.setattr(course, "ROOT", tmp_path)
    syllabus.lessons.cache_clear()
    yield tmp_path
    syllabus.lessons.cache_clear()


def test_lessons_are_those_in_the_folder(root):
    assert [each.slug for each in syllabus.lessons()] == ["start", "rnn_baseline"]
    assert syllabus.lesson_of("softmax").file == "00_start"
    assert syllabus.lesson_of("no_such_exercise") is None
    names = list(syllabus.lesson_of("rnn_cell").exercises)
    assert names[0] == "rnn_cell"  # in the order of the lesson


def test_a_copy_made_in_jupyterlab_is_no_lesson(root):
    notebooks = root / "notebooks"
    shutil.copy(notebooks / "00_start.ipynb", notebooks / "00_start-Copy1.ipynb")
    assert len(syllabus.lessons()) == 2
    assert syllabus.lesson_of("softmax").slug == "start"


@pytest.mark.parametrize("text", ["", "{", json.dumps({"metadata": {}}), "[]"])
def test_a_damaged_notebook_is_named(root, text, capsys):
    (root / "notebooks" / "00_start.ipynb").write_text(text)
    assert [each.slug for each in syllabus.lessons()] == ["rnn_baseline"]
    assert "00_start.ipynb is damaged" in capsys.readouterr().out


def test_no_lesson_at_all_is_no_success(root):
    shutil.rmtree(root / "notebooks")
    with pytest.raises(CourseError, match="make build"):
        course.course_map()


def test_the_map_says_what_comes_next(root, capsys):
    course.course_map()
    shown = capsys.readouterr().out
    assert "Next: lesson 00" in shown
    assert "How this course works" in shown
