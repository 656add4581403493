"""Compares a result with what is expected; raises `Unmet` with the numbers."""

import torch

from utils.check.errors import Explained, Unmet
from utils.check.inputs import is_float, same_value
from utils.check.wording import dtype, shape, short, two_numbers

# Rounding that any correct formula may show, in units of the dtype's epsilon.
ROUNDING = {
    torch.float64: 10_000,
    torch.float32: 64,
    torch.float16: 8,
    torch.bfloat16: 4,
}


def require_tensor(value, what="the result"):
    if value is None:
        raise Explained(f"{what} is None: is a `return` missing?")
    if not isinstance(value, torch.Tensor):
        raise Explained(f"{what} is of type {type(value).__name__}, expected a tensor.")


def require_tuple(value, length, what="the result"):
    """`value` is a tuple or list of `length` parts, such as `(h, c)`."""
    if value is None:
        raise Explained(f"{what} is None: is a `return` missing?")
    if not isinstance(value, (tuple, list)):
        raise Explained(
            f"{what} is one {type(value).__name__}, expected {length} values."
        )
    if len(value) != length:
        raise Explained(f"{what} is {len(value)} values, expected {length} values.")


def require_like(actual, like, what):
    """The dtype and the device of `like`."""
    if actual.dtype != like.dtype:
        raise Explained(
            f"{what} is {dtype(actual)} where the input is {dtype(like)}: return "
            "the dtype that came in."
        )
    if actual.device != like.device:
        raise Unmet(
            f"{what} is on {actual.device} where the input is on {like.device}."
        )


def require_shape(actual, expected, what):
    if actual.shape != expected.shape:
        raise Unmet(
            f"{what} has shape {shape(actual)}, expected {shape(expected)}.",
            (actual, expected),
        )


def require_finite(actual, expected, what):
    """No NaN and no infinity, but where one is expected."""
    for bad, word in ((actual.isnan(), "NaN"), (actual.isinf(), "infinite")):
        bad = bad & (actual != expected)
        if bad.any():
            at = first_of(bad)
            raise Unmet(
                f"{what}: {int(bad.sum())} of {bad.numel()} values "
                f"{'are' if bad.sum() > 1 else 'is'} {word}, the first at "
                f"{list(at)}, where {expected[at].item():.6g} is expected.",
                (actual, expected),
            )
    lost = expected.isinf() & (actual != expected)
    if lost.any():
        at = first_of(lost)
        raise Unmet(
            f"{what} at {list(at)} is {actual[at].item():.6g}, where "
            f"{expected[at].item()} is expected.",
            (actual, expected),
        )


def distance(actual, expected, relative, working):
    """How far apart, entry by entry, and the size that rounding is measured by."""
    finite = ~expected.isinf()
    difference = torch.where(finite, (actual - expected).abs(), 0.0)
    magnitude = torch.where(finite, expected.abs(), 0.0)
    if relative:
        difference = difference / magnitude.clamp(min=torch.finfo(working).tiny)
        return difference, 1.0
    return difference, (magnitude.max().item() if magnitude.numel() else 0.0) or 1.0


def rounding_of(working, scale) -> float:
    """What rounding may change in a correct result of this dtype and size."""
    return ROUNDING.get(working, 64) * torch.finfo(working).eps * scale


def require_close(actual, expected, difference, allowed, what, relative=False):
    """No entry of `difference` is above `allowed`."""
    error = difference.max().item() if difference.numel() else 0.0
    if error <= allowed:
        return
    at = index_of(difference.argmax().item(), difference.shape)
    wrong = int((difference > allowed).sum())
    yours, right = two_numbers(actual[at].item(), expected[at].item())
    raise Unmet(
        f"{what}: largest difference {error:.3g}{' (relative)' * relative} at "
        f"{list(at)}, where yours is {yours} and {right} is expected; "
        f"{wrong} of {difference.numel()} values differ.",
        (actual, expected),
    )


def require_equal(actual, expected, what="the result"):
    """`actual` is exactly `expected`: for ids, masks, texts and counts."""
    if not isinstance(expected, torch.Tensor):
        if not same_value(actual, expected):
            raise Unmet(
                f"{what} is {short(actual)}, expected {short(expected)}.",
                (actual, expected),
            )
        return
    require_tensor(actual, what)
    require_shape(actual, expected, what)
    if actual.dtype != expected.dtype:
        raise Unmet(f"{what} is {dtype(actual)}, expected {dtype(expected)}.")
    wrong = (actual != expected).cpu()
    if wrong.any():
        at = first_of(wrong)
        raise Unmet(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} values differ, "
            f"the first at {list(at)}, where yours is {actual[at].item()} and "
            f"{expected[at].item()} is expected.",
            (actual, expected),
        )


def working_dtype(x):
    return x.dtype if is_float(x) else torch.float64


def first_of(wrong) -> tuple[int, ...]:
    return index_of(int(wrong.flatten().int().argmax()), wrong.shape)


def index_of(flat, size) -> tuple[int, ...]:
    at = []
    for n in reversed(size):
        at.append(flat % n)
        flat //= n
    return tuple(reversed(at))
