"""Reads learners' notebooks, whatever is in them, and finds their exercise cells."""

import ast
import json
import os
import re
import stat
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import nbformat

from utils import syllabus

NOTEBOOK_BYTES = 25 << 20
CODE_CHARACTERS = 2_000_000  # in all cells
CELL_CHARACTERS = 50_000
DEPTH = 4  # folders below the one that is graded


@dataclass
class Submission:
    """One learner's notebook of one lesson.

    cells: the source of each exercise's cell, by name; an exercise without a cell
    is not in it. problem: why the notebook could not be read, or "".
    """

    learner: str
    lesson: syllabus.Lesson | None
    path: Path
    cells: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    notes: list[str] = field(default_factory=list)


def collect(folder: Path, only: list[str] = ()) -> list[Submission]:
    """Every learner's notebooks in `folder`, one per learner and lesson.

    A notebook in a folder of its own belongs to the learner whom the first folder
    names; a loose one to the name that is left of its file's name without the
    lesson, or to the folder's. Of several of one lesson the one that bears the
    lesson's name counts, else the last by name.
    """
    chosen: dict[tuple, Submission] = {}
    for path in _notebooks(folder):
        found = read(path, _learner(path, folder))
        if only and (found.lesson is None or not {*only} & {*_names(found.lesson)}):
            continue
        key = (found.learner, found.lesson.file if found.lesson else path)
        other = chosen.get(key)
        if other is not None:
            first, second = sorted((other, found), key=_preference)
            second.notes.append(
                f"{first.path.relative_to(folder)} holds the same lesson and was "
                "left out."
            )
            second.notes += first.notes
            found = second
        chosen[key] = found
    return sorted(
        chosen.values(),
        key=lambda s: (s.learner, s.lesson.file if s.lesson else "~", s.path.name),
    )


def _preference(submission):
    exact = submission.lesson and submission.path.stem == submission.lesson.file
    return bool(exact), str(submission.path)


def _names(lesson):
    return lesson.file, lesson.slug, lesson.number


def _notebooks(folder: Path) -> list[Path]:
    """Regular files that end in `.ipynb`; links are not followed."""
    found = []
    for place, folders, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        if depth >= DEPTH:
            folders.clear()
        for name in sorted(files):
            path = Path(place, name)
            if name.endswith(".ipynb") and stat.S_ISREG(path.lstat().st_mode):
                found.append(path)
    return found


def _learner(path: Path, folder: Path) -> str:
    inside = path.relative_to(folder).parts
    if len(inside) > 1:
        return _clean(inside[0])
    name = path.stem
    for lesson in syllabus.lessons():
        name = name.replace(lesson.file, "")
    name = re.sub(r"^[\s_\-.]+|[\s_\-.]+$", "", name)
    return _clean(name or folder.resolve().name)


def _clean(name: str) -> str:
    """A name that can be printed: no control characters, no lone surrogates."""
    name = name.encode("utf-8", "replace").decode("utf-8")
    return "".join(c if c.isprintable() else "?" for c in name)[:80] or "?"


def read(path: Path, learner: str) -> Submission:
    """A notebook, with a sentence in `problem` if it is none."""
    named = next((each for each in syllabus.lessons() if each.file in path.stem), None)
    try:
        cells = _code_cells(path)
    except Unreadable as reason:
        return Submission(learner, named, path, problem=str(reason))
    lesson = _lesson(cells) or named
    if lesson is None:
        return Submission(
            learner, None, path, problem="it holds no exercise of this course"
        )
    found = Submission(learner, lesson, path)
    for name in lesson.exercises:
        source = exercise_cell(cells, name)
        if source is None:
            continue
        if len(source) > CELL_CHARACTERS:
            found.notes.append(f"The cell of `{name}` is too long to be graded.")
        else:
            found.cells[name] = source
    return found


class Unreadable(Exception):
    """Why a file is no notebook, as a sentence."""


def _code_cells(path: Path) -> list[tuple[str, str | None]]:
    """Source and grade id of every code cell."""
    try:
        if path.stat().st_size > NOTEBOOK_BYTES:
            raise Unreadable(f"the file is larger than {NOTEBOOK_BYTES >> 20} MB")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Unreadable(f"the file cannot be read ({type(error).__name__})") from error
    if not text.strip():
        raise Unreadable("the file is empty")
    try:
        made = json.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable("the file is not a notebook: it is no valid JSON") from error
    version = made.get("nbformat") if isinstance(made, dict) else None
    if not isinstance(version, int):
        raise Unreadable("the file is not a notebook")
    if version != 4:
        try:
            made = nbformat.reads(text, as_version=4)
        except Exception as error:
            raise Unreadable(
                f"notebook format {version} cannot be read; save it as format 4"
            ) from error
    cells = made.get("cells")
    if not isinstance(cells, list):
        raise Unreadable("the notebook has no list of cells")
    found = []
    for cell in cells:
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source", "")
        if isinstance(source, list) and all(isinstance(line, str) for line in source):
            source = "".join(source)
        if isinstance(source, str):
            found.append((source, _grade_id(cell)))
    if sum(len(source) + 100 for source, _ in found) > CODE_CHARACTERS:
        raise Unreadable("the notebook holds more code than can be graded")
    return found


def _grade_id(cell) -> str | None:
    about = cell.get("metadata")
    about = about.get("nbgrader") if isinstance(about, dict) else None
    found = about.get("grade_id") if isinstance(about, dict) else None
    return found if isinstance(found, str) else None


def _lesson(cells) -> syllabus.Lesson | None:
    """The lesson whose exercises the cells name most often."""

    def named(lesson):
        ids = {*lesson.exercises, *(f"check_{name}" for name in lesson.exercises)}
        return sum(
            grade_id in ids or bool(defined(source) & lesson.exercises.keys())
            for source, grade_id in cells
        )

    best = max(syllabus.lessons(), key=named, default=None)
    if best is not None and named(best):
        return best
    started = "".join(source for source, _ in cells if "start(" in source)
    return next(
        (each for each in syllabus.lessons() if f'start("{each.file}"' in started), None
    )


# Which cell is the answer -------------------------------------------------------------


def exercise_cell(cells, name: str) -> str | None:
    """The source of the cell that answers the exercise `name`, or None.

    An exercise cell carries the exercise's grade id; one whose metadata are lost
    counts if it defines the name. As in a notebook that is run from top to bottom,
    of several the last above the exercise's check counts; if none stands above it,
    or the check is gone, the last of all.
    """
    wanted = [
        at
        for at, (source, grade_id) in enumerate(cells)
        if grade_id == name or (grade_id is None and name in defined(source))
    ]
    if not wanted:
        return None
    calls = f"{name} = check({name})", f'{name} = check({name}, "{name}")'
    checks = [
        at
        for at, (source, grade_id) in enumerate(cells)
        if grade_id == f"check_{name}" or source.strip() in calls
    ]
    above = [at for at in wanted if checks and at < checks[0]]
    # A cell that only carries the id, emptied or cut in two, yields to one that
    # defines the name.
    defining = [at for at in above or wanted if name in defined(cells[at][0])]
    return cells[(defining or above or wanted)[-1]][0]


@lru_cache(maxsize=1000)
def defined(source: str) -> frozenset[str]:
    """The names that the top level of a cell binds, imports excepted."""
    tree = parse(source)
    names = set()
    for node in tree.body if tree else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return frozenset(names)


def parse(source: str) -> ast.Module | None:
    """The syntax tree of a cell, or None if it is no Python."""
    if len(source) > CELL_CHARACTERS:
        return None
    for text in (source, plain(source)):
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def runnable(source: str) -> str:
    """A cell as Python alone can run it."""
    try:
        ast.parse(source)
    except SyntaxError:
        return plain(source)
    except (ValueError, RecursionError, MemoryError):
        pass
    return source


def plain(source: str) -> str:
    """A cell without the lines that are for IPython alone (`%time`, `!ls`)."""
    return re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", source)
