"""Lesson 12: routing, a mixture of experts, its balance, its capacity, its size."""

import copy
import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from utils.check.errors import Explained
from utils.check.exercise import Exercise, IntegrationCheck
from utils.check.wording import counted
from utils.exercises.forward_pass import (
    FIELDS,
    LLAMA,
    ODD,
    Sizes,
    block_shapes,
    causal,
    doubled,
    growth,
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
balancing_bias = Exercise("balancing_bias", lesson="mixture_of_experts")
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


# top_k_routing ------------------------------------------------------------------------


def routed(case, answer, logits, k, tolerance=None):
    result = case.call(answer, logits, k)
    case.is_tuple(result, 2)
    weights, experts = slow_routing(logits.double(), k)
    case.is_tensor(result[1], "the second result")
    case.equal(result[1], experts, "the tensor of expert ids")
    what = "the tensor of weights"
    case.is_tensor(result[0], what)
    low, high = (bound.item() for bound in result[0].aminmax())
    if low < -0.01 or 1.01 < high < math.inf:
        raise Explained(
            f"{what} has values from {low:.3g} to {high:.3g}: each is a share, in 0 to 1."
        )
    case.close(result[0], weights, what, like=logits, tolerance=tolerance)


@top_k_routing.requires(
    "with k of 2 and more, up to all: the ids of the k highest scores, the highest first, "
    "and softmax over these k",
    "Take one token with the scores 2, 0, 1 and k = 2. Which two experts, in which "
    "order? Their two weights sum to 1, and the third score has no say in them.",
)
def _(answer, case):
    routed(case, answer, scores(7, 5), 2)
    routed(case, answer, scores(4, 6, seed=1), 3)
    routed(case, answer, scores(3, 7, seed=2, shift=-4.0), 2)
    routed(case, answer, scores(9, 5, seed=20, step=1e-3), 2)  # they still differ
    routed(case, answer, scores(5, 4, seed=4), k=4)


@top_k_routing.requires(
    "with k = 1 the weight is the expert's probability among all experts",
    "Compare one row by hand: softmax over all its scores, then the highest share.",
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
    "scores may lie far apart: rows do not disturb each other, and within a row the order "
    "is kept",
    "What do your weights of one row take from the other rows? And choose by the scores: "
    "of their exponentials several can be 0.",
)
def _(answer, case):
    for level in ((0.0, 500.0, -500.0, 2000.0), (-900.0, 0.0, 900.0, 100.0)):
        for k in (1, 2, 5):
            logits = scores(4, 5, seed=17) + torch.tensor(level)[:, None]
            routed(case, answer, logits, k, tolerance=0.01)
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


@top_k_routing.requires("any dtype, memory layout and device work, and one row does")
def _(answer, case):
    for k in (1, 3):
        double = scores(5, 4, seed=14, dtype=torch.float64)
        routed(case, answer, double, k, tolerance=1e-6)  # many take softmax in float32
        for dtype in (torch.float16, torch.bfloat16):
            routed(case, answer, scores(5, 4, seed=14, dtype=dtype), k)
            far = scores(6, 5, seed=18, step=150.0, dtype=dtype)
            routed(case, answer, far, k, tolerance=0.01)
        case.any_device(answer, scores(5, 4), k)
    routed(case, answer, strided(scores(5, 4, seed=15)), 2)
    routed(case, answer, scores(4, 6, seed=16).T, 2)
    routed(case, answer, scores(1, 4, seed=3), 2)


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
    one, other = (next(module.experts[e].parameters()) for e in (0, 1))
    case.true(
        not torch.equal(one, other),
        "Two experts of a new module hold the same numbers: they start as copies.",
    )
    case.call(answer, d_model=4, d_ff=9, n_experts=3, k=1)


@MixtureOfExperts.requires(
    "each token gets the sum of its k experts' results by their weights; with k = 1 that "
    "weight is a probability",
    "Make one long list of tokens first. Then take one by hand: `router`, "
    "`top_k_routing`, its k experts, their results, the weights, the sum.",
)
def _(answer, case):
    for n_experts, k, seed in ((4, 1, 0), (4, 2, 1), (6, 3, 2), (3, 3, 3), (1, 1, 4)):
        module, p = filled(answer, case, n_experts, k, seed)
        case.agrees(module, oracle_for(p, k), probe(2, 6, 5, seed=1 + seed))


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
    "Which sizes do you read from the shape of x? Only the last is fixed. And does what "
    "one token gets depend on the others, as under a capacity?",
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
        "be any network.",
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


@MixtureOfExperts.requires(
    "other dtypes and devices work, and two modules keep their own weights"
)
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
    case.any_device(module, probe(2, 3, 5))


@MixtureOfExperts.requires(
    "gradients reach the input, the router and every chosen expert, with k = 1 too",
    "Which steps lie between what is named and the result, and does each have a slope? "
    "The choice has none; the router is trained through the weights.",
)
def _(answer, case):
    for k, seed in ((2, 8), (1, 9)):
        module, p = filled(answer, case, 3, k, seed)
        held = dict(module.named_parameters())
        found = {n: n if n in held else f"{n}.weight" for n in p}
        case.gradients_agree(
            lambda x, found=found, module=module, **p: functional_call(
                module, {found[n]: w for n, w in p.items()}, (x,)
            ),
            lambda x, k=k, **p: slow_mixture(x, p, k),
            **p,
            x=probe(2, 6, 5, seed=12),
        )


# load_balancing_loss ------------------------------------------------------------------


def shares(n, e, seed=0, dtype=torch.float32):
    """Probabilities `(n, e)`, uneven over the experts."""
    logits = probe(n, e, seed=seed) - 0.4 * torch.arange(e)
    return torch.softmax(logits, -1).to(dtype)


@load_balancing_loss.requires(
    "where the router is sure of one expert, it is E times that expert's share f of the "
    "N·k choices",
    "With k = 2, N tokens make 2·N choices, and f sums to 1 over the experts. P is then "
    "1 for one expert and 0 for the others.",
)
def _(answer, case):
    for n, e, k, seed in ((15, 6, 1, 1), (7, 5, 2, 2), (8, 7, 3, 7)):
        case.sizes, ids = {"N": n, "E": e, "k": k}, distinct_choices(n, e, k, seed)
        sure = [one.repeat(n, 1) for one in torch.eye(e)]
        losses = [case.call(answer, p, ids, n_experts=e) for p in sure]
        case.is_tensor(losses[0])
        if losses[0].dim():
            raise Explained(
                f"It has shape {tuple(losses[0].shape)}: a loss is one number, the sum "
                "over all experts, without dimensions."
            )
        expected = torch.stack([slow_balance(p.double(), ids, e) for p in sure])
        case.close(
            torch.stack(losses), expected, "the loss for one expert after another"
        )


@load_balancing_loss.requires(
    "otherwise it is E times the sum over experts of f·P, and can be below 1",
    "f counts where the tokens went, P averages what the router thought. Both have E "
    "numbers, and each sums to 1.",
)
def _(answer, case):
    for n, e, k, seed in ((9, 4, 1, 5), (7, 5, 2, 2), (11, 6, 3, 1)):
        ids = distinct_choices(n, e, k, seed)
        case.agrees(answer, slow_balance, shares(n, e, k), ids, e)
    split = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.0, 1.0]])
    case.agrees(answer, slow_balance, split, split.argmax(-1, keepdim=True), 2)


@load_balancing_loss.requires(
    "experts that nobody chose are counted too, the last ones included",
    "How long is the result of your counting, if the highest ids do not occur?",
)
def _(answer, case):
    for below in (1, 2, 3):
        ids = probe_ids(8, 2, below=below, seed=below)
        case.agrees(answer, slow_balance, shares(8, 6, 4), ids, 6)


@load_balancing_loss.requires(
    "its gradient flows to the probabilities",
    "A count has no slope. P has.",
)
def _(answer, case):
    ids = distinct_choices(9, 5, 2, 6)
    case.gradients_agree(answer, slow_balance, shares(9, 5, 5), ids, 5)


@load_balancing_loss.requires(
    "any dtype, memory layout and device work, and thousands of choices are counted "
    "exactly",
    "Which dtype has f, which their product with P? And in which do you count? int8 ends "
    "at 127; bfloat16 knows no 257.",
)
def _(answer, case):
    many = (probe_ids(3000, 1, below=20, seed=9) == 0).long()
    for dtype in (torch.float32, torch.bfloat16):
        case.agrees(answer, slow_balance, shares(3000, 2, 8, dtype), many, 2)
    p, ids = shares(9, 5, 7), distinct_choices(9, 5, 2, 8)
    case.any_device(answer, p, ids, 5)
    case.agrees(answer, slow_balance, strided(p), ids.T.contiguous().T, 5)
    for dtype in (torch.bfloat16, torch.float64):
        case.agrees(answer, slow_balance, p.to(dtype), ids, 5)


# drop_over_capacity -------------------------------------------------------------------


def served(case, answer, experts, n_experts, capacity):
    kept = case.call(answer, experts, n_experts=n_experts, capacity=capacity)
    what, expected = "what is served", slow_drop(experts, n_experts, capacity)
    case.is_tensor(kept, what)
    if (kept.shape, kept.dtype) == (expected.shape, torch.bool):
        for e in range(n_experts):
            chose = experts == e
            asked, n, right = (int((chose & x).sum()) for x in (chose, kept, expected))
            if n != right:
                raise Explained(
                    f"Expert {e} has {counted(capacity, 'place')} and was chosen "
                    f"{counted(asked, 'time')}. {n} of these are served, expected {right}."
                )
    case.equal(kept, expected, what)


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


@drop_over_capacity.requires(
    "queues of thousands are counted exactly",
    "In which dtype do you count? int8 ends at 127; float16 knows no 2049.",
)
def _(answer, case):
    ids = (probe_ids(2600, 1, below=20, seed=11) == 0).long()
    for capacity in (40, 127, 300, 2300):
        served(case, answer, ids, 2, capacity)


@drop_over_capacity.requires(
    "room for all, experts that nobody chose, a second call with empty queues, any memory "
    "layout and device"
)
def _(answer, case):
    ids = distinct_choices(9, 3, 2, 7)
    for capacity in (2, 2, 50):
        served(case, answer, ids, 8, capacity)
    served(case, answer, distinct_choices(1, 3, 2, 8), 3, 1)
    served(case, answer, distinct_choices(9, 4, 2, 10).T.contiguous().T, 4, 3)
    case.any_device(answer, ids, 8, 2)


@drop_over_capacity.requires("a capacity smaller than 1 is a ValueError that names it")
def _(answer, case):
    ids = distinct_choices(5, 4, 2)
    for n in (0, -3):
        because = f"with a capacity of {n}"
        case.raises(ValueError, answer, ids, 4, n, mentions=(n,), because=because)


# moe_parameters -----------------------------------------------------------------------

MIXTRAL = Sizes(32_000, 4096, 32, 32, 8, 128, 14_336, 32_768, tied=False)


def count_agrees(case, answer, c, n_experts, k):
    given, expected = copy.copy(c), slow_count(c, n_experts, k)
    with case.unrecorded():
        found = case.call(answer, given, n_experts=n_experts, k=k)
    called = case.called
    if given != c:
        case.note("config changed")
        raise Explained("It changed the `config` that it was given: work on a copy.")
    case.is_tuple(found, 2)
    for i, name in enumerate(("total", "active")):
        case.note(found[i])  # a wrong total tells its mistake whatever active is
        what = f"{name} of {counted(n_experts, 'expert')} with k = {k}"
        if not isinstance(found[i], int):
            raise Explained(
                f"{what} is of type {type(found[i]).__name__}, expected a whole number, "
                "int: `//` divides whole numbers, and a sum of ints is one."
            )
        if found[i] != expected[i]:
            why = in_parts(found[i] - expected[i], c, n_experts) or growth(
                case,
                lambda c, i=i: slow_count(c, n_experts, k)[i],
                lambda c, i=i: answer(c, n_experts, k)[i],
                c,
            )
            case.called = called
            raise Explained(f"{what} is {found[i]:,}, expected {expected[i]:,}. {why}")


def in_parts(off, c, n_experts):
    """By how many of which part of the model a count is off; nothing if by no part."""
    for name, size in {
        "the embedding": c.vocab_size * c.d_model,
        "one block's attention": 2 * c.d_model * c.d_head * (c.n_heads + c.n_kv_heads),
        "one expert": 3 * c.d_model * c.d_ff,
        "one matrix of an expert": c.d_model * c.d_ff,
        "one router": c.d_model * n_experts,
        "d_model": c.d_model,
    }.items():
        n, rest = divmod(abs(off), size)
        if rest == 0 and n <= c.n_layers * n_experts:
            each, rest = divmod(n, c.n_layers)
            blocks = f", {each} for each block" if rest == 0 else ""
            side = "large" if off > 0 else "small"
            return f"It is too {side} by {n} × {name} ({size:,} numbers){blocks}."
    return ""


@moe_parameters.requires(
    "with one expert it is the decoder of lesson 08 and a router in each block",
    "Your `count_parameters` counts one feed-forward network in each block. What comes "
    "on top?",
)
def _(answer, case):
    count_agrees(case, answer, ODD, 1, 1)


@moe_parameters.requires(
    "total counts every expert of every block, active the k that a token goes to",
    "How many numbers has one `SwiGLU`? How many experts are there in the whole model?",
)
def _(answer, case):
    for n_experts, k in ((8, 2), (7, 1), (4, 4)):
        for c in (ODD, replace(ODD, n_layers=4, tied=True)):
            count_agrees(case, answer, c, n_experts, k)


class NothingHuge(TorchFunctionMode):
    """Stops whoever builds a model to count it, before the memory is full."""

    def __torch_function__(self, f, types, args=(), kwargs=None):
        made = f(*args, **kwargs or {})
        huge = torch.is_tensor(made) and made.numel() > 10_000_000
        if huge and made.device.type != "meta":
            raise Explained(
                f"It creates a tensor of {made.numel():,} numbers in order to count "
                "them: compute the sizes from `config`, without building the model."
            )
        return made


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


for exercise, before in (
    (top_k_routing, lambda n: [scores(3, n)]),
    (MixtureOfExperts, lambda n: [5, 7, n]),
    (moe_parameters, lambda n: [copy.copy(ODD), n]),
):

    @exercise.requires(
        "a k below 1 or above the number of experts is a ValueError that names both"
    )
    def _(answer, case, before=before):
        for n, k in ((4, 0), (4, -1), (4, 5), (13, 17)):
            because = f"with k = {k} of {n} experts"
            given = *before(n), k
            case.raises(ValueError, answer, *given, mentions=(k, n), because=because)


# balancing_bias -----------------------------------------------------------------------


def slow_bias(bias, load, rate=0.001):
    """One expert after the other, without a mean: E times its load against the sum."""
    new, total = [], sum(load.tolist())
    for b, n in zip(bias, load.tolist(), strict=True):
        step = (n * len(load) < total) - (n * len(load) > total)
        new.append(b + step * rate)
    return torch.stack(new)


@balancing_bias.requires(
    "an expert chosen less often than the mean rises by `rate`, one chosen more falls, "
    "and one at the mean stays",
    "Start all biases at 0 and write down, for the loads 1, 3 and 8, what each becomes.",
)
def _(answer, case):
    zeros = torch.zeros(5)
    case.agrees(answer, slow_bias, zeros, torch.tensor([0, 9, 2, 4, 5]), 0.5)
    case.agrees(answer, slow_bias, zeros, torch.tensor([7, 1, 1, 1, 1]), 0.25)
    case.agrees(answer, slow_bias, torch.zeros(4), torch.tensor([6, 6, 6, 6]), 0.5)


@balancing_bias.requires(
    "the step is added to the bias that was given, and is as long however far the load is "
    "from the mean",
    "Of the difference to the mean only the sign counts. And what do 300 steps add up to?",
)
def _(answer, case):
    load = torch.tensor([900, 100, 99, 101, 0, 0])
    case.agrees(answer, slow_bias, probe(6, seed=3), load, 0.125)
    case.agrees(answer, slow_bias, probe(6, seed=4, scale=5), load.flip(0), 0.01)
    case.agrees(answer, slow_bias, probe(6, seed=5, scale=0.01), load)


@balancing_bias.requires("shares, any dtype and any device work, and names")
def _(answer, case):
    share = torch.tensor([0.5, 0.125, 0.25, 0.125])
    named = {"bias": probe(4, seed=6), "load": share, "rate": 0.25}
    case.agrees(answer, slow_bias, **named)
    for dtype in (torch.float64, torch.bfloat16):
        case.agrees(answer, slow_bias, probe(4, seed=7, dtype=dtype), share, 0.25)
    case.any_device(answer, probe(4), torch.tensor([1, 2, 3, 9]))


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


@block_with_experts.requires(
    "`top_k_routing` on the router's scores chooses as the experts were called, and the "
    "balancing loss reaches the router",
    "Does `MixtureOfExperts` call `top_k_routing` with its router's scores, or does it "
    "choose in another way?",
)
def _(parts, case):
    block, rest, mine = block_of(parts, case, 2, seed=1)
    x, rows = probe(3, 7, 10, seed=44), rows_given(block.feed_forward)
    case.call(block, x, causal(7))
    _, given = true_block(x, rest, mine, 2, causal(7))
    router = block.feed_forward.router
    logits = router(given.float().flatten(0, -2))
    weights, experts = case.call(parts["top_k_routing"], logits.detach(), 2)
    right_weights, ids = slow_routing(logits.detach().double(), 2)
    case.equal(experts, ids, "the experts")
    case.close(weights, right_weights, "the weights")
    chosen = torch.bincount(ids.flatten(), minlength=N_EXPERTS).tolist()
    called = [sum(calls) for calls in rows]
    case.equal(called, chosen, "on how many tokens each expert was called")
    kept = case.call(parts["drop_over_capacity"], experts, N_EXPERTS, max(chosen))
    case.true(
        bool(kept.all()), "With room for the most popular expert, some are dropped."
    )
    p = torch.softmax(logits, -1)
    loss = case.call_in_place(parts["load_balancing_loss"], p, experts, N_EXPERTS)
    expected = slow_balance(p.detach().double(), ids, N_EXPERTS)
    case.close(loss, expected, "the balancing loss")
    case.has_graph(loss)
    loss.backward()
    reached = router.weight.grad is not None and bool(router.weight.grad.any())
    case.true(reached, "The balancing loss gives the router no gradient.")


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
                or (p.grad is not None and bool(p.grad.any())),
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
    idle = 2 * config.n_layers * 3 * config.d_model * config.d_ff
    counts = case.call(parts["moe_parameters"], config, N_EXPERTS, 2)
    case.equal(tuple(counts), (held, held - idle), "(total, active)")
    logits = case.call(model, probe_ids(2, 6, below=config.vocab_size, seed=47))
    case.equal(tuple(logits.shape), (2, 6, config.vocab_size), "the logits' shape")
