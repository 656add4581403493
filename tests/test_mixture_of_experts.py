"""Lesson 12: against transformers; right answers in other forms; wrong ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from solutions import mixture_of_experts as reference
from solutions.feed_forward import SwiGLU
from solutions.forward_pass import TransformerConfig
from tests.answers import fails, passes
from utils.check import evaluate
from utils.check.exercise import find
from utils.probe import probe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# The references against transformers --------------------------------------------------

D, D_FF, E = 24, 40, 6


def filled_mixture(k):
    """The reference with weights from a formula."""
    module = reference.MixtureOfExperts(D, D_FF, E, k)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(probe(*p.shape, seed=i, scale=p.shape[1] ** -0.5))
    return module


def mixtral_block(module, k):
    """`transformers`' Mixtral block with the same weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    sizes = dict(hidden_size=D, intermediate_size=D_FF, num_local_experts=E)
    config = MixtralConfig(**sizes, num_experts_per_tok=k)
    config._experts_implementation = "eager"
    theirs = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        theirs.gate.weight.copy_(module.router.weight)
        for e, expert in enumerate(module.experts):
            both = torch.cat([expert.w_1.weight, expert.w_3.weight])
            theirs.experts.gate_up_proj[e].copy_(both)
            theirs.experts.down_proj[e].copy_(expert.w_2.weight)
    return theirs


def results_and_gradients(module, x):
    """The result, and the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    out = module(x)
    (out * probe(*out.shape, seed=77)).sum().backward()
    if hasattr(module, "router"):
        router, experts = module.router, module.experts
        up = [torch.cat([e.w_1.weight.grad, e.w_3.weight.grad]) for e in experts]
        down = [e.w_2.weight.grad for e in experts]
    else:
        router = module.gate
        up, down = module.experts.gate_up_proj.grad, module.experts.down_proj.grad
    return out.detach(), x.grad, router.weight.grad, *up, *down


@pytest.mark.parametrize("k", [2, 4, E])
def test_mixture_agrees_with_mixtral(k):
    module, x = filled_mixture(k), probe(3, 7, D, seed=5)
    ours = results_and_gradients(module, x)
    theirs = results_and_gradients(mixtral_block(module, k), x)
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= 1e-5


def test_with_one_expert_a_token_mixtral_lacks_the_probability():
    module, x = filled_mixture(1), probe(3, 7, D, seed=5)
    p = torch.softmax(module.router(x), -1).amax(-1, keepdim=True)
    assert (module(x) - p * mixtral_block(module, 1)(x)).abs().max() <= 1e-5


@pytest.mark.parametrize("k", [1, 2, 3])
def test_balancing_loss_is_that_of_transformers_over_k(k):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = probe(50, 5, seed=k)
    _, experts = reference.top_k_routing(logits, k)
    ours = reference.load_balancing_loss(torch.softmax(logits, -1), experts, 5)
    theirs = load_balancing_loss_func((logits,), num_experts=5, top_k=k)
    assert (k * ours - theirs).abs() <= 1e-5


def test_parameters_are_those_of_transformers_mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = 32_000, 4096, 2, 32, 8, 128, 14_336, 32_768
    config = TransformerConfig(*sizes, tied=False)
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=2))
    held = sum(p.numel() for p in model.parameters())
    assert reference.moe_parameters(config, 8, 2)[0] == held


# Right answers in other forms --------------------------------------------------------


def checked(k, n):
    if k < 1 or k > n:
        raise ValueError(f"cannot choose {k} of {n}")
    return k


def routing_as_mixtral(logits, k):
    checked(k, logits.shape[1])
    ids = logits.topk(k, dim=-1).indices
    p = logits.float().softmax(-1).gather(1, ids)
    if k > 1:
        p = p / p.sum(-1, keepdim=True)
    return p.to(logits.dtype), ids


def routing_by_mask(logits, k):
    checked(k, logits.shape[1])
    ids = logits.sort(dim=-1, descending=True).indices[:, :k]
    hidden = torch.ones_like(logits, dtype=torch.bool).scatter(1, ids, False)
    masked = logits.masked_fill(hidden, -torch.inf) if k > 1 else logits
    return masked.softmax(-1).gather(-1, ids), ids


class Mixture(nn.Module):
    """A right layer, with its parts open to change."""

    def __init__(self, d_model, d_ff, n_experts, k):
        super().__init__()
        checked(k, n_experts)
        self.experts = nn.ModuleList([SwiGLU(d_model, d_ff) for _ in range(n_experts)])
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.top, self.n_experts = k, n_experts

    def route(self, x):
        return reference.top_k_routing(self.router(x), self.top)

    def mix(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(self.n_experts):
            rows = (ids == e).any(-1).nonzero().squeeze(-1)
            if rows.numel() == 0:
                continue
            share = (weights * (ids == e)).sum(-1)[rows]
            out[rows] += share[:, None] * self.experts[e](x[rows])
        return out

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        return self.mix(flat, *self.route(flat)).view(x.shape)


class Sorted(Mixture):
    """Pairs sorted by expert, one slice for each, summed at the end."""

    def mix(self, x, weights, ids):
        order = ids.flatten().argsort(stable=True)
        rows = order // self.top
        counts = torch.bincount(ids.flatten(), minlength=self.n_experts).tolist()
        parts = x[rows].split(counts)
        results = [e(x=p) for e, p in zip(self.experts, parts, strict=True)]
        y = torch.cat(results) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, rows, y)


def balance_counted_on_the_cpu(probabilities, experts, n_experts):
    flat = experts.flatten().cpu().tolist()
    f = torch.tensor([flat.count(e) / len(flat) for e in range(n_experts)])
    return (probabilities @ f.to(probabilities)).mean() * n_experts


def fits(capacity):
    if capacity <= 0:
        raise ValueError(f"no room with a capacity of {capacity}")


def drop_by_loop(experts, n_experts, capacity):
    fits(capacity)
    free = dict.fromkeys(range(n_experts), capacity)
    kept = torch.zeros(experts.shape, dtype=torch.bool, device=experts.device)
    for j in range(experts.shape[1]):
        for i, e in enumerate(experts[:, j].tolist()):
            kept[i, j] = free[e] > 0
            free[e] -= 1
    return kept


def drop_by_sort(experts, n_experts, capacity):
    fits(capacity)
    line = experts.T.reshape(-1).cpu()
    order = line.argsort(stable=True)
    counts = torch.bincount(line, minlength=n_experts)
    start = (counts.cumsum(0) - counts)[line[order]]
    kept = torch.empty_like(line, dtype=torch.bool)
    kept[order] = torch.arange(len(line)) - start < capacity
    return kept.reshape(experts.shape[::-1]).T.to(experts.device)


def count_matrix_by_matrix(config, n_experts, k):
    checked(k, n_experts)
    c = config
    attention = 2 * c.d_model * c.d_head * (c.n_heads + c.n_kv_heads)
    shared = attention + 2 * c.d_model + n_experts * c.d_model
    expert = 3 * c.d_model * c.d_ff
    outside = c.d_model + (2 - c.tied) * c.vocab_size * c.d_model
    return [c.n_layers * (shared + n * expert) + outside for n in (n_experts, k)]


def bias_by_where(bias, load, rate=0.001):
    over = load * len(load) > load.sum()
    under = load * len(load) < load.sum()
    return torch.where(over, bias - rate, torch.where(under, bias + rate, bias))


RIGHT = {
    "top_k_routing": [routing_as_mixtral, routing_by_mask],
    "MixtureOfExperts": [Mixture, Sorted],
    "load_balancing_loss": [balance_counted_on_the_cpu],
    "drop_over_capacity": [drop_by_loop, drop_by_sort],
    "moe_parameters": [count_matrix_by_matrix],
    "balancing_bias": [bias_by_where],
}


@pytest.mark.parametrize(("name", "answer"), [(n, a) for n in RIGHT for a in RIGHT[n]])
def test_other_forms_pass(name, answer):
    passes(answer, name)


# Wrong answers that pass some of the requirements ------------------------------------


def layer(**methods):
    return type("MixtureOfExperts", (Mixture,), methods)


def under_a_capacity(self, x, weights, ids):
    kept = reference.drop_over_capacity(ids, self.n_experts, 3)
    return Mixture.mix(self, x, weights * kept, ids)


def without_small_weights(self, x, weights, ids):
    return Mixture.mix(self, x, weights * (weights > 0.1), ids)


def dense(call):
    """Every expert on every token."""

    def mix(self, x, weights, ids):
        shares = (weights[..., None] * F.one_hot(ids, self.n_experts)).sum(1)
        results = [call(expert, x) for expert in self.experts]
        return (shares[..., None] * torch.stack(results, 1)).sum(1)

    return layer(mix=mix)


def with_experts(change):
    """`change(self, *sizes)` comes after the right `__init__`."""

    def __init__(self, d_model, d_ff, n_experts, k):
        Mixture.__init__(self, d_model, d_ff, n_experts, k)
        change(self, d_model, d_ff)

    return layer(__init__=__init__)


def one_expert(self, *sizes):
    self.experts = nn.ModuleList([SwiGLU(*sizes)] * self.n_experts)


def copies(self, *_):
    for expert in self.experts:
        expert.load_state_dict(self.experts[0].state_dict())


def bare_router(self, *_):
    weight = self.router.weight
    del self.router
    self.router = weight


WRONG_LAYERS = [
    (layer(mix=under_a_capacity), ""),
    (layer(mix=without_small_weights), ""),
    (dense(SwiGLU.__call__), "12 tokens with k = 2 are 24"),
    (dense(SwiGLU.forward), "No expert was called"),
    (with_experts(one_expert), "one and the same network"),
    (with_experts(copies), "start as copies"),
    (with_experts(bare_router), "cannot be called"),
]


@pytest.mark.parametrize(("answer", "words"), WRONG_LAYERS)
def test_wrong_layers_fail(answer, words):
    assert words in fails(answer, "MixtureOfExperts").message


def changed(name, change):
    """The reference, and `change(result, *arguments)` after it."""
    right = getattr(reference, name)
    return lambda *args, **named: change(right(*args, **named), *args, *named.values())


def noisy(out, z, k):
    """FINDINGS: with noise of 1e-2 it passed."""
    i = (z + 1e-2 * torch.randn_like(z)).topk(k).indices
    return (out[0] if k == 1 else z.gather(1, i).softmax(-1)), i


def overflowing(out, z, k):
    """FINDINGS: this was told that scores which are not kept are 0."""
    kept, experts = z.exp().topk(k, dim=-1)
    return kept / (z.exp() if k == 1 else kept).sum(-1, keepdim=True), experts


def same_expert_twice(out, z, k):
    return out[0], (z[:, None] == z.gather(1, out[1])[..., None]).int().argmax(-1)


def counted_in_int8(loss, probabilities, experts, n_experts):
    counts = F.one_hot(experts.flatten(), n_experts).sum(0).to(torch.int8)
    f = (counts / experts.numel()).to(probabilities.dtype)
    return n_experts * (f * probabilities.mean(0)).sum()


def config_changed(found, config, n_experts, k):
    config.d_ff *= n_experts
    return found


def an_expert_forgotten(found, c, *_):
    return [n - c.n_layers * 3 * c.d_model * c.d_ff for n in found]


WRONG = {
    "top_k_routing": [
        (noisy, ""),
        (overflowing, "overflow"),
        (same_expert_twice, "different experts"),
        (lambda out, z, k: (out[0] * (out[0] > 0.2), out[1]), ""),
        (lambda out, z, k: (out[0].detach() if k == 1 else out[0], out[1]), "gradient"),
        (lambda out, z, k: reference.top_k_routing(z.clamp(-50, 50), k), "±10,000"),
        (lambda out, z, k: (out[0], out[1].to("cpu")), "device"),
    ],
    "load_balancing_loss": [
        (lambda loss, *_: 2 * loss - loss.detach(), "gradient"),
        (lambda loss, *_: loss.clamp(min=1), ""),
        (lambda loss, p, *_: loss * len(p), "`N` is"),
        (counted_in_int8, "int8 ends at 127"),
    ],
    "drop_over_capacity": [
        (lambda kept, *_: kept.cpu(), "device"),
        (lambda kept, experts, *_: kept & (experts.shape[1] > 1), "was chosen"),
    ],
    "balancing_bias": [
        (lambda new, bias, load, rate=0.001: new - rate * (load == 0), ""),
        (lambda new, *_: new - new.mean(), ""),
    ],
    "moe_parameters": [
        (config_changed, "changed the `config`"),
        (lambda found, *_: [n / 1 for n in found], "float"),
        (an_expert_forgotten, "small by 5 × one expert (11,211 numbers), 1 for each"),
        (lambda found, *_: (found[0], found[0] - found[1]), "Doubling a size"),
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [(name, *each) for name in WRONG for each in WRONG[name]],
)
def test_other_wrong_answers_fail(name, change, words):
    report = fails(changed(name, change), name)
    assert report.fault in (None, "random"), report.message
    assert words in report.message


# The parts together -------------------------------------------------------------------


def together(**parts):
    name = "block_with_experts"
    return evaluate({**find(name).reference, **parts}, name)


def test_other_right_parts_fit_together():
    report = together(
        MixtureOfExperts=Sorted,
        top_k_routing=routing_as_mixtral,
        load_balancing_loss=balance_counted_on_the_cpu,
        drop_over_capacity=drop_by_sort,
        moe_parameters=count_matrix_by_matrix,
    )
    assert report.status == "passed", report.message


def test_experts_that_are_not_called_do_not_fit():
    report = together(MixtureOfExperts=dense(SwiGLU.forward))
    assert "each expert was called" in report.message
