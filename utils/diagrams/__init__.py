"""The pictures of the lessons: a module a picture, whose `draw()` returns a `Drawing`.

`make build` writes them to `diagrams/`, where lessons find them as
`![a sentence](../diagrams/NAME.svg)`.
"""

from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def names() -> list[str]:
    """Every picture."""
    return sorted(p.stem for p in FOLDER.glob("[a-z]*.py") if p.stem != "drawing")


def svg(name: str) -> str:
    """The text of a picture's file."""
    return import_module(f"utils.diagrams.{name}").draw().svg()
