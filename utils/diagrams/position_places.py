"""Lesson 04: the three places where position enters attention."""

import math

from utils.diagrams.drawing import Drawing

SLOPE, WORDS, WAVES = 0.5, 4, 6  # a head's slope of ALiBi, positions, columns
FLOW, LOW, CELL = 70, 190, 22  # the y of the flow, of what happens there


def draw() -> Drawing:
    def wave(p, c):
        angle = p * 10_000 ** (-(c - c % 2) / WAVES)
        return math.cos(angle) if c % 2 else math.sin(angle)

    d = Drawing(
        *(820, 366),
        "The three places where position enters",
        "First, a vector for each position can be added to the stream: sinusoids, or a "
        "learned table. Second, queries and keys can be turned by their position in "
        "every layer: RoPE. Third, something can be taken off each score, in "
        f"proportion to the distance: ALiBi, here with a slope of {SLOPE}.",
    )
    d.text(30, FLOW + 5, "tokens", size=13, at="start")
    d.arrow((76, FLOW), (96, FLOW))
    d.box(98, FLOW - 14, 88, 28, "embedding")
    d.stream((186, FLOW), (330, FLOW))
    one = 246
    d.plus(one, FLOW)
    d.arrow((330, FLOW), (356, FLOW - 22))
    d.arrow((330, FLOW), (356, FLOW + 22))
    d.box(358, FLOW - 37, 56, 28, "W_Q")
    d.box(358, FLOW + 9, 56, 28, "W_K")
    two = 468
    for y, kind in ((FLOW - 23, "query"), (FLOW + 23, "key")):
        d.arrow((414, y), (two - 16, y), kind=kind, width=2)
        d.ring(two, y, 13, kind)
        d.sector(two, y, 13, 0, 1.0, kind, 0.6)
        d.arrow((two + 15, y), (552, FLOW + (y - FLOW) * 0.4), kind=kind, width=2)
    d.box(554, FLOW - 16, 64, 32, "q · k", "query")
    three = 672
    d.arrow((618, FLOW), (three - 11, FLOW))
    d.plus(three, FLOW)
    d.arrow((three + 10, FLOW), (718, FLOW))
    d.box(720, FLOW - 16, 76, 32, "softmax", "ink")

    d.arrow((one, LOW - 22), (one, FLOW + 12), kind="stream", width=2)
    table = d.tensor(
        *(one - WAVES * 10, LOW, WORDS, WAVES, "stream"),
        strength=lambda p, c: (wave(p, c) + 1) / 2,
        labels=map(str, range(WORDS)),
        height=CELL,
    )
    d.text(table.x - 6, LOW - 8, "position", "plain", 12, "end")
    d.line((two, FLOW + 44), (two, LOW + 14), kind="query", dashed=True)
    for p in range(WORDS):
        x, y = two + (p - 1.5) * 44, LOW + 44
        d.ring(x, y, 18, "query")
        d.sector(x, y, 18, 0, p, "query", 0.35)
        d.arrow((x, y), (x + 18 * math.cos(p), y - 18 * math.sin(p)), kind="query")
        d.text(x, y + 36, p, "plain", 12)
    d.arrow((three, LOW - 22), (three, FLOW + 12), width=2)
    d.tensor(
        *(three - 2 * 32, LOW, WORDS, WORDS, "plain"),
        values=lambda m, n: f"{SLOPE * (n - m):g}".replace("-", "−") if n <= m else "",
        hidden=lambda m, n: n > m,
        labels=map(str, range(WORDS)),
        heads=map(str, range(WORDS)),
        cell=32,
        height=CELL,
    )
    for x, kind, what, how, where in (
        (one, "stream", "added to the stream", "sinusoids, or a learned table", "once"),
        (two, "query", "queries and keys turned", "RoPE", "in every layer"),
        (three, "ink", "taken off the scores", "ALiBi", "in every layer"),
    ):
        d.text(x, LOW + 118, what, kind, 14, bold=True)
        d.text(x, LOW + 138, how, "plain", 13)
        d.text(x, LOW + 156, where, "plain", 12)
    return d
