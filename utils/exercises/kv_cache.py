"""Lesson 10: the cache, what a query may see of it, and generation through it."""

import math
from collections import deque
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from utils.check.errors import Crashed, Explained, Unmet
from utils.check.recording import Raised
from utils.check.wording import describe
from utils.check.exercise import Exercise, IntegrationCheck
from utils.exercises.forward_pass import (
    ANGLES,
    GPT2,
    GPT2_SMALL,
    LLAMA,
    LLAMA_3_8B,
    LLAMA_7B,
    SMOLLM,
    continued,
    doubled,
    model_shapes,
    normed,
    one_block,
    seeded,
    turned,
    weights_for,
    whole_decoder,
)
from utils.probe import probe, probe_ids, strided

# KVCache ------------------------------------------------------------------------------

KVCache = Exercise("KVCache", lesson="kv_cache")


class Cache:
    """The right cache, for the checks of what uses one, and for faults to spoil."""

    def __init__(
        self, n_layers, batch, n_kv_heads, max_len, d_head, dtype=None, device=None
    ):
        self.sizes = (n_layers, batch, n_kv_heads, max_len, d_head)
        self.refuse_sizes(dtype)
        self.max_len = max_len
        self.take_memory(dtype=self.stored_as(dtype), device=device)
        self.reset()

    def __repr__(self):
        return "a cache"

    def stored_as(self, dtype):
        return dtype

    def take_memory(self, **kind):
        self.k, self.v = (torch.zeros(self.sizes, **kind) for _ in "kv")

    def reset(self):
        self.stops = [0] * self.sizes[0]

    @property
    def length(self):
        return min(self.stops)

    def append(self, layer, k, v):
        self.refuse_layer(layer)
        self.refuse_shape(k, v)
        self.refuse_kind(k, v)
        start, t = self.stops[layer], k.shape[2]
        if self.full(start + t):
            raise ValueError(f"{start + t} are more than {self.max_len}")
        self.write(layer, start, k, v)
        self.advance(layer, t)
        return self.seen(layer, start, t, k, v)

    def full(self, stop):
        return stop > self.max_len

    def write(self, layer, start, k, v):
        self.k[layer, :, :, start : start + k.shape[2]] = k
        self.v[layer, :, :, start : start + k.shape[2]] = v

    def advance(self, layer, t):
        self.stops[layer] += t

    def seen(self, layer, start, t, k, v):
        return self.k[layer, :, :, : start + t], self.v[layer, :, :, : start + t]

    def refuse_sizes(self, dtype):
        if min(self.sizes) < 1:
            raise ValueError(f"a size below 1: {self.sizes}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"not {dtype}")

    def refuse_layer(self, layer):
        if not 0 <= layer < self.sizes[0]:
            raise ValueError(f"{layer} is not below {self.sizes[0]}")

    def refuse_shape(self, k, v):
        _, batch, n_kv_heads, _, d_head = self.sizes
        wanted = (batch, n_kv_heads, k.shape[2], d_head)
        for x in (k, v):
            if x.shape != wanted:
                raise ValueError(f"{tuple(x.shape)} is not {wanted}")

    def refuse_kind(self, k, v):
        for x in (k, v):
            if x.dtype != self.k.dtype or x.device != self.k.device:
                raise ValueError(
                    f"{x.dtype} {x.device}, not {self.k.dtype} {self.k.device}"
                )


def chunk(t, seed=0, batch=2, heads=3, d_head=5, **kind):
    """Keys and values of `t` positions, for the cache that `new_cache` makes."""
    return tuple(probe(batch, heads, t, d_head, seed=seed + i, **kind) for i in (0, 50))


def new_cache(answer, case, n_layers=1, max_len=9, **kind):
    return case.call(answer, n_layers, 2, 3, max_len, 5, **kind)


def length_is(case, cache, expected, when):
    def length():
        return cache.length

    before = case.called
    try:
        found = case.call(length)
    except Crashed:
        case.called = "cache.length"
        raise
    case.called = before  # the call that should have moved it
    if callable(found):
        raise Explained(
            "`length` is a method. It is read without brackets, `cache.length`: make it "
            "a property or an attribute."
        )
    if type(found) is not int:
        raise Explained(
            f"`length` is of type {type(found).__name__}. It counts positions: an int."
        )
    case.equal(found, expected, f"{when}: `length`")


def taken(case, f, *args):
    """`t.call`, where a ValueError is a refusal, in whatever words."""
    try:
        return case.call(f, *args)
    except Crashed as crash:
        if isinstance(crash.error, ValueError):
            case.recording[-1] = "ValueError"
        raise


def appended(case, cache, layer, chunks, when="", seen=None, unwritten=False):
    """Append the last of `chunks`; their last `seen` positions must come back.

    unwritten: a mistake may show memory that nobody has written to, which can hold
        anything, so that its shape alone tells mistakes apart.
    """
    found = taken(case, cache.append, layer, *chunks[-1])
    case.is_tuple(found, 2, "what `append` returns")
    for i, name in ((0, "keys"), (1, "values")):
        what = f"what `append` returns as {name}"
        case.is_tensor(found[i], what)
        expected = torch.cat([each[i] for each in chunks], 2)
        expected = expected if seen is None else expected[:, :, -seen:]
        if unwritten and found[i].shape != expected.shape:
            case.recording[-1] = tuple(tuple(getattr(x, "shape", ())) for x in found)
        case.equal(found[i].detach().clone(), expected, f"{when}{what}")
    return found


def refuses(case, f, *args, because, **kwargs):
    """A ValueError, in whatever words: these do not tell one mistake from another."""
    try:
        case.raises(ValueError, f, *args, because=because, **kwargs)
    except Unmet:
        came = case.recording[-1]
        case.recording[-1] = came.type if isinstance(came, Raised) else "no error"
        raise


def refused(case, new, append, wrong, mentions, because, **kind):
    """`wrong` is a ValueError, and what comes next is stored behind what was there.

    new: makes a cache; append: `appended`, or the same for another cache.
    """
    cache, held = new(**kind), chunk(3, **kind)
    append(case, cache, 0, [held])
    try:
        refuses(case, cache.append, 0, *wrong, mentions=mentions, because=because)
    except Unmet:
        if (
            case.recording[-1] != "ValueError"
        ):  # PyTorch refuses, or not: nobody compared
            case.recording[-1] = "not compared"
        raise
    after = f"after the refused call ({because})"
    length_is(case, cache, 3, after)
    append(case, cache, 0, [held, chunk(2, seed=7, **kind)], f"{after}: ")


def misfits(size, stored=torch.float32, **wrong):
    """A chunk with a wrong size or dtype in both, in the keys, in the values."""
    k, v = chunk(size, dtype=stored)
    wrong_k, wrong_v = chunk(size, **{"dtype": stored, **wrong})
    return (
        ("keys and values", wrong_k, wrong_v),
        ("values", k, wrong_v),
        ("keys", wrong_k, v),
    )


def shapes_refused(case, new, append):
    """Keys and values of another batch, head count or width than the cache's."""
    for wrong, names in (
        (dict(batch=1), (1, 2)),
        (dict(batch=7), (7, 2)),
        (dict(heads=1), (1, 3)),
        (dict(heads=6), (6, 3)),
        (dict(d_head=1), (1, 5)),
        (dict(d_head=4), (4, 5)),
        (dict(d_head=8), (8, 5)),
    ):
        (what,) = wrong
        for which, *misfit in misfits(2, **wrong):
            because = f"{what} {names[0]} of {which} where the cache has {names[1]}"
            refused(case, new, append, misfit, names, because)
    uneven = (chunk(4)[0], chunk(1)[1])
    refused(case, new, append, uneven, (), "4 keys with 1 value")


def dtypes_refused(case, new, append):
    for dtype, other in (
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
    ):
        for which, *misfit in misfits(2, dtype, dtype=other):
            names = (str(dtype)[6:], str(other)[6:])
            because = f"{names[1]} {which} where the cache is {names[0]}"
            refused(case, new, append, misfit, names, because, dtype=dtype)


def devices_refused(case, new, append):
    k, v = (x.to("meta") for x in chunk(2))
    for which, *misfit in (
        ("keys and values", k, v),
        ("values", chunk(2)[0], v),
        ("keys", k, chunk(2)[1]),
    ):
        because = f"{which} on the device `meta` where the cache is on `cpu`"
        refused(case, new, append, misfit, ("meta", "cpu"), because)


def default_dtype_taken(t, new, append):
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        for kind in ({}, dict(dtype=None)):
            append(t, new(**kind), 0, [chunk(2, dtype=dtype)])


def device_taken(case, new):
    for device in ("meta", torch.device("meta")):
        cache = new(device=device)
        k, v = (x.to("meta") for x in chunk(2))
        for _ in range(3):
            found = case.call_in_place(cache.append, 0, k, v)
            case.is_tuple(found, 2, "what `append` returns")
            case.true(
                all(x.device.type == "meta" for x in found),
                "The cache was built with a `device`, and what it returns is on "
                "another.",
            )


@KVCache.requires(
    "keys and values that are appended to an empty layer come back, and length counts "
    "their positions",
    "Which slice of your buffer holds what has been stored so far?",
)
def _(answer, case):
    cache = new_cache(answer, case)
    length_is(case, cache, 0, "a new cache")
    appended(case, cache, 0, [chunk(4)])
    length_is(case, cache, 4, "after 4 positions")


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
            length_is(
                case, cache, sum(sizes[: i + 1]), f"after chunks {sizes[: i + 1]}"
            )


@KVCache.requires(
    "every layer has memory of its own",
    "A pass through three layers appends three times, to the same positions of three "
    "layers.",
)
def _(answer, case):
    cache = new_cache(answer, case, n_layers=3)
    chunks = [[], [], []]
    for step, size in enumerate((2, 1, 3)):
        for layer in range(3):
            chunks[layer].append(chunk(size, seed=10 * step + layer))
            appended(
                case, cache, layer, chunks[layer], f"layer {layer}: ", unwritten=True
            )
    length_is(case, cache, 6, "after passes of 2, 1 and 3")


@KVCache.requires(
    "length moves once all layers have written",
    "The text has grown by one chunk, and `append` was called for each layer. Which of "
    "these calls may move `length`?",
)
def _(answer, case):
    cache, found = new_cache(answer, case, n_layers=3, max_len=30), []
    for step, size in enumerate((2, 1, 3)):
        for layer in range(3):
            case.call(cache.append, layer, *chunk(size, seed=10 * step + layer))
            case.recording.pop()
            found.append(cache.length)
    case.note(tuple(found))
    expected = [0, 0, 2, 2, 2, 3, 3, 3, 6]
    case.equal(
        found, expected, "`length` after each call, chunks of 2, 1, 3, three layers"
    )


@KVCache.requires(
    "reset starts again at position 0, in every layer, and shows nothing of what was "
    "there",
    "What must be set back so that the next `append` writes to position 0?",
)
def _(answer, case):
    cache = new_cache(answer, case, n_layers=2)
    for round_, size in enumerate((5, 3, 9)):
        for layer in range(2):
            keys = [chunk(size, seed=20 * round_ + layer)]
            appended(case, cache, layer, keys, f"text {round_}, layer {layer}: ")
        length_is(case, cache, size, f"text {round_}")
        case.call(cache.reset)
    length_is(case, cache, 0, "after reset")


@KVCache.requires(
    "max_len positions fit; one more is a ValueError that names both numbers, and "
    "nothing is stored",
    "Compare the position after the last new one with max_len, before you write.",
)
def _(answer, case):
    cache = new_cache(answer, case)
    appended(case, cache, 0, [chunk(7)])
    refuses(
        case,
        cache.append,
        0,
        *chunk(6, seed=1),
        mentions=(13, 9),
        because="13 positions where max_len is 9",
    )
    length_is(case, cache, 7, "after the refused call")
    appended(case, cache, 0, [chunk(7), chunk(2, seed=2)], "after the refused call: ")
    for sizes in ((9,), (4, 5), (7, 1, 1)):
        cache = new_cache(answer, case)
        chunks = []
        for i, size in enumerate(sizes):
            chunks.append(chunk(size, seed=i))
            appended(case, cache, 0, chunks)
        refuses(
            case,
            cache.append,
            0,
            *chunk(1),
            mentions=(10, 9),
            because="10 positions where max_len is 9",
        )
        length_is(case, cache, 9, "after the refused call")


@KVCache.requires(
    "a batch, a head count or a width that is not the cache's is a ValueError that "
    "names both",
    "One row is copied into all rows without a word: PyTorch broadcasts. Compare the "
    "shapes before you write.",
)
def _(answer, case):
    shapes_refused(case, partial(new_cache, answer, case), appended)


@KVCache.requires(
    "a layer that the cache does not have is a ValueError that names it",
    "A negative index counts from the end, and so hits another layer.",
)
def _(answer, case):
    cache = new_cache(answer, case, n_layers=3)
    for layer in (3, -1):
        refuses(
            case,
            cache.append,
            layer,
            *chunk(2),
            mentions=(layer,),
            because=f"layer {layer} of a cache of 3",
        )
    length_is(case, cache, 0, "after the refused calls")


@KVCache.requires(
    "it stores in the dtype it was built with; other keys or values are a ValueError "
    "that names both dtypes",
    "Assigning to a slice converts without a word.",
)
def _(answer, case):
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        cache = new_cache(answer, case, dtype=dtype)
        chunks = [chunk(2, dtype=dtype), chunk(3, seed=1, dtype=dtype)]
        appended(case, cache, 0, chunks[:1])
        appended(case, cache, 0, chunks)
    dtypes_refused(case, partial(new_cache, answer, case), appended)


@KVCache.requires(
    "without a dtype it stores in torch's default, whatever that is at the time",
    "`torch.zeros` without a dtype takes the default by itself.",
)
def _(answer, case):
    default_dtype_taken(case, partial(new_cache, answer, case), appended)


@KVCache.requires(
    "it stores on the device it was built for; keys or values on another are a "
    "ValueError that names both devices",
    "`torch.zeros(…, device=device)`, and compare devices before you write.",
)
def _(answer, case):
    new = partial(new_cache, answer, case)
    device_taken(case, new)
    devices_refused(case, new, appended)


def whole_numbers_refused(case, f, *args):
    """`f` refuses dtypes that are not floating-point; which it lets in says little."""
    problem, outcomes, before = None, [], len(case.recording)
    with case.unrecorded():
        for dtype in (torch.int64, torch.uint8, torch.bool, torch.int8, torch.int32):
            name = str(dtype)[6:]
            try:
                because = f"dtype {dtype}"
                refuses(case, f, *args, dtype=dtype, mentions=(name,), because=because)
            except Unmet as unmet:
                if problem is None:
                    problem, called = unmet, case.called
            outcomes.append(case.recording[-1])
        if problem is not None:
            case.called = called
            del case.recording[before:]
            case.note(outcomes[0] if len(set(outcomes)) == 1 else "some refused")
            raise problem


def small_sizes_refused(answer, case):
    for size in (0, -1, -7):
        for i in range(5):
            sizes = [4, 2, 3, 9, 5]
            sizes[i] = size
            refuses(
                case,
                answer,
                *sizes,
                mentions=(size,),
                because=f"a size of {size} (argument {i + 1})",
            )


@KVCache.requires(
    "sizes below 1 and dtypes that are not floating-point are a ValueError when it is "
    "built",
)
def _(answer, case):
    small_sizes_refused(answer, case)
    whole_numbers_refused(case, answer, 1, 2, 3, 9, 5)


@KVCache.requires(
    "memory is taken once: append returns views of it, it copies nothing that was there",
    "`torch.cat` makes a new tensor at each step and copies everything. What does a "
    "slice of a tensor make?",
)
def _(answer, case):
    cache, places, alive = new_cache(answer, case, max_len=30), [], []
    for size in (1, 4, 1, 20, 2, 0, 3, 5):
        if size == 0:
            case.call(cache.reset)
            continue
        found = case.call(cache.append, 0, *chunk(size))
        case.is_tuple(found, 2, "what `append` returns")
        places.append([x.untyped_storage().data_ptr() for x in found])
        places[-1] += [x.data_ptr() for x in found]
        alive.append(found)  # or its memory could be given out again
    case.true(
        all(p == places[0] for p in places[:5]),
        "What `append` returned lies at another place in memory each time.",
    )
    case.true(
        all(p == places[0] for p in places),
        "After `reset` what `append` returns lies at another place in memory.",
    )


@KVCache.requires(
    "no more memory is taken than max_len positions need",
    "Multiply the sizes: how many numbers are the keys, and how many the values?",
)
def _(answer, case):
    cache, held = new_cache(answer, case, n_layers=2, max_len=200), {}
    tensors_in(cache, held)
    for layer in range(2):
        tensors_in(case.call(cache.append, layer, *chunk(3)), held)
    needed = 2 * 2 * 2 * 3 * 200 * 5 * 4
    case.true(
        sum(held.values()) <= needed + 2_000,
        f"It holds {sum(held.values()):,} bytes; keys and values of 200 positions are "
        f"{needed:,}.",
    )


@KVCache.requires(
    "two caches know nothing of each other",
    "What is assigned in the body of the class belongs to all its objects.",
)
def _(answer, case):
    apart(
        answer, case, new_cache, lambda cache, chunks: appended(case, cache, 0, chunks)
    )


def apart(answer, case, new, append):
    """Two caches of one size in turn, each with a text of its own."""
    one, other = new(answer, case), new(answer, case)
    chunks = [[], []]
    for step in range(3):
        for i, cache in enumerate((one, other)):
            chunks[i].append(chunk(1, seed=30 * i + step))
            append(cache, chunks[i])
            length_is(case, cache, step + 1, f"cache {i + 1} of two")
    case.call(one.reset)
    length_is(case, other, 3, "another cache after a reset")
    append(other, [*chunks[1], chunk(1, seed=99)])


def tensors_in(value, seen=None, looked_at=()):
    """Bytes of every tensor that an object holds, by the storage that it keeps alive."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    elif not isinstance(value, type) and id(value) not in looked_at:
        if isinstance(value, dict):
            parts = value.values()
        elif isinstance(value, (list, tuple, set, deque)):
            parts = value
        else:  # an object: what it has in its dictionary, and in slots
            slots = (getattr(c, "__slots__", ()) for c in type(value).__mro__)
            named = (getattr(value, n, None) for each in slots for n in tuple(each))
            parts = [*getattr(value, "__dict__", {}).values(), *named]
        for part in parts:
            tensors_in(part, seen, (*looked_at, id(value)))
    return seen


@KVCache.requires("strided keys can be stored, and nothing is on another device")
def _(answer, case):
    k, v = (strided(x) for x in chunk(3))
    cache = new_cache(answer, case)
    appended(case, cache, 0, [(k, v)])

    def stored(k, v):
        cache = answer(1, 2, 3, 9, 5, dtype=k.dtype, device=k.device)
        return cache.append(0, k, v)[1]

    case.any_device(stored, *chunk(2))


def spoiled(task, base, name, sentence, **methods):
    task.fault(name, sentence, type(task.name, (base,), methods))


# chunk_mask ---------------------------------------------------------------------------

masking = Exercise("chunk_mask", lesson="kv_cache")


def slow_mask(t_q, t_k, padding=None):
    """Place by place."""
    rows = [0] if padding is None else padding.tolist()
    return torch.tensor(
        [
            [
                [[pad <= j <= i + t_k - t_q for j in range(t_k)] for i in range(t_q)]
            ]
            for pad in rows
        ]
    )  # fmt: skip


def mask_agrees(case, answer, *args, **kwargs):
    actual = case.call(answer, *args, **kwargs)
    case.is_tensor(actual)
    what = f"for {', '.join(str(a) for a in args[:2])}: the mask"
    case.equal(actual, slow_mask(*args, *kwargs.values()), what)


@masking.requires(
    "a first chunk: every query sees itself and what came before, (1, 1, t_q, t_k)",
    "Print it: row = query, column = key, True = may look.",
)
def _(answer, case):
    mask_agrees(case, answer, 4, 4)
    mask_agrees(case, answer, 1, 1)
    mask_agrees(case, answer, 6, 6)


@masking.requires(
    "behind a prefix the queries are the last of the keys' positions",
    "A query of the chunk sees the whole prefix and its own chunk up to itself. Which "
    "corner of the matrix must the diagonal end in?",
)
def _(answer, case):
    for sizes in ((2, 5), (3, 4), (1, 7), (4, 9)):
        mask_agrees(case, answer, *sizes)


@masking.requires(
    "nobody sees the padding at the start of a row, and each row has its own",
    "Padding makes some keys invisible, whatever query asks. Compare the keys' columns "
    "with `padding[:, None]`.",
)
def _(answer, case):
    for sizes, padding in (
        ((4, 4), [0, 2, 1]),
        ((2, 6), [3, 0]),
        ((1, 5), [2, 0, 4]),
        ((3, 8), [1, 5, 6, 0]),
        ((5, 5), [0]),
        ((2, 6), [0, 0, 0]),
        ((4, 4), [0, 0]),
    ):
        mask_agrees(case, answer, *sizes, torch.tensor(padding))
    mask_agrees(case, answer, 2, 5, padding=torch.tensor([2, 1]))


@masking.requires(
    "a padding token itself may look at nothing",
    "The course's attention gives zeros for such a row, so nothing has to be let in.",
)
def _(answer, case):
    mask_agrees(case, answer, 5, 5, torch.tensor([3, 1]))
    mask_agrees(case, answer, 3, 4, torch.tensor([4, 0, 2]))


@masking.requires(
    "sizes of any kind, and padding in any dtype of whole numbers",
    "Make the mask for the sizes that are asked for. A table of a fixed size ends.",
)
def _(answer, case):
    for sizes in ((66, 66), (2, 300), (1, 5_000)):
        mask_agrees(case, answer, *sizes)
    mask_agrees(case, answer, 3, 300, torch.tensor([0, 140]))
    for dtype in (torch.int32, torch.int8, torch.int16, torch.uint8):
        mask_agrees(case, answer, 2, 6, torch.tensor([3, 0, 1], dtype=dtype))
        mask_agrees(case, answer, 1, 300, torch.tensor([0, 90], dtype=dtype))


@masking.requires("more queries than keys are a ValueError that names both numbers")
def _(answer, case):
    for padding in (None, torch.tensor([1, 0])):
        case.raises(
            ValueError,
            answer,
            13,
            8,
            padding,
            mentions=(13, 8),
            because="13 queries with 8 keys",
        )


@masking.requires("it creates nothing on another device")
def _(answer, case):
    mask_agrees(case, answer, 3, 5, torch.tensor([1, 2]))
    case.any_device(answer, 3, 5, torch.tensor([1, 2]))


def mask_that(
    past=lambda i, j, t_q, t_k: j <= i + t_k - t_q,
    real=lambda i, j, t_q, t_k, pad: j >= pad,
    last=lambda mask: mask,
    checks=True,
):
    """A mask made of two rules, for the faults to change one."""

    def chunk_mask(t_q, t_k, padding=None):
        if checks and t_q > t_k:
            raise ValueError(f"{t_q} > {t_k}")
        i, j = torch.arange(t_q)[:, None], torch.arange(t_k)
        mask = (past(i, j, t_q, t_k) & (j >= 0))[None, None]
        if padding is not None:
            mask = mask.to(padding.device)
            i, j = i.to(padding.device), j.to(padding.device)
            mask = mask & real(i, j, t_q, t_k, padding[:, None, None, None])
        return last(mask)

    return chunk_mask


for name, sentence, wrong in (
    (
        "top_left",
        "The diagonal starts in the upper left corner: with a prefix, the first query of "
        "the chunk sees one key. The queries are the *last* positions.",
        mask_that(past=lambda i, j, t_q, t_k: j <= i),
    ),
    (
        "everything_visible",
        "There is a cache, so there is no mask? The tokens of a chunk must not see each "
        "other's future.",
        mask_that(past=lambda i, j, t_q, t_k: j < t_k + i),
    ),
    (
        "prefix_open_chunk_open",
        "With a prefix everything is visible, the chunk's own future too.",
        mask_that(past=lambda i, j, t_q, t_k: j <= i + (t_k - t_q) * t_k),
    ),
    (
        "prefix_hidden",
        "The chunk sees itself and nothing of the prefix, which is what the cache is for.",
        mask_that(past=lambda i, j, t_q, t_k: (j <= i + t_k - t_q) & (j >= t_k - t_q)),
    ),
    (
        "itself_hidden",
        "The diagonal is hidden: a query sees its own position too.",
        mask_that(past=lambda i, j, t_q, t_k: j < i + t_k - t_q),
    ),
    (
        "one_ahead",
        "Each query sees one position ahead.",
        mask_that(past=lambda i, j, t_q, t_k: j <= i + t_k - t_q + 1),
    ),
    (
        "upside_down",
        "The future is visible and the past is not.",
        mask_that(past=lambda i, j, t_q, t_k: j >= i + t_k - t_q),
    ),
    (
        "inverted",
        "True marks what is hidden. In this course True means “may look”.",
        mask_that(last=lambda mask: ~mask),
    ),
    (
        "square",
        "The mask covers the chunk alone, `(t_q, t_q)`. The keys are those of the prefix "
        "too.",
        mask_that(last=lambda mask: mask[..., -mask.shape[-2] :]),
    ),
    (
        "without_head_dimension",
        "The dimensions for batch and heads are missing: `(1, 1, t_q, t_k)`.",
        mask_that(last=lambda mask: mask.squeeze(1).squeeze(0)),
    ),
    (
        "numbers",
        "The mask holds numbers. It should be boolean.",
        mask_that(last=lambda mask: mask.float()),
    ),
    (
        "additive",
        "These are numbers to be added to the scores, 0 and −inf. This course's masks "
        "are boolean, True = may look.",
        mask_that(
            last=lambda mask: torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        ),
    ),
    (
        "padding_on_the_right",
        "The padding is taken for the end of the row. It stands on the left, so that all "
        "rows end, and go on, in the same column.",
        mask_that(real=lambda i, j, t_q, t_k, pad: j < t_k - pad),
    ),
    (
        "padding_taken_for_lengths",
        "`padding` is read as the number of real tokens. It counts the padding before "
        "them.",
        mask_that(real=lambda i, j, t_q, t_k, pad: j < pad),
    ),
    (
        "padding_off_by_one",
        "The first real token is hidden: columns 0 to padding − 1 are the padding.",
        mask_that(real=lambda i, j, t_q, t_k, pad: j > pad),
    ),
    (
        "last_padding_visible",
        "The last padding token is visible: columns 0 to padding − 1 are the padding.",
        mask_that(real=lambda i, j, t_q, t_k, pad: j >= pad - 1),
    ),
    (
        "padding_of_the_first_row",
        "Every row gets the padding of the first.",
        mask_that(real=lambda i, j, t_q, t_k, pad: j >= pad[:1] + 0 * pad),
    ),
    (
        "padding_ignored",
        "The padding is visible.",
        mask_that(real=lambda i, j, t_q, t_k, pad: (j >= 0) | (pad < 0)),
    ),
    (
        "queries_hidden",
        "The padding is hidden as queries, that is as rows of the mask. As keys, columns, "
        "everybody still sees it.",
        mask_that(real=lambda i, j, t_q, t_k, pad: (i + t_k - t_q >= pad) & (j >= 0)),
    ),
    (
        "padding_counted_from_the_chunk",
        "The padding is looked for at the start of the chunk. It is at the start of the "
        "text, in the cache.",
        mask_that(
            real=lambda i, j, t_q, t_k, pad: (j < t_k - t_q) | (j >= pad + t_k - t_q)
        ),
    ),
    (
        "padding_sees_itself",
        "A padding token sees itself. It may look at nothing here; the course's "
        "attention gives zeros then.",
        mask_that(real=lambda i, j, t_q, t_k, pad: (j >= pad) | (j == i + t_k - t_q)),
    ),
    (
        "too_many_queries_unchecked",
        "More queries than keys are accepted. The queries are the last of the keys' "
        "positions, so that cannot be.",
        mask_that(checks=False),
    ),
):
    masking.fault(name, sentence, wrong)


def in_the_dtype_of_padding(i, j, t_q, t_k, pad):
    return j.to(pad.dtype) >= pad


for name, sentence, wrong in (
    (
        "columns_in_the_dtype_of_padding",
        "The columns are numbered in the dtype of `padding`, which may end at 127. "
        "`torch.arange` without a dtype counts on.",
        mask_that(real=in_the_dtype_of_padding),
    ),
    (
        "table_of_64",
        "It is cut from a table of a fixed size.",
        lambda t_q, t_k, padding=None: mask_that()(
            *((min(t_q, 64), 64) if t_k > 64 else (t_q, t_k)), padding
        ),
    ),
    (
        "no_rows_without_padding",
        "If nobody has padding, `(1, 1, t_q, t_k)` comes back. With `padding` it is "
        "`(B, 1, t_q, t_k)`, zeros or not.",
        lambda t_q, t_k, padding=None: mask_that()(
            t_q, t_k, padding if padding is None or padding.any() else None
        ),
    ),
):
    masking.fault(name, sentence, wrong)


# kv_cache_bytes -----------------------------------------------------------------------

counting = Exercise("kv_cache_bytes", lesson="kv_cache")


def weighed(c, t, batch, dtype):
    """Bytes of tensors that are really made (on no device)."""
    one = torch.empty(batch, c.n_kv_heads, t, c.d_head, dtype=dtype, device="meta")
    return sum(2 * one.nbytes for _ in range(c.n_layers))


def bytes_agree(case, answer, c, length, batch=1, dtype=torch.float16):
    actual = case.call(answer, c, length, batch, dtype)
    expected = weighed(c, length, batch, dtype)
    case.equal(actual, expected, f"for {length} positions of {c}, it")
    case.true(type(actual) is int, f"It is {type(actual).__name__}, expected an int.")


@counting.requires(
    "keys and values of every layer and position, for the KV heads",
    "Write down the shape of the keys of one layer, then count the layers, and what "
    "else is stored.",
)
def _(answer, case):
    bytes_agree(case, answer, LLAMA, 13)
    bytes_agree(case, answer, replace(LLAMA, n_kv_heads=1, n_layers=5), 11)
    bytes_agree(case, answer, GPT2, 3)


@counting.requires("batch and dtype count, one row and two bytes if not given")
def _(answer, case):
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        bytes_agree(case, answer, LLAMA, 7, 13, dtype)
    for given in ((), (3,)):
        actual = case.call(answer, LLAMA, 7, *given)
        expected = weighed(LLAMA, 7, *(given or (1,)), torch.float16)
        case.equal(
            actual, expected, f"without a dtype, batch {given or 'not given'}: it"
        )
    actual = case.call(answer, config=LLAMA, t=7, batch=2, dtype=torch.float32)
    case.equal(actual, weighed(LLAMA, 7, 2, torch.float32), "by keyword, it")


@counting.requires("real models at full length: Llama 2 7B needs 2 GiB for 4,096")
def _(answer, case):
    for c in (LLAMA_7B, LLAMA_3_8B, SMOLLM, GPT2_SMALL):
        bytes_agree(case, answer, c, c.max_len)
    case.equal(case.call(answer, LLAMA_7B, 4_096), 2**31, "Llama 2 7B, 4,096 positions")


@counting.requires(
    "large numbers are exact, more positions than max_len count too",
    "Whole numbers in Python have no end. What turns them into others?",
)
def _(answer, case):
    for c, n, batch in (
        (LLAMA_7B, 4_097, 1),
        (SMOLLM, 1_000_003, 7),
        (LLAMA, 9_999, 3),
    ):
        for dtype in (torch.float16, torch.float32):
            bytes_agree(case, answer, c, n, batch, dtype)


@counting.requires("a dtype that is not floating-point is a ValueError that names it")
def _(answer, case):
    whole_numbers_refused(case, answer, LLAMA, 7, 1)


def bytes_by(formula):
    def kv_cache_bytes(config, t, batch=1, dtype=torch.float16):
        if not dtype.is_floating_point:
            raise ValueError(f"not {dtype}")
        return formula(config, t, batch, dtype.itemsize)

    return kv_cache_bytes


for name, sentence, formula in (
    (
        "keys_alone",
        "Only the keys are counted, or only the values: half of it.",
        lambda c, t, b, size: c.n_layers * c.n_kv_heads * c.d_head * t * b * size,
    ),
    (
        "query_heads",
        "It counts `n_heads`. Keys and values have `n_kv_heads`, which is the point of "
        "sharing them.",
        lambda c, t, b, size: 2 * c.n_layers * c.n_heads * c.d_head * t * b * size,
    ),
    (
        "queries_too",
        "Queries are counted too. They are used once, and nobody asks for them again.",
        lambda c, t, b, size: (
            c.n_layers * (c.n_heads + 2 * c.n_kv_heads) * c.d_head * t * b * size
        ),
    ),
    (
        "group_size",
        "It multiplies by the group size, the query heads that share a KV head. Counted "
        "are the KV heads.",
        lambda c, t, b, size: (
            2 * c.n_layers * (c.n_heads // c.n_kv_heads) * c.d_head * t * b * size
        ),
    ),
    (
        "width_of_the_stream",
        "It counts d_model numbers for a key. A layer stores n_kv_heads · d_head.",
        lambda c, t, b, size: 2 * c.n_layers * c.d_model * t * b * size,
    ),
    (
        "width_of_the_stream_shared",
        "It takes d_model // n_heads for the width of a head; `d_head` need not be that.",
        lambda c, t, b, size: (
            2 * c.n_layers * c.n_kv_heads * (c.d_model // c.n_heads) * t * b * size
        ),
    ),
    (
        "one_layer",
        "One layer is counted; every layer has keys and values of its own.",
        lambda c, t, b, size: 2 * c.n_kv_heads * c.d_head * t * b * size,
    ),
    (
        "always_two_bytes",
        "Every number counts two bytes, whatever the dtype.",
        lambda c, t, b, size: 4 * c.n_layers * c.n_kv_heads * c.d_head * t * b,
    ),
    (
        "always_four_bytes",
        "Every number counts four bytes, whatever the dtype.",
        lambda c, t, b, size: 8 * c.n_layers * c.n_kv_heads * c.d_head * t * b,
    ),
    (
        "bits",
        "These are bits, eight times as many.",
        lambda c, t, b, size: 16 * c.n_layers * c.n_kv_heads * c.d_head * t * b * size,
    ),
    (
        "numbers",
        "This is how many numbers there are. Each takes `dtype.itemsize` bytes.",
        lambda c, t, b, size: 2 * c.n_layers * c.n_kv_heads * c.d_head * t * b,
    ),
    (
        "batch_ignored",
        "The batch is not counted.",
        lambda c, t, b, size: 2 * c.n_layers * c.n_kv_heads * c.d_head * t * size,
    ),
    (
        "max_len_for_t",
        "It counts `max_len` positions; asked for are `t`.",
        lambda c, t, b, size: (
            2 * c.n_layers * c.n_kv_heads * c.d_head * c.max_len * b * size
        ),
    ),
    (
        "quadratic",
        "It grows with t². A cache holds keys and values, not the scores between them.",
        lambda c, t, b, size: 2 * c.n_layers * c.n_kv_heads * t * t * b * size,
    ),
    (
        "counted_twice",
        "It is twice too much: both keys and values are counted twice.",
        lambda c, t, b, size: 4 * c.n_layers * c.n_kv_heads * c.d_head * t * b * size,
    ),
    (
        "megabytes",
        "This is in units of 2²⁰ bytes; the result is in bytes, an int.",
        lambda c, t, b, size: (
            2 * c.n_layers * c.n_kv_heads * c.d_head * t * b * size / 2**20
        ),
    ),
    (
        "clipped_to_max_len",
        "No more than `max_len` positions are counted. Asked for are `t`.",
        lambda c, t, b, size: (
            2 * c.n_layers * c.n_kv_heads * c.d_head * min(t, c.max_len) * b * size
        ),
    ),
    (
        "counted_in_float32",
        "It is rounded: float32 holds whole numbers up to 2²⁴ exactly. Count in "
        "Python's own.",
        lambda c, t, b, size: int(
            torch.tensor(
                2.0 * c.n_layers * c.n_kv_heads * c.d_head * t * b * size,
                dtype=torch.float32,
            )
        ),
    ),
    (
        "float",
        "It is a float. Bytes are counted in whole numbers: divide with `//`, or not "
        "at all.",
        lambda c, t, b, size: float(
            2 * c.n_layers * c.n_kv_heads * c.d_head * t * b * size
        ),
    ),
):
    counting.fault(name, sentence, bytes_by(formula))


# RollingKVCache -----------------------------------------------------------------------

RollingKVCache = Exercise("RollingKVCache", lesson="kv_cache")


class Rolling(Cache):
    """The right one, for the faults to spoil: keeps tensors by concatenation."""

    @property
    def window(self):
        return self.max_len

    def take_memory(self, **kind):
        self.k = torch.zeros(1, **kind)  # knows dtype and device

    def reset(self):
        self.kept = [None] * self.sizes[0]
        self.stops = [0] * self.sizes[0]

    def append(self, layer, k, v):
        self.refuse_shape(k, v)
        self.refuse_kind(k, v)
        old = self.kept[layer] or (k[:, :, :0], v[:, :, :0])
        self.stops[layer] += k.shape[2]
        both = [torch.cat(pair, 2) for pair in zip(old, (k, v), strict=True)]
        self.kept[layer] = [self.keep(x).clone() for x in both]
        return tuple(self.shown(x, k.shape[2]) for x in both)

    def keep(self, x):
        return x[:, :, -self.window :]

    def shown(self, x, t):
        return x[:, :, -(self.window - 1 + t) :]


def new_rolling(answer, case, n_layers=1, window=4, **kind):
    return case.call(answer, n_layers, 2, 3, window, 5, **kind)


def rolled(case, cache, layer, chunks, when="", window=4):
    """Append the last of `chunks`; compare with a slice of all of them."""
    appended(case, cache, layer, chunks, when, window - 1 + chunks[-1][0].shape[2])


def rolls(case, answer, sizes, window=4, n_layers=1, **kind):
    cache = new_rolling(answer, case, n_layers, window, **kind)
    chunks, total = [[] for _ in range(n_layers)], 0
    for step, size in enumerate(sizes):
        for layer in range(n_layers):
            chunks[layer].append(chunk(size, seed=10 * step + layer, **kind))
            when = f"window {window}, chunks {sizes[: step + 1]}, layer {layer}: "
            rolled(case, cache, layer, chunks[layer], when, window)
            if layer < n_layers - 1:
                length_is(case, cache, total, f"{when}not yet all layers")
        total += size
        length_is(
            case, cache, total, f"window {window}, after chunks {sizes[: step + 1]}"
        )
    return cache


@RollingKVCache.requires(
    "up to `window` positions it is like a KVCache",
    "Until it is full there is nothing to forget.",
)
def _(answer, case):
    rolls(case, answer, (1, 1, 1, 1))
    rolls(case, answer, (2, 1), window=5)
    rolls(case, answer, (3,), window=3)


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
    "a chunk longer than the window is seen whole, and its last positions are kept",
    "Only the last `window` of it have a place in memory; the rest is needed now and "
    "never again.",
)
def _(answer, case):
    rolls(case, answer, (9, 1, 1, 2))
    rolls(case, answer, (1, 6, 7, 1), window=3)
    rolls(case, answer, (4, 1, 8, 1, 1))


@RollingKVCache.requires(
    "a chunk exactly as long as the window, behind others and first of all",
    "All places are written anew. What does the next position find?",
)
def _(answer, case):
    rolls(case, answer, (4, 1, 1, 4, 4, 1))
    rolls(case, answer, (1, 3, 3, 1, 2, 3, 2), window=3)
    rolls(case, answer, (2, 1, 1, 3), window=1)


@RollingKVCache.requires(
    "layers do not mix; length counts every position, forgotten ones too"
)
def _(answer, case):
    rolls(case, answer, (2, 1, 3, 1, 6, 1), n_layers=3)


@RollingKVCache.requires("reset forgets everything")
def _(answer, case):
    cache = new_rolling(answer, case, n_layers=2)
    for round_, size in enumerate((6, 3, 5)):
        for layer in range(2):
            keys = [chunk(size, seed=20 * round_ + layer)]
            rolled(case, cache, layer, keys, f"text {round_}, layer {layer}: ")
        length_is(case, cache, size, f"text {round_}")
        case.call(cache.reset)
        length_is(case, cache, 0, "after reset")


@RollingKVCache.requires(
    "memory stays that of `window` positions, however long the text",
    "Does something still hold what was forgotten? A slice keeps the whole tensor alive.",
)
def _(answer, case):
    for size, window in ((5, 8), (1, 8), (30, 8), (1, 1)):
        cache = new_rolling(answer, case, 2, window, dtype=torch.float64)
        halfway = 0
        for step in range(12):
            for layer in range(2):
                new = chunk(size, seed=step, dtype=torch.float64)
                case.call(cache.append, layer, *new)
            held = sum(tensors_in(cache).values())
            halfway = held if step == 9 else halfway
        case.note(held > halfway)
        needed = 2 * 2 * 2 * 3 * window * 5 * 8
        case.true(
            held <= needed + 512,
            f"After {12 * size} positions, {size} at a time, it holds {held:,} bytes; a "
            f"window of {window} takes {needed:,}.",
        )


@RollingKVCache.requires(
    "a batch, head count, width, dtype or device that is not the cache's is a "
    "ValueError, and nothing is stored",
    "The same test as in `KVCache`: before you write, for keys and for values.",
)
def _(answer, case):
    new = partial(new_rolling, answer, case)
    shapes_refused(case, new, rolled)
    dtypes_refused(case, new, rolled)
    for dtype in (torch.float64, torch.bfloat16):
        rolls(case, answer, (3, 3, 1), dtype=dtype)
    default_dtype_taken(case, new, rolled)
    torch.set_default_dtype(torch.float32)
    device_taken(case, new)
    devices_refused(case, new, rolled)


@RollingKVCache.requires(
    "two caches know nothing of each other",
    "What is assigned in the body of the class belongs to all its objects.",
)
def _(answer, case):
    apart(
        answer, case, new_rolling, lambda cache, chunks: rolled(case, cache, 0, chunks)
    )


@RollingKVCache.requires(
    "a window or another size below 1 is a ValueError when it is built",
    "A window of 0 would look at nothing: refuse it in `__init__`, by its number.",
)
def _(answer, case):
    small_sizes_refused(answer, case)


# Mistakes of either cache -------------------------------------------------------------


def refuse_larger(self, k, v):
    for x in (k, v):
        if x.dtype.itemsize > self.k.dtype.itemsize:
            raise ValueError(f"{x.dtype} is not {self.k.dtype}")


def refuse_dtype(self, k, v):
    for x in (k, v):
        if x.dtype != self.k.dtype:
            raise ValueError(f"{x.dtype} is not {self.k.dtype}")


def count_then_refuse(self, k, v):
    self.stops[0] += k.shape[2]
    Cache.refuse_shape(self, k, v)
    self.stops[0] -= k.shape[2]


def refuse_zero(self, dtype):
    positive = SimpleNamespace(sizes=[abs(size) for size in self.sizes])
    Cache.refuse_sizes(positive, dtype)


for name, sentence, methods in (
    (
        "values_are_keys",
        "The keys are stored as values too.",
        lambda base: dict(
            append=lambda self, layer, k, v: base.append(self, layer, k, k)
        ),
    ),
    (
        "length_of_the_first_layer",
        "`length` moves as soon as the first layer has written. Whoever reads it in the "
        "middle of a pass gets positions one chunk too far.",
        lambda base: dict(length=property(lambda self: self.stops[0])),
    ),
    (
        "no_reset",
        "`reset` changes nothing: the next text is stored behind the last one, and sees "
        "it.",
        lambda base: dict(
            reset=lambda self: None if hasattr(self, "stops") else base.reset(self)
        ),
    ),
    (
        "shape_unchecked",
        "Shapes are not compared: one row, or one head, is copied into all without a "
        "word.",
        lambda base: dict(refuse_shape=lambda self, k, v: None),
    ),
    (
        "values_unchecked",
        "The shape of the keys is compared, that of the values is not.",
        lambda base: dict(
            refuse_shape=lambda self, k, v: base.refuse_shape(self, k, k)
        ),
    ),
    (
        "counted_before_shapes_are_compared",
        "A call that is refused has counted its positions all the same. Test first, then "
        "change.",
        lambda base: dict(refuse_shape=count_then_refuse),
    ),
    (
        "kind_unchecked",
        "Dtypes are not compared. Assigning to a slice converts without a word and rounds "
        "on the way; other ways of writing stop inside PyTorch.",
        lambda base: dict(refuse_kind=lambda self, k, v: None),
    ),
    (
        "keys_kind_alone",
        "Dtype and device of the keys are compared, those of the values are not.",
        lambda base: dict(refuse_kind=lambda self, k, v: base.refuse_kind(self, k, k)),
    ),
    (
        "values_kind_alone",
        "Dtype and device of the values are compared, those of the keys are not.",
        lambda base: dict(refuse_kind=lambda self, k, v: base.refuse_kind(self, v, v)),
    ),
    (
        "larger_dtypes_alone_refused",
        "Only larger dtypes are refused. Those of equal size lose digits or range, and a "
        "smaller one is a model that does not fit the cache.",
        lambda base: dict(refuse_kind=refuse_larger),
    ),
    (
        "device_unchecked",
        "The dtype is compared and the device is not.",
        lambda base: dict(refuse_kind=refuse_dtype),
    ),
    (
        "device_ignored",
        "The memory is on the CPU whatever `device` was asked for.",
        lambda base: dict(
            take_memory=lambda self, dtype, device: base.take_memory(self, dtype=dtype)
        ),
    ),
    (
        "float32_by_default",
        "Without a dtype it is float32. torch's default can be set to another one.",
        lambda base: dict(stored_as=lambda self, dtype: dtype or torch.float32),
    ),
    (
        "dtype_ignored",
        "The memory is float32 whatever dtype was asked for.",
        lambda base: dict(stored_as=lambda self, dtype: torch.float32),
    ),
    (
        "sizes_unchecked",
        "Sizes below 1 are accepted: such a cache can hold nothing.",
        lambda base: dict(refuse_sizes=lambda self, dtype: None),
    ),
    (
        "zero_alone_refused",
        "Sizes of 0 are refused and negative ones are not.",
        lambda base: dict(refuse_sizes=refuse_zero),
    ),
):
    for task, base in ((KVCache, Cache), (RollingKVCache, Rolling)):
        spoiled(task, base, name, sentence, **methods(base))


# A decoder to run through a cache -----------------------------------------------------


class Table(nn.Module):
    """Learned positions, as in lesson 04."""

    def __init__(self, max_len, d_model):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(max_len, d_model))

    def forward(self, positions):
        outside = (positions < 0) | (positions >= len(self.table))
        if not positions.is_meta and outside.any():
            at = positions[outside][0].item()
            raise ValueError(
                f"position {at} is not in the table of {len(self.table)} positions"
            )
        return self.table[positions]


class Decoder(nn.Module):
    """A decoder with the course's parts under the course's names, and no answers."""

    def __init__(self, c, weights):
        super().__init__()
        self.config, bias, llama = c, c.style == "gpt2", c.style == "llama"

        def norm():
            kind = nn.RMSNorm if llama else nn.LayerNorm
            return kind(c.d_model, eps=c.norm_eps)

        def linear(n_in, n_out):
            return nn.Linear(n_in, n_out, bias=bias)

        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        if not llama:
            self.positions = Table(c.max_len, c.d_model)
        self.blocks = nn.ModuleList()
        for _ in range(c.n_layers):
            block = nn.Module()
            block.norm_1, block.norm_2 = norm(), norm()
            block.attention = nn.Module()
            d_q, d_kv = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
            block.attention.w_q = linear(c.d_model, d_q)
            block.attention.w_k = linear(c.d_model, d_kv)
            block.attention.w_v = linear(c.d_model, d_kv)
            block.attention.w_o = linear(d_q, c.d_model)
            block.feed_forward = Think(c, linear)
            self.blocks.append(block)
        self.norm = norm()
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        held = dict(self.named_parameters())
        with torch.no_grad():
            for name, value in weights.items():
                held.get(f"{name}.weight", held.get(name)).copy_(value)

    def forward(self, ids):
        held = {n.removesuffix(".weight"): p for n, p in self.named_parameters()}
        return whole_decoder(ids, held, self.config)


class Think(nn.Module):
    def __init__(self, c, linear):
        super().__init__()
        self.w_1, self.w_2 = linear(c.d_model, c.d_ff), linear(c.d_ff, c.d_model)
        if c.style == "llama":
            self.w_3 = linear(c.d_model, c.d_ff)

    def forward(self, x):
        if hasattr(self, "w_3"):
            return self.w_2(F.silu(self.w_1(x)) * self.w_3(x))
        return self.w_2(F.gelu(self.w_1(x)))


LONG, LONG_GPT2 = replace(LLAMA, max_len=16), replace(GPT2, max_len=16)
ONE_BLOCK, ONE_GPT2 = (replace(c, n_layers=1) for c in (LONG, LONG_GPT2))
TWO_BLOCKS, TWO_GPT2 = (replace(c, n_layers=2) for c in (LONG, LONG_GPT2))


def decoder(c, seed):
    """A decoder, and the truth about it: logits of whole texts in float64."""
    weights = weights_for(model_shapes(c), seed)
    wide = doubled(weights)
    return Decoder(c, weights), lambda ids: whole_decoder(ids, wide, c)


def room(c, batch, max_len=16, **kind):
    return Cache(c.n_layers, batch, c.n_kv_heads, max_len, c.d_head, **kind)


# cached_forward -----------------------------------------------------------------------

forward_ = Exercise("cached_forward", lesson="kv_cache")


def in_chunks(case, answer, model, truth, ids, sizes, cache, padding=None):
    """Feed `ids` in chunks; all logits that speak of something must be right."""
    like = next(model.parameters())
    tolerance = ANGLES if like.dtype == torch.float64 else None
    expected = [truth(ids)] if padding is None else None
    if padding is not None:
        pads = padding.tolist()
        expected = [truth(ids[r : r + 1, p:])[0] for r, p in enumerate(pads)]
    start = 0
    for i, (size, chunk_ids) in enumerate(zip(sizes, ids.split(sizes, 1), strict=True)):
        given = (model, chunk_ids, cache) + ((padding,) * (padding is not None))
        actual = taken(case, answer, *given)
        case.is_tensor(actual, "what it returns")
        shape = (*chunk_ids.shape, model.config.vocab_size)
        if actual.shape != shape:
            raise Unmet(f"the logits have shape {tuple(actual.shape)}, not {shape}.")
        what = f"chunks {list(sizes[: i + 1])}: the result for the last"
        if padding is None:
            right = expected[0][:, start : start + size]
            case.close(actual, right, what, like=like, tolerance=tolerance)
        else:
            # What stands at padding says nothing, and must tell no answers apart.
            case.recording[-1] = case.recording[-1].clone()
            for row, pad in enumerate(pads):
                case.recording[-1][row, : max(0, pad - start)] = 0
                first = max(start, pad)
                if first < start + size:
                    case.close(
                        actual[row, first - start :],
                        expected[row][first - pad : start + size - pad],
                        f"{what}, row {row} with {pad} padding tokens",
                        like=like,
                        tolerance=tolerance,
                    )
        start += size
        if cache.length != start:
            raise Unmet(
                f"after chunks {list(sizes[: i + 1])} the cache holds {cache.length} "
                f"positions, expected {start}: each layer appends once in a pass."
            )


# What bfloat16 may change in the logits, of the largest: positions change far more.
FAR = 0.1


def chunks_agree(case, answer, c, sizes, seed, batch=2, **kind):
    model, truth = decoder(c, seed)
    ids = probe_ids(batch, sum(sizes), below=c.vocab_size, seed=seed)
    in_chunks(case, answer, model, truth, ids, sizes, room(c, batch))


@forward_.requires(
    "one token, one block, an empty cache: the same logits as without",
    "Go through `Block.forward` and `MultiHeadAttention.forward` line by line. What has "
    "to be put between the keys and the scores?",
)
def _(answer, case):
    chunks_agree(case, answer, ONE_BLOCK, (1,), 1000)


@forward_.requires(
    "a whole prompt at once: nobody sees the future",
    "A prompt is a chunk, and its tokens must not look ahead, cache or not. One block "
    "and the last token alone would not show it.",
)
def _(answer, case):
    chunks_agree(case, answer, LONG, (7,), 1100)


@forward_.requires(
    "token by token: each is at its own position, and sees all before it",
    "The next token's position is how many are in the cache. When do you ask for it: "
    "before the first layer appends, or after?",
)
def _(answer, case):
    chunks_agree(case, answer, ONE_BLOCK, (1, 1, 1, 1), 1200, batch=3)
    chunks_agree(case, answer, LONG, (1,) * 6, 1210)


@forward_.requires(
    "a prompt, then token by token, as in generation",
    "What is different in the second step of generation from the first?",
)
def _(answer, case):
    chunks_agree(case, answer, LONG, (4, 1, 1, 1), 1300)
    chunks_agree(case, answer, LONG, (5, 1, 1), 1310, batch=3)


@forward_.requires(
    "chunks of any length behind a prefix",
    "T queries, and more keys than that: which of the keys may each query see?",
)
def _(answer, case):
    chunks_agree(case, answer, LONG, (2, 3, 1, 4), 1400, batch=3)
    chunks_agree(case, answer, replace(LONG, n_kv_heads=6), (3, 4), 1410)
    chunks_agree(
        case, answer, replace(LONG, n_kv_heads=1, rope_base=50.0), (3, 4), 1420
    )


def windowed(ids, p, c, window):
    """Logits of a decoder of style llama whose queries see `window` positions."""
    at = torch.arange(ids.shape[1])
    distance = at[:, None] - at
    mask = (distance >= 0) & (distance < window)
    x = p["embedding"][ids]
    for i in range(c.n_layers):
        start = f"blocks.{i}."
        own = {n.removeprefix(start): w for n, w in p.items() if n.startswith(start)}
        x = one_block(x, own, c, mask)
    return F.linear(normed(x, p, "norm", c), p["head"])


@forward_.requires(
    "the keys are those that append returned, also where a cache forgets old ones",
    "Keys go in rotated, and come back to be used as they are. `cache.length` counts "
    "what has passed; how many keys there are, their shape tells.",
)
def _(answer, case):
    model, _ = decoder(LONG, 1450)
    wide = doubled(weights_for(model_shapes(LONG), 1450))
    ids = probe_ids(2, 9, below=23, seed=25)
    cache = Rolling(3, 2, 2, 4, 4)
    in_chunks(
        case,
        answer,
        model,
        lambda ids: windowed(ids, wide, LONG, 4),
        ids,
        (1,) * 9,
        cache,
    )


@forward_.requires(
    'style "gpt2": learned positions and biases',
    "Call the layers (`part.w_q(y)`), so that biases come along. And where do learned "
    "positions enter?",
)
def _(answer, case):
    for i, sizes in enumerate(((6,), (1, 1, 1, 1), (4, 1, 1), (2, 3, 1))):
        chunks_agree(case, answer, LONG_GPT2, sizes, 1500 + 10 * i, batch=3)


@forward_.requires(
    "after a reset the next text starts anew, also one of another length",
    "Nothing about the last text may be kept outside the cache.",
)
def _(answer, case):
    for c in (TWO_BLOCKS, TWO_GPT2):
        model, truth = decoder(c, 1600)
        cache = room(c, 3)
        for i, sizes in enumerate(((4, 1, 2), (2, 1, 1), (9, 1))):
            ids = probe_ids(3, sum(sizes), below=c.vocab_size, seed=20 + i)
            in_chunks(case, answer, model, truth, ids, sizes, cache)
            cache.reset()
        other, truth = decoder(c, 1650)
        in_chunks(case, answer, other, truth, ids, (6, 1, 3), room(c, 3))


@forward_.requires(
    "two texts in turn, each in its own cache",
    "What a call has to know of the text so far is in the cache it is given.",
)
def _(answer, case):
    for c in (TWO_BLOCKS, TWO_GPT2):
        model, truth = decoder(c, 1660)
        ids = [probe_ids(2, 7, below=c.vocab_size, seed=33 + i) for i in range(2)]
        sizes, caches, start = ((4, 1, 2), (2, 3, 2)), [room(c, 2), room(c, 2)], [0, 0]
        for step in range(3):
            for i, cache in enumerate(caches):
                stop = start[i] + sizes[i][step]
                actual = case.call(answer, model, ids[i][:, start[i] : stop], cache)
                what = f"text {i + 1} of two, chunks {list(sizes[i][: step + 1])}"
                right = truth(ids[i])[:, start[i] : stop]
                case.close(
                    actual,
                    right,
                    f"{what}: the result for the last",
                    like=right.float(),
                )
                start[i] = stop


@forward_.requires(
    "positions are exact far into a text, in every dtype",
    "Positions are whole numbers, as many as the model has. bfloat16 has 8 binary "
    "digits: it counts to 256.",
)
def _(answer, case):
    for fields in (ONE_BLOCK, ONE_GPT2):
        c = replace(fields, max_len=5_000, rope_base=9.0)
        for dtype in (torch.float32, torch.bfloat16):
            model, _ = decoder(c, 1670)
            model = model.to(dtype)
            held = {n: p.detach() for n, p in model.named_parameters()}
            wide = doubled({n.removesuffix(".weight"): p for n, p in held.items()})
            cache = Rolling(1, 2, 2, 8, c.d_head, dtype=dtype)
            cache.stops = [4_100]
            if c.style == "gpt2":
                wide["positions.table"] = wide["positions.table"][4_100:]
            ids = probe_ids(2, 8, below=c.vocab_size, seed=37)
            expected = whole_decoder(ids, wide, c)
            for start, stop in ((0, 5), (5, 6), (6, 8)):
                actual = case.call(answer, model, ids[:, start:stop], cache)
                what = f"{str(dtype)[6:]}, at position {4_100 + start}: the result"
                right, low = expected[:, start:stop], dtype == torch.bfloat16
                tolerance = FAR * right.abs().max().item() if low else None
                like = torch.empty(0, dtype=dtype)
                case.close(actual, right, what, like=like, tolerance=tolerance)


@forward_.requires(
    "padding on the left: each row gives what it would give alone",
    "Rows begin at different columns. Which position has a row's first real token, and "
    "which columns may nobody in this row see, in every step?",
)
def _(answer, case):
    for i, (c, sizes, padding) in enumerate(
        (
            (ONE_BLOCK, (5,), [2, 0, 3]),
            (TWO_BLOCKS, (6, 1, 1), [2, 0, 4]),
            (TWO_BLOCKS, (3, 2, 1, 2), [1, 4, 0]),
            (TWO_GPT2, (5, 1, 1), [3, 0, 1]),
            (TWO_GPT2, (2, 3, 1), [1, 0, 3]),
        )
    ):
        model, truth = decoder(c, 1700 + 10 * i)
        ids = probe_ids(3, sum(sizes), below=c.vocab_size, seed=30 + i)
        pads = torch.tensor(padding)
        in_chunks(case, answer, model, truth, ids, sizes, room(c, 3), pads)


@forward_.requires(
    "more than max_len tokens, and a full cache, are a ValueError that names both "
    "numbers",
    "The cache refuses when it is full. Who refuses when the cache is longer than what "
    "the model was made for?",
)
def _(answer, case):
    for c in (TWO_BLOCKS, TWO_GPT2):
        model, truth = decoder(c, 1800)
        ids = probe_ids(2, 16, below=c.vocab_size, seed=40)
        cache = room(c, 2, max_len=30)
        in_chunks(case, answer, model, truth, ids, (15, 1), cache)
        refuses(
            case,
            answer,
            model,
            ids[:, :1],
            cache,
            mentions=(17, 16),
            because="a 17th token where max_len is 16",
        )
        for sizes in ((16,), (9, 7)):
            in_chunks(case, answer, model, truth, ids, sizes, room(c, 2))
        cache = room(c, 2, max_len=30)
        in_chunks(case, answer, model, truth, ids[:, :9], (9,), cache)
        refuses(
            case,
            answer,
            model,
            ids[:, :8],
            cache,
            mentions=(17, 16),
            because="9 tokens and 8 new ones where max_len is 16",
        )
        case.note(tuple(cache.stops))
        case.true(
            cache.stops == [9] * c.n_layers,
            "A call that is refused has stored tokens in the cache all the same.",
        )
        refuses(
            case,
            answer,
            model,
            ids[:, :9],
            room(c, 2, max_len=8),
            mentions=(9, 8),
            because="9 tokens where the cache has room for 8",
        )


@forward_.requires("float64, bfloat16 and `eval()` work")
def _(answer, case):
    for c in (TWO_BLOCKS, TWO_GPT2):
        model, truth = decoder(c, 1900)
        ids = probe_ids(2, 8, below=c.vocab_size, seed=50)
        cache = room(c, 2, dtype=torch.float64)
        in_chunks(case, answer, model.double().eval(), truth, ids, (3, 1, 4), cache)
        cache = room(c, 2, dtype=torch.bfloat16)
        model = model.bfloat16()
        for part in ids.split((5, 3), 1):
            actual = case.call(answer, model, part, cache)
            case.true(
                actual.dtype == torch.bfloat16,
                f"The logits of a bfloat16 model are {str(actual.dtype)[6:]}.",
            )
        case.true(
            bool(actual.isfinite().all()), "The logits in bfloat16 are not finite."
        )


@forward_.requires(
    "no gradients are recorded",
    "The cache would hold every step's graph, and memory would grow. There is a "
    "decorator for functions that need none.",
)
def _(answer, case):
    model, _ = decoder(LONG, 2000)
    cache = room(LONG, 2)
    for _ in range(2):
        out = case.call(answer, model, probe_ids(2, 3, below=23), cache)
        case.is_tensor(out, "what it returns")
        case.true(
            not out.requires_grad and not cache.k.requires_grad,
            "The logits, or the keys in the cache, carry gradients.",
        )


@forward_.requires(
    "the model is left as it was, and so is torch",
    "Neither `requires_grad`, nor `train()` and `eval()`, nor a setting for all of torch "
    "is this function's to change.",
)
def _(answer, case):
    model, _ = decoder(LONG, 2050)

    def run():
        case.call(answer, model, probe_ids(2, 3, below=23), room(LONG, 2))

    left_alone(case, run, model)


# Changing what is not one's own, by model and generation alike.
MEDDLING = {
    "gradients_off_for_all": "Gradients are switched off for all of torch. Use "
    "`torch.no_grad()` as a decorator, or with `with`.",
    "set_to_eval": "The model is left in another mode: `eval()` is for the caller to say.",
    "set_to_train": "The model is left in training mode, which is for the caller to say.",
    "model_frozen": "`requires_grad` is switched off in the model itself.",
}


def meddle(wrong, model):
    if wrong == "gradients_off_for_all":
        torch.set_grad_enabled(False)
    if wrong == "set_to_eval":
        model.eval()
    if wrong == "set_to_train":
        model.train()
    if wrong == "model_frozen":
        model.requires_grad_(False)


def left_alone(case, run, model):
    """`run` changes neither the model nor torch's settings."""
    for training in (True, False):
        model.train(training)
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                run()
                after = torch.is_grad_enabled()
            case.true(
                after == enabled,
                f"Gradients were {'on' if enabled else 'off'} before the call and are "
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
        case.true(
            torch.get_default_dtype() == torch.float32,
            "torch's default dtype is another one after the call.",
        )


@forward_.requires("it creates nothing on another device")
def _(answer, case):
    for c in (ONE_BLOCK, ONE_GPT2):

        def run(model, ids, padding=None, c=c):
            cache = room(c, 2, device=ids.device)
            if padding is None:
                answer(model, ids, cache)
                return answer(model, ids[:, :2], cache)
            return answer(model, ids, cache, padding)

        model, ids = decoder(c, 2100)[0], probe_ids(2, 5, below=23)
        case.any_device(run, model, ids)
        case.any_device(run, model, ids, torch.tensor([0, 2]))


def attended(q, k, v, mask):
    """Grouped heads without a loop, an empty row as zeros."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
    return weights.masked_fill(~mask, 0) @ v


# Keys that go into the cache as they are, and what is done to them behind it.
ROTATED_OUTSIDE = {
    "old_keys_at_the_new_position": "Keys go into the cache before they are rotated, and "
    "all that come out get the new token's position. Rotate first, then append: a key "
    "keeps the position it had.",
    "rotated_by_their_place": "Keys go into the cache before they are rotated, and come "
    "out to be rotated by their place in it. With padding, or where a cache forgets, "
    "that is not their position. Rotate first, then append.",
}
# `cache.length` read inside the loop over layers.
LENGTH_AFTER_APPEND = {
    "length_read_after_append": "`cache.length` is read after `append`: in the last layer "
    "it has moved, and the queries stand one chunk too far. Read it once, before the "
    "first layer.",
    "counted_back_from_the_length": "Positions are counted back from `cache.length` "
    "after `append`. It moves when the last layer has written, so in all others they are "
    "one chunk too early. Read it once, before the first layer.",
}


def forward_with(knob=""):
    """A cached forward pass; `knob` names what is done wrongly."""

    def run(model, ids, cache, padding):
        c, t = model.config, ids.shape[1]
        if knob == "starts_anew":
            cache.reset()
        start = cache.length
        if knob == "positions_kept_outside":
            start = run.at = 0 if start == 0 else run.at
            run.at += t
        if knob == "one_place_unused" and start + t == c.max_len and t > 1:
            raise ValueError(f"{start + t} >= {c.max_len}")
        if knob == "refused_after_storing" and start + t > c.max_len:
            for layer in range(c.n_layers):
                new = torch.zeros(len(ids), c.n_kv_heads, t, c.d_head)
                cache.append(layer, new, new)
        if start + t > c.max_len and knob != "max_len_unchecked":
            raise ValueError(f"{start + t} > {c.max_len}")
        if knob == "padding_ignored":
            run.padding = padding = None
        if start == 0 or not hasattr(cache, "steps"):
            cache.steps, cache.first = 0, t
        cache.steps += 1
        at = torch.arange(t, device=ids.device)
        positions = at + {
            "position_zero": 0,
            "position_by_the_prompt": (cache.steps - 1) * cache.first,
            "one_too_far": start + (start > 0),
            "one_behind": max(start - 1, 0),
            "counted_from_one": start + 1,
            "read_after_the_append": start + t,
            "one_position_for_the_chunk": start - at,
            "last_position_of_the_cache": getattr(cache, "max_len", t) - t,
        }.get(knob, start)
        if knob == "positions_in_the_models_dtype":
            positions = positions.to(model.embedding.weight.dtype).long()
        if knob == "table_of_positions":
            positions = positions.clamp(max=2_047)
        if padding is not None:
            pads = padding[:, None]
            if knob == "padding_of_the_first_row":
                pads = pads[:1].expand_as(pads)
            if knob != "one_position_vector":
                positions = positions - pads
                if knob == "padding_taken_once_more":
                    positions = positions - pads * (start > 0)
                if knob == "padding_in_the_prompt_only" and start > 0:
                    positions = positions + pads
            if knob != "negative_positions":
                positions = positions.clamp(min=0)
        learned = at if knob == "learned_positions_from_zero" else positions
        x = model.embedding(ids)
        if c.style == "gpt2" and knob != "learned_positions_forgotten":
            x = x + model.positions(learned)
        for layer, block in enumerate(model.blocks):
            x = x + attend(block, block.norm_1(x), layer, cache, start, positions, c)
            y = x if knob == "second_norm_forgotten" else block.norm_2(x)
            x = x + block.feed_forward(y)
        x = x if knob == "last_norm_forgotten" else model.norm(x)
        if knob == "head_from_the_embedding":
            return x @ model.embedding.weight.mT
        logits = model.head(x[:, -1:] if knob == "last_position_only" else x)
        return logits[:, -1] if knob == "last_position_without_a_dimension" else logits

    def attend(block, y, layer, cache, start, positions, c):
        part, t = block.attention, y.shape[1]

        def heads(linear, n):
            out = linear(y)
            if knob == "biases_forgotten":
                out = F.linear(y, linear.weight)
            return out.unflatten(-1, (n, -1)).transpose(1, 2)

        base = 10_000.0 if knob == "base_ignored" else c.rope_base
        q = heads(part.w_q, c.n_heads)
        k, v = heads(part.w_k, c.n_kv_heads), heads(part.w_v, c.n_kv_heads)
        rotates = c.style == "llama" and knob != "not_rotated"
        plain, plain_q = k, q
        if rotates:
            halves = knob == "half_split"
            if knob != "queries_not_rotated":
                q = turned(q, positions, base, halves)
            if knob != "keys_not_rotated":
                k = turned(k, positions, base, halves)
            if knob == "values_rotated":
                v = turned(v, positions, base)
        new_k, new_v = k, v
        if knob in ("stored_before_rotation", *ROTATED_OUTSIDE):
            k = plain
        if knob == "nothing_stored":
            pass
        elif knob == "always_the_first_layer":
            k, v = cache.append(0, k, v)
        elif knob == "layers_counted_from_one":
            k, v = cache.append(max(layer - 1, 0), k, v)
        elif knob == "exchanged":
            k, v = cache.append(layer, v, k)
        elif knob == "stored_twice":
            cache.append(layer, k, v)
            k, v = cache.append(layer, k, v)
        else:
            k, v = cache.append(layer, k, v)
        if knob == "stored_before_rotation":
            k = torch.cat([k[:, :, :-t], new_k], 2)
        if rotates and knob in ROTATED_OUTSIDE:
            places = torch.arange(k.shape[2], device=k.device)
            if knob == "old_keys_at_the_new_position":
                spread = positions[..., -1:].expand(*positions.shape[:-1], len(places))
                places = spread if start else positions
            k = turned(k, places, base)
        if rotates and knob in LENGTH_AFTER_APPEND:
            moved = cache.length - start - t * (knob == "counted_back_from_the_length")
            q = turned(plain_q, positions + moved, base)
        if knob == "rotated_twice" and rotates:
            k = turned(k, torch.arange(k.shape[2], device=k.device), base)
        if knob == "rotated_again_as_new" and rotates and start > 0:
            k = turned(k, positions[..., -1:].expand(*positions.shape[:-1], k.shape[2]),
                       base)  # fmt: skip
        if knob == "cache_not_read":
            k, v = new_k, new_v
        t_k = k.shape[2]
        if knob == "group_of_heads_tiled":
            k, v = (z.repeat(1, c.n_heads // c.n_kv_heads, 1, 1) for z in (k, v))
        i, j = (
            torch.arange(t, device=y.device)[:, None],
            torch.arange(t_k, device=y.device),
        )
        mask = j <= i + t_k - t
        if knob == "prefill_sees_the_future":
            mask = j < t_k + 0 * i
        if knob == "no_mask_behind_a_prefix" and start > 0:
            mask = j < t_k + 0 * i
        if knob == "mask_top_left":
            mask = j <= i
        if knob == "prefix_hidden" and t > 1:
            mask = mask & (j >= t_k - t)
        if knob == "itself_hidden":
            mask = (j < i + t_k - t) | (j + i == 0)
        mask = mask[None, None]
        padding = run.padding
        hides = padding is not None and knob != "padding_visible"
        if knob == "padding_hidden_in_the_prompt_only" and start > 0:
            hides = False
        if hides:
            pads = padding[:1] if knob == "padding_of_the_first_row" else padding
            if knob == "padding_counted_from_the_chunk":
                mask = (
                    mask & ((j < start) | (j - start >= pads[:, None]))[:, None, None]
                )
            elif knob == "padding_on_the_right":
                mask = mask & (j < t_k - pads[:, None])[:, None, None]
            else:
                mask = mask & (j >= pads[:, None])[:, None, None]
        if knob == "mask_from_the_length":
            j = torch.arange(start + t, device=y.device)
            mask = (j <= i + start)[None, None]
        if knob == "square_mask":
            mask = mask[..., -t:]
        if knob == "mask_inverted" and (t > 1 or padding is not None):
            mask = ~mask
        out = attended(q, k, v, mask)
        if knob == "mask_rows_interleaved":
            group_size = c.n_heads // c.n_kv_heads
            grouped = q.reshape(len(q), c.n_kv_heads, -1, c.d_head)
            out = attended(grouped, k, v, mask.repeat_interleave(group_size, 2))
            out = out.reshape(q.shape)
        if knob == "heads_not_merged":
            return part.w_o(out.reshape(len(y), t, -1))
        if knob == "not_scaled":
            out = attended(q * math.sqrt(c.d_head), k, v, mask)
        return part.w_o(out.transpose(1, 2).flatten(2))

    def cached_forward(model, ids, cache, padding=None):
        run.padding = padding
        meddle(knob, model)
        with torch.set_grad_enabled(knob == "gradients_kept"):
            return run(model, ids, cache, padding)

    return cached_forward


FORWARD_FAULTS = {
    "prefill_sees_the_future": "There is a cache, so there is no mask? The tokens of the "
    "prompt see each other's future. Token by token nobody would notice.",
    "no_mask_behind_a_prefix": "A chunk behind a prefix gets no mask: its tokens see each "
    "other's future.",
    "square_mask": "The mask is square, for the chunk alone. With a prefix there are more "
    "keys than queries.",
    "mask_top_left": "The mask is aligned top-left: the first query of a chunk sees one "
    "key. The queries are the *last* positions.",
    "prefix_hidden": "A chunk sees itself alone, not the prefix.",
    "mask_from_the_length": "The mask is made for `length` + T keys. A cache that forgets "
    "returns fewer: take their number from the keys' shape.",
    "itself_hidden": "No token sees itself.",
    "mask_inverted": "The mask is read the other way round. In this course True means "
    "“may look”.",
    "mask_rows_interleaved": "The mask's rows are repeated 0, 0, …, 1, 1, …, and the "
    "queries of a group lie 0, 1, …, 0, 1, …: all of one head, then all of the next. "
    "`repeat` makes that order.",
    "position_zero": "Every call starts at position 0. A new token's position is how many "
    "the cache holds.",
    "position_by_the_prompt": "The position advances by the prompt's length at each step, "
    "not by what was added. The first step after the prompt is right by chance.",
    "one_too_far": "Positions behind a prefix are one too large: the first new token's "
    "position is how many there are, because the first of all is 0.",
    "one_behind": "Positions behind a prefix are one too small: two tokens stand at one "
    "place.",
    "counted_from_one": "Positions are counted from 1. RoPE does not care, because all "
    "move together; learned positions do.",
    "read_after_the_append": "The positions are those after the chunk: `length` is read "
    "when the chunk has been added already.",
    "one_position_for_the_chunk": "All tokens of a chunk get the position of its first.",
    "last_position_of_the_cache": "The chunk is placed at the end of the cache's memory, "
    "not behind what is filled.",
    "stored_before_rotation": "Keys go into the cache before they are rotated, and are "
    "never rotated afterwards: only the new ones have a position.",
    **ROTATED_OUTSIDE,
    **LENGTH_AFTER_APPEND,
    "keys_not_rotated": "The queries are rotated, the keys are not.",
    "rotated_twice": "The keys that come out of the cache are rotated again. They were "
    "when they went in.",
    "rotated_again_as_new": "Old keys are rotated again with the position of the new "
    "token. A key keeps the position it had.",
    "queries_not_rotated": "The keys are rotated, the queries are not.",
    "not_rotated": "Nothing is rotated.",
    "values_rotated": "The values are rotated too. RoPE turns queries and keys alone.",
    "half_split": "The rotation pairs the first half of a head with the second. In this "
    "course neighbours form a pair.",
    "base_ignored": "RoPE runs with its default base; pass on `config.rope_base`.",
    "cache_not_read": "Keys and values are stored and never used: the scores are with the "
    "new ones alone. `append` returns all of them.",
    "nothing_stored": "Nothing is appended to the cache.",
    "always_the_first_layer": "Every layer appends to layer 0 of the cache.",
    "layers_counted_from_one": "The layer's number is one off, and two layers write into "
    "the same memory.",
    "exchanged": "Keys and values are exchanged on the way through the cache.",
    "stored_twice": "Each chunk is appended twice.",
    "starts_anew": "The cache is reset at each call, so nothing is remembered.",
    "group_of_heads_tiled": "The KV heads are tiled (0, 1, 0, 1, …). Neighbouring query "
    "heads share one: (0, 0, …, 1, 1, …).",
    "heads_not_merged": "Heads and positions change places before `w_o`: `merge_heads` "
    "brings them into their order, `reshape` alone does not.",
    "not_scaled": "The scores are not divided by the root of d_head.",
    "learned_positions_from_zero": 'In style "gpt2" the learned positions start at 0 in '
    "each call.",
    "learned_positions_forgotten": 'In style "gpt2" nothing is added to the embedding.',
    "biases_forgotten": "The weights are used without their biases. Call the layer, "
    "`part.w_q(y)`.",
    "second_norm_forgotten": "The feed-forward network reads the stream without "
    "`norm_2`.",
    "last_norm_forgotten": "The stream reaches the head without the last norm.",
    "last_position_only": "Only the last token's logits are returned. Return those of all "
    "T new tokens; who generates takes the last.",
    "last_position_without_a_dimension": "The last token's logits come back alone, "
    "without the dimension of tokens. Asked for are those of all T, `(B, T, V)`.",
    "head_from_the_embedding": "The logits are made with the embedding's weights. Call "
    "`model.head`: in a model that is not tied it has its own.",
    "one_position_vector": "All rows get the same positions. With padding on the left a "
    "row's first real token has position 0.",
    "padding_ignored": "`padding` changes nothing: neither positions nor mask know of it.",
    "padding_visible": "The padding is looked at. Its positions are right, its keys must "
    "be hidden.",
    "padding_hidden_in_the_prompt_only": "The padding is hidden while the prompt is read "
    "and visible in the steps after it. It is still in the cache.",
    "padding_in_the_prompt_only": "The positions allow for padding in the prompt and not "
    "in the steps after it.",
    "padding_taken_once_more": "The padding is subtracted once more from positions behind "
    "the prompt.",
    "padding_of_the_first_row": "Every row gets the padding of the first.",
    "padding_counted_from_the_chunk": "The padding is looked for at the start of each "
    "chunk. It is at the start of the text.",
    "padding_on_the_right": "The padding is hidden at the end of the row. It is at the "
    "start.",
    "negative_positions": "Padding tokens get negative positions, which the table of "
    "learned positions does not have. What they get is all the same, if it exists.",
    "max_len_unchecked": "Texts longer than the model's `max_len` are accepted if the "
    "cache has room.",
    "positions_kept_outside": "It counts positions itself, and takes two texts for one. "
    "How far a text has come is `cache.length`.",
    "positions_in_the_models_dtype": "Positions are rounded to the model's dtype; bfloat16 "
    "counts to 256. Leave them whole numbers.",
    "table_of_positions": "Positions end at a number of its own, before `max_len`.",
    "one_place_unused": "A chunk that ends at exactly `max_len` is refused. It fits.",
    "refused_after_storing": "A text that is too long is refused after its tokens have "
    "been stored. Test first.",
    **MEDDLING,
    "gradients_kept": "Gradients are recorded, and the cache holds every step's graph.",
}
for name, sentence in FORWARD_FAULTS.items():
    forward_.fault(name, sentence, forward_with(name))


# generate_cached ----------------------------------------------------------------------

generation = Exercise("generate_cached", lesson="kv_cache")


class Text(Decoder):
    """A decoder that counts the tokens it has read.

    scale: of the logits; such a large one makes it sure of what comes next, so that a
        mistake in the settings gives the same tokens in each run.
    """

    def __init__(self, c, seed=0, scale=10_000):
        super().__init__(c, weights_for(model_shapes(c), seed))
        with torch.no_grad():
            self.head.weight.mul_(scale)
        self.read = []
        self.embedding.register_forward_pre_hook(self.count)

    def count(self, module, given):
        self.read.append(tuple(given[0].shape))


def greedy(model, ids, n):
    """The greedy continuation in float64, without any cache."""
    held = {n: p.detach() for n, p in model.named_parameters()}
    wide = doubled({n.removesuffix(".weight"): p for n, p in held.items()})

    class Truth:
        config = model.config

        def __call__(self, ids):
            return whole_decoder(ids, wide, model.config)

    return continued(Truth(), ids, n)


PROMPTS = probe_ids(3, 4, below=23, seed=60)


@generation.requires(
    "temperature 0: the prompt, then the most likely token at each step",
    "The first pass reads the prompt, each pass after it only the newest token. Whose "
    "logits give the next one?",
)
def _(answer, case):
    for fields in (LONG, LONG_GPT2):
        model = Text(replace(fields, max_len=64), seed=3000)
        expected = greedy(model, PROMPTS, 5)
        for n in (5, 1, 2):
            actual = case.call(answer, model, PROMPTS, n, temperature=0)
            case.equal(actual, expected[:, : 4 + n], f"{n} more tokens: the text")
        one = probe_ids(5, 1, below=23, seed=61)
        actual = case.call(answer, model, one, n_tokens=4, temperature=0.0)
        case.equal(actual, greedy(model, one, 4), "from one token: the text")


@generation.requires(
    "every token is read once: the prompt in one pass, then one token a pass",
    "Print the shape of what you give to `cached_forward`.",
)
def _(answer, case):
    model = Text(LONG, seed=3100)
    case.call(answer, model, PROMPTS, 6, temperature=0)
    columns = [shape[-1] for shape in model.read]
    case.note(str(columns))
    case.true(
        columns[:6] == [4, 1, 1, 1, 1, 1] and len(columns) <= 7,
        f"For a prompt of 4 and 6 new tokens the passes read {columns} tokens.",
    )


@generation.requires(
    "the next call starts anew, with another prompt and another batch; 0 tokens give "
    "back the prompt",
    "Whose cache is it? One that outlives the call has to be reset.",
)
def _(answer, case):
    model = Text(TWO_BLOCKS, seed=3200)
    for batch, size, n in ((3, 4, 3), (2, 6, 2), (3, 2, 5), (1, 3, 0), (3, 4, 3)):
        ids = probe_ids(batch, size, below=23, seed=70 + size)
        actual = case.call(answer, model, ids, n, temperature=0)
        case.equal(actual, greedy(model, ids, n), f"a prompt of {size}: the text")


# At this temperature even the model that is sure draws all tokens nearly equally often,
# and not so nearly that float32 could not rank them.
HOT = 1_000_000
DRAWS = 2_000


def drawn(case, answer, model, ids, n, *settings, **named):
    """The text; what is drawn is left out of the trace, where it would mislead."""
    text = case.call_in_place(answer, model, ids, n, *settings, **named)
    case.is_tensor(text)
    shape = (len(ids), ids.shape[1] + n)
    if text.shape != shape:
        raise Unmet(f"the text has shape {tuple(text.shape)}, expected {shape}.")
    case.recording.pop()
    case.equal(text[:, : ids.shape[1]], ids, "the prompt in the text")
    return text


def chances(logits, temperature, top_k=None, top_p=None):
    """The probabilities of a sample by another route than lesson 08's."""
    p = torch.softmax(logits.double() / temperature, -1)
    if top_k is not None:
        p = p.masked_fill(p < p.topk(top_k).values[:, -1:], 0)
        p = p / p.sum(-1, keepdim=True)
    if top_p is not None:
        ranked = p.sort(descending=True)
        cut = ranked.values.cumsum(-1) - ranked.values >= top_p
        p = p.masked_fill(cut.gather(1, ranked.indices.argsort()), 0)
    return p / p.sum(-1, keepdim=True)


START = PROMPTS[:1, :1]


def next_logits(model):
    """What comes after `START`, `(1, V)`."""
    return model(START)[:, -1].detach().double()


def in_words(settings, named):
    given = [describe(x) for x in settings]
    given += [f"{name}={x}" for name, x in named.items()]
    return ", ".join(given) or "no settings"


def likeliest_come(case, answer, model, kept, *settings, **named):
    """At a high temperature exactly the `kept` likeliest tokens are drawn."""
    many = START.expand(500, -1)
    found = drawn(case, answer, model, many, 1, *settings, **named)[:, -1].unique()
    wanted = next_logits(model)[0].topk(kept).indices.sort().values
    case.note(tuple(found.tolist()))
    case.true(
        torch.equal(found, wanted),
        f"With {in_words(settings, named)} the tokens {found.tolist()} came in 500 draws of one, "
        f"expected {wanted.tolist()}.",
    )


def as_often(case, answer, model, **named):
    """Each token comes as often as it should, to 5.5 deviations."""
    many = START.expand(DRAWS, -1)
    tokens = drawn(case, answer, model, many, 1, **named)[:, -1]
    wanted = chances(next_logits(model), **({"temperature": 1.0} | named))[0]
    found = torch.bincount(tokens, minlength=23).double() / DRAWS
    over = (found - wanted).abs() - 5.5 * (wanted * (1 - wanted) / DRAWS).sqrt()
    token = over.argmax().item()
    case.true(
        over[token] <= 0,
        f"With {in_words((), named)} token {token} came in {found[token]:.1%} of "
        f"{DRAWS:,} draws, expected {wanted[token]:.1%}.",
    )


@generation.requires(
    "the settings of sample are passed on, each under its own name",
    "Pass them by name, or in the order that `sample` has.",
)
def _(answer, case):
    sure = Text(ONE_BLOCK, seed=3300)
    less_sure = Text(ONE_BLOCK, seed=3300, scale=1)

    def given(temperature, top_k=None, top_p=None):
        return dict(temperature=temperature, top_k=top_k, top_p=top_p)

    likeliest_come(case, answer, sure, 23, **given(HOT))
    as_often(case, answer, less_sure, **given(1.0))
    as_often(case, answer, less_sure, **given(0.5))
    for settings, kept in (
        (dict(top_p=1), 23),
        (dict(top_k=1), 1),
        (dict(top_k=4), 4),
        (dict(top_p=0.3), 7),
        (dict(top_k=5, top_p=0.7), 4),
    ):
        likeliest_come(case, answer, sure, kept, **given(HOT, **settings))
    as_often(case, answer, less_sure, **given(3.0, top_k=9, top_p=0.8))


@generation.requires(
    "two calls without a generator draw anew, and two texts from one generator differ",
    "Who seeds torch inside a function decides for everybody.",
)
def _(answer, case):
    model = Text(ONE_BLOCK, seed=3360)
    made = seeded(6)
    for kind in ({}, dict(generator=made)):
        runs = [
            drawn(case, answer, model, PROMPTS, 5, temperature=HOT, **kind)
            for _ in range(2)
        ]
        case.true(
            not torch.equal(*runs),
            "Two calls in a row drew the same text: something sets the seed in each.",
        )


@generation.requires("a generator alone decides what is drawn")
def _(answer, case):
    model = Text(ONE_BLOCK, seed=3400)
    runs = []
    for seed, of_torch in ((2, 0), (2, 1), (3, 1)):
        torch.manual_seed(of_torch)
        made = seeded(seed)
        runs.append(
            drawn(case, answer, model, PROMPTS, 5, temperature=HOT, generator=made)
        )
    case.true(
        torch.equal(runs[0], runs[1]),
        "Two generators with one seed drew two texts: not all that is drawn comes from "
        "the `generator`.",
    )
    case.true(not torch.equal(runs[1], runs[2]), "Two seeds gave the same text.")


@generation.requires(
    "without settings: temperature 1, no top_k, no top_p; given without names, they are "
    "in the order of `sample`",
    "Compare your first line with the contract, argument by argument.",
)
def _(answer, case):
    model = Text(ONE_BLOCK, seed=3350, scale=1)
    many = START.expand(DRAWS, -1)
    given = dict(temperature=1.0, top_k=None, top_p=None, padding=None)
    wanted = drawn(case, answer, model, many, 1, generator=seeded(4), **given)
    for name, value in given.items():
        others = {n: x for n, x in given.items() if n != name}
        found = drawn(case, answer, model, many, 1, generator=seeded(4), **others)
        case.true(
            torch.equal(found, wanted),
            f"Without `{name}` it draws another text than with `{name}={value}`, which "
            "is its default.",
        )
    as_often(case, answer, model)
    model = Text(ONE_BLOCK, seed=3355)
    for settings, kept in (
        ((HOT,), 23),
        ((HOT, 1), 1),
        ((HOT, None, 0.3), 7),
        ((HOT, 4, None, seeded(4)), 4),
    ):
        likeliest_come(case, answer, model, kept, *settings)


@generation.requires(
    "padding on the left: each row goes on as it would alone",
    "`cached_forward` takes `padding`; in which of the passes does it matter?",
)
def _(answer, case):
    for c in (TWO_BLOCKS, TWO_GPT2):
        model = Text(c, seed=3500)
        ids, pads = probe_ids(3, 6, below=23, seed=62), [2, 0, 4]
        actual = case.call(
            answer, model, ids, 5, temperature=0, padding=torch.tensor(pads)
        )
        rows = [
            torch.cat([ids[r, :p], greedy(model, ids[r : r + 1, p:], 5)[0]])
            for r, p in enumerate(pads)
        ]
        case.equal(actual, torch.stack(rows), f"padding {pads}: the text")


@generation.requires(
    "an empty prompt is a ValueError; so is a text that would be longer than max_len, "
    "which names both numbers",
    "Test before the first pass: how long will the text be at the end?",
)
def _(answer, case):
    model = Text(ONE_BLOCK, seed=3600)
    empty = torch.empty(2, 0, dtype=torch.int64)
    refuses(case, answer, model, empty, 3, because="an empty prompt")
    for size, n in ((17, 1), (4, 14), (4, 13), (16, 1)):
        ids = probe_ids(2, size, below=23, seed=63)
        refuses(
            case,
            answer,
            model,
            ids,
            n,
            temperature=0,
            mentions=(size + n, 16),
            because=f"{size} tokens and {n} new ones where max_len is 16",
        )
    case.true(not model.read, "The model ran before the text was refused.")
    actual = taken(case, answer, model, PROMPTS, 12, 0)
    case.equal(actual, greedy(model, PROMPTS, 12), "exactly max_len: the text")


@generation.requires(
    "a float64 and a bfloat16 model work: the cache has the model's dtype",
    "Any parameter of the model tells its dtype and its device.",
)
def _(answer, case):
    model = Text(LONG, seed=3700).double()
    actual = case.call(answer, model, PROMPTS, 6, temperature=0)
    case.equal(actual, greedy(model, PROMPTS, 6), "in float64: the text")
    case.call(answer, Text(LONG_GPT2, seed=3710).bfloat16(), PROMPTS, 3, temperature=0)


@generation.requires(
    "the model is left as it was, and so is torch; no gradients are recorded",
    "`torch.no_grad()` as a decorator, or with `with`.",
)
def _(answer, case):
    model = Text(ONE_BLOCK, seed=3750)

    def run():
        text = case.call(answer, model, PROMPTS, 2, temperature=0)
        case.true(not text.requires_grad, "The text carries gradients.")

    left_alone(case, run, model)


@generation.requires("it creates nothing on another device")
def _(answer, case):
    model = Text(ONE_BLOCK, seed=3800)
    case.call(answer, model, PROMPTS, 3, temperature=0)

    def generate_cached(model, ids):
        try:
            return answer(model, ids, 3, temperature=0)
        except ValueError as error:  # a cache's, which need not use the word
            raise ValueError(f"device: {error}") from error

    case.any_device(generate_cached, model, PROMPTS)


def pick(logits, temperature, top_k, top_p, generator):
    if temperature == 0:
        return logits.argmax(-1)
    p = chances(logits, temperature, top_k, top_p)
    return torch.multinomial(p, 1, generator=generator)[:, 0]


def generator_that(wrong=""):
    forward = forward_with()
    kept = []

    def generate_cached(
        model,
        ids,
        n_tokens,
        temperature=1.0,
        top_k=None,
        top_p=None,
        generator=None,
        padding=None,
    ):
        c, (batch, t) = model.config, ids.shape
        if t == 0 and wrong != "empty_unchecked":
            raise ValueError("empty")
        longest = c.max_len
        longest += {"one_past_max_len": 1, "one_place_unused": -1}.get(wrong, 0)
        too_long = (
            t > c.max_len if wrong == "prompt_alone_checked" else t + n_tokens > longest
        )
        if too_long and wrong not in ("too_long_unchecked", "stops_at_max_len"):
            raise ValueError(f"{t + n_tokens} > {c.max_len}")
        if wrong == "stops_at_max_len":
            n_tokens = max(0, min(n_tokens, c.max_len - t))
        if wrong in ("temperature_not_passed", "settings_not_passed"):
            temperature = 1.0
        if wrong == "temperature_taken_twice":
            temperature = temperature**2
        if wrong == "top_k_and_top_p_exchanged":
            top_k, top_p = top_p, top_k
        if wrong == "seeds_each_call" and generator is None:
            torch.manual_seed(0)
        meddle(wrong, model)
        if wrong in ("top_k_not_passed", "settings_not_passed"):
            top_k = None
        if wrong in ("top_p_not_passed", "settings_not_passed"):
            top_p = None
        if wrong in ("generator_not_passed", "settings_not_passed"):
            generator = None
        if wrong == "always_the_likeliest":
            temperature = 0
        if wrong == "generator_started_again" and generator is not None:
            generator = seeded(generator.initial_seed())
        weight = model.embedding.weight
        dtype = torch.float32 if wrong == "always_float32" else weight.dtype
        size = n_tokens if wrong == "room_for_new_tokens_alone" else 8 * (t + n_tokens)

        def fresh(batch=batch):
            device = None if wrong == "cache_on_the_cpu" else ids.device
            return room(c, batch, max(1, size), dtype=dtype, device=device)

        cache = fresh()
        if wrong == "no_reset":
            if not kept or kept[0] is not model or kept[1].sizes != cache.sizes:
                kept[:] = [model, cache]
            cache = kept[1]
        new, out = ids, ids
        steps = n_tokens + {"one_too_many": 1, "one_too_few": -1}.get(wrong, 0)
        if wrong == "up_to_n_tokens":
            steps = n_tokens - t
        for step in range(steps):
            own = padding
            if wrong == "padding_not_passed":
                own = None
            if wrong == "padding_in_the_prompt_only" and step:
                own = None
            if wrong == "padding_after_the_prompt_only" and not step:
                own = None
            if wrong == "prompt_last_token_alone" and step == 0:
                new = ids[:, -1:]
            if wrong == "whole_text_each_time":
                new = out
            if wrong == "no_cache":
                cache, new = fresh(), out
            if wrong == "cache_thrown_away":
                cache = fresh()
            if wrong == "prompt_token_by_token" and step == 0:
                for token in ids.split(1, 1):
                    logits = forward(model, token, cache, own)
            else:
                logits = forward(model, new, cache, own)
            at = {"first_position": 0, "last_but_one": max(-2, -new.shape[1])}
            logits = logits[:, at.get(wrong, -1)]
            if wrong == "probabilities_for_logits":
                logits = logits.softmax(-1)
            token = pick(logits, temperature, top_k, top_p, generator)[:, None]
            if wrong == "one_row_for_all":
                token = token[:1].expand(batch, 1)
            if wrong == "prompt_read_again":
                new = torch.cat([ids[:, -1:], token], 1)
            elif wrong == "two_newest_each_time":
                new = torch.cat([out[:, -1:], token], 1)
            elif wrong == "newest_never_read":
                new = out[:, -1:]
            else:
                new = token
            out = torch.cat([out, token], 1)
        if wrong == "reads_the_last_one_twice" and steps > 0:
            forward(model, new, cache, padding)
            forward(model, new, cache, padding)
        return out[:, t:] if wrong == "prompt_left_out" else out

    return generate_cached


GENERATE_FAULTS = {
    "first_position": "The next token is drawn from the first position's logits. The last "
    "position has seen the whole prompt.",
    "last_but_one": "The next token is drawn from the last position but one: it predicts "
    "a token that is there already.",
    "whole_text_each_time": "The whole text is read again at each step, behind what the "
    "cache holds already. Read only what is new.",
    "no_cache": "Nothing is saved: at each step a new cache reads the whole text again.",
    "cache_thrown_away": "Each step gets an empty cache and one token: the model has "
    "forgotten the text.",
    "prompt_last_token_alone": "Only the last token of the prompt is read.",
    "prompt_token_by_token": "The prompt is read token by token. One pass reads all of it "
    "at once, and its matrix products are far more efficient.",
    "prompt_read_again": "The prompt's last token is read again with each new one.",
    "two_newest_each_time": "The token before the newest is read again at each step; it "
    "is in the cache already.",
    "newest_never_read": "The newest token is not read: the one before it is, again.",
    "reads_the_last_one_twice": "Passes are made whose logits nobody uses.",
    "no_reset": "The cache of the last call is used again without a reset: the model "
    "sees the last prompt before this one.",
    "prompt_left_out": "The prompt is missing from the result.",
    "one_too_many": "One token too many is added.",
    "one_too_few": "One token too few is added.",
    "up_to_n_tokens": "`n_tokens` is taken for the length of the whole text.",
    "one_row_for_all": "Every row gets the first row's token.",
    "seeds_each_call": "The seed is set in each call, so all calls draw the same. Leave "
    "the seed to the caller.",
    **MEDDLING,
    "always_the_likeliest": "The likeliest token is taken whatever the settings. "
    "`sample` draws, and takes the likeliest at temperature 0.",
    "probabilities_for_logits": "`sample` gets probabilities. It takes the softmax "
    "itself.",
    "settings_not_passed": "`sample` gets the logits alone. Pass on `temperature`, "
    "`top_k`, `top_p` and `generator`.",
    "temperature_not_passed": "The temperature is not passed on to `sample`.",
    "temperature_taken_twice": "The logits are divided by the temperature before "
    "`sample`, which divides by it itself.",
    "top_k_and_top_p_exchanged": "`sample` gets `top_p` in the place of `top_k`, or the "
    "other way round. Its order is temperature, top_k, top_p, generator.",
    "top_k_not_passed": "`top_k` is not passed on to `sample`.",
    "top_p_not_passed": "`top_p` is not passed on to `sample`.",
    "generator_not_passed": "The generator is not passed on to `sample`.",
    "generator_started_again": "Each call starts the generator again from its seed. It "
    "goes on from where it is.",
    "padding_not_passed": "`padding` is not passed on to `cached_forward`.",
    "padding_in_the_prompt_only": "`padding` is passed on for the prompt and not in the "
    "steps after it. The padding is still in the cache.",
    "padding_after_the_prompt_only": "`padding` is passed on in the steps after the "
    "prompt and not for the prompt.",
    "empty_unchecked": "An empty prompt reaches the model.",
    "too_long_unchecked": "A text that cannot fit is begun all the same, and breaks off "
    "in the middle.",
    "prompt_alone_checked": "Only the prompt is compared with max_len. The new tokens "
    "need room too.",
    "one_place_unused": "A text of exactly max_len tokens is refused. It fits.",
    "one_past_max_len": "One token more than max_len is let through.",
    "stops_at_max_len": "Fewer tokens than asked for come back, without a word.",
    "room_for_new_tokens_alone": "The cache has room for the new tokens alone. The "
    "prompt's keys are in it too.",
    "cache_on_the_cpu": "The cache is on the CPU whatever device the model is on: give "
    "`KVCache` the device of the weights.",
    "always_float32": "The cache is float32 whatever the model is.",
}
for name, sentence in GENERATE_FAULTS.items():
    generation.fault(name, sentence, generator_that(name))


def another_signature(temperature=1.0, top_k=None, top_p=None, exchanged=False):
    """Right inside, with other defaults, or two settings in another order."""

    def by_name(model, ids, n_tokens, **given):
        given = dict(temperature=temperature, top_k=top_k, top_p=top_p) | given
        return generator_that()(model, ids, n_tokens, **given)

    order = ["temperature", "top_k", "top_p", "generator", "padding"]
    if exchanged:
        order[1:3] = order[2:0:-1]

    def generate_cached(model, ids, n_tokens, *settings, **given):
        given |= dict(zip(order, settings, strict=False))
        return by_name(model, ids, n_tokens, **given)

    return generate_cached


for name, sentence, other in (
    (
        "temperature_by_default",
        "Unless given, the temperature is 1. Here it is another one.",
        dict(temperature=0),
    ),
    (
        "top_k_by_default",
        "`top_k` is not None unless given: all tokens but a few are cut without a word.",
        dict(top_k=20),
    ),
    (
        "top_p_by_default",
        "`top_p` is not None unless given: the least likely tokens are cut without a "
        "word.",
        dict(top_p=0.95),
    ),
    (
        "order_of_arguments",
        "The arguments stand in another order than in the contract.",
        dict(exchanged=True),
    ),
):
    generation.fault(name, sentence, another_signature(**other))


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
    torch.manual_seed(7)
    layer = case.call(parts["MultiHeadAttention"], 10, 6, 2, 4)
    cache = case.call(parts["KVCache"], 1, 3, 2, 9, 4)
    x, out = probe(3, 9, 10, seed=801), []

    def whole(x):
        positions = torch.arange(9)

        def rotate(heads):
            return parts["rope"](heads, positions, 100.0)

        return layer(x, torch.ones(9, 9).tril().bool(), rotate).detach()

    for piece, places in zip(
        x.split((4, 1, 3, 1), 1), torch.arange(9).split((4, 1, 3, 1)), strict=True
    ):
        q, k, v = (
            case.call(parts["split_heads"], w(piece).detach(), n)
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
    names = [n for n in vars(fields) if not n.startswith("_")]
    c = case.call(parts["TransformerConfig"], *[getattr(fields, n) for n in names])
    model = case.call(parts["Transformer"], c)
    weights = weights_for(model_shapes(fields), seed)
    held = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            held.get(f"{name}.weight", held.get(name)).copy_(value)
    return model.double(), doubled(weights)


@cached_decoder.requires(
    "Transformer in one pass and cached_forward through a KVCache give the same logits",
    "Both styles, chunk by chunk. If one style differs: positions; if both: the cache.",
)
def _(parts, case):
    for i, fields in enumerate((LONG, LONG_GPT2)):
        model, weights = built(parts, case, fields, 820 + 40 * i)
        ids = probe_ids(3, 9, below=23, seed=821)
        expected = whole_decoder(ids, weights, fields)
        whole = case.call(model, ids)
        case.close(whole, expected, "the logits of one pass", tolerance=ANGLES)
        sizes = (fields.n_layers, 3, fields.n_kv_heads, 12, fields.d_head)
        cache = case.call(parts["KVCache"], *sizes, dtype=torch.float64)
        for again in range(2):
            pieces, taken = [], (4, 1, 3, 1) if again else (2, 3, 4)
            for piece in ids.split(taken, 1):

                def run(piece, cache=cache, model=model):
                    return parts["cached_forward"](model, piece, cache)

                pieces.append(case.call(run, piece))
            what = f"style {fields.style}, chunks {taken}: the logits"
            case.close(torch.cat(pieces, 1), expected, what, tolerance=ANGLES)
            case.call(cache.reset)


@cached_decoder.requires(
    "generate and generate_cached write the same text, greedy and drawn",
    "Both draw with your `sample`: with one seed they draw the same tokens as long as "
    "their logits agree.",
)
def _(parts, case):
    for i, fields in enumerate((LONG, LONG_GPT2)):
        model, _ = built(parts, case, fields, 860 + 40 * i)
        for settings in (dict(temperature=0), dict(temperature=1.5, top_k=9)):
            texts = []
            for name in ("generate", "generate_cached"):
                made = seeded(3)
                texts.append(
                    case.call_in_place(
                        parts[name], model, PROMPTS, 9, generator=made, **settings
                    )
                )
            case.equal(
                texts[1], texts[0], f"with {settings}: the text through the cache"
            )


def knobbed_decoder(knob):
    """A `Transformer` of lesson 08 whose forward pass does something else."""

    def make(config):
        class Transformer(Decoder):
            def forward(self, ids):
                held = {
                    n.removesuffix(".weight"): p for n, p in self.named_parameters()
                }
                return whole_decoder(ids, held, self.config, knob)

        fields = {n: getattr(config, n) for n in vars(LLAMA)}
        fields = SimpleNamespace(**fields)
        return Transformer(fields, {})

    return make


for name, sentence, wrong in (
    (
        "mask_top_left",
        "`chunk_mask` is aligned top-left: behind a prefix a chunk sees too little.",
        {"chunk_mask": mask_that(past=lambda i, j, t_q, t_k: j <= i)},
    ),
    (
        "rope_counts_from_the_chunk",
        "`rope` numbers the positions itself, from 0, and ignores those it is given.",
        {
            "rope": lambda x, positions, base=10_000.0: turned(
                x, torch.arange(x.shape[-2]), base
            )
        },
    ),
    (
        "heads_not_merged_back",
        "`merge_heads` does not bring heads and positions back into their order.",
        {"merge_heads": lambda x: x.reshape(x.shape[0], x.shape[2], -1)},
    ),
    (
        "mask_read_inverted",
        "`attention` reads True as “hidden”.",
        {"attention": lambda q, k, v, mask=None: attended(q, k, v, ~mask)},
    ),
    (
        "layers_share_a_buffer",
        "`KVCache` gives all layers one buffer.",
        {
            "KVCache": type(
                "KVCache",
                (Cache,),
                {
                    "write": lambda self, layer, start, k, v: [
                        Cache.write(self, each, start, k, v)
                        for each in range(self.sizes[0])
                    ]
                },
            )
        },
    ),
    (
        "whole_buffer",
        "`KVCache.append` returns its empty places too.",
        {
            "KVCache": type(
                "KVCache",
                (Cache,),
                {"seen": lambda self, layer, *_: (self.k[layer], self.v[layer])},
            )
        },
    ),
    (
        "no_reset",
        "`KVCache.reset` forgets nothing.",
        {
            "KVCache": type(
                "KVCache",
                (Cache,),
                {"reset": lambda self: hasattr(self, "stops") or Cache.reset(self)},
            )
        },
    ),
    (
        "prefill_sees_the_future",
        "`cached_forward` has no mask for a chunk.",
        {"cached_forward": forward_with("prefill_sees_the_future")},
    ),
    (
        "position_zero",
        "`cached_forward` starts at position 0 in every call.",
        {"cached_forward": forward_with("position_zero")},
    ),
    (
        "model_without_a_mask",
        "`Transformer` sees the future in one pass, which no cache can give.",
        {"Transformer": knobbed_decoder("no_mask")},
    ),
    (
        "newest_never_read",
        "`generate_cached` does not read what it has just written.",
        {"generate_cached": generator_that("newest_never_read")},
    ),
    (
        "settings_not_passed",
        "`generate_cached` ignores `top_k`.",
        {"generate_cached": generator_that("top_k_not_passed")},
    ),
):
    cached_decoder.fault(name, sentence, wrong)
