"""Lesson 12: routing, a mixture of experts, its balance, its capacity, its size."""

import copy
import inspect
import itertools
import math
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from utils.check.errors import Crashed, Explained, Unmet
from utils.check.exercise import Exercise, IntegrationCheck
from utils.exercises.forward_pass import (
    FIELDS,
    LLAMA,
    Sizes,
    block_shapes,
    block_with,
    doubled,
    load_all,
    looked_up,
    model_shapes,
    normed,
    numbers_in,
    weights_for,
)
from utils.probe import probe, probe_ids, strided

top_k_routing = Exercise("top_k_routing", lesson="mixture_of_experts")
MixtureOfExperts = Exercise("MixtureOfExperts", lesson="mixture_of_experts")
balance = Exercise("load_balancing_loss", lesson="mixture_of_experts")
dropping = Exercise("drop_over_capacity", lesson="mixture_of_experts")
counting = Exercise("moe_parameters", lesson="mixture_of_experts")


# What is right, one token after the other ---------------------------------------------


def slow_routing(logits, k):
    """Sort the scores of each token; divide exponentials by hand."""
    weights, experts = [], []
    for row in logits:
        order = sorted(range(len(row)), key=lambda e: -row[e].item())[:k]
        share = torch.exp(row - row.max())
        total = share.sum() if k == 1 else sum(share[e] for e in order)
        weights.append(torch.stack([share[e] / total for e in order]))
        experts.append(order)
    return torch.stack(weights), torch.tensor(experts)


def slow_mixture(x, p, k):
    """Weights by name in `p`: one token and one expert at a time."""
    out = []
    for token in x.reshape(-1, x.shape[-1]):
        shares, experts = slow_routing((p["router"] @ token)[None], k)
        total = torch.zeros_like(token)
        for share, e in zip(shares[0], experts[0].tolist(), strict=True):
            w_1, w_3, w_2 = (p[f"experts.{e}.{n}"] for n in ("w_1", "w_3", "w_2"))
            total = total + share * (w_2 @ (F.silu(w_1 @ token) * (w_3 @ token)))
        out.append(total)
    return torch.stack(out).reshape(x.shape)


def slow_balance(probabilities, experts, n_experts):
    flat = experts.flatten().tolist()
    total = 0.0
    for e in range(n_experts):
        total = total + flat.count(e) / len(flat) * probabilities[:, e].mean()
    return n_experts * total


def slow_drop(experts, n_experts, capacity):
    free = [capacity] * n_experts
    ids = experts.tolist()
    kept = [[False] * len(row) for row in ids]
    for place in range(experts.shape[1]):
        for token, row in enumerate(ids):
            kept[token][place] = free[row[place]] > 0
            free[row[place]] -= 1
    return torch.tensor(kept).reshape(experts.shape)


def slow_count(c, n_experts, k):
    """From the shapes of every matrix of the decoder."""
    shapes = model_shapes(c)
    matrix = c.d_model * c.d_ff
    rest = sum(
        math.prod(shape) for name, shape in shapes.items() if "feed_forward" not in name
    )
    router = c.n_layers * c.d_model * n_experts
    return tuple(rest + router + c.n_layers * 3 * n * matrix for n in (n_experts, k))


# Inputs -------------------------------------------------------------------------------


def scores(n, e, seed=0, step=0.75, shift=0.0, dtype=torch.float32):
    """Router scores `(n, e)`, in each row far enough apart for half precision too."""
    rank = probe(n, e, seed=seed).argsort(-1).argsort(-1)
    level = probe(n, 1, seed=seed + 50)
    return (step * (rank - e / 2) + 0.1 * level + shift).to(dtype)


def distinct_choices(n, e, k, seed=0):
    """Expert ids `(n, k)`, no expert twice in a row, some experts more popular."""
    popular = torch.arange(e) * -0.35
    return (probe(n, e, seed=seed) + popular).topk(k, dim=-1).indices


def mixture_shapes(d_model, d_ff, n_experts):
    shapes = {"router": (n_experts, d_model)}
    for e in range(n_experts):
        shapes |= {
            f"experts.{e}.w_1": (d_ff, d_model),
            f"experts.{e}.w_3": (d_ff, d_model),
            f"experts.{e}.w_2": (d_model, d_ff),
        }
    return shapes


def mixture_weights(d_model, d_ff, n_experts, seed=0):
    p = weights_for(mixture_shapes(d_model, d_ff, n_experts), 300 + 60 * seed)
    p["router"] = 1.5 * p["router"]
    return p


def filled(case, answer, d_model, d_ff, n_experts, k, seed=0):
    """A module with known weights, and those weights by name."""
    module = case.call(answer, d_model, d_ff, n_experts, k)
    is_module(module)
    p = mixture_weights(d_model, d_ff, n_experts, seed)
    return load_all(case, module, p), p


def is_module(module):
    for name, kinds, kind in (
        ("router", nn.Module, "a module that can be called, `nn.Linear`"),
        ("experts", (nn.ModuleList, nn.Sequential), "an `nn.ModuleList`"),
    ):
        part = getattr(module, name, None)
        if part is None:
            raise Unmet(f"It has no part `{name}`.")
        if isinstance(part, (list, tuple, dict)):
            raise Explained(
                f"`{name}` is a plain {type(part).__name__}, into which PyTorch does not "
                f"look: make it {kind}."
            )
        if not isinstance(part, kinds):
            raise Unmet(f"`{name}` is of type {type(part).__name__}, expected {kind}.")


def oracle_for(p, k):
    p = doubled(p)
    return lambda x: slow_mixture(x.double(), p, k)


# top_k_routing ------------------------------------------------------------------------


def routed(case, answer, logits, k, tolerance=None):
    result = case.call(answer, logits, k)
    case.is_tuple(result, 2)
    weights, experts = slow_routing(logits.double(), k)
    case.is_tensor(result[1], "the second result")
    case.equal(result[1], experts, "the tensor of expert ids")
    case.close(
        result[0], weights, "the tensor of weights", like=logits, tolerance=tolerance
    )


@top_k_routing.requires(
    "with k of 2 and more: the ids of the k highest scores, the highest first, and "
    "softmax over these k",
    "Take one token with the scores 2, 0, 1 and k = 2. Which two experts, in which "
    "order? Their two weights sum to 1, and the third score has no say in them.",
)
def _(answer, case):
    routed(case, answer, scores(7, 5), 2)
    routed(case, answer, scores(4, 6, seed=1), 3)
    routed(case, answer, scores(3, 7, seed=2, shift=-4.0), 2)
    routed(case, answer, scores(1, 4, seed=3), 2)


@top_k_routing.requires(
    "k = E keeps every expert, sorted",
)
def _(answer, case):
    routed(case, answer, scores(5, 4, seed=4), 4)
    routed(case, answer, scores(3, 2, seed=5), k=2)


@top_k_routing.requires(
    "with k = 1 the weight is the expert's probability among all experts",
    "Read the contract's line about k = 1 again, and compare with one row by hand.",
)
def _(answer, case):
    routed(case, answer, scores(7, 5, seed=6), 1)
    routed(case, answer, scores(4, 3, seed=7, step=0.2), 1)


@top_k_routing.requires(
    "with a single expert the weight is 1",
)
def _(answer, case):
    routed(case, answer, scores(4, 1, seed=8), 1)


@top_k_routing.requires(
    "scores of ±10,000 give no overflow",
    "Do the weights depend on how large the scores are, or on their differences?",
)
def _(answer, case):
    for shift in (10_000.0, -10_000.0):
        for k in (1, 2):
            routed(case, answer, scores(6, 5, seed=9, shift=shift), k, tolerance=0.01)


@top_k_routing.requires(
    "rows that lie far apart do not disturb each other",
    "Each row is another token's. What do your weights of one row take from the others?",
)
def _(answer, case):
    for level in ((0.0, 500.0, -500.0, 2000.0), (-900.0, 0.0, 900.0, 100.0)):
        logits = scores(4, 5, seed=17) + torch.tensor(level)[:, None]
        for k in (1, 2, 5):
            routed(case, answer, logits, k, tolerance=0.01)


@top_k_routing.requires(
    "scores that lie far apart within a row keep their order",
    "Choose by the scores themselves: what comes out of an exponential can be 0 for "
    "several of them.",
)
def _(answer, case):
    for k in (2, 3, 5):
        routed(case, answer, scores(6, 5, seed=18, step=150.0), k, tolerance=0.01)


@top_k_routing.requires(
    "among equal scores any may be kept, but k of them, and the weights are of these",
    "With the scores 1, 0, 0 and k = 2, how many scores are at least as high as the "
    "second? Two experts are kept all the same.",
)
def _(answer, case):
    logits = probe_ids(7, 5, below=3, seed=19).float()
    for k in (1, 2, 3):
        result = case.call(answer, logits, k)
        case.is_tuple(result, 2)
        weights, experts = result
        case.is_tensor(experts, "the second result")
        case.true(
            experts.shape == (7, k)
            and all(len(set(row)) == k for row in experts.tolist()),
            f"Where scores are equal, some row has not {k} different experts.",
        )
        kept = logits.gather(1, experts)
        case.equal(kept, logits.topk(k).values, "the scores of the kept experts")
        case.close(
            weights, slow_routing(logits.double(), k)[0], "the tensor of weights"
        )


@top_k_routing.requires(
    "gradients flow through the weights to the scores, with k = 1 too",
    "Which steps lie between the scores and the weights, and does each have a slope?",
)
def _(answer, case):
    for k in (1, 2, 3):
        case.gradients_agree(answer, slow_routing, scores(5, 4, seed=10 + k), k)


@top_k_routing.requires(
    "float64, float16, bfloat16 and memory that is not contiguous work"
)
def _(answer, case):
    for k in (1, 3):
        double = scores(5, 4, seed=14, dtype=torch.float64)
        routed(case, answer, double, k, tolerance=1e-6)  # many take softmax in float32
        for dtype in (torch.float16, torch.bfloat16):
            routed(case, answer, scores(5, 4, seed=14, dtype=dtype), k)
            far = scores(6, 5, seed=18, step=150.0, dtype=dtype)
            routed(case, answer, far, k, tolerance=0.01)
    routed(case, answer, strided(scores(5, 4, seed=15)), 2)
    routed(case, answer, scores(4, 4, seed=16).T, 2)


@top_k_routing.requires(
    "a k below 1 or above the number of experts is a ValueError that names both",
    'Ask before you compute; `raise ValueError(f"…")` with both numbers in it.',
)
def _(answer, case):
    for n_experts, k in ((5, 6), (13, 17), (5, 0), (5, -2)):
        case.raises(
            ValueError,
            answer,
            scores(3, n_experts),
            k,
            mentions=(k, n_experts),
            because=f"with k = {k} of {n_experts} experts",
        )


@top_k_routing.requires("it creates nothing on another device")
def _(answer, case):
    for k in (1, 2):
        case.any_device(answer, scores(5, 4), k)
        case.any_device(answer, scores(5, 4), k)


def refused(k, n_experts):
    if not 1 <= k <= n_experts:
        raise ValueError(f"k = {k} does not fit {n_experts} experts")


def right_routing(logits, k):
    refused(k, logits.shape[-1])
    p = torch.softmax(logits, -1)
    experts = logits.topk(k, -1).indices
    kept = p.gather(1, experts)
    return kept if k == 1 else torch.softmax(logits.gather(1, experts), -1), experts


# MixtureOfExperts ---------------------------------------------------------------------


@MixtureOfExperts.requires(
    "`router` holds (n_experts, d_model) without bias, and `experts` n_experts networks "
    "with `w_1`, `w_3` and `w_2`",
)
def _(answer, case):
    module = case.call(answer, 5, 7, 4, 2)
    is_module(module)
    case.parameter_count(module, 4 * 5 + 4 * 3 * 5 * 7)
    load_all(case, module, mixture_weights(5, 7, 4))
    case.call(answer, d_model=4, d_ff=9, n_experts=3, k=1)


@MixtureOfExperts.requires(
    "with k = 1 each token gets its expert's result times the expert's probability",
    "Make one long list of tokens first. Then send one through by hand: `router`, "
    "`top_k_routing`, the chosen expert, its weight.",
)
def _(answer, case):
    module, p = filled(case, answer, 5, 7, 4, 1)
    case.agrees(module, oracle_for(p, 1), probe(2, 6, 5, seed=1))


@MixtureOfExperts.requires(
    "with more, it gets the sum of its k experts' results by their weights",
    "Take one token by hand: its k experts, the k results, their weights, the sum. Where "
    "does yours differ?",
)
def _(answer, case):
    for n_experts, k, seed in ((4, 2, 1), (6, 3, 2)):
        module, p = filled(case, answer, 5, 7, n_experts, k, seed)
        case.agrees(module, oracle_for(p, k), probe(2, 6, 5, seed=seed))


@MixtureOfExperts.requires(
    "k may be n_experts, one too; each token then goes to all experts",
)
def _(answer, case):
    for n_experts, k, seed in ((3, 3, 3), (1, 1, 4)):
        module, p = filled(case, answer, 5, 7, n_experts, k, seed)
        case.agrees(module, oracle_for(p, k), probe(2, 6, 5, seed=seed))


@MixtureOfExperts.requires(
    "an expert that nobody chose is no problem",
    "What does your loop do when its list of tokens is empty?",
)
def _(answer, case):
    for k in (1, 2):
        module, p = filled(case, answer, 5, 7, 9, k, 5)
        case.agrees(module, oracle_for(p, k), probe(1, 2, 5, seed=8))


@MixtureOfExperts.requires(
    "every token is treated alone, however many dimensions stand before the last",
    "Which sizes does your code read from the shape of x? Only the last one is fixed; "
    "the long list of tokens gets its shape back at the end. And does what one token "
    "gets depend on the others, as under a capacity?",
)
def _(answer, case):
    module, p = filled(case, answer, 5, 7, 4, 2, 4)
    for sizes in ((2, 3, 5), (5,), (1, 1, 5), (2, 3, 4, 5)):
        case.agrees(module, oracle_for(p, 2), probe(*sizes, seed=5, scale=2))
    case.agrees(module, oracle_for(p, 2), probe(3, 2, 5, seed=6).transpose(0, 1))
    case.agrees(module, oracle_for(p, 2), strided(probe(2, 3, 5, seed=7)))


@MixtureOfExperts.requires(
    "each expert runs at most once, on the tokens that chose it and no others",
    "For each expert, find all the tokens that have it anywhere among their k, and give "
    "it these rows alone, all at once.",
)
def _(answer, case):
    d_model, d_ff, n_experts, k, n = 5, 7, 6, 2, 12
    module, _ = filled(case, answer, d_model, d_ff, n_experts, k, 6)
    rows = [[] for _ in range(n_experts)]
    hooks = [
        expert.register_forward_pre_hook(
            lambda _, args, named, e=e: rows[e].append(
                (*args, *named.values())[0].shape[:-1].numel()
            ),
            with_kwargs=True,
        )
        for e, expert in enumerate(module.experts)
    ]
    x = probe(3, 4, d_model, seed=9)
    with FlopCounterMode(display=False) as counter:
        case.call(module, x)
    for hook in hooks:
        hook.remove()
    case.note(tuple(map(tuple, rows)))
    for e, calls in enumerate(rows):
        case.true(
            len(calls) <= 1,
            f"Expert {e} ran {len(calls)} times for {n} tokens, on {calls} of them.",
        )
    total = sum(map(sum, rows))
    case.true(
        total > 0,
        "No expert was called: call each as a module, `expert(tokens)`, so that it may "
        "be any network, and nothing has to know what is in it.",
    )
    case.true(
        total == n * k,
        f"{n} tokens with k = {k} are {n * k} token-expert pairs, and your experts "
        f"computed {total}.",
    )
    due = 2 * n * n_experts * d_model + n * k * 6 * d_model * d_ff
    flops = counter.get_total_flops()
    case.note(flops)
    case.true(
        flops <= 1.5 * due,
        f"It spends {flops:,} floating-point operations, where the router and {k} "
        f"experts a token need {due:,}.",
    )


@MixtureOfExperts.requires("it works a second time, in `eval()`, and in other dtypes")
def _(answer, case):
    module, p = filled(case, answer, 5, 7, 4, 2, 7)
    oracle = oracle_for(p, 2)
    case.agrees(module, oracle, probe(2, 3, 5, seed=10))
    case.agrees(module, oracle, probe(3, 4, 5, seed=11))
    module.eval()
    case.agrees(module, oracle, probe(2, 3, 5, seed=10))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        other = copy.deepcopy(module).to(dtype)
        rounded = {n: w.to(dtype) for n, w in p.items()}
        x = probe(2, 3, 5, seed=10, dtype=dtype)
        expected = oracle_for(rounded, 2)(x)
        tolerance = 1e-5 if dtype == torch.float64 else None  # softmax in float32
        case.close(case.call(other, x), expected, like=x, tolerance=tolerance)


@MixtureOfExperts.requires(
    "gradients reach the input, the router and every chosen expert, with k = 1 too",
    "Which steps lie between what is named and the result, and does each have a slope? "
    "The choice has none; the router is trained through the weights.",
)
def _(answer, case):
    for k, seed in ((2, 8), (1, 9)):
        module, p = filled(case, answer, 5, 7, 3, k, seed)
        names = list(p)
        parameters = dict(module.named_parameters())

        def run(x, *values, module=module, names=names, parameters=parameters):
            given = {
                f"{n}.weight" if f"{n}.weight" in parameters else n: v
                for n, v in zip(names, values, strict=True)
            }
            return functional_call(module, given, (x,))

        def oracle(x, *values, names=names, k=k):
            return slow_mixture(x, dict(zip(names, values, strict=True)), k)

        run.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    n.replace(".", "_"), inspect.Parameter.POSITIONAL_ONLY
                )
                for n in ("x", *names)
            ]
        )
        try:
            case.gradients_agree(run, oracle, probe(2, 6, 5, seed=12), *p.values())
        finally:
            case.called = f"MixtureOfExperts(5, 7, 3, {k})(x=tensor(2, 6, 5))"


@MixtureOfExperts.requires(
    "the experts of a new module differ, and two modules keep their own weights",
    "Each expert must be created by a call of its own.",
)
def _(answer, case):
    first, p = filled(case, answer, 5, 7, 4, 2, 10)
    filled(case, answer, 5, 7, 4, 2, 11)
    case.agrees(first, oracle_for(p, 2), probe(2, 3, 5, seed=13))
    new = dict(case.call(answer, 5, 7, 4, 2).named_parameters())
    one, other = (
        next((v for n, v in new.items() if n.startswith(f"experts.{e}.w_1")), None)
        for e in (0, 1)
    )
    case.true(
        one is not None and not torch.equal(one, other),
        "Two experts of a new module hold the same numbers. What they are given then "
        "differs, but they start as copies.",
    )


@MixtureOfExperts.requires(
    "a k below 1 or above n_experts is a ValueError that names both",
    "Say it where the module is built, not at its first use.",
)
def _(answer, case):
    for n_experts, k in ((4, 0), (4, -1), (4, 5), (13, 17)):
        case.raises(
            ValueError,
            answer,
            5,
            7,
            n_experts,
            k,
            mentions=(k, n_experts),
            because=f"with k = {k} of {n_experts} experts",
        )


@MixtureOfExperts.requires("it creates nothing on another device")
def _(answer, case):
    module, _ = filled(case, answer, 5, 7, 4, 2, 12)
    case.any_device(module, probe(2, 3, 5))
    case.any_device(module, probe(2, 3, 5))


class Expert(nn.Module):
    def __init__(self, d_model, d_ff, bias=False):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff, bias=bias)
        self.w_3 = nn.Linear(d_model, d_ff, bias=bias)
        self.w_2 = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x):
        return self.w_2(F.silu(self.w_1(x)) * self.w_3(x))


class Mixture(nn.Module):
    """A right one, whose steps a fault replaces."""

    bias, expert, checks = False, Expert, True

    def __init__(self, d_model, d_ff, n_experts, k):
        super().__init__()
        if self.checks:
            refused(k, n_experts)
        self.k = k
        self.router = nn.Linear(d_model, n_experts, bias=self.bias)
        self.experts = nn.ModuleList(
            type(self).expert(d_model, d_ff) for _ in range(n_experts)
        )

    def route(self, x):
        return right_routing(self.router(x), self.k)

    def combine(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, place = torch.where(chosen == e)
            if len(token):
                share = weights[token, place, None]
                out = out.index_add(0, token, share * expert(x[token]))
        return out

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        return self.combine(tokens, *self.route(tokens)).reshape(x.shape)


def mixture(**changes):
    """The right module with other methods or settings."""
    return type("MixtureOfExperts", (Mixture,), changes)


def routed_as(change):
    """A mixture whose routing is `change(logits, k)`."""
    return mixture(route=lambda self, x: change(self.router(x), self.k))


# load_balancing_loss ------------------------------------------------------------------


def shares(n, e, seed=0, dtype=torch.float32):
    """Probabilities `(n, e)`, uneven over the experts."""
    logits = probe(n, e, seed=seed) - 0.4 * torch.arange(e)
    return torch.softmax(logits, -1).to(dtype)


@balance.requires(
    "with k = 1 it is E times the sum over experts of f·P",
    "f counts where the tokens went, P averages what the router thought. Both have E "
    "numbers, and each sums to 1.",
)
def _(answer, case):
    for n, e, seed in ((9, 4, 5), (15, 6, 1)):
        ids = distinct_choices(n, e, 1, seed)
        case.agrees(answer, slow_balance, shares(n, e, seed), ids, e)
    ids = probe_ids(11, 1, below=5, seed=6)  # not where the probabilities are highest
    case.agrees(answer, slow_balance, shares(11, 5, 2), ids, n_experts=5)


@balance.requires(
    "with more, f is the share of all N·k choices",
    "With k = 2, N tokens make 2·N choices. What do the E shares sum to?",
)
def _(answer, case):
    for k in (2, 3):
        ids = distinct_choices(9, 5, k, k)
        case.agrees(answer, slow_balance, shares(9, 5, k), ids, 5)


@balance.requires(
    "it is 1 where all is even, E where everything goes to one expert, and can be below 1",
)
def _(answer, case):
    even = torch.full((8, 4), 0.25)
    ids = torch.stack([torch.arange(8) % 4, (torch.arange(8) + 1) % 4], dim=1)
    case.close(case.call(answer, even, ids, 4), torch.tensor(1.0), "for even use, it")
    one = F.one_hot(torch.full((6,), 2), 5).float()
    ids = torch.full((6, 1), 2)
    case.close(case.call(answer, one, ids, 5), torch.tensor(5.0), "for one expert, it")
    split = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.0, 1.0]])
    ids = split.argmax(-1, keepdim=True)
    case.agrees(answer, slow_balance, split, ids, 2, what="where few are sure, it")


@balance.requires(
    "experts that nobody chose are counted too, the last ones included",
    "How long is the result of your counting, if the highest ids do not occur?",
)
def _(answer, case):
    for top in (1, 2, 3):
        ids = probe_ids(8, 2, below=top, seed=top)
        case.agrees(answer, slow_balance, shares(8, 6, 4), ids, 6)


@balance.requires(
    "its gradient flows to the probabilities",
    "A count has no slope. P has.",
)
def _(answer, case):
    for k in (1, 2):
        ids = distinct_choices(9, 5, k, 6)
        case.gradients_agree(answer, slow_balance, shares(9, 5, 5), ids, 5)


@balance.requires(
    "float64, bfloat16 and memory that is not contiguous work",
    "Which dtype has f, which have the probabilities, and which has their product?",
)
def _(answer, case):
    ids = distinct_choices(9, 5, 2, 8)
    for dtype in (torch.float64, torch.bfloat16):
        case.agrees(answer, slow_balance, shares(9, 5, 7, dtype), ids, 5)
    case.agrees(answer, slow_balance, strided(shares(9, 5, 7)), ids.T.contiguous().T, 5)


@balance.requires(
    "thousands of choices are counted exactly, in every dtype",
    "In which dtype do you count? int8 ends at 127; bfloat16 knows no 257.",
)
def _(answer, case):
    ids = (probe_ids(3000, 1, below=20, seed=9) == 0).long()
    for dtype in (torch.float32, torch.float64):
        case.agrees(answer, slow_balance, shares(3000, 2, 8, dtype), ids, 2)
    case.agrees(answer, slow_balance, shares(3000, 2, 8, torch.bfloat16), ids, 2)


@balance.requires("it creates nothing on another device")
def _(answer, case):
    ids = distinct_choices(9, 5, 2, 8)
    case.any_device(answer, shares(9, 5, 7), ids, 5)
    case.any_device(answer, shares(9, 5, 7), ids, 5)


def used(p, experts, n_experts):
    counts = F.one_hot(experts.flatten(), n_experts).sum(0)
    return (counts / experts.numel()).to(p.dtype)


def balance_by(change):
    """A loss from `change(f, P, probabilities, experts, E)`."""

    def load_balancing_loss(probabilities, experts, n_experts):
        f = used(probabilities, experts, n_experts)
        return change(f, probabilities.mean(0), probabilities, experts, n_experts)

    return load_balancing_loss


for name, sentence, change in (
    (
        "factor_missing",
        "The factor E is missing: even use then gives 1/E, and the loss weighs less the "
        "more experts there are.",
        lambda f, mean, p, experts, n: (f * mean).sum(),
    ),
    (
        "sums_to_k",
        "f is divided by the number of tokens, so that it sums to k. Some libraries do "
        "that; here f is a share of all N·k choices, and even use gives 1 whatever k is.",
        lambda f, mean, p, experts, n: n * (f * experts.shape[1] * mean).sum(),
    ),
    (
        "divided_by_k_twice",
        "It is divided by k once too often. Shares of all N·k choices sum to 1 already, "
        "and P is a mean over N tokens.",
        lambda f, mean, p, experts, n: n * (f * mean).sum() / experts.shape[1],
    ),
    (
        "softmax_twice",
        "A softmax runs over the probabilities once more, which makes them nearly equal. "
        "They come in as softmax already.",
        lambda f, mean, p, experts, n: n * (f * torch.softmax(p, -1).mean(0)).sum(),
    ),
    (
        "coefficient_inside",
        "It is multiplied by 0.01, as Switch does where it adds the loss to the other. "
        "That is for whoever adds it.",
        lambda f, mean, p, experts, n: 0.01 * n * (f * mean).sum(),
    ),
    (
        "counts_not_shares",
        "f is the number of choices, not their share: the loss grows with the batch.",
        lambda f, mean, p, experts, n: n * (f * experts.numel() * mean).sum(),
    ),
    (
        "sum_not_mean",
        "P is the sum of the probabilities over the tokens, not their mean: the loss "
        "grows with the batch.",
        lambda f, mean, p, experts, n: n * (f * p.sum(0)).sum(),
    ),
    (
        "first_choice_only",
        "f counts the first choices alone. All k count.",
        lambda f, mean, p, experts, n: n * (used(p, experts[:, :1], n) * mean).sum(),
    ),
    (
        "f_squared",
        "f meets f. A count has no slope, so that nothing could be learned from it.",
        lambda f, mean, p, experts, n: n * (f * f).sum(),
    ),
    (
        "p_squared",
        "P meets P. Where the tokens really went has no part in it.",
        lambda f, mean, p, experts, n: n * (mean * mean).sum(),
    ),
    (
        "choices_ignored",
        "f is counted from the probabilities' maximum and not from the ids that were "
        "given.",
        lambda f, mean, p, experts, n: (
            n * (used(p, p.topk(experts.shape[1], -1).indices, n) * mean).sum()
        ),
    ),
    (
        "probability_of_the_chosen",
        "P is averaged over the tokens that chose the expert. It is the mean over *all* "
        "tokens.",
        lambda f, mean, p, experts, n: (
            n
            * (
                f
                * (p * F.one_hot(experts, n).sum(1)).sum(0)
                / F.one_hot(experts, n).sum((0, 1)).clamp(min=1)
            ).sum()
        ),
    ),
    (
        "p_detached",
        "P is cut from the graph, so that the loss has no gradient.",
        lambda f, mean, p, experts, n: n * (f * mean.detach()).sum(),
    ),
    (
        "one_subtracted",
        "1 is subtracted. That changes no gradient, but even use then gives 0.",
        lambda f, mean, p, experts, n: n * (f * mean).sum() - 1,
    ),
    (
        "never_below_one",
        "1 is taken for the smallest value, and what is below it is cut off, its gradient "
        "too. The loss can be below 1.",
        lambda f, mean, p, experts, n: (n * (f * mean).sum()).clamp(min=1),
    ),
    (
        "negative",
        "The sign is wrong: training would make the use less even.",
        lambda f, mean, p, experts, n: -n * (f * mean).sum(),
    ),
    (
        "e_squared",
        "E is there twice: as a factor, and by a sum that is not a mean, or the other "
        "way round.",
        lambda f, mean, p, experts, n: n * n * (f * mean).sum(),
    ),
    (
        "variance",
        "This is the squared coefficient of variation, the balancing loss of Shazeer et "
        "al. (2017). E·Σ f·P is asked for.",
        lambda f, mean, p, experts, n: mean.var() / mean.mean() ** 2,
    ),
    (
        "each_expert_apart",
        "E numbers come back. They are to be summed.",
        lambda f, mean, p, experts, n: n * f * mean,
    ),
    (
        "a_number_not_a_tensor",
        "A Python number comes back: `.item()` cuts the graph.",
        lambda f, mean, p, experts, n: float(n * (f * mean).sum()),
    ),
    (
        "always_float32",
        "The result is float32 whatever came in.",
        lambda f, mean, p, experts, n: n * (f * mean).sum().float(),
    ),
    (
        "mean_over_experts",
        "The mean is over the experts of a token, not over the tokens of an expert.",
        lambda f, mean, p, experts, n: n * (f.sum() * p.mean(1)).sum() / len(p),
    ),
):
    balance.fault(name, sentence, balance_by(change))


# drop_over_capacity -------------------------------------------------------------------


def served(case, answer, experts, n_experts, capacity):
    kept = case.call(answer, experts, n_experts, capacity)
    case.equal(kept, slow_drop(experts, n_experts, capacity), "what is served")


ANEW = itertools.count(1)


def starts_anew(case, answer):
    """Two calls on the same ids give the same; what is wrong else, is told later.

    The ids are new ones every time, so that a queue that is kept is not yet full.
    """
    first_id = 3 * (next(ANEW) % 1000)
    ids, results = probe_ids(10, 1, below=3, seed=20) + first_id, []
    before = len(case.recording)
    with case.unrecorded(), suppress(Crashed):
        for _ in range(2):
            results.append(case._run(answer, (ids.clone(), first_id + 3, 2), {}))
    del case.recording[before:]
    if len(results) == 2 and all(isinstance(r, torch.Tensor) for r in results):
        same = torch.equal(*results)
        case.note(same)
        if not same:
            case.called = "drop_over_capacity(experts, n_experts, capacity)"
            raise Explained(
                "a second call on the same ids gave another result. Something is kept "
                "from call to call, as a default like `used={}` is, or drawn at random."
            )


@dropping.requires(
    "with k = 1 the first `capacity` tokens of each expert are served, in their order",
    "For one expert: number the tokens that chose it, beginning with 1. Which numbers "
    "are served?",
)
def _(answer, case):
    starts_anew(case, answer)
    for n, e, capacity, seed in ((11, 3, 2, 0), (9, 4, 1, 1), (12, 2, 4, 2)):
        served(case, answer, probe_ids(n, 1, below=e, seed=seed), e, capacity)


@dropping.requires(
    "with more, all first choices queue before all second ones, and so on",
    "An expert has one queue for all k columns. In which order must the `(N, k)` ids be "
    "read, row by row or column by column?",
)
def _(answer, case):
    for n, e, k, capacity, seed in ((9, 4, 2, 3, 3), (8, 5, 3, 4, 4), (13, 3, 2, 5, 5)):
        ids = distinct_choices(n, e, k, seed)
        served(case, answer, ids, n_experts=e, capacity=capacity)


@dropping.requires("nothing is dropped where there is room for all")
def _(answer, case):
    for capacity in (9, 50):
        served(case, answer, distinct_choices(9, 4, 2, 6), 4, capacity)


@dropping.requires(
    "queues of thousands are counted exactly",
    "In which dtype do you count? int8 ends at 127; float16 knows no 2049.",
)
def _(answer, case):
    ids = (probe_ids(2600, 1, below=20, seed=11) == 0).long()
    for capacity in (40, 127, 300, 2300):
        served(case, answer, ids, 2, capacity)


@dropping.requires("experts that nobody chose, the last ones included, do no harm")
def _(answer, case):
    served(case, answer, distinct_choices(9, 3, 2, 7), 8, 2)
    served(case, answer, torch.full((5, 1), 1), 4, 2)
    served(case, answer, distinct_choices(1, 3, 2, 8), 3, 1)


@dropping.requires(
    "a second call starts with empty queues, and any memory layout works"
)
def _(answer, case):
    ids = distinct_choices(9, 4, 2, 9)
    served(case, answer, ids, 4, 2)
    served(case, answer, ids, 4, 2)
    served(case, answer, distinct_choices(9, 4, 2, 10).T.contiguous().T, 4, 3)


@dropping.requires(
    "a capacity smaller than 1 is a ValueError that names it",
    "Experts without a place serve nobody: whoever asks for that has divided wrongly.",
)
def _(answer, case):
    for capacity in (0, -3):
        case.raises(
            ValueError,
            answer,
            distinct_choices(5, 4, 2),
            4,
            capacity,
            mentions=(capacity,),
            because=f"with a capacity of {capacity}",
        )


@dropping.requires("it creates nothing on another device")
def _(answer, case):
    ids = distinct_choices(9, 4, 2, 9)
    case.any_device(answer, ids, 4, 2)
    case.any_device(answer, ids, 4, 2)


def places(experts, n_experts, order="columns"):
    """For each choice its number in its expert's queue, from 1."""
    flat = (experts.T if order == "columns" else experts).flatten()
    one_hot = F.one_hot(flat, n_experts)
    place = (one_hot.cumsum(0) * one_hot).sum(1)
    if order == "columns":
        return place.view(experts.T.shape).T.contiguous()
    return place.view(experts.shape)


def room(capacity):
    if capacity < 1:
        raise ValueError(f"a capacity of {capacity} serves nobody")


def dropping_by(change):
    """A dropping by `change(place, experts, E, capacity)`."""

    def drop_over_capacity(experts, n_experts, capacity):
        room(capacity)
        return change(places(experts, n_experts), experts, n_experts, capacity)

    return drop_over_capacity


def _last_first(place, experts, n, capacity):
    return places(experts.flip(0), n).flip(0) <= capacity


def _second_first(place, experts, n, capacity):
    return places(experts.flip(1), n).flip(1) <= capacity


def _own_queue(place, experts, n, capacity):
    columns = [places(c[:, None], n)[:, 0] for c in experts.T]
    return torch.stack(columns, 1) <= capacity


def _all_of_a_full_one(place, experts, n, capacity):
    counts = F.one_hot(experts, n).sum((0, 1))
    return counts[experts] <= capacity


def _one_pool(place, experts, n, capacity):
    number = torch.arange(experts.numel(), device=experts.device)
    return capacity * n > number.view(experts.T.shape).T


def _whole_token(place, experts, n, capacity):
    return (place <= capacity).all(1, keepdim=True).expand_as(experts).clone()


def _row_by_row(place, experts, n, capacity):
    return places(experts, n, "rows") <= capacity


for name, sentence, change in (
    (
        "one_too_few",
        "The queue is counted from 1 and compared with `<`, so that one place of each "
        "expert stays empty.",
        lambda place, experts, n, capacity: place < capacity,
    ),
    (
        "one_too_many",
        "Each expert serves one more than it has places.",
        lambda place, experts, n, capacity: place <= capacity + 1,
    ),
    (
        "row_by_row",
        "The queue is read row by row: a token's second choice comes before the next "
        "token's first. First choices come first, for all tokens.",
        _row_by_row,
    ),
    ("last_first", "The last tokens are served and the first dropped.", _last_first),
    (
        "second_choices_first",
        "Second choices are served before first ones.",
        _second_first,
    ),
    (
        "a_queue_for_each_column",
        "Each of the k columns has a queue of its own, so that an expert serves up to k "
        "times its capacity.",
        _own_queue,
    ),
    (
        "capacity_times_k",
        "Each expert serves k times its capacity. `capacity` is the number of its places "
        "for first, second and all other choices together.",
        lambda place, experts, n, capacity: place <= capacity * experts.shape[1],
    ),
    (
        "capacity_divided_by_k",
        "The capacity is divided among the k columns. Each expert has `capacity` places "
        "for all choices together.",
        lambda place, experts, n, capacity: (
            place <= max(1, capacity // experts.shape[1])
        ),
    ),
    (
        "full_experts_serve_nobody",
        "An expert that is asked too often drops all its tokens. It serves as many as it "
        "has places.",
        _all_of_a_full_one,
    ),
    (
        "places_shared",
        "The places of all experts are one pool. Each expert has its own `capacity`.",
        _one_pool,
    ),
    (
        "whole_tokens",
        "A token that loses one choice loses all. Each choice stands for itself.",
        _whole_token,
    ),
    (
        "inverted",
        "The mask is the wrong way round: True = served.",
        lambda place, experts, n, capacity: place > capacity,
    ),
    (
        "ids_instead_of_a_mask",
        "The ids come back, with −1 for what was dropped. A boolean mask is asked for.",
        lambda place, experts, n, capacity: experts.where(
            place <= capacity, torch.tensor(-1, device=experts.device)
        ),
    ),
    (
        "numbers_instead_of_a_mask",
        "The mask holds numbers, 0 and 1. A boolean one is asked for.",
        lambda place, experts, n, capacity: (place <= capacity).long(),
    ),
    (
        "transposed",
        "The result is `(k, N)`: the queue was read column by column, and the shape not "
        "turned back.",
        lambda place, experts, n, capacity: (place <= capacity).T.contiguous(),
    ),
    (
        "wrong_view",
        "The queue was read column by column and its result filled in row by row, so "
        "that the marks stand at other tokens.",
        lambda place, experts, n, capacity: (
            (place <= capacity).T.flatten().view(experts.shape)
        ),
    ),
    (
        "flattened",
        "The result is one long list. Give it the shape `(N, k)`.",
        lambda place, experts, n, capacity: (place <= capacity).flatten(),
    ),
    (
        "first_choice_only",
        "Only the first choices are kept, all others dropped.",
        lambda place, experts, n, capacity: (
            (place <= capacity)
            & (torch.arange(experts.shape[1], device=experts.device) < 1)
        ),
    ),
    (
        "nothing_dropped",
        "Nothing is dropped. If the count runs across the k choices of a token, it never "
        "goes beyond 1, since no token chooses an expert twice: count down the queue.",
        lambda place, experts, n, capacity: place > 0,
    ),
):
    dropping.fault(name, sentence, dropping_by(change))


for name, sentence, dtype in (
    ("counted_in_bfloat16", "In bfloat16 256 + 1 is 256.", torch.bfloat16),
    ("counted_in_float16", "In float16 2048 + 1 is 2048.", torch.float16),
    ("counted_in_int8", "int8 ends at 127.", torch.int8),
    ("counted_in_uint8", "uint8 ends at 255.", torch.uint8),
):
    dropping.fault(
        name,
        f"The queue is counted in a dtype that is too small for it. {sentence}",
        dropping_by(
            lambda place, experts, n, capacity, dtype=dtype: (
                place.to(dtype).double() <= capacity
            )
        ),
    )


# moe_parameters -----------------------------------------------------------------------

MIXTRAL = Sizes(32_000, 4096, 32, 32, 8, 128, 14_336, 32_768, tied=False)
TIED = Sizes(29, 12, 2, 3, 1, 6, 17, 11)


def counted(case, answer, c, n_experts, k):
    given = copy.copy(c)
    found = case.call(answer, given, n_experts, k)
    case.note(given == c)
    if given != c:
        raise Explained("It changed the `config` that it was given: work on a copy.")
    case.is_tuple(found, 2)
    expected = slow_count(c, n_experts, k)
    experts = "1 expert" if n_experts == 1 else f"{n_experts} experts"
    for value, due, name in zip(found, expected, ("total", "active"), strict=True):
        what = f"{name} of {experts} with k = {k}"
        whole(value, what)
        case.equal(value, due, what)


def whole(value, what):
    if not isinstance(value, int):
        raise Explained(
            f"{what} is of type {type(value).__name__}, expected a whole number, int: "
            "`//` divides whole numbers, and a sum of ints is one."
        )


class NothingHuge(TorchFunctionMode):
    """Stops whoever builds a model to count it, before the memory is full."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn):
            sizes = [n for n in tree_leaves((args, kwargs.get("size"))) if n]
            held = math.prod(n for n in sizes if isinstance(n, int))
            if held > 10_000_000 and str(kwargs.get("device")) != "meta":
                raise Explained(
                    f"It creates a tensor of {held:,} numbers in order to count them, "
                    "and the whole model has 47 billion: compute the sizes from "
                    "`config`, without building the model."
                )
        return func(*args, **kwargs)


@counting.requires(
    "with one expert it is the decoder of lesson 08 and a router in each block",
    "Your `count_parameters` counts one feed-forward network in each block. What comes "
    "on top?",
)
def _(answer, case):
    for c in (LLAMA, TIED):
        counted(case, answer, c, 1, 1)


@counting.requires(
    "total counts every expert of every block, active the k that a token goes to",
    "How many numbers has one `SwiGLU`? How many experts are there in the whole model?",
)
def _(answer, case):
    for n_experts, k in ((5, 2), (7, 1), (4, 4)):
        counted(case, answer, LLAMA, n_experts, k)
        counted(case, answer, TIED, n_experts=n_experts, k=k)


@counting.requires("a k below 1 or above n_experts is a ValueError that names both")
def _(answer, case):
    for n_experts, k in ((4, 0), (4, -1), (4, 5), (13, 17)):
        case.raises(
            ValueError,
            answer,
            copy.copy(LLAMA),
            n_experts,
            k,
            mentions=(k, n_experts),
            because=f"with k = {k} of {n_experts} experts",
        )


@counting.requires(
    "Mixtral-8x7B has 46.7 billion, of which 12.9 billion are active, computed from its "
    "sizes without building it",
)
def _(answer, case):
    with NothingHuge():
        found = case.call(answer, copy.copy(MIXTRAL), 8, 2)
    case.is_tuple(found, 2)
    total, active = found
    case.equal(
        (round(total / 1e9, 1), round(active / 1e9, 1)), (46.7, 12.9), "in billions it"
    )


def counter(change):
    """A count by `change(dense, expert, router, config, E, k)`."""

    def moe_parameters(config, n_experts, k):
        refused(k, n_experts)
        dense = numbers_in(model_shapes(config))
        expert = 3 * config.d_model * config.d_ff * config.n_layers
        router = config.d_model * n_experts * config.n_layers
        return change(dense, expert, router, config, n_experts, k)

    return moe_parameters


def both(dense, expert, router, n, k):
    return dense + (n - 1) * expert + router, dense + (k - 1) * expert + router


for name, sentence, change in (
    (
        "whole_models",
        "The whole model is multiplied by the number of experts, attention and embedding "
        "too. Only the feed-forward network is there several times.",
        lambda d, x, r, c, n, k: (n * d + r, k * d + r),
    ),
    (
        "router_forgotten",
        "The router is not counted: d_model·E numbers in each block.",
        lambda d, x, r, c, n, k: both(d, x, 0, n, k),
    ),
    (
        "router_not_active",
        "Active counts only k rows of the router. Every token meets all of it: each "
        "expert needs its score.",
        lambda d, x, r, c, n, k: (
            both(d, x, r, n, k)[0],
            both(d, x, r // n * k, n, k)[1],
        ),
    ),
    (
        "router_left_out_of_active",
        "Active leaves the router out. Every token meets all of it: each expert needs "
        "its score.",
        lambda d, x, r, c, n, k: (both(d, x, r, n, k)[0], both(d, x, 0, n, k)[1]),
    ),
    (
        "share_of_everything",
        "Active is k/E of the whole. Attention, embedding, norms and router are met by "
        "every token; only the experts are chosen.",
        lambda d, x, r, c, n, k: (
            both(d, x, r, n, k)[0],
            both(d, x, r, n, k)[0] * k // n,
        ),
    ),
    (
        "one_row_of_the_embedding",
        "Active counts one row of the embedding. Here all of it counts, as in the "
        "published number.",
        lambda d, x, r, c, n, k: (
            both(d, x, r, n, k)[0],
            both(d, x, r, n, k)[1] - (c.vocab_size - 1) * c.d_model,
        ),
    ),
    (
        "dense_network_kept",
        "One network too many in each block: the block's own is counted beside the "
        "experts, which stand in its place.",
        lambda d, x, r, c, n, k: both(d + x, x, r, n, k),
    ),
    (
        "one_block",
        "The experts of one block are counted. Each block has its own.",
        lambda d, x, r, c, n, k: both(d, x // c.n_layers, r // c.n_layers, n, k),
    ),
    (
        "router_of_one_block",
        "One router is counted for the whole model. Each block has its own.",
        lambda d, x, r, c, n, k: both(d, x, r // c.n_layers, n, k),
    ),
    (
        "two_matrices",
        "An expert is counted with two matrices. `SwiGLU` has three.",
        lambda d, x, r, c, n, k: both(d, x // 3 * 2, r, n, k),
    ),
    (
        "k_ignored",
        "Active counts one expert whatever k is.",
        lambda d, x, r, c, n, k: both(d, x, r, n, 1),
    ),
    (
        "exchanged",
        "Total and active are exchanged.",
        lambda d, x, r, c, n, k: both(d, x, r, n, k)[::-1],
    ),
    (
        "embedding_left_out",
        "Active leaves the embedding out. Here everything but the experts that a token "
        "does not go to counts as active, as in the published number.",
        lambda d, x, r, c, n, k: (
            both(d, x, r, n, k)[0],
            both(d, x, r, n, k)[1] - c.vocab_size * c.d_model,
        ),
    ),
    (
        "width_shared",
        "d_ff is divided among the experts. Each is d_ff wide.",
        lambda d, x, r, c, n, k: (d + r, d - x + x * k // n + r),
    ),
    (
        "router_with_bias",
        "The router is counted with a bias.",
        lambda d, x, r, c, n, k: both(d, x, r + n * c.n_layers, n, k),
    ),
    (
        "experts_alone",
        "Only the experts and routers are counted, not the rest of the decoder.",
        lambda d, x, r, c, n, k: (n * x + r, k * x + r),
    ),
    (
        "total_alone",
        "One number comes back. Two are due: total and active.",
        lambda d, x, r, c, n, k: both(d, x, r, n, k)[0],
    ),
    (
        "untied_always",
        "A tied matrix is counted twice.",
        lambda d, x, r, c, n, k: both(
            d + c.tied * c.vocab_size * c.d_model, x, r, n, k
        ),
    ),
):
    counting.fault(name, sentence, counter(change))


# A block with experts -----------------------------------------------------------------

block_with_experts = IntegrationCheck(
    "block_with_experts",
    lesson="mixture_of_experts",
    parts={
        "SwiGLU": "feed_forward",
        "TransformerConfig": "forward_pass",
        "Block": "forward_pass",
        "Transformer": "forward_pass",
        "top_k_routing": "mixture_of_experts",
        "MixtureOfExperts": "mixture_of_experts",
        "load_balancing_loss": "mixture_of_experts",
        "drop_over_capacity": "mixture_of_experts",
        "moe_parameters": "mixture_of_experts",
    },
)
N_EXPERTS = 4


def settings(parts, case):
    return case.call(parts["TransformerConfig"], *[getattr(LLAMA, n) for n in FIELDS])


def block_of(parts, case, k, seed=0):
    """The learner's block, experts in place of its network, and all its weights."""
    block = case.call(parts["Block"], settings(parts, case))
    rest = weights_for(block_shapes(LLAMA), 700 + seed)
    rest = {n: w for n, w in rest.items() if not n.startswith("feed_forward")}
    load_all(case, block, rest)
    experts = case.call(parts["MixtureOfExperts"], 10, LLAMA.d_ff, N_EXPERTS, k)
    mine = mixture_weights(10, LLAMA.d_ff, N_EXPERTS, 20 + seed)
    block.feed_forward = load_all(case, experts, mine)
    return block, rest, mine


def past(t):
    return torch.ones(t, t, dtype=torch.bool).tril()


def true_block(x, rest, mine, k, mask):
    """The same in float64: the stream, and what the experts were given."""
    p, x = doubled(rest), x.double()
    x = x + looked_up(normed(x, p, "norm_1", LLAMA), p, LLAMA, mask, None)
    given = normed(x, p, "norm_2", LLAMA)
    return x + slow_mixture(given, doubled(mine), k), given


@block_with_experts.requires(
    "a block with experts in place of its network gives what its formulas give",
    "The block calls `self.feed_forward(x)` with the normalised stream `(B, T, D)`, and "
    "adds what comes back.",
)
def _(parts, case):
    for k in (1, 2):
        block, rest, mine = block_of(parts, case, k)
        x, mask = probe(3, 7, 10, seed=41), past(7)
        expected, _ = true_block(x, rest, mine, k, mask)
        case.close(case.call(block, x, mask), expected, f"the stream, k = {k}", like=x)


@block_with_experts.requires("a later token changes nothing before it")
def _(parts, case):
    block, _, _ = block_of(parts, case, 2)
    x = probe(2, 7, 10, seed=42)
    changed = torch.cat([x[:, :4], probe(2, 3, 10, seed=43)], dim=1)
    before, after = (case.call(block, y, past(7))[:, :4] for y in (x, changed))
    case.close(after, before, "the stream before the changed tokens")


@block_with_experts.requires(
    "`top_k_routing` on the router's scores chooses as the experts were called, and the "
    "balancing loss reaches the router",
    "Does `MixtureOfExperts` call `top_k_routing` with its router's scores, or does it "
    "choose in another way?",
)
def _(parts, case):
    block, rest, mine = block_of(parts, case, 2, seed=1)
    x = probe(3, 7, 10, seed=44)
    seen, rows = [], [0] * N_EXPERTS
    hooks = [
        block.feed_forward.register_forward_pre_hook(
            lambda _, args: seen.append(args[0])
        )
    ]
    called = [0] * N_EXPERTS

    def count(e):
        def hook(_, args, named):
            called[e] += (*args, *named.values())[0].shape[:-1].numel()

        return hook

    hooks += [
        expert.register_forward_pre_hook(count(e), with_kwargs=True)
        for e, expert in enumerate(block.feed_forward.experts)
    ]
    case.call(block, x, past(7))
    for hook in hooks:
        hook.remove()
    _, given = true_block(x, rest, mine, 2, past(7))
    case.true(
        len(seen) == 1,
        f"The block called its `feed_forward` {len(seen)} times in one pass.",
    )
    case.close(seen[0], given, "what the experts are given")
    scores_ = block.feed_forward.router(seen[0].detach().flatten(0, -2))
    weights, experts = case.call(parts["top_k_routing"], scores_.detach(), 2)
    shares_, ids = slow_routing(scores_.detach().double(), 2)
    case.equal(experts, ids, "the experts")
    case.close(weights, shares_, "the weights")
    for e in experts.flatten().tolist():
        rows[e] += 1
    case.equal(called, rows, "on how many tokens each expert was called")
    kept = case.call(parts["drop_over_capacity"], experts, N_EXPERTS, max(rows))
    case.true(
        bool(kept.all()), "With room for the most popular expert, some are dropped."
    )
    loss = case._run(
        parts["load_balancing_loss"],
        (torch.softmax(scores_, -1), experts, N_EXPERTS),
        {},
    )
    due = slow_balance(torch.softmax(scores_.detach(), -1).double(), ids, N_EXPERTS)
    case.close(loss, due, "the balancing loss")
    loss.backward()
    gradient = block.feed_forward.router.weight.grad
    case.true(
        gradient is not None and bool(gradient.abs().sum() > 0),
        "The balancing loss gives the router no gradient.",
    )


@block_with_experts.requires(
    "the loss at the end reaches the router and every expert; with k = 1 the router, too"
)
def _(parts, case):
    for k in (2, 1):
        block, _, _ = block_of(parts, case, k, seed=1)
        out = case.call(block, probe(5, 9, 10, seed=45), past(9))
        (out * probe(5, 9, 10, seed=46)).sum().backward()
        for name, p in block.feed_forward.named_parameters():
            case.true(
                (k == 1 and "router" not in name)
                or (p.grad is not None and bool(p.grad.abs().sum() > 0)),
                f"`{name}` of the experts gets no gradient from the end of the block, "
                f"with k = {k}.",
            )


@block_with_experts.requires(
    "`moe_parameters` counts what a decoder of such blocks holds"
)
def _(parts, case):
    config = settings(parts, case)
    model = case.call(parts["Transformer"], config)
    for block in model.blocks:
        block.feed_forward = parts["MixtureOfExperts"](
            config.d_model, config.d_ff, N_EXPERTS, 2
        )
    held = sum(p.numel() for p in model.parameters())
    total, active = case.call(parts["moe_parameters"], config, N_EXPERTS, 2)
    case.equal(total, held, "the total")
    idle = 2 * config.n_layers * 3 * config.d_model * config.d_ff
    case.equal(active, held - idle, "active")
    logits = case.call(model, probe_ids(2, 6, below=config.vocab_size, seed=47))
    case.true(
        logits.shape == (2, 6, config.vocab_size),
        f"The decoder's logits have shape {tuple(logits.shape)}.",
    )


class _Twice(Mixture):
    def forward(self, x):
        return x + super().forward(x)


for name, sentence, wrong in (
    (
        "block_reads_the_matrices",
        "`Block` reads the matrices of its feed-forward network instead of calling it, so "
        "that no other network can take its place.",
        {"Block": block_with()},
    ),
    (
        "residual_twice",
        "The experts add their input to their result, and the block adds it once more.",
        {"MixtureOfExperts": _Twice},
    ),
    (
        "time_lost",
        "The experts return batch and time as one dimension.",
        {
            "MixtureOfExperts": mixture(
                forward=lambda self, x: Mixture.forward(self, x.flatten(0, -2))
            )
        },
    ),
    (
        "one_is_always_one",
        "With k = 1 every weight is 1.",
        {
            "MixtureOfExperts": routed_as(
                lambda logits, k: (
                    torch.softmax(logits.topk(k, -1).values, -1),
                    logits.topk(k, -1).indices,
                )
            )
        },
    ),
    (
        "routed_by_the_whole",
        "The experts are chosen from a mean over all tokens, later ones included.",
        {
            "MixtureOfExperts": mixture(
                route=lambda self, x: right_routing(
                    self.router(x - 0.5 * x.mean(0)), self.k
                )
            )
        },
    ),
    (
        "router_cut_off",
        "The experts' weights are cut from the graph.",
        {
            "MixtureOfExperts": mixture(
                combine=lambda self, x, weights, chosen: Mixture.combine(
                    self, x, weights.detach(), chosen
                )
            )
        },
    ),
    (
        "routing_not_shared",
        "`top_k_routing` weights with probabilities among all experts; the experts' own "
        "weights are softmax over the kept.",
        {"top_k_routing": lambda logits, k: torch.softmax(logits, -1).topk(k, -1)},
    ),
    (
        "balance_without_gradient",
        "The balancing loss has no gradient.",
        {
            "load_balancing_loss": balance_by(
                lambda f, mean, p, experts, n: n * (f * mean).sum().detach()
            )
        },
    ),
    (
        "one_place_too_few",
        "`drop_over_capacity` leaves a place of each expert empty.",
        {
            "drop_over_capacity": dropping_by(
                lambda place, experts, n, capacity: place < capacity
            )
        },
    ),
    (
        "count_without_router",
        "`moe_parameters` leaves the router out.",
        {
            "moe_parameters": counter(lambda d, x, r, c, n, k: both(d, x, 0, n, k)),
        },
    ),
):
    block_with_experts.fault(name, sentence, wrong)
