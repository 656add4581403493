"""Lesson 02: the reference against PyTorch; other right and other wrong answers."""

import math

import numpy as np
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
    torch.testing.assert_close(
        reference.attention_weights(q, k, mask), slow_weights(q, k, mask)
    )


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


def test_masks_meet():
    mask = reference.causal_mask(4) & reference.padding_mask(torch.tensor([2, 0]), 4)
    assert mask.shape == (2, 1, 4, 4)
    q, k, v = (probe(2, 3, 4, 5, seed=s) for s in range(3))
    out = reference.attention(q, k, v, mask)
    assert out.isfinite().all() and not out[1].any() and out[0].all()


# Right answers in another form --------------------------------------------------------


def softmax_by_hand(scores):
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def weights_einsum(q, k, mask=None):
    scores = torch.einsum("...qd,...kd->...qk", q, k) * k.shape[-1] ** -0.5
    if mask is not None:
        scores = torch.where(mask, scores, torch.tensor(-torch.inf, dtype=q.dtype))
    w = scores.softmax(dim=-1)
    return w if mask is None else torch.where(mask, w, torch.zeros_like(w))


def weights_scaled_first(q, k, mask=None):
    scores = (q / q.size(-1) ** 0.25) @ (k / k.size(-1) ** 0.25).mT
    if mask is None:
        return softmax_by_hand(scores)
    hidden = torch.logical_not(mask)
    return softmax_by_hand(scores.masked_fill(hidden, float("-inf"))).masked_fill(
        hidden, 0.0
    )


def weights_in_float64(q, k, mask=None):
    scores = q.double() @ k.double().mT / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e300)
    w = scores.softmax(-1)
    return (w if mask is None else w * mask).to(q.dtype)


def weights_in_float32(q, k, mask=None):
    scores = torch.matmul(q, k.transpose(-1, -2)) / torch.tensor(q.shape[-1]).sqrt()
    mask = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
    w = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return w.masked_fill(~mask, 0)


def weights_safe_rows(q, k, mask=None):
    """Rows that see nothing are opened first and closed after."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is None:
        return scores.softmax(-1)
    some = mask.any(-1, keepdim=True)
    bias = torch.zeros_like(scores).masked_fill(~mask & some, -torch.inf)
    return (scores + bias).softmax(-1) * some


def weights_by_identity(q, k, mask=None):
    eye = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device)
    eye = eye.expand(*k.shape[:-1], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, eye, attn_mask=mask)


def weights_by_loops(q, k, mask=None):
    size = (*q.shape[:-1], k.shape[-2])
    scores = torch.stack(
        [
            torch.stack(
                [
                    (q[..., i, :] * k[..., j, :]).sum(-1) / q.shape[-1] ** 0.5
                    for j in range(k.shape[-2])
                ],
                dim=-1,
            )
            for i in range(q.shape[-2])
        ],
        dim=-2,
    )
    if mask is None:
        return scores.softmax(-1)
    open_ = mask.broadcast_to(size)
    return scores.masked_fill(~open_, -torch.inf).softmax(-1).masked_fill(~open_, 0)


def weights_log_sum_exp(q, k, mask=None):
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    w = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    return w if mask is None else w.masked_fill(~mask, 0)


WEIGHTS = [
    weights_einsum,
    weights_scaled_first,
    weights_in_float64,
    weights_in_float32,
    weights_safe_rows,
    weights_by_identity,
    weights_by_loops,
    weights_log_sum_exp,
]


@pytest.mark.parametrize("answer", WEIGHTS)
def test_other_right_weights_pass(answer):
    passes(answer, "attention_weights")


@pytest.mark.parametrize("weights", WEIGHTS)
def test_attention_on_other_right_weights_passes(weights):
    passes(lambda q, k, v, mask=None: weights(q, k, mask) @ v, "attention")


def test_built_in_attention_passes():
    def attention(q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    passes(attention, "attention")


def test_attention_by_einsum_and_by_a_sum_passes():
    def by_einsum(q, k, v, mask=None):
        weights = reference.attention_weights(q=q, k=k, mask=mask)
        return torch.einsum("...qk,...kd->...qd", weights, v)

    def by_a_sum(q, k, v, mask=None):
        weights = reference.attention_weights(q, k, mask)
        return (weights[..., None] * v[..., None, :, :]).sum(-2)

    passes(by_einsum, "attention")
    passes(by_a_sum, "attention")


def mask_by_positions(t_q, t_k=None):
    t_k = t_q if t_k is None else t_k
    if t_q > t_k:
        raise ValueError(f"t_q={t_q} is more than t_k={t_k}")
    return torch.arange(t_k)[None] <= torch.arange(t_k - t_q, t_k)[:, None]


def mask_by_loops(t_q, t_k=None):
    if t_k is None:
        t_k = t_q
    if t_q > t_k:
        raise ValueError(f"{t_q} queries, {t_k} keys")
    mask = torch.zeros(t_q, t_k, dtype=torch.bool)
    for i in range(t_q):
        for j in range(t_k):
            mask[i, j] = j <= i + (t_k - t_q)
    return mask


def mask_by_last_rows(t_q, t_k=None):
    t_k = t_q if t_k is None else t_k
    if t_q > t_k:
        raise ValueError(f"{t_q} > {t_k}")
    return ~torch.triu(torch.ones(t_k, t_k), diagonal=1).bool()[t_k - t_q :]


@pytest.mark.parametrize(
    "answer", [mask_by_positions, mask_by_loops, mask_by_last_rows]
)
def test_other_right_causal_masks_pass(answer):
    passes(answer, "causal_mask")


def padding_by_loop(lengths, t_k):
    mask = torch.zeros(len(lengths), 1, 1, t_k, dtype=torch.bool, device=lengths.device)
    for i, n in enumerate(lengths):
        mask[i, ..., : int(n)] = True
    return mask


def padding_by_view(lengths, t_k):
    at = torch.arange(t_k, device=lengths.device).expand(lengths.numel(), -1)
    return ~(at >= lengths.unsqueeze(1)).view(-1, 1, 1, t_k)


def padding_by_cumsum(lengths, t_k):
    ones = torch.ones(len(lengths), 1, 1, t_k, dtype=torch.long, device=lengths.device)
    return ones.cumsum(-1) <= lengths.view(-1, 1, 1, 1)


@pytest.mark.parametrize(
    "answer", [padding_by_loop, padding_by_view, padding_by_cumsum]
)
def test_other_right_padding_masks_pass(answer):
    passes(answer, "padding_mask")


class Layer(nn.Module):
    """A right layer, with its parts open to change."""

    def __init__(self, d_model, d_head):
        super().__init__()
        self.scale = 1 / math.sqrt(d_head)
        self.w_v = nn.Linear(d_model, d_head, bias=False)
        self.w_k = nn.Linear(d_model, d_head, bias=False)
        self.w_q = nn.Linear(d_model, d_head, bias=False)

    def forward(self, x, mask=None):
        q, k, v = self.w_q(x), self.w_k(x), self.w_v(x)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class FusedLayer(Layer):
    def forward(self, x, mask=None):
        fused = torch.cat([self.w_q.weight, self.w_k.weight, self.w_v.weight])
        q, k, v = F.linear(x, fused).chunk(3, dim=-1)
        return reference.attention(q, k, v, mask=mask)


class InitialisedLayer(Layer):
    def __init__(self, d_model, d_head):
        super().__init__(d_model, d_head)
        for p in self.parameters():
            nn.init.xavier_uniform_(p)

    def forward(self, x, mask=None):
        q, k, v = self.w_q(x) * self.scale, self.w_k(x), self.w_v(x)
        scores = q @ k.mT
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0)
        return F.dropout(weights, 0.0, self.training) @ v


@pytest.mark.parametrize("answer", [Layer, FusedLayer, InitialisedLayer])
def test_other_right_layers_pass(answer):
    passes(answer, "SelfAttention")


# Wrong answers that neither a fault lists nor a mutant gives --------------------------


def scores_of(q, k):
    return q @ k.mT / math.sqrt(q.shape[-1])


def unmasked(f):
    """Weights from a function of queries and keys, with a right mask."""

    def attention_weights(q, k, mask=None):
        w = f(q, k)
        return w if mask is None else w.masked_fill(~mask, 0)

    return attention_weights


def first_head_for_all(q, k):
    w = scores_of(q, k).softmax(-1)
    return w[..., :1, :, :].expand_as(w) if w.dim() > 2 else w


SCORES = {
    "by distance": lambda q, k: (-torch.cdist(q, k)).softmax(-1),
    "over keys and queries": lambda q, k: (
        scores_of(q, k).flatten(-2).softmax(-1).view_as(scores_of(q, k))
    ),
    "first head for all": first_head_for_all,
    "rounded": lambda q, k: scores_of(q, k).softmax(-1).round(decimals=3),
    "integer root": lambda q, k: (q @ k.mT / math.isqrt(q.shape[-1])).softmax(-1),
}


@pytest.mark.parametrize("name", SCORES)
def test_wrong_scores_are_rejected_without_a_wrong_name(name):
    weights = unmasked(SCORES[name])
    assert fails(weights, "attention_weights").fault is None
    fails(lambda q, k, v, mask=None: weights(q, k, mask) @ v, "attention")


def masked(change):
    """Right without a mask; `change(scores, mask)` gives the weights with one."""

    def attention_weights(q, k, mask=None):
        scores = scores_of(q, k)
        return scores.softmax(-1) if mask is None else change(scores, mask)

    return attention_weights


def zeroed(weights, mask):
    return weights.masked_fill(~mask, 0)


MASKED = {
    "filled with −1e9": (
        lambda s, m: s.masked_fill(~m, -1e9).softmax(-1),
        "finite_instead_of_infinite",
    ),
    "filled with −100": (
        lambda s, m: zeroed(s.masked_fill(~m, -100.0).softmax(-1), m),
        None,
    ),
    "filled with −65504": (
        lambda s, m: zeroed(s.masked_fill(~m, -65504.0).softmax(-1), m),
        "hidden_scores_end_at_65504",
    ),
    "log of the mask": (
        lambda s, m: (s + m.to(s.dtype).log()).softmax(-1),
        "nan_where_all_is_hidden",
    ),
    "log of the mask, cleaned": (
        lambda s, m: (s + m.to(s.dtype).log()).softmax(-1).nan_to_num(),
        "nan_in_the_gradient",
    ),
    "renormalised": (
        lambda s, m: (lambda w: w / w.sum(-1, keepdim=True))(s.softmax(-1) * m),
        "renormalised_after_softmax",
    ),
    "renormalised, cleaned": (
        lambda s, m: (lambda w: w / w.sum(-1, keepdim=True))(
            s.softmax(-1) * m
        ).nan_to_num(),
        "renormalised_without_nan",
    ),
    "only whole rows": (
        lambda s, m: s.softmax(-1).masked_fill(~m.any(-1, keepdim=True), 0),
        "mask_ignored",
    ),
    "square masks only": (
        lambda s, m: (
            zeroed(s.masked_fill(~m, -torch.inf).softmax(-1), m)
            if m.dim() == 2
            else s.softmax(-1)
        ),
        None,
    ),
    "a branch on the whole": (
        lambda s, m: (
            s.masked_fill(~m, -torch.inf).softmax(-1)
            if m.any()
            else torch.zeros_like(s)
        ),
        "nan_where_all_is_hidden",
    ),
    "mask changed in place": (
        lambda s, m: zeroed(s.masked_fill(m.logical_not_(), -torch.inf).softmax(-1), m),
        None,
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_wrong_masking_is_rejected(name):
    change, fault = MASKED[name]
    weights = masked(change)
    fails(weights, "attention_weights", fault)
    fails(lambda q, k, v, mask=None: weights(q, k, mask) @ v, "attention", fault)


def test_hidden_scores_of_65504_let_a_low_score_lose():
    q, k = torch.tensor([[300.0]]), torch.tensor([[-300.0], [1.0]])
    mask = torch.tensor([[True, False]])
    assert reference.attention_weights(q, k, mask).tolist() == [[1.0, 0.0]]
    wrong = masked(MASKED["filled with −65504"][0])
    assert wrong(q, k, mask).tolist() == [[0.0, 0.0]]


right = reference.attention_weights


def values_detached(q, k, v, mask=None):
    return right(q, k, mask) @ v.detach()


def causal_anyway(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)


def keys_as_values(q, k, v, mask=None):
    return right(q, k, mask) @ k[..., : v.shape[-1]]


def with_dropout(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.2)


def output_scaled(q, k, v, mask=None):
    return right(q, k, mask) / q.shape[-1] ** 0.5 @ v


def scaled_twice(q, k, v, mask=None):
    return right(q / q.shape[-1] ** 0.5, k, mask) @ v


def nan_replaced(q, k, v, mask=None):
    found = scores_of(q, k)
    found = found if mask is None else torch.where(mask, found, -torch.inf)
    out = found.softmax(-1) @ v
    return out.masked_fill(out.isnan(), 0)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (values_detached, None),
        (causal_anyway, "always_causal"),
        (keys_as_values, None),
        (with_dropout, None),
        (output_scaled, "output_scaled"),
        (scaled_twice, "divided_by_d_head"),
        (nan_replaced, "nan_replaced_in_the_output"),
    ],
)
def test_wrong_attention_is_rejected(answer, fault):
    fails(answer, "attention", fault)


def weights_in_place(q, k, mask=None):
    w = scores_of(q, k).masked_fill(
        torch.zeros(1, dtype=torch.bool) if mask is None else ~mask, -torch.inf
    )
    w = w.softmax(-1)
    w[w.isnan()] = 0
    return w


def weights_of_none(q, k, mask=None):
    hidden = ~mask
    return zeroed(scores_of(q, k).masked_fill(hidden, -torch.inf).softmax(-1), mask)


def weights_not_turned(q, k, mask=None):
    return torch.softmax(torch.matmul(q, k) / math.sqrt(q.size(-1)), dim=-1)


def weights_from_the_front(q, k, mask=None):
    return torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.size(-1)), dim=-1)


def weights_if_mask(q, k, mask=None):
    found = scores_of(q, k)
    if mask:
        found = found.masked_fill(~mask, -torch.inf)
    return found.softmax(-1)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (weights_not_turned, "keys_not_turned"),
        (weights_from_the_front, "dimensions_from_the_front"),
    ],
)
def test_mistakes_written_otherwise_are_named(answer, fault):
    fails(answer, "attention_weights", fault)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (weights_if_mask, "ask whether a whole tensor is true"),
        (weights_in_place, "overwritten in place"),
        (weights_of_none, "Something is None"),
    ],
)
def test_errors_are_explained(answer, says):
    assert says in fails(answer, "attention_weights").explanation


def layer_with(**methods):
    return type("SelfAttention", (Layer,), methods)


def frozen(self, d_model, d_head):
    Layer.__init__(self, d_model, d_head)
    self.w_q.requires_grad_(False)


def fused(self, d_model, d_head):
    nn.Module.__init__(self)
    self.w_qkv = nn.Linear(d_model, 3 * d_head, bias=False)


def in_a_dict(self, d_model, d_head):
    nn.Module.__init__(self)
    self.layers = {n: nn.Linear(d_model, d_head, bias=False) for n in "qkv"}


def too_early(self, d_model, d_head):
    self.w_q = nn.Linear(d_model, d_head, bias=False)
    nn.Module.__init__(self)


def buffered(self, d_model, d_head):
    Layer.__init__(self, d_model, d_head)
    self.register_buffer("mask", torch.ones(5, 5).tril().bool())


def batch_mixed(self, x, mask=None):
    return Layer.forward(self, x.flatten(0, 1)[None]).view(*x.shape[:2], -1)


def first_row_only(self, x, mask=None):
    return Layer.forward(self, x[:1], mask).expand(len(x), -1, -1)


def eval_differs(self, x, mask=None):
    return Layer.forward(self, x, mask) * (1.0 if self.training else 0.9)


def keys_kept(self, x, mask=None):
    self.k = getattr(self, "k", self.w_k(x))
    k = self.k if self.k.shape[:2] == x.shape[:2] else self.w_k(x)
    return reference.attention(self.w_q(x), k, self.w_v(x), mask)


def input_detached(self, x, mask=None):
    return Layer.forward(self, x.detach(), mask)


def dropout_in_training(self, x, mask=None):
    return F.dropout(Layer.forward(self, x, mask), 0.5, self.training)


def never_masks_in_eval(self, x, mask=None):
    return Layer.forward(self, x, mask if self.training else None)


@pytest.mark.parametrize(
    ("methods", "fault"),
    [
        ({"__init__": frozen}, None),
        ({"__init__": fused}, None),
        ({"__init__": in_a_dict}, None),
        ({"__init__": too_early}, None),
        ({"forward": batch_mixed}, None),
        ({"forward": first_row_only}, None),
        ({"forward": eval_differs}, None),
        ({"forward": keys_kept}, None),
        ({"forward": input_detached}, None),
        ({"forward": dropout_in_training}, None),
        ({"forward": never_masks_in_eval}, "mask_left_out_in_eval"),
    ],
)
def test_wrong_layers_are_rejected(methods, fault):
    fails(layer_with(**methods), "SelfAttention", fault)


def test_a_layer_may_have_a_buffer():
    passes(layer_with(__init__=buffered), "SelfAttention")


def test_masks_of_a_greatest_size_are_rejected():
    square = torch.ones(2048, 2048, dtype=torch.bool).tril()
    positions = torch.arange(2048)

    def causal_mask(t_q, t_k=None):
        t_k = t_q if t_k is None else t_k
        if t_q > t_k:
            raise ValueError(f"{t_q} queries, {t_k} keys")
        return square[t_k - t_q : t_k, :t_k]

    def padding_mask(lengths, t_k):
        row = positions[:t_k].to(lengths.device)
        return (row < lengths[:, None])[:, None, None]

    fails(causal_mask, "causal_mask")
    fails(padding_mask, "padding_mask")


def last_rows(t_q, t_k=None):
    t_k = t_q if t_k is None else t_k
    if t_q > t_k:
        raise ValueError(f"{t_q} queries, {t_k} keys")
    return torch.ones(t_k, t_k, dtype=torch.bool).tril()[-t_q:]


def windowed(t_q, t_k=None):
    mask = reference.causal_mask(t_q, t_k)
    return mask & mask.triu(mask.shape[1] - t_q - 4)


def says_nothing(t_q, t_k=None):
    if t_k is not None and t_q > t_k:
        raise ValueError("too many queries")
    return reference.causal_mask(t_q, t_k)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [(last_rows, "last_rows_of_none"), (windowed, None), (says_nothing, None)],
)
def test_wrong_causal_masks_are_rejected(answer, fault):
    fails(answer, "causal_mask", fault)


def padding_in_place(lengths, t_k):
    return reference.padding_mask(lengths.clamp_(max=4), t_k)


def padding_by_list(lengths, t_k):
    rows = [[[[i < n for i in range(t_k)]]] for n in lengths.tolist()]
    return torch.tensor(rows)  # on the CPU, wherever the lengths are


@pytest.mark.parametrize("answer", [padding_in_place, padding_by_list])
def test_wrong_padding_masks_are_rejected_without_a_wrong_name(answer):
    report = fails(answer, "padding_mask")
    assert report.fault is None and not report.hint
