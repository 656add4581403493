"""Lesson 02: the reference against PyTorch; other right and other wrong answers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solutions import attention as reference
from tests.answers import fails, passes
from utils.exercises.attention import slow_attention, slow_weights, some_mask
from utils.probe import probe

# Oracles ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, (5, 6), (2, 1, 1, 6), (2, 3, 5, 6)])
def test_oracles_agree_with_pytorch(size):
    q, k = probe(2, 3, 5, 4, dtype=torch.float64), probe(2, 3, 6, 4, seed=1).double()
    v = probe(2, 3, 6, 7, seed=2).double()
    mask = None if size is None else some_mask(*size)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    for f in (slow_attention, reference.attention):
        torch.testing.assert_close(f(q, k, v, mask), expected)
    weights = reference.attention_weights(q, k, mask)
    torch.testing.assert_close(weights, slow_weights(q, k, mask))


def test_self_attention_agrees_with_multihead_attention():
    ours = reference.SelfAttention(6, 6)
    theirs = nn.MultiheadAttention(6, 1, bias=False, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(
            torch.cat([ours.w_q.weight, ours.w_k.weight, ours.w_v.weight])
        )
        theirs.out_proj.weight.copy_(torch.eye(6))
    x, mask = probe(2, 5, 6), reference.causal_mask(5)
    expected, _ = theirs(x, x, x, attn_mask=~mask)
    torch.testing.assert_close(ours(x, mask), expected)


# Right answers in another form --------------------------------------------------------


def by_hand_and_scaled_first(q, k, mask=None):
    scores = (q / q.size(-1) ** 0.25) @ (k / k.size(-1) ** 0.25).mT
    hidden = torch.zeros_like(scores).bool() if mask is None else ~mask
    scores = scores.masked_fill(hidden, -torch.inf)
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)).masked_fill(hidden, 0)


def in_float64(q, k, mask=None):
    scores = q.double() @ k.double().mT / q.shape[-1] ** 0.5
    if mask is None:
        return scores.softmax(-1).to(q.dtype)
    return (scores.masked_fill(~mask, -1e300).softmax(-1) * mask).to(q.dtype)


def in_float32(q, k, mask=None):
    scores = torch.einsum("...qd,...kd->...qk", q, k) / torch.tensor(k.shape[-1]).sqrt()
    mask = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
    w = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return torch.where(mask, w, torch.zeros_like(w))


def with_blind_rows_opened(q, k, mask=None):
    scores = scores_of(q, k)
    if mask is None:
        return scores.softmax(-1)
    some = mask.any(-1, keepdim=True)
    bias = torch.zeros_like(scores).masked_fill(~mask & some, -torch.inf)
    return (scores + bias).softmax(-1) * some


def of_an_identity(q, k, mask=None):
    eye = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device)
    eye = eye.expand(*k.shape[:-1], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, eye, attn_mask=mask)


@pytest.mark.parametrize(
    "weights",
    [
        by_hand_and_scaled_first,
        in_float64,
        in_float32,
        with_blind_rows_opened,
        of_an_identity,
    ],
)
def test_other_right_weights_pass(weights):
    passes(weights, "attention_weights")
    passes(lambda q, k, v, mask=None: weights(q, k, mask) @ v, "attention")


def mask_by_positions(t_q, t_k=None):
    t_k = t_q if t_k is None else t_k
    if t_q > t_k:
        raise ValueError(f"t_q={t_q} is more than t_k={t_k}")
    return torch.arange(t_k)[None] <= torch.arange(t_k - t_q, t_k)[:, None]


def mask_by_last_rows(t_q, t_k=None):
    t_k = t_q if t_k is None else t_k
    if t_q > t_k:
        raise ValueError(f"{t_q} > {t_k}")
    return ~torch.triu(torch.ones(t_k, t_k), diagonal=1).bool()[t_k - t_q :]


def padding_by_loop(lengths, t_k):
    mask = torch.zeros(len(lengths), 1, 1, t_k, dtype=torch.bool, device=lengths.device)
    for i, n in enumerate(lengths):
        mask[i, ..., : int(n)] = True
    return mask


class Layer(nn.Module):
    """A right layer, with its parts open to change."""

    def __init__(self, d_model, d_head):
        super().__init__()
        self.w_v = nn.Linear(d_model, d_head, bias=False)
        self.w_k = nn.Linear(d_model, d_head, bias=False)
        self.w_q = nn.Linear(d_model, d_head, bias=False)
        self.register_buffer("mask", torch.ones(5, 5).tril().bool())
        for p in self.parameters():
            nn.init.xavier_uniform_(p)

    def forward(self, x, mask=None):
        q, k, v = self.w_q(x), self.w_k(x), self.w_v(x)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class FusedLayer(Layer):
    def forward(self, x, mask=None):
        fused = torch.cat([self.w_q.weight, self.w_k.weight, self.w_v.weight])
        q, k, v = F.linear(x, fused).chunk(3, dim=-1)
        weights = reference.attention_weights(q=q, k=k, mask=mask)
        return F.dropout(weights, 0.0, self.training) @ v


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (mask_by_positions, "causal_mask"),
        (mask_by_last_rows, "causal_mask"),
        (padding_by_loop, "padding_mask"),
        (Layer, "SelfAttention"),
        (FusedLayer, "SelfAttention"),
    ],
)
def test_other_right_answers_pass(answer, name):
    passes(answer, name)


# Wrong answers that neither a fault lists nor a mutant gives --------------------------


def scores_of(q, k):
    return q @ k.mT / math.sqrt(q.shape[-1])


def first_head_for_all(q, k):
    w = scores_of(q, k).softmax(-1)
    return w[..., :1, :, :].expand_as(w) if w.dim() > 2 else w


SCORES = {
    "by distance": lambda q, k: (-torch.cdist(q, k)).softmax(-1),
    "over keys and queries": lambda q, k: (
        scores_of(q, k).flatten(-2).softmax(-1).view_as(scores_of(q, k))
    ),
    "first head for all": first_head_for_all,
    "integer root": lambda q, k: (q @ k.mT / math.isqrt(q.shape[-1])).softmax(-1),
}


@pytest.mark.parametrize("name", SCORES)
def test_wrong_scores_are_rejected_without_a_wrong_name(name):
    def weights(q, k, mask=None):
        w = SCORES[name](q, k)
        return w if mask is None else w.masked_fill(~mask, 0)

    assert fails(weights, "attention_weights").fault is None
    fails(lambda q, k, v, mask=None: weights(q, k, mask) @ v, "attention")


def hidden(scores, mask, fill=-torch.inf):
    """Right weights, if `fill` is −inf."""
    return scores.masked_fill(~mask, fill).softmax(-1).masked_fill(~mask, 0)


MASKED = {
    "filled with −100": (lambda s, m: hidden(s, m, -100.0), None),
    "filled with −1e9": (
        lambda s, m: s.masked_fill(~m, -1e9).softmax(-1),
        "finite_instead_of_infinite",
    ),
    "log of the mask": (
        lambda s, m: (s + m.to(s.dtype).log()).softmax(-1),
        "nan_where_all_is_hidden",
    ),
    "log of the mask, cleaned": (
        lambda s, m: (s + m.to(s.dtype).log()).softmax(-1).nan_to_num(),
        "nan_in_the_gradient",
    ),
    "square masks only": (
        lambda s, m: hidden(s, m) if m.dim() == 2 else s.softmax(-1),
        None,
    ),
    "a branch on the whole": (
        lambda s, m: s.masked_fill(~m, -torch.inf).softmax(-1) if m.any() else 0 * s,
        "nan_where_all_is_hidden",
    ),
    "mask changed in place": (
        lambda s, m: s.masked_fill(m.logical_not_(), -torch.inf).softmax(-1),
        None,
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_wrong_masking_is_rejected(name):
    change, fault = MASKED[name]

    def weights(q, k, mask=None):
        scores = scores_of(q, k)
        return scores.softmax(-1) if mask is None else change(scores, mask)

    fails(weights, "attention_weights", fault)
    fails(lambda q, k, v, mask=None: weights(q, k, mask) @ v, "attention", fault)


right = reference.attention_weights


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (lambda q, k, v, mask=None: right(q, k, mask) @ v.detach(), None),
        (lambda q, k, v, mask=None: right(q, k, mask) @ k[..., : v.shape[-1]], None),
        (
            lambda q, k, v, mask=None: F.scaled_dot_product_attention(
                q, k, v, mask, 0.2
            ),
            "random",
        ),
        (
            lambda q, k, v, mask=None: right(q / q.shape[-1] ** 0.5, k, mask) @ v,
            "divided_by_d_head",
        ),
        (
            lambda q, k, v, mask=None: (q @ k.transpose(2, 3)).softmax(-1) @ v,
            "dimensions_from_the_front",
        ),
    ],
)
def test_wrong_attention_is_rejected(answer, fault):
    fails(answer, "attention", fault)


def frozen(self, d_model, d_head):
    Layer.__init__(self, d_model, d_head)
    self.w_q.requires_grad_(False)


def fused(self, d_model, d_head):
    nn.Module.__init__(self)
    self.w_qkv = nn.Linear(d_model, 3 * d_head, bias=False)


def in_a_dict(self, d_model, d_head):
    nn.Module.__init__(self)
    self.layers = {n: nn.Linear(d_model, d_head, bias=False) for n in "qkv"}


def forward_with(change):
    """`change` gets the right layer's `forward`, x, the mask, and whether it trains."""

    def forward(self, x, mask=None):
        return change(lambda *args: Layer.forward(self, *args), x, mask, self.training)

    return {"forward": forward}


LAYERS = {
    "frozen": {"__init__": frozen},
    "fused": {"__init__": fused},
    "in a dict": {"__init__": in_a_dict},
    "batch mixed": forward_with(
        lambda f, x, mask, _: f(x.flatten(0, 1)[None]).view(*x.shape[:2], -1)
    ),
    "first row only": forward_with(
        lambda f, x, mask, _: f(x[:1], mask).expand(len(x), -1, -1)
    ),
    "input detached": forward_with(lambda f, x, mask, _: f(x.detach(), mask)),
    "scaled in eval": forward_with(
        lambda f, x, mask, training: f(x, mask) * (1.0 if training else 0.9)
    ),
    "no mask in eval": forward_with(
        lambda f, x, mask, training: f(x, mask if training else None)
    ),
    "dropout": forward_with(
        lambda f, x, mask, training: F.dropout(f(x, mask), 0.5, training)
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_wrong_layers_are_rejected(name):
    fails(type("SelfAttention", (Layer,), LAYERS[name]), "SelfAttention")


SQUARE = torch.ones(2048, 2048, dtype=torch.bool).tril()


def causal_with_a_greatest_size(t_q, t_k=None):
    rows = reference.causal_mask(t_q, t_k).shape[1]
    return SQUARE[rows - t_q : rows, :rows]


def padding_with_a_greatest_size(lengths, t_k):
    return reference.padding_mask(lengths, min(t_k, 2048))


def padding_by_list(lengths, t_k):
    rows = [[[[i < n for i in range(t_k)]]] for n in lengths.tolist()]
    return torch.tensor(rows)  # on the CPU, wherever the lengths are


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (causal_with_a_greatest_size, "causal_mask"),
        (padding_with_a_greatest_size, "padding_mask"),
        (padding_by_list, "padding_mask"),
    ],
)
def test_wrong_masks_are_rejected_without_a_wrong_name(answer, name):
    assert fails(answer, name).fault is None
