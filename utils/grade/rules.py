"""What the text of an answer must not do: reach for the reference, or change torch.

A look at the text cannot be complete; it gives the plain cases a name. What it does
not see meets the blind run, which has no reference to reach for.
"""

import ast

from utils.grade.submissions import parse

MODULES = {
    "utils": "the course's own tools, which hold the checks",
    "solutions": "the reference answers",
    "tests": "the course's tests",
    "builtins": "Python's own names",
    "ctypes": "the memory of the process",
    "gc": "every object of the process",
    "importlib": "modules by their files",
    "inspect": "the source of other code",
    "linecache": "the source of other code",
    "pkgutil": "modules by their files",
    "runpy": "modules by their files",
}
CALLS = {"__import__", "breakpoint", "compile", "eval", "exec", "open"}
ATTRIBUTES = {
    "__builtins__",
    "__closure__",
    "__code__",
    "__globals__",
    "__loader__",
    "__spec__",
    "__subclasses__",
    "_getframe",
    "f_back",
    "f_globals",
    "f_locals",
    "gi_frame",
    "read_bytes",
    "read_text",
    "tb_frame",
}
SYS = {"modules", "path", "meta_path", "settrace", "setprofile"}
HARMLESS = ("from utils.check import check",)


def broken(source: str, lesson) -> list[str]:
    """What an exercise cell does that no answer needs, a sentence each."""
    tree = parse(source)
    if tree is None:
        return []
    imported = (_imported(tree) | {"torch", "nn", "F", "math"}) - _own(tree)
    found = []
    for node in ast.walk(tree):
        reason = _reason(node, imported, lesson)
        if reason and reason not in found:
            found.append(reason)
    return found


def _reason(node, imported, lesson) -> str | None:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return _of_import(node, lesson)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
        if name in CALLS:
            return f"It calls `{name}`."
        if name in ("setattr", "delattr") and _root(node.args[:1]) in imported:
            return f"It changes `{ast.unparse(node.args[0])}`, which is not its own."
    written = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
    if written and not isinstance(node, ast.Name) and _root([node]) in imported:
        return f"It changes `{ast.unparse(node)}`, which is not its own."
    if isinstance(node, ast.Attribute) and (
        node.attr in ATTRIBUTES or (_root([node]) == "sys" and node.attr in SYS)
    ):
        return f"It uses `{node.attr}`."
    if isinstance(node, ast.Constant) and node.value in ATTRIBUTES:
        return f"It names `{node.value}`."
    return None


def _of_import(node, lesson) -> str | None:
    if ast.unparse(node) in HARMLESS:
        return None
    if isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
    else:
        modules = [alias.name for alias in node.names]
    for module in modules:
        package, _, rest = module.partition(".")
        if package in MODULES:
            return f"It imports `{module}`: {MODULES[package]}."
        if package == "my_transformer" and rest:
            return f"It imports `{module}`: import parts from `my_transformer` itself."
        if package == "my_transformer" and isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name in lesson.exercises:
                    return (
                        f"It imports `{alias.name}`, which this lesson asks for. Use "
                        "the one of your notebook."
                    )
    return None


def _imported(tree) -> set[str]:
    """The names that imports bind in this cell."""
    return {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }


def _own(tree) -> set[str]:
    """The names that the cell uses for values of its own."""
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    } | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def _root(nodes) -> str | None:
    """`torch` of `torch.nn.functional.softmax`."""
    node = nodes[0] if nodes else None
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
