"""Lesson 11: what is kept until the backward pass, in three ways."""

from utils.diagrams.drawing import Drawing

T, D_HEAD, BYTES = 1024, 64, 4  # one head in float32
SIDE = 128  # pixels of T
WIDE = SIDE * D_HEAD / T  # and of d_head, to the same scale
STRIPS = [("q", "query"), ("k", "key"), ("v", "value"), ("o", "value")]


def full(r, c):
    return 0.55


def draw() -> Drawing:
    strip, matrix, column = T * D_HEAD, T * T, T
    whole, again = (
        f"{BYTES * n / 2**20:.1f} MiB" for n in (3 * strip + matrix, 4 * strip + column)
    )
    d = Drawing(
        *(800, 292),
        "What is kept for the backward pass",
        f"One head at {T:,} tokens, to scale. The whole matrix: queries, keys, "
        f"values and the weights P are kept, {whole}. Blocks under autograd: every "
        "block of P is kept, and what it was made from, which is more. Blocks "
        "computed again: queries, keys, values, the output and one number L a "
        f"query, {again}; a block of P comes back as e to the power of s minus L.",
    )
    top = 76
    panels = (
        (
            "the whole matrix",
            3,
            1,
            f"kept: {whole}",
            f"nearly all of it P, ({T:,}, {T:,})",
        ),
        (
            "blocks, by autograd",
            3,
            4,
            "kept: more than that",
            "each block, and what made it",
        ),
        (
            "blocks, computed again",
            4,
            4,
            f"kept: {again}",
            "P = e^(s − L), a block at a time",
        ),
    )
    for i, (name, n_strips, n_blocks, size, says) in enumerate(panels):
        x, last = 30 + 262 * i, i == 2
        d.text(x, 36, name, size=14, at="start", bold=True)
        for n, (letter, kind) in enumerate(STRIPS[:n_strips]):
            left = x + 18 * n
            look = {"cell": WIDE, "height": SIDE, "strength": full}
            d.tensor(left, top, 1, 1, kind, letter, **look)
        if last:
            d.text(x + 74, top - 8, "L", size=14, bold=True)
            d.line((x + 74, top), (x + 74, top + SIDE))
        left, gap = x + 92, 4 * (n_blocks > 1)
        side = (SIDE - 3 * gap) / n_blocks if gap else SIDE
        for r in range(n_blocks):
            for c in range(n_blocks):
                now = not last or (r, c) == (2, 1)
                d.tensor(
                    *(left + c * (side + gap), top + r * (side + gap), 1, 1),
                    "query" if now else "plain",
                    cell=side,
                    strength=full if now else None,
                    ground=now,
                    followed=(0, 0, 1, 1) if now and last else None,
                )
        d.text(left + SIDE / 2, top - 8, "P", "query", 14, bold=True)
        d.text(x, top + SIDE + 32, size, at="start", bold=True)
        d.text(x, top + SIDE + 52, says, "plain", 12, "start")
    return d
