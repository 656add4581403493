"""Lesson 08: the decoder at three positions."""

from utils.diagrams.drawing import Drawing

WORDS = ["dog", "bites", "man"]
STREAMS = [80, 210, 340]  # the x of each position's residual stream
SIDE = 48  # how far beside it its parts stand


def draw() -> Drawing:
    d = Drawing(
        *(800, 570),
        "The decoder at three positions",
        "Three words go up side by side. Each becomes a vector, the start of its "
        "residual stream. In every block a norm and attention add a change to the "
        "stream, then a norm and SwiGLU add another. In attention each position takes "
        "from itself and from earlier ones; everywhere else positions stay apart. A "
        "last norm and the head turn each stream into logits.",
    )
    d.frame(24, 106, 410, 350)
    d.text(424, 126, "× n_layers", "plain", 12, "end")
    d.box(44, 330, 370, 46)
    for i, x in enumerate(STREAMS):
        for earlier in STREAMS[:i]:
            d.arrow((earlier + SIDE, 376), (x + SIDE - 3, 332))
    for x in STREAMS:
        for y, height in ((104, 4), (326, 54), (454, 4)):
            d.gap(x - 6, y, 12, height)
        d.stream((x, 92), (x, 489))
    for x, word in zip(STREAMS, WORDS, strict=True):
        side = x + SIDE
        for y, name, wide in (
            (400, "norm", 50),
            (244, "norm", 50),
            (200, "SwiGLU", 66),
        ):
            d.box(side - wide / 2, y, wide, 24, name)
        d.arrow((x, 438), (side, 438), (side, 425))
        d.line((side, 400), (side, 376))
        d.arrow((side, 376), (side, 331))
        d.arrow((side, 330), (side, 300), (x + 11, 300))
        d.plus(x, 300)
        d.arrow((x, 282), (side, 282), (side, 269))
        d.arrow((side, 244), (side, 225))
        d.arrow((side, 200), (side, 150), (x + 11, 150))
        d.plus(x, 150)
        d.box(x - 43, 28, 86, 26, "head")
        d.arrow((x, 68), (x, 55))
        d.box(x - 25, 68, 50, 24, "norm")
        d.box(x - 43, 489, 86, 26, "embedding")
        d.arrow((x, 536), (x, 516))
        d.text(x, 552, word)
    d.text(STREAMS[0] + 10, 474, "residual stream", "stream", 12, "start")
    for y, heading, shape, text in (
        (
            40,
            "logits",
            "(B, T, V)",
            "A number for each token of the vocabulary:\n"
            "what may come after this position.",
        ),
        (
            150,
            "⊕ add, don't replace",
            "(B, T, d_model)",
            "The stream goes straight up. Each part\nadds a change of the same shape.",
        ),
        (212, "feed-forward network", "(B, T, d_ff) inside", "Each position alone."),
        (
            346,
            "attention",
            "(B, H, T, d_head) inside",
            "The one place where positions meet: each takes\n"
            "from itself and from earlier ones.",
        ),
        (
            414,
            "norm",
            "(B, T, d_model)",
            "What a part reads has a fixed size,\nwhatever the stream has grown to.",
        ),
        (
            502,
            "embedding",
            "(B, T) → (B, T, d_model)",
            "The stream begins as the token's vector.",
        ),
    ):
        d.line((444, y), (462, y), kind="plain", dashed=True)
        d.note(472, y + 5, heading, text, shape, 308)
    return d
