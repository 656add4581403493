"""Lesson 13: attention from one sequence to another, and the model made of it."""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from utils.check.exercise import Exercise, IntegrationCheck
from utils.exercises.forward_pass import (
    Holder,
    causal,
    doubled,
    numbers_in,
    own_weights,
    trained,
    weights_for,
)
from utils.probe import probe, probe_ids, strided

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
# The learner's sines are float32 in any case.
SINES = 1e-5
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


def load_all(case, module, weights):
    return case.load(module, **{n.replace(".", "__"): w for n, w in weights.items()})


# The oracle: PyTorch's own modules, in float64 ----------------------------------------


def hidden(mask, b, n_heads, t, s):
    """Our mask as PyTorch's modules read it: True = hidden, a matrix for each head."""
    if mask is None:
        return None
    return ~mask.expand(b, n_heads, t, s).flatten(0, 1)


def fill_attention(module, p):
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([p["w_q"], p["w_k"], p["w_v"]]))
        module.out_proj.weight.copy_(p["w_o"])
    return module


def torch_cross(x, memory, p, n_heads, mask=None):
    module = nn.MultiheadAttention(
        x.shape[-1], n_heads, bias=False, batch_first=True, dtype=torch.float64
    )
    fill_attention(module, p)
    b, t, s = len(x), x.shape[1], memory.shape[1]
    kept = hidden(mask, b, n_heads, t, s)
    out = module(x, memory, memory, attn_mask=kept, need_weights=False)[0]
    return out.nan_to_num(0.0)  # a position that may look at nothing


BATCH = dict(batch_first=True, dtype=torch.float64)
OPTIONS = dict(dropout=0.0, activation=F.relu, norm_first=True, bias=False) | BATCH


def torch_layer(kind, p, c):
    """One of PyTorch's layers with these weights, its LayerNorms made RMSNorms."""
    layer = kind(c.d_model, c.n_heads, c.d_ff, layer_norm_eps=c.norm_eps, **OPTIONS)
    for i in (1, 2, 3):
        if f"norm_{i}" in p:
            setattr(layer, f"norm{i}", torch_norm(p[f"norm_{i}"], c))
    return fill_layer(layer, p)


def fill_layer(layer, p):
    fill_attention(layer.self_attn, own_weights(p, "attention"))
    if "norm_3" in p:
        fill_attention(layer.multihead_attn, own_weights(p, "cross_attention"))
    with torch.no_grad():
        layer.linear1.weight.copy_(p["feed_forward.w_1"])
        layer.linear2.weight.copy_(p["feed_forward.w_2"])
    return layer


def torch_norm(weight, c):
    norm = nn.RMSNorm(c.d_model, c.norm_eps, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(weight)
    return norm


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


def embedded(ids, p):
    table = p["embedding"]
    return table[ids] + waves(ids.shape[1], table.shape[1]).to(table)


def torch_transformer(p, c):
    """`nn.Transformer` with these weights."""
    layers = [
        nn.ModuleList(
            torch_layer(kind, own_weights(p, f"{half}.{i}"), c)
            for i in range(c.n_layers)
        )
        for half, kind in (
            ("encoder", nn.TransformerEncoderLayer),
            ("decoder", nn.TransformerDecoderLayer),
        )
    ]
    encoder = nn.TransformerEncoder(
        layers[0][0],
        c.n_layers,
        torch_norm(p["encoder_norm"], c),
        enable_nested_tensor=False,
    )
    decoder = nn.TransformerDecoder(
        layers[1][0], c.n_layers, torch_norm(p["decoder_norm"], c)
    )
    encoder.layers, decoder.layers = layers
    machine = nn.Transformer(
        c.d_model, c.n_heads, custom_encoder=encoder, custom_decoder=decoder, **BATCH
    )
    for i in range(c.n_layers):  # it has given the matrices values of its own
        for half, layer in (("encoder", encoder), ("decoder", decoder)):
            fill_layer(layer.layers[i], own_weights(p, f"{half}.{i}"))
    return machine


class Oracle:
    """The whole model, computed by `nn.Transformer`."""

    def __init__(self, weights, c):
        self.p, self.c = doubled(weights), c
        self.machine = torch_transformer(self.p, c)

    def encode(self, source):
        padding = source == self.c.pad_id
        return self.machine.encoder(
            embedded(source, self.p), src_key_padding_mask=padding
        )

    def decode(self, target, memory, real=None):
        out = self.machine.decoder(
            embedded(target, self.p),
            memory,
            tgt_mask=~causal(target.shape[1]),
            memory_key_padding_mask=None if real is None else ~real,
        )
        return F.linear(out, self.p["head"])

    def __call__(self, source, target):
        padding = source == self.c.pad_id
        out = self.machine(
            embedded(source, self.p),
            embedded(target, self.p),
            tgt_mask=~causal(target.shape[1]),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return F.linear(out, self.p["head"])


# The same by hand, to be done wrongly -------------------------------------------------


def heads_of(x, n_heads):
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def crossed(x, memory, p, n_heads, mask=None, knob=""):
    """Attention from `x` to `memory`; `knob` names what is done wrongly."""
    pair = memory if isinstance(memory, tuple) else None
    q_of, k_of, v_of = x, memory, memory
    if knob == "queries_from_the_memory":
        q_of, k_of, v_of = memory, x, x
    if knob == "self_attention":
        k_of = v_of = x
        mask = None if mask is None or mask.shape[-1] != x.shape[1] else mask
    if knob == "keys_from_the_stream":
        k_of = x
    if knob == "values_from_the_stream":
        v_of = x
    q = F.linear(q_of, p["w_q"])
    if pair is None or knob == "self_attention":
        k, v = F.linear(k_of, p["w_k"]), F.linear(v_of, p["w_v"])
        if knob == "keys_and_values_exchanged":
            k, v = v, k
        if knob == "values_by_w_k":
            v = k
        k, v = heads_of(k, n_heads), heads_of(v, n_heads)
    else:
        k, v = pair
    q = heads_of(q, n_heads)
    d_head = q.shape[-1]
    if knob == "heads_read_from_memory_order":
        q, k, v = (y.transpose(1, 2).reshape(y.shape) for y in (q, k, v))
    if knob == "one_head":
        q, k, v = (y.transpose(1, 2).flatten(2)[:, None] for y in (q, k, v))
    divisor = math.sqrt(q.shape[-1])
    if knob == "not_scaled":
        divisor = 1.0
    if knob == "scaled_by_the_model":
        divisor = math.sqrt(n_heads * d_head)
    if knob == "scaled_twice":
        divisor = divisor**2
    scores = q @ k.transpose(-2, -1) / divisor
    if knob == "mask_ignored":
        mask = None
    if knob == "mask_read_the_other_way" and mask is not None:
        mask = ~mask
    if knob == "looks_back_only":
        square = torch.ones_like(scores, dtype=torch.bool).tril()
        mask = square if mask is None else mask & square
    if mask is not None and knob not in ("zero_and_one_added", "after_the_softmax"):
        low = {"mean_where_nothing_is_seen": -1e9, "hidden_scores_are_0": 0.0}
        low = low.get(knob, -torch.inf)
        if knob == "large_number_added":
            scores = scores + ~mask * -1e4
        else:
            scores = scores.masked_fill(~mask, low)
    if mask is not None and knob == "zero_and_one_added":
        scores = scores + mask
    weights = torch.softmax(scores, -2 if knob == "softmax_over_queries" else -1)
    if mask is not None and knob not in (
        "nan_where_nothing_is_seen",
        "mean_where_nothing_is_seen",
        "large_number_added",
        "hidden_scores_are_0",
        "zero_and_one_added",
    ):
        weights = weights.masked_fill(~mask, 0)
    out = weights @ v
    if knob == "heads_merged_askew":
        out = out.reshape(len(out), out.shape[2], -1)
    else:
        out = out.transpose(1, 2).flatten(2)
    if knob == "no_output_map":
        return out
    out = F.linear(out, p["w_o"])
    if knob == "adds_the_stream":
        out = out + x
    if knob == "adds_the_memory":
        out = out + memory.mean(1, keepdim=True)
    return out


def normed(x, p, name, c, knob=""):
    eps = 1e-6 if knob in ("eps_ignored", f"{name}_eps_ignored") else c.norm_eps
    if knob == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], p[name], None, eps)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * p[name]


def thought(x, p, knob=""):
    up = F.linear(x, p["feed_forward.w_1"])
    bend = {"gelu": F.gelu, "silu": F.silu, "no_activation": lambda y: y}
    return F.linear(bend.get(knob, F.relu)(up), p["feed_forward.w_2"])


def turned(x):
    """What RoPE would do to the heads."""
    d = x.shape[-1]
    i = torch.arange(d // 2, device=x.device)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * 10_000 ** (-2 * i / d)
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def self_attended(x, p, c, mask, knob=""):
    n_heads = 1 if knob == "one_head" else c.n_heads
    if knob == "mask_ignored":
        mask = None
    if knob == "mask_inverted" and mask is not None:
        mask = ~mask
    if knob == "always_causal":
        mask = causal(x.shape[1]).to(x.device)
    own = own_weights(p, "attention")
    if knob != "rotated":
        return crossed(x, x, own, n_heads, mask)
    q, k, v = (heads_of(F.linear(x, own[w]), n_heads) for w in FOUR[:3])
    scores = turned(q) @ turned(k).transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    out = (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)
    return F.linear(out, own["w_o"])


def encoder_block(x, p, c, mask=None, knob=""):
    def attend(y):
        return self_attended(y, p, c, mask, knob)

    def think(y):
        return thought(y, p, knob)

    def norm(y, name):
        return normed(y, p, name, c, knob)

    if knob == "no_residual":
        return think(norm(attend(norm(x, "norm_1")), "norm_2"))
    if knob == "stream_normalised":
        x = norm(x, "norm_1")
        x = norm(x + attend(x), "norm_2")
        return x + think(x)
    if knob == "post_norm":
        x = norm(x + attend(x), "norm_1")
        return norm(x + think(x), "norm_2")
    if knob == "second_residual_missing":
        return think(norm(x + attend(norm(x, "norm_1")), "norm_2"))
    if knob == "residual_from_the_input":
        return x + think(norm(x + attend(norm(x, "norm_1")), "norm_2"))
    if knob == "second_sublayer_post_norm":
        x = x + attend(norm(x, "norm_1"))
        return norm(x + think(x), "norm_2")
    if knob == "norm_and_sublayer_exchanged":
        x = x + norm(attend(x), "norm_1")
        return x + norm(think(x), "norm_2")
    if knob == "parallel":
        return x + attend(norm(x, "norm_1")) + think(norm(x, "norm_2"))
    if knob == "feed_forward_first":
        x = x + think(norm(x, "norm_2"))
        return x + attend(norm(x, "norm_1"))
    if knob == "attention_unused":
        return x + think(norm(x, "norm_2"))
    if knob == "feed_forward_unused":
        return x + attend(norm(x, "norm_1"))
    if knob == "one_norm_for_both":
        x = x + attend(norm(x, "norm_1"))
        return x + think(norm(x, "norm_1"))
    if knob == "norms_exchanged":
        x = x + attend(norm(x, "norm_2"))
        return x + think(norm(x, "norm_1"))
    if knob == "not_normalised":
        x = x + attend(x)
        return x + think(x)
    x = x + attend(norm(x, "norm_1"))
    return x + think(norm(x, "norm_2"))


def decoder_block(x, memory, p, c, mask=None, memory_mask=None, knob=""):
    if knob == "masks_exchanged":
        mask, memory_mask = memory_mask, mask
    if knob == "mask_for_both":
        memory_mask = mask
    if knob == "memory_mask_for_both":
        mask = memory_mask
    if knob == "memory_mask_ignored":
        memory_mask = None

    def back(y):
        return self_attended(y, p, c, mask, knob)

    def across(y, seen=memory):
        own = own_weights(p, "cross_attention")
        n_heads = 1 if knob == "one_head" else c.n_heads
        if knob == "looks_at_itself_twice":
            return crossed(y, y, own, n_heads, mask)
        if knob == "memory_normalised":
            seen = norm(memory, "norm_2")
        return crossed(y, seen, own, n_heads, memory_mask)

    def think(y):
        return thought(y, p, knob)

    def norm(y, name):
        return normed(y, p, name, c, knob)

    if knob == "no_residual":
        return think(norm(across(norm(back(norm(x, "norm_1")), "norm_2")), "norm_3"))
    if knob == "stream_normalised":
        x = norm(x, "norm_1")
        x = norm(x + back(x), "norm_2")
        x = norm(x + across(x), "norm_3")
        return x + think(x)
    if knob == "post_norm":
        x = norm(x + back(x), "norm_1")
        x = norm(x + across(x), "norm_2")
        return norm(x + think(x), "norm_3")
    if knob == "parallel":
        y = x + back(norm(x, "norm_1"))
        return y + across(norm(x, "norm_2")) + think(norm(y, "norm_3"))
    if knob == "residual_from_the_input":
        y = x + across(norm(x + back(norm(x, "norm_1")), "norm_2"))
        return y + think(norm(y, "norm_3"))
    if knob == "across_from_the_input":
        y = x + back(norm(x, "norm_1"))
        y = y + across(norm(x, "norm_2"))
        return y + think(norm(y, "norm_3"))
    if knob == "across_first":
        x = x + across(norm(x, "norm_2"))
        x = x + back(norm(x, "norm_1"))
        return x + think(norm(x, "norm_3"))
    if knob == "across_last":
        x = x + back(norm(x, "norm_1"))
        x = x + think(norm(x, "norm_3"))
        return x + across(norm(x, "norm_2"))
    if knob == "no_second_residual":
        x = x + back(norm(x, "norm_1"))
        x = across(norm(x, "norm_2"))
        return x + think(norm(x, "norm_3"))
    if knob == "self_attention_unused":
        x = x + across(norm(x, "norm_2"))
        return x + think(norm(x, "norm_3"))
    if knob == "cross_attention_unused":
        x = x + back(norm(x, "norm_1"))
        return x + think(norm(x, "norm_3"))
    if knob == "feed_forward_unused":
        x = x + back(norm(x, "norm_1"))
        return x + across(norm(x, "norm_2"))
    if knob == "second_norm_twice":
        x = x + back(norm(x, "norm_1"))
        x = x + across(norm(x, "norm_2"))
        return x + think(norm(x, "norm_2"))
    if knob == "norms_exchanged":
        x = x + back(norm(x, "norm_1"))
        x = x + across(norm(x, "norm_3"))
        return x + think(norm(x, "norm_2"))
    if knob == "queries_not_normalised":
        x = x + back(norm(x, "norm_1"))
        x = x + across(x)
        return x + think(norm(x, "norm_3"))
    if knob == "not_normalised":
        x = x + back(x)
        x = x + across(x)
        return x + think(x)
    x = x + back(norm(x, "norm_1"))
    x = x + across(norm(x, "norm_2"))
    return x + think(norm(x, "norm_3"))


def whole(module, source, target, knob=""):
    """The halves one after the other, for faults of the model."""
    memory, mask = module.encode(source)
    return module.decode(target, memory, mask)


# Modules made of it, right or with one knob turned ------------------------------------


def cross_with(knob="", checks=True):
    """A cross-attention class."""

    class CrossAttention(Holder):
        def __init__(self, d_model, n_heads):
            if checks and d_model % n_heads:
                raise ValueError(f"{d_model} and {n_heads}")
            super().__init__({w: (d_model, d_model) for w in FOUR})
            self.n_heads = n_heads
            self.first = None

        def keys_values(self, memory):
            k, v = F.linear(memory, self.held()["w_k"]), None
            v = F.linear(memory, self.held()["w_v"])
            if knob == "keys_and_values_exchanged":
                k, v = v, k
            if knob == "values_by_w_k":
                v = k
            if knob == "pair_the_wrong_way_round":
                k, v = v, k
            if knob == "pair_not_split":
                return k, v
            if knob == "pair_not_transposed":
                return tuple(y.unflatten(-1, (self.n_heads, -1)) for y in (k, v))
            if knob == "pair_as_a_list":
                return [heads_of(k, self.n_heads), heads_of(v, self.n_heads)]
            return heads_of(k, self.n_heads), heads_of(v, self.n_heads)

        def forward(self, x, memory, memory_mask=None):
            if knob == "projects_all_the_same":
                self.keys_values(x)
            if knob == "last_memory_kept":
                self.last = memory
            if knob == "mask_forgotten_with_a_pair" and isinstance(memory, tuple):
                memory_mask = None
            if knob == "only_the_first_rows_mask" and memory_mask is not None:
                memory_mask = memory_mask[:1]
            if knob == "zeros_for_whole_rows_alone" and memory_mask is not None:
                blind = ~memory_mask.flatten(1).any(1)
                out = crossed(
                    *(x, memory, self.held(), self.n_heads, memory_mask),
                    "nan_where_nothing_is_seen",
                )
                return out.masked_fill(blind[:, None, None], 0)
            if knob == "first_memory_kept":
                if self.first is None:
                    self.first = cross_with().keys_values(self, memory)
                memory = self.first
            if knob == "pair_projected_again" and isinstance(memory, tuple):
                memory = memory[0].transpose(1, 2).flatten(2)
            return crossed(x, memory, self.held(), self.n_heads, memory_mask, knob)

    return CrossAttention


def encoder_with(knob="", change=None):
    class EncoderBlock(Holder):
        def __init__(self, config):
            config = change(config) if change else config
            super().__init__(encoder_shapes(config))
            self.config = config

        def forward(self, x, mask=None):
            return encoder_block(x, self.held(), self.config, mask, knob)

    return EncoderBlock


def decoder_with(knob="", change=None):
    class DecoderBlock(Holder):
        def __init__(self, config):
            config = change(config) if change else config
            super().__init__(decoder_shapes(config))
            self.config = config

        def forward(self, x, memory, mask=None, memory_mask=None):
            p, c = self.held(), self.config
            return decoder_block(x, memory, p, c, mask, memory_mask, knob)

    return DecoderBlock


def model_with(knob="", change=None, shared_block=False):
    """An encoder-decoder class; `knob` names what is done wrongly."""

    class EncoderDecoder(Holder):
        def __init__(self, config):
            shapes = model_shapes(config)
            if knob == "two_embeddings":
                shapes["target_embedding"] = shapes["embedding"]
            if knob == "no_encoder_norm":
                del shapes["encoder_norm"]
            super().__init__(shapes)
            self.config = config
            if knob == "head_tied":
                self.head.weight = self.embedding.weight
            if shared_block:
                for half in (self.encoder, self.decoder):
                    for i in range(1, config.n_layers):
                        setattr(half, str(i), getattr(half, "0"))

        def own(self, name):
            return own_weights(self.held(), name)

        def embed(self, ids, half):
            c, t = self.config, ids.shape[1]
            unchecked = f"{half}_length_unchecked"
            if knob == "max_len_refused" and t == c.max_len:
                raise ValueError(f"{t} tokens, max_len {c.max_len}")
            if t > c.max_len and knob != unchecked:
                raise ValueError(f"{t} tokens, max_len {c.max_len}")
            x = self.held()["embedding"][ids]
            if knob == "embedding_scaled":
                x = x * math.sqrt(c.d_model)
            if knob in ("no_positions", f"no_{half}_positions"):
                return x
            if knob == "positions_from_1":
                return x + waves(t + 1, c.d_model)[1:].to(x)
            if knob == "positions_twice":
                x = x + waves(t, c.d_model).to(x)
            return x + waves(t, c.d_model).to(x)

        def encode(self, source):
            c, p = self.config, self.held()
            pad_id = 0 if knob == "padding_is_0" else c.pad_id
            real = source != pad_id
            if knob == "padding_counted":
                places = torch.arange(source.shape[1], device=source.device)
                real = places < real.sum(1, keepdim=True)
            first = real[:, :1].all() if source.numel() else True
            if knob == "first_token_decides" and not first:
                raise ValueError("a row begins with padding")
            if knob == "source_cut":
                n = int(real.sum(1).max())
                source, real = source[:, :n], real[:, :n]
            if source.numel() == 0 and knob != "empty_accepted":
                raise ValueError("the source is empty")
            alone = (~real.any(1)).nonzero().flatten().tolist()
            if knob == "only_a_whole_batch_of_padding" and len(alone) < len(source):
                alone = []
            if alone and knob == "row_not_named":
                raise ValueError("the source is padding")
            if alone and knob != "padding_accepted" and source.shape[1]:
                raise ValueError(f"row {alone[0]} is padding")
            mask = real[:, None, None, :]
            x = self.embed(source, "source")
            seen = None if knob in ("encoder_sees_padding", "padding_seen") else mask
            if knob == "encoder_causal":
                seen = mask & causal(source.shape[1]).to(mask.device)
            if knob == "encoder_unused":
                return x, mask
            layers = range(c.n_layers)
            states = []
            for i in layers:
                i = 0 if shared_block else i
                if knob == "last_encoder_block_alone":
                    i = c.n_layers - 1
                    states.append(x)
                    if len(states) < c.n_layers:
                        continue
                x = encoder_block(x, self.own(f"encoder.{i}"), c, seen)
                if knob == "encoder_norm_in_the_loop":
                    x = normed(x, p, "encoder_norm", c)
                states.append(x)
            if knob in ("cross_sees_padding", "padding_seen"):
                mask = torch.ones_like(mask)
            if knob == "mask_flat":
                mask = mask[:, 0, 0]
            if knob == "mask_of_the_first_row":
                mask = mask[:1].expand_as(mask)
            if knob == "each_layer_its_own":
                self.states = states
            if knob in (
                "encoder_norm_unused",
                "no_encoder_norm",
                "encoder_norm_in_the_loop",
            ):
                return x, mask
            return normed(x, p, "encoder_norm", c, knob), mask

        def decode(self, target, memory, memory_mask=None):
            c, p, t = self.config, self.held(), target.shape[1]
            if knob == "shifted_in_decode":
                start = torch.full_like(target[:, :1], 1)
                target = torch.cat([start, target[:, :-1]], 1)
            x = self.embed(target, "target")
            mask = causal(t).to(target.device)
            if knob == "no_mask":
                mask = None
            if knob == "mask_upside_down":
                mask = mask.T
            if knob == "one_ahead":
                mask = torch.ones_like(mask).tril(1)
            if knob == "itself_hidden":
                mask = mask.tril(-1)
            if knob == "target_padding_hidden":
                mask = mask & (target != c.pad_id)[:, None, None]
            if knob == "cross_sees_padding":
                memory_mask = None
            layers = range(c.n_layers)
            if knob == "mask_forgotten_with_a_list" and isinstance(memory, list):
                memory_mask = None
            if knob == "last_decoder_block_alone":
                layers = [c.n_layers - 1]
            if knob == "memory_normalised_again" and not isinstance(memory, list):
                memory = normed(memory, p, "encoder_norm", c)
            for i in reversed(layers) if knob == "blocks_reversed" else layers:
                own = memory
                if isinstance(memory, list):
                    own = memory[0 if knob == "first_pair_for_all" else i]
                elif knob == "each_layer_its_own":
                    own = self.states[i]
                i = 0 if shared_block else i
                x = decoder_block(
                    x, own, self.own(f"decoder.{i}"), c, mask, memory_mask
                )
                if knob == "decoder_norm_in_the_loop":
                    x = normed(x, p, "decoder_norm", c)
            if knob == "encoder_norm_in_the_decoder":
                x = normed(x, p, "encoder_norm", c)
            elif knob not in ("decoder_norm_unused", "decoder_norm_in_the_loop"):
                x = normed(x, p, "decoder_norm", c, knob)
            logits = F.linear(x, p["head"])
            if knob == "probabilities":
                return torch.softmax(logits, -1)
            if knob == "log_probabilities":
                return torch.log_softmax(logits, -1)
            if knob == "last_position_only":
                return logits[:, -1]
            return logits

        def forward(self, source, target):
            if knob == "shifted_inside":
                target = target.roll(1, 1)
            if knob == "source_and_target_exchanged":
                source, target = target, source
            return whole(self, source, target)

    return EncoderDecoder


# shift_right --------------------------------------------------------------------------

shift_right = Exercise("shift_right", lesson="encoder_decoder")


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
    case.equal(case.call(answer, ids, 1), shifted(ids, 1), "the result")
    case.equal(
        case.call(answer, ids=ids, start_id=0),
        shifted(ids, 0),
        "with start 0, the result",
    )
    actual = case.call(answer, ids, 30_000)
    case.equal(actual, shifted(ids, 30_000), "with start 30000, the result")


@shift_right.requires("a single token is replaced by the start, the row's length stays")
def _(answer, case):
    ids = torch.tensor([[9], [4]])
    case.equal(case.call(answer, ids, 6), shifted(ids, 6), "the result")


@shift_right.requires("the dtype stays, and unordered memory does no harm")
def _(answer, case):
    for kind in (torch.int32, torch.int16):
        ids = probe_ids(2, 6, below=23, seed=2).to(kind)
        case.equal(case.call(answer, ids, 3), shifted(ids, 3), f"of {kind}, the result")
    ids = probe_ids(5, 3, below=23, seed=3).T
    case.equal(case.call(answer, ids, 2), shifted(ids, 2), "of columns, the result")


@shift_right.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, probe_ids(2, 5, below=9), 1)


def starts(ids, start_id):
    return torch.full_like(ids[:, :1], start_id)


SHIFT_FAULTS = {
    "shifted_left": (
        "The row moves to the left. The decoder would read each token *after* the one "
        "that it is asked for.",
        lambda ids, start_id: torch.cat([ids[:, 1:], starts(ids, start_id)], 1),
    ),
    "start_replaces_the_first": (
        "The first token is overwritten and the rest stays in place, so from the second "
        "place on the decoder reads what it is asked for.",
        lambda ids, start_id: torch.cat([starts(ids, start_id), ids[:, 1:]], 1),
    ),
    "one_longer": (
        "The result is one longer than the row: its last token must go. Nothing is asked "
        "after it.",
        lambda ids, start_id: torch.cat([starts(ids, start_id), ids], 1),
    ),
    "one_shorter": (
        "The result is one shorter than the row.",
        lambda ids, start_id: torch.cat([starts(ids, start_id), ids[:, 1:-1]], 1),
    ),
    "start_missing": (
        "The last token goes and no start comes, so the row is one shorter, and its first "
        "token is never asked for.",
        lambda ids, start_id: ids[:, :-1],
    ),
    "not_shifted": (
        "Nothing is shifted. The decoder would read the very token that it is asked for, "
        "train to a loss near 0 and be able to do nothing.",
        lambda ids, start_id: ids.clone(),
    ),
    "last_comes_round": (
        "The last token comes round to the front, where the start belongs.",
        lambda ids, start_id: ids.roll(1, 1),
    ),
    "rows_shifted": (
        "The rows of the batch move down, not the tokens in their rows.",
        lambda ids, start_id: torch.cat(
            [torch.full_like(ids[:1], start_id), ids[:-1]], 0
        ),
    ),
    "rolled_over_all": (
        "The batch is rolled as one long row: each row begins with the last token of the "
        "row before it.",
        lambda ids, start_id: shifted(ids, start_id).index_put(
            (torch.arange(len(ids)), torch.zeros(len(ids), dtype=torch.int64)),
            torch.cat([torch.full_like(ids[0, :1], start_id), ids[:-1, -1]]),
        ),
    ),
    "start_always_0": (
        "Every row begins with 0, whatever `start_id` is.",
        lambda ids, start_id: torch.cat([starts(ids, 0), ids[:, :-1]], 1),
    ),
    "twice": (
        "The row is shifted by two places.",
        lambda ids, start_id: shifted(shifted(ids, start_id), start_id),
    ),
    "always_int64": (
        "The result is int64 whatever came in; the start should take the dtype of the row.",
        lambda ids, start_id: shifted(ids.long(), start_id),
    ),
}
for name, (sentence, wrong) in SHIFT_FAULTS.items():
    shift_right.fault(name, sentence, wrong)


# CrossAttention -----------------------------------------------------------------------

cross = Exercise("CrossAttention", lesson="encoder_decoder")


def cross_weights(d_model, seed):
    return {
        w: probe(d_model, d_model, seed=seed + i, scale=d_model**-0.5)
        for i, w in enumerate(FOUR)
    }


def made_cross(answer, case, d_model, n_heads, seed):
    """The learner's module with weights, and the oracle with the same ones."""
    weights = cross_weights(d_model, seed)
    module = load_all(case, case.call(answer, d_model, n_heads), weights)
    weights = doubled(weights)

    def oracle(x, memory, memory_mask=None):
        return torch_cross(x, memory, weights, n_heads, memory_mask)

    return module, oracle


class Used(TorchDispatchMode):
    """Notes which of a module's matrices something is computed with."""

    def __init__(self, module):
        super().__init__()
        self.known = {
            id(p): n.removesuffix(".weight") for n, p in module.named_parameters()
        }
        self.names = set()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        self.names |= {self.known[id(a)] for a in args if id(a) in self.known}
        return f(*args, **(kwargs or {}))


def kept_tensors(module):
    """Where a module holds tensors that are no parameters: attribute → their number."""

    def count(value):
        if isinstance(value, torch.Tensor):
            return 1
        if isinstance(value, dict):
            return sum(map(count, [*value.keys(), *value.values()]))
        if isinstance(value, (list, tuple, set)):
            return sum(map(count, value))
        return 0

    found = {}
    for part in module.modules():
        held = {n: v for n, v in vars(part).items() if not n.startswith("_")}
        for name, value in (held | part._buffers).items():
            found[name] = found.get(name, 0) + count(value)
        for name in vars(part).keys() - held.keys() - NN_MODULE:
            found[name] = found.get(name, 0) + count(vars(part)[name])
    return found


NN_MODULE = vars(nn.Module()).keys()


def torch_pair(memory, weights, n_heads):
    """Keys and values, each head a slice."""
    pair = []
    for w in ("w_k", "w_v"):
        y = memory.double() @ weights[w].double().T
        pair.append(torch.stack(y.chunk(n_heads, -1), 1))
    return tuple(pair)


@cross.requires(
    "w_q, w_k, w_v and w_o are square matrices without biases",
    "As in lesson 03's attention without shared heads.",
)
def _(answer, case):
    for d_model, n_heads in ((12, 3), (10, 5)):
        module = case.call(answer, d_model, n_heads)
        case.parameter_count(module, 4 * d_model**2)
        load_all(case, module, cross_weights(d_model, 0))


@cross.requires(
    "one head, one position each: the output map of the memory's value",
    "With a single key every weight is 1. Which of the two inputs is left in the result?",
)
def _(answer, case):
    module, oracle = made_cross(answer, case, 6, 1, seed=10)
    case.agrees(module, oracle, probe(2, 1, 6, seed=11), probe(2, 1, 6, seed=12))


@cross.requires(
    "one head: queries from x, keys and values from the memory",
    "Write the shapes down: x is `(B, T, D)`, the memory `(B, S, D)`, and the weights "
    "must be `(…, T, S)`.",
)
def _(answer, case):
    module, oracle = made_cross(answer, case, 6, 1, seed=20)
    case.agrees(module, oracle, probe(2, 5, 6, seed=21), probe(2, 7, 6, seed=22))
    case.agrees(module, oracle, probe(3, 4, 6, seed=23), probe(3, 4, 6, seed=24))


@cross.requires(
    "several heads: each looks by itself, with its own part of the width",
    "`split_heads` and `merge_heads` of lesson 03 do the cutting.",
)
def _(answer, case):
    for d_model, n_heads, seed in ((12, 3, 30), (10, 5, 40)):
        module, oracle = made_cross(answer, case, d_model, n_heads, seed)
        for b, t_q, s in ((2, 5, 7), (3, 6, 4), (1, 1, 5)):
            x = probe(b, t_q, d_model, seed=seed + 5)
            case.agrees(module, oracle, x, probe(b, s, d_model, seed=seed + 6))


@cross.requires(
    "memory_mask hides keys of the memory, True = may look",
    "The mask belongs to the scores, `(B, H, T, S)`; `attention` of lesson 02 takes it as "
    "it is.",
)
def _(answer, case):
    module, oracle = made_cross(answer, case, 12, 3, seed=50)
    x, memory = probe(4, 5, 12, seed=51), probe(4, 7, 12, seed=52)
    lengths = torch.tensor([3, 7, 1, 5])
    rows = (torch.arange(7) < lengths[:, None])[:, None, None]
    case.agrees(module, oracle, x, memory, rows)
    each = probe(4, 3, 5, 7, seed=53) > 0
    each[..., 2] = True
    case.agrees(module, oracle, x, memory, memory_mask=each)
    for scale in (20.0, 300.0):  # scores far from 0
        case.agrees(module, oracle, x, scale * memory, rows)


@cross.requires(
    "a mask of one, two or three dimensions broadcasts as well",
    "Ask nothing of the mask's shape: the scores `(B, H, T, S)` take whatever broadcasts.",
)
def _(answer, case):
    module, oracle = made_cross(answer, case, 12, 3, seed=55)
    x, memory = probe(3, 5, 12, seed=56), probe(3, 7, 12, seed=57)
    for shape in ((5, 7), (7,), (3, 5, 7)):
        case.agrees(module, oracle, x, memory, random_mask(*shape, seed=58))


@cross.requires(
    "a row whose memory is hidden altogether gets zeros, with finite gradients",
    "Softmax over nothing but −∞ is 0/0. Lesson 02 decided what a query that sees nothing "
    "gets; do you call your `attention`?",
)
def _(answer, case):
    module, oracle = made_cross(answer, case, 12, 3, seed=60)
    x, memory = probe(3, 5, 12, seed=61), probe(3, 7, 12, seed=62)
    mask = (torch.arange(7) < torch.tensor([4, 0, 7])[:, None])[:, None, None]
    case.agrees(module, oracle, x, memory, mask)
    inputs = [y.requires_grad_() for y in (x, memory)]
    out = case._run(module, (*inputs, mask), {})
    gradients = torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)
    finite = all(g is None or bool(g.isfinite().all()) for g in gradients)
    case.true(finite, "The gradient is NaN where a row of the memory is hidden.")


@cross.requires(
    "a single position that may look at nothing gets zeros too, its neighbours do not",
    "Which positions see nothing is a question for each query, not for each row.",
)
def _(answer, case):
    module, oracle = made_cross(answer, case, 12, 3, seed=65)
    x, memory = probe(2, 5, 12, seed=66), probe(2, 7, 12, seed=67)
    mask = random_mask(2, 1, 5, 7, seed=68)
    mask[0, :, 3] = False
    case.agrees(module, oracle, x, memory, mask)
    mask = random_mask(2, 3, 5, 7, seed=69)
    mask[1, 1, 2] = False  # in one head alone
    case.agrees(module, oracle, x, memory, mask)


@cross.requires(
    "keys_values gives the keys and the values, split into heads",
    "Two tensors, keys first, both `(B, n_heads, S, d_head)`.",
)
def _(answer, case):
    for d_model, n_heads in ((12, 3), (10, 5)):
        module, _ = made_cross(answer, case, d_model, n_heads, seed=70)
        memory = probe(2, 7, d_model, seed=71)
        pair = case.call(module.keys_values, memory)
        case.is_tuple(pair, 2, "the result of keys_values")
        expected = torch_pair(memory, cross_weights(d_model, 70), n_heads)
        for name, one, other in zip(("keys", "values"), pair, expected, strict=True):
            case.close(one, other, f"the {name}", like=memory)


@cross.requires(
    "given that pair in place of the memory, it gives the same and projects nothing",
    "`isinstance(memory, tuple)` tells the two apart. With a pair, neither `w_k` nor "
    "`w_v` runs.",
)
def _(answer, case):
    module, oracle = made_cross(answer, case, 12, 3, seed=80)
    x, memory = probe(2, 5, 12, seed=81), probe(2, 7, 12, seed=82)
    mask = (torch.arange(7) < torch.tensor([4, 7])[:, None])[:, None, None]
    pair = case._run(module.keys_values, (memory,), {})
    expected = oracle(x.double(), memory.double(), mask)
    for given in (pair, tuple(pair)):
        case.close(
            case.call(module, x, given, mask), expected, "with the pair, the result"
        )
    other = tuple(y.flip(2) for y in pair)
    expected = oracle(x.double(), memory.flip(1).double())
    case.close(case.call(module, x, other), expected, "with another pair, the result")
    with Used(module) as used:
        case._run(module, (x, tuple(pair), mask), {})
    for name in ("w_k", "w_v"):
        case.true(
            name not in used.names,
            f"`{name}` ran although the pair was given. That is the work which the pair "
            "saves.",
        )


@cross.requires("a width that is not divisible is a ValueError that names both numbers")
def _(answer, case):
    for width, n_heads in ((10, 3), (4, 8)):
        case.raises(
            ValueError,
            answer,
            width,
            n_heads,
            mentions=(width, n_heads),
            because=f"d_model {width} and {n_heads} heads",
        )


@cross.requires("another memory in a second call, and any dtype, give what they should")
def _(answer, case):
    module, oracle = made_cross(answer, case, 12, 3, seed=90)
    x = probe(2, 5, 12, seed=91)
    for seed in (92, 93):
        case.agrees(module.eval(), oracle, x, probe(2, 7, 12, seed=seed))
    case.agrees(module, oracle, strided(x), probe(2, 7, 12, seed=94, scale=30.0))
    for kind in (torch.float64, torch.bfloat16):
        weights = {n: w.to(kind).double() for n, w in cross_weights(12, 90).items()}
        y, memory = probe(2, 5, 12, seed=95).to(kind), probe(2, 7, 12, seed=96).to(kind)
        actual = case.call(module.to(kind), y, memory)
        expected = torch_cross(y.double(), memory.double(), weights, 3)
        case.close(actual, expected, f"the result in {kind}", like=y)


@cross.requires(
    "the module keeps nothing between calls",
    "What is kept belongs to the caller, as the pair that `keys_values` gives.",
)
def _(answer, case):
    module, oracle = made_cross(answer, case, 12, 3, seed=120)
    before = kept_tensors(module)
    x, memory = probe(2, 5, 12, seed=121), probe(2, 7, 12, seed=122)
    mask = random_mask(2, 1, 5, 7, seed=123)
    case._run(module, (x, memory, mask), {})
    memory.data.copy_(probe(2, 7, 12, seed=124))  # another text in the same place
    expected = oracle(x.double(), memory.double(), mask)
    actual = case._run(module, (x, memory, mask), {})
    case.close(actual, expected, "for another memory in the same place, the result")
    after = kept_tensors(module)
    more = [name for name, n in after.items() if n > before.get(name, 0)]
    case.true(
        not more,
        f"After a call the module holds tensors in `{', '.join(more)}`; it may keep "
        "none.",
    )


@cross.requires("gradients reach x, the memory and all four matrices")
def _(answer, case):
    module, oracle = made_cross(answer, case, 12, 3, seed=100)
    x, memory = probe(2, 5, 12, seed=101), probe(2, 7, 12, seed=102)
    case.gradients_agree(module, oracle, x, memory)
    trained(case, module, x, memory)


@cross.requires("it creates nothing on another device")
def _(answer, case):
    module, _ = made_cross(answer, case, 12, 3, seed=110)
    case.any_device(module, probe(2, 5, 12), probe(2, 7, 12))


CROSS_FAULTS = {
    "queries_from_the_memory": "The roles are exchanged: queries come from the memory, "
    "keys and values from x. Who asks here? The sequence that is being written.",
    "self_attention": "Keys and values come from x, so x looks at itself and the memory "
    "is never read.",
    "keys_from_the_stream": "The keys come from x. Keys say what can be found, values what "
    "is found; both belong to the memory.",
    "values_from_the_stream": "The values come from x. What is brought back must come from "
    "the memory, like the keys.",
    "keys_and_values_exchanged": "`w_k` makes the values and `w_v` the keys. Nothing is "
    "wrong with that until somebody loads weights by name.",
    "values_by_w_k": "The values are made by `w_k`, as the keys are; `w_v` is not used.",
    "not_scaled": "The scores are not divided by the root of d_head.",
    "scaled_twice": "The scores are divided by the root of d_head twice. Your `attention` "
    "does it already.",
    "scaled_by_the_model": "The scores are divided by √d_model; each head is d_head wide.",
    "one_head": "It is one wide head: the width is never cut.",
    "heads_read_from_memory_order": "The heads are cut by a view that does not exchange "
    "dimensions, so each head gets whole positions of a part of the sequence.",
    "heads_merged_askew": "The heads are merged without exchanging heads and time first.",
    "softmax_over_queries": "The softmax runs over the queries. Each query shares out one "
    "weight of 1 among the keys of the memory.",
    "mask_ignored": "`memory_mask` is not used, so padding is looked at.",
    "mask_read_the_other_way": "The mask is read the other way round: True = may look.",
    "zero_and_one_added": "The mask is added to the scores as 0 and 1, which hides "
    "nothing.",
    "hidden_scores_are_0": "Hidden scores are set to 0, or multiplied by the mask, and e⁰ "
    "is 1: what is hidden still gets a share. −∞ has none.",
    "after_the_softmax": "The mask is applied after the softmax, and the weights that are "
    "left no longer add up to 1.",
    "looks_back_only": "A triangle hides part of the memory. All of the source is there "
    "before the first token is written; nothing of it lies in the future.",
    "nan_where_nothing_is_seen": "A row of the memory that is padding alone gives NaN: "
    "softmax over nothing but −∞. Such a row gets zeros.",
    "mean_where_nothing_is_seen": "A row of the memory that is padding alone gives the "
    "mean of the padding: a large negative number in place of −∞ hides nothing once all "
    "keys have it. Such a row gets zeros.",
    "large_number_added": "A row of the memory that is padding alone is looked at like "
    "any other: a large negative number is added to all its scores, and softmax sees "
    "differences alone. Such a row gets zeros.",
    "no_output_map": "`w_o` is not used.",
    "adds_the_stream": "x is added to the result. The residual belongs into the block.",
    "adds_the_memory": "The memory itself is added to the result; it comes in by way of "
    "its values alone.",
    "pair_the_wrong_way_round": "`keys_values` gives the values first; keys come first.",
    "pair_not_split": "`keys_values` gives `(B, S, D)`, not yet cut into heads.",
    "pair_not_transposed": "`keys_values` gives `(B, S, H, Dh)`; heads stand before the "
    "sequence.",
    "pair_as_a_list": "`keys_values` gives a list, and `forward` takes a list for the "
    "memory itself. A tuple is the pair that both agree on: `return k, v`.",
    "pair_projected_again": "A pair that is given is projected once more. It holds keys "
    "and values already: use them as they are.",
    "mask_forgotten_with_a_pair": "Given a pair, it does not use `memory_mask`. The mask "
    "is about keys, wherever they come from.",
    "only_the_first_rows_mask": "The mask of the first row of the batch is used for all "
    "rows.",
    "zeros_for_whole_rows_alone": "Zeros come only where a whole row of the batch sees "
    "nothing. A mask can leave a single query without any key, too.",
    "projects_all_the_same": "Keys and values are made although the pair was given, and "
    "then not used.",
    "last_memory_kept": "The memory of the last call stays in the module, as long as the "
    "module lives. The caller has it already.",
    "first_memory_kept": "The keys and values of the first call are kept in the module and "
    "used for every later one. Nothing may stay in it: the caller keeps the pair.",
}
for name, sentence in CROSS_FAULTS.items():
    cross.fault(name, sentence, cross_with(name))


# EncoderBlock -------------------------------------------------------------------------

encoder = Exercise("EncoderBlock", lesson="encoder_decoder")
WIDE = replace(SMALL, d_model=10, n_heads=5, d_ff=14, norm_eps=0.3)


def made_encoder(answer, case, c, seed):
    weights = weights_for(encoder_shapes(c), seed)
    module = load_all(case, case.call(answer, c), weights)
    return module, partial(torch_encoder_block, doubled(weights), c)


def wide_awake(weights):
    """The same with a first matrix whose results are large: ReLU has no upper end."""
    return weights | {"feed_forward.w_1": 20 * weights["feed_forward.w_1"]}


def random_mask(*shape, seed):
    """Allows about half of the keys, and for every query the third."""
    mask = probe(*shape, seed=seed) > 0
    mask[..., 2] = True
    return mask


@encoder.requires(
    "norm_1, attention, norm_2 and feed_forward have their parameters",
    "`RMSNorm`, `MultiHeadAttention`, `RMSNorm` and `FeedForward`: which takes which "
    "sizes of the config?",
)
def _(answer, case):
    for c in (SMALL, WIDE):
        module = case.call(answer, c)
        case.parameter_count(module, numbers_in(encoder_shapes(c)))
        load_all(case, module, weights_for(encoder_shapes(c), 0))


@encoder.requires(
    "one position: attention, then the feed-forward network with ReLU, each pre-norm",
    "Lesson 06's `pre_norm`, twice. `torch.relu` is the activation.",
)
def _(answer, case):
    module, oracle = made_encoder(answer, case, SMALL, seed=200)
    case.agrees(module, oracle, probe(5, 1, 12, seed=201))
    weights = wide_awake(weights_for(encoder_shapes(SMALL), 200))
    oracle = partial(torch_encoder_block, doubled(weights), SMALL)
    case.agrees(load_all(case, module, weights), oracle, probe(5, 1, 12, seed=201))


@encoder.requires(
    "several positions: each sees all others, the later ones too",
    "An encoder has its whole text before it. Which mask does it need?",
)
def _(answer, case):
    for c, seed in ((SMALL, 210), (WIDE, 220)):
        module, oracle = made_encoder(answer, case, c, seed)
        case.agrees(module, oracle, probe(2, 7, c.d_model, seed=seed + 1))
        case.agrees(module, oracle, probe(3, 5, c.d_model, seed=seed + 2, scale=0.1))


@encoder.requires("a mask is passed on to attention")
def _(answer, case):
    module, oracle = made_encoder(answer, case, SMALL, seed=230)
    x = probe(4, 7, 12, seed=231)
    lengths = torch.tensor([3, 7, 1, 5])
    case.agrees(module, oracle, x, (torch.arange(7) < lengths[:, None])[:, None, None])
    case.agrees(module, oracle, x, mask=random_mask(4, 3, 7, 7, seed=232))


@encoder.requires("float64, bfloat16, `eval()` and a second call work")
def _(answer, case):
    module, oracle = made_encoder(answer, case, SMALL, seed=240)
    for x in (probe(3, 7, 12, seed=241), probe(2, 4, 12, seed=242)):
        case.agrees(module.eval(), oracle, x)
    for kind in (torch.float64, torch.bfloat16):
        weights = weights_for(encoder_shapes(SMALL), 240)
        weights = {n: w.to(kind).double() for n, w in weights.items()}
        x = probe(3, 5, 12, seed=243).to(kind)
        expected = torch_encoder_block(weights, SMALL, x.double())
        tolerance = SINES if kind == torch.float64 else None  # norms are in float32
        actual = case.call(module.to(kind), x)
        case.close(
            actual, expected, f"in {kind}, the result", like=x, tolerance=tolerance
        )


@encoder.requires("gradients reach the input and every parameter")
def _(answer, case):
    module, oracle = made_encoder(answer, case, SMALL, seed=250)
    case.gradients_agree(module, oracle, probe(2, 5, 12, seed=251))
    trained(case, module, probe(2, 5, 12, seed=252))


@encoder.requires("it creates nothing on another device")
def _(answer, case):
    module, _ = made_encoder(answer, case, SMALL, seed=260)
    case.any_device(module, probe(2, 5, 12), torch.ones(5, 5, dtype=torch.bool))


ENCODER_FAULTS = {
    "no_residual": "The stream is replaced instead of added to: `x +` is missing.",
    "stream_normalised": "The normalised stream goes on. In pre-norm only the sublayer "
    "sees the normalised values.",
    "post_norm": "The norms come after the additions, as in the paper of 2017. Here they "
    "come before (pre-norm), as in nearly everything since.",
    "parallel": "Both sublayers read the block's input; the second reads what the first "
    "has left.",
    "feed_forward_first": "The feed-forward network runs before attention.",
    "attention_unused": "Attention's result is not used.",
    "feed_forward_unused": "The feed-forward network's result is not used.",
    "one_norm_for_both": "`norm_1` is used twice.",
    "norms_exchanged": "`norm_1` and `norm_2` are exchanged.",
    "not_normalised": "The norms are made but never called.",
    "layer_norm": "The norms subtract the mean, as LayerNorm does. `RMSNorm` does not.",
    "eps_ignored": "The norms use their default eps; the config's `norm_eps` is not passed "
    "on.",
    "norm_1_eps_ignored": "`norm_1` has its default eps; pass `norm_eps` on to both.",
    "norm_2_eps_ignored": "`norm_2` has its default eps; pass `norm_eps` on to both.",
    "second_residual_missing": "The feed-forward network replaces the stream: its `x +` is "
    "missing.",
    "residual_from_the_input": "The second sublayer's result is added to the block's "
    "input, so that what attention has found is not in the stream. Add it to the stream as "
    "the first sublayer left it.",
    "second_sublayer_post_norm": "The second norm comes after the addition; it belongs "
    "before the feed-forward network.",
    "norm_and_sublayer_exchanged": "The norms are applied to what the sublayers give, not "
    "to what they read. Are the last two arguments of `pre_norm` exchanged?",
    "mask_inverted": "The mask is inverted on the way. True = may look, here as in "
    "`MultiHeadAttention`.",
    "always_causal": "The block hides what comes later. That is for a model that predicts "
    "what comes later; an encoder may see all of its text.",
    "mask_ignored": "The mask is not passed on to attention.",
    "one_head": "Attention has one head: `n_heads` is not passed on.",
    "rotated": "Queries and keys are rotated. Positions come with the embedding here.",
    "gelu": "The activation is GELU; this block has ReLU, as the first Transformer and T5.",
    "silu": "The activation is SiLU; this block has ReLU.",
    "no_activation": "The feed-forward network does not bend: two linear maps in a row are "
    "one.",
}
for name, sentence in ENCODER_FAULTS.items():
    encoder.fault(name, sentence, encoder_with(name))


# DecoderBlock -------------------------------------------------------------------------

decoder = Exercise("DecoderBlock", lesson="encoder_decoder")


def made_decoder(answer, case, c, seed):
    weights = weights_for(decoder_shapes(c), seed)
    module = load_all(case, case.call(answer, c), weights)
    return module, partial(torch_decoder_block, doubled(weights), c)


@decoder.requires(
    "three norms, attention, cross_attention and feed_forward have their parameters",
)
def _(answer, case):
    for c in (SMALL, WIDE):
        module = case.call(answer, c)
        case.parameter_count(module, numbers_in(decoder_shapes(c)))
        load_all(case, module, weights_for(decoder_shapes(c), 0))


@decoder.requires(
    "one position each: back, across, think, each pre-norm",
    "Three lines of `pre_norm`. The second sublayer takes the memory too: "
    "`functools.partial` or a small function binds it.",
)
def _(answer, case):
    module, oracle = made_decoder(answer, case, SMALL, seed=300)
    x, memory = probe(5, 1, 12, seed=301), probe(5, 1, 12, seed=302)
    case.agrees(module, oracle, x, memory)
    weights = wide_awake(weights_for(decoder_shapes(SMALL), 300))
    oracle = partial(torch_decoder_block, doubled(weights), SMALL)
    case.agrees(load_all(case, module, weights), oracle, x, memory)


@decoder.requires(
    "several positions: x looks at itself, then at a memory of another length",
    "The memory comes in normalised, from the end of the encoder; only x is normalised "
    "here.",
)
def _(answer, case):
    for c, seed in ((SMALL, 310), (WIDE, 320)):
        module, oracle = made_decoder(answer, case, c, seed)
        x, memory = (
            probe(2, 5, c.d_model, seed=seed + 1),
            probe(2, 7, c.d_model, seed=9),
        )
        case.agrees(module, oracle, x, memory)
        case.agrees(module, oracle, 0.1 * x, 3.0 * memory[:, :4])


@decoder.requires(
    "mask is for looking back, memory_mask for looking across",
    "One is `(T, T)`, the other `(B, 1, 1, S)`: which attention has which scores?",
)
def _(answer, case):
    module, oracle = made_decoder(answer, case, SMALL, seed=330)
    x, memory = probe(4, 5, 12, seed=331), probe(4, 7, 12, seed=332)
    lengths = torch.tensor([3, 7, 1, 5])
    rows = (torch.arange(7) < lengths[:, None])[:, None, None]
    square = memory[:, :5]
    case.agrees(
        module,
        oracle,
        x,
        square,
        mask=random_mask(4, 3, 5, 5, seed=333),
        memory_mask=random_mask(4, 3, 5, 5, seed=334),
    )
    case.agrees(module, oracle, x, memory, causal(5))
    case.agrees(module, oracle, x, memory, None, rows)
    case.agrees(module, oracle, x, memory, causal(5), rows)


@decoder.requires(
    "the memory may come as the pair that `cross_attention.keys_values` made",
    "Hand the memory on as it is, and ask nothing of its shape.",
)
def _(answer, case):
    module, oracle = made_decoder(answer, case, SMALL, seed=340)
    x, memory = probe(2, 5, 12, seed=341), probe(2, 7, 12, seed=342)
    weights = own_weights(weights_for(decoder_shapes(SMALL), 340), "cross_attention")
    pair = tuple(y.float() for y in torch_pair(memory, weights, 3))
    expected = oracle(x.double(), memory.double(), causal(5))
    case.close(
        case.call(module, x, pair, causal(5)), expected, "with a pair, the result"
    )


@decoder.requires("float64, bfloat16, `eval()` and a second call work")
def _(answer, case):
    module, oracle = made_decoder(answer, case, SMALL, seed=350)
    for size, seed in (((3, 7), 351), ((2, 4), 352)):
        x, memory = probe(*size, 12, seed=seed), probe(size[0], 6, 12, seed=seed + 5)
        case.agrees(module.eval(), oracle, x, memory)
    for kind in (torch.float64, torch.bfloat16):
        weights = weights_for(decoder_shapes(SMALL), 350)
        weights = {n: w.to(kind).double() for n, w in weights.items()}
        x, memory = (probe(2, n, 12, seed=n).to(kind) for n in (5, 7))
        expected = torch_decoder_block(weights, SMALL, x.double(), memory.double())
        tolerance = SINES if kind == torch.float64 else None
        actual = case.call(module.to(kind), x, memory)
        case.close(
            actual, expected, f"in {kind}, the result", like=x, tolerance=tolerance
        )


@decoder.requires("gradients reach x, the memory and every parameter")
def _(answer, case):
    module, oracle = made_decoder(answer, case, SMALL, seed=360)
    x, memory = probe(2, 5, 12, seed=361), probe(2, 7, 12, seed=362)
    case.gradients_agree(module, oracle, x, memory)
    trained(case, module, x, memory)


@decoder.requires("it creates nothing on another device")
def _(answer, case):
    module, _ = made_decoder(answer, case, SMALL, seed=370)
    case.any_device(module, probe(2, 5, 12), probe(2, 7, 12))


DECODER_FAULTS = {
    "no_residual": "The stream is replaced instead of added to: `x +` is missing.",
    "no_second_residual": "Looking across replaces the stream, so what looking back has "
    "found is lost.",
    "residual_from_the_input": "What looking across finds is added to the block's input, "
    "so that what looking back has found is lost.",
    "across_from_the_input": "Looking across asks with the block's input. It asks with the "
    "stream as looking back has left it.",
    "stream_normalised": "The normalised stream goes on. In pre-norm only the sublayer "
    "sees the normalised values.",
    "post_norm": "The norms come after the additions, as in the paper of 2017. Here they "
    "come before (pre-norm).",
    "parallel": "Two sublayers read the same stream; each reads what the one before has "
    "left.",
    "across_first": "It looks across before it looks back. What has been written so far "
    "decides what to look for.",
    "across_last": "It looks across after it thinks. What is found should be thought about "
    "in the same block.",
    "self_attention_unused": "Looking back is missing from the stream.",
    "cross_attention_unused": "Looking across is missing from the stream: the source does "
    "not matter at all.",
    "feed_forward_unused": "The feed-forward network's result is not used.",
    "looks_at_itself_twice": "The cross-attention looks at x. Its memory is what the "
    "encoder made.",
    "memory_normalised": "The memory goes through `norm_2` too. It is normalised once, at "
    "the end of the encoder, and is the same for every block.",
    "queries_not_normalised": "Looking across reads the stream without `norm_2`.",
    "second_norm_twice": "`norm_2` is used twice, `norm_3` never.",
    "norms_exchanged": "`norm_2` and `norm_3` are exchanged.",
    "not_normalised": "The norms are made but never called.",
    "layer_norm": "The norms subtract the mean, as LayerNorm does. `RMSNorm` does not.",
    "eps_ignored": "The norms use their default eps; the config's `norm_eps` is not passed "
    "on.",
    "always_causal": "The block hides the future by itself, even where no mask is given. "
    "It takes the mask that it gets; the model decides.",
    "mask_ignored": "`mask` is not passed on to the attention of x to itself.",
    "memory_mask_ignored": "`memory_mask` is not passed on, so padding of the source is "
    "looked at.",
    "masks_exchanged": "The two masks are exchanged.",
    "mask_for_both": "`mask` is used for both attentions; `memory_mask` belongs to the "
    "second.",
    "memory_mask_for_both": "`memory_mask` is used for both attentions; `mask` belongs to "
    "the first.",
    "one_head": "The attentions have one head: `n_heads` is not passed on.",
    "rotated": "Queries and keys are rotated. Positions come with the embedding here.",
    "gelu": "The activation is GELU; this block has ReLU.",
    "no_activation": "The feed-forward network does not bend.",
}
for name, sentence in DECODER_FAULTS.items():
    decoder.fault(name, sentence, decoder_with(name))


# EncoderDecoder -----------------------------------------------------------------------

model_ = Exercise("EncoderDecoder", lesson="encoder_decoder")
OTHER = Sizes(17, 10, 3, 5, 14, 9, norm_eps=1e-3, pad_id=0)


def made_model(answer, case, c, seed):
    weights = weights_for(model_shapes(c), seed)
    module = load_all(case, case.call(answer, c), weights)
    return module, Oracle(weights, c)


def sources(lengths, c, seed):
    """Rows of these lengths without padding in them, filled up with it."""
    ids = probe_ids(len(lengths), max(lengths), below=c.vocab_size - 1, seed=seed)
    ids = ids + (ids >= c.pad_id)  # every token but the padding
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return torch.where(real, ids, c.pad_id)


def agree(case, actual, expected, what, module):
    like = next(module.parameters())
    tolerance = SINES if like.dtype == torch.float64 else None
    case.close(actual, expected, what, like=like, tolerance=tolerance)


@model_.requires(
    "embedding, encoder, encoder_norm, decoder, decoder_norm and head are there",
    "One embedding serves both halves; `encoder` and `decoder` are an `nn.ModuleList` "
    "each; every norm is an `RMSNorm`.",
)
def _(answer, case):
    for c in (SMALL, OTHER):
        module = case.call(answer, c)
        norms = [
            getattr(module, f"{half}_norm", None) for half in ("encoder", "decoder")
        ]
        case.true(
            norms[0] is None or norms[0] is not norms[1],
            "`encoder_norm` and `decoder_norm` are one object; each half has its own.",
        )
        case.parameter_count(module, numbers_in(model_shapes(c)))
        load_all(case, module, weights_for(model_shapes(c), 0))


@model_.requires("each block is an object of its own")
def _(answer, case):
    module = case.call(answer, OTHER)
    for half in ("encoder", "decoder"):
        blocks = list(getattr(module, half)._modules.values())
        case.equal(len(blocks), 3, f"the number of blocks in `{half}`")
        names = [dict(b.named_parameters())["attention.w_q.weight"] for b in blocks]
        alike = any(torch.equal(names[0], other) for other in names[1:])
        case.true(not alike, f"The blocks of `{half}` start with the same values.")


@model_.requires(
    "encode: embedding plus positions, every block, the norm; and the mask of the source",
    "Begin with `embed`; each block reads what the one before has left; the norm comes "
    "last. The encoder hides nothing but padding. Print the mask for one row: it is "
    "`(B, 1, 1, S)`, boolean, True where there is text.",
)
def _(answer, case):
    for c, seed in ((replace(SMALL, n_layers=1), 400), (OTHER, 500)):
        module, oracle = made_model(answer, case, c, seed)
        source = sources([7, 7], c, seed=1)
        result = case.call(module.encode, source)
        case.is_tuple(result, 2, "the result of encode")
        agree(case, result[0], oracle.encode(source), "the memory", module)
        case.equal(result[1], torch.ones(2, 1, 1, 7, dtype=torch.bool), "its mask")


@model_.requires(
    "a source with padding at the end is read as without it",
    "Which token is padding stands in `config.pad_id`; `source != pad_id` says where text "
    "is. Who must not look at the rest?",
)
def _(answer, case):
    module, oracle = made_model(answer, case, SMALL, seed=600)
    lengths = [5, 3, 1, 7]
    source = sources(lengths, SMALL, seed=2)
    memory, mask = case.call(module.encode, source)
    real = torch.arange(7) < torch.tensor(lengths)[:, None]
    case.equal(mask, real[:, None, None], "the mask")
    for row, n in enumerate(lengths):
        alone = oracle.encode(source[row : row + 1, :n])
        agree(
            case, memory[row : row + 1, :n], alone, f"row {row} of the memory", module
        )


@model_.requires(
    "padding may stand anywhere in a row, and in every row: the shapes stay",
    "The mask is True where `source != pad_id`, place by place.",
)
def _(answer, case):
    module, oracle = made_model(answer, case, SMALL, seed=650)
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
        case.equal(
            tuple(memory.shape), (*source.shape, 12), f"{what}, the memory's shape"
        )
        expected = oracle.encode(source)[real]
        agree(
            case, memory[real], expected, f"{what}, the memory of what is text", module
        )


@model_.requires(
    "decode: each target position sees itself, what came before, and the whole memory",
    "Take a target of one token first: `embed`, each block with the same memory, the "
    "norm, the head. Then change the last of five tokens and see which logits move: only "
    "the last may.",
)
def _(answer, case):
    for c, seed in ((replace(SMALL, n_layers=1), 700), (OTHER, 800)):
        module, oracle = made_model(answer, case, c, seed)
        memory = probe(2, 7, c.d_model, seed=3)
        target = probe_ids(2, 5, below=c.vocab_size, seed=4)
        actual = case.call(module.decode, target, memory)
        agree(
            case, actual, oracle.decode(target, memory.double()), "the logits", module
        )
        real = torch.arange(7) < torch.tensor([7, 4])[:, None]
        actual = case.call(module.decode, target, memory, real[:, None, None])
        expected = oracle.decode(target, memory.double(), real)
        agree(case, actual, expected, "with a mask, the logits", module)


@model_.requires(
    "decode takes a list with one pair of keys and values for each block, too",
    "`isinstance(memory, list)`; block i gets the i-th.",
)
def _(answer, case):
    c = OTHER
    module, oracle = made_model(answer, case, c, seed=900)
    memory = probe(2, 7, c.d_model, seed=5)
    target = probe_ids(2, 5, below=c.vocab_size, seed=6)
    kept = [
        tuple(
            y.float()
            for y in torch_pair(
                memory, own_weights(oracle.p, f"decoder.{i}.cross_attention"), c.n_heads
            )
        )
        for i in range(c.n_layers)
    ]
    actual = case.call(module.decode, target, kept)
    agree(case, actual, oracle.decode(target, memory.double()), "the logits", module)
    real = torch.arange(7) < torch.tensor([3, 7])[:, None]
    actual = case.call(module.decode, target, kept, real[:, None, None])
    expected = oracle.decode(target, memory.double(), real)
    agree(case, actual, expected, "with a list and a mask, the logits", module)


@model_.requires(
    "source and target together give nn.Transformer's logits, padding included",
    "`forward` is `encode`, then `decode` with both of its results.",
)
def _(answer, case):
    for c, seed in ((SMALL, 1_000), (OTHER, 1_100)):
        module, oracle = made_model(answer, case, c, seed)
        source = sources([6, 2, 4], c, seed=7)
        target = probe_ids(3, 5, below=c.vocab_size, seed=8)
        agree(
            case,
            case.call(module, source, target),
            oracle(source, target),
            "the logits",
            module,
        )


@model_.requires(
    "a source and a target of max_len tokens are read",
    "Only more than `max_len` tokens are too many.",
)
def _(answer, case):
    for c, seed in ((SMALL, 1_000), (OTHER, 1_100)):
        module, oracle = made_model(answer, case, c, seed)
        longest = c.max_len
        source = sources([longest, 1], c, seed=9)
        target = probe_ids(2, longest, below=c.vocab_size, seed=10)
        actual = case.call(module, source, target)
        agree(case, actual, oracle(source, target), "the logits", module)


@model_.requires("the configuration is kept in `config`")
def _(answer, case):
    module = case.call(answer, SMALL)
    case.equal(getattr(module, "config", None), SMALL, "`config`")


@model_.requires(
    "a row of padding alone is a ValueError that names the row",
    "Such a row has nothing to look at: the model would answer from nothing, or with NaN. "
    "Find the first row in which no token is real.",
)
def _(answer, case):
    module, _ = made_model(answer, case, SMALL, seed=1_200)
    target = probe_ids(3, 4, below=23)
    everything = torch.full((1, 6), SMALL.pad_id)
    case.raises(
        ValueError, module, everything, target[:1], because="a source of padding"
    )
    for row in (1, 2):
        source = sources([5, 4, 3], SMALL, seed=11)
        source[row] = SMALL.pad_id
        for f, args in ((module.encode, (source,)), (module, (source, target))):
            case.raises(
                ValueError, f, *args, mentions=(row,), because=f"row {row} is padding"
            )


@model_.requires("an empty source is a ValueError")
def _(answer, case):
    for c in (SMALL, OTHER):
        module, _ = made_model(answer, case, c, seed=1_300)
        empty = torch.empty(2, 0, dtype=torch.int64)
        case.raises(
            ValueError, module, empty, probe_ids(2, 4, below=9), because="no token"
        )


@model_.requires(
    "a source or target longer than max_len is a ValueError that names both"
)
def _(answer, case):
    module, _ = made_model(answer, case, SMALL, seed=1_400)
    short, long = sources([5, 5], SMALL, seed=12), sources([12, 12], SMALL, seed=13)
    for what, args in (("source", (long, short)), ("target", (short, long))):
        case.raises(
            ValueError,
            module,
            *args,
            mentions=(12, 11),
            because=f"a {what} of 12 tokens where max_len is 11",
        )


@model_.requires("float64, `eval()` and a second call with another source work")
def _(answer, case):
    module, oracle = made_model(answer, case, SMALL, seed=1_500)
    module = module.double().eval()
    for lengths, size in (((4, 6), 3), ((6, 2), 3), ((2,), 8), ((5, 1, 3), 1)):
        source = sources(list(lengths), SMALL, seed=14)
        target = probe_ids(len(lengths), size, below=23, seed=15)
        agree(
            case,
            case.call(module, source, target),
            oracle(source, target),
            "the logits",
            module,
        )


@model_.requires("gradients reach every parameter")
def _(answer, case):
    module, _ = made_model(answer, case, SMALL, seed=1_600)
    trained(case, module, sources([7, 5, 2], SMALL, seed=16), probe_ids(3, 5, below=23))


@model_.requires("it creates nothing on another device")
def _(answer, case):
    module, _ = made_model(answer, case, SMALL, seed=1_700)

    class Decode(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = module

        def forward(self, target, memory):
            return self.model.decode(target, memory)

    case.any_device(Decode(), probe_ids(2, 5, below=23), probe(2, 7, 12))
    case.any_device(module, sources([4, 3], SMALL, seed=17), probe_ids(2, 5, below=23))


MODEL_FAULTS = {
    "two_embeddings": "There is an embedding for each half; one serves both.",
    "head_tied": "The head is the embedding's matrix. Here it is one of its own.",
    "no_encoder_norm": "There is no `encoder_norm`. With pre-norm blocks nothing else "
    "brings the memory to size.",
    "encoder_norm_unused": "`encoder_norm` is made but not used: the memory leaves the "
    "encoder without it.",
    "decoder_norm_unused": "`decoder_norm` is made but not used.",
    "last_encoder_block_alone": "Every block of the encoder reads the embedding, so that "
    "only the last counts. Each reads what the one before has left: `x = block(x, …)`.",
    "last_decoder_block_alone": "Every block of the decoder reads the embedding, so that "
    "only the last counts. Each reads what the one before has left: `x = block(x, …)`.",
    "memory_normalised_again": "`decode` normalises the memory again. `encode` has done "
    "that.",
    "encoder_norm_in_the_decoder": "`decode` ends with `encoder_norm`; its own is "
    "`decoder_norm`.",
    "encoder_norm_in_the_loop": "`encoder_norm` runs after every block. It runs once, "
    "after the last: is the line indented too far?",
    "decoder_norm_in_the_loop": "`decoder_norm` runs after every block. It runs once, "
    "after the last: is the line indented too far?",
    "no_positions": "Nothing tells where a token stands: `sinusoidal` is missing.",
    "no_source_positions": "The source has no positions. The encoder would read a bag of "
    "letters.",
    "no_target_positions": "The target has no positions.",
    "positions_from_1": "The positions count from 1; the first token stands at 0.",
    "positions_twice": "The positions are added twice.",
    "max_len_refused": "`max_len` tokens are refused; only more are too many.",
    "encoder_norm_eps_ignored": "`encoder_norm` has its default eps, not `norm_eps`.",
    "decoder_norm_eps_ignored": "`decoder_norm` has its default eps, not `norm_eps`.",
    "shifted_in_decode": "`decode` shifts the target. Who calls it has done that already, "
    "with `shift_right`.",
    "log_probabilities": "The result is log-probabilities; logits are asked for.",
    "embedding_scaled": "The embedding is multiplied by √d_model, as in the paper of 2017. "
    "Here it is not.",
    "encoder_causal": "The encoder hides what comes later. It may see all of the source.",
    "encoder_unused": "The encoder's blocks are not used: the memory is the embedding.",
    "encoder_sees_padding": "The encoder looks at padding: `attention` in its blocks needs "
    "the mask of the source.",
    "cross_sees_padding": "The decoder looks at padding: its blocks need the mask of the "
    "source as `memory_mask`.",
    "padding_seen": "Padding is looked at by both halves.",
    "padding_is_0": "Padding is taken to be token 0. Which token it is stands in "
    "`config.pad_id`.",
    "padding_counted": "The mask is made of the number of tokens in each row, so padding "
    "counts as text where it does not stand at the end.",
    "first_token_decides": "A row that begins with padding is refused. It holds padding "
    "*alone* only if no place of it holds text.",
    "source_cut": "The source is cut where the longest row ends. The memory and its mask "
    "are as long as the source that came in.",
    "mask_forgotten_with_a_list": "Given a list of pairs, `decode` does not use "
    "`memory_mask`.",
    "mask_of_the_first_row": "The mask of the first row is used for all rows.",
    "mask_flat": "The mask is `(B, S)`. It must broadcast to `(B, H, T, S)`, so it needs "
    "two dimensions of size 1 in the middle.",
    "no_mask": "The decoder sees later tokens of the target, and so the answer.",
    "mask_upside_down": "The decoder's mask is upside down.",
    "itself_hidden": "A position of the target does not see itself, and so not the newest "
    "token that is known. The target is shifted already: the diagonal is open.",
    "target_padding_hidden": "`decode` hides padding in the target. At the end of a row "
    "that needs no mask, since nothing real stands behind it; elsewhere the token is one "
    "like any other, and must see itself.",
    "one_ahead": "The decoder sees one token ahead: exactly the one that it is asked for.",
    "blocks_reversed": "The blocks of the decoder run in reverse.",
    "first_pair_for_all": "Every block gets the first block's keys and values. Each has a "
    "`w_k` and a `w_v` of its own.",
    "each_layer_its_own": "Block i of the decoder looks at what block i of the encoder "
    "left. All of them look at the same memory, the end of the encoder.",
    "shifted_inside": "The target is shifted in the model. Who calls it has done that "
    "already, with `shift_right`.",
    "source_and_target_exchanged": "Source and target are exchanged.",
    "probabilities": "The result is probabilities; logits are asked for.",
    "last_position_only": "Only the last position's logits come back. Training needs all.",
    "padding_accepted": "A row of padding alone is accepted. It has nothing to look at, so "
    "its answer comes from nothing, and nobody is told.",
    "only_a_whole_batch_of_padding": "Padding alone is refused only where all rows are "
    "padding. One such row between others is as wrong, and harder to see.",
    "row_not_named": "The message does not say which row is padding.",
    "empty_accepted": "An empty source is accepted.",
    "source_length_unchecked": "A source longer than `max_len` is accepted.",
    "target_length_unchecked": "A target longer than `max_len` is accepted.",
}
for name, sentence in MODEL_FAULTS.items():
    model_.fault(name, sentence, model_with(name))


# translate ----------------------------------------------------------------------------

translation = Exercise("translate", lesson="encoder_decoder")
START, END = 5, 3


class ToyAttention(nn.Module):
    """Cross-attention of two heads with fixed weights."""

    def __init__(self, d_model, seed):
        super().__init__()
        self.w_q, self.w_k, self.w_v = (
            nn.Linear(d_model, d_model, bias=False) for _ in range(3)
        )
        with torch.no_grad():
            for i, w in enumerate((self.w_q, self.w_k, self.w_v)):
                w.weight.copy_(probe(d_model, d_model, seed=seed + i, scale=0.6))

    def keys_values(self, memory):
        return heads_of(self.w_k(memory), 2), heads_of(self.w_v(memory), 2)

    def forward(self, x, memory, mask):
        k, v = memory if isinstance(memory, tuple) else self.keys_values(memory)
        scores = heads_of(self.w_q(x), 2) @ k.mT
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        out = torch.softmax(scores, -1) @ v
        return x + out.transpose(1, 2).flatten(2)


class Toy(nn.Module):
    """Stands for a model: what comes next depends on all that it is given."""

    def __init__(self, seed=0, end_id=END, pad_id=0, max_len=10, pull=100.0):
        super().__init__()
        self.config = Sizes(13, 8, 2, 2, 0, max_len, pad_id=pad_id)
        self.end_id, self.pull = end_id, pull
        self.embedding = nn.Embedding.from_pretrained(probe(13, 8, seed=seed))
        self.head = nn.Linear(8, 13, bias=False)
        self.decoder = nn.ModuleList(nn.Module() for _ in range(2))
        self.counts = {"encode": 0, "decode": 0, "keys": [0, 0], "values": [0, 0]}
        for i, block in enumerate(self.decoder):
            block.cross_attention = ToyAttention(8, seed + 10 * i + 1)
            self.watch(block.cross_attention.w_k, "keys", i)
            self.watch(block.cross_attention.w_v, "values", i)
        self.grad_seen, self.given_the_memory = False, 0
        with torch.no_grad():
            self.head.weight.copy_(probe(13, 8, seed=seed + 50))
        self.double()

    def watch(self, layer, what, i):
        def count(*_):
            self.counts[what][i] += 1

        layer.register_forward_hook(count)

    def embed(self, ids):
        x = self.embedding(ids)
        return x + waves(ids.shape[1], 8).to(x)

    def encode(self, source):
        self.counts["encode"] += 1
        real = source != self.config.pad_id
        on_meta = source.device.type == "meta"  # which has no values
        if source.shape[1] == 0 or not (on_meta or real.any(1).all()):
            raise ValueError("a row of the source holds nothing")
        return torch.tanh(self.embed(source)), real[:, None, None]

    def decode(self, target, memory, memory_mask=None):
        self.counts["decode"] += 1
        self.grad_seen |= torch.is_grad_enabled()
        self.given_the_memory += not isinstance(memory, list)
        t = target.shape[1]
        if t > self.config.max_len:
            raise RuntimeError("the decoder was given more than max_len tokens")
        x = self.embed(target)
        x = x + x.cumsum(1)
        for i, block in enumerate(self.decoder):
            own = memory[i] if isinstance(memory, list) else memory
            x = block.cross_attention(x, own, memory_mask)
        logits = torch.sin(9.0 * self.head(x))  # likeliest is another token each time
        place = (target.cumsum(1) % 5 == 2)[..., None]  # where a text may end
        end = torch.arange(13, device=x.device) == self.end_id
        return logits.masked_fill(end, -50.0) + (place & end) * self.pull

    def forward(self, source, target):
        return self.decode(target, *self.encode(source))


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
    return sources(lengths, Sizes(13, 8, 2, 2, 0, 9, pad_id=pad_id), seed)


def expect(case, answer, source, what, start_id=START, end_id=END, max_tokens=9, **toy):
    expected = greedy(Toy(end_id=end_id, **toy), source, start_id, end_id, max_tokens)
    model = Toy(end_id=end_id, **toy)
    actual = case.call(answer, model, source, start_id, end_id, max_tokens)
    case.equal(actual, expected, f"{what}: the result")
    return model, expected


@translation.requires(
    "one row, one token: the likeliest after the start",
    "What does the decoder read in the very first step, and which position's logits speak "
    "of the next token?",
)
def _(answer, case):
    for seed in (1, 2, 3):
        source = toy_source([5], seed)
        expect(case, answer, source, "one token", max_tokens=1, seed=seed)


@translation.requires(
    "one row, several tokens: each step reads all that was written",
    "The start stands in front of what the decoder reads, and is no part of the result.",
)
def _(answer, case):
    for seed, n in ((1, 2), (2, 5), (3, 9)):
        source = toy_source([5], seed)
        expect(case, answer, source, f"{n} tokens", max_tokens=n, seed=seed)


@translation.requires(
    "a row goes up to its end_id, which is part of the result",
    "Stop when the end has been written, not when it would be.",
)
def _(answer, case):
    for seed in (1, 2, 3):
        expect(case, answer, toy_source([5], seed), "one row", seed=seed)


@translation.requires(
    "several rows, some padded: each is what it would be alone, filled up with pad_id",
    "Rows end at different steps. The loop goes on until all have ended; those that have "
    "must write padding from then on.",
)
def _(answer, case):
    for seed in (4, 5, 6):
        source = toy_source([7, 2, 5, 3], seed)
        expect(case, answer, source, "four rows", seed=seed)


@translation.requires("another start, end and padding than in the cases before")
def _(answer, case):
    source = toy_source([6, 3, 4], 7, pad_id=11)
    more = dict(start_id=1, end_id=8, seed=7, pad_id=11)
    expect(case, answer, source, "other special tokens", **more)
    more = dict(start_id=0, end_id=0, seed=12, pad_id=11)
    expect(case, answer, source, "0 as start and end", **more)


@translation.requires(
    "the encoder runs once, and each block makes keys and values of the memory once",
    "`keys_values` of every block's `cross_attention`, before the loop; `decode` takes the "
    "list of pairs in place of the memory.",
)
def _(answer, case):
    source = toy_source([7, 2, 5], 8)
    model, _ = expect(case, answer, source, "three rows", seed=8)
    n = model.counts["encode"]
    case.true(n == 1, f"The encoder ran {n} times; once is enough.")
    case.true(
        model.given_the_memory == 0,
        f"`decode` was given no list of pairs in {model.given_the_memory} of "
        f"{model.counts['decode']} calls.",
    )
    for name, w in (("keys", "w_k"), ("values", "w_v")):
        counts = model.counts[name]
        ran = (
            f"In the two blocks {w} ran {counts[0]} and {counts[1]} times on the memory"
        )
        case.true(max(counts) <= 2, f"{ran}; once each is enough.")
        case.true(counts == [1, 1], f"{ran}; once each is asked for.")


@translation.requires("it stops as soon as all rows have ended")
def _(answer, case):
    source = toy_source([7, 2, 5, 3], 10)
    model, expected = expect(case, answer, source, "four rows", seed=10)
    n = expected.shape[1]
    case.true(
        model.counts["decode"] <= n,
        f"The longest row has {n} tokens, and the decoder ran "
        f"{model.counts['decode']} times.",
    )


@translation.requires("no gradients are recorded")
def _(answer, case):
    model, _ = expect(case, answer, toy_source([5], 1), "one row", seed=1)
    case.true(not model.grad_seen, "The decoder ran with gradients enabled.")


@translation.requires(
    "the model is left in the mode it was in",
    "`eval()` and `train()` change the caller's model. The mode is the caller's affair; "
    "whoever changes it must put it back.",
)
def _(answer, case):
    for mode in (True, False):
        model = Toy(seed=1).train(mode)
        case._run(answer, (model, toy_source([5], 1), START, END, 3), {})
        changed = any(part.training != mode for part in model.modules())
        case.true(
            not changed,
            f"The model came in with `training` {mode} and is left with {not mode}.",
        )


@translation.requires(
    "max_tokens may be as large as max_len",
    "The decoder reads the start and all tokens but the last: `max_tokens` in all.",
)
def _(answer, case):
    for pull in (100.0, 0.0):  # without a pull the end never comes
        more = dict(max_tokens=10, seed=3, pull=pull)
        expect(case, answer, toy_source([5], 3), "all of max_len", **more)


@translation.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, Toy(), toy_source([5, 3], 1), START, END, 3)


@translation.requires(
    "max_tokens below 1 or above max_len, and a source of padding, are a ValueError",
    "Test `max_tokens` before anything runs; `encode` looks after the source.",
)
def _(answer, case):
    source = toy_source([5, 3], 1)
    for n in (0, -2, 11):
        case.raises(
            ValueError,
            answer,
            Toy(),
            source,
            START,
            END,
            n,
            mentions=(n,),
            because=f"max_tokens = {n} where max_len is 10",
        )
    source[1] = 0
    case.raises(
        ValueError, answer, Toy(), source, START, END, 4, because="padding alone"
    )


def translator(wrong=""):
    def translate(model, source, start_id, end_id, max_tokens):
        longest, pad_id = model.config.max_len, model.config.pad_id
        if max_tokens < 1 and wrong != "limit_unchecked":
            raise ValueError(f"{max_tokens} {longest}")
        if max_tokens > longest and wrong not in (
            "limit_unchecked",
            "too_long_accepted",
        ):
            raise ValueError(f"{max_tokens} {longest}")
        if wrong == "row_by_row" and len(source) > 1:
            rows = [
                translate(model, row[None], start_id, end_id, max_tokens)[0]
                for row in source
            ]
            return nn.utils.rnn.pad_sequence(rows, True, pad_id)
        if wrong == "mode_changed":
            model.eval()
        if wrong == "mode_set_to_training":
            model.eval().train()
        if wrong == "end_0_ignored":
            end_id = end_id or -1
        if wrong == "padding_is_0":
            pad_id = 0
        if wrong == "end_is_always_3":
            end_id = END
        with torch.set_grad_enabled(wrong == "gradients_kept"):
            memory, mask = model.encode(source)
            kept = [b.cross_attention.keys_values(memory) for b in model.decoder]
            if wrong == "first_block_for_all":
                kept = [kept[0]] * len(kept)
            if wrong == "projected_each_step":
                kept = memory
            if wrong == "projected_twice":
                kept = [b.cross_attention.keys_values(memory) for b in model.decoder]
            if wrong == "mask_not_passed":
                mask = None
            first = source[:, :1] if wrong == "starts_with_the_source" else None
            ids = (
                source.new_full((len(source), 1), start_id) if first is None else first
            )
            ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
            steps = max_tokens + {"one_too_many": 1, "one_too_few": -1}.get(wrong, 0)
            while ids.shape[1] <= steps:
                if wrong == "stops_at_the_first_end" and ended.any():
                    break
                if ended.all() and wrong not in ("never_stops", "end_ignored"):
                    break
                if wrong == "encoded_each_step":
                    memory, mask = model.encode(source)
                    kept = memory
                if wrong == "pairs_each_step":
                    kept = [
                        b.cross_attention.keys_values(memory) for b in model.decoder
                    ]
                seen = ids[:, -1:] if wrong == "last_token_alone" else ids
                if wrong == "start_forgotten" and ids.shape[1] > 1:
                    seen = ids[:, 1:]
                logits = model.decode(seen, kept, mask)
                logits = logits[:, 0 if wrong == "first_position" else -1]
                if wrong == "start_never_written":
                    logits[:, start_id] = -torch.inf
                if wrong == "padding_never_written":
                    logits[:, pad_id] = -torch.inf
                if wrong == "nothing_twice_running":
                    logits = logits.scatter(1, ids[:, -1:], -torch.inf)
                token = logits.argmax(-1)
                if wrong == "end_forced" and ids.shape[1] == max_tokens:
                    token = torch.full_like(token, end_id)
                if wrong == "least_likely":
                    token = logits.argmin(-1)
                if wrong == "sampled":
                    token = torch.multinomial(torch.softmax(logits, -1), 1)[:, 0]
                if wrong == "one_row_for_all":
                    token = token[:1].expand(len(ids))
                if wrong == "end_left_out" and (token == end_id).all():
                    break
                fill = end_id if wrong == "filled_with_the_end" else pad_id
                if wrong == "end_overwritten":
                    ended = ended | (token == end_id)
                if wrong not in ("writes_on", "end_ignored"):
                    token = token.masked_fill(ended, fill)
                ended = ended | (token == end_id)
                if wrong == "padding_ends":
                    ended = ended | (token == pad_id)
                ids = torch.cat([ids, token[:, None]], 1)
        return ids if wrong == "start_kept" else ids[:, 1:]

    return translate


TRANSLATE_FAULTS = {
    "starts_with_the_source": "The decoder starts from the source's first token; it starts "
    "from `start_id`.",
    "start_kept": "The start is part of the result.",
    "start_forgotten": "The start is gone from the second step on. In training it stood "
    "in front of every target.",
    "first_position": "The next token is read from the first position's logits. The last "
    "one has seen everything.",
    "last_token_alone": "The decoder reads only the newest token. Only the memory's keys "
    "and values are kept here, so it has to read all that was written again.",
    "least_likely": "It takes the least likely token.",
    "sampled": "Tokens are drawn at random; the likeliest is asked for.",
    "one_row_for_all": "Every row gets the first row's token.",
    "one_too_many": "A row may have `max_tokens` tokens, the start not counted; here it "
    "gets one more.",
    "one_too_few": "A row may have `max_tokens` tokens, the start not counted; here it "
    "gets one less.",
    "end_ignored": "`end_id` does not end anything.",
    "end_left_out": "The end is not part of the result. Without it nobody can tell a row "
    "that has ended from one that was cut off.",
    "end_overwritten": "The end itself is overwritten by padding. Fill up the rows that "
    "had ended *before* this step, and ask after that which end in it.",
    "padding_ends": "A row ends where it writes `pad_id`. Only `end_id` ends a row.",
    "end_0_ignored": "An `end_id` of 0 is not taken for one: 0 counts as False in `or` and "
    "`if`.",
    "start_never_written": "`start_id` is never written, even where it is the likeliest "
    "token.",
    "padding_never_written": "`pad_id` is never written, even where it is the likeliest "
    "token. What the model says is what a row gets, until it ends.",
    "nothing_twice_running": "A token never follows itself. The likeliest is asked for, "
    "whatever stood before.",
    "end_forced": "The last of `max_tokens` tokens is made `end_id`. A row that is cut off "
    "has no end, and whoever reads it should see that.",
    "row_by_row": "The rows of the batch are translated one at a time. All of them go "
    "through the model together.",
    "pairs_each_step": "The list of pairs is made again in every step. Make it once, "
    "before the loop.",
    "mode_changed": "`model.eval()` stays behind: the caller's model is no longer in "
    "training mode.",
    "mode_set_to_training": "`model.train()` is called at the end, whatever mode the model "
    "was in.",
    "end_is_always_3": "The end is taken to be one certain token; it is `end_id`.",
    "stops_at_the_first_end": "The loop stops when the first row has ended, and cuts off "
    "all others.",
    "writes_on": "A row that has ended goes on writing until the others are done.",
    "filled_with_the_end": "After its end a row is filled with `end_id`; padding is asked "
    "for.",
    "padding_is_0": "A row that has ended is filled with 0; padding is `config.pad_id`.",
    "never_stops": "It runs for `max_tokens` steps although all rows have ended, or its "
    "result is as wide as that. Stop when the last row ends; the longest gives the width.",
    "mask_not_passed": "The mask of the source is not passed to `decode`, so padding is "
    "looked at.",
    "projected_each_step": "`decode` gets the memory itself, so every block makes its keys "
    "and values again in every step.",
    "projected_twice": "The keys and values are made twice.",
    "encoded_each_step": "The encoder runs again in every step. The source does not "
    "change.",
    "first_block_for_all": "Every block gets the first block's keys and values.",
    "gradients_kept": "Gradients are recorded: every step keeps what a backward pass would "
    "need.",
    "limit_unchecked": "`max_tokens` is not tested.",
    "too_long_accepted": "`max_tokens` above `max_len` is accepted, and fails in the "
    "middle of a text.",
}
for name, sentence in TRANSLATE_FAULTS.items():
    translation.fault(name, sentence, translator(name))


# The parts of lessons 02 to 09 and these together -------------------------------------

whole_encoder_decoder = IntegrationCheck(
    "whole_encoder_decoder",
    lesson="encoder_decoder",
    parts={
        "attention": "attention",
        "causal_mask": "attention",
        "padding_mask": "attention",
        "split_heads": "multi_head",
        "merge_heads": "multi_head",
        "MultiHeadAttention": "multi_head",
        "sinusoidal": "positions",
        "FeedForward": "feed_forward",
        "RMSNorm": "norms",
        "pre_norm": "norms",
        "cross_entropy": "training",
        "learning_rate": "training",
        "AdamW": "training",
        "clip_gradients": "training",
        "shift_right": "encoder_decoder",
        "CrossAttention": "encoder_decoder",
        "EncoderBlock": "encoder_decoder",
        "DecoderBlock": "encoder_decoder",
        "EncoderDecoder": "encoder_decoder",
        "translate": "encoder_decoder",
    },
)


@whole_encoder_decoder.requires(
    "split_heads, attention, merge_heads and padding_mask do what CrossAttention does",
    "The mask of lesson 02 goes into both as it is. Which of them gives another result "
    "than PyTorch's attention?",
)
def _(parts, case):
    p = cross_weights(12, 2_000)
    module = load_all(case, case.call(parts["CrossAttention"], 12, 3), p)
    x, memory = probe(3, 5, 12, seed=2_001), probe(3, 7, 12, seed=2_002)
    mask = case.call(parts["padding_mask"], torch.tensor([7, 2, 0]), 7)
    expected = torch_cross(x.double(), memory.double(), doubled(p), 3, mask.bool())
    real = (torch.arange(7) < torch.tensor([7, 2, 0])[:, None])[:, None, None]
    case.equal(mask, real, "the mask of lengths 7, 2 and 0")
    q, k, v = (
        case.call(parts["split_heads"], y @ p[w].T, 3)
        for w, y in (("w_q", x), ("w_k", memory), ("w_v", memory))
    )
    out = case.call(parts["attention"], q, k, v, mask)
    out = case.call(parts["merge_heads"], out) @ p["w_o"].T
    case.close(out, expected, "the parts one by one", like=x)
    case.close(case.call(module, x, memory, mask), expected, "CrossAttention", like=x)


@whole_encoder_decoder.requires(
    "pre_norm, RMSNorm, MultiHeadAttention and FeedForward make up EncoderBlock",
    "Write the block out with your parts and compare after each line.",
)
def _(parts, case):
    c = SMALL
    p = weights_for(encoder_shapes(c), 2_100)
    attention, ff, one, two = built_parts(parts, case, p, c, 1, 2)
    mask = case.call(parts["padding_mask"], torch.tensor([7, 3]), 7)
    x = probe(2, 7, 12, seed=2_101, scale=0.3)
    y = case.call(parts["pre_norm"], x, partial(attention, mask=mask), one)
    y = case.call(parts["pre_norm"], y, ff, two)
    expected = torch_encoder_block(doubled(p), c, x.double(), mask)
    case.close(y, expected, "the parts one by one", like=x)
    module = load_all(case, case.call(parts["EncoderBlock"], c), p)
    case.close(case.call(module, x, mask), expected, "EncoderBlock", like=x)


def built_parts(parts, case, p, c, *norms):
    """Attention, feed-forward network and norms of a block, of the learner's parts."""
    attention = case.call(parts["MultiHeadAttention"], c.d_model, c.n_heads)
    ff = case.call(parts["FeedForward"], c.d_model, c.d_ff, torch.relu)
    made = [
        load_all(case, attention, own_weights(p, "attention")),
        load_all(case, ff, own_weights(p, "feed_forward")),
    ]
    for i in norms:
        norm = case.call(parts["RMSNorm"], c.d_model, c.norm_eps)
        made.append(case.load(norm, weight=p[f"norm_{i}"]))
    return made


@whole_encoder_decoder.requires(
    "with causal_mask and CrossAttention they make up DecoderBlock",
    "Two masks are at work: causal for looking back, padding for looking across.",
)
def _(parts, case):
    c = SMALL
    p = weights_for(decoder_shapes(c), 2_200)
    attention, ff, one, two, three = built_parts(parts, case, p, c, 1, 2, 3)
    cross_ = case.call(parts["CrossAttention"], c.d_model, c.n_heads)
    load_all(case, cross_, own_weights(p, "cross_attention"))
    x, memory = probe(2, 5, 12, seed=2_201, scale=0.3), probe(2, 7, 12, seed=2_202)
    mask = case.call(parts["causal_mask"], 5)
    seen = case.call(parts["padding_mask"], torch.tensor([7, 3]), 7)
    y = case.call(parts["pre_norm"], x, partial(attention, mask=mask), one)
    across = partial(cross_, memory=memory, memory_mask=seen)
    y = case.call(parts["pre_norm"], y, across, two)
    y = case.call(parts["pre_norm"], y, ff, three)
    expected = torch_decoder_block(
        doubled(p), c, x.double(), memory.double(), causal(5), seen
    )
    case.close(y, expected, "the parts one by one", like=x)
    module = load_all(case, case.call(parts["DecoderBlock"], c), p)
    actual = case.call(module, x, memory, mask, seen)
    case.close(actual, expected, "DecoderBlock", like=x)


@whole_encoder_decoder.requires(
    "sinusoidal gives the positions that EncoderDecoder adds"
)
def _(parts, case):
    module, oracle = made_model(parts["EncoderDecoder"], case, SMALL, seed=2_300)
    case.close(case.call(parts["sinusoidal"], 9, 12), waves(9, 12), "nine positions")
    source = sources([6, 2, 4], SMALL, seed=2_301)
    target = probe_ids(3, 5, below=23, seed=2_302)
    case.close(case.call(module, source, target), oracle(source, target), "the logits")


class Trained(Oracle):
    """The oracle with an embedding and a head that learn, too."""

    def parameters(self):
        ours = [self.p[name].requires_grad_() for name in ("embedding", "head")]
        return [*ours, *self.machine.parameters()]


@whole_encoder_decoder.requires(
    "three steps with shift_right and lesson 09's parts are those of PyTorch",
    "The loss of the first step compares `shift_right` and `cross_entropy`, the next ones "
    "the gradients, the clipping, the rate and AdamW.",
)
def _(parts, case):
    weights = weights_for(model_shapes(SMALL), 2_400)
    model = load_all(case, case.call(parts["EncoderDecoder"], SMALL), weights).double()
    oracle = Trained(weights, SMALL)
    source = sources([6, 2, 4], SMALL, seed=2_401)
    target = probe_ids(3, 5, below=23, seed=2_402)
    options = dict(lr=1.0, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)
    mine = case._run(parts["AdamW"], (model.parameters(),), options)
    theirs = torch.optim.AdamW(oracle.parameters(), **options)
    for step in (1, 2, 3):
        rate = case.call(parts["learning_rate"], step, 0.05, 0.01, 2, 4)
        expected_rate = (0.025, 0.05, 0.03)[step - 1]
        case.true(
            math.isclose(rate, expected_rate, rel_tol=1e-9),
            f"The rate of step {step} is {rate}, expected {expected_rate}.",
        )
        for optimizer in (mine, theirs):
            optimizer.param_groups[0]["lr"] = expected_rate
            optimizer.zero_grad()
        read = case.call(parts["shift_right"], target, 1)
        logits = case._run(model, (source, read), {})
        loss = case._run(parts["cross_entropy"], (logits, target), {})
        truth = oracle(source, shifted(target, 1))
        truth = F.cross_entropy(truth.flatten(0, 1), target.flatten())
        case.close(loss, truth, f"the loss of step {step}", tolerance=SINES)
        loss.backward()
        truth.backward()
        case._run(parts["clip_gradients"], (list(model.parameters()), 0.5), {})
        nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
        case._run(mine.step, (), {})
        theirs.step()


@whole_encoder_decoder.requires(
    "translate writes with EncoderDecoder what is written without keeping anything",
    "Compare `decode` with the memory and with the list of pairs.",
)
def _(parts, case):
    module, oracle = made_model(parts["EncoderDecoder"], case, SMALL, seed=2_500)
    source = sources([6, 2, 4], SMALL, seed=2_501)
    ran = [0, 0]
    for i, block in enumerate(module.decoder):

        def count(*_, i=i):
            ran[i] += 1

        watched = getattr(block.cross_attention, "w_k", None)
        if isinstance(watched, nn.Linear):
            watched.register_forward_hook(count)
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


def sum_of_losses(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


class PlainAdam(torch.optim.Adam):
    """Weight decay added to the gradient, as before AdamW."""


class DeafNorm(nn.Module):
    """RMSNorm that keeps to its own eps."""

    def __init__(self, d_model, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


class OpenAttention(Holder):
    """Multi-head attention that forgets its mask."""

    def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
        super().__init__({w: (d_model, d_model) for w in FOUR})
        self.n_heads = n_heads

    def forward(self, x, mask=None, rotate=None):
        return crossed(x, x, self.held(), self.n_heads)


class GeluAlways(Holder):
    """A feed-forward network that keeps to its own activation."""

    def __init__(self, d_model, d_ff, activation):
        super().__init__({"w_1": (d_ff, d_model), "w_2": (d_model, d_ff)})

    def forward(self, x):
        held = self.held()
        return F.linear(F.gelu(F.linear(x, held["w_1"])), held["w_2"])


def sines_then_cosines(t, d_model):
    table = waves(t, d_model).float()
    return torch.cat([table[:, 0::2], table[:, 1::2]], 1)


def nan_attention(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1) @ v


for name, sentence, wrong in (
    (
        "nan_in_a_row_of_padding",
        "`attention` gives NaN to a query that may look at nothing.",
        {"attention": nan_attention},
    ),
    (
        "padding_marked",
        "`padding_mask` marks the padding; True = may look.",
        {
            "padding_mask": lambda lengths, t_k: (
                torch.arange(t_k) >= lengths[:, None]
            )[:, None, None]
        },
    ),
    (
        "heads_not_exchanged",
        "`split_heads` reads the memory in another shape without exchanging dimensions.",
        {"split_heads": lambda x, n: x.reshape(len(x), n, x.shape[1], -1)},
    ),
    (
        "heads_merged_askew",
        "`merge_heads` does not exchange heads and time first.",
        {"merge_heads": lambda x: x.reshape(len(x), x.shape[2], -1)},
    ),
    (
        "mask_forgotten",
        "`MultiHeadAttention` does not use its mask.",
        {"MultiHeadAttention": OpenAttention},
    ),
    ("eps_fixed", "`RMSNorm` ignores the eps that it is given.", {"RMSNorm": DeafNorm}),
    (
        "stream_normalised",
        "`pre_norm` adds to the normalised stream instead of the stream.",
        {"pre_norm": lambda x, sublayer, norm: norm(x) + sublayer(norm(x))},
    ),
    (
        "activation_fixed",
        "`FeedForward` ignores the activation that it is given.",
        {"FeedForward": GeluAlways},
    ),
    (
        "mask_says_hidden",
        "`causal_mask` marks what is hidden, and attention reads True as “may look”.",
        {"causal_mask": lambda t_q, t_k=None: torch.ones(t_q, t_q).triu(1).bool()},
    ),
    (
        "sines_in_halves",
        "`sinusoidal` puts all sines before all cosines; they alternate.",
        {"sinusoidal": sines_then_cosines},
    ),
    (
        "not_shifted",
        "`shift_right` leaves the target where it is.",
        {"shift_right": lambda ids, start_id: ids.clone()},
    ),
    (
        "losses_added",
        "`cross_entropy` is the sum; the mean is asked for.",
        {"cross_entropy": sum_of_losses},
    ),
    (
        "not_clipped",
        "`clip_gradients` changes nothing.",
        {"clip_gradients": lambda parameters, max_norm: torch.tensor(1.0)},
    ),
    (
        "decay_in_the_gradient",
        "`AdamW` adds the weight decay to the gradient.",
        {"AdamW": PlainAdam},
    ),
    (
        "no_warm_up",
        "`learning_rate` starts at its peak.",
        {"learning_rate": lambda step, peak, floor, warmup, total: peak},
    ),
    (
        "cross_forgets_its_mask",
        "`CrossAttention` does not use its mask.",
        {"CrossAttention": cross_with("mask_ignored")},
    ),
    (
        "encoder_causal",
        "`EncoderBlock` hides what comes later.",
        {"EncoderBlock": encoder_with("always_causal")},
    ),
    (
        "masks_exchanged",
        "`DecoderBlock` exchanges its two masks.",
        {"DecoderBlock": decoder_with("masks_exchanged")},
    ),
    (
        "model_without_mask",
        "`EncoderDecoder` has no causal mask.",
        {"EncoderDecoder": model_with("no_mask")},
    ),
    (
        "translate_reads_one_token",
        "`translate` gives the decoder the newest token alone.",
        {"translate": translator("last_token_alone")},
    ),
):
    whole_encoder_decoder.fault(name, sentence, wrong)
