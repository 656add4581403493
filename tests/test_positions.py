"""Lesson 04: the references against loops, other right answers, unlisted wrong ones."""

import cmath
import functools
import math

import pytest
import torch
from torch import nn

from solutions import positions as reference
from solutions.attention import attention
from utils.check import evaluate, evaluate_joint
from utils.check.exercise import Joint
from utils.explore import explore
from utils.probe import probe

# The references, against loops over the published formulas ----------------------------


def test_sinusoidal_is_the_published_formula():
    table = reference.sinusoidal(7, 6)
    for position in range(7):
        for i in range(3):
            angle = position / 10_000 ** (2 * i / 6)
            assert math.isclose(table[position, 2 * i], math.sin(angle), abs_tol=1e-6)
            assert math.isclose(
                table[position, 2 * i + 1], math.cos(angle), abs_tol=1e-6
            )


@pytest.mark.parametrize("base", [10_000.0, 100_000.0, 50])
def test_rope_is_multiplication_by_complex_numbers(base):
    x = probe(2, 3, 5, 8)
    positions = torch.tensor([[0, 1, 2, 3, 4], [9, 400, 7, 6, 2047]])
    turned = reference.rope(x, positions, base)
    for b in range(2):
        for h in range(3):
            for t in range(5):
                for i in range(4):
                    angle = positions[b, t].item() * base ** (-2 * i / 8)
                    number = complex(*x[b, h, t, 2 * i : 2 * i + 2].tolist())
                    number *= cmath.exp(1j * angle)
                    actual = complex(*turned[b, h, t, 2 * i : 2 * i + 2].tolist())
                    assert abs(actual - number) < 1e-3


def test_rope_scores_depend_on_distance_alone_to_one_in_100_000():
    q, k = probe(20, 16, 64), probe(20, 16, 64, seed=1)
    size = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[:, None]
    at = torch.arange(16)

    def scores(shift):
        turned = (reference.rope(x, at + shift) for x in (q, k))
        return functools.reduce(lambda a, b: a @ b.transpose(-2, -1), turned) / size

    before = scores(0)
    for shift in (1, 7, 100, 513, 1024, 2047, 3333, 4096):
        assert (scores(shift) - before).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rope_in_half_precision_has_the_angles_of_float32(dtype):
    x = probe(2, 5, 8, dtype=dtype)
    positions = torch.tensor([3, 257, 1023, 2049, 4095])
    exact = reference.rope(x.double(), positions)
    error = (reference.rope(x, positions).double() - exact).abs().max()
    assert error <= torch.finfo(dtype).eps * exact.abs().max()


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
        assert torch.allclose(reference.alibi_slopes(n), expected, rtol=1e-5)


def test_bias_gives_the_same_weights_as_slope_times_key_position():
    q, k, v = (probe(2, 6, 9, 4, seed=i) for i in range(3))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    bias = reference.alibi_bias(6, 9, 9).masked_fill(~mask, -torch.inf)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    slope = reference.alibi_slopes(6)[:, None, None].expand(2, 6, 9, 1)
    at = torch.arange(9.0)[:, None].expand(2, 6, 9, 1)
    wider = math.sqrt(5)
    q = torch.cat((q * wider / 2, slope * wider), -1)
    actual = attention(q, torch.cat((k, at), -1), v, mask)
    assert torch.allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize(("factor", "d_head"), [(8, 64), (1.5, 4), (2, 128)])
def test_ntk_base_stretches_the_slowest_pair_by_the_factor(factor, d_head):
    base = reference.ntk_base(10_000.0, factor, d_head)
    last = (d_head - 2) / d_head
    assert math.isclose(base**last, factor * 10_000**last, rel_tol=1e-9)


# Right answers in other forms ---------------------------------------------------------


def exponential_form(t, d_model):
    if d_model % 2 == 1:
        raise ValueError(f"d_model must be even, not {d_model}")
    table = torch.zeros(t, d_model)
    position = torch.arange(t, dtype=torch.float).unsqueeze(1)
    falling = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    table[:, 0::2] = torch.sin(position * falling)
    table[:, 1::2] = torch.cos(position * falling)
    return table


def loops_over_the_table(t, d_model):
    if d_model % 2:
        raise ValueError(f"odd: {d_model}")
    rows = [
        [
            (math.sin, math.cos)[j % 2](p / 10_000 ** (j // 2 * 2 / d_model))
            for j in range(d_model)
        ]
        for p in range(t)
    ]
    return torch.tensor(rows)


def in_float64(t, d_model):
    if d_model % 2:
        raise ValueError(f"odd: {d_model}")
    i = torch.arange(d_model // 2, dtype=torch.float64)
    angles = torch.outer(torch.arange(t).double(), 10_000 ** (-2 * i / d_model))
    both = torch.polar(torch.ones_like(angles), math.pi / 2 - angles)
    return torch.view_as_real(both).flatten(1).float()


@pytest.mark.parametrize("form", [exponential_form, loops_over_the_table, in_float64])
def test_other_sinusoids_pass(form):
    report = evaluate(form, "sinusoidal")
    assert report.status == "passed", report.message


class OwnParameter(nn.Module):
    def __init__(self, max_len, d_model):
        super().__init__()
        self.table = nn.Parameter(torch.randn(max_len, d_model) * 0.02)

    def forward(self, positions):
        low, high = positions.min().item(), positions.max().item()
        n = self.table.shape[0]
        if high >= n:
            raise ValueError(f"position {high}: the table has only {n} rows")
        if low < 0:
            raise ValueError(f"position {low} is negative; the table has {n} rows")
        return self.table[positions]


class OneHot(nn.Module):
    def __init__(self, max_len, d_model):
        super().__init__()
        self.max_len = max_len
        self.table = nn.Linear(d_model, max_len, bias=False)

    def forward(self, positions):
        for p in positions.reshape(-1):
            if p < 0 or p >= self.max_len:
                raise ValueError(f"{p} not in 0..{self.max_len}")
        weight = self.table.weight
        return nn.functional.one_hot(positions, self.max_len).to(weight) @ weight


@pytest.mark.parametrize("form", [OwnParameter, OneHot])
def test_other_tables_pass(form):
    report = evaluate(form, "LearnedPositions")
    assert report.status == "passed", report.message


def lined_up(angles, positions, x):
    if positions.dim() == 2:
        for _ in range(x.dim() - 3):
            angles = angles.unsqueeze(1)
    return angles


def refuse_odd(x):
    if x.size(-1) % 2:
        raise ValueError(f"odd d_head {x.size(-1)}")


def plain_product(x, positions, base=10_000.0):
    refuse_odd(x)
    d = x.shape[-1]
    inv_freq = 1.0 / (base ** (torch.arange(0, d, 2, device=x.device).float() / d))
    angles = lined_up(positions.float().unsqueeze(-1) * inv_freq, positions, x)
    cos, sin = angles.cos(), angles.sin()
    out = torch.empty_like(x)
    out[..., 0::2] = (x[..., 0::2] * cos - x[..., 1::2] * sin).to(x.dtype)
    out[..., 1::2] = (x[..., 0::2] * sin + x[..., 1::2] * cos).to(x.dtype)
    return out


def complex_form(x, positions, base=10_000.0):
    refuse_odd(x)
    d = x.shape[-1]
    frequencies = base ** (-torch.arange(0, d, 2, device=x.device).float() / d)
    angles = lined_up(positions.float()[..., None] * frequencies, positions, x)
    numbers = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(numbers * turn).flatten(-2).type_as(x)


def every_two(x, positions, base=10_000.0):
    refuse_odd(x)
    d = x.shape[-1]
    frequencies = torch.exp(
        -math.log(base)
        * torch.arange(0, d, 2, dtype=torch.float32, device=x.device)
        / d
    )
    angles = lined_up(positions.float()[..., None] * frequencies, positions, x)
    angles = angles.repeat_interleave(2, dim=-1)
    partner = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).reshape(x.shape)
    return (x.float() * angles.cos() + partner.float() * angles.sin()).to(x.dtype)


def double_angles(x, positions, base=10_000.0):
    refuse_odd(x)
    d = x.shape[-1]
    i = torch.arange(d // 2, device=x.device, dtype=torch.float64)
    angles = lined_up(
        positions.double()[..., None] * base ** (-2 * i / d), positions, x
    )
    cos, sin = angles.cos(), angles.sin()
    a, b = x.double().unflatten(-1, (-1, 2)).unbind(-1)
    return (
        torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)
    )


def matrices(x, positions, base=10_000.0):
    refuse_odd(x)
    d = x.shape[-1]
    pairs = torch.arange(0, d, 2, device=x.device)
    angles = lined_up(positions.float()[..., None] * base ** (-pairs / d), positions, x)
    cos, sin = angles.cos(), angles.sin()
    rows = (torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1))
    turn = torch.stack(rows, -2)  # … T Dh/2 2 2
    pairs = x.to(turn.dtype if x.dtype != torch.float64 else x.dtype).unflatten(
        -1, (-1, 2)
    )
    return torch.einsum("...ij,...j->...i", turn.to(pairs), pairs).flatten(-2).to(x)


@functools.cache
def kept_frequencies(d, base, device):
    return base ** (-torch.arange(0, d, 2, device=device) / d)


def with_kept_frequencies(x, positions, base=10_000.0):
    refuse_odd(x)
    f = kept_frequencies(x.shape[-1], base, x.device)
    angles = lined_up(positions.float()[..., None] * f, positions, x)
    a, b = x[..., 0::2], x[..., 1::2]
    first = a * angles.cos() - b * angles.sin()
    second = b * angles.cos() + a * angles.sin()
    return torch.stack((first, second), -1).reshape(x.shape).to(x.dtype)


def one_pair_at_a_time(x, positions, base=10_000.0):
    refuse_odd(x)
    columns = []
    for i in range(x.shape[-1] // 2):
        angle = lined_up(
            positions.float() * base ** (-2 * i / x.shape[-1]), positions, x
        )
        a, b = x[..., 2 * i], x[..., 2 * i + 1]
        columns += [
            a * angle.cos() - b * angle.sin(),
            a * angle.sin() + b * angle.cos(),
        ]
    return torch.stack(columns, -1).to(x.dtype)


ROPES = [
    plain_product,
    complex_form,
    every_two,
    double_angles,
    matrices,
    with_kept_frequencies,
    one_pair_at_a_time,
]


@pytest.mark.parametrize("form", ROPES)
def test_other_ropes_pass(form):
    report = evaluate(form, "rope")
    assert report.status == "passed", report.message
    parts = {**Joint.registry["rope_in_multi_head"].reference, "rope": form}
    assert evaluate_joint("rope_in_multi_head", parts).status == "passed"
    parts = {**Joint.registry["ntk_in_rope"].reference, "rope": form}
    assert evaluate_joint("ntk_in_rope", parts).status == "passed"


def test_authors_slopes_pass():
    report = evaluate(
        lambda n_heads: torch.tensor(authors_slopes(n_heads)), "alibi_slopes"
    )
    assert report.status == "passed", report.message


def by_powers(n_heads):
    below = 1 << (n_heads.bit_length() - 1)
    first = torch.pow(2.0, -8 / below * torch.arange(1, below + 1))
    more = torch.pow(2.0, -4 / below * torch.arange(1, 2 * below, 2))
    return torch.cat((first, more[: n_heads - below]))


def test_slopes_by_powers_pass():
    report = evaluate(by_powers, "alibi_slopes")
    assert report.status == "passed", report.message


def signed(n_heads, t_q, t_k):
    if t_k < t_q:
        raise ValueError(f"t_q={t_q} > t_k={t_k}")
    query = torch.arange(t_q).view(-1, 1) + (t_k - t_q)
    distance = torch.arange(t_k).view(1, -1) - query
    return by_powers(n_heads).view(-1, 1, 1) * distance


def already_masked(n_heads, t_q, t_k):
    bias = signed(n_heads, t_q, t_k)
    return bias.masked_fill(bias > 0, -torch.inf)


def by_loops(n_heads, t_q, t_k):
    if t_k < t_q:
        raise ValueError(f"{t_q} and {t_k}")
    bias = torch.zeros(n_heads, t_q, t_k)
    for h, slope in enumerate(authors_slopes(n_heads)):
        for i in range(t_q):
            for j in range(t_k - t_q + i):
                bias[h, i, j] = -slope * (t_k - t_q + i - j)
    return bias


def by_einsum(n_heads, t_q, t_k):
    if t_k < t_q:
        raise ValueError(f"{t_q} and {t_k}")
    distance = torch.ones(t_q, t_k).tril(t_k - t_q - 1).flip(-1).cumsum(-1).flip(-1)
    return torch.einsum("h,qk->hqk", -by_powers(n_heads), distance)


@pytest.mark.parametrize("form", [signed, already_masked, by_loops, by_einsum])
def test_other_biases_pass(form):
    report = evaluate(form, "alibi_bias")
    assert report.status == "passed", report.message
    parts = {**Joint.registry["alibi_in_attention"].reference, "alibi_bias": form}
    assert evaluate_joint("alibi_in_attention", parts).status == "passed"


def test_other_bases_pass():
    def logarithms(base, factor, d_head):
        if d_head < 4 or d_head % 2:
            raise ValueError(f"d_head={d_head}")
        return math.exp(math.log(base) + math.log(factor) * (1 + 2 / (d_head - 2)))

    def tensor(base, factor, d_head):
        return torch.tensor(logarithms(base, factor, d_head))

    for form in (logarithms, tensor):
        report = evaluate(form, "ntk_base")
        assert report.status == "passed", report.message


# Wrong answers that no fault lists ----------------------------------------------------


def rejects(name, answer):
    report = evaluate(answer, name)
    assert report.status == "failed", f"{answer.__name__} passes"
    return report


def float64_table(t, d_model):
    return reference.sinusoidal(t, d_model).double()


def integer_frequencies(t, d_model):
    table = reference.sinusoidal(t, d_model)
    return table.half().float()


def no_waves_after_a_thousand(t, d_model):
    table = reference.sinusoidal(t, d_model)
    table[1000:] = 0
    return table


def error_without_a_number(t, d_model):
    if d_model % 2:
        raise ValueError("d_model must be even")
    return reference.sinusoidal(t, d_model)


def asserts_even(t, d_model):
    assert d_model % 2 == 0, d_model
    return reference.sinusoidal(t, d_model)


def starts_from_the_end(t, d_model):
    return reference.sinusoidal(t, d_model).flip(0)


@pytest.mark.parametrize(
    "answer",
    [
        float64_table,
        integer_frequencies,
        no_waves_after_a_thousand,
        error_without_a_number,
        asserts_even,
        starts_from_the_end,
    ],
)
def test_wrong_sinusoids_are_rejected(answer):
    rejects("sinusoidal", answer)


class Scaled(reference.LearnedPositions):
    def forward(self, positions):
        return super().forward(positions) * self.table.weight.shape[1] ** 0.5


class Sorted(reference.LearnedPositions):
    def forward(self, positions):
        return super().forward(positions.sort(-1).values)


class Frozen(reference.LearnedPositions):
    def forward(self, positions):
        return super().forward(positions).detach()


class LastOnlyChecked(reference.LearnedPositions):
    def forward(self, positions):
        if positions.flatten()[-1] >= len(self.table.weight):
            raise ValueError(f"{positions.flatten()[-1]} {len(self.table.weight)}")
        return self.table.weight[positions]


class Kept(reference.LearnedPositions):
    def forward(self, positions):
        if not hasattr(self, "rows"):
            self.rows = super().forward(positions)
        return self.rows


class DroppedOut(reference.LearnedPositions):
    def forward(self, positions):
        return nn.functional.dropout(super().forward(positions), 0.5)


class Added(reference.LearnedPositions):
    def forward(self, positions):
        return positions[..., None] + super().forward(positions)


@pytest.mark.parametrize(
    "answer", [Scaled, Sorted, Frozen, LastOnlyChecked, Kept, DroppedOut, Added]
)
def test_wrong_tables_are_rejected(answer):
    rejects("LearnedPositions", answer)


rope = reference.rope


def table_of_4096(x, positions, base=10_000.0):
    return rope(x, positions.clamp(max=4096), base)


def half_frequencies(x, positions, base=10_000.0):
    refuse_odd(x)
    d = x.shape[-1]
    f = (base ** (-torch.arange(0, d, 2, device=x.device) / d)).bfloat16().float()
    angles = lined_up(positions.float()[..., None] * f, positions, x)
    a, b = x[..., 0::2], x[..., 1::2]
    first = a * angles.cos() - b * angles.sin()
    second = a * angles.sin() + b * angles.cos()
    return torch.stack((first, second), -1).flatten(-2).to(x.dtype)


def half_positions(x, positions, base=10_000.0):
    return rope(x, positions.half(), base)


def not_for_one_token(x, positions, base=10_000.0):
    return x if x.shape[-2] == 1 else rope(x, positions, base)


def in_place(x, positions, base=10_000.0):
    x.copy_(rope(x, positions, base))
    return x


def backwards_pairs(x, positions, base=10_000.0):
    return rope(x.flip(-1), positions, base).flip(-1)


def no_gradient(x, positions, base=10_000.0):
    with torch.no_grad():
        return rope(x, positions, base)


def first_head_only(x, positions, base=10_000.0):
    y = rope(x, positions, base)
    return torch.cat((y[:, :1], x[:, 1:]), 1) if x.dim() == 4 else y


def longer_by_yarn(x, positions, base=10_000.0):
    return 1.1 * rope(x, positions, base)


def relative_to_the_first(x, positions, base=10_000.0):
    return rope(x, positions - positions[..., :1], base)


def slow_base_only(x, positions, base=10_000.0):
    return rope(x, positions, max(base, 10_000.0))


def values_on_the_cpu(x, positions, base=10_000.0):
    refuse_odd(x)
    f = base ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = lined_up(positions.float()[..., None] * f, positions, x)
    a, b = x[..., 0::2], x[..., 1::2]
    first = a * angles.cos() - b * angles.sin()
    second = a * angles.sin() + b * angles.cos()
    return torch.stack((first, second), -1).flatten(-2).to(x.dtype)


def float32_back(x, positions, base=10_000.0):
    return rope(x, positions, base).float()


def other_names(x, pos, base=10_000.0):
    return rope(x, pos, base)


def odd_is_an_assertion(x, positions, base=10_000.0):
    assert x.shape[-1] % 2 == 0
    return rope(x, positions, base)


def transposed_batch(x, positions, base=10_000.0):
    positions = positions.flip(0) if positions.dim() == 2 else positions
    return rope(x, positions, base)


@pytest.mark.parametrize(
    "answer",
    [
        table_of_4096,
        half_frequencies,
        half_positions,
        not_for_one_token,
        in_place,
        backwards_pairs,
        no_gradient,
        first_head_only,
        longer_by_yarn,
        relative_to_the_first,
        slow_base_only,
        values_on_the_cpu,
        float32_back,
        other_names,
        odd_is_an_assertion,
        transposed_batch,
    ],
)
def test_wrong_ropes_are_rejected(answer):
    rejects("rope", answer)


def test_a_cache_keyed_by_length_is_rejected():
    tables = {}

    def by_length(x, positions, base=10_000.0):
        refuse_odd(x)
        key = (positions.shape, x.shape[-1], base)
        if key not in tables:
            f = base ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
            tables[key] = lined_up(positions.float()[..., None] * f, positions, x)
        angles = tables[key]
        a, b = x[..., 0::2], x[..., 1::2]
        first = a * angles.cos() - b * angles.sin()
        second = a * angles.sin() + b * angles.cos()
        return torch.stack((first, second), -1).flatten(-2).to(x.dtype)

    report = rejects("rope", by_length)
    assert report.fault == "cached_table"


def list_of_slopes(n_heads):
    return authors_slopes(n_heads)


def float64_slopes(n_heads):
    return torch.tensor(authors_slopes(n_heads), dtype=torch.float64)


def rounded_slopes(n_heads):
    return reference.alibi_slopes(n_heads).half().float()


def wrong_for_one_head(n_heads):
    return reference.alibi_slopes(n_heads) if n_heads > 1 else torch.ones(1)


@pytest.mark.parametrize(
    "answer", [list_of_slopes, float64_slopes, rounded_slopes, wrong_for_one_head]
)
def test_wrong_slopes_are_rejected(answer):
    rejects("alibi_slopes", answer)


def nan_in_the_future(n_heads, t_q, t_k):
    bias = signed(n_heads, t_q, t_k)
    return bias.masked_fill(bias > 0, torch.nan)


def capped(n_heads, t_q, t_k):
    return reference.alibi_bias(n_heads, t_q, t_k).clamp(min=-10)


def reversed_heads(n_heads, t_q, t_k):
    return reference.alibi_bias(n_heads, t_q, t_k).flip(0)


def masked_by_a_constant(n_heads, t_q, t_k):
    return reference.alibi_bias(n_heads, t_q, t_k) - 1e4 * torch.ones(t_q, t_k).tril(-3)


def one_query_starts_over(n_heads, t_q, t_k):
    bias = reference.alibi_bias(n_heads, t_q, t_k)
    return torch.zeros_like(bias) if t_q == 1 else bias


@pytest.mark.parametrize(
    "answer",
    [
        nan_in_the_future,
        capped,
        reversed_heads,
        masked_by_a_constant,
        one_query_starts_over,
    ],
)
def test_wrong_biases_are_rejected(answer):
    rejects("alibi_bias", answer)


def ntk_by_parts(base, factor, d_head):
    return reference.ntk_base(base, factor, d_head) if d_head > 6 else base * factor


def fixed_base(base, factor, d_head):
    return reference.ntk_base(10_000.0, factor, d_head)


def frequencies(base, factor, d_head):
    base = reference.ntk_base(base, factor, d_head)
    return base ** (-torch.arange(0, d_head, 2) / d_head)


def rounded_base(base, factor, d_head):
    return float(round(reference.ntk_base(base, factor, d_head), -2))


def positional(base, d_head, factor):
    return reference.ntk_base(base, factor, d_head)


@pytest.mark.parametrize(
    "answer", [ntk_by_parts, fixed_base, frequencies, rounded_base, positional]
)
def test_wrong_bases_are_rejected(answer):
    rejects("ntk_base", answer)


# Mistakes written in another way than the fault that names them -----------------------


def columns_by_their_number(t, d_model):
    refuse_odd(torch.empty(d_model))
    table = torch.zeros(t, d_model)
    for p in range(t):
        for j in range(0, d_model, 2):
            table[p, j] = math.sin(p / 10_000 ** (2 * j / d_model))
            table[p, j + 1] = math.cos(p / 10_000 ** (2 * (j + 1) / d_model))
    return table


def timescales_to_the_end(t, d_model):
    refuse_odd(torch.empty(d_model))
    step = math.log(10_000) / max(d_model // 2 - 1, 1)
    angles = torch.outer(torch.arange(t), torch.exp(-step * torch.arange(d_model // 2)))
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)


def first_five_thousand(t, d_model):
    refuse_odd(torch.empty(d_model))
    return reference.sinusoidal(512, d_model)[:t]


def sine_in_both(t, d_model):
    table = reference.sinusoidal(t, d_model).clone()
    table[:, 1::2] = table[:, 0::2]
    return table


def learnt_sinusoids(t, d_model):
    return nn.Parameter(reference.sinusoidal(t, d_model))


def odd_cut(t, d_model):
    pairs = torch.arange(0, d_model, 2)
    angles = torch.outer(torch.arange(t), 10_000 ** (-pairs / d_model))
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :d_model]


class OnlyTheUpperEnd(reference.LearnedPositions):
    def forward(self, positions):
        n = self.table.num_embeddings
        if positions.max() >= n:
            raise ValueError(f"position {positions.max().item()}, max_len {n}")
        return self.table(positions)


class Padded(reference.LearnedPositions):
    def __init__(self, max_len, d_model):
        super().__init__(max_len, d_model)
        self.table = nn.Embedding(max_len, d_model, padding_idx=0)


class Squeezed(reference.LearnedPositions):
    def forward(self, positions):
        return super().forward(positions).squeeze()


class NeverLearns(reference.LearnedPositions):
    def __init__(self, max_len, d_model):
        super().__init__(max_len, d_model)
        self.table.weight.requires_grad_(False)


def always_one_between(x, positions, base=10_000.0):
    refuse_odd(x)
    f = base ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angles = positions.float()[..., None] * f
    angles = angles.unsqueeze(1) if positions.dim() == 2 else angles
    return turned_by(x, angles)


def heads_if_there_are_four(x, positions, base=10_000.0):
    refuse_odd(x)
    f = base ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angles = positions.float()[..., None] * f
    if positions.dim() == 2 and x.dim() >= 4:
        angles = angles[:, None, :, :]
    return turned_by(x, angles)


def turned_by(x, angles):
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., 0::2], x[..., 1::2]
    pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), -1)
    return pairs.flatten(-2).to(x.dtype)


def rounded_angles(x, positions, base=10_000.0):
    refuse_odd(x)
    f = base ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angles = lined_up(positions.float()[..., None] * f, positions, x)
    return turned_by(x, angles.to(x.dtype))


def complex_without_a_copy(x, positions, base=10_000.0):
    refuse_odd(x)
    f = base ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angles = lined_up(positions.float()[..., None] * f, positions, x)
    numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(numbers * turn).flatten(-2).to(x.dtype)


def sizes_of_heads(x, positions, base=10_000.0):
    _b, _h, _t, _d = x.shape
    return reference.rope(x, positions, base)


def distances_from_the_first(x, positions, base=10_000.0):
    return reference.rope(x, positions - positions.min(-1, keepdim=True).values, base)


def blocks(t, d_model):
    refuse_odd(torch.empty(d_model))
    table = reference.sinusoidal(t, d_model)
    return torch.cat((table[:, 0::2], table[:, 1::2])).view(t, d_model)


class OneTruthValue(reference.LearnedPositions):
    def forward(self, positions):
        if positions >= self.table.num_embeddings:
            raise ValueError(f"{positions} {self.table.num_embeddings}")
        return self.table(positions)


def halves_interleaved(x, positions, base=10_000.0):
    halves = torch.stack(x.chunk(2, -1), -1).flatten(-2)
    return reference.rope(halves, positions, base)


def a_batch_for_granted(x, positions, base=10_000.0):
    if positions.dim() < 2:
        positions = positions.repeat(len(x), 1)
    return reference.rope(x, positions, base)


def base_of_llama_3(x, positions, base=500_000.0):
    return reference.rope(x, positions, base)


def truncated_ratio(n_heads):
    return 2.0 ** (-int(8 / n_heads) * torch.arange(1.0, n_heads + 1))


def slopes_as_they_are(n_heads, t_q, t_k):
    distance = torch.arange(t_k - t_q, t_k)[:, None] - torch.arange(t_k)
    return by_powers(n_heads) * -distance


def extra_slopes_first(n_heads):
    below = 1 << (n_heads.bit_length() - 1)
    extra = by_powers(2 * below)[0::2][: n_heads - below]
    return torch.cat((extra, by_powers(below)))


def strictly_smaller_power(n_heads):
    below = max(1 << ((n_heads - 1).bit_length() - 1), 1) if n_heads > 1 else 1
    return torch.cat((by_powers(below), by_powers(2 * below)[0::2]))[:n_heads]


def signed_and_unchecked(n_heads, t_q, t_k):
    queries = torch.arange(t_k - t_q, t_k)
    return by_powers(n_heads).view(-1, 1, 1) * (torch.arange(t_k) - queries[:, None])


def heads_at_the_end(n_heads, t_q, t_k):
    return signed(n_heads, t_q, t_k).permute(1, 2, 0)


def in_a_batch_of_one(n_heads, t_q, t_k):
    return signed(n_heads, t_q, t_k)[None]


def masked_by_a_product(n_heads, t_q, t_k):
    bias = signed(n_heads, t_q, t_k)
    return bias.clamp(max=0) + (bias > 0).float() * float("-inf")


def a_row_for_every_key(n_heads, t_q, t_k):
    signed(n_heads, t_q, t_k)
    return signed(n_heads, t_k, t_k)


def d_minus_one(base, factor, d_head):
    reference.ntk_base(base, factor, d_head)
    return math.exp(math.log(base) + math.log(factor) * d_head / (d_head - 1))


def only_odd_refused(base, factor, d_head):
    return reference.ntk_base(base, factor, d_head) if d_head != 2 else base


@pytest.mark.parametrize(
    ("name", "answer", "fault"),
    [
        ("sinusoidal", columns_by_their_number, "two_for_each_column"),
        ("sinusoidal", timescales_to_the_end, "stretched_to_the_end"),
        ("sinusoidal", first_five_thousand, "fixed_length"),
        ("sinusoidal", sine_in_both, "sine_twice"),
        ("sinusoidal", learnt_sinusoids, "parameter"),
        ("sinusoidal", odd_cut, "odd_cut_off"),
        ("LearnedPositions", OnlyTheUpperEnd, "lower_end_unchecked"),
        ("LearnedPositions", Padded, "padding_row"),
        ("LearnedPositions", Squeezed, "squeezed"),
        ("LearnedPositions", NeverLearns, "no_gradient"),
        ("rope", always_one_between, "always_for_heads"),
        ("rope", heads_if_there_are_four, "one_dimension_between"),
        ("rope", rounded_angles, "angles_rounded_to_x"),
        ("rope", complex_without_a_copy, "complex_needs_one_piece"),
        ("rope", sizes_of_heads, "four_dimensions_only"),
        ("rope", distances_from_the_first, "relative_to_the_first"),
        ("sinusoidal", blocks, "reshaped_across_rows"),
        ("LearnedPositions", OneTruthValue, "compared_as_one_number"),
        ("rope", halves_interleaved, "halves_put_together_as_neighbours"),
        ("rope", a_batch_for_granted, "batch_taken_for_granted"),
        ("rope", base_of_llama_3, "other_default"),
        ("alibi_slopes", truncated_ratio, "whole_exponents"),
        ("alibi_bias", slopes_as_they_are, "slopes_on_the_keys"),
        ("alibi_slopes", extra_slopes_first, "extra_first"),
        ("alibi_slopes", strictly_smaller_power, "power_below_itself"),
        ("alibi_bias", signed_and_unchecked, "more_queries_accepted"),
        ("alibi_bias", heads_at_the_end, "heads_last"),
        ("alibi_bias", in_a_batch_of_one, "batch_dimension"),
        ("alibi_bias", masked_by_a_product, "zero_times_infinity"),
        ("alibi_bias", a_row_for_every_key, "as_many_queries_as_keys"),
        ("ntk_base", d_minus_one, "one_less"),
        ("ntk_base", only_odd_refused, "two_accepted"),
    ],
)
def test_the_mistake_is_named(name, answer, fault):
    report = evaluate(answer, name)
    assert (report.status, report.fault) == ("failed", fault), report.message


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("sinusoidal", float64_table),
        ("alibi_slopes", float64_slopes),
        ("alibi_bias", lambda n, t_q, t_k: signed(n, t_q, t_k).double()),
    ],
)
def test_without_an_input_the_dtype_is_said(name, answer):
    message = evaluate(answer, name).message
    assert "must be float32" in message
    assert "input" not in message.split("Hint")[0]


# What must fit together ---------------------------------------------------------------


def test_a_module_that_repeats_keys_before_turning_them_fits():
    parts = Joint.registry["rope_in_multi_head"].reference

    class RepeatsFirst(parts["MultiHeadAttention"]):
        def forward(self, x, mask=None, rotate=None):
            q = self.w_q(x).unflatten(-1, (6, -1)).transpose(1, 2)
            k = self.w_k(x).unflatten(-1, (2, -1)).transpose(1, 2)
            v = self.w_v(x).unflatten(-1, (2, -1)).transpose(1, 2)
            k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
            q, k = rotate(q), rotate(k)
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.w_o(out.transpose(1, 2).flatten(2))

    parts = {**parts, "MultiHeadAttention": RepeatsFirst}
    report = evaluate_joint("rope_in_multi_head", parts)
    assert report.status == "passed", report.message


def test_sliders_call_draw_with_their_first_values():
    drawn = []
    explore(lambda n, m: drawn.append((n, m)), n=(0, 3, 1), m=(2, 9, 5))
    assert drawn == [(1, 5)]
