"""Lesson 13: mistakes in the encoder-decoder, its blocks, and translation."""

import re

from utils.exercises.encoder_decoder import (
    FOUR,
    HALVES,
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

# CrossAttention -----------------------------------------------------------------------

ATTEND = "attention(q, k, v, memory_mask)"
WEIGHTS = "attention_weights(q, k, mask)"
SCORES = "q @ k.mT / math.sqrt(q.shape[-1])"

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
    "keys_and_values_exchanged",
    "What serves as keys is made by `w_v`, and the values by `w_k`: they are exchanged "
    "on the way from their matrices to `attention`.",
    ("return k, v", "return v, k"),
)
for layer, role, place in (
    ("w_q", "queries", "self.w_q(x)"),
    ("w_k", "keys", "self.w_k(memory)"),
    ("w_v", "values", "self.w_v(memory)"),
    ("w_o", "results", "self.w_o(merge"),
):
    for other in FOUR:
        if other != layer:
            CrossAttention.fault(
                f"{role}_by_{other}",
                f"The {role} are made by `{other}`; they are due from `{layer}`.",
                (place, place.replace(layer, other)),
            )
CrossAttention.fault(
    "not_scaled",
    "The scores are not divided by the root of d_head.",
    (ATTEND, "attention(q * q.shape[-1] ** 0.5, k, v, memory_mask)"),
)
CrossAttention.fault(
    "scaled_twice",
    "The scores are divided by the root of d_head twice; your `attention` does it once.",
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
    "mask_ignored",
    "`memory_mask` is not used, so padding is looked at.",
    (ATTEND, "attention(q, k, v)"),
)
CrossAttention.fault(
    "mask_read_the_other_way",
    "The mask is read the other way round: True = may look.",
    (
        ATTEND,
        ATTEND.replace(
            "memory_mask", "memory_mask if memory_mask is None else ~memory_mask"
        ),
    ),
)


def wrong_weights(name, sentence, weights):
    """Other weights where there is a mask."""
    weights = f"(attention_weights(q, k) if mask is None else {weights})"
    CrossAttention.fault(name, sentence, (WEIGHTS, weights), edited="attention")


wrong_weights(
    "zero_and_one_added",
    "The mask is added to the scores as 0 and 1, which hides nothing.",
    f"torch.softmax({SCORES} + mask, dim=-1)",
)
wrong_weights(
    "hidden_scores_are_0",
    "Hidden scores are set to 0, or multiplied by the mask, and e⁰ is 1: what is "
    "hidden still gets a share. −∞ has none.",
    f"torch.softmax({SCORES} * mask, dim=-1)",
)
wrong_weights(
    "after_the_softmax",
    "The mask comes after the softmax: the weights that are left do not add up to 1.",
    "attention_weights(q, k) * mask",
)
wrong_weights(
    "mean_where_nothing_is_seen",
    "A row of padding alone gives the mean of the padding: a large negative number in "
    "place of −∞ hides nothing once all keys have it. It gets zeros.",
    f"torch.softmax(({SCORES}).masked_fill(~mask, -1e9), dim=-1)",
)
CrossAttention.fault(
    "pair_as_a_list",
    "`keys_values` gives a list, and `forward` takes a list for the memory itself. A "
    "tuple is the pair that both agree on: `return k, v`.",
    ("return k, v", "return [k, v]"),
)

# The blocks ---------------------------------------------------------------------------

BACK = "self.attention, mask=mask"
ACROSS = "x = pre_norm(x, look_across, self.norm_2)"
CALL = r"pre_norm\(x, (.*), (self.norm_\d)\)"  # sublayer, norm
LINES = {
    EncoderBlock: {
        "attention": "x = pre_norm(x, partial(self.attention, mask=mask), self.norm_1)",
        "feed_forward": "return pre_norm(x, self.feed_forward, self.norm_2)",
    },
    DecoderBlock: {
        "attention": "x = pre_norm(x, look_back, self.norm_1)",
        "cross_attention": ACROSS,
        "feed_forward": "return pre_norm(x, self.feed_forward, self.norm_3)",
    },
}


def default_eps(name):
    """The edit that leaves out `norm_eps`."""
    norm = f"self.{name} = RMSNorm(config.d_model, config.norm_eps)"
    return norm, norm.replace(", config.norm_eps", "")


STEPS = {
    "no_residual": (
        "The stream is replaced instead of added to: `x +` is missing.",
        "sublayer(norm(x))",
    ),
    "stream_normalised": (
        "The normalised stream goes on. In pre-norm only the sublayer sees it.",
        "norm(x) + sublayer(norm(x))",
    ),
    "post_norm": (
        "The norms come after the additions (post-norm); here they come before.",
        "norm(x + sublayer(x))",
    ),
    "norm_and_sublayer_exchanged": (
        "The norms are applied to what the sublayers give, not to what they read.",
        "x + norm(sublayer(x))",
    ),
    "not_normalised": (
        "The sublayers read the stream as it is: no norm is called.",
        "x + sublayer(x)",
    ),
}

for block, lines in LINES.items():
    for name, (sentence, step) in STEPS.items():
        block.fault(name, sentence, ("x + sublayer(norm(x))", step), edited="pre_norm")
    norms = range(1, len(lines) + 1)
    block.fault(
        "eps_ignored",
        "The norms use their default eps; the config's `norm_eps` is not passed on.",
        *(default_eps(f"norm_{i}") for i in norms),
    )
    for i, (name, line) in enumerate(lines.items(), start=1):
        block.fault(
            f"norm_{i}_eps_ignored",
            f"`norm_{i}` has its default eps; pass `norm_eps` on to every norm.",
            default_eps(f"norm_{i}"),
        )
        block.fault(
            f"{name}_unused",
            f"What `{name}` gives is missing from the stream.",
            (line, "return x" if line.startswith("return") else ""),
        )
        block.fault(
            f"{name}_without_residual",
            f"What `{name}` gives replaces the stream: its `x +` is missing.",
            (line, re.sub(CALL, r"(\1)(\2(x))", line)),
        )
        block.fault(
            f"{name}_not_normalised",
            f"`{name}` reads the stream without `norm_{i}`.",
            (line, re.sub(CALL, r"x + (\1)(x)", line)),
        )
        for j in norms:
            if j != i:
                block.fault(
                    f"norm_{j}_in_place_of_norm_{i}",
                    f"`{name}` reads the stream through `norm_{j}`; its own is `norm_{i}`.",
                    (line, line.replace(f"norm_{i}", f"norm_{j}")),
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
        "gelu",
        "The activation is GELU; this block has ReLU, as the first Transformer and T5.",
        ("torch.relu", "nn.functional.gelu"),
    )

    first, second, *_ = lines.values()
    block.fault(
        "second_reads_the_input",
        "The second sublayer reads the block's input; it reads what the first has left.",
        (first, first.replace("x =", "y =")),
        (second, re.sub(CALL, r"y + (\1)(\2(x))", second)),
    )
    block.fault(
        "residual_from_the_input",
        "The second sublayer's result is added to the block's input. Add it to the "
        "stream as the first sublayer left it.",
        (first, first.replace("x =", "y =")),
        (second, re.sub(CALL, r"x + (\1)(\2(y))", second)),
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
DecoderBlock.fault(
    "memory_mask_for_both",
    "`memory_mask` is used for both attentions; `mask` belongs to the first.",
    (BACK, "self.attention, mask=memory_mask"),
)

# EncoderDecoder -----------------------------------------------------------------------

ENCODE = "x = block(x, mask)"
DECODE = "x = block(x, own, mask, memory_mask)"
TRIANGLE = "causal_mask(target.shape[1])"

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
for half, reads, step in zip(
    HALVES, ("source", "target"), (ENCODE, DECODE), strict=True
):
    embed, norm = f"self.embed({reads})", f"self.{half}_norm(x)"
    blocks = f"{half.title()}Block(config)"
    EncoderDecoder.fault(
        f"one_block_in_the_{half}",
        f"One block stands in several places of `{half}`: `[Block(config)] * n` makes "
        "one object. Each layer needs its own.",
        (f"{blocks} for _ in layers", f"[{blocks}] * config.n_layers"),
    )
    EncoderDecoder.fault(
        f"{half}_blocks_unused",
        f"What the blocks of the {half} return is not used.",
        (step, step.replace("x = ", "")),
    )
    EncoderDecoder.fault(
        f"{half}_norm_eps_ignored",
        f"`{half}_norm` has its default eps, not `norm_eps`.",
        default_eps(f"{half}_norm"),
    )
    EncoderDecoder.fault(
        f"{half}_norm_unused",
        f"`{half}_norm` is not used. Pre-norm blocks leave their stream as it has grown.",
        (norm, "x"),
    )
    EncoderDecoder.fault(
        f"{half}_norm_in_the_loop",
        f"`{half}_norm` runs after every block. It runs once, after the last: is the "
        "line indented too far?",
        (norm, "x"),
        (step, f"{step}\n            x = {norm}"),
    )
    EncoderDecoder.fault(
        f"last_{half}_block_alone",
        f"Every block of the {half} reads the embedding, so that only the last counts. "
        "Each reads what the one before has left: `x = block(x, …)`.",
        (f"x = {embed}", f"embedded = {embed}"),
        (step, step.replace("(x", "(embedded")),
    )
    EncoderDecoder.fault(
        f"no_{reads}_positions",
        f"Nothing tells where a token of the {reads} stands: `sinusoidal` is missing.",
        (embed, f"self.embedding({reads})"),
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
    "The encoder looks at padding: its blocks need the mask of the source.",
    (ENCODE, "x = block(x)"),
)
EncoderDecoder.fault(
    "padding_is_0",
    "Padding is taken to be token 0. Which token it is stands in `config.pad_id`.",
    ("source != self.config.pad_id", "source != 0"),
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
    "The decoder looks at padding: its blocks need the source's mask, `memory_mask`.",
    (DECODE, "x = block(x, own, mask)"),
)
EncoderDecoder.fault(
    "mask_not_handed_on",
    "The decoder looks at padding: `decode` is not given the mask that `encode` made.",
    ("self.decode(target, memory, memory_mask)", "self.decode(target, memory)"),
)
EncoderDecoder.fault(
    "target_encoded",
    "The encoder reads the target. It reads the source.",
    ("self.encode(source)", "self.encode(target)"),
)

# translate ----------------------------------------------------------------------------

FILLED = ".masked_fill(ended, pad_id)"
ENDED = "ended = ended | (token == end_id)"

translate.fault(
    "nothing_written",
    "The loop ends before its first step. It goes on while some row has not ended.",
    ("not ended.all()", "ended.all()"),
)
translate.fault(
    "starts_with_the_end",
    "The decoder starts from `end_id`, as some models do; it starts from `start_id`.",
    ("1), start_id)", "1), end_id)"),
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
    "end_overwritten",
    "The end itself is overwritten by padding. Fill up the rows that had ended "
    "*before* this step, and ask after that which end in it.",
    (FILLED, ""),
    (ENDED, f"{ENDED}\n        token = token{FILLED}"),
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

# The parts together -------------------------------------------------------------------

for part, name, sentence, *edits in (
    (
        "MultiHeadAttention",
        "mask_forgotten",
        "`MultiHeadAttention` does not use its mask.",
        ("attention(q, k, v, mask)", "attention(q, k, v)"),
    ),
    (
        "RMSNorm",
        "eps_fixed",
        "`RMSNorm` ignores the eps that it is given.",
        ("self.eps = eps", "self.eps = 1e-6"),
    ),
    (
        "FeedForward",
        "activation_fixed",
        "`FeedForward` ignores the activation that it is given.",
        ("self.activation = activation", "self.activation = gelu"),
    ),
):
    whole_encoder_decoder.fault(name, sentence, *edits, edited=part)
