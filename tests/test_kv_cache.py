"""Lesson 10: the cache against lesson 08's model; other forms; wrong answers."""

import math
from functools import partial
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.nn.functional as F

from solutions.attention import attention, causal_mask
from solutions.forward_pass import Transformer, TransformerConfig, generate, sample
from solutions.kv_cache import (
    KVCache,
    RollingKVCache,
    cached_forward,
    chunk_mask,
    generate_cached,
    kv_cache_bytes,
)
from solutions.multi_head import merge_heads, repeat_kv, split_heads
from solutions.positions import rope
from tests.answers import fails, passes
from utils.check.exercise import find
from utils.probe import probe, probe_ids

CONFIGS = [
    TransformerConfig(51, 24, 3, 6, 2, 4, 40, 40),
    TransformerConfig(47, 24, 2, 6, 1, 8, 33, 40, tied=False, rope_base=300.0),
    TransformerConfig(51, 24, 3, 6, 3, 5, 40, 40, style="gpt2"),
]
near = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)


def model_of(config, seed=0):
    """A decoder with weights of usual size, so that a mistake shows."""
    model = Transformer(config).eval().requires_grad_(False)
    for i, p in enumerate(model.parameters()):
        norm = p.dim() == 1
        scale = 0.3 if norm else p.shape[-1] ** -0.5
        p.copy_(probe(*p.shape, seed=seed + i, scale=scale, shift=float(norm)))
    return model


def room(c, batch, max_len=40, **kind):
    return KVCache(c.n_layers, batch, c.n_kv_heads, max_len, c.d_head, **kind)


def through(model, ids, cache, chunks, *padding):
    parts = ids.split(chunks, 1)
    return torch.cat([cached_forward(model, x, cache, *padding) for x in parts], 1)


# The reference ------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_chunks_give_the_logits_and_the_texts_of_one_pass(config):
    model, cache = model_of(config), room(config, 3)
    ids = probe_ids(3, 17, below=config.vocab_size)
    for chunks in ([17], [1] * 17, [4] + [1] * 13, [2, 3, 1, 5, 6]):
        near(through(model, ids, cache, chunks), model(ids))
        cache.reset()
    for settings in ({"temperature": 0}, {"temperature": 1.3, "top_k": 7}):
        one, other = (
            f(model, ids, 20, generator=torch.Generator().manual_seed(3), **settings)
            for f in (generate, generate_cached)
        )
        assert torch.equal(one, other)
        assert not other.is_inference(), "an ordinary tensor"


@pytest.mark.parametrize("config", CONFIGS)
def test_left_padded_rows_give_what_they_give_alone(config):
    model = model_of(config, seed=50)
    ids, pads = probe_ids(4, 12, below=config.vocab_size), [0, 3, 7, 1]
    for chunks in ([12], [9, 1, 1, 1], [2, 6, 4]):
        logits = through(model, ids, room(config, 4), chunks, torch.tensor(pads))
        assert logits.isfinite().all(), "at padding, too"
        for row, pad in enumerate(pads):
            near(logits[row, pad:], model(ids[row : row + 1, pad:])[0])


@pytest.mark.parametrize("window", [1, 3, 8, 30])
def test_rolling_cache_is_attention_with_a_window(window):
    c = CONFIGS[0]
    model, ids = model_of(c), probe_ids(2, 20, below=c.vocab_size)
    x = model.embedding(ids)
    for block in model.blocks:
        x = block(x, causal_mask(20).triu(1 - window), torch.arange(20))
    cache = RollingKVCache(c.n_layers, 2, c.n_kv_heads, window, c.d_head)
    for _ in range(2):
        near(through(model, ids, cache, 1), model.head(model.norm(x)))
        assert cache.length == 20
        cache.reset()


def test_bytes_are_those_of_the_tensors():
    for c, dtype in zip(CONFIGS, (torch.float32, torch.bfloat16), strict=False):
        cache = room(c, 3, max_len=13, dtype=dtype)
        assert cache.k.nbytes + cache.v.nbytes == kv_cache_bytes(c, 13, 3, dtype)


def test_grouped_heads_are_not_copied():
    """A step takes little memory beside the cache, however many heads share one."""
    c = TransformerConfig(20, 64, 1, 8, 1, 8, 8, 5_000)
    model, cache = model_of(c), room(c, 1, max_len=5_000)
    cached_forward(model, probe_ids(1, 3, below=20), cache)
    cache.lengths = [4_990]
    with torch.profiler.profile(profile_memory=True) as watched:
        cached_forward(model, probe_ids(1, 1, below=20), cache)
    largest = max(e.self_cpu_memory_usage for e in watched.events())
    assert largest < cache.k.nbytes, "nothing as large as all keys is made"


def test_bad_input_is_one_sentence_with_the_numbers_and_a_remedy():
    c, ids = CONFIGS[0], probe_ids(2, 9, below=51)
    model, wide = model_of(c), model_of(c).double()
    for call, words in (
        (partial(cached_forward, model, ids, room(c, 2, 8)), "9 positions.* 8: reset"),
        (partial(cached_forward, model, ids, room(c, 5)), r"\(2, .*\(5, .*build it"),
        (partial(cached_forward, wide, ids, room(c, 2)), "float64.*float32"),
        (partial(KVCache, 1, 2, 3, 4, 5, dtype=torch.int8), "int8.*floating-point"),
        (partial(generate_cached, model, ids, 32), "41, but max_len is 40"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


# Right answers in other forms ---------------------------------------------------------


def check_new(memory, *new):
    """Refuses keys and values that do not fit into `memory`, (B, K, …, Dh)."""
    for x in new:
        size = (*memory.shape[:2], new[0].shape[2], memory.shape[-1])
        kinds = (x.dtype, x.device), (memory.dtype, memory.device)
        if x.shape != size or kinds[0] != kinds[1]:
            raise ValueError(f"{x.shape} {kinds[0]} is not {size} {kinds[1]}")


class OneLength(KVCache):
    """A list of buffers, not set to zero, and one length that the last layer moves."""

    length = 0

    def __init__(self, *sizes, **kind):
        super().__init__(*sizes, **kind)
        both = torch.full_like(torch.stack([self.k, self.v], 1), torch.nan)
        self.pairs = list(both)
        del self.k, self.v

    def append(self, layer, k, v):
        if layer not in range(len(self.pairs)):
            raise ValueError(f"no layer {layer} in {len(self.pairs)}")
        pair, end = self.pairs[layer], self.length + k.size(2)
        check_new(pair[0], k, v)
        if end > pair.shape[3]:
            raise ValueError(f"{end} > {pair.shape[3]}")
        pair[0].narrow(2, self.length, k.size(2)).copy_(k)
        pair[1].narrow(2, self.length, k.size(2)).copy_(v)
        if layer == len(self.pairs) - 1:
            self.length = end
        return [x.narrow(2, 0, end) for x in pair]

    def reset(self):
        self.length = 0


class ByConcatenation:
    """No ring: the old and the new side by side, a copy of the last ones kept."""

    def __init__(self, n_layers, batch, n_kv_heads, window, d_head, **kind):
        RollingKVCache(n_layers, batch, n_kv_heads, window, d_head)  # for its refusals
        self.empty = torch.zeros(batch, n_kv_heads, 0, d_head, **kind)
        self.window, self.n_layers = window, n_layers
        self.reset()

    def reset(self):
        self.kept = [(self.empty, self.empty) for _ in range(self.n_layers)]
        self.length = 0

    def append(self, layer, k, v):
        check_new(self.empty, k, v)
        pairs = zip(self.kept[layer], (k, v), strict=True)
        both = [torch.cat([old, new], 2) for old, new in pairs]
        self.kept[layer] = [self.keep(x) for x in both]
        self.length += k.shape[2] * (layer == self.n_layers - 1)
        return [x[:, :, 1 - self.window - k.shape[2] :] for x in both]

    def keep(self, x):
        return x[:, :, -self.window :].clone()


def mask_by_positions(t_q, t_k, padding=None):
    if t_q > t_k:
        raise ValueError(f"{t_q} queries but {t_k} keys")
    device = None if padding is None else padding.device
    keys = torch.arange(t_k, device=device)
    starts = torch.zeros(1, device=device) if padding is None else padding
    return (keys <= keys[t_k - t_q :, None]) & (keys >= starts.view(-1, 1, 1, 1))


def mask_by_loop(t_q, t_k, padding=None):
    rows = [0] if padding is None else padding
    device = None if padding is None else padding.device
    masks = [causal_mask(t_q, t_k).to(device) for _ in rows]
    for mask, pad in zip(masks, rows, strict=True):
        mask[:, :pad] = False
    return torch.stack(masks).unsqueeze(1)


def attend_by_copies(q, k, v, mask):
    group = q.shape[1] // k.shape[1]
    return attention(q, repeat_kv(k, group), repeat_kv(v, group), mask)


def rotated_first(q, k, v, append, turn, at, cache):
    places = at(cache.length)
    return turn(q, places), *append(turn(k, places), v)


def plain(
    model, ids, cache, padding=None, attend=attend_by_copies, store=rotated_first
):
    """`rope` in each layer, a mask in every case; parts to be changed."""
    c = model.config
    with torch.no_grad():
        start, t = cache.length, ids.size(1)
        if start + t > c.max_len:
            raise ValueError(f"{start + t} is too long for {c.max_len}")

        def at(first, t=t):
            places = torch.arange(t, device=ids.device) + first
            return places if padding is None else (places - padding[:, None]).relu()

        def turn(x, places):
            return rope(x, places, c.rope_base) if c.style == "llama" else x

        x = model.embedding(ids)
        if c.style == "gpt2":
            x = x + model.positions(at(start))
        for i, block in enumerate(model.blocks):
            a, y = block.attention, block.norm_1(x)
            q = split_heads(a.w_q(y), c.n_heads)
            k, v = (split_heads(w(y), c.n_kv_heads) for w in (a.w_k, a.w_v))
            q, k, v = store(q, k, v, partial(cache.append, i), turn, at, cache)
            mask = chunk_mask(t, k.size(2), padding).to(ids.device)
            x = x + a.w_o(merge_heads(attend(q, k, v, mask)))
            x = x + block.feed_forward(block.norm_2(x))
        return model.head(model.norm(x))


def attend_fused(q, k, v, mask):
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.masked_fill(~mask.any(-1, keepdim=True), 0)


def rotated_anew(q, k, v, append, turn, at, cache):
    """A cache may hold keys as they were, if each gets its own position every time."""
    start, t = cache.length, q.shape[2]
    k, v = append(k, v)
    places = at(0, start + t)[..., -k.shape[2] :]
    return turn(q, at(start)), turn(k, places), v


KEPT = WeakKeyDictionary()


def filled_in(model, ids, n_tokens, *settings, padding=None, **named):
    """The text in a tensor of its final size; caches of earlier calls, with a reset."""
    c, t, p = model.config, ids.shape[1], model.embedding.weight
    if t == 0 or t + n_tokens > c.max_len:
        raise ValueError(f"{t} tokens, {t + n_tokens} in the end, max_len {c.max_len}")
    new = room(c, len(ids), c.max_len, dtype=p.dtype, device=p.device)
    cache = KEPT.setdefault(model, {}).setdefault((len(ids), p.dtype), new)
    cache.reset()
    text, read = torch.cat([ids, ids.new_zeros(len(ids), n_tokens)], 1), 0
    for stop in range(t, t + n_tokens):
        logits = cached_forward(model, text[:, read:stop], cache, padding=padding)
        text[:, stop] = sample(logits[:, -1], *settings, **named)
        read = stop
    return text


OTHER_FORMS = {
    "KVCache": (OneLength,),
    "RollingKVCache": (ByConcatenation,),
    "chunk_mask": (mask_by_positions, mask_by_loop),
    "cached_forward": (
        plain,
        partial(plain, attend=attend_fused),
        partial(plain, store=rotated_anew),
    ),
    "generate_cached": (filled_in,),
}


def listed(table):
    return [(name, i) for name in table for i in range(len(table[name]))]


@pytest.mark.parametrize(("name", "number"), listed(OTHER_FORMS))
def test_other_forms_pass(name, number):
    passes(OTHER_FORMS[name][number], name)


def test_other_forms_fit_together():
    parts = find("cached_decoder").reference
    others = {n: OTHER_FORMS[n][0] for n in parts if n in OTHER_FORMS}
    passes(parts | others, "cached_decoder")


# Mistakes in a form of their own, and the names that they should get ------------------


def changed(base, **methods):
    return type(base.__name__, (base,), methods)


def stored(change, base=KVCache):
    """A cache with `change` made to what `append` returns."""

    def append(self, layer, k, v):
        return change(*base.append(self, layer, k, v))

    return changed(base, append=append)


class Grows(ByConcatenation):
    """`torch.cat` in place of memory, and no test of max_len."""

    def __init__(self, n_layers, batch, n_kv_heads, max_len, d_head, **kind):
        super().__init__(n_layers, batch, n_kv_heads, 999, d_head, **kind)


class KeepsOnTheClass(KVCache):
    """`cache = {}` in the body of the class."""

    cache = {}  # noqa: RUF012
    length = property(lambda self: self.cache[0][0].shape[2] if self.cache else 0)

    def append(self, layer, k, v):
        old = self.cache.get(layer, (k[:, :, :0], v[:, :, :0]))
        self.cache[layer] = [torch.cat(x, 2) for x in zip(old, (k, v), strict=True)]
        return self.cache[layer]


class NotCloned(ByConcatenation):
    def keep(self, x):
        return x[:, :, -self.window :]


Grows.__name__, NotCloned.__name__ = "KVCache", "RollingKVCache"


def late(keys):
    """Keys go in before they are rotated, and `keys` rotates what comes out."""

    def store(q, k, v, append, turn, at, cache):
        places, new = at(cache.length), turn(k, at(cache.length))
        k, v = append(k, v)
        return turn(q, places), keys(k, new, partial(turn, places=places)), v

    return partial(plain, store=store)


def length_after(q, k, v, append, turn, at, cache):
    k, v = append(turn(k, at(cache.length)), v)
    return turn(q, at(cache.length)), k, v


def tiled(q, k, v, mask):
    group = q.shape[1] // k.shape[1]
    return attention(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), mask)


def top_left(q, k, v, mask):
    return attend_by_copies(q, k, v, causal_mask(k.shape[2])[: q.shape[2]])


def useless_last_pass(model, ids, n_tokens, *settings, **named):
    text = generate_cached(model, ids, n_tokens, *settings, **named)
    if n_tokens:
        plain(model, text[:, -1:], room(model.config, len(ids)))
    return text


NAMED = {
    "KVCache": {"grown_by_concatenation": Grows, "state": KeepsOnTheClass},
    "RollingKVCache": {"more_kept_than_the_window": NotCloned},
    "cached_forward": {
        "old_keys_at_the_new_position": late(lambda k, new, turn: turn(k)),
        "rotated_by_their_place": late(
            lambda k, new, turn: turn(k, places=torch.arange(k.shape[2]))
        ),
        "stored_before_rotation": late(
            lambda k, new, turn: torch.cat([k[:, :, : -new.shape[2]], new], 2)
        ),
        "length_read_after_append": partial(plain, store=length_after),
        "group_of_heads_tiled": partial(plain, attend=tiled),
        "mask_top_left": partial(plain, attend=top_left),
    },
    "generate_cached": {"useless_last_pass": useless_last_pass},
}


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name in NAMED for fault in NAMED[name]]
)
def test_mistakes_in_another_form_are_named(name, fault):
    fails(NAMED[name][fault], name, fault)


def test_messages_about_a_cache_are_sentences():
    turned = stored(lambda k, v: (k.transpose(1, 2), v))
    assert "what `append` returns as keys has shape" in fails(turned).message
    ahead = changed(KVCache, length=property(lambda self: min(self.lengths) + 1))
    assert "was `append(" in fails(ahead).message
    method = changed(KVCache, length=lambda self: min(self.lengths))
    assert "property" in fails(method).message


# Wrong answers that no fault lists ----------------------------------------------------


def built_with(base, change):
    def __init__(self, *sizes, dtype=None, device=None):
        base.__init__(self, *change(list(sizes), dtype, device))

    return changed(base, __init__=__init__)


def of_either(base):
    """Wrong in both caches."""
    return (
        built_with(base, lambda n, dtype, device: (*n, dtype or torch.float32, device)),
        stored(lambda k, v: torch.stack([k, v]), base),
        changed(base, length=property(lambda self: torch.tensor(min(self.lengths)))),
    )


def additive(q, k, v, mask):
    k, v = (repeat_kv(x, q.shape[1] // x.shape[1]) for x in (k, v))
    return (q @ k.mT / math.sqrt(q.shape[-1]) + mask).softmax(-1) @ v


COUNT = {"at": 0}


def positions_kept_outside(q, k, v, append, turn, at, cache):
    COUNT["at"] = COUNT["at"] * (cache.length > 0) + q.shape[2]
    places = at(COUNT["at"])
    return turn(q, places), *append(turn(k, places), v)


def meddling(before, after=lambda model: None):
    """Either of the two functions, with something done to the model or to torch."""

    def answer(model, ids, third, *args, **kwargs):
        f = generate_cached if isinstance(third, int) else plain
        before(model)
        out = f(model, ids, third, *args, **kwargs)
        after(model)
        return out

    return answer


MEDDLING = (
    meddling(lambda model: torch.set_grad_enabled(False)),
    meddling(lambda model: None, lambda model: torch.set_grad_enabled(True)),
    meddling(lambda model: model.requires_grad_(False)),
    meddling(lambda model: model.eval()),
    meddling(lambda model: None, lambda model: model.train()),
)


def changing(change):
    """`generate_cached` with other settings."""
    return lambda *given, **named: generate_cached(*given, **change(named))


def stops_at_max_len(model, ids, n, *settings, **named):
    n = min(n, model.config.max_len - ids.shape[1])
    return generate_cached(model, ids, n, *settings, **named)


def cost(change):
    """`kv_cache_bytes` with a change made to the result."""
    return lambda *given, **named: change(kv_cache_bytes(*given, **named))


WRONG = {
    "KVCache": of_either(KVCache),
    "RollingKVCache": (KVCache, *of_either(RollingKVCache)),
    "chunk_mask": (
        lambda *given, **named: chunk_mask(*given, **named).to(torch.uint8),
        lambda *given, **named: (  # padding may look at everything
            (mask := chunk_mask(*given, **named)) | ~mask.any(-1, keepdim=True)
        ),
        lambda t_q, t_k, padding=None: (  # a table
            chunk_mask(2048, 2048, padding)[..., t_k - t_q : t_k, :t_k]
        ),
    ),
    "cached_forward": (
        partial(plain, attend=additive),
        partial(plain, store=positions_kept_outside),
        lambda model, ids, cache, padding=None: model(ids),
        lambda model, ids, *given: plain(model, ids[:1].expand_as(ids), *given),
        *MEDDLING,
    ),
    "generate_cached": (
        changing(lambda named: {"temperature": 0.9} | named),
        changing(lambda named: {"top_k": 20} | named),
        changing(lambda named: {"top_p": 0.95} | named),
        changing(lambda named: named | {"generator": torch.Generator()}),
        stops_at_max_len,
        meddling(lambda model: torch.manual_seed(0)),
        *MEDDLING,
    ),
    "kv_cache_bytes": (
        cost(float),
        cost(lambda n: int(torch.tensor(float(n)))),  # float32 holds 24 binary digits
        cost(lambda n: (n + 2**31) % 2**32 - 2**31),  # int32
    ),
}


@pytest.mark.parametrize(("name", "number"), listed(WRONG))
def test_other_wrong_answers_fail(name, number):
    fails(WRONG[name][number], name)
