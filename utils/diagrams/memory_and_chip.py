"""Lesson 11: the traffic between the large memory and the chip."""

from utils.diagrams.drawing import Drawing

T, D_HEAD, BLOCK, BYTES = 4096, 64, 128, 2  # one head in float16
STRIP, TABLE = BYTES * T * D_HEAD, BYTES * T * T  # bytes of q, and of the scores
PASSES = T // BLOCK  # how often all keys and values come past

# name, its colour, bytes, and whether it is written back
THREE_STEPS = {
    "scores": [("q, k", "query", 2 * STRIP, False), ("scores", "query", TABLE, True)],
    "softmax": [("scores", "query", TABLE, False), ("weights", "query", TABLE, True)],
    "output": [
        ("weights", "query", TABLE, False),
        ("v", "value", STRIP, False),
        ("output", "value", STRIP, True),
    ],
}
IN_BLOCKS = [
    ("q", "query", STRIP, False),
    (f"k, {PASSES} times", "key", STRIP * PASSES, False),
    (f"v, {PASSES} times", "value", STRIP * PASSES, False),
    ("output, L", "value", STRIP + 4 * T, True),
]
PITCH = 42


def mib(n) -> str:
    return f"{n / 2**20:.1f}".removesuffix(".0")


def draw() -> Drawing:
    whole = sum(n for arrows in THREE_STEPS.values() for _, _, n, _ in arrows)
    tiled = sum(n for _, _, n, _ in IN_BLOCKS)
    d = Drawing(
        *(820, 408),
        "Traffic between memory and chip",
        f"One head at {T:,} tokens, arrows as thick as their bytes. In three steps "
        f"the tables of scores and of weights are written and read: {mib(whole)} "
        f"mebibytes in all. In blocks of {BLOCK} queries all keys and values come "
        f"past {PASSES} times, and no table moves: {mib(tiled)} mebibytes.",
    )

    def arrows(x, y, moved):
        """Between memory and chip, one below the other, as thick as their bytes."""
        for i, (name, kind, n, back) in enumerate(moved):
            thick = max(n / 2**21, 1)
            level = y + PITCH * i
            start, end = (x + 130, x) if back else (x, x + 130)
            d.flow(start, end, level, thick, kind)
            says = f"{name}: {mib(n)} MiB"
            d.text(x + 65, level - max(thick / 2 + 5, 8), says, size=11)

    def side(x, name, total):
        d.text(x, 36, name, size=14, at="start", bold=True)
        d.box(x, 54, 84, 290, kind="plain")
        d.text(x + 42, 196, "large\nmemory", size=13)
        d.text(x, 384, f"{mib(total)} MiB", size=14, at="start", bold=True)

    side(28, "in three steps", whole)
    y = 74
    for step, moved in THREE_STEPS.items():
        height = PITCH * len(moved) - 8
        d.box(262, y - 20, 84, height, step, kind="ink")
        arrows(122, y, moved)
        y += PITCH * len(moved)
    side(446, f"in blocks of {BLOCK} queries", tiled)
    d.box(680, 116, 104, PITCH * 4 - 8, kind="ink")
    d.text(732, 186, "scores,\nsoftmax,\noutput")
    arrows(540, 136, IN_BLOCKS)
    d.text(732, 312, "the tables\nstay here", "plain", 12)
    for x in (304, 732):
        d.text(x, 36, "on the chip", "plain", 12)
    return d
