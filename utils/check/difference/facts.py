"""Two results that differ, and what can be asked of them."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

FACTOR_TOLERANCE = 2e-5  # relative, for a factor that has a name
ENOUGH_BITS = 12  # what whole numbers must carry before their agreement tells much


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

    def wrong_along(self, dim: int) -> Tensor:
        """Which positions of a dimension hold a wrong value."""
        return self.wrong.transpose(0, dim).reshape(self.wrong.shape[dim], -1).any(1)

    def long_dimensions(self, least: int = 2) -> list[int]:
        """The dimensions that have at least this size, from the last one on."""
        sizes = self.expected.shape
        return [d for d in reversed(range(len(sizes))) if sizes[d] >= least]


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


def placements(tensor: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """The tensor spread over the shape, in each way that fits its dimensions."""
    for dims in combinations(range(len(shape)), tensor.ndim):
        sizes = [1] * len(shape)
        for d, size in zip(dims, tensor.shape, strict=True):
            sizes[d] = size
        fits = all(n in (1, full) for n, full in zip(sizes, shape, strict=True))
        if fits and tensor.numel() > 1:
            yield tensor.reshape(sizes).expand(shape)
