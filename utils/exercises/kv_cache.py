"""Lesson 10: the cache, what a query may see of it, and generation through it."""

import gc
from dataclasses import replace
from functools import partial, wraps
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
    causal,
    continued,
    doubled,
    model_shapes,
    normed,
    one_block,
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

# Keys and values that go in and come back, for either cache ---------------------------


def chunk(t, seed=0, batch=2, heads=3, d_head=5, device="cpu", dtype=torch.float32):
    """Keys and values of `t` positions, for the caches that `new_cache` makes."""
    size = (batch, heads, t, d_head)
    return tuple(
        probe(*size, seed=s, dtype=dtype).to(device) for s in (seed, seed + 50)
    )


def new_cache(answer, case, n_layers=1, positions=9, **kind):
    return case.call(answer, n_layers, 2, 3, positions, 5, **kind)


def length_is(case, cache, expected, when):
    before = case.called
    found = case.call(lambda: cache.length)
    case.called = before  # the call that should have moved it
    if callable(found):
        raise Explained(
            "`length` is a method. It is read without brackets, `cache.length`: make it "
            "a property or an attribute."
        )
    if type(found) is not int:
        kind = type(found).__name__
        raise Explained(f"`length` is of type {kind}. It counts positions: an int.")
    case.equal(found, expected, f"{when}: `length`")


def appended(case, cache, layer, chunks, when="", seen=None):
    """Append the last of `chunks`; their last `seen` positions must come back."""
    expected = [torch.cat(each, 2) for each in zip(*chunks, strict=True)]
    expected = [x if seen is None else x[:, :, -seen:] for x in expected]
    returned = []

    @wraps(cache.append)
    def append(layer, k, v):
        """Records the shapes alone where they are wrong: free memory holds anything."""
        returned.append(cache.append(layer, k, v))
        shapes = [getattr(x, "shape", None) for x in returned[0] or ()]
        return returned[0] if shapes == [x.shape for x in expected] else tuple(shapes)

    case.call(append, layer, *chunks[-1])
    case.is_tuple(returned[0], 2, "what `append` returns")
    for x, right, name in zip(returned[0], expected, ("keys", "values"), strict=True):
        what = f"what `append` returns as {name}"
        case.is_tensor(x, what)
        case.equal(x.detach().clone(), right, f"{when}{what}")


def apart(case, new, append):
    """A second cache of the same size is empty, and neither touches the other."""
    one, other, chunks = new(), new(), [chunk(2), chunk(2, seed=1)]
    append(case, one, 0, chunks[:1])
    length_is(case, other, 0, "a second cache, new")
    append(case, other, 0, [chunk(3, seed=2)], "in a second cache: ")
    append(case, one, 0, chunks, "in the first of two caches: ")
    case.call(one.reset)
    length_is(case, other, 3, "the second cache after a reset of the first")


def bare(value):
    return str(value).removeprefix("torch.")


def misfits_refused(case, new, append):
    """Keys, values or both that are not of the cache's shape, dtype and device."""
    f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
    for what, stored, others in (
        ("batch", 2, (1, 7)),
        ("heads", 3, (1, 6)),
        ("d_head", 5, (1, 4, 8)),
        ("dtype", f32, (f64, f16)),
        ("dtype", bf16, (f32, f16)),
        ("dtype", f16, (bf16,)),
        ("dtype", f64, (f32,)),
        ("device", "cpu", ("meta",)),
    ):
        kind = {"dtype": stored} if what == "dtype" else {}
        k, v = chunk(2, **kind)
        for other in others:
            wrong_k, wrong_v = chunk(2, **{**kind, what: other})
            names = bare(other), bare(stored)
            because = f"{what} {names[0]} where the cache has {names[1]}"
            for who, *misfit in (
                ("keys and values", wrong_k, wrong_v),
                ("values", k, wrong_v),
                ("keys", wrong_k, v),
            ):
                refused(case, new, append, misfit, names, f"{who}, {because}", **kind)
    refused(case, new, append, (chunk(4)[0], chunk(1)[1]), (), "4 keys with 1 value")


def refused(case, new, append, misfit, names, because, **kind):
    """A ValueError, and what comes next is stored behind what was there."""
    cache, held, after = new(**kind), chunk(3, **kind), f"after a refusal ({because})"
    append(case, cache, 0, [held])
    case.raises(ValueError, cache.append, 0, *misfit, mentions=names, because=because)
    length_is(case, cache, 3, after)
    append(case, cache, 0, [held, chunk(2, seed=7, **kind)], f"{after}: ")


def kinds_taken(case, new, append):
    """The dtype and the device that the cache was built with."""
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        cache, chunks = new(dtype=dtype), [chunk(2, dtype=dtype)]
        append(case, cache, 0, chunks)
        append(case, cache, 0, [*chunks, chunk(3, seed=1, dtype=dtype)])
    for device in ("meta", torch.device("meta")):
        cache, on = new(device=device), chunk(2, device="meta")
        found = [case.call_in_place(cache.append, 0, *on)[0] for _ in range(3)]
        case.true(
            all(x.is_meta for x in found),
            "The cache was built with a `device`, and what it returns is on another.",
        )
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        for kind in ({}, {"dtype": None}):
            append(case, new(**kind), 0, [chunk(2, dtype=dtype)])


def small_sizes_refused(case, answer):
    for size in (0, -1, -7):
        for i in range(5):
            sizes = [4, 2, 3, 9, 5]
            sizes[i], because = size, f"a size of {size} (argument {i + 1})"
            case.raises(ValueError, answer, *sizes, mentions=(size,), because=because)


def whole_numbers_refused(case, f, *args):
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.int8, torch.int32):
        kind = {"mentions": [bare(dtype)], "because": f"dtype {bare(dtype)}"}
        case.raises(ValueError, f, *args, dtype=dtype, **kind)


def bytes_held(*values):
    """Of all tensors that are kept alive, each storage once."""
    storages, seen, left = {}, set(), list(values)
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif not isinstance(value, (type, FunctionType, ModuleType)):
            left += gc.get_referents(value) if id(value) not in seen else ()
            seen.add(id(value))
    return sum(storages.values())


# The cache ----------------------------------------------------------------------------


@KVCache.requires(
    "keys and values that are appended to an empty layer come back, length counts "
    "their positions, and another cache knows nothing of them",
    "Which slice of your buffer holds what has been stored so far? And what is assigned "
    "in the body of the class belongs to all its objects.",
)
def _(answer, case):
    cache = new_cache(answer, case)
    length_is(case, cache, 0, "a new cache")
    appended(case, cache, 0, [chunk(4)])
    length_is(case, cache, 4, "after 4 positions")
    apart(case, partial(new_cache, answer, case), appended)


@KVCache.requires(
    "what comes next is stored behind it, one position or several at a time",
    "Write down for chunks of 1, 3 and 2 where each begins and ends.",
)
def _(answer, case):
    for sizes in ((1, 3, 2), (4, 1, 1, 1), (2, 2, 5)):
        cache, chunks = new_cache(answer, case), []
        for i, size in enumerate(sizes):
            chunks.append(chunk(size, seed=i))
            appended(case, cache, 0, chunks, f"chunk {i}: ")
            total, after = sum(sizes[: i + 1]), f"after chunks {sizes[: i + 1]}"
            length_is(case, cache, total, after)


@KVCache.requires(
    "every layer has memory of its own",
    "A pass through three layers appends three times, to the same positions of three "
    "layers.",
)
def _(answer, case):
    cache, chunks = new_cache(answer, case, n_layers=3), [[], [], []]
    for step, size in enumerate((2, 1, 3)):
        for layer in range(3):
            chunks[layer].append(chunk(size, seed=10 * step + layer))
            appended(case, cache, layer, chunks[layer], f"layer {layer}: ")
    length_is(case, cache, 6, "after passes of 2, 1 and 3")


@KVCache.requires(
    "length moves once all layers have written",
    "The text has grown by one chunk, and `append` was called for each layer. Which of "
    "these calls may move `length`?",
)
def _(answer, case):
    cache, lengths = new_cache(answer, case, n_layers=3, positions=30), []
    for step, size in enumerate((2, 1, 3)):
        for layer in range(3):
            with case.unrecorded():
                case.call(cache.append, layer, *chunk(size, seed=10 * step + layer))
            lengths.append(cache.length)
    case.note(tuple(lengths))
    what = "`length` after each call, chunks of 2, 1 and 3, three layers,"
    case.equal(lengths, [0, 0, 2, 2, 2, 3, 3, 3, 6], what)


@KVCache.requires(
    "reset starts again at position 0, in every layer",
    "What must be set back so that the next `append` writes to position 0?",
)
def _(answer, case):
    cache = new_cache(answer, case, n_layers=2)
    for text, size in enumerate((5, 3, 9)):
        for layer in range(2):
            keys = [chunk(size, seed=20 * text + layer)]
            appended(case, cache, layer, keys, f"text {text}, layer {layer}: ")
        length_is(case, cache, size, f"text {text}")
        case.call(cache.reset)
    length_is(case, cache, 0, "after reset")


@KVCache.requires(
    "memory for max_len positions is taken once: append returns views of it, it copies "
    "nothing that was there",
    "What does a slice of a tensor make, a copy or a view?",
)
def _(answer, case):
    cache, places, returned = new_cache(answer, case, positions=30), [], []
    for size in (1, 4, 1, 20, 2, 0, 3, 5):
        if size == 0:
            case.call(cache.reset)
            continue
        k, v = case.call(cache.append, 0, *chunk(size))
        places.append((k.data_ptr(), v.data_ptr()))
        returned.append((k, v))  # or its memory could be given out again
    for n, when in ((5, "after each `append`"), (7, "after `reset`")):
        text = f"What `append` returned lies at another place in memory {when}."
        case.true(len(set(places[:n])) == 1, text)
    cache = new_cache(answer, case, n_layers=2, positions=200)
    returned = [case.call(cache.append, layer, *chunk(3)) for layer in range(2)]
    held, needed = bytes_held(cache, returned), 2 * 2 * 2 * 3 * 200 * 5 * 4
    case.true(
        held <= needed + 2_000,
        f"It holds {held:,} bytes; keys and values of 200 positions are {needed:,}.",
    )


@KVCache.requires(
    "max_len positions fit; one more is a ValueError that names both numbers, and "
    "nothing is stored",
    "Compare the position after the last new one with max_len, before you write.",
)
def _(answer, case):
    for sizes in ((7, 2), (9,), (4, 5), (7, 1, 1)):
        cache, chunks = new_cache(answer, case), []
        for i, size in enumerate(sizes):
            chunks.append(chunk(size, seed=i))
            appended(case, cache, 0, chunks)
            stored = cache.length
            for n in (10 - stored, 13 - stored):
                names, because = (stored + n, 9), f"{stored + n} positions, max_len 9"
                given, named = chunk(n, seed=5), {"mentions": names, "because": because}
                case.raises(ValueError, cache.append, 0, *given, **named)
                length_is(case, cache, stored, "after the refused call")


@KVCache.requires(
    "a layer, shape, dtype or device that is not the cache's is a ValueError that says "
    "so, and nothing is stored; so is a size or dtype that cannot be, when it is built",
)
def _(answer, case):
    cache = new_cache(answer, case, n_layers=3)
    for layer in (3, -1):
        named = {"mentions": (layer,), "because": f"layer {layer} of a cache of 3"}
        case.raises(ValueError, cache.append, layer, *chunk(2), **named)
    misfits_refused(case, partial(new_cache, answer, case), appended)
    small_sizes_refused(case, answer)
    whole_numbers_refused(case, answer, 1, 2, 3, 9, 5)


@KVCache.requires(
    "it stores in the dtype and on the device it was built with, in torch's default "
    "dtype if none is given; keys may be strided",
    "`torch.zeros` without a dtype takes the default by itself.",
)
def _(answer, case):
    appended(case, new_cache(answer, case), 0, [tuple(strided(x) for x in chunk(3))])
    kinds_taken(case, partial(new_cache, answer, case), appended)

    def stored(k, v):
        cache = answer(1, 2, 3, 9, 5, dtype=k.dtype, device=k.device)
        return cache.append(0, k, v)[1]

    case.any_device(stored, *chunk(2))


# The mask -----------------------------------------------------------------------------


def slow_mask(t_q, t_k, padding=None):
    """Place by place."""
    return torch.tensor(
        [
            [[[pad <= j <= i + t_k - t_q for j in range(t_k)] for i in range(t_q)]]
            for pad in ([0] if padding is None else padding.tolist())
        ]
    )


def mask_agrees(case, answer, *args, **kwargs):
    actual = case.call(answer, *args, **kwargs)
    what = f"for t_q = {args[0]} and t_k = {args[1]} the mask"
    case.equal(actual, slow_mask(*args, *kwargs.values()), what)


@chunk_mask.requires(
    "a first chunk: every query sees itself and what came before, (1, 1, t_q, t_k)",
    "Print it: row = query, column = key, True = may look.",
)
def _(answer, case):
    for t in (4, 1, 6):
        mask_agrees(case, answer, t, t)


@chunk_mask.requires(
    "behind a prefix the queries are the last of the keys' positions",
    "A query of the chunk sees the whole prefix and its own chunk up to itself. Which "
    "corner of the matrix must the diagonal end in?",
)
def _(answer, case):
    for sizes in ((2, 5), (3, 4), (1, 7), (4, 9)):
        mask_agrees(case, answer, *sizes)


@chunk_mask.requires(
    "nobody sees the padding at the start of a row, and each row has its own; a padding "
    "token itself may look at nothing",
    "Padding makes some keys invisible, whatever query asks. Compare the keys' columns "
    "with `padding[:, None]`.",
)
def _(answer, case):
    for sizes, padding in (
        ((4, 4), [0, 2, 1]),
        ((3, 8), [1, 3, 5, 0]),
        ((2, 6), [3, 0]),
        ((1, 5), [2, 0, 4]),
        ((5, 5), [0]),
        ((2, 6), [0, 0, 0]),
        ((3, 4), [4, 0, 2]),
    ):
        mask_agrees(case, answer, *sizes, torch.tensor(padding))
    mask_agrees(case, answer, 2, 5, padding=torch.tensor([2, 1]))


@chunk_mask.requires(
    "sizes of any kind, and padding in any dtype of whole numbers; more queries than "
    "keys are a ValueError that names both",
    "Make the mask for the sizes that are asked for. A table of a fixed size ends.",
)
def _(answer, case):
    for sizes in ((66, 66), (2, 300), (1, 5_000)):
        mask_agrees(case, answer, *sizes)
    mask_agrees(case, answer, 3, 300, torch.tensor([0, 140]))
    for dtype in (torch.int32, torch.int8, torch.int16, torch.uint8):
        mask_agrees(case, answer, 2, 6, torch.tensor([3, 0, 1], dtype=dtype))
        mask_agrees(case, answer, 1, 300, torch.tensor([0, 90], dtype=dtype))
    named = {"mentions": (13, 8), "because": "13 queries with 8 keys"}
    for padding in (None, torch.tensor([1, 0])):
        case.raises(ValueError, answer, 13, 8, padding, **named)


@chunk_mask.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, 3, 5, torch.tensor([1, 2]))


# A decoder to run through a cache, and a cache to run it through ----------------------


class Positions(nn.Module):
    """Learned positions, as in lesson 04."""

    def forward(self, positions):
        last = len(self.table.weight) - 1
        if not positions.is_meta and (positions != positions.clamp(0, last)).any():
            raise ValueError(f"a position is not in the table, which ends at {last}")
        return self.table(positions)


class FeedForward(nn.Module):
    def forward(self, x):
        up = self.w_1(x)
        hidden = F.silu(up) * self.w_3(x) if hasattr(self, "w_3") else F.gelu(up)
        return self.w_2(hidden)


HOLDERS = {
    "blocks": nn.ModuleList,
    "positions": Positions,
    "feed_forward": FeedForward,
}


class Decoder(nn.Module):
    """Layers under the course's names; only the oracle knows how they are connected.

    scale: of the logits; a large one makes it sure of what comes next.
    read: the shapes of the ids that it has embedded.
    """

    def __init__(self, c, seed, scale=1):
        super().__init__()
        self.config, self.read = c, []
        weights = weights_for(model_shapes(c), seed)
        for name, weight in weights.items():
            *path, last = name.split(".")
            owner, bias = self, f"{name}.bias" in weights
            for step in path if last != "bias" else ():
                if not hasattr(owner, step):
                    owner.add_module(step, HOLDERS.get(step, nn.Module)())
                owner = getattr(owner, step)
            if last in ("embedding", "table"):
                owner.add_module(last, nn.Embedding(*weight.shape))
            elif weight.dim() == 2:
                owner.add_module(last, nn.Linear(*reversed(weight.shape), bias))
            elif last != "bias":
                norm = nn.LayerNorm if bias else nn.RMSNorm
                owner.add_module(last, norm(len(weight), c.norm_eps))
        load(self, weights)
        self.head.weight.data.mul_(scale)
        self.embedding.register_forward_pre_hook(
            lambda _, given: self.read.append(tuple(given[0].shape))
        )

    def weights(self, dtype=torch.float64):
        held = self.named_parameters()
        return {n.removesuffix(".weight"): p.detach().to(dtype) for n, p in held}

    def forward(self, ids):
        return slow_decoder(ids, self.weights(self.head.weight.dtype), self.config)


def load(model, weights):
    held = dict(model.named_parameters())
    for name, value in weights.items():
        held.get(f"{name}.weight", held.get(name)).data.copy_(value)


class Truth:
    """The logits of whole texts in float64."""

    def __init__(self, model):
        self.config, self.weights = model.config, model.weights()

    def __call__(self, ids):
        return slow_decoder(ids, self.weights, self.config)


class SlowCache:
    """All that was appended, side by side; or the last `window` positions of it.

    length: how many positions are said to have passed before the first.
    """

    def __init__(self, c, batch, max_len=16, window=None, length=0, dtype=None):
        self.size, self.dtype = (batch, c.n_kv_heads, c.d_head), dtype or torch.float32
        self.n_layers, self.max_len, self.window = c.n_layers, max_len, window
        self.reset(length)

    def __repr__(self):
        return "a cache"

    def reset(self, length=0):
        self.lengths, self.pairs = [length] * self.n_layers, {}

    @property
    def length(self):
        return min(self.lengths)

    def append(self, layer, k, v):
        for x in (k, v):
            size = (*x.shape[:2], *x.shape[3:])
            if (size, x.dtype, x.shape) != (self.size, self.dtype, k.shape):
                raise ValueError(f"{size} {x.dtype}, not {self.size} {self.dtype}")
        stop = self.lengths[layer] + k.shape[2]
        if self.window is None and stop > self.max_len:
            raise ValueError(f"{stop} positions are more than {self.max_len}")
        old = self.pairs.get(layer, (k[:, :, :0], v[:, :, :0]))
        first = 0 if self.window is None else 1 - self.window - k.shape[2]
        both = [
            torch.cat(two, 2)[:, :, first:] for two in zip(old, (k, v), strict=True)
        ]
        self.lengths[layer], self.pairs[layer] = stop, both
        return tuple(both)


LONG, LONG_GPT2 = replace(LLAMA, max_len=16), replace(GPT2, max_len=16)
ONE_BLOCK, ONE_GPT2 = (replace(c, n_layers=1) for c in (LONG, LONG_GPT2))
TWO_BLOCKS, TWO_GPT2 = (replace(c, n_layers=2) for c in (LONG, LONG_GPT2))


def left_alone(case, run, model):
    """`run` changes neither the model nor torch's settings."""
    for training, gradients in ((True, True), (True, False), (False, True)):
        model.train(training)
        with torch.set_grad_enabled(gradients):
            run()
            after = torch.is_grad_enabled()
        case.true(
            after == gradients,
            f"Gradients were {'on' if gradients else 'off'} before the call and are "
            f"{'on' if after else 'off'} after it, for everybody: use `with "
            "torch.no_grad():` or the decorator.",
        )
        case.true(
            all(p.requires_grad for p in model.parameters()),
            "Parameters of the model have lost `requires_grad`: it cannot be trained "
            "any more.",
        )
        case.true(
            all(part.training == training for part in model.modules()),
            f"The model came in with `training` {training} and is left with "
            f"{not training}.",
        )


# The forward pass through a cache -----------------------------------------------------


def in_chunks(case, answer, model, truth, ids, sizes, cache, padding=None):
    """Feed `ids` in chunks; the logits of all tokens but padding must be right."""
    like, start = model.head.weight, 0
    tolerance = ANGLES if like.dtype == torch.float64 else None
    pads = [0] * len(ids) if padding is None else padding.tolist()
    rows = zip(ids.split(1), pads, strict=True)
    alone = [F.pad(truth(row[:, pad:]), (0, 0, pad, 0)) for row, pad in rows]
    real = (torch.arange(ids.shape[1]) >= torch.tensor(pads)[:, None])[..., None]
    for i, new in enumerate(ids.split(sizes, 1)):
        at = slice(start, start + sizes[i])
        right, shown = torch.cat(alone)[:, at], real[:, at]

        @wraps(answer)
        def without_padding(*given, shown=shown, right=right):
            logits = answer(*given)  # at padding they say nothing
            fits = getattr(logits, "shape", None) == right.shape
            return torch.where(shown, logits, 0) if fits else logits

        given = (model, new, cache) + (() if padding is None else (padding,))
        actual, start = case.call(without_padding, *given), at.stop
        after = f"chunks {list(sizes[: i + 1])}"
        what = f"{after}: the result for the last"
        case.close(actual, right, what, like=like, tolerance=tolerance)
        case.note(cache.length)
        case.equal(cache.length, start, f"after {after} the `length` of the cache")


def chunks_agree(case, answer, c, sizes, seed, batch=2, cache=None, padding=None):
    model = Decoder(c, seed)
    ids = probe_ids(batch, sum(sizes), below=c.vocab_size, seed=seed)
    cache = cache or SlowCache(c, batch)
    in_chunks(case, answer, model, Truth(model), ids, sizes, cache, padding)


@cached_forward.requires(
    "one token, one block, an empty cache: the same logits as without",
    "Go through `Block.forward` and `MultiHeadAttention.forward` line by line. What has "
    "to be put between the keys and the scores?",
)
def _(answer, case):
    chunks_agree(case, answer, ONE_BLOCK, (1,), 1000)


@cached_forward.requires(
    "a whole prompt at once: nobody sees the future",
    "A prompt is a chunk, and its tokens must not look ahead, cache or not. One block "
    "and the last token alone would not show it.",
)
def _(answer, case):
    chunks_agree(case, answer, LONG, (7,), 1100)


@cached_forward.requires(
    "token by token: each is at its own position, and sees all before it",
    "The next token's position is how many are in the cache. When do you ask for it: "
    "before the first layer appends, or after?",
)
def _(answer, case):
    chunks_agree(case, answer, ONE_BLOCK, (1, 1, 1, 1), 1200, batch=3)
    chunks_agree(case, answer, LONG, (1,) * 6, 1210)


@cached_forward.requires(
    "a prompt, then token by token, as in generation; chunks of any length",
    "What is different in the second step of generation from the first? T queries, and "
    "more keys than that: which of the keys may each query see?",
)
def _(answer, case):
    chunks_agree(case, answer, LONG, (4, 1, 1, 1), 1300)
    chunks_agree(case, answer, LONG, (2, 3, 1, 4), 1400, batch=3)
    chunks_agree(case, answer, replace(LONG, n_kv_heads=6), (3, 4), 1410)
    other = replace(LONG, n_kv_heads=1, d_head=6, rope_base=50.0)
    chunks_agree(case, answer, other, (3, 4), 1420)


def windowed(ids, p, c, window):
    """Logits of a decoder of style llama whose queries see `window` positions."""
    mask = causal(ids.shape[1]).triu(1 - window)
    x = p["embedding"][ids]
    for i in range(c.n_layers):
        x = one_block(x, own_weights(p, f"blocks.{i}"), c, mask)
    return F.linear(normed(x, p, "norm", c), p["head"])


@cached_forward.requires(
    "the keys are those that append returned, also where a cache forgets old ones",
    "Keys go in rotated, and come back to be used as they are. `cache.length` counts "
    "what has passed; how many keys there are, their shape tells.",
)
def _(answer, case):
    model, ids = Decoder(LONG, 1450), probe_ids(2, 9, below=23, seed=25)
    truth = partial(windowed, p=model.weights(), c=LONG, window=4)
    cache = SlowCache(LONG, 2, window=4)
    in_chunks(case, answer, model, truth, ids, (1,) * 9, cache)


@cached_forward.requires(
    'style "gpt2": learned positions and biases',
    "Call the layers (`part.w_q(y)`), so that biases come along. And where do learned "
    "positions enter?",
)
def _(answer, case):
    for i, sizes in enumerate(((6,), (1, 1, 1, 1), (4, 1, 1), (2, 3, 1))):
        chunks_agree(case, answer, LONG_GPT2, sizes, 1500 + 10 * i, batch=3)


@cached_forward.requires(
    "after a reset the next text starts anew, and two texts in turn do not mix",
    "What a call has to know of the text so far is in the cache it is given.",
)
def _(answer, case):
    for c in (TWO_BLOCKS, TWO_GPT2):
        cache = SlowCache(c, 3)
        for i, sizes in enumerate(((4, 1, 2), (2, 1), (9, 1))):
            chunks_agree(case, answer, c, sizes, 1600 + i // 2, 3, cache)
            cache.reset()
        model, caches = Decoder(c, 1660), [SlowCache(c, 2), SlowCache(c, 2)]
        ids = [probe_ids(2, 7, below=c.vocab_size, seed=33 + i) for i in range(2)]
        expected = [Truth(model)(each) for each in ids]
        for start, stop in ((0, 4), (4, 5), (5, 7)):
            for i, right in enumerate(expected):
                actual = case.call(answer, model, ids[i][:, start:stop], caches[i])
                what = f"text {i + 1} of two, from position {start}: the result"
                case.close(actual, right[:, start:stop], what, like=model.head.weight)


@cached_forward.requires(
    "positions are exact far into a text, in every dtype",
    "Positions are whole numbers, as many as the model has. bfloat16 has 8 binary "
    "digits: it counts to 256.",
)
def _(answer, case):
    for fields in (ONE_BLOCK, ONE_GPT2):
        c = replace(fields, max_len=5_000, rope_base=9.0)
        ids = probe_ids(2, 8, below=c.vocab_size, seed=37)
        for dtype in (torch.float32, torch.bfloat16):
            model = Decoder(c, 1670).to(dtype)
            cache = SlowCache(c, 2, window=9, length=4_100, dtype=dtype)
            wide = model.weights()
            if c.style == "gpt2":
                wide["positions.table"] = wide["positions.table"][4_100:]
            expected = slow_decoder(ids, wide, c)
            # What bfloat16 changes is far less than what wrong positions do.
            low = {"tolerance": 0.1 * expected.abs().max().item()}
            for start, stop in ((0, 5), (5, 6), (6, 8)):
                actual = case.call(answer, model, ids[:, start:stop], cache)
                kind = {"like": model.head.weight} | low if dtype.itemsize < 4 else {}
                what = f"{bare(dtype)}, at position {4_100 + start}: the result"
                case.close(actual, expected[:, start:stop], what, **kind)


@cached_forward.requires(
    "padding on the left: each row gives what it would give alone",
    "Rows begin at different columns. Which position has a row's first real token, and "
    "which columns may nobody in this row see, in every step?",
)
def _(answer, case):
    for c, sizes, padding in (
        (ONE_BLOCK, (5,), [2, 0, 3]),
        (TWO_BLOCKS, (6, 1, 1), [2, 0, 4]),
        (TWO_BLOCKS, (3, 2, 1, 2), [1, 4, 0]),
        (TWO_GPT2, (5, 1, 1), [3, 0, 1]),
        (TWO_GPT2, (2, 3, 1), [1, 0, 3]),
    ):
        chunks_agree(case, answer, c, sizes, 1700, 3, padding=torch.tensor(padding))


@cached_forward.requires(
    "more than max_len tokens, and a full cache, are a ValueError that names both "
    "numbers",
    "The cache refuses when it is full. Who refuses when the cache is longer than what "
    "the model was made for?",
)
def _(answer, case):
    for c in (ONE_BLOCK, ONE_GPT2):
        for sizes in ((16,), (15, 1), (9, 7)):
            chunks_agree(case, answer, c, sizes, 1810, cache=SlowCache(c, 2, 30))
        model, ids = Decoder(c, 1800), probe_ids(2, 17, below=c.vocab_size, seed=40)
        for size, new, room, longest in ((16, 1, 30, 16), (9, 8, 30, 16), (0, 9, 8, 8)):
            cache = SlowCache(c, 2, max_len=room)
            if size:
                case.call(answer, model, ids[:, :size], cache)
            what = "max_len is" if longest == 16 else "the cache has room for"
            because = f"{size} tokens and {new} new ones where {what} {longest}"
            named = {"mentions": (size + new, longest), "because": because}
            case.raises(ValueError, answer, model, ids[:, :new], cache, **named)
            case.true(
                cache.lengths == [size] * c.n_layers,
                "A call that is refused has stored tokens in the cache all the same.",
            )


@cached_forward.requires(
    "the logits have the model's dtype and no gradients, and the model is left as it "
    "was, and so is torch",
    "The cache would hold every step's graph. There is a decorator for functions that "
    "need no gradients. `train()` and `eval()` are not this function's to change.",
)
def _(answer, case):
    for c in (TWO_BLOCKS, TWO_GPT2):
        model = Decoder(c, 1900).double().eval()
        ids = probe_ids(2, 8, below=c.vocab_size, seed=50)
        cache = SlowCache(c, 2, dtype=torch.float64)
        in_chunks(case, answer, model, Truth(model), ids, (3, 1, 4), cache)
    model = Decoder(TWO_BLOCKS, 2000)

    def run():
        cache = SlowCache(TWO_BLOCKS, 2)
        for _ in range(2):
            out = case.call(answer, model, probe_ids(2, 3, below=23), cache)
            held = [x for pair in cache.pairs.values() for x in pair]
            case.true(
                not any(x.requires_grad for x in (out, *held)),
                "The logits, or the keys in the cache, carry gradients.",
            )

    left_alone(case, run, model)


@cached_forward.requires("it creates nothing on another device")
def _(answer, case):
    for c in (ONE_BLOCK, ONE_GPT2):

        def run(model, ids, *padding, c=c):
            cache = SlowCache(c, 2)
            answer(model, ids, cache, *padding)
            return answer(model, ids[:, :2], cache, *padding)

        model, ids = Decoder(c, 2100), probe_ids(2, 5, below=23)
        case.any_device(run, model, ids)
        case.any_device(run, model, ids, torch.tensor([0, 2]))


# Generation ---------------------------------------------------------------------------

SURE = 10_000  # of such a scale of the logits every wrong setting gives other tokens
HOT = 1_000_000  # at this temperature all tokens are drawn nearly equally often
DRAWS = 2_000
PROMPTS = probe_ids(3, 4, below=23, seed=60)
START = PROMPTS[:1, :1]


def greedy(model, ids, n):
    """The greedy continuation, without any cache."""
    return continued(Truth(model), ids, n)


@generate_cached.requires(
    "temperature 0: the prompt, then the most likely token at each step",
    "The first pass reads the prompt, each pass after it only the newest token. Whose "
    "logits give the next one?",
)
def _(answer, case):
    for fields in (LONG, LONG_GPT2):
        model = Decoder(replace(fields, max_len=64), 3000, SURE)
        expected = greedy(model, PROMPTS, 5)
        for n in (5, 1, 2):
            actual = case.call(answer, model, PROMPTS, n, temperature=0)
            case.equal(actual, expected[:, : 4 + n], f"{n} more: the text")
        one = probe_ids(5, 1, below=23, seed=61)
        actual = case.call(answer, model, one, n_tokens=4, temperature=0.0)
        case.equal(actual, greedy(model, one, 4), "from one token: the text")


@generate_cached.requires(
    "every token is read once: the prompt in one pass, then one token a pass, and the "
    "last token never",
    "Print the shape of what you give to `cached_forward`. Whose logits does nobody use?",
)
def _(answer, case):
    model = Decoder(LONG, 3100, SURE)
    case.call(answer, model, PROMPTS, 6, temperature=0)
    columns = [shape[-1] for shape in model.read]
    case.note(str(columns))
    case.true(
        columns == [4, 1, 1, 1, 1, 1],
        f"For a prompt of 4 tokens and 6 new ones the passes read {columns} tokens.",
    )


@generate_cached.requires(
    "the next call starts anew, with another prompt and another batch; 0 tokens give "
    "back the prompt",
    "Whose cache is it? One that outlives the call has to be reset.",
)
def _(answer, case):
    model = Decoder(TWO_BLOCKS, 3200, SURE)
    for batch, size, n in ((3, 4, 3), (2, 6, 2), (3, 2, 5), (1, 3, 0), (3, 4, 3)):
        ids = probe_ids(batch, size, below=23, seed=70 + size)
        actual = case.call(answer, model, ids, n, temperature=0)
        case.equal(actual, greedy(model, ids, n), f"a prompt of {size}: the text")


def drawn(case, answer, model, ids, n, *settings, **named):
    """The text; what is drawn is not recorded, where it would mislead."""
    texts = []

    @wraps(answer)
    def generated(*args, **kwargs):
        texts.append(answer(*args, **kwargs))

    case.call_in_place(generated, model, ids, n, *settings, **named)
    case.is_tensor(texts[0])
    case.equal(texts[0][:, : ids.shape[1]], ids, "the prompt in the text")
    case.equal(tuple(texts[0].shape), (len(ids), ids.shape[1] + n), "the text's shape")
    return texts[0]


def chances(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """The probabilities of a sample by another route than lesson 08's."""
    p = torch.softmax(logits / temperature, -1)
    if top_k is not None:
        p = p.masked_fill(p < p.topk(top_k).values[-1], 0)
        p = p / p.sum()
    if top_p is not None:
        ranked, order = p.sort(descending=True)
        p[order[ranked.cumsum(-1) - ranked >= top_p]] = 0
    return p / p.sum()


def come_as_often(case, answer, model, *settings, **named):
    """Each token comes as often as it should after `START`, to 5.5 deviations."""
    text = drawn(case, answer, model, START.expand(DRAWS, -1), 1, *settings, **named)
    found = torch.bincount(text[:, -1], minlength=23).double() / DRAWS
    wanted = chances(Truth(model)(START)[0, -1], *settings, **named)
    if HOT in (*settings, *named.values()):  # else it is chance which of them come
        case.note(tuple(found.nonzero().flatten().tolist()))
    over = (found - wanted).abs() - 5.5 * (wanted * (1 - wanted) / DRAWS).sqrt()
    token = over.argmax().item()
    case.true(
        over[token] <= 0,
        f"Token {token} came in {found[token]:.1%} of {DRAWS:,} draws, expected "
        f"{wanted[token]:.1%}.",
    )


@generate_cached.requires(
    "the settings of sample are passed on, each under its own name; without names they "
    "are in the order of `sample`, and temperature is 1 and all others None by default",
    "Pass them by name, or in the order that `sample` has. Compare your first line with "
    "the contract, argument by argument.",
)
def _(answer, case):
    sure, less_sure = Decoder(ONE_BLOCK, 3300, SURE), Decoder(ONE_BLOCK, 3300)
    often = partial(come_as_often, case, answer)
    often(less_sure)
    often(less_sure, top_k=2)
    often(sure, temperature=HOT)
    for temperature in (1.0, 0.5):
        often(less_sure, temperature=temperature, top_k=None, top_p=None)
    for change in (
        {"top_p": 1},
        {"top_k": 1},
        {"top_k": 4},
        {"top_p": 0.3},
        {"top_k": 5, "top_p": 0.7},
    ):
        often(sure, **{"temperature": HOT, "top_k": None, "top_p": None} | change)
    often(less_sure, temperature=3.0, top_k=9, top_p=0.8)
    for settings in ((1,), (None, 0.3), (4, None, seeded(4))):
        often(sure, HOT, *settings)
    given = {"temperature": 1.0, "top_k": None, "top_p": None, "padding": None}
    model, many = Decoder(ONE_BLOCK, 3350), START.expand(DRAWS, -1)
    explicit, default = (
        drawn(case, answer, model, many, 1, generator=seeded(4), **settings)
        for settings in (given, {})
    )
    case.true(
        torch.equal(explicit, default),
        "Without settings it draws another text than with temperature 1 and None for "
        "all others.",
    )


@generate_cached.requires(
    "a generator alone decides what is drawn, and two calls in a row draw anew",
    "Who seeds torch inside a function decides for everybody.",
)
def _(answer, case):
    model = Decoder(ONE_BLOCK, 3400, SURE)

    def text(**kind):
        return drawn(case, answer, model, PROMPTS, 5, temperature=HOT, **kind)

    for kind in ({}, {"generator": seeded(6)}):
        case.true(
            not torch.equal(text(**kind), text(**kind)),
            "Two calls in a row drew the same text: something sets the seed in each.",
        )
    texts = []
    for seed, of_torch in ((2, 0), (2, 1), (3, 1)):
        torch.manual_seed(of_torch)
        texts.append(text(generator=seeded(seed)))
    case.true(
        torch.equal(texts[0], texts[1]),
        "Two generators with one seed drew two texts: not all that is drawn comes from "
        "the `generator`.",
    )
    case.true(not torch.equal(texts[1], texts[2]), "Two seeds gave the same text.")


@generate_cached.requires(
    "padding on the left: each row goes on as it would alone",
    "`cached_forward` takes `padding`; in which of the passes does it matter?",
)
def _(answer, case):
    ids, pads = probe_ids(3, 6, below=23, seed=62), [2, 0, 4]
    for c in (TWO_BLOCKS, TWO_GPT2):
        model = Decoder(c, 3500, SURE)
        named = {"temperature": 0, "padding": torch.tensor(pads)}
        actual = case.call(answer, model, ids, 5, **named)
        rows = zip(ids.split(1), pads, strict=True)
        alone = [torch.cat([r[:, :p], greedy(model, r[:, p:], 5)], 1) for r, p in rows]
        case.equal(actual, torch.cat(alone), f"padding {pads}: the text")


@generate_cached.requires(
    "an empty prompt is a ValueError; so is a text that would be longer than max_len, "
    "which names both numbers",
    "Test before the first pass: how long will the text be at the end?",
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
    case.equal(actual, greedy(model, PROMPTS, 12), "exactly max_len: the text")


@generate_cached.requires(
    "it works in the model's dtype and on its device, without gradients; the model is "
    "left as it was, and so is torch",
    "Any parameter of the model tells its dtype and its device. `torch.no_grad()` works "
    "as a decorator, or with `with`.",
)
def _(answer, case):
    model = Decoder(LONG, 3700, SURE).double()
    actual = case.call(answer, model, PROMPTS, 6, temperature=0)
    case.equal(actual, greedy(model, PROMPTS, 6), "in float64: the text")
    with case.unrecorded():
        low = Decoder(LONG_GPT2, 3710, SURE).bfloat16()
        case.call(answer, low, PROMPTS, 3, temperature=0)
    model = Decoder(ONE_BLOCK, 3750, SURE)

    def run():
        text = case.call(answer, model, PROMPTS, 2, temperature=0)
        case.true(not text.requires_grad, "The text carries gradients.")

    left_alone(case, run, model)

    def generate_cached(model, ids):
        try:
            return answer(model, ids, 3, temperature=0)
        except ValueError as error:  # a cache's, which need not use the word
            raise ValueError(f"device: {error}") from error

    case.any_device(generate_cached, model, PROMPTS)


# What it costs ------------------------------------------------------------------------

# No two sizes, and no two of their ratios, are equal.
APART = replace(
    LLAMA, d_model=429, n_layers=5, n_heads=33, n_kv_heads=3, d_head=7, max_len=40
)


def weighed(c, t, batch, dtype):
    """Bytes of tensors that are really made (on no device)."""
    one = torch.empty(batch, c.n_kv_heads, t, c.d_head, dtype=dtype, device="meta")
    return sum(2 * one.nbytes for _ in range(c.n_layers))


def bytes_agree(case, answer, c, t, batch=1, dtype=torch.float16, given=4):
    named = {"t": t, "batch": batch, "dtype": dtype}
    names = ("n_layers", "n_heads", "n_kv_heads", "d_head", "d_model")
    case.sizes = {name: getattr(c, name) for name in names} | named
    case.sizes["dtype"] = dtype.itemsize
    actual = case.call(answer, c, *list(named.values())[: given - 1])
    if type(actual) is not int:
        raise Explained(f"It is of type {type(actual).__name__}, expected an int.")
    case.equal(actual, weighed(c, **named), f"for {c}: the result")


@kv_cache_bytes.requires(
    "keys and values of every layer, row and position, for the KV heads; one row and "
    "two bytes if not given",
    "Write down the shape of the keys of one layer, then count the layers, and what "
    "else is stored.",
)
def _(answer, case):
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        bytes_agree(case, answer, APART, 17, 19, dtype)
    bytes_agree(case, answer, APART, 17, given=2)
    bytes_agree(case, answer, APART, 17, 13, given=3)
    bytes_agree(case, answer, GPT2, 3, 13)
    actual = case.call(answer, config=LLAMA, t=7, batch=2, dtype=torch.float32)
    case.equal(actual, weighed(LLAMA, 7, 2, torch.float32), "by keyword, the result")


@kv_cache_bytes.requires(
    "real models at full length, and beyond it, are exact: Llama 2 7B needs 2 GiB for "
    "4,096 positions; a dtype that is not floating-point is a ValueError that names it",
    "Whole numbers in Python have no end. What turns them into others?",
)
def _(answer, case):
    for c in (LLAMA_7B, LLAMA_3_8B, SMOLLM, GPT2_SMALL):
        bytes_agree(case, answer, c, c.max_len, given=2)
    case.equal(case.call(answer, LLAMA_7B, 4_096), 2**31, "Llama 2 7B, 4,096 positions")
    for given in ((LLAMA_7B, 4_097, 1), (SMOLLM, 1_000_003, 7), (LLAMA, 9_999, 3)):
        for dtype in (torch.float16, torch.float32):
            bytes_agree(case, answer, *given, dtype)
    whole_numbers_refused(case, answer, LLAMA, 7, 1)


# A cache that forgets -----------------------------------------------------------------


def new_rolling(answer, case, n_layers=1, window=4, **kind):
    return new_cache(answer, case, n_layers, window, **kind)


def rolled(case, cache, layer, chunks, when="", window=4):
    """Append the last of `chunks`; compare with a slice of all of them."""
    appended(case, cache, layer, chunks, when, window - 1 + chunks[-1][0].shape[2])


def rolls(case, answer, sizes, window=4, n_layers=1):
    cache = new_rolling(answer, case, n_layers, window)
    chunks, total = [[] for _ in range(n_layers)], 0
    for step, size in enumerate(sizes):
        for layer in range(n_layers):
            when = f"window {window}, chunks {sizes[: step + 1]}, layer {layer}: "
            chunks[layer].append(chunk(size, seed=10 * step + layer))
            rolled(case, cache, layer, chunks[layer], when, window)
            total += size if layer == n_layers - 1 else 0
            length_is(case, cache, total, f"{when}after that")


@RollingKVCache.requires(
    "up to `window` positions it is like a KVCache, and another cache knows nothing of "
    "them",
    "Until it is full there is nothing to forget. What is assigned in the body of the "
    "class belongs to all its objects.",
)
def _(answer, case):
    rolls(case, answer, (2, 1, 1))
    rolls(case, answer, (1, 1, 2), window=5)
    rolls(case, answer, (3,), window=3)
    apart(case, partial(new_rolling, answer, case), rolled)


@RollingKVCache.requires(
    "then each new position takes the place of the oldest, and they come back oldest "
    "first",
    "After 6 positions in a window of 4: which are left, and at which place does your "
    "memory hold each of them?",
)
def _(answer, case):
    rolls(case, answer, (1,) * 11)
    rolls(case, answer, (1,) * 7, window=3)
    rolls(case, answer, (1,) * 4, window=1)


@RollingKVCache.requires(
    "a chunk gets what its first query may see: window − 1 positions from before, then "
    "all of its own",
    "Its first query looks back window − 1 positions, and its last query looks at the "
    "chunk. What is overwritten too early if you store before you look?",
)
def _(answer, case):
    rolls(case, answer, (3, 2, 1, 3, 1))
    rolls(case, answer, (2, 4, 2, 1, 1), window=5)


@RollingKVCache.requires(
    "a chunk as long as the window, or longer, is seen whole, and its last positions "
    "are kept",
    "Only the last `window` of it have a place in memory; the rest is needed now and "
    "never again.",
)
def _(answer, case):
    rolls(case, answer, (9, 1, 1, 2))
    rolls(case, answer, (1, 6, 7, 1), window=3)
    rolls(case, answer, (4, 1, 8, 1, 1))
    rolls(case, answer, (4, 1, 1, 4, 4, 1))
    rolls(case, answer, (1, 3, 3, 1, 2, 3, 2), window=3)
    rolls(case, answer, (2, 1, 1, 3), window=1)


@RollingKVCache.requires(
    "layers do not mix, length counts every position, forgotten ones too, and reset "
    "forgets everything",
    "What does the next text find in memory, and where does it think that it is?",
)
def _(answer, case):
    rolls(case, answer, (2, 1, 3, 1, 6, 1), n_layers=3)
    cache = new_rolling(answer, case, n_layers=2)
    for text, size in enumerate((6, 3, 5)):
        for layer in range(2):
            keys = [chunk(size, seed=20 * text + layer)]
            rolled(case, cache, layer, keys, f"text {text}, layer {layer}: ")
        length_is(case, cache, size, f"text {text}")
        case.call(cache.reset)
        length_is(case, cache, 0, "after reset")


@RollingKVCache.requires(
    "memory stays that of `window` positions, however long the text",
    "Does something still hold what was forgotten? A slice keeps the whole tensor alive.",
)
def _(answer, case):
    for size, window in ((5, 8), (1, 8), (30, 8), (1, 1)):
        cache = new_rolling(answer, case, 2, window, dtype=torch.float64)
        for step in range(12):
            new = chunk(size, seed=step, dtype=torch.float64)
            for layer in range(2):
                case.call(cache.append, layer, *new)
        held, needed = bytes_held(cache), 2 * 2 * 2 * 3 * window * 5 * 8
        case.true(
            held <= needed + 512,
            f"After {12 * size} positions, {size} at a time, it holds {held:,} bytes; a "
            f"window of {window} takes {needed:,}.",
        )


@RollingKVCache.requires(
    "a batch, head count, width, dtype or device that is not the cache's is a "
    "ValueError, and nothing is stored; so is a size below 1 when it is built",
    "The same test as in `KVCache`: before you write, for keys and for values.",
)
def _(answer, case):
    new = partial(new_rolling, answer, case)
    misfits_refused(case, new, rolled)
    small_sizes_refused(case, answer)
    kinds_taken(case, new, rolled)


# The parts of lessons 03, 04 and 08 with a cache --------------------------------------

cached_decoder = IntegrationCheck(
    "cached_decoder",
    lesson="kv_cache",
    parts={
        "attention": "attention",
        "split_heads": "multi_head",
        "merge_heads": "multi_head",
        "MultiHeadAttention": "multi_head",
        "rope": "positions",
        "TransformerConfig": "forward_pass",
        "Transformer": "forward_pass",
        "generate": "forward_pass",
        "KVCache": "kv_cache",
        "chunk_mask": "kv_cache",
        "cached_forward": "kv_cache",
        "generate_cached": "kv_cache",
    },
)


@cached_decoder.requires(
    "heads, rotation, cache and mask in pieces give what MultiHeadAttention gives at once",
    "Do by hand what `cached_forward` does in one layer, chunk by chunk, and compare with "
    "one call of the layer.",
)
def _(parts, case):
    layer = case.call(parts["MultiHeadAttention"], 10, 6, 2, 4)
    cache = case.call(parts["KVCache"], 1, 3, 2, 9, 4)
    x, out = probe(3, 9, 10, seed=801), []

    def whole(x):
        def rotate(heads):
            return parts["rope"](heads, torch.arange(9), 100.0)

        return layer(x, torch.ones(9, 9).tril().bool(), rotate).detach()

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
    case.close(torch.cat(out, 1), case.call(whole, x), "attention in pieces", like=x)


def built(parts, case, fields, seed):
    """A `Transformer` with known weights, in float64."""
    c = case.call(parts["TransformerConfig"], **vars(fields))
    model, weights = (
        case.call(parts["Transformer"], c),
        weights_for(model_shapes(fields), seed),
    )
    load(model, weights)
    return model, doubled(weights)


@cached_decoder.requires(
    "Transformer in one pass and cached_forward through a KVCache give the same logits",
    "Both styles, chunk by chunk. If one style differs: positions; if both: the cache.",
)
def _(parts, case):
    for i, c in enumerate((LONG, LONG_GPT2)):
        model, weights = built(parts, case, c, 820 + 40 * i)
        ids = probe_ids(3, 9, below=23, seed=821)
        expected = slow_decoder(ids, weights, c)
        whole = case.call(model, ids)
        case.close(whole, expected, "the logits of one pass", like=model.head.weight)
        sizes = (c.n_layers, 3, c.n_kv_heads, 12, c.d_head)
        cache = case.call(parts["KVCache"], *sizes)
        run = partial(parts["cached_forward"], model, cache=cache)
        for chunks in ((2, 3, 4), (4, 1, 3, 1)):
            pieces = [case.call(run, piece) for piece in ids.split(chunks, 1)]
            what = f"style {c.style}, chunks {chunks}: the logits"
            case.close(torch.cat(pieces, 1), expected, what, like=model.head.weight)
            case.call(cache.reset)


@cached_decoder.requires(
    "generate and generate_cached write the same text, greedy and drawn",
    "Both draw with your `sample`: with one seed they draw the same tokens as long as "
    "their logits agree.",
)
def _(parts, case):
    for i, c in enumerate((LONG, LONG_GPT2)):
        model = built(parts, case, c, 860 + 40 * i)[0].double()
        for settings in ({"temperature": 0}, {"temperature": 1.5, "top_k": 9}):
            one, other = (
                case.call_in_place(
                    parts[name], model, PROMPTS, 9, generator=seeded(3), **settings
                )
                for name in ("generate", "generate_cached")
            )
            case.equal(other, one, f"with {settings}: the text through the cache")
