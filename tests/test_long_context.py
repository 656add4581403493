"""Lesson 14: references against masked softmax; other right answers, and wrong ones."""

import math
from functools import partial, reduce

import pytest
import torch
import torch.nn.functional as F

from solutions import long_context as reference
from solutions.attention import attention, causal_mask
from solutions.forward_pass import Block, Transformer, TransformerConfig
from solutions.rnn_baseline import gradient_reach
from tests.answers import fails, passes
from utils import long_text
from utils.check import evaluate
from utils.check.exercise import Exercise
from utils.cost import Cost, peak_bytes, work
from utils.exercises.long_context import slow_chunked, slow_linear
from utils.probe import probe, probe_ids

chunked, linear = reference.chunked_attention, reference.linear_attention
window_mask, one_step = reference.sliding_window_mask, reference.linear_attention_step
phi = reference.feature_map


def qkv(*lead, t_q, t_k, d=6, d_v=5, dtype=torch.float64):
    sizes = ((t_q, d), (t_k, d), (t_k, d_v))
    return [probe(*lead, *size, seed=i, dtype=dtype) for i, size in enumerate(sizes)]


# The references against masked softmax and loops --------------------------------------


@pytest.mark.parametrize(("t_q", "t_k"), [(9, 9), (4, 9), (1, 7)])
@pytest.mark.parametrize("window", [1, 3, 20])
def test_chunked_attention_is_masked_attention(t_q, t_k, window):
    q, k, v = qkv(2, 3, t_q=t_q, t_k=t_k)
    mask = window_mask(t_q, t_k, window)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(slow_chunked(q, k, v, window), expected)
    for block in (1, 4, 32):
        torch.testing.assert_close(chunked(q, k, v, window, block), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_linear_attention_is_a_table_of_weights(causal):
    q, k, v = qkv(2, 3, t_q=4, t_k=9)
    weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    weights = weights.tril(5) if causal else weights
    expected = weights / weights.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(linear(q, k, v, causal), expected)
    torch.testing.assert_close(slow_linear(q, k, v, causal), expected)


def test_both_forms_of_linear_attention_agree_over_512_steps():
    q, k, v = qkv(t_q=512, t_k=512, d=16, d_v=16, dtype=torch.float32)
    at_once, state = linear(q, k, v, True), None
    for i in range(512):
        output, state = one_step(state, q[i], k[i], v[i])
        assert (output - at_once[i]).abs().max() <= 1e-5
    assert sum(part.numel() for part in state) == 16 * 16 + 16


def test_masks_by_counting_and_in_pieces():
    for mask, settings, seen in (
        (window_mask, (8,), 8),
        (reference.sink_mask, (8, 4), 12),
        (reference.strided_mask, (7,), 7 + 7),
    ):
        assert mask(1, 50, *settings).sum() == seen
        whole = mask(50, 50, *settings)
        for t_q in (1, 5, 50):
            assert torch.equal(mask(t_q, 50, *settings), whole[-t_q:])
    assert torch.equal(reference.sink_mask(5, 5, 2, 9), causal_mask(5))
    hop = reference.strided_mask(40, 40, 6).int()
    assert torch.equal((hop @ hop) > 0, causal_mask(40))


@pytest.mark.parametrize(("n_layers", "window"), [(1, 5), (2, 5), (3, 4)])
def test_a_stack_of_windows_reaches_as_far_as_the_lesson_says(n_layers, window):
    torch.manual_seed(0)
    config = TransformerConfig(5, 8, n_layers, 2, 1, 4, 12, 32)
    blocks, mask = [Block(config) for _ in range(n_layers)], window_mask(24, 24, window)

    def through(x):
        return reduce(lambda y, block: block(y, mask), blocks, x)

    norms = gradient_reach(through, probe(2, 24, 8)).flip(0)
    assert int(norms.nonzero().max()) == n_layers * (window - 1)


# Costs, and the recorded long text ----------------------------------------------------


def test_cost_counts_products_what_is_written_and_what_is_kept():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    with Cost() as cost:
        out = a @ b
        out[0].fill_(7)
        out.mT[1:].exp()
    assert cost.flops == 2 * 3 * 4 * 5
    assert cost.written == 15 + 5 + 12
    assert peak_bytes(lambda: [torch.ones(250_000) for _ in range(5)]) > 4.9e6
    assert peak_bytes(lambda: [torch.ones(250_000).sum() for _ in range(5)]) < 2.1e6


def test_costs_grow_as_the_lesson_says():
    def growth(f, *args):
        sizes = (qkv(t_q=t, t_k=t, dtype=torch.float32) for t in (128, 512))
        small, large = (work(f, *x, *args) for x in sizes)
        return large / small

    assert 14 < growth(lambda q, k, v: attention(q, k, v, causal_mask(len(q)))) < 16.5
    assert growth(chunked, 16, 16) < 4.6
    assert growth(linear, True) < 4.1
    assert growth(linear, False) < 4.1


def test_the_long_text_is_read_as_the_model_reads_it_and_its_record_is_whole():
    torch.manual_seed(0)
    config = TransformerConfig(17, 8, 2, 4, 2, 6, 12, 600, rope_base=500.0)
    model, ids = Transformer(config), probe_ids(600, below=17)
    with torch.no_grad():
        expected = F.cross_entropy(model(ids[None])[0, :-1], ids[1:], reduction="none")
    found = long_text._losses(model, ids, torch.arange(600), 500.0)
    torch.testing.assert_close(found, expected)
    slower = long_text._losses(model, ids, torch.arange(600) / 2, 500.0)
    assert not torch.allclose(slower, expected)
    record = long_text.recorded()
    assert list(record["losses"]) == ["as trained", "interpolated", "NTK base"]
    assert all(len(x) == 12 for x in record["losses"].values())
    assert record["tokens"] == long_text.TOKENS > record["max_len"]
    assert {"date", "device", "torch", "python"} <= set(record)


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


def sinks_by_assignment(t_q, t_k, window, n_sinks):
    checked((window, 1), (n_sinks, 0), t_q=t_q, t_k=t_k)
    mask = window_by_triangles(t_q=t_q, t_k=t_k, window=window)
    mask[:, :n_sinks] = True
    return mask & causal_mask(t_q, t_k)


def strided_by_loops(t_q, t_k, stride):
    checked((stride, 1), t_q=t_q, t_k=t_k)
    mask = torch.zeros(t_q, t_k, dtype=torch.bool)
    for row in range(t_q):
        i = row + t_k - t_q
        mask[row, max(0, i - stride + 1) : i + 1] = True
        mask[row, range(i, -1, -stride)] = True
    return mask


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
    """The window of every query collected."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    checked((window, 1), (block, 1), t_q=t_q, t_k=t_k)
    outputs = []
    for i in torch.arange(t_k - t_q, t_k, device=q.device).split(block):
        at = i[:, None] - torch.arange(window, device=q.device)
        near, there = at.clamp(min=0), (at >= 0)[:, None]
        part = q[..., i - (t_k - t_q), None, :]
        out = attention(part, k[..., near, :], v[..., near, :], there)
        outputs.append(out.squeeze(-2))
    return torch.cat(outputs, dim=-2)


def linear_by_einsum(q, k, v, causal, phi=phi):
    """The published form."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    q, k = phi(q), phi(k)
    if not causal:
        below = torch.einsum("...qd,...d->...q", q, k.sum(-2))[..., None]
        s = torch.einsum("...kd,...kv->...dv", k, v)
        return torch.einsum("...qd,...dv->...qv", q, s) / below
    checked(t_q=t_q, t_k=t_k)
    s = torch.einsum("...td,...tv->...tdv", k, v).cumsum(-3)[..., t_k - t_q :, :, :]
    below = (q * k.cumsum(-2)[..., t_k - t_q :, :]).sum(-1, keepdim=True)
    return torch.einsum("...td,...tdv->...tv", q, s) / below


def linear_by_steps(q, k, v, causal):
    """A loop over time; without a mask the divisor is one more value."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    if not causal:
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
        both = phi(q) @ (phi(k).mT @ v)
        return both[..., :-1] / both[..., -1:]
    checked(t_q=t_q, t_k=t_k)
    q, state, outputs = F.pad(q, (0, 0, t_k - t_q, 0)), None, []
    for i in range(t_k):
        output, state = one_step(state, q[..., i, :], k[..., i, :], v[..., i, :])
        outputs.append(output)
    return torch.stack(outputs, dim=-2)[..., t_k - t_q :, :]


def linear_in_chunks(q, k, v, causal, size):
    """A state between chunks, a small table inside them."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    if not causal:
        return linear_by_einsum(q, k, v, False)
    checked(t_q=t_q, t_k=t_k)
    q, k, shift, outputs = phi(q), phi(k), t_k - t_q, []
    s, z = k[..., :shift, :].mT @ v[..., :shift, :], k[..., :shift, :].sum(-2)
    for begin in range(0, t_q, size):
        part = q[..., begin : begin + size, :]
        now = (..., slice(shift + begin, shift + begin + size), slice(None))
        inside = (part @ k[now].mT).tril()
        below = (part * z[..., None, :]).sum(-1, True) + inside.sum(-1, True)
        outputs.append((part @ s + inside @ v[now]) / below)
        s, z = s + k[now].mT @ v[now], z + k[now].sum(-2)
    return torch.cat(outputs, dim=-2)


def step_from_zeros(state, q, k, v):
    if state is None:
        state = k.new_zeros(*k.shape, v.shape[-1]), torch.zeros_like(k)
    s, z = (part.clone() for part in state)
    s += phi(k).unsqueeze(-1) @ v.unsqueeze(-2)
    z += phi(k)
    weights = phi(q) / (phi(q) * z).sum(-1, keepdim=True)
    return torch.einsum("...d,...dv->...v", weights, s), [s, z]


RIGHT = {
    "sliding_window_mask": (window_by_triangles,),
    "sink_mask": (sinks_by_assignment,),
    "strided_mask": (strided_by_loops,),
    "chunked_attention": (chunked_in_place, chunked_by_gathering),
    "feature_map": (
        lambda x: torch.maximum(x + 1, x.clamp(max=0).exp()),
        lambda x: torch.exp(x.where(x <= 0, 0)).where(x <= 0, 1 + x),
        lambda x: F.relu(x) + x.clamp(max=0).exp(),
    ),
    "linear_attention": (
        linear_by_einsum,
        linear_by_steps,
        *(partial(linear_in_chunks, size=n) for n in (16, 128)),
    ),
    "linear_attention_step": (step_from_zeros,),
}


@pytest.mark.parametrize(
    ("name", "answer"), [(name, f) for name, forms in RIGHT.items() for f in forms]
)
def test_other_right_answers_pass(name, answer):
    passes(answer, name)


def test_other_right_parts_fit():
    check = Exercise.registry["long_context_in_a_decoder"]
    own = {name: forms[0] for name, forms in RIGHT.items() if name in check.parts}
    passes(check.reference | own, check.name)


# Wrong answers ------------------------------------------------------------------------


def linear_with(change, q, k, v, causal):
    """Linear attention with another divisor."""
    w = phi(q) @ phi(k).mT
    below = (w.tril(k.shape[-2] - q.shape[-2]) if causal else w).sum(-1, keepdim=True)
    return linear(q, k, v, causal) * below / change(below)


def one_step_with(change, state, q, k, v):
    output, (s, z) = one_step(state, q, k, v)
    below = (phi(q) * z).sum(-1, keepdim=True)
    return output * below / change(below), (s, z)


def kept_elsewhere():
    """A step that keeps its sums itself, and forgets them where `state` is None."""
    kept = {}

    def step(state, q, k, v):
        output, kept["state"] = one_step(state and kept["state"], q, k, v)
        return output, kept["state"]

    return step


def by_few_bits(t_q, t_k, window, dtype):
    checked((window, 1), t_q=t_q, t_k=t_k)
    back = torch.arange(t_k).to(dtype)[t_k - t_q :, None] - torch.arange(t_k).to(dtype)
    return (back >= 0) & (back < window)


def quadratic(q, k, v, window, block):
    checked((block, 1))
    mask = window_mask(q.shape[-2], k.shape[-2], window).to(q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def all_at_once(q, k, v, window, block):
    return chunked_by_gathering(q, k, v, window, block if block < 1 else 10**6)


def elu(x):
    return F.elu(x) + 1


def one_einsum(q, k, v, causal):
    """It multiplies q and k first, into a table."""
    below = phi(q) @ phi(k).sum(-2)[..., None]
    out = torch.einsum("...qd,...kd,...kv->...qv", phi(q), phi(k), v) / below
    return linear(q, k, v, True) if causal else out


def chunks(change):
    """Chunked attention with its sizes changed."""
    return lambda q, k, v, window, block: chunked(q, k, v, *change(window, block))


WRONG = {  # by exercise: each with its fault, where it matters
    "sliding_window_mask": [  # few bits for positions, and a size built in
        *((partial(by_few_bits, dtype=t), None) for t in (torch.int8, torch.bfloat16)),
        (lambda t_q, t_k, window: window_mask(t_q, t_k, min(window, 64)), None),
    ],
    "sink_mask": [  # at most four sinks; −1 sinks pass
        (lambda *x: reference.sink_mask(*x[:3], min(x[3], 4)), None),
        (lambda *x: reference.sink_mask(*x[:3], max(x[3], -(x[3] < -1))), None),
    ],
    "chunked_attention": [
        (chunks(lambda w, b: (w, min(b, 1))), "block_ignored"),  # FINDINGS
        (all_at_once, "block_ignored"),  # FINDINGS
        (quadratic, "quadratic_work"),
        (chunks(lambda w, b: (min(w, 16), b)), None),  # a size built in
        (chunks(lambda w, b: ((w // b + 1) * b if w > 0 < b else w, b)), None),
        (chunks(lambda w, b: (w, 7 if b == -1 else b)), None),  # −1 passes
    ],
    "feature_map": [
        (lambda x: F.relu(x) + torch.exp(-F.relu(-x)), None),  # FINDINGS: slope 0 at 0
        (lambda x: torch.where(x > 0, x + 1, x.clamp(max=88).exp()), None),  # in half
        (lambda x: torch.where(x < -80, 0, phi(x)), None),
        (lambda x: phi(x) if x.dim() else x + 1, None),
        (lambda x: phi(x) + 1e-3, None),
    ],
    "linear_attention": [
        (partial(linear_by_einsum, phi=elu), "rounds_to_zero"),  # FINDINGS
        (one_einsum, "table_of_weights"),
        (lambda q, k, v, causal: linear(q[..., :8], k[..., :8], v, causal), None),
        (lambda q, k, v, causal: linear(q, k.detach(), v, causal), None),
        (lambda q, k, v, causal: linear(q.float(), k.float(), v.float(), causal), None),
    ],
    "linear_attention_step": [
        (kept_elsewhere(), None),
        (lambda state, *x: one_step(state and [0.99 * y for y in state], *x), None),
        (lambda state, *x: one_step(state and [y.detach() for y in state], *x), None),
        (lambda state, q, k, v: one_step(state, q.clamp(max=9), k, v), None),
    ],
}


@pytest.mark.parametrize(
    ("name", "answer", "fault"),
    [(n, *each) for n, some in WRONG.items() for each in some],
)
def test_wrong_answers_fail(name, answer, fault):
    fails(answer, name, fault)


@pytest.mark.parametrize("size", [1e-5, 1e-6, 1e-8, 1e-12])
def test_what_is_added_to_the_divisor_is_named(size):
    for change in (lambda x: x + size, lambda x: x.clamp(min=size)):
        fault = "something_added_to_the_divisor"
        fails(partial(linear_with, change), "linear_attention", fault)
        fails(partial(one_step_with, change), "linear_attention_step", fault)


@pytest.mark.parametrize("name", list(RIGHT)[3:])
def test_a_cut_graph_is_called_that_and_nothing_else(name):
    report = evaluate(torch.no_grad()(getattr(reference, name)), name)
    assert (report.status, report.fault) == ("failed", None), report.message
    assert "No gradient flows" in report.message


@pytest.mark.parametrize(
    "name", ["chunked_attention", "feature_map", "linear_attention"]
)
def test_results_made_on_the_cpu_fail(name):
    def on_the_cpu(*x, **settings):
        out = getattr(reference, name)(*x, **settings)
        return torch.zeros(out.shape, dtype=out.dtype) + out

    assert "device" in fails(on_the_cpu, name).message
