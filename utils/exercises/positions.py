"""Lesson 04: sinusoidal and learned positions, RoPE, ALiBi, the NTK base."""

import functools
import math
from contextlib import contextmanager

import torch

from utils.check.errors import Explained, Unmet
from utils.check.exercise import Exercise, IntegrationCheck
from utils.probe import probe

sinusoidal = Exercise("sinusoidal", lesson="positions")
LearnedPositions = Exercise("LearnedPositions", lesson="positions")
rope = Exercise("rope", lesson="positions")
alibi_slopes = Exercise("alibi_slopes", lesson="positions")
alibi_bias = Exercise("alibi_bias", lesson="positions")
ntk_base = Exercise("ntk_base", lesson="positions")


def agrees_in_float32(case, f, oracle, *sizes, what, relative=False):
    """Like `case.agrees`, where no input says which dtype the result must have."""
    actual = case.call(f, *sizes)
    if isinstance(actual, torch.Tensor):
        case.true(
            actual.dtype == torch.float32,
            f"{what} must be float32, but is "
            f"{str(actual.dtype).removeprefix('torch.')}: convert it at the end.",
        )
    expected = oracle(*sizes)
    case.close(actual, expected, what, like=expected.float(), relative=relative)


@contextmanager
def as_turns(what, turns_of):
    """Says of the first wrong pair of numbers by which turn it came about.

    turns_of: from the pairs of a result, (rows, pairs, 2), to complex numbers.
    """
    try:
        yield
    except Unmet as problem:
        came, asked = problem.compared or (torch.zeros(0), torch.zeros(1))
        if came.shape != asked.shape:
            raise
        came, asked = (
            turns_of(y.double().unflatten(-1, (-1, 2))) for y in (came, asked)
        )
        wrong = ((came - asked).abs() > 1e-3).nonzero().tolist()
        if not wrong:
            raise
        row, i = wrong[0]
        came, asked = came[row, i], asked[row, i]
        length = f", and is {came.abs():.3g} times as long as it should be"
        raise Explained(
            f"At position {row}, the pair of numbers {2 * i} and {2 * i + 1} {what} "
            f"{came.angle():.4g}, expected {asked.angle():.4g}"
            f"{length if (came.abs() - 1).abs() > 1e-3 else ''}."
        ) from problem


# sinusoidal ---------------------------------------------------------------------------


def slow_sinusoidal(n_positions, d_model):
    """The published formula, number by number."""
    table = torch.zeros(n_positions, d_model, dtype=torch.float64)
    for position in range(n_positions):
        for i in range(d_model // 2):
            angle = position / 10_000 ** (2 * i / d_model)
            table[position, 2 * i] = math.sin(angle)
            table[position, 2 * i + 1] = math.cos(angle)
    return table


def table_is_right(case, answer, *sizes):
    turns = lambda pairs: torch.complex(pairs[..., 1], pairs[..., 0])  # noqa: E731
    with as_turns("stands for an angle of", turns):
        agrees_in_float32(case, answer, slow_sinusoidal, *sizes, what="the table")


@sinusoidal.requires(
    "columns 2i and 2i + 1 are sine and cosine of position · 10000^(−2i/d_model)",
    "The table has one row for each position, from 0. Write the frequencies of "
    "d_model = 4 down by hand, there are two: 1 and 1/100.",
)
def _(answer, case):
    for d_model in (4, 8, 2):
        table_is_right(case, answer, 5, d_model)


@sinusoidal.requires("other sizes work too, and no table asks for a gradient")
def _(answer, case):
    for sizes in ((3, 10), (1, 6), (23, 4), (1500, 6)):
        table_is_right(case, answer, *sizes)
    case.true(
        not case.call(answer, 4, 14).requires_grad,
        "The table asks for a gradient, as a parameter does. This one is computed, not "
        "learnt: return a plain tensor.",
    )


@sinusoidal.requires("an odd d_model is a ValueError that names it")
def _(answer, case):
    case.raises(ValueError, answer, 4, 7, mentions=(7,), because="An odd d_model")


# LearnedPositions ---------------------------------------------------------------------


def with_table(case, answer, max_len, d_model, seed=0):
    """A module whose table is known, and that table."""
    table = probe(max_len, d_model, seed=seed)
    module = case.call(answer, max_len, d_model)
    case.parameters(module, table=table.shape)
    return case.load(module, table=table), table


@LearnedPositions.requires(
    "it has max_len · d_model parameters, called `table`",
    "`nn.Embedding` is a table of vectors with a look-up.",
)
def _(answer, case):
    with_table(case, answer, 7, 5)


@LearnedPositions.requires(
    "positions (T,) or (B, T) give their rows of the table",
    "The rows are numbered from 0 to max_len − 1, and the last one is a row like any "
    "other.",
)
def _(answer, case):
    module, table = with_table(case, answer, 7, 5)
    for positions in (
        [0, 1, 2, 3], [5, 2, 2, 6], [[0, 1, 2], [4, 5, 3]], [[3], [6]], [[6, 2, 1]], [5], [[5]]
    ):  # fmt: skip
        positions = torch.tensor(positions)
        case.close(case.call(module, positions), table[positions], like=table)


@LearnedPositions.requires(
    "a position that is not in the table is a ValueError that names it and max_len"
)
def _(answer, case):
    module, _ = with_table(case, answer, 7, 5)
    for outside, positions in (
        (25, [3, 25]), (7, [7]), (25, [[0, 1], [25, 2]]), (-1, [1, -1]), (7, [*range(8)])
    ):  # fmt: skip
        because = f"Position {outside} in a table of 7"
        given, both = torch.tensor(positions), (outside, 7)
        case.raises(ValueError, module, given, mentions=both, because=because)


@LearnedPositions.requires(
    "each row that was used gets a gradient, counted as often as used"
)
def _(answer, case):
    module, table = with_table(case, answer, 6, 3)
    rows = case.call(module, torch.tensor([[0, 4], [4, 5]]))
    case.has_graph(rows)
    (gradient,) = torch.autograd.grad(rows.sum(), list(module.parameters()))
    case.note(gradient)
    expected = torch.tensor([1.0, 0, 0, 0, 2, 1])[:, None].expand(6, 3)
    case.close(gradient, expected, "the gradient of `table`", like=table)


# rope ---------------------------------------------------------------------------------


def complex_rope(x, positions, base=10_000.0):
    """RoPE as multiplication by complex numbers of length 1, in float64."""
    d_head = x.shape[-1]
    numbers = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
    i = torch.arange(d_head // 2, dtype=torch.float64)
    angles = positions.double()[..., None] * base ** (-2 * i / d_head)
    if positions.dim() == 2:
        b, n, pairs = angles.shape
        angles = angles.reshape(b, *[1] * (x.dim() - 3), n, pairs)
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(numbers * turn).flatten(-2)


def pairs_turn(case, answer, *sizes):
    x = probe(*sizes)
    given = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    turns = lambda pairs: torch.view_as_complex(pairs.contiguous()) / given  # noqa: E731
    with as_turns("is turned by", turns):
        case.agrees(answer, complex_rope, x, torch.arange(sizes[0]))


@rope.requires(
    "the pair (2i, 2i + 1) turns by position · base^(−2i/d_head), counter-clockwise",
    "Turn (1, 0) by hand: at position 1 it becomes (cos 1, sin 1). Then try d_head = 4: "
    "the second pair turns by 1/100. Which numbers of the row form a pair?",
)
def _(answer, case):
    for d_head in (4, 8, 2):
        pairs_turn(case, answer, 5, d_head)


@rope.requires(
    "batch and heads may stand before time, and it is time that positions belong to",
    "The last two dimensions are time and d_head, however many stand before them.",
)
def _(answer, case):
    for sizes in ((2, 7, 4), (2, 3, 5, 6), (2, 4, 4, 6), (2, 3, 2, 5, 4)):
        x = probe(*sizes, seed=3)
        case.agrees(answer, complex_rope, x, torch.arange(sizes[-2]))
    x = probe(2, 5, 3, 8, seed=14).transpose(1, 2)  # as after splitting into heads
    case.agrees(answer, complex_rope, x, torch.arange(5))


@rope.requires(
    "positions may start anywhere, jump, repeat, go down and be fractions",
    "Use the positions that are handed in, as they are. Is something kept from an "
    "earlier call that depends on them?",
)
def _(answer, case):
    for positions in (
        torch.tensor([3, 5, 5, 4, 13, 8, 6, 9, 7]),
        torch.arange(9) + 9,
        torch.tensor([17]),
        (torch.arange(7) + 2) / 4,  # position interpolation divides by a factor
        torch.tensor([30_000, 12_345]),
    ):
        x = probe(3, len(positions), 6, seed=4)
        case.agrees(answer, complex_rope, x, positions)


@rope.requires(
    "positions (B, T) give each row of the batch its own, with and without heads",
    "Line the shapes up on paper: (B, T, d_head/2) against (B, H, T, d_head/2).",
)
def _(answer, case):
    positions = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8]])
    for sizes in ((2, 5, 8), (2, 3, 5, 8), (2, 2, 5, 8), (2, 3, 2, 5, 4)):
        case.agrees(answer, complex_rope, probe(*sizes, seed=8), positions)


@rope.requires("another base, given by name or by place")
def _(answer, case):
    x, positions = probe(3, 6, 10, seed=9), torch.arange(6) + 3
    case.call(answer, x, positions, base=500.0)  # to see what comes of both
    case.agrees(answer, complex_rope, x, positions, 100_000.0)
    case.agrees(answer, complex_rope, x=x, positions=positions, base=500.0)


@rope.requires(
    "float16, bfloat16 and float64 come back as such, with angles of float32 at least",
    "In bfloat16 the whole numbers past 256 have gaps: convert before you multiply.",
)
def _(answer, case):
    positions = torch.tensor([1, 259, 1027, 3001])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        x = probe(2, 4, 8, seed=11, dtype=dtype)
        case.agrees(answer, complex_rope, x, positions)


@rope.requires("gradients flow back to x")
def _(answer, case):
    case.gradients_agree(answer, complex_rope, probe(2, 5, 6, seed=17), torch.arange(5))


@rope.requires("an odd d_head is a ValueError that names it")
def _(answer, case):
    x = probe(3, 5, 7, seed=18)
    because = "An odd d_head"
    case.raises(ValueError, answer, x, torch.arange(5), mentions=(7,), because=because)


@rope.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, probe(2, 5, 6), torch.arange(5))


# alibi_slopes -------------------------------------------------------------------------


def published_slopes(n_heads):
    """The authors' rule, recursive as in their text."""
    if n_heads & (n_heads - 1) == 0:
        slopes = [2.0 ** (-8 * (h + 1) / n_heads) for h in range(n_heads)]
        return torch.tensor(slopes, dtype=torch.float64)
    below = 1
    while 2 * below < n_heads:
        below *= 2
    more = published_slopes(2 * below)[::2][: n_heads - below]
    return torch.cat((published_slopes(below), more))


def slopes_are_right(case, answer, n_heads):
    what = f"the tensor of slopes for n_heads = {n_heads}"
    agrees_in_float32(case, answer, published_slopes, n_heads, what=what, relative=True)


@alibi_slopes.requires(
    "a power of two, n, gets 2^(−8h/n), h from 1 to n",
    "Eight heads get 1/2, 1/4, … 1/256. Whatever the number of heads, the last slope is "
    "2^(−8).",
)
def _(answer, case):
    for n_heads in (8, 4, 16, 2, 1, 64):
        slopes_are_right(case, answer, n_heads)


@alibi_slopes.requires(
    "other numbers follow the authors' rule, in its order",
    "For 12 heads: eight slopes as for 8, then the 1st, 3rd, 5th and 7th as for 16.",
)
def _(answer, case):
    for n_heads in (10, 5, 12, 6, 3, 7, 20, 112):
        slopes_are_right(case, answer, n_heads)


# alibi_bias ---------------------------------------------------------------------------


def is_later(t_q, t_k):
    """Where a key stands behind its query."""
    return torch.arange(t_k) > torch.arange(t_k - t_q, t_k)[:, None]


def slow_bias(n_heads, t_q, t_k):
    """The bias row by row; 0 where a key is later than its query."""
    keys = torch.arange(t_k, dtype=torch.float64)
    rows = torch.stack([(keys - query).clamp(max=0) for query in keys[t_k - t_q :]])
    return torch.stack([slope * rows for slope in published_slopes(n_heads)])


def without_later_keys(answer):
    """The answer with 0 for keys that the mask hides, where any number is right.

    Of a bias of another shape only the shape is kept.
    """

    @functools.wraps(answer)
    def cleaned(n_heads, t_q, t_k):
        bias = answer(n_heads, t_q, t_k)
        if not isinstance(bias, torch.Tensor):
            return bias
        if bias.shape[-2:] != (t_q, t_k):
            return torch.zeros_like(bias)
        return bias.masked_fill(is_later(t_q, t_k) & ~bias.isnan(), 0)

    return cleaned


def bias_is_right(case, answer, *sizes):
    answer = without_later_keys(answer)
    agrees_in_float32(case, answer, slow_bias, *sizes, what="the bias")


@alibi_bias.requires(
    "keys at or before a query get −slope · distance, 0 on the diagonal",
    "Write one head's rows for three positions: 0, then −s and 0, then −2s, −s and 0.",
)
def _(answer, case):
    bias_is_right(case, answer, 8, 5, 5)
    bias_is_right(case, answer, 2, 3, 3)


@alibi_bias.requires(
    "with fewer queries than keys, the queries are the last positions",
    "The last query stands at the last key: its distance there is 0.",
)
def _(answer, case):
    for sizes in ((4, 3, 7), (2, 1, 6), (6, 4, 5), (1, 2, 3), (4, 2, 5001)):
        bias_is_right(case, answer, *sizes)


@alibi_bias.requires("more queries than keys is a ValueError that names both")
def _(answer, case):
    case.raises(
        ValueError, answer, 4, 6, 3, mentions=(6, 3), because="Six queries, three keys"
    )


# ntk_base -----------------------------------------------------------------------------


def base_is_right(case, answer, base, factor, d_head, by_name=False):
    if by_name:
        value = case.call(answer, d_head=d_head, factor=factor, base=base)
    else:
        value = case.call(answer, base, factor, d_head)
    case.true(
        isinstance(value, (int, float)) and not isinstance(value, bool),
        f"The base is of type {type(value).__name__}, expected a float.",
    )
    slower = (value / base) ** ((d_head - 2) / d_head) if value > 0 else 0.0
    if not math.isclose(slower, factor, rel_tol=1e-5):
        raise Explained(
            f"With the base {value:.6g} for {base:.6g}, the slowest of the pairs of a head "
            f"of {d_head} turns {slower:.4g} times slower, expected {factor:g} times."
        )


@ntk_base.requires(
    "the slowest pair turns `factor` times slower than before",
    "Which exponent has the slowest pair of `rope`? It is not −1. Write down its "
    "frequency with the old base and with the new one.",
)
def _(answer, case):
    base_is_right(case, answer, 10_000.0, 5.0, 14)
    base_is_right(case, answer, 500_000.0, 4.0, 128)
    base_is_right(case, answer, 100.0, 3.0, 4)
    base_is_right(case, answer, 100.0, 1.5, 6)
    base_is_right(case, answer, 10_000, 1, 32, by_name=True)


@ntk_base.requires("an odd d_head, or 2, is a ValueError that names it")
def _(answer, case):
    for d_head in (2, 7):
        because = f"d_head {d_head}"
        case.raises(
            ValueError, answer, 300.0, 4.0, d_head, mentions=(d_head,), because=because
        )


# What must fit together ---------------------------------------------------------------

rope_in_multi_head = IntegrationCheck(
    "rope_in_multi_head",
    lesson="positions",
    parts={"rope": "positions", "MultiHeadAttention": "multi_head"},
)
D_MODEL, N_HEADS, N_KV_HEADS, D_HEAD, BATCH, TIME = 10, 8, 2, 6, 3, 5


def attention_with_rope(x, mask, positions, w_q, w_k, w_v, w_o):
    """Head by head in float64, with queries and keys turned."""
    q, k, v = ((x.double() @ w.double().T).split(D_HEAD, -1) for w in (w_q, w_k, w_v))
    outputs = []
    for head in range(N_HEADS):
        kv_head = head // (N_HEADS // N_KV_HEADS)
        scores = (
            complex_rope(q[head], positions) @ complex_rope(k[kv_head], positions).mT
        )
        scores = (scores / math.sqrt(D_HEAD)).masked_fill(~mask, -torch.inf)
        outputs.append(torch.softmax(scores, -1) @ v[kv_head])
    return torch.cat(outputs, -1) @ w_o.double().T


def module_turns(parts, case, positions):
    """Attention with known weights and `rope` at these positions is right."""
    module = parts["MultiHeadAttention"](D_MODEL, N_HEADS, N_KV_HEADS, D_HEAD)
    weights = {
        "w_q": probe(N_HEADS * D_HEAD, D_MODEL, seed=30, scale=0.5),
        "w_k": probe(N_KV_HEADS * D_HEAD, D_MODEL, seed=31, scale=0.5),
        "w_v": probe(N_KV_HEADS * D_HEAD, D_MODEL, seed=32, scale=0.5),
        "w_o": probe(D_MODEL, N_HEADS * D_HEAD, seed=33, scale=0.3),
    }
    case.load(module, **weights)
    x = probe(BATCH, TIME, D_MODEL, seed=40)
    mask = torch.ones(TIME, TIME, dtype=torch.bool).tril()

    def rotate(heads):
        return parts["rope"](heads, positions)

    actual = case.call(module, x, mask=mask, rotate=rotate)
    expected = attention_with_rope(x, mask, positions, **weights)
    case.close(actual, expected, "the attention output", like=x)


@rope_in_multi_head.requires(
    "queries and keys are turned as heads (B, H, T, d_head), by their place in time",
    "`rotate` gets queries and keys after the split into heads, and before the scores.",
)
def _(parts, case):
    module_turns(parts, case, torch.arange(TIME))
    module_turns(parts, case, torch.arange(TIME) + 50)


@rope_in_multi_head.requires(
    "each row of the batch may have positions of its own, whatever the head",
    "`rope` has to put the heads between B and T of its positions.",
)
def _(parts, case):
    rows = [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [7, 9, 10, 11, 30]]
    module_turns(parts, case, torch.tensor(rows))


alibi_in_attention = IntegrationCheck(
    "alibi_in_attention",
    lesson="positions",
    parts={"softmax": "start", "causal_mask": "attention", "alibi_bias": "positions"},
)


def weights_are_right(parts, case, b, h, t_q, t_k):
    q, k = probe(b, h, t_q, 9, seed=50), probe(b, h, t_k, 9, seed=51)

    def attention_weights_with_alibi(q, k):
        scores = q @ k.mT / 3  # B H T_q T_k
        scores = scores + parts["alibi_bias"](h, t_q, t_k)
        mask = parts["causal_mask"](t_q, t_k)
        return parts["softmax"](scores.masked_fill(~mask, -torch.inf), dim=-1)

    scores = q.double() @ k.double().mT / 3 + slow_bias(h, t_q, t_k)
    expected = torch.softmax(scores.masked_fill(is_later(t_q, t_k), -torch.inf), -1)
    actual = case.call(attention_weights_with_alibi, q, k)
    case.close(actual, expected, "the weights", like=q)


@alibi_in_attention.requires(
    "scores take the bias head by head, and mask and bias mean the same positions",
    "Scores are (B, H, T_q, T_k), the bias (H, T_q, T_k), the mask (T_q, T_k). Both take "
    "the queries for the last positions: print both for 2 queries and 4 keys.",
)
def _(parts, case):
    weights_are_right(parts, case, 2, 4, 5, 5)
    weights_are_right(parts, case, 2, 4, 3, 7)
    weights_are_right(parts, case, 3, 6, 1, 5)


ntk_in_rope = IntegrationCheck(
    "ntk_in_rope",
    lesson="positions",
    parts={"rope": "positions", "ntk_base": "positions"},
)


@ntk_in_rope.requires(
    "with the NTK base the first pair turns as before, and the slowest `factor` times "
    "slower",
    "The slowest pair at position 8 · factor must stand where it stood at 8.",
)
def _(parts, case):
    for d_head, factor in ((8, 4.0), (16, 2.0)):
        x, positions = probe(2, 6, d_head, seed=60), torch.arange(6) * 5

        def rope_with_ntk_base(x, positions, factor=factor, d_head=d_head):
            base = parts["ntk_base"](10_000.0, factor, d_head)
            return parts["rope"](x, positions, base=base)

        fast, slow = (complex_rope(x, positions / f) for f in (1, factor))
        actual = case.call(rope_with_ntk_base, x, positions)
        case.close(actual[..., :2], fast[..., :2], "the first pair", like=x)
        case.close(actual[..., -2:], slow[..., -2:], "the slowest pair", tolerance=2e-6)
