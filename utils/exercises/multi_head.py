"""Lesson 03: heads, their masks, shared keys and values, and what they cost."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from utils.check.errors import Crashed
from utils.check.exercise import Exercise, IntegrationCheck
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

split_heads = Exercise("split_heads", lesson="multi_head")


@split_heads.requires(
    "one row of one batch: head h gets the h-th run of neighbouring columns",
    "Write the columns 0 to 5 into one row and split it into 2 heads by hand: which "
    "columns belong to head 0?",
)
def _(answer, case):
    row = torch.arange(6.0).reshape(1, 1, 6)
    case.agrees(answer, slices_of_heads, row, 2)


@split_heads.requires(
    "several rows and batches keep their own values, heads before time",
    "First cut the last dimension in two, then exchange dimensions. A view cannot "
    "exchange dimensions: it only reads the same memory in another shape.",
)
def _(answer, case):
    case.agrees(answer, slices_of_heads, probe(2, 5, 12), 3)
    case.agrees(answer, slices_of_heads, probe(4, 3, 10, seed=1), n_heads=5)
    case.agrees(answer, slices_of_heads, probe(3, 4, 8, seed=2), 2)


@split_heads.requires("one head, heads of one column and a single position work too")
def _(answer, case):
    case.agrees(answer, slices_of_heads, probe(2, 5, 7, seed=3), 1)
    case.agrees(answer, slices_of_heads, probe(2, 5, 4, seed=4), 4)
    case.agrees(answer, slices_of_heads, probe(3, 1, 6, seed=5), 2)


@split_heads.requires("memory that is not contiguous and other dtypes work too")
def _(answer, case):
    case.agrees(answer, slices_of_heads, strided(probe(2, 5, 6, seed=6)), 3)
    case.agrees(answer, slices_of_heads, probe(5, 2, 6, seed=7).transpose(0, 1), 3)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        case.agrees(answer, slices_of_heads, probe(2, 3, 8, seed=8, dtype=dtype), 4)


@split_heads.requires(
    "a width that is not divisible is a ValueError that names both numbers",
    "Compare before you reshape, and say in the message which width and how many heads.",
)
def _(answer, case):
    for width, n_heads in ((10, 3), (4, 8)):
        case.raises(
            ValueError,
            answer,
            probe(2, 5, width),
            n_heads,
            mentions=(width, n_heads),
            because=f"a width of {width} and {n_heads} heads",
        )


@split_heads.requires("gradients flow back")
def _(answer, case):
    case.gradients_agree(answer, slices_of_heads, probe(2, 5, 12, seed=9), 3)


@split_heads.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, probe(2, 5, 12), 3)


# merge_heads ---------------------------------------------------------------------------

merge_heads = Exercise("merge_heads", lesson="multi_head")


@merge_heads.requires("one position: the heads lie side by side, head 0 first")
def _(answer, case):
    case.agrees(answer, side_by_side, torch.arange(6.0).reshape(1, 2, 1, 3))


@merge_heads.requires(
    "several positions and batches keep their own values",
    "Dimensions can be joined only when they are neighbours and in the right order: "
    "which two must be neighbours here?",
)
def _(answer, case):
    case.agrees(answer, side_by_side, probe(2, 3, 5, 4))
    case.agrees(answer, side_by_side, probe(3, 2, 4, 5, seed=1))


@merge_heads.requires(
    "memory in any order works, that of split heads included",
    "`view` refuses dimensions that do not lie side by side in memory. Is there "
    "something that copies where it has to?",
)
def _(answer, case):
    stream = probe(2, 5, 12, seed=2)
    case.agrees(answer, side_by_side, stream.unflatten(-1, (3, 4)).transpose(1, 2))
    case.agrees(answer, side_by_side, strided(probe(2, 3, 5, 4, seed=3)))
    case.agrees(answer, side_by_side, probe(2, 3, 4, 5, seed=4).transpose(2, 3))


@merge_heads.requires("one head, heads of one column and other dtypes work too")
def _(answer, case):
    case.agrees(answer, side_by_side, probe(2, 1, 5, 4, seed=5))
    case.agrees(answer, side_by_side, probe(2, 3, 5, 1, seed=6))
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        case.agrees(answer, side_by_side, probe(2, 3, 5, 4, seed=7, dtype=dtype))


@merge_heads.requires("gradients flow back")
def _(answer, case):
    case.gradients_agree(answer, side_by_side, probe(2, 3, 5, 4, seed=8))


@merge_heads.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, probe(2, 3, 5, 4))


# repeat_kv -----------------------------------------------------------------------------

repeat_kv = Exercise("repeat_kv", lesson="multi_head")


def shared_heads(x, group_size):
    """Query head h gets key or value head h // group_size."""
    heads = [x[:, h // group_size] for h in range(x.shape[1] * group_size)]
    return torch.stack(heads, dim=1)


@repeat_kv.requires(
    "neighbouring query heads share: head h is head h // group_size",
    "Write down for 2 heads and a group of 3 which head each of the 6 is.",
)
def _(answer, case):
    case.agrees(answer, shared_heads, torch.arange(2.0).reshape(1, 2, 1, 1), 3)
    case.agrees(answer, shared_heads, probe(2, 3, 5, 4), 2)
    case.agrees(answer, shared_heads, probe(3, 2, 4, 5, seed=1), group_size=4)


@repeat_kv.requires("a group of one changes nothing, and one head can serve all")
def _(answer, case):
    case.agrees(answer, shared_heads, probe(2, 3, 5, 4, seed=2), 1)
    case.agrees(answer, shared_heads, probe(2, 1, 5, 4, seed=3), 6)


@repeat_kv.requires("memory that is not contiguous and other dtypes work too")
def _(answer, case):
    stream = probe(2, 5, 12, seed=4)
    case.agrees(answer, shared_heads, stream.unflatten(-1, (3, 4)).transpose(1, 2), 2)
    case.agrees(answer, shared_heads, strided(probe(2, 3, 5, 4, seed=5)), 2)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        case.agrees(answer, shared_heads, probe(2, 3, 5, 4, seed=6, dtype=dtype), 3)


@repeat_kv.requires("gradients of all that share a head add up in it")
def _(answer, case):
    case.gradients_agree(answer, shared_heads, probe(2, 3, 5, 4, seed=7), 2)


@repeat_kv.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, probe(2, 3, 5, 4), 2)


# MultiHeadAttention -------------------------------------------------------------------

MultiHeadAttention = Exercise("MultiHeadAttention", lesson="multi_head")


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


def loaded(answer, case, weights, *args, **kwargs):
    """A module with these weights, which are all that it has."""
    module = case.call(answer, *args, **kwargs)
    case.true(
        isinstance(module, nn.Module) and callable(module),
        "Calling the class must give a module.",
    )
    case.load(module, **dict(zip(("w_q", "w_k", "w_v", "w_o"), weights, strict=True)))
    case.parameter_count(module, sum(w.numel() for w in weights))
    return module


def accepted(answer, case, why, *args, **kwargs):
    """These numbers are no error."""
    try:
        case.call(answer, *args, **kwargs)
    except Crashed as crash:
        if not isinstance(crash.error, (ValueError, AssertionError)):
            raise
        case.recording.pop()  # in which words it is refused does not matter
        case.true(False, f"It refuses {why}: “{crash.error}”.")


@MultiHeadAttention.requires(
    "it has the weights w_q, w_k, w_v and w_o without bias, of the right shapes",
    "`super().__init__()` first. Queries are n_heads·d_head wide, keys and values "
    "n_kv_heads·d_head; w_o leads back to d_model.",
)
def _(answer, case):
    loaded(answer, case, weights_for(12, 3, 3, 4), 12, 3)
    given = "a d_model of 10 with 4 heads although d_head is given"
    accepted(answer, case, given, 10, 4, d_head=3)
    shared = "4 query heads on 2 key and value heads"
    accepted(answer, case, shared, 8, 4, n_kv_heads=2)
    loaded(answer, case, weights_for(10, 4, 2, 3), 10, 4, 2, 3)
    loaded(answer, case, weights_for(10, 3, 3, 4), 10, 3, d_head=4)
    loaded(answer, case, weights_for(12, 6, 2, 2), d_model=12, n_heads=6, n_kv_heads=2)


@MultiHeadAttention.requires(
    "one head agrees with torch.nn.MultiheadAttention",
    "With one head nothing is split. Check the order: project, look, project back. Only "
    "the scores are divided, by the root of d_head.",
)
def _(answer, case):
    weights = weights_for(6, 1, 1, 6)
    module = loaded(answer, case, weights, 6, 1)
    case.agrees(module, lambda x: torch_module(x, weights, 1), probe(2, 5, 6))


@MultiHeadAttention.requires(
    "several heads agree with it too",
    "If one head is right and several are not, look at the split, the merge, and the "
    "divisor of the scores.",
)
def _(answer, case):
    weights = weights_for(12, 3, 3, 4, seed=10)
    module = loaded(answer, case, weights, 12, 3)
    case.agrees(module, lambda x: torch_module(x, weights, 3), probe(2, 5, 12, seed=1))
    case.agrees(module, lambda x: torch_module(x, weights, 3), probe(4, 1, 12, seed=2))


@MultiHeadAttention.requires("d_head need not be d_model / n_heads")
def _(answer, case):
    weights = weights_for(10, 3, 3, 4, seed=20)
    module = loaded(answer, case, weights, 10, 3, d_head=4)
    case.agrees(
        module, lambda x: head_by_head(x, weights, 3, 3), probe(2, 5, 10, seed=2)
    )


@MultiHeadAttention.requires(
    "neighbouring query heads share key and value heads, as with enable_gqa",
    "`repeat_kv` wants the size of a group, and comes before the scores.",
)
def _(answer, case):
    for n_heads, n_kv_heads, d_head in ((6, 2, 4), (4, 1, 3), (4, 2, 5), (6, 3, 2)):
        weights = weights_for(10, n_heads, n_kv_heads, d_head, seed=30)
        module = loaded(
            answer, case, weights, 10, n_heads, n_kv_heads=n_kv_heads, d_head=d_head
        )

        def oracle(x, weights=weights, n_heads=n_heads, n_kv_heads=n_kv_heads):
            return torch_grouped(x, weights, n_heads, n_kv_heads)

        case.agrees(module, oracle, probe(2, 5, 10, seed=3))


@MultiHeadAttention.requires(
    "a mask (T, T) hides keys: True = may look",
    "Hand the mask on to attention, unchanged.",
)
def _(answer, case):
    weights = weights_for(12, 3, 3, 4, seed=40)
    module = loaded(answer, case, weights, 12, 3)

    def oracle(x, mask):
        return torch_module(x, weights, 3, mask)

    case.agrees(module, oracle, probe(2, 5, 12, seed=4), causal(5))
    window = causal(6) & ~causal(6).tril(-3)
    case.agrees(module, oracle, probe(3, 6, 12, seed=5), mask=window)


@MultiHeadAttention.requires(
    "a mask of its own for each row of the batch, for each head, or for both",
    "The mask must reach scores of shape (B, H, T, T). If heads and batch are one "
    "dimension in your code, in what order do they stand?",
)
def _(answer, case):
    weights = weights_for(12, 4, 2, 3, seed=50)
    module = loaded(answer, case, weights, 12, 4, 2)

    def oracle(x, mask):
        return head_by_head(x, weights, 4, 2, mask)

    x = probe(3, 5, 12, seed=6)
    lengths = torch.tensor([5, 2, 3])
    padding = (torch.arange(5) < lengths[:, None])[:, None, None, :]  # B 1 1 T
    own = torch.stack([causal(5).roll(h, -1) | torch.eye(5).bool() for h in range(4)])
    own[:, :, 0] = True  # with padding too, every query sees something
    case.agrees(module, oracle, x, padding)
    case.agrees(module, oracle, x, padding & causal(5))
    case.agrees(module, oracle, x, mask=own)
    case.agrees(module, oracle, x, padding & own)


@MultiHeadAttention.requires("a row of nothing but padding gives zeros")
def _(answer, case):
    weights = weights_for(8, 2, 2, 4, seed=60)
    module = loaded(answer, case, weights, 8, 2)
    lengths = torch.tensor([0, 4, 2])
    padding = (torch.arange(4) < lengths[:, None])[:, None, None, :]
    case.agrees(
        module,
        lambda x, mask: head_by_head(x, weights, 2, 2, mask),
        probe(3, 4, 8, seed=7),
        padding,
    )


@MultiHeadAttention.requires(
    "rotate turns the queries and the keys of each head, and nothing else",
    "It wants (B, heads, T, d_head), so the split comes first; the values are what is "
    "looked up, and stay as they are.",
)
def _(answer, case):
    weights = weights_for(10, 4, 2, 4, seed=70)
    module = loaded(answer, case, weights, 10, 4, 2, 4)

    def oracle(x, mask=None, rotate=None):
        return head_by_head(x, weights, 4, 2, mask, rotate)

    case.agrees(module, oracle, probe(2, 5, 10, seed=8), rotate=turn)
    case.agrees(module, oracle, probe(2, 5, 10, seed=9), causal(5), turn)
    case.agrees(module, oracle, probe(2, 5, 10, seed=8), rotate=turn_by_row)


@MultiHeadAttention.requires(
    "every call stands for itself, in training and in eval()",
    "Keep nothing from one call to the next, and drop nothing at random.",
)
def _(answer, case):
    weights = weights_for(12, 3, 3, 4, seed=80)
    module = loaded(answer, case, weights, 12, 3)

    def oracle(x, mask=None, rotate=None):
        return head_by_head(x, weights, 3, 3, mask, rotate)

    case.agrees(module, oracle, probe(2, 5, 12, seed=10))
    case.agrees(module, oracle, probe(3, 4, 12, seed=11))
    case.agrees(module.eval(), oracle, probe(2, 5, 12, seed=10))
    case.agrees(module, oracle, probe(2, 5, 12, seed=10), causal(5))
    case.agrees(module, oracle, probe(2, 5, 12, seed=10), rotate=turn)


@MultiHeadAttention.requires(
    "float64, half precision and memory that is not contiguous work"
)
def _(answer, case):
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        weights = tuple(w.to(dtype) for w in weights_for(12, 4, 2, 3, seed=90))
        module = loaded(answer, case, weights, 12, 4, 2).to(dtype)
        case.load(
            module, w_q=weights[0], w_k=weights[1], w_v=weights[2], w_o=weights[3]
        )

        def oracle(x, mask, weights=weights):
            return head_by_head(x, weights, 4, 2, mask)

        case.agrees(module, oracle, probe(2, 5, 12, seed=12, dtype=dtype), causal(5))
    weights = weights_for(12, 4, 2, 3, seed=90)
    module = loaded(answer, case, weights, 12, 4, 2)
    swapped = probe(5, 2, 12, seed=13).transpose(0, 1)
    case.agrees(module, lambda x: head_by_head(x, weights, 4, 2), swapped)
    case.agrees(module, lambda x: head_by_head(x, weights, 4, 2), strided(swapped))


@MultiHeadAttention.requires(
    "gradients reach the input and every weight, and stay finite where all is hidden",
    "Which weight plays no part in the result, or is cut off from it? A NaN that is "
    "replaced after the average of the values still reaches them through the gradient.",
)
def _(answer, case):
    weights = weights_for(10, 4, 2, 3, seed=100)
    module = loaded(answer, case, weights, 10, 4, 2, 3)
    x, mask = probe(2, 5, 10, seed=14), causal(5)
    case.gradients_agree(
        module, lambda x, m: head_by_head(x, weights, 4, 2, m), x, mask
    )
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

    for name, actual, wanted in zip(
        names, case.call(gradients, x), expected, strict=True
    ):
        case.close(actual, wanted, f"the gradient of `{name}`")
    blind = torch.arange(5) < torch.tensor([0, 3]).view(2, 1, 1, 1)  # B 1 1 T
    case.gradients_agree(
        module, lambda x, m: head_by_head(x, weights, 4, 2, m), x, blind
    )


@MultiHeadAttention.requires(
    "numbers that do not fit are a ValueError that names both",
    "Two things can be refused: a d_model that the heads cannot share evenly, unless "
    "d_head is given, and query heads that the KV heads cannot share evenly.",
)
def _(answer, case):
    case.raises(
        ValueError,
        answer,
        14,
        4,
        mentions=(14, 4),
        because="d_model 14 and 4 heads without d_head",
    )
    case.raises(
        ValueError,
        answer,
        12,
        6,
        n_kv_heads=4,
        mentions=(6, 4),
        because="6 heads and 4 KV heads",
    )
    case.raises(
        ValueError,
        answer,
        16,
        2,
        n_kv_heads=8,
        mentions=(2, 8),
        because="2 heads and 8 KV heads",
    )


@MultiHeadAttention.requires("it creates nothing on another device")
def _(answer, case):
    module = loaded(answer, case, weights_for(10, 4, 2, 4), 10, 4, 2, 4)

    def run(module, x, mask=None):
        return module(x, mask, turn)

    case.any_device(run, module, probe(2, 5, 10), causal(5))
    case.any_device(run, module, probe(2, 5, 10))


@MultiHeadAttention.requires(
    "a new module starts with random weights, different in each layer",
    "`nn.Linear` does so by itself.",
)
def _(answer, case):
    module = case.call(answer, 12, 3)
    names = ("w_q", "w_k", "w_v")
    found = dict(module.named_parameters())
    new = [found.get(f"{n}.weight", found.get(n)).detach() for n in names]
    for name, weight in zip(names, new, strict=True):
        case.true(
            weight.isfinite().all() and weight.std() > 1e-3,
            f"The weights of `{name}` all start with the same value, so they would "
            "learn the same.",
        )
    different = all(not torch.equal(a, b) for i, a in enumerate(new) for b in new[:i])
    case.true(different, "Two of w_q, w_k and w_v start with the same weights.")


# attention_parameters ------------------------------------------------------------------

attention_parameters = Exercise("attention_parameters", lesson="multi_head")


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


def right_count(answer, case, *shape):
    actual = case.call(answer, *shape)
    what = "the count for d_model {}, n_heads {}, n_kv_heads {}, d_head {}"
    case.equal(actual, counted(*shape), what.format(*shape))


@attention_parameters.requires(
    "heads that fill d_model, every head with keys and values of its own",
    "Write down the shapes of the four matrices and add up their sizes.",
)
def _(answer, case):
    right_count(answer, case, 512, 8, 8, 64)
    right_count(answer, case, 12, 3, 3, 4)


@attention_parameters.requires(
    "fewer key and value heads",
    "Which two of the four matrices become narrower?",
)
def _(answer, case):
    right_count(answer, case, 576, 9, 3, 64)
    right_count(answer, case, 4096, 32, 8, 128)
    right_count(answer, case, 48, 6, 1, 8)


@attention_parameters.requires("a d_head that is not d_model / n_heads")
def _(answer, case):
    right_count(answer, case, 640, 4, 1, 256)
    right_count(answer, case, 10, 6, 2, 3)
    right_count(answer, case, 10, 3, 3, 7)


@attention_parameters.requires(
    "the count is a Python integer",
    "`/` gives a float even where nothing remains.",
)
def _(answer, case):
    actual = case.call(answer, 48, 6, 2, 8)
    case.true(
        type(actual) is int,
        f"The result is of type {type(actual).__name__}, expected an int.",
    )


# Do the parts fit together? -----------------------------------------------------------

masks_and_heads = IntegrationCheck(
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


def heads_of(case, parts, x, n_heads):
    return case.call(parts["split_heads"], x, n_heads)


def attend(case, parts, q, k, v, t_q, t_k):
    mask = case.call(parts["causal_mask"], t_q, t_k)
    return case.call(parts["attention"], q, k, v, mask)


@masks_and_heads.requires(
    "causal_mask says to attention, in every head, what it means: True = may look",
    "Print the mask for 3 queries and 5 keys, and the weights beside it: row = query, "
    "column = key, and the queries are the last positions.",
)
def _(parts, case):
    q = probe(2, 3, 5, 4, seed=200)
    k, v = probe(2, 3, 5, 4, seed=201), probe(2, 3, 5, 6, seed=202)
    actual = attend(case, parts, q, k, v, 5, 5)
    expected = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True
    )
    case.close(actual, expected, "heads of 5 queries and 5 keys", like=q)
    actual = attend(case, parts, q[:, :, 2:], k, v, 3, 5)
    case.close(actual, expected[:, :, 2:], "the last 3 of these queries", like=q)


@masks_and_heads.requires(
    "split_heads gives the layout that attention reads and merge_heads undoes",
    "Split a stream whose values you can tell apart, look at the shape that attention "
    "gets, merge, and compare with the stream.",
)
def _(parts, case):
    stream = probe(2, 5, 12, seed=203)
    split_up = heads_of(case, parts, stream, 3)
    merged = case.call(parts["merge_heads"], split_up)
    case.close(merged, stream, "a stream split and merged again", like=stream)
    q, k, v = (probe(2, 5, 12, seed=s) for s in (204, 205, 206))
    heads = [heads_of(case, parts, each, 3) for each in (q, k, v)]
    actual = case.call(parts["merge_heads"], case.call(parts["attention"], *heads))
    each = [slices_of_heads(x.double(), 3) for x in (q, k, v)]
    expected = side_by_side(F.scaled_dot_product_attention(*each))
    case.close(actual, expected, "heads split, looked up and merged", like=q)


@masks_and_heads.requires(
    "repeat_kv gives each query head of split_heads the key and value head it shares",
    "Query heads 0 and 1 share head 0, query heads 2 and 3 share head 1.",
)
def _(parts, case):
    q, k, v = probe(2, 5, 12, seed=207), probe(2, 5, 6, seed=208), probe(2, 5, 6)
    heads = [heads_of(case, parts, each, n) for each, n in ((q, 4), (k, 2), (v, 2))]
    shared = [case.call(parts["repeat_kv"], each, 2) for each in heads[1:]]
    actual = attend(case, parts, heads[0], *shared, 5, 5)
    each = [slices_of_heads(x.double(), n) for x, n in ((q, 4), (k, 2), (v, 2))]
    expected = F.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True)
    case.close(actual, expected, "4 query heads on 2 key and value heads", like=q)


@masks_and_heads.requires(
    "MultiHeadAttention does with causal_mask what these parts do one by one",
    "All parts are right one by one, and put together they differ from your module. "
    "Has one of them been edited since the module was checked? Run its cells again.",
)
def _(parts, case):
    weights = weights_for(10, 4, 2, 3, seed=210)
    module = loaded(parts["MultiHeadAttention"], case, weights, 10, 4, 2, 3)
    x = probe(2, 5, 10, seed=211)
    mask = case.call(parts["causal_mask"], 5)
    actual = case.call(module, x, mask)
    w_q, w_k, w_v, w_o = weights
    q = heads_of(case, parts, x @ w_q.T, 4)
    k, v = heads_of(case, parts, x @ w_k.T, 2), heads_of(case, parts, x @ w_v.T, 2)
    k, v = case.call(parts["repeat_kv"], k, 2), case.call(parts["repeat_kv"], v, 2)
    found = case.call(parts["attention"], q, k, v, mask)
    by_hand = case.call(parts["merge_heads"], found) @ w_o.T
    case.close(actual, by_hand, "the module against its parts", like=x)
    expected = head_by_head(x.double(), weights, 4, 2, causal(5))
    case.close(actual, expected, "the module under causal_mask", like=x)


@masks_and_heads.requires(
    "a rotation reaches the queries and keys of each head after the split",
    "What does `rotate` get: `(B, T, width)`, or one vector of d_head for each head?",
)
def _(parts, case):
    weights = weights_for(10, 4, 2, 4, seed=220)
    module = loaded(parts["MultiHeadAttention"], case, weights, 10, 4, 2, 4)
    x = probe(2, 5, 10, seed=221)
    mask = case.call(parts["causal_mask"], 5)
    actual = case.call(module, x, mask, turn)
    expected = head_by_head(x.double(), weights, 4, 2, causal(5), turn)
    case.close(actual, expected, "the module with a rotation", like=x)
