"""Compiles the kernels of an answer for GPUs, on a machine that has none.

The interpreter runs what the compiler refuses: a `break` in a loop, a number that
becomes a tensor there. Once Triton interprets it cannot compile in the same process,
so another one does: it gets the kernel's text and what it was launched with.
"""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from functools import cache
from tempfile import TemporaryDirectory
from types import ModuleType

import torch

CAPABILITIES = (80, 90)
SECONDS = 8  # for all launches and GPUs together; what takes longer is not judged
NAME_IN_TRITON = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
IN_OTHER_WORDS = (  # what Triton says, and what it means
    (r"node type: Break", "a compiled loop runs to its end, with no `break` in it"),
    (
        r"Cannot access global variable (\w+)",
        "`{0}` is a global name; a kernel can use a number alone that is a "
        "`tl.constexpr`, `{0} = tl.constexpr(…)`, or that is handed over",
    ),
    (r"node type: Continue", "a compiled loop knows no `continue`"),
    (
        r"Loop-carried variable (\w+) has initial type (.+?) but is re-assigned to "
        r"(.+?) in loop",
        "`{0}` is {1} before the loop and {2} after a turn of it: a variable of a "
        "compiled loop keeps its shape and dtype",
    ),
)

CHILD = """
import json, sys, traceback
from triton._utils import find_paths_if
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError, compile
sys.path.insert(0, sys.argv[1])
import kernels

def kind_of(value):
    if isinstance(value, list):
        return tuple(map(kind_of, value))
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int) and value != 1:
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32" if isinstance(value, float) else "constexpr"

def problem(error):
    line = reason = None
    while isinstance(error, CompilationError):
        at = getattr(error.node, "lineno", 0)
        text = (error.src or "").split("\\n")
        if error.src and error.src in whole and 0 < at <= len(text):
            line = text[at - 1].strip()
        reason = error.error_message or reason
        error = error.__cause__
    return line, reason

whole = open(kernels.__file__, encoding="utf-8").read()
shared = 0
for launch in json.loads(sys.argv[2]):
    kernel = getattr(kernels, launch["kernel"])
    kinds, values = {}, {}
    for i, parameter in enumerate(kernel.params):
        value = launch["arguments"][parameter.name]
        kind = "constexpr" if parameter.is_constexpr else kind_of(value)
        kinds[parameter.name] = kind
        for path in find_paths_if(kind, lambda _, leaf: leaf == "constexpr"):
            at = value
            for step in path:
                at = at[step]
            values[i, *path] = at
    target = GPUTarget("cuda", launch["capability"], 32)
    try:
        made = compile(ASTSource(kernel, kinds, values), target, launch["options"])
    except CompilationError as error:
        print(json.dumps([launch["capability"], *problem(error)]))
        break
    shared = max(shared, made.metadata.shared)
else:
    print(json.dumps({"shared": shared}))
"""


class CannotTell(Exception):
    """What the kernel uses cannot be written down for another process."""


@contextmanager
def launches():
    """A list that fills with each interpreted launch: kernel, arguments, options."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    interpreted = getattr(interpreter, "InterpretedFunction", None)
    found = []
    if interpreted is None:
        yield found
        return
    run = interpreted.run

    def recorded(self, *given, grid, warmup, **named):
        options = {k: v for k, v in named.items() if k not in self.arg_names}
        arguments = {k: v for k, v in named.items() if k in self.arg_names}
        found.append((self.fn, given, arguments, options))
        return run(self, *given, grid=grid, warmup=warmup, **named)

    interpreted.run = recorded
    try:
        yield found
    finally:
        interpreted.run = run


def why_not_compiled(seen) -> str | None:
    """What stops these launches from being compiled for a GPU, in a sentence.

    None where they can be, and where this machine cannot tell.
    """
    found = compiled(seen)
    if not isinstance(found, list):
        return None
    capability, line, reason = found
    why = _in_other_words(" ".join(reason.split())) if reason else "Triton refuses it"
    return (
        "The kernel runs here, where it is interpreted, but cannot be compiled for a "
        f"GPU (compute capability {capability / 10:.1f}): {why}."
        + (f" Triton stopped at `{line}`." if line else "")
    )


def compiled(seen) -> list | dict | None:
    """Capability, line and reason of the first failure; else `{"shared": bytes}`.

    None where this machine cannot tell.
    """
    try:
        texts, asked = {}, []
        for function, given, named, options in seen:
            bound = inspect.signature(function).bind(*given, **named)
            bound.apply_defaults()
            _collect(function, texts)
            launch = {
                "kernel": function.__name__,
                "arguments": {k: _described(v) for k, v in bound.arguments.items()},
                "options": {k: v for k, v in options.items() if isinstance(v, int)},
            }
            asked += [{**launch, "capability": n} for n in CAPABILITIES]
        return _compiled("\n\n".join(texts.values()), json.dumps(asked))
    except (CannotTell, OSError, TypeError, ValueError, subprocess.SubprocessError):
        return None


@cache
def _compiled(text: str, launches: str):
    """What the other process found: capability, line and reason, or None."""
    with TemporaryDirectory() as folder:
        with open(os.path.join(folder, "kernels.py"), "w", encoding="utf-8") as file:
            file.write(text)
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CHILD, folder, launches],
            env={
                **os.environ,
                "TRITON_INTERPRET": "0",
                "TRITON_CACHE_DIR": os.path.join(folder, "cache"),
            },
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=SECONDS,
        )
    lines = run.stdout.splitlines()
    return json.loads(lines[-1]) if lines else None


def _in_other_words(reason: str) -> str:
    for pattern, words in IN_OTHER_WORDS:
        match = re.search(pattern, reason)
        if match:
            return words.format(*map(_type_in_words, match.groups()))
    short = reason if len(reason) <= 200 else reason[:199] + "…"
    return f"Triton says “{short.rstrip('.')}”"


def _type_in_words(text: str) -> str:
    """`<['16'], 'fp32'>` → fp32 of shape (16)."""
    found = re.fullmatch(r"<\[(.*)\], '?(\w+)'?>", text)
    shape = found and found[1].replace("'", "")
    return f"{found[2]} of shape ({shape})" if found else text


def _described(value):
    """An argument in JSON: a tensor by its type, the rest by its value."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        if kind not in NAME_IN_TRITON:
            raise CannotTell
        return f"*{NAME_IN_TRITON[kind]}"
    if isinstance(value, (tuple, list)):
        return [_described(each) for each in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise CannotTell


def _collect(function, texts):
    """The text of a kernel and of all that it uses, by the name under which it does."""
    if function.__name__ in texts:
        return
    texts.setdefault("", "import triton")
    source = textwrap.dedent(inspect.getsource(function))
    source = source[re.search(r"^def\s", source, re.MULTILINE).start() :]
    texts[function.__name__] = ""  # it may call itself
    known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "id", None)
        if name in known.keys() - texts.keys() - {*function.__code__.co_varnames}:
            _collect_value(name, known[name], texts)
    del texts[function.__name__]  # after what it uses
    texts[function.__name__] = f"@triton.jit\n{source}"


def _collect_value(name, value, texts):
    inner = getattr(value, "fn", value)
    home = getattr(inner, "__module__", "") or ""
    if isinstance(value, ModuleType):
        texts[name] = f"import {value.__name__} as {name}"
    elif home.startswith("triton.") and hasattr(inner, "__name__"):
        texts[name] = f"from {home} import {inner.__name__} as {name}"
    elif inner is not value and inspect.isfunction(inner):
        if inner.__name__ != name:
            raise CannotTell
        _collect(inner, texts)
    elif home == "triton.language.core" and hasattr(value, "value"):
        texts[name] = (
            f"import triton.language\n{name} = "
            f"triton.language.constexpr({value.value!r})"
        )
    elif isinstance(value, (bool, int, float, str)):
        texts[name] = f"{name} = {value!r}"
    elif not inspect.isbuiltin(value):
        raise CannotTell
