"""Reference answers of lesson 14."""

import torch

from solutions.attention import attention, causal_mask


def sliding_window_mask(t_q, t_k, window):
    """The causal mask that shows each query the nearest positions alone.

    Args:
        t_q: number of queries; they are the last `t_q` of the `t_k` positions.
        t_k: number of keys.
        window: how many positions a query sees at most, its own included.

    Returns:
        Boolean `(t_q, t_k)`, True = may look.

    Raises:
        ValueError: if `window` is smaller than 1, or if there are more queries than
            keys; names the numbers.

    Child et al. (2019), "Generating Long Sequences with Sparse Transformers"; Beltagy,
    Peters, Cohan (2020), "Longformer".
    """
    if window < 1:
        raise ValueError(f"window is {window}, but a query sees at least itself")
    if t_q > t_k:
        raise ValueError(f"{t_q} queries cannot be the last of {t_k} positions")
    ### BEGIN SOLUTION
    keys = torch.arange(t_k)
    back = keys[t_k - t_q :, None] - keys  # T_q T_k, steps from query back to key
    return (back >= 0) & (back < window)
    ### END SOLUTION


def sink_mask(t_q, t_k, window, n_sinks):
    """A sliding window that never lets go of the first positions of the text.

    Args:
        t_q: number of queries; they are the last `t_q` of the `t_k` positions.
        t_k: number of keys.
        window: how many of the nearest positions a query sees, its own included.
        n_sinks: how many positions at the start of the text it sees besides; 0 is
            allowed.

    Returns:
        Boolean `(t_q, t_k)`, True = may look. Nobody looks ahead, at sinks neither.

    Raises:
        ValueError: if `window` is smaller than 1, if `n_sinks` is negative, or if there
            are more queries than keys; names the numbers.

    Xiao et al. (2024), "Efficient Streaming Language Models with Attention Sinks".
    """
    if n_sinks < 0:
        raise ValueError(f"n_sinks is {n_sinks}, but must not be negative")
    ### BEGIN SOLUTION
    near = sliding_window_mask(t_q, t_k, window)
    first = torch.arange(t_k) < n_sinks  # T_k
    return near | (causal_mask(t_q, t_k) & first)  # T_q T_k
    ### END SOLUTION


def strided_mask(t_q, t_k, stride):
    """The nearest positions, and beyond them one of every `stride`.

    Args:
        t_q: number of queries; they are the last `t_q` of the `t_k` positions.
        t_k: number of keys.
        stride: a query sees the nearest `stride` positions, its own included, and all
            that lie a whole number of strides back.

    Returns:
        Boolean `(t_q, t_k)`, True = may look. Nobody looks ahead.

    Raises:
        ValueError: if `stride` is smaller than 1, or if there are more queries than
            keys; names the numbers.

    Child et al. (2019), "Generating Long Sequences with Sparse Transformers".
    """
    if stride < 1:
        raise ValueError(f"stride is {stride}, but must be at least 1")
    if t_q > t_k:
        raise ValueError(f"{t_q} queries cannot be the last of {t_k} positions")
    ### BEGIN SOLUTION
    keys = torch.arange(t_k)
    back = keys[t_k - t_q :, None] - keys  # T_q T_k
    return (back >= 0) & ((back < stride) | (back % stride == 0))
    ### END SOLUTION


def chunked_attention(q, k, v, window, block):
    """Attention under a sliding window, without the scores that the window hides.

    Args:
        q: queries `(…, T_q, d_head)`; they are the last `T_q` of the `T_k` positions.
        k: keys `(…, T_k, d_head)`.
        v: values `(…, T_k, d_v)`.
        window: how many positions a query sees at most, its own included.
        block: how many queries are treated at once; the last block may be smaller.

    Returns:
        `(…, T_q, d_v)`: what `attention` gives under `sliding_window_mask`. Time and
        memory grow in step with the length.

    Raises:
        ValueError: if `window` or `block` is smaller than 1, or if there are more
            queries than keys; names the numbers.

    Beltagy, Peters, Cohan (2020), "Longformer".
    """
    t_q, t_k = q.shape[-2], k.shape[-2]
    if t_q > t_k:
        raise ValueError(f"{t_q} queries cannot be the last of {t_k} positions")
    if block < 1:
        raise ValueError(f"block is {block}, but must be at least 1")
    ### BEGIN SOLUTION
    outputs = []
    for start in range(0, t_q, block):
        end = min(start + block, t_q)
        last = end + t_k - t_q  # the block's last query stands before this position
        first = max(0, start + t_k - t_q - window + 1)
        mask = sliding_window_mask(end - start, last - first, window).to(q.device)
        near_k, near_v = k[..., first:last, :], v[..., first:last, :]
        outputs.append(attention(q[..., start:end, :], near_k, near_v, mask))
    return torch.cat(outputs, dim=-2)  # … T_q d_v
    ### END SOLUTION


def feature_map(x):
    """Features above 0, so that their products can serve as weights: elu(x) + 1.

    Args:
        x: any shape.

    Returns:
        The shape and dtype of `x`: x + 1 where x is above 0, e^x elsewhere. It is not
        rounded to 0 where e^x is not. Its slope is 1 at 0 and above, e^x below.

    Katharopoulos et al. (2020), "Transformers are RNNs", section 3.2.2.
    """
    ### BEGIN SOLUTION
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    ### END SOLUTION


def linear_attention(q, k, v, causal):
    """Attention whose weights are products of features, summed in another order.

    Args:
        q: queries `(…, T_q, d)`.
        k: keys `(…, T_k, d)`.
        v: values `(…, T_k, d_v)`.
        causal: if True, the queries are the last `T_q` of the `T_k` positions, and none
            looks ahead; if False, each sees every key.

    Returns:
        `(…, T_q, d_v)`: the average of the values with weights in proportion to
        φ(q)·φ(k), φ being `feature_map`. Time and memory grow in step with the length.

    Raises:
        ValueError: if `causal` and there are more queries than keys; names both.

    Katharopoulos et al. (2020), "Transformers are RNNs: Fast Autoregressive
    Transformers with Linear Attention".
    """
    t_q, t_k = q.shape[-2], k.shape[-2]
    if causal and t_q > t_k:
        raise ValueError(f"{t_q} queries cannot be the last of {t_k} positions")
    ### BEGIN SOLUTION
    q, k = feature_map(q), feature_map(k)
    if not causal:
        s, z = k.mT @ v, k.sum(dim=-2)  # … d d_v and … d
        return q @ s / (q @ z[..., None])  # … T_q d_v
    s = (k[..., :, None] * v[..., None, :]).cumsum(dim=-3)  # … T_k d d_v
    s, z = s[..., t_k - t_q :, :, :], k.cumsum(dim=-2)[..., t_k - t_q :, :]
    top = (q[..., None, :] @ s).squeeze(-2)  # … T_q d_v
    return top / (q * z).sum(dim=-1, keepdim=True)
    ### END SOLUTION


def linear_attention_step(state, q, k, v):
    """One position of causal linear attention, from a state of fixed size.

    Args:
        state: `(s, z)` as the step before returned it; None at the first step.
        q: the position's query, `(…, d)`.
        k: its key, `(…, d)`.
        v: its value, `(…, d_v)`.

    Returns:
        `(output, state)`: the output `(…, d_v)`, and the new `(s, z)`, where
        s `(…, d, d_v)` is the sum of φ(k)ᵀv over all positions so far, this one
        included, and z `(…, d)` the sum of φ(k). The old state stays as it is.

    Katharopoulos et al. (2020), "Transformers are RNNs", section 3.4.
    """
    ### BEGIN SOLUTION
    q, k = feature_map(q), feature_map(k)
    s, z = (0, 0) if state is None else state
    s = s + k[..., :, None] * v[..., None, :]  # … d d_v
    z = z + k  # … d
    top = (q[..., None, :] @ s).squeeze(-2)  # … d_v
    return top / (q * z).sum(dim=-1, keepdim=True), (s, z)
    ### END SOLUTION
