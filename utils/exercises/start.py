"""Lesson 00: softmax."""

from functools import partial

import torch

from utils.check.exercise import Exercise
from utils.probe import probe, strided

softmax = Exercise("softmax", lesson="start")


@softmax.requires("the weights along the last dimension are exp(score) over their sum")
def _(answer, case):
    case.agrees(answer, torch.softmax, probe(3, 5), dim=-1)
    for size in ((7,), (2, 6)):
        case.agrees(answer, partial(torch.softmax, dim=-1), probe(*size, seed=1))


@softmax.requires(
    "any other dimension works too",
    "`dim` must reach everything that reduces, and the reduced dimension must stay so "
    "that the shapes still line up.",
)
def _(answer, case):
    scores = probe(2, 3, 4, seed=2)
    for dim in (0, 1, -2):
        case.agrees(answer, torch.softmax, scores, dim=dim)
    case.agrees(answer, torch.softmax, probe(4, 4, seed=3), dim=0)


@softmax.requires(
    "large scores give no overflow and very small ones no 0/0",
    "Adding one number to all the scores of a row leaves its weights as they are. "
    "Which number makes exp safe, whatever the row?",
)
def _(answer, case):
    for shift in (1000, -1000):
        case.agrees(answer, torch.softmax, probe(3, 5, scale=3, shift=shift), dim=-1)
    rows = torch.stack([probe(5, shift=-1000), probe(5), probe(5, shift=1000)])
    case.agrees(answer, torch.softmax, rows, dim=-1)
    case.agrees(answer, torch.softmax, rows.T, dim=0)
    case.agrees(answer, torch.softmax, rows, dim=0)


@softmax.requires("a score of −inf gets the weight 0")
def _(answer, case):
    scores = probe(3, 5, seed=4)
    scores[0, 1] = scores[2, 0] = scores[2, 4] = -torch.inf
    # A small weight is not 0: each value is compared in its own size.
    case.agrees(answer, torch.softmax, scores, dim=-1, relative=True)
    case.agrees(answer, torch.softmax, scores - 1000, dim=-1)


@softmax.requires(
    "float16, bfloat16, float64 and memory that is not contiguous work too",
    "Return the dtype that came in, and compute no less exactly than it allows.",
)
def _(answer, case):
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        scores = probe(3, 6, seed=5, scale=2, dtype=dtype)
        case.agrees(answer, torch.softmax, scores, dim=-1)
    case.agrees(answer, torch.softmax, strided(probe(3, 5, seed=6)), dim=0)


@softmax.requires("gradients flow back to the scores")
def _(answer, case):
    case.gradients_agree(answer, torch.softmax, probe(3, 5, seed=7), dim=-1)


@softmax.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, probe(3, 5), dim=-1)
