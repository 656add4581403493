"""Lesson 05: models that exist, other right answers, and other wrong ones."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solutions import feed_forward as reference
from solutions.multi_head import MultiHeadAttention
from tests.answers import fails, passes
from utils.check.exercise import find

count_of, width_of = reference.block_parameters, reference.swiglu_width


# Right answers in other forms ---------------------------------------------------------


def exp_of_minus_the_size(x):
    small = torch.exp(-x.abs())
    return x * torch.where(x < 0, small, torch.ones_like(x)) / (1 + small)


class Functional(nn.Module):
    """The matrices made in the other order."""

    def __init__(self, d_model, d_ff, activation):
        super().__init__()
        self.w_2 = nn.Linear(d_ff, d_model, bias=False)
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
            hidden = self.bend((x * self.w_1.weight[j]).sum(-1, keepdim=True))
            out = out + hidden * self.w_2.weight[:, j]
        return out


class OneProduct(reference.SwiGLU):
    def forward(self, x):
        both = x @ torch.cat([self.w_1.weight, self.w_3.weight]).T
        gate, up = both.chunk(2, dim=-1)
        return F.linear(gate.sigmoid() * gate * up, self.w_2.weight)


def width_by_loop(d_model, multiple_of=32):
    width = 0
    while 3 * width < 8 * d_model:
        width += multiple_of
    return width


def count_by_modules(d_model, n_heads, n_kv_heads, d_ff, gated):
    with torch.device("meta"):
        attention = MultiHeadAttention(d_model, n_heads, n_kv_heads)
        network = [reference.FeedForward, reference.SwiGLU][gated]
        network = network(d_model, d_ff, *(() if gated else (torch.relu,)))
    modules = {"feed_forward": network, "attention": attention}
    return {k: sum(p.numel() for p in m.parameters()) for k, m in modules.items()}


RIGHT = {
    "silu": [
        exp_of_minus_the_size,
        lambda x: F.silu(x.double()).to(x.dtype),
        lambda x: x * F.logsigmoid(x).exp(),
        lambda x: (0.5 * x.double() * (1 + torch.tanh(x.double() / 2))).to(x.dtype),
    ],
    "gelu": [
        lambda x: x * torch.special.ndtr(x),
        lambda x: 0.5 * x * torch.special.erfc(-x / 2**0.5),
        lambda x: x / 2 + x / 2 * torch.erf(x * math.sqrt(0.5)),
    ],
    "FeedForward": [Functional, Bare, UnitByUnit],
    "SwiGLU": [OneProduct],
    "swiglu_width": [width_by_loop],
    "block_parameters": [count_by_modules],
}


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name, forms in RIGHT.items() for form in forms]
)
def test_other_forms_pass(name, form):
    passes(form, name)


def test_other_forms_fit_together():
    forms = {"FeedForward": UnitByUnit, "SwiGLU": OneProduct, "gelu": F.gelu}
    passes({**find("two_layer_stack").reference, **forms}, "two_layer_stack")


# Wrong answers that no fault lists, and untrue names of once --------------------------


def network_by(forward):
    return type("Wrong", (Functional,), {"forward": forward})


def gated_by(combine):
    def forward(self, x):
        return self.w_2(combine(self.w_1(x), self.w_3(x)))

    return type("Wrong", (reference.SwiGLU,), {"forward": forward})


WRONG = {
    "silu": [
        (lambda x: x * torch.sigmoid(1.001 * x), None),
        (lambda x: x * torch.sigmoid(x.mean()), None),
        (lambda x: torch.nan_to_num(x * torch.exp(x) / (1 + torch.exp(x))), None),
        (lambda x: F.silu(x.bfloat16()).to(x.dtype), None),
        (lambda x: torch.from_numpy(F.silu(x.detach().float()).numpy()), None),
        (lambda x: x / (1 + torch.exp(-x).clamp(max=6e4)), None),
        # Once told that it adds two numbers near 1:
        (lambda x: x / (1 + torch.exp(torch.clamp(-x, max=88))), "exp_clamped"),
        (lambda x: x * (1 - torch.sigmoid(-x)), "rounded_away"),
        (lambda x: x * (1 / (1 + math.exp(-x))), "python_function"),
    ],
    "gelu": [
        (lambda x: x * (0.5 + torch.erf(x / 2**0.5)), "half_of_the_one_alone"),
        (lambda x: 0.5 * x * (1 + torch.erf(x / 1.4142)), None),
        (lambda x: x * torch.sigmoid(1.7 * x), None),
        (lambda x: torch.where(x > 3, x, torch.where(x < -3, 0.0, F.gelu(x))), None),
        (lambda x: 0.5 * x * (1 + torch.erf(x / torch.tensor([2.0]).sqrt())), None),
    ],
    "FeedForward": [
        (network_by(torch.no_grad()(Functional.forward)), None),
        (network_by(lambda self, x: Functional.forward(self, x).float()), None),
        (
            network_by(lambda self, x: self.w_2(self.bend(self.w_1(x[..., :1, :])))),
            None,
        ),
        (network_by(lambda self, x: F.dropout(Functional.forward(self, x))), "random"),
    ],
    "SwiGLU": [
        (gated_by(lambda gate, up: torch.tanh(gate) * up), None),
        (gated_by(lambda gate, up: (F.silu(gate) * up).clamp(-50, 50)), None),
        (gated_by(lambda gate, up: gate * F.silu(gate)), "gate_twice"),
    ],
    "swiglu_width": [
        (lambda d, multiple_of=32: multiple_of, None),  # once called “upside down”
        (lambda d, multiple_of=32: 2 ** math.ceil(math.log2(8 * d / 3)), None),
        # True: as 2.6667 is above 8/3, every exact multiple goes up.
        (lambda d, by=32: math.ceil(2.6667 * d / by) * by, "always_up"),
        (lambda d, multiple_of=32: torch.tensor(width_of(d, multiple_of)), None),
        (lambda d, multiple=32: width_of(d, multiple), None),
    ],
    "block_parameters": [
        (lambda d, h, kv, ff, gated: count_of(d, h, 1, ff, gated), None),
        (lambda d, h, kv, ff, gated: [4 * d * d, 2 * d * ff], None),
        (lambda d, h, kv, ff, gated: {"attn": 4 * d * d, "ffn": 2 * d * ff}, None),
        # As `w_o` left out, but for grouped heads; once told that `w_o` is missing:
        (
            lambda d, h, kv, ff, gated: (
                count_of(d, h, kv, ff, gated) | {"attention": 3 * d * d}
            ),
            None,
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "answer", "fault"),
    [(name, *each) for name, answers in WRONG.items() for each in answers],
)
def test_other_wrong_answers_are_rejected(name, answer, fault):
    assert fails(answer, name, fault).fault == fault


def test_messages_give_no_answer_away():
    report = fails(lambda x: x / (1 + torch.exp(-x)), "silu", "exp_of_minus_x")
    assert "torch.sigmoid" not in report.message
