"""Reads the reference answers in `solutions/*.py`, and makes stubs of them."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from utils.check.fault import BEGIN, END


@dataclass(frozen=True)
class Answer:
    """A reference answer, as it stands and as a stub."""

    source: str
    stub: str


@cache
def answers(path: Path) -> dict[str, Answer]:
    """The functions and classes of a solutions module that have marked lines."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            source = "\n".join(lines[first - 1 : node.end_lineno])
            after = lines[node.end_lineno : node.end_lineno + 1]
            if after and after[0].strip() == END:  # a comment, so not in the node
                source += "\n" + after[0]
            if BEGIN in source:
                found[node.name] = Answer(source, stub(source))
    return found


def stub(source: str) -> str:
    """The source with each marked region replaced by `raise NotImplementedError`."""
    region = re.compile(
        rf"^([ ]*){BEGIN}\n.*?^[ ]*{END}$", flags=re.MULTILINE | re.DOTALL
    )
    return region.sub(r"\1raise NotImplementedError", source)
