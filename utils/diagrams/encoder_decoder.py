"""Lesson 13: an encoder block and a decoder block, and what passes between them."""

from utils.diagrams.drawing import Drawing

S, REAL, T = 4, 3, 4  # source and its letters that are no padding, target
BOTH_WAYS = [[key < REAL for key in range(S)] for _ in range(S)]
CAUSAL = [[key <= query for key in range(T)] for query in range(T)]
ACROSS = [[key < REAL for key in range(S)] for _ in range(T)]
STEP, BOTTOM = 96, 458  # pixels of a sublayer; where the blocks begin
SIDE = 92  # from the stream to what reads it


def block(d, x, side, names, below):
    """A stream through sublayers, which stand at its side; the y of each one's box."""
    top = BOTTOM - STEP * len(names)
    d.frame(min(x, side) - 76 + 38 * (x < side), top - 24, 226, STEP * len(names) + 26)
    d.text(side, top - 7, "× n_layers", "plain", 12)
    d.stream((x, BOTTOM + 12), (x, top - 42))
    d.arrow((x, BOTTOM + 60), (x, BOTTOM + 40))
    d.text(x, BOTTOM + 76, below)
    d.box(x - 46, BOTTOM + 12, 92, 26, "embedding")
    for i, name in enumerate(names):
        y = BOTTOM - STEP * (i + 1) + 10
        d.arrow((x, y + 84), (side, y + 84), (side, y + 76))
        d.box(side - 34, y + 52, 68, 22, f"norm_{i + 1}", size=12)
        d.arrow((side, y + 51), (side, y + 34))
        d.box(side - 60, y + 8, 120, 24, name, size=12)
        d.arrow((side, y + 6), (side, y), (x + 11 * (1 if x < side else -1), y))
        d.plus(x, y)
    return [BOTTOM - STEP * (i + 1) + 30 for i in range(len(names))]


def draw() -> Drawing:
    d = Drawing(
        *(820, 552),
        "An encoder and a decoder with cross-attention",
        "The encoder reads the source both ways; nobody looks at its padding. Its "
        "stream, normalised at the end, is the memory. A decoder block has three "
        "sublayers: it looks back at the target under a causal mask, across at the "
        "memory, and thinks. When it looks across, queries come from the decoder, "
        "keys and values from the encoder.",
    )
    x, x2 = 80, 582
    parts = ["attention", "feed_forward"]
    encoder = block(d, x, x + SIDE, parts, "source (B, S)")
    parts.insert(1, "cross_attention")
    decoder = block(d, x2, x2 - SIDE, parts, "target, shifted right (B, T)")

    top = BOTTOM - 2 * STEP - 42
    d.stream((x + 40, top - 13), (380, top - 13), (380, decoder[1]))
    d.box(x - 58, top - 26, 116, 26, "encoder_norm")
    d.text(230, top - 24, "memory", "stream", 14, bold=True)
    d.text(230, top + 8, "(B, S, d_model)", "plain", 11, code=True)
    for kind, letter, step in (("key", "k", -5), ("value", "v", 5)):
        y = decoder[1] + step
        d.arrow((382, y), (x2 - SIDE - 62, y), kind=kind, width=2)
        d.text(400, y + (-6 if step < 0 else 15), letter, kind, 13, bold=True)
    d.text(x2 - SIDE + 10, decoder[1] + 26, "q", "query", 13, "start", bold=True)

    top = BOTTOM - 3 * STEP - 42
    d.box(x2 - 58, top - 26, 116, 26, "decoder_norm")
    d.arrow((x2, top - 28), (x2, top - 44))
    d.box(x2 - 46, top - 72, 92, 26, "head")
    d.arrow((x2, top - 74), (x2, top - 90))
    d.text(x2 + 12, top - 80, "logits", size=13, at="start")

    d.mask(
        *(300, encoder[0] - 40, BOTH_WAYS),
        cell=14,
        shape="(S, S)",
        purpose="both ways,\nno padding",
    )
    for y, allowed, shape, says in (
        (decoder[0], CAUSAL, "(T, T)", "nobody\nlooks ahead"),
        (decoder[1], ACROSS, "(T, S)", "all but\nthe padding"),
    ):
        area = d.mask(664, y - 34, allowed, cell=14, shape=shape)
        d.text(area.right + 8, area.centre - 2, says, "plain", 12, "start")
    d.text(28, 36, "encoder: reads", size=14, at="start", bold=True)
    d.text(380, 36, "decoder: writes", size=14, at="start", bold=True)
    d.text(28, 57, "All of the source is there,\nand read once.", "plain", 12, "start")
    d.text(380, 57, "One token after\nthe other.", "plain", 12, "start")
    return d
