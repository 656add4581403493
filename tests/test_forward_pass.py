"""Lesson 08: against transformers; right answers in other forms; wrong ones."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from solutions.feed_forward import FeedForward
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
from solutions.norms import RMSNorm
from solutions.positions import rope
from tests.answers import fails, passes
from utils.exercises import forward_pass as spec
from utils.probe import probe, probe_ids

# The reference ------------------------------------------------------------------------

CONFIGS = [
    TransformerConfig(101, 24, 3, 6, 2, 4, 40, 32),
    TransformerConfig(97, 24, 2, 6, 1, 8, 33, 16, tied=False),
    TransformerConfig(50, 20, 4, 5, 5, 4, 64, 40, rope_base=500.0, norm_eps=1e-6),
    TransformerConfig(97, 24, 2, 6, 2, 5, 33, 16, style="gpt2", tied=False),
    TransformerConfig(50, 20, 4, 5, 1, 3, 64, 40, style="gpt2"),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_reference_counts_and_computes_as_the_module_and_the_oracle_do(config):
    model = Transformer(config)
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())
    ids = probe_ids(3, 11, below=config.vocab_size)
    with FlopCounterMode(display=False) as counter:
        model(ids[:1])
    assert forward_flops(config, 11) == counter.get_total_flops()
    weights = spec.weights_for(spec.model_shapes(config), 3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name.removesuffix(".weight")])
    truth = spec.slow_decoder(ids, spec.doubled(weights), config)
    torch.testing.assert_close(model(ids).double(), truth, atol=1e-4, rtol=1e-4)


def test_published_count_and_rule():
    smollm = TransformerConfig(49_152, 576, 30, 9, 3, 64, 1_536, 8_192)
    assert count_parameters(smollm) == 134_515_008
    assert training_flops(10, 7) == 420


# Against transformers -----------------------------------------------------------------


def randomised(model):
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(probe(*p.shape, seed=i, scale=0.15, shift=float(p.dim() == 1)))
    return model.eval()


def agree(ours, theirs, named):
    weights = {name: w.detach() for name, w in named.items()}
    theirs.eval().load_state_dict(weights, strict=True)
    ids = probe_ids(3, 17, below=101)
    with torch.no_grad():
        assert (ours(ids) - theirs(ids).logits).abs().max().item() <= 1e-5


def halves_from_pairs(weight, n_heads):
    """Rows of neighbouring pairs in the order of checkpoints, which rotate halves."""
    pairs = weight.unflatten(0, (n_heads, -1, 2))  # H Dh/2 2 D
    return pairs.transpose(1, 2).flatten(0, 2)


def test_llama_of_transformers_gives_the_same_logits():
    from transformers import LlamaConfig, LlamaForCausalLM

    c = TransformerConfig(101, 24, 3, 6, 2, 8, 40, 32, rope_base=500.0, tied=False)
    ours = randomised(Transformer(c))
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
            tie_word_embeddings=False,
            max_position_embeddings=32,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        )
    )
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
    agree(ours, theirs, new)


def test_gpt2_of_transformers_gives_the_same_logits():
    from transformers import GPT2Config, GPT2LMHeadModel

    c = TransformerConfig(101, 24, 3, 6, 6, 4, 40, 32, style="gpt2")
    ours = randomised(Transformer(c))
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
    )
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
        }
        for name, layer in (
            ("attn.c_proj", a.w_o),
            ("mlp.c_fc", f.w_1),
            ("mlp.c_proj", f.w_2),
            ("ln_1", block.norm_1),
            ("ln_2", block.norm_2),
        ):
            new[f"{to}{name}.weight"] = layer.weight.t()
            new[f"{to}{name}.bias"] = layer.bias
    agree(ours, theirs, new)


# Right answers in other forms ---------------------------------------------------------


class WrittenOut(Block):
    """Without pre_norm and partial; PyTorch's norms and GELU, new layers for biases."""

    def __init__(self, config):
        super().__init__(config)
        kind = nn.RMSNorm if config.style == "llama" else nn.LayerNorm
        self.norm_2 = kind(config.d_model, eps=config.norm_eps)
        self.norm_1 = kind(config.d_model, eps=config.norm_eps)
        if config.style == "gpt2":
            self.feed_forward = FeedForward(config.d_model, config.d_ff, nn.GELU())
            for part in (self.attention, self.feed_forward):
                for name, old in list(part.named_children()):
                    if isinstance(old, nn.Linear):
                        new = nn.Linear(old.in_features, old.out_features)
                        nn.init.zeros_(new.bias)
                        setattr(part, name, new)

    def forward(self, x, mask=None, positions=None):
        def turn(heads):
            return rope(heads, where, self.config.rope_base)

        where = positions
        if where is None:
            where = torch.arange(x.size(1), device=x.device)
        rotate = turn if self.config.style == "llama" else None
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


def generate_in_a_buffer(model, ids, n_tokens, *args, **settings):
    t, longest = ids.size(1), model.config.max_len
    if not 0 < t <= longest:
        raise ValueError(f"a prompt of {t}, at least 1 and at most {longest}")
    out = ids.new_zeros(len(ids), t + n_tokens)
    out[:, :t] = ids
    with torch.inference_mode():
        for end in range(t, t + n_tokens):
            logits = model(out[:, max(0, end - longest) : end])[:, -1, :]
            out[:, end] = sample_in_vocabulary_order(logits, *args, **settings)
    return out


def flops_by_a_counter(config, t):
    device = "meta" if config.style == "llama" else "cpu"  # positions are looked at
    with torch.device(device), FlopCounterMode(display=False) as counter:
        Transformer(config)(torch.zeros(1, t, dtype=torch.int64))
    return counter.get_total_flops()


def sample_in_a_loop(logits, *args, **settings):
    rows = [sample_in_vocabulary_order(row[None], *args, **settings) for row in logits]
    return torch.cat(rows)


def renamed_piece_by_piece(name):
    name = name.replace("blk", "blocks").replace("attn_output", "attention.w_o")
    for old, new in (
        ("ffn_norm", "norm_2"),
        ("attn_norm", "norm_1"),
        ("output_norm", "norm"),
        ("output", "head"),
        ("token_embd", "embedding"),
        ("attn_", "attention.w_"),
        ("ffn_gate", "feed_forward.w_1"),
        ("ffn_down", "feed_forward.w_2"),
        ("ffn_up", "feed_forward.w_3"),
    ):
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (WrittenOut, "Block"),
        (HeadFirst, "Transformer"),
        (sample_in_vocabulary_order, "sample"),
        (sample_in_a_loop, "sample"),
        (generate_in_a_buffer, "generate"),
        (
            lambda c: sum(p.numel() for p in Transformer(c).parameters()),
            "count_parameters",
        ),
        (flops_by_a_counter, "forward_flops"),
        (renamed_piece_by_piece, "parameter_name"),
    ],
)
def test_right_answers_in_other_forms(answer, name):
    passes(answer, name)


# Wrong answers ------------------------------------------------------------------------


class PositionsOfOne(Block):
    """The first row's positions for all rows."""

    def forward(self, x, mask=None, positions=None):
        if positions is not None and positions.dim() == 2:
            positions = positions[:1].expand_as(positions)
        return super().forward(x, mask, positions)


def changed(change):
    """`sample` with its settings changed beforehand."""

    def answer(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
        return sample(*change(logits, temperature, top_k, top_p), generator)

    return answer


def seeds_torch(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if generator is not None:
        torch.manual_seed(generator.initial_seed())
    return sample(logits, temperature, top_k, top_p)


def one_threshold_for_all(x, t, k, p):
    if k is None or not 0 < k <= x.shape[-1] or t <= 0:
        return x, t, k, p
    return x.masked_fill(x < x.topk(k).values.min(), -torch.inf), t, None, p


def exchanged(model, ids, n_tokens, temperature=1.0, top_k=None, top_p=None, **more):
    return generate(model, ids, n_tokens, temperature, top_p, top_k, **more)


WRONG = [
    (PositionsOfOne, "Block", None, "others in each row"),
    (changed(lambda x, t, k, p: (x, t, k or 4, p)), "sample", None, ""),
    (changed(lambda x, t, k, p: (x, t, k, p or 0.95)), "sample", None, ""),
    (
        changed(lambda x, t, k, p: (x / t if t else x, t and 1, k, p)),
        "sample",
        None,
        "float16 beyond its 65,504",
    ),
    (seeds_torch, "sample", None, "Two calls in a row gave the same tokens"),
    (changed(one_threshold_for_all), "sample", None, "for the batch as a whole"),
    (lambda x, *a, **more: sample(x, *a, **more)[:, None], "sample", None, "(5, 1)"),
    (exchanged, "generate", None, "Pass them by name"),
    (partial(generate, temperature=0), "generate", None, "1 unless given"),
    (
        lambda c: count_parameters(replace(c, n_kv_heads=1)),
        "count_parameters",
        None,
        "`n_kv_heads` adds 0, expected",
    ),
    (lambda c, t: t * forward_flops(c, 1), "forward_flops", None, ""),
    (
        lambda name: renamed_piece_by_piece(name).replace("norm", "head_norm"),
        "parameter_name",
        None,
        "norm_1",
    ),
]


@pytest.mark.parametrize(("answer", "name", "fault", "says"), WRONG)
def test_wrong_answers(answer, name, fault, says):
    report = fails(answer, name)
    assert (report.fault, says in report.message) == (fault, True), report.message
