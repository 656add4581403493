"""Lesson 02: one x, and the three projections of it."""

from utils.diagrams.drawing import Drawing

WORDS = ["dog", "bites", "the", "man"]
D_MODEL, D_HEAD, ROW = 6, 3, 2
MADE = [
    ("query", "Q", "query", "what it looks for"),
    ("key", "K", "key", "what it is found by"),
    ("value", "V", "value", "what it hands over"),
]


def draw() -> Drawing:
    d = Drawing(
        *(800, 362),
        "Queries, keys and values from one x",
        f"x has {len(WORDS)} rows, one for each position. Three learned matrices make "
        "of every row a query, what it looks for, a key, what it is found by, and a "
        f"value, what it hands over. The rows of “{WORDS[ROW]}” are marked: each comes "
        "from the same row of x and from no other.",
    )
    rows, rim = len(WORDS), (ROW, 0, 1, D_HEAD)
    x = d.tensor(
        *(78, 142, rows, D_MODEL, "stream", "x", "(B, T, d_model)"),
        "one vector\nfor each position",
        labels=WORDS,
        followed=(ROW, 0, 1, D_MODEL),
    )
    for i, (kind, name, of, purpose) in enumerate(MADE):
        y = 34 + i * 108
        middle = y + rows * 10
        box = d.box(314, middle - 20, 84, 40, f"W_{name}", size=15)
        d.text(box.middle, box.bottom + 16, "(d_model, d_head)", "plain", 11, code=True)
        d.arrow((x.right + 10, x.centre), (box.x - 6, middle), kind=kind, width=2)
        d.arrow((box.right + 6, middle), (480, middle), kind=kind, width=2)
        made = d.tensor(490, y, rows, D_HEAD, kind, followed=rim)
        d.text(made.right + 26, middle - 9, name, kind, 20, "start", bold=True)
        d.text(made.right + 52, middle - 9, f"the {of}:", size=14, at="start")
        d.text(made.right + 52, middle + 10, purpose, size=14, at="start", bold=True)
        d.text(
            made.right + 52,
            middle + 30,
            "(B, T, d_head)",
            "plain",
            11,
            "start",
            code=True,
        )
    return d
