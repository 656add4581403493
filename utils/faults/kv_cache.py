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
    "whole_buffer",
    "The whole buffer comes back, empty places included. Their keys are zeros, score "
    "0, and take a share of the attention.",
    (STORED, "return self.k[layer], self.v[layer]"),
)
KVCache.fault(
    "new_alone",
    "Only the new keys and values come back. The query is to look at the old ones too.",
    (STORED, "return k, v"),
)
KVCache.fault(
    "always_from_the_start",
    "Every chunk is written to position 0 and over what was there.",
    (WRITE_K, "self.k[layer, :, :, :t] = k"),
    (WRITE_V, "self.v[layer, :, :, :t] = v"),
)
KVCache.fault(
    "first_key_not_written",
    "Everything is one place too far: position 0 stays empty, and `length` counts it. "
    "Write where the old ones end, then advance.",
    (WRITE_K, "self.k[layer, :, :, start + 1 : stop + 1] = k"),
    (WRITE_V, "self.v[layer, :, :, start + 1 : stop + 1] = v"),
)
KVCache.fault(
    "one_position_a_chunk",
    "A chunk counts as one position, however many it brings.",
    ("self.lengths[layer] = stop", "self.lengths[layer] = start + 1"),
)
KVCache.fault(
    "layers_share_a_buffer",
    "All layers write into one buffer, each over the keys of the one before.",
    (WRITE_K, "self.k[:, :, :, start:stop] = k"),
    (WRITE_V, "self.v[:, :, :, start:stop] = v"),
)
KVCache.fault(
    "one_length_moved_too_early",
    "There is one length for all layers, and it moves before the last of them has "
    "written: the next layer writes one chunk too far.",
    ("self.lengths[layer] = stop", "self.lengths = [stop] * n_layers"),
)
KVCache.fault(
    "length_of_the_first_layer",
    "`length` moves as soon as the first layer has written. Whoever reads it in the "
    "middle of a pass gets positions one chunk too far.",
    (LENGTH, "return self.lengths[0]"),
)
KVCache.fault(
    "length_capped_by_memory",
    "`length` is the size of the memory, not how much of it is filled.",
    (LENGTH, "return self.k.shape[3]"),
)
KVCache.fault(
    "exchanged",
    "Keys and values come back exchanged.",
    (STORED, "return self.v[layer, :, :, :stop], self.k[layer, :, :, :stop]"),
)
KVCache.fault(
    "values_are_keys",
    "The keys are stored as values too.",
    (WRITE_V, WRITE_V.replace("= v", "= k")),
)
KVCache.fault(
    "one_buffer_for_both",
    "Keys and values lie in one and the same memory, and the values overwrite the "
    "keys. `self.v = self.k` gives it a second name; each needs a `torch.zeros` of its "
    "own.",
    (NEW_V, "self.v = self.k"),
)
KVCache.fault(
    "caches_share_memory",
    "All caches write into one memory. What is assigned in the body of the class "
    "belongs to all its objects: take it in `__init__`, for each of them.",
    (NEW_K, f"KVCache.k = getattr(KVCache, 'k', {NEW_K[9:]})"),
    (NEW_V, f"KVCache.v = getattr(KVCache, 'v', {NEW_V[9:]})"),
)
KVCache.fault(
    "no_reset",
    "`reset` leaves the length where it was: the next text is stored behind the last "
    "one and sees it, or the zeros that were written over it, which are keys like any "
    "others.",
    (RESET, "pass"),
)
KVCache.fault(
    "reset_of_one_layer",
    "`reset` sets one layer back and leaves the others.",
    (RESET, "self.lengths[0] = 0"),
)
KVCache.fault(
    "grown_by_concatenation",
    "What comes back is a copy each time: `torch.cat`, `clone` and the like make a new "
    "tensor, and move all that was there. Take the memory once; a slice of it is a "
    "view.",
    (STORED, STORED.replace(":stop]", ":stop].clone()")),
)
KVCache.fault(
    "one_place_unused",
    "The last place is never used: exactly max_len positions must fit.",
    ("stop > max_len", "stop >= max_len"),
)

# The mask -----------------------------------------------------------------------------

CAUSAL = "causal_mask(t_q, t_k)"
REAL = "torch.arange(t_k, device=padding.device) >= padding[:, None]"
COLUMNS = "real[:, None, None]"

chunk_mask.fault(
    "top_left",
    "The diagonal starts in the upper left corner: with a prefix, the first query of "
    "the chunk sees one key. The queries are the *last* positions.",
    (CAUSAL, "causal_mask(t_k)[:t_q]"),
)
chunk_mask.fault(
    "everything_visible",
    "There is a cache, so there is no mask? The tokens of a chunk must not see each "
    "other's future.",
    (CAUSAL, "torch.ones(t_q, t_k, dtype=torch.bool)"),
)
chunk_mask.fault(
    "prefix_open_chunk_open",
    "With a prefix everything is visible, the chunk's own future too.",
    (CAUSAL, f"({CAUSAL} | (t_k > t_q))"),
)
chunk_mask.fault(
    "prefix_hidden",
    "The chunk sees itself and nothing of the prefix, which is what the cache is for.",
    (CAUSAL, f"({CAUSAL} & (torch.arange(t_k) >= t_k - t_q))"),
)
chunk_mask.fault(
    "itself_hidden",
    "The diagonal is hidden: a query sees its own position too.",
    (CAUSAL, f"{CAUSAL}.tril(t_k - t_q - 1)"),
)
chunk_mask.fault(
    "one_ahead",
    "Each query sees one position ahead.",
    (CAUSAL, "torch.ones(t_q, t_k, dtype=torch.bool).tril(t_k - t_q + 1)"),
)
chunk_mask.fault(
    "upside_down",
    "The future is visible and the past is not.",
    (CAUSAL, "torch.ones(t_q, t_k, dtype=torch.bool).triu(t_k - t_q)"),
)
chunk_mask.fault(
    "inverted",
    "True marks what is hidden. In this course True means “may look”.",
    (CAUSAL, f"~{CAUSAL}"),
)
chunk_mask.fault(
    "square",
    "The mask covers the chunk alone, `(t_q, t_q)`. The keys are those of the prefix "
    "too.",
    (CAUSAL, "causal_mask(t_q)"),
)
chunk_mask.fault(
    "padding_on_the_right",
    "The padding is taken for the end of the row. It stands on the left, so that all "
    "rows end, and go on, in the same column.",
    (REAL, "torch.arange(t_k) < t_k - padding[:, None]"),
)
chunk_mask.fault(
    "padding_taken_for_lengths",
    "`padding` is read as the number of real tokens. It counts the padding before "
    "them.",
    (REAL, REAL.replace(">=", "<")),
)
chunk_mask.fault(
    "padding_off_by_one",
    "The first real token is hidden: columns 0 to padding − 1 are the padding.",
    (REAL, REAL.replace(">=", ">")),
)
chunk_mask.fault(
    "last_padding_visible",
    "The last padding token is visible: columns 0 to padding − 1 are the padding.",
    (REAL, f"{REAL} - 1"),
)
chunk_mask.fault(
    "padding_ignored",
    "The padding is visible.",
    (REAL, f"{REAL} * 0"),
)
chunk_mask.fault(
    "past_or_real",
    "A key is visible if it is past *or* no padding. It has to be both.",
    ("mask.to(padding.device) & real", "mask.to(padding.device) | real"),
)
chunk_mask.fault(
    "queries_hidden",
    "The padding is hidden as queries, that is as rows of the mask. As keys, columns, "
    "everybody still sees it.",
    (COLUMNS, "real[:, None, t_k - t_q :, None]"),
)
chunk_mask.fault(
    "padding_sees_itself",
    "A padding token sees itself. It may look at nothing here; the course's attention "
    "gives zeros then.",
    (COLUMNS, f"({COLUMNS} | torch.ones_like(mask).triu(t_k - t_q))"),
)
chunk_mask.fault(
    "columns_in_the_dtype_of_padding",
    "The columns are numbered in the dtype of `padding`, which may end at 127. "
    "`torch.arange` without a dtype counts on.",
    (REAL, "torch.arange(t_k).to(padding.dtype) >= padding[:, None]"),
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

cached_forward.fault(
    "position_zero",
    "Every call starts at position 0. A new token's position is how many the cache "
    "holds.",
    (AT, "torch.arange(t, device=ids.device)"),
)
cached_forward.fault(
    "position_by_the_prompt",
    "The position advances by the prompt's length at each step, not by what was added. "
    "The first step after the prompt is right by chance.",
    (
        START,
        f"{START}\n    cache.steps, cache.prompt = (\n"
        "        (cache.steps + 1, cache.prompt) if start else (0, t)\n    )",
    ),
    (AT, f"({AT} - start + cache.steps * cache.prompt)"),
)
cached_forward.fault(
    "one_too_far",
    "Positions behind a prefix are one too large: the first new token's position is "
    "how many there are, because the first of all is 0.",
    (AT, f"{AT} + (start > 0)"),
)
cached_forward.fault(
    "one_behind",
    "Positions behind a prefix are one too small: two tokens stand at one place.",
    (AT, f"{AT} - int(start > 0)"),
)
cached_forward.fault(
    "counted_from_one",
    "Positions are counted from 1. RoPE does not care, because all move together; "
    "learned positions do.",
    (AT, f"{AT} + 1"),
)
cached_forward.fault(
    "read_after_the_append",
    "The positions are those after the chunk: `length` is read when the chunk has been "
    "added already.",
    (AT, f"{AT} + t"),
)
cached_forward.fault(
    "one_position_for_the_chunk",
    "All tokens of a chunk get the position of its first.",
    (AT, "torch.full((t,), start, device=ids.device)"),
)
cached_forward.fault(
    "length_read_after_append",
    "`cache.length` is read after `append`: in the last layer it has moved, and the "
    "queries stand one chunk too far. Read it once, before the first layer.",
    (TURN, "plain, k = q, turn(k)"),
    (APPEND, THEN + "q = rope(plain, positions + cache.length - start, c.rope_base)"),
)
cached_forward.fault(
    "counted_back_from_the_length",
    "Positions are counted back from `cache.length` after `append`. It moves when the "
    "last layer has written, so in all others they are one chunk too early. Read it "
    "once, before the first layer.",
    (TURN, "plain, k = q, turn(k)"),
    (
        APPEND,
        THEN + "q = rope(plain, positions + cache.length - start - t, c.rope_base)",
    ),
)
cached_forward.fault(
    "positions_in_the_models_dtype",
    "Positions are rounded to the model's dtype; bfloat16 counts to 256. Leave them "
    "whole numbers.",
    (AT, f"{AT}.to(model.embedding.weight.dtype).long()"),
)
cached_forward.fault(
    "learned_positions_from_zero",
    'In style "gpt2" the learned positions start at 0 in each call.',
    (LEARNED, LEARNED.replace("(positions)", "(positions - start)")),
)
cached_forward.fault(
    "learned_positions_forgotten",
    'In style "gpt2" nothing is added to the embedding.',
    (LEARNED, "pass"),
)

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
    "their place in it. With padding, or where a cache forgets, that is not their "
    "position. Rotate first, then append.",
    (TURN, "q = turn(q)"),
    (
        APPEND,
        THEN + "k = rope(k, torch.arange(k.shape[2], device=k.device), c.rope_base)",
    ),
)
cached_forward.fault(
    "rotated_twice",
    "The keys that come out of the cache are rotated again. They were when they went "
    "in.",
    (
        APPEND,
        THEN + "k = rope(k, torch.arange(k.shape[2], device=k.device), c.rope_base)",
    ),
)
cached_forward.fault(
    "keys_not_rotated",
    "The queries are rotated, the keys are not.",
    (TURN, "q = turn(q)"),
)
cached_forward.fault(
    "queries_not_rotated",
    "The keys are rotated, the queries are not.",
    (TURN, "k = turn(k)"),
)
cached_forward.fault("not_rotated", "Nothing is rotated.", (TURN, "pass"))
cached_forward.fault(
    "values_rotated",
    "The values are rotated too. RoPE turns queries and keys alone.",
    (TURN, "q, k, v = turn(q), turn(k), turn(v)"),
)
cached_forward.fault(
    "base_ignored",
    "RoPE runs with its default base; pass on `config.rope_base`.",
    ("positions, c.rope_base)", "positions)"),
)
cached_forward.fault(
    "cache_not_read",
    "Keys and values are stored and never used: the scores are with the new ones "
    "alone. `append` returns all of them.",
    (APPEND, "cache.append(layer, k, v)"),
)
cached_forward.fault(
    "nothing_stored",
    "Nothing is appended to the cache.",
    (APPEND, ""),
)
cached_forward.fault(
    "always_the_first_layer",
    "Every layer appends to layer 0 of the cache.",
    (APPEND, "k, v = cache.append(0, k, v)"),
)
cached_forward.fault(
    "exchanged",
    "Keys and values are exchanged on the way through the cache.",
    (APPEND, "v, k = cache.append(layer, k, v)"),
)
cached_forward.fault(
    "stored_twice",
    "Each chunk is appended twice.",
    (APPEND, f"cache.append(layer, k, v)\n        {APPEND}"),
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
cached_forward.fault(
    "square_mask",
    "The mask is square, for the chunk alone. With a prefix there are more keys than "
    "queries.",
    (MASK, "chunk_mask(t, t, padding)"),
)
cached_forward.fault(
    "mask_top_left",
    "The mask is aligned top-left: the first query of a chunk sees one key. The "
    "queries are the *last* positions.",
    (MASKS, "if True:"),
    (MASK, "chunk_mask(k.shape[2], k.shape[2], padding)[:, :, :t]"),
)
cached_forward.fault(
    "mask_from_the_length",
    "The mask is made for `length` + T keys. A cache that forgets returns fewer: take "
    "their number from the keys' shape.",
    (MASKS, "if True:"),
    (MASK, "chunk_mask(t, start + t, padding)"),
)
cached_forward.fault(
    "mask_inverted",
    "The mask is read the other way round. In this course True means “may look”.",
    (MASK, f"~{MASK}"),
)
cached_forward.fault(
    "mask_rows_interleaved",
    "The mask's rows are repeated 0, 0, …, 1, 1, …, and the queries of a group lie 0, "
    "1, …, 0, 1, …: all of one head, then all of the next. `repeat` makes that order.",
    ("mask.repeat(1, 1, group_size, 1)", "mask.repeat_interleave(group_size, 2)"),
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
cached_forward.fault(
    "padding_visible",
    "The padding is looked at. Its positions are right, its keys must be hidden.",
    (MASK, "chunk_mask(t, k.shape[2])"),
)
cached_forward.fault(
    "padding_hidden_in_the_prompt_only",
    "The padding is hidden while the prompt is read and visible in the steps after it. "
    "It is still in the cache.",
    (MASK, "chunk_mask(t, k.shape[2], None if start else padding)"),
)
cached_forward.fault(
    "padding_in_the_prompt_only",
    "The positions allow for padding in the prompt and not in the steps after it.",
    (LEFT, "(positions - padding[:, None] * (start == 0)).clamp(min=0)"),
)
cached_forward.fault(
    "negative_positions",
    "Padding tokens get negative positions, which the table of learned positions does "
    "not have. What they get is all the same, if it exists.",
    (LEFT, "positions - padding[:, None]"),
)
cached_forward.fault(
    "one_place_unused",
    "A text of exactly `max_len` tokens is refused. It fits.",
    ("start + t > c.max_len", "start + t >= c.max_len"),
)

# The forward pass: the rest of the block ----------------------------------------------

cached_forward.fault(
    "group_of_heads_tiled",
    "The KV heads are tiled (0, 1, 0, 1, …). Neighbouring query heads share one: (0, "
    "0, …, 1, 1, …).",
    ("mask = mask.repeat(1, 1, group_size, 1)  # · 1 G·T Tk", ""),
    (GROUPED, "k, v = (y.repeat(1, group_size, 1, 1) for y in (k, v))"),
)
cached_forward.fault(
    "heads_not_merged",
    "Heads and positions change places before `w_o`: `merge_heads` brings them into "
    "their order, `reshape` alone does not.",
    ("merge_heads(y)", "y.reshape(len(x), t, -1)"),
)
cached_forward.fault(
    "not_scaled",
    "The scores are not divided by the root of d_head.",
    ("attention(q, k, v, mask)", "attention(q * c.d_head**0.5, k, v, mask)"),
)
cached_forward.fault(
    "biases_forgotten",
    "The weights are used without their biases. Call the layer, `part.w_q(y)`.",
    ("part.w_q(y)", "y @ part.w_q.weight.mT"),
    ("part.w_k(y)", "y @ part.w_k.weight.mT"),
    ("part.w_v(y)", "y @ part.w_v.weight.mT"),
)
cached_forward.fault(
    "first_norm_forgotten",
    "Queries, keys and values are made of the stream without `norm_1`.",
    ("block.norm_1(x)", "x"),
)
cached_forward.fault(
    "second_norm_forgotten",
    "The feed-forward network reads the stream without `norm_2`.",
    ("block.norm_2(x)", "x"),
)
cached_forward.fault(
    "attention_not_added",
    "What attention gives takes the place of the stream. It is added to it.",
    ("x = x + part.w_o", "x = part.w_o"),
)
cached_forward.fault(
    "feed_forward_not_added",
    "What the feed-forward network gives takes the place of the stream. It is added "
    "to it.",
    ("x = x + block.feed_forward", "x = block.feed_forward"),
)
cached_forward.fault(
    "last_norm_forgotten",
    "The stream reaches the head without the last norm.",
    ("model.norm(x)", "x"),
)
cached_forward.fault(
    "last_position_only",
    "Only the last token's logits are returned. Return those of all T new tokens; who "
    "generates takes the last.",
    ("model.norm(x)", "model.norm(x)[:, -1:]"),
)
cached_forward.fault(
    "head_from_the_embedding",
    "The logits are made with the embedding's weights. Call `model.head`: in a model "
    "that is not tied it has its own.",
    ("model.head(model.norm(x))", "model.norm(x) @ model.embedding.weight.mT"),
)

# Generation ---------------------------------------------------------------------------

PASS = "logits = cached_forward(model, new, cache, padding)[:, -1]"
SAMPLE = "sample(logits, temperature, top_k, top_p, generator)"
ROOM = "c.n_kv_heads, t + n_tokens, c.d_head"
LONGER = "ids = torch.cat([ids, new], dim=1)"

generate_cached.fault(
    "first_position",
    "The next token is drawn from the first position's logits. The last position has "
    "seen the whole prompt.",
    (PASS, PASS.replace("-1]", "0]")),
)
generate_cached.fault(
    "last_but_one",
    "The next token is drawn from the last position but one: it predicts a token that "
    "is there already.",
    (PASS, PASS.replace("-1]", "max(-2, -new.shape[1])]")),
)
generate_cached.fault(
    "whole_text_each_time",
    "The whole text is read again at each step, behind what the cache holds already. "
    "Read only what is new.",
    (ROOM, ROOM.replace("t + n_tokens", "c.max_len")),
    (PASS, PASS.replace("new", "ids")),
)
generate_cached.fault(
    "cache_full_too_early",
    "The cache is full before the text is complete. Either it has no room for the "
    "prompt beside the new tokens, or more than the newest token is read again at each "
    "step.",
    (PASS, PASS.replace("new", "ids")),
)
generate_cached.fault(
    "no_cache",
    "Nothing is saved: at each step an empty cache reads the whole text again.",
    (PASS, f"cache.reset()\n            {PASS.replace('new', 'ids')}"),
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
    "prompt_token_by_token",
    "The prompt is read token by token. One pass reads all of it at once, and its "
    "matrix products are far more efficient.",
    (
        "new = ids\n",
        "*first, new = ids.split(1, 1)\n    for token in first if n_tokens else ():\n"
        "        cached_forward(model, token, cache, padding)\n",
    ),
)
generate_cached.fault(
    "newest_never_read",
    "The newest token is not read: the one before it is, again.",
    (LONGER, "ids, new = torch.cat([ids, new], dim=1), ids[:, -1:]"),
)
generate_cached.fault(
    "useless_last_pass",
    "One pass more is made than there are new tokens: it reads the last of them, and "
    "nobody uses its logits.",
    (
        "return ids.clone()",
        "if n_tokens:\n        cached_forward(model, new, cache, padding)\n"
        "    return ids.clone()",
    ),
)
generate_cached.fault(
    "up_to_n_tokens",
    "`n_tokens` is taken for the length of the whole text.",
    ("range(n_tokens)", "range(n_tokens - t)"),
)
generate_cached.fault(
    "one_place_unused",
    "A text of exactly max_len tokens is refused. It fits.",
    ("t + n_tokens > c.max_len", "t + n_tokens >= c.max_len"),
)
generate_cached.fault(
    "always_the_likeliest",
    "The likeliest token is taken whatever the settings. `sample` draws, and takes the "
    "likeliest at temperature 0.",
    (SAMPLE, "logits.argmax(-1)"),
)
generate_cached.fault(
    "probabilities_for_logits",
    "`sample` gets probabilities. It takes the softmax itself.",
    (SAMPLE, SAMPLE.replace("logits", "logits.softmax(-1)")),
)
generate_cached.fault(
    "settings_not_passed",
    "`sample` gets the logits alone. Pass on `temperature`, `top_k`, `top_p` and "
    "`generator`.",
    (SAMPLE, "sample(logits)"),
)
generate_cached.fault(
    "temperature_not_passed",
    "The temperature is not passed on to `sample`.",
    (SAMPLE, SAMPLE.replace("temperature", "1.0")),
)
generate_cached.fault(
    "temperature_taken_twice",
    "The logits are divided by the temperature before `sample`, which divides by it "
    "itself.",
    (SAMPLE, SAMPLE.replace("logits", "logits / (temperature or 1.0)")),
)
generate_cached.fault(
    "top_k_and_top_p_exchanged",
    "`sample` gets `top_p` in the place of `top_k`, or the other way round. Its order "
    "is temperature, top_k, top_p, generator.",
    (SAMPLE, SAMPLE.replace("top_k, top_p", "top_p, top_k")),
)
generate_cached.fault(
    "top_k_not_passed",
    "`top_k` is not passed on to `sample`.",
    (SAMPLE, SAMPLE.replace("top_k", "None")),
)
generate_cached.fault(
    "top_p_not_passed",
    "`top_p` is not passed on to `sample`.",
    (SAMPLE, SAMPLE.replace("top_p", "None")),
)
generate_cached.fault(
    "generator_not_passed",
    "The generator is not passed on to `sample`.",
    (SAMPLE, SAMPLE.replace(", generator", "")),
)
generate_cached.fault(
    "padding_not_passed",
    "`padding` is not passed on to `cached_forward`.",
    (PASS, PASS.replace(", padding", "")),
)
generate_cached.fault(
    "padding_in_the_prompt_only",
    "`padding` is passed on for the prompt and not in the steps after it. The padding "
    "is still in the cache.",
    (PASS, PASS.replace("padding", "None if cache.length else padding")),
)

# What it costs ------------------------------------------------------------------------

NUMBERS = "2 * config.n_layers * config.n_kv_heads * config.d_head"
BYTES = "return numbers * t * batch * dtype.itemsize"

for name, sentence, edit in (
    (
        "keys_alone",
        "Only the keys are counted, or only the values: half of it.",
        (NUMBERS, NUMBERS[4:]),
    ),
    (
        "query_heads",
        "It counts `n_heads`. Keys and values have `n_kv_heads`, which is the point of "
        "sharing them.",
        ("n_kv_heads", "n_heads"),
    ),
    (
        "group_size",
        "It multiplies by the group size, the query heads that share a KV head. "
        "Counted are the KV heads.",
        ("config.n_kv_heads", "(config.n_heads // config.n_kv_heads)"),
    ),
    (
        "width_of_the_stream",
        "It counts d_model numbers for a key. A layer stores n_kv_heads · d_head.",
        ("config.n_kv_heads * config.d_head", "config.d_model"),
    ),
    (
        "width_of_the_stream_shared",
        "It takes d_model // n_heads for the width of a head; `d_head` need not be "
        "that.",
        ("config.d_head", "(config.d_model // config.n_heads)"),
    ),
    (
        "always_two_bytes",
        "Every number counts two bytes, whatever the dtype.",
        ("dtype.itemsize", "2"),
    ),
    (
        "always_four_bytes",
        "Every number counts four bytes, whatever the dtype.",
        ("dtype.itemsize", "4"),
    ),
    (
        "numbers",
        "This is how many numbers there are. Each takes `dtype.itemsize` bytes.",
        (" * dtype.itemsize", ""),
    ),
    (
        "bits",
        "These are bits, eight times as many.",
        (BYTES, f"{BYTES} * 8"),
    ),
    (
        "max_len_for_t",
        "It counts `max_len` positions; asked for are `t`.",
        ("numbers * t", "numbers * config.max_len"),
    ),
    (
        "megabytes",
        "This is in units of 2²⁰ bytes; the result is in bytes, an int.",
        (BYTES, f"{BYTES} / 2**20"),
    ),
):
    kv_cache_bytes.fault(name, sentence, edit)

# A cache that forgets -----------------------------------------------------------------

FIRST = "start - self.window + 1"
BEFORE = f"torch.arange(max(0, {FIRST}), start) % self.window"
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
    "old_in_the_order_of_the_memory",
    "The new ones come last, as they should, and those before them in the order in "
    "which they lie in memory. Once it has wrapped round, that is not the order of the "
    "text.",
    (BEFORE, f"({BEFORE}).sort().values"),
)
RollingKVCache.fault(
    "one_too_many",
    "One position too many is kept: `window` counts the position itself.",
    (FIRST, "start - self.window"),
)
RollingKVCache.fault(
    "one_too_few",
    "One position too few comes back: `window` positions, the new one included.",
    (FIRST, "start - self.window + 2"),
)
RollingKVCache.fault(
    "nothing_forgotten",
    "Nothing is ever forgotten.",
    ("n_kv_heads, window, d_head)  # L", "n_kv_heads, window + 99, d_head)  # L"),
    ("self.window = window", "self.window = window + 99"),
)
RollingKVCache.fault(
    "full_after_the_window",
    "It refuses more than `window` positions. It should forget the oldest instead.",
    (
        "before = ",
        "if start + t > self.window:\n            raise ValueError(self.window)\n"
        "        before = ",
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
    "chunk_alone",
    "A chunk comes back alone, without the positions before it.",
    (SEEN, f"if t > 1:\n            return k, v\n        {SEEN}"),
)
RollingKVCache.fault(
    "start_of_a_long_chunk_kept",
    "Of a chunk longer than the window the first positions are kept. The last ones are "
    "needed next.",
    (LAST_K, LAST_K.replace("-self.window :", ": self.window")),
    (LAST_V, LAST_V.replace("-self.window :", ": self.window")),
)
RollingKVCache.fault(
    "length_of_the_memory",
    "`length` is how many positions are kept. It counts all that have passed: the next "
    "token's position depends on it.",
    (LENGTH, "return min(self.window, *self.lengths)"),
)
RollingKVCache.fault(
    "one_length_moved_too_early",
    "There is one length for all layers, and it moves before the last of them has "
    "written.",
    ("self.lengths[layer] = start + t", "self.lengths = [start + t] * len(self.k)"),
)
RollingKVCache.fault(
    "values_are_keys",
    "The keys are stored as values too.",
    ("self.v[layer][:, :, before], v]", "self.v[layer][:, :, before], k]"),
)
RollingKVCache.fault(
    "one_buffer_for_both",
    "Keys and values lie in one and the same memory, and the values overwrite the "
    "keys. `self.v = self.k` gives it a second name; each needs a `torch.zeros` of its "
    "own.",
    (NEW_V, "self.v = self.k"),
)
RollingKVCache.fault(
    "no_reset",
    "`reset` changes nothing: the next text is stored behind the last one, and sees "
    "it.",
    (RESET, "pass"),
)
RollingKVCache.fault(
    "reset_of_the_length_alone",
    "`reset` sets `length` back, and the next text still sees the last one.",
    ("self.window = window", "self.window, self.passed = window, 0"),
    (LENGTH, f"{LENGTH} - self.passed"),
    (RESET, "self.passed = min(self.lengths)"),
)
RollingKVCache.fault(
    "more_kept_than_the_window",
    "More than `window` positions stay in memory. A slice keeps alive the whole tensor "
    "that it was cut from, unless it is a copy, `.clone()`.",
    (SEEN, f"self.seen = seen_k, seen_v\n        {SEEN}"),
)

# All parts together -------------------------------------------------------------------

cached_decoder.fault(
    "rope_counts_from_the_chunk",
    "`rope` numbers the positions itself, from 0, and ignores those it is given.",
    ("positions[..., None].float()", "torch.arange(x.shape[-2])[:, None].float()"),
    edited="rope",
)
cached_decoder.fault(
    "heads_not_merged_back",
    "`merge_heads` does not bring heads and positions back into their order.",
    ("x.transpose(1, 2).flatten(2)", "x.reshape(x.shape[0], x.shape[2], -1)"),
    edited="merge_heads",
)
cached_decoder.fault(
    "mask_read_inverted",
    "`attention` reads True as “hidden”.",
    ("attention_weights(q, k, mask)", "attention_weights(q, k, ~mask)"),
    edited="attention",
)
cached_decoder.inherits(chunk_mask, "top_left", "square")
cached_decoder.inherits(KVCache, "layers_share_a_buffer", "whole_buffer", "no_reset")
cached_decoder.inherits(cached_forward, "prefill_sees_the_future", "position_zero")
cached_decoder.inherits(generate_cached, "newest_never_read", "top_k_not_passed")
