"""Lesson 08: the whole decoder, how it is sampled, and what it costs."""

import copy
import math
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from utils.check.errors import Unmet
from utils.check.exercise import Exercise, IntegrationCheck
from utils.probe import probe, probe_ids

# The oracle: a decoder as functions of a dictionary of weights ------------------------


@dataclass
class Sizes:
    """The fields of the course's configuration, without any test of them."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    max_len: int
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = True
    style: str = "llama"


# RoPE's angles are float32 in this course, whatever the dtype of the stream.
ANGLES = 1e-4

LLAMA = Sizes(23, 10, 3, 6, 2, 4, 14, 11, rope_base=100.0, norm_eps=1e-2, tied=False)
GPT2 = replace(LLAMA, d_head=5, style="gpt2")


def block_shapes(c):
    """Name and shape of every parameter of a block."""
    d_q, d_kv, d = c.n_heads * c.d_head, c.n_kv_heads * c.d_head, c.d_model
    shapes = {
        "norm_1": (d,),
        "attention.w_q": (d_q, d),
        "attention.w_k": (d_kv, d),
        "attention.w_v": (d_kv, d),
        "attention.w_o": (d, d_q),
        "norm_2": (d,),
        "feed_forward.w_1": (c.d_ff, d),
        "feed_forward.w_2": (d, c.d_ff),
    }
    if c.style == "gpt2":
        return shapes | {f"{n}.bias": (s[0],) for n, s in shapes.items()}
    return shapes | {"feed_forward.w_3": (c.d_ff, d)}


def model_shapes(c):
    """Name and shape of every parameter of a decoder, a tied one once."""
    shapes = {"embedding": (c.vocab_size, c.d_model), "norm": (c.d_model,)}
    if c.style == "gpt2":
        shapes |= {"norm.bias": (c.d_model,), "positions.table": (c.max_len, c.d_model)}
    if not c.tied:
        shapes["head"] = (c.vocab_size, c.d_model)
    for i in range(c.n_layers):
        shapes |= {f"blocks.{i}.{n}": s for n, s in block_shapes(c).items()}
    return shapes


def numbers_in(shapes):
    return sum(math.prod(shape) for shape in shapes.values())


def weights_for(shapes, seed):
    """Weights that give values of usual size; norms near one, biases not zero."""
    weights = {}
    for i, (name, shape) in enumerate(shapes.items()):
        is_norm = len(shape) == 1 and not name.endswith("bias")
        scale = 0.4 if len(shape) == 1 else shape[-1] ** -0.5
        if name == "embedding":
            scale = 1.0
        weights[name] = probe(*shape, seed=seed + i, scale=scale, shift=float(is_norm))
    return weights


def doubled(weights):
    return {name: value.double() for name, value in weights.items()}


def turned(x, positions, base, half_split=False):
    """Every pair as a complex number, times one on the unit circle."""
    d = x.shape[-1]
    i = torch.arange(d // 2, device=x.device, dtype=torch.float64)
    angle = positions[..., None].double() * base ** (-2 * i / d)
    if positions.dim() == 2:
        angle = angle[:, None]  # B 1 T Dh/2
    circle = torch.polar(torch.ones_like(angle), angle)
    pairs = (
        torch.stack([x[..., : d // 2], x[..., d // 2 :]], -1)
        if half_split
        else x.unflatten(-1, (-1, 2))
    )
    z = torch.view_as_real(torch.view_as_complex(pairs.double().contiguous()) * circle)
    return (z.transpose(-1, -2) if half_split else z).flatten(-2).to(x.dtype)


def normed(x, p, name, c, knob=""):
    eps = 1e-5 if knob == "eps_ignored" else c.norm_eps
    if c.style == "gpt2" and knob != "rms_for_gpt2":
        return F.layer_norm(x, x.shape[-1:], p[name], p[f"{name}.bias"], eps)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * p[name]


def linear(x, p, name):
    return F.linear(x, p[name], p.get(f"{name}.bias"))


def looked_up(x, p, c, mask, positions, knob=""):
    """Multi-head attention, every head a slice of the projections."""

    def heads(name, n):
        return linear(x, p, f"attention.{name}").unflatten(-1, (n, -1)).transpose(1, 2)

    q, k, v = (
        heads(name, n)
        for name, n in (
            ("w_q", c.n_heads),
            ("w_k", c.n_kv_heads),
            ("w_v", c.n_kv_heads),
        )
    )
    rotates = c.style == "llama" and knob != "no_rotation"
    if rotates or knob == "rotated_gpt2":
        if positions is None or knob == "positions_ignored":
            positions = torch.arange(x.shape[1], device=x.device)
        base = 10_000.0 if knob == "base_ignored" else c.rope_base
        q, k = (turned(y, positions, base, knob == "half_split") for y in (q, k))
    if knob == "tiled_kv":
        k, v = (y.repeat(1, c.n_heads // c.n_kv_heads, 1, 1) for y in (k, v))
    if knob == "mask_ignored":
        mask = None
    if knob == "always_causal":
        mask = torch.ones(
            x.shape[1], x.shape[1], dtype=torch.bool, device=x.device
        ).tril()
    group = c.n_heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(c.d_head)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    out = torch.softmax(scores, -1) @ v
    return linear(out.transpose(1, 2).flatten(2), p, "attention.w_o")


def thought(x, p, c, knob=""):
    """The feed-forward network."""
    up = linear(x, p, "feed_forward.w_1")
    if c.style == "gpt2":
        hidden = F.gelu(up, approximate="tanh" if knob == "tanh_gelu" else "none")
        if knob == "relu":
            hidden = F.relu(up)
    else:
        hidden = F.silu(up) * linear(x, p, "feed_forward.w_3")
    return linear(hidden, p, "feed_forward.w_2")


def one_block(x, p, c, mask=None, positions=None, knob=""):
    """A block; `knob` names what is done wrongly."""

    def attend(y):
        return looked_up(y, p, c, mask, positions, knob)

    def think(y):
        return thought(y, p, c, knob)

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
    if knob == "parallel":
        return x + attend(norm(x, "norm_1")) + think(norm(x, "norm_2"))
    if knob == "feed_forward_first":
        x = x + think(norm(x, "norm_2"))
        return x + attend(norm(x, "norm_1"))
    if knob == "attention_unused":
        return x + think(norm(x, "norm_2"))
    if knob == "feed_forward_unused":
        return x + attend(norm(x, "norm_1"))
    if knob == "second_residual_from_the_start":
        y = x + attend(norm(x, "norm_1"))
        return x + think(norm(y, "norm_2"))
    if knob == "one_norm_for_both":
        x = x + attend(norm(x, "norm_1"))
        return x + think(norm(x, "norm_1"))
    if knob == "norms_exchanged":
        x = x + attend(norm(x, "norm_2"))
        return x + think(norm(x, "norm_1"))
    if knob == "not_normalised":
        x = x + attend(x)
        return x + think(x)
    if knob == "second_not_normalised":
        x = x + attend(norm(x, "norm_1"))
        return x + think(x)
    x = x + attend(norm(x, "norm_1"))
    return x + think(norm(x, "norm_2"))


def whole_decoder(ids, p, c, knob=""):
    """Logits `(B, T, V)`; `knob` names what is done wrongly."""
    t = ids.shape[1]
    x = p["embedding"][ids]
    if knob == "embedding_scaled":
        x = x * math.sqrt(c.d_model)
    if c.style == "gpt2" and knob != "positions_forgotten":
        x = x + p["positions.table"][:t]
    mask = torch.ones(t, t, dtype=torch.bool, device=ids.device).tril()
    if knob == "no_mask":
        mask = None
    if knob == "mask_upside_down":
        mask = mask.T
    if knob == "diagonal_hidden":
        mask = mask.tril(-1)
        mask[0, 0] = True
    if knob == "one_ahead":
        mask = torch.ones_like(mask).tril(1)
    layers = range(c.n_layers)
    for i in reversed(layers) if knob == "blocks_reversed" else layers:
        own = {
            name.removeprefix(f"blocks.{i}."): value
            for name, value in p.items()
            if name.startswith(f"blocks.{i}.")
        }
        x = one_block(x, own, c, mask)
    if knob != "no_final_norm":
        x = normed(x, p, "norm", c)
    logits = F.linear(x, p["embedding"] if "head" not in p else p["head"])
    if knob == "probabilities":
        return torch.softmax(logits, -1)
    if knob == "last_position_only":
        return logits[:, -1]
    if knob == "shifted":
        return logits[:, :-1]
    return logits


# Modules made from the oracle, right or with one knob turned --------------------------


class Holder(nn.Module):
    """Holds parameters under the course's names, for the functions above."""

    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            if last == "bias":
                self.at(path).register_parameter(
                    "bias", nn.Parameter(torch.zeros(shape))
                )
                continue
            start = torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape)
            self.at([*path, last]).register_parameter("weight", nn.Parameter(start))

    def at(self, path):
        module = self
        for name in path:
            if not hasattr(module, name):
                module.add_module(name, nn.Module())
            module = getattr(module, name)
        return module

    def held(self):
        return {n.removesuffix(".weight"): p for n, p in self.named_parameters()}


def block_with(knob="", change=None):
    """A block class; `change` turns its configuration into another."""

    class Block(Holder):
        def __init__(self, config):
            config = change(config) if change else config
            super().__init__(block_shapes(config))
            self.config = config

        def forward(self, x, mask=None, positions=None):
            return one_block(x, self.held(), self.config, mask, positions, knob)

    return Block


def model_with(knob="", change=None, checks_length=True, build=None):
    """A decoder class; `build` changes the module once it is made."""

    class Transformer(Holder):
        def __init__(self, config):
            config = change(config) if change else config
            super().__init__(model_shapes(config))
            self.config = config
            if config.tied:
                self.at(["head"]).weight = self.embedding.weight
            if build:
                build(self, config)

        def forward(self, ids):
            t, longest = ids.shape[1], self.config.max_len
            if checks_length and t > longest:
                raise ValueError(f"{t} tokens are more than {longest}")
            held = self.held()
            for i in range(self.config.n_layers):
                if f"blocks.{i}.norm_1" not in held:  # one block in several places
                    for name in block_shapes(self.config):
                        held[f"blocks.{i}.{name}"] = held[f"blocks.0.{name}"]
            return whole_decoder(ids, held, self.config, knob)

    return Transformer


def load_all(case, module, weights):
    """Load by name; a tied matrix is found under either of its two names."""
    names = dict(module.named_parameters())
    given = dict(weights)
    if (
        "head" not in given
        and "embedding.weight" not in names
        and "head.weight" in names
    ):
        given["head"] = given.pop("embedding")
    return case.load(module, **{n.replace(".", "__"): w for n, w in given.items()})


def trained(case, module, *args):
    """Every parameter gets a gradient, not zero, and all of it finite."""
    result = case._run(module, args, {})
    case.is_tensor(result)
    case.true(
        result.requires_grad, "No gradient flows through it: something cuts the graph."
    )
    module.zero_grad()
    (result * probe(*result.shape, seed=87, dtype=result.dtype)).sum().backward()
    for name, p in module.named_parameters():
        reached = p.grad is not None and bool(p.grad.abs().sum() > 0)
        case.true(
            reached and bool(p.grad.isfinite().all()),
            f"The parameter `{name}` gets no gradient, so it would never train.",
        )
    module.zero_grad()


# TransformerConfig --------------------------------------------------------------------

config_ = Exercise("TransformerConfig", lesson="forward_pass")
SIZES = dict(
    vocab_size=23, d_model=10, n_layers=3, n_heads=6, n_kv_heads=2, d_head=4, d_ff=14
) | {"max_len": 11}
FIELDS = (*SIZES, "rope_base", "norm_eps", "tied", "style")


def fields_of(made):
    return {name: getattr(made, name, "missing") for name in FIELDS}


@config_.requires("sizes that fit are accepted and kept, with the given defaults")
def _(answer, case):
    made = case.call(answer, *SIZES.values())
    case.equal(
        fields_of(made),
        SIZES | dict(rope_base=10_000.0, norm_eps=1e-5, tied=True, style="llama"),
        "what it holds",
    )
    rest = dict(rope_base=500.0, norm_eps=1e-6, tied=False, style="gpt2")
    made = case.call(answer, **SIZES, **rest)
    case.equal(fields_of(made), SIZES | rest, "what it holds, all given by name")


@config_.requires(
    "unusual sizes that fit are accepted too",
    "Which of these sizes does the model multiply, and which must it divide?",
)
def _(answer, case):
    for change in (
        dict(n_kv_heads=1),
        dict(n_kv_heads=6),
        dict(d_model=11),
        dict(d_ff=3),
        dict(d_head=2),
        dict(n_heads=7, n_kv_heads=7),
        dict(d_head=5, style="gpt2"),
        dict(d_head=1, style="gpt2"),
        dict.fromkeys(SIZES, 1) | dict(d_head=2),
    ):
        made = case.call(answer, **(SIZES | change))
        case.equal(
            fields_of(made) | SIZES | change, fields_of(made), f"with {change}, it"
        )


@config_.requires(
    "a size smaller than 1 is a ValueError that names it",
    "The sizes are eight fields; `getattr(self, name)` reads a field by its name. Test "
    "them before you divide by one of them.",
)
def _(answer, case):
    for name in SIZES:
        for value in (0, -3):
            case.raises(
                ValueError,
                answer,
                **(SIZES | {name: value}),
                mentions=(value,),
                because=f"{name} = {value}",
            )


@config_.requires("heads that cannot share their KV heads evenly are a ValueError")
def _(answer, case):
    for heads, kv in ((6, 4), (7, 2), (3, 9)):
        case.raises(
            ValueError,
            answer,
            **(SIZES | dict(n_heads=heads, n_kv_heads=kv)),
            mentions=(heads, kv),
            because=f"{heads} heads and {kv} KV heads",
        )


@config_.requires("an odd d_head is a ValueError where RoPE turns pairs")
def _(answer, case):
    for width in (5, 1):
        case.raises(
            ValueError,
            answer,
            **(SIZES | dict(d_head=width)),
            mentions=(width,),
            because=f'd_head = {width} in style "llama"',
        )


@config_.requires("a style that is not known is a ValueError that names it")
def _(answer, case):
    for style in ("gpt3", "Llama", "", "llama2", "gpt2-medium"):
        case.raises(
            ValueError,
            answer,
            **SIZES,
            style=style,
            mentions=(style,),
            because=f"the style {style!r}",
        )


def refuse_small(c):
    for name in SIZES:
        if getattr(c, name) < 1:
            raise ValueError(f"{name} is {getattr(c, name)}")


def refuse_sharing(c):
    if c.n_heads % c.n_kv_heads:
        raise ValueError(f"{c.n_heads} heads, {c.n_kv_heads} KV heads")


def refuse_odd(c):
    if c.style == "llama" and c.d_head % 2:
        raise ValueError(f"d_head {c.d_head}")


def refuse_style(c):
    if c.style not in ("llama", "gpt2"):
        raise ValueError(f"style {c.style}")


def config_that(*refusals):
    @dataclass
    class TransformerConfig(Sizes):
        def __post_init__(self):
            for refuse in refusals:
                refuse(self)

    return TransformerConfig


def refuse_by_assert(c):
    for name in SIZES:
        assert getattr(c, name) >= 1, name


def refuse_width(c):
    if c.d_model % c.n_heads:
        raise ValueError(f"{c.d_model} {c.n_heads}")


def refuse_odd_anywhere(c):
    if c.d_head % 2:
        raise ValueError(f"d_head {c.d_head}")


def refuse_sharing_if_any(c):
    if c.n_kv_heads:
        refuse_sharing(c)


def refuse_sharing_reversed(c):
    if c.n_kv_heads % c.n_heads:
        raise ValueError(f"{c.n_heads} heads, {c.n_kv_heads} KV heads")


def refuse_zero_alone(c):
    for name in SIZES:
        if getattr(c, name) == 0:
            raise ValueError(f"{name} is 0")


def refuse_negative_alone(c):
    for name in SIZES:
        if getattr(c, name) < 0:
            raise ValueError(f"{name} is {getattr(c, name)}")


def refuse_other_beginnings(c):
    if not c.style.startswith(("llama", "gpt2")):
        raise ValueError(f"style {c.style}")


CONFIG_FAULTS = {
    "zero_accepted": (
        "A size of 0 is accepted. It is smaller than 1 too.",
        (refuse_negative_alone, refuse_sharing_if_any, refuse_odd, refuse_style),
    ),
    "style_beginnings": (
        "A style is accepted that only begins like one of the two. Compare whole words.",
        (refuse_small, refuse_sharing, refuse_odd, refuse_other_beginnings),
    ),
    "nothing_refused": (
        "Nothing is refused. A size that does not fit then fails deep inside a layer, "
        "with a message about shapes that the caller never wrote.",
        (),
    ),
    "divides_first": (
        "The heads are divided before the sizes are tested, so that no KV heads at all "
        "become a division by zero instead of a sentence.",
        (refuse_sharing, refuse_small, refuse_odd, refuse_style),
    ),
    "asserts": (
        "The sizes are tested with `assert`. That raises an AssertionError, and "
        "`python -O` leaves it out; raise a ValueError.",
        (refuse_by_assert, refuse_sharing, refuse_odd, refuse_style),
    ),
    "width_must_be_divisible": (
        "It refuses a `d_model` that the heads do not divide. That is needed only where "
        "`d_head` is made from it; here `d_head` is a size of its own.",
        (refuse_small, refuse_width, refuse_sharing, refuse_odd, refuse_style),
    ),
    "odd_refused_in_both_styles": (
        'It refuses an odd `d_head` in style "gpt2" too. Only RoPE needs pairs; learned '
        "positions do not.",
        (refuse_small, refuse_sharing, refuse_odd_anywhere, refuse_style),
    ),
    "shared_the_wrong_way": (
        "The division is the wrong way round. Several query heads share one KV head, so "
        "it is the number of query heads that must be a multiple.",
        (refuse_small, refuse_sharing_reversed, refuse_odd, refuse_style),
    ),
    "only_zero_refused": (
        "Zero is refused, negative sizes are not.",
        (refuse_zero_alone, refuse_sharing, refuse_odd, refuse_style),
    ),
    "sharing_unchecked": (
        "Heads that cannot share their KV heads evenly are accepted.",
        (refuse_small, refuse_odd, refuse_style),
    ),
    "odd_accepted": (
        "An odd `d_head` is accepted although RoPE turns pairs of numbers.",
        (refuse_small, refuse_sharing, refuse_style),
    ),
    "any_style": (
        "Any style is accepted, so a typing mistake silently gives one of the two.",
        (refuse_small, refuse_sharing, refuse_odd),
    ),
}
for name, (sentence, refusals) in CONFIG_FAULTS.items():
    config_.fault(name, sentence, config_that(*refusals))


# Block --------------------------------------------------------------------------------

block = Exercise("Block", lesson="forward_pass")


def made_block(answer, case, c, seed):
    """The learner's block with weights, and the oracle with the same ones."""
    weights = weights_for(block_shapes(c), seed)
    module = load_all(case, case.call(answer, c), weights)
    return module, partial(oracle_block, doubled(weights), c)


def oracle_block(weights, c, x, mask=None, positions=None):
    return one_block(x, weights, c, mask, positions)


def causal(t):
    return torch.ones(t, t, dtype=torch.bool).tril()


@block.requires(
    'style "llama": norm_1, attention, norm_2 and feed_forward have their parameters',
    "Read the sizes off `config` one by one: which class takes which of them?",
)
def _(answer, case):
    for c in (LLAMA, replace(LLAMA, n_kv_heads=6, d_head=2)):
        module = case.call(answer, c)
        case.parameter_count(module, numbers_in(block_shapes(c)))
        load_all(case, module, weights_for(block_shapes(c), 0))


@block.requires(
    "one position: attention, then the feed-forward network, each pre-norm",
    "Write the two lines on paper with x, norm_1, attention, norm_2, feed_forward. What "
    "does each line add, and to what?",
)
def _(answer, case):
    module, oracle = made_block(answer, case, LLAMA, seed=10)
    case.agrees(module, oracle, probe(5, 1, 10, seed=11))


@block.requires(
    "several positions: RoPE turns queries and keys, with the base of the config",
    "`rotate` gets heads and nothing else, so the positions and the base must be bound "
    "beforehand. Compare with a sequence of one position: there RoPE does nothing.",
)
def _(answer, case):
    module, oracle = made_block(answer, case, LLAMA, seed=20)
    case.agrees(module, oracle, probe(5, 7, 10, seed=21))
    other = replace(LLAMA, rope_base=30_000.0)
    module, oracle = made_block(answer, case, other, seed=22)
    case.agrees(module, oracle, probe(2, 9, 10, seed=23))


@block.requires("a mask is passed on to attention")
def _(answer, case):
    module, oracle = made_block(answer, case, LLAMA, seed=30)
    x = probe(5, 7, 10, seed=31)
    case.agrees(module, oracle, x, causal(7))
    each = probe(5, 1, 7, 7, seed=32) > -0.3
    case.agrees(module, oracle, x, mask=each | torch.eye(7, dtype=torch.bool))


@block.requires(
    "positions that are given are used: gaps, and others in each row",
    "0 to T − 1 is only what holds when no positions are given.",
)
def _(answer, case):
    module, oracle = made_block(answer, case, LLAMA, seed=40)
    x = probe(3, 5, 10, seed=41)
    case.agrees(module, oracle, x, causal(5), torch.tensor([3, 4, 5, 9, 10]))
    rows = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2], [2, 3, 7, 8, 20]])
    case.agrees(module, oracle, x, causal(5), positions=rows)


@block.requires("the norms use the config's norm_eps")
def _(answer, case):
    for c in (LLAMA, replace(LLAMA, norm_eps=0.3)):
        module, oracle = made_block(answer, case, c, seed=50)
        case.agrees(module, oracle, probe(3, 5, 10, seed=51, scale=0.05))


@block.requires(
    'style "gpt2": LayerNorm, exact GELU, biases, and no rotation',
    "Which of the four parts are other classes than before? The layers of lessons 03 and "
    "05 have no biases: `layer.bias = nn.Parameter(…)` gives one to an `nn.Linear`.",
)
def _(answer, case):
    c = GPT2
    module = case.call(answer, c)
    case.parameter_count(module, numbers_in(block_shapes(c)))
    for name, p in module.named_parameters():
        wanted = block_shapes(c).get(name, p.shape)
        case.true(
            tuple(p.shape) == tuple(wanted),
            f"`{name}` has shape {tuple(p.shape)}, expected {tuple(wanted)}: a bias has "
            "as many numbers as its layer has outputs.",
        )
        case.true(
            not name.endswith("bias") or bool((p == 0).all()),
            f"The bias `{name}` does not start at zero.",
        )
    module, oracle = made_block(answer, case, c, seed=60)
    case.agrees(module, oracle, probe(5, 1, 10, seed=61))
    case.agrees(module, oracle, probe(3, 7, 10, seed=62), causal(7))
    case.agrees(module, oracle, probe(3, 7, 10, seed=63, scale=0.05), causal(7))
    case.agrees(module, oracle, probe(2, 4, 10, seed=64, scale=3.0, shift=1.0))


@block.requires("float64, half precision, `eval()` and a second call work")
def _(answer, case):
    for c in (LLAMA, GPT2):
        module, oracle = made_block(answer, case, c, seed=70)
        for x in (probe(3, 7, 10, seed=71), probe(2, 4, 10, seed=72)):
            case.agrees(module.eval(), oracle, x, causal(x.shape[1]))
        for kind in (torch.float64, torch.bfloat16):
            weights = weights_for(block_shapes(c), 70)
            rounded = {n: w.to(kind).double() for n, w in weights.items()}
            x = probe(3, 5, 10, seed=73).to(kind)
            actual = case.call(module.to(kind), x, causal(5))
            expected = one_block(x.double(), rounded, c, causal(5))
            tolerance = ANGLES if kind == torch.float64 else None
            case.close(
                actual, expected, f"the result in {kind}", like=x, tolerance=tolerance
            )


def block_learns(answer, case, c):
    module, oracle = made_block(answer, case, c, seed=80)
    mask = causal(5)
    case.gradients_agree(
        lambda x: module(x, mask), lambda x: oracle(x, mask), probe(2, 5, 10, seed=81)
    )
    trained(case, made_block(answer, case, c, seed=82)[0], probe(2, 5, 10, seed=83))


# One style a requirement: a fault of the other is then no match for what stops here.
@block.requires("gradients reach the input and every parameter")
def _(answer, case):
    block_learns(answer, case, LLAMA)


@block.requires('gradients reach them in style "gpt2" too')
def _(answer, case):
    block_learns(answer, case, GPT2)


@block.requires("two blocks of one config share nothing")
def _(answer, case):
    one, two = case.call(answer, LLAMA), case.call(answer, LLAMA)
    shared = {p.data_ptr() for p in one.parameters()} & {
        p.data_ptr() for p in two.parameters()
    }
    case.true(not shared, "Two blocks share their parameters: make new layers in each.")


@block.requires("it creates nothing on another device")
def _(answer, case):
    module, _ = made_block(answer, case, LLAMA, seed=90)
    case.any_device(module, probe(2, 5, 10), causal(5))


BLOCK_FAULTS = {
    "no_residual": "The stream is replaced instead of added to: `x +` is missing, so what "
    "earlier layers wrote is lost.",
    "stream_normalised": "The normalised stream goes on: the sum starts from norm(x) "
    "instead of x. In pre-norm only the sublayer sees the normalised values.",
    "post_norm": "The norms come after the additions (post-norm). Here each norm belongs "
    "inside, before its sublayer; the stream itself is never normalised.",
    "parallel": "Both sublayers read the block's input. The feed-forward network reads "
    "the stream *after* attention has been added.",
    "feed_forward_first": "The feed-forward network runs before attention.",
    "attention_unused": "Attention's result is not used: is it bound to a name that "
    "nobody reads, or added to a copy?",
    "feed_forward_unused": "The feed-forward network's result is not used.",
    "second_residual_from_the_start": "The second addition starts from the block's "
    "input, so attention's own contribution to the stream is lost.",
    "one_norm_for_both": "`norm_1` is used twice. The two norms have weights of their "
    "own; while both are ones, as at the start, nobody notices.",
    "norms_exchanged": "`norm_1` and `norm_2` are exchanged.",
    "not_normalised": "The norms are made but never called.",
    "second_not_normalised": "The feed-forward network reads the stream without "
    "`norm_2`.",
    "no_rotation": "Nothing rotates queries and keys, so the block does not know the "
    "order of its tokens.",
    "base_ignored": "RoPE runs with its default base; the config's `rope_base` is not "
    "passed on.",
    "half_split": "The rotation pairs the first half of a head with the second, as many "
    "checkpoints do. In this course neighbours form a pair: (0, 1), (2, 3), …",
    "tiled_kv": "The KV heads are tiled (0, 1, 0, 1, …). Neighbouring query heads share "
    "one: (0, 0, …, 1, 1, …).",
    "mask_ignored": "The mask is not passed on to attention.",
    "always_causal": "The block hides the future by itself, even where no mask is given. "
    "It takes the mask that it gets; the model decides.",
    "positions_ignored": "The positions that are given are ignored: it always counts from "
    "0. With a cache, or with padding on the left, that is wrong.",
    "eps_ignored": "The norms use their default eps; the config's `norm_eps` is not "
    "passed on.",
    "rotated_gpt2": 'Style "gpt2" rotates too. Its positions are added to the embedding '
    "by the model.",
    "tanh_gelu": "This is the tanh approximation of GELU (`gelu_new` in GPT-2's own "
    "code). Here the exact one of lesson 05 is used.",
    "relu": 'Style "gpt2" uses ReLU; it should be GELU.',
}
for name, sentence in BLOCK_FAULTS.items():
    block.fault(name, sentence, block_with(name))

BLOCK_CHANGES = {
    "kv_heads_ignored": (
        "Every query head has KV heads of its own: `n_kv_heads` is not passed on.",
        lambda c: replace(c, n_kv_heads=c.n_heads),
    ),
    "head_width_from_model": (
        "`d_head` is not passed on, so heads are `d_model // n_heads` wide.",
        lambda c: replace(c, d_head=c.d_model // c.n_heads),
    ),
    "d_ff_ignored": (
        "The feed-forward network is 4·d_model wide; its width is `config.d_ff`.",
        lambda c: replace(c, d_ff=4 * c.d_model),
    ),
    "always_gpt2": (
        'Every block is built in style "gpt2": is `config.style` looked at?',
        lambda c: replace(c, style="gpt2"),
    ),
    "always_llama": (
        'Every block is built in style "llama": is `config.style` looked at?',
        lambda c: replace(c, style="llama", d_head=c.d_head // 2 * 2),
    ),
}
for name, (sentence, change) in BLOCK_CHANGES.items():
    block.fault(name, sentence, block_with(change=change))


# Transformer --------------------------------------------------------------------------

transformer = Exercise("Transformer", lesson="forward_pass")
TIED, TIED_GPT2 = replace(LLAMA, tied=True), replace(GPT2, tied=True)


def made_model(answer, case, c, seed):
    weights = weights_for(model_shapes(c), seed)
    module = load_all(case, case.call(answer, c), weights)
    weights = doubled(weights)
    return module, lambda ids: whole_decoder(ids, weights, c)


def logits_agree(case, module, oracle, ids):
    first = next(module.parameters())
    tolerance = ANGLES if first.dtype == torch.float64 else None
    case.close(
        case.call(module, ids),
        oracle(ids),
        "the logits",
        like=first,
        tolerance=tolerance,
    )


@transformer.requires(
    "embedding, blocks, norm and head have their parameters",
    "Only what is assigned to `self` and is a module counts; a plain Python list of "
    "modules is not one.",
)
def _(answer, case):
    for c in (LLAMA, replace(LLAMA, n_layers=2, n_kv_heads=3, d_ff=9)):
        module = case.call(answer, c)
        case.parameter_count(module, numbers_in(model_shapes(c)))
        load_all(case, module, weights_for(model_shapes(c), 0))
        case.true(
            hasattr(module, "config"),
            "The model has no attribute `config`. `generate` and later lessons read it.",
        )


@transformer.requires(
    "one token through one block: embed, block, norm, head",
    "Walk through it with one token: what is the shape after each of the four steps?",
)
def _(answer, case):
    module, oracle = made_model(answer, case, replace(LLAMA, n_layers=1), seed=100)
    logits_agree(case, module, oracle, torch.tensor([[5]]))
    logits_agree(case, module, oracle, torch.tensor([[2], [22], [0]]))


@transformer.requires(
    "several tokens and blocks: each position sees itself and what came before",
    "Change the last token and see which logits move: only the last ones may.",
)
def _(answer, case):
    module, oracle = made_model(answer, case, LLAMA, seed=200)
    logits_agree(case, module, oracle, probe_ids(5, 7, below=23))
    logits_agree(case, module, oracle, probe_ids(2, 9, below=23, seed=1))


@transformer.requires(
    "each block is an object of its own, with starting values of its own",
    "How often does `Block(config)` run in your code?",
)
def _(answer, case):
    module = case.call(answer, LLAMA)
    firsts = [dict(b.named_parameters())["attention.w_q.weight"] for b in module.blocks]
    case.equal(len(firsts), 3, "the number of blocks")
    alike = any(torch.equal(firsts[0], other) for other in firsts[1:])
    case.true(not alike, "The blocks start with the same values.")
    again = dict(case.call(answer, LLAMA).named_parameters())
    alike = torch.equal(firsts[0], again["blocks.0.attention.w_q.weight"])
    case.true(not alike, "Two new models start with the same values.")


@transformer.requires(
    "tied: head and embedding are one parameter, counted once",
    "Copying values gives two parameters that drift apart in training. A parameter is an "
    "attribute like any other: two modules can hold the same one.",
)
def _(answer, case):
    module = case.call(answer, TIED)
    case.parameter_count(module, numbers_in(model_shapes(TIED)))
    case.true(
        module.head.weight is module.embedding.weight,
        "`head.weight` and `embedding.weight` are two parameters.",
    )
    module, oracle = made_model(answer, case, TIED, seed=300)
    logits_agree(case, module, oracle, probe_ids(2, 7, below=23, seed=2))


@transformer.requires(
    'style "gpt2": learned positions on the embedding, LayerNorm, biases',
    "What is added to the embedding, and of which class is the last norm?",
)
def _(answer, case):
    for c in (GPT2, TIED_GPT2):
        module = case.call(answer, c)
        case.parameter_count(module, numbers_in(model_shapes(c)))
        module, oracle = made_model(answer, case, c, seed=400)
        logits_agree(case, module, oracle, probe_ids(5, 7, below=23, seed=3))


@transformer.requires("max_len tokens work, one more is a ValueError that names both")
def _(answer, case):
    for c in (LLAMA, GPT2):
        module, oracle = made_model(answer, case, c, seed=500)
        logits_agree(case, module, oracle, probe_ids(2, 11, below=23, seed=4))
        case.raises(
            ValueError,
            module,
            probe_ids(2, 12, below=23),
            mentions=(12, 11),
            because="12 tokens where max_len is 11",
        )


@transformer.requires(
    "a new model is undecided: its matrices start small, its loss near log V",
    "A head that holds the embedding's usual values, of size 1, makes logits of size "
    "√d_model. Which standard deviation did the text ask for?",
)
def _(answer, case):
    small = Sizes(500, 64, 2, 4, 2, 16, 96, 32)
    for c in (small, replace(small, tied=False), replace(small, style="gpt2")):
        module = case.call(answer, c)
        case.recording.pop()  # random as it should be, like the logits below
        for name, p in module.named_parameters():
            if p.dim() > 1 and "w_o" not in name and "w_2" not in name:
                case.note(f"{p.std():.1g}")
                case.true(
                    0.015 < p.std().item() < 0.025,
                    f"`{name}` starts with a standard deviation of {p.std():.2g}, "
                    "expected 0.02.",
                )
        ids = probe_ids(3, 32, below=500, seed=5)
        logits = case.call(module, ids)[:, :-1].flatten(0, 1)
        case.recording.pop()
        loss = F.cross_entropy(logits.double(), ids[:, 1:].flatten()).item()
        case.true(
            abs(loss - math.log(500)) < 0.5,
            f"The loss of a new model is {loss:.2f}, where guessing costs "
            f"{math.log(500):.2f}.",
        )


@transformer.requires(
    "the random values are normal ones, and only matrices get them",
    "Matrices are the parameters with more than one dimension. The weights of the norms "
    "start at 1, biases at 0.",
)
def _(answer, case):
    for c in (Sizes(500, 64, 2, 4, 2, 16, 96, 32), GPT2):
        module = case.call(answer, c)
        case.recording.pop()
        changed = [
            name
            for name, p in module.named_parameters()
            if p.dim() == 1 and not bool((p == (not name.endswith("bias"))).all())
        ]
        case.true(
            not changed, f"Not at their starting values: `{'`, `'.join(changed)}`."
        )
        far = (module.embedding.weight.abs() > 0.04).double().mean().item()
        case.true(
            c is GPT2 or 0.02 < far < 0.08,
            f"Of the embedding's values {far:.1%} lie beyond two standard deviations; "
            "of normal ones 4.6% do.",
        )


@transformer.requires("float64, `eval()` and a second call of another length work")
def _(answer, case):
    for c in (TIED, GPT2):
        module, oracle = made_model(answer, case, c, seed=600)
        module = module.double().eval()
        for size in ((3, 4), (2, 8), (1, 1)):
            logits_agree(case, module, oracle, probe_ids(*size, below=23, seed=6))


@transformer.requires("gradients reach every parameter")
def _(answer, case):
    for c in (LLAMA, TIED, GPT2):
        module, _ = made_model(answer, case, c, seed=700)
        trained(case, module, probe_ids(3, c.max_len, below=23, seed=7))


@transformer.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(
        made_model(answer, case, LLAMA, seed=800)[0], probe_ids(2, 5, below=23)
    )


MODEL_FAULTS = {
    "no_mask": "No mask hides the future: every position sees the tokens that it is to "
    "predict. The loss in training will look wonderful, the texts will not.",
    "mask_upside_down": "The mask is upside down: each position sees what comes *after* "
    "it. True = may look, row = query, column = key.",
    "diagonal_hidden": "No position sees itself: the mask is one diagonal too narrow.",
    "one_ahead": "Each position sees one token ahead, the very one that it must predict.",
    "no_final_norm": "The stream reaches the head without the last norm.",
    "embedding_scaled": "The embedding is multiplied by √d_model. The paper of 2017 does "
    "that; the two styles here do not.",
    "blocks_reversed": "The blocks run from the last to the first.",
    "probabilities": "It returns probabilities. Return the logits: training and sampling "
    "apply the softmax where they need it.",
    "last_position_only": "It returns the logits of the last position alone. Training "
    "needs those of all positions.",
    "shifted": "The logits of the last position are cut off. The shift by one belongs to "
    "the targets, and is made where the loss is computed: here it would be made twice.",
    "positions_forgotten": 'In style "gpt2" nothing is added to the embedding for the '
    "position.",
}
for name, sentence in MODEL_FAULTS.items():
    transformer.fault(name, sentence, model_with(name))


def one_object(model, config):
    model.blocks = nn.ModuleList([getattr(model.blocks, "0")] * config.n_layers)


def equal_starts(model, config):
    first = getattr(model.blocks, "0")
    model.blocks = nn.ModuleList(copy.deepcopy(first) for _ in range(config.n_layers))


def as_module_list(model, config):
    model.blocks = nn.ModuleList(
        getattr(model.blocks, str(i)) for i in range(config.n_layers)
    )


def large_start(model, config):
    as_module_list(model, config)
    nn.init.normal_(model.embedding.weight)


def every_vector_random(model, config):
    as_module_list(model, config)
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)


def uniform_start(model, config):
    as_module_list(model, config)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.uniform_(p, -0.02 * 3**0.5, 0.02 * 3**0.5)


def seeded_start(model, config):
    as_module_list(model, config)
    draw = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02, generator=draw)


def head_with_bias(model, config):
    as_module_list(model, config)
    model.head.bias = nn.Parameter(torch.zeros(config.vocab_size))


def plain_list(model, config):
    blocks = [getattr(model.blocks, str(i)) for i in range(config.n_layers)]
    del model.blocks
    model.blocks = blocks


MODEL_BUILDS = {
    "one_block_many_times": (
        "`[Block(config)] * n` is one block in n places, not n blocks: Python copies the "
        "reference, not the object. Make a new one in each turn of a loop.",
        one_object,
    ),
    "blocks_start_equal": (
        "The blocks are copies of one, with equal starting values. They would train, "
        "but as near twins; make each anew.",
        equal_starts,
    ),
    "blocks_in_a_list": (
        "The blocks are in a plain Python list. PyTorch does not look into it: their "
        "parameters are neither trained nor saved nor moved. Use `nn.ModuleList`.",
        plain_list,
    ),
    "starts_too_large": (
        "The embedding keeps PyTorch's starting values, of standard deviation 1. Tied to "
        "the head they make logits of size √d_model, and a new model is sure of nonsense.",
        large_start,
    ),
    "vectors_random_too": (
        "The weights of the norms get random values too, near 0, which nearly silences "
        "every layer. Only matrices do: parameters with more than one dimension.",
        every_vector_random,
    ),
    "uniform_start": (
        "The starting values are spread evenly over a range. Normal values are asked for.",
        uniform_start,
    ),
    "seeded_inside": (
        "A seed is set inside: every new model has the same starting values, and so has "
        "whatever draws after it.",
        seeded_start,
    ),
    "head_has_a_bias": (
        "The head has a bias; it is built without one.",
        head_with_bias,
    ),
}
for name, (sentence, build) in MODEL_BUILDS.items():
    transformer.fault(name, sentence, model_with(build=build))


# sample -------------------------------------------------------------------------------

# A loop over the rows is as right, and takes its time over so many draws.
sampling = Exercise("sample", lesson="forward_pass", seconds=25.0)
DRAWS = 8_000
# Probabilities 0.4, 0.3, 0.2, 0.1 on four of six tokens, in an order of their own.
ODDS = torch.tensor([0.3, 1e-30, 0.1, 0.4, 1e-30, 0.2]).log()


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def draws(case, answer, logits, seed, **kwargs):
    """`DRAWS` tokens for one row of logits; shape and dtype are checked."""
    given = logits.expand(DRAWS, -1)
    torch.manual_seed(1_000 + seed)
    drawn = case.call(answer, given, **kwargs)
    case.is_tensor(drawn)
    if drawn.shape != (DRAWS,):
        raise Unmet(f"the result has shape {tuple(drawn.shape)}, expected ({DRAWS},).")
    if drawn.dtype != torch.int64:
        raise Unmet(f"the tokens are {drawn.dtype}, expected torch.int64.")
    # How often each came tells one mistake from another, in whatever way it was drawn.
    case.recording[-1] = (
        torch.bincount(drawn, minlength=logits.shape[-1]).div(DRAWS).half()
    )
    return drawn


def follows(case, answer, logits, expected, what, seed, **kwargs):
    """The tokens are drawn with the `expected` probabilities, to 5.5 deviations."""
    drawn = draws(case, answer, logits, seed, **kwargs)
    found = torch.bincount(drawn, minlength=len(expected)).double() / DRAWS
    if len(found) > len(expected):
        raise Unmet(f"{what}: token {int(drawn.max())} is not in the vocabulary.")
    for token, (f, p) in enumerate(zip(found.tolist(), expected.tolist(), strict=True)):
        if abs(f - p) > 5.5 * math.sqrt(p * (1 - p) / DRAWS) + 1e-9:
            raise Unmet(
                f"{what}: token {token} came in {f:.1%} of {DRAWS:,} draws, expected "
                f"{p:.1%}."
            )


def kept(*tokens, temperature=1.0):
    """The probabilities of `ODDS` with only these tokens left."""
    allowed = torch.full_like(ODDS, -torch.inf)
    allowed[list(tokens)] = ODDS[list(tokens)]
    return torch.softmax(allowed.double() / temperature, -1)


ALL = (0, 2, 3, 5)


@sampling.requires(
    "temperature 0 takes the most likely token of every row",
    "Treat 0 before you divide by it.",
)
def _(answer, case):
    logits = probe(5, 7, scale=3.0)
    case.equal(
        case.call(answer, logits, temperature=0), logits.argmax(-1), "the tokens"
    )
    case.equal(
        case.call(answer, logits, 0.0), logits.argmax(-1), "with 0.0, the tokens"
    )
    case.equal(
        case.call(answer, -50 - logits[:1], temperature=0.0, top_k=2, top_p=0.9),
        logits[:1].argmin(-1),
        "the token",
    )


@sampling.requires(
    "tokens are drawn with the probabilities of the softmax",
    "Count how often each token comes in many draws. `torch.multinomial` draws from "
    "probabilities.",
)
def _(answer, case):
    follows(case, answer, ODDS, kept(*ALL), "temperature 1", seed=1)
    follows(
        case, answer, ODDS + 40, kept(*ALL), "larger logits", seed=2, temperature=1.0
    )


@sampling.requires(
    "each row is drawn by itself, from its own logits",
    "Which dimension is the vocabulary?",
)
def _(answer, case):
    first = torch.tensor([3, 6, 0, 2, 5])
    # Steps of 100: whatever is kept, one token is sure, and the same mistake shows the same.
    rows = 50 - 100.0 * ((torch.arange(7) * 3 - first[:, None] * 3) % 7)
    for kwargs in ({}, dict(top_k=2), dict(top_p=0.8), dict(top_k=3, top_p=0.5)):
        drawn = case.call(answer, rows, **kwargs)
        case.equal(drawn, first, f"with {kwargs}, the tokens")
        drawn = case.call(answer, rows[1:2], **kwargs)
        case.equal(drawn, first[1:2], f"with {kwargs} and one row, the tokens")
    drawn = draws(case, answer, torch.zeros(50), seed=3)
    case.true(len(drawn.unique()) == 50, "All rows got the same few tokens.")


@sampling.requires(
    "the temperature divides the logits: low is sharper, high is flatter",
    "What happens to the difference of two logits at temperature 0.5?",
)
def _(answer, case):
    for seed, heat in ((4, 0.5), (5, 2.0)):
        follows(
            case,
            answer,
            ODDS,
            kept(*ALL, temperature=heat)
            if heat < 1
            else torch.softmax(ODDS.double() / heat, -1),
            f"temperature {heat}",
            seed=seed,
            temperature=heat,
        )


@sampling.requires(
    "top_k keeps the k most likely tokens and shares their probability among them",
    "What becomes of the others before the softmax, so that they get exactly 0?",
)
def _(answer, case):
    follows(case, answer, ODDS, kept(3, 0), "top_k 2", seed=6, top_k=2)
    follows(case, answer, ODDS, kept(3, 0, 5), "top_k 3", seed=7, top_k=3)
    follows(case, answer, ODDS, kept(3), "top_k 1", seed=8, top_k=1, temperature=3.0)
    follows(case, answer, ODDS, kept(*ALL), "top_k 6, all", seed=9, top_k=6)


@sampling.requires(
    "top_p keeps the most likely tokens up to the one that crosses it, which is kept",
    "Sort, add up, and look at the sum *before* each token: has it reached top_p "
    "already? Then tokens must go back to their own numbers.",
)
def _(answer, case):
    for seed, (top_p, tokens) in enumerate(
        (
            (0.95, ALL),
            (0.65, (3, 0)),
            (0.5, (3, 0)),
            (0.39, (3,)),
            (1e-9, (3,)),
            (0.75, (3, 0, 5)),
        )
    ):
        what = f"top_p {top_p} on probabilities 0.4, 0.3, 0.2, 0.1"
        follows(case, answer, ODDS, kept(*tokens), what, seed=10 + seed, top_p=top_p)


@sampling.requires(
    "top_p of 1 keeps every token, in the smallest vocabulary too",
    "With top_p = 1 no token crosses. What does your search for the crossing give then?",
)
def _(answer, case):
    follows(case, answer, ODDS, kept(*ALL), "top_p 1", seed=20, top_p=1.0)
    two = torch.tensor([0.0, math.log(3)])
    follows(
        case, answer, two, torch.tensor([0.25, 0.75]), "two tokens", seed=21, top_p=1.0
    )
    case.equal(
        case.call(answer, torch.zeros(3, 1), top_p=1.0, top_k=1),
        torch.zeros(3, dtype=torch.int64),
        "of a vocabulary of one, the tokens",
    )
    torch.manual_seed(22)
    drawn = case.call(answer, torch.zeros(2_000, 300), top_p=1.0)
    case.true(len(drawn.unique()) > 285, "Some of 300 equal tokens never come.")


@sampling.requires(
    "first the temperature, then top_k, then top_p on what is left",
    "At temperature 0.5 the odds 0.4, 0.3, 0.2, 0.1 become about 0.53, 0.30, 0.13, 0.03. "
    "And after top_k the probabilities that are left sum to 1 again.",
)
def _(answer, case):
    for seed, (settings, tokens) in enumerate(
        (
            (dict(temperature=0.5, top_p=0.75), (3, 0)),
            (dict(temperature=0.5, top_p=0.85), (3, 0, 5)),
            (dict(top_k=2, top_p=0.56), (3,)),
            (dict(top_k=3, top_p=0.7), (3, 0)),
        )
    ):
        heat = settings.get("temperature", 1.0)
        expected = kept(*tokens, temperature=heat)
        follows(
            case, answer, ODDS, expected, f"with {settings}", seed=30 + seed, **settings
        )


@sampling.requires(
    "rows are cut one by one: a sure row keeps few tokens, an unsure one many",
)
def _(answer, case):
    sure = torch.tensor([0.02, 0.02, 0.9, 0.02, 0.02, 0.02]).log()
    torch.manual_seed(40)
    drawn = case.call(answer, torch.stack([sure, ODDS] * DRAWS), top_p=0.85)
    case.true(
        bool((drawn[0::2] == 2).all()), "Of the sure row others than token 2 came."
    )
    found = set(drawn[1::2].unique().tolist())
    case.equal(found, {0, 3, 5}, "what came from the unsure row")


@sampling.requires(
    "a generator alone decides what is drawn; without one torch's own does",
    "Pass the generator on to what draws, and nothing else.",
)
def _(answer, case):
    logits = torch.zeros(50, 9)
    for settings in ({}, dict(top_k=8, top_p=0.95)):
        generator = seeded(3)
        torch.manual_seed(1)
        first = case.call_in_place(
            answer, logits.clone(), generator=generator, **settings
        )
        after = torch.initial_seed(), torch.rand(1).item()
        second = case.call_in_place(
            answer, logits.clone(), generator=generator, **settings
        )
        torch.manual_seed(1)
        untouched = torch.initial_seed(), torch.rand(1).item()
        again = case.call_in_place(
            answer, logits.clone(), generator=seeded(3), **settings
        )
        case.equal(again, first, "the same seed gives the same tokens; the second call")
        case.true(
            not torch.equal(first, second), "Two calls in a row gave the same tokens."
        )
        case.true(
            after == untouched, "With a generator, torch's own state changed too."
        )
    torch.manual_seed(8)
    first = case.call(answer, logits)
    second = case.call(answer, logits)
    case.true(
        not torch.equal(first, second), "Two calls in a row gave the same tokens."
    )


@sampling.requires(
    "huge logits, −inf, half precision and unordered memory do no harm",
    "exp overflows above 88 in float32: torch.softmax subtracts the maximum for you.",
)
def _(answer, case):
    huge = torch.tensor([[1e4, -1e4, 3.0], [-1e4, 3.0, 1e4]])
    for settings in ({}, dict(temperature=1e-3), dict(top_p=0.9), dict(top_k=2)):
        drawn = case.call(answer, huge, **settings)
        case.equal(drawn, torch.tensor([0, 2]), f"with {settings}, the tokens")
    for kind in (torch.float16, torch.bfloat16):
        drawn = case.call(answer, huge.to(kind), temperature=1e-3)
        case.equal(
            drawn, torch.tensor([0, 2]), f"in {kind} at temperature 0.001, the tokens"
        )
    hidden = ODDS.clone()
    hidden[3] = -torch.inf
    follows(case, answer, hidden, kept(0, 2, 5), "token 3 at −inf", seed=50)
    follows(
        case, answer, hidden, kept(0, 5), "token 3 at −inf", seed=51, top_p=0.7, top_k=3
    )
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        logits = ODDS.clamp(min=-60).to(kind)
        expected = torch.softmax(logits.double(), -1)
        follows(case, answer, logits, expected, f"in {kind}", seed=52)
    columns = probe(7, 5, seed=53).T
    case.equal(
        case.call(answer, columns, top_k=1),
        columns.argmax(-1),
        "of columns, the tokens",
    )


@sampling.requires(
    "settings that make no sense are a ValueError that names the value",
    "Test all of them first, before temperature 0 returns.",
)
def _(answer, case):
    # Steps of 100: what is drawn where nothing is refused is no matter of chance.
    logits = 100.0 * ((torch.arange(7) * 3 + torch.arange(3)[:, None]) % 7)
    for name, values in dict(
        temperature=(-0.5, -1), top_k=(8, 0, -2), top_p=(0.0, -0.25, 1.5)
    ).items():
        for value in values:
            for more in ({}, {} if name == "temperature" else dict(temperature=0)):
                case.raises(
                    ValueError,
                    answer,
                    logits,
                    **{name: value},
                    **more,
                    mentions=(value,),
                    because=f"{name} = {value} and {logits.shape[-1]} tokens",
                )


def sampler(wrong=""):
    """The way to sample, with one thing done wrongly."""

    def sample(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
        size = logits.shape[-1]
        if temperature < 0 and wrong != "negative_temperature_accepted":
            raise ValueError(f"temperature {temperature}")
        if top_k is not None and wrong == "top_k_clamped":
            top_k = max(1, min(top_k, size))
        if top_k is not None and top_k < 1 and wrong != "top_k_of_0_accepted":
            raise ValueError(f"top_k {top_k}")
        if top_k is not None and top_k > size:
            raise ValueError(f"top_k {top_k}")
        if top_p is not None and wrong != "top_p_unchecked" and not 0 < top_p <= 1:
            raise ValueError(f"top_p {top_p}")
        if temperature == 0 and wrong not in ("zero_divides", "zero_ignored"):
            return logits.argmax(0 if wrong == "argmax_over_rows" else -1)
        if temperature == 0 and wrong == "zero_ignored":
            temperature = 1.0
        x = logits if wrong == "half_overflows" else logits.float()
        cold = x
        if wrong == "multiplied":
            x = x * temperature
        elif wrong == "temperature_ignored":
            pass
        else:
            x = x / temperature
        if wrong == "top_p_first" and top_p is not None:
            x = cut(x, x, top_p, wrong)
        if top_k is not None and wrong != "top_k_ignored" and top_k > 0:
            order = x.argsort(-1, descending=wrong != "least_likely_kept")
            rest = order[:, top_k:]
            x = x.scatter(1, rest, 0.0 if wrong == "cut_to_zero" else -torch.inf)
        if top_p is not None and wrong not in ("top_p_first", "top_p_ignored"):
            x = cut(x, cold if wrong == "top_p_before_temperature" else x, top_p, wrong)
        p = torch.softmax(x, -1)
        if wrong == "always_greedy":
            return p.argmax(-1)
        if wrong == "reseeded":
            generator = torch.Generator().manual_seed(0)
        if wrong == "generator_ignored":
            generator = None
        if wrong == "ranks_returned" and (top_k is not None or top_p is not None):
            p = p.sort(-1, descending=True).values
        if wrong == "one_draw_for_all_rows":
            drawn = torch.multinomial(p[:1], 1, generator=generator)
            return drawn.squeeze(1).expand(len(p)).clone()
        drawn = torch.multinomial(p, 1, generator=generator)
        if wrong == "row_alone_squeezed":
            return drawn.squeeze()
        return drawn if wrong == "extra_dimension" else drawn.squeeze(1)

    def cut(x, weighed, top_p, wrong):
        p, order = torch.softmax(weighed, -1).sort(-1, descending=True)
        total = p.cumsum(-1)
        if wrong == "past_the_end":
            last = (total <= top_p).sum(-1, keepdim=True)
            order.gather(1, last)  # raises when nothing crosses
        if wrong == "crossing_token_dropped":
            drop = total > top_p
            drop[:, 0] = False
        elif wrong == "threshold_of_each":
            drop = p < 1 - top_p
            drop[:, 0] = False
        elif wrong == "one_too_many":
            before = total - p
            drop = (before - p.roll(1, -1)) >= top_p
            drop[:, :2] = False
        else:
            drop = total - p >= top_p
        if wrong == "first_row_decides":
            drop = drop[:1].expand_as(drop)
        if wrong == "mask_not_sent_back":
            return x.masked_fill(drop, -torch.inf)
        return x.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)

    return sample


SAMPLE_FAULTS = {
    "zero_divides": "Temperature 0 divides by zero. It means the most likely token: "
    "return that before anything is divided.",
    "zero_ignored": "Temperature 0 is taken for “not given”: 0 is false in Python. "
    "Compare with `== 0`.",
    "argmax_over_rows": "The most likely token is looked for across the batch instead of "
    "the vocabulary, the last dimension.",
    "always_greedy": "It always takes the most likely token. Draw, with the "
    "probabilities.",
    "multiplied": "The logits are multiplied by the temperature: a high one then makes "
    "the model *more* sure. Divide.",
    "temperature_ignored": "The temperature changes nothing. Is it used? On "
    "probabilities a division is undone by the next normalisation; divide the logits.",
    "top_k_ignored": "`top_k` is not used.",
    "top_p_ignored": "`top_p` is not used.",
    "least_likely_kept": "top_k keeps the least likely tokens: the order is reversed.",
    "cut_to_zero": "Tokens that are cut get a logit of 0, and exp(0) is 1: they can "
    "still be drawn. Their probability must be 0, so their logit −inf.",
    "ranks_returned": "What is drawn from the sorted probabilities is a rank, not a "
    "token. Look up which token has that rank.",
    "crossing_token_dropped": "The token that crosses `top_p` is dropped, so that less "
    "than `top_p` is left. Keep it: look at the sum before each token.",
    "one_too_many": "One token more than the one that crosses `top_p` is kept.",
    "threshold_of_each": "Each token's own probability is compared with a threshold. "
    "`top_p` is about the sum of the most likely ones.",
    "past_the_end": "With top_p = 1 nothing crosses, and the search for the crossing runs "
    "past the end of the sums.",
    "top_p_before_temperature": "`top_p` looks at the probabilities before the "
    "temperature has changed them.",
    "top_p_first": "`top_p` is applied before `top_k`. Then the two do not mean the same: "
    "top_k first, then top_p on what is left.",
    "first_row_decides": "The first row decides how many tokens are kept in all rows.",
    "mask_not_sent_back": "The mask was made for sorted tokens and is applied to unsorted "
    "ones. It must go back to the order of the vocabulary.",
    "one_draw_for_all_rows": "One token is drawn for all rows.",
    "extra_dimension": "The result is `(B, 1)`; one token a row is `(B,)`.",
    "row_alone_squeezed": "`squeeze()` without a dimension takes away every dimension of "
    "size 1, that of a batch of one row as well. Name the one that goes.",
    "half_overflows": "In float16 a logit divided by a small temperature passes 65,504, "
    "the largest number, and infinity minus infinity is NaN. Work in float32.",
    "generator_ignored": "The generator is not passed on, so its seed decides nothing.",
    "reseeded": "A new generator with a fixed seed is made in each call: every draw is "
    "the same.",
    "negative_temperature_accepted": "A negative temperature is accepted: it makes the "
    "least likely token the most likely one.",
    "top_k_of_0_accepted": "top_k = 0 is accepted. It would leave no token; refuse it.",
    "top_k_clamped": "A `top_k` outside 1 … V is silently moved inside. The caller made "
    "a mistake and should hear of it.",
    "top_p_unchecked": "A `top_p` outside (0, 1] is accepted.",
}
for name, sentence in SAMPLE_FAULTS.items():
    sampling.fault(name, sentence, sampler(name))


# generate -----------------------------------------------------------------------------

generation = Exercise("generate", lesson="forward_pass")


class Sums(nn.Module):
    """Stands for a model: what is likely next depends on every token and its place."""

    def __init__(self, max_len=50, scale=9.0, vocab_size=11):
        super().__init__()
        self.config = SimpleNamespace(max_len=max_len, vocab_size=vocab_size)
        self.scale = nn.Parameter(torch.tensor(scale))
        self.lengths = []

    def forward(self, ids):
        t, size = ids.shape[1], self.config.vocab_size
        if t > self.config.max_len:
            raise RuntimeError("the model was given more than max_len tokens")
        self.lengths.append(t)
        places = torch.arange(1, t + 1, device=ids.device)
        totals = (ids * places + 3).cumsum(1)  # B T
        tokens = torch.arange(size, device=ids.device)
        distance = (totals[..., None] * 5 + tokens * 3) % size  # B T V
        return self.scale * -distance.to(self.scale.dtype) / size


def continued(model, ids, n):
    """The greedy continuation, in plain Python."""
    rows = [row.tolist() for row in ids]
    for _ in range(n):
        seen = torch.tensor([row[-model.config.max_len :] for row in rows])
        with torch.no_grad():
            best = model(seen)[:, -1].argmax(-1).tolist()
        rows = [[*row, token] for row, token in zip(rows, best, strict=True)]
    return torch.tensor(rows)


PROMPTS = probe_ids(3, 4, below=11)


@generation.requires(
    "temperature 0: the prompt, then the most likely token at each step",
    "Do it by hand once: which row of the logits speaks of the next token, and what does "
    "the model read in the second step?",
)
def _(answer, case):
    for n in (1, 2, 6):
        actual = case.call(answer, Sums(), PROMPTS, n, temperature=0)
        case.equal(
            actual, continued(Sums(), PROMPTS, n), f"{n} more tokens: the result"
        )
    one = probe_ids(5, 1, below=11, seed=1)
    actual = case.call(answer, Sums(), one, n_tokens=7, temperature=0.0)
    case.equal(actual, continued(Sums(), one, 7), "from one token: the result")


@generation.requires("no tokens to add gives back the prompt")
def _(answer, case):
    case.equal(case.call(answer, Sums(), PROMPTS, 0), PROMPTS, "the result")


@generation.requires(
    "past max_len the model sees the last max_len tokens",
    "The text grows, the window moves. Which end of the text must the model see?",
)
def _(answer, case):
    for longest in (4, 6):
        model = Sums(max_len=longest)
        actual = case.call(answer, model, PROMPTS, 9, temperature=0)
        expected = continued(Sums(max_len=longest), PROMPTS, 9)
        case.equal(actual, expected, f"with max_len {longest}: the result")


@generation.requires(
    "the settings of sample are passed on, each under its own name",
    "Pass them by name, or in the order that `sample` has.",
)
def _(answer, case):
    greedy = continued(Sums(), PROMPTS, 5)
    for settings in (
        dict(top_k=1, temperature=5.0),
        dict(top_p=1e-6, temperature=5.0),
        dict(temperature=1e-4),
    ):
        actual = case.call(answer, Sums(), PROMPTS, 5, **settings)
        case.equal(actual, greedy, f"with {settings}, as good as greedy: the result")
    many = PROMPTS[:1].expand(4_000, -1)
    p = torch.softmax(Sums()(PROMPTS[:1])[0, -1].detach().double(), -1)
    torch.manual_seed(5)
    drawn = case.call(answer, Sums(), many, 1)[:, -1]
    for token in range(11):
        found, wanted = (drawn == token).double().mean().item(), p[token].item()
        case.true(
            abs(found - wanted) < 5.5 * math.sqrt(wanted * (1 - wanted) / 4_000),
            f"Without settings token {token} came in {found:.1%} of 4,000 draws, "
            f"expected {wanted:.1%}: the temperature is 1 unless given.",
        )


@generation.requires("a generator alone decides what is drawn")
def _(answer, case):
    model = Sums(scale=1.0)
    runs = []
    for seed, of_torch in ((2, 0), (2, 1), (3, 1)):
        torch.manual_seed(of_torch)
        runs.append(
            case.call_in_place(answer, model, PROMPTS, 12, generator=seeded(seed))
        )
        case.is_tensor(runs[-1])
    case.equal(runs[1], runs[0], "the same seed again: the result")
    case.true(not torch.equal(runs[1], runs[2]), "Two seeds gave the same text.")
    new = runs[0][:, 4:]
    case.true(len(new.unique()) > 2, "The same token was drawn again and again.")


@generation.requires(
    "an empty prompt, and one longer than max_len, are a ValueError",
    "Test the prompt before the loop.",
)
def _(answer, case):
    empty = torch.empty(2, 0, dtype=torch.int64)
    case.raises(ValueError, answer, Sums(), empty, 3, because="an empty prompt")
    case.raises(
        ValueError,
        answer,
        Sums(max_len=3),
        PROMPTS,
        2,
        temperature=0,
        mentions=(4, 3),
        because="a prompt of 4 tokens where max_len is 3",
    )
    same = case.call(answer, Sums(max_len=4), PROMPTS, 1, temperature=0)
    expected = continued(Sums(max_len=4), PROMPTS, 1)
    case.equal(same, expected, "a prompt of exactly max_len: the result")


@generation.requires(
    "no gradients are recorded: generating is not training",
    "Each step would keep everything that a backward pass needs. There is a decorator "
    "for functions that need none.",
)
def _(answer, case):
    seen = []

    class Watching(Sums):
        def forward(self, ids):
            seen.append(torch.is_grad_enabled())
            return super().forward(ids)

    case.call(answer, Watching(), PROMPTS, 2, temperature=0)
    case.true(not any(seen), "The model ran with gradients enabled.")


@generation.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, Sums(), PROMPTS, 2, temperature=0)


def generator_that(wrong=""):
    def generate(
        model, ids, n_tokens, temperature=1.0, top_k=None, top_p=None, generator=None
    ):
        longest = model.config.max_len
        if ids.shape[1] == 0 and wrong != "empty_unchecked":
            raise ValueError("empty")
        if ids.shape[1] > longest:
            if wrong == "prompt_cut":
                ids = ids[:, -longest:]
            else:
                raise ValueError(f"{ids.shape[1]} > {longest}")
        prompt = ids
        if wrong == "defaults_to_greedy" and temperature == 1.0 and generator is None:
            temperature = 0
        if wrong == "temperature_not_passed":
            temperature = 1.0 if temperature else 0
        if wrong == "top_k_not_passed":
            top_k = None
        if wrong == "top_p_not_passed":
            top_p = None
        if wrong == "generator_not_passed":
            generator = None
        steps = n_tokens + {"one_too_many": 1, "one_too_few": -1}.get(wrong, 0)
        if wrong == "up_to_n_tokens":
            steps = n_tokens - ids.shape[1]
        with torch.set_grad_enabled(wrong == "gradients_kept"):
            for _ in range(steps):
                seen = ids if wrong == "no_window" else ids[:, -longest:]
                if wrong == "first_tokens_seen":
                    seen = ids[:, :longest]
                if wrong == "last_token_alone":
                    seen = ids[:, -1:]
                if wrong == "window_restarts":
                    seen = ids if ids.shape[1] <= longest else ids[:, -1:]
                if wrong == "prompt_alone":
                    seen = prompt
                logits = model(seen)
                at = {"first_position": 0, "last_but_one": max(-2, -seen.shape[1])}
                logits = logits[:, at.get(wrong, -1)]
                token = sampler()(logits, temperature, top_k, top_p, generator)
                if wrong == "one_row_for_all":
                    token = token[:1].expand(len(ids))
                if wrong == "put_in_front":
                    ids = torch.cat([token[:, None], ids], 1)
                else:
                    ids = torch.cat([ids, token[:, None]], 1)
        return ids[:, prompt.shape[1] :] if wrong == "prompt_left_out" else ids

    return generate


GENERATE_FAULTS = {
    "first_position": "The next token is drawn from the first position's logits. The last "
    "position has seen the whole text.",
    "last_but_one": "The next token is drawn from the last position but one: it predicts "
    "the token that is already there.",
    "prompt_alone": "The model reads the prompt in every step, never what it has written.",
    "last_token_alone": "The model reads only the newest token. Without a cache "
    "(lesson 10) it has to read the whole text again.",
    "prompt_left_out": "The prompt is missing from the result.",
    "put_in_front": "New tokens are put in front of the text.",
    "one_too_many": "One token too many is added.",
    "one_too_few": "One token too few is added.",
    "up_to_n_tokens": "`n_tokens` is taken for the length of the whole text. It is how "
    "many tokens are added.",
    "one_row_for_all": "Every row gets the first row's token.",
    "no_window": "Past `max_len` the model is given more tokens than it can read.",
    "first_tokens_seen": "Past `max_len` the model sees the *first* tokens, and so never "
    "again what it has just written.",
    "window_restarts": "Past `max_len` the model starts again from one token. It should "
    "see the last `max_len` of them.",
    "defaults_to_greedy": "Without settings it takes the most likely token; the "
    "temperature is 1 unless given.",
    "temperature_not_passed": "The temperature is not passed on to `sample`.",
    "top_k_not_passed": "`top_k` is not passed on to `sample`.",
    "top_p_not_passed": "`top_p` is not passed on to `sample`.",
    "generator_not_passed": "The generator is not passed on to `sample`.",
    "empty_unchecked": "An empty prompt reaches the model, which has no last position to "
    "ask.",
    "prompt_cut": "A prompt that is too long is cut without a word: the model answers "
    "another question than it was asked.",
    "gradients_kept": "Gradients are recorded at every step. Memory grows with the text "
    "for nothing.",
}
for name, sentence in GENERATE_FAULTS.items():
    generation.fault(name, sentence, generator_that(name))


# count_parameters ---------------------------------------------------------------------

counting = Exercise("count_parameters", lesson="forward_pass")
SMOLLM = Sizes(49_152, 576, 30, 9, 3, 64, 1_536, 8_192, rope_base=100_000.0)
GPT2_SMALL = Sizes(50_257, 768, 12, 12, 12, 64, 3_072, 1_024, style="gpt2")
LLAMA_7B = Sizes(32_000, 4_096, 32, 32, 32, 128, 11_008, 4_096, tied=False)
LLAMA_3_8B = Sizes(128_256, 4_096, 32, 32, 8, 128, 14_336, 8_192, tied=False)


@counting.requires(
    "a block of style llama without embedding's share: weights, KV heads, gate, norms",
    "List the matrices of one block with their shapes: four in attention, three in the "
    "feed-forward network; then the norms.",
)
def _(answer, case):
    for c in (
        LLAMA,
        replace(LLAMA, n_layers=1),
        replace(LLAMA, n_kv_heads=6, d_head=2),
    ):
        found = case.call(answer, c)
        case.equal(found, numbers_in(model_shapes(c)), f"for {c}, it")


@counting.requires("a tied matrix counts once")
def _(answer, case):
    for c in (TIED, replace(TIED, n_layers=5, n_kv_heads=1)):
        case.equal(case.call(answer, c), numbers_in(model_shapes(c)), f"for {c}, it")


@counting.requires(
    'style "gpt2": biases, two numbers a norm, the table of positions, no gate',
    "A bias has as many numbers as its layer has outputs, and LayerNorm has one too.",
)
def _(answer, case):
    for c in (GPT2, TIED_GPT2, replace(GPT2, n_kv_heads=6, d_head=2, max_len=99)):
        case.equal(case.call(answer, c), numbers_in(model_shapes(c)), f"for {c}, it")


@counting.requires("the published counts of SmolLM2, GPT-2, Llama 2 7B and Llama 3 8B")
def _(answer, case):
    for name, c, published in (
        ("SmolLM2-135M", SMOLLM, 134_515_008),
        ("GPT-2 small", GPT2_SMALL, 124_439_808),
        ("Llama 2 7B", LLAMA_7B, 6_738_415_616),
        ("Llama 3 8B", LLAMA_3_8B, 8_030_261_248),
    ):
        found = case.call(answer, c)
        case.equal(found, published, f"for {name} it")
        case.true(isinstance(found, int), "The count is no whole number: use no `/`.")


def counter(wrong=""):
    def count_parameters(config):
        c = config
        if wrong == "rule_of_thumb":
            per_layer = 4 * c.d_model**2 + 2 * c.d_model * c.d_ff
            return c.n_layers * per_layer + c.vocab_size * c.d_model
        if wrong == "kv_heads_ignored":
            c = replace_fields(c, n_kv_heads=c.n_heads)
        if wrong == "heads_fill_the_width":
            c = replace_fields(c, d_head=c.d_model // c.n_heads)
        if wrong == "tied_twice":
            c = replace_fields(c, tied=False)
        if wrong == "always_tied":
            c = replace_fields(c, tied=True)
        shapes = model_shapes(c)
        dropped = {
            "gate_forgotten": lambda n: n.endswith("w_3"),
            "norms_forgotten": lambda n: "norm" in n,
            "last_norm_forgotten": lambda n: n in ("norm", "norm.bias"),
            "one_norm_a_block": lambda n: "norm_2" in n,
            "biases_forgotten": lambda n: n.endswith("bias") and "norm" not in n,
            "norm_biases_forgotten": lambda n: n.endswith("bias") and "norm" in n,
            "positions_forgotten": lambda n: n == "positions.table",
            "embedding_forgotten": lambda n: n == "embedding",
            "one_layer": lambda n: n.startswith("blocks.") and n[7] != "0",
        }.get(wrong, lambda n: False)
        total = numbers_in({n: s for n, s in shapes.items() if not dropped(n)})
        if wrong == "rope_counted" and c.style == "llama":
            total += c.max_len * c.d_head // 2
        return float(total) if wrong == "float" else total

    return count_parameters


def replace_fields(c, **changes):
    fields = {name: getattr(c, name) for name in FIELDS}
    return Sizes(**(fields | changes))


COUNT_FAULTS = {
    "rule_of_thumb": "This is the rule L(4d² + 2·d·d_ff) + V·d. It knows neither gates nor "
    "shared KV heads nor norms; count each matrix.",
    "kv_heads_ignored": "Keys and values are counted once for every query head; there are "
    "only `n_kv_heads` of them.",
    "heads_fill_the_width": "The heads are taken to fill `d_model`. Their width is "
    "`d_head`, which need not be d_model / n_heads.",
    "tied_twice": "A tied matrix is counted twice.",
    "always_tied": "The head's own matrix is missing where it is not tied.",
    "gate_forgotten": "SwiGLU has three matrices, one of them is missing.",
    "norms_forgotten": "The weights of the norms are missing.",
    "last_norm_forgotten": "The norm before the head is missing.",
    "one_norm_a_block": "A block has two norms, one is missing.",
    "biases_forgotten": 'In style "gpt2" the linear layers have biases; they are missing.',
    "norm_biases_forgotten": 'In style "gpt2" each norm has a bias too; it is missing.',
    "positions_forgotten": 'In style "gpt2" the table of positions is learned; it is '
    "missing.",
    "embedding_forgotten": "The embedding is missing: V·d numbers.",
    "one_layer": "Only one block is counted.",
    "rope_counted": "RoPE's angles are counted; they are computed, not learned.",
    "float": "The result is a float; a count is a whole number.",
}
for name, sentence in COUNT_FAULTS.items():
    counting.fault(name, sentence, counter(name))


# forward_flops ------------------------------------------------------------------------

costing = Exercise("forward_flops", lesson="forward_pass")


@cache
def counted_flops(fields, t):
    """PyTorch's counter over the oracle, on the device that computes shapes alone."""
    c = Sizes(*fields)
    weights = {
        name: torch.empty(shape, device="meta")
        for name, shape in model_shapes(c).items()
    }
    with FlopCounterMode(display=False) as counter:
        whole_decoder(torch.zeros(1, t, dtype=torch.int64, device="meta"), weights, c)
    return counter.get_total_flops()


def flops_of(c, t):
    return counted_flops(tuple(getattr(c, name) for name in FIELDS), t)


@costing.requires(
    "one token of style llama costs what PyTorch counts",
    "A product `(T, n) @ (n, m)` takes T·n·m multiplications and as many additions.",
)
def _(answer, case):
    for c in (LLAMA, replace(LLAMA, n_kv_heads=6, d_ff=9)):
        case.equal(case.call(answer, c, 1), flops_of(c, 1), f"for {c} and 1 token, it")


@costing.requires(
    "several tokens: the scores grow with their square",
    "Two products in attention have no weights: which, and what are their shapes in each "
    "head?",
)
def _(answer, case):
    for n in (2, 7, 11):
        case.equal(
            case.call(answer, LLAMA, n), flops_of(LLAMA, n), f"for {n} tokens, it"
        )


@costing.requires("tied or not, the head multiplies; style gpt2 has no gate")
def _(answer, case):
    for c in (TIED, GPT2, TIED_GPT2):
        for n in (1, 9):
            case.equal(
                case.call(answer, c, n), flops_of(c, n), f"for {c}, {n} tokens, it"
            )


@costing.requires("large models and long texts too, as whole numbers")
def _(answer, case):
    for name, c in (
        ("four layers of SmolLM2-135M", replace(SMOLLM, n_layers=4)),
        ("two layers of Llama 3 8B", replace(LLAMA_3_8B, n_layers=2)),
    ):
        for n in (1, 1_000):
            found = case.call(answer, c, n)
            case.equal(found, flops_of(c, n), f"for {name} and {n} tokens, it")
            case.true(
                isinstance(found, int), "The count is no whole number: use no `/`."
            )


def coster(wrong=""):
    def forward_flops(config, t):
        c = config
        kv = c.n_heads if wrong == "kv_heads_ignored" else c.n_kv_heads
        attention = 2 * c.d_model * c.d_head * (c.n_heads + kv)
        n_matrices = 2 if c.style == "gpt2" or wrong == "gate_forgotten" else 3
        if wrong == "always_gated":
            n_matrices = 3
        layer = attention + n_matrices * c.d_model * c.d_ff
        head = c.vocab_size * c.d_model
        if wrong == "head_forgotten" or (wrong == "tied_head_free" and c.tied):
            head = 0
        if wrong == "embedding_counted":
            head *= 2
        width = c.d_model if wrong == "scores_of_the_stream" else c.n_heads * c.d_head
        products = {
            "scores_forgotten": 0,
            "values_forgotten": 1,
            "one_score_each": 2 / t,
            "causal_half": (t + 1) / t,
        }.get(wrong, 2)
        n_layers = 1 if wrong == "one_layer" else c.n_layers
        scores = int(products * t * t * width) * n_layers
        if wrong == "scores_of_kv_heads":
            scores = 2 * t * t * c.n_kv_heads * c.d_head * n_layers
        if wrong == "last_position_head":
            total = t * n_layers * layer + head + scores
        else:
            total = t * (n_layers * layer + head) + scores
        if wrong == "two_per_parameter":
            return 2 * counter()(c) * t
        times = {"multiplications_alone": 1, "backward_too": 6}.get(wrong, 2)
        return float(times * total) if wrong == "float" else times * total

    return forward_flops


FLOP_FAULTS = {
    "multiplications_alone": "A multiplication and its addition are counted as one; they "
    "are two operations here.",
    "backward_too": "The backward pass is counted too. It costs about twice the forward "
    "pass, which alone is asked for.",
    "scores_forgotten": "The products of queries with keys, and of weights with values, "
    "are missing. They have no parameters but cost T² each.",
    "values_forgotten": "One of attention's two products is missing: queries with keys, "
    "and weights with values.",
    "one_score_each": "The scores grow with T here; every position meets every other, so "
    "they grow with T².",
    "causal_half": "Only the scores that the mask leaves are counted. Our code computes "
    "the whole square and hides half of it.",
    "scores_of_the_stream": "The scores are counted with `d_model`; the heads together "
    "are n_heads·d_head wide.",
    "scores_of_kv_heads": "The scores are counted once for each KV head. Every query head "
    "has its own, even where it shares keys.",
    "kv_heads_ignored": "Keys and values are projected once for every query head here; "
    "there are only `n_kv_heads` of them.",
    "gate_forgotten": "SwiGLU has three matrices, one of them is missing.",
    "always_gated": 'Style "gpt2" has two matrices in its feed-forward network, not '
    "three.",
    "head_forgotten": "The head is missing: V·d multiplications a token.",
    "tied_head_free": "A tied head saves parameters, not work: it multiplies all the "
    "same.",
    "last_position_head": "The head runs on the last position alone here; the model gives "
    "logits at every position.",
    "embedding_counted": "The embedding is counted as a product. It is a look-up and "
    "costs no arithmetic.",
    "one_layer": "Only one block is counted.",
    "two_per_parameter": "This is the rule of two operations a parameter and token. It "
    "knows neither the scores nor that norms and embeddings are no products.",
    "float": "The result is a float; a count is a whole number.",
}
for name, sentence in FLOP_FAULTS.items():
    costing.fault(name, sentence, coster(name))


# The parts of lessons 02 to 08 together ------------------------------------------------

joint = IntegrationCheck(
    "whole_decoder",
    lesson="forward_pass",
    parts={
        "causal_mask": "attention",
        "MultiHeadAttention": "multi_head",
        "rope": "positions",
        "LearnedPositions": "positions",
        "gelu": "feed_forward",
        "FeedForward": "feed_forward",
        "SwiGLU": "feed_forward",
        "RMSNorm": "norms",
        "pre_norm": "norms",
        "TransformerConfig": "forward_pass",
        "Block": "forward_pass",
        "Transformer": "forward_pass",
        "sample": "forward_pass",
        "generate": "forward_pass",
    },
)


def own_weights(p, prefix):
    return {
        n.removeprefix(f"{prefix}."): w
        for n, w in p.items()
        if n.startswith(f"{prefix}.")
    }


@joint.requires(
    "attention, causal_mask and rope: shared heads, turned, that see only the past",
    "Give `MultiHeadAttention` your `causal_mask` and your `rope` by hand and print the "
    "first row: it sees only itself.",
)
def _(parts, case):
    p = weights_for(block_shapes(LLAMA), 900)
    module = case.call(parts["MultiHeadAttention"], 10, 6, 2, 4)
    load_all(case, module, own_weights(p, "attention"))
    x, mask = probe(3, 7, 10, seed=901), case.call(parts["causal_mask"], 7)
    turn = partial(parts["rope"], positions=torch.arange(7), base=100.0)
    actual = case.call(module, x, mask, turn)
    expected = looked_up(x.double(), doubled(p), LLAMA, causal(7), None)
    case.close(actual, expected, "attention with mask and rotation", like=x)


@joint.requires(
    "pre_norm, RMSNorm and SwiGLU make the second half of a block",
    "Compare pre_norm(x, feed_forward, norm_2) with the two lines written out.",
)
def _(parts, case):
    p = weights_for(block_shapes(LLAMA), 910)
    ff = load_all(
        case, case.call(parts["SwiGLU"], 10, 14), own_weights(p, "feed_forward")
    )
    norm = case.load(case.call(parts["RMSNorm"], 10, 1e-2), weight=p["norm_2"])
    x = probe(3, 7, 10, seed=911, scale=0.3)
    actual = case.call(parts["pre_norm"], x, ff, norm)
    wide = x.double()
    expected = wide + thought(
        normed(wide, doubled(p), "norm_2", LLAMA), doubled(p), LLAMA
    )
    case.close(actual, expected, "the second half of a block", like=x)


@joint.requires(
    "FeedForward with gelu, and LearnedPositions, are what style gpt2 needs",
)
def _(parts, case):
    c = GPT2
    p = weights_for(block_shapes(c), 920)
    ff = case.call(parts["FeedForward"], 10, 14, parts["gelu"])
    for name in ("w_1", "w_2"):
        case.load(ff, **{name: p[f"feed_forward.{name}"]})
        layer = getattr(ff, name)
        layer.bias = nn.Parameter(p[f"feed_forward.{name}.bias"].clone())
    x = probe(3, 7, 10, seed=921)
    expected = thought(x.double(), doubled(p), c)
    case.close(
        case.call(ff, x), expected, "the feed-forward network with biases", like=x
    )
    table = case.load(case.call(parts["LearnedPositions"], 11, 10), table=probe(11, 10))
    actual = case.call(table, torch.arange(7))
    case.close(actual, probe(11, 10)[:7], "the first seven positions")


@joint.requires(
    "Block does with these parts what they do one by one",
    "All parts are right one by one, and put together they differ from your block. Has "
    "one of them been edited since? Run the check cells again.",
)
def _(parts, case):
    for fields in (LLAMA, GPT2):
        c = case.call(parts["TransformerConfig"], *[getattr(fields, n) for n in FIELDS])
        p = weights_for(block_shapes(c), 930)
        module = load_all(case, case.call(parts["Block"], c), p)
        x, mask = probe(3, 7, 10, seed=931), case.call(parts["causal_mask"], 7)
        expected = one_block(x.double(), doubled(p), c, causal(7))
        case.close(
            case.call(module, x, mask), expected, f"a block, style {c.style}", like=x
        )


@joint.requires("Transformer gives the logits, and generate continues a text with it")
def _(parts, case):
    for fields in (LLAMA, TIED_GPT2):
        c = case.call(parts["TransformerConfig"], *[getattr(fields, n) for n in FIELDS])
        p = doubled(weights_for(model_shapes(c), 940))
        model = load_all(case, case.call(parts["Transformer"], c), p).double()
        ids = probe_ids(3, 4, below=23, seed=941)
        expected = whole_decoder(ids, p, c)
        case.close(
            case.call(model, ids), expected, f"logits, {c.style}", tolerance=ANGLES
        )
        oracle = SimpleNamespace(max_len=c.max_len)
        expected = continued(Decoder(p, c, oracle), ids, 9)
        actual = case.call(parts["generate"], model, ids, 9, temperature=0)
        case.equal(actual, expected, "nine more tokens, past max_len: the text")
        last = case.call(model, ids)[:, -1]
        case.equal(
            case.call(parts["sample"], last, temperature=0),
            expected[:, 4],
            "the next token",
        )


class Decoder:
    def __init__(self, weights, c, config):
        self.weights, self.c, self.config = weights, c, config

    def __call__(self, ids):
        return whole_decoder(ids, self.weights, self.c)


class TiledAttention(Holder):
    """Multi-head attention whose KV heads are tiled."""

    def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
        c = Sizes(1, d_model, 1, n_heads, n_kv_heads, d_head, 1, 1)
        shapes = block_shapes(c)
        super().__init__(own_weights(shapes, "attention"))
        self.c = c

    def forward(self, x, mask=None, rotate=None):
        held = {f"attention.{n}": p for n, p in self.held().items()}
        c = replace(self.c, rope_base=100.0)
        return looked_up(x, held, c, mask, None, "tiled_kv")


class DeafNorm(nn.Module):
    """RMSNorm that keeps to its own eps."""

    def __init__(self, d_model, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


for name, sentence, wrong in (
    (
        "rope_on_halves",
        "`rope` pairs the two halves of a head; the decoder's weights are for neighbours.",
        {"rope": lambda x, positions, base=10_000.0: turned(x, positions, base, True)},
    ),
    (
        "mask_says_hidden",
        "`causal_mask` marks what is hidden, and attention reads True as “may look”.",
        {"causal_mask": lambda t_q, t_k=None: torch.ones(t_q, t_q).triu(1).bool()},
    ),
    (
        "kv_heads_tiled",
        "`MultiHeadAttention` tiles its KV heads; neighbours share one.",
        {"MultiHeadAttention": TiledAttention},
    ),
    ("eps_fixed", "`RMSNorm` ignores the eps that it is given.", {"RMSNorm": DeafNorm}),
    (
        "stream_normalised",
        "`pre_norm` adds to the normalised stream instead of the stream.",
        {"pre_norm": lambda x, sublayer, norm: norm(x) + sublayer(norm(x))},
    ),
    (
        "gelu_by_tanh",
        "`gelu` is the approximation by tanh.",
        {"gelu": partial(F.gelu, approximate="tanh")},
    ),
    (
        "block_forgets_the_base",
        "`Block` uses RoPE's default base.",
        {"Block": block_with("base_ignored")},
    ),
    (
        "model_without_mask",
        "`Transformer` has no mask.",
        {"Transformer": model_with("no_mask")},
    ),
    (
        "generate_reads_one_token",
        "`generate` gives the model the newest token alone.",
        {"generate": generator_that("last_token_alone")},
    ),
):
    joint.fault(name, sentence, wrong)
