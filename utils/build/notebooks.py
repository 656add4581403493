"""Makes the notebooks of a lesson from its source: the same bytes every time."""

import ast
import hashlib
import json
import re

import nbformat

EXTRA = "; an extra, which nothing later needs"

BOOTSTRAP = """\
# Run this cell first: it finds the course's folder and gets the notebook ready.
import sys
from pathlib import Path

here = Path.cwd()
parents = (here, *here.parents)
root = next((p for p in parents if (p / "utils" / "session.py").is_file()), None)
if root is None:
    raise ImportError(
        f"No course folder at {here} or above it. Keep this notebook in the folder "
        "that it came in, and start JupyterLab from the course with `make lab`."
    )
sys.path.insert(0, str(root))
if "utils.session" not in sys.modules:
    sys.modules.pop("utils", None)  # another package of this name may be installed

from utils.session import start

start(LESSON)"""


def notebook(source, solved: bool):
    """The learner's notebook of a `LessonSource`, or the solution one before it runs.

    An exercise's cell holds the stub or the answer, and its check gets the name of the
    exercise as text. The title comes first, then the set-up cell, folded; cells that
    measure or draw are folded too.
    """
    cells = []
    for i, cell in enumerate(source.cells):
        tags = cell.metadata.get("tags", [])
        name = cell.metadata.get("exercise")
        name_before = source.cells[i - 1].metadata.get("exercise") if i else None
        if cell.cell_type != "code":
            cells.append(nbformat.v4.new_markdown_cell(_with_effort(source, i, cell)))
        elif name:
            answer = source.answers[name]
            exercise = _code(answer.source if solved else answer.stub, ["exercise"])
            exercise.metadata["nbgrader"] = _nbgrader(name, solution=True)
            cells.append(exercise)
        elif name_before:
            check = _code(check_call(name_before), ["check", *tags])
            points = source.exercises[name_before]["difficulty"]
            check.metadata["nbgrader"] = _nbgrader(
                f"check_{name_before}", points=points
            )
            cells.append(check)
        else:
            floats = "claim(" in cell.source
            code = _code(cell.source, [*tags, *["nbval-ignore-output"] * floats])
            cells.append(_folded(code) if folds(cell) else code)
    arguments = f'"{source.file}"' + ", solved_notebook=True" * solved
    start = _code(BOOTSTRAP.replace("LESSON", arguments), ["bootstrap"])
    cells.insert(cells[0].cell_type == "markdown", _folded(start))
    _number(source.file, cells)
    exercises = [{"name": n, **effort} for n, effort in source.exercises.items()]
    return nbformat.from_dict(
        {
            "nbformat": 4,
            "nbformat_minor": 5,
            "metadata": {
                "kernelspec": {
                    "display_name": "Python 3 (ipykernel)",
                    "language": "python",
                    "name": "python3",
                },
                "language_info": {"name": "python"},
                "course": {**source.about, "exercises": exercises},
            },
            "cells": cells,
        }
    )


def folds(cell) -> bool:
    """Whether a lesson's cell only measures, draws or imports.

    Its fence may say otherwise.
    """
    shows = "claim(" in cell.source or "plt.show()" in cell.source
    return cell.metadata.get("folded", shows or _only_imports(cell.source))


def _only_imports(source: str) -> bool:
    kinds = (ast.Import, ast.ImportFrom)
    lines = re.sub(r"(?m)^\s*[%!].*$", "", source)
    body = ast.parse(lines).body
    return bool(body) and all(isinstance(node, kinds) for node in body)


def check_call(name: str) -> str:
    """The check cell of an exercise."""
    return f'{name} = check({name}, "{name}")'


def code_cells(nb) -> list:
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def dumps(nb) -> str:
    """A notebook as the text of its file."""
    return json.dumps(nb, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _code(text, tags):
    cell = nbformat.v4.new_code_cell(text.strip("\n"))
    if tags:
        cell.metadata["tags"] = list(dict.fromkeys(tags))
    return cell


def _folded(cell):
    """A cell whose source JupyterLab shows as one line; its output stays."""
    cell.metadata["jupyter"] = {"source_hidden": True}
    return cell


def _with_effort(source, i, cell) -> str:
    """The text before an exercise, with difficulty and minutes under its heading."""
    following = source.cells[i + 1] if i + 1 < len(source.cells) else None
    if following is None or "exercise" not in following.metadata:
        return cell.source
    level, minutes = following.metadata["difficulty"], following.metadata["minutes"]
    effort = (
        f"*Difficulty {'●' * level}{'○' * (5 - level)} ({level} of 5), "
        f"about {minutes} minutes{EXTRA * following.metadata.get('extra', False)}*"
    )
    headings = list(re.finditer(r"^#+ .*Exercise.*$", cell.source, re.MULTILINE))
    end = headings[-1].end()
    return f"{cell.source[:end]}\n\n{effort}{cell.source[end:]}"


def _nbgrader(grade_id, *, solution=False, points=None):
    about = {
        "schema_version": 3,
        "grade_id": grade_id,
        "grade": not solution,
        "locked": not solution,
        "solution": solution,
        "task": False,
        "cell_type": "code",
    }
    return about if solution else {**about, "points": points}


def _number(file, cells):
    """Ids that depend on what a cell is, not on where it stands."""
    used: dict[str, int] = {}
    for cell in cells:
        graded = cell.metadata.get("nbgrader", {}).get("grade_id")
        bootstrap = "bootstrap" in cell.metadata.get("tags", [])
        about = graded or ("bootstrap" if bootstrap else cell.cell_type + cell.source)
        key = hashlib.sha256(f"{file}:{about}".encode()).hexdigest()[:10]
        used[key] = used.get(key, 0) + 1
        cell.id = key if used[key] == 1 else f"{key}-{used[key]}"
