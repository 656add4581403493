"""The commands in docs/instructors.md do what it says."""

import os
import re
import shutil
import subprocess

import pytest
import yaml

from utils import syllabus
from utils.check import recorded

PAGE = (syllabus.ROOT / "docs" / "instructors.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(
    os.name == "nt" or shutil.which("awk") is None, reason="for a Unix shell"
)


def block(word, language="bash") -> str:
    (found,) = [
        each
        for each in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
        if word in each
    ]
    return found


def shell(script, folder, *arguments):
    result = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script, "script", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_learner_is_in_one_part(tmp_path):
    """With a Python that writes a table of whom it was given."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\n"  # -m utils.grade FOLDER --out OUT --jobs N
        'mkdir -p "$5"; { echo learner; ls "$3"; } > "$5/grades.csv"\n'
    )
    python.chmod(0o755)
    learners = sorted(f"learner {i}" for i in range(11))
    for learner in learners:
        (tmp_path / "submissions" / learner).mkdir(parents=True)
    for part in range(3):
        shell(block("grade-part.sh PART"), tmp_path, str(part), "3")
    shell(block("FNR > 1"), tmp_path)
    first, *rows = (tmp_path / "grades.csv").read_text().splitlines()
    assert first == "learner"
    assert sorted(rows) == learners
    sizes = [len(list((tmp_path / "parts" / str(i)).iterdir())) for i in range(3)]
    assert sorted(sizes) == [3, 4, 4]


def test_the_cluster_s_commands_name_the_script_and_as_many_parts():
    made = yaml.safe_load(block("on: workflow_dispatch", "yaml"))
    job = made["jobs"]["grade"]
    assert job["strategy"]["matrix"]["part"] == list(range(10))
    assert any("grade-part.sh" in each.get("run", "") for each in job["steps"])
    last, parts = re.search(r"--array=0-(\d+).* (\d+)'", block("sbatch"), re.S).groups()
    assert int(last) + 1 == int(parts)


def test_the_link_opens_the_first_notebook(tmp_path):
    link = shell(block("urlencode"), tmp_path)
    assert link.startswith("https://hub.example.edu/hub/user-redirect/git-pull?repo=")
    assert link.endswith("lab%2Ftree%2FCOURSE%2Fnotebooks%2F00_start.ipynb\n")
    assert (syllabus.ROOT / "notebooks" / "00_start.ipynb").is_file()


def test_what_the_page_names_exists():
    for name in re.findall(r"`((?:\.github|docs|utils)/[\w./-]+)`", PAGE):
        path = syllabus.ROOT / name
        assert path.exists() or path == recorded.FOLDER, name  # in a handout alone
    makefile = (syllabus.ROOT / "Makefile").read_text(encoding="utf-8")
    for target in {*re.findall(r"`?make ([a-z-]+)", PAGE)} - {"grade"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    headings = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
    assert set(re.findall(r"\]\(#(.*?)\)", PAGE)) <= anchors
