"""Lesson 03: MHA, GQA and MQA, and the bytes that each keeps."""

from utils.diagrams.drawing import Drawing

DRAWN = 6  # query heads in the picture
LAYERS, HEADS, WIDTH, BYTES = 32, 32, 128, 2  # of Llama 2 7B
WAYS = [
    ("MHA", "one for each query head", 6, 32),
    ("GQA", "one for each group", 2, 8),
    ("MQA", "one for all", 1, 1),
]
STEP, BOX, PANEL = 36, 28, 262


def draw() -> Drawing:
    kept = [LAYERS * 2 * n * WIDTH * BYTES // 1024 for _, _, _, n in WAYS]
    d = Drawing(
        *(812, 322),
        "Heads that share keys and values, and what is kept",
        "With multi-head attention each query head has a key and a value head, with "
        f"grouped-query attention {DRAWN // WAYS[1][2]} share one, with multi-query "
        f"attention all share one. At {LAYERS} layers of {HEADS} heads this keeps "
        f"{', '.join(map(str, kept))} KiB of a token.",
    )
    for i, ((name, shares, n, of), size) in enumerate(zip(WAYS, kept, strict=True)):
        left = 32 + i * PANEL
        middle = left + (DRAWN - 1) * STEP / 2 + BOX / 2
        d.text(middle, 32, name, size=16, bold=True)
        d.text(middle, 51, shares, "plain", 12)
        group = DRAWN // n
        for h in range(DRAWN):
            query = d.box(left + h * STEP, 70, BOX, 26, str(h), "query")
            k = h // group
            over = left + (k * group + (group - 1) / 2) * STEP + BOX / 2
            d.line((query.middle, query.bottom + 2), (over, 148))
        for k in range(n):
            over = left + (k * group + (group - 1) / 2) * STEP + BOX / 2
            d.box(over - BOX / 2, 150, BOX, 22, "k", "key")
            d.box(over - BOX / 2, 174, BOX, 22, "v", "value")
        full = (DRAWN - 1) * STEP + BOX
        d.text(left, 236, f"{of} of {HEADS} heads", "plain", 12, "start")
        d.text(left + full, 236, f"{size} KiB", size=14, at="end", bold=True)
        for y, kind in ((244, "key"), (256, "value")):
            share = full * size / kept[0]
            d.tensor(
                left, y, 1, 1, kind, strength=lambda r, c: 0.7, cell=share, height=12
            )
    d.text(
        *(406, 300),
        f"kept of each token, in Llama 2 7B's shape: {LAYERS} layers of {HEADS} heads, "
        f"d_head {WIDTH}, {BYTES} bytes a number",
        *("plain", 12),
    )
    return d
