"""Lesson 14: the same three matrices, in two orders."""

from utils.diagrams.drawing import Drawing

T, D, CELL = 12, 3, 11


def counts(t: int) -> tuple[int, int]:
    """Multiplications of both products: (QKᵀ)V, and Q(KᵀV)."""
    return 2 * t * t * D, 2 * t * D * D


def draw() -> Drawing:
    left, right = counts(T)
    twice = [more // once for more, once in zip(counts(2 * T), counts(T), strict=True)]
    d = Drawing(
        *(820, 478),
        "Two orders of the same three matrices",
        f"With {T} tokens and a width of {D}: queries times keys first gives a table "
        f"of {T} by {T}, and the two products take {left} multiplications. Keys "
        f"times values first gives a table of {D} by {D}, and {right} "
        f"multiplications. Twice the text makes the first {twice[0]} times as many, "
        f"the second {twice[1]} times.",
    )

    def matrix(x, centre, rows, cols, kind, name, shape="", **more):
        return d.tensor(
            *(x, centre - rows * CELL / 2, rows, cols, kind, name, shape),
            cell=CELL,
            **more,
        )

    def notes(y, heading, product, count, twice):
        d.text(560, y, heading, size=14, at="start", bold=True)
        d.text(560, y + 24, product, "plain", 12, "start")
        d.text(560, y + 44, f"{count} multiplications", at="start")
        d.text(
            560, y + 64, f"Twice the text: {twice} times as many.", "plain", 12, "start"
        )

    y = 130
    d.frame(20, 36, 226, 196)
    d.text(234, 54, "first", "plain", 12, "end")
    matrix(34, y, T, D, "query", "Q", "(T, d)")
    d.operator(82, y, "·")
    matrix(98, y, D, T, "key", "Kᵀ", "(d, T)")
    d.operator(264, y, "→")
    matrix(282, y, T, T, "query", "QKᵀ", "(T, T)", followed=(0, 0, T, T))
    d.operator(428, y, "·")
    matrix(442, y, T, D, "value", "V", "(T, d)")
    d.operator(490, y, "=")
    matrix(504, y, T, D, "value", "output")
    notes(y - 40, "(QKᵀ)V", f"2 · T · T · d, with T = {T}, d = {D}", left, twice[0])

    y = 360
    matrix(34, y, T, D, "query", "Q", "(T, d)")
    d.operator(82, y, "·")
    d.frame(96, y - 94, 226, 196)
    d.text(108, y - 76, "first", "plain", 12, "start")
    matrix(106, y, D, T, "key", "Kᵀ", "(d, T)")
    d.operator(252, y, "·")
    matrix(268, y, T, D, "value", "V", "(T, d)")
    d.operator(338, y, "→")
    matrix(354, y, T, D, "query", "Q")
    d.operator(400, y, "·")
    matrix(416, y, D, D, "value", "KᵀV", "(d, d)", followed=(0, 0, D, D))
    d.operator(490, y, "=")
    matrix(504, y, T, D, "value", "output")
    notes(y - 40, "Q(KᵀV)", "2 · T · d · d", right, twice[1])
    return d
