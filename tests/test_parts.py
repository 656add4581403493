"""What a learner writes is saved when it passes, and later lessons take it."""

import shutil
import subprocess
import sys

import pytest

from tests.notebooks import bootstrap, copy_of_the_course, environment, run
from utils import parts
from utils.parts import NotSaved

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
CHECK = "softmax = check(softmax)"
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
    "tools": "from utils import plots",
    "uses tools": (
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


class TestBlock:
    def block(self, name, source):
        return parts._block(name, source)

    def test_decorators_and_comments_come_along(self):
        block, imports, free = self.block(
            "f", "import a\nimport b as c\n# why\n@c.x\ndef f(y: Z):\n    return y\n"
        )
        assert block.startswith("# why\n@c.x")
        assert imports == {"c": "import b as c"}
        assert free == {"Z"}

    def test_a_name_that_the_cell_does_not_define(self):
        with pytest.raises(NotSaved):
            self.block("g", "def f():\n    pass\n")

    def test_assigned_twice(self):
        block, _, _ = self.block("f", "f = 1\nf = f + 1\n")
        assert block == "f = 1\n\n\nf = f + 1"


def test_which_parts_are_wanted(monkeypatch):
    assert parts.reference_wanted()  # under pytest
    monkeypatch.setenv("COURSE_PARTS", "mine")
    assert not parts.reference_wanted()
    monkeypatch.setenv("COURSE_PARTS", "reference")
    assert parts.reference_wanted()
