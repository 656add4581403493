"""The real model on a text longer than it was trained for: too long for a notebook.

`python -m utils.long_text` measures again and writes `recorded/long_text.json`, in some
minutes for each way of counting positions; `recorded()` reads what was measured last.
"""

import json
import platform
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from utils import real_model, texts

TOKENS, PART, FACTOR = 12_288, 1_024, 1.5
FILE = Path(__file__).parent / "recorded" / "long_text.json"


def recorded() -> dict:
    """`losses`: by name, the mean loss of every 1,024 tokens; and what was used."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def measure() -> dict:
    """Read the first tokens of Python's manual with each way of counting positions."""
    from my_transformer import BPETokenizer, Transformer, TransformerConfig, ntk_base

    model, tokenizer = real_model.load(TransformerConfig, Transformer, BPETokenizer)
    ids = torch.tensor(tokenizer.encode(texts.english(5 * TOKENS))[:TOKENS])
    base, d_head = model.config.rope_base, model.config.d_head
    at = torch.arange(TOKENS)
    ways = {
        "as trained": (at, base),
        "interpolated": (at / FACTOR, base),
        "NTK base": (at, ntk_base(base, FACTOR, d_head)),
    }
    losses = {}
    for name, (positions, its_base) in ways.items():
        found = _losses(model, ids, positions, its_base)
        losses[name] = [round(x.mean().item(), 3) for x in found.split(PART)]
        print(f"{name}: {losses[name]}", flush=True)
    return {
        "losses": losses,
        "tokens": TOKENS,
        "part": PART,
        "factor": FACTOR,
        "max_len": model.config.max_len,
        "date": time.strftime("%Y-%m-%d"),
        "device": f"CPU, {platform.machine()}",
        "torch": torch.__version__.partition("+")[0],
        "python": platform.python_version(),
    }


@torch.no_grad()
def _losses(model, ids, positions, base):
    """The loss of every next token; PyTorch's attention, which keeps no scores."""
    from my_transformer import merge_heads, repeat_kv, rope, split_heads

    c, turn = model.config, partial(rope, positions=positions, base=base)
    group_size = c.n_heads // c.n_kv_heads
    x = model.embedding(ids[None])  # 1 T D
    for block in model.blocks:
        y, part = block.norm_1(x), block.attention
        q = turn(split_heads(part.w_q(y), c.n_heads))  # 1 H T Dh
        k = turn(split_heads(part.w_k(y), c.n_kv_heads))  # 1 K T Dh
        v = split_heads(part.w_v(y), c.n_kv_heads)
        k, v = repeat_kv(k, group_size), repeat_kv(v, group_size)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + part.w_o(merge_heads(mixed))
        x = x + block.feed_forward(block.norm_2(x))
    x, found = model.norm(x[0]), []
    for start in range(0, len(ids) - 1, 512):  # few logits at a time
        targets = ids[start + 1 : start + 513]
        logits = model.head(x[start : start + len(targets)])
        found.append(F.cross_entropy(logits, targets, reduction="none"))
    return torch.cat(found)


if __name__ == "__main__":
    FILE.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
