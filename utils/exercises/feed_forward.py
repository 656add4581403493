"""Lesson 05: the feed-forward network."""

import copy
import math
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from utils.check.exercise import Exercise, IntegrationCheck
from utils.probe import probe, strided

# Activations -----------------------------------------------------------------------


def keeps_float64(answer, case, oracle):
    """float64 in, float64 out, and its digits too: what loses them is told apart."""
    x = probe(7, seed=2, dtype=torch.float64)
    actual = case.call(answer, x)
    expected = oracle(x)
    if (
        isinstance(actual, torch.Tensor)
        and actual.dtype == x.dtype
        and actual.shape == x.shape
    ):
        error = (actual - expected).abs().max().item()
        case.true(
            not 1e-11 < error < 1e-6,
            "float64 came in, and the result has the digits of float32 "
            f"(largest difference {error:.0e}). Something on the way is float32: cast "
            "up from half precision alone, or compute in the dtype of x.",
        )
        case.true(
            not 1e-6 <= error < 1e-4,
            f"The result is right to a few digits only (largest difference {error:.0e} "
            "in float64): a constant in it has too few. `math` has it to all digits.",
        )
    case.close(actual, expected, like=x)


silu = Exercise("silu", lesson="feed_forward")


@silu.requires("every number is multiplied by its own sigmoid")
def _(answer, case):
    case.agrees(answer, F.silu, probe(3, 5, scale=2))
    case.agrees(answer, F.silu, probe(2, 3, 4, seed=1, scale=4))


@silu.requires("float64 comes back as float64, with its digits")
def _(answer, case):
    keeps_float64(answer, case, F.silu)


@silu.requires(
    "large numbers give no NaN and no infinity",
    "Which of your intermediate results leaves the range of float32, or is cut off so "
    "that it does not? A number that is cut off inside gives another value.",
)
def _(answer, case):
    x = torch.tensor([-1000.0, -200, -95, -89, -20, 0, 20, 89, 95, 200, 1000])
    case.agrees(answer, F.silu, x)


@silu.requires(
    "gradients flow back, and are right at ±100 too",
    "Autograd differentiates every step that you wrote. Where one step is infinite and "
    "the next has slope 0, their product is NaN, although the result looked right.",
)
def _(answer, case):
    case.gradients_agree(answer, F.silu, probe(3, 5, seed=3, scale=3))
    case.gradients_agree(answer, F.silu, torch.tensor([-100.0, -90, 90, 100]))


@silu.requires("float16, bfloat16 and memory that is not contiguous work too")
def _(answer, case):
    for dtype in (torch.float16, torch.bfloat16):
        case.agrees(answer, F.silu, probe(3, 6, seed=4, scale=3, dtype=dtype))
    case.agrees(answer, F.silu, strided(probe(3, 5, seed=5)))
    case.agrees(answer, F.silu, probe(4, 5, seed=6).T)


@silu.requires(
    "in float16 the tail below −11 is kept",
    "float16 ends at 65,504, which is less than the exponential of 12. Which step of "
    "yours leaves that range, or rounds to a whole number, although the result is small?",
)
def _(answer, case):
    case.agrees(answer, F.silu, probe(3, 6, seed=4, scale=3, dtype=torch.float16))
    case.agrees(answer, F.silu, torch.linspace(-15, -11.25, 16).half())


@silu.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, probe(3, 5))


gelu = Exercise("gelu", lesson="feed_forward")


@gelu.requires("every number is multiplied by the probability below it, exactly")
def _(answer, case):
    case.agrees(answer, F.gelu, probe(3, 5, scale=2))
    case.agrees(answer, F.gelu, probe(2, 3, 4, seed=1, scale=3))


@gelu.requires(
    "float64 comes back as float64, with its digits",
    "A root that is typed as 1.4142 has five digits; `math` knows sixteen.",
)
def _(answer, case):
    keeps_float64(answer, case, F.gelu)


@gelu.requires("large numbers give no NaN and no infinity")
def _(answer, case):
    x = torch.tensor([-1000.0, -200, -95, -20, 0, 20, 95, 200, 1000])
    case.agrees(answer, F.gelu, x)
    case.agrees(answer, F.gelu, torch.tensor([-1000.0, -60, 0, 60, 1000]).half())


@gelu.requires("gradients flow back, and are right at ±100 too")
def _(answer, case):
    case.gradients_agree(answer, F.gelu, probe(3, 5, seed=3, scale=2))
    case.gradients_agree(answer, F.gelu, torch.tensor([-100.0, -90, 90, 100]))


@gelu.requires("float16, bfloat16 and memory that is not contiguous work too")
def _(answer, case):
    for dtype in (torch.float16, torch.bfloat16):
        case.agrees(answer, F.gelu, probe(3, 6, seed=4, scale=2, dtype=dtype))
    case.agrees(answer, F.gelu, strided(probe(3, 5, seed=5)))
    case.agrees(answer, F.gelu, probe(4, 5, seed=6).T)


@gelu.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, probe(3, 5))


# The two networks ------------------------------------------------------------------


def built(make, case, *sizes, **named):
    """A module, with its parameters' names and shapes in the trace."""
    module = case.call(make, *sizes, **named)
    case.note({n: tuple(p.shape) for n, p in module.named_parameters()})
    return module


def filled(case, module, d_model, d_ff, *names, seed=0):
    """Load weights from a formula; `w_2` goes down, the others up."""
    for i, name in enumerate(names):
        sizes = (d_model, d_ff) if name == "w_2" else (d_ff, d_model)
        value = probe(*sizes, seed=20 + seed + i, scale=sizes[1] ** -0.5)
        case.load(module, **{name: value})
    return module


def paths(module, *names):
    """Under which names the module keeps the weights `names`."""
    parameters = dict(module.named_parameters())
    return [f"{n}.weight" if f"{n}.weight" in parameters else n for n in names]


def weights(module, *names):
    parameters = dict(module.named_parameters())
    return [parameters[path].detach().double() for path in paths(module, *names)]


def with_weights(module, *names):
    """The module as a function of `x` and of the weights `names`."""

    def network(x, *values):
        given = dict(zip(paths(module, *names), values, strict=True))
        return functional_call(module, given, (x,))

    return network


def varied(case, module, *names):
    """A fresh module's units differ, so that training can tell them apart."""
    for name, value in zip(names, weights(module, *names), strict=True):
        case.true(
            value.std() > 0,
            f"All numbers of `{name}` are equal in a fresh module, so all its units do "
            "the same and keep doing so in training.",
        )


FeedForward = Exercise("FeedForward", lesson="feed_forward")
TWO = ("w_1", "w_2")


def feed_forward_values(activation, module=None):
    def oracle(x, w_1=None, w_2=None):
        if module is not None:
            w_1, w_2 = weights(module, *TWO)
        return activation(x @ w_1.T) @ w_2.T

    return oracle


def tent(h):
    """An activation that is not 0 at 0, so that every order of steps differs."""
    return (h - 0.5).abs()


@FeedForward.requires(
    "it holds two matrices and no bias: `w_1` from d_model to d_ff, `w_2` back"
)
def _(answer, case):
    module = built(answer, case, 5, 7, torch.relu)
    case.parameter_count(module, 2 * 5 * 7)
    filled(case, module, 5, 7, *TWO)
    built(answer, case, d_model=4, d_ff=11, activation=torch.relu)


@FeedForward.requires(
    "the result is activation(x @ W_1) @ W_2, for whatever activation",
    "Three steps, in the order in which the formula is read from inside.",
)
def _(answer, case):
    x = probe(2, 3, 5, seed=1)
    for activation in (torch.relu, tent, torch.tanh):
        module = filled(case, built(answer, case, 5, 7, activation), 5, 7, *TWO)
        case.agrees(module, feed_forward_values(activation, module), x)


@FeedForward.requires(
    "each position is treated alone, however many dimensions stand before the last",
)
def _(answer, case):
    module = filled(case, built(answer, case, 5, 7, tent), 5, 7, *TWO)
    oracle = feed_forward_values(tent, module)
    for sizes in ((5,), (3, 5), (1, 1, 5), (2, 3, 4, 5)):
        case.agrees(module, oracle, probe(*sizes, seed=2))
    case.agrees(module, oracle, strided(probe(2, 3, 5, seed=3)))
    case.agrees(module, oracle, probe(3, 2, 5, seed=4).transpose(0, 1))


@FeedForward.requires(
    "two networks side by side keep their own weights and their own activation",
    "What belongs to one network is created in `__init__` and kept on `self`.",
)
def _(answer, case):
    first = filled(case, built(answer, case, 5, 7, torch.tanh), 5, 7, *TWO)
    second = filled(case, built(answer, case, 5, 7, nn.ReLU()), 5, 7, *TWO, seed=5)
    w_1, w_2 = (
        probe(7, 5, seed=20, scale=5**-0.5),
        probe(5, 7, seed=21, scale=7**-0.5),
    )
    x = probe(2, 3, 5, seed=6)
    expected = torch.tanh(x.double() @ w_1.double().T) @ w_2.double().T
    case.close(case.call(first, x), expected, "the first network's result", like=x)
    case.agrees(second, feed_forward_values(torch.relu, second), x)


@FeedForward.requires("it works a second time, in `eval()`, and in other dtypes")
def _(answer, case):
    module = filled(case, built(answer, case, 5, 7, tent), 5, 7, *TWO)
    oracle = feed_forward_values(tent, module)
    case.agrees(module, oracle, probe(2, 3, 5, seed=7))
    case.agrees(module, oracle, probe(3, 4, 5, seed=8))
    module.eval()
    case.agrees(module, oracle, probe(2, 3, 5, seed=7))
    module = copy.deepcopy(module)
    oracle = feed_forward_values(tent, module)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        module.to(dtype)
        case.agrees(module, oracle, probe(2, 3, 5, seed=7, dtype=dtype))


@FeedForward.requires("gradients reach the input and both matrices")
def _(answer, case):
    module = built(answer, case, 5, 7, torch.tanh)
    varied(case, module, "w_1")
    case.gradients_agree(
        with_weights(filled(case, module, 5, 7, *TWO), *TWO),
        feed_forward_values(torch.tanh),
        probe(2, 3, 5, seed=9),
        probe(7, 5, seed=10),
        probe(5, 7, seed=11),
    )


@FeedForward.requires("it creates nothing on another device")
def _(answer, case):
    module = built(answer, case, 5, 7, torch.relu)
    case.any_device(module, probe(2, 3, 5))


SwiGLU = Exercise("SwiGLU", lesson="feed_forward")
THREE = ("w_1", "w_3", "w_2")


def swiglu_values(module=None):
    def oracle(x, w_1=None, w_3=None, w_2=None):
        if module is not None:
            w_1, w_3, w_2 = weights(module, *THREE)
        return (F.silu(x @ w_1.T) * (x @ w_3.T)) @ w_2.T

    return oracle


@SwiGLU.requires(
    "it holds three matrices and no bias: `w_1` and `w_3` from d_model to d_ff, `w_2` back"
)
def _(answer, case):
    module = built(answer, case, 5, 7)
    case.parameter_count(module, 3 * 5 * 7)
    filled(case, module, 5, 7, *THREE)
    built(answer, case, d_model=4, d_ff=11)


@SwiGLU.requires(
    "the result is (silu(x @ W_1) * (x @ W_3)) @ W_2",
    "Compute one hidden unit by hand with gate −2 and up 3: silu(−2)·3 is −0.72.",
)
def _(answer, case):
    module = filled(case, built(answer, case, 5, 7), 5, 7, *THREE)
    case.agrees(module, swiglu_values(module), probe(2, 3, 5, seed=1, scale=2))


@SwiGLU.requires(
    "each position is treated alone, however many dimensions stand before the last",
)
def _(answer, case):
    module = filled(case, built(answer, case, 5, 7), 5, 7, *THREE)
    oracle = swiglu_values(module)
    for sizes in ((5,), (3, 5), (1, 1, 5), (2, 3, 4, 5)):
        case.agrees(module, oracle, probe(*sizes, seed=2))
    case.agrees(module, oracle, strided(probe(2, 3, 5, seed=3)))
    case.agrees(module, oracle, probe(3, 2, 5, seed=4).transpose(0, 1))


@SwiGLU.requires("two networks side by side keep their own weights")
def _(answer, case):
    first = filled(case, built(answer, case, 5, 7), 5, 7, *THREE)
    second = filled(case, built(answer, case, 5, 7), 5, 7, *THREE, seed=5)
    w_1, w_3 = (probe(7, 5, seed=20 + i, scale=5**-0.5).double() for i in range(2))
    w_2 = probe(5, 7, seed=22, scale=7**-0.5).double()
    x = probe(2, 3, 5, seed=6)
    expected = swiglu_values()(x.double(), w_1, w_3, w_2)
    case.close(case.call(first, x), expected, "the first network's result", like=x)
    case.agrees(second, swiglu_values(second), x)


@SwiGLU.requires("it works a second time, in `eval()`, and in other dtypes")
def _(answer, case):
    module = filled(case, built(answer, case, 5, 7), 5, 7, *THREE)
    oracle = swiglu_values(module)
    case.agrees(module, oracle, probe(2, 3, 5, seed=7))
    case.agrees(module, oracle, probe(3, 4, 5, seed=8))
    module.eval()
    case.agrees(module, oracle, probe(2, 3, 5, seed=7))
    module = copy.deepcopy(module)
    oracle = swiglu_values(module)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        module.to(dtype)
        case.agrees(module, oracle, probe(2, 3, 5, seed=7, dtype=dtype))


@SwiGLU.requires(
    "gradients reach the input and all three matrices, for large inputs too"
)
def _(answer, case):
    module = built(answer, case, 5, 7)
    varied(case, module, "w_1", "w_3")
    network = with_weights(filled(case, module, 5, 7, *THREE), *THREE)
    matrices = [probe(7, 5, seed=10), probe(7, 5, seed=11), probe(5, 7, seed=12)]
    case.gradients_agree(network, swiglu_values(), probe(2, 3, 5, seed=9), *matrices)
    large = probe(2, 3, 5, seed=13, scale=100)
    case.gradients_agree(network, swiglu_values(), large, *matrices)


@SwiGLU.requires("it creates nothing on another device")
def _(answer, case):
    module = built(answer, case, 5, 7)
    case.any_device(module, probe(2, 3, 5))


# Counting --------------------------------------------------------------------------

swiglu_width = Exercise("swiglu_width", lesson="feed_forward")


def exact_width(d_model, multiple_of=32):
    return math.ceil(Fraction(8 * d_model, 3 * multiple_of)) * multiple_of


def same_width(answer, case, *args, **kwargs):
    actual = case.call(answer, *args, **kwargs)
    case.equal(actual, exact_width(*args, **kwargs), "the width")
    case.true(
        isinstance(actual, int),
        f"The width is of type {type(actual).__name__}, expected an int: `nn.Linear` "
        "takes no other.",
    )


@swiglu_width.requires("the width is 8/3·d_model, rounded up to a multiple of 32")
def _(answer, case):
    for d_model in (64, 100, 512, 5):
        same_width(answer, case, d_model)


@swiglu_width.requires(
    "a width that is a multiple already stays as it is",
    "Try it by hand with d_model 12: 8/3 of it is exactly 32.",
)
def _(answer, case):
    for d_model in (12, 24, 768, 12_288):
        same_width(answer, case, d_model)


@swiglu_width.requires("it works for any other multiple, by position and by name")
def _(answer, case):
    same_width(answer, case, 4096, 256)
    same_width(answer, case, 64, 100)
    same_width(answer, case, 96, 64)
    same_width(answer, case, d_model=24, multiple_of=8)
    same_width(answer, case, 12, multiple_of=1)


@swiglu_width.requires(
    "no width falls below 8/3·d_model, nor a whole multiple above, for any size",
    "Where is a fraction cut off before the rounding, or a constant not exact?",
)
def _(answer, case):
    for d_model in (1, 2, 5, 7, 385, 4097, 12_289, 36_865, 3 * 2**20 + 1):
        for multiple_of in (1, 2, 3, 32, 96):
            same_width(answer, case, d_model, multiple_of)


block_parameters = Exercise("block_parameters", lesson="feed_forward")


def counted(d_model, n_heads, n_kv_heads, d_ff, gated):
    """The same counts, from real modules."""

    def numbers(*pairs):
        with torch.device("meta"):
            maps = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in pairs)
        return sum(p.numel() for p in maps.parameters())

    d_head = d_model // n_heads
    down = (n_heads * d_head, d_model)
    queries, keys = down[::-1], (d_model, n_kv_heads * d_head)
    up = [(d_model, d_ff)] * (2 if gated else 1)
    return {
        "attention": numbers(queries, keys, keys, down),
        "feed_forward": numbers(*up, (d_ff, d_model)),
    }


def same_counts(answer, case, *args, **kwargs):
    actual = case.call(answer, *args, **kwargs)
    expected = counted(*args, **kwargs)
    case.true(
        isinstance(actual, dict),
        f"The result is of type {type(actual).__name__}, expected a dict.",
    )
    case.true(
        set(actual) == set(expected),
        f"The keys are {', '.join(map(repr, actual))}; expected are 'attention' and "
        "'feed_forward', and no others.",
    )
    for key, number in expected.items():
        case.equal(actual[key], number, f"the count of {key!r}")
        case.true(
            isinstance(actual[key], int),
            f"The count of {key!r} is of type {type(actual[key]).__name__}, expected an "
            "int.",
        )


@block_parameters.requires(
    "the classic block: as many key and value heads as heads, no gate"
)
def _(answer, case):
    same_counts(answer, case, 12, 3, 3, 50, False)
    same_counts(answer, case, 768, 12, 12, 3072, False)


@block_parameters.requires(
    "fewer key and value heads make the key and value matrices narrower",
    "Which of the four matrices depend on n_kv_heads? Print the shapes in your own "
    "`MultiHeadAttention`.",
)
def _(answer, case):
    same_counts(answer, case, 24, 6, 2, 70, False)
    same_counts(answer, case, 24, 6, 1, 70, False)


@block_parameters.requires("a gated network has one more matrix")
def _(answer, case):
    same_counts(answer, case, 24, 6, 6, 70, True)
    same_counts(
        answer, case, d_model=576, n_heads=9, n_kv_heads=3, d_ff=1536, gated=True
    )
    same_counts(answer, case, 4096, 32, 8, 14_336, True)


@block_parameters.requires(
    "heads that do not divide d_model are a ValueError with both numbers"
)
def _(answer, case):
    case.raises(
        ValueError, answer, 30, 4, 4, 50, False,
        mentions=(30, 4), because="4 heads do not divide a d_model of 30",
    )  # fmt: skip


@block_parameters.requires(
    "key and value heads that do not divide the heads are a ValueError with both numbers"
)
def _(answer, case):
    case.raises(
        ValueError, answer, 72, 9, 6, 50, True,
        mentions=(9, 6), because="6 key and value heads cannot serve 9 heads evenly",
    )  # fmt: skip
    case.raises(
        ValueError, answer, 40, 5, 10, 60, True,
        mentions=(5, 10), because="10 key and value heads are more than 5 heads",
    )  # fmt: skip


# Where the parts meet --------------------------------------------------------------

two_layer_stack = IntegrationCheck(
    "two_layer_stack",
    lesson="feed_forward",
    parts={
        "MultiHeadAttention": "multi_head",
        "causal_mask": "attention",
        "gelu": "feed_forward",
        "FeedForward": "feed_forward",
        "SwiGLU": "feed_forward",
    },
)
FOUR = ("w_q", "w_k", "w_v", "w_o")
SUBLAYERS = (
    "the first attention",
    "the feed-forward network",
    "the second attention",
    "SwiGLU",
)


def sublayers(parts, case):
    """Two blocks of the learner's parts: attention, GELU, attention, SwiGLU."""
    made = [
        built(parts["MultiHeadAttention"], case, 12, 3),
        built(parts["FeedForward"], case, 12, 20, parts["gelu"]),
        built(parts["MultiHeadAttention"], case, 12, 6, 2),
        built(parts["SwiGLU"], case, 12, 15),
    ]
    kv_widths = {0: 12, 2: 4}
    for i, module in enumerate(made):
        if i in kv_widths:
            widths = (12, kv_widths[i], kv_widths[i], 12)
            for j, (name, rows) in enumerate(zip(FOUR, widths, strict=True)):
                value = probe(rows, 12, seed=60 + 4 * i + j, scale=0.4)
                case.load(module, **{name: value})
        else:
            names, d_ff = ((TWO, 20), (THREE, 15))[i // 2]
            filled(case, module, 12, d_ff, *names, seed=10 * i)
    return made


def true_sublayers(made):
    """The same four as functions in float64, from PyTorch's own pieces."""

    def attention(module, n_heads, n_kv_heads):
        w_q, w_k, w_v, w_o = weights(module, *FOUR)

        def run(x):
            q, k, v = (
                (x @ w.T).unflatten(-1, (h, 12 // n_heads)).transpose(1, 2)
                for w, h in ((w_q, n_heads), (w_k, n_kv_heads), (w_v, n_kv_heads))
            )
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            return out.transpose(1, 2).flatten(2) @ w_o.T

        return run

    return [
        attention(made[0], 3, 3),
        feed_forward_values(F.gelu, made[1]),
        attention(made[2], 6, 2),
        swiglu_values(made[3]),
    ]


def stream_after(n, made, mask=None):
    """The stream after the first `n` sublayers, each added to what it was given."""

    def run(x):
        for i, module in enumerate(made[:n]):
            out = module(x, mask) if mask is not None and i % 2 == 0 else module(x)
            x = x + out
        return x

    return run


@two_layer_stack.requires(
    "four sublayers, each added to the stream, give the stream that their formulas give",
    "Each part takes the stream `(B, T, d_model)`, leaves it as it is, and returns what "
    "is to be added, in the same shape and dtype.",
)
def _(parts, case):
    made = sublayers(parts, case)
    mask = case.call(parts["causal_mask"], 5)
    truth = true_sublayers(made)
    x = probe(2, 5, 12, seed=50)
    for n, name in enumerate(SUBLAYERS, start=1):
        case.agrees(
            stream_after(n, made, mask),
            stream_after(n, truth),
            x,
            what=f"the stream after {name}",
        )


@two_layer_stack.requires("a later token changes nothing before it, in the whole stack")
def _(parts, case):
    made = sublayers(parts, case)
    run = stream_after(4, made, case.call(parts["causal_mask"], 5))
    x = probe(2, 5, 12, seed=51)
    changed = torch.cat([x[:, :3], probe(2, 2, 12, seed=52)], dim=1)
    before, after = case.call(run, x)[:, :3], case.call(run, changed)[:, :3]
    case.close(after, before, "the stream before the changed tokens")


@two_layer_stack.requires("the loss at the end reaches every weight of every sublayer")
def _(parts, case):
    made = sublayers(parts, case)
    run = stream_after(4, made, case.call(parts["causal_mask"], 5))
    (
        case.call(run, probe(2, 5, 12, seed=53)) * probe(2, 5, 12, seed=54)
    ).sum().backward()
    for name, module in zip(SUBLAYERS, made, strict=True):
        for path, p in module.named_parameters():
            case.true(
                p.grad is not None
                and p.grad.isfinite().all()
                and p.grad.abs().max() > 0,
                f"`{path}` of {name} gets no gradient (or a NaN) from the end of the "
                "stack.",
            )


@two_layer_stack.requires("the stack works in float64 and in bfloat16 as well")
def _(parts, case):
    for dtype in (torch.float64, torch.bfloat16):
        made = [module.to(dtype) for module in sublayers(parts, case)]
        run = stream_after(4, made, case.call(parts["causal_mask"], 5))
        truth = stream_after(4, true_sublayers(made))
        x = probe(2, 5, 12, seed=55, dtype=dtype)
        case.agrees(run, truth, x, what="the stream after both blocks")


parameters_of_a_block = IntegrationCheck(
    "parameters_of_a_block",
    lesson="feed_forward",
    parts={
        "MultiHeadAttention": "multi_head",
        "FeedForward": "feed_forward",
        "SwiGLU": "feed_forward",
        "swiglu_width": "feed_forward",
        "block_parameters": "feed_forward",
    },
)


def size(module):
    return sum(p.numel() for p in module.parameters())


def same_as_modules(parts, case, d_model, n_heads, n_kv_heads, d_ff, gated):
    counts = case.call(
        parts["block_parameters"], d_model, n_heads, n_kv_heads, d_ff, gated
    )
    made = {
        "attention": built(
            parts["MultiHeadAttention"], case, d_model, n_heads, n_kv_heads
        ),
        "feed_forward": built(parts["SwiGLU"], case, d_model, d_ff)
        if gated
        else built(parts["FeedForward"], case, d_model, d_ff, torch.relu),
    }
    for key, module in made.items():
        shapes = ", ".join(
            f"{n} {tuple(p.shape)}" for n, p in module.named_parameters()
        )
        case.true(
            counts[key] == size(module),
            f"`block_parameters` says {counts[key]:,} for {key!r}, and the "
            f"{type(module).__name__} of that shape holds {size(module):,}: {shapes}.",
        )


@parameters_of_a_block.requires("the classic block counts what its two modules hold")
def _(parts, case):
    same_as_modules(parts, case, 24, 3, 3, 96, False)


@parameters_of_a_block.requires(
    "a block with grouped keys and a gate counts what its modules hold"
)
def _(parts, case):
    same_as_modules(parts, case, 24, 6, 2, 70, True)
    same_as_modules(parts, case, 40, 5, 1, 64, True)


@parameters_of_a_block.requires(
    "SwiGLU at `swiglu_width` is as large as the classic network, but for the rounding"
)
def _(parts, case):
    for d_model in (48, 60):
        wide = case.call(parts["swiglu_width"], d_model, 8)
        gated = size(built(parts["SwiGLU"], case, d_model, wide))
        classic = size(
            built(parts["FeedForward"], case, d_model, 4 * d_model, torch.relu)
        )
        case.true(
            0 <= gated - classic < 3 * d_model * 8,
            f"With d_model {d_model}, SwiGLU at width {wide} holds {gated:,} parameters "
            f"and the classic network {classic:,}: they should differ by less than one "
            "step of the width.",
        )
