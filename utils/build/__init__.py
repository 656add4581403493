"""Builds the notebooks, the course map and CLAIMS.md from the lessons' sources.

`python -m utils.build` writes what has changed and executes a solution notebook only
when something that it depends on has changed; `--check` writes nothing and exits with
1 if anything would change.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import sys
import textwrap
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from utils import syllabus
from utils.check.exercise import Exercise
from utils.claims import MIME as CLAIM
from utils.errors import CourseError

ROOT = syllabus.ROOT
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
MAP_BEGIN, MAP_END = "<!-- course map -->", "<!-- end of course map -->"
CELL_SECONDS = 300
WIDGET = "application/vnd.jupyter.widget-view+json"

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


class BuildError(CourseError):
    """A lesson breaks a rule; each line names the file, the line and the rule."""


@dataclass(frozen=True)
class Answer:
    """A reference answer from `solutions/<slug>.py`, as it stands and as a stub."""

    source: str
    stub: str


# Reading the sources ------------------------------------------------------------------


@cache
def answers(path: Path) -> dict[str, Answer]:
    """The functions and classes of a solutions module that have marked lines."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            source = "\n".join(lines[first - 1 : node.end_lineno])
            after = lines[node.end_lineno : node.end_lineno + 1]
            if after and after[0].strip() == END:  # a comment, so not in the node
                source += "\n" + after[0]
            if BEGIN in source:
                found[node.name] = Answer(source, stub(source))
    return found


def stub(source: str) -> str:
    """The source with each marked region replaced by `raise NotImplementedError`."""
    region = re.compile(
        rf"^([ ]*){BEGIN}\n.*?^[ ]*{END}$", flags=re.MULTILINE | re.DOTALL
    )
    return region.sub(r"\1raise NotImplementedError", source)


def lesson_paths() -> list[Path]:
    return sorted((ROOT / "lessons").glob("[0-9][0-9]_*.md"))


class LessonSource:
    """One `lessons/NN_slug.md`, its rules checked."""

    def __init__(self, path: Path):
        self.path, self.file = path, path.stem
        self.slug = path.stem.partition("_")[2]
        self.text = path.read_text(encoding="utf-8")
        self.cells = jupytext.reads(self.text, fmt="md").cells
        self.about = jupytext.reads(self.text, fmt="md").metadata.get("course", {})
        self.problems: list[str] = []
        self.exercises: dict[str, dict] = {}
        solutions = ROOT / "solutions" / f"{self.slug}.py"
        self.answers = answers(solutions) if solutions.is_file() else {}
        self._check_front_matter()
        for i, cell in enumerate(self.cells):
            if "exercise" in cell.metadata:
                self._check_exercise(i, cell)
        self._check_nothing_left_over()
        if self.problems:
            raise BuildError("\n".join(self.problems))

    def _refuse(self, pattern: str, problem: str) -> None:
        """Note a problem, at the line of the source where `pattern` first stands."""
        found = re.search(pattern, self.text)
        line = self.text[: found.start()].count("\n") + 1 if found else 1
        self.problems.append(f"lessons/{self.path.name}:{line}: {problem}")

    def _check_front_matter(self):
        for key, kind in (("title", str), ("summary", str), ("minutes", int)):
            if not isinstance(self.about.get(key), kind):
                self._refuse("course:", f"the front matter lacks course.{key}")

    def _check_exercise(self, i, cell):
        name = cell.metadata["exercise"]
        fence = rf"(?m)^```python .*exercise=\"{re.escape(str(name))}\""

        def refuse(problem):
            self._refuse(fence, f"exercise {name}: {problem}")

        difficulty, minutes = (cell.metadata.get(k) for k in ("difficulty", "minutes"))
        if name in self.exercises:
            refuse("the name is used twice")
        if not isinstance(difficulty, int) or not 1 <= difficulty <= 5:
            refuse("no difficulty from 1 to 5")
        if not isinstance(minutes, int) or minutes < 1:
            refuse("no minutes")
        if cell.source.strip():
            refuse("its fence must be empty, the builder fills it")
        before = self.cells[i - 1] if i else None
        prose = before.source if before and before.cell_type == "markdown" else ""
        if not re.search(r"^#+ .*Exercise", prose, re.MULTILINE):
            refuse("no heading `Exercise: …` in the text before it")
        hints = re.findall(r"<details>\s*<summary>Hint", prose)
        if len(hints) < 2 or prose.count("<details>") != prose.count("</details>"):
            refuse("fewer than two folded hints (<details><summary>Hint …) before it")
        answer = self.answers.get(name)
        if answer is None:
            refuse(
                f"no reference with {BEGIN} and {END} in solutions/{self.slug}.py, "
                "so no stub either"
            )
        elif BEGIN in answer.stub or END in answer.stub:
            refuse(f"a {BEGIN} without its {END} in solutions/{self.slug}.py")
        elif not ast.get_docstring(ast.parse(answer.source).body[0]):
            refuse("its reference has no docstring")
        after = self.cells[i + 1] if i + 1 < len(self.cells) else None
        if after is None or after.source.strip() != f"{name} = check({name})":
            refuse(f"no check cell `{name} = check({name})` right after it")
        if not self._specified(name):
            refuse(f"no requirements in utils/exercises/{self.slug}.py")
        self.exercises[name] = {"difficulty": difficulty, "minutes": minutes}

    def _specified(self, name) -> bool:
        if not (ROOT / "utils" / "exercises" / f"{self.slug}.py").is_file():
            return False
        import_module(f"utils.exercises.{self.slug}")
        known = Exercise.registry.get(name)
        return known is not None and known.lesson == self.slug and known.requirements

    def _check_nothing_left_over(self):
        for name in set(self.answers) - set(self.exercises):
            self.problems.append(
                f"solutions/{self.slug}.py: `{name}` has a marked solution, but "
                f"lessons/{self.path.name} has no such exercise"
            )
        for cell in self.cells:
            if BEGIN in cell.source or END in cell.source:
                self._refuse(
                    "### (BEGIN|END) SOLUTION", "a solution stands in the lesson"
                )


# Building the notebooks -------------------------------------------------------------


def notebook(source: LessonSource, solved: bool):
    """The learner's notebook of a lesson, or the solution one before it is run."""
    cells = [
        _code(
            BOOTSTRAP.replace(
                "LESSON", f'"{source.file}"' + ", solved_notebook=True" * solved
            ),
            ["bootstrap"],
        )
    ]
    for i, cell in enumerate(source.cells):
        if cell.cell_type != "code":
            cells.append(_markdown(_with_effort(source, i, cell)))
            continue
        name = cell.metadata.get("exercise")
        before = source.cells[i - 1].metadata.get("exercise") if i else None
        if name:
            answer = source.answers[name]
            made = _code(answer.source if solved else answer.stub, ["exercise"])
            made.metadata["nbgrader"] = _nbgrader(name, solution=True)
        elif before:
            made = _code(cell.source, ["check", *cell.metadata.get("tags", [])])
            points = source.exercises[before]["difficulty"]
            made.metadata["nbgrader"] = _nbgrader(f"check_{before}", points=points)
        else:
            made = _code(cell.source, list(cell.metadata.get("tags", [])))
            if "claim(" in cell.source and "nbval-ignore-output" not in cell.source:
                _tag(made, "nbval-ignore-output")
        cells.append(made)
    _number(source.file, cells)
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
                "course": {
                    **source.about,
                    "exercises": [
                        {"name": n, **e} for n, e in source.exercises.items()
                    ],
                },
            },
            "cells": cells,
        }
    )


def _code(text, tags):
    cell = nbformat.v4.new_code_cell(text.strip("\n"))
    for tag in tags:
        _tag(cell, tag)
    return cell


def _tag(cell, tag):
    tags = cell.metadata.setdefault("tags", [])
    if tag not in tags:
        tags.append(tag)


def _markdown(text):
    return nbformat.v4.new_markdown_cell(text)


def _with_effort(source, i, cell) -> str:
    """The text before an exercise, with difficulty and minutes under its heading."""
    following = source.cells[i + 1] if i + 1 < len(source.cells) else None
    if following is None or "exercise" not in following.metadata:
        return cell.source
    level, minutes = following.metadata["difficulty"], following.metadata["minutes"]
    effort = (
        f"*Difficulty {'●' * level}{'○' * (5 - level)} ({level} of 5), "
        f"about {minutes} minutes*"
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


# Executing the solution notebooks -----------------------------------------------------


def execute(made, file: str):
    """Run a solution notebook in `solutions/`, strictly, and keep its outputs."""
    settings = {
        "COURSE_BUILD": "1",
        "COURSE_STRICT": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    try:
        NotebookClient(
            made,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": str(ROOT / "solutions")}},
        ).execute()
    except CellExecutionError as error:
        raise BuildError(f"solutions/{file}.ipynb fails:\n{error}") from error
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
    made.metadata["language_info"] = {"name": "python"}
    made.metadata.pop("widgets", None)
    for cell in made.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":  # a widget lives in its kernel, under a random id
            cell.outputs = [o for o in cell.outputs if WIDGET not in o.get("data", {})]
    _refuse_private_output(made, file)
    return made


def _refuse_private_output(made, file):
    for cell in made.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise BuildError(
                    f"solutions/{file}.ipynb writes to stderr, in the cell\n"
                    f"{cell.source}\n{output['text']}"
                )
            text = json.dumps(output)
            for path in (str(ROOT), str(Path.home()) + os.sep, "/tmp/"):
                if path in text:
                    raise BuildError(
                        f"solutions/{file}.ipynb prints a path of this machine "
                        f"({path}), in the cell\n{cell.source}"
                    )


def digest(made, slug: str) -> str:
    """Changes when anything changes that the outputs of a notebook depend on."""
    state = hashlib.sha256()
    for cell in made.cells:
        if cell.cell_type == "code":
            state.update(f"{cell.source}\0{cell.metadata.get('tags')}\0".encode())
    for path in [*depends_on(made, slug), ROOT / "requirements.txt"]:
        state.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    if any("course_map" in cell.source for cell in made.cells):
        for each in syllabus.lessons():
            state.update(repr(each).encode())
    return state.hexdigest()


def depends_on(made, slug: str) -> list[Path]:
    """The course's modules that a notebook imports, directly or not."""
    code = "\n".join(c.source for c in made.cells if c.cell_type == "code")
    exercises = ROOT / "utils" / "exercises" / f"{slug}.py"
    waiting = [*_imported(code), *([exercises] if exercises.is_file() else [])]
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported(path.read_text(encoding="utf-8"))
    return sorted(found)


def _imported(code: str) -> list[Path]:
    """The files of `utils` and `solutions` that a piece of code imports."""
    names = []
    for node in ast.walk(ast.parse(re.sub(r"(?m)^\s*[%!].*$", "pass", code))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "my_transformer":
            lessons = [syllabus.lesson_of(alias.name) for alias in node.names]
            names += [f"solutions.{each.slug}" for each in lessons if each]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
            names.append(node.module)
    paths = [ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in names]
    local = [p for p in paths if p.is_file() and p.is_relative_to(ROOT)]
    return [p for p in local if p.parent.name in ("utils", "solutions", "exercises")]


# All of it -------------------------------------------------------------------


def dumps(made) -> str:
    text = json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False)
    return text + "\n"


def build(check: bool, only: list[str], force: bool) -> list[str]:
    """Bring everything up to date; returns the files that were, or are, out of date."""
    changed: list[str] = []
    sources, problems = [], []
    for path in lesson_paths():
        try:
            sources.append(LessonSource(path))
        except BuildError as error:
            problems.append(str(error))
    if problems:
        raise BuildError("\n".join(problems))
    for source in sources:
        _keep(
            ROOT / "notebooks" / f"{source.file}.ipynb",
            dumps(notebook(source, solved=False)),
            check,
            changed,
        )
    syllabus.lessons.cache_clear()
    for source in sources:
        if not only or source.file in only or source.slug in only:
            _bring_up_to_date(source, check, force, changed)
    _remove_leftovers(sources, check, changed)
    if not only:
        _keep(ROOT / "CLAIMS.md", claims_page(sources), check, changed)
        readme = ROOT / "README.md"
        if readme.is_file():
            text = with_course_map(readme.read_text(encoding="utf-8"))
            _keep(readme, text, check, changed)
    return changed


def _bring_up_to_date(source, check, force, changed):
    path = ROOT / "solutions" / f"{source.file}.ipynb"
    made = notebook(source, solved=True)
    current = digest(made, source.slug)
    made.metadata["course"]["digest"] = current
    old = nbformat.read(path, as_version=4) if path.is_file() else None
    fresh = old is not None and old.metadata.get("course", {}).get("digest") == current
    if fresh and not force and len(_code_cells(old)) == len(_code_cells(made)):
        for cell, kept in zip(_code_cells(made), _code_cells(old), strict=True):
            cell.outputs, cell.execution_count = kept.outputs, kept.execution_count
        _keep(path, dumps(made), check, changed)
        return
    changed.append(path.relative_to(ROOT).as_posix())
    if not check:
        print(f"executing solutions/{source.file}.ipynb", flush=True)
        path.write_text(dumps(execute(made, source.file)), encoding="utf-8")


def _code_cells(made):
    return [cell for cell in made.cells if cell.cell_type == "code"]


def _keep(path, text, check, changed):
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    changed.append(path.relative_to(ROOT).as_posix())
    if not check:
        path.write_text(text, encoding="utf-8", newline="\n")


def _remove_leftovers(sources, check, changed):
    """Notebooks whose lesson is gone."""
    known = {source.file for source in sources}
    for folder in ("notebooks", "solutions"):
        for path in (ROOT / folder).glob("*.ipynb"):
            if path.stem not in known:
                changed.append(path.relative_to(ROOT).as_posix())
                if not check:
                    path.unlink()


def claims_page(sources) -> str:
    """CLAIMS.md, from the outputs of the executed solution notebooks."""
    found = []
    for source in sources:
        path = ROOT / "solutions" / f"{source.file}.ipynb"
        if not path.is_file():
            continue
        for cell in _code_cells(nbformat.read(path, as_version=4)):
            for output in cell.get("outputs", []):
                about = output.get("data", {}).get(CLAIM)
                if about:
                    found.append((about["number"], source.file, about))
    columns = ("sentence", "source", "measured", "verdict")
    rows = [
        f"| {number} | "
        + " | ".join(about[column].replace("|", "\\|") for column in columns)
        + f" | [{file}](solutions/{file}.ipynb) |"
        for number, file, about in sorted(
            found, key=lambda row: (not row[0].startswith("S"), row[0], row[1])
        )
    ]
    return "\n".join(
        [
            "# What the lessons measured",
            "",
            "Statements that textbooks make (S…) and the lessons' own, each measured "
            "in the notebook named last, which fails if its measurement no longer "
            "supports the verdict. Collected from the executed solution notebooks by "
            "`make build`.",
            "",
            "| no | statement | source | measured | verdict | lesson |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def with_course_map(readme: str) -> str:
    """The README with the table of lessons between its two markers."""
    rows = [
        f"| [{each.file}](notebooks/{each.file}.ipynb) | {each.title} | "
        f"{each.summary} | {', '.join(f'`{n}`' for n in each.exercises)} | "
        f"{each.minutes} |"
        for each in syllabus.lessons()
    ]
    table = "\n".join(
        ["| | lesson | | you write | minutes |", "|---|---|---|---|---|", *rows]
    )
    before, found, rest = readme.partition(MAP_BEGIN)
    _, closed, after = rest.partition(MAP_END)
    if not found or not closed:
        raise BuildError(f"README.md lacks the lines {MAP_BEGIN} and {MAP_END}")
    return f"{before}{MAP_BEGIN}\n{table}\n{MAP_END}{after}"


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m utils.build", description=textwrap.dedent(__doc__)
    )
    parser.add_argument("lessons", nargs="*", help="execute only these, 02_attention …")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1")
    parser.add_argument("--force", action="store_true", help="execute in any case")
    options = parser.parse_args(arguments)
    try:
        changed = build(options.check, options.lessons, options.force)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    for path in changed:
        print(f"{'out of date' if options.check else 'built'}: {path}")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
