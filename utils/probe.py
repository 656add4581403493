"""Test tensors made from a formula, the same on every machine and every version."""

import torch

WORD = 0xFFFFFFFF


def hashed(n: int, seed: int) -> torch.Tensor:
    """`n` whole numbers in 0 .. 2³²−1 that look random, as int64."""
    x = (torch.arange(n) * 2_654_435_761 + (seed + 1) * 40_503_001) & WORD
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & WORD
    return x ^ (x >> 16)


def probe(*shape, seed=0, scale=1.0, shift=0.0, dtype=torch.float32) -> torch.Tensor:
    """A tensor of `shape` whose values look normal: `shift + scale·N(0, 1)`."""
    n = torch.Size(shape).numel()
    uniform = (hashed(n, seed).double() + 0.5) / (WORD + 1)
    normal = 2**0.5 * torch.erfinv(2 * uniform - 1)
    return (shift + scale * normal).reshape(shape).to(dtype)


def probe_ids(*shape, below: int, seed=0) -> torch.Tensor:
    """A tensor of `shape` of whole numbers in 0 .. `below` − 1, as int64."""
    return (hashed(torch.Size(shape).numel(), seed) % below).reshape(shape)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as `x` in memory that is not contiguous."""
    padded = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype)
    view = padded[..., 1::2]
    view.copy_(x)
    return view
