"""Lesson 06: LayerNorm, RMSNorm, and the two places where a norm can stand."""

import torch
import torch.nn.functional as F
from torch import nn

from utils.check.case import Crashed, Unmet
from utils.check.exercise import Exercise, Joint, reference_part
from utils.probe import probe, strided

HALF = (torch.float16, torch.bfloat16)


def true_layer_norm(x, weight, bias, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def true_rms_norm(x, weight, eps=1e-6):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def agrees_to_float32(t, answer, oracle, x, *parameters, **kwargs):
    """float64 in, float64 out; the statistics may have been taken in float32."""
    actual = t.call(answer, x, *parameters, **kwargs)
    expected = oracle(x, *parameters, **kwargs)
    t.close(actual, expected, like=x, tolerance=1e-5 * expected.abs().max().item())


# layer_norm ----------------------------------------------------------------------

layer_norm = Exercise("layer_norm", lesson="norms")


@layer_norm.requires(
    "every vector along the last dimension gets mean 0 and variance 1, then weight and bias",
    "Take one vector and follow the loop of the lesson. Which dimension do its numbers "
    "lie along, and what is divided by what?",
)
def _(answer, t):
    t.agrees(answer, true_layer_norm, probe(3, 7), probe(7, seed=1), probe(7, seed=2))
    x = probe(2, 3, 5, seed=3, scale=2, shift=1)
    t.agrees(answer, true_layer_norm, x, probe(5, seed=4), probe(5, seed=5))


@layer_norm.requires("a single vector, and four dimensions, work too")
def _(answer, t):
    weight, bias = probe(6, seed=6), probe(6, seed=7)
    t.agrees(answer, true_layer_norm, probe(6, seed=8), weight, bias)
    t.agrees(answer, true_layer_norm, probe(2, 3, 4, 6, seed=9), weight, bias)
    t.agrees(
        answer,
        true_layer_norm,
        x=probe(4, 6, seed=8),
        weight=weight,
        bias=bias,
        eps=1e-5,
    )


@layer_norm.requires(
    "eps is added to the variance, inside the root, and is 1e-5 unless given",
    "Try a vector whose variance is as small as eps: there the place of eps decides.",
)
def _(answer, t):
    x, weight, bias = probe(3, 7, seed=10), probe(7, seed=11), probe(7, seed=12)
    t.agrees(answer, true_layer_norm, x, weight, bias, eps=0.5)
    t.agrees(answer, true_layer_norm, x, weight, bias, 0.01)
    t.agrees(answer, true_layer_norm, probe(3, 7, seed=13, scale=2e-3), weight, bias)


@layer_norm.requires(
    "a vector of equal numbers gives the bias, and finite gradients",
    "The variance is 0 here. What keeps the root and its slope finite?",
)
def _(answer, t):
    x = probe(4, 6, seed=14)
    x[1], x[2] = 0.0, 2.0
    weight, bias = probe(6, seed=15), probe(6, seed=16)
    t.agrees(answer, true_layer_norm, x, weight, bias)
    t.gradients_agree(answer, true_layer_norm, x, weight, bias)


@layer_norm.requires(
    "large shifts and scales do not spoil it",
    "The mean of squares minus the square of the mean is the variance on paper. In "
    "float32 it is the small difference of two large numbers.",
)
def _(answer, t):
    weight, bias = probe(9, seed=17), probe(9, seed=18)
    for x in (
        probe(3, 9, seed=19, shift=2000),
        probe(3, 9, seed=20, scale=1e6),
        probe(3, 9, seed=21, shift=-300, scale=0.5),
    ):
        t.agrees(answer, true_layer_norm, x, weight, bias)


@layer_norm.requires(
    "float16 and bfloat16 come back as they came, with statistics no worse than float32's",
    "The square of 300 is more than float16 can hold, whatever it is divided by later.",
)
def _(answer, t):
    for dtype in HALF:
        weight = probe(40, seed=22, dtype=dtype)
        bias = probe(40, seed=23, dtype=dtype)
        x = probe(2, 3, 40, seed=24, dtype=dtype)
        t.agrees(answer, true_layer_norm, x, weight, bias)
        x = probe(2, 3, 40, seed=25, scale=900, dtype=dtype)
        t.agrees(answer, true_layer_norm, x, weight, bias)
    # With a large mean, what the rounding of x did is no excuse: x is given.
    for dtype, shift, scale in ((torch.float16, 1000, 4), (torch.bfloat16, 100, 0.5)):
        x = probe(3, 40, seed=26, shift=shift, scale=scale, dtype=dtype)
        weight, bias = weight.to(dtype), bias.to(dtype)
        expected = true_layer_norm(x.double(), weight.double(), bias.double())
        t.close(t.call(answer, x, weight, bias), expected, like=x)


@layer_norm.requires("float64 comes back as float64, and memory may lie apart")
def _(answer, t):
    x, weight, bias = (
        each.double() for each in (probe(2, 3, 5), probe(5, seed=27), probe(5, seed=28))
    )
    agrees_to_float32(t, answer, true_layer_norm, x, weight, bias)
    x = strided(probe(2, 3, 5, seed=29)).transpose(0, 1)
    t.agrees(answer, true_layer_norm, x, strided(probe(5, seed=30)), probe(5, seed=31))


@layer_norm.requires(
    "gradients flow to x, weight and bias, through mean and variance too",
    "Mean and variance depend on x, so they belong to the graph.",
)
def _(answer, t):
    x = probe(2, 3, 5, seed=32, shift=1)
    weight, bias = probe(5, seed=33), probe(5, seed=34)
    t.gradients_agree(answer, true_layer_norm, x, weight, bias)


@layer_norm.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, probe(3, 5), probe(5, seed=1), probe(5, seed=2))


def layer_norm_with(x, weight, bias, eps, dim=-1, unbiased=False):
    """(x − mean) / √(variance + eps) · weight + bias, with what may go wrong."""
    x32 = x.float()
    mean = x32.mean(dim, keepdim=True)
    variance = x32.var(dim, unbiased=unbiased, keepdim=True)
    return ((x32 - mean) * (variance + eps).rsqrt() * weight + bias).to(x.dtype)


@layer_norm.fault(
    "unbiased_variance",
    "The squares are divided by D − 1. That estimates the variance of a larger "
    "population; a norm describes these D numbers, so it divides by D. `var` and `std` "
    "of torch divide by D − 1 unless told otherwise.",
)
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x, weight, bias, eps, unbiased=True)


@layer_norm.fault(
    "eps_outside_the_root",
    "eps is added to the standard deviation, after the root. It belongs to the "
    "variance: √(variance + eps). The two differ where the variance is small, and the "
    "slope of the root at 0 is infinite without it.",
)
def _(x, weight, bias, eps=1e-5):
    x32 = x.float()
    centred = x32 - x32.mean(-1, keepdim=True)
    deviation = centred.square().mean(-1, keepdim=True).sqrt()
    return (centred / (deviation + eps) * weight + bias).to(x.dtype)


@layer_norm.fault(
    "unbiased_and_eps_outside",
    "Two things at once: `std` divides by D − 1 unless told otherwise, and eps is added "
    "after the root instead of to the variance.",
)
def _(x, weight, bias, eps=1e-5):
    x32 = x.float()
    centred = x32 - x32.mean(-1, keepdim=True)
    return (centred / (x32.std(-1, keepdim=True) + eps) * weight + bias).to(x.dtype)


@layer_norm.fault(
    "eps_missing",
    "eps is not added anywhere. A vector of equal numbers has variance 0, and 0/0 is NaN.",
)
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x, weight, bias, 0.0)


@layer_norm.fault(
    "eps_fixed",
    "The `eps` of the caller is not used; another one is written in its place.",
)
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x, weight, bias, 1e-5)


@layer_norm.fault(
    "eps_of_rms_norm",
    "eps is 1e-6 where the caller gives none; for this norm it is 1e-5.",
)
def _(x, weight, bias, eps=1e-6):
    return layer_norm_with(x, weight, bias, eps)


@layer_norm.fault(
    "over_time",
    "The statistics are taken over the positions, the dimension before the last. Each "
    "position has to be normalised by itself, over its features: otherwise a token's "
    "result depends on the other tokens, later ones included.",
)
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x, weight, bias, eps, dim=-2)


@layer_norm.fault(
    "over_the_batch",
    "The statistics are taken over the batch, as in batch normalisation. The other rows "
    "of the batch must not matter.",
)
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x, weight, bias, eps, dim=0)


@layer_norm.fault(
    "over_time_and_features",
    "One mean and one variance for all positions of a sequence. Each position has its own.",
)
def _(x, weight, bias, eps=1e-5):
    dims = tuple(range(1, x.dim())) if x.dim() > 2 else tuple(range(x.dim()))
    return layer_norm_with(x, weight, bias, eps, dim=dims)


@layer_norm.fault(
    "over_everything",
    "One mean and one variance for the whole tensor. Each vector along the last "
    "dimension has its own.",
)
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x, weight, bias, eps, dim=tuple(range(x.dim())))


@layer_norm.fault(
    "dim_1",
    "The statistics are taken over dimension 1. That is the last one of a matrix, but "
    "of a stream `(B, T, D)` it is time. Count from the end.",
)
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x, weight, bias, eps, dim=1)


@layer_norm.fault(
    "dim_2",
    "The statistics are taken over dimension 2, which is the last one of a stream "
    "`(B, T, D)` alone. Count from the end.",
)
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x, weight, bias, eps, dim=2)


@layer_norm.fault(
    "dimension_lost",
    "Mean and variance have lost the last dimension: `(B, T)` does not line up with "
    "`(B, T, D)`, or lines up with the wrong one. Keep a 1 in its place.",
)
def _(x, weight, bias, eps=1e-5):
    x32 = x.float()
    centred = x32 - x32.mean(-1)
    variance = x32.var(-1, unbiased=False)
    return (centred * (variance + eps).rsqrt() * weight + bias).to(x.dtype)


@layer_norm.fault(
    "sum_for_mean",
    "The squares are summed, not averaged. The vector then has length 1 whatever its "
    "width, and every value is smaller by the root of D.",
)
def _(x, weight, bias, eps=1e-5):
    x32 = x.float()
    centred = x32 - x32.mean(-1, keepdim=True)
    total = centred.square().sum(-1, keepdim=True)
    return (centred * (total + eps).rsqrt() * weight + bias).to(x.dtype)


@layer_norm.fault(
    "mean_of_sizes",
    "It divides by the mean of the absolute values. The standard deviation is the root "
    "of a mean of squares.",
)
def _(x, weight, bias, eps=1e-5):
    x32 = x.float()
    centred = x32 - x32.mean(-1, keepdim=True)
    spread = centred.abs().mean(-1, keepdim=True)
    return (centred / (spread + eps) * weight + bias).to(x.dtype)


@layer_norm.fault(
    "eps_as_a_floor",
    "eps is used as the least value that is allowed. It is added, so that the function "
    "has no kink.",
)
def _(x, weight, bias, eps=1e-5):
    x32 = x.float()
    centred = x32 - x32.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True).clamp(min=eps)
    return (centred * variance.rsqrt() * weight + bias).to(x.dtype)


@layer_norm.fault(
    "mean_not_subtracted",
    "The mean goes into the variance but is not subtracted from x.",
)
def _(x, weight, bias, eps=1e-5):
    x32 = x.float()
    variance = x32.var(-1, unbiased=False, keepdim=True)
    return (x32 * (variance + eps).rsqrt() * weight + bias).to(x.dtype)


@layer_norm.fault(
    "rms_norm",
    "This divides by the root of the mean square without subtracting the mean. That is "
    "RMSNorm, the next exercise.",
)
def _(x, weight, bias, eps=1e-5):
    x32 = x.float()
    mean_square = x32.square().mean(-1, keepdim=True)
    return (x32 * (mean_square + eps).rsqrt() * weight + bias).to(x.dtype)


@layer_norm.fault(
    "divided_by_the_variance", "It divides by the variance; the root is missing."
)
def _(x, weight, bias, eps=1e-5):
    x32 = x.float()
    centred = x32 - x32.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return (centred / (variance + eps) * weight + bias).to(x.dtype)


@layer_norm.fault("no_weight", "The weight is not used.")
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x, torch.ones_like(weight), bias, eps)


@layer_norm.fault("no_bias", "The bias is not added.")
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x, weight, torch.zeros_like(bias), eps)


@layer_norm.fault("no_weight_no_bias", "Weight and bias are not used.")
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x, torch.ones_like(weight), torch.zeros_like(bias), eps)


@layer_norm.fault(
    "weight_added", "The weight is added; it is a factor for each feature."
)
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x, torch.ones_like(weight), weight + bias, eps)


@layer_norm.fault(
    "weight_and_bias_exchanged",
    "Weight and bias have changed places: the weight multiplies, the bias is added.",
)
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x, bias, weight, eps)


@layer_norm.fault(
    "mean_square_for_variance",
    "The mean is subtracted from x, but the squares are those of x as it came. The "
    "variance is the mean of the squares of what is left after that.",
)
def _(x, weight, bias, eps=1e-5):
    x32 = x.float()
    mean_square = x32.square().mean(-1, keepdim=True)
    centred = x32 - x32.mean(-1, keepdim=True)
    return (centred * (mean_square + eps).rsqrt() * weight + bias).to(x.dtype)


@layer_norm.fault(
    "weight_plus_one",
    "The factor is 1 + weight. Some models store their weights that way; here the "
    "weight is the factor itself, and starts at 1.",
)
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x, 1 + weight, bias, eps)


@layer_norm.fault(
    "bias_before_weight",
    "The bias is added before the weight multiplies, so it is multiplied too.",
)
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x, weight, weight * bias, eps)


@layer_norm.fault(
    "weight_before_the_norm",
    "The weight multiplies x before the statistics are taken. It comes after the division.",
)
def _(x, weight, bias, eps=1e-5):
    ones = torch.ones_like(weight)
    return layer_norm_with(x.float() * weight, ones, bias, eps).to(x.dtype)


@layer_norm.fault(
    "variance_by_difference",
    "The variance is computed as the mean of the squares minus the square of the mean. "
    "On paper that is the same. With a mean of 2000 and a variance of 1 it is the "
    "difference of two numbers near four million, of which float32 keeps seven digits.",
)
def _(x, weight, bias, eps=1e-5):
    x32 = x.float()
    mean = x32.mean(-1, keepdim=True)
    variance = (x32 * x32).mean(-1, keepdim=True) - mean * mean
    return ((x32 - mean) / (variance + eps).sqrt() * weight + bias).to(x.dtype)


@layer_norm.fault(
    "statistics_in_half",
    "In float16 mean and variance are computed in float16 as well. The square of 300 is "
    "more than float16 can hold (65,504), and a mean near 1000 is rounded to halves.",
)
def _(x, weight, bias, eps=1e-5):
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred * torch.rsqrt(variance + eps) * weight + bias


@layer_norm.fault(
    "mean_in_half",
    "The mean is computed, or subtracted, in half precision, and only the rest in "
    "float32. A mean near 1000 is then rounded to halves, and every number of the vector "
    "is off by what was lost: cast first.",
)
def _(x, weight, bias, eps=1e-5):
    half = x.dtype in HALF
    centred = (x if half else x.float()) - x.mean(-1, keepdim=True)
    centred = centred.float()
    variance = centred.square().mean(-1, keepdim=True)
    return (centred * torch.rsqrt(variance + eps) * weight + bias).to(x.dtype)


@layer_norm.fault(
    "left_in_float32",
    "The result stays in float32 although x came in half precision: cast it back at the "
    "end, or the rest of the model silently changes its dtype.",
)
def _(x, weight, bias, eps=1e-5):
    return layer_norm_with(x.float(), weight.float(), bias.float(), eps)


@layer_norm.fault(
    "detached_statistics",
    "Mean and variance are cut from the graph. They depend on x, and without their part "
    "the gradient no longer belongs to this function.",
)
def _(x, weight, bias, eps=1e-5):
    x32 = x.float()
    mean = x32.mean(-1, keepdim=True).detach()
    variance = x32.var(-1, unbiased=False, keepdim=True).detach()
    return ((x32 - mean) * (variance + eps).rsqrt() * weight + bias).to(x.dtype)


@layer_norm.fault(
    "in_place",
    "It works on x itself. The stream that the caller still needs is overwritten.",
)
def _(x, weight, bias, eps=1e-5):
    x -= x.mean(-1, keepdim=True)
    x /= (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x * weight + bias


# rms_norm ------------------------------------------------------------------------

rms_norm = Exercise("rms_norm", lesson="norms")


@rms_norm.requires(
    "every vector along the last dimension is divided by the root of its mean square, "
    "then multiplied by the weight",
    "Four steps, from the inside out: square, mean, root, divide. Which dimension does "
    "the mean run along?",
)
def _(answer, t):
    t.agrees(answer, true_rms_norm, probe(3, 7), probe(7, seed=1))
    t.agrees(answer, true_rms_norm, probe(2, 3, 5, seed=2, scale=2), probe(5, seed=3))


@rms_norm.requires(
    "the mean is not subtracted, neither before nor inside the root",
    "Shift a vector by 3. The root of the mean square grows, the standard deviation "
    "does not.",
)
def _(answer, t):
    t.agrees(answer, true_rms_norm, probe(2, 3, 5, seed=4, shift=3), probe(5, seed=5))
    t.agrees(answer, true_rms_norm, probe(4, 6, seed=6, shift=-50), probe(6, seed=7))


@rms_norm.requires("a single vector, and four dimensions, work too")
def _(answer, t):
    weight = probe(6, seed=8)
    t.agrees(answer, true_rms_norm, probe(6, seed=9), weight)
    t.agrees(answer, true_rms_norm, probe(2, 3, 4, 6, seed=10), weight)
    t.agrees(answer, true_rms_norm, x=probe(4, 6, seed=11), weight=weight, eps=1e-6)


@rms_norm.requires(
    "eps is added to the mean square, inside the root, and is 1e-6 unless given",
    "Try a vector whose mean square is as small as eps: there the place of eps decides.",
)
def _(answer, t):
    x, weight = probe(3, 7, seed=12), probe(7, seed=13)
    t.agrees(answer, true_rms_norm, x, weight, eps=0.5)
    t.agrees(answer, true_rms_norm, x, weight, 0.01)
    t.agrees(answer, true_rms_norm, probe(3, 7, seed=14, scale=7e-4), weight)


@rms_norm.requires(
    "a vector of zeros gives zeros, and finite gradients",
    "The mean square is 0 here. What keeps the root and its slope finite?",
)
def _(answer, t):
    x, weight = probe(4, 6, seed=15), probe(6, seed=16)
    x[1] = 0.0
    t.agrees(answer, true_rms_norm, x, weight)
    t.gradients_agree(answer, true_rms_norm, x, weight)


@rms_norm.requires(
    "float16 and bfloat16 come back as they came, with statistics no worse than float32's",
    "The square of 300 is more than float16 can hold, and the square of 0.0001 less.",
)
def _(answer, t):
    for dtype in HALF:
        weight = probe(40, seed=17, dtype=dtype)
        x = probe(2, 3, 40, seed=18, dtype=dtype)
        t.agrees(answer, true_rms_norm, x, weight)
        x = probe(2, 3, 40, seed=19, scale=900, dtype=dtype)
        t.agrees(answer, true_rms_norm, x, weight)
        x = probe(3, 40, seed=20, scale=2e-4, dtype=dtype)
        t.agrees(answer, true_rms_norm, x, weight, eps=1e-9)


@rms_norm.requires("large values, float64, and memory that lies apart, work too")
def _(answer, t):
    t.agrees(answer, true_rms_norm, probe(3, 5, seed=21, scale=1e6), probe(5, seed=22))
    x, weight = probe(2, 3, 5).double(), probe(5, seed=23).double()
    agrees_to_float32(t, answer, true_rms_norm, x, weight)
    x = strided(probe(2, 3, 5, seed=24)).transpose(0, 1)
    t.agrees(answer, true_rms_norm, x, strided(probe(5, seed=25)))


@rms_norm.requires(
    "gradients flow to x and weight, through the mean square too",
    "The mean square depends on x, so it belongs to the graph.",
)
def _(answer, t):
    t.gradients_agree(answer, true_rms_norm, probe(2, 3, 5, seed=26), probe(5, seed=27))


@rms_norm.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, probe(3, 5), probe(5, seed=1))


def rms_norm_with(x, weight, eps, dim=-1):
    """x / √(mean square + eps) · weight, over the dimension that is given."""
    x32 = x.float()
    mean_square = x32.square().mean(dim, keepdim=True)
    return (x32 * (mean_square + eps).rsqrt() * weight).to(x.dtype)


@rms_norm.fault(
    "standard_deviation",
    "It divides by the standard deviation, from which the mean is subtracted. The root "
    "of the mean square is the same only for a vector whose mean is 0.",
)
def _(x, weight, eps=1e-6):
    x32 = x.float()
    variance = x32.var(-1, unbiased=False, keepdim=True)
    return (x32 * (variance + eps).rsqrt() * weight).to(x.dtype)


@rms_norm.fault(
    "unbiased_standard_deviation",
    "It divides by the standard deviation as torch's `std` and `var` give it: the mean "
    "is subtracted in it, and the squares are divided by D − 1. The root of the mean "
    "square does neither.",
)
def _(x, weight, eps=1e-6):
    x32 = x.float()
    return (x32 * (x32.var(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)


@rms_norm.fault(
    "layer_norm",
    "The mean is subtracted first. That is LayerNorm; RMSNorm leaves the mean where it is.",
)
def _(x, weight, eps=1e-6):
    x32 = x.float()
    return rms_norm_with(x32 - x32.mean(-1, keepdim=True), weight, eps).to(x.dtype)


@rms_norm.fault(
    "sum_for_mean",
    "The squares are summed, not averaged. The vector then has length 1 whatever its "
    "width, and every value is smaller by the root of D.",
)
def _(x, weight, eps=1e-6):
    x32 = x.float()
    total = x32.square().sum(-1, keepdim=True)
    return (x32 * (total + eps).rsqrt() * weight).to(x.dtype)


@rms_norm.fault(
    "divided_by_d_minus_1",
    "The sum of squares is divided by D − 1. A norm describes these D numbers: divide by D.",
)
def _(x, weight, eps=1e-6):
    x32 = x.float()
    mean_square = x32.square().sum(-1, keepdim=True) / max(x.shape[-1] - 1, 1)
    return (x32 * (mean_square + eps).rsqrt() * weight).to(x.dtype)


@rms_norm.fault(
    "eps_outside_the_root",
    "eps is added after the root. It belongs to the mean square: √(mean square + eps). "
    "The two differ for small vectors, and the slope of the root at 0 is infinite "
    "without it.",
)
def _(x, weight, eps=1e-6):
    x32 = x.float()
    rms = x32.square().mean(-1, keepdim=True).sqrt()
    return (x32 / (rms + eps) * weight).to(x.dtype)


@rms_norm.fault(
    "eps_as_a_floor",
    "eps is used as the least value that is allowed. It is added, so that the function "
    "has no kink.",
)
def _(x, weight, eps=1e-6):
    x32 = x.float()
    mean_square = x32.square().mean(-1, keepdim=True).clamp(min=eps)
    return (x32 * mean_square.rsqrt() * weight).to(x.dtype)


@rms_norm.fault(
    "eps_missing", "eps is not added anywhere. For a vector of zeros 0/0 is NaN."
)
def _(x, weight, eps=1e-6):
    return rms_norm_with(x, weight, 0.0)


@rms_norm.fault(
    "eps_fixed",
    "The `eps` of the caller is not used; another one is written in its place.",
)
def _(x, weight, eps=1e-6):
    return rms_norm_with(x, weight, 1e-6)


@rms_norm.fault(
    "eps_of_layer_norm",
    "eps is 1e-5 where the caller gives none; for this norm it is 1e-6.",
)
def _(x, weight, eps=1e-5):
    return rms_norm_with(x, weight, eps)


@rms_norm.fault(
    "eps_in_the_sum",
    "eps is added to the sum of the squares, so that it is divided by D as well.",
)
def _(x, weight, eps=1e-6):
    return rms_norm_with(x, weight, eps / x.shape[-1])


@rms_norm.fault(
    "over_time",
    "The mean runs along the positions, the dimension before the last. Each position "
    "has to be normalised by itself, over its features: otherwise a token's result "
    "depends on the other tokens, later ones included.",
)
def _(x, weight, eps=1e-6):
    return rms_norm_with(x, weight, eps, dim=-2)


@rms_norm.fault(
    "over_the_batch",
    "The mean runs along the batch. The other rows of the batch must not matter.",
)
def _(x, weight, eps=1e-6):
    return rms_norm_with(x, weight, eps, dim=0)


@rms_norm.fault(
    "over_time_and_features",
    "One mean square for all positions of a sequence. Each position has its own.",
)
def _(x, weight, eps=1e-6):
    dims = tuple(range(1, x.dim())) if x.dim() > 2 else tuple(range(x.dim()))
    return rms_norm_with(x, weight, eps, dim=dims)


@rms_norm.fault(
    "over_everything",
    "One mean square for the whole tensor. Each vector along the last dimension has its "
    "own.",
)
def _(x, weight, eps=1e-6):
    return rms_norm_with(x, weight, eps, dim=tuple(range(x.dim())))


@rms_norm.fault(
    "dim_1",
    "The mean runs along dimension 1. That is the last one of a matrix, but of a stream "
    "`(B, T, D)` it is time. Count from the end.",
)
def _(x, weight, eps=1e-6):
    return rms_norm_with(x, weight, eps, dim=1)


@rms_norm.fault(
    "dim_2",
    "The mean runs along dimension 2, which is the last one of a stream `(B, T, D)` "
    "alone. Count from the end.",
)
def _(x, weight, eps=1e-6):
    return rms_norm_with(x, weight, eps, dim=2)


@rms_norm.fault(
    "dimension_lost",
    "The mean square has lost the last dimension: `(B, T)` does not line up with "
    "`(B, T, D)`, or lines up with the wrong one. Keep a 1 in its place.",
)
def _(x, weight, eps=1e-6):
    x32 = x.float()
    mean_square = x32.square().mean(-1)
    return (x32 * (mean_square + eps).rsqrt() * weight).to(x.dtype)


@rms_norm.fault(
    "square_of_the_mean",
    "The mean is squared. It is the mean of the squares: square first, or positive and "
    "negative numbers cancel.",
)
def _(x, weight, eps=1e-6):
    x32 = x.float()
    square = x32.mean(-1, keepdim=True).square()
    return (x32 * (square + eps).rsqrt() * weight).to(x.dtype)


@rms_norm.fault("root_missing", "It divides by the mean square; the root is missing.")
def _(x, weight, eps=1e-6):
    x32 = x.float()
    mean_square = x32.square().mean(-1, keepdim=True)
    return (x32 / (mean_square + eps) * weight).to(x.dtype)


@rms_norm.fault("multiplied", "It multiplies by the root of the mean square.")
def _(x, weight, eps=1e-6):
    x32 = x.float()
    mean_square = x32.square().mean(-1, keepdim=True)
    return (x32 * (mean_square + eps).sqrt() * weight).to(x.dtype)


@rms_norm.fault(
    "mean_of_sizes",
    "It divides by the mean of the absolute values. That needs no root, and is another "
    "number: large entries count for more in a mean of squares.",
)
def _(x, weight, eps=1e-6):
    x32 = x.float()
    return (x32 / (x32.abs().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@rms_norm.fault("no_weight", "The weight is not used.")
def _(x, weight, eps=1e-6):
    return rms_norm_with(x, torch.ones_like(weight), eps)


@rms_norm.fault("weight_added", "The weight is added; it is a factor for each feature.")
def _(x, weight, eps=1e-6):
    return rms_norm_with(x, torch.ones_like(weight), eps) + weight


@rms_norm.fault(
    "weight_plus_one",
    "The factor is 1 + weight. Some models store their weights that way; here the "
    "weight is the factor itself, and starts at 1.",
)
def _(x, weight, eps=1e-6):
    return rms_norm_with(x, 1 + weight, eps)


@rms_norm.fault(
    "weight_before_the_norm",
    "The weight multiplies x before the mean square is taken. It comes after the division.",
)
def _(x, weight, eps=1e-6):
    return rms_norm_with(x.float() * weight, torch.ones_like(weight), eps).to(x.dtype)


@rms_norm.fault(
    "statistics_in_half",
    "In float16 the squares are computed in float16 as well. The square of 300 is more "
    "than it can hold (65,504) and the square of 0.0001 less than its smallest number: "
    "the vector becomes zeros, or infinite.",
)
def _(x, weight, eps=1e-6):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


@rms_norm.fault(
    "squares_in_half",
    "The squares are computed before the cast to float32. By then those above 65,504 "
    "are infinite already.",
)
def _(x, weight, eps=1e-6):
    mean_square = (x * x).float().mean(-1, keepdim=True)
    return (x.float() * torch.rsqrt(mean_square + eps) * weight).to(x.dtype)


@rms_norm.fault(
    "left_in_float32",
    "The result stays in float32 although x came in half precision: cast it back at the "
    "end, or the rest of the model silently changes its dtype.",
)
def _(x, weight, eps=1e-6):
    return rms_norm_with(x.float(), weight.float(), eps)


@rms_norm.fault(
    "detached_statistics",
    "The mean square is cut from the graph. It depends on x, and without its part the "
    "gradient no longer belongs to this function.",
)
def _(x, weight, eps=1e-6):
    x32 = x.float()
    mean_square = x32.square().mean(-1, keepdim=True).detach()
    return (x32 * (mean_square + eps).rsqrt() * weight).to(x.dtype)


@rms_norm.fault(
    "in_place",
    "It works on x itself. The stream that the caller still needs is overwritten.",
)
def _(x, weight, eps=1e-6):
    return x.div_((x.square().mean(-1, keepdim=True) + eps).sqrt()) * weight


# RMSNorm -------------------------------------------------------------------------

module = Exercise("RMSNorm", lesson="norms")


def oracle_with(weight, eps=1e-6):
    return lambda x: true_rms_norm(x, weight.to(x.dtype), eps)


@module.requires(
    "it has one parameter, `weight`, of d_model numbers",
    "What is assigned to `self` as an `nn.Parameter` is trained, saved and moved with "
    "the model. Nothing else is.",
)
def _(answer, t):
    norm = t.call(answer, 6)
    t.parameter_count(norm, 6)
    t.load(norm, weight=torch.ones(6))


@module.requires(
    "it starts as the plain norm, with a weight of ones",
    "What does a factor have to be in order to change nothing?",
)
def _(answer, t):
    norm = t.call(answer, 6)
    t.agrees(norm, oracle_with(torch.ones(6)), probe(2, 3, 6, seed=1, shift=0.5))


@module.requires(
    "it gives rms_norm with its own weight and the eps that it was made with",
    "Keep eps in `__init__`, and hand it on in `forward`.",
)
def _(answer, t):
    x, weight = probe(2, 3, 6, seed=2, scale=0.1, shift=0.05), probe(6, seed=3)
    t.agrees(t.load(answer(6, 0.5), weight=weight), oracle_with(weight, 0.5), x)
    t.agrees(t.load(answer(6, eps=0.01), weight=weight), oracle_with(weight, 0.01), x)
    t.agrees(t.load(answer(6), weight=weight), oracle_with(weight), x * 0.007)


@module.requires("another width, and other numbers of dimensions, work too")
def _(answer, t):
    weight = probe(9, seed=4)
    norm = t.load(t.call(answer, d_model=9, eps=1e-6), weight=weight)
    t.agrees(norm, oracle_with(weight), probe(9, seed=5))
    t.agrees(norm, oracle_with(weight), probe(2, 3, 4, 9, seed=6))


@module.requires(
    "a second call, `eval()` and other rows in the batch change nothing",
    "A norm keeps no statistics from call to call: this vector is all that it needs.",
)
def _(answer, t):
    weight = probe(5, seed=7)
    norm = t.load(t.call(answer, 5), weight=weight)
    for x in (probe(2, 3, 5, seed=8), probe(2, 3, 5, seed=9, shift=2), probe(1, 3, 5)):
        t.agrees(norm, oracle_with(weight), x)
    norm.eval()
    t.agrees(norm, oracle_with(weight), probe(2, 3, 5, seed=10, scale=3))


@module.requires(
    "after `.half()` or `.bfloat16()` it returns that dtype and does not overflow, after "
    "`.double()` float64",
)
def _(answer, t):
    for dtype in HALF:
        weight = probe(40, seed=11, dtype=dtype)
        norm = t.load(t.call(answer, 40).to(dtype), weight=weight)
        x = probe(2, 3, 40, seed=12, scale=900, dtype=dtype)
        t.agrees(norm, oracle_with(weight), x)
    weight = probe(5, seed=13).double()
    norm = t.load(t.call(answer, 5).double(), weight=weight)
    agrees_to_float32(t, norm, oracle_with(weight), probe(2, 3, 5).double())


@module.requires("gradients reach x and the weight")
def _(answer, t):
    weight, x = probe(5, seed=14), probe(2, 3, 5, seed=15)

    def through(x, weight, made):
        return torch.func.functional_call(made, {"weight": weight}, (x,))

    def oracle(x, weight, made):
        return true_rms_norm(x, weight)

    norm = t.call(answer, 5)
    t.true(
        all(each.requires_grad for each in norm.parameters()),
        "The weight asks for no gradient: training will leave it as it is.",
    )
    t.gradients_agree(through, oracle, x, weight, norm)


@module.requires("two norms share nothing, and all of it moves with the model")
def _(answer, t):
    one, other = t.call(answer, 5), t.call(answer, 5)
    t.load(one, weight=probe(5, seed=16))
    t.agrees(other, oracle_with(torch.ones(5)), probe(2, 3, 5, seed=17))
    t.any_device(one.to("meta"), probe(2, 3, 5))


class WrongNorm(nn.Module):
    """A right RMSNorm, for the faults to change one thing of."""

    def __init__(self, d_model, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(self.first(d_model))
        self.eps = eps

    def first(self, d_model):
        return torch.ones(d_model)

    def forward(self, x):
        return rms_norm_with(x, self.weight, self.eps)


@module.fault(
    "weight_is_no_parameter",
    "The weight is a plain tensor, or a buffer. No optimiser will ever see it; a plain "
    "tensor is not saved either, and stays behind when the model moves to a GPU.",
)
class _(WrongNorm):
    def __init__(self, d_model, eps=1e-6):
        nn.Module.__init__(self)
        self.weight, self.eps = torch.ones(d_model), eps


@module.fault(
    "starts_at_zero",
    "The weight starts at zeros: every sublayer behind it gets nothing to work with.",
)
class _(WrongNorm):
    def first(self, d_model):
        return torch.zeros(d_model)


@module.fault(
    "starts_random",
    "The weight starts at random numbers. A factor that is to change nothing is 1.",
)
class _(WrongNorm):
    def first(self, d_model):
        return torch.randn(d_model)


@module.fault(
    "one_plus_the_weight",
    "The factor is 1 + weight, with a weight that starts at zeros. Some models store "
    "their weights that way; here the weight is the factor itself.",
)
class _(WrongNorm):
    def first(self, d_model):
        return torch.zeros(d_model)

    def forward(self, x):
        return rms_norm_with(x, 1 + self.weight, self.eps)


@module.fault(
    "residual_inside",
    "The input is added to the result. The next exercises add it, outside; here it would "
    "count twice.",
)
class _(WrongNorm):
    def forward(self, x):
        return x + super().forward(x)


@module.fault(
    "frozen",
    "The weight does not ask for a gradient (`requires_grad=False`), so it stays at ones.",
)
class _(WrongNorm):
    def __init__(self, d_model, eps=1e-6):
        super().__init__(d_model, eps)
        self.weight.requires_grad_(False)


@module.fault(
    "three_dimensions_only",
    "It reads exactly three sizes from the shape of x. A single vector, or a batch of "
    "batches, is a stream too: the last dimension is all that matters.",
)
class _(WrongNorm):
    def forward(self, x):
        _b, _t, _d = x.shape
        return super().forward(x)


@module.fault(
    "one_number",
    "The weight is a single number. Each feature has a factor of its own.",
)
class _(WrongNorm):
    def first(self, d_model):
        return torch.ones(1)


@module.fault(
    "with_bias",
    "It has a bias too. RMSNorm has only the weight.",
)
class _(WrongNorm):
    def __init__(self, d_model, eps=1e-6):
        super().__init__(d_model, eps)
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x):
        return super().forward(x) + self.bias


@module.fault("eps_ignored", "The `eps` that it was made with is not used.")
class _(WrongNorm):
    def forward(self, x):
        return rms_norm_with(x, self.weight, 1e-6)


@module.fault(
    "eps_of_layer_norm",
    "eps is 1e-5 where the caller gives none; for this norm it is 1e-6.",
)
class _(WrongNorm):
    def __init__(self, d_model, eps=1e-5):
        super().__init__(d_model, eps)


@module.fault(
    "weight_unused",
    "The weight exists, but the result does not depend on it.",
)
class _(WrongNorm):
    def forward(self, x):
        return rms_norm_with(x, torch.ones_like(self.weight), self.eps)


@module.fault(
    "layer_norm",
    "The mean is subtracted first. That is LayerNorm; RMSNorm leaves the mean where it is.",
)
class _(WrongNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


@module.fault(
    "standard_deviation",
    "It divides by the standard deviation, from which the mean is subtracted. The root "
    "of the mean square is the same only for a vector whose mean is 0.",
)
class _(WrongNorm):
    def forward(self, x):
        x32 = x.float()
        variance = x32.var(-1, unbiased=False, keepdim=True)
        return (x32 * (variance + self.eps).rsqrt() * self.weight).to(x.dtype)


@module.fault(
    "over_time",
    "The mean runs along the positions, the dimension before the last. Each position "
    "has to be normalised by itself, over its features.",
)
class _(WrongNorm):
    def forward(self, x):
        return rms_norm_with(x, self.weight, self.eps, dim=-2)


@module.fault(
    "over_everything",
    "One mean square for the whole tensor. Each vector along the last dimension has its "
    "own.",
)
class _(WrongNorm):
    def forward(self, x):
        return rms_norm_with(x, self.weight, self.eps, dim=tuple(range(x.dim())))


@module.fault(
    "running_statistics",
    "It keeps a running average of the mean square, as batch normalisation does. A "
    "vector's result then depends on what came before.",
)
class _(WrongNorm):
    def __init__(self, d_model, eps=1e-6):
        super().__init__(d_model, eps)
        self.running = None

    def forward(self, x):
        now = x.float().square().mean(-1, keepdim=True).detach()
        if self.running is None or self.running.shape != now.shape:
            self.running = now
        self.running = 0.9 * self.running + 0.1 * now
        return (x * (self.running + self.eps).rsqrt() * self.weight).to(x.dtype)


@module.fault(
    "statistics_in_half",
    "In float16 the squares are computed in float16 as well, and those above 65,504 are "
    "infinite: the vector becomes zeros.",
)
class _(WrongNorm):
    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


@module.fault(
    "left_in_float32",
    "The result stays in float32 although x came in half precision: cast it back at the "
    "end.",
)
class _(WrongNorm):
    def forward(self, x):
        return rms_norm_with(x.float(), self.weight.float(), self.eps)


@module.fault(
    "detached_weight",
    "The weight is used through `.data` or `detach()`, so no gradient reaches it and it "
    "is never trained.",
)
class _(WrongNorm):
    def forward(self, x):
        return rms_norm_with(x, self.weight.detach(), self.eps)


# pre_norm and post_norm ----------------------------------------------------------


def sublayer(seed, width):
    """A sublayer that mixes features and positions and is linear in neither."""
    matrix = probe(width, width, seed=seed, scale=0.6)

    def apply(x):
        mixed = torch.tanh(x @ matrix.to(x.dtype))
        return mixed + 0.3 * mixed.flip(-2).square() + 0.2

    return apply


def any_norm(x):
    """Stands where a norm is expected, but sees every change of scale and shift."""
    return torch.sin(0.7 * x + 0.4)


def real_norm(width, seed):
    weight = probe(width, seed=seed, shift=1, scale=0.3)
    return lambda x: true_rms_norm(x, weight.to(x.dtype))


class Counted:
    """Counts how often a function is called."""

    def __init__(self, f):
        self.f, self.calls = f, 0

    def __call__(self, x):
        self.calls += 1
        return self.f(x)


def encoder_layer(norm_first):
    """PyTorch's own layer, its two sublayers, and their norms, in float64."""
    layer = nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, batch_first=True, norm_first=norm_first
    ).double()
    for i, parameter in enumerate(layer.parameters()):
        value = probe(*parameter.shape, seed=40 + i, scale=0.4, shift=0.1)
        parameter.data.copy_(value)

    def attention(x):
        return layer.self_attn(x, x, x, need_weights=False)[0]

    def feed_forward(x):
        return layer.linear2(torch.relu(layer.linear1(x)))

    return layer, ((attention, layer.norm1), (feed_forward, layer.norm2))


def require_the_same_of(exercise, oracle, norm_first, formula):
    """Both ways round the requirements are the same; only the oracle differs."""

    @exercise.requires(
        formula,
        "Write the stream as a line from left to right, and mark where the sublayer "
        "branches off, where it joins again, and which of the three places the norm is at.",
    )
    def _(answer, t):
        t.agrees(answer, oracle, probe(2, 3, 5), sublayer(1, 5), any_norm)
        t.agrees(
            answer, oracle, probe(2, 4, 6, seed=2), sublayer(3, 6), real_norm(6, 4)
        )

    @exercise.requires(
        "two such steps are PyTorch's own encoder layer",
        f"`nn.TransformerEncoderLayer(…, norm_first={norm_first})`",
    )
    def _(answer, t):
        layer, steps = encoder_layer(norm_first)
        x = probe(2, 5, 8, seed=5).double()
        h = x
        for apply, norm in steps:
            h = t.call(answer, h.detach(), apply, norm)
        t.close(h, layer(x), like=x)

    @exercise.requires(
        "sublayer and norm are called once each",
        "A sublayer may be slow, or have dropout in it: call it once and keep the result.",
    )
    def _(answer, t):
        apply, norm = Counted(sublayer(6, 5)), Counted(any_norm)
        t.call(answer, probe(2, 3, 5, seed=7), apply, norm)
        for counted, name in ((apply, "sublayer"), (norm, "norm")):
            t.true(
                counted.calls == 1,
                f"`{name}` was called {counted.calls} times, expected once.",
            )

    @exercise.requires(
        "the stream comes back unchanged, even from a sublayer that returns its input",
        "`+=` writes into a tensor that somebody else may hold. `a + b` makes a new one.",
    )
    def _(answer, t):
        t.agrees(answer, oracle, probe(2, 3, 5, seed=8), nn.Identity(), nn.Identity())
        t.agrees(answer, oracle, probe(2, 3, 5, seed=9), nn.Identity(), any_norm)
        t.agrees(
            answer, oracle, probe(2, 3, 5, seed=10), sublayer(11, 5), nn.Identity()
        )

    @exercise.requires("arguments by name, half precision and other shapes work too")
    def _(answer, t):
        x = probe(2, 3, 5, seed=12, dtype=torch.bfloat16)
        t.agrees(answer, oracle, x=x, sublayer=sublayer(13, 5), norm=real_norm(5, 14))
        t.agrees(answer, oracle, probe(4, 6, seed=15), sublayer(16, 6), any_norm)

    @exercise.requires(
        "gradients flow through the branch and past it",
        "No `detach()`, and nothing written in place into what a sublayer returned.",
    )
    def _(answer, t):
        x = probe(2, 3, 5, seed=17)

        def with_weight(step):
            def through(x, sublayer_weight):
                return step(x, lambda h: torch.tanh(h @ sublayer_weight), any_norm)

            return through

        weight = probe(5, 5, seed=19)
        t.gradients_agree(with_weight(answer), with_weight(oracle), x, weight)
        t.gradients_agree(answer, oracle, x, sublayer(18, 5), any_norm)
        t.gradients_agree(answer, oracle, x, torch.sigmoid, torch.tanh)


IN_PLACE = (
    "It writes into x, or into what the sublayer returned, with `+=`. The caller still "
    "holds that tensor, and autograd may need it as it was."
)
DROPPED = (
    "The sublayer is called, but its result is not in what you return: is it bound to a "
    "name that is never used? (With an output matrix that starts at zero this would look "
    "right.)"
)
DOUBLE = "The stream is added twice. Does something else add it already?"
NO_RESIDUAL = (
    "The stream is not added to what the sublayer makes of it: there is no residual "
    "connection, so a deep stack loses its input and its gradient."
)
UNNORMED = "The norm is not used anywhere."
TWICE = (
    "The sublayer runs twice. That costs double, and with dropout gives two results."
)
SUBTRACTED = "The sublayer's result is subtracted. It is added to the stream."
AVERAGED = (
    "Stream and branch are averaged. They are added: halving at each step would leave "
    "half of the stream, then a quarter, then an eighth."
)
CUT_BRANCH = (
    "The sublayer's result is cut from the graph, so the sublayer never learns."
)
CUT_INPUT = (
    "What the sublayer gets is cut from the graph. The sublayer learns, but no gradient "
    "goes back through it to the layers before."
)
CUT_STREAM = (
    "The stream is cut from the graph where it passes the sublayer. The gradient's short "
    "way back is what a residual connection is for."
)

pre = Exercise("pre_norm", lesson="norms")
require_the_same_of(
    pre,
    lambda x, sublayer, norm: x + sublayer(norm(x)),
    True,
    "the sublayer works on the normalised stream, and its result is added to the stream "
    "as it was",
)

post = Exercise("post_norm", lesson="norms")
require_the_same_of(
    post,
    lambda x, sublayer, norm: norm(x + sublayer(x)),
    False,
    "the sublayer works on the stream as it is, its result is added, and the sum is "
    "normalised",
)


@pre.fault(
    "post_norm",
    "The norm stands after the addition. That is post-norm, the next exercise: here the "
    "stream itself is never normalised.",
)
def _(x, sublayer, norm):
    return norm(x + sublayer(x))


@pre.fault(
    "normed_residual",
    "The normalised stream is added instead of the stream as it was. The norm then "
    "stands in the way of the gradient at every step.",
)
def _(x, sublayer, norm):
    h = norm(x)
    return h + sublayer(h)


@pre.fault(
    "normed_stream_plain_branch",
    "The two are exchanged: the norm belongs to what the sublayer gets, and the stream "
    "is added as it was.",
)
def _(x, sublayer, norm):
    return norm(x) + sublayer(x)


@pre.fault(
    "norm_after_the_sublayer",
    "The norm is applied to the sublayer's result. It belongs to what the sublayer gets.",
)
def _(x, sublayer, norm):
    return x + norm(sublayer(x))


@pre.fault(
    "norm_on_both_sides",
    "The norm is applied before the sublayer and to its result once more.",
)
def _(x, sublayer, norm):
    return x + norm(sublayer(norm(x)))


@pre.fault("norm_twice", "The norm is applied twice before the sublayer.")
def _(x, sublayer, norm):
    return x + sublayer(norm(norm(x)))


@pre.fault(
    "pre_and_post",
    "The norm stands before the sublayer and after the addition too. One of them.",
)
def _(x, sublayer, norm):
    return norm(x + sublayer(norm(x)))


@pre.fault("no_norm", f"{UNNORMED} The sublayer gets the stream as it is.")
def _(x, sublayer, norm):
    return x + sublayer(x)


@pre.fault(
    "norm_unused", "The norm is called, but the sublayer gets the stream as it is."
)
def _(x, sublayer, norm):
    norm(x)
    return x + sublayer(x)


@pre.fault("no_residual", NO_RESIDUAL)
def _(x, sublayer, norm):
    return sublayer(norm(x))


@pre.fault("sublayer_dropped", DROPPED)
def _(x, sublayer, norm):
    sublayer(norm(x))
    return x + 0


@pre.fault(
    "norm_added",
    "The normalised stream is added, and what the sublayer makes of it is not: is its "
    "result bound to a name that is never used?",
)
def _(x, sublayer, norm):
    h = norm(x)
    sublayer(h)
    return x + h


@pre.fault("double_residual", DOUBLE)
def _(x, sublayer, norm):
    return x + x + sublayer(norm(x))


@pre.fault(
    "normed_stream_added_too",
    "The normalised stream is added as well. The stream as it was is enough.",
)
def _(x, sublayer, norm):
    h = norm(x)
    return x + h + sublayer(h)


@pre.fault("subtracted", SUBTRACTED)
def _(x, sublayer, norm):
    return x - sublayer(norm(x))


@pre.fault("averaged", AVERAGED)
def _(x, sublayer, norm):
    return (x + sublayer(norm(x))) / 2


@pre.fault("sublayer_twice", TWICE)
def _(x, sublayer, norm):
    sublayer(norm(x))
    return x + sublayer(norm(x))


@pre.fault("stream_in_place", IN_PLACE)
def _(x, sublayer, norm):
    x += sublayer(norm(x))
    return x


@pre.fault("result_in_place", IN_PLACE)
def _(x, sublayer, norm):
    result = sublayer(norm(x))
    result += x
    return result


@pre.fault("detached_branch", CUT_BRANCH)
def _(x, sublayer, norm):
    return x + sublayer(norm(x)).detach()


@pre.fault("detached_input", CUT_INPUT)
def _(x, sublayer, norm):
    return x + sublayer(norm(x).detach())


@pre.fault("detached_stream", CUT_STREAM)
def _(x, sublayer, norm):
    return x.detach() + sublayer(norm(x))


@post.fault(
    "pre_norm",
    "The norm stands before the sublayer. That is pre-norm, the exercise before: here "
    "the sum is normalised.",
)
def _(x, sublayer, norm):
    return x + sublayer(norm(x))


@post.fault(
    "no_residual",
    f"{NO_RESIDUAL} Here it is added before the norm.",
)
def _(x, sublayer, norm):
    return norm(sublayer(x))


@post.fault(
    "norm_on_the_branch",
    "The norm is applied to the sublayer's result, and the stream is added after it. "
    "Post-norm normalises the sum.",
)
def _(x, sublayer, norm):
    return x + norm(sublayer(x))


@post.fault(
    "norm_on_the_stream",
    "The stream is normalised and the sublayer's result is added after it. Post-norm "
    "normalises the sum.",
)
def _(x, sublayer, norm):
    return norm(x) + sublayer(x)


@post.fault(
    "norms_apart",
    "Stream and branch are normalised one by one and added then. Post-norm normalises "
    "the sum.",
)
def _(x, sublayer, norm):
    return norm(x) + norm(sublayer(x))


@post.fault(
    "pre_and_post",
    "The norm stands before the sublayer as well. Post-norm has it after the addition only.",
)
def _(x, sublayer, norm):
    return norm(x + sublayer(norm(x)))


@post.fault(
    "normed_residual",
    "The stream is normalised first, and the sum is not. Post-norm normalises the sum.",
)
def _(x, sublayer, norm):
    h = norm(x)
    return h + sublayer(h)


@post.fault("no_norm", f"{UNNORMED} The sum is returned as it is.")
def _(x, sublayer, norm):
    return x + sublayer(x)


@post.fault("norm_unused", "The norm is called, but its result is not what you return.")
def _(x, sublayer, norm):
    h = x + sublayer(x)
    norm(h)
    return h


@post.fault("sublayer_dropped", DROPPED)
def _(x, sublayer, norm):
    sublayer(x)
    return norm(x)


@post.fault(
    "stream_added_to_itself",
    "The stream is added to itself: what the sublayer returned is bound to a name that "
    "is never used.",
)
def _(x, sublayer, norm):
    sublayer(x)
    return norm(x + x)


@post.fault("double_residual", DOUBLE)
def _(x, sublayer, norm):
    return norm(x + x + sublayer(x))


@post.fault(
    "residual_after_the_norm",
    "The stream is added once more after the norm. It is added once, before it.",
)
def _(x, sublayer, norm):
    return x + norm(x + sublayer(x))


@post.fault("norm_twice", "The sum is normalised twice.")
def _(x, sublayer, norm):
    return norm(norm(x + sublayer(x)))


@post.fault("subtracted", SUBTRACTED)
def _(x, sublayer, norm):
    return norm(x - sublayer(x))


@post.fault(
    "averaged",
    "Stream and branch are averaged before the norm. A norm hides that until eps "
    "matters; they are added.",
)
def _(x, sublayer, norm):
    return norm((x + sublayer(x)) / 2)


@post.fault("sublayer_twice", TWICE)
def _(x, sublayer, norm):
    sublayer(x)
    return norm(x + sublayer(x))


@post.fault("stream_in_place", IN_PLACE)
def _(x, sublayer, norm):
    x += sublayer(x)
    return norm(x)


@post.fault("result_in_place", IN_PLACE)
def _(x, sublayer, norm):
    result = sublayer(x)
    result += x
    return norm(result)


@post.fault("detached_branch", CUT_BRANCH)
def _(x, sublayer, norm):
    return norm(x + sublayer(x).detach())


@post.fault("detached_input", CUT_INPUT)
def _(x, sublayer, norm):
    return norm(x + sublayer(x.detach()))


@post.fault("detached_stream", CUT_STREAM)
def _(x, sublayer, norm):
    return norm(x.detach() + sublayer(x))


# The block ------------------------------------------------------------------------

block = Joint(
    "pre_norm_block",
    lesson="norms",
    parts={
        "causal_mask": "attention",
        "MultiHeadAttention": "multi_head",
        "SwiGLU": "feed_forward",
        "RMSNorm": "norms",
        "pre_norm": "norms",
    },
)

D_MODEL, N_HEADS, N_KV_HEADS, D_HEAD, D_FF = 12, 4, 2, 5, 20


def assemble(parts, seed=0, dtype=torch.float32):
    """The two halves of a block from its parts, with weights from a formula."""
    made = {
        "norm_1": parts["RMSNorm"](D_MODEL, 1e-6),
        "attention": parts["MultiHeadAttention"](D_MODEL, N_HEADS, N_KV_HEADS, D_HEAD),
        "norm_2": parts["RMSNorm"](D_MODEL, 1e-6),
        "feed_forward": parts["SwiGLU"](D_MODEL, D_FF),
    }
    made = nn.ModuleDict(made).to(dtype)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(sorted(made.named_parameters())):
            is_norm = name.startswith("norm")
            shift, scale = (1, 0.3) if is_norm else (0, parameter.shape[-1] ** -0.5)
            value = probe(*parameter.shape, seed=seed + i, scale=scale, shift=shift)
            parameter.copy_(value)
    return made


def attention_half(parts, made, x):
    """The stream after attention."""
    mask = parts["causal_mask"](x.shape[1])
    return parts["pre_norm"](
        x, lambda h: made["attention"](h, mask=mask), made["norm_1"]
    )


def feed_forward_half(parts, made, x):
    """The stream after the feed-forward network."""
    return parts["pre_norm"](x, made["feed_forward"], made["norm_2"])


def whole_block(parts, made, x):
    return feed_forward_half(parts, made, attention_half(parts, made, x))


def true_halves(made, x):
    """Both halves in float64 from the weights alone, with PyTorch's own functions."""
    w = {name: p.detach().double() for name, p in made.named_parameters()}
    x = x.double()

    def split(h, name, n):
        flat = h @ w[f"attention.{name}.weight"].T
        return flat.unflatten(-1, (n, D_HEAD)).transpose(1, 2)  # B H T Dh

    h = true_rms_norm(x, w["norm_1.weight"])
    q, k, v = (
        split(h, "w_q", N_HEADS),
        split(h, "w_k", N_KV_HEADS),
        split(h, "w_v", N_KV_HEADS),
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    first = x + mixed.transpose(1, 2).flatten(2) @ w["attention.w_o.weight"].T
    h = true_rms_norm(first, w["norm_2.weight"])
    gate = F.silu(h @ w["feed_forward.w_1.weight"].T)
    second = gate * (h @ w["feed_forward.w_3.weight"].T)
    return first, first + second @ w["feed_forward.w_2.weight"].T


def fit(t, what, f, *args):
    """What `f(*args)` returns; if it raises, a sentence about the joint."""
    try:
        return t.call(f, *args)
    except Crashed as crash:
        raise Unmet(f"{what}: {type(crash.error).__name__}, “{crash.error}”") from crash


def require_width(t, result, x, what):
    if isinstance(result, (tuple, list)):
        raise Unmet(
            f"{what} gives {len(result)} values. A part that returns its weights beside "
            "its result does not fit where a stream goes in and a stream comes out."
        )
    t.is_tensor(result, what)
    t.true(
        result.shape == x.shape,
        f"The stream changes its shape: {tuple(x.shape)} goes in, and {what} gives "
        f"{tuple(result.shape)}. What adds to the stream has to come back to its width.",
    )


@block.requires(
    "norm, attention and feed-forward take each other's results, and the stream keeps "
    "its shape",
    "Print the shapes on both sides of each addition.",
)
def _(parts, t):
    made = assemble(parts)
    x = probe(2, 7, D_MODEL, seed=50)
    for half, what in (
        (attention_half, "norm, attention, addition"),
        (feed_forward_half, "norm, feed-forward, addition"),
    ):
        result = fit(t, f"{what}: they do not fit", lambda x: half(parts, made, x), x)  # noqa: B023
        require_width(t, result, x, what)


@block.requires(
    "a later token changes no earlier output: norm, attention and feed-forward leave "
    "the mask its meaning",
    "Attention is the only part that may look at other positions, and it looks through "
    "the mask. Which of your parts mixes positions besides?",
)
def _(parts, t):
    made = assemble(parts, seed=20)
    x = probe(2, 7, D_MODEL, seed=51)
    changed = x.clone()
    changed[:, 4:] = probe(2, 3, D_MODEL, seed=52, scale=5, shift=2)
    for half, what in (
        (attention_half, "attention with the norm before it"),
        (feed_forward_half, "the feed-forward network with the norm before it"),
    ):
        before = t.call(lambda x: half(parts, made, x), x)  # noqa: B023
        after = t.call(lambda x: half(parts, made, x), changed)  # noqa: B023
        moved = (before - after)[:, :4].abs().max().item()
        t.true(
            moved < 1e-5,
            "The block is no longer causal: tokens 4, 5 and 6 were changed, and the "
            f"stream at tokens 0 to 3 moved by {moved:.2g} in {what}.",
        )


@block.requires(
    "each half adds to the stream once: the stream as it was, plus attention or "
    "feed-forward of the normalised stream",
    "Pull the halves apart: is `pre_norm(x, …) − x` what the sublayer gives alone?",
)
def _(parts, t):
    made = assemble(parts, seed=40)
    x = probe(2, 7, D_MODEL, seed=53, scale=3, shift=1)
    first, second = true_halves(made, x)
    result = t.call(lambda x: attention_half(parts, made, x), x)
    t.close(result, first, "the stream after attention", like=x)
    result = t.call(lambda x: whole_block(parts, made, x), x)
    t.close(result, second, "the stream after the feed-forward network", like=x)


@block.requires(
    "one token, and rows of a batch that differ, work too",
    "Does a part confuse the batch with time?",
)
def _(parts, t):
    made = assemble(parts, seed=60)
    for x in (probe(3, 1, D_MODEL, seed=54), probe(1, 5, D_MODEL, seed=55)):
        _, expected = true_halves(made, x)
        result = t.call(lambda x: whole_block(parts, made, x), x)
        t.close(result, expected, "the stream after the block", like=x)


@block.requires(
    "in bfloat16 every part hands on bfloat16",
    "A norm that leaves its result in float32 stops the matrix product behind it.",
)
def _(parts, t):
    made = assemble(parts, seed=80, dtype=torch.bfloat16)
    x = probe(2, 5, D_MODEL, seed=56, dtype=torch.bfloat16)
    result = fit(
        t,
        "After `.bfloat16()` the parts no longer fit",
        lambda x: whole_block(parts, made, x),
        x,
    )
    t.true(
        result.dtype == x.dtype,
        f"The stream goes in as bfloat16 and comes out as {result.dtype}: one of the "
        "parts changes its dtype.",
    )


@block.requires(
    "the gradient reaches the input and every weight",
    "Follow the gradient back from the addition: one way past the sublayer, one through it.",
)
def _(parts, t):
    made = assemble(parts, seed=90)
    x = probe(2, 5, D_MODEL, seed=57).requires_grad_()
    result = t.call(lambda x: whole_block(parts, made, x), x)
    weights = dict(made.named_parameters())
    given = torch.autograd.grad(
        (result * probe(*result.shape, seed=58)).sum(),
        [*weights.values()],
        allow_unused=True,
    )
    for name, gradient in zip(weights, given, strict=True):
        t.true(
            gradient is not None and bool(gradient.abs().max() > 0),
            f"No gradient reaches `{name}` of the block.",
        )


def right_part(lesson, name):
    """The reference, for a fault to change one thing of."""
    return reference_part(lesson, name) or nn.Module


RightAttention = right_part("multi_head", "MultiHeadAttention")
RightSwiGLU = right_part("feed_forward", "SwiGLU")


def attention_part(forward):
    """An attention whose forward is `forward(right, x, mask)`, over the right one."""

    class Changed(RightAttention):
        def forward(self, x, mask=None, rotate=None):
            return forward(super().forward, x, mask)

    return {"MultiHeadAttention": Changed}


def feed_forward_part(forward):
    class Changed(RightSwiGLU):
        def forward(self, x):
            return forward(super().forward, x)

    return {"SwiGLU": Changed}


def norm_part(forward):
    class Changed(WrongNorm):
        def forward(self, x):
            return forward(x, self.weight, self.eps)

    return {"RMSNorm": Changed}


block.fault(
    "attention_returns_its_weights",
    "Attention returns its weights beside its result, as `nn.MultiheadAttention` does. "
    "What is added to the stream has to be the result alone.",
    attention_part(lambda right, x, mask: (right(x, mask), None)),
)
block.fault(
    "mask_without_effect",
    "Each position sees all the later ones: attention takes the mask and does not use "
    "it, or the mask allows everything.",
    attention_part(lambda right, x, mask: right(x)),
)
block.fault(
    "mask_read_the_other_way",
    "Attention and mask disagree on what True means. For both it is: may look.",
    attention_part(lambda right, x, mask: right(x, ~mask)),
)
block.fault(
    "mask_shows_one_too_many",
    "The mask lets each query see one key too many, the one behind its own.",
    {"causal_mask": lambda t_q, t_k=None: torch.ones(t_q, t_q).tril(1).bool()},
)
block.fault(
    "attention_adds_the_stream",
    "Attention adds its input to its result, and `pre_norm` adds the stream again: one "
    "of the two is meant to.",
    attention_part(lambda right, x, mask: x + right(x, mask)),
)
block.fault(
    "feed_forward_adds_the_stream",
    "The feed-forward network adds its input to its result, and `pre_norm` adds the "
    "stream again: one of the two is meant to.",
    feed_forward_part(lambda right, x: x + right(x)),
)
block.fault(
    "feed_forward_mixes_positions",
    "The feed-forward network mixes positions. Only attention may, for only attention "
    "has the mask.",
    feed_forward_part(lambda right, x: right(x) + x.mean(1, keepdim=True)),
)
block.fault(
    "norm_over_time",
    "The norm takes its statistics over the positions, so each output depends on later "
    "tokens, and the mask is worth nothing. Per position, over the features.",
    norm_part(lambda x, weight, eps: rms_norm_with(x, weight, eps, dim=1)),
)
block.fault(
    "norm_over_time_and_features",
    "The norm takes one mean square over a whole sequence, so each output depends on "
    "later tokens, and the mask is worth nothing. Per position, over the features.",
    norm_part(lambda x, weight, eps: rms_norm_with(x, weight, eps, dim=(1, 2))),
)
block.fault(
    "norm_left_in_float32",
    "The norm returns float32 for a stream in bfloat16, and the matrices behind it are "
    "bfloat16.",
    norm_part(lambda x, weight, eps: rms_norm_with(x.float(), weight.float(), eps)),
)
block.fault(
    "norm_adds_the_stream",
    "The norm adds its input to its result. The stream is added by `pre_norm`.",
    norm_part(lambda x, weight, eps: x + rms_norm_with(x, weight, eps)),
)
block.fault(
    "stream_without_residual",
    NO_RESIDUAL,
    {"pre_norm": lambda x, sublayer, norm: sublayer(norm(x))},
)
block.fault(
    "sublayer_dropped",
    "What attention and feed-forward return is bound to a name that is never used: the "
    "stream passes the block as it came. (With output matrices of zeros this would look "
    "right.)",
    {"pre_norm": lambda x, sublayer, norm: (x + 0, sublayer(norm(x)))[0]},
)
block.fault(
    "stream_normalised",
    "The stream itself is normalised after each half, as in post-norm. Here it only "
    "grows by what is added.",
    {"pre_norm": lambda x, sublayer, norm: norm(x + sublayer(x))},
)
block.fault(
    "norm_left_out",
    "Attention and feed-forward get the stream as it is; the norm before them is missing.",
    {"pre_norm": lambda x, sublayer, norm: x + sublayer(x)},
)
block.fault(
    "branch_detached",
    "What is added to the stream is cut from the graph: neither attention nor "
    "feed-forward would ever learn.",
    {"pre_norm": lambda x, sublayer, norm: x + sublayer(norm(x)).detach()},
)
