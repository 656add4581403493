"""Reference answers of lesson 05."""

import math

import torch
from torch import nn


def silu(x):
    """x times the sigmoid of x, for every number by itself.

    Args:
        x: tensor of any shape, floating point, values of any size.

    Returns:
        Tensor of the same shape and dtype.

    Ramachandran, Zoph and Le (2017), "Searching for Activation Functions" (there:
    swish); Elfwing, Uchibe and Doya (2017) gave the name SiLU.
    """
    ### BEGIN SOLUTION
    return x * torch.sigmoid(x)
    ### END SOLUTION


def gelu(x):
    """x times the probability that a standard normal number is below x.

    Args:
        x: tensor of any shape, floating point, values of any size.

    Returns:
        Tensor of the same shape and dtype: the exact function, by way of erf, not
        its approximation by tanh.

    Hendrycks and Gimpel (2016), "Gaussian Error Linear Units (GELUs)".
    """
    ### BEGIN SOLUTION
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    ### END SOLUTION


class FeedForward(nn.Module):
    """Widen every position, bend, and narrow again: `activation(x @ W_1) @ W_2`.

    Args:
        d_model: width of the stream.
        d_ff: width in between.
        activation: a function of a tensor, applied to every number by itself.

    The two maps are `nn.Linear` without bias, in `w_1` and `w_2`.

    Vaswani et al. (2017), "Attention Is All You Need", section 3.3 (there with biases).
    """

    def __init__(self, d_model, d_ff, activation):
        super().__init__()
        ### BEGIN SOLUTION
        self.w_1 = nn.Linear(d_model, d_ff, bias=False)
        self.w_2 = nn.Linear(d_ff, d_model, bias=False)
        self.activation = activation
        ### END SOLUTION

    def forward(self, x):
        """`x` `(…, d_model)` → the same shape."""
        ### BEGIN SOLUTION
        hidden = self.activation(self.w_1(x))  # … d_ff
        return self.w_2(hidden)  # … d_model
        ### END SOLUTION


class SwiGLU(nn.Module):
    """A feed-forward network with a gate: `(silu(x @ W_1) * (x @ W_3)) @ W_2`.

    Args:
        d_model: width of the stream.
        d_ff: width in between.

    The three maps are `nn.Linear` without bias: `w_1` makes the gate, `w_3` goes up
    beside it, `w_2` comes down.

    Shazeer (2020), "GLU Variants Improve Transformer".
    """

    def __init__(self, d_model, d_ff):
        super().__init__()
        ### BEGIN SOLUTION
        self.w_1 = nn.Linear(d_model, d_ff, bias=False)
        self.w_3 = nn.Linear(d_model, d_ff, bias=False)
        self.w_2 = nn.Linear(d_ff, d_model, bias=False)
        ### END SOLUTION

    def forward(self, x):
        """`x` `(…, d_model)` → the same shape."""
        ### BEGIN SOLUTION
        gate = silu(self.w_1(x))  # … d_ff
        return self.w_2(gate * self.w_3(x))  # … d_model
        ### END SOLUTION


def swiglu_width(d_model, multiple_of=32):
    """The width at which SwiGLU has the parameters of a classic feed-forward network.

    Args:
        d_model: width of the stream.
        multiple_of: the width is a multiple of this.

    Returns:
        The smallest multiple of `multiple_of` that is at least 8/3·d_model, an int.

    Shazeer (2020), "GLU Variants Improve Transformer", section 2; rounding up
    to a multiple is from the code that Meta published with LLaMA.
    """
    ### BEGIN SOLUTION
    n_multiples = -(-8 * d_model // (3 * multiple_of))  # division rounded up
    return n_multiples * multiple_of
    ### END SOLUTION


def block_parameters(d_model, n_heads, n_kv_heads, d_ff, gated):
    """How many weights the two halves of a Transformer block hold.

    Args:
        d_model: width of the stream.
        n_heads: number of query heads, each `d_model // n_heads` wide.
        n_kv_heads: number of key and value heads.
        d_ff: width of the feed-forward network.
        gated: True for SwiGLU, False for the classic network.

    Returns:
        A dict of two ints, "attention" and "feed_forward". Weight matrices alone:
        nothing has a bias, and norms are not counted.

    Raises:
        ValueError: if the heads do not divide `d_model`, or the key and value heads do
            not divide the heads.
    """
    if d_model % n_heads:
        raise ValueError(f"d_model {d_model} is not divisible by {n_heads} heads")
    if n_heads % n_kv_heads:
        raise ValueError(f"{n_heads} heads cannot share {n_kv_heads} KV heads evenly")
    ### BEGIN SOLUTION
    d_kv = n_kv_heads * (d_model // n_heads)
    return {
        "attention": 2 * d_model * d_model + 2 * d_model * d_kv,  # q and o, k and v
        "feed_forward": (3 if gated else 2) * d_model * d_ff,
    }
    ### END SOLUTION
