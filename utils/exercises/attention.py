"""Lesson 02: attention weights, attention, masks, and a head of self-attention."""

import math
from itertools import product

import torch
import torch.nn.functional as F
from torch import nn

from utils.check.case import in_float64
from utils.check.exercise import Exercise
from utils.probe import probe, probe_ids, strided

weights = Exercise("attention_weights", lesson="attention")
attend = Exercise("attention", lesson="attention")
causal = Exercise("causal_mask", lesson="attention")
padding = Exercise("padding_mask", lesson="attention")
layer = Exercise("SelfAttention", lesson="attention")


# What is right, computed slowly -------------------------------------------------------


def slow_weights(q, k, mask=None):
    """One query at a time: softmax over the keys that it may look at, zeros else."""
    size = (*q.shape[:-1], k.shape[-2])
    allowed = torch.ones(size, dtype=torch.bool) if mask is None else mask.expand(size)
    rows = []
    for at in product(*map(range, q.shape[:-1])):
        scores = (k[at[:-1]] * q[at]).sum(-1) / math.sqrt(q.shape[-1])  # T_k
        looked = allowed[at].nonzero().flatten()
        row = torch.zeros_like(scores)
        if len(looked):
            row = row.index_put((looked,), torch.softmax(scores[looked], dim=0))
        rows.append(row)
    return torch.stack(rows).reshape(size)


def slow_attention(q, k, v, mask=None):
    return slow_weights(q, k, mask) @ v


def slow_causal(t_q, t_k):
    """Row = query, column = key, the queries being the last of the positions."""
    return torch.tensor([[j <= i + t_k - t_q for j in range(t_k)] for i in range(t_q)])


# Inputs -------------------------------------------------------------------------------


def queries_and_keys(*lead, t_q, t_k, d_head, seed=0, dtype=torch.float32):
    return (
        probe(*lead, t_q, d_head, seed=seed, dtype=dtype),
        probe(*lead, t_k, d_head, seed=seed + 1, dtype=dtype),
    )


def some_mask(*shape, seed=0):
    """About half of the keys, and at least one, for every query."""
    mask = probe_ids(*shape, below=2, seed=seed).bool()
    rows = mask.view(-1, shape[-1])
    rows[torch.arange(len(rows)), torch.arange(len(rows)) % shape[-1]] = True
    return mask


def whole(*shape, seed=0, size=50):
    """Whole numbers, so that scores at d_head 16 have no rounding error at all."""
    return probe(*shape, seed=seed, scale=size).round()


def at_level(level, *lead, t_q, t_k, seed=0):
    """Queries and keys at d_head 16 whose scores all lie near `level`."""
    q = whole(*lead, t_q, 16, seed=seed, size=1)
    k = whole(*lead, t_k, 16, seed=seed + 1, size=1)
    q[..., 0], k[..., 0] = 200.0, level / 50.0  # the root is 4, so 200·level/50/4
    return q, k


HIDDEN_LEVELS = ((0, 10_000), (-30_000, 0), (-30_000, 30_000))


def one_hidden(visible, hidden):
    """Scores near `visible`, but near `hidden` at key 2, which the mask hides."""
    q, k = at_level(visible, 2, t_q=4, t_k=5, seed=16)
    k[:, 2, 0] = hidden / 50.0
    mask = some_mask(4, 5, seed=5)
    mask[:, 2], mask[2, 3] = False, True
    return q, k, mask


def blind_rows(mask):
    """The mask with two of its queries looking at nothing."""
    mask = mask.clone()
    mask[..., 1, :] = False
    mask[0, ..., -1, :] = False
    return mask


def roughly(t, answer, oracle, *args, tolerance):
    """For inputs at which right formulas differ by more than a rounding of the result.

    At scores of 10,000 the scores themselves are rounded to a thousandth.
    """
    expected = oracle(*in_float64(args))
    t.close(t.call(answer, *args), expected, like=args[0], tolerance=tolerance)


# Attention weights, and attention by the same requirements ----------------------------


@weights.requires(
    "each query's weights are softmax over the keys of q·k divided by the root of "
    "d_head",
    "Do it for one query and two keys on paper. Which dimension of q meets which of k "
    "in the product, counted from the end? Which numbers should sum to 1? And what is "
    "`mask` when nobody hands one in?",
)
def _(answer, t):
    t.agrees(answer, slow_weights, *queries_and_keys(t_q=3, t_k=5, d_head=7))
    t.agrees(answer, slow_weights, *queries_and_keys(t_q=5, t_k=2, d_head=3, seed=2))
    t.agrees(answer, slow_weights, *queries_and_keys(t_q=1, t_k=3, d_head=64, seed=4))


@weights.requires(
    "batches and heads in front are each treated by themselves",
    "Two, three or four dimensions may come in, so count them from the end.",
)
def _(answer, t):
    one_head = queries_and_keys(3, t_q=4, t_k=5, d_head=7, seed=6)
    t.agrees(answer, slow_weights, *one_head)
    heads = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=8)
    t.agrees(answer, slow_weights, *heads)
    t.agrees(answer, slow_weights, *queries_and_keys(2, 5, t_q=3, t_k=3, d_head=3))


@weights.requires(
    "scores of ±10,000 give no overflow",
    "Lesson 00: an exponential needs the row's maximum subtracted first.",
)
def _(answer, t):
    q, k = whole(2, 4, 16), whole(2, 5, 16, seed=1)
    roughly(t, answer, slow_weights, q, k, tolerance=0.01)
    for level in (10_000, -10_000):
        q, k = at_level(level, 2, t_q=4, t_k=5, seed=2)
        roughly(t, answer, slow_weights, q, k, tolerance=0.01)


@weights.requires(
    "with a mask, a query's weights are softmax over the keys where the mask is True, "
    "and 0 elsewhere",
    "What would a score have to be, so that its weight comes out as exactly 0?",
)
def _(answer, t):
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=10)
    t.agrees(answer, slow_weights, q, k, some_mask(4, 5))
    q, k = queries_and_keys(t_q=4, t_k=4, d_head=3, seed=12)
    t.agrees(answer, slow_weights, q, k, mask=torch.ones(4, 4).tril().bool())


@weights.requires("masks of fewer or smaller dimensions are broadcast")
def _(answer, t):
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=14)
    for i, size in enumerate(((2, 1, 1, 5), (2, 1, 4, 5), (2, 3, 4, 5), (1, 5))):
        t.agrees(answer, slow_weights, q, k, some_mask(*size, seed=i))


@weights.requires(
    "a key that the mask hides changes nothing, however large its score",
    "Is the hidden key out before the softmax divides, and is the number that stands "
    "for it below every score?",
)
def _(answer, t):
    for visible, hidden in HIDDEN_LEVELS:
        q, k, mask = one_hidden(visible, hidden)
        roughly(t, answer, slow_weights, q, k, mask, tolerance=0.01)


@weights.requires(
    "a query that may look at nothing gets zeros, and the others keep their weights",
    "What does your softmax make of a row of nothing but hidden keys? Put something in "
    "order after it.",
)
def _(answer, t):
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=18)
    t.agrees(answer, slow_weights, q, k, blind_rows(some_mask(2, 1, 4, 5, seed=6)))
    empty = torch.tensor([True, False]).view(2, 1, 1, 1)
    t.agrees(answer, slow_weights, q, k, empty)


@weights.requires(
    "the gradients are right, and finite for a query that may look at nothing too",
    "A gradient of zeros: is there a `detach()` or a `torch.no_grad()`? NaN: one that is "
    "replaced after the softmax can still come back through the gradient. Which "
    "operation lets no gradient through to what it overwrites?",
)
def _(answer, t):
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=20)
    found = t.call(answer, q.clone().requires_grad_(), k.clone().requires_grad_())
    t.is_tensor(found)
    t.true(
        found.requires_grad,
        "No gradient flows through it: a `detach()`, `.data`, `.item()` or "
        "`torch.no_grad()` cuts the graph.",
    )
    t.gradients_agree(answer, slow_weights, q, k)
    t.gradients_agree(answer, slow_weights, q, k, some_mask(2, 1, 4, 5, seed=7))
    mask = blind_rows(some_mask(2, 1, 4, 5, seed=8))
    t.gradients_agree(answer, slow_weights, q, k, mask)


@weights.requires(
    "float64, float16, bfloat16 and memory that is not contiguous work too",
    "Return the dtype of q. A constant that suits float32 may not exist in float16.",
)
def _(answer, t):
    mask = some_mask(2, 1, 4, 5, seed=9)
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=21, dtype=torch.float64)
    roughly(t, answer, slow_weights, q, k, mask, tolerance=1e-5)
    for dtype in (torch.float16, torch.bfloat16):
        q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=22, dtype=dtype)
        t.agrees(answer, slow_weights, q, k)
        t.agrees(answer, slow_weights, q, k, mask)
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=24)
    t.agrees(answer, slow_weights, strided(q), strided(k), mask)
    turned = probe(2, 4, 3, 7, seed=26).transpose(1, 2)
    t.agrees(answer, slow_weights, turned, k, mask)


@weights.requires("it creates nothing on another device")
def _(answer, t):
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=20)
    t.any_device(answer, q, k)
    t.any_device(answer, q, k, some_mask(4, 5))


def values(*lead, t_k, d_v, seed=50, dtype=torch.float32):
    return probe(*lead, t_k, d_v, seed=seed, dtype=dtype)


@attend.requires(
    "each query gets the values averaged by its attention weights",
    "Shapes: weights (T_q, T_k), values (T_k, d_v), result (T_q, d_v). The scores are "
    "those of the exercise before, and `mask` may be None.",
)
def _(answer, t):
    q, k = queries_and_keys(t_q=3, t_k=5, d_head=7)
    t.agrees(answer, F.scaled_dot_product_attention, q, k, values(t_k=5, d_v=3))
    q, k = queries_and_keys(t_q=5, t_k=2, d_head=3, seed=2)
    t.agrees(answer, F.scaled_dot_product_attention, q, k, values(t_k=2, d_v=6))
    q, k = queries_and_keys(t_q=1, t_k=3, d_head=64, seed=4)
    t.agrees(answer, F.scaled_dot_product_attention, q, k, values(t_k=3, d_v=2))


@attend.requires(
    "batches and heads in front are each treated by themselves",
    "Two, three or four dimensions may come in, so count them from the end.",
)
def _(answer, t):
    oracle = F.scaled_dot_product_attention
    q, k = queries_and_keys(3, t_q=4, t_k=5, d_head=7, seed=6)
    t.agrees(answer, oracle, q, k, values(3, t_k=5, d_v=6))
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=8)
    t.agrees(answer, oracle, q, k, values(2, 3, t_k=5, d_v=6))
    q, k = queries_and_keys(2, 5, t_q=3, t_k=3, d_head=3, seed=10)
    t.agrees(answer, oracle, q, k, values(2, 5, t_k=3, d_v=3))


@attend.requires(
    "scores of ±10,000 give no overflow",
    "Lesson 00: an exponential needs the row's maximum subtracted first.",
)
def _(answer, t):
    v = values(2, t_k=5, d_v=3)
    q, k = whole(2, 4, 16), whole(2, 5, 16, seed=1)
    roughly(t, answer, slow_attention, q, k, v, tolerance=0.01)
    for level in (10_000, -10_000):
        q, k = at_level(level, 2, t_q=4, t_k=5, seed=2)
        roughly(t, answer, slow_attention, q, k, v, tolerance=0.01)


@attend.requires(
    "with a mask, the average is over the values where the mask is True",
    "The mask belongs to the weights: hand it on.",
)
def _(answer, t):
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=10)
    v = values(2, 3, t_k=5, d_v=6)
    for i, size in enumerate(((4, 5), (2, 1, 1, 5), (2, 1, 4, 5), (2, 3, 4, 5))):
        t.agrees(answer, slow_attention, q, k, v, some_mask(*size, seed=i))
    q, k = queries_and_keys(t_q=4, t_k=4, d_head=3, seed=12)
    mask = torch.ones(4, 4).tril().bool()
    t.agrees(answer, slow_attention, q, k, values(t_k=4, d_v=2), mask=mask)


@attend.requires(
    "a key that the mask hides changes nothing, however large its score",
    "Is the hidden key out before the softmax divides, and is the number that stands "
    "for it below every score?",
)
def _(answer, t):
    for visible, hidden in HIDDEN_LEVELS:
        q, k, mask = one_hidden(visible, hidden)
        v = values(2, t_k=5, d_v=3)
        roughly(t, answer, slow_attention, q, k, v, mask, tolerance=0.01)


@attend.requires(
    "a query that may look at nothing gets zeros, and the others keep their average",
    "What do your weights say for a row of nothing but hidden keys?",
)
def _(answer, t):
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=18)
    v = values(2, 3, t_k=5, d_v=6)
    t.agrees(answer, slow_attention, q, k, v, blind_rows(some_mask(2, 1, 4, 5, seed=6)))
    empty = torch.tensor([True, False]).view(2, 1, 1, 1)
    t.agrees(answer, slow_attention, q, k, v, empty)


@attend.requires(
    "the gradients of q, k and v are right, and finite for a query that may look at "
    "nothing too",
    "A gradient of zeros: is there a `detach()` or a `torch.no_grad()`? NaN: one that is "
    "replaced after the softmax can still come back through the gradient.",
)
def _(answer, t):
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=20)
    v = values(2, 3, t_k=5, d_v=6)
    t.gradients_agree(answer, slow_attention, q, k, v)
    mask = blind_rows(some_mask(2, 1, 4, 5, seed=8))
    t.gradients_agree(answer, slow_attention, q, k, v, mask)


@attend.requires(
    "float64, float16, bfloat16 and memory that is not contiguous work too",
    "Return the dtype that came in. A constant that suits float32 may not exist in "
    "float16.",
)
def _(answer, t):
    mask = some_mask(2, 1, 4, 5, seed=9)
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=21, dtype=torch.float64)
    v = values(2, 3, t_k=5, d_v=6, dtype=torch.float64)
    roughly(t, answer, slow_attention, q, k, v, mask, tolerance=1e-5)
    for dtype in (torch.float16, torch.bfloat16):
        q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=22, dtype=dtype)
        v = values(2, 3, t_k=5, d_v=6, dtype=dtype)
        t.agrees(answer, slow_attention, q, k, v)
        t.agrees(answer, slow_attention, q, k, v, mask)
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=24)
    v = values(2, 3, t_k=5, d_v=6)
    t.agrees(answer, slow_attention, strided(q), strided(k), strided(v), mask)
    turned = probe(2, 5, 3, 6, seed=26).transpose(1, 2)
    t.agrees(answer, slow_attention, q, k, turned, mask)


@attend.requires("it creates nothing on another device")
def _(answer, t):
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=20)
    v = values(2, 3, t_k=5, d_v=6)
    t.any_device(answer, q, k, v)
    t.any_device(answer, q, k, v, some_mask(4, 5))


# Wrong weights, which make wrong attention too ----------------------------------------
#
# The faults that show late come first: where two give the same results under the
# requirement that failed, the engine takes the first.


def scores_of(q, k, divisor=None):
    scores = q @ k.transpose(-2, -1)
    return scores / (math.sqrt(q.shape[-1]) if divisor is None else divisor)


def masked_softmax(scores, mask=None, dim=-1):
    if mask is None:
        return torch.softmax(scores, dim)
    filled = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(filled, dim).masked_fill(~mask, 0)


def wrong_weights(name, sentence, in_attention=""):
    """Adds a fault of the weights to both exercises.

    in_attention: what else to say to those who write `attention`.
    """

    def add(wrong):
        weights.fault(name, sentence, wrong)

        def attention(q, k, v, mask=None):
            return wrong(q, k, mask) @ v

        attend.fault(name, f"{sentence} {in_attention}".strip(), attention)
        return wrong

    return add


@wrong_weights(
    "overwritten_in_place",
    "The result is right, but autograd cannot go back: softmax needs its own result for "
    "its gradient, and that is overwritten in place (by a method whose name ends in _, "
    "or by assigning to some elements). Make a new tensor instead.",
)
def _(q, k, mask=None):
    if mask is None:
        return torch.softmax(scores_of(q, k), -1)
    found = torch.softmax(scores_of(q, k).masked_fill(~mask, -torch.inf), -1)
    return found.masked_fill_(~mask, 0)


@wrong_weights(
    "detached",
    "The weights are cut from the graph, so queries and keys cannot be trained.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k).detach(), mask)


@wrong_weights(
    "float32_returned",
    "The result is float32 whatever came in. Computing in float32 is fine; give back "
    "the dtype of q.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q.float(), k.float()), mask)


@wrong_weights(
    "too_large_for_half_precision",
    "Hidden keys get −1e9, which float16 cannot hold: its numbers end at 65,504. −inf "
    "exists in every floating-point dtype.",
)
def _(q, k, mask=None):
    scores = scores_of(q, k)
    if mask is None:
        return torch.softmax(scores, -1)
    return torch.softmax(scores.masked_fill(~mask, -1e9), -1).masked_fill(~mask, 0)


@wrong_weights(
    "nan_in_the_gradient",
    "The result is right, but the gradient is NaN: for a row that is all −inf the "
    "softmax has made NaN on the way, and the NaN of its gradient reaches q and k "
    "through a sum or a product. What overwrites the hidden scores must cut them off.",
)
def _(q, k, mask=None):
    scores = scores_of(q, k)
    if mask is not None:
        scores = scores + torch.zeros_like(scores).masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0)


@wrong_weights(
    "nan_where_all_is_hidden",
    "A row of −inf gives NaN, and one NaN spreads to everything that is computed from "
    "it. A query that may look at nothing should get zeros.",
)
def _(q, k, mask=None):
    scores = scores_of(q, k)
    return torch.softmax(
        scores if mask is None else scores.masked_fill(~mask, -torch.inf), -1
    )


@wrong_weights(
    "finite_instead_of_infinite",
    "Hidden keys get a very negative score, such as −1e9 or the dtype's least number, "
    "in place of −inf. Where all keys are hidden these scores are equal, and the query "
    "gets the mean of everything that it may not see. It should get zeros.",
)
def _(q, k, mask=None):
    scores = scores_of(q, k)
    lowest = torch.finfo(scores.dtype).min
    return torch.softmax(
        scores if mask is None else scores.masked_fill(~mask, lowest), -1
    )


@wrong_weights(
    "keys_not_turned",
    "The product is taken of q and k as they are: `(T_q, d_head)` and `(T_k, d_head)`. "
    "A matrix product sums over the last dimension of the first and the last but one of "
    "the second, and d_head must stand at both.",
)
def _(q, k, mask=None):
    return masked_softmax(q @ k / math.sqrt(q.shape[-1]), mask)


@wrong_weights(
    "keys_reshaped",
    "The keys get the shape `(d_head, T_k)` by a reshape. That reads the same numbers "
    "in the same order, so each column holds pieces of several keys: dimensions have "
    "to be exchanged.",
)
def _(q, k, mask=None):
    turned = k.reshape(*k.shape[:-2], k.shape[-1], k.shape[-2])
    return masked_softmax(q @ turned / math.sqrt(q.shape[-1]), mask)


@wrong_weights(
    "three_dimensions_only",
    "`torch.bmm` takes exactly three dimensions. There may be two, three or four here; "
    "`@` takes any number and treats those in front as a batch.",
)
def _(q, k, mask=None):
    scores = torch.bmm(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    return masked_softmax(scores, mask)


@wrong_weights(
    "dimensions_from_the_front",
    "The dimensions to exchange are counted from the front. There may be two, three or "
    "four; the last two have fixed numbers only when counted from the end.",
)
def _(q, k, mask=None):
    return masked_softmax(q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), mask)


@wrong_weights(
    "first_two_exchanged",
    "The first two dimensions of the keys are exchanged. Without a batch these are the "
    "last two as well; with one they are not. Count from the end.",
)
def _(q, k, mask=None):
    return masked_softmax(q @ k.transpose(0, 1) / math.sqrt(q.shape[-1]), mask)


@wrong_weights(
    "rows_are_keys",
    "The rows are the keys: keys times queries gives `(T_k, T_q)`. One row a query is "
    "asked for, `(T_q, T_k)`.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(k, q), mask)


@weights.fault(
    "weights_transposed",
    "The weights are right, but lie on their side: one column a query, `(T_k, T_q)`. "
    "One row a query is asked for, `(T_q, T_k)`.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k), mask).mT


@wrong_weights(
    "none_taken_for_a_mask",
    "`mask` is None when nobody hands one in, and None cannot be inverted. Without a "
    "mask everything may be looked at: treat that case by itself.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k), ~(~mask))


@wrong_weights(
    "softmax_over_queries",
    "The softmax runs over the queries, so the weights of each key sum to 1. It is the "
    "query that shares out its attention: its row, over all keys, sums to 1.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k), mask, dim=-2)


@wrong_weights(
    "no_scaling",
    "The scores are not divided by the root of d_head. They grow with d_head, the "
    "softmax sharpens and its gradient goes away.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k, 1), mask)


@wrong_weights(
    "multiplied_by_the_root",
    "The scores are multiplied by the root of d_head. That makes large scores larger; "
    "division brings them back to the size they have at d_head = 1.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k, 1 / math.sqrt(q.shape[-1])), mask)


@wrong_weights(
    "divided_by_d_head",
    "The scores are divided by d_head, not by its root. Their variance grows like "
    "d_head, so their typical size grows like the root.",
    "Or are they divided by the root twice? `attention_weights` divides already.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k, q.shape[-1]), mask)


@wrong_weights(
    "constant_divisor",
    "The divisor is 8 whatever the width. That is right for d_head = 64 only.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k, 8), mask)


@wrong_weights(
    "root_of_d_model",
    "The divisor is the root of the width of all heads together. Each score sums over "
    "the d_head numbers of one head, so the last dimension of q alone counts.",
)
def _(q, k, mask=None):
    heads = q.shape[-3] if q.dim() > 3 else 1
    return masked_softmax(scores_of(q, k, math.sqrt(heads * q.shape[-1])), mask)


@wrong_weights(
    "root_of_the_length",
    "The divisor is the root of the number of keys. Each score sums over the d_head "
    "numbers of a vector, so it is their number that counts.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k, math.sqrt(k.shape[-2])), mask)


@wrong_weights(
    "root_of_the_number_of_queries",
    "The divisor is the root of the number of queries. Each score sums over the d_head "
    "numbers of a vector: that is the last dimension of q, counted from the end.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k, math.sqrt(q.shape[-2])), mask)


@wrong_weights(
    "cosine",
    "The vectors are brought to length 1 first, so no score is larger than 1 and no "
    "look-up can be sharp. A score is the plain product q·k over the root of d_head.",
)
def _(q, k, mask=None):
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return masked_softmax(scores_of(q, k, 1), mask)


@wrong_weights(
    "scaled_after_softmax",
    "The weights are divided by the root of d_head after the softmax, so they no "
    "longer sum to 1, and large scores have saturated it already.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k, 1), mask) / math.sqrt(q.shape[-1])


@wrong_weights(
    "no_softmax",
    "These are the scores. Softmax over the keys has yet to turn them into weights.",
)
def _(q, k, mask=None):
    scores = scores_of(q, k)
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


@wrong_weights(
    "sigmoid",
    "Each score is squashed by itself. The weights of a query compete: they sum to 1.",
)
def _(q, k, mask=None):
    gates = torch.sigmoid(scores_of(q, k))
    return gates if mask is None else gates.masked_fill(~mask, 0)


@wrong_weights(
    "softmax_over_the_batch",
    "The softmax runs over the first dimension. With a batch that is the batch, so "
    "its rows share out one sum between them.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k), mask, dim=0)


@wrong_weights(
    "softmax_dimension_from_the_front",
    "The softmax runs over dimension 1 counted from the front. That is the keys for "
    "one matrix, the queries with a batch and the heads with heads: count from the end.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k), mask, dim=1)


@wrong_weights(
    "keys_turned_round_whole",
    "`.T` reverses all dimensions of the keys, which fits two of them only. Exchange "
    "the last two, whatever stands in front.",
)
def _(q, k, mask=None):
    turned = k.permute(*range(k.dim() - 1, -1, -1))
    return masked_softmax(q @ turned / math.sqrt(q.shape[-1]), mask)


@wrong_weights(
    "no_shift",
    "The exponential is taken of the scores as they are; beyond 88 it overflows, and "
    "inf/inf is NaN. Your softmax of lesson 00 knows how to avoid that.",
)
def _(q, k, mask=None):
    exponentials = scores_of(q, k).exp()
    if mask is not None:
        exponentials = exponentials.masked_fill(~mask, 0)
    return exponentials / exponentials.sum(-1, keepdim=True)


@wrong_weights(
    "clamped",
    "The scores are cut off at a fixed size. Two large scores that differ then get "
    "the same weight.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k).clamp(-80, 80), mask)


@wrong_weights(
    "dropout_always_on",
    "Some weights are dropped at random although nobody trains. Dropout belongs into "
    "a module that can be put into eval(), and this exercise has none.",
)
def _(q, k, mask=None):
    return F.dropout(masked_softmax(scores_of(q, k), mask), 0.1)


@wrong_weights(
    "always_causal",
    "Later keys are hidden although no mask was given. Without a mask every query may "
    "look at every key; which mask applies is the caller's choice.",
)
def _(q, k, mask=None):
    if mask is None:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return masked_softmax(scores_of(q, k), mask)


@wrong_weights(
    "mask_taken_for_a_truth_value",
    "`if mask` asks whether the whole tensor is true, which a tensor of several values "
    "does not know. Ask whether there is a mask: `if mask is not None`.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k), mask if mask else None)


@wrong_weights("mask_ignored", "The mask has no effect.")
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k))


@wrong_weights(
    "mask_inverted",
    "The mask is read the other way round. Here True means “may look”; "
    "nn.MultiheadAttention means “hidden” by it, and much code follows that.",
)
def _(q, k, mask=None):
    return masked_softmax(scores_of(q, k), None if mask is None else ~mask)


@wrong_weights(
    "mask_inverted_before_softmax",
    "Before the softmax the keys that may be looked at are hidden, after it the others: "
    "one of the two reads the mask the other way round, and nothing is left. "
    "`masked_fill` overwrites where it finds True, and here True means “may look”.",
)
def _(q, k, mask=None):
    if mask is None:
        return masked_softmax(scores_of(q, k))
    found = torch.softmax(scores_of(q, k).masked_fill(mask, -torch.inf), -1)
    return found.masked_fill(~mask, 0)


@wrong_weights(
    "mask_inverted_after_softmax",
    "The hidden keys are out before the softmax, but after it the weights of those that "
    "may be looked at are overwritten. It is the others, where the mask is False, that "
    "should be 0.",
)
def _(q, k, mask=None):
    if mask is None:
        return masked_softmax(scores_of(q, k))
    found = torch.softmax(scores_of(q, k).masked_fill(~mask, -torch.inf), -1)
    return found.masked_fill(mask, 0)


@wrong_weights(
    "mask_added",
    "The mask is added to the scores as 0 and 1. A hidden key then has a score that is "
    "lower by 1, which is still a weight; it needs −inf.",
)
def _(q, k, mask=None):
    scores = scores_of(q, k)
    return torch.softmax(scores if mask is None else scores + mask, -1)


@wrong_weights(
    "hidden_scores_are_zero",
    "A hidden key gets the score 0. After the exponential that is a weight like any "
    "other, exp(0) = 1 before the division.",
)
def _(q, k, mask=None):
    scores = scores_of(q, k)
    return torch.softmax(scores if mask is None else scores * mask, -1)


@wrong_weights(
    "hidden_scores_zero_then_hidden",
    "A hidden key gets the score 0, and its weight is set to 0 after the softmax. By "
    "then it has taken its share, which is missing from the others.",
)
def _(q, k, mask=None):
    scores = scores_of(q, k)
    if mask is None:
        return torch.softmax(scores, -1)
    return torch.softmax(scores.masked_fill(~mask, 0), -1).masked_fill(~mask, 0)


@wrong_weights(
    "mask_lifted_where_all_is_hidden",
    "A query that may look at nothing is allowed to look at everything. There is no "
    "NaN then, but it gets what was hidden from it; it should get zeros.",
)
def _(q, k, mask=None):
    if mask is not None:
        mask = mask | ~mask.any(-1, keepdim=True)
    return masked_softmax(scores_of(q, k), mask)


@wrong_weights(
    "masked_after_softmax",
    "The weights are set to 0 after the softmax, and the rest no longer sums to 1. "
    "Hidden keys have to be out before the softmax divides.",
)
def _(q, k, mask=None):
    found = torch.softmax(scores_of(q, k), -1)
    return found if mask is None else found * mask


@wrong_weights(
    "renormalised_after_softmax",
    "The weights are set to 0 after the softmax and divided by their sum. Where a "
    "hidden key has the largest score by far, all others have underflowed to 0 by "
    "then, and 0/0 is NaN: hide it before the softmax.",
)
def _(q, k, mask=None):
    found = torch.softmax(scores_of(q, k), -1)
    if mask is None:
        return found
    return found * mask / (found * mask).sum(-1, keepdim=True)


@wrong_weights(
    "renormalised_with_epsilon",
    "The weights are set to 0 after the softmax and divided by their sum plus a small "
    "number. Where a hidden key has the largest score by far, all others have "
    "underflowed to 0 by then: hide it before the softmax.",
)
def _(q, k, mask=None):
    found = torch.softmax(scores_of(q, k), -1)
    if mask is None:
        return found
    return found * mask / ((found * mask).sum(-1, keepdim=True) + 1e-9)


@wrong_weights(
    "hidden_scores_of_ten_thousand",
    "Hidden keys get the score −10,000. A score that is allowed can be lower than "
    "that, and then the hidden key wins; only −inf is below everything.",
)
def _(q, k, mask=None):
    scores = scores_of(q, k)
    return torch.softmax(
        scores if mask is None else scores.masked_fill(~mask, -1e4), -1
    )


@attend.fault(
    "root_of_d_v",
    "The divisor is the root of the values' width. The scores sum over the d_head "
    "numbers of queries and keys; the values take no part in them.",
)
def _(q, k, v, mask=None):
    return masked_softmax(scores_of(q, k, math.sqrt(v.shape[-1])), mask) @ v


@attend.fault(
    "weights_returned",
    "These are the attention weights. The values have yet to be averaged by them.",
)
def _(q, k, v, mask=None):
    return masked_softmax(scores_of(q, k), mask)


@attend.fault(
    "keys_averaged",
    "The keys are averaged. They say where to look; what is handed over are the values.",
)
def _(q, k, v, mask=None):
    return masked_softmax(scores_of(q, k), mask) @ k


@attend.fault(
    "output_scaled",
    "The output is divided by the root of d_head as well. The scores have been, and an "
    "average of the values needs no scale.",
)
def _(q, k, v, mask=None):
    return masked_softmax(scores_of(q, k), mask) @ v / math.sqrt(q.shape[-1])


@attend.fault(
    "nan_replaced_in_the_output",
    "The result is right, but the gradient of v is NaN: the weights of a query that may "
    "look at nothing are NaN, and only the output is put in order. Overwrite the "
    "weights.",
)
def _(q, k, v, mask=None):
    scores = scores_of(q, k)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (torch.softmax(scores, -1) @ v).nan_to_num(0.0)


@attend.fault(
    "softmax_twice",
    "Softmax is taken of weights that have been through it already, and they come out "
    "nearly equal. `attention_weights` gives what multiplies the values.",
)
def _(q, k, v, mask=None):
    return torch.softmax(masked_softmax(scores_of(q, k), mask), -1) @ v


@attend.fault(
    "two_results",
    "It returns the output and the weights. Return the output alone.",
)
def _(q, k, v, mask=None):
    found = masked_softmax(scores_of(q, k), mask)
    return found @ v, found


@attend.fault(
    "values_not_weighted",
    "Every query gets the plain mean of the values: the weights are not used.",
)
def _(q, k, v, mask=None):
    return torch.ones_like(scores_of(q, k)) / k.shape[-2] @ v


@attend.fault(
    "hard_choice",
    "Each query gets the one value whose score is largest. Attention blends all of "
    "them, so that a gradient can reach the scores.",
)
def _(q, k, v, mask=None):
    best = masked_softmax(scores_of(q, k), mask).argmax(-1)
    return F.one_hot(best, k.shape[-2]).to(v.dtype) @ v


# The causal mask ----------------------------------------------------------------------


@causal.requires(
    "a square mask lets each query see its own position and all before it",
    "Print it and read a row: row 0 is the first query. Which keys may it see?",
)
def _(answer, t):
    for size in (4, 1, 7):
        t.equal(t.call(answer, size), slow_causal(size, size), "the mask")


@causal.requires(
    "with fewer queries than keys, the queries are the last positions",
    "The last query sees every key, however many queries there are.",
)
def _(answer, t):
    for t_q, t_k in ((4, 7), (2, 5), (1, 6), (6, 7)):
        t.equal(t.call(answer, t_q, t_k), slow_causal(t_q, t_k), "the mask")
    t.equal(t.call(answer, 3, t_k=3), slow_causal(3, 3), "the mask")


@causal.requires(
    "any length works, 2,100 keys too",
    "Is a size written into your code? Make the mask for the numbers that come in.",
)
def _(answer, t):
    t.equal(t.call(answer, 3, 2100), slow_causal(3, 2100), "the mask")


@causal.requires(
    "more queries than keys is a ValueError that names both numbers",
    "Say in the message how many of each there are: whoever reads it has a long day.",
)
def _(answer, t):
    reason = "5 queries cannot be the last of 3 positions"
    t.raises(ValueError, answer, 5, 3, mentions=(5, 3), because=reason)
    reason = "12 queries cannot be the last of 11 positions"
    t.raises(ValueError, answer, 12, t_k=11, mentions=(12, 11), because=reason)


@causal.requires(
    "no keys at all, `t_k` = 0, is not the same as no `t_k`",
    "0 counts as false in Python. When exactly is `t_k` missing?",
)
def _(answer, t):
    reason = "2 queries cannot be the last of 0 positions"
    t.raises(ValueError, answer, 2, 0, mentions=(2, 0), because=reason)


def ordered(wrong):
    """The same fault with the right error for more queries than keys."""

    def causal_mask(t_q, t_k=None):
        t_k = t_q if t_k is None else t_k
        if t_q > t_k:
            raise ValueError(f"{t_q} queries cannot be the last of {t_k} positions")
        return wrong(t_q, t_k)

    return causal_mask


def full(t_q, t_k):
    return torch.ones(t_q, t_k, dtype=torch.bool)


@causal.fault(
    "one_short_when_rectangular",
    "The rectangular mask ends one position early: a query does not see itself.",
)
@ordered
def _(t_q, t_k):
    return full(t_q, t_k).tril(max(t_k - t_q - 1, 0))


@causal.fault(
    "upper_triangle",
    "Past and future are exchanged: the first query sees everything, the last one only "
    "itself. Row = query, column = key.",
)
@ordered
def _(t_q, t_k):
    return full(t_q, t_k).triu(t_k - t_q)


@causal.fault(
    "own_position_hidden",
    "A query does not see its own position, so the first one sees nothing at all.",
)
@ordered
def _(t_q, t_k):
    return full(t_q, t_k).tril(t_k - t_q - 1)


@causal.fault(
    "sees_the_next",
    "Every query sees one position too far: the very token that it has to predict.",
)
@ordered
def _(t_q, t_k):
    return full(t_q, t_k).tril(t_k - t_q + 1)


@causal.fault(
    "inverted",
    "True stands where a query may not look. Here True means “may look”; "
    "nn.MultiheadAttention means the opposite.",
)
@ordered
def _(t_q, t_k):
    return full(t_q, t_k).triu(t_k - t_q + 1)


@causal.fault(
    "rectangle_open",
    "With fewer queries than keys nothing is hidden. Only the last query sees every "
    "key; those before it have later positions among the keys.",
)
@ordered
def _(t_q, t_k):
    return full(t_q, t_k).tril() if t_q == t_k else full(t_q, t_k)


@causal.fault("everything_allowed", "Nothing is hidden: every query sees the future.")
@ordered
def _(t_q, t_k):
    return full(t_q, t_k)


@causal.fault(
    "own_position_alone",
    "Each query sees its own position and nothing else; the past is hidden too.",
)
@ordered
def _(t_q, t_k):
    return full(t_q, t_k).tril(t_k - t_q).triu(t_k - t_q)


@causal.fault(
    "additive",
    "These are numbers to be added to the scores, 0 and −inf. This course's masks are "
    "boolean, True = may look.",
)
@ordered
def _(t_q, t_k):
    return torch.zeros(t_q, t_k).masked_fill(
        full(t_q, t_k).triu(t_k - t_q + 1), -torch.inf
    )


@causal.fault(
    "zeros_and_ones",
    "The mask holds the numbers 0 and 1. It should be boolean: a mask of numbers is "
    "added to the scores by some functions, and `~` turns 1 into −2.",
)
@ordered
def _(t_q, t_k):
    return torch.ones(t_q, t_k).tril(t_k - t_q)


@causal.fault(
    "extra_dimensions",
    "The mask has dimensions for batch and heads. It is (t_q, t_k); broadcasting does "
    "the rest.",
)
@ordered
def _(t_q, t_k):
    return full(t_q, t_k).tril(t_k - t_q)[None, None]


@causal.fault(
    "aligned_top_left",
    "The queries are taken for the first positions. With fewer queries than keys they "
    "are the last ones, so the first query already sees the keys before it.",
)
@ordered
def _(t_q, t_k):
    return full(t_q, t_k).tril()


@causal.fault(
    "keys_ignored",
    "The mask is square whatever `t_k` says.",
)
@ordered
def _(t_q, t_k):
    return full(t_q, t_q).tril()


@causal.fault(
    "shape_exchanged",
    "Rows and columns are exchanged: the shape is (t_q, t_k), one row a query.",
)
@ordered
def _(t_q, t_k):
    return full(t_k, t_q).tril()


@causal.fault(
    "offset_reversed",
    "The diagonal is moved in the wrong direction, so the first queries see nothing. "
    "Print the mask for 2 queries and 5 keys: the last row should be all True.",
)
@ordered
def _(t_q, t_k):
    return full(t_q, t_k).tril(t_q - t_k)


@causal.fault(
    "too_many_queries_accepted",
    "More queries than keys go through. The first of them would be positions before "
    "the beginning and see nothing, which nobody notices until the output is zeros.",
)
def _(t_q, t_k=None):
    t_k = t_q if t_k is None else t_k
    return full(t_q, t_k).tril(t_k - t_q)


@causal.fault(
    "zero_taken_for_missing",
    "A `t_k` of 0 is taken for a missing one, because 0 counts as false. It is missing "
    "only when it is None.",
)
def _(t_q, t_k=None):
    t_k = t_k or t_q
    if t_q > t_k:
        raise ValueError(f"{t_q} queries cannot be the last of {t_k} positions")
    return full(t_q, t_k).tril(t_k - t_q)


# The padding mask ---------------------------------------------------------------------


LENGTHS = torch.tensor([3, 5, 1])


def slow_padding(lengths, t_k):
    rows = [[[[j < n for j in range(t_k)]]] for n in lengths.tolist()]
    return torch.tensor(rows)


@padding.requires(
    "the first `lengths[b]` keys of row b may be looked at, the rest are hidden, in "
    "the shape (B, 1, 1, t_k)",
    "Which positions are real in a row with 3 tokens? Compare position and length, and "
    "look at the shapes on both sides.",
)
def _(answer, t):
    t.equal(t.call(answer, LENGTHS, 5), slow_padding(LENGTHS, 5), "the mask")
    pair = torch.tensor([2, 4])
    t.equal(t.call(answer, pair, 4), slow_padding(pair, 4), "the mask")


@padding.requires(
    "a row of length 0 and a batch of one row work, at any `t_k`",
    "Does it count on a row that is not empty, on several rows, or on some greatest "
    "`t_k`?",
)
def _(answer, t):
    sizes = ([0, 4, 7, 2], 7), ([2, 3], 6), ([4], 4), ([0], 3), ([1], 1), ([3], 2100)
    for lengths, t_k in sizes:
        lengths = torch.tensor(lengths)
        t.equal(t.call(answer, lengths, t_k), slow_padding(lengths, t_k), "the mask")
    lengths = torch.tensor([2, 3], dtype=torch.int32)
    t.equal(t.call(answer, lengths, t_k=4), slow_padding(lengths, 4), "the mask")


@padding.requires(
    "it works in attention: what stands in the padding changes nothing",
    "The mask must broadcast over heads and queries: True where the key is real.",
)
def _(answer, t):
    mask = t.call(answer, LENGTHS, 5)
    q, k = queries_and_keys(3, 2, t_q=4, t_k=5, d_head=7)
    v = values(3, 2, t_k=5, d_v=6)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    alone = F.scaled_dot_product_attention(q[:1], k[:1, :, :3], v[:1, :, :3])
    t.close(out[:1], alone, "attention with 3 real keys of 5", tolerance=1e-5)


@padding.requires("it lies on the device of `lengths`")
def _(answer, t):
    t.equal(t.call(answer, LENGTHS, 5), slow_padding(LENGTHS, 5), "the mask")
    t.any_device(answer, LENGTHS, 5)


@padding.fault(
    "one_too_many",
    "A row of 3 tokens has the positions 0, 1 and 2; position 3 is padding already.",
)
def _(lengths, t_k):
    return (torch.arange(t_k) <= lengths[:, None])[:, None, None]


@padding.fault(
    "one_too_few",
    "The last real token of every row is hidden: positions start at 0.",
)
def _(lengths, t_k):
    return (torch.arange(t_k) < lengths[:, None] - 1)[:, None, None]


@padding.fault(
    "inverted",
    "True stands on the padding. Here True means “may look”; the key_padding_mask of "
    "nn.MultiheadAttention means the opposite.",
)
def _(lengths, t_k):
    return (torch.arange(t_k) >= lengths[:, None])[:, None, None]


@padding.fault(
    "two_dimensions",
    "The shape is (B, t_k). Against scores (B, H, T_q, T_k) its rows would be taken "
    "for queries; two dimensions of size 1 make room for heads and queries.",
)
def _(lengths, t_k):
    return torch.arange(t_k) < lengths[:, None]


@padding.fault(
    "three_dimensions",
    "The shape is (B, 1, t_k). Against scores (B, H, T_q, T_k) the batch would be "
    "taken for heads; one more dimension of size 1 is missing.",
)
def _(lengths, t_k):
    return (torch.arange(t_k) < lengths[:, None])[:, None]


@padding.fault(
    "batch_in_the_wrong_place",
    "The batch stands at the third place, (1, 1, B, t_k), where queries belong.",
)
def _(lengths, t_k):
    return (torch.arange(t_k) < lengths[:, None])[None, None]


@padding.fault(
    "queries_hidden",
    "The positions lie along the queries, (B, 1, t_k, 1). What has to be hidden is the "
    "padding among the keys, the last dimension.",
)
def _(lengths, t_k):
    return (torch.arange(t_k) < lengths[:, None])[:, None, :, None]


@padding.fault(
    "queries_hidden_too",
    "The rows of padding are hidden as well, as queries. Hide keys only: what comes out "
    "of padding is ignored later, and the mask stays one row for all queries.",
)
def _(lengths, t_k):
    real = torch.arange(t_k, device=lengths.device) < lengths[:, None]
    return (real[:, :, None] & real[:, None])[:, None]


@padding.fault(
    "spread_over_queries",
    "The mask is repeated for every query, (B, 1, t_k, t_k). The number of queries is "
    "not known here and need not be: one row broadcasts to all of them.",
)
def _(lengths, t_k):
    return (torch.arange(t_k) < lengths[:, None])[:, None, None].repeat(1, 1, t_k, 1)


@padding.fault(
    "padding_on_the_left",
    "The last `lengths[b]` keys are taken for the real ones. Here padding stands at "
    "the end.",
)
def _(lengths, t_k):
    return (torch.arange(t_k) >= t_k - lengths[:, None])[:, None, None]


@padding.fault(
    "zeros_and_ones",
    "The mask holds the numbers 0 and 1. It should be boolean.",
)
def _(lengths, t_k):
    return (torch.arange(t_k) < lengths[:, None])[:, None, None].float()


@padding.fault(
    "additive",
    "These are numbers to be added to the scores, 0 and −inf. This course's masks are "
    "boolean, True = may look.",
)
def _(lengths, t_k):
    real = torch.arange(t_k) < lengths[:, None]
    return torch.zeros(real.shape).masked_fill(~real, -torch.inf)[:, None, None]


@padding.fault(
    "one_length_for_all",
    "Every row gets the length of the first. Each row of the batch has its own.",
)
def _(lengths, t_k):
    return (torch.arange(t_k) < lengths[0]).expand(len(lengths), 1, 1, t_k)


@padding.fault(
    "longest_row_decides",
    "The mask ends at the longest row. There are `t_k` keys, and all rows may be "
    "shorter than that.",
)
def _(lengths, t_k):
    longest = int(lengths.max())
    return (torch.arange(longest) < lengths[:, None])[:, None, None]


@padding.fault(
    "on_the_cpu",
    "The positions are made on the CPU whatever device `lengths` are on. On a GPU the "
    "comparison fails: pass `device=lengths.device` where you create a tensor.",
)
def _(lengths, t_k):
    return (torch.arange(t_k) < lengths[:, None])[:, None, None]


# Self-attention -----------------------------------------------------------------------


def matrices(d_model, d_head, seed=0):
    return {
        name: probe(d_head, d_model, seed=seed + i, scale=0.6)
        for i, name in enumerate(("w_q", "w_k", "w_v"))
    }


def built(answer, t, d_model=6, d_head=4, seed=60):
    """A module of the learner's with known weights, and those weights."""
    module = t.call(answer, d_model, d_head)
    t.true(
        isinstance(module, nn.Module),
        "An object of the class is no `nn.Module`.",
    )
    known = matrices(d_model, d_head, seed)
    return t.load(module, **known), known


def slow_layer(x, w_q, w_k, w_v, mask=None):
    return slow_attention(x @ w_q.mT, x @ w_k.mT, x @ w_v.mT, mask)


def layer_agrees(t, module, known, x, mask=None, by_name=False):
    if mask is None:
        actual = t.call(module, x)
    else:
        actual = t.call(module, x, mask=mask) if by_name else t.call(module, x, mask)
    doubled = {name: w.double() for name, w in known.items()}
    if mask is not None and mask.dim() == 4:
        mask = mask[:, 0]  # one head
    t.close(actual, slow_layer(x.double(), **doubled, mask=mask), like=x)


@layer.requires(
    "it has three linear layers w_q, w_k and w_v from d_model to d_head, without bias",
    "`super().__init__()` first, then three layers of their own, each an attribute of "
    "`self`. `nn.Linear` takes the width that comes in, then the width that goes out, "
    "and adds a bias unless told otherwise.",
)
def _(answer, t):
    for d_model, d_head in ((6, 4), (3, 5)):
        t.parameter_count(t.call(answer, d_model, d_head), 3 * d_model * d_head)
        built(answer, t, d_model, d_head)


@layer.requires(
    "its output is attention of x·w_q on x·w_k, averaging x·w_v",
    "Each of the three layers has its own place: who asks, who is asked, what is "
    "handed over.",
)
def _(answer, t):
    module, known = built(answer, t)
    layer_agrees(t, module, known, probe(2, 5, 6, seed=70))
    module, known = built(answer, t, 3, 5, seed=64)
    layer_agrees(t, module, known, probe(3, 4, 3, seed=71, scale=2))
    module, known = built(answer, t, 4, 4, seed=67)
    layer_agrees(t, module, known, probe(3, 2, 4, seed=72, scale=2))


@layer.requires(
    "the mask decides who may look at whom, and without one everybody may",
    "The mask is for `attention`: hand it on.",
)
def _(answer, t):
    module, known = built(answer, t)
    x = probe(2, 5, 6, seed=73)
    layer_agrees(t, module, known, x, slow_causal(5, 5))
    layer_agrees(t, module, known, x, some_mask(2, 5, 5, seed=3), by_name=True)
    layer_agrees(t, module, known, x, some_mask(2, 1, 5, seed=4))
    layer_agrees(t, module, known, x)


@layer.requires(
    "other lengths and batch sizes, other dtypes, eval() and a second call work too",
    "Nothing about one call may be kept for the next, and eval() changes nothing here.",
)
def _(answer, t):
    module, known = built(answer, t, seed=80)
    layer_agrees(t, module, known, probe(2, 5, 6, seed=74), slow_causal(5, 5))
    layer_agrees(t, module, known, probe(3, 7, 6, seed=75), slow_causal(7, 7))
    module.eval()
    layer_agrees(t, module, known, probe(2, 5, 6, seed=74), slow_causal(5, 5))
    x = probe(1, 2, 6, seed=76)
    layer_agrees(t, module, known, x)
    layer_agrees(t, module, known, x)
    actual = t.call(module.double(), x.double())
    doubled = {name: w.double() for name, w in known.items()}
    right = slow_layer(x.double(), **doubled)
    t.close(actual, right, like=x.double(), tolerance=1e-5)


@layer.requires(
    "gradients reach x and every weight, and stay finite where all is hidden",
)
def _(answer, t):
    module, known = built(answer, t, seed=83)
    mask = blind_rows(some_mask(2, 5, 5, seed=5))

    def run(x):
        return module(x, mask)

    def oracle(x):
        return slow_layer(x, **{n: w.double() for n, w in known.items()}, mask=mask)

    x = probe(2, 5, 6, seed=77)
    t.gradients_agree(run, oracle, x)
    out = t.call(module, x, mask)
    factors = probe(*out.shape, seed=78)
    names = [f"{name}.weight" for name in known]
    found = dict(module.named_parameters())
    leaves = [found.get(n, found.get(n.removesuffix(".weight"))) for n in names]
    for name, leaf in zip(names, leaves, strict=True):
        t.true(leaf.requires_grad, f"`{name}` is not trained: it requires no gradient.")
    gradients = torch.autograd.grad((out * factors).sum(), leaves, allow_unused=True)
    truth = {n: w.double().requires_grad_() for n, w in known.items()}
    expected = torch.autograd.grad(
        (slow_layer(x.double(), **truth, mask=mask) * factors).sum(),
        list(truth.values()),
    )
    for name, gradient, right in zip(names, gradients, expected, strict=True):
        t.true(gradient is not None, f"No gradient reaches `{name}`.")
        t.close(gradient, right, f"the gradient of `{name}`")


@layer.requires("a new module starts with random weights, different in each layer")
def _(answer, t):
    new = [t.call(answer, 6, 4), t.call(answer, 6, 4)]
    found = [p.detach() for module in new for p in module.parameters()]
    t.true(
        all(p.isfinite().all() and p.std() > 1e-3 for p in found),
        "Some weights all start with the same value, so they would learn the same.",
    )
    different = all(
        not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i]
    )
    t.true(different, "Two layers start with the same weights.")


@layer.requires("it creates nothing on another device")
def _(answer, t):
    module, _ = built(answer, t)
    t.any_device(module, probe(2, 5, 6))
    t.any_device(module, probe(2, 5, 6), slow_causal(5, 5))


class Head(nn.Module):
    """The right layer, for the faults to spoil."""

    def __init__(self, d_model, d_head, bias=False):
        super().__init__()
        self.d_model, self.d_head = d_model, d_head
        self.w_q = nn.Linear(d_model, d_head, bias=bias)
        self.w_k = nn.Linear(d_model, d_head, bias=bias)
        self.w_v = nn.Linear(d_model, d_head, bias=bias)

    def attend(self, q, k, v, mask):
        return masked_softmax(scores_of(q, k), mask) @ v

    def forward(self, x, mask=None):
        return self.attend(self.w_q(x), self.w_k(x), self.w_v(x), mask)


@layer.fault(
    "bias",
    "The layers have a bias. Later lessons load weights from models that have none, "
    "and count parameters.",
)
class _(Head):
    def __init__(self, d_model, d_head):
        super().__init__(d_model, d_head, bias=True)


@layer.fault(
    "output_projection",
    "There is one more layer than asked for. The output projection belongs to several "
    "heads and comes in lesson 03.",
)
class _(Head):
    def __init__(self, d_model, d_head):
        super().__init__(d_model, d_head)
        self.w_o = nn.Linear(d_head, d_model, bias=False)

    def forward(self, x, mask=None):
        return self.w_o(super().forward(x, mask))


@layer.fault(
    "shared_projection",
    "Queries and keys go through one and the same layer. Then A looks at B exactly as "
    "much as B at A, before the softmax; they need a matrix each.",
)
class _(Head):
    def __init__(self, d_model, d_head):
        super().__init__(d_model, d_head)
        self.w_k = self.w_q


@layer.fault(
    "one_projection_for_all",
    "Queries, keys and values go through one and the same layer. They need a matrix "
    "each: three times `nn.Linear(…)`, not one under three names.",
)
class _(Head):
    def __init__(self, d_model, d_head):
        super().__init__(d_model, d_head)
        self.w_k = self.w_v = self.w_q


@layer.fault(
    "no_parameters",
    "The module has no parameters, so an optimizer finds nothing to train. Each layer "
    "has to be an attribute of its own, `self.w_q = …`, made in `__init__`: layers in a "
    "list or a dict, or made in `forward`, are not found.",
)
class _(Head):
    def __init__(self, d_model, d_head):
        super().__init__(d_model, d_head)
        self.layers = [self.w_q, self.w_k, self.w_v]
        del self.w_q, self.w_k, self.w_v


@layer.fault(
    "not_initialised",
    "A layer is assigned before `super().__init__()` has been called. Call it first: it "
    "prepares what layers are registered in.",
)
class _(nn.Module):
    def __init__(self, d_model, d_head):
        self.w_q = nn.Linear(d_model, d_head, bias=False)


@layer.fault(
    "widths_exchanged",
    "The weights lie on their side. `nn.Linear` takes the width that comes in first, "
    "d_model, then d_head; a matrix of your own in `nn.Parameter` has the shape that "
    "`nn.Linear` stores, `(d_head, d_model)`.",
)
class _(Head):
    def __init__(self, d_model, d_head):
        super().__init__(d_head, d_model)


@layer.fault(
    "full_width",
    "The layers lead from d_model to d_model; the head's own width is d_head.",
)
class _(Head):
    def __init__(self, d_model, d_head):
        super().__init__(d_model, d_model)


def spoiled(name, sentence, **methods):
    layer.fault(name, sentence, type("_", (Head,), methods))


spoiled(
    "queries_and_keys_exchanged",
    "w_q makes the keys and w_k the queries. It is the query that asks: its rows are "
    "the rows of the weights.",
    forward=lambda self, x, mask=None: self.attend(
        self.w_k(x), self.w_q(x), self.w_v(x), mask
    ),
)
spoiled(
    "keys_and_values_exchanged",
    "w_k makes the values and w_v the keys.",
    forward=lambda self, x, mask=None: self.attend(
        self.w_q(x), self.w_v(x), self.w_k(x), mask
    ),
)
spoiled(
    "queries_and_values_exchanged",
    "w_q makes the values and w_v the queries.",
    forward=lambda self, x, mask=None: self.attend(
        self.w_v(x), self.w_k(x), self.w_q(x), mask
    ),
)
spoiled(
    "queries_compared_with_queries",
    "The queries are compared with themselves; w_k is not used.",
    forward=lambda self, x, mask=None: self.attend(
        self.w_q(x), self.w_q(x), self.w_v(x), mask
    ),
)
spoiled(
    "keys_averaged",
    "The keys are averaged in place of the values; w_v is not used.",
    forward=lambda self, x, mask=None: self.attend(
        self.w_q(x), self.w_k(x), self.w_k(x), mask
    ),
)
spoiled(
    "values_not_projected",
    "x itself is averaged. The values are x·w_v: what a position hands over is not "
    "all that it holds.",
    forward=lambda self, x, mask=None: self.attend(self.w_q(x), self.w_k(x), x, mask),
)
spoiled(
    "root_of_d_model",
    "The scores are divided by the root of d_model. They sum over the d_head numbers "
    "of queries and keys, so it is d_head that counts.",
    attend=lambda self, q, k, v, mask: (
        masked_softmax(scores_of(q, k, math.sqrt(self.d_model)), mask) @ v
    ),
)
spoiled(
    "root_of_the_length",
    "The scores are divided by the root of the number of positions. They sum over the "
    "d_head numbers of queries and keys, so it is d_head that counts.",
    attend=lambda self, q, k, v, mask: (
        masked_softmax(scores_of(q, k, math.sqrt(q.shape[-2])), mask) @ v
    ),
)
spoiled(
    "no_scaling",
    "The scores are not divided by the root of d_head.",
    attend=lambda self, q, k, v, mask: masked_softmax(scores_of(q, k, 1), mask) @ v,
)
spoiled(
    "scaled_twice",
    "The queries are divided by the root of d_head, and `attention` divides again.",
    attend=lambda self, q, k, v, mask: (
        masked_softmax(scores_of(q, k, self.d_head), mask) @ v
    ),
)
spoiled(
    "output_scaled",
    "The output is divided by the root of d_head. `attention` has divided the scores "
    "already, and the average of the values needs no scale.",
    attend=lambda self, q, k, v, mask: (
        masked_softmax(scores_of(q, k), mask) @ v / math.sqrt(self.d_head)
    ),
)
spoiled(
    "softmax_over_queries",
    "The softmax runs over the queries. Each query shares out its attention over the "
    "keys.",
    attend=lambda self, q, k, v, mask: masked_softmax(scores_of(q, k), mask, -2) @ v,
)
spoiled(
    "batch_and_time_exchanged",
    "Positions look at the same position of the other rows of the batch: batch and "
    "time are exchanged. Here the batch comes first.",
    attend=lambda self, q, k, v, mask: (
        masked_softmax(scores_of(q.transpose(0, 1), k.transpose(0, 1)), mask)
        @ v.transpose(0, 1)
    ).transpose(0, 1),
)
spoiled(
    "always_causal",
    "The future is hidden although no mask was given. Which mask applies is the "
    "caller's choice.",
    attend=lambda self, q, k, v, mask: (
        masked_softmax(scores_of(q, k), slow_causal(q.shape[-2], k.shape[-2])) @ v
    ),
)
spoiled(
    "weights_returned",
    "These are the attention weights. The values have yet to be averaged by them.",
    attend=lambda self, q, k, v, mask: masked_softmax(scores_of(q, k), mask),
)
spoiled(
    "mask_taken_for_a_truth_value",
    "`if mask` asks whether the whole tensor is true, which a tensor of several values "
    "does not know. Ask whether there is a mask: `if mask is not None`.",
    attend=lambda self, q, k, v, mask: (
        masked_softmax(scores_of(q, k), mask if mask else None) @ v
    ),
)
spoiled(
    "mask_ignored",
    "The mask does not reach `attention`.",
    attend=lambda self, q, k, v, mask: masked_softmax(scores_of(q, k)) @ v,
)
spoiled(
    "mask_inverted",
    "The mask is read the other way round. Here True means “may look”.",
    attend=lambda self, q, k, v, mask: (
        masked_softmax(scores_of(q, k), None if mask is None else ~mask) @ v
    ),
)
spoiled(
    "positions_masked_as_queries",
    "The mask is turned round, so that its rows are keys and its columns queries.",
    attend=lambda self, q, k, v, mask: (
        masked_softmax(
            scores_of(q, k),
            None if mask is None else (mask.mT if mask.shape[-2] > 1 else mask),
        )
        @ v
    ),
)
spoiled(
    "nan_where_all_is_hidden",
    "A position that may look at nothing gives NaN. Your `attention` gives zeros there; "
    "use it.",
    attend=lambda self, q, k, v, mask: (
        torch.softmax(
            scores_of(q, k)
            if mask is None
            else scores_of(q, k).masked_fill(~mask, -torch.inf),
            -1,
        )
        @ v
    ),
)
spoiled(
    "dropout_always_on",
    "Some weights are dropped at random, in eval() too.",
    attend=lambda self, q, k, v, mask: (
        F.dropout(masked_softmax(scores_of(q, k), mask), 0.1) @ v
    ),
)
spoiled(
    "residual",
    "x is added to the output. The residual connection comes in lesson 06, around the "
    "layer, not in it.",
    forward=lambda self, x, mask=None: x + Head.forward(self, x, mask),
)


@layer.fault(
    "mask_of_the_first_call",
    "The mask of the first call is kept and used again. Every call brings its own.",
)
class _(Head):
    kept = None

    def forward(self, x, mask=None):
        self.kept = mask if self.kept is None else self.kept
        return super().forward(x, self.kept)


@layer.fault(
    "dropout_while_training",
    "Some weights are dropped at random while training. Nobody asked for dropout.",
)
class _(Head):
    def attend(self, q, k, v, mask):
        weights = masked_softmax(scores_of(q, k), mask)
        return F.dropout(weights, 0.5, self.training) @ v


@layer.fault(
    "mask_left_out_in_eval",
    "In eval() the mask is left out. It says who may look at whom in training and after "
    "it alike.",
)
class _(Head):
    def attend(self, q, k, v, mask):
        return super().attend(q, k, v, mask if self.training else None)


@layer.fault(
    "zero_weights",
    "All weights start at zero. Then every score is 0, every value too, and no "
    "gradient leads away from there.",
)
class _(Head):
    def __init__(self, d_model, d_head):
        super().__init__(d_model, d_head)
        for p in self.parameters():
            nn.init.zeros_(p)


@layer.fault(
    "equal_weights",
    "The three layers start with one and the same matrix, so a position looks mostly "
    "at itself.",
)
class _(Head):
    def __init__(self, d_model, d_head):
        super().__init__(d_model, d_head)
        self.w_k.load_state_dict(self.w_q.state_dict())
        self.w_v.load_state_dict(self.w_q.state_dict())
