"""The builder: the same bytes every time, and no lesson that breaks a rule."""

import json
import re
import shutil

import nbformat
import pytest

from utils import build, syllabus
from utils.build import (
    BuildError,
    LessonSource,
    __main__,
    depends_on,
    digest,
    dumps,
    execute,
    notebook,
    stub,
)
from utils.build.pages import syllabus_json, with_course_map
from utils.check.exercise import Exercise, load_lesson
from utils.check.fault import Fault

LESSON = syllabus.ROOT / "lessons" / "00_start.md"


def test_built_files_match_their_sources():
    assert build.build(check=True, only=[], force=False) == []


def test_a_copy_of_a_notebook_is_no_leftover(tmp_path, monkeypatch):
    """What a learner has put aside is kept; the notebook of a lost lesson goes."""
    for folder in ("notebooks", "solutions"):
        (tmp_path / folder).mkdir()
    built = (syllabus.ROOT / "notebooks" / "00_start.ipynb").read_text("utf-8")
    for name, text in {
        "00_start": built,
        "00_backup": built,
        "damaged": "{",
        "77_lost": built.replace("00_start", "77_lost"),
    }.items():
        (tmp_path / "notebooks" / f"{name}.ipynb").write_text(text, encoding="utf-8")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    output = build.Output(check=False)
    build._remove_notebooks_without_lesson([LessonSource(LESSON)], output)
    left = {path.stem for path in (tmp_path / "notebooks").iterdir()}
    assert left == {"00_start", "00_backup", "damaged"}
    assert output.changed == ["notebooks/77_lost.ipynb"]


@pytest.fixture
def root(tmp_path):
    """A course with one lesson that a test may damage."""
    for folder in ("lessons", "solutions", "utils/exercises"):
        (tmp_path / folder).mkdir(parents=True)
    for file in (
        "lessons/00_start.md",
        "solutions/start.py",
        "utils/exercises/start.py",
    ):
        shutil.copy(syllabus.ROOT / file, tmp_path / file)
    return tmp_path


def refusal(root, file, old, new) -> str:
    path = root / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(BuildError) as refused:
        LessonSource(root / "lessons" / "00_start.md")
    return str(refused.value)


FENCE = '```python exercise="softmax" difficulty=1 minutes=8\n```\n'
CHECK = "\n```python\nsoftmax = check(softmax)\n```\n"


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("lessons/00_start.md", " difficulty=1", "", "no difficulty"),
        ("lessons/00_start.md", "difficulty=1", "difficulty=6", "no difficulty"),
        ("lessons/00_start.md", " minutes=8", "", "no minutes"),
        ("lessons/00_start.md", "<summary>Hint 2", "<summary>Help", "two folded hints"),
        ("lessons/00_start.md", "## Exercise: softmax", "## Softmax", "no heading"),
        ("lessons/00_start.md", CHECK, "", "no check cell"),
        ("lessons/00_start.md", FENCE + CHECK, 2 * (FENCE + CHECK), "used twice"),
        (
            "lessons/00_start.md",
            FENCE,
            FENCE.replace("\n", "\n1\n", 1),
            "must be empty",
        ),
        ("lessons/00_start.md", 'e="softmax"', 'e="soft"', "no reference"),
        ("lessons/00_start.md", "    minutes: 25\n", "", "course.minutes"),
        (
            "lessons/00_start.md",
            "## The map",
            "## Going further\n\n## Going further\n\n## The map",
            "stands twice",
        ),
        (
            "lessons/00_start.md",
            "## The map",
            "```python\n### BEGIN SOLUTION\n```\n\n## The map",
            "a solution stands in the lesson",
        ),
        ("solutions/start.py", "### BEGIN SOLUTION", "# begin", "so no stub either"),
        ("solutions/start.py", "### END SOLUTION", "# end", "without its ### END"),
        ("solutions/start.py", '"""Turn', '"" and """Turn', "no docstring"),
        ("solutions/start.py", "def softmax(", "def another(", "no such exercise"),
        (
            "lessons/00_start.md",
            FENCE + CHECK,
            (FENCE + CHECK).replace("softmax", "hasty_softmax"),
            "no requirements",
        ),
    ],
)
def test_refuses(root, file, old, new, says):
    refused = refusal(root, file, old, new)
    assert says in refused
    for line in refused.splitlines():
        assert re.match(r"(lessons|solutions)/[\w.]+:", line)


def test_refuses_a_fault_that_no_longer_edits_the_reference(monkeypatch):
    load_lesson("start")
    gone = Fault("gone", "It is gone.", (("no such text", ""),))
    monkeypatch.setattr(Exercise.registry["softmax"], "faults", [gone])
    with pytest.raises(BuildError, match=r"utils/faults/start.py: softmax, gone: "):
        LessonSource(LESSON)


def test_a_refusal_names_the_line(root):
    text = LESSON.read_text(encoding="utf-8")
    line = text[: text.index('```python exercise="softmax"')].count("\n") + 1
    refused = refusal(root, "lessons/00_start.md", " minutes=8", "")
    assert f"lessons/00_start.md:{line}: exercise softmax: no minutes" in refused


@pytest.mark.parametrize(
    ("fence", "hidden"),
    [
        ("```python\nclaim()", True),
        ("```python folded=false\nclaim()", False),
        ("```python folded=true\nx = 1", True),
        ("```python\nx = 1", False),
    ],
)
def test_what_measures_or_draws_is_folded(root, fence, hidden):
    path = root / "lessons" / "00_start.md"
    text = path.read_text(encoding="utf-8")
    path.write_text(f"{text}\n{fence}\n```\n", encoding="utf-8")
    last = notebook(LessonSource(path), solved=False).cells[-1]
    assert ("jupyter" in last.metadata) == hidden


def test_an_extra_is_marked(root):
    path = root / "lessons" / "00_start.md"
    text = path.read_text(encoding="utf-8").replace("minutes=8", "minutes=8 extra=true")
    path.write_text(text, encoding="utf-8")
    source = LessonSource(path)
    assert source.exercises["softmax"]["extra"]
    cells = notebook(source, solved=False).cells
    assert any("; an extra, which nothing later needs*" in c.source for c in cells)


def test_a_stub_keeps_what_is_given():
    source = (
        "class A:\n    def f(self):\n        given = 1\n"
        "        ### BEGIN SOLUTION\n        return given\n        ### END SOLUTION\n\n"
        "    def g(self):\n"
        "        ### BEGIN SOLUTION\n        pass\n        ### END SOLUTION\n"
    )
    assert stub(source) == (
        "class A:\n    def f(self):\n        given = 1\n"
        "        raise NotImplementedError\n\n"
        "    def g(self):\n        raise NotImplementedError\n"
    )


def test_a_check_gets_its_exercise_s_name():
    made = notebook(LessonSource(LESSON), solved=False)
    (check,) = [c.source for c in made.cells if "check" in c.metadata.get("tags", [])]
    assert check == 'softmax = check(softmax, "softmax")'


def test_the_syllabus_lists_efforts_and_imports():
    (start,) = json.loads(syllabus_json([LessonSource(LESSON)]))["lessons"]
    assert start["file"] == "00_start"
    assert start["exercises"] == {"softmax": {"difficulty": 1, "minutes": 8}}
    assert "import torch" in start["imports"]
    assert not [line for line in start["imports"] if "utils" in line]


def test_the_same_bytes_every_time():
    one, two = (dumps(notebook(LessonSource(LESSON), False)) for _ in range(2))
    assert one == two


def test_ids_do_not_depend_on_what_stands_above(root):
    path = root / "lessons" / "00_start.md"
    before = notebook(LessonSource(path), solved=True)
    text = path.read_text(encoding="utf-8")
    at = text.index("## A formula")
    path.write_text(text[:at] + "New.\n\n```python\n1\n```\n\n" + text[at:], "utf-8")
    after = notebook(LessonSource(path), solved=True)
    kept = {cell.id for cell in after.cells}
    changed = [cell.source for cell in before.cells if cell.id not in kept]
    assert len(changed) <= 1  # the text that was cut in two
    assert len(kept) == len(after.cells)


def test_executing_twice_gives_the_same_bytes():
    source = LessonSource(LESSON)
    one, two = (dumps(execute(notebook(source, True), source.file)) for _ in range(2))
    assert one == two


def test_a_failing_solution_notebook_is_named(root):
    path = root / "lessons" / "00_start.md"
    source = LessonSource(path)
    made = notebook(source, solved=True)
    del made.cells[1:]
    made.cells.append(nbformat.v4.new_code_cell("raise ValueError('broken')"))
    (root / "utils" / "session.py").write_text("def start(*a, **k): pass\n")
    with pytest.raises(BuildError, match=r"(?s)solutions/00_start.*broken"):
        execute(made, source.file, root)


@pytest.fixture
def course(tmp_path):
    """A copy of what notebooks are run from, whose files a test may change."""
    for folder in ("utils", "solutions"):
        ignored = shutil.ignore_patterns("__pycache__", "*.ipynb", "recorded")
        shutil.copytree(syllabus.ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(syllabus.ROOT / "requirements.txt", tmp_path)
    return tmp_path


def test_a_solution_notebook_depends_on_what_it_imports(course):
    (path,) = (syllabus.ROOT / "lessons").glob("10_*.md")
    made = notebook(LessonSource(path), solved=True)
    (course / "utils" / "real_model" / "new.py").write_text("from ..cost import mib")
    (course / "utils" / "cost.py").write_text("from . import graph")
    init = course / "utils" / "real_model" / "__init__.py"
    init.write_text("from utils.real_model import new")
    names = {
        path.relative_to(course).as_posix()
        for path in depends_on(made, "kv_cache", course)
    }
    assert {
        "solutions/forward_pass.py",
        "utils/check/engine.py",
        "utils/cost.py",
        "utils/exercises/kv_cache.py",
        "utils/graph.py",
        "utils/real_model/__init__.py",
        "utils/real_model/new.py",
    } <= names
    unwanted = ("utils/build/", "utils/faults/", "utils/handout", "utils/grade/")
    assert not [name for name in names if name.startswith(unwanted)]


def test_a_solution_notebook_is_run_again_after_a_change_but_not_of_faults(course):
    made = notebook(LessonSource(LESSON), solved=True)
    before = digest(made, "start", course)
    exercises = course / "utils" / "exercises" / "start.py"
    exercises.write_text(exercises.read_text("utf-8") + "import utils.faults.start\n")
    changed = digest(made, "start", course)
    assert changed != before
    faults = course / "utils" / "faults"
    faults.mkdir(exist_ok=True)
    for text in ("fault = 1", "fault = 2"):
        (faults / "start.py").write_text(text)
        assert digest(made, "start", course) == changed
    made.cells[1].source += "\n"
    assert digest(made, "start", course) != changed


def test_a_readme_without_markers_is_refused():
    with pytest.raises(BuildError, match="course map"):
        with_course_map("# A course\n", [])


def test_check_exits_with_one_on_a_difference(monkeypatch, capsys):
    monkeypatch.setattr(__main__, "build", lambda *_: ["notebooks/00_start.ipynb"])
    assert __main__.main(["--check"]) == 1
    assert "out of date: notebooks/00_start.ipynb" in capsys.readouterr().out
