"""Lesson 06: LayerNorm, RMSNorm, and the two places where a norm can stand."""

import torch
import torch.nn.functional as F
from torch import nn

from utils.check.errors import Crashed, Unmet
from utils.check.exercise import Exercise, IntegrationCheck
from utils.probe import probe, strided

HALF = (torch.float16, torch.bfloat16)


def true_layer_norm(x, weight, bias, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def true_rms_norm(x, weight, eps=1e-6):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def agrees_to_float32(case, answer, oracle, x, *parameters, **kwargs):
    """float64 in, float64 out; the statistics may have been taken in float32."""
    actual = case.call(answer, x, *parameters, **kwargs)
    expected = oracle(x, *parameters, **kwargs)
    case.close(actual, expected, like=x, tolerance=1e-5 * expected.abs().max().item())


# layer_norm ----------------------------------------------------------------------

layer_norm = Exercise("layer_norm", lesson="norms")


@layer_norm.requires(
    "every vector along the last dimension gets mean 0 and variance 1, then weight and bias",
    "Take one vector and follow the loop of the lesson. Which dimension do its numbers "
    "lie along, and what is divided by what?",
)
def _(answer, case):
    case.agrees(
        answer, true_layer_norm, probe(3, 7), probe(7, seed=1), probe(7, seed=2)
    )
    x = probe(2, 3, 5, seed=3, scale=2, shift=1)
    case.agrees(answer, true_layer_norm, x, probe(5, seed=4), probe(5, seed=5))


@layer_norm.requires("a single vector, and four dimensions, work too")
def _(answer, case):
    weight, bias = probe(6, seed=6), probe(6, seed=7)
    case.agrees(answer, true_layer_norm, probe(6, seed=8), weight, bias)
    case.agrees(answer, true_layer_norm, probe(2, 3, 4, 6, seed=9), weight, bias)
    case.agrees(
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
def _(answer, case):
    x, weight, bias = probe(3, 7, seed=10), probe(7, seed=11), probe(7, seed=12)
    case.agrees(answer, true_layer_norm, x, weight, bias, eps=0.5)
    case.agrees(answer, true_layer_norm, x, weight, bias, 0.01)
    case.agrees(answer, true_layer_norm, probe(3, 7, seed=13, scale=2e-3), weight, bias)


@layer_norm.requires(
    "a vector of equal numbers gives the bias, and finite gradients",
    "The variance is 0 here. What keeps the root and its slope finite?",
)
def _(answer, case):
    x = probe(4, 6, seed=14)
    x[1], x[2] = 0.0, 2.0
    weight, bias = probe(6, seed=15), probe(6, seed=16)
    case.agrees(answer, true_layer_norm, x, weight, bias)
    case.gradients_agree(answer, true_layer_norm, x, weight, bias)


@layer_norm.requires(
    "large shifts and scales do not spoil it",
    "The mean of squares minus the square of the mean is the variance on paper. In "
    "float32 it is the small difference of two large numbers.",
)
def _(answer, case):
    weight, bias = probe(9, seed=17), probe(9, seed=18)
    for x in (
        probe(3, 9, seed=19, shift=2000),
        probe(3, 9, seed=20, scale=1e6),
        probe(3, 9, seed=21, shift=-300, scale=0.5),
    ):
        case.agrees(answer, true_layer_norm, x, weight, bias)


@layer_norm.requires(
    "float16 and bfloat16 come back as they came, with statistics no worse than float32's",
    "The square of 300 is more than float16 can hold, whatever it is divided by later.",
)
def _(answer, case):
    for dtype in HALF:
        weight = probe(40, seed=22, dtype=dtype)
        bias = probe(40, seed=23, dtype=dtype)
        x = probe(2, 3, 40, seed=24, dtype=dtype)
        case.agrees(answer, true_layer_norm, x, weight, bias)
        x = probe(2, 3, 40, seed=25, scale=900, dtype=dtype)
        case.agrees(answer, true_layer_norm, x, weight, bias)
    # With a large mean, what the rounding of x did is no excuse: x is given.
    for dtype, shift, scale in ((torch.float16, 1000, 4), (torch.bfloat16, 100, 0.5)):
        x = probe(3, 40, seed=26, shift=shift, scale=scale, dtype=dtype)
        weight, bias = weight.to(dtype), bias.to(dtype)
        expected = true_layer_norm(x.double(), weight.double(), bias.double())
        case.close(case.call(answer, x, weight, bias), expected, like=x)


@layer_norm.requires("float64 comes back as float64, and memory may lie apart")
def _(answer, case):
    x, weight, bias = (
        each.double() for each in (probe(2, 3, 5), probe(5, seed=27), probe(5, seed=28))
    )
    agrees_to_float32(case, answer, true_layer_norm, x, weight, bias)
    x = strided(probe(2, 3, 5, seed=29)).transpose(0, 1)
    case.agrees(
        answer, true_layer_norm, x, strided(probe(5, seed=30)), probe(5, seed=31)
    )


@layer_norm.requires(
    "gradients flow to x, weight and bias, through mean and variance too",
    "Mean and variance depend on x, so they belong to the graph.",
)
def _(answer, case):
    x = probe(2, 3, 5, seed=32, shift=1)
    weight, bias = probe(5, seed=33), probe(5, seed=34)
    case.gradients_agree(answer, true_layer_norm, x, weight, bias)


@layer_norm.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, probe(3, 5), probe(5, seed=1), probe(5, seed=2))


# rms_norm ------------------------------------------------------------------------

rms_norm = Exercise("rms_norm", lesson="norms")


@rms_norm.requires(
    "every vector along the last dimension is divided by the root of its mean square, "
    "then multiplied by the weight",
    "Four steps, from the inside out: square, mean, root, divide. Which dimension does "
    "the mean run along?",
)
def _(answer, case):
    case.agrees(answer, true_rms_norm, probe(3, 7), probe(7, seed=1))
    case.agrees(
        answer, true_rms_norm, probe(2, 3, 5, seed=2, scale=2), probe(5, seed=3)
    )


@rms_norm.requires(
    "the mean is not subtracted, neither before nor inside the root",
    "Shift a vector by 3. The root of the mean square grows, the standard deviation "
    "does not.",
)
def _(answer, case):
    case.agrees(
        answer, true_rms_norm, probe(2, 3, 5, seed=4, shift=3), probe(5, seed=5)
    )
    case.agrees(answer, true_rms_norm, probe(4, 6, seed=6, shift=-50), probe(6, seed=7))


@rms_norm.requires("a single vector, and four dimensions, work too")
def _(answer, case):
    weight = probe(6, seed=8)
    case.agrees(answer, true_rms_norm, probe(6, seed=9), weight)
    case.agrees(answer, true_rms_norm, probe(2, 3, 4, 6, seed=10), weight)
    case.agrees(answer, true_rms_norm, x=probe(4, 6, seed=11), weight=weight, eps=1e-6)


@rms_norm.requires(
    "eps is added to the mean square, inside the root, and is 1e-6 unless given",
    "Try a vector whose mean square is as small as eps: there the place of eps decides.",
)
def _(answer, case):
    x, weight = probe(3, 7, seed=12), probe(7, seed=13)
    case.agrees(answer, true_rms_norm, x, weight, eps=0.5)
    case.agrees(answer, true_rms_norm, x, weight, 0.01)
    case.agrees(answer, true_rms_norm, probe(3, 7, seed=14, scale=7e-4), weight)


@rms_norm.requires(
    "a vector of zeros gives zeros, and finite gradients",
    "The mean square is 0 here. What keeps the root and its slope finite?",
)
def _(answer, case):
    x, weight = probe(4, 6, seed=15), probe(6, seed=16)
    x[1] = 0.0
    case.agrees(answer, true_rms_norm, x, weight)
    case.gradients_agree(answer, true_rms_norm, x, weight)


@rms_norm.requires(
    "float16 and bfloat16 come back as they came, with statistics no worse than float32's",
    "The square of 300 is more than float16 can hold, and the square of 0.0001 less.",
)
def _(answer, case):
    for dtype in HALF:
        weight = probe(40, seed=17, dtype=dtype)
        x = probe(2, 3, 40, seed=18, dtype=dtype)
        case.agrees(answer, true_rms_norm, x, weight)
        x = probe(2, 3, 40, seed=19, scale=900, dtype=dtype)
        case.agrees(answer, true_rms_norm, x, weight)
        x = probe(3, 40, seed=20, scale=2e-4, dtype=dtype)
        case.agrees(answer, true_rms_norm, x, weight, eps=1e-9)


@rms_norm.requires("large values, float64, and memory that lies apart, work too")
def _(answer, case):
    case.agrees(
        answer, true_rms_norm, probe(3, 5, seed=21, scale=1e6), probe(5, seed=22)
    )
    x, weight = probe(2, 3, 5).double(), probe(5, seed=23).double()
    agrees_to_float32(case, answer, true_rms_norm, x, weight)
    x = strided(probe(2, 3, 5, seed=24)).transpose(0, 1)
    case.agrees(answer, true_rms_norm, x, strided(probe(5, seed=25)))


@rms_norm.requires(
    "gradients flow to x and weight, through the mean square too",
    "The mean square depends on x, so it belongs to the graph.",
)
def _(answer, case):
    case.gradients_agree(
        answer, true_rms_norm, probe(2, 3, 5, seed=26), probe(5, seed=27)
    )


@rms_norm.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, probe(3, 5), probe(5, seed=1))


# RMSNorm -------------------------------------------------------------------------

RMSNorm = Exercise("RMSNorm", lesson="norms")


def oracle_with(weight, eps=1e-6):
    return lambda x: true_rms_norm(x, weight.to(x.dtype), eps)


@RMSNorm.requires(
    "it has one parameter, `weight`, of d_model numbers",
    "What is assigned to `self` as an `nn.Parameter` is trained, saved and moved with "
    "the model. Nothing else is.",
)
def _(answer, case):
    norm = case.call(answer, 6)
    case.parameter_count(norm, 6)
    case.load(norm, weight=torch.ones(6))


@RMSNorm.requires(
    "it starts as the plain norm, with a weight of ones",
    "What does a factor have to be in order to change nothing?",
)
def _(answer, case):
    norm = case.call(answer, 6)
    case.agrees(norm, oracle_with(torch.ones(6)), probe(2, 3, 6, seed=1, shift=0.5))


@RMSNorm.requires(
    "it gives rms_norm with its own weight and the eps that it was made with",
    "Keep eps in `__init__`, and hand it on in `forward`.",
)
def _(answer, case):
    x, weight = probe(2, 3, 6, seed=2, scale=0.1, shift=0.05), probe(6, seed=3)
    case.agrees(case.load(answer(6, 0.5), weight=weight), oracle_with(weight, 0.5), x)
    case.agrees(
        case.load(answer(6, eps=0.01), weight=weight), oracle_with(weight, 0.01), x
    )
    case.agrees(case.load(answer(6), weight=weight), oracle_with(weight), x * 0.007)


@RMSNorm.requires("another width, and other numbers of dimensions, work too")
def _(answer, case):
    weight = probe(9, seed=4)
    norm = case.load(case.call(answer, d_model=9, eps=1e-6), weight=weight)
    case.agrees(norm, oracle_with(weight), probe(9, seed=5))
    case.agrees(norm, oracle_with(weight), probe(2, 3, 4, 9, seed=6))


@RMSNorm.requires(
    "a second call, `eval()` and other rows in the batch change nothing",
    "A norm keeps no statistics from call to call: this vector is all that it needs.",
)
def _(answer, case):
    weight = probe(5, seed=7)
    norm = case.load(case.call(answer, 5), weight=weight)
    for x in (probe(2, 3, 5, seed=8), probe(2, 3, 5, seed=9, shift=2), probe(1, 3, 5)):
        case.agrees(norm, oracle_with(weight), x)
    norm.eval()
    case.agrees(norm, oracle_with(weight), probe(2, 3, 5, seed=10, scale=3))


@RMSNorm.requires(
    "after `.half()` or `.bfloat16()` it returns that dtype and does not overflow, after "
    "`.double()` float64",
)
def _(answer, case):
    for dtype in HALF:
        weight = probe(40, seed=11, dtype=dtype)
        norm = case.load(case.call(answer, 40).to(dtype), weight=weight)
        x = probe(2, 3, 40, seed=12, scale=900, dtype=dtype)
        case.agrees(norm, oracle_with(weight), x)
    weight = probe(5, seed=13).double()
    norm = case.load(case.call(answer, 5).double(), weight=weight)
    agrees_to_float32(case, norm, oracle_with(weight), probe(2, 3, 5).double())


@RMSNorm.requires("gradients reach x and the weight")
def _(answer, case):
    weight, x = probe(5, seed=14), probe(2, 3, 5, seed=15)

    def through(x, weight, made):
        return torch.func.functional_call(made, {"weight": weight}, (x,))

    def oracle(x, weight, made):
        return true_rms_norm(x, weight)

    norm = case.call(answer, 5)
    case.true(
        all(each.requires_grad for each in norm.parameters()),
        "The weight asks for no gradient: training will leave it as it is.",
    )
    case.gradients_agree(through, oracle, x, weight, norm)


@RMSNorm.requires("two norms share nothing, and all of it moves with the model")
def _(answer, case):
    one, other = case.call(answer, 5), case.call(answer, 5)
    case.load(one, weight=probe(5, seed=16))
    case.agrees(other, oracle_with(torch.ones(5)), probe(2, 3, 5, seed=17))
    case.any_device(one.to("meta"), probe(2, 3, 5))


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
    def _(answer, case):
        case.agrees(answer, oracle, probe(2, 3, 5), sublayer(1, 5), any_norm)
        case.agrees(
            answer, oracle, probe(2, 4, 6, seed=2), sublayer(3, 6), real_norm(6, 4)
        )

    @exercise.requires(
        "two such steps are PyTorch's own encoder layer",
        f"`nn.TransformerEncoderLayer(…, norm_first={norm_first})`",
    )
    def _(answer, case):
        layer, steps = encoder_layer(norm_first)
        x = probe(2, 5, 8, seed=5).double()
        h = x
        for apply, norm in steps:
            h = case.call(answer, h.detach(), apply, norm)
        case.close(h, layer(x), like=x)

    @exercise.requires(
        "sublayer and norm are called once each",
        "A sublayer may be slow, or have dropout in it: call it once and keep the result.",
    )
    def _(answer, case):
        apply, norm = Counted(sublayer(6, 5)), Counted(any_norm)
        case.call(answer, probe(2, 3, 5, seed=7), apply, norm)
        for counted, name in ((apply, "sublayer"), (norm, "norm")):
            case.true(
                counted.calls == 1,
                f"`{name}` was called {counted.calls} times, expected once.",
            )

    @exercise.requires(
        "the stream comes back unchanged, even from a sublayer that returns its input",
        "`+=` writes into a tensor that somebody else may hold. `a + b` makes a new one.",
    )
    def _(answer, case):
        case.agrees(
            answer, oracle, probe(2, 3, 5, seed=8), nn.Identity(), nn.Identity()
        )
        case.agrees(answer, oracle, probe(2, 3, 5, seed=9), nn.Identity(), any_norm)
        case.agrees(
            answer, oracle, probe(2, 3, 5, seed=10), sublayer(11, 5), nn.Identity()
        )

    @exercise.requires("arguments by name, half precision and other shapes work too")
    def _(answer, case):
        x = probe(2, 3, 5, seed=12, dtype=torch.bfloat16)
        case.agrees(
            answer, oracle, x=x, sublayer=sublayer(13, 5), norm=real_norm(5, 14)
        )
        case.agrees(answer, oracle, probe(4, 6, seed=15), sublayer(16, 6), any_norm)

    @exercise.requires(
        "gradients flow through the branch and past it",
        "No `detach()`, and nothing written in place into what a sublayer returned.",
    )
    def _(answer, case):
        x = probe(2, 3, 5, seed=17)

        def with_weight(step):
            def through(x, sublayer_weight):
                return step(x, lambda h: torch.tanh(h @ sublayer_weight), any_norm)

            return through

        weight = probe(5, 5, seed=19)
        case.gradients_agree(with_weight(answer), with_weight(oracle), x, weight)
        case.gradients_agree(answer, oracle, x, sublayer(18, 5), any_norm)
        case.gradients_agree(answer, oracle, x, torch.sigmoid, torch.tanh)


pre_norm = Exercise("pre_norm", lesson="norms")
require_the_same_of(
    pre_norm,
    lambda x, sublayer, norm: x + sublayer(norm(x)),
    True,
    "the sublayer works on the normalised stream, and its result is added to the stream "
    "as it was",
)

post_norm = Exercise("post_norm", lesson="norms")
require_the_same_of(
    post_norm,
    lambda x, sublayer, norm: norm(x + sublayer(x)),
    False,
    "the sublayer works on the stream as it is, its result is added, and the sum is "
    "normalised",
)


# The block ------------------------------------------------------------------------

pre_norm_block = IntegrationCheck(
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


def fit(case, what, f, *args):
    """What `f(*args)` returns; if it raises, a sentence about the joint."""
    try:
        return case.call(f, *args)
    except Crashed as crash:
        raise Unmet(f"{what}: {type(crash.error).__name__}, “{crash.error}”") from crash


def require_width(case, result, x, what):
    if isinstance(result, (tuple, list)):
        raise Unmet(
            f"{what} gives {len(result)} values. A part that returns its weights beside "
            "its result does not fit where a stream goes in and a stream comes out."
        )
    case.is_tensor(result, what)
    case.true(
        result.shape == x.shape,
        f"The stream changes its shape: {tuple(x.shape)} goes in, and {what} gives "
        f"{tuple(result.shape)}. What adds to the stream has to come back to its width.",
    )


@pre_norm_block.requires(
    "norm, attention and feed-forward take each other's results, and the stream keeps "
    "its shape",
    "Print the shapes on both sides of each addition.",
)
def _(parts, case):
    made = assemble(parts)
    x = probe(2, 7, D_MODEL, seed=50)
    for half, what in (
        (attention_half, "norm, attention, addition"),
        (feed_forward_half, "norm, feed-forward, addition"),
    ):
        result = fit(
            case, f"{what}: they do not fit", lambda x: half(parts, made, x), x
        )  # noqa: B023
        require_width(case, result, x, what)


@pre_norm_block.requires(
    "a later token changes no earlier output: norm, attention and feed-forward leave "
    "the mask its meaning",
    "Attention is the only part that may look at other positions, and it looks through "
    "the mask. Which of your parts mixes positions besides?",
)
def _(parts, case):
    made = assemble(parts, seed=20)
    x = probe(2, 7, D_MODEL, seed=51)
    changed = x.clone()
    changed[:, 4:] = probe(2, 3, D_MODEL, seed=52, scale=5, shift=2)
    for half, what in (
        (attention_half, "attention with the norm before it"),
        (feed_forward_half, "the feed-forward network with the norm before it"),
    ):
        before = case.call(lambda x: half(parts, made, x), x)  # noqa: B023
        after = case.call(lambda x: half(parts, made, x), changed)  # noqa: B023
        moved = (before - after)[:, :4].abs().max().item()
        case.true(
            moved < 1e-5,
            "The block is no longer causal: tokens 4, 5 and 6 were changed, and the "
            f"stream at tokens 0 to 3 moved by {moved:.2g} in {what}.",
        )


@pre_norm_block.requires(
    "each half adds to the stream once: the stream as it was, plus attention or "
    "feed-forward of the normalised stream",
    "Pull the halves apart: is `pre_norm(x, …) − x` what the sublayer gives alone?",
)
def _(parts, case):
    made = assemble(parts, seed=40)
    x = probe(2, 7, D_MODEL, seed=53, scale=3, shift=1)
    first, second = true_halves(made, x)
    result = case.call(lambda x: attention_half(parts, made, x), x)
    case.close(result, first, "the stream after attention", like=x)
    result = case.call(lambda x: whole_block(parts, made, x), x)
    case.close(result, second, "the stream after the feed-forward network", like=x)


@pre_norm_block.requires(
    "one token, and rows of a batch that differ, work too",
    "Does a part confuse the batch with time?",
)
def _(parts, case):
    made = assemble(parts, seed=60)
    for x in (probe(3, 1, D_MODEL, seed=54), probe(1, 5, D_MODEL, seed=55)):
        _, expected = true_halves(made, x)
        result = case.call(lambda x: whole_block(parts, made, x), x)
        case.close(result, expected, "the stream after the block", like=x)


@pre_norm_block.requires(
    "in bfloat16 every part hands on bfloat16",
    "A norm that leaves its result in float32 stops the matrix product behind it.",
)
def _(parts, case):
    made = assemble(parts, seed=80, dtype=torch.bfloat16)
    x = probe(2, 5, D_MODEL, seed=56, dtype=torch.bfloat16)
    result = fit(
        case,
        "After `.bfloat16()` the parts no longer fit",
        lambda x: whole_block(parts, made, x),
        x,
    )
    case.true(
        result.dtype == x.dtype,
        f"The stream goes in as bfloat16 and comes out as {result.dtype}: one of the "
        "parts changes its dtype.",
    )


@pre_norm_block.requires(
    "the gradient reaches the input and every weight",
    "Follow the gradient back from the addition: one way past the sublayer, one through it.",
)
def _(parts, case):
    made = assemble(parts, seed=90)
    x = probe(2, 5, D_MODEL, seed=57).requires_grad_()
    result = case.call(lambda x: whole_block(parts, made, x), x)
    weights = dict(made.named_parameters())
    given = torch.autograd.grad(
        (result * probe(*result.shape, seed=58)).sum(),
        [*weights.values()],
        allow_unused=True,
    )
    for name, gradient in zip(weights, given, strict=True):
        case.true(
            gradient is not None and bool(gradient.abs().max() > 0),
            f"No gradient reaches `{name}` of the block.",
        )
