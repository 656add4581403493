"""What a learner writes is saved when it passes, and later lessons take it."""

import shutil
import subprocess
import sys

import pytest

from tests.notebooks import bootstrap, copy_of_the_course, environment, run
from utils import parts, session, syllabus
from utils.parts import files, saving
from utils.parts.saving import NotSaved

START = bootstrap("00_start")
NEXT = START.replace("00_start", "02_attention")
IMPORTS = "import torch\nfrom utils.check import check\nfrom utils.parts import whose"
RIGHT = '''\
import math
from functools import partial

BASE = math.e  # a constant of the same cell
UNUSED = [print("never saved")]


# A helper in the same cell.
def exponentials(scores, dim):
    largest = scores.amax(dim, keepdim=True)
    return BASE ** (scores - largest)


def softmax(scores, dim=-1):
    """My own."""
    e = exponentials(scores, dim)
    return e / torch.sum(e, dim=dim, keepdim=True)


print(softmax(torch.ones(2)))
'''
BETTER = "def softmax(scores, dim=-1):\n    return torch.softmax(scores, dim)"
WRONG = "def softmax(scores, dim=-1):\n    return scores"
CHECK = 'softmax = check(softmax, "softmax")'
ATTENTION = """\
def attention(q, k, v, mask=None):
    return attention_weights(q, k, mask) @ v
"""
CLASS = """\
from torch import nn


def project(x, w):
    return x @ w


class SelfAttention(nn.Module):
    def __init__(self, d_model, d_head):
        super().__init__()
        self.w_q, self.w_k, self.w_v = (
            nn.Linear(d_model, d_head, bias=False) for _ in range(3)
        )

    def forward(self, x, mask=None):
        q, k, v = (project(x, w.weight.T) for w in (self.w_q, self.w_k, self.w_v))
        return attention(q, k, v, mask)
"""
FILE = (
    "import pathlib, my_transformer as m\n"
    "f = pathlib.Path(m.__file__).with_name('start.py')"
)
SHOW = "print(f.read_text() if f.exists() else 'no file')"
LATER = "from my_transformer import softmax\nprint(whose(softmax))"
GRADERS = ["COURSE_STRICT", "NBGRADER_EXECUTION", "PYTEST_VERSION"]


def write(text):
    return f"_ = f.write_text({text!r})"


def in_a_grader(variable):
    return {
        f"set {variable}": f"os.environ[{variable!r}] = '1'",
        f"later {variable}": LATER,
        f"better {variable}": BETTER,
        f"check {variable}": CHECK,
        f"saved {variable}": SHOW,
        f"unset {variable}": f"_ = os.environ.pop({variable!r})",
    }


STEPS = {
    "start": START,
    "imports": IMPORTS,
    "file": FILE,
    "nothing yet": LATER,
    "nothing yet, again": "from my_transformer import softmax",
    "no such part": "from my_transformer import no_such_part",
    "wrong": WRONG,
    "check wrong": CHECK,
    "saved after wrong": SHOW,
    "solved": START.replace('start("00_start")', 'start("00_start", True)'),
    "right in a solution": RIGHT,
    "check in a solution": CHECK,
    "whose in a solution": "print(whose(softmax))",
    "saved in a solution": SHOW,
    "no choice": "import os; _ = os.environ.pop('COURSE_PARTS')",
    "another lesson": NEXT,
    "right elsewhere": RIGHT,
    "check elsewhere": CHECK,
    "start again": START,
    "right": RIGHT,
    "check right": CHECK,
    "saved": SHOW,
    "whose": "print(whose(softmax))",
    "wrong after right": WRONG,
    "check wrong after right": CHECK,
    "kept": SHOW,
    "later": LATER,
    **in_a_grader("COURSE_STRICT"),
    **in_a_grader("NBGRADER_EXECUTION"),
    **in_a_grader("PYTEST_VERSION"),
    "better": BETTER,
    "check better": CHECK,
    "replaced": SHOW,
    "elsewhere": "def helper(x):\n    return x",
    "uses elsewhere": (
        "def softmax(scores, dim=-1):\n    return torch.softmax(helper(scores), dim)"
    ),
    "check uses elsewhere": CHECK,
    "uses tools": (
        "from utils import plots\n\n"
        "def softmax(scores, dim=-1):\n"
        "    plots.BLUE\n"
        "    return torch.softmax(scores, dim)"
    ),
    "check uses tools": CHECK,
    "lambda": "softmax = lambda s, dim=-1: torch.softmax(s, dim)",
    "check lambda": CHECK,
    "no cell": "softmax = torch.nn.functional.softmax",
    "check no cell": CHECK,
    "damage": write("# part: softmax\ndef softmax(:\n"),
    "damaged": LATER,
    "right for damaged": RIGHT,
    "check damaged": CHECK,
    "damaged is kept": SHOW,
    "Latin-1": "_ = f.write_bytes('# part: softmax\\nö = 1\\n'.encode('latin-1'))",
    "check Latin-1": LATER + "\n" + RIGHT + CHECK,
    "UTF-16": "_ = f.write_text('# part: softmax\\n', encoding='utf-16')",
    "check UTF-16": LATER + "\n" + RIGHT + CHECK,
    "BOM": "_ = f.write_text('# part: other\\nx = 1\\n', encoding='utf-8-sig')",
    "check BOM": BETTER + "\n" + CHECK,
    "BOM is gone": SHOW,
    "own lines": write("precious = 1\n# part: softmax\nsoftmax = 1 / 0\n"),
    "fails to load": LATER,
    "right for own lines": RIGHT,
    "check own lines": CHECK,
    "own lines are kept": SHOW,
    "lesson 02": NEXT,
    "from reference": "from solutions.attention import attention_weights",
    "attention": ATTENTION,
    "check attention": "attention = check(attention)",
    "class": CLASS,
    "check class": "SelfAttention = check(SelfAttention)",
    "clean": "f.unlink()",
    "lesson 00 too": START,
    "check in its cell": BETTER + "\n\n\n" + CHECK,
    "saved without its check": SHOW,
    "own helper": write("# part: other\ndef exponentials(x):\n    return x\n"),
    "right with the same helper": RIGHT,
    "check same helper": CHECK,
    "clean again": "f.unlink()",
    "lesson 00": START,
    "last right": RIGHT,
    "last check": CHECK,
}


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return copy_of_the_course(tmp_path_factory.mktemp("parts") / "course")


@pytest.fixture(scope="module")
def shown(course):
    """What a learner sees who takes all these steps in one kernel."""
    return run(STEPS, course / "notebooks")


def test_the_reference_stands_in_with_one_line(shown):
    assert shown["nothing yet"].splitlines() == [
        "softmax: the reference, until yours passes in 00_start.",
        "the reference `softmax`",
    ]
    assert shown["nothing yet, again"] == ""
    assert "ImportError" in shown["no such part"]


def test_a_right_answer_is_saved_with_what_it_needs(shown):
    assert "Saved in `my_transformer/start.py`" in shown["check right"]
    assert shown["whose"].strip() == "your `softmax`"
    assert "# A helper in the same cell." in shown["saved"]
    assert "BASE = math.e" in shown["saved"]
    assert "import torch" in shown["saved"]
    for unwanted in ("print", "partial", "UNUSED"):
        assert unwanted not in shown["saved"]


def test_wrong_answers_are_not_saved_and_replace_nothing(shown):
    assert shown["saved after wrong"].strip() == "no file"
    assert "✗ softmax" in shown["check wrong after right"]
    assert shown["kept"] == shown["saved"]
    assert shown["later"].strip() == "your `softmax`"


def test_another_right_answer_replaces_it(shown):
    assert "Saved" in shown["check better"]
    assert "torch.softmax" in shown["replaced"]
    assert "exponentials" not in shown["replaced"]


@pytest.mark.parametrize("variable", GRADERS)
def test_graders_save_nothing_and_take_the_reference(shown, variable):
    assert shown[f"later {variable}"].strip() == "the reference `softmax`"
    assert "✓ softmax" in shown[f"check {variable}"]
    assert "Saved" not in shown[f"check {variable}"]
    assert shown[f"saved {variable}"] == shown["saved"]


def test_a_solution_notebook_and_another_lesson_save_nothing(shown):
    assert "✓ softmax" in shown["check in a solution"]
    assert "Saved" not in shown["check in a solution"]
    assert shown["saved in a solution"].strip() == "no file"
    assert shown["whose in a solution"].strip() == "the reference `softmax`"
    assert "✓ softmax" in shown["check elsewhere"]
    assert "belongs to 00_start" in shown["check elsewhere"]


def test_what_cannot_stand_alone_is_explained(shown):
    assert "it uses `helper`, which another cell" in shown["check uses elsewhere"]
    assert "✓ softmax" in shown["check uses elsewhere"]
    assert "course's own tools" in shown["check uses tools"]
    assert "Saved" in shown["check lambda"]
    assert "Not saved" in shown["check no cell"]
    assert "`exponentials` is defined for `other` too" in shown["check same helper"]


def test_a_check_in_the_exercise_s_own_cell_is_left_out(shown):
    assert "Saved in" in shown["check in its cell"]
    assert "torch.softmax" in shown["saved without its check"]
    assert "check(" not in shown["saved without its check"]


def test_a_damaged_file_is_named_and_kept(shown):
    assert "start.py is no valid Python any more" in shown["damaged"]
    assert "✓ softmax" in shown["check damaged"]
    assert "left as it is" in shown["check damaged"]
    assert shown["damaged is kept"].startswith("# part: softmax\ndef softmax(:")
    assert "cannot be loaded (ZeroDivisionError" in shown["fails to load"]
    assert "did not write (line 1)" in shown["check own lines"]
    assert shown["own lines are kept"].startswith("precious")


def test_every_encoding_is_read_or_named_and_a_right_answer_stays_right(shown):
    for encoding in ("Latin-1", "UTF-16"):
        text = shown[f"check {encoding}"]
        assert "Traceback" not in text
        assert "start.py is not saved as UTF-8" in text
        assert "✓ softmax" in text and "Not saved" in text
    assert "Saved in" in shown["check BOM"]
    assert "# part: softmax" in shown["BOM is gone"]
    assert "# part: other" in shown["BOM is gone"]


def plain_python(code, folder):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
    )


def test_the_package_is_plain_python(shown, course, tmp_path):
    assert "Saved" in shown["check attention"], shown["check attention"]
    assert "Saved" in shown["check class"], shown["check class"]
    assert "Saved" in shown["last check"]
    saved = (course / "my_transformer" / "attention.py").read_text()
    assert "from my_transformer import attention_weights" in saved
    assert "from torch import nn" in saved
    assert saved.index("# part: attention\n") < saved.index("# part: SelfAttention\n")

    beside_the_course = plain_python(
        "import my_transformer.attention\n"
        "from my_transformer import attention, SelfAttention\n"
        "import torch, inspect\n"
        "print(inspect.isfunction(attention))\n"
        "print(SelfAttention(4, 3)(torch.ones(2, 5, 4)).shape)\n",
        course,
    )
    lines = beside_the_course.stdout.splitlines()
    assert lines[-2:] == ["True", "torch.Size([2, 5, 3])"], beside_the_course.stderr

    shutil.copytree(course / "my_transformer", tmp_path / "my_transformer")
    alone = plain_python(
        "import torch\n"
        "from my_transformer import softmax\n"
        "print(softmax(torch.ones(2)))\n"
        "from my_transformer import attention",
        tmp_path,
    )
    assert alone.stdout.strip() == "tensor([0.5000, 0.5000])"
    assert "attention_weights" in alone.stderr.splitlines()[-1]


# One file ---------------------------------------------------------------------------


class TestExcerpt:
    def test_decorators_comments_and_imports_come_along(self):
        block, imports = saving._excerpt(
            "f", "import a\nimport b as c\n# why\n@c.x\ndef f(y: Z):\n    return y\n"
        )
        assert block.startswith("# why\n@c.x")
        assert imports == {"c": "import b as c"}

    def test_a_name_that_the_cell_does_not_define(self):
        with pytest.raises(NotSaved):
            saving._excerpt("g", "def f():\n    pass\n")

    def test_all_that_defines_or_changes_a_name(self):
        source = "f = 1\nf += 1\nf.x = 2\ntry:\n    g = f\nexcept: pass\nh = g\n"
        block, _ = saving._excerpt("h", source)
        assert block.replace("\n\n\n", "\n") == source.strip()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A learner's `my_transformer`, and a notebook of lesson 02 that saves into it."""
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    monkeypatch.setattr(session, "lesson", "02_attention")
    monkeypatch.setenv("COURSE_PARTS", "mine")
    return tmp_path


def save(name, source, monkeypatch, passes=None):
    monkeypatch.setattr(saving, "_cell_of", lambda name, answer: source)
    (line,) = parts.save(name, None, passes)
    return line


def test_names_come_from_the_lesson_the_cell_or_an_exercise(folder, monkeypatch):
    source = (
        "from math import tau\n\ndef attention(x):\n"
        "    return nn.Linear, softmax, attention_weights, tau"
    )
    assert save("attention", source, monkeypatch).startswith("Saved")
    assert (folder / "attention.py").read_text(encoding="utf-8").split('"""\n')[1] == (
        "\nfrom math import tau\n\nfrom torch import nn\n\n"
        "from my_transformer import attention_weights\n"
        "from my_transformer import softmax\n\n\n"
        "# part: attention\ndef attention(x):\n"
        "    return nn.Linear, softmax, attention_weights, tau\n"
    )
    line = save("attention", "def attention(x):\n    return np.e", monkeypatch)
    assert "it uses `np`, which another cell defines" in line


def test_one_name_is_imported_once(folder, monkeypatch):
    first = "from math import exp\n\ndef attention(x):\n    return exp"
    other = "from torch import exp\n\ndef causal_mask(x):\n    return exp"
    same = "from math import exp as exp\n\ndef causal_mask(x):\n    return exp"
    assert save("attention", first, monkeypatch).startswith("Saved")
    assert "under another name" in save("causal_mask", other, monkeypatch)
    assert save("causal_mask", same, monkeypatch).startswith("Saved")


def test_what_is_saved_passes_its_check_once_more(folder, monkeypatch):
    source = "def attention(x):\n    return 2 * x"

    def passes(candidate):
        return None if candidate(1) == 1 else "not met: it is the identity"

    line = save("attention", source, monkeypatch, passes)
    assert "no longer passes (not met: it is the identity)" in line
    assert [path.name for path in folder.iterdir()] == ["__init__.py"]
    broken = "def attention(x):\n    return x\n\nattention.y = 1 / 0"
    assert "fails (ZeroDivisionError" in save("attention", broken, monkeypatch)
    assert save("attention", source.replace("2", "1"), monkeypatch, passes) == (
        "Saved in `my_transformer/attention.py` for the lessons to come."
    )


def test_a_saved_kernel_loads_without_triton(folder, monkeypatch):
    """The lesson's own `try: import triton` comes along, again and again."""
    monkeypatch.setattr(session, "lesson", "11_flash_attention")
    source = "def flash_kernel():\n    return triton, tl, math"
    for _ in range(2):
        assert save("flash_kernel", source, monkeypatch).startswith("Saved")
    saved = (folder / "flash_attention.py").read_text(encoding="utf-8")
    assert saved.count("except ImportError:\n    triton = tl = None") == 1
    assert "environ" not in saved


SLOW_NOTEBOOK = """
import linecache, sys, time
from pathlib import Path
from utils import parts, session
from utils.parts import files
files.FOLDER, name = Path(sys.argv[1]), sys.argv[2]
session.lesson = "02_attention"
source = f"def {name}():\\n    return 1\\n"
linecache.cache["cell"] = (len(source), None, source.splitlines(True), "cell")
exec(compile(source, "cell", "exec"), globals())
print(*parts.save(name, globals()[name], lambda candidate: time.sleep(0.3)))
assert "utils.check" not in sys.modules
"""


def test_two_notebooks_that_save_at_once_lose_nothing(folder):
    names = ["attention", "causal_mask", "padding_mask"]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SLOW_NOTEBOOK, folder, name],
            cwd=syllabus.ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    for each in started:
        assert each.communicate()[0].startswith("Saved")
        assert each.returncode == 0
    assert files.part_names(folder / "attention.py") == set(names)


def test_another_notebook_that_never_ends_saving_is_named(folder, monkeypatch):
    monkeypatch.setattr(files, "WAIT_SECONDS", 0.1)
    source = "def attention(x):\n    return x"
    with files.one_at_a_time():
        line = save("attention", source, monkeypatch)
    assert "another notebook is saving" in line
    assert save("attention", source, monkeypatch).startswith("Saved")


def test_which_parts_are_wanted(monkeypatch):
    assert parts.reference_wanted()  # under pytest
    monkeypatch.setenv("COURSE_PARTS", "mine")
    assert not parts.reference_wanted()
    monkeypatch.setenv("COURSE_PARTS", "reference")
    assert parts.reference_wanted()
