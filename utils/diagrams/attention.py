"""Lesson 02: one query's attention in numbers."""

import math
from operator import mul

from utils.diagrams.drawing import Drawing

WORDS = ["dog", "bites", "the", "man"]
Q = [[2, 0, 1], [0, 1, 1], [1, 2, 0], [1, 0, 2]]
K = [[2, 1, 0], [0, 1, 1], [1, 1, 2], [0, 2, 1]]
V = [[1, 0, 2], [0, 3, 1], [2, 1, 0], [1, 1, 1]]
ROW = 2  # the query that is followed: "the"


def softmax(scores):
    shares = [math.exp(s) for s in scores]
    return [s / sum(shares) for s in shares]


def draw() -> Drawing:
    scores = [[sum(map(mul, q, k)) for k in K] for q in Q]
    scaled = [[s / math.sqrt(3) for s in row] for row in scores]
    weights = [softmax(row[: i + 1]) + [0] * (3 - i) for i, row in enumerate(scaled)]
    mix = [sum(map(mul, weights[ROW], column)) for column in zip(*V, strict=True)]

    def followed(table, digits=0):
        def value(r, c):
            shown = f"{table[r][c]:.{digits}f}".removeprefix("0")
            return shown if r == ROW and table[r][c] else ""

        return value

    listed = ", ".join(f"{weight:.2f}" for weight in weights[ROW])
    d = Drawing(
        *(850, 205),
        "Attention of one query, in numbers",
        f"The query of “{WORDS[ROW]}” is multiplied with every key, which gives the "
        f"scores {', '.join(map(str, scores[ROW]))}. Divided by the root of 3, "
        f"the last one hidden, they become the weights {listed}; the output is the "
        "values' sum with these weights.",
    )
    rim = ROW, 0, 1, 3
    d.tensor(
        *(52, 55, 4, 3, "query", "Q", "(T, d_head)", "what it\nlooks for"),
        values=followed(Q),
        labels=WORDS,
        followed=rim,
    )
    d.operator(129, 95, "·")
    d.tensor(
        *(145, 65, 3, 4, "key", "Kᵀ", "(d_head, T)", "what it\nis found by"),
        values=lambda r, c: K[c][r],
    )
    d.operator(240, 95, "=")
    d.tensor(
        *(255, 55, 4, 4, "query", "scores", "(T, T)", "every query\nwith every key"),
        values=followed(scores),
        followed=(ROW, 0, 1, 4),
    )
    d.arrow((342, 95), (404, 95), above="÷ √d_head", below="mask")
    d.tensor(
        *(410, 55, 4, 4, "query", "masked", "(T, T)", "nobody\nlooks ahead"),
        values=lambda r, c: f"{scaled[r][c]:.1f}" if r == ROW and c <= r else "",
        hidden=lambda r, c: c > r,
        followed=(ROW, 0, 1, 4),
    )
    d.arrow((497, 95), (559, 95), above="softmax", below="by row")
    d.tensor(
        *(565, 55, 4, 4, "query", "weights", "(T, T)", "each row\nsums to 1"),
        values=followed(weights, 2),
        strength=lambda r, c: weights[r][c],
        hidden=lambda r, c: c > r,
        followed=(ROW, 0, 1, 4),
    )
    d.operator(657, 95, "·")
    d.tensor(
        *(672, 55, 4, 3, "value", "V", "(T, d_v)", "what it\nhands over"),
        values=lambda r, c: V[r][c],
    )
    d.operator(747, 95, "=")
    d.tensor(
        *(762, 55, 4, 3, "value", "output", "(T, d_v)", "a blend\nof the values"),
        values=lambda r, c: f"{mix[c]:.1f}" if r == ROW else "",
        followed=rim,
    )
    return d
