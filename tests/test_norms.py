"""Lesson 06: other right answers pass, and wrong ones that no fault lists do not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solutions.attention import causal_mask
from solutions.feed_forward import SwiGLU
from solutions.multi_head import MultiHeadAttention
from solutions.norms import RMSNorm, layer_norm, post_norm, pre_norm, rms_norm
from utils.check import evaluate, evaluate_joint
from utils.probe import probe

PARTS = {
    "causal_mask": causal_mask,
    "MultiHeadAttention": MultiHeadAttention,
    "SwiGLU": SwiGLU,
    "RMSNorm": RMSNorm,
    "pre_norm": pre_norm,
}


# The references against their oracles -----------------------------------------------


@pytest.mark.parametrize("shift", [0.0, 5.0, 500.0])
def test_norms_agree_with_torch(shift):
    x = probe(3, 4, 17, shift=shift)
    w, b = probe(17, seed=1), probe(17, seed=2)
    exact = F.layer_norm(x.double(), (17,), w.double(), b.double()).float()
    assert (layer_norm(x, w, b) - exact).abs().max() < 1e-6 * (1 + shift)
    exact = F.rms_norm(x.double(), (17,), w.double(), 1e-6).float()
    assert (rms_norm(x, w) - exact).abs().max() < 1e-5


def test_steps_are_those_of_the_encoder_layer():
    for norm_first, step in ((True, pre_norm), (False, post_norm)):
        layer = nn.TransformerEncoderLayer(
            12, 3, 20, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        x = probe(2, 5, 12)
        h = step(x, lambda h, at=layer.self_attn: at(h, h, h)[0], layer.norm1)
        h = step(h, lambda h, at=layer: at.linear2(at.linear1(h).relu()), layer.norm2)
        assert torch.allclose(h, layer(x), atol=1e-5)


# Right answers in other forms ---------------------------------------------------------


def layer_norm_builtin(x, weight, bias, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def layer_norm_loop(x, weight, bias, eps=1e-5):
    rows = []
    for row in x.reshape(-1, x.shape[-1]).double():
        mean = sum(row) / len(row)
        variance = sum((v - mean) ** 2 for v in row) / len(row)
        rows.append((row - mean) / (variance + eps) ** 0.5 * weight + bias)
    return torch.stack(rows).reshape(x.shape).to(x.dtype)


def layer_norm_cast_early(x, weight, bias, eps=1e-5):
    h = x.float()
    variance, mean = torch.var_mean(h, dim=-1, correction=0, keepdim=True)
    return ((h - mean) / torch.sqrt(variance + eps)).type_as(x) * weight + bias


def layer_norm_float64(x, weight, bias, eps=1e-5):
    h = x.double()
    h = h - h.mean(-1, keepdim=True)
    h = h / torch.sqrt(torch.mean(h * h, -1, keepdim=True) + eps)
    return torch.addcmul(bias.double(), h, weight.double()).to(x.dtype)


def layer_norm_einsum(x, weight, bias, eps=1e-5):
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    h = h - torch.einsum("...d->...", h)[..., None] / h.shape[-1]
    variance = torch.einsum("...d,...d->...", h, h)[..., None] / h.shape[-1]
    return (h * (variance + eps) ** -0.5 * weight.to(h) + bias.to(h)).to(x.dtype)


def rms_norm_builtin(x, weight, eps=1e-6):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rms_norm_cast_early(x, weight, eps=1e-6):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def rms_norm_float64(x, weight, eps=1e-6):
    h = x.double()
    return (weight * h / (h.pow(2).mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype)


def rms_norm_by_length(x, weight, eps=1e-6):
    h = x.float()
    length = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
    safe = (h * h).sum(-1, keepdim=True) / h.shape[-1]
    assert length.shape == safe.shape
    return (h / (safe + eps).sqrt() * weight.float()).to(x.dtype)


def rms_norm_loop(x, weight, eps=1e-6):
    rows = [
        row * (sum(v * v for v in row) / len(row) + eps) ** -0.5 * weight
        for row in x.reshape(-1, x.shape[-1]).float()
    ]
    return torch.stack(rows).reshape(x.shape).to(x.dtype)


class RMSNormBuiltin(nn.RMSNorm):
    def __init__(self, d_model, eps=1e-6):
        super().__init__(d_model, eps)


class RMSNormOwn(nn.Module):
    def __init__(self, d_model, eps=1e-6):
        super().__init__()
        self.scale_eps = eps
        self.weight = nn.Parameter(torch.empty(d_model))
        nn.init.ones_(self.weight)

    def forward(self, hidden):
        return rms_norm_cast_early(hidden, self.weight, self.scale_eps)


def pre_norm_in_steps(x, sublayer, norm):
    residual = x
    x = norm(x)
    x = sublayer(x)
    return residual + x


def pre_norm_torch_add(x, sublayer, norm):
    return torch.add(sublayer(norm(x)), x)


def post_norm_in_steps(x, sublayer, norm):
    branch = sublayer(x)
    total = torch.stack([x, branch]).sum(0)
    return norm(total)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("layer_norm", layer_norm_builtin),
        ("layer_norm", layer_norm_loop),
        ("layer_norm", layer_norm_cast_early),
        ("layer_norm", layer_norm_float64),
        ("layer_norm", layer_norm_einsum),
        ("rms_norm", rms_norm_builtin),
        ("rms_norm", rms_norm_cast_early),
        ("rms_norm", rms_norm_float64),
        ("rms_norm", rms_norm_by_length),
        ("rms_norm", rms_norm_loop),
        ("RMSNorm", RMSNormBuiltin),
        ("RMSNorm", RMSNormOwn),
        ("pre_norm", pre_norm_in_steps),
        ("pre_norm", pre_norm_torch_add),
        ("post_norm", post_norm_in_steps),
    ],
)
def test_other_right_answers_pass(name, answer):
    report = evaluate(answer, name)
    assert report.status == "passed", report.message


# Wrong answers that no fault lists ----------------------------------------------------


def without_root_of_the_dtype(x, weight, bias, eps=1e-5):
    """eps as it is in half precision: added in the wrong dtype after a cast back."""
    h = x.float()
    centred = (h - h.mean(-1, keepdim=True)).to(x.dtype)
    variance = centred.square().mean(-1, keepdim=True)
    return (centred / (variance + eps).sqrt() * weight + bias).to(x.dtype)


def median_for_mean(x, weight, bias, eps=1e-5):
    h = x.float()
    centred = h - h.median(-1, keepdim=True).values
    variance = centred.square().mean(-1, keepdim=True)
    return (centred * (variance + eps).rsqrt() * weight + bias).to(x.dtype)


def mean_of_first_row(x, weight, bias, eps=1e-5):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    if x.dim() > 2:
        mean = mean[:1]
    variance = h.var(-1, unbiased=False, keepdim=True)
    return ((h - mean) * (variance + eps).rsqrt() * weight + bias).to(x.dtype)


def nan_hidden(x, weight, bias, eps=1e-5):
    out = F.layer_norm(x, x.shape[-1:], weight, bias, 0.0)
    return torch.nan_to_num(out)


def only_float32(x, weight, bias, eps=1e-5):
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps)


def clamped_square(x, weight, eps=1e-6):
    return x * torch.rsqrt((x * x).clamp(max=6e4).mean(-1, keepdim=True) + eps) * weight


def rms_unit_length(x, weight, eps=1e-6):
    return F.normalize(x.float(), dim=-1).to(x.dtype) * weight


def rms_largest(x, weight, eps=1e-6):
    return x / (x.abs().amax(-1, keepdim=True) + eps) * weight


def rms_with_numbers(x, weight, eps=1e-6):
    scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x.float() * torch.tensor(scale.tolist()) * weight).to(x.dtype)


class SharedWeight(nn.Module):
    weights = {}  # noqa: RUF012

    def __init__(self, d_model, eps=1e-6):
        super().__init__()
        self.weight = self.weights.setdefault(
            d_model, nn.Parameter(torch.ones(d_model))
        )
        self.eps = eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class OtherName(nn.Module):
    def __init__(self, d_model, eps=1e-6):
        super().__init__()
        self.gamma, self.eps = nn.Parameter(torch.ones(d_model)), eps

    def forward(self, x):
        return rms_norm(x, self.gamma, self.eps)


class OnlyTraining(RMSNorm):
    def forward(self, x):
        return super().forward(x) if self.training else x


class CachesFirst(RMSNorm):
    def forward(self, x):
        if not hasattr(self, "kept"):
            self.kept = x.float().square().mean(-1, keepdim=True).detach()
        if self.kept.shape != (*x.shape[:-1], 1):
            self.kept = x.float().square().mean(-1, keepdim=True)
        return (x * (self.kept + self.eps).rsqrt() * self.weight).to(x.dtype)


def residual_of_another_row(x, sublayer, norm):
    return x.flip(0) + sublayer(norm(x))


def scaled_residual(x, sublayer, norm):
    return x + 0.5 * sublayer(norm(x))


def root_two(x, sublayer, norm):
    return norm((x + sublayer(x)) / 2**0.5)


def zero_branch(x, sublayer, norm):
    return x + 0 * sublayer(norm(x))


def own_norm(x, sublayer, norm):
    norm(x)
    return x + sublayer(F.rms_norm(x, x.shape[-1:]))


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("layer_norm", without_root_of_the_dtype),
        ("layer_norm", median_for_mean),
        ("layer_norm", mean_of_first_row),
        ("layer_norm", nan_hidden),
        ("layer_norm", only_float32),
        ("layer_norm", lambda x, weight, bias, eps=1e-5: None),
        ("layer_norm", lambda x, weight, bias, eps=1e-5: x),
        ("rms_norm", clamped_square),
        ("rms_norm", rms_unit_length),
        ("rms_norm", rms_largest),
        ("rms_norm", rms_with_numbers),
        ("RMSNorm", SharedWeight),
        ("RMSNorm", OtherName),
        ("RMSNorm", OnlyTraining),
        ("RMSNorm", CachesFirst),
        ("RMSNorm", nn.LayerNorm),
        ("pre_norm", residual_of_another_row),
        ("pre_norm", scaled_residual),
        ("pre_norm", zero_branch),
        ("pre_norm", own_norm),
        ("post_norm", root_two),
        ("post_norm", lambda x, sublayer, norm: norm(x * sublayer(x))),
        ("post_norm", lambda x, sublayer, norm: norm(torch.cat([x, sublayer(x)], -1))),
    ],
)
def test_unlisted_wrong_answers_fail(name, answer):
    report = evaluate(answer, name)
    assert report.status == "failed", report.message


# Mistakes written in another way than the fault that names them -----------------------


def mean_before_the_cast(x, weight, bias, eps=1e-5):
    h = (x - x.mean(dim=-1, keepdim=True)).float()
    deviation = torch.sqrt((h * h).mean(dim=-1, keepdim=True) + eps)
    return (h / deviation).to(x.dtype) * weight + bias


def layer_norm_lost_dimension(x, weight, bias, eps=1e-5):
    h = x.float()
    variance, mean = torch.var_mean(h, -1, correction=0)
    return ((h - mean) / (variance + eps).sqrt() * weight + bias).to(x.dtype)


def layer_norm_dim_2(x, weight, bias, eps=1e-5):
    h = x.float()
    mean = h.mean(dim=2, keepdim=True)
    variance = (h - mean).pow(2).mean(dim=2, keepdim=True)
    return ((h - mean) / (variance + eps).sqrt() * weight + bias).to(x.dtype)


def layer_norm_unit_length(x, weight, bias, eps=1e-5):
    h = x.float() - x.float().mean(-1, keepdim=True)
    length = torch.sqrt((h * h).sum(-1, keepdim=True) + eps)
    return (h / length * weight + bias).to(x.dtype)


def layer_norm_floor(x, weight, bias, eps=1e-5):
    h = x.float() - x.float().mean(-1, keepdim=True)
    variance = torch.maximum(h.pow(2).mean(-1, keepdim=True), torch.full_like(h, eps))
    return (h / variance.sqrt() * weight + bias).to(x.dtype)


def layer_norm_rms_of_x(x, weight, bias, eps=1e-5):
    h = x.float()
    rms = torch.sqrt((h * h).mean(-1, keepdim=True) + eps)
    return ((h - h.mean(-1, keepdim=True)) / rms * weight + bias).to(x.dtype)


def rms_norm_lost_dimension(x, weight, eps=1e-6):
    h = x.float()
    return (h / torch.sqrt(h.pow(2).mean(-1) + eps)).to(x.dtype) * weight


def rms_norm_mean_first(x, weight, eps=1e-6):
    h = x.float()
    return (h / torch.sqrt(h.mean(-1, keepdim=True) ** 2 + eps)).to(x.dtype) * weight


class OneMore(RMSNorm):
    def __init__(self, d_model, eps=1e-6):
        super().__init__(d_model, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x):
        return rms_norm(x, self.weight + 1, self.eps)


class NeverTrained(nn.Module):
    def __init__(self, d_model, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model), requires_grad=False)
        self.eps = eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class DrawnAtRandom(RMSNorm):
    def __init__(self, d_model, eps=1e-6):
        super().__init__(d_model, eps)
        self.weight = nn.Parameter(torch.empty(d_model))
        nn.init.normal_(self.weight)


class AddsItsInput(RMSNorm):
    def forward(self, x):
        return super().forward(x) + x


class ThreeSizes(RMSNorm):
    def forward(self, x):
        batch, time, width = x.shape
        return super().forward(x.reshape(-1, width)).reshape(batch, time, width)


def learns_but_passes_nothing_back(x, sublayer, norm):
    return x + sublayer(norm(x.detach()))


def post_passes_nothing_back(x, sublayer, norm):
    branch = sublayer(x.data)
    return norm(branch + x)


@pytest.mark.parametrize(
    ("name", "answer", "fault"),
    [
        ("layer_norm", mean_before_the_cast, "mean_in_half"),
        ("layer_norm", layer_norm_lost_dimension, "dimension_lost"),
        ("layer_norm", layer_norm_dim_2, "dim_2"),
        ("layer_norm", layer_norm_unit_length, "sum_for_mean"),
        ("layer_norm", layer_norm_floor, "eps_as_a_floor"),
        ("layer_norm", layer_norm_rms_of_x, "mean_square_for_variance"),
        (
            "layer_norm",
            lambda x, weight, bias, eps=1e-5: layer_norm(x, bias, weight, eps),
            "weight_and_bias_exchanged",
        ),
        ("rms_norm", rms_norm_lost_dimension, "dimension_lost"),
        ("rms_norm", rms_norm_mean_first, "square_of_the_mean"),
        ("RMSNorm", OneMore, "one_plus_the_weight"),
        ("RMSNorm", NeverTrained, "frozen"),
        ("RMSNorm", DrawnAtRandom, "starts_random"),
        ("RMSNorm", AddsItsInput, "residual_inside"),
        ("RMSNorm", ThreeSizes, "three_dimensions_only"),
        ("pre_norm", learns_but_passes_nothing_back, "detached_input"),
        ("post_norm", post_passes_nothing_back, "detached_input"),
    ],
)
def test_the_mistake_is_named(name, answer, fault):
    report = evaluate(answer, name)
    assert (report.status, report.fault) == ("failed", fault), report.message


# The joint ----------------------------------------------------------------------------


class FusedAttention(MultiHeadAttention):
    """Attention through PyTorch's fused function: another form, equally right."""

    def forward(self, x, mask=None, rotate=None):
        def split(h, n):
            return h.unflatten(-1, (n, -1)).transpose(1, 2)

        q = split(self.w_q(x), self.n_heads)
        k = split(self.w_k(x), self.n_kv_heads)
        v = split(self.w_v(x), self.n_kv_heads)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.w_o(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "parts",
    [
        {"MultiHeadAttention": FusedAttention},
        {"RMSNorm": RMSNormBuiltin},
        {"RMSNorm": RMSNormOwn, "pre_norm": pre_norm_torch_add},
    ],
)
def test_other_right_parts_fit(parts):
    report = evaluate_joint("pre_norm_block", {**PARTS, **parts})
    assert report.status == "passed", report.message


class NarrowAttention(MultiHeadAttention):
    def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
        super().__init__(d_model, n_heads, n_kv_heads, d_head)
        self.w_o = nn.Identity()


class LooksAhead(SwiGLU):
    def forward(self, x):
        return super().forward(x) + super().forward(x.roll(-1, dims=1))


class NormsBatch(RMSNorm):
    def forward(self, x):
        return super().forward(x) / x.std(0, unbiased=False, keepdim=True).clamp(
            min=0.1
        )


@pytest.mark.parametrize(
    "parts",
    [
        {"MultiHeadAttention": NarrowAttention},
        {"SwiGLU": LooksAhead},
        {"RMSNorm": NormsBatch},
        {"pre_norm": lambda x, sublayer, norm: x + 2 * sublayer(norm(x))},
        {"causal_mask": lambda t_q, t_k=None: torch.eye(t_q).bool()},
    ],
)
def test_parts_that_do_not_fit_are_noticed(parts):
    report = evaluate_joint("pre_norm_block", {**PARTS, **parts})
    assert report.status == "failed", report.message
    assert "Not met" in report.message
