"""Builds the course as learners get it who must not have the solutions.

`python -m utils.handout [FOLDER]`, or `make handout`: notebooks, checks and tools, and
no reference answer. A folder that is a git repository stays one. What an earlier run
wrote there is brought up to date; nothing else is overwritten or deleted.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path

from utils import build, syllabus
from utils.check import recorded, recorder
from utils.display import any_encoding
from utils.errors import CourseError

MANIFEST = ".handout.json"  # what an earlier run wrote, by path, with its SHA-256
COMMENT = b"a handout of the course"  # in the archive, to know it again
# Of `utils`, what only those need who build, grade or hand out.
LEFT_OUT = {
    *("book.py", "build", "diagrams", "faults", "grade", "handout.py"),
    *("recorder.py", "__pycache__"),
}
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
    for path in sorted((root / "utils").rglob("*")):
        inside = path.relative_to(root / "utils")
        wanted = path.suffix in (".py", ".json")
        if wanted and not LEFT_OUT & set(inside.parts):
            found[f"utils/{inside.as_posix()}"] = path.read_bytes()
    for path in sorted((root / "diagrams").glob("*.svg")):
        found[f"diagrams/{path.name}"] = path.read_bytes()
    for path in build.lesson_paths():
        text = learner_notebook(path)
        found[f"notebooks/{path.stem}.ipynb"] = text.encode()
    readme = (root / "docs" / "handout.md").read_text(encoding="utf-8")
    found["README.md"] = readme.encode()
    found["Makefile"] = makefile().encode()
    found[".gitignore"] = IGNORED.encode()
    folder = recorded.FOLDER.relative_to(root).as_posix()
    for name, content in recorder.files().items():
        found[f"{folder}/{name}"] = content
    return found


def write(folder: Path) -> tuple[list[str], list[str]]:
    """Write the bundle into a folder, and a zip file beside it.

    Returns the paths written, and those left as they are because somebody has changed
    them since the last time.
    """
    before = _written_before(folder)
    _refuse_foreign(folder, before)
    with _staging(folder) as (staged, archive):  # so far nothing is replaced
        bundle = files()
        kept = [
            name
            for name, content in bundle.items()
            if not _may_replace(folder / name, content, before.get(name))
        ]
        if kept and not before:
            raise CourseError(_foreign(folder, kept[0]))
        hashes = {n: before.get(n) if n in kept else _sha(c) for n, c in bundle.items()}
        written = {n: content for n, content in bundle.items() if n not in kept}
        written[MANIFEST] = json.dumps({"files": hashes}, indent=1).encode()
        for name, content in written.items():
            path = staged / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        _pack(archive, folder.name, bundle)
        for name in before.keys() - bundle.keys():
            _remove(folder, name, before[name])
        for name in written:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staged / name, path)
        os.replace(archive, _archive(folder))
    return list(written), kept


def _archive(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.zip")


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _written_before(folder: Path) -> dict[str, str]:
    """The hashes of what an earlier run wrote into the folder, by path."""
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise CourseError(
            f"{folder / MANIFEST} is damaged, so it is not known what in this folder "
            "comes from here. Choose an empty folder."
        ) from error


def _refuse_foreign(folder: Path, before) -> None:
    """A `CourseError` if the folder holds what is somebody's own."""
    if (folder / "lessons").exists() or (folder / "solutions").exists():
        raise CourseError(
            f"{folder} holds lessons or solutions: it is no place for a handout."
        )
    for name in ("notebooks", "utils") if not before else ():
        if (folder / name).exists():
            raise CourseError(_foreign(folder, name))
    archive = _archive(folder)
    if archive.exists() and not _is_ours(archive):
        raise CourseError(f"{archive} exists, and is no handout. Move it away.")


def _foreign(folder: Path, name: str) -> str:
    return (
        f"{folder} holds {name} already, and `utils.handout` did not write it. Move it "
        "away, or choose an empty folder."
    )


def _is_ours(archive: Path) -> bool:
    try:
        with zipfile.ZipFile(archive) as opened:
            return opened.comment == COMMENT
    except (OSError, zipfile.BadZipFile):
        return False


def _may_replace(path: Path, content: bytes, recorded: str | None) -> bool:
    """Is there nothing, or the same, or what an earlier run wrote?"""
    if not path.is_file():
        return not path.exists()
    present = path.read_bytes()
    return present == content or _sha(present) == recorded


def _remove(folder: Path, name: str, recorded: str) -> None:
    """Delete what an earlier run wrote and nobody changed, and folders left empty."""
    path = folder / name
    if path.is_file() and _sha(path.read_bytes()) == recorded:
        path.unlink()
        for parent in path.relative_to(folder).parents:
            with suppress(OSError):  # not empty, or the folder itself
                (folder / parent).rmdir()


@contextmanager
def _staging(folder: Path):
    """Places for the new files and the new archive, on the same disks as the old."""
    there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder.with_name(f"{folder.name}.zip.new")
    try:
        archive.touch()
        with tempfile.TemporaryDirectory(prefix=".handout-", dir=folder) as staged:
            yield Path(staged), archive
    finally:
        with suppress(OSError):
            archive.unlink()
        if not there:
            with suppress(OSError):  # not empty: the handout is in it
                folder.rmdir()


def _pack(path: Path, top: str, bundle: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = COMMENT
        for name, content in bundle.items():
            entry = zipfile.ZipInfo(f"{top}/{name}")  # always the same date
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)


def main(arguments=None) -> int:
    any_encoding()
    parser = argparse.ArgumentParser(
        prog="python -m utils.handout",
        description="Build the course without its solutions.",
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("handout"))
    folder = parser.parse_args(arguments).folder
    try:
        names, kept = write(folder.resolve())
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{folder} cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
    lessons = [n for n in names if re.fullmatch(r"notebooks/\d\d_\w+\.ipynb", n)]
    print(f"{folder}/ and {folder}.zip: {len(lessons)} lessons, no reference answers.")
    if kept:
        print(f"Left as they are: {', '.join(kept)}, which somebody has changed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
