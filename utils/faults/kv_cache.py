"""Lesson 10: mistakes in the caches, the mask, and the passes through a cache."""

from utils.exercises.kv_cache import (
    KVCache,
    RollingKVCache,
    cached_decoder,
    cached_forward,
    chunk_mask,
    generate_cached,
    kv_cache_bytes,
)

# The cache ----------------------------------------------------------------------------

WRITE_K = "self.k[layer, :, :, start:stop] = k"
WRITE_V = "self.v[layer, :, :, start:stop] = v"
STORED = "return self.k[layer, :, :, :stop], self.v[layer, :, :, :stop]"
NEW_K = "self.k = torch.zeros(shape, dtype=dtype, device=device)"
NEW_V = "self.v = torch.zeros(shape, dtype=dtype, device=device)"
LENGTH = "return min(self.lengths)"
RESET = "self.lengths = [0] * len(self.lengths)"

KVCache.fault(
    "first_key_not_written",
    "Everything is one place too far: position 0 stays empty, and `length` counts it. "
    "Write where the old ones end, then advance.",
    *((x, x.replace("start:stop", "start + 1 : stop + 1")) for x in (WRITE_K, WRITE_V)),
)
KVCache.fault(
    "layers_share_a_buffer",
    "All layers write into one buffer, each over the keys of the one before.",
    *((x, x.replace("layer", ":")) for x in (WRITE_K, WRITE_V)),
)
KVCache.fault(
    "length_of_the_first_layer",
    "`length` moves as soon as the first layer has written. Whoever reads it in the "
    "middle of a pass gets positions one chunk too far.",
    (LENGTH, "return self.lengths[0]"),
)
KVCache.fault(
    "caches_share_memory",
    "All caches write into one memory. What is assigned in the body of the class "
    "belongs to all its objects: take it in `__init__`, for each of them.",
    (NEW_K, f"KVCache.k = getattr(KVCache, 'k', {NEW_K[9:]})"),
    (NEW_V, f"KVCache.v = getattr(KVCache, 'v', {NEW_V[9:]})"),
)
KVCache.fault(
    "grown_by_concatenation",
    "What comes back is a copy each time: `torch.cat`, `clone` and the like make a new "
    "tensor, and move all that was there. Take the memory once; a slice is a view.",
    (STORED, STORED.replace(":stop]", ":stop].clone()")),
)

for exercise, advance, too_early in (
    (KVCache, "self.lengths[layer] = stop", "self.lengths = [stop] * n_layers"),
    (
        RollingKVCache,
        "self.lengths[layer] = start + t",
        "self.lengths = [start + t] * len(self.k)",
    ),
):
    exercise.fault(
        "one_length_moved_too_early",
        "There is one length for all layers, and it moves before the last of them has "
        "written: the next layer writes one chunk too far.",
        (advance, too_early),
    )
    exercise.fault(
        "one_buffer_for_both",
        "Keys and values lie in one memory, and the values overwrite the keys. `self.v = "
        "self.k` gives it a second name; each needs a `torch.zeros` of its own.",
        (NEW_V, "self.v = self.k"),
    )
    exercise.fault(
        "no_reset",
        "`reset` changes nothing: the next text comes behind the last one and sees it.",
        (RESET, "pass"),
    )

# A cache that forgets -----------------------------------------------------------------

LAST_K = "self.k[layer][:, :, after % self.window] = k[:, :, -self.window :]"
LAST_V = "self.v[layer][:, :, after % self.window] = v[:, :, -self.window :]"
READ = "seen_k = torch.cat("
SEEN = "return seen_k, seen_v"

RollingKVCache.fault(
    "order_of_the_memory",
    "They come back in the order in which they lie in memory. Once it has wrapped "
    "round, that is not the order of the text.",
    (
        SEEN,
        "if t == 1 and start >= self.window:\n"
        f"            return self.k[layer], self.v[layer]\n        {SEEN}",
    ),
)
RollingKVCache.fault(
    "written_before_it_is_read",
    "A chunk is stored before what it may see is read: its last keys lie where its "
    "first query still had to look. Read first, then write.",
    (READ, f"{LAST_K}\n        {LAST_V}\n        {READ}"),
)
RollingKVCache.fault(
    "cut_to_the_window",
    "Of a chunk only what fits into the window comes back. Its first query may look "
    "further back than its last, so it misses keys.",
    (SEEN, "return seen_k[:, :, -self.window :], seen_v[:, :, -self.window :]"),
)
RollingKVCache.fault(
    "start_of_a_long_chunk_kept",
    "Of a chunk longer than the window the first positions are kept, not the last.",
    *((x, x.replace("-self.window :", ": self.window")) for x in (LAST_K, LAST_V)),
)
RollingKVCache.fault(
    "length_of_the_memory",
    "`length` is how many positions are kept. It counts all that have passed: the next "
    "token's position depends on it.",
    (LENGTH, "return min(self.window, *self.lengths)"),
)
RollingKVCache.fault(
    "more_kept_than_the_window",
    "More than `window` positions stay in memory. A slice keeps alive the whole tensor "
    "that it was cut from, unless it is a copy, `.clone()`.",
    (SEEN, f"self.seen = seen_k, seen_v\n        {SEEN}"),
)

# The mask -----------------------------------------------------------------------------

CAUSAL = "causal_mask(t_q, t_k)"
REAL = "torch.arange(t_k, device=padding.device) >= padding[:, None]"
COLUMNS = "real[:, None, None]"

for name, sentence, new in (
    (
        "top_left",
        "The diagonal starts in the upper left corner: with a prefix, the first query "
        "of the chunk sees one key. The queries are the *last* positions.",
        "causal_mask(t_k)[:t_q]",
    ),
    (
        "prefix_open_chunk_open",
        "With a prefix everything is visible, the chunk's own future too.",
        f"({CAUSAL} | (t_k > t_q))",
    ),
    ("square", "The mask has no columns for the prefix.", "causal_mask(t_q)"),
):
    chunk_mask.fault(name, sentence, (CAUSAL, new))

for name, sentence, new in (
    (
        "padding_on_the_right",
        "The padding is taken for the end of the row. It stands on the left, so that "
        "all rows end, and go on, in the same column.",
        "torch.arange(t_k) < t_k - padding[:, None]",
    ),
    (
        "padding_taken_for_lengths",
        "`padding` is read as the number of real tokens.",
        REAL.replace(">=", "<"),
    ),
    ("padding_off_by_one", "The first real token is hidden.", REAL.replace(">=", ">")),
    ("last_padding_visible", "The last padding token is visible.", f"{REAL} - 1"),
):
    chunk_mask.fault(name, sentence, (REAL, new))

chunk_mask.fault(
    "past_or_real",
    "A key is visible if it is past *or* no padding. It has to be both.",
    ("mask.to(padding.device) & real", "mask.to(padding.device) | real"),
)
chunk_mask.fault(
    "queries_hidden",
    "The padding is hidden as queries, rows of the mask; as keys, columns, it is not.",
    (COLUMNS, "real[:, None, t_k - t_q :, None]"),
)
chunk_mask.fault(
    "padding_sees_itself",
    "A padding token sees itself. It may look at nothing here; the course's attention "
    "gives zeros then.",
    (COLUMNS, f"({COLUMNS} | torch.ones_like(mask).triu(t_k - t_q))"),
)

# The forward pass: positions ----------------------------------------------------------

AT = "torch.arange(start, start + t, device=ids.device)"
START = "c, t, start = model.config, ids.shape[1], cache.length"
LEFT = "(positions - padding[:, None]).clamp(min=0)"
LEARNED = "x = x + model.positions(positions)"
TURN = "q, k = turn(q), turn(k)"
APPEND = "k, v = cache.append(layer, k, v)  # B K Tk Dh"
MASKS = "if t > 1 or padding is not None:"
MASK = "chunk_mask(t, k.shape[2], padding)"
GROUPED = "q = q.reshape(len(q), c.n_kv_heads, -1, c.d_head)  # B K G·T Dh"
THEN = f"{APPEND}\n        if c.style == 'llama':\n            "
BY_PLACE = "k = rope(k, torch.arange(k.shape[2], device=k.device), c.rope_base)"

for name, sentence, new in (
    (
        "position_zero",
        "Every call starts at position 0. A new token's position is how many the cache "
        "holds.",
        f"{AT} - start",
    ),
    (
        "one_too_far",
        "Positions behind a prefix are one too large: the first of all is 0.",
        f"{AT} + (start > 0)",
    ),
    (
        "positions_in_the_models_dtype",
        "Positions are rounded to the model's dtype; bfloat16 counts to 256.",
        f"{AT}.to(model.embedding.weight.dtype).long()",
    ),
):
    cached_forward.fault(name, sentence, (AT, new))

cached_forward.fault(
    "length_read_after_append",
    "`cache.length` is read after `append`: in the last layer it has moved, and the "
    "queries stand one chunk too far. Read it before the first layer.",
    (TURN, "plain, k = q, turn(k)"),
    (APPEND, f"{THEN}q = rope(plain, positions + cache.length - start, c.rope_base)"),
)
for name, sentence, new in (
    ("from_zero", "start at 0 in each call", LEARNED.replace("s)", "s - start)")),
    ("forgotten", "are not added", "pass"),
):
    sentence = f'In style "gpt2" the learned positions {sentence}.'
    cached_forward.fault(f"learned_positions_{name}", sentence, (LEARNED, new))

# The forward pass: rotation and cache -------------------------------------------------

cached_forward.fault(
    "stored_before_rotation",
    "Keys go into the cache before they are rotated, and are never rotated afterwards: "
    "only the new ones have a position.",
    (TURN, "q, new = turn(q), turn(k)"),
    (APPEND, THEN + "k = torch.cat([k[:, :, :-t], new], 2)"),
)
cached_forward.fault(
    "old_keys_at_the_new_position",
    "Keys go into the cache before they are rotated, and all that come out get the new "
    "token's position. Rotate first, then append: a key keeps the position it had.",
    (TURN, "q = turn(q)"),
    (APPEND, THEN + "k = turn(k)"),
)
cached_forward.fault(
    "rotated_by_their_place",
    "Keys go into the cache before they are rotated, and come out to be rotated by "
    "their place in it. With padding that is not their position.",
    (TURN, "q = turn(q)"),
    (APPEND, THEN + BY_PLACE),
)
cached_forward.fault(
    "rotated_twice",
    "The keys that come out of the cache are rotated again. They were on the way in.",
    (APPEND, THEN + BY_PLACE),
)
for name, sentence, new in (
    ("keys_not_rotated", "The keys are not rotated.", "q = turn(q)"),
    ("queries_not_rotated", "The queries are not rotated.", "k = turn(k)"),
    ("not_rotated", "Nothing is rotated.", "pass"),
):
    cached_forward.fault(name, sentence, (TURN, new))

cached_forward.fault(
    "base_ignored",
    "RoPE runs with its default base; pass on `config.rope_base`.",
    ("positions, c.rope_base)", "positions)"),
)
cached_forward.fault(
    "cache_not_read",
    "Keys and values are stored and never used. `append` returns all of them.",
    (APPEND, "cache.append(layer, k, v)"),
)

# The forward pass: masks and padding --------------------------------------------------

cached_forward.fault(
    "prefill_sees_the_future",
    "There is a cache, so there is no mask? The tokens of the prompt see each other's "
    "future. Token by token nobody would notice.",
    (MASKS, "if padding is not None:"),
)
cached_forward.fault(
    "no_mask_behind_a_prefix",
    "A chunk behind a prefix gets no mask: its tokens see each other's future.",
    (MASKS, "if (t > 1 and start == 0) or padding is not None:"),
)
for name, sentence, keys in (
    ("square_mask", "The mask has no columns for the prefix.", "t, padding"),
    ("padding_visible", "The padding's keys are not hidden.", "k.shape[2]"),
    (
        "padding_hidden_in_the_prompt_only",
        "The padding is hidden in the prompt only, and visible in the steps after it.",
        "k.shape[2], None if start else padding",
    ),
):
    cached_forward.fault(name, sentence, (MASK, f"chunk_mask(t, {keys})"))

cached_forward.fault(
    "mask_top_left",
    "The mask is aligned top-left: the first query of a chunk sees one key.",
    (MASKS, "if True:"),
    (MASK, "chunk_mask(k.shape[2], k.shape[2], padding)[:, :, :t]"),
)
cached_forward.fault(
    "one_position_vector",
    "All rows get the same positions. With padding on the left a row's first real "
    "token has position 0.",
    (LEFT, "positions.expand(len(padding), -1)"),
)
cached_forward.fault(
    "padding_ignored",
    "`padding` changes nothing: neither positions nor mask know of it.",
    (START, f"{START}\n    padding = None"),
)

# The forward pass: the rest of the block ----------------------------------------------

cached_forward.fault(
    "group_of_heads_tiled",
    "The KV heads are tiled (0, 1, 0, 1, …). Neighbouring query heads share one.",
    ("mask = mask.repeat(1, 1, group_size, 1)  # · 1 G·T Tk", ""),
    (GROUPED, "k, v = (y.repeat(1, group_size, 1, 1) for y in (k, v))"),
)
cached_forward.fault(
    "biases_forgotten",
    "The weights are used without their biases. Call the layer, `part.w_q(y)`.",
    *((f"part.w_{n}(y)", f"y @ part.w_{n}.weight.mT") for n in "qkv"),
)
cached_forward.fault(
    "heads_not_merged",
    "Heads and positions change places before `w_o`; use `merge_heads`.",
    ("merge_heads(y)", "y.reshape(len(x), t, -1)"),
)
for norm in ("block.norm_1(x)", "block.norm_2(x)", "model.norm(x)"):
    cached_forward.fault(f"no {norm}", f"`{norm}` is missing.", (norm, "x"))
for part, call in (("attention", "part.w_o"), ("feed_forward", "block.feed_forward")):
    cached_forward.fault(
        f"{part}_not_added",
        f"The result of `{part}` takes the place of the stream. It is added to it.",
        (f"x = x + {call}", f"x = {call}"),
    )

# Generation ---------------------------------------------------------------------------

PASS = "logits = cached_forward(model, new, cache, padding)[:, -1]"
SAMPLE = "sample(logits, temperature, top_k, top_p, generator)"
ROOM = "c.n_kv_heads, t + n_tokens, c.d_head"

generate_cached.fault(
    "first_position",
    "The first position's logits give the next token. The last one has seen the prompt.",
    (PASS, PASS.replace("-1]", "0]")),
)
generate_cached.fault(
    "whole_text_each_time",
    "The whole text is read again at each step, behind what the cache holds already.",
    (ROOM, ROOM.replace("t + n_tokens", "c.max_len")),
    (PASS, PASS.replace("new", "ids")),
)
generate_cached.fault(
    "cache_thrown_away",
    "Each step gets an empty cache and one token: the model has forgotten the text.",
    (PASS, f"cache.reset()\n            {PASS}"),
)
generate_cached.fault(
    "prompt_last_token_alone",
    "Only the last token of the prompt is read.",
    ("new = ids\n", "new = ids[:, -1:]\n"),
)
generate_cached.fault(
    "useless_last_pass",
    "One pass more is made than there are new tokens; nobody uses its logits.",
    (
        "return ids.clone()",
        "if n_tokens:\n        cached_forward(model, new, cache, padding)\n"
        "    return ids.clone()",
    ),
)
for name, sentence, new in (
    (
        "probabilities_for_logits",
        "`sample` gets probabilities. It takes the softmax itself.",
        SAMPLE.replace("logits", "logits.softmax(-1)"),
    ),
    (
        "settings_not_passed",
        "`sample` gets the logits alone, and no settings.",
        "sample(logits)",
    ),
):
    generate_cached.fault(name, sentence, (SAMPLE, new))
for setting in ("temperature", "top_k", "top_p", "generator"):
    default = "1.0" if setting == "temperature" else "None"
    generate_cached.fault(
        f"{setting}_not_passed",
        f"`{setting}` is not passed on to `sample`.",
        (SAMPLE, SAMPLE.replace(setting, default)),
    )

generate_cached.fault(
    "padding_not_passed",
    "`padding` is not passed on to `cached_forward`.",
    (PASS, PASS.replace(", padding", "")),
)

# What it costs ------------------------------------------------------------------------

for name, sentence, old, new in (
    ("keys_alone", "Only the keys are counted, or only the values.", "2 * ", ""),
    ("query_heads", "Keys have `n_kv_heads`, not `n_heads`.", "n_kv_heads", "n_heads"),
    (
        "width_of_the_stream",
        "It counts d_model numbers for a key. A layer stores n_kv_heads · d_head.",
        "config.n_kv_heads * config.d_head",
        "config.d_model",
    ),
):
    kv_cache_bytes.fault(name, sentence, (old, new))

# All parts together -------------------------------------------------------------------

cached_decoder.fault(
    "rope_counts_from_the_chunk",
    "`rope` numbers the positions itself, from 0, and ignores those it is given.",
    ("positions[..., None].float()", "torch.arange(x.shape[-2])[:, None].float()"),
    edited="rope",
)
cached_decoder.inherits(chunk_mask, "top_left", "square")
cached_decoder.inherits(KVCache, "layers_share_a_buffer", "no_reset")
cached_decoder.inherits(cached_forward, "prefill_sees_the_future", "position_zero")
cached_decoder.inherits(generate_cached, "top_k_not_passed")
