"""Runs notebooks as a learner's kernel would, outside pytest's own environment."""

import json
import os
import shutil
import subprocess
import sys

import nbformat
from nbclient import NotebookClient

from utils import syllabus

NOT_A_LEARNERS = ("PYTEST_VERSION", "PYTEST_CURRENT_TEST", "COURSE_PARTS")


def environment(**more) -> dict:
    """The environment of a learner's kernel."""
    kept = {k: v for k, v in os.environ.items() if k not in NOT_A_LEARNERS}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def copy_of_the_course(to, *, solutions=True):
    """A copy of the course without environments, history and tests."""
    for name in ("utils", "my_transformer", "notebooks", "diagrams", "solutions"):
        if name != "solutions" or solutions:
            unwanted = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
            shutil.copytree(syllabus.ROOT / name, to / name, ignore=unwanted)
    return to


def run(cells, folder, **variables):
    """Run code cells in one IPython; returns what each showed, by the same key.

    cells: a dict of their texts. An error ends nothing: it is part of the output.
    """
    result = subprocess.run(
        [sys.executable, syllabus.ROOT / "tests" / "shell.py"],
        input=json.dumps(list(cells.values())),
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return dict(zip(cells, json.loads(result.stdout), strict=True))


def run_in_kernel(made, folder, **variables):
    """Execute a notebook in a real kernel, errors included; returns its cells."""
    client = NotebookClient(
        made,
        timeout=600,
        kernel_name="python3",
        allow_errors=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=environment(**variables))
    return made.cells


def text_of(cell) -> str:
    """The text that a cell has put out."""
    return "\n".join(
        "\n".join([output["ename"], output["evalue"], *output["traceback"]])
        if output.output_type == "error"
        else output.get("text") or output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
    )


def lesson_notebook(file: str, folder="notebooks"):
    return nbformat.read(syllabus.ROOT / folder / f"{file}.ipynb", as_version=4)


def code(made) -> list[str]:
    return [cell.source for cell in made.cells if cell.cell_type == "code"]


def bootstrap(file: str) -> str:
    """The first cell of a lesson's notebook."""
    return code(lesson_notebook(file))[0]
