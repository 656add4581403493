"""Lesson 02: attention weights, attention, masks, and a head of self-attention."""

import math
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import nn

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


HIDDEN_LEVELS = ((0, 10_000), (-30_000, 0), (-30_000, 30_000), (-90_000, 0))


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


def values_of(keys):
    """Values for these keys, of a width that nothing else has."""
    *lead, d_head = keys.shape
    return probe(*lead, d_head + 6, seed=50, dtype=keys.dtype)


def required(sentence, hint="", of_attention=("", "")):
    """Decorates `test(answer, case, oracle, given)`, a requirement of both exercises.

    given: what an answer gets for queries and keys. of_attention: another sentence or
    hint there.
    """

    def add(test):
        for exercise, oracle, given in BOTH:
            other = of_attention if exercise is attention else ("", "")
            exercise.requires(other[0] or sentence, other[1] or hint)(
                partial(test, oracle=oracle, given=given)
            )

    return add


@required(
    "each query's weights are softmax over the keys of q·k divided by the root of "
    "d_head",
    "Do it for one query and two keys on paper. Which dimension of q meets which of k "
    "in the product, counted from the end? Which numbers should sum to 1? And what is "
    "`mask` when nobody hands one in?",
    (
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
        q, k = queries_and_keys(*lead, t_q=4, t_k=6, d_head=7, seed=6)
        case.agrees(answer, oracle, *given(q, k))
    q, k = queries_and_keys(2, 5, t_q=3, t_k=3, d_head=3)
    case.agrees(answer, oracle, *given(q, k))


@required(
    "scores of ±10,000 give no overflow",
    "Lesson 00: an exponential needs the row's maximum subtracted first.",
)
def _(answer, case, oracle, given):
    q, k = whole(2, 4, 16), whole(2, 5, 16, seed=1)
    roughly(case, answer, oracle, *given(q, k), tolerance=0.01)
    for level in (10_000, -10_000):
        q, k = at_level(level, 2, t_q=4, t_k=5, seed=2)
        roughly(case, answer, oracle, *given(q, k), tolerance=0.01)


@required(
    "with a mask, a query's weights are softmax over the keys where the mask is True, "
    "and 0 elsewhere",
    "What would a score have to be, so that its weight comes out as exactly 0?",
    (
        "with a mask, the average is over the values where the mask is True",
        "The mask belongs to the weights: hand it on.",
    ),
)
def _(answer, case, oracle, given):
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=10)
    case.agrees(answer, oracle, *given(q, k), some_mask(4, 5))
    q, k = queries_and_keys(t_q=4, t_k=4, d_head=3, seed=12)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    case.agrees(answer, oracle, *given(q, k), mask=mask)


@required("masks of fewer or smaller dimensions are broadcast")
def _(answer, case, oracle, given):
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=14)
    for i, size in enumerate(((2, 1, 1, 5), (2, 1, 4, 5), (2, 3, 4, 5), (1, 5))):
        case.agrees(answer, oracle, *given(q, k), some_mask(*size, seed=i))


@required(
    "a key that the mask hides changes nothing, however large its score",
    "Is the hidden key out before the softmax divides, and is the number that stands "
    "for it below every score?",
)
def _(answer, case, oracle, given):
    for visible, hidden in HIDDEN_LEVELS:
        q, k, mask = one_hidden(visible, hidden)
        roughly(case, answer, oracle, *given(q, k), mask, tolerance=0.01)


@required(
    "a query that may look at nothing gets zeros, and the others what is theirs",
    "What does your softmax make of a row of nothing but hidden keys? Put something in "
    "order after it.",
)
def _(answer, case, oracle, given):
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=18)
    for mask in (
        blind_rows(some_mask(2, 1, 4, 5, seed=6)),
        torch.tensor([True, False]).view(2, 1, 1, 1),
    ):
        case.agrees(answer, oracle, *given(q, k), mask)


@required(
    "the gradients are right, and finite for a query that may look at nothing too",
    "A gradient of zeros: is there a `detach()` or a `torch.no_grad()`? NaN: one that is "
    "replaced after the softmax can still come back through the gradient. Which "
    "operation lets no gradient through to what it overwrites?",
)
def _(answer, case, oracle, given):
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=20)
    case.gradients_agree(answer, oracle, *given(q, k))
    some = some_mask(2, 1, 4, 5, seed=7)
    for mask in (some, blind_rows(some)):
        case.gradients_agree(answer, oracle, *given(q, k), mask)


@required(
    "float64, float16, bfloat16 and memory that is not contiguous work too",
    "Return the dtype that came in. A constant that suits float32 may not exist in "
    "float16.",
)
def _(answer, case, oracle, given):
    mask = some_mask(2, 1, 4, 5, seed=9)
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=21, dtype=torch.float64)
    roughly(case, answer, oracle, *given(q, k), mask, tolerance=1e-5)
    for dtype in (torch.float16, torch.bfloat16):
        half = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=22, dtype=dtype)
        case.agrees(answer, oracle, *given(*half))
        case.agrees(answer, oracle, *given(*half), mask)
    q, k = q.float(), k.float()
    case.agrees(answer, oracle, *map(strided, given(q, k)), mask)
    turned = probe(2, 4, 3, 7, seed=26).transpose(1, 2)
    case.agrees(answer, oracle, *given(turned, k), mask)


@required("it creates nothing on another device")
def _(answer, case, oracle, given):
    q, k = queries_and_keys(2, 3, t_q=4, t_k=5, d_head=7, seed=20)
    case.any_device(answer, *given(q, k))
    case.any_device(answer, *given(q, k), some_mask(4, 5))


# The causal mask ----------------------------------------------------------------------


@causal_mask.requires(
    "a square mask lets each query see its own position and all before it",
    "Print it and read a row: row 0 is the first query. Which keys may it see?",
)
def _(answer, case):
    for size in (4, 1, 7):
        case.equal(case.call(answer, size), slow_causal(size, size), "the mask")


@causal_mask.requires(
    "with fewer queries than keys, the queries are the last positions",
    "The last query sees every key, however many queries there are.",
)
def _(answer, case):
    for t_q, t_k in ((4, 7), (2, 5), (1, 6), (6, 7)):
        case.equal(case.call(answer, t_q, t_k), slow_causal(t_q, t_k), "the mask")
    case.equal(case.call(answer, 3, t_k=3), slow_causal(3, 3), "the mask")
    none = torch.zeros(0, 4, dtype=torch.bool)
    case.equal(case.call(answer, 0, 4), none, "the mask for no queries")


@causal_mask.requires(
    "any length works, 2,100 keys too",
    "Is a size written into your code? Make the mask for the numbers that come in.",
)
def _(answer, case):
    case.equal(case.call(answer, 3, 2100), slow_causal(3, 2100), "the mask")


@causal_mask.requires(
    "more queries than keys is a ValueError that names both numbers",
    "Say in the message how many of each there are: whoever reads it has a long day.",
)
def _(answer, case):
    reason = "5 queries cannot be the last of 3 positions"
    case.raises(ValueError, answer, 5, 3, mentions=(5, 3), because=reason)
    reason = "12 queries cannot be the last of 11 positions"
    case.raises(ValueError, answer, 12, t_k=11, mentions=(12, 11), because=reason)


@causal_mask.requires(
    "no keys at all, `t_k` = 0, is not the same as no `t_k`",
    "0 counts as false in Python. When exactly is `t_k` missing?",
)
def _(answer, case):
    reason = "2 queries cannot be the last of 0 positions"
    case.raises(ValueError, answer, 2, 0, mentions=(2, 0), because=reason)


# The padding mask ---------------------------------------------------------------------


LENGTHS = torch.tensor([3, 5, 1])


def slow_padding(lengths, t_k):
    rows = [[[[j < n for j in range(t_k)]]] for n in lengths.tolist()]
    return torch.tensor(rows)


@padding_mask.requires(
    "the first `lengths[b]` keys of row b may be looked at, the rest are hidden, in "
    "the shape (B, 1, 1, t_k)",
    "Which positions are real in a row with 3 tokens? Compare position and length, and "
    "look at the shapes on both sides.",
)
def _(answer, case):
    case.equal(case.call(answer, LENGTHS, 5), slow_padding(LENGTHS, 5), "the mask")
    pair = torch.tensor([2, 4])
    case.equal(case.call(answer, pair, 4), slow_padding(pair, 4), "the mask")


@padding_mask.requires(
    "a row of length 0 and a batch of one row work, at any `t_k`",
    "Does it count on a row that is not empty, on several rows, or on some greatest "
    "`t_k`?",
)
def _(answer, case):
    sizes = ([0, 4, 7, 2], 7), ([2, 3], 6), ([4], 4), ([0], 3), ([1], 1), ([3], 2100)
    for lengths, t_k in sizes:
        lengths = torch.tensor(lengths)
        case.equal(
            case.call(answer, lengths, t_k), slow_padding(lengths, t_k), "the mask"
        )
    lengths = torch.tensor([2, 3], dtype=torch.int32)
    case.equal(case.call(answer, lengths, t_k=4), slow_padding(lengths, 4), "the mask")


@padding_mask.requires(
    "it works in attention: what stands in the padding changes nothing",
    "The mask must broadcast over heads and queries: True where the key is real.",
)
def _(answer, case):
    mask = case.call(answer, LENGTHS, 5)
    q, k = queries_and_keys(3, 2, t_q=4, t_k=5, d_head=7)
    v = values_of(k)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    alone = F.scaled_dot_product_attention(q[:1], k[:1, :, :3], v[:1, :, :3])
    case.close(out[:1], alone, "attention with 3 real keys of 5", tolerance=1e-5)


@padding_mask.requires("it lies on the device of `lengths`")
def _(answer, case):
    case.equal(case.call(answer, LENGTHS, 5), slow_padding(LENGTHS, 5), "the mask")
    case.any_device(answer, LENGTHS, 5)


# Self-attention -----------------------------------------------------------------------


def matrices(d_model, d_head, seed=0):
    return {
        name: probe(d_head, d_model, seed=seed + i, scale=0.6)
        for i, name in enumerate(("w_q", "w_k", "w_v"))
    }


def built(answer, case, d_model=6, d_head=4, seed=60):
    """A module of the learner's with known weights, and those weights."""
    module = case.call(answer, d_model, d_head)
    case.true(
        isinstance(module, nn.Module),
        "An object of the class is no `nn.Module`.",
    )
    known = matrices(d_model, d_head, seed)
    return case.load(module, **known), known


def slow_layer(x, w_q, w_k, w_v, mask=None):
    return slow_attention(x @ w_q.mT, x @ w_k.mT, x @ w_v.mT, mask)


def layer_agrees(case, module, known, x, mask=None, by_name=False):
    if mask is None:
        actual = case.call(module, x)
    else:
        actual = (
            case.call(module, x, mask=mask) if by_name else case.call(module, x, mask)
        )
    doubled = {name: w.double() for name, w in known.items()}
    if mask is not None and mask.dim() == 4:
        mask = mask[:, 0]  # one head
    case.close(actual, slow_layer(x.double(), **doubled, mask=mask), like=x)


@SelfAttention.requires(
    "it has three linear layers w_q, w_k and w_v from d_model to d_head, without bias",
    "`super().__init__()` first, then three layers of their own, each an attribute of "
    "`self`. `nn.Linear` takes the width that comes in, then the width that goes out, "
    "and adds a bias unless told otherwise.",
)
def _(answer, case):
    for d_model, d_head in ((6, 4), (3, 5)):
        size = (d_head, d_model)
        module = case.call(answer, d_model, d_head)
        case.parameters(module, w_q=size, w_k=size, w_v=size)
        built(answer, case, d_model, d_head)


@SelfAttention.requires(
    "its output is attention of x·w_q on x·w_k, averaging x·w_v",
    "Each of the three layers has its own place: who asks, who is asked, what is "
    "handed over.",
)
def _(answer, case):
    module, known = built(answer, case)
    layer_agrees(case, module, known, probe(2, 5, 6, seed=70))
    module, known = built(answer, case, 3, 5, seed=64)
    layer_agrees(case, module, known, probe(3, 4, 3, seed=71, scale=2))
    module, known = built(answer, case, 4, 4, seed=67)
    layer_agrees(case, module, known, probe(3, 2, 4, seed=72, scale=2))


@SelfAttention.requires(
    "the mask decides who may look at whom, and without one everybody may",
    "The mask is for `attention`: hand it on.",
)
def _(answer, case):
    module, known = built(answer, case)
    x = probe(2, 5, 6, seed=73)
    layer_agrees(case, module, known, x, slow_causal(5, 5))
    layer_agrees(case, module, known, x, some_mask(2, 5, 5, seed=3), by_name=True)
    layer_agrees(case, module, known, x, some_mask(2, 1, 5, seed=4))
    layer_agrees(case, module, known, x)


@SelfAttention.requires(
    "other lengths and batch sizes, other dtypes, eval() and a second call work too",
    "Nothing about one call may be kept for the next, and eval() changes nothing here.",
)
def _(answer, case):
    module, known = built(answer, case, seed=80)
    layer_agrees(case, module, known, probe(2, 5, 6, seed=74), slow_causal(5, 5))
    layer_agrees(case, module, known, probe(3, 7, 6, seed=75), slow_causal(7, 7))
    module.eval()
    layer_agrees(case, module, known, probe(2, 5, 6, seed=74), slow_causal(5, 5))
    x = probe(1, 2, 6, seed=76)
    layer_agrees(case, module, known, x)
    layer_agrees(case, module, known, x)
    actual = case.call(module.double(), x.double())
    doubled = {name: w.double() for name, w in known.items()}
    right = slow_layer(x.double(), **doubled)
    case.close(actual, right, like=x.double(), tolerance=1e-5)


@SelfAttention.requires(
    "gradients reach x and every weight, and all is finite where nothing may be seen",
)
def _(answer, case):
    module, known = built(answer, case, seed=83)
    mask = blind_rows(some_mask(2, 5, 5, seed=5))

    def run(x):
        return module(x, mask)

    def oracle(x):
        return slow_layer(x, **{n: w.double() for n, w in known.items()}, mask=mask)

    x = probe(2, 5, 6, seed=77)
    case.gradients_agree(run, oracle, x)
    layer_agrees(case, module, known, x, mask)
    out = case.call(module, x, mask)
    factors = probe(*out.shape, seed=78)
    names = [f"{name}.weight" for name in known]
    found = dict(module.named_parameters())
    leaves = [found.get(n, found.get(n.removesuffix(".weight"))) for n in names]
    for name, leaf in zip(names, leaves, strict=True):
        case.true(
            leaf.requires_grad, f"`{name}` is not trained: it requires no gradient."
        )
    gradients = torch.autograd.grad((out * factors).sum(), leaves, allow_unused=True)
    truth = {n: w.double().requires_grad_() for n, w in known.items()}
    expected = torch.autograd.grad(
        (slow_layer(x.double(), **truth, mask=mask) * factors).sum(),
        list(truth.values()),
    )
    for name, gradient, right in zip(names, gradients, expected, strict=True):
        case.true(gradient is not None, f"No gradient reaches `{name}`.")
        case.close(gradient, right, f"the gradient of `{name}`")


@SelfAttention.requires(
    "a new module starts with random weights, different in each layer"
)
def _(answer, case):
    new = [case.call(answer, 6, 4), case.call(answer, 6, 4)]
    found = [p.detach() for module in new for p in module.parameters()]
    case.true(
        all(p.isfinite().all() and p.std() > 1e-3 for p in found),
        "Some weights all start with the same value, so they would learn the same.",
    )
    different = all(
        not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i]
    )
    case.true(different, "Two layers start with the same weights.")


@SelfAttention.requires("it creates nothing on another device")
def _(answer, case):
    module, _ = built(answer, case)
    case.any_device(module, probe(2, 5, 6))
    case.any_device(module, probe(2, 5, 6), slow_causal(5, 5))
