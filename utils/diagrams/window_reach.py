"""Lesson 14: how far a window reaches through layers."""

from utils.diagrams.drawing import Drawing

WINDOW, LAYERS, T = 4, 3, 13
X, Y, ACROSS, DOWN = 46, 58, 50, 72


def cone() -> list[set[int]]:
    """The positions that the last output depends on: at the output, then below."""
    levels = [{T - 1}]
    for _ in range(LAYERS):
        near = {q - back for q in levels[-1] for back in range(WINDOW)}
        levels.append({p for p in near if p >= 0})
    return levels


def paths() -> list[int]:
    """How many ways lead from each input to the last output."""
    ways = [0] * (T - 1) + [1]
    for _ in range(LAYERS):
        ways = [sum(ways[p : p + WINDOW]) for p in range(T)]
    return ways


def draw() -> Drawing:
    levels = cone()
    reach = T - 1 - min(levels[-1])
    d = Drawing(
        *(740, 362),
        "How far a window reaches through layers",
        f"Under a window of {WINDOW} a position sees itself and {WINDOW - 1} before "
        f"it. Through {LAYERS} layers the last output depends on inputs up to "
        f"{reach} steps back, {LAYERS} times {WINDOW - 1}. A single path leads to "
        "the farthest.",
    )

    def at(p, level):
        return X + ACROSS * p, Y + DOWN * level

    for level in range(LAYERS):
        for q in levels[level]:
            for back in range(WINDOW):
                if q - back in levels[level + 1]:
                    far = back == WINDOW - 1 and q == min(levels[level])
                    (x, y), (x2, y2) = at(q, level), at(q - back, level + 1)
                    kind, width = ("alarm", 2.5) if far else ("query", 0.75)
                    d.line((x, y), (x2, y2), kind=kind, width=width)
    for level, met in enumerate(levels):
        for p in range(T):
            d.dot(*at(p, level), "query" if p in met else "plain", 6 if p in met else 3)
    d.text(at(T - 1, 0)[0], Y - 18, "the last output", size=12)
    right, below = at(T - 1, 0)[0] + 24, Y + LAYERS * DOWN
    for layer in range(LAYERS):
        d.text(
            right,
            Y + (LAYERS - layer - 0.5) * DOWN + 4,
            f"layer {layer + 1}",
            at="start",
        )
    d.text(right, below + 4, "inputs", at="start")
    for p, n in enumerate(paths()):
        if n:
            d.text(
                at(p, 0)[0],
                below + 28,
                n,
                "alarm" if n == 1 and p < T - 1 else "plain",
                12,
            )
    d.text(right, below + 28, "paths", "plain", 12, "start")
    (x, y), (x2, _) = at(min(levels[-1]), LAYERS), at(T - 1, LAYERS)
    d.arrow((x2, y + 48), (x, y + 48))
    d.text((x + x2) / 2, y + 68, f"{LAYERS} · ({WINDOW} − 1) = {reach} steps back")
    return d
