"""Small models of the library's source, a character a token, as in lesson 09."""

import functools

import torch
from torch import nn

from my_transformer import (
    AdamW,
    Transformer,
    TransformerConfig,
    clip_gradients,
    cross_entropy,
    get_batch,
    learning_rate,
)
from utils import texts
from utils.progress import progress

BATCH, T = 16, 64


@functools.cache
def text():
    """The text as ids, in three parts: to train, to choose rates, to test; and V."""
    source = "".join(c if c.isascii() else "?" for c in texts.code(4_000_000))
    letters = sorted(set(source))
    number = {letter: i for i, letter in enumerate(letters)}
    data = torch.tensor([number[letter] for letter in source])
    tenth = len(data) // 10
    train, choose, test = data.split([8 * tenth, tenth, len(data) - 9 * tenth])
    return train, choose, test, len(letters)


def transformer(d_model: int, n_layers: int, d_ff: int) -> nn.Module:
    """A decoder of two heads; matrices start at a size that suits their width."""
    sizes = d_model, n_layers, 2, 2, d_model // 2, d_ff
    model = Transformer(TransformerConfig(text()[-1], *sizes, max_len=64))
    for name, p in model.named_parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.1 if "embedding" in name else p.shape[1] ** -0.5)
    return model


@torch.no_grad()
def losses(model, data, n_pieces=256):
    """Mean loss over pieces, and over the last quarter of each alone."""
    inputs, targets = get_batch(data, n_pieces, T, torch.Generator().manual_seed(1))
    logits = model(inputs)
    late = T * 3 // 4
    parts = (logits, targets), (logits[:, late:], targets[:, late:])
    return [round(cross_entropy(*part).item(), 4) for part in parts]


def train(model, peak: float, steps: int, seed: int, n_looks: int, label: str):
    """Train with lesson 09's parts; tokens and test losses along the way."""
    data, _, test, _ = text()
    optimizer = AdamW(model.parameters(), betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    log = []
    for step in progress(range(1, steps + 1), label):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step, peak, peak / 10, min(100, steps // 6), steps
            )
        inputs, targets = get_batch(data, BATCH, T, generator)
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        if step * n_looks % steps < n_looks:
            log.append([step * BATCH * T, *losses(model, test)])
    return log


def size(model) -> int:
    return sum(p.numel() for p in model.parameters())
