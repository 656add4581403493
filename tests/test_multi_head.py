"""Lesson 03: right answers in other forms pass, wrong ones that no fault lists fail."""

import math

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
from utils.check import evaluate
from utils.exercises import multi_head as spec
from utils.probe import probe


def passes(answer, name):
    report = evaluate(answer, name)
    assert report.status == "passed", report.message


def fails(answer, name):
    report = evaluate(answer, name)
    assert report.status == "failed", f"{answer} passes"
    return report


# The reference against its oracles, and the oracles against each other ----------------


def with_weights(weights, *args, **kwargs):
    module = MultiHeadAttention(*args, **kwargs)
    with torch.no_grad():
        for name, value in zip(("w_q", "w_k", "w_v", "w_o"), weights, strict=True):
            getattr(module, name).weight.copy_(value)
    return module.double()


def test_reference_and_all_oracles_agree():
    weights = spec.weights_for(12, 6, 6, 2)
    x, mask = probe(3, 5, 12, dtype=torch.float64), spec.causal(5)
    actual = with_weights(weights, 12, 6)(x, mask)
    for expected in (
        spec.torch_module(x, weights, 6, mask),
        spec.torch_grouped(x, weights, 6, 6, mask),
        spec.head_by_head(x, weights, 6, 6, mask),
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 3, 6])
def test_reference_shares_heads_as_torch_does(n_kv_heads):
    weights = spec.weights_for(10, 6, n_kv_heads, 3)
    x = probe(3, 5, 10, dtype=torch.float64)
    actual = with_weights(weights, 10, 6, n_kv_heads, 3)(x)
    torch.testing.assert_close(actual, spec.torch_grouped(x, weights, 6, n_kv_heads))
    torch.testing.assert_close(actual, spec.head_by_head(x, weights, 6, n_kv_heads))


def test_merge_undoes_split():
    x = probe(2, 5, 12)
    assert torch.equal(merge_heads(split_heads(x, 3)), x)
    assert torch.equal(repeat_kv(split_heads(x, 3), 1), split_heads(x, 3))


@pytest.mark.parametrize("shape", [(12, 3, 3, 4), (576, 9, 3, 64), (640, 4, 1, 256)])
def test_count_is_that_of_the_module(shape):
    module = MultiHeadAttention(*shape)
    assert attention_parameters(*shape) == sum(p.numel() for p in module.parameters())


# Right answers in other forms ---------------------------------------------------------


def refuse(x, n_heads):
    if x.shape[-1] % n_heads:
        raise ValueError(f"{x.shape[-1]} is not divisible by {n_heads}")


def split_by_slices(x, n_heads):
    refuse(x, n_heads)
    return torch.stack(x.split(x.shape[-1] // n_heads, dim=-1), dim=1)


def split_by_permute(x, n_heads):
    refuse(x, n_heads)
    b, t, d = x.shape
    return x.reshape(b, t, n_heads, d // n_heads).permute(0, 2, 1, 3).contiguous()


def split_by_chunks(x, n_heads):
    refuse(x, n_heads)
    return torch.cat([c.unsqueeze(1) for c in x.chunk(n_heads, -1)], 1)


def split_by_loop(x, n_heads):
    refuse(x, n_heads)
    d_head = x.shape[-1] // n_heads
    out = x.new_empty(x.shape[0], n_heads, x.shape[1], d_head)
    for h in range(n_heads):
        out[:, h] = x[:, :, h * d_head : (h + 1) * d_head]
    return out


@pytest.mark.parametrize(
    "answer", [split_by_slices, split_by_permute, split_by_chunks, split_by_loop]
)
def test_split_in_other_forms(answer):
    passes(answer, "split_heads")


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: torch.cat(x.unbind(1), -1),
        lambda x: x.permute(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1),
        lambda x: x.transpose(1, 2).contiguous().view(x.shape[0], x.shape[2], -1),
        lambda x: x.movedim(1, 2).flatten(-2),
        lambda x: torch.cat([x[:, h] for h in range(x.size(1))], dim=2),
    ],
)
def test_merge_in_other_forms(answer):
    passes(answer, "merge_heads")


@pytest.mark.parametrize(
    "answer",
    [
        lambda x, group_size: x.repeat_interleave(group_size, 1),
        lambda x, group_size: (
            x[:, :, None].expand(-1, -1, group_size, -1, -1).flatten(1, 2)
        ),
        lambda x, group_size: torch.stack([x] * group_size, 2).flatten(1, 2),
        lambda x, group_size: x[:, torch.arange(x.shape[1] * group_size) // group_size],
        lambda x, group_size: x.repeat(1, 1, group_size, 1).reshape(
            x.shape[0], -1, *x.shape[2:]
        ),
        lambda x, group_size: (
            x if group_size == 1 else torch.repeat_interleave(x, group_size, dim=-3)
        ),
    ],
)
def test_repeat_in_other_forms(answer):
    passes(answer, "repeat_kv")


class Base(nn.Module):
    def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
        super().__init__()
        n_kv_heads = n_kv_heads or n_heads
        if d_head is None:
            if d_model % n_heads != 0:
                raise ValueError(f"{d_model=} must be divisible by {n_heads=}")
            d_head = d_model // n_heads
        if n_heads % n_kv_heads != 0:
            raise ValueError(f"{n_heads=} must be divisible by {n_kv_heads=}")
        self.h, self.kv, self.d = n_heads, n_kv_heads, d_head
        self.w_q = nn.Linear(d_model, n_heads * d_head, bias=False)
        self.w_k = nn.Linear(d_model, n_kv_heads * d_head, bias=False)
        self.w_v = nn.Linear(d_model, n_kv_heads * d_head, bias=False)
        self.w_o = nn.Linear(n_heads * d_head, d_model, bias=False)

    def qkv(self, x, rotate):
        q = split_heads(self.w_q(x), self.h)
        k, v = split_heads(self.w_k(x), self.kv), split_heads(self.w_v(x), self.kv)
        return (q, k, v) if rotate is None else (rotate(q), rotate(k), v)


class Fused(Base):
    def forward(self, x, mask=None, rotate=None):
        q, k, v = self.qkv(x, rotate)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.w_o(out.transpose(1, 2).reshape(*x.shape[:2], -1))


class Einsum(Base):
    def forward(self, x, mask=None, rotate=None):
        q, k, v = self.qkv(x, rotate)
        q = q.unflatten(1, (self.kv, -1))  # B K G T D
        scores = torch.einsum("bkgqd,bksd->bkgqs", q, k) / self.d**0.5
        if mask is not None:
            mask = torch.broadcast_to(mask, (len(x), self.h, *scores.shape[-2:]))
            mask = mask.unflatten(1, (self.kv, -1))
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.nan_to_num(scores.softmax(-1))
        if mask is not None and not mask.any(-1).all():
            weights = torch.where(mask, weights, torch.zeros_like(weights))
        out = torch.einsum("bkgqs,bksd->bqkgd", weights, v)
        return self.w_o(out.flatten(2))


class Loop(Base):
    """Rotates after repeating, and treats one head after the other in float64."""

    def forward(self, x, mask=None, rotate=None):
        q, k, v = self.qkv(x, None)
        k, v = repeat_kv(k, self.h // self.kv), repeat_kv(v, self.h // self.kv)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        if mask is not None:
            mask = mask.expand(x.shape[0], self.h, x.shape[1], x.shape[1])
        results = []
        for h in range(self.h):
            scores = q[:, h].double() @ k[:, h].double().mT / math.sqrt(self.d)
            if mask is not None:
                scores = scores.masked_fill(~mask[:, h], -1e300)
            weights = scores.softmax(-1)
            if mask is not None:
                weights = weights * mask[:, h]
            results.append((weights @ v[:, h].double()).to(x.dtype))
        return self.w_o(torch.cat(results, -1))


class HeadsInTheBatch(Base):
    def forward(self, x, mask=None, rotate=None):
        b, t, _ = x.shape
        q, k, v = self.qkv(x, rotate)
        k, v = repeat_kv(k, self.h // self.kv), repeat_kv(v, self.h // self.kv)
        if mask is not None:
            mask = mask.expand(b, self.h, t, t).reshape(b * self.h, t, t)
        q, k, v = (each.reshape(b * self.h, t, self.d) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = out.reshape(b, self.h, t, self.d)
        return self.w_o(merge_heads(out))


class SumOfHeads(Base):
    """Never merges: adds what each head writes through its columns of w_o."""

    def forward(self, x, mask=None, rotate=None):
        q, k, v = self.qkv(x, rotate)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        columns = self.w_o.weight.unflatten(1, (self.h, self.d))
        return torch.einsum("bhtd,mhd->btm", out, columns)


class ScaledQueries(Base):
    def forward(self, x, mask=None, rotate=None):
        q, k, v = self.qkv(x, rotate)
        return self.w_o(
            merge_heads(
                F.scaled_dot_product_attention(
                    q * self.d**-0.5,
                    repeat_kv(k, self.h // self.kv),
                    repeat_kv(v, self.h // self.kv),
                    attn_mask=mask,
                    scale=1.0,
                )
            )
        )


class Parameters(Base):
    """Bare parameters in the layout of nn.Linear."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for name in ("w_q", "w_k", "w_v", "w_o"):
            weight = getattr(self, name).weight
            delattr(self, name)
            setattr(self, name, nn.Parameter(weight.detach()))

    def forward(self, x, mask=None, rotate=None):
        q = split_heads(x @ self.w_q.T, self.h)
        k, v = (split_heads(x @ w.T, self.kv) for w in (self.w_k, self.w_v))
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return merge_heads(out) @ self.w_o.T


@pytest.mark.parametrize(
    "answer",
    [Fused, Einsum, Loop, HeadsInTheBatch, SumOfHeads, ScaledQueries, Parameters],
)
def test_multi_head_in_other_forms(answer):
    passes(answer, "MultiHeadAttention")


@pytest.mark.parametrize(
    "answer",
    [
        lambda d_model, n_heads, n_kv_heads, d_head: (
            d_model * n_heads * d_head
            + 2 * d_model * n_kv_heads * d_head
            + n_heads * d_head * d_model
        ),
        lambda d_model, n_heads, n_kv_heads, d_head: sum(
            p.numel()
            for p in MultiHeadAttention(
                d_model, n_heads, n_kv_heads, d_head
            ).parameters()
        ),
    ],
)
def test_count_in_other_forms(answer):
    passes(answer, "attention_parameters")


# Wrong answers that no fault lists ----------------------------------------------------


def split_reversed(x, n_heads):
    return split_by_slices(x, n_heads).flip(1)


def split_time_reversed(x, n_heads):
    return split_by_slices(x, n_heads).flip(2)


def split_rolled(x, n_heads):
    return split_by_slices(x.roll(1, -1), n_heads)


def split_batch_mean(x, n_heads):
    return split_by_slices(x.mean(0, keepdim=True).expand_as(x), n_heads)


def split_in_float64(x, n_heads):
    return split_by_slices(x.double(), n_heads)


def split_message_without_numbers(x, n_heads):
    if x.shape[-1] % n_heads:
        raise ValueError("the width is not divisible")
    return split_by_slices(x, n_heads)


def split_in_place(x, n_heads):
    refuse(x, n_heads)
    x.mul_(1.0001)
    return split_by_slices(x, n_heads)


def split_first_row_only(x, n_heads):
    return split_by_slices(x[:1], n_heads)


def split_as_list(x, n_heads):
    refuse(x, n_heads)
    return list(split_by_slices(x, n_heads).unbind(1))


def split_prints(x, n_heads):
    print(split_by_slices(x, n_heads))


@pytest.mark.parametrize(
    "answer",
    [
        split_reversed,
        split_time_reversed,
        split_rolled,
        split_batch_mean,
        split_in_float64,
        split_message_without_numbers,
        split_in_place,
        split_first_row_only,
        split_as_list,
        split_prints,
    ],
)
def test_wrong_split_fails(answer):
    fails(answer, "split_heads")


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: x.transpose(1, 2).flatten(2).flip(1),
        lambda x: x.transpose(1, 3).flatten(2),
        lambda x: x.transpose(2, 3).reshape(x.shape[0], x.shape[2], -1),
        lambda x: x.transpose(1, 2).flatten(2).float(),
        lambda x: x.transpose(1, 2).flatten(0, 1).flatten(1),
        lambda x: x[:, 0].repeat(1, 1, x.shape[1]),
        lambda x: x.amax(1),
        lambda x: None,
    ],
)
def test_wrong_merge_fails(answer):
    fails(answer, "merge_heads")


@pytest.mark.parametrize(
    "answer",
    [
        lambda x, group_size: x.repeat_interleave(group_size, 1).flip(1),
        lambda x, group_size: x.roll(1, 1).repeat_interleave(group_size, 1),
        lambda x, group_size: x.repeat_interleave(x.shape[1], 1),
        lambda x, group_size: torch.cat([x, x], 1) if group_size > 1 else x,
        lambda x, group_size: F.pad(x, (0, 0, 0, 0, 0, x.shape[1] * (group_size - 1))),
        lambda x, group_size: x.repeat_interleave(group_size, 1).double(),
        lambda x, group_size: x[:, :, None].expand(-1, -1, group_size, -1, -1),
    ],
)
def test_wrong_repeat_fails(answer):
    fails(answer, "repeat_kv")


class NoZerosForPadding(Base):
    """Sees everything where it may see nothing."""

    def forward(self, x, mask=None, rotate=None):
        if mask is not None:
            mask = mask | ~mask.any(-1, keepdim=True)
        return Fused.forward(self, x, mask, rotate)


class TransposedMask(Base):
    def forward(self, x, mask=None, rotate=None):
        if mask is not None and mask.shape[-2] == mask.shape[-1]:
            mask = mask.mT
        return Fused.forward(self, x, mask, rotate)


class DiagonalAlwaysOpen(Base):
    def forward(self, x, mask=None, rotate=None):
        if mask is not None:
            mask = mask | torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        return Fused.forward(self, x, mask, rotate)


class LastHeadTwice(Base):
    def qkv(self, x, rotate):
        q, k, v = super().qkv(x, rotate)
        return (q[:, [*range(self.h - 1), self.h - 2]] if self.h > 1 else q), k, v

    forward = Fused.forward


class SwapsHeadsBeforeProjection(Base):
    def forward(self, x, mask=None, rotate=None):
        q, k, v = self.qkv(x, rotate)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.w_o(merge_heads(out.flip(1)))


class RotatesTwice(Base):
    def qkv(self, x, rotate):
        q, k, v = super().qkv(x, rotate)
        return (q, k, v) if rotate is None else (rotate(q), rotate(k), v)

    forward = Fused.forward


class RotatesBeforeProjection(Base):
    def qkv(self, x, rotate):
        turned = x if rotate is None else rotate(x[:, None])[:, 0]
        q, k = self.w_q(turned), self.w_k(turned)
        v = split_heads(self.w_v(x), self.kv)
        return split_heads(q, self.h), split_heads(k, self.kv), v

    forward = Fused.forward


class OnlyFloat32(Base):
    def forward(self, x, mask=None, rotate=None):
        return Fused.forward(self.float(), x.float(), mask, rotate)


class MaskOnTheCpu(Base):
    def forward(self, x, mask=None, rotate=None):
        if mask is None:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        else:
            mask = mask & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        return Fused.forward(self, x, mask, rotate)


class Clipped(Base):
    def forward(self, x, mask=None, rotate=None):
        return Fused.forward(self, x, mask, rotate).clamp(-0.5, 0.5)


class FrozenKeys(Base):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.w_k.weight.requires_grad_(False)

    forward = Fused.forward


class ListOfHeads(nn.Module):
    """Its layers stand in a plain list, where PyTorch does not find them."""

    def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
        super().__init__()
        d_head = d_head or d_model // n_heads
        self.w_q = [nn.Linear(d_model, d_head, bias=False) for _ in range(n_heads)]

    def forward(self, x, mask=None, rotate=None):
        return x


class OutputBias(Base):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.w_o = nn.Linear(self.w_o.in_features, self.w_o.out_features)

    forward = Fused.forward


class Smoothed(Base):
    """The weights are mixed with their average: a little, so that it nearly fits."""

    def forward(self, x, mask=None, rotate=None):
        return Fused.forward(self, x, mask, rotate) * 1.001


class OneKvGroupForHalfTheHeads(Base):
    """Right for MQA, MHA and groups of two, by a rule of its own."""

    def forward(self, x, mask=None, rotate=None):
        q, k, v = self.qkv(x, rotate)
        group = min(self.h // self.kv, 2)
        index = (torch.arange(self.h) // group) % self.kv
        out = F.scaled_dot_product_attention(q, k[:, index], v[:, index], mask)
        return self.w_o(merge_heads(out))


@pytest.mark.parametrize(
    "answer",
    [
        NoZerosForPadding,
        TransposedMask,
        DiagonalAlwaysOpen,
        LastHeadTwice,
        SwapsHeadsBeforeProjection,
        RotatesTwice,
        RotatesBeforeProjection,
        OnlyFloat32,
        MaskOnTheCpu,
        Clipped,
        FrozenKeys,
        ListOfHeads,
        OutputBias,
        Smoothed,
        OneKvGroupForHalfTheHeads,
    ],
)
def test_wrong_multi_head_fails(answer):
    fails(answer, "MultiHeadAttention")


@pytest.mark.parametrize(
    "answer",
    [
        lambda d_model, n_heads, n_kv_heads, d_head: (
            2 * d_model * d_head * (n_heads + n_kv_heads) + d_head
        ),
        lambda d_model, n_heads, n_kv_heads, d_head: (
            2 * d_model**2 + 2 * d_model * n_kv_heads * d_head
        ),
        lambda d_model, n_heads, n_kv_heads, d_head: str(
            2 * d_model * d_head * (n_heads + n_kv_heads)
        ),
        lambda d_model, n_heads, n_kv_heads, d_head: None,
    ],
)
def test_wrong_count_fails(answer):
    fails(answer, "attention_parameters")


def test_message_names_the_mistake_with_loaded_weights():
    fault = next(
        f for f in spec.multi_head.faults if f.name == "keys_and_values_exchanged"
    )
    report = evaluate(fault.implementation, "MultiHeadAttention")
    assert "loaded by name" in report.message


# Common mistakes in a form of their own, and the names that they should get -----------


def test_batch_and_time_exchanged_is_named():
    def split(x, n_heads):
        if x.shape[-1] % n_heads:
            raise ValueError(f"{n_heads} heads do not divide {x.shape[-1]}")
        return x.view(*x.shape[:2], n_heads, -1).transpose(0, 1)

    assert fails(split, "split_heads").fault == "batch_and_time_exchanged"


def repeating(times):
    """A module that repeats keys and values `times(module)` times."""

    class Repeats(MultiHeadAttention):
        def forward(self, x, mask=None, rotate=None):
            q = split_heads(self.w_q(x), self.n_heads)
            k = split_heads(self.w_k(x), self.n_kv_heads)
            v = split_heads(self.w_v(x), self.n_kv_heads)
            if rotate is not None:
                q, k = rotate(q), rotate(k)
            k, v = repeat_kv(k, times(self)), repeat_kv(v, times(self))
            return self.w_o(merge_heads(attention(q, k, v, mask)))

    return Repeats


@pytest.mark.parametrize("name", ["n_heads", "n_kv_heads"])
def test_number_of_heads_taken_for_the_group_size_is_named(name):
    report = fails(repeating(lambda m: getattr(m, name)), "MultiHeadAttention")
    assert report.fault == f"repeated_{name}_times"


def changed(split=split_heads, merge=merge_heads, prepare=None):
    """A module with other functions for the heads, or other first weights."""

    class Changed(MultiHeadAttention):
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
            k, v = repeat_kv(k, group), repeat_kv(v, group)
            return self.w_o(merge(attention(q, k, v, mask)))

    return Changed


def straight(x, n_heads):
    return x.contiguous().view(len(x), n_heads, x.shape[1], x.shape[2] // n_heads)


def straight_back(x):
    return x.contiguous().view(len(x), x.shape[2], x.shape[1] * x.shape[3])


def dealt(x, n_heads):
    return torch.stack([x[..., h::n_heads] for h in range(n_heads)], dim=1)


def collected(x):
    return torch.stack(x.unbind(1), dim=-1).flatten(2)


def zeroed(module):
    module.load_state_dict({n: 0 * w for n, w in module.state_dict().items()})


def copied(module):
    with torch.no_grad():
        module.w_v.weight.copy_(module.w_k.weight)


def looking(look):
    """A module with another attention."""

    class Looks(MultiHeadAttention):
        def forward(self, x, mask=None, rotate=None):
            q = split_heads(self.w_q(x), self.n_heads)
            k = split_heads(self.w_k(x), self.n_kv_heads)
            v = split_heads(self.w_v(x), self.n_kv_heads)
            if rotate is not None:
                q, k = rotate(q), rotate(k)
            group = self.n_heads // self.n_kv_heads
            out = look(q, repeat_kv(k, group), repeat_kv(v, group), mask)
            return self.w_o(merge_heads(out))

    return Looks


def nan_replaced_late(q, k, v, mask):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf)
    out = scores.softmax(-1) @ v
    return out.masked_fill(out.isnan(), 0)


def by_length(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask, scale=q.size(2) ** -0.5)


@pytest.mark.parametrize(
    ("look", "fault"),
    [
        (nan_replaced_late, "nan_in_the_gradient"),
        (by_length, "scaled_by_the_length"),
        (lambda q, k, v, m: attention(q, k, v, m) / q.size(-1) ** 0.5, "output_scaled"),
        (
            lambda q, k, v, m: attention(q, k, v, m) if m else attention(q, k, v),
            "mask_taken_for_a_truth_value",
        ),
    ],
)
def test_wrong_looks_are_named(look, fault):
    report = fails(looking(look), "MultiHeadAttention")
    assert report.fault == fault, report.message


def test_attention_of_torch_in_the_module_passes():
    passes(looking(F.scaled_dot_product_attention), "MultiHeadAttention")


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (changed(straight, straight_back), "reshaped_both_ways"),
        (changed(merge=collected), "merged_interleaved"),
        (changed(dealt, collected), "interleaved_both_ways"),
        (changed(prepare=zeroed), "zero_weights"),
        (changed(prepare=copied), "equal_weights"),
    ],
)
def test_wrong_heads_and_weights_are_named(answer, fault):
    report = fails(answer, "MultiHeadAttention")
    assert report.fault == fault, report.message


def test_first_weights_may_differ_from_those_of_linear():
    def small(module):
        for p in module.parameters():
            nn.init.normal_(p, std=0.02)
        nn.init.zeros_(module.w_o.weight)

    passes(changed(prepare=small), "MultiHeadAttention")


def test_numbers_taken_for_others_are_named():
    class Groups(MultiHeadAttention):
        def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
            super().__init__(d_model, n_heads, n_heads // (n_kv_heads or 1), d_head)

    class OneByDefault(MultiHeadAttention):
        def __init__(self, d_model, n_heads, n_kv_heads=1, d_head=None):
            super().__init__(d_model, n_heads, n_kv_heads, d_head)

    class WrongWay(MultiHeadAttention):
        def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
            if n_kv_heads and n_kv_heads % n_heads:
                raise ValueError(f"{n_kv_heads} heads do not fit {n_heads}")
            super().__init__(d_model, n_heads, n_kv_heads, d_head)

    def fault(answer):
        return fails(answer, "MultiHeadAttention").fault

    assert fault(Groups) == "group_size_for_kv_heads"
    assert fault(OneByDefault) is None
    assert fault(WrongWay) == "divided_the_wrong_way_round"


def test_a_module_not_initialised_is_named():
    class Early(nn.Module):
        def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
            self.w_q = nn.Linear(d_model, d_model, bias=False)
            super().__init__()

    assert fails(Early, "MultiHeadAttention").fault == "not_initialised"


def test_mask_left_out_in_eval_is_named():
    class InTraining(MultiHeadAttention):
        def forward(self, x, mask=None, rotate=None):
            return super().forward(x, mask if self.training else None, rotate)

    report = fails(InTraining, "MultiHeadAttention")
    assert report.fault == "mask_left_out_in_eval", report.message


def test_rotation_left_out_in_eval_fails():
    class InTraining(MultiHeadAttention):
        def forward(self, x, mask=None, rotate=None):
            return super().forward(x, mask, rotate if self.training else None)

    fails(InTraining, "MultiHeadAttention")


def test_mask_of_its_own_on_the_cpu_fails():
    class FillsIn(MultiHeadAttention):
        def forward(self, x, mask=None, rotate=None):
            if mask is None:
                mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
            return super().forward(x, mask, rotate)

    fails(FillsIn, "MultiHeadAttention")


def test_mask_kept_from_the_first_call_is_named():
    class Keeps(MultiHeadAttention):
        def forward(self, x, mask=None, rotate=None):
            if not hasattr(self, "mask"):
                self.mask = mask
            return super().forward(x, self.mask, rotate)

    report = fails(Keeps, "MultiHeadAttention")
    assert report.fault == "mask_of_the_first_call", report.message


def test_rotation_of_rows_and_heads_as_one_batch_fails():
    class Flattened(MultiHeadAttention):
        def forward(self, x, mask=None, rotate=None):
            def flat(x):
                return rotate(x.flatten(0, 1)[None])[0].view_as(x)

            return super().forward(x, mask, None if rotate is None else flat)

    fails(Flattened, "MultiHeadAttention")


def test_given_d_head_refused_is_named_in_any_words():
    class Refuses(MultiHeadAttention):
        def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
            if d_model % n_heads:
                raise ValueError(f"cannot cut {d_model} into {n_heads}")
            super().__init__(d_model, n_heads, n_kv_heads, d_head)

    report = fails(Refuses, "MultiHeadAttention")
    assert report.fault == "given_d_head_refused"


@pytest.mark.parametrize(
    ("convert", "fault"), [(lambda n: n / 1, "float"), (torch.tensor, "tensor")]
)
def test_count_of_another_type_is_named(convert, fault):
    def count(*shape):
        return convert(attention_parameters(*shape))

    assert fails(count, "attention_parameters").fault == fault
