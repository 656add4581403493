"""Lesson 06: LayerNorm, RMSNorm, and the two places where a norm can stand."""

from unittest.mock import Mock

import torch
import torch.nn.functional as F
from torch import nn

from utils.check.errors import Unmet
from utils.check.exercise import Exercise, IntegrationCheck
from utils.probe import probe, strided

layer_norm = Exercise("layer_norm", lesson="norms")
rms_norm = Exercise("rms_norm", lesson="norms")
RMSNorm = Exercise("RMSNorm", lesson="norms")
pre_norm = Exercise("pre_norm", lesson="norms")
post_norm = Exercise("post_norm", lesson="norms")
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

HALF = (torch.float16, torch.bfloat16)


def torch_layer_norm(x, weight, bias, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def torch_rms_norm(x, weight, eps=1e-6):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def agrees_to_float32(case, answer, oracle, x, *parameters):
    """float64 in, float64 out; the statistics may have been taken in float32."""
    actual = case.call(answer, x, *parameters)
    expected = oracle(x, *parameters)
    case.close(actual, expected, like=x, tolerance=1e-5 * expected.abs().max().item())


# Both norms, by the same requirements --------------------------------------------------


def shared_requirements(exercise, oracle, n_parameters, eps, formula, statistic, hint):
    """Weight alone or weight and bias: only the oracle and a few words differ."""

    def parameters(width, seed, dtype=torch.float32):
        return [
            probe(width, seed=seed + i, dtype=dtype) for i in range(1, n_parameters + 1)
        ]

    @exercise.requires(f"every vector along the last dimension {formula}", hint)
    def _(answer, case):
        ones_and_zeros = (torch.ones(7), torch.zeros(7))[:n_parameters]
        case.agrees(answer, oracle, probe(3, 7, scale=3), *ones_and_zeros)
        case.agrees(answer, oracle, probe(3, 7, scale=3), *parameters(7, 0))
        x = probe(2, 4, 7, seed=3, scale=3, shift=3)
        case.agrees(answer, oracle, x, *parameters(7, 3))
        x = probe(4, 6, seed=4, scale=3, shift=-50)
        case.agrees(answer, oracle, x, *parameters(6, 5))

    @exercise.requires("a single vector, four dimensions and names work too")
    def _(answer, case):
        case.agrees(answer, oracle, probe(6, seed=8, scale=3), *parameters(6, 6))
        x = probe(2, 3, 4, 7, seed=9, scale=3)
        case.agrees(answer, oracle, x, *parameters(7, 6))
        named = dict(zip(("weight", "bias"), parameters(7, 6), strict=False))
        case.agrees(answer, oracle, x=probe(4, 7, seed=8, scale=3), **named, eps=eps)

    constant = probe(4, 6, seed=14, scale=3)
    constant[1] = 0.0
    constant[2] = 2.0

    @exercise.requires(
        f"a vector whose {statistic} is 0 gives no NaN",
        "What keeps the root from being 0 when you divide by it?",
    )
    def _(answer, case):
        case.agrees(answer, oracle, constant, *parameters(6, 14))

    @exercise.requires(
        f"eps is added to the {statistic}, inside the root, and is {eps} unless given",
        f"Try a vector whose {statistic} is as small as eps: there the place of eps "
        "decides.",
    )
    def _(answer, case):
        given = probe(3, 7, seed=10), *parameters(7, 10)
        case.agrees(answer, oracle, *given, eps=2.0)
        case.agrees(answer, oracle, *given, 0.01)
        small = probe(3, 7, seed=13, scale=0.7 * eps**0.5)
        case.agrees(answer, oracle, small, *parameters(7, 13))

    @exercise.requires(
        "gradients flow through the statistics too, and are finite where eps alone is "
        "left under the root",
        "The statistics depend on x, so they belong to the graph. And what is the "
        "slope of the root at 0?",
    )
    def _(answer, case):
        x = probe(2, 4, 7, seed=32, shift=1)
        case.gradients_agree(answer, oracle, x, *parameters(7, 32))
        case.gradients_agree(answer, oracle, constant, *parameters(6, 15))

    @exercise.requires(
        "large shifts and scales, float64, and memory that is not contiguous, work too",
        "Which of your steps is the small difference of two large numbers? float32 "
        "keeps seven digits.",
    )
    def _(answer, case):
        for shift, scale in ((2000, 1), (0, 1e6), (-300, 0.5)):
            x = probe(3, 9, seed=19, shift=shift, scale=scale)
            case.agrees(answer, oracle, x, *parameters(9, 17))
        doubles = [p.double() for p in parameters(7, 27)]
        agrees_to_float32(case, answer, oracle, probe(2, 4, 7).double(), *doubles)
        x = strided(probe(2, 4, 7, seed=29)).transpose(0, 1)
        case.agrees(answer, oracle, x, *map(strided, parameters(7, 29)))

    @exercise.requires(
        "float16 and bfloat16 come back as they came, with statistics no worse than "
        "float32's, and nothing is created on another device",
        "The square of 300 is more than float16 can hold, whatever it is divided by "
        "later, and the square of 0.0001 less.",
    )
    def _(answer, case):
        for dtype in HALF:
            given = parameters(40, 22, dtype)
            for scale in (1, 900):
                x = probe(2, 3, 40, seed=24, scale=scale, dtype=dtype)
                case.agrees(answer, oracle, x, *given)
            x = probe(3, 40, seed=20, scale=2e-4, dtype=dtype)
            case.agrees(answer, oracle, x, *given, eps=1e-9)
        # With a large mean, what the rounding of x did is no excuse: x is given.
        for dtype, shift, scale in (
            (torch.float16, 1000, 4),
            (torch.bfloat16, 100, 0.5),
        ):
            x = probe(3, 40, seed=26, shift=shift, scale=scale, dtype=dtype)
            given = parameters(40, 26, dtype)
            expected = oracle(x.double(), *[p.double() for p in given])
            case.close(case.call(answer, x, *given), expected, like=x)
        case.any_device(answer, probe(3, 5), *parameters(5, 0))


shared_requirements(
    layer_norm,
    torch_layer_norm,
    n_parameters=2,
    eps=1e-5,
    formula="gets mean 0 and variance 1, then weight and bias",
    statistic="variance",
    hint="Take one vector and follow the loop of the lesson. Which dimension do its "
    "numbers lie along, and what is divided by what?",
)
shared_requirements(
    rms_norm,
    torch_rms_norm,
    n_parameters=1,
    eps=1e-6,
    formula="is divided by the root of its mean square, then multiplied by the weight",
    statistic="mean square",
    hint="Four steps, from the inside out: square, mean, root, divide. Which dimension "
    "does the mean run along? Shift a vector by 3: the root of the mean square grows, "
    "the standard deviation does not.",
)


# RMSNorm ------------------------------------------------------------------------------


def oracle_with(weight, eps=1e-6):
    return lambda x: torch_rms_norm(x, weight.to(x.dtype), eps)


@RMSNorm.requires(
    "it has one parameter, `weight`, of d_model numbers",
    "What is assigned to `self` as an `nn.Parameter` is trained, saved and moved with "
    "the model. Nothing else is.",
)
def _(answer, case):
    norm = case.call(answer, 6)
    case.parameters(norm, weight=(6,))
    case.true(
        norm.weight.requires_grad,
        "The weight asks for no gradient: training will leave it as it is.",
    )


@RMSNorm.requires(
    "it starts as the plain norm, with a weight of ones",
    "What does a factor have to be in order to change nothing?",
)
def _(answer, case):
    norm = case.call(answer, 6)
    x = probe(2, 4, 6, seed=1, scale=3, shift=0.5)
    case.agrees(norm, oracle_with(torch.ones(6)), x)


@RMSNorm.requires(
    "it gives rms_norm with its own weight and the eps that it was made with",
    "Keep eps in `__init__`, and hand it on in `forward`.",
)
def _(answer, case):
    x, weight = probe(2, 4, 7, seed=2, scale=0.1, shift=0.05), probe(7, seed=3)
    for args, eps in (((7, 0.5), 0.5), ((7, 0.01), 0.01), ((7,), 1e-6)):
        norm = case.load(case.call(answer, *args), weight=weight)
        case.agrees(norm, oracle_with(weight, eps), x * (0.007 if eps < 1e-5 else 1))


@RMSNorm.requires("a vector, four dimensions, eval() and names work too")
def _(answer, case):
    weight = probe(9, seed=4)
    norm = case.load(case.call(answer, d_model=9, eps=1e-6), weight=weight)
    case.agrees(norm, oracle_with(weight), probe(9, seed=5))
    case.agrees(norm, oracle_with(weight), probe(2, 3, 4, 9, seed=6))
    norm.eval()
    for x in (probe(2, 3, 9, seed=8), probe(2, 3, 9, seed=9, shift=2), probe(1, 3, 9)):
        case.agrees(norm, oracle_with(weight), x)


@RMSNorm.requires("half precision comes back as it came and does not overflow")
def _(answer, case):
    for dtype in HALF:
        weight = probe(40, seed=11, dtype=dtype)
        norm = case.load(case.call(answer, 40).to(dtype), weight=weight)
        x = probe(2, 3, 40, seed=12, scale=900, dtype=dtype)
        case.agrees(norm, oracle_with(weight), x)


@RMSNorm.requires("gradients reach x and the weight")
def _(answer, case):
    weight, x = probe(7, seed=14), probe(2, 4, 7, seed=15)

    def through(x, weight, norm):
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    def oracle(x, weight, norm):
        return torch_rms_norm(x, weight)

    case.gradients_agree(through, oracle, x, weight, case.call(answer, 7))


@RMSNorm.requires("two norms share nothing, and all of it moves with the model")
def _(answer, case):
    one, other = case.call(answer, 5), case.call(answer, 5)
    case.load(one, weight=probe(5, seed=16))
    case.agrees(other, oracle_with(torch.ones(5)), probe(2, 3, 5, seed=17))
    case.any_device(one.to("meta"), probe(2, 3, 5))


# pre_norm and post_norm ---------------------------------------------------------------


def some_sublayer(seed, width):
    """A sublayer that mixes features and positions and is linear in neither."""
    matrix = probe(width, width, seed=seed, scale=0.6)

    def sublayer(x):
        mixed = torch.tanh(x @ matrix.to(x.dtype))
        return mixed + 0.3 * mixed.flip(-2).square() + 0.2

    return sublayer


def some_norm(x):
    """Stands where a norm is expected, but sees every change of scale and shift."""
    return torch.sin(0.7 * x + 0.4)


def real_norm(width, seed):
    weight = probe(width, seed=seed, shift=1, scale=0.3)
    return lambda x: torch_rms_norm(x, weight.to(x.dtype))


def steps_of_the_stream(exercise, oracle, formula):
    """Both ways round the requirements are the same; only the oracle differs."""

    @exercise.requires(
        formula,
        "Write the stream as a line from left to right, and mark where the sublayer "
        "branches off, where it joins again, and which of the three places the norm "
        "is at.",
    )
    def _(answer, case):
        case.agrees(answer, oracle, probe(2, 4, 7), some_sublayer(1, 7), some_norm)
        x = probe(2, 4, 6, seed=2)
        case.agrees(answer, oracle, x, some_sublayer(3, 6), real_norm(6, 4))

    @exercise.requires(
        "sublayer and norm are called once each",
        "A sublayer may be slow, or have dropout in it: call it once and keep the "
        "result.",
    )
    def _(answer, case):
        sublayer, norm = Mock(wraps=some_sublayer(6, 7)), Mock(wraps=some_norm)
        case.call(answer, probe(2, 4, 7, seed=7), sublayer, norm)
        for mock, name in ((sublayer, "sublayer"), (norm, "norm")):
            case.true(
                mock.call_count == 1,
                f"`{name}` was called {mock.call_count} times, expected once.",
            )

    @exercise.requires(
        "the stream comes back unchanged, even from a sublayer that returns its input",
        "`+=` writes into a tensor that somebody else may hold. `a + b` makes a new "
        "one.",
    )
    def _(answer, case):
        x = probe(2, 4, 7, seed=8)
        for norm in (nn.Identity(), some_norm):
            case.agrees(answer, oracle, x, nn.Identity(), norm)
        case.agrees(answer, oracle, x, some_sublayer(11, 7), nn.Identity())

    @exercise.requires("arguments by name, half precision and other shapes work too")
    def _(answer, case):
        x = probe(2, 4, 7, seed=12, dtype=torch.bfloat16)
        sublayer, norm = some_sublayer(13, 7), real_norm(7, 14)
        case.agrees(answer, oracle, x=x, sublayer=sublayer, norm=norm)
        case.agrees(answer, oracle, probe(4, 7, seed=15), sublayer, some_norm)

    @exercise.requires(
        "gradients flow through the branch and past it",
        "No `detach()`, and nothing written in place into what a sublayer returned.",
    )
    def _(answer, case):
        def with_weight(step):
            def through(x, sublayer_weight):
                return step(x, lambda h: torch.tanh(h @ sublayer_weight), some_norm)

            return through

        x, weight = probe(2, 4, 7, seed=17), probe(7, 7, seed=19)
        case.gradients_agree(with_weight(answer), with_weight(oracle), x, weight)
        case.gradients_agree(answer, oracle, x, some_sublayer(18, 7), some_norm)
        case.gradients_agree(answer, oracle, x, torch.sigmoid, torch.tanh)


steps_of_the_stream(
    pre_norm,
    lambda x, sublayer, norm: x + sublayer(norm(x)),
    "the sublayer works on the normalised stream, and its result is added to the "
    "stream as it was",
)
steps_of_the_stream(
    post_norm,
    lambda x, sublayer, norm: norm(x + sublayer(x)),
    "the sublayer works on the stream as it is, its result is added, and the sum is "
    "normalised",
)


# The block ----------------------------------------------------------------------------

D_MODEL, N_HEADS, N_KV_HEADS, D_HEAD, D_FF = 17, 8, 2, 5, 23


def modules_of(parts, seed=0, dtype=torch.float32):
    """The modules of a block, with weights from a formula."""
    modules = {
        "norm_1": parts["RMSNorm"](D_MODEL, 1e-6),
        "attention": parts["MultiHeadAttention"](D_MODEL, N_HEADS, N_KV_HEADS, D_HEAD),
        "norm_2": parts["RMSNorm"](D_MODEL, 1e-6),
        "feed_forward": parts["SwiGLU"](D_MODEL, D_FF),
    }
    modules = nn.ModuleDict(modules).to(dtype)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(sorted(modules.named_parameters())):
            is_norm = name.startswith("norm")
            shift, scale = (1, 0.3) if is_norm else (0, parameter.shape[-1] ** -0.5)
            value = probe(*parameter.shape, seed=seed + i, scale=scale, shift=shift)
            parameter.copy_(value)
    return modules


def halves_of(parts, modules):
    """The two halves of a block, as functions of the stream."""

    def attention_half(x):
        mask = parts["causal_mask"](x.shape[1])
        return parts["pre_norm"](
            x, lambda h: modules["attention"](h, mask=mask), modules["norm_1"]
        )

    def feed_forward_half(x):
        return parts["pre_norm"](x, modules["feed_forward"], modules["norm_2"])

    return attention_half, feed_forward_half


def block_of(parts, modules):
    attention_half, feed_forward_half = halves_of(parts, modules)

    def block(x):
        return feed_forward_half(attention_half(x))

    return block


def torch_halves(modules, x):
    """Both halves in float64 from the weights alone, with PyTorch's own functions."""
    w = {name: p.detach().double() for name, p in modules.named_parameters()}
    x = x.double()

    def heads(h, name):
        flat = h @ w[f"attention.{name}.weight"].T
        return flat.unflatten(-1, (-1, D_HEAD)).transpose(1, 2)  # B H T Dh

    h = torch_rms_norm(x, w["norm_1.weight"])
    q, k, v = (heads(h, name) for name in ("w_q", "w_k", "w_v"))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    first = x + out.transpose(1, 2).flatten(2) @ w["attention.w_o.weight"].T
    h = torch_rms_norm(first, w["norm_2.weight"])
    gate = F.silu(h @ w["feed_forward.w_1.weight"].T)
    second = gate * (h @ w["feed_forward.w_3.weight"].T)
    return first, first + second @ w["feed_forward.w_2.weight"].T


@pre_norm_block.requires(
    "norm, attention and feed-forward take each other's results, and the stream keeps "
    "its shape",
    "Print the shapes on both sides of each addition.",
)
def _(parts, case):
    x = probe(3, 7, D_MODEL, seed=50)
    for half in halves_of(parts, modules_of(parts)):
        result = case.call(half, x)
        if isinstance(result, (tuple, list)):
            raise Unmet(
                f"{half.__name__} gives {len(result)} values. A part that returns its "
                "weights beside its result does not fit where a stream goes in and a "
                "stream comes out."
            )
        case.is_tensor(result, half.__name__)
        case.true(
            result.shape == x.shape,
            f"{tuple(x.shape)} goes into {half.__name__}, and {tuple(result.shape)} "
            "comes out. What adds to the stream has to come back to its width.",
        )


@pre_norm_block.requires(
    "a later token changes no earlier output: norm, attention and feed-forward leave "
    "the mask its meaning",
    "Attention is the only part that may look at other positions, and it looks "
    "through the mask. Which of your parts mixes positions besides?",
)
def _(parts, case):
    x = probe(3, 7, D_MODEL, seed=51)
    changed = x.clone()
    changed[:, 4:] = probe(3, 3, D_MODEL, seed=52, scale=5, shift=2)
    for half in halves_of(parts, modules_of(parts, seed=20)):
        moved = (case.call(half, x) - case.call(half, changed))[:, :4].abs().max()
        case.true(
            moved < 1e-5,
            "The block is not causal: tokens 4, 5 and 6 were changed, and the stream "
            f"at tokens 0 to 3 moved by {moved:.2g} in {half.__name__}.",
        )


@pre_norm_block.requires(
    "each half adds to the stream once: the stream as it was, plus attention or "
    "feed-forward of the normalised stream",
    "Pull the halves apart: is `pre_norm(x, …) − x` what the sublayer gives alone?",
)
def _(parts, case):
    modules = modules_of(parts, seed=40)
    x = probe(3, 7, D_MODEL, seed=53, scale=3, shift=1)
    first, second = torch_halves(modules, x)
    result = case.call(halves_of(parts, modules)[0], x)
    case.close(result, first, "the stream after attention", like=x)
    result = case.call(block_of(parts, modules), x)
    case.close(result, second, "the stream after the feed-forward network", like=x)


@pre_norm_block.requires(
    "one token, a batch of one, and bfloat16 work too",
    "Does a part confuse the batch with time? And a norm that leaves its result in "
    "float32 stops the matrix product behind it.",
)
def _(parts, case):
    for size, dtype in (
        ((3, 1), torch.float32),
        ((1, 5), torch.float32),
        ((3, 5), torch.bfloat16),
    ):
        modules = modules_of(parts, seed=60, dtype=dtype)
        x = probe(*size, D_MODEL, seed=54, dtype=dtype)
        result = case.call(block_of(parts, modules), x)
        expected = torch_halves(modules, x)[1]
        case.close(result, expected, "the stream after the block", like=x)


@pre_norm_block.requires(
    "the gradient reaches the input and every weight",
    "Follow the gradient back from the addition: one way past the sublayer, one "
    "through it.",
)
def _(parts, case):
    modules = modules_of(parts, seed=90)
    x = probe(2, 5, D_MODEL, seed=57).requires_grad_()
    result = case.call(block_of(parts, modules), x)
    weights = dict(modules.named_parameters())
    total = (result * probe(*result.shape, seed=58)).sum()
    gradients = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
    for name, gradient in zip(weights, gradients, strict=True):
        case.true(
            gradient is not None and bool(gradient.abs().max() > 0),
            f"No gradient reaches `{name}` of the block.",
        )
