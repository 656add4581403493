"""Lesson 02: attention weights, attention, masks, and a head of self-attention."""

import math
from functools import partial
from itertools import combinations, product

import torch
from torch import nn
from torch.func import functional_call

from utils.check.exercise import Exercise
from utils.check.inputs import in_float64
from utils.probe import probe, probe_ids, strided

attention_weights = Exercise("attention_weights", lesson="attention")
attention = Exercise("attention", lesson="attention")
causal_mask = Exercise("causal_mask", lesson="attention")
padding_mask = Exercise("padding_mask", lesson="attention")
SelfAttention = Exercise("SelfAttention", lesson="attention")


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
    rows = [[j <= i + t_k - t_q for j in range(t_k)] for i in range(t_q)]
    return torch.tensor(rows, dtype=torch.bool).view(t_q, t_k)


def slow_padding(lengths, t_k):
    return torch.tensor([[[[j < n for j in range(t_k)]]] for n in lengths.tolist()])


def slow_layer(x, mask=None, *, w_q, w_k, w_v):
    return slow_attention(x @ w_q.mT, x @ w_k.mT, x @ w_v.mT, mask)


# Inputs -------------------------------------------------------------------------------


def queries_and_keys(*lead, t_q=4, t_k=5, d_head=7, seed=0, dtype=torch.float32):
    return (
        probe(*lead, t_q, d_head, seed=seed, dtype=dtype),
        probe(*lead, t_k, d_head, seed=seed + 1, dtype=dtype),
    )


def values_of(keys):
    """Values for these keys, of a width that nothing else has."""
    *lead, d_head = keys.shape
    return probe(*lead, d_head + 6, seed=50, dtype=keys.dtype)


def at_level(levels):
    """Queries and keys whose scores lie near `levels`, one for each batch row and key.

    Whole numbers at d_head 16, so that the scores have no rounding error at all.
    """
    q, k = (probe(2, n, 16, seed=n).round() for n in (4, 5))
    q[..., 0], k[..., 0] = 200.0, levels / 50  # the root is 4, so 200·level/50/4
    return q, k


def some_mask(*shape, seed=0):
    """About half of the keys, and at least one, for every query."""
    mask = probe_ids(*shape, below=2, seed=seed).bool()
    rows = mask.view(-1, shape[-1])
    rows[torch.arange(len(rows)), torch.arange(len(rows)) % shape[-1]] = True
    return mask


def blind_rows(*shape, seed=0):
    """Such a mask, with two of its queries looking at nothing."""
    mask = some_mask(*shape, seed=seed)
    mask[..., 1, :] = False
    mask[0, ..., -1, :] = False
    return mask


def roughly(case, answer, oracle, *args, tolerance):
    """For inputs at which right formulas differ by more than a rounding of the result.

    At scores of 10,000 the scores themselves are rounded to a thousandth.
    """
    expected = oracle(*in_float64(args))
    case.close(case.call(answer, *args), expected, like=args[0], tolerance=tolerance)


# Attention weights, and attention by the same requirements ----------------------------

BOTH = (
    (attention_weights, slow_weights, lambda q, k: (q, k)),
    (attention, slow_attention, lambda q, k: (q, k, values_of(k))),
)


def required(sentence, hint="", of_attention=()):
    """Decorates `test(answer, case, oracle, given)`, a requirement of both exercises.

    given: what an answer gets for queries and keys. of_attention: another sentence and
    hint there.
    """

    def add(test):
        for exercise, oracle, given in BOTH:
            other = of_attention if exercise is attention else ()
            words = other or (sentence, hint)
            exercise.requires(*words)(partial(test, oracle=oracle, given=given))

    return add


@required(
    "each query's weights are softmax over the keys of q·k divided by the root of "
    "d_head",
    "Do it for one query and two keys on paper. Which dimension of q meets which of k, "
    "counted from the end? Which numbers should sum to 1? May `mask` be None?",
    of_attention=(
        "each query gets the values averaged by its attention weights",
        "Shapes: weights (T_q, T_k), values (T_k, d_v), result (T_q, d_v). The scores "
        "are those of the exercise before, and `mask` may be None.",
    ),
)
def _(answer, case, oracle, given):
    for t_q, t_k, d_head in ((3, 5, 7), (5, 2, 3), (1, 3, 64)):
        q, k = queries_and_keys(t_q=t_q, t_k=t_k, d_head=d_head, seed=t_q)
        case.agrees(answer, oracle, *given(q, k))


@required(
    "batches and heads in front are each treated by themselves",
    "Two, three or four dimensions may come in, so count them from the end.",
)
def _(answer, case, oracle, given):
    for lead in ((3,), (2, 3), (2, 5)):
        q, k = queries_and_keys(*lead, t_k=6, seed=6)
        case.agrees(answer, oracle, *given(q, k))
    q, k = queries_and_keys(2, 5, t_q=3, t_k=3, d_head=3)
    case.agrees(answer, oracle, *given(q, k))


@required(
    "scores of ±10,000 give no overflow",
    "Lesson 00: an exponential needs the row's maximum subtracted first.",
)
def _(answer, case, oracle, given):
    levels = torch.tensor([[10_000] * 5, [-10_000] * 3 + [-9_000, -10_000]])
    q, k = at_level(levels.view(2, 5))
    roughly(case, answer, oracle, *given(q, k), tolerance=0.01)


@required(
    "with a mask (broadcast if it is smaller), softmax runs over the keys where it is "
    "True, and the other weights are 0",
    "What would a score have to be, so that its weight comes out as exactly 0?",
    of_attention=(
        "with a mask (broadcast if it is smaller), the average is over the values where "
        "it is True",
        "The mask belongs to the weights: hand it on.",
    ),
)
def _(answer, case, oracle, given):
    q, k = queries_and_keys(2, 3, seed=10)
    for size in ((4, 5), (2, 1, 1, 5), (2, 1, 4, 5), (2, 3, 4, 5), (1, 5)):
        case.agrees(answer, oracle, *given(q, k), some_mask(*size))
    q, k = queries_and_keys(t_q=4, t_k=4, d_head=3, seed=12)
    case.agrees(answer, oracle, *given(q, k), mask=slow_causal(4, 4))


@required(
    "a key that the mask hides changes nothing, however large its score",
    "Is the hidden key out before the softmax divides, and is the number that stands "
    "for it below every score?",
)
def _(answer, case, oracle, given):
    mask = some_mask(4, 5, seed=5)
    mask[:, 2], mask[2, 3] = False, True
    for visible, hidden in ((0, 10_000), (-30_000, 30_000), (-90_000, 0)):
        levels = torch.tensor([visible, visible, hidden, visible, visible])
        q, k = at_level(levels)
        roughly(case, answer, oracle, *given(q, k), mask, tolerance=0.01)


@required(
    "a query that may look at nothing gets zeros, and the others what is theirs",
    "What does your softmax make of a row of nothing but hidden keys? Put something in "
    "order after it.",
)
def _(answer, case, oracle, given):
    q, k = queries_and_keys(2, 3, seed=18)
    whole_batch_rows = torch.tensor([True, False]).view(2, 1, 1, 1)
    for mask in (blind_rows(2, 1, 4, 5, seed=6), whole_batch_rows):
        case.agrees(answer, oracle, *given(q, k), mask)


@required(
    "the gradients are right, and finite for a query that may look at nothing too",
    "NaN: one that is replaced after the softmax can still come back through the "
    "gradient. Which operation lets no gradient through to what it overwrites?",
)
def _(answer, case, oracle, given):
    q, k = queries_and_keys(2, 3, seed=20)
    case.gradients_agree(answer, oracle, *given(q, k))
    for some in (some_mask, blind_rows):
        case.gradients_agree(answer, oracle, *given(q, k), some(2, 1, 4, 5, seed=7))


@required(
    "float64, float16, bfloat16 and memory that is not contiguous work too",
    "Return the dtype that came in. A constant that suits float32 may not exist in "
    "float16.",
)
def _(answer, case, oracle, given):
    mask = some_mask(2, 1, 4, 5, seed=9)
    q, k = queries_and_keys(2, 3, seed=21, dtype=torch.float64)
    roughly(case, answer, oracle, *given(q, k), mask, tolerance=1e-5)
    for dtype in (torch.float16, torch.bfloat16):
        half = given(q.to(dtype), k.to(dtype))
        case.agrees(answer, oracle, *half)
        case.agrees(answer, oracle, *half, mask)
    q, k = q.float(), k.float()
    case.agrees(answer, oracle, *map(strided, given(q, k)), mask)
    turned = probe(2, 4, 3, 7, seed=26).transpose(1, 2)
    case.agrees(answer, oracle, *given(turned, k), mask)


@required("it creates nothing on another device")
def _(answer, case, oracle, given):
    q, k = queries_and_keys(2, 3, seed=20)
    case.any_device(answer, *given(q, k))
    case.any_device(answer, *given(q, k), some_mask(4, 5))


# Masks --------------------------------------------------------------------------------


@causal_mask.requires(
    "a square mask lets each query see its own position and all before it",
    "Print it and read a row: row 0 is the first query. Which keys may it see?",
)
def _(answer, case):
    for size in (4, 1, 7):
        case.equal(case.call(answer, size), slow_causal(size, size), "the mask")


@causal_mask.requires(
    "with fewer queries than keys, however many, the queries are the last positions",
    "The last query sees every key, however many queries there are.",
)
def _(answer, case):
    for t_q, t_k in ((4, 7), (2, 5), (1, 6), (6, 7), (3, 2100), (0, 4)):
        case.equal(case.call(answer, t_q, t_k), slow_causal(t_q, t_k), "the mask")
    case.equal(case.call(answer, 3, t_k=3), slow_causal(3, 3), "the mask")


@causal_mask.requires(
    "more queries than keys is a ValueError that names both numbers, with 0 keys too"
)
def _(answer, case):
    for t_q, t_k in ((5, 3), (12, 11), (2, 0)):
        reason = f"{t_q} queries cannot be the last of {t_k} positions"
        case.raises(
            ValueError, answer, t_q, t_k=t_k, mentions=(t_q, t_k), because=reason
        )


@padding_mask.requires(
    "the first `lengths[b]` keys of row b may be looked at, the rest are hidden, in "
    "the shape (B, 1, 1, t_k)",
    "Which positions are real in a row with 3 tokens? Compare position and length, and "
    "look at the shapes on both sides.",
)
def _(answer, case):
    for lengths, t_k in (([3, 5, 1], 5), ([2, 4], 4)):
        lengths = torch.tensor(lengths)
        case.equal(
            case.call(answer, lengths, t_k), slow_padding(lengths, t_k), "the mask"
        )


@padding_mask.requires(
    "a row of length 0 and a batch of one row work, at any `t_k`",
    "Does it count on a row that is not empty, on several rows, or on some greatest "
    "`t_k`?",
)
def _(answer, case):
    sizes = ([0, 4, 7, 2], 7), ([2, 3], 6), ([4], 4), ([0], 3), ([3], 2100)
    for lengths, t_k in sizes:
        lengths = torch.tensor(lengths, dtype=torch.int32)
        expected = slow_padding(lengths, t_k)
        case.equal(case.call(answer, lengths, t_k=t_k), expected, "the mask")


@padding_mask.requires("it lies on the device of `lengths`")
def _(answer, case):
    case.any_device(answer, torch.tensor([3, 5, 1]), 5)


# Self-attention -----------------------------------------------------------------------


def built(answer, case, d_model=6, d_head=4, seed=60):
    """A module of the learner's with known weights, and those weights."""
    module = case.call(answer, d_model, d_head)
    case.true(
        isinstance(module, nn.Module), "An object of the class is no `nn.Module`."
    )
    size = (d_head, d_model)
    case.parameters(module, w_q=size, w_k=size, w_v=size)
    known = {
        name: probe(*size, seed=seed + i, scale=0.6)
        for i, name in enumerate(("w_q", "w_k", "w_v"))
    }
    return case.load(module, **known), known


def layer_agrees(case, module, known, x, *mask, **by_name):
    actual = case.call(module, x, *mask, **by_name)
    weights = in_float64(known)
    case.close(actual, slow_layer(x.double(), *mask, **by_name, **weights), like=x)


@SelfAttention.requires(
    "it has three linear layers w_q, w_k and w_v from d_model to d_head, without bias, "
    "each with random weights of its own",
    "`nn.Linear` takes the width that comes in, then the width that goes out, and adds "
    "a bias unless told otherwise.",
)
def _(answer, case):
    for d_model, d_head in ((6, 4), (3, 5)):
        built(answer, case, d_model, d_head)
    new = [case.call(answer, 6, 4), case.call(answer, 6, 4)]
    found = [p.detach() for module in new for p in module.parameters()]
    case.true(
        all(p.isfinite().all() and p.std() > 1e-3 for p in found),
        "Some weights all start with the same value, so they would learn the same.",
    )
    pairs = combinations(found, 2)
    case.true(
        not any(torch.equal(a, b) for a, b in pairs),
        "Two layers start with the same weights.",
    )


@SelfAttention.requires(
    "its output is attention of x·w_q on x·w_k, averaging x·w_v",
    "Each of the three layers has its own place: who asks, who is asked, what is "
    "handed over.",
)
def _(answer, case):
    for (d_model, d_head), size in (((6, 4), (2, 5)), ((3, 5), (3, 4))):
        module, known = built(answer, case, d_model, d_head)
        layer_agrees(case, module, known, probe(*size, d_model, seed=70))


@SelfAttention.requires(
    "the mask decides who may look at whom",
    "The mask is for `attention`: hand it on.",
)
def _(answer, case):
    x = probe(2, 5, 6, seed=73)
    for mask in (slow_causal(5, 5), some_mask(2, 1, 5, seed=4), some_mask(2, 5, 5)):
        module, known = built(answer, case)
        layer_agrees(case, module, known, x, mask)


@SelfAttention.requires(
    "gradients reach x and every weight, and all is finite where nothing may be seen",
)
def _(answer, case):
    module, known = built(answer, case)
    for name, weight in module.named_parameters():
        trained = weight.requires_grad
        case.true(trained, f"`{name}` is not trained: it requires no gradient.")
    names = {
        name.removesuffix(".weight"): name for name, _ in module.named_parameters()
    }
    mask, x = blind_rows(2, 5, 5, seed=5), probe(2, 5, 6, seed=77)

    def run(x, **weights):
        replaced = {names[name]: weight for name, weight in weights.items()}
        return functional_call(module, replaced, (x, mask))

    layer_agrees(case, module, known, x, mask)
    case.gradients_agree(run, partial(slow_layer, mask=mask), x, **known)


@SelfAttention.requires(
    "a second call, eval(), other sizes and dtypes work too",
    "Nothing about one call may be kept for the next, and eval() changes nothing here.",
)
def _(answer, case):
    module, known = built(answer, case)
    layer_agrees(case, module, known, probe(2, 5, 6, seed=74), mask=slow_causal(5, 5))
    layer_agrees(case, module, known, probe(2, 5, 6, seed=75))
    layer_agrees(case, module, known, probe(1, 7, 6, seed=76), slow_causal(7, 7))
    module.eval()
    layer_agrees(case, module, known, probe(2, 5, 6, seed=74), slow_causal(5, 5))
    half = {name: weight.half() for name, weight in known.items()}
    layer_agrees(case, module.half(), half, probe(2, 5, 6, dtype=torch.float16))


@SelfAttention.requires("it creates nothing on another device")
def _(answer, case):
    module, _ = built(answer, case)
    case.any_device(module, probe(2, 5, 6))
    case.any_device(module, probe(2, 5, 6), slow_causal(5, 5))
