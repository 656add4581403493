"""An LSTM that reads a date and one that writes it, with one state between them."""

import torch
from torch import nn

from my_transformer import cross_entropy, learning_rate
from utils.dates import written_dates
from utils.progress import progress

ABOUT = (
    "Two LSTMs of 77 numbers translate dates, all through one state, 32 pairs a step: "
    "share of 1,000 unseen dates with every letter right."
)
MINUTES = 2
SETTINGS = [{"steps": 500, "seed": 1}, {"steps": 2500, "seed": 1}]
PAD, START, END = 0, 1, 2


class TwoLSTMs(nn.Module):
    def __init__(self, n_letters):
        super().__init__()
        self.embedding = nn.Embedding(n_letters, 64)
        self.reader = nn.LSTM(64, 77, batch_first=True)
        self.writer = nn.LSTM(64, 77, batch_first=True)
        self.head = nn.Linear(77, n_letters, bias=False)

    def forward(self, source, target):
        lengths = (source != PAD).sum(dim=1)
        read = nn.utils.rnn.pack_padded_sequence(
            self.embedding(source), lengths, batch_first=True, enforce_sorted=False
        )
        _, state = self.reader(read)
        start = torch.full_like(target[:, :1], START)
        before = torch.cat([start, target[:, :-1]], dim=1)  # B T
        return self.head(self.writer(self.embedding(before), state)[0])


def tensors(pairs, number):
    rows = [[torch.tensor([number[x] for x in text]) for text in p] for p in pairs]
    sources = nn.utils.rnn.pad_sequence([a for a, _ in rows], batch_first=True)
    targets = torch.stack([torch.cat([b, torch.tensor([END])]) for _, b in rows])
    return sources, targets


def measure(steps: int, seed: int) -> dict:
    """The share of exact dates after training."""
    torch.set_num_threads(1)
    pairs = written_dates(16_000, seed=0)
    letters = sorted(set("".join(a + b for a, b in pairs)))
    number = {letter: i + 3 for i, letter in enumerate(letters)}
    sources, targets = tensors(pairs, number)
    torch.manual_seed(seed)
    model = TwoLSTMs(len(letters) + 3)
    peak = 8e-3
    optimizer = torch.optim.AdamW(model.parameters(), peak, (0.9, 0.98))
    generator = torch.Generator().manual_seed(0)
    for step in progress(range(1, steps + 1), f"{steps} steps"):
        rows = torch.randint(len(sources), (32,), generator=generator)
        target = targets[rows]
        loss = cross_entropy(model(sources[rows], target), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = learning_rate(step, peak, 0.0, steps // 10, steps)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    source, target = tensors(written_dates(1_000, seed=1, test=True), number)
    with torch.no_grad():
        right = (model(source, target).argmax(-1) == target).all(dim=1)
    return {"exact": right.float().mean().item()}
