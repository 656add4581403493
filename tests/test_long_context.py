"""Lesson 14: references against masked softmax; other right answers, and wrong ones."""

import math

import pytest
import torch
import torch.nn.functional as F

from solutions import long_context as reference
from solutions.attention import attention, causal_mask
from solutions.forward_pass import Block, Transformer, TransformerConfig
from solutions.rnn_baseline import gradient_reach
from utils import long_text
from utils.check import evaluate, evaluate_joint
from utils.check.exercise import Joint
from utils.cost import Cost, peak_bytes, work
from utils.exercises.long_context import slow_chunked, slow_linear
from utils.probe import probe, probe_ids


def passes(answer, name):
    report = evaluate(answer, name)
    assert report.status == "passed", report.message


def fails(answer, name, fault=None):
    report = evaluate(answer, name)
    assert report.status == "failed", report.message
    if fault is not None:
        assert report.fault == fault, report.message


def qkv(*lead, t_q, t_k, d=6, d_v=5, dtype=torch.float64):
    sizes = ((t_q, d), (t_k, d), (t_k, d_v))
    return [probe(*lead, *size, seed=i, dtype=dtype) for i, size in enumerate(sizes)]


# The references against masked softmax and loops --------------------------------------


@pytest.mark.parametrize(("t_q", "t_k"), [(9, 9), (4, 9), (1, 7)])
@pytest.mark.parametrize("window", [1, 3, 20])
@pytest.mark.parametrize("block", [1, 4, 32])
def test_chunked_attention_is_masked_attention(t_q, t_k, window, block):
    q, k, v = qkv(2, 3, t_q=t_q, t_k=t_k)
    mask = reference.sliding_window_mask(t_q, t_k, window)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    actual = reference.chunked_attention(q, k, v, window, block)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(slow_chunked(q, k, v, window), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_linear_attention_is_a_table_of_weights(causal):
    q, k, v = qkv(2, 3, t_q=4, t_k=9)
    weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    weights = weights.tril(5) if causal else weights
    expected = weights / weights.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(reference.linear_attention(q, k, v, causal), expected)
    torch.testing.assert_close(slow_linear(q, k, v, causal), expected)


def test_both_forms_of_linear_attention_agree_over_512_steps():
    q, k, v = qkv(t_q=512, t_k=512, d=16, d_v=16, dtype=torch.float32)
    at_once, state = reference.linear_attention(q, k, v, True), None
    for i in range(512):
        output, state = reference.linear_attention_step(state, q[i], k[i], v[i])
        assert (output - at_once[i]).abs().max() <= 1e-5
    assert sum(part.numel() for part in state) == 16 * 16 + 16


def test_masks_of_pieces_are_rows_of_the_whole():
    for mask, settings in (
        (reference.sliding_window_mask, (3,)),
        (reference.sink_mask, (3, 2)),
        (reference.strided_mask, (4,)),
    ):
        whole = mask(13, 13, *settings)
        for t_q in (1, 5, 13):
            assert torch.equal(mask(t_q, 13, *settings), whole[-t_q:])
        assert torch.equal(whole & causal_mask(13), whole)


def test_masks_by_counting():
    assert reference.sliding_window_mask(1, 50, 8).sum() == 8
    assert reference.sink_mask(1, 50, 8, 4).sum() == 12
    assert reference.strided_mask(1, 50, 7).sum() == 7 + 7
    assert torch.equal(reference.sink_mask(5, 5, 2, 9), causal_mask(5))


def test_two_strided_hops_reach_everything():
    mask = reference.strided_mask(40, 40, 6).int()
    assert torch.equal((mask @ mask) > 0, causal_mask(40))
    assert not torch.equal(mask > 0, causal_mask(40))


@pytest.mark.parametrize(("n_layers", "window"), [(1, 5), (2, 5), (3, 4)])
def test_a_stack_of_windows_reaches_as_far_as_the_lesson_says(n_layers, window):
    torch.manual_seed(0)
    config = TransformerConfig(5, 8, n_layers, 2, 1, 4, 12, 32)
    blocks = [Block(config) for _ in range(n_layers)]
    mask = reference.sliding_window_mask(24, 24, window)

    def through(x):
        for block in blocks:
            x = block(x, mask)
        return x

    norms = gradient_reach(through, probe(2, 24, 8)).flip(0)
    assert int(norms.nonzero().max()) == n_layers * (window - 1)


# Costs are counted --------------------------------------------------------------------


def test_cost_counts_products_and_what_is_written():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    with Cost() as cost:
        out = a @ b
        out[0].fill_(7)
        out.mT[1:].exp()
    assert cost.flops == 2 * 3 * 4 * 5
    assert cost.written == 15 + 5 + 12


def test_peak_memory_forgets_what_is_gone():
    def one_at_a_time():
        for _ in range(5):
            torch.ones(250_000).sum()

    def all_at_once():
        return [torch.ones(250_000) for _ in range(5)]

    assert peak_bytes(all_at_once) > 4.9e6
    assert peak_bytes(one_at_a_time) < 2.1e6


def test_costs_grow_as_the_lesson_says():
    def growth(f, *args):
        small, large = (
            work(f, *qkv(t_q=t, t_k=t, dtype=torch.float32), *args) for t in (128, 512)
        )
        return large / small

    def full(q, k, v):
        return attention(q, k, v, causal_mask(len(q)))

    assert 14 < growth(full) < 16.5
    assert growth(reference.chunked_attention, 16, 16) < 4.6
    assert growth(reference.linear_attention, True) < 4.1
    assert growth(reference.linear_attention, False) < 4.1


# The recorded long text ---------------------------------------------------------------


def test_the_long_text_is_read_as_the_model_reads_it():
    torch.manual_seed(0)
    config = TransformerConfig(17, 8, 2, 4, 2, 6, 12, 600, rope_base=500.0)
    model, ids = Transformer(config), probe_ids(600, below=17)
    with torch.no_grad():
        expected = F.cross_entropy(model(ids[None])[0, :-1], ids[1:], reduction="none")
    found = long_text._losses(model, ids, torch.arange(600), 500.0)
    torch.testing.assert_close(found, expected)
    slower = long_text._losses(model, ids, torch.arange(600) / 2, 500.0)
    assert not torch.allclose(slower, expected)


def test_the_record_is_whole():
    record = long_text.recorded()
    assert list(record["losses"]) == ["as trained", "interpolated", "NTK base"]
    assert all(len(x) == 12 for x in record["losses"].values())
    assert record["tokens"] == long_text.TOKENS > record["max_len"]
    assert {"date", "device", "torch", "python"} <= set(record)


# Bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "args", "named"),
    [
        ("sliding_window_mask", (4, 5, 0), ("0",)),
        ("sliding_window_mask", (4, 5, -1), ("-1",)),
        ("sliding_window_mask", (6, 5, 2), ("6", "5")),
        ("sink_mask", (4, 5, 0, 2), ("0",)),
        ("sink_mask", (4, 5, 2, -3), ("-3",)),
        ("sink_mask", (6, 5, 2, 1), ("6", "5")),
        ("strided_mask", (4, 5, 0), ("0",)),
        ("strided_mask", (4, 5, -2), ("-2",)),
        ("strided_mask", (6, 5, 2), ("6", "5")),
    ],
)
def test_masks_refuse_bad_sizes(mask, args, named):
    with pytest.raises(ValueError) as error:
        getattr(reference, mask)(*args)
    assert all(n in str(error.value) for n in named)


def test_attentions_refuse_bad_sizes():
    x = qkv(t_q=5, t_k=5)
    for window, block, named in (
        (0, 2, "0"),
        (-2, 2, "-2"),
        (2, 0, "0"),
        (2, -3, "-3"),
    ):
        with pytest.raises(ValueError, match=named):
            reference.chunked_attention(*x, window, block)
    with pytest.raises(ValueError, match=r"6.*5"):
        reference.chunked_attention(*qkv(t_q=6, t_k=5), 2, 2)
    with pytest.raises(ValueError, match=r"6.*5"):
        reference.linear_attention(*qkv(t_q=6, t_k=5), True)
    assert reference.linear_attention(*qkv(t_q=6, t_k=5), False).shape == (6, 5)


# Right answers in another form --------------------------------------------------------


def checked(*pairs, t_q=0, t_k=0):
    if t_q > t_k:
        raise ValueError(f"t_q={t_q} but t_k={t_k}")
    for value, least in pairs:
        if value < least:
            raise ValueError(f"{value} is below {least}")


def window_by_triangles(t_q, t_k, window):
    checked((window, 1), t_q=t_q, t_k=t_k)
    ones, offset = torch.ones(t_q, t_k, dtype=torch.bool), t_k - t_q
    return ones.tril(offset) & ones.triu(offset - window + 1)


def window_by_loops(t_q, t_k, window):
    checked((window, 1), t_q=t_q, t_k=t_k)
    mask = torch.zeros((t_q, t_k), dtype=torch.bool)
    for i in range(t_q):
        at = t_k - t_q + i
        mask[i, max(0, at - window + 1) : at + 1] = True
    return mask


def window_from_the_whole(t_q, t_k, window):
    checked((window, 1), t_q=t_q, t_k=t_k)
    at = torch.arange(t_k)
    whole = (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - window)
    return whole[t_k - t_q :]


def window_by_difference(t_q, t_k, window):
    checked((window, 1), t_q=t_q, t_k=t_k)
    causal = causal_mask(t_q, t_k)
    return causal & ~torch.ones(t_q, t_k).tril(t_k - t_q - window).bool()


def sinks_by_assignment(t_q, t_k, window, n_sinks):
    checked((window, 1), (n_sinks, 0), t_q=t_q, t_k=t_k)
    mask = window_by_triangles(t_q=t_q, t_k=t_k, window=window)
    mask[:, :n_sinks] = True
    return mask & causal_mask(t_q, t_k)


def sinks_by_where(t_q, t_k, window, n_sinks):
    checked((window, 1), (n_sinks, 0), t_q=t_q, t_k=t_k)
    i = torch.arange(t_k - t_q, t_k).unsqueeze(1)
    j = torch.arange(t_k).unsqueeze(0)
    return torch.where(j < n_sinks, j <= i, (j <= i) & (j > i - window))


def sinks_by_loops(t_q, t_k, window, n_sinks):
    checked((window, 1), (n_sinks, 0), t_q=t_q, t_k=t_k)
    rows = []
    for i in range(t_k - t_q, t_k):
        seen = set(range(min(n_sinks, i + 1))) | set(
            range(max(0, i - window + 1), i + 1)
        )
        rows.append([j in seen for j in range(t_k)])
    return torch.tensor(rows, dtype=torch.bool).view(t_q, t_k)


def strided_by_loops(t_q, t_k, stride):
    checked((stride, 1), t_q=t_q, t_k=t_k)
    mask = torch.zeros(t_q, t_k, dtype=torch.bool)
    for row in range(t_q):
        i = row + t_k - t_q
        mask[row, max(0, i - stride + 1) : i + 1] = True
        mask[row, range(i, -1, -stride)] = True
    return mask


def strided_by_diagonals(t_q, t_k, stride):
    checked((stride, 1), t_q=t_q, t_k=t_k)
    mask = window_by_triangles(t_q, t_k, stride)
    ones = torch.ones(t_q, t_k, dtype=torch.bool)
    for far in range(0, t_k, stride):
        mask = mask | (ones.tril(t_k - t_q - far) & ones.triu(t_k - t_q - far))
    return mask


def strided_by_remainders(t_q, t_k, stride):
    checked((stride, 1), t_q=t_q, t_k=t_k)
    at = torch.arange(t_k)
    same = (at[:, None] % stride) == (at % stride)
    near = (at[:, None] - at) < stride
    return ((same | near) & (at[:, None] >= at))[t_k - t_q :]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("sliding_window_mask", window_by_triangles),
        ("sliding_window_mask", window_by_loops),
        ("sliding_window_mask", window_from_the_whole),
        ("sliding_window_mask", window_by_difference),
        ("sink_mask", sinks_by_assignment),
        ("sink_mask", sinks_by_where),
        ("sink_mask", sinks_by_loops),
        ("strided_mask", strided_by_loops),
        ("strided_mask", strided_by_diagonals),
        ("strided_mask", strided_by_remainders),
    ],
)
def test_other_right_masks_pass(name, answer):
    passes(answer, name)


def chunked_by_queries(q, k, v, window, block):
    """One query at a time."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    checked((window, 1), (block, 1), t_q=t_q, t_k=t_k)
    rows = []
    for i in range(t_q):
        end = i + t_k - t_q + 1
        begin = max(end - window, 0)
        part = q[..., i : i + 1, :], k[..., begin:end, :], v[..., begin:end, :]
        rows.append(F.scaled_dot_product_attention(*part))
    return torch.cat(rows, dim=-2)


def chunked_in_place(q, k, v, window, block):
    """Into a result that is made first, the mask from positions."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    checked((window, 1), (block, 1), t_q=t_q, t_k=t_k)
    out, shift = q.new_empty(*q.shape[:-1], v.shape[-1]), t_k - t_q
    for begin in range(0, t_q, block):
        end = min(t_q, begin + block)
        low, high = max(0, begin + shift + 1 - window), end + shift
        i = torch.arange(begin + shift, high, device=q.device)[:, None]
        j = torch.arange(low, high, device=q.device)[None]
        scores = q[..., begin:end, :] @ k[..., low:high, :].mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill((j > i) | (j <= i - window), -math.inf)
        out[..., begin:end, :] = scores.softmax(-1) @ v[..., low:high, :]
    return out


def chunked_by_gathering(q, k, v, window, block):
    """The window of every query collected, all at once."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    checked((window, 1), (block, 1), t_q=t_q, t_k=t_k)
    at = torch.arange(t_k - t_q, t_k, device=q.device)[:, None]
    at = at - torch.arange(window, device=q.device)
    near, there = at.clamp(min=0), (at >= 0)[:, None]
    return attention(q[..., None, :], k[..., near, :], v[..., near, :], there).squeeze(
        -2
    )


def chunked_with_spare_keys(q, k, v, window, block):
    """A few keys more than needed in each slice."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    checked((window, 1), (block, 1), t_q=t_q, t_k=t_k)
    outputs = []
    for part in torch.arange(t_q).split(block):
        n, end = len(part), int(part[-1]) + 1 + t_k - t_q
        low = max(0, end - n - window - 3)
        mask = reference.sliding_window_mask(n, end - low, window).to(q.device)
        keys, values = k[..., low:end, :], v[..., low:end, :]
        outputs.append(attention(q[..., part, :], keys, values, mask))
    return torch.cat(outputs, dim=-2)


@pytest.mark.parametrize(
    "answer",
    [
        chunked_by_queries,
        chunked_in_place,
        chunked_by_gathering,
        chunked_with_spare_keys,
    ],
)
def test_other_right_chunked_attentions_pass(answer):
    passes(answer, "chunked_attention")


def features_by_parts(x):
    return x.clamp(min=0) + x.clamp(max=0).exp()


def features_by_mask(x):
    out = torch.exp(torch.minimum(x, torch.zeros_like(x)))
    return out.where(x <= 0, 1 + x)


def features_by_relu(x):
    return F.relu(x) + torch.exp(-F.relu(-x))


@pytest.mark.parametrize(
    "answer",
    [features_by_parts, features_by_mask, features_by_relu],
)
def test_other_right_features_pass(answer):
    passes(answer, "feature_map")


def elu(x):
    return F.elu(x) + 1


def linear_by_elu(q, k, v, causal):
    """The published form."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    q, k = elu(q), elu(k)
    if not causal:
        below = torch.einsum("...qd,...d->...q", q, k.sum(-2))[..., None]
        s = torch.einsum("...kd,...kv->...dv", k, v)
        return torch.einsum("...qd,...dv->...qv", q, s) / below
    checked(t_q=t_q, t_k=t_k)
    s = torch.einsum("...td,...tv->...tdv", k, v).cumsum(-3)[..., t_k - t_q :, :, :]
    below = (q * k.cumsum(-2)[..., t_k - t_q :, :]).sum(-1, keepdim=True)
    return torch.einsum("...td,...tdv->...tv", q, s) / below


def linear_by_steps(q, k, v, causal):
    """A loop over time, with the old keys first."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    if not causal:
        ones = torch.ones_like(v[..., :1])
        both = elu(q) @ (elu(k).mT @ torch.cat([v, ones], dim=-1))
        return both[..., :-1] / both[..., -1:]
    checked(t_q=t_q, t_k=t_k)
    s = z = 0
    outputs = []
    for j in range(t_k):
        key = elu(k[..., j, :])
        s, z = s + key[..., None] * v[..., None, j, :], z + key
        i = j - (t_k - t_q)
        if i >= 0:
            query = elu(q[..., i, :])
            top = (query[..., None] * s).sum(-2)
            outputs.append(top / (query * z).sum(-1, keepdim=True))
    return torch.stack(outputs, dim=-2)


def linear_in_float64(q, k, v, causal):
    wide = reference.linear_attention(q.double(), k.double(), v.double(), causal=causal)
    return wide.to(q.dtype)


def linear_in_chunks(q, k, v, causal, size=16):
    """A state between chunks, a small table inside them."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    if not causal:
        return linear_by_steps(q, k, v, False)
    checked(t_q=t_q, t_k=t_k)
    shift = t_k - t_q
    q, k = elu(q), elu(k)
    s = k[..., :shift, :].mT @ v[..., :shift, :]
    z = k[..., :shift, :].sum(-2)
    outputs = []
    for begin in range(0, t_q, size):
        part = q[..., begin : begin + size, :]
        keys = k[..., shift + begin : shift + begin + size, :]
        values = v[..., shift + begin : shift + begin + size, :]
        inside = (part @ keys.mT).tril()
        below = (part * z[..., None, :]).sum(-1, keepdim=True)
        below = below + inside.sum(-1, keepdim=True)
        outputs.append((part @ s + inside @ values) / below)
        s, z = s + keys.mT @ values, z + keys.sum(-2)
    return torch.cat(outputs, dim=-2)


@pytest.mark.parametrize(
    "answer", [linear_by_elu, linear_by_steps, linear_in_float64, linear_in_chunks]
)
def test_other_right_linear_attentions_pass(answer):
    passes(answer, "linear_attention")


def step_by_einsum(state, q, k, v):
    q, k = elu(q), elu(k)
    new = torch.einsum("...d,...v->...dv", k, v), k
    s, z = new if state is None else [a + b for a, b in zip(state, new, strict=True)]
    below = torch.einsum("...d,...d->...", q, z)[..., None]
    return torch.einsum("...d,...dv->...v", q, s) / below, [s, z]


def step_from_zeros(state, q, k, v):
    if state is None:
        state = k.new_zeros(*k.shape, v.shape[-1]), torch.zeros_like(k)
    s = state[0] + elu(k).unsqueeze(-1) @ v.unsqueeze(-2)
    z = state[1].add(elu(k))
    weights = elu(q) / (elu(q) * z).sum(-1, keepdim=True)
    return (weights.unsqueeze(-1) * s).sum(-2), (s, z)


def step_with_a_copy(state, q, k, v):
    s, z = (0 * k[..., None] * v[..., None, :], 0 * k) if state is None else state
    s, z = s.clone(), z.clone()
    s += feature(k)[..., None] * v[..., None, :]
    z += feature(k)
    return (feature(q)[..., None, :] @ s)[..., 0, :] / (feature(q) * z).sum(
        dim=-1, keepdim=True
    ), (s, z)


def feature(x):
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


@pytest.mark.parametrize("answer", [step_by_einsum, step_from_zeros, step_with_a_copy])
def test_other_right_steps_pass(answer):
    passes(answer, "linear_attention_step")


# Wrong answers that no fault lists ----------------------------------------------------


def rounded_to_blocks(t_q, t_k, window):
    """Every window begins at a multiple of two."""
    mask = reference.sliding_window_mask(t_q, t_k, window)
    even = torch.arange(t_k) % 2 == 0
    return mask & (even | mask.roll(1, -1))


def square_only(t_q, t_k, window):
    mask = reference.sliding_window_mask(t_q, t_k, window)
    return mask if t_q == t_k else causal_mask(t_q, t_k)


def window_in_int(t_q, t_k, window):
    return reference.sliding_window_mask(t_q, t_k, window).int()


def empty_for_one_query(t_q, t_k, window):
    mask = reference.sliding_window_mask(t_q, t_k, window)
    return mask if t_q > 1 else torch.ones_like(mask)


def at_most_four_sinks(t_q, t_k, window, n_sinks):
    return reference.sink_mask(t_q, t_k, window, min(n_sinks, 4))


def sinks_only_when_far(t_q, t_k, window, n_sinks):
    mask = reference.sink_mask(t_q, t_k, window, n_sinks)
    return mask if t_k < 7 else reference.sliding_window_mask(t_q, t_k, window)


def one_stride_back(t_q, t_k, stride):
    mask = reference.strided_mask(t_q, t_k, stride)
    return mask & ~torch.ones_like(mask).tril(t_k - t_q - 2 * stride)


def powers_of_the_stride(t_q, t_k, stride):
    mask = reference.sliding_window_mask(t_q, t_k, max(stride, 1))
    back = torch.arange(t_k - t_q, t_k)[:, None] - torch.arange(t_k)
    for power in range(1, 6):
        mask = mask | (back == stride**power)
    return mask


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("sliding_window_mask", rounded_to_blocks),
        ("sliding_window_mask", square_only),
        ("sliding_window_mask", window_in_int),
        ("sliding_window_mask", empty_for_one_query),
        ("sink_mask", at_most_four_sinks),
        ("sink_mask", sinks_only_when_far),
        ("strided_mask", one_stride_back),
        ("strided_mask", powers_of_the_stride),
    ],
)
def test_other_wrong_masks_fail(name, answer):
    fails(answer, name)


def whole_rows_of_scores(q, k, v, window, block):
    """Blocks of queries, each with every key."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    checked((window, 1), (block, 1), t_q=t_q, t_k=t_k)
    outputs = []
    for begin in range(0, t_q, block):
        end = min(begin + block, t_q)
        mask = reference.sliding_window_mask(end - begin, end + t_k - t_q, window)
        upto = k[..., : end + t_k - t_q, :], v[..., : end + t_k - t_q, :]
        outputs.append(attention(q[..., begin:end, :], *upto, mask.to(q.device)))
    return torch.cat(outputs, dim=-2)


def mask_of_the_whole(q, k, v, window, block):
    """Blocks, with slices of one large mask."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    checked((block, 1), t_q=t_q, t_k=t_k)
    whole = reference.sliding_window_mask(t_q, t_k, window).to(q.device)
    outputs = []
    for begin in range(0, t_q, block):
        end = min(begin + block, t_q)
        near = slice(max(0, begin + t_k - t_q + 1 - window), end + t_k - t_q)
        part = q[..., begin:end, :], k[..., near, :], v[..., near, :]
        outputs.append(attention(*part, whole[begin:end, near]))
    return torch.cat(outputs, dim=-2)


def built_in_with_a_mask(q, k, v, window, block):
    t_q, t_k = q.shape[-2], k.shape[-2]
    checked((block, 1), t_q=t_q, t_k=t_k)
    mask = reference.sliding_window_mask(t_q, t_k, window).to(q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize(
    "answer", [whole_rows_of_scores, mask_of_the_whole, built_in_with_a_mask]
)
def test_quadratic_work_is_noticed(answer):
    fails(answer, "chunked_attention", "quadratic_work")


def right_but(change):
    """Right where `change(q, k, v, window, block)` gives None."""

    def answer(q, k, v, window, block):
        out = change(q, k, v, window, block)
        return (
            reference.chunked_attention(q, k, v, window, block) if out is None else out
        )

    return answer


WRONG_CHUNKS = {
    "block_as_a_multiple_of_the_window": lambda q, k, v, w, b: (
        reference.chunked_attention(q, k, v, -(-w // b) * b, b) if w > 0 < b else None
    ),
    "no_gradient": lambda q, k, v, w, b: reference.chunked_attention(
        q, k, v, w, b
    ).detach(),
    "in_float32": lambda q, k, v, w, b: reference.chunked_attention(
        q.float(), k.float(), v.float(), w, b
    ),
    "last_row_of_the_batch": lambda q, k, v, w, b: (
        reference.chunked_attention(q, k, v, w, b)[-1:].expand(*q.shape[:-1], -1)
        if q.dim() == 4
        else None
    ),
    "short_texts_unwindowed": lambda q, k, v, w, b: (
        attention(q, k, v, causal_mask(q.shape[-2], k.shape[-2]))
        if q.shape[-2] <= b and w > 0 and q.shape[-2] <= k.shape[-2]
        else None
    ),
}


@pytest.mark.parametrize("name", WRONG_CHUNKS)
def test_other_wrong_chunked_attentions_fail(name):
    fails(right_but(WRONG_CHUNKS[name]), "chunked_attention")


def squared_relu(x):
    return x.relu().square() + 1


def features_of_the_mean(x):
    return reference.feature_map(x - x.mean())


def a_little_more(x):
    return reference.feature_map(x) + 1e-3


@pytest.mark.parametrize("answer", [squared_relu, features_of_the_mean, a_little_more])
def test_other_wrong_features_fail(answer):
    fails(answer, "feature_map")


def large_epsilon(q, k, v, causal):
    if causal:
        checked(t_q=q.shape[-2], t_k=k.shape[-2])
    w = elu(q) @ elu(k).mT
    w = w.tril(k.shape[-2] - q.shape[-2]) if causal else w
    return w @ v / (w.sum(-1, keepdim=True) + 1e-2)


def one_einsum(q, k, v, causal):
    """It multiplies q and k first, into a table."""
    if causal:
        return reference.linear_attention(q, k, v, True)
    q, k = elu(q), elu(k)
    below = torch.einsum("...qd,...d->...q", q, k.sum(-2))[..., None]
    return torch.einsum("...qd,...kd,...kv->...qv", q, k, v) / below


def test_an_einsum_that_makes_a_table_is_noticed():
    fails(one_einsum, "linear_attention", "table_of_weights")


def divided_by_length(q, k, v, causal):
    out = reference.linear_attention(q, k, v, causal)
    return out * (1 + 1 / k.shape[-2])


def heads_share_a_sum(q, k, v, causal):
    if q.dim() < 4:
        return reference.linear_attention(q, k, v, causal)
    return reference.linear_attention(
        q, k.mean(1, keepdim=True).expand_as(k), v, causal
    )


def divisor_detached(q, k, v, causal):
    right = reference.linear_attention(q, k, v, causal)
    same = reference.linear_attention(q.detach(), k, v, causal)
    return right.detach() + same - same.detach()


@pytest.mark.parametrize(
    "answer", [large_epsilon, divided_by_length, heads_share_a_sum, divisor_detached]
)
def test_other_wrong_linear_attentions_fail(answer):
    fails(answer, "linear_attention")


def test_a_step_that_keeps_its_own_state_fails():
    kept = []

    def from_a_list(state, q, k, v):
        output, state = reference.linear_attention_step(
            kept[-1] if kept else None, q, k, v
        )
        kept[:] = [state]
        return output, state

    fails(from_a_list, "linear_attention_step")


def test_other_wrong_steps_fail():
    def cut_off(state, q, k, v):
        state = None if state is None else [x.detach() for x in state]
        return reference.linear_attention_step(state, q, k, v)

    def drops_the_first(state, q, k, v):
        output, new = reference.linear_attention_step(state, q, k, v)
        return output, (new[0], new[1] * (1 + 1e-3))

    def only_a_tensor(state, q, k, v):
        old = None if state is None else (state[..., :-1], state[..., -1])
        output, (s, z) = reference.linear_attention_step(old, q, k, v)
        return output, torch.cat([s, z[..., None]], dim=-1)

    for answer in (cut_off, drops_the_first, only_a_tensor):
        fails(answer, "linear_attention_step")


# Subtle ones: long texts, tails, precision, devices -----------------------------------


def steps_back(t_q, t_k, dtype):
    at = torch.arange(t_k).to(dtype)
    return at[t_k - t_q :, None] - at


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16])
def test_masks_from_positions_of_few_bits_fail(dtype):
    def window_mask(t_q, t_k, window):
        checked((window, 1), t_q=t_q, t_k=t_k)
        back = steps_back(t_q, t_k, dtype)
        return (back >= 0) & (back < window)

    def sinks(t_q, t_k, window, n_sinks):
        checked((n_sinks, 0))
        early = torch.arange(t_k).to(dtype) < n_sinks
        causal = steps_back(t_q, t_k, dtype) >= 0
        return window_mask(t_q, t_k, window) | (causal & early)

    def strides(t_q, t_k, stride):
        checked((stride, 1), t_q=t_q, t_k=t_k)
        back = steps_back(t_q, t_k, dtype)
        return (back >= 0) & ((back < stride) | (back % stride == 0))

    fails(window_mask, "sliding_window_mask")
    fails(sinks, "sink_mask")
    fails(strides, "strided_mask")


def test_masks_with_a_size_built_in_fail():
    def window(t_q, t_k, window):
        return reference.sliding_window_mask(t_q, t_k, min(window, 64))

    def sinks(t_q, t_k, window, n_sinks):
        return reference.sink_mask(t_q, t_k, window, min(n_sinks, 64))

    def strides(t_q, t_k, stride):
        near = reference.sliding_window_mask(t_q, t_k, 64)
        return reference.strided_mask(t_q, t_k, stride) & near

    fails(window, "sliding_window_mask")
    fails(sinks, "sink_mask")
    fails(strides, "strided_mask")


def test_errors_for_some_sizes_alone_fail():
    def one_query_more(t_q, t_k, window):
        if t_q == t_k + 1:
            t_q = t_k
        return reference.sliding_window_mask(t_q, t_k, window)

    def minus_one_sink(t_q, t_k, window, n_sinks):
        return reference.sink_mask(t_q, t_k, window, max(n_sinks, -(n_sinks < -1)))

    def no_window_without_sinks(t_q, t_k, window, n_sinks):
        window = 1 if window == 0 and n_sinks == 0 else window
        return reference.sink_mask(t_q, t_k, window, n_sinks)

    def minus_one_is_all(q, k, v, window, block):
        block = q.shape[-2] if block == -1 else block
        return reference.chunked_attention(q, k, v, window, block)

    def one_more_query(q, k, v, causal):
        q = q[..., 1:, :] if causal and q.shape[-2] == k.shape[-2] + 1 else q
        return reference.linear_attention(q, k, v, causal)

    fails(one_query_more, "sliding_window_mask")
    fails(minus_one_sink, "sink_mask")
    fails(no_window_without_sinks, "sink_mask")
    fails(minus_one_is_all, "chunked_attention")
    fails(one_more_query, "linear_attention")


WRONG_CHUNKS_OF_LONG_TEXTS = {
    "a_few_keys_at_most": lambda q, k, v, w, b: reference.chunked_attention(
        q, k, v, min(w, 16), b
    ),
    "other_above_50": lambda q, k, v, w, b: (
        reference.chunked_attention(q, k, v, w, b) * (1.01 if len(q) > 50 else 1)
    ),
    "one_table_of_bytes": lambda q, k, v, w, b: (
        q.new_zeros(q.shape[-2], k.shape[-2], dtype=torch.bool)[:0].any()
        + reference.chunked_attention(q, k, v, w, b)
    ),
}


@pytest.mark.parametrize("name", WRONG_CHUNKS_OF_LONG_TEXTS)
def test_chunked_attention_wrong_on_long_texts_fails(name):
    fails(right_but(WRONG_CHUNKS_OF_LONG_TEXTS[name]), "chunked_attention")


def on_the_cpu(out):
    """Copied into a tensor that was made without a device."""
    result = torch.zeros(out.shape, dtype=out.dtype)
    result[...] = out
    return result


def test_results_made_on_the_cpu_fail():
    def chunked(q, k, v, window, block):
        return on_the_cpu(reference.chunked_attention(q, k, v, window, block))

    def linear(q, k, v, causal):
        return on_the_cpu(reference.linear_attention(q, k, v, causal))

    def features(x):
        return reference.feature_map(x + torch.zeros(x.shape, dtype=x.dtype))

    def step(state, q, k, v):
        output, (s, z) = reference.linear_attention_step(state, q, k, v)
        return output, (on_the_cpu(s), z)

    for answer, name in (
        (chunked, "chunked_attention"),
        (linear, "linear_attention"),
        (features, "feature_map"),
        (step, "linear_attention_step"),
    ):
        report = evaluate(answer, name)
        assert report.status == "failed", name
        assert "device" in report.message, report.message


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("feature_map", torch.no_grad()(reference.feature_map)),
        ("linear_attention", torch.no_grad()(reference.linear_attention)),
        ("linear_attention_step", torch.no_grad()(reference.linear_attention_step)),
        ("chunked_attention", torch.no_grad()(reference.chunked_attention)),
    ],
)
def test_a_cut_graph_is_called_that_and_nothing_else(name, answer):
    report = evaluate(answer, name)
    assert (report.status, report.fault) == ("failed", None), report.message
    assert "No gradient flows" in report.message


def test_features_wrong_in_one_dtype_or_shape_fail():
    def clamped_at_88(x):
        return torch.where(x > 0, x + 1, x.clamp(-88, 0).exp())

    def zero_below_80(x):
        return torch.where(x < -80, 0, reference.feature_map(x))

    def no_single_numbers(x):
        return reference.feature_map(x) if x.dim() else x + 1

    def largest_of_float32(x):
        return torch.where(x > 0, x + 1, x.clamp(max=88).exp())

    fails(clamped_at_88, "feature_map")
    fails(zero_below_80, "feature_map")
    fails(no_single_numbers, "feature_map")
    fails(largest_of_float32, "feature_map", "nan_in_the_gradient_in_float16")


LARGER = {f"plus {e}": lambda x, e=e: x + e for e in (1e-3, 1e-6, 1e-8, 1e-12)} | {
    f"at least {e}": lambda x, e=e: x.clamp(min=e) for e in (1.0, 0.1, 0.01, 1e-6)
}


@pytest.mark.parametrize("name", LARGER)
def test_what_is_added_to_the_divisor_is_named(name):
    def linear(q, k, v, causal):
        right = reference.linear_attention(q, k, v, causal)
        q, k = feature(q), feature(k)
        w = q @ k.mT
        w = w.tril(k.shape[-2] - q.shape[-2]) if causal else w
        below = w.sum(-1, keepdim=True)
        return right * below / LARGER[name](below)

    def step(state, q, k, v):
        output, (s, z) = reference.linear_attention_step(state, q, k, v)
        below = (feature(q) * z).sum(-1, keepdim=True)
        return output * below / LARGER[name](below), (s, z)

    def when_causal(q, k, v, causal):
        if causal:
            return linear(q, k, v, causal)
        return reference.linear_attention(q, k, v, causal)

    fails(linear, "linear_attention", "something_added_to_the_divisor")
    fails(step, "linear_attention_step", "something_added_to_the_divisor")
    fails(when_causal, "linear_attention")


def test_float64_through_float32_fails():
    def linear(q, k, v, causal):
        if q.dtype == torch.float64:
            q, k, v = q.float(), k.float(), v.float()
            return reference.linear_attention(q, k, v, causal).double()
        return reference.linear_attention(q, k, v, causal)

    def step(state, q, k, v):
        now = q.float(), k.float(), v.float()
        output, state = reference.linear_attention_step(state, *now)
        return output.to(q.dtype), state

    fails(linear, "linear_attention")
    fails(step, "linear_attention_step")


def test_linear_attentions_wrong_in_one_place_fail():
    def first_eight_features(q, k, v, causal):
        return reference.linear_attention(q[..., :8], k[..., :8], v, causal)

    def one_row_for_few_queries(q, k, v, causal):
        out = reference.linear_attention(q, k, v, causal)
        few = q.dim() == 4 and q.shape[-2] < k.shape[-2]
        return out[:1].expand_as(out) if few else out

    def large_features_cut(state, q, k, v):
        return reference.linear_attention_step(state, q.clamp(max=10), k, v)

    fails(first_eight_features, "linear_attention")
    fails(one_row_for_few_queries, "linear_attention")
    fails(large_features_cut, "linear_attention_step")


def divided(below, running=None):
    """Linear attention with another divisor, or another running total."""
    return lambda q, k, v, causal: _divided(q, k, v, causal, below, running)


def _divided(q, k, v, causal, below, running):
    t_q, t_k = q.shape[-2], k.shape[-2]
    q, k = feature(q), feature(k)
    if not causal:
        return q @ (k.mT @ v) / below(q, k.sum(-2, keepdim=True))
    checked(t_q=t_q, t_k=t_k)
    running = running or (lambda x, dim: x.cumsum(dim))
    s = running(k[..., None] * v[..., None, :], -3)[..., t_k - t_q :, :, :]
    z = running(k, -2)[..., t_k - t_q :, :]
    return (q[..., None, :] @ s).squeeze(-2) / below(q, z)


def dot(q, z):
    return (q * z).sum(-1, keepdim=True)


def fading(rate):
    def running(x, dim):
        n = torch.arange(x.shape[dim])
        weights = (rate ** (n[:, None] - n)).tril().to(x)
        return (
            (weights @ x.movedim(dim, 0).flatten(1))
            .view(x.movedim(dim, 0).shape)
            .movedim(0, dim)
        )

    return running


def in_chunks(size, diagonal):
    """Chunks whose inside is cut off above `diagonal`."""

    def linear(q, k, v, causal):
        if not causal:
            return reference.linear_attention(q, k, v, False)
        t_q, t_k = q.shape[-2], k.shape[-2]
        checked(t_q=t_q, t_k=t_k)
        w = feature(q) @ feature(k).mT
        i = torch.arange(t_k - t_q, t_k)[:, None]
        j = torch.arange(t_k)
        seen = (j <= i + diagonal) | (j // size < i // size)
        seen &= j < (i // size + 1) * size
        w = w * seen
        return w @ v / w.sum(-1, keepdim=True)

    return linear


NAMED_LINEAR = {
    "no dimension kept": (
        divided(lambda q, z: dot(q, z).squeeze(-1)),
        "divisor_without_its_last_dimension",
    ),
    "z without a column": (
        lambda q, k, v, causal: (
            reference.linear_attention(q, k, v, True)
            if causal
            else feature(q) @ (feature(k).mT @ v) / (feature(q) @ feature(k).sum(-2))
        ),
        "divisor_without_its_last_dimension",
    ),
    "sum over queries": (
        divided(lambda q, z: (q * z).sum(-2, keepdim=True)),
        "divisor_summed_over_the_queries",
    ),
    "sum of all": (
        divided(lambda q, z: torch.einsum("...d,...d->", q, z)),
        "one_divisor_for_all",
    ),
    "two sums": (
        divided(lambda q, z: q.sum(-1, True) * z.sum(-1, True)),
        "product_of_two_sums",
    ),
    "a decay of 0.95": (divided(dot, fading(0.95)), "forgets"),
    "a decay of 0.99": (divided(dot, fading(0.99)), "forgets"),
    "the text as one chunk": (in_chunks(1000, 1000), "causal_ignored"),
    "itself left out of a chunk": (in_chunks(1000, -1), "itself_left_out"),
    "the keys of the queries alone": (
        lambda q, k, v, causal: (
            reference.linear_attention(
                q, k[..., -q.shape[-2] :, :], v[..., -q.shape[-2] :, :], True
            )
            if causal and q.shape[-2] < k.shape[-2]
            else reference.linear_attention(q, k, v, causal)
        ),
        "earlier_keys_dropped",
    ),
    "a table where there are few queries": (
        lambda q, k, v, causal: (
            in_chunks(10**6, 0)
            if causal and q.shape[-2] < k.shape[-2]
            else reference.linear_attention
        )(q, k, v, causal),
        "table_of_weights_of_few_queries",
    ),
    "along dimension 0": (
        divided(dot, lambda y, dim: y.cumsum(0)),
        "running_total_over_dimension_0",
    ),
    "along dimension 1": (
        divided(dot, lambda y, dim: y.cumsum(1)),
        "running_total_over_dimension_1",
    ),
}


@pytest.mark.parametrize("name", NAMED_LINEAR)
def test_wrong_divisors_and_sums_are_named(name):
    answer, fault = NAMED_LINEAR[name]
    fails(answer, "linear_attention", fault)


@pytest.mark.parametrize("size", [2, 4, 64])
def test_a_chunk_that_sees_its_own_future_is_told_so(size):
    report = evaluate(in_chunks(size, size), "linear_attention")
    assert report.status == "failed"
    assert "which come later" in report.message


def stepped(below=dot, kept=1.0, added=1.0):
    def step(state, q, k, v):
        q, k = feature(q), feature(k)
        new = k[..., None] * v[..., None, :], k
        if state is not None:
            new = [kept * a + added * b for a, b in zip(state, new, strict=True)]
        s, z = new
        return (q[..., None, :] @ s).squeeze(-2) / below(q, z), (s, z)

    return step


def z_of_keys(state, q, k, v):
    s, z = (0, 0) if state is None else state
    s, z = s + torch.einsum("...d,...v->...dv", feature(k), v), z + k
    output = torch.einsum("...d,...dv->...v", feature(q), s) / dot(feature(q), z)
    return output, (s, z)


NAMED_STEPS = {
    "unmapped keys in z": (z_of_keys, "z_not_mapped"),
    "no dimension kept": (
        stepped(lambda q, z: torch.einsum("...d,...d->...", q, z)),
        "divisor_without_its_last_dimension",
    ),
    "over the batch": (
        stepped(lambda q, z: (q * z).sum(0)),
        "divisor_summed_over_the_batch",
    ),
    "one for all": (stepped(lambda q, z: (q * z).sum()), "one_divisor_for_all"),
    "a decay of 0.99": (stepped(kept=0.99), "forgets"),
    "a decay of a half": (stepped(kept=0.5), "forgets"),
}


@pytest.mark.parametrize("name", NAMED_STEPS)
def test_wrong_steps_are_named(name):
    answer, fault = NAMED_STEPS[name]
    fails(answer, "linear_attention_step", fault)


def test_a_moving_average_is_told_what_it_is():
    report = evaluate(stepped(kept=0.75, added=0.25), "linear_attention_step")
    assert report.status == "failed"
    assert "0.75 times the old one and 0.25 times what is new" in report.message


def in_blocks(mask=None, first=None, divisor=None):
    """Chunked attention with another mask, first key or divisor."""

    def answer(q, k, v, window, block):
        t_q, t_k = q.shape[-2], k.shape[-2]
        checked((window, 1), (block, 1), t_q=t_q, t_k=t_k)
        outputs = []
        for start in range(0, t_q, block):
            end = min(start + block, t_q)
            last = end + t_k - t_q
            low = max(
                0,
                (first or (lambda at, shift, w: at + shift - w + 1))(
                    start, t_k - t_q, window
                ),
            )
            see = (mask or reference.sliding_window_mask)(
                end - start, last - low, window
            )
            scores = q[..., start:end, :] @ k[..., low:last, :].mT
            root = math.sqrt((v if divisor == "d_v" else q).shape[-1])
            scores = (scores / root).masked_fill(~see.to(q.device), -math.inf)
            outputs.append(scores.softmax(-1) @ v[..., low:last, :])
        return torch.cat(outputs, dim=-2)

    return answer


NAMED_CHUNKS = {
    "blocks of whole windows": (
        lambda q, k, v, w, b: reference.chunked_attention(
            q, k, v, (w // b + 1) * b if w > 0 < b else w, b
        ),
        "window_rounded_to_blocks",
    ),
    "tril": (
        in_blocks(lambda n, m, w: torch.ones(n, m, dtype=torch.bool).tril()),
        "causal_from_the_top_left",
    ),
    "a window from the top left": (
        in_blocks(
            lambda n, m, w: torch.ones(n, m, dtype=torch.bool).tril().triu(1 - w)
        ),
        "window_from_the_top_left",
    ),
    "root of d_v": (in_blocks(divisor="d_v"), "scaled_by_the_width_of_the_values"),
    "all keys before few queries": (
        in_blocks(first=lambda at, shift, w: at - w + 1),
        "quadratic_of_few_queries",
    ),
    "a window of blocks": (
        lambda q, k, v, w, b: reference.chunked_attention(
            q, k, v, w * b if w > 0 < b else w, b
        ),
        "window_counted_in_blocks",
    ),
    "whole blocks into zeros": (
        lambda q, k, v, w, b: torch.cat(
            [
                reference.chunked_attention(q, k, v, w, b)[
                    ..., : q.shape[-2] // b * b, :
                ],
                v.new_zeros(*q.shape[:-2], q.shape[-2] % b, v.shape[-1]),
            ],
            dim=-2,
        ),
        "last_queries_left_at_0",
    ),
}


@pytest.mark.parametrize("name", NAMED_CHUNKS)
def test_wrong_chunks_are_named(name):
    answer, fault = NAMED_CHUNKS[name]
    fails(answer, "chunked_attention", fault)


def test_blocks_open_to_change_are_right_unchanged():
    passes(in_blocks(), "chunked_attention")
    passes(stepped(), "linear_attention_step")
    passes(divided(dot), "linear_attention")


def test_wrong_masks_are_named():
    def longer(t_q, t_k, window, n_sinks):
        near = reference.sliding_window_mask(t_q, t_k, window + n_sinks)
        return reference.sink_mask(t_q, t_k, window, n_sinks) | near

    def one_too_near(t_q, t_k, stride):
        near = window_by_triangles(t_q, t_k, stride)
        back = torch.arange(t_k - t_q, t_k)[:, None] - torch.arange(t_k)
        return near | ((back >= 0) & ((back + 1) % stride == 0))

    fails(longer, "sink_mask", "window_longer_by_the_sinks")
    fails(one_too_near, "strided_mask", "remainder_of_stride_minus_one")


# More right ones ----------------------------------------------------------------------


def chunked_by_unfold(q, k, v, window, block):
    """Padded keys, and what is padded hidden by its position."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    checked((window, 1), (block, 1), t_q=t_q, t_k=t_k)
    k, v = (
        F.pad(x, (0, 0, window - 1, 0)).unfold(-2, window, 1)[..., t_k - t_q :, :, :]
        for x in (k, v)
    )
    scores = (q[..., None, :] @ k).squeeze(-2) / math.sqrt(q.shape[-1])
    at = torch.arange(t_k - t_q, t_k, device=q.device)[:, None]
    at = at + torch.arange(1 - window, 1, device=q.device)
    weights = scores.masked_fill(at < 0, -math.inf).softmax(-1)
    return (v @ weights[..., None]).squeeze(-1)


def chunked_by_recursion(q, k, v, window, block):
    t_q, t_k = q.shape[-2], k.shape[-2]
    checked((window, 1), (block, 1), t_q=t_q, t_k=t_k)
    if t_q > block:
        rest, upto = q[..., :-block, :], (..., slice(t_k - block), slice(None))
        return torch.cat(
            [
                chunked_by_recursion(rest, k[upto], v[upto], window, block),
                chunked_by_recursion(q[..., -block:, :], k, v, window, block),
            ],
            dim=-2,
        )
    begin = max(0, t_k - t_q - window + 1)
    mask = window_by_triangles(t_q, t_k - begin, window).to(q.device)
    near = k[..., begin:, :], v[..., begin:, :]
    return F.scaled_dot_product_attention(q, *near, attn_mask=mask)


class Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return feature(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].clamp(max=0).exp()


def features_by_the_larger(x):
    """e^x lies above x + 1 everywhere, and below 0 it is not clamped."""
    return torch.maximum(x + 1, x.clamp(max=0).exp())


def linear_with_ones(q, k, v, causal):
    """The divisor as one more value; each head by itself."""
    if q.dim() > 2:
        rows = zip(q, k, v, strict=True)
        return torch.stack([linear_with_ones(*row, causal) for row in rows])
    t_q, t_k = q.shape[-2], k.shape[-2]
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    q, k = feature(q), feature(k)
    if causal:
        checked(t_q=t_q, t_k=t_k)
        s = torch.cumsum(torch.einsum("td,tv->tdv", k, v), 0)[t_k - t_q :]
        out = torch.einsum("td,tdv->tv", q, s)
    else:
        out = q @ (k.T @ v)
    return out[:, :-1] / out[:, -1:]


def linear_by_features(q, k, v, causal):
    """A loop over the features, a running total for each."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    if causal:
        checked(t_q=t_q, t_k=t_k)
    top = below = 0
    for q_now, k_now in zip(
        feature(q).split(1, dim=-1), feature(k).split(1, dim=-1), strict=True
    ):
        s, z = k_now * v, k_now
        if causal:
            s, z = (x.cumsum(-2)[..., t_k - t_q :, :] for x in (s, z))
        else:
            s, z = s.sum(-2, keepdim=True), z.sum(-2, keepdim=True)
        top, below = top + q_now * s, below + q_now * z
    return top / below


def linear_in_long_chunks(q, k, v, causal):
    """Chunks as long as the texts that are counted first."""
    return linear_in_chunks(q, k, v, causal, size=128)


def linear_by_the_step(q, k, v, causal):
    if not causal:
        n = k.shape[-2]
        q, k = feature(q), feature(k)
        return q @ (k.mT @ v / n) / (q @ k.mean(-2)[..., None])
    t_q, t_k = q.shape[-2], k.shape[-2]
    checked(t_q=t_q, t_k=t_k)
    q = F.pad(q, (0, 0, t_k - t_q, 0))
    state, outputs = None, []
    for i in range(t_k):
        now = q[..., i, :], k[..., i, :], v[..., i, :]
        output, state = reference.linear_attention_step(state, *now)
        outputs.append(output)
    return torch.stack(outputs, dim=-2)[..., t_k - t_q :, :]


def linear_divided_first(q, k, v, causal):
    """The queries are divided, so that their weights sum to 1 before the values."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    q, k = feature(q), feature(k)
    if not causal:
        return q / dot(q, k.sum(-2, keepdim=True)) @ (k.mT @ v)
    checked(t_q=t_q, t_k=t_k)
    q = q / dot(q, k.cumsum(-2)[..., t_k - t_q :, :])
    s = torch.einsum("...td,...tv->...tdv", k, v).cumsum(-3)[..., t_k - t_q :, :, :]
    return torch.einsum("...td,...tdv->...tv", q, s)


def linear_with_the_smallest_number(q, k, v, causal):
    """At least the smallest number of the dtype, which changes nothing."""
    least = torch.finfo(q.dtype).tiny
    return divided(lambda q, z: dot(q, z).clamp(min=least))(q, k, v, causal)


def chunked_online(q, k, v, window, block):
    """Step by step back from the query, the softmax kept as in lesson 11."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    checked((window, 1), (block, 1), t_q=t_q, t_k=t_k)
    i = torch.arange(t_k - t_q, t_k, device=q.device)
    most = torch.full_like(q[..., :1], -math.inf)
    total, out = torch.zeros_like(most), 0
    for back in range(min(window, t_k)):
        there, j = (i >= back)[:, None], (i - back).clamp(min=0)
        scores = (q * k[..., j, :]).sum(-1, keepdim=True) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~there, -math.inf)
        now = torch.maximum(most, scores)
        shrink, weight = (most - now).exp(), (scores - now).exp()
        total, out = total * shrink + weight, out * shrink + weight * v[..., j, :]
        most = now
    return out / total


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("linear_attention", linear_by_features),
        ("linear_attention", linear_by_the_step),
        ("linear_attention", linear_in_long_chunks),
        ("linear_attention", linear_divided_first),
        ("linear_attention", linear_with_the_smallest_number),
        ("chunked_attention", chunked_online),
        ("chunked_attention", chunked_by_unfold),
        ("chunked_attention", chunked_by_recursion),
        ("feature_map", Features.apply),
        ("feature_map", features_by_the_larger),
        ("linear_attention", linear_with_ones),
    ],
)
def test_unusual_right_answers_pass(name, answer):
    passes(answer, name)


# What must fit together ---------------------------------------------------------------

JOINT = "long_context_in_a_decoder"


def test_other_right_parts_fit():
    parts = Joint.registry[JOINT].reference | {
        "sliding_window_mask": window_by_loops,
        "sink_mask": sinks_by_where,
        "strided_mask": strided_by_diagonals,
        "chunked_attention": chunked_by_gathering,
        "linear_attention": linear_in_chunks,
        "linear_attention_step": step_by_einsum,
    }
    report = evaluate_joint(JOINT, parts)
    assert report.status == "passed", report.message


def test_a_mask_for_one_head_alone_does_not_fit():
    def with_heads(t_q, t_k, window):
        return reference.sliding_window_mask(t_q, t_k, window).repeat(3, 1, 1)

    parts = Joint.registry[JOINT].reference | {"sliding_window_mask": with_heads}
    assert evaluate_joint(JOINT, parts).status == "failed"
