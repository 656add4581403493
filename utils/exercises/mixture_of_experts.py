"""Lesson 12: routing, a mixture of experts, its balance, its capacity, its size."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from utils.check.errors import Explained
from utils.check.exercise import Exercise, IntegrationCheck
from utils.exercises.forward_pass import (
    FIELDS,
    LLAMA,
    Sizes,
    block_shapes,
    causal,
    doubled,
    looked_up,
    model_shapes,
    normed,
    weights_for,
)
from utils.probe import probe, probe_ids, strided

top_k_routing = Exercise("top_k_routing", lesson="mixture_of_experts")
MixtureOfExperts = Exercise("MixtureOfExperts", lesson="mixture_of_experts")
load_balancing_loss = Exercise("load_balancing_loss", lesson="mixture_of_experts")
drop_over_capacity = Exercise("drop_over_capacity", lesson="mixture_of_experts")
moe_parameters = Exercise("moe_parameters", lesson="mixture_of_experts")
OWN = (
    "top_k_routing",
    "MixtureOfExperts",
    "load_balancing_loss",
    "drop_over_capacity",
    "moe_parameters",
)
block_with_experts = IntegrationCheck(
    "block_with_experts",
    lesson="mixture_of_experts",
    parts={"SwiGLU": "feed_forward"}
    | dict.fromkeys(("TransformerConfig", "Block", "Transformer"), "forward_pass")
    | dict.fromkeys(OWN, "mixture_of_experts"),
)

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
    shapes = model_shapes(c).items()
    rest = sum(math.prod(s) for name, s in shapes if "feed_forward" not in name)
    rest += c.n_layers * c.d_model * n_experts
    matrix = c.d_model * c.d_ff
    return tuple(rest + c.n_layers * 3 * n * matrix for n in (n_experts, k))


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


def underscored(by_name):
    """Dotted names as `case.load` and `case.parameters` take them."""
    return {name.replace(".", "__"): value for name, value in by_name.items()}


def filled(answer, case, n_experts, k, seed=0):
    """A module with known weights, and those weights by name."""
    p = mixture_weights(5, 7, n_experts, seed)
    return case.load(case.call(answer, 5, 7, n_experts, k), **underscored(p)), p


def oracle_for(p, k):
    p = doubled(p)
    return lambda x: slow_mixture(x.double(), p, k)


def refuses(case, answer, before, *sizes):
    """A wrong k is a ValueError; `before` makes what stands before (n_experts, k)."""
    for n_experts, k in sizes:
        case.raises(
            ValueError,
            answer,
            *before(n_experts),
            k,
            mentions=(k, n_experts),
            because=f"with k = {k} of {n_experts} experts",
        )


WRONG_SIZES = ((4, 0), (4, -1), (4, 5), (13, 17))

# top_k_routing ------------------------------------------------------------------------


def routed(case, answer, logits, k, tolerance=None):
    result = case.call(answer, logits, k)
    case.is_tuple(result, 2)
    weights, experts = slow_routing(logits.double(), k)
    case.is_tensor(result[1], "the second result")
    case.equal(result[1], experts, "the tensor of expert ids")
    what = "the tensor of weights"
    case.close(result[0], weights, what, like=logits, tolerance=tolerance)


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
    routed(case, answer, scores(9, 5, seed=20, step=1e-3), 2)  # they still differ
    routed(case, answer, scores(1, 4, seed=3), 2)


@top_k_routing.requires("k = E keeps every expert, sorted")
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
        weights, experts = case.call(answer, logits, k)
        case.true(
            experts.shape == (7, k)
            and all(len(set(row)) == k for row in experts.tolist()),
            f"Where scores are equal, some row has not {k} different experts.",
        )
        kept = logits.gather(1, experts)
        case.equal(kept, logits.topk(k).values, "the scores of the kept experts")
        expected = slow_routing(logits.double(), k)[0]
        case.close(weights, expected, "the tensor of weights")


@top_k_routing.requires(
    "gradients flow through the weights to the scores, with k = 1 too",
    "Which steps lie between the scores and the weights, and does each have a slope?",
)
def _(answer, case):
    for k in (1, 2, 3):
        case.gradients_agree(answer, slow_routing, scores(5, 4, seed=10 + k), k)


@top_k_routing.requires("any dtype and memory layout work")
def _(answer, case):
    for k in (1, 3):
        double = scores(5, 4, seed=14, dtype=torch.float64)
        routed(case, answer, double, k, tolerance=1e-6)  # many take softmax in float32
        for dtype in (torch.float16, torch.bfloat16):
            routed(case, answer, scores(5, 4, seed=14, dtype=dtype), k)
            far = scores(6, 5, seed=18, step=150.0, dtype=dtype)
            routed(case, answer, far, k, tolerance=0.01)
    routed(case, answer, strided(scores(5, 4, seed=15)), 2)
    routed(case, answer, scores(4, 6, seed=16).T, 2)


@top_k_routing.requires(
    "a k below 1 or above the number of experts is a ValueError that names both",
    'Ask before you compute; `raise ValueError(f"…")` with both numbers in it.',
)
def _(answer, case):
    refuses(case, answer, lambda n: (scores(3, n),), *WRONG_SIZES)


@top_k_routing.requires("it creates nothing on another device")
def _(answer, case):
    for k in (1, 2):
        case.any_device(answer, scores(5, 4), k)


# MixtureOfExperts ---------------------------------------------------------------------


@MixtureOfExperts.requires(
    "`router` holds (n_experts, d_model) without bias, and `experts` n_experts networks "
    "with `w_1`, `w_3` and `w_2`, each of its own",
)
def _(answer, case):
    module = case.call(answer, 5, 7, 4, 2)
    experts = getattr(getattr(module, "experts", None), "_modules", {}).values()
    case.true(
        len(set(map(id, experts))) == len(experts),
        "Several experts are one and the same network: `[SwiGLU(…)] * n` repeats one "
        "object.",
    )
    case.parameters(module, **underscored(mixture_shapes(5, 7, 4)))
    case.true(
        isinstance(module.router, nn.Module),
        "`router` cannot be called: make it an `nn.Linear`.",
    )
    weights = dict(module.named_parameters())
    one, other = (
        next(w for n, w in weights.items() if n.startswith(f"experts.{e}.w_1"))
        for e in (0, 1)
    )
    case.true(
        not torch.equal(one, other),
        "Two experts of a new module hold the same numbers. What they are given then "
        "differs, but they start as copies.",
    )
    case.call(answer, d_model=4, d_ff=9, n_experts=3, k=1)


@MixtureOfExperts.requires(
    "with k = 1 each token gets its expert's result times the expert's probability",
    "Make one long list of tokens first. Then send one through by hand: `router`, "
    "`top_k_routing`, the chosen expert, its weight.",
)
def _(answer, case):
    module, p = filled(answer, case, 4, 1)
    case.agrees(module, oracle_for(p, 1), probe(2, 6, 5, seed=1))


@MixtureOfExperts.requires(
    "with more, it gets the sum of its k experts' results by their weights, up to all",
    "Take one token by hand: its k experts, the k results, their weights, the sum. Where "
    "does yours differ?",
)
def _(answer, case):
    for n_experts, k, seed in ((4, 2, 1), (6, 3, 2), (3, 3, 3), (1, 1, 4)):
        module, p = filled(answer, case, n_experts, k, seed)
        case.agrees(module, oracle_for(p, k), probe(2, 6, 5, seed=seed))


@MixtureOfExperts.requires(
    "an expert that nobody chose is no problem",
    "What does your loop do when its list of tokens is empty?",
)
def _(answer, case):
    for k in (1, 2):
        module, p = filled(answer, case, 9, k, 5)
        case.agrees(module, oracle_for(p, k), probe(1, 2, 5, seed=8))


@MixtureOfExperts.requires(
    "every token is treated alone, however many dimensions stand before the last",
    "Which sizes does your code read from the shape of x? Only the last one is fixed; "
    "the long list of tokens gets its shape back at the end. And does what one token "
    "gets depend on the others, as under a capacity?",
)
def _(answer, case):
    module, p = filled(answer, case, 4, 2, 4)
    for sizes in ((2, 3, 5), (5,), (1, 1, 5), (2, 3, 4, 5)):
        case.agrees(module, oracle_for(p, 2), probe(*sizes, seed=5, scale=2))
    case.agrees(module, oracle_for(p, 2), probe(3, 2, 5, seed=6).transpose(0, 1))
    case.agrees(module.eval(), oracle_for(p, 2), strided(probe(2, 3, 5, seed=7)))


@MixtureOfExperts.requires(
    "each expert runs at most once, on the tokens that chose it and no others",
    "For each expert, find all the tokens that have it anywhere among their k, and give "
    "it these rows alone, all at once.",
)
def _(answer, case):
    n_experts, k, n = 6, 2, 12
    module, _ = filled(answer, case, n_experts, k, 6)
    rows = rows_given(module)
    case.call(module, probe(3, 4, 5, seed=9))
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


def rows_given(module):
    """For each expert a list that gets, at each of its calls, the number of rows."""
    rows = [[] for _ in module.experts]
    for e, expert in enumerate(module.experts):

        def note(_, args, named, e=e):
            rows[e].append((*args, *named.values())[0].shape[:-1].numel())

        expert.register_forward_pre_hook(note, with_kwargs=True)
    return rows


@MixtureOfExperts.requires("other dtypes work, and two modules keep their own weights")
def _(answer, case):
    module, p = filled(answer, case, 4, 2, 7)
    filled(answer, case, 4, 2, 11)
    case.agrees(module, oracle_for(p, 2), probe(3, 4, 5, seed=11))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        rounded = {n: w.to(dtype) for n, w in p.items()}
        x = probe(2, 3, 5, seed=10, dtype=dtype)
        tolerance = 1e-5 if dtype == torch.float64 else None  # softmax in float32
        actual = case.call(copy.deepcopy(module).to(dtype), x)
        case.close(actual, oracle_for(rounded, 2)(x), like=x, tolerance=tolerance)


@MixtureOfExperts.requires(
    "gradients reach the input, the router and every chosen expert, with k = 1 too",
    "Which steps lie between what is named and the result, and does each have a slope? "
    "The choice has none; the router is trained through the weights.",
)
def _(answer, case):
    x, direction = probe(2, 6, 5, seed=12), probe(2, 6, 5, seed=14)
    for k, seed in ((2, 8), (1, 9)):
        module, p = filled(answer, case, 3, k, seed)
        right = oracle_for(p, k)
        p = {name: w.requires_grad_() for name, w in doubled(p).items()}
        (slow_mixture(x.double(), p, k) * direction).sum().backward()
        out = case.call(module, x)
        case.has_graph(out)
        (out * direction).sum().backward()
        mine = {n.removesuffix(".weight"): w.grad for n, w in module.named_parameters()}
        for name, w in p.items():
            found = torch.zeros_like(w) if mine[name] is None else mine[name]
            expected = torch.zeros_like(w) if w.grad is None else w.grad
            case.note(found)
            case.close(found, expected, f"the gradient of `{name}`")
        case.gradients_agree(module, right, x)


@MixtureOfExperts.requires(
    "a k below 1 or above n_experts is a ValueError that names both",
    "Say it where the module is built, not at its first use.",
)
def _(answer, case):
    refuses(case, answer, lambda n: (5, 7, n), *WRONG_SIZES)


@MixtureOfExperts.requires("it creates nothing on another device")
def _(answer, case):
    module, _ = filled(answer, case, 4, 2, 12)
    case.any_device(module, probe(2, 3, 5))


# load_balancing_loss ------------------------------------------------------------------


def shares(n, e, seed=0, dtype=torch.float32):
    """Probabilities `(n, e)`, uneven over the experts."""
    logits = probe(n, e, seed=seed) - 0.4 * torch.arange(e)
    return torch.softmax(logits, -1).to(dtype)


@load_balancing_loss.requires(
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


@load_balancing_loss.requires(
    "with more, f is the share of all N·k choices",
    "With k = 2, N tokens make 2·N choices. What do the E shares sum to?",
)
def _(answer, case):
    for k in (2, 3):
        ids = distinct_choices(9, 5, k, k)
        case.agrees(answer, slow_balance, shares(9, 5, k), ids, 5)


@load_balancing_loss.requires(
    "experts that nobody chose are counted too, the last ones included",
    "How long is the result of your counting, if the highest ids do not occur?",
)
def _(answer, case):
    for below in (1, 2, 3):
        ids = probe_ids(8, 2, below=below, seed=below)
        case.agrees(answer, slow_balance, shares(8, 6, 4), ids, 6)


@load_balancing_loss.requires(
    "it is 1 where all is even, E where everything goes to one expert, and can be below 1",
)
def _(answer, case):
    even = torch.full((8, 4), 0.25)
    ids = torch.stack([torch.arange(8) % 4, (torch.arange(8) + 1) % 4], dim=1)
    case.close(case.call(answer, even, ids, 4), torch.tensor(1.0), "for even use, it")
    one, ids = F.one_hot(torch.full((6,), 2), 5).float(), torch.full((6, 1), 2)
    case.close(case.call(answer, one, ids, 5), torch.tensor(5.0), "for one expert, it")
    split = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.0, 1.0]])
    ids = split.argmax(-1, keepdim=True)
    case.agrees(answer, slow_balance, split, ids, 2, what="where few are sure, it")


@load_balancing_loss.requires(
    "its gradient flows to the probabilities",
    "A count has no slope. P has.",
)
def _(answer, case):
    for k in (1, 2):
        ids = distinct_choices(9, 5, k, 6)
        case.gradients_agree(answer, slow_balance, shares(9, 5, 5), ids, 5)


@load_balancing_loss.requires(
    "any dtype and memory layout work",
    "Which dtype has f, which have the probabilities, and which has their product?",
)
def _(answer, case):
    ids = distinct_choices(9, 5, 2, 8)
    for dtype in (torch.float64, torch.bfloat16):
        case.agrees(answer, slow_balance, shares(9, 5, 7, dtype), ids, 5)
    p, ids = strided(shares(9, 5, 7)), ids.T.contiguous().T
    case.agrees(answer, slow_balance, p, ids, 5)


@load_balancing_loss.requires(
    "thousands of choices are counted exactly, in every dtype",
    "In which dtype do you count? int8 ends at 127; bfloat16 knows no 257.",
)
def _(answer, case):
    ids = (probe_ids(3000, 1, below=20, seed=9) == 0).long()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        case.agrees(answer, slow_balance, shares(3000, 2, 8, dtype), ids, 2)


@load_balancing_loss.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, shares(9, 5, 7), distinct_choices(9, 5, 2, 8), 5)


# drop_over_capacity -------------------------------------------------------------------


def served(case, answer, experts, n_experts, capacity):
    kept = case.call(answer, experts, n_experts=n_experts, capacity=capacity)
    case.equal(kept, slow_drop(experts, n_experts, capacity), "what is served")


@drop_over_capacity.requires(
    "with k = 1 the first `capacity` tokens of each expert are served, in their order",
    "For one expert: number the tokens that chose it, beginning with 1. Which numbers "
    "are served?",
)
def _(answer, case):
    for n, e, capacity, seed in ((11, 5, 2, 3), (9, 4, 1, 1), (12, 2, 4, 2)):
        served(case, answer, probe_ids(n, 1, below=e, seed=seed), e, capacity)


@drop_over_capacity.requires(
    "with more, all first choices queue before all second ones, and so on",
    "An expert has one queue for all k columns. In which order must the `(N, k)` ids be "
    "read, row by row or column by column?",
)
def _(answer, case):
    for n, e, k, capacity, seed in ((9, 4, 2, 3, 3), (8, 5, 3, 4, 4), (13, 3, 2, 5, 5)):
        served(case, answer, distinct_choices(n, e, k, seed), e, capacity)


@drop_over_capacity.requires("nothing is dropped where there is room for all")
def _(answer, case):
    for capacity in (9, 50):
        served(case, answer, distinct_choices(9, 4, 2, 6), 4, capacity)


@drop_over_capacity.requires(
    "queues of thousands are counted exactly",
    "In which dtype do you count? int8 ends at 127; float16 knows no 2049.",
)
def _(answer, case):
    ids = (probe_ids(2600, 1, below=20, seed=11) == 0).long()
    for capacity in (40, 127, 300, 2300):
        served(case, answer, ids, 2, capacity)


@drop_over_capacity.requires(
    "experts that nobody chose, the last ones included, do no harm"
)
def _(answer, case):
    served(case, answer, distinct_choices(9, 3, 2, 7), 8, 2)
    served(case, answer, torch.full((5, 1), 1), 4, 2)
    served(case, answer, distinct_choices(1, 3, 2, 8), 3, 1)


@drop_over_capacity.requires(
    "a second call starts with empty queues, and any memory layout works"
)
def _(answer, case):
    ids = distinct_choices(9, 4, 2, 9)
    served(case, answer, ids, 4, 2)
    served(case, answer, ids, 4, 2)
    served(case, answer, distinct_choices(9, 4, 2, 10).T.contiguous().T, 4, 3)


@drop_over_capacity.requires(
    "a capacity smaller than 1 is a ValueError that names it",
    "Experts without a place serve nobody: whoever asks for that has divided wrongly.",
)
def _(answer, case):
    ids = distinct_choices(5, 4, 2)
    for n in (0, -3):
        because = f"with a capacity of {n}"
        case.raises(ValueError, answer, ids, 4, n, mentions=(n,), because=because)


@drop_over_capacity.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, distinct_choices(9, 4, 2, 9), 4, 2)


# moe_parameters -----------------------------------------------------------------------

MIXTRAL = Sizes(32_000, 4096, 32, 32, 8, 128, 14_336, 32_768, tied=False)
TIED = Sizes(29, 12, 2, 3, 1, 6, 17, 11)


def counted(case, answer, c, n_experts, k):
    case.sizes = {
        "the embedding": c.vocab_size * c.d_model,
        "one expert": 3 * c.d_model * c.d_ff,
        "one expert in each block": c.n_layers * 3 * c.d_model * c.d_ff,
    }
    given = copy.copy(c)
    with case.unrecorded():
        found = case.call(answer, given, n_experts=n_experts, k=k)
    if given != c:
        case.note("config changed")
        raise Explained("It changed the `config` that it was given: work on a copy.")
    case.is_tuple(found, 2)
    expected = slow_count(c, n_experts, k)
    experts = "1 expert" if n_experts == 1 else f"{n_experts} experts"
    for value, due, name in zip(found, expected, ("total", "active"), strict=True):
        what = f"{name} of {experts} with k = {k}"
        case.note(value)  # a wrong total tells its mistake whatever active is
        if not isinstance(value, int):
            raise Explained(
                f"{what} is of type {type(value).__name__}, expected a whole number, "
                "int: `//` divides whole numbers, and a sum of ints is one."
            )
        case.equal(value, due, what)


class NothingHuge(TorchFunctionMode):
    """Stops whoever builds a model to count it, before the memory is full."""

    def __torch_function__(self, f, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if f in (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn):
            sizes = tree_leaves((args, kwargs.get("size", ())))
            held = math.prod(n for n in sizes if isinstance(n, int))
            if held > 10_000_000 and str(kwargs.get("device")) != "meta":
                raise Explained(
                    f"It creates a tensor of {held:,} numbers in order to count them, "
                    "and the whole model has 47 billion: compute the sizes from "
                    "`config`, without building the model."
                )
        return f(*args, **kwargs)


@moe_parameters.requires(
    "with one expert it is the decoder of lesson 08 and a router in each block",
    "Your `count_parameters` counts one feed-forward network in each block. What comes "
    "on top?",
)
def _(answer, case):
    for c in (LLAMA, TIED):
        counted(case, answer, c, 1, 1)


@moe_parameters.requires(
    "total counts every expert of every block, active the k that a token goes to",
    "How many numbers has one `SwiGLU`? How many experts are there in the whole model?",
)
def _(answer, case):
    for n_experts, k in ((5, 2), (7, 1), (4, 4)):
        for c in (LLAMA, TIED):
            counted(case, answer, c, n_experts, k)


@moe_parameters.requires(
    "a k below 1 or above n_experts is a ValueError that names both"
)
def _(answer, case):
    refuses(case, answer, lambda n: (copy.copy(LLAMA), n), *WRONG_SIZES)


@moe_parameters.requires(
    "Mixtral-8x7B has 46.7 billion, of which 12.9 billion are active, computed from its "
    "sizes without building it",
)
def _(answer, case):
    with NothingHuge():
        found = case.call(answer, copy.copy(MIXTRAL), 8, 2)
    case.is_tuple(found, 2)
    billions = tuple(round(value / 1e9, 1) for value in found)
    case.equal(billions, (46.7, 12.9), "in billions it")


# A block with experts -----------------------------------------------------------------

N_EXPERTS = 4


def settings(parts, case):
    fields = [getattr(LLAMA, name) for name in FIELDS]
    return case.call(parts["TransformerConfig"], *fields)


def block_of(parts, case, k, seed=0):
    """The learner's block, experts in place of its network, and all its weights."""
    block = case.call(parts["Block"], settings(parts, case))
    rest = weights_for(block_shapes(LLAMA), 700 + seed)
    rest = {n: w for n, w in rest.items() if not n.startswith("feed_forward")}
    case.load(block, **underscored(rest))
    experts = case.call(parts["MixtureOfExperts"], 10, LLAMA.d_ff, N_EXPERTS, k)
    mine = mixture_weights(10, LLAMA.d_ff, N_EXPERTS, 20 + seed)
    block.feed_forward = case.load(experts, **underscored(mine))
    return block, rest, mine


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
        x, mask = probe(3, 7, 10, seed=41), causal(7)
        expected, _ = true_block(x, rest, mine, k, mask)
        case.close(case.call(block, x, mask), expected, f"the stream, k = {k}", like=x)


@block_with_experts.requires("a later token changes nothing before it")
def _(parts, case):
    block, _, _ = block_of(parts, case, 2)
    x = probe(2, 7, 10, seed=42)
    changed = torch.cat([x[:, :4], probe(2, 3, 10, seed=43)], dim=1)
    before, after = (case.call(block, y, causal(7))[:, :4] for y in (x, changed))
    case.close(after, before, "the stream before the changed tokens")


@block_with_experts.requires(
    "`top_k_routing` on the router's scores chooses as the experts were called, and the "
    "balancing loss reaches the router",
    "Does `MixtureOfExperts` call `top_k_routing` with its router's scores, or does it "
    "choose in another way?",
)
def _(parts, case):
    block, rest, mine = block_of(parts, case, 2, seed=1)
    x, seen = probe(3, 7, 10, seed=44), []
    block.feed_forward.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    rows = rows_given(block.feed_forward)
    case.call(block, x, causal(7))
    _, given = true_block(x, rest, mine, 2, causal(7))
    n = len(seen)
    case.true(n == 1, f"The block called its `feed_forward` {n} times in one pass.")
    case.close(seen[0], given, "what the experts are given")
    logits = block.feed_forward.router(seen[0].detach().flatten(0, -2))
    weights, experts = case.call(parts["top_k_routing"], logits.detach(), 2)
    right_weights, ids = slow_routing(logits.detach().double(), 2)
    case.equal(experts, ids, "the experts")
    case.close(weights, right_weights, "the weights")
    chosen = torch.bincount(ids.flatten(), minlength=N_EXPERTS).tolist()
    called = [sum(calls) for calls in rows]
    case.equal(called, chosen, "on how many tokens each expert was called")
    kept = case.call(parts["drop_over_capacity"], experts, N_EXPERTS, max(chosen))
    text = "With room for the most popular expert, some are dropped."
    case.true(bool(kept.all()), text)
    p = torch.softmax(logits, -1)
    loss = case.call_in_place(parts["load_balancing_loss"], p, experts, N_EXPERTS)
    expected = slow_balance(p.detach().double(), ids, N_EXPERTS)
    case.close(loss, expected, "the balancing loss")
    case.has_graph(loss)
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
        out = case.call(block, probe(5, 9, 10, seed=45), causal(9))
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
        sizes = config.d_model, config.d_ff, N_EXPERTS, 2
        block.feed_forward = parts["MixtureOfExperts"](*sizes)
    held = sum(p.numel() for p in model.parameters())
    total, active = case.call(parts["moe_parameters"], config, N_EXPERTS, 2)
    case.equal(total, held, "the total")
    idle = 2 * config.n_layers * 3 * config.d_model * config.d_ff
    case.equal(active, held - idle, "active")
    logits = case.call(model, probe_ids(2, 6, below=config.vocab_size, seed=47))
    case.equal(tuple(logits.shape), (2, 6, config.vocab_size), "the logits' shape")
