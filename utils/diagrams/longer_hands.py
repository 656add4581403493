"""Lesson 04: how far each pair turns in a longer text, and two repairs."""

import math

from utils.diagrams.drawing import Drawing

D_HEAD, BASE, TRAINED, FACTOR = 8, 100.0, 32, 4  # small, so that slow pairs show
RADIUS, LEFT, TOP, COLUMN, ROW = 36, 236, 96, 148, 112


def frequencies(base):
    return [base ** (-2 * i / D_HEAD) for i in range(D_HEAD // 2)]


def draw() -> Drawing:
    old = frequencies(BASE)
    larger = BASE * FACTOR ** (D_HEAD / (D_HEAD - 2))  # the lesson's ntk_base
    rows = [
        ("as it is", f"b = {BASE:g}", old),
        ("interpolated", f"positions / {FACTOR}", [f / FACTOR for f in old]),
        ("NTK base", f"b = {larger:,.0f}", frequencies(larger)),
    ]
    end = TRAINED * FACTOR

    d = Drawing(
        *(800, 420),
        "How far each pair of RoPE turns in a longer text",
        f"A model trained on {TRAINED} positions reads {end}. As it is, the slow pairs "
        "turn to angles that training never showed. Interpolation keeps all angles "
        f"inside and makes every pair {FACTOR} times slower. The NTK base leaves the "
        "first pair as it was and slows the last one down by the whole factor.",
    )
    for i, frequency in enumerate(old):
        x, seen = LEFT + i * COLUMN, frequency * TRAINED
        d.text(x, 34, f"pair {i}", size=14, bold=True)
        for r, (_, _, now) in enumerate(rows):
            y, angle = TOP + r * ROW, now[i] * end
            d.sector(x, y, RADIUS, 0, seen, "value", 0.45)
            if seen < min(angle, 2 * math.pi) - 1e-6:
                d.sector(x, y, RADIUS, seen, min(angle, 2 * math.pi), "alarm", 0.55)
            d.ring(x, y, RADIUS)
            hand = x + RADIUS * math.cos(angle), y - RADIUS * math.sin(angle)
            d.arrow((x, y), hand, width=2)
            closer = i == 0 and now[i] < frequency
            kind = "alarm" if closer else "plain"
            d.text(x + RADIUS + 10, y - 2, f"{now[i]:.2f}", kind, 13, "start", closer)
            d.text(x + RADIUS + 10, y + 13, "a step", kind, 11, "start")
    for r, (name, how, _) in enumerate(rows):
        d.text(26, TOP + r * ROW - 2, name, size=14, at="start", bold=True)
        d.text(26, TOP + r * ROW + 17, how, "plain", 12, "start")
    for x, kind, text in (
        (120, "value", f"seen in training, {TRAINED} positions"),
        (346, "alarm", f"new at {end} positions"),
    ):
        d.tensor(x, 384, 1, 1, kind, strength=lambda r, c: 0.5, cell=16)
        d.text(x + 24, 397, text, "plain", 12, "start")
    d.arrow((560, 392), (584, 392), width=2)
    d.text(592, 397, "at the last position", "plain", 12, "start")
    return d
