"""Lesson 04: RoPE's two layouts of pairs, and the permutation between them."""

from utils.diagrams.drawing import Drawing

D_HEAD, CELL = 8, 72
TOP, BOTTOM, LEFT = 66, 176, 160


def draw() -> Drawing:
    half = D_HEAD // 2
    order = [*range(0, D_HEAD, 2), *range(1, D_HEAD, 2)]  # evens first, then odds

    d = Drawing(
        *(770, 268),
        "Two layouts of RoPE's pairs",
        "In this course neighbours form a pair: 0 and 1, 2 and 3, and so on. "
        f"Most checkpoints pair number i with number i + {half}. In the order "
        f"{', '.join(map(str, order))} each pair of the one is a pair of the other.",
    )
    for y, numbers in ((TOP, range(D_HEAD)), (BOTTOM, order)):
        for place, number in enumerate(numbers):
            d.tensor(
                *(LEFT + place * CELL, y, 1, 1, "query"),
                values=lambda r, c, number=number: number,
                strength=lambda r, c, number=number: 0.75 - 0.25 * (number // 2),
                cell=CELL,
                height=30,
            )
    for place, number in enumerate(order):
        x, x2 = LEFT + (number + 0.5) * CELL, LEFT + (place + 0.5) * CELL
        d.line((x, TOP + 33), (x2, BOTTOM - 3), kind="query")
    for i in range(half):
        x = LEFT + (2 * i + 0.5) * CELL
        d.curve(x, TOP - 3, x + CELL, TOP - 3, 24, "query", 2, head=False)
        d.text(x + CELL / 2, TOP - 20, f"pair {i}", "query", 12)
        x = LEFT + (i + 0.5) * CELL
        d.curve(
            x, BOTTOM + 33, x + half * CELL, BOTTOM + 33, -64, "query", 2, head=False
        )
    d.text(LEFT - 14, TOP + 13, "neighbours", size=14, at="end", bold=True)
    d.text(LEFT - 14, TOP + 30, "(2i, 2i + 1)", "plain", 12, "end")
    d.text(LEFT - 14, BOTTOM + 13, "half-split", size=14, at="end", bold=True)
    d.text(LEFT - 14, BOTTOM + 30, "(i, i + d_head/2)", "plain", 12, "end")
    return d
