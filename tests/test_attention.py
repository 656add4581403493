"""Lesson 02: the reference against PyTorch; other right and other wrong answers."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solutions import attention as reference
from utils.check import evaluate
from utils.exercises.attention import slow_attention, slow_weights, some_mask
from utils.probe import probe


def passes(answer, name):
    report = evaluate(answer, name)
    assert report.status == "passed", report.message


def fails(answer, name, fault=None):
    report = evaluate(answer, name)
    assert report.status == "failed", report.message
    if fault is not None:
        assert report.fault == fault, report.message


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


# Wrong answers that no fault lists ----------------------------------------------------


def no_mask_after(f):
    """Weights from a function of the scores, with a right mask."""

    def attention_weights(q, k, mask=None):
        w = f(q, k)
        return w if mask is None else w.masked_fill(~mask, 0)

    return attention_weights


def cosine(q, k):
    return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).softmax(-1)


def by_distance(q, k):
    return (-torch.cdist(q, k) / math.sqrt(q.shape[-1])).softmax(-1)


def root_of_queries(q, k):
    return (q @ k.mT / math.sqrt(q.shape[-2])).softmax(-1)


def rounded_root(q, k):
    return (q @ k.mT // math.sqrt(q.shape[-1])).softmax(-1)


def over_keys_and_queries(q, k):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.flatten(-2).softmax(-1).view_as(scores)


def first_head_for_all(q, k):
    w = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    return w[..., :1, :, :].expand_as(w) if w.dim() > 2 else w


def hardened(q, k):
    w = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    return F.one_hot(w.argmax(-1), k.shape[-2]).to(q.dtype)


def rounded(q, k):
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1).round(decimals=3)


def constant_four(q, k):
    return (q @ k.mT / 4).softmax(-1)


def integer_root(q, k):
    return (q @ k.mT / math.isqrt(q.shape[-1])).softmax(-1)


@pytest.mark.parametrize(
    "wrong",
    [
        cosine,
        by_distance,
        root_of_queries,
        rounded_root,
        over_keys_and_queries,
        first_head_for_all,
        hardened,
        rounded,
        constant_four,
        integer_root,
    ],
)
def test_other_wrong_scores_fail(wrong):
    weights = no_mask_after(wrong)
    fails(weights, "attention_weights")
    fails(lambda q, k, v, mask=None: weights(q, k, mask) @ v, "attention")


def masked(change):
    """Right without a mask; `change(scores, mask)` gives the weights with one."""

    def attention_weights(q, k, mask=None):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return scores.softmax(-1) if mask is None else change(scores, mask)

    return attention_weights


MASKED = {
    "filled_with_minus_1e9": (
        lambda s, m: s.masked_fill(~m, -1e9).softmax(-1),
        "finite_instead_of_infinite",
    ),
    "filled_with_minus_100": (
        lambda s, m: s.masked_fill(~m, -100.0).softmax(-1).masked_fill(~m, 0),
        None,
    ),
    "minus_1e4_and_zeroed": (
        lambda s, m: s.masked_fill(~m, -1e4).softmax(-1).masked_fill(~m, 0),
        None,
    ),
    "large_number_times_mask": (
        lambda s, m: (s - 1e9 * (~m).to(s.dtype)).softmax(-1),
        None,
    ),
    "log_of_mask": (
        lambda s, m: (s + m.to(s.dtype).log()).softmax(-1),
        "nan_where_all_is_hidden",
    ),
    "log_of_mask_cleaned": (
        lambda s, m: (s + m.to(s.dtype).log()).softmax(-1).nan_to_num(),
        "nan_in_the_gradient",
    ),
    "log_of_mask_zeroed": (
        lambda s, m: (s + m.to(s.dtype).log()).softmax(-1).masked_fill(~m, 0),
        "nan_in_the_gradient",
    ),
    "renormalised_with_a_clamp": (
        lambda s, m: (
            (s.softmax(-1) * m)
            / (s.softmax(-1) * m).sum(-1, keepdim=True).clamp(min=1e-9)
        ),
        None,
    ),
    "only_whole_rows": (
        lambda s, m: s.softmax(-1).masked_fill(~m.any(-1, keepdim=True), 0),
        "mask_ignored",
    ),
    "square_masks_only": (
        lambda s, m: (
            s.masked_fill(~m, -torch.inf).softmax(-1).masked_fill(~m, 0)
            if m.dim() == 2
            else s.softmax(-1)
        ),
        None,
    ),
    "turned_round": (
        lambda s, m: (
            s.masked_fill(~m.mT, -torch.inf).softmax(-1)
            if m.shape[-1] == m.shape[-2]
            else s.masked_fill(~m, -torch.inf).softmax(-1).masked_fill(~m, 0)
        ),
        None,
    ),
    "empty_rows_left_open": (
        lambda s, m: s.masked_fill(~(m | ~m.any(-1, keepdim=True)), -torch.inf).softmax(
            -1
        ),
        None,
    ),
    "empty_rows_with_a_branch_on_the_whole": (
        lambda s, m: (
            s.masked_fill(~m, -torch.inf).softmax(-1)
            if m.any()
            else torch.zeros_like(s)
        ),
        "nan_where_all_is_hidden",
    ),
    "mask_in_place": (
        lambda s, m: (
            s.masked_fill(m.logical_not_(), -torch.inf).softmax(-1).masked_fill(m, 0)
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_other_wrong_masking_fails(name):
    change, fault = MASKED[name]
    weights = masked(change)
    fails(weights, "attention_weights", fault)
    fails(lambda q, k, v, mask=None: weights(q, k, mask) @ v, "attention", fault)


def test_other_wrong_attention_fails():
    right = reference.attention_weights

    def in_place(q, k, v, mask=None):
        q /= math.sqrt(q.shape[-1])
        return right(q * math.sqrt(q.shape[-1]), k, mask) @ v

    def no_gradient(q, k, v, mask=None):
        with torch.no_grad():
            return right(q, k, mask) @ v

    def values_detached(q, k, v, mask=None):
        return right(q, k, mask) @ v.detach()

    def weights_detached(q, k, v, mask=None):
        return right(q, k, mask).detach() @ v

    def values_masked(q, k, v, mask=None):
        return (
            right(q, k) @ v if mask is None else right(q, k, mask).mul(mask) @ (2 * v)
        )

    def causal_anyway(q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)

    def keys_as_values(q, k, v, mask=None):
        return right(q, k, mask) @ k[..., : v.shape[-1]]

    def with_dropout(q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.2)

    def returns_nothing(q, k, v, mask=None):
        right(q, k, mask) @ v

    for wrong in (
        in_place,
        no_gradient,
        values_detached,
        weights_detached,
        values_masked,
        causal_anyway,
        keys_as_values,
        with_dropout,
        returns_nothing,
    ):
        fails(wrong, "attention")


def test_other_wrong_causal_masks_fail():
    right = reference.causal_mask

    def square_if_small(t_q, t_k=None):
        return right(t_q, t_q if t_k is None or t_q > 1 else t_k)

    def one_query_only(t_q, t_k=None):
        mask = right(t_q, t_k)
        return mask[-1:] if t_q == 1 else mask.clone().fill_(True)

    def assertion(t_q, t_k=None):
        assert t_k is None or t_q <= t_k, f"{t_q} {t_k}"
        return right(t_q, t_k)

    def silent(t_q, t_k=None):
        if t_k is not None and t_q > t_k:
            raise ValueError("too many queries")
        return right(t_q, t_k)

    def first_row_open(t_q, t_k=None):
        mask = right(t_q, t_k)
        mask[0] = True
        return mask

    def needs_keys(t_q, t_k):
        return right(t_q, t_k)

    def as_list(t_q, t_k=None):
        return right(t_q, t_k).tolist()

    def windowed(t_q, t_k=None):
        mask = right(t_q, t_k)
        return mask & mask.triu(mask.shape[1] - t_q - 4)

    for wrong in (
        square_if_small,
        one_query_only,
        assertion,
        silent,
        first_row_open,
        needs_keys,
        as_list,
        windowed,
    ):
        fails(wrong, "causal_mask")


def test_other_wrong_padding_masks_fail():
    def rows_of_zero_open(lengths, t_k):
        return reference.padding_mask(lengths.clamp(min=1), t_k)

    def square(lengths, t_k):
        real = reference.padding_mask(lengths, t_k)
        return real & real.mT

    def as_numbers(lengths, t_k):
        return reference.padding_mask(lengths, t_k).long()

    def clamps_in_place(lengths, t_k):
        return reference.padding_mask(lengths.clamp_(max=4), t_k)

    def squeezed(lengths, t_k):
        return reference.padding_mask(lengths, t_k).squeeze(0)

    def by_list(lengths, t_k):
        rows = [[i < n for i in range(t_k)] for n in lengths.tolist()]
        return torch.tensor(rows)[:, None]

    for wrong in (
        rows_of_zero_open,
        square,
        as_numbers,
        clamps_in_place,
        squeezed,
        by_list,
    ):
        fails(wrong, "padding_mask")


def layer_with(**methods):
    return type("SelfAttention", (Layer,), methods)


def test_other_wrong_layers_fail():
    def through_list(self, d_model, d_head):
        nn.Module.__init__(self)
        self.layers = [nn.Linear(d_model, d_head, bias=False) for _ in range(3)]

    def frozen(self, d_model, d_head):
        Layer.__init__(self, d_model, d_head)
        self.w_q.requires_grad_(False)

    def fused(self, d_model, d_head):
        nn.Module.__init__(self)
        self.w_qkv = nn.Linear(d_model, 3 * d_head, bias=False)

    def tied_at_first(self, d_model, d_head):
        Layer.__init__(self, d_model, d_head)
        self.w_k.weight.data = self.w_q.weight.data.clone()

    def batch_mixed(self, x, mask=None):
        flat = x.flatten(0, 1)[None]
        out = Layer.forward(self, flat)
        return out.view(*x.shape[:2], -1)

    def first_row_only(self, x, mask=None):
        return Layer.forward(self, x[:1], mask).expand(len(x), -1, -1)

    def float32_only(self, x, mask=None):
        return Layer.forward(self.float(), x.float(), mask)

    def eval_differs(self, x, mask=None):
        return Layer.forward(self, x, mask) * (1.0 if self.training else 0.9)

    def keeps_keys(self, x, mask=None):
        self.k = getattr(self, "k", self.w_k(x))
        k = self.k if self.k.shape[:2] == x.shape[:2] else self.w_k(x)
        return reference.attention(self.w_q(x), k, self.w_v(x), mask)

    def input_detached(self, x, mask=None):
        return Layer.forward(self, x.detach(), mask)

    def normalised(self, x, mask=None):
        return Layer.forward(self, F.layer_norm(x, x.shape[-1:]), mask)

    def masked_values(self, x, mask=None):
        out = Layer.forward(self, x, mask)
        return out.nan_to_num() + 1e-3

    def two_results(self, x, mask=None):
        return Layer.forward(self, x, mask), mask

    def own_matrix(self, d_model, d_head):
        Layer.__init__(self, d_model, d_head)
        self.register_buffer("mask", torch.ones(5, 5).tril().bool())

    def needs_mask(self, x, mask):
        return Layer.forward(self, x, mask)

    for name, wrong in list(locals().items()):
        if name in ("through_list", "frozen", "fused", "tied_at_first"):
            fails(layer_with(__init__=wrong), "SelfAttention")
        elif name != "own_matrix":
            fails(layer_with(forward=wrong), "SelfAttention")

    passes(layer_with(__init__=own_matrix), "SelfAttention")


# Common mistakes in a form of their own, and the names that they should get -----------


def weights_in_place(q, k, mask=None):
    w = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(
        torch.zeros(1, dtype=torch.bool) if mask is None else ~mask, -torch.inf
    )
    w = w.softmax(-1)
    w[w.isnan()] = 0
    return w


def weights_of_none(q, k, mask=None):
    hidden = ~mask
    w = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(hidden, -torch.inf).softmax(-1)
    return w.masked_fill(hidden, 0)


def weights_not_turned(q, k, mask=None):
    return torch.softmax(torch.matmul(q, k) / math.sqrt(q.size(-1)), dim=-1)


def weights_from_the_front(q, k, mask=None):
    return torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.size(-1)), dim=-1)


def weights_inverted_once(q, k, mask=None):
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.size(-1))
    if mask is None:
        return scores.softmax(-1)
    return scores.masked_fill(mask, -torch.inf).softmax(-1).masked_fill(~mask, 0.0)


def weights_by(scores, before=None, after=None):
    """Weights of these scores; `before` and `after` change mask and scores, weights."""

    def attention_weights(q, k, mask=None):
        found = scores(q, k)
        if mask is None:
            return F.softmax(found, dim=-1)
        mask, found = (before or (lambda m, s: (m, s)))(mask, found)
        found = F.softmax(found.masked_fill(mask.logical_not(), -torch.inf), dim=-1)
        return torch.where(after(mask) if after else mask, found, 0)

    return attention_weights


def scaled(q, k):
    return torch.einsum("...qd,...kd->...qk", q, k) * q.shape[-1] ** -0.5


weights_of_reshaped_keys = weights_by(
    lambda q, k: q @ k.reshape(*q.shape[:-2], q.shape[-1], -1) / q.size(-1) ** 0.5
)
weights_by_bmm = weights_by(lambda q, k: torch.bmm(q * q.size(-1) ** -0.5, k.mT))
weights_by_length = weights_by(lambda q, k: q @ k.mT * q.shape[-2] ** -0.5)
weights_by_cosine = weights_by(
    lambda q, k: F.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
)
weights_of_everything = weights_by(
    scaled, lambda m, s: (torch.where(m.any(-1, keepdim=True), m, True), s)
)


def weights_causal_anyway(q, k, mask=None):
    if mask is None:
        rows, columns = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
        mask = columns <= rows[:, None]
    return reference.attention_weights(q, k, mask)


def weights_if_mask(q, k, mask=None):
    found = scaled(q, k)
    if mask:
        found = found.masked_fill(~mask, -torch.inf)
    return found.softmax(-1)


def weights_of_zeroed_scores(q, k, mask=None):
    if mask is None:
        return scaled(q, k).softmax(-1)
    return (scaled(q, k) * mask).softmax(-1) * mask


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (weights_of_reshaped_keys, "keys_reshaped"),
        (weights_by_bmm, "three_dimensions_only"),
        (weights_by_length, "root_of_the_number_of_queries"),
        (weights_by_cosine, "cosine"),
        (weights_of_everything, "mask_lifted_where_all_is_hidden"),
        (weights_causal_anyway, "always_causal"),
        (weights_if_mask, "mask_taken_for_a_truth_value"),
        (weights_of_zeroed_scores, "hidden_scores_zero_then_hidden"),
        (weights_in_place, "overwritten_in_place"),
        (weights_of_none, "none_taken_for_a_mask"),
        (weights_not_turned, "keys_not_turned"),
        (weights_from_the_front, "dimensions_from_the_front"),
        (weights_inverted_once, "mask_inverted_before_softmax"),
    ],
)
def test_common_mistakes_in_the_weights_are_named(answer, fault):
    fails(answer, "attention_weights", fault)


def test_root_taken_twice_is_named_in_attention():
    def attention(q, k, v, mask=None):
        return reference.attention_weights(q / q.shape[-1] ** 0.5, k, mask) @ v

    report = evaluate(attention, "attention")
    assert report.fault == "divided_by_d_head"
    assert "by the root twice" in report.message


def test_an_integer_root_is_not_named_after_the_length():
    wrong = weights_by(lambda q, k: q @ k.mT / math.isqrt(q.shape[-1]))
    report = evaluate(wrong, "attention_weights")
    assert report.status == "failed"
    assert report.fault is None, report.message


def test_common_mistakes_in_attention_are_named():
    right = reference.attention_weights

    def keys_averaged(q, k, v, mask=None):
        return torch.einsum("...qk,...kd->...qd", right(q, k, mask), k)

    def output_scaled(q, k, v, mask=None):
        return right(q, k, mask) / q.shape[-1] ** 0.5 @ v

    def softmax_twice(q, k, v, mask=None):
        return F.softmax(right(q, k, mask), dim=-1) @ v

    def nan_replaced_in_the_output(q, k, v, mask=None):
        found = scaled(q, k)
        found = found if mask is None else torch.where(mask, found, -torch.inf)
        out = found.softmax(-1) @ v
        return out.masked_fill(out.isnan(), 0)

    for wrong in (
        keys_averaged,
        output_scaled,
        softmax_twice,
        nan_replaced_in_the_output,
    ):
        fails(wrong, "attention", wrong.__name__)


def test_common_mistakes_in_the_layer_are_named():
    def layer(prepare):
        class SelfAttention(nn.Module):
            def __init__(self, d_model, d_head):
                prepare(self, d_model, d_head)

            def forward(self, x, mask=None):
                return reference.attention(*(w(x) for w in self.layers), mask)

        return SelfAttention

    def new(d_model, d_head):
        return nn.Linear(d_model, d_head, bias=False)

    def one_for_all(self, d_model, d_head):
        nn.Module.__init__(self)
        self.w_q = new(d_model, d_head)
        self.w_k, self.w_v = self.w_q, self.w_q

    def in_a_dict(self, d_model, d_head):
        nn.Module.__init__(self)
        self.layers = {n: new(d_model, d_head) for n in ("w_q", "w_k", "w_v")}

    def too_early(self, d_model, d_head):
        self.w_q = new(d_model, d_head)
        nn.Module.__init__(self)

    def looking(look):
        class SelfAttention(reference.SelfAttention):
            def forward(self, x, mask=None):
                return look(self.w_q(x), self.w_k(x), self.w_v(x), mask)

        return SelfAttention

    def by_length(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, mask, scale=q.size(1) ** -0.5)

    def if_mask(q, k, v, mask):
        return reference.attention(q, k, v, mask if mask else None)

    def weights(q, k, v, mask):
        return reference.attention_weights(q, k, mask)

    class InTraining(reference.SelfAttention):
        def forward(self, x, mask=None):
            return super().forward(x, mask if self.training else None)

    class FillsIn(reference.SelfAttention):
        def forward(self, x, mask=None):
            if mask is None:
                mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
            return super().forward(x, mask)

    fails(InTraining, "SelfAttention", "mask_left_out_in_eval")
    fails(FillsIn, "SelfAttention")
    fails(looking(by_length), "SelfAttention", "root_of_the_length")
    fails(looking(if_mask), "SelfAttention", "mask_taken_for_a_truth_value")
    fails(looking(weights), "SelfAttention", "weights_returned")
    fails(layer(one_for_all), "SelfAttention", "one_projection_for_all")
    fails(layer(in_a_dict), "SelfAttention", "no_parameters")
    fails(layer(too_early), "SelfAttention", "not_initialised")


def test_masks_of_a_greatest_size_fail():
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


def test_common_mistakes_in_the_masks_are_named():
    def open_rectangle(t_q, t_k=None):
        if t_k is None or t_k == t_q:
            return reference.causal_mask(t_q)
        return reference.causal_mask(t_q, t_k) | True

    def queries_too(lengths, t_k):
        real = reference.padding_mask(lengths, t_k)
        return real & real.mT

    fails(open_rectangle, "causal_mask", "rectangle_open")
    fails(queries_too, "padding_mask", "queries_hidden_too")


def test_no_keys_are_not_taken_for_missing():
    def causal_mask(t_q, t_k=None):
        t_k = t_k or t_q
        if t_k < t_q:
            raise ValueError(f"{t_q} queries and {t_k} keys do not fit")
        return torch.ones(t_q, t_k).tril(t_k - t_q).bool()

    fails(causal_mask, "causal_mask", "zero_taken_for_missing")
