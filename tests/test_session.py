"""The first cell of a notebook, in a kernel of its own."""

import os
import shutil
import subprocess
import sys

import nbformat
import pytest

from tests.notebooks import (
    bootstrap,
    copy_of_the_course,
    environment,
    run,
    run_in_kernel,
    text_of,
)

CELL = bootstrap("00_start")
SAYS_WHERE = "import utils.session; print(utils.session.lesson)"


@pytest.mark.parametrize("folder", ["notebooks", "solutions", "."])
def test_starts_from_every_folder_with_another_utils_installed(folder, tmp_path):
    copy_of_the_course(tmp_path / "course")
    other = tmp_path / "site" / "utils"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("print('the wrong utils')")
    cells = ["import utils", CELL, SAYS_WHERE, CELL, SAYS_WHERE]
    shown = run(
        dict(enumerate(cells)),
        tmp_path / "course" / folder,
        PYTHONPATH=str(other.parent),
    )
    assert shown[0].strip() == "the wrong utils"
    assert shown[1] == shown[3] == ""
    assert shown[2].strip() == shown[4].strip() == "00_start"


def run_python(code, folder, python=sys.executable):
    return subprocess.run(
        [python, "-c", code],
        cwd=folder,
        env=environment(PYTHONPATH=""),
        capture_output=True,
        text=True,
    )


def test_no_course_folder_says_what_to_do(tmp_path):
    result = run_python(CELL, tmp_path)
    assert result.returncode == 1
    assert "make lab" in result.stderr.splitlines()[-1]


def test_wrong_kernel_says_what_to_do(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"])
    folder, suffix = ("Scripts", ".exe") if os.name == "nt" else ("bin", "")
    bare = tmp_path / "bare" / folder / f"python{suffix}"
    copy_of_the_course(tmp_path / "course")
    result = run_python(CELL, tmp_path / "course" / "notebooks", bare)
    assert result.returncode == 1
    assert "lacks torch" in result.stderr
    assert "Change Kernel" in result.stderr


def test_a_kernel_says_what_is_wrong_in_a_sentence(tmp_path):
    course = copy_of_the_course(tmp_path / "course")
    shutil.rmtree(course / "my_transformer")
    cells = [
        CELL,
        "from utils.check import check",
        "softmax = check(softmax)",
        "not_defined_anywhere",
        "check(check, 'no_such_exercise')",
        "import torch\ndef softmax(scores, dim=-1):\n"
        "    return torch.softmax(scores, dim)",
        "softmax = check(softmax)",
        "print(softmax.__module__)",
    ]
    made = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
    shown = [*map(text_of, run_in_kernel(made, course / "notebooks"))]
    assert "run its exercise cell first" in shown[2]
    assert len(shown[2].splitlines()) <= 4
    assert "not_defined_anywhere" in shown[3]
    assert "no exercise of this course" in shown[4]
    assert "Traceback" not in shown[4]
    # Nowhere to save it: said, and nothing lost.
    assert "Not saved for later lessons" in shown[6]
    assert shown[7].strip() == "__main__"
