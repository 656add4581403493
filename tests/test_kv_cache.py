"""Lesson 10: the cache against lesson 08's model; other forms; wrong answers."""

import math
from collections import deque
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from solutions import kv_cache as reference
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
from utils.check import evaluate, evaluate_joint
from utils.check.exercise import Joint
from utils.exercises import kv_cache as spec
from utils.probe import probe, probe_ids


def passes(answer, name):
    report = evaluate(answer, name)
    assert report.status == "passed", report.message


def fails(answer, name, fault=None):
    report = evaluate(answer, name)
    assert report.status == "failed", f"{answer} passes"
    if fault is not None:
        assert report.fault == fault, report.message
    return report


CONFIGS = [
    TransformerConfig(51, 24, 3, 6, 2, 4, 40, 40),
    TransformerConfig(47, 24, 2, 6, 1, 8, 33, 40, tied=False, rope_base=300.0),
    TransformerConfig(50, 20, 4, 5, 5, 4, 64, 40),
    TransformerConfig(51, 24, 3, 6, 3, 5, 40, 40, style="gpt2"),
    TransformerConfig(50, 20, 2, 5, 1, 3, 64, 40, style="gpt2", tied=False),
]


def model_of(config, seed=0):
    """A decoder with weights of usual size, so that a mistake shows."""
    model = Transformer(config).eval()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            scale = p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3
            p.copy_(
                probe(*p.shape, seed=seed + i, scale=scale, shift=float(p.dim() == 1))
            )
    return model


def room(c, batch, max_len=40, **kind):
    return KVCache(c.n_layers, batch, c.n_kv_heads, max_len, c.d_head, **kind)


# The reference ------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_chunks_of_any_kind_give_the_logits_of_one_pass(config):
    model = model_of(config)
    ids = probe_ids(3, 17, below=config.vocab_size)
    with torch.no_grad():
        whole = model(ids)
    cache = room(config, 3)
    for chunks in ([17], [1] * 17, [4] + [1] * 13, [2, 3, 1, 5, 6], [16, 1]):
        parts = [cached_forward(model, part, cache) for part in ids.split(chunks, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)
        assert cache.length == 17
        cache.reset()


@pytest.mark.parametrize("config", CONFIGS)
def test_left_padded_rows_give_what_they_give_alone(config):
    model = model_of(config, seed=50)
    ids, pads = probe_ids(4, 12, below=config.vocab_size), [0, 3, 7, 1]
    for chunks in ([12], [9, 1, 1, 1], [2, 6, 4]):
        cache = room(config, 4)
        logits = torch.cat(
            [
                cached_forward(model, part, cache, torch.tensor(pads))
                for part in ids.split(chunks, 1)
            ],
            1,
        )
        for row, pad in enumerate(pads):
            with torch.no_grad():
                alone = model(ids[row : row + 1, pad:])[0]
            torch.testing.assert_close(logits[row, pad:], alone, atol=1e-4, rtol=1e-4)
        assert logits.isfinite().all(), "at padding, too"


@pytest.mark.parametrize("config", CONFIGS)
def test_texts_are_those_of_generate(config):
    model = model_of(config, seed=90)
    ids = probe_ids(3, 5, below=config.vocab_size)
    for settings in (dict(temperature=0), dict(temperature=1.3, top_k=7, top_p=0.9)):
        texts = [
            f(model, ids, 20, generator=torch.Generator().manual_seed(3), **settings)
            for f in (generate, generate_cached)
        ]
        assert torch.equal(*texts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    config = CONFIGS[0]
    model = model_of(config).to(dtype)
    ids = probe_ids(2, 9, below=config.vocab_size)
    cache = room(config, 2, dtype=dtype)
    parts = [cached_forward(model, part, cache) for part in ids.split([4, 1, 4], 1)]
    with torch.no_grad():
        whole = model.float()(ids)
    found = torch.cat(parts, 1)
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float64 else 0.15
    torch.testing.assert_close(found.float(), whole, atol=tolerance, rtol=tolerance)


def test_cache_of_transformers_holds_the_same_keys_up_to_their_order():
    """Rotated keys, one head: theirs pair halves, ours neighbours."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    c = TransformerConfig(31, 16, 2, 4, 2, 8, 24, 32)
    ours = model_of(c, seed=7)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=31,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            max_position_embeddings=32,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )
    ).eval()

    def halves(weight, n_heads):
        return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    names = {
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        "attention.w_q": "self_attn.q_proj",
        "attention.w_k": "self_attn.k_proj",
        "attention.w_v": "self_attn.v_proj",
        "attention.w_o": "self_attn.o_proj",
        "feed_forward.w_1": "mlp.gate_proj",
        "feed_forward.w_3": "mlp.up_proj",
        "feed_forward.w_2": "mlp.down_proj",
    }
    state = {
        "model.embed_tokens.weight": ours.embedding.weight,
        "lm_head.weight": ours.embedding.weight,
        "model.norm.weight": ours.norm.weight,
    }
    held = dict(ours.named_parameters())
    for i in range(2):
        for name, other in names.items():
            weight = held[f"blocks.{i}.{name}.weight"]
            if name in ("attention.w_q", "attention.w_k"):
                weight = halves(weight, 4 if name.endswith("q") else 2)
            state[f"model.layers.{i}.{other}.weight"] = weight
    theirs.load_state_dict(state)
    ids = probe_ids(2, 9, below=31)
    cache, past = room(c, 2), DynamicCache(config=theirs.config)
    for part in ids.split([4, 1, 4], 1):
        found = cached_forward(ours, part, cache)
        with torch.no_grad():
            out = theirs(part, cache=past, use_cache=True)
        torch.testing.assert_close(found, out.logits, atol=1e-4, rtol=1e-4)
    keys = past.layers[1].keys  # B K T Dh
    mine = cache.k[1, :, :, :9].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(mine, keys, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [1, 3, 8, 30])
def test_rolling_cache_is_attention_with_a_window(window):
    c = CONFIGS[0]
    model, ids = model_of(c), probe_ids(2, 20, below=c.vocab_size)
    band = causal_mask(20) & ~causal_mask(20).tril(-window)
    with torch.no_grad():
        x = model.embedding(ids)
        for block in model.blocks:
            x = block(x, band, torch.arange(20))
        truth = model.head(model.norm(x))
    cache = RollingKVCache(c.n_layers, 2, c.n_kv_heads, window, c.d_head)
    for _ in range(2):
        parts = [cached_forward(model, part, cache) for part in ids.split(1, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), truth, atol=1e-4, rtol=1e-4)
        assert cache.length == 20
        cache.reset()


def test_bytes_are_those_of_the_tensors():
    for c in CONFIGS:
        for dtype in (torch.float32, torch.bfloat16):
            cache = room(c, 3, max_len=13, dtype=dtype)
            taken = cache.k.nbytes + cache.v.nbytes
            assert taken == kv_cache_bytes(c, 13, 3, dtype)


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


# Bad input ----------------------------------------------------------------------------


def test_bad_input_is_one_sentence_with_the_numbers_and_a_remedy():
    c = CONFIGS[0]
    model, ids = model_of(c), probe_ids(2, 9, below=51)
    wide = model_of(c).double()
    cases = [
        (partial(cached_forward, model, ids, room(c, 2, 8)), "9 positions.* 8: reset"),
        (partial(cached_forward, model, ids, room(c, 5)), r"\(2, .*\(5, .*build it"),
        (partial(cached_forward, wide, ids, room(c, 2)), "float64.*float32"),
        (partial(chunk_mask, 5, 3), "5 queries .* 3 positions"),
        (partial(KVCache, 1, 2, 3, 4, 5, dtype=torch.int8), "int8.*floating-point"),
        (partial(KVCache, 1, 0, 3, 4, 5), "at least 1"),
        (partial(kv_cache_bytes, c, 3, 1, torch.bool), "bool"),
        (partial(generate_cached, model, ids[:, :0], 3), "empty"),
        (partial(generate_cached, model, ids, 32), "41, but max_len is 40"),
        (
            partial(RollingKVCache(1, 2, 3, 4, 5).append, 0, *spec.chunk(2, batch=1)),
            r"\(1, 3, 2, 5\).*\(2, 3, T, 5\)",
        ),
        (
            partial(
                KVCache(1, 2, 3, 4, 5).append,
                0,
                *(x.to("meta") for x in spec.chunk(2)),
            ),
            "meta.*cpu: build it like the model",
        ),
    ]
    for call, words in cases:
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_refused_pass_leaves_the_cache_usable():
    c = CONFIGS[0]
    model, ids, cache = model_of(c), probe_ids(2, 9, below=51), room(c, 2, 8)
    first = cached_forward(model, ids[:, :5], cache)
    with pytest.raises(ValueError, match="reset it"):
        cached_forward(model, ids[:, 5:], cache)
    assert cache.length == 5
    rest = cached_forward(model, ids[:, 5:8], cache)
    with torch.no_grad():
        whole = model(ids[:, :8])
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, atol=1e-4, rtol=1e-4)


# Right answers in other forms ---------------------------------------------------------


class OneLength:
    """A list of buffers, and one length that the last layer moves."""

    def __init__(
        self, n_layers, batch, n_kv_heads, max_len, d_head, dtype=None, device=None
    ):
        sizes = (n_layers, batch, n_kv_heads, max_len, d_head)
        if any(size <= 0 for size in sizes):
            raise ValueError(f"{sizes}")
        if dtype and not torch.empty(0, dtype=dtype).is_floating_point():
            raise ValueError(f"{dtype}")
        self.sizes, self.length = sizes, 0
        self.pairs = [
            torch.empty(2, *sizes[1:], dtype=dtype, device=device)
            for _ in range(n_layers)
        ]

    def append(self, layer, k, v):
        n_layers, b, n, max_len, d = self.sizes
        if layer not in range(n_layers):
            raise ValueError(f"no layer {layer} in {n_layers}")
        pair, end = self.pairs[layer], self.length + k.size(2)
        for x in (k, v):
            if x.shape != (b, n, k.size(2), d) or x.dtype != pair.dtype:
                raise ValueError(f"{x.shape} {x.dtype} for {self.sizes} {pair.dtype}")
            if x.device != pair.device:
                raise ValueError(f"{x.device} is not {pair.device}")
        if end > max_len:
            raise ValueError(f"{end} > {max_len}")
        pair[0].narrow(2, self.length, k.size(2)).copy_(k)
        pair[1].narrow(2, self.length, k.size(2)).copy_(v)
        if layer == n_layers - 1:
            self.length = end
        return pair[0].narrow(2, 0, end), pair[1].narrow(2, 0, end)

    def reset(self):
        self.length = 0


class BatchFirst(KVCache):
    """Memory in another order: positions before heads."""

    def __init__(
        self, n_layers, batch, n_kv_heads, max_len, d_head, dtype=None, device=None
    ):
        super().__init__(n_layers, batch, n_kv_heads, max_len, d_head, dtype, device)
        shape = (batch, n_layers, max_len, n_kv_heads, d_head)
        self.k, self.v = (
            torch.zeros(shape, dtype=dtype, device=device).permute(1, 0, 3, 2, 4)
            for _ in "kv"
        )


class KeysAndValuesTogether(KVCache):
    """One tensor for both, an attribute for the length, a list for the layers."""

    def __init__(
        self, n_layers, batch, n_kv_heads, max_len, d_head, dtype=None, device=None
    ):
        super().__init__(n_layers, batch, n_kv_heads, max_len, d_head, dtype, device)
        shape = (2, n_layers, batch, n_kv_heads, max_len, d_head)
        self.k, self.v = torch.empty(shape, dtype=dtype, device=device).unbind(0)

    def append(self, layer, k, v):
        return list(super().append(layer, k, v))


class Strict(KVCache):
    """Layers must come in their order."""

    def append(self, layer, k, v):
        ahead = self.lengths[: max(layer, 0)]
        assert all(n == self.lengths[0] for n in ahead)
        return super().append(layer=layer, k=k, v=v)


class Slotted:
    """Nothing in a dictionary; lengths in a tensor."""

    __slots__ = ("k", "lengths", "max_len", "v")

    def __init__(
        self, n_layers, batch, n_kv_heads, max_len, d_head, dtype=None, device=None
    ):
        whole = KVCache(n_layers, batch, n_kv_heads, max_len, d_head, dtype, device)
        self.k, self.v, self.max_len = list(whole.k), list(whole.v), max_len
        self.lengths = torch.zeros(n_layers, dtype=torch.int64)

    @property
    def length(self):
        return self.lengths.min().item()

    def append(self, layer, k, v):
        if not 0 <= layer < len(self.k):
            raise ValueError(f"no layer {layer}")
        memory, start = self.k[layer], self.lengths[layer].item()
        for x in (k, v):
            fits = memory[:, :, :1].expand(-1, -1, k.shape[2], -1)
            if (x.shape, x.dtype, x.device) != (fits.shape, fits.dtype, fits.device):
                raise ValueError(
                    f"{x.shape} {x.dtype} {x.device}, not {fits.shape} {fits.dtype} "
                    f"{fits.device}"
                )
        stop = start + k.shape[2]
        if stop > self.max_len:
            raise ValueError(f"{stop} > {self.max_len}")
        memory[:, :, start:stop].copy_(k)
        self.v[layer][:, :, start:stop].copy_(v)
        self.lengths[layer] = stop
        return memory[:, :, :stop], self.v[layer][:, :, :stop]

    def reset(self):
        self.lengths.zero_()


FORMS = [OneLength, BatchFirst, KeysAndValuesTogether, Strict, Slotted]


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_the_cache_pass(form):
    passes(form, "KVCache")


def mask_by_positions(t_q, t_k, padding=None):
    if t_q > t_k:
        raise ValueError(f"{t_q} queries but {t_k} keys")
    device = None if padding is None else padding.device
    keys = torch.arange(t_k, device=device)
    queries = keys[t_k - t_q :, None]
    starts = torch.zeros(1, device=device) if padding is None else padding
    starts = starts.view(-1, 1, 1, 1)
    return (keys <= queries) & (keys >= starts)


def mask_by_loop(t_q, t_k, padding=None):
    if t_q > t_k:
        raise ValueError(f"{t_q}, {t_k}")
    rows = [0] if padding is None else padding
    device = None if padding is None else padding.device
    masks = [causal_mask(t_q, t_k).to(device) for _ in rows]
    for mask, pad in zip(masks, rows, strict=True):
        mask[:, :pad] = False
    return torch.stack(masks).unsqueeze(1)


def mask_by_triangles(t_q, t_k, padding=None):
    if t_k < t_q:
        raise ValueError(f"t_k {t_k} < t_q {t_q}")
    device = padding.device if padding is not None else "cpu"
    hidden = torch.ones(t_q, t_k, device=device).triu(t_k - t_q + 1) > 0
    hidden = hidden.view(1, 1, t_q, t_k)
    if padding is not None:
        columns = torch.arange(t_k, device=device).expand(len(padding), 1, t_q, t_k)
        hidden = hidden | (columns < padding.view(-1, 1, 1, 1))
    return hidden.logical_not()


def mask_at_once(t_q, t_k, padding=None):
    whole = chunk_mask(t_k, t_k, padding)
    if t_q > t_k:
        raise ValueError(f"{t_q} > {t_k}")
    return whole[..., t_k - t_q :, :].contiguous()


@pytest.mark.parametrize(
    "form", [mask_by_positions, mask_by_loop, mask_by_triangles, mask_at_once]
)
def test_other_forms_of_the_mask_pass(form):
    passes(form, "chunk_mask")


def plain(model, ids, cache, padding=None, attend=None, rotate=rope):
    """`repeat_kv`, `rope` in each layer, a mask in every case."""
    c = model.config
    with torch.no_grad():
        start, t = cache.length, ids.size(1)
        if start + t > c.max_len:
            raise ValueError(f"{start + t} is too long for {c.max_len}")
        places = torch.arange(t, device=ids.device).add(start)
        if padding is not None:
            places = torch.relu(places.unsqueeze(0) - padding.unsqueeze(1))
        x = model.embedding(ids)
        if c.style == "gpt2":
            x = x + model.positions(places)
        for i, block in enumerate(model.blocks):
            a = block.attention
            y = block.norm_1(x)
            q, k, v = (
                split_heads(a.w_q(y), c.n_heads),
                split_heads(a.w_k(y), c.n_kv_heads),
                split_heads(a.w_v(y), c.n_kv_heads),
            )
            if c.style != "gpt2":
                q = rotate(q, places, c.rope_base)
                k = rotate(k, places, c.rope_base)
            k, v = cache.append(i, k, v)
            mask = chunk_mask(t, k.size(2), padding).to(ids.device)
            out = (attend or attend_by_copies)(q, k, v, mask)
            x = x + a.w_o(merge_heads(out))
            x = x + block.feed_forward(block.norm_2(x))
        return model.head(model.norm(x))


def attend_by_copies(q, k, v, mask):
    group = q.shape[1] // k.shape[1]
    return attention(q, repeat_kv(k, group), repeat_kv(v, group), mask)


def attend_fused(q, k, v, mask):
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.masked_fill(~mask.any(-1, keepdim=True), 0)


def attend_by_heads(q, k, v, mask):
    group = q.shape[1] // k.shape[1]
    out = [
        attention(q[:, h], k[:, h // group], v[:, h // group], mask[:, 0])
        for h in range(q.shape[1])
    ]
    return torch.stack(out, 1)


def attend_grouped(q, k, v, mask):
    q = q.unflatten(1, (k.shape[1], -1))  # B K G T Dh
    scores = torch.einsum("bkgtd,bksd->bkgts", q, k) / q.shape[-1] ** 0.5
    lowest = torch.finfo(scores.dtype).min
    weights = scores.masked_fill(~mask[:, :, None], lowest).softmax(-1)
    return torch.einsum("bkgts,bksd->bkgtd", weights, v).flatten(1, 2)


def attend_in_float64(q, k, v, mask):
    wide = (x.double() for x in (q, k, v))
    return attend_by_copies(*wide, mask).to(q.dtype)


def attend_with_a_mean_where_all_is_hidden(q, k, v, mask):
    group = q.shape[1] // k.shape[1]
    k, v = repeat_kv(k, group), repeat_kv(v, group)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return torch.softmax(scores.masked_fill(~mask, -1e9), -1) @ v


@pytest.mark.parametrize(
    "attend",
    [
        attend_by_copies,
        attend_fused,
        attend_grouped,
        attend_by_heads,
        attend_in_float64,
        attend_with_a_mean_where_all_is_hidden,
    ],
)
def test_other_forms_of_the_forward_pass_pass(attend):
    passes(partial(plain, attend=attend), "cached_forward")


def test_unrotated_keys_that_are_rotated_at_each_step_pass():
    """A cache may hold keys as they were, if all get their own position each time."""

    def cached_forward(model, ids, cache, padding=None):
        c = model.config
        start, t = cache.length, ids.shape[1]
        if start + t > c.max_len:
            raise ValueError(f"{start + t} > {c.max_len}")
        at = torch.arange(start + t, device=ids.device)[None].expand(len(ids), -1)
        if padding is not None:
            at = (at - padding[:, None]).clamp(min=0)
        with torch.no_grad():
            x = model.embedding(ids)
            if c.style == "gpt2":
                x = x + model.positions(at[:, start:])
            for i, block in enumerate(model.blocks):
                a, y = block.attention, block.norm_1(x)
                q = split_heads(a.w_q(y), c.n_heads)
                k = split_heads(a.w_k(y), c.n_kv_heads)
                k, v = cache.append(i, k, split_heads(a.w_v(y), c.n_kv_heads))
                own = at[:, -k.shape[2] :]
                if c.style == "llama":
                    q = rope(q, at[:, start:], c.rope_base)
                    k = rope(k, own, c.rope_base)
                mask = chunk_mask(t, k.shape[2], padding).to(ids.device)
                x = x + a.w_o(merge_heads(attend_by_copies(q, k, v, mask)))
                x = x + block.feed_forward(block.norm_2(x))
            return model.head(model.norm(x))

    passes(cached_forward, "cached_forward")


def test_forward_pass_with_layers_of_the_cache_in_another_order_passes():
    class Turned:
        def __init__(self, cache):
            self.cache = cache

        @property
        def length(self):
            return self.cache.length

        def append(self, layer, k, v):
            n_layers = self.cache.sizes[0]
            return self.cache.append(n_layers - 1 - layer, k, v)

    def cached_forward(model, ids, cache, padding=None):
        return plain(model, ids, Turned(cache), padding)

    passes(cached_forward, "cached_forward")


def drawn_first(
    model,
    ids,
    n_tokens,
    temperature=1.0,
    top_k=None,
    top_p=None,
    generator=None,
    padding=None,
):
    """Prefill before the loop, a list of tokens, one pass more at the end."""
    c = model.config
    if ids.shape[1] < 1:
        raise ValueError("nothing to continue")
    if ids.shape[1] + n_tokens > c.max_len:
        raise ValueError(f"{ids.shape[1] + n_tokens} > {c.max_len}")
    if not n_tokens:
        return ids.clone()
    some = next(model.parameters())
    cache = OneLength(
        c.n_layers, len(ids), c.n_kv_heads, c.max_len, c.d_head, some.dtype, some.device
    )
    logits, tokens = plain(model, ids, cache, padding), []
    for _ in range(n_tokens):
        token = sample(logits[:, -1], temperature, top_k, top_p, generator)
        tokens.append(token.unsqueeze(1))
        logits = plain(model, tokens[-1], cache, padding)
    return torch.cat([ids, *tokens], 1)


def filled_in(model, ids, n_tokens, *settings, padding=None, **named):
    """The text in a tensor of its final size; one cache for all calls, with a reset."""
    c, t = model.config, ids.shape[1]
    if t == 0:
        raise ValueError("empty prompt")
    if t + n_tokens > c.max_len:
        raise ValueError(f"{t + n_tokens} tokens, max_len {c.max_len}")
    p = model.embedding.weight
    key = (id(model), len(ids), p.dtype, p.device)
    if key not in KEPT:
        KEPT[key] = room(c, len(ids), c.max_len, dtype=p.dtype, device=p.device)
    cache = KEPT[key]
    cache.reset()
    text = torch.cat([ids, ids.new_zeros(len(ids), n_tokens)], 1)
    read = 0
    for stop in range(t, t + n_tokens):
        logits = cached_forward(model, text[:, read:stop], cache, padding=padding)
        text[:, stop] = sample(logits[:, -1], *settings, **named)
        read = stop
    return text


KEPT = {}


@pytest.mark.parametrize("form", [drawn_first, filled_in])
def test_other_forms_of_generation_pass(form):
    passes(form, "generate_cached")


def test_other_forms_of_the_bytes_pass():
    def by_tensors(config, t, batch=1, dtype=torch.float16):
        if not torch.empty(0, dtype=dtype).is_floating_point():
            raise ValueError(f"{dtype}")
        keys = torch.empty(
            *(config.n_layers, batch, config.n_kv_heads, t, config.d_head),
            dtype=dtype,
            device="meta",
        )
        return keys.nbytes + keys.nbytes

    def by_finfo(config, t, batch=1, dtype=torch.float16):
        try:
            bits = torch.finfo(dtype).bits
        except TypeError as error:
            raise ValueError(f"{dtype} has no fractions") from error
        per_token = 2 * config.n_kv_heads * config.d_head * bits // 8
        return per_token * config.n_layers * t * batch

    for form in (by_tensors, by_finfo):
        passes(form, "kv_cache_bytes")


class ByConcatenation:
    """No ring: the old and the new side by side, a copy of the last ones kept."""

    def __init__(
        self, n_layers, batch, n_kv_heads, window, d_head, dtype=None, device=None
    ):
        if min(n_layers, batch, n_kv_heads, window, d_head) < 1:
            raise ValueError(
                f"sizes {n_layers}, {batch}, {n_kv_heads}, {window}, {d_head}"
            )
        empty = torch.zeros(batch, n_kv_heads, 0, d_head, dtype=dtype, device=device)
        self.empty, self.window, self.n_layers = empty, window, n_layers
        self.reset()

    def reset(self):
        self.kept = [(self.empty, self.empty) for _ in range(self.n_layers)]
        self.length = 0

    def append(self, layer, k, v):
        b, n, _, d = self.empty.shape
        for x in (k, v):
            if x.shape != (b, n, k.shape[2], d) or x.dtype != self.empty.dtype:
                raise ValueError(f"{x.shape} {x.dtype}: {self.empty.shape} {x.dtype}"
                                 f" {self.empty.dtype}")  # fmt: skip
            if x.device != self.empty.device:
                raise ValueError(f"{x.device} is not {self.empty.device}")
        pairs = zip(self.kept[layer], (k, v), strict=True)
        both = [torch.cat([old[:, :, -self.window :], new], 2) for old, new in pairs]
        self.kept[layer] = [x[:, :, -self.window :].clone() for x in both]
        if layer == self.n_layers - 1:
            self.length += k.shape[2]
        back = self.window - 1 + k.shape[2]
        return [x[:, :, -back:] for x in both]


class Shifting(RollingKVCache):
    """Memory in the order of the text: everything moves one place down."""

    def append(self, layer, k, v):
        held = min(self.lengths[layer], self.window)
        old = [x[layer][:, :, self.window - held :].clone() for x in (self.k, self.v)]
        shown = RollingKVCache(
            1, k.shape[0], k.shape[1], self.window, k.shape[3], self.k.dtype
        )
        if k.shape != (*self.k.shape[1:3], k.shape[2], self.k.shape[4]):
            return super().append(layer, k, v)
        if k.dtype != self.k.dtype or v.dtype != self.k.dtype or v.shape != k.shape:
            return super().append(layer, k, v)
        if k.device != self.k.device or v.device != self.k.device:
            return super().append(layer, k, v)
        del shown
        seen = [torch.cat([o, n], 2) for o, n in zip(old, (k, v), strict=True)]
        for kept, x in zip((self.k, self.v), seen, strict=True):
            last = x[:, :, -self.window :]
            kept[layer][:, :, self.window - last.shape[2] :] = last
        self.lengths[layer] += k.shape[2]
        back = min(held, self.window - 1) + k.shape[2]
        return tuple(x[:, :, -back:] for x in seen)


class Queue(ByConcatenation):
    """Single positions in a queue of limited length."""

    def reset(self):
        self.kept = [deque(maxlen=self.window) for _ in range(self.n_layers)]
        self.length = 0

    def append(self, layer, k, v):
        queue = self.kept[layer]
        self.kept[layer] = (self.empty, self.empty)
        try:
            super().append(layer, k, v)  # for its refusals and its length
        finally:
            self.kept[layer] = queue
        old = list(queue)[-(self.window - 1) :] if self.window > 1 else []
        pieces = zip(k.split(1, 2), v.split(1, 2), strict=True)
        new = [(a.clone(), b.clone()) for a, b in pieces]
        queue.extend(new)
        return [torch.cat(each, 2) for each in zip(*old, *new, strict=True)]


@pytest.mark.parametrize("form", [ByConcatenation, Shifting, Queue])
def test_other_forms_of_the_rolling_cache_pass(form):
    passes(form, "RollingKVCache")


# Wrong answers that no fault lists ----------------------------------------------------


def cache_with(**methods):
    return type("KVCache", (KVCache,), methods)


def test_other_wrong_caches_fail():
    append = KVCache.append

    def mean_of_heads(self, layer, k, v):
        return append(self, layer, k.mean(1, keepdim=True).expand_as(k), v)

    def detaches_batch_order(self, layer, k, v):
        return append(self, layer, k.flip(0), v)

    def rounds(self, layer, k, v):
        return append(self, layer, k.bfloat16().to(k.dtype), v)

    def one_tensor(self, layer, k, v):
        return torch.stack(append(self, layer, k, v))

    def nothing_returned(self, layer, k, v):
        append(self, layer, k, v)

    def new_first(self, layer, k, v):
        k, v = append(self, layer, k, v)
        return k.flip(2), v.flip(2)

    def changes_inputs(self, layer, k, v):
        out = append(self, layer, k, v)
        k.zero_()
        return out

    def forgets_the_first(self, layer, k, v):
        k, v = append(self, layer, k, v)
        return k[:, :, -5:], v[:, :, -5:]

    def time_and_heads(self, layer, k, v):
        return tuple(x.transpose(1, 2) for x in append(self, layer, k, v))

    def asserts(self, layer, k, v):
        assert self.lengths[layer] + k.shape[2] <= self.k.shape[3], "full"
        return append(self, layer, k, v)

    def flat(self, layer, k, v):
        return tuple(x.flatten(0, 1) for x in append(self, layer, k, v))

    for name, wrong in list(locals().items()):
        if name not in ("append", "self"):
            fails(cache_with(append=wrong), "KVCache")

    def length_as_method(self):
        return min(self.lengths)

    report = fails(cache_with(length=length_as_method), "KVCache")
    assert "property" in report.message
    fails(cache_with(length=property(lambda self: len(self.lengths))), "KVCache")
    fails(cache_with(length=property(lambda self: sum(self.lengths))), "KVCache")
    fails(cache_with(reset=lambda self: self.lengths.clear()), "KVCache")

    class Doubling(KVCache):
        """Memory that grows twofold: not taken once."""

        def append(self, layer, k, v):
            most = max(self.lengths) + k.shape[2]
            out = append(self, layer, k, v)
            if most > 4:
                self.k = self.k.clone()
                self.v = self.v.clone()
            return out

    fails(Doubling, "KVCache")


def test_clones_are_named_as_copies():
    copying = cache_with(
        append=lambda self, *given: tuple(
            x.clone() for x in KVCache.append(self, *given)
        )
    )
    fails(copying, "KVCache", "grown_by_concatenation")


def test_other_wrong_masks_fail():
    right = chunk_mask

    def none_alone(t_q, t_k, padding=None):
        return None if padding is None and t_q == 1 else right(t_q, t_k, padding)

    def rows_of_padding_open(t_q, t_k, padding=None):
        mask = right(t_q, t_k, padding)
        return mask | ~mask.any(-1, keepdim=True)

    def four_rows(t_q, t_k, padding=None):
        return right(t_q, t_k, padding).expand(4, -1, -1, -1)

    def transposed(t_q, t_k, padding=None):
        return right(t_q, t_k, padding).transpose(-1, -2)

    def longest_padding(t_q, t_k, padding=None):
        return right(t_q, t_k, None if padding is None else padding * 0 + padding.max())

    def padding_where_it_fits(t_q, t_k, padding=None):
        return right(t_q, t_k, padding if t_q == t_k else None)

    def bytes_(t_q, t_k, padding=None):
        return right(t_q, t_k, padding).to(torch.uint8)

    def clamps(t_q, t_k, padding=None):
        return right(min(t_q, t_k), t_k, padding)

    for name, wrong in list(locals().items()):
        if name != "right":
            fails(wrong, "chunk_mask")


def test_other_wrong_forward_passes_fail():
    def on_the_first_row(model, ids, cache, padding=None):
        return plain(model, ids[:1].expand(len(ids), -1), cache, padding)

    def without_gelu_style(model, ids, cache, padding=None):
        if model.config.style == "gpt2":
            model = model.double().float()
            return plain(model, ids, cache, padding).roll(1, -1)
        return plain(model, ids, cache, padding)

    def eval_mode(model, ids, cache, padding=None):
        out = plain(model, ids, cache, padding)
        return out.float()

    def probabilities(model, ids, cache, padding=None):
        return plain(model, ids, cache, padding).softmax(-1)

    def length_as_padding(model, ids, cache, padding=None):
        pads = None if padding is None else ids.shape[1] - padding
        return plain(model, ids, cache, pads)

    def global_position(model, ids, cache, padding=None):
        STATE["at"] = STATE.get("at", 0) * (cache.length > 0)
        shift = STATE["at"]
        STATE["at"] += 1
        rotate = lambda x, p, b: rope(x, p + shift, b)  # noqa: E731
        return plain(model, ids, cache, padding, rotate=rotate)

    def float_positions_in_half(model, ids, cache, padding=None):
        rotate = lambda x, p, b: rope(x, (p / 2).round(), b)  # noqa: E731
        return plain(model, ids, cache, padding, rotate=rotate)

    def whole_model(model, ids, cache, padding=None):
        return model(ids)

    def two_results(model, ids, cache, padding=None):
        return plain(model, ids, cache, padding), cache

    def causal_ignoring_padding(model, ids, cache, padding=None):
        def attend(q, k, v, mask):
            return attend_by_copies(q, k, v, chunk_mask(q.shape[2], k.shape[2]))

        return plain(model, ids, cache, padding, attend)

    def additive(model, ids, cache, padding=None):
        def attend(q, k, v, mask):
            group = q.shape[1] // k.shape[1]
            scores = q @ repeat_kv(k, group).mT / math.sqrt(q.shape[-1])
            return (scores + mask).softmax(-1) @ repeat_kv(v, group)

        return plain(model, ids, cache, padding, attend)

    def after_the_softmax(model, ids, cache, padding=None):
        def attend(q, k, v, mask):
            group = q.shape[1] // k.shape[1]
            scores = q @ repeat_kv(k, group).mT / math.sqrt(q.shape[-1])
            return (scores.softmax(-1) * mask) @ repeat_kv(v, group)

        return plain(model, ids, cache, padding, attend)

    STATE = {}
    for name, wrong in list(locals().items()):
        if name != "STATE":
            fails(wrong, "cached_forward")


def test_other_wrong_generations_fail():
    right = generate_cached

    def uncached(model, ids, n_tokens, *args, padding=None, **kwargs):
        return generate(model, ids, n_tokens, *args, **kwargs)

    def float_ids(*args, **kwargs):
        return right(*args, **kwargs).float()

    def in_place(model, ids, n_tokens, *args, **kwargs):
        out = right(model, ids, n_tokens, *args, **kwargs)
        ids.zero_()
        return out

    def sorted_rows(*args, **kwargs):
        return right(*args, **kwargs).flip(0)

    def own_generator(*args, generator=None, **kwargs):
        made = torch.Generator().manual_seed(0)
        return right(*args, generator=made, **kwargs)

    def last_token_dropped(*args, **kwargs):
        out = right(*args, **kwargs)
        return torch.cat([out[:, :-1], out[:, :1]], 1)

    for name, wrong in list(locals().items()):
        if name != "right":
            fails(wrong, "generate_cached")


def test_other_wrong_bytes_fail():
    right = kv_cache_bytes

    def rounded(config, t, batch=1, dtype=torch.float16):
        return -(-right(config, t, batch, dtype) // 256) * 256

    def default_is_float32(config, t, batch=1, dtype=torch.float32):
        return right(config, t, batch, dtype)

    def as_tensor(config, t, batch=1, dtype=torch.float16):
        return torch.tensor(right(config, t, batch, dtype))

    def with_scores(config, t, batch=1, dtype=torch.float16):
        return right(config, t, batch, dtype) + t * config.n_heads

    def gqa_forgotten_in_gpt2(config, t, batch=1, dtype=torch.float16):
        if config.style == "gpt2":
            config = replace(config, n_kv_heads=config.n_heads)
        return right(config, t, batch, dtype)

    for name, wrong in list(locals().items()):
        if name != "right":
            fails(wrong, "kv_cache_bytes")


def test_other_wrong_rolling_caches_fail():
    append = RollingKVCache.append

    def last_of_the_chunk(self, layer, k, v):
        k, v = append(self, layer, k, v)
        return k[:, :, -self.window :], v[:, :, -self.window :]

    def zeros_in_front(self, layer, k, v):
        k, v = append(self, layer, k, v)
        room = max(0, self.window - k.shape[2])
        return F.pad(k, (0, 0, room, 0)), F.pad(v, (0, 0, room, 0))

    def writes_first(self, layer, k, v):
        append(self, layer, k, v)
        stop = self.lengths[layer]
        at = torch.arange(max(0, stop - self.window - k.shape[2] + 1), stop)
        at = at % self.window
        return self.k[layer][:, :, at], self.v[layer][:, :, at]

    def one_at_a_time(self, layer, k, v):
        for piece in zip(k.split(1, 2), v.split(1, 2), strict=True):
            out = append(self, layer, *piece)
        return out

    def not_a_ring(self, layer, k, v):
        out = append(self, layer, k, v)
        self.everything = [*getattr(self, "everything", []), out]
        return out

    for name, wrong in list(locals().items()):
        if name != "append":
            fails(type("RollingKVCache", (RollingKVCache,), {"append": wrong}), name=
                  "RollingKVCache")  # fmt: skip
    fails(KVCache, "RollingKVCache")


# Joints -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"KVCache": OneLength},
        {"KVCache": BatchFirst},
        {"chunk_mask": mask_by_loop},
        {"cached_forward": plain},
        {"generate_cached": drawn_first},
    ],
)
def test_other_forms_fit_together(changed):
    parts = {**Joint.registry["cached_decoder"].reference, **changed}
    report = evaluate_joint("cached_decoder", parts)
    assert report.status == "passed", report.message


def test_joint_messages_hold_no_address():
    parts = Joint.registry["cached_decoder"].reference
    for fault in Joint.registry["cached_decoder"].faults:
        report = evaluate_joint("cached_decoder", {**parts, **fault.implementation})
        assert " at 0x" not in report.message


# Mistakes in a form of their own ------------------------------------------------------


def test_common_mistakes_are_named():
    def restarts(model, ids, cache, padding=None):
        rotate = lambda x, p, b: rope(x, torch.arange(x.shape[2]), b)  # noqa: E731
        return plain(model, ids, cache, padding, rotate=rotate)

    def sees_all(model, ids, cache, padding=None):
        def attend(q, k, v, mask):
            return attend_by_copies(q, k, v, torch.ones_like(mask))

        return plain(model, ids, cache, padding, attend)

    fails(restarts, "cached_forward", "position_zero")
    fails(sees_all, "cached_forward", "prefill_sees_the_future")
    fails(cache_with(reset=lambda self: None), "KVCache", "no_reset")
    shared = KVCache.append
    fails(
        cache_with(append=lambda self, layer, k, v: shared(self, 0, k, v)),
        "KVCache",
    )


def drawing(token):
    """A generation in which `token(logits, *settings)` draws."""

    def generate_cached_(
        model,
        ids,
        n_tokens,
        temperature=1.0,
        top_k=None,
        top_p=None,
        generator=None,
        padding=None,
    ):
        c, p, new = model.config, model.embedding.weight, ids
        stop = ids.shape[1] + n_tokens
        if ids.shape[1] == 0 or stop > c.max_len:
            raise ValueError(f"from {ids.shape[1]} to {stop}, {c.max_len} at the most")
        cache = room(c, len(ids), c.max_len, dtype=p.dtype, device=p.device)
        for _ in range(n_tokens):
            logits = cached_forward(model, new, cache, padding)[:, -1]
            new = token(logits, temperature, top_k, top_p, generator)[:, None]
            ids = torch.cat([ids, new], 1)
        return ids

    return generate_cached_


def by_probabilities(logits, temperature, top_k, top_p, generator):
    """A sample that cuts probabilities, not ranks."""
    if temperature == 0:
        return logits.argmax(-1)
    p = torch.softmax(logits.float() / temperature, -1)
    if top_k is not None:
        p = p * (p >= p.topk(top_k).values[:, -1:])
        p = p / p.sum(-1, keepdim=True)
    if top_p is not None and top_p < 1:
        ranked, order = p.sort(descending=True)
        kept = F.pad(ranked.cumsum(-1), (1, 0))[:, :-1] < top_p
        p = p * torch.zeros_like(kept).scatter(-1, order, kept)
    return torch.multinomial(p, 1, generator=generator)[:, 0]


def test_settings_that_do_not_reach_sample_are_named():
    def again(g):
        return g and g.manual_seed(g.initial_seed())

    def twice(x, t, *rest):
        return sample(x / (t or 1), t, *rest)

    def seeding(x, t, k, p, g):
        return sample(x, t, k, p, torch.manual_seed(0))

    passes(drawing(sample), "generate_cached")
    passes(drawing(by_probabilities), "generate_cached")
    for name, token in (
        ("settings_not_passed", lambda x, t, k, p, g: sample(x)),
        ("temperature_not_passed", lambda x, t, k, p, g: sample(x, 1.0, k, p, g)),
        ("top_k_not_passed", lambda x, t, k, p, g: sample(x, t, None, p, g)),
        ("top_p_not_passed", lambda x, t, k, p, g: sample(x, t, k, generator=g)),
        ("generator_not_passed", lambda x, t, k, p, g: sample(x, t, k, p)),
        ("top_k_and_top_p_exchanged", lambda x, t, k, p, g: sample(x, t, p, k, g)),
        ("temperature_taken_twice", twice),
        ("probabilities_for_logits", lambda x, *rest: sample(x.softmax(-1), *rest)),
        ("always_the_likeliest", lambda x, *rest: x.argmax(-1)),
        ("seeds_each_call", seeding),
        ("generator_started_again", lambda x, t, k, p, g: sample(x, t, k, p, again(g))),
    ):
        fails(drawing(token), "generate_cached", name)


def test_a_cache_on_another_device_than_the_model_is_named():
    def generate_cached_(model, ids, n_tokens, *settings, **named):
        if ids.is_meta:
            raise ValueError("keys on meta, and I am on cpu")
        return generate_cached(model, ids, n_tokens, *settings, **named)

    fails(generate_cached_, "generate_cached", "cache_on_the_cpu")


def test_other_defaults_of_generation_are_named():
    right = generate_cached

    def hot(model, ids, n_tokens, temperature=0.9, *args, **kwargs):
        return right(model, ids, n_tokens, temperature, *args, **kwargs)

    def few(model, ids, n_tokens, temperature=1.0, top_k=15, *args, **kwargs):
        return right(model, ids, n_tokens, temperature, top_k, *args, **kwargs)

    def cut(model, ids, n_tokens, temperature=1.0, top_k=None, top_p=0.9, *args, **kw):
        return right(model, ids, n_tokens, temperature, top_k, top_p, *args, **kw)

    def order(
        model, ids, n_tokens, temperature=1.0, top_p=None, top_k=None, *args, **kw
    ):
        return right(model, ids, n_tokens, temperature, top_k, top_p, *args, **kw)

    for wrong, name in (
        (hot, "temperature_by_default"),
        (few, "top_k_by_default"),
        (cut, "top_p_by_default"),
        (order, "order_of_arguments"),
    ):
        fails(wrong, "generate_cached", name)


def test_rotation_and_length_in_the_wrong_place_are_named():
    def wrong(how):
        def cached_forward_(model, ids, cache, padding=None):
            c, start, t = model.config, cache.length, ids.shape[1]
            if start + t > c.max_len:
                raise ValueError(f"{start + t} > {c.max_len}")

            def at(first):
                places = torch.arange(t, device=ids.device) + first
                return places if padding is None else (
                    (places - padding[:, None]).clamp(min=0))  # fmt: skip

            x = model.embedding(ids)
            if c.style == "gpt2":
                x = x + model.positions(at(start))
            for i, block in enumerate(model.blocks):
                a, y = block.attention, block.norm_1(x)
                q = split_heads(a.w_q(y), c.n_heads)
                k = split_heads(a.w_k(y), c.n_kv_heads)
                v = split_heads(a.w_v(y), c.n_kv_heads)

                def turn(x, places):
                    return rope(x, places, c.rope_base) if c.style == "llama" else x

                q, k, v = how(q, k, v, partial(cache.append, i), turn, at, cache)
                mask = chunk_mask(t, k.shape[2], padding).to(ids.device)
                x = x + a.w_o(merge_heads(attend_by_copies(q, k, v, mask)))
                x = x + block.feed_forward(block.norm_2(x))
            return model.head(model.norm(x))

        return torch.no_grad()(cached_forward_)

    def right(q, k, v, append, turn, at, cache):
        places = at(cache.length)
        return turn(q, places), *append(turn(k, places), v)

    def late(q, k, v, append, turn, at, cache):
        places = at(cache.length)
        k, v = append(k, v)
        return turn(q, places), turn(k, places), v

    def by_place(q, k, v, append, turn, at, cache):
        places = at(cache.length)
        k, v = append(k, v)
        return turn(q, places), turn(k, torch.arange(k.shape[2], device=k.device)), v

    def new_alone(q, k, v, append, turn, at, cache):
        places, new = at(cache.length), turn(k, at(cache.length))
        k, v = append(k, v)
        return turn(q, places), torch.cat([k[:, :, : -new.shape[2]], new], 2), v

    def never(q, k, v, append, turn, at, cache):
        return turn(q, at(cache.length)), *append(k, v)

    def length_after(q, k, v, append, turn, at, cache):
        k, v = append(turn(k, at(cache.length)), v)
        return turn(q, at(cache.length)), k, v

    def counted_back(q, k, v, append, turn, at, cache):
        k, v = append(turn(k, at(cache.length)), v)
        return turn(q, at(cache.length - q.shape[2])), k, v

    passes(wrong(right), "cached_forward")
    for how, name in (
        (late, "old_keys_at_the_new_position"),
        (by_place, "rotated_by_their_place"),
        (new_alone, "stored_before_rotation"),
        (never, "keys_not_rotated"),
        (length_after, "length_read_after_append"),
        (counted_back, "counted_back_from_the_length"),
    ):
        fails(wrong(how), "cached_forward", name)


def test_mistakes_with_groups_of_heads_are_named():
    def interleaved(q, k, v, mask):
        grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
        rows = mask.repeat_interleave(q.shape[1] // k.shape[1], 2)
        return attention(grouped, k, v, rows).reshape(q.shape)

    def tiled(q, k, v, mask):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)
        return attention(q, k, v, mask)

    def reshaped(q, k, v, mask):
        out = attend_by_copies(q, k, v, mask)
        return split_heads(out.reshape(len(q), q.shape[2], -1), q.shape[1])

    for attend, name in (
        (interleaved, "mask_rows_interleaved"),
        (tiled, "group_of_heads_tiled"),
        (reshaped, "heads_not_merged"),
    ):
        fails(partial(plain, attend=attend), "cached_forward", name)


def test_mistakes_with_a_ring_are_named():
    class Around(RollingKVCache):
        """The reference's ring, with its two steps to be changed."""

        def old(self, places):
            return places

        def new(self, places):
            return places, slice(None)

        def append(self, layer, k, v):
            start, t, window = self.lengths[layer], k.shape[2], self.window
            memory = [x.clone() for x in (self.k[layer], self.v[layer])]
            RollingKVCache.append(self, layer, k, v)
            before = torch.arange(max(0, start - window + 1), start) % window
            before = self.old(before)
            after = torch.arange(max(start, start + t - window), start + t) % window
            after, which = self.new(after)
            for whole, held, x in zip((self.k, self.v), memory, (k, v), strict=True):
                whole[layer] = held
                whole[layer][:, :, after] = x[:, :, -window:][:, :, which]
            return [torch.cat([held[:, :, before], x], 2)
                    for held, x in zip(memory, (k, v), strict=True)]  # fmt: skip

    def in_memory_order(self, places):
        return places.sort().values

    def not_around(self, places):
        there = self.window - int(places[0])
        return places[:there], slice(there)

    passes(wrong_cache(Around), "RollingKVCache")
    for changed, name in (
        (dict(old=in_memory_order), "old_in_the_order_of_the_memory"),
        (dict(new=not_around), "cut_at_the_end_of_the_memory"),
        (dict(reset=lambda self: None), "no_reset"),
    ):
        wrong = type("RollingKVCache", (Around,), changed)
        fails(wrong, "RollingKVCache", name)


def test_memory_never_written_does_not_hide_a_mistake():
    class AtTheFirst(OneLength):
        def append(self, layer, k, v):
            before = self.length
            out = OneLength.append(self, layer, k, v)
            self.length = before + k.shape[2] * (layer == 0)
            return out

    AtTheFirst.__name__ = "KVCache"
    fails(AtTheFirst, "KVCache", "length_at_the_first_layer")


def test_places_left_unused_are_named_whatever_the_refusal_says():
    def full_early(self, layer, k, v):
        if self.lengths[layer] + k.shape[2] == self.k.shape[3]:
            raise ValueError("I am full")
        return KVCache.append(self, layer, k, v)

    fails(cache_with(append=full_early), "KVCache", "one_place_unused")

    def long_chunks(model, ids, cache, padding=None):
        if ids.shape[1] > 1 and cache.length + ids.shape[1] == model.config.max_len:
            raise ValueError("that is too much")
        return plain(model, ids, cache, padding)

    fails(long_chunks, "cached_forward", "one_place_unused")

    def long_texts(model, ids, n_tokens, *args, **kwargs):
        if ids.shape[1] + n_tokens == model.config.max_len:
            raise ValueError("that is too much")
        return generate_cached(model, ids, n_tokens, *args, **kwargs)

    fails(long_texts, "generate_cached", "one_place_unused")


def test_reference_is_what_the_module_exports():
    for name in ("KVCache", "chunk_mask", "cached_forward", "generate_cached"):
        assert hasattr(reference, name)


def test_generated_text_is_an_ordinary_tensor():
    model, ids = model_of(CONFIGS[0]), probe_ids(2, 3, below=51)
    for n in (0, 2):
        text = generate_cached(model, ids, n, temperature=0)
        assert not text.is_inference() and not text.requires_grad
        text[:, 0] = 0
    assert torch.equal(ids, probe_ids(2, 3, below=51))


# Wrong answers that used to pass ------------------------------------------------------


def wrong_cache(base=KVCache, **methods):
    return type(base.__name__, (base,), methods)


def built_with(base, change):
    """A cache whose `__init__` gets other arguments."""

    def __init__(self, *sizes, dtype=None, device=None):
        base.__init__(self, *change(list(sizes), dtype, device))

    return wrong_cache(base, __init__=__init__)


@pytest.mark.parametrize("base", [KVCache, RollingKVCache])
def test_caches_that_change_what_they_were_given_fail(base):
    append = base.append

    def values_in_the_cache_s_dtype(self, layer, k, v):
        return append(self, layer, k, v.to(k.dtype))

    def values_moved(self, layer, k, v):
        v = torch.zeros_like(k) if v.device != k.device else v
        return append(self, layer, k, v)

    def both_moved(self, layer, k, v):
        k, v = (torch.zeros(x.shape) if x.is_meta else x for x in (k, v))
        return append(self, layer, k, v)

    def values_broadcast(self, layer, k, v):
        return append(self, layer, k, v.expand_as(k) if v.shape[0] == 1 else v)

    def heads_of_values_broadcast(self, layer, k, v):
        return append(self, layer, k, v.expand_as(k) if v.shape[1] == 1 else v)

    def values_cut(self, layer, k, v):
        return append(self, layer, k, v[..., : k.shape[-1]])

    def half_kinds_exchanged(self, layer, k, v):
        half = (torch.float16, torch.bfloat16)
        if k.dtype in half and self.k.dtype in half:
            k, v = k.to(self.k.dtype), v.to(self.k.dtype)
        return append(self, layer, k, v)

    def widens(self, layer, k, v):
        if k.dtype.itemsize < self.k.dtype.itemsize:
            k, v = k.to(self.k.dtype), v.to(self.k.dtype)
        return append(self, layer, k, v)

    def counts_what_is_refused(self, layer, k, v):
        before = list(self.lengths)
        try:
            return append(self, layer, k, v)
        except ValueError:
            self.lengths = [before[0] + k.shape[2], *before[1:]]
            raise

    def forgets_when_it_refuses(self, layer, k, v):
        try:
            return append(self, layer, k, v)
        except ValueError:
            self.reset()
            raise

    def writes_over_the_first_when_it_refuses(self, layer, k, v):
        try:
            return append(self, layer, k, v)
        except ValueError:
            self.k[layer, :, :, 0] = 0
            raise

    for name, wrong in list(locals().items()):
        if name not in ("append", "base"):
            report = evaluate(wrong_cache(base, append=wrong), base.__name__)
            assert report.status == "failed", f"{name} passes"

    lengths = [
        lambda self: float(min(self.lengths)),
        lambda self: torch.tensor(min(self.lengths)),
        lambda self: max(self.lengths),
        lambda self: self.lengths[0],
        lambda self: str(min(self.lengths)),
    ]
    for length in lengths:
        fails(wrong_cache(base, length=property(length)), base.__name__)
    for change in (
        lambda sizes, dtype, device: (*sizes, dtype, None),
        lambda sizes, dtype, device: (*sizes, dtype or torch.float32, device),
        lambda sizes, dtype, device: (*[abs(n) for n in sizes], dtype, device),
        lambda sizes, dtype, device: (*[max(n, 1) for n in sizes], dtype, device),
        lambda sizes, dtype, device: (
            *sizes[:3],
            sizes[3] + 1,
            sizes[4],
            dtype,
            device,
        ),
    ):
        fails(built_with(base, change), base.__name__)

    class OneList(base):
        lengths = ()
        kept = [0]  # noqa: RUF012

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if len(self.lengths) == 1:
                self.kept[0], self.lengths = 0, self.kept

    fails(OneList, base.__name__)


@pytest.mark.parametrize("base", [KVCache, RollingKVCache])
def test_what_is_not_compared_is_named_whatever_the_refusals_say(base):
    def fitting(x, memory):
        return x.to(memory.dtype) if x.is_meta == memory.is_meta else x.new_zeros(
            x.shape, dtype=memory.dtype, device=memory.device)  # fmt: skip

    def comparing(dtypes_of, devices_of):
        def append(self, layer, k, v):
            for x in dtypes_of(k, v):
                if x.dtype != self.k.dtype:
                    raise ValueError(f"I hold {self.k.dtype} and came by {x.dtype}")
            for x in devices_of(k, v):
                if x.device != self.k.device:
                    raise ValueError(f"I am on {self.k.device}, that on {x.device}")
            return base.append(self, layer, fitting(k, self.k), fitting(v, self.k))

        return wrong_cache(base, append=append)

    def both(k, v):
        return k, v

    def keys(k, v):
        return (k,)

    def values(k, v):
        return (v,)

    def neither(k, v):
        return ()

    passes(comparing(both, both), base.__name__)
    fails(comparing(neither, both), base.__name__, "kind_unchecked")
    fails(comparing(keys, keys), base.__name__, "keys_kind_alone")
    fails(comparing(values, values), base.__name__, "values_kind_alone")
    fails(comparing(both, neither), base.__name__, "device_unchecked")


def test_whole_numbers_let_in_are_named_whichever_they_are():
    def refusing(*refused):
        def __init__(self, *sizes, dtype=None, device=None):
            if dtype in refused:
                raise ValueError(f"{dtype}, of all things")
            floats = dtype if dtype and dtype.is_floating_point else None
            KVCache.__init__(self, *sizes, floats, device)

        return wrong_cache(__init__=__init__)

    def counted(*refused):
        def kv_cache_bytes_(config, t, batch=1, dtype=torch.float16):
            if dtype in refused:
                raise ValueError(f"{dtype}, of all things")
            return spec.weighed(config, t, batch, dtype)

        return kv_cache_bytes_

    for make, name in ((refusing, "KVCache"), (counted, "kv_cache_bytes")):
        for some in ((torch.int64,), (torch.int32, torch.int64), (torch.bool,)):
            fails(make(*some), name, "some_dtypes_unchecked")
        fails(make(), name, "dtype_unchecked")


def test_messages_about_a_cache_are_sentences():
    def transposed(self, layer, k, v):
        k, v = KVCache.append(self, layer, k, v)
        return k.transpose(1, 2), v

    report = fails(cache_with(append=transposed), "KVCache")
    assert "What `append` returns as keys has shape" in report.message
    ahead = property(lambda self: min(self.lengths) + 1)
    assert "was `KVCache(" in fails(cache_with(length=ahead), "KVCache").message
    lost = property(lambda self: self.nothing)
    assert "was `cache.length`" in fails(cache_with(length=lost), "KVCache").message


def test_other_wrong_uses_of_memory_fail():
    def new_memory(self):
        self.k, self.v = torch.zeros_like(self.k), torch.zeros_like(self.v)
        KVCache.reset(self)

    fails(wrong_cache(reset=new_memory), "KVCache", "reset_takes_new_memory")

    class Long(KVCache):
        def __init__(self, *sizes, dtype=None, device=None):
            super().__init__(*sizes, dtype, device)
            self.copies = [self.k.clone()]

    class WholeNumbers(KVCache):
        def __init__(self, *sizes, dtype=None, device=None):
            whole = dtype in (torch.uint8, torch.bool)
            super().__init__(*sizes, torch.float32 if whole else dtype, device)

    Long.__name__ = WholeNumbers.__name__ = "KVCache"
    fails(Long, "KVCache", "more_memory_than_needed")
    fails(WholeNumbers, "KVCache")


def test_other_wrong_masks_of_unusual_sizes_fail():
    right = chunk_mask

    def table(t_q, t_k, padding=None):
        return right(128, 128, padding)[..., -t_q:, :t_k] if t_k > 128 else right(
            t_q, t_k, padding)  # fmt: skip

    def long_table(t_q, t_k, padding=None):
        if t_k > 2_048:
            raise IndexError(t_k)
        return right(t_q, t_k, padding)

    def no_zeros(t_q, t_k, padding=None):
        return right(
            t_q, t_k, None if padding is None or not padding.any() else padding
        )

    def int64_alone(t_q, t_k, padding=None):
        if padding is not None and padding.dtype != torch.int64:
            raise TypeError(padding.dtype)
        return right(t_q, t_k, padding)

    def int32_alone(t_q, t_k, padding=None):
        narrow = padding is not None and padding.dtype == torch.int8
        return right(t_q, t_k, padding * 0 if narrow else padding)

    def same_dtype(t_q, t_k, padding=None):
        mask = right(t_q, t_k)
        if padding is None:
            return mask
        real = torch.arange(t_k).to(padding.dtype) >= padding[:, None]
        return mask & real[:, None, None]

    for name, wrong in list(locals().items()):
        if name != "right":
            fails(wrong, "chunk_mask")


def test_other_wrong_bytes_of_large_caches_fail():
    right = kv_cache_bytes

    def refused(config, t, batch=1, dtype=torch.float16):
        if t > config.max_len:
            raise ValueError(t)
        return right(config, t, batch, dtype)

    def clipped(config, t, batch=1, dtype=torch.float16):
        return right(config, min(t, config.max_len), batch, dtype)

    def in_float32(config, t, batch=1, dtype=torch.float16):
        return int(torch.tensor(float(right(config, t, batch, dtype))).item())

    def in_int32(config, t, batch=1, dtype=torch.float16):
        n = right(config, t, batch, dtype)
        return (n + 2**31) % 2**32 - 2**31

    def as_float(config, t, batch=1, dtype=torch.float16):
        return float(right(config, t, batch, dtype))

    def uint8(config, t, batch=1, dtype=torch.float16):
        return right(config, t, batch, torch.float8_e4m3fn if dtype == torch.uint8
                     else dtype)  # fmt: skip

    for name, wrong in list(locals().items()):
        if name != "right":
            fails(wrong, "kv_cache_bytes")


def test_other_wrong_forward_passes_far_on_and_in_turn_fail():
    def rounded(model, ids, cache, padding=None):
        dtype = model.embedding.weight.dtype
        rotate = lambda x, p, b: rope(x, p.to(dtype).long(), b)  # noqa: E731
        return plain(model, ids, cache, padding, rotate=rotate)

    def in_bfloat16(model, ids, cache, padding=None):
        rotate = lambda x, p, b: rope(x, p.bfloat16().long(), b)  # noqa: E731
        return plain(model, ids, cache, padding, rotate=rotate)

    def table(model, ids, cache, padding=None):
        rotate = lambda x, p, b: rope(x, torch.arange(4_096)[p], b)  # noqa: E731
        return plain(model, ids, cache, padding, rotate=rotate)

    def refuses_a_chunk_to_the_end(model, ids, cache, padding=None):
        if ids.shape[1] > 1 and cache.length + ids.shape[1] == model.config.max_len:
            raise ValueError(model.config.max_len)
        return plain(model, ids, cache, padding)

    def off(model, ids, cache, padding=None):
        torch.set_grad_enabled(False)
        return plain(model, ids, cache, padding)

    def on_again(model, ids, cache, padding=None):
        out = plain(model, ids, cache, padding)
        torch.set_grad_enabled(True)
        return out

    def frozen(model, ids, cache, padding=None):
        return plain(model.requires_grad_(False), ids, cache, padding)

    def evaluated(model, ids, cache, padding=None):
        return plain(model.eval(), ids, cache, padding)

    def trained(model, ids, cache, padding=None):
        out = plain(model.eval(), ids, cache, padding)
        model.train()
        return out

    def last_cache(model, ids, cache, padding=None):
        KEPT_CACHE[0] = cache if cache.length == 0 else KEPT_CACHE[0]
        return plain(model, ids, KEPT_CACHE[0], padding)

    KEPT_CACHE = [None]
    for name, wrong in list(locals().items()):
        if name != "KEPT_CACHE":
            fails(wrong, "cached_forward")


def test_other_wrong_defaults_and_settings_of_generation_fail():
    right = generate_cached

    def cut_tail(model, ids, n, temperature=1.0, top_k=None, top_p=0.95, **kwargs):
        return right(model, ids, n, temperature, top_k, top_p, **kwargs)

    def few(model, ids, n_tokens, temperature=1.0, top_k=20, *args, **kwargs):
        return right(model, ids, n_tokens, temperature, top_k, *args, **kwargs)

    def warm(model, ids, n_tokens, temperature=1.01, *args, **kwargs):
        return right(model, ids, n_tokens, temperature, *args, **kwargs)

    def order(model, ids, n_tokens, top_k=None, temperature=1.0, **kwargs):
        return right(model, ids, n_tokens, temperature, top_k, **kwargs)

    def seeds(*args, **kwargs):
        torch.manual_seed(0)
        return right(*args, **kwargs)

    def restores(*args, **kwargs):
        state = torch.get_rng_state()
        out = right(*args, **kwargs)
        torch.set_rng_state(state)
        return out

    def off(*args, **kwargs):
        torch.set_grad_enabled(False)
        return right(*args, **kwargs)

    def evaluated(model, *args, **kwargs):
        return right(model.eval(), *args, **kwargs)

    def frozen(model, *args, **kwargs):
        return right(model.requires_grad_(False), *args, **kwargs)

    for name, wrong in list(locals().items()):
        if name != "right":
            fails(wrong, "generate_cached")
