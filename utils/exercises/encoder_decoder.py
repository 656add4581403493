"""Lesson 13: attention from one sequence to another, and the model made of it."""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from utils.check.exercise import Exercise, IntegrationCheck
from utils.check.inputs import in_float64
from utils.exercises.forward_pass import causal, own_weights, trained, weights_for
from utils.probe import probe, probe_ids, strided

shift_right = Exercise("shift_right", lesson="encoder_decoder")
CrossAttention = Exercise("CrossAttention", lesson="encoder_decoder")
EncoderBlock = Exercise("EncoderBlock", lesson="encoder_decoder")
DecoderBlock = Exercise("DecoderBlock", lesson="encoder_decoder")
EncoderDecoder = Exercise("EncoderDecoder", lesson="encoder_decoder")
translate = Exercise("translate", lesson="encoder_decoder")
PARTS = {
    "attention": "attention causal_mask padding_mask",
    "multi_head": "split_heads merge_heads MultiHeadAttention",
    "positions": "sinusoidal",
    "feed_forward": "FeedForward",
    "norms": "RMSNorm pre_norm",
    "training": "cross_entropy learning_rate AdamW clip_gradients",
    "encoder_decoder": "shift_right CrossAttention EncoderBlock DecoderBlock "
    "EncoderDecoder translate",
}
whole_encoder_decoder = IntegrationCheck(
    "whole_encoder_decoder",
    lesson="encoder_decoder",
    parts={part: lesson for lesson, parts in PARTS.items() for part in parts.split()},
)

# Sizes, and the names and shapes of parameters ----------------------------------------


@dataclass
class Sizes:
    """What the blocks and the model read of their configuration."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    d_ff: int
    max_len: int
    norm_eps: float = 1e-5
    pad_id: int = 0


SMALL = Sizes(23, 12, 2, 3, 20, 11, norm_eps=1e-2, pad_id=4)
OTHER = Sizes(17, 10, 3, 5, 14, 9, norm_eps=0.3)
SINES = 1e-5  # what float32 inside may change in float64: sines, norms
FOUR = ("w_q", "w_k", "w_v", "w_o")
HALVES = {"encoder": ("attention",), "decoder": ("attention", "cross_attention")}


def block_shapes(c, half):
    d, attentions = c.d_model, HALVES[half]
    shapes = {f"norm_{i}": (d,) for i in range(1, len(attentions) + 2)}
    for name in attentions:
        shapes |= {f"{name}.{w}": (d, d) for w in FOUR}
    return shapes | {"feed_forward.w_1": (c.d_ff, d), "feed_forward.w_2": (d, c.d_ff)}


def model_shapes(c):
    shapes = dict.fromkeys(("embedding", "head"), (c.vocab_size, c.d_model))
    for half in HALVES:
        shapes[f"{half}_norm"] = (c.d_model,)
        for i in range(c.n_layers):
            block = block_shapes(c, half)
            shapes |= {f"{half}.{i}.{n}": shape for n, shape in block.items()}
    return shapes


def underscored(by_name):
    """Dotted names as `case.load` and `case.parameters` take them."""
    return {name.replace(".", "__"): value for name, value in by_name.items()}


# What is right, as functions of a dictionary of weights -------------------------------


def heads(y, w, c):
    return F.linear(y, w).unflatten(-1, (c.n_heads, -1)).transpose(1, 2)


def pair_of(p, c, memory):
    """Keys and values."""
    return tuple(heads(memory, p[w].to(memory), c) for w in ("w_k", "w_v"))


def looked_across(p, c, x, memory, memory_mask=None):
    """Attention by PyTorch; zeros for a position that may look at nothing."""
    q, k, v = heads(x, p["w_q"], c), *pair_of(p, c, memory)
    mask = None if memory_mask is None else torch.atleast_2d(memory_mask)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return F.linear(out.transpose(1, 2).flatten(2), p["w_o"])


def normed(x, weight, c):
    return F.rms_norm(x, x.shape[-1:], weight, c.norm_eps)


def thought(p, x):
    return F.linear(F.linear(x, p["feed_forward.w_1"]).relu(), p["feed_forward.w_2"])


def one_encoder_block(p, c, x, mask=None):
    y = normed(x, p["norm_1"], c)
    x = x + looked_across(own_weights(p, "attention"), c, y, y, mask)
    return x + thought(p, normed(x, p["norm_2"], c))


def one_decoder_block(p, c, x, memory, mask=None, memory_mask=None):
    y = normed(x, p["norm_1"], c)
    x = x + looked_across(own_weights(p, "attention"), c, y, y, mask)
    across = own_weights(p, "cross_attention")
    x = x + looked_across(across, c, normed(x, p["norm_2"], c), memory, memory_mask)
    return x + thought(p, normed(x, p["norm_3"], c))


def waves(t, d_model):
    """Sines and cosines of the positions, side by side in pairs."""
    position = torch.arange(t, dtype=torch.float64)[:, None]
    angle = position / 10_000 ** (torch.arange(0, d_model, 2) / d_model)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


@dataclass
class Model:
    p: dict
    c: Sizes

    def embed(self, ids):
        return self.p["embedding"][ids] + waves(ids.shape[1], self.c.d_model)

    def encode(self, source):
        x, real = self.embed(source), source != self.c.pad_id
        for i in range(self.c.n_layers):
            own = own_weights(self.p, f"encoder.{i}")
            x = one_encoder_block(own, self.c, x, real[:, None, None])
        return normed(x, self.p["encoder_norm"], self.c)

    def decode(self, target, memory, memory_mask=None):
        x, mask = self.embed(target), causal(target.shape[1])
        for i in range(self.c.n_layers):
            own = own_weights(self.p, f"decoder.{i}")
            x = one_decoder_block(own, self.c, x, memory, mask, memory_mask)
        return F.linear(normed(x, self.p["decoder_norm"], self.c), self.p["head"])

    def __call__(self, source, target):
        real = source != self.c.pad_id
        return self.decode(target, self.encode(source), real[:, None, None])


RIGHT = {
    CrossAttention: (
        looked_across,
        lambda c: dict.fromkeys(FOUR, (c.d_model, c.d_model)),
    ),
    EncoderBlock: (one_encoder_block, partial(block_shapes, half="encoder")),
    DecoderBlock: (one_decoder_block, partial(block_shapes, half="decoder")),
    EncoderDecoder: (Model, model_shapes),
}

# Inputs, and modules with weights -----------------------------------------------------


def some_mask(*shape, seed):
    """Allows about half of the keys, and for every query the third."""
    mask = probe(*shape, seed=seed) > 0
    mask[..., 2] = True
    return mask


def padding(lengths, s):
    """True for the first `lengths[b]` places of row b, `(B, 1, 1, s)`."""
    return (torch.arange(s) < torch.tensor(lengths)[:, None])[:, None, None]


def sources(lengths, c, seed):
    """Rows of these lengths without padding in them, filled up with it."""
    longest = max(lengths)
    ids = probe_ids(len(lengths), longest, below=c.vocab_size - 1, seed=seed)
    ids = ids + (ids >= c.pad_id)  # every token but the padding
    return ids.where(padding(lengths, longest)[:, 0, 0], c.pad_id)


def target_ids(b, t, c, seed):
    """Without padding, which the model may hide in a target or not."""
    return sources([t] * b, c, seed)


def streams(exercise, c, seed, b=2):
    """What a layer reads: x, and a memory of another length."""
    x, memory = probe(b, 5, c.d_model, seed=seed), probe(b, 7, c.d_model, seed=seed + 1)
    return (x,) if exercise is EncoderBlock else (x, memory)


def weights_of(exercise, c, seed):
    weights = weights_for(RIGHT[exercise][1](c), seed)
    if exercise in (EncoderBlock, DecoderBlock):
        weights["feed_forward.w_1"] *= 5  # ReLU has no upper end
    return weights


def made(exercise, answer, case, c):
    sizes = (c.d_model, c.n_heads) if exercise is CrossAttention else (c,)
    return case.call(answer, *sizes)


def filled(exercise, answer, case, c, seed):
    """The learner's module with weights, and what is right with the same ones."""
    weights = weights_of(exercise, c, seed)
    module = case.load(made(exercise, answer, case, c), **underscored(weights))
    return module, partial(RIGHT[exercise][0], in_float64(weights), c)


def filled_model(answer, case, c, seed):
    module, oracle = filled(EncoderDecoder, answer, case, c, seed)
    return module, oracle()


def required(sentence, hint="", of=(CrossAttention, EncoderBlock, DecoderBlock)):
    """Decorates `test(answer, case, exercise)`, a requirement of several layers."""

    def add(test):
        for exercise in of:
            exercise.requires(sentence, hint)(partial(test, exercise=exercise))

    return add


# shift_right --------------------------------------------------------------------------


def shifted(ids, start_id):
    return torch.tensor([[start_id, *row[:-1]] for row in ids.tolist()]).to(ids)


@shift_right.requires(
    "one row: the start, then every token but the last",
    "Write the row and its result below each other: at each place the upper one is the "
    "answer, the lower one the newest token that may be known.",
)
def _(answer, case):
    ids = torch.tensor([[5, 3, 8, 2]])
    case.equal(case.call(answer, ids, 7), shifted(ids, 7), "the result")


@shift_right.requires(
    "each row of a batch by itself, of any length, start and dtype, on any device"
)
def _(answer, case):
    several, single = probe_ids(3, 5, below=23, seed=1), torch.tensor([[9], [4]])
    turned = probe_ids(6, 2, below=23, seed=2).to(torch.int16).T
    for ids, start in ((several, 0), (several, 30_000), (single, 6), (turned, 3)):
        actual = case.call(answer, ids=ids, start_id=start)
        case.equal(actual, shifted(ids, start), f"with start {start}, the result")
    case.any_device(answer, several, 1)


# CrossAttention, and what the three layers share --------------------------------------


class Touched(TorchFunctionMode):
    """Notes which tensors others are computed with."""

    def __init__(self):
        super().__init__()
        self.ids = set()

    def __torch_function__(self, f, types, args=(), kwargs=None):
        result = f(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):  # not a shape or a dtype
            self.ids |= set(map(id, args))
        return result


@required(
    "its parts have their names and sizes, and no biases",
    "The docstring names them: which class takes which sizes?",
)
def _(answer, case, exercise):
    for c in (SMALL, OTHER):
        shapes = RIGHT[exercise][1](c)
        case.parameters(made(exercise, answer, case, c), **underscored(shapes))


@CrossAttention.requires(
    "queries from x, keys and values from the memory; each head looks by itself",
    "Write the shapes down: x is `(B, T, D)`, the memory `(B, S, D)`, and the weights "
    "must be `(…, T, S)`. `split_heads` and `merge_heads` of lesson 03 do the cutting.",
)
def _(answer, case):
    for c, what in (
        (Sizes(0, 6, 0, 1, 0, 0), "with one head, the result"),
        (SMALL, "with three heads, the result"),
        (OTHER, "with five heads, the result"),
    ):
        module, oracle = filled(CrossAttention, answer, case, c, seed=20)
        for b, t, s in ((3, 4, 4), (2, 5, 7), (1, 1, 5)):
            x = probe(b, t, c.d_model, seed=30 + t)
            memory = probe(b, s, c.d_model, seed=40 + s)
            case.agrees(module, oracle, x, memory, what=what)


@CrossAttention.requires(
    "memory_mask hides keys of the memory, True = may look, and broadcasts",
    "The mask belongs to the scores, `(B, H, T, S)`; `attention` of lesson 02 takes it as "
    "it is, whatever its dimensions.",
)
def _(answer, case):
    module, oracle = filled(CrossAttention, answer, case, SMALL, seed=50)
    x, memory = streams(CrossAttention, SMALL, seed=51, b=4)
    rows = padding([3, 7, 1, 5], 7)
    case.agrees(module, oracle, x, memory, rows)
    for shape in ((4, 3, 5, 7), (5, 7), (7,), (3, 5, 7)):
        mask = some_mask(*shape, seed=53)
        case.agrees(module, oracle, x, memory, memory_mask=mask)
    for scale in (20.0, 300.0):  # scores far from 0
        case.agrees(module, oracle, x, scale * memory, rows)


@CrossAttention.requires(
    "a position that may look at nothing gets zeros, with finite gradients; its "
    "neighbours do not",
    "Softmax over nothing but −∞ is 0/0. Lesson 02 decided what a query that sees nothing "
    "gets; do you call your `attention`?",
)
def _(answer, case):
    module, oracle = filled(CrossAttention, answer, case, SMALL, seed=60)
    x, memory = streams(CrossAttention, SMALL, seed=61, b=3)
    row = padding([4, 0, 7], 7)
    position = some_mask(3, 1, 5, 7, seed=68)
    position[0, :, 3] = False
    head = some_mask(3, 3, 5, 7, seed=69)
    head[1, 1, 2] = False
    for mask in (row, position, head):
        case.agrees(module, oracle, x, memory, mask)
    case.gradients_agree(module, oracle, x, memory, row)


@CrossAttention.requires(
    "keys_values gives keys and values, split into heads; given that pair in place of the "
    "memory, it gives the same and projects nothing",
    "Two tensors, keys first, both `(B, n_heads, S, d_head)`. `isinstance(memory, tuple)` "
    "tells the two apart; with a pair, neither `w_k` nor `w_v` runs.",
)
def _(answer, case):
    for c in (SMALL, OTHER):
        module, oracle = filled(CrossAttention, answer, case, c, seed=70)
        (x, memory), mask = streams(CrossAttention, c, seed=71), padding([4, 7], 7)
        pair = case.call(module.keys_values, memory)
        case.is_tuple(pair, 2, "the result of keys_values")
        expected = pair_of(weights_of(CrossAttention, c, 70), c, memory)
        for name, one, other in zip(("keys", "values"), pair, expected, strict=True):
            case.close(one, other, f"the {name}", like=memory)
        turned = tuple(y.flip(2) for y in pair)
        for given, read in ((pair, memory), (turned, memory.flip(1))):
            actual = case.call(module, x, given, mask)
            expected = oracle(x.double(), read.double(), mask)
            case.close(actual, expected, "with the pair, the result")
    with Touched() as touched:
        case.call_in_place(module, x, tuple(pair), mask)
    for name, p in module.named_parameters():
        case.true(
            name[:3] not in ("w_k", "w_v") or id(p) not in touched.ids,
            f"`{name}` is used although the pair was given, which saves this work.",
        )


@CrossAttention.requires(
    "a width that is not divisible is a ValueError that names both numbers"
)
def _(answer, case):
    for size in ((10, 3), (4, 8)):
        because = f"d_model {size[0]} and {size[1]} heads"
        case.raises(ValueError, answer, *size, mentions=size, because=because)


@CrossAttention.requires(
    "the module keeps nothing between calls",
    "What is kept belongs to the caller, as the pair that `keys_values` gives.",
)
def _(answer, case):
    module, oracle = filled(CrossAttention, answer, case, SMALL, seed=120)
    x, memory = streams(CrossAttention, SMALL, seed=121)
    n_before = len(tree_leaves(vars(module)))
    case.call_in_place(module, x, memory)
    memory.data.copy_(probe(2, 7, 12, seed=124))  # another text in the same place
    actual = case.call_in_place(module, x, memory)
    expected = oracle(x.double(), memory.double())
    case.close(actual, expected, "for another memory in the same place, the result")
    case.true(
        len(tree_leaves(vars(module))) <= n_before,
        "After a call the module holds more than before; it may keep nothing.",
    )


# The blocks ---------------------------------------------------------------------------


@required(
    "its sublayers run one after the other, each pre-norm; every position sees all others",
    "A line of lesson 06's `pre_norm` for each; `functools.partial` binds what a sublayer "
    "takes beside x. `torch.relu` is the activation. The memory comes in normalised.",
    of=(EncoderBlock, DecoderBlock),
)
def _(answer, case, exercise):
    for c in (SMALL, OTHER):
        module, oracle = filled(exercise, answer, case, c, seed=210)
        x, *memory = streams(exercise, c, seed=211)
        case.agrees(module, oracle, x, *memory)
        case.agrees(module, oracle, 0.1 * x, *(3.0 * m[:, :4] for m in memory))


@EncoderBlock.requires("a mask is passed on to attention")
def _(answer, case):
    module, oracle = filled(EncoderBlock, answer, case, SMALL, seed=230)
    x = probe(4, 7, 12, seed=231)
    case.agrees(module, oracle, x, padding([3, 7, 1, 5], 7))
    case.agrees(module, oracle, x, mask=some_mask(4, 3, 7, 7, seed=232))


@DecoderBlock.requires(
    "mask is for looking back, memory_mask for looking across; the memory may come as the "
    "pair that `cross_attention.keys_values` made",
    "One is `(T, T)`, the other `(B, 1, 1, S)`: which attention has which scores? Hand "
    "the memory on as it is, and ask nothing of its shape.",
)
def _(answer, case):
    module, oracle = filled(DecoderBlock, answer, case, SMALL, seed=330)
    x, memory = streams(DecoderBlock, SMALL, seed=331, b=4)
    back, across = some_mask(4, 3, 5, 5, seed=333), some_mask(4, 3, 5, 5, seed=334)
    case.agrees(module, oracle, x, memory[:, :5], mask=back, memory_mask=across)
    rows = padding([3, 7, 1, 5], 7)
    for masks in ((causal(5),), (None, rows), (causal(5), rows)):
        case.agrees(module, oracle, x, memory, *masks)
    own = own_weights(weights_of(DecoderBlock, SMALL, 330), "cross_attention")
    actual = case.call(module, x, pair_of(own, SMALL, memory), causal(5))
    expected = oracle(x.double(), memory.double(), causal(5))
    case.close(actual, expected, "with a pair, the result")


@required("any dtype and memory layout, and `eval()`, give what they should")
def _(answer, case, exercise):
    module, oracle = filled(exercise, answer, case, SMALL, seed=90)
    inputs = streams(exercise, SMALL, seed=91)
    case.agrees(module.eval(), oracle, *map(strided, inputs))
    right, weights = RIGHT[exercise][0], weights_of(exercise, SMALL, 90)
    for dtype, tolerance in ((torch.float64, SINES), (torch.bfloat16, None)):
        given = [x.to(dtype) for x in inputs]
        rounded = {name: w.to(dtype).double() for name, w in weights.items()}
        actual = case.call(module.to(dtype), *given)
        expected = right(rounded, SMALL, *in_float64(given))
        options = dict(like=given[0], tolerance=tolerance)
        case.close(actual, expected, f"the result in {dtype}", **options)


@required(
    "gradients reach what it reads and every parameter, and it creates nothing on "
    "another device"
)
def _(answer, case, exercise):
    module, oracle = filled(exercise, answer, case, SMALL, seed=100)
    inputs = streams(exercise, SMALL, seed=101)
    case.gradients_agree(module, oracle, *inputs)
    trained(case, module, *inputs)
    case.any_device(module, *inputs)


# EncoderDecoder -----------------------------------------------------------------------


def close_to(case, module, actual, expected, what):
    like = next(module.parameters())
    tolerance = SINES if like.dtype == torch.float64 else None
    case.close(actual, expected, what, like=like, tolerance=tolerance)


@EncoderDecoder.requires(
    "embedding, encoder, encoder_norm, decoder, decoder_norm, head and config are there",
    "One embedding serves both halves; `encoder` and `decoder` are an `nn.ModuleList` "
    "each; every norm is an `RMSNorm`.",
)
def _(answer, case):
    for c in (SMALL, OTHER):
        module = case.call(answer, c)
        case.equal(getattr(module, "config", None), c, "`config`")
        case.parameters(module, **underscored(model_shapes(c)))
        weights = dict(module.named_parameters())
        for half in HALVES:
            first, second = (f"{half}.{i}.attention.w_q.weight" for i in (0, 1))
            case.true(
                not torch.equal(weights[first], weights[second]),
                f"The blocks of `{half}` start with the same values.",
            )


@EncoderDecoder.requires(
    "encode: embedding plus positions, every block, the norm; and the mask of the source: "
    "padding, wherever it stands, is read as if it were not there",
    "Each block reads what the one before has left; the norm comes last. `source != "
    "pad_id`, `(B, 1, 1, S)`, says where text is. Who must not look at the rest?",
)
def _(answer, case):
    gaps = sources([7, 7, 7], SMALL, seed=22)
    gaps[0, :2] = gaps[1, 3] = gaps[2, 0] = gaps[2, 4:6] = SMALL.pad_id
    every = F.pad(sources([5, 3], SMALL, seed=21), (0, 2), value=SMALL.pad_id)
    for c, source, where in (
        (SMALL, sources([7, 7], SMALL, seed=1), "nowhere"),
        (OTHER, sources([7, 7], OTHER, seed=1), "nowhere"),
        (SMALL, sources([5, 3, 1, 7], SMALL, seed=2), "at the end"),
        (SMALL, every, "at the end of every row"),
        (SMALL, gaps, "in front and in the middle"),
    ):
        module, oracle = filled_model(answer, case, c, seed=400)
        result, real = case.call(module.encode, source), source != c.pad_id
        case.is_tuple(result, 2, "the result of encode")
        memory, mask = result
        what = f"with padding {where}, the memory"
        case.is_tensor(memory, what)
        right = oracle.encode(source)
        case.equal(memory.shape, right.shape, f"{what}'s shape")
        close_to(case, module, memory[real], right[real], f"{what} of what is text")
        case.equal(mask, real[:, None, None], f"with padding {where}, the mask")


@EncoderDecoder.requires(
    "decode: each target position sees itself, what came before, and the whole memory, "
    "which may be a list with one pair of keys and values for each block",
    "Change the last of five tokens and see which logits move: only the last may. For a "
    "list, block i gets the i-th pair.",
)
def _(answer, case):
    for c, seed in ((SMALL, 700), (OTHER, 800)):
        module, oracle = filled_model(answer, case, c, seed)
        memory, target = probe(2, 7, c.d_model, seed=3), target_ids(2, 5, c, seed=4)
        names = (f"decoder.{i}.cross_attention" for i in range(c.n_layers))
        kept = [pair_of(own_weights(oracle.p, name), c, memory) for name in names]
        for given, what in ((memory, "the memory"), (kept, "a list")):
            for mask in (None, padding([7, 4], 7)):
                actual = case.call(module.decode, target, given, mask)
                expected = oracle.decode(target, memory.double(), mask)
                what = what if mask is None else f"{what} and a mask"
                close_to(case, module, actual, expected, f"with {what}, the logits")


@EncoderDecoder.requires(
    "source and target together give the right logits, at each call, up to max_len tokens",
    "`forward` is `encode`, then `decode` with both of its results. Only more than "
    "`max_len` tokens are too many.",
)
def _(answer, case):
    for c, *calls in (
        (SMALL, ([6, 2, 4], 5), ([3, 6, 5], 3), ([1], 8), ([6, 3], 1)),
        (OTHER, ([OTHER.max_len, 1], OTHER.max_len)),
    ):
        module, oracle = filled_model(answer, case, c, seed=1_000)
        for lengths, t in calls:
            source = sources(lengths, c, seed=7)
            target = target_ids(len(lengths), t, c, seed=8)
            actual = case.call(module, source, target)
            close_to(case, module, actual, oracle(source, target), "the logits")
            module = module.double().eval()


@EncoderDecoder.requires(
    "a row of padding alone, an empty source and more than max_len tokens are a "
    "ValueError that names the row, or both numbers",
    "From nothing the model would answer NaN. Find the first row without a real token.",
)
def _(answer, case):
    module, _ = filled_model(answer, case, SMALL, seed=1_200)
    target, long = target_ids(3, 4, SMALL, seed=12), target_ids(3, 12, SMALL, seed=13)
    padded = torch.full((1, 6), SMALL.pad_id)
    case.raises(ValueError, module, padded, target[:1], because="a source of padding")
    for row in (1, 2):
        source = sources([5, 4, 3], SMALL, seed=11)
        source[row] = SMALL.pad_id
        options = dict(mentions=(row,), because=f"row {row} is padding")
        case.raises(ValueError, module.encode, source, **options)
        case.raises(ValueError, module, source, target, **options)
    case.raises(ValueError, module, source[:, :0], target, because="no token")
    for args in ((long, target), (target, long)):
        because = "12 tokens where max_len is 11"
        case.raises(ValueError, module, *args, mentions=(12, 11), because=because)


@EncoderDecoder.requires(
    "gradients reach every parameter, and it creates nothing on another device"
)
def _(answer, case):
    module, _ = filled_model(answer, case, SMALL, seed=1_600)
    inputs = sources([7, 5, 2], SMALL, seed=16), target_ids(3, 5, SMALL, seed=17)
    trained(case, module, *inputs)
    case.any_device(module, *inputs)


# translate ----------------------------------------------------------------------------

START, END = 5, 3


class ToyAttention(nn.Module):
    """Cross-attention of one head, which counts how often it makes keys and values."""

    def __init__(self, seed):
        super().__init__()
        self.w_q, self.w_k, self.w_v = (
            nn.Parameter(probe(8, 8, seed=seed + i, scale=0.6)) for i in range(3)
        )
        self.ran = 0

    def keys_values(self, memory):
        self.ran += 1
        return (memory @ self.w_k.T)[:, None], (memory @ self.w_v.T)[:, None]  # B 1 S D

    def forward(self, x, memory, mask):
        k, v = memory if isinstance(memory, tuple) else self.keys_values(memory)
        scores = (x @ self.w_q.T)[:, None] @ k.mT
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return x + (torch.softmax(scores, -1) @ v)[:, 0]


class Toy(nn.Module):
    """Stands for a model: what comes next depends on all that it is given."""

    def __init__(self, seed=0, end_id=END, pad_id=0, pull=100.0):
        super().__init__()
        self.config = Sizes(13, 8, 2, 1, 0, max_len=10, pad_id=pad_id)
        self.end_id, self.pull = end_id, pull
        self.embedding = nn.Embedding.from_pretrained(probe(13, 8, seed=seed))
        self.head = nn.Parameter(probe(8, 13, seed=seed + 50))
        self.decoder = nn.ModuleList(nn.Module() for _ in range(2))
        for i, block in enumerate(self.decoder):
            block.cross_attention = ToyAttention(seed + 10 * i + 1)
        self.encoded = self.decoded = self.without_pairs = 0
        self.grad_seen = False
        self.double()

    def embed(self, ids):
        if ids.shape[1] > self.config.max_len:
            raise RuntimeError("the model was given more than max_len tokens")
        x = self.embedding(ids)
        return x + waves(ids.shape[1], 8).to(x)

    def encode(self, source):
        self.encoded += 1
        mask = (source != self.config.pad_id)[:, None, None]
        return torch.tanh(self.embed(source)), mask

    def decode(self, target, memory, memory_mask=None):
        self.decoded += 1
        self.without_pairs += not isinstance(memory, list)
        self.grad_seen |= torch.is_grad_enabled()
        x = self.embed(target)
        x = x + x.cumsum(1)
        for i, block in enumerate(self.decoder):
            own = memory[i] if isinstance(memory, list) else memory
            x = block.cross_attention(x, own, memory_mask)
        logits = torch.sin(9.0 * (x @ self.head))  # the likeliest changes at each step
        place = (target.cumsum(1) % 5 == 2)[..., None]  # where a text may end
        end = torch.arange(13, device=x.device) == self.end_id
        return logits.masked_fill(end, -50.0) + (place & end) * self.pull


@torch.no_grad()
def greedy(model, source, start_id, end_id, max_tokens):
    """Row by row, without padding, everything computed again at each step."""
    pad_id, rows = model.config.pad_id, []
    for row in source:
        memory, _ = model.encode(row[row != pad_id][None])
        ids = [start_id]
        while len(ids) <= max_tokens and (len(ids) == 1 or ids[-1] != end_id):
            logits = model.decode(torch.tensor([ids]), memory)
            ids.append(int(logits[0, -1].argmax()))
        rows.append(torch.tensor(ids[1:]))
    return nn.utils.rnn.pad_sequence(rows, True, pad_id)


def toy_source(lengths, seed, pad_id=0):
    return sources(lengths, Sizes(13, 8, 2, 1, 0, 9, pad_id=pad_id), seed)


def expect(case, answer, source, what, *, start=START, end=END, max_tokens=9, **toy):
    """What `greedy` writes; returns the model that was used, and the text."""
    expected = greedy(Toy(end_id=end, **toy), source, start, end, max_tokens)
    model = Toy(end_id=end, **toy)
    actual = case.call(answer, model, source, start, end, max_tokens)
    case.equal(actual, expected, f"{what}: the result")
    return model, expected


@translate.requires(
    "one row: the likeliest token, again and again, each step reading all that was written",
    "What does the decoder read in the very first step, and which position's logits speak "
    "of the next token? The start is no part of the result.",
)
def _(answer, case):
    for seed, text, n in ((0, 2, 9), (7, 11, 9), (1, 1, 2), (1, 1, 1), (3, 3, 1)):
        source = toy_source([6], text)
        expect(case, answer, source, f"{n} steps", max_tokens=n, seed=seed)


@translate.requires(
    "each row goes up to its end_id, which is part of the result, and is what it would be "
    "alone, filled up with pad_id",
    "The loop goes on until all rows have ended; those that have must write padding.",
)
def _(answer, case):
    for seed in (1, 2, 3):
        expect(case, answer, toy_source([5], seed), "one row", seed=seed)
    for seed in (4, 5, 6, 10):
        expect(case, answer, toy_source([7, 2, 5, 3], seed), "four rows", seed=seed)


@translate.requires("another start, end and padding, and as many tokens as max_len")
def _(answer, case):
    source = toy_source([6, 3, 4], 7, pad_id=11)
    for end in (8, 11):  # 11 is the padding too
        expect(case, answer, source, "other ids", start=1, end=end, seed=7, pad_id=11)
    zero = dict(start=0, end=0, seed=12, pad_id=11)
    expect(case, answer, source, "0 as start and end", **zero)
    for pull in (100.0, 0.0):  # without a pull the end never comes
        options = dict(max_tokens=10, seed=3, pull=pull)
        expect(case, answer, toy_source([5], 3), "all of max_len", **options)


@translate.requires(
    "the encoder runs once, each block makes keys and values of the memory once, and "
    "nothing runs after the last end",
    "`keys_values` of every block's `cross_attention`, before the loop; `decode` takes the "
    "list of pairs in place of the memory.",
)
def _(answer, case):
    model, text = expect(case, answer, toy_source([7, 2, 5], 8), "three rows", seed=8)
    n, longest = model.encoded, text.shape[1]
    case.true(n == 1, f"The encoder ran {n} times; once is enough.")
    case.true(
        model.without_pairs == 0,
        f"`decode` was given no list of pairs in {model.without_pairs} of "
        f"{model.decoded} calls.",
    )
    ran = [block.cross_attention.ran for block in model.decoder]
    case.true(
        ran == [1, 1],
        f"The two blocks made keys and values {ran[0]} and {ran[1]} times; once each is "
        "asked for.",
    )
    case.true(
        model.decoded <= longest,
        f"The longest row has {longest} tokens, and the decoder ran {model.decoded} "
        "times.",
    )


@translate.requires(
    "no gradients are recorded, the model is left in the mode it was in, and nothing is "
    "created on another device",
    "The mode is the caller's affair; whoever changes it must put it back.",
)
def _(answer, case):
    args = toy_source([5, 3], 1), START, END, 3
    for mode in (True, False):
        model = Toy(seed=1).train(mode)
        case.call_in_place(answer, model, *args)
        case.true(not model.grad_seen, "The decoder ran with gradients enabled.")
        case.true(
            all(part.training == mode for part in model.modules()),
            f"The model came in with `training` {mode} and is left with {not mode}.",
        )
    case.any_device(answer, Toy(), *args)


@translate.requires("max_tokens below 1 or above max_len is a ValueError")
def _(answer, case):
    for n in (0, -2, 11):
        args = Toy(), toy_source([5, 3], 1), START, END, n
        because = f"max_tokens = {n} where max_len is 10"
        case.raises(ValueError, answer, *args, because=because)


# The parts of lessons 02 to 09 and these together -------------------------------------


@whole_encoder_decoder.requires(
    "split_heads, attention, merge_heads and padding_mask do what CrossAttention does",
    "The mask of lesson 02 goes into both as it is. Which of them gives another result "
    "than PyTorch's attention?",
)
def _(parts, case):
    given = CrossAttention, parts["CrossAttention"], case, SMALL
    module, oracle = filled(*given, seed=2_000)
    p = weights_of(CrossAttention, SMALL, 2_000)
    x, memory = streams(CrossAttention, SMALL, seed=2_001, b=3)
    mask = case.call(parts["padding_mask"], torch.tensor([7, 2, 0]), 7)
    case.equal(mask, padding([7, 2, 0], 7), "the mask of lengths 7, 2 and 0")
    expected = oracle(x.double(), memory.double(), mask)
    q, k, v = (
        case.call(parts["split_heads"], y @ p[w].T, 3)
        for w, y in (("w_q", x), ("w_k", memory), ("w_v", memory))
    )
    out = case.call(parts["attention"], q, k, v, mask)
    out = case.call(parts["merge_heads"], out) @ p["w_o"].T
    case.close(out, expected, "the parts one by one", like=x)
    case.close(case.call(module, x, memory, mask), expected, "CrossAttention", like=x)


@whole_encoder_decoder.requires(
    "pre_norm, RMSNorm, FeedForward, the two attentions and the masks make up the blocks",
    "Write a block out with your parts and compare after each line. In the decoder two "
    "masks are at work: causal for looking back, padding for looking across.",
)
def _(parts, case):
    c, x = SMALL, probe(2, 5, 12, seed=2_101, scale=0.3)
    memory = probe(2, 7, 12, seed=2_102)
    back = case.call(parts["causal_mask"], 5)
    case.equal(back, causal(5), "the causal mask")
    rows, seen = (
        case.call(parts["padding_mask"], torch.tensor([n, 3]), n) for n in (5, 7)
    )

    def part(name, weights, *sizes):
        return case.load(case.call(parts[name], *sizes), **weights)

    for exercise, inputs in (
        (EncoderBlock, (x, rows)),
        (DecoderBlock, (x, memory, back, seen)),
    ):
        module, oracle = filled(exercise, parts[exercise.name], case, c, seed=2_100)
        p = weights_of(exercise, c, 2_100)
        own = own_weights(p, "attention")
        attention = part("MultiHeadAttention", own, c.d_model, c.n_heads)
        sublayers = [partial(attention, mask=inputs[-1])]
        if exercise is DecoderBlock:
            own = own_weights(p, "cross_attention")
            across = part("CrossAttention", own, c.d_model, c.n_heads)
            sublayers = [
                partial(attention, mask=back),
                partial(across, memory=memory, memory_mask=seen),
            ]
        own = own_weights(p, "feed_forward")
        sublayers.append(part("FeedForward", own, c.d_model, c.d_ff, torch.relu))
        y = x
        for i, sublayer in enumerate(sublayers, start=1):
            norm = part("RMSNorm", {"weight": p[f"norm_{i}"]}, c.d_model, c.norm_eps)
            y = case.call(parts["pre_norm"], y, sublayer, norm)
        expected = oracle(*in_float64(inputs))
        case.close(y, expected, "the parts one by one", like=x)
        case.close(case.call(module, *inputs), expected, exercise.name, like=x)


@whole_encoder_decoder.requires(
    "sinusoidal gives the positions, and three steps with shift_right and lesson 09's "
    "parts are those of PyTorch",
    "The loss of the first step compares `shift_right` and `cross_entropy`, the next ones "
    "the gradients, the clipping, the rate and AdamW.",
)
def _(parts, case):
    case.close(case.call(parts["sinusoidal"], 9, 12), waves(9, 12), "nine positions")
    model, oracle = filled_model(parts["EncoderDecoder"], case, SMALL, seed=2_400)
    model, theirs = model.double(), list(oracle.p.values())
    for p in theirs:
        p.requires_grad_()
    source, target = sources([6, 2, 4], SMALL, 2_401), target_ids(3, 5, SMALL, 2_402)
    options = dict(lr=1.0, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)
    with case.unrecorded():
        mine = case.call_in_place(parts["AdamW"], model.parameters(), **options)
    right = torch.optim.AdamW(theirs, **options)
    for step, right_rate in enumerate((0.025, 0.05, 0.03), start=1):
        rate = case.call(parts["learning_rate"], step, 0.05, 0.01, 2, 4)
        case.true(
            math.isclose(rate, right_rate, rel_tol=1e-9),
            f"The rate of step {step} is {rate}, expected {right_rate}.",
        )
        for optimizer in (mine, right):
            optimizer.param_groups[0]["lr"] = right_rate
            optimizer.zero_grad()
        read = case.call(parts["shift_right"], target, 1)
        logits = case.call_in_place(model, source, read)
        loss = case.call_in_place(parts["cross_entropy"], logits, target)
        right_logits = oracle(source, shifted(target, 1))
        right_loss = F.cross_entropy(right_logits.flatten(0, 1), target.flatten())
        case.close(loss, right_loss, f"the loss of step {step}", tolerance=SINES)
        loss.backward()
        right_loss.backward()
        with case.unrecorded():  # the losses tell
            case.call_in_place(parts["clip_gradients"], list(model.parameters()), 0.5)
            case.call_in_place(mine.step)
        nn.utils.clip_grad_norm_(theirs, 0.5)
        right.step()


@whole_encoder_decoder.requires(
    "translate writes with EncoderDecoder what is written without keeping anything",
    "Compare `decode` with the memory and with the list of pairs.",
)
def _(parts, case):
    module, oracle = filled_model(parts["EncoderDecoder"], case, SMALL, seed=2_500)
    source, rows = sources([6, 2, 4], SMALL, seed=2_501), []
    for row in source:
        ids, text = [1], row[row != SMALL.pad_id][None]
        while len(ids) <= 7:
            ids.append(int(oracle(text, torch.tensor([ids]))[0, -1].argmax()))
        rows.append(ids[1:])
    actual = case.call(parts["translate"], module, source, 1, -1, 7)
    case.equal(actual, torch.tensor(rows), "seven tokens a row: the result")
