"""Saves an answer that has passed, with what its cell defines and it needs."""

import ast
import builtins
import inspect
import linecache
import symtable
import sys
from collections.abc import Callable
from types import ModuleType

from utils import session, syllabus
from utils.imports import IMPORT, import_lines
from utils.parts import files
from utils.parts.finding import reference_wanted


class NotSaved(Exception):
    """Why a part that passed could not be saved, as a sentence."""


def save(name: str, answer, passes: Callable | None = None) -> list[str]:
    """Save an answer that passed; returns what the learner should be told.

    passes: called with the answer as it was saved, it returns None, or a sentence on
        what is wrong with it.
    """
    if session.lesson is None or session.solved or reference_wanted():
        return []
    lesson = syllabus.lesson_of(name)
    if lesson is None:
        return []
    if lesson.file != session.lesson:
        return [f"Not saved: `{name}` belongs to {lesson.file}, check it there."]
    file = f"my_transformer/{lesson.slug}.py"
    try:
        with files.one_at_a_time():
            text = _with_part(name, answer, lesson)
            _stands_alone(name, text, lesson, passes)
            files.write(lesson, text)
    except NotSaved as reason:
        return [f"Not saved for later lessons: {reason}"]
    except files.Unusable as problem:
        return [
            f"Not saved for later lessons: {file} {problem}. Mend it or give it "
            "another name, then run this check again; it was left as it is."
        ]
    except TimeoutError:
        return ["Not saved: another notebook is saving a part. Run this check again."]
    except OSError as error:
        problem = f"{file} cannot be written ({error.strerror})."
        return [f"Not saved for later lessons: {problem}"]
    sys.modules.pop(f"my_transformer.{lesson.slug}", None)
    return [f"Saved in `{file}` for the lessons to come."]


def _with_part(name, answer, lesson) -> str:
    """The lesson's file with this part in it."""
    imports, blocks = files.read(lesson)
    block, own_imports = _excerpt(name, _cell_of(name, answer))
    blocks[name] = block
    _no_name_twice(name, blocks)
    _no_import_twice(imports, own_imports, name, blocks)
    of_lesson = {bound: line for line in lesson.imports for bound in _bound_in(line)}
    known = of_lesson | imports | own_imports
    for free in sorted(_free_names("\n".join(blocks.values()))):
        if free in known:
            continue
        if syllabus.lesson_of(free) is None:
            raise NotSaved(
                f"it uses `{free}`, which another cell defines. Move that into the "
                "exercise cell and run both again."
            )
        known[free] = f"from my_transformer import {free}"
    return _assembled(lesson, known, blocks)


# What belongs to a part ---------------------------------------------------------------


def _cell_of(name, answer) -> str:
    """The source of the cell that defined `answer`."""
    function = inspect.unwrap(answer)
    if isinstance(function, type):
        own = [
            inspect.unwrap(getattr(m, "fget", None) or getattr(m, "__func__", m))
            for m in vars(function).values()
        ]
        function = next((f for f in own if hasattr(f, "__code__")), None)
    elif hasattr(function, "func"):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        raise NotSaved(f"`{name}` is not defined in a cell of this notebook.")
    source = "".join(linecache.getlines(code.co_filename))
    if not source or function.__module__ != "__main__":
        raise NotSaved(f"the cell that defines `{name}` was not found; run it again.")
    return source


def _excerpt(name: str, source: str) -> tuple[str, dict[str, str]]:
    """From a cell: the definitions that `name` needs, and the imports that they use."""
    definitions, imports = {}, {}
    for node in ast.parse(source).body:
        if isinstance(node, IMPORT):
            imports.update(import_lines(node))
        elif not _is_check(node):
            for bound in _bound_by(node):
                definitions.setdefault(bound, []).append(node)
    if name not in definitions:
        raise NotSaved(f"the cell that defines `{name}` was not found; run it again.")
    needed, free, waiting = [], set(), [name]
    while waiting:
        wanted = waiting.pop()
        free.add(wanted)
        for node in definitions.get(wanted, []):
            if node not in needed:
                needed.append(node)
                waiting += _free_names(ast.unparse(node)) - {wanted}
    used = {bound: line for bound, line in imports.items() if bound in free}
    for bound, line in used.items():
        if line.split()[1].split(".")[0] in ("utils", "solutions"):
            raise NotSaved(
                f"it uses `{bound}` from the course's own tools; your parts must stand "
                "without them."
            )
    needed.sort(key=lambda node: node.lineno)
    lines = source.splitlines()
    return "\n\n\n".join(_text_of(node, lines) for node in needed), used


def _is_check(node) -> bool:
    """Is this the line `x = check(x)`, put into the exercise's own cell?"""
    called = getattr(getattr(node, "value", None), "func", None)
    return isinstance(node, ast.Assign) and getattr(called, "id", None) == "check"


def _text_of(node, lines) -> str:
    """A statement's own lines, with the comments that stand directly above it."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    return "\n".join(lines[first - 1 : node.end_lineno])


def _bound_by(node) -> set[str]:
    """The names that a statement defines or changes (`f.cache = {}` changes `f`)."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    changed = [n for each in targets if each is not None for n in ast.walk(each)]
    names = {n.id for n in changed if isinstance(n, ast.Name)}
    return names | _bound_in(ast.unparse(node))


def _bound_in(source: str) -> set[str]:
    """The names that a piece of code binds at its top level."""
    symbols = symtable.symtable(source, "part", "exec").get_symbols()
    return {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}


def _free_names(source: str) -> set[str]:
    """The names that a piece of code takes from outside, built-in ones excepted."""
    free = set()

    def visit(table):
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            outside = not symbol.is_assigned() if top else symbol.is_global()
            if symbol.is_referenced() and outside:
                free.add(symbol.get_name())
        for child in table.get_children():
            visit(child)

    visit(symtable.symtable(source, "part", "exec"))
    free -= _bound_in(source)
    return {n for n in free if not hasattr(builtins, n) and not n.startswith("__")}


# What the file becomes ----------------------------------------------------------------


def _no_name_twice(name, blocks) -> None:
    """A helper must not replace another part's helper of the same name."""
    own = _definitions(blocks[name])
    for other, code in blocks.items():
        for bound, text in _definitions(code).items() if other != name else ():
            if own.get(bound, text) != text:
                raise NotSaved(
                    f"`{bound}` is defined for `{other}` too, in another way. Give one "
                    "of the two another name."
                )


def _definitions(block) -> dict[str, str]:
    body = ast.parse(block).body
    return {bound: ast.unparse(n) for n in body for bound in _bound_by(n)}


def _no_import_twice(imports, own, name, blocks) -> None:
    """One name stands for one thing in all parts of a file."""
    others = _free_names("\n".join(code for n, code in blocks.items() if n != name))
    for bound in own.keys() & imports.keys() & others:
        if _imported(own[bound], bound) is not _imported(imports[bound], bound):
            raise NotSaved(
                f"another part of this file uses `{imports[bound]}`, and this one "
                f"`{own[bound]}`. Import one of the two under another name."
            )


def _imported(line, bound):
    namespace = {}
    exec(line, namespace)
    return namespace[bound]


def _assembled(lesson, imports, blocks) -> str:
    order = list(lesson.exercises)
    names = sorted(blocks, key=lambda n: order.index(n) if n in order else len(order))
    body = "".join(f"\n\n# part: {name}\n{blocks[name]}\n" for name in names)
    wanted = _free_names(body)
    groups: dict[int, list[str]] = {}
    lines = {line for bound, line in imports.items() if bound in wanted}
    for line in sorted(lines, key=lambda line: (not line.startswith("import"), line)):
        groups.setdefault(_importance(line), []).append(line)
    head = "\n\n".join("\n".join(groups[each]) for each in sorted(groups))
    title = (
        f'"""Lesson {lesson.number}, {lesson.title}: your parts.\n\n'
        "A check that passes writes its part anew, down to the next `# part:` line.\n"
        '"""\n'
    )
    return title + (f"\n{head}\n" if head else "") + body


def _importance(line) -> int:
    """Python's own modules first, the learner's last."""
    package = line.split()[1].split(".")[0]
    own = package == "my_transformer"
    return 2 if own else int(package not in sys.stdlib_module_names)


def _stands_alone(name, text, lesson, passes) -> None:
    """The file as it would be saved gives a part that passes its check."""
    module = ModuleType(f"my_transformer.{lesson.slug}")
    module.__package__ = "my_transformer"
    filename = f"my_transformer/{lesson.slug}.py as it would be saved"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    try:
        exec(compile(text, filename, "exec"), vars(module))
    except Exception as error:
        raise NotSaved(
            f"taken out of this notebook it fails ({type(error).__name__}: {error}). "
            "Does it use something that only exists here?"
        ) from error
    wrong = passes(getattr(module, name)) if passes else None
    if wrong is not None:
        raise NotSaved(
            f"taken out of this notebook it no longer passes ({wrong}). Does it depend "
            "on a value that only exists here?"
        )
