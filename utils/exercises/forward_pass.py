"""Lesson 08: the whole decoder, how it is sampled, and what it costs."""

import math
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from utils.check.errors import Crashed, Explained
from utils.check.exercise import Exercise, IntegrationCheck
from utils.check.recording import raised
from utils.probe import probe, probe_ids

TransformerConfig = Exercise("TransformerConfig", lesson="forward_pass")
Block = Exercise("Block", lesson="forward_pass")
Transformer = Exercise("Transformer", lesson="forward_pass")
# A loop over the rows is as right, and takes its time over so many draws.
sample = Exercise("sample", lesson="forward_pass", seconds=25.0)
generate = Exercise("generate", lesson="forward_pass")
count_parameters = Exercise("count_parameters", lesson="forward_pass")
forward_flops = Exercise("forward_flops", lesson="forward_pass")

parameter_name = Exercise("parameter_name", lesson="forward_pass")

# What is right: a decoder as functions of a dictionary of weights ---------------------


@dataclass(unsafe_hash=True)
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
TIED, TIED_GPT2 = replace(LLAMA, tied=True), replace(GPT2, tied=True)


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


def own_weights(p, prefix):
    """Those of one part, under their names in it."""
    start = f"{prefix}."
    return {n.removeprefix(start): w for n, w in p.items() if n.startswith(start)}


def turned(x, positions, base):
    """Every pair as a complex number, times one on the unit circle."""
    d = x.shape[-1]
    i = torch.arange(d // 2, device=x.device, dtype=torch.float64)
    angle = positions[..., None].double() * base ** (-2 * i / d)
    if positions.dim() == 2:
        angle = angle[:, None]  # B 1 T Dh/2
    circle = torch.polar(torch.ones_like(angle), angle)
    pairs = x.unflatten(-1, (-1, 2)).double().contiguous()
    return torch.view_as_real(torch.view_as_complex(pairs) * circle).flatten(-2).to(x)


def normed(x, p, name, c):
    if c.style == "gpt2":
        return F.layer_norm(x, x.shape[-1:], p[name], p[f"{name}.bias"], c.norm_eps)
    return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * p[name]


def linear(x, p, name):
    return F.linear(x, p[name], p.get(f"{name}.bias"))


def looked_up(x, p, c, mask, positions):
    """Multi-head attention, every head a slice of the projections."""

    def heads(name, n):
        return linear(x, p, f"attention.{name}").unflatten(-1, (n, -1)).transpose(1, 2)

    q, k, v = heads("w_q", c.n_heads), *(heads(n, c.n_kv_heads) for n in ("w_k", "w_v"))
    if c.style == "llama":
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        q, k = (turned(y, positions, c.rope_base) for y in (q, k))
    k, v = (y.repeat_interleave(c.n_heads // c.n_kv_heads, 1) for y in (k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(c.d_head)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    out = torch.softmax(scores, -1) @ v
    return linear(out.transpose(1, 2).flatten(2), p, "attention.w_o")


def thought(x, p, c):
    """The feed-forward network."""
    up = linear(x, p, "feed_forward.w_1")
    gpt2 = c.style == "gpt2"
    hidden = F.gelu(up) if gpt2 else F.silu(up) * linear(x, p, "feed_forward.w_3")
    return linear(hidden, p, "feed_forward.w_2")


def one_block(x, mask=None, positions=None, *, p, c):
    x = x + looked_up(normed(x, p, "norm_1", c), p, c, mask, positions)
    return x + thought(normed(x, p, "norm_2", c), p, c)


def causal(t, device=None):
    return torch.ones(t, t, dtype=torch.bool, device=device).tril()


def slow_decoder(ids, p, c):
    """Logits `(B, T, V)`."""
    t = ids.shape[1]
    x = p["embedding"][ids]
    if c.style == "gpt2":
        x = x + p["positions.table"][:t]
    for i in range(c.n_layers):
        x = one_block(x, causal(t, ids.device), p=own_weights(p, f"blocks.{i}"), c=c)
    return F.linear(normed(x, p, "norm", c), p.get("head", p["embedding"]))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# The learner's modules with known weights ---------------------------------------------


def keywords(module, named):
    """For `case.load` and `case.parameters`; a tied matrix may be under either name."""
    held = dict(module.named_parameters())
    if "head" not in named and "embedding.weight" not in held and "head.weight" in held:
        named = {"head" if n == "embedding" else n: v for n, v in named.items()}
    return {name.replace(".", "__"): value for name, value in named.items()}


def load_all(case, module, weights):
    """Load by name; a tied matrix is found under either of its two names."""
    return case.load(module, **keywords(module, weights))


def trained(case, module, *args):
    """Every parameter gets a gradient, not zero, and all of it finite."""
    result = case.call(module, *args)
    case.is_tensor(result)
    case.has_graph(result)
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

FIELDS = tuple(vars(LLAMA))
SIZES = {name: getattr(LLAMA, name) for name in FIELDS[:8]}


def fields_of(config):
    return {name: getattr(config, name, "missing") for name in FIELDS}


@TransformerConfig.requires(
    "sizes that fit are accepted and kept, with the given defaults",
    "The width of a head is a size of its own: `d_model` may be any. What must divide "
    "what, and which style needs an even `d_head`?",
)
def _(answer, case):
    defaults = dict(rope_base=10_000.0, norm_eps=1e-5, tied=True, style="llama")
    config = case.call(answer, *SIZES.values())
    case.equal(fields_of(config), SIZES | defaults, "what it holds")
    for change in (
        dict(rope_base=500.0, norm_eps=1e-6, tied=False),
        dict(d_model=11, d_ff=3, n_heads=7, n_kv_heads=7),
        dict(d_head=5, style="gpt2"),
        dict.fromkeys(SIZES, 1) | dict(d_head=2),
    ):
        config = case.call(answer, **(SIZES | change))
        wanted = SIZES | defaults | change
        case.equal(fields_of(config), wanted, "what it holds, all given by name")


@TransformerConfig.requires(
    "sizes that cannot be, and an unknown style, are a ValueError that names them"
)
def _(answer, case):
    wrong = [({name: value}, (value,)) for name in SIZES for value in (0, -3)]
    for heads, kv in ((6, 4), (7, 2), (3, 9)):
        wrong.append((dict(n_heads=heads, n_kv_heads=kv), (heads, kv)))
    wrong += [(dict(d_head=width), (width,)) for width in (5, 1)]
    wrong += [(dict(style=style), (style,)) for style in ("gpt3", "Llama", "gpt2-xl")]
    for change, numbers in wrong:
        because = ", ".join(f"{name} = {value!r}" for name, value in change.items())
        fields = SIZES | change
        case.raises(ValueError, answer, **fields, mentions=numbers, because=because)


# Block --------------------------------------------------------------------------------


def filled(answer, case, c, seed, shapes=block_shapes, oracle=one_block):
    """The learner's module with weights, and the oracle with the same ones."""
    weights = weights_for(shapes(c), seed)
    module = load_all(case, case.call(answer, c), weights)
    return module, partial(oracle, p=doubled(weights), c=c)


@Block.requires(
    'style "llama": norm_1, attention, norm_2 and feed_forward have their parameters'
)
def _(answer, case):
    for c in (LLAMA, replace(LLAMA, n_kv_heads=6, d_head=2)):
        module, other = case.call(answer, c), case.call(answer, c)
        case.parameters(module, **keywords(module, block_shapes(c)))
        alone = {*module.parameters()}.isdisjoint(other.parameters())
        case.true(alone, "Two blocks share their parameters: make new layers in each.")


@Block.requires(
    "one position: attention, then the feed-forward network, each pre-norm",
    "Write the two lines on paper with x, norm_1, attention, norm_2, feed_forward. What "
    "does each line add, and to what?",
)
def _(answer, case):
    module, oracle = filled(answer, case, LLAMA, seed=10)
    case.agrees(module, oracle, probe(5, 1, 10, seed=11))


@Block.requires(
    "several positions: RoPE turns queries and keys, with the base of the config",
    "`rotate` gets heads and nothing else, so the positions and the base must be bound "
    "beforehand. Compare with a sequence of one position: there RoPE does nothing.",
)
def _(answer, case):
    module, oracle = filled(answer, case, LLAMA, seed=20)
    case.agrees(module, oracle, probe(5, 7, 10, seed=21))
    other = replace(LLAMA, rope_base=30_000.0, norm_eps=0.3)
    module, oracle = filled(answer, case, other, seed=22)
    case.agrees(module, oracle, probe(2, 9, 10, seed=23))


@Block.requires(
    "the mask is passed on, and positions that are given are used, others in each row",
    "0 to T − 1 is only what holds when no positions are given.",
)
def _(answer, case):
    module, oracle = filled(answer, case, LLAMA, seed=30)
    x = probe(3, 5, 10, seed=31)
    case.agrees(module, oracle, x, causal(5))
    each = (probe(3, 1, 5, 5, seed=32) > -0.3) | torch.eye(5, dtype=torch.bool)
    case.agrees(module, oracle, x, each, torch.tensor([3, 4, 5, 9, 10]))
    rows = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2], [2, 3, 7, 8, 20]])
    case.agrees(module, oracle, x, causal(5), positions=rows)


@Block.requires(
    'style "gpt2": LayerNorm, exact GELU, biases that start at zero, and no rotation',
    "Which of the four parts are other classes than before? The layers of lessons 03 and "
    "05 have no biases: `layer.bias = nn.Parameter(…)` gives one to an `nn.Linear`.",
)
def _(answer, case):
    module = case.call(answer, GPT2)
    case.parameters(module, **keywords(module, block_shapes(GPT2)))
    for name, p in module.named_parameters():
        if name.endswith("bias") and not bool((p == 0).all()):
            raise Explained(f"The bias `{name}` does not start at zero.")
    module, oracle = filled(answer, case, GPT2, seed=60)
    case.agrees(module, oracle, probe(5, 1, 10, seed=61))
    case.agrees(module, oracle, probe(3, 7, 10, seed=62), causal(7))
    case.agrees(module, oracle, probe(3, 7, 10, seed=63, scale=0.05), causal(7))


@Block.requires(
    "other dtypes, `eval()` and devices work too, and every parameter gets a gradient"
)
def _(answer, case):
    for c in (LLAMA, GPT2):
        module, oracle = filled(answer, case, c, seed=80)
        x, mask = probe(2, 5, 10, seed=81), causal(5)
        case.gradients_agree(partial(module, mask=mask), partial(oracle, mask=mask), x)
        trained(case, module, x)
        case.any_device(module, x, mask)
        for kind, tolerance in ((torch.float64, ANGLES), (torch.bfloat16, None)):
            module, _ = filled(answer, case, c, seed=70)
            rounded = weights_for(block_shapes(c), 70)
            rounded = {n: w.to(kind).double() for n, w in rounded.items()}
            x = x.to(kind)
            expected, what = one_block(x.double(), mask, p=rounded, c=c), f"in {kind}"
            actual = case.call(module.to(kind).eval(), x, mask)
            case.close(actual, expected, what, like=x, tolerance=tolerance)


# Transformer --------------------------------------------------------------------------


filled_model = partial(filled, shapes=model_shapes, oracle=slow_decoder)


def logits_agree(case, module, oracle, ids):
    first = next(module.parameters())
    tolerance = ANGLES if first.dtype == torch.float64 else None
    actual = case.call(module, ids)
    case.close(actual, oracle(ids), "the logits", like=first, tolerance=tolerance)


@Transformer.requires("embedding, blocks, norm and head have their parameters")
def _(answer, case):
    for c in (LLAMA, replace(LLAMA, n_layers=2, n_kv_heads=3, d_ff=9)):
        module = case.call(answer, c)
        case.parameters(module, **keywords(module, model_shapes(c)))
        if not hasattr(module, "config"):
            why = "`generate` and later lessons read it"
            raise Explained(f"The model has no attribute `config`; {why}.")


@Transformer.requires(
    "one token through one block: embed, block, norm, head",
    "Walk through it with one token: what is the shape after each of the four steps?",
)
def _(answer, case):
    one_layer = replace(LLAMA, n_layers=1)
    module, oracle = filled_model(answer, case, one_layer, seed=100)
    logits_agree(case, module, oracle, torch.tensor([[5]]))
    logits_agree(case, module, oracle, torch.tensor([[2], [22], [0]]))


@Transformer.requires(
    "several tokens and blocks: each position sees itself and what came before",
    "Change the last token and see which logits move: only the last ones may.",
)
def _(answer, case):
    module, oracle = filled_model(answer, case, LLAMA, seed=200)
    logits_agree(case, module, oracle, probe_ids(5, 7, below=23))
    logits_agree(case, module, oracle, probe_ids(2, 9, below=23, seed=1))


@Transformer.requires(
    "each block is an object of its own, with starting values of its own",
    "How often does `Block(config)` run in your code?",
)
def _(answer, case):
    held, again = (dict(case.call(answer, LLAMA).named_parameters()) for _ in range(2))
    name = "blocks.{}.attention.w_q.weight".format
    alike = any(torch.equal(held[name(0)], held[name(i)]) for i in (1, 2))
    case.true(not alike, "The blocks start with the same values.")
    alike = torch.equal(held[name(0)], again[name(0)])
    case.true(not alike, "Two new models start with the same values.")


@Transformer.requires("tied: head and embedding are one parameter, counted once")
def _(answer, case):
    module = case.call(answer, TIED)
    if module.head.weight is not module.embedding.weight:
        raise Explained(
            "`head.weight` and `embedding.weight` are two parameters. Equal values would "
            "drift apart in training; two modules can hold one and the same parameter."
        )
    case.parameters(module, **keywords(module, model_shapes(TIED)))
    module, oracle = filled_model(answer, case, TIED, seed=300)
    logits_agree(case, module, oracle, probe_ids(2, 7, below=23, seed=2))


@Transformer.requires(
    'style "gpt2": learned positions on the embedding, LayerNorm, biases',
    "What is added to the embedding, and of which class is the last norm?",
)
def _(answer, case):
    for c in (GPT2, TIED_GPT2):
        module = case.call(answer, c)
        case.parameters(module, **keywords(module, model_shapes(c)))
        module, oracle = filled_model(answer, case, c, seed=400)
        logits_agree(case, module, oracle, probe_ids(5, 7, below=23, seed=3))


@Transformer.requires("max_len tokens work, one more is a ValueError that names both")
def _(answer, case):
    for c in (LLAMA, GPT2):
        module, oracle = filled_model(answer, case, c, seed=500)
        logits_agree(case, module, oracle, probe_ids(2, 11, below=23, seed=4))
        ids, reason = probe_ids(2, 12, below=23), "12 tokens where max_len is 11"
        case.raises(ValueError, module, ids, mentions=(12, 11), because=reason)


@Transformer.requires(
    "a new model is undecided: its matrices start with normal values of deviation 0.02",
    "Matrices are the parameters with more than one dimension, the embedding among them. "
    "The weights of the norms start at 1, biases at 0.",
)
def _(answer, case):
    small = Sizes(500, 64, 2, 4, 2, 16, 96, 32)
    for c in (small, replace(small, tied=False), replace(small, style="gpt2")):
        module = case.call(answer, c)
        held = dict(module.named_parameters())
        for name in sorted(held, key=lambda n: (n.startswith("blocks."), n)):
            values = held[name]
            if values.dim() == 1:
                start = float(not name.endswith("bias"))
                differs = f"`{name}` does not start at {start:g} everywhere."
                case.true(bool((values == start).all()), differs)
                continue
            written = name.endswith(("w_o.weight", "w_2.weight"))  # into the stream
            spread = values.std().item()
            case.note(f"{spread:.1g}")
            if not ((written or spread > 0.015) and spread < 0.025):
                starts = f"`{name}` starts with a standard deviation of {spread:.2g}"
                raise Explained(f"{starts}, expected 0.02.")
        far = (module.embedding.weight.abs() > 0.04).double().mean().item()
        case.true(
            0.02 < far < 0.08,
            f"Of the embedding's values {far:.1%} lie beyond two standard deviations; "
            "of normal ones 4.6% do.",
        )


@Transformer.requires(
    "float64, `eval()` and devices work too, and every parameter gets a gradient"
)
def _(answer, case):
    for c in (LLAMA, TIED, GPT2):
        module, oracle = filled_model(answer, case, c, seed=600)
        trained(case, module, probe_ids(3, c.max_len, below=23, seed=7))
        case.any_device(module, probe_ids(2, 5, below=23))
        logits_agree(case, module.double().eval(), oracle, probe_ids(2, 8, below=23))


# sample -------------------------------------------------------------------------------

DRAWS = 2_000
# Probabilities 0.4, 0.3, 0.2, 0.1 on four of six tokens, in an order of their own.
ODDS = torch.tensor([0.3, 1e-30, 0.1, 0.4, 1e-30, 0.2]).log()
ALL = (0, 2, 3, 5)


def quietly(case, answer, *args, **settings):
    """What is drawn, which is not recorded."""
    try:
        with case.unrecorded():
            return case.call(answer, *args, **settings)
    except Crashed as crash:
        case.note(raised(crash.error))
        raise


def drawn(case, answer, rows, n=DRAWS, **settings):
    """`n` times a token for each of the rows."""
    torch.manual_seed(1_000)
    rows = rows.repeat(n, 1)
    tokens = quietly(case, answer, rows, **settings)
    case.is_tensor(tokens)
    case.note((tuple(tokens.shape), str(tokens.dtype)))
    case.equal(tuple(tokens.shape), (len(rows),), "the shape of the result")
    case.equal(str(tokens.dtype), "torch.int64", "its dtype")
    return tokens


def follows(case, answer, logits, expected, what, **settings):
    """The tokens are drawn with the `expected` probabilities, to 5.5 deviations."""
    tokens = drawn(case, answer, logits, **settings)
    inside = bool((tokens >= 0).all()) and bool((tokens < len(expected)).all())
    case.true(inside, f"{what}: tokens came that are not in the vocabulary.")
    found = torch.bincount(tokens, minlength=len(expected)).double() / DRAWS
    case.note(description(found, logits))
    allowed = 5.5 * (expected * (1 - expected) / DRAWS).sqrt() + 1e-9
    came, wanted = (", ".join(f"{100 * p:.1f}" for p in y) for y in (found, expected))
    case.true(
        bool(((found - expected).abs() <= allowed).all()),
        f"{what}: tokens 0, 1 … came in {came} % of {DRAWS:,} draws, expected {wanted} %.",
    )


def cut(case, answer, *cuts):
    """What is left of `ODDS` under some settings, `(tokens, settings)` each."""
    for tokens, settings in cuts:
        expected = kept(*tokens, temperature=settings.get("temperature", 1.0))
        what = ", ".join(f"{name} {value}" for name, value in settings.items())
        follows(case, answer, ODDS, expected, f"With {what}", **settings)


def description(found, logits):
    """Which tokens came, and how much flatter than the softmax, in powers of two."""
    tokens = found.nonzero().flatten().tolist()
    known = found[tokens] > 0.02
    x, y = logits[tokens][known].double(), found[tokens][known].log()
    if len(x) < 2 or not x.std() > 0.1:
        return tuple(tokens)
    x, y = x - x.mean(), y - y.mean()
    slope = float((x * y).sum() / x.square().sum())
    return (*tokens, round(math.log2(slope)) if slope > 0.05 else "flat or reversed")


def kept(*tokens, temperature=1.0):
    """The probabilities of `ODDS` with only these tokens left."""
    allowed = torch.full_like(ODDS, -torch.inf)
    allowed[list(tokens)] = ODDS[list(tokens)]
    return torch.softmax(allowed.double() / temperature, -1)


@sample.requires(
    "temperature 0 takes the most likely token of every row",
    "Treat 0 before you divide by it.",
)
def _(answer, case):
    logits = probe(5, 7, scale=3.0)
    best = logits.argmax(-1)
    case.equal(case.call(answer, logits, temperature=0), best, "the result")
    case.equal(case.call(answer, logits, 0.0), best, "with 0.0, the result")
    low = -50 - logits[:1]
    found = case.call(answer, low, temperature=0.0, top_k=2, top_p=0.9)
    case.equal(found, low.argmax(-1), "the result")


@sample.requires(
    "tokens are drawn with the probabilities of the softmax of logits / temperature",
    "Count how often each token comes in many draws; `torch.multinomial` draws from "
    "probabilities. What happens to the difference of two logits at temperature 0.5?",
)
def _(answer, case):
    follows(case, answer, ODDS, kept(*ALL), "Without settings")
    follows(case, answer, ODDS + 40, kept(*ALL), "Larger logits", temperature=1.0)
    cut(case, answer, *((ALL, dict(temperature=heat)) for heat in (0.5, 2.0)))


@sample.requires(
    "top_k keeps the k most likely tokens and shares their probability among them",
    "What becomes of the others before the softmax, so that they get exactly 0?",
)
def _(answer, case):
    kept_by = {2: (3, 0), 3: (3, 0, 5), 1: (3,), 6: ALL}
    cut(case, answer, *((tokens, dict(top_k=k)) for k, tokens in kept_by.items()))


@sample.requires(
    "top_p keeps the most likely tokens up to the one that crosses it, which is kept",
    "Sort, add up, and look at the sum *before* each token: has it reached top_p "
    "already? With top_p = 1 none does. Then tokens must go back to their own numbers.",
)
def _(answer, case):
    kept_by = {0.95: ALL, 0.65: (3, 0), 0.5: (3, 0), 0.39: (3,), 1e-9: (3,)}
    kept_by |= {0.75: (3, 0, 5), 1.0: ALL}
    cut(case, answer, *((tokens, dict(top_p=p)) for p, tokens in kept_by.items()))
    two, odds = torch.tensor([0.0, math.log(3)]), torch.tensor([0.25, 0.75])
    follows(case, answer, two, odds, "Two tokens", top_p=1.0)
    alone = case.call(answer, torch.zeros(3, 1), top_p=1.0, top_k=1)
    case.equal(alone, torch.tensor([0, 0, 0]), "of a vocabulary of one, the result")
    tokens = drawn(case, answer, torch.zeros(300), top_p=1.0)
    case.true(len(tokens.unique()) > 285, "Some of 300 equal tokens never come.")


@sample.requires(
    "first the temperature, then top_k, then top_p on what is left",
    "At temperature 0.5 the odds 0.4, 0.3, 0.2, 0.1 become about 0.53, 0.30, 0.13, 0.03. "
    "And after top_k the probabilities that are left sum to 1 again.",
)
def _(answer, case):
    cut(
        case,
        answer,
        ((3, 0), dict(temperature=0.5, top_p=0.75)),
        ((3, 0, 5), dict(temperature=0.5, top_p=0.85)),
        ((3,), dict(top_k=2, top_p=0.56)),
        ((3, 0), dict(top_k=3, top_p=0.7)),
    )


@sample.requires(
    "each row is drawn by itself: a sure row keeps few tokens, an unsure one many",
    "Which dimension is the vocabulary? And is a threshold, or a number of tokens to "
    "keep, found for the batch as a whole?",
)
def _(answer, case):
    first = torch.tensor([3, 6, 0, 2, 5])
    rows = 50 - 100.0 * ((torch.arange(7) * 3 - first[:, None] * 3) % 7)
    case.equal(case.call(answer, rows), first, "the result")
    case.equal(case.call(answer, rows[1:2]), first[1:2], "of one row, the result")
    tokens = drawn(case, answer, torch.zeros(50))
    case.true(len(tokens.unique()) == 50, "All rows got the same few tokens.")
    sure = torch.tensor([0.02, 0.02, 0.9, 0.02, 0.02, 0.02]).log()
    for rows, settings, wanted in (
        ((sure, ODDS), dict(top_p=0.85), ({2}, {0, 3, 5})),
        ((ODDS, sure), dict(top_p=0.85), ({0, 3, 5}, {2})),
        ((ODDS + 9, ODDS - 9), dict(top_k=2), ({0, 3}, {0, 3})),
    ):
        tokens = drawn(case, answer, torch.stack(rows), 500, **settings)
        sets = tuple(set(tokens[i::2].tolist()) for i in range(2))
        case.note(tuple(map(tuple, map(sorted, sets))))
        for i in range(2):
            what = f"with {settings}, what came of row {i}"
            case.equal(sorted(sets[i]), sorted(wanted[i]), what)


@sample.requires(
    "a generator alone decides what is drawn; without one torch's own does",
    "Pass the generator on to what draws, and nothing else.",
)
def _(answer, case):
    def draw(**settings):
        return quietly(case, answer, torch.zeros(50, 9), **settings)

    same = "Two calls in a row gave the same tokens."
    for settings in ({}, dict(top_k=8, top_p=0.95)):
        generator = seeded(3)
        torch.manual_seed(1)
        first, second = (draw(generator=generator, **settings) for _ in range(2))
        after = torch.initial_seed(), torch.rand(1).item()
        torch.manual_seed(1)
        untouched = torch.initial_seed(), torch.rand(1).item()
        repeated = torch.equal(draw(generator=seeded(3), **settings), first)
        case.true(not torch.equal(first, second), same)
        case.true(repeated, "Two generators of one seed gave different tokens.")
        alone = after == untouched
        case.true(alone, "With a generator, torch's own state changed too.")
    case.true(not torch.equal(draw(), draw()), same)


@sample.requires(
    "huge logits, −inf, half precision and unordered memory do no harm",
    "exp overflows above 88 in float32, a small temperature divides float16 beyond its "
    "65,504: work in float32, and let torch.softmax subtract the maximum.",
)
def _(answer, case):
    huge = torch.tensor([[1e4, -1e4, 3.0], [-1e4, 3.0, 1e4]])
    best = torch.tensor([0, 2])
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        for settings in ({}, dict(temperature=1e-3), dict(top_p=0.9), dict(top_k=2)):
            tokens = case.call(answer, huge.to(kind), **settings)
            case.equal(tokens, best, f"in {kind} with {settings}, the result")
    hidden = ODDS.clone()
    hidden[3] = -torch.inf
    follows(case, answer, hidden, kept(0, 2, 5), "Token 3 at −inf")
    both = dict(top_p=0.7, top_k=3)
    follows(case, answer, hidden, kept(0, 5), "Token 3 at −inf", **both)
    follows(case, answer, ODDS.double(), kept(*ALL), "In float64")
    columns = probe(7, 5, seed=53).T
    tokens = case.call(answer, columns, top_k=1)
    case.equal(tokens, columns.argmax(-1), "of columns, the result")


@sample.requires("settings that make no sense are a ValueError that names the value")
def _(answer, case):
    # Steps of 100: what is drawn where nothing is refused is no matter of chance.
    logits = 100.0 * ((torch.arange(7) * 3 + torch.arange(3)[:, None]) % 7)
    wrong = [dict(temperature=value) for value in (-0.5, -1)]
    for cold in ({}, dict(temperature=0)):
        wrong += [dict(top_k=value, **cold) for value in (8, 0, -2)]
        wrong += [dict(top_p=value, **cold) for value in (0.0, -0.25, 1.5)]
    for settings in wrong:
        name, value = next(iter(settings.items()))
        because = f"{name} = {value} and 7 tokens"
        given = dict(settings, mentions=(value,), because=because)
        case.raises(ValueError, answer, logits, **given)


# generate -----------------------------------------------------------------------------


class Sums(nn.Module):
    """Stands for a model: what is likely next depends on every token and its place."""

    def __init__(self, max_len=50, scale=9.0, vocab_size=11):
        super().__init__()
        self.config = SimpleNamespace(max_len=max_len, vocab_size=vocab_size)
        self.scale = nn.Parameter(torch.tensor(scale))
        self.had_gradients = False

    def forward(self, ids):
        t, size = ids.shape[1], self.config.vocab_size
        if t > self.config.max_len:
            raise RuntimeError("the model was given more than max_len tokens")
        self.had_gradients |= torch.is_grad_enabled()
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


@generate.requires(
    "temperature 0: the prompt, then the most likely token at each step",
    "Do it by hand once: which row of the logits speaks of the next token, and what does "
    "the model read in the second step?",
)
def _(answer, case):
    for n in (1, 2, 6):
        actual = case.call(answer, Sums(), PROMPTS, n, temperature=0)
        case.equal(actual, continued(Sums(), PROMPTS, n), "the result")
    one = probe_ids(5, 1, below=11, seed=1)
    actual = case.call(answer, Sums(), one, n_tokens=7, temperature=0.0)
    case.equal(actual, continued(Sums(), one, 7), "from one token, the result")
    actual = case.call(answer, Sums(), PROMPTS, 0)
    case.equal(actual, PROMPTS, "with no tokens to add, the result")


@generate.requires(
    "past max_len the model sees the last max_len tokens",
    "The text grows, the window moves. Which end of the text must the model see?",
)
def _(answer, case):
    for longest in (4, 6):
        model = Sums(max_len=longest)
        actual = case.call(answer, model, PROMPTS, 9, temperature=0)
        case.equal(actual, continued(model, PROMPTS, 9), f"max_len {longest}: the text")


@generate.requires(
    "the settings of sample are passed on, each under its own name",
    "Pass them by name, or in the order that `sample` has.",
)
def _(answer, case):
    p = torch.softmax(Sums()(PROMPTS[:1])[0, -1].detach().double(), -1)
    order = p.argsort(descending=True).tolist()
    many = PROMPTS[:1].expand(1_000, -1)
    for settings, n in (
        (dict(top_k=3, temperature=9.0), 3),
        (dict(top_p=0.45, temperature=9.0), 4),
        (dict(temperature=1e-4), 1),
        (dict(temperature=9.0), 11),
    ):
        came = quietly(case, answer, Sums(), many, 1, **settings)[:, -1].unique()
        case.note(came)
        what = f"with {settings}, the tokens that came"
        case.equal(came.tolist(), sorted(order[:n]), what)
    drawn = quietly(case, answer, Sums(), many, 1)[:, -1]
    share, right = (drawn == order[0]).double().mean().item(), p.max().item()
    case.note(share == 1)
    case.true(
        abs(share - right) <= 5.5 * math.sqrt(right * (1 - right) / 1_000),
        f"Without settings the likeliest token came in {share:.1%} of 1,000 draws, "
        f"expected {right:.1%}: the temperature is 1 unless given.",
    )


@generate.requires("a generator alone decides what is drawn")
def _(answer, case):
    def text(seed, of_torch):
        torch.manual_seed(of_torch)
        given = Sums(scale=1.0), PROMPTS, 12
        return quietly(case, answer, *given, generator=seeded(seed))

    first, again, other = text(2, 0), text(2, 1), text(3, 1)
    repeated = torch.equal(first, again)
    case.true(repeated, "Two generators of one seed gave different texts.")
    case.true(not torch.equal(again, other), "Two seeds gave the same text.")
    few = len(first[:, 4:].unique()) <= 2
    case.true(not few, "The same token was drawn again and again.")


@generate.requires("an empty prompt, and one longer than max_len, are a ValueError")
def _(answer, case):
    empty = torch.empty(2, 0, dtype=torch.int64)
    case.raises(ValueError, answer, Sums(), empty, 3, because="an empty prompt")
    short, cold = Sums(max_len=3), dict(temperature=0)
    why = dict(mentions=(4, 3), because="a prompt of 4 tokens where max_len is 3")
    case.raises(ValueError, answer, short, PROMPTS, 2, **cold, **why)


@generate.requires(
    "no gradients are recorded, and nothing is created on another device",
    "Each step would keep everything that a backward pass needs. There is a decorator "
    "for functions that need none.",
)
def _(answer, case):
    model = Sums()
    case.call(answer, model, PROMPTS, 2, temperature=0)
    case.true(not model.had_gradients, "The model ran with gradients enabled.")
    case.any_device(answer, model, PROMPTS, 2, temperature=0)


# count_parameters ---------------------------------------------------------------------

SMOLLM = Sizes(49_152, 576, 30, 9, 3, 64, 1_536, 8_192, rope_base=100_000.0)
GPT2_SMALL = Sizes(50_257, 768, 12, 12, 12, 64, 3_072, 1_024, style="gpt2")
LLAMA_7B = Sizes(32_000, 4_096, 32, 32, 32, 128, 11_008, 4_096, tied=False)
LLAMA_3_8B = Sizes(128_256, 4_096, 32, 32, 8, 128, 14_336, 8_192, tied=False)

# No size is another one, or the ratio, sum or difference of others.
ODD = Sizes(1_009, 37, 5, 14, 2, 12, 101, 61, tied=False)
ODD_GPT2 = replace(ODD, d_head=13, style="gpt2")


def counts(case, truth, answer, c, **more):
    """The count is right, and a whole number."""
    found = case.call(answer, c, **more)
    if found != truth(c, **more):
        grows = growth(case, truth, answer, c, **more)
        raise Explained(f"It is {found:,}, expected {truth(c, **more):,}. {grows}")
    case.true(isinstance(found, int), "The count is no whole number: use no `/`.")


def growth(case, truth, answer, c, **more):
    """What each size adds when it is doubled, in the answer and in truth."""
    others = {n: (replace(c, **{n: 2 * getattr(c, n)}), more) for n in SIZES}
    others["n_kv_heads"] = (replace(c, n_kv_heads=c.n_heads), more)
    numbers = {name: n for name, n in more.items() if isinstance(n, int)}
    others |= {name: (c, more | {name: 2 * n}) for name, n in numbers.items()}
    right, wrong = [], []
    for name, (other, given) in others.items():
        expected = truth(other, **given) - truth(c, **more)
        with case.unrecorded():
            found = case.call(answer, other, **given) - case.call(answer, c, **more)
        if found == expected:
            right.append(f"`{name}`")
        else:
            adds = f"`{name}` adds {found:,}, expected {expected:,}"
            wrong.insert(0 if found == 0 else len(wrong), adds)
    text = f"Doubling a size adds what it should for {', '.join(right) or 'none'}"
    return f"{text}; {'; '.join(wrong[:3])}." if wrong else f"{text}."


def true_count(c):
    return sum(math.prod(shape) for shape in model_shapes(c).values())


for sentence, *configs in (
    (
        'style "llama": every block has its matrices and norms, and the model its own',
        *(ODD, replace(ODD, n_kv_heads=14, d_head=2)),
    ),
    ("a tied matrix counts once", replace(ODD, tied=True)),
    (
        'style "gpt2": biases, two numbers a norm, the table of positions, no gate',
        *(ODD_GPT2, replace(ODD_GPT2, n_kv_heads=14, max_len=99, tied=True)),
    ),
    (
        "the published counts of SmolLM2, GPT-2, Llama 2 7B and Llama 3 8B",
        *(SMOLLM, GPT2_SMALL, LLAMA_7B, LLAMA_3_8B),
    ),
):

    @count_parameters.requires(sentence)
    def _(answer, case, configs=configs):
        with torch.device("meta"):  # where building a model takes no memory
            for c in configs:
                counts(case, true_count, answer, c)


# forward_flops ------------------------------------------------------------------------


class Multiplications(TorchFunctionMode):
    """Counts those of the matrix products that run inside."""

    total = 0

    def __torch_function__(self, f, types, args=(), kwargs=None):
        result = f(*args, **kwargs or {})
        if f in (F.linear, torch.Tensor.matmul):
            self.total += result.numel() * args[0].shape[-1]
        return result


@cache
def true_cost(c, t):
    weights = {name: torch.zeros(size) for name, size in model_shapes(c).items()}
    with Multiplications() as count:
        slow_decoder(torch.zeros(1, t, dtype=torch.int64), weights, c)
    return 2 * count.total


for sentence, *configs in (
    (
        'style "llama": every matrix, and two products of T × T, count',
        *(ODD, replace(ODD, n_kv_heads=14, d_ff=9)),
    ),
    (
        "tied or not, the head multiplies; style gpt2 has no gate",
        *(replace(ODD, tied=True), ODD_GPT2),
    ),
):

    @forward_flops.requires(sentence)
    def _(answer, case, configs=configs):
        for c in configs:
            for t in (17, 1, 43):
                counts(case, true_cost, answer, c, t=t)


# parameter_name -----------------------------------------------------------------------


def renamed(case, answer, pairs):
    for name, place in pairs:
        case.equal(case.call(answer, name), place, f"for {name!r}, the name")


IN_BLOCK = (
    ("attn_q", "attention.w_q"),
    ("attn_k", "attention.w_k"),
    ("attn_v", "attention.w_v"),
    ("attn_output", "attention.w_o"),
    ("attn_norm", "norm_1"),
    ("ffn_norm", "norm_2"),
    ("ffn_gate", "feed_forward.w_1"),
    ("ffn_up", "feed_forward.w_3"),
    ("ffn_down", "feed_forward.w_2"),
)


@parameter_name.requires(
    "the nine tensors of a block, whichever its number",
    "Take the name apart at its dots: what is the number, what the part?",
)
def _(answer, case):
    for i in (3, 0, 12, 29):
        pairs = ((f"blk.{i}.{a}.weight", f"blocks.{i}.{b}.weight") for a, b in IN_BLOCK)
        renamed(case, answer, pairs)


@parameter_name.requires(
    "the three that stand in no block",
    "`output` is also a piece of `output_norm` and of `attn_output`: compare whole pieces "
    "of the name.",
)
def _(answer, case):
    outside = dict(token_embd="embedding", output_norm="norm", output="head")
    pairs = ((f"{a}.weight", f"{b}.weight") for a, b in outside.items())
    renamed(case, answer, pairs)


# The parts of lessons 02 to 08 together ------------------------------------------------

whole_decoder = IntegrationCheck(
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


@whole_decoder.requires(
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


@whole_decoder.requires(
    "pre_norm and RMSNorm around SwiGLU, FeedForward with gelu, and LearnedPositions",
    "Compare pre_norm(x, feed_forward, norm_2) with the two lines written out.",
)
def _(parts, case):
    norm = case.call(parts["RMSNorm"], 10, 1e-2)
    for c, network in (
        (LLAMA, case.call(parts["SwiGLU"], 10, 14)),
        (GPT2, case.call(parts["FeedForward"], 10, 14, parts["gelu"])),
    ):
        p = weights_for(block_shapes(c), 910)
        for layer in (network.w_1, network.w_2) if c is GPT2 else ():
            layer.bias = nn.Parameter(torch.zeros(layer.out_features))
        load_all(case, network, own_weights(p, "feed_forward"))
        case.load(norm, weight=p["norm_2"])
        x, p = probe(3, 7, 10, seed=911, scale=0.3), doubled(p)
        actual, wide = case.call(parts["pre_norm"], x, network, norm), x.double()
        expected = wide + thought(normed(wide, p, "norm_2", LLAMA), p, c)
        case.close(actual, expected, f"half a block, style {c.style}", like=x)
    table = probe(11, 10)
    positions = case.load(case.call(parts["LearnedPositions"], 11, 10), table=table)
    actual = case.call(positions, torch.arange(7))
    case.close(actual, table[:7], "the first seven positions")


@whole_decoder.requires(
    "Block, Transformer and sample do with these parts what they should, and generate "
    "continues a text",
    "Attention and the networks fit together, and your block or model differs from them. "
    "Has one of the parts been edited since? Run the check cells again.",
)
def _(parts, case):
    for sizes in (LLAMA, GPT2, TIED_GPT2):
        c = case.call(parts["TransformerConfig"], *fields_of(sizes).values())
        p = weights_for(model_shapes(c), 940)
        block = load_all(case, case.call(parts["Block"], c), own_weights(p, "blocks.0"))
        x, mask = probe(3, 7, 10, seed=931), case.call(parts["causal_mask"], 7)
        inner = own_weights(doubled(p), "blocks.0")
        expected = one_block(x.double(), causal(7), p=inner, c=c)
        actual = case.call(block, x, mask)
        case.close(actual, expected, f"a block, style {c.style}", like=x)
        model = load_all(case, case.call(parts["Transformer"], c), p)
        oracle = partial(slow_decoder, p=doubled(p), c=c)
        oracle.config = c
        ids = probe_ids(3, 4, below=23, seed=941)
        logits = oracle(ids)
        case.close(case.call(model, ids), logits, f"logits, style {c.style}")
        text = continued(oracle, ids, 9)
        actual = case.call(parts["generate"], model, ids, 9, temperature=0)
        case.equal(actual, text, "nine more tokens, past max_len: the text")
        actual = case.call(parts["sample"], logits[:, -1], temperature=0)
        case.equal(actual, text[:, 4], "the next token")
