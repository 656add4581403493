"""Four look-ups at once on four, two and one key and value heads."""

import torch
import torch.nn.functional as F

from my_transformer import MultiHeadAttention
from utils.progress import progress

ABOUT = (
    "Lesson 03's four labels: the share of right digits for MHA, GQA and MQA along "
    "4,000 steps, at a rate that falls from 0.02 to 0."
)
MINUTES = 3
STEPS, PEAK = 4000, 0.02
KINDS = {  # n_kv_heads, d_head; there are 4 query heads
    "MHA: 4 KV heads of 8": (4, 8),
    "GQA: 2 of 8": (2, 8),
    "MQA: 1 of 8": (1, 8),
    "MQA: 1 of 32": (1, 32),
}
SETTINGS = [{"kind": kind, "seed": seed} for seed in range(3) for kind in KINDS]


def four_labels(n, generator):
    """n sequences `(n, 9, 72)`, 8 items and a question, and the digits `(n, 4)`."""
    labels = torch.rand(n, 4, 8, generator=generator).argsort(dim=-1)  # kind, item
    digits = torch.randint(8, (n, 8), generator=generator)
    asked = torch.randint(8, (n, 4), generator=generator)  # an item for each kind
    question = labels.gather(2, asked[:, :, None])[:, :, 0]
    x = torch.zeros(n, 9, 72)
    x[:, :8, 0:32] = F.one_hot(labels, 8).float().transpose(1, 2).flatten(2)
    x[:, :8, 32:40] = F.one_hot(digits, 8)
    x[:, 8, 40:72] = F.one_hot(question, 8).float().flatten(1)
    return x, digits.gather(1, asked)


def answer_scores(model, x):
    return model(x)[:, -1, :32].reshape(len(x), 4, 8)  # B N 8


@torch.no_grad()
def right(model):
    """The share of right digits, on sequences not seen."""
    x, answers = four_labels(2000, torch.Generator().manual_seed(99))
    return (answer_scores(model, x).argmax(-1) == answers).float().mean().item()


def measure(kind, seed) -> dict:
    """The share of right digits along the way, the weights, and what is kept."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    n_kv_heads, d_head = KINDS[kind]
    model = MultiHeadAttention(72, 4, n_kv_heads, d_head)
    optimizer = torch.optim.Adam(model.parameters(), lr=PEAK)
    generator = torch.Generator().manual_seed(seed)
    log = []
    for step in progress(range(1, STEPS + 1), f"{kind}, seed {seed}"):
        for group in optimizer.param_groups:
            group["lr"] = PEAK * (1 - (step - 1) / STEPS)
        x, answers = four_labels(64, generator)
        scores = answer_scores(model, x)
        loss = F.cross_entropy(scores.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % (STEPS // 20) == 0:
            log.append([step, round(right(model), 4)])
    return {
        "weights": sum(p.numel() for p in model.parameters()),
        "numbers kept a token": 2 * n_kv_heads * d_head,
        "columns": ["step", "share of digits right"],
        "log": log,
    }
