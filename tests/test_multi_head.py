"""Lesson 03: the references, right answers in other forms, wrong ones of no fault."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solutions.attention import attention
from solutions.multi_head import (
    MultiHeadAttention,
    attention_parameters,
    merge_heads,
    repeat_kv,
    split_heads,
)
from tests.answers import fails, passes
from utils.exercises.multi_head import causal, grouped_by_torch, weights_for
from utils.probe import probe

# The reference against its oracle and PyTorch -----------------------------------------


@pytest.mark.parametrize("n_kv_heads", [1, 2, 3, 6])
def test_reference_and_oracle_agree(n_kv_heads):
    weights = weights_for(12, 6, n_kv_heads, 2, dtype=torch.float64)
    x, mask = probe(3, 5, 12, dtype=torch.float64), causal(5)
    module = MultiHeadAttention(12, 6, n_kv_heads).double()
    module.load_state_dict(dict(zip(module.state_dict(), weights, strict=True)))
    actual = module(x, mask)
    expected = grouped_by_torch(x, weights, 6, n_kv_heads, mask)
    torch.testing.assert_close(actual, expected)


def test_merge_undoes_split():
    x = probe(2, 5, 12)
    assert torch.equal(merge_heads(split_heads(x, 3)), x)


# Right answers in other forms ---------------------------------------------------------


def split_by_chunks(x, n_heads):
    if x.shape[-1] % n_heads:
        raise ValueError(f"{x.shape[-1]} is not divisible by {n_heads}")
    return torch.cat([each.unsqueeze(1) for each in x.chunk(n_heads, -1)], 1)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("split_heads", split_by_chunks),
        ("split_heads", lambda x, n_heads: split_heads(x, n_heads).contiguous()),
        ("merge_heads", lambda x: x.movedim(1, 2).contiguous().flatten(-2)),
        ("merge_heads", lambda x: torch.cat(x.unbind(1), -1)),
        (
            "repeat_kv",
            lambda x, group_size: (
                x[:, :, None].expand(-1, -1, group_size, -1, -1).flatten(1, 2)
            ),
        ),
        (
            "repeat_kv",
            lambda x, group_size: x.repeat(1, 1, group_size, 1).view(
                len(x), -1, *x.shape[2:]
            ),
        ),
        (
            "repeat_kv",
            lambda x, group_size: x if group_size == 1 else repeat_kv(x, group_size),
        ),
        ("attention_parameters", lambda *sizes: counting(sizes)),
    ],
)
def test_functions_in_other_forms(name, answer):
    passes(answer, name)


def counting(sizes):
    return sum(p.numel() for p in MultiHeadAttention(*sizes).parameters())


def multi_head(look=attention, split=split_heads, merge=merge_heads, prepare=None):
    """A module with another attention, other heads, or other first weights."""

    class Module(MultiHeadAttention):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if prepare is not None:
                prepare(self)

        def forward(self, x, mask=None, rotate=None):
            q = split(self.w_q(x), self.n_heads)
            k = split(self.w_k(x), self.n_kv_heads)
            v = split(self.w_v(x), self.n_kv_heads)
            if rotate is not None:
                q, k = rotate(q), rotate(k)
            group = self.n_heads // self.n_kv_heads
            return self.w_o(
                merge(look(q, repeat_kv(k, group), repeat_kv(v, group), mask))
            )

    return Module


def by_einsum(q, k, v, mask):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    if mask is None:
        return scores.softmax(-1) @ v
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    weights = torch.where(mask, weights, torch.zeros_like(weights))
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def heads_in_the_batch(q, k, v, mask):
    b, h, t, _ = q.shape
    if mask is not None:
        mask = mask.expand(b, h, t, t).reshape(b * h, t, t)
    q, k, v = (each.reshape(b * h, t, -1) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask).view(b, h, t, -1)


class Bare(nn.Module):
    """Matrices in place of layers; adds what each head writes and never merges."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        module = MultiHeadAttention(*args, **kwargs)
        self.n_heads, self.n_kv_heads = module.n_heads, module.n_kv_heads
        for name in ("w_q", "w_k", "w_v", "w_o"):
            setattr(self, name, getattr(module, name).weight)

    def forward(self, x, mask=None, rotate=None):
        q = split_heads(x @ self.w_q.T, self.n_heads)
        k, v = (split_heads(x @ w.T, self.n_kv_heads) for w in (self.w_k, self.w_v))
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        columns = self.w_o.unflatten(1, (self.n_heads, -1))
        return torch.einsum("bhtd,mhd->btm", out, columns)


def small(module):
    for p in module.parameters():
        nn.init.normal_(p, std=0.02)
    nn.init.zeros_(module.w_o.weight)


@pytest.mark.parametrize(
    "answer",
    [
        multi_head(by_einsum),
        multi_head(heads_in_the_batch),
        multi_head(F.scaled_dot_product_attention),
        multi_head(prepare=small),
        Bare,
    ],
)
def test_multi_head_in_other_forms(answer):
    passes(answer, "MultiHeadAttention")


# Wrong answers that no fault lists, or in another form than the fault -----------------


@pytest.mark.parametrize(
    ("name", "answer", "fault"),
    [
        ("split_heads", lambda x, n: split_heads(x.roll(1, -1), n), None),
        ("split_heads", lambda x, n: split_heads(x[:1], n), None),
        ("merge_heads", lambda x: x.flatten(2), "only_flattened"),
        ("merge_heads", lambda x: x.flatten(1, 2), "joined_along_time"),
        ("merge_heads", lambda x: x.transpose(1, 3).flatten(2), None),
        ("attention_parameters", lambda *s: attention_parameters(*s) / 1, None),
        ("attention_parameters", lambda *s: torch.tensor(counting(s)), None),
        ("attention_parameters", lambda *s: attention_parameters(*s) + s[3], None),
    ],
)
def test_other_wrong_answers(name, answer, fault):
    assert fails(answer, name).fault == fault


def nan_replaced_late(q, k, v, mask):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf)
    out = scores.softmax(-1) @ v
    return out.masked_fill(out.isnan(), 0)


def given(hide=None, move=None):
    """The reference with another mask or rotation, where there is one."""

    class Given(MultiHeadAttention):
        def forward(self, x, mask=None, rotate=None):
            if mask is not None and hide is not None:
                mask = hide(mask, self.training)
            if rotate is not None and move is not None:
                rotate = move(rotate, self.training)
            return super().forward(x, mask, rotate)

    return Given


def of_all_rows_and_heads(rotate):
    """Rows and heads as one batch dimension."""
    return lambda each: rotate(each.flatten(0, 1)[None])[0].view_as(each)


def frozen(module):
    module.w_k.requires_grad_(False)


def without_values(module):
    del module.w_v


def biased(module):
    module.w_o = nn.Linear(module.w_o.in_features, module.w_o.out_features)


def copied(module):
    module.w_v.load_state_dict(module.w_k.state_dict())


def dealt(x, n_heads):
    return torch.stack([x[..., h::n_heads] for h in range(n_heads)], dim=1)


def collected(x):
    return torch.stack(x.unbind(1), dim=-1).flatten(2)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (multi_head(nan_replaced_late), None),
        (multi_head(lambda q, k, v, m: attention(q, k, v, m) * 1.001), None),
        (multi_head(lambda *all_: attention(*all_).clamp(-0.5, 0.5)), None),
        (multi_head(lambda *all_: F.dropout(attention(*all_), 0.1)), "random"),
        (multi_head(split=dealt, merge=collected), "interleaved_both_ways"),
        (multi_head(prepare=frozen), None),
        (multi_head(prepare=without_values), None),  # not that one layer serves two
        (multi_head(prepare=copied), None),
        (given(lambda m, training: m | ~m.any(-1, keepdim=True)), None),
        (given(lambda m, training: m.mT if m.shape[-2] > 1 else m), None),
        (given(lambda m, training: m | torch.eye(m.shape[-1]).bool()), None),
        (given(lambda m, training: m if training else None), None),
        (given(move=lambda r, training: r if training else None), None),
        (given(move=lambda r, training: lambda each: r(r(each))), None),
        (given(move=lambda r, training: of_all_rows_and_heads(r)), None),
    ],
)
def test_other_wrong_modules(answer, fault):
    assert fails(answer, "MultiHeadAttention").fault == fault


def test_a_fault_of_a_weight_says_which():
    message = fails(multi_head(prepare=biased), "MultiHeadAttention").message
    assert "`w_o.bias` of shape (12,)" in message
