"""Lesson 11: online softmax, attention in blocks, its gradient, traffic, a kernel."""

import gc
import inspect
import linecache
import math
import os
import textwrap
import warnings
import weakref
from contextlib import contextmanager
from functools import cache, partial, wraps

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from utils.check.errors import Crashed, Explained, Skipped
from utils.check.wording import dtype
from utils.check.exercise import Exercise, IntegrationCheck
from utils.check.triton_interpreter import OutsideTensor, strict
from utils.cost import Cost, peak_bytes, saved_bytes
from utils.probe import probe, strided

online_softmax = Exercise("online_softmax", lesson="flash_attention")
tiled = Exercise("flash_attention", lesson="flash_attention")
FlashAttention = Exercise("FlashAttention", lesson="flash_attention")
traffic = Exercise("hbm_bytes", lesson="flash_attention")
kernel = Exercise("flash_kernel", lesson="flash_attention")


# What is right, computed with the whole matrix ----------------------------------------


def visible(t_q, t_k, causal):
    """True = may look; the queries are the last of the positions."""
    keys, queries = torch.arange(t_k), torch.arange(t_k - t_q, t_k)
    return (keys <= queries[:, None]) | (not causal)


def whole_scores(q, k, causal=False):
    scores = torch.einsum("...qd,...kd->...qk", q, k) / q.shape[-1] ** 0.5
    return scores.masked_fill(~visible(q.shape[-2], k.shape[-2], causal), -torch.inf)


def whole_attention(q, k, v, causal=False, *blocks, **more):
    """PyTorch's own attention; blocks change nothing."""
    mask = visible(q.shape[-2], k.shape[-2], causal)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def whole_lse(q, k, causal=False):
    return torch.logsumexp(whole_scores(q, k, causal), dim=-1)


def heads(*lead, t_q, t_k, d_head, d_v=None, seed=0, dtype=torch.float32):
    """Queries, keys and values."""
    return (
        probe(*lead, t_q, d_head, seed=seed, dtype=dtype),
        probe(*lead, t_k, d_head, seed=seed + 1, dtype=dtype),
        probe(*lead, t_k, d_v or d_head, seed=seed + 2, dtype=dtype),
    )


def sums(case, found, expected, what, given, relaxed=None):
    """`found` is right, and in the dtype of sums: float64 for float64, else float32."""
    case.is_tensor(found, what)
    wanted = torch.promote_types(given.dtype, torch.float32)
    case.true(
        found.dtype == wanted,
        f"{what} is {dtype(found)} for {dtype(given)} inputs, and should be "
        f"{str(wanted).removeprefix('torch.')}.",
    )
    case.close(found, expected, what, tolerance=relaxed)


# Online softmax -----------------------------------------------------------------------


class OneWay:
    """Blocks that come one after the other, once; counts those that are kept."""

    def __init__(self, blocks):
        self.blocks, self.left, self.most = blocks, list(blocks), 0

    def __iter__(self):
        return self

    def __repr__(self):
        return f"<{len(self.blocks)} blocks, each handed over once>"

    def __next__(self):
        if not self.left:
            raise StopIteration
        block = self.left.pop(0).clone()
        self.alive = [ref for ref in getattr(self, "alive", []) if ref() is not None]
        self.alive.append(weakref.ref(block))
        self.most = max(self.most, len(self.alive))
        return block


def maximum_and_total(case, answer, blocks, given=None, relaxed=None):
    """Call the answer, and compare both results with those of the whole row.

    relaxed: the tolerance of the total, where right formulas differ in rounding.
    """
    found = case.call(answer, blocks if given is None else given)
    row = torch.cat(blocks, dim=-1).double()
    maximum = row.amax(dim=-1)
    shift = maximum.masked_fill(maximum.isinf(), 0)[..., None]
    case.is_tuple(found, 2, "the result (maximum and total)")
    sums(case, found[0], maximum, "the maximum", blocks[0])
    sums(case, found[1], (row - shift).exp().sum(-1), "the total", blocks[0], relaxed)
    return found


def in_blocks(x, *sizes):
    return list(x.split(sizes, dim=-1))


@online_softmax.requires(
    "for one row in pieces: the largest score, and the sum of exp(score − largest)",
    "Do it on paper for the blocks [1, 3] and [2, 5]. The first block's sum was taken "
    "relative to 3. What must it be multiplied by when 5 comes?",
)
def _(answer, case):
    row = torch.tensor([0.5, -1.0, 2.0, 1.5, 3.0, -0.5, 2.5, 1.0])
    maximum_and_total(case, answer, in_blocks(row, 3, 1, 4))
    maximum_and_total(case, answer, in_blocks(row.flip(0), 2, 5, 1))
    maximum_and_total(case, answer, [row])
    maximum_and_total(case, answer, in_blocks(row - 7, 1, 1, 6))


@online_softmax.requires(
    "dimensions in front are rows, each by itself",
    "The reduction is over the last dimension alone.",
)
def _(answer, case):
    maximum_and_total(case, answer, in_blocks(probe(3, 10, seed=1), 4, 1, 5))
    maximum_and_total(case, answer, in_blocks(probe(2, 3, 12, seed=2), 5, 5, 2))
    maximum_and_total(case, answer, in_blocks(probe(1, 3, 1, 8, seed=2), 5, 1, 2))
    ramp = probe(2, 3, 11, seed=3) + torch.arange(11) * torch.tensor(
        [[[1.0], [-1], [0]]]
    )
    maximum_and_total(case, answer, in_blocks(ramp, 2, 2, 2, 2, 3))


@online_softmax.requires(
    "scores of ±10,000 give no overflow",
    "Every exponential needs the largest score so far subtracted, also the factor that "
    "corrects the old sum.",
)
def _(answer, case):
    x = probe(3, 9, seed=4, scale=3)
    maximum_and_total(case, answer, in_blocks(x + 10_000, 4, 5), relaxed=0.01)
    maximum_and_total(case, answer, in_blocks(x - 10_000, 2, 3, 4), relaxed=0.01)
    steps = torch.tensor([-10_000.0, -1.0, 0.0, 90.0, 10_000.0]).repeat_interleave(2)
    maximum_and_total(case, answer, in_blocks(steps, 2, 2, 2, 2, 2), relaxed=0.01)
    maximum_and_total(case, answer, in_blocks(steps.flip(0), 3, 3, 4), relaxed=0.01)


@online_softmax.requires(
    "each block is read once, and none is kept",
    "`blocks` may be a generator: a second loop over it finds nothing, and whoever puts "
    "all blocks side by side has the whole row in memory again.",
)
def _(answer, case):
    blocks = in_blocks(probe(2, 40, seed=5), *[5] * 8)
    maximum_and_total(case, answer, blocks)
    source = OneWay(blocks)
    maximum_and_total(case, answer, blocks, given=source)
    case.true(
        source.most <= 3,
        f"{source.most} of 8 blocks were in memory at once. Two numbers a row are all "
        "that has to be kept between blocks.",
    )
    blocks = in_blocks(probe(2, 3000, seed=5), *[50] * 60)
    with Cost() as cost:
        case.call(answer, OneWay(blocks))
    row = 4 * 2 * 3000
    case.true(
        cost.peak_bytes < row // 2,
        f"For 60 blocks, {cost.peak_bytes:,} bytes of new tensors were alive at once; "
        f"one block has {row // 60:,}, the whole row {row:,}. Copies of blocks that are "
        "kept, or joined, are the row again.",
    )


@online_softmax.requires(
    "scores of −inf count nothing, and a row of nothing else gives −inf and 0",
    "What is −inf − (−inf)? Where the largest score so far is −inf, subtract something "
    "else.",
)
def _(answer, case):
    x = probe(4, 9, seed=6)
    x[0, :3] = -torch.inf  # the first block is hidden
    x[1, 3:7] = -torch.inf  # one in the middle
    x[2, 1::2] = -torch.inf
    maximum_and_total(case, answer, in_blocks(x, 3, 4, 2))
    x[3] = -torch.inf  # all of it
    x[0, :7] = -torch.inf
    _, total = maximum_and_total(case, answer, in_blocks(x, 3, 4, 2))
    case.true(
        total[3].item() == 0,
        f"The total of a row of nothing but −inf is {total[3].item():.3g}, and should be "
        "0 exactly.",
    )
    for least in (torch.tensor(-2e38), torch.tensor(-1e300, dtype=torch.float64)):
        low = torch.full((2, 5), -torch.inf, dtype=least.dtype)
        low[0, 1] = low[1, 4] = least
        maximum_and_total(case, answer, in_blocks(low, 3, 2))


@online_softmax.requires(
    "no block at all is a ValueError, whether a list or a generator is empty",
    "A generator cannot be asked whether it is empty. What has your loop left behind if "
    "it never ran?",
)
def _(answer, case):
    case.raises(ValueError, answer, [], because="No block was handed over")
    why = "No block came from a generator"
    case.raises(ValueError, answer, OneWay([]), because=why)


@online_softmax.requires(
    "float64 stays float64; everything else is summed and returned in float32",
    "float16 has 11 bits: 2048 + 1 is 2048 in it. In which dtype is your sum?",
)
def _(answer, case):
    maximum_and_total(case, answer, in_blocks(probe(3, 9, seed=7).double(), 4, 5))
    for half in (torch.float16, torch.bfloat16):
        flat = torch.zeros(2, 2800, dtype=half)
        maximum_and_total(case, answer, in_blocks(flat, *[7] * 400))
        x = probe(2, 12, seed=8, dtype=half)
        maximum_and_total(case, answer, in_blocks(x, 5, 7))
    whole = torch.tensor([[3, -1, 0, 2, 5], [-4, -2, -7, -2, -3]])
    maximum_and_total(case, answer, in_blocks(whole, 2, 3))


@online_softmax.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, in_blocks(probe(2, 3, 12, seed=9), 5, 7))


# Attention in blocks ------------------------------------------------------------------


def output_and_lse(case, answer, q, k, v, *args, relaxed=None, **kwargs):
    """Call the answer, and compare both results with the whole matrix in float64."""
    return compared(
        case,
        case.call(answer, q, k, v, *args, **kwargs),
        q,
        k,
        v,
        *args,
        relaxed=relaxed,
        **kwargs,
    )


def compared(case, found, q, k, v, *args, relaxed=None, **kwargs):
    case.is_tuple(found, 2, "the result (output and log-sum-exp)")
    causal = args[0] if args else kwargs.get("causal", False)
    wide = [x.detach().double() for x in (q, k, v)]
    case.close(
        found[0],
        whole_attention(*wide, causal),
        "the output",
        like=q,
        tolerance=relaxed,
    )
    expected = whole_lse(*wide[:2], causal)
    relaxed = None if relaxed is None else 100 * relaxed
    sums(case, found[1], expected, "the log-sum-exp", q, relaxed)
    return found


@tiled.requires(
    "with everything in one block, the output is attention and the log-sum-exp that of "
    "the scaled scores",
    "Write it for one block first, as in lesson 02, from a maximum, a sum of "
    "exponentials and a product with v. The log-sum-exp is log Σ exp(score), maximum "
    "included.",
)
def _(answer, case):
    output_and_lse(case, answer, *heads(t_q=4, t_k=5, d_head=7, d_v=3))
    output_and_lse(case, answer, *heads(t_q=6, t_k=2, d_head=3, d_v=5, seed=5))


@tiled.requires(
    "several blocks of keys give the same as one",
    "Follow one query on paper through two blocks, the larger score in the second. "
    "Three things are carried along; which of them are relative to the old maximum?",
)
def _(answer, case):
    q, k, v = heads(t_q=4, t_k=12, d_head=7, d_v=3, seed=10)
    k = k * torch.linspace(0.2, 2, 12)[:, None]
    output_and_lse(case, answer, q, k, v, block_q=4, block_k=4)
    output_and_lse(case, answer, q, k.flip(0), v, block_q=4, block_k=3)
    output_and_lse(case, answer, q, k, v, block_q=4, block_k=1)


@tiled.requires(
    "several blocks of queries, too",
    "Each block of queries starts afresh, and its results go to its own rows.",
)
def _(answer, case):
    q, k, v = heads(t_q=12, t_k=8, d_head=7, d_v=3, seed=20)
    output_and_lse(case, answer, q, k, v, block_q=4, block_k=8)
    output_and_lse(case, answer, q, k, v, block_q=3, block_k=4)
    output_and_lse(case, answer, q, k, v, block_q=1, block_k=2)


@tiled.requires(
    "lengths that the blocks do not divide",
    "The last block is shorter. If you fill it up, what is the weight of a key that "
    "does not exist?",
)
def _(answer, case):
    q, k, v = heads(t_q=11, t_k=13, d_head=7, d_v=3, seed=30)
    output_and_lse(case, answer, q, k, v, block_q=4, block_k=5)
    output_and_lse(case, answer, q, k, v, block_q=5, block_k=4)
    output_and_lse(case, answer, q, k, v, block_q=100, block_k=3)
    output_and_lse(case, answer, *heads(t_q=67, t_k=70, d_head=5, d_v=2, seed=35))


@tiled.requires(
    "batches and heads in front are each treated by themselves",
    "Two, three or four dimensions may come in, so count them from the end.",
)
def _(answer, case):
    q, k, v = heads(3, t_q=5, t_k=7, d_head=4, d_v=6, seed=40)
    output_and_lse(case, answer, q, k, v, block_q=2, block_k=3)
    q, k, v = heads(2, 3, t_q=5, t_k=7, d_head=4, d_v=6, seed=45)
    output_and_lse(case, answer, q, k, v, block_q=2, block_k=3)


@tiled.requires(
    "causal: no query looks past its own position",
    "Write down for one block which positions its queries have and which its keys: "
    "both start where the block starts, not at 0.",
)
def _(answer, case):
    q, k, v = heads(2, 3, t_q=9, t_k=9, d_head=4, d_v=6, seed=50)
    output_and_lse(case, answer, q, k, v, True)
    output_and_lse(case, answer, q, k, v, True, block_q=3, block_k=3)
    output_and_lse(case, answer, q, k, v, causal=True, block_q=4, block_k=2)
    output_and_lse(case, answer, q, k, v, True, block_q=2, block_k=5)


@tiled.requires(
    "causal with fewer queries than keys: the queries are the last positions",
    "The position of query i is i + T_k − T_q.",
)
def _(answer, case):
    q, k, v = heads(2, 3, t_q=5, t_k=11, d_head=4, d_v=6, seed=60)
    output_and_lse(case, answer, q, k, v, True, block_q=2, block_k=3)
    output_and_lse(case, answer, q, k, v, True, block_q=5, block_k=4)
    output_and_lse(case, answer, q[..., :1, :], k, v, True, block_q=4, block_k=4)


@tiled.requires(
    "scores of ±10,000 give no overflow",
    "A row's sum is at least 1 if its largest score was subtracted. Is the start of "
    "your maximum below every score?",
)
def _(answer, case):
    for level in (10_000, -10_000, -20_000):
        q, k, v = heads(2, t_q=5, t_k=7, d_head=16, d_v=3, seed=70)
        q, k = q.round(), k.round()
        q[..., 0], k[..., 0] = 200.0, level / 50.0
        output_and_lse(case, answer, q, k, v, block_q=3, block_k=2, relaxed=0.01)
        output_and_lse(case, answer, q, k, v, True, block_q=3, block_k=2, relaxed=0.01)


@tiled.requires(
    "it never holds more than a few blocks of scores",
    "Which of your tensors has both lengths in its shape? The mask counts too.",
)
def _(answer, case):
    t_k = 640
    q, k, v = heads(t_q=t_k, t_k=t_k, d_head=4, seed=80)
    for causal in (False, True):
        with Cost() as cost:
            found = case.call(answer, q, k, v, causal, block_q=64, block_k=64)
        peak = cost.peak_bytes
        compared(case, found, q, k, v, causal)
        limit = t_k * t_k  # a quarter of the matrix in float32, a mask of bytes whole
        case.true(
            peak < limit,
            f"At {t_k} queries and keys in blocks of 64 × 64, {peak:,} bytes of new "
            f"tensors were alive at once; the whole matrix has {4 * t_k * t_k:,}, one "
            f"block {4 * 64 * 64:,}.",
        )


@tiled.requires(
    "causal: blocks that nobody sees are not computed",
    "A block whose first key lies after the block's last query has no weight at all. "
    "Where can the loop over the keys end?",
)
def _(answer, case):
    q, k, v = heads(t_q=160, t_k=160, d_head=4, seed=85)
    for t_q, hidden, blocks in ((160, 45, 100), (80, 10, 50)):
        rows, spent = q[-t_q:], []
        for causal in (False, True):
            with Cost() as cost:
                found = case.call(answer, rows, k, v, causal, block_q=16, block_k=16)
            spent.append(cost.flops or cost.written)
            compared(case, found, rows, k, v, causal)
        saved = 1 - spent[1] / spent[0]
        case.true(
            saved > 0.9 * hidden / blocks,
            f"{t_q} queries and 160 keys in blocks of 16 × 16: causal saves "
            f"{max(saved, 0):.0%} of the work; {hidden} of the {blocks} blocks are "
            "hidden from all their queries.",
        )


@tiled.requires(
    "half precision is computed in float32; the output has the dtype of q, the "
    "log-sum-exp is float32",
    "Convert a block when it is fetched, and the output when it is finished.",
)
def _(answer, case):
    for half in (torch.float16, torch.bfloat16):
        q, k, v = heads(2, t_q=5, t_k=90, d_head=8, d_v=3, seed=90, dtype=half)
        output_and_lse(case, answer, q, k, v, block_q=2, block_k=7)
        output_and_lse(case, answer, q, k, v, True, block_q=4, block_k=16)
    q, k, v = heads(t_q=3, t_k=2500, d_head=8, seed=95, dtype=torch.float16)
    output_and_lse(case, answer, 0.1 * q, k, v.abs(), block_q=3, block_k=10)
    # The first value is large, and what each other block adds is lost beside it.
    q, k, v = heads(t_q=2, t_k=300, d_head=8, d_v=3, seed=96, dtype=torch.float16)
    v = torch.cat([v[:1] * 0 + 2000, v[1:] * 0 + 0.4])
    output_and_lse(case, answer, q * 0, k, v, block_q=2, block_k=1)
    # Weights of e^−17.5, which is 0 in float16, of values of 60,000.
    k = torch.cat([k[:1] * 0, k[1:] * 0 - 3.5])
    v = torch.cat([v[:1] * 0, v[1:] * 0 + 60_000])
    output_and_lse(case, answer, q * 0 + 1.767767, k, v, block_q=2, block_k=100)


@tiled.requires("float64, and memory that is not contiguous, work too")
def _(answer, case):
    q, k, v = heads(2, 3, t_q=5, t_k=7, d_head=4, d_v=6, seed=100, dtype=torch.float64)
    output_and_lse(case, answer, q, k, v, True, 2, 3, relaxed=1e-9)
    q, k, v = heads(2, 3, t_q=5, t_k=7, d_head=4, d_v=6, seed=105)
    output_and_lse(case, answer, strided(q), strided(k), strided(v), True, 2, 3)
    q, k, v = (x.transpose(1, 2) for x in heads(2, 5, t_q=3, t_k=3, d_head=4, seed=106))
    output_and_lse(case, answer, q, k, v, False, 2, 3)


@tiled.requires(
    "what does not fit is a ValueError that names the numbers",
    "Compare the shapes first: a wrong number of heads may broadcast without a word.",
)
def _(answer, case):
    q, k, v = heads(2, 3, t_q=5, t_k=4, d_head=8, seed=110)
    why = "causal, with 5 queries and 4 keys"
    case.raises(ValueError, answer, q, k, v, True, mentions=(5, 4), because=why)
    for n, m in ((0, 7), (7, 0), (-3, 7)):
        why = f"blocks of {n} × {m}"
        bad = min(n, m)
        case.raises(
            ValueError, answer, q, k, v, False, n, m, mentions=[bad], because=why
        )
    why = "3 heads of queries and 1 of keys and values"
    few = (q, k[:, :1], v[:, :1])
    case.raises(ValueError, answer, *few, mentions=(3, 1), because=why)
    why = "3 heads of queries and keys and 1 of values"
    case.raises(ValueError, answer, q, k, v[:, :1], mentions=(3, 1), because=why)
    why = "queries with a dimension for batches, keys and values without"
    case.raises(ValueError, answer, q, k[0], v[0], because=why)
    why = "4 keys and 3 values"
    case.raises(ValueError, answer, q, k, v[:, :, 1:], mentions=(4, 3), because=why)
    why = "queries of width 8 and keys of width 6"
    case.raises(ValueError, answer, q, k[..., :6], v, mentions=(8, 6), because=why)


@tiled.requires(
    "without any key the output is zeros and the log-sum-exp −inf",
    "0/0 is NaN. How small can the sum of a query be that has seen a key?",
)
def _(answer, case):
    for kind in (torch.float32, torch.float16, torch.float64):
        q, k, v = heads(2, t_q=3, t_k=0, d_head=8, d_v=5, seed=115, dtype=kind)
        found = case.call(answer, q, k, v)
        case.is_tuple(found, 2, "the result (output and log-sum-exp)")
        case.close(found[0], torch.zeros(2, 3, 5), "the output", like=q)
        sums(case, found[1], torch.full((2, 3), -torch.inf), "the log-sum-exp", q)


@tiled.requires("it creates nothing on another device")
def _(answer, case):
    q, k, v = heads(2, 3, t_q=5, t_k=7, d_head=4, d_v=6, seed=120)
    case.any_device(lambda *args: answer(*args)[0], q, k, v, False, 2, 3)
    case.any_device(lambda *args: answer(*args)[1], q, k, v, True, 2, 3)


def positions_seen(t_q, t_k, rows, keys, how):
    """The mask of one block; `how` a wrong idea of it."""
    top, left, n = rows.start, keys.start, rows.stop - rows.start
    at = torch.arange(n)[:, None] + top + t_k - t_q
    key = torch.arange(keys.stop - left) + left
    if how == "top_left":
        return key <= at - (t_k - t_q)
    if how == "own_position_hidden":
        return key < at
    if how == "one_ahead":
        return key <= at + 1
    if how == "within_the_block":
        return key - left <= at - top
    if how == "offset_forgotten":
        return key <= torch.arange(n)[:, None] + t_k - t_q
    if how == "key_blocks_at_the_start":
        return key - left <= at
    if how == "mirrored":
        return key >= at
    if how == "inverted":
        return key > at
    return key <= at


def blockwise(**change):
    """Attention in blocks with one thing wrong.

    change: what is wrong, by the names that the code below asks for.
    """

    def get(name, right):
        return change.get(name, right)

    def flash_attention(q, k, v, causal=False, block_q=64, block_k=64):
        (*batch, t_q, d), t_k, d_v = q.shape, k.shape[-2], v.shape[-1]
        fits = k.shape == (*batch, t_k, d) and v.shape[:-1] == (*batch, t_k)
        if get("shapes", True) == "q and k":
            fits = k.shape == (*batch, t_k, d) and v.shape[-2] == t_k
        if get("shapes", True) and not fits:
            raise ValueError(f"{tuple(q.shape)} {tuple(k.shape)} {tuple(v.shape)}")
        if get("lengths", True) and causal and t_q > t_k:
            raise ValueError(f"{t_q} queries, {t_k} keys")
        if get("blocks", True) and min(block_q, block_k) < 1:
            raise ValueError(f"blocks of {block_q} × {block_k}")
        high = get("high", torch.promote_types(q.dtype, torch.float32))
        high = q.dtype if high == "own" else high
        if "pad" in change:
            more = -t_k % block_k
            k, v = F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more))
        there = k.shape[-2]
        scale = get("scale", lambda d, d_v, n: d**-0.5)(d, d_v, block_q)
        outputs, lses = [], []
        stop_q = t_q // block_q * block_q if "queries_dropped" in change else t_q
        for top in range(0, stop_q, block_q):
            rows = slice(top, min(top + block_q, t_q))
            n = rows.stop - top
            q_block = q[..., rows, :].to(high) * scale
            if "scaled_as_it_comes" in change:
                q_block = (q[..., rows, :] * scale).to(high)
            m = q_block.new_full((*batch, n), get("start", -torch.inf))
            total = q_block.new_zeros((*batch, n))
            out = q_block.new_zeros((*batch, n, d_v))
            end = there
            if causal and get("skip", True):
                end = min(end, get("end", lambda r, o: r.stop + o)(rows, t_k - t_q))
                end = max(end, 1) if "end" in change else end
            if "keys_dropped" in change:
                end = end // block_k * block_k
            for left in range(0, end, block_k):
                keys = slice(
                    left, min(left + block_k, there if "pad" in change else end)
                )
                fetched = keys
                if "first_block_again" in change:
                    fetched = slice(0, keys.stop - left)
                k_block, v_block = k[..., fetched, :].to(high), v[..., fetched, :]
                v_block = v_block.to(high)
                scores = get("product", lambda a, b: a @ b.mT)(q_block, k_block)
                if causal and get("mask", True):
                    seen = positions_seen(t_q, t_k, rows, keys, get("mask", "right"))
                    seen = seen.to(q.device)
                    scores = scores.masked_fill(~seen, get("hidden", -torch.inf))
                new = torch.maximum(m, scores.amax(-1))
                if "last_maximum" in change:
                    new = scores.amax(-1)
                if "one_maximum" in change:
                    new = torch.maximum(m, scores.amax())
                if "no_maximum" in change:
                    new = torch.zeros_like(m)
                w = torch.exp(scores - new[..., None])
                if "old_maximum" in change:
                    w = torch.exp(scores - m[..., None])
                if "softmax" in change:
                    w = torch.softmax(scores, -1)
                factor = torch.exp(m - new)
                if "inverted" in change:
                    factor = torch.exp(new - m)
                    if change["inverted"] == "later":
                        factor = torch.where(m == -torch.inf, 0.0, factor)
                total_factor = get("total_factor", lambda f: f)(factor)
                out_factor = get("out_factor", lambda f: f)(factor)[..., None]
                total = total * total_factor + w.sum(-1)
                part = get("weights", lambda w, v: w)(w, v).to(high) @ v_block
                if "normalised_each" in change:
                    part = part / w.sum(-1, keepdim=True)
                out = get("kept", lambda x, q: x)(out * out_factor + part, q)
                if "divided_each" in change:
                    out = out / total[..., None]
                m = new if "maximum_kept" not in change else m
            divisor = get("divisor", lambda x: x.clamp(min=1))(total)
            outputs.append((out / divisor[..., None]).to(q.dtype))
            lses.append(get("lse", lambda m, total: m + torch.log(total))(m, total))
        if not outputs:
            outputs, lses = [v.new_zeros((*batch, 0, d_v))], [v.new_zeros((*batch, 0))]
        return get("finish", lambda out, lse: (out, lse))(
            torch.cat(outputs, -2), torch.cat(lses, -1)
        )

    return flash_attention


TILED_FAULTS = [  # those that show late come first
    (
        "no_keys_divide_by_zero",
        "Without any key the sum is 0, and 0/0 is NaN. The sum of a query that has seen "
        "a key is at least 1.",
        {"divisor": lambda x: x},
    ),
    (
        "shapes_unchecked",
        "Shapes that do not fit are not refused, or by PyTorch alone. One head of keys "
        "for three of queries even broadcasts, and nobody notices.",
        {"shapes": False},
    ),
    (
        "blocks_unchecked",
        "A block size below 1 is not refused with a sentence of its own.",
        {"blocks": False},
    ),
    (
        "lengths_unchecked",
        "More queries than keys, with causal, are not refused. The first queries would "
        "stand before the first position.",
        {"lengths": False},
    ),
    (
        "half_precision_sums",
        "The sums, or the log-sum-exp alone, are in the dtype that came in. A long sum "
        "in float16 loses its small terms, and an error of 0.01 in the log-sum-exp is "
        "one of 1 % in every weight that the backward pass makes of it.",
        {"high": "own"},
    ),
    (
        "scaled_in_half_precision",
        "The queries are scaled in the dtype that came in, and rounded. Convert first, "
        "then scale.",
        {"scaled_as_it_comes": True},
    ),
    (
        "weights_in_half_precision",
        "The weights are converted to the dtype of v before the product. In float16 a "
        "weight below 3e-8 is 0; convert the values instead.",
        {"weights": lambda w, v: w.to(v.dtype)},
    ),
    (
        "output_kept_in_half_precision",
        "The output so far is kept in the dtype of q, so that small terms vanish beside "
        "a large one. Convert it when the last block has come.",
        {"kept": lambda x, q: x.to(q.dtype).to(x.dtype)},
    ),
    (
        "values_unchecked",
        "The dimensions in front of v are not compared with those of q: one head of "
        "values broadcasts over all queries.",
        {"shapes": "q and k"},
    ),
    (
        "float32_returned",
        "The output is float32 whatever came in. Computing in float32 is right; give "
        "back the dtype of q.",
        {"finish": lambda out, lse: (out.float(), lse)},
    ),
    (
        "hidden_blocks_computed",
        "Right, but causal blocks that no query of theirs sees are computed and masked. "
        "That is nearly half of all work.",
        {"skip": False},
    ),
    (
        "starts_at_zero",
        "The maximum starts at 0. Where all scores are far below 0, all exponentials "
        "underflow. It must start below every score.",
        {"start": 0.0},
    ),
    (
        "no_maximum",
        "No maximum is subtracted: beyond a score of 88 the exponential overflows.",
        {"no_maximum": True},
    ),
    (
        "hidden_scores_are_minus_1000",
        "Hidden scores get a large negative number. Allowed scores can be lower, and "
        "then the hidden key wins; only −inf is below everything.",
        {"hidden": -1000.0},
    ),
    (
        "hidden_scores_are_zero",
        "Hidden scores become 0, which is a score like any other. They become −inf.",
        {"hidden": 0.0},
    ),
    (
        "mask_inverted",
        "The mask hides what may be seen, and shows the rest: it is used the other way "
        "round.",
        {"mask": "inverted", "skip": False},
    ),
    (
        "causal_ignored",
        "`causal` has no effect: the queries see everything.",
        {"mask": False, "skip": False},
    ),
    (
        "causal_top_left",
        "The causal mask is aligned top-left: query i sees keys up to i. With fewer "
        "queries than keys they are the last positions, so query i stands at "
        "i + T_k − T_q.",
        {"mask": "top_left", "end": lambda rows, offset: rows.stop},
    ),
    (
        "key_blocks_all_at_the_start",
        "Every block of keys is treated as the first one: the mask lacks where the block "
        "starts.",
        {"mask": "key_blocks_at_the_start"},
    ),
    (
        "own_position_hidden",
        "No query sees its own position. The comparison of key and query position "
        "includes equality.",
        {"mask": "own_position_hidden"},
    ),
    (
        "one_position_ahead",
        "Each query sees one position ahead: off by one.",
        {"mask": "one_ahead", "end": lambda rows, offset: rows.stop + offset + 1},
    ),
    (
        "positions_within_the_block",
        "The mask compares places within the block. Both blocks start somewhere: add "
        "where they start to get positions.",
        {"mask": "within_the_block"},
    ),
    (
        "query_blocks_all_at_the_start",
        "Every block of queries is treated as the first one: the mask lacks where the "
        "block starts.",
        {"mask": "offset_forgotten"},
    ),
    (
        "mask_mirrored",
        "The mask is the other way round: every query sees itself and what comes "
        "after.",
        {"mask": "mirrored", "skip": False},
    ),
    (
        "diagonal_not_masked",
        "Blocks after the last query are left out, but within the last block a query "
        "still sees keys after its own position: those need the mask.",
        {"mask": False},
    ),
    (
        "loop_ends_too_early",
        "The loop over the keys ends with the block's first query. The others of the "
        "block see more.",
        {"end": lambda rows, offset: rows.start + offset + 1},
    ),
    (
        "missing_keys_score_zero",
        "The last block is filled up with zeros. A key of zeros has the score 0, which "
        "is a weight like any other: it needs −inf, or must not be there.",
        {"pad": True},
    ),
    (
        "last_keys_dropped",
        "The keys after the last whole block are left out.",
        {"keys_dropped": True},
    ),
    (
        "last_queries_dropped",
        "The queries after the last whole block are left out.",
        {"queries_dropped": True},
    ),
    (
        "rescaling_inverted",
        "What was summed so far is multiplied by exp(new − old) where exp(old − new) is "
        "right (one well-known paper prints it so). A larger maximum makes every old "
        "term smaller.",
        {"inverted": "later"},
    ),
    (
        "infinite_rescaling",
        "What was summed so far is multiplied by exp(new − old) where exp(old − new) is "
        "right. At first old is −∞, so that the factor is ∞, and ∞ · 0 is NaN.",
        {"inverted": "always"},
    ),
    (
        "old_maximum_subtracted",
        "The weights are relative to the maximum before this block, which begins at −∞. "
        "Update the maximum first, then take the exponentials.",
        {"old_maximum": True},
    ),
    (
        "maximum_not_updated",
        "The old maximum is not replaced by the new one at the end of a block.",
        {"maximum_kept": True},
    ),
    (
        "one_maximum_for_all_rows",
        "One maximum is used for all queries. A query far below it loses all its terms: "
        "take the maximum over the last dimension.",
        {"one_maximum": True},
    ),
    (
        "softmax_of_each_block",
        "Each block of scores goes through a softmax of its own, so that every block "
        "counts the same. The weights are exp(score − maximum), divided at the end.",
        {"softmax": True},
    ),
    (
        "nothing_rescaled",
        "Neither sum nor output are corrected when a larger score comes.",
        {"total_factor": torch.ones_like, "out_factor": torch.ones_like},
    ),
    (
        "sum_not_rescaled",
        "The output is corrected when a larger score comes, the sum is not. Both are "
        "relative to the maximum.",
        {"total_factor": torch.ones_like},
    ),
    (
        "output_not_rescaled",
        "The sum is corrected when a larger score comes, the output is not. Both are "
        "relative to the maximum.",
        {"out_factor": torch.ones_like},
    ),
    (
        "output_overwritten",
        "The output is that of the last block of keys alone: each block adds to it.",
        {"out_factor": torch.zeros_like},
    ),
    (
        "sum_overwritten",
        "The sum is that of the last block of keys alone: each block adds to it.",
        {"total_factor": torch.zeros_like},
    ),
    (
        "first_block_again",
        "Every turn of the loop uses the first block of keys and values again.",
        {"first_block_again": True},
    ),
    (
        "divided_in_every_block",
        "The output is divided by the sum so far in every block. Divide once, after the "
        "last.",
        {"divided_each": True, "divisor": torch.ones_like},
    ),
    (
        "last_blocks_maximum",
        "The maximum is that of the last block, not the largest so far. Right as long "
        "as nothing overflows, and it does when a block's scores fall far.",
        {"last_maximum": True},
    ),
    (
        "each_block_normalised",
        "Each block's weights are divided by their own sum, so that every block counts "
        "the same. Divide once, at the end, by the sum over all blocks.",
        {"normalised_each": True},
    ),
    (
        "not_divided",
        "The output is not divided by the sum of the exponentials at the end.",
        {"divisor": torch.ones_like},
    ),
    (
        "maximum_missing_in_lse",
        "The log-sum-exp lacks the maximum: log Σ exp(s) = m + log Σ exp(s − m).",
        {"lse": lambda m, total: torch.log(total)},
    ),
    (
        "lse_without_logarithm",
        "The sum is added to the maximum without its logarithm.",
        {"lse": lambda m, total: m + total},
    ),
    (
        "lse_in_base_2",
        "The log-sum-exp is in base 2. Here it is natural: multiply by ln 2.",
        {"lse": lambda m, total: (m + torch.log(total)) / math.log(2)},
    ),
    (
        "maximum_returned",
        "The second result is the maximum. The sum's logarithm has yet to be added.",
        {"lse": lambda m, total: m},
    ),
    (
        "sum_returned",
        "The second result is the sum relative to the maximum. The log-sum-exp is "
        "m + log of it.",
        {"lse": lambda m, total: total},
    ),
    (
        "no_scaling",
        "The scores are not divided by the root of d_head.",
        {"scale": lambda d, d_v, n: 1.0},
    ),
    (
        "divided_by_d_head",
        "The scores are divided by d_head, not by its root. Or by the root twice?",
        {"scale": lambda d, d_v, n: 1 / d},
    ),
    (
        "multiplied_by_the_root",
        "The scores are multiplied by the root of d_head instead of divided.",
        {"scale": lambda d, d_v, n: d**0.5},
    ),
    (
        "root_of_d_v",
        "The divisor is the root of the values' width. The scores sum over the d_head "
        "numbers of queries and keys.",
        {"scale": lambda d, d_v, n: d_v**-0.5},
    ),
    (
        "root_of_the_block",
        "The divisor is the root of the block size. It is the width of a query that "
        "counts.",
        {"scale": lambda d, d_v, n: n**-0.5},
    ),
    (
        "output_alone",
        "It returns the output alone. The backward pass will need the log-sum-exp.",
        {"finish": lambda out, lse: out},
    ),
    (
        "results_exchanged",
        "The results are in the other order: the output comes first.",
        {"finish": lambda out, lse: (lse, out)},
    ),
]


for name, sentence, change in TILED_FAULTS:
    tiled.fault(name, sentence, blockwise(**change))


# Its gradient -------------------------------------------------------------------------


def applied(answer):
    """`FlashAttention.apply` under the parameters' names, for the messages."""

    def apply(q, k, v, *causal_and_blocks):
        return answer.apply(q, k, v, *causal_and_blocks)

    apply.__name__ = "FlashAttention.apply"
    return apply


def all_gradients(case, answer, q, k, v, *more, of="qkv", same_sign=False):
    """Compare the gradients of q, k and v, or of some of them.

    The backward pass runs inside a call, so that what it raises is recorded.
    """

    def gradients(apply, *given):
        leaves = dict(zip("qkv", given, strict=True))
        wanted = [leaves[name].requires_grad_() for name in of]
        output = apply(*given, *more)
        case.is_tensor(output)
        if not output.requires_grad:
            raise Explained(
                "No gradient flows through it: `FlashAttention` must be a "
                "torch.autograd.Function whose forward works on q, k and v themselves."
            )
        d_output = probe(*output.shape, seed=91, dtype=output.dtype)
        d_output = d_output.abs() if same_sign else d_output
        before = output.detach().clone(), d_output.clone()
        found = torch.autograd.grad(output, wanted, d_output, allow_unused=True)
        for name, x, old in zip(
            ("its output", "the gradient that came in"),
            (output, d_output),
            before,
            strict=True,
        ):
            if not torch.equal(x, old) and not x.isnan().any():
                raise Explained(
                    f"The backward pass changed {name} in place: others use it too. "
                    "Work on a new tensor."
                )
        return tuple(
            torch.zeros_like(x) if gradient is None else gradient
            for x, gradient in zip(wanted, found, strict=True)
        )

    def backward(q, k, v):
        return gradients(answer.apply, q, k, v)

    backward.__name__ = "the backward pass of FlashAttention.apply"
    actual = case.call(backward, q, k, v)
    truth = gradients(whole_attention, *(x.detach().double() for x in (q, k, v)))
    for name, ours, expected in zip(of, actual, truth, strict=True):
        case.close(ours, expected, f"the gradient of `{name}`")


@FlashAttention.requires(
    "forward gives the output of flash_attention, and nothing else",
    "`flash_attention` returns two things; hand on the first and keep both.",
)
def _(answer, case):
    apply = applied(answer)
    q, k, v = heads(2, t_q=4, t_k=5, d_head=7, d_v=3)
    case.agrees(apply, whole_attention, q, k, v)
    q, k, v = heads(2, 3, t_q=5, t_k=9, d_head=4, d_v=6, seed=5)
    case.agrees(apply, whole_attention, q, k, v, True)
    case.agrees(apply, whole_attention, q, k, v, True, 2, 3)


@FlashAttention.requires(
    "the gradient of v is right, in one block",
    "The output is weights·v, a matrix product. What is its gradient for v? The weights "
    "come back as exp(score − log-sum-exp).",
)
def _(answer, case):
    all_gradients(case, answer, *heads(2, t_q=4, t_k=5, d_head=7, seed=10), of="v")
    q, k, v = heads(2, 3, t_q=4, t_k=5, d_head=7, d_v=3, seed=15)
    all_gradients(case, answer, q, k, v, of="v")


@FlashAttention.requires(
    "the gradient of q is right, in one block",
    "Through the softmax: dS = P ∘ (dP − D), where D is one number for each query, the "
    "sum of dO ∘ O. Then through the scaled product.",
)
def _(answer, case):
    all_gradients(case, answer, *heads(2, t_q=5, t_k=5, d_head=7, seed=20), of="q")
    q, k, v = heads(2, 3, t_q=4, t_k=5, d_head=7, d_v=3, seed=25)
    all_gradients(case, answer, q, k, v, of="q")


@FlashAttention.requires(
    "all three gradients are right, in one block",
    "The scale stands between scores and q·k for the keys as well.",
)
def _(answer, case):
    all_gradients(case, answer, *heads(2, t_q=4, t_k=5, d_head=7, d_v=3, seed=30))
    all_gradients(case, answer, *heads(2, 3, t_q=4, t_k=5, d_head=9, d_v=9, seed=35))


@FlashAttention.requires(
    "many blocks, and lengths that they do not divide",
    "A key meets every block of queries, a query every block of keys: what they get "
    "from each is added up.",
)
def _(answer, case):
    q, k, v = heads(2, t_q=11, t_k=13, d_head=7, d_v=3, seed=40)
    all_gradients(case, answer, q, k, v, False, 4, 5)
    all_gradients(case, answer, q, k, v, False, 3, 2)
    all_gradients(case, answer, *heads(2, t_q=66, t_k=70, d_head=3, d_v=2, seed=45))


@FlashAttention.requires(
    "causal, with as many queries as keys and with fewer",
    "The weights come from scores again, so they have to be masked again.",
)
def _(answer, case):
    q, k, v = heads(2, 3, t_q=9, t_k=9, d_head=4, d_v=6, seed=50)
    all_gradients(case, answer, q, k, v, True)
    all_gradients(case, answer, q, k, v, True, 4, 2)
    q, k, v = heads(2, 3, t_q=5, t_k=11, d_head=4, d_v=6, seed=55)
    all_gradients(case, answer, q, k, v, True, 2, 3)
    all_gradients(case, answer, q, k, v, True, 4, 16)


@FlashAttention.requires(
    "calls do not disturb each other, and backward may come twice",
    "What belongs to one call belongs on its `ctx`. Sums begin at zero in backward.",
)
def _(answer, case):
    one = heads(2, t_q=5, t_k=7, d_head=4, d_v=6, seed=62)
    two = heads(2, t_q=4, t_k=9, d_head=4, d_v=6, seed=64)

    def backward(*given):
        first, second = given[:3], given[3:]
        leaves = [x.requires_grad_() for x in given]
        outputs = answer.apply(*first, True, 2, 3), answer.apply(*second, False, 3, 2)
        if not all(x.requires_grad for x in outputs):
            raise Explained("No gradient flows through it.")
        total = sum((x * probe(*x.shape, seed=91)).sum() for x in outputs)
        found = [torch.autograd.grad(total, leaves, retain_graph=True) for _ in "12"]
        return tuple(x.detach().clone() for each in found for x in each)

    backward.__name__ = "two forward passes, and backward twice,"
    found = case.call(backward, *one, *two)
    truth = []
    for given, causal in ((one, True), (two, False)):
        leaves = [x.double().requires_grad_() for x in given]
        output = whole_attention(*leaves, causal)
        d_output = probe(*output.shape, seed=91)
        truth += torch.autograd.grad(output, leaves, d_output.double())
    for i, (ours, expected) in enumerate(zip(found, 2 * truth, strict=True)):
        call, time = ("first", "second")[i % 6 // 3], ("", ", the second time")[i // 6]
        what = f"the gradient of `{'qkv'[i % 3]}` of the {call} call{time}"
        case.close(ours, expected, what)


@FlashAttention.requires(
    "between forward and backward it keeps q, k, v, output and log-sum-exp alone",
    "Weights that are kept, on `ctx` or in `save_for_backward`, are the whole matrix "
    "again. Copies of q, k and v, and sums, can be made in backward.",
)
def _(answer, case):
    for causal, kind in ((False, torch.float32), (True, torch.float16)):
        q, k, v = heads(t_q=256, t_k=256, d_head=16, seed=60, dtype=kind)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        case.call(answer.apply, *leaves, causal)
        saved = saved_bytes(lambda x=leaves, c=causal: answer.apply(*x, c))
        with Cost() as cost:
            output = answer.apply(*leaves, causal)
            given = sum(x.untyped_storage().nbytes() for x in leaves)
            kept = max(saved, cost.bytes_now + given)
        del output
        size = kind.itemsize
        allowed = 256 * (4 * 16 * size + 4)  # q, k, v, output: 256 × 16; log-sum-exp
        case.note(kept > allowed + 2 * 256 * 256)  # a matrix, not copies
        case.true(
            kept <= 1.15 * allowed,
            f"After forward at 256 queries and keys of width 16 in {dtype(q)}, {kept:,} "
            f"bytes are kept; q, k, v, output and log-sum-exp have {allowed:,}, the "
            f"matrix of weights in float32 {4 * 256 * 256:,}.",
        )


@FlashAttention.requires(
    "what it keeps is freed with the output",
    "A tensor that is set on `ctx` is freed by Python's garbage collector, some day. "
    "What goes through `save_for_backward` is freed at once.",
)
def _(answer, case):
    leaves = [x.requires_grad_() for x in heads(t_q=6, t_k=6, d_head=4, seed=63)]
    case.call(answer.apply, *leaves)
    collecting = gc.isenabled()
    gc.disable()
    try:
        output = answer.apply(*leaves)
        alive = weakref.ref(output)
        del output
        kept = alive() is not None
    finally:
        if collecting:
            gc.enable()
    case.note(kept)
    case.true(not kept, "After `del output` the output is still in memory.")


@FlashAttention.requires(
    "backward holds no more than a few blocks, either",
    "Which of its tensors has both lengths in its shape?",
)
def _(answer, case):
    q, k, v = heads(t_q=640, t_k=640, d_head=4, seed=65)
    for causal in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = case.call(answer.apply, *leaves, causal, 64, 64)
        peak = peak_bytes(lambda o=out: o.sum().backward())
        case.true(
            peak < 1.2 * 640 * 640,
            f"At 640 queries and keys in blocks of 64 × 64, backward had {peak:,} bytes "
            f"of new tensors at once; the whole matrix has {4 * 640 * 640:,}.",
        )


@FlashAttention.requires(
    "large scores give finite, right gradients",
    "A weight is exp(score − log-sum-exp): never exp(score) divided by something.",
)
def _(answer, case):
    q, k, v = heads(2, t_q=5, t_k=7, d_head=16, d_v=3, seed=70)
    q, k = q.round(), k.round()
    q[..., 0], k[..., 0] = 8.0, 64.0
    all_gradients(case, answer, q, k, v, False, 3, 2)
    k[..., 0] = -64.0
    all_gradients(case, answer, q, k, v, True, 3, 2)
    k[..., 0] = torch.tensor([0.0, 0, 0, 64, 64, 128, 128])  # hidden ones are largest
    all_gradients(case, answer, q, k, v, True, 3, 2)
    all_gradients(case, answer, q.half(), k.half(), v.half(), False, 3, 2)


@FlashAttention.requires(
    "float64, half precision, and memory that is not contiguous work too",
    "The sums over blocks belong in float32, as in the forward pass.",
)
def _(answer, case):
    q, k, v = heads(2, t_q=5, t_k=7, d_head=4, d_v=6, seed=80, dtype=torch.float64)
    all_gradients(case, answer, q, k, v, True, 2, 3)
    q, k, v = heads(2, 3, t_q=5, t_k=7, d_head=4, d_v=6, seed=85)
    all_gradients(case, answer, strided(q), strided(k), strided(v), True, 2, 3)
    for half in (torch.float16, torch.bfloat16):
        q, k, v = heads(2, t_q=40, t_k=60, d_head=8, d_v=3, seed=90, dtype=half)
        all_gradients(case, answer, q, k, v, True, 2, 3)
    q, k, v = heads(t_q=600, t_k=6, d_head=4, seed=95, dtype=torch.bfloat16)
    all_gradients(case, answer, q * 0, k, v, False, 1, 6, of="v", same_sign=True)


@FlashAttention.requires("what does not fit is refused here too")
def _(answer, case):
    q, k, v = heads(2, 3, t_q=5, t_k=4, d_head=8, seed=110)
    why = "causal, with 5 queries and 4 keys"
    case.raises(ValueError, answer.apply, q, k, v, True, mentions=(5, 4), because=why)
    few = (q, k[:, :1], v[:, :1])
    why = "3 heads of queries and 1 of keys and values"
    case.raises(ValueError, answer.apply, *few, mentions=(3, 1), because=why)


@FlashAttention.requires(
    "the gradient has no gradient of its own: asking for one is an error",
    "`@once_differentiable`, between `@staticmethod` and `def backward`.",
)
def _(answer, case):
    def twice(f, q, k, v):
        leaves = [x.requires_grad_() for x in (q, k, v)]
        output = f(*leaves)
        (slope,) = torch.autograd.grad((output**2).sum(), leaves[0], create_graph=True)
        try:
            (slope**2).sum().backward()
        except RuntimeError:
            return None
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)

    def gradient_of_a_gradient(q, k, v):
        return twice(answer.apply, q, k, v)

    q, k, v = heads(2, t_q=5, t_k=7, d_head=4, d_v=6, seed=120)
    found = case.call(gradient_of_a_gradient, q, k, v)
    if found is not None:
        truth = twice(
            lambda q, k, v: torch.softmax(whole_scores(q, k), -1) @ v,
            *(x.double() for x in (q, k, v)),
        )
        for name, ours, expected in zip("qkv", found, truth, strict=True):
            case.close(ours, expected, f"the gradient of the gradient, for `{name}`,")


def gradient_with(**change):
    """A `FlashAttention` with one thing wrong in its backward pass, or forward."""

    shared = {}

    def get(name, right):
        return change.get(name, right)

    def forward(ctx, q, k, v, causal=False, block_q=64, block_k=64):
        unchecked = {"shapes": False, "lengths": False} if "unchecked" in change else {}
        given = () if "defaults" in change else (causal, block_q, block_k)
        output, lse = blockwise(**unchecked)(q, k, v, *given)
        lse = get("lse", lambda lse, q: lse)(lse, q)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.settings = causal, block_q, block_k
        if "shared" in change:
            shared["settings"] = ctx.settings
        if "keep" in change:
            ctx.kept = change["keep"](q, k)
        if "ring" in change:
            ctx.output = output
        return get("finish", lambda out, lse: out)(output, lse)

    def backward(ctx, d_output, *more):
        q, k, v, output, lse = ctx.saved_tensors
        causal, block_q, block_k = shared.get("settings", ctx.settings)
        t_q, t_k, high = q.shape[-2], k.shape[-2], get("high", lse.dtype)
        high = q.dtype if high == "own" else high
        scale = get("scale", q.shape[-1] ** -0.5)
        grads = [torch.zeros_like(x, dtype=high) for x in (q, k, v)]
        if "ones" in change:
            d_output = torch.ones_like(d_output)
        row_sums = (d_output.to(high) * output.to(high)).sum(-1)
        if "whole" in change:
            held = torch.zeros(t_q, t_k)  # noqa: F841
        for top in range(0, t_q, block_q):
            rows = slice(top, min(top + block_q, t_q))
            end = t_k - t_q + rows.stop if causal else t_k
            q_block, d_block = q[..., rows, :].to(high), d_output[..., rows, :].to(high)
            for left in range(0, end, block_k):
                keys = slice(left, min(left + block_k, end))
                k_block, v_block = k[..., keys, :].to(high), v[..., keys, :].to(high)
                scores = q_block @ k_block.mT * scale
                p = torch.exp(scores - lse.to(high)[..., rows, None])
                if "softmax" in change:
                    p = torch.softmax(scores, -1)
                if "unnormalised" in change:
                    p = torch.exp(scores)
                if "divided" in change:
                    p = torch.exp(scores) / torch.exp(lse[..., rows, None])
                if causal and get("mask", True):
                    seen = positions_seen(t_q, t_k, rows, keys, get("mask", "right"))
                    hidden = get("hidden", 0.0)
                    p = p * seen if "times" in change else p.masked_fill(~seen, hidden)
                d_p = d_block @ v_block.mT
                row = row_sums[..., rows, None]
                d_s = get("d_s", lambda p, d_p, row: p * (d_p - row))(p, d_p, row)
                parts = (
                    d_s @ k_block * get("q_scale", scale),
                    d_s.mT
                    @ q_block
                    * get("k_scale", scale)
                    * (scale ** get("more", 0)),
                    get("d_v", lambda p, d: p.mT @ d)(p, d_block),
                )
                for name, grad, at, part in zip(
                    "qkv", grads, (rows, keys, keys), parts, strict=True
                ):
                    if f"{name}_overwritten" in change:
                        grad[..., at, :] = part
                    else:
                        grad[..., at, :] += part
        d_q, d_k, d_v = (g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))
        order = get("order", lambda d_q, d_k, d_v: (d_q, d_k, d_v))
        return *order(d_q, d_k, d_v), None, None, None

    if "twice" not in change:
        backward = once_differentiable(backward)
    return type(
        "FlashAttention",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )


for name, sentence, change in (
    (
        "output_on_ctx",
        "The output is set on `ctx`. It knows its `ctx`, so the two hold each other, and "
        "are not freed when nobody else needs them.",
        {"ring": True},
    ),
    (
        "errors_lost",
        "What `flash_attention` refuses with a sentence is computed here, or fails with "
        "one of PyTorch's own. Call `flash_attention` in forward.",
        {"unchecked": True},
    ),
    (
        "half_precision_sums",
        "The gradients are summed in half precision. A key collects a little from very "
        "many queries, and beside a large sum a little is lost: sum in float32.",
        {"high": "own"},
    ),
    (
        "settings_shared",
        "`causal` and the block sizes are kept where the next call overwrites them, on "
        "the class or in a global. Every layer of a model calls forward before the "
        "first backward comes: keep them on `ctx`.",
        {"shared": True},
    ),
    (
        "settings_not_passed_on",
        "Forward calls `flash_attention` with q, k and v alone: `causal` and the block "
        "sizes are not passed on.",
        {"defaults": True},
    ),
    (
        "lse_in_half_precision",
        "The log-sum-exp is kept in half precision. An error of 0.1 in it is one of 10 % "
        "in every weight.",
        {"lse": lambda lse, q: lse.to(q.dtype).to(lse.dtype)},
    ),
    (
        "exponentials_overflow",
        "The weights are exp(score)/exp(log-sum-exp). Both overflow at a score of 89, "
        "and ∞/∞ is NaN: exp(score − log-sum-exp) does not.",
        {"divided": True},
    ),
    (
        "hidden_weights_minus_infinity",
        "Hidden weights become −∞. That is for scores; a hidden weight is 0.",
        {"hidden": -torch.inf},
    ),
    (
        "hidden_weights_overflow",
        "The weights are multiplied by the mask. exp(score − log-sum-exp) of a hidden "
        "key may overflow, and inf · 0 is NaN: replace them, with `masked_fill`.",
        {"times": True},
    ),
    (
        "differentiable_twice",
        "`@once_differentiable` is missing. The log-sum-exp has no graph, so a gradient "
        "of the gradient would be a wrong number, without a word.",
        {"twice": True},
    ),
    (
        "weights_kept",
        "The weights are kept for the backward pass: that is the whole matrix again. "
        "They can be computed from q, k and the log-sum-exp.",
        {"keep": lambda q, k: torch.softmax(whole_scores(q, k), -1)},
    ),
    (
        "matrix_in_backward",
        "Something as large as the whole matrix is made in the backward pass.",
        {"whole": True},
    ),
    (
        "mask_forgotten",
        "The backward pass computes its weights without the causal mask. exp(score − "
        "log-sum-exp) of a hidden key is not 0 by itself.",
        {"mask": False},
    ),
    (
        "causal_top_left",
        "The mask of the backward pass is aligned top-left: with fewer queries than "
        "keys, query i stands at i + T_k − T_q.",
        {"mask": "top_left"},
    ),
    (
        "own_position_hidden",
        "In the backward pass no query sees its own position.",
        {"mask": "own_position_hidden"},
    ),
    (
        "one_position_ahead",
        "In the backward pass each query sees one position ahead: off by one.",
        {"mask": "one_ahead"},
    ),
    (
        "positions_within_the_block",
        "The mask of the backward pass compares places within the block. Add where the "
        "blocks start.",
        {"mask": "within_the_block"},
    ),
    (
        "query_gradient_overwritten",
        "A query's gradient is that of its last block of keys. Every block adds to it.",
        {"q_overwritten": True},
    ),
    (
        "key_gradient_overwritten",
        "A key's gradient is that of the last block of queries. Every block adds to it.",
        {"k_overwritten": True},
    ),
    (
        "value_gradient_overwritten",
        "A value's gradient is that of the last block of queries. Every block adds to "
        "it.",
        {"v_overwritten": True},
    ),
    (
        "key_and_value_gradients_overwritten",
        "The gradients of keys and values are those of the last block of queries. Every "
        "block adds to them.",
        {"k_overwritten": True, "v_overwritten": True},
    ),
    (
        "gradients_overwritten",
        "All three gradients are those of the last block. Every block adds to them.",
        {"q_overwritten": True, "k_overwritten": True, "v_overwritten": True},
    ),
    (
        "softmax_of_the_block",
        "The weights are a softmax over the block's own keys. A weight is relative to "
        "all keys: exp(score − log-sum-exp), with the log-sum-exp that was kept.",
        {"softmax": True},
    ),
    (
        "row_sums_of_the_block",
        "D is summed over the block's own keys, Σ P ∘ dP. It runs over all of them; the "
        "sum of dO ∘ O is the same number and needs no keys.",
        {"d_s": lambda p, d_p, row: p * (d_p - (p * d_p).sum(-1, keepdim=True))},
    ),
    (
        "not_normalised",
        "The weights are exp(score): the log-sum-exp has to be subtracted first.",
        {"unnormalised": True},
    ),
    (
        "row_sums_forgotten",
        "dS = P ∘ dP lacks D. If one score rises, the softmax makes all other weights "
        "of the row fall; that is what D takes off.",
        {"d_s": lambda p, d_p, row: p * d_p},
    ),
    (
        "row_sums_added",
        "D is added where it must be subtracted: dS = P ∘ (dP − D).",
        {"d_s": lambda p, d_p, row: p * (d_p + row)},
    ),
    (
        "row_sums_outside",
        "D is subtracted after the product with the weights: dS = P ∘ (dP − D), not "
        "P ∘ dP − D.",
        {"d_s": lambda p, d_p, row: p * d_p - row},
    ),
    (
        "weights_forgotten",
        "dS = dP − D lacks the weights: dS = P ∘ (dP − D).",
        {"d_s": lambda p, d_p, row: d_p - row},
    ),
    (
        "key_gradient_without_scale",
        "The keys' gradient lacks the division by the root of d_head: the scores are "
        "q·k divided by it, so it stands in both gradients.",
        {"k_scale": 1.0},
    ),
    (
        "key_gradient_scaled_twice",
        "The keys' gradient has the scale twice: the queries that it is multiplied with "
        "are scaled already.",
        {"more": 1},
    ),
    (
        "query_gradient_without_scale",
        "The queries' gradient lacks the division by the root of d_head: the scores are "
        "q·k divided by it, so it stands in both gradients.",
        {"q_scale": 1.0},
    ),
    (
        "gradients_without_scale",
        "The gradients of q and k lack the division by the root of d_head.",
        {"q_scale": 1.0, "k_scale": 1.0},
    ),
    (
        "no_scaling",
        "The scores of the backward pass are not divided by the root of d_head, so that "
        "they do not belong to the log-sum-exp.",
        {"scale": 1.0},
    ),
    (
        "value_gradient_by_scores",
        "The values' gradient uses P ∘ P or a changed P. It is Pᵀ·dO with the weights "
        "themselves.",
        {"d_v": lambda p, d: (p * p).mT @ d},
    ),
    (
        "output_gradient_ignored",
        "The gradient that comes in is not used: it is taken for ones.",
        {"ones": True},
    ),
    (
        "queries_and_keys_exchanged",
        "The gradients of q and k are returned in the other order.",
        {"order": lambda d_q, d_k, d_v: (d_k, d_q, d_v)},
    ),
    (
        "keys_and_values_exchanged",
        "The gradients of k and v are returned in the other order.",
        {"order": lambda d_q, d_k, d_v: (d_q, d_v, d_k)},
    ),
    (
        "no_key_gradient",
        "The keys get no gradient.",
        {"order": lambda d_q, d_k, d_v: (d_q, None, d_v)},
    ),
    (
        "no_value_gradient",
        "The values get no gradient.",
        {"order": lambda d_q, d_k, d_v: (d_q, d_k, None)},
    ),
    (
        "two_results",
        "It gives output and log-sum-exp. `apply` is used like attention, so that it "
        "returns the output alone.",
        {"finish": lambda out, lse: (out, lse)},
    ),
):
    FlashAttention.fault(name, sentence, gradient_with(**change))


# Traffic ------------------------------------------------------------------------------


class Memory:
    """Counts what is read and written, in bytes."""

    def __init__(self, bytes_per_number):
        self.size, self.bytes = bytes_per_number, 0

    def move(self, rows, columns, size=None):
        self.bytes += rows * columns * (size or self.size)


def counted(t, d_head, block=None, causal=False, bytes_per_number=2):
    """The forward pass row by row, each access counted."""
    memory = Memory(bytes_per_number)
    if block is None:
        for step in ("q k → scores", "scores → weights", "weights v → output"):
            for name in step.replace("→", "").split():
                wide = t if name in ("scores", "weights") else d_head
                memory.move(t, wide)
        return memory.bytes
    waiting = list(range(t))
    while waiting:
        rows, waiting = waiting[:block], waiting[block:]
        memory.move(len(rows), d_head)  # queries
        for key in range(t):
            if not causal or any(key <= row for row in rows):
                memory.move(1, d_head)  # this key
                memory.move(1, d_head)  # its value
        memory.move(len(rows), d_head)  # output
        memory.move(len(rows), 1, size=4)  # log-sum-exp
    return memory.bytes


def count(case, answer, *args, **kwargs):
    found = case.call(answer, *args, **kwargs)
    case.true(
        isinstance(found, int) and not isinstance(found, bool),
        f"The result is of type {type(found).__name__}, expected an int: a number of "
        "bytes is whole.",
    )
    case.equal(found, counted(*args, **kwargs), "the number of bytes")


@traffic.requires(
    "without blocks: three steps, each with its arguments and its result",
    "Write the three steps in three lines, with the size of each matrix: scores = q·kᵀ, "
    "weights = softmax(scores), output = weights·v. How often does a T × T matrix cross?",
)
def _(answer, case):
    count(case, answer, 11, 3)
    count(case, answer, 7, 16)


@traffic.requires(
    "with blocks that divide the length: keys and values come once for each block of "
    "queries",
    "How many blocks of queries are there? What crosses once for each of them, and what "
    "only once?",
)
def _(answer, case):
    count(case, answer, 15, 7, 5)
    count(case, answer, 30, 7, block=6)
    count(case, answer, 8, 3, 8)
    count(case, answer, 8, 3, 1)


@traffic.requires(
    "with blocks that do not divide it",
    "The last block of queries is smaller, but all keys come for it too.",
)
def _(answer, case):
    count(case, answer, 13, 5, 4)
    count(case, answer, 5, 3, 8)


@traffic.requires(
    "causal: keys after a block's last query are not read; separate steps read all",
    "The block that starts at query 6 and ends with query 11 looks at keys 0 to 11.",
)
def _(answer, case):
    count(
        case, answer, 17, 7, 6, True
    )  # of sizes at which mistakes differ from each other
    count(case, answer, 35, 4, 7, causal=True)
    count(case, answer, 5, 3, 8, True)
    count(case, answer, 12, 3, None, True)
    count(case, answer, 8, 3, 1, True)


@traffic.requires(
    "numbers of other sizes; the log-sum-exp is float32 always",
    "The log-sum-exp is not one of the numbers whose size is given.",
)
def _(answer, case):
    count(case, answer, 13, 5, 4, False, 4)
    count(case, answer, 13, 5, 4, True, bytes_per_number=1)
    count(case, answer, 10, 3, bytes_per_number=8)


@traffic.requires(
    "large counts are exact",
    "A float has 53 bits. `//` divides integers without one.",
)
def _(answer, case):
    count(case, answer, 300_000_001, 3)
    count(case, answer, 13, 10**15 + 7, 4, True)


@traffic.requires("a block below 1 is a ValueError that names it")
def _(answer, case):
    for block in (0, -2):
        why = f"a block of {block}"
        case.raises(ValueError, answer, 8, 4, block, mentions=[block], because=why)


def bytes_with(**change):
    """`hbm_bytes` with one thing wrong."""

    def get(name, right):
        return change.get(name, right)

    def hbm_bytes(t, d_head, block=None, causal=False, bytes_per_number=2):
        size = get("size", bytes_per_number)
        if block is None:
            crossings = get("crossings", 4)
            squares = get("squares", lambda t, causal: t * t)(t, causal)
            moved = (crossings * squares + get("rows", 4) * t * d_head) * size
            moved += get("lse_of_steps", 0) * t
            if causal and "steps_halved" in change:
                moved = moved // 2
            return get("whole", int)(moved)
        if block < 1 and get("checked", True):
            raise ValueError(f"block is {block}")
        numbers = get("once", 2) * t * d_head
        seen = get("seen", lambda top, block, t: min(top + block, t))
        tops = range(0, get("stop", lambda t, block: t)(t, block), block or 1)
        for top in tops:
            keys = seen(top, block, t) if causal else t
            numbers += get("each", 2) * keys * d_head
            numbers += get("extra", 0) * block * keys
        numbers += get("more", 0) * t * d_head * len(tops)
        if "factor" in change:
            numbers = change["factor"](numbers, t, d_head, causal)
        wide = d_head if "wide_lse" in change else 1
        moved = numbers * size + get("lse", 4) * t * wide
        if causal and "halved" in change:
            moved = moved // 2
        return get("result", int)(moved)

    return hbm_bytes


for name, sentence, change in (
    (
        "block_unchecked",
        "A block below 1 is not refused with a sentence of its own.",
        {"checked": False},
    ),
    (
        "lse_in_half_precision",
        "The log-sum-exp is counted in the size of the other numbers. It is float32, "
        "4 bytes, whatever they are.",
        {"lse": 2},
    ),
    (
        "fixed_size",
        "`bytes_per_number` has no effect: 2 bytes are taken throughout.",
        {"size": 2},
    ),
    (
        "causal_steps_halved",
        "Without blocks, causal changes nothing: the scores are masked after the whole "
        "matrix was written.",
        {"squares": lambda t, causal: t * (t + 1) // 2 if causal else t * t},
    ),
    (
        "causal_steps_squares_halved",
        "Without blocks, causal changes nothing: half of the matrix is hidden, and all of "
        "it is written and read.",
        {"squares": lambda t, causal: t * t / 2 if causal else t * t},
    ),
    (
        "causal_halves_the_steps",
        "Without blocks, causal changes nothing: the three steps work on whole matrices "
        "all the same.",
        {"steps_halved": True},
    ),
    (
        "causal_halves_everything",
        "Causal halves all bytes. Queries, output and log-sum-exp stay, and of the keys a "
        "little more than half is read: all of a block's own.",
        {"halved": True},
    ),
    (
        "causal_halves_the_keys",
        "Causal halves the keys and values. A little more than half is read: all of a "
        "block's own. Go through the blocks and add what each sees.",
        {"seen": lambda top, block, t: t / 2},
    ),
    (
        "causal_halves_the_keys_of_each_block",
        "Causal halves the keys of every block, rounded down. The first block sees few, "
        "the last one all: go through the blocks and add what each sees.",
        {"seen": lambda top, block, t: t // 2},
    ),
    (
        "causal_ignored",
        "`causal` has no effect with blocks: the keys after a block's last query need "
        "not be read.",
        {"seen": lambda top, block, t: t},
    ),
    (
        "causal_up_to_the_first_query",
        "Causal counts the keys up to the block's first query. The last one sees more.",
        {"seen": lambda top, block, t: top + 1},
    ),
    (
        "causal_before_the_block",
        "Causal counts the keys before the block alone. The block's own are seen too.",
        {"seen": lambda top, block, t: top},
    ),
    (
        "causal_past_the_end",
        "In the last, smaller block, keys are counted that do not exist.",
        {"seen": lambda top, block, t: top + block},
    ),
    (
        "last_block_dropped",
        "The last, smaller block of queries is left out. All keys come for it too.",
        {"stop": lambda t, block: t // block * block},
    ),
    (
        "lse_forgotten",
        "The log-sum-exp is missing: one float32 for each query.",
        {"lse": 0},
    ),
    (
        "lse_of_the_steps",
        "The three steps have no log-sum-exp: the weights are written out instead.",
        {"lse_of_steps": 4},
    ),
    (
        "lse_as_wide_as_a_query",
        "The log-sum-exp is one number for each query, not one for each of its d_head.",
        {"wide_lse": True},
    ),
    (
        "queries_for_each_block",
        "The queries are counted again for each block. Each belongs to one block, and is "
        "read once.",
        {"more": 1, "once": 1},
    ),
    (
        "output_read_too",
        "The output is counted as read and written. It is finished on the chip, and "
        "written once.",
        {"once": 3},
    ),
    (
        "keys_and_values_once",
        "Keys and values are counted once. Every block of queries needs all of them.",
        {"factor": lambda n, t, d, causal: 4 * t * d},
    ),
    (
        "values_forgotten",
        "With blocks, keys are counted and values are not (or the other way round).",
        {"each": 1},
    ),
    (
        "output_forgotten",
        "With blocks, the queries are counted and the output is not (or the other way "
        "round).",
        {"once": 1},
    ),
    (
        "scores_counted",
        "With blocks, the scores are counted. They never leave the chip; that is the "
        "point.",
        {"extra": 1},
    ),
    (
        "output_for_each_block",
        "The output is counted again for each block. With the queries in the outer loop "
        "it stays on the chip until it is finished.",
        {"more": 2},
    ),
    (
        "scores_written_only",
        "Without blocks, a T × T matrix that is written is read by the next step: four "
        "crossings, not two.",
        {"crossings": 2},
    ),
    (
        "three_crossings",
        "Without blocks, T × T matrices are counted three times; they cross four times: "
        "scores written and read, weights written and read.",
        {"crossings": 3},
    ),
    (
        "small_matrices_forgotten",
        "Without blocks, q, k, v and the output are missing. Beside T² they are small, "
        "but they are bytes too.",
        {"rows": 0},
    ),
    (
        "numbers_not_bytes",
        "These are numbers, not bytes.",
        {"size": 1, "lse": 1},
    ),
    (
        "float_returned",
        "The result is a float.",
        {"result": float},
    ),
    (
        "counted_in_floats",
        "It was computed in floats, and rounded to 53 bits, before it became an int.",
        {"result": lambda n: int(float(n)), "whole": lambda n: int(float(n))},
    ),
):
    traffic.fault(name, sentence, bytes_with(**change))


# The kernel ---------------------------------------------------------------------------


def mode():
    """Where the kernel is tried, "cpu" interpreted or "cuda" compiled; or `Skipped`."""
    if triton is None:
        raise Skipped(
            "There is no Triton here (it exists for Linux alone, and the course does "
            "not ask for it): leave this exercise out and read on, nothing later needs "
            "it. To try it on Linux: `python -m pip install triton`, and restart the "
            "kernel."
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        if isinstance(tl.max, triton.runtime.JITFunction):
            raise Skipped(
                "Triton was imported before TRITON_INTERPRET=1 was set, and cannot "
                "interpret: restart the kernel, and run the notebook from its first cell."
            )
        return "cpu"
    if not torch.cuda.is_available():
        raise Skipped(
            "Triton was imported without TRITON_INTERPRET=1, and there is no GPU to "
            "compile for: restart the kernel, and run the notebook from its first cell."
        )
    if torch.cuda.get_device_capability() < (8, 0):
        has = ".".join(map(str, torch.cuda.get_device_capability()))
        raise Skipped(
            f"This GPU has compute capability {has} and the kernel needs 8.0: leave the "
            "exercise out, or set TRITON_INTERPRET=1 and restart the kernel."
        )
    return "cuda"


def plainly(answer):
    """The answer, its exceptions taken out of the interpreter's wrapping."""

    @wraps(answer)
    def call(*args, **kwargs):
        try:
            return answer(*args, **kwargs)
        except Exception as error:
            inner = error
            while type(inner).__name__ == "InterpreterError" and inner.__cause__:
                inner = inner.__cause__
            if inner is error:
                raise
            raise inner from None

    return call


@contextmanager
def unwritten_is_nan():
    """What `torch.empty` gives is NaN until it is written, and not what lay there."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def run_kernel(case, answer, q, k, v, *args, **kwargs):
    """Call the answer; what is recorded of a pointer outside its tensor names a fault.

    Where batches and heads come, blocks and strides have been right for one head, so
    that only the place of a head can be wrong.
    """
    with warnings.catch_warnings(), strict(), unwritten_is_nan():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of NaN and overflow
        try:
            return case.call(plainly(answer), q, k, v, *args, **kwargs)
        except Crashed as crash:
            if not isinstance(crash.error, OutsideTensor):
                raise
            ends_in_a_block = q.shape[0] * q.shape[1] == 1 and q.shape[2] % 16
            does = "reads" if "reads" in str(crash.error) else "writes"
            case.retell(f"{does} outside" if ends_in_a_block else "outside")
            raise Explained(f"A pointer led outside: {crash.error}.") from crash


def from_kernel(case, answer, q, k, v, *args, relaxed=None, **kwargs):
    where = mode()
    q, k, v = (x.to(where) for x in (q, k, v))
    found = run_kernel(case, answer, q, k, v, *args, **kwargs)
    case.is_tuple(found, 2, "the result (output and log-sum-exp)")
    causal = args[0] if args else kwargs.get("causal", False)
    wide = [x.detach().cpu().double() for x in (q, k, v)]
    output, lse = whole_attention(*wide, causal), whole_lse(*wide[:2], causal)
    case.close(found[0], output, "the output", like=q, tolerance=relaxed)
    relaxed = None if relaxed is None else 100 * relaxed
    sums(case, found[1], lse, "the log-sum-exp", q, relaxed)


@kernel.requires(
    "one head: output and log-sum-exp are those of attention",
    "Begin with one program for each block of queries. Which rows are its own, and what "
    "does `tl.load` need to know to fetch them?",
)
def _(answer, case):
    q, k, v = heads(1, 1, t_q=16, t_k=32, d_head=16)
    from_kernel(case, answer, q, k, v, block_q=16, block_k=32)
    from_kernel(case, answer, q, k, v, block_q=16, block_k=16)
    q, k, v = heads(1, 1, t_q=32, t_k=48, d_head=16, seed=5)
    from_kernel(
        case, answer, q, k * torch.linspace(0.2, 2, 48)[:, None], v, False, 16, 16
    )


@kernel.requires(
    "batches and heads",
    "The second number of the grid counts heads through all batches. Where does head h "
    "of batch b begin?",
)
def _(answer, case):
    q, k, v = heads(2, 3, t_q=16, t_k=32, d_head=16, seed=10)
    from_kernel(case, answer, q, k, v, False, 16, 32)


@kernel.requires(
    "lengths that the blocks do not divide, and the blocks that it chooses itself",
    "What a mask leaves out of a `tl.load` is filled with `other`, and a key of zeros "
    "has the score 0. Stores need a mask too.",
)
def _(answer, case):
    q, k, v = heads(1, 1, t_q=19, t_k=37, d_head=32, seed=20)
    from_kernel(case, answer, q, k, v, False, 16, 32)
    from_kernel(case, answer, q, k, v, False, 32, 16)
    from_kernel(case, answer, q, k, v)
    from_kernel(case, answer, *heads(1, 1, t_q=1, t_k=5, d_head=64, seed=25))


@kernel.requires(
    "causal, with as many queries as keys and with fewer",
    "The position of a row is its number plus T_k − T_q.",
)
def _(answer, case):
    q, k, v = heads(1, 1, t_q=21, t_k=21, d_head=16, seed=30)
    from_kernel(case, answer, q, k, v, True, 16, 16)
    from_kernel(case, answer, q, k, v, causal=True, block_q=32, block_k=16)
    q, k, v = heads(1, 1, t_q=21, t_k=53, d_head=16, seed=35)
    from_kernel(case, answer, q, k, v, True, 16, 32)
    from_kernel(case, answer, q[:, :, :5], k[:, :, :21], v[:, :, :21], True)


@kernel.requires(
    "any strides: heads that were split by a transpose, columns that are not neighbours",
    "Use every stride of q, k and v: batch, head, row and column.",
)
def _(answer, case):
    q, k, v = heads(2, 13, t_q=3, t_k=3, d_head=16, seed=40)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    from_kernel(case, answer, q, k, v, True, 16, 16)
    q, k, v = heads(1, 2, t_q=11, t_k=13, d_head=16, seed=45)
    from_kernel(case, answer, strided(q), k, strided(v), False, 16, 32)
    from_kernel(case, answer, q, strided(k), v, False, 16, 32)


@kernel.requires(
    "scores of ±10,000 give no overflow",
    "The maximum of a row, as in `flash_attention`. It starts below every score.",
)
def _(answer, case):
    q, k, v = heads(1, 1, t_q=11, t_k=37, d_head=16, seed=50)
    q[..., 0], k[..., 0] = torch.linspace(0, 200, 11), 50.0  # rows far from each other
    from_kernel(case, answer, q, k, v, False, 16, 16, relaxed=0.02)
    for level in (10_000, -10_000):
        q, k, v = heads(1, 1, t_q=11, t_k=37, d_head=16, seed=50)
        q, k = q.round(), k.round()
        q[..., 0], k[..., 0] = 200.0, level / 50.0
        from_kernel(case, answer, q, k, v, False, 16, 16, relaxed=0.02)
    k[..., 16:, 0] = level / 40.0  # far below the first block
    from_kernel(case, answer, q, k, v, False, 16, 16, relaxed=0.02)


@kernel.requires(
    "float16: the output has the dtype of q, the log-sum-exp is float32",
    "Maximum, sum and output are float32 in the kernel, whatever comes in.",
)
def _(answer, case):
    q, k, v = heads(1, 1, t_q=19, t_k=37, d_head=32, seed=60, dtype=torch.float16)
    from_kernel(case, answer, q, k, v, True, 32, 32)
    # Beside a large sum small values are lost, and the last ones take it away again.
    q, k, v = heads(1, 1, t_q=5, t_k=150, d_head=16, seed=65, dtype=torch.float16)
    v[:, :, :32], v[:, :, 32:-32], v[:, :, -32:] = 1000, 0.2, -1000
    from_kernel(case, answer, q * 0, k, v, False, 16, 32)


@kernel.requires(
    "the products are computed in the kernel",
    "PyTorch allocates the results and launches; scores and outputs come from `tl.dot`.",
)
def _(answer, case):
    where = mode()
    q, k, v = (x.to(where) for x in heads(1, 1, t_q=16, t_k=16, d_head=16, seed=70))
    with Cost() as cost:  # it counts ready-made attention on the CPU too
        run_kernel(case, answer, q, k, v, False, 16, 16)
    case.true(
        cost.flops == 0,
        f"PyTorch did {cost.flops:,} floating-point operations in matrix "
        "products on the way.",
    )


@kernel.requires(
    "causal: blocks that nobody sees are not computed",
    "Where does the last query of the block stand? No key after it is needed: end the "
    "loop there.",
)
def _(answer, case):
    where, rows, keys = mode(), 128, 192  # the first 128 queries see 192 keys
    q, k, v = heads(1, 1, t_q=192, t_k=256, d_head=16, seed=90)
    first = [q[:, :, :rows], k[:, :, :keys], v[:, :, :keys]]
    first = [x.double() for x in first]
    v[:, :, keys:] = torch.nan  # the weight 0 does not hide it: 0 · NaN is NaN
    q, k, v = (x.to(where) for x in (q, k, v))
    found = run_kernel(case, answer, q, k, v, True, 64, 64)
    case.is_tuple(found, 2, "the result (output and log-sum-exp)")
    output, lse = found[0][:, :, :rows], found[1][:, :, :rows]
    touched = output.isnan().any(-1).sum().item()
    case.true(
        touched == 0,
        f"The values from position {keys} on were NaN, whole blocks that the first "
        f"{rows} queries do not see; {touched} of these queries have NaN in their "
        "output.",
    )
    what = f"the output of the first {rows} queries"
    case.close(output, whole_attention(*first, True), what, like=q)
    what = f"the log-sum-exp of the first {rows} queries"
    sums(case, lse, whole_lse(*first[:2], True), what, q)


@kernel.requires(
    "what it cannot compute is refused in a sentence",
    "These lines were given in the stub; they belong before everything else.",
)
def _(answer, case):
    where = mode()
    q, k, v = (x.to(where) for x in heads(2, 3, t_q=20, t_k=16, d_head=16, seed=80))
    few = (q, k[:, :1], v[:, :1])
    wrong = torch.float64 if where == "cuda" else torch.bfloat16
    name = str(wrong).removeprefix("torch.")
    others = (x.to(wrong) for x in (q, k, v))
    for why, mentions, args in (
        ("causal, with 20 queries and 16 keys", (20, 16), (q, k, v, True)),
        ("3 heads of queries and 1 of keys and values", (3, 1), few),
        ("a block of 0", [0], (q, k, v, False, 0, 16)),
        (f"{name} inputs", [name], others),
    ):
        with strict():  # where it is not refused, it runs
            case.raises(
                ValueError, plainly(answer), *args, mentions=mentions, because=why
            )


@cache
def kernel_with(*changes):
    """The right kernel with each `(old, new)` of `changes` put into its text."""
    source = textwrap.dedent(inspect.getsource(right_kernel))
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"the kernel has {source.count(old)} times {old!r}")
        source = source.replace(old, new)
    file = f"<the kernel with {changes}>"  # Triton reads the text where tracebacks do
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    defined = {"tl": tl}
    exec(compile(source, file, "exec"), defined)
    return triton.jit(defined["right_kernel"])


def launched(
    *changes,
    grid=lambda blocks, batches, heads: (blocks, batches * heads),
    strides=lambda *tensors: [x.stride() for x in tensors],
    scale=lambda d, t_k: math.log2(math.e) / math.sqrt(d),
    like=lambda q: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    lse_dtype=torch.float32,
    refuses=("dtypes", "sizes"),
    finish=lambda out, lse: (out, lse),
):
    """The kernel with `changes`, as an answer; the rest is wrong in its launch.

    like: what allocates the output. lse_dtype: that of the log-sum-exp, None for q's.
    """

    def flash_kernel(q, k, v, causal=False, block_q=None, block_k=None):
        (n_batch, n_heads, t_q, d), t_k = q.shape, k.shape[2]
        n, m = block_q or 32, block_k or 32
        if "sizes" in refuses:
            if causal and t_q > t_k:
                raise ValueError(f"{t_q} queries, {t_k} keys")
            if n_heads != k.shape[1]:
                raise ValueError(f"{n_heads} and {k.shape[1]} heads")
            if 0 in (block_q, block_k):
                raise ValueError("a block of 0")
        if "dtypes" in refuses and q.dtype in (torch.bfloat16, torch.float64):
            raise ValueError(f"no {q.dtype}")
        if n_heads != k.shape[1]:
            k, v = (x.expand(-1, n_heads, -1, -1) for x in (k, v))
        out = like(q)
        lse = torch.empty(q.shape[:3], dtype=lse_dtype or q.dtype, device=q.device)
        kernel_with(*changes)[grid(triton.cdiv(t_q, n), n_batch, n_heads)](
            *(q, k, v, out, lse),
            *strides(q, k, v, out),
            *(n_heads, t_q, t_k, scale(d, t_k), causal, d, n, m),
            enable_fp_fusion=True,
        )
        return finish(out, lse)

    return flash_kernel


NO_MAXIMUM_YET = 'tl.where(m == float("-inf"), new, m)'
LOG2_E = math.log2(math.e)
ALL_KEYS = ("minimum(t_k, t_k - t_q + top + Q)", "minimum(t_k, t_k)")  # the loop's end

for name, sentence, answer in (
    (
        "load_not_masked",
        "Rows after the last one are loaded: a pointer leads outside its tensor. The "
        "last block is not full, so `tl.load` needs a mask, of rows below T_q or of keys "
        "below T_k.",
        launched(("mask=rows[:, None] < t_q, other=0.0", "")),
    ),
    (
        "store_not_masked",
        "Rows after the last one are stored, over what belongs to others. The last block "
        "is not full, so `tl.store` needs a mask, of rows below T_q: the output's and "
        "the log-sum-exp's.",
        launched(("tl.store(lse_at, lse, mask=rows < t_q)", "tl.store(lse_at, lse)")),
    ),
    (
        "pointer_outside",
        "A pointer leads outside its tensor, though every row of its block exists. It is "
        "the sum of batch, head, row and column, each times the stride of that dimension "
        "of that very tensor. Are there more programs than blocks and heads, or larger "
        "blocks than were asked for?",
        launched(("b * q_b", "(b + 1000) * q_b")),
    ),
    (
        "products_in_tf32",
        "`tl.dot` rounds float32 to 10 bits on a GPU unless it is told otherwise, and so "
        'does this check: `input_precision="ieee"`, in both products.',
        launched(
            ('tl.dot(q, k, input_precision="ieee")', "tl.dot(q, k)"),
            (
                'tl.dot(p.to(v.dtype), v, input_precision="ieee")',
                "tl.dot(p.to(v.dtype), v)",
            ),
        ),
    ),
    (
        "scores_in_tf32",
        "`tl.dot(q, k)` rounds float32 to 10 bits on a GPU unless it is told otherwise, "
        'and so does this check: `input_precision="ieee"`.',
        launched(('tl.dot(q, k, input_precision="ieee")', "tl.dot(q, k)")),
    ),
    (
        "output_in_tf32",
        "The product with v rounds float32 to 10 bits on a GPU unless it is told "
        'otherwise, and so does this check: `input_precision="ieee"`.',
        launched(
            (
                'tl.dot(p.to(v.dtype), v, input_precision="ieee")',
                "tl.dot(p.to(v.dtype), v)",
            )
        ),
    ),
    (
        "float32_returned",
        "The output is float32 whatever came in. Allocate it in the dtype of q, and "
        "convert before the store.",
        launched(like=lambda q: torch.empty_like(q, dtype=torch.float32)),
    ),
    (
        "lse_in_half_precision",
        "The log-sum-exp has the dtype of q. Allocate it in float32.",
        launched(lse_dtype=None),
    ),
    (
        "q_scaled_in_half_precision",
        "The scaled queries are rounded to half precision before the product. Scale the "
        "scores, which are float32.",
        launched(
            ("    m = tl.full", "    q = (q * scale).to(q.dtype)\n    m = tl.full"),
            ('"ieee") * scale', '"ieee")'),
        ),
    ),
    (
        "output_kept_in_half_precision",
        "The output so far is kept in the dtype of q. Convert it when the last block has "
        "come.",
        launched(
            (
                "        m = new",
                "        out = out.to(q.dtype).to(tl.float32)\n        m = new",
            )
        ),
    ),
    (
        "starts_at_zero",
        "The maximum starts at 0. Where all scores are far below it, all exponentials "
        "underflow.",
        launched(
            ('tl.full([Q], float("-inf"), tl.float32)', "tl.zeros([Q], tl.float32)")
        ),
    ),
    (
        "no_maximum",
        "No maximum is subtracted: a large score overflows.",
        launched(("tl.maximum(m, tl.max(s, 1))", "tl.zeros([Q], tl.float32)")),
    ),
    (
        "one_maximum_for_all_rows",
        "One maximum is used for all rows. A row far below it loses all its terms: "
        "reduce over axis 1 alone.",
        launched(("tl.max(s, 1)", "tl.max(tl.max(s, 1), 0)")),
    ),
    (
        "last_blocks_maximum",
        "The maximum is that of the last block, not the largest so far.",
        launched(("tl.maximum(m, tl.max(s, 1))", "tl.max(s, 1)")),
    ),
    (
        "maximum_not_updated",
        "The old maximum is not replaced by the new one at the end of a block.",
        launched(("        m = new\n", "")),
    ),
    (
        "old_maximum_subtracted",
        "The weights are relative to the maximum before this block, which begins at −∞. "
        "Update the maximum first, then take the exponentials.",
        launched(("s - new[:, None]", "s - m[:, None]")),
    ),
    (
        "hidden_scores_are_minus_10000",
        "Hidden scores get a large negative number. Allowed scores can be lower, and "
        "then the hidden key wins; only −∞ is below everything.",
        launched(
            ('(at < t_k, s, float("-inf"))', "(at < t_k, s, -1.0e4)"),
            ('[:, None], s, float("-inf"))', "[:, None], s, -1.0e4)"),
        ),
    ),
    (
        "columns_taken_for_neighbours",
        "The stride of the columns is taken for 1. Most tensors are laid out so, and "
        "some are not.",
        launched(("    q_at =", "    q_d, k_d, v_d = 1, 1, 1\n    q_at =")),
    ),
    (
        "heads_taken_for_neighbours",
        "Where a head begins is computed as if the heads of all batches followed each "
        "other. After a transpose they do not: use the batch's and the head's stride.",
        launched(
            ("b * q_b + h * q_h", "pair * q_h"),
            ("b * k_b + h * k_h", "pair * k_h"),
            ("b * v_b + h * v_h", "pair * v_h"),
        ),
    ),
    (
        "contiguous_assumed",
        "Strides are computed from sizes, as if q, k and v were contiguous. Ask the "
        "tensors: `x.stride()`.",
        launched(
            like=torch.empty_like,
            strides=lambda *tensors: [torch.empty(x.shape).stride() for x in tensors],
        ),
    ),
    (
        "values_with_strides_of_keys",
        "The strides of k are used for v too. The two may be laid out differently.",
        launched(strides=lambda q, k, v, out: [x.stride() for x in (q, k, k, out)]),
    ),
    (
        "strides_of_q_for_all",
        "The strides of q are used for k and v too.",
        launched(strides=lambda q, k, v, out: [x.stride() for x in (q, q, q, out)]),
    ),
    (
        "output_with_strides_of_q",
        "The strides of q are used for the output too, which is laid out differently.",
        launched(strides=lambda q, k, v, out: [x.stride() for x in (q, k, v, q)]),
    ),
    (
        "heads_of_the_first_batch",
        "Keys and values are those of the first batch for all batches: the second "
        "number of the grid counts heads through all of them.",
        launched(
            ("b * k_b + h * k_h", "h * k_h"),
            ("b * v_b + h * v_h", "h * v_h"),
        ),
    ),
    (
        "keys_of_the_first_head",
        "Keys and values are those of the first head for all heads.",
        launched(
            ("b * k_b + h * k_h", "b * k_b"),
            ("b * v_b + h * v_h", "b * v_b"),
        ),
    ),
    (
        "batch_forgotten",
        "Every batch reads and writes the first batch's place: the strides of the "
        "batches are missing.",
        launched(*((f"b * {x}_b + ", "") for x in "qkvo")),
    ),
    (
        "output_of_the_first_batch",
        "The outputs of all batches are stored in the first batch's place, and the "
        "others' is never written.",
        launched(("b * o_b + ", "")),
    ),
    (
        "lse_of_the_first_batch",
        "The log-sum-exps of all batches are stored in the first batch's place. The "
        "second number of the grid counts heads through all batches.",
        launched(("lse_ptr + pair * t_q", "lse_ptr + h * t_q")),
    ),
    (
        "grid_without_batches",
        "The grid has programs for the heads of one batch alone, and the other batches "
        "are never written. It needs B · H of them.",
        launched(grid=lambda blocks, batches, heads: (blocks, heads)),
    ),
    (
        "last_queries_dropped",
        "The queries after the last whole block get no program: round up, with "
        "`triton.cdiv`.",
        launched(
            (
                "    q_at =",
                "    if top + Q > t_q and top > 0:\n        return\n    q_at =",
            )
        ),
    ),
    (
        "keys_of_the_first_block",
        "Every turn of the loop loads the first block of keys again, or of keys and "
        "values. Where does the block at `left` begin?",
        launched(("k_at + at * k_t", "k_at + keys * k_t")),
    ),
    (
        "values_of_the_first_block",
        "Every turn of the loop loads the first block of values again. Where does the "
        "block at `left` begin?",
        launched(("v_at + at[:, None] * v_t", "v_at + keys[:, None] * v_t")),
    ),
    (
        "first_block_again",
        "Every turn of the loop loads the first block of keys and values again. Where "
        "does the block at `left` begin?",
        launched(
            ("k_at + at * k_t", "k_at + keys * k_t"),
            ("v_at + at[:, None] * v_t", "v_at + keys[:, None] * v_t"),
        ),
    ),
    (
        "missing_keys_score_zero",
        "Keys past the end are loaded as zeros, and their score of 0 is a weight like "
        "any other: it must become −inf.",
        launched(('s = tl.where(at < t_k, s, float("-inf"))', "")),
    ),
    (
        "last_keys_dropped",
        "The keys after the last whole block are left out.",
        launched(
            ("end = t_k", "end = t_k // K * K"), ("minimum(t_k, ", "minimum(end, ")
        ),
    ),
    (
        "causal_ignored",
        "`causal` has no effect.",
        launched(ALL_KEYS, ("(rows + t_k - t_q)[:, None]", "t_k")),
    ),
    (
        "causal_top_left",
        "The mask is aligned top-left: with fewer queries than keys, row i stands at "
        "i + T_k − T_q.",
        launched(("(rows + t_k - t_q)", "rows")),
    ),
    (
        "loop_aligned_top_left",
        "Mask and loop are aligned top-left: with fewer queries than keys, row i stands "
        "at i + T_k − T_q.",
        launched(("(rows + t_k - t_q)", "rows"), ("t_k - t_q + top + Q", "top + Q")),
    ),
    (
        "own_position_hidden",
        "No query sees its own position.",
        launched(("(rows + t_k - t_q)", "(rows + t_k - t_q - 1)")),
    ),
    (
        "one_position_ahead",
        "Each query sees one position ahead: off by one.",
        launched(
            ("(rows + t_k - t_q)", "(rows + t_k - t_q + 1)"),
            ("t_k - t_q + top + Q", "t_k - t_q + top + Q + 1"),
        ),
    ),
    (
        "mask_mirrored",
        "The mask is the other way round: every query sees itself and what comes after.",
        launched(ALL_KEYS, ("at <= (rows", "at >= (rows")),
    ),
    (
        "diagonal_not_masked",
        "Blocks after the last query are left out, but within the last block a query "
        "still sees keys after its own position: those need the mask.",
        launched(("(rows + t_k - t_q)[:, None]", "t_k")),
    ),
    (
        "loop_ends_too_early",
        "The loop over the keys ends with the block's first query. The others of the "
        "block see more.",
        launched(("t_k - t_q + top + Q", "t_k - t_q + top + 1")),
    ),
    (
        "loop_end_without_offset",
        "The mask is right, and the loop ends as if the queries were the first of the "
        "positions: with fewer queries than keys, the last row stands T_k − T_q later.",
        launched(("t_k - t_q + top + Q", "top + Q")),
    ),
    (
        "diagonal_block_dropped",
        "The loop ends before the block's own positions. The last query sees itself: "
        "end after it.",
        launched(("t_k - t_q + top + Q", "t_k - t_q + top")),
    ),
    (
        "hidden_blocks_computed",
        "Under a causal mask every block is computed, also those that no query of the "
        "block sees. End the loop after the last query's position.",
        launched(ALL_KEYS),
    ),
    (
        "positions_within_the_block",
        "The mask compares places within the block. Add where both blocks start.",
        launched(ALL_KEYS, ("(rows + t_k - t_q)", "(rows - top + left)")),
    ),
    (
        "infinite_rescaling",
        "What was summed so far is multiplied by exp2(new − old) where exp2(old − new) "
        "is right. At first old is −∞, so that the factor is ∞, and ∞ · 0 is NaN.",
        launched(("tl.exp2(m - new)", "tl.exp2(new - m)")),
    ),
    (
        "rescaling_inverted",
        "What was summed so far is multiplied by exp2(new − old) where exp2(old − new) "
        "is right. A larger maximum makes every old term smaller.",
        launched(("tl.exp2(m - new)", f"tl.exp2(new - {NO_MAXIMUM_YET})")),
    ),
    (
        "nothing_rescaled",
        "Neither sum nor output are corrected when a larger score comes.",
        launched(("total * shrink", "total"), ("out * shrink[:, None]", "out")),
    ),
    (
        "sum_not_rescaled",
        "The output is corrected when a larger score comes, the sum is not.",
        launched(("total * shrink", "total")),
    ),
    (
        "output_not_rescaled",
        "The sum is corrected when a larger score comes, the output is not.",
        launched(("out * shrink[:, None]", "out")),
    ),
    (
        "output_overwritten",
        "The output is that of the last block alone: each block adds to it.",
        launched(("out += tl.dot(", "out = tl.dot(")),
    ),
    (
        "sum_overwritten",
        "The sum is that of the last block alone: each block adds to it.",
        launched(("total * shrink + ", "")),
    ),
    (
        "not_divided",
        "The output is not divided by the sum of the exponentials.",
        launched(("out / total[:, None]", "out")),
    ),
    (
        "divided_in_every_block",
        "The output is divided by the sum so far in every block. Divide once, after the "
        "last.",
        launched(
            ("        m = new\n", "        out /= total[:, None]\n        m = new\n"),
            ("    out = out / total[:, None]\n", ""),
        ),
    ),
    (
        "lse_in_base_2",
        "The log-sum-exp is in base 2, as `tl.exp2` and `tl.log2` count. Multiply by "
        "ln 2.",
        launched((" * 0.6931471805599453", "")),
    ),
    (
        "lse_half_converted",
        "Of the log-sum-exp only the maximum is converted from base 2. Both parts are "
        "in base 2: multiply their sum by ln 2.",
        launched(("(m + tl.log2(total)) *", "tl.log2(total) + m *")),
    ),
    (
        "maximum_not_converted",
        "The maximum is in base 2, as `tl.exp2` counts, and the logarithm beside it is "
        "natural: multiply the maximum by ln 2.",
        launched(("(m + tl.log2(total)) *", "m + tl.log2(total) *")),
    ),
    (
        "maximum_missing_in_lse",
        "The log-sum-exp lacks the maximum.",
        launched(("(m + tl.log2(total))", "tl.log2(total)")),
    ),
    (
        "maximum_returned",
        "The second result is the maximum. The sum's logarithm has yet to be added.",
        launched(("(m + tl.log2(total))", "m")),
    ),
    (
        "sum_returned",
        "The second result is the sum relative to the maximum. The log-sum-exp is the "
        "maximum plus its logarithm.",
        launched(("(m + tl.log2(total)) * 0.6931471805599453", "total")),
    ),
    (
        "lse_without_logarithm",
        "The sum is added to the maximum without its logarithm.",
        launched(
            (
                "(m + tl.log2(total)) * 0.6931471805599453",
                "m * 0.6931471805599453 + total",
            )
        ),
    ),
    (
        "no_scaling",
        "The scores are not divided by the root of d_head.",
        launched(scale=lambda d, t_k: LOG2_E),
    ),
    (
        "divided_by_d_head",
        "The scores are divided by d_head, not by its root. Or by the root twice?",
        launched(scale=lambda d, t_k: LOG2_E / d),
    ),
    (
        "multiplied_by_the_root",
        "The scores are multiplied by the root of d_head instead of divided.",
        launched(scale=lambda d, t_k: LOG2_E * math.sqrt(d)),
    ),
    (
        "root_of_the_length",
        "The scores are divided by the root of T_k. It is the width of a query that "
        "counts.",
        launched(scale=lambda d, t_k: LOG2_E / math.sqrt(t_k)),
    ),
    (
        "exp2_taken_for_exp",
        "2ˣ is taken where eˣ is meant: `tl.exp2` needs the scores multiplied by log₂ e.",
        launched(scale=lambda d, t_k: 1 / math.sqrt(d)),
    ),
    (
        "exp2_alone",
        "`tl.exp2` stands where `tl.exp` stood, and nothing else has changed: 2ˣ needs "
        "the scores multiplied by log₂ e, and the log-sum-exp by ln 2.",
        launched(
            ("(m + tl.log2(total)) * 0.6931471805599453", "m + tl.log(total)"),
            scale=lambda d, t_k: 1 / math.sqrt(d),
        ),
    ),
    (
        "exp_taken_for_exp2",
        "eˣ is taken where 2ˣ is meant: the scores are multiplied by log₂ e already, for "
        "`tl.exp2`.",
        launched(
            ("tl.exp2(m - new)", "tl.exp(m - new)"),
            ("tl.exp2(s - new", "tl.exp(s - new"),
        ),
    ),
    (
        "results_exchanged",
        "The results are in the other order: the output comes first.",
        launched(finish=lambda out, lse: (lse, out)),
    ),
    (
        "output_alone",
        "It returns the output alone: output and log-sum-exp are asked for.",
        launched(finish=lambda out, lse: out),
    ),
    (
        "nothing_refused",
        "What the kernel cannot compute is not refused: the lines that were given in the "
        "stub are gone.",
        launched(refuses=()),
    ),
    (
        "dtypes_not_refused",
        "A dtype that is computed wrongly here, or not at all, is not refused.",
        launched(refuses=("sizes",)),
    ),
):
    kernel.fault(name, sentence, answer)


# Together with the parts of earlier lessons -------------------------------------------

flash_in_the_model = IntegrationCheck(
    "flash_in_the_model",
    lesson="flash_attention",
    parts={
        "attention": "attention",
        "causal_mask": "attention",
        "split_heads": "multi_head",
        "merge_heads": "multi_head",
        "repeat_kv": "multi_head",
        "MultiHeadAttention": "multi_head",
        "rope": "positions",
        "TransformerConfig": "forward_pass",
        "Transformer": "forward_pass",
        "online_softmax": "flash_attention",
        "flash_attention": "flash_attention",
        "FlashAttention": "flash_attention",
    },
)


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
            size = 0.6 * p.shape[-1] ** -0.5
            p.copy_(probe(*p.shape, seed=300 + i, scale=3 * size))
    return module


@flash_in_the_model.requires(
    "flash_attention and attention under causal_mask mean the same, in a square and with "
    "fewer queries than keys",
    "Print the mask for 3 queries and 5 keys, and the weights that the blocks use.",
)
def _(parts, case):
    q, k, v = heads(2, 3, t_q=11, t_k=11, d_head=4, d_v=6, seed=200)
    for rows in (slice(0, 11), slice(6, 11)):
        n = rows.stop - rows.start
        mask = case.call(parts["causal_mask"], n, 11)
        whole = case.call(parts["attention"], q[:, :, rows], k, v, mask)
        found = case.call(parts["flash_attention"], q[:, :, rows], k, v, True, 4, 3)
        case.is_tuple(found, 2, "the result of flash_attention")
        what = f"{n} queries and 11 keys: flash_attention, compared with attention,"
        case.close(found[0], whole.double(), what, like=q)
    whole = case.call(parts["attention"], q, k, v)
    found = case.call(parts["flash_attention"], q, k, v, False, 4, 3)
    case.close(found[0], whole.double(), "without a mask, the output", like=q)


@flash_in_the_model.requires(
    "online_softmax over blocks of scores gives the log-sum-exp of flash_attention",
    "Maximum plus logarithm of the total, in the natural logarithm, of scaled scores.",
)
def _(parts, case):
    q, k, v = heads(2, 3, t_q=5, t_k=11, d_head=4, d_v=6, seed=210)
    blocks = list(whole_scores(q, k).split(4, dim=-1))
    maximum, total = case.call(parts["online_softmax"], blocks)
    _, lse = case.call(parts["flash_attention"], q, k, v, False, 2, 3)
    case.close(lse, (maximum + total.log()).double(), "the log-sum-exp")


@flash_in_the_model.requires(
    "MultiHeadAttention on FlashAttention gives what it gave before, RoPE included",
    "FlashAttention gets heads as split_heads lays them out: `(B, H, T, d_head)`, not "
    "contiguous, keys and values repeated by repeat_kv.",
)
def _(parts, case):
    layer = filled(case.call(parts["MultiHeadAttention"], 24, 6, 2, 4))
    x, at = probe(2, 11, 24, seed=220), torch.arange(11)
    mask = case.call(parts["causal_mask"], 11)

    def turn(heads):
        return parts["rope"](heads, at)

    for rotate in (None, turn):
        before = case.call(layer, x, mask, rotate)
        after = case.call(through_flash, parts, layer, 6, 2, x, None, rotate)
        what = f"the layer's output {'with' if rotate else 'without'} RoPE"
        case.close(after, before.double(), what, like=x)


@flash_in_the_model.requires(
    "a whole Transformer gives the same logits and the same gradients",
    "Every block's attention is replaced. If the logits agree and the gradients do not, "
    "look at the backward pass.",
)
def _(parts, case):
    config = parts["TransformerConfig"](
        *(17, 24, 2, 6, 2, 4, 20, 16)  # vocabulary, widths, layers, heads, d_ff, length
    )
    model = filled(case.call(parts["Transformer"], config))
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], list(range(2, 13))])

    def gradients(model, ids):
        model.zero_grad()
        logits = model(ids)
        (logits * probe(*logits.shape, seed=230)).sum().backward()
        return tuple(p.grad.clone() for p in model.parameters())

    before, slopes = case.call(model, ids), case.call(gradients, model, ids)
    for block in model.blocks:
        block.attention.forward = partial(through_flash, parts, block.attention, 6, 2)
    case.close(case.call(model, ids), before.double(), "the logits")
    ours = case.call(gradients, model, ids)
    for (name, _), mine, slope in zip(
        model.named_parameters(), ours, slopes, strict=True
    ):
        case.close(mine, slope.double(), f"the gradient of {name}")
