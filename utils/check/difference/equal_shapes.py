"""What can be true of two tensors of one shape, from the most to the least specific."""

from collections.abc import Callable, Iterator
from itertools import combinations

import torch
from torch import Tensor

from utils.check.difference.facts import (
    Difference,
    close,
    in_order,
    listed,
    number,
    placements,
    same,
    typical,
)
from utils.check.difference.wording import factor_words, offset_words

ENOUGH_RULES = 6  # rows must agree in this many values before they share a factor
MOST = 0.8  # of a region must be wrong before it is named
POINTWISE = (
    ("e to the power of", torch.exp),
    ("the logarithm of", torch.log),
    ("the square of", torch.square),
    ("the square root of", torch.sqrt),
    ("one divided by", torch.reciprocal),
)


def another_type(d: Difference) -> str | None:
    if d.wrong.any() or d.types[0] == d.types[1]:
        return None
    came, asked = (str(t).removeprefix("torch.") for t in d.types)
    return f"The values of {d.what} are right, but of type {came} instead of {asked}."


def not_a_number(d: Difference) -> str | None:
    bad = d.actual.isnan() & ~d.expected.isnan()
    if not bad.any():
        return None
    if bad.all():
        return f"Every value of {d.what} is NaN."
    rows = bad.all(-1)
    if bad.ndim < 2 or not torch.equal(rows[..., None].expand_as(bad), bad):
        return f"{int(bad.sum())} of {bad.numel()} values are NaN."
    where = f"rows along {d.dimension(bad.ndim - 1)}"
    text = f"All values are NaN in {int(rows.sum())} of {rows.numel()} {where}"
    for mask, values in d.inputs.items():
        if values.dtype != torch.bool or not values.ndim:
            continue
        if any(torch.equal(p, bad) for p in placements(~values.any(-1), bad.shape)):
            return f"{text}: those where `{mask}` is False everywhere."
    return f"{text}."


def infinite(d: Difference) -> str | None:
    bad = d.actual.isinf() & d.expected.isfinite()
    if bad.all():
        return f"Every value of {d.what} is infinite."
    count = f"{int(bad.sum())} of {bad.numel()} values are infinite"
    return f"{count} where finite ones are expected." if bad.any() else None


def infinity_missing(d: Difference) -> str | None:
    infinite = d.expected.isinf()
    if not infinite.any() or not d.actual[infinite].isfinite().all():
        return None
    return f"Where an infinity is expected, {d.what} has finite values."


def constant(d: Difference) -> str | None:
    first = d.actual.flatten()[0]
    if not d.varied or not bool((d.actual == first).all()):
        return None
    if d.boolean:
        return f"Every value of {d.what} is {bool(first)}."
    return f"Every value of {d.what} is the same, {number(float(first))}."


def inverted(d: Difference) -> str | None:
    if d.boolean and d.varied and bool((d.actual == 1 - d.expected).all()):
        return f"Every value of {d.what} is inverted: True where False is expected."
    return None


def input_returned(d: Difference) -> str | None:
    for name, value in d.inputs.items():
        source = value.double()
        if not d.telling(source) or source.numel() != d.actual.numel():
            continue
        if d.alike(d.actual, source):
            return f"The values of {d.what} are those of the input `{name}`, unchanged."
        for i, j in combinations(range(source.ndim), 2):
            if d.alike(d.actual, source.transpose(i, j)):
                return (
                    f"The values of {d.what} are those of the input `{name}` with"
                    f" dimensions {i} and {j} exchanged."
                )
    return None


def input_combined(d: Difference) -> str | None:
    for name, value in d.inputs.items():
        source = value.double()
        if d.boolean or value.dtype == torch.bool or not d.telling(source):
            continue
        for x in placements(source, d.expected.shape):
            if d.alike(d.actual, d.expected + x):
                return f"Every value is too large by that of `{name}` at its place."
            if d.alike(d.actual + x, d.expected):
                return f"Every value is too small by that of `{name}` at its place."
            if d.varied and d.alike(d.actual, d.expected * x):
                return f"Every value is the expected one times that of `{name}`."
            if d.varied and d.alike(d.actual * x, d.expected):
                return f"Every value lacks a factor, that of `{name}` at its place."
    return None


def sign(d: Difference) -> str | None:
    if d.boolean or not d.varied:
        return None
    if d.alike(d.actual, -d.expected):
        return f"Every value of {d.what} has the opposite sign."
    if d.alike(d.actual, d.expected.abs()):
        return f"The values of {d.what} are right but for the sign: none is negative."
    return None


def factor(d: Difference) -> str | None:
    if d.boolean or not d.varied or d.comparable is None:
        return None
    actual, expected = d.actual[d.comparable], d.expected[d.comparable]
    ratio = float((actual * expected).sum() / (expected * expected).sum())
    if ratio == 0 or close(ratio, 1) or not d.alike(actual, ratio * expected):
        return None
    text = f"Every value of {d.what} is {factor_words(abs(ratio), d.sizes)}"
    return f"{text}{', with the opposite sign' if ratio < 0 else ''}."


def offset(d: Difference) -> str | None:
    if d.boolean or not d.varied or d.comparable is None:
        return None
    actual, expected = d.actual[d.comparable], d.expected[d.comparable]
    shift = float((actual - expected).mean())
    if actual.numel() < 3 or not d.alike(actual, expected + shift):
        return None
    return f"Every value of {d.what} is {offset_words(shift, d.sizes)}."


def row_rule(d: Difference) -> str | None:
    """Each row has a factor, or an offset, of its own."""
    if d.boolean or not d.varied or d.comparable is None:
        return None
    actual = d.actual.where(d.comparable, 0)
    expected = d.expected.where(d.comparable, 0)
    for dim in d.long_dimensions():
        varying = (expected != 0) & (
            expected.std(dim, keepdim=True) > 1e-3 * typical(expected)
        )
        rules = (varying.sum(dim) - 1).clamp(min=0)
        if int(rules.sum()) < ENOUGH_RULES or int((rules > 0).sum()) < 2:
            continue
        where = f"Each row along {d.dimension(dim)} is right up to"
        squares = (expected * expected).sum(dim, keepdim=True)
        factors = (actual * expected).sum(dim, keepdim=True) / squares.clamp(min=1e-300)
        if d.alike(actual, factors * expected):
            off = factors[((factors - 1).abs() > 1e-3) & (squares > 0)]
            if off.numel():
                return f"{where} a factor of its own, e.g. {number(float(off[0]))}."
        count = d.comparable.sum(dim, keepdim=True).clamp(min=1)
        shifts = (actual - expected).sum(dim, keepdim=True) / count
        if d.alike(actual, (expected + shifts).where(d.comparable, 0)):
            return f"{where} a constant of its own, added to all its values."
    return None


def pointwise(d: Difference) -> str | None:
    if d.boolean or not d.varied:
        return None
    for words, step in POINTWISE:
        if d.alike(d.actual, step(d.expected)):
            return f"Every value of {d.what} is {words} the expected one."
    for dim in d.long_dimensions():
        if d.alike(d.actual, d.expected.softmax(dim)):
            return (
                f"The values of {d.what} are the expected ones after one more softmax"
                f" along {d.dimension(dim)}."
            )
        if d.alike(d.actual, d.expected.cumsum(dim)):
            return (
                "Every value is the sum of the expected ones up to its place along"
                f" {d.dimension(dim)}."
            )
    return None


def rounded(d: Difference) -> str | None:
    if not d.varied or bool((d.actual == d.actual.round()).all()):
        return None
    for short in (torch.float32, torch.float16, torch.bfloat16):
        eps = torch.finfo(short).eps
        if eps <= d.tolerance or not torch.equal(d.actual.to(short).double(), d.actual):
            continue
        if bool(same(d.actual, d.expected, 2 * eps).all()) and d.clear:
            name = str(short).removeprefix("torch.")
            return (
                f"All values of {d.what} are {name} numbers, right to that precision."
            )
    return None


def clipped(d: Difference) -> str | None:
    for side, bound, cut in (
        ("larger", d.actual.max(), torch.minimum),
        ("smaller", d.actual.min(), torch.maximum),
    ):
        at_bound = int(d.wrong.sum())
        if at_bound < 2 or not bound.isfinite() or d.boolean:
            continue
        if (
            d.telling(d.expected[~d.wrong])
            and d.telling(d.expected[d.wrong])
            and (d.alike(d.actual, cut(d.expected, bound)))
        ):
            return (
                f"No value of {d.what} is {side} than {number(float(bound))}, and those"
                f" that should be are cut there."
            )
    return None


def exchanged(d: Difference) -> str | None:
    for i, j in combinations(range(d.expected.ndim), 2):
        if d.varied and d.alike(d.actual.transpose(i, j), d.expected):
            return (
                f"The right values, but with {d.dimension(i)} and {d.dimension(j)}"
                " exchanged."
            )
    return None


def moved(d: Difference) -> str | None:
    """Reversed, or moved by a few places, along a dimension."""
    for dim in d.long_dimensions() if d.varied else ():
        if d.alike(d.actual.flip(dim), d.expected):
            return f"The values of {d.what} are reversed along {d.dimension(dim)}."
        size = d.expected.shape[dim]
        for k in range(1, min(size // 2, 4) + 1):
            for way, came, asked in (("late", k, 0), ("early", 0, k)):
                part = d.expected.narrow(dim, asked, size - k)
                overlap = d.actual.narrow(dim, came, size - k)
                if not d.wrong.narrow(dim, came, size - k).any():
                    continue
                if d.alike(overlap, part) and d.telling(part):
                    steps = "one position" if k == 1 else f"{k} positions"
                    return (
                        f"The values of {d.what} stand {steps} too {way} along"
                        f" {d.dimension(dim)}."
                    )
    return None


def interleaved(d: Difference) -> str | None:
    """The last dimension is split in parts, which alternate instead of follow."""
    size = d.expected.shape[-1]
    if not d.same_values:
        return None
    for parts in range(2, size // 2 + 1):
        if size % parts:
            continue
        turned = d.expected.unflatten(-1, (parts, -1)).transpose(-1, -2).flatten(-2)
        if d.alike(d.actual, turned):
            words = "two halves" if parts == 2 else f"{parts} parts"
            return (
                f"The right values in another order: the {words} of"
                f" {d.dimension(d.expected.ndim - 1)} alternate instead of following"
                " each other."
            )
        turned = d.expected.unflatten(-1, (-1, parts)).transpose(-1, -2).flatten(-2)
        if parts == 2 and d.alike(d.actual, turned):
            return (
                f"The right values in another order: along"
                f" {d.dimension(d.expected.ndim - 1)}, values that should be neighbours"
                " are in different halves."
            )
    return None


def rows_permuted(d: Difference) -> str | None:
    for dim in d.long_dimensions(3) if d.same_values and d.expected.ndim > 1 else ():
        actual = d.actual.transpose(0, dim).flatten(1)
        expected = d.expected.transpose(0, dim).flatten(1)
        if len(actual) > 64 or expected.shape[1] < 2:
            continue
        found = [same(row, expected, d.tolerance).all(1) for row in actual]
        if bool((torch.stack(found).sum(0) == 1).all()):
            return f"The rows along {d.dimension(dim)} are right but in another order."
    return None


def another_order(d: Difference) -> str | None:
    if not d.same_values:
        return None
    for start in range(d.expected.ndim - 1, 0, -1):
        if d.expected.shape[:start].numel() > 1 and d.alike(
            in_order(d.actual, start), in_order(d.expected, start)
        ):
            inner = listed([d.dimension(i) for i in range(start, d.expected.ndim)])
            return f"The right values in another order within {inner}."
    return f"The values of {d.what} are the right ones in another order."


def repeated(d: Difference) -> str | None:
    for dim in d.long_dimensions() if d.varied else ():
        first = d.actual.narrow(dim, 0, 1).expand_as(d.actual)
        if d.alike(d.actual, first) and not d.alike(
            d.expected, d.expected.narrow(dim, 0, 1).expand_as(d.expected)
        ):
            return f"The values are the same at every position of {d.dimension(dim)}."
    return None


def fills(d: Difference, region: Tensor) -> bool:
    """The wrong values lie in the region, are most of it, and others are right."""
    if bool((d.wrong & ~region).any()) or int(d.wrong.sum()) < 2:
        return False
    covered = int(d.wrong.sum()) >= MOST * int(region.sum())
    return covered and d.telling(d.expected[~region])


def diagonal(d: Difference) -> str | None:
    if d.expected.ndim < 2 or min(d.expected.shape[-2:]) < 3:
        return None
    ones = torch.ones_like(d.wrong)
    above, below = ones.triu(1), ones.tril(-1)
    for words, region in (
        ("on the diagonal", ~above & ~below),
        ("one place above the diagonal", above & ~ones.triu(2)),
        ("one place below the diagonal", below & ~ones.tril(-2)),
        ("above the diagonal", above),
        ("below the diagonal", below),
    ):
        if fills(d, region):
            return f"Only values {words} of the last two dimensions are wrong."
    return None


def input_regions(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Regions that an input marks, each with the words for it."""
    if value.dtype == torch.bool:
        yield f"where `{name}` is False", ~value
        yield f"where `{name}` is True", value
        yield f"in rows where `{name}` is False everywhere", ~value.any(-1)
    elif value.is_floating_point():
        yield f"where `{name}` is negative", value < 0
        yield f"where `{name}` is positive", value > 0
    else:
        for n in value.unique()[:32].tolist():
            yield f"where `{name}` is {n}", value == n


def marked_by_input(d: Difference) -> str | None:
    for name, value in d.inputs.items():
        for words, marks in input_regions(name, value):
            if marks.ndim and any(
                fills(d, region) for region in placements(marks, d.wrong.shape)
            ):
                return f"Only values {words} are wrong."
    return None


def large_input(d: Difference) -> str | None:
    for name, value in d.inputs.items():
        if value.shape != d.wrong.shape or not value.is_floating_point():
            continue
        size, right = value.double().abs(), ~d.wrong
        if int(d.wrong.sum()) >= 3 and d.telling(d.expected[right]):
            words = {
                "large": bool(size[d.wrong].min() > size[right].max()),
                "small": bool(size[d.wrong].max() < size[right].min()),
            }
            for word in (word for word, true in words.items() if true):
                return f"Only values where `{name}` is {word} in size are wrong."
    return None


def some_positions(d: Difference) -> str | None:
    """Right at some positions along a dimension and wrong at the others."""
    if int(d.wrong.sum()) < 2:
        return None
    sentences = []
    for dim in reversed(d.long_dimensions()):
        bad = d.wrong_along(dim)
        if bad.all() or not d.telling(d.expected.transpose(0, dim)[~bad]):
            continue
        if text := positions(bad, d.dimension(dim)):
            sentences.append((float(bad.float().mean()), text))
    return min(sentences)[1] if sentences else None


def positions(bad: Tensor, where: str) -> str | None:
    """Which positions are wrong, if that is simple to say."""
    wrong, right = bad.nonzero().flatten().tolist(), (~bad).nonzero().flatten().tolist()
    size = len(bad)
    named = {0: "the first position", size - 1: "the last position"}
    for word, indices in (("right", right), ("wrong", wrong)):
        if len(indices) == 1 and (size > 2 or word == "right"):
            (i,) = indices
            counted = f"position {i} (counted from 0)"
            return f"Only {named.get(i, counted)} along {where} is {word}."
    for word, other, indices in (("right", "wrong", right), ("wrong", "right", wrong)):
        if indices[-1] == len(indices) - 1:
            count = len(indices)
            part = "half is" if 2 * count == size else f"{count} positions are"
            return f"Of {where}, the first {part} {word} and the rest {other}."
        if size >= 6 and indices == list(range(0, size, 2)):
            return f"Along {where}, every second position is {word}, from the first on."
    return None


def sums(d: Difference) -> str | None:
    for dim in d.long_dimensions() if d.varied and not d.boolean else ():
        if not all_one(d.expected.sum(dim), 1e-4):
            continue
        came = d.actual.sum(dim)
        if not came.isfinite().all() or all_one(came, 1e-2):
            continue
        for other in d.long_dimensions():
            if other != dim and all_one(d.actual.sum(other), 1e-4):
                return (
                    f"The values sum to 1 along {d.dimension(other)}, and not along"
                    f" {d.dimension(dim)}."
                )
        return unlike("sum", 1, came, d, dim)
    return None


def all_one(values: Tensor, tolerance: float) -> bool:
    """Two or more values are 1, and any others are 0."""
    one = (values - 1).abs() <= tolerance
    return int(one.sum()) >= 2 and bool((one | (values == 0)).all())


def moments(d: Difference) -> str | None:
    """Along a dimension the expected rows have mean 0, norm 1, or the like."""
    if bool((d.expected == d.expected.round()).all()):
        return None
    for dim in d.long_dimensions(3) if d.varied and not d.boolean else ():
        came, asked = d.actual, d.expected
        spread = asked.std(dim)
        if not bool((spread > 0).all()) or spread.numel() < 2:
            continue
        if bool((asked.mean(dim).abs() < 1e-4 * spread).all()) and bool(
            (came.mean(dim).abs() > 1e-2 * came.std(dim)).any()
        ):
            return unlike("mean", 0, came.mean(dim), d, dim)
        for name, power in (("root mean square", 0.5), ("norm", 0.0)):
            scale = asked.shape[dim] ** power
            if all_one(asked.norm(dim=dim) / scale, 1e-3) and not all_one(
                came.norm(dim=dim) / scale, 1e-2
            ):
                return unlike(name, 1, came.norm(dim=dim) / scale, d, dim)
    return None


def unlike(name: str, value: int, came: Tensor, d: Difference, dim: int) -> str:
    first = float(came[(came - value).abs() > 1e-2].flatten()[0])
    return (
        f"Along {d.dimension(dim)}, the {name} of the values is not {value} everywhere,"
        f" but {number(first)} in one row."
    )


def nearly(d: Difference) -> str | None:
    if d.boolean or not d.varied or d.comparable is None:
        return None
    gap = (d.actual - d.expected)[d.comparable].abs().max()
    share = float(gap / d.expected[d.comparable].abs().max())
    spread = float(gap / d.expected[d.comparable].std())
    if max(share, spread) > 0.01:
        return None
    return (
        f"Nearly right: no value of {d.what} is off by more than"
        f" {100 * share:.2g} % of the largest."
    )


def counted(d: Difference) -> str | None:
    """How many values differ, and where, if these are few."""
    wrong, total = int(d.wrong.sum()), d.wrong.numel()
    few = 8 if bool((d.expected == d.expected.round()).all()) else 2
    if wrong > total / few or not d.telling(d.expected[~d.wrong]):
        return None
    text = f"{wrong} of {total} values {'differs' if wrong == 1 else 'differ'}"
    if wrong == 1:
        place = d.wrong.nonzero()[0].tolist()
        return f"{text}: the one at {place}, counted from 0."
    for dim in d.long_dimensions(3):
        bad = d.wrong_along(dim).nonzero().flatten().tolist()
        if len(bad) <= min(3, d.wrong.shape[dim] // 2):
            which = f"position{'s' * (len(bad) > 1)} {listed([str(i) for i in bad])}"
            return f"{text}, all at {which} of {d.dimension(dim)}, counted from 0."
    return f"{text}." if wrong <= total / 4 else None


DETECTORS: tuple[Callable[[Difference], str | None], ...] = (
    not_a_number,
    constant,
    inverted,
    input_returned,
    sign,
    factor,
    offset,
    input_combined,
    diagonal,
    exchanged,
    repeated,
    moved,
    interleaved,
    rows_permuted,
    another_order,
    rounded,
    clipped,
    pointwise,
    row_rule,
    marked_by_input,
    infinity_missing,
    some_positions,
    infinite,
    large_input,
    sums,
    moments,
    nearly,
    counted,
)
