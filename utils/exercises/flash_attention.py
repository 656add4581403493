"""Lesson 11: online softmax, attention in blocks, its gradient, traffic, a kernel."""

import gc
import warnings
import weakref
from functools import partial

import torch
import torch.nn.functional as F

from utils.check.errors import Crashed, Explained
from utils.check.exercise import Exercise, IntegrationCheck
from utils.check.triton_compiler import launches, why_not_compiled
from utils.check.triton_interpreter import OutsideTensor, device, plainly, strict
from utils.check.wording import counted, dtype
from utils.cost import Cost, peak_bytes, saved_bytes
from utils.probe import probe, strided

online_softmax = Exercise("online_softmax", lesson="flash_attention")
flash_attention = Exercise("flash_attention", lesson="flash_attention")
FlashAttention = Exercise("FlashAttention", lesson="flash_attention")
hbm_bytes = Exercise("hbm_bytes", lesson="flash_attention")
# A compilation for four cases takes up to eight of the seconds.
flash_kernel = Exercise("flash_kernel", lesson="flash_attention", seconds=20)

SUMS = 3e-5  # what the order of float32 sums may change; splitting blocks is allowed


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


def whole_lse(q, k, causal=False):
    return torch.logsumexp(whole_scores(q, k, causal), dim=-1)


def heads(*lead, t_q, t_k, d_head, d_v=None, seed=0, dtype=torch.float32):
    """Queries, keys and values."""
    return (
        probe(*lead, t_q, d_head, seed=seed, dtype=dtype),
        probe(*lead, t_k, d_head, seed=seed + 1, dtype=dtype),
        probe(*lead, t_k, d_v or d_head, seed=seed + 2, dtype=dtype),
    )


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


# Online softmax -----------------------------------------------------------------------


class OneWay:
    """Blocks that come one after the other, once; counts those that are kept."""

    def __init__(self, blocks):
        self.blocks, self.left = blocks, list(blocks)
        self.alive, self.most = [], 0

    def __iter__(self):
        return self

    def __repr__(self):
        return f"<{len(self.blocks)} blocks, each handed over once>"

    def __next__(self):
        if not self.left:
            raise StopIteration
        block = self.left.pop(0).clone()
        self.alive = [ref for ref in self.alive if ref() is not None]
        self.alive.append(weakref.ref(block))
        self.most = max(self.most, len(self.alive))
        return block


def maximum_and_total(case, answer, blocks, given=None, tolerance=None):
    """Call the answer, and compare both results with those of the whole row."""
    found = case.call(answer, blocks if given is None else given)
    row = torch.cat(blocks, dim=-1).double()
    maximum = row.amax(dim=-1)
    shift = maximum.masked_fill(maximum.isinf(), 0)[..., None]
    case.is_tuple(found, 2, "the result (maximum and total)")
    sums(case, found[0], maximum, "the maximum", blocks[0], tolerance=None)
    total = (row - shift).exp().sum(-1)
    sums(case, found[1], total, "the total", blocks[0], tolerance)


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
    ramp = torch.arange(11) * torch.tensor([[[1.0], [-1], [0]]])
    ramp = probe(2, 3, 11, seed=3) + ramp
    maximum_and_total(case, answer, in_blocks(ramp, 2, 2, 2, 2, 3))


@online_softmax.requires(
    "scores of ±10,000 give no overflow",
    "Every exponential needs the largest score so far subtracted, also the factor that "
    "corrects the old sum.",
)
def _(answer, case):
    x = probe(3, 9, seed=4, scale=3)
    maximum_and_total(case, answer, in_blocks(x + 10_000, 4, 5), tolerance=0.01)
    maximum_and_total(case, answer, in_blocks(x - 10_000, 2, 3, 4), tolerance=0.01)
    steps = torch.tensor([-10_000.0, -1.0, 0.0, 90.0, 10_000.0]).repeat_interleave(2)
    maximum_and_total(case, answer, in_blocks(steps, 2, 2, 2, 2, 2), tolerance=0.01)
    maximum_and_total(case, answer, in_blocks(steps.flip(0), 3, 3, 4), tolerance=0.01)


@online_softmax.requires(
    "each block is read once, and none is kept",
    "`blocks` may be a generator: a second loop over it finds nothing, and whoever "
    "collects all blocks has the whole row in memory again.",
)
def _(answer, case):
    blocks = in_blocks(probe(2, 40, seed=5), *[5] * 8)
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
    maximum_and_total(case, answer, in_blocks(x, 3, 4, 2))
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
    x = in_blocks(probe(3, 9, seed=7).double(), 4, 5)
    maximum_and_total(case, answer, x, tolerance=1e-9)
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


def output_and_lse(case, answer, q, k, v, *args, tolerance=SUMS, **kwargs):
    """Call the answer, and compare both results with the whole matrix in float64."""
    found = case.call(answer, q, k, v, *args, **kwargs)
    causal = args[0] if args else kwargs.get("causal", False)
    compared(case, found, q, k, v, causal, tolerance)


def compared(case, found, q, k, v, causal, tolerance=SUMS, rows=slice(None)):
    """`rows`: of which queries output and log-sum-exp are compared."""
    case.is_tuple(found, 2, "the result (output and log-sum-exp)")
    for part in found:
        case.is_tensor(part, "each of the two results")
    wide = [x.detach().cpu().double() for x in (q, k, v)]
    output, lse = whole_attention(*wide, causal), whole_lse(*wide[:2], causal)
    of_output = tolerance if q.dtype.itemsize > 2 else None  # a half's own rounding
    case.close(found[0], output, "the output", like=q, tolerance=of_output)
    # Scores of 10,000 are rounded to a thousandth, and so is their log-sum-exp.
    of_lse = 100 * tolerance if tolerance > SUMS else tolerance
    sums(case, found[1], lse, "the log-sum-exp", q, of_lse)


@flash_attention.requires(
    "with everything in one block, the output is attention and the log-sum-exp that of "
    "the scaled scores",
    "Write it for one block first, as in lesson 02, from a maximum, a sum of "
    "exponentials and a product with v. The log-sum-exp is log Σ exp(score), maximum "
    "included.",
)
def _(answer, case):
    output_and_lse(case, answer, *heads(t_q=4, t_k=5, d_head=7, d_v=3))
    output_and_lse(case, answer, *heads(t_q=6, t_k=2, d_head=3, d_v=5, seed=5))


@flash_attention.requires(
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


@flash_attention.requires(
    "several blocks of queries, and lengths that the blocks do not divide",
    "Each block of queries starts afresh, and its results go to its own rows. The last "
    "block is shorter: if you fill it up, what is the weight of a key that does not "
    "exist?",
)
def _(answer, case):
    q, k, v = heads(t_q=12, t_k=8, d_head=7, d_v=3, seed=20)
    output_and_lse(case, answer, q, k, v, block_q=4, block_k=8)
    output_and_lse(case, answer, q, k, v, block_q=3, block_k=4)
    output_and_lse(case, answer, q, k, v, block_q=1, block_k=2)
    q, k, v = heads(t_q=11, t_k=13, d_head=7, d_v=3, seed=30)
    output_and_lse(case, answer, q, k, v, block_q=4, block_k=5)
    output_and_lse(case, answer, q, k, v, block_q=5, block_k=4)
    output_and_lse(case, answer, q, k, v, block_q=100, block_k=3)
    output_and_lse(case, answer, *heads(t_q=67, t_k=70, d_head=5, d_v=2, seed=35))


@flash_attention.requires(
    "batches and heads in front are each treated by themselves",
    "Two, three or four dimensions may come in, so count them from the end.",
)
def _(answer, case):
    for lead in ((3,), (2, 3)):
        q, k, v = heads(*lead, t_q=5, t_k=7, d_head=4, d_v=6, seed=40)
        output_and_lse(case, answer, q, k, v, block_q=2, block_k=3)


@flash_attention.requires(
    "causal: no query looks past its own position; fewer queries than keys are the last",
    "Write down for one block which positions its queries have and which its keys: "
    "both start where the block starts, and query i stands at i + T_k − T_q.",
)
def _(answer, case):
    q, k, v = heads(2, 3, t_q=9, t_k=9, d_head=4, d_v=6, seed=50)
    output_and_lse(case, answer, q, k, v, True)
    output_and_lse(case, answer, q, k, v, True, block_q=3, block_k=3)
    output_and_lse(case, answer, q, k, v, causal=True, block_q=4, block_k=2)
    output_and_lse(case, answer, q, k, v, True, block_q=2, block_k=5)
    q, k, v = heads(2, 3, t_q=5, t_k=11, d_head=4, d_v=6, seed=60)
    output_and_lse(case, answer, q, k, v, True, block_q=2, block_k=3)
    output_and_lse(case, answer, q, k, v, True, block_q=5, block_k=4)
    output_and_lse(case, answer, q[..., :1, :], k, v, True, block_q=4, block_k=4)


@flash_attention.requires(
    "scores of ±10,000 give no overflow",
    "A row's sum is at least 1 if its largest score was subtracted. Is the start of "
    "your maximum below every score?",
)
def _(answer, case):
    for level in (10_000, -10_000, -20_000):
        q, k, v = heads(2, t_q=5, t_k=7, d_head=16, d_v=3, seed=70)
        q, k = q.round(), k.round()
        q[..., 0], k[..., 0] = 200.0, level / 50.0
        for causal in (False, True):
            output_and_lse(case, answer, q, k, v, causal, 3, 2, tolerance=0.01)


@flash_attention.requires(
    "it never holds more than a few blocks of scores",
    "Which of your tensors has both lengths in its shape? The mask counts too.",
)
def _(answer, case):
    t = 512
    q, k, v = heads(t_q=t, t_k=t, d_head=4, seed=80)
    for causal in (False, True):
        with Cost() as cost:
            found = case.call(answer, q, k, v, causal, block_q=64, block_k=64)
        compared(case, found, q, k, v, causal)
        case.true(  # the limit: a quarter of the matrix in float32, or a mask of bytes
            cost.peak_bytes < t * t,
            f"At {t} queries and keys in blocks of 64 × 64, {cost.peak_bytes:,} bytes of "
            f"new tensors were alive at once; the whole matrix has {4 * t * t:,}, one "
            f"block {4 * 64 * 64:,}.",
        )


@flash_attention.requires(
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


@flash_attention.requires(
    "half precision is computed in float32; the output has the dtype of q, the "
    "log-sum-exp is float32; float64, and memory that is not contiguous, work too",
    "Convert a block when it is fetched, and the output when it is finished.",
)
def _(answer, case):
    for half in (torch.float16, torch.bfloat16):
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
    q, k, v = heads(2, 3, t_q=5, t_k=7, d_head=4, d_v=6, seed=100, dtype=torch.float64)
    found = case.call(answer, q, k, v, True, 2, 3)
    compared(case, found, q, k, v, True, tolerance=1e-9)
    q, k, v = (x.float() for x in (q, k, v))
    output_and_lse(case, answer, strided(q), strided(k), strided(v), True, 2, 3)
    q, k, v = (x.transpose(1, 2) for x in heads(2, 5, t_q=3, t_k=3, d_head=4, seed=106))
    output_and_lse(case, answer, q, k, v, False, 2, 3)


@flash_attention.requires(
    "what does not fit is a ValueError that names the numbers",
    "Compare the shapes first: a wrong number of heads may broadcast without a word.",
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


@flash_attention.requires(
    "without any key the output is zeros and the log-sum-exp −inf; without any query "
    "both are empty",
    "0/0 is NaN. How small can the sum of a query be that has seen a key?",
)
def _(answer, case):
    for kind in (torch.float32, torch.float16, torch.float64):
        q, k, v = heads(2, t_q=3, t_k=0, d_head=8, d_v=5, seed=115, dtype=kind)
        without_keys(case, case.call(answer, q, k, v), q, torch.zeros(2, 3, 5))
    q, k, v = heads(2, t_q=0, t_k=4, d_head=8, d_v=5, seed=115, dtype=torch.float16)
    without_keys(case, case.call(answer, q, k, v), q, torch.zeros(2, 0, 5))


def without_keys(case, found, q, zeros):
    case.is_tuple(found, 2, "the result (output and log-sum-exp)")
    case.close(found[0], zeros, "the output", like=q)
    sums(case, found[1], zeros[..., 0] - torch.inf, "the log-sum-exp", q)


@flash_attention.requires("it creates nothing on another device")
def _(answer, case):
    q, k, v = heads(2, 3, t_q=5, t_k=7, d_head=4, d_v=6, seed=120)
    case.any_device(lambda *args: answer(*args)[0], q, k, v, False, 2, 3)
    case.any_device(lambda *args: answer(*args)[1], q, k, v, True, 2, 3)


# Its gradient -------------------------------------------------------------------------


def named(f, name):
    """`f`, which messages call by this name."""
    f.__name__ = name
    return f


def all_gradients(case, answer, q, k, v, *more, of="qkv", same_sign=False):
    """Compare the gradients of q, k and v, or of some of them.

    The backward pass runs inside a call, so that what it raises is recorded.
    """

    def gradients(apply, *given):
        leaves = dict(zip("qkv", given, strict=True))
        wanted = [leaves[name].requires_grad_() for name in of]
        output = apply(*given, *more)
        case.is_tensor(output)
        case.has_graph(output)
        d_output = probe(*output.shape, seed=91, dtype=output.dtype)
        d_output = d_output.abs() if same_sign else d_output
        before = output.detach().clone(), d_output.clone()
        found = torch.autograd.grad(output, wanted, d_output, allow_unused=True)
        for name, x, old in (
            ("its output", output, before[0]),
            ("the gradient that came in", d_output, before[1]),
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

    backward = named(backward, "the backward pass of FlashAttention.apply")
    actual = case.call(backward, q, k, v)
    truth = gradients(whole_attention, *(x.detach().double() for x in (q, k, v)))
    for name, ours, expected in zip(of, actual, truth, strict=True):
        tolerance = 5 * SUMS if q.dtype == torch.float32 else None
        case.close(ours, expected, f"the gradient of `{name}`", tolerance=tolerance)


@FlashAttention.requires(
    "forward gives the output of flash_attention, and nothing else",
    "`flash_attention` returns two things; hand on the first and keep both.",
)
def _(answer, case):
    def apply(q, k, v, *causal_and_blocks):
        return answer.apply(q, k, v, *causal_and_blocks)

    apply = named(apply, "FlashAttention.apply")
    case.agrees(apply, whole_attention, *heads(2, t_q=4, t_k=5, d_head=7, d_v=3))
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
    "all three gradients are right, in one block",
    "Through the softmax: dS = P ∘ (dP − D), where D is one number for each query, the "
    "sum of dO ∘ O. The scale stands between scores and q·k, for queries and keys.",
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
        leaves = [x.requires_grad_() for x in given]
        outputs = (
            answer.apply(*given[:3], True, 2, 3),
            answer.apply(*given[3:], False, 3, 2),
        )
        case.has_graph(*outputs)
        total = sum((x * probe(*x.shape, seed=91)).sum() for x in outputs)
        found = [torch.autograd.grad(total, leaves, retain_graph=True) for _ in "12"]
        return tuple(x.detach().clone() for each in found for x in each)

    backward = named(backward, "two forward passes, and backward twice,")
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
        case.close(ours, expected, what, tolerance=5 * SUMS)


@FlashAttention.requires(
    "between forward and backward it keeps q, k, v, output and log-sum-exp alone, which "
    "are freed with the output",
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
        # q, k, v and output have 256 × 16 numbers each, the log-sum-exp 256.
        allowed = 256 * (4 * 16 * kind.itemsize + 4)
        case.note(kept > allowed + 2 * 256 * 256)  # a matrix, not copies
        case.true(
            kept <= 1.15 * allowed,
            f"After forward at 256 queries and keys of width 16 in {dtype(q)}, {kept:,} "
            f"bytes are kept; q, k, v, output and log-sum-exp have {allowed:,}, the "
            f"matrix of weights in float32 {4 * 256 * 256:,}.",
        )

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
    case.true(
        not kept,
        "After `del output` the output is still in memory. A tensor that is set on `ctx` "
        "is freed by Python's garbage collector, some day; what goes through "
        "`save_for_backward` is freed at once.",
    )


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
    q[..., 0] = 8.0
    for causal, level in (
        (False, torch.tensor(64.0)),
        (True, torch.tensor(-64.0)),
        (True, torch.tensor([0.0, 0, 0, 64, 64, 128, 128])),  # hidden ones are largest
    ):
        k[..., 0] = level
        all_gradients(case, answer, q, k, v, causal, 3, 2)
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
        all_gradients(case, answer, q, k, v, True, 8, 12)
    q, k, v = heads(t_q=600, t_k=6, d_head=4, seed=95, dtype=torch.bfloat16)
    all_gradients(case, answer, q * 0, k, v, False, 1, 6, of="v", same_sign=True)


@FlashAttention.requires(
    "what does not fit is refused here too, and so is a gradient of the gradient",
    "`@once_differentiable` stands between `@staticmethod` and `def backward`.",
)
def _(answer, case):
    q, k, v = heads(2, 3, t_q=5, t_k=4, d_head=8, seed=110)
    why = "causal, with 5 queries and 4 keys"
    case.raises(ValueError, answer.apply, q, k, v, True, mentions=(5, 4), because=why)
    few = (q, k[:, :1], v[:, :1])
    why = "3 heads of queries and 1 of keys and values"
    case.raises(ValueError, answer.apply, *few, mentions=(3, 1), because=why)

    def twice(f, *leaves):
        q, k, v = (x.requires_grad_() for x in leaves)
        (slope,) = torch.autograd.grad((f(q, k, v) ** 2).sum(), q, create_graph=True)
        try:
            (slope**2).sum().backward()
        except RuntimeError:
            return None
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)

    q, k, v = heads(2, t_q=5, t_k=7, d_head=4, d_v=6, seed=120)
    found = case.call(named(partial(twice, answer.apply), "a second backward"), q, k, v)
    if found is not None:
        wide = (x.double() for x in (q, k, v))
        truth = twice(lambda q, k, v: torch.softmax(whole_scores(q, k), -1) @ v, *wide)
        for name, ours, expected in zip("qkv", found, truth, strict=True):
            case.close(ours, expected, f"the gradient of the gradient, for `{name}`,")


# Traffic ------------------------------------------------------------------------------


def moved_bytes(t, d_head, block=None, causal=False, bytes_per_number=2):
    """The forward pass row by row, each access counted."""
    moved = 0
    if block is None:
        for step in ("q k scores", "scores weights", "weights v output"):
            for name in step.split():
                moved += t * (t if name in ("scores", "weights") else d_head)
        return moved * bytes_per_number
    waiting = list(range(t))
    while waiting:
        rows, waiting = waiting[:block], waiting[block:]
        keys = sum(not causal or key <= rows[-1] for key in range(t))
        moved += (2 * len(rows) + 2 * keys) * d_head * bytes_per_number
        moved += 4 * len(rows)  # log-sum-exp
    return moved


def count(case, answer, t, d_head, block=None, causal=False, bytes_per_number=2):
    """Compare; where whole matrices are missing or too many, the message says so."""
    given = t, d_head, block, causal, bytes_per_number
    found, expected = case.call(answer, *given), moved_bytes(*given)
    if type(found) is not int:
        raise Explained(
            f"The result is of type {type(found).__name__}, expected an int: a number of "
            "bytes is whole."
        )
    off = abs(found - expected)
    for size, name in (
        (t * t * bytes_per_number, "T × T"),
        (t * d_head * bytes_per_number, "T × d_head"),
    ):
        n_matrices, rest = divmod(off, size)
        if rest == 0 and 1 <= n_matrices <= 6:
            side = "many" if found > expected else "few"
            what = counted(n_matrices, f"{name} matrix", f"{name} matrices")
            raise Explained(
                f"The number of bytes is {found:,}, expected {expected:,}: {what} too "
                f"{side}."
            )
    case.equal(found, expected, "the number of bytes")


@hbm_bytes.requires(
    "without blocks: three steps, each with its arguments and its result",
    "Write the three steps in three lines, with the size of each matrix: scores = q·kᵀ, "
    "weights = softmax(scores), output = weights·v. How often does a T × T matrix cross?",
)
def _(answer, case):
    count(case, answer, 11, 3)
    count(case, answer, 7, 16)


@hbm_bytes.requires(
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


@hbm_bytes.requires(
    "with blocks that do not divide it",
    "The last block of queries is smaller, but all keys come for it too.",
)
def _(answer, case):
    count(case, answer, 13, 5, 4)
    count(case, answer, 5, 3, 8)


@hbm_bytes.requires(
    "causal: keys after a block's last query are not read; separate steps read all",
    "The block that starts at query 6 and ends with query 11 looks at keys 0 to 11.",
)
def _(answer, case):
    count(case, answer, 17, 7, 6, True)
    count(case, answer, 35, 4, 7, causal=True)
    count(case, answer, 5, 3, 8, True)
    count(case, answer, 12, 3, None, True)
    count(case, answer, 8, 3, 1, True)


@hbm_bytes.requires(
    "numbers of other sizes; the log-sum-exp is float32 always; large counts are exact",
    "The log-sum-exp is not one of the numbers whose size is given. A float has 53 bits; "
    "`//` divides integers without one.",
)
def _(answer, case):
    count(case, answer, 13, 5, 4, False, 4)
    count(case, answer, 13, 5, 4, True, bytes_per_number=1)
    count(case, answer, 10, 3, bytes_per_number=8)
    count(case, answer, 300_000_001, 3)
    count(case, answer, 13, 10**15 + 7, 4, True)


@hbm_bytes.requires("a block below 1 is a ValueError that names it")
def _(answer, case):
    for block in (0, -2):
        why = f"a block of {block}"
        case.raises(ValueError, answer, 8, 4, block, mentions=[block], because=why)


# The kernel ---------------------------------------------------------------------------


POINTER = (
    "A pointer is the sum of batch, head, row and column, each times the stride of that "
    "dimension of that very tensor"
)
LAST_BLOCK = "the last block is not full, so `tl.load` and `tl.store` need a mask"


def run_kernel(case, answer, q, k, v, *args, **kwargs):
    """Call the answer on the device that it is tried on."""
    where = device()
    q, k, v = (x.to(where) for x in (q, k, v))
    with warnings.catch_warnings(), strict():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of NaN and overflow
        try:
            return case.call(plainly(answer), q, k, v, *args, **kwargs)
        except Crashed as crash:
            if not isinstance(crash.error, OutsideTensor):
                raise
            case.note(crash.error.where)
            ragged = q.shape[2] % 16 or k.shape[2] % 16
            remedy = f"{POINTER}{f'; {LAST_BLOCK}' if ragged else ''}."
            raise Explained(
                f"A pointer led outside: {crash.error}. {remedy}"
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
    q, k, v = heads(1, 1, t_q=16, t_k=32, d_head=16)
    from_kernel(case, answer, q, k, v, block_q=16, block_k=32)
    q, k, v = heads(1, 1, t_q=32, t_k=48, d_head=16, seed=5)
    k = k * torch.linspace(0.2, 2, 48)[:, None]  # the maximum grows from block to block
    from_kernel(case, answer, q, k, v, False, 16, 16)


@flash_kernel.requires(
    "batches and heads",
    "The second number of the grid counts heads through all batches. Where does head h "
    "of batch b begin?",
)
def _(answer, case):
    q, k, v = heads(2, 3, t_q=16, t_k=16, d_head=16, seed=10)
    from_kernel(case, answer, q, k, v, False, 16, 16)


@flash_kernel.requires(
    "lengths that the blocks do not divide, and the blocks that it chooses itself",
    "What a mask leaves out of a `tl.load` is filled with `other`, and a key of zeros "
    "has the score 0. Stores need a mask too.",
)
def _(answer, case):
    q, k, v = heads(1, 1, t_q=19, t_k=33, d_head=16, seed=20)
    from_kernel(case, answer, q, k, v, False, 16, 32)
    from_kernel(case, answer, q, k, v, False, 32, 16)
    from_kernel(case, answer, *heads(1, 1, t_q=1, t_k=5, d_head=32, seed=25))


@flash_kernel.requires(
    "causal, with as many queries as keys and with fewer",
    "The position of a row is its number plus T_k − T_q.",
)
def _(answer, case):
    q, k, v = heads(1, 1, t_q=21, t_k=21, d_head=16, seed=30)
    from_kernel(case, answer, q, k, v, causal=True, block_q=32, block_k=16)
    q, k, v = heads(1, 1, t_q=21, t_k=53, d_head=16, seed=35)
    from_kernel(case, answer, q, k, v, True, 16, 32)
    from_kernel(case, answer, q, k[:, :, :35], v[:, :, :35], True, 16, 16)


@flash_kernel.requires(
    "any strides: heads that were split by a transpose, columns that are not neighbours",
    "Use every stride of q, k and v: batch, head, row and column.",
)
def _(answer, case):
    q, k, v = heads(2, 7, t_q=2, t_k=2, d_head=16, seed=40)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    from_kernel(case, answer, q, k, v, False, 16, 16)
    q, k, v = heads(1, 1, t_q=11, t_k=13, d_head=16, seed=45)
    from_kernel(case, answer, strided(q), k, strided(v), False, 16, 32)
    turned = q.mT.contiguous().mT  # the columns lie farther apart than the rows
    from_kernel(case, answer, turned, strided(k), v, False, 16, 32)


@flash_kernel.requires(
    "scores of ±10,000 give no overflow",
    "The maximum of a row, as in `flash_attention`. It starts below every score.",
)
def _(answer, case):
    q, k, v = heads(1, 1, t_q=11, t_k=20, d_head=16, seed=50)
    q[..., 0], k[..., 0] = torch.linspace(0, 200, 11), 50.0  # rows far from each other
    from_kernel(case, answer, q, k, v, False, 16, 16, tolerance=0.02)
    q, k = (x.round() for x in (q, k))
    q[..., 0] = 200.0
    for first, rest in ((200.0, 200.0), (-200.0, -200.0), (-200.0, -250.0)):
        k[..., :16, 0], k[..., 16:, 0] = first, rest
        from_kernel(case, answer, q, k, v, False, 16, 16, tolerance=0.02)


@flash_kernel.requires(
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


@flash_kernel.requires(
    "the products are computed in the kernel",
    "PyTorch allocates the results and launches; scores and outputs come from `tl.dot`.",
)
def _(answer, case):
    q, k, v = heads(1, 1, t_q=16, t_k=16, d_head=16, seed=70)
    with Cost() as cost:  # it counts ready-made attention on the CPU too
        run_kernel(case, answer, q, k, v, False, 16, 16)
    case.true(
        cost.flops == 0,
        f"PyTorch did {cost.flops:,} floating-point operations in matrix "
        "products on the way.",
    )


@flash_kernel.requires(
    "causal: blocks that nobody sees are not computed",
    "Where does the last query of the block stand? No key after it is needed: end the "
    "loop there.",
)
def _(answer, case):
    rows, keys = 128, 192  # the first 128 queries see 192 keys
    q, k, v = heads(1, 1, t_q=192, t_k=256, d_head=16, seed=90)
    seen = [q[:, :, :rows], k[:, :, :keys], v[:, :, :keys].clone()]
    v[:, :, keys:] = torch.nan  # the weight 0 does not hide it: 0 · NaN is NaN
    found = run_kernel(case, answer, q, k, v, True, 64, 64)
    case.is_tuple(found, 2, "the result (output and log-sum-exp)")
    first = [part[:, :, :rows] for part in found]
    touched = first[0].isnan().any(-1).sum().item()
    case.true(
        touched == 0,
        f"The values from position {keys} on were NaN, whole blocks that the first "
        f"{rows} queries do not see; {touched} of these queries have NaN in their "
        "output.",
    )
    compared(case, first, seen[0].to(device()), *seen[1:], True)


@flash_kernel.requires(
    "what it cannot compute is refused in a sentence",
    "These lines were given in the stub; they belong before everything else.",
)
def _(answer, case):
    where = device()
    q, k, v = (x.to(where) for x in heads(2, 3, t_q=20, t_k=16, d_head=16, seed=80))
    wrong = torch.float64 if where == "cuda" else torch.bfloat16
    name = str(wrong).removeprefix("torch.")
    for why, mentions, args in (
        ("causal, with 20 queries and 16 keys", (20, 16), (q, k, v, True)),
        ("3 heads of queries, 1 of keys and values", (3, 1), (q, k[:, :1], v[:, :1])),
        ("a block of 0", [0], (q, k, v, False, 0, 16)),
        (f"{name} inputs", [name], [x.to(wrong) for x in (q, k, v)]),
    ):
        with strict():  # where it is not refused, it runs
            case.raises(
                ValueError, plainly(answer), *args, mentions=mentions, because=why
            )


@flash_kernel.requires(
    "without any key the output is zeros and the log-sum-exp −inf",
    "0/0 is NaN. How small can the sum of a row be that has seen a key?",
)
def _(answer, case):
    q, k, v = heads(1, 2, t_q=5, t_k=0, d_head=16, seed=95)
    found = run_kernel(case, answer, q, k, v, False, 16, 16)
    without_keys(case, found, q.to(device()), torch.zeros(1, 2, 5, 16))


@flash_kernel.requires("it compiles for GPUs of compute capability 8.0 and 9.0")
def _(answer, case):
    ours = f"solutions.{flash_kernel.lesson}"  # the tests compile the reference
    if device() != "cpu" or getattr(answer, "__module__", ours) == ours:
        return
    with case.unrecorded(), launches() as seen:
        for kind, causal in ((torch.float16, True), (torch.float32, False)):
            q, k, v = heads(1, 2, t_q=19, t_k=37, d_head=16, seed=97, dtype=kind)
            run_kernel(case, answer, q, k, v, causal, 16, 16)
    problem = why_not_compiled(seen)
    if problem:  # None where this machine cannot tell
        raise Explained(problem)


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
            p.copy_(probe(*p.shape, seed=300 + i, scale=1.8 * p.shape[-1] ** -0.5))
    return module


@flash_in_the_model.requires(
    "flash_attention and attention under causal_mask mean the same, in a square and with "
    "fewer queries than keys",
    "Print the mask for 3 queries and 5 keys, and the weights that the blocks use.",
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
    whole = case.call(parts["attention"], q, k, v)
    found = case.call(parts["flash_attention"], q, k, v, False, 4, 3)
    what = "without a mask, the output"
    case.close(found[0], whole.double(), what, like=q, tolerance=SUMS)


@flash_in_the_model.requires(
    "online_softmax over blocks of scores gives the log-sum-exp of flash_attention",
    "Maximum plus logarithm of the total, in the natural logarithm, of scaled scores.",
)
def _(parts, case):
    q, k, v = heads(2, 3, t_q=5, t_k=11, d_head=4, d_v=6, seed=210)
    blocks = list(whole_scores(q, k).split(4, dim=-1))
    maximum, total = case.call(parts["online_softmax"], blocks)
    _, lse = case.call(parts["flash_attention"], q, k, v, False, 2, 3)
    expected = (maximum + total.log()).double()
    case.close(lse, expected, "the log-sum-exp", tolerance=SUMS)


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
        case.close(after, before.double(), what, like=x, tolerance=10 * SUMS)


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
    case.close(case.call(model, ids), before.double(), "the logits", tolerance=1e-3)
    ours = case.call(gradients, model, ids)
    names = (name for name, _ in model.named_parameters())
    for name, mine, slope in zip(names, ours, slopes, strict=True):
        case.close(mine, slope.double(), f"the gradient of {name}", tolerance=1e-3)
