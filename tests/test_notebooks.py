"""Every built notebook: what it holds, what it earns, and what it may import."""

import ast
import json
import linecache
import os
import re
import subprocess
import sys

import nbformat
import pytest

from tests.notebooks import (
    bootstrap,
    code,
    copy_of_the_course,
    environment,
    lesson_notebook,
    run,
)
from utils import build, syllabus
from utils.check import diagnosis
from utils.check.exercise import Exercise, load_all
from utils.display import MARKS
from utils.errors import CheckFailed

load_all()
LESSONS = [lesson.file for lesson in syllabus.lessons()]
EXERCISES = [
    pytest.param(lesson, name, id=name)
    for lesson in syllabus.lessons()
    for name in lesson.exercises
]


def test_the_lessons_are_all_built():
    assert [path.stem for path in build.lesson_paths()] == LESSONS


@pytest.mark.parametrize("file", LESSONS)
def test_a_learner_s_notebook_holds_no_output_and_no_answer(file):
    made = lesson_notebook(file)
    nbformat.validate(made)
    assert made.metadata.kernelspec.name == "python3"
    answers = build.answers(syllabus.ROOT / "solutions" / f"{file.split('_', 1)[1]}.py")
    for cell in made.cells:
        assert build.BEGIN not in cell.source
        assert build.END not in cell.source
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
        name = cell.metadata.get("nbgrader", {}).get("grade_id")
        if name in answers:
            assert "raise NotImplementedError" in cell.source
            assert cell.source == answers[name].stub.strip("\n")


@pytest.mark.parametrize("file", LESSONS)
def test_the_title_comes_first_then_the_set_up_folded(file):
    title, start, *rest = lesson_notebook(file).cells
    assert title.source.startswith("# ")
    assert start.metadata["tags"] == ["bootstrap"]
    for cell in (start, *rest):
        if {"exercise", "check"} & set(cell.metadata.get("tags", [])):
            assert "jupyter" not in cell.metadata
        elif cell is start or "claim(" in cell.source:
            assert cell.metadata["jupyter"] == {"source_hidden": True}


@pytest.mark.parametrize("lesson", syllabus.lessons(), ids=lambda lesson: lesson.file)
def test_the_path_is_short(lesson):
    """Without what is folded, pictures, sources, and what “goes further”."""
    prose, cells = "", 0
    for cell in lesson_notebook(lesson.file).cells:
        if cell.cell_type == "code":
            cells += "jupyter" not in cell.metadata
        else:
            path, further, _ = f"\n{cell.source}\n".partition("\n## Going further\n")
            prose += path
            if further:
                break
    for left_out in (
        r"(?s)<details>.*?</details>",
        r"!\[[^\]]*\]\([^)]*\)",
        r"(?s)```.*?```",
        r"\*Difficulty .*\*\n",
        r"(?s)\*\*Rests on\.\*\*.*",
    ):
        prose = re.sub(left_out, "", prose)
    assert len(prose.split()) <= 2000
    assert cells <= 20


@pytest.mark.parametrize("lesson", syllabus.lessons(), ids=lambda lesson: lesson.file)
def test_nothing_later_needs_an_extra(lesson):
    extras = set(lesson.exercises) - set(lesson.required)
    for later in syllabus.lessons():
        if later is not lesson:
            assert not extras & names_imported("\n".join(later.imports))
            solution = syllabus.ROOT / "solutions" / f"{later.slug}.py"
            assert not extras & names_imported(solution.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", LESSONS)
def test_a_solution_notebook_has_been_run_from_first_to_last(file):
    made = lesson_notebook(file, "solutions")
    nbformat.validate(made)
    cells = [cell for cell in made.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    assert not [o for o in outputs if o.get("name") == "stderr"]
    assert not re.search(r"(/home/|/root/|/tmp/|/Users/|C:\\\\)", json.dumps(outputs))
    for cell in cells:
        if "check" in cell.metadata.get("tags", []):
            assert cell.outputs[0].data["text/plain"].startswith(MARKS["passed"])


@pytest.mark.parametrize("file", LESSONS)
def test_a_solution_notebook_is_an_nbgrader_source(file):
    made = lesson_notebook(file, "solutions")
    ids = []
    for cell in made.cells:
        about = cell.metadata.get("nbgrader")
        if about:
            ids.append(about.grade_id)
            assert about.schema_version == 3
            if about.solution:
                assert build.BEGIN in cell.source
            else:
                assert (about.grade, about.locked) == (True, True)
                assert about.points >= 1
    assert len(ids) == len(set(ids)) >= 2


@pytest.mark.parametrize("file", LESSONS)
def test_every_figure_has_its_sentence(file):
    cells = lesson_notebook(file, "solutions").cells
    for i, cell in enumerate(cells):
        drawn = [
            output
            for output in cell.get("outputs", [])
            if "image/png" in output.get("data", {})
        ]
        following = cells[i + 1].source if i + 1 < len(cells) else ""
        assert not drawn or following.startswith("*Figure: "), cell.source


@pytest.mark.parametrize("file", LESSONS)
def test_output_that_differs_between_machines_is_tagged(file):
    """No tiny number and no fraction of more than six digits is compared by nbval."""
    for cell in lesson_notebook(file, "solutions").cells:
        if {"nbval-ignore-output", "check"} & set(cell.metadata.get("tags", [])):
            continue  # a check that passes shows sentences alone
        for output in cell.get("outputs", []):
            shown = output.get("text") or output.get("data", {}).get("text/plain", "")
            assert not re.search(r"\d\.\d{7}|\de-\d\d", shown), cell.source


def names_imported(source) -> set[str]:
    return {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_the_readme_quotes_what_lesson_08_prints():
    readme = (syllabus.ROOT / "README.md").read_text(encoding="utf-8")
    quoted = re.findall(r"(?m)^model: (.+)$", readme)
    outputs = [
        output.get("text", "")
        for cell in lesson_notebook("08_forward_pass", "solutions").cells
        for output in cell.get("outputs", [])
    ]
    assert len(quoted) == 3
    for answer in quoted:
        assert answer in "".join(outputs)


# What is earned -------------------------------------------------------------------


def prepared(file) -> tuple[dict, dict]:
    """A namespace after a notebook's imports, and its other cells by grade id."""
    namespace = {"__name__": "__main__"}
    graded = {}
    for cell in lesson_notebook(file).cells:
        name = cell.metadata.get("nbgrader", {}).get("grade_id")
        if name:
            graded[name] = cell.source
        elif cell.cell_type == "code" and only_imports(cell.source):
            execute(cell.source, namespace)
    return namespace, graded


def execute(source, namespace):
    """Run a cell so that its lines can be found again, as in a kernel."""
    filename = f"<cell {hash(source)}>"
    linecache.cache[filename] = (len(source), None, [f"{source}\n"], filename)
    exec(compile(source, filename, "exec"), namespace)


def only_imports(source) -> bool:
    """Imports, and what decides on them (`if`, `try`)."""
    body = ast.parse(re.sub(r"(?m)^%.*$", "", source)).body
    imports = [isinstance(node, (ast.Import, ast.ImportFrom)) for node in body]
    deciding = [isinstance(node, (ast.If, ast.Try)) for node in body]
    return any(imports) and len(body) == sum(imports) + sum(deciding)


@pytest.mark.parametrize("file", LESSONS)
def test_an_unsolved_notebook_earns_nothing(file, monkeypatch, capfd):
    monkeypatch.setenv("COURSE_STRICT", "1")
    namespace, graded = prepared(file)
    checks = [name for name in graded if name.startswith("check_")]
    assert checks
    for name in checks:
        execute(graded[name.removeprefix("check_")], namespace)
        with pytest.raises(CheckFailed):
            execute(graded[name], namespace)


@pytest.mark.parametrize(("lesson", "name"), EXERCISES)
def test_breaking_a_solved_exercise_is_noticed(lesson, name, monkeypatch, capfd):
    monkeypatch.setenv("COURSE_STRICT", "1")
    namespace, graded = prepared(lesson.file)
    for other in lesson.exercises:
        namespace[other] = Exercise.registry[other].reference
    exercise = Exercise.registry[name]
    for fault in exercise.faults[:3]:
        namespace[name] = diagnosis.answer_of(exercise, fault)
        with pytest.raises(CheckFailed):
            execute(graded[f"check_{name}"], namespace)


def test_strict_nbval_is_red_on_an_unsolved_notebook_only():
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist"]

    def nbval(path, **variables):
        return subprocess.run(
            [sys.executable, "-m", "pytest", "--nbval", "-q", *plugins, path],
            cwd=syllabus.ROOT,
            env=environment(**variables),
            capture_output=True,
            text=True,
        )

    unsolved = nbval("notebooks/00_start.ipynb", COURSE_STRICT="1")
    assert unsolved.returncode == 1, unsolved.stdout
    assert "not written yet" in unsolved.stdout
    solved = nbval("solutions/00_start.ipynb", COURSE_STRICT="1")
    assert solved.returncode == 0, solved.stdout


# Parts of earlier lessons -----------------------------------------------------------


def imported_parts(file) -> set[str]:
    return {
        alias.name
        for source in code(lesson_notebook(file))
        for node in ast.walk(ast.parse(re.sub(r"(?m)^%.*$", "", source)))
        if isinstance(node, ast.ImportFrom) and node.module == "my_transformer"
        for alias in node.names
    }


def test_parts_load_with_only_the_earlier_ones_present(tmp_path):
    """A learner who has solved lessons 00 to N−1 can import all that N asks for."""
    plan = [
        [lesson.slug, sorted(lesson.exercises), sorted(imported_parts(lesson.file))]
        for lesson in syllabus.lessons()
    ]
    copy_of_the_course(tmp_path)
    script = f"""
import importlib, re, sys
from pathlib import Path
for slug, exercises, wanted in {plan!r}:
    for name in [n for n in sys.modules if n.startswith("my_transformer")]:
        del sys.modules[name]
    mine = importlib.import_module("my_transformer")
    for name in wanted:
        part = getattr(mine, name)
        assert part.__module__.startswith("my_transformer."), (slug, name)
    source = Path(f"solutions/{{slug}}.py").read_text(encoding="utf-8")
    source = re.sub(r"from solutions\\.\\w+", "from my_transformer", source)
    source += "".join(f"\\n# part: {{n}}\\n" for n in exercises)
    Path(f"my_transformer/{{slug}}.py").write_text(source, encoding="utf-8")
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment(COURSE_PARTS="mine"),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


def test_lessons_import_parts_of_earlier_lessons_only():
    seen: set[str] = set()
    for lesson in syllabus.lessons():
        assert imported_parts(lesson.file) <= seen, lesson.file
        seen |= set(lesson.exercises)


def test_exercises_and_integration_checks_belong_to_lessons_that_exist():
    slugs = {lesson.slug for lesson in syllabus.lessons()}
    assert {each.lesson for each in Exercise.registry.values()} <= slugs


def test_a_learner_who_solves_everything_owns_the_package(tmp_path):
    copy = copy_of_the_course(tmp_path / "course")
    cells = {}
    for lesson in syllabus.lessons():
        cells[f"reset {lesson.slug}"] = "%reset -f"
        cells[f"start {lesson.slug}"] = bootstrap(lesson.file)
        solved = lesson_notebook(lesson.file, "solutions")
        for i, cell in enumerate(solved.cells):
            name = cell.metadata.get("nbgrader", {}).get("grade_id")
            if cell.cell_type == "code" and (name or only_imports(cell.source)):
                cells[f"{lesson.slug} {name or i}"] = cell.source
    shown = run(cells, copy / "notebooks")
    for key, text in shown.items():
        if " check_" in key:
            assert "Saved in" in text, f"{key}: {text}"
        else:
            assert "the reference" not in text, text
    names = [name for lesson in syllabus.lessons() for name in lesson.exercises]
    os.rename(copy / "my_transformer", tmp_path / "my_transformer")
    alone = subprocess.run(
        [sys.executable, "-c", f"from my_transformer import {', '.join(names)}"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (alone.returncode, alone.stdout) == (0, ""), alone.stderr
