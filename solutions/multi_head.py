"""Reference answers of lesson 03."""

from torch import nn

from solutions.attention import attention


def split_heads(x, n_heads):
    """Cut every vector of a stream into heads.

    Args:
        x: `(B, T, n_heads·d_head)`.
        n_heads: number of heads.

    Returns:
        `(B, n_heads, T, d_head)`: head h holds the h-th run of d_head neighbouring
        columns of `x`.

    Raises:
        ValueError: if the width is not divisible by `n_heads`; it names both.

    Vaswani et al. (2017), "Attention Is All You Need", section 3.2.2.
    """
    width = x.shape[-1]
    if width % n_heads:
        raise ValueError(f"a width of {width} cannot be cut into {n_heads} heads")
    ### BEGIN SOLUTION
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)  # B T H Dh → B H T Dh
    ### END SOLUTION


def merge_heads(x):
    """Put the heads side by side again: undoes `split_heads`.

    Args:
        x: `(B, n_heads, T, d_head)`, contiguous or not.

    Returns:
        `(B, T, n_heads·d_head)`: head 0's columns first, then head 1's, …

    Vaswani et al. (2017), "Attention Is All You Need", section 3.2.2 ("Concat").
    """
    ### BEGIN SOLUTION
    return x.transpose(1, 2).flatten(2)  # B T H Dh → B T H·Dh
    ### END SOLUTION


def repeat_kv(x, group_size):
    """Give every query head its key or value head.

    Args:
        x: keys or values `(B, n_kv_heads, T, d_head)`.
        group_size: how many neighbouring query heads share each of them.

    Returns:
        `(B, n_kv_heads·group_size, T, d_head)`: head h is head h // group_size of `x`.

    Ainslie et al. (2023), "GQA: Training Generalized Multi-Query Transformer Models
    from Multi-Head Checkpoints".
    """
    ### BEGIN SOLUTION
    return x.repeat_interleave(group_size, dim=1)  # B K T Dh → B H T Dh
    ### END SOLUTION


class MultiHeadAttention(nn.Module):
    """Several heads side by side; query heads may share key and value heads.

    Args:
        d_model: width of the stream.
        n_heads: number of query heads.
        n_kv_heads: number of key and value heads; `n_heads` if not given.
        d_head: width of a head; `d_model // n_heads` if not given.

    Raises:
        ValueError: if `d_head` is not given and `d_model` is not divisible by
            `n_heads`, or if `n_heads` is not divisible by `n_kv_heads`; it names both.

    `w_q`, `w_k`, `w_v` and `w_o` are linear layers without bias.
    Vaswani et al. (2017), "Attention Is All You Need"; Shazeer (2019), "Fast
    Transformer Decoding"; Ainslie et al. (2023), "GQA".
    """

    def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if d_head is None and d_model % n_heads:
            raise ValueError(f"d_model {d_model} is not divisible by {n_heads} heads")
        if n_heads % n_kv_heads:
            raise ValueError(f"{n_heads} heads cannot share {n_kv_heads} KV heads")
        d_head = d_model // n_heads if d_head is None else d_head
        ### BEGIN SOLUTION
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.w_q = nn.Linear(d_model, n_heads * d_head, bias=False)
        self.w_k = nn.Linear(d_model, n_kv_heads * d_head, bias=False)
        self.w_v = nn.Linear(d_model, n_kv_heads * d_head, bias=False)
        self.w_o = nn.Linear(n_heads * d_head, d_model, bias=False)
        ### END SOLUTION

    def forward(self, x, mask=None, rotate=None):
        """Let every position look at the others, once in each head.

        Args:
            x: `(B, T, d_model)`.
            mask: boolean, broadcastable to `(B, n_heads, T, T)`; True = may look.
            rotate: a function of `(B, heads, T, d_head)` that keeps the shape, applied
                to the queries and to the keys.

        Returns:
            `(B, T, d_model)`.
        """
        ### BEGIN SOLUTION
        q = split_heads(self.w_q(x), self.n_heads)  # B H T Dh
        k = split_heads(self.w_k(x), self.n_kv_heads)  # B K T Dh
        v = split_heads(self.w_v(x), self.n_kv_heads)  # B K T Dh
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        group_size = self.n_heads // self.n_kv_heads
        k, v = repeat_kv(k, group_size), repeat_kv(v, group_size)  # B H T Dh
        return self.w_o(merge_heads(attention(q, k, v, mask)))  # B T D
        ### END SOLUTION


def attention_parameters(d_model, n_heads, n_kv_heads, d_head):
    """How many weights a multi-head attention without biases has.

    Args:
        d_model: width of the stream.
        n_heads: number of query heads.
        n_kv_heads: number of key and value heads.
        d_head: width of a head; `n_heads·d_head` need not be `d_model`.

    Returns:
        The number of weights in `w_q`, `w_k`, `w_v` and `w_o` together, an integer.
    """
    ### BEGIN SOLUTION
    return 2 * d_model * d_head * (n_heads + n_kv_heads)
    ### END SOLUTION
