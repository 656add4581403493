"""The builder: the same bytes every time, and no lesson that breaks a rule."""

import re
import shutil

import pytest

from utils import build, syllabus
from utils.build import BuildError, LessonSource, dumps, execute, notebook, stub

LESSON = syllabus.ROOT / "lessons" / "00_start.md"


def test_built_files_match_their_sources():
    assert build.build(check=True, only=[], force=False) == []


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A course with one lesson that a test may damage."""
    for folder in ("lessons", "solutions", "utils/exercises"):
        (tmp_path / folder).mkdir(parents=True)
    for file in (
        "lessons/00_start.md",
        "solutions/start.py",
        "utils/exercises/start.py",
    ):
        shutil.copy(syllabus.ROOT / file, tmp_path / file)
    monkeypatch.setattr(build, "ROOT", tmp_path)
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
        ("lessons/00_start.md", "    minutes: 20\n", "", "course.minutes"),
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


def test_a_refusal_names_the_line(root):
    text = LESSON.read_text(encoding="utf-8")
    line = text[: text.index('```python exercise="softmax"')].count("\n") + 1
    refused = refusal(root, "lessons/00_start.md", " minutes=8", "")
    assert f"lessons/00_start.md:{line}: exercise softmax: no minutes" in refused


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
    made.cells.append(build._code("raise ValueError('broken')", []))
    (root / "utils" / "session.py").write_text("def start(*a, **k): pass\n")
    with pytest.raises(BuildError, match=r"(?s)solutions/00_start.*broken"):
        execute(made, source.file)


def test_a_solution_notebook_is_run_again_only_after_a_change(monkeypatch):
    source = LessonSource(LESSON)
    made = notebook(source, solved=True)
    paths = {
        p.relative_to(syllabus.ROOT).as_posix() for p in build.depends_on(made, "start")
    }
    assert {
        "utils/check/engine.py",
        "utils/exercises/start.py",
        "utils/check/case.py",
    } <= paths
    assert "utils/build/__init__.py" not in paths
    before = build.digest(made, "start")
    made.cells[0].source += "\n"
    assert build.digest(made, "start") != before


def test_a_readme_without_markers_is_refused():
    with pytest.raises(BuildError, match="course map"):
        build.with_course_map("# A course\n")


def test_check_exits_with_one_on_a_difference(monkeypatch, capsys):
    monkeypatch.setattr(build, "build", lambda *_: ["notebooks/00_start.ipynb"])
    assert build.main(["--check"]) == 1
    assert "out of date: notebooks/00_start.ipynb" in capsys.readouterr().out
