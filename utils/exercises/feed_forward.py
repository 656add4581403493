"""Lesson 05: the feed-forward network."""

import copy
import math
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch.func import functional_call

from utils.check.exercise import Exercise, IntegrationCheck
from utils.probe import probe, strided

silu = Exercise("silu", lesson="feed_forward")
gelu = Exercise("gelu", lesson="feed_forward")
FeedForward = Exercise("FeedForward", lesson="feed_forward")
SwiGLU = Exercise("SwiGLU", lesson="feed_forward")
swiglu_width = Exercise("swiglu_width", lesson="feed_forward")
block_parameters = Exercise("block_parameters", lesson="feed_forward")

# Activations --------------------------------------------------------------------------


@silu.requires("every number is multiplied by its own sigmoid")
def _(answer, case):
    case.agrees(answer, F.silu, probe(3, 5, scale=2))
    case.agrees(answer, F.silu, probe(2, 3, 4, seed=1, scale=4))


@gelu.requires("every number is multiplied by the probability below it, exactly")
def _(answer, case):
    case.agrees(answer, F.gelu, probe(3, 5, scale=2))
    case.agrees(answer, F.gelu, probe(2, 3, 4, seed=1, scale=3))


def activation_requires(exercise, oracle):
    @exercise.requires(
        "float64 keeps its digits, and float16, bfloat16 and strided memory work too",
        "Is something on the way float32, or a constant typed with a few digits? "
        "`math` knows sixteen.",
    )
    def _(answer, case):
        case.agrees(answer, oracle, probe(7, seed=2, dtype=torch.float64))
        for dtype in (torch.float16, torch.bfloat16):
            case.agrees(answer, oracle, probe(3, 6, seed=4, scale=3, dtype=dtype))
        case.agrees(answer, oracle, strided(probe(3, 5, seed=5)))

    @exercise.requires(
        "large numbers give no NaN and no infinity",
        "Which of your intermediate results leaves the range of the dtype, or is cut off "
        "so that it does not? A number that is cut off inside gives another value.",
    )
    def _(answer, case):
        x = torch.tensor([-1000.0, -200, -95, -89, -20, 0, 20, 89, 95, 200, 1000])
        case.agrees(answer, oracle, x)

    @exercise.requires(
        "gradients flow back, and are right at ±100 too",
        "Autograd differentiates every step that you wrote. Where one step is infinite "
        "and the next has slope 0, their product is NaN, although the result looked "
        "right.",
    )
    def _(answer, case):
        case.gradients_agree(answer, oracle, probe(3, 5, seed=3, scale=3))
        case.gradients_agree(answer, oracle, torch.tensor([-100.0, -90, 90, 100]))

    @exercise.requires("it creates nothing on another device")
    def _(answer, case):
        case.any_device(answer, probe(3, 5))


activation_requires(silu, F.silu)
activation_requires(gelu, F.gelu)


@silu.requires(
    "in float16 the tail below −11 is kept",
    "float16 ends at 65,504, which is less than the exponential of 12. Which step of "
    "yours leaves that range, or rounds to a whole number, although the result is small?",
)
def _(answer, case):
    before = torch.linspace(-11, -7, 16).half()
    with case.unrecorded():
        result = case.call(answer, before)
    # Two ways to lose the tail: one loses digits on the way there.
    case.note(torch.allclose(result, F.silu(before), rtol=0.01))
    case.agrees(answer, F.silu, torch.linspace(-15, -11.25, 16).half())


# The two networks ---------------------------------------------------------------------


def classic(activation):
    """The formula of the network with two matrices, stored as `nn.Linear` does."""
    return lambda x, w_1, w_2: activation(x @ w_1.T) @ w_2.T


def gated(x, w_1, w_3, w_2):
    return (F.silu(x @ w_1.T) * (x @ w_3.T)) @ w_2.T


def tent(h):
    """An activation that is not 0 at 0, so that every order of steps differs."""
    return (h - 0.5).abs()


TWO, THREE = ("w_1", "w_2"), ("w_1", "w_3", "w_2")
D_MODEL, D_FF = 5, 7


def matrices(names, d_model=D_MODEL, d_ff=D_FF, seed=20):
    """Weights by name: `w_2` leads down, the others up."""
    sizes = {name: (d_ff, d_model) for name in names} | {"w_2": (d_model, d_ff)}
    return {
        name: probe(*sizes[name], seed=seed + i, scale=sizes[name][1] ** -0.5)
        for i, name in enumerate(names)
    }


def paths(module, names):
    """Under which names the module keeps the weights `names`."""
    parameters = dict(module.named_parameters())
    return [f"{n}.weight" if f"{n}.weight" in parameters else n for n in names]


def formula_of(module, formula, names):
    """The formula with the weights that the module has now, in float64."""
    parameters = dict(module.named_parameters())
    weights = [parameters[path].detach().double() for path in paths(module, names)]
    return lambda x: formula(x, *weights)


def network_requires(exercise, names, sentence, hint, *networks):
    """What both networks must satisfy beside their parameters.

    networks: what follows the widths when one is built, and its formula.
    """
    (first, first_formula), (second, second_formula) = networks[0], networks[-1]

    def loaded(answer, case, arguments, seed=20):
        module = case.call(answer, D_MODEL, D_FF, *arguments)
        return case.load(module, **matrices(names, seed=seed))

    @exercise.requires(sentence, hint)
    def _(answer, case):
        for arguments, formula in networks:
            module = loaded(answer, case, arguments)
            oracle = formula_of(module, formula, names)
            case.agrees(module, oracle, probe(2, 4, 5, seed=1, scale=2))

    @exercise.requires(
        "each position is treated alone, however many dimensions stand before the last, "
        "in `eval()` and in other dtypes too"
    )
    def _(answer, case):
        module = loaded(answer, case, first)
        for sizes in ((5,), (3, 5), (1, 1, 5), (2, 3, 4, 5)):
            oracle = formula_of(module, first_formula, names)
            case.agrees(module, oracle, probe(*sizes, seed=2))
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            module = copy.deepcopy(module).eval().to(dtype)
            x = probe(3, 2, 5, seed=4, dtype=dtype).transpose(0, 1)
            case.agrees(module, formula_of(module, first_formula, names), x)

    @exercise.requires(
        "two networks side by side keep what is their own",
        "What belongs to one network is created in `__init__` and kept on `self`.",
    )
    def _(answer, case):
        module = loaded(answer, case, first)
        expected = formula_of(module, first_formula, names)
        loaded(answer, case, second, seed=25)
        x = probe(2, 4, 5, seed=6)
        actual = case.call(module, x)
        case.close(actual, expected(x.double()), "the first network's result", like=x)

    @exercise.requires("gradients reach the input and all matrices")
    def _(answer, case):
        module = case.call(answer, D_MODEL, D_FF, *second)
        at = dict(zip(names, paths(module, names), strict=True))
        for name in names[:-1]:
            case.true(
                bool((module.get_parameter(at[name]).diff() != 0).any()),
                f"All numbers of `{name}` are equal in a fresh module, so all its units "
                "do the same and keep doing so in training.",
            )

        def network(x, **weights):
            given = {at[name]: weight for name, weight in weights.items()}
            return functional_call(module, given, (x,))

        for scale in (1, 100):
            x = probe(2, 4, 5, seed=9, scale=scale)
            weights = matrices(names, seed=30)
            case.gradients_agree(network, second_formula, x, **weights)

    @exercise.requires("it creates nothing on another device")
    def _(answer, case):
        case.any_device(case.call(answer, D_MODEL, D_FF, *first), probe(2, 3, 5))


@FeedForward.requires(
    "it holds two matrices and no bias: `w_1` from d_model to d_ff, `w_2` back"
)
def _(answer, case):
    case.parameters(case.call(answer, 5, 7, torch.relu), w_1=(7, 5), w_2=(5, 7))
    module = case.call(answer, d_model=4, d_ff=11, activation=torch.relu)
    case.parameters(module, w_1=(11, 4), w_2=(4, 11))


@SwiGLU.requires(
    "it holds three matrices and no bias: `w_1` and `w_3` from d_model to d_ff, `w_2` back"
)
def _(answer, case):
    case.parameters(case.call(answer, 5, 7), w_1=(7, 5), w_3=(7, 5), w_2=(5, 7))
    module = case.call(answer, d_model=4, d_ff=11)
    case.parameters(module, w_1=(11, 4), w_3=(11, 4), w_2=(4, 11))


network_requires(
    FeedForward,
    TWO,
    "the result is activation(x @ W_1) @ W_2, for whatever activation",
    "Three steps, in the order in which the formula is read from inside.",
    *(((f,), classic(f)) for f in (torch.relu, tent, torch.tanh)),
)
network_requires(
    SwiGLU,
    THREE,
    "the result is (silu(x @ W_1) * (x @ W_3)) @ W_2",
    "Compute one hidden unit by hand with gate −2 and up 3: silu(−2)·3 is −0.72.",
    ((), gated),
)

# Counting -----------------------------------------------------------------------------


def exact_width(d_model, multiple_of=32):
    return math.ceil(Fraction(8 * d_model, 3 * multiple_of)) * multiple_of


def width_is_right(case, answer, *args):
    width = case.call(answer, *args)
    case.equal(width, exact_width(*args), "the width")
    case.true(
        isinstance(width, int),
        f"The width is of type {type(width).__name__}, expected an int: `nn.Linear` "
        "takes no other.",
    )


@swiglu_width.requires(
    "the width is 8/3·d_model, rounded up to a multiple of 32 unless it is one already"
)
def _(answer, case):
    for d_model in (1015, 100, 64, 5, 12, 24, 768, 12_288):
        width_is_right(case, answer, d_model)


@swiglu_width.requires(
    "for any size and multiple, no width falls below 8/3·d_model, nor a whole multiple "
    "above",
    "Where is a fraction cut off before the rounding, or a constant not exact?",
)
def _(answer, case):
    for d_model in (4096, 1, 2, 5, 7, 385, 4097, 12_289, 36_865, 3 * 2**20 + 1):
        for multiple_of in (256, 100, 1, 2, 3, 32, 96):
            width_is_right(case, answer, d_model, multiple_of)
    case.equal(case.call(answer, d_model=20, multiple_of=8), 56, "the width")


def counted(d_model, n_heads, n_kv_heads, d_ff, gated):
    """The same counts by another way: heads times their width."""
    heads = 2 * (n_heads + n_kv_heads)
    return {
        "attention": d_model * (d_model // n_heads) * heads,
        "feed_forward": d_model * d_ff * len(THREE if gated else TWO),
    }


def counts_are_right(case, answer, *args, **kwargs):
    counts, expected = case.call(answer, *args, **kwargs), counted(*args, **kwargs)
    case.true(
        isinstance(counts, dict) and counts.keys() == expected.keys(),
        f"The result is {counts!r}, expected a dict with the keys 'attention' and "
        "'feed_forward', and no others.",
    )
    for key, number in expected.items():
        case.equal(counts[key], number, f"the count of {key!r}")
        case.true(
            isinstance(counts[key], int),
            f"The count of {key!r} is of type {type(counts[key]).__name__}, expected "
            "an int.",
        )


@block_parameters.requires(
    "the classic block: as many key and value heads as heads, no gate"
)
def _(answer, case):
    case.call(answer, 48, 8, 2, 70, True)  # to see what comes of the other case
    counts_are_right(case, answer, 20, 5, 5, 70, False)
    counts_are_right(case, answer, 768, 12, 12, 3072, False)


@block_parameters.requires(
    "fewer key and value heads make the key and value matrices narrower",
    "Which of the four matrices depend on n_kv_heads? Print the shapes in your own "
    "`MultiHeadAttention`.",
)
def _(answer, case):
    counts_are_right(case, answer, 48, 8, 2, 70, False)
    counts_are_right(case, answer, 24, 6, 1, 70, False)


@block_parameters.requires("a gated network has one more matrix")
def _(answer, case):
    counts_are_right(case, answer, 24, 6, 6, 70, True)
    sizes = {"d_model": 4096, "n_heads": 32, "n_kv_heads": 8, "d_ff": 14_336}
    counts_are_right(case, answer, **sizes, gated=True)


@block_parameters.requires(
    "heads that do not divide d_model, and key and value heads that do not divide the "
    "heads, are a ValueError with both numbers"
)
def _(answer, case):
    for args, both, because in (
        ((30, 4, 2, 50, False), (30, 4), "4 heads do not divide a d_model of 30"),
        ((72, 9, 6, 50, True), (9, 6), "6 key and value heads cannot serve 9 heads"),
        ((40, 5, 10, 60, True), (5, 10), "10 key and value heads cannot serve 5 heads"),
    ):
        case.raises(ValueError, answer, *args, mentions=both, because=because)


# Where the parts meet -----------------------------------------------------------------

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
WIDTH = 24
SUBLAYERS = "the first attention", "FeedForward", "the second attention", "SwiGLU"


def sublayers(parts, case):
    """Two blocks of the learner's parts: attention, GELU, attention, SwiGLU."""

    def attention(n_heads, n_kv_heads, seed):
        module = case.call(parts["MultiHeadAttention"], WIDTH, n_heads, n_kv_heads)
        d_kv = n_kv_heads * WIDTH // n_heads
        rows = (WIDTH, d_kv, d_kv, WIDTH)
        for i, (name, n_rows) in enumerate(zip(FOUR, rows, strict=True)):
            case.load(module, **{name: probe(n_rows, WIDTH, seed=seed + i, scale=0.3)})
        return module

    def network(name, names, d_ff, *activation):
        module = case.call(parts[name], WIDTH, d_ff, *activation)
        return case.load(module, **matrices(names, WIDTH, d_ff, seed=d_ff))

    return [
        attention(3, 3, seed=60),
        network("FeedForward", TWO, 20, parts["gelu"]),
        attention(6, 2, seed=70),
        network("SwiGLU", THREE, 15),
    ]


def exact_sublayers(modules):
    """The same four as functions in float64, from PyTorch's own pieces."""

    def attention(n_heads):
        def run(x, w_q, w_k, w_v, w_o):
            q, k, v = (
                (x @ w.T).unflatten(-1, (-1, WIDTH // n_heads)).transpose(1, 2)
                for w in (w_q, w_k, w_v)
            )
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            return out.transpose(1, 2).flatten(2) @ w_o.T

        return run

    formulas = (attention(3), classic(F.gelu), attention(6), gated)
    names = (FOUR, TWO, FOUR, THREE)
    return list(map(formula_of, modules, formulas, names))


def stream_after(n, modules, mask=None):
    """The stream after the first `n` sublayers, each added to what it was given."""

    def stream(x):
        for i, module in enumerate(modules[:n]):
            masked = mask is not None and i % 2 == 0
            x = x + (module(x, mask) if masked else module(x))
        return x

    return stream


@two_layer_stack.requires(
    "four sublayers, each added to the stream, give the stream that their formulas give",
    "Each part takes the stream `(B, T, d_model)`, leaves it as it is, and returns what "
    "is to be added, in the same shape and dtype.",
)
def _(parts, case):
    mask = case.call(parts["causal_mask"], 7)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        modules = [module.to(dtype) for module in sublayers(parts, case)]
        exact = exact_sublayers(modules)
        x = probe(5, 7, WIDTH, seed=50, dtype=dtype)
        for n, name in enumerate(SUBLAYERS, start=1):
            stream, oracle = stream_after(n, modules, mask), stream_after(n, exact)
            case.agrees(stream, oracle, x, what=f"the stream after {name}")


@two_layer_stack.requires("the loss at the end reaches every weight of every sublayer")
def _(parts, case):
    modules = sublayers(parts, case)
    stream = stream_after(4, modules, case.call(parts["causal_mask"], 7))
    out = case.call(stream, probe(5, 7, WIDTH, seed=53))
    (out * probe(5, 7, WIDTH, seed=54)).sum().backward()
    for name, module in zip(SUBLAYERS, modules, strict=True):
        for path, p in module.named_parameters():
            case.true(
                p.grad is not None and p.grad.isfinite().all() and p.grad.any(),
                f"`{path}` of {name} gets no gradient (or a NaN) from the end of the "
                "stack.",
            )


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


def counts_what_modules_hold(parts, case, d_model, n_heads, n_kv_heads, d_ff, gate):
    sizes = (d_model, n_heads, n_kv_heads)
    counts = case.call(parts["block_parameters"], *sizes, d_ff, gate)
    modules = {
        "attention": case.call(parts["MultiHeadAttention"], *sizes),
        "feed_forward": case.call(parts["SwiGLU"], d_model, d_ff)
        if gate
        else case.call(parts["FeedForward"], d_model, d_ff, torch.relu),
    }
    for key, module in modules.items():
        shapes = [f"{n} {tuple(p.shape)}" for n, p in module.named_parameters()]
        case.true(
            counts[key] == size(module),
            f"`block_parameters` says {counts[key]:,} for {key!r}, and the "
            f"{type(module).__name__} of that shape holds {size(module):,}: "
            f"{', '.join(shapes)}.",
        )


@parameters_of_a_block.requires(
    "a block, classic or with grouped keys and a gate, counts what its modules hold"
)
def _(parts, case):
    counts_what_modules_hold(parts, case, 24, 3, 3, 100, False)
    counts_what_modules_hold(parts, case, 48, 8, 2, 70, True)
    counts_what_modules_hold(parts, case, 40, 5, 1, 64, True)


@parameters_of_a_block.requires(
    "SwiGLU at `swiglu_width` is as large as the classic network, but for the rounding"
)
def _(parts, case):
    for d_model in (48, 60):
        width = case.call(parts["swiglu_width"], d_model, 8)
        gated = size(case.call(parts["SwiGLU"], d_model, width))
        classic = size(
            case.call(parts["FeedForward"], d_model, 4 * d_model, torch.relu)
        )
        case.true(
            0 <= gated - classic < 3 * d_model * 8,
            f"With d_model {d_model}, SwiGLU at width {width} holds {gated:,} parameters "
            f"and the classic network {classic:,}: they should differ by less than one "
            "step of the width.",
        )
