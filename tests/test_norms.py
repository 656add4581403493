"""Lesson 06: the reference against PyTorch; other right and other wrong answers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solutions.multi_head import MultiHeadAttention
from solutions.norms import RMSNorm, layer_norm, post_norm, pre_norm, rms_norm
from tests.answers import fails, passes
from utils.check.exercise import load_lesson
from utils.exercises.norms import pre_norm_block
from utils.probe import probe

# The references -----------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.0, 5.0, 500.0])
def test_norms_agree_with_pytorch(shift):
    x = probe(3, 4, 17, shift=shift)
    w, b = probe(17, seed=1), probe(17, seed=2)
    exact = F.layer_norm(x.double(), (17,), w.double(), b.double()).float()
    assert (layer_norm(x, w, b) - exact).abs().max() < 1e-6 * (1 + shift)
    exact = F.rms_norm(x.double(), (17,), w.double(), 1e-6).float()
    assert (rms_norm(x, w) - exact).abs().max() < 1e-5


@pytest.mark.parametrize(("norm_first", "step"), [(True, pre_norm), (False, post_norm)])
def test_steps_are_those_of_the_encoder_layer(norm_first, step):
    layer = nn.TransformerEncoderLayer(
        12, 3, 20, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    x = probe(2, 5, 12)
    h = step(x, lambda h: layer.self_attn(h, h, h)[0], layer.norm1)
    h = step(h, lambda h: layer.linear2(layer.linear1(h).relu()), layer.norm2)
    assert torch.allclose(h, layer(x), atol=1e-5)


# Right answers in another form --------------------------------------------------------


def layer_norm_by_rows(x, weight, bias, eps=1e-5, root=torch.sqrt):
    rows = []
    for row in x.reshape(-1, x.shape[-1]).double():
        mean = sum(row) / len(row)
        variance = sum((v - mean) ** 2 for v in row) / len(row)
        rows.append((row - mean) / root(variance + eps) * weight + bias)
    return torch.stack(rows).reshape(x.shape).to(x.dtype)


def rms_norm_cast_early(x, weight, eps=1e-6):
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rms_norm_by_rows(x, weight, eps=1e-6, root=torch.sqrt):
    rows = [
        row / root(sum(v * v for v in row) / len(row) + eps) * weight
        for row in x.reshape(-1, x.shape[-1]).float()
    ]
    return torch.stack(rows).reshape(x.shape).to(x.dtype)


class RMSNormOfPyTorch(nn.RMSNorm):
    def __init__(self, d_model, eps=1e-6):
        super().__init__(d_model, eps)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("layer_norm", lambda x, weight, bias, eps=1e-5: F.layer_norm(
            x, x.shape[-1:], weight, bias, eps)),
        ("layer_norm", layer_norm_by_rows),
        ("rms_norm", lambda x, weight, eps=1e-6: F.rms_norm(
            x, x.shape[-1:], weight, eps)),
        ("rms_norm", rms_norm_cast_early),
        ("rms_norm", rms_norm_by_rows),
        ("RMSNorm", RMSNormOfPyTorch),
        ("pre_norm", lambda x, sublayer, norm: torch.add(sublayer(norm(x)), x)),
        ("post_norm", lambda x, sublayer, norm: norm(
            torch.stack([x, sublayer(x)]).sum(0))),
    ],
)  # fmt: skip
def test_other_right_answers_pass(name, answer):
    passes(answer, name)


# Wrong answers that no fault lists, or that one names ---------------------------------


def nan_hidden(x, weight, bias, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 0.0).nan_to_num()


def mean_before_the_cast(x, weight, bias, eps=1e-5):
    h = (x - x.mean(dim=-1, keepdim=True)).float()
    deviation = torch.sqrt((h * h).mean(dim=-1, keepdim=True) + eps)
    return (h / deviation).to(x.dtype) * weight + bias


def brought_to_length(x, weight, eps=1e-6):
    h = F.normalize(x.float(), dim=-1) * math.sqrt(x.shape[-1])
    return (h * weight).to(x.dtype)


def by_numbers(x, weight, eps=1e-6):
    scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x.float() * torch.tensor(scale.tolist()) * weight).to(x.dtype)


class SharedWeight(RMSNorm):
    weights = {}  # noqa: RUF012

    def __init__(self, d_model, eps=1e-6):
        super().__init__(d_model, eps)
        self.weight = self.weights.setdefault(d_model, self.weight)


class KeepsTheFirst(RMSNorm):
    def forward(self, x):
        now = x.float().square().mean(-1, keepdim=True)
        kept = self.__dict__.setdefault(now.shape, now.detach())
        return (x * (kept + self.eps).rsqrt() * self.weight).to(x.dtype)


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize(
    ("name", "answer", "fault"),
    [
        ("layer_norm", nan_hidden, None),
        ("layer_norm", mean_before_the_cast, "mean_in_half"),
        # The lesson's own loop takes its root from `math`.
        ("layer_norm", lambda *args, **kwargs: layer_norm_by_rows(
            *args, **kwargs, root=math.sqrt), "detached_variance"),
        ("rms_norm", lambda *args, **kwargs: rms_norm_by_rows(
            *args, **kwargs, root=math.sqrt), "detached_statistics"),
        # No 0/0 in it, so nothing may be said of NaN.
        ("rms_norm", brought_to_length, "eps_without_effect"),
        ("rms_norm", by_numbers, "detached_statistics"),
        ("RMSNorm", SharedWeight, None),
        ("RMSNorm", KeepsTheFirst, None),
        ("RMSNorm", nn.LayerNorm, None),
        ("pre_norm", lambda x, sublayer, norm: x.flip(0) + sublayer(norm(x)), None),
        ("pre_norm", lambda x, sublayer, norm: x + sublayer(norm(x.detach())),
         "detached_input"),
        ("post_norm", lambda x, sublayer, norm: norm((x + sublayer(x)) / 2**0.5), None),
    ],
)  # fmt: skip
def test_wrong_answers_fail(name, answer, fault):
    report = fails(answer, name, fault)
    assert fault or not report.fault, report.message


# The block ----------------------------------------------------------------------------

load_lesson("norms")
PARTS = pre_norm_block.reference


class FusedAttention(MultiHeadAttention):
    def forward(self, x, mask=None, rotate=None):
        h, k = self.n_heads, self.n_kv_heads
        q, k, v = (
            w(x).unflatten(-1, (n, -1)).transpose(1, 2)
            for w, n in ((self.w_q, h), (self.w_k, k), (self.w_v, k))
        )
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return self.w_o(out.transpose(1, 2).flatten(2))


class TwoResults(MultiHeadAttention):
    def forward(self, x, mask=None, rotate=None):
        return super().forward(x, mask), None


@pytest.mark.parametrize(
    "parts",
    [
        {"MultiHeadAttention": FusedAttention},
        {"RMSNorm": RMSNormOfPyTorch, "pre_norm": lambda x, f, norm: f(norm(x)) + x},
    ],
)
def test_other_right_parts_fit(parts):
    passes({**PARTS, **parts}, "pre_norm_block")


@pytest.mark.parametrize(
    "parts",
    [
        {"MultiHeadAttention": TwoResults},
        {"pre_norm": lambda x, sublayer, norm: x + 2 * sublayer(norm(x))},
        {"causal_mask": lambda t_q, t_k=None: torch.eye(t_q).bool()},
    ],
)
def test_parts_that_do_not_fit_are_noticed(parts):
    assert fails({**PARTS, **parts}, "pre_norm_block").fault is None
