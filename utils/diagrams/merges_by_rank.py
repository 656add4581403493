"""Lesson 07: two words' merges as trees, and the order in which they happen."""

import re
from collections import Counter
from itertools import pairwise

from utils.diagrams.drawing import Drawing

TEXT = "low low low lower lower newest"  # the lesson's
WORDS = [" lower", " slow"]


def merged(parts, pair):
    """The parts of a word after one merge, left to right."""
    out = []
    for part in parts:
        out.append(part)
        if tuple(out[-2:]) == pair:
            out[-2:] = ["".join(pair)]
    return out


def learn(n):
    """The first n merges of the text: the most frequent pair, ties to the greater."""
    words, merges = [list(w) for w in re.findall(r" ?\w+", TEXT)], []
    for _ in range(n):
        counts = Counter(pair for word in words for pair in pairwise(word))
        merges.append(max(counts, key=lambda pair: (counts[pair], pair)))
        words = [merged(word, merges[-1]) for word in words]
    return merges


def encode(word, merges):
    """The parts at the start and after each merge, with its rank: lowest rank first."""
    steps = [(list(word), None)]
    while ranks := [merges.index(p) for p in pairwise(steps[-1][0]) if p in merges]:
        rank = min(ranks)
        steps.append((merged(steps[-1][0], merges[rank]), rank))
    return steps


def seen(text):
    return text.replace(" ", "␣")


def spoken(text):
    return text.replace(" ", "space ").strip()


def draw() -> Drawing:
    merges = learn(5)
    steps = [encode(word, merges) for word in WORDS]
    d = Drawing(
        *(820, 330),
        "Merges by rank, as trees",
        "The list of merges by rank: "
        + ", ".join(f"{i} {spoken(a)} + {spoken(b)}" for i, (a, b) in enumerate(merges))
        + ". "
        + " ".join(
            f"In “{spoken(word)}” the lowest rank comes first; "
            f"{len(parts := step[-1][0])} left: {', '.join(map(spoken, parts))}."
            for word, step in zip(WORDS, steps, strict=True)
        ),
    )
    d.text(30, 36, "merges", size=14, at="start", bold=True)
    d.text(30, 66, "rank", "plain", 12, "start")
    for rank, (left, right) in enumerate(merges):
        y = 92 + 32 * rank
        d.text(44, y, rank, "query", 14, bold=True)
        d.text(76, y, f"{seen(left)} + {seen(right)}", at="start", code=True)
    d.line((200, 24), (200, 306), kind="plain", width=0.75)

    for left, word, taken in zip((228, 568), WORDS, steps, strict=True):
        foot, cell = 266, 46
        # Where each part stands now: its text, its middle, its height.
        nodes = [(s, left + cell * (i + 0.5), foot) for i, s in enumerate(word)]
        for sign, x, y in nodes:
            d.box(x - 15, y - 13, 30, 26, seen(sign), "plain")
        for _parts, rank in taken[1:]:
            i = next(
                i
                for i, pair in enumerate(pairwise(nodes))
                if (pair[0][0], pair[1][0]) == merges[rank]
            )
            (a, x, y), (b, x2, y2) = nodes[i : i + 2]
            middle, up = (x + x2) / 2, min(y, y2) - 48
            d.line((x, y - 13), (middle, up + 13))
            d.line((x2, y2 - 13), (middle, up + 13))
            wide = 22 + 8.5 * len(a + b)
            d.box(middle - wide / 2, up - 13, wide, 26, seen(a + b), "query")
            d.text(middle + wide / 2 + 10, up + 5, rank, "query", 14, bold=True)
            nodes[i : i + 2] = [(a + b, middle, up)]
        apart = [f"{seen(a[0])} + {seen(b[0])}" for a, b in pairwise(nodes)]
        if apart:
            d.text(nodes[0][1] - 15, 90, "in no merge", "plain", 12, "start")
            d.text(nodes[0][1] - 15, 110, "\n".join(apart), at="start", code=True)
        says = f"{len(nodes)} token" + "s" * (len(nodes) > 1)
        d.text(left + cell * len(word) / 2, 308, says, "plain", 12)
    learned = "learned from\nlow low low\nlower lower newest"
    d.text(30, 266, learned, "plain", 12, "start")
    return d
