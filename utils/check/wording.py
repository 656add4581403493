"""How calls, values and numbers are put into words."""

import inspect

import torch
from torch import nn

LIST_SHOWN = 6  # entries of a list
PARAMETERS_SHOWN = 8


def shape(x) -> str:
    return str(tuple(x.shape))


def dtype(x) -> str:
    return str(x.dtype).removeprefix("torch.")


def short(value, limit=160) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def one_line(error, limit=300) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def with_article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def counted(n: int, noun: str, plural: str | None = None) -> str:
    """“1 token”, “2 tokens”."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def two_numbers(one: float, other: float) -> tuple[str, str]:
    """Both with as many digits as it takes to tell them apart, six at least."""
    for digits in range(6, 18):
        texts = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1]:
            return texts
    return texts


def listed(names, limit=PARAMETERS_SHOWN) -> str:
    """The first few of many names, and how many there are."""
    names = list(names)
    if len(names) <= limit:
        return ", ".join(names)
    return ", ".join(names[:limit]) + f", … ({len(names)} in all)"


def sentence(text: str) -> str:
    """A capital letter in front, unless a name from the code stands there."""
    first = text.split(" ", 1)[0]
    a_word = first.isalpha() and (len(first) > 1 or first == "a")
    return text[:1].upper() + text[1:] if a_word else text


def argument_names(f, args, kwargs) -> list[str]:
    """The parameters' names for the arguments, or `argument 1` where unknown."""
    try:
        target = f.forward if isinstance(f, nn.Module) else f
        parameters = list(inspect.signature(target).parameters.values())
        names = [
            p.name
            for p in parameters
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (ValueError, TypeError):
        names = []
    positional = [
        names[i] if i < len(names) else f"argument {i + 1}" for i in range(len(args))
    ]
    return [*positional, *kwargs]


def describe(value) -> str:
    """An argument as a call shows it: tensors by their sizes."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(str, value.shape))
        kind = "" if value.dtype == torch.float32 else f" {dtype(value)}"
        return f"tensor({sizes}){kind}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, torch.Generator):
        return "a generator"  # its repr holds an address
    if isinstance(value, (tuple, list)) and any(
        isinstance(v, (torch.Tensor, tuple, list)) for v in value
    ):
        shown = [describe(v) for v in value[:LIST_SHOWN]]
        if len(value) > LIST_SHOWN:
            shown.append(f"… {len(value)} in all")
        inside = ", ".join(shown)
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return short(value, 60)


def describe_call(f, args, kwargs) -> str:
    """`attention(q=tensor(3, 7), …)`; nothing for what has no name of its own."""
    name = getattr(f, "__name__", None) or f"{type(f).__name__}(…)"
    if name in ("<lambda>", "partial(…)", "_"):
        return ""
    names = argument_names(f, args, kwargs)
    parts = [
        describe(v) if n.startswith("argument ") else f"{n}={describe(v)}"
        for n, v in zip(names, [*args, *kwargs.values()], strict=True)
    ]
    return f"{name}({', '.join(parts)})"
