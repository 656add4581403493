"""Lesson 08: from ids to the next token, and the order of the settings."""

import math

from utils.diagrams.drawing import Drawing

PROMPT = ["dog", "bites", "the"]
NEXT = {"man": 2.0, "dog": 1.2, "cat": 0.8, "ball": 0.2, "rug": -0.5, "idea": -1.2}
TEMPERATURE, TOP_K, TOP_P = 0.8, 4, 0.9
CHANCE = 0.7  # what the generator drew


def softmax(logits):
    top = max(logits)
    shares = [math.exp(z - top) for z in logits]
    return [s / sum(shares) for s in shares]


def draw() -> Drawing:
    logits = list(NEXT.values())
    warmed = softmax([z / TEMPERATURE for z in logits])
    first = softmax([z / TEMPERATURE for z in logits[:TOP_K]])  # sums to 1 again
    n = next(i for i in range(TOP_K) if sum(first[: i + 1]) >= TOP_P) + 1
    last = [p / sum(first[:n]) for p in first[:n]]
    d = Drawing(
        *(800, 392),
        "From ids to the next token",
        "The model reads the ids and gives logits for every position; the last row is "
        f"about the next token. It is divided by the temperature {TEMPERATURE}, top-k "
        f"keeps {TOP_K} of {len(NEXT)} tokens, top-p {TOP_P} keeps {n} of these, and "
        f"one is drawn with the odds {', '.join(f'{p:.2f}' for p in last)}. It is "
        "appended to the ids, and the model reads them again.",
    )
    ids = d.tensor(
        *(52, 72, 3, 1, "plain", "ids"),
        cell=56,
        height=26,
    )
    for i, word in enumerate(PROMPT):
        d.text(ids.middle, ids.y + 26 * i + 17, word, size=12)
    d.arrow((ids.right + 4, ids.centre), (158, ids.centre), below="(B, T)")
    d.box(160, 86, 100, 50, "Transformer")
    d.arrow((260, ids.centre), (284, ids.centre))
    d.tensor(
        *(288, 72, 3, len(NEXT), "plain", "logits", "(B, T, V)"),
        values=lambda r, c: f"{logits[c]:g}".replace("-", "−") if r == 2 else "",
        followed=(2, 0, 1, len(NEXT)),
        cell=32,
        height=26,
    )
    d.arrow((484, 138), (500, 138), (500, 176), (190, 176), (190, 192))
    says = "The last row alone is about\nthe token that comes next."
    d.text(512, 134, says, "plain", 12, "start")

    top, high = 244, 22
    for i, word in enumerate(NEXT):
        d.text(92, top + high * i + 15, word, at="end")
    for x, name, setting, odds in (
        (104, "temperature", f"softmax(z / {TEMPERATURE})", warmed),
        (296, "top-k", f"the {TOP_K} most likely", first),
        (488, "top-p", f"until together {TOP_P}", last),
    ):
        d.text(x, 212, name, size=14, at="start", bold=True)
        d.text(x, 230, setting, "plain", 12, "start")
        for i in range(len(NEXT)):
            y = top + high * i + 3
            if i < len(odds):
                end = x + 120 * odds[i]
                bar(d, x, y, end - x, "query", strength=lambda r, c: 0.7)
                d.text(end + 6, y + 13, f"{odds[i]:.2f}", size=12, at="start")
            else:
                bar(d, x, y, 24, "plain", hidden=lambda r, c: True)
    for x in (234, 426):
        d.arrow((x, 208), (x + 46, 208))
    d.arrow((618, 208), (664, 208))
    d.text(676, 212, "draw", size=14, at="start", bold=True)
    drawn = next(i for i in range(n) if sum(last[: i + 1]) > CHANCE)
    d.text(676, 230, f"one of {n}", "plain", 12, "start")
    y = top + high * drawn - 2
    d.box(676, y, 56, 26, list(NEXT)[drawn], "query")
    d.arrow((736, y + 13), (770, y + 13), (770, 24), (24, 24), (24, 163), (49, 163))
    d.text(396, 42, "append it, and read again", size=12)
    d.box(ids.x, ids.bottom, ids.width, 26, list(NEXT)[drawn], "query", 12)
    return d


def bar(d, x, y, width, kind, **how):
    d.tensor(x, y, 1, 1, kind, cell=width, height=15, **how)
