"""Lesson 10: the cache, what a query may see of it, and generation through it."""

import gc
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import product
from types import FunctionType, ModuleType

import torch
import torch.nn.functional as F
from torch import nn

from utils.check.errors import Explained
from utils.check.exercise import Exercise, IntegrationCheck
from utils.exercises.forward_pass import (
    ANGLES,
    GPT2,
    GPT2_SMALL,
    LLAMA,
    LLAMA_3_8B,
    LLAMA_7B,
    SMOLLM,
    block_shapes,
    continued,
    counts,
    model_shapes,
    own_weights,
    seeded,
    slow_decoder,
    weights_for,
)
from utils.probe import probe, probe_ids, strided

KVCache = Exercise("KVCache", lesson="kv_cache")
chunk_mask = Exercise("chunk_mask", lesson="kv_cache")
cached_forward = Exercise("cached_forward", lesson="kv_cache")
generate_cached = Exercise("generate_cached", lesson="kv_cache")
kv_cache_bytes = Exercise("kv_cache_bytes", lesson="kv_cache")
RollingKVCache = Exercise("RollingKVCache", lesson="kv_cache")

# Either cache: made, appended to, and compared ----------------------------------------


def chunk(t, seed=0, batch=2, heads=3, d_head=5, device="cpu", dtype=torch.float32):
    """Keys and values of `t` positions."""
    size = (batch, heads, t, d_head)
    k, v = (probe(*size, seed=s, dtype=dtype) for s in (seed, seed + 50))
    return k.to(device), v.to(device)


@dataclass
class Caches:
    """An answer's, for 2 rows and 3 heads of width 5; `positions`: max_len, or window."""

    answer: object
    case: object
    forgets: bool = False
    positions: int = 9

    def new(self, n_layers=1, **kind):
        return self.case.call(self.answer, n_layers, 2, 3, self.positions, 5, **kind)

    def append(self, cache, layer, chunks, when=""):
        """The last of `chunks`, which must come back behind what it may look at."""
        expected = [torch.cat(each, 2) for each in zip(*chunks, strict=True)]
        if self.forgets:
            seen = self.positions - 1 + chunks[-1][0].shape[2]
            expected = [x[:, :, -seen:] for x in expected]
        with self.case.unrecorded():  # free memory holds anything
            returned = self.case.call(cache.append, layer, *chunks[-1])
        self.case.is_tuple(returned, 2, "what `append` returns")
        for x, right, name in zip(returned, expected, ("keys", "values"), strict=True):
            what = f"what `append` returns as {name}"
            self.case.is_tensor(x, what)
            self.case.note(x if x.shape == right.shape else tuple(x.shape))
            self.case.equal(x, right, f"{when}{what}")

    def fill(self, sizes, n_layers=1):
        """Append chunks of these sizes to each layer; `length` must count them."""
        cache, chunks = self.new(n_layers), [[] for _ in range(n_layers)]
        for step, size in enumerate(sizes):
            after = f"chunks {sizes[: step + 1]}, room for {self.positions}"
            for layer, held in enumerate(chunks):
                held.append(chunk(size, seed=10 * step + layer))
                self.append(cache, layer, held, f"{after}, layer {layer}: ")
            self.length_is(cache, sum(sizes[: step + 1]), after)

    def length_is(self, cache, expected, when):
        called = self.case.called
        found = self.case.call(lambda: cache.length)
        self.case.called = called  # the call that should have moved it
        if type(found) is not int:
            raise Explained(
                f"`length` is of type {type(found).__name__}. It is read as it stands, "
                "without brackets, and is an int: make it a property or an attribute."
            )
        self.case.equal(found, expected, f"{when}: `length`")

    def refuses(self, cache, given, mentions, because, layer=0):
        """A ValueError, and `length` stays where it is."""
        stored, kind = cache.length, {"mentions": mentions, "because": because}
        self.case.raises(ValueError, cache.append, layer, *given, **kind)
        self.length_is(cache, stored, f"after a refusal ({because})")


def required(sentence, hint=""):
    """Decorates `test(caches, case)`, a requirement of both caches."""

    def add(test):
        for exercise, positions in ((KVCache, 9), (RollingKVCache, 4)):
            forgets = exercise is RollingKVCache

            @exercise.requires(sentence, hint)
            def _(answer, case, forgets=forgets, positions=positions):
                test(Caches(answer, case, forgets, positions), case)

    return add


def bare(value):
    return str(value).removeprefix("torch.")


def whole_numbers_refused(case, f, *args):
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.int32):
        kind = {"mentions": [bare(dtype)], "because": f"dtype {bare(dtype)}"}
        case.raises(ValueError, f, *args, dtype=dtype, **kind)


def bytes_held(cache):
    """By all tensors that it keeps alive, each storage once."""
    storages, seen, left = {}, set(), [cache]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif not isinstance(value, (type, FunctionType, ModuleType)):
            left += gc.get_referents(value) if id(value) not in seen else ()
            seen.add(id(value))
    return sum(storages.values())


# The caches ---------------------------------------------------------------------------


@required(
    "keys and values that are appended come back, what comes next behind them; length "
    "counts positions, and another cache knows nothing of them",
    "Where does each of several chunks begin and end? And what is assigned in the body "
    "of the class belongs to all its objects.",
)
def _(caches, case):
    for sizes in ((4,), (1, 1, 2), (1, 3), (2, 1, 1)):
        caches.fill(sizes)
    one, other, chunks = caches.new(), caches.new(), [chunk(2), chunk(1, seed=1)]
    caches.append(one, 0, chunks[:1])
    caches.length_is(other, 0, "a second cache, new")
    caches.append(other, 0, [chunk(3, seed=2)], "in a second cache: ")
    caches.append(one, 0, chunks, "in the first of two caches: ")


@RollingKVCache.requires(
    "each new position takes the place of the oldest, and they come back oldest first",
    "After 6 positions in a window of 4: which are left, and at which place does your "
    "memory hold each of them?",
)
def _(answer, case):
    for window, n in ((4, 11), (3, 7), (1, 4)):
        Caches(answer, case, True, window).fill((1,) * n)


@RollingKVCache.requires(
    "a chunk gets what its first query may see, window − 1 positions from before, then "
    "all of its own, however long; its last positions are kept",
    "What is overwritten too early if you store before you look?",
)
def _(answer, case):
    for window, sizes in (
        (4, (3, 2, 1, 3, 1)),
        (4, (9, 1, 1, 2)),
        (3, (1, 6, 7, 1)),
        (5, (2, 4, 2, 1, 1)),
        (4, (4, 1, 8, 1, 4, 4, 1)),
        (1, (2, 1, 3)),
    ):
        Caches(answer, case, True, window).fill(sizes)


@required(
    "every layer has memory of its own; length moves once all have written, and reset "
    "starts again at position 0",
    "A pass appends once for each layer. Which of these calls may move `length`?",
)
def _(caches, case):
    caches.fill((2, 1, 3, 1), n_layers=3)
    cache, lengths = caches.new(n_layers=3), []
    for size in (2, 1, 3):
        for layer in range(3):
            with case.unrecorded():
                case.call(cache.append, layer, *chunk(size))
            lengths.append(cache.length)
    case.note(tuple(lengths))
    what = "`length` after each call, chunks of 2, 1 and 3, three layers,"
    case.equal(lengths, [0, 0, 2, 2, 2, 3, 3, 3, 6], what)
    for text, size in enumerate((6, 3, 9)):
        case.call(cache.reset)
        caches.length_is(cache, 0, "after reset")
        for layer in range(3):
            when = f"text {text}, layer {layer}: "
            caches.append(cache, layer, [chunk(size, seed=20 * text + layer)], when)


@KVCache.requires(
    "append copies nothing that was there: it returns views of memory taken once",
    "What does a slice of a tensor make, a copy or a view?",
)
def _(answer, case):
    cache, returned = Caches(answer, case, False, 30).new(), []
    for sizes in ((1, 4, 20), (3, 5)):
        returned += [case.call(cache.append, 0, *chunk(size)) for size in sizes]
        places = {(k.data_ptr(), v.data_ptr()) for k, v in returned}
        moved = "What `append` returned lies at another place in memory than before."
        case.true(len(places) == 1, moved)
        case.call(cache.reset)


@required("it holds memory for max_len, or window, positions, however long the text")
def _(caches, case):
    for size, positions in ((5, 8), (30, 8), (1, 1)) if caches.forgets else ((2, 30),):
        caches.positions = positions
        cache, needed = caches.new(2), 2 * 2 * 2 * 3 * positions * 5 * 4
        for step, layer in product(range(12), range(2)):
            case.call(cache.append, layer, *chunk(size, seed=step))
        case.true(
            bytes_held(cache) <= needed + 256,
            f"After {12 * size} positions, {size} at a time, it holds "
            f"{bytes_held(cache):,} bytes; room for {positions} takes {needed:,}.",
        )


@KVCache.requires(
    "max_len positions fit; one more is a ValueError that names both numbers, and so "
    "is a layer that is not the cache's; nothing is stored then",
)
def _(answer, case):
    caches, chunks = Caches(answer, case), []
    cache, layered = caches.new(), caches.new(n_layers=3)
    for size in (7, 2):
        chunks.append(chunk(size, seed=size))
        caches.append(cache, 0, chunks)
        for total in (10, 13):
            because, new = f"{total} positions, max_len 9", chunk(total - cache.length)
            caches.refuses(cache, new, (total, 9), because)
    for layer in (3, -1):
        caches.refuses(layered, chunk(2), (layer,), f"layer {layer} of 3", layer)
    whole_numbers_refused(case, answer, 1, 2, 3, 9, 5)


@required(
    "a shape, dtype or device that is not the cache's is a ValueError that says so, and "
    "nothing is stored; so is a size below 1 when it is built",
)
def _(caches, case):
    f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
    for what, stored, *others in (
        ("batch", 2, 1, 7),
        ("heads", 3, 1, 6),
        ("d_head", 5, 1, 4, 8),
        ("dtype", f32, f64, f16),
        ("dtype", bf16, f32, f16),
        ("dtype", f16, bf16),
        ("dtype", f64, f32),
        ("device", "cpu", "meta"),
    ):
        kind = {"dtype": stored} if what == "dtype" else {}
        cache, chunks, fits = caches.new(**kind), [chunk(1, **kind)], chunk(2, **kind)
        caches.append(cache, 0, chunks)
        for other in others:
            names, wrong = (bare(other), bare(stored)), chunk(2, **kind | {what: other})
            because = f"{what} {names[0]} where the cache has {names[1]}"
            caches.refuses(cache, wrong, names, f"keys and values, {because}")
            caches.refuses(cache, (fits[0], wrong[1]), names, f"values, {because}")
            caches.refuses(cache, (wrong[0], fits[1]), names, f"keys, {because}")
        more = [*chunks, chunk(2, seed=7, **kind)]
        caches.append(cache, 0, more, f"after refusals of another {what}: ")
    caches.refuses(caches.new(), (chunk(4)[0], chunk(1)[1]), (), "4 keys with 1 value")
    for i, size in product(range(5), (0, -7)):
        sizes = [4, 2, 3, 9, 5]
        sizes[i], because = size, f"a size of {size} (argument {i + 1})"
        named = {"mentions": (size,), "because": because}
        case.raises(ValueError, caches.answer, *sizes, **named)


@required(
    "it stores in the dtype and on the device it was built with, in torch's default "
    "dtype if none is given; keys may be strided",
)
def _(caches, case):
    caches.append(caches.new(), 0, [tuple(strided(x) for x in chunk(3))])
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        chunks = [chunk(2, dtype=dtype), chunk(3, seed=1, dtype=dtype)]
        cache = caches.new(dtype=dtype)
        caches.append(cache, 0, chunks[:1])
        caches.append(cache, 0, chunks)
        torch.set_default_dtype(dtype)
        for kind in ({}, {"dtype": None}):
            caches.append(caches.new(**kind), 0, chunks[:1])
    torch.set_default_dtype(torch.float32)
    cache, new = caches.new(device="meta"), chunk(2, device="meta")
    case.true(
        all(x.is_meta for x in case.call_in_place(cache.append, 0, *new)),
        "The cache was built with a `device`, and what it returns is on another.",
    )


# The mask -----------------------------------------------------------------------------


def mask_agrees(case, answer, t_q, t_k, **padding):
    right = [
        [[[pad <= j <= i + t_k - t_q for j in range(t_k)] for i in range(t_q)]]
        for pad in padding.get("padding", torch.tensor([0])).tolist()
    ]
    actual = case.call(answer, t_q, t_k, **padding)
    case.equal(actual, torch.tensor(right), f"for t_q {t_q} and t_k {t_k} the mask")


@chunk_mask.requires(
    "a first chunk: every query sees itself and what came before, (1, 1, t_q, t_k)",
)
def _(answer, case):
    for t in (4, 1, 6):
        mask_agrees(case, answer, t, t)


@chunk_mask.requires(
    "behind a prefix the queries are the last of the keys' positions",
    "Which corner of the matrix must the diagonal end in?",
)
def _(answer, case):
    for sizes in ((2, 5), (3, 4), (1, 7), (2, 300)):
        mask_agrees(case, answer, *sizes)


@chunk_mask.requires(
    "nobody sees the padding at the start of a row, and each row has its own; a padding "
    "token itself may look at nothing",
    "Compare the keys' columns with `padding[:, None]`.",
)
def _(answer, case):
    for sizes, padding in (
        ((4, 4), [0, 2, 1]),
        ((3, 8), [1, 3, 5, 0]),
        ((1, 5), [2, 0, 4]),
        ((2, 6), [0, 0, 0]),
        ((3, 4), [4, 0, 2]),
    ):
        mask_agrees(case, answer, *sizes, padding=torch.tensor(padding))


@chunk_mask.requires(
    "sizes of any kind, and padding in any dtype of whole numbers, on any device; more "
    "queries than keys are a ValueError that names both",
)
def _(answer, case):
    mask_agrees(case, answer, 1, 5_000)
    for dtype in (torch.int32, torch.int8, torch.uint8):
        padding = torch.tensor([0, 90], dtype=dtype)
        mask_agrees(case, answer, 3, 300, padding=padding)
    named = {"mentions": (13, 8), "because": "13 queries with 8 keys"}
    for padding in (None, torch.tensor([1, 0])):
        case.raises(ValueError, answer, 13, 8, padding, **named)
    case.any_device(answer, 3, 5, torch.tensor([1, 2]))


# A decoder to run through a cache, and a cache to run it through ----------------------


class Positions(nn.Module):
    def forward(self, positions):
        if not positions.is_meta and positions.min() < 0:
            raise ValueError(f"position {positions.min().item()} is below 0")
        return self.table(positions)


class FeedForward(nn.Module):
    def forward(self, x):
        up = self.w_1(x)
        hidden = F.silu(up) * self.w_3(x) if hasattr(self, "w_3") else F.gelu(up)
        return self.w_2(hidden)


HOLDERS = {"blocks": nn.ModuleList, "positions": Positions, "feed_forward": FeedForward}


class Decoder(nn.Module):
    """Layers under the course's names; only the oracle knows how they are connected.

    scale: of the logits; a large one makes it sure of what comes next.
    read: how many tokens of each row it has embedded, pass by pass.
    """

    def __init__(self, c, seed, scale=1):
        super().__init__()
        self.config, self.read = c, []
        weights = weights_for(model_shapes(c), seed)
        for name, weight in weights.items():
            *path, last = name.split(".")
            if last == "bias":
                continue
            owner, bias = self, f"{name}.bias" in weights
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, HOLDERS.get(step, nn.Module)())
                owner = getattr(owner, step)
            if last in ("embedding", "table"):
                layer = nn.Embedding(*weight.shape)
            elif weight.dim() == 2:
                layer = nn.Linear(*reversed(weight.shape), bias)
            else:
                layer = (nn.LayerNorm if bias else nn.RMSNorm)(len(weight), c.norm_eps)
            owner.add_module(last, layer)
        held = dict(self.named_parameters())
        for name, value in weights.items():
            held[name if name in held else f"{name}.weight"].data.copy_(value)
        self.head.weight.data.mul_(scale)
        self.embedding.register_forward_pre_hook(
            lambda _, given: self.read.append(given[0].shape[-1])
        )

    def weights(self):
        """Those of the oracle, in float64."""
        held = self.named_parameters()
        return {n.removesuffix(".weight"): p.detach().double() for n, p in held}

    def forward(self, ids):
        return slow_decoder(ids, self.weights(), self.config).to(self.head.weight)


class SlowCache:
    """All that was appended, side by side, behind `length` positions that are gone."""

    def __init__(self, c, batch, max_len=16, length=0, dtype=None):
        self.kind = (batch, c.n_kv_heads, c.d_head, dtype or torch.float32)
        self.max_len, self.lengths, self.pairs = max_len, [length] * c.n_layers, {}

    @property
    def length(self):
        return min(self.lengths)

    def __repr__(self):
        return "a cache"

    def append(self, layer, k, v):
        for x in (k, v):
            kind = (*x.shape[:2], *x.shape[3:], x.dtype)
            if kind != self.kind or x.shape != k.shape:
                raise ValueError(f"{x.dtype} of shape {x.shape}, not {self.kind}")
        stop = self.lengths[layer] + k.shape[2]
        if stop > self.max_len:
            raise ValueError(f"{stop} positions are more than {self.max_len}")
        old = self.pairs.get(layer, (k[:, :, :0], v[:, :, :0]))
        pairs = zip(old, (k, v), strict=True)
        self.pairs[layer] = tuple(torch.cat(two, 2) for two in pairs)
        self.lengths[layer] = stop
        return self.pairs[layer]


LONG, LONG_GPT2 = replace(LLAMA, max_len=16), replace(GPT2, max_len=16)
ONE_BLOCK, ONE_GPT2 = (replace(c, n_layers=1) for c in (LONG, LONG_GPT2))
TWO_BLOCKS, TWO_GPT2 = (replace(c, n_layers=2) for c in (LONG, LONG_GPT2))
PROMPTS = probe_ids(3, 4, below=23, seed=60)


# The forward pass through a cache -----------------------------------------------------


def chunks_agree(case, answer, model, sizes, batch=2, cache=None, pads=(), truth=None):
    """Feed texts in chunks; the logits of all tokens but padding must be right.

    truth: the logits of whole texts, where they are not those of the model.
    """
    like = model.head.weight
    ids = probe_ids(batch, sum(sizes), below=23, seed=sum(sizes))
    cache = cache or SlowCache(model.config, batch, dtype=like.dtype)
    padding = (torch.tensor(pads),) if pads else ()
    rows = zip(ids.split(1), pads or [0] * batch, strict=True)
    alone = [
        F.pad((truth or model)(row[:, pad:]), (0, 0, pad, 0), value=torch.nan)
        for row, pad in rows
    ]
    expected = torch.cat(alone).split(sizes, 1)
    for i, new in enumerate(ids.split(sizes, 1)):
        right, padded = expected[i].nan_to_num(0), expected[i].isnan()

        @wraps(answer)
        def without_padding(*given, padded=padded):
            logits = answer(*given)  # at padding they say nothing
            fits = getattr(logits, "shape", None) == padded.shape
            return torch.where(padded, 0, logits) if fits else logits

        stop = cache.length + sizes[i]
        actual = case.call(without_padding, model, new, cache, *padding)
        after = f"chunks {list(sizes[: i + 1])}"
        what = f"{after}: the result for the last"
        tolerance = {
            torch.float64: ANGLES,
            # What rounding to bfloat16 changes is far less than what a wrong position does.
            torch.bfloat16: 0.1 * right.abs().max().item(),
        }.get(like.dtype)
        case.close(actual, right, what, like=like, tolerance=tolerance)
        case.note(cache.length)
        case.equal(cache.length, stop, f"after {after} the `length` of the cache")


@cached_forward.requires(
    "one token, one block, an empty cache: the same logits as without",
    "Go through `Block.forward` and `MultiHeadAttention.forward` line by line. What has "
    "to be put between the keys and the scores?",
)
def _(answer, case):
    chunks_agree(case, answer, Decoder(ONE_BLOCK, 1000), (1,))


@cached_forward.requires(
    "a whole prompt at once: nobody sees the future",
    "A prompt is a chunk, and its tokens must not look ahead, cache or not. One block "
    "and the last token alone would not show it.",
)
def _(answer, case):
    chunks_agree(case, answer, Decoder(LONG, 1100), (7,))


@cached_forward.requires(
    "token by token: each is at its own position, and sees all before it",
    "The next token's position is how many are in the cache. When do you ask for it: "
    "before the first layer appends, or after?",
)
def _(answer, case):
    chunks_agree(case, answer, Decoder(ONE_BLOCK, 1200), (1, 1, 1, 1), batch=3)
    chunks_agree(case, answer, Decoder(LONG, 1210), (1,) * 6)


@cached_forward.requires(
    "a prompt, then token by token, as in generation; chunks of any length",
    "What is different in the second step of generation from the first? T queries, and "
    "more keys than that: which of the keys may each query see?",
)
def _(answer, case):
    chunks_agree(case, answer, Decoder(LONG, 1300), (4, 1, 1, 1))
    chunks_agree(case, answer, Decoder(LONG, 1400), (2, 3, 1, 4), batch=3)
    chunks_agree(case, answer, Decoder(replace(LONG, n_kv_heads=6), 1410), (3, 4))
    other = replace(LONG, n_kv_heads=1, d_head=6, rope_base=50.0)
    chunks_agree(case, answer, Decoder(other, 1420).double(), (3, 4))


@cached_forward.requires(
    'style "gpt2": learned positions and biases',
    "Where do learned positions enter? And call the layers, so that biases come along.",
)
def _(answer, case):
    for i, sizes in enumerate(((6,), (1, 1, 1, 1), (4, 1, 1), (2, 3, 1))):
        chunks_agree(case, answer, Decoder(LONG_GPT2, 1500 + 10 * i), sizes, batch=3)


@cached_forward.requires(
    "padding on the left: each row gives what it would give alone",
    "Rows begin at different columns. Which position has a row's first real token, and "
    "which columns may nobody in this row see, in every step?",
)
def _(answer, case):
    for i, (c, sizes, pads) in enumerate(
        (
            (ONE_BLOCK, (5,), [2, 0, 3]),
            (TWO_BLOCKS, (6, 1, 1), [2, 0, 4]),
            (TWO_GPT2, (5, 1, 1), [3, 0, 1]),
            (TWO_GPT2, (2, 3, 1), [1, 0, 3]),
        )
    ):
        chunks_agree(case, answer, Decoder(c, 1700 + i), sizes, 3, pads=pads)


@cached_forward.requires(
    "far into a text positions are exact, in every dtype, and the keys are those that "
    "append returned, which may be fewer than `length`",
    "All that a call knows of the text so far is in its cache. And bfloat16 has 8 "
    "binary digits: it counts to 256.",
)
def _(answer, case):
    for fields in (ONE_BLOCK, ONE_GPT2):
        c = replace(fields, max_len=5_000, rope_base=9.0)
        for dtype in (torch.float32, torch.bfloat16):
            model = Decoder(c, 1670).to(dtype)
            weights = model.weights()
            if c.style == "gpt2":
                weights["positions.table"] = weights["positions.table"][4_100:]
            cache = SlowCache(c, 2, 5_000, length=4_100, dtype=dtype)
            truth = partial(slow_decoder, p=weights, c=c)
            chunks_agree(case, answer, model, (5, 1, 2), cache=cache, truth=truth)


@cached_forward.requires(
    "more than max_len tokens, and a full cache, are a ValueError that names both "
    "numbers",
    "Who refuses when the cache is longer than what the model was made for?",
)
def _(answer, case):
    for c in (ONE_BLOCK, ONE_GPT2):
        model, ids = Decoder(c, 1800), probe_ids(2, 9, below=23)
        long, full = SlowCache(c, 2, 30), SlowCache(c, 2, 8)
        chunks_agree(case, answer, model, (9, 7), cache=long)
        for cache, new, numbers, because in (
            (long, 1, (17, 16), "16 tokens and a new one where max_len is 16"),
            (full, 9, (9, 8), "9 tokens where the cache has room for 8"),
        ):
            named = {"mentions": numbers, "because": because}
            case.raises(ValueError, answer, model, ids[:, :new], cache, **named)
        case.true(
            long.lengths + full.lengths == [16, 0],
            "A call that is refused has stored tokens in the cache all the same.",
        )


# Generation ---------------------------------------------------------------------------

SURE = 10_000  # of such a scale of the logits every wrong setting gives other tokens
HOT = 1_000_000  # at this temperature all tokens are drawn nearly equally often
DRAWS = 2_000
START = PROMPTS[:1, :1]


@generate_cached.requires(
    "temperature 0: the prompt, then the most likely token at each step, and every token "
    "is read once: the prompt in one pass, the last token never",
    "The first pass reads the prompt, each pass after it only the newest token. Whose "
    "logits give the next one?",
)
def _(answer, case):
    for fields in (LONG, LONG_GPT2):
        model = Decoder(replace(fields, max_len=64), 3000, SURE)
        for ids, n in ((PROMPTS, 5), (PROMPTS, 2), (probe_ids(5, 1, below=23), 4)):
            model.read.clear()
            actual = case.call(answer, model, ids, n_tokens=n, temperature=0)
            case.equal(actual, continued(model, ids, n), f"{n} more: the text")
            case.note(str(model.read))
            case.true(
                model.read == [ids.shape[1]] + [1] * (n - 1),
                f"For {n} new tokens the passes read {model.read} tokens of each row.",
            )


@generate_cached.requires(
    "the next call starts anew, with another prompt, batch or dtype; 0 tokens give back "
    "the prompt",
    "Whose cache is it? One that outlives the call has to be reset.",
)
def _(answer, case):
    for dtype in (torch.float32, torch.float64):
        model = Decoder(TWO_BLOCKS, 3200, SURE).to(dtype)
        for batch, size, n in ((3, 4, 3), (3, 2, 5), (2, 6, 2), (1, 3, 0)):
            ids = probe_ids(batch, size, below=23, seed=70 + size)
            right = continued(model, ids, n)
            case.equal(case.call(answer, model, ids, n, 0), right, "the text")


def drawn(case, answer, model, ids, n, *settings, **named):
    """The text; what is drawn is not recorded, where it would mislead."""
    with case.unrecorded():
        text = case.call_in_place(answer, model, ids, n, *settings, **named)
    case.is_tensor(text)
    case.equal(tuple(text.shape), (len(ids), ids.shape[1] + n), "the text's shape")
    case.equal(text[:, : ids.shape[1]], ids, "the prompt in the text")
    return text


def come_as_often(case, answer, model, left, *settings, **named):
    """The `left` likeliest tokens come as often as they should after `START`."""
    text = drawn(case, answer, model, START.expand(DRAWS, -1), 1, *settings, **named)
    found = torch.bincount(text[:, -1], minlength=23).double() / DRAWS
    temperature = (*settings, named.get("temperature", 1.0))[0]
    best = slow_decoder(START, model.weights(), model.config)[0, -1].topk(left)
    chances = torch.softmax(best.values / temperature, -1)
    wanted = torch.zeros_like(found).scatter(0, best.indices, chances)
    came = tuple(found.nonzero().flatten().tolist())
    case.note(came if temperature == HOT or len(came) == 1 else "chance")
    over = (found - wanted).abs() - 5.5 * (wanted * (1 - wanted) / DRAWS).sqrt()
    token = over.argmax().item()
    case.true(
        over[token] <= 0,
        f"Token {token} came in {found[token]:.1%} of {DRAWS:,} draws, expected "
        f"{wanted[token]:.1%}.",
    )


@generate_cached.requires(
    "the settings of sample are passed on, by name or in its order; temperature is 1 and "
    "all others None by default, and a generator alone decides what is drawn",
)
def _(answer, case):
    sure, less_sure = Decoder(ONE_BLOCK, 3300, SURE), Decoder(ONE_BLOCK, 3300)
    for model, left, settings in (
        (less_sure, 23, {}),
        (less_sure, 2, {"top_k": 2}),
        (sure, 23, {"temperature": HOT}),
        (less_sure, 23, {"temperature": 0.5}),
        (sure, 4, {"temperature": HOT, "top_k": 4}),
        (sure, 7, {"temperature": HOT, "top_p": 0.3}),
        (sure, 4, {"temperature": HOT, "top_k": 5, "top_p": 0.7}),
    ):
        come_as_often(case, answer, model, left, **settings)
    for left, settings in ((1, (1,)), (7, (None, 0.3)), (4, (4, None, seeded(4)))):
        come_as_often(case, answer, sure, left, HOT, *settings)
    text = partial(drawn, case, answer, less_sure, START.expand(DRAWS, -1), 1)
    for kind in ({}, {"generator": seeded(6)}):
        case.true(
            not torch.equal(text(**kind), text(**kind)),
            "Two calls in a row drew the same text: something sets the seed in each.",
        )
    seeds = text(generator=seeded(4)), text(generator=seeded(4))
    case.true(torch.equal(*seeds), "Two generators with one seed drew two texts.")
    case.true(
        torch.equal(seeds[0], text(1.0, None, None, seeded(4))),
        "By default it draws other tokens than with temperature 1 and None for the rest.",
    )


@generate_cached.requires("padding on the left: each row goes on as it would alone")
def _(answer, case):
    ids, pads = probe_ids(3, 6, below=23, seed=62), [2, 0, 4]
    for c in (TWO_BLOCKS, TWO_GPT2):
        model = Decoder(c, 3500, SURE)
        named = {"temperature": 0, "padding": torch.tensor(pads)}
        actual = case.call(answer, model, ids, 5, **named)
        rows = zip(ids.split(1), pads, strict=True)
        alone = [
            torch.cat([row[:, :pad], continued(model, row[:, pad:], 5)], 1)
            for row, pad in rows
        ]
        case.equal(actual, torch.cat(alone), f"padding {pads}: the text")


@generate_cached.requires(
    "an empty prompt is a ValueError; so is a text that would be longer than max_len, "
    "which names both numbers",
)
def _(answer, case):
    model = Decoder(ONE_BLOCK, 3600, SURE)
    empty = torch.empty(2, 0, dtype=torch.int64)
    case.raises(ValueError, answer, model, empty, 3, because="an empty prompt")
    for size, n in ((17, 1), (4, 14), (4, 13), (16, 1)):
        because = f"{size} tokens in the prompt, {n} to add, where max_len is 16"
        named = {"mentions": (size + n, 16), "because": because}
        ids = probe_ids(2, size, below=23, seed=63)
        case.raises(ValueError, answer, model, ids, n, 0, **named)
    case.true(not model.read, "The model ran before the text was refused.")
    actual = case.call(answer, model, PROMPTS, 12, 0)
    case.equal(actual, continued(model, PROMPTS, 12), "exactly max_len: the text")


# Passes that leave no trace -----------------------------------------------------------


def two_passes(answer, model, ids, *padding):
    """What `cached_forward` returns, and what it has stored."""
    cache = SlowCache(model.config, 2, dtype=model.head.weight.dtype)
    answer(model, ids, cache, *padding)
    logits = answer(model, ids[:, :2], cache, *padding)
    return logits, *(x for pair in cache.pairs.values() for x in pair)


def three_tokens(answer, model, ids, *padding):
    """What `generate_cached` returns."""
    try:
        return (answer(model, ids, 3, 0, None, None, None, *padding),)
    except ValueError as error:  # of a cache, which need not use the word
        raise ValueError(f"device: {error}") from error


for exercise, run in ((cached_forward, two_passes), (generate_cached, three_tokens)):

    @exercise.requires(
        "the result has no gradients, the model and torch are left as they were, and it "
        "works on any device",
        "A cache would hold every step's graph: use `torch.no_grad()`.",
    )
    def _(answer, case, run=run):
        @wraps(answer)
        def passes(*given):
            return run(answer, *given)

        ids = probe_ids(2, 5, below=23)
        for c in (ONE_BLOCK, ONE_GPT2):
            model = Decoder(c, 2000)
            for gradients in (True, False):
                model.train(not gradients)
                with torch.set_grad_enabled(gradients):
                    found = case.call(passes, model, ids)
                    kept = torch.is_grad_enabled() == gradients
                case.true(
                    kept and not any(x.requires_grad for x in found),
                    "The result, or the keys in the cache, carry gradients, or gradients are "
                    "switched for everybody: use `with torch.no_grad():` or the decorator.",
                )
                case.true(
                    all(p.requires_grad for p in model.parameters())
                    and all(part.training != gradients for part in model.modules()),
                    "The model is left in another state than it came in: `requires_grad` of "
                    "its parameters or `training` of its parts has changed.",
                )
            case.any_device(passes, model, ids)
            case.any_device(passes, model, ids, torch.tensor([0, 2]))


# What it costs ------------------------------------------------------------------------

# No two sizes, and no two of their ratios, are equal.
APART = replace(
    LLAMA, d_model=429, n_layers=5, n_heads=33, n_kv_heads=3, d_head=7, max_len=40
)


def true_bytes(c, t, batch=1, dtype=torch.float16):
    """As many as tensors take that are really made (on no device)."""
    size = (batch, c.n_kv_heads, t, c.d_head)
    return 2 * torch.empty(size, dtype=dtype, device="meta").nbytes * c.n_layers


bytes_agree = partial(counts, truth=true_bytes)


@kv_cache_bytes.requires(
    "keys and values of every layer, row and position, for the KV heads; one row and "
    "two bytes if not given",
)
def _(answer, case):
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        bytes_agree(case, answer=answer, c=APART, t=17, batch=19, dtype=dtype)
    bytes_agree(case, answer=answer, c=APART, t=17)
    bytes_agree(case, answer=answer, c=GPT2, t=3, batch=13)


@kv_cache_bytes.requires(
    "real models at full length, and beyond it, are exact: Llama 2 7B needs 2 GiB for "
    "4,096 positions; a dtype that is not floating-point is a ValueError that names it",
)
def _(answer, case):
    for c in (LLAMA_7B, LLAMA_3_8B, SMOLLM, GPT2_SMALL):
        bytes_agree(case, answer=answer, c=c, t=c.max_len)
        far = {"t": 1_000_003, "batch": 7, "dtype": torch.float32}
        bytes_agree(case, answer=answer, c=c, **far)
    whole_numbers_refused(case, answer, LLAMA, 7, 1)


# The parts of lessons 03, 04 and 08 with a cache --------------------------------------

cached_decoder = IntegrationCheck(
    "cached_decoder",
    lesson="kv_cache",
    parts={"attention": "attention", "rope": "positions"}
    | dict.fromkeys(("split_heads", "merge_heads", "MultiHeadAttention"), "multi_head")
    | dict.fromkeys(("TransformerConfig", "Transformer", "generate"), "forward_pass")
    | dict.fromkeys(("KVCache", "chunk_mask"), "kv_cache")
    | dict.fromkeys(("cached_forward", "generate_cached"), "kv_cache"),
)


@cached_decoder.requires(
    "heads, rotation, cache and mask in pieces give what MultiHeadAttention gives at once",
)
def _(parts, case):
    weights = own_weights(weights_for(block_shapes(LLAMA), 800), "attention")
    layer = case.call(parts["MultiHeadAttention"], 10, 6, 2, 4)
    case.load(layer, **weights)
    cache = case.call(parts["KVCache"], 1, 3, 2, 9, 4)
    x, out = probe(3, 9, 10, seed=801), []
    for places in torch.arange(9).split((4, 1, 3, 1)):
        q, k, v = (
            case.call(parts["split_heads"], w(x[:, places]).detach(), n)
            for w, n in ((layer.w_q, 6), (layer.w_k, 2), (layer.w_v, 2))
        )
        q, k = (case.call(parts["rope"], y, places, 100.0) for y in (q, k))
        k, v = case.call(cache.append, 0, k, v)
        mask = case.call(parts["chunk_mask"], len(places), k.shape[2])
        k, v = (y.repeat_interleave(3, 1) for y in (k, v))
        heads = case.call(parts["attention"], q, k, v, mask)
        out.append(layer.w_o(case.call(parts["merge_heads"], heads)).detach())

    def rotate(heads):
        return parts["rope"](heads, torch.arange(9), 100.0)

    whole = case.call(layer, x, torch.ones(9, 9).tril().bool(), rotate).detach()
    case.close(torch.cat(out, 1), whole, "attention in pieces", like=x)


@cached_decoder.requires(
    "Transformer in one pass and cached_forward through a KVCache give the same logits, "
    "generate and generate_cached the same text, greedy and drawn",
    "If one style differs: positions; if both: the cache. And both draw with your "
    "`sample`: with one seed they draw the same tokens as long as their logits agree.",
)
def _(parts, case):
    for i, c in enumerate((LONG, LONG_GPT2)):
        config = case.call(parts["TransformerConfig"], **vars(c))
        model = case.call(parts["Transformer"], config)
        weights = weights_for(model_shapes(c), 820 + 40 * i)
        case.load(model, **{n.replace(".", "__"): w for n, w in weights.items()})
        like, ids = model.head.weight, probe_ids(3, 9, below=23, seed=821)
        truth = slow_decoder(ids, {n: w.double() for n, w in weights.items()}, c)
        case.close(case.call(model, ids), truth, "the logits of one pass", like=like)
        cache = case.call(parts["KVCache"], c.n_layers, 3, c.n_kv_heads, 12, c.d_head)
        for chunks in ((2, 3, 4), (4, 1, 3, 1)):
            pieces = [
                case.call(parts["cached_forward"], model, piece, cache)
                for piece in ids.split(chunks, 1)
            ]
            what = f"style {c.style}, chunks {chunks}: the logits"
            case.close(torch.cat(pieces, 1), truth, what, like=like)
            case.call(cache.reset)
        for settings in ({"temperature": 0}, {"temperature": 1.5, "top_k": 9}):
            one, other = (
                case.call_in_place(
                    parts[name], model, PROMPTS, 9, generator=seeded(3), **settings
                )
                for name in ("generate", "generate_cached")
            )
            case.equal(other, one, f"with {settings}: the text through the cache")
