"""Lesson 13: against PyTorch and transformers; other forms; wrong ones; the dates."""

import re
from datetime import date

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solutions.attention import attention, padding_mask
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


def filled(module, seed=0):
    """Values that are no starting values, norms away from one."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            is_norm = p.dim() == 1
            scale = 0.3 if is_norm else p.shape[-1] ** -0.5
            p.copy_(probe(*p.shape, seed=seed + i, scale=scale, shift=float(is_norm)))
    return module.eval()


def weights_of(model):
    return {n.removesuffix(".weight"): p.detach() for n, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("c", SIZES)
def test_logits_are_those_of_nn_transformer(c):
    model = filled(EncoderDecoder(c))
    source = spec.sources([9, 1, 4, 7], c, seed=3)
    target = probe_ids(4, 6, below=c.vocab_size, seed=4)
    theirs = nn.Transformer(
        *(c.d_model, c.n_heads, c.n_layers, c.n_layers, c.d_ff),
        **(spec.OPTIONS | dict(dtype=torch.float32)),
    )
    oracle = spec.Oracle(weights_of(model), c).float()
    theirs.encoder.layers, theirs.encoder.norm = oracle.encoder, oracle.encoder_norm
    theirs.decoder.layers, theirs.decoder.norm = oracle.decoder, oracle.decoder_norm
    padding = source == c.pad_id
    with torch.no_grad():
        hidden = theirs(
            model.embed(source),
            model.embed(target),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(6),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        error = (model.head(hidden) - model(source, target)).abs().max().item()
    assert error <= 1e-5


@pytest.mark.parametrize("n_heads", [1, 3, 6])
def test_cross_attention_is_nn_multihead_attention(n_heads):
    ours = filled(CrossAttention(12, n_heads))
    theirs = nn.MultiheadAttention(12, n_heads, bias=False, batch_first=True)
    spec.fill_attention(theirs, weights_of(ours))
    x, memory = probe(3, 5, 12), probe(3, 8, 12, seed=1)
    mask = padding_mask(torch.tensor([8, 2, 5]), 8)
    hidden = ~mask[:, 0, 0]
    expected, weights = theirs(x, memory, memory, key_padding_mask=hidden)
    assert weights.shape == (3, 5, 8)
    torch.testing.assert_close(ours(x, memory, mask), expected, atol=1e-5, rtol=0)


def as_t5(w_q, n_heads):
    """T5 does not divide its scores: the root of d_head goes into the queries."""
    return w_q / (len(w_q) // n_heads) ** 0.5


def t5_config(c):
    from transformers import T5Config

    return T5Config(
        vocab_size=c.vocab_size,
        d_model=c.d_model,
        d_kv=c.d_model // c.n_heads,
        d_ff=c.d_ff,
        num_layers=c.n_layers,
        num_heads=c.n_heads,
        dropout_rate=0.0,
        layer_norm_epsilon=c.norm_eps,
        feed_forward_proj="relu",
        pad_token_id=c.pad_id,
        decoder_start_token_id=0,
        tie_word_embeddings=False,
    )


@pytest.mark.parametrize("c", SIZES)
def test_the_whole_model_is_t5_without_its_relative_positions(c):
    from transformers import T5ForConditionalGeneration

    ours = filled(EncoderDecoder(c))
    theirs = T5ForConditionalGeneration(t5_config(c)).eval()
    new = {
        "shared.weight": ours.embedding.weight,
        "encoder.embed_tokens.weight": ours.embedding.weight,
        "decoder.embed_tokens.weight": ours.embedding.weight,
        "encoder.final_layer_norm.weight": ours.encoder_norm.weight,
        "decoder.final_layer_norm.weight": ours.decoder_norm.weight,
        "lm_head.weight": ours.head.weight,
    }
    for half in ("encoder", "decoder"):
        bias = f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        new[bias] = torch.zeros_like(theirs.state_dict()[bias])
        for i, block in enumerate(getattr(ours, half)):
            kinds = [("SelfAttention", block.attention, block.norm_1)]
            if half == "decoder":
                kinds.append(("EncDecAttention", block.cross_attention, block.norm_2))
            for j, (kind, own, norm) in enumerate(kinds):
                to = f"{half}.block.{i}.layer.{j}."
                new[f"{to}layer_norm.weight"] = norm.weight
                new[f"{to}{kind}.q.weight"] = as_t5(own.w_q.weight, c.n_heads)
                for w, letter in (("w_k", "k"), ("w_v", "v"), ("w_o", "o")):
                    new[f"{to}{kind}.{letter}.weight"] = getattr(own, w).weight
            last = f"{half}.block.{i}.layer.{len(kinds)}."
            norm = block.norm_3 if half == "decoder" else block.norm_2
            new[f"{last}layer_norm.weight"] = norm.weight
            dense = f"{last}DenseReluDense."
            new[f"{dense}wi.weight"] = block.feed_forward.w_1.weight
            new[f"{dense}wo.weight"] = block.feed_forward.w_2.weight
    theirs.load_state_dict({n: w.detach() for n, w in new.items()}, strict=True)
    source = spec.sources([9, 1, 4, 7], c, seed=3)
    target = probe_ids(4, 6, below=c.vocab_size, seed=4)
    with torch.no_grad():
        expected = theirs(
            inputs_embeds=ours.embed(source),
            attention_mask=(source != c.pad_id).long(),
            decoder_inputs_embeds=ours.embed(target),
        ).logits
        error = (ours(source, target) - expected).abs().max().item()
    assert error <= 1e-5


def test_shift_right_is_that_of_t5():
    from transformers import T5ForConditionalGeneration

    ids = probe_ids(3, 5, below=31, seed=2)
    theirs = T5ForConditionalGeneration(t5_config(SIZES[0]))._shift_right(ids)
    assert torch.equal(shift_right(ids, 0), theirs)


# Right answers in other forms ---------------------------------------------------------


def shift_by_roll(ids, start_id):
    out = ids.roll(1, dims=1)
    out[:, 0] = start_id
    return out


def shift_by_pad(ids, start_id):
    return F.pad(ids[:, :-1], (1, 0), value=start_id)


def shift_into_empty(ids, start_id):
    out = torch.empty_like(ids)
    out[:, :1] = start_id
    out[:, 1:] = ids[:, :-1]
    return out


def shift_by_new_full(ids, start_id):
    return torch.hstack([ids.new_full((ids.size(0), 1), start_id), ids[..., :-1]])


@pytest.mark.parametrize(
    "answer",
    [shift_by_roll, shift_by_pad, shift_into_empty, shift_by_new_full],
)
def test_shift_right_in_other_forms(answer):
    passes(answer, "shift_right")


class HeadByHead(nn.Module):
    """A loop over heads, the matrices made in another order."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        if d_model % n_heads != 0:
            raise ValueError(f"{n_heads} heads do not divide {d_model}")
        self.h, self.d = n_heads, d_model // n_heads
        for name in ("w_o", "w_v", "w_k", "w_q"):
            setattr(self, name, nn.Linear(d_model, d_model, bias=False))

    def keys_values(self, memory):
        return [
            torch.stack(w(memory).split(self.d, dim=-1), dim=1)
            for w in (self.w_k, self.w_v)
        ]

    def forward(self, x, memory, memory_mask=None):
        if not torch.is_tensor(memory):
            k, v = memory
        else:
            k, v = self.keys_values(memory)
        q = self.w_q(x)
        b, t, s = len(x), x.shape[1], k.shape[2]
        if memory_mask is not None:
            memory_mask = memory_mask.expand(b, self.h, t, s)
        out = []
        for h in range(self.h):
            asking = q[..., h * self.d : (h + 1) * self.d]
            mask = None if memory_mask is None else memory_mask[:, h]
            out.append(attention(asking, k[:, h], v[:, h], mask))
        return self.w_o(torch.cat(out, dim=-1))


class ByEinsum(nn.Module):
    """Sums by name, an additive mask, zeros by multiplication."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"{d_model}, {n_heads}")
        self.n_heads = n_heads
        self.w_q, self.w_k, self.w_v, self.w_o = (
            nn.Linear(d_model, d_model, False) for _ in range(4)
        )

    def cut(self, y):
        return y.reshape(y.shape[0], y.shape[1], self.n_heads, -1).permute(0, 2, 1, 3)

    def keys_values(self, memory):
        return self.cut(self.w_k(memory)), self.cut(self.w_v(memory))

    def forward(self, x, memory, memory_mask=None):
        k, v = memory if isinstance(memory, (tuple, list)) else self.keys_values(memory)
        q = self.cut(self.w_q(x))
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) * q.shape[-1] ** -0.5
        seen = 1.0
        if memory_mask is not None:
            seen = memory_mask.any(-1, keepdim=True).to(x.dtype)
            low = torch.finfo(scores.dtype).min
            scores = torch.where(memory_mask, scores, low)
        out = torch.einsum("bhts,bhsd->bthd", scores.softmax(-1) * seen, v)
        return self.w_o(out.flatten(2))


class ByLibrary(CrossAttention):
    """PyTorch's own function, which gives zeros where nothing is seen."""

    def forward(self, x, memory, memory_mask=None):
        pair = memory if isinstance(memory, tuple) else self.keys_values(memory)
        q = split_heads(self.w_q(x), self.n_heads)
        if memory_mask is not None:  # it takes no mask of one dimension
            memory_mask = torch.atleast_2d(memory_mask)
        out = F.scaled_dot_product_attention(q, *pair, attn_mask=memory_mask)
        return self.w_o(merge_heads(out))


class Reader(nn.Module):
    """An encoder block written out, its parts in another order."""

    def __init__(self, config):
        super().__init__()
        self.feed_forward = FeedForward(config.d_model, config.d_ff, nn.ReLU())
        self.norm_2 = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = MultiHeadAttention(
            config.d_model,
            config.n_heads,
            n_kv_heads=config.n_heads,
            d_head=config.d_model // config.n_heads,
        )
        self.norm_1 = nn.RMSNorm(config.d_model, eps=config.norm_eps)

    def forward(self, x, mask=None):
        y = x + self.attention(self.norm_1(x), mask=mask)
        return y + self.feed_forward(self.norm_2(y))


class SelfByCross(EncoderBlock):
    """Attention to itself, by a `CrossAttention` whose memory is x."""

    def __init__(self, config):
        super().__init__(config)
        self.attention = CrossAttention(config.d_model, config.n_heads)

    def forward(self, x, mask=None):
        y = self.norm_1(x)
        x = x + self.attention(y, y, mask)
        return x + self.feed_forward(self.norm_2(x))


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


class Halves(nn.Module):
    """The model with its steps written out and other ways of testing the source."""

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.decoder, self.encoder = nn.ModuleList(), nn.ModuleList()
        while len(self.decoder) < c.n_layers:
            self.decoder.append(Writer(c))
            self.encoder.append(Reader(c))
        self.encoder_norm = nn.RMSNorm(c.d_model, c.norm_eps)
        self.decoder_norm = nn.RMSNorm(c.d_model, c.norm_eps)
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)

    def embed(self, ids):
        if ids.size(1) > self.config.max_len:
            raise ValueError(f"{ids.size(1)} > {self.config.max_len}")
        table = sinusoidal(self.config.max_len, self.config.d_model).to(ids.device)
        x = F.embedding(ids, self.embedding.weight)
        return x + table[: ids.size(1)].to(x.dtype)

    def encode(self, source):
        lengths = source.ne(self.config.pad_id).sum(1)
        if source.size(1) == 0:
            raise ValueError("no source")
        for row, n in enumerate(lengths.tolist()):
            if n == 0:
                raise ValueError(f"nothing in row {row}")
        mask = source.ne(self.config.pad_id).reshape(len(source), 1, 1, -1)
        x = self.embed(source)
        for block in self.encoder:
            x = block(x, mask)
        return self.encoder_norm(x), mask

    def decode(self, target, memory, memory_mask=None):
        t = target.size(1)
        places = torch.arange(t, device=target.device)
        back = places[None, :] <= places[:, None]
        if not isinstance(memory, list):
            memory = [memory] * len(self.decoder)
        x = self.embed(target)
        for block, own in zip(self.decoder, memory, strict=True):
            x = block(x, own, mask=back, memory_mask=memory_mask)
        return self.head(self.decoder_norm(x))

    def forward(self, source, target):
        return self.decode(target, *self.encode(source))


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
        out = torch.full(
            (source.size(0), max_tokens + 1), c.pad_id, device=source.device
        )
        out[:, 0] = start_id
        running = torch.ones(source.size(0), dtype=torch.bool, device=source.device)
        for n in range(1, max_tokens + 1):
            best = model.decode(out[:, :n], pairs, mask)[:, -1, :].max(-1).indices
            out[running, n] = best[running]
            running &= best != end_id
            if not bool(running.any()):
                break
        return out[:, 1 : n + 1].clone()


def translate_with_lists(model, source, start_id, end_id, max_tokens):
    if not 0 < max_tokens <= model.config.max_len:
        raise ValueError(f"{max_tokens}, at most {model.config.max_len}")
    with torch.no_grad():
        memory, mask = model.encode(source)
        pairs = [b.cross_attention.keys_values(memory) for b in model.decoder]
        rows = [[start_id] for _ in source]
        done = [False] * len(rows)
        for _ in range(max_tokens):
            seen = torch.tensor(rows, device=source.device)
            logits = model.decode(seen, pairs, memory_mask=mask)
            for i, row in enumerate(rows):
                row.append(
                    model.config.pad_id if done[i] else int(logits[i, -1].argmax())
                )
                done[i] = done[i] or row[-1] == end_id
            if all(done):
                break
    return torch.tensor([row[1:] for row in rows], device=source.device)


def translate_in_eval_mode(model, source, start_id, end_id, max_tokens):
    """Another message, and a mode that is put back."""
    if max_tokens < 1 or max_tokens > model.config.max_len:
        raise ValueError(f"max_tokens may not be {max_tokens}")
    mode = model.training
    model.eval()
    try:
        return translate(model, source, start_id, end_id, max_tokens)
    finally:
        model.train(mode)


def written(order="right", choose=lambda logits, *_: logits, limit=0, device=None):
    """`translate` in a loop of its own; `choose` changes the logits."""

    @torch.no_grad()
    def translate(model, source, start_id, end_id, max_tokens):
        c = model.config
        if not 0 < max_tokens <= c.max_len - limit:
            raise ValueError("max_tokens does not fit")
        memory, mask = model.encode(source)
        pairs = [b.cross_attention.keys_values(memory) for b in model.decoder]
        ids = torch.full_like(source[:, :1], start_id)
        ended = torch.zeros(len(ids), dtype=torch.bool, device=device or ids.device)
        for n in range(1, max_tokens + 1):
            logits = model.decode(ids, pairs, mask)[:, -1].clone()
            new = choose(logits, ids, c.pad_id, end_id, n == max_tokens).argmax(-1)
            if order == "wrong":
                ended = ended | (new == end_id)
            new = new.masked_fill(ended, c.pad_id)
            ids, ended = torch.cat([ids, new[:, None]], 1), ended | (new == end_id)
            if ended.all():
                break
        return ids[:, 1:]

    return translate


RIGHT = {
    "shift_right": [shift_by_roll, shift_by_pad, shift_into_empty, shift_by_new_full],
    "CrossAttention": [HeadByHead, ByEinsum, ByLibrary],
    "EncoderBlock": [Reader, SelfByCross],
    "DecoderBlock": [Writer],
    "EncoderDecoder": [Halves, PaddingIndex, TargetPaddingHidden],
    "translate": [
        translate_in_a_buffer,
        translate_with_lists,
        translate_in_eval_mode,
        written(choose=lambda logits, *_: logits.softmax(-1)),
    ],
}


@pytest.mark.parametrize(("name", "answer"), [(n, a) for n in RIGHT for a in RIGHT[n]])
def test_other_forms_pass(name, answer):
    passes(answer, name)


# Wrong answers ------------------------------------------------------------------------


def variant(base, **methods):
    return type(base.__name__, (base,), methods)


def cross(change):
    """`change(x, memory, mask)` gives what the right forward is called with."""
    return variant(
        CrossAttention,
        forward=lambda self, x, memory, memory_mask=None: CrossAttention.forward(
            self, *change(self, x, memory, memory_mask)
        ),
    )


def weighted(weigh):
    """Its own attention; `weigh(scores, mask)` makes weights of the scores."""

    def forward(self, x, memory, memory_mask=None):
        q = split_heads(self.w_q(x), self.n_heads)
        k, v = memory if isinstance(memory, tuple) else self.keys_values(memory)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = scores.softmax(-1)
        if memory_mask is not None:
            weights = weigh(scores, memory_mask)
        return self.w_o(merge_heads(weights @ v))

    return variant(CrossAttention, forward=forward)


def nan_but_for_whole_rows(scores, mask):
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    blind = ~mask.flatten(1).any(1) if mask.dim() == 4 else torch.zeros(len(scores))
    return weights.masked_fill(blind.bool().view(-1, 1, 1, 1), 0)


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


WRONG_CROSS = [
    # the mask, but not all of it
    (
        cross(lambda self, x, m, mask: (x, m, mask if mask is None else mask[:, :1])),
        None,
    ),
    (
        cross(
            lambda self, x, m, k: (x, m, k if k is not None and k.dim() > 3 else None)
        ),
        None,
    ),
    (weighted(nan_but_for_whole_rows), None),
    (
        weighted(
            lambda scores, mask: scores.masked_fill(~mask, -30).softmax(-1) * mask
        ),
        None,
    ),
    (weighted(lambda scores, mask: (scores * mask).softmax(-1)), "hidden_scores_are_0"),
    (
        weighted(
            lambda scores, mask: (scores + (1.0 - mask.float()) * -1e4).softmax(-1)
        ),
        "large_number_added",
    ),
    # the memory, but not all of it
    (cross(lambda self, x, m, mask: (x, m[:1].expand_as(m), mask)), None),
    (
        variant(
            CrossAttention,
            keys_values=lambda self, m: CrossAttention.keys_values(self, m.detach()),
        ),
        None,
    ),
    # values right, work or state wrong
    (cross(projects_anyway), None),
    (cross(keeps_the_memory), None),
    (cross(keeps_by_address), None),
]


@pytest.mark.parametrize(("answer", "fault"), WRONG_CROSS)
def test_wrong_cross_attentions_fail(answer, fault):
    fails(answer, "CrossAttention", fault)


def decoder(step):
    """A decoder block whose stream after looking back goes through `step`."""

    def forward(self, x, memory, mask=None, memory_mask=None):
        x = x + self.attention(self.norm_1(x), mask)
        return step(self, x, lambda y: self.cross_attention(y, memory, memory_mask))

    return variant(DecoderBlock, forward=forward)


def query_without_norm(self, x, across):
    x = x + across(x)
    return x + self.feed_forward(self.norm_3(x))


def query_without_norm_and_norm_2_last(self, x, across):
    x = x + across(x)
    return x + self.feed_forward(self.norm_2(x))


def relu6(base):
    def init(self, config):
        base.__init__(self, config)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, F.relu6)

    return variant(base, __init__=init)


def cuts_pairs(self, x, memory, mask=None, memory_mask=None):
    if isinstance(memory, tuple):
        memory = tuple(y[:, :, : x.shape[1]] for y in memory)
    return DecoderBlock.forward(self, x, memory, mask, memory_mask)


def memory_detached(self, x, memory, mask=None, memory_mask=None):
    memory = memory.detach() if torch.is_tensor(memory) else memory
    return DecoderBlock.forward(self, x, memory, mask, memory_mask)


def test_wrong_blocks_fail():
    fails(relu6(EncoderBlock), "EncoderBlock")
    fails(relu6(DecoderBlock), "DecoderBlock")
    fails(variant(DecoderBlock, forward=cuts_pairs), "DecoderBlock")
    fails(variant(DecoderBlock, forward=memory_detached), "DecoderBlock")
    name = "queries_not_normalised"
    fails(decoder(query_without_norm), "DecoderBlock", name)
    report = fails(decoder(query_without_norm_and_norm_2_last), "DecoderBlock")
    assert report.fault is None


def model(**methods):
    return variant(EncoderDecoder, **methods)


def mask_kept(self, source):
    memory, mask = EncoderDecoder.encode(self, source)
    if getattr(self, "kept", mask).shape == mask.shape:
        mask = self.kept = getattr(self, "kept", mask)
    return memory, mask


def cut_where_all_is_padding(self, source):
    n = int((source != self.config.pad_id).sum(1).max()) if source.numel() else 0
    return EncoderDecoder.encode(self, source[:, : max(n, 1)])


def names_row_1(self, source):
    if source.numel() and not (source != self.config.pad_id).any(1).all():
        raise ValueError("row 1 is padding")
    return EncoderDecoder.encode(self, source)


def positions_on_the_cpu(self, ids):
    EncoderDecoder.embed(self, ids)
    x = self.embedding(ids)
    return x + sinusoidal(ids.shape[1], x.shape[-1])


def pairs_reversed(self, target, memory, memory_mask=None):
    memory = memory[::-1] if isinstance(memory, list) else memory
    return EncoderDecoder.decode(self, target, memory, memory_mask)


def one_norm(self, config):
    EncoderDecoder.__init__(self, config)
    self.decoder_norm = self.encoder_norm


def one_block(self, config):
    EncoderDecoder.__init__(self, config)
    self.encoder = nn.ModuleList([EncoderBlock(config)] * config.n_layers)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (model(encode=mask_kept), ""),
        (model(encode=cut_where_all_is_padding), "end of every row"),
        (model(encode=names_row_1), "should name 2"),
        (
            model(
                encode=lambda self, source: EncoderDecoder.encode(
                    self, source[:, : self.config.max_len]
                )
            ),
            "12 tokens",
        ),
        (model(embed=positions_on_the_cpu), "device"),
        (model(decode=pairs_reversed), ""),
        (model(__init__=one_norm), "one object"),
        (model(__init__=one_block), "makes one object"),
    ],
)
def test_wrong_models_fail(answer, words):
    assert words in fails(answer, "EncoderDecoder").message


def row_by_row(model, source, start_id, end_id, max_tokens):
    args = start_id, end_id, max_tokens
    rows = [translate(model, row[None], *args)[0] for row in source]
    return nn.utils.rnn.pad_sequence(rows, True, model.config.pad_id)


def in_training_after(model, source, start_id, end_id, max_tokens):
    out = translate(model.eval(), source, start_id, end_id, max_tokens)
    model.train()
    return out


def into_a_table(model, source, start_id, end_id, max_tokens):
    ids = translate(model, source, start_id, end_id, max_tokens)
    return F.pad(ids, (0, max_tokens - ids.shape[1]), value=model.config.pad_id)


def limit_of_the_source(model, source, start_id, end_id, max_tokens):
    if max_tokens > source.shape[1]:
        raise ValueError(f"{max_tokens} is more than {source.shape[1]}")
    return translate(model, source, start_id, end_id, max_tokens)


def without(which):
    """The tokens that `which(ids, pad_id)` names are never written."""
    return written(
        choose=lambda logits, ids, pad_id, *_: logits.scatter(
            1, which(ids, pad_id), -torch.inf
        )
    )


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (written(order="wrong"), "end_overwritten"),
        (into_a_table, "never_stops"),
        (written(device="cpu"), None),
        (written(limit=1), None),
        (limit_of_the_source, None),
        (row_by_row, None),
        (in_training_after, None),
        (lambda m, s, start, end, n: translate(m, s, start, end or -1, n), None),
        (without(lambda ids, pad_id: torch.full_like(ids[:, :1], pad_id)), None),
        (without(lambda ids, pad_id: ids[:, -1:]), None),
    ],
)
def test_wrong_translations_fail(answer, fault):
    report = fails(answer, "translate")
    assert report.fault == fault, report.message
    assert "middle" not in report.message


# What the lesson promises -------------------------------------------------------------


def test_lesson_08s_configuration_serves_too():
    config = TransformerConfig(31, 16, 2, 4, 4, 4, 40, 20)
    config.pad_id = 0
    model = EncoderDecoder(config)
    assert model(probe_ids(2, 7, below=30) + 1, probe_ids(2, 5, below=31)).shape == (
        *(2, 5),
        31,
    )


def test_a_small_model_learns_to_copy():
    torch.manual_seed(0)
    c = spec.Sizes(10, 32, 1, 4, 64, 12)
    model = EncoderDecoder(c)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(250):
        ids = torch.randint(3, 10, (32, 6), generator=generator)
        logits = model(ids, shift_right(ids, 1))
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ids = torch.randint(3, 10, (50, 6), generator=generator)
    assert (translate(model, ids, 1, 2, 6) == ids).float().mean() > 0.9


# The dates ----------------------------------------------------------------------------


EXPECTED = [
    ("13.04.2039", "2039-04-13"),
    ("09/27/57", "1957-09-27"),
    ("19th of November 2010", "2010-11-19"),
]


def test_dates_are_the_same_on_every_machine():
    assert dates.written_dates(3, seed=5) == EXPECTED
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
    month = [names.index(w[:3]) + 1 for w in words if w[:3] in names]
    numbers = [w for w in words if w.isdigit()]
    if month:
        day, year = numbers
        month = month[0]
    elif "/" in text:
        month, day, year = numbers
    else:
        day, month, year = numbers
    year = int(year)
    if year < 100:
        year += 2000 if year < 50 else 1900
    return f"{year}-{int(month):02}-{int(day):02}"


def test_all_forms_occur():
    kinds = list(dates.FORMS.values())
    assert len(kinds) >= 8
    one = date(2031, 5, 2)
    possible = {form(one) for form in kinds}
    assert len(possible) == len(kinds)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        *((1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th")),
        *((13, "13th"), (21, "21st"), (22, "22nd"), (23, "23rd"), (31, "31st")),
    ],
)
def test_ordinals(n, text):
    assert dates.ordinal(n) == text
