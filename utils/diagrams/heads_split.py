"""Lesson 03: columns cut into heads and merged, beside a reshape that mixes tokens."""

from utils.diagrams.drawing import Drawing

TOKENS, HEADS, D_HEAD = 3, 2, 2
WORDS = ["dog", "bites", "man"]
WIDTH = HEADS * D_HEAD
CELL = 26


def draw() -> Drawing:
    x = [[row * WIDTH + c for c in range(WIDTH)] for row in range(TOKENS)]
    flat = [number for row in x for number in row]
    right = [[row[h * D_HEAD : (h + 1) * D_HEAD] for row in x] for h in range(HEADS)]
    size = TOKENS * D_HEAD
    wrong = [
        [flat[h * size + t * D_HEAD :][:D_HEAD] for t in range(TOKENS)]
        for h in range(HEADS)
    ]

    d = Drawing(
        *(812, 310),
        "Columns cut into heads, and a reshape that mixes them",
        f"{TOKENS} tokens of {WIDTH} columns. Cut by columns, head 0 holds "
        f"{right[0]}, a part of each token. A reshape straight to the final shape "
        f"gives head 0 {wrong[0]}: the first token in two pieces, "
        "and a half of the second.",
    )

    def grid(x0, y, table, name="", kind="query", **rest):
        """Dark: the columns of head 0."""
        return d.tensor(
            *(x0, y, len(table), len(table[0]), kind, name),
            values=lambda r, c: table[r][c],
            strength=lambda r, c: 0.45 if table[r][c] % WIDTH < D_HEAD else 0,
            cell=CELL,
            **rest,
        )

    def two_heads(x0, heads, kind, purpose):
        for h, head in enumerate(heads):
            area = grid(
                *(x0, 64 + 110 * h, head),
                kind=kind,
                labels=[WORDS[numbers[0] // WIDTH] for numbers in head],
            )
            d.text(area.middle, area.y - 8, f"head {h}", kind, 14, bold=True)
        d.text(area.middle, area.bottom + 18, "(H, T, d_head)", "plain", 11, code=True)
        d.text(area.middle, area.bottom + 38, purpose, "plain", 12)

    middle = 158
    whole = grid(66, middle - 39, x, "x", labels=WORDS)
    d.text(whole.middle, whole.bottom + 18, "(T, H·d_head)", "plain", 11, code=True)
    d.text(whole.middle, whole.bottom + 38, "dark: columns of head 0", "plain", 12)
    d.arrow((whole.right + 10, middle), (246, middle), above="split", width=2)
    two_heads(306, right, "query", "a part of every token")
    d.arrow((372, middle), (438, middle), above="merge", width=2)
    merged = grid(450, middle - 39, x)
    d.text(merged.middle, merged.y - 8, "as it was", "query", 14, bold=True)
    d.text(merged.middle, merged.bottom + 18, "(T, H·d_head)", "plain", 11, code=True)
    d.line((590, 24), (590, 288), kind="plain", width=0.75)
    d.text(716, 30, "✗ reshape alone", "alarm", 14, bold=True)
    two_heads(690, wrong, "alarm", "right shape, mixed tokens")
    return d
