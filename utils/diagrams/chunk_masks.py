"""Lesson 10: who may look where, in a prompt, behind padding and behind a prefix."""

from utils.diagrams.drawing import Drawing

LONG = ["The", "trophy", "did", "not", "fit", "in"]
SHORT = ["·", "·", "It", "was"]
WIDE, HIGH = 40, 24


def chunk_mask(t_q: int, t_k: int, padding: int = 0) -> list[list[bool]]:
    """True = may look; the queries are the last of the positions."""
    return [
        [padding <= key <= query for key in range(t_k)]
        for query in range(t_k - t_q, t_k)
    ]


def draw() -> Drawing:
    d = Drawing(
        *(790, 240),
        "Who may look: a prompt, padding, a prefix",
        "Four tables, row = query, column = key. In a prompt of four words each "
        "sees itself and what stands before it. In a row with two tokens of padding "
        "at the left nobody looks at these columns. Two words behind a prefix of "
        "three see the prefix and each other's past. One word alone sees everything.",
    )

    def panel(x, y, t_q, words, name, says, padding=0):
        area = d.mask(
            *(x, y, chunk_mask(t_q, len(words), padding)),
            cell=WIDE,
            height=HIGH,
            labels=words[-t_q:],
            heads=words,
            purpose=says,
        )
        d.text(x, y - 28, name, size=14, at="start", bold=True)
        return area

    panel(62, 68, 4, LONG[:4], "the prompt, one chunk", "nobody looks ahead")
    panel(
        286,
        68,
        4,
        SHORT,
        "padding 2, at the left",
        "nobody looks at it,\nand it sees nothing",
        2,
    )
    for y, t_q, n, name in (
        (68, 2, 5, "a chunk behind a prefix"),
        (177, 1, 6, "one step"),
    ):
        area = panel(516, y, t_q, LONG[:n], name, "")
        kept = (n - t_q) * WIDE
        d.line((area.x, y - 19), (area.x + kept, y - 19), kind="key", width=3)
    d.text(516, 219, "no mask needed", "plain", 12, "start")
    d.line((656, 215), (680, 215), kind="key", width=3)
    d.text(686, 219, "in the cache", "key", 12, "start")
    return d
