"""Text that every machine has: Python's own manual, docstrings and source."""

import ast
import sysconfig
from pathlib import Path

from utils.errors import CourseError

# Not part of every installation, or tests and tables instead of text.
LEFT_OUT = ("test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3")
LEFT_OUT += ("pydoc_data", "ensurepip", "turtledemo", "encodings", "__pycache__")


def english(n_characters: int) -> str:
    """The first `n_characters` of English prose: the manual, then docstrings."""
    from pydoc_data.topics import topics

    return _first(
        n_characters, (topics[name] for name in sorted(topics)), _docstrings()
    )


def code(n_characters: int) -> str:
    """The first `n_characters` of the standard library's source, file by file."""
    return _first(n_characters, _sources())


def _first(n_characters, *texts):
    found, total = [], 0
    for text in (each for several in texts for each in several):
        found.append(text.strip("\n") + "\n\n")
        total += len(found[-1])
        if total >= n_characters:
            return "".join(found)[:n_characters]
    raise CourseError(
        f"The standard library of this Python holds {total:,} characters of such text, "
        f"{n_characters:,} were asked for."
    )


def _sources():
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py"), key=lambda path: path.as_posix()):
        if not set(path.relative_to(root).parts) & set(LEFT_OUT):
            yield path.read_text(encoding="utf-8", errors="replace")


def _docstrings():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for source in _sources():
        try:
            nodes = ast.walk(ast.parse(source))
        except SyntaxError:
            continue
        for node in nodes:
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text and len(text) > 80:
                yield text
