"""What the outputs of a solution notebook depend on, so that it is run again."""

import ast
import hashlib
import re
from pathlib import Path

from utils import syllabus
from utils.build.notebooks import code_cells
from utils.syllabus import ROOT

# The answers in a solution notebook are right, so it shows no fault.
NOT_FOLLOWED = ("utils.faults",)


def digest(nb, slug: str, root: Path = ROOT) -> str:
    """Changes when anything changes that the outputs of a notebook depend on."""
    state = hashlib.sha256()
    for cell in code_cells(nb):
        state.update(f"{cell.source}\0{cell.metadata.get('tags')}\0".encode())
    read = {root / "requirements.txt", *_records(nb, root)}
    for path in [*depends_on(nb, slug, root), *sorted(read)]:
        state.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    if any("course_map" in cell.source for cell in nb.cells):
        for each in syllabus.lessons():
            shown = each.file, each.title, each.summary, each.minutes, *each.exercises
            state.update(repr(shown).encode())
    return state.hexdigest()


def _records(nb, root: Path) -> list[Path]:
    """The results of long runs that a notebook reads."""
    code = "\n".join(cell.source for cell in code_cells(nb))
    names = re.findall(r'recorded\("(\w+)"\)', code)
    paths = [root / "utils" / "recorded" / f"{name}.json" for name in names]
    return [path for path in paths if path.is_file()]


def depends_on(nb, slug: str, root: Path = ROOT) -> list[Path]:
    """The course's modules that a notebook imports, directly or not."""
    code = "\n".join(cell.source for cell in code_cells(nb))
    waiting = {*_imported(code, root), *_files(f"utils.exercises.{slug}", root)}
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        found.add(path)
        package = path.parent.relative_to(root).parts
        code = path.read_text(encoding="utf-8")
        waiting |= _imported(code, root, package) - found
    return sorted(found)


def _imported(code: str, root: Path, package: tuple[str, ...] = ()) -> set[Path]:
    """The course's files that a piece of code imports.

    package: the names of the package that holds the code, for its relative imports.
    """
    names = []
    python = re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", code)
    for node in ast.walk(ast.parse(python)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "my_transformer":
            lessons = [syllabus.lesson_of(alias.name) for alias in node.names]
            names += [f"solutions.{each.slug}" for each in lessons if each]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return {path for name in names for path in _files(name, root)}


def _files(name: str, root: Path) -> list[Path]:
    """What Python reads to import a module of the course: its packages, and itself."""
    parts = name.split(".")
    if parts[0] not in ("utils", "solutions") or name.startswith(NOT_FOLLOWED):
        return []
    packages = [
        root.joinpath(*parts[:n], "__init__.py") for n in range(1, len(parts) + 1)
    ]
    module = root.joinpath(*parts).with_suffix(".py")
    return [path for path in (*packages, module) if path.is_file()]
