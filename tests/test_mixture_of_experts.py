"""Lesson 12: against transformers; right answers in other forms; wrong ones."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from solutions import mixture_of_experts as reference
from solutions.feed_forward import SwiGLU
from solutions.forward_pass import Transformer, TransformerConfig
from tests.answers import fails, passes
from utils.check import evaluate
from utils.check.exercise import find
from utils.exercises.mixture_of_experts import slow_mixture
from utils.probe import probe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# The references against their oracles ------------------------------------------------

D, D_FF, E = 24, 40, 6


def filled_mixture(k):
    """The reference with weights from a formula."""
    module = reference.MixtureOfExperts(D, D_FF, E, k)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(probe(*p.shape, seed=i, scale=p.shape[1] ** -0.5))
    return module


def results_and_gradients(module, x):
    """The result, and the gradients of the input and of every parameter by name."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    out = module(x)
    (out * probe(*out.shape, seed=77, dtype=out.dtype)).sum().backward()
    return {"result": out.detach(), "x": x.grad} | {
        n: torch.zeros_like(p) if p.grad is None else p.grad
        for n, p in module.named_parameters()
    }


class Loop(nn.Module):
    """The same weights, one token and one expert after the other."""

    def __init__(self, module, k):
        super().__init__()
        self.router, self.experts, self.k = module.router, module.experts, k

    def forward(self, x):
        p = {n.removesuffix(".weight"): w for n, w in self.named_parameters()}
        return slow_mixture(x, p, self.k)


@pytest.mark.parametrize("k", [1, 2, 4, E])
def test_mixture_agrees_with_a_loop_over_tokens(k):
    module, x = filled_mixture(k), probe(3, 7, D, seed=5)
    found = results_and_gradients(module, x)
    due = results_and_gradients(Loop(module, k), x)
    assert found.keys() == due.keys()
    for name in due:
        assert (found[name] - due[name]).abs().max() <= 1e-5, name
    assert found["router.weight"].abs().max() > 1e-3


def mixtral_block(module, k):
    """`transformers`' Mixtral block with the same weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=D,
        intermediate_size=D_FF,
        num_local_experts=E,
        num_experts_per_tok=k,
    )
    config._experts_implementation = "eager"
    theirs = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        theirs.gate.weight.copy_(module.router.weight)
        for e, expert in enumerate(module.experts):
            both = torch.cat([expert.w_1.weight, expert.w_3.weight])
            theirs.experts.gate_up_proj[e].copy_(both)
            theirs.experts.down_proj[e].copy_(expert.w_2.weight)
    return theirs


def mixtral_gradients(theirs):
    """Under this course's names."""
    experts, gradients = theirs.experts, {"router.weight": theirs.gate.weight.grad}
    for e in range(E):
        w_1, w_3 = experts.gate_up_proj.grad[e].chunk(2)
        gradients |= {
            f"experts.{e}.w_1.weight": w_1,
            f"experts.{e}.w_3.weight": w_3,
            f"experts.{e}.w_2.weight": experts.down_proj.grad[e],
        }
    return gradients


@pytest.mark.parametrize("k", [2, 4, E])
def test_mixture_agrees_with_mixtral(k):
    module, x = filled_mixture(k), probe(3, 7, D, seed=5)
    ours = results_and_gradients(module, x)
    theirs = mixtral_block(module, k)
    due = results_and_gradients(theirs, x)
    assert (ours["result"] - due["result"]).abs().max() <= 1e-5
    assert (ours["x"] - due["x"]).abs().max() <= 1e-5
    for name, gradient in mixtral_gradients(theirs).items():
        assert (ours[name] - gradient).abs().max() <= 1e-5, name


def test_with_one_expert_a_token_mixtral_differs_by_the_probability():
    """Mixtral's weight is then 1, and its router learns nothing."""
    module, x = filled_mixture(1), probe(3, 7, D, seed=5)
    theirs = mixtral_block(module, 1)
    p = torch.softmax(module.router(x), -1).amax(-1, keepdim=True)
    assert (module(x) - p * theirs(x)).abs().max() <= 1e-5
    results_and_gradients(theirs, x)
    assert theirs.gate.weight.grad.abs().max() <= 1e-5  # rounding
    assert results_and_gradients(module, x)["router.weight"].abs().max() > 1e-3


@pytest.mark.parametrize("k", [1, 2, 3])
def test_balancing_loss_is_that_of_transformers_over_k(k):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = probe(50, 5, seed=k)
    _, experts = reference.top_k_routing(logits, k)
    ours = reference.load_balancing_loss(torch.softmax(logits, -1), experts, 5)
    theirs = load_balancing_loss_func((logits,), num_experts=5, top_k=k)
    assert (k * ours - theirs).abs() <= 1e-5


def mixtral_config(**changes):
    sizes = dict(
        vocab_size=32_000,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        d_head=128,
        d_ff=14_336,
        max_len=32_768,
        tied=False,
    )
    return TransformerConfig(**(sizes | changes))


def test_mixtral_has_its_published_sizes():
    total, active = reference.moe_parameters(mixtral_config(), 8, 2)
    assert (round(total / 1e9, 1), round(active / 1e9, 1)) == (46.7, 12.9)


def test_parameters_are_those_of_transformers_mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=2))
    held = sum(p.numel() for p in model.parameters())
    total, _ = reference.moe_parameters(mixtral_config(n_layers=2), 8, 2)
    assert total == held


def test_parameters_are_those_of_a_module():
    config = mixtral_config(
        vocab_size=31, d_model=12, n_layers=3, n_heads=6, n_kv_heads=2, d_head=4
    )
    config.d_ff, config.max_len, config.tied = 20, 9, True
    model = Transformer(config)
    for block in model.blocks:
        block.feed_forward = reference.MixtureOfExperts(12, 20, 5, 2)
    total, active = reference.moe_parameters(config, 5, 2)
    assert total == sum(p.numel() for p in model.parameters())
    for block in model.blocks:
        block.feed_forward.experts = block.feed_forward.experts[:2]
    assert active == sum(p.numel() for p in model.parameters())


def test_operations_do_not_grow_with_the_experts_but_for_the_router():
    x = probe(16, D)
    for n_experts in (2, 4, 16):
        module = reference.MixtureOfExperts(D, D_FF, n_experts, 2)
        with FlopCounterMode(display=False) as counter:
            module(x)
        assert counter.get_total_flops() == 16 * (12 * D * D_FF + 2 * D * n_experts)


def test_capacity_is_never_exceeded_and_never_wasted():
    for seed in range(20):
        experts = probe(15, 6, seed=seed).topk(3).indices
        for capacity in (1, 4, 9):
            kept = reference.drop_over_capacity(experts, 6, capacity)
            asked = torch.bincount(experts.flatten(), minlength=6)
            served = torch.bincount(experts[kept], minlength=6)
            assert torch.equal(served, asked.clamp(max=capacity))


# Right answers in other forms --------------------------------------------------------


def checked(k, n):
    if k < 1 or k > n:
        raise ValueError(f"cannot choose {k} of {n}")
    return k


def routing_by_loop(logits, k):
    checked(k, logits.shape[1])
    weights, ids = [], []
    for row in logits:
        order = torch.argsort(row, descending=True)[:k]
        weights.append(row.softmax(0)[order] if k == 1 else row[order].softmax(0))
        ids.append(order)
    return torch.stack(weights), torch.stack(ids)


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


def routing_one_by_one(logits, k):
    checked(k, logits.shape[1])
    rest, ids = logits.clone(), []
    for _ in range(k):
        ids.append(rest.argmax(-1, keepdim=True))
        rest = rest.scatter(1, ids[-1], -torch.inf)
    ids = torch.cat(ids, 1)
    if k == 1:
        return logits.softmax(1).take_along_dim(ids, 1), ids
    return logits.take_along_dim(ids, 1).softmax(1), ids


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
        results = [e(p) for e, p in zip(self.experts, parts, strict=True)]
        y = torch.cat(results) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, rows, y)


class Unsorted(Sorted):
    """The results put back into `(N, k, D)` and summed over the places."""

    def mix(self, x, weights, ids):
        results = x.new_zeros(*ids.shape, x.shape[-1])
        for e, expert in enumerate(self.experts):
            mask = ids == e
            results[mask] = expert(x[mask.nonzero()[:, 0]])
        return (weights[..., None] * results).sum(1)


class OwnRouting(Mixture):
    """Routes as Mixtral does, and scatters by a dense table of shares."""

    def mix(self, x, weights, ids):
        table = x.new_zeros(len(x), self.n_experts).scatter(1, ids, weights)
        out = torch.zeros_like(x)
        for share, expert in zip(table.T, self.experts, strict=True):
            rows = torch.where(share > 0)[0]
            out = out.index_add(0, rows, share[rows, None] * expert(x[rows]))
        return out

    def route(self, x):
        return routing_as_mixtral(self.router(x), self.top)


class Bare(Mixture):
    """Weights as bare parameters of one's own expert class; d_ff by keyword."""

    class Expert(nn.Module):
        def __init__(self, d_model, d_ff):
            super().__init__()
            self.w_1 = nn.Parameter(torch.randn(d_ff, d_model) / math.sqrt(d_model))
            self.w_3 = nn.Parameter(torch.randn(d_ff, d_model) / math.sqrt(d_model))
            self.w_2 = nn.Parameter(torch.randn(d_model, d_ff) / math.sqrt(d_ff))

        def forward(self, x):
            return (F.silu(x @ self.w_1.T) * (x @ self.w_3.T)) @ self.w_2.T

    def __init__(self, d_model, d_ff, n_experts, k):
        super().__init__(d_model, d_ff, n_experts, k)
        self.experts = nn.ModuleList(
            self.Expert(d_model, d_ff) for _ in range(n_experts)
        )


class ByLists(Mixture):
    """Reads the ids on the CPU, and creates index tensors where the tokens are."""

    def mix(self, x, weights, ids):
        out, chosen = x * 0, ids.cpu().tolist()
        for e, expert in enumerate(self.experts):
            pairs = [(n, row.index(e)) for n, row in enumerate(chosen) if e in row]
            if pairs:
                rows, place = torch.tensor(pairs, device=x.device).T
                y = weights[rows, place].unsqueeze(-1) * expert(x=x[rows])
                out[rows] = out[rows] + y
        return out


def balance_by_loop(probabilities, experts, n_experts):
    total = 0
    for e in range(n_experts):
        share = (experts == e).sum() / experts.numel()
        total = total + share.to(probabilities.dtype) * probabilities[:, e].mean()
    return total * n_experts


def balance_by_histogram(probabilities, experts, n_experts):
    f = torch.histc(experts.double().flatten(), n_experts, 0, n_experts)
    mean = probabilities.double().mean(0)
    return (n_experts * (f / f.sum() * mean).sum()).to(probabilities.dtype)


def balance_token_by_token(probabilities, experts, n_experts):
    counts = torch.zeros(n_experts, dtype=torch.long, device=experts.device)
    counts = counts.scatter_add(
        0, experts.flatten(), torch.ones_like(experts).flatten()
    )
    f = (counts / experts.numel()).to(probabilities.dtype)
    return (probabilities @ f).mean() * n_experts


def balance_counted_on_the_cpu(probabilities, experts, n_experts):
    flat = experts.flatten().cpu().tolist()
    f = torch.tensor([flat.count(e) / len(flat) for e in range(n_experts)])
    return n_experts * f.to(probabilities) @ probabilities.mean(0)


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
    line = experts.T.reshape(-1)
    order = line.argsort(stable=True)
    counts = torch.bincount(line, minlength=n_experts)
    start = (counts.cumsum(0) - counts)[line[order]]
    kept = torch.empty_like(line, dtype=torch.bool)
    kept[order] = torch.arange(len(line), device=line.device) - start < capacity
    return kept.reshape(experts.shape[::-1]).T


def drop_by_expert(experts, n_experts, capacity):
    fits(capacity)
    kept = torch.zeros_like(experts, dtype=torch.bool)
    for e in range(n_experts):
        column, row = torch.where(e == experts.T)
        kept[row[:capacity], column[:capacity]] = True
    return kept


def drop_by_triangle(experts, n_experts, capacity):
    fits(capacity)
    line = experts.T.flatten()
    before = (line[:, None] == line[None, :]).tril(-1).sum(1)
    return (before < capacity).unflatten(0, (experts.shape[1], -1)).T


def drop_on_the_cpu(experts, n_experts, capacity):
    return drop_by_sort(experts.cpu(), n_experts, capacity).to(experts.device)


def count_matrix_by_matrix(config, n_experts, k):
    checked(k, n_experts)
    c = config
    attention = 2 * c.d_model * c.d_head * (c.n_heads + c.n_kv_heads)
    shared = attention + 2 * c.d_model + n_experts * c.d_model
    expert = 3 * c.d_model * c.d_ff
    outside = c.d_model + (2 - c.tied) * c.vocab_size * c.d_model
    return [c.n_layers * (shared + n * expert) + outside for n in (n_experts, k)]


def count_by_a_module(config, n_experts, k):
    checked(k, n_experts)
    with torch.device("meta"):
        moe = reference.MixtureOfExperts(config.d_model, config.d_ff, n_experts, k)
        dense = SwiGLU(config.d_model, config.d_ff)
    held, one = (sum(p.numel() for p in m.parameters()) for m in (moe, dense))
    total = reference.count_parameters(config) + config.n_layers * (held - one)
    return total, total - config.n_layers * (n_experts - k) * one


RIGHT = {
    "top_k_routing": [
        routing_by_loop,
        routing_as_mixtral,
        routing_by_mask,
        routing_one_by_one,
    ],
    "MixtureOfExperts": [Mixture, Sorted, Unsorted, OwnRouting, Bare, ByLists],
    "load_balancing_loss": [
        balance_by_loop,
        balance_by_histogram,
        balance_token_by_token,
        balance_counted_on_the_cpu,
    ],
    "drop_over_capacity": [
        drop_by_loop,
        drop_by_sort,
        drop_by_expert,
        drop_by_triangle,
        drop_on_the_cpu,
    ],
    "moe_parameters": [count_matrix_by_matrix, count_by_a_module],
}


@pytest.mark.parametrize(("name", "answer"), [(n, a) for n in RIGHT for a in RIGHT[n]])
def test_other_forms_pass(name, answer):
    passes(answer, name)


# Wrong answers: those that pass some of the requirements -----------------------------


def routing(change):
    def top_k_routing(logits, k):
        return change(logits, k, *reference.top_k_routing(logits, k))

    return top_k_routing


def noisy(logits, k, weights, experts):
    experts = (logits + 1e-2 * torch.randn_like(logits)).topk(k).indices
    kept = logits.gather(1, experts)
    return (weights if k == 1 else kept.softmax(-1)), experts


def same_expert_twice(logits, k, weights, experts):
    kept = logits.gather(1, experts)
    return weights, (logits[:, None] == kept[..., None]).int().argmax(-1)


def overflowing(logits, k):
    """FINDINGS: this was told that scores which are not kept are 0."""
    z = logits.exp()
    kept, experts = z.topk(checked(k, logits.shape[1]), dim=-1)
    return kept / (z if k == 1 else kept).sum(-1, keepdim=True), experts


def one_maximum_for_the_choice(logits, k):
    z = (logits - logits.max()).exp()
    kept, experts = z.topk(checked(k, logits.shape[1]), -1)
    return kept / (z if k == 1 else kept).sum(-1, True), experts


def centred_in_place(logits, k):
    logits -= logits.amax(-1, keepdim=True)
    return reference.top_k_routing(logits, k)


WRONG_ROUTING = [
    routing(noisy),
    routing(same_expert_twice),
    one_maximum_for_the_choice,
    centred_in_place,
    routing(lambda z, k, w, i: reference.top_k_routing(z / 2, k)),
    routing(lambda z, k, w, i: (w.round(decimals=2), i)),
    routing(lambda z, k, w, i: (w * (w > 0.2), i)),
    routing(lambda z, k, w, i: (w / w.detach() if k == 1 else w, i)),
    routing(lambda z, k, w, i: (w.detach() if k == 1 else w, i)),
    routing(lambda z, k, w, i: reference.top_k_routing(z.clamp(-50, 50), k)),
    routing(lambda z, k, w, i: reference.top_k_routing(z - z.mean(0), k)),
    routing(lambda z, k, w, i: (reference.top_k_routing(z.half(), k)[0].to(z), i)),
    routing(lambda z, k, w, i: (w.float() if z.dtype == torch.float64 else w, i)),
    routing(lambda z, k, w, i: (w, i.int())),
    routing(lambda z, k, w, i: (w, i.to("cpu"))),
    routing(lambda z, k, w, i: (w + torch.zeros(w.shape, dtype=w.dtype), i)),
]


@pytest.mark.parametrize("answer", WRONG_ROUTING)
def test_wrong_routings_fail(answer):
    fails(answer, "top_k_routing")


def test_exponentials_that_overflow_are_told_apart():
    report = fails(overflowing, "top_k_routing")
    assert report.fault in (None, "overflow"), report.message
    assert "overflow" in report.unmet


def layer(**methods):
    return type("MixtureOfExperts", (Mixture,), methods)


def mixed(change):
    """`change(self, x, weights, ids)` gives what the right `mix` is called with."""
    return layer(mix=lambda self, *args: Mixture.mix(self, *change(self, *args)))


def noise_in_training(self, x):
    z = self.router(x)
    return reference.top_k_routing(z + self.training * torch.randn_like(z), self.top)


def under_a_capacity(self, x, weights, ids):
    return x, weights * reference.drop_over_capacity(ids, self.n_experts, 3), ids


def first_choice_for_ever(self, x):
    if not hasattr(self, "chosen") or len(self.chosen[1]) != len(x):
        self.chosen = Mixture.route(self, x)
    return self.chosen


def padded(self, x, weights, ids):
    for expert in self.experts:
        expert(x[:4] * 0)
    return x, weights, ids


def all_then_picked(self, x, weights, ids):
    results = torch.stack([expert(x) for expert in self.experts], 1)  # N E D
    picked = results.gather(1, ids[..., None].expand(-1, -1, x.shape[-1]))
    return (weights[..., None] * picked).sum(1)


def past_the_call(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, place = torch.where(ids == e)
        share = weights[token, place, None]
        out = out.index_add(0, token, share * expert.forward(x[token]))
    return out


def zeros_on_the_cpu(self, x, weights, ids):
    return torch.zeros(x.shape, dtype=x.dtype) + Mixture.mix(self, x, weights, ids)


def bare_router(self, d_model, d_ff, n_experts, k):
    Mixture.__init__(self, d_model, d_ff, n_experts, k)
    del self.router
    self.router = nn.Parameter(torch.randn(n_experts, d_model))


def one_expert(self, d_model, d_ff, n_experts, k):
    Mixture.__init__(self, d_model, d_ff, n_experts, k)
    self.experts = nn.ModuleList([SwiGLU(d_model, d_ff)] * n_experts)


def copies(self, d_model, d_ff, n_experts, k):
    Mixture.__init__(self, d_model, d_ff, n_experts, k)
    for expert in self.experts:
        expert.load_state_dict(self.experts[0].state_dict())


def k_below_all(self, d_model, d_ff, n_experts, k):
    if not 1 <= k < n_experts:
        raise ValueError(f"k is {k}, experts {n_experts}")
    Mixture.__init__(self, d_model, d_ff, n_experts, k)


WRONG_LAYERS = [
    (layer(route=noise_in_training), ""),
    (layer(route=first_choice_for_ever), ""),
    (mixed(under_a_capacity), ""),
    (mixed(lambda self, x, w, i: (x, w * (w > 0.1), i)), ""),
    (mixed(padded), ""),
    (layer(mix=all_then_picked), "12 tokens with k = 2 are 24"),
    (layer(mix=past_the_call), "No expert was called"),
    (layer(mix=zeros_on_the_cpu), "on which device"),
    (
        layer(
            __init__=bare_router,
            route=lambda self, x: reference.top_k_routing(x @ self.router.T, self.top),
        ),
        "cannot be called",
    ),
    (layer(__init__=one_expert), "one and the same network"),
    (layer(__init__=copies), "start as copies"),
    (layer(__init__=k_below_all), "k is 3, experts 3"),
]


@pytest.mark.parametrize(("answer", "words"), WRONG_LAYERS)
def test_wrong_layers_fail(answer, words):
    assert words in fails(answer, "MixtureOfExperts").message


def balance(change):
    def load_balancing_loss(probabilities, experts, n_experts):
        loss = reference.load_balancing_loss(probabilities, experts, n_experts)
        return change(loss, probabilities, experts, n_experts)

    return load_balancing_loss


def balance_over(divisor):
    def load_balancing_loss(probabilities, experts, n_experts):
        counts = torch.bincount(experts.flatten(), minlength=n_experts)
        f = (counts / experts.numel()).to(probabilities.dtype)
        return n_experts * (f @ probabilities.sum(0)) / divisor(experts)

    return load_balancing_loss


def counted_in_int8(probabilities, experts, n_experts):
    counts = F.one_hot(experts.flatten(), n_experts).sum(0).to(torch.int8)
    f = (counts / experts.numel()).to(probabilities.dtype)
    return n_experts * (f * probabilities.mean(0)).sum()


def kept_queue(experts, n_experts, capacity, used={}):  # noqa: B006
    fits(capacity)
    kept = torch.zeros_like(experts, dtype=torch.bool)
    for j in range(experts.shape[1]):
        for i, e in enumerate(experts[:, j].tolist()):
            used[e] = used.get(e, 0) + 1
            kept[i, j] = used[e] <= capacity
    return kept


def dropping(change):
    def drop_over_capacity(experts, n_experts, capacity):
        kept = reference.drop_over_capacity(experts, n_experts, capacity)
        return change(kept, experts, n_experts, capacity)

    return drop_over_capacity


def third_choices_apart(kept, experts, *sizes):
    third = reference.drop_over_capacity(experts[:, 2:], *sizes)
    return torch.cat([kept[:, :2], third], 1)


def config_changed(config, n_experts, k):
    found = reference.moe_parameters(config, n_experts, k)
    config.d_ff *= n_experts
    return found


def model_built(config, n_experts, k):
    sizes = config.d_model, config.d_ff, n_experts, checked(k, n_experts)
    model = Transformer(config)
    for block in model.blocks:
        block.feed_forward = reference.MixtureOfExperts(*sizes)
    total = sum(p.numel() for p in model.parameters())
    idle = 3 * config.d_model * config.d_ff * config.n_layers * (n_experts - k)
    return total, total - idle


def counts(change):
    return lambda config, n_experts, k: change(
        *reference.moe_parameters(config, n_experts, k), config
    )


WRONG = [
    ("load_balancing_loss", balance(lambda loss, *_: loss.log() + 1), None),
    ("load_balancing_loss", balance(lambda loss, *_: 2 * loss - loss.detach()), None),
    ("load_balancing_loss", balance_over(torch.numel), "divided_by_k_twice"),
    ("load_balancing_loss", counted_in_int8, None),
    ("drop_over_capacity", kept_queue, "state"),
    ("drop_over_capacity", dropping(third_choices_apart), None),
    ("drop_over_capacity", dropping(lambda kept, *_: kept.cpu()), None),
    (
        "drop_over_capacity",
        dropping(lambda kept, i, n, c: kept & (i.shape[1] > 1)),
        None,
    ),
    ("moe_parameters", config_changed, None),
    ("moe_parameters", model_built, None),
    ("moe_parameters", counts(lambda total, active, c: (total, total - active)), None),
    (
        "moe_parameters",
        counts(lambda total, active, c: (total - c.d_model, active - c.d_model)),
        None,
    ),
    ("moe_parameters", counts(lambda total, active, c: (total / 1, active / 1)), None),
]


@pytest.mark.parametrize(("name", "answer", "fault"), WRONG)
def test_other_wrong_answers_fail(name, answer, fault):
    report = fails(answer, name)
    assert report.fault == fault, report.message


# The parts together -------------------------------------------------------------------


def together(**parts):
    name = "block_with_experts"
    return evaluate({**find(name).reference, **parts}, name)


def test_other_right_parts_fit_together():
    report = together(
        MixtureOfExperts=Sorted,
        top_k_routing=routing_as_mixtral,
        load_balancing_loss=balance_by_loop,
        drop_over_capacity=drop_by_sort,
        moe_parameters=count_matrix_by_matrix,
    )
    assert report.status == "passed", report.message


def test_experts_that_are_not_called_do_not_fit():
    report = together(MixtureOfExperts=layer(mix=past_the_call))
    assert "each expert was called" in report.message
