"""Builds notebooks, pictures, syllabus and pages from the lessons' sources."""

from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from utils import diagrams, syllabus
from utils.build.dependencies import depends_on, digest
from utils.build.errors import BuildError
from utils.build.execution import execute
from utils.build.lesson_source import LessonSource, lesson_paths
from utils.build.notebooks import code_cells, dumps, notebook
from utils.build.pages import claims_page, syllabus_json, with_course_map
from utils.build.references import BEGIN, END, answers, stub
from utils.syllabus import ROOT

__all__ = [
    "BEGIN",
    "END",
    "BuildError",
    "LessonSource",
    "answers",
    "build",
    "depends_on",
    "digest",
    "dumps",
    "execute",
    "lesson_paths",
    "notebook",
    "stub",
]


@dataclass
class Output:
    """Brings files up to date, or with `check` only says which are not."""

    check: bool
    changed: list[str] = field(default_factory=list)

    def note(self, path: Path) -> bool:
        """A file is out of date; returns whether it may be changed."""
        self.changed.append(path.relative_to(ROOT).as_posix())
        return not self.check

    def write(self, path: Path, text: str) -> None:
        current = path.is_file() and path.read_text(encoding="utf-8") == text
        if not current and self.note(path):
            path.write_text(text, encoding="utf-8", newline="\n")

    def remove(self, path: Path) -> None:
        if self.note(path):
            path.unlink()


def build(check: bool, only: list[str], force: bool) -> list[str]:
    """Bring everything up to date; returns the files that were, or are, out of date.

    check: write nothing. only: execute only these lessons' notebooks. force: execute
    them even if nothing has changed.
    """
    output, sources = Output(check), _sources()
    for source in sources:
        path = ROOT / "notebooks" / f"{source.file}.ipynb"
        output.write(path, dumps(notebook(source, solved=False)))
    _bring_pictures_up_to_date(output)
    output.write(ROOT / "utils" / "syllabus.json", syllabus_json(sources))
    syllabus.lessons.cache_clear()
    for source in sources:
        if not only or source.file in only or source.slug in only:
            _bring_solution_up_to_date(source, output, force)
    _remove_notebooks_without_lesson(sources, output)
    if not only:
        output.write(ROOT / "CLAIMS.md", claims_page(sources))
        readme = ROOT / "README.md"
        text = readme.read_text(encoding="utf-8")
        output.write(readme, with_course_map(text, sources))
    return output.changed


def _sources() -> list[LessonSource]:
    sources, problems = [], []
    for path in lesson_paths():
        try:
            sources.append(LessonSource(path))
        except BuildError as error:
            problems.append(str(error))
    if problems:
        raise BuildError("\n".join(problems))
    return sources


def _bring_pictures_up_to_date(output):
    folder, names = ROOT / "diagrams", diagrams.names()
    folder.mkdir(exist_ok=True)
    for name in names:
        output.write(folder / f"{name}.svg", diagrams.svg(name))
    for path in folder.glob("*.svg"):
        if path.stem not in names:
            output.remove(path)


def _bring_solution_up_to_date(source, output, force):
    path = ROOT / "solutions" / f"{source.file}.ipynb"
    nb = notebook(source, solved=True)
    nb.metadata["course"]["digest"] = digest(nb, source.slug)
    old = nbformat.read(path, as_version=4) if path.is_file() else None
    if old is not None and not force and _same_run(old, nb):
        for cell, kept in zip(code_cells(nb), code_cells(old), strict=True):
            cell.outputs, cell.execution_count = kept.outputs, kept.execution_count
        output.write(path, dumps(nb))
    elif output.note(path):
        print(f"executing solutions/{source.file}.ipynb", flush=True)
        text = dumps(execute(nb, source.file))
        path.write_text(text, encoding="utf-8", newline="\n")


def _same_run(old, nb) -> bool:
    """Would executing `nb` give the outputs that `old` holds?"""
    digests = [each.metadata.get("course", {}).get("digest") for each in (old, nb)]
    return digests[0] == digests[1] and len(code_cells(old)) == len(code_cells(nb))


def _remove_notebooks_without_lesson(sources, output):
    lessons = {source.file for source in sources}
    for folder in ("notebooks", "solutions"):
        for path in (ROOT / folder).glob("*.ipynb"):
            if path.stem not in lessons and _built_as(path.stem, path):
                output.remove(path)


def _built_as(file: str, path: Path) -> bool:
    """Not a copy that somebody made: its first cell starts another lesson."""
    return f'start(\\"{file}\\"' in path.read_text(encoding="utf-8", errors="replace")
