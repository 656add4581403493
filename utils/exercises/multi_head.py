"""Lesson 03: heads, their masks, shared keys and values, and what they cost."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from utils.check.case import Crashed
from utils.check.exercise import Exercise, Joint
from utils.probe import probe, strided

# Oracles, by slices and loops ---------------------------------------------------------


def slices_of_heads(x, n_heads):
    """Each head is one slice of neighbouring columns."""
    d_head = x.shape[-1] // n_heads
    return torch.stack(
        [x[..., h * d_head : (h + 1) * d_head] for h in range(n_heads)], dim=1
    )


def side_by_side(x):
    return torch.cat([x[:, h] for h in range(x.shape[1])], dim=-1)


def head_by_head(x, weights, n_heads, n_kv_heads, mask=None, rotate=None):
    """Multi-head attention in float64, one head after the other."""
    w_q, w_k, w_v, w_o = (w.double() for w in weights)
    q, k, v = (
        slices_of_heads(x @ w.T, n)
        for w, n in ((w_q, n_heads), (w_k, n_kv_heads), (w_v, n_kv_heads))
    )
    if rotate is not None:
        q, k = rotate(q), rotate(k)
    t = x.shape[1]
    may_look = torch.ones(t, t, dtype=torch.bool) if mask is None else mask
    may_look = may_look.expand(x.shape[0], n_heads, t, t)
    heads = []
    for h in range(n_heads):
        shared = h // (n_heads // n_kv_heads)
        scores = q[:, h] @ k[:, shared].transpose(1, 2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~may_look[:, h], -torch.inf)
        heads.append(torch.softmax(scores, -1).nan_to_num(0.0) @ v[:, shared])
    return torch.cat(heads, dim=-1) @ w_o.T


def torch_module(x, weights, n_heads, mask=None):
    """PyTorch's own module, whose boolean mask means the opposite of ours."""
    w_q, w_k, w_v, w_o = (w.double() for w in weights)
    module = nn.MultiheadAttention(
        x.shape[-1], n_heads, bias=False, batch_first=True, dtype=torch.float64
    )
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([w_q, w_k, w_v]))
        module.out_proj.weight.copy_(w_o)
    hidden = None if mask is None else ~mask
    return module(x, x, x, attn_mask=hidden, need_weights=False)[0]


def torch_grouped(x, weights, n_heads, n_kv_heads, mask=None):
    """PyTorch's own function with shared key and value heads."""
    w_q, w_k, w_v, w_o = (w.double() for w in weights)
    q = F.linear(x, w_q).unflatten(-1, (n_heads, -1)).transpose(1, 2)
    k = F.linear(x, w_k).unflatten(-1, (n_kv_heads, -1)).transpose(1, 2)
    v = F.linear(x, w_v).unflatten(-1, (n_kv_heads, -1)).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return F.linear(out.transpose(1, 2).flatten(2), w_o)


def causal(t):
    return torch.ones(t, t, dtype=torch.bool).tril()


def turn(x):
    """Stands for a rotation: what it does depends on the position and the column."""
    angle = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None]
    return x * torch.cos(0.5 * angle) + x.roll(1, -1) * torch.sin(0.5 * angle)


def turn_by_row(x):
    """As `turn`, and each row of the batch has a size of its own."""
    size = torch.arange(1, len(x) + 1, device=x.device, dtype=x.dtype)
    return turn(x) * size.view(-1, *[1] * (x.dim() - 1))


# split_heads ---------------------------------------------------------------------------

split = Exercise("split_heads", lesson="multi_head")


@split.requires(
    "one row of one batch: head h gets the h-th run of neighbouring columns",
    "Write the columns 0 to 5 into one row and split it into 2 heads by hand: which "
    "columns belong to head 0?",
)
def _(answer, t):
    row = torch.arange(6.0).reshape(1, 1, 6)
    t.agrees(answer, slices_of_heads, row, 2)


@split.requires(
    "several rows and batches keep their own values, heads before time",
    "First cut the last dimension in two, then exchange dimensions. A view cannot "
    "exchange dimensions: it only reads the same memory in another shape.",
)
def _(answer, t):
    t.agrees(answer, slices_of_heads, probe(2, 5, 12), 3)
    t.agrees(answer, slices_of_heads, probe(4, 3, 10, seed=1), n_heads=5)
    t.agrees(answer, slices_of_heads, probe(3, 4, 8, seed=2), 2)


@split.requires("one head, heads of one column and a single position work too")
def _(answer, t):
    t.agrees(answer, slices_of_heads, probe(2, 5, 7, seed=3), 1)
    t.agrees(answer, slices_of_heads, probe(2, 5, 4, seed=4), 4)
    t.agrees(answer, slices_of_heads, probe(3, 1, 6, seed=5), 2)


@split.requires("memory that is not contiguous and other dtypes work too")
def _(answer, t):
    t.agrees(answer, slices_of_heads, strided(probe(2, 5, 6, seed=6)), 3)
    t.agrees(answer, slices_of_heads, probe(5, 2, 6, seed=7).transpose(0, 1), 3)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        t.agrees(answer, slices_of_heads, probe(2, 3, 8, seed=8, dtype=dtype), 4)


@split.requires(
    "a width that is not divisible is a ValueError that names both numbers",
    "Compare before you reshape, and say in the message which width and how many heads.",
)
def _(answer, t):
    for width, n_heads in ((10, 3), (4, 8)):
        t.raises(
            ValueError,
            answer,
            probe(2, 5, width),
            n_heads,
            mentions=(width, n_heads),
            because=f"a width of {width} and {n_heads} heads",
        )


@split.requires("gradients flow back")
def _(answer, t):
    t.gradients_agree(answer, slices_of_heads, probe(2, 5, 12, seed=9), 3)


@split.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, probe(2, 5, 12), 3)


@split.fault(
    "reshaped_straight",
    "The memory is read in the final shape without exchanging dimensions. A row's "
    "columns lie side by side in memory, so head 0 gets whole tokens of the first part "
    "of the sequence instead of a part of every token.",
)
def _(x, n_heads):
    if x.shape[-1] % n_heads:
        raise ValueError(f"{x.shape[-1]} {n_heads}")
    return x.reshape(x.shape[0], n_heads, x.shape[1], -1)


@split.fault(
    "not_transposed",
    "The heads stand behind the time: `(B, T, H, Dh)`. Attention works on the last two "
    "dimensions, so it would mix the heads of one token instead of the tokens of one "
    "head.",
)
def _(x, n_heads):
    return x.reshape(*x.shape[:2], n_heads, x.shape[-1] // n_heads)


@split.fault(
    "batch_and_time_exchanged",
    "Batch and time have changed places: `(T, B, H, Dh)`. The batch stays where it is; "
    "what should stand in front of the time are the heads.",
)
def _(x, n_heads):
    return slices_of_heads(x, n_heads).permute(2, 0, 1, 3)


@split.fault(
    "every_other_column",
    "The columns are dealt out like cards: head 0 gets the columns 0, H, 2H, … A head "
    "is a run of neighbouring columns; cut the width into (heads, d_head), in that "
    "order.",
)
def _(x, n_heads):
    return x.unflatten(-1, (-1, n_heads)).permute(0, 3, 1, 2)


@split.fault(
    "heads_before_batch",
    "The heads come first and the batch second. Batch first, then heads: "
    "`(B, H, T, Dh)`.",
)
def _(x, n_heads):
    return slices_of_heads(x, n_heads).transpose(0, 1)


@split.fault(
    "heads_and_batch_exchanged",
    "The heads are made by a view that starts from the batch: its rows are mixed, and "
    "what belongs to one sequence ends up in another. With one row a batch it hides.",
)
def _(x, n_heads):
    parts = slices_of_heads(x, n_heads)  # B H T Dh
    return parts.reshape(n_heads, x.shape[0], *parts.shape[2:]).transpose(0, 1)


@split.fault(
    "n_heads_taken_for_d_head",
    "Each head is `n_heads` wide. `n_heads` is how many heads there are; their width is "
    "what remains of the columns for each.",
)
def _(x, n_heads):
    return slices_of_heads(x, x.shape[-1] // n_heads)


@split.fault(
    "time_last",
    "Time and columns have changed places: `(B, H, Dh, T)`. The last dimension is the "
    "vector of a head.",
)
def _(x, n_heads):
    return slices_of_heads(x, n_heads).transpose(2, 3)


@split.fault(
    "split_along_time",
    "The sequence is cut into pieces, and each head gets some positions. Every head "
    "sees every position, and some columns of each.",
)
def _(x, n_heads):
    return torch.stack(x.chunk(n_heads, dim=1), dim=1)


@split.fault(
    "remainder_dropped",
    "Where the width is not divisible, the columns left over are dropped without a "
    "word. Nobody would notice the lost columns: refuse, and say why.",
)
def _(x, n_heads):
    d_head = x.shape[-1] // n_heads
    return slices_of_heads(x[..., : n_heads * d_head], n_heads)


@split.fault(
    "wrong_error",
    "A width that is not divisible reaches the reshape, and PyTorch complains of a "
    "shape that the caller has never seen. Test it first and raise a ValueError.",
)
def _(x, n_heads):
    return x.reshape(*x.shape[:2], n_heads, x.shape[-1] // n_heads).transpose(1, 2)


@split.fault("detached", "The result is cut from the graph, so nothing trains.")
def _(x, n_heads):
    if x.shape[-1] % n_heads:
        raise ValueError(f"{x.shape[-1]} {n_heads}")
    return slices_of_heads(x.detach(), n_heads)


# merge_heads ---------------------------------------------------------------------------

merge = Exercise("merge_heads", lesson="multi_head")


@merge.requires("one position: the heads lie side by side, head 0 first")
def _(answer, t):
    t.agrees(answer, side_by_side, torch.arange(6.0).reshape(1, 2, 1, 3))


@merge.requires(
    "several positions and batches keep their own values",
    "Dimensions can be joined only when they are neighbours and in the right order: "
    "which two must be neighbours here?",
)
def _(answer, t):
    t.agrees(answer, side_by_side, probe(2, 3, 5, 4))
    t.agrees(answer, side_by_side, probe(3, 2, 4, 5, seed=1))


@merge.requires(
    "memory in any order works, that of split heads included",
    "`view` refuses dimensions that do not lie side by side in memory. Is there "
    "something that copies where it has to?",
)
def _(answer, t):
    stream = probe(2, 5, 12, seed=2)
    t.agrees(answer, side_by_side, stream.unflatten(-1, (3, 4)).transpose(1, 2))
    t.agrees(answer, side_by_side, strided(probe(2, 3, 5, 4, seed=3)))
    t.agrees(answer, side_by_side, probe(2, 3, 4, 5, seed=4).transpose(2, 3))


@merge.requires("one head, heads of one column and other dtypes work too")
def _(answer, t):
    t.agrees(answer, side_by_side, probe(2, 1, 5, 4, seed=5))
    t.agrees(answer, side_by_side, probe(2, 3, 5, 1, seed=6))
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        t.agrees(answer, side_by_side, probe(2, 3, 5, 4, seed=7, dtype=dtype))


@merge.requires("gradients flow back")
def _(answer, t):
    t.gradients_agree(answer, side_by_side, probe(2, 3, 5, 4, seed=8))


@merge.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, probe(2, 3, 5, 4))


@merge.fault(
    "not_transposed_back",
    "The memory is read in the final shape while the heads still stand before the time. "
    "Each row of the result then holds several positions of one head instead of one "
    "position of every head. With one head or one position it hides.",
)
def _(x):
    return x.reshape(x.shape[0], x.shape[2], -1)


@merge.fault(
    "view_of_a_transposed_tensor",
    "`view` needs memory in the order of the dimensions, and after a transpose it is in "
    "another. It works on what `split_heads` gives and fails on what attention gives.",
)
def _(x):
    return x.transpose(1, 2).view(x.shape[0], x.shape[2], -1)


@merge.fault(
    "columns_interleaved",
    "The columns of the heads alternate: head 0's first, head 1's first, … Each head's "
    "columns stay together.",
)
def _(x):
    return x.permute(0, 2, 3, 1).flatten(2)


@merge.fault(
    "heads_and_batch_exchanged",
    "The heads are joined with the rows of the batch, so that sequences are mixed. With "
    "one row a batch it hides.",
)
def _(x):
    swapped = x.reshape(x.shape[1], x.shape[0], *x.shape[2:])  # H B T Dh
    return swapped.permute(1, 2, 0, 3).flatten(2)


@merge.fault(
    "only_transposed",
    "The heads stand behind the time, but they are still a dimension of their own: "
    "`(B, T, H, Dh)`.",
)
def _(x):
    return x.transpose(1, 2)


@merge.fault(
    "summed",
    "The heads are added up, so what they found can no longer be told apart. Put them "
    "side by side; the output projection decides how to mix them.",
)
def _(x):
    return x.sum(1)


@merge.fault(
    "averaged",
    "The heads are averaged, so what they found can no longer be told apart. Put them "
    "side by side; the output projection decides how to mix them.",
)
def _(x):
    return x.mean(1)


@merge.fault(
    "joined_along_time",
    "The heads are put one after the other along the time: `(B, H·T, Dh)`. They belong "
    "side by side in the last dimension.",
)
def _(x):
    return x.flatten(1, 2)


@merge.fault(
    "heads_reversed", "The heads lie side by side in reverse: the last comes first."
)
def _(x):
    return side_by_side(x.flip(1))


@merge.fault("detached", "The result is cut from the graph, so nothing trains.")
def _(x):
    return side_by_side(x.detach())


# repeat_kv -----------------------------------------------------------------------------

repeat = Exercise("repeat_kv", lesson="multi_head")


def shared_heads(x, group_size):
    """Query head h gets key or value head h // group_size."""
    heads = [x[:, h // group_size] for h in range(x.shape[1] * group_size)]
    return torch.stack(heads, dim=1)


@repeat.requires(
    "neighbouring query heads share: head h is head h // group_size",
    "Write down for 2 heads and a group of 3 which head each of the 6 is.",
)
def _(answer, t):
    t.agrees(answer, shared_heads, torch.arange(2.0).reshape(1, 2, 1, 1), 3)
    t.agrees(answer, shared_heads, probe(2, 3, 5, 4), 2)
    t.agrees(answer, shared_heads, probe(3, 2, 4, 5, seed=1), group_size=4)


@repeat.requires("a group of one changes nothing, and one head can serve all")
def _(answer, t):
    t.agrees(answer, shared_heads, probe(2, 3, 5, 4, seed=2), 1)
    t.agrees(answer, shared_heads, probe(2, 1, 5, 4, seed=3), 6)


@repeat.requires("memory that is not contiguous and other dtypes work too")
def _(answer, t):
    stream = probe(2, 5, 12, seed=4)
    t.agrees(answer, shared_heads, stream.unflatten(-1, (3, 4)).transpose(1, 2), 2)
    t.agrees(answer, shared_heads, strided(probe(2, 3, 5, 4, seed=5)), 2)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        t.agrees(answer, shared_heads, probe(2, 3, 5, 4, seed=6, dtype=dtype), 3)


@repeat.requires("gradients of all that share a head add up in it")
def _(answer, t):
    t.gradients_agree(answer, shared_heads, probe(2, 3, 5, 4, seed=7), 2)


@repeat.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, probe(2, 3, 5, 4), 2)


@repeat.fault(
    "tiled",
    "The heads come in turn, 0, 1, 0, 1, where neighbours must share: 0, 0, 1, 1. It "
    "hides where every head is its own and where one head serves all.",
)
def _(x, group_size):
    return x.repeat(1, group_size, 1, 1)


@repeat.fault(
    "repeated_along_the_batch",
    "The rows of the batch are repeated instead of the heads.",
)
def _(x, group_size):
    return x.repeat_interleave(group_size, 0)


@repeat.fault(
    "repeated_along_time",
    "Every position is repeated instead of every head: the sequence has become longer.",
)
def _(x, group_size):
    return x.repeat_interleave(group_size, 2)


@repeat.fault(
    "repeated_columns",
    "The columns are repeated instead of the heads: the vectors have become wider.",
)
def _(x, group_size):
    return x.repeat_interleave(group_size, -1)


@repeat.fault(
    "no_dimension_given",
    "Without a dimension, repeating flattens the whole tensor.",
)
def _(x, group_size):
    return x.repeat_interleave(group_size)


@repeat.fault(
    "not_repeated",
    "The heads come back as they were. There are group_size query heads for each.",
)
def _(x, group_size):
    return x.clone()


@repeat.fault(
    "group_size_taken_for_the_total",
    "There are `group_size` heads in all afterwards. It is the number of query heads "
    "that share each head.",
)
def _(x, group_size):
    return x.repeat_interleave(-(-group_size // x.shape[1]), 1)[:, :group_size]


@repeat.fault(
    "averaged",
    "Every query head gets the same average over the heads. Each group has a head of "
    "its own.",
)
def _(x, group_size):
    return x.mean(1, keepdim=True).repeat(1, x.shape[1] * group_size, 1, 1)


@repeat.fault(
    "first_head_for_all",
    "Every query head gets head 0. That is right only if it is the only one.",
)
def _(x, group_size):
    return x[:, :1].repeat(1, x.shape[1] * group_size, 1, 1)


@repeat.fault(
    "divided",
    "The copies are divided by the size of the group. A shared head is the same for "
    "each that shares it.",
)
def _(x, group_size):
    return shared_heads(x, group_size) / group_size


@repeat.fault(
    "detached",
    "The result is cut from the graph, so the keys and values would not train.",
)
def _(x, group_size):
    return shared_heads(x.detach(), group_size)


# MultiHeadAttention -------------------------------------------------------------------

multi_head = Exercise("MultiHeadAttention", lesson="multi_head")


def weights_for(d_model, n_heads, n_kv_heads, d_head, seed=0):
    """w_q, w_k, w_v, w_o in the layout of `nn.Linear`, one row an output."""
    scale = 1.5 / math.sqrt(d_model)
    queries, shared = n_heads * d_head, n_kv_heads * d_head
    return (
        probe(queries, d_model, seed=seed, scale=scale),
        probe(shared, d_model, seed=seed + 1, scale=scale),
        probe(shared, d_model, seed=seed + 2, scale=scale),
        probe(d_model, queries, seed=seed + 3, scale=scale),
    )


def loaded(answer, t, weights, *args, **kwargs):
    """A module with these weights, which are all that it has."""
    module = t.call(answer, *args, **kwargs)
    t.true(
        isinstance(module, nn.Module) and callable(module),
        "Calling the class must give a module.",
    )
    t.load(module, **dict(zip(("w_q", "w_k", "w_v", "w_o"), weights, strict=True)))
    t.parameter_count(module, sum(w.numel() for w in weights))
    return module


def accepted(answer, t, why, *args, **kwargs):
    """These numbers are no error."""
    try:
        t.call(answer, *args, **kwargs)
    except Crashed as crash:
        if not isinstance(crash.error, (ValueError, AssertionError)):
            raise
        t.trace.pop()  # in which words it is refused does not matter
        t.true(False, f"It refuses {why}: “{crash.error}”.")


@multi_head.requires(
    "it has the weights w_q, w_k, w_v and w_o without bias, of the right shapes",
    "`super().__init__()` first. Queries are n_heads·d_head wide, keys and values "
    "n_kv_heads·d_head; w_o leads back to d_model.",
)
def _(answer, t):
    loaded(answer, t, weights_for(12, 3, 3, 4), 12, 3)
    given = "a d_model of 10 with 4 heads although d_head is given"
    accepted(answer, t, given, 10, 4, d_head=3)
    shared = "4 query heads on 2 key and value heads"
    accepted(answer, t, shared, 8, 4, n_kv_heads=2)
    loaded(answer, t, weights_for(10, 4, 2, 3), 10, 4, 2, 3)
    loaded(answer, t, weights_for(10, 3, 3, 4), 10, 3, d_head=4)
    loaded(answer, t, weights_for(12, 6, 2, 2), d_model=12, n_heads=6, n_kv_heads=2)


@multi_head.requires(
    "one head agrees with torch.nn.MultiheadAttention",
    "With one head nothing is split. Check the order: project, look, project back. Only "
    "the scores are divided, by the root of d_head.",
)
def _(answer, t):
    weights = weights_for(6, 1, 1, 6)
    module = loaded(answer, t, weights, 6, 1)
    t.agrees(module, lambda x: torch_module(x, weights, 1), probe(2, 5, 6))


@multi_head.requires(
    "several heads agree with it too",
    "If one head is right and several are not, look at the split, the merge, and the "
    "divisor of the scores.",
)
def _(answer, t):
    weights = weights_for(12, 3, 3, 4, seed=10)
    module = loaded(answer, t, weights, 12, 3)
    t.agrees(module, lambda x: torch_module(x, weights, 3), probe(2, 5, 12, seed=1))
    t.agrees(module, lambda x: torch_module(x, weights, 3), probe(4, 1, 12, seed=2))


@multi_head.requires("d_head need not be d_model / n_heads")
def _(answer, t):
    weights = weights_for(10, 3, 3, 4, seed=20)
    module = loaded(answer, t, weights, 10, 3, d_head=4)
    t.agrees(module, lambda x: head_by_head(x, weights, 3, 3), probe(2, 5, 10, seed=2))


@multi_head.requires(
    "neighbouring query heads share key and value heads, as with enable_gqa",
    "`repeat_kv` wants the size of a group, and comes before the scores.",
)
def _(answer, t):
    for n_heads, n_kv_heads, d_head in ((6, 2, 4), (4, 1, 3), (4, 2, 5), (6, 3, 2)):
        weights = weights_for(10, n_heads, n_kv_heads, d_head, seed=30)
        module = loaded(
            answer, t, weights, 10, n_heads, n_kv_heads=n_kv_heads, d_head=d_head
        )

        def oracle(x, weights=weights, n_heads=n_heads, n_kv_heads=n_kv_heads):
            return torch_grouped(x, weights, n_heads, n_kv_heads)

        t.agrees(module, oracle, probe(2, 5, 10, seed=3))


@multi_head.requires(
    "a mask (T, T) hides keys: True = may look",
    "Hand the mask on to attention, unchanged.",
)
def _(answer, t):
    weights = weights_for(12, 3, 3, 4, seed=40)
    module = loaded(answer, t, weights, 12, 3)

    def oracle(x, mask):
        return torch_module(x, weights, 3, mask)

    t.agrees(module, oracle, probe(2, 5, 12, seed=4), causal(5))
    window = causal(6) & ~causal(6).tril(-3)
    t.agrees(module, oracle, probe(3, 6, 12, seed=5), mask=window)


@multi_head.requires(
    "a mask of its own for each row of the batch, for each head, or for both",
    "The mask must reach scores of shape (B, H, T, T). If heads and batch are one "
    "dimension in your code, in what order do they stand?",
)
def _(answer, t):
    weights = weights_for(12, 4, 2, 3, seed=50)
    module = loaded(answer, t, weights, 12, 4, 2)

    def oracle(x, mask):
        return head_by_head(x, weights, 4, 2, mask)

    x = probe(3, 5, 12, seed=6)
    lengths = torch.tensor([5, 2, 3])
    padding = (torch.arange(5) < lengths[:, None])[:, None, None, :]  # B 1 1 T
    own = torch.stack([causal(5).roll(h, -1) | torch.eye(5).bool() for h in range(4)])
    own[:, :, 0] = True  # with padding too, every query sees something
    t.agrees(module, oracle, x, padding)
    t.agrees(module, oracle, x, padding & causal(5))
    t.agrees(module, oracle, x, mask=own)
    t.agrees(module, oracle, x, padding & own)


@multi_head.requires("a row of nothing but padding gives zeros")
def _(answer, t):
    weights = weights_for(8, 2, 2, 4, seed=60)
    module = loaded(answer, t, weights, 8, 2)
    lengths = torch.tensor([0, 4, 2])
    padding = (torch.arange(4) < lengths[:, None])[:, None, None, :]
    t.agrees(
        module,
        lambda x, mask: head_by_head(x, weights, 2, 2, mask),
        probe(3, 4, 8, seed=7),
        padding,
    )


@multi_head.requires(
    "rotate turns the queries and the keys of each head, and nothing else",
    "It wants (B, heads, T, d_head), so the split comes first; the values are what is "
    "looked up, and stay as they are.",
)
def _(answer, t):
    weights = weights_for(10, 4, 2, 4, seed=70)
    module = loaded(answer, t, weights, 10, 4, 2, 4)

    def oracle(x, mask=None, rotate=None):
        return head_by_head(x, weights, 4, 2, mask, rotate)

    t.agrees(module, oracle, probe(2, 5, 10, seed=8), rotate=turn)
    t.agrees(module, oracle, probe(2, 5, 10, seed=9), causal(5), turn)
    t.agrees(module, oracle, probe(2, 5, 10, seed=8), rotate=turn_by_row)


@multi_head.requires(
    "every call stands for itself, in training and in eval()",
    "Keep nothing from one call to the next, and drop nothing at random.",
)
def _(answer, t):
    weights = weights_for(12, 3, 3, 4, seed=80)
    module = loaded(answer, t, weights, 12, 3)

    def oracle(x, mask=None, rotate=None):
        return head_by_head(x, weights, 3, 3, mask, rotate)

    t.agrees(module, oracle, probe(2, 5, 12, seed=10))
    t.agrees(module, oracle, probe(3, 4, 12, seed=11))
    t.agrees(module.eval(), oracle, probe(2, 5, 12, seed=10))
    t.agrees(module, oracle, probe(2, 5, 12, seed=10), causal(5))
    t.agrees(module, oracle, probe(2, 5, 12, seed=10), rotate=turn)


@multi_head.requires("float64, half precision and memory that is not contiguous work")
def _(answer, t):
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        weights = tuple(w.to(dtype) for w in weights_for(12, 4, 2, 3, seed=90))
        module = loaded(answer, t, weights, 12, 4, 2).to(dtype)
        t.load(module, w_q=weights[0], w_k=weights[1], w_v=weights[2], w_o=weights[3])

        def oracle(x, mask, weights=weights):
            return head_by_head(x, weights, 4, 2, mask)

        t.agrees(module, oracle, probe(2, 5, 12, seed=12, dtype=dtype), causal(5))
    weights = weights_for(12, 4, 2, 3, seed=90)
    module = loaded(answer, t, weights, 12, 4, 2)
    swapped = probe(5, 2, 12, seed=13).transpose(0, 1)
    t.agrees(module, lambda x: head_by_head(x, weights, 4, 2), swapped)
    t.agrees(module, lambda x: head_by_head(x, weights, 4, 2), strided(swapped))


@multi_head.requires(
    "gradients reach the input and every weight, and stay finite where all is hidden",
    "Which weight plays no part in the result, or is cut off from it? A NaN that is "
    "replaced after the average of the values still reaches them through the gradient.",
)
def _(answer, t):
    weights = weights_for(10, 4, 2, 3, seed=100)
    module = loaded(answer, t, weights, 10, 4, 2, 3)
    x, mask = probe(2, 5, 10, seed=14), causal(5)
    t.gradients_agree(module, lambda x, m: head_by_head(x, weights, 4, 2, m), x, mask)
    names = ("w_q", "w_k", "w_v", "w_o")
    truth = [w.double().requires_grad_() for w in weights]
    pull = probe(2, 5, 10, seed=15)
    expected = torch.autograd.grad(
        (head_by_head(x.double(), truth, 4, 2, mask) * pull).sum(), truth
    )

    def gradients(x):
        module.zero_grad()
        (module(x, mask) * pull).sum().backward()
        found = dict(module.named_parameters())
        weight = [found.get(f"{n}.weight", found.get(n)) for n in names]
        return tuple(torch.zeros_like(w) if w.grad is None else w.grad for w in weight)

    for name, actual, wanted in zip(names, t.call(gradients, x), expected, strict=True):
        t.close(actual, wanted, f"the gradient of `{name}`")
    blind = torch.arange(5) < torch.tensor([0, 3]).view(2, 1, 1, 1)  # B 1 1 T
    t.gradients_agree(module, lambda x, m: head_by_head(x, weights, 4, 2, m), x, blind)


@multi_head.requires(
    "numbers that do not fit are a ValueError that names both",
    "Two things can be refused: a d_model that the heads cannot share evenly, unless "
    "d_head is given, and query heads that the KV heads cannot share evenly.",
)
def _(answer, t):
    t.raises(
        ValueError,
        answer,
        14,
        4,
        mentions=(14, 4),
        because="d_model 14 and 4 heads without d_head",
    )
    t.raises(
        ValueError,
        answer,
        12,
        6,
        n_kv_heads=4,
        mentions=(6, 4),
        because="6 heads and 4 KV heads",
    )
    t.raises(
        ValueError,
        answer,
        16,
        2,
        n_kv_heads=8,
        mentions=(2, 8),
        because="2 heads and 8 KV heads",
    )


@multi_head.requires("it creates nothing on another device")
def _(answer, t):
    module = loaded(answer, t, weights_for(10, 4, 2, 4), 10, 4, 2, 4)

    def run(module, x, mask=None):
        return module(x, mask, turn)

    t.any_device(run, module, probe(2, 5, 10), causal(5))
    t.any_device(run, module, probe(2, 5, 10))


@multi_head.requires(
    "a new module starts with random weights, different in each layer",
    "`nn.Linear` does so by itself.",
)
def _(answer, t):
    module = t.call(answer, 12, 3)
    names = ("w_q", "w_k", "w_v")
    found = dict(module.named_parameters())
    new = [found.get(f"{n}.weight", found.get(n)).detach() for n in names]
    for name, weight in zip(names, new, strict=True):
        t.true(
            weight.isfinite().all() and weight.std() > 1e-3,
            f"The weights of `{name}` all start with the same value, so they would "
            "learn the same.",
        )
    different = all(not torch.equal(a, b) for i, a in enumerate(new) for b in new[:i])
    t.true(different, "Two of w_q, w_k and w_v start with the same weights.")


class Plain(nn.Module):
    """A right answer in pieces; each fault below replaces one of them."""

    bias = False

    def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        self.refuse(d_model, n_heads, n_kv_heads, d_head)
        self.d_model, self.n_heads, self.n_kv_heads = d_model, n_heads, n_kv_heads
        self.d_head = self.width(d_model, n_heads, n_kv_heads, d_head)
        self.make()

    def refuse(self, d_model, n_heads, n_kv_heads, d_head):
        if d_head is None and d_model % n_heads:
            raise ValueError(f"{d_model} {n_heads}")
        if n_heads % n_kv_heads:
            raise ValueError(f"{n_heads} {n_kv_heads}")

    def width(self, d_model, n_heads, n_kv_heads, d_head):
        return d_model // n_heads if d_head is None else d_head

    def make(self):
        queries, shared = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        self.w_q = nn.Linear(self.d_model, queries, bias=self.bias)
        self.w_k = nn.Linear(self.d_model, shared, bias=self.bias)
        self.w_v = nn.Linear(self.d_model, shared, bias=self.bias)
        self.w_o = nn.Linear(queries, self.d_model, bias=self.bias)

    def project(self, x):
        return self.w_q(x), self.w_k(x), self.w_v(x)

    def split(self, x, n_heads):
        return slices_of_heads(x, n_heads)

    def turn(self, q, k, v, rotate):
        return rotate(q), rotate(k), v

    def share(self, x):
        return shared_heads(x, self.n_heads // self.n_kv_heads)

    def scale(self):
        return 1 / math.sqrt(self.d_head)

    def look(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) * self.scale()
        if mask is None:
            return torch.softmax(scores, -1) @ v
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
        return weights.masked_fill(~mask, 0) @ v

    def merge(self, x):
        return side_by_side(x)

    def back(self, x):
        return self.w_o(x)

    def forward(self, x, mask=None, rotate=None):
        q, k, v = self.project(x)
        q, k, v = (
            self.split(q, self.n_heads),
            self.split(k, self.n_kv_heads),
            self.split(v, self.n_kv_heads),
        )
        if rotate is not None:
            q, k, v = self.turn(q, k, v, rotate)
        k, v = self.share(k), self.share(v)
        return self.back(self.merge(self.look(q, k, v, mask)))


def wrong(name, sentence):
    """A fault of `MultiHeadAttention`: a `Plain` with one piece replaced."""
    return multi_head.fault(name, sentence)


@wrong(
    "no_output_projection",
    "w_o is made and never used. Without it the heads lie side by side and nothing "
    "mixes what they found.",
)
class _(Plain):
    def back(self, x):
        return x


@wrong(
    "bias",
    "The linear layers have a bias. This course's attention has none, and weights that "
    "later lessons load have none either.",
)
class _(Plain):
    bias = True


@wrong(
    "one_layer_too_many",
    "There is a linear layer more than the four. Queries, keys, values and the output: "
    "each is projected once.",
)
class _(Plain):
    def make(self):
        super().make()
        self.extra = nn.Linear(self.d_model, self.d_model, bias=False)

    def forward(self, x, mask=None, rotate=None):
        return self.extra(super().forward(x, mask, rotate))


@wrong(
    "kv_not_narrowed",
    "w_k and w_v are as wide as w_q. With fewer key and value heads they are narrower: "
    "that is what sharing saves.",
)
class _(Plain):
    def make(self):
        super().make()
        width = self.n_heads * self.d_head
        self.w_k = nn.Linear(self.d_model, width, bias=False)
        self.w_v = nn.Linear(self.d_model, width, bias=False)


@wrong(
    "d_head_ignored",
    "The heads are d_model // n_heads wide although `d_head` says otherwise.",
)
class _(Plain):
    def width(self, d_model, n_heads, n_kv_heads, d_head):
        return d_model // n_heads


@wrong(
    "d_head_from_the_kv_heads",
    "d_model is divided by the number of key and value heads. A head's width follows "
    "from the number of query heads.",
)
class _(Plain):
    def width(self, d_model, n_heads, n_kv_heads, d_head):
        return d_model // n_kv_heads if d_head is None else d_head


@wrong(
    "weights_shared",
    "Keys and values come from one and the same layer. What a token is found by and "
    "what it hands over are two projections.",
)
class _(Plain):
    def make(self):
        super().make()
        self.w_v = self.w_k


@wrong(
    "not_initialised",
    "A layer is assigned before `super().__init__()` has been called. Call it first: it "
    "prepares what layers are registered in.",
)
class _(nn.Module):
    def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
        self.w_q = nn.Linear(d_model, d_model, bias=False)


@wrong(
    "group_size_for_kv_heads",
    "`n_kv_heads` is taken for the size of a group. It is the number of key and value "
    "heads; a group is n_heads // n_kv_heads query heads.",
)
class _(Plain):
    def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
        groups = n_heads if n_kv_heads is None else n_heads // n_kv_heads
        super().__init__(d_model, n_heads, groups, d_head)


@wrong(
    "weights_transposed",
    "The weights are stored one column an output. `nn.Linear` stores one row an output, "
    "and weights that later lessons load are in that form.",
)
class _(Plain):
    def make(self):
        queries, shared = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        self.w_q = nn.Parameter(torch.zeros(self.d_model, queries))
        self.w_k = nn.Parameter(torch.zeros(self.d_model, shared))
        self.w_v = nn.Parameter(torch.zeros(self.d_model, shared))
        self.w_o = nn.Parameter(torch.zeros(queries, self.d_model))

    def project(self, x):
        return x @ self.w_q, x @ self.w_k, x @ self.w_v

    def back(self, x):
        return x @ self.w_o


@wrong(
    "keys_and_values_exchanged",
    "w_k makes the values and w_v the keys. Trained from the start it would work; with "
    "weights loaded by name it does not.",
)
class _(Plain):
    def project(self, x):
        return self.w_q(x), self.w_v(x), self.w_k(x)


@wrong(
    "queries_and_keys_exchanged",
    "w_k makes the queries and w_q the keys, so every weight stands on the wrong side "
    "of the diagonal.",
)
class _(Plain):
    def project(self, x):
        k, q = self.w_q(x), self.w_k(x)
        return (q, k, self.w_v(x)) if q.shape == k.shape else (k, q, self.w_v(x))


@wrong(
    "values_not_projected",
    "The values are keys: w_v plays no part.",
)
class _(Plain):
    def project(self, x):
        return self.w_q(x), self.w_k(x), self.w_k(x)


@wrong(
    "scaled_by_d_model",
    "The scores are divided by √d_model. Each head's dot products run over d_head "
    "columns; with one head both are the same, and it hides.",
)
class _(Plain):
    def scale(self):
        return 1 / math.sqrt(self.d_model)


@wrong(
    "scaled_by_all_heads",
    "The scores are divided by the root of n_heads·d_head, the width of all heads. Each "
    "head's dot products run over d_head columns.",
)
class _(Plain):
    def scale(self):
        return 1 / math.sqrt(self.n_heads * self.d_head)


@wrong(
    "scaled_twice",
    "The scores are divided by √d_head twice: `attention` already does it.",
)
class _(Plain):
    def scale(self):
        return 1 / self.d_head


@wrong(
    "scaled_by_the_length",
    "The scores are divided by the root of the number of positions. They sum over the "
    "d_head numbers of queries and keys, so it is d_head that counts.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        return super().look(q * math.sqrt(self.d_head / q.shape[-2]), k, v, mask)


@wrong(
    "output_scaled",
    "The results of the heads are divided by the root of d_head. `attention` has divided "
    "the scores already, and an average of values needs no scale.",
)
class _(Plain):
    def merge(self, x):
        return side_by_side(x) * self.scale()


@wrong("not_scaled", "The scores are not divided by √d_head.")
class _(Plain):
    def scale(self):
        return 1.0


@wrong(
    "merged_without_transposing",
    "The heads are merged while they still stand before the time, so each row holds "
    "several positions of one head.",
)
class _(Plain):
    def merge(self, x):
        return x.reshape(x.shape[0], x.shape[2], -1)


@wrong(
    "view_of_a_transposed_tensor",
    "The heads are merged with `view`, which needs memory in the order of the "
    "dimensions. After a transpose it is in another.",
)
class _(Plain):
    def merge(self, x):
        turned = x.contiguous().transpose(1, 2)
        return turned.view(*turned.shape[:2], -1)


@wrong(
    "split_without_transposing",
    "The heads are read out of memory in the final shape, without exchanging "
    "dimensions: a head gets some tokens whole, instead of a part of each.",
)
class _(Plain):
    def split(self, x, n_heads):
        return x.reshape(x.shape[0], n_heads, x.shape[1], -1)


@wrong(
    "reshaped_both_ways",
    "Split and merge each read memory in the final shape, without exchanging "
    "dimensions. The shapes are right and the stream comes back, but a head gets some "
    "tokens whole, instead of a part of each.",
)
class _(Plain):
    def split(self, x, n_heads):
        return x.reshape(x.shape[0], n_heads, x.shape[1], -1)

    def merge(self, x):
        return x.reshape(x.shape[0], x.shape[2], -1)


@wrong(
    "heads_mixed_instead_of_tokens",
    "The heads stand behind the time, so attention mixes the heads of one token and no "
    "token ever sees another.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # B T H Dh
        return super().look(q, k, v, None).transpose(1, 2)


@wrong(
    "heads_and_batch_exchanged",
    "A view joins heads and batch in the wrong order, so rows of the batch see each "
    "other. With one row or one head it hides.",
)
class _(Plain):
    def split(self, x, n_heads):
        parts = slices_of_heads(x, n_heads)
        mixed = parts.reshape(n_heads, x.shape[0], *parts.shape[2:])
        return mixed.transpose(0, 1)


@wrong(
    "columns_interleaved",
    "The columns are dealt out to the heads like cards. A head is a run of neighbouring "
    "columns; loaded weights rely on it.",
)
class _(Plain):
    def split(self, x, n_heads):
        return x.unflatten(-1, (-1, n_heads)).permute(0, 3, 1, 2)


@wrong(
    "merged_interleaved",
    "The results of the heads are mixed column by column: the first column of each, "
    "then the second. They lie side by side, head 0 first; w_o counts on it.",
)
class _(Plain):
    def merge(self, x):
        return x.permute(0, 2, 3, 1).flatten(2)


@wrong(
    "interleaved_both_ways",
    "The columns are dealt out to the heads like cards and collected in the same way. "
    "Trained from the start it would work; loaded weights count on a head being a run "
    "of neighbouring columns.",
)
class _(Plain):
    def split(self, x, n_heads):
        return x.unflatten(-1, (-1, n_heads)).permute(0, 3, 1, 2)

    def merge(self, x):
        return x.permute(0, 2, 3, 1).flatten(2)


@wrong(
    "no_heads",
    "Nothing is split: one look of full width, whatever n_heads says.",
)
class _(Plain):
    def split(self, x, n_heads):
        return x[:, None]

    def share(self, x):
        return x

    def scale(self):
        return 1 / math.sqrt(self.n_heads * self.d_head)


@wrong(
    "softmax_over_heads",
    "The softmax runs over the heads. It runs over the keys, in each head by itself.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) * self.scale()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return torch.softmax(scores, 1) @ v


@wrong(
    "softmax_over_queries",
    "The softmax runs over the queries. It runs over the keys, the last dimension.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) * self.scale()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return torch.softmax(scores, -2) @ v


@wrong(
    "same_weights_in_every_head",
    "The scores are averaged over the heads, so that all of them look at the same "
    "place. Each head has weights of its own.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) * self.scale()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return torch.softmax(scores.mean(1, keepdim=True), -1) @ v


@wrong(
    "kv_tiled",
    "The key and value heads come in turn, 0, 1, 0, 1, where neighbouring query heads "
    "must share: 0, 0, 1, 1. It hides where every head is its own and where one serves "
    "all.",
)
class _(Plain):
    def share(self, x):
        return x.repeat(1, self.n_heads // self.n_kv_heads, 1, 1)


@wrong(
    "only_keys_shared_right",
    "The keys are repeated for neighbouring query heads, the values in turn. A query "
    "head must take both from the same place.",
)
class _(Plain):
    def forward(self, x, mask=None, rotate=None):
        q, k, v = self.project(x)
        q = self.split(q, self.n_heads)
        k, v = self.split(k, self.n_kv_heads), self.split(v, self.n_kv_heads)
        if rotate is not None:
            q, k, v = self.turn(q, k, v, rotate)
        v = v.repeat(1, self.n_heads // self.n_kv_heads, 1, 1)
        return self.back(self.merge(self.look(q, self.share(k), v, mask)))


@wrong(
    "repeated_n_kv_heads_times",
    "Each head is repeated n_kv_heads times. It serves n_heads // n_kv_heads query "
    "heads, the size of a group; where nothing is shared, that is one.",
)
class _(Plain):
    def share(self, x):
        return shared_heads(x, self.n_kv_heads)


@wrong(
    "repeated_n_heads_times",
    "Each key and value head is repeated n_heads times. It serves the query heads of its "
    "group alone, n_heads // n_kv_heads of them; where nothing is shared, that is one.",
)
class _(Plain):
    def share(self, x):
        return shared_heads(x, self.n_heads)


@wrong(
    "kv_not_repeated",
    "The shared heads are not repeated, so their number does not match the queries'.",
)
class _(Plain):
    def share(self, x):
        return x


@wrong(
    "mask_dropped",
    "The mask does not reach attention: every query sees every key.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        return super().look(q, k, v, None)


@wrong(
    "mask_inverted",
    "The mask is read the other way round. Here True means “may look”; "
    "`nn.MultiheadAttention` means the opposite.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        return super().look(q, k, v, None if mask is None else ~mask)


@wrong(
    "mask_added_as_0_and_1",
    "The mask's True and False are added to the scores as 1 and 0. That hides nothing.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) * self.scale()
        if mask is not None:
            scores = scores + mask
        return torch.softmax(scores, -1) @ v


@wrong(
    "masked_after_the_softmax",
    "The mask sets weights to 0 after the softmax, so that the rest no longer sums to "
    "1. Masked scores must be left out of the softmax.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        weights = torch.softmax(q @ k.transpose(-2, -1) * self.scale(), -1)
        return (weights if mask is None else weights * mask) @ v


@wrong(
    "always_causal",
    "Later positions are hidden although no mask was given. Who calls it decides.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        seen = causal(q.shape[-2]).to(q.device)
        return super().look(q, k, v, seen if mask is None else mask & seen)


@wrong(
    "masks_tiled",
    "Heads and batch are one dimension, and the masks are repeated in the wrong order "
    "along it: a row gets another row's mask. It hides with one row, and where all "
    "masks are equal.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        if mask is not None and mask.dim() == 4 and mask.shape[1] == 1:
            full = mask.expand(q.shape[0], 1, q.shape[2], k.shape[2])
            tiled = full[:, 0].repeat(q.shape[1], 1, 1)  # 0 1 2 0 1 2 …
            mask = tiled.reshape(*q.shape[:2], *tiled.shape[1:])
        return super().look(q, k, v, mask)


@wrong(
    "one_mask_for_all_rows",
    "The first row's mask is used for the whole batch.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        if mask is not None and mask.dim() == 4:
            mask = mask[:1]
        return super().look(q, k, v, mask)


@wrong(
    "one_mask_for_all_heads",
    "The first head's mask is used for all heads.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        if mask is not None and mask.dim() > 2:
            mask = mask[..., :1, :, :]
        return super().look(q, k, v, mask)


@wrong(
    "padding_is_nan",
    "A query that may look at nothing gets NaN: exp(−inf)/0. It must get zeros, or one "
    "padded row spoils every gradient.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) * self.scale()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return torch.softmax(scores, -1) @ v


@wrong(
    "nan_in_the_gradient",
    "The result is right, but the gradient is NaN: the weights of a query that may look "
    "at nothing are NaN, and only the output is put in order. The values get their "
    "gradient through the weights, so overwrite those.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        if mask is None:
            return super().look(q, k, v, mask)
        scores = q @ k.transpose(-2, -1) * self.scale()
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
        return (weights @ v).nan_to_num(0.0)


@wrong(
    "mask_taken_for_a_truth_value",
    "`if mask` asks whether the whole tensor is true, which a tensor of several values "
    "does not know. Ask whether there is a mask: `if mask is not None`.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        return super().look(q, k, v, mask if mask else None)


@wrong(
    "padding_is_an_average",
    "A query that may look at nothing gets the average of all values, hidden ones "
    "included: the softmax of equal large negative scores is uniform. It must get "
    "zeros.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) * self.scale()
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return torch.softmax(scores, -1) @ v


@wrong("rotate_unused", "`rotate` is never called.")
class _(Plain):
    def turn(self, q, k, v, rotate):
        return q, k, v


@wrong(
    "only_queries_rotated",
    "Only the queries are rotated. The score must depend on the distance between query "
    "and key, so both are turned by their own position.",
)
class _(Plain):
    def turn(self, q, k, v, rotate):
        return rotate(q), k, v


@wrong(
    "only_keys_rotated",
    "Only the keys are rotated. The score must depend on the distance between query and "
    "key, so both are turned by their own position.",
)
class _(Plain):
    def turn(self, q, k, v, rotate):
        return q, rotate(k), v


@wrong(
    "values_rotated_too",
    "The values are rotated as well. Positions decide where a query looks; what is "
    "found there stays as it is.",
)
class _(Plain):
    def turn(self, q, k, v, rotate):
        return rotate(q), rotate(k), rotate(v)


@wrong(
    "rotated_before_the_split",
    "The queries and keys are rotated before they are split, as if all heads were one "
    "wide vector. Each head is rotated by itself.",
)
class _(Plain):
    def project_turned(self, x, rotate):
        q, k, v = self.project(x)
        return rotate(q), rotate(k), v

    def forward(self, x, mask=None, rotate=None):
        if rotate is None:
            return super().forward(x, mask)
        q, k, v = self.project_turned(x, rotate)
        q = self.split(q, self.n_heads)
        k, v = self.split(k, self.n_kv_heads), self.split(v, self.n_kv_heads)
        k, v = self.share(k), self.share(v)
        return self.back(self.merge(self.look(q, k, v, mask)))


@wrong(
    "rotated_before_the_transpose",
    "The queries and keys are rotated while they are still `(B, T, H, Dh)`. The "
    "rotation takes the second dimension from the end for the position, which is the "
    "head there.",
)
class _(Plain):
    def turn(self, q, k, v, rotate):
        q = rotate(q.transpose(1, 2)).transpose(1, 2)
        return q, rotate(k.transpose(1, 2)).transpose(1, 2), v


@wrong(
    "input_rotated",
    "The input is rotated instead of the queries and the keys, so the values are "
    "turned too, and all heads as one vector.",
)
class _(Plain):
    def forward(self, x, mask=None, rotate=None):
        return super().forward(x if rotate is None else rotate(x), mask)


@wrong(
    "remembers",
    "Keys and values of an earlier call are still there in the next one.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        before = getattr(self, "before", None)
        if before is not None and before[0].shape[0] == k.shape[0]:
            k = torch.cat([before[0], k], 2)
            v = torch.cat([before[1], v], 2)
            mask = None
        self.before = (k.detach(), v.detach())
        return super().look(q, k, v, mask)


@wrong(
    "mask_left_out_in_eval",
    "In eval() the mask is left out. It says who may look at whom in training and after "
    "it alike.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        return super().look(q, k, v, mask if self.training else None)


@wrong(
    "mask_of_the_first_call",
    "The mask of the first call is kept and used again. Every call brings its own.",
)
class _(Plain):
    kept = None

    def look(self, q, k, v, mask):
        self.kept = mask if self.kept is None else self.kept
        return super().look(q, k, v, self.kept)


@wrong(
    "dropout",
    "Some weights are dropped at random in training. This attention has no dropout.",
)
class _(Plain):
    def look(self, q, k, v, mask):
        return F.dropout(super().look(q, k, v, mask), 0.1, self.training)


@wrong(
    "residual_added",
    "The input is added to the result. The residual connection comes in lesson 06, "
    "outside of attention.",
)
class _(Plain):
    def forward(self, x, mask=None, rotate=None):
        return x + super().forward(x, mask, rotate)


@wrong(
    "detached",
    "The result is cut from the graph, so no weight is trained.",
)
class _(Plain):
    def merge(self, x):
        return side_by_side(x).detach()


@wrong(
    "indivisible_accepted",
    "A d_model that the heads cannot share evenly is rounded down without a word, and "
    "columns are lost.",
)
class _(Plain):
    def refuse(self, d_model, n_heads, n_kv_heads, d_head):
        if n_heads % n_kv_heads:
            raise ValueError(f"{n_heads} {n_kv_heads}")


@wrong(
    "uneven_groups_accepted",
    "Query heads that the key and value heads cannot share evenly are accepted. It "
    "would only fail later, at the first input, with a message about shapes.",
)
class _(Plain):
    def refuse(self, d_model, n_heads, n_kv_heads, d_head):
        if d_head is None and d_model % n_heads:
            raise ValueError(f"{d_model} {n_heads}")


@wrong(
    "given_d_head_refused",
    "A d_model that is not divisible is refused although `d_head` is given. With d_head "
    "given, d_model may be any number.",
)
class _(Plain):
    def refuse(self, d_model, n_heads, n_kv_heads, d_head):
        super().refuse(d_model, n_heads, n_kv_heads, None)


@wrong(
    "divided_the_wrong_way_round",
    "The number of key and value heads is tested for being a multiple of the query "
    "heads. It is the other way round: several query heads share one.",
)
class _(Plain):
    def refuse(self, d_model, n_heads, n_kv_heads, d_head):
        if d_head is None and d_model % n_heads:
            raise ValueError(f"{d_model} {n_heads}")
        if n_kv_heads % n_heads:
            raise ValueError(f"{n_heads} {n_kv_heads}")


@wrong(
    "zero_weights",
    "All weights start at zero. Then every score is 0, every value too, and no "
    "gradient leads away from there.",
)
class _(Plain):
    def make(self):
        super().make()
        for p in self.parameters():
            nn.init.zeros_(p)


@wrong(
    "equal_weights",
    "Layers start with one and the same matrix. Each needs random numbers of its own: "
    "with equal queries and keys, for one, a position looks mostly at itself.",
)
class _(Plain):
    def make(self):
        super().make()
        self.w_v.load_state_dict(self.w_k.state_dict())
        if self.n_heads == self.n_kv_heads:
            self.w_k.load_state_dict(self.w_q.state_dict())
            self.w_v.load_state_dict(self.w_q.state_dict())


@wrong(
    "asserted",
    "The numbers are tested by `assert`, which gives an AssertionError and disappears "
    "under `python -O`. A wrong argument is a ValueError.",
)
class _(Plain):
    def refuse(self, d_model, n_heads, n_kv_heads, d_head):
        assert d_head is not None or d_model % n_heads == 0, f"{d_model} {n_heads}"
        assert n_heads % n_kv_heads == 0, f"{n_heads} {n_kv_heads}"


# attention_parameters ------------------------------------------------------------------

parameters = Exercise("attention_parameters", lesson="multi_head")


def counted(d_model, n_heads, n_kv_heads, d_head):
    """Counted on real layers, without giving them memory."""
    layers = nn.ModuleList(
        nn.Linear(n_in, n_out, bias=False, device="meta")
        for n_in, n_out in (
            (d_model, n_heads * d_head),
            (d_model, n_kv_heads * d_head),
            (d_model, n_kv_heads * d_head),
            (n_heads * d_head, d_model),
        )
    )
    return sum(p.numel() for p in layers.parameters())


def right_count(answer, t, *shape):
    actual = t.call(answer, *shape)
    what = "the count for d_model {}, n_heads {}, n_kv_heads {}, d_head {}"
    t.equal(actual, counted(*shape), what.format(*shape))


@parameters.requires(
    "heads that fill d_model, every head with keys and values of its own",
    "Write down the shapes of the four matrices and add up their sizes.",
)
def _(answer, t):
    right_count(answer, t, 512, 8, 8, 64)
    right_count(answer, t, 12, 3, 3, 4)


@parameters.requires(
    "fewer key and value heads",
    "Which two of the four matrices become narrower?",
)
def _(answer, t):
    right_count(answer, t, 576, 9, 3, 64)
    right_count(answer, t, 4096, 32, 8, 128)
    right_count(answer, t, 48, 6, 1, 8)


@parameters.requires("a d_head that is not d_model / n_heads")
def _(answer, t):
    right_count(answer, t, 640, 4, 1, 256)
    right_count(answer, t, 10, 6, 2, 3)
    right_count(answer, t, 10, 3, 3, 7)


@parameters.requires(
    "the count is a Python integer",
    "`/` gives a float even where nothing remains.",
)
def _(answer, t):
    actual = t.call(answer, 48, 6, 2, 8)
    t.true(
        type(actual) is int,
        f"The result is of type {type(actual).__name__}, expected an int.",
    )


@parameters.fault(
    "float",
    "The count is a float. Weights are counted in whole numbers, and a division by `/` "
    "gives a float even where nothing remains.",
)
def _(d_model, n_heads, n_kv_heads, d_head):
    return float(counted(d_model, n_heads, n_kv_heads, d_head))


@parameters.fault(
    "tensor",
    "The count is a tensor. Four numbers came in and one goes out: no tensor is needed.",
)
def _(d_model, n_heads, n_kv_heads, d_head):
    return torch.tensor(counted(d_model, n_heads, n_kv_heads, d_head))


@parameters.fault(
    "four_squares",
    "4·d_model² counts four square matrices. They are square only if the heads fill "
    "d_model and share nothing.",
)
def _(d_model, n_heads, n_kv_heads, d_head):
    return 4 * d_model**2


@parameters.fault(
    "sharing_ignored",
    "Keys and values are counted with as many heads as the queries. Shared heads have "
    "fewer weights.",
)
def _(d_model, n_heads, n_kv_heads, d_head):
    return 4 * d_model * n_heads * d_head


@parameters.fault(
    "no_output_projection",
    "w_o is missing: the way back from the heads to d_model.",
)
def _(d_model, n_heads, n_kv_heads, d_head):
    return d_model * d_head * (n_heads + 2 * n_kv_heads)


@parameters.fault(
    "biases_counted",
    "Biases are counted. These layers have none.",
)
def _(d_model, n_heads, n_kv_heads, d_head):
    weights = 2 * d_model * d_head * (n_heads + n_kv_heads)
    return weights + n_heads * d_head + 2 * n_kv_heads * d_head + d_model


@parameters.fault(
    "keys_or_values_forgotten",
    "Keys and values are counted once. Each has a matrix of its own.",
)
def _(d_model, n_heads, n_kv_heads, d_head):
    return d_model * d_head * (2 * n_heads + n_kv_heads)


@parameters.fault(
    "only_keys_narrowed",
    "Only one of w_k and w_v is counted as narrower. Keys and values are shared alike.",
)
def _(d_model, n_heads, n_kv_heads, d_head):
    return d_model * d_head * (3 * n_heads + n_kv_heads)


@parameters.fault(
    "output_narrowed_too",
    "w_o is counted as narrower too. It takes in every query head, shared keys or not.",
)
def _(d_model, n_heads, n_kv_heads, d_head):
    return d_model * d_head * (n_heads + 3 * n_kv_heads)


@parameters.fault(
    "d_head_ignored",
    "d_head is taken to be d_model / n_heads. It is a number of its own.",
)
def _(d_model, n_heads, n_kv_heads, d_head):
    return 2 * d_model * (d_model // n_heads) * (n_heads + n_kv_heads)


@parameters.fault(
    "square_queries_and_output",
    "w_q and w_o are counted as d_model × d_model. They are square only if the heads "
    "fill d_model.",
)
def _(d_model, n_heads, n_kv_heads, d_head):
    return 2 * d_model**2 + 2 * d_model * n_kv_heads * d_head


@parameters.fault(
    "square_output",
    "w_o is counted as d_model × d_model. It leads from n_heads·d_head to d_model.",
)
def _(d_model, n_heads, n_kv_heads, d_head):
    return d_model * d_head * (n_heads + 2 * n_kv_heads) + d_model**2


@parameters.fault(
    "group_size_for_kv_heads",
    "The size of a group, n_heads // n_kv_heads, stands where the number of key and "
    "value heads should.",
)
def _(d_model, n_heads, n_kv_heads, d_head):
    return 2 * d_model * d_head * (n_heads + n_heads // n_kv_heads)


@parameters.fault(
    "one_head_only",
    "A single head's matrices are counted; they are repeated for each head.",
)
def _(d_model, n_heads, n_kv_heads, d_head):
    return 4 * d_model * d_head


# Do the parts fit together? -----------------------------------------------------------

joint = Joint(
    "masks_and_heads",
    lesson="multi_head",
    parts={
        "attention": "attention",
        "causal_mask": "attention",
        "split_heads": "multi_head",
        "merge_heads": "multi_head",
        "repeat_kv": "multi_head",
        "MultiHeadAttention": "multi_head",
    },
)


def heads_of(t, parts, x, n_heads):
    return t.call(parts["split_heads"], x, n_heads)


def attend(t, parts, q, k, v, t_q, t_k):
    mask = t.call(parts["causal_mask"], t_q, t_k)
    return t.call(parts["attention"], q, k, v, mask)


@joint.requires(
    "causal_mask says to attention, in every head, what it means: True = may look",
    "Print the mask for 3 queries and 5 keys, and the weights beside it: row = query, "
    "column = key, and the queries are the last positions.",
)
def _(parts, t):
    q = probe(2, 3, 5, 4, seed=200)
    k, v = probe(2, 3, 5, 4, seed=201), probe(2, 3, 5, 6, seed=202)
    actual = attend(t, parts, q, k, v, 5, 5)
    expected = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True
    )
    t.close(actual, expected, "heads of 5 queries and 5 keys", like=q)
    actual = attend(t, parts, q[:, :, 2:], k, v, 3, 5)
    t.close(actual, expected[:, :, 2:], "the last 3 of these queries", like=q)


@joint.requires(
    "split_heads gives the layout that attention reads and merge_heads undoes",
    "Split a stream whose values you can tell apart, look at the shape that attention "
    "gets, merge, and compare with the stream.",
)
def _(parts, t):
    stream = probe(2, 5, 12, seed=203)
    split_up = heads_of(t, parts, stream, 3)
    merged = t.call(parts["merge_heads"], split_up)
    t.close(merged, stream, "a stream split and merged again", like=stream)
    q, k, v = (probe(2, 5, 12, seed=s) for s in (204, 205, 206))
    heads = [heads_of(t, parts, each, 3) for each in (q, k, v)]
    actual = t.call(parts["merge_heads"], t.call(parts["attention"], *heads))
    each = [slices_of_heads(x.double(), 3) for x in (q, k, v)]
    expected = side_by_side(F.scaled_dot_product_attention(*each))
    t.close(actual, expected, "heads split, looked up and merged", like=q)


@joint.requires(
    "repeat_kv gives each query head of split_heads the key and value head it shares",
    "Query heads 0 and 1 share head 0, query heads 2 and 3 share head 1.",
)
def _(parts, t):
    q, k, v = probe(2, 5, 12, seed=207), probe(2, 5, 6, seed=208), probe(2, 5, 6)
    heads = [heads_of(t, parts, each, n) for each, n in ((q, 4), (k, 2), (v, 2))]
    shared = [t.call(parts["repeat_kv"], each, 2) for each in heads[1:]]
    actual = attend(t, parts, heads[0], *shared, 5, 5)
    each = [slices_of_heads(x.double(), n) for x, n in ((q, 4), (k, 2), (v, 2))]
    expected = F.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True)
    t.close(actual, expected, "4 query heads on 2 key and value heads", like=q)


@joint.requires(
    "MultiHeadAttention does with causal_mask what these parts do one by one",
    "All parts are right one by one, and put together they differ from your module. "
    "Has one of them been edited since the module was checked? Run its cells again.",
)
def _(parts, t):
    weights = weights_for(10, 4, 2, 3, seed=210)
    module = loaded(parts["MultiHeadAttention"], t, weights, 10, 4, 2, 3)
    x = probe(2, 5, 10, seed=211)
    mask = t.call(parts["causal_mask"], 5)
    actual = t.call(module, x, mask)
    w_q, w_k, w_v, w_o = weights
    q = heads_of(t, parts, x @ w_q.T, 4)
    k, v = heads_of(t, parts, x @ w_k.T, 2), heads_of(t, parts, x @ w_v.T, 2)
    k, v = t.call(parts["repeat_kv"], k, 2), t.call(parts["repeat_kv"], v, 2)
    found = t.call(parts["attention"], q, k, v, mask)
    by_hand = t.call(parts["merge_heads"], found) @ w_o.T
    t.close(actual, by_hand, "the module against its parts", like=x)
    expected = head_by_head(x.double(), weights, 4, 2, causal(5))
    t.close(actual, expected, "the module under causal_mask", like=x)


@joint.requires(
    "a rotation reaches the queries and keys of each head after the split",
    "What does `rotate` get: `(B, T, width)`, or one vector of d_head for each head?",
)
def _(parts, t):
    weights = weights_for(10, 4, 2, 4, seed=220)
    module = loaded(parts["MultiHeadAttention"], t, weights, 10, 4, 2, 4)
    x = probe(2, 5, 10, seed=221)
    mask = t.call(parts["causal_mask"], 5)
    actual = t.call(module, x, mask, turn)
    expected = head_by_head(x.double(), weights, 4, 2, causal(5), turn)
    t.close(actual, expected, "the module with a rotation", like=x)


def careful_attention(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def careful_mask(t_q, t_k=None):
    t_k = t_q if t_k is None else t_k
    return torch.ones(t_q, t_k, dtype=torch.bool).tril(t_k - t_q)


def module_with(base):
    return {
        "MultiHeadAttention": next(
            f.implementation for f in multi_head.faults if f.name == base
        )
    }


joint.fault(
    "mask_means_the_opposite",
    "causal_mask marks with True what is hidden, and attention reads True as “may "
    "look”. Each meaning is in use somewhere; in this course both say “may look”.",
    {"causal_mask": lambda t_q, t_k=None: ~careful_mask(t_q, t_k)},
)
joint.fault(
    "attention_reads_the_opposite",
    "attention hides the keys where the mask is True, and causal_mask marks with True "
    "what may be seen.",
    {
        "attention": lambda q, k, v, mask=None: careful_attention(
            q, k, v, None if mask is None else ~mask
        )
    },
)
joint.fault(
    "mask_is_added",
    "attention adds its mask to the scores, and causal_mask gives True and False, which "
    "count as 1 and 0 there and hide nothing.",
    {
        "attention": lambda q, k, v, mask=None: careful_attention(
            q, k, v, None if mask is None else mask.to(q.dtype)
        )
    },
)
joint.fault(
    "queries_are_the_first_positions",
    "causal_mask takes the queries for the first positions, and these queries are the "
    "last: with more keys than queries it must be aligned at the bottom right.",
    {
        "causal_mask": lambda t_q, t_k=None: torch.ones(
            t_q, t_k or t_q, dtype=torch.bool
        ).tril()
    },
)
joint.fault(
    "rows_are_keys",
    "causal_mask has the keys down and the queries across, and attention takes rows for "
    "queries.",
    {"causal_mask": lambda t_q, t_k=None: careful_mask(t_q, t_k).T.contiguous()},
)
joint.fault(
    "heads_behind_time",
    "split_heads and merge_heads agree on `(B, T, H, Dh)`, and attention reads the last "
    "two dimensions: it mixes the heads of one token, and no token sees another.",
    {
        "split_heads": lambda x, n_heads: x.unflatten(-1, (n_heads, -1)),
        "merge_heads": lambda x: x.flatten(2),
    },
)
joint.fault(
    "reshaped_both_ways",
    "split_heads and merge_heads agree with each other on reading memory straight in "
    "the final shape, so one undoes the other. But a head gets some tokens whole then, "
    "instead of a part of each.",
    {
        "split_heads": lambda x, n_heads: x.reshape(len(x), n_heads, x.shape[1], -1),
        "merge_heads": lambda x: x.reshape(len(x), x.shape[2], -1),
    },
)
joint.fault(
    "columns_interleaved",
    "split_heads and merge_heads agree with each other on dealing out the columns like "
    "cards, so one undoes the other. But weights hold each head in neighbouring rows.",
    {
        "split_heads": lambda x, n_heads: x.unflatten(-1, (-1, n_heads)).permute(
            0, 3, 1, 2
        ),
        "merge_heads": lambda x: x.permute(0, 2, 3, 1).flatten(2),
    },
)
joint.fault(
    "merge_does_not_undo_split",
    "split_heads puts the heads before the time, and merge_heads reads the memory as if "
    "they stood behind it. A stream that is split and merged must come back.",
    {"merge_heads": lambda x: x.reshape(x.shape[0], x.shape[2], -1)},
)
joint.fault(
    "heads_shared_in_turn",
    "repeat_kv hands out the shared heads in turn, 0, 1, 0, 1, and the queries from "
    "split_heads expect them for neighbours, 0, 0, 1, 1.",
    {"repeat_kv": lambda x, group_size: x.repeat(1, group_size, 1, 1)},
)
joint.fault(
    "module_reads_the_mask_the_other_way",
    "MultiHeadAttention turns the mask round on its way to attention: causal_mask "
    "already says “may look”.",
    module_with("mask_inverted"),
)
joint.fault(
    "module_drops_the_mask",
    "MultiHeadAttention gets causal_mask's mask and does not hand it to attention.",
    module_with("mask_dropped"),
)
joint.fault(
    "module_shares_in_turn",
    "MultiHeadAttention does not share heads as repeat_kv does: neighbours share.",
    module_with("kv_tiled"),
)
joint.fault(
    "rotated_before_the_split",
    "MultiHeadAttention rotates before it splits, so that all heads are turned as one "
    "wide vector. A rotation is made for d_head columns.",
    module_with("rotated_before_the_split"),
)
joint.fault(
    "rotated_before_the_transpose",
    "MultiHeadAttention rotates while the time does not yet stand next to d_head, so "
    "that the head's number is taken for the position.",
    module_with("rotated_before_the_transpose"),
)
joint.fault(
    "values_rotated_too",
    "MultiHeadAttention rotates the values too. They are what is looked up.",
    module_with("values_rotated_too"),
)
