"""Lesson 08: mistakes in the decoder, in how it is sampled, and in what it costs."""

from utils.exercises.forward_pass import (
    Block,
    Transformer,
    TransformerConfig,
    count_parameters,
    forward_flops,
    generate,
    parameter_name,
    sample,
    whole_decoder,
)

# TransformerConfig --------------------------------------------------------------------


TransformerConfig.fault(
    "odd_refused_in_both_styles",
    'It refuses an odd `d_head` in style "gpt2" too. Only RoPE needs pairs.',
    ('if self.style == "llama" and self', "if self"),
)

# Block --------------------------------------------------------------------------------

ATTEND = "x = pre_norm(x, attend, self.norm_1)"
NORM_1, NORM_2 = (f"self.norm_{i} = RMSNorm(config.d_model" for i in (1, 2))
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
    "one_norm_for_both",
    "`norm_1` is used twice. The two norms have weights of their own; while both are "
    "ones, as at the start, nobody notices.",
    ("self.feed_forward, self.norm_2)", "self.feed_forward, self.norm_1)"),
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
    "eps_ignored",
    "The norms use their default eps; the config's `norm_eps` is not passed on.",
    ("self.norm_1 = RMSNorm(config.d_model, config.norm_eps)", f"{NORM_1})"),
    ("self.norm_2 = RMSNorm(config.d_model, config.norm_eps)", f"{NORM_2})"),
)

# Transformer --------------------------------------------------------------------------

BLOCKS = "nn.ModuleList(Block(config) for _ in range(config.n_layers))"
LOGITS = "return self.head(self.norm(x))"

Transformer.fault(
    "no_mask",
    "No mask hides the future: every position sees the tokens that it is to predict. "
    "The loss in training will look wonderful, the texts will not.",
    ("block(x, mask)", "block(x)"),
)
Transformer.fault(
    "mask_upside_down",
    "The mask is upside down: each position sees what comes *after* it. True = may "
    "look, row = query, column = key.",
    ("causal_mask(t)", "causal_mask(t).T"),
)
Transformer.fault(
    "no_final_norm",
    "The stream reaches the head without the last norm.",
    (LOGITS, "return self.head(x)"),
)
Transformer.fault(
    "eps_of_the_last_norm",
    "The last norm uses its default eps; the config's `norm_eps` is not passed on.",
    ("RMSNorm(config.d_model, config.norm_eps)", "RMSNorm(config.d_model)"),
)
Transformer.fault(
    "shifted",
    "The logits of the last position are cut off. The shift by one belongs to the "
    "targets, and is made where the loss is computed: here it would be made twice.",
    (LOGITS, f"{LOGITS}[:, :-1]"),
)
Transformer.fault(
    "one_block_many_times",
    "`[Block(config)] * n` is one block in n places, not n blocks: Python copies the "
    "reference, not the object. Make a new one in each turn of a loop.",
    (BLOCKS, "nn.ModuleList([Block(config)] * config.n_layers)"),
)
Transformer.fault(
    "blocks_in_a_list",
    "PyTorch finds no block: are they in a plain Python list? It does not look into "
    "one, so they are neither trained nor saved nor moved. Use `nn.ModuleList`.",
    (BLOCKS, "[Block(config) for _ in range(config.n_layers)]"),
)

# sample -------------------------------------------------------------------------------

DIVIDED = "(scaled - scaled[:, :1]) / temperature"
REACHED = "p.cumsum(dim=-1) - p >= top_p"
IN_TOP_P = "p = torch.softmax(scaled, dim=-1)\n        scaled"
TOKENS = "order.gather(1, drawn).squeeze(1)"

sample.fault(
    "softmax_over_the_batch",
    "All tokens are equally likely: does the softmax run over the rows of the batch "
    "instead of the vocabulary, the last dimension?",
    ("dim=-1)\n    drawn", "dim=0)\n    drawn"),
)
for name, where in (
    ("every_rank_returned", ""),
    ("ranks_returned", f" if top_k or top_p else {TOKENS}"),
):
    sample.fault(
        name,
        "What is drawn from the sorted probabilities is a rank, not a token. Look up "
        "which token has that rank.",
        (TOKENS, f"drawn.squeeze(1){where}"),
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
    ("top_k:] = -torch.inf", "top_k:] = -logits.amax(-1, keepdim=True) / temperature"),
)
sample.fault(
    "crossing_token_dropped",
    "The token that crosses `top_p` is dropped, so that less than `top_p` is left. "
    "Keep it: look at the sum before each token.",
    (REACHED, "p.cumsum(dim=-1) > top_p"),
)

# generate -----------------------------------------------------------------------------

SEEN = "model(ids[:, -max_len:])"

generate.fault(
    "last_but_one",
    "The next token is drawn from the last position but one: it predicts the token "
    "that is already there.",
    (f"{SEEN}[:, -1]", f"{SEEN}[:, -2:][:, 0]"),
)

# count_parameters ---------------------------------------------------------------------

count_parameters.fault(
    "last_norm_forgotten",
    "The norm before the head is missing.",
    ("2 * c.n_layers + 1", "2 * c.n_layers"),
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
    "causal_half",
    "Only the scores that the mask leaves are counted. Our code computes the whole "
    "square and hides half of it.",
    ("2 * t * t", "t * (t + 1)"),
)

# parameter_name -----------------------------------------------------------------------

parameter_name.fault(
    "gate_and_up_exchanged",
    "`ffn_gate` and `ffn_up` are exchanged. Your `w_1` is the gate, which goes through "
    "SiLU; both have the same shape, so nothing but the answers would tell.",
    ('"ffn_gate": "feed_forward.w_1"', '"ffn_gate": "feed_forward.w_3"'),
    ('"ffn_up": "feed_forward.w_3"', '"ffn_up": "feed_forward.w_1"'),
)
parameter_name.fault(
    "norms_exchanged",
    "The two norms of a block are exchanged: `norm_1` stands before attention.",
    ('"attn_norm": "norm_1"', '"attn_norm": "norm_2"'),
    ('"ffn_norm": "norm_2"', '"ffn_norm": "norm_1"'),
)
parameter_name.fault(
    "one_digit",
    "Only the first digit of a block's number is kept, and there are 30 blocks.",
    ("blocks.{number}", "blocks.{number[0]}"),
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
