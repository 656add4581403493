"""Lesson 10: a cache that forgets, as a ring of places."""

import math

from utils.diagrams.drawing import Drawing

WINDOW = 6
NEW = 9  # the position that is written now


def draw() -> Drawing:
    held = {p % WINDOW: p for p in range(NEW)}  # the places before it is written
    seen = range(NEW - WINDOW + 1, NEW + 1)
    place, gone = NEW % WINDOW, held[NEW % WINDOW]
    d = Drawing(
        *(780, 300),
        "A cache that forgets, as a ring",
        f"A ring of {WINDOW} places. Position p has its place at p modulo {WINDOW}, "
        f"so position {NEW} is written over position {gone}, which no query will "
        f"look at again. Read out, oldest first, are positions {seen[0]} to "
        f"{seen[-1]}.",
    )
    x, y, radius = 150, 150, 88
    d.text(x, y - 6, "place")
    d.text(x, y + 14, f"p % {WINDOW}", size=13, code=True)
    for here in range(WINDOW):
        turn = 2 * math.pi * here / WINDOW - math.pi / 2
        across, down = math.cos(turn), math.sin(turn)
        now = here == place
        d.tensor(
            *(x + radius * across - 20, y + radius * down - 15, 1, 1, "key"),
            values=lambda r, c, p=NEW if now else held[here]: p,
            cell=40,
            height=30,
            strength=lambda r, c, now=now: 0.55 * now,
            followed=(0, 0, 1, 1) if now else None,
        )
        d.text(
            x + (radius + 34) * across, y + (radius + 26) * down + 4, here, "plain", 12
        )
        # the way to the next place
        way = [turn + 2 * math.pi / WINDOW * part for part in (0.3, 0.7)]
        ends = [r(a) for a in way for r in (math.cos, math.sin)]
        x1, y1, x2, y2 = (z + radius * e for z, e in zip((x, y) * 2, ends, strict=True))
        d.curve(x1, y1, x2, y2, bend=5, kind="plain")
    left, top, wide = 330, 110, 42
    d.text(left, 66, "the text so far", size=14, at="start", bold=True)
    d.text(
        left,
        85,
        f"A query sees itself and {WINDOW - 1} before it.",
        "plain",
        12,
        "start",
    )
    line = d.tensor(
        *(left, top, 1, NEW + 1, "key"),
        values=lambda r, c: c,
        cell=wide,
        height=30,
        hidden=lambda r, c: c < seen[0],
        strength=lambda r, c: 0.55 * (c == NEW),
        followed=(0, NEW, 1, 1),
    )
    d.text(left - 8, top + 52, "place", "plain", 12, "end")
    for p in range(NEW + 1):
        now = p % WINDOW == place
        d.text(
            left + (p + 0.5) * wide,
            top + 52,
            p % WINDOW,
            "ink" if now else "plain",
            12,
            bold=now,
        )
    edge = left + seen[0] * wide
    for a, b, says in (
        (left, edge, "forgotten"),
        (edge, line.right, "kept, and handed out in this order"),
    ):
        d.line((a + 4, 182), (b - 4, 182), kind="plain")
        d.text((a + b) / 2, 200, says, size=12)
    d.text(
        left,
        240,
        f"{NEW} goes where {gone} lay: {NEW} % {WINDOW} = {place}.",
        at="start",
    )
    return d
