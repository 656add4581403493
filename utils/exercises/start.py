"""Lesson 00: softmax."""

import torch

from utils.check.exercise import Exercise
from utils.probe import probe, strided

softmax = Exercise("softmax", lesson="start")


@softmax.requires("the weights along the last dimension are exp(score) over their sum")
def _(answer, t):
    t.agrees(answer, torch.softmax, probe(3, 5), dim=-1)
    t.agrees(answer, lambda scores: torch.softmax(scores, -1), probe(7, seed=1))
    t.agrees(answer, lambda scores: torch.softmax(scores, -1), probe(2, 6, seed=8))


@softmax.requires(
    "any other dimension works too",
    "`dim` must reach everything that reduces, and the reduced dimension must stay so "
    "that the shapes still line up.",
)
def _(answer, t):
    scores = probe(2, 3, 4, seed=2)
    for dim in (0, 1, -2):
        t.agrees(answer, torch.softmax, scores, dim=dim)
    t.agrees(answer, torch.softmax, probe(4, 4, seed=3), dim=0)


@softmax.requires(
    "large scores give no overflow and very small ones no 0/0",
    "Adding one number to all the scores of a row leaves its weights as they are. "
    "Which number makes exp safe, whatever the row?",
)
def _(answer, t):
    t.agrees(answer, torch.softmax, probe(3, 5, scale=3, shift=1000), dim=-1)
    t.agrees(answer, torch.softmax, probe(3, 5, scale=3, shift=-1000), dim=-1)
    rows = torch.stack([probe(5, shift=-1000), probe(5), probe(5, shift=1000)])
    t.agrees(answer, torch.softmax, rows, dim=-1)
    t.agrees(answer, torch.softmax, rows.T, dim=0)
    t.agrees(answer, torch.softmax, rows, dim=0)


@softmax.requires("a score of −inf gets the weight 0")
def _(answer, t):
    scores = probe(3, 5, seed=4)
    scores[0, 1] = scores[2, 0] = scores[2, 4] = -torch.inf
    # A small weight is not 0: each value is compared in its own size.
    t.agrees(answer, torch.softmax, scores, dim=-1, relative=True)
    t.agrees(answer, torch.softmax, scores - 1000, dim=-1)


@softmax.requires(
    "float16, bfloat16, float64 and memory that is not contiguous work too",
    "Return the dtype that came in, and compute no less exactly than it allows.",
)
def _(answer, t):
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        scores = probe(3, 6, seed=5, scale=2, dtype=dtype)
        t.agrees(answer, torch.softmax, scores, dim=-1)
    t.agrees(answer, torch.softmax, strided(probe(3, 5, seed=6)), dim=0)


@softmax.requires(
    "gradients flow back to the scores",
    "If a variable “has been modified by an inplace operation”, a line such as "
    "`scores -= …` or `exp_()` has overwritten numbers that the way back needs.",
)
def _(answer, t):
    t.gradients_agree(answer, torch.softmax, probe(3, 5, seed=7), dim=-1)


@softmax.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, probe(3, 5), dim=-1)


@softmax.fault(
    "no_shift",
    "exp is taken of the scores as they are. exp(89) is already more than float32 can "
    "hold, and inf/inf is NaN; far below zero everything becomes 0, and 0/0 is NaN too.",
)
def _(scores, dim=-1):
    exponentials = scores.exp()
    return exponentials / exponentials.sum(dim, keepdim=True)


@softmax.fault(
    "one_shift_for_all",
    "One number is subtracted from the whole tensor. A row that lies far below it "
    "underflows to zeros, and 0/0 is NaN: what is safe differs from row to row.",
)
def _(scores, dim=-1):
    exponentials = (scores - scores.max()).exp()
    return exponentials / exponentials.sum(dim, keepdim=True)


@softmax.fault(
    "dim_ignored",
    "The weights sum to 1 along the last dimension whatever `dim` says.",
)
def _(scores, dim=-1):
    return torch.softmax(scores, -1)


@softmax.fault(
    "first_dim_by_default",
    "Called without `dim`, the weights sum to 1 along the first dimension. The stub's "
    "default is −1, the last.",
)
def _(scores, dim=0):
    return torch.softmax(scores, dim)


@softmax.fault(
    "mean_subtracted",
    "The mean is subtracted, not the maximum. A score that lies far above its row's "
    "mean still overflows, and a single −inf makes the mean −inf.",
)
def _(scores, dim=-1):
    exponentials = (scores - scores.mean(dim, keepdim=True)).exp()
    return exponentials / exponentials.sum(dim, keepdim=True)


@softmax.fault(
    "sum_of_everything",
    "The exponentials are divided by the sum of the whole tensor, so that all weights "
    "together sum to 1 instead of those along `dim`.",
)
def _(scores, dim=-1):
    return torch.softmax(scores.flatten(), 0).reshape(scores.shape)


@softmax.fault(
    "no_exponential",
    "The scores themselves are divided by their sum. Without the exponential a "
    "negative score gives a negative weight.",
)
def _(scores, dim=-1):
    return scores / scores.sum(dim, keepdim=True)


@softmax.fault("not_divided", "The exponentials are not divided by their sum.")
def _(scores, dim=-1):
    return (scores - scores.amax(dim, keepdim=True)).exp()


@softmax.fault("logarithm", "This is the logarithm of the weights, log-softmax.")
def _(scores, dim=-1):
    return torch.log_softmax(scores, dim)


@softmax.fault(
    "sigmoid",
    "Each score is squashed by itself. Softmax weights compete: they share a sum of 1.",
)
def _(scores, dim=-1):
    return torch.sigmoid(scores)


@softmax.fault(
    "dim_dropped",
    "The maximum or the sum loses its dimension, so that broadcasting lines up the "
    "wrong axes: it crashes, or on square inputs divides by another row's sum.",
)
def _(scores, dim=-1):
    exponentials = (scores - scores.amax(dim, keepdim=True)).exp()
    return exponentials / exponentials.sum(dim)


@softmax.fault(
    "max_is_a_pair",
    "With a `dim`, `max` returns two tensors, the values and where they stand. Take the "
    "values, or use `amax`.",
)
def _(scores, dim=-1):
    exponentials = (scores - scores.max(dim, keepdim=True)).exp()
    return exponentials / exponentials.sum(dim, keepdim=True)


@softmax.fault(
    "clamped",
    "The scores are cut off at a fixed size to avoid overflow. That changes the weights "
    "of large scores, where only the differences should count.",
)
def _(scores, dim=-1):
    return torch.softmax(scores.clamp(-80, 80), dim)


@softmax.fault(
    "epsilon_in_the_sum",
    "A small constant is added to the sum. If the exponentials have a safe size, the sum "
    "is far from 0, so it protects from nothing and makes the weights wrong.",
)
def _(scores, dim=-1):
    exponentials = (scores - scores.amax(dim, keepdim=True)).exp()
    return exponentials / (exponentials.sum(dim, keepdim=True) + 1e-6)
