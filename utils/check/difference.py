"""Says in one sentence how a wrong result differs from the expected one.

For a check that found a difference and knows no mistake that explains it. The
sentence is a fact about the two results, never its cause or the right answer, and
there is none where nothing simple is true. `DETECTORS` lists what is looked for.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations
from types import MappingProxyType

import torch
from torch import Tensor

EMPTY: Mapping = MappingProxyType({})
FACTOR_TOLERANCE = 2e-5  # relative, for a factor that has a name
NUMBER_TOLERANCE = 64 * torch.finfo(torch.float32).eps  # for Python's floats
ENOUGH_BITS = 12  # what whole numbers must carry before their agreement tells much
ENOUGH_RULES = 6  # rows must agree in this many values before they share a factor
MOST = 0.8  # of a region must be wrong before it is named
POINTWISE = (
    ("e to the power of", torch.exp),
    ("the logarithm of", torch.log),
    ("the square of", torch.square),
    ("the square root of", torch.sqrt),
    ("one divided by", torch.reciprocal),
)


@dataclass
class Difference:
    """Two results that differ, as float64, and what may explain the difference."""

    actual: Tensor
    expected: Tensor
    types: tuple[torch.dtype, torch.dtype]  # of actual and expected
    inputs: dict[str, Tensor]
    sizes: Mapping[str, float]
    what: str
    axes: tuple[str, ...] | None

    @cached_property
    def tolerance(self) -> float:
        """How far values may lie apart, relative to their size, and be the same."""
        floats = [t for t in self.types if t.is_floating_point]
        eps = max((torch.finfo(t).eps for t in floats), default=0.0)
        return max(min(64 * eps, 1e-3), 2 * eps, 1e-12)

    @cached_property
    def wrong(self) -> Tensor:
        return ~same(self.actual, self.expected, self.tolerance)

    @cached_property
    def clear(self) -> bool:
        """Some values differ by much more than rounding would explain."""
        return not bool(same(self.actual, self.expected, 4 * self.tolerance).all())

    @property
    def boolean(self) -> bool:
        return torch.bool in self.types

    @cached_property
    def comparable(self) -> Tensor | None:
        """Where both are finite, or None if they are not so at the same places."""
        finite = self.expected.isfinite()
        agree = same(self.actual, self.expected, 0.0)
        like = torch.where(finite, self.actual.isfinite(), agree)
        return finite if bool(like.all() & finite.any()) else None

    @cached_property
    def varied(self) -> bool:
        return self.telling(self.expected)

    @cached_property
    def same_values(self) -> bool:
        """The values are the expected ones in another order, and not by chance."""
        different = self.expected.unique().numel()
        if self.boolean or different < max(6, self.expected.numel() / 2):
            return False
        return self.alike(in_order(self.actual), in_order(self.expected))

    def telling(self, values: Tensor) -> bool:
        """Values differ so much among themselves that agreement is not chance."""
        finite = values[values.isfinite()]
        if bool((finite == finite.round()).all()):
            return bits(values.flatten(), finite) >= ENOUGH_BITS
        steps = (finite / (1e-3 * typical(finite))).round()
        return steps.unique().numel() >= (3 if self.tolerance < 1e-4 else 12)

    def alike(self, one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape:
            return False
        size = typical(other)
        corner = (slice(3),) * one.ndim  # settles most cases fast
        return all(
            bool(same(one[part], other[part], self.tolerance, size).all())
            for part in (corner, ...)
        )

    def dimension(self, d: int) -> str:
        if self.axes and len(self.axes) == self.expected.ndim:
            return f"the `{self.axes[d]}` dimension"
        last = d == self.expected.ndim - 1 and d > 0
        return "the last dimension" if last else f"dimension {d}"

    def long_dimensions(self, least: int = 2) -> list[int]:
        """The dimensions that have at least this size, from the last one on."""
        sizes = self.expected.shape
        return [d for d in reversed(range(len(sizes))) if sizes[d] >= least]


# ---- Small helpers ----


def typical(values: Tensor) -> float:
    """The median size of the finite values other than 0, from some hundreds."""
    flat = values.flatten()
    for step in (1 + flat.numel() // 256, 1):
        some = flat[::step]
        some = some[some.isfinite() & (some != 0)]
        if some.numel():
            return float(some.abs().median())
    return 1.0


def same(
    one: Tensor, other: Tensor, tolerance: float, size: float | None = None
) -> Tensor:
    """Where two tensors agree; an infinity or NaN agrees with its like alone."""
    size = typical(other) if size is None else size
    near = (one - other).abs() <= tolerance * (other.abs() + size)
    near = near & one.isfinite() & other.isfinite()
    return near | (one == other) | one.isnan() & other.isnan()


def bits(values: Tensor, finite: Tensor) -> float:
    """How much chance it would take to guess these whole numbers."""
    _, counts = values.nan_to_num().unique(return_counts=True)
    shares = counts / counts.sum()
    entropy = float(-(shares * shares.log2()).sum()) * values.numel()
    if not finite.numel():
        return entropy
    spread = math.log2(float(finite.max() - finite.min()) + 1)
    return max(entropy, spread * (values.numel() - int(counts.max())))


def in_order(values: Tensor, start: int = 0) -> Tensor:
    """Sorted within each entry of the dimensions before `start`."""
    return values.flatten(start).sort(dim=start).values


def number(value: float) -> str:
    return f"{value + 0.0:.3g}"


def close(one: float, other: float, tolerance: float = FACTOR_TOLERANCE) -> bool:
    return math.isclose(one, other, rel_tol=tolerance)


def listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def sizes_of(inputs: Mapping[str, object]) -> dict[str, float]:
    """Named numbers among the arguments; a size that two places have is left out."""
    found: dict[tuple[float, object], str] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            for d, size in enumerate(value.shape):
                last = d == value.ndim - 1
                label = (
                    f"the last dimension of `{name}`"
                    if last
                    else f"dimension {d} of `{name}`"
                )
                found.setdefault((size, d - value.ndim), label)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.setdefault((value, name), f"`{name}`")
    places = Counter(size for size, _ in found)
    return {label: n for (n, _), label in found.items() if places[n] == 1}


def explanations(sizes: Mapping[str, float]) -> Iterator[tuple[float, str]]:
    """Numbers that a factor may be, each with a clause that says so."""
    yield math.sqrt(2), "√2 is {}"
    yield math.pi, "π is {}"
    yield 2 * math.pi, "2π is {}"
    yield 1 / math.log(2), "logarithms to base 2 and e differ by this factor"
    yield math.log(10), "logarithms to base 10 and e differ by this factor"
    named = [(n, label) for label, n in sizes.items() if n > 0 and n != 1]
    for n, label in named:
        name = f"{label} is {number(n)}"
        yield max(n, 1 / n), f"{label} is {number(n)}"
        yield max(n, 1 / n) ** 0.5, f"√{number(n)} is {number(n**0.5)}, and {name}"
        yield max(n, 1 / n) ** 2, f"{number(n)}² is {number(n * n)}, and {name}"
        if n >= 3 and n == int(n):
            rest = f"{int(n)}/{int(n) - 1}, and {name}"
            yield n / (n - 1), f"this is {rest}"
            yield (n / (n - 1)) ** 0.5, f"its square is {rest}"
    for (n, label), (m, other) in combinations(named, 2):
        if n > 1 and m > 1:
            yield n * m, f"{label} is {number(n)} and {other} {number(m)}"


def explain(factor: float, sizes: Mapping[str, float]) -> str | None:
    """The clause for a factor above 1 if one alone fits, otherwise None."""
    fitting = [
        clause.format(number(factor))
        for value, clause in explanations(sizes)
        if close(factor, value)
    ]
    return fitting[0] if len(fitting) == 1 else None


def factor_words(factor: float, sizes: Mapping[str, float]) -> str:
    """Says how much too large or small something is, given actual / expected."""
    size = max(factor, 1 / factor)
    if close(size, 2):
        return (
            "twice as large as expected" if factor > 1 else "half of what is expected"
        )
    clause = explain(size, sizes)
    shown = f"{number(size) if size > 1.005 else f'{size:.6g}'} times too "
    return shown + ("large" if factor > 1 else "small") + (f"; {clause}" * bool(clause))


def offset_words(offset: float, sizes: Mapping[str, float]) -> str:
    """Says by how much something is too large or small, given actual - expected."""
    fitting = [label for label, n in sizes.items() if close(abs(offset), n)]
    name = f"; {fitting[0]} is {number(abs(offset))}" if len(fitting) == 1 else ""
    size = "one" if close(abs(offset), 1) else number(abs(offset)) + name
    return f"too {'large' if offset > 0 else 'small'} by {size}"


def placements(tensor: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """The tensor spread over the shape, in each way that fits its dimensions."""
    for dims in combinations(range(len(shape)), tensor.ndim):
        sizes = [1] * len(shape)
        for d, size in zip(dims, tensor.shape, strict=True):
            sizes[d] = size
        fits = all(n in (1, full) for n, full in zip(sizes, shape, strict=True))
        if fits and tensor.numel() > 1:
            yield tensor.reshape(sizes).expand(shape)


# ---- Values that should not be there ----


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


# ---- The inputs in the result ----


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


# ---- One rule for all values ----


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


def remainder(d: Difference) -> str | None:
    if any(t.is_floating_point for t in d.types) or not d.varied:
        return None
    for label, n in d.sizes.items():
        if n > 1 and d.alike(d.actual, d.expected % n) and d.telling(d.actual):
            return f"Every value is the expected one modulo {label}, {number(n)}."
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


def whole(d: Difference) -> str | None:
    if bool((d.expected == d.expected.round()).all()) or d.actual.unique().numel() < 3:
        return None
    if d.telling(d.expected) and any(
        torch.equal(d.actual, cut(d.expected))
        for cut in (torch.round, torch.floor, torch.ceil, torch.trunc)
    ):
        return f"The values of {d.what} are right but made whole numbers."
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


# ---- The right values at other places ----


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


# ---- Only a part is wrong ----


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


def at_zero(d: Difference) -> str | None:
    if fills(d, d.expected == 0):
        return "Only values that should be 0 are wrong."
    return None


def some_positions(d: Difference) -> str | None:
    """Right at some positions along a dimension and wrong at the others."""
    if int(d.wrong.sum()) < 2:
        return None
    sentences = []
    for dim in reversed(d.long_dimensions()):
        bad = d.wrong.transpose(0, dim).flatten(1).any(1)
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


# ---- What all rows have in common ----


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


# ---- What can still be said ----


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
        bad = d.wrong.transpose(0, dim).flatten(1).any(1).nonzero().flatten().tolist()
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
    remainder,
    input_combined,
    diagonal,
    exchanged,
    repeated,
    moved,
    interleaved,
    rows_permuted,
    another_order,
    rounded,
    whole,
    clipped,
    pointwise,
    row_rule,
    marked_by_input,
    infinity_missing,
    some_positions,
    infinite,
    large_input,
    at_zero,
    sums,
    moments,
    nearly,
    counted,
)


# ---- Shapes that differ ----


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


# ---- Numbers and sequences ----


def numbers(actual: float, expected: float, sizes: Mapping[str, float]) -> str | None:
    if actual == expected or not math.isfinite(expected):
        return None
    if not math.isfinite(actual):
        return f"The value is {actual}."
    if actual == 0:
        return "The value is 0."
    if close(actual, -expected, NUMBER_TOLERANCE):
        return "The value has the opposite sign."
    if close(abs(actual - expected), 1, NUMBER_TOLERANCE):
        return f"The value is {offset_words(actual - expected, EMPTY)}."
    if expected == 0:
        return None
    ratio, shift = actual / expected, actual - expected
    if close(ratio, 2, NUMBER_TOLERANCE) or close(ratio, 0.5, NUMBER_TOLERANCE):
        return f"The value is {factor_words(ratio, EMPTY)}."
    scaled = factor_words(ratio, sizes) if ratio > 0 else ""
    moved_by = offset_words(shift, sizes)
    named = [words for words in (scaled, moved_by) if ";" in words]
    return f"The value is {named[0]}." if len(named) == 1 else None


def sequences(actual, expected) -> str | None:
    came, asked = len(actual), len(expected)
    part = "characters" if isinstance(expected, str) else "elements"
    if not asked:
        return None
    if not came:
        return "It is empty."
    if came != asked:
        count = f"There {'is' if abs(came - asked) == 1 else 'are'} {abs(came - asked)}"
        count = f"{count} {part if abs(came - asked) > 1 else part[:-1]}"
        shorter, longer = (actual, expected)[:: 1 if came < asked else -1]
        word = "few" if came < asked else "many"
        at = {"end": longer[: len(shorter)], "start": longer[-len(shorter) :]}
        for place, rest in at.items():
            if rest == shorter:
                return f"{count} too {word}, at the {place}; the others are right."
    elif all(type(x) in (int, float) for x in (*actual, *expected)):
        shifts = {a - e for a, e in zip(actual, expected, strict=True)}
        if len(shifts) == 1 and len(set(expected)) > 1:
            return f"Each element is {offset_words(shifts.pop(), EMPTY)}."
    if came > 2 and actual == expected[::-1]:
        return f"The {part} are right but reversed."
    if came > 2 and Counter(actual) == Counter(expected):
        return f"The {part} are right but in another order."
    if isinstance(expected, str) and actual.casefold() == expected.casefold():
        return "It is right but for upper and lower case."
    if isinstance(expected, str | bytes) and actual.split() == expected.split():
        return "It is right but for white space."
    pairs = list(zip(actual, expected, strict=False))
    right = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if right >= 2:
        return f"The first {right} {part} are right, the next is not."
    wrong = [i for i, (a, b) in enumerate(pairs) if a != b]
    if came == asked and len(wrong) == 1 and came > 2:
        return f"All {part} but the one at {wrong[0]} (counted from 0) are right."
    return None


def values(actual, expected, sizes: Mapping[str, float]) -> str | None:
    kinds = type(actual), type(expected)
    came, asked = (kind.__name__ for kind in kinds)
    plain = bool not in kinds and all(issubclass(k, int | float) for k in kinds)
    ordered = all(issubclass(k, list | tuple) for k in kinds)
    if kinds[0] != kinds[1]:
        equal = list(actual) == list(expected) if ordered else actual == expected
        if equal is True:
            return f"The value is right, but of type {came} instead of {asked}."
        if not plain and not ordered:
            return f"The value is of type {came} instead of {asked}."
    if plain:
        return numbers(actual, expected, sizes)
    if ordered:
        return sequences(list(actual), list(expected))
    return sequences(actual, expected) if kinds[0] in (str, bytes) else None


# ---- The two entries ----


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
