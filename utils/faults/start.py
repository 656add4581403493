"""Lesson 00: mistakes in softmax."""

from utils.exercises.start import softmax

softmax.fault(
    "no_shift",
    "exp is taken of the scores as they are. exp(89) is already more than float32 can "
    "hold, and inf/inf is NaN; far below zero everything becomes 0, and 0/0 is NaN too.",
    ("torch.exp(scores - largest)", "torch.exp(scores)"),
)
softmax.fault(
    "one_shift_for_all",
    "One number is subtracted from the whole tensor. A row that lies far below it "
    "underflows to zeros, and 0/0 is NaN: what is safe differs from row to row.",
    ("scores.max(dim=dim, keepdim=True).values", "scores.max()"),
)
softmax.fault(
    "largest_of_the_last_dim",
    "The maximum is taken along the last dimension whatever `dim` says. What is "
    "subtracted must be the same number along `dim`, or it does not cancel.",
    ("max(dim=dim", "max(dim=-1"),
)
softmax.fault(
    "mean_subtracted",
    "The mean is subtracted, not the maximum. A score that lies far above its row's "
    "mean still overflows, and a single −inf makes the mean −inf.",
    (
        "scores.max(dim=dim, keepdim=True).values",
        "scores.mean(dim=dim, keepdim=True)",
    ),
)
softmax.fault(
    "sum_of_everything",
    "The exponentials are divided by the sum of the whole tensor, so that all weights "
    "together sum to 1 instead of those along `dim`.",
    ("scores.max(dim=dim, keepdim=True).values", "scores.max()"),
    ("exponentials.sum(dim=dim, keepdim=True)", "exponentials.sum()"),
)
softmax.fault(
    "no_exponential",
    "The scores themselves are divided by their sum. Without the exponential a "
    "negative score gives a negative weight.",
    ("torch.exp(scores - largest)", "scores"),
)
softmax.fault(
    "not_divided",
    "The exponentials are not divided by their sum.",
    (
        "return exponentials / exponentials.sum(dim=dim, keepdim=True)",
        "return exponentials",
    ),
)
softmax.fault(
    "dim_dropped",
    "The sum loses its dimension, so that broadcasting lines up the wrong axes: it "
    "crashes, or on square inputs divides by another row's sum.",
    ("exponentials.sum(dim=dim, keepdim=True)", "exponentials.sum(dim=dim)"),
)
softmax.fault(
    "max_is_a_pair",
    "With a `dim`, `max` returns two tensors, the values and where they stand. Take the "
    "values, or use `amax`.",
    (".values", ""),
)
softmax.fault(
    "clamped",
    "The scores are cut off at a fixed size to avoid overflow. That changes the weights "
    "of large scores, where only the differences should count.",
    ("torch.exp(scores - largest)", "torch.exp(scores.clamp(-80, 80))"),
)
