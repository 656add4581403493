"""The learner's own parts: saved in `my_transformer/` when they pass, found later.

A part is saved with what its cell defines and it needs. The file is plain Python:
imports, then one block a part, each behind a `# part: name` line.
"""

import ast
import importlib
import inspect
import linecache
import os
import re
import symtable
import sys
from pathlib import Path
from types import ModuleType

from utils import syllabus
from utils.errors import PartMissing

FOLDER = syllabus.ROOT / "my_transformer"
PART = re.compile(r"^# part: (\w+)\n", re.MULTILINE)


class NotSaved(Exception):
    """Why a part that passed could not be saved, as a sentence."""


def reference_wanted() -> bool:
    """Are earlier lessons' parts taken from the reference in this process?

    `COURSE_PARTS` decides, `mine` or `reference`. Without it: the reference in
    strict mode, under nbgrader and under pytest.
    """
    choice = os.environ.get("COURSE_PARTS")
    if choice in ("mine", "reference"):
        return choice == "reference"
    return any(
        os.environ.get(name)
        for name in ("COURSE_STRICT", "NBGRADER_EXECUTION", "PYTEST_VERSION")
    )


# Finding ---------------------------------------------------------------------------


def find(name: str):
    """The learner's own part called `name`, or the reference until theirs passes.

    In a copy without reference answers, what is not written is a stand-in that says
    so when it is used.
    """
    from utils.check.exercise import has_reference, reference_part

    lesson = syllabus.lesson_of(name)
    if lesson is None:
        raise AttributeError(f"`{name}` is no part of this course")
    reference = has_reference(lesson.slug)
    if not (reference and reference_wanted()):
        own = _load_own(lesson.slug, name)
        if own is not None:
            return own
        where = f"until yours passes in {lesson.file}"
        _say(f"{name}: {'the reference' if reference else 'missing'}, {where}.")
    return reference_part(lesson.slug, name) if reference else missing(name)


class Missing(type):
    """The type of a stand-in for a part that nobody has written.

    The stand-in is a class, because a lesson may call a part, ask it for an
    attribute or inherit from it. The first two raise `PartMissing`.
    """

    def __call__(cls, *arguments, **keywords):
        raise PartMissing(cls.sentence)

    def __getattr__(cls, name):
        if name.startswith("_"):  # somebody looks at it, nobody uses it
            raise AttributeError(name)
        raise PartMissing(cls.sentence)


def missing(name: str) -> Missing:
    """What goes in the place of `name` until somebody writes it."""
    lesson = syllabus.lesson_of(name)
    where = f" (lesson {lesson.file})" if lesson else ""
    sentence = (
        f"`{name}` is not written yet{where}, and it is needed here.\n"
        "This copy of the course holds no reference answers."
    )
    return Missing(name, (), {"sentence": sentence, "__module__": "my_transformer"})


_said: set[str] = set()


def _say(line: str) -> None:
    """Print a line once in a process."""
    if line not in _said:
        _said.add(line)
        print(line)


def _load_own(slug: str, name: str):
    path = FOLDER / f"{slug}.py"
    if name not in _defined_in(path):
        return None
    try:
        return getattr(importlib.import_module(f"my_transformer.{slug}"), name)
    except ModuleNotFoundError as error:
        _say(
            f"my_transformer/{path.name} needs {error.name}, which this Python "
            f"({sys.executable}) lacks. Choose the course's kernel."
        )
        return None
    except Exception as error:
        _say(
            f"my_transformer/{path.name} cannot be loaded ({type(error).__name__}: "
            f"{error}). The reference stands in; mend the file, or delete it and run "
            "that lesson again."
        )
        return None


def _defined_in(path: Path) -> set[str]:
    """The names of the parts in a file, without running it."""
    if not path.is_file():
        return set()
    try:
        source = path.read_text(encoding="utf-8")
        ast.parse(source)
    except (SyntaxError, ValueError) as error:
        _say(
            f"my_transformer/{path.name} is no valid Python any more ({error}). The "
            "reference stands in; mend the file, or delete it and run that lesson "
            "again."
        )
        return set()
    return set(PART.findall(source))


def saved_names() -> set[str]:
    """Every part that the learner has saved."""
    files = [FOLDER / f"{lesson.slug}.py" for lesson in syllabus.lessons()]
    return set().union(*map(_defined_in, files))


def whose(part) -> str:
    """“your `x`” or “the reference `x`”, for the experiments to say what ran."""
    from utils import session

    if isinstance(part, Missing):
        return f"the missing `{part.__name__}`"
    module = getattr(part, "__module__", None) or ""
    name = getattr(part, "__name__", type(part).__name__)
    theirs = not (session.solved or module.startswith("solutions."))
    return f"{'your' if theirs else 'the reference'} `{name}`"


# Saving ----------------------------------------------------------------------------


def save(name: str, answer) -> list[str]:
    """Save an answer that passed. Returns what the learner should be told."""
    from utils import session

    if session.lesson is None or session.solved or reference_wanted():
        return []
    lesson = syllabus.lesson_of(name)
    if lesson is None:
        return []
    if lesson.file != session.lesson:
        return [f"Not saved: `{name}` belongs to {lesson.file}, check it there."]
    try:
        _save(name, answer, lesson)
    except NotSaved as reason:
        return [f"Not saved for later lessons: {reason}"]
    except OSError as error:
        return [
            f"Not saved for later lessons: my_transformer/{lesson.slug}.py cannot be "
            f"written ({error.strerror})."
        ]
    return [f"Saved in `my_transformer/{lesson.slug}.py` for the lessons to come."]


def _save(name, answer, lesson) -> None:
    path = FOLDER / f"{lesson.slug}.py"
    imports, blocks = _read(path)
    source, functions = _cell_of(name, answer)
    block, new_imports, free = _block(name, source)
    _no_name_twice(name, block, blocks)
    blocks[name] = block
    known = {**imports, **new_imports, **_imports_for(free, functions, blocks)}
    text = _assemble(lesson, known, blocks)
    _stands_alone(name, text, lesson.slug)
    temporary = path.with_suffix(".py.new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    sys.modules.pop(f"my_transformer.{lesson.slug}", None)


def _read(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The imports by the name that they bind, and the blocks by part."""
    if not path.exists():
        return {}, {}
    source = path.read_text(encoding="utf-8")
    pieces = PART.split(source)
    try:
        head = ast.parse(pieces[0]).body
        ast.parse(source)
    except SyntaxError as error:
        raise NotSaved(
            f"my_transformer/{path.name} is no valid Python any more (line "
            f"{error.lineno}). Mend or delete it, then run this check again; it was "
            "left as it is."
        ) from error
    imports = {}
    for node in head:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.update(_import_lines(node))
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            raise NotSaved(
                f"my_transformer/{path.name} holds lines above its first part that "
                f"the course did not write (line {node.lineno}). Move them into a part "
                "or delete them; the file was left as it is."
            )
    blocks = {n: b.strip("\n") for n, b in zip(pieces[1::2], pieces[2::2], strict=True)}
    return imports, blocks


def _import_lines(node) -> dict[str, str]:
    """An import statement as one line for each name that it binds."""
    lines = {}
    for alias in node.names:
        bound = alias.asname or alias.name.split(".")[0]
        single = (
            ast.Import([alias])
            if isinstance(node, ast.Import)
            else ast.ImportFrom(node.module, [alias], node.level)
        )
        lines[bound] = ast.unparse(single)
    return lines


def _cell_of(name, answer) -> tuple[str, dict]:
    """The source of the cell that defined `answer`, and the names it could see."""
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
    return source, function.__globals__


def _block(name, source):
    """From a cell: the definitions that `name` needs, imports, and names still free."""
    tree = ast.parse(source)
    definitions, imports = {}, {}
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.update(_import_lines(node))
        for bound in [] if _is_check(node) else _bound_by(node):
            definitions.setdefault(bound, []).append(node)
    if name not in definitions:
        raise NotSaved(f"the cell that defines `{name}` was not found; run it again.")
    needed, free, waiting = [], set(), [name]
    while waiting:
        wanted = waiting.pop()
        if wanted not in definitions:
            free.add(wanted)
            continue
        for node in definitions[wanted]:
            if node not in needed:
                needed.append(node)
                waiting += sorted(_free_names(ast.unparse(node)) - {wanted})
    needed.sort(key=lambda node: node.lineno)
    lines = source.splitlines()
    block = "\n\n\n".join(_text_of(node, lines) for node in needed)
    used = {bound: line for bound, line in imports.items() if bound in free}
    return block, used, free - set(used)


def _is_check(node) -> bool:
    """Is this the line `x = check(x)`, put into the exercise's own cell?"""
    called = getattr(getattr(node, "value", None), "func", None)
    return isinstance(node, ast.Assign) and getattr(called, "id", None) == "check"


def _no_name_twice(name, block, blocks) -> None:
    """A helper must not replace another part's helper of the same name."""
    own = {
        bound: ast.unparse(n) for n in ast.parse(block).body for bound in _bound_by(n)
    }
    for other, code in blocks.items():
        for node in ast.parse(code).body if other != name else []:
            for bound in _bound_by(node):
                if own.get(bound, ast.unparse(node)) != ast.unparse(node):
                    raise NotSaved(
                        f"`{bound}` is defined for `{other}` too, in another way. "
                        "Give one of the two another name."
                    )


def _bound_by(node) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [
        inner.id
        for target in targets
        if target is not None
        for inner in ast.walk(target)
        if isinstance(inner, ast.Name)
    ]


def _text_of(node, lines) -> str:
    """A statement's own lines, with the comments that stand directly above it."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    return "\n".join(lines[first - 1 : node.end_lineno])


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

    table = symtable.symtable(source, "part", "exec")
    visit(table)
    bound = {s.get_name() for s in table.get_symbols() if s.is_assigned()}
    builtin = vars(importlib.import_module("builtins"))
    return {n for n in free - bound if n not in builtin and not n.startswith("__")}


def _imports_for(free, functions, blocks) -> dict[str, str]:
    """An import line for each name that a block takes from the notebook."""
    lines = {}
    for name in sorted(free):
        if name in blocks:
            continue
        if name not in functions:
            raise NotSaved(f"it uses `{name}`, which is not defined in this notebook.")
        value = functions[name]
        module = getattr(value, "__module__", None)
        if isinstance(value, ModuleType):
            if value.__name__.split(".")[0] in ("utils", "solutions"):
                raise NotSaved(
                    f"it uses `{name}` from the course's own tools; your "
                    "parts must stand without them."
                )
            short = value.__name__.rpartition(".")[2]
            lines[name] = f"import {value.__name__}" + (
                "" if value.__name__ == name else f" as {name}"
            )
            if "." in value.__name__ and short == name:
                lines[name] = f"from {value.__name__.rpartition('.')[0]} import {name}"
        elif syllabus.lesson_of(getattr(value, "__name__", "")) is not None:
            lines[name] = _from_import("my_transformer", value.__name__, name)
        elif module not in (None, "__main__") and _is_at(module, value):
            lines[name] = _from_import(module, value.__name__, name)
        else:
            raise NotSaved(
                f"it uses `{name}`, which another cell defines. Move "
                "that into the exercise cell and run both again."
            )
    return lines


def _from_import(module, original, bound) -> str:
    renamed = "" if original == bound else f" as {bound}"
    return f"from {module} import {original}{renamed}"


def _is_at(module, value) -> bool:
    if module.split(".")[0] in ("utils", "solutions"):
        return False
    found = sys.modules.get(module)
    return getattr(found, getattr(value, "__name__", ""), None) is value


def _assemble(lesson, imports, blocks) -> str:
    order = {name: i for i, name in enumerate(lesson.exercises)}
    blocks = dict(sorted(blocks.items(), key=lambda item: order.get(item[0], 99)))
    body = "".join(f"\n\n# part: {name}\n{code}\n" for name, code in blocks.items())
    wanted = _free_names(body)
    lines = {line for bound, line in imports.items() if bound in wanted}

    def importance(line):
        package = line.split()[1].split(".")[0]
        own = package == "my_transformer"
        rank = 2 if own else int(package not in sys.stdlib_module_names)
        return rank, line.startswith("from"), line

    groups: dict[int, list[str]] = {}
    for line in sorted(lines, key=importance):
        groups.setdefault(importance(line)[0], []).append(line)
    head = "\n\n".join("\n".join(group) for group in groups.values())
    title = (
        f'"""Lesson {lesson.number}, {lesson.title}: your parts.\n\n'
        "A check that passes writes its part anew, down to the next `# part:` line.\n"
        '"""\n'
    )
    return title + (f"\n{head}\n" if head else "") + body


def _stands_alone(name, text, slug) -> None:
    """The file as it would be saved gives a part that passes its check."""
    from utils.check import evaluate

    module = ModuleType(f"my_transformer.{slug}")
    module.__package__ = "my_transformer"
    filename = f"my_transformer/{slug}.py as it would be saved"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    try:
        exec(compile(text, filename, "exec"), vars(module))
    except Exception as error:
        raise NotSaved(
            f"taken out of this notebook it fails ({type(error).__name__}: {error}). "
            "Does it use something that only exists here?"
        ) from error
    report = evaluate(getattr(module, name), name)
    if report.status != "passed":
        raise NotSaved(
            "taken out of this notebook it no longer passes "
            f"({' '.join(report.lines[:2])}). Does it depend on a value that only "
            "exists here?"
        )
