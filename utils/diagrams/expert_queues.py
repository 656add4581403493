"""Lesson 12: capacity, and the queues in which first choices stand first."""

from utils.diagrams.drawing import Drawing

CHOICES = [[0, 1], [0, 2], [0, 1], [1, 0]]  # of each token, the first choice first
N_EXPERTS, CAPACITY = 3, 2
ORDINALS = ["1st", "2nd"]


def queues() -> list[list[tuple[int, int]]]:
    """For each expert, who stands in its queue: (token, which of its choices)."""
    line = [(t, c) for c in range(2) for t in range(len(CHOICES))]
    return [[(t, c) for t, c in line if CHOICES[t][c] == e] for e in range(N_EXPERTS)]


def draw() -> Drawing:
    standing = queues()
    dropped = [who for queue in standing for who in queue[CAPACITY:]]
    lost = [t for t in range(len(CHOICES)) if sum(t == who for who, _ in dropped) == 2]
    d = Drawing(
        *(820, 264),
        "Queues of experts, first choices first",
        f"Four tokens have two choices each, and an expert has {CAPACITY} places. "
        f"All first choices queue before all second ones. {len(dropped)} of 8 "
        f"choices are dropped, and token {lost[0]} loses both.",
    )
    d.text(28, 36, "choices", size=14, at="start", bold=True)
    d.tensor(
        *(94, 72, 4, 2, "query", "", "(N, k)"),
        values=lambda r, c: CHOICES[r][c],
        labels=[f"token {t}" for t in range(4)],
        heads=ORDINALS,
        cell=44,
        height=32,
        hidden=lambda r, c: (r, c) in dropped,
    )
    d.arrow((194, 136), (258, 136), above="queue")
    d.text(270, 36, "queues", size=14, at="start", bold=True)
    for e, queue in enumerate(standing):
        y = 72 + 46 * e
        d.box(270, y, 84, 34, f"expert {e}")
        for place in range(max(CAPACITY, len(queue))):
            x, served = 366 + 106 * place + 20 * (place >= CAPACITY), place < CAPACITY
            if place < len(queue):
                t, c = queue[place]
                kind = "value" if served else "alarm"
                d.box(x, y, 98, 34, f"token {t}: {ORDINALS[c]}", kind=kind, size=12)
            else:
                d.box(x, y, 98, 34, "", kind="plain")
    edge = 366 + 106 * CAPACITY + 6
    d.line((edge, 54), (edge, 204), dashed=True)
    d.text(edge - 110, 48, f"capacity {CAPACITY}: served", "value", 12)
    d.text(edge + 116, 48, "dropped", "alarm", 12)
    d.text(
        270,
        244,
        f"Token {lost[0]} loses both: the residual connection carries it on.",
        "plain",
        12,
        "start",
    )
    return d
