"""RNN, LSTM and Transformer at equal parameters, until their curves have crossed."""

import functools
import time

import torch
from torch import nn

from my_transformer import (
    AdamW,
    RNNLanguageModel,
    Transformer,
    TransformerConfig,
    clip_gradients,
    cross_entropy,
    get_batch,
    learning_rate,
)
from utils import texts
from utils.progress import progress

ABOUT = (
    "RNN, LSTM and Transformer with 43,000 parameters each on the standard library's "
    "source, 32 pieces of 32 characters a step: test loss along the way."
)
MINUTES = 60
BATCH, T = 32, 32
STEPS = 6000
RATES = {
    "RNN": [0.00125, 0.0025, 0.005, 0.01, 0.02],
    "LSTM": [0.01, 0.02, 0.04, 0.08, 0.16],
    "Transformer": [0.0025, 0.005, 0.01, 0.02, 0.04],
}
TUNING = [
    {"model": model, "peak": peak, "steps": 1000, "seed": 0}
    for model, rates in RATES.items()
    for peak in rates
]
BEST = {"RNN": 0.005, "LSTM": 0.02, "Transformer": 0.01}
SETTINGS = TUNING + [
    {"model": model, "peak": peak, "steps": STEPS, "seed": seed}
    for seed in range(3)
    for model, peak in BEST.items()
]


@functools.cache
def text():
    """The text as ids, in three parts: to train, to choose rates, to test; and V."""
    source = "".join(c if c.isascii() else "?" for c in texts.code(400_000))
    letters = sorted(set(source))
    data = torch.tensor([letters.index(c) for c in source])
    tenth = len(data) // 10
    train, choose, test = data.split([8 * tenth, tenth, len(data) - 9 * tenth])
    return train, choose, test, len(letters)


class LSTMLanguageModel(nn.Module):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.lstm = nn.LSTM(d_model, d_hidden, batch_first=True)
        self.head = nn.Linear(d_hidden, vocab_size, bias=False)

    def forward(self, ids):
        states, _ = self.lstm(self.embedding(ids))
        return self.head(states)


def build(model: str, vocab_size: int) -> nn.Module:
    """A fresh model of lesson 09's sizes."""
    if model == "RNN":
        return RNNLanguageModel(vocab_size, 32, 144)
    if model == "LSTM":
        return LSTMLanguageModel(vocab_size, 32, 74)
    made = Transformer(TransformerConfig(vocab_size, 40, 2, 2, 2, 20, 106, 64))
    for name, p in made.named_parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.1 if "embedding" in name else p.shape[1] ** -0.5)
    return made


@torch.no_grad()
def losses(model, data, n_pieces=256):
    """Mean loss over pieces, and over the last quarter of each alone."""
    inputs, targets = get_batch(data, n_pieces, T, torch.Generator().manual_seed(1))
    logits = model(inputs)
    late = T * 3 // 4
    parts = (logits, targets), (logits[:, late:], targets[:, late:])
    return [round(cross_entropy(*part).item(), 4) for part in parts]


def measure(model, peak, steps, seed) -> dict:
    """Losses against tokens and seconds: to choose rates, then for the test."""
    train, choose, test, vocab_size = text()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    made = build(model, vocab_size)
    optimizer = AdamW(made.parameters(), betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    log, spent = [], 0.0
    for step in progress(range(1, steps + 1), f"{model}, peak {peak}, seed {seed}"):
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, peak, peak / 10, 100, steps)
        inputs, targets = get_batch(train, BATCH, T, generator)
        loss = cross_entropy(made(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(made.parameters(), 1.0)
        optimizer.step()
        spent += time.perf_counter() - started
        if step % (steps // 20) == 0:
            seen = losses(made, test)
            log.append([step * BATCH * T, round(spent, 1), *seen])
    return {
        "parameters": sum(p.numel() for p in made.parameters()),
        "chosen_by": losses(made, choose)[0],
        "columns": ["tokens", "seconds", "loss", "loss of the last quarter"],
        "log": log,
    }
