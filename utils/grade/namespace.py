"""Runs the cells of one answer in a fresh namespace, in a confined process.

Parts of earlier lessons are the reference's, from source that was handed over: this
module imports nothing of the course, so that it can run where no answer may be found.
"""

import linecache
import re
import sys
import traceback
from dataclasses import dataclass
from types import ModuleType

CELL = "<exercise cell>"


@dataclass(frozen=True)
class Answer:
    """What it takes to make one answer, as text.

    cells: the exercise cells that it needs, its own last. imports: the import lines
    of the lesson's cells before it. parts: for each part of an earlier lesson the
    module that holds it. modules: the source of these modules.
    """

    name: str
    cells: list[str]
    imports: list[str]
    parts: dict[str, str]
    modules: dict[str, str]


def load(answer: Answer) -> tuple[dict, list[str]]:
    """The namespace after all cells, and the last lines of what went wrong."""
    _offer_parts(answer)
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    namespace = vars(main)
    namespace["check"] = lambda answer, name=None: answer
    namespace["display"] = lambda *shown, **more: None
    for line in answer.imports:
        try:
            exec(line, namespace)
        except Exception:  # what only the lesson's own figures need
            continue
    problems: list[str] = []
    for number, source in enumerate(answer.cells):
        filename = CELL if source is answer.cells[-1] else f"<cell {number}>"
        lines = source.splitlines(keepends=True)
        linecache.cache[filename] = (len(source), None, lines, filename)
        problems = run_cell(source, filename, namespace)
    return namespace, problems


def run_cell(source, filename, namespace) -> list[str]:
    try:
        exec(compile(source, filename, "exec", dont_inherit=True), namespace)
    except BaseException as error:
        if type(error).__name__ == "TimeUp":  # of the caller's, not the cell's
            raise
        own = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == filename
        ]
        at = getattr(error, "lineno", None) or (own[-1].lineno if own else None)
        where = f" (line {at})" if at else ""
        text = _text(error)
        return [f"The cell itself raised {type(error).__name__}{where}: {text}"]
    return []


def _text(error) -> str:
    try:
        return " ".join(str(error).split())[:300]
    except BaseException:
        return "(and no text)"


def _offer_parts(answer: Answer):
    """`from my_transformer import x` finds parts of earlier lessons, and only these."""
    package = ModuleType("my_transformer")
    package.__path__ = []

    def find(name):
        if name not in answer.parts:
            raise AttributeError(f"`{name}` is no part of an earlier lesson")
        return getattr(_module(answer.parts[name]), name)

    def _module(slug):
        full = f"my_transformer.{slug}"
        if full not in sys.modules:
            made = ModuleType(full)
            sys.modules[full] = made
            source = re.sub(
                r"(?m)^from solutions\.(\w+) import (.*)$",
                r"from my_transformer import \2",
                answer.modules[slug],
            )
            exec(compile(source, f"<{full}>", "exec"), vars(made))
        return sys.modules[full]

    package.__getattr__ = find
    sys.modules["my_transformer"] = package
    sys.modules["utils.check"] = _Checks("utils.check")


class _Checks(ModuleType):
    """Stands in for `utils.check`: a cell that calls its own check gains nothing."""

    @staticmethod
    def check(answer, name=None):
        return answer
