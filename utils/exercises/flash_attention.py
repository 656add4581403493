"""Lesson 11: online softmax, attention in blocks, its gradient, traffic, a kernel."""

import warnings
import weakref
from functools import partial

import torch
import torch.nn.functional as F

from utils.check.errors import Crashed, Explained
from utils.check.exercise import Exercise, IntegrationCheck
from utils.check.triton_compiler import launches, why_not_compiled
from utils.check.triton_interpreter import OutsideTensor, device, plainly, strict
from utils.check.wording import dtype
from utils.cost import Cost, peak_bytes
from utils.probe import probe, strided

online_softmax = Exercise("online_softmax", lesson="flash_attention")
flash_attention = Exercise("flash_attention", lesson="flash_attention")
FlashAttention = Exercise("FlashAttention", lesson="flash_attention")
hbm_bytes = Exercise("hbm_bytes", lesson="flash_attention")
# A compilation for four cases takes up to eight of the seconds.
flash_kernel = Exercise("flash_kernel", lesson="flash_attention", seconds=20)

SUMS = 3e-5  # what the order of float32 sums may change; splitting blocks is allowed
HALVES = torch.float16, torch.bfloat16


# What is right, computed with the whole matrix ----------------------------------------


def visible(t_q, t_k, causal):
    """True = may look; the queries are the last of the positions."""
    keys, queries = torch.arange(t_k), torch.arange(t_k - t_q, t_k)
    return (keys <= queries[:, None]) | (not causal)


def whole_scores(q, k, causal=False):
    scores = torch.einsum("...qd,...kd->...qk", q, k) / q.shape[-1] ** 0.5
    return scores.masked_fill(~visible(q.shape[-2], k.shape[-2], causal), -torch.inf)


def whole_attention(q, k, v, causal=False, *blocks):
    """PyTorch's own attention; blocks change nothing."""
    mask = visible(q.shape[-2], k.shape[-2], causal)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def heads(*lead, t_q, t_k, d_head, d_v=None, seed=0, dtype=torch.float32):
    """Queries, keys and values."""
    return (
        probe(*lead, t_q, d_head, seed=seed, dtype=dtype),
        probe(*lead, t_k, d_head, seed=seed + 1, dtype=dtype),
        probe(*lead, t_k, d_v or d_head, seed=seed + 2, dtype=dtype),
    )


def showing(q, k, d_v=None):
    """Values of which each is one key's own column, so that the output is the weights."""
    v = torch.eye(k.shape[-2], d_v or k.shape[-2], dtype=k.dtype)
    return q, k, v.expand(*k.shape[:-1], -1).clone()


def sums(case, found, expected, what, given, tolerance=SUMS):
    """`found` is right, and in the dtype of sums: float64 for float64, else float32."""
    case.is_tensor(found, what)
    wanted = torch.promote_types(given.dtype, torch.float32)
    if found.dtype != wanted:
        case.note(str(found.dtype))
        raise Explained(
            f"{what} is {dtype(found)} for {dtype(given)} inputs, and should be "
            f"{str(wanted).removeprefix('torch.')}."
        )
    case.close(found, expected, what, tolerance=tolerance)


# What a wrong result is made of -------------------------------------------------------


def exact(x):
    return x.detach().cpu().double()


def formula(factors, names):
    terms = [f"{x:,.9g} · {name}" for x, name in zip(factors, names, strict=True) if x]
    return " + ".join(terms).replace("+ -", "− ") or "0"


def made_of(found, what, parts, due=None):
    """Explain a result that is a sum of these parts, but with other factors than due.

    parts: tensors by name. due: their factors, 1 if not given.
    """
    found = exact(found).flatten()
    basis = torch.stack([part.flatten() for part in parts.values()], dim=1)
    right = torch.tensor(due or [1.0] * len(parts)).double()
    if len(found) != len(basis) or len(found) < len(right) + 2:
        return
    factors = torch.linalg.lstsq(basis, found.nan_to_num()[:, None]).solution[:, 0]
    off, before = ((basis @ x - found).abs().max() for x in (factors, right))
    if off < 1e-4 * found.abs().max() < before:  # which is False of NaN and infinities
        came = formula(factors.round(decimals=3).tolist(), parts)
        due = formula(right.tolist(), parts)
        raise Explained(f"{what} is {came}, and should be {due}.")


def keys_in_words(at):
    at = at.tolist()
    if len(at) > 2 and at[-1] - at[0] == len(at) - 1:
        return f"keys {at[0]} to {at[-1]}"
    return f"key{'s' * (len(at) > 1)} {' and '.join(map(str, at))}" if at else "no key"


def compare_weights(found, what, q, k, causal=False):
    """Explain weights that differ from the right ones in a simple way."""
    (t_q, d_head), t_k = q.shape[-2:], k.shape[-2]
    if found.shape != (*q.shape[:-1], t_k) or not exact(found).sum().isfinite():
        return
    scores = whole_scores(exact(q), exact(k), causal).reshape(-1, t_k)
    right, found = scores.softmax(-1), exact(found).reshape(-1, t_k)
    seen = right != 0
    for i in (seen != (found != 0)).any(-1).nonzero().flatten().tolist()[:1]:
        came, due = (keys_in_words(x[i].nonzero().flatten()) for x in (found, right))
        place = f", which is at position {i % t_q + t_k - t_q}," if causal else ""
        raise Explained(
            f"{what}: query {i % t_q}{place} looks at {came}, and should at {due}."
        )

    def spread(x):  # around the mean of a row
        mean = x.where(seen, 0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
        return (x - mean).where(seen, 0)

    logs, scores = spread(found.log()), spread(scores)
    factor = ((logs * scores).sum() / (scores * scores).sum()).item()
    if (logs - factor * scores).abs().max() < 1e-3 < abs(factor - 1):
        raise Explained(
            f"{what}: the weights are those of {factor:.3g} times the scores. d_head is "
            f"{d_head}, and its root {d_head**0.5:.3g}."
        )
    i = (found - right).abs().amax(-1).argmax()
    ratio = (found[i] / right[i])[seen[i]]
    jumps = ((ratio.diff() / ratio[1:]).abs() > 1e-3).nonzero().flatten() + 1
    if len(jumps) < min(4, len(ratio) / 2) and (ratio - 1).abs().max() > 1e-3:
        parts = torch.arange(len(ratio)).tensor_split(jumps.tolist())
        words = [f"{ratio[at[0]]:.3g} times for {keys_in_words(at)}" for at in parts]
        raise Explained(
            f"{what}: the weights of query {i % t_q} are, of what they should be, "
            f"{', '.join(words)}."
        )


# Online softmax -----------------------------------------------------------------------


class OneWay:
    """Blocks that come one after the other, once."""

    def __init__(self, blocks):
        self.left = list(blocks)

    def __iter__(self):
        return self

    def __repr__(self):
        return "<blocks that come once>"

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0).clone()


def maximum_and_total(case, answer, blocks, given=None, tolerance=None):
    """Call the answer, and compare both results with those of the whole row."""
    found = case.call(answer, blocks if given is None else given)
    maximum = torch.cat(blocks, dim=-1).double().amax(dim=-1)
    shift = maximum.masked_fill(maximum.isinf(), 0)[..., None]
    case.is_tuple(found, 2, "the result (maximum and total)")
    sums(case, found[0], maximum, "the maximum", blocks[0], tolerance=None)
    totals = [(block.double() - shift).exp().sum(-1) for block in blocks]
    if len(totals) == 2 and isinstance(found[1], torch.Tensor):
        names = "Σ exp(score − largest) of the first block", "that of the second", "one"
        parts = dict(zip(names, (*totals, torch.ones_like(maximum)), strict=True))
        made_of(found[1], "the total", parts, [1.0, 1.0, 0.0])
    sums(case, found[1], sum(totals), "the total", blocks[0], tolerance)


def in_blocks(x, *sizes):
    return list(x.split(sizes, dim=-1))


@online_softmax.requires(
    "for each row in pieces: the largest score, and the sum of exp(score − largest); "
    "dimensions in front are rows",
    "Do it on paper for the blocks [1, 3] and [2, 5]. The first block's sum was taken "
    "relative to 3. What must it be multiplied by when 5 comes?",
)
def _(answer, case):
    # All rows have the same largest score, so that a wrong factor is one for all.
    first, second = probe(2, 3, 4, seed=1), probe(2, 3, 2, seed=2)
    first = first - first.amax(-1, keepdim=True) + 1.5
    second = second - second.amax(-1, keepdim=True) + 0.5
    for blocks in ([first], [first, second], [second, first]):
        maximum_and_total(case, answer, blocks)
    row = torch.tensor([0.5, -1.0, 2.0, 1.5, 3.0, -0.5, 2.5, 1.0])
    maximum_and_total(case, answer, in_blocks(row, 3, 1, 4))
    maximum_and_total(case, answer, in_blocks(row.flip(0) - 7, 1, 1, 6))
    maximum_and_total(case, answer, in_blocks(probe(2, 3, 12, seed=2), 5, 5, 2))
    maximum_and_total(case, answer, in_blocks(probe(1, 3, 1, 8, seed=2), 5, 1, 2))
    ramp = torch.arange(11) * torch.tensor([[[1.0], [-1], [0]]])
    ramp = probe(2, 3, 11, seed=3) + ramp
    maximum_and_total(case, answer, in_blocks(ramp, 2, 2, 2, 2, 3))


@online_softmax.requires(
    "scores of ±10,000 give no overflow, scores of −inf count nothing, and a row of "
    "nothing else gives −inf and 0",
    "Every exponential needs the largest score so far subtracted, also the factor of the "
    "old sum. What is −inf − (−inf)?",
)
def _(answer, case):
    x = probe(3, 9, seed=4, scale=3)
    maximum_and_total(case, answer, in_blocks(x + 10_000, 4, 5), tolerance=0.01)
    maximum_and_total(case, answer, in_blocks(x - 10_000, 2, 3, 4), tolerance=0.01)
    steps = torch.tensor([-10_000.0, -1.0, 0.0, 90.0, 10_000.0]).repeat_interleave(2)
    maximum_and_total(case, answer, in_blocks(steps, 2, 2, 2, 2, 2), tolerance=0.01)
    maximum_and_total(case, answer, in_blocks(steps.flip(0), 3, 3, 4), tolerance=0.01)
    x = probe(4, 9, seed=6)
    x[0, :3] = x[1, 3:7] = x[2, 1::2] = -torch.inf  # the first block, and others
    maximum_and_total(case, answer, in_blocks(x, 3, 4, 2))
    x[0, :7] = x[3] = -torch.inf
    maximum_and_total(case, answer, in_blocks(x, 3, 4, 2))
    for least in (torch.tensor(-2e38), torch.tensor(-1e300, dtype=torch.float64)):
        low = torch.full((2, 5), -torch.inf, dtype=least.dtype)
        low[0, 1] = low[1, 4] = least
        maximum_and_total(case, answer, in_blocks(low, 3, 2))


@online_softmax.requires("each block is read once, and none is kept")
def _(answer, case):
    blocks = in_blocks(probe(2, 3000, seed=5), *[50] * 60)
    maximum_and_total(case, answer, blocks, given=OneWay(blocks), tolerance=1e-3)
    with Cost() as cost:
        case.call(answer, OneWay(blocks))
    row = 4 * 2 * 3000
    case.true(
        cost.peak_bytes < row // 2,
        f"Of 60 blocks, {cost.peak_bytes:,} bytes were in memory at once, copies and joined "
        f"ones included; one block has {row // 60:,}, the whole row {row:,}. Two numbers a "
        "row are all that has to be kept between blocks.",
    )


@online_softmax.requires(
    "float64 stays float64, everything else is summed and returned in float32; no block at "
    "all, from a list or a generator, is a ValueError; nothing is created elsewhere",
    "float16 has 11 bits: 2048 + 1 is 2048 in it. In which dtype is your sum?",
)
def _(answer, case):
    x = in_blocks(probe(3, 9, seed=7).double(), 4, 5)
    maximum_and_total(case, answer, x, tolerance=1e-9)
    for half in HALVES:
        flat = torch.zeros(2, 2800, dtype=half)
        maximum_and_total(case, answer, in_blocks(flat, *[7] * 400))
        x = probe(2, 12, seed=8, dtype=half)
        maximum_and_total(case, answer, in_blocks(x, 5, 7))
    whole = torch.tensor([[3, -1, 0, 2, 5], [-4, -2, -7, -2, -3]])
    maximum_and_total(case, answer, in_blocks(whole, 2, 3))
    for none, of in (([], "a list"), (OneWay([]), "a generator")):
        case.raises(ValueError, answer, none, because=f"No block came from {of}")
    case.any_device(answer, in_blocks(probe(2, 3, 12, seed=9), 5, 7))


# Attention in blocks ------------------------------------------------------------------


def output_and_lse(case, answer, q, k, v, *args, tolerance=SUMS, **kwargs):
    """Call the answer, and compare both results with the whole matrix in float64."""
    found = case.call(answer, q, k, v, *args, **kwargs)
    causal = args[0] if args else kwargs.get("causal", False)
    compared(case, found, q, k, v, causal, tolerance)


def compared(case, found, q, k, v, causal, tolerance=SUMS):
    case.is_tuple(found, 2, "the result (output and log-sum-exp)")
    for part in found:
        case.is_tensor(part, "each of the two results")
    q64, k64, v64 = map(exact, (q, k, v))
    scores = whole_scores(q64, k64, causal)
    output, lse = whole_attention(q64, k64, v64, causal), scores.logsumexp(-1)
    if torch.equal(v64, showing(q64, k64, v.shape[-1])[2]) and v.shape[-2]:
        what = "`v` is the unit matrix here, and the output the weights"
        compare_weights(found[0][..., : k.shape[-2]], what, q, k, causal)
    of_output = tolerance if q.dtype.itemsize > 2 else None  # a half's own rounding
    case.close(found[0], output, "the output", like=q, tolerance=of_output)
    if tolerance == SUMS and k.shape[-2]:
        largest = scores.amax(-1)
        names = "the largest score", "log Σ exp(score − largest)"
        parts = dict(zip(names, (largest, lse - largest), strict=True))
        made_of(found[1], "the log-sum-exp", parts)
    # Scores of 10,000 are rounded to a thousandth, and so is their log-sum-exp.
    of_lse = 100 * tolerance if tolerance > SUMS else tolerance
    sums(case, found[1], lse, "the log-sum-exp", q, of_lse)


def both(case, answer, q, k, v, *args):
    """With values that show the weights, and with these."""
    output_and_lse(case, answer, *showing(q, k), *args)
    output_and_lse(case, answer, q, k, v, *args)


@flash_attention.requires(
    "with everything in one block, the output is attention and the log-sum-exp that of "
    "the scaled scores",
    "Write it for one block first, as in lesson 02, from a maximum, a sum of "
    "exponentials and a product with v.",
)
def _(answer, case):
    both(case, answer, *heads(t_q=6, t_k=4, d_head=7, d_v=3))
    both(case, answer, *heads(t_q=6, t_k=2, d_head=3, d_v=5, seed=5))


@flash_attention.requires(
    "several blocks of keys give the same as one",
    "Follow one query on paper through two blocks, the larger score in the second. "
    "Three things are carried along; which of them are relative to the old maximum?",
)
def _(answer, case):
    q, k, v = heads(t_q=4, t_k=12, d_head=7, d_v=3, seed=10)
    q[:, 0], k[:, 0] = 3.0, torch.linspace(-2, 2, 12)  # first the largest come first
    for keys, block in ((k.flip(0), 6), (k, 6), (k, 4), (k.flip(0), 3), (k, 1)):
        both(case, answer, q, keys, v, False, 4, block)


@flash_attention.requires(
    "several blocks of queries, lengths that the blocks do not divide, and batches and "
    "heads in front",
    "Each block of queries starts afresh, and its results go to its own rows. If you "
    "fill up the last block, what is the weight of a key that does not exist?",
)
def _(answer, case):
    x = heads(t_q=12, t_k=8, d_head=7, d_v=3, seed=20)
    for blocks in ((4, 8), (3, 4), (1, 2)):
        both(case, answer, *x, False, *blocks)
    x = heads(t_q=11, t_k=13, d_head=7, d_v=3, seed=30)
    for blocks in ((4, 5), (5, 4), (100, 3)):
        both(case, answer, *x, False, *blocks)
    output_and_lse(case, answer, *heads(t_q=67, t_k=70, d_head=5, d_v=2, seed=35))
    for lead in ((3,), (2, 3)):
        x = heads(*lead, t_q=5, t_k=7, d_head=4, d_v=6, seed=40)
        output_and_lse(case, answer, *x, block_q=2, block_k=3)


@flash_attention.requires(
    "causal: no query looks past its own position; fewer queries than keys are the last",
    "Write down for one block which positions its queries have and which its keys: "
    "both start where the block starts, and query i stands at i + T_k − T_q.",
)
def _(answer, case):
    x = heads(2, 3, t_q=9, t_k=9, d_head=4, d_v=6, seed=50)
    for blocks in ((), (3, 3), (4, 2), (2, 5)):
        both(case, answer, *x, True, *blocks)
    output_and_lse(case, answer, *x, causal=True)
    q, k, v = heads(2, 3, t_q=5, t_k=11, d_head=4, d_v=6, seed=60)
    for rows, *blocks in ((5, 2, 3), (5, 5, 4), (1, 4, 4)):
        both(case, answer, q[..., :rows, :], k, v, True, *blocks)


@flash_attention.requires(
    "scores of ±10,000 give no overflow",
    "Is the start of your maximum, and what hides a score, below every score?",
)
def _(answer, case):
    for level in (10_000, -10_000, -20_000):
        q, k, v = heads(2, t_q=5, t_k=7, d_head=16, d_v=3, seed=70)
        q, k = q.round(), k.round()
        q[..., 0], k[..., 0] = 200.0, level / 50.0
        for causal in (False, True):
            output_and_lse(case, answer, q, k, v, causal, 3, 2, tolerance=0.01)


@flash_attention.requires(
    "it never holds more than a few blocks of scores; causal: blocks that nobody sees are "
    "not computed"
)
def _(answer, case):
    q, k, v = heads(t_q=512, t_k=512, d_head=4, seed=80)
    for t_q, n, size, hidden in ((512, 512, 64, 28), (80, 160, 16, 10)):
        rows, n_blocks, spent = q[n - t_q : n], t_q * n // size**2, []
        for causal in (False, True):
            with Cost() as cost:
                found = case.call(answer, rows, k[:n], v[:n], causal, size, size)
            compared(case, found, rows, k[:n], v[:n], causal)
            spent.append(cost.flops or cost.written)
            case.true(  # the limit: a quarter of the matrix, or a mask of bytes
                n < 512 or cost.peak_bytes < n * n,
                f"{cost.peak_bytes:,} bytes of new tensors were alive at once; the whole "
                f"matrix has {4 * n * n:,}, one block {4 * size * size:,}. Which of your "
                "tensors has both lengths?",
            )
        saved = 1 - spent[1] / spent[0]
        case.true(
            saved > 0.9 * hidden / n_blocks,
            f"Causal saves {max(saved, 0):.0%} of the work; {hidden} of the {n_blocks} "
            "blocks are hidden from all their queries. Where can the loop end?",
        )


@flash_attention.requires(
    "half precision is computed in float32; the output has the dtype of q, the "
    "log-sum-exp is float32; float64, and memory that is not contiguous, work too",
    "Convert a block when it is fetched, and the output when it is finished.",
)
def _(answer, case):
    for half in HALVES:
        q, k, v = heads(2, t_q=5, t_k=90, d_head=8, d_v=3, seed=90, dtype=half)
        output_and_lse(case, answer, q, k, v, block_q=2, block_k=7)
        output_and_lse(case, answer, q, k, v, True, block_q=4, block_k=16)
    q, k, v = heads(t_q=3, t_k=2500, d_head=8, seed=95, dtype=torch.float16)
    output_and_lse(case, answer, 0.1 * q, k, v.abs(), block_q=3, block_k=50)
    # The first value is large, and what each other block adds is lost beside it.
    q, k, v = heads(t_q=2, t_k=150, d_head=8, d_v=3, seed=96, dtype=torch.float16)
    v = torch.cat([v[:1] * 0 + 2000, v[1:] * 0 + 0.4])
    output_and_lse(case, answer, q * 0, k, v, block_q=2, block_k=1)
    # Weights of e^−17.5, which is 0 in float16, of values of 60,000.
    k = torch.cat([k[:1] * 0, k[1:] * 0 - 3.5])
    v = torch.cat([v[:1] * 0, v[1:] * 0 + 60_000])
    output_and_lse(case, answer, q * 0 + 1.767767, k, v, block_q=2, block_k=100)
    x = heads(2, 3, t_q=5, t_k=7, d_head=4, d_v=6, seed=100, dtype=torch.float64)
    output_and_lse(case, answer, *x, True, 2, 3, tolerance=1e-9)
    output_and_lse(case, answer, *(strided(each.float()) for each in x), True, 2, 3)
    x = heads(2, 5, t_q=3, t_k=3, d_head=4, seed=106)
    output_and_lse(case, answer, *(each.transpose(1, 2) for each in x), False, 2, 3)


@flash_attention.requires(
    "what does not fit is a ValueError that names the numbers; without any key the output "
    "is zeros and the log-sum-exp −inf, without any query both are empty; nothing is "
    "created on another device",
    "0/0 is NaN. How small can the sum of a query be that has seen a key?",
)
def _(answer, case):
    q, k, v = heads(2, 3, t_q=5, t_k=4, d_head=8, seed=110)
    for why, mentions, args in (
        ("causal, with 5 queries and 4 keys", (5, 4), (q, k, v, True)),
        ("blocks of 0 × 7", (0,), (q, k, v, False, 0, 7)),
        ("blocks of 7 × 0", (0,), (q, k, v, False, 7, 0)),
        ("blocks of -3 × 7", (-3,), (q, k, v, False, -3, 7)),
        ("3 heads of queries, 1 of keys and values", (3, 1), (q, k[:, :1], v[:, :1])),
        ("3 heads of queries and keys, 1 of values", (3, 1), (q, k, v[:, :1])),
        ("queries with a dimension for batches, keys without", (), (q, k[0], v[0])),
        ("4 keys and 3 values", (4, 3), (q, k, v[:, :, 1:])),
        ("queries of width 8 and keys of width 6", (8, 6), (q, k[..., :6], v)),
    ):
        case.raises(ValueError, answer, *args, mentions=mentions, because=why)
    for kind in (torch.float32, torch.float16, torch.float64):
        x = heads(2, t_q=3, t_k=0, d_head=8, d_v=5, seed=115, dtype=kind)
        output_and_lse(case, answer, *x)
    x = heads(2, t_q=0, t_k=4, d_head=8, d_v=5, seed=115, dtype=torch.float16)
    output_and_lse(case, answer, *x)
    x = heads(2, 3, t_q=5, t_k=7, d_head=4, d_v=6, seed=120)
    case.any_device(lambda *args: answer(*args)[0], *x, False, 2, 3)
    case.any_device(lambda *args: answer(*args)[1], *x, True, 2, 3)


# Its gradient -------------------------------------------------------------------------


def compare_gradient(
    found, name, q, k, v, d_output, causal=False, block_q=64, block_k=64
):
    """Explain a wrong gradient by the terms of dS, or by blocks."""
    q, k, v, d_output = map(exact, (q, k, v, d_output))
    weights, d_weights = whole_scores(q, k, causal).softmax(-1), d_output @ v.mT
    row_sums = (weights * d_weights).sum(-1, keepdim=True).expand_as(weights)
    d_scores = weights * (d_weights - row_sums)

    def gradient(x):  # of what the weights, or dS, give
        if name == "v":
            return x.mT @ d_output
        return (x @ k if name == "q" else x.mT @ q) / q.shape[-1] ** 0.5

    if name != "v":
        terms = weights * d_weights, weights * row_sums, weights, d_weights, row_sums
        names = "P∘dP", "P∘D", "P", "dP", "D"
        parts = dict(zip(names, map(gradient, terms), strict=True))
        what = f"the dS that the gradient of `{name}` is made of"
        made_of(found, what, parts, [1.0, -1.0, 0.0, 0.0, 0.0])
    kind, block = "queries", torch.arange(q.shape[-2])[:, None] // block_q
    if name == "q":
        kind, block = "keys", torch.arange(k.shape[-2]) // block_k
    whole = weights if name == "v" else d_scores
    parts = [gradient(whole.where(block == i, 0)) for i in range(int(block.max()) + 1)]
    what = f"the gradient of `{name}`, a sum over blocks of {kind},"
    made_of(found, what, {f"block {i}": part for i, part in enumerate(parts)})


def all_gradients(
    case,
    apply,
    q,
    k,
    v,
    *more,
    of="vqk",
    d_output=None,
    oracle=whole_attention,
    times=1,
):
    """Compare the gradients of q, k and v, or of some of them.

    The backward pass runs inside a call, so that what it raises is recorded.
    """
    if d_output is None:
        d_output = probe(*q.shape[:-1], v.shape[-1], seed=91, dtype=q.dtype)

    def gradients(apply, q, k, v, d_output):
        wanted = [{"q": q, "k": k, "v": v}[name].requires_grad_() for name in of]
        output = apply(q, k, v, *more)
        case.is_tensor(output)
        case.has_graph(output)
        for _ in range(times):
            found = torch.autograd.grad(
                output, wanted, d_output, retain_graph=True, materialize_grads=True
            )
        return *found, output.detach()

    def forward_and_backward(q, k, v, d_output):
        return gradients(apply, q, k, v, d_output)

    *actual, output = case.call(forward_and_backward, q, k, v, d_output)
    *truth, right = gradients(oracle, *map(exact, (q, k, v, d_output)))
    for name, ours, expected in zip(of, actual, truth, strict=True):
        wrong = not torch.allclose(exact(ours), expected, 1e-3, 1e-3)
        if wrong and oracle is whole_attention:
            compare_gradient(ours, name, q, k, v, d_output, *more)
            if name == "v" and torch.equal(d_output, torch.eye(q.shape[-2])):
                what = (
                    "the incoming gradient is the unit matrix, that of `v` the weights"
                )
                compare_weights(ours.mT, what, q, k, *more[:1])
        tolerance = 5 * SUMS if q.dtype == torch.float32 else None
        case.close(ours, expected, f"the gradient of `{name}`", tolerance=tolerance)
    of_output = 5 * SUMS if q.dtype == torch.float32 else None
    case.close(output, right, "the output after the backward pass", tolerance=of_output)


@FlashAttention.requires(
    "forward gives the output of flash_attention, and nothing else, and refuses the same",
    "`flash_attention` returns two things; hand on the first and keep both.",
)
def _(answer, case):
    def forward(q, k, v, *causal_and_blocks):
        return answer.apply(q, k, v, *causal_and_blocks)

    case.agrees(forward, whole_attention, *heads(2, t_q=4, t_k=5, d_head=7, d_v=3))
    x = heads(2, 3, t_q=5, t_k=9, d_head=4, d_v=6, seed=5)
    case.agrees(forward, whole_attention, *x, True)
    case.agrees(forward, whole_attention, *x, True, 2, 3)
    q, k, v = heads(2, 3, t_q=5, t_k=4, d_head=8, seed=110)
    why = "causal, with 5 queries and 4 keys"
    case.raises(ValueError, forward, q, k, v, True, mentions=(5, 4), because=why)


@FlashAttention.requires(
    "the gradient of v, and those of q and k, are right, in one block",
    "The weights come back as exp(score − log-sum-exp). Through the softmax: "
    "dS = P ∘ (dP − D), where D is the sum of dO ∘ O, one number for each query.",
)
def _(answer, case):
    q, k, v = heads(t_q=4, t_k=5, d_head=7, d_v=4, seed=10)
    all_gradients(case, answer.apply, q, k, v, of="v", d_output=torch.eye(4))
    all_gradients(case, answer.apply, *heads(2, t_q=4, t_k=5, d_head=7, d_v=3, seed=30))
    all_gradients(
        case, answer.apply, *heads(2, 3, t_q=4, t_k=5, d_head=9, d_v=9, seed=35)
    )


@FlashAttention.requires(
    "many blocks, and lengths that they do not divide; causal, with as many queries as "
    "keys and with fewer",
    "A key meets every block of queries, a query every block of keys: what they get "
    "from each is added up. The weights come from scores again, and are masked again.",
)
def _(answer, case):
    for t_q, t_k, causal, *blocks in (
        (11, 13, False, 4, 5),
        (11, 13, False, 3, 2),
        (9, 9, True, 64, 64),
        (9, 9, True, 4, 2),
        (5, 11, True, 2, 3),
        (5, 11, True, 4, 16),
    ):
        q, k, v = heads(t_q=t_q, t_k=t_k, d_head=7, d_v=t_q, seed=40)
        all_gradients(
            case, answer.apply, q, k, v, causal, *blocks, d_output=torch.eye(t_q)
        )
        x = heads(2, 3, t_q=t_q, t_k=t_k, d_head=4, d_v=6, seed=50)
        all_gradients(case, answer.apply, *x, causal, *blocks)
    all_gradients(
        case, answer.apply, *heads(2, t_q=66, t_k=70, d_head=3, d_v=2, seed=45)
    )


@FlashAttention.requires(
    "calls do not disturb each other, backward may come twice, and a gradient of the "
    "gradient is right or refused",
    "What belongs to one call belongs on its `ctx`. Sums begin at zero in backward. "
    "`@once_differentiable` stands between `@staticmethod` and `def backward`.",
)
def _(answer, case):
    def both(apply):
        def two_calls(q, k, v):
            return apply(q, k, v, True, 2, 3) + apply(q, k, 0.5 * v, False, 3, 2)

        return two_calls

    x = heads(2, t_q=5, t_k=7, d_head=4, d_v=6, seed=62)
    for times in (1, 2):
        whole = both(whole_attention)
        all_gradients(case, both(answer.apply), *x, oracle=whole, times=times)

    def twice(apply, q, k, v):
        leaves = [each.requires_grad_() for each in (q, k, v)]
        squares = (apply(*leaves) ** 2).sum()
        (slope,) = torch.autograd.grad(squares, q, create_graph=True)
        (slope**2).sum().backward()
        return tuple(each.grad for each in leaves)

    def by_softmax(q, k, v):  # PyTorch's own attention has no second gradient either
        return torch.softmax(whole_scores(q, k), -1) @ v

    try:
        found = case.call(partial(twice, answer.apply), *x)
    except Crashed as crash:
        if isinstance(crash.error, RuntimeError):
            return
        raise
    for ours, due in zip(found, twice(by_softmax, *map(exact, x)), strict=True):
        case.close(ours, due, "the gradient of the gradient")


@FlashAttention.requires(
    "between forward and backward it keeps q, k, v, output and log-sum-exp alone, which "
    "are freed with the output; backward holds no more than a few blocks"
)
def _(answer, case):
    for causal, kind in ((False, torch.float32), (True, torch.float16)):
        x = heads(t_q=256, t_k=256, d_head=16, seed=60, dtype=kind)
        leaves = [each.requires_grad_() for each in x]
        case.call(answer.apply, *leaves, causal)
        with Cost() as cost:
            output = answer.apply(*leaves, causal)
            kept = cost.bytes_now + sum(x.nbytes for x in leaves)
        del output
        # q, k, v and output have 256 × 16 numbers each, the log-sum-exp 256.
        allowed = 256 * (4 * 16 * kind.itemsize + 4)
        case.note(kept > allowed + 2 * 256 * 256)  # a matrix, not copies
        case.true(
            kept <= 1.15 * allowed,
            f"After forward {kept:,} bytes are kept; q, k, v, output and log-sum-exp have "
            f"{allowed:,}, the matrix of weights in float32 {4 * 256 * 256:,}. Copies of "
            "q, k and v, and sums, can be made in backward.",
        )
    output = weakref.ref(answer.apply(*leaves))
    case.true(
        output() is None,
        "After `del output` the output is still in memory. A tensor that is set on `ctx` "
        "is freed by Python's garbage collector, some day; what goes through "
        "`save_for_backward` is freed at once.",
    )
    for causal in (False, True):
        x = heads(t_q=640, t_k=640, d_head=4, seed=65)
        leaves = [each.requires_grad_() for each in x]
        out = case.call(answer.apply, *leaves, causal, 64, 64)
        peak = peak_bytes(lambda o=out: o.sum().backward())
        case.true(
            peak < 1.2 * 640 * 640,
            f"At 640 queries and keys in blocks of 64 × 64, backward had {peak:,} bytes "
            f"of new tensors at once; the whole matrix has {4 * 640 * 640:,}. Which of "
            "its tensors has both lengths?",
        )


@FlashAttention.requires(
    "large scores, float64, half precision, and memory that is not contiguous work too",
    "A weight is exp(score − log-sum-exp): never exp(score) divided by something. Sums "
    "over blocks belong in float32, as in the forward pass.",
)
def _(answer, case):
    q, k, v = heads(2, t_q=5, t_k=7, d_head=16, d_v=3, seed=70)
    q, k = q.round(), k.round()
    q[..., 0] = 8.0
    for causal, level in (
        (False, torch.tensor(64.0)),
        (True, torch.tensor(-64.0)),
        (True, torch.tensor([0.0, 0, 0, 64, 64, 128, 128])),  # hidden ones are largest
    ):
        k[..., 0] = level
        all_gradients(case, answer.apply, q, k, v, causal, 3, 2)
    all_gradients(case, answer.apply, q.half(), k.half(), v.half(), False, 3, 2)
    x = heads(2, 3, t_q=5, t_k=7, d_head=4, d_v=6, seed=80, dtype=torch.float64)
    all_gradients(case, answer.apply, *x, True, 2, 3)
    x = [strided(each.float()) for each in x]
    all_gradients(case, answer.apply, *x, True, 2, 3)
    for half in HALVES:
        x = heads(2, t_q=40, t_k=60, d_head=8, d_v=3, seed=90, dtype=half)
        all_gradients(case, answer.apply, *x, True, 8, 12)
    q, k, v = heads(t_q=600, t_k=6, d_head=4, seed=95, dtype=torch.bfloat16)
    some = probe(600, 4, seed=91, dtype=torch.bfloat16).abs()  # of one sign
    all_gradients(case, answer.apply, q * 0, k, v, False, 1, 6, of="v", d_output=some)


# Traffic ------------------------------------------------------------------------------


def moved_bytes(t, d_head, block=None, causal=False, bytes_per_number=2):
    """The forward pass block by block, each access counted."""
    moved = 0
    if block is None:
        for step in ("q k scores", "scores weights", "weights v output"):
            for name in step.split():
                moved += t * (t if name in ("scores", "weights") else d_head)
        return moved * bytes_per_number
    for rows in torch.arange(t).split(block):
        n_keys = int(rows[-1]) + 1 if causal else t
        moved += (2 * len(rows) + 2 * n_keys) * d_head * bytes_per_number
        moved += 4 * len(rows)  # log-sum-exp
    return moved


def count(case, answer, t, d_head, block=None, causal=False, bytes_per_number=2):
    """Compare, and say what is counted too often or too seldom."""
    given = t, d_head, block, causal, bytes_per_number
    found, expected = case.call(answer, *given), moved_bytes(*given)
    if type(found) is not int:
        raise Explained(
            f"The result is of type {type(found).__name__}, expected an int: a number of "
            "bytes is whole."
        )
    n_blocks, row = -(-t // block) if block else 1, d_head * bytes_per_number
    units = {
        "T·T numbers": t * t * bytes_per_number,
        f"T·d_head numbers for each of {n_blocks} blocks": n_blocks * t * row,
        "T·d_head numbers": t * row,
        "rows of d_head numbers": row,
        "bytes for each query": t,
        "numbers": bytes_per_number,
        "bytes": 1,
    }
    off, factors = found - expected, dict.fromkeys(units, 0)
    alone = [x for x in units if off % units[x] == 0 and abs(off) < 100 * units[x]]
    for name in alone[:1] or sorted(units, key=units.get, reverse=True):
        factors[name] = round(off / units[name])
        off -= factors[name] * units[name]
    if found != expected:
        raise Explained(
            f"the number of bytes is {found:,}, expected {expected:,}; the difference is "
            f"{formula(factors.values(), factors)}."
        )


@hbm_bytes.requires(
    "without blocks: three steps, each with its arguments and its result (scores = q·kᵀ, "
    "weights = softmax(scores), output = weights·v)"
)
def _(answer, case):
    count(case, answer, 60_000, 50)
    count(case, answer, 7, 16)


@hbm_bytes.requires(
    "with blocks: keys and values cross once for each block of queries, queries, output "
    "and log-sum-exp once; the last block may be smaller"
)
def _(answer, case):
    for given in ((60_000, 50, 2000), (8, 3, 8), (8, 3, 1), (13, 5, 4), (5, 3, 8)):
        count(case, answer, *given)


@hbm_bytes.requires(
    "causal: keys after a block's last query are not read; separate steps read all"
)
def _(answer, case):
    for given in ((17, 7, 6), (35, 4, 7), (5, 3, 8), (12, 3, None), (8, 3, 1)):
        count(case, answer, *given, True)


@hbm_bytes.requires(
    "numbers of other sizes; the log-sum-exp is float32 always; large counts are exact; a "
    "block below 1 is a ValueError that names it"
)
def _(answer, case):
    count(case, answer, 13, 5, 4, False, 4)
    count(case, answer, 13, 5, 4, True, bytes_per_number=1)
    count(case, answer, 10, 3, bytes_per_number=8)
    count(case, answer, 300_000_001, 3)
    count(case, answer, 13, 10**15 + 7, 4, True)
    for block in (0, -2):
        why = f"a block of {block}"
        case.raises(ValueError, answer, 8, 4, block, mentions=[block], because=why)


# The kernel ---------------------------------------------------------------------------


def run_kernel(case, answer, q, k, v, *args, **kwargs):
    """Call the answer on the device that it is tried on."""
    q, k, v = (x.to(device()) for x in (q, k, v))
    with warnings.catch_warnings(), strict():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of NaN and overflow
        try:
            return case.call(plainly(answer), q, k, v, *args, **kwargs)
        except Crashed as crash:
            if not isinstance(crash.error, OutsideTensor):
                raise
            case.note(crash.error.where)
            remedy = (
                "the last block is not full: `tl.load` and `tl.store` need a mask; "
            )
            if q.shape[2] % 16 == k.shape[2] % 16 == 0:
                remedy = ""
            raise Explained(
                f"A pointer led outside: {crash.error}. Here {remedy}a pointer is the sum "
                "of batch, head, row and column, each times the stride of that tensor."
            ) from crash


def from_kernel(case, answer, q, k, v, *args, tolerance=SUMS, **kwargs):
    found = run_kernel(case, answer, q, k, v, *args, **kwargs)
    causal = args[0] if args else kwargs.get("causal", False)
    compared(case, found, q.to(device()), k, v, causal, tolerance)


@flash_kernel.requires(
    "one head: output and log-sum-exp are those of attention",
    "Begin with one program for each block of queries. Which rows are its own, and what "
    "does `tl.load` need to know to fetch them?",
)
def _(answer, case):
    q, k, v = heads(1, 1, t_q=16, t_k=32, d_head=32)
    from_kernel(case, answer, *showing(q, k), block_q=16, block_k=32)
    from_kernel(case, answer, *showing(q, k), block_q=16, block_k=16)
    q, k, v = heads(1, 1, t_q=32, t_k=48, d_head=16, seed=5)
    k = k * torch.linspace(0.2, 2, 48)[:, None]  # the maximum grows from block to block
    from_kernel(case, answer, q, k, v, False, 16, 16)


@flash_kernel.requires(
    "batches and heads, in memory of any strides",
    "The second number of the grid counts heads through all batches. Use every stride of "
    "q, k and v: batch, head, row and column.",
)
def _(answer, case):
    x = heads(2, 3, t_q=16, t_k=16, d_head=16, seed=10)
    from_kernel(case, answer, *x, False, 16, 16)
    x = heads(
        2, 16, t_q=2, t_k=2, d_head=16, seed=40
    )  # as a split into heads lays them
    from_kernel(case, answer, *(each.transpose(1, 2) for each in x), False, 16, 16)
    q, k, v = heads(1, 1, t_q=16, t_k=32, d_head=16, seed=45)
    from_kernel(case, answer, strided(q), k, strided(v), False, 16, 32)
    turned = q.mT.contiguous().mT  # the columns lie farther apart than the rows
    from_kernel(case, answer, turned, strided(k), v, False, 16, 32)


@flash_kernel.requires(
    "lengths that the blocks do not divide, and the blocks that it chooses itself",
    "What a mask leaves out of a `tl.load` is filled with `other`, and a key of zeros "
    "has the score 0. Stores need a mask too.",
)
def _(answer, case):
    q, k, v = heads(1, 1, t_q=19, t_k=33, d_head=64, seed=20)
    from_kernel(case, answer, *showing(q, k, 64), False, 16, 32)
    from_kernel(case, answer, q, k, v, False, 32, 16)
    from_kernel(case, answer, *heads(1, 1, t_q=1, t_k=5, d_head=32, seed=25))


@flash_kernel.requires(
    "causal, with as many queries as keys and with fewer",
    "The position of a row is its number plus T_k − T_q.",
)
def _(answer, case):
    q, k, v = heads(1, 1, t_q=21, t_k=53, d_head=64, seed=35)
    from_kernel(case, answer, *showing(q, k[:, :, :21], 64), True, 32, 16)
    from_kernel(case, answer, *showing(q, k, 64), True, 16, 32)
    from_kernel(case, answer, q, k[:, :, :35], v[:, :, :35], True, 16, 16)


@flash_kernel.requires(
    "scores of ±10,000 give no overflow; float16: the output has the dtype of q, the "
    "log-sum-exp is float32",
    "Maximum, sum and output are float32 in the kernel, and the maximum of a row starts "
    "below every score.",
)
def _(answer, case):
    q, k, v = heads(1, 1, t_q=11, t_k=20, d_head=16, seed=50)
    q[..., 0], k[..., 0] = torch.linspace(0, 200, 11), 50.0  # rows far from each other
    from_kernel(case, answer, q, k, v, False, 16, 16, tolerance=0.02)
    q, k = q.round(), k.round()
    q[..., 0] = 200.0
    for first, rest in ((200.0, 200.0), (-200.0, -200.0), (-200.0, -250.0)):
        k[..., :16, 0], k[..., 16:, 0] = first, rest
        from_kernel(case, answer, q, k, v, False, 16, 16, tolerance=0.02)
    x = heads(1, 1, t_q=19, t_k=37, d_head=32, seed=60, dtype=torch.float16)
    from_kernel(case, answer, *x, True, 32, 32)
    # Beside a large sum small values are lost, and the last ones take it away again.
    q, k, v = heads(1, 1, t_q=5, t_k=150, d_head=16, seed=65, dtype=torch.float16)
    v[:, :, :32], v[:, :, 32:-32], v[:, :, -32:] = 1000, 0.2, -1000
    from_kernel(case, answer, q * 0, k, v, False, 16, 32)


@flash_kernel.requires(
    "the products are computed in the kernel; causal: blocks that nobody sees are not"
)
def _(answer, case):
    rows, keys = 128, 192  # the first 128 queries see 192 keys
    q, k, v = heads(1, 1, t_q=192, t_k=256, d_head=16, seed=90)
    seen = [q[:, :, :rows], k[:, :, :keys], v[:, :, :keys].clone()]
    v[:, :, keys:] = torch.nan  # the weight 0 does not hide it: 0 · NaN is NaN
    with Cost() as cost:  # it counts ready-made attention on the CPU too
        found = run_kernel(case, answer, q, k, v, True, 64, 64)
    case.true(
        cost.flops == 0,
        f"PyTorch did {cost.flops:,} floating-point operations in matrix products on the "
        "way: scores and outputs come from `tl.dot`.",
    )
    case.is_tuple(found, 2, "the result (output and log-sum-exp)")
    first = [part[:, :, :rows] for part in found]
    touched = first[0].isnan().any(-1).sum().item()
    case.true(
        touched == 0,
        f"The values from position {keys} on were NaN, whole blocks that the first "
        f"{rows} queries do not see; {touched} of these queries have NaN in their "
        "output. Where does the last query of the block stand? End the loop there.",
    )
    compared(case, first, seen[0].to(device()), *seen[1:], True)


@flash_kernel.requires(
    "what it cannot compute is refused in a sentence, by the lines of the stub; without "
    "any key the output is zeros and the log-sum-exp −inf"
)
def _(answer, case):
    q, k, v = (x.to(device()) for x in heads(2, 3, t_q=20, t_k=16, d_head=16, seed=80))
    wrong = torch.float64 if device() == "cuda" else torch.bfloat16
    for why, *args in (
        ("causal, with 20 queries and 16 keys", q, k, v, True),
        ("3 heads of queries, 1 of keys and values", q, k[:, :1], v[:, :1]),
        ("a block of 0", q, k, v, False, 0, 16),
        (f"inputs in {wrong}", *(x.to(wrong) for x in (q, k, v))),
    ):
        with strict():  # where it is not refused, it runs
            case.raises(ValueError, plainly(answer), *args, because=why)
    x = heads(1, 2, t_q=5, t_k=0, d_head=16, seed=95)
    from_kernel(case, answer, *x, False, 16, 16)


@flash_kernel.requires("it compiles for GPUs of compute capability 8.0 and 9.0")
def _(answer, case):
    ours = f"solutions.{flash_kernel.lesson}"  # the tests compile the reference
    if device() != "cpu" or getattr(answer, "__module__", ours) == ours:
        return
    with case.unrecorded(), launches() as seen:
        for kind, causal in ((torch.float16, True), (torch.float32, False)):
            x = heads(1, 2, t_q=19, t_k=37, d_head=16, seed=97, dtype=kind)
            run_kernel(case, answer, *x, causal, 16, 16)
    problem = why_not_compiled(seen)
    if problem:  # None where this machine cannot tell
        raise Explained(problem)


# Together with the parts of earlier lessons -------------------------------------------

PARTS = dict.fromkeys(("attention", "causal_mask"), "attention")
PARTS |= dict.fromkeys(("split_heads", "merge_heads", "repeat_kv"), "multi_head")
PARTS |= {"MultiHeadAttention": "multi_head", "rope": "positions"}
PARTS |= dict.fromkeys(("TransformerConfig", "Transformer"), "forward_pass")
PARTS |= {x.name: x.lesson for x in (online_softmax, flash_attention, FlashAttention)}
flash_in_the_model = IntegrationCheck("flash_in_the_model", "flash_attention", PARTS)


def through_flash(parts, layer, n_heads, n_kv_heads, x, mask=None, rotate=None):
    """What a `MultiHeadAttention` computes under a causal mask, by `FlashAttention`."""
    q = parts["split_heads"](layer.w_q(x), n_heads)
    k, v = (parts["split_heads"](w(x), n_kv_heads) for w in (layer.w_k, layer.w_v))
    if rotate is not None:
        q, k = rotate(q), rotate(k)
    k, v = (parts["repeat_kv"](each, n_heads // n_kv_heads) for each in (k, v))
    out = parts["FlashAttention"].apply(q, k, v, True, 4, 4)
    return layer.w_o(parts["merge_heads"](out))


def filled(module):
    """Weights from a formula, of a size at which attention is far from uniform."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(probe(*p.shape, seed=300 + i, scale=1.8 * p.shape[-1] ** -0.5))
    return module


@flash_in_the_model.requires(
    "flash_attention and attention under causal_mask mean the same, in a square and with "
    "fewer queries than keys; online_softmax gives the same log-sum-exp",
    "Print the mask for 3 queries and 5 keys, and the weights that the blocks use. The "
    "log-sum-exp is maximum plus natural logarithm of the total, of scaled scores.",
)
def _(parts, case):
    q, k, v = heads(2, 3, t_q=11, t_k=11, d_head=4, d_v=6, seed=200)
    for n in (11, 5):
        rows = q[:, :, 11 - n :]
        mask = case.call(parts["causal_mask"], n, 11)
        whole = case.call(parts["attention"], rows, k, v, mask)
        found = case.call(parts["flash_attention"], rows, k, v, True, 4, 3)
        case.is_tuple(found, 2, "the result of flash_attention")
        what = f"{n} queries and 11 keys: flash_attention, compared with attention,"
        case.close(found[0], whole.double(), what, like=q, tolerance=SUMS)
    blocks = list(whole_scores(rows, k).split(4, dim=-1))
    maximum, total = case.call(parts["online_softmax"], blocks)
    _, lse = case.call(parts["flash_attention"], rows, k, v, False, 2, 3)
    expected = exact(maximum + total.log())
    case.close(lse, expected, "the log-sum-exp", tolerance=SUMS)


@flash_in_the_model.requires(
    "MultiHeadAttention on FlashAttention gives what it gave before, RoPE included",
    "FlashAttention gets heads as split_heads lays them out, not contiguous.",
)
def _(parts, case):
    layer = filled(case.call(parts["MultiHeadAttention"], 24, 6, 2, 4))
    x, at = probe(2, 11, 24, seed=220), torch.arange(11)
    mask = case.call(parts["causal_mask"], 11)
    for rotate in (None, lambda heads: parts["rope"](heads, at)):
        before = case.call(layer, x, mask, rotate)
        after = case.call(through_flash, parts, layer, 6, 2, x, None, rotate)
        what = f"the layer's output {'with' if rotate else 'without'} RoPE"
        case.close(after, before.double(), what, like=x, tolerance=10 * SUMS)


@flash_in_the_model.requires(
    "a whole Transformer gives the same logits and the same gradients",
    "If the logits agree and the gradients do not, look at the backward pass.",
)
def _(parts, case):
    config = parts["TransformerConfig"](
        *(17, 24, 2, 6, 2, 4, 20, 16)  # vocabulary, widths, layers, heads, d_ff, length
    )
    model = filled(case.call(parts["Transformer"], config))
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], list(range(2, 13))])
    names = [
        "the logits",
        *(f"the gradient of {n}" for n, _ in model.named_parameters()),
    ]

    def logits_and_gradients(ids):
        model.zero_grad()
        logits = model(ids)
        (logits * probe(*logits.shape, seed=230)).sum().backward()
        return logits, *(p.grad.clone() for p in model.parameters())

    before = case.call(logits_and_gradients, ids)
    for block in model.blocks:
        block.attention.forward = partial(through_flash, parts, block.attention, 6, 2)
    after = case.call(logits_and_gradients, ids)
    for name, ours, theirs in zip(names, after, before, strict=True):
        case.close(ours, exact(theirs), name, tolerance=1e-3)
