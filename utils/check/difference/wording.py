"""How a factor and an offset are put into words, with the size that explains it."""

import math
from collections.abc import Iterator, Mapping
from itertools import combinations

from utils.check.difference.facts import close, number


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
