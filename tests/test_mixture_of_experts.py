"""Lesson 12: right answers in other forms, and wrong ones that no fault lists."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from solutions import mixture_of_experts as reference
from solutions.feed_forward import SwiGLU
from solutions.forward_pass import Block, Transformer, TransformerConfig
from utils.check import evaluate, evaluate_joint
from utils.check.exercise import Joint
from utils.exercises.mixture_of_experts import slow_mixture
from utils.probe import probe, probe_ids

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def passes(answer, name):
    report = evaluate(answer, name)
    assert report.status == "passed", report.message


def fails(answer, name, fault=None):
    report = evaluate(answer, name)
    assert report.status == "failed", f"{name} passes"
    assert len(report.lines) >= 2
    if fault:
        assert report.fault == fault, report.message


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


def test_a_block_takes_experts_for_its_network():
    config = mixtral_config(
        vocab_size=31, d_model=D, n_layers=1, n_heads=4, n_kv_heads=2, d_head=6
    )
    block = Block(config)
    block.feed_forward = reference.MixtureOfExperts(D, D_FF, E, 2)
    x = probe(2, 9, D)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    before = block(x, mask)
    x[:, 6:] = 1.0
    assert (block(x, mask)[:, :6] - before[:, :6]).abs().max() <= 1e-6


@pytest.mark.parametrize("k", [0, -1, 5])
def test_a_k_that_does_not_fit_is_refused_in_words(k):
    for call in (
        lambda: reference.top_k_routing(probe(3, 4), k),
        lambda: reference.MixtureOfExperts(8, 8, 4, k),
        lambda: reference.moe_parameters(mixtral_config(), 4, k),
    ):
        with pytest.raises(ValueError, match=rf"k is {k}, .* 4"):
            call()


def test_a_capacity_of_zero_is_refused_in_words():
    with pytest.raises(ValueError, match="capacity is 0"):
        reference.drop_over_capacity(torch.tensor([[0]]), 2, 0)


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


def routing_in_float64(logits, k):
    checked(k, logits.shape[1])
    z = logits.double()
    kept, ids = z.topk(k)
    total = (z if k == 1 else kept).logsumexp(-1, keepdim=True)
    return [(kept - total).exp().to(logits.dtype), ids]


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


@pytest.mark.parametrize(
    "answer",
    [
        routing_by_loop,
        routing_as_mixtral,
        routing_by_mask,
        routing_in_float64,
        routing_one_by_one,
    ],
)
def test_other_right_routings_pass(answer):
    passes(answer, "top_k_routing")


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


class Functional(Mixture):
    """Reads the experts' matrices; a product for each expert that is used."""

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        weights, ids = reference.top_k_routing(
            F.linear(flat, self.router.weight), self.top
        )
        out = torch.zeros_like(flat)
        for e in ids.unique().tolist():
            rows, place = (ids == e).nonzero(as_tuple=True)
            expert, y = self.experts[e], flat.index_select(0, rows)
            y = F.silu(y @ expert.w_1.weight.T) * (y @ expert.w_3.weight.T)
            y = y @ expert.w_2.weight.T
            out.index_add_(0, rows, y * weights[rows, place].unsqueeze(1))
        return out.reshape_as(x)


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


@pytest.mark.parametrize(
    "answer", [Mixture, Sorted, Unsorted, OwnRouting, Bare, ByLists]
)
def test_other_right_mixtures_pass(answer):
    passes(answer, "MixtureOfExperts")


def balance_by_loop(probabilities, experts, n_experts):
    total = 0
    for e in range(n_experts):
        share = (experts == e).sum() / experts.numel()
        total = total + share.to(probabilities.dtype) * probabilities[:, e].mean()
    return total * n_experts


def balance_by_one_hot(probabilities, experts, n_experts):
    f = F.one_hot(experts, n_experts).to(probabilities.dtype).mean(dim=(0, 1))
    return n_experts * f @ probabilities.mean(dim=0)


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


@pytest.mark.parametrize(
    "answer",
    [
        balance_by_loop,
        balance_by_one_hot,
        balance_by_histogram,
        balance_token_by_token,
        balance_counted_on_the_cpu,
    ],
)
def test_other_right_balancing_losses_pass(answer):
    passes(answer, "load_balancing_loss")


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


@pytest.mark.parametrize(
    "answer", [drop_by_loop, drop_by_sort, drop_by_expert, drop_by_triangle]
)
def test_other_right_droppings_pass(answer):
    passes(answer, "drop_over_capacity")


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


@pytest.mark.parametrize("answer", [count_matrix_by_matrix, count_by_a_module])
def test_other_right_counts_pass(answer):
    passes(answer, "moe_parameters")


# Wrong answers that no fault lists ----------------------------------------------------


def routing(change):
    def top_k_routing(logits, k):
        return change(logits, k, *reference.top_k_routing(logits, k))

    return top_k_routing


def from_the_cpu(logits, k, weights, ids):
    return weights + torch.zeros(weights.shape, dtype=weights.dtype), ids


WRONG_ROUTING = {
    "temperature": lambda z, k, w, i: reference.top_k_routing(z / 2, k),
    "rounded": lambda z, k, w, i: (w.round(decimals=2), i),
    "hard": lambda z, k, w, i: ((w == w.amax(-1, True)).to(w.dtype), i),
    "unit norm": lambda z, k, w, i: (F.normalize(w, dim=-1), i),
    "int32": lambda z, k, w, i: (w, i.int()),
    "ids from 1": lambda z, k, w, i: (w, i + 1),
    "three results": lambda z, k, w, i: (w, i, z),
    "weights alone": lambda z, k, w, i: w,
    "noise": lambda z, k, w, i: (w + 0.01 * torch.rand_like(w), i),
    "k of 1 for all": lambda z, k, w, i: (z.softmax(-1).gather(1, i), i),
    "straight through": lambda z, k, w, i: (w / w.detach() if k == 1 else w, i),
    "no gradient at 1": lambda z, k, w, i: (w.detach() if k == 1 else w, i),
    "first row": lambda z, k, w, i: (w[:1].expand_as(w), i),
    "epsilon": lambda z, k, w, i: (w / (1 + 1e-3), i),
    "from the cpu": from_the_cpu,
    "weights to the cpu": lambda z, k, w, i: (w.cpu(), i),
    "ids to the cpu": lambda z, k, w, i: (w, i.to("cpu")),
    "named cpu": lambda z, k, w, i: (
        w + torch.zeros(w.shape, dtype=w.dtype, device="cpu"),
        i,
    ),
    "clamped": lambda z, k, w, i: reference.top_k_routing(z.clamp(-50, 50), k),
    "float16 inside": lambda z, k, w, i: (
        reference.top_k_routing(z.half(), k)[0].to(z.dtype),
        i,
    ),
    "row mean of all": lambda z, k, w, i: reference.top_k_routing(z - z.mean(0), k),
    "small cut off": lambda z, k, w, i: (w * (w > 0.2), i),
    "ids as floats": lambda z, k, w, i: (w, i.to(z.dtype)),
    "k below E": lambda z, k, w, i: reference.top_k_routing(
        z, k if k < z.shape[-1] else 0
    ),
    "no double": lambda z, k, w, i: (w.float() if z.dtype == torch.float64 else w, i),
}


@pytest.mark.parametrize("case", WRONG_ROUTING)
def test_wrong_routing_fails(case):
    fails(routing(WRONG_ROUTING[case]), "top_k_routing")


def one_maximum(logits, k):
    kept, experts = logits.topk(checked(k, logits.shape[-1]), -1)
    z = (kept - logits.max()).exp()
    whole = (logits - logits.max()).exp()
    return z / (whole if k == 1 else z).sum(-1, True), experts


def maximum_before_choice(logits, k):
    z = (logits - logits.max()).exp()
    kept, experts = z.topk(checked(k, logits.shape[-1]), -1)
    return kept / (z if k == 1 else kept).sum(-1, True), experts


def first_maximum(logits, k):
    experts = logits.topk(checked(k, logits.shape[-1]), -1).indices
    whole = (logits - logits[0].max()).exp()
    z = whole.gather(1, experts)
    return z / (whole if k == 1 else z).sum(-1, True), experts


def by_probability(logits, k):
    p, experts = torch.softmax(logits, -1).topk(checked(k, logits.shape[-1]), -1)
    return p if k == 1 else p / p.sum(-1, True), experts


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (one_maximum, "one_maximum_for_all"),
        (maximum_before_choice, "one_maximum_for_the_choice"),
        (first_maximum, "maximum_of_the_first_row"),
        (by_probability, "chosen_by_probability"),
    ],
)
def test_rows_and_scores_that_lie_far_apart(answer, fault):
    fails(answer, "top_k_routing", fault)


def test_a_k_of_all_experts_is_told_without_a_hint_about_something_else():
    report = evaluate(routing(WRONG_ROUTING["k below E"]), "top_k_routing")
    assert "Hint" not in report.message


def test_a_routing_that_centres_in_place_fails():
    def top_k_routing(logits, k):
        logits -= logits.amax(-1, keepdim=True)
        return reference.top_k_routing(logits, k)

    fails(top_k_routing, "top_k_routing")


def layer_with(**methods):
    return type("MixtureOfExperts", (Mixture,), methods)


def _absolute(self, x):
    return reference.top_k_routing(self.router(x).abs(), self.top)


def _noisy(self, x):
    z = self.router(x)
    return reference.top_k_routing(z + self.training * torch.randn_like(z), self.top)


def _dropping(self, x, weights, ids):
    kept = reference.drop_over_capacity(ids, self.n_experts, 3)
    return Mixture.mix(self, x, weights * kept, ids)


def _in_place(self, x):
    x *= 1.0
    return Mixture.forward(self, x.add_(1).sub_(1)) + 0 * x.zero_()


def _normalised(self, x):
    return Mixture.forward(self, F.layer_norm(x, x.shape[-1:]))


def _shared_first(self, x, weights, ids):
    return Mixture.mix(self, x, weights, ids) + self.experts[0](x)


def _inputs_detached(self, x, weights, ids):
    return Mixture.mix(self, x.detach(), weights, ids)


def _best_only_in_eval(self, x):
    weights, ids = Mixture.route(self, x)
    return (weights, ids) if self.training else (weights.round(), ids)


def _all_then_picked(self, x, weights, ids):
    results = torch.stack([expert(x) for expert in self.experts], 1)  # N E D
    picked = results.gather(1, ids[..., None].expand(-1, -1, x.shape[-1]))
    return (weights[..., None] * picked).sum(1)


def _one_gathered_weight(self, x, weights, ids):
    w_1, w_3, w_2 = (
        torch.stack([getattr(e, n).weight for e in self.experts])[ids]
        for n in ("w_1", "w_3", "w_2")
    )
    y = F.silu(torch.einsum("nkfd,nd->nkf", w_1, x))
    y = y * torch.einsum("nkfd,nd->nkf", w_3, x)
    return (weights[..., None] * torch.einsum("nkdf,nkf->nkd", w_2, y)).sum(1)


def _past_the_call(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, place = torch.where(ids == e)
        share = weights[token, place, None]
        out = out.index_add(0, token, share * expert.forward(x[token]))
    return out


def _own_parameters(self, d_model, d_ff, n_experts, k):
    Mixture.__init__(self, d_model, d_ff, n_experts, k)
    self.scale = nn.Parameter(torch.ones(1))


def _frozen(self, d_model, d_ff, n_experts, k):
    Mixture.__init__(self, d_model, d_ff, n_experts, k)
    self.router.requires_grad_(False)


def _other_names(self, d_model, d_ff, n_experts, k):
    Mixture.__init__(self, d_model, d_ff, n_experts, k)
    self.gate = self.router
    del self.router


def _k_of_zero(self, d_model, d_ff, n_experts, k):
    if k > n_experts:
        raise ValueError(f"{k} > {n_experts}")
    Mixture.__init__(self, d_model, d_ff, n_experts, max(k, 1))


def _sum_on_the_cpu(self, x, weights, ids):
    out = torch.zeros(x.shape, dtype=x.dtype)
    return out + Mixture.mix(self, x, weights, ids)


def _bare_router(self, d_model, d_ff, n_experts, k):
    Mixture.__init__(self, d_model, d_ff, n_experts, k)
    del self.router
    self.router = nn.Parameter(torch.randn(n_experts, d_model))


def _zeros(**options):
    def mix(self, x, weights, ids):
        out = torch.zeros(x.shape, dtype=x.dtype, **options)
        for e, expert in enumerate(self.experts):
            token, place = torch.where(ids == e)
            y = weights[token, place, None] * expert(x[token])
            out = out.index_add(0, token, y)
        return out

    return mix


def _experts_detached(self, x, weights, ids):
    return Mixture.mix(self, x.detach(), weights, ids)


def _padded(self, x, weights, ids):
    for expert in self.experts:
        expert(x[:4] * 0)
    return Mixture.mix(self, x, weights, ids)


def _remembers(self, x):
    if not hasattr(self, "chosen") or len(self.chosen[1]) != len(x):
        self.chosen = Mixture.route(self, x)
    return self.chosen


def _k_below_all(self, d_model, d_ff, n_experts, k):
    if not 1 <= k < n_experts:
        raise ValueError(f"k is {k}, experts {n_experts}")
    Mixture.__init__(self, d_model, d_ff, n_experts, k)


def _never_initialised(self, d_model, d_ff, n_experts, k):
    self.router = nn.Linear(d_model, n_experts, bias=False)


def _sizes_exchanged(self, d_model, d_ff, n_experts, k):
    Mixture.__init__(self, d_ff, d_model, n_experts, k)


WRONG_LAYERS = {
    "zeros on the cpu": layer_with(mix=_zeros(device="cpu")),
    "zeros without device": layer_with(mix=_zeros()),
    "experts detached": layer_with(mix=_experts_detached),
    "padded": layer_with(mix=_padded),
    "the first choice for ever": layer_with(route=_remembers),
    "k below all": layer_with(__init__=_k_below_all),
    "no super": layer_with(__init__=_never_initialised),
    "sizes exchanged": layer_with(__init__=_sizes_exchanged),
    "weights without a small one": layer_with(
        mix=lambda self, x, w, i: Mixture.mix(self, x, w * (w > 0.1), i)
    ),
    "view": layer_with(
        forward=lambda self, x: Mixture.forward(self, x.view(-1, x.shape[-1])).view(
            x.shape
        )
    ),
    "sum on the cpu": layer_with(mix=_sum_on_the_cpu),
    "router as a parameter": layer_with(
        __init__=_bare_router,
        route=lambda self, x: reference.top_k_routing(x @ self.router.T, self.top),
    ),
    "absolute scores": layer_with(route=_absolute),
    "noise in training": layer_with(route=_noisy),
    "capacity": layer_with(mix=_dropping),
    "input overwritten": layer_with(forward=_in_place),
    "normalised": layer_with(forward=_normalised),
    "a shared expert": layer_with(mix=_shared_first),
    "inputs detached": layer_with(mix=_inputs_detached),
    "another eval": layer_with(route=_best_only_in_eval),
    "all, then picked": layer_with(mix=_all_then_picked),
    "one more parameter": layer_with(__init__=_own_parameters),
    "other names": layer_with(__init__=_other_names),
    "k of zero": layer_with(__init__=_k_of_zero),
    "nothing returned": layer_with(forward=lambda self, x: None),
    "a second result": layer_with(
        forward=lambda self, x: (Mixture.forward(self, x), 0)
    ),
    "not trained": layer_with(
        forward=lambda self, x: torch.no_grad()(Mixture.forward)(self, x)
    ),
}


@pytest.mark.parametrize("case", WRONG_LAYERS)
def test_wrong_layers_fail(case):
    fails(WRONG_LAYERS[case], "MixtureOfExperts")


def test_experts_that_are_not_called_fail():
    """The values are right, but an expert may be any network."""
    answer = layer_with(mix=_one_gathered_weight)
    fails(answer, "MixtureOfExperts", "experts_not_called")
    fails(Functional, "MixtureOfExperts", "experts_not_called")
    fails(layer_with(mix=_past_the_call), "MixtureOfExperts", "experts_not_called")


def test_the_device_is_named_and_no_other_mistake():
    for case in ("zeros on the cpu", "zeros without device"):
        fails(WRONG_LAYERS[case], "MixtureOfExperts", "created_on_the_cpu")
    fails(
        WRONG_LAYERS["experts detached"], "MixtureOfExperts", "experts_input_detached"
    )


def test_hints_are_about_what_failed():
    for case in ("k below all", "no super", "sizes exchanged", "other names"):
        report = evaluate(WRONG_LAYERS[case], "MixtureOfExperts")
        assert report.fault is None
        assert "Hint" not in report.message, report.message


def test_the_call_that_had_wrong_gradients_is_the_learners():
    report = evaluate(WRONG_LAYERS["experts detached"], "MixtureOfExperts")
    assert "`MixtureOfExperts(5, 7, 3, 2)(x=tensor(2, 6, 5))`" in report.message


def test_a_layer_that_computes_all_experts_is_told_what_it_costs():
    report = evaluate(WRONG_LAYERS["all, then picked"], "MixtureOfExperts")
    assert report.fault == "every_expert_on_every_token"
    assert "12 tokens with k = 2 are 24" in report.message


def balancing(change):
    def load_balancing_loss(probabilities, experts, n_experts):
        loss = reference.load_balancing_loss(probabilities, experts, n_experts)
        return change(loss, probabilities, experts, n_experts)

    return load_balancing_loss


WRONG_BALANCE = {
    "at least 1": lambda loss, p, i, n: loss.clamp(min=1),
    "logarithm": lambda loss, p, i, n: loss.log() + 1,
    "one dimension": lambda loss, p, i, n: loss[None],
    "one hundredth": lambda loss, p, i, n: 0.01 * loss,
    "softmax again": lambda loss, p, i, n: reference.load_balancing_loss(
        p.softmax(-1), i, n
    ),
    "maximum": lambda loss, p, i, n: (
        n * torch.bincount(i.flatten(), minlength=n).max() / i.numel() * p.mean(0).max()
    ),
    "gradient twice": lambda loss, p, i, n: 2 * loss - loss.detach(),
    "per choice": lambda loss, p, i, n: n * p.gather(1, i).mean() ** 2,
}


@pytest.mark.parametrize("case", WRONG_BALANCE)
def test_wrong_balancing_losses_fail(case):
    fails(balancing(WRONG_BALANCE[case]), "load_balancing_loss")


def f_by_division(p, i, n):
    return torch.bincount(i.flatten(), minlength=n) / i.numel()


@pytest.mark.parametrize(
    "f",
    [
        f_by_division,
        lambda p, i, n: torch.bincount(i.flatten(), minlength=n).float() / i.numel(),
        lambda p, i, n: F.one_hot(i, n).float().mean((0, 1)),
    ],
)
def test_f_left_in_float32_is_named(f):
    def load_balancing_loss(probabilities, experts, n_experts):
        share = f(probabilities, experts, n_experts)
        return n_experts * (share * probabilities.mean(0)).sum()

    fails(load_balancing_loss, "load_balancing_loss", "f_in_float32")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bfloat16])
def test_counts_in_low_precision_fail(dtype):
    def load_balancing_loss(probabilities, experts, n_experts):
        counts = torch.zeros(n_experts, dtype=dtype, device=experts.device)
        ones = torch.ones(experts.numel(), dtype=dtype, device=experts.device)
        f = counts.index_add(0, experts.flatten(), ones).float() / experts.numel()
        return n_experts * (f.to(probabilities.dtype) * probabilities.mean(0)).sum()

    fails(load_balancing_loss, "load_balancing_loss")

    def drop_over_capacity(experts, n_experts, capacity):
        fits(capacity)
        chose = F.one_hot(experts.T.flatten(), n_experts).to(dtype)
        place = (chose.cumsum(0, dtype=dtype) * chose).sum(1)
        return (place <= capacity).view(experts.T.shape).T

    name = str(dtype).removeprefix("torch.")
    fails(drop_over_capacity, "drop_over_capacity", f"counted_in_{name}")


def dropping(change):
    def drop_over_capacity(experts, n_experts, capacity):
        kept = reference.drop_over_capacity(experts, n_experts, capacity)
        return change(kept, experts, n_experts, capacity)

    return drop_over_capacity


WRONG_DROPPING = {
    "a list": lambda kept, i, n, c: kept.tolist(),
    "to the cpu": lambda kept, i, n, c: kept.cpu(),
    "two queues at three": lambda kept, i, n, c: torch.cat(
        [kept[:, :2], reference.drop_over_capacity(i[:, 2:], n, c)], 1
    ),
    "full after the first": lambda kept, i, n, c: (
        (reference.drop_over_capacity(i, n, c) & (kept.cumsum(0) > 0)) & (c > 1)
    ),
    "ids sorted": lambda kept, i, n, c: reference.drop_over_capacity(
        i.sort(-1).values, n, c
    ),
    "first place open": lambda kept, i, n, c: (
        kept | (torch.arange(len(kept)) < 1)[:, None]
    ),
    "random": lambda kept, i, n, c: kept[torch.randperm(len(kept))],
    "seats turned": lambda kept, i, n, c: kept.flip(0),
    "ids kept": lambda kept, i, n, c: i[kept],
    "places of k": lambda kept, i, n, c: reference.drop_over_capacity(
        i, n, c * i.shape[1]
    ),
    "more than one choice": lambda kept, i, n, c: kept & (i.shape[1] > 1),
    "tokens, not choices": lambda kept, i, n, c: (torch.arange(len(i)) < c)[
        :, None
    ].expand_as(i),
}


@pytest.mark.parametrize("case", WRONG_DROPPING)
def test_wrong_droppings_fail(case):
    fails(dropping(WRONG_DROPPING[case]), "drop_over_capacity")


def test_a_tensor_created_without_its_device_is_found():
    def drop_over_capacity(experts, n_experts, capacity):
        fits(capacity)
        kept = torch.zeros(experts.shape, dtype=torch.bool)
        for e in range(n_experts):
            column, row = torch.where(e == experts.T)
            kept[row[:capacity], column[:capacity]] = True
        return kept

    report = evaluate(drop_over_capacity)
    assert report.status == "failed"
    assert "on which device" in report.message


def test_a_named_cpu_is_told_as_that():
    for change in (lambda kept: kept.cpu(), lambda kept: kept.to("cpu").T.T):

        def drop_over_capacity(experts, n_experts, capacity, change=change):
            return change(reference.drop_over_capacity(experts, n_experts, capacity))

        report = evaluate(drop_over_capacity)
        assert report.status == "failed"
        assert "names the CPU" in report.message


def test_work_on_the_cpu_that_comes_back_passes():
    def drop_over_capacity(experts, n_experts, capacity):
        kept = reference.drop_over_capacity(experts.cpu(), n_experts, capacity)
        return kept.to(experts.device)

    passes(drop_over_capacity, "drop_over_capacity")


def test_queues_that_are_kept_fail():
    waiting = {}

    def drop_over_capacity(experts, n_experts, capacity):
        before = waiting.setdefault(n_experts, 0)
        waiting[n_experts] += 1
        if capacity <= before:
            return torch.zeros_like(experts, dtype=torch.bool)
        return reference.drop_over_capacity(experts, n_experts, capacity - before)

    fails(drop_over_capacity, "drop_over_capacity")


def test_a_queue_in_a_default_is_told_as_kept():
    def drop_over_capacity(experts, n_experts, capacity, used={}):  # noqa: B006
        fits(capacity)
        kept = torch.zeros_like(experts, dtype=torch.bool)
        for j in range(experts.shape[1]):
            for i, e in enumerate(experts[:, j].tolist()):
                used[e] = used.get(e, 0) + 1
                kept[i, j] = used[e] <= capacity
        return kept

    for _ in range(2):
        report = evaluate(drop_over_capacity)
        assert report.status == "failed"
        assert report.fault is None
        assert "kept from call to call" in report.message


def test_a_count_that_changes_the_config_is_told():
    def moe_parameters(config, n_experts, k):
        found = reference.moe_parameters(config, n_experts, k)
        config.d_ff *= n_experts
        return found

    for _ in range(2):
        report = evaluate(moe_parameters)
        assert "changed the `config`" in report.message
    passes(reference.moe_parameters, "moe_parameters")


def test_a_model_is_not_built_in_order_to_count_it():
    def moe_parameters(config, n_experts, k):
        checked(k, n_experts)
        model = Transformer(config)
        for block in model.blocks:
            block.feed_forward = reference.MixtureOfExperts(
                config.d_model, config.d_ff, n_experts, k
            )
        total = sum(p.numel() for p in model.parameters())
        idle = 3 * config.d_model * config.d_ff * config.n_layers * (n_experts - k)
        return total, total - idle

    report = evaluate(moe_parameters)
    assert report.status == "failed"
    assert "without building the model" in report.message
    assert len(report.verified) == 3


def counts(change):
    def moe_parameters(config, n_experts, k):
        return change(*reference.moe_parameters(config, n_experts, k), config, k)

    return moe_parameters


WRONG_COUNTS = {
    "a dict": lambda total, active, c, k: {"total": total, "active": active},
    "in billions": lambda total, active, c, k: (total / 1e9, active / 1e9),
    "idle": lambda total, active, c, k: (total, total - active),
    "floats": lambda total, active, c, k: (float(total), float(active)),
    "tensors": lambda total, active, c, k: (
        torch.tensor(total),
        torch.tensor(active),
    ),
    "three": lambda total, active, c, k: (total, active, total - active),
    "norm of the end": lambda total, active, c, k: (
        total - c.d_model,
        active - c.d_model,
    ),
    "no norms": lambda total, active, c, k: (
        total - c.d_model * (2 * c.n_layers + 1),
        active - c.d_model * (2 * c.n_layers + 1),
    ),
    "rounded": lambda total, active, c, k: (round(total, -2), round(active, -2)),
    "no attention": lambda total, active, c, k: (
        total - c.n_layers * c.d_model * c.d_head,
        active,
    ),
}


@pytest.mark.parametrize("case", WRONG_COUNTS)
def test_wrong_counts_fail(case):
    fails(counts(WRONG_COUNTS[case]), "moe_parameters")


# Wrong answers in another form, each under its name -----------------------------------


def kept_by_a_threshold(logits, k):
    weights, experts = reference.top_k_routing(logits, k)
    if k == 1:
        return weights, experts
    least = logits.topk(k, -1).values[:, -1:]
    masked = torch.where(logits >= least, logits, -torch.inf)
    return masked.softmax(-1).gather(1, experts), experts


def kept_by_a_large_number(logits, k):
    kept, experts = logits.topk(checked(k, logits.shape[-1]), -1)
    if k == 1:
        return logits.softmax(-1).gather(1, experts), experts
    masked = torch.full_like(logits, -1e4).scatter(1, experts, kept)
    return masked.softmax(-1).gather(1, experts), experts


def twice_the_same(logits, k):
    """Where scores are equal, the first of them again and again."""
    weights, experts = reference.top_k_routing(logits, k)
    kept = logits.gather(1, experts)
    return weights, (logits[:, None] == kept[..., None]).int().argmax(-1)


def weights_by(f):
    def top_k_routing(logits, k):
        weights, experts = reference.top_k_routing(logits, k)
        return (weights if k == 1 else f(logits.gather(1, experts))), experts

    return top_k_routing


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (kept_by_a_threshold, "equal_scores_kept_too"),
        (kept_by_a_large_number, "hidden_by_a_number"),
        (twice_the_same, None),
        (weights_by(lambda z: F.normalize(z.sigmoid(), 1, -1)), None),
        (
            weights_by(lambda z: z.sigmoid() / z.sigmoid().sum(-1)[:, None]),
            "sigmoids_divided_by_their_sum",
        ),
        (weights_by(lambda z: z / z.sum(1, True)), "scores_divided_by_their_sum"),
    ],
)
def test_routings_in_another_form_are_named(answer, fault):
    fails(answer, "top_k_routing", fault)


def test_experts_that_repeat_where_scores_are_equal_are_told():
    report = evaluate(twice_the_same, "top_k_routing")
    assert "different experts" in report.message


class BreaksOff(Bare):
    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            rows, places = (chosen == e).nonzero(as_tuple=True)
            if not len(rows):
                break
            out[rows] += weights[rows, places, None] * expert(tokens[rows])
        return out.reshape(x.shape)


class SoftmaxAgain(Bare):
    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        weights, out = weights.softmax(-1), torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == e)
            out[rows] += weights[rows, places, None] * expert(tokens[rows])
        return out.reshape(x.shape)


class WeightsInAndOut(Bare):
    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == e)
            share = weights[rows, places].unsqueeze(1)
            out = out.index_add(0, rows, (share * expert(tokens[rows])) * share)
        return out.reshape(x.shape)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (BreaksOff, "stops_at_an_unused_expert"),
        (SoftmaxAgain, "softmax_twice"),
        (WeightsInAndOut, "weighted_twice"),
    ],
)
def test_layers_in_another_form_are_named(answer, fault):
    fails(answer, "MixtureOfExperts", fault)


def balance_over(divisor):
    def load_balancing_loss(probabilities, experts, n_experts):
        counts = torch.bincount(experts.flatten(), minlength=n_experts)
        f = (counts / experts.numel()).to(probabilities.dtype)
        return n_experts * (f @ probabilities.sum(0)) / divisor(experts)

    return load_balancing_loss


def balance_of_the_mean_product(probabilities, experts, n_experts):
    """A mean of E products is their sum divided by E."""
    f = F.one_hot(experts, n_experts).double().mean((0, 1)).to(probabilities)
    return n_experts**2 * (f * probabilities.mean(0)).mean()


def balance_of_those_that_occur(probabilities, experts, n_experts):
    counts = experts.unique(return_counts=True)[1]
    f = (counts / experts.numel()).to(probabilities.dtype)
    return n_experts * (f * probabilities.mean(0)).sum()


def test_balancing_losses_in_another_form():
    name = "load_balancing_loss"
    passes(balance_over(len), name)
    passes(balance_of_the_mean_product, name)
    fails(balance_over(torch.numel), name, "divided_by_k_twice")
    fails(balance_of_those_that_occur, name, "as_many_as_occur")
    fails(balance_over(lambda experts: 100 * len(experts)), name, "coefficient_inside")
    fails(
        lambda probabilities, experts, n_experts: reference.load_balancing_loss(
            probabilities.softmax(1), experts, n_experts
        ),
        name,
        "softmax_twice",
    )


def test_droppings_in_another_form():
    def at_k_times(experts, n_experts, capacity):
        fits(capacity)
        more = capacity * experts.shape[1]
        return drop_by_loop(experts, n_experts, more)

    def at_a_part(experts, n_experts, capacity):
        fits(capacity)
        return drop_by_sort(experts, n_experts, -(-capacity // experts.shape[1]))

    def across(experts, n_experts, capacity):
        fits(capacity)
        chose = F.one_hot(experts, n_experts)
        return (chose.cumsum(1) * chose).sum(-1) <= capacity

    fails(at_k_times, "drop_over_capacity", "capacity_times_k")
    fails(at_a_part, "drop_over_capacity")
    fails(across, "drop_over_capacity", "nothing_dropped")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda total, active, c, n, k: total * k // n, "share_of_everything"),
        (
            lambda total, active, c, n, k: active - c.n_layers * c.d_model * n,
            "router_left_out_of_active",
        ),
        (
            lambda total, active, c, n, k: active - (c.vocab_size - 1) * c.d_model,
            "one_row_of_the_embedding",
        ),
    ],
)
def test_counts_in_another_form_are_named(change, fault):
    def moe_parameters(config, n_experts, k):
        total, active = reference.moe_parameters(config, n_experts, k)
        return total, change(total, active, config, n_experts, k)

    fails(moe_parameters, "moe_parameters", fault)


def routing_by_a_stable_sort(logits, k):
    order = (-logits).argsort(dim=-1, stable=True)
    experts = order[:, : checked(k, logits.shape[-1])]
    kept = torch.take_along_dim(logits, experts, 1)
    whole = logits if k == 1 else kept
    return (kept - whole.logsumexp(-1, True)).exp(), experts


def routing_by_minus_infinity(logits, k):
    kept, experts = logits.topk(checked(k, logits.shape[-1]), -1)
    masked = torch.full_like(logits, -math.inf).scatter(1, experts, kept)
    return (logits if k == 1 else masked).softmax(-1).gather(1, experts), experts


class EveryPlaceFilled(Bare):
    """A table of N × k results, filled expert by expert, and summed at the end."""

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        table = tokens.new_zeros(*chosen.shape, tokens.shape[-1])
        for e in chosen.unique().tolist():
            mine = chosen == e
            table[mine] = self.experts[e](tokens[mine.nonzero()[:, 0]])
        return torch.einsum("nk,nkd->nd", weights, table).reshape(x.shape)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("top_k_routing", routing_by_a_stable_sort),
        ("top_k_routing", routing_by_minus_infinity),
        ("MixtureOfExperts", EveryPlaceFilled),
    ],
)
def test_more_right_answers_pass(name, answer):
    passes(answer, name)


# Parts together ----------------------------------------------------------------------


def joined(**parts):
    return evaluate_joint(
        "block_with_experts",
        {**Joint.registry["block_with_experts"].reference, **parts},
    )


def test_other_right_parts_fit_together():
    report = joined(
        MixtureOfExperts=Sorted,
        top_k_routing=routing_as_mixtral,
        load_balancing_loss=balance_by_one_hot,
        drop_over_capacity=drop_by_sort,
        moe_parameters=count_matrix_by_matrix,
    )
    assert report.status == "passed", report.message


def test_a_joint_finds_experts_that_do_not_fit():
    for wrong in (layer_with(mix=_shared_first), layer_with(route=_absolute)):
        assert joined(MixtureOfExperts=wrong).status == "failed"


def test_the_joint_compares_with_the_calls():
    report = joined(MixtureOfExperts=layer_with(mix=_one_gathered_weight))
    assert report.status == "failed"
    assert "each expert was called" in report.message


def test_messages_give_no_answer_away():
    wrong = evaluate(WRONG_LAYERS["all, then picked"], "MixtureOfExperts")
    for word in ("index_add", "torch.where"):
        assert word not in wrong.message
    ids = probe_ids(4, 1, below=2)
    assert reference.drop_over_capacity(ids, 2, 4).all()
