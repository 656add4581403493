"""Reference answers of lesson 13."""

from functools import partial

import torch
from torch import nn

from solutions.attention import attention, causal_mask
from solutions.feed_forward import FeedForward
from solutions.multi_head import MultiHeadAttention, merge_heads, split_heads
from solutions.norms import RMSNorm, pre_norm
from solutions.positions import sinusoidal


def shift_right(ids, start_id):
    """What the decoder reads while it is asked for `ids`: all one place later.

    Args:
        ids: the tokens to be predicted, `(B, T)`, T at least 1.
        start_id: the token that stands before the first.

    Returns:
        `(B, T)`, a new tensor in the dtype and on the device of `ids`: `start_id`, then
        all of `ids` but the last.

    Vaswani et al. (2017), "Attention Is All You Need", section 3.1.
    """
    ### BEGIN SOLUTION
    start = torch.full_like(ids[:, :1], start_id)  # B 1
    return torch.cat([start, ids[:, :-1]], dim=1)  # B T
    ### END SOLUTION


class CrossAttention(nn.Module):
    """Attention from one sequence to another, in several heads.

    Args:
        d_model: width of both streams.
        n_heads: number of heads, each `d_model // n_heads` wide.

    Raises:
        ValueError: if `d_model` is not divisible by `n_heads`; it names both.

    `w_q`, `w_k`, `w_v` and `w_o` are linear layers without bias.
    Vaswani et al. (2017), "Attention Is All You Need", section 3.2.3.
    """

    def __init__(self, d_model, n_heads):
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"d_model {d_model} is not divisible by {n_heads} heads")
        ### BEGIN SOLUTION
        self.n_heads = n_heads
        self.w_q = nn.Linear(d_model, d_model, bias=False)
        self.w_k = nn.Linear(d_model, d_model, bias=False)
        self.w_v = nn.Linear(d_model, d_model, bias=False)
        self.w_o = nn.Linear(d_model, d_model, bias=False)
        ### END SOLUTION

    def keys_values(self, memory):
        """`(B, S, d_model)` → keys and values, both `(B, n_heads, S, d_head)`."""
        ### BEGIN SOLUTION
        k = split_heads(self.w_k(memory), self.n_heads)  # B H S Dh
        v = split_heads(self.w_v(memory), self.n_heads)  # B H S Dh
        return k, v
        ### END SOLUTION

    def forward(self, x, memory, memory_mask=None):
        """Let every position of `x` look at the memory.

        Args:
            x: `(B, T, d_model)`.
            memory: `(B, S, d_model)`, or the pair that `keys_values` made of it.
            memory_mask: boolean, broadcastable to `(B, n_heads, T, S)`; True = may
                look.

        Returns:
            `(B, T, d_model)`; zeros for a position that may look at nothing.
        """
        ### BEGIN SOLUTION
        q = split_heads(self.w_q(x), self.n_heads)  # B H T Dh
        k, v = memory if isinstance(memory, tuple) else self.keys_values(memory)
        return self.w_o(merge_heads(attention(q, k, v, memory_mask)))  # B T D
        ### END SOLUTION


class EncoderBlock(nn.Module):
    """One layer of the encoder: attention, then a feed-forward network, both pre-norm.

    Args:
        config: sizes `d_model`, `n_heads`, `d_ff` and `norm_eps`.

    Its parts are `norm_1`, `attention`, `norm_2` and `feed_forward`: `RMSNorm`,
    `MultiHeadAttention`, and `FeedForward` with ReLU.
    Vaswani et al. (2017), "Attention Is All You Need", section 3.1; Raffel et al.
    (2020), "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", section 2.1.
    """

    def __init__(self, config):
        super().__init__()
        ### BEGIN SOLUTION
        self.norm_1 = RMSNorm(config.d_model, config.norm_eps)
        self.attention = MultiHeadAttention(config.d_model, config.n_heads)
        self.norm_2 = RMSNorm(config.d_model, config.norm_eps)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, torch.relu)
        ### END SOLUTION

    def forward(self, x, mask=None):
        """`x` `(B, S, d_model)` → the same shape; mask as in `MultiHeadAttention`."""
        ### BEGIN SOLUTION
        x = pre_norm(x, partial(self.attention, mask=mask), self.norm_1)  # B S D
        return pre_norm(x, self.feed_forward, self.norm_2)  # B S D
        ### END SOLUTION


class DecoderBlock(nn.Module):
    """One layer of the decoder: look back, look across, think; all three pre-norm.

    Args:
        config: sizes `d_model`, `n_heads`, `d_ff` and `norm_eps`.

    Its parts are `norm_1`, `attention`, `norm_2`, `cross_attention`, `norm_3` and
    `feed_forward`: those of `EncoderBlock`, and a `CrossAttention` between.
    Vaswani et al. (2017), "Attention Is All You Need", section 3.1.
    """

    def __init__(self, config):
        super().__init__()
        ### BEGIN SOLUTION
        self.norm_1 = RMSNorm(config.d_model, config.norm_eps)
        self.attention = MultiHeadAttention(config.d_model, config.n_heads)
        self.norm_2 = RMSNorm(config.d_model, config.norm_eps)
        self.cross_attention = CrossAttention(config.d_model, config.n_heads)
        self.norm_3 = RMSNorm(config.d_model, config.norm_eps)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, torch.relu)
        ### END SOLUTION

    def forward(self, x, memory, mask=None, memory_mask=None):
        """Let the target look at itself and at the memory.

        Args:
            x: the decoder's stream, `(B, T, d_model)`.
            memory: as in `CrossAttention`; it is not normalised here.
            mask: for the attention of `x` to itself.
            memory_mask: for the attention of `x` to the memory.

        Returns:
            `(B, T, d_model)`.
        """
        ### BEGIN SOLUTION
        look_back = partial(self.attention, mask=mask)
        look_across = partial(
            self.cross_attention, memory=memory, memory_mask=memory_mask
        )
        x = pre_norm(x, look_back, self.norm_1)  # B T D
        x = pre_norm(x, look_across, self.norm_2)  # B T D
        return pre_norm(x, self.feed_forward, self.norm_3)  # B T D
        ### END SOLUTION


class EncoderDecoder(nn.Module):
    """A Transformer of two halves: one reads the source, one writes the target.

    Args:
        config: sizes `vocab_size`, `d_model`, `n_layers` (of each half), `n_heads`,
            `d_ff`, `max_len`, `norm_eps`, and `pad_id`, the token that fills up the
            rows of a source. It is kept in `config`.

    Its parts are `embedding` (one for both halves), `encoder` and `decoder` (lists of
    blocks), `encoder_norm`, `decoder_norm`, and `head`, a linear layer without bias.
    Positions are `sinusoidal`, added to the embedding in both halves.
    Vaswani et al. (2017), "Attention Is All You Need", figure 1.
    """

    def __init__(self, config):
        super().__init__()
        ### BEGIN SOLUTION
        self.config = config
        layers = range(config.n_layers)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = nn.ModuleList(EncoderBlock(config) for _ in layers)
        self.encoder_norm = RMSNorm(config.d_model, config.norm_eps)
        self.decoder = nn.ModuleList(DecoderBlock(config) for _ in layers)
        self.decoder_norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        ### END SOLUTION

    def embed(self, ids):
        """Whole `ids` `(B, T)` → token and position as one vector, `(B, T, d_model)`.

        Raises:
            ValueError: if T is larger than `config.max_len`; names both.
        """
        t, longest = ids.shape[1], self.config.max_len
        if t > longest:
            raise ValueError(f"{t} tokens, but max_len is {longest}")
        ### BEGIN SOLUTION
        x = self.embedding(ids)  # B T → B T D
        return x + sinusoidal(t, self.config.d_model).to(x)  # B T D
        ### END SOLUTION

    def encode(self, source):
        """Read the source.

        Args:
            source: whole numbers `(B, S)`, rows filled up with `config.pad_id`.

        Returns:
            The memory `(B, S, d_model)`, normalised, and its mask `(B, 1, 1, S)`, True
            where the source is no padding.

        Raises:
            ValueError: if the source is empty, if a row of it holds padding alone
                (names the row), or if S is larger than `config.max_len`.
        """
        if source.numel() == 0:
            raise ValueError("the source is empty; there is nothing to look at")
        nothing = (source == self.config.pad_id).all(dim=1).nonzero().flatten().tolist()
        if nothing:
            raise ValueError(f"row {nothing[0]} of the source holds padding alone")
        ### BEGIN SOLUTION
        real = source != self.config.pad_id  # B S
        mask = real[:, None, None, :]  # B 1 1 S
        x = self.embed(source)  # B S D
        for block in self.encoder:
            x = block(x, mask)  # B S D
        return self.encoder_norm(x), mask
        ### END SOLUTION

    def decode(self, target, memory, memory_mask=None):
        """Logits of the token after each of the target, given the memory.

        Args:
            target: whole numbers `(B, T)`, no position of which sees a later one.
            memory: `(B, S, d_model)`, or a list with the keys and values that each
                block made of it.
            memory_mask: `(B, 1, 1, S)`, as from `encode`.

        Returns:
            `(B, T, vocab_size)`.

        Raises:
            ValueError: if T is larger than `config.max_len`; names both.
        """
        ### BEGIN SOLUTION
        x = self.embed(target)  # B T D
        mask = causal_mask(target.shape[1]).to(target.device)  # T T
        for i, block in enumerate(self.decoder):
            own = memory[i] if isinstance(memory, list) else memory
            x = block(x, own, mask, memory_mask)  # B T D
        return self.head(self.decoder_norm(x))  # B T V
        ### END SOLUTION

    def forward(self, source, target):
        """`source` `(B, S)` and `target` `(B, T)` → logits `(B, T, vocab_size)`."""
        ### BEGIN SOLUTION
        memory, memory_mask = self.encode(source)
        return self.decode(target, memory, memory_mask)
        ### END SOLUTION


@torch.no_grad()
def translate(model, source, start_id, end_id, max_tokens):
    """Write the most likely target, token by token, for every row of the source.

    Args:
        model: an `EncoderDecoder`.
        source: `(B, S)`, as in `EncoderDecoder.encode`.
        start_id: what the decoder reads first; not part of the result.
        end_id: ends a row; part of the result.
        max_tokens: how many tokens a row may have, at least 1.

    Returns:
        `(B, T)`, T as long as the longest row; after its `end_id` a row holds
        `pad_id`s. Every block makes keys and values of the memory once.

    Raises:
        ValueError: if `max_tokens` is smaller than 1 or larger than `max_len`.
    """
    longest, pad_id = model.config.max_len, model.config.pad_id
    if not 1 <= max_tokens <= longest:
        raise ValueError(f"max_tokens is {max_tokens}, but must be in 1 to {longest}")
    ### BEGIN SOLUTION
    memory, memory_mask = model.encode(source)
    kept = [block.cross_attention.keys_values(memory) for block in model.decoder]
    ids = source.new_full((len(source), 1), start_id)  # B 1
    ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)  # B
    while ids.shape[1] <= max_tokens and not ended.all():
        logits = model.decode(ids, kept, memory_mask)[:, -1]  # B V
        token = logits.argmax(dim=-1).masked_fill(ended, pad_id)  # B
        ended = ended | (token == end_id)
        ids = torch.cat([ids, token[:, None]], dim=1)  # B T → B T+1
    return ids[:, 1:]
    ### END SOLUTION
