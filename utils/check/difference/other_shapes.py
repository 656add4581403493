"""What can be true of two tensors whose shapes differ."""

from collections.abc import Callable
from itertools import combinations, permutations

import torch

from utils.check.difference.equal_shapes import input_returned
from utils.check.difference.facts import Difference


def dimensions_permuted(d: Difference) -> str | None:
    n = d.actual.ndim
    if n != d.expected.ndim or n > 5:
        return None
    for order in permutations(range(n)):
        if not d.alike(d.actual.permute(order), d.expected):
            continue
        out = [i for i in range(n) if order[i] != i]
        if len(out) == 2:
            i, j = out
            return f"The right values, but with dimensions {i} and {j} exchanged."
        return "The right values, but with the dimensions in another order."
    for i, j in combinations(range(n), 2):
        if d.actual.transpose(i, j).shape == d.expected.shape:
            return f"The sizes of dimensions {i} and {j} of {d.what} are exchanged."
    return None


def reshaped(d: Difference) -> str | None:
    came, asked = d.actual, d.expected
    if came.numel() != asked.numel():
        return None
    right = d.alike(came.flatten(), asked.flatten())
    start = "The values are right, but" if right else "Of the shape,"
    for one, other, word in ((asked, came, "is missing"), (came, asked, "is too many")):
        extra = [i for i in range(one.ndim) if one.shape[i] == 1]
        fits = [i for i in extra if one.squeeze(i).shape == other.shape]
        if fits:
            return f"{start} a dimension of size 1 {word}: dimension {fits[0]}."
    if not right:
        return None
    shape = "flattened" if came.ndim == 1 else "in another shape"
    return f"The values are right, but {shape}."


def cut_or_longer(d: Difference) -> str | None:
    came, asked = d.actual.shape, d.expected.shape
    unlike = [i for i, (a, b) in enumerate(zip(came, asked, strict=False)) if a != b]
    if len(came) != len(asked) or len(unlike) != 1 or 0 in (*came, *asked):
        return None
    dim = unlike[0]
    a, b = came[dim], asked[dim]
    shorter, longer = (d.actual, d.expected)[:: 1 if a < b else -1]
    text = f"Along {d.dimension(dim)} there are {a} positions instead of {b}"
    if (
        a > b
        and a % b == 0
        and d.alike(d.actual, torch.cat([d.expected] * (a // b), dim))
    ):
        return f"{text}: the right ones again and again."
    for name, start in (("first", 0), ("last", abs(a - b))):
        if d.alike(shorter, longer.narrow(dim, start, min(a, b))):
            if a < b:
                return f"{text}: these are right, and the {name} {a} of the expected."
            return f"{text}: the {name} {b} are right."
    return f"{text}."


def reduced(d: Difference) -> str | None:
    """A dimension was summed or averaged, or values were repeated along a new one."""
    for dim in range(d.expected.ndim):
        if d.expected.shape[dim] < 2:
            continue
        for keep in (False, True):
            for name, result in (
                ("sum", d.expected.sum(dim, keepdim=keep)),
                ("mean", d.expected.mean(dim, keepdim=keep)),
                ("largest", d.expected.amax(dim, keepdim=keep)),
            ):
                if d.alike(d.actual, result):
                    return (
                        f"Each value is the {name} of the expected ones along"
                        f" {d.dimension(dim)}."
                    )
    for dim in range(d.actual.ndim):
        first = d.actual.select(dim, 0)
        if d.alike(first, d.expected) and d.alike(
            d.actual, first.unsqueeze(dim).expand_as(d.actual)
        ):
            return (
                f"The right values, but repeated along a new dimension, number {dim}."
            )
    return None


def shape_of_input(d: Difference) -> str | None:
    names = [n for n, x in d.inputs.items() if x.shape == d.actual.shape and x.ndim]
    if len(names) != 1 or any(x.shape == d.expected.shape for x in d.inputs.values()):
        return None
    return f"The shape of {d.what} is that of the input `{names[0]}`."


SHAPE_DETECTORS: tuple[Callable[[Difference], str | None], ...] = (
    input_returned,
    dimensions_permuted,
    reshaped,
    reduced,
    cut_or_longer,
    shape_of_input,
)
