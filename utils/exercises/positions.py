"""Lesson 04: sinusoidal and learned positions, RoPE, ALiBi, the NTK base."""

import functools
import math

import torch

from utils.check.exercise import Exercise, IntegrationCheck
from utils.probe import probe, strided


def in_float32(actual, case, what):
    """There is no input whose dtype the result could take: say which it must have."""
    if isinstance(actual, torch.Tensor):
        case.true(
            actual.dtype == torch.float32,
            f"{what} must be float32, but is {str(actual.dtype).removeprefix('torch.')}: "
            "convert it at the end.",
        )
    return actual


# sinusoidal ---------------------------------------------------------------------------

sinusoidal = Exercise("sinusoidal", lesson="positions")


def wave_table(t, d_model):
    """The published formula, number by number."""
    table = torch.zeros(t, d_model, dtype=torch.float64)
    for position in range(t):
        for i in range(d_model // 2):
            angle = position / 10_000 ** (2 * i / d_model)
            table[position, 2 * i] = math.sin(angle)
            table[position, 2 * i + 1] = math.cos(angle)
    return table


def _compare_waves(answer, case, n, d_model):
    expected = wave_table(n, d_model)
    actual = in_float32(case.call(answer, n, d_model), case, "the table")
    case.close(actual, expected, "the table", like=expected.float())


@sinusoidal.requires(
    "the first two columns are sine and cosine of the position",
    "The table has one row for each position, from 0. Print its first two rows.",
)
def _(answer, case):
    _compare_waves(answer, case, 6, 2)


@sinusoidal.requires(
    "columns 2i and 2i + 1 are sine and cosine of position · 10000^(−2i/d_model)",
    "Write the frequencies of d_model = 4 down by hand, there are two: 1 and 1/100.",
)
def _(answer, case):
    _compare_waves(answer, case, 5, 8)


@sinusoidal.requires("other sizes, one position, and long tables work too")
def _(answer, case):
    for n, d_model in ((3, 10), (1, 6), (23, 4), (1500, 6)):
        _compare_waves(answer, case, n, d_model)


@sinusoidal.requires("the table is fixed: it asks for no gradient")
def _(answer, case):
    table = case.call(answer, 4, 14)
    case.true(
        not table.requires_grad,
        "The table asks for a gradient, as a parameter does. This one is computed, not "
        "learnt: return a plain tensor.",
    )


@sinusoidal.requires(
    "an odd d_model is a ValueError that names it",
    "Say what is wrong before you compute anything.",
)
def _(answer, case):
    for odd in (7, 1):
        case.raises(
            ValueError, answer, 4, odd, mentions=(odd,), because="An odd d_model"
        )


# LearnedPositions ---------------------------------------------------------------------

LearnedPositions = Exercise("LearnedPositions", lesson="positions")


def _with_table(answer, case, max_len, d_model, seed=0):
    """A module whose table is known, and that table."""
    table = probe(max_len, d_model, seed=seed)
    return case.load(case.call(answer, max_len, d_model), table=table), table


@LearnedPositions.requires(
    "it has max_len · d_model parameters, called `table`",
    "`nn.Embedding` is a table of vectors with a look-up.",
)
def _(answer, case):
    module, _ = _with_table(answer, case, 7, 5)
    case.parameter_count(module, 35)


@LearnedPositions.requires(
    "positions (T,) give their rows of the table, in order",
    "The rows are numbered from 0 to max_len − 1, and the last one is a row like any "
    "other.",
)
def _(answer, case):
    module, table = _with_table(answer, case, 7, 5)
    for positions in (torch.arange(4), torch.arange(7), torch.tensor([5, 2, 2, 6])):
        case.close(case.call(module, positions), table[positions], like=table)


@LearnedPositions.requires("positions (B, T) give (B, T, d_model), each row its own")
def _(answer, case):
    module, table = _with_table(answer, case, 9, 4, seed=1)
    for positions in ([[0, 1, 2], [4, 5, 8]], [[3], [7]], [[6, 2, 8]]):
        positions = torch.tensor(positions)
        case.close(case.call(module, positions), table[positions], like=table)
    for positions in (torch.tensor([5]), torch.tensor([[5]])):  # one token at a time
        case.close(case.call(module, positions), table[positions], like=table)


@LearnedPositions.requires(
    "asking for more positions than there are is a ValueError that names max_len",
    "Look at the positions before you look them up.",
)
def _(answer, case):
    module, _ = _with_table(answer, case, 7, 5)
    case.raises(
        ValueError,
        module,
        torch.arange(9),
        mentions=(7,),
        because="Nine positions with a table of 7",
    )


@LearnedPositions.requires(
    "so is a single position past the end; both numbers are named",
    "How many positions are asked for does not matter, but how large they are.",
)
def _(answer, case):
    module, _ = _with_table(answer, case, 7, 5)
    for positions in (torch.tensor([3, 25]), torch.tensor([[0, 1], [2, 25]])):
        case.raises(
            ValueError,
            module,
            positions,
            mentions=(25, 7),
            because="Position 25 in a table of 7",
        )


@LearnedPositions.requires("the last position is max_len − 1")
def _(answer, case):
    module, _ = _with_table(answer, case, 7, 5)
    case.raises(
        ValueError,
        module,
        torch.tensor([7]),
        mentions=(7,),
        because="Position 7 in a table of 7",
    )


@LearnedPositions.requires("a negative position is a ValueError too")
def _(answer, case):
    module, _ = _with_table(answer, case, 7, 5)
    case.raises(
        ValueError,
        module,
        torch.tensor([1, -2]),
        mentions=(-2, 7),
        because="Position −2 in a table of 7",
    )


@LearnedPositions.requires(
    "each row that was used gets a gradient, counted as often as used"
)
def _(answer, case):
    module, table = _with_table(answer, case, 6, 3)
    result = case.call(module, torch.tensor([[0, 4], [4, 5]]))
    case.true(
        result.requires_grad, "No gradient reaches the table: nothing can be learnt."
    )
    (gradient,) = torch.autograd.grad(result.sum(), list(module.parameters()))
    expected = torch.tensor([1.0, 0, 0, 0, 2, 1])[:, None].expand(6, 3)
    case.close(gradient, expected, "the gradient of `table`", like=table)


@LearnedPositions.requires("it works in float64, in eval mode, and a second time")
def _(answer, case):
    module, table = _with_table(answer, case, 8, 3, seed=2)
    module = module.double().eval()
    for positions in (torch.arange(5), torch.tensor([7, 0])):
        case.close(case.call(module, positions), table[positions], like=table.double())


# rope ---------------------------------------------------------------------------------

rope = Exercise("rope", lesson="positions")


def turned(x, positions, base=10_000.0):
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


@rope.requires(
    "with two numbers, the pair turns by `position` radians, counter-clockwise",
    "Turn (1, 0) by hand: at position 1 it becomes (cos 1, sin 1).",
)
def _(answer, case):
    case.agrees(answer, turned, probe(5, 2), torch.arange(5))


@rope.requires(
    "the pair (2i, 2i + 1) turns by position · base^(−2i/d_head)",
    "Try one row with d_head = 4 at position 1: the first pair turns by 1, the second "
    "by 1/100. Which numbers of the row form a pair?",
)
def _(answer, case):
    case.agrees(answer, turned, probe(6, 8, seed=1), torch.arange(6))


@rope.requires(
    "batch and heads may stand before time, and it is time that positions belong to",
    "The last two dimensions are time and d_head, however many stand before them.",
)
def _(answer, case):
    case.agrees(answer, turned, probe(2, 7, 4, seed=2), torch.arange(7))
    case.agrees(answer, turned, probe(2, 3, 5, 6, seed=3), torch.arange(5))
    case.agrees(answer, turned, probe(2, 4, 4, 6, seed=3), torch.arange(4))
    case.agrees(answer, turned, probe(2, 3, 2, 5, 4, seed=3), torch.arange(5))


@rope.requires(
    "positions may start anywhere, jump, repeat and go down",
    "Use the positions that are handed in, as they are.",
)
def _(answer, case):
    case.agrees(answer, turned, probe(3, 9, 6, seed=4), torch.arange(9) + 40)
    case.agrees(answer, turned, probe(3, 8, 6), torch.tensor([9, 2, 2, 0, 31, 5, 6, 1]))
    case.agrees(answer, turned, probe(2, 3, 1, 8, seed=5), torch.tensor([17]))
    case.agrees(answer, turned, probe(2, 8, seed=5), torch.tensor([30_000, 12_345]))


@rope.requires(
    "a second call with other positions gives other angles",
    "Is something kept from an earlier call that depends on the positions?",
)
def _(answer, case):
    x = probe(2, 11, 4, seed=6)
    for start in (0, 11, 5):
        case.agrees(answer, turned, x, torch.arange(11) + start)


@rope.requires(
    "positions (B, T) give each row of the batch its own, with and without heads",
    "Line the shapes up on paper: (B, T, d_head/2) against (B, H, T, d_head/2).",
)
def _(answer, case):
    positions = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8]])
    case.agrees(answer, turned, probe(2, 5, 8, seed=7), positions)
    case.agrees(answer, turned, probe(2, 3, 5, 8, seed=8), positions)
    case.agrees(answer, turned, probe(2, 2, 5, 8, seed=8), positions)
    case.agrees(answer, turned, probe(2, 3, 2, 5, 4, seed=8), positions)


@rope.requires("another base, given by name or by place")
def _(answer, case):
    x, positions = probe(3, 6, 10, seed=9), torch.arange(6) + 3
    case.agrees(answer, turned, x, positions, base=500.0)
    case.agrees(answer, turned, x, positions, 100_000.0)
    case.agrees(answer, turned, x=x, positions=positions, base=500.0)


@rope.requires(
    "positions need not be whole numbers",
    "Position interpolation divides them by a factor.",
)
def _(answer, case):
    case.agrees(answer, turned, probe(2, 7, 6, seed=10), (torch.arange(7) + 2) / 4)


@rope.requires(
    "float16 and bfloat16 come back as such, with angles computed in float32",
    "In bfloat16 the whole numbers past 256 have gaps: convert before you multiply.",
)
def _(answer, case):
    positions = torch.tensor([1, 259, 1027, 3001])
    for dtype in (torch.bfloat16, torch.float16):
        x = probe(2, 4, 8, seed=11, dtype=dtype)
        case.agrees(answer, turned, x, positions)


@rope.requires(
    "memory that is not contiguous works too",
    "`transpose` moves no number in memory, and some functions count on their order.",
)
def _(answer, case):
    positions = torch.arange(5) + 2
    case.agrees(answer, turned, probe(2, 5, 3, 8, seed=14).transpose(1, 2), positions)
    case.agrees(answer, turned, strided(probe(3, 5, 6, seed=13)), positions)


@rope.requires("float64 comes back as float64")
def _(answer, case):
    positions = torch.arange(5) + 2
    case.agrees(answer, turned, probe(3, 5, 6, seed=12).double(), positions)


@rope.requires(
    "a common shift of all positions, by up to 4,096, leaves every score as it is",
)
def _(answer, case):
    q, k = probe(4, 6, 16, seed=15), probe(4, 6, 16, seed=16)
    size = q.norm(dim=-1).max() * k.norm(dim=-1).max()
    q_at, k_at = torch.arange(6) + 30, torch.arange(6) * 5

    def scores(shift):
        left = case.call(answer, q, q_at + shift).double()
        return left @ case.call(answer, k, k_at + shift).double().transpose(-2, -1)

    before = scores(0)
    for shift in (13, 1000, 4096):
        case.close(
            scores(shift) / size,
            before / size,
            f"the scores after a shift by {shift}, divided by |q||k|",
            tolerance=1e-4,
        )


@rope.requires("gradients flow back to x")
def _(answer, case):
    case.gradients_agree(answer, turned, probe(2, 5, 6, seed=17), torch.arange(5))


@rope.requires("an odd d_head is a ValueError that names it")
def _(answer, case):
    x = probe(3, 5, 7, seed=18)
    case.raises(
        ValueError,
        answer,
        x,
        torch.arange(5),
        mentions=(7,),
        because="An odd d_head",
    )


@rope.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, probe(2, 5, 6), torch.arange(5))


# alibi_slopes -------------------------------------------------------------------------

alibi_slopes = Exercise("alibi_slopes", lesson="positions")


def published_slopes(n_heads):
    """The authors' rule, recursive as in their text."""
    if n_heads & (n_heads - 1) == 0:
        return [2.0 ** (-8 * (h + 1) / n_heads) for h in range(n_heads)]
    below = 1
    while 2 * below < n_heads:
        below *= 2
    return published_slopes(below) + published_slopes(2 * below)[::2][: n_heads - below]


def _compare_slopes(answer, case, n_heads):
    expected = torch.tensor(published_slopes(n_heads), dtype=torch.float64)
    actual = in_float32(case.call(answer, n_heads), case, "the tensor of slopes")
    what = f"the slopes of {n_heads} heads"
    case.close(actual, expected, what, like=expected.float(), relative=True)


@alibi_slopes.requires(
    "eight heads get 1/2, 1/4, … 1/256",
    "The first slope is also the factor from each slope to the next.",
)
def _(answer, case):
    _compare_slopes(answer, case, 8)


@alibi_slopes.requires(
    "any power of two gets 2^(−8h/n), h from 1 to n",
    "Whatever the number of heads, the last slope is 2^(−8).",
)
def _(answer, case):
    for n_heads in (4, 16, 2, 1, 64):
        _compare_slopes(answer, case, n_heads)


@alibi_slopes.requires(
    "other numbers follow the authors' rule, in its order",
    "For 12 heads: eight slopes as for 8, then the 1st, 3rd, 5th and 7th as for 16.",
)
def _(answer, case):
    for n_heads in (10, 5, 12, 6, 3, 7, 20, 112):
        _compare_slopes(answer, case, n_heads)


# alibi_bias ---------------------------------------------------------------------------

alibi_bias = Exercise("alibi_bias", lesson="positions")


def penalties(n_heads, t_q, t_k):
    """The bias by loops; 0 where a key is later than its query."""
    expected = torch.zeros(n_heads, t_q, t_k, dtype=torch.float64)
    for head, slope in enumerate(published_slopes(n_heads)):
        for query in range(t_q):
            for key in range(t_k):
                distance = (t_k - t_q + query) - key
                expected[head, query, key] = -slope * max(distance, 0)
    return expected


def _without_later_keys(answer):
    """The answer with 0 for keys that the mask hides, wherever its heads stand."""

    @functools.wraps(answer)
    def cleaned(n_heads, t_q, t_k):
        given = answer(n_heads, t_q, t_k)
        if not isinstance(given, torch.Tensor) or given.dim() < 2:
            return given
        heads_last = given.shape[-1] != t_k
        queries = given.shape[0 if heads_last else -2]
        later = torch.arange(t_k) > torch.arange(t_k - queries, t_k)[:, None]
        later = later[..., None] if heads_last else later
        if later.shape[:2] != given.shape[0 if heads_last else -2 :][:2]:
            return given
        return torch.where(later & ~given.isnan(), torch.zeros_like(given), given)

    return cleaned


def _compare_bias(answer, case, n_heads, t_q, t_k):
    actual = in_float32(
        case.call(_without_later_keys(answer), n_heads, t_q, t_k), case, "the bias"
    )
    expected = penalties(n_heads, t_q, t_k)
    case.close(actual, expected, "the bias", like=expected.float())


@alibi_bias.requires(
    "keys at or before a query get −slope · distance, 0 on the diagonal",
    "Write one head's rows for three positions: 0, then −s and 0, then −2s, −s and 0.",
)
def _(answer, case):
    _compare_bias(answer, case, 8, 5, 5)
    _compare_bias(answer, case, 2, 3, 3)


@alibi_bias.requires(
    "with fewer queries than keys, the queries are the last positions",
    "The last query stands at the last key: its distance there is 0.",
)
def _(answer, case):
    for n_heads, t_q, t_k in ((4, 3, 7), (2, 1, 6), (8, 5, 6)):
        _compare_bias(answer, case, n_heads, t_q, t_k)


@alibi_bias.requires("numbers of heads that are no power of two work too")
def _(answer, case):
    _compare_bias(answer, case, 6, 4, 5)
    _compare_bias(answer, case, 1, 2, 2)


@alibi_bias.requires("distances in the thousands stay exact")
def _(answer, case):
    actual = case.call(answer, 4, 1, 5001)
    expected = torch.tensor(published_slopes(4)).double()[:, None, None]
    expected = -expected * torch.arange(5000, -1, -1)
    case.close(actual, expected, "the bias", like=expected.float())


@alibi_bias.requires("more queries than keys is a ValueError that names both")
def _(answer, case):
    case.raises(
        ValueError,
        _without_later_keys(answer),
        4,
        6,
        3,
        mentions=(6, 3),
        because="Six queries, three keys",
    )


# ntk_base -----------------------------------------------------------------------------

ntk_base = Exercise("ntk_base", lesson="positions")


def _compare_base(answer, case, base, factor, d_head, by_name=False):
    if by_name:
        value = case.call(answer, d_head=d_head, factor=factor, base=base)
    else:
        value = case.call(answer, base, factor, d_head)
    # The slowest pair, turned by `factor` times the position, must be where it was.
    slowest = base ** (-(d_head - 2) / d_head) / factor
    expected = slowest ** (-d_head / (d_head - 2))
    if value is None or isinstance(value, (bool, str, tuple, list, complex)):
        case.equal(value, expected)
    value = torch.as_tensor(value)
    case.true(value.dim() == 0, "It returns several numbers; one base is due.")
    case.close(
        value.double(),
        expected,
        f"the base for factor {factor:g} and d_head {d_head}",
        relative=True,
        tolerance=1e-5,
    )


@ntk_base.requires(
    "the base is the old one times factor^(d_head / (d_head − 2))",
    "The slowest pair has the exponent −(d_head − 2)/d_head, not −1.",
)
def _(answer, case):
    _compare_base(answer, case, 10_000.0, 8, 16)
    _compare_base(answer, case, 10_000.0, 2.0, 64)


@ntk_base.requires("any base, factor and even d_head from 4; factor 1 changes nothing")
def _(answer, case):
    _compare_base(answer, case, 500_000.0, 4.0, 128)
    _compare_base(answer, case, 100.0, 3.0, 4)
    _compare_base(answer, case, 10_000.0, 1.5, 6)
    _compare_base(answer, case, 10_000, 1, 32)
    _compare_base(answer, case, 300.0, 5.0, 10, by_name=True)


@ntk_base.requires(
    "an odd d_head, or 2, is a ValueError that names it",
    "A head of two numbers has one pair, and it is the first.",
)
def _(answer, case):
    for d_head in (2, 7):
        case.raises(
            ValueError,
            answer,
            10_000.0,
            4.0,
            d_head,
            mentions=(d_head,),
            because=f"d_head {d_head}",
        )


# What must fit together ---------------------------------------------------------------

rope_in_multi_head = IntegrationCheck(
    "rope_in_multi_head",
    lesson="positions",
    parts={"rope": "positions", "MultiHeadAttention": "multi_head"},
)
D_MODEL, HEADS, KV_HEADS, D_HEAD, BATCH, TIME = 10, 6, 2, 4, 3, 5


def _module(parts, case):
    """Six query heads, two KV heads, known weights."""
    widths = {"w_q": HEADS * D_HEAD, "w_k": KV_HEADS * D_HEAD, "w_v": KV_HEADS * D_HEAD}
    weights = {
        name: probe(width, D_MODEL, seed=30 + i, scale=0.5)
        for i, (name, width) in enumerate(widths.items())
    }
    weights["w_o"] = probe(D_MODEL, HEADS * D_HEAD, seed=33, scale=0.3)
    module = parts["MultiHeadAttention"](D_MODEL, HEADS, KV_HEADS, D_HEAD)
    return case.load(module, **weights), weights


def _by_hand(x, weights, mask, positions):
    """The same, head by head in float64, with queries and keys turned."""
    x = x.double()
    q, k, v = (x @ weights[name].double().T for name in ("w_q", "w_k", "w_v"))
    outputs = []
    for head in range(HEADS):
        of = slice(head * D_HEAD, (head + 1) * D_HEAD)
        kv_head = head // (HEADS // KV_HEADS)
        kv_of = slice(kv_head * D_HEAD, (kv_head + 1) * D_HEAD)
        q_turned, k_turned = (turned(y, positions) for y in (q[..., of], k[..., kv_of]))
        scores = q_turned @ k_turned.transpose(-2, -1) / D_HEAD**0.5
        weight = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
        outputs.append(weight @ v[..., kv_of])
    return torch.cat(outputs, -1) @ weights["w_o"].double().T


def _compare_turning(parts, case, positions):
    module, weights = _module(parts, case)
    x = probe(BATCH, TIME, D_MODEL, seed=40)
    mask = torch.ones(TIME, TIME, dtype=torch.bool).tril()

    def rotate(heads):
        return parts["rope"](heads, positions)

    actual = case.call(module, x, mask=mask, rotate=rotate)
    expected = _by_hand(x, weights, mask, positions)
    case.close(actual, expected, "the attention output", like=x)


@rope_in_multi_head.requires(
    "queries and keys are turned as heads (B, H, T, d_head), by their place in time",
    "`rotate` gets queries and keys after the split into heads, and before the scores.",
)
def _(parts, case):
    _compare_turning(parts, case, torch.arange(TIME))


@rope_in_multi_head.requires("moving the whole text by 50 positions changes no output")
def _(parts, case):
    _compare_turning(parts, case, torch.arange(TIME) + 50)


@rope_in_multi_head.requires(
    "each row of the batch may have positions of its own, whatever the head",
    "`rope` has to put the heads between B and T of its positions.",
)
def _(parts, case):
    positions = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [7, 9, 10, 11, 30]])
    _compare_turning(parts, case, positions)


alibi_in_attention = IntegrationCheck(
    "alibi_in_attention",
    lesson="positions",
    parts={"softmax": "start", "causal_mask": "attention", "alibi_bias": "positions"},
)


def _compare_biased(parts, case, b, h, t_q, t_k):
    q, k = probe(b, h, t_q, 6, seed=50), probe(b, h, t_k, 6, seed=51)

    def weights(q, k):
        scores = q @ k.transpose(-2, -1) / 6**0.5  # B H T_q T_k
        scores = scores + parts["alibi_bias"](h, t_q, t_k)
        mask = parts["causal_mask"](t_q, t_k)
        return parts["softmax"](scores.masked_fill(~mask, -torch.inf), dim=-1)

    later = torch.arange(t_k) > torch.arange(t_k - t_q, t_k)[:, None]
    added = penalties(h, t_q, t_k).masked_fill(later, -torch.inf)
    scores = q.double() @ k.double().transpose(-2, -1) / 6**0.5 + added
    weights.__name__ = "attention_weights_with_alibi"
    case.close(
        case.call(weights, q, k), torch.softmax(scores, -1), "the weights", like=q
    )


@alibi_in_attention.requires(
    "scores (B, H, T, T) take the bias head by head, and the mask hides what comes later",
    "Scores are (B, H, T_q, T_k), the bias (H, T_q, T_k), the mask (T_q, T_k).",
)
def _(parts, case):
    _compare_biased(parts, case, 2, 4, 5, 5)


@alibi_in_attention.requires(
    "with fewer queries than keys, mask and bias mean the same positions",
    "Both take the queries for the last positions: print both for 2 queries and 4 keys.",
)
def _(parts, case):
    _compare_biased(parts, case, 2, 4, 3, 7)
    _compare_biased(parts, case, 3, 6, 1, 5)


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

        def with_ntk(x, positions, factor=factor, d_head=d_head):
            base = parts["ntk_base"](10_000.0, factor, d_head)
            return parts["rope"](x, positions, base=base)

        slow, fast = turned(x, positions / factor), turned(x, positions)
        actual = case.call(with_ntk, x, positions)
        case.close(actual[..., :2], fast[..., :2], "the first pair", like=x)
        case.close(actual[..., -2:], slow[..., -2:], "the slowest pair", tolerance=2e-6)
