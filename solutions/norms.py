"""Reference answers of lesson 06."""

import torch
from torch import nn


def layer_norm(x, weight, bias, eps=1e-5):
    """Shift and scale each vector to mean 0 and variance 1, then apply weight and bias.

    Args:
        x: `(…, D)`, floating point; each vector along the last dimension by itself.
        weight: `(D,)`, in the dtype of `x`.
        bias: `(D,)`, in the dtype of `x`.
        eps: added to the variance, inside the root.

    Returns:
        `(…, D)` in the dtype of `x`. Mean and variance (biased: divided by D) are
        computed in float32.

    Ba, Kiros, Hinton (2016), "Layer Normalization".
    """
    ### BEGIN SOLUTION
    x32 = x.float()
    centred = x32 - x32.mean(dim=-1, keepdim=True)  # … D
    variance = centred.square().mean(dim=-1, keepdim=True)  # … 1
    return (centred * torch.rsqrt(variance + eps) * weight + bias).to(x.dtype)
    ### END SOLUTION


def rms_norm(x, weight, eps=1e-6):
    """Divide each vector by the root of its mean square, then apply the weight.

    Args:
        x: `(…, D)`, floating point; each vector along the last dimension by itself.
        weight: `(D,)`, in the dtype of `x`.
        eps: added to the mean square, inside the root.

    Returns:
        `(…, D)` in the dtype of `x`. The mean square is computed in float32.

    Zhang, Sennrich (2019), "Root Mean Square Layer Normalization".
    """
    ### BEGIN SOLUTION
    x32 = x.float()
    mean_square = x32.square().mean(dim=-1, keepdim=True)  # … 1
    return (x32 * torch.rsqrt(mean_square + eps) * weight).to(x.dtype)  # … D
    ### END SOLUTION


class RMSNorm(nn.Module):
    """`rms_norm` with a weight of its own to train.

    Args:
        d_model: width of the stream.
        eps: added to the mean square, inside the root.

    Its one parameter is `weight` `(d_model,)`, which starts at ones.
    """

    def __init__(self, d_model, eps=1e-6):
        super().__init__()
        ### BEGIN SOLUTION
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps
        ### END SOLUTION

    def forward(self, x):
        """`x` `(…, d_model)` → the same shape and dtype."""
        ### BEGIN SOLUTION
        return rms_norm(x, self.weight, self.eps)
        ### END SOLUTION


def pre_norm(x, sublayer, norm):
    """One step of the stream: add what the sublayer makes of the normalised stream.

    Args:
        x: the stream, `(B, T, D)`.
        sublayer: a function or module `(B, T, D)` → `(B, T, D)`, called once.
        norm: a function or module `(B, T, D)` → `(B, T, D)`, called once.

    Returns:
        `(B, T, D)`, a new tensor: the stream itself is never normalised.

    Xiong et al. (2020), "On Layer Normalization in the Transformer Architecture".
    """
    ### BEGIN SOLUTION
    return x + sublayer(norm(x))
    ### END SOLUTION


def post_norm(x, sublayer, norm):
    """One step of the stream: add what the sublayer makes of it, then normalise.

    Args:
        x: the stream, `(B, T, D)`.
        sublayer: a function or module `(B, T, D)` → `(B, T, D)`, called once.
        norm: a function or module `(B, T, D)` → `(B, T, D)`, called once.

    Returns:
        `(B, T, D)`, a new tensor: the normalised sum.

    Vaswani et al. (2017), "Attention Is All You Need", section 3.1.
    """
    ### BEGIN SOLUTION
    return norm(x + sublayer(x))
    ### END SOLUTION
