"""Lesson 06: mistakes in the norms, in the steps of the stream, and in a block."""

from utils.exercises.norms import (
    RMSNorm,
    layer_norm,
    post_norm,
    pre_norm,
    pre_norm_block,
    rms_norm,
)

# Both norms ---------------------------------------------------------------------------

MEAN = "x32.mean(dim=-1, keepdim=True)"
VARIANCE = "centred.square().mean(dim=-1, keepdim=True)"
MEAN_SQUARE = "x32.square().mean(dim=-1, keepdim=True)"
CENTRED = "x32 - x32.mean(dim=-1, keepdim=True)"
LAYER_ROOT, ROOT = "* torch.rsqrt(variance + eps)", "* torch.rsqrt(mean_square + eps)"

for name, dimension, sentence in (
    (
        "over_time",
        "dim=-2",
        "The statistics are taken over the positions, the dimension before the last. "
        "Each position has to be normalised by itself, over its features: otherwise a "
        "token's result depends on the other tokens, later ones included.",
    ),
    (
        "over_the_batch",
        "dim=0",
        "The statistics are taken over the first dimension, the batch, as in batch "
        "normalisation. The other rows of the batch must not matter.",
    ),
    (
        "over_time_and_features",
        "dim=tuple(range(min(1, x.dim() - 2), x.dim()))",
        "There is one statistic for all positions of a sequence. Each position has "
        "its own.",
    ),
    (
        "over_everything",
        "dim=tuple(range(x.dim()))",
        "There is one statistic for the whole tensor. Each vector along the last "
        "dimension has its own.",
    ),
    (
        "dim_1",
        "dim=1",
        "The statistics are taken over dimension 1. That is the last one of a matrix, "
        "but of a stream `(B, T, D)` it is time. Count from the end.",
    ),
):
    layer_norm.fault(
        name,
        sentence,
        (MEAN, MEAN.replace("dim=-1", dimension)),
        (VARIANCE, VARIANCE.replace("dim=-1", dimension)),
    )
    rms_norm.fault(
        name, sentence, (MEAN_SQUARE, MEAN_SQUARE.replace("dim=-1", dimension))
    )

for norm, root, mean, statistic in (
    (layer_norm, LAYER_ROOT, VARIANCE, "variance"),
    (rms_norm, ROOT, MEAN_SQUARE, "mean square"),
):
    norm.fault(
        "sum_for_mean",
        "The squares are summed, not averaged. The vector then has length 1 whatever "
        "its width, and every value is smaller by the root of D.",
        (mean, mean.replace("mean", "sum")),
    )
    norm.fault(
        "eps_outside_the_root",
        f"eps is added after the root. It belongs to the {statistic}, under the root. "
        f"The two differ where the {statistic} is small, and without eps the slope of "
        "the root at 0 is infinite.",
        (root, root.replace("* torch.rsqrt(", "/ (").replace(" +", ".sqrt() +")),
    )
    norm.fault(
        "eps_missing",
        f"eps is not added anywhere. Where the {statistic} is 0, 0/0 is NaN.",
        (root, root.replace(" + eps", "")),
    )
    norm.fault(
        "eps_without_effect",
        f"The caller's eps changes nothing. Added to the {statistic}, it makes the "
        f"result smaller where the {statistic} is small.",
        (root, root.replace(" + eps", ".clamp(min=1e-24)")),
    )
    norm.fault(
        "root_missing",
        f"It divides by the {statistic}; the root is missing.",
        (root, root.replace("* torch.rsqrt", "/ ")),
    )
    norm.fault(
        "statistics_in_half",
        "In float16 the statistics are computed in float16 as well. The square of 300 "
        "is more than that can hold (65,504), and the square of 0.0001 less than its "
        "smallest number.",
        ("x32 = x.float()", "x32 = x if x.dtype != torch.float64 else x.float()"),
    )
    norm.fault(
        "detached_statistics",
        "The statistics are cut from the graph, by `detach()`, `torch.no_grad()`, "
        "`.item()` or a function of `math`. They depend on x, and without their part "
        "the gradient is that of another function.",
        *[
            (each, f"{each}.detach()")
            for each in ((MEAN, mean) if norm is layer_norm else (mean,))
        ],
    )

# layer_norm ---------------------------------------------------------------------------

layer_norm.fault(
    "detached_variance",
    "The variance is cut from the graph, by `detach()`, `.item()` or a function of "
    "`math`. It depends on x, and without its part the gradient is that of another "
    "function.",
    (VARIANCE, f"{VARIANCE}.detach()"),
)
layer_norm.fault(
    "dimension_lost",
    "Mean and variance have lost the last dimension: `(B, T)` does not line up with "
    "`(B, T, D)`, or lines up with the wrong one. Keep a 1 in its place.",
    (MEAN, "x32.mean(dim=-1)"),
    (VARIANCE, "x32.var(dim=-1, correction=0)"),
)
layer_norm.fault(
    "unbiased_variance",
    "The squares are divided by D − 1. That estimates the variance of a larger "
    "population; a norm describes these D numbers, so it divides by D. `var` and "
    "`std` of torch divide by D − 1 unless told otherwise.",
    (VARIANCE, "x32.var(dim=-1, keepdim=True)"),
)
layer_norm.fault(
    "rms_norm",
    "This divides by the root of the mean square without subtracting the mean. That "
    "is RMSNorm, the next exercise.",
    (CENTRED, "x32"),
)
layer_norm.fault(
    "mean_square_for_variance",
    "The mean is subtracted from x, but the squares are those of x as it came. The "
    "variance is the mean of the squares of what is left after that.",
    (VARIANCE, MEAN_SQUARE),
)
layer_norm.fault("no_weight", "The weight is not used.", (" * weight", ""))
layer_norm.fault("no_bias", "The bias is not added.", (" + bias", ""))
layer_norm.fault(
    "variance_by_difference",
    "The variance is computed as the mean of the squares minus the square of the "
    "mean. On paper that is the same. With a mean of 2000 and a variance of 1 it is "
    "the difference of two numbers near four million, of which float32 keeps seven "
    "digits.",
    (VARIANCE, f"{MEAN_SQUARE} - {MEAN}.square()"),
)
layer_norm.fault(
    "mean_in_half",
    "The mean is computed, or subtracted, in half precision, and only the rest in "
    "float32. A mean near 1000 is then rounded to halves, and every number of the "
    "vector is off by what was lost: cast first.",
    (CENTRED, "(x - x.mean(dim=-1, keepdim=True)).float()"),
)

# rms_norm and RMSNorm -----------------------------------------------------------------

rms_norm.fault(
    "dimension_lost",
    "The mean square has lost the last dimension: `(B, T)` does not line up with `(B, "
    "T, D)`, or lines up with the wrong one. Keep a 1 in its place.",
    (MEAN_SQUARE, "x32.square().mean(dim=-1)"),
)
rms_norm.fault(
    "standard_deviation",
    "It divides by the standard deviation, from which the mean is subtracted. The "
    "root of the mean square is the same only for a vector whose mean is 0.",
    (MEAN_SQUARE, "x32.var(dim=-1, correction=0, keepdim=True)"),
)
rms_norm.fault(
    "layer_norm",
    "The mean is subtracted first. That is LayerNorm; RMSNorm leaves the mean where "
    "it is.",
    ("x32 = x.float()", "x32 = x.float() - x.float().mean(dim=-1, keepdim=True)"),
)
rms_norm.fault(
    "square_of_the_mean",
    "The mean is squared. It is the mean of the squares: square first, or positive "
    "and negative numbers cancel.",
    (MEAN_SQUARE, f"{MEAN}.square()"),
)
rms_norm.fault("no_weight", "The weight is not used.", (" * weight", ""))
RMSNorm.fault(
    "starts_at_zero",
    "The weight starts at zeros: every sublayer behind it gets nothing to work with.",
    ("torch.ones", "torch.zeros"),
)
RMSNorm.fault(
    "one_plus_the_weight",
    "The factor is 1 + weight, with a weight that starts at zeros. Some models store "
    "their weights that way; here the weight is the factor itself.",
    ("torch.ones", "torch.zeros"),
    ("(x, self.weight,", "(x, 1 + self.weight,"),
)
RMSNorm.fault(
    "eps_ignored",
    "The `eps` that it was made with is not used.",
    (", self.eps)", ")"),
)
RMSNorm.inherits(
    rms_norm,
    "layer_norm",
    "standard_deviation",
    "over_time",
    "over_time_and_features",
    "over_everything",
    "dim_1",
    "dimension_lost",
    "sum_for_mean",
    "root_missing",
    "eps_outside_the_root",
    "eps_without_effect",
    "statistics_in_half",
)

# pre_norm and post_norm ---------------------------------------------------------------

PRE, POST = "x + sublayer(norm(x))", "norm(x + sublayer(x))"
NO_RESIDUAL = (
    "The stream is not added to what the sublayer makes of it: there is no residual "
    "connection, so a deep stack loses its input and its gradient."
)

for step, right, branch in (
    (pre_norm, PRE, "sublayer(norm(x))"),
    (post_norm, POST, "sublayer(x)"),
):
    step.fault("no_residual", NO_RESIDUAL, ("x + ", ""))
    step.fault(
        "no_norm",
        "The norm has no effect: it is not called, or its result is bound to a name "
        "that is never used.",
        (right, "x + sublayer(x)"),
    )
    step.fault(
        "sublayer_dropped",
        "The sublayer has no effect: is its result bound to a name that is never "
        "used? (With an output matrix that starts at zero this would look right.)",
        (branch, f"0 * {branch}.detach()"),
    )
    step.fault(
        "double_residual",
        "The stream is added twice. Does something else add it already?",
        ("x + ", "x + x + "),
    )
    step.fault(
        "detached_branch",
        "The sublayer's result is cut from the graph, so the sublayer never learns.",
        (branch, f"{branch}.detach()"),
    )
    step.fault(
        "detached_input",
        "What the sublayer gets is cut from the graph. The sublayer learns, but no "
        "gradient goes back through it to the layers before.",
        (branch, f"{branch[:-1]}.detach())"),
    )
    step.fault(
        "detached_stream",
        "The stream is cut from the graph where it passes the sublayer. The "
        "gradient's short way back is what a residual connection is for.",
        ("x + ", "x.detach() + "),
    )

pre_norm.fault(
    "post_norm",
    "The norm stands after the addition. That is post-norm, the next exercise: here "
    "the stream itself is never normalised.",
    (PRE, POST),
)
pre_norm.fault(
    "normed_residual",
    "The normalised stream is added instead of the stream as it was. The norm then "
    "stands in the way of the gradient at every step.",
    (PRE, "norm(x) + sublayer(norm(x))"),
)
pre_norm.fault(
    "norm_after_the_sublayer",
    "The norm is applied to the sublayer's result. It belongs to what the sublayer "
    "gets.",
    (PRE, "x + norm(sublayer(x))"),
)

post_norm.fault(
    "pre_norm",
    "The norm stands before the sublayer. That is pre-norm, the exercise before: here "
    "the sum is normalised.",
    (POST, PRE),
)
post_norm.fault(
    "norm_on_the_branch",
    "The norm is applied to the sublayer's result, and the stream is added after it. "
    "Post-norm normalises the sum.",
    (POST, "x + norm(sublayer(x))"),
)
post_norm.fault(
    "norm_on_the_stream",
    "The stream is normalised and the sublayer's result is added after it. Post-norm "
    "normalises the sum.",
    (POST, "norm(x) + sublayer(x)"),
)

# The block ----------------------------------------------------------------------------

ATTENTION = "self.w_o(merge_heads(attention(q, k, v, mask)))"
FEED_FORWARD = "self.w_2(gate * self.w_3(x))"

pre_norm_block.fault(
    "mask_without_effect",
    "Each position sees all the later ones: attention takes the mask and does not use "
    "it, or the mask allows everything.",
    ("v, mask)", "v)"),
    edited="MultiHeadAttention",
)
pre_norm_block.fault(
    "mask_shows_one_too_many",
    "The mask lets each query see one key too many, the one behind its own.",
    ("diagonal=t_k - t_q", "diagonal=t_k - t_q + 1"),
    edited="causal_mask",
)
pre_norm_block.fault(
    "attention_adds_the_stream",
    "Attention adds its input to its result, and `pre_norm` adds the stream again: "
    "one of the two is meant to.",
    (f"return {ATTENTION}", f"return x + {ATTENTION}"),
    edited="MultiHeadAttention",
)
pre_norm_block.fault(
    "feed_forward_adds_the_stream",
    "The feed-forward network adds its input to its result, and `pre_norm` adds the "
    "stream again: one of the two is meant to.",
    (f"return {FEED_FORWARD}", f"return x + {FEED_FORWARD}"),
    edited="SwiGLU",
)
pre_norm_block.fault(
    "feed_forward_mixes_positions",
    "The feed-forward network mixes positions. Only attention may, for only attention "
    "has the mask.",
    (f"return {FEED_FORWARD}", f"return {FEED_FORWARD} + x.mean(1, keepdim=True)"),
    edited="SwiGLU",
)
pre_norm_block.fault(
    "norm_over_time",
    "The norm takes its statistics over the positions, so each output depends on "
    "later tokens, and the mask is worth nothing. Per position, over the features.",
    (
        "rms_norm(x, self.weight, self.eps)",
        "x / (x.square().mean(1, keepdim=True) + self.eps).sqrt() * self.weight",
    ),
    edited="RMSNorm",
)
pre_norm_block.inherits(
    pre_norm,
    "no_residual",
    "sublayer_dropped",
    "post_norm",
    "no_norm",
    "double_residual",
    "detached_branch",
)
