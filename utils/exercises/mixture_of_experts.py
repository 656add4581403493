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

from utils.check.case import Crashed, Explained, Unmet
from utils.check.exercise import Exercise, Joint
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

routing = Exercise("top_k_routing", lesson="mixture_of_experts")
layer = Exercise("MixtureOfExperts", lesson="mixture_of_experts")
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


def filled(t, answer, d_model, d_ff, n_experts, k, seed=0):
    """A module with known weights, and those weights by name."""
    module = t.call(answer, d_model, d_ff, n_experts, k)
    is_module(module)
    p = mixture_weights(d_model, d_ff, n_experts, seed)
    return load_all(t, module, p), p


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


def routed(t, answer, logits, k, tolerance=None):
    result = t.call(answer, logits, k)
    t.is_tuple(result, 2)
    weights, experts = slow_routing(logits.double(), k)
    t.is_tensor(result[1], "the second result")
    t.equal(result[1], experts, "the tensor of expert ids")
    t.close(
        result[0], weights, "the tensor of weights", like=logits, tolerance=tolerance
    )


@routing.requires(
    "with k of 2 and more: the ids of the k highest scores, the highest first, and "
    "softmax over these k",
    "Take one token with the scores 2, 0, 1 and k = 2. Which two experts, in which "
    "order? Their two weights sum to 1, and the third score has no say in them.",
)
def _(answer, t):
    routed(t, answer, scores(7, 5), 2)
    routed(t, answer, scores(4, 6, seed=1), 3)
    routed(t, answer, scores(3, 7, seed=2, shift=-4.0), 2)
    routed(t, answer, scores(1, 4, seed=3), 2)


@routing.requires(
    "k = E keeps every expert, sorted",
)
def _(answer, t):
    routed(t, answer, scores(5, 4, seed=4), 4)
    routed(t, answer, scores(3, 2, seed=5), k=2)


@routing.requires(
    "with k = 1 the weight is the expert's probability among all experts",
    "Read the contract's line about k = 1 again, and compare with one row by hand.",
)
def _(answer, t):
    routed(t, answer, scores(7, 5, seed=6), 1)
    routed(t, answer, scores(4, 3, seed=7, step=0.2), 1)


@routing.requires(
    "with a single expert the weight is 1",
)
def _(answer, t):
    routed(t, answer, scores(4, 1, seed=8), 1)


@routing.requires(
    "scores of ±10,000 give no overflow",
    "Do the weights depend on how large the scores are, or on their differences?",
)
def _(answer, t):
    for shift in (10_000.0, -10_000.0):
        for k in (1, 2):
            routed(t, answer, scores(6, 5, seed=9, shift=shift), k, tolerance=0.01)


@routing.requires(
    "rows that lie far apart do not disturb each other",
    "Each row is another token's. What do your weights of one row take from the others?",
)
def _(answer, t):
    for level in ((0.0, 500.0, -500.0, 2000.0), (-900.0, 0.0, 900.0, 100.0)):
        logits = scores(4, 5, seed=17) + torch.tensor(level)[:, None]
        for k in (1, 2, 5):
            routed(t, answer, logits, k, tolerance=0.01)


@routing.requires(
    "scores that lie far apart within a row keep their order",
    "Choose by the scores themselves: what comes out of an exponential can be 0 for "
    "several of them.",
)
def _(answer, t):
    for k in (2, 3, 5):
        routed(t, answer, scores(6, 5, seed=18, step=150.0), k, tolerance=0.01)


@routing.requires(
    "among equal scores any may be kept, but k of them, and the weights are of these",
    "With the scores 1, 0, 0 and k = 2, how many scores are at least as high as the "
    "second? Two experts are kept all the same.",
)
def _(answer, t):
    logits = probe_ids(7, 5, below=3, seed=19).float()
    for k in (1, 2, 3):
        result = t.call(answer, logits, k)
        t.is_tuple(result, 2)
        weights, experts = result
        t.is_tensor(experts, "the second result")
        t.true(
            experts.shape == (7, k)
            and all(len(set(row)) == k for row in experts.tolist()),
            f"Where scores are equal, some row has not {k} different experts.",
        )
        kept = logits.gather(1, experts)
        t.equal(kept, logits.topk(k).values, "the scores of the kept experts")
        t.close(weights, slow_routing(logits.double(), k)[0], "the tensor of weights")


@routing.requires(
    "gradients flow through the weights to the scores, with k = 1 too",
    "Which steps lie between the scores and the weights, and does each have a slope?",
)
def _(answer, t):
    for k in (1, 2, 3):
        t.gradients_agree(answer, slow_routing, scores(5, 4, seed=10 + k), k)


@routing.requires("float64, float16, bfloat16 and memory that is not contiguous work")
def _(answer, t):
    for k in (1, 3):
        double = scores(5, 4, seed=14, dtype=torch.float64)
        routed(t, answer, double, k, tolerance=1e-6)  # many take softmax in float32
        for dtype in (torch.float16, torch.bfloat16):
            routed(t, answer, scores(5, 4, seed=14, dtype=dtype), k)
            far = scores(6, 5, seed=18, step=150.0, dtype=dtype)
            routed(t, answer, far, k, tolerance=0.01)
    routed(t, answer, strided(scores(5, 4, seed=15)), 2)
    routed(t, answer, scores(4, 4, seed=16).T, 2)


@routing.requires(
    "a k below 1 or above the number of experts is a ValueError that names both",
    'Ask before you compute; `raise ValueError(f"…")` with both numbers in it.',
)
def _(answer, t):
    for n_experts, k in ((5, 6), (13, 17), (5, 0), (5, -2)):
        t.raises(
            ValueError,
            answer,
            scores(3, n_experts),
            k,
            mentions=(k, n_experts),
            because=f"with k = {k} of {n_experts} experts",
        )


@routing.requires("it creates nothing on another device")
def _(answer, t):
    for k in (1, 2):
        t.any_device(answer, scores(5, 4), k)
        t.any_device(answer, scores(5, 4), k)


def refused(k, n_experts):
    if not 1 <= k <= n_experts:
        raise ValueError(f"k = {k} does not fit {n_experts} experts")


def right_routing(logits, k):
    refused(k, logits.shape[-1])
    p = torch.softmax(logits, -1)
    experts = logits.topk(k, -1).indices
    kept = p.gather(1, experts)
    return kept if k == 1 else torch.softmax(logits.gather(1, experts), -1), experts


def router_by(change):
    """A routing whose `change(logits, k)` gives weights and experts."""

    def top_k_routing(logits, k):
        refused(k, logits.shape[-1])
        return change(logits, k)

    return top_k_routing


def weighted_by(change):
    """A routing with the right experts; `change(logits, kept, k)` weights them."""

    def top_k_routing(logits, k):
        experts = right_routing(logits, k)[1]
        return change(logits, logits.gather(1, experts), k), experts

    return top_k_routing


def reordered(change):
    """Right weights and experts, given to `change(weights, experts)`."""
    return router_by(lambda logits, k: change(*right_routing(logits, k)))


routing.fault(
    "one_is_always_one",
    "With k = 1 the softmax over the kept score is 1, always. A constant has no slope, so "
    "the router would never learn. Take its probability among all experts.",
    weighted_by(lambda logits, kept, k: torch.softmax(kept, -1)),
)
routing.fault(
    "not_renormalised",
    "The weights are the probabilities among *all* experts. With k of 2 and more they "
    "are softmax over the kept scores, and sum to 1.",
    weighted_by(lambda logits, kept, k: (kept - logits.logsumexp(-1, True)).exp()),
)
routing.fault(
    "softmax_twice",
    "Softmax is taken twice: over all scores, and over the k probabilities that were "
    "kept. Probabilities lie close together, so the weights come out nearly equal.",
    weighted_by(
        lambda logits, kept, k: (
            torch.softmax(logits, -1).amax(-1, True)
            if k == 1
            else torch.softmax((kept - logits.logsumexp(-1, True)).exp(), -1)
        )
    ),
)
routing.fault(
    "over_the_tokens",
    "Softmax runs over the tokens instead of the experts.",
    weighted_by(
        lambda logits, kept, k: (
            torch.softmax(logits, 0).gather(1, logits.topk(1, -1).indices)
            if k == 1
            else torch.softmax(kept, 0)
        )
    ),
)
routing.fault(
    "smallest_chosen",
    "The experts with the *lowest* scores are chosen.",
    router_by(lambda logits, k: right_routing(-logits, k)),
)
routing.fault(
    "zero_instead_of_minus_infinity",
    "The scores that are not kept are set to 0 and still take their share of the "
    "softmax: e⁰ is 1.",
    weighted_by(
        lambda logits, kept, k: (
            torch.softmax(logits, -1).amax(-1, True)
            if k == 1
            else kept.exp() / (kept.exp().sum(-1, True) + logits.shape[-1] - k)
        )
    ),
)
routing.fault(
    "scores_as_weights",
    "The weights are the scores themselves, without a softmax.",
    weighted_by(lambda logits, kept, k: kept),
)
routing.fault(
    "sigmoids",
    "Each weight is a sigmoid of its own score. Some models do that; here the k weights "
    "share a softmax.",
    weighted_by(lambda logits, kept, k: torch.sigmoid(kept)),
)
routing.fault(
    "sigmoids_divided_by_their_sum",
    "Each score becomes a sigmoid, and the k sigmoids are divided by their sum. Some "
    "models do that; here the k weights share a softmax.",
    weighted_by(
        lambda logits, kept, k: (
            torch.softmax(logits, -1).amax(-1, True)
            if k == 1
            else torch.sigmoid(kept) / torch.sigmoid(kept).sum(-1, True)
        )
    ),
)
routing.fault(
    "scores_divided_by_their_sum",
    "The scores are divided by their sum, without an exponential: negative ones make "
    "negative weights.",
    weighted_by(
        lambda logits, kept, k: (
            torch.softmax(logits, -1).amax(-1, True)
            if k == 1
            else kept / kept.sum(-1, True)
        )
    ),
)
routing.fault(
    "log_softmax",
    "The weights are logarithms, below 0: `log_softmax` where `softmax` is meant.",
    weighted_by(
        lambda logits, kept, k: (
            (kept - logits.logsumexp(-1, True))
            if k == 1
            else torch.log_softmax(kept, -1)
        )
    ),
)
routing.fault(
    "hidden_by_a_number",
    "The scores that are not kept are set to −10,000, and real ones can be as low. −inf "
    "is below them all; or let softmax see the k kept scores alone.",
    weighted_by(
        lambda logits, kept, k: (
            torch.softmax(logits, -1).amax(-1, True)
            if k == 1
            else torch.softmax(
                torch.cat([kept, 0 * logits[:, k:] - 10_000], dim=-1), -1
            )[:, :k]
        )
    ),
)
routing.fault(
    "equal_scores_kept_too",
    "Everything as high as the k-th score shares the softmax. Where scores are equal "
    "that is more than k experts, and the weights of the k sum to less than 1. Equal "
    "scores are common in half precision.",
    weighted_by(
        lambda logits, kept, k: (
            torch.softmax(logits, -1).amax(-1, True)
            if k == 1
            else (
                kept
                - logits.masked_fill(logits < kept[:, -1:], -torch.inf).logsumexp(
                    -1, True
                )
            ).exp()
        )
    ),
)
routing.fault(
    "equal_weights",
    "All k experts count the same. The weights come from the scores, and carry the "
    "router's gradient.",
    weighted_by(lambda logits, kept, k: torch.full_like(kept, 1 / k)),
)
routing.fault(
    "results_exchanged",
    "The two results are in the other order: weights first, then expert ids.",
    reordered(lambda weights, experts: (experts, weights)),
)
routing.fault(
    "lowest_of_the_kept_first",
    "The k experts come with the lowest kept score first. The highest is the first "
    "choice, and `drop_over_capacity` will rely on it.",
    reordered(lambda weights, experts: (weights.flip(-1), experts.flip(-1))),
)
routing.fault(
    "sorted_by_id",
    "The experts are sorted by their ids. The highest score comes first.",
    reordered(
        lambda weights, experts: (
            weights.gather(1, experts.argsort(-1)),
            experts.sort(-1).values,
        )
    ),
)
routing.fault(
    "weights_of_others",
    "Weights and ids do not belong together: one of the two was sorted without the "
    "other.",
    reordered(lambda weights, experts: (weights.flip(-1), experts)),
)
routing.fault(
    "as_wide_as_the_experts",
    "The weights have a column for each expert, zeros where it was not chosen. Two "
    "narrow tensors `(N, k)` are asked for.",
    reordered(
        lambda weights, experts: (
            weights.new_zeros(len(weights), int(experts.max()) + 1).scatter(
                1, experts, weights
            ),
            experts,
        )
    ),
)
routing.fault(
    "one_hot_choice",
    "The experts come as a mask over all of them. Ids are asked for, `(N, k)`, int64.",
    reordered(
        lambda weights, experts: (
            weights,
            F.one_hot(experts, int(experts.max()) + 1).sum(1).bool(),
        )
    ),
)
routing.fault(
    "same_experts_for_all",
    "All tokens go to the experts of the first one. Each row of scores is another "
    "token's.",
    router_by(
        lambda logits, k: (
            right_routing(logits, k)[0],
            right_routing(logits, k)[1][:1].expand(len(logits), -1).contiguous(),
        )
    ),
)
routing.fault(
    "detached",
    "The weights are cut from the graph, so that the router gets no gradient.",
    reordered(lambda weights, experts: (weights.detach(), experts)),
)
routing.fault(
    "overflow",
    "The exponential is taken of the scores as they are. Above 88 it is infinite in "
    "float32, and far below it is 0, so that the division gives NaN.",
    weighted_by(
        lambda logits, kept, k: (
            kept.exp() / (logits if k == 1 else kept).exp().sum(-1, True)
        )
    ),
)
routing.fault(
    "one_maximum_for_all",
    "One maximum is subtracted from all rows. A row far below it becomes 0 after the "
    "exponential, and 0 / 0 is NaN: each row needs its own.",
    weighted_by(
        lambda logits, kept, k: (
            (kept - logits.max()).exp()
            / ((logits if k == 1 else kept) - logits.max()).exp().sum(-1, True)
        )
    ),
)
routing.fault(
    "maximum_of_the_first_row",
    "The first row's maximum is subtracted from all rows. Each row needs its own.",
    weighted_by(
        lambda logits, kept, k: (
            (kept - logits[0].max()).exp()
            / ((logits if k == 1 else kept) - logits[0].max()).exp().sum(-1, True)
        )
    ),
)


@routing.fault(
    "one_maximum_for_the_choice",
    "One maximum is subtracted from all rows, and the experts are chosen after the "
    "exponential. A row far below the maximum becomes 0 there: each row needs its own.",
)
def _(logits, k):
    refused(k, logits.shape[-1])
    exponentials = (logits - logits.max()).exp()
    kept, experts = exponentials.topk(k, -1)
    return kept / (exponentials if k == 1 else kept).sum(-1, True), experts


routing.fault(
    "chosen_by_probability",
    "The experts are chosen by their probabilities. Where scores lie far apart several "
    "of these are 0, and zeros have no order: choose by the scores.",
    router_by(
        lambda logits, k: (
            right_routing(logits, k)[0],
            torch.softmax(logits, -1).topk(k, -1).indices,
        )
    ),
)
routing.fault(
    "always_float32",
    "The weights are float32 whatever came in.",
    reordered(lambda weights, experts: (weights.float(), experts)),
)
routing.fault(
    "k_cut_to_fit",
    "A k that does not fit is cut to one that does, in silence. Whoever asked for 8 of "
    "4 experts made a mistake and should hear of it.",
    lambda logits, k: right_routing(logits, max(1, min(k, logits.shape[-1]))),
)


@routing.fault(
    "k_unchecked",
    "k is not checked: k = 0 gives empty tensors, and a k that is too large an error of "
    "PyTorch's about a dimension.",
)
def _(logits, k):
    kept, experts = logits.topk(k, dim=-1)
    if k == 1:
        return torch.softmax(logits, -1).gather(1, experts), experts
    return torch.softmax(kept, -1), experts


@routing.fault(
    "only_too_large_refused",
    "A k above the number of experts is refused, a k below 1 is not.",
)
def _(logits, k):
    n = logits.shape[-1]
    if k > n:
        raise ValueError(f"k = {k}, {n} experts")
    kept, experts = logits.topk(max(k, 0), dim=-1)
    if k == 1:
        return torch.softmax(logits, -1).gather(1, experts), experts
    return torch.softmax(kept, -1), experts


@routing.fault(
    "assertion",
    "An `assert` refuses a wrong k. It raises AssertionError, and is gone when Python "
    "runs with -O: raise a ValueError.",
)
def _(logits, k):
    n = logits.shape[-1]
    assert 1 <= k <= n, f"k = {k}, {n} experts"
    return right_routing(logits, k)


@routing.fault(
    "error_without_numbers",
    "The ValueError does not say which k met how many experts.",
)
def _(logits, k):
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError("k does not fit")
    return right_routing(logits, k)


# MixtureOfExperts ---------------------------------------------------------------------


@layer.requires(
    "`router` holds (n_experts, d_model) without bias, and `experts` n_experts networks "
    "with `w_1`, `w_3` and `w_2`",
)
def _(answer, t):
    module = t.call(answer, 5, 7, 4, 2)
    is_module(module)
    t.parameter_count(module, 4 * 5 + 4 * 3 * 5 * 7)
    load_all(t, module, mixture_weights(5, 7, 4))
    t.call(answer, d_model=4, d_ff=9, n_experts=3, k=1)


@layer.requires(
    "with k = 1 each token gets its expert's result times the expert's probability",
    "Make one long list of tokens first. Then send one through by hand: `router`, "
    "`top_k_routing`, the chosen expert, its weight.",
)
def _(answer, t):
    module, p = filled(t, answer, 5, 7, 4, 1)
    t.agrees(module, oracle_for(p, 1), probe(2, 6, 5, seed=1))


@layer.requires(
    "with more, it gets the sum of its k experts' results by their weights",
    "Take one token by hand: its k experts, the k results, their weights, the sum. Where "
    "does yours differ?",
)
def _(answer, t):
    for n_experts, k, seed in ((4, 2, 1), (6, 3, 2)):
        module, p = filled(t, answer, 5, 7, n_experts, k, seed)
        t.agrees(module, oracle_for(p, k), probe(2, 6, 5, seed=seed))


@layer.requires(
    "k may be n_experts, one too; each token then goes to all experts",
)
def _(answer, t):
    for n_experts, k, seed in ((3, 3, 3), (1, 1, 4)):
        module, p = filled(t, answer, 5, 7, n_experts, k, seed)
        t.agrees(module, oracle_for(p, k), probe(2, 6, 5, seed=seed))


@layer.requires(
    "an expert that nobody chose is no problem",
    "What does your loop do when its list of tokens is empty?",
)
def _(answer, t):
    for k in (1, 2):
        module, p = filled(t, answer, 5, 7, 9, k, 5)
        t.agrees(module, oracle_for(p, k), probe(1, 2, 5, seed=8))


@layer.requires(
    "every token is treated alone, however many dimensions stand before the last",
    "Which sizes does your code read from the shape of x? Only the last one is fixed; "
    "the long list of tokens gets its shape back at the end. And does what one token "
    "gets depend on the others, as under a capacity?",
)
def _(answer, t):
    module, p = filled(t, answer, 5, 7, 4, 2, 4)
    for sizes in ((2, 3, 5), (5,), (1, 1, 5), (2, 3, 4, 5)):
        t.agrees(module, oracle_for(p, 2), probe(*sizes, seed=5, scale=2))
    t.agrees(module, oracle_for(p, 2), probe(3, 2, 5, seed=6).transpose(0, 1))
    t.agrees(module, oracle_for(p, 2), strided(probe(2, 3, 5, seed=7)))


@layer.requires(
    "each expert runs at most once, on the tokens that chose it and no others",
    "For each expert, find all the tokens that have it anywhere among their k, and give "
    "it these rows alone, all at once.",
)
def _(answer, t):
    d_model, d_ff, n_experts, k, n = 5, 7, 6, 2, 12
    module, _ = filled(t, answer, d_model, d_ff, n_experts, k, 6)
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
        t.call(module, x)
    for hook in hooks:
        hook.remove()
    t.trace.append(tuple(map(tuple, rows)))
    for e, calls in enumerate(rows):
        t.true(
            len(calls) <= 1,
            f"Expert {e} ran {len(calls)} times for {n} tokens, on {calls} of them.",
        )
    total = sum(map(sum, rows))
    t.true(
        total > 0,
        "No expert was called: call each as a module, `expert(tokens)`, so that it may "
        "be any network, and nothing has to know what is in it.",
    )
    t.true(
        total == n * k,
        f"{n} tokens with k = {k} are {n * k} token-expert pairs, and your experts "
        f"computed {total}.",
    )
    due = 2 * n * n_experts * d_model + n * k * 6 * d_model * d_ff
    flops = counter.get_total_flops()
    t.trace.append(flops)
    t.true(
        flops <= 1.5 * due,
        f"It spends {flops:,} floating-point operations, where the router and {k} "
        f"experts a token need {due:,}.",
    )


@layer.requires("it works a second time, in `eval()`, and in other dtypes")
def _(answer, t):
    module, p = filled(t, answer, 5, 7, 4, 2, 7)
    oracle = oracle_for(p, 2)
    t.agrees(module, oracle, probe(2, 3, 5, seed=10))
    t.agrees(module, oracle, probe(3, 4, 5, seed=11))
    module.eval()
    t.agrees(module, oracle, probe(2, 3, 5, seed=10))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        other = copy.deepcopy(module).to(dtype)
        rounded = {n: w.to(dtype) for n, w in p.items()}
        x = probe(2, 3, 5, seed=10, dtype=dtype)
        expected = oracle_for(rounded, 2)(x)
        tolerance = 1e-5 if dtype == torch.float64 else None  # softmax in float32
        t.close(t.call(other, x), expected, like=x, tolerance=tolerance)


@layer.requires(
    "gradients reach the input, the router and every chosen expert, with k = 1 too",
    "Which steps lie between what is named and the result, and does each have a slope? "
    "The choice has none; the router is trained through the weights.",
)
def _(answer, t):
    for k, seed in ((2, 8), (1, 9)):
        module, p = filled(t, answer, 5, 7, 3, k, seed)
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
            t.gradients_agree(run, oracle, probe(2, 6, 5, seed=12), *p.values())
        finally:
            t.called = f"MixtureOfExperts(5, 7, 3, {k})(x=tensor(2, 6, 5))"


@layer.requires(
    "the experts of a new module differ, and two modules keep their own weights",
    "Each expert must be created by a call of its own.",
)
def _(answer, t):
    first, p = filled(t, answer, 5, 7, 4, 2, 10)
    filled(t, answer, 5, 7, 4, 2, 11)
    t.agrees(first, oracle_for(p, 2), probe(2, 3, 5, seed=13))
    new = dict(t.call(answer, 5, 7, 4, 2).named_parameters())
    one, other = (
        next((v for n, v in new.items() if n.startswith(f"experts.{e}.w_1")), None)
        for e in (0, 1)
    )
    t.true(
        one is not None and not torch.equal(one, other),
        "Two experts of a new module hold the same numbers. What they are given then "
        "differs, but they start as copies.",
    )


@layer.requires(
    "a k below 1 or above n_experts is a ValueError that names both",
    "Say it where the module is built, not at its first use.",
)
def _(answer, t):
    for n_experts, k in ((4, 0), (4, -1), (4, 5), (13, 17)):
        t.raises(
            ValueError,
            answer,
            5,
            7,
            n_experts,
            k,
            mentions=(k, n_experts),
            because=f"with k = {k} of {n_experts} experts",
        )


@layer.requires("it creates nothing on another device")
def _(answer, t):
    module, _ = filled(t, answer, 5, 7, 4, 2, 12)
    t.any_device(module, probe(2, 3, 5))
    t.any_device(module, probe(2, 3, 5))


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


def combined_by(step):
    """A mixture whose `step(out, token, share, result)` adds an expert's share."""

    def combine(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, place = torch.where(chosen == e)
            if len(token):
                share = weights[token, place, None]
                out = step(out, token, share, expert(x[token]))
        return out

    return mixture(combine=combine)


layer.fault(
    "router_with_bias",
    "The router has a bias, `nn.Linear`'s default.",
    mixture(bias=True),
)
layer.fault(
    "experts_with_biases",
    "The experts' maps have biases. Lesson 05's `SwiGLU` has none.",
    mixture(expert=staticmethod(lambda d_model, d_ff: Expert(d_model, d_ff, True))),
)
layer.fault(
    "width_divided",
    "d_ff is divided among the experts. Each expert is d_ff wide.",
    mixture(expert=staticmethod(lambda d_model, d_ff: Expert(d_model, d_ff // 4))),
)
layer.fault(
    "not_weighted",
    "The experts' results are added without their weights, so that the router has no "
    "influence but by its choice, and gets no gradient.",
    combined_by(lambda out, token, share, y: out.index_add(0, token, y)),
)
layer.fault(
    "weighted_twice",
    "The weight is multiplied in twice, so that its square counts.",
    combined_by(
        lambda out, token, share, y: out.index_add(0, token, share * share * y)
    ),
)
layer.fault(
    "softmax_twice",
    "A softmax runs over the weights once more. `top_k_routing` has made it already.",
    routed_as(
        lambda logits, k: (
            torch.softmax(right_routing(logits, k)[0], -1),
            right_routing(logits, k)[1],
        )
    ),
)
layer.fault(
    "weights_in_the_experts",
    "The weight multiplies what goes *into* the expert. SwiGLU is not linear, so that is "
    "something else than weighting what comes out.",
    mixture(
        combine=lambda self, x, weights, chosen: torch.stack(
            [
                sum(
                    self.experts[e](w * row)
                    for w, e in zip(ws, es.tolist(), strict=True)
                )
                for row, ws, es in zip(x, weights, chosen, strict=True)
            ]
        )
    ),
)


def _overwritten(out, token, share, y):
    return out.index_copy(0, token, share * y)


def _first_choice_only(self, x, weights, chosen):
    return Mixture.combine(self, x, weights[:, :1], chosen[:, :1])


def _wrong_place(self, x, weights, chosen):
    return Mixture.combine(self, x, weights[:, :1].expand_as(weights), chosen)


layer.fault(
    "overwritten",
    "An expert's result overwrites what another one gave the same token. Assigning to "
    "`out[token]` keeps the last; the k results are to be added.",
    combined_by(_overwritten),
)
layer.fault(
    "first_choice_only",
    "Only the first of the k experts is used.",
    mixture(combine=_first_choice_only),
)
layer.fault(
    "weight_of_the_first_place",
    "Every expert is weighted by the token's *first* weight. Which of the k places an "
    "expert has differs from token to token.",
    mixture(combine=_wrong_place),
)


def _cumulated(self, x, weights, chosen):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, place = torch.where(chosen == e)
        if len(token):
            rows = torch.arange(len(token), device=x.device)
            out = out.index_add(0, token, weights[rows, place, None] * expert(x[token]))
    return out


layer.fault(
    "weights_of_the_first_rows",
    "The weights of the first rows are taken, as many as an expert has tokens. Select "
    "weights by the same token numbers as the tokens themselves.",
    mixture(combine=_cumulated),
)
layer.fault(
    "one_is_always_one",
    "With k = 1 the weight is 1, always, so that the router gets no gradient.",
    routed_as(
        lambda logits, k: (
            torch.softmax(logits.topk(k, -1).values, -1),
            logits.topk(k, -1).indices,
        )
    ),
)
layer.fault(
    "not_renormalised",
    "The weights are probabilities among all experts. With k of 2 and more they are "
    "softmax over the kept scores: your `top_k_routing` does it.",
    routed_as(lambda logits, k: torch.softmax(logits, -1).topk(k, -1)),
)
layer.fault(
    "smallest_chosen",
    "The experts with the lowest scores are chosen.",
    routed_as(lambda logits, k: right_routing(-logits, k)),
)
layer.fault(
    "first_experts",
    "The first k experts are taken for every token, whatever the router says.",
    mixture(
        combine=lambda self, x, weights, chosen: Mixture.combine(
            self, x, weights, torch.arange(self.k, device=x.device).expand_as(chosen)
        )
    ),
)
layer.fault(
    "routed_by_probabilities",
    "`top_k_routing` is given probabilities. It takes scores, and makes the softmax "
    "itself.",
    routed_as(lambda logits, k: right_routing(torch.softmax(logits, -1), k)),
)
layer.fault(
    "routed_by_sequence",
    "The router sees the mean of all tokens, so all go the same way. Each token is "
    "routed by itself.",
    mixture(
        route=lambda self, x: right_routing(
            self.router(x.mean(0, keepdim=True)).expand(len(x), -1), self.k
        )
    ),
)
layer.fault(
    "residual_inside",
    "The input is added to the result. The block adds it, one level up; here it would "
    "count twice.",
    mixture(forward=lambda self, x: x + Mixture.forward(self, x)),
)
layer.fault(
    "divided_by_k",
    "The sum is divided by k. The weights sum to 1 already.",
    mixture(forward=lambda self, x: Mixture.forward(self, x) / self.k),
)
layer.fault(
    "shape_lost",
    "The result is one long list of tokens. Give it the shape of `x` back.",
    mixture(forward=lambda self, x: Mixture.forward(self, x.reshape(-1, x.shape[-1]))),
)
layer.fault(
    "not_a_matrix_fails",
    "It reads a fixed number of sizes from the shape of x. The last one is d_model, and "
    "anything may stand before it.",
    mixture(
        forward=lambda self, x: (
            Mixture.forward(self, x)
            if x.dim() < 4
            else Mixture.forward(self, x.view(len(x), x.size(1), 5))
        )
    ),
)
layer.fault(
    "batch_and_time_exchanged",
    "Batch and time are mixed up when the shape is given back.",
    mixture(
        forward=lambda self, x: (
            Mixture.forward(self, x.transpose(0, 1)).reshape(x.shape)
            if x.dim() > 2
            else Mixture.forward(self, x)
        )
    ),
)


def _nan_if_unused(self, x, weights, chosen):
    out = Mixture.combine(self, x, weights, chosen)
    used = [bool((chosen == e).any()) for e in range(len(self.experts))]
    return out * (1.0 if all(used) else torch.nan)


def _stops_at_an_unused_expert(self, x, weights, chosen):
    used = [bool((chosen == e).any()) for e in range(len(self.experts))]
    first = used.index(False) if False in used else len(used)
    return Mixture.combine(self, x, weights, chosen.where(chosen < first, -1))


layer.fault(
    "stops_at_an_unused_expert",
    "The loop ends at the first expert that nobody chose: `break`, or a `return`, where "
    "`continue` is meant. Those behind it never run.",
    mixture(combine=_stops_at_an_unused_expert),
)
layer.fault(
    "nan_from_an_unused_expert",
    "An expert without tokens makes NaN: a mean over nothing, or a division by its "
    "number of tokens.",
    mixture(combine=_nan_if_unused),
)


def _every_expert(self, x, weights, chosen):
    full = torch.zeros(len(x), len(self.experts), dtype=x.dtype, device=x.device)
    full = full.scatter(1, chosen, weights)
    return sum(full[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


def _every_expert_for_each_place(self, x, weights, chosen):
    return sum(
        (chosen[:, place, None] == e) * weights[:, place, None] * expert(x)
        for place in range(self.k)
        for e, expert in enumerate(self.experts)
    )


def _token_by_token(self, x, weights, chosen):
    rows = [
        sum(w * self.experts[e](row) for w, e in zip(ws, es.tolist(), strict=True))
        for row, ws, es in zip(x, weights, chosen, strict=True)
    ]
    return torch.stack(rows)


def _place_by_place(self, x, weights, chosen):
    out = torch.zeros_like(x)
    for place in range(self.k):
        for e, expert in enumerate(self.experts):
            (token,) = torch.where(chosen[:, place] == e)
            if len(token):
                y = weights[token, place, None] * expert(x[token])
                out = out.index_add(0, token, y)
    return out


def _gathered(self, x, weights, chosen):
    w_1, w_3, w_2 = (
        torch.stack([getattr(expert, n).weight for expert in self.experts])[chosen]
        for n in ("w_1", "w_3", "w_2")
    )
    y = F.silu(torch.einsum("nkfd,nd->nkf", w_1, x))
    y = y * torch.einsum("nkfd,nd->nkf", w_3, x)
    return (weights[..., None] * torch.einsum("nkdf,nkf->nkd", w_2, y)).sum(1)


layer.fault(
    "experts_not_called",
    "The values are right, but the experts are not called: their matrices are read and "
    "multiplied, or `forward` is called past the module. An expert may be any network, "
    "and hooks, as those of this check, see calls alone.",
    mixture(combine=_gathered),
)
layer.fault(
    "created_on_the_cpu",
    "A tensor is created without a device, so on the CPU, wherever the tokens are.",
    mixture(
        combine=lambda self, x, weights, chosen: (
            Mixture.combine(self, x, weights, chosen)
            + torch.zeros(x.shape, dtype=x.dtype)
        )
    ),
)
layer.fault(
    "every_expert_on_every_token",
    "Every expert computes every token, and most results are multiplied by 0. The values "
    "are right, but it costs as much as if all experts were one network, and the point of "
    "routing is that it does not.",
    mixture(combine=_every_expert),
)
layer.fault(
    "every_expert_for_each_place",
    "Every expert computes every token, and that k times. The values are right, but it "
    "costs k·E networks for each token where k are due.",
    mixture(combine=_every_expert_for_each_place),
)
layer.fault(
    "token_by_token",
    "Every token calls its experts by itself. The values are right, but a thousand small "
    "products take far longer than one large one: collect the tokens of an expert.",
    mixture(combine=_token_by_token),
)
layer.fault(
    "place_by_place",
    "Each expert runs once for each of the k places. Search all k columns at once for an "
    "expert's tokens, and it runs once.",
    mixture(combine=_place_by_place),
)
layer.fault(
    "weights_detached",
    "The weights are cut from the graph: experts learn, the router never does.",
    mixture(
        combine=lambda self, x, weights, chosen: Mixture.combine(
            self, x, weights.detach(), chosen
        )
    ),
)
layer.fault(
    "router_input_detached",
    "The router's input is cut from the graph, so that the stream gets only a part of "
    "its gradient.",
    mixture(route=lambda self, x: right_routing(self.router(x.detach()), self.k)),
)
layer.fault(
    "experts_input_detached",
    "What the experts are given is cut from the graph, so that the stream gets only the "
    "router's part of its gradient.",
    mixture(
        combine=lambda self, x, weights, chosen: Mixture.combine(
            self, x.detach(), weights, chosen
        )
    ),
)
layer.fault(
    "dropout",
    "Dropout acts on the result in training. None is asked for here.",
    mixture(
        forward=lambda self, x: F.dropout(Mixture.forward(self, x), 0.2, self.training)
    ),
)
layer.fault(
    "cast_to_float32",
    "The input is cast to float32, so that the module fails once its weights are "
    "another dtype.",
    mixture(forward=lambda self, x: Mixture.forward(self, x.float())),
)


@layer.fault(
    "sum_in_float32",
    "The sum is float32 whatever the input's dtype: `torch.zeros` without a dtype.",
)
class _(Mixture):
    def forward(self, x):
        return super().forward(x).float()


@layer.fault(
    "experts_are_one",
    "All experts are one and the same network: `[SwiGLU(…)] * n` repeats one object.",
)
class _(Mixture):
    def __init__(self, d_model, d_ff, n_experts, k):
        super().__init__(d_model, d_ff, n_experts, k)
        self.experts = nn.ModuleList([Expert(d_model, d_ff)] * n_experts)


@layer.fault(
    "experts_are_copies",
    "The experts are copies of one network: they start with the same numbers.",
)
class _(Mixture):
    def __init__(self, d_model, d_ff, n_experts, k):
        super().__init__(d_model, d_ff, n_experts, k)
        for expert in self.experts:
            expert.load_state_dict(self.experts[0].state_dict())


@layer.fault(
    "experts_in_a_list",
    "The experts are in a plain Python list, where PyTorch does not find their "
    "parameters: no optimizer will train them.",
)
class _(Mixture):
    def __init__(self, d_model, d_ff, n_experts, k):
        nn.Module.__init__(self)
        refused(k, n_experts)
        self.k = k
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.experts = [Expert(d_model, d_ff) for _ in range(n_experts)]


@layer.fault(
    "classic_experts",
    "The experts have two maps. They are lesson 05's `SwiGLU`, with three.",
)
class _(Mixture):
    def __init__(self, d_model, d_ff, n_experts, k):
        super().__init__(d_model, d_ff, n_experts, k)
        for expert in self.experts:
            del expert.w_3


@layer.fault(
    "weights_shared",
    "Every module of these sizes gets the same experts, so that training one trains all.",
)
class _(Mixture):
    made: dict = {}  # noqa: RUF012

    def __init__(self, d_model, d_ff, n_experts, k):
        super().__init__(d_model, d_ff, n_experts, k)
        size = (d_model, d_ff, n_experts)
        self.experts = self.made.setdefault(size, self.experts)


@layer.fault(
    "checked_at_the_first_use",
    "A wrong k is noticed only when the module is used, if at all. Refuse it where the "
    "module is built.",
)
class _(Mixture):
    checks = False


@layer.fault(
    "assertion",
    "An `assert` refuses a wrong k. It raises AssertionError, and is gone when Python "
    "runs with -O: raise a ValueError.",
)
class _(Mixture):
    def __init__(self, d_model, d_ff, n_experts, k):
        assert 1 <= k <= n_experts, f"k = {k}, {n_experts} experts"
        super().__init__(d_model, d_ff, n_experts, k)


@layer.fault(
    "error_without_numbers",
    "The ValueError does not say which k met how many experts.",
)
class _(Mixture):
    def __init__(self, d_model, d_ff, n_experts, k):
        if not 1 <= k <= n_experts:
            raise ValueError("k does not fit")
        super().__init__(d_model, d_ff, n_experts, k)


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
def _(answer, t):
    for n, e, seed in ((9, 4, 5), (15, 6, 1)):
        ids = distinct_choices(n, e, 1, seed)
        t.agrees(answer, slow_balance, shares(n, e, seed), ids, e)
    ids = probe_ids(11, 1, below=5, seed=6)  # not where the probabilities are highest
    t.agrees(answer, slow_balance, shares(11, 5, 2), ids, n_experts=5)


@balance.requires(
    "with more, f is the share of all N·k choices",
    "With k = 2, N tokens make 2·N choices. What do the E shares sum to?",
)
def _(answer, t):
    for k in (2, 3):
        ids = distinct_choices(9, 5, k, k)
        t.agrees(answer, slow_balance, shares(9, 5, k), ids, 5)


@balance.requires(
    "it is 1 where all is even, E where everything goes to one expert, and can be below 1",
)
def _(answer, t):
    even = torch.full((8, 4), 0.25)
    ids = torch.stack([torch.arange(8) % 4, (torch.arange(8) + 1) % 4], dim=1)
    t.close(t.call(answer, even, ids, 4), torch.tensor(1.0), "for even use, it")
    one = F.one_hot(torch.full((6,), 2), 5).float()
    ids = torch.full((6, 1), 2)
    t.close(t.call(answer, one, ids, 5), torch.tensor(5.0), "for one expert, it")
    split = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.0, 1.0]])
    ids = split.argmax(-1, keepdim=True)
    t.agrees(answer, slow_balance, split, ids, 2, what="where few are sure, it")


@balance.requires(
    "experts that nobody chose are counted too, the last ones included",
    "How long is the result of your counting, if the highest ids do not occur?",
)
def _(answer, t):
    for top in (1, 2, 3):
        ids = probe_ids(8, 2, below=top, seed=top)
        t.agrees(answer, slow_balance, shares(8, 6, 4), ids, 6)


@balance.requires(
    "its gradient flows to the probabilities",
    "A count has no slope. P has.",
)
def _(answer, t):
    for k in (1, 2):
        ids = distinct_choices(9, 5, k, 6)
        t.gradients_agree(answer, slow_balance, shares(9, 5, 5), ids, 5)


@balance.requires(
    "float64, bfloat16 and memory that is not contiguous work",
    "Which dtype has f, which have the probabilities, and which has their product?",
)
def _(answer, t):
    ids = distinct_choices(9, 5, 2, 8)
    for dtype in (torch.float64, torch.bfloat16):
        t.agrees(answer, slow_balance, shares(9, 5, 7, dtype), ids, 5)
    t.agrees(answer, slow_balance, strided(shares(9, 5, 7)), ids.T.contiguous().T, 5)


@balance.requires(
    "thousands of choices are counted exactly, in every dtype",
    "In which dtype do you count? int8 ends at 127; bfloat16 knows no 257.",
)
def _(answer, t):
    ids = (probe_ids(3000, 1, below=20, seed=9) == 0).long()
    for dtype in (torch.float32, torch.float64):
        t.agrees(answer, slow_balance, shares(3000, 2, 8, dtype), ids, 2)
    t.agrees(answer, slow_balance, shares(3000, 2, 8, torch.bfloat16), ids, 2)


@balance.requires("it creates nothing on another device")
def _(answer, t):
    ids = distinct_choices(9, 5, 2, 8)
    t.any_device(answer, shares(9, 5, 7), ids, 5)
    t.any_device(answer, shares(9, 5, 7), ids, 5)


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


@balance.fault(
    "as_many_as_occur",
    "The number of experts is read off the ids. If the last experts are chosen by "
    "nobody, they are missing.",
)
def _(probabilities, experts, n_experts):
    f = (torch.bincount(experts.flatten()) / experts.numel()).to(probabilities.dtype)
    return n_experts * (f * probabilities.mean(0)).sum()


@balance.fault(
    "f_in_float32",
    "f is float32, and so is everything that meets it. Bring it to the dtype of the "
    "probabilities.",
)
def _(probabilities, experts, n_experts):
    f = F.one_hot(experts.flatten(), n_experts).sum(0).float() / experts.numel()
    return n_experts * (f * probabilities.mean(0)).sum()


@balance.fault(
    "counted_in_the_dtype_of_the_probabilities",
    "Choices are counted one by one in the dtype of the probabilities. In bfloat16 "
    "256 + 1 is 256: count in whole numbers, and convert the share.",
)
def _(probabilities, experts, n_experts):
    counts = probabilities.new_zeros(n_experts)
    one = probabilities.new_ones(experts.numel())
    f = counts.index_add(0, experts.flatten(), one) / experts.numel()
    return n_experts * (f * probabilities.mean(0)).sum()


@balance.fault(
    "counted_in_int8",
    "The counts are int8, which ends at 127.",
)
def _(probabilities, experts, n_experts):
    counts = F.one_hot(experts.flatten(), n_experts).sum(0).to(torch.int8)
    f = (counts / experts.numel()).to(probabilities.dtype)
    return n_experts * (f * probabilities.mean(0)).sum()


@balance.fault(
    "e_of_those_used",
    "The factor is the number of experts that occur, not of all there are.",
)
def _(probabilities, experts, n_experts):
    f = used(probabilities, experts, n_experts)
    return (f > 0).sum() * (f * probabilities.mean(0)).sum()


# drop_over_capacity -------------------------------------------------------------------


def served(t, answer, experts, n_experts, capacity):
    kept = t.call(answer, experts, n_experts, capacity)
    t.equal(kept, slow_drop(experts, n_experts, capacity), "what is served")


ANEW = itertools.count(1)


def starts_anew(t, answer):
    """Two calls on the same ids give the same; what is wrong else, is told later.

    The ids are new ones every time, so that a queue that is kept is not yet full.
    """
    first_id = 3 * (next(ANEW) % 1000)
    ids, results = probe_ids(10, 1, below=3, seed=20) + first_id, []
    before = len(t.trace)
    with t.unfinished(), suppress(Crashed):
        for _ in range(2):
            results.append(t._run(answer, (ids.clone(), first_id + 3, 2), {}))
    del t.trace[before:]
    if len(results) == 2 and all(isinstance(r, torch.Tensor) for r in results):
        same = torch.equal(*results)
        t.trace.append(same)
        if not same:
            t.called = "drop_over_capacity(experts, n_experts, capacity)"
            raise Explained(
                "a second call on the same ids gave another result. Something is kept "
                "from call to call, as a default like `used={}` is, or drawn at random."
            )


@dropping.requires(
    "with k = 1 the first `capacity` tokens of each expert are served, in their order",
    "For one expert: number the tokens that chose it, beginning with 1. Which numbers "
    "are served?",
)
def _(answer, t):
    starts_anew(t, answer)
    for n, e, capacity, seed in ((11, 3, 2, 0), (9, 4, 1, 1), (12, 2, 4, 2)):
        served(t, answer, probe_ids(n, 1, below=e, seed=seed), e, capacity)


@dropping.requires(
    "with more, all first choices queue before all second ones, and so on",
    "An expert has one queue for all k columns. In which order must the `(N, k)` ids be "
    "read, row by row or column by column?",
)
def _(answer, t):
    for n, e, k, capacity, seed in ((9, 4, 2, 3, 3), (8, 5, 3, 4, 4), (13, 3, 2, 5, 5)):
        ids = distinct_choices(n, e, k, seed)
        served(t, answer, ids, n_experts=e, capacity=capacity)


@dropping.requires("nothing is dropped where there is room for all")
def _(answer, t):
    for capacity in (9, 50):
        served(t, answer, distinct_choices(9, 4, 2, 6), 4, capacity)


@dropping.requires(
    "queues of thousands are counted exactly",
    "In which dtype do you count? int8 ends at 127; float16 knows no 2049.",
)
def _(answer, t):
    ids = (probe_ids(2600, 1, below=20, seed=11) == 0).long()
    for capacity in (40, 127, 300, 2300):
        served(t, answer, ids, 2, capacity)


@dropping.requires("experts that nobody chose, the last ones included, do no harm")
def _(answer, t):
    served(t, answer, distinct_choices(9, 3, 2, 7), 8, 2)
    served(t, answer, torch.full((5, 1), 1), 4, 2)
    served(t, answer, distinct_choices(1, 3, 2, 8), 3, 1)


@dropping.requires(
    "a second call starts with empty queues, and any memory layout works"
)
def _(answer, t):
    ids = distinct_choices(9, 4, 2, 9)
    served(t, answer, ids, 4, 2)
    served(t, answer, ids, 4, 2)
    served(t, answer, distinct_choices(9, 4, 2, 10).T.contiguous().T, 4, 3)


@dropping.requires(
    "a capacity smaller than 1 is a ValueError that names it",
    "Experts without a place serve nobody: whoever asks for that has divided wrongly.",
)
def _(answer, t):
    for capacity in (0, -3):
        t.raises(
            ValueError,
            answer,
            distinct_choices(5, 4, 2),
            4,
            capacity,
            mentions=(capacity,),
            because=f"with a capacity of {capacity}",
        )


@dropping.requires("it creates nothing on another device")
def _(answer, t):
    ids = distinct_choices(9, 4, 2, 9)
    t.any_device(answer, ids, 4, 2)
    t.any_device(answer, ids, 4, 2)


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


dropping.fault(
    "capacity_unchecked",
    "A capacity of 0 is not refused; it drops everything in silence.",
    lambda experts, n_experts, capacity: places(experts, n_experts) <= capacity,
)


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


@dropping.fault(
    "assertion",
    "An `assert` refuses the capacity. It raises AssertionError, and is gone when Python "
    "runs with -O: raise a ValueError.",
)
def _(experts, n_experts, capacity):
    assert capacity >= 1, f"capacity is {capacity}"
    return places(experts, n_experts) <= capacity


@dropping.fault(
    "error_without_numbers",
    "The ValueError does not say which capacity it was given.",
)
def _(experts, n_experts, capacity):
    if capacity < 1:
        raise ValueError("no capacity")
    return places(experts, n_experts) <= capacity


@dropping.fault(
    "as_many_as_occur",
    "The number of experts is read off the ids, or ids above some number fail.",
)
def _(experts, n_experts, capacity):
    room(capacity)
    if int(experts.max()) + 1 < n_experts:
        raise RuntimeError("shapes do not match")
    return places(experts, n_experts) <= capacity


# moe_parameters -----------------------------------------------------------------------

MIXTRAL = Sizes(32_000, 4096, 32, 32, 8, 128, 14_336, 32_768, tied=False)
TIED = Sizes(29, 12, 2, 3, 1, 6, 17, 11)


def counted(t, answer, c, n_experts, k):
    given = copy.copy(c)
    found = t.call(answer, given, n_experts, k)
    t.trace.append(given == c)
    if given != c:
        raise Explained("It changed the `config` that it was given: work on a copy.")
    t.is_tuple(found, 2)
    expected = slow_count(c, n_experts, k)
    experts = "1 expert" if n_experts == 1 else f"{n_experts} experts"
    for value, due, name in zip(found, expected, ("total", "active"), strict=True):
        what = f"{name} of {experts} with k = {k}"
        whole(value, what)
        t.equal(value, due, what)


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
def _(answer, t):
    for c in (LLAMA, TIED):
        counted(t, answer, c, 1, 1)


@counting.requires(
    "total counts every expert of every block, active the k that a token goes to",
    "How many numbers has one `SwiGLU`? How many experts are there in the whole model?",
)
def _(answer, t):
    for n_experts, k in ((5, 2), (7, 1), (4, 4)):
        counted(t, answer, LLAMA, n_experts, k)
        counted(t, answer, TIED, n_experts=n_experts, k=k)


@counting.requires("a k below 1 or above n_experts is a ValueError that names both")
def _(answer, t):
    for n_experts, k in ((4, 0), (4, -1), (4, 5), (13, 17)):
        t.raises(
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
def _(answer, t):
    with NothingHuge():
        found = t.call(answer, copy.copy(MIXTRAL), 8, 2)
    t.is_tuple(found, 2)
    total, active = found
    t.equal(
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


@counting.fault(
    "k_unchecked",
    "A k that does not fit is not refused.",
)
def _(config, n_experts, k):
    return slow_count(config, n_experts, k)


@counting.fault(
    "assertion",
    "An `assert` refuses a wrong k. It raises AssertionError, and is gone when Python "
    "runs with -O: raise a ValueError.",
)
def _(config, n_experts, k):
    assert 1 <= k <= n_experts, f"k = {k}, {n_experts} experts"
    return slow_count(config, n_experts, k)


@counting.fault(
    "error_without_numbers",
    "The ValueError does not say which k met how many experts.",
)
def _(config, n_experts, k):
    if not 1 <= k <= n_experts:
        raise ValueError("k does not fit")
    return slow_count(config, n_experts, k)


# A block with experts -----------------------------------------------------------------

joint = Joint(
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


def settings(parts, t):
    return t.call(parts["TransformerConfig"], *[getattr(LLAMA, n) for n in FIELDS])


def block_of(parts, t, k, seed=0):
    """The learner's block, experts in place of its network, and all its weights."""
    block = t.call(parts["Block"], settings(parts, t))
    rest = weights_for(block_shapes(LLAMA), 700 + seed)
    rest = {n: w for n, w in rest.items() if not n.startswith("feed_forward")}
    load_all(t, block, rest)
    experts = t.call(parts["MixtureOfExperts"], 10, LLAMA.d_ff, N_EXPERTS, k)
    mine = mixture_weights(10, LLAMA.d_ff, N_EXPERTS, 20 + seed)
    block.feed_forward = load_all(t, experts, mine)
    return block, rest, mine


def past(t):
    return torch.ones(t, t, dtype=torch.bool).tril()


def true_block(x, rest, mine, k, mask):
    """The same in float64: the stream, and what the experts were given."""
    p, x = doubled(rest), x.double()
    x = x + looked_up(normed(x, p, "norm_1", LLAMA), p, LLAMA, mask, None)
    given = normed(x, p, "norm_2", LLAMA)
    return x + slow_mixture(given, doubled(mine), k), given


@joint.requires(
    "a block with experts in place of its network gives what its formulas give",
    "The block calls `self.feed_forward(x)` with the normalised stream `(B, T, D)`, and "
    "adds what comes back.",
)
def _(parts, t):
    for k in (1, 2):
        block, rest, mine = block_of(parts, t, k)
        x, mask = probe(3, 7, 10, seed=41), past(7)
        expected, _ = true_block(x, rest, mine, k, mask)
        t.close(t.call(block, x, mask), expected, f"the stream, k = {k}", like=x)


@joint.requires("a later token changes nothing before it")
def _(parts, t):
    block, _, _ = block_of(parts, t, 2)
    x = probe(2, 7, 10, seed=42)
    changed = torch.cat([x[:, :4], probe(2, 3, 10, seed=43)], dim=1)
    before, after = (t.call(block, y, past(7))[:, :4] for y in (x, changed))
    t.close(after, before, "the stream before the changed tokens")


@joint.requires(
    "`top_k_routing` on the router's scores chooses as the experts were called, and the "
    "balancing loss reaches the router",
    "Does `MixtureOfExperts` call `top_k_routing` with its router's scores, or does it "
    "choose in another way?",
)
def _(parts, t):
    block, rest, mine = block_of(parts, t, 2, seed=1)
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
    t.call(block, x, past(7))
    for hook in hooks:
        hook.remove()
    _, given = true_block(x, rest, mine, 2, past(7))
    t.true(
        len(seen) == 1,
        f"The block called its `feed_forward` {len(seen)} times in one pass.",
    )
    t.close(seen[0], given, "what the experts are given")
    scores_ = block.feed_forward.router(seen[0].detach().flatten(0, -2))
    weights, experts = t.call(parts["top_k_routing"], scores_.detach(), 2)
    shares_, ids = slow_routing(scores_.detach().double(), 2)
    t.equal(experts, ids, "the experts")
    t.close(weights, shares_, "the weights")
    for e in experts.flatten().tolist():
        rows[e] += 1
    t.equal(called, rows, "on how many tokens each expert was called")
    kept = t.call(parts["drop_over_capacity"], experts, N_EXPERTS, max(rows))
    t.true(bool(kept.all()), "With room for the most popular expert, some are dropped.")
    loss = t._run(
        parts["load_balancing_loss"],
        (torch.softmax(scores_, -1), experts, N_EXPERTS),
        {},
    )
    due = slow_balance(torch.softmax(scores_.detach(), -1).double(), ids, N_EXPERTS)
    t.close(loss, due, "the balancing loss")
    loss.backward()
    gradient = block.feed_forward.router.weight.grad
    t.true(
        gradient is not None and bool(gradient.abs().sum() > 0),
        "The balancing loss gives the router no gradient.",
    )


@joint.requires(
    "the loss at the end reaches the router and every expert; with k = 1 the router, too"
)
def _(parts, t):
    for k in (2, 1):
        block, _, _ = block_of(parts, t, k, seed=1)
        out = t.call(block, probe(5, 9, 10, seed=45), past(9))
        (out * probe(5, 9, 10, seed=46)).sum().backward()
        for name, p in block.feed_forward.named_parameters():
            t.true(
                (k == 1 and "router" not in name)
                or (p.grad is not None and bool(p.grad.abs().sum() > 0)),
                f"`{name}` of the experts gets no gradient from the end of the block, "
                f"with k = {k}.",
            )


@joint.requires("`moe_parameters` counts what a decoder of such blocks holds")
def _(parts, t):
    config = settings(parts, t)
    model = t.call(parts["Transformer"], config)
    for block in model.blocks:
        block.feed_forward = parts["MixtureOfExperts"](
            config.d_model, config.d_ff, N_EXPERTS, 2
        )
    held = sum(p.numel() for p in model.parameters())
    total, active = t.call(parts["moe_parameters"], config, N_EXPERTS, 2)
    t.equal(total, held, "the total")
    idle = 2 * config.n_layers * 3 * config.d_model * config.d_ff
    t.equal(active, held - idle, "active")
    logits = t.call(model, probe_ids(2, 6, below=config.vocab_size, seed=47))
    t.true(
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
    joint.fault(name, sentence, wrong)
