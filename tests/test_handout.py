"""The course without its solutions: what it holds, and how it goes on without them."""

import re
import shutil
import subprocess
import sys
import zipfile

import nbformat
import pytest

from tests.notebooks import (
    code,
    copy_of_the_course,
    environment,
    run_in_kernel,
    text_of,
)
from utils import build, handout, parts, syllabus
from utils.check import check, check_joint, evaluate
from utils.error_hints import bound_by_cell
from utils.errors import CheckFailed, PartMissing

RIGHT = "def softmax(scores, dim=-1):\n    return torch.softmax(scores, dim)"
FAULT = "def softmax(scores, dim=-1):\n    return torch.exp(scores)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A handout from a copy of the course in whose notebooks somebody has worked."""
    copy = copy_of_the_course(tmp_path_factory.mktemp("handout") / "here")
    for name in ("lessons", "docs", ".github"):
        shutil.copytree(syllabus.ROOT / name, copy / name)
    for name in ("LICENSE", "Makefile", "requirements.txt"):
        shutil.copy(syllabus.ROOT / name, copy)
    for path in (copy / "notebooks").glob("*.ipynb"):
        path.write_text("my_own_answer", encoding="utf-8")
    (copy / "my_transformer" / "start.py").write_text("my_own_answer = 1")
    shown = subprocess.run(
        [sys.executable, "-m", "utils.handout"],
        cwd=copy,
        env=environment(),
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert shown.returncode == 0, shown.stderr
    assert f"{len(syllabus.lessons())} lessons, no reference answers" in shown.stdout
    return copy / "handout"


def text_files(folder) -> dict:
    """The text of each file in a folder, but of recorded results."""
    return {
        path: path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pt"
    }


def python(code, folder, **variables):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment(PYTHONPATH=str(folder), **variables),
        capture_output=True,
        text=True,
    )


# What it holds -----------------------------------------------------------------------


def lines_of_code(text) -> list[str]:
    stripped = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in stripped if line]


def test_no_answer_is_in_it(folder):
    """Of three lines or more: of a single line, an oracle or a fault may consist."""
    region = re.compile(rf"{build.BEGIN}\n(.*?){build.END}", re.DOTALL)
    answers = [
        lines_of_code(found)
        for path in (syllabus.ROOT / "solutions").glob("*.py")
        for found in region.findall(path.read_text(encoding="utf-8"))
    ]
    answers = ["\n".join(each) for each in answers if len(each) >= 3]
    assert len(answers) > 15
    for path, text in text_files(folder).items():
        assert "my_own_answer" not in text
        if path.suffix == ".ipynb":
            text = "\n".join(code(nbformat.reads(text, as_version=4)))
            for unwritten in (build.BEGIN, build.END):
                assert unwritten not in text
        text = "\n".join(lines_of_code(text))
        assert not [each for each in answers if each in text], path


def test_nothing_else_is_in_it(folder):
    top = {path.name for path in folder.iterdir()}
    assert top == {
        ".github",
        ".handout.json",
        ".gitignore",
        "LICENSE",
        "Makefile",
        "README.md",
        "diagrams",
        "my_transformer",
        "notebooks",
        "requirements.txt",
        "utils",
    }
    assert [path.name for path in (folder / "my_transformer").iterdir()] == [
        "__init__.py"
    ]
    workflows = (folder / ".github" / "workflows").iterdir()
    assert [path.name for path in workflows] == ["learner.yml"]
    for name in handout.LEFT_OUT:
        assert not (folder / "utils" / name).exists()


def test_what_the_notebooks_import_is_in_it(folder):
    there = {path.stem for path in (folder / "utils").iterdir()}
    for path in (folder / "notebooks").glob("*.ipynb"):
        text = "\n".join(code(nbformat.read(path, as_version=4)))
        wanted = re.findall(r"^from utils\.(\w+) import", text, re.MULTILINE)
        for line in re.findall(r"^from utils import (.*)", text, re.MULTILINE):
            wanted += [name.split()[0] for name in line.split(",")]
        assert set(wanted) <= there
    reads = "from utils import flash_bench, long_text as l; flash_bench.recorded()"
    shown = python(
        f"{reads}; l.recorded(); import utils.course as c; c.course_map()", folder
    )
    assert f"0/{len(syllabus.lessons()[-1].required)}" in shown.stdout, shown.stderr


def test_the_archive_holds_the_same(folder):
    with zipfile.ZipFile(f"{folder}.zip") as archive:
        for name in archive.namelist():
            assert archive.read(name) == (folder.parent / name).read_bytes()
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert len(archive.namelist()) == len(files) - 1  # without the manifest


def test_only_checks_and_the_first_cell_stop_a_run_of_all_cells(folder):
    for path in (folder / "notebooks").glob("*.ipynb"):
        made = nbformat.read(path, as_version=4)
        nbformat.validate(made)
        for cell in made.cells:
            tags = set(cell.metadata.get("tags", []))
            if cell.cell_type == "code":
                checks = bool({"check", "bootstrap"} & tags)
                checks = checks or "check_joint(" in cell.source
                assert checks != ("raises-exception" in tags)


# Where it is written -----------------------------------------------------------------


def tree(folder) -> dict:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def bundle(monkeypatch):
    """What a handout holds, replaced by three files."""
    made = {"README.md": b"1", "utils/a.py": b"1", "utils/old/b.py": b"1"}
    monkeypatch.setattr(handout, "files", lambda: made)
    return made


@pytest.mark.parametrize(
    "present",
    [
        "lessons/00_start.md",
        "solutions/start.py",
        "notebooks/my own.ipynb",
        "utils/mine.py",
        "README.md",
        "../course.zip",
        ".handout.json",
    ],
)
def test_a_folder_with_something_of_somebody_s_own_is_refused(
    tmp_path, bundle, present, capsys
):
    folder = tmp_path / "course"
    path = folder / present
    folder.mkdir()
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")
    before = tree(tmp_path)
    assert handout.main([str(folder)]) == 1
    assert tree(tmp_path) == before
    said = capsys.readouterr().err
    assert str(tmp_path) in said and len(said.splitlines()) == 1


def test_only_what_an_earlier_run_wrote_is_replaced_or_removed(
    tmp_path, bundle, capsys
):
    folder = tmp_path / "course"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text("precious")
    handout.write(folder)
    (folder / "utils" / "mine.py").write_text("precious")
    (folder / "notebooks").mkdir()
    (folder / "README.md").write_text("changed by hand")
    del bundle["utils/old/b.py"]
    bundle |= {"README.md": b"2", "utils/a.py": b"2", "utils/mine.py": b"new"}
    for _ in range(2):  # and once more
        assert handout.main([str(folder)]) == 0
        assert "Left as they are: README.md, utils/mine.py" in capsys.readouterr().out
        files = {p.relative_to(folder).as_posix(): t for p, t in tree(folder).items()}
        del files[".handout.json"]
        assert files == {
            ".git/HEAD": b"precious",
            "README.md": b"changed by hand",
            "utils/a.py": b"2",
            "utils/mine.py": b"precious",
        }
    assert (folder / "notebooks").exists() and not (folder / "utils" / "old").exists()


@pytest.mark.parametrize("place", ["folder", "archive", "full"])
def test_a_place_that_cannot_be_written_is_a_sentence(
    tmp_path, bundle, monkeypatch, capsys, place
):
    folder = tmp_path / "course"
    handout.write(folder)
    before = tree(tmp_path)
    bundle["utils/a.py"] = b"2"

    def fail(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    where = {
        "folder": (handout.tempfile, "TemporaryDirectory"),
        "archive": (handout.Path, "touch"),
        "full": (handout.zipfile, "ZipFile"),
    }
    monkeypatch.setattr(handout, "_is_ours", lambda archive: True)
    monkeypatch.setattr(*where[place], fail)
    assert handout.main([str(folder)]) == 1
    assert "cannot be written: No space left on device." in capsys.readouterr().err
    assert tree(tmp_path) == before
    (tmp_path / "file").write_text("")
    assert handout.main([str(tmp_path / "file")]) == 1


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_lab_works_in_it(folder):
    shown = subprocess.run(
        ["make", "-n", "lab"], cwd=folder, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert "pip install" in shown.stdout
    assert "-m jupyterlab" in shown.stdout


# How it goes on ----------------------------------------------------------------------


def test_right_answers_pass_without_the_reference_at_hand(folder):
    """Tolerances come from the reference's errors, so these are in the handout."""
    script = f"""
import sys
from importlib import import_module
import utils.reference
from utils.check import evaluate
from utils.check.exercise import Exercise, load_all
load_all()
utils.reference.find_spec = lambda name: None
sys.path.append({str(syllabus.ROOT)!r})
reports = []
for name, each in Exercise.registry.items():
    assert each.reference is None or each.parts
    found = {{
        n: getattr(import_module(f"solutions.{{lesson}}"), n)
        for n, lesson in (each.parts or {{name: each.lesson}}).items()
    }}
    reports.append(evaluate(found if each.parts else found[name], name))
for report in reports:
    if report.status != "passed":
        print(report.message)
print(len(reports))
"""
    result = python(script, folder)
    assert result.returncode == 0, result.stderr
    count = sum(len(lesson.exercises) for lesson in syllabus.lessons())
    assert re.fullmatch(r"\d+\n", result.stdout), result.stdout
    assert int(result.stdout) >= count


CELLS = {
    "import": "from my_transformer import softmax, attention, RMSNorm",
    "whose": "from utils.parts import whose\nprint(whose(softmax))",
    "use": "weights = softmax(1)\nmore = 1",
    "follows": "total = weights + 1",
    "follows from that": "print(total)",
    "inherits": "class Mine(RMSNorm):\n    pass",
    "makes": "Mine(3)",
    "another error": "kept = {}['key']",
    "follows from it": "kept",
    "a typing mistake": "print(typed_wrong)",
    "prepare": "import torch\nfrom utils.check import check",
    "stub": "def softmax(scores, dim=-1):\n    raise NotImplementedError",
    "check stub": "softmax = check(softmax)",
    "use stub": "softmax(torch.ones(2))",
    "check again": "softmax = check(softmax)",
    "wrong": FAULT,
    "check wrong": "softmax = check(softmax)",
    "use wrong": "softmax(torch.zeros(2)).tolist()",
    "right": RIGHT,
    "check right": "softmax = check(softmax)",
    "use right": "print(whose(softmax), softmax(torch.zeros(2)).tolist())",
    "strict": "import os\nos.environ['COURSE_STRICT'] = '1'",
    "import in strict mode": "import my_transformer as m\nprint(whose(m.softmax))",
}


@pytest.fixture(scope="module")
def shown(folder):
    """What a learner sees of these cells, in a kernel."""
    start = code(nbformat.read(folder / "notebooks" / "00_start.ipynb", as_version=4))[
        0
    ]
    made = nbformat.v4.new_notebook(
        cells=[*map(nbformat.v4.new_code_cell, [start, *CELLS.values()])]
    )
    outputs = [*map(text_of, run_in_kernel(made, folder / "notebooks"))]
    assert outputs[0] == ""
    return dict(zip(CELLS, outputs[1:], strict=True))


def test_an_import_of_what_is_missing_says_so(shown):
    assert shown["import"].splitlines() == [
        "softmax: missing, until yours passes in 00_start.",
        "attention: missing, until yours passes in 02_attention.",
        "RMSNorm: missing, until yours passes in 06_norms.",
    ]
    assert shown["whose"].strip() == "the missing `softmax`"


@pytest.mark.parametrize("step", ["use", "makes", "use stub"])
def test_its_use_is_one_sentence(shown, step):
    name, lesson = (
        ("RMSNorm", "06_norms") if step == "makes" else ("softmax", "00_start")
    )
    assert shown[step].splitlines()[-2:] == [
        f"`{name}` is not written yet (lesson {lesson}), and it is needed here.",
        "This copy of the course holds no reference answers.",
    ]
    assert "Traceback" not in shown[step]
    assert shown["inherits"] == ""


def test_what_follows_says_from_what(shown):
    for step, name in (("follows", "weights"), ("follows from that", "total")):
        first, second = shown[step].splitlines()[-3:-1]
        assert first == f"`{name}` comes from a cell that stopped:"
        assert second.startswith("`softmax` is not written yet")
        assert "Traceback" not in shown[step]
    assert "KeyError" in shown["another error"]
    assert "This may follow from a cell that stopped:\n`" in shown["another error"]
    assert "`kept` comes from a cell that stopped:" in shown["follows from it"]
    assert "name 'typed_wrong' is not defined" in shown["a typing mistake"]


def test_checks_say_how_it_goes_on(shown):
    assert "○ softmax: not written yet" in shown["check stub"]
    assert "the cells below that need it stop with a sentence" in shown["check stub"]
    assert "nothing new to check" in shown["check again"]
    assert "Run your exercise cell again" in shown["check again"]
    assert "✗ softmax: not right yet" in shown["check wrong"]
    assert "the cells below use yours as it stands" in shown["check wrong"]
    assert shown["use wrong"].strip() == "[1.0, 1.0]"
    assert "Saved in" in shown["check right"]
    assert shown["use right"].strip() == "your `softmax` [0.5, 0.5]"


def test_strict_mode_takes_the_learner_s_own_earlier_parts(shown):
    assert shown["import in strict mode"].strip() == "your `softmax`"


class TestStandIn:
    def test_is_no_answer(self):
        stand_in = parts.missing("softmax")
        assert evaluate(stand_in).status == "todo"
        with pytest.raises(PartMissing, match="`softmax` is not written yet"):
            stand_in.from_pretrained()
        assert not hasattr(stand_in, "_repr_html_")
        assert stand_in.__name__ == "softmax"

    def test_earns_nothing(self, monkeypatch, capfd):
        monkeypatch.setenv("COURSE_STRICT", "1")
        with pytest.raises(CheckFailed):
            check(parts.missing("softmax"), "softmax")

    def test_joins_nothing(self, monkeypatch, capfd):
        answers = {n: parts.missing(n) for n in ("rope", "ntk_base")}
        check_joint("ntk_in_rope", **answers)
        assert "`rope` is not written yet" in capfd.readouterr().out
        monkeypatch.setenv("COURSE_STRICT", "1")
        with pytest.raises(CheckFailed):
            check_joint("ntk_in_rope", **answers)


def test_names_of_a_cell_for_ipython_are_not_looked_for():
    try:
        raise ValueError
    except ValueError as error:
        assert bound_by_cell(error.__traceback__) == []
