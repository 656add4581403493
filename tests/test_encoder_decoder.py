"""Lesson 13: against PyTorch and transformers; other forms; wrong ones; the dates."""

import re
from datetime import date

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solutions.attention import attention
from solutions.encoder_decoder import (
    CrossAttention,
    DecoderBlock,
    EncoderBlock,
    EncoderDecoder,
    shift_right,
    translate,
)
from solutions.feed_forward import FeedForward
from solutions.forward_pass import TransformerConfig
from solutions.multi_head import MultiHeadAttention, merge_heads, split_heads
from solutions.norms import RMSNorm
from solutions.positions import sinusoidal
from tests.answers import fails, passes
from utils import dates
from utils.exercises import encoder_decoder as spec
from utils.probe import probe, probe_ids

# Against PyTorch and transformers -----------------------------------------------------

SIZES = [
    spec.Sizes(31, 16, 2, 4, 40, 20),
    spec.Sizes(23, 12, 3, 3, 20, 15, norm_eps=1e-3, pad_id=7),
    spec.Sizes(19, 20, 1, 5, 33, 12, pad_id=18),
]


def filled(module):
    """Values that are no starting values, norms away from one."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            is_norm = p.dim() == 1
            scale = 0.3 if is_norm else p.shape[-1] ** -0.5
            p.copy_(probe(*p.shape, seed=i, scale=scale, shift=float(is_norm)))
    return module.eval()


def t5_of(ours):
    """T5 with the same weights, and without relative positions."""
    from transformers import T5Config, T5ForConditionalGeneration

    c = ours.config
    sizes = dict(vocab_size=c.vocab_size, d_model=c.d_model, d_ff=c.d_ff)
    sizes |= dict(d_kv=c.d_model // c.n_heads, num_heads=c.n_heads)
    options = dict(dropout_rate=0.0, feed_forward_proj="relu", pad_token_id=c.pad_id)
    options |= dict(decoder_start_token_id=0, tie_word_embeddings=False)
    norms = dict(num_layers=c.n_layers, layer_norm_epsilon=c.norm_eps)
    config = T5Config(**sizes, **norms, **options)
    theirs = T5ForConditionalGeneration(config).eval()
    new = dict.fromkeys(
        ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        ours.embedding.weight,
    ) | {"lm_head.weight": ours.head.weight}
    # T5 does not divide its scores: the root of d_head goes into the queries
    root = (c.d_model // c.n_heads) ** 0.5
    for half in ("encoder", "decoder"):
        norm = getattr(ours, f"{half}_norm")
        new[f"{half}.final_layer_norm.weight"] = norm.weight
        bias = f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        new[bias] = torch.zeros_like(theirs.state_dict()[bias])
        for i, block in enumerate(getattr(ours, half)):
            sublayers = [("SelfAttention", block.attention)]
            if half == "decoder":
                sublayers.append(("EncDecAttention", block.cross_attention))
            sublayers.append(("DenseReluDense", block.feed_forward))
            for j, (kind, own) in enumerate(sublayers):
                to = f"{half}.block.{i}.layer.{j}."
                norm = getattr(block, f"norm_{j + 1}")
                new[f"{to}layer_norm.weight"] = norm.weight
                for name, p in own.named_parameters():
                    letters = {"w_1.weight": "wi.weight", "w_2.weight": "wo.weight"}
                    other = letters.get(name, name.removeprefix("w_"))
                    new[f"{to}{kind}.{other}"] = p / root if name[:3] == "w_q" else p
    theirs.load_state_dict({n: w.detach() for n, w in new.items()}, strict=True)
    return theirs


@pytest.mark.parametrize("c", SIZES)
def test_the_whole_model_is_t5_without_its_relative_positions(c):
    ours = filled(EncoderDecoder(c))
    source = spec.sources([9, 1, 4, 7], c, seed=3)
    target = probe_ids(4, 6, below=c.vocab_size, seed=4)
    weights = {n.removesuffix(".weight"): p for n, p in ours.named_parameters()}
    with torch.no_grad():
        expected = t5_of(ours)(
            inputs_embeds=ours.embed(source),
            attention_mask=(source != c.pad_id).long(),
            decoder_inputs_embeds=ours.embed(target),
        ).logits
        oracle = spec.Model(spec.in_float64(weights), c)(source, target).float()
        for logits in (ours(source, target), oracle):
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_shift_right_is_that_of_t5():
    ids = probe_ids(3, 5, below=31, seed=2)
    theirs = t5_of(EncoderDecoder(SIZES[0]))._shift_right(ids)
    assert torch.equal(shift_right(ids, 0), theirs)


# Right answers in other forms ---------------------------------------------------------


def shift_by_roll(ids, start_id):
    out = ids.roll(1, dims=1)
    out[:, 0] = start_id
    return out


class HeadByHead(CrossAttention):
    """A loop over heads, a pair that is a list, a mask for every head."""

    def keys_values(self, memory):
        return [
            torch.stack(w(memory).chunk(self.n_heads, dim=-1), dim=1)
            for w in (self.w_k, self.w_v)
        ]

    def forward(self, x, memory, memory_mask=None):
        k, v = self.keys_values(memory) if torch.is_tensor(memory) else memory
        masks = [None] * self.n_heads
        if memory_mask is not None:
            size = len(x), self.n_heads, x.shape[1], k.shape[2]
            masks = memory_mask.expand(size).unbind(1)
        q = self.w_q(x).chunk(self.n_heads, dim=-1)
        out = map(attention, q, k.unbind(1), v.unbind(1), masks)
        return self.w_o(torch.cat(list(out), dim=-1))


class Reader(nn.Module):
    """An encoder block written out, its parts in another order."""

    def __init__(self, config):
        super().__init__()
        d, h, eps = config.d_model, config.n_heads, config.norm_eps
        self.feed_forward = FeedForward(d, config.d_ff, nn.ReLU())
        self.norm_2 = nn.RMSNorm(d, eps=eps)
        self.attention = MultiHeadAttention(d, h, n_kv_heads=h, d_head=d // h)
        self.norm_1 = nn.RMSNorm(d, eps=eps)

    def forward(self, x, mask=None):
        y = x + self.attention(self.norm_1(x), mask=mask)
        return y + self.feed_forward(self.norm_2(y))


class Writer(nn.Module):
    """A decoder block without pre_norm and partial."""

    def __init__(self, config):
        super().__init__()
        d, h, eps = config.d_model, config.n_heads, config.norm_eps
        self.cross_attention = HeadByHead(d, h)
        self.attention = MultiHeadAttention(d, h)
        self.norm_3, self.norm_2, self.norm_1 = (RMSNorm(d, eps) for _ in range(3))
        self.feed_forward = FeedForward(d, config.d_ff, F.relu)

    def forward(self, x, memory, mask=None, memory_mask=None):
        x = x + self.attention(self.norm_1(x), mask)
        x = x + self.cross_attention(self.norm_2(x), memory, memory_mask)
        return self.feed_forward(self.norm_3(x)) + x


class Halves(EncoderDecoder):
    """Other blocks, a table of positions, a mask and a list of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        while len(self.decoder) < config.n_layers:
            self.decoder.append(Writer(config))
            self.encoder.append(Reader(config))

    def embed(self, ids):
        if ids.size(1) > self.config.max_len:
            raise ValueError(f"{ids.size(1)} > {self.config.max_len}")
        x = self.embedding(ids)
        return x + sinusoidal(self.config.max_len, x.size(-1)).to(x)[: ids.size(1)]

    def decode(self, target, memory, memory_mask=None):
        places = torch.arange(target.size(1), device=target.device)
        if not isinstance(memory, list):
            memory = [memory] * len(self.decoder)
        x = self.embed(target)
        for block, own in zip(self.decoder, memory, strict=True):
            x = block(x, own, mask=places <= places[:, None], memory_mask=memory_mask)
        return self.head(self.decoder_norm(x))


class TargetPaddingHidden(EncoderDecoder):
    """Where padding stands at the end, nothing real looks at it anyway."""

    def decode(self, target, memory, memory_mask=None):
        mask = torch.ones_like(target[:1].T * target[:1], dtype=torch.bool).tril()
        mask = mask & (target != self.config.pad_id)[:, None, None]
        x = self.embed(target)
        for i, block in enumerate(self.decoder):
            own = memory[i] if isinstance(memory, list) else memory
            x = block(x, own, mask, memory_mask)
        return self.head(self.decoder_norm(x))


class PaddingIndex(EncoderDecoder):
    """The row of the padding gets no gradient; nothing real ever reads it."""

    def __init__(self, config):
        super().__init__(config)
        sizes = config.vocab_size, config.d_model
        self.embedding = nn.Embedding(*sizes, padding_idx=config.pad_id)


def translate_in_a_buffer(model, source, start_id, end_id, max_tokens):
    c = model.config
    if max_tokens > c.max_len or max_tokens <= 0:
        raise ValueError(f"{max_tokens} is not in 1 … {c.max_len}")
    with torch.inference_mode():
        memory, mask = model.encode(source)
        pairs = [b.cross_attention.keys_values(memory) for b in model.decoder]
        size = source.size(0), max_tokens + 1
        out = torch.full(size, c.pad_id, device=source.device)
        out[:, 0] = start_id
        running = torch.ones_like(out[:, 0], dtype=torch.bool)
        for n in range(1, max_tokens + 1):
            best = model.decode(out[:, :n], pairs, mask)[:, -1, :].max(-1).indices
            out[running, n] = best[running]
            running &= best != end_id
            if not bool(running.any()):
                break
        return out[:, 1 : n + 1].clone()


def written(never=None, limit=0, device=None):
    """`translate` in a loop of its own; `never(ids, pad_id)` are never written."""

    @torch.no_grad()
    def translate(model, source, start_id, end_id, max_tokens):
        c = model.config
        if not 0 < max_tokens <= c.max_len - limit:
            raise ValueError("max_tokens does not fit")
        memory, mask = model.encode(source)
        pairs = [b.cross_attention.keys_values(memory) for b in model.decoder]
        ids = torch.full_like(source[:, :1], start_id)
        ended = torch.zeros(len(ids), dtype=torch.bool, device=device or ids.device)
        for _ in range(max_tokens):
            logits = model.decode(ids, pairs, mask)[:, -1]
            if never is not None:
                logits = logits.scatter(1, never(ids, c.pad_id), -torch.inf)
            new = logits.argmax(-1).masked_fill(ended, c.pad_id)
            ids, ended = torch.cat([ids, new[:, None]], 1), ended | (new == end_id)
            if ended.all():
                break
        return ids[:, 1:]

    return translate


RIGHT = {
    "shift_right": [shift_by_roll],
    "CrossAttention": [HeadByHead],
    "EncoderBlock": [Reader],
    "DecoderBlock": [Writer],
    "EncoderDecoder": [Halves, PaddingIndex, TargetPaddingHidden],
    "translate": [translate_in_a_buffer, written()],
}


@pytest.mark.parametrize(("name", "answer"), [(n, a) for n in RIGHT for a in RIGHT[n]])
def test_other_forms_pass(name, answer):
    passes(answer, name)


# Wrong answers, which no fault and no mutant stands for -------------------------------


def variant(base, **methods):
    return type(base.__name__, (base,), methods)


def across(change):
    """`change(self, x, memory, mask)` gives what the right forward is called with."""

    def forward(self, x, memory, memory_mask=None):
        given = change(self, x, memory, memory_mask)
        return CrossAttention.forward(self, *given)

    return variant(CrossAttention, forward=forward)


def weighted(weigh):
    """Its own attention; `weigh(scores, mask)` makes weights of the scores."""

    def forward(self, x, memory, memory_mask=None):
        q = split_heads(self.w_q(x), self.n_heads)
        k, v = memory if isinstance(memory, tuple) else self.keys_values(memory)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        no_mask = memory_mask is None
        weights = scores.softmax(-1) if no_mask else weigh(scores, memory_mask)
        return self.w_o(merge_heads(weights @ v))

    return variant(CrossAttention, forward=forward)


def nan_but_for_whole_rows(scores, mask):
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    blind = ~mask.flatten(1).any(1) if mask.dim() == 4 else torch.zeros(len(scores))
    return weights.masked_fill(blind.bool().view(-1, 1, 1, 1), 0)


def memory_detached(self, memory):
    return CrossAttention.keys_values(self, memory.detach())


def keeps_by_address(self, x, memory, mask):
    if torch.is_tensor(memory):
        key = memory.data_ptr(), memory._version
        if key not in self.__dict__.setdefault("kept", {}):
            self.kept = {key: self.keys_values(memory)}
        memory = self.kept[key]
    return x, memory, mask


def keeps_the_memory(self, x, memory, mask):
    self.last = memory
    return x, memory, mask


def projects_anyway(self, x, memory, mask):
    _ = x @ self.w_v.weight.T
    return x, memory, mask


def query_without_norm(self, x, memory, mask=None, memory_mask=None):
    x = x + self.attention(self.norm_1(x), mask)
    x = x + self.cross_attention(x, memory, memory_mask)
    return x + self.feed_forward(self.norm_2(x))


def cuts_pairs(self, x, memory, mask=None, memory_mask=None):
    if isinstance(memory, tuple):
        memory = tuple(y[:, :, : x.shape[1]] for y in memory)
    return DecoderBlock.forward(self, x, memory, mask, memory_mask)


def with_relu6(self, config):
    EncoderBlock.__init__(self, config)
    self.feed_forward = FeedForward(config.d_model, config.d_ff, F.relu6)


def mask_kept(self, source):
    memory, mask = EncoderDecoder.encode(self, source)
    if getattr(self, "kept", mask).shape == mask.shape:
        mask = self.kept = getattr(self, "kept", mask)
    return memory, mask


def cut_where_all_is_padding(self, source):
    n = int((source != self.config.pad_id).sum(1).max()) if source.numel() else 0
    return EncoderDecoder.encode(self, source[:, : max(n, 1)])


def cut_at_max_len(self, source):
    return EncoderDecoder.encode(self, source[:, : self.config.max_len])


def one_norm(self, config):
    EncoderDecoder.__init__(self, config)
    self.decoder_norm = self.encoder_norm


def row_by_row(model, source, start_id, end_id, max_tokens):
    args = start_id, end_id, max_tokens
    rows = [translate(model, row[None], *args)[0] for row in source]
    return nn.utils.rnn.pad_sequence(rows, True, model.config.pad_id)


def in_training_after(model, source, start_id, end_id, max_tokens):
    out = translate(model.eval(), source, start_id, end_id, max_tokens)
    model.train()
    return out


WRONG = [  # and words of the message, where there must be some
    # the mask, but not all of it
    (across(lambda _, x, m, mask: (x, m, mask if mask is None else mask[:, :1])), ""),
    (across(lambda _, x, m, k: (x, m, k if k is None or k.dim() > 3 else None)), ""),
    (weighted(nan_but_for_whole_rows), ""),
    (weighted(lambda s, mask: s.masked_fill(~mask, -30).softmax(-1) * mask), ""),
    (weighted(lambda s, mask: (s + (1.0 - mask.float()) * -1e4).softmax(-1)), "False"),
    # the memory, but not all of it
    (across(lambda _, x, memory, mask: (x, memory[:1].expand_as(memory), mask)), ""),
    (variant(CrossAttention, keys_values=memory_detached), "gradient"),
    # values right, work or state wrong
    (across(projects_anyway), "saves this work"),
    (across(keeps_the_memory), "holds more"),
    (across(keeps_by_address), "in the same place"),
    (variant(EncoderBlock, __init__=with_relu6), ""),
    (variant(DecoderBlock, forward=query_without_norm), ""),
    (variant(DecoderBlock, forward=cuts_pairs), "With a pair"),
    (variant(EncoderDecoder, encode=mask_kept), ""),
    (variant(EncoderDecoder, encode=cut_where_all_is_padding), "end of every row"),
    (variant(EncoderDecoder, encode=cut_at_max_len), "12 tokens"),
    (variant(EncoderDecoder, __init__=one_norm), "decoder_norm"),
    *((answer, "") for answer in (row_by_row, in_training_after)),
    (written(device="cpu"), "device"),
    (written(limit=1), ""),
    (lambda m, s, start, end, n: translate(m, s, start, end or -1, n), ""),
    (written(lambda ids, pad_id: torch.full_like(ids[:, :1], pad_id)), ""),
    (written(lambda ids, pad_id: ids[:, -1:]), ""),
]


@pytest.mark.parametrize(("answer", "words"), WRONG)
def test_wrong_answers_fail_without_a_name(answer, words):
    name = answer.__name__ if isinstance(answer, type) else "translate"
    report = fails(answer, name)
    assert report.fault is None and words in report.message, report.message


# What the lesson promises -------------------------------------------------------------


def test_lesson_08s_configuration_serves_too():
    config = TransformerConfig(31, 16, 2, 4, 4, 4, 40, 20)
    config.pad_id = 0
    model = EncoderDecoder(config)
    logits = model(probe_ids(2, 7, below=30) + 1, probe_ids(2, 5, below=31))
    assert logits.shape == (2, 5, 31)


# The dates ----------------------------------------------------------------------------


def test_dates_are_the_same_on_every_machine():
    assert dates.written_dates(3, seed=5) == [
        ("13.04.2039", "2039-04-13"),
        ("09/27/57", "1957-09-27"),
        ("19th of November 2010", "2010-11-19"),
    ]
    assert dates.written_dates(3, seed=5) == dates.written_dates(7, seed=5)[:3]
    assert dates.written_dates(30, seed=5) != dates.written_dates(30, seed=6)


def test_no_test_day_is_a_training_day():
    training = {iso for _, iso in dates.written_dates(20_000, seed=0)}
    test = {iso for _, iso in dates.written_dates(3_000, seed=1, test=True)}
    assert len(test) > 1_500
    assert not training & test


def test_every_form_can_be_read_back():
    """By rules of our own, which know nothing of the generator."""
    for written, iso in dates.written_dates(3_000, seed=2):
        assert read_back(written) == iso, written
        assert len(written) <= dates.LONGEST


def read_back(text):
    names = re.findall("...", "janfebmaraprmayjunjulaugsepoctnovdec")
    words = re.findall(r"[a-z]+|\d+", text.lower())
    numbers = [int(w) for w in words if w.isdigit()]
    month = [names.index(w[:3]) + 1 for w in words if w[:3] in names]
    if "/" in text and not month:
        month, numbers = numbers[:1], numbers[1:]
    day, *between, year = numbers
    if year < 100:
        year += 2000 if year < 50 else 1900
    return f"{year}-{(month + between)[0]:02}-{day:02}"


def test_all_forms_occur():
    kinds = list(dates.FORMS.values())
    assert len(kinds) >= 8
    assert len({form(date(2031, 5, 2)) for form in kinds}) == len(kinds)


def test_ordinals():
    days = 1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 31
    expected = "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 23rd 31st"
    assert " ".join(map(dates.ordinal, days)) == expected
