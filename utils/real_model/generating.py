"""Lets the real model answer: its chat format, and an answer piece by piece."""

from functools import partial

import torch

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
END_OF_TURN = "<|im_end|>"


def chat_prompt(turns, system: str = SYSTEM) -> str:
    """Messages in the form that the model was trained on, up to where it answers.

    turns: pairs of role ("user" or "assistant") and text.
    """
    turns = [("system", system), *turns]
    said = [f"<|im_start|>{role}\n{text}{END_OF_TURN}\n" for role, text in turns]
    return "".join(said) + "<|im_start|>assistant\n"


def answer_pieces(
    model,
    tokenizer,
    prompt: str,
    n_tokens: int,
    sample,
    cache_class=None,
    cached_forward=None,
    **settings,
):
    """Yield the model's answer piece by piece, up to the end of its turn.

    sample: the function of lesson 08; settings go to it.
    cache_class, cached_forward: those of lesson 10; without them the model reads the
        whole text again for each token.
    """
    ids = torch.tensor([tokenizer.encode(prompt)])
    end = tokenizer.encode(END_OF_TURN)[0]
    if cached_forward is None:
        next_logits = partial(_whole_text, model)
    else:
        next_logits = CachedReader(model, cache_class, cached_forward)
    written, said = [], ""
    for _ in range(n_tokens):
        with torch.no_grad():
            logits = next_logits(ids)
        token = sample(logits, **settings)
        if token.item() == end:
            break
        written.append(token.item())
        ids = torch.cat([ids, token[:, None]], dim=1)
        text = tokenizer.decode(written)
        if not text.endswith("\ufffd"):  # a letter may need several tokens
            yield text[len(said) :]
            said = text


def _whole_text(model, ids):
    return model(ids[:, -model.config.max_len :])[:, -1]


class CachedReader:
    """Logits of the next token of a growing text; each token is read once.

    A text past `max_len` goes on with its last half: keys in a cache cannot be moved,
    so that half is read again.
    """

    def __init__(self, model, cache_class, cached_forward):
        c, weight = model.config, model.embedding.weight
        self.model, self.cached_forward = model, cached_forward
        self.cache = cache_class(
            *(c.n_layers, 1, c.n_kv_heads, c.max_len, c.d_head),
            dtype=weight.dtype,
            device=weight.device,
        )
        self.n_read = 0  # of the text, what was left out included

    def __call__(self, ids):
        max_len = self.model.config.max_len
        new = ids[:, self.n_read :]
        if self.cache.length + new.shape[1] > max_len:
            self.cache.reset()
            new = ids[:, -max(1, max_len // 2) :]
        self.n_read = ids.shape[1]
        return self.cached_forward(self.model, new, self.cache)[:, -1]
