"""Lesson 05: the feed-forward network."""

import copy
import math
from fractions import Fraction
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from utils.check.exercise import Exercise, Joint
from utils.probe import probe, strided

# Activations -----------------------------------------------------------------------


def keeps_float64(answer, t, oracle):
    """float64 in, float64 out, and its digits too: what loses them is told apart."""
    x = probe(7, seed=2, dtype=torch.float64)
    actual = t.call(answer, x)
    expected = oracle(x)
    if (
        isinstance(actual, torch.Tensor)
        and actual.dtype == x.dtype
        and actual.shape == x.shape
    ):
        error = (actual - expected).abs().max().item()
        t.true(
            not 1e-11 < error < 1e-6,
            "float64 came in, and the result has the digits of float32 "
            f"(largest difference {error:.0e}). Something on the way is float32: cast "
            "up from half precision alone, or compute in the dtype of x.",
        )
        t.true(
            not 1e-6 <= error < 1e-4,
            f"The result is right to a few digits only (largest difference {error:.0e} "
            "in float64): a constant in it has too few. `math` has it to all digits.",
        )
    t.close(actual, expected, like=x)


silu = Exercise("silu", lesson="feed_forward")


@silu.requires("every number is multiplied by its own sigmoid")
def _(answer, t):
    t.agrees(answer, F.silu, probe(3, 5, scale=2))
    t.agrees(answer, F.silu, probe(2, 3, 4, seed=1, scale=4))


@silu.requires("float64 comes back as float64, with its digits")
def _(answer, t):
    keeps_float64(answer, t, F.silu)


@silu.requires(
    "large numbers give no NaN and no infinity",
    "Which of your intermediate results leaves the range of float32, or is cut off so "
    "that it does not? A number that is cut off inside gives another value.",
)
def _(answer, t):
    x = torch.tensor([-1000.0, -200, -95, -89, -20, 0, 20, 89, 95, 200, 1000])
    t.agrees(answer, F.silu, x)


@silu.requires(
    "gradients flow back, and are right at ±100 too",
    "Autograd differentiates every step that you wrote. Where one step is infinite and "
    "the next has slope 0, their product is NaN, although the result looked right.",
)
def _(answer, t):
    t.gradients_agree(answer, F.silu, probe(3, 5, seed=3, scale=3))
    t.gradients_agree(answer, F.silu, torch.tensor([-100.0, -90, 90, 100]))


@silu.requires("float16, bfloat16 and memory that is not contiguous work too")
def _(answer, t):
    for dtype in (torch.float16, torch.bfloat16):
        t.agrees(answer, F.silu, probe(3, 6, seed=4, scale=3, dtype=dtype))
    t.agrees(answer, F.silu, strided(probe(3, 5, seed=5)))
    t.agrees(answer, F.silu, probe(4, 5, seed=6).T)


@silu.requires(
    "in float16 the tail below −11 is kept",
    "float16 ends at 65,504, which is less than the exponential of 12. Which step of "
    "yours leaves that range, or rounds to a whole number, although the result is small?",
)
def _(answer, t):
    t.agrees(answer, F.silu, probe(3, 6, seed=4, scale=3, dtype=torch.float16))
    t.agrees(answer, F.silu, torch.linspace(-15, -11.25, 16).half())


@silu.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, probe(3, 5))


silu.fault("relu", "This is ReLU: it cuts negative numbers off.", F.relu)
silu.fault(
    "sigmoid_alone",
    "This is the sigmoid alone. SiLU multiplies it by x.",
    torch.sigmoid,
)
silu.fault("gelu", "This is GELU; SiLU's factor is the sigmoid of x.", F.gelu)
silu.fault(
    "gelu_tanh",
    "This is the tanh form of GELU; SiLU's factor is the sigmoid of x.",
    partial(F.gelu, approximate="tanh"),
)
silu.fault(
    "gelu_sigmoid",
    "The sigmoid is taken of 1.702·x. That approximates GELU; SiLU uses x itself.",
    lambda x: x * torch.sigmoid(1.702 * x),
)
silu.fault("softplus", "This is softplus, the integral of the sigmoid.", F.softplus)
silu.fault("mish", "This is Mish, which multiplies by tanh(softplus(x)).", F.mish)
silu.fault(
    "hard_swish",
    "This is the version in straight pieces, hard-swish. SiLU is smooth.",
    F.hardswish,
)
silu.fault(
    "tanh",
    "x is multiplied by its tanh. Both run from one level to another, but the "
    "sigmoid goes from 0 to 1 and tanh from −1 to 1.",
    lambda x: x * torch.tanh(x),
)
silu.fault(
    "python_function",
    "`math` works on single numbers. `torch` has functions of the same names that take "
    "every number of a tensor.",
    lambda x: x / (1 + math.exp(-x)),
)
silu.fault(
    "twice_the_slope",
    "The factor is ½(1 + tanh x). That is the sigmoid of 2x; the sigmoid of x has "
    "tanh(x/2).",
    lambda x: 0.5 * x * (1 + torch.tanh(x)),
)
silu.fault(
    "wrong_sign",
    "The sigmoid is that of −x, so that positive numbers fade and negative ones stay.",
    lambda x: x * torch.sigmoid(-x),
)
silu.fault(
    "softmax",
    "The factor is a softmax over the last dimension, so that the numbers compete. An "
    "activation treats each number by itself.",
    lambda x: x * torch.softmax(x, -1),
)
silu.fault(
    "detached",
    "The result is cut from the graph, so nothing before it can be trained.",
    lambda x: F.silu(x.detach()),
)
silu.fault(
    "exp_over_exp",
    "The sigmoid is written as exp(x) / (1 + exp(x)). From 89 on both are infinite, and "
    "inf/inf is NaN.",
    lambda x: x * torch.exp(x) / (1 + torch.exp(x)),
)
silu.fault(
    "rounded_away",
    "The sigmoid is the sum or difference of two numbers near 1, such as 1 + tanh(x/2) "
    "or 1 − sigmoid(−x). On paper that is the same; in float16 the two are rounded to the "
    "same number long before −11, and the tail is 0.",
    lambda x: 0.5 * x * (1 + torch.tanh(0.5 * x)),
)
silu.fault(
    "exp_of_minus_x",
    "It is written with 1 + exp(−x). In float16 exp(−x) is infinite from x = −11.1 "
    "down, in float32 from −88.7: the result becomes 0 there although the true value "
    "can be stored, and its gradient NaN.",
    lambda x: x / (1 + torch.exp(-x)),
)
silu.fault(
    "where",
    "Two formulas are joined by `where`. The values are right, but autograd goes "
    "through the branch that was not chosen too, and there 0·inf is NaN.",
    lambda x: torch.where(
        x > 0, x / (1 + torch.exp(-x)), x * torch.exp(x) / (1 + torch.exp(x))
    ),
)
silu.fault(
    "clamped",
    "The numbers are cut off before the multiplication, so that large ones give "
    "another value. The sigmoid itself needs no protection.",
    lambda x: x.clamp(-20, 20) * torch.sigmoid(x),
)
silu.fault(
    "factor_detached",
    "The sigmoid is cut from the graph. The values are right, the gradient lacks the "
    "part that comes from the sigmoid.",
    lambda x: x * torch.sigmoid(x).detach(),
)
silu.fault(
    "not_cast_back",
    "It computes in float32, which is a good idea in half precision, but returns "
    "float32 too. Give back the dtype that came in.",
    lambda x: F.silu(x.float()),
)


@silu.fault(
    "in_place",
    "The input is overwritten. Whoever handed it over may need it again: a residual "
    "connection does.",
)
def _(x):
    return x.mul_(torch.sigmoid(x))


gelu = Exercise("gelu", lesson="feed_forward")


@gelu.requires("every number is multiplied by the probability below it, exactly")
def _(answer, t):
    t.agrees(answer, F.gelu, probe(3, 5, scale=2))
    t.agrees(answer, F.gelu, probe(2, 3, 4, seed=1, scale=3))


@gelu.requires(
    "float64 comes back as float64, with its digits",
    "A root that is typed as 1.4142 has five digits; `math` knows sixteen.",
)
def _(answer, t):
    keeps_float64(answer, t, F.gelu)


@gelu.requires("large numbers give no NaN and no infinity")
def _(answer, t):
    x = torch.tensor([-1000.0, -200, -95, -20, 0, 20, 95, 200, 1000])
    t.agrees(answer, F.gelu, x)
    t.agrees(answer, F.gelu, torch.tensor([-1000.0, -60, 0, 60, 1000]).half())


@gelu.requires("gradients flow back, and are right at ±100 too")
def _(answer, t):
    t.gradients_agree(answer, F.gelu, probe(3, 5, seed=3, scale=2))
    t.gradients_agree(answer, F.gelu, torch.tensor([-100.0, -90, 90, 100]))


@gelu.requires("float16, bfloat16 and memory that is not contiguous work too")
def _(answer, t):
    for dtype in (torch.float16, torch.bfloat16):
        t.agrees(answer, F.gelu, probe(3, 6, seed=4, scale=2, dtype=dtype))
    t.agrees(answer, F.gelu, strided(probe(3, 5, seed=5)))
    t.agrees(answer, F.gelu, probe(4, 5, seed=6).T)


@gelu.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, probe(3, 5))


gelu.fault(
    "tanh_form",
    "This is the tanh form, an approximation from the paper that GPT-2 uses. It differs "
    "by up to 5e-4 from the exact function, which this course uses.",
    partial(F.gelu, approximate="tanh"),
)
gelu.fault(
    "sigmoid_form",
    "This is x·sigmoid(1.702·x), the cruder of the paper's two approximations: it is off "
    "by up to 0.02. The exact function uses erf.",
    lambda x: x * torch.sigmoid(1.702 * x),
)
gelu.fault("silu", "This is SiLU: its factor is the sigmoid of x.", F.silu)
gelu.fault("relu", "This is ReLU: it cuts negative numbers off.", F.relu)
gelu.fault(
    "no_root",
    "erf is taken of x itself. erf belongs to a normal distribution with variance ½; "
    "for variance 1, x must be divided by a constant first.",
    lambda x: 0.5 * x * (1 + torch.erf(x)),
)
gelu.fault(
    "times_root",
    "x is multiplied by the root of 2 inside erf, where it must be divided by it.",
    lambda x: 0.5 * x * (1 + torch.erf(x * math.sqrt(2))),
)
gelu.fault(
    "half_for_root",
    "Inside erf, x is divided by 2 instead of the root of 2.",
    lambda x: 0.5 * x * (1 + torch.erf(x / 2)),
)
gelu.fault(
    "python_function",
    "`math.erf` works on single numbers. `torch` has a function of the same name that "
    "takes every number of a tensor.",
    lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
)
gelu.fault(
    "tanh_without_cube",
    "tanh(√(2/π)·x) stands for erf. It has the right slope at 0 and is too low behind; "
    "the paper's tanh form adds a cube, and the exact function has erf itself.",
    lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x)),
)
gelu.fault(
    "root_of_three_decimals",
    "The root of 2 is written as 1.414. float32 has seven digits, and a constant should "
    "have them too: `math.sqrt(2)`.",
    lambda x: 0.5 * x * (1 + torch.erf(x / 1.414)),
)
gelu.fault(
    "root_of_four_decimals",
    "The root of 2 is written as 1.4142. float32 has seven digits, and a constant should "
    "have them too: `math.sqrt(2)`.",
    lambda x: 0.5 * x * (1 + torch.erf(x / 1.4142)),
)
gelu.fault(
    "erf_outside",
    "x/2 and erf are added. The bracket is missing: x multiplies erf as well.",
    lambda x: 0.5 * x + torch.erf(x / math.sqrt(2)),
)
gelu.fault(
    "no_half",
    "It is twice too large: 1 + erf goes from 0 to 2, a probability from 0 to 1.",
    lambda x: x * (1 + torch.erf(x / math.sqrt(2))),
)
gelu.fault(
    "no_one",
    "erf goes from −1 to 1. Without the 1 added to it negative numbers come out "
    "positive.",
    lambda x: 0.5 * x * torch.erf(x / math.sqrt(2)),
)
gelu.fault(
    "probability_alone",
    "This is the probability alone. GELU multiplies it by x.",
    torch.special.ndtr,
)
gelu.fault(
    "density",
    "x is multiplied by the bell curve, the density at x. GELU takes the probability "
    "below x, the area under that curve.",
    lambda x: x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi),
)
gelu.fault(
    "erfc_sign",
    "x is multiplied by the probability above it, so that negative numbers pass and "
    "positive ones fade: a sign is wrong inside erf or erfc.",
    lambda x: 0.5 * x * (1 - torch.erf(x / math.sqrt(2))),
)
gelu.fault(
    "detached",
    "The result is cut from the graph, so nothing before it can be trained.",
    lambda x: F.gelu(x.detach()),
)
gelu.fault(
    "factor_detached",
    "The probability is cut from the graph. The values are right, the gradient lacks "
    "the part that comes from it.",
    lambda x: x * torch.special.ndtr(x).detach(),
)
gelu.fault(
    "not_cast_back",
    "It computes in float32 and returns float32. Give back the dtype that came in.",
    lambda x: F.gelu(x.float()),
)
gelu.fault(
    "constant_on_the_cpu",
    "A constant is made as a float32 tensor on the CPU, where the input may be on a GPU, "
    "or float64. A Python number belongs to no device and has all digits.",
    lambda x: 0.5 * x * (1 + torch.erf(x / torch.tensor([2.0]).sqrt().to(x.dtype))),
)


@gelu.fault(
    "in_place",
    "The input is overwritten. Whoever handed it over may need it again: a residual "
    "connection does.",
)
def _(x):
    return x.mul_(torch.special.ndtr(x))


# The two networks ------------------------------------------------------------------


def built(make, t, *sizes, **named):
    """A module, with its parameters' names and shapes in the trace."""
    module = t.call(make, *sizes, **named)
    t.trace.append({n: tuple(p.shape) for n, p in module.named_parameters()})
    return module


def filled(t, module, d_model, d_ff, *names, seed=0):
    """Load weights from a formula; `w_2` goes down, the others up."""
    for i, name in enumerate(names):
        sizes = (d_model, d_ff) if name == "w_2" else (d_ff, d_model)
        value = probe(*sizes, seed=20 + seed + i, scale=sizes[1] ** -0.5)
        t.load(module, **{name: value})
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


def varied(t, module, *names):
    """A fresh module's units differ, so that training can tell them apart."""
    for name, value in zip(names, weights(module, *names), strict=True):
        t.true(
            value.std() > 0,
            f"All numbers of `{name}` are equal in a fresh module, so all its units do "
            "the same and keep doing so in training.",
        )


feed_forward = Exercise("FeedForward", lesson="feed_forward")
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


@feed_forward.requires(
    "it holds two matrices and no bias: `w_1` from d_model to d_ff, `w_2` back"
)
def _(answer, t):
    module = built(answer, t, 5, 7, torch.relu)
    t.parameter_count(module, 2 * 5 * 7)
    filled(t, module, 5, 7, *TWO)
    built(answer, t, d_model=4, d_ff=11, activation=torch.relu)


@feed_forward.requires(
    "the result is activation(x @ W_1) @ W_2, for whatever activation",
    "Three steps, in the order in which the formula is read from inside.",
)
def _(answer, t):
    x = probe(2, 3, 5, seed=1)
    for activation in (torch.relu, tent, torch.tanh):
        module = filled(t, built(answer, t, 5, 7, activation), 5, 7, *TWO)
        t.agrees(module, feed_forward_values(activation, module), x)


@feed_forward.requires(
    "each position is treated alone, however many dimensions stand before the last",
)
def _(answer, t):
    module = filled(t, built(answer, t, 5, 7, tent), 5, 7, *TWO)
    oracle = feed_forward_values(tent, module)
    for sizes in ((5,), (3, 5), (1, 1, 5), (2, 3, 4, 5)):
        t.agrees(module, oracle, probe(*sizes, seed=2))
    t.agrees(module, oracle, strided(probe(2, 3, 5, seed=3)))
    t.agrees(module, oracle, probe(3, 2, 5, seed=4).transpose(0, 1))


@feed_forward.requires(
    "two networks side by side keep their own weights and their own activation",
    "What belongs to one network is created in `__init__` and kept on `self`.",
)
def _(answer, t):
    first = filled(t, built(answer, t, 5, 7, torch.tanh), 5, 7, *TWO)
    second = filled(t, built(answer, t, 5, 7, nn.ReLU()), 5, 7, *TWO, seed=5)
    w_1, w_2 = (
        probe(7, 5, seed=20, scale=5**-0.5),
        probe(5, 7, seed=21, scale=7**-0.5),
    )
    x = probe(2, 3, 5, seed=6)
    expected = torch.tanh(x.double() @ w_1.double().T) @ w_2.double().T
    t.close(t.call(first, x), expected, "the first network's result", like=x)
    t.agrees(second, feed_forward_values(torch.relu, second), x)


@feed_forward.requires("it works a second time, in `eval()`, and in other dtypes")
def _(answer, t):
    module = filled(t, built(answer, t, 5, 7, tent), 5, 7, *TWO)
    oracle = feed_forward_values(tent, module)
    t.agrees(module, oracle, probe(2, 3, 5, seed=7))
    t.agrees(module, oracle, probe(3, 4, 5, seed=8))
    module.eval()
    t.agrees(module, oracle, probe(2, 3, 5, seed=7))
    module = copy.deepcopy(module)
    oracle = feed_forward_values(tent, module)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        module.to(dtype)
        t.agrees(module, oracle, probe(2, 3, 5, seed=7, dtype=dtype))


@feed_forward.requires("gradients reach the input and both matrices")
def _(answer, t):
    module = built(answer, t, 5, 7, torch.tanh)
    varied(t, module, "w_1")
    t.gradients_agree(
        with_weights(filled(t, module, 5, 7, *TWO), *TWO),
        feed_forward_values(torch.tanh),
        probe(2, 3, 5, seed=9),
        probe(7, 5, seed=10),
        probe(5, 7, seed=11),
    )


@feed_forward.requires("it creates nothing on another device")
def _(answer, t):
    module = built(answer, t, 5, 7, torch.relu)
    t.any_device(module, probe(2, 3, 5))


def two_layers(forward, bias=False, up="w_1", down="w_2"):
    """A FeedForward with another `forward(self, x)`, biases or names."""

    class FeedForward(nn.Module):
        def __init__(self, d_model, d_ff, activation):
            super().__init__()
            setattr(self, up, nn.Linear(d_model, d_ff, bias=bias))
            setattr(self, down, nn.Linear(d_ff, d_model, bias=bias))
            self.activation = activation

        def forward(self, x):
            return forward(self, x)

    return FeedForward


def as_it_should(self, x):
    return self.w_2(self.activation(self.w_1(x)))


def three_sizes(x):
    _b, _t, _d = x.shape
    return x


@feed_forward.fault(
    "one_bias",
    "One of the maps has a bias, `nn.Linear`'s default. This course's maps have none.",
)
class _(two_layers(as_it_should)):
    def __init__(self, d_model, d_ff, activation):
        super().__init__(d_model, d_ff, activation)
        self.w_2 = nn.Linear(d_ff, d_model)


@feed_forward.fault(
    "one_bias_above",
    "One of the maps has a bias, `nn.Linear`'s default. This course's maps have none.",
)
class _(two_layers(as_it_should)):
    def __init__(self, d_model, d_ff, activation):
        super().__init__(d_model, d_ff, activation)
        self.w_1 = nn.Linear(d_model, d_ff)


@feed_forward.fault(
    "matrices_as_printed",
    "The matrices are parameters of your own, in the shape of the formula, d_model × "
    "d_ff. `nn.Linear` stores the transpose and multiplies by it; weights that are "
    "loaded come in its shape.",
)
class _(nn.Module):
    def __init__(self, d_model, d_ff, activation):
        super().__init__()
        self.w_1 = nn.Parameter(torch.randn(d_model, d_ff))
        self.w_2 = nn.Parameter(torch.randn(d_ff, d_model))
        self.activation = activation

    def forward(self, x):
        return self.activation(x @ self.w_1) @ self.w_2


@feed_forward.fault(
    "no_parameters",
    "PyTorch finds no parameters. It looks neither into a Python list nor at plain "
    "tensors, so these weights are not trained, saved or moved: assign each map to "
    "`self` as an `nn.Linear`.",
)
class _(nn.Module):
    def __init__(self, d_model, d_ff, activation):
        super().__init__()
        up = nn.Linear(d_model, d_ff, bias=False)
        self.maps = [up, nn.Linear(d_ff, d_model, bias=False)]
        self.activation = activation

    def forward(self, x):
        return self.maps[1](self.activation(self.maps[0](x)))


feed_forward.fault(
    "biases",
    "Each map has a bias, `nn.Linear`'s default. This course's maps have none; the "
    "original Transformer's had.",
    two_layers(as_it_should, bias=True),
)
feed_forward.fault(
    "names_exchanged",
    "`w_1` and `w_2`, or d_model and d_ff, have changed places: `w_1` is the one that "
    "comes first and leads from d_model to d_ff.",
    two_layers(
        lambda self, x: self.w_1(self.activation(self.w_2(x))), up="w_2", down="w_1"
    ),
)
feed_forward.fault(
    "no_activation",
    "The activation is never called. Two linear maps in a row are one linear map.",
    two_layers(lambda self, x: self.w_2(self.w_1(x))),
)
feed_forward.fault(
    "activation_last",
    "The activation comes after `w_2`. It belongs in between: there it keeps the two "
    "maps from being one, and the output may take any value.",
    two_layers(lambda self, x: self.activation(self.w_2(self.w_1(x)))),
)
feed_forward.fault(
    "activation_twice",
    "The activation is applied after both maps. After the second it limits what can be "
    "added to the stream.",
    two_layers(lambda self, x: self.activation(self.w_2(self.activation(self.w_1(x))))),
)
feed_forward.fault(
    "activation_first",
    "The activation is applied to the input, before `w_1`.",
    two_layers(lambda self, x: self.w_2(self.w_1(self.activation(x)))),
)
feed_forward.fault(
    "activation_of_input_too",
    "The activation is applied to the input as well as between the maps.",
    two_layers(lambda self, x: self.w_2(self.activation(self.w_1(self.activation(x))))),
)
feed_forward.fault(
    "relu_always",
    "ReLU is used whatever activation was asked for.",
    two_layers(lambda self, x: self.w_2(torch.relu(self.w_1(x)))),
)
feed_forward.fault(
    "gelu_always",
    "GELU is used whatever activation was asked for.",
    two_layers(lambda self, x: self.w_2(F.gelu(self.w_1(x)))),
)
feed_forward.fault(
    "silu_always",
    "SiLU is used whatever activation was asked for.",
    two_layers(lambda self, x: self.w_2(F.silu(self.w_1(x)))),
)
feed_forward.fault(
    "residual_inside",
    "The input is added to the result. The block adds it, one level up; here it would "
    "count twice.",
    two_layers(lambda self, x: x + as_it_should(self, x)),
)
feed_forward.fault(
    "normalised",
    "The input is normalised first. The norm is a part of its own, in lesson 06.",
    two_layers(lambda self, x: as_it_should(self, F.layer_norm(x, x.shape[-1:]))),
)
feed_forward.fault(
    "scaled",
    "The hidden numbers are divided by the root of d_ff. That belongs to attention's "
    "scores.",
    two_layers(
        lambda self, x: self.w_2(
            self.activation(self.w_1(x)) / self.w_1.weight.shape[0] ** 0.5
        )
    ),
)
feed_forward.fault(
    "dropout",
    "Dropout sets hidden numbers to zero in training. None is asked for here.",
    two_layers(
        lambda self, x: self.w_2(
            F.dropout(self.activation(self.w_1(x)), 0.1, self.training)
        )
    ),
)
feed_forward.fault(
    "dropout_always",
    "Dropout is on whatever the mode, `eval()` included.",
    two_layers(lambda self, x: F.dropout(as_it_should(self, x), 0.5)),
)
feed_forward.fault(
    "positions_mixed",
    "The hidden numbers are averaged over positions. This network must treat each "
    "position alone.",
    two_layers(
        lambda self, x: self.w_2(
            self.activation(self.w_1(x))
            .mean(-2, keepdim=True)
            .expand(*x.shape[:-1], -1)
        )
    ),
)
feed_forward.fault(
    "flattened",
    "Batch and time are merged into one dimension and not taken apart again.",
    two_layers(lambda self, x: as_it_should(self, x.reshape(-1, x.shape[-1]))),
)
feed_forward.fault(
    "three_dimensions_only",
    "It reads exactly three sizes from the shape of x. A single vector, or a batch of "
    "batches, is a stream too: the last dimension is all that matters.",
    two_layers(lambda self, x: as_it_should(self, three_sizes(x))),
)
feed_forward.fault(
    "second_dimension_asked_for",
    "It asks x for a dimension 1. A single vector `(d_model,)` has none: the last "
    "dimension is all that matters, and all others stay as they are.",
    two_layers(lambda self, x: as_it_should(self, x.transpose(0, 1)).transpose(0, 1)),
)
feed_forward.fault(
    "input_detached",
    "The input is cut from the graph: the network learns, and nothing before it does.",
    two_layers(lambda self, x: as_it_should(self, x.detach())),
)
feed_forward.fault(
    "detached",
    "The hidden numbers are cut from the graph, so `w_1` and everything before it gets "
    "no gradient.",
    two_layers(lambda self, x: self.w_2(self.activation(self.w_1(x)).detach())),
)
feed_forward.fault(
    "cast_to_float32",
    "The input is cast to float32, so that the module fails once its weights are "
    "another dtype, and the stream's dtype is lost.",
    two_layers(lambda self, x: as_it_should(self, x.float())),
)


@feed_forward.fault(
    "width_fixed",
    "The width in between is 4·d_model whatever d_ff says.",
)
class _(two_layers(as_it_should)):
    def __init__(self, d_model, d_ff, activation):
        super().__init__(d_model, 4 * d_model, activation)


@feed_forward.fault(
    "tied",
    "The way down uses the transpose of `w_1`. The two maps have weights of their own.",
)
class _(nn.Module):
    def __init__(self, d_model, d_ff, activation):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff, bias=False)
        self.activation = activation

    def forward(self, x):
        return self.activation(self.w_1(x)) @ self.w_1.weight


feed_forward.fault(
    "other_names",
    "The maps have other names than `w_1` and `w_2`. Weights are loaded by name.",
    two_layers(
        lambda self, x: self.fc2(self.activation(self.fc1(x))), up="fc1", down="fc2"
    ),
)


@feed_forward.fault(
    "sequential",
    "The maps sit inside an `nn.Sequential`, so that their weights are called by number. "
    "Weights are loaded by the names `w_1` and `w_2`.",
)
class _(nn.Module):
    def __init__(self, d_model, d_ff, activation):
        super().__init__()
        up = nn.Linear(d_model, d_ff, bias=False)
        self.layers = nn.Sequential(up, nn.ReLU(), nn.Linear(d_ff, d_model, bias=False))

    def forward(self, x):
        return self.layers(x)


@feed_forward.fault(
    "activation_of_the_class",
    "The activation is kept on the class, not on `self`: the network that was built "
    "last decides for all of them.",
)
class _(nn.Module):
    activations = ()

    def __init__(self, d_model, d_ff, activation):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff, bias=False)
        self.w_2 = nn.Linear(d_ff, d_model, bias=False)
        type(self).activations = (activation,)

    def forward(self, x):
        return self.w_2(self.activations[0](self.w_1(x)))


@feed_forward.fault(
    "weights_shared",
    "Every network of these widths gets the same two maps, so that training one trains "
    "all. Create them in `__init__`.",
)
class _(two_layers(as_it_should)):
    made: dict = {}  # noqa: RUF012

    def __init__(self, d_model, d_ff, activation):
        super().__init__(d_model, d_ff, activation)
        self.w_1, self.w_2 = self.made.setdefault((d_model, d_ff), (self.w_1, self.w_2))


@feed_forward.fault(
    "constant_weights",
    "The weights start all equal. Then all hidden units compute the same, receive the "
    "same gradient, and stay the same for ever.",
)
class _(two_layers(as_it_should)):
    def __init__(self, d_model, d_ff, activation):
        super().__init__(d_model, d_ff, activation)
        nn.init.constant_(self.w_1.weight, 0.1)
        nn.init.constant_(self.w_2.weight, 0.1)


swiglu = Exercise("SwiGLU", lesson="feed_forward")
THREE = ("w_1", "w_3", "w_2")


def swiglu_values(module=None):
    def oracle(x, w_1=None, w_3=None, w_2=None):
        if module is not None:
            w_1, w_3, w_2 = weights(module, *THREE)
        return (F.silu(x @ w_1.T) * (x @ w_3.T)) @ w_2.T

    return oracle


@swiglu.requires(
    "it holds three matrices and no bias: `w_1` and `w_3` from d_model to d_ff, `w_2` back"
)
def _(answer, t):
    module = built(answer, t, 5, 7)
    t.parameter_count(module, 3 * 5 * 7)
    filled(t, module, 5, 7, *THREE)
    built(answer, t, d_model=4, d_ff=11)


@swiglu.requires(
    "the result is (silu(x @ W_1) * (x @ W_3)) @ W_2",
    "Compute one hidden unit by hand with gate −2 and up 3: silu(−2)·3 is −0.72.",
)
def _(answer, t):
    module = filled(t, built(answer, t, 5, 7), 5, 7, *THREE)
    t.agrees(module, swiglu_values(module), probe(2, 3, 5, seed=1, scale=2))


@swiglu.requires(
    "each position is treated alone, however many dimensions stand before the last",
)
def _(answer, t):
    module = filled(t, built(answer, t, 5, 7), 5, 7, *THREE)
    oracle = swiglu_values(module)
    for sizes in ((5,), (3, 5), (1, 1, 5), (2, 3, 4, 5)):
        t.agrees(module, oracle, probe(*sizes, seed=2))
    t.agrees(module, oracle, strided(probe(2, 3, 5, seed=3)))
    t.agrees(module, oracle, probe(3, 2, 5, seed=4).transpose(0, 1))


@swiglu.requires("two networks side by side keep their own weights")
def _(answer, t):
    first = filled(t, built(answer, t, 5, 7), 5, 7, *THREE)
    second = filled(t, built(answer, t, 5, 7), 5, 7, *THREE, seed=5)
    w_1, w_3 = (probe(7, 5, seed=20 + i, scale=5**-0.5).double() for i in range(2))
    w_2 = probe(5, 7, seed=22, scale=7**-0.5).double()
    x = probe(2, 3, 5, seed=6)
    expected = swiglu_values()(x.double(), w_1, w_3, w_2)
    t.close(t.call(first, x), expected, "the first network's result", like=x)
    t.agrees(second, swiglu_values(second), x)


@swiglu.requires("it works a second time, in `eval()`, and in other dtypes")
def _(answer, t):
    module = filled(t, built(answer, t, 5, 7), 5, 7, *THREE)
    oracle = swiglu_values(module)
    t.agrees(module, oracle, probe(2, 3, 5, seed=7))
    t.agrees(module, oracle, probe(3, 4, 5, seed=8))
    module.eval()
    t.agrees(module, oracle, probe(2, 3, 5, seed=7))
    module = copy.deepcopy(module)
    oracle = swiglu_values(module)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        module.to(dtype)
        t.agrees(module, oracle, probe(2, 3, 5, seed=7, dtype=dtype))


@swiglu.requires(
    "gradients reach the input and all three matrices, for large inputs too"
)
def _(answer, t):
    module = built(answer, t, 5, 7)
    varied(t, module, "w_1", "w_3")
    network = with_weights(filled(t, module, 5, 7, *THREE), *THREE)
    matrices = [probe(7, 5, seed=10), probe(7, 5, seed=11), probe(5, 7, seed=12)]
    t.gradients_agree(network, swiglu_values(), probe(2, 3, 5, seed=9), *matrices)
    large = probe(2, 3, 5, seed=13, scale=100)
    t.gradients_agree(network, swiglu_values(), large, *matrices)


@swiglu.requires("it creates nothing on another device")
def _(answer, t):
    module = built(answer, t, 5, 7)
    t.any_device(module, probe(2, 3, 5))


def three_maps(forward, bias=False, names=THREE):
    """A SwiGLU with another `forward(self, x)`, biases or names."""

    class SwiGLU(nn.Module):
        def __init__(self, d_model, d_ff):
            super().__init__()
            gate, up, down = names
            setattr(self, gate, nn.Linear(d_model, d_ff, bias=bias))
            setattr(self, up, nn.Linear(d_model, d_ff, bias=bias))
            setattr(self, down, nn.Linear(d_ff, d_model, bias=bias))

        def forward(self, x):
            return forward(self, x)

    return SwiGLU


def hidden_by(combine):
    """A SwiGLU whose hidden numbers are `combine(x @ W_1, x @ W_3)`."""
    return three_maps(lambda self, x: self.w_2(combine(self.w_1(x), self.w_3(x))))


def right_hidden(gate, up):
    return F.silu(gate) * up


swiglu.fault(
    "bracket",
    "The bracket is misplaced: SiLU is taken of the product of gate and up. It belongs "
    "around the gate alone.",
    hidden_by(lambda gate, up: F.silu(gate * up)),
)
swiglu.fault(
    "exchanged",
    "Gate and up are exchanged: SiLU goes around `w_1`'s result, not `w_3`'s. The shapes "
    "are the same, so nothing but the values shows it, and weights that somebody else "
    "trained give nonsense.",
    hidden_by(lambda gate, up: gate * F.silu(up)),
)
swiglu.fault(
    "no_gate",
    "There is no gate: SiLU of one map goes straight to `w_2`, and the other map is "
    "never used.",
    hidden_by(lambda gate, up: F.silu(gate)),
)
swiglu.fault(
    "up_alone",
    "There is no gate: SiLU of `w_3`'s result goes straight to `w_2`, and `w_1` is "
    "never used.",
    hidden_by(lambda gate, up: F.silu(up)),
)
swiglu.fault(
    "no_activation",
    "Gate and up are multiplied without SiLU; that is the bilinear variant.",
    hidden_by(lambda gate, up: gate * up),
)
swiglu.fault(
    "sigmoid_gate",
    "The gate is a sigmoid. That is GLU, the first of the family; SwiGLU's is SiLU.",
    hidden_by(lambda gate, up: torch.sigmoid(gate) * up),
)
swiglu.fault(
    "gelu_gate",
    "The gate uses GELU. That variant is called GEGLU.",
    hidden_by(lambda gate, up: F.gelu(gate) * up),
)
swiglu.fault(
    "gelu_tanh_gate",
    "The gate uses the tanh form of GELU. That variant is called GEGLU.",
    hidden_by(lambda gate, up: F.gelu(gate, approximate="tanh") * up),
)
swiglu.fault(
    "relu_gate",
    "The gate uses ReLU. That variant is called ReGLU.",
    hidden_by(lambda gate, up: torch.relu(gate) * up),
)
swiglu.fault(
    "silu_on_both",
    "SiLU is applied to gate and up. Up stays as it is, so that the product can have "
    "any sign and size.",
    hidden_by(lambda gate, up: F.silu(gate) * F.silu(up)),
)
swiglu.fault(
    "added",
    "Gate and up are added. A gate multiplies.",
    hidden_by(lambda gate, up: F.silu(gate) + up),
)
swiglu.fault(
    "softmax_gate",
    "The gate is a softmax, so that the hidden units compete. Each gate stands alone.",
    hidden_by(lambda gate, up: torch.softmax(gate, -1) * up),
)
swiglu.fault(
    "sigmoid_of_up",
    "The sigmoid is taken of `w_3`'s result, and `w_1`'s is left as it is.",
    hidden_by(lambda gate, up: gate * torch.sigmoid(up)),
)
swiglu.fault(
    "exp_of_minus_x",
    "SiLU is written with 1 + exp(−gate) here. Where the gate is below −89, the "
    "exponential is infinite and the gradient NaN. Your own `silu` does not have that "
    "problem.",
    hidden_by(lambda gate, up: gate / (1 + torch.exp(-gate)) * up),
)
swiglu.fault(
    "gate_detached",
    "The gate is cut from the graph: `w_1` gets no gradient and never learns.",
    hidden_by(lambda gate, up: F.silu(gate).detach() * up),
)
swiglu.fault(
    "silu_last",
    "SiLU comes after `w_2`, around the whole. It belongs around the gate.",
    three_maps(lambda self, x: F.silu(self.w_2(self.w_1(x) * self.w_3(x)))),
)
swiglu.fault(
    "silu_twice",
    "SiLU is applied to the result too. The output may take any value.",
    three_maps(
        lambda self, x: F.silu(self.w_2(right_hidden(self.w_1(x), self.w_3(x))))
    ),
)
swiglu.fault(
    "residual_inside",
    "The input is added to the result. The block adds it, one level up; here it would "
    "count twice.",
    three_maps(lambda self, x: x + self.w_2(right_hidden(self.w_1(x), self.w_3(x)))),
)
swiglu.fault(
    "normalised",
    "The input is normalised first. The norm is a part of its own, in lesson 06.",
    three_maps(
        lambda self, x: self.w_2(
            right_hidden(
                *(w(F.layer_norm(x, x.shape[-1:])) for w in (self.w_1, self.w_3))
            )
        )
    ),
)
swiglu.fault(
    "silu_of_the_input",
    "SiLU is taken of x before `w_1`. It belongs around `w_1`'s result.",
    three_maps(lambda self, x: self.w_2(self.w_1(F.silu(x)) * self.w_3(x))),
)
swiglu.fault(
    "gate_twice",
    "`w_1`'s result is the gate and is multiplied by itself; `w_3` is never used.",
    hidden_by(lambda gate, up: F.silu(gate) * gate),
)
swiglu.fault(
    "up_twice",
    "`w_3`'s result is gate and up at once; `w_1` is never used.",
    hidden_by(lambda gate, up: F.silu(up) * up),
)
swiglu.fault(
    "minus_the_gate",
    "SiLU is taken of minus the gate, so that it opens where it should shut.",
    hidden_by(lambda gate, up: F.silu(-gate) * up),
)
swiglu.fault(
    "flattened",
    "Batch and time are merged into one dimension and not taken apart again.",
    three_maps(
        lambda self, x: self.w_2(
            right_hidden(*(w(x.flatten(0, -2)) for w in (self.w_1, self.w_3)))
        )
    ),
)
swiglu.fault(
    "three_dimensions_only",
    "It reads exactly three sizes from the shape of x. A single vector, or a batch of "
    "batches, is a stream too: the last dimension is all that matters.",
    three_maps(
        lambda self, x: self.w_2(right_hidden(self.w_1(three_sizes(x)), self.w_3(x)))
    ),
)
swiglu.fault(
    "cast_to_float32",
    "The input is cast to float32, so that the module fails once its weights are "
    "another dtype, and the stream's dtype is lost.",
    three_maps(
        lambda self, x: self.w_2(right_hidden(self.w_1(x.float()), self.w_3(x.float())))
    ),
)
swiglu.fault(
    "input_detached",
    "The input is cut from the graph: the network learns, and nothing before it does.",
    three_maps(
        lambda self, x: self.w_2(
            right_hidden(self.w_1(x.detach()), self.w_3(x.detach()))
        )
    ),
)
swiglu.fault(
    "up_detached",
    "Up is cut from the graph: `w_3` gets no gradient and never learns.",
    hidden_by(lambda gate, up: F.silu(gate) * up.detach()),
)
swiglu.fault(
    "dropout",
    "Dropout sets hidden numbers to zero in training. None is asked for here.",
    three_maps(
        lambda self, x: self.w_2(
            F.dropout(right_hidden(self.w_1(x), self.w_3(x)), 0.1, self.training)
        )
    ),
)
swiglu.fault(
    "positions_mixed",
    "The gate is averaged over positions. This network must treat each position alone.",
    three_maps(
        lambda self, x: self.w_2(
            right_hidden(self.w_1(x).mean(-2, keepdim=True), self.w_3(x))
        )
    ),
)
swiglu.fault(
    "biases",
    "The maps have biases, `nn.Linear`'s default. This course's maps have none.",
    three_maps(
        lambda self, x: self.w_2(right_hidden(self.w_1(x), self.w_3(x))), bias=True
    ),
)
swiglu.fault(
    "up_and_down_exchanged",
    "`w_2` and `w_3` are exchanged: `w_3` is the second way up, `w_2` the way down. The "
    "numbers are those of Llama's own code.",
    three_maps(
        lambda self, x: self.w_3(right_hidden(self.w_1(x), self.w_2(x))),
        names=("w_1", "w_2", "w_3"),
    ),
)
swiglu.fault(
    "other_names",
    "The maps have other names than `w_1`, `w_3` and `w_2`. Weights are loaded by name.",
    three_maps(
        lambda self, x: self.down_proj(
            right_hidden(self.gate_proj(x), self.up_proj(x))
        ),
        names=("gate_proj", "up_proj", "down_proj"),
    ),
)


@swiglu.fault(
    "narrowed_inside",
    "d_ff is cut to two thirds inside. Whoever calls decides the width, with "
    "`swiglu_width`; here d_ff is taken as it is.",
)
class _(hidden_by(right_hidden)):
    def __init__(self, d_model, d_ff):
        super().__init__(d_model, 2 * d_ff // 3)


@swiglu.fault(
    "one_bias",
    "The way down has a bias, `nn.Linear`'s default. This course's maps have none.",
)
class _(hidden_by(right_hidden)):
    def __init__(self, d_model, d_ff):
        super().__init__(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)


@swiglu.fault(
    "matrices_as_printed",
    "The matrices are parameters of your own, in the shape of the formula, d_model × "
    "d_ff. `nn.Linear` stores the transpose and multiplies by it; weights that are "
    "loaded come in its shape.",
)
class _(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_1 = nn.Parameter(torch.randn(d_model, d_ff))
        self.w_3 = nn.Parameter(torch.randn(d_model, d_ff))
        self.w_2 = nn.Parameter(torch.randn(d_ff, d_model))

    def forward(self, x):
        return right_hidden(x @ self.w_1, x @ self.w_3) @ self.w_2


@swiglu.fault(
    "rounded_inside",
    "d_ff is rounded up to a multiple of 32 inside. `swiglu_width` does that for the "
    "caller; here d_ff is taken as it is.",
)
class _(hidden_by(right_hidden)):
    def __init__(self, d_model, d_ff):
        super().__init__(d_model, -(-d_ff // 32) * 32)


@swiglu.fault(
    "gate_and_up_in_one",
    "Gate and up are one matrix with twice the rows. That is fast, and many models do "
    "it; here their weights are loaded under two names, `w_1` and `w_3`.",
)
class _(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_1 = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.w_2 = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.w_2(right_hidden(*self.w_1(x).chunk(2, -1)))


@swiglu.fault(
    "no_parameters",
    "PyTorch finds no parameters. It looks neither into a Python list nor at plain "
    "tensors, so these weights are not trained, saved or moved: assign each map to "
    "`self` as an `nn.Linear`.",
)
class _(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        pairs = ((d_model, d_ff), (d_model, d_ff), (d_ff, d_model))
        self.maps = [nn.Linear(*pair, bias=False) for pair in pairs]

    def forward(self, x):
        gate, up, down = self.maps
        return down(right_hidden(gate(x), up(x)))


@swiglu.fault("widths_exchanged", "d_model and d_ff have changed places.")
class _(hidden_by(right_hidden)):
    def __init__(self, d_model, d_ff):
        super().__init__(d_ff, d_model)


@swiglu.fault(
    "one_map_for_both",
    "Gate and up are the same map. They need weights of their own.",
)
class _(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff, bias=False)
        self.w_2 = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.w_2(right_hidden(self.w_1(x), self.w_1(x)))


@swiglu.fault(
    "weights_shared",
    "Every network of these widths gets the same maps, so that training one trains all. "
    "Create them in `__init__`.",
)
class _(hidden_by(right_hidden)):
    made: dict = {}  # noqa: RUF012

    def __init__(self, d_model, d_ff):
        super().__init__(d_model, d_ff)
        self.w_1, self.w_3, self.w_2 = self.made.setdefault(
            (d_model, d_ff), (self.w_1, self.w_3, self.w_2)
        )


@swiglu.fault(
    "constant_weights",
    "The weights start all equal. Then all hidden units compute the same, receive the "
    "same gradient, and stay the same for ever.",
)
class _(hidden_by(right_hidden)):
    def __init__(self, d_model, d_ff):
        super().__init__(d_model, d_ff)
        for w in (self.w_1, self.w_3, self.w_2):
            nn.init.constant_(w.weight, 0.1)


# Counting --------------------------------------------------------------------------

width = Exercise("swiglu_width", lesson="feed_forward")


def exact_width(d_model, multiple_of=32):
    return math.ceil(Fraction(8 * d_model, 3 * multiple_of)) * multiple_of


def same_width(answer, t, *args, **kwargs):
    actual = t.call(answer, *args, **kwargs)
    t.equal(actual, exact_width(*args, **kwargs), "the width")
    t.true(
        isinstance(actual, int),
        f"The width is of type {type(actual).__name__}, expected an int: `nn.Linear` "
        "takes no other.",
    )


@width.requires("the width is 8/3·d_model, rounded up to a multiple of 32")
def _(answer, t):
    for d_model in (64, 100, 512, 5):
        same_width(answer, t, d_model)


@width.requires(
    "a width that is a multiple already stays as it is",
    "Try it by hand with d_model 12: 8/3 of it is exactly 32.",
)
def _(answer, t):
    for d_model in (12, 24, 768, 12_288):
        same_width(answer, t, d_model)


@width.requires("it works for any other multiple, by position and by name")
def _(answer, t):
    same_width(answer, t, 4096, 256)
    same_width(answer, t, 64, 100)
    same_width(answer, t, 96, 64)
    same_width(answer, t, d_model=24, multiple_of=8)
    same_width(answer, t, 12, multiple_of=1)


@width.requires(
    "no width falls below 8/3·d_model, nor a whole multiple above, for any size",
    "Where is a fraction cut off before the rounding, or a constant not exact?",
)
def _(answer, t):
    for d_model in (1, 2, 5, 7, 385, 4097, 12_289, 36_865, 3 * 2**20 + 1):
        for multiple_of in (1, 2, 3, 32, 96):
            same_width(answer, t, d_model, multiple_of)


width.fault(
    "cut_off_first",
    "The fraction is cut off before the rounding, as Llama's own code does. With small "
    "multiples the result falls below 8/3·d_model.",
    lambda d_model, multiple_of=32: -(-(8 * d_model // 3) // multiple_of) * multiple_of,
)
width.fault(
    "rounded_down",
    "It is rounded down, so that the network is smaller than the one it replaces.",
    lambda d_model, multiple_of=32: 8 * d_model // 3 // multiple_of * multiple_of,
)
width.fault(
    "nearest",
    "It is rounded to the nearest multiple; the width must not fall below 8/3·d_model.",
    lambda d_model, multiple_of=32: round(8 * d_model / 3 / multiple_of) * multiple_of,
)
width.fault(
    "four_times",
    "This is the classic width, 4·d_model. With three matrices in place of two that is "
    "half as many parameters again.",
    lambda d_model, multiple_of=32: -(-4 * d_model // multiple_of) * multiple_of,
)
width.fault(
    "two_thirds_of_d_model",
    "This is 2/3 of d_model. It is two thirds of the *classic width*, which is "
    "4·d_model.",
    lambda d_model, multiple_of=32: -(-2 * d_model // (3 * multiple_of)) * multiple_of,
)
width.fault(
    "inverse",
    "The fraction is upside down: 3/8.",
    lambda d_model, multiple_of=32: -(-3 * d_model // (8 * multiple_of)) * multiple_of,
)
width.fault(
    "no_multiple",
    "8/3·d_model is rounded up to a whole number, but not to a multiple.",
    lambda d_model, multiple_of=32: -(-8 * d_model // 3),
)
width.fault(
    "always_up",
    "A width that is a multiple already goes up to the next one.",
    lambda d_model, multiple_of=32: (8 * d_model // 3 // multiple_of + 1) * multiple_of,
)
width.fault(
    "multiple_ignored",
    "It is rounded to a multiple of 32 whatever `multiple_of` says.",
    lambda d_model, multiple_of=32: exact_width(d_model),
)
width.fault(
    "number_of_multiples",
    "This is how many multiples are needed. The width is that many times `multiple_of`.",
    lambda d_model, multiple_of=32: -(-8 * d_model // (3 * multiple_of)),
)
width.fault(
    "added_bits",
    "The rounding sets the lowest bits to 0, which works for powers of two alone. "
    "`multiple_of` may be any number.",
    lambda d_model, multiple_of=32: (
        (math.ceil(Fraction(8 * d_model, 3)) + multiple_of - 1) & -multiple_of
    ),
)
width.fault(
    "default_64",
    "The default of `multiple_of` is 64; here it is 32.",
    lambda d_model, multiple_of=64: exact_width(d_model, multiple_of),
)
width.fault(
    "other_default",
    "The default of `multiple_of` is 256, as in Llama's code; here it is 32.",
    lambda d_model, multiple_of=256: exact_width(d_model, multiple_of),
)
width.fault(
    "power_of_two",
    "It is rounded up to a power of two.",
    lambda d_model, multiple_of=32: 2 ** math.ceil(math.log2(8 * d_model / 3)),
)
width.fault(
    "model_rounded_first",
    "d_model is rounded up first, and the factor applied afterwards.",
    lambda d_model, multiple_of=32: math.ceil(
        Fraction(8, 3) * (-(-d_model // multiple_of) * multiple_of)
    ),
)
width.fault(
    "factor_2_67",
    "The factor is 2.67, a little more than 8/3. An exact multiple is pushed to the next "
    "one.",
    lambda d_model, multiple_of=32: (
        math.ceil(2.67 * d_model / multiple_of) * multiple_of
    ),
)
width.fault(
    "factor_2_667",
    "The factor is 2.667, a little more than 8/3. For wide models an exact multiple is "
    "pushed to the next one.",
    lambda d_model, multiple_of=32: (
        math.ceil(2.667 * d_model / multiple_of) * multiple_of
    ),
)
width.fault(
    "factor_2_66",
    "The factor is 2.66, a little less than 8/3, so that some widths fall below it.",
    lambda d_model, multiple_of=32: (
        math.ceil(2.66 * d_model / multiple_of) * multiple_of
    ),
)
width.fault(
    "factor_2_6666",
    "The factor is 2.6666, a little less than 8/3. For wide models the result falls "
    "below it.",
    lambda d_model, multiple_of=32: (
        math.ceil(2.6666 * d_model / multiple_of) * multiple_of
    ),
)
width.fault(
    "float_result",
    "The number is right, but it is a float, and `nn.Linear` takes only an int.",
    lambda d_model, multiple_of=32: float(exact_width(d_model, multiple_of)),
)

block = Exercise("block_parameters", lesson="feed_forward")


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


def same_counts(answer, t, *args, **kwargs):
    actual = t.call(answer, *args, **kwargs)
    expected = counted(*args, **kwargs)
    t.true(
        isinstance(actual, dict),
        f"The result is of type {type(actual).__name__}, expected a dict.",
    )
    t.true(
        set(actual) == set(expected),
        f"The keys are {', '.join(map(repr, actual))}; expected are 'attention' and "
        "'feed_forward', and no others.",
    )
    for key, number in expected.items():
        t.equal(actual[key], number, f"the count of {key!r}")
        t.true(
            isinstance(actual[key], int),
            f"The count of {key!r} is of type {type(actual[key]).__name__}, expected an "
            "int.",
        )


@block.requires("the classic block: as many key and value heads as heads, no gate")
def _(answer, t):
    same_counts(answer, t, 12, 3, 3, 50, False)
    same_counts(answer, t, 768, 12, 12, 3072, False)


@block.requires(
    "fewer key and value heads make the key and value matrices narrower",
    "Which of the four matrices depend on n_kv_heads? Print the shapes in your own "
    "`MultiHeadAttention`.",
)
def _(answer, t):
    same_counts(answer, t, 24, 6, 2, 70, False)
    same_counts(answer, t, 24, 6, 1, 70, False)


@block.requires("a gated network has one more matrix")
def _(answer, t):
    same_counts(answer, t, 24, 6, 6, 70, True)
    same_counts(answer, t, d_model=576, n_heads=9, n_kv_heads=3, d_ff=1536, gated=True)
    same_counts(answer, t, 4096, 32, 8, 14_336, True)


@block.requires("heads that do not divide d_model are a ValueError with both numbers")
def _(answer, t):
    t.raises(
        ValueError, answer, 30, 4, 4, 50, False,
        mentions=(30, 4), because="4 heads do not divide a d_model of 30",
    )  # fmt: skip


@block.requires(
    "key and value heads that do not divide the heads are a ValueError with both numbers"
)
def _(answer, t):
    t.raises(
        ValueError, answer, 72, 9, 6, 50, True,
        mentions=(9, 6), because="6 key and value heads cannot serve 9 heads evenly",
    )  # fmt: skip
    t.raises(
        ValueError, answer, 40, 5, 10, 60, True,
        mentions=(5, 10), because="10 key and value heads are more than 5 heads",
    )  # fmt: skip


def counting(attention=None, feed_forward=None, errors=True, heads=True, kv_heads=True):
    """A `block_parameters` with other counts, or without one of its errors."""

    def block_parameters(d_model, n_heads, n_kv_heads, d_ff, gated):
        if errors and heads and d_model % n_heads:
            raise ValueError(f"d_model {d_model} is not divisible by {n_heads} heads")
        if errors and kv_heads and n_heads % n_kv_heads:
            raise ValueError(f"{n_heads} heads cannot share {n_kv_heads} KV heads")
        d_kv = n_kv_heads * (d_model // n_heads)
        own = attention or (lambda d, d_kv, h, kv: 2 * d * d + 2 * d * d_kv)
        other = feed_forward or (lambda d, d_ff, gated: (2 + gated) * d * d_ff)
        return {
            "attention": own(d_model, d_kv, n_heads, n_kv_heads),
            "feed_forward": other(d_model, d_ff, gated),
        }

    return block_parameters


block.fault(
    "kv_heads_ignored",
    "Keys and values are counted as if every head had its own.",
    counting(lambda d, d_kv, h, kv: 4 * d * d),
)
block.fault(
    "no_output",
    "`w_o` is missing: after the heads are merged one more matrix follows.",
    counting(lambda d, d_kv, h, kv: d * d + 2 * d * d_kv),
)
block.fault(
    "output_narrow",
    "`w_o` is counted as narrow as the keys. It takes all the query heads.",
    counting(lambda d, d_kv, h, kv: d * d + 3 * d * d_kv),
)
block.fault(
    "queries_narrow",
    "All four matrices are counted as narrow as the keys. Queries keep all their heads.",
    counting(lambda d, d_kv, h, kv: 4 * d * d_kv),
)
block.fault(
    "keys_without_values",
    "Keys and values are counted once. They are two matrices.",
    counting(lambda d, d_kv, h, kv: 2 * d * d + d * d_kv),
)
block.fault(
    "heads_full_width",
    "Every head is counted d_model wide. The heads share that width.",
    counting(lambda d, d_kv, h, kv: 2 * d * d * h + 2 * d * d * kv),
)
block.fault(
    "one_head",
    "One head is counted, d_model // n_heads wide.",
    counting(lambda d, d_kv, h, kv: 4 * d * (d // h)),
)
block.fault(
    "kv_matrices_divided_by_kv_heads",
    "The width of keys and values is d_model divided by n_kv_heads, or the group size in "
    "heads. They hold n_kv_heads heads, each as wide as a query head.",
    counting(lambda d, d_kv, h, kv: 2 * d * d + 2 * d * (d // kv)),
)
block.fault(
    "gate_ignored",
    "Two matrices are counted whether there is a gate or not. The gate is a third.",
    counting(feed_forward=lambda d, d_ff, gated: 2 * d * d_ff),
)
block.fault(
    "always_gated",
    "Three matrices are counted whether there is a gate or not.",
    counting(feed_forward=lambda d, d_ff, gated: 3 * d * d_ff),
)
block.fault(
    "gate_reversed",
    "`gated` is read the other way round.",
    counting(feed_forward=lambda d, d_ff, gated: (3 - gated) * d * d_ff),
)
block.fault(
    "one_matrix",
    "The feed-forward network goes up and comes down: one matrix more than you count.",
    counting(feed_forward=lambda d, d_ff, gated: (1 + gated) * d * d_ff),
)
block.fault(
    "width_narrowed",
    "With a gate, d_ff is cut to two thirds. The width that was given is the width.",
    counting(
        feed_forward=lambda d, d_ff, gated: (
            3 * d * (2 * d_ff // 3) if gated else 2 * d * d_ff
        )
    ),
)
block.fault(
    "width_assumed",
    "4·d_model is taken for the width, whatever d_ff says.",
    counting(feed_forward=lambda d, d_ff, gated: (2 + gated) * 4 * d * d),
)
block.fault(
    "biases_counted",
    "Biases are counted. This course's maps have none.",
    counting(
        lambda d, d_kv, h, kv: 2 * d * d + 2 * d * d_kv + 2 * d + 2 * d_kv,
        lambda d, d_ff, gated: (2 + gated) * d * d_ff + (1 + gated) * d_ff + d,
    ),
)
block.fault(
    "feed_forward_biases_counted",
    "The feed-forward network's biases are counted. This course's maps have none.",
    counting(
        feed_forward=lambda d, d_ff, gated: (
            (2 + gated) * d * d_ff + (1 + gated) * d_ff + d
        )
    ),
)
block.fault(
    "norms_counted",
    "The norms are counted too. Here it is weight matrices alone.",
    counting(
        lambda d, d_kv, h, kv: 2 * d * d + 2 * d * d_kv + d,
        lambda d, d_ff, gated: (2 + gated) * d * d_ff + d,
    ),
)
block.fault(
    "floats",
    "The counts are floats, from a division with `/`. Counts are whole numbers.",
    counting(
        lambda d, d_kv, h, kv: 2.0 * d * d + 2.0 * d * d_kv,
        lambda d, d_ff, gated: (2.0 + gated) * d * d_ff,
    ),
)
block.fault(
    "flops",
    "These are floating-point operations per token, two for every weight.",
    counting(
        lambda d, d_kv, h, kv: 2 * (2 * d * d + 2 * d * d_kv),
        lambda d, d_ff, gated: 2 * (2 + gated) * d * d_ff,
    ),
)
block.fault(
    "heads_unchecked",
    "A d_model that the heads do not divide is let through.",
    counting(heads=False),
)
block.fault(
    "kv_heads_unchecked",
    "Key and value heads that do not divide the heads are let through: 9 heads cannot "
    "share 6 evenly.",
    counting(kv_heads=False),
)
block.fault(
    "no_errors",
    "Nothing is refused: with head counts that do not divide, a count comes out for a "
    "block that cannot exist.",
    counting(errors=False),
)


@block.fault("halves_exchanged", "The two counts stand under each other's key.")
def _(d_model, n_heads, n_kv_heads, d_ff, gated):
    counts = counting()(d_model, n_heads, n_kv_heads, d_ff, gated)
    return dict(zip(counts, [*counts.values()][::-1], strict=True))


@block.fault(
    "total_added",
    "The dict holds a total beside the two parts, so that whoever adds up its values "
    "counts everything twice.",
)
def _(d_model, n_heads, n_kv_heads, d_ff, gated):
    counts = counting()(d_model, n_heads, n_kv_heads, d_ff, gated)
    return {**counts, "total": sum(counts.values())}


@block.fault("total_alone", "One number comes back, the sum. A dict of two is due.")
def _(d_model, n_heads, n_kv_heads, d_ff, gated):
    return sum(counting()(d_model, n_heads, n_kv_heads, d_ff, gated).values())


@block.fault(
    "assertion",
    "An `assert` refuses the wrong sizes. It raises AssertionError, says nothing, and is "
    "gone when Python runs with -O: raise a ValueError.",
)
def _(d_model, n_heads, n_kv_heads, d_ff, gated):
    assert d_model % n_heads == 0
    assert n_heads % n_kv_heads == 0
    return counting()(d_model, n_heads, n_kv_heads, d_ff, gated)


@block.fault(
    "error_without_numbers",
    "The ValueError does not say which numbers do not fit. Whoever reads it has to go "
    "and look.",
)
def _(d_model, n_heads, n_kv_heads, d_ff, gated):
    if d_model % n_heads or n_heads % n_kv_heads:
        raise ValueError("sizes do not fit")
    return counting()(d_model, n_heads, n_kv_heads, d_ff, gated)


# Where the parts meet --------------------------------------------------------------

stack = Joint(
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


def sublayers(parts, t):
    """Two blocks of the learner's parts: attention, GELU, attention, SwiGLU."""
    made = [
        built(parts["MultiHeadAttention"], t, 12, 3),
        built(parts["FeedForward"], t, 12, 20, parts["gelu"]),
        built(parts["MultiHeadAttention"], t, 12, 6, 2),
        built(parts["SwiGLU"], t, 12, 15),
    ]
    kv_widths = {0: 12, 2: 4}
    for i, module in enumerate(made):
        if i in kv_widths:
            widths = (12, kv_widths[i], kv_widths[i], 12)
            for j, (name, rows) in enumerate(zip(FOUR, widths, strict=True)):
                value = probe(rows, 12, seed=60 + 4 * i + j, scale=0.4)
                t.load(module, **{name: value})
        else:
            names, d_ff = ((TWO, 20), (THREE, 15))[i // 2]
            filled(t, module, 12, d_ff, *names, seed=10 * i)
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


@stack.requires(
    "four sublayers, each added to the stream, give the stream that their formulas give",
    "Each part takes the stream `(B, T, d_model)`, leaves it as it is, and returns what "
    "is to be added, in the same shape and dtype.",
)
def _(parts, t):
    made = sublayers(parts, t)
    mask = t.call(parts["causal_mask"], 5)
    truth = true_sublayers(made)
    x = probe(2, 5, 12, seed=50)
    for n, name in enumerate(SUBLAYERS, start=1):
        t.agrees(
            stream_after(n, made, mask),
            stream_after(n, truth),
            x,
            what=f"the stream after {name}",
        )


@stack.requires("a later token changes nothing before it, in the whole stack")
def _(parts, t):
    made = sublayers(parts, t)
    run = stream_after(4, made, t.call(parts["causal_mask"], 5))
    x = probe(2, 5, 12, seed=51)
    changed = torch.cat([x[:, :3], probe(2, 2, 12, seed=52)], dim=1)
    before, after = t.call(run, x)[:, :3], t.call(run, changed)[:, :3]
    t.close(after, before, "the stream before the changed tokens")


@stack.requires("the loss at the end reaches every weight of every sublayer")
def _(parts, t):
    made = sublayers(parts, t)
    run = stream_after(4, made, t.call(parts["causal_mask"], 5))
    (t.call(run, probe(2, 5, 12, seed=53)) * probe(2, 5, 12, seed=54)).sum().backward()
    for name, module in zip(SUBLAYERS, made, strict=True):
        for path, p in module.named_parameters():
            t.true(
                p.grad is not None
                and p.grad.isfinite().all()
                and p.grad.abs().max() > 0,
                f"`{path}` of {name} gets no gradient (or a NaN) from the end of the "
                "stack.",
            )


@stack.requires("the stack works in float64 and in bfloat16 as well")
def _(parts, t):
    for dtype in (torch.float64, torch.bfloat16):
        made = [module.to(dtype) for module in sublayers(parts, t)]
        run = stream_after(4, made, t.call(parts["causal_mask"], 5))
        truth = stream_after(4, true_sublayers(made))
        x = probe(2, 5, 12, seed=55, dtype=dtype)
        t.agrees(run, truth, x, what="the stream after both blocks")


def _stream_overwritten(self, x):
    x += as_it_should(self, x)
    return x


stack.fault(
    "residual_twice",
    "The feed-forward network adds its input to its result, and the block adds it once "
    "more: the stream counts twice where the two meet.",
    {"FeedForward": two_layers(lambda self, x: x + as_it_should(self, x))},
)
stack.fault(
    "stream_overwritten",
    "The feed-forward network writes into the stream that attention handed it, so that "
    "the sum of the two has lost what was there before.",
    {"FeedForward": two_layers(_stream_overwritten)},
)
stack.fault(
    "batch_and_time_merged",
    "The feed-forward network returns batch and time as one dimension, which no longer "
    "fits the stream that attention expects.",
    {"FeedForward": two_layers(lambda self, x: as_it_should(self, x.flatten(0, 1)))},
)
stack.fault(
    "positions_mixed",
    "The feed-forward network lets positions see each other. Behind attention's causal "
    "mask that opens a second door, through which the future comes in.",
    {
        "FeedForward": two_layers(
            lambda self, x: as_it_should(self, x - x.mean(1, True))
        )
    },
)
stack.fault(
    "no_gradient",
    "The feed-forward network cuts the graph. The residual path around it still works, "
    "so that training seems to run, without its `w_1`.",
    {
        "FeedForward": two_layers(
            lambda self, x: self.w_2(self.activation(self.w_1(x)).detach())
        )
    },
)
stack.fault(
    "float32_whatever_comes",
    "SwiGLU returns float32 whatever stream it was given. Added to a stream of another "
    "dtype that changes the dtype of everything after it.",
    {
        "SwiGLU": three_maps(
            lambda self, x: self.w_2(right_hidden(self.w_1(x), self.w_3(x))).float()
        )
    },
)
stack.fault(
    "gate_and_up_exchanged",
    "SwiGLU takes `w_3` for its gate: with the same weights by name, the second block "
    "computes something else.",
    {"SwiGLU": hidden_by(lambda gate, up: gate * F.silu(up))},
)
stack.fault(
    "activation_not_passed_on",
    "The network between the two attentions does not call the activation that it was "
    "given. Without it the stream passes through one more linear map.",
    {"FeedForward": two_layers(lambda self, x: self.w_2(self.w_1(x)))},
)
stack.fault(
    "tanh_gelu",
    "The `gelu` that FeedForward was given is the tanh form; the stream is off by a "
    "little, everywhere.",
    {"gelu": partial(F.gelu, approximate="tanh")},
)


class _Attention(nn.Module):
    """Attention for the faults, with the mask or the layout read in another way."""

    bias = False

    def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
        super().__init__()
        n_kv_heads = n_kv_heads or n_heads
        d_head = d_head or d_model // n_heads
        self.n_heads, self.n_kv_heads, self.d_head = n_heads, n_kv_heads, d_head
        self.w_q = nn.Linear(d_model, n_heads * d_head, bias=self.bias)
        self.w_k = nn.Linear(d_model, n_kv_heads * d_head, bias=self.bias)
        self.w_v = nn.Linear(d_model, n_kv_heads * d_head, bias=self.bias)
        self.w_o = nn.Linear(n_heads * d_head, d_model, bias=self.bias)

    def forward(self, x, mask=None):
        q, k, v = (
            w(x).unflatten(-1, (n, self.d_head)).transpose(1, 2)
            for w, n in (
                (self.w_q, self.n_heads),
                (self.w_k, self.n_kv_heads),
                (self.w_v, self.n_kv_heads),
            )
        )
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return self.w_o(out.transpose(1, 2).flatten(2))


class _MaskReversed(_Attention):
    def forward(self, x, mask=None):
        return super().forward(x, None if mask is None else ~mask)


class _MaskIgnored(_Attention):
    def forward(self, x, mask=None):
        return super().forward(x)


class _TimeFirst(_Attention):
    def forward(self, x, mask=None):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


stack.fault(
    "mask_reversed",
    "Attention takes the mask's True for “hidden”, while `causal_mask` means “may look”.",
    {"MultiHeadAttention": _MaskReversed},
)
stack.fault(
    "mask_ignored",
    "Attention does not use the mask that it is given: every position sees the future.",
    {"MultiHeadAttention": _MaskIgnored},
)
stack.fault(
    "time_first",
    "Attention takes the first dimension for time. Here the batch comes first, and the "
    "feed-forward network cannot notice, because it treats every vector alone.",
    {"MultiHeadAttention": _TimeFirst},
)


class _Biased(_Attention):
    bias = True


class _FullKeys(_Attention):
    def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
        super().__init__(d_model, n_heads, n_heads, d_head)


class _Narrowed(hidden_by(right_hidden)):
    def __init__(self, d_model, d_ff):
        super().__init__(d_model, 2 * d_ff // 3)


parameters = Joint(
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


def same_as_modules(parts, t, d_model, n_heads, n_kv_heads, d_ff, gated):
    counts = t.call(
        parts["block_parameters"], d_model, n_heads, n_kv_heads, d_ff, gated
    )
    made = {
        "attention": built(
            parts["MultiHeadAttention"], t, d_model, n_heads, n_kv_heads
        ),
        "feed_forward": built(parts["SwiGLU"], t, d_model, d_ff)
        if gated
        else built(parts["FeedForward"], t, d_model, d_ff, torch.relu),
    }
    for key, module in made.items():
        shapes = ", ".join(
            f"{n} {tuple(p.shape)}" for n, p in module.named_parameters()
        )
        t.true(
            counts[key] == size(module),
            f"`block_parameters` says {counts[key]:,} for {key!r}, and the "
            f"{type(module).__name__} of that shape holds {size(module):,}: {shapes}.",
        )


@parameters.requires("the classic block counts what its two modules hold")
def _(parts, t):
    same_as_modules(parts, t, 24, 3, 3, 96, False)


@parameters.requires(
    "a block with grouped keys and a gate counts what its modules hold"
)
def _(parts, t):
    same_as_modules(parts, t, 24, 6, 2, 70, True)
    same_as_modules(parts, t, 40, 5, 1, 64, True)


@parameters.requires(
    "SwiGLU at `swiglu_width` is as large as the classic network, but for the rounding"
)
def _(parts, t):
    for d_model in (48, 60):
        wide = t.call(parts["swiglu_width"], d_model, 8)
        gated = size(built(parts["SwiGLU"], t, d_model, wide))
        classic = size(built(parts["FeedForward"], t, d_model, 4 * d_model, torch.relu))
        t.true(
            0 <= gated - classic < 3 * d_model * 8,
            f"With d_model {d_model}, SwiGLU at width {wide} holds {gated:,} parameters "
            f"and the classic network {classic:,}: they should differ by less than one "
            "step of the width.",
        )


parameters.fault(
    "attention_with_biases",
    "Attention has biases, and the count of the block leaves them out.",
    {"MultiHeadAttention": _Biased},
)
parameters.fault(
    "feed_forward_with_biases",
    "The classic network has biases, and the count of the block leaves them out.",
    {"FeedForward": two_layers(as_it_should, bias=True)},
)
parameters.fault(
    "swiglu_with_biases",
    "SwiGLU has biases, and the count of the block leaves them out.",
    {"SwiGLU": three_maps(lambda self, x: self.w_2(self.w_1(x) * self.w_3(x)), True)},
)
parameters.fault(
    "kv_heads_not_counted",
    "The count takes keys and values for as wide as the queries; the module makes them "
    "narrower.",
    {"block_parameters": counting(lambda d, d_kv, h, kv: 4 * d * d)},
)
parameters.fault(
    "gate_not_counted",
    "The count has two matrices for a network with a gate; the module has three.",
    {"block_parameters": counting(feed_forward=lambda d, d_ff, gated: 2 * d * d_ff)},
)
parameters.fault(
    "swiglu_narrows_itself",
    "SwiGLU cuts the width that it is given to two thirds, and `swiglu_width` has done "
    "so already.",
    {"SwiGLU": _Narrowed},
)
parameters.fault(
    "classic_width",
    "`swiglu_width` gives the classic width, so that the gated network is half as large "
    "again as the one that it replaces.",
    {
        "swiglu_width": lambda d_model, multiple_of=32: (
            -(-4 * d_model // multiple_of) * multiple_of
        )
    },
)

parameters.fault(
    "kv_heads_ignored_by_attention",
    "Attention builds a key and a value head for every query head, whatever n_kv_heads "
    "says; the count assumes fewer.",
    {"MultiHeadAttention": _FullKeys},
)
