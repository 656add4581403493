"""Grading: right answers pass, hostile ones neither stop it nor harm nor earn."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.notebooks import environment, lesson_notebook
from utils import build, syllabus
from utils.grade import rules, run, sandbox, tables
from utils.grade.__main__ import main
from utils.grade.run import Grades, Result, grade
from utils.grade.submissions import Submission, collect, exercise_cell, read

START, ATTENTION = "00_start", "02_attention"
LINUX = sys.platform.startswith("linux")
WRONG = "def softmax(x, dim=-1):\n    return x\n"


def cells_of(file, folder="solutions"):
    return {
        cell.metadata.nbgrader.grade_id: cell.source
        for cell in lesson_notebook(file, folder).cells
        if "nbgrader" in cell.metadata
    }


SOLVED = {file: cells_of(file) for file in (START, ATTENTION)}
RIGHT = SOLVED[START]["softmax"]


def submission(file=START, folder="notebooks", **sources):
    """A learner's notebook with some of its cells replaced, by grade id."""
    made = lesson_notebook(file, folder)
    for cell in made.cells:
        name = cell.metadata.get("nbgrader", {}).get("grade_id")
        if name in sources:
            cell.source = sources[name]
    return made


def with_cells(made, change):
    made.cells = change(list(made.cells))
    return made


def at(made, name) -> int:
    return next(
        i
        for i, cell in enumerate(made.cells)
        if cell.metadata.get("nbgrader", {}).get("grade_id") == name
    )


def duplicate(made, name, source, *, before):
    """The cell `name` once more, with another source, right above or below it."""
    i = at(made, name)
    copy = json.loads(json.dumps(made.cells[i]))
    copy = type(made.cells[i])({**copy, "source": source, "id": "twice"})
    made.cells.insert(i if before else i + 1, copy)
    return made


def without_metadata(made):
    for cell in made.cells:
        cell.metadata = type(cell.metadata)()
    return made


def moved_to_the_end(made, name):
    made.cells.append(made.cells.pop(at(made, name)))
    return made


def deleted(made, name):
    del made.cells[at(made, name)]
    return made


# What must earn nothing ---------------------------------------------------------------

SYS = 'import sys\nmodules = getattr(sys, "mod" + "ules")\n'
FRAMES = 'import sys\nframe_of = getattr(sys, "_get" + "frame")\n'
EXEC = """
known = globals()["__built" + "ins__"]
run = known["ex" + "ec"] if isinstance(known, dict) else getattr(known, "ex" + "ec")
"""


def trick(before: str, body: str = "return x") -> str:
    """An exercise cell: lines of its own, then a softmax with the given body."""
    before = textwrap.dedent(before).strip("\n")
    body = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    return f"{before}\n\n\ndef softmax(x, dim=-1):\n{body}\n"


HOSTILE = {
    "redefines check": trick("def check(answer, name=None):\n    return answer"),
    "replaces a function of torch": trick("import torch\ntorch.equal = max"),
    "replaces a method of tensors": trick(
        "import torch\nTensor = torch.Tensor\n"
        "Tensor.max = lambda *a, **k: a[0].new_zeros(())"
    ),
    "replaces the comparison": trick(
        SYS,
        """
        case = modules.get("utils.check.case")
        for name in ("close", "agrees", "gradients_agree", "equal", "true", "raises"):
            if case:
                setattr(case.Case, name, lambda *a, **k: None)
        return x
        """,
    ),
    "replaces the oracle": trick(
        SYS
        + """
setattr(modules["torch"], "softmax", lambda x, dim=-1, *a, **k: x * 1.0)
""",
        "return x * 1.0",
    ),
    "empties the requirements": trick(
        SYS,
        """
        exercise = modules.get("utils.check.exercise")
        if exercise:
            exercise.Exercise.registry["softmax"].requirements.clear()
        return x
        """,
    ),
    "imports the reference": trick("from solutions.start import softmax as right"),
    "takes the reference from the modules": trick(
        SYS, 'return modules["solutions.start"].softmax(x, dim)'
    ),
    "takes the reference from a frame": trick(
        FRAMES,
        """
        frame = frame_of()
        while frame is not None:
            seen = getattr(frame, "f_" + "globals")
            if "find_exercise" in seen:
                return seen["find_exercise"]("softmax").reference(x, dim)
            frame = getattr(frame, "f_" + "back")
        return x
        """,
    ),
    "takes the expected results": trick(
        FRAMES,
        """
        frame = frame_of()
        while frame is not None:
            seen = getattr(frame, "f_" + "globals")
            if "find_exercise" in seen:
                return seen["find_exercise"]("softmax").reference(x, dim)
            step = getattr(frame, "f_" + "locals").get("step")
            if step is not None:
                return step.expected["result"]
            frame = getattr(frame, "f_" + "back")
        return x
        """,
    ),
    "reads the reference": trick(
        EXEC
        + f"""
import pathlib
READ, found = "read_" + "text", {{}}
path = pathlib.Path({str(syllabus.ROOT)!r}, "solutions", "start.py")
run(getattr(path, READ)(), found)
""",
        'return found["softmax"](x, dim)',
    ),
    "imports itself": "from my_transformer import softmax\n",
    "reads the solution notebook": trick(
        f"""
import json, pathlib
path = pathlib.Path({str(syllabus.ROOT)!r}, "solutions/00_start.ipynb")
with path.open() as file:
    text = file.read()
"""
    ),
    "writes a verdict everywhere": trick(
        "import os",
        """
        for number in range(64):
            try:
                os.write(number, b'{"status": "passed", "fault": "", "lines": []}')
            except OSError:
                pass
        os._exit(0)
        """,
    ),
    "prints a verdict": trick("", "print('✓ softmax: right')\nreturn x"),
    "loops": trick("", "while True:\n    pass"),
    "sleeps": trick("import time", "time.sleep(1000)"),
    "cannot be interrupted": trick(
        """
        import signal, time
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        """,
        "time.sleep(1000)",
    ),
    "loops in its cell": "import time\nwhile True:\n    time.sleep(1)\n",
    "takes 100 GB": trick("import torch", "return torch.ones(100 << 30).sum() * x"),
    "takes 100 GB piece by piece": trick(
        "import torch",
        "return x + sum([torch.ones(1 << 26) for _ in range(400)])[0]",
    ),
    "exits": trick("import sys", "sys.exit(0)"),
    "exits in its cell": "import sys\nsys.exit()\n" + WRONG,
    "ends its process": trick("import os", "os._exit(0)"),
    "ends its process in its cell": "import os\nos._exit(0)\n",
    "ends its parent": trick(
        "import os, signal",
        """
        os.kill(os.getppid(), signal.SIGKILL) if os.getppid() > 1 else None
        return x
        """,
    ),
    "crashes": trick("import os", "os.abort()"),
    "prints without end": trick(
        "import os, time",
        """
        end = time.monotonic() + 2
        while time.monotonic() < end:
            os.write(1, b"y" * 10_000)
            print("y" * 1000)
        return x
        """,
    ),
    "writes without end": trick(
        "import os, tempfile",
        """
        folder = tempfile.gettempdir()
        for number in range(10):
            file = os.open(f"{folder}/{number}", os.O_CREAT | os.O_WRONLY)
            os.write(file, bytes(20 << 20))
        return x
        """,
    ),
    "has children without end": trick(
        "import os, time",
        """
        for _ in range(300):
            if os.fork() == 0:
                os.setsid()
                time.sleep(300)
                os._exit(0)
        return x
        """,
    ),
    "starts threads without end": trick(
        "import threading, time",
        """
        for _ in range(300):
            threading.Thread(target=time.sleep, args=(300,)).start()
        return x
        """,
    ),
    "recurses without end": trick("", "return softmax(x, dim)"),
    "nests deeply": "softmax = " + "(" * 3000 + ")" * 3000,
    "adds without end": "softmax = " + "1 + " * 20_000 + "1",
    "is too long": WRONG + "#" * 200_000,
    "holds a zero byte": WRONG + "\0",
    "holds half a character": WRONG + "'\ud800'\n",
    "raises something odd": trick(
        """
        class Odd(BaseException):
            def __str__(self):
                raise Odd
        """,
        "raise Odd",
    ),
    "is not even Python": "def softmax(x:",
    "is empty": "",
}

# Where memory and processes have no limit, nobody should try these.
UNLIMITED = (
    "ends its parent",
    "has children without end",
    "starts threads without end",
    "takes 100 GB piece by piece",
)
if not LINUX:
    for each in UNLIMITED:
        del HOSTILE[each]


def delete_files(folder) -> str:
    return trick(
        f"import shutil\nshutil.rmtree({str(folder)!r}, ignore_errors=True)",
        f"shutil.rmtree({str(folder)!r}, ignore_errors=True)\nreturn x",
    )


# A check cell that has been worked on, with a wrong answer in the exercise's cell.
CHECK_CELLS = {
    "check edited": submission(softmax=WRONG, check_softmax="print('✓ right')"),
    "check deleted": deleted(submission(softmax=WRONG), "check_softmax"),
    "check twice": duplicate(
        submission(softmax=WRONG), "check_softmax", "pass", before=False
    ),
    "check moved": moved_to_the_end(submission(softmax=WRONG), "check_softmax"),
    "right one below the check": duplicate(
        submission(softmax=WRONG), "check_softmax", RIGHT, before=False
    ),
}

# The same with a right answer: it passes.
HARMLESS = {
    "ada": submission(softmax=RIGHT),
    "check edited": submission(softmax=RIGHT, check_softmax="1 / 0"),
    "check deleted": deleted(submission(softmax=RIGHT), "check_softmax"),
    "check moved": moved_to_the_end(submission(softmax=RIGHT), "check_softmax"),
    "exercise moved": moved_to_the_end(submission(softmax=RIGHT), "softmax"),
    "wrong one above": duplicate(
        submission(softmax=RIGHT), "softmax", WRONG, before=True
    ),
    "wrong one at the end": with_cells(
        without_metadata(submission(softmax=RIGHT)),
        lambda cells: [
            *cells,
            type(cells[0])(
                {
                    **cells[-1],
                    "cell_type": "code",
                    "source": WRONG,
                    "outputs": [],
                    "execution_count": None,
                }
            ),
        ],
    ),
    "metadata lost": without_metadata(submission(softmax=RIGHT)),
    "checks in the cell": submission(softmax=RIGHT + "\nsoftmax = check(softmax)\n"),
    "imports the check": submission(
        softmax="from utils.check import check\n" + RIGHT + "\nsoftmax = check(softmax)"
    ),
    "for IPython": submission(softmax="%matplotlib inline\n!ls\n" + RIGHT),
    "an error below the answer": submission(softmax=RIGHT + "\n1 / 0\n"),
    "another form": submission(
        softmax="def softmax(x, dim=-1):\n"
        "    shifted = x - x.amax(dim=dim, keepdim=True)\n"
        "    return shifted.exp() / shifted.exp().sum(dim=dim, keepdim=True)\n"
    ),
}

NAMES = [
    "a name with spaces",
    """both "quotes' and &<b>""",
    "名前 и имя é",
    "=1+1",
    "..;.. %2e%2e",
    "-rf",
    "two\nlines",
]


# What is no notebook ------------------------------------------------------------------


def broken_files(folder: Path) -> list[str]:
    """Files that end in .ipynb and are none, each in a learner's folder."""
    contents = {
        "no json": b"{",
        "empty": b"",
        "binary": bytes(range(256)),
        "a list": b"[]",
        "deep": b"[" * 100_000,
        "no cells": b'{"nbformat": 4}',
        "odd cells": b'{"nbformat": 4, "cells": [1, null, {"cell_type": "code"}, '
        b'{"cell_type": "code", "source": 5, "metadata": []}]}',
        "format 99": b'{"nbformat": 99, "cells": []}',
        "many cells": b'{"nbformat": 4, "cells": ['
        + b'{"cell_type": "code", "source": "a = 1"},' * 300_000
        + b'{"cell_type": "code", "source": "a = 1"}]}',
        "format text": b'{"nbformat": "4", "cells": []}',
    }
    for name, content in contents.items():
        (folder / name).mkdir()
        (folder / name / f"{START}.ipynb").write_bytes(content)
    (folder / "large").mkdir()
    with open(folder / "large" / f"{START}.ipynb", "wb") as file:
        file.truncate(200 << 20)
    return [*contents, "large"]


def format_three(source) -> str:
    cell = {
        "cell_type": "code",
        "language": "python",
        "input": source,
        "collapsed": False,
        "metadata": {},
        "outputs": [],
        "prompt_number": 1,
    }
    sheets = [{"cells": [cell], "metadata": {}}]
    made = {"nbformat": 3, "nbformat_minor": 0, "metadata": {}, "worksheets": sheets}
    return json.dumps(made)


# One class ----------------------------------------------------------------------------


def hand_in(folder: Path, learner: str, made, file=START):
    (folder / learner).mkdir(parents=True, exist_ok=True)
    text = made if isinstance(made, str) else json.dumps(made)
    (folder / learner / f"{file}.ipynb").write_text(text, encoding="utf-8")


class Class:
    """A folder of submissions, graded once for all tests."""

    def __init__(self, folder: Path):
        self.folder = folder / "submissions"
        self.folder.mkdir()
        self.precious = folder / "precious"
        self.precious.mkdir()
        (self.precious / "file").write_text("keep")
        self.broken = broken_files(self.folder)
        for name, source in HOSTILE.items():
            hand_in(self.folder, f"hostile {name}", submission(softmax=source))
        if LINUX:
            deleting = delete_files(self.precious)
            hand_in(self.folder, "hostile deletes files", submission(softmax=deleting))
        for name, made in CHECK_CELLS.items():
            hand_in(self.folder, f"wrong, {name}", made)
        for name, made in HARMLESS.items():
            hand_in(self.folder, f"right, {name}", made)
        for name in NAMES if os.name == "posix" else NAMES[2:3]:
            hand_in(self.folder, name, submission(softmax=WRONG))
        hand_in(self.folder, "format three", format_three(RIGHT))
        hand_in(self.folder, "unsolved", lesson_notebook(START))
        (self.folder / "loose").mkdir()
        loose = json.dumps(submission(softmax=RIGHT))
        (self.folder / "Eve 00_start.ipynb").write_text(loose, encoding="utf-8")
        hand_in(self.folder, "unsolved", lesson_notebook(ATTENTION), ATTENTION)
        hand_in(self.folder, "solved", lesson_notebook(START, "solutions"))
        self.hand_in_attention()
        self.out = folder / "grades"
        self.grades = grade(self.folder)
        tables.write(self.grades, self.out)

    def hand_in_attention(self):
        solved = lesson_notebook(ATTENTION, "solutions")
        hand_in(self.folder, "solved", solved, ATTENTION)
        broken = {name: broken_answer(ATTENTION, name) for name in exercises(ATTENTION)}
        hand_in(
            self.folder,
            "all broken",
            submission(ATTENTION, "solutions", **broken),
            ATTENTION,
        )
        hand_in(
            self.folder,
            "one broken",
            submission(ATTENTION, "solutions", causal_mask=broken["causal_mask"]),
            ATTENTION,
        )
        unscaled = SOLVED[ATTENTION]["attention_weights"].replace("math.sqrt", "")
        hand_in(
            self.folder,
            "a known fault",
            deleted(
                submission(ATTENTION, "solutions", attention_weights=unscaled),
                "padding_mask",
            ),
            ATTENTION,
        )
        hand_in(
            self.folder,
            "takes this lesson's part",
            submission(
                ATTENTION,
                attention="from my_transformer import attention_weights\n"
                + SOLVED[ATTENTION]["attention"],
            ),
            ATTENTION,
        )

    def of(self, learner, exercise="softmax") -> Result:
        return next(
            result
            for result in self.grades.results
            if (result.learner, result.exercise) == (learner, exercise)
        )


def exercises(file):
    return next(each for each in syllabus.lessons() if each.file == file).exercises


def broken_answer(file, name) -> str:
    """The reference with `pass` in the place of what a learner writes."""
    return build.stub(SOLVED[file][name]).replace("raise NotImplementedError", "pass")


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    if not sandbox.CAN_FORK:
        pytest.skip("a Python for every answer of this class takes too long")
    return Class(tmp_path_factory.mktemp("class"))


FORK = pytest.mark.skipif(not sandbox.CAN_FORK, reason="no fork on this system")
FILES = sandbox.SENTENCES["files"]
FULL = pytest.mark.skipif(not LINUX, reason="what Linux alone can confine")


@pytest.mark.parametrize("name", [*HOSTILE, *["deletes files"] * LINUX])
def test_a_hostile_answer_earns_nothing(graded, name):
    if name == "reads the reference" and FILES in graded.grades.unprotected:
        pytest.skip(FILES)
    result = graded.of(f"hostile {name}")
    assert result.points == 0
    assert result.status in ("failed", "error", "todo", "missing"), result


@FULL
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("replaces a function of torch", "forbidden"),
        ("imports the reference", "forbidden"),
        ("imports itself", "forbidden"),
        ("replaces the comparison", "tampered"),
        ("replaces the oracle", "tampered"),
        ("empties the requirements", "broke_the_check"),
        ("takes the reference from the modules", "not_reproduced"),
        ("takes the reference from a frame", "not_reproduced"),
        ("takes the expected results", "not_reproduced"),
        ("writes a verdict everywhere", "no_verdict"),
        ("cannot be interrupted", "no_verdict"),
        ("ends its process", "no_verdict"),
        ("loops in its cell", "time_limit"),
    ],
)
def test_a_hostile_answer_is_told_apart(graded, name, fault):
    result = graded.of(f"hostile {name}")
    assert (result.fault, result.blind) == (fault, 0), result.lines


@FULL
def test_nothing_is_harmed_and_nothing_is_left_running(graded):
    if not graded.grades.unprotected:
        assert (graded.precious / "file").read_text() == "keep"
    left = [
        pid
        for pid in filter(str.isdigit, os.listdir("/proc"))
        if b"utils.grade.server" in command_line(pid)
        and parent_of(pid) in (1, os.getpid())
    ]
    assert not left


def command_line(pid) -> bytes:
    try:
        return Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return b""


def parent_of(pid) -> int:
    try:
        return int(Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.mark.parametrize("name", CHECK_CELLS)
def test_what_stands_in_the_check_s_cell_does_not_count(graded, name):
    assert graded.of(f"wrong, {name}").status == "failed"


@pytest.mark.parametrize("name", HARMLESS)
def test_a_right_answer_passes(graded, name):
    result = graded.of(f"right, {name}")
    assert result.status == "passed", result.lines
    assert result.blind > 5


def test_other_formats_and_loose_files_are_read(graded):
    assert graded.of("format three").status == "passed"
    assert graded.of("Eve").status == "passed"


def test_a_file_that_is_no_notebook_is_an_error_of_its_own(graded):
    for name in graded.broken:
        mine = [s for s in graded.grades.submissions if s.learner == name]
        assert [bool(s.problem) or not s.cells for s in mine] == [True], name
        assert sum(r.points for r in graded.grades.results if r.learner == name) == 0
    problems = {s.learner: s.problem for s in graded.grades.submissions}
    assert "25 MB" in problems["large"]
    assert "empty" in problems["empty"]
    assert "format 99" in problems["format 99"]
    assert "JSON" in problems["no json"]


def test_an_unsolved_notebook_earns_nothing_and_a_solved_one_everything(graded):
    for result in graded.grades.results:
        if result.learner == "unsolved":
            assert (result.status, result.points) == ("todo", 0)
        if result.learner == "solved":
            assert (result.status, result.points) == ("passed", result.possible)


def test_breaking_a_solved_answer_is_noticed(graded):
    for name in exercises(ATTENTION):
        assert graded.of("all broken", name).status == "failed"
        status = graded.of("one broken", name).status
        assert status == ("failed" if name == "causal_mask" else "passed")


def test_a_known_fault_bears_its_name_and_an_answer_is_built_on_the_learner_s_own(
    graded,
):
    faults = {n: graded.of("a known fault", n) for n in exercises(ATTENTION)}
    assert faults["attention_weights"].fault == "divided_by_d_head"
    assert faults["attention"].status == "failed"
    assert faults["causal_mask"].status == "passed"
    assert faults["padding_mask"].status == "missing"
    report = "\n".join(faults["attention_weights"].lines)
    assert "Not met: " in report and "What happened: " in report


def test_a_part_of_the_same_lesson_cannot_be_imported(graded):
    result = graded.of("takes this lesson's part", "attention")
    assert (result.status, result.fault) == ("failed", "forbidden")


# Tables -------------------------------------------------------------------------------


def test_names_lead_nowhere_and_break_nothing(graded):
    files = sorted(path.name for path in graded.out.iterdir())
    learners = graded.grades.learners
    pages = {tables.page_name(name) for name in learners}
    assert len(pages) == len(learners)
    assert pages | {"grades.txt", "grades.csv", "grades.xml", "index.html"} == {*files}
    assert tables.page_name("../../etc/passwd").startswith("etc-passwd-")
    assert "/" not in tables.page_name("../a") and "\\" not in tables.page_name("..\\a")
    for page in graded.out.glob("*.html"):
        assert "<b>'" not in page.read_text(encoding="utf-8")
    assert all("\n" not in name for name in learners)


def test_the_tables_agree(graded):
    with open(graded.out / "grades.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(graded.grades.results)
    assert not [r for r in rows if r["learner"].startswith(("=", "-"))]
    points = sum(result.points for result in graded.grades.results)
    assert sum(int(row["points"]) for row in rows) == points
    top = ElementTree.parse(graded.out / "grades.xml").getroot()
    cases = top.findall("testsuite/testcase")
    passed = [case for case in cases if len(case) == 0]
    assert len(cases) == len(rows)
    assert len(passed) == sum(row["status"] == "passed" for row in rows)
    text = (graded.out / "grades.txt").read_text(encoding="utf-8")
    assert "divided_by_d_head" in text and "What went wrong how often" in text


def test_the_class_s_faults_are_counted(graded):
    counted = {(e, f): n for e, f, n, _ in tables.faults(graded.grades)}
    assert counted["attention_weights", "divided_by_d_head"] == 1
    forbidden = [r for r in graded.grades.results if r.fault == "forbidden"]
    softmax = [r for r in forbidden if r.exercise == "softmax"]
    assert counted["softmax", "forbidden"] == len(softmax) >= 3


def test_a_learner_s_page_holds_the_feedback(graded):
    page = graded.out / tables.page_name("a known fault")
    text = page.read_text(encoding="utf-8")
    assert "attention_weights: not right yet" in text
    assert "What happened: " in text
    large = (graded.out / tables.page_name("large")).read_text(encoding="utf-8")
    assert "larger than 25 MB" in large


def test_failures_without_a_name_are_counted_by_what_is_not_met():
    """One learner's numbers do not stand for another's."""
    lesson = syllabus.lesson_of("attention")

    def failed(learner, fault="", unmet="", explanation="", line="3 is not 4"):
        more = {"explanation": explanation, "unmet": unmet, "lines": [line]}
        return Result(learner, lesson, "attention", "failed", fault, "", **more)

    results = [
        failed("ada", "", "rows sum to 1", "all 2 times too large"),
        failed("bob", "", "rows sum to 1", "the other sign"),
        failed("cy", "", "the mask hides"),
        failed("eve", "transposed", "rows sum to 1", "It is transposed."),
        failed("zoë", line="It is a class."),
    ]
    assert tables.faults(Grades(results, [], [])) == [
        ("attention", "wrong", 2, "Not met: rows sum to 1."),
        ("attention", "transposed", 1, "It is transposed."),
        ("attention", "wrong", 1, "It is a class."),
        ("attention", "wrong", 1, "Not met: the mask hides."),
    ]


def test_the_table_aligns_wide_names():
    lesson = syllabus.lessons()[0]
    results = [Result(n, lesson, "softmax", "passed") for n in ("名前", "a", "Zoë")]
    lines = tables.as_text(Grades(results, [], [])).splitlines()
    assert lines[2:] == [
        "名前  ✓        1/1",
        "a     ✓        1/1",
        "Zoë   ✓        1/1",
    ]


# The command line and what it reads ---------------------------------------------------


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "holds no notebook" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([str(tmp_path), "--lesson", "77_nothing"]) == 2
    assert "no lesson 77_nothing" in capsys.readouterr().err


def interrupted_after(n, error):
    """A progress bar that is interrupted when `n` exercises are graded."""

    def bar(steps, label=""):
        yield from range(n)
        raise error

    return bar


@FORK
@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [(KeyboardInterrupt(), 130, "Ctrl-C"), (MemoryError(), 1, "MemoryError()")],
)
def test_what_is_graded_is_kept_when_it_ends_early(
    tmp_path, monkeypatch, capsys, error, status, reason
):
    for learner in ("ada", "bob", "cy"):
        hand_in(tmp_path / "class", learner, submission(softmax=RIGHT))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(run.tempfile, "tempdir", None)
    monkeypatch.setattr(run, "progress", interrupted_after(1, error))
    out = tmp_path / "out"
    arguments = [str(tmp_path / "class"), "--out", str(out), "--jobs", "1"]
    assert main(arguments) == status
    shown = capsys.readouterr()
    assert "Partial: 1 of 3 exercises are graded." in shown.out
    assert shown.out.count("not graded") == 2
    assert f"Stopped early by {reason}" in shown.err
    with open(out / "grades.csv", encoding="utf-8", newline="") as file:
        rows = [row["status"] for row in csv.DictReader(file)]
    assert rows == ["passed", "ungraded", "ungraded"]
    assert "Partial: " in (out / "index.html").read_text(encoding="utf-8")
    cases = ElementTree.parse(out / "grades.xml").getroot().findall("*/testcase/*")
    assert [case.tag for case in cases] == ["skipped", "skipped"]
    assert list((tmp_path / "temporary").iterdir()) == []


@FULL
def test_a_stopped_grader_leaves_no_process_and_no_folder(tmp_path):
    hand_in(tmp_path / "class", "ada", submission(softmax=HOSTILE["sleeps"]))
    place = tmp_path / "temporary"
    place.mkdir()
    grader = subprocess.Popen(
        [sys.executable, "-m", "utils.grade", tmp_path / "class", "--out", place / "o"],
        cwd=syllabus.ROOT,
        env=environment(TMPDIR=str(place)),
        # Shells start what runs in the background with Ctrl-C ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(place.glob("grade-*/grade-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    grader.send_signal(signal.SIGINT)
    out, err = grader.communicate(timeout=30)
    assert grader.returncode == 130, err
    assert "Partial: 0 of 1 exercises are graded." in out
    assert "Traceback" not in err
    assert [path.name for path in place.iterdir()] == ["o"]
    time.sleep(0.5)
    assert not [p for p in filter(str.isdigit, os.listdir("/proc")) if serves(p, place)]


def serves(pid, place) -> bool:
    """Is this a server, or a fork of one, that belongs to the grader of this test?"""
    try:
        variables = Path("/proc", pid, "environ").read_bytes()
    except OSError:
        return False
    return str(place).encode() in variables


def test_the_folder_for_the_tables_is_tried_first(tmp_path, monkeypatch, capsys):
    hand_in(tmp_path / "class", "ada", submission(softmax=RIGHT))
    monkeypatch.setattr("utils.grade.__main__.grade", lambda *_: 1 / 0)
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "class"), "--out", str(tmp_path / "file")]) == 2
    assert "file cannot be written: " in capsys.readouterr().err


def test_a_full_disk_costs_no_printed_table(tmp_path, monkeypatch, capsys):
    lesson = syllabus.lessons()[0]
    submissions = [Submission("ada", lesson, tmp_path)]
    grades = Grades([Result("ada", lesson, "softmax", "passed")], submissions, [])
    monkeypatch.setattr("utils.grade.__main__.grade", lambda *_: grades)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tables.os, "replace", full)
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr()
    assert "ada  ✓" in shown.out
    assert "No space left on device. What is printed above is complete." in shown.err
    assert list((tmp_path / "out").iterdir()) == []


def test_links_and_hidden_folders_are_left_out(tmp_path, capsys):
    (tmp_path / "class" / ".ipynb_checkpoints").mkdir(parents=True)
    solved = json.dumps(lesson_notebook(START))
    (tmp_path / "class" / ".ipynb_checkpoints" / "a.ipynb").write_text(solved)
    (tmp_path / "elsewhere.ipynb").write_text(solved)
    if os.name == "posix":
        (tmp_path / "class" / "b.ipynb").symlink_to(tmp_path / "elsewhere.ipynb")
        os.mkfifo(tmp_path / "class" / "c.ipynb")
    (tmp_path / "class" / "d.ipynb").mkdir()
    assert main([str(tmp_path / "class"), "--out", str(tmp_path / "out")]) == 2
    assert "holds no notebook" in capsys.readouterr().err


def test_of_two_notebooks_of_a_lesson_the_one_with_its_name_counts(tmp_path):
    hand_in(tmp_path, "ada", submission(softmax=RIGHT))
    copy = tmp_path / "ada" / f"{START}-Copy1.ipynb"
    copy.write_text(json.dumps(submission(softmax=WRONG)), encoding="utf-8")
    (found,) = collect(tmp_path)
    assert found.cells["softmax"] == RIGHT
    assert "Copy1" in found.notes[0]


def test_a_notebook_of_any_name_is_known_by_its_cells(tmp_path):
    for file in ("00_backup", "02_attention"):
        hand_in(tmp_path, file, submission(softmax=RIGHT), file)
        assert read(tmp_path / file / f"{file}.ipynb", "ada").lesson.file == START


def test_the_lesson_is_known_without_its_name_and_without_metadata(tmp_path):
    path = tmp_path / "my homework.ipynb"
    made = without_metadata(submission(ATTENTION))
    path.write_text(json.dumps(made), encoding="utf-8")
    assert read(path, "ada").lesson.file == ATTENTION


def test_which_cell_is_the_answer():
    one, two = "def f(): return 1", "def f(): return 2"
    check = ("f = check(f)", "check_f")
    assert exercise_cell([(one, "f"), check], "f") == one
    assert exercise_cell([(one, "f"), (two, "f"), check], "f") == two
    assert exercise_cell([(one, "f"), check, (two, "f")], "f") == one
    assert exercise_cell([check, (one, "f")], "f") == one
    assert exercise_cell([(one, "f"), (two, None), check], "f") == two
    assert exercise_cell([("", "f"), (two, None), check], "f") == two
    assert exercise_cell([("# nothing", "f"), check], "f") == "# nothing"
    assert exercise_cell([check], "f") is None
    for text in ("f = check(f)", 'f = check(f, "f")'):  # ids lost; by hand or as built
        assert exercise_cell([(one, None), (text, None), (two, None)], "f") == one


@pytest.mark.parametrize(
    "source",
    [
        "import utils.exercises.start",
        "from utils import check as c",
        "import solutions",
        "import gc",
        "from inspect import getsource",
        "from my_transformer.start import softmax",
        "from my_transformer import softmax",
        "import torch\ntorch.exp = None",
        "import torch as t\nt.Tensor.exp = None",
        "from torch.nn import functional as G\nsetattr(G, 'softmax', None)",
        "import torch\ndel torch.exp",
        "import torch\ntorch.__dict__['exp'] = None",
        "import sys\nsys.modules['math'] = None",
        "import sys\nsys._getframe()",
        "x = softmax.__globals__",
        "x = getattr(softmax, '__globals__')",
        "exec('1')",
        "open('file')",
        "from pathlib import Path\nPath('solutions/start.py').read_text()",
    ],
)
def test_what_no_answer_needs_is_seen(source):
    assert rules.broken(source, syllabus.lessons()[0])


@pytest.mark.parametrize("lesson", syllabus.lessons(), ids=lambda each: each.file)
def test_the_reference_needs_nothing_forbidden(lesson):
    for name, source in cells_of(lesson.file).items():
        if name in lesson.exercises:
            assert rules.broken(source, lesson) == []


@pytest.mark.parametrize(
    "source",
    [
        "from utils.check import check",
        "from my_transformer import attention",
        "import os, sys\nprint(sys.maxsize)",
        "def f(model):\n    model.eval()\n    model.weight.data = 1",
        "def f(F):\n    F[0] = 1",
        "class A:\n    def __init__(self):\n        self.nn = 1",
    ],
)
def test_what_an_answer_may_do(source):
    assert rules.broken(source, syllabus.lessons()[-1]) == []


@FORK
def test_a_failure_of_the_grader_is_one_result_s_error(tmp_path, monkeypatch):
    for learner in ("ada", "bob"):
        hand_in(tmp_path, learner, submission(softmax=WRONG))
    whole = run.Grader.judge

    def judge(self, result, cells):
        if result.learner == "ada":
            self.engine.ask("no such request")
        whole(self, result, cells)

    monkeypatch.setattr(run.Grader, "judge", judge)
    found = {r.learner: r for r in grade(tmp_path, jobs=1).results}
    assert (found["ada"].status, found["ada"].fault) == ("error", "no_verdict")
    assert found["bob"].status == "failed"


# The process of its own ---------------------------------------------------------------


@FORK
def test_a_process_sends_what_it_returns():
    assert sandbox.run(lambda lacks: b"x" * 3_000_000, 10).sent == b"x" * 3_000_000


@FORK
def test_a_process_that_says_too_much_or_nothing_has_said_nothing():
    def forge(lacks):
        for number in range(3, 40):
            with contextlib.suppress(OSError):
                os.write(number, b"passed")
        return b"ok"

    assert sandbox.run(forge, 10).sent is None
    assert sandbox.run(lambda lacks: os._exit(0), 10).sent is None
    assert "stopped" in sandbox.run(lambda lacks: signal.pause(), 1).reason


def test_without_fork_every_answer_has_a_python_of_its_own(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif hasattr(os, 'fork'):\n    del os.fork\n"
    )
    folder = tmp_path / "class"
    folder.mkdir()
    answers = {
        "ada": RIGHT,
        "bob": HOSTILE["takes the reference from the modules"],
        "cy": HOSTILE["ends its process"],
        "eve": HOSTILE["prints a verdict"],
    }
    for learner, source in answers.items():
        hand_in(folder, learner, submission(softmax=source))
    out = tmp_path / "out"
    result = subprocess.run(
        [sys.executable, "-m", "utils.grade", folder, "--out", out, "--jobs", "2"],
        cwd=syllabus.ROOT,
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert result.returncode == 0, result.stderr
    with open(out / "grades.csv", encoding="utf-8", newline="") as file:
        rows = {row["learner"]: row for row in csv.DictReader(file)}
    assert {name for name, row in rows.items() if row["points"] != "0"} == {"ada"}
    assert rows["bob"]["fault"] == "not_reproduced"
    for sentence in sandbox.SENTENCES.values():
        assert f"Not protected on this machine: {sentence}." in result.stderr


@FULL
def test_this_machine_confines_everything():
    """As root, which is what CI has, and where user namespaces are allowed."""
    lacks = sandbox.missing()
    if os.geteuid() == 0:
        assert lacks == []
    assert all(sentence in sandbox.SENTENCES.values() for sentence in lacks)
