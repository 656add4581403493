"""Lesson 14: masks for long texts, attention in blocks, and linear attention."""

import math

import torch
import torch.nn.functional as F

from utils.check.errors import Explained, Unmet
from utils.check.exercise import Exercise, IntegrationCheck
from utils.cost import work
from utils.probe import probe, strided

sliding_window_mask = Exercise("sliding_window_mask", lesson="long_context")
sink_mask = Exercise("sink_mask", lesson="long_context")
strided_mask = Exercise("strided_mask", lesson="long_context")
chunked_attention = Exercise("chunked_attention", lesson="long_context")
feature_map = Exercise("feature_map", lesson="long_context")
linear_attention = Exercise("linear_attention", lesson="long_context")
linear_attention_step = Exercise("linear_attention_step", lesson="long_context")

SIZES = ((5, 5), (2, 7), (4, 6), (1, 8), (9, 11), (3, 3), (1, 1))


# What is right, computed slowly -------------------------------------------------------


def table(t_q, t_k, may_look):
    """A mask cell by cell; the queries are the last of the positions."""
    return torch.tensor(
        [[j <= i and may_look(i, j) for j in range(t_k)] for i in range(t_k - t_q, t_k)]
    ).reshape(t_q, t_k)


def slow_window(t_q, t_k, window):
    return table(t_q, t_k, lambda i, j: i - j < window)


def slow_sinks(t_q, t_k, window, n_sinks):
    return table(t_q, t_k, lambda i, j: i - j < window or j < n_sinks)


def slow_strided(t_q, t_k, stride):
    return table(t_q, t_k, lambda i, j: i - j < stride or (i - j) % stride == 0)


def slow_chunked(q, k, v, window, block=None):
    """One query at a time: softmax over the keys of its window."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    rows = []
    for i in range(t_q):
        end = i + t_k - t_q + 1
        near = slice(max(0, end - window), end)
        scores = (k[..., near, :] * q[..., i, None, :]).sum(-1) / math.sqrt(q.shape[-1])
        weights = torch.softmax(scores, dim=-1)
        rows.append((weights[..., None] * v[..., near, :]).sum(-2))
    return torch.stack(rows, dim=-2)


def slow_features(x):
    return F.elu(x) + 1  # exact enough in float64, down to −30


def slow_linear(q, k, v, causal):
    """Every weight by itself, as φ(q)·φ(k), and the average of the values by it."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    rows = []
    for i in range(t_q):
        seen = i + t_k - t_q + 1 if causal else t_k
        weights = [
            (slow_features(q[..., i, :]) * slow_features(k[..., j, :])).sum(-1)
            for j in range(seen)
        ]
        total = sum(weights)
        rows.append(sum(w[..., None] * v[..., j, :] for j, w in enumerate(weights)))
        rows[-1] = rows[-1] / total[..., None]
    return torch.stack(rows, dim=-2)


# Masks --------------------------------------------------------------------------------


def same_masks(answer, case, oracle, sizes, *settings):
    for t_q, t_k in sizes:
        for more in settings:
            actual = case.call(answer, t_q, t_k, *more)
            what = f"the mask for {(t_q, t_k, *more)}"
            case.equal(actual, oracle(t_q, t_k, *more), what)


def refuses(answer, case, *args, mentions, because):
    case.raises(ValueError, answer, *args, mentions=mentions, because=because)


def too_many_queries(answer, case, *settings):
    for t_q, t_k in ((7, 5), (6, 5)):
        because = f"{t_q} queries and {t_k} keys"
        refuses(answer, case, t_q, t_k, *settings, mentions=(t_q, t_k), because=because)


@sliding_window_mask.requires(
    "a query sees its own position and the nearest before it, `window` in all",
    "Draw it for five queries and five keys with a window of 2. How many cells of the "
    "last row are True, and which?",
)
def _(answer, case):
    same_masks(answer, case, slow_window, ((5, 5), (6, 6)), (2,), (3,))


@sliding_window_mask.requires(
    "a window of 1 is each position alone, and one as long as the text is the causal mask",
)
def _(answer, case):
    same_masks(answer, case, slow_window, ((5, 5), (4, 4)), (1,), (5,), (9,))


@sliding_window_mask.requires(
    "with fewer queries than keys, the queries are the last positions",
    "As in lesson 02: query 0 stands at position t_k − t_q.",
)
def _(answer, case):
    same_masks(answer, case, slow_window, SIZES, (1,), (2,), (4,), (20,))


@sliding_window_mask.requires(
    "thousands of positions work too",
    "Positions are whole numbers, kept as int64: torch's own `arange`. No length is built in.",
)
def _(answer, case):
    same_masks(answer, case, slow_window, ((3, 2300), (1, 131)), (5,), (300,))


@sliding_window_mask.requires(
    "a window below 1, and more queries than keys, are a ValueError that names them",
    "Say what is wrong before you compute anything.",
)
def _(answer, case):
    for window in (0, -3, -1):
        because = f"A window of {window}"
        for sizes in ((4, 6), (5, 5), (1, 1)):
            refuses(answer, case, *sizes, window, mentions=(window,), because=because)
    too_many_queries(answer, case, 2)


@sink_mask.requires(
    "besides its window a query sees the first `n_sinks` positions",
    "Two conditions, joined by “or”: near enough, or early enough.",
)
def _(answer, case):
    same_masks(answer, case, slow_sinks, ((7, 7), (8, 8)), (2, 1), (2, 3), (3, 2))


@sink_mask.requires(
    "no query looks ahead, at a sink neither",
    "With four sinks, what may query 0 see? There may be more sinks than positions.",
)
def _(answer, case):
    same_masks(answer, case, slow_sinks, ((5, 5), (3, 3)), (1, 4), (2, 3), (2, 9))


@sink_mask.requires(
    "without sinks it is the sliding window, and with all it is the causal mask"
)
def _(answer, case):
    same_masks(answer, case, slow_sinks, ((6, 6), (4, 4)), (2, 0), (3, 6), (9, 2))


@sink_mask.requires(
    "with fewer queries than keys, the queries are the last positions, and the sinks the "
    "first of all",
    "The sinks are the first columns, whoever asks.",
)
def _(answer, case):
    same_masks(answer, case, slow_sinks, SIZES, (2, 1), (1, 3), (3, 0), (4, 20))


@sink_mask.requires(
    "thousands of positions work too",
    "Positions are whole numbers, kept as int64: torch's own `arange`. No length is built in.",
)
def _(answer, case):
    same_masks(answer, case, slow_sinks, ((3, 2300), (1, 131)), (5, 3), (300, 70))


@sink_mask.requires(
    "a window below 1, negative sinks, and more queries than keys are a ValueError that "
    "names them",
    "0 sinks are allowed, a window of 0 is not.",
)
def _(answer, case):
    for window in (0, -3, -1):
        because = f"A window of {window}"
        for more in ((4, 6, window, 2), (5, 5, window, 0), (1, 1, window, 1)):
            refuses(answer, case, *more, mentions=(window,), because=because)
    for n_sinks in (-2, -1):
        because = f"{n_sinks} sinks"
        for more in ((4, 6, 3), (5, 5, 9), (1, 1, 1)):
            refuses(answer, case, *more, n_sinks, mentions=(n_sinks,), because=because)
    too_many_queries(answer, case, 2, 1)


@strided_mask.requires(
    "a query sees the nearest `stride` positions, and all that are a whole number of "
    "strides back",
    "Write down how far back each key is, for one query. Which of these numbers are "
    "below the stride, which are divisible by it?",
)
def _(answer, case):
    same_masks(answer, case, slow_strided, ((9, 9), (11, 11)), (3,), (4,))


@strided_mask.requires(
    "a stride of 1 or 2 hides nothing but the future, and so does one as long as the text",
)
def _(answer, case):
    same_masks(answer, case, slow_strided, ((6, 6), (7, 7)), (1,), (2,), (7,), (20,))


@strided_mask.requires(
    "with fewer queries than keys, the queries are the last positions",
    "The stride is counted back from the query, wherever it stands.",
)
def _(answer, case):
    sizes = (*SIZES, (4, 13), (2, 12))
    same_masks(answer, case, slow_strided, sizes, (1,), (3,), (4,), (5,))


@strided_mask.requires(
    "thousands of positions work too",
    "Positions are whole numbers, kept as int64: torch's own `arange`. No length is built in.",
)
def _(answer, case):
    same_masks(answer, case, slow_strided, ((3, 2300), (1, 131)), (7,), (60,))


@strided_mask.requires(
    "a stride below 1, and more queries than keys, are a ValueError that names them",
    "A remainder modulo 0 is an error of another kind: look first.",
)
def _(answer, case):
    for stride in (0, -2, -1):
        because = f"A stride of {stride}"
        for sizes in ((4, 6), (5, 5), (1, 1)):
            refuses(answer, case, *sizes, stride, mentions=(stride,), because=because)
    too_many_queries(answer, case, 2)


def back(t_q, t_k, offset=None):
    """How many steps each key lies behind each query."""
    offset = t_k - t_q if offset is None else offset
    return offset + torch.arange(t_q)[:, None] - torch.arange(t_k)


def near(t_q, t_k, window):
    steps = back(t_q, t_k)
    return (steps >= 0) & (steps < window)


# Attention in blocks ------------------------------------------------------------------


def heads(*lead, t_q, t_k, d=6, d_v=5, seed=0, dtype=torch.float32):
    return (
        probe(*lead, t_q, d, seed=seed, dtype=dtype),
        probe(*lead, t_k, d, seed=seed + 1, dtype=dtype),
        probe(*lead, t_k, d_v, seed=seed + 2, dtype=dtype),
    )


def grows_linearly(case, f, *args, what, asking=(1,)):
    """Four times the length is about four times the work, and not sixteen.

    asking: one in so many positions has a query, the last ones. Work that grows too
    fast over short texts is counted over long ones: pieces of 128, each a small table,
    are all of a short text.
    """

    def growth(one_in, n):
        short_, long_ = (
            work(f, *heads(t_q=t_k // one_in, t_k=t_k, seed=3), *args)
            for t_k in (n, 4 * n)
        )
        return long_ / short_

    for one_in in asking:
        for n in (96 // one_in, 512):
            grown = growth(one_in, n)
            if grown < 5:
                break
        queries = f", the last {n // one_in} and {4 * n // one_in} of them asking,"
        case.true(
            grown < 5,
            f"From {n} to {4 * n} positions{queries if one_in > 1 else ''} the work grows "
            f"{grown:.1f}-fold, not 4-fold (numbers written and operations in matrix "
            f"products, counted). {what}",
        )


@chunked_attention.requires(
    "each query gets attention over its window, whatever the block size",
    "Take one block of queries. Which is the first key that its first query sees, "
    "which is the last key that its last query sees? Between them, who sees what is "
    "your sliding window again. For the first block: a slice that begins at a negative "
    "number counts from the end.",
)
def _(answer, case):
    x = heads(t_q=8, t_k=8)
    for window, block in ((3, 4), (4, 2), (2, 8), (3, 1)):
        case.agrees(answer, slow_chunked, *x, window, block)


@chunked_attention.requires(
    "the window may be longer than a block, or than the text, and a block too",
    "Beyond the start of the text there are no keys: a slice that begins at a negative "
    "number counts from the end. At the end of the text a block can be shorter, and so "
    "is its mask.",
)
def _(answer, case):
    x = heads(t_q=9, t_k=9, seed=3)
    sizes = ((7, 3), (8, 2), (20, 4), (3, 20), (20, 20), (1, 3), (1000, 5), (2, 1000))
    for window, block in sizes:
        case.agrees(answer, slow_chunked, *x, window, block)


@chunked_attention.requires(
    "a text that is no multiple of the block keeps its last queries",
    "The last block may be smaller.",
)
def _(answer, case):
    for length in (7, 10, 11, 1):
        x = heads(t_q=length, t_k=length, seed=length)
        case.agrees(answer, slow_chunked, *x, 3, 4)


@chunked_attention.requires(
    "batches and heads in front are each treated by themselves",
    "Count dimensions from the end.",
)
def _(answer, case):
    case.agrees(answer, slow_chunked, *heads(3, t_q=7, t_k=7, seed=5), 3, 2)
    x = heads(2, 3, t_q=9, t_k=9, seed=6)
    case.agrees(answer, slow_chunked, *x, window=4, block=3)


@chunked_attention.requires(
    "with fewer queries than keys, the queries are the last positions",
    "Query 0 stands at position T_k − T_q.",
)
def _(answer, case):
    for t_q, t_k in ((3, 8), (1, 6), (5, 7)):
        x = heads(2, t_q=t_q, t_k=t_k, seed=t_q)
        for window, block in ((3, 2), (1, 4), (12, 2)):
            case.agrees(answer, slow_chunked, *x, window, block)
    case.agrees(answer, slow_chunked, *heads(2, 3, t_q=4, t_k=9, seed=4), 3, 2)


@chunked_attention.requires(
    "hundreds of positions, a longer window and wider heads work too",
    "No size is built in, and positions are whole numbers, kept as int64.",
)
def _(answer, case):
    x = heads(t_q=290, t_k=301, d=20, d_v=17, seed=12)
    case.agrees(answer, slow_chunked, *x, 70, 33)


@chunked_attention.requires("gradients reach queries, keys and values")
def _(answer, case):
    x = heads(2, t_q=5, t_k=7, seed=7)
    case.gradients_agree(answer, slow_chunked, *x, 3, 2)


@chunked_attention.requires(
    "scores of ±1,000, other dtypes, and memory that is not contiguous work too"
)
def _(answer, case):
    q, k, v = heads(2, t_q=7, t_k=7, seed=8)
    case.agrees(answer, slow_chunked, 30 * q, 30 * k, v, 3, 2)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        x = heads(2, t_q=7, t_k=7, seed=9, dtype=dtype)
        case.agrees(answer, slow_chunked, *x, 3, 2)
    case.agrees(answer, slow_chunked, strided(q), strided(k), strided(v), 3, 2)


@chunked_attention.requires(
    "scores far below 0 are still larger than what is hidden",
    "A hidden score is −inf, not some number that seems small.",
)
def _(answer, case):
    q = probe(7, 6, seed=13, shift=100)
    k, v = probe(7, 6, seed=14, shift=-100), probe(7, 5, seed=15)
    case.agrees(answer, slow_chunked, q, k, v, 3, 2)


@chunked_attention.requires(
    "time and memory grow in step with the length",
    "Which keys does a block hand to attention? Neither all of them nor all before it.",
)
def _(answer, case):
    grows_linearly(
        case,
        answer,
        8,
        16,
        asking=(1, 2),
        what="A window of 8 should cost as much for every query: compute, and mask, only "
        "keys that some query of the block may see.",
    )


@chunked_attention.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, *heads(2, t_q=5, t_k=7), 3, 2)


@chunked_attention.requires(
    "a window or block below 1, and more queries than keys, are a ValueError that names "
    "them",
)
def _(answer, case):
    x = heads(t_q=5, t_k=7)
    for y in (x, heads(t_q=1, t_k=1)):
        for window in (0, -2, -1, -9):
            because = f"A window of {window}"
            refuses(answer, case, *y, window, 4, mentions=(window,), because=because)
        for block in (0, -4, -1):
            because = f"A block of {block}"
            refuses(answer, case, *y, 3, block, mentions=(block,), because=because)
    for t_q, t_k in ((7, 5), (6, 5)):
        x, because = heads(t_q=t_q, t_k=t_k), f"{t_q} queries and {t_k} keys"
        refuses(answer, case, *x, 3, 4, mentions=(t_q, t_k), because=because)


def softmax_attention(q, k, v, mask, divisor=None):
    divisor = math.sqrt(q.shape[-1]) if divisor is None else divisor
    scores = (q @ k.mT / divisor).masked_fill(~mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1).masked_fill(~mask, 0)
    return weights @ v


# Features -----------------------------------------------------------------------------


@feature_map.requires(
    "it is x + 1 above 0 and e^x below",
    "Two formulas, one condition: `torch.where`.",
)
def _(answer, case):
    case.agrees(answer, slow_features, probe(4, 5))
    case.agrees(answer, slow_features, torch.tensor([-3.0, -1.0, 0.0, 1.0, 2.0]))


@feature_map.requires(
    "every shape and dtype works, and the dtype stays",
)
def _(answer, case):
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        case.agrees(answer, slow_features, probe(2, 3, 5, seed=1, dtype=dtype))
    case.agrees(answer, slow_features, strided(probe(3, 4, seed=2, scale=2)))
    case.agrees(answer, slow_features, probe(7, seed=3))
    for alone in (-2.0, 2.0):
        case.agrees(answer, slow_features, torch.tensor(alone))


@feature_map.requires(
    "numbers far below 0 give a small feature, not 0",
    "What is 1 + (−1 + 0.00000001) in float32? Below 0 there is a formula without a 1.",
)
def _(answer, case):
    for dtype, low, high in (
        (torch.float32, -80, -9),
        (torch.float32, -86, -80),
        (torch.float64, -700, -30),
        (torch.bfloat16, -80, -6),
        (torch.float16, -9, -6),
    ):
        x = torch.linspace(low, high, 30, dtype=torch.float64).to(dtype)
        case.agrees(answer, torch.exp, x, relative=True)


@feature_map.requires("its gradient is right")
def _(answer, case):
    case.gradients_agree(answer, slow_features, probe(3, 5, seed=4, scale=2))


@feature_map.requires(
    "its gradient is finite for large numbers too",
    "`torch.where` computes both sides everywhere. What is e^200, or e^12 in float16, and "
    "what is infinity times 0 in the backward pass?",
)
def _(answer, case):
    case.gradients_agree(answer, slow_features, torch.tensor([-20.0, 90.0, 200.0, 1e4]))
    x = torch.tensor([-3.0, 12.0, 90.0, 200.0], dtype=torch.float16)
    case.gradients_agree(answer, slow_features, x)


@feature_map.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, probe(3, 5))


# Linear attention ---------------------------------------------------------------------


def table_of_slow_weights(q, k, v, causal):
    """`slow_linear` for long texts, by a table."""
    w = slow_features(q) @ slow_features(k).mT
    w = w.tril(k.shape[-2] - q.shape[-2]) if causal else w
    return w @ v / w.sum(-1, keepdim=True)


def without_mask(answer):
    return lambda q, k, v: answer(q, k, v, False)


def causally(answer):
    return lambda q, k, v: answer(q, k, v, True)


def averages(case, run, n=4):
    """Weights sum to 1, however small they are: nothing is added to the divisor."""
    recorded, found = len(case.recording), []
    with case.unrecorded():
        for low, dtype in ((0, torch.float32), (8, torch.float32), (20, torch.float64)):
            q, k, v = heads(t_q=n, t_k=n, seed=17, dtype=dtype)
            found.append(case.call(run, q - low, k - low, torch.ones_like(v)))
        if not all(isinstance(x, torch.Tensor) and x.shape == v.shape for x in found):
            return
        del case.recording[
            recorded:
        ]  # what is added may be of any size: the mistake is one
    usual, *small = (x.detach().double() for x in found)
    least = min(x.min().item() for x in small)
    case.true(
        not (bool(((usual - 1).abs() < 0.05).all()) and 0 <= least < 0.99),
        "With values that are all 1 every average is 1. Yours is, for features near 1; "
        f"for features near e^−8 and e^−20 it falls to {least:.3g}.",
    )


def small_weights(case, run, oracle):
    """The averages where all features are small, and small ones far apart."""
    averages(case, run)
    for low, dtype, tolerance in ((8, torch.float32, 0.01), (20, torch.float64, 1e-5)):
        q, k, v = heads(t_q=4, t_k=4, seed=17, dtype=dtype)
        x = q - low, k - low, v
        # elu(x) + 1 is right to some digits here
        truth = oracle(*(y.double() for y in x))
        case.close(case.call(run, *x), truth, like=v, tolerance=tolerance)


def forgets_nothing(case, run):
    """No key counts the less the farther it lies back."""
    recorded, n = len(case.recording), 4
    q, k, _ = heads(t_q=n, t_k=n, seed=5)
    with case.unrecorded():
        weights = case.call(run, q, k, torch.eye(n))
        if not isinstance(weights, torch.Tensor) or weights.shape != (n, n):
            return
        del case.recording[recorded:]  # whatever is left of it: the mistake is one
    ratio = weights.detach().double() / (slow_features(q) @ slow_features(k).mT)
    left = ratio.diagonal(-1) / ratio.diagonal()[1:]
    farther = ratio.diagonal(-2) / ratio.diagonal(-1)[1:]
    rate = left.mean().item()
    same = (torch.cat([left, farther]) - rate).abs().max() < 1e-3
    case.true(
        not (same and 0 < rate < 0.998),
        f"With every position that it lies back, a key counts {rate:.3g} times as much.",
    )


def hides_what_comes_later(case, run, q, k, v):
    """No output depends on a key or value after its query."""
    before = case.call(run, q, k, v)
    if not isinstance(before, torch.Tensor) or before.shape != v.shape:
        return
    for j in range(1, len(k)):
        other_k, other_v = k.clone(), v.clone()
        other_k[j], other_v[j] = k[j] + 1, v[j] + 3
        after = case.call(run, q, other_k, other_v)
        moved = ((after - before)[:j].abs() > 1e-3).any(dim=-1)
        first = int(moved.int().argmax()) if bool(moved.any()) else None
        case.true(
            first is None,
            f"The result of query {first} changes with key and value {j}, which come "
            "later.",
        )


@linear_attention.requires(
    "without a mask, the values are averaged with weights in proportion to φ(q)·φ(k)",
    "For one query, write the sum of φ(q)·φ(k_j)·v_j over j. What can be taken out of "
    "the sum? Which other sum must it be divided by, and does that one have a last "
    "dimension to divide along?",
)
def _(answer, case):
    averages(case, without_mask(answer))
    case.agrees(answer, slow_linear, *heads(t_q=4, t_k=5), False)
    case.agrees(answer, slow_linear, *heads(t_q=3, t_k=8, d=2, d_v=7, seed=3), False)
    case.agrees(answer, slow_linear, *heads(t_q=1, t_k=1, d=9, d_v=2, seed=4), False)


@linear_attention.requires(
    "without a mask there may be more queries than keys",
    "Only with `causal=True` are the queries the last of the keys' positions.",
)
def _(answer, case):
    case.agrees(answer, slow_linear, *heads(t_q=6, t_k=3, d=4, d_v=2, seed=18), False)


@linear_attention.requires(
    "causal, no query sees a later key, in neither of the two sums",
    "The sums up to each position, its own included, are running totals. Which function "
    "of torch keeps running totals?",
)
def _(answer, case):
    forgets_nothing(case, causally(answer))
    hides_what_comes_later(case, causally(answer), *heads(t_q=5, t_k=5, seed=5))
    case.agrees(answer, slow_linear, *heads(t_q=4, t_k=4, seed=5), True)
    case.agrees(answer, slow_linear, *heads(t_q=7, t_k=7, d=3, d_v=4, seed=6), True)
    case.agrees(answer, slow_linear, *heads(t_q=1, t_k=1, seed=7), True)


@linear_attention.requires(
    "batches and heads in front are each treated by themselves",
    "Count dimensions from the end.",
)
def _(answer, case):
    for causal in (False, True):
        case.agrees(answer, slow_linear, *heads(3, t_q=4, t_k=4, seed=8), causal=causal)
        case.agrees(
            answer, slow_linear, *heads(2, 3, t_q=5, t_k=5, seed=9), causal=causal
        )


@linear_attention.requires(
    "with fewer queries than keys, the queries are the last positions",
    "Query 0 has the running total up to position T_k − T_q.",
)
def _(answer, case):
    for t_q, t_k in ((2, 6), (1, 5), (3, 4)):
        case.agrees(answer, slow_linear, *heads(2, t_q=t_q, t_k=t_k, seed=t_k), True)
    for causal in (True, False):
        x = heads(2, 3, t_q=3, t_k=5, seed=14)
        case.agrees(answer, slow_linear, *x, causal)


@linear_attention.requires("hundreds of positions and wider heads work too")
def _(answer, case):
    x = heads(t_q=190, t_k=201, d=20, d_v=17, seed=15)
    for causal in (True, False):
        case.agrees(answer, table_of_slow_weights, *x, causal)


@linear_attention.requires(
    "a later key is not in the sums at all, however large it is",
    "Add up what a query sees. To take the rest away from the sum of all leaves rounding "
    "errors of the size of that sum.",
)
def _(answer, case):
    q, k, v = heads(t_q=5, t_k=5, seed=16)
    k[-1] = 1e7
    case.agrees(answer, slow_linear, q, k, v, True)


@linear_attention.requires(
    "however small the weights are, they are divided by their sum and nothing else",
    "Is something added to the divisor, or is there a least value for it? φ is above 0 "
    "everywhere, and so is the sum.",
)
def _(answer, case):
    for causal, run in ((False, without_mask(answer)), (True, causally(answer))):
        small_weights(case, run, lambda *x, causal=causal: slow_linear(*x, causal))


@linear_attention.requires("gradients reach queries, keys and values")
def _(answer, case):
    case.gradients_agree(answer, slow_linear, *heads(2, t_q=3, t_k=5, seed=10), False)


@linear_attention.requires("gradients reach them through the running totals too")
def _(answer, case):
    case.gradients_agree(answer, slow_linear, *heads(2, t_q=3, t_k=5, seed=11), True)


@linear_attention.requires(
    "large numbers, other dtypes, and memory that is not contiguous work too"
)
def _(answer, case):
    q, k, v = heads(2, t_q=4, t_k=6, seed=12)
    for causal in (False, True):
        case.agrees(answer, slow_linear, 100 * q, 100 * k, v, causal)
        case.agrees(answer, slow_linear, strided(q), strided(k), strided(v), causal)
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            x = heads(2, t_q=4, t_k=6, seed=13, dtype=dtype)
            case.agrees(answer, slow_linear, *x, causal)


@linear_attention.requires(
    "time and memory grow in step with the length",
    "If a T_q × T_k table of weights appears anywhere, the order of the products is the "
    "wrong one.",
)
def _(answer, case):
    for causal in (False, True):
        grows_linearly(
            case,
            answer,
            causal,
            asking=(1, 2),
            what="Sum φ(k)ᵀv over the keys first: a table of d × d_v numbers, however "
            "long the text.",
        )


@linear_attention.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, *heads(2, t_q=5, t_k=7), True)
    case.any_device(answer, *heads(2, t_q=5, t_k=7), False)


@linear_attention.requires(
    "causal with more queries than keys is a ValueError that names both",
    "Without a mask it is allowed.",
)
def _(answer, case):
    for t_q, t_k in ((7, 5), (6, 5)):
        x, because = heads(t_q=t_q, t_k=t_k), f"{t_q} queries and {t_k} keys, causal"
        refuses(answer, case, *x, True, mentions=(t_q, t_k), because=because)


# One step -----------------------------------------------------------------------------


def steps(answer, case, q, k, v):
    """Every position through `answer` in turn: outputs and states."""
    state, outputs, states = None, [], []
    for i in range(q.shape[-2]):
        result = case.call(answer, state, q[..., i, :], k[..., i, :], v[..., i, :])
        case.is_tuple(result, 2, "what a step returns, the output and the new state,")
        output, state = result
        case.is_tensor(output, f"the output of step {i}")
        case.is_tuple(state, 2, f"the state after step {i}")
        for name, part in zip("sz", state, strict=True):
            case.is_tensor(part, f"`{name}` of the state after step {i}")
        outputs.append(output)
        states.append(state)
    return outputs, states


def compare_steps(answer, case, *x):
    """Outputs against the table of weights, states against their sums."""
    _, k, v = x
    truth = slow_linear(*(y.double() for y in x), True)
    outputs, states = steps(answer, case, *x)
    features_, old = slow_features(k.double()), None
    for i, (output, state) in enumerate(zip(outputs, states, strict=True)):
        seen, values = features_[..., : i + 1, :], v.double()[..., : i + 1, :]
        new = seen[..., -1, :, None] * values[..., -1, None, :], seen[..., -1, :]
        due = seen.mT @ values, seen.sum(-2)
        for part, name in enumerate("sz"):
            if old is not None:
                nothing_forgotten(old[part], new[part], state[part], f"`{name}`", i)
            case.close(state[part], due[part], f"`{name}` after step {i}", like=v)
        case.close(output, truth[..., i, :], f"the output of step {i}", like=v)
        old = state


def nothing_forgotten(old, new, found, what, i):
    """`found` is not some other sum of the old state and the new position."""
    if not old.shape == new.shape == found.shape:
        return
    both = torch.stack([old.flatten(), new.flatten()], dim=-1).double()
    parts = torch.linalg.lstsq(both, found.double().flatten()[:, None]).solution
    fits = (both @ parts - found.double().flatten()[:, None]).abs().max() < 1e-4
    if fits and (parts - 1).abs().max() > 1e-3:
        kept, added = parts.flatten().tolist()
        raise Unmet(
            f"{what} after step {i} is {kept:.3g} times the old one and {added:.3g} "
            "times what is new. Both count in full, 1 and 1: it is a sum."
        )


@linear_attention_step.requires(
    "the first step starts from nothing, and its output is its own value",
    "With `state` None, both sums hold one position. What is left of w·v / w?",
)
def _(answer, case):
    recorded = len(case.recording)
    with case.unrecorded():
        steps(answer, case, *heads(t_q=1, t_k=1))  # does it return what is asked for?
        del case.recording[recorded:]
    averages(case, in_turn(answer), 1)
    compare_steps(answer, case, *heads(t_q=1, t_k=1))
    compare_steps(answer, case, *heads(t_q=1, t_k=1, d=2, d_v=4, seed=1))


@linear_attention_step.requires(
    "step by step it gives what causal linear attention gives at once",
    "First add the new position to both sums, then read them with the query.",
)
def _(answer, case):
    forgets_nothing(case, in_turn(answer))
    compare_steps(answer, case, *heads(t_q=4, t_k=4, seed=2))
    compare_steps(answer, case, *heads(t_q=5, t_k=5, d=3, d_v=7, seed=5))


@linear_attention_step.requires(
    "batches and heads in front are each treated by themselves",
    "Count dimensions from the end; `torch.outer` and `torch.dot` know vectors alone. A "
    "divisor without its last dimension of 1 divides along another one.",
)
def _(answer, case):
    compare_steps(answer, case, *heads(2, t_q=3, t_k=3, seed=6))
    compare_steps(answer, case, *heads(2, 3, t_q=3, t_k=3, d=3, d_v=7, seed=7))


@linear_attention_step.requires(
    "the same state gives the same result again, and two texts do not mix",
    "All that is remembered is in the state; nothing is kept elsewhere, or changed in "
    "place.",
)
def _(answer, case):
    one, other = heads(t_q=3, t_k=3, seed=8), heads(2, t_q=3, t_k=3, d=4, seed=9)
    _, states = steps(answer, case, *one)
    compare_steps(answer, case, *other)
    q, k, v = (x[..., 1, :] for x in one)
    output, _ = case.call(answer, states[0], q, k, v)
    truth = slow_linear(*(x.double() for x in one), True)[1]
    case.close(
        output, truth, "the output of step 1 from the state after step 0", like=v
    )


@linear_attention_step.requires("512 steps stay within 1e-5 of the sums in float64")
def _(answer, case):
    def all_steps(q, k, v):
        state, outputs = None, []
        for now in zip(q, k, v, strict=True):
            output, state = answer(state, *now)
            outputs.append(output)
        return torch.stack(outputs), *state

    q, k, v = heads(t_q=512, t_k=512, seed=10)
    outputs, s, z = case.call(all_steps, q, k, v)
    w = (slow_features(q.double()) @ slow_features(k.double()).mT).tril()
    truth = w @ v.double() / w.sum(-1, keepdim=True)
    case.close(outputs, truth, "the outputs", like=v, tolerance=1e-5)
    case.true(s.numel() + z.numel() == 6 * 5 + 6, "The state grows with the steps.")


def in_turn(answer):
    """All steps through `answer` as one function, the outputs joined along time."""

    def all_steps(q, k, v):
        state, outputs = None, []
        for i in range(q.shape[-2]):
            output, state = answer(state, q[..., i, :], k[..., i, :], v[..., i, :])
            outputs.append(output)
        return torch.stack(outputs, dim=-2)

    return all_steps


def causal_weights(q, k, v):
    return slow_linear(q, k, v, True)


@linear_attention_step.requires(
    "gradients flow back through one step, to the old state too"
)
def _(answer, case):
    def one_step(s, z, q, k, v):
        output, state = answer((s, z), q, k, v)
        return output, *state

    def by_einsum(s, z, q, k, v):
        q, k = slow_features(q), slow_features(k)
        s, z = s + torch.einsum("bi,bj->bij", k, v), z + k
        below = torch.einsum("bi,bi->b", q, z)[:, None]
        return torch.einsum("bi,bij->bj", q, s) / below, s, z

    q, k, v = (x[:, 0] for x in heads(2, t_q=1, t_k=1, seed=14))
    state = probe(2, 6, 5, seed=18), probe(2, 6, seed=19).abs()
    case.gradients_agree(one_step, by_einsum, *state, q, k, v)


@linear_attention_step.requires(
    "gradients flow back through many steps, and other dtypes work"
)
def _(answer, case):
    run = in_turn(answer)
    case.gradients_agree(run, causal_weights, *heads(2, t_q=4, t_k=4, seed=11))
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        case.agrees(run, causal_weights, *heads(2, t_q=3, t_k=3, seed=12, dtype=dtype))


@linear_attention_step.requires(
    "large features and small ones are averaged alike",
    "Is something added to the divisor, or is there a least value for it? φ is above 0 "
    "everywhere, and so is the sum.",
)
def _(answer, case):
    run, (q, k, v) = in_turn(answer), heads(2, t_q=4, t_k=4, seed=13)
    case.agrees(run, causal_weights, 100 + 30 * q, 100 + 30 * k, v)
    small_weights(case, run, causal_weights)


@linear_attention_step.requires("it creates nothing on another device")
def _(answer, case):
    def first_step(q, k, v):
        return everything(answer(None, q, k, v))

    def next_step(state, q, k, v):
        return everything(answer(state, q, k, v))

    def everything(result):
        output, (s, z) = result
        for x in (s, z):
            if x.device != output.device:
                raise Explained(f"The new state is on {x.device}, the output is not.")
        return output

    q, k, v = (x[:, 0] for x in heads(2, t_q=1, t_k=1))
    case.any_device(first_step, q, k, v)
    case.any_device(next_step, (probe(2, 6, 5), probe(2, 6).abs()), q, k, v)


# What must fit together ---------------------------------------------------------------

PARTS = {
    "attention": "attention",
    "split_heads": "multi_head",
    "merge_heads": "multi_head",
    "repeat_kv": "multi_head",
    "rope": "positions",
    "TransformerConfig": "forward_pass",
    "Block": "forward_pass",
    "sliding_window_mask": "long_context",
    "sink_mask": "long_context",
    "strided_mask": "long_context",
    "chunked_attention": "long_context",
    "linear_attention": "long_context",
    "linear_attention_step": "long_context",
}
long_context_in_a_decoder = IntegrationCheck(
    "long_context_in_a_decoder", lesson="long_context", parts=PARTS
)
T, WINDOW = 11, 4
SHAPE = {
    "vocab_size": 13,
    "d_model": 10,
    "n_layers": 1,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_head": 6,
    "d_ff": 14,
    "max_len": 40,
    "rope_base": 100.0,
}
MATRICES = {
    "attention.w_q": (24, 10),
    "attention.w_k": (12, 10),
    "attention.w_v": (12, 10),
    "attention.w_o": (10, 24),
    "feed_forward.w_1": (14, 10),
    "feed_forward.w_3": (14, 10),
    "feed_forward.w_2": (10, 14),
}
WEIGHTS = {
    name: probe(*size, seed=40 + i, scale=0.5)
    for i, (name, size) in enumerate(MATRICES.items())
} | {name: probe(10, seed=60, shift=1, scale=0.1) for name in ("norm_1", "norm_2")}
MASKS = {  # by name: what is asked for, and what is right
    "sliding_window_mask": ((WINDOW,), slow_window),
    "sink_mask": ((WINDOW, 2), slow_sinks),
    "strided_mask": ((3,), slow_strided),
}


def turned(x, base):
    """RoPE at positions 0, 1, … by complex multiplication."""
    n, d = x.shape[-2:]
    angles = torch.arange(n).double()[:, None] * base ** (
        -torch.arange(0, d, 2).double() / d
    )
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(
        pairs * torch.polar(torch.ones_like(angles), angles)
    ).flatten(-2)


def turned_heads(x, weights):
    """Queries, keys and values `(B, H, T, d_head)`, keys repeated, in float64."""
    q, k, v = (
        (x.double() @ weights[f"attention.{name}"].double().T)
        .unflatten(-1, (-1, SHAPE["d_head"]))
        .transpose(1, 2)
        for name in ("w_q", "w_k", "w_v")
    )
    q, k = turned(q, SHAPE["rope_base"]), turned(k, SHAPE["rope_base"])
    kv_of = torch.tensor([0, 0, 1, 1])
    return q, k[:, kv_of], v[:, kv_of]


def normed(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def block_by_hand(x, mask, weights):
    """A block of style "llama", head by head in float64."""
    x = x.double()
    q, k, v = turned_heads(normed(x, weights["norm_1"]), weights)
    mixed = softmax_attention(q, k, v, mask).transpose(1, 2).flatten(2)
    x = x + mixed @ weights["attention.w_o"].double().T
    y = normed(x, weights["norm_2"])
    w_1, w_2, w_3 = (weights[f"feed_forward.w_{i}"].double().T for i in (1, 2, 3))
    return x + (F.silu(y @ w_1) * (y @ w_3)) @ w_2


def theirs(parts, case, x):
    """The same heads by the learner's parts, without a block."""
    q, k, v = (
        case.call(parts["split_heads"], x @ WEIGHTS[f"attention.{name}"].T, n)
        for name, n in (("w_q", 4), ("w_k", 2), ("w_v", 2))
    )
    positions = torch.arange(x.shape[1])
    q, k = (case.call(parts["rope"], y, positions, SHAPE["rope_base"]) for y in (q, k))
    k, v = (case.call(parts["repeat_kv"], y, 2) for y in (k, v))
    return q, k, v


@long_context_in_a_decoder.requires(
    "a block with RoPE under each of the masks gives what its formula gives",
    "Pass each mask to your `attention` alone, and compare with SDPA under the same "
    "mask. Then print it: rows are queries.",
)
def _(parts, case):
    block = parts["Block"](parts["TransformerConfig"](**SHAPE))
    case.load(block, **{name.replace(".", "__"): w for name, w in WEIGHTS.items()})
    x, positions = probe(2, T, 10, seed=70), torch.arange(T)
    for name, (settings, oracle) in MASKS.items():
        mask = case.call(parts[name], T, T, *settings)
        actual = case.call(block, x, mask, positions)
        expected = block_by_hand(x, oracle(T, T, *settings), WEIGHTS)
        case.close(actual, expected, f"the block under `{name}`", like=x)


@long_context_in_a_decoder.requires(
    "the last queries by themselves get what they get in the whole text",
    "A text that is read piece by piece asks with its last positions alone.",
)
def _(parts, case):
    q, k, v = (probe(2, 3, T, 6, seed=80 + i) for i in range(3))
    for name, (settings, oracle) in MASKS.items():
        whole = softmax_attention(q, k, v, oracle(T, T, *settings))
        for n in (1, 3):
            mask = case.call(parts[name], n, T, *settings)
            actual = case.call(parts["attention"], q[..., -n:, :], k, v, mask)
            what = f"the last {n} under `{name}`"
            case.close(actual, whole[..., -n:, :], what, like=q)


@long_context_in_a_decoder.requires(
    "attention in blocks fits between the heads of lesson 03, turned by RoPE",
    "Heads are (B, H, T, d_head), keys and values repeated for their group.",
)
def _(parts, case):
    x = probe(2, T, 10, seed=71)
    q, k, v = theirs(parts, case, x)
    out = case.call(parts["chunked_attention"], q, k, v, WINDOW, 3)
    out = case.call(parts["merge_heads"], out)
    right = softmax_attention(*turned_heads(x, WEIGHTS), slow_window(T, T, WINDOW))
    case.close(out, right.transpose(1, 2).flatten(2), "the merged heads", like=x)
    mask = case.call(parts["sliding_window_mask"], T, T, WINDOW)
    masked = case.call(parts["attention"], q, k, v, mask)
    case.close(masked, right, "attention under the mask", like=x)


@long_context_in_a_decoder.requires(
    "linear attention on the same heads is the same at once and step by step",
    "The step gets heads without a time: (B, H, d_head).",
)
def _(parts, case):
    x = probe(2, T, 10, seed=72)
    q, k, v = theirs(parts, case, x)
    right = slow_linear(*turned_heads(x, WEIGHTS), True)
    at_once = case.call(parts["linear_attention"], q, k, v, True)
    case.close(at_once, right, "linear attention at once", like=x)
    state = None
    for i in range(T):
        now = q[:, :, i], k[:, :, i], v[:, :, i]
        output, state = case.call(parts["linear_attention_step"], state, *now)
        case.close(output, right[:, :, i], f"linear attention, step {i}", like=x)
