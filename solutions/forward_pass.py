"""Reference answers of lesson 08."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from solutions.attention import causal_mask
from solutions.feed_forward import FeedForward, SwiGLU, gelu
from solutions.multi_head import MultiHeadAttention
from solutions.norms import RMSNorm, pre_norm
from solutions.positions import LearnedPositions, rope


@dataclass
class TransformerConfig:
    """The sizes of a decoder, and its style.

    vocab_size: number of different tokens.
    d_model: width of the stream.
    n_layers: number of blocks.
    n_heads: query heads in each block.
    n_kv_heads: key and value heads in each block, a divisor of `n_heads`.
    d_head: width of a head; even where RoPE turns pairs.
    d_ff: width of the feed-forward network.
    max_len: the longest sequence.
    rope_base: RoPE's base (style "llama").
    norm_eps: what the norms add inside their root.
    tied: is the head's matrix the embedding's?
    style: "llama" (RMSNorm, RoPE, SwiGLU, no biases) or "gpt2" (LayerNorm, learned
        positions, GELU, a bias on every linear layer but the head).

    Raises:
        ValueError: if a size is smaller than 1, if the heads cannot share their key
            and value heads evenly, if RoPE meets an odd `d_head`, or if the style is
            neither of the two; the message names the numbers, or the style.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    max_len: int
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = True
    style: str = "llama"

    def __post_init__(self):
        for name in (
            *("vocab_size", "d_model", "n_layers", "n_heads"),
            *("n_kv_heads", "d_head", "d_ff", "max_len"),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, at least 1 needed")
        if self.style not in ("llama", "gpt2"):
            raise ValueError(f"style is {self.style!r}, expected 'llama' or 'gpt2'")
        ### BEGIN SOLUTION
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"{self.n_heads} heads cannot share {self.n_kv_heads} KV heads evenly"
            )
        if self.style == "llama" and self.d_head % 2:
            raise ValueError(f"d_head is {self.d_head}, but RoPE turns pairs")
        ### END SOLUTION


class Block(nn.Module):
    """One layer of a decoder: attention, then a feed-forward network, both pre-norm.

    Args:
        config: a `TransformerConfig`.

    Its parts are `norm_1`, `attention`, `norm_2` and `feed_forward`. Style "llama":
    `RMSNorm`, RoPE on queries and keys, `SwiGLU`. Style "gpt2": `nn.LayerNorm`, no
    rotation, `FeedForward` with `gelu`, and each linear layer gets a bias of zeros.

    Touvron et al. (2023), "LLaMA"; Radford et al. (2019), "Language Models are
    Unsupervised Multitask Learners".
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        ### BEGIN SOLUTION
        self.norm_1 = RMSNorm(config.d_model, config.norm_eps)
        self.norm_2 = RMSNorm(config.d_model, config.norm_eps)
        self.attention = MultiHeadAttention(
            config.d_model, config.n_heads, config.n_kv_heads, config.d_head
        )
        self.feed_forward = SwiGLU(config.d_model, config.d_ff)
        ### END SOLUTION
        if config.style == "gpt2":  # given
            self.norm_1 = nn.LayerNorm(config.d_model, config.norm_eps)
            self.norm_2 = nn.LayerNorm(config.d_model, config.norm_eps)
            self.feed_forward = FeedForward(config.d_model, config.d_ff, gelu)
            for layer in self.modules():
                if isinstance(layer, nn.Linear):
                    layer.bias = nn.Parameter(torch.zeros(layer.out_features))

    def forward(self, x, mask=None, positions=None):
        """Let the positions look at each other, then think about each alone.

        Args:
            x: the stream, `(B, T, d_model)`.
            mask: boolean, broadcastable to `(B, n_heads, T, T)`; True = may look.
            positions: `(T,)` or `(B, T)` for RoPE; 0 to T − 1 if not given.

        Returns:
            `(B, T, d_model)`.
        """
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        rotates = self.config.style == "llama"  # given; without it `rotate` is None
        ### BEGIN SOLUTION
        rotate = partial(rope, positions=positions, base=self.config.rope_base)
        rotate = rotate if rotates else None
        attend = partial(self.attention, mask=mask, rotate=rotate)
        x = pre_norm(x, attend, self.norm_1)  # B T D
        return pre_norm(x, self.feed_forward, self.norm_2)  # B T D
        ### END SOLUTION


class Transformer(nn.Module):
    """A decoder: token ids in, for each position the logits of the next token out.

    Args:
        config: a `TransformerConfig`, kept in `config`.

    Its parts are `embedding`, `blocks`, `norm` and `head`, a linear layer without bias;
    in style "gpt2" also `positions`, which is added to the embedding. With
    `config.tied`, `head` and `embedding` hold one and the same parameter. All matrices
    start with normal values of standard deviation 0.02.

    Radford et al. (2019), "Language Models are Unsupervised Multitask Learners";
    Touvron et al. (2023), "LLaMA"; Press, Wolf (2017), "Using the Output Embedding to
    Improve Language Models".
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        ### BEGIN SOLUTION
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        ### END SOLUTION
        if config.style == "gpt2":  # given
            self.norm = nn.LayerNorm(config.d_model, config.norm_eps)
            self.positions = LearnedPositions(config.max_len, config.d_model)
        for parameter in self.parameters():  # given
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids):
        """Whole `ids` `(B, T)` → logits `(B, T, vocab_size)`; no position looks ahead.

        Raises:
            ValueError: if T is larger than `config.max_len`; names both.
        """
        t = ids.shape[1]
        if t > self.config.max_len:
            raise ValueError(f"{t} tokens, but max_len is {self.config.max_len}")
        x = self.embedding(ids)  # B T → B T D
        if self.config.style == "gpt2":  # given
            x = x + self.positions(torch.arange(t, device=ids.device))  # B T D
        ### BEGIN SOLUTION
        mask = causal_mask(t).to(ids.device)  # T T
        for block in self.blocks:
            x = block(x, mask)  # B T D
        return self.head(self.norm(x))  # B T D → B T V
        ### END SOLUTION


def sample(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Draw a next token for every row.

    Args:
        logits: `(B, V)`.
        temperature: the logits are divided by it; 0 takes the most likely token.
        top_k: keep the `top_k` most likely tokens.
        top_p: of these keep the most likely ones until their probabilities, at this
            temperature, add up to `top_p`; the token that crosses it is kept.
        generator: a `torch.Generator`, torch's own if not given.

    Returns:
        Token ids `(B,)`, int64.

    Raises:
        ValueError: if the temperature is negative, `top_k` not in 1 … V, or `top_p` not
            in (0, 1], whatever the other settings; names the value.

    Fan, Lewis, Dauphin (2018), "Hierarchical Neural Story Generation" (top-k); Holtzman
    et al. (2020), "The Curious Case of Neural Text Degeneration" (top-p).
    """
    size = logits.shape[-1]
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}, but must not be negative")
    if top_k is not None and not 1 <= top_k <= size:
        raise ValueError(f"top_k is {top_k}, but must be in 1 to {size}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}, but must be above 0 and at most 1")
    ### BEGIN SOLUTION
    if temperature == 0:
        return logits.argmax(dim=-1)  # B
    scaled, order = logits.float().sort(dim=-1, descending=True)  # B V, likely first
    scaled = (scaled - scaled[:, :1]) / temperature  # the largest is 0
    if top_k is not None:
        scaled[:, top_k:] = -torch.inf
    if top_p is not None and top_p < 1:
        p = torch.softmax(scaled, dim=-1)
        scaled[p.cumsum(dim=-1) - p >= top_p] = -torch.inf  # reached before this one
    p = torch.softmax(scaled, dim=-1)
    drawn = torch.multinomial(p, num_samples=1, generator=generator)  # B 1, a rank
    return order.gather(1, drawn).squeeze(1)  # B
    ### END SOLUTION


@torch.no_grad()
def generate(
    model, ids, n_tokens, temperature=1.0, top_k=None, top_p=None, generator=None
):
    """Continue texts, one token at a time.

    Args:
        model: ids `(B, T)` → logits `(B, T, V)`, with a `config.max_len`.
        ids: the prompts, `(B, T)`.
        n_tokens: how many tokens to add; 0 adds none.
        temperature, top_k, top_p, generator: as in `sample`.

    Returns:
        `(B, T + n_tokens)`, prompts included, without gradients. Past `max_len` the
        model sees the last `max_len` tokens.

    Raises:
        ValueError: if the prompt is empty, or longer than `max_len` (names both).
    """
    max_len = model.config.max_len
    if ids.shape[1] == 0:
        raise ValueError("the prompt is empty; the model needs at least one token")
    if ids.shape[1] > max_len:
        raise ValueError(f"a prompt of {ids.shape[1]} tokens, but max_len is {max_len}")
    ### BEGIN SOLUTION
    for _ in range(n_tokens):
        logits = model(ids[:, -max_len:])[:, -1]  # B V, of the last position
        token = sample(logits, temperature, top_k, top_p, generator)  # B
        ids = torch.cat([ids, token[:, None]], dim=1)  # B T → B T+1
    return ids
    ### END SOLUTION


def count_parameters(config):
    """How many numbers a `Transformer` learns, from its configuration alone.

    Args:
        config: a `TransformerConfig`.

    Returns:
        An int: every matrix, norm and bias, a tied matrix counted once.
    """
    c, n_matrices, more = config, 3, 0
    if c.style == "gpt2":  # given: a network's matrices, and what else that style has
        n_matrices = 2
        biases = c.d_head * (c.n_heads + 2 * c.n_kv_heads) + 2 * c.d_model + c.d_ff
        more = c.n_layers * biases + (2 * c.n_layers + 1 + c.max_len) * c.d_model
    ### BEGIN SOLUTION
    attention = 2 * c.d_model * c.d_head * (c.n_heads + c.n_kv_heads)
    feed_forward = n_matrices * c.d_model * c.d_ff
    norms = (2 * c.n_layers + 1) * c.d_model
    tables = (1 if c.tied else 2) * c.vocab_size * c.d_model
    return c.n_layers * (attention + feed_forward) + norms + tables + more
    ### END SOLUTION


def forward_flops(config, t):
    """The floating-point operations of one forward pass over one sequence.

    Args:
        config: a `TransformerConfig`.
        t: number of tokens.

    Returns:
        An int: matrix products alone, a multiplication and its addition as two. The
        whole `t × t` square of scores counts, because the mask only hides half of it.

    Kaplan et al. (2020), "Scaling Laws for Neural Language Models", section 2.1.
    """
    c = config
    n_matrices = 2 if c.style == "gpt2" else 3  # given: of a feed-forward network
    ### BEGIN SOLUTION
    attention = 2 * c.d_model * c.d_head * (c.n_heads + c.n_kv_heads)
    feed_forward = n_matrices * c.d_model * c.d_ff
    weights = c.n_layers * (attention + feed_forward) + c.vocab_size * c.d_model
    scores = 2 * t * t * c.n_layers * c.n_heads * c.d_head  # q·k, and weights times v
    return 2 * (t * weights + scores)
    ### END SOLUTION


def training_flops(n_params, n_tokens):
    """The rule of thumb for training: 6 operations per parameter and token.

    Kaplan et al. (2020), "Scaling Laws for Neural Language Models", section 2.1.
    """
    return 6 * n_params * n_tokens


def parameter_name(name):
    """Where a tensor of a GGUF file belongs in a `Transformer`.

    Args:
        name: as in the file, such as "blk.3.attn_q.weight".

    Returns:
        The parameter's name, such as "blocks.3.attention.w_q.weight".
    """
    ### BEGIN SOLUTION
    in_block = {
        "attn_norm": "norm_1",
        "attn_q": "attention.w_q",
        "attn_k": "attention.w_k",
        "attn_v": "attention.w_v",
        "attn_output": "attention.w_o",
        "ffn_norm": "norm_2",
        "ffn_gate": "feed_forward.w_1",
        "ffn_up": "feed_forward.w_3",
        "ffn_down": "feed_forward.w_2",
    }
    outside = {"token_embd": "embedding", "output_norm": "norm", "output": "head"}
    first, *rest = name.split(".")
    if first == "blk":
        number, part, last = rest
        return f"blocks.{number}.{in_block[part]}.{last}"
    return f"{outside[first]}.{rest[0]}"
    ### END SOLUTION
