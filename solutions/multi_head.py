"""Reference answers of lesson 03."""

from torch import nn

from solutions.attention import attention


def split_heads(x, n_heads):
    """`(B, T, n_heads·d_head)` → `(B, n_heads, T, d_head)`."""
    ### BEGIN SOLUTION
    batch, time, width = x.shape
    if width % n_heads:
        raise ValueError(f"a width of {width} cannot be split into {n_heads} heads")
    return x.view(batch, time, n_heads, width // n_heads).transpose(1, 2)
    ### END SOLUTION


def merge_heads(x):
    """`(B, n_heads, T, d_head)` → `(B, T, n_heads·d_head)`."""
    ### BEGIN SOLUTION
    return x.transpose(1, 2).flatten(2)
    ### END SOLUTION


def repeat_kv(x, group_size):
    """`(B, n_kv_heads, T, d_head)` → `(B, n_kv_heads·group_size, T, d_head)`."""
    ### BEGIN SOLUTION
    return x.repeat_interleave(group_size, dim=1)
    ### END SOLUTION


class MultiHeadAttention(nn.Module):
    """Several heads side by side; query heads may share key and value heads."""

    def __init__(self, d_model, n_heads, n_kv_heads=None, d_head=None):
        super().__init__()
        ### BEGIN SOLUTION
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if d_head is None:
            if d_model % n_heads:
                raise ValueError(f"d_model {d_model} is not divisible by {n_heads}")
            d_head = d_model // n_heads
        if n_heads % n_kv_heads:
            raise ValueError(f"{n_heads} heads cannot share {n_kv_heads} KV heads")
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.w_q = nn.Linear(d_model, n_heads * d_head, bias=False)
        self.w_k = nn.Linear(d_model, n_kv_heads * d_head, bias=False)
        self.w_v = nn.Linear(d_model, n_kv_heads * d_head, bias=False)
        self.w_o = nn.Linear(n_heads * d_head, d_model, bias=False)
        ### END SOLUTION

    def forward(self, x, mask=None, rotate=None):
        """`x` `(B, T, d_model)` → the same shape; `rotate` turns queries and keys."""
        ### BEGIN SOLUTION
        q = split_heads(self.w_q(x), self.n_heads)  # B H T Dh
        k = split_heads(self.w_k(x), self.n_kv_heads)
        v = split_heads(self.w_v(x), self.n_kv_heads)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        group_size = self.n_heads // self.n_kv_heads
        k, v = repeat_kv(k, group_size), repeat_kv(v, group_size)
        return self.w_o(merge_heads(attention(q, k, v, mask)))  # B T D
        ### END SOLUTION
