"""Lesson 13: mistakes in the encoder-decoder, its blocks, and translation."""

from utils.exercises.encoder_decoder import (
    FOUR,
    CrossAttention,
    DecoderBlock,
    EncoderBlock,
    EncoderDecoder,
    shift_right,
    translate,
    whole_encoder_decoder,
)

# shift_right --------------------------------------------------------------------------

MOVED = "torch.cat([start, ids[:, :-1]], dim=1)"

shift_right.fault(
    "shifted_left",
    "The row moves to the left. The decoder would read each token *after* the one that "
    "it is asked for.",
    ("[start, ids[:, :-1]]", "[ids[:, 1:], start]"),
)
shift_right.fault(
    "start_replaces_the_first",
    "The first token is overwritten and the rest stays in place, so from the second "
    "place on the decoder reads what it is asked for.",
    ("ids[:, :-1]", "ids[:, 1:]"),
)
shift_right.fault(
    "one_longer",
    "The result is one longer than the row: its last token must go. Nothing is asked "
    "after it.",
    ("ids[:, :-1]", "ids"),
)
shift_right.fault(
    "start_missing",
    "The last token goes and no start comes, so the row is one shorter, and its first "
    "token is never asked for.",
    (MOVED, "ids[:, :-1]"),
)
shift_right.fault(
    "start_at_the_end",
    "The start stands behind the row; it belongs before the first token.",
    ("[start, ids[:, :-1]]", "[ids[:, :-1], start]"),
)
shift_right.fault(
    "not_shifted",
    "Nothing is shifted. The decoder would read the very token that it is asked for, "
    "train to a loss near 0 and be able to do nothing.",
    (MOVED, "ids.clone()"),
)
shift_right.fault(
    "last_comes_round",
    "The last token comes round to the front, where the start belongs.",
    (MOVED, "ids.roll(1, dims=1)"),
)
shift_right.fault(
    "rows_shifted",
    "The rows of the batch move down, not the tokens in their rows.",
    ("ids[:, :1], start_id", "ids[:1], start_id"),
    (MOVED, "torch.cat([start, ids[:-1]], dim=0)"),
)
shift_right.fault(
    "rolled_over_all",
    "The batch is shifted as one long row: each row begins with the last token of the "
    "row before it.",
    (MOVED, "torch.cat([start[0], ids.flatten()[:-1]]).view(ids.shape)"),
)
shift_right.fault(
    "start_always_0",
    "Every row begins with 0, whatever `start_id` is.",
    ("[:, :1], start_id", "[:, :1], 0"),
)

# CrossAttention -----------------------------------------------------------------------

GIVEN = "memory if isinstance(memory, tuple) else self.keys_values(memory)"
ATTEND = "attention(q, k, v, memory_mask)"
WEIGHTS = "attention_weights(q, k, mask)"
SCORES = "q @ k.mT / math.sqrt(q.shape[-1])"


def masked_by(weights):
    """An edit of `attention`: other weights where there is a mask."""
    return WEIGHTS, f"(attention_weights(q, k) if mask is None else {weights})"


CrossAttention.fault(
    "queries_from_the_memory",
    "The roles are exchanged: queries come from the memory, keys and values from x. "
    "Who asks here? The sequence that is being written.",
    ("self.w_q(x)", "self.w_q(memory)"),
    ("else self.keys_values(memory)", "else self.keys_values(x)"),
)
CrossAttention.fault(
    "self_attention",
    "Keys and values come from x, so x looks at itself and the memory is never read.",
    ("else self.keys_values(memory)", "else self.keys_values(x)"),
)
CrossAttention.fault(
    "keys_from_the_stream",
    "The keys come from x. Keys say what can be found, values what is found; both "
    "belong to the memory.",
    (GIVEN, "self.keys_values(x)[0], self.keys_values(memory)[1]"),
)
CrossAttention.fault(
    "values_from_the_stream",
    "The values come from x. What is brought back must come from the memory, like the "
    "keys.",
    (GIVEN, "self.keys_values(memory)[0], self.keys_values(x)[1]"),
)
CrossAttention.fault(
    "keys_and_values_exchanged",
    "What serves as keys is made by `w_v`, and the values by `w_k`: they are exchanged "
    "on the way from their matrices to `attention`.",
    ("return k, v", "return v, k"),
)
for layer, role in (("w_q", "queries"), ("w_k", "keys"), ("w_v", "values")):
    source = "x" if role == "queries" else "memory"
    for other in FOUR:
        if other != layer:
            CrossAttention.fault(
                f"{role}_by_{other}",
                f"The {role} are made by `{other}`; they are due from `{layer}`.",
                (f"self.{layer}({source})", f"self.{other}({source})"),
            )
CrossAttention.fault(
    "one_head",
    "It is one wide head: the width is never cut.",
    ("self.n_heads = n_heads", "self.n_heads = 1"),
)
CrossAttention.fault(
    "not_scaled",
    "The scores are not divided by the root of d_head.",
    (ATTEND, "attention(q * q.shape[-1] ** 0.5, k, v, memory_mask)"),
)
CrossAttention.fault(
    "scaled_twice",
    "The scores are divided by the root of d_head twice. Your `attention` does it "
    "already.",
    (ATTEND, "attention(q / q.shape[-1] ** 0.5, k, v, memory_mask)"),
)
CrossAttention.fault(
    "scaled_by_the_model",
    "The scores are divided by √d_model; each head is d_head wide.",
    (ATTEND, "attention(q / self.n_heads**0.5, k, v, memory_mask)"),
)
CrossAttention.fault(
    "heads_read_from_memory_order",
    "The heads are cut by a view that does not exchange dimensions, so each head gets "
    "whole positions of a part of the sequence.",
    (
        "x.unflatten(-1, (n_heads, -1)).transpose(1, 2)",
        "x.reshape(len(x), n_heads, x.shape[1], -1)",
    ),
    edited="split_heads",
)
CrossAttention.fault(
    "heads_merged_askew",
    "The heads are merged without exchanging heads and time first.",
    ("x.transpose(1, 2).flatten(2)", "x.reshape(len(x), x.shape[2], -1)"),
    edited="merge_heads",
)
CrossAttention.fault(
    "softmax_over_queries",
    "The softmax runs over the queries. Each query shares out one weight of 1 among "
    "the keys of the memory.",
    (WEIGHTS, f"torch.softmax({SCORES}, dim=-2)"),
    edited="attention",
)
CrossAttention.fault(
    "no_output_map",
    "`w_o` is not used.",
    ("self.w_o(merge_heads", "(merge_heads"),
)
CrossAttention.fault(
    "adds_the_stream",
    "x is added to the result. The residual belongs in the block.",
    ("return self.w_o", "return x + self.w_o"),
)
CrossAttention.fault(
    "looks_back_only",
    "A triangle hides part of the memory. All of the source is there before the first "
    "token is written; nothing of it lies in the future.",
    (
        ATTEND,
        "attention(q, k, v, torch.ones(q.shape[-2], k.shape[-2]).tril().bool())",
    ),
)
CrossAttention.fault(
    "mask_ignored",
    "`memory_mask` is not used, so padding is looked at.",
    (ATTEND, "attention(q, k, v)"),
)
CrossAttention.fault(
    "mask_read_the_other_way",
    "The mask is read the other way round: True = may look.",
    (
        ATTEND,
        "attention(q, k, v, None if memory_mask is None else ~memory_mask)",
    ),
)
CrossAttention.fault(
    "zero_and_one_added",
    "The mask is added to the scores as 0 and 1, which hides nothing.",
    masked_by(f"torch.softmax({SCORES} + mask, dim=-1)"),
    edited="attention",
)
CrossAttention.fault(
    "hidden_scores_are_0",
    "Hidden scores are set to 0, or multiplied by the mask, and e⁰ is 1: what is "
    "hidden still gets a share. −∞ has none.",
    masked_by(f"torch.softmax({SCORES} * mask, dim=-1)"),
    edited="attention",
)
CrossAttention.fault(
    "after_the_softmax",
    "The mask is applied after the softmax, and the weights that are left no longer "
    "add up to 1.",
    masked_by("attention_weights(q, k) * mask"),
    edited="attention",
)
CrossAttention.fault(
    "nan_where_nothing_is_seen",
    "A row of the memory that is padding alone gives NaN: softmax over nothing but −∞. "
    "Such a row gets zeros.",
    masked_by(f"torch.softmax(({SCORES}).masked_fill(~mask, -torch.inf), dim=-1)"),
    edited="attention",
)
CrossAttention.fault(
    "mean_where_nothing_is_seen",
    "A row of the memory that is padding alone gives the mean of the padding: a large "
    "negative number in place of −∞ hides nothing once all keys have it. Such a row "
    "gets zeros.",
    masked_by(f"torch.softmax(({SCORES}).masked_fill(~mask, -1e9), dim=-1)"),
    edited="attention",
)
CrossAttention.fault(
    "large_number_added",
    "A row of the memory that is padding alone is looked at like any other: a large "
    "negative number is added to all its scores, and softmax sees differences alone. "
    "Such a row gets zeros.",
    masked_by(f"torch.softmax({SCORES} + ~mask * -1e4, dim=-1)"),
    edited="attention",
)
CrossAttention.fault(
    "pair_the_wrong_way_round",
    "`keys_values` gives the values first; keys come first.",
    ("return k, v", "return v, k"),
    ("k, v = memory", "v, k = memory"),
)
CrossAttention.fault(
    "pair_as_a_list",
    "`keys_values` gives a list, and `forward` takes a list for the memory itself. A "
    "tuple is the pair that both agree on: `return k, v`.",
    ("return k, v", "return [k, v]"),
)
CrossAttention.fault(
    "pair_not_accepted",
    "A pair of keys and values is projected as if it were the memory. `forward` must "
    "find out which of the two it was given.",
    (GIVEN, "self.keys_values(memory)"),
)
CrossAttention.fault(
    "mask_forgotten_with_a_pair",
    "Given a pair, it does not use `memory_mask`. The mask is about keys, wherever "
    "they come from.",
    (ATTEND, "attention(q, k, v, None if isinstance(memory, tuple) else memory_mask)"),
)

# The blocks ---------------------------------------------------------------------------

BACK = "self.attention, mask=mask"
ACROSS = "x = pre_norm(x, look_across, self.norm_2)"
FIRST = {
    EncoderBlock: "x = pre_norm(x, partial(self.attention, mask=mask), self.norm_1)",
    DecoderBlock: "x = pre_norm(x, look_back, self.norm_1)",
}
LAST = {
    EncoderBlock: "return pre_norm(x, self.feed_forward, self.norm_2)",
    DecoderBlock: "return pre_norm(x, self.feed_forward, self.norm_3)",
}
HEADS = {
    EncoderBlock: ("MultiHeadAttention(config.d_model, config.n_heads)",),
    DecoderBlock: (
        "MultiHeadAttention(config.d_model, config.n_heads)",
        "CrossAttention(config.d_model, config.n_heads)",
    ),
}


def norm_of(name):
    return f"self.{name} = RMSNorm(config.d_model, config.norm_eps)"


for block, norms in ((EncoderBlock, (1, 2)), (DecoderBlock, (1, 2, 3))):
    block.fault(
        "no_residual",
        "The stream is replaced instead of added to: `x +` is missing.",
        ("x + sublayer(norm(x))", "sublayer(norm(x))"),
        edited="pre_norm",
    )
    block.fault(
        "stream_normalised",
        "The normalised stream goes on. In pre-norm only the sublayer sees the "
        "normalised values.",
        ("return x + sublayer(norm(x))", "x = norm(x)\n    return x + sublayer(x)"),
        edited="pre_norm",
    )
    block.fault(
        "post_norm",
        "The norms come after the additions, as in the paper of 2017. Here they come "
        "before (pre-norm), as in nearly everything since.",
        ("x + sublayer(norm(x))", "norm(x + sublayer(x))"),
        edited="pre_norm",
    )
    block.fault(
        "norm_and_sublayer_exchanged",
        "The norms are applied to what the sublayers give, not to what they read. Are "
        "the last two arguments of `pre_norm` exchanged?",
        ("sublayer(norm(x))", "norm(sublayer(x))"),
        edited="pre_norm",
    )
    block.fault(
        "not_normalised",
        "The sublayers read the stream as it is: no norm is called.",
        ("sublayer(norm(x))", "sublayer(x)"),
        edited="pre_norm",
    )
    block.fault(
        "eps_ignored",
        "The norms use their default eps; the config's `norm_eps` is not passed on.",
        *(
            (norm_of(f"norm_{i}"), f"self.norm_{i} = RMSNorm(config.d_model)")
            for i in norms
        ),
    )
    for i in norms:
        block.fault(
            f"norm_{i}_eps_ignored",
            f"`norm_{i}` has its default eps; pass `norm_eps` on to every norm.",
            (norm_of(f"norm_{i}"), f"self.norm_{i} = RMSNorm(config.d_model)"),
        )
    block.fault(
        "feed_forward_unused",
        "The feed-forward network's result is not used.",
        (LAST[block], "return x"),
    )
    block.fault(
        "always_causal",
        "The block hides what comes later by itself, even where no mask is given. It "
        "takes the mask that it gets.",
        (BACK, "self.attention, mask=causal_mask(x.shape[1])"),
    )
    block.fault(
        "mask_ignored",
        "`mask` is not passed on to the attention of x to itself.",
        (BACK, "self.attention"),
    )
    block.fault(
        "mask_inverted",
        "`mask` is inverted on the way. True = may look, here as in "
        "`MultiHeadAttention`.",
        (BACK, "self.attention, mask=None if mask is None else ~mask"),
    )
    block.fault(
        "one_head",
        "Attention has one head: `n_heads` is not passed on.",
        *((each, each.replace("config.n_heads", "1")) for each in HEADS[block]),
    )
    block.fault(
        "gelu",
        "The activation is GELU; this block has ReLU, as the first Transformer and T5.",
        ("torch.relu", "nn.functional.gelu"),
    )

NORMED = {
    EncoderBlock: {1: "mask=mask), self.norm_1", 2: "self.feed_forward, self.norm_2"},
    DecoderBlock: {
        1: "look_back, self.norm_1",
        2: "look_across, self.norm_2",
        3: "self.feed_forward, self.norm_3",
    },
}
for block, places in NORMED.items():
    for i, place in places.items():
        for j in {*places} - {i}:
            block.fault(
                f"norm_{j}_in_place_of_norm_{i}",
                f"Sublayer {i} reads the stream through `norm_{j}`; its own is `norm_{i}`.",
                (place, place.replace(f"norm_{i}", f"norm_{j}")),
            )

EncoderBlock.fault(
    "parallel",
    "Both sublayers read the block's input; the second reads what the first has left.",
    (FIRST[EncoderBlock], FIRST[EncoderBlock].replace("x =", "y =")),
    (LAST[EncoderBlock], "return y + self.feed_forward(self.norm_2(x))"),
)
EncoderBlock.fault(
    "residual_from_the_input",
    "The second sublayer's result is added to the block's input, so that what "
    "attention has found is not in the stream. Add it to the stream as the first "
    "sublayer left it.",
    (FIRST[EncoderBlock], FIRST[EncoderBlock].replace("x =", "y =")),
    (LAST[EncoderBlock], "return x + self.feed_forward(self.norm_2(y))"),
)
EncoderBlock.fault(
    "second_residual_missing",
    "The feed-forward network replaces the stream: its `x +` is missing.",
    (LAST[EncoderBlock], "return self.feed_forward(self.norm_2(x))"),
)
EncoderBlock.fault(
    "feed_forward_first",
    "The feed-forward network runs before attention.",
    (FIRST[EncoderBlock], "x = pre_norm(x, self.feed_forward, self.norm_2)"),
    (LAST[EncoderBlock], FIRST[EncoderBlock].replace("x =", "return")),
)
EncoderBlock.fault(
    "attention_unused",
    "Attention's result is not used.",
    (FIRST[EncoderBlock], FIRST[EncoderBlock].replace("x = ", "")),
)

DecoderBlock.fault(
    "no_second_residual",
    "Looking across replaces the stream, so what looking back has found is lost.",
    (ACROSS, "x = look_across(self.norm_2(x))"),
)
DecoderBlock.fault(
    "residual_from_the_input",
    "What looking across finds is added to the block's input, so that what looking "
    "back has found is lost.",
    (FIRST[DecoderBlock], "y = pre_norm(x, look_back, self.norm_1)"),
    (ACROSS, "x = x + look_across(self.norm_2(y))"),
)
DecoderBlock.fault(
    "across_from_the_input",
    "Looking across asks with the block's input. It asks with the stream as looking "
    "back has left it.",
    (FIRST[DecoderBlock], "y = pre_norm(x, look_back, self.norm_1)"),
    (ACROSS, "x = y + look_across(self.norm_2(x))"),
)
DecoderBlock.fault(
    "across_first",
    "It looks across before it looks back. What has been written so far decides what "
    "to look for.",
    (FIRST[DecoderBlock], "y = pre_norm(x, look_across, self.norm_2)"),
    (ACROSS, "x = pre_norm(y, look_back, self.norm_1)"),
)
DecoderBlock.fault(
    "self_attention_unused",
    "Looking back is missing from the stream.",
    (FIRST[DecoderBlock], ""),
)
DecoderBlock.fault(
    "cross_attention_unused",
    "Looking across is missing from the stream: the source does not matter at all.",
    (ACROSS, ""),
)
DecoderBlock.fault(
    "looks_at_itself_twice",
    "The cross-attention looks at x. Its memory is what the encoder made.",
    (
        ACROSS,
        "y = self.norm_2(x)\n        x = x + self.cross_attention(y, y, memory_mask)",
    ),
)
DecoderBlock.fault(
    "memory_normalised",
    "The memory goes through `norm_2` too. It is normalised once, at the end of the "
    "encoder, and is the same for every block.",
    ("memory=memory", "memory=self.norm_2(memory)"),
)
DecoderBlock.fault(
    "queries_not_normalised",
    "Looking across reads the stream without `norm_2`.",
    (ACROSS, "x = x + look_across(x)"),
)
DecoderBlock.fault(
    "norms_exchanged",
    "`norm_2` and `norm_3` are exchanged.",
    ("look_across, self.norm_2", "look_across, self.norm_3"),
    ("self.feed_forward, self.norm_3", "self.feed_forward, self.norm_2"),
)
DecoderBlock.fault(
    "memory_mask_ignored",
    "`memory_mask` is not passed on, so padding of the source is looked at.",
    ("memory=memory, memory_mask=memory_mask", "memory=memory"),
)
DecoderBlock.fault(
    "masks_exchanged",
    "The two masks are exchanged.",
    (BACK, "self.attention, mask=memory_mask"),
    ("memory_mask=memory_mask", "memory_mask=mask"),
)
DecoderBlock.fault(
    "mask_for_both",
    "`mask` is used for both attentions; `memory_mask` belongs to the second.",
    ("memory_mask=memory_mask", "memory_mask=mask"),
)

# EncoderDecoder -----------------------------------------------------------------------

ENCODE = "x = block(x, mask)"
DECODE = "x = block(x, own, mask, memory_mask)"
OUT = "self.head(self.decoder_norm(x))"
OWN = "own = memory[i] if isinstance(memory, list) else memory"
MASK = "mask = real[:, None, None, :]"
TRIANGLE = "causal_mask(target.shape[1])"
PLACED = "x + sinusoidal(t, self.config.d_model).to(x)"

EncoderDecoder.fault(
    "head_tied",
    "The head has no matrix of its own, it is the embedding's. Here it is a linear "
    "layer of its own.",
    (
        "config.vocab_size, bias=False)",
        "config.vocab_size, bias=False)\n"
        "        self.head.weight = self.embedding.weight",
    ),
)
for half, step in (("encoder", ENCODE), ("decoder", DECODE)):
    EncoderDecoder.fault(
        f"{half}_blocks_unused",
        f"What the blocks of the {half} return is not used.",
        (step, step.replace("x = ", "")),
    )
    EncoderDecoder.fault(
        f"{half}_norm_eps_ignored",
        f"`{half}_norm` has its default eps, not `norm_eps`.",
        (norm_of(f"{half}_norm"), f"self.{half}_norm = RMSNorm(config.d_model)"),
    )
EncoderDecoder.fault(
    "encoder_norm_unused",
    "The memory leaves the encoder without `encoder_norm`. With pre-norm blocks "
    "nothing else brings it to size.",
    ("return self.encoder_norm(x), mask", "return x, mask"),
)
EncoderDecoder.fault(
    "encoder_norm_in_the_loop",
    "`encoder_norm` runs after every block. It runs once, after the last: is the line "
    "indented too far?",
    (ENCODE, "x = self.encoder_norm(block(x, mask))"),
    ("return self.encoder_norm(x), mask", "return x, mask"),
)
EncoderDecoder.fault(
    "last_encoder_block_alone",
    "Every block of the encoder reads the embedding, so that only the last counts. "
    "Each reads what the one before has left: `x = block(x, …)`.",
    ("x = self.embed(source)", "embedded = self.embed(source)"),
    (ENCODE, "x = block(embedded, mask)"),
)
EncoderDecoder.fault(
    "no_positions",
    "Nothing tells where a token stands: `sinusoidal` is missing.",
    (PLACED, "x"),
)
EncoderDecoder.fault(
    "no_source_positions",
    "The source has no positions. The encoder would read a bag of letters.",
    ("self.embed(source)", "self.embedding(source)"),
)
EncoderDecoder.fault(
    "no_target_positions",
    "The target has no positions.",
    ("self.embed(target)", "self.embedding(target)"),
)
EncoderDecoder.fault(
    "embedding_scaled",
    "The embedding is multiplied by √d_model, as in the paper of 2017. Here it is not.",
    ("x = self.embedding(ids)", "x = self.embedding(ids) * self.config.d_model**0.5"),
)
EncoderDecoder.fault(
    "encoder_causal",
    "The encoder hides what comes later. It may see all of the source.",
    (ENCODE, "x = block(x, mask & causal_mask(source.shape[1]))"),
)
EncoderDecoder.fault(
    "encoder_sees_padding",
    "The encoder looks at padding: `attention` in its blocks needs the mask of the "
    "source.",
    (ENCODE, "x = block(x)"),
)
EncoderDecoder.fault(
    "mask_flat",
    "The mask is `(B, S)`. It must broadcast to `(B, H, T, S)`, so it needs two "
    "dimensions of size 1 in the middle.",
    ("return self.encoder_norm(x), mask", "return self.encoder_norm(x), real"),
)
EncoderDecoder.fault(
    "padding_is_0",
    "Padding is taken to be token 0. Which token it is stands in `config.pad_id`.",
    ("source != self.config.pad_id", "source != 0"),
)
EncoderDecoder.fault(
    "padding_counted",
    "The mask is made of the number of tokens in each row, so padding counts as text "
    "where it does not stand at the end.",
    (
        MASK,
        f"real = torch.arange(source.shape[1]) < real.sum(1)[:, None]\n        {MASK}",
    ),
)
EncoderDecoder.fault(
    "memory_normalised_again",
    "`decode` normalises the memory again. `encode` has done that.",
    (OWN, OWN.replace("else memory", "else self.encoder_norm(memory)")),
)
EncoderDecoder.fault(
    "last_decoder_block_alone",
    "Every block of the decoder reads the embedding, so that only the last counts. "
    "Each reads what the one before has left: `x = block(x, …)`.",
    ("x = self.embed(target)", "embedded = self.embed(target)"),
    (DECODE, "x = block(embedded, own, mask, memory_mask)"),
)
EncoderDecoder.fault(
    "decoder_norm_unused",
    "The logits are made without `decoder_norm`.",
    (OUT, "self.head(x)"),
)
EncoderDecoder.fault(
    "decoder_norm_in_the_loop",
    "`decoder_norm` runs after every block. It runs once, after the last: is the line "
    "indented too far?",
    (DECODE, "x = self.decoder_norm(block(x, own, mask, memory_mask))"),
    (OUT, "self.head(x)"),
)
EncoderDecoder.fault(
    "no_mask",
    "The decoder sees later tokens of the target, and so the answer.",
    (DECODE, "x = block(x, own, None, memory_mask)"),
)
EncoderDecoder.fault(
    "itself_hidden",
    "A position of the target does not see itself, and so not the newest token that is "
    "known. The target is shifted already: the diagonal is open.",
    (TRIANGLE, f"{TRIANGLE}.tril(-1)"),
)
EncoderDecoder.fault(
    "cross_sees_padding",
    "The decoder looks at padding: its blocks need the mask of the source as "
    "`memory_mask`.",
    (DECODE, "x = block(x, own, mask)"),
)
EncoderDecoder.fault(
    "mask_not_handed_on",
    "The decoder looks at padding: `decode` is not given the mask that `encode` made.",
    ("self.decode(target, memory, memory_mask)", "self.decode(target, memory)"),
)
EncoderDecoder.fault(
    "list_not_accepted",
    "A list of pairs is handed to every block as it is. Block i gets the i-th pair.",
    (OWN, "own = memory"),
)
EncoderDecoder.fault(
    "first_pair_for_all",
    "Every block gets the first block's keys and values. Each has a `w_k` and a `w_v` "
    "of its own.",
    ("memory[i]", "memory[0]"),
)
EncoderDecoder.fault(
    "mask_forgotten_with_a_list",
    "Given a list of pairs, `decode` does not use `memory_mask`.",
    (
        OWN,
        f"{OWN}\n            memory_mask = None if own is not memory else memory_mask",
    ),
)

# translate ----------------------------------------------------------------------------

PAIRS = "kept = [block.cross_attention.keys_values(memory) for block in model.decoder]"
FILLED = ".masked_fill(ended, pad_id)"
ENDED = "ended = ended | (token == end_id)"
APPENDED = "ids = torch.cat([ids, token[:, None]], dim=1)"
STEP = "logits = model.decode(ids, kept, memory_mask)"

translate.fault(
    "starts_with_the_source",
    "The decoder starts from the source's first token; it starts from `start_id`.",
    ("source.new_full((len(source), 1), start_id)", "source[:, :1]"),
)
translate.fault(
    "starts_with_the_end",
    "The decoder starts from `end_id`, as some models do; it starts from `start_id`.",
    ("1), start_id)", "1), end_id)"),
)
translate.fault(
    "start_kept",
    "The start is part of the result.",
    ("return ids[:, 1:]", "return ids"),
)
translate.fault(
    "start_forgotten",
    "The start is gone from the second step on. In training it stood in front of every "
    "target.",
    ("decode(ids,", "decode(ids[:, 1:] if ids.shape[1] > 1 else ids,"),
)
translate.fault(
    "first_position",
    "The next token is read from the first position's logits. The last one has seen "
    "everything.",
    ("memory_mask)[:, -1]", "memory_mask)[:, 0]"),
)
translate.fault(
    "last_token_alone",
    "The decoder reads only the newest token. Only the memory's keys and values are "
    "kept here, so it has to read all that was written again.",
    ("decode(ids,", "decode(ids[:, -1:],"),
)
translate.fault(
    "nothing_written",
    "The loop ends before its first step. It goes on while some row has not ended.",
    ("not ended.all()", "ended.all()"),
)
translate.fault(
    "one_too_many",
    "A row may have `max_tokens` tokens, the start not counted; here it gets one more.",
    ("ids.shape[1] <= max_tokens", "ids.shape[1] <= max_tokens + 1"),
)
translate.fault(
    "one_too_few",
    "A row may have `max_tokens` tokens, the start not counted; here it gets one less.",
    ("ids.shape[1] <= max_tokens", "ids.shape[1] < max_tokens"),
)
translate.fault(
    "end_ignored",
    "`end_id` does not end anything.",
    (ENDED, ""),
)
translate.fault(
    "end_left_out",
    "The end is not part of the result. Without it nobody can tell a row that has "
    "ended from one that was cut off.",
    (APPENDED, f"if ended.all():\n            break\n        {APPENDED}"),
)
translate.fault(
    "end_overwritten",
    "The end itself is overwritten by padding. Fill up the rows that had ended "
    "*before* this step, and ask after that which end in it.",
    (FILLED, ""),
    (ENDED, f"{ENDED}\n        token = token{FILLED}"),
)
translate.fault(
    "padding_ends",
    "A row ends where it writes `pad_id`. Only `end_id` ends a row.",
    (ENDED, f"{ENDED} | (token == pad_id)"),
)
translate.fault(
    "stops_at_the_first_end",
    "The loop stops when the first row has ended, and cuts off all others.",
    ("not ended.all()", "not ended.any()"),
)
translate.fault(
    "writes_on",
    "A row that has ended goes on writing until the others are done.",
    (FILLED, ""),
)
translate.fault(
    "filled_with_the_end",
    "After its end a row is filled with `end_id`; padding is asked for.",
    (FILLED, ".masked_fill(ended, end_id)"),
)
translate.fault(
    "padding_is_0",
    "A row that has ended is filled with 0; padding is `config.pad_id`.",
    (FILLED, ".masked_fill(ended, 0)"),
)
translate.fault(
    "never_stops",
    "It runs for `max_tokens` steps although all rows have ended, or its result is as "
    "wide as that. Stop when the last row ends; the longest gives the width.",
    (" and not ended.all()", ""),
)
translate.fault(
    "mask_not_passed",
    "The mask of the source is not passed to `decode`, so padding is looked at.",
    ("kept, memory_mask)", "kept)"),
)
translate.fault(
    "projected_each_step",
    "`decode` gets the memory itself, so every block makes its keys and values again "
    "in every step.",
    ("decode(ids, kept,", "decode(ids, memory,"),
)
translate.fault(
    "pairs_each_step",
    "The list of pairs is made again in every step. Make it once, before the loop.",
    (PAIRS, ""),
    (STEP, f"{PAIRS}\n        {STEP}"),
)
translate.fault(
    "encoded_each_step",
    "The encoder runs again in every step. The source does not change.",
    (STEP, f"memory, memory_mask = model.encode(source)\n        {STEP}"),
    ("decode(ids, kept,", "decode(ids, memory,"),
)

# The parts together -------------------------------------------------------------------


def differs(part, name, sentence, *edits):
    whole_encoder_decoder.fault(name, sentence, *edits, edited=part)


differs(
    "attention",
    "nan_in_a_row_of_padding",
    "`attention` gives NaN to a query that may look at nothing.",
    (WEIGHTS, f"torch.softmax(({SCORES}).masked_fill(~mask, -torch.inf), dim=-1)"),
)
differs(
    "split_heads",
    "heads_not_exchanged",
    "`split_heads` reads the memory in another shape without exchanging dimensions.",
    (
        "x.unflatten(-1, (n_heads, -1)).transpose(1, 2)",
        "x.reshape(len(x), n_heads, x.shape[1], -1)",
    ),
)
differs(
    "merge_heads",
    "heads_merged_askew",
    "`merge_heads` does not exchange heads and time first.",
    ("x.transpose(1, 2).flatten(2)", "x.reshape(len(x), x.shape[2], -1)"),
)
differs(
    "MultiHeadAttention",
    "mask_forgotten",
    "`MultiHeadAttention` does not use its mask.",
    ("attention(q, k, v, mask)", "attention(q, k, v)"),
)
differs(
    "RMSNorm",
    "eps_fixed",
    "`RMSNorm` ignores the eps that it is given.",
    ("self.eps = eps", "self.eps = 1e-6"),
)
differs(
    "pre_norm",
    "stream_normalised",
    "`pre_norm` adds to the normalised stream instead of the stream.",
    ("x + sublayer", "norm(x) + sublayer"),
)
differs(
    "FeedForward",
    "activation_fixed",
    "`FeedForward` ignores the activation that it is given.",
    ("self.activation = activation", "self.activation = gelu"),
)
differs(
    "shift_right",
    "not_shifted",
    "`shift_right` leaves the target where it is.",
    (MOVED, "ids.clone()"),
)
differs(
    "cross_entropy",
    "losses_added",
    "`cross_entropy` is the sum; the mean is asked for.",
    ("(normaliser - right).mean()", "(normaliser - right).sum()"),
)
differs(
    "clip_gradients",
    "not_clipped",
    "`clip_gradients` changes nothing.",
    ("total > max_norm", "False"),
)
differs(
    "AdamW",
    "decay_in_the_gradient",
    "`AdamW` adds the weight decay to the gradient.",
    (
        "state = self.state[p]",
        "p.grad.add_(group['weight_decay'] * p)\n                state = self.state[p]",
    ),
    ('p.mul_(1 - lr * group["weight_decay"])', ""),
)
differs(
    "EncoderDecoder",
    "model_without_mask",
    "`EncoderDecoder` has no causal mask.",
    (DECODE, "x = block(x, own, None, memory_mask)"),
)
differs(
    "translate",
    "translate_reads_one_token",
    "`translate` gives the decoder the newest token alone.",
    ("decode(ids,", "decode(ids[:, -1:],"),
)
