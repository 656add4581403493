"""Lesson 08: against transformers; right answers in other forms; wrong ones."""

import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from solutions.attention import causal_mask
from solutions.feed_forward import FeedForward, SwiGLU, gelu
from solutions.forward_pass import (
    Block,
    Transformer,
    TransformerConfig,
    count_parameters,
    forward_flops,
    generate,
    sample,
    training_flops,
)
from solutions.multi_head import MultiHeadAttention
from solutions.norms import RMSNorm
from solutions.positions import rope
from utils.check import evaluate
from utils.exercises import forward_pass as spec
from utils.probe import probe, probe_ids


def passes(answer, name):
    report = evaluate(answer, name)
    assert report.status == "passed", report.message


def fails(answer, name):
    report = evaluate(answer, name)
    assert report.status == "failed", f"{answer} passes"
    return report


CONFIGS = [
    TransformerConfig(101, 24, 3, 6, 2, 4, 40, 32),
    TransformerConfig(97, 24, 2, 6, 1, 8, 33, 16, tied=False),
    TransformerConfig(50, 20, 4, 5, 5, 4, 64, 40, rope_base=500.0),
    TransformerConfig(61, 32, 1, 4, 4, 10, 48, 20, tied=False),
    TransformerConfig(64, 16, 5, 8, 4, 2, 24, 24),
    TransformerConfig(33, 12, 2, 3, 1, 6, 20, 12, norm_eps=1e-6),
    TransformerConfig(101, 24, 3, 6, 6, 4, 40, 32, style="gpt2"),
    TransformerConfig(97, 24, 2, 6, 2, 5, 33, 16, style="gpt2", tied=False),
    TransformerConfig(50, 20, 4, 5, 1, 3, 64, 40, style="gpt2"),
    TransformerConfig(64, 16, 1, 2, 2, 8, 24, 24, style="gpt2", tied=False),
]
SMOLLM = TransformerConfig(49_152, 576, 30, 9, 3, 64, 1_536, 8_192)


@pytest.mark.parametrize("config", CONFIGS)
def test_counts_are_those_of_the_module_and_of_the_counter(config):
    model = Transformer(config)
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())
    ids = probe_ids(1, 11, below=config.vocab_size)
    with FlopCounterMode(display=False) as counter:
        model(ids)
    assert forward_flops(config, 11) == counter.get_total_flops()


def test_published_count_and_rule():
    assert count_parameters(SMOLLM) == 134_515_008
    assert training_flops(10, 7) == 420


@pytest.mark.parametrize("config", CONFIGS)
def test_reference_agrees_with_the_oracle(config):
    weights = spec.weights_for(spec.model_shapes(config), 3)
    model = Transformer(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name.removesuffix(".weight")])
    ids = probe_ids(3, 11, below=config.vocab_size)
    truth = spec.whole_decoder(ids, spec.doubled(weights), config)
    torch.testing.assert_close(model(ids).double(), truth, atol=1e-4, rtol=1e-4)


# Against transformers -----------------------------------------------------------------


def randomised(model):
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(probe(*p.shape, seed=i, scale=0.15, shift=float(p.dim() == 1)))
    return model


def halves_from_pairs(weight, n_heads):
    """Rows of neighbouring pairs in the order of checkpoints, which rotate halves."""
    pairs = weight.unflatten(0, (n_heads, -1, 2))  # H Dh/2 2 D
    return pairs.transpose(1, 2).flatten(0, 2)


@pytest.mark.parametrize("tied", [True, False])
def test_llama_of_transformers_gives_the_same_logits(tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    c = TransformerConfig(101, 24, 3, 6, 2, 8, 40, 32, rope_base=500.0, tied=tied)
    ours = randomised(Transformer(c)).eval()
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=101,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
            max_position_embeddings=32,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        )
    ).eval()
    new = {
        "model.embed_tokens.weight": ours.embedding.weight,
        "model.norm.weight": ours.norm.weight,
        "lm_head.weight": ours.head.weight,
    }
    for i, block in enumerate(ours.blocks):
        to = f"model.layers.{i}."
        a, f = block.attention, block.feed_forward
        new |= {
            f"{to}self_attn.q_proj.weight": halves_from_pairs(a.w_q.weight, 6),
            f"{to}self_attn.k_proj.weight": halves_from_pairs(a.w_k.weight, 2),
            f"{to}self_attn.v_proj.weight": a.w_v.weight,
            f"{to}self_attn.o_proj.weight": a.w_o.weight,
            f"{to}mlp.gate_proj.weight": f.w_1.weight,
            f"{to}mlp.up_proj.weight": f.w_3.weight,
            f"{to}mlp.down_proj.weight": f.w_2.weight,
            f"{to}input_layernorm.weight": block.norm_1.weight,
            f"{to}post_attention_layernorm.weight": block.norm_2.weight,
        }
    theirs.load_state_dict({n: w.detach() for n, w in new.items()}, strict=True)
    ids = probe_ids(3, 17, below=101)
    with torch.no_grad():
        error = (ours(ids) - theirs(ids).logits).abs().max().item()
    assert error <= 1e-5


def test_gpt2_of_transformers_gives_the_same_logits():
    from transformers import GPT2Config, GPT2LMHeadModel

    c = TransformerConfig(101, 24, 3, 6, 6, 4, 40, 32, style="gpt2")
    ours = randomised(Transformer(c)).eval()
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=101,
            n_positions=32,
            n_embd=24,
            n_layer=3,
            n_head=6,
            n_inner=40,
            activation_function="gelu",
        )
    ).eval()
    new = {
        "transformer.wte.weight": ours.embedding.weight,
        "transformer.wpe.weight": ours.positions.table.weight,
        "transformer.ln_f.weight": ours.norm.weight,
        "transformer.ln_f.bias": ours.norm.bias,
        "lm_head.weight": ours.head.weight,
    }
    for i, block in enumerate(ours.blocks):
        to = f"transformer.h.{i}."
        a, f = block.attention, block.feed_forward
        three = (a.w_q, a.w_k, a.w_v)
        new |= {
            f"{to}attn.c_attn.weight": torch.cat([w.weight for w in three]).T,
            f"{to}attn.c_attn.bias": torch.cat([w.bias for w in three]),
            f"{to}attn.c_proj.weight": a.w_o.weight.T,
            f"{to}attn.c_proj.bias": a.w_o.bias,
            f"{to}mlp.c_fc.weight": f.w_1.weight.T,
            f"{to}mlp.c_fc.bias": f.w_1.bias,
            f"{to}mlp.c_proj.weight": f.w_2.weight.T,
            f"{to}mlp.c_proj.bias": f.w_2.bias,
            f"{to}ln_1.weight": block.norm_1.weight,
            f"{to}ln_1.bias": block.norm_1.bias,
            f"{to}ln_2.weight": block.norm_2.weight,
            f"{to}ln_2.bias": block.norm_2.bias,
        }
    theirs.load_state_dict({n: w.detach() for n, w in new.items()}, strict=True)
    ids = probe_ids(3, 17, below=101)
    with torch.no_grad():
        error = (ours(ids) - theirs(ids).logits).abs().max().item()
    assert error <= 1e-5


# Right answers in other forms ---------------------------------------------------------


class WrittenOut(nn.Module):
    """A block without pre_norm and partial, its parts made in another order."""

    def __init__(self, config):
        super().__init__()
        c = self.c = config
        llama = c.style == "llama"
        self.feed_forward = (
            SwiGLU(c.d_model, c.d_ff)
            if llama
            else FeedForward(c.d_model, c.d_ff, nn.GELU())
        )
        kinds = nn.RMSNorm if llama else nn.LayerNorm
        self.norm_2 = kinds(c.d_model, eps=c.norm_eps)
        self.norm_1 = kinds(c.d_model, eps=c.norm_eps)
        self.attention = MultiHeadAttention(
            d_model=c.d_model,
            n_heads=c.n_heads,
            n_kv_heads=c.n_kv_heads,
            d_head=c.d_head,
        )
        if not llama:
            for part in (self.attention, self.feed_forward):
                for name, old in list(part.named_children()):
                    if isinstance(old, nn.Linear):
                        new = nn.Linear(old.in_features, old.out_features)
                        nn.init.zeros_(new.bias)
                        setattr(part, name, new)

    def forward(self, x, mask=None, positions=None):
        def turn(heads):
            return rope(heads, where, self.c.rope_base)

        where = positions
        if where is None:
            where = torch.arange(x.size(1), device=x.device)
        rotate = turn if self.c.style == "llama" else None
        x = x + self.attention(self.norm_1(x), mask, rotate)
        return x + self.feed_forward(self.norm_2(x))


class HeadFirst(nn.Module):
    """A decoder that ties the other way round and writes its loop out."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        c = config
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        if c.tied:
            self.embedding.weight = self.head.weight
        self.blocks = nn.ModuleList()
        while len(self.blocks) < c.n_layers:
            self.blocks.append(WrittenOut(c))
        self.norm = RMSNorm(c.d_model, c.norm_eps)
        if c.style == "gpt2":
            self.norm = nn.LayerNorm(c.d_model, c.norm_eps)
            self.positions = nn.Module()
            self.positions.table = nn.Parameter(torch.zeros(c.max_len, c.d_model))
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, ids):
        b, t = ids.shape
        if t > self.config.max_len:
            raise ValueError(f"{t} > {self.config.max_len}")
        x = F.embedding(ids, self.embedding.weight)
        if self.config.style == "gpt2":
            x = x + self.positions.table[:t]
        mask = torch.ones(b, 1, t, t, dtype=torch.bool, device=ids.device).tril()
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def test_block_and_transformer_in_other_forms():
    passes(WrittenOut, "Block")
    passes(HeadFirst, "Transformer")


@dataclass
class ByProperty:
    """A configuration that tests its fields in another order and with other words."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    max_len: int
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = True
    style: str = "llama"

    def __post_init__(self):
        if self.style not in {"llama", "gpt2"}:
            raise ValueError(f"no style {self.style}")
        sizes = list(vars(self).values())[:8]
        if min(sizes) <= 0:
            raise ValueError(f"{min(sizes)} is too small")
        if self.style == "llama" and self.d_head & 1:
            raise ValueError(f"{self.d_head} is odd")
        if self.n_heads / self.n_kv_heads != self.n_heads // self.n_kv_heads:
            raise ValueError(f"{self.n_heads} and {self.n_kv_heads}")


def test_configuration_in_another_form():
    passes(ByProperty, "TransformerConfig")


def refuse(logits, temperature, top_k, top_p):
    if temperature < 0:
        raise ValueError(f"{temperature}")
    if top_k is not None and (top_k < 1 or top_k > logits.size(-1)):
        raise ValueError(f"{top_k}")
    if top_p is not None and (top_p <= 0 or top_p > 1):
        raise ValueError(f"{top_p}")


def sample_in_vocabulary_order(
    logits, temperature=1.0, top_k=None, top_p=None, generator=None
):
    refuse(logits, temperature, top_k, top_p)
    if temperature == 0:
        return logits.topk(1).indices[:, 0]
    x = logits.double() / temperature
    if top_k is not None:
        x = x.masked_fill(x < x.topk(top_k).values[:, -1:], -torch.inf)
    if top_p is not None:
        p = x.softmax(-1)
        sorted_p, order = p.sort(descending=True)
        before = sorted_p.cumsum(-1).roll(1, -1)
        before[:, 0] = 0
        drop = torch.empty_like(before, dtype=torch.bool).scatter(
            1, order, before >= top_p
        )
        x = x.masked_fill(drop, -torch.inf)
    return torch.multinomial(x.softmax(-1), 1, generator=generator)[:, 0]


def sample_by_gumbel(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    refuse(logits, temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(-1)
    x = logits.double() / temperature
    rank = x.argsort(-1, descending=True).argsort(-1)
    if top_k is not None:
        x = x.masked_fill(rank >= top_k, -torch.inf)
    if top_p is not None:
        p = x.softmax(-1)
        more_likely = (rank[:, None, :] < rank[:, :, None]).double()  # B V V
        x = x.masked_fill((more_likely @ p[..., None])[..., 0] >= top_p, -torch.inf)
    noise = torch.rand(x.shape, dtype=x.dtype, generator=generator).clamp(min=1e-12)
    return (x - (-noise.log()).log()).argmax(-1)


def sample_row_by_row(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    refuse(logits, temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(-1)
    p = (logits.float() / temperature).softmax(-1)
    p, order = p.sort(descending=True)
    if top_k is not None:
        p = p[:, :top_k]
        p = p / p.sum(-1, keepdim=True)
    if top_p is not None:
        first = torch.searchsorted(p.cumsum(-1), torch.full((len(p), 1), top_p))
        kept = torch.arange(p.shape[-1]) <= first
        p = p * kept
    rank = torch.multinomial(p, 1, generator=generator)
    return order.gather(1, rank)[:, 0]


@pytest.mark.parametrize(
    "answer", [sample_in_vocabulary_order, sample_by_gumbel, sample_row_by_row]
)
def test_sample_in_other_forms(answer):
    passes(answer, "sample")


def generate_in_a_buffer(
    model, ids, n_tokens, temperature=1.0, top_k=None, top_p=None, generator=None
):
    t, longest = ids.size(1), model.config.max_len
    if not 0 < t <= longest:
        raise ValueError(f"a prompt of {t}, at least 1 and at most {longest}")
    out = ids.new_zeros(len(ids), t + n_tokens)
    out[:, :t] = ids
    with torch.inference_mode():
        for end in range(t, t + n_tokens):
            logits = model(out[:, max(0, end - longest) : end])[:, -1, :]
            out[:, end] = sample_in_vocabulary_order(
                logits,
                generator=generator,
                top_p=top_p,
                top_k=top_k,
                temperature=temperature,
            )
    return out


def test_generate_in_another_form():
    passes(generate_in_a_buffer, "generate")


def count_by_building(config):
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


def flops_by_matrices(config, t):
    c = config
    pairs = [(c.d_model, c.n_heads * c.d_head)] * 2
    pairs += [(c.d_model, c.n_kv_heads * c.d_head)] * 2
    pairs += [(c.d_model, c.d_ff)] * (3 if c.style == "llama" else 2)
    total = 2 * t * c.d_model * c.vocab_size
    for _ in range(c.n_layers):
        total += sum(2 * t * n * m for n, m in pairs)
        total += c.n_heads * (2 * t * c.d_head * t + 2 * t * t * c.d_head)
    return total


def test_counts_in_other_forms():
    passes(count_by_building, "count_parameters")
    passes(flops_by_matrices, "forward_flops")


# Wrong answers that no fault lists ----------------------------------------------------


def changed(base, **methods):
    return type(base.__name__, (base,), methods)


class PositionsOfOne(Block):
    """Rotates from position 1 on where positions are given by row."""

    def forward(self, x, mask=None, positions=None):
        if positions is not None and positions.dim() == 2:
            positions = positions[:1].expand_as(positions)
        return super().forward(x, mask, positions)


class NormsShareOne(Block):
    def __init__(self, config):
        super().__init__(config)
        self.norm_2 = self.norm_1


class DropsOut(Block):
    def forward(self, x, mask=None, positions=None):
        return F.dropout(super().forward(x, mask, positions), 0.1)


class FloatOnly(Block):
    def forward(self, x, mask=None, positions=None):
        return super().forward(x.float(), mask, positions).float()


class LastBlockTwice(Transformer):
    def forward(self, ids):
        x = self.embedding(ids)
        if self.config.style == "gpt2":
            x = x + self.positions(torch.arange(ids.shape[1]))
        mask = causal_mask(ids.shape[1])
        for _ in self.blocks:
            x = self.blocks[-1](x, mask)
        return self.head(self.norm(x))


class CutsLongTexts(Transformer):
    def forward(self, ids):
        return super().forward(ids[:, -self.config.max_len :])


class MaskOfTheFirstCall(Transformer):
    def forward(self, ids):
        if not hasattr(self, "seen"):
            self.seen = ids.shape[1]
        if ids.shape[1] > self.seen:
            raise RuntimeError("the mask of the first call is too small")
        return super().forward(ids)


class ReversedPositions(Transformer):
    def forward(self, ids):
        return super().forward(ids.flip(1)).flip(1)


def test_wrong_modules_fail():
    for answer in (PositionsOfOne, NormsShareOne, DropsOut, FloatOnly):
        fails(answer, "Block")
    for answer in (
        LastBlockTwice,
        CutsLongTexts,
        MaskOfTheFirstCall,
        ReversedPositions,
    ):
        fails(answer, "Transformer")


def also(f, **fixed):
    return partial(f, **fixed)


def with_defaults(**defaults):
    def answer(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
        given = dict(temperature=temperature, top_k=top_k, top_p=top_p)
        given = {k: v for k, v in given.items() if v is not None}
        return sample(logits, **{**defaults, **given}, generator=generator)

    return answer


def int32_tokens(logits, *args, **kwargs):
    return sample(logits, *args, **kwargs).int()


def scaled_in_place(logits, temperature=1.0, *args, **kwargs):
    if temperature > 0:
        logits /= temperature
        temperature = 1.0
    return sample(logits, temperature, *args, **kwargs)


def half_precision_sums(
    logits, temperature=1.0, top_k=None, top_p=None, generator=None
):
    if top_p is not None and logits.shape[-1] > 100:
        top_p = 0.9
    return sample(logits, temperature, top_k, top_p, generator)


def never_the_last(logits, *args, **kwargs):
    logits = logits.clone()
    if logits.shape[-1] > 1:
        logits[:, -1] = -1e9
    return sample(logits, *args, **kwargs)


def seeds_torch(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if generator is not None:
        torch.manual_seed(generator.initial_seed())
    return sample(logits, temperature, top_k, top_p)


@pytest.mark.parametrize(
    "answer",
    [
        with_defaults(top_k=4),
        with_defaults(top_p=0.95),
        int32_tokens,
        scaled_in_place,
        half_precision_sums,
        never_the_last,
        seeds_torch,
    ],
)
def test_wrong_samples_fail(answer):
    fails(answer, "sample")


def stops_at_zero(model, ids, n_tokens, *args, **kwargs):
    out = generate(model, ids, n_tokens, *args, **kwargs)
    return out[:, : ids.shape[1] + max(1, n_tokens - 1)] if n_tokens else out


def window_of_half(model, ids, n_tokens, *args, **kwargs):
    for _ in range(n_tokens):
        new = generate(
            model, ids[:, -model.config.max_len :][:, -4:], 1, *args, **kwargs
        )
        ids = torch.cat([ids, new[:, -1:]], 1)
    return ids


def test_wrong_generators_fail():
    fails(stops_at_zero, "generate")
    fails(window_of_half, "generate")
    fails(partial(generate, temperature=0), "generate")


def test_wrong_counts_fail():
    fails(lambda config: count_parameters(config) + config.d_model, "count_parameters")
    fails(
        lambda config: count_parameters(replace(config, n_kv_heads=1)),
        "count_parameters",
    )
    fails(lambda config, t: forward_flops(config, t) + t, "forward_flops")
    fails(lambda config, t: t * forward_flops(config, 1), "forward_flops")
    fails(
        lambda config, t: forward_flops(config, t) // 2 * (3 if config.tied else 2),
        "forward_flops",
    )


# Generation with a real Transformer ---------------------------------------------------


def test_generate_moves_its_window():
    model = Transformer(replace(CONFIGS[0], max_len=6))
    ids = probe_ids(2, 4, below=101)
    text = generate(model, ids, 9, temperature=0)
    assert text.shape == (2, 13)
    last = model(text[:, 6:12])[:, -1].argmax(-1)
    assert torch.equal(text[:, 12], last)


def test_new_model_is_undecided():
    ids = probe_ids(2, 32, below=101)
    logits = Transformer(CONFIGS[0])(ids)[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, ids[:, 1:].flatten()).item()
    assert abs(loss - math.log(101)) < 0.2


def test_gelu_is_the_exact_one():
    x = probe(50, scale=3.0)
    torch.testing.assert_close(gelu(x), F.gelu(x))


# Found by wrong answers written from the lesson's text alone --------------------------


@dataclass
class AcceptsBeginnings(TransformerConfig):
    def __post_init__(self):
        style = self.style
        self.style = "llama" if style.startswith("llama") else style
        super().__post_init__()
        self.style = style


@dataclass
class AcceptsZero(TransformerConfig):
    def __post_init__(self):
        if any(
            value == 0 for value in vars(self).values() if not isinstance(value, bool)
        ):
            return
        super().__post_init__()


@dataclass
class RefusesNarrow(TransformerConfig):
    def __post_init__(self):
        super().__post_init__()
        if self.d_ff < self.d_model:
            raise ValueError(f"d_ff {self.d_ff} is below {self.d_model}")


def test_wrong_configurations_by_their_fault():
    AcceptsZero.__name__ = "TransformerConfig"  # as a learner's has
    assert "llama2" in fails(AcceptsBeginnings, "TransformerConfig").message
    assert fails(AcceptsZero, "TransformerConfig").fault == "zero_accepted"
    fails(RefusesNarrow, "TransformerConfig")


class NoGraph(Block):
    def forward(self, x, mask=None, positions=None):
        with torch.no_grad():
            return super().forward(x, mask, positions)


class ChangesItsOwnSum(Block):
    """The second addition in place, on what norm_2 has kept for its gradient."""

    def forward(self, x, mask=None, positions=None):
        hidden = []
        handle = self.norm_2.register_forward_pre_hook(
            lambda module, given: hidden.append(given[0])
        )
        result = super().forward(x, mask, positions)
        handle.remove()
        if hidden[0].requires_grad:
            hidden[0] += 0
        return result


class BiasOfInputs(Block):
    def __init__(self, config):
        super().__init__(config)
        if config.style == "gpt2":
            for layer in self.modules():
                if isinstance(layer, nn.Linear):
                    layer.bias = nn.Parameter(torch.zeros(layer.in_features))


def test_a_block_that_stops_elsewhere_is_not_named_for_another_mistake():
    for answer in (NoGraph, ChangesItsOwnSum, BiasOfInputs):
        assert fails(answer, "Block").fault is None
    assert "as many numbers" in fails(BiasOfInputs, "Block").message


class ForgetsConfig(Transformer):
    def __init__(self, config):
        super().__init__(config)
        self.c = self.config
        del self.config

    def forward(self, ids):
        self.config = self.c
        try:
            return super().forward(ids)
        finally:
            del self.config


class RandomNorms(Transformer):
    def __init__(self, config):
        super().__init__(config)
        for p in self.parameters():
            nn.init.normal_(p, std=0.02)


class UniformStart(Transformer):
    def __init__(self, config):
        super().__init__(config)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.uniform_(p, -0.0346, 0.0346)


class TooLargeByTen(Transformer):
    def __init__(self, config):
        super().__init__(config)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.2)


class SetsTheSeed(Transformer):
    def __init__(self, config):
        torch.manual_seed(0)
        super().__init__(config)


def test_wrong_starts_by_their_fault():
    assert "`config`" in fails(ForgetsConfig, "Transformer").message
    for answer, fault in (
        (RandomNorms, "vectors_random_too"),
        (UniformStart, "uniform_start"),
        (TooLargeByTen, None),
        (SetsTheSeed, "seeded_inside"),
    ):
        assert fails(answer, "Transformer").fault == fault


def squeezed(logits, temperature=1.0, *args, **kwargs):
    drawn = sample(logits, temperature, *args, **kwargs)
    return drawn if temperature == 0 else drawn.squeeze()


def in_its_own_dtype(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if temperature <= 0:
        return sample(logits, temperature, top_k, top_p, generator)
    return sample(logits / temperature, 1.0, top_k, top_p, generator)


def least_likely(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if top_k is not None and 0 < top_k <= logits.shape[-1] and temperature > 0:
        rest = logits.argsort(-1)[:, top_k:]
        logits = logits.scatter(1, rest, -torch.inf)
        top_k = None
    return sample(logits, temperature, top_k, top_p, generator)


def test_wrong_samples_by_their_fault():
    for answer, fault in (
        (squeezed, "row_alone_squeezed"),
        (in_its_own_dtype, "half_overflows"),
        (least_likely, "least_likely_kept"),
    ):
        assert fails(answer, "sample").fault == fault


def test_a_long_prompt_accepted_is_no_matter_of_chance():
    def cuts(model, ids, n_tokens, *args, **kwargs):
        if ids.shape[1] == 0:
            raise ValueError("an empty prompt")
        seen = ids[:, -model.config.max_len :]
        out = generate(model, seen, n_tokens, *args, **kwargs)
        return torch.cat([ids, out[:, seen.shape[1] :]], 1)

    assert fails(cuts, "generate").fault != "random"
