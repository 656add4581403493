"""Reference answers of lesson 04."""

import math

import torch
from torch import nn


def sinusoidal(t, d_model):
    """One fixed vector for each position, made of sines and cosines.

    Args:
        t: number of positions, 0 to t − 1.
        d_model: width of the stream, even.

    Returns:
        float32 `(t, d_model)`: in columns 2i and 2i + 1 the sine and the cosine of
        position · 10000^(−2i/d_model).

    Raises:
        ValueError: if `d_model` is odd.

    Vaswani et al. (2017), "Attention Is All You Need", section 3.5.
    """
    if d_model % 2:
        raise ValueError(f"d_model is {d_model}: sine and cosine come in pairs")
    ### BEGIN SOLUTION
    frequencies = 10_000.0 ** (-torch.arange(0, d_model, 2) / d_model)  # D/2
    angles = torch.arange(t)[:, None] * frequencies  # T D/2
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # T D
    ### END SOLUTION


class LearnedPositions(nn.Module):
    """One trained vector for each position, up to a longest one.

    Args:
        max_len: how many positions there are, 0 to max_len − 1.
        d_model: width of the stream.

    The vectors are one parameter `(max_len, d_model)`, called `table`.
    """

    def __init__(self, max_len, d_model):
        super().__init__()
        self.max_len = max_len
        ### BEGIN SOLUTION
        self.table = nn.Embedding(max_len, d_model)
        ### END SOLUTION

    def forward(self, positions):
        """Whole `positions` `(T,)` or `(B, T)` → `(T, d_model)` or `(B, T, d_model)`.

        Raises:
            ValueError: if a position is not in the table; names it and `max_len`.
        """
        outside = positions[(positions < 0) | (positions >= self.max_len)]
        if len(outside):
            raise ValueError(
                f"position {outside[0]} is not in the table of {self.max_len} positions"
            )
        ### BEGIN SOLUTION
        return self.table(positions)
        ### END SOLUTION


def rope(x, positions, base=10_000.0):
    """Rotary positions: turn each pair of numbers by an angle that position sets.

    Args:
        x: queries or keys `(…, T, d_head)`, `d_head` even.
        positions: `(T,)`, or `(B, T)` where the rows of the batch differ and `B` is
            the first dimension of `x`; whole numbers or not.
        base: the slowest pairs turn about `base` times slower than the first.

    Returns:
        `x` with the pair (2i, 2i + 1) turned by +position · base^(−2i/d_head). Shape
        and dtype of `x`; the angles are computed in float32 or finer, whatever that is.

    Raises:
        ValueError: if `d_head` is odd.

    Su et al. (2021), "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """
    d_head = x.shape[-1]
    if d_head % 2:
        raise ValueError(f"d_head is {d_head}: RoPE turns pairs, so it must be even")
    ### BEGIN SOLUTION
    if positions.dim() == 2:  # B T → B 1 … 1 T, to line up with the heads between
        positions = positions.view(len(positions), *[1] * (x.dim() - 3), -1)
    pairs = torch.arange(0, d_head, 2, device=x.device)
    angles = positions[..., None].float() * base ** (-pairs / d_head)  # … T Dh/2
    cos, sin = angles.cos(), angles.sin()  # … T Dh/2
    even, odd = x[..., 0::2], x[..., 1::2]  # … T Dh/2
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)  # … T Dh
    ### END SOLUTION


def alibi_slopes(n_heads):
    """How fast each head's score falls with distance.

    Args:
        n_heads: number of heads.

    Returns:
        float32 `(n_heads,)`. For a power of two: 2^(−8h/n_heads), h = 1 … n_heads. Else
        the slopes of the next smaller power of two, then every second one, from the
        first, of the slopes of twice that many heads, until there are enough.

    Press, Smith, Lewis (2022), "Train Short, Test Long".
    """
    ### BEGIN SOLUTION

    def geometric(n):
        return [2 ** (-8 * h / n) for h in range(1, n + 1)]

    power = 2 ** int(math.log2(n_heads))
    extra = geometric(2 * power)[0::2][: n_heads - power]
    return torch.tensor(geometric(power) + extra)
    ### END SOLUTION


def alibi_bias(n_heads, t_q, t_k):
    """What ALiBi adds to the scores: a penalty that grows with distance.

    Args:
        n_heads: number of heads.
        t_q: number of queries; they are the last `t_q` of the `t_k` positions.
        t_k: number of keys.

    Returns:
        float32 `(n_heads, t_q, t_k)`: −slope · distance, so 0 where a query meets its
        own position.

    Raises:
        ValueError: if there are more queries than keys; names both.

    Press, Smith, Lewis (2022), "Train Short, Test Long".
    """
    if t_q > t_k:
        raise ValueError(f"{t_q} queries cannot be the last of {t_k} positions")
    ### BEGIN SOLUTION
    keys = torch.arange(t_k)
    queries = keys[t_k - t_q :]
    distance = (queries[:, None] - keys).abs()  # T_q T_k
    return -alibi_slopes(n_heads)[:, None, None] * distance  # H T_q T_k
    ### END SOLUTION


def ntk_base(base, factor, d_head):
    """The RoPE base that stretches the slowest pair by `factor`, the first not at all.

    Args:
        base: the base that the model was trained with.
        factor: how many times longer the text is to be, 1 or more.
        d_head: width of a head, even and at least 4.

    Returns:
        float: the base to use in its place.

    Raises:
        ValueError: if `d_head` is odd or smaller than 4.

    bloc97 (2023), "NTK-Aware Scaled RoPE".
    """
    if d_head % 2 or d_head < 4:
        raise ValueError(f"d_head is {d_head}, but must be even and at least 4")
    ### BEGIN SOLUTION
    return base * factor ** (d_head / (d_head - 2))
    ### END SOLUTION
