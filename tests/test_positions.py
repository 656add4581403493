"""Lesson 04: the references against loops; other right and other wrong answers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solutions import positions as reference
from solutions.attention import attention
from tests.answers import fails, passes
from utils.check.exercise import find
from utils.explore import explore
from utils.probe import probe

# The references -----------------------------------------------------------------------


def authors_slopes(n):
    """The rule of the authors' repository, by start and ratio."""

    def power_of_two(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_two(n)
    below = 2 ** math.floor(math.log2(n))
    return power_of_two(below) + authors_slopes(2 * below)[0::2][: n - below]


def test_slopes_follow_the_authors_for_every_number_of_heads():
    for n in range(1, 130):
        expected = torch.tensor(authors_slopes(n))
        torch.testing.assert_close(reference.alibi_slopes(n), expected)


def test_bias_gives_the_same_weights_as_slope_times_key_position():
    q, k, v = (probe(2, 6, 9, 4, seed=i) for i in range(3))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    bias = reference.alibi_bias(6, 9, 9).masked_fill(~mask, -torch.inf)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    slope = reference.alibi_slopes(6)[:, None, None].expand(2, 6, 9, 1)
    at, wider = torch.arange(9.0)[:, None].expand(2, 6, 9, 1), math.sqrt(5)
    q = torch.cat((q * wider / 2, slope * wider), -1)
    actual = attention(q, torch.cat((k, at), -1), v, mask)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


# Right answers in other forms ---------------------------------------------------------


def even(n):
    if n % 2:
        raise ValueError(f"{n} is odd")
    return n


def exponential_form(t, d_model):
    table = torch.zeros(t, even(d_model))
    falling = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    table[:, 0::2] = torch.sin(torch.arange(t)[:, None] * falling)
    table[:, 1::2] = torch.cos(torch.arange(t)[:, None] * falling)
    return table


def loops_over_the_table(t, d_model):
    wave, columns = (math.sin, math.cos), range(even(d_model))
    return torch.tensor(
        [
            [wave[j % 2](p / 1e4 ** (j // 2 * 2 / d_model)) for j in columns]
            for p in range(t)
        ]
    )


class OwnParameter(nn.Module):
    def __init__(self, max_len, d_model):
        super().__init__()
        self.table = nn.Parameter(torch.randn(max_len, d_model) * 0.02)

    def forward(self, positions):
        n = self.table.shape[0]
        for end in (positions.min().item(), positions.max().item()):
            if not 0 <= end < n:
                raise ValueError(f"position {end}: the table has {n} rows")
        return self.table[positions]


def angles_for(x, positions, base, dtype=torch.float32):
    """The plain product, with the heads put between B and T."""
    d = even(x.size(-1))
    pairs = torch.arange(0, d, 2, device=x.device, dtype=dtype)
    angles = positions.to(dtype).unsqueeze(-1) * (1.0 / base ** (pairs / d))
    for _ in range(x.dim() - 3 if positions.dim() == 2 else 0):
        angles = angles.unsqueeze(1)
    return angles


def written_into_empty(x, positions, base=10_000.0):
    angles = angles_for(x, positions, base)
    cos, sin, out = angles.cos(), angles.sin(), torch.empty_like(x)
    out[..., 0::2] = (x[..., 0::2] * cos - x[..., 1::2] * sin).to(x.dtype)
    out[..., 1::2] = (x[..., 0::2] * sin + x[..., 1::2] * cos).to(x.dtype)
    return out


def complex_form(x, positions, base=10_000.0):
    angles = angles_for(x, positions, base)
    numbers = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(numbers * turn).flatten(-2).type_as(x)


def double_angles(x, positions, base=10_000.0):
    angles = angles_for(x, positions, base, torch.float64)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.double().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1)
    return turned.flatten(-2).to(x.dtype)


def one_pair_at_a_time(x, positions, base=10_000.0):
    columns = []
    for i, angle in enumerate(angles_for(x, positions, base).unbind(-1)):
        a, b = x[..., 2 * i], x[..., 2 * i + 1]
        columns += [
            a * angle.cos() - b * angle.sin(),
            a * angle.sin() + b * angle.cos(),
        ]
    return torch.stack(columns, -1).to(x.dtype)


def by_powers(n_heads):
    below = 1 << (n_heads.bit_length() - 1)
    first = torch.pow(2.0, -8 / below * torch.arange(1, below + 1))
    more = torch.pow(2.0, -4 / below * torch.arange(1, 2 * below, 2))
    return torch.cat((first, more[: n_heads - below]))


def signed(n_heads, t_q, t_k):
    if t_k < t_q:
        raise ValueError(f"t_q={t_q} > t_k={t_k}")
    query = torch.arange(t_q).view(-1, 1) + (t_k - t_q)
    return by_powers(n_heads).view(-1, 1, 1) * (torch.arange(t_k).view(1, -1) - query)


def already_masked(n_heads, t_q, t_k):
    bias = signed(n_heads, t_q, t_k)
    return bias.masked_fill(bias > 0, -torch.inf)


def logarithms(base, factor, d_head):
    if d_head < 4 or d_head % 2:
        raise ValueError(f"d_head={d_head}")
    return math.exp(math.log(base) + math.log(factor) * (1 + 2 / (d_head - 2)))


RIGHT = {
    "sinusoidal": (exponential_form, loops_over_the_table),
    "LearnedPositions": (OwnParameter,),
    "rope": (
        written_into_empty,
        complex_form,  # refused once, since x had gaps in memory that nobody makes
        double_angles,
        one_pair_at_a_time,
    ),
    "alibi_slopes": (by_powers, lambda n_heads: torch.tensor(authors_slopes(n_heads))),
    "alibi_bias": (signed, already_masked),
    "ntk_base": (logarithms,),
}
TOGETHER = {
    "rope": ("rope_in_multi_head", "ntk_in_rope"),
    "alibi_bias": ("alibi_in_attention",),
    "ntk_base": ("ntk_in_rope",),
}


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name, forms in RIGHT.items() for form in forms]
)
def test_other_forms_pass(name, form):
    passes(form, name)
    for check in TOGETHER.get(name, ()):
        passes({**find(check).reference, name: form}, check)


# Wrong answers that no fault lists ----------------------------------------------------


look_up = reference.LearnedPositions.forward
table_of, slopes_of = reference.sinusoidal, reference.alibi_slopes
bias_of, base_of = reference.alibi_bias, reference.ntk_base


def table_by(forward):
    return type("Wrong", (reference.LearnedPositions,), {"forward": forward})


def roped(before=lambda *given: given, after=lambda x, out: out):
    """The reference on other arguments, or with another result."""

    def rope(x, positions, base=10_000.0):
        return after(x, reference.rope(*before(x, positions, base)))

    return rope


def turned_by(x, angles):
    a, b, cos, sin = x[..., 0::2], x[..., 1::2], angles.cos(), angles.sin()
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x)


def half_frequencies(x, positions, base=10_000.0):
    return turned_by(x, angles_for(x, positions.bfloat16(), base))


WRONG = {
    "sinusoidal": [
        (lambda t, d: table_of(t, d) * (torch.arange(t) < 1000)[:, None], None),
    ],
    "LearnedPositions": [
        (table_by(lambda self, p: F.dropout(look_up(self, p), 0.5)), "random"),
        (table_by(lambda self, p: look_up(self, p).squeeze()), None),
        (table_by(lambda self, p: look_up(self, p - p.min())), None),
    ],
    "rope": [
        (half_frequencies, None),
        (lambda x, pos, base=1e4: reference.rope(x, pos, base), None),  # other names
        (torch.no_grad()(roped()), None),
        (roped(lambda x, p, b: (x, p.clamp(max=4096), b)), None),
        (roped(lambda x, p, b: (x, p.half(), b)), None),
        (roped(lambda x, p, b: (x, p, max(b, 1e4))), None),  # not “ignored”
        (roped(lambda x, p, b: (x, p.flip(0) if p.dim() == 2 else p, b)), None),
        (roped(lambda x, p, b: (x, p - p.amin(-1, True), b)), "relative_to_the_first"),
        # Not “the wrong way”, though it is so for a head of two numbers:
        (roped(lambda x, p, b: (x.flip(-1), p, b), lambda x, out: out.flip(-1)), None),
        (roped(after=lambda x, out: x if x.shape[-2] == 1 else out), None),
    ],
    "alibi_slopes": [
        (lambda n: 2.0 ** (-int(8 / n) * torch.arange(1.0, n + 1)), "whole_exponents"),
    ],
    "alibi_bias": [
        (lambda n, q, k: bias_of(n, q, k) * (q > 1), None),
        (lambda n, q, k: bias_of(n, q, k).half().float(), None),
        (lambda n, q, k: signed(n, q, k).permute(1, 2, 0), "heads_last"),
    ],
    "ntk_base": [
        (lambda b, f, d: base_of(b, f, d) if d > 6 else b * f, None),
        (lambda b, f, d: base_of(b, f, d) ** (-torch.arange(0, d, 2) / d), None),
        (lambda b, f, d: torch.tensor(base_of(b, f, d)), None),  # passed once
    ],
}


@pytest.mark.parametrize(
    ("name", "answer", "fault"),
    [(name, *each) for name, answers in WRONG.items() for each in answers],
)
def test_other_wrong_answers_are_rejected(name, answer, fault):
    assert fails(answer, name, fault).fault == fault


def test_a_cache_keyed_by_length_is_named():
    tables = {}

    def by_length(x, positions, base=10_000.0):
        key = (positions.shape, x.shape[-1], base)
        return turned_by(x, tables.setdefault(key, angles_for(x, positions, base)))

    fails(by_length, "rope", "cached_table")


def test_a_wrong_turn_is_described():
    report = fails(lambda t, d: table_of(t, d) ** 3, "sinusoidal")
    assert "times as long as it should be" in report.message
    report = fails(roped(lambda x, p, b: (x, 2 * p, b)), "rope")
    assert "numbers 0 and 1 is turned by 2, expected 1" in report.message
    report = fails(lambda b, f, d: base_of(b, 2 * f, d), "ntk_base")
    assert "turns 10 times slower, expected 5 times" in report.message
    assert "d_head / (d_head − 2)" not in report.message  # it is what they look for
    report = fails(lambda n: slopes_of(n).double(), "alibi_slopes")
    assert "must be float32" in report.message


def test_sliders_call_draw_with_their_first_values():
    drawn = []
    explore(lambda n, m: drawn.append((n, m)), n=(0, 3, 1), m=(2, 9, 5))
    assert drawn == [(1, 5)]
