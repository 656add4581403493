"""Lesson 00 and the README: the decoder, and the lesson of each part."""

from utils.diagrams.drawing import Drawing

STREAM, SIDE = 344, 424  # the x of the residual stream and of what reads from it


def lesson(d, x, y, number, name, does):
    """The lesson's number, its name, and what it is to the model."""
    chip = d.box(x, y - 15, 30, 21, kind="plain")
    d.text(chip.middle, y, number, size=13, bold=True, code=True)
    d.text(x + 39, y, name, size=14, at="start", bold=True)
    d.text(x + 39, y + 17, does, "plain", 12, "start")


def part(d, y, plus, height, name, width):
    """norm and a part beside the stream, from the stream and back to it."""
    d.arrow((STREAM, y + 24), (SIDE, y + 24), (SIDE, y + 15))
    norm = d.box(SIDE - 27, y - 8, 54, 22, "norm", size=12)
    d.arrow((SIDE, norm.y - 1), (SIDE, norm.y - 14))
    box = d.box(SIDE - width / 2, norm.y - 15 - height, width, height, name)
    d.arrow((SIDE, box.y - 1), (SIDE, plus), (STREAM + 11, plus))
    d.plus(STREAM, plus)


def draw() -> Drawing:
    d = Drawing(
        *(840, 516),
        "A decoder, and the lesson of each of its parts",
        "From the bottom up: the tokenizer of lesson 07 makes ids of text, an "
        "embedding makes vectors, and a residual stream carries them through blocks of "
        "attention, lessons 02 to 04, and a feed-forward network, lesson 05 or "
        "12, with the norms and residuals of lesson 06. Lesson 08 assembles it all and "
        "generates text. Beside it stand training, 09, the cache, 10, FlashAttention, "
        "11, and long context, 14.",
    )
    d.frame(300, 126, 210, 260)
    d.text(500, 143, "× n_layers", "plain", 12, "end")
    d.line((250, 309), (362, 309), kind="plain", width=1, dashed=True)
    d.stream((STREAM, 400), (STREAM, 106))
    part(d, 350, 258, 40, "attention", 116)
    part(d, 224, 148, 30, "SwiGLU", 86)

    d.text(STREAM, 24, "next token", size=13)
    d.arrow((STREAM, 45), (STREAM, 31))
    d.box(STREAM - 44, 46, 88, 24, "head")
    d.arrow((STREAM, 83), (STREAM, 71))
    d.box(STREAM - 27, 84, 54, 22, "norm", size=12)
    d.box(STREAM - 44, 400, 88, 24, "embedding")
    d.arrow((STREAM, 451), (STREAM, 426))
    d.text(STREAM + 10, 443, "ids", "plain", 12, "start")
    d.box(STREAM - 44, 452, 88, 24, "tokenizer", "ink")
    d.arrow((STREAM, 489), (STREAM, 478))
    d.text(STREAM, 503, "text", size=13)

    right, left = 556, 30
    for y, end in ((58, 392), (148, 514), (193, 470), (309, 486), (464, 392)):
        d.line((end, y), (right - 6, y), kind="plain", width=1, dashed=True)
    lesson(d, right, 63, "08", "the whole decoder", "assembles it, and generates")
    lesson(d, right, 153, "06", "norms and residuals", "⊕: add, don't replace")
    lesson(d, right, 198, "05", "feed-forward network", "each position alone")
    lesson(d, right, 243, "12", "mixture of experts", "many networks, few are asked")
    lesson(d, right, 314, "02", "attention", "the one place where positions meet")
    lesson(d, right, 359, "03", "heads", "several views at once")
    lesson(d, right, 404, "04", "positions", "who stands where")
    lesson(d, right, 469, "07", "tokenizer", "from text to ids, and back")

    lesson(d, left, 63, "09", "training", "changes all that is pink")
    lesson(d, left, 108, "13", "encoder and decoder", "a second stack beside it")
    lesson(d, left, 269, "10", "KV cache", "reads each token once")
    lesson(d, left, 314, "11", "FlashAttention", "the same with less traffic")
    lesson(d, left, 359, "14", "long context", "past the quadratic")
    lesson(d, left, 424, "00", "softmax", "from scores to weights")
    lesson(d, left, 469, "01", "recurrent networks", "what attention replaces")
    return d
