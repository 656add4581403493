"""Lesson 05: right answers in other forms, and wrong ones that no fault lists."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from solutions import feed_forward as reference
from solutions.multi_head import MultiHeadAttention
from utils.check import evaluate, evaluate_joint
from utils.check.exercise import Joint
from utils.probe import probe


def passes(answer, name):
    report = evaluate(answer, name)
    assert report.status == "passed", report.message


def fails(answer, name):
    report = evaluate(answer, name)
    assert report.status == "failed", f"{name} passes"
    assert len(report.lines) >= 2


# The references against their oracles ------------------------------------------------


def test_references_agree_with_pytorch():
    x = probe(4, 100, scale=3, dtype=torch.float64)
    torch.testing.assert_close(reference.silu(x), F.silu(x))
    torch.testing.assert_close(reference.gelu(x), F.gelu(x))


def test_block_parameters_of_models_that_exist():
    smollm2 = reference.block_parameters(576, 9, 3, 1536, True)
    assert smollm2 == {"attention": 884_736, "feed_forward": 2_654_208}
    llama_3 = reference.block_parameters(4096, 32, 8, 14_336, True)
    assert llama_3 == {"attention": 41_943_040, "feed_forward": 176_160_768}
    gpt_3 = reference.block_parameters(12_288, 96, 96, 49_152, False)
    assert round(96 * sum(gpt_3.values()) / 1e9) == 174  # 175 with the embeddings


def test_swiglu_width_is_exact():
    for d_model in range(1, 2000):
        for multiple_of in (1, 3, 32, 100):
            width = reference.swiglu_width(d_model, multiple_of)
            exact = Fraction(8 * d_model, 3)
            assert width % multiple_of == 0
            assert exact <= width < exact + multiple_of


def test_parameters_are_half_of_a_token_s_flops():
    with torch.device("meta"):
        parts = {
            "attention": MultiHeadAttention(24, 6, 2),
            "feed_forward": reference.SwiGLU(24, 64),
        }
        x = torch.empty(1, 5, 24)
    counts = reference.block_parameters(24, 6, 2, 64, True)
    for name, part in parts.items():
        with FlopCounterMode(display=False) as counter:
            part(x)
        scores = 4 * 5 * 5 * 24 if name == "attention" else 0
        assert counter.get_total_flops() == 5 * 2 * counts[name] + scores


# Right answers in other forms --------------------------------------------------------


def silu_loop(x):
    values = [v * torch.sigmoid(v) for v in x.flatten()]
    return torch.stack(values).reshape(x.shape)


RIGHT_SILU = {
    "built in": F.silu,
    "module": nn.SiLU(),
    "loop": silu_loop,
    "float64 inside": lambda x: F.silu(x.double()).to(x.dtype),
    "expit": lambda x: torch.special.expit(x) * x,
    "logsigmoid": lambda x: x * F.logsigmoid(x).exp(),
    "sigmoid method": lambda x: x.sigmoid().mul(x),
    "tanh in float64": lambda x: (
        0.5 * x.double() * (1 + torch.tanh(x.double() / 2))
    ).to(x.dtype),
    "exp of minus the size": lambda x: (
        x
        * torch.where(x < 0, torch.exp(-x.abs()), torch.ones_like(x))
        / (1 + torch.exp(-x.abs()))
    ),
}

RIGHT_GELU = {
    "built in": F.gelu,
    "module": nn.GELU(),
    "ndtr": lambda x: x * torch.special.ndtr(x),
    "erfc": lambda x: 0.5 * x * torch.special.erfc(-x / 2**0.5),
    "normal distribution": lambda x: (
        (x.float() * torch.distributions.Normal(0.0, 1.0).cdf(x.float())).to(x.dtype)
        if x.dtype != torch.float64
        else x * torch.special.ndtr(x)
    ),
    "other order": lambda x: x / 2 + x / 2 * torch.erf(x * math.sqrt(0.5)),
    "loop": lambda x: torch.stack(
        [0.5 * v * (1 + torch.erf(v / 2**0.5)) for v in x.flatten()]
    ).reshape(x.shape),
}


@pytest.mark.parametrize("form", RIGHT_SILU)
def test_right_silu(form):
    answer = RIGHT_SILU[form]
    passes(answer if not isinstance(answer, nn.Module) else answer.forward, "silu")


@pytest.mark.parametrize("form", RIGHT_GELU)
def test_right_gelu(form):
    answer = RIGHT_GELU[form]
    passes(answer if not isinstance(answer, nn.Module) else answer.forward, "gelu")


class Functional(nn.Module):
    def __init__(self, d_model, d_ff, activation):
        super().__init__()
        self.w_2 = nn.Linear(d_ff, d_model, bias=False)  # in the other order
        self.w_1 = nn.Linear(d_model, d_ff, bias=False)
        self.bend = activation

    def forward(self, x):
        return F.linear(self.bend(F.linear(x, self.w_1.weight)), self.w_2.weight)


class Bare(nn.Module):
    """Parameters without `nn.Linear`, and einsum."""

    def __init__(self, d_model, d_ff, activation):
        super().__init__()
        self.w_1 = nn.Parameter(torch.randn(d_ff, d_model) * d_model**-0.5)
        self.w_2 = nn.Parameter(torch.zeros(d_model, d_ff))
        self.activation = activation

    def forward(self, x):
        hidden = self.activation(torch.einsum("...d,fd->...f", x, self.w_1))
        return torch.einsum("...f,df->...d", hidden, self.w_2)


class UnitByUnit(Functional):
    def forward(self, x):
        out = torch.zeros_like(x)
        for j in range(self.w_1.out_features):
            found = self.bend((x * self.w_1.weight[j]).sum(-1, keepdim=True))
            out = out + found * self.w_2.weight[:, j]
        return out


@pytest.mark.parametrize("answer", [Functional, Bare, UnitByUnit])
def test_right_feed_forward(answer):
    passes(answer, "FeedForward")


class BuiltIn(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_2 = nn.Linear(d_ff, d_model, bias=False)
        self.w_3 = nn.Linear(d_model, d_ff, bias=False)
        self.w_1 = nn.Linear(d_model, d_ff, bias=False)

    def forward(self, x):
        return self.w_2(self.w_3(x) * F.silu(self.w_1(x)))


class OneProduct(BuiltIn):
    def forward(self, x):
        both = x @ torch.cat([self.w_1.weight, self.w_3.weight]).T
        gate, up = both.chunk(2, dim=-1)
        return F.linear(gate.sigmoid() * gate * up, self.w_2.weight)


class Float64Inside(BuiltIn):
    def forward(self, x):
        gate, up = (
            F.linear(x.double(), w.weight.double()) for w in (self.w_1, self.w_3)
        )
        return F.linear(F.silu(gate) * up, self.w_2.weight.double()).to(x.dtype)


@pytest.mark.parametrize("answer", [BuiltIn, OneProduct, Float64Inside])
def test_right_swiglu(answer):
    passes(answer, "SwiGLU")


def width_by_loop(d_model, multiple_of=32):
    width = 0
    while 3 * width < 8 * d_model:
        width += multiple_of
    return width


RIGHT_WIDTH = {
    "ceil": lambda d_model, multiple_of=32: (
        math.ceil(8 * d_model / 3 / multiple_of) * multiple_of
    ),
    "classic width first": lambda d_model, multiple_of=32: (
        math.ceil(4 * d_model * 2 / 3 / multiple_of) * multiple_of
    ),
    "llama's rounding of the ceiling": lambda d_model, multiple_of=32: (
        multiple_of * ((-(-8 * d_model // 3) + multiple_of - 1) // multiple_of)
    ),
    "remainder": lambda d_model, multiple_of=32: (
        (width := -(-8 * d_model // 3)) + -width % multiple_of
    ),
}


@pytest.mark.parametrize("form", RIGHT_WIDTH)
def test_right_width(form):
    passes(RIGHT_WIDTH[form], "swiglu_width")


def block_by_modules(d_model, n_heads, n_kv_heads, d_ff, gated):
    with torch.device("meta"):
        attention = MultiHeadAttention(d_model, n_heads, n_kv_heads)
        network = (
            reference.SwiGLU(d_model, d_ff)
            if gated
            else reference.FeedForward(d_model, d_ff, torch.relu)
        )
    if d_model % n_heads:
        raise ValueError(f"{n_heads} heads do not divide {d_model}")
    count = lambda module: sum(p.numel() for p in module.parameters())  # noqa: E731
    return {"feed_forward": count(network), "attention": count(attention)}


def test_right_block_parameters():
    passes(block_by_modules, "block_parameters")


# Wrong answers that no fault lists ---------------------------------------------------

WRONG = {
    "silu": {
        "leaky": lambda x: F.leaky_relu(x, 0.1),
        "elu": F.elu,
        "beta 1.1": lambda x: x * torch.sigmoid(1.1 * x),
        "beta 1.001": lambda x: x * torch.sigmoid(1.001 * x),
        "zero is one": lambda x: torch.where(x == 0, 1.0, F.silu(x)),
        "whole tensor": lambda x: x * torch.sigmoid(x.mean()),
        "nan to zero": lambda x: torch.nan_to_num(
            x * torch.exp(x) / (1 + torch.exp(x))
        ),
        "exp clamped at 11": lambda x: x / (1 + torch.exp(-x).clamp(max=6e4)),
        "clamped at the left": lambda x: x.clamp(min=-8) * torch.sigmoid(x),
        "half by bfloat16": lambda x: F.silu(x.bfloat16()).to(x.dtype),
        "numpy": lambda x: torch.from_numpy(F.silu(x.detach().float()).numpy()),
        "list": lambda x: [F.silu(x)],
        "none": lambda x: None,
        "flattened": lambda x: F.silu(x).flatten(),
        "in place, but on a view": lambda x: x.view(x.shape).mul_(torch.sigmoid(x)),
    },
    "gelu": {
        "coarse pi": lambda x: 0.5 * x * (1 + torch.erf(x / 1.414)),
        "tanh with other constant": lambda x: (
            0.5 * x * (1 + torch.tanh(0.7979 * (x + 0.0447 * x**3)))
        ),
        "sigmoid 1.7": lambda x: x * torch.sigmoid(1.7 * x),
        "no constant in tanh": lambda x: 0.5 * x * (1 + torch.tanh(x)),
        "cut at 3": lambda x: torch.where(
            x > 3, x, torch.where(x < -3, 0.0, F.gelu(x))
        ),
        "absolute": lambda x: F.gelu(x.abs()),
        "exact in float32 alone": lambda x: F.gelu(
            x, approximate="none" if x.dtype == torch.float32 else "tanh"
        ),
    },
    "swiglu_width": {
        "table": lambda d_model, multiple_of=32: {64: 192}.get(d_model, 4 * d_model),
        "factor 2.6667": lambda d_model, multiple_of=32: (
            math.ceil(2.6667 * d_model / multiple_of) * multiple_of
        ),
        "tensor": lambda d_model, multiple_of=32: torch.tensor(
            width_by_loop(d_model, multiple_of)
        ),
        "keyword renamed": lambda d_model, multiple=32: width_by_loop(
            d_model, multiple
        ),
        "added before": lambda d_model, multiple_of=32: (
            (8 * d_model // 3 + multiple_of) // multiple_of * multiple_of
        ),
    },
    "block_parameters": {
        "group of one": lambda d, h, kv, f, gated: reference.block_parameters(
            d, h, 1, f, gated
        ),
        "list": lambda d, h, kv, f, gated: [4 * d * d, 2 * d * f],
        "other keys": lambda d, h, kv, f, gated: {"attn": 4 * d * d, "ffn": 2 * d * f},
        "embedding too": lambda d, h, kv, f, gated: {
            k: v + 100
            for k, v in reference.block_parameters(d, h, kv, f, gated).items()
        },
        "gate twice": lambda d, h, kv, f, gated: {
            **reference.block_parameters(d, h, kv, f, gated),
            "feed_forward": (4 if gated else 2) * d * f,
        },
    },
}


@pytest.mark.parametrize(
    ("name", "case"), [(n, c) for n, cases in WRONG.items() for c in cases]
)
def test_wrong_answer_fails(name, case):
    fails(WRONG[name][case], name)


def feed_forward(forward):
    body = {"forward": lambda self, x: forward(self, x)}
    return type("FeedForward", (Functional,), body)


WRONG_FEED_FORWARD = {
    "activation of half": lambda self, x: self.w_2(
        torch.cat([self.bend(self.w_1(x))[..., :4], self.w_1(x)[..., 4:]], -1)
    ),
    "bend on the whole batch": lambda self, x: self.w_2(
        self.bend(self.w_1(x) - self.w_1(x).mean())
    ),
    "first position": lambda self, x: self.w_2(self.bend(self.w_1(x[..., :1, :]))),
    "batch mixed": lambda self, x: self.w_2(
        self.bend(self.w_1(x)) + (self.w_1(x).mean(0) if x.dim() > 2 else 0)
    ),
    "wrong transpose": lambda self, x: self.w_2(
        self.bend(self.w_1(x.transpose(0, 1))) if x.dim() == 3 else self.w_1(x)
    ),
    "half of the residual": lambda self, x: 0.5 * x + Functional.forward(self, x),
    "weights without gradient": lambda self, x: F.linear(
        self.bend(F.linear(x, self.w_1.weight.detach())), self.w_2.weight
    ),
    "float32 back": lambda self, x: Functional.forward(self, x).float(),
    "in place": lambda self, x: x.copy_(Functional.forward(self, x)),
    "only in training": lambda self, x: (
        Functional.forward(self, x) if self.training else self.w_2(self.w_1(x))
    ),
    "no grad": torch.no_grad()(lambda self, x: Functional.forward(self, x)),
}


@pytest.mark.parametrize("case", WRONG_FEED_FORWARD)
def test_wrong_feed_forward_fails(case):
    fails(feed_forward(WRONG_FEED_FORWARD[case]), "FeedForward")


class Remembers(Functional):
    """Gives the first result for ever."""

    def forward(self, x):
        if not hasattr(self, "first"):
            self.first = super().forward(x)
        return self.first


class PlainTensors(nn.Module):
    def __init__(self, d_model, d_ff, activation):
        super().__init__()
        self.w_1, self.w_2 = torch.randn(d_ff, d_model), torch.randn(d_model, d_ff)
        self.activation = activation

    def forward(self, x):
        return self.activation(x @ self.w_1.T) @ self.w_2.T


class CopiesWeights(Functional):
    """Multiplies with a copy of the weights that was taken when it was built."""

    def __init__(self, d_model, d_ff, activation):
        super().__init__(d_model, d_ff, activation)
        self.copies = [
            self.w_1.weight.detach().clone(),
            self.w_2.weight.detach().clone(),
        ]

    def forward(self, x):
        return self.bend(x @ self.copies[0].T) @ self.copies[1].T


class ActivationAtInit(Functional):
    def __init__(self, d_model, d_ff, activation=torch.relu):
        super().__init__(d_model, d_ff, torch.relu)


@pytest.mark.parametrize(
    "answer", [Remembers, PlainTensors, CopiesWeights, ActivationAtInit]
)
def test_wrong_feed_forward_class_fails(answer):
    fails(answer, "FeedForward")


def swiglu(combine):
    return type(
        "SwiGLU",
        (BuiltIn,),
        {"forward": lambda self, x: self.w_2(combine(self.w_1(x), self.w_3(x)))},
    )


WRONG_SWIGLU = {
    "tanh": lambda gate, up: torch.tanh(gate) * up,
    "silu minus": lambda gate, up: F.silu(-gate) * up,
    "both orders": lambda gate, up: 0.5 * (F.silu(gate) * up + gate * F.silu(up)),
    "abs": lambda gate, up: F.silu(gate) * up.abs(),
    "clamped gate": lambda gate, up: F.silu(gate).clamp(max=1) * up,
    "clamped product": lambda gate, up: (F.silu(gate) * up).clamp(-50, 50),
    "dot product": lambda gate, up: (
        (F.silu(gate) * up).sum(-1, keepdim=True).expand_as(up)
    ),
    "1.702": lambda gate, up: gate * torch.sigmoid(1.702 * gate) * up,
    "up detached": lambda gate, up: F.silu(gate) * up.detach(),
    "plus one": lambda gate, up: F.silu(gate) * (up + 1),
}


@pytest.mark.parametrize("case", WRONG_SWIGLU)
def test_wrong_swiglu_fails(case):
    fails(swiglu(WRONG_SWIGLU[case]), "SwiGLU")


# Mistakes written in another way than the fault that names them ----------------------


class OneBias(Functional):
    def __init__(self, d_model, d_ff, activation):
        super().__init__(d_model, d_ff, activation)
        self.w_2 = nn.Linear(d_ff, d_model, bias=True)


class PrintedShapes(nn.Module):
    def __init__(self, d_model, d_ff, activation):
        super().__init__()
        self.w_1 = nn.Parameter(torch.zeros(d_model, d_ff))
        self.w_2 = nn.Parameter(torch.zeros(d_ff, d_model))

    def forward(self, x):
        return x @ self.w_1 @ self.w_2


def unpacks_three(module):
    class UnpacksThree(module):
        def forward(self, x):
            batch, time, d_model = x.shape
            return (
                super()
                .forward(x.reshape(batch * time, d_model))
                .view(batch, time, d_model)
            )

    return UnpacksThree


def overriding(module, forward):
    return type("Overriding", (module,), {"forward": forward})


class Fused(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_1 = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.w_2 = nn.Linear(d_ff, d_model, bias=False)


class WholeMultiple(BuiltIn):
    def __init__(self, d_model, d_ff):
        super().__init__(d_model, (d_ff + 31) // 32 * 32)


NAMED = [
    ("silu", lambda x: x / 2 * (1 + x.tanh()), "twice_the_slope"),
    ("gelu", lambda x: x * 0.5 * (torch.erf(x / 1.414) + 1), "root_of_three_decimals"),
    ("gelu", lambda x: x * 0.5 * (torch.erf(x / 1.4142) + 1), "root_of_four_decimals"),
    ("gelu", lambda x: x / 2 + torch.erf(x / 2**0.5), "erf_outside"),
    ("silu", lambda x: x * (1 / (1 + math.exp(-x))), "python_function"),
    ("gelu", lambda x: x * (0.5 + 0.5 * math.erf(x / 2**0.5)), "python_function"),
    (
        "gelu",
        lambda x: x / 2 + x / 2 * torch.tanh((2 / math.pi) ** 0.5 * x),
        "tanh_without_cube",
    ),
    ("FeedForward", OneBias, "one_bias"),
    ("FeedForward", PrintedShapes, "matrices_as_printed"),
    ("FeedForward", PlainTensors, "no_parameters"),
    ("FeedForward", unpacks_three(Functional), "three_dimensions_only"),
    (
        "FeedForward",
        overriding(Functional, lambda self, x: Functional.forward(self, x.detach())),
        "input_detached",
    ),
    (
        "FeedForward",
        overriding(
            Functional,
            lambda self, x: Functional.forward(self, x.transpose(1, 0)).transpose(1, 0),
        ),
        "second_dimension_asked_for",
    ),
    ("SwiGLU", unpacks_three(BuiltIn), "three_dimensions_only"),
    ("SwiGLU", swiglu(lambda gate, up: up * F.silu(up)), "up_twice"),
    ("SwiGLU", swiglu(lambda gate, up: gate * F.silu(gate)), "gate_twice"),
    (
        "SwiGLU",
        swiglu(lambda gate, up: -gate * torch.sigmoid(-gate) * up),
        "minus_the_gate",
    ),
    ("SwiGLU", swiglu(lambda gate, up: F.silu(gate) * up.detach()), "up_detached"),
    (
        "SwiGLU",
        overriding(
            BuiltIn, lambda self, x: self.w_2(self.w_3(x) * self.w_1(F.silu(x)))
        ),
        "silu_of_the_input",
    ),
    (
        "SwiGLU",
        overriding(BuiltIn, lambda self, x: BuiltIn.forward(self, x.float())),
        "cast_to_float32",
    ),
    (
        "SwiGLU",
        overriding(
            BuiltIn, lambda self, x: BuiltIn.forward(self, x.view(-1, x.shape[-1]))
        ),
        "flattened",
    ),
    ("SwiGLU", Fused, "gate_and_up_in_one"),
    ("SwiGLU", WholeMultiple, "rounded_inside"),
    (
        "swiglu_width",
        lambda d_model, multiple_of=32: math.ceil(8 * d_model / 3 / multiple_of),
        "number_of_multiples",
    ),
    (
        "swiglu_width",
        lambda d_model, multiple_of=32: (
            (-(-8 * d_model // 3) + multiple_of - 1) & ~(multiple_of - 1)
        ),
        "added_bits",
    ),
]


@pytest.mark.parametrize(("name", "answer", "fault"), NAMED)
def test_the_mistake_is_named(name, answer, fault):
    report = evaluate(answer, name)
    assert (report.status, report.fault) == ("failed", fault), report.message


def test_digits_that_are_lost_in_float64_are_told_apart():
    silu = lambda x: x * torch.exp(-F.softplus(-x.float())).to(x.dtype)  # noqa: E731
    assert "has the digits of float32" in evaluate(silu, "silu").message
    gelu = lambda x: 0.5 * x * (1 + torch.erf(0.7071 * x))  # noqa: E731
    assert "a constant in it has too few" in evaluate(gelu, "gelu").message


# Parts together ----------------------------------------------------------------------


def test_other_right_parts_fit_together():
    stack = {
        **Joint.registry["two_layer_stack"].reference,
        "FeedForward": UnitByUnit,
        "SwiGLU": OneProduct,
        "gelu": F.gelu,
    }
    report = evaluate_joint("two_layer_stack", stack)
    assert report.status == "passed", report.message


def test_a_joint_says_where_the_stream_goes_wrong():
    parts = {
        **Joint.registry["two_layer_stack"].reference,
        "SwiGLU": swiglu(lambda gate, up: torch.tanh(gate) * up),
    }
    report = evaluate_joint("two_layer_stack", parts)
    assert report.status == "failed"
    assert "after SwiGLU" in report.message


def test_messages_give_no_answer_away():
    wrong = evaluate(lambda x: x / (1 + torch.exp(-x)), "silu")
    assert "torch.sigmoid" not in wrong.message
