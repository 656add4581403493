"""Lesson 05: the classic feed-forward network beside the gated one."""

import math
from operator import mul

from utils.diagrams.drawing import Drawing

X = [1, 2, -1]  # one position, d_model = 3
W_1 = [  # its first 8 columns are the gate's
    [1, 0, -1, 1, 0, 1, -1, 0, 1, 0, -1, 1],
    [1, 0, -1, 0, 1, -1, 1, -1, 0, 1, 0, -1],
    [0, 1, 0, -1, 1, 0, 0, 1, -1, 0, 1, 1],
]
W_3 = [
    [1, -1, 0, 1, 1, 0, -1, 1],
    [1, 0, 1, -1, 0, 1, 0, 1],
    [0, 1, -1, 0, -1, 1, 1, 1],
]
UNIT = 2  # the hidden unit that is followed in numbers


def times(matrix):
    return [sum(map(mul, X, column)) for column in zip(*matrix, strict=True)]


def silu(number):
    return number / (1 + math.exp(-number))


def short(number):
    return f"{number:.1f}".removesuffix(".0").replace("0.", ".").replace("-", "−")


def draw() -> Drawing:
    hidden, up = times(W_1), times(W_3)
    gate, opened = hidden[:8], [silu(h) for h in hidden]
    product = [o * u for o, u in zip(opened, up, strict=False)]
    plain, gated = (n * len(X) * len(h) for n, h in ((2, hidden), (3, gate)))
    d = Drawing(
        *(840, 430),
        "The feed-forward network, plain and gated",
        "Left, one position of 3 features goes through w_1 to 12 hidden numbers, each "
        "is bent by itself, and w_2 brings them back to 3. Right, w_1 gives 8 gates "
        f"and w_3 8 numbers up. In the first unit a gate of {gate[0]} lets {up[0]} "
        f"pass as {product[0]:.1f}; in the followed one a gate of {gate[UNIT]} makes "
        f"{product[UNIT]:.1f} of {up[UNIT]}. Either way w_2 brings the hidden numbers "
        f"back to 3, and the matrices hold {plain} and {gated} numbers.",
    )

    def row(x, y, numbers, kind="plain", shape="", rim=None, cell=24):
        """One position's numbers around x."""
        left = x - cell / 2 * len(numbers)
        area = d.tensor(
            *(left, y, 1, len(numbers), kind),
            values=lambda r, c: short(numbers[c]) if numbers[c] is not None else "",
            followed=(0, rim, 1, 1) if rim is not None else None,
            cell=cell,
            height=22,
        )
        d.text(area.right + 8, y + 15, shape, "plain", 11, "start", code=True)

    def learned(x, y, name, width, use=""):
        d.box(x - 60, y, 120, 30)
        d.text(x - 26, y + 20, name, bold=True)
        d.text(x + 24, y + 20, width, "plain", 12)
        d.text(x + 68, y + 20, use, "learned", 13, "start", bold=True)

    def ends(x, d_ff, use):
        """What both have: x comes in, w_2 leads back."""
        row(x, 52, X, "stream", "(…, d_model)")
        d.arrow((x, 298), (x, 314))
        learned(x, 316, "w_2", f"{d_ff} × 3", use)
        d.arrow((x, 346), (x, 364))
        row(x, 366, [None] * 3, "stream", "(…, d_model)")

    d.text(160, 32, "FFN", size=15, bold=True)
    ends(160, len(hidden), "narrow")
    d.arrow((160, 74), (160, 104))
    learned(160, 106, "w_1", "3 × 12", "widen")
    d.arrow((160, 136), (160, 166))
    row(160, 168, hidden, rim=UNIT, cell=23)
    d.arrow((160, 190), (160, 274))
    d.text(168, 226, "f, here silu:\neach by itself", size=12, at="start")
    row(160, 276, opened, rim=UNIT, cell=23)
    d.text(22, 158, "(…, d_ff)", "plain", 11, "start", code=True)
    d.text(160, 414, f"2 · 3 · 12 = {plain} numbers", "plain", 12)

    d.line((322, 20), (322, 415), kind="plain", width=0.75)
    d.text(575, 32, "SwiGLU", size=15, bold=True)
    ends(575, len(gate), "down")
    d.text(353, 158, "(…, d_ff)", "plain", 11, "start", code=True)
    for x, name, use, numbers in ((455, "w_1", "gate", gate), (695, "w_3", "up", up)):
        d.arrow((575, 74), (575, 88), (x, 88), (x, 104))
        learned(x, 106, name, "3 × 8", use)
        d.arrow((x, 136), (x, 166))
        row(x, 168, numbers, rim=UNIT)
    d.arrow((455, 190), (455, 210))
    d.text(463, 204, "silu", size=12, at="start")
    row(455, 212, opened[:8], rim=UNIT)
    d.line((455, 234), (455, 256), (566, 256))
    d.line((695, 190), (695, 256), (584, 256))
    d.text(575, 262, "⊙", size=18)
    d.text(705, 228, "number\nby number", "plain", 12, "start")
    d.arrow((575, 264), (575, 274))
    row(575, 276, product, rim=UNIT, cell=28)
    d.text(575, 414, f"3 · 3 · 8 = {gated} numbers", "plain", 12)
    return d
