"""Lesson 03: heads, their masks, shared keys and values, and what they cost."""

import itertools
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


# What is right, by slices and by PyTorch ----------------------------------------------


def slices(x, n_heads):
    """Each head is one slice of neighbouring columns."""
    return torch.stack(x.split(x.shape[-1] // n_heads, dim=-1), dim=1)


def side_by_side(x):
    return torch.cat([x[:, h] for h in range(x.shape[1])], dim=-1)


def shared_heads(x, group_size):
    """Query head h gets key or value head h // group_size."""
    heads = [x[:, h // group_size] for h in range(x.shape[1] * group_size)]
    return torch.stack(heads, dim=1)


def grouped_by_torch(x, weights, n_heads, n_kv_heads, mask=None, rotate=None):
    """Multi-head attention, which PyTorch gives zeros where all keys are hidden."""
    w_q, w_k, w_v, w_o = weights
    q = slices(x @ w_q.T, n_heads)
    k, v = slices(x @ w_k.T, n_kv_heads), slices(x @ w_v.T, n_kv_heads)
    if rotate is not None:
        q, k = rotate(q), rotate(k)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return side_by_side(out) @ w_o.T


# Inputs -------------------------------------------------------------------------------

NAMES = ("w_q", "w_k", "w_v", "w_o")


def shapes(d_model, n_heads, n_kv_heads, d_head):
    """Of w_q, w_k, w_v and w_o in the layout of `nn.Linear`, one row an output."""
    queries, shared = n_heads * d_head, n_kv_heads * d_head
    return (queries, d_model), (shared, d_model), (shared, d_model), (d_model, queries)


def weights_for(*sizes, seed=0, dtype=torch.float32):
    """w_q, w_k, w_v, w_o for d_model, n_heads, n_kv_heads, d_head."""
    scale = 1.5 / math.sqrt(sizes[0])
    return tuple(
        probe(*size, seed=seed + i, scale=scale, dtype=dtype)
        for i, size in enumerate(shapes(*sizes))
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


@split_heads.requires(
    "head h gets the h-th run of neighbouring columns, and heads stand before time",
    "Split the columns 0 to 5 of one row into 2 heads by hand. Cut the last dimension "
    "in two, then exchange dimensions: a view cannot do that.",
)
def _(answer, case):
    case.agrees(answer, slices, probe(5, 6, 12), 3)
    case.agrees(answer, slices, probe(4, 3, 10), n_heads=5)
    for *size, n_heads in ((3, 4, 8, 2), (2, 5, 7, 1), (2, 5, 4, 4), (3, 1, 6, 2)):
        case.agrees(answer, slices, probe(*size), n_heads)


@split_heads.requires("a width that is not divisible is a ValueError that names both")
def _(answer, case):
    for width, n_heads in ((10, 3), (4, 8)):
        why = f"a width of {width} and {n_heads} heads"
        x, numbers = probe(2, 5, width), (width, n_heads)
        case.raises(ValueError, answer, x, n_heads, mentions=numbers, because=why)


@merge_heads.requires(
    "the heads lie side by side at each position, head 0 first",
    "Dimensions can be joined only when they are neighbours and in the right order: "
    "which two must be neighbours here?",
)
def _(answer, case):
    sizes = (2, 3, 5, 4), (3, 2, 4, 5), (2, 1, 5, 4), (2, 3, 5, 1), (2, 3, 1, 4)
    for size in sizes:
        case.agrees(answer, side_by_side, probe(*size))


@repeat_kv.requires(
    "neighbouring query heads share: head h is head h // group_size",
    "Write down for 2 heads and a group of 3 which head each of the 6 is.",
)
def _(answer, case):
    case.agrees(answer, shared_heads, probe(2, 3, 5, 4), 2)
    case.agrees(answer, shared_heads, probe(3, 2, 4, 5), group_size=4)
    case.agrees(answer, shared_heads, probe(2, 3, 5, 4), 1)
    case.agrees(answer, shared_heads, probe(2, 1, 5, 4), 6)


def requires_more(exercise, oracle, x, *args):
    """What every function of one tensor and a number must do."""

    @exercise.requires(
        "gradients flow back; other dtypes, memory that is not contiguous and another "
        "device work too",
    )
    def _(answer, case):
        for dim in range(x.dim() - 1):
            in_another_order = x.transpose(dim, dim + 1).contiguous()
            case.agrees(answer, oracle, in_another_order.transpose(dim, dim + 1), *args)
        case.agrees(answer, oracle, strided(x), *args)
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            case.agrees(answer, oracle, x.to(dtype), *args)
        case.gradients_agree(answer, oracle, x, *args)
        case.any_device(answer, x, *args)


requires_more(split_heads, slices, probe(2, 5, 12), 3)
requires_more(merge_heads, side_by_side, probe(2, 3, 5, 4))
requires_more(repeat_kv, shared_heads, probe(2, 3, 5, 4), 2)


# MultiHeadAttention -------------------------------------------------------------------


def named(weights):
    return dict(zip(NAMES, weights, strict=True))


def module_and_oracle(answer, case, *sizes, seed=0, dtype=torch.float32):
    """A module of these sizes, by default 6 heads that share 2, and what it must do."""
    sizes = sizes or (10, 6, 2, 7)
    weights = weights_for(*sizes, seed=seed, dtype=dtype)
    module = case.load(case.call(answer, *sizes).to(dtype), **named(weights))

    def oracle(x, mask=None, rotate=None):
        in_float64 = [w.double() for w in weights]
        return grouped_by_torch(x, in_float64, *sizes[1:3], mask, rotate)

    return module, oracle


@MultiHeadAttention.requires(
    "it has the weights w_q, w_k, w_v and w_o without bias, of the right shapes",
    "Queries are n_heads·d_head wide, keys and values n_kv_heads·d_head; w_o leads "
    "back to d_model.",
)
def _(answer, case):
    for sizes, args, kwargs in (
        ((12, 3, 3, 4), (12, 3), {}),
        ((10, 3, 3, 4), (10, 3), {"d_head": 4}),
        ((24, 8, 2, 3), (), {"d_model": 24, "n_heads": 8, "n_kv_heads": 2}),
        ((10, 6, 2, 7), (10, 6, 2, 7), {}),
    ):
        module = case.call(answer, *args, **kwargs)
        is_module = isinstance(module, nn.Module) and callable(module)
        case.true(is_module, "Calling the class must give a module.")
        case.note(tuple(type(getattr(module, n, None)).__name__ for n in NAMES))
        case.parameters(module, **named(shapes(*sizes)))


@MultiHeadAttention.requires(
    "one head is attention of w_q(x) on w_k(x), averaging w_v(x), and w_o after it",
    "With one head nothing is split. Check the order: project, look, project back. Only "
    "the scores are divided, by the root of d_head.",
)
def _(answer, case):
    module, oracle = module_and_oracle(answer, case, 6, 1, 1, 6)
    case.agrees(module, oracle, probe(2, 5, 6))


@MultiHeadAttention.requires(
    "several heads look each for itself, and d_head need not be d_model / n_heads",
    "If one head is right and several are not, look at the split, the merge, and the "
    "divisor of the scores.",
)
def _(answer, case):
    for sizes in ((12, 3, 3, 4), (10, 3, 3, 4)):
        module, oracle = module_and_oracle(answer, case, *sizes, seed=10)
        case.agrees(module, oracle, probe(2, 5, sizes[0], seed=1))


@MultiHeadAttention.requires(
    "neighbouring query heads share key and value heads, as with enable_gqa",
    "`repeat_kv` wants the size of a group, and comes before the scores.",
)
def _(answer, case):
    for sizes in ((10, 6, 2, 7), (10, 4, 1, 3), (10, 8, 4, 3)):
        module, oracle = module_and_oracle(answer, case, *sizes, seed=30)
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
    "a mask of its own for each row of the batch, for each head, or for both; a row of "
    "nothing but padding gives zeros",
    "The mask must reach scores of shape (B, H, T, T). If heads and batch are one "
    "dimension in your code, in what order do they stand?",
)
def _(answer, case):
    module, oracle = module_and_oracle(answer, case, seed=50)
    x, rows = probe(4, 5, 10, seed=6), padding(5, 2, 3, 4, t=5)
    own = torch.stack([causal(5).roll(h, -1) | torch.eye(5).bool() for h in range(6)])
    own[:, :, 0] = True  # with padding too, every query sees something
    masks = rows, rows & causal(5), own, rows & own, padding(0, 5, 2, 1, t=5)
    for mask in masks:
        case.agrees(module, oracle, x, mask)


@MultiHeadAttention.requires(
    "rotate turns the queries and the keys of each head, and nothing else",
    "It wants (B, heads, T, d_head), so the split comes first; the values are what is "
    "looked up, and stay as they are.",
)
def _(answer, case):
    module, oracle = module_and_oracle(answer, case, seed=70)
    x = probe(3, 5, 10, seed=8)
    for mask, rotate in ((None, turn), (causal(5), turn), (None, turn_by_row)):
        case.agrees(module, oracle, x, mask, rotate=rotate)


@MultiHeadAttention.requires(
    "every call stands for itself, in training and in eval(), in any dtype and memory",
    "Keep nothing from one call to the next, and drop nothing at random.",
)
def _(answer, case):
    module, oracle = module_and_oracle(answer, case, seed=80)
    x = probe(5, 3, 10, seed=10)
    for each, mask, rotate in (
        (x, None, None),
        (x[:3, :2], causal(2), None),
        (x.transpose(0, 1), causal(5), turn),
        (strided(x), None, turn),
    ):
        case.agrees(module.train(), oracle, each, mask, rotate)
        case.agrees(module.eval(), oracle, each, mask, rotate)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        module, oracle = module_and_oracle(answer, case, seed=90, dtype=dtype)
        case.agrees(module, oracle, x.to(dtype), causal(3))


@MultiHeadAttention.requires(
    "gradients reach the input and every weight, and stay finite where all is hidden",
    "Which weight plays no part in the result, or is cut off from it? A NaN that is "
    "replaced after the average of the values still reaches them through the gradient.",
)
def _(answer, case):
    module, _ = module_and_oracle(answer, case)
    owned = dict(module.named_parameters())
    names = [n if n in owned else f"{n}.weight" for n in NAMES]
    trains = all(p.requires_grad for p in owned.values())
    case.true(trains, "A weight does not ask for gradients, so it will never train.")
    for mask in (causal(5), padding(0, 3, 5, t=5)):

        def forward(x, w_q, w_k, w_v, w_o, mask=mask):
            weights = dict(zip(names, (w_q, w_k, w_v, w_o), strict=True))
            return functional_call(module, weights, (x, mask))

        def oracle(x, *weights, mask=mask):
            return grouped_by_torch(x, weights, 6, 2, mask)

        weights = weights_for(10, 6, 2, 7, seed=100)
        case.gradients_agree(forward, oracle, probe(3, 5, 10, seed=14), *weights)


@MultiHeadAttention.requires("numbers that do not fit are a ValueError that names both")
def _(answer, case):
    for sizes, numbers, why in (
        ((14, 4), (4, 14), "{} heads without d_head, and d_model {}"),
        ((16, 6, 2), (6, 16), "{} heads without d_head, and d_model {}"),
        ((12, 6, 4), (6, 4), "{} heads and {} KV heads"),
        ((16, 2, 8), (2, 8), "{} heads and {} KV heads"),
    ):
        because = why.format(*numbers)
        case.raises(ValueError, answer, *sizes, mentions=numbers, because=because)


@MultiHeadAttention.requires(
    "a new module starts with random weights, different in each layer, and creates "
    "nothing on another device"
)
def _(answer, case):
    def turned(module, x, mask=None):
        return module(x, mask, turn)

    module, _ = module_and_oracle(answer, case)
    for masks in ((causal(5),), ()):
        case.any_device(turned, module, probe(3, 5, 10), *masks)
    new = case.call(answer, 12, 3).named_parameters()
    looking = [p.detach() for name, p in new if not name.startswith("w_o")]
    case.true(
        all(p.isfinite().all() and p.std() > 1e-3 for p in looking),
        "The weights of a layer all start with the same value, so they would learn the "
        "same.",
    )
    pairs = itertools.combinations(looking, 2)
    different = not any(torch.equal(a, b) for a, b in pairs)
    case.true(different, "Two of w_q, w_k and w_v start with the same weights.")


# attention_parameters -----------------------------------------------------------------


def right_counts(answer, case, *cases):
    for sizes in cases:
        count = case.call(answer, *sizes)
        names = ("d_model", "n_heads", "n_kv_heads", "d_head")
        case.sizes = dict(zip(names, sizes, strict=True))
        case.equal(count, sum(map(math.prod, shapes(*sizes))), "the count")
        kind = type(count).__name__
        case.true(type(count) is int, f"The result is of type {kind}, expected an int.")


@attention_parameters.requires(
    "heads that fill d_model, with fewer key and value heads or as many: an int"
)
def _(answer, case):
    right_counts(answer, case, (576, 12, 2, 48), (48, 6, 1, 8), (512, 8, 8, 64))


@attention_parameters.requires("a d_head that is not d_model / n_heads")
def _(answer, case):
    right_counts(answer, case, (640, 4, 1, 256), (10, 6, 2, 7))


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
    "MultiHeadAttention does with causal_mask what these parts do one by one, and "
    "rotates the queries and keys of each head",
    "All parts are right one by one, and put together they differ from your module. "
    "Has one of them been edited since the module was checked? Run its cells again.",
)
def _(parts, case):
    module, oracle = module_and_oracle(parts["MultiHeadAttention"], case)
    x, mask = probe(2, 5, 10, seed=211), case.call(parts["causal_mask"], 5)
    for rotate in (None, turn):
        actual = case.call(module, x, mask, rotate)
        expected = oracle(x.double(), causal(5), rotate)
        what = "a rotation under causal_mask" if rotate else "causal_mask"
        case.close(actual, expected, f"the module with {what}", like=x)
