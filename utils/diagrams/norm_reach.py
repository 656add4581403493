"""Lesson 06: which numbers a norm sees."""

import math

from utils.diagrams.drawing import Drawing

SEQUENCES = [  # B = 2, T = 3, D = 4; the first is the lesson's
    [[2, 4, 5, 9], [0, 0, 1, 1], [30, 10, 20, 20]],
    [[1, 3, 2, 0], [6, 2, 2, 4], [0, 7, 1, 3]],
]
VECTOR = SEQUENCES[0][0]


def listed(numbers, digits):
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


def draw() -> Drawing:
    mean = sum(VECTOR) / 4
    deviation = math.sqrt(sum((v - mean) ** 2 for v in VECTOR) / 4)
    rms = math.sqrt(sum(v * v for v in VECTOR) / 4)
    layer = [(v - mean) / deviation for v in VECTOR]
    root = [v / rms for v in VECTOR]
    d = Drawing(
        *(820, 366),
        "Which numbers a norm sees",
        "Two sequences of three positions with four features. LayerNorm and RMSNorm "
        "take the features of one position; BatchNorm takes one feature at all "
        f"positions of all sequences. The vector {listed(VECTOR, 0)} has mean {mean:g} "
        f"and standard deviation {deviation:.2f}; LayerNorm makes {listed(layer, 2)} "
        f"of it. Its root mean square is {rms:.2f}; RMSNorm makes {listed(root, 2)}.",
    )
    for left, heading, kind, says in (
        (40, "LayerNorm, RMSNorm", "query", "one position alone:\nall its features"),
        (450, "BatchNorm", "alarm", "one feature:\nevery position of every sequence"),
    ):
        own = kind == "query"
        d.text(left, 34, heading, kind, 15, "start", bold=True)
        d.text(left + 330, 34, "mixes tokens" * (not own), kind, 12, "end")
        for b in range(2):

            def seen(r, c, own=own, b=b):
                return 0.55 * ((b == 0 and r == 0) if own else c == 1)

            d.tensor(
                *(left + 34 + 160 * b, 66, 3, 4, kind),
                purpose=f"sequence {b}",
                values=lambda r, c, b=b: SEQUENCES[b][r][c],
                strength=seen,
                labels=["t = 0", "1", "2"] if b == 0 else (),
                followed=((0, 0, 1, 4) if b == 0 else None) if own else (0, 1, 3, 1),
                cell=26,
                height=22,
            )
        d.text(left + 165, 174, says, "plain", 12)
    d.line((40, 212), (780, 212), kind="plain", width=0.75)
    d.text(40, 240, "the framed position, in numbers", "plain", 12, "start")

    def row(x, y, numbers, name, kind):
        return d.tensor(
            *(x, y, 1, 4, kind, name),
            values=lambda r, c: f"{numbers[c]:.1f}".removesuffix(".0").replace(
                "-", "−"
            ),
            cell=38,
            height=24,
        )

    x = row(40, 288, VECTOR, "x", "query")
    for y, name, numbers, does in (
        (268, "LayerNorm", layer, f"− mean {mean:g},  ÷ deviation {deviation:.2f}"),
        (320, "RMSNorm", root, f"÷ root mean square {rms:.2f}"),
    ):
        end = row(480, y, numbers, "", "query")
        d.arrow((x.right + 6, x.centre), (250, y + 12), (472, y + 12))
        d.text(358, y + 6, does, size=12)
        d.text(end.right + 12, y + 16, name, "query", 14, "start", bold=True)
    return d
