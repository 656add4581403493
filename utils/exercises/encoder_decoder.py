"""Lesson 13: attention from one sequence to another, and the model made of it."""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from utils.check.exercise import Exercise, IntegrationCheck
from utils.exercises.forward_pass import (
    causal,
    doubled,
    own_weights,
    trained,
    weights_for,
)
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


def attention_shapes(c, name):
    return {f"{name}.{w}": (c.d_model, c.d_model) for w in FOUR}


def feed_forward_shapes(c):
    return {
        "feed_forward.w_1": (c.d_ff, c.d_model),
        "feed_forward.w_2": (c.d_model, c.d_ff),
    }


def encoder_shapes(c):
    return (
        {f"norm_{i}": (c.d_model,) for i in (1, 2)}
        | attention_shapes(c, "attention")
        | feed_forward_shapes(c)
    )


def decoder_shapes(c):
    return (
        {f"norm_{i}": (c.d_model,) for i in (1, 2, 3)}
        | attention_shapes(c, "attention")
        | attention_shapes(c, "cross_attention")
        | feed_forward_shapes(c)
    )


def model_shapes(c):
    shapes = {
        "embedding": (c.vocab_size, c.d_model),
        "encoder_norm": (c.d_model,),
        "decoder_norm": (c.d_model,),
        "head": (c.vocab_size, c.d_model),
    }
    for i in range(c.n_layers):
        shapes |= {f"encoder.{i}.{n}": s for n, s in encoder_shapes(c).items()}
        shapes |= {f"decoder.{i}.{n}": s for n, s in decoder_shapes(c).items()}
    return shapes


def underscored(by_name):
    """Dotted names as `case.load` and `case.parameters` take them."""
    return {name.replace(".", "__"): value for name, value in by_name.items()}


# The oracle: PyTorch's own modules, in float64 ----------------------------------------

BATCH = dict(batch_first=True, dtype=torch.float64)
OPTIONS = dict(dropout=0.0, activation=F.relu, norm_first=True, bias=False) | BATCH


def hidden(mask, b, n_heads, t, s):
    """Our mask as PyTorch's modules read it: True = hidden, a matrix for each head."""
    if mask is None:
        return None
    return ~mask.expand(b, n_heads, t, s).flatten(0, 1)


def fill_attention(module, p):
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([p["w_q"], p["w_k"], p["w_v"]]))
        module.out_proj.weight.copy_(p["w_o"])


def torch_cross(x, memory, memory_mask=None, *, p, n_heads):
    b, t, s = len(x), x.shape[1], memory.shape[1]
    module = nn.MultiheadAttention(x.shape[-1], n_heads, bias=False, **BATCH)
    fill_attention(module, p)
    mask = hidden(memory_mask, b, n_heads, t, s)
    return module(x, memory, memory, attn_mask=mask, need_weights=False)[0]


def torch_pair(memory, p, n_heads):
    """Keys and values, each head a slice."""
    both = (memory.double() @ p[w].double().T for w in ("w_k", "w_v"))
    return tuple(torch.stack(y.chunk(n_heads, -1), 1) for y in both)


def torch_norm(weight, c):
    norm = nn.RMSNorm(c.d_model, c.norm_eps, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(weight)
    return norm


def torch_layer(kind, p, c):
    """One of PyTorch's layers with these weights, its LayerNorms made RMSNorms."""
    layer = kind(c.d_model, c.n_heads, c.d_ff, layer_norm_eps=c.norm_eps, **OPTIONS)
    for i in (1, 2, 3):
        if f"norm_{i}" in p:
            setattr(layer, f"norm{i}", torch_norm(p[f"norm_{i}"], c))
    fill_attention(layer.self_attn, own_weights(p, "attention"))
    if "norm_3" in p:
        fill_attention(layer.multihead_attn, own_weights(p, "cross_attention"))
    with torch.no_grad():
        layer.linear1.weight.copy_(p["feed_forward.w_1"])
        layer.linear2.weight.copy_(p["feed_forward.w_2"])
    return layer


def torch_encoder_block(p, c, x, mask=None):
    layer = torch_layer(nn.TransformerEncoderLayer, p, c)
    t = x.shape[1]
    return layer(x, src_mask=hidden(mask, len(x), c.n_heads, t, t))


def torch_decoder_block(p, c, x, memory, mask=None, memory_mask=None):
    layer = torch_layer(nn.TransformerDecoderLayer, p, c)
    b, t, s = len(x), x.shape[1], memory.shape[1]
    return layer(
        x,
        memory,
        tgt_mask=hidden(mask, b, c.n_heads, t, t),
        memory_mask=hidden(memory_mask, b, c.n_heads, t, s),
    )


def waves(t, d_model):
    """Sines and cosines of the positions, by loops."""
    table = torch.zeros(t, d_model, dtype=torch.float64)
    for position in range(t):
        for i in range(0, d_model, 2):
            angle = position / 10_000 ** (i / d_model)
            table[position, i] = math.sin(angle)
            table[position, i + 1] = math.cos(angle)
    return table


class Oracle(nn.Module):
    """The whole model, of PyTorch's layers."""

    def __init__(self, weights, c):
        super().__init__()
        self.p, self.c = doubled(weights), c
        self.embedding = nn.Parameter(self.p["embedding"])
        self.head = nn.Parameter(self.p["head"])
        self.encoder_norm = torch_norm(self.p["encoder_norm"], c)
        self.decoder_norm = torch_norm(self.p["decoder_norm"], c)
        self.encoder, self.decoder = (
            nn.ModuleList(
                torch_layer(kind, own_weights(self.p, f"{half}.{i}"), c)
                for i in range(c.n_layers)
            )
            for half, kind in (
                ("encoder", nn.TransformerEncoderLayer),
                ("decoder", nn.TransformerDecoderLayer),
            )
        )

    def embed(self, ids):
        return self.embedding[ids] + waves(ids.shape[1], self.c.d_model)

    def encode(self, source):
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=source == self.c.pad_id)
        return self.encoder_norm(x)

    def decode(self, target, memory, real=None):
        x, mask = self.embed(target), ~causal(target.shape[1])
        padding = None if real is None else ~real
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask, memory_key_padding_mask=padding)
        return F.linear(self.decoder_norm(x), self.head)

    def forward(self, source, target):
        return self.decode(target, self.encode(source), source != self.c.pad_id)


# Inputs, and modules with weights -----------------------------------------------------


def some_mask(*shape, seed):
    """Allows about half of the keys, and for every query the third."""
    mask = probe(*shape, seed=seed) > 0
    mask[..., 2] = True
    return mask


def real_places(lengths, s):
    """`(B, s)`, True for the first `lengths[b]` places of each row."""
    return torch.arange(s) < torch.tensor(lengths)[:, None]


def padding(lengths, s):
    return real_places(lengths, s)[:, None, None]


def sources(lengths, c, seed):
    """Rows of these lengths without padding in them, filled up with it."""
    ids = probe_ids(len(lengths), max(lengths), below=c.vocab_size - 1, seed=seed)
    ids = ids + (ids >= c.pad_id)  # every token but the padding
    return torch.where(real_places(lengths, max(lengths)), ids, c.pad_id)


def cross_weights(d_model, seed):
    shape, scale = (d_model, d_model), d_model**-0.5
    return {w: probe(*shape, seed=seed + i, scale=scale) for i, w in enumerate(FOUR)}


def filled_cross(answer, case, d_model, n_heads, seed):
    """The learner's module with weights, and the oracle with the same ones."""
    weights = cross_weights(d_model, seed)
    module = case.load(case.call(answer, d_model, n_heads), **weights)
    return module, partial(torch_cross, p=doubled(weights), n_heads=n_heads)


def block_weights(shapes, seed):
    """The hidden values are large: ReLU has no upper end."""
    weights = weights_for(shapes, seed)
    return weights | {"feed_forward.w_1": 5 * weights["feed_forward.w_1"]}


def filled_block(answer, case, c, seed, shapes, torch_block):
    weights = block_weights(shapes(c), seed)
    module = case.load(case.call(answer, c), **underscored(weights))
    return module, partial(torch_block, doubled(weights), c)


def filled_encoder(answer, case, c, seed):
    return filled_block(answer, case, c, seed, encoder_shapes, torch_encoder_block)


def filled_decoder(answer, case, c, seed):
    return filled_block(answer, case, c, seed, decoder_shapes, torch_decoder_block)


def filled_model(answer, case, c, seed):
    weights = weights_for(model_shapes(c), seed)
    module = case.load(case.call(answer, c), **underscored(weights))
    return module, Oracle(weights, c)


def other_dtypes(case, module, weights, oracle, *inputs, tolerance=None):
    """`oracle(weights, *inputs)` is right for a module in float64 and bfloat16 too."""
    for dtype in (torch.float64, torch.bfloat16):
        rounded = {n: w.to(dtype).double() for n, w in weights.items()}
        given = [x.to(dtype) for x in inputs]
        expected = oracle(rounded, *[x.double() for x in given])
        case.close(
            case.call(module.to(dtype), *given),
            expected,
            f"the result in {dtype}",
            like=given[0],
            tolerance=tolerance if dtype == torch.float64 else None,
        )


# shift_right --------------------------------------------------------------------------


def shifted(ids, start_id):
    rows = [[start_id, *row[:-1]] for row in ids.tolist()]
    return torch.tensor(rows, dtype=ids.dtype).reshape(ids.shape)


@shift_right.requires(
    "one row: the start, then every token but the last",
    "Write the row and its result below each other: at each place the upper one is the "
    "answer, the lower one the newest token that may be known.",
)
def _(answer, case):
    ids = torch.tensor([[5, 3, 8, 2]])
    case.equal(case.call(answer, ids, 7), shifted(ids, 7), "the result")


@shift_right.requires("each row of a batch by itself, and another start")
def _(answer, case):
    ids = probe_ids(3, 5, below=23, seed=1)
    for start in (1, 0, 30_000):
        actual = case.call(answer, ids=ids, start_id=start)
        case.equal(actual, shifted(ids, start), f"with start {start}, the result")


@shift_right.requires(
    "a single token is replaced by the start; the dtype stays, in any memory layout"
)
def _(answer, case):
    ids = torch.tensor([[9], [4]])
    case.equal(case.call(answer, ids, 6), shifted(ids, 6), "of one token, the result")
    for dtype in (torch.int32, torch.int16):
        ids = probe_ids(6, 2, below=23, seed=2).to(dtype).T
        case.equal(
            case.call(answer, ids, 3), shifted(ids, 3), f"of {dtype}, the result"
        )


@shift_right.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, probe_ids(2, 5, below=9), 1)


# CrossAttention -----------------------------------------------------------------------


class Used(TorchDispatchMode):
    """Notes which of a module's matrices something is computed with."""

    def __init__(self, module):
        super().__init__()
        named = module.named_parameters()
        self.known = {id(p): n.removesuffix(".weight") for n, p in named}
        self.names = set()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        self.names |= {self.known[id(a)] for a in args if id(a) in self.known}
        return f(*args, **(kwargs or {}))


def tensors_in(module) -> int:
    """How many tensors a module and its parts hold, in lists and dicts too."""
    values = tree_leaves([vars(part) for part in module.modules()])
    return sum(isinstance(value, torch.Tensor) for value in values)


@CrossAttention.requires(
    "w_q, w_k, w_v and w_o are square matrices without biases",
    "As in lesson 03's attention without shared heads.",
)
def _(answer, case):
    for d_model, n_heads in ((12, 3), (10, 5)):
        module = case.call(answer, d_model, n_heads)
        case.parameters(module, **{w: (d_model, d_model) for w in FOUR})


@CrossAttention.requires(
    "one head: queries from x, keys and values from the memory",
    "Write the shapes down: x is `(B, T, D)`, the memory `(B, S, D)`, and the weights "
    "must be `(…, T, S)`.",
)
def _(answer, case):
    module, oracle = filled_cross(answer, case, 6, 1, seed=20)
    case.agrees(module, oracle, probe(3, 4, 6, seed=23), probe(3, 4, 6, seed=24))
    case.agrees(module, oracle, probe(2, 5, 6, seed=21), probe(2, 7, 6, seed=22))


@CrossAttention.requires(
    "several heads: each looks by itself, with its own part of the width",
    "`split_heads` and `merge_heads` of lesson 03 do the cutting.",
)
def _(answer, case):
    for d_model, n_heads, seed in ((12, 3, 30), (10, 5, 40)):
        module, oracle = filled_cross(answer, case, d_model, n_heads, seed)
        for b, t, s in ((2, 5, 7), (3, 6, 4), (1, 1, 5)):
            x = probe(b, t, d_model, seed=seed + 5)
            case.agrees(module, oracle, x, probe(b, s, d_model, seed=seed + 6))


@CrossAttention.requires(
    "memory_mask hides keys of the memory, True = may look, and broadcasts",
    "The mask belongs to the scores, `(B, H, T, S)`; `attention` of lesson 02 takes it as "
    "it is, whatever its dimensions.",
)
def _(answer, case):
    module, oracle = filled_cross(answer, case, 12, 3, seed=50)
    x, memory = probe(4, 5, 12, seed=51), probe(4, 7, 12, seed=52)
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
    module, oracle = filled_cross(answer, case, 12, 3, seed=60)
    x, memory = probe(3, 5, 12, seed=61), probe(3, 7, 12, seed=62)
    row = padding([4, 0, 7], 7)
    position = some_mask(3, 1, 5, 7, seed=68)
    position[0, :, 3] = False
    head = some_mask(3, 3, 5, 7, seed=69)
    head[1, 1, 2] = False
    for mask in (row, position, head):
        case.agrees(module, oracle, x, memory, mask)
    case.gradients_agree(module, oracle, x, memory, row)


@CrossAttention.requires(
    "keys_values gives the keys and the values, split into heads",
    "Two tensors, keys first, both `(B, n_heads, S, d_head)`.",
)
def _(answer, case):
    for d_model, n_heads in ((12, 3), (10, 5)):
        module, _ = filled_cross(answer, case, d_model, n_heads, seed=70)
        memory = probe(2, 7, d_model, seed=71)
        pair = case.call(module.keys_values, memory)
        case.is_tuple(pair, 2, "the result of keys_values")
        expected = torch_pair(memory, cross_weights(d_model, 70), n_heads)
        for name, one, other in zip(("keys", "values"), pair, expected, strict=True):
            case.close(one, other, f"the {name}", like=memory)


@CrossAttention.requires(
    "given that pair in place of the memory, it gives the same and projects nothing",
    "`isinstance(memory, tuple)` tells the two apart. With a pair, neither `w_k` nor "
    "`w_v` runs.",
)
def _(answer, case):
    module, oracle = filled_cross(answer, case, 12, 3, seed=80)
    x, memory = probe(2, 5, 12, seed=81), probe(2, 7, 12, seed=82)
    mask = padding([4, 7], 7)
    pair = case.call(module.keys_values, memory)
    expected = oracle(x.double(), memory.double(), mask)
    for given in (pair, tuple(pair)):
        actual = case.call(module, x, given, mask)
        case.close(actual, expected, "with the pair, the result")
    other = tuple(y.flip(2) for y in pair)
    expected = oracle(x.double(), memory.flip(1).double())
    case.close(case.call(module, x, other), expected, "with another pair, the result")
    with Used(module) as used:
        case.call_in_place(module, x, tuple(pair), mask)
    for name in ("w_k", "w_v"):
        case.true(
            name not in used.names,
            f"`{name}` ran although the pair was given. That is the work which the pair "
            "saves.",
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
    module, oracle = filled_cross(answer, case, 12, 3, seed=120)
    before = tensors_in(module)
    x, memory = probe(2, 5, 12, seed=121), probe(2, 7, 12, seed=122)
    mask = some_mask(2, 1, 5, 7, seed=123)
    case.call_in_place(module, x, memory, mask)
    memory.data.copy_(probe(2, 7, 12, seed=124))  # another text in the same place
    expected = oracle(x.double(), memory.double(), mask)
    actual = case.call_in_place(module.eval(), x, memory, mask)
    case.close(actual, expected, "for another memory in the same place, the result")
    case.true(
        tensors_in(module) <= before,
        "After a call the module holds more tensors than before; it may keep none.",
    )


@CrossAttention.requires("any dtype and memory layout give what they should")
def _(answer, case):
    module, oracle = filled_cross(answer, case, 12, 3, seed=90)
    x, memory = probe(2, 5, 12, seed=91), probe(2, 7, 12, seed=94)
    case.agrees(module, oracle, strided(x), strided(30 * memory))
    oracle = lambda p, *inputs: torch_cross(*inputs, p=p, n_heads=3)  # noqa: E731
    other_dtypes(case, module, cross_weights(12, 90), oracle, x, memory)


@CrossAttention.requires("gradients reach x, the memory and all four matrices")
def _(answer, case):
    module, oracle = filled_cross(answer, case, 12, 3, seed=100)
    x, memory = probe(2, 5, 12, seed=101), probe(2, 7, 12, seed=102)
    case.gradients_agree(module, oracle, x, memory)
    trained(case, module, x, memory)


@CrossAttention.requires("it creates nothing on another device")
def _(answer, case):
    module, _ = filled_cross(answer, case, 12, 3, seed=110)
    case.any_device(module, probe(2, 5, 12), probe(2, 7, 12))


# EncoderBlock -------------------------------------------------------------------------


@EncoderBlock.requires(
    "norm_1, attention, norm_2 and feed_forward have their parameters",
    "`RMSNorm`, `MultiHeadAttention`, `RMSNorm` and `FeedForward`: which takes which "
    "sizes of the config?",
)
def _(answer, case):
    for c in (SMALL, OTHER):
        case.parameters(case.call(answer, c), **underscored(encoder_shapes(c)))


@EncoderBlock.requires(
    "attention, then the feed-forward network with ReLU, each pre-norm; every position "
    "sees all others",
    "Lesson 06's `pre_norm`, twice, and `torch.relu` is the activation. An encoder has "
    "its whole text before it: which mask does it need?",
)
def _(answer, case):
    for c, seed in ((SMALL, 210), (OTHER, 220)):
        module, oracle = filled_encoder(answer, case, c, seed)
        case.agrees(module, oracle, probe(2, 7, c.d_model, seed=seed + 1))
        case.agrees(module, oracle, probe(3, 5, c.d_model, seed=seed + 2, scale=0.1))


@EncoderBlock.requires("a mask is passed on to attention")
def _(answer, case):
    module, oracle = filled_encoder(answer, case, SMALL, seed=230)
    x = probe(4, 7, 12, seed=231)
    case.agrees(module, oracle, x, padding([3, 7, 1, 5], 7))
    case.agrees(module, oracle, x, mask=some_mask(4, 3, 7, 7, seed=232))


@EncoderBlock.requires("float64, bfloat16 and `eval()` work")
def _(answer, case):
    module, oracle = filled_encoder(answer, case, SMALL, seed=240)
    case.agrees(module.eval(), oracle, probe(3, 7, 12, seed=241))
    weights, x = block_weights(encoder_shapes(SMALL), 240), probe(3, 5, 12, seed=243)
    oracle = lambda p, x: torch_encoder_block(p, SMALL, x)  # noqa: E731
    other_dtypes(case, module, weights, oracle, x, tolerance=SINES)


@EncoderBlock.requires("gradients reach the input and every parameter")
def _(answer, case):
    module, oracle = filled_encoder(answer, case, SMALL, seed=250)
    case.gradients_agree(module, oracle, probe(2, 5, 12, seed=251))
    trained(case, module, probe(2, 5, 12, seed=252))


@EncoderBlock.requires("it creates nothing on another device")
def _(answer, case):
    module, _ = filled_encoder(answer, case, SMALL, seed=260)
    case.any_device(module, probe(2, 5, 12), torch.ones(5, 5, dtype=torch.bool))


# DecoderBlock -------------------------------------------------------------------------


@DecoderBlock.requires(
    "three norms, attention, cross_attention and feed_forward have their parameters"
)
def _(answer, case):
    for c in (SMALL, OTHER):
        case.parameters(case.call(answer, c), **underscored(decoder_shapes(c)))


@DecoderBlock.requires(
    "x looks at itself, then at a memory of another length, then thinks, each pre-norm",
    "Three lines of `pre_norm`. The second sublayer takes the memory too: "
    "`functools.partial` or a small function binds it. The memory comes in normalised, "
    "from the end of the encoder; only x is normalised here.",
)
def _(answer, case):
    for c, seed in ((SMALL, 310), (OTHER, 320)):
        module, oracle = filled_decoder(answer, case, c, seed)
        x = probe(2, 5, c.d_model, seed=seed + 1)
        memory = probe(2, 7, c.d_model, seed=9)
        case.agrees(module, oracle, x, memory)
        case.agrees(module, oracle, 0.1 * x, 3.0 * memory[:, :4])


@DecoderBlock.requires(
    "mask is for looking back, memory_mask for looking across",
    "One is `(T, T)`, the other `(B, 1, 1, S)`: which attention has which scores?",
)
def _(answer, case):
    module, oracle = filled_decoder(answer, case, SMALL, seed=330)
    x, memory = probe(4, 5, 12, seed=331), probe(4, 7, 12, seed=332)
    back, across = some_mask(4, 3, 5, 5, seed=333), some_mask(4, 3, 5, 5, seed=334)
    case.agrees(module, oracle, x, memory[:, :5], mask=back, memory_mask=across)
    rows = padding([3, 7, 1, 5], 7)
    for masks in ((causal(5),), (None, rows), (causal(5), rows)):
        case.agrees(module, oracle, x, memory, *masks)


@DecoderBlock.requires(
    "the memory may come as the pair that `cross_attention.keys_values` made",
    "Hand the memory on as it is, and ask nothing of its shape.",
)
def _(answer, case):
    module, oracle = filled_decoder(answer, case, SMALL, seed=340)
    x, memory = probe(2, 5, 12, seed=341), probe(2, 7, 12, seed=342)
    weights = own_weights(block_weights(decoder_shapes(SMALL), 340), "cross_attention")
    pair = tuple(y.float() for y in torch_pair(memory, weights, 3))
    expected = oracle(x.double(), memory.double(), causal(5))
    case.close(
        case.call(module, x, pair, causal(5)), expected, "with a pair, the result"
    )


@DecoderBlock.requires("float64, bfloat16 and `eval()` work")
def _(answer, case):
    module, oracle = filled_decoder(answer, case, SMALL, seed=350)
    x, memory = probe(2, 5, 12, seed=351), probe(2, 7, 12, seed=352)
    case.agrees(module.eval(), oracle, x, memory)
    weights = block_weights(decoder_shapes(SMALL), 350)
    oracle = lambda p, *inputs: torch_decoder_block(p, SMALL, *inputs)  # noqa: E731
    other_dtypes(case, module, weights, oracle, x, memory, tolerance=SINES)


@DecoderBlock.requires("gradients reach x, the memory and every parameter")
def _(answer, case):
    module, oracle = filled_decoder(answer, case, SMALL, seed=360)
    x, memory = probe(2, 5, 12, seed=361), probe(2, 7, 12, seed=362)
    case.gradients_agree(module, oracle, x, memory)
    trained(case, module, x, memory)


@DecoderBlock.requires("it creates nothing on another device")
def _(answer, case):
    module, _ = filled_decoder(answer, case, SMALL, seed=370)
    case.any_device(module, probe(2, 5, 12), probe(2, 7, 12))


# EncoderDecoder -----------------------------------------------------------------------


def close_to(case, module, actual, expected, what):
    like = next(module.parameters())
    tolerance = SINES if like.dtype == torch.float64 else None
    case.close(actual, expected, what, like=like, tolerance=tolerance)


@EncoderDecoder.requires(
    "embedding, encoder, encoder_norm, decoder, decoder_norm and head are there",
    "One embedding serves both halves; `encoder` and `decoder` are an `nn.ModuleList` "
    "each; every norm is an `RMSNorm`.",
)
def _(answer, case):
    for c in (SMALL, OTHER):
        module = case.call(answer, c)
        for half in ("encoder", "decoder"):
            blocks = getattr(getattr(module, half, None), "_modules", {}).values()
            case.true(
                len(set(map(id, blocks))) == len(blocks),
                f"One block stands in several places of `{half}`: `[Block(config)] * n` "
                "makes one object. Each layer needs its own.",
            )
        norms = {
            id(getattr(module, f"{half}_norm", half)) for half in ("encoder", "decoder")
        }
        case.true(
            len(norms) == 2,
            "`encoder_norm` and `decoder_norm` are one object; each half has its own.",
        )
        case.parameters(module, **underscored(model_shapes(c)))
        weights = dict(module.named_parameters())
        for half in ("encoder", "decoder"):
            first, second = (f"{half}.{i}.attention.w_q.weight" for i in (0, 1))
            case.true(
                not torch.equal(weights[first], weights[second]),
                f"The blocks of `{half}` start with the same values.",
            )


@EncoderDecoder.requires("the configuration is kept in `config`")
def _(answer, case):
    module = case.call(answer, SMALL)
    case.equal(getattr(module, "config", None), SMALL, "`config`")


@EncoderDecoder.requires(
    "encode: embedding plus positions, every block, the norm; and the mask of the source",
    "Begin with `embed`; each block reads what the one before has left; the norm comes "
    "last. The encoder hides nothing but padding. Print the mask for one row: it is "
    "`(B, 1, 1, S)`, boolean, True where there is text.",
)
def _(answer, case):
    for c, seed in ((SMALL, 400), (OTHER, 500)):
        module, oracle = filled_model(answer, case, c, seed)
        source = sources([7, 7], c, seed=1)
        result = case.call(module.encode, source)
        case.is_tuple(result, 2, "the result of encode")
        close_to(case, module, result[0], oracle.encode(source), "the memory")
        case.equal(result[1], torch.ones(2, 1, 1, 7, dtype=torch.bool), "its mask")


@EncoderDecoder.requires(
    "a source with padding at the end is read as without it",
    "Which token is padding stands in `config.pad_id`; `source != pad_id` says where text "
    "is. Who must not look at the rest?",
)
def _(answer, case):
    module, oracle = filled_model(answer, case, SMALL, seed=600)
    lengths = [5, 3, 1, 7]
    source = sources(lengths, SMALL, seed=2)
    memory, mask = case.call(module.encode, source)
    case.equal(mask, padding(lengths, 7), "the mask")
    for row, n in enumerate(lengths):
        actual, alone = memory[row : row + 1, :n], source[row : row + 1, :n]
        expected = oracle.encode(alone)
        close_to(case, module, actual, expected, f"row {row} of the memory")


@EncoderDecoder.requires(
    "padding may stand anywhere in a row, and in every row: the shapes stay",
    "The mask is True where `source != pad_id`, place by place.",
)
def _(answer, case):
    module, oracle = filled_model(answer, case, SMALL, seed=650)
    everywhere = F.pad(sources([5, 3], SMALL, seed=21), (0, 2), value=SMALL.pad_id)
    gaps = sources([7, 7, 7], SMALL, seed=22)
    gaps[0, :2] = gaps[1, 3] = gaps[2, 0] = gaps[2, 4:6] = SMALL.pad_id
    for source, what in (
        (everywhere, "with padding at the end of every row"),
        (gaps, "with padding in front and in the middle"),
    ):
        memory, mask = case.call(module.encode, source)
        real = source != SMALL.pad_id
        case.equal(mask, real[:, None, None], f"{what}, the mask")
        case.is_tensor(memory, "the memory")
        shape = (*source.shape, 12)
        case.equal(tuple(memory.shape), shape, f"{what}, the memory's shape")
        what = f"{what}, the memory of what is text"
        close_to(case, module, memory[real], oracle.encode(source)[real], what)


def target_ids(b, t, c, seed):
    """Without padding, which the model may hide in a target or not."""
    return sources([t] * b, c, seed)


@EncoderDecoder.requires(
    "decode: each target position sees itself, what came before, and the whole memory",
    "Take a target of one token first: `embed`, each block with the same memory, the "
    "norm, the head. Then change the last of five tokens and see which logits move: only "
    "the last may.",
)
def _(answer, case):
    for c, seed in ((SMALL, 700), (OTHER, 800)):
        module, oracle = filled_model(answer, case, c, seed)
        memory, target = probe(2, 7, c.d_model, seed=3), target_ids(2, 5, c, seed=4)
        actual = case.call(module.decode, target, memory)
        expected = oracle.decode(target, memory.double())
        close_to(case, module, actual, expected, "the logits")
        real = real_places([7, 4], 7)
        actual = case.call(module.decode, target, memory, real[:, None, None])
        expected = oracle.decode(target, memory.double(), real)
        close_to(case, module, actual, expected, "with a mask, the logits")


@EncoderDecoder.requires(
    "decode takes a list with one pair of keys and values for each block, too",
    "`isinstance(memory, list)`; block i gets the i-th.",
)
def _(answer, case):
    c = OTHER
    module, oracle = filled_model(answer, case, c, seed=900)
    memory, target = probe(2, 7, c.d_model, seed=5), target_ids(2, 5, c, seed=6)
    kept = []
    for i in range(c.n_layers):
        weights = own_weights(oracle.p, f"decoder.{i}.cross_attention")
        kept.append(tuple(y.float() for y in torch_pair(memory, weights, c.n_heads)))
    actual = case.call(module.decode, target, kept)
    expected = oracle.decode(target, memory.double())
    close_to(case, module, actual, expected, "the logits")
    real = real_places([3, 7], 7)
    actual = case.call(module.decode, target, kept, real[:, None, None])
    expected = oracle.decode(target, memory.double(), real)
    close_to(case, module, actual, expected, "with a list and a mask, the logits")


@EncoderDecoder.requires(
    "source and target together give the logits of PyTorch's layers, up to max_len tokens",
    "`forward` is `encode`, then `decode` with both of its results. Only more than "
    "`max_len` tokens are too many.",
)
def _(answer, case):
    for c, lengths, t in (
        (SMALL, [6, 2, 4], 5),
        (OTHER, [OTHER.max_len, 1], OTHER.max_len),
    ):
        module, oracle = filled_model(answer, case, c, seed=1_000)
        source = sources(lengths, c, seed=7)
        target = target_ids(len(lengths), t, c, seed=8)
        actual = case.call(module, source, target)
        close_to(case, module, actual, oracle(source, target), "the logits")


@EncoderDecoder.requires(
    "a row of padding alone is a ValueError that names the row, an empty source one too",
    "Such a row has nothing to look at: the model would answer from nothing, or with NaN. "
    "Find the first row in which no token is real.",
)
def _(answer, case):
    module, _ = filled_model(answer, case, SMALL, seed=1_200)
    target, padded = target_ids(3, 4, SMALL, seed=12), torch.full((1, 6), SMALL.pad_id)
    case.raises(ValueError, module, padded, target[:1], because="a source of padding")
    for row in (1, 2):
        source = sources([5, 4, 3], SMALL, seed=11)
        source[row] = SMALL.pad_id
        options = dict(mentions=(row,), because=f"row {row} is padding")
        case.raises(ValueError, module.encode, source, **options)
        case.raises(ValueError, module, source, target, **options)
    case.raises(ValueError, module, source[:, :0], target, because="no token")


@EncoderDecoder.requires(
    "a source or target longer than max_len is a ValueError that names both"
)
def _(answer, case):
    module, _ = filled_model(answer, case, SMALL, seed=1_400)
    short, long = sources([5, 5], SMALL, seed=12), sources([12, 12], SMALL, seed=13)
    for what, args in (("source", (long, short)), ("target", (short, long))):
        because = f"a {what} of 12 tokens where max_len is 11"
        case.raises(ValueError, module, *args, mentions=(12, 11), because=because)


@EncoderDecoder.requires("float64, `eval()` and later calls with other sources work")
def _(answer, case):
    module, oracle = filled_model(answer, case, SMALL, seed=1_500)
    module = module.double().eval()
    for lengths, t in (((4, 6), 3), ((6, 2), 3), ((1,), 8), ((5, 1, 3), 1)):
        source = sources(list(lengths), SMALL, seed=14)
        target = target_ids(len(lengths), t, SMALL, seed=15)
        actual = case.call(module, source, target)
        close_to(case, module, actual, oracle(source, target), "the logits")


@EncoderDecoder.requires("gradients reach every parameter")
def _(answer, case):
    module, _ = filled_model(answer, case, SMALL, seed=1_600)
    source, target = (
        sources([7, 5, 2], SMALL, seed=16),
        target_ids(3, 5, SMALL, seed=17),
    )
    trained(case, module, source, target)


@EncoderDecoder.requires("it creates nothing on another device")
def _(answer, case):
    module, _ = filled_model(answer, case, SMALL, seed=1_700)
    inputs = sources([4, 3], SMALL, seed=17), target_ids(2, 5, SMALL, seed=18)
    case.any_device(module, *inputs)


# translate ----------------------------------------------------------------------------

START, END = 5, 3


class CountedLinear(nn.Linear):
    """Counts how often it runs."""

    def __init__(self, seed):
        super().__init__(8, 8, bias=False)
        self.ran = 0
        with torch.no_grad():
            self.weight.copy_(probe(8, 8, seed=seed, scale=0.6))

    def forward(self, x):
        self.ran += 1
        return super().forward(x)


class ToyAttention(nn.Module):
    """Cross-attention of one head with fixed weights."""

    def __init__(self, seed):
        super().__init__()
        self.w_q, self.w_k, self.w_v = (CountedLinear(seed + i) for i in range(3))

    def keys_values(self, memory):
        return self.w_k(memory)[:, None], self.w_v(memory)[:, None]  # B 1 S D

    def forward(self, x, memory, mask):
        k, v = memory if isinstance(memory, tuple) else self.keys_values(memory)
        scores = self.w_q(x)[:, None] @ k.mT
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return x + (torch.softmax(scores, -1) @ v)[:, 0]


class Toy(nn.Module):
    """Stands for a model: what comes next depends on all that it is given."""

    def __init__(self, seed=0, end_id=END, pad_id=0, max_len=10, pull=100.0):
        super().__init__()
        self.config = Sizes(13, 8, 2, 1, 0, max_len, pad_id=pad_id)
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
        if target.shape[1] > self.config.max_len:
            raise RuntimeError("the decoder was given more than max_len tokens")
        x = self.embed(target)
        x = x + x.cumsum(1)
        for i, block in enumerate(self.decoder):
            own = memory[i] if isinstance(memory, list) else memory
            x = block.cross_attention(x, own, memory_mask)
        logits = torch.sin(9.0 * (x @ self.head))  # the likeliest changes at each step
        place = (target.cumsum(1) % 5 == 2)[..., None]  # where a text may end
        end = torch.arange(13, device=x.device) == self.end_id
        return logits.masked_fill(end, -50.0) + (place & end) * self.pull


def greedy(model, source, start_id, end_id, max_tokens):
    """Row by row, without padding, everything computed again at each step."""
    pad_id, rows = model.config.pad_id, []
    with torch.no_grad():
        for row in source:
            memory, _ = model.encode(row[row != pad_id][None])
            ids = [start_id]
            while len(ids) <= max_tokens and (len(ids) == 1 or ids[-1] != end_id):
                logits = model.decode(torch.tensor([ids]), memory)
                ids.append(int(logits[0, -1].argmax()))
            rows.append(ids[1:])
    longest = max(map(len, rows))
    return torch.tensor([r + [pad_id] * (longest - len(r)) for r in rows])


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
    "of the next token? The start stands in front of what the decoder reads, and is no "
    "part of the result.",
)
def _(answer, case):
    for seed, text, n in ((0, 2, 9), (7, 11, 9), (1, 1, 2), (1, 1, 1), (3, 3, 1)):
        source = toy_source([5], text)
        expect(case, answer, source, f"{n} steps", max_tokens=n, seed=seed)


@translate.requires(
    "a row goes up to its end_id, which is part of the result",
    "Stop when the end has been written, not when it would be.",
)
def _(answer, case):
    for seed in (1, 2, 3):
        expect(case, answer, toy_source([5], seed), "one row", seed=seed)


@translate.requires(
    "several rows, some padded: each is what it would be alone, filled up with pad_id",
    "Rows end at different steps. The loop goes on until all have ended; those that have "
    "must write padding from then on.",
)
def _(answer, case):
    for seed in (4, 5, 6):
        expect(case, answer, toy_source([7, 2, 5, 3], seed), "four rows", seed=seed)


@translate.requires("another start, end and padding than in the cases before")
def _(answer, case):
    source = toy_source([6, 3, 4], 7, pad_id=11)
    for end in (8, 11):  # 11 is the padding too
        expect(case, answer, source, "other ids", start=1, end=end, seed=7, pad_id=11)
    expect(
        case, answer, source, "0 as start and end", start=0, end=0, seed=12, pad_id=11
    )


@translate.requires(
    "the encoder runs once, and each block makes keys and values of the memory once",
    "`keys_values` of every block's `cross_attention`, before the loop; `decode` takes the "
    "list of pairs in place of the memory.",
)
def _(answer, case):
    model, _ = expect(case, answer, toy_source([7, 2, 5], 8), "three rows", seed=8)
    n = model.encoded
    case.note("for each row" if n == 3 else n > 2)
    case.true(n == 1, f"The encoder ran {n} times; once is enough.")
    case.true(
        model.without_pairs == 0,
        f"`decode` was given no list of pairs in {model.without_pairs} of "
        f"{model.decoded} calls.",
    )
    for w in ("w_k", "w_v"):
        ran = [getattr(block.cross_attention, w).ran for block in model.decoder]
        case.note(max(ran) > 2)
        case.true(
            ran == [1, 1],
            f"In the two blocks `{w}` ran {ran[0]} and {ran[1]} times on the memory; once "
            "each is asked for.",
        )


@translate.requires("it stops as soon as all rows have ended")
def _(answer, case):
    source = toy_source([7, 2, 5, 3], 10)
    model, expected = expect(case, answer, source, "four rows", seed=10)
    n = expected.shape[1]
    case.true(
        model.decoded <= n,
        f"The longest row has {n} tokens, and the decoder ran {model.decoded} times.",
    )


@translate.requires(
    "no gradients are recorded, and the model is left in the mode it was in",
    "`eval()` and `train()` change the caller's model. The mode is the caller's affair; "
    "whoever changes it must put it back.",
)
def _(answer, case):
    for mode in (True, False):
        model = Toy(seed=1).train(mode)
        case.call_in_place(answer, model, toy_source([5], 1), START, END, 3)
        case.true(not model.grad_seen, "The decoder ran with gradients enabled.")
        case.true(
            all(part.training == mode for part in model.modules()),
            f"The model came in with `training` {mode} and is left with {not mode}.",
        )


@translate.requires(
    "max_tokens may be as large as max_len",
    "The decoder reads the start and all tokens but the last: `max_tokens` in all.",
)
def _(answer, case):
    for pull in (100.0, 0.0):  # without a pull the end never comes
        options = dict(max_tokens=10, seed=3, pull=pull)
        expect(case, answer, toy_source([5], 3), "all of max_len", **options)


@translate.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, Toy(), toy_source([5, 3], 1), START, END, 3)


@translate.requires(
    "max_tokens below 1 or above max_len is a ValueError",
    "Test `max_tokens` before anything runs.",
)
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
    module, oracle = filled_cross(parts["CrossAttention"], case, 12, 3, seed=2_000)
    p = cross_weights(12, 2_000)
    x, memory = probe(3, 5, 12, seed=2_001), probe(3, 7, 12, seed=2_002)
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
    actual = case.call(module, x, memory, mask)
    case.close(actual, expected, "CrossAttention", like=x)


def parts_of_a_block(parts, case, p, c, n_norms):
    """Attention, feed-forward network and norms of a block, of the learner's parts."""
    attention = case.call(parts["MultiHeadAttention"], c.d_model, c.n_heads)
    case.load(attention, **own_weights(p, "attention"))
    network = case.call(parts["FeedForward"], c.d_model, c.d_ff, torch.relu)
    case.load(network, **own_weights(p, "feed_forward"))
    norms = []
    for i in range(1, n_norms + 1):
        norm = case.call(parts["RMSNorm"], c.d_model, c.norm_eps)
        norms.append(case.load(norm, weight=p[f"norm_{i}"]))
    return attention, network, *norms


@whole_encoder_decoder.requires(
    "pre_norm, RMSNorm, MultiHeadAttention and FeedForward make up EncoderBlock",
    "Write the block out with your parts and compare after each line.",
)
def _(parts, case):
    module, oracle = filled_encoder(parts["EncoderBlock"], case, SMALL, seed=2_100)
    p = block_weights(encoder_shapes(SMALL), 2_100)
    attention, network, one, two = parts_of_a_block(parts, case, p, SMALL, 2)
    mask = case.call(parts["padding_mask"], torch.tensor([7, 3]), 7)
    x = probe(2, 7, 12, seed=2_101, scale=0.3)
    y = case.call(parts["pre_norm"], x, partial(attention, mask=mask), one)
    y = case.call(parts["pre_norm"], y, network, two)
    expected = oracle(x.double(), mask)
    case.close(y, expected, "the parts one by one", like=x)
    case.close(case.call(module, x, mask), expected, "EncoderBlock", like=x)


@whole_encoder_decoder.requires(
    "with causal_mask and CrossAttention they make up DecoderBlock",
    "Two masks are at work: causal for looking back, padding for looking across.",
)
def _(parts, case):
    c = SMALL
    module, oracle = filled_decoder(parts["DecoderBlock"], case, c, seed=2_200)
    p = block_weights(decoder_shapes(c), 2_200)
    attention, network, one, two, three = parts_of_a_block(parts, case, p, c, 3)
    cross = case.call(parts["CrossAttention"], c.d_model, c.n_heads)
    case.load(cross, **own_weights(p, "cross_attention"))
    x, memory = probe(2, 5, 12, seed=2_201, scale=0.3), probe(2, 7, 12, seed=2_202)
    mask = case.call(parts["causal_mask"], 5)
    seen = case.call(parts["padding_mask"], torch.tensor([7, 3]), 7)
    y = case.call(parts["pre_norm"], x, partial(attention, mask=mask), one)
    across = partial(cross, memory=memory, memory_mask=seen)
    y = case.call(parts["pre_norm"], y, across, two)
    y = case.call(parts["pre_norm"], y, network, three)
    expected = oracle(x.double(), memory.double(), causal(5), seen)
    case.close(y, expected, "the parts one by one", like=x)
    actual = case.call(module, x, memory, mask, seen)
    case.close(actual, expected, "DecoderBlock", like=x)


@whole_encoder_decoder.requires(
    "sinusoidal gives the positions that EncoderDecoder adds"
)
def _(parts, case):
    module, oracle = filled_model(parts["EncoderDecoder"], case, SMALL, seed=2_300)
    case.close(case.call(parts["sinusoidal"], 9, 12), waves(9, 12), "nine positions")
    source, target = sources([6, 2, 4], SMALL, 2_301), target_ids(3, 5, SMALL, 2_302)
    case.close(case.call(module, source, target), oracle(source, target), "the logits")


@whole_encoder_decoder.requires(
    "three steps with shift_right and lesson 09's parts are those of PyTorch",
    "The loss of the first step compares `shift_right` and `cross_entropy`, the next ones "
    "the gradients, the clipping, the rate and AdamW.",
)
def _(parts, case):
    model, oracle = filled_model(parts["EncoderDecoder"], case, SMALL, seed=2_400)
    model = model.double()
    source, target = sources([6, 2, 4], SMALL, 2_401), target_ids(3, 5, SMALL, 2_402)
    options = dict(lr=1.0, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)
    with case.unrecorded():
        mine = case.call_in_place(parts["AdamW"], model.parameters(), **options)
    theirs = torch.optim.AdamW(oracle.parameters(), **options)
    for step, right_rate in enumerate((0.025, 0.05, 0.03), start=1):
        rate = case.call(parts["learning_rate"], step, 0.05, 0.01, 2, 4)
        case.true(
            math.isclose(rate, right_rate, rel_tol=1e-9),
            f"The rate of step {step} is {rate}, expected {right_rate}.",
        )
        for optimizer in (mine, theirs):
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
        nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
        theirs.step()


@whole_encoder_decoder.requires(
    "translate writes with EncoderDecoder what is written without keeping anything",
    "Compare `decode` with the memory and with the list of pairs.",
)
def _(parts, case):
    module, oracle = filled_model(parts["EncoderDecoder"], case, SMALL, seed=2_500)
    source, ran = sources([6, 2, 4], SMALL, seed=2_501), [0, 0]

    def count(i, *_):
        ran[i] += 1

    for i, block in enumerate(module.decoder):
        layer = getattr(block.cross_attention, "w_k", None)
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(partial(count, i))
    rows = []
    for row in source:
        ids, text = [1], row[row != SMALL.pad_id][None]
        while len(ids) <= 7:
            ids.append(int(oracle(text, torch.tensor([ids]))[0, -1].argmax()))
        rows.append(ids[1:])
    actual = case.call(parts["translate"], module, source, 1, -1, 7)
    case.equal(actual, torch.tensor(rows), "seven tokens a row: the result")
    case.true(
        max(ran) <= 1,
        f"`w_k` ran {ran[0]} and {ran[1]} times in the two blocks; once is enough.",
    )
