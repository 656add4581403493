"""Lesson 09: inputs and targets are one piece, shifted once."""

from utils.diagrams.drawing import Drawing

PIECE = "import"
FOLLOWED = 2


def draw() -> Drawing:
    T = len(PIECE) - 1
    d = Drawing(
        *(820, 338),
        "Inputs and targets, shifted once",
        f"A piece of {T + 1} letters, {PIECE}. The inputs are its first {T}, "
        f"{', '.join(PIECE[:-1])}; the targets its last {T}, {', '.join(PIECE[1:])}. "
        f"At the followed position the model has read {PIECE[: FOLLOWED + 1]} and is "
        f"asked for {PIECE[FOLLOWED + 1]}. Not shifted, the answer is what it has just "
        "read; shifted twice, a letter is passed over.",
    )

    def row(x, y, letters, kind, name="", shape="", cell=56, height=30):
        d.tensor(
            *(x, y, 1, len(letters), kind),
            followed=(0, FOLLOWED, 1, 1) if name else None,
            cell=cell,
            height=height,
        )
        for i, letter in enumerate(letters):
            d.text(x + cell * (i + 0.5), y + height / 2 + 5, letter, size=14)
        d.text(x - 14, y + height / 2 + 5, name, kind, 14, "end", bold=True)
        end = x + cell * len(letters) + 12
        d.text(end, y + height / 2 + 4, shape, "plain", 11, "start", code=True)

    left, cell = 100, 56
    row(left, 34, PIECE, "plain")
    d.text(left - 14, 54, "piece", "plain", 14, "end", bold=True)
    d.text(left + 6 * cell + 12, 53, "T + 1", "plain", 11, "start", code=True)
    row(left, 108, PIECE[:-1], "query", "inputs", "(B, T)")
    row(left, 276, PIECE[1:], "value", "targets", "(B, T)")
    d.line((left, 28), (left + T * cell, 28), kind="query", width=3)
    d.line((left + cell, 70), (left + 6 * cell, 70), kind="value", width=3)
    d.text(left + 6 * cell, 88, "the last T", "value", 12, "end")
    d.text(left, 20, "the first T", "query", 12, "start")
    d.box(left, 180, T * cell, 40, "model, with the causal mask")
    for i in range(T):
        x = left + cell * (i + 0.5)
        d.line((x, 72), (x, 108), kind="plain", width=0.75)
        d.arrow((x, 138), (x, 178))
        d.arrow((x, 220), (x, 274))
    d.text(left + T * cell + 12, 253, "is asked for", "plain", 12, "start")

    d.line((540, 24), (540, 314), kind="plain", width=0.75)
    for y, heading, targets, says in (
        (66, "not shifted", PIECE[:-1], "The answer is what it has read."),
        (218, "shifted twice", PIECE[2:], "One letter is passed over."),
    ):
        d.text(566, y - 14, heading, "alarm", 14, "start", bold=True)
        row(566, y, PIECE[:-1], "query", cell=34, height=26)
        row(566, y + 46, targets, "alarm", cell=34, height=26)
        for i in range(len(targets)):
            d.arrow((583 + 34 * i, y + 26), (583 + 34 * i, y + 44))
        d.text(566, y + 92, says, "plain", 12, "start")
    return d
