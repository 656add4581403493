"""Reference answers of lesson 10."""

import torch

from solutions.attention import attention, causal_mask
from solutions.forward_pass import sample
from solutions.multi_head import merge_heads, split_heads
from solutions.positions import rope


class KVCache:
    """The keys and values of every layer, in memory that is taken once.

    Args:
        n_layers, batch, n_kv_heads, max_len, d_head: the sizes; `max_len` positions
            fit.
        dtype: of what is stored, floating-point; torch's default if not given.
        device: where it is stored; the CPU if not given.

    Raises:
        ValueError: if a size is smaller than 1 or the dtype is not floating-point;
            names the number, or the dtype.

    Pope et al. (2022), "Efficiently Scaling Transformer Inference".
    """

    def __init__(
        self, n_layers, batch, n_kv_heads, max_len, d_head, dtype=None, device=None
    ):
        shape = (n_layers, batch, n_kv_heads, max_len, d_head)  # L B K max Dh
        if min(shape) < 1:
            raise ValueError(f"sizes {shape}: each must be at least 1")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}: take a floating-point one")
        self.shape, self.like = shape, torch.empty(0, dtype=dtype, device=device)
        ### BEGIN SOLUTION
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * n_layers
        ### END SOLUTION

    @property
    def length(self):
        """How many positions all layers hold, an int."""
        ### BEGIN SOLUTION
        return min(self.lengths)
        ### END SOLUTION

    def append(self, layer, k, v):
        """Store the next T positions of one layer.

        Args:
            layer: which one, 0 to n_layers − 1; a pass appends to each of them once,
                in this order.
            k, v: `(batch, n_kv_heads, T, d_head)`, in the cache's dtype and device.

        Returns:
            All keys and all values that the layer holds now, the new ones last, both
            `(batch, n_kv_heads, positions, d_head)`.

        Raises:
            ValueError: if they do not fit behind what is there (names how many
                positions that makes, and `max_len`), if `layer` is not one of the
                cache's, or if shape, dtype or device are not the cache's (names what
                came and what is expected). Nothing is stored then.
        """
        n_layers, batch, n_kv_heads, max_len, d_head = self.shape
        if not 0 <= layer < n_layers:
            raise ValueError(f"layer {layer}, but the cache has {n_layers}, from 0 on")
        t = k.shape[-2]
        wanted = (batch, n_kv_heads, t, d_head)
        for name, new in (("keys", k), ("values", v)):
            if new.shape != wanted:
                raise ValueError(
                    f"{name} of shape {tuple(new.shape)}, but the cache takes "
                    f"{wanted}: build it for this batch and this model"
                )
            if new.dtype != self.like.dtype or new.device != self.like.device:
                raise ValueError(
                    f"{name} are {new.dtype} on {new.device}, the cache is "
                    f"{self.like.dtype} on {self.like.device}: build it like the model"
                )
        ### BEGIN SOLUTION
        start = self.lengths[layer]
        stop = start + t
        if stop > max_len:
            raise ValueError(
                f"{stop} positions, but the cache has room for {max_len}: reset it, or "
                "build a longer one"
            )
        self.k[layer, :, :, start:stop] = k
        self.v[layer, :, :, start:stop] = v
        self.lengths[layer] = stop
        return self.k[layer, :, :, :stop], self.v[layer, :, :, :stop]
        ### END SOLUTION

    def reset(self):
        """Forget everything; the memory is kept."""
        ### BEGIN SOLUTION
        self.lengths = [0] * len(self.lengths)
        ### END SOLUTION


def chunk_mask(t_q, t_k, padding=None):
    """Which keys the last `t_q` positions of a text may look at.

    Args:
        t_q: number of queries; they are the last `t_q` of the `t_k` positions.
        t_k: number of keys, cached ones included.
        padding: `(B,)`, whole numbers: how many tokens at the start of each row are
            padding.

    Returns:
        Boolean, True = may look: `(1, 1, t_q, t_k)`, or `(B, 1, t_q, t_k)` with
        `padding`, on its device.

    Raises:
        ValueError: if there are more queries than keys; names both.
    """
    ### BEGIN SOLUTION
    mask = causal_mask(t_q, t_k)[None, None]  # 1 1 T_q T_k
    if padding is None:
        return mask
    real = torch.arange(t_k, device=padding.device) >= padding[:, None]  # B T_k
    return mask.to(padding.device) & real[:, None, None]  # B 1 T_q T_k
    ### END SOLUTION


@torch.no_grad()
def cached_forward(model, ids, cache, padding=None):
    """The logits of the next T tokens of texts whose beginning is in the cache.

    Args:
        model: a `Transformer`.
        ids: `(B, T)`, the tokens that follow those in the cache.
        cache: a `KVCache` in the model's dtype; gets the new tokens' keys and values.
        padding: `(B,)`, how many tokens at the start of each row's text are padding.
            A row's first real token has position 0, and no query looks at padding.

    Returns:
        `(B, T, vocab_size)`, without gradients. At padding it says nothing of use.

    Raises:
        ValueError: if the new tokens do not fit in the cache, or the texts get longer
            than `model.config.max_len`; names both numbers.

    Pope et al. (2022), "Efficiently Scaling Transformer Inference".
    """
    n_tokens = cache.length + ids.shape[1]
    if n_tokens > model.config.max_len:
        raise ValueError(f"{n_tokens} tokens, but max_len is {model.config.max_len}")
    ### BEGIN SOLUTION
    c, t, start = model.config, ids.shape[1], cache.length
    positions = torch.arange(start, start + t, device=ids.device)  # T
    if padding is not None:
        positions = (positions - padding[:, None]).clamp(min=0)  # B T
    x = model.embedding(ids)  # B T D
    if c.style == "gpt2":
        x = x + model.positions(positions)
    else:
        # RoPE turns (1, 0) into (cos, sin): the rotation itself, once for all layers.
        ones = torch.tensor([1.0, 0.0], device=x.device).repeat(c.d_head // 2)  # Dh
        turned = rope(ones.expand(len(x), 1, t, -1), positions, c.rope_base)  # B 1 T Dh
        rotation = torch.view_as_complex(turned.unflatten(-1, (-1, 2)))  # B 1 T Dh/2

    def turn(heads):
        """Each pair times its rotation: what `rope` does, `(B, H, T, Dh)`."""
        wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * rotation
        return torch.view_as_real(pairs).flatten(-2).to(heads.dtype)

    group_size = c.n_heads // c.n_kv_heads
    for layer, block in enumerate(model.blocks):
        part, y = block.attention, block.norm_1(x)
        q = split_heads(part.w_q(y), c.n_heads)  # B H T Dh
        k = split_heads(part.w_k(y), c.n_kv_heads)  # B K T Dh
        v = split_heads(part.w_v(y), c.n_kv_heads)  # B K T Dh
        if c.style == "llama":
            q, k = turn(q), turn(k)
        k, v = cache.append(layer, k, v)  # B K Tk Dh
        mask = None
        if t > 1 or padding is not None:
            mask = chunk_mask(t, k.shape[2], padding).to(x.device)
            mask = mask.repeat(1, 1, group_size, 1)  # · 1 G·T Tk
        # The heads of a group are more queries for the same keys: no copies of those.
        q = q.reshape(len(q), c.n_kv_heads, -1, c.d_head)  # B K G·T Dh
        y = attention(q, k, v, mask).reshape(len(q), c.n_heads, t, -1)  # B H T Dh
        x = x + part.w_o(merge_heads(y))  # B T D
        x = x + block.feed_forward(block.norm_2(x))
    return model.head(model.norm(x))  # B T V
    ### END SOLUTION


def generate_cached(
    model,
    ids,
    n_tokens,
    temperature=1.0,
    top_k=None,
    top_p=None,
    generator=None,
    padding=None,
):
    """Continue texts through a cache: each token is read once.

    Args:
        model: a `Transformer`.
        ids: the prompts, `(B, T)`.
        n_tokens: how many tokens to add; 0 adds none.
        temperature, top_k, top_p, generator: as in `sample`.
        padding: `(B,)`, how many tokens at the start of each prompt are padding.

    Returns:
        `(B, T + n_tokens)`, prompts included, without gradients.

    Raises:
        ValueError: if the prompt is empty, or if prompt and new tokens together are
            more than `max_len`; names both.
    """
    c, (batch, t) = model.config, ids.shape
    if t == 0:
        raise ValueError("the prompt is empty; the model needs at least one token")
    if t + n_tokens > c.max_len:
        raise ValueError(
            f"{t} tokens and {n_tokens} new ones are {t + n_tokens}, but max_len is "
            f"{c.max_len}"
        )
    ### BEGIN SOLUTION
    weight = model.embedding.weight
    cache = KVCache(
        *(c.n_layers, batch, c.n_kv_heads, t + n_tokens, c.d_head),
        dtype=weight.dtype,
        device=weight.device,
    )
    new = ids
    with torch.inference_mode():  # like no_grad, with less bookkeeping still
        for _ in range(n_tokens):
            logits = cached_forward(model, new, cache, padding)[:, -1]  # B V
            new = sample(logits, temperature, top_k, top_p, generator)[:, None]  # B 1
            ids = torch.cat([ids, new], dim=1)  # B T → B T+1
    return ids.clone()  # made out here, it is an ordinary tensor
    ### END SOLUTION


def kv_cache_bytes(config, t, batch=1, dtype=torch.float16):
    """The memory that the keys and values of `t` positions take.

    Args:
        config: a `TransformerConfig`.
        t: positions in each row; more than `config.max_len` count too.
        batch: rows.
        dtype: of what is stored, floating-point.

    Returns:
        Bytes, an int.

    Raises:
        ValueError: if the dtype is not floating-point; names it.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}: keys and values are floating-point")
    ### BEGIN SOLUTION
    numbers = 2 * config.n_layers * config.n_kv_heads * config.d_head
    return numbers * t * batch * dtype.itemsize
    ### END SOLUTION


class RollingKVCache:
    """A cache for attention that looks at the last `window` positions alone.

    Args:
        n_layers, batch, n_kv_heads, window, d_head: the sizes; no more than `window`
            positions are kept.
        dtype, device: as in `KVCache`.

    Raises:
        ValueError: if a size is smaller than 1; names it.

    Beltagy, Peters, Cohan (2020), "Longformer"; Jiang et al. (2023), "Mistral 7B".
    """

    def __init__(
        self, n_layers, batch, n_kv_heads, window, d_head, dtype=None, device=None
    ):
        shape = (n_layers, batch, n_kv_heads, window, d_head)  # L B K W Dh
        if min(shape) < 1:
            raise ValueError(f"sizes {shape}: each must be at least 1")
        self.shape, self.like = shape, torch.empty(0, dtype=dtype, device=device)
        ### BEGIN SOLUTION
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.window = window
        self.lengths = [0] * n_layers
        ### END SOLUTION

    @property
    def length(self):
        """How many positions have passed through all layers, forgotten ones too."""
        ### BEGIN SOLUTION
        return min(self.lengths)
        ### END SOLUTION

    def append(self, layer, k, v):
        """Store the next T positions of one layer over the oldest ones.

        Args:
            layer: which one, 0 to n_layers − 1.
            k, v: `(batch, n_kv_heads, T, d_head)`; T may be larger than `window`.

        Returns:
            The keys and values that one of the new positions may look at, oldest
            first: up to `window − 1` from before, then all T new ones.

        Raises:
            ValueError: if shape, dtype or device are not the cache's; names what came
                and what is expected. Nothing is stored then.
        """
        _, batch, n_kv_heads, _, d_head = self.shape
        for name, new in (("keys", k), ("values", v)):
            if new.shape != (batch, n_kv_heads, k.shape[2], d_head):
                raise ValueError(
                    f"{name} of shape {tuple(new.shape)}, but the cache takes "
                    f"({batch}, {n_kv_heads}, T, {d_head}): build it for this batch "
                    "and this model"
                )
            if new.dtype != self.like.dtype or new.device != self.like.device:
                raise ValueError(
                    f"{name} are {new.dtype} on {new.device}, the cache is "
                    f"{self.like.dtype} on {self.like.device}: build it like the model"
                )
        ### BEGIN SOLUTION
        start, t = self.lengths[layer], k.shape[2]
        before = torch.arange(max(0, start - self.window + 1), start) % self.window
        after = torch.arange(max(start, start + t - self.window), start + t)
        seen_k = torch.cat([self.k[layer][:, :, before], k], dim=2)  # B K · Dh
        seen_v = torch.cat([self.v[layer][:, :, before], v], dim=2)
        self.k[layer][:, :, after % self.window] = k[:, :, -self.window :]
        self.v[layer][:, :, after % self.window] = v[:, :, -self.window :]
        self.lengths[layer] = start + t
        return seen_k, seen_v
        ### END SOLUTION

    def reset(self):
        """Forget everything; the memory is kept."""
        ### BEGIN SOLUTION
        self.lengths = [0] * len(self.lengths)
        ### END SOLUTION
