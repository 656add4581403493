"""Lesson 11: attention in tiles, and one query's m and ℓ in numbers."""

import math

from utils.diagrams.drawing import Drawing

BLOCKS, NOW = 6, (3, 2)  # blocks of queries and of keys; the tile that is computed
SCORES = [[1, 3], [2, 0], [5, 4]]  # one query's, block by block
TILE = 32


def online(blocks):
    """After each block: m, the factor on the old sum, ℓ."""
    m, total, steps = -math.inf, 0.0, []
    for scores in blocks:
        new = max(m, *scores)
        factor = math.exp(m - new)
        total = total * factor + sum(math.exp(s - new) for s in scores)
        steps.append((m, new, factor, total))
        m = new
    return steps


def memory(d):
    d.frame(14, 14, 372, 372, "large memory (HBM): read and written in blocks")
    x, y, side = 128, 112, BLOCKS * TILE
    row, column = NOW
    for top, kind, name in ((50, "key", "K"), (76, "value", "V")):
        d.tensor(
            *(x, top, 1, BLOCKS, kind),
            cell=TILE,
            height=18,
            strength=lambda r, c: 0.75 * (c == column),
        )
        d.text(x - 14, top + 14, name, kind, 14, bold=True)
    for left, kind, name in ((76, "query", "Q"), (x + side + 14, "value", "O")):
        d.tensor(
            *(left, y, BLOCKS, 1, kind, name),
            cell=18,
            height=TILE,
            strength=lambda r, c: 0.75 * (r == row),
        )
    d.tensor(
        *(x, y, BLOCKS, BLOCKS, "plain"),
        cell=TILE,
        ground=False,
        hidden=lambda r, c: c > r,
    )
    for r in range(row + 1):
        cols = min(r + 1, column if r == row else BLOCKS)
        d.tensor(x, y + r * TILE, 1, cols, "query", cell=TILE)
    d.tensor(
        *(x + column * TILE, y + row * TILE, 1, 1, "query"),
        cell=TILE,
        strength=lambda r, c: 0.75,
        followed=(0, 0, 1, 1),
    )
    middle = y + (row + 0.5) * TILE
    d.arrow((x + 6, middle), (x + column * TILE - 3, middle))
    d.text(76, 332, "scores, (T, T): never written as a whole", size=12, at="start")
    keys = (
        (34, "done, forgotten", {}),
        (166, "now", {"strength": lambda r, c: 0.75}),
        (232, "never computed", {"hidden": lambda r, c: True, "ground": False}),
    )
    for left, says, look in keys:
        kind = "plain" if "hidden" in look else "query"
        d.tensor(left, 350, 1, 1, kind, cell=14, **look)
        d.text(left + 20, 362, says, "plain", 12, "start")


def chip(d, steps):
    d.frame(402, 14, 404, 372, "on the chip: one tile, and three things for each query")
    d.tensor(424, 74, 2, 3, "query", "Q", cell=16)
    d.operator(486, 90, "·")
    d.tensor(500, 66, 3, 2, "key", "Kᵀ", cell=16)
    d.operator(546, 90, "=")
    d.tensor(560, 74, 2, 2, "query", "scores", cell=16)
    d.arrow((602, 90), (662, 90), above="e^(s − m)")
    d.text(680, 95, "P", "query", 14, bold=True)
    d.operator(697, 90, "·")
    d.tensor(712, 74, 2, 3, "value", "V", cell=16)
    d.text(766, 95, "→ o", "value", 14, "start", bold=True)

    d.text(424, 142, "one query in numbers", size=14, at="start", bold=True)
    columns = 440, 508, 580, 676, 772
    for x, head in zip(columns, ("block", "scores", "m", "factor", "ℓ"), strict=True):
        d.text(x, 164, head, "plain", 12)
    for i, (old, m, factor, total) in enumerate(steps):
        y = 190 + 30 * i
        rises = i > 0 and m > old
        kind = "alarm" if rises else "ink"
        if rises:
            d.tensor(416, y - 18, 1, 1, "query", cell=376, height=27)
        d.text(columns[0], y, i, "plain")
        d.tensor(
            *(columns[1] - 24, y - 16, 1, 2, "query"),
            values=lambda r, c, i=i: SCORES[i][c],
            cell=24,
            height=22,
        )
        d.text(columns[2], y, m, kind, bold=rises)
        says = f"e^({old} − {m}) = {factor:.2f}" if i else "–"
        d.text(columns[3], y, says, kind)
        d.text(columns[4], y, f"{total:.2f}")
    lines = (
        "A larger m makes the old ℓ and the old o wrong\n"
        "by one factor. One multiplication mends both."
    )
    d.text(424, 294, lines, "plain", 12, "start")
    d.text(424, 340, "o ← e^(m − m′) · o + P · V", at="start", size=13)
    d.text(424, 364, "at the end of the row: O = o / ℓ", at="start", size=13)


def draw() -> Drawing:
    steps = online(SCORES)
    d = Drawing(
        *(820, 400),
        "Attention in tiles, and one query in numbers",
        "Queries, keys, values and output lie in a large memory and are read and "
        "written in blocks; the table of scores is never written as a whole. On the "
        "chip, one query sees its scores block by block. Its maximum goes "
        f"{', '.join(str(m) for _, m, _, _ in steps)}, and its sum, each time "
        f"relative to it, {', '.join(f'{total:.2f}' for *_, total in steps)}.",
    )
    memory(d)
    chip(d, steps)
    return d
