"""Says in one sentence how a wrong result differs from the expected one.

For a check that found a difference and knows no mistake that explains it. The
sentence is a fact about the two results, never its cause or the right answer, and
there is none where nothing simple is true. `equal_shapes.DETECTORS` lists
what is looked for.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from utils.check.difference.equal_shapes import DETECTORS, another_type, rounded
from utils.check.difference.facts import Difference, sizes_of
from utils.check.difference.other_shapes import SHAPE_DETECTORS
from utils.check.difference.plain_values import numbers, values

EMPTY: Mapping = MappingProxyType({})


def describe(
    actual: Tensor,
    expected: Tensor,
    *,
    inputs: Mapping[str, object] = EMPTY,
    sizes: Mapping[str, float] = EMPTY,
    what: str = "the result",
    axes: tuple[str, ...] | None = None,
) -> str | None:
    """One true sentence on how a tensor differs from the expected one, or None.

    inputs: the call's arguments by name.
    sizes: numbers by name that may explain a factor; by default those of the inputs.
    axes: names for the dimensions of the expected tensor.
    """
    try:
        if actual.is_complex() or expected.is_complex():
            return None
        named = {f"`{name}`": n for name, n in sizes.items()} or sizes_of(inputs)
        with torch.no_grad():
            difference = Difference(
                actual.detach().cpu().double(),
                expected.detach().cpu().double(),
                (actual.dtype, expected.dtype),
                {n: x.detach().cpu() for n, x in inputs.items() if torch.is_tensor(x)},
                named,
                what,
                axes,
            )
            return of_tensors(difference)
    except Exception:  # no sentence is worth a check that fails
        return None


def of_tensors(d: Difference) -> str | None:
    if d.actual.shape != d.expected.shape:
        return first_of(SHAPE_DETECTORS, d)
    if d.expected.numel() == 0:
        return None
    if not d.wrong.any():
        return another_type(d) or rounded(d)
    if not d.clear:
        return None
    if d.expected.numel() == 1 and not d.boolean:
        return numbers(d.actual.item(), d.expected.item(), d.sizes)
    return first_of(DETECTORS, d)


def first_of(
    detectors: tuple[Callable[[Difference], str | None], ...], d: Difference
) -> str | None:
    return next((text for detector in detectors if (text := detector(d))), None)


def describe_values(
    actual: object, expected: object, *, sizes: Mapping[str, float] = EMPTY
) -> str | None:
    """The same for numbers, strings, bytes, lists and tuples."""
    try:
        return values(actual, expected, {f"`{name}`": n for name, n in sizes.items()})
    except Exception:  # see above
        return None
