"""Small errors put into reference answers, one each, to try the automatic checks on.

`mutants` lists the mutants of a function or class, `build` makes one callable. An
operator is a function of a node and its place that yields what the node could be
replaced by; `OPERATORS` lists them all, and `mutants` applies each of them to each node
between the lines BEGIN SOLUTION and END SOLUTION.

Some mutants never return (`while` loops): whoever runs them needs a time limit.
"""

import ast
import builtins
import copy
import linecache
import math
import re
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Mutant:
    """An answer with one edit.

    name: line, operator and edit, such as "12 compare a < b → a <= b"; unique.
    source: the whole function or class after the edit, without docstrings.
    line: where the edit is, counted from the answer's first line, which is 1.
    """

    name: str
    source: str
    line: int


@dataclass(frozen=True)
class Place:
    """What an operator may have to know about the surroundings of a node."""

    parent: ast.AST | None
    arguments: tuple[str, ...]  # positional ones of the enclosing function, no `self`
    attributes: dict[str, tuple[str, ...]]  # owner, such as "self", → its attributes


Nodes = Iterator[ast.AST]

# What is exchanged for what -----------------------------------------------------------

ARITHMETIC = {
    ast.Add: [ast.Sub],
    ast.Sub: [ast.Add],
    ast.Mult: [ast.Div, ast.Add],
    ast.Div: [ast.Mult, ast.FloorDiv],
    ast.FloorDiv: [ast.Div, ast.Mult],
    ast.Mod: [ast.FloorDiv],
    ast.Pow: [ast.Mult],
    ast.MatMult: [ast.Mult],
    ast.BitAnd: [ast.BitOr, ast.BitXor],
    ast.BitOr: [ast.BitAnd, ast.BitXor],
}
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)
COMPARISONS = {
    ast.Lt: [ast.LtE, ast.Gt, ast.Eq],
    ast.LtE: [ast.Lt, ast.GtE, ast.Eq],
    ast.Gt: [ast.GtE, ast.Lt, ast.Eq],
    ast.GtE: [ast.Gt, ast.LtE, ast.Eq],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
EITHER_WAY = (
    "max min, maximum minimum, amax amin, argmax argmin, any all, sum mean, sin cos, "
    "tril triu, zeros ones, zeros_like ones_like, new_zeros new_ones, sqrt rsqrt, "
    "tanh sigmoid, stack cat, exp exp2, log log2, mul_ div_, add_ sub_, randn rand"
)
ONE_WAY = (
    "softmax log_softmax, softmax sigmoid, exp expm1, log log1p, cumsum cumprod, "
    "square abs, erf tanh, relu tanh, norm sum, orthogonal_ zeros_, normal_ zeros_, "
    "index_add index_copy"
)
FUNCTIONS: dict[str, list[str]] = {}  # function → those that stand in for it
for pair in (EITHER_WAY + ", " + ONE_WAY).split(", "):
    FUNCTIONS.setdefault(pair.split()[0], []).append(pair.split()[1])
for pair in EITHER_WAY.split(", "):
    FUNCTIONS.setdefault(pair.split()[1], []).append(pair.split()[0])
SIGNED = ("exp", "exp2", "sigmoid", "tanh", "sin", "cos", "softmax")
CHOOSING = ("max", "min", "maximum", "minimum", "where")  # any argument could be it
# Owners of functions, not values: without the call, `torch.exp(x)` is x, not torch.
OWNERS = {"torch", "nn", "math", "regex", "tl", "triton", "os"}
OWNERS |= {"self", "ctx", "model", "block", "part", "cache"}
PLAIN = {"range", "super", "isinstance", "enumerate", "zip", "len", "getattr"}
CONFIGS = ("c", "config", "self.config", "model.config")  # their attributes are sizes

# Making nodes -------------------------------------------------------------------------


def _with(node, **fields) -> ast.AST:
    """The node with some fields changed."""
    new = type(node)(**{**dict(ast.iter_fields(node)), **fields})
    return ast.copy_location(new, node) if hasattr(node, "lineno") else new


def _without_one(items: list, first=0) -> Iterator[list]:
    """The list without one of its items, from number `first` on."""
    for i in range(first, len(items)):
        yield [*items[:i], *items[i + 1 :]]


def _expression(text: str, **parts) -> ast.AST:
    """The expression in `text`, with nodes in place of the names of `parts`."""

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node):
            return parts.get(node.id, node)

    return Fill().visit(ast.parse(text, mode="eval").body)


def _number(n) -> ast.AST:
    if n < 0:
        return ast.UnaryOp(ast.USub(), ast.Constant(-n))
    return ast.Constant(n)


def _literal(node):
    """The value of a number or truth value written out, such as −1; else None."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        return None if value is None else -value
    known = isinstance(node, ast.Constant) and isinstance(node.value, (int, float))
    return node.value if known else None


def _called(node) -> str | None:
    """`f` where the node is a call f(…) or x.f(…)."""
    if not isinstance(node, ast.Call):
        return None
    return getattr(node.func, "id", None) or getattr(node.func, "attr", None)


def _handed_over(node, parent) -> bool:
    """Is the node an argument of a call?"""
    call = isinstance(parent, ast.Call) and node is not parent.func
    return call or isinstance(parent, ast.keyword)


def _owner(node) -> ast.AST | None:
    """x where the node is a call of a method of a value, x.f(…); else None."""
    if not isinstance(node.func, ast.Attribute):
        return None
    root = node.func.value
    while isinstance(root, ast.Attribute) and ast.unparse(root.value) != "self":
        root = root.value
    return None if getattr(root, "id", None) in OWNERS else node.func.value


# The operators ------------------------------------------------------------------------


def _arithmetic(node, place) -> Nodes:
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        for op in ARITHMETIC.get(type(node.op), ()):
            yield _with(node, op=op())
    if isinstance(node, ast.BinOp) and isinstance(node.op, ORDERED):
        yield _with(node, left=node.right, right=node.left)
    if isinstance(node, ast.AugAssign):  # x += y → x = y
        yield ast.copy_location(ast.Assign([node.target], node.value), node)


def _operands(node, place) -> Nodes:
    """a + b → a and b, likewise for and, or; a link of a chain a < b < c dropped."""
    if isinstance(node, ast.BinOp):
        yield from (node.left, node.right)
    elif isinstance(node, ast.BoolOp):
        for values in _without_one(node.values):
            yield _with(node, values=values) if len(values) > 1 else values[0]
    elif isinstance(node, ast.Compare) and len(node.ops) > 1:
        ops, right = node.ops, node.comparators
        yield _with(node, left=right[0], ops=ops[1:], comparators=right[1:])
        yield _with(node, ops=ops[:-1], comparators=right[:-1])


def _signs(node, place) -> Nodes:
    """−, ~ and `not` dropped, or added where a sign is easily forgotten."""
    if isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        if not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
            yield _with(node, test=_expression("not x", x=node.test))
    elif isinstance(node, (ast.Return, ast.Assign)):
        call = isinstance(node, ast.Return) and isinstance(node.value, ast.Call)
        if call or isinstance(node.value, ast.BinOp):
            yield _with(node, value=_expression("-x", x=node.value))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        yield _with(node, left=_expression("~x", x=node.left))
        yield _with(node, right=_expression("~x", x=node.right))
    elif _called(node) in SIGNED:
        if _owner(node):
            x = _expression("-x", x=node.func.value)
            yield _with(node, func=_with(node.func, value=x))
        elif node.args:
            yield _with(node, args=[_expression("-x", x=node.args[0]), *node.args[1:]])
    elif "mask" in getattr(node, "id", "") and _handed_over(node, place.parent):
        yield _expression("~x", x=node)


def _comparisons(node, place) -> Nodes:
    if isinstance(node, ast.Compare):
        for i, old in enumerate(node.ops):
            for op in COMPARISONS[type(old)]:
                yield _with(node, ops=[*node.ops[:i], op(), *node.ops[i + 1 :]])


def _conditions(node, place) -> Nodes:
    """Conditions always true or false, `and` for `or`, a filter dropped."""
    if isinstance(node, ast.If):
        yield _with(node, test=ast.Constant(True))
        if node.orelse:  # without, it is as if the statement were removed
            yield _with(node, test=ast.Constant(False))
    elif isinstance(node, ast.While):  # never `while True`
        yield _with(node, test=ast.Constant(False))
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        yield _with(node, generators=[_with(c, ifs=[]) for c in node.generators])


def _constants(node, place) -> Nodes:
    value = _literal(node)
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield from (_number(value + 1), _number(value - 1))
    elif isinstance(value, float):
        yield from (_number(value * 2), ast.Constant(0.0), ast.Constant(1.0))


def _arguments(node, place) -> Nodes:
    """The first two arguments of a call exchanged, or one dropped."""
    if isinstance(node, ast.Call):
        if len(node.args) > 1:
            yield _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
        for args in _without_one(node.args, first=1):
            yield _with(node, args=args)
        for keywords in _without_one(node.keywords):
            yield _with(node, keywords=keywords)


def _calls(node, place) -> Nodes:
    """A call dropped: x.f(…) → x, f(x) → x; of max(x, y) and the like any argument."""
    if not isinstance(node, ast.Call) or isinstance(place.parent, ast.Expr):
        return
    if _owner(node):
        yield node.func.value
    elif _called(node) not in PLAIN:
        last = None if _called(node) in CHOOSING else 1
        yield from (x for x in node.args[:last] if not isinstance(x, ast.Starred))


def _functions(node, place) -> Nodes:
    """Another function called: cos for sin, or min= for max= among the keywords."""
    for name in FUNCTIONS.get(_called(node), ()):
        func, args, keywords = node.func, node.args, node.keywords
        if isinstance(func, ast.Name):
            if hasattr(builtins, name):
                yield _with(node, func=_with(func, id=name))
        elif ast.unparse(func.value) != "math" or hasattr(math, name):
            if (_called(node), name) == ("softmax", "sigmoid"):  # it takes no dim
                args, keywords = args[:1], []
            func = _with(func, attr=name)
            yield _with(node, func=func, args=args, keywords=keywords)
    if isinstance(node, ast.keyword) and node.arg in ("min", "max"):
        yield _with(node, arg="max" if node.arg == "min" else "min")


def _statements(node, place) -> Nodes:
    """A statement removed. An `if` goes as a whole, and so does a check that raises."""
    removable = (ast.Assign, ast.AugAssign, ast.Expr, ast.Delete)
    removable += (ast.Break, ast.Continue)
    if isinstance(node, removable) or (isinstance(node, ast.If) and not node.orelse):
        yield ast.copy_location(ast.Pass(), node)


def _subscripts(node, place) -> Nodes:
    """Bounds of slices dropped or moved by one, indices moved by one."""
    if isinstance(node, ast.Slice):
        for field in ("lower", "upper", "step"):
            bound = getattr(node, field)
            if bound is not None:
                yield _with(node, **{field: None})
            if bound is not None and _literal(bound) is None:  # else see _constants
                yield _with(node, **{field: _expression("x + 1", x=bound)})
                yield _with(node, **{field: _expression("x - 1", x=bound)})
    elif isinstance(node, ast.Subscript):
        indices = getattr(node.slice, "elts", [node.slice])
        for i, index in enumerate(indices):
            for text in ("x + 1", "x - 1"):
                if isinstance(index, (ast.Name, ast.BinOp)):
                    moved = _expression(text, x=index)
                    moved = [*indices[:i], moved, *indices[i + 1 :]]
                    whole = ast.Tuple(moved) if len(moved) > 1 else moved[0]
                    yield _with(node, slice=whole)


def _tuples(node, place) -> Nodes:
    """Neighbours in a tuple or list exchanged: targets, results, indices, shapes."""
    if isinstance(node, (ast.Tuple, ast.List)):
        for i, (a, b) in enumerate(zip(node.elts, node.elts[1:], strict=False)):
            yield _with(node, elts=[*node.elts[:i], b, a, *node.elts[i + 2 :]])


def _names(node, place) -> Nodes:
    """An argument of the function replaced by the next one."""
    names = place.arguments
    known = isinstance(node, ast.Name) and node.id in names
    if known and isinstance(node.ctx, ast.Load):
        yield _with(node, id=names[(names.index(node.id) + 1) % len(names)])


def _attributes(node, place) -> Nodes:
    """self.w_q → self.w_k: attributes of the class, or sizes of a configuration."""
    if isinstance(node, ast.Attribute):
        siblings = place.attributes.get(ast.unparse(node.value), ())
        if node.attr in siblings:
            yield from (_with(node, attr=name) for name in siblings)


def _loops(node, place) -> Nodes:
    """A loop without its first or last round, or the other way round."""
    if _called(node) == "range":
        stop = 0 if len(node.args) == 1 else 1
        shorter = _expression("x - 1", x=node.args[stop])
        yield _with(node, args=[*node.args[:stop], shorter, *node.args[stop + 1 :]])
        if getattr(getattr(place.parent, "target", None), "id", "") != "_":
            start = _expression("x + 1", x=node.args[0]) if stop else ast.Constant(1)
            yield _with(node, args=[start, *node.args[stop:]])
            yield _expression("reversed(x)", x=node)
    elif isinstance(node, ast.For) and _called(node.iter) != "range":
        yield _with(node, iter=_expression("list(x)[1:]", x=node.iter))
        yield _with(node, iter=_expression("list(x)[:-1]", x=node.iter))


OPERATORS = {
    "arithmetic": _arithmetic,
    "operand": _operands,
    "sign": _signs,
    "compare": _comparisons,
    "condition": _conditions,
    "constant": _constants,
    "argument": _arguments,
    "call": _calls,
    "function": _functions,
    "statement": _statements,
    "subscript": _subscripts,
    "tuple": _tuples,
    "name": _names,
    "attribute": _attributes,
    "loop": _loops,
}

# Applying them ------------------------------------------------------------------------


def mutants(source: str) -> list[Mutant]:
    """All mutants of a function or class, in the order of its nodes.

    Args:
        source: its text, with comments. Only nodes in its marked lines are changed.

    Returns:
        Mutants that compile and whose sources differ from the original's and from each
        other's.
    """
    tree = _without_docstrings(ast.parse(source))
    marked = _marked_lines(source)
    seen, names, found = {ast.unparse(tree)}, {}, []
    for node, place in _walk(tree, Place(None, (), _assigned(tree))):
        if not {getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)} <= marked:
            continue
        for operator, replacements in OPERATORS.items():
            for new in replacements(node, place):
                # What deepcopy finds in its memo it takes for the copy.
                text = ast.unparse(copy.deepcopy(tree, {id(node): new}))
                kept = not _is_empty(new) or _is_empty(node)
                if text not in seen and _compiles(text) and kept:
                    name = f"{node.lineno} {operator} {_edit(node, new)}"
                    names[name] = names.get(name, 0) + 1
                    name += f" ({names[name]})" if names[name] > 1 else ""
                    found.append(Mutant(name, text, node.lineno))
                seen.add(text)
    return found


def _is_empty(node) -> bool:
    """Is it `torch.empty(…)`?

    A mutant that puts it in the place of something else leaves memory as it was found:
    what is right or wrong of that changes from run to run.
    """
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("torch.empty")


def build(mutant: Mutant, module: ModuleType):
    """The mutant as a function or class, in a copy of the module that it belongs to.

    Its source can be inspected; of a class, before Python 3.13, that of its methods.
    """
    name = ast.parse(mutant.source).body[0].name
    number = zlib.crc32(mutant.source.encode())
    file = f"<mutant {number:08x} of {module.__name__}.{name}>"
    lines = mutant.source.splitlines(keepends=True)
    linecache.cache[file] = (len(mutant.source), None, lines, file)
    space = ModuleType(module.__name__)
    space.__dict__.update(vars(module))
    with warnings.catch_warnings(action="ignore"):
        exec(compile(mutant.source, file, "exec"), space.__dict__)
    return getattr(space, name)


def _walk(node, place) -> Iterator[tuple[ast.AST, Place]]:
    """All nodes that may be changed, each with its place. No messages or signatures."""
    yield node, place
    arguments, children = place.arguments, ast.iter_child_nodes(node)
    if isinstance(node, (ast.Raise, ast.JoinedStr)) or _literal(node) is not None:
        return
    if isinstance(node, ast.FunctionDef):
        arguments = tuple(a.arg for a in [*node.args.posonlyargs, *node.args.args])
        arguments = tuple(a for a in arguments if a not in ("self", "ctx"))
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        children = node.body
    elif isinstance(node, ast.Lambda):
        children = [node.body]
    for child in children:
        yield from _walk(child, Place(node, arguments, place.attributes))


def _assigned(tree) -> dict[str, tuple[str, ...]]:
    """For each owner the attributes that are assigned, or, of a config, used at all."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if isinstance(node.ctx, ast.Store) or owner in CONFIGS:
                found.setdefault(owner, set()).add(node.attr)
    return {owner: tuple(sorted(names)) for owner, names in found.items()}


def _marked_lines(source) -> set[int]:
    """The lines, from 1, between BEGIN SOLUTION and END SOLUTION."""
    inside, marked = False, set()
    for number, line in enumerate(source.splitlines(), start=1):
        mark = re.match(r"\s*### (BEGIN|END) SOLUTION", line)
        inside = mark[1] == "BEGIN" if mark else inside
        if inside and not mark:
            marked.add(number)
    return marked


def _without_docstrings(tree):
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _compiles(source) -> bool:
    with warnings.catch_warnings(action="ignore"):  # such as `0 is None`
        try:
            compile(source, "<mutant>", "exec")
        except SyntaxError:
            return False
    return True


def _edit(old, new, width=32) -> str:
    """Before → after: short nodes whole, of long ones what differs, with a word."""
    texts = [" ".join(ast.unparse(node).split()) for node in (old, new)]
    if max(map(len, texts)) > width:
        a, b = (re.findall(r"\w+|[<>=!*/]+|.", text) for text in texts)
        head = _common(a, b)
        tail = _common(a[head:][::-1], b[head:][::-1])
        texts = ["".join(x[head : len(x) - tail]) for x in (a, b)]
        while head + tail and not all(re.search(r"\w", text) for text in texts):
            head, tail = (head - 1, tail) if head else (head, tail - 1)
            texts = ["".join(x[head : len(x) - tail]) for x in (a, b)]
    texts = (t if len(t) <= width else t[: width - 1] + "…" for t in texts)
    return " → ".join(text.strip() for text in texts)


def _common(a, b) -> int:
    """How many items two sequences have in common at their beginning."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
