"""RNN, LSTM and Transformer at equal parameters, until their curves have crossed."""

import torch
from torch import nn

from my_transformer import RNNLanguageModel
from utils.long_runs._characters import losses, size, text, train, transformer

ABOUT = (
    "RNN, LSTM and Transformer with 42,000 parameters each on four million characters "
    "of the standard library's source, 16 pieces of 64 a step: test loss along the way."
)
MINUTES = 25
STEPS = 6000
RATES = {  # tried with 1,000 steps
    "RNN": [0.00125, 0.0025, 0.005, 0.01, 0.02],
    "LSTM": [0.01, 0.02, 0.04, 0.08, 0.16],
    "Transformer": [0.0025, 0.005, 0.01, 0.02, 0.04],
}
BEST = {"RNN": 0.01, "LSTM": 0.02, "Transformer": 0.005}
SETTINGS = [
    {"model": model, "peak": peak, "steps": 1000, "seed": 0}
    for model, rates in RATES.items()
    for peak in rates
] + [
    {"model": model, "peak": peak, "steps": STEPS, "seed": seed}
    for seed in range(3)
    for model, peak in BEST.items()
]


class LSTMLanguageModel(nn.Module):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.lstm = nn.LSTM(d_model, d_hidden, batch_first=True)
        self.head = nn.Linear(d_hidden, vocab_size, bias=False)

    def forward(self, ids):
        states, _ = self.lstm(self.embedding(ids))
        return self.head(states)


def build(model: str) -> nn.Module:
    vocab_size = text()[-1]
    if model == "RNN":
        return RNNLanguageModel(vocab_size, 32, 144)
    if model == "LSTM":
        return LSTMLanguageModel(vocab_size, 32, 74)
    return transformer(40, 2, 106)


def measure(model: str, peak: float, steps: int, seed: int) -> dict:
    """The losses by which rates are chosen, then those of the test along the way."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    made = build(model)
    log = train(made, peak, steps, seed, 20, f"{model}, peak {peak}, seed {seed}")
    return {
        "parameters": size(made),
        "loss_to_choose_by": losses(made, text()[1])[0],
        "columns": ["tokens", "loss", "loss of the last quarter"],
        "log": log,
    }
