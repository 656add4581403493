"""Lesson 06: where the norm stands, before a sublayer or in the stream."""

from utils.diagrams.drawing import Drawing

PARTS = ["attention", "feed-forward"]


def draw() -> Drawing:
    d = Drawing(
        *(820, 300),
        "Pre-norm and post-norm as streams",
        "Above, pre-norm: the residual stream runs through from left to right, and "
        "each branch is norm, sublayer, addition. Below, post-norm: each branch is the "
        "sublayer alone, and after every addition the stream itself goes through a "
        "norm.",
    )
    for y, name, formula in (
        (58, "pre-norm", "x + f(norm(x))"),
        (198, "post-norm", "norm(x + f(x))"),
    ):
        pre = name == "pre-norm"
        d.text(24, y - 4, name, size=15, at="start", bold=True)
        d.text(24, y + 16, formula, "plain", 11, "start", code=True)
        d.stream((150, y), (780, y))
        d.text(142, y + 5, "x", at="end", size=14)
        for left, part in zip((180, 470), PARTS, strict=True):
            d.dot(left, y, radius=4)
            add = left + (240 if pre else 160)
            d.line((left, y), (left, y + 52))
            if pre:
                d.arrow((left, y + 52), (left + 26, y + 52))
                d.box(left + 28, y + 38, 60, 28, "norm")
                d.arrow((left + 88, y + 52), (left + 106, y + 52))
                d.box(left + 108, y + 38, 106, 28, part)
                d.line((left + 214, y + 52), (add, y + 52))
            else:
                d.arrow((left, y + 52), (left + 20, y + 52))
                d.box(left + 22, y + 38, 106, 28, part)
                d.line((left + 128, y + 52), (add, y + 52))
                d.box(left + 195, y - 15, 60, 30, "norm")
            d.arrow((add, y + 52), (add, y + 11))
            d.plus(add, y)
        d.text(800, y + 5, "…", "stream", 14)
    d.text(455, 32, "nothing stands in the stream: additions only", "stream", 12)
    d.text(455, 172, "a norm in the stream after every addition", "alarm", 12)
    return d
