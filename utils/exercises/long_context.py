"""Lesson 14: masks for long texts, attention in blocks, and linear attention."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from utils.check.exercise import Exercise, IntegrationCheck
from utils.cost import Cost, work
from utils.probe import probe, strided

sliding_window_mask = Exercise("sliding_window_mask", lesson="long_context")
sink_mask = Exercise("sink_mask", lesson="long_context")
strided_mask = Exercise("strided_mask", lesson="long_context")
chunked_attention = Exercise("chunked_attention", lesson="long_context")
feature_map = Exercise("feature_map", lesson="long_context")
linear_attention = Exercise("linear_attention", lesson="long_context")
linear_attention_step = Exercise("linear_attention_step", lesson="long_context")


# What is right, computed slowly -------------------------------------------------------


def table(t_q, t_k, may_look):
    """A mask cell by cell; the queries are the last of the positions."""
    rows = range(t_k - t_q, t_k)
    return torch.tensor([[j <= i and may_look(i, j) for j in range(t_k)] for i in rows])


def slow_window(t_q, t_k, window):
    return table(t_q, t_k, lambda i, j: i - j < window)


def slow_sinks(t_q, t_k, window, n_sinks):
    return table(t_q, t_k, lambda i, j: i - j < window or j < n_sinks)


def slow_strided(t_q, t_k, stride):
    return table(t_q, t_k, lambda i, j: i - j < stride or (i - j) % stride == 0)


def slow_attention(q, k, v, mask):
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def slow_chunked(q, k, v, window, block=None):
    return slow_attention(q, k, v, slow_window(q.shape[-2], k.shape[-2], window))


def slow_features(x):
    return F.elu(x) + 1  # exact enough in float64, down to −30


def slow_linear(q, k, v, causal=True):
    """All weights in a table, φ(q)·φ(k) divided by the sum of their row."""
    weights = slow_features(q) @ slow_features(k).mT
    weights = weights.tril(k.shape[-2] - q.shape[-2]) if causal else weights
    return weights / weights.sum(-1, keepdim=True) @ v


# Masks --------------------------------------------------------------------------------

MASKS = (  # exercise, oracle, settings (usual, for long texts, refused), sentence, hint
    (
        sliding_window_mask,
        slow_window,
        (((3,), (2,), (1,), (5,), (20,)), ((5,), (300,)), ((0,), (-3,), (-1,))),
        "a query sees its own position and the nearest before it, `window` in all",
        "Draw it for five queries and five keys with a window of 2. How many cells of "
        "the last row are True, and which?",
    ),
    (
        sink_mask,
        slow_sinks,
        (
            ((2, 3), (3, 1), (3, 2), (2, 0), (1, 4), (3, 6), (9, 2), (2, 9)),
            ((5, 3), (300, 70)),
            ((0, 2), (-3, 0), (-1, 1), (0, 0), (3, -2), (9, -1)),
        ),
        "besides its window a query sees the first `n_sinks` positions, and never ahead",
        "Two conditions, joined by “or”: near enough, or early enough. With four sinks, "
        "what may query 0 see?",
    ),
    (
        strided_mask,
        slow_strided,
        (((4,), (3,), (1,), (2,), (7,), (20,)), ((7,), (60,)), ((0,), (-2,), (-1,))),
        "a query sees the nearest `stride` positions, and all that are a whole number "
        "of strides back",
        "Write down how far back each key is, for one query. Which of these numbers are "
        "below the stride, which are divisible by it?",
    ),
)


def required(sentence="", hint=""):
    """Decorates `test(answer, case, oracle, settings)`, required of all three masks."""

    def add(test):
        for mask, oracle, settings, *own in MASKS:
            words = (sentence, hint) if sentence else own
            mask.requires(*words)(partial(test, oracle=oracle, settings=settings))

    return add


def same_masks(answer, case, oracle, sizes, settings):
    for t_q, t_k in sizes:
        for more in settings:
            actual = case.call(answer, t_q, t_k, *more)
            what = f"the mask for {(t_q, t_k, *more)}"
            case.equal(actual, oracle(t_q, t_k, *more), what)


@required()
def _(answer, case, oracle, settings):
    same_masks(answer, case, oracle, ((11, 11), (5, 5)), settings[0])


@required(
    "with fewer queries than keys, the queries are the last positions, of thousands too",
    "As in lesson 02: query 0 stands at position t_k − t_q. Positions are whole numbers, "
    "kept as int64, and count from the start of the text.",
)
def _(answer, case, oracle, settings):
    sizes = (2, 7), (4, 6), (1, 8), (9, 11), (4, 13), (1, 1)
    same_masks(answer, case, oracle, sizes, settings[0])
    same_masks(answer, case, oracle, ((3, 2300), (1, 131)), settings[1])


@required(
    "a size too small, and more queries than keys, are a ValueError that names them",
    "Say what is wrong before you compute anything.",
)
def _(answer, case, oracle, settings):
    sizes = (4, 6), (5, 5), (1, 1)
    calls = [((*n, *more), (min(more),)) for more in settings[2] for n in sizes]
    calls += [((n, 5, *settings[0][0]), (n, 5)) for n in (7, 6)]
    for args, named in calls:
        because = f"The mask for {args}"
        case.raises(ValueError, answer, *args, mentions=named, because=because)


# Attention in blocks ------------------------------------------------------------------


def heads(*lead, t_q, t_k, d=14, d_v=12, seed=0, dtype=torch.float32):
    sizes = (t_q, d), (t_k, d), (t_k, d_v)
    return tuple(
        probe(*lead, *size, seed=seed + i, dtype=dtype) for i, size in enumerate(sizes)
    )


def grows_linearly(case, f, *args, what):
    """Four times the length is about four times the work, and not sixteen.

    With a query for every key, and for every second one, the last ones. Work that grows
    too fast over short texts is counted over long ones: pieces of 128, each a small
    table, are all of a short text.
    """
    for one_in in (1, 2):
        for n in (96 // one_in, 256):
            sizes = [{"t_q": t_k // one_in, "t_k": t_k} for t_k in (n, 4 * n)]
            few, many = (work(f, *heads(**t, d=3, d_v=2), *args) for t in sizes)
            if many < 5 * few:
                break
        case.true(
            many < 5 * few,
            f"From {n} keys to {4 * n}{', for the last half of the queries,' * (one_in - 1)}"
            f" the work grows {many / few:.1f}-fold, not 4-fold (numbers written and "
            f"operations in matrix products, counted). {what}",
        )


def too_many_queries(case, answer, *settings):
    for n in (7, 6):
        x, because = heads(t_q=n, t_k=5), f"{n} queries and 5 keys"
        case.raises(ValueError, answer, *x, *settings, mentions=(n, 5), because=because)


@chunked_attention.requires(
    "each query gets attention over its window, whatever the sizes of block and text",
    "Take one block of queries. Which is the first key that its first query sees, "
    "which is the last key that its last query sees? Between them, who sees what is "
    "your sliding window again. Before the text there are no keys, and a slice that begins "
    "at a negative number counts from the end. The last block may be shorter.",
)
def _(answer, case):
    x = heads(t_q=10, t_k=10)
    for window, block in ((3, 5), (4, 2), (2, 10), (3, 1), (7, 5)):
        case.agrees(answer, slow_chunked, *x, window, block)
    for length in (9, 7, 11, 1):
        x = heads(t_q=length, t_k=length, seed=length)
        for sizes in ((3, 4), (7, 3), (20, 4), (3, 20), (1, 3), (1000, 5), (2, 1000)):
            case.agrees(answer, slow_chunked, *x, *sizes)


@chunked_attention.requires(
    "each batch row and head is treated by itself, and few queries are the last positions",
    "Count dimensions from the end. Query 0 stands at position T_k − T_q.",
)
def _(answer, case):
    case.agrees(answer, slow_chunked, *heads(3, t_q=7, t_k=7, seed=5), 4, 2)
    x = heads(2, 3, t_q=9, t_k=9, seed=6)
    case.agrees(answer, slow_chunked, *x, window=4, block=5)
    for lead, t_q, t_k in (((2,), 3, 8), ((2,), 1, 6), ((2,), 5, 7), ((2, 3), 4, 9)):
        x = heads(*lead, t_q=t_q, t_k=t_k, seed=t_q)
        for window, block in ((3, 2), (1, 4), (12, 2)):
            case.agrees(answer, slow_chunked, *x, window, block)


@chunked_attention.requires(
    "gradients, hundreds of positions, scores of ±1,000, other dtypes, and memory that is "
    "not contiguous work too",
    "No size is built in, and a hidden score is −inf, not some number that seems small.",
)
def _(answer, case):
    q, k, v = x = heads(2, t_q=5, t_k=7, seed=8)
    case.gradients_agree(answer, slow_chunked, *x, 3, 2)
    wide = heads(t_q=290, t_k=301, d=20, d_v=17, seed=12)
    case.agrees(answer, slow_chunked, *wide, 70, 33)
    case.agrees(answer, slow_chunked, 30 * q, 30 * k, v, 3, 2)
    case.agrees(answer, slow_chunked, 100 + q, k - 100, v, 3, 2)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        x = heads(2, t_q=7, t_k=7, seed=9, dtype=dtype)
        case.agrees(answer, slow_chunked, *x, 3, 2)
    case.agrees(answer, slow_chunked, strided(q), strided(k), strided(v), 3, 2)


@chunked_attention.requires(
    "time and memory grow in step with the length, and `block` queries are treated at "
    "once",
    "Which keys does a block hand to attention? Neither all of them nor all before it.",
)
def _(answer, case):
    what = "Compute, and mask, only keys that some query of the block may see."
    grows_linearly(case, answer, 8, 16, what=what)
    costs = []
    for block in (3, 64):
        with Cost() as cost:
            answer(*heads(t_q=128, t_k=128, seed=3), 8, block)
        costs.append((cost.flops, cost.written, cost.peak_bytes))
    case.true(
        costs[0] != costs[1],
        "Blocks of 3 queries and of 64 do the same work in the same memory: `block` "
        "changes nothing.",
    )


@chunked_attention.requires(
    "it creates nothing on another device; a window or block below 1, and more queries "
    "than keys, are a ValueError that names them"
)
def _(answer, case):
    case.any_device(answer, *heads(2, t_q=5, t_k=7), 3, 2)
    for window, block in ((0, 4), (-2, 4), (-1, 4), (-9, 4), (3, 0), (3, -4), (3, -1)):
        because = f"A window of {window} in blocks of {block}"
        x, bad = (*heads(t_q=5, t_k=7), window, block), (min(window, block),)
        case.raises(ValueError, answer, *x, mentions=bad, because=because)
    too_many_queries(case, answer, 3, 4)


# Features -----------------------------------------------------------------------------


@feature_map.requires(
    "it is x + 1 above 0 and e^x below, for every shape and dtype, on every device",
    "Two formulas, one condition: `torch.where`.",
)
def _(answer, case):
    alone = torch.tensor(-2.0), torch.tensor(2.0)
    for x in (probe(4, 5), strided(probe(3, 4, seed=2, scale=2)), *alone):
        case.agrees(answer, slow_features, x)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        case.agrees(answer, slow_features, probe(2, 3, 5, seed=1, dtype=dtype))
    case.any_device(answer, probe(3, 5))


@feature_map.requires(
    "numbers far below 0 give a small feature, not 0",
    "What is 1 + (−1 + 0.00000001) in float32? Below 0 there is a formula without a 1.",
)
def _(answer, case):
    for dtype, low, high in (
        (torch.float32, -80, -9),
        (torch.float32, -87, -80),
        (torch.float64, -700, -30),
        (torch.bfloat16, -80, -6),
        (torch.float16, -9, -6),
    ):
        x = torch.linspace(low, high, 30, dtype=torch.float64).to(dtype)
        case.agrees(answer, torch.exp, x, relative=True)


@feature_map.requires(
    "its gradient is right, for large numbers and at 0 too",
    "`torch.where` computes both sides everywhere. What is e^200, or e^12 in float16, and "
    "what is infinity times 0 in the backward pass? At 0 the slope is 1 on either side: "
    "do both of yours count there, or neither?",
)
def _(answer, case):
    case.gradients_agree(answer, slow_features, probe(3, 5, seed=4, scale=2))
    case.gradients_agree(answer, slow_features, torch.tensor([-20.0, 90.0, 200.0, 1e4]))
    x = torch.tensor([-3.0, 12.0, 90.0, 200.0], dtype=torch.float16)
    case.gradients_agree(answer, slow_features, x)
    case.gradients_agree(answer, slow_features, torch.tensor([-2.0, 0.0, 3.0]))


# Linear attention ---------------------------------------------------------------------


def small_features(case, run, oracle):
    """Weights sum to 1 however small they are: φ is above 0, and nothing is added."""
    q, k, v = heads(t_q=4, t_k=4, seed=17)
    q, k = q - 20, k - 20
    with case.unrecorded():  # what is added may be of any size: the mistake is one
        least = case.call(run, q, k, torch.ones_like(v)).min().item()
    case.true(
        not 0 <= least < 0.99,
        "With values that are all 1 every average is 1. Where features are about e^−20, "
        f"yours falls to {least:.3g}.",
    )
    truth = oracle(q.double(), k.double(), v.double())
    case.close(case.call(run, q, k, v), truth, like=v, tolerance=1e-4)


@linear_attention.requires(
    "without a mask, the values are averaged with weights in proportion to φ(q)·φ(k)",
    "For one query, write the sum of φ(q)·φ(k_j)·v_j over j. What can be taken out of "
    "the sum? Which other sum must it be divided by, and does that one have a last "
    "dimension to divide along? There may be more queries than keys.",
)
def _(answer, case):
    for t_q, t_k, d, d_v in ((4, 5, 6, 3), (3, 8, 2, 7), (6, 3, 4, 2), (1, 1, 9, 2)):
        x = heads(t_q=t_q, t_k=t_k, d=d, d_v=d_v, seed=t_q)
        case.agrees(answer, slow_linear, *x, False)


@linear_attention.requires(
    "causal, no query sees a later key, in neither of the two sums",
    "The sums up to each position, its own included, are running totals. Which function "
    "of torch keeps running totals?",
)
def _(answer, case):
    for t, d, d_v in ((4, 6, 5), (7, 3, 4), (1, 6, 5)):
        x = heads(t_q=t, t_k=t, d=d, d_v=d_v, seed=5)
        case.agrees(answer, slow_linear, *x, True)


@linear_attention.requires(
    "each batch row and head is treated by itself, and few queries are the last positions",
    "Count dimensions from the end. Query 0 has the running total up to position "
    "T_k − T_q.",
)
def _(answer, case):
    sizes = ((3,), 4, 4), ((2, 3), 5, 5), ((2,), 2, 6), ((2,), 1, 5), ((2, 3), 4, 7)
    for lead, t_q, t_k in sizes:
        for causal in (False, True):
            x = heads(*lead, t_q=t_q, t_k=t_k, d=9, d_v=8, seed=t_k)
            case.agrees(answer, slow_linear, *x, causal=causal)


@linear_attention.requires(
    "small features are averaged like any others, and a large later key changes nothing",
    "Does your φ keep e^−20, or round it to 0? Is something added to the divisor, or is "
    "there a least value for it? And to take later keys away from the sum of all leaves "
    "rounding errors of the size of that sum.",
)
def _(answer, case):
    for causal in (False, True):
        small_features(
            case, *(partial(f, causal=causal) for f in (answer, slow_linear))
        )
    q, k, v = heads(t_q=5, t_k=5, d_v=3, seed=16)
    k[-1] = 1e7
    case.agrees(answer, slow_linear, q, k, v, True)


@linear_attention.requires(
    "gradients, hundreds of positions, large numbers, other dtypes, and memory that is "
    "not contiguous work too"
)
def _(answer, case):
    q, k, v = x = heads(2, t_q=4, t_k=6, seed=12)
    wide = heads(t_q=190, t_k=201, d=20, d_v=17, seed=15)
    for causal in (False, True):
        case.gradients_agree(answer, slow_linear, *x, causal)
        case.agrees(answer, slow_linear, *wide, causal)
        case.agrees(answer, slow_linear, 100 * q, 100 * k, v, causal)
        case.agrees(answer, slow_linear, strided(q), strided(k), strided(v), causal)
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            y = heads(2, t_q=4, t_k=6, seed=13, dtype=dtype)
            case.agrees(answer, slow_linear, *y, causal)


@linear_attention.requires(
    "time and memory grow in step with the length",
    "If a T_q × T_k table of weights appears anywhere, the order of the products is the "
    "wrong one.",
)
def _(answer, case):
    what = "Sum φ(k)ᵀv over the keys first: d × d_v numbers, however long the text."
    for causal in (False, True):
        grows_linearly(case, answer, causal, what=what)


@linear_attention.requires(
    "it creates nothing on another device; causal with more queries than keys is a "
    "ValueError that names both"
)
def _(answer, case):
    for causal in (True, False):
        case.any_device(answer, *heads(2, t_q=5, t_k=7), causal)
    too_many_queries(case, answer, True)


# One step -----------------------------------------------------------------------------


def steps_agree(answer, case, *x):
    """Every position in turn: outputs and states are what they should be."""
    q, k, v = x
    truth = slow_linear(*(y.double() for y in x))
    state, states = None, []
    for i in range(q.shape[-2]):
        result = case.call(answer, state, q[..., i, :], k[..., i, :], v[..., i, :])
        case.is_tuple(result, 2, "what a step returns, the output and the new state,")
        output, state = result
        case.is_tuple(state, 2, f"the state after step {i}")
        seen = slow_features(k.double()[..., : i + 1, :])
        sums = seen.mT @ v.double()[..., : i + 1, :], seen.sum(-2)
        for name, part, due in zip("sz", state, sums, strict=True):
            case.close(part, due, f"`{name}` after step {i}", like=v)
        case.close(output, truth[..., i, :], f"the output of step {i}", like=v)
        states.append(state)
    return states


def in_turn(answer):
    """All steps through `answer` as one function, the outputs joined along time."""

    def all_steps(q, k, v):
        state, outputs = None, []
        for i in range(q.shape[-2]):
            output, state = answer(state, q[..., i, :], k[..., i, :], v[..., i, :])
            outputs.append(output)
        return torch.stack(outputs, dim=-2)

    return all_steps


@linear_attention_step.requires(
    "step by step it gives what causal linear attention gives at once",
    "With `state` None, both sums hold one position: what is left of w·v / w? First add "
    "the new position to both sums, then read them with the query. All that is remembered "
    "is in the state.",
)
def _(answer, case):
    one = heads(t_q=4, t_k=4, seed=2)
    states = steps_agree(answer, case, *one)
    steps_agree(answer, case, *heads(t_q=5, t_k=5, d=3, d_v=7, seed=5))
    again, _ = case.call(answer, states[0], *(x[1] for x in one))
    truth = slow_linear(*(x.double() for x in one))[1]
    case.close(again, truth, "the output of step 1 of the first text, once more")


@linear_attention_step.requires(
    "batches and heads in front are each treated by themselves",
    "Count dimensions from the end; `torch.outer` and `torch.dot` know vectors alone. A "
    "divisor without its last dimension of 1 divides along another one.",
)
def _(answer, case):
    steps_agree(answer, case, *heads(2, t_q=3, t_k=3, seed=6))
    steps_agree(answer, case, *heads(2, 3, t_q=4, t_k=4, d=5, d_v=7, seed=7))


@linear_attention_step.requires(
    "large features and small ones are averaged alike",
    "Does your φ keep e^−20, or round it to 0? Is something added to the divisor, or is "
    "there a least value for it? φ is above 0 everywhere, and so is the sum.",
)
def _(answer, case):
    run, (q, k, v) = in_turn(answer), heads(2, t_q=4, t_k=4, seed=13)
    case.agrees(run, slow_linear, 100 + 30 * q, 100 + 30 * k, v)
    small_features(case, run, slow_linear)


@linear_attention_step.requires(
    "gradients flow back through many steps; other dtypes and devices work"
)
def _(answer, case):
    run, x = in_turn(answer), heads(2, t_q=4, t_k=4, seed=11)
    case.gradients_agree(run, slow_linear, *x)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        case.agrees(run, slow_linear, *heads(2, t_q=3, t_k=3, seed=12, dtype=dtype))
    for state in (None, (probe(2, 14, 12), probe(2, 14).abs())):
        case.any_device(answer, state, *(y[:, 0] for y in x))


# What must fit together ---------------------------------------------------------------

PARTS = {"attention": "attention", "rope": "positions"}
PARTS |= dict.fromkeys(("split_heads", "merge_heads", "repeat_kv"), "multi_head")
PARTS |= dict.fromkeys(("TransformerConfig", "Block"), "forward_pass")
PARTS |= dict.fromkeys(("sliding_window_mask", "sink_mask"), "long_context")
PARTS |= dict.fromkeys(("chunked_attention", "linear_attention"), "long_context")
PARTS["linear_attention_step"] = "long_context"
long_context_in_a_decoder = IntegrationCheck(
    "long_context_in_a_decoder", lesson="long_context", parts=PARTS
)
T, WINDOW, BASE, D_MODEL, D_HEAD = 13, 5, 100.0, 10, 8
N_HEADS = 6, 2, 2  # of queries, keys and values
WEIGHTS = [probe(D_MODEL, n * D_HEAD, seed=40 + i) for i, n in enumerate(N_HEADS)]


def turned(x):
    """RoPE at positions 0, 1, … by complex multiplication."""
    wave = BASE ** (-torch.arange(0, D_HEAD, 2).double() / D_HEAD)
    angles = torch.arange(x.shape[-2])[:, None] * wave
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.exp(1j * angles)).flatten(-2)


def right_heads(x):
    """Queries, keys and values `(B, H, T, d_head)`, keys repeated, in float64."""
    q, k, v = (
        (x @ w).double().unflatten(-1, (-1, D_HEAD)).transpose(1, 2) for w in WEIGHTS
    )
    group = [h // 3 for h in range(6)]
    return turned(q), turned(k)[:, group], v[:, group]


@long_context_in_a_decoder.requires(
    "a mask means the same in a block, and to the last queries alone",
    "Pass each mask to your `attention` alone, and compare with SDPA under the same mask. "
    "Then print it: rows are queries, and the last queries of a text its last rows.",
)
def _(parts, case):
    sizes = {"n_heads": 6, "n_kv_heads": 2, "d_head": D_HEAD, "d_ff": 14, "max_len": 40}
    block = parts["Block"](parts["TransformerConfig"](17, D_MODEL, 1, **sizes))
    x, (q, k, v) = probe(1, T, D_MODEL, seed=70), heads(2, 3, t_q=T, t_k=T, seed=80)
    changed = x + torch.eye(T)[:, :, None]  # row j: position j is another
    for exercise, oracle, settings, *_ in MASKS[:2]:  # the third is an extra
        name, more = exercise.name, settings[0][0]
        mask, right = case.call(parts[name], T, T, *more), oracle(T, T, *more)
        with case.unrecorded(), torch.no_grad():
            before, after = (case.call(block, y, mask) for y in (x, changed))
        seen = ((after - before).abs().amax(-1) > 1e-6).mT
        case.note(seen)
        case.equal(seen, right, f"which position sees which in a block under `{name}`")
        whole = slow_attention(q, k, v, right)
        for n in (1, 3):
            mask = case.call(parts[name], n, T, *more)
            actual = case.call(parts["attention"], q[..., -n:, :], k, v, mask)
            what = f"the last {n} under `{name}`"
            case.close(actual, whole[..., -n:, :], what, like=q)


@long_context_in_a_decoder.requires(
    "attention in blocks and linear attention fit between the heads of lesson 03, turned "
    "by RoPE",
    "Heads are (B, H, T, d_head), keys and values repeated for their group; the step gets "
    "them without a time, (B, H, d_head).",
)
def _(parts, case):
    x = probe(4, T, D_MODEL, seed=71)
    q, k, v = (
        case.call(parts["split_heads"], x @ w, n)
        for w, n in zip(WEIGHTS, N_HEADS, strict=True)
    )
    q, k = (case.call(parts["rope"], y, torch.arange(T), BASE) for y in (q, k))
    k, v = (case.call(parts["repeat_kv"], y, 3) for y in (k, v))
    out = case.call(parts["chunked_attention"], q, k, v, WINDOW, 7)
    merged = case.call(parts["merge_heads"], out)
    right = slow_attention(*right_heads(x), slow_window(T, T, WINDOW))
    case.close(merged, right.transpose(1, 2).flatten(2), "the merged heads", like=x)
    mask = case.call(parts["sliding_window_mask"], T, T, WINDOW)
    masked = case.call(parts["attention"], q, k, v, mask)
    case.close(masked, right, "attention under the mask", like=x)
    right = slow_linear(*right_heads(x))
    at_once = case.call(parts["linear_attention"], q, k, v, True)
    case.close(at_once, right, "linear attention at once", like=x)
    state = None
    for i in range(T):
        now = q[:, :, i], k[:, :, i], v[:, :, i]
        output, state = case.call(parts["linear_attention_step"], state, *now)
        case.close(output, right[:, :, i], f"linear attention, step {i}", like=x)
