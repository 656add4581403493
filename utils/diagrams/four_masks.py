"""Lesson 14: which keys four masks show."""

from utils.diagrams.drawing import Drawing

T, WINDOW, SINKS, STRIDE = 12, 4, 2, 4


def table(may):
    """Rows of booleans: may a query look at a key, by their positions?"""
    return [[may(q, k) for k in range(T)] for q in range(T)]


MASKS = {
    "causal": (table(lambda q, k: k <= q), "all that came before"),
    "window": (table(lambda q, k: 0 <= q - k < WINDOW), f"the nearest {WINDOW}"),
    "window and sinks": (
        table(lambda q, k: 0 <= q - k < WINDOW or (k < SINKS and k <= q)),
        f"the nearest {WINDOW}, the first {SINKS}",
    ),
    "strided": (
        table(lambda q, k: 0 <= q - k < STRIDE or (k <= q and (q - k) % STRIDE == 0)),
        f"the nearest {STRIDE}, each {STRIDE}th",
    ),
}


def draw() -> Drawing:
    seen = {name: sum(mask[-1]) for name, (mask, _) in MASKS.items()}
    d = Drawing(
        *(816, 276),
        "Four masks: causal, window, sinks, strided",
        f"Tables of {T} queries by {T} keys. The last query sees "
        + ", ".join(f"{n} keys under the mask {name}" for name, n in seen.items())
        + ".",
    )
    for i, (name, (mask, says)) in enumerate(MASKS.items()):
        area = d.mask(
            *(34 + 196 * i, 60, mask),
            cell=13,
            followed=(T - 1, 0, 1, T),
            purpose=says,
        )
        d.text(area.x, 36, name, size=14, at="start", bold=True)
        d.text(area.middle, 258, f"the last query sees {seen[name]}", size=12)
    return d
