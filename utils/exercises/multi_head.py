"""Lesson 03: heads, their masks, shared keys and values, and what they cost."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from utils.check.exercise import Exercise, IntegrationCheck
from utils.probe import probe, strided

split_heads = Exercise("split_heads", lesson="multi_head")
merge_heads = Exercise("merge_heads", lesson="multi_head")
repeat_kv = Exercise("repeat_kv", lesson="multi_head")
MultiHeadAttention = Exercise("MultiHeadAttention", lesson="multi_head")
attention_parameters = Exercise("attention_parameters", lesson="multi_head")
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


# What is right, by slices and loops ---------------------------------------------------


def slices(x, n_heads):
    """Each head is one slice of neighbouring columns."""
    return torch.stack(x.split(x.shape[-1] // n_heads, dim=-1), dim=1)


def side_by_side(x):
    return torch.cat([x[:, h] for h in range(x.shape[1])], dim=-1)


def shared_heads(x, group_size):
    """Query head h gets key or value head h // group_size."""
    heads = [x[:, h // group_size] for h in range(x.shape[1] * group_size)]
    return torch.stack(heads, dim=1)


def head_by_head(x, weights, n_heads, n_kv_heads, mask=None, rotate=None):
    """Multi-head attention, one head after the other."""
    w_q, w_k, w_v, w_o = weights
    q = slices(x @ w_q.T, n_heads)
    k, v = slices(x @ w_k.T, n_kv_heads), slices(x @ w_v.T, n_kv_heads)
    if rotate is not None:
        q, k = rotate(q), rotate(k)
    t = x.shape[1]
    may_look = torch.ones(t, t, dtype=torch.bool) if mask is None else mask
    may_look = may_look.expand(x.shape[0], n_heads, t, t)
    heads = []
    for h in range(n_heads):
        shared = h // (n_heads // n_kv_heads)
        scores = q[:, h] @ k[:, shared].transpose(1, 2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~may_look[:, h], -1e30)
        looked = torch.softmax(scores, -1).masked_fill(~may_look[:, h], 0)
        heads.append(looked @ v[:, shared])
    return torch.cat(heads, dim=-1) @ w_o.T


def torch_module(x, weights, n_heads, mask=None):
    """PyTorch's own module, whose boolean mask means the opposite of ours."""
    module = nn.MultiheadAttention(
        x.shape[-1], n_heads, bias=False, batch_first=True, dtype=torch.float64
    )
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat(weights[:3]))
        module.out_proj.weight.copy_(weights[3])
    hidden = None if mask is None else ~mask
    return module(x, x, x, attn_mask=hidden, need_weights=False)[0]


# Inputs -------------------------------------------------------------------------------

NAMES = ("w_q", "w_k", "w_v", "w_o")


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


def causal(t):
    return torch.ones(t, t, dtype=torch.bool).tril()


def padding(*lengths, t):
    """Each row of the batch has so many real tokens: `(B, 1, 1, t)`."""
    return torch.arange(t) < torch.tensor(lengths).view(-1, 1, 1, 1)


def turn(x):
    """Stands for a rotation: what it does depends on the position and the column."""
    angle = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None]
    return x * torch.cos(0.5 * angle) + x.roll(1, -1) * torch.sin(0.5 * angle)


def turn_by_row(x):
    """As `turn`, and each row of the batch has a size of its own."""
    size = torch.arange(1, len(x) + 1, device=x.device, dtype=x.dtype)
    return turn(x) * size.view(-1, *[1] * (x.dim() - 1))


# Functions of heads -------------------------------------------------------------------


def requires_any_memory(exercise, oracle, size, *args, hint=""):
    """What every function of one tensor and a number must do."""

    @exercise.requires(
        "memory that is not contiguous, float16, bfloat16 and float64 work too", hint
    )
    def _(answer, case):
        x = probe(*size, seed=6)
        for dim in range(len(size) - 1):
            in_another_order = x.transpose(dim, dim + 1).contiguous()
            case.agrees(answer, oracle, in_another_order.transpose(dim, dim + 1), *args)
        case.agrees(answer, oracle, strided(x), *args)
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            case.agrees(answer, oracle, x.to(dtype), *args)

    @exercise.requires("gradients flow back")
    def _(answer, case):
        case.gradients_agree(answer, oracle, probe(*size, seed=9), *args)

    @exercise.requires("it creates nothing on another device")
    def _(answer, case):
        case.any_device(answer, probe(*size), *args)


@split_heads.requires(
    "head h gets the h-th run of neighbouring columns, and heads stand before time",
    "Write the columns 0 to 5 into one row and split it into 2 heads by hand: which "
    "columns belong to head 0? Cut the last dimension in two, then exchange dimensions. "
    "A view cannot exchange dimensions: it only reads the same memory in another shape.",
)
def _(answer, case):
    case.agrees(answer, slices, probe(5, 6, 12), 3)
    case.agrees(answer, slices, probe(4, 3, 10, seed=1), n_heads=5)
    case.agrees(answer, slices, probe(3, 4, 8, seed=2), 2)


@split_heads.requires("one head, heads of one column and a single position work too")
def _(answer, case):
    case.agrees(answer, slices, probe(2, 5, 7, seed=3), 1)
    case.agrees(answer, slices, probe(2, 5, 4, seed=4), 4)
    case.agrees(answer, slices, probe(3, 1, 6, seed=5), 2)


@split_heads.requires(
    "a width that is not divisible is a ValueError that names both numbers",
    "Compare before you reshape, and say in the message which width and how many heads.",
)
def _(answer, case):
    for width, n_heads in ((10, 3), (4, 8)):
        why = f"a width of {width} and {n_heads} heads"
        x, numbers = probe(2, 5, width), (width, n_heads)
        case.raises(ValueError, answer, x, n_heads, mentions=numbers, because=why)


requires_any_memory(split_heads, slices, (2, 5, 12), 3)


@merge_heads.requires(
    "the heads lie side by side at each position, head 0 first",
    "Dimensions can be joined only when they are neighbours and in the right order: "
    "which two must be neighbours here?",
)
def _(answer, case):
    case.agrees(answer, side_by_side, probe(2, 3, 5, 4))
    case.agrees(answer, side_by_side, probe(3, 2, 4, 5, seed=1))


@merge_heads.requires("one head, heads of one column and a single position work too")
def _(answer, case):
    case.agrees(answer, side_by_side, probe(2, 1, 5, 4, seed=5))
    case.agrees(answer, side_by_side, probe(2, 3, 5, 1, seed=6))
    case.agrees(answer, side_by_side, probe(2, 3, 1, 4, seed=7))


requires_any_memory(
    merge_heads,
    side_by_side,
    (2, 3, 5, 4),
    hint="`view` refuses dimensions that do not lie side by side in memory. Is there "
    "something that copies where it has to?",
)


@repeat_kv.requires(
    "neighbouring query heads share: head h is head h // group_size",
    "Write down for 2 heads and a group of 3 which head each of the 6 is.",
)
def _(answer, case):
    case.agrees(answer, shared_heads, probe(2, 3, 5, 4), 2)
    case.agrees(answer, shared_heads, probe(3, 2, 4, 5, seed=1), group_size=4)


@repeat_kv.requires("a group of one changes nothing, and one head can serve all")
def _(answer, case):
    case.agrees(answer, shared_heads, probe(2, 3, 5, 4, seed=2), 1)
    case.agrees(answer, shared_heads, probe(2, 1, 5, 4, seed=3), 6)


requires_any_memory(repeat_kv, shared_heads, (2, 3, 5, 4), 2)


# MultiHeadAttention -------------------------------------------------------------------


def loaded(answer, case, weights, *args, **kwargs):
    """A module with these weights, which are all that it has."""
    module = case.call(answer, *args, **kwargs)
    is_module = isinstance(module, nn.Module) and callable(module)
    case.true(is_module, "Calling the class must give a module.")
    case.note(tuple(type(getattr(module, n, None)).__name__ for n in NAMES))
    case.parameters(module, **{n: w.shape for n, w in zip(NAMES, weights, strict=True)})
    return case.load(module, **dict(zip(NAMES, weights, strict=True)))


def module_and_oracle(answer, case, *shape, seed=0):
    """A module of these sizes, by default 6 heads that share 2, and what it must do."""
    shape = shape or (10, 6, 2, 7)
    weights = weights_for(*shape, seed=seed)
    module = loaded(answer, case, weights, *shape)

    def oracle(x, mask=None, rotate=None):
        in_float64 = [w.double() for w in weights]
        return head_by_head(x, in_float64, *shape[1:3], mask, rotate)

    return module, oracle


@MultiHeadAttention.requires(
    "it has the weights w_q, w_k, w_v and w_o without bias, of the right shapes",
    "`super().__init__()` first. Queries are n_heads·d_head wide, keys and values "
    "n_kv_heads·d_head; w_o leads back to d_model.",
)
def _(answer, case):
    loaded(answer, case, weights_for(12, 3, 3, 4), 12, 3)
    loaded(answer, case, weights_for(10, 3, 3, 4), 10, 3, d_head=4)
    loaded(answer, case, weights_for(24, 8, 2, 3), d_model=24, n_heads=8, n_kv_heads=2)
    loaded(answer, case, weights_for(10, 6, 2, 7), 10, 6, 2, 7)


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


@MultiHeadAttention.requires("d_head need not be d_model / n_heads")
def _(answer, case):
    module, oracle = module_and_oracle(answer, case, 10, 3, 3, 4, seed=20)
    case.agrees(module, oracle, probe(2, 5, 10, seed=2))


@MultiHeadAttention.requires(
    "neighbouring query heads share key and value heads, as with enable_gqa",
    "`repeat_kv` wants the size of a group, and comes before the scores.",
)
def _(answer, case):
    for shape in ((10, 6, 2, 7), (10, 4, 1, 3), (10, 8, 4, 3)):
        module, oracle = module_and_oracle(answer, case, *shape, seed=30)
        case.agrees(module, oracle, probe(3, 5, 10, seed=3))


@MultiHeadAttention.requires(
    "a mask (T, T) hides keys: True = may look",
    "Hand the mask on to attention, unchanged.",
)
def _(answer, case):
    module, oracle = module_and_oracle(answer, case, 12, 3, 3, 4, seed=40)
    case.agrees(module, oracle, probe(2, 5, 12, seed=4), causal(5))
    window = causal(6) & ~causal(6).tril(-3)
    case.agrees(module, oracle, probe(3, 6, 12, seed=5), mask=window)


@MultiHeadAttention.requires(
    "a mask of its own for each row of the batch, for each head, or for both",
    "The mask must reach scores of shape (B, H, T, T). If heads and batch are one "
    "dimension in your code, in what order do they stand?",
)
def _(answer, case):
    module, oracle = module_and_oracle(answer, case, seed=50)
    x, rows = probe(4, 5, 10, seed=6), padding(5, 2, 3, 4, t=5)
    own = torch.stack([causal(5).roll(h, -1) | torch.eye(5).bool() for h in range(6)])
    own[:, :, 0] = True  # with padding too, every query sees something
    for mask in (rows, rows & causal(5), own, rows & own):
        case.agrees(module, oracle, x, mask)


@MultiHeadAttention.requires("a row of nothing but padding gives zeros")
def _(answer, case):
    module, oracle = module_and_oracle(answer, case, seed=60)
    case.agrees(module, oracle, probe(3, 5, 10, seed=7), padding(0, 5, 2, t=5))


@MultiHeadAttention.requires(
    "rotate turns the queries and the keys of each head, and nothing else",
    "It wants (B, heads, T, d_head), so the split comes first; the values are what is "
    "looked up, and stay as they are.",
)
def _(answer, case):
    module, oracle = module_and_oracle(answer, case, seed=70)
    case.agrees(module, oracle, probe(3, 5, 10, seed=8), rotate=turn)
    case.agrees(module, oracle, probe(3, 5, 10, seed=9), causal(5), turn)
    case.agrees(module, oracle, probe(3, 5, 10, seed=8), rotate=turn_by_row)


@MultiHeadAttention.requires(
    "every call stands for itself, in training and in eval()",
    "Keep nothing from one call to the next, and drop nothing at random.",
)
def _(answer, case):
    module, oracle = module_and_oracle(answer, case, 12, 3, 3, 4, seed=80)
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
        weights = [w.to(dtype) for w in weights_for(10, 6, 2, 7, seed=90)]
        module = case.call(answer, 10, 6, 2, 7).to(dtype)
        case.load(module, **dict(zip(NAMES, weights, strict=True)))

        def oracle(x, mask, weights=weights):
            return head_by_head(x, [w.double() for w in weights], 6, 2, mask)

        case.agrees(module, oracle, probe(3, 5, 10, seed=12, dtype=dtype), causal(5))
    module, oracle = module_and_oracle(answer, case, seed=90)
    swapped = probe(5, 3, 10, seed=13).transpose(0, 1)
    case.agrees(module, oracle, swapped)
    case.agrees(module, oracle, strided(swapped))


@MultiHeadAttention.requires(
    "gradients reach the input and every weight, and stay finite where all is hidden",
    "Which weight plays no part in the result, or is cut off from it? A NaN that is "
    "replaced after the average of the values still reaches them through the gradient.",
)
def _(answer, case):
    module, _ = module_and_oracle(answer, case, seed=100)
    owned = dict(module.named_parameters())
    names = [n if n in owned else f"{n}.weight" for n in NAMES]
    trains = all(p.requires_grad for p in owned.values())
    case.true(trains, "A weight does not ask for gradients, so it will never train.")
    for mask in (causal(5), padding(0, 3, 5, t=5)):

        def forward(x, w_q, w_k, w_v, w_o, mask=mask):
            weights = dict(zip(names, (w_q, w_k, w_v, w_o), strict=True))
            return functional_call(module, weights, (x, mask))

        def oracle(x, *weights, mask=mask):
            return head_by_head(x, weights, 6, 2, mask)

        weights = weights_for(10, 6, 2, 7, seed=100)
        case.gradients_agree(forward, oracle, probe(3, 5, 10, seed=14), *weights)


@MultiHeadAttention.requires(
    "numbers that do not fit are a ValueError that names both",
    "Two things can be refused: a d_model that the heads cannot share evenly, unless "
    "d_head is given, and query heads that the KV heads cannot share evenly.",
)
def _(answer, case):
    heads, kv_heads = (
        "{} heads without d_head, and d_model {}",
        "{} heads and {} KV heads",
    )
    for shape, numbers, why in (
        ((14, 4), (4, 14), heads),
        ((16, 6, 2), (6, 16), heads),
        ((12, 6, 4), (6, 4), kv_heads),
        ((16, 2, 8), (2, 8), kv_heads),
    ):
        because = why.format(*numbers)
        case.raises(ValueError, answer, *shape, mentions=numbers, because=because)


@MultiHeadAttention.requires("it creates nothing on another device")
def _(answer, case):
    module, _ = module_and_oracle(answer, case)

    def run(module, x, mask=None):
        return module(x, mask, turn)

    case.any_device(run, module, probe(3, 5, 10), causal(5))
    case.any_device(run, module, probe(3, 5, 10))


@MultiHeadAttention.requires(
    "a new module starts with random weights, different in each layer",
    "`nn.Linear` does so by itself.",
)
def _(answer, case):
    module = case.call(answer, 12, 3)
    parameters = dict(module.named_parameters())
    new = [parameters.get(f"{n}.weight", parameters.get(n)) for n in NAMES[:3]]
    for name, weight in zip(NAMES, new, strict=False):
        case.true(
            weight.isfinite().all() and weight.std() > 1e-3,
            f"The weights of `{name}` all start with the same value, so they would "
            "learn the same.",
        )
    different = all(not torch.equal(a, b) for i, a in enumerate(new) for b in new[:i])
    case.true(different, "Two of w_q, w_k and w_v start with the same weights.")


# attention_parameters -----------------------------------------------------------------


def counted(d_model, n_heads, n_kv_heads, d_head):
    """Counted on the matrices themselves, without giving them memory."""
    queries, shared = n_heads * d_head, n_kv_heads * d_head
    shapes = (
        (queries, d_model),
        (shared, d_model),
        (shared, d_model),
        (d_model, queries),
    )
    return sum(torch.empty(*each, device="meta").numel() for each in shapes)


def right_count(answer, case, d_model, n_heads, n_kv_heads, d_head):
    shape = d_model, n_heads, n_kv_heads, d_head
    count = case.call(answer, *shape)
    sizes = {"d_model": d_model, "n_heads": n_heads, "d_head": d_head}
    case.sizes = sizes | ({"n_kv_heads": n_kv_heads} if n_kv_heads != n_heads else {})
    case.equal(count, counted(*shape), "the count")
    kind = type(count).__name__
    case.true(type(count) is int, f"The result is of type {kind}, expected an int.")


@attention_parameters.requires(
    "heads that fill d_model, with fewer key and value heads or as many: an int",
    "Write down the shapes of the four matrices and add up their sizes. Which two become "
    "narrower? `/` gives a float even where nothing remains.",
)
def _(answer, case):
    right_count(answer, case, 576, 12, 2, 48)
    right_count(answer, case, 4096, 32, 8, 128)
    right_count(answer, case, 48, 6, 1, 8)
    right_count(answer, case, 512, 8, 8, 64)


@attention_parameters.requires("a d_head that is not d_model / n_heads")
def _(answer, case):
    right_count(answer, case, 640, 4, 1, 256)
    right_count(answer, case, 10, 6, 2, 7)


# Do the parts fit together? -----------------------------------------------------------


def split_all(case, parts, *streams):
    """Heads of the learner's own, `(stream, n_heads)` each."""
    return [case.call(parts["split_heads"], x, n_heads) for x, n_heads in streams]


def attend(case, parts, q, k, v, t_q, t_k):
    mask = case.call(parts["causal_mask"], t_q, t_k)
    return case.call(parts["attention"], q, k, v, mask)


@masks_and_heads.requires(
    "causal_mask says to attention, in every head, what it means: True = may look",
    "Print the mask for 3 queries and 5 keys, and the weights beside it: row = query, "
    "column = key, and the queries are the last positions.",
)
def _(parts, case):
    q, k, v = (probe(2, 3, 5, n, seed=200 + i) for i, n in enumerate((4, 4, 6)))
    expected = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True
    )
    actual = attend(case, parts, q, k, v, 5, 5)
    case.close(actual, expected, "heads of 5 queries and 5 keys", like=q)
    actual = attend(case, parts, q[:, :, 2:], k, v, 3, 5)
    case.close(actual, expected[:, :, 2:], "the last 3 of these queries", like=q)


@masks_and_heads.requires(
    "split_heads gives the layout that attention reads and merge_heads undoes",
    "Split a stream whose values you can tell apart, look at the shape that attention "
    "gets, merge, and compare with the stream.",
)
def _(parts, case):
    q, k, v = (probe(2, 5, 12, seed=s) for s in (204, 205, 206))
    heads = split_all(case, parts, (q, 3), (k, 3), (v, 3))
    merged = case.call(parts["merge_heads"], heads[0])
    case.close(merged, q, "a stream split and merged again", like=q)
    actual = case.call(parts["merge_heads"], case.call(parts["attention"], *heads))
    each = [slices(x.double(), 3) for x in (q, k, v)]
    expected = side_by_side(F.scaled_dot_product_attention(*each))
    case.close(actual, expected, "heads split, looked up and merged", like=q)


@masks_and_heads.requires(
    "repeat_kv gives each query head of split_heads the key and value head it shares",
    "Of 6 query heads on 2, query heads 0, 1 and 2 share head 0.",
)
def _(parts, case):
    q, k, v = probe(2, 5, 24, seed=207), probe(2, 5, 8, seed=208), probe(2, 5, 8)
    q_heads, *shared = split_all(case, parts, (q, 6), (k, 2), (v, 2))
    shared = [case.call(parts["repeat_kv"], each, 3) for each in shared]
    actual = attend(case, parts, q_heads, *shared, 5, 5)
    each = [slices(x.double(), n) for x, n in ((q, 6), (k, 2), (v, 2))]
    expected = F.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True)
    case.close(actual, expected, "6 query heads on 2 key and value heads", like=q)


@masks_and_heads.requires(
    "MultiHeadAttention does with causal_mask what these parts do one by one",
    "All parts are right one by one, and put together they differ from your module. "
    "Has one of them been edited since the module was checked? Run its cells again.",
)
def _(parts, case):
    module, oracle = module_and_oracle(parts["MultiHeadAttention"], case, seed=210)
    x = probe(2, 5, 10, seed=211)
    actual = case.call(module, x, case.call(parts["causal_mask"], 5))
    w_q, w_k, w_v, w_o = weights_for(10, 6, 2, 7, seed=210)
    streams = (x @ w_q.T, 6), (x @ w_k.T, 2), (x @ w_v.T, 2)
    q, *shared = split_all(case, parts, *streams)
    k, v = (case.call(parts["repeat_kv"], each, 3) for each in shared)
    by_hand = case.call(parts["merge_heads"], attend(case, parts, q, k, v, 5, 5))
    case.close(actual, by_hand @ w_o.T, "the module against its parts", like=x)
    expected = oracle(x.double(), causal(5))
    case.close(actual, expected, "the module under causal_mask", like=x)


@masks_and_heads.requires(
    "a rotation reaches the queries and keys of each head after the split",
    "What does `rotate` get: `(B, T, width)`, or one vector of d_head for each head?",
)
def _(parts, case):
    module, oracle = module_and_oracle(parts["MultiHeadAttention"], case, seed=220)
    x = probe(2, 5, 10, seed=221)
    actual = case.call(module, x, case.call(parts["causal_mask"], 5), turn)
    expected = oracle(x.double(), causal(5), turn)
    case.close(actual, expected, "the module with a rotation", like=x)
