"""Lesson 09: one step of the training loop."""

import math

from utils.diagrams.drawing import Drawing

PEAK, FLOOR, WARMUP, TOTAL = 1.0, 0.1, 20, 120


def learning_rate(step):
    if step < WARMUP:
        return PEAK * step / WARMUP
    share = (step - WARMUP) / (TOTAL - WARMUP)
    return FLOOR + (PEAK - FLOOR) * (1 + math.cos(math.pi * share)) / 2


def draw() -> Drawing:
    d = Drawing(
        *(820, 326),
        "One step of the training loop",
        "A batch of inputs goes through the model; cross entropy compares the logits "
        "with the targets. Backward gives every parameter a gradient, clipping "
        "shortens all of them together, and AdamW moves the parameters by the rate "
        f"that the schedule has for this step: up for {WARMUP} steps, then down along "
        f"a cosine to step {TOTAL}.",
    )
    d.box(30, 76, 110, 44, "get_batch", "plain")
    d.arrow((140, 98), (258, 98), above="inputs", below="(B, T)")
    d.box(260, 66, 130, 64, "model")
    d.arrow((390, 98), (518, 98), above="logits", below="(B, T, V)")
    d.box(520, 76, 130, 44, "cross_entropy", "plain")
    d.arrow((650, 98), (718, 98))
    d.box(720, 80, 70, 36, "loss", "plain")
    d.arrow((85, 76), (85, 36), (585, 36), (585, 74))
    d.text(335, 29, "targets (B, T)", size=12)

    d.arrow((755, 116), (755, 226))
    d.text(747, 168, "zero_grad,\nbackward", size=12, at="end")
    d.box(690, 228, 100, 44, "gradients", "plain")
    d.arrow((690, 250), (582, 250))
    d.box(440, 228, 140, 44, "clip_gradients", "plain")
    d.arrow((440, 250), (372, 250))
    d.box(280, 228, 90, 44, "AdamW", "plain")
    d.arrow((325, 228), (325, 133))
    d.text(335, 186, "new parameters", size=12, at="start")

    for x, says in (
        (740, "one for every\nparameter"),
        (510, "too long? all shortened\nby one factor"),
        (325, "two running means\nfor every number"),
    ):
        d.text(x, 290, says, "plain", 12)

    x, y, wide, high = 50, 274, 150, 66
    points = [
        (x + wide * s / TOTAL, y - high * learning_rate(s))
        for s in range(0, TOTAL + 1, 5)
    ]
    d.text(x, 192, "learning_rate", size=13, at="start")
    d.line((x, y - high - 4), (x, y), (x + wide + 6, y), kind="plain", width=0.75)
    d.line(*points, kind="query", width=2)
    d.text(x + wide / 2, 292, "step", "plain", 12)
    d.arrow((x + wide + 14, 250), (278, 250))
    return d
