"""Reference answers of lesson 02."""

import math

import torch
from torch import nn


def attention_weights(q, k, mask=None):
    """How much each query looks at each key.

    Args:
        q: queries `(…, T_q, d_head)`.
        k: keys `(…, T_k, d_head)`.
        mask: boolean, broadcastable to `(…, T_q, T_k)`; True = may look.

    Returns:
        Weights `(…, T_q, T_k)` in the dtype of `q`: softmax of q·k / √d_head over the
        keys that the mask allows, 0 for the others. A query that may look at nothing
        gets zeros, with finite gradients.

    Vaswani et al. (2017), "Attention Is All You Need", section 3.2.1.
    """
    ### BEGIN SOLUTION
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # … T_q T_k
    if mask is None:
        return torch.softmax(scores, dim=-1)
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
    return weights.masked_fill(~mask, 0)
    ### END SOLUTION


def attention(q, k, v, mask=None):
    """For each query, the average of the values by its attention weights.

    Args:
        q: queries `(…, T_q, d_head)`.
        k: keys `(…, T_k, d_head)`.
        v: values `(…, T_k, d_v)`; d_v need not be d_head.
        mask: boolean, broadcastable to `(…, T_q, T_k)`; True = may look.

    Returns:
        `(…, T_q, d_v)`; zeros for a query that may look at nothing.

    Vaswani et al. (2017), "Attention Is All You Need", equation 1.
    """
    ### BEGIN SOLUTION
    return attention_weights(q, k, mask) @ v  # … T_q d_v
    ### END SOLUTION


class SelfAttention(nn.Module):
    """One head: every position asks, and is asked by, the positions of its sequence.

    Args:
        d_model: width of the stream.
        d_head: width of queries, keys and values.

    Queries, keys and values are linear maps of `x` without bias, in `w_q`, `w_k` and
    `w_v`.

    Vaswani et al. (2017), "Attention Is All You Need", section 3.2.
    """

    def __init__(self, d_model, d_head):
        super().__init__()
        ### BEGIN SOLUTION
        self.w_q = nn.Linear(d_model, d_head, bias=False)
        self.w_k = nn.Linear(d_model, d_head, bias=False)
        self.w_v = nn.Linear(d_model, d_head, bias=False)
        ### END SOLUTION

    def forward(self, x, mask=None):
        """`x` `(B, T, d_model)` → `(B, T, d_head)`; mask as in `attention`."""
        ### BEGIN SOLUTION
        return attention(self.w_q(x), self.w_k(x), self.w_v(x), mask)
        ### END SOLUTION


def causal_mask(t_q, t_k=None):
    """The mask that keeps every query from looking at later positions.

    Args:
        t_q: number of queries; they are the last `t_q` of the `t_k` positions.
        t_k: number of keys, `t_q` if not given.

    Returns:
        Boolean `(t_q, t_k)`, True = may look.

    Raises:
        ValueError: if there are more queries than keys.

    Vaswani et al. (2017), "Attention Is All You Need", section 3.2.3.
    """
    t_k = t_q if t_k is None else t_k
    if t_q > t_k:
        raise ValueError(f"{t_q} queries cannot be the last of {t_k} positions")
    ### BEGIN SOLUTION
    return torch.ones(t_q, t_k, dtype=torch.bool).tril(diagonal=t_k - t_q)
    ### END SOLUTION


def padding_mask(lengths, t_k):
    """The mask that hides padding at the end of each row of a batch.

    Args:
        lengths: `(B,)`, how many of the keys of each row are real; 0 is allowed.
        t_k: number of keys.

    Returns:
        Boolean `(B, 1, 1, t_k)`, True = may look, on the device of `lengths`; it
        broadcasts over heads and queries.
    """
    ### BEGIN SOLUTION
    positions = torch.arange(t_k, device=lengths.device)
    return (positions < lengths[:, None])[:, None, None, :]
    ### END SOLUTION
