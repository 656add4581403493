"""Lesson 07: a text, its words, bytes, tokens and ids, and the way back."""

import re

from utils.diagrams.drawing import Drawing
from utils.diagrams.merges_by_rank import encode, learn, seen, spoken

TEXT = "lower lower é"


def draw() -> Drawing:
    merges = learn(5)
    words = re.findall(r" ?\w+", TEXT)
    # One letter a byte, so that a word and its bytes have the same length.
    tokens = [
        [part.encode("latin-1") for part in encode(letters, merges)[-1][0]]
        for letters in (word.encode().decode("latin-1") for word in words)
    ]
    vocab = {bytes([i]): i for i in range(256)}
    vocab |= {(a + b).encode(): 256 + i for i, (a, b) in enumerate(merges)}
    flat = [token for word in tokens for token in word]
    ids = [vocab[token] for token in flat]
    d = Drawing(
        *(820, 330),
        "From text to ids and back",
        f"The text “{TEXT}” is cut into {len(words)} words, "
        f"{', '.join(map(spoken, words))}; written as {sum(map(len, flat))} bytes, of "
        f"which é takes two; merged by rank to {len(flat)} tokens; and looked up: "
        f"{', '.join(map(str, ids))}. The way back looks the ids up and joins their "
        "bytes.",
    )
    left, cell = 130, 42
    rows = {"text": 30, "words": 90, "bytes": 150, "tokens": 210, "ids": 270}
    for name, y in rows.items():
        d.text(24, y + 20, name, size=14, at="start", bold=True)
    n = sum(map(len, flat))
    d.box(left, rows["text"], n * cell, 30, seen(TEXT), "plain")
    start = 0
    for word in words:
        size = len(word.encode())
        d.box(
            left + start * cell + 2,
            rows["words"],
            size * cell - 4,
            30,
            seen(word),
            "plain",
        )
        start += size
    data = TEXT.encode()
    d.tensor(
        *(left, rows["bytes"], 1, n, "plain"),
        values=lambda r, c: data[c],
        cell=cell,
        height=30,
    )
    start = 0
    for token, i in zip(flat, ids, strict=True):
        x, wide = left + start * cell + 2, len(token) * cell - 4
        try:
            whole = token.decode()
        except UnicodeDecodeError:  # a part of a character
            whole = repr(token)[2:-1]
        d.box(x, rows["tokens"], wide, 30, seen(whole), "query")
        d.box(x, rows["ids"], wide, 30, str(i), "ink")
        start += len(token)
    for name, after, does in (
        ("text", "words", "cut by the pattern"),
        ("words", "bytes", "UTF-8"),
        ("bytes", "tokens", "merge by rank"),
        ("tokens", "ids", "look up"),
    ):
        d.arrow((left + 12, rows[name] + 33), (left + 12, rows[after] - 3))
        d.text(left + 22, rows[name] + 50, does, size=12, at="start")
    x = left + n * cell + 18
    d.arrow((left + n * cell + 3, 285), (x, 285), (x, 45), (left + n * cell + 4, 45))
    d.text(x + 6, 160, "back:\nlook up,\njoin", size=12, at="start")
    return d
