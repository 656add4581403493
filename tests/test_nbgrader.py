"""nbgrader on the solution notebooks as they are; it agrees with `make grade`."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.notebooks import copy_of_the_course, environment, lesson_notebook
from tests.test_grade import at, broken_answer, cells_of, hand_in
from utils import syllabus
from utils.grade.run import grade

pytest.importorskip("nbgrader")
LESSONS = ["00_start", "02_attention"]
BIN = Path(sys.executable).parent


def nbgrader(folder, *arguments):
    """Run one of nbgrader's commands in a course folder."""
    variables = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        [sys.executable, "-m", "nbgrader", *arguments],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def solved(made, answers):
    """The released notebook with a learner's answers in its exercise cells."""
    for name, source in answers.items():
        made.cells[at(made, name)].source = source
    return made


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    """Of two learners, what nbgrader gives and what `make grade` gives."""
    root = copy_of_the_course(tmp_path_factory.mktemp("nbgrader") / "course")
    folder = root / "grading"
    folder.mkdir()
    settings = "c = get_config()\nc.CourseDirectory.course_id = 'course'\n"
    (folder / "nbgrader_config.py").write_text(settings)
    for file in LESSONS:
        (folder / "source" / file).mkdir(parents=True)
        text = (syllabus.ROOT / "solutions" / f"{file}.ipynb").read_text("utf-8")
        (folder / "source" / file / f"{file}.ipynb").write_text(text, "utf-8")
        nbgrader(folder, "generate_assignment", file, "--create")
        submit(folder, file)
        nbgrader(
            folder, "autograde", file, "--create", "--ExecutePreprocessor.timeout=600"
        )
    nbgrader(folder, "export", "--to", "grades.csv")
    with open(folder / "grades.csv", encoding="utf-8", newline="") as file:
        theirs = {
            (row["student_id"], row["assignment"]): row for row in csv.DictReader(file)
        }
    ours = grade(folder / "handed_in")
    return folder, theirs, ours


def submit(folder, file):
    """One learner who is right, and one with what can go wrong."""
    released = folder / "release" / file / f"{file}.ipynb"
    answers = {n: s for n, s in cells_of(file).items() if not n.startswith("check_")}
    perfect = solved(nbformat.read(released, as_version=4), answers)
    other = nbformat.read(released, as_version=4)
    if file == "02_attention":
        wrong = broken_answer(file, "attention_weights")
        right = {n: answers[n] for n in ("causal_mask", "padding_mask")}
        other = solved(other, {"attention_weights": wrong, **right})
        # Its check is made to say yes, and the masks' answer is taken out.
        tampered = other.cells[at(other, "check_attention_weights")]
        tampered.source = "print('✓ attention_weights: right')"
        del other.cells[at(other, "causal_mask")]
    for learner, made in (("perfect", perfect), ("other", other)):
        place = folder / "submitted" / learner / file
        place.mkdir(parents=True)
        nbformat.write(made, place / f"{file}.ipynb")
        (folder / "handed_in").mkdir(exist_ok=True)
        hand_in(folder / "handed_in", learner, json.dumps(made), file)


def test_the_released_notebook_is_the_learner_s_own(scores):
    folder, _, _ = scores
    for file in LESSONS:
        released = nbformat.read(
            folder / "release" / file / f"{file}.ipynb", as_version=4
        )
        ours = lesson_notebook(file)
        assert len(released.cells) == len(ours.cells)
        for theirs, own in zip(released.cells, ours.cells, strict=True):
            assert "SOLUTION" not in theirs.source
            if "check" in own.metadata.get("tags", []):
                assert theirs.source == own.source


def by_nbgrader(folder) -> dict:
    """Each exercise's score in nbgrader's database."""
    from nbgrader.api import Gradebook

    found = {}
    with Gradebook(f"sqlite:///{folder / 'gradebook.db'}") as book:
        for file in LESSONS:
            for submission in book.assignment_submissions(file):
                for notebook in submission.notebooks:
                    for cell in notebook.grades:
                        name = cell.name.removeprefix("check_")
                        found[submission.student.id, name] = cell.score
    return found


def test_nbgrader_and_make_grade_agree_on_every_exercise(scores):
    folder, _, ours = scores
    theirs = by_nbgrader(folder)
    assert theirs == {(r.learner, r.exercise): r.points for r in ours.results}
    assert theirs["other", "padding_mask"] > 0
    for name in ("softmax", "attention_weights", "attention", "causal_mask"):
        assert theirs["other", name] == 0


def test_the_exported_totals_agree(scores):
    _, theirs, ours = scores
    for (learner, file), row in theirs.items():
        mine = [
            r for r in ours.results if (r.learner, r.lesson.file) == (learner, file)
        ]
        assert float(row["score"]) == sum(r.points for r in mine)
        assert float(row["max_score"]) == sum(r.possible for r in mine)
    assert {learner for learner, _ in theirs} == {"perfect", "other"}
    for file in LESSONS:
        row = theirs["perfect", file]
        assert row["score"] == row["max_score"]
