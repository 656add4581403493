"""Lesson 08: mistakes in the decoder, in how it is sampled, and in what it costs."""

from utils.exercises.forward_pass import (
    Block,
    Transformer,
    TransformerConfig,
    count_parameters,
    forward_flops,
    generate,
    sample,
    whole_decoder,
)

# TransformerConfig --------------------------------------------------------------------

TransformerConfig.fault(
    "width_must_be_divisible",
    "It refuses a `d_model` that the heads do not divide. That is needed only where "
    "`d_head` is made from it; here `d_head` is a size of its own.",
    ("if self.n_heads % self", "if self.d_model % self.n_heads or self.n_heads % self"),
)
TransformerConfig.fault(
    "odd_refused_in_both_styles",
    'It refuses an odd `d_head` in style "gpt2" too. Only RoPE needs pairs; learned '
    "positions do not.",
    ('if self.style == "llama" and self', "if self"),
)
TransformerConfig.fault(
    "shared_the_wrong_way",
    "The division is the wrong way round. Several query heads share one KV head, so "
    "it is the number of query heads that must be a multiple.",
    ("self.n_heads % self.n_kv_heads", "self.n_kv_heads % self.n_heads"),
)

# Block --------------------------------------------------------------------------------

ATTEND = "x = pre_norm(x, attend, self.norm_1)"
THINK = "pre_norm(x, self.feed_forward, self.norm_2)"

Block.fault(
    "no_residual",
    "The stream is replaced instead of added to: `x +` is missing, so what earlier "
    "layers wrote is lost.",
    (ATTEND, "x = attend(self.norm_1(x))"),
    (THINK, "self.feed_forward(self.norm_2(x))"),
)
Block.fault(
    "stream_normalised",
    "The normalised stream goes on: the sum starts from norm(x) instead of x. In "
    "pre-norm only the sublayer sees the normalised values.",
    (ATTEND, "x = self.norm_1(x) + attend(self.norm_1(x))"),
    (THINK, "self.norm_2(x) + self.feed_forward(self.norm_2(x))"),
)
Block.fault(
    "post_norm",
    "The norms come after the additions (post-norm). Here each norm belongs inside, "
    "before its sublayer; the stream itself is never normalised.",
    (ATTEND, "x = self.norm_1(x + attend(x))"),
    (THINK, "self.norm_2(x + self.feed_forward(x))"),
)
Block.fault(
    "parallel",
    "Both sublayers read the block's input. The feed-forward network reads the stream "
    "*after* attention has been added.",
    (ATTEND, "new = pre_norm(x, attend, self.norm_1)"),
    (THINK, "new + self.feed_forward(self.norm_2(x))"),
)
Block.fault(
    "attention_unused",
    "Attention's result is not used: is it bound to a name that nobody reads, or added "
    "to a copy?",
    (ATTEND, ATTEND.removeprefix("x = ")),
)
Block.fault(
    "feed_forward_unused",
    "The feed-forward network's result is not used.",
    (THINK, "x"),
)
Block.fault(
    "second_residual_from_the_start",
    "The second addition starts from the block's input, so attention's own "
    "contribution to the stream is lost.",
    (ATTEND, "new = pre_norm(x, attend, self.norm_1)"),
    (THINK, "x + self.feed_forward(self.norm_2(new))"),
)
Block.fault(
    "one_norm_for_both",
    "`norm_1` is used twice. The two norms have weights of their own; while both are "
    "ones, as at the start, nobody notices.",
    ("self.feed_forward, self.norm_2)", "self.feed_forward, self.norm_1)"),
)
Block.fault(
    "not_normalised",
    "The norms are made but never called.",
    (ATTEND, "x = x + attend(x)"),
    (THINK, "x + self.feed_forward(x)"),
)
Block.fault(
    "second_not_normalised",
    "The feed-forward network reads the stream without `norm_2`.",
    (THINK, "x + self.feed_forward(x)"),
)
Block.fault(
    "no_rotation",
    "Nothing rotates queries and keys, so the block does not know the order of its "
    "tokens.",
    (", rotate=rotate", ""),
)
Block.fault(
    "base_ignored",
    "RoPE runs with its default base; the config's `rope_base` is not passed on.",
    (", base=self.config.rope_base", ""),
)
Block.fault(
    "mask_ignored",
    "The mask is not passed on to attention.",
    ("mask=mask, ", ""),
)
Block.fault(
    "always_causal",
    "The block hides the future by itself, even where no mask is given. It takes the "
    "mask that it gets; the model decides.",
    ("mask=mask", "mask=causal_mask(x.shape[1]).to(x.device)"),
)
Block.fault(
    "positions_ignored",
    "The positions that are given are ignored: it always counts from 0. With a cache, "
    "or with padding on the left, that is wrong.",
    ("if positions is None:", "if True:"),
)
Block.fault(
    "eps_ignored",
    "The norms use their default eps; the config's `norm_eps` is not passed on.",
    (
        "norm_1 = norm(config.d_model, eps=config.norm_eps)",
        "norm_1 = norm(config.d_model)",
    ),
    (
        "norm_2 = norm(config.d_model, eps=config.norm_eps)",
        "norm_2 = norm(config.d_model)",
    ),
)
Block.fault(
    "rotated_gpt2",
    'Style "gpt2" rotates too. Its positions are added to the embedding by the model.',
    ('if self.config.style == "llama":', "if True:"),
)
Block.fault(
    "tanh_gelu",
    "This is the tanh approximation of GELU (`gelu_new` in GPT-2's own code). Here the "
    "exact one of lesson 05 is used.",
    ("config.d_ff, gelu)", 'config.d_ff, nn.GELU(approximate="tanh"))'),
)

# Transformer --------------------------------------------------------------------------

MASK = "causal_mask(t)"
BLOCKS = "nn.ModuleList(Block(config) for _ in range(config.n_layers))"
LOGITS = "return self.head(self.norm(x))"
NORMAL = "nn.init.normal_(parameter, std=0.02)"
TIES = "self.head.weight = self.embedding.weight"
COPY = "if config.tied: self.head.load_state_dict(self.embedding.state_dict())"

Transformer.fault(
    "no_mask",
    "No mask hides the future: every position sees the tokens that it is to predict. "
    "The loss in training will look wonderful, the texts will not.",
    ("block(x, mask, positions)", "block(x, None, positions)"),
)
Transformer.fault(
    "mask_upside_down",
    "The mask is upside down: each position sees what comes *after* it. True = may "
    "look, row = query, column = key.",
    (MASK, f"{MASK}.T"),
)
Transformer.fault(
    "one_ahead",
    "Each position sees one token ahead, the very one that it must predict.",
    (MASK, "torch.ones(t, t).tril(1).bool()"),
)
Transformer.fault(
    "no_final_norm",
    "The stream reaches the head without the last norm.",
    (LOGITS, "return self.head(x)"),
)
Transformer.fault(
    "eps_of_the_last_norm",
    "The last norm uses its default eps; the config's `norm_eps` is not passed on.",
    ("norm(config.d_model, eps=config.norm_eps)", "norm(config.d_model)"),
)
Transformer.fault(
    "probabilities",
    "It returns probabilities. Return the logits: training and sampling apply the "
    "softmax where they need it.",
    (LOGITS, f"{LOGITS}.softmax(-1)"),
)
Transformer.fault(
    "shifted",
    "The logits of the last position are cut off. The shift by one belongs to the "
    "targets, and is made where the loss is computed: here it would be made twice.",
    (LOGITS, f"{LOGITS}[:, :-1]"),
)
Transformer.fault(
    "positions_forgotten",
    'In style "gpt2" nothing is added to the embedding for the position.',
    ("x = x + self.positions(positions)", "pass"),
)
Transformer.fault(
    "one_block_many_times",
    "`[Block(config)] * n` is one block in n places, not n blocks: Python copies the "
    "reference, not the object. Make a new one in each turn of a loop.",
    (BLOCKS, "nn.ModuleList([Block(config)] * config.n_layers)"),
)
Transformer.fault(
    "blocks_in_a_list",
    "The blocks are in a plain Python list. PyTorch does not look into it: their "
    "parameters are neither trained nor saved nor moved. Use `nn.ModuleList`.",
    (BLOCKS, "[Block(config) for _ in range(config.n_layers)]"),
)
Transformer.fault(
    "values_copied",
    "The head starts with the embedding's values, but in a parameter of its own: the "
    "first training step makes them differ.",
    (TIES, "pass"),
    (NORMAL, f"{NORMAL}\n        {COPY}"),
)

# sample -------------------------------------------------------------------------------

COLD = "if temperature == 0:\n        return logits.argmax(dim=-1)"
DIVIDED = "(scaled - scaled[:, :1]) / temperature"
CUT = "scaled[:, top_k:] = -torch.inf"
REACHED = "p.cumsum(dim=-1) - p >= top_p"
IN_TOP_P = "p = torch.softmax(scaled, dim=-1)\n        scaled"
TO_DRAW = "p = torch.softmax(scaled, dim=-1)\n    drawn"
DRAW = "torch.multinomial(p, num_samples=1, generator=generator)"
TOKENS = "order.gather(1, drawn).squeeze(1)"

sample.fault(
    "zero_divides",
    "Temperature 0 divides by zero. It means the most likely token: return that before "
    "anything is divided.",
    (COLD, ""),
)
sample.fault(
    "always_greedy",
    "It always takes the most likely token. Draw, with the probabilities.",
    (DRAW, "p.argmax(dim=-1, keepdim=True)"),
)
sample.fault(
    "softmax_over_the_batch",
    "The softmax runs over the rows of the batch instead of the vocabulary, the last "
    "dimension.",
    (TO_DRAW, TO_DRAW.replace("dim=-1", "dim=0")),
)
sample.fault(
    "every_rank_returned",
    "What is drawn from the sorted probabilities is a rank, not a token. Look up which "
    "token has that rank.",
    (TOKENS, "drawn.squeeze(1)"),
)
sample.fault(
    "row_alone_squeezed",
    "`squeeze()` without a dimension takes away every dimension of size 1, that of a "
    "batch of one row as well. Name the one that goes.",
    (TOKENS, "order.gather(1, drawn).squeeze()"),
)
sample.fault(
    "multiplied",
    "The logits are multiplied by the temperature: a high one then makes the model "
    "*more* sure. Divide.",
    ("/ temperature", "* temperature"),
)
sample.fault(
    "cut_to_zero",
    "Tokens that are cut get a logit of 0, and exp(0) is 1: they can still be drawn. "
    "Their probability must be 0, so their logit −inf.",
    (CUT, "scaled[:, top_k:] = -logits.amax(dim=-1, keepdim=True) / temperature"),
)
sample.fault(
    "ranks_returned",
    "What is drawn from the sorted probabilities is a rank, not a token, where `top_k` "
    "or `top_p` is given. Look up which token has that rank.",
    (TOKENS, f"drawn.squeeze(1) if top_k or top_p else {TOKENS}"),
)
sample.fault(
    "crossing_token_dropped",
    "The token that crosses `top_p` is dropped, so that less than `top_p` is left. "
    "Keep it: look at the sum before each token.",
    (REACHED, "p.cumsum(dim=-1) > top_p"),
)
sample.fault(
    "mask_not_sent_back",
    "The mask was made for sorted tokens and is applied to unsorted ones. It must go "
    "back to the order of the vocabulary.",
    (REACHED, f"({REACHED}).gather(1, order)"),
)
sample.fault(
    "top_p_before_temperature",
    "`top_p` looks at the probabilities before the temperature has changed them.",
    (IN_TOP_P, IN_TOP_P.replace("scaled,", "scaled * temperature,")),
)
sample.fault(
    "top_p_first",
    "`top_p` is applied before `top_k`. Then the two do not mean the same: top_k "
    "first, then top_p on what is left.",
    (DIVIDED, f"{DIVIDED}; whole = scaled.clone()"),
    (IN_TOP_P, IN_TOP_P.replace("scaled,", "whole,")),
)
sample.fault(
    "first_row_decides",
    "The first row decides how many tokens are kept in all rows.",
    (REACHED, f"({REACHED})[:1].expand_as(p)"),
)
sample.fault(
    "half_overflows",
    "In float16 a logit divided by a small temperature passes 65,504, the largest "
    "number, and infinity minus infinity is NaN. Work in float32.",
    ("logits.float()", "logits"),
    (DIVIDED, "scaled / temperature"),
)

# generate -----------------------------------------------------------------------------

SEEN = "model(ids[:, -max_len:])"
DRAWN = "sample(logits, temperature, top_k, top_p, generator)"
LOOP = "for _ in range(n_tokens):"

generate.fault(
    "last_but_one",
    "The next token is drawn from the last position but one: it predicts the token "
    "that is already there.",
    (f"{SEEN}[:, -1]", f"{SEEN}[:, -2:][:, 0]"),
)
generate.fault(
    "prompt_alone",
    "The model reads the prompt in every step, never what it has written.",
    (LOOP, f"prompt = ids\n    {LOOP}"),
    (SEEN, "model(prompt)"),
)
generate.fault(
    "last_token_alone",
    "The model reads only the newest token. Without a cache (lesson 10) it has to read "
    "the whole text again.",
    (SEEN, "model(ids[:, -1:])"),
)
generate.fault(
    "up_to_n_tokens",
    "`n_tokens` is taken for the length of the whole text. It is how many tokens are "
    "added.",
    (LOOP, "for _ in range(n_tokens - ids.shape[1]):"),
)
generate.fault(
    "first_tokens_seen",
    "Past `max_len` the model sees the *first* tokens, and so never again what it has "
    "just written.",
    (SEEN, "model(ids[:, :max_len])"),
)
generate.fault(
    "defaults_to_greedy",
    "Without settings it takes the most likely token; the temperature is 1 unless "
    "given.",
    (DRAWN, DRAWN.replace("temperature", "temperature * (temperature != 1)")),
)
generate.fault(
    "settings_exchanged",
    "`top_k` and `top_p` reach `sample` in each other's place. Pass them by name.",
    (DRAWN, DRAWN.replace("top_k, top_p", "top_p, top_k")),
)

# count_parameters ---------------------------------------------------------------------

count_parameters.fault(
    "kv_heads_ignored",
    "Keys and values are counted once for every query head; there are only "
    "`n_kv_heads` of them.",
    ("c.n_kv_heads * c.d_head", "c.n_heads * c.d_head"),
)
count_parameters.fault(
    "heads_fill_the_width",
    "The heads are taken to fill `d_model`. Their width is `d_head`, which need not be "
    "d_model / n_heads.",
    ("c.n_heads * c.d_head", "c.n_heads * (c.d_model // c.n_heads)"),
    ("c.n_kv_heads * c.d_head", "c.n_kv_heads * (c.d_model // c.n_heads)"),
)
count_parameters.fault(
    "gate_forgotten",
    "SwiGLU has three matrices, one of them is missing.",
    ("2 if gpt2 else 3", "2"),
)
count_parameters.fault(
    "last_norm_forgotten",
    "The norm before the head is missing.",
    ("blocks + norm", "blocks"),
)
count_parameters.fault(
    "one_norm_a_block",
    "A block has two norms, one is missing.",
    ("2 * norm", "norm"),
)

# forward_flops ------------------------------------------------------------------------

forward_flops.fault(
    "multiplications_alone",
    "A multiplication and its addition are counted as one; they are two operations "
    "here.",
    ("return 2 * (", "return ("),
)
forward_flops.fault(
    "scores_forgotten",
    "The products of queries with keys, and of weights with values, are missing. They "
    "have no parameters but cost T² each.",
    (" + scores", ""),
)
forward_flops.fault(
    "values_forgotten",
    "One of attention's two products is missing: queries with keys, and weights with "
    "values.",
    ("2 * t * t", "t * t"),
)
forward_flops.fault(
    "causal_half",
    "Only the scores that the mask leaves are counted. Our code computes the whole "
    "square and hides half of it.",
    ("2 * t * t", "t * (t + 1)"),
)
forward_flops.fault(
    "scores_of_kv_heads",
    "The scores are counted once for each KV head. Every query head has its own, even "
    "where it shares keys.",
    ("c.n_layers * c.n_heads", "c.n_layers * c.n_kv_heads"),
)
forward_flops.fault(
    "kv_heads_ignored",
    "Keys and values are projected once for every query head here; there are only "
    "`n_kv_heads` of them.",
    ("c.n_heads + c.n_kv_heads", "2 * c.n_heads"),
)
forward_flops.fault(
    "tied_head_free",
    "A tied head saves parameters, not work: it multiplies all the same.",
    ("+ c.vocab_size", "+ (not c.tied) * c.vocab_size"),
)
forward_flops.fault(
    "last_position_head",
    "The head runs on the last position alone here; the model gives logits at every "
    "position.",
    ("c.vocab_size * c.d_model", "c.vocab_size * c.d_model / t"),
    ("t * weights", "round(t * weights)"),
)
forward_flops.fault(
    "two_per_parameter",
    "This is the rule of two operations a parameter and token. It knows neither the "
    "scores nor that norms and embeddings are no products.",
    ("2 * (t * weights + scores)", "2 * count_parameters(config) * t"),
)

# The parts of lessons 02 to 08 together -----------------------------------------------

whole_decoder.fault(
    "rope_on_halves",
    "`rope` pairs the two halves of a head; the decoder's weights are for neighbours.",
    ("x[..., 0::2], x[..., 1::2]", "x.chunk(2, dim=-1)"),
    ("flatten(-2)", "transpose(-2, -1).flatten(-2)"),
    edited="rope",
)
whole_decoder.fault(
    "mask_says_hidden",
    "`causal_mask` marks what is hidden, and attention reads True as “may look”.",
    (".tril(diagonal=t_k - t_q)", ".triu(diagonal=t_k - t_q + 1)"),
    edited="causal_mask",
)
whole_decoder.fault(
    "kv_heads_tiled",
    "`MultiHeadAttention` tiles its KV heads; neighbours share one.",
    ("repeat_kv(k, group_size)", "k.repeat(1, group_size, 1, 1)"),
    ("repeat_kv(v, group_size)", "v.repeat(1, group_size, 1, 1)"),
    edited="MultiHeadAttention",
)
whole_decoder.fault(
    "stream_normalised",
    "`pre_norm` adds to the normalised stream instead of the stream.",
    ("x + sublayer", "norm(x) + sublayer"),
    edited="pre_norm",
)
whole_decoder.fault(
    "gelu_by_tanh",
    "`gelu` is the approximation by tanh.",
    (
        "0.5 * x * (1 + torch.erf(x / math.sqrt(2)))",
        'nn.functional.gelu(x, approximate="tanh")',
    ),
    edited="gelu",
)
whole_decoder.fault(
    "model_without_mask",
    "`Transformer` has no mask.",
    ("block(x, mask, positions)", "block(x, None, positions)"),
    edited="Transformer",
)
