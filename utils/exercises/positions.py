"""Lesson 04: sinusoidal and learned positions, RoPE, ALiBi, the NTK base."""

import functools
import math

import torch
from torch import nn

from utils.check.exercise import Exercise, Joint
from utils.probe import probe, strided


def in_float32(actual, t, what):
    """There is no input whose dtype the result could take: say which it must have."""
    if isinstance(actual, torch.Tensor):
        t.true(
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


def _compare_waves(answer, t, n, d_model):
    expected = wave_table(n, d_model)
    actual = in_float32(t.call(answer, n, d_model), t, "the table")
    t.close(actual, expected, "the table", like=expected.float())


@sinusoidal.requires(
    "the first two columns are sine and cosine of the position",
    "The table has one row for each position, from 0. Print its first two rows.",
)
def _(answer, t):
    _compare_waves(answer, t, 6, 2)


@sinusoidal.requires(
    "columns 2i and 2i + 1 are sine and cosine of position · 10000^(−2i/d_model)",
    "Write the frequencies of d_model = 4 down by hand, there are two: 1 and 1/100.",
)
def _(answer, t):
    _compare_waves(answer, t, 5, 8)


@sinusoidal.requires("other sizes, one position, and long tables work too")
def _(answer, t):
    for n, d_model in ((3, 10), (1, 6), (23, 4), (1500, 6)):
        _compare_waves(answer, t, n, d_model)


@sinusoidal.requires("the table is fixed: it asks for no gradient")
def _(answer, t):
    table = t.call(answer, 4, 14)
    t.true(
        not table.requires_grad,
        "The table asks for a gradient, as a parameter does. This one is computed, not "
        "learnt: return a plain tensor.",
    )


@sinusoidal.requires(
    "an odd d_model is a ValueError that names it",
    "Say what is wrong before you compute anything.",
)
def _(answer, t):
    for odd in (7, 1):
        t.raises(ValueError, answer, 4, odd, mentions=(odd,), because="An odd d_model")


def _waves(n, d_model, *, power=None, first=0, cosine_first=False, base=10_000.0):
    if d_model % 2:
        raise ValueError(f"d_model {d_model} is odd")
    i = torch.arange(d_model // 2)
    power = -2 * i / d_model if power is None else power(i)
    angles = torch.arange(first, first + n)[:, None] * base**power
    waves = (angles.sin(), angles.cos())
    return torch.stack(waves[::-1] if cosine_first else waves, -1).flatten(-2)


@sinusoidal.fault(
    "halves",
    "All sines stand in the left half and all cosines in the right one. Others do it "
    "like that, and it works as well; here, as in the paper, they take turns.",
)
def _(t, d_model):
    table = _waves(t, d_model)
    return torch.cat((table[:, 0::2], table[:, 1::2]), -1)


@sinusoidal.fault(
    "halves_to_the_end",
    "Sines and cosines stand in halves, and the frequencies run all the way down to "
    "1/10000, dividing by one less than the number of pairs. The first published code "
    "did that; the paper, and this course, interleave and divide by d_model.",
)
def _(t, d_model):
    table = _waves(t, d_model, power=lambda i: -i / max(d_model // 2 - 1, 1))
    return torch.cat((table[:, 0::2], table[:, 1::2]), -1)


@sinusoidal.fault(
    "divided_by_the_frequency",
    "The position is divided by the frequency instead of multiplied: the angles grow "
    "from pair to pair, where the waves should get longer. Position 0 and the first "
    "pair do not show it.",
)
def _(t, d_model):
    return _waves(t, d_model, power=lambda i: 2 * i / d_model)


@sinusoidal.fault(
    "index_doubled",
    "The exponent runs twice as fast as it should. If your index already counts "
    "0, 2, 4, …, it is 2i, and the formula's 2 must not come on top.",
)
def _(t, d_model):
    return _waves(t, d_model, power=lambda i: -4 * i / d_model)


@sinusoidal.fault(
    "index_halved",
    "The exponent is −i/d_model, half of what it should be: i counts pairs, and the "
    "formula has 2i.",
)
def _(t, d_model):
    return _waves(t, d_model, power=lambda i: -i / d_model)


@sinusoidal.fault(
    "own_frequency_for_each_column",
    "Every column has a frequency of its own. A sine and its cosine belong together, "
    "at one frequency: only then is a shift of position a rotation.",
)
def _(t, d_model):
    if d_model % 2:
        raise ValueError(f"d_model {d_model} is odd")
    j = torch.arange(d_model)
    angles = torch.arange(t)[:, None] * 10_000.0 ** (-j / d_model)
    return torch.where(j % 2 == 0, angles.sin(), angles.cos())


@sinusoidal.fault(
    "two_for_each_column",
    "Every column has a frequency of its own, and twice the exponent: the formula's 2i "
    "was filled in with the number of the column. i counts pairs, so columns 2i and "
    "2i + 1 share the frequency of 2i.",
)
def _(t, d_model):
    if d_model % 2:
        raise ValueError(f"d_model {d_model} is odd")
    j = torch.arange(d_model)
    angles = torch.arange(t)[:, None] * 10_000.0 ** (-2 * j / d_model)
    return torch.where(j % 2 == 0, angles.sin(), angles.cos())


@sinusoidal.fault(
    "stretched_to_the_end",
    "The frequencies run all the way down to 1/10000, dividing by one less than the "
    "number of pairs. The formula divides by d_model.",
)
def _(t, d_model):
    return _waves(t, d_model, power=lambda i: -i / max(d_model // 2 - 1, 1))


@sinusoidal.fault(
    "sine_twice",
    "Both columns of a pair hold the sine. The second one is the cosine, so that the "
    "pair is the tip of a clock hand.",
)
def _(t, d_model):
    return _waves(t, d_model)[:, 0::2].repeat_interleave(2, -1)


@sinusoidal.fault(
    "reshaped_across_rows",
    "Sines and cosines are put side by side in front of the positions and then reshaped, "
    "so that numbers of different positions share a row. The new dimension must be the "
    "last one.",
)
def _(t, d_model):
    table = _waves(t, d_model)
    return torch.stack((table[:, 0::2], table[:, 1::2])).reshape(t, d_model)


@sinusoidal.fault(
    "fixed_length",
    "The table has a fixed number of rows, and a longer one is cut off there. Make as "
    "many as are asked for.",
)
def _(t, d_model):
    return _waves(512, d_model)[:t]


_waves_kept: dict = {}


@sinusoidal.fault(
    "cached_table",
    "A table from an earlier call is used again although more rows are asked for.",
)
def _(t, d_model):
    if d_model not in _waves_kept:
        _waves_kept[d_model] = _waves(t, d_model)
    return _waves_kept[d_model][:t]


@sinusoidal.fault(
    "parameter",
    "The table is a parameter, so an optimiser would change it. Sinusoids are not learnt.",
)
def _(t, d_model):
    return nn.Parameter(_waves(t, d_model))


@sinusoidal.fault("from_one", "The first row is position 1. Positions count from 0.")
def _(t, d_model):
    return _waves(t, d_model, first=1)


@sinusoidal.fault(
    "cosine_first", "Cosine and sine have changed places: the sine comes first."
)
def _(t, d_model):
    return _waves(t, d_model, cosine_first=True)


@sinusoidal.fault("base", "The base is 1,000; the paper has 10,000.")
def _(t, d_model):
    return _waves(t, d_model, base=1000.0)


@sinusoidal.fault(
    "transposed", "Rows and columns have changed places: a row is a position."
)
def _(t, d_model):
    return _waves(t, d_model).T


@sinusoidal.fault(
    "batch_dimension",
    "There is a dimension of size 1 in front. (t, d_model) is enough: it broadcasts.",
)
def _(t, d_model):
    return _waves(t, d_model)[None]


@sinusoidal.fault(
    "odd_crash",
    "With an odd d_model there is one sine more than cosines, and the sizes do not "
    "match deep inside. Refuse it at the door, with a sentence.",
)
def _(t, d_model):
    table = torch.zeros(t, d_model)
    pairs = torch.arange(0, d_model, 2)
    angles = torch.arange(t)[:, None] * 10_000.0 ** (-pairs / d_model)
    table[:, 0::2] = angles.sin()
    table[:, 1::2] = angles.cos()
    return table


@sinusoidal.fault(
    "odd_cut_off",
    "An odd d_model goes through, and the last sine has no cosine. Refuse it.",
)
def _(t, d_model):
    angles = torch.arange(t)[:, None] * 10_000.0 ** (
        -torch.arange(0, d_model, 2) / d_model
    )
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[:, :d_model]


@sinusoidal.fault(
    "odd_accepted",
    "An odd d_model goes through, and one column has no partner. Refuse it.",
)
def _(t, d_model):
    return _waves(t, d_model + d_model % 2)[:, :d_model]


# LearnedPositions ---------------------------------------------------------------------

learned = Exercise("LearnedPositions", lesson="positions")


def _with_table(answer, t, max_len, d_model, seed=0):
    """A module whose table is known, and that table."""
    table = probe(max_len, d_model, seed=seed)
    return t.load(t.call(answer, max_len, d_model), table=table), table


@learned.requires(
    "it has max_len · d_model parameters, called `table`",
    "`nn.Embedding` is a table of vectors with a look-up.",
)
def _(answer, t):
    module, _ = _with_table(answer, t, 7, 5)
    t.parameter_count(module, 35)


@learned.requires(
    "positions (T,) give their rows of the table, in order",
    "The rows are numbered from 0 to max_len − 1, and the last one is a row like any "
    "other.",
)
def _(answer, t):
    module, table = _with_table(answer, t, 7, 5)
    for positions in (torch.arange(4), torch.arange(7), torch.tensor([5, 2, 2, 6])):
        t.close(t.call(module, positions), table[positions], like=table)


@learned.requires("positions (B, T) give (B, T, d_model), each row its own")
def _(answer, t):
    module, table = _with_table(answer, t, 9, 4, seed=1)
    for positions in ([[0, 1, 2], [4, 5, 8]], [[3], [7]], [[6, 2, 8]]):
        positions = torch.tensor(positions)
        t.close(t.call(module, positions), table[positions], like=table)
    for positions in (torch.tensor([5]), torch.tensor([[5]])):  # one token at a time
        t.close(t.call(module, positions), table[positions], like=table)


@learned.requires(
    "asking for more positions than there are is a ValueError that names max_len",
    "Look at the positions before you look them up.",
)
def _(answer, t):
    module, _ = _with_table(answer, t, 7, 5)
    t.raises(
        ValueError,
        module,
        torch.arange(9),
        mentions=(7,),
        because="Nine positions with a table of 7",
    )


@learned.requires(
    "so is a single position past the end; both numbers are named",
    "How many positions are asked for does not matter, but how large they are.",
)
def _(answer, t):
    module, _ = _with_table(answer, t, 7, 5)
    for positions in (torch.tensor([3, 25]), torch.tensor([[0, 1], [2, 25]])):
        t.raises(
            ValueError,
            module,
            positions,
            mentions=(25, 7),
            because="Position 25 in a table of 7",
        )


@learned.requires("the last position is max_len − 1")
def _(answer, t):
    module, _ = _with_table(answer, t, 7, 5)
    t.raises(
        ValueError,
        module,
        torch.tensor([7]),
        mentions=(7,),
        because="Position 7 in a table of 7",
    )


@learned.requires("a negative position is a ValueError too")
def _(answer, t):
    module, _ = _with_table(answer, t, 7, 5)
    t.raises(
        ValueError,
        module,
        torch.tensor([1, -2]),
        mentions=(-2, 7),
        because="Position −2 in a table of 7",
    )


@learned.requires("each row that was used gets a gradient, counted as often as used")
def _(answer, t):
    module, table = _with_table(answer, t, 6, 3)
    result = t.call(module, torch.tensor([[0, 4], [4, 5]]))
    t.true(
        result.requires_grad, "No gradient reaches the table: nothing can be learnt."
    )
    (gradient,) = torch.autograd.grad(result.sum(), list(module.parameters()))
    expected = torch.tensor([1.0, 0, 0, 0, 2, 1])[:, None].expand(6, 3)
    t.close(gradient, expected, "the gradient of `table`", like=table)


@learned.requires("it works in float64, in eval mode, and a second time")
def _(answer, t):
    module, table = _with_table(answer, t, 8, 3, seed=2)
    module = module.double().eval()
    for positions in (torch.arange(5), torch.tensor([7, 0])):
        t.close(t.call(module, positions), table[positions], like=table.double())


class _Learned(nn.Module):
    def __init__(self, max_len, d_model):
        super().__init__()
        self.max_len = max_len
        self.table = nn.Embedding(max_len, d_model)

    def forward(self, positions):
        for position in positions.flatten().tolist():
            if not 0 <= position < self.max_len:
                raise ValueError(f"{position} is outside the table of {self.max_len}")
        return self.table(positions)


@learned.fault(
    "counts_positions",
    "It looks at how many positions are asked for, not at how large they are. In "
    "generation there is one, and it is large.",
)
class _(_Learned):
    def forward(self, positions):
        if positions.shape[-1] > self.max_len:
            raise ValueError(
                f"{positions.shape[-1]} positions, table of {self.max_len}"
            )
        return self.table(positions)


@learned.fault(
    "off_by_one",
    "Position max_len is let through. The table's rows are 0 to max_len − 1.",
)
class _(_Learned):
    def forward(self, positions):
        for position in positions.flatten().tolist():
            if not 0 <= position <= self.max_len:
                raise ValueError(f"{position} is outside the table of {self.max_len}")
        return self.table(positions)


@learned.fault(
    "negative_wraps",
    "A negative position counts from the end of the table, as Python's indices do.",
)
class _(_Learned):
    def forward(self, positions):
        for position in positions.flatten().tolist():
            if position >= self.max_len:
                raise ValueError(f"{position} is outside the table of {self.max_len}")
        return self.table.weight[positions]


@learned.fault(
    "lower_end_unchecked",
    "Positions past the end are refused, negative ones are not: `nn.Embedding` stops "
    "with “index out of range in self”, on a GPU with the whole process. Look at both "
    "ends.",
)
class _(_Learned):
    def forward(self, positions):
        for position in positions.flatten().tolist():
            if position >= self.max_len:
                raise ValueError(f"{position} is outside the table of {self.max_len}")
        return self.table(positions)


@learned.fault(
    "compared_as_one_number",
    "`if` wants one answer, and a comparison of a tensor gives one for each position. "
    "Ask whether it holds for `any()` of them.",
)
class _(_Learned):
    def forward(self, positions):
        if positions < 0 or positions >= self.max_len:
            raise ValueError(f"{positions} is outside the table of {self.max_len}")
        return self.table(positions)


@learned.fault(
    "no_error_of_its_own",
    "It leaves the error to PyTorch. “Index out of range in self” helps nobody, and on "
    "a GPU it takes the whole process down: say which position, and how long the table "
    "is.",
)
class _(_Learned):
    def forward(self, positions):
        return self.table(positions)


@learned.fault(
    "clamped",
    "Positions past the end silently get the last row: tokens there cannot be told "
    "apart, and nobody learns why the model got worse.",
)
class _(_Learned):
    def forward(self, positions):
        return self.table(positions.clamp(0, self.max_len - 1))


@learned.fault(
    "wraps_around",
    "Positions past the end start again at row 0, without a word: the model takes the "
    "end of a text for its beginning.",
)
class _(_Learned):
    def forward(self, positions):
        return self.table(positions % self.max_len)


@learned.fault(
    "positions_ignored",
    "It returns the first T rows, whatever the positions are. With a cache, or with "
    "padding on the left, the first token is not at position 0.",
)
class _(_Learned):
    def forward(self, positions):
        super().forward(positions)
        rows = self.table.weight[: positions.shape[-1]]
        return rows.expand(*positions.shape, -1)


@learned.fault(
    "not_trainable",
    "The table is no parameter, so no optimiser will ever see it.",
)
class _(_Learned):
    def __init__(self, max_len, d_model):
        super().__init__(max_len, d_model)
        del self.table
        self.rows = torch.randn(max_len, d_model)

    def forward(self, positions):
        return self.rows[positions]


@learned.fault(
    "spare_row",
    "The table has a row more than max_len says.",
)
class _(_Learned):
    def __init__(self, max_len, d_model):
        super().__init__(max_len, d_model)
        self.table = nn.Embedding(max_len + 1, d_model)


@learned.fault(
    "padding_row",
    "Row 0 is declared as padding, and never gets a gradient. Position 0 is a position "
    "like any other.",
)
class _(_Learned):
    def __init__(self, max_len, d_model):
        super().__init__(max_len, d_model)
        self.table = nn.Embedding(max_len, d_model, padding_idx=0)


@learned.fault(
    "no_gradient",
    "The rows are read through `.data`, `detach()` or `no_grad`, or the table does not "
    "ask for a gradient: it stays as it was made.",
)
class _(_Learned):
    def forward(self, positions):
        return super().forward(positions).detach()


@learned.fault(
    "squeezed",
    "Dimensions of size 1 are dropped: for one position, or a batch of one, the result "
    "has too few dimensions. In generation there is one position at a time.",
)
class _(_Learned):
    def forward(self, positions):
        return super().forward(positions.squeeze())


@learned.fault(
    "relative_to_the_first",
    "Positions are counted from the first one that is asked for, or from the smallest. "
    "Each is the number of a row of the table.",
)
class _(_Learned):
    def forward(self, positions):
        super().forward(positions)
        return self.table(positions - positions.min())


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
def _(answer, t):
    t.agrees(answer, turned, probe(5, 2), torch.arange(5))


@rope.requires(
    "the pair (2i, 2i + 1) turns by position · base^(−2i/d_head)",
    "Try one row with d_head = 4 at position 1: the first pair turns by 1, the second "
    "by 1/100. Which numbers of the row form a pair?",
)
def _(answer, t):
    t.agrees(answer, turned, probe(6, 8, seed=1), torch.arange(6))


@rope.requires(
    "batch and heads may stand before time, and it is time that positions belong to",
    "The last two dimensions are time and d_head, however many stand before them.",
)
def _(answer, t):
    t.agrees(answer, turned, probe(2, 7, 4, seed=2), torch.arange(7))
    t.agrees(answer, turned, probe(2, 3, 5, 6, seed=3), torch.arange(5))
    t.agrees(answer, turned, probe(2, 4, 4, 6, seed=3), torch.arange(4))
    t.agrees(answer, turned, probe(2, 3, 2, 5, 4, seed=3), torch.arange(5))


@rope.requires(
    "positions may start anywhere, jump, repeat and go down",
    "Use the positions that are handed in, as they are.",
)
def _(answer, t):
    t.agrees(answer, turned, probe(3, 9, 6, seed=4), torch.arange(9) + 40)
    t.agrees(answer, turned, probe(3, 8, 6), torch.tensor([9, 2, 2, 0, 31, 5, 6, 1]))
    t.agrees(answer, turned, probe(2, 3, 1, 8, seed=5), torch.tensor([17]))
    t.agrees(answer, turned, probe(2, 8, seed=5), torch.tensor([30_000, 12_345]))


@rope.requires(
    "a second call with other positions gives other angles",
    "Is something kept from an earlier call that depends on the positions?",
)
def _(answer, t):
    x = probe(2, 11, 4, seed=6)
    for start in (0, 11, 5):
        t.agrees(answer, turned, x, torch.arange(11) + start)


@rope.requires(
    "positions (B, T) give each row of the batch its own, with and without heads",
    "Line the shapes up on paper: (B, T, d_head/2) against (B, H, T, d_head/2).",
)
def _(answer, t):
    positions = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8]])
    t.agrees(answer, turned, probe(2, 5, 8, seed=7), positions)
    t.agrees(answer, turned, probe(2, 3, 5, 8, seed=8), positions)
    t.agrees(answer, turned, probe(2, 2, 5, 8, seed=8), positions)
    t.agrees(answer, turned, probe(2, 3, 2, 5, 4, seed=8), positions)


@rope.requires("another base, given by name or by place")
def _(answer, t):
    x, positions = probe(3, 6, 10, seed=9), torch.arange(6) + 3
    t.agrees(answer, turned, x, positions, base=500.0)
    t.agrees(answer, turned, x, positions, 100_000.0)
    t.agrees(answer, turned, x=x, positions=positions, base=500.0)


@rope.requires(
    "positions need not be whole numbers",
    "Position interpolation divides them by a factor.",
)
def _(answer, t):
    t.agrees(answer, turned, probe(2, 7, 6, seed=10), (torch.arange(7) + 2) / 4)


@rope.requires(
    "float16 and bfloat16 come back as such, with angles computed in float32",
    "In bfloat16 the whole numbers past 256 have gaps: convert before you multiply.",
)
def _(answer, t):
    positions = torch.tensor([1, 259, 1027, 3001])
    for dtype in (torch.bfloat16, torch.float16):
        x = probe(2, 4, 8, seed=11, dtype=dtype)
        t.agrees(answer, turned, x, positions)


@rope.requires(
    "memory that is not contiguous works too",
    "`transpose` moves no number in memory, and some functions count on their order.",
)
def _(answer, t):
    positions = torch.arange(5) + 2
    t.agrees(answer, turned, probe(2, 5, 3, 8, seed=14).transpose(1, 2), positions)
    t.agrees(answer, turned, strided(probe(3, 5, 6, seed=13)), positions)


@rope.requires("float64 comes back as float64")
def _(answer, t):
    positions = torch.arange(5) + 2
    t.agrees(answer, turned, probe(3, 5, 6, seed=12).double(), positions)


@rope.requires(
    "a common shift of all positions, by up to 4,096, leaves every score as it is",
)
def _(answer, t):
    q, k = probe(4, 6, 16, seed=15), probe(4, 6, 16, seed=16)
    size = q.norm(dim=-1).max() * k.norm(dim=-1).max()
    q_at, k_at = torch.arange(6) + 30, torch.arange(6) * 5

    def scores(shift):
        left = t.call(answer, q, q_at + shift).double()
        return left @ t.call(answer, k, k_at + shift).double().transpose(-2, -1)

    before = scores(0)
    for shift in (13, 1000, 4096):
        t.close(
            scores(shift) / size,
            before / size,
            f"the scores after a shift by {shift}, divided by |q||k|",
            tolerance=1e-4,
        )


@rope.requires("gradients flow back to x")
def _(answer, t):
    t.gradients_agree(answer, turned, probe(2, 5, 6, seed=17), torch.arange(5))


@rope.requires("an odd d_head is a ValueError that names it")
def _(answer, t):
    x = probe(3, 5, 7, seed=18)
    t.raises(
        ValueError,
        answer,
        x,
        torch.arange(5),
        mentions=(7,),
        because="An odd d_head",
    )


@rope.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, probe(2, 5, 6), torch.arange(5))


def _even(x):
    if x.shape[-1] % 2:
        raise ValueError(f"d_head {x.shape[-1]} is odd")


def _angles(x, positions, base, power=None):
    """`position · base^power(i)`, lined up with `x`: `… T d_head/2`."""
    _even(x)
    i = torch.arange(x.shape[-1] // 2, device=x.device)
    power = -2 * i / x.shape[-1] if power is None else power(i)
    angles = positions[..., None].float() * base**power
    if positions.dim() == 2:
        angles = angles.reshape(len(positions), *[1] * (x.dim() - 3), *angles.shape[1:])
    return angles


def _turn(x, angles):
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x)


def _swap_halves(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _swap_neighbours(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


@rope.fault(
    "half_split",
    "This is RoPE in the other convention: it pairs number i with number i + d_head/2, "
    "as most published checkpoints do. It is right in itself, and the same as ours "
    "with the numbers of a head in another order. Here the pairs are neighbours.",
)
def _(x, positions, base=10_000.0):
    angles = torch.cat([_angles(x, positions, base)] * 2, -1)
    return (x * angles.cos() + _swap_halves(x) * angles.sin()).to(x)


@rope.fault(
    "angles_of_neighbours_on_halves",
    "Two conventions are mixed: the angles are laid out for neighbouring pairs, but the "
    "rotation pairs the two halves. Each number is turned with its partner's angle "
    "missing, and lengths are not kept. Position 0 and d_head = 2 do not show it.",
)
def _(x, positions, base=10_000.0):
    angles = _angles(x, positions, base).repeat_interleave(2, -1)
    return (x * angles.cos() + _swap_halves(x) * angles.sin()).to(x)


@rope.fault(
    "angles_of_halves_on_neighbours",
    "Two conventions are mixed: the rotation pairs neighbours, but the angles are laid "
    "out for halves, so the two numbers of a pair are turned by different angles.",
)
def _(x, positions, base=10_000.0):
    angles = torch.cat([_angles(x, positions, base)] * 2, -1)
    return (x * angles.cos() + _swap_neighbours(x) * angles.sin()).to(x)


@rope.fault(
    "not_interleaved_again",
    "The pairs are turned rightly, but the results are put back as two halves instead "
    "of taking turns. Scores do not notice if queries and keys both do it; weights "
    "loaded from elsewhere do.",
)
def _(x, positions, base=10_000.0):
    y = _turn(x, _angles(x, positions, base))
    return torch.cat((y[..., 0::2], y[..., 1::2]), -1)


@rope.fault(
    "halves_put_together_as_neighbours",
    "Two conventions are mixed: the halves are turned as pairs, and the results are put "
    "back as neighbours. Take the pairs from where they are put back.",
)
def _(x, positions, base=10_000.0):
    angles = _angles(x, positions, base)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x)


@rope.fault(
    "sine_and_cosine_exchanged",
    "Sine and cosine have changed places. At position 0 the angle is 0 and x must stay "
    "as it is: each number is multiplied by the cosine, its partner by the sine.",
)
def _(x, positions, base=10_000.0):
    angles = _angles(x, positions, base)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * sin - b * cos, a * cos + b * sin), -1).flatten(-2).to(x)


@rope.fault(
    "other_default",
    "The base is 500,000 where the caller gives none, as in Llama 3; here it is 10,000.",
)
def _(x, positions, base=500_000.0):
    return _turn(x, _angles(x, positions, base))


@rope.fault(
    "batch_taken_for_granted",
    "Positions (T,) are repeated for every row of a batch, and x need not have one: its "
    "first dimension may be time.",
)
def _(x, positions, base=10_000.0):
    if positions.dim() == 1:
        positions = positions[None].expand(x.shape[0], -1)
    return _turn(x, _angles(x, positions, base))


@rope.fault(
    "clockwise",
    "The pairs turn the wrong way, by minus the angle: the complex conjugate. Scores "
    "of a model trained like this are fine, but weights from elsewhere are not.",
)
def _(x, positions, base=10_000.0):
    return _turn(x, -_angles(x, positions, base))


@rope.fault(
    "mirrored",
    "A sign is wrong, and the pair is mirrored instead of turned. Mirrored queries and "
    "keys give scores that depend on the sum of their positions.",
)
def _(x, positions, base=10_000.0):
    angles = _angles(x, positions, base)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos + b * sin, a * sin - b * cos), -1).flatten(-2).to(x)


@rope.fault(
    "both_signs",
    "Both numbers of the pair get the same sign in front of their partner's sine. A "
    "rotation has one minus and one plus, or lengths are not kept.",
)
def _(x, positions, base=10_000.0):
    angles = _angles(x, positions, base)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos + b * sin, b * cos + a * sin), -1).flatten(-2).to(x)


@rope.fault(
    "overwritten_on_the_way",
    "The second number of each pair is computed from the first one after it was "
    "turned. Both need the pair as it was.",
)
def _(x, positions, base=10_000.0):
    angles = _angles(x, positions, base)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., 0::2], x[..., 1::2]
    a = a * cos - b * sin
    return torch.stack((a, a * sin + b * cos), -1).flatten(-2).to(x)


@rope.fault(
    "divided_by_the_frequency",
    "The position is divided by the frequency instead of multiplied. Later pairs must "
    "turn more slowly, not faster. Position 0 and the first pair do not show it.",
)
def _(x, positions, base=10_000.0):
    d_head = x.shape[-1]
    return _turn(x, _angles(x, positions, base, lambda i: 2 * i / d_head))


@rope.fault(
    "index_doubled",
    "The exponent runs twice as fast as it should. If your index already counts "
    "0, 2, 4, …, it is 2i, and the formula's 2 must not come on top; or d_head/2 stands "
    "where d_head should.",
)
def _(x, positions, base=10_000.0):
    d_head = x.shape[-1]
    return _turn(x, _angles(x, positions, base, lambda i: -4 * i / d_head))


@rope.fault(
    "index_halved",
    "The exponent is −i/d_head, half of what it should be: i counts pairs.",
)
def _(x, positions, base=10_000.0):
    d_head = x.shape[-1]
    return _turn(x, _angles(x, positions, base, lambda i: -i / d_head))


@rope.fault(
    "index_from_one",
    "The pairs are counted from 1, so even the first one turns too slowly: its angle "
    "is the position itself.",
)
def _(x, positions, base=10_000.0):
    d_head = x.shape[-1]
    return _turn(x, _angles(x, positions, base, lambda i: -2 * (i + 1) / d_head))


@rope.fault(
    "stretched_to_the_end",
    "The exponents run to −1, divided by d_head − 2, so that the slowest pair turns "
    "base times slower than the first. The formula divides by d_head.",
)
def _(x, positions, base=10_000.0):
    d_head = x.shape[-1]
    return _turn(x, _angles(x, positions, base, lambda i: -2 * i / max(d_head - 2, 1)))


@rope.fault(
    "full_turns",
    "The angle has a factor 2π too many: frequencies here are radians per position.",
)
def _(x, positions, base=10_000.0):
    return _turn(x, 2 * math.pi * _angles(x, positions, base))


@rope.fault(
    "one_further",
    "Every position is counted one higher. Scores do not notice, because only distances "
    "matter to them, but position 0 must leave x as it is.",
)
def _(x, positions, base=10_000.0):
    return _turn(x, _angles(x, positions + 1, base))


@rope.fault(
    "positions_ignored",
    "It counts 0, 1, 2, … whatever positions are handed in. With a cache the next "
    "token would always be the first.",
)
def _(x, positions, base=10_000.0):
    return _turn(x, _angles(x, torch.arange(x.shape[-2], device=x.device), base))


@rope.fault(
    "only_the_start",
    "It takes the first position and counts on from there. Positions may jump.",
)
def _(x, positions, base=10_000.0):
    count = torch.arange(x.shape[-2], device=x.device)
    return _turn(x, _angles(x, positions[..., :1] + count, base))


@rope.fault(
    "batch_lined_up_with_heads",
    "Positions (B, T) meet heads (B, H, T, …), and broadcasting, which counts from the "
    "end, lines B up with H. It crashes, or, where the two are equal, gives every head "
    "another row's positions.",
)
def _(x, positions, base=10_000.0):
    _even(x)
    pairs = torch.arange(0, x.shape[-1], 2, device=x.device)
    return _turn(x, positions[..., None].float() * base ** (-pairs / x.shape[-1]))


@rope.fault(
    "always_for_heads",
    "Positions (B, T) get one more dimension after B whatever x has. That is right for "
    "heads (B, H, T, d_head); a stream (B, T, d_head) gets a batch of batches. How many "
    "dimensions stand between B and T is a question to x.",
)
def _(x, positions, base=10_000.0):
    _even(x)
    pairs = torch.arange(0, x.shape[-1], 2, device=x.device)
    angles = positions[..., None].float() * base ** (-pairs / x.shape[-1])
    return _turn(x, angles[:, None] if positions.dim() == 2 else angles)


@rope.fault(
    "one_dimension_between",
    "Positions (B, T) get one dimension of size 1 between B and T, which is right for "
    "(B, H, T, d_head) alone. With two dimensions there, B meets the first of them.",
)
def _(x, positions, base=10_000.0):
    _even(x)
    pairs = torch.arange(0, x.shape[-1], 2, device=x.device)
    angles = positions[..., None].float() * base ** (-pairs / x.shape[-1])
    several = positions.dim() == 2 and x.dim() > 3
    return _turn(x, angles[:, None] if several else angles)


@rope.fault(
    "four_dimensions_only",
    "It reads exactly four sizes from the shape of x. Time and d_head are the last two, "
    "and any number of dimensions may stand before them, or none.",
)
def _(x, positions, base=10_000.0):
    _batch, _heads, _t, _d_head = x.shape
    return _turn(x, _angles(x, positions, base))


@rope.fault(
    "heads_for_time",
    "The positions are laid along the second dimension. That is time while x has "
    "three dimensions, but with heads time is the third: count from the end.",
)
def _(x, positions, base=10_000.0):
    if x.dim() < 4:
        return _turn(x, _angles(x, positions, base))
    return _turn(x.transpose(1, 2), _angles(x, positions, base)).transpose(1, 2)


_tables: dict = {}


@rope.fault(
    "cached_table",
    "A table of angles from an earlier call is used again although the positions have "
    "changed. Keep the frequencies if you like; the angles depend on the positions.",
)
def _(x, positions, base=10_000.0):
    key = (x.shape[-2], x.shape[-1], base)
    if key not in _tables:
        _tables[key] = _angles(x.detach(), positions, base)
    return _turn(x, _tables[key].to(x.device))


@rope.fault(
    "one_row_for_all",
    "The first row's positions are used for every row of the batch. With padding on "
    "the left the rows stand at different positions.",
)
def _(x, positions, base=10_000.0):
    positions = positions[0] if positions.dim() == 2 else positions
    return _turn(x, _angles(x, positions, base))


@rope.fault("base_ignored", "The base is 10,000 whatever is asked for.")
def _(x, positions, base=10_000.0):
    return _turn(x, _angles(x, positions, 10_000.0))


@rope.fault(
    "whole_positions",
    "Positions are rounded down to whole numbers, so that interpolated ones fall "
    "together.",
)
def _(x, positions, base=10_000.0):
    return _turn(x, _angles(x, positions.long(), base))


@rope.fault(
    "angles_in_half_precision",
    "The angle is computed in the dtype of x. In bfloat16 the whole numbers past 256 "
    "have gaps, and an angle of 3001 radians comes out as 3008: another position.",
)
def _(x, positions, base=10_000.0):
    _even(x)
    half = x.dtype in (torch.float16, torch.bfloat16)
    dtype = x.dtype if half else torch.float32
    pairs = torch.arange(0, x.shape[-1], 2, device=x.device)
    frequencies = (base ** (-pairs / x.shape[-1])).to(dtype)
    positions = positions.to(dtype)
    if positions.dim() == 2:
        positions = positions.view(len(positions), *[1] * (x.dim() - 3), -1)
    return _turn(x, positions[..., None] * frequencies)


@rope.fault(
    "angles_rounded_to_x",
    "The angle is computed in float32, but rounded to the dtype of x before the sine and "
    "the cosine are taken. In bfloat16 an angle of 3001 radians becomes 3008. Sine and "
    "cosine, which are between −1 and 1, may be rounded; the angle may not.",
)
def _(x, positions, base=10_000.0):
    half = x.dtype in (torch.float16, torch.bfloat16)
    angles = _angles(x, positions, base)
    return _turn(x, angles.to(x.dtype) if half else angles)


@rope.fault(
    "complex_needs_one_piece",
    "`view_as_complex` reads two neighbours in memory as one number, and stops where the "
    "numbers of a head lie apart: `reshape` and `unflatten` do not move them. Make x "
    "`contiguous()` first.",
)
def _(x, positions, base=10_000.0):
    angles = _angles(x, positions, base)
    x32 = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    numbers = torch.view_as_complex(x32.unflatten(-1, (-1, 2)))
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(numbers * turn).flatten(-2).to(x.dtype)


@rope.fault(
    "added",
    "The sines and cosines are added to x, as in the sinusoidal table. Here each pair is "
    "turned by its angle.",
)
def _(x, positions, base=10_000.0):
    angles = _angles(x, positions, base)
    return (x + torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)).to(x.dtype)


@rope.fault(
    "multiplied_number_by_number",
    "Each number is multiplied by one cosine or sine, and its partner has no part in it. "
    "In a turn both new numbers are made of both old ones.",
)
def _(x, positions, base=10_000.0):
    angles = _angles(x, positions, base)
    return (x * torch.stack((angles.cos(), angles.sin()), -1).flatten(-2)).to(x.dtype)


@rope.fault(
    "relative_to_the_first",
    "Positions are counted from the first one that is handed in. With a cache the next "
    "token would always be the first.",
)
def _(x, positions, base=10_000.0):
    return _turn(x, _angles(x, positions - positions[..., :1], base))


@rope.fault(
    "in_place",
    "The turned numbers are written into x itself. Whoever handed it over may need it as "
    "it was.",
)
def _(x, positions, base=10_000.0):
    return x.copy_(_turn(x, _angles(x, positions, base)))


@rope.fault(
    "odd_crash",
    "With an odd d_head one number has no partner, and the sizes do not match deep "
    "inside. Refuse it at the door, with a sentence.",
)
def _(x, positions, base=10_000.0):
    d = x.shape[-1]
    pairs = torch.arange(0, d, 2, device=x.device)
    angles = positions[..., None].float() * base ** (-pairs / d)
    if positions.dim() == 2:
        between = [1] * (x.dim() - 3)
        angles = angles.reshape(len(positions), *between, *angles.shape[1:])
    return _turn(x, angles)


@rope.fault(
    "float32_returned",
    "The result is float32 whatever came in. Computing in float32 is right; go back to "
    "the dtype of x at the end, or every layer after it runs in float32 too.",
)
def _(x, positions, base=10_000.0):
    half = x.dtype in (torch.float16, torch.bfloat16)
    return _turn(x.float() if half else x, _angles(x, positions, base))


@rope.fault(
    "odd_last_number_kept",
    "With an odd d_head the last number has no partner and is left as it is. Refuse "
    "it: half a pair carries no position.",
)
def _(x, positions, base=10_000.0):
    even = x.shape[-1] // 2 * 2
    pairs = x[..., :even]
    return torch.cat((_turn(pairs, _angles(pairs, positions, base)), x[..., even:]), -1)


@rope.fault(
    "first_half_only",
    "Only the first half of each head is turned. Some models do that on purpose; here "
    "every pair turns.",
)
def _(x, positions, base=10_000.0):
    angles = _angles(x, positions, base)
    n = angles.shape[-1]
    return _turn(
        x, torch.where(torch.arange(n, device=x.device) <= n // 2, angles, 0.0)
    )


# alibi_slopes -------------------------------------------------------------------------

slopes = Exercise("alibi_slopes", lesson="positions")


def published_slopes(n_heads):
    """The authors' rule, recursive as in their text."""
    if n_heads & (n_heads - 1) == 0:
        return [2.0 ** (-8 * (h + 1) / n_heads) for h in range(n_heads)]
    below = 1
    while 2 * below < n_heads:
        below *= 2
    return published_slopes(below) + published_slopes(2 * below)[::2][: n_heads - below]


def _compare_slopes(answer, t, n_heads):
    expected = torch.tensor(published_slopes(n_heads), dtype=torch.float64)
    actual = in_float32(t.call(answer, n_heads), t, "the tensor of slopes")
    what = f"the slopes of {n_heads} heads"
    t.close(actual, expected, what, like=expected.float(), relative=True)


@slopes.requires(
    "eight heads get 1/2, 1/4, … 1/256",
    "The first slope is also the factor from each slope to the next.",
)
def _(answer, t):
    _compare_slopes(answer, t, 8)


@slopes.requires(
    "any power of two gets 2^(−8h/n), h from 1 to n",
    "Whatever the number of heads, the last slope is 2^(−8).",
)
def _(answer, t):
    for n_heads in (4, 16, 2, 1, 64):
        _compare_slopes(answer, t, n_heads)


@slopes.requires(
    "other numbers follow the authors' rule, in its order",
    "For 12 heads: eight slopes as for 8, then the 1st, 3rd, 5th and 7th as for 16.",
)
def _(answer, t):
    for n_heads in (10, 5, 12, 6, 3, 7, 20, 112):
        _compare_slopes(answer, t, n_heads)


def _geometric(n):
    return [2 ** (-8 * h / n) for h in range(1, n + 1)]


def _below(n_heads):
    return 2 ** int(math.log2(n_heads))


def _extended(n_heads, take):
    below = _below(n_heads)
    more = take(_geometric(2 * below), n_heads - below)
    return torch.tensor(_geometric(below) + list(more)[: n_heads - below])


@slopes.fault(
    "starts_at_one",
    "The slopes start at 1, that is 2^0. They start at 2^(−8/n): count the heads from 1.",
)
def _(n_heads):
    return torch.tensor([2 ** (-8 * h / n_heads) for h in range(n_heads)])


@slopes.fault(
    "one_formula_for_all",
    "One geometric sequence is used for every number of heads. That is how the paper's "
    "formula reads, and it would do; the authors' code, which the published models use, "
    "treats numbers that are no power of two in its own way.",
)
def _(n_heads):
    return torch.tensor(_geometric(n_heads))


@slopes.fault(
    "cut_from_the_next_power",
    "The first n slopes of the next larger power of two are taken. They are all steep: "
    "no head is left that sees far.",
)
def _(n_heads):
    return torch.tensor(_geometric(2 ** math.ceil(math.log2(n_heads)))[:n_heads])


@slopes.fault(
    "extra_without_skipping",
    "The extra slopes are the first ones of the longer sequence, without skipping every "
    "second: half of them repeat slopes that are there already.",
)
def _(n_heads):
    return _extended(n_heads, lambda longer, n: longer[:n])


@slopes.fault(
    "extra_from_the_second",
    "The extra slopes start with the second of the longer sequence: these are the "
    "slopes that are there already. Start with the first.",
)
def _(n_heads):
    return _extended(n_heads, lambda longer, n: longer[1::2])


@slopes.fault(
    "extra_from_the_end",
    "The extra slopes are the last ones of the longer sequence. The rule takes them "
    "from its beginning.",
)
def _(n_heads):
    return _extended(n_heads, lambda longer, n: longer[0::2][-n:] if n else [])


@slopes.fault(
    "extra_first",
    "The extra slopes stand in front. First come those of the power of two, then the "
    "extra ones: a head's weights were trained with its slope.",
)
def _(n_heads):
    below = _below(n_heads)
    extra = _geometric(2 * below)[0::2][: n_heads - below]
    return torch.tensor(extra + _geometric(below))


@slopes.fault(
    "power_below_itself",
    "For a power of two the next smaller one is taken, and the rule for other numbers "
    "applied. A power of two is its own: for 8 heads it is 8.",
)
def _(n_heads):
    below = (
        max(_below(n_heads) // 2, 1) if n_heads == _below(n_heads) else _below(n_heads)
    )
    return torch.tensor((_geometric(below) + _geometric(2 * below)[0::2])[:n_heads])


@slopes.fault(
    "too_many",
    "The extra slopes are not cut off: with those of the power of two there are more "
    "than n_heads.",
)
def _(n_heads):
    below = _below(n_heads)
    return torch.tensor(_geometric(below) + _geometric(2 * below)[0::2])


@slopes.fault(
    "sorted",
    "The right slopes in another order: sorted. A head's weights were trained with its "
    "slope, so the order matters: first those of the power of two, then the extra ones.",
)
def _(n_heads):
    return torch.tensor(sorted(published_slopes(n_heads), reverse=True))


@slopes.fault(
    "nearest_power",
    "The nearest power of two is taken, which can be larger than the number of heads. "
    "It is the next smaller one.",
)
def _(n_heads):
    below = 2 ** round(math.log2(n_heads))
    return torch.tensor((_geometric(below) + _geometric(2 * below)[0::2])[:n_heads])


@slopes.fault(
    "halves_whatever_n",
    "Each slope is half the one before, however many heads there are. The ratio is "
    "2^(−8/n), which is a half for 8 heads only.",
)
def _(n_heads):
    return torch.tensor([0.5 ** (h + 1) for h in range(n_heads)])


@slopes.fault(
    "whole_exponents",
    "8/n is cut off to a whole number, by `//` or `int`. With more than 8 heads it is a "
    "fraction.",
)
def _(n_heads):
    return torch.tensor([2.0 ** (-(8 // n_heads) * h) for h in range(1, n_heads + 1)])


@slopes.fault("reversed", "The slopes come in reverse: the steepest is head 0's.")
def _(n_heads):
    return torch.tensor(published_slopes(n_heads)[::-1])


@slopes.fault(
    "negative",
    "The slopes are positive numbers; it is the bias that is negative.",
)
def _(n_heads):
    return -torch.tensor(published_slopes(n_heads))


@slopes.fault(
    "evenly_spaced",
    "The slopes are evenly spaced. They fall by a constant factor, so that some heads "
    "see near and others far.",
)
def _(n_heads):
    first = 2 ** (-8 / n_heads)
    return torch.linspace(first, 2**-8, n_heads)


@slopes.fault(
    "natural_exponential",
    "The powers are of e where they should be of 2.",
)
def _(n_heads):
    return torch.tensor([math.exp(-8 * h / n_heads) for h in range(1, n_heads + 1)])


@slopes.fault(
    "shaped_for_broadcasting",
    "The slopes come as (n_heads, 1, 1). Return (n_heads,); whoever needs more "
    "dimensions adds them.",
)
def _(n_heads):
    return torch.tensor(published_slopes(n_heads))[:, None, None]


# alibi_bias ---------------------------------------------------------------------------

bias = Exercise("alibi_bias", lesson="positions")


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


def _compare_bias(answer, t, n_heads, t_q, t_k):
    actual = in_float32(
        t.call(_without_later_keys(answer), n_heads, t_q, t_k), t, "the bias"
    )
    expected = penalties(n_heads, t_q, t_k)
    t.close(actual, expected, "the bias", like=expected.float())


@bias.requires(
    "keys at or before a query get −slope · distance, 0 on the diagonal",
    "Write one head's rows for three positions: 0, then −s and 0, then −2s, −s and 0.",
)
def _(answer, t):
    _compare_bias(answer, t, 8, 5, 5)
    _compare_bias(answer, t, 2, 3, 3)


@bias.requires(
    "with fewer queries than keys, the queries are the last positions",
    "The last query stands at the last key: its distance there is 0.",
)
def _(answer, t):
    for n_heads, t_q, t_k in ((4, 3, 7), (2, 1, 6), (8, 5, 6)):
        _compare_bias(answer, t, n_heads, t_q, t_k)


@bias.requires("numbers of heads that are no power of two work too")
def _(answer, t):
    _compare_bias(answer, t, 6, 4, 5)
    _compare_bias(answer, t, 1, 2, 2)


@bias.requires("distances in the thousands stay exact")
def _(answer, t):
    actual = t.call(answer, 4, 1, 5001)
    expected = torch.tensor(published_slopes(4)).double()[:, None, None]
    expected = -expected * torch.arange(5000, -1, -1)
    t.close(actual, expected, "the bias", like=expected.float())


@bias.requires("more queries than keys is a ValueError that names both")
def _(answer, t):
    t.raises(
        ValueError,
        _without_later_keys(answer),
        4,
        6,
        3,
        mentions=(6, 3),
        because="Six queries, three keys",
    )


def _distance(t_q, t_k):
    if t_q > t_k:
        raise ValueError(f"{t_q} queries, {t_k} keys")
    return torch.arange(t_k - t_q, t_k)[:, None] - torch.arange(t_k)


def _steep(n_heads):
    return torch.tensor(published_slopes(n_heads))[:, None, None]


@bias.fault(
    "reward",
    "The sign is wrong: far keys get a higher score than near ones.",
)
def _(n_heads, t_q, t_k):
    return _steep(n_heads) * _distance(t_q, t_k).abs()


@bias.fault(
    "top_left",
    "The queries are taken for the first positions. They are the last: with a cache, one "
    "query stands at the end of all keys.",
)
def _(n_heads, t_q, t_k):
    _distance(t_q, t_k)
    return -_steep(n_heads) * (torch.arange(t_q)[:, None] - torch.arange(t_k)).abs()


@bias.fault(
    "top_left_signed",
    "The queries are taken for the first positions. They are the last: with a cache, one "
    "query stands at the end of all keys. As it is, keys that it may look at count as "
    "later ones, and get a reward.",
)
def _(n_heads, t_q, t_k):
    _distance(t_q, t_k)
    return _steep(n_heads) * (torch.arange(t_k) - torch.arange(t_q)[:, None])


@bias.fault(
    "counted_from_the_key",
    "slope · key position is returned. Softmax ignores what a whole row has in common, so "
    "the weights come out right; but the bias is to be 0 on the diagonal, and "
    "numbers that grow with the text lose digits in half precision.",
)
def _(n_heads, t_q, t_k):
    _distance(t_q, t_k)
    return _steep(n_heads) * torch.arange(t_k).expand(t_q, t_k)


@bias.fault(
    "from_the_last_key",
    "Distance is counted from the last key for every query, so that the diagonal is not "
    "0. Each query counts from its own position.",
)
def _(n_heads, t_q, t_k):
    _distance(t_q, t_k)
    return -_steep(n_heads) * torch.arange(t_k - 1, -1, -1).expand(t_q, t_k)


@bias.fault(
    "one_too_far",
    "Every distance is one too large: a query is at distance 0 from its own position.",
)
def _(n_heads, t_q, t_k):
    return -_steep(n_heads) * (_distance(t_q, t_k) + 1).abs()


@bias.fault(
    "heads_last",
    "The heads stand in the last dimension. Scores are (B, H, T_q, T_k), so the bias "
    "must be (H, T_q, T_k) to line up with them.",
)
def _(n_heads, t_q, t_k):
    return (-_steep(n_heads) * _distance(t_q, t_k).abs()).permute(1, 2, 0)


@bias.fault(
    "same_slope_for_all",
    "All heads have the same slope. Some are to see near, others far.",
)
def _(n_heads, t_q, t_k):
    return -_steep(n_heads)[:1] * _distance(t_q, t_k).abs().expand(n_heads, -1, -1)


@bias.fault(
    "squared",
    "The penalty grows with the square of the distance; ALiBi's is linear.",
)
def _(n_heads, t_q, t_k):
    return -_steep(n_heads) * _distance(t_q, t_k) ** 2


@bias.fault(
    "no_slopes",
    "The slopes are missing: every head gets −distance itself.",
)
def _(n_heads, t_q, t_k):
    return -_distance(t_q, t_k).abs().expand(n_heads, -1, -1).float()


@bias.fault(
    "slopes_start_at_one",
    "The slopes start at 1 instead of 2^(−8/n). Use those of your `alibi_slopes`.",
)
def _(n_heads, t_q, t_k):
    steep = torch.tensor([2.0 ** (-8 * h / n_heads) for h in range(n_heads)])
    return -steep[:, None, None] * _distance(t_q, t_k).abs()


@bias.fault(
    "one_formula_for_all",
    "For numbers of heads that are no power of two the slopes are not those of your "
    "`alibi_slopes`, but of one geometric sequence.",
)
def _(n_heads, t_q, t_k):
    return -torch.tensor(_geometric(n_heads))[:, None, None] * _distance(t_q, t_k).abs()


@bias.fault(
    "exponential",
    "This is the factor that the penalty amounts to after exp. The bias is added to "
    "scores, before the softmax.",
)
def _(n_heads, t_q, t_k):
    return torch.exp(-_steep(n_heads) * _distance(t_q, t_k).abs())


@bias.fault(
    "batch_dimension",
    "There is a dimension of size 1 in front. (n_heads, t_q, t_k) broadcasts as it is.",
)
def _(n_heads, t_q, t_k):
    return (-_steep(n_heads) * _distance(t_q, t_k).abs())[None]


@bias.fault(
    "distances_in_half_precision",
    "Distances are computed in half precision, where the whole numbers past 2,048 have "
    "gaps: neighbours get the same penalty.",
)
def _(n_heads, t_q, t_k):
    return -_steep(n_heads) * _distance(t_q, t_k).abs().half().float()


@bias.fault(
    "zero_times_infinity",
    "A 0/1 mask is multiplied by −∞, and 0 · ∞ is NaN. Later keys are the mask's "
    "business: leave any number there.",
)
def _(n_heads, t_q, t_k):
    distance = _distance(t_q, t_k)
    return -_steep(n_heads) * distance + (distance < 0) * -torch.inf


@bias.fault(
    "slopes_on_the_keys",
    "Slopes (n_heads,) times distances (t_q, t_k): broadcasting, which counts from the "
    "end, lines the heads up with the keys. The slopes need two more dimensions.",
)
def _(n_heads, t_q, t_k):
    return -torch.tensor(published_slopes(n_heads)) * _distance(t_q, t_k).abs()


@bias.fault(
    "slopes_on_the_queries",
    "Slopes (n_heads, 1) times distances (t_q, t_k): broadcasting, which counts from the "
    "end, lines the heads up with the queries. One more dimension is missing.",
)
def _(n_heads, t_q, t_k):
    return -torch.tensor(published_slopes(n_heads))[:, None] * _distance(t_q, t_k).abs()


@bias.fault(
    "heads_below_each_other",
    "The tables of the heads are joined along the queries, (n_heads · t_q, t_k). Each "
    "head has a table of its own: stack them.",
)
def _(n_heads, t_q, t_k):
    return (-_steep(n_heads) * _distance(t_q, t_k).abs()).flatten(0, 1)


@bias.fault(
    "queries_after_the_keys",
    "The queries are counted on from t_k, as if they stood behind all keys. They are the "
    "last t_q of the t_k positions.",
)
def _(n_heads, t_q, t_k):
    _distance(t_q, t_k)
    queries = torch.arange(t_k, t_k + t_q)
    return -_steep(n_heads) * (queries[:, None] - torch.arange(t_k))


@bias.fault(
    "as_many_queries_as_keys",
    "t_q is not used: there is a row for every key. Only the last t_q rows are asked for.",
)
def _(n_heads, t_q, t_k):
    _distance(t_q, t_k)
    return -_steep(n_heads) * _distance(t_k, t_k).abs()


@bias.fault(
    "more_queries_accepted",
    "More queries than keys goes through. The queries are the last of the keys' "
    "positions, so there is nothing right to return.",
)
def _(n_heads, t_q, t_k):
    distance = torch.arange(t_k - t_q, t_k)[:, None] - torch.arange(t_k)
    return -_steep(n_heads) * distance.abs()


# ntk_base -----------------------------------------------------------------------------

ntk = Exercise("ntk_base", lesson="positions")


def _compare_base(answer, t, base, factor, d_head, by_name=False):
    if by_name:
        value = t.call(answer, d_head=d_head, factor=factor, base=base)
    else:
        value = t.call(answer, base, factor, d_head)
    # The slowest pair, turned by `factor` times the position, must be where it was.
    slowest = base ** (-(d_head - 2) / d_head) / factor
    expected = slowest ** (-d_head / (d_head - 2))
    if value is None or isinstance(value, (bool, str, tuple, list, complex)):
        t.equal(value, expected)
    value = torch.as_tensor(value)
    t.true(value.dim() == 0, "It returns several numbers; one base is due.")
    t.close(
        value.double(),
        expected,
        f"the base for factor {factor:g} and d_head {d_head}",
        relative=True,
        tolerance=1e-5,
    )


@ntk.requires(
    "the base is the old one times factor^(d_head / (d_head − 2))",
    "The slowest pair has the exponent −(d_head − 2)/d_head, not −1.",
)
def _(answer, t):
    _compare_base(answer, t, 10_000.0, 8, 16)
    _compare_base(answer, t, 10_000.0, 2.0, 64)


@ntk.requires("any base, factor and even d_head from 4; factor 1 changes nothing")
def _(answer, t):
    _compare_base(answer, t, 500_000.0, 4.0, 128)
    _compare_base(answer, t, 100.0, 3.0, 4)
    _compare_base(answer, t, 10_000.0, 1.5, 6)
    _compare_base(answer, t, 10_000, 1, 32)
    _compare_base(answer, t, 300.0, 5.0, 10, by_name=True)


@ntk.requires(
    "an odd d_head, or 2, is a ValueError that names it",
    "A head of two numbers has one pair, and it is the first.",
)
def _(answer, t):
    for d_head in (2, 7):
        t.raises(
            ValueError,
            answer,
            10_000.0,
            4.0,
            d_head,
            mentions=(d_head,),
            because=f"d_head {d_head}",
        )


def _fit(d_head):
    if d_head % 2 or d_head < 4:
        raise ValueError(f"d_head {d_head}")
    return d_head


@ntk.fault(
    "exponent_one",
    "The base is multiplied by the factor alone. The slowest pair's exponent is "
    "−(d_head − 2)/d_head, not −1, so it is stretched a little too little: the factor "
    "needs an exponent that makes up for it (and one that // does not round to 1).",
)
def _(base, factor, d_head):
    _fit(d_head)
    return base * factor


@ntk.fault(
    "exponent_upside_down",
    "The exponent is upside down: (d_head − 2)/d_head.",
)
def _(base, factor, d_head):
    _fit(d_head)
    return base * factor ** ((d_head - 2) / d_head)


@ntk.fault(
    "exponent_of_pairs",
    "The exponent is made of the number of pairs, d_head/2, instead of d_head.",
)
def _(base, factor, d_head):
    pairs = _fit(d_head) // 2
    return base * factor ** (pairs / (pairs - 2)) if pairs > 2 else base


@ntk.fault(
    "exponent_two_over",
    "The exponent is 2/(d_head − 2). That is what is missing on top of one factor.",
)
def _(base, factor, d_head):
    return base * factor ** (2 / (_fit(d_head) - 2))


@ntk.fault(
    "base_to_the_power_too",
    "The exponent is applied to base · factor; it belongs to the factor alone.",
)
def _(base, factor, d_head):
    return (base * factor) ** (_fit(d_head) / (d_head - 2))


@ntk.fault(
    "divided",
    "The base becomes smaller, and every pair turns faster. A longer text needs slower "
    "turns, so a larger base.",
)
def _(base, factor, d_head):
    return base / factor ** (_fit(d_head) / (d_head - 2))


@ntk.fault("unchanged", "The base comes back as it was.")
def _(base, factor, d_head):
    _fit(d_head)
    return base


@ntk.fault(
    "factor_alone",
    "The factor on the base is returned; the base itself is due.",
)
def _(base, factor, d_head):
    return factor ** (_fit(d_head) / (d_head - 2))


@ntk.fault(
    "two_divides_by_zero",
    "With d_head = 2 the exponent divides by zero. Refuse it with a sentence.",
)
def _(base, factor, d_head):
    if d_head % 2:
        raise ValueError(f"d_head {d_head}")
    return base * factor ** (d_head / (d_head - 2))


@ntk.fault("base_ignored", "The base is 10,000 whatever is handed in.")
def _(base, factor, d_head):
    return 10_000.0 * factor ** (_fit(d_head) / (d_head - 2))


@ntk.fault(
    "one_less",
    "The exponent divides by d_head − 1. The last pair is i = d_head/2 − 1, so 2i is "
    "d_head − 2.",
)
def _(base, factor, d_head):
    return base * factor ** (_fit(d_head) / (d_head - 1))


@ntk.fault(
    "rounded",
    "The base is rounded to a whole number. It need not be one.",
)
def _(base, factor, d_head):
    return float(round(base * factor ** (_fit(d_head) / (d_head - 2))))


@ntk.fault(
    "frequency_returned",
    "This is the frequency of the slowest pair, base^(−(d_head − 2)/d_head) / factor. "
    "Solve it for the base that gives it.",
)
def _(base, factor, d_head):
    return base ** (-(_fit(d_head) - 2) / d_head) / factor


@ntk.fault(
    "two_accepted",
    "d_head = 2 goes through. Its one pair is the first, which must not be stretched, "
    "and the last, which must: refuse it.",
)
def _(base, factor, d_head):
    if d_head % 2:
        raise ValueError(f"d_head {d_head}")
    return base * factor ** (d_head / (d_head - 2)) if d_head > 2 else float(base)


@ntk.fault(
    "odd_accepted",
    "An odd d_head goes through. RoPE turns pairs.",
)
def _(base, factor, d_head):
    if d_head < 4:
        raise ValueError(f"d_head {d_head}")
    return base * factor ** (d_head / (d_head - 2))


# What must fit together ---------------------------------------------------------------

turning = Joint(
    "rope_in_multi_head",
    lesson="positions",
    parts={"rope": "positions", "MultiHeadAttention": "multi_head"},
)
D_MODEL, HEADS, KV_HEADS, D_HEAD, BATCH, TIME = 10, 6, 2, 4, 3, 5


def _module(parts, t):
    """Six query heads, two KV heads, known weights."""
    widths = {"w_q": HEADS * D_HEAD, "w_k": KV_HEADS * D_HEAD, "w_v": KV_HEADS * D_HEAD}
    weights = {
        name: probe(width, D_MODEL, seed=30 + i, scale=0.5)
        for i, (name, width) in enumerate(widths.items())
    }
    weights["w_o"] = probe(D_MODEL, HEADS * D_HEAD, seed=33, scale=0.3)
    module = parts["MultiHeadAttention"](D_MODEL, HEADS, KV_HEADS, D_HEAD)
    return t.load(module, **weights), weights


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


def _compare_turning(parts, t, positions):
    module, weights = _module(parts, t)
    x = probe(BATCH, TIME, D_MODEL, seed=40)
    mask = torch.ones(TIME, TIME, dtype=torch.bool).tril()

    def rotate(heads):
        return parts["rope"](heads, positions)

    actual = t.call(module, x, mask=mask, rotate=rotate)
    expected = _by_hand(x, weights, mask, positions)
    t.close(actual, expected, "the attention output", like=x)


@turning.requires(
    "queries and keys are turned as heads (B, H, T, d_head), by their place in time",
    "`rotate` gets queries and keys after the split into heads, and before the scores.",
)
def _(parts, t):
    _compare_turning(parts, t, torch.arange(TIME))


@turning.requires("moving the whole text by 50 positions changes no output")
def _(parts, t):
    _compare_turning(parts, t, torch.arange(TIME) + 50)


@turning.requires(
    "each row of the batch may have positions of its own, whatever the head",
    "`rope` has to put the heads between B and T of its positions.",
)
def _(parts, t):
    positions = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [7, 9, 10, 11, 30]])
    _compare_turning(parts, t, positions)


class _MultiHead(nn.Module):
    """Multi-head attention whose order of steps a fault can change."""

    def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
        super().__init__()
        self.heads, self.kv_heads = n_heads, n_kv_heads or n_heads
        d_head = d_head or d_model // n_heads
        self.w_q = nn.Linear(d_model, n_heads * d_head, bias=False)
        self.w_k = nn.Linear(d_model, self.kv_heads * d_head, bias=False)
        self.w_v = nn.Linear(d_model, self.kv_heads * d_head, bias=False)
        self.w_o = nn.Linear(n_heads * d_head, d_model, bias=False)

    def forward(self, x, mask=None, rotate=None):
        q, k, v = self.w_q(x), self.w_k(x), self.w_v(x)
        return self.finish(*self.turned(q, k, v, rotate or (lambda heads: heads)), mask)

    def split(self, y):
        n_heads = self.heads if y.shape[-1] == self.w_q.out_features else self.kv_heads
        return y.unflatten(-1, (n_heads, -1)).transpose(1, 2)

    def turned(self, q, k, v, rotate):
        return rotate(self.split(q)), rotate(self.split(k)), self.split(v)

    def finish(self, q, k, v, mask):
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.w_o(out.transpose(1, 2).flatten(2))


class _BeforeTheSplit(_MultiHead):
    def turned(self, q, k, v, rotate):
        return self.split(rotate(q)), self.split(rotate(k)), self.split(v)


class _AlongHeads(_MultiHead):
    def turned(self, q, k, v, rotate):
        q, k, v = (self.split(y) for y in (q, k, v))
        q, k = (rotate(y.transpose(1, 2)).transpose(1, 2) for y in (q, k))
        return q, k, v


class _ValuesToo(_MultiHead):
    def turned(self, q, k, v, rotate):
        return tuple(rotate(self.split(y)) for y in (q, k, v))


class _QueriesOnly(_MultiHead):
    def turned(self, q, k, v, rotate):
        return rotate(self.split(q)), self.split(k), self.split(v)


class _KeysOnly(_MultiHead):
    def turned(self, q, k, v, rotate):
        return self.split(q), rotate(self.split(k)), self.split(v)


class _StreamTurned(_MultiHead):
    def forward(self, x, mask=None, rotate=None):
        return super().forward(rotate(x) if rotate else x, mask)


class _NeverCalled(_MultiHead):
    def turned(self, q, k, v, rotate):
        return tuple(self.split(y) for y in (q, k, v))


class _Twice(_MultiHead):
    def turned(self, q, k, v, rotate):
        q, k = rotate(self.split(q)), rotate(self.split(k))
        return rotate(q), rotate(k), self.split(v)


turning.fault(
    "before_the_split",
    "`MultiHeadAttention` turns queries and keys before they are split into heads. RoPE "
    "then takes all heads for one wide one, and every head but the first gets "
    "frequencies that are not its own: split first, then turn.",
    {"MultiHeadAttention": _BeforeTheSplit},
)
turning.fault(
    "along_heads",
    "`MultiHeadAttention` hands over (B, T, H, d_head), and `rope` lays its positions "
    "along the heads. Hand over (B, H, T, d_head): time stands before d_head.",
    {"MultiHeadAttention": _AlongHeads},
)
turning.fault(
    "values_too",
    "`MultiHeadAttention` turns the values as well. Position is for the scores; a turned "
    "value brings its absolute position into the output.",
    {"MultiHeadAttention": _ValuesToo},
)
turning.fault(
    "queries_only",
    "`MultiHeadAttention` turns the queries and forgets the keys. Then scores depend on "
    "the query's position instead of on the distance.",
    {"MultiHeadAttention": _QueriesOnly},
)
turning.fault(
    "keys_only",
    "`MultiHeadAttention` turns the keys and forgets the queries. Then scores depend on "
    "the key's position instead of on the distance.",
    {"MultiHeadAttention": _KeysOnly},
)
turning.fault(
    "stream_turned",
    "`MultiHeadAttention` turns the stream before the projections. Queries and keys are "
    "turned, after the split into heads; the values come from the stream as it is.",
    {"MultiHeadAttention": _StreamTurned},
)
turning.fault(
    "never_called",
    "`MultiHeadAttention` takes `rotate` and never calls it: there are no positions.",
    {"MultiHeadAttention": _NeverCalled},
)
turning.fault(
    "twice",
    "`MultiHeadAttention` turns queries and keys twice, as if every distance were "
    "doubled.",
    {"MultiHeadAttention": _Twice},
)


def _rope_of_three_dimensions(x, positions, base=10_000.0):
    return _turn(
        x, _angles(x, positions[0] if positions.dim() == 2 else positions, base)
    )


turning.fault(
    "rope_of_one_row",
    "`rope` gives every row of the batch the first row's positions. Where rows are "
    "padded on the left, theirs differ.",
    {"rope": _rope_of_three_dimensions},
)

biased = Joint(
    "alibi_in_attention",
    lesson="positions",
    parts={"softmax": "start", "causal_mask": "attention", "alibi_bias": "positions"},
)


def _compare_biased(parts, t, b, h, t_q, t_k):
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
    t.close(t.call(weights, q, k), torch.softmax(scores, -1), "the weights", like=q)


@biased.requires(
    "scores (B, H, T, T) take the bias head by head, and the mask hides what comes later",
    "Scores are (B, H, T_q, T_k), the bias (H, T_q, T_k), the mask (T_q, T_k).",
)
def _(parts, t):
    _compare_biased(parts, t, 2, 4, 5, 5)


@biased.requires(
    "with fewer queries than keys, mask and bias mean the same positions",
    "Both take the queries for the last positions: print both for 2 queries and 4 keys.",
)
def _(parts, t):
    _compare_biased(parts, t, 2, 4, 3, 7)
    _compare_biased(parts, t, 3, 6, 1, 5)


def _hides_what_is_seen(t_q, t_k=None):
    t_k = t_q if t_k is None else t_k
    return ~torch.ones(t_q, t_k, dtype=torch.bool).tril(t_k - t_q)


def _first_queries(t_q, t_k=None):
    return torch.ones(t_q, t_q if t_k is None else t_k, dtype=torch.bool).tril()


biased.fault(
    "mask_from_the_top_left",
    "`causal_mask` takes the queries for the first positions, `alibi_bias` for the last. "
    "With one query and many keys the mask leaves it one key, the farthest.",
    {"causal_mask": _first_queries},
)
biased.fault(
    "bias_from_the_top_left",
    "`alibi_bias` takes the queries for the first positions, `causal_mask` for the last: "
    "the nearest keys are taken for future ones, and pay the most.",
    {
        "alibi_bias": lambda n_heads, t_q, t_k: (
            -_steep(n_heads) * (torch.arange(t_q)[:, None] - torch.arange(t_k)).abs()
        )
    },
)
biased.fault(
    "mask_the_other_way_round",
    "`causal_mask` says True where a query may not look; here True means that it may.",
    {"causal_mask": _hides_what_is_seen},
)
biased.fault(
    "bias_with_heads_last",
    "`alibi_bias` has its heads last, (T_q, T_k, H), where scores are (B, H, T_q, T_k).",
    {
        "alibi_bias": lambda n_heads, t_q, t_k: (
            -_steep(n_heads) * _distance(t_q, t_k).abs()
        ).permute(1, 2, 0)
    },
)
biased.fault(
    "bias_of_one_head",
    "`alibi_bias` gives one bias for all heads, (T_q, T_k). It broadcasts without a "
    "word, and every head sees equally far.",
    {
        "alibi_bias": lambda n_heads, t_q, t_k: (
            -_steep(n_heads) * _distance(t_q, t_k).abs()
        )[0]
    },
)

stretched = Joint(
    "ntk_in_rope",
    lesson="positions",
    parts={"rope": "positions", "ntk_base": "positions"},
)


@stretched.requires(
    "with the NTK base the first pair turns as before, and the slowest `factor` times "
    "slower",
    "The slowest pair at position 8 · factor must stand where it stood at 8.",
)
def _(parts, t):
    for d_head, factor in ((8, 4.0), (16, 2.0)):
        x, positions = probe(2, 6, d_head, seed=60), torch.arange(6) * 5

        def with_ntk(x, positions, factor=factor, d_head=d_head):
            base = parts["ntk_base"](10_000.0, factor, d_head)
            return parts["rope"](x, positions, base=base)

        slow, fast = turned(x, positions / factor), turned(x, positions)
        actual = t.call(with_ntk, x, positions)
        t.close(actual[..., :2], fast[..., :2], "the first pair", like=x)
        t.close(actual[..., -2:], slow[..., -2:], "the slowest pair", tolerance=2e-6)


stretched.fault(
    "factor_alone",
    "`ntk_base` multiplies the base by the factor alone. In `rope` the slowest pair's "
    "exponent is −(d_head − 2)/d_head, so it is stretched by less than the factor.",
    {"ntk_base": lambda base, factor, d_head: base * factor},
)
stretched.fault(
    "base_ignored",
    "`rope` takes a base and uses 10,000 all the same: stretching it does nothing.",
    {"rope": lambda x, positions, base=10_000.0: turned(x, positions).to(x)},
)


def _exponents_to_one(x, positions, base=10_000.0):
    d_head = x.shape[-1]
    return _turn(x, _angles(x, positions, base, lambda i: -2 * i / (d_head - 2)))


stretched.fault(
    "exponents_to_one",
    "`rope` spreads its exponents over d_head − 2, `ntk_base` counts on d_head: the "
    "slowest pair is stretched by more than the factor.",
    {"rope": _exponents_to_one},
)
