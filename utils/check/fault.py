"""A known mistake, as an edit of the reference answer, and the answer that it makes."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from utils.check.recording import register_source

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"


@dataclass(frozen=True, eq=False)
class Fault:
    """A short name, a sentence for the learner, and the edits that make the mistake.

    edits: pairs of an old text, which stands exactly once in the solution, and a new.
    answer: code instead, where the mistake is another algorithm and no edit.
    edited: the name of the function or class that is edited, if it is not the
        exercise's own: one that the exercise calls, or a part of an integration check.
    """

    name: str
    sentence: str
    edits: tuple[tuple[str, str], ...] = ()
    answer: object = None
    edited: str | None = None


def faulty_answer(fault: Fault, exercise) -> object:
    """The wrong answer that `fault` stands for, to be checked like a learner's.

    For an integration check: all of its parts by name, one of them wrong.
    """
    if exercise.parts is None:
        return fault.answer or _edited(fault, exercise.lesson, exercise.name)
    if fault.answer is not None:
        return {**exercise.reference, **fault.answer}
    part = fault.edited
    return {**exercise.reference, part: _edited(fault, exercise.parts[part], part)}


def _edited(fault, lesson, name):
    """`name` of a solutions module, after the edits."""
    edited = fault.edited or name
    home = _home(lesson, edited)
    before = source_of(home, edited)
    text = module_text(home).replace(before, apply(fault.edits, before))
    module = _executed(home, text, fault.name)
    if home != lesson:
        caller = _executed(lesson, module_text(lesson), fault.name)
        setattr(caller, edited, getattr(module, edited))
        module = caller
    return getattr(module, name)


def _home(lesson, name) -> str:
    """The lesson in which `name` is defined, `lesson` itself or one before it."""
    value = getattr(import_module(f"solutions.{lesson}"), name)
    return value.__module__.rpartition(".")[2]


def _executed(lesson, text, label) -> ModuleType:
    """A module of its own from the text of a solutions module."""
    module = ModuleType(f"solutions.{lesson}")
    filename = f"<{lesson}, {label}>"
    register_source(filename, text)
    exec(compile(text, filename, "exec", dont_inherit=True), vars(module))
    return module


@cache
def module_text(lesson: str) -> str:
    return Path(import_module(f"solutions.{lesson}").__file__).read_text("utf-8")


@cache
def _sources(lesson: str) -> dict[str, str]:
    """The text of each function and class of a solutions module."""
    text = module_text(lesson)
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            last = node.end_lineno
            if lines[last : last + 1] and lines[last].strip() == END:
                last += 1  # a comment, so not in the node
            found[node.name] = "\n".join(lines[first - 1 : last]) + "\n"
    return found


def source_of(lesson: str, name: str) -> str:
    """The text of a function or class of `solutions/<lesson>.py`."""
    return _sources(lesson)[name]


def solution_lines(source: str) -> str:
    """What stands between the markers; all of it where there are none."""
    inside = re.findall(rf"{BEGIN}\n(.*?)^[ ]*{END}", source, re.DOTALL | re.MULTILINE)
    return "\n".join(inside) if inside else source


def apply(edits, source: str) -> str:
    """The source after the edits; each old text must stand once in the solution."""
    for old, new in edits:
        if solution_lines(source).count(old) != 1:
            raise LookupError(f"`{old}` does not stand exactly once in the solution")
        before, marker, solution = source.partition(BEGIN)
        source = before + marker + solution.replace(old, new, 1)
        if not marker:
            source = before.replace(old, new, 1)
    return source


def problems(exercise) -> Iterator[str]:
    """What the build refuses: an edit whose text no longer stands in the reference."""
    for fault in exercise.faults:
        if fault.answer is not None:
            continue
        edited = fault.edited or exercise.name
        lesson = (exercise.parts or {}).get(edited, exercise.lesson)
        try:
            apply(fault.edits, source_of(_home(lesson, edited), edited))
        except LookupError as problem:
            yield (
                f"utils/faults/{exercise.lesson}.py: {exercise.name}, "
                f"{fault.name}: {problem}"
            )
