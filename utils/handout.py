"""Builds the course as learners get it who must not have the solutions.

`python -m utils.handout [FOLDER]`, or `make handout`: notebooks, checks and tools, and
no reference answer. A folder that is a git repository stays one, and what learners do
not need there is not touched.
"""

import argparse
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

from utils import build, syllabus
from utils.check.engine import reference_errors
from utils.errors import CourseError

# Of `utils`, what only those need who build, grade or hand out.
LEFT_OUT = ("build.py", "handout.py", "grade", "grade.py", "__pycache__")
AS_IT_STANDS = (
    "LICENSE",
    "requirements.txt",
    "my_transformer/__init__.py",
    ".github/workflows/learner.yml",
)
IGNORED = ".venv/\n__pycache__/\n.ipynb_checkpoints/\n.pytest_cache/\nreport.*\n"
RUNS_ON = "raises-exception"  # an error in such a cell does not stop “Run All Cells”
MUST_PASS = {"bootstrap", "check"}


def learner_notebook(path: Path) -> str:
    """A lesson's notebook, of which every cell is tried when all are run.

    A cell that needs a part which is not written stops with a sentence. The cells
    after it run, as they do where the reference stands in. An error in a check stays
    an error, or strict mode would be green.
    """
    made = build.notebook(build.LessonSource(path), solved=False)
    for cell in made.cells:
        tags = cell.metadata.setdefault("tags", [])
        checks = MUST_PASS & set(tags) or "check_joint(" in cell.source
        if cell.cell_type == "code" and not checks:
            tags.append(RUNS_ON)
        if not tags:
            del cell.metadata["tags"]
    return build.dumps(made)


def makefile() -> str:
    """The Makefile's rules for `make lab`, without those for building and testing."""
    text = (syllabus.ROOT / "Makefile").read_text(encoding="utf-8")
    kept = [
        block
        for block in text.split("\n\n")
        if block.startswith(("PYTHON ?=", "lab:", "$(VENV)/.lab:"))
    ]
    return "\n\n".join([".PHONY: lab", *kept]).strip() + "\n"


def files() -> dict[str, bytes]:
    """Everything in the bundle by its path."""
    root = syllabus.ROOT
    found = {name: (root / name).read_bytes() for name in AS_IT_STANDS}
    for path in sorted((root / "utils").rglob("*.py")):
        inside = path.relative_to(root / "utils")
        if not set(LEFT_OUT) & set(inside.parts):
            found[f"utils/{inside.as_posix()}"] = path.read_bytes()
    for path in build.lesson_paths():
        text = learner_notebook(path)
        found[f"notebooks/{path.stem}.ipynb"] = text.encode()
    readme = (root / "docs" / "handout.md").read_text(encoding="utf-8")
    found["README.md"] = readme.encode()
    found["Makefile"] = makefile().encode()
    found[".gitignore"] = IGNORED.encode()
    found["utils/recorded/reference_errors.json"] = json.dumps(
        reference_errors()
    ).encode()
    return found


def write(folder: Path) -> list[str]:
    """Write the bundle into a folder, and a zip file beside it; returns the paths."""
    if (folder / "lessons").exists() or (folder / "solutions").exists():
        raise CourseError(
            f"{folder} holds lessons or solutions: it is no place for a handout."
        )
    made = files()
    for built in ("notebooks", "utils"):
        shutil.rmtree(folder / built, ignore_errors=True)
    for name, content in made.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    with zipfile.ZipFile(f"{folder}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in made.items():
            entry = zipfile.ZipInfo(f"{folder.name}/{name}")  # always the same date
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    return list(made)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m utils.handout",
        description="Build the course without its solutions.",
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("handout"))
    folder = parser.parse_args(arguments).folder
    try:
        names = write(folder.resolve())
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    lessons = [n for n in names if re.fullmatch(r"notebooks/\d\d_\w+\.ipynb", n)]
    print(f"{folder}/ and {folder}.zip: {len(lessons)} lessons, no reference answers.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
