"""Lesson 09: the loss, batches, the learning rate, AdamW, clipping."""

import copy
import math
import numbers
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from utils.check.errors import Crashed, Explained, Unmet
from utils.check.exercise import Exercise, IntegrationCheck
from utils.check.recording import raised
from utils.probe import probe, probe_ids, strided

cross_entropy = Exercise("cross_entropy", lesson="training")
get_batch = Exercise("get_batch", lesson="training")
learning_rate = Exercise("learning_rate", lesson="training")
AdamW = Exercise("AdamW", lesson="training")
clip_gradients = Exercise("clip_gradients", lesson="training")


# The loss -----------------------------------------------------------------------------


def torch_loss(logits, targets):
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def scores(*shape, seed=0, dtype=torch.float32, **size):
    """Logits of this shape, and targets."""
    targets = probe_ids(*shape[:-1], below=shape[-1], seed=seed + 1)
    return probe(*shape, seed=seed, dtype=dtype, **size), targets


def is_loss(case, loss, expected, because):
    """One number, the expected one; `because` says where that comes from."""
    case.is_tensor(loss, "the loss")
    if loss.shape:
        raise Explained(f"The loss has shape {tuple(loss.shape)}; it is one number.")
    if not math.isclose(loss, expected, rel_tol=1e-5, abs_tol=1e-6):
        compared = loss, torch.tensor(expected)
        raise Explained(f"{because} {expected:.4f}; yours is {loss:.4f}.", compared)


@cross_entropy.requires(
    "it is minus the log of the right token's probability, the mean over all targets"
)
def _(answer, case):
    odds = torch.tensor([[1.0, 5.0, 2.0, 8.0]])
    losses = [case.call(answer, odds.log(), torch.tensor([i])) for i in range(4)]
    for n, loss in zip(odds[0].tolist(), losses, strict=True):
        given = "Logits log 1, log 5, log 2, log 8 make probabilities in 16ths, and the"
        because = f"{given} token of {n:g}/16 has the loss"
        is_loss(case, loss, math.log(16 / n), because)
    for shape in ((4, 7), (2, 3, 5), (3, 3, 3), (2, 3, 4, 6), (1, 6, 11)):
        logits, targets = scores(*shape, seed=sum(shape))
        for wanted in (targets, torch.zeros_like(targets)):
            loss = case.call(answer, logits, wanted)
            mean = torch_loss(logits.double(), wanted).item()
            n = wanted.numel()
            because = f"The {n} losses have the sum {n * mean:.4f} and the mean"
            is_loss(case, loss, mean, because)


@cross_entropy.requires(
    "logits of any size give no overflow, a hopeless token no infinite loss, and a logit "
    "of −inf is a token that cannot come",
    "Lesson 00 made exp safe by subtracting something. The logarithm of a probability "
    "can be written without ever forming the probability, which may round to 0.",
)
def _(answer, case):
    for shift in (1000, -1000):
        case.agrees(answer, torch_loss, *scores(4, 7, scale=3, shift=shift))
    logits, targets = scores(2, 3, 5, seed=9)
    sure = logits.scatter(-1, targets[..., None], 500.0)
    case.agrees(answer, torch_loss, sure, targets)
    hidden = logits.scatter(-1, (targets + 1)[..., None] % 5, -torch.inf)
    case.agrees(answer, torch_loss, hidden, targets)
    case.agrees(answer, torch_loss, *scores(2, 3, 7, seed=5, scale=400))
    logits, targets = scores(3, 2, 7, seed=7)
    apart = torch.tensor([-2000.0, 0.0, 3000.0])[:, None, None]
    case.agrees(answer, torch_loss, logits + apart, targets)
    case.agrees(answer, torch_loss, 30 * logits.abs() - 25, targets)


@cross_entropy.requires(
    "its gradient is the softmax minus 1 at the target, over the number of targets",
    "The whole expression must stay in the graph; only what is subtracted for safety "
    "may be cut from it.",
)
def _(answer, case):
    case.gradients_agree(answer, torch_loss, *scores(2, 3, 5, seed=13))
    case.gradients_agree(answer, torch_loss, *scores(4, 7, seed=14, scale=300))


@cross_entropy.requires(
    "targets that do not fit the logits are a ValueError that names both shapes",
    "`gather` and broadcasting accept some shapes that do not fit, without a word. "
    "Compare the shapes first.",
)
def _(answer, case):
    logits, targets = scores(2, 6, 5, seed=15)
    turned, flat = targets.T, targets.flatten()  # as many, in another shape
    for wrong in (turned, flat, targets[:, :4], targets[:1], targets[0]):
        size = tuple(wrong.shape)
        because = f"logits (2, 6, 5) and targets {size} do not fit"
        given = dict(mentions=(size[-1], 5), because=because)
        case.raises(ValueError, answer, logits, wrong, **given)


@cross_entropy.requires("other dtypes, strides and devices work too")
def _(answer, case):
    for kind in (torch.float64, torch.float16, torch.bfloat16):
        case.agrees(answer, torch_loss, *scores(2, 5, 7, seed=11, scale=2, dtype=kind))
    logits, targets = scores(3, 4, 5, seed=12)
    case.agrees(answer, torch_loss, strided(logits), targets)
    turned = logits.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    case.agrees(answer, torch_loss, turned, targets.T.contiguous().T)
    case.any_device(answer, *scores(2, 3, 5))


# Batches ------------------------------------------------------------------------------


def text(n, dtype=torch.int64, first=3):
    """n different tokens in mixed order."""
    step = next(k for k in (7, 11, 13, 17) if math.gcd(k, n) == 1)
    return (torch.arange(n) * step % n + first).to(dtype)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def places(data, tokens):
    """Where in `data`, all tokens of which are different, `tokens` stand."""
    found = tokens[..., None].long() == data.long()
    if not found.any(-1).all():
        raise Unmet("There are tokens in the batch that are not in the text.")
    return found.int().argmax(-1)


def batch(case, answer, data, batch_size, t, generator=None):
    """The inputs' and the targets' places in the text; what was drawn is not recorded."""
    given = {} if generator is None else {"generator": generator}
    try:
        with case.unrecorded():
            result = case.call(answer, data, batch_size, t, **given)
    except Crashed as crash:
        case.note(raised(crash.error))
        raise
    case.is_tuple(result, 2, "the result (inputs, targets)")
    wanted = (batch_size, t), data.dtype
    for name, each in zip(("inputs", "targets"), result, strict=True):
        case.is_tensor(each, f"`{name}`")
        size = tuple(each.shape), each.dtype
        case.note(str(size))
        if size != wanted:
            raise Explained(f"`{name}`: {size[0]}, {size[1]}; expected {wanted}.")
    inputs, targets = (places(data, each) for each in result)
    steps, ahead = inputs - inputs[:, :1], (targets - inputs).unique().tolist()
    row = torch.arange(t).repeat(batch_size, 1)
    case.note((torch.equal(steps, row), tuple(ahead)))
    if not torch.equal(steps, row):
        i = int((steps != row).any(1).nonzero()[0])
        stand = f"stand at the places {inputs[i].tolist()} of the text"
        raise Explained(f"The inputs of row {i} {stand}: that is no piece of it.")
    if ahead != [1]:
        seen = f"Places in the text from an input to its target: {ahead}"
        raise Explained(f"{seen}, expected 1: the target is the token that comes next.")
    return inputs[:, 0]


@get_batch.requires(
    "inputs and targets are pieces of the text, (B, T), the targets one token further on",
    "What should the model say after it has read `inputs[b, i]`? Cut T + 1 tokens for "
    "each row; inputs and targets are two views of them.",
)
def _(answer, case):
    for n, rows, t in ((50, 4, 6), (60, 5, 5), (31, 7, 25), (50, 1, 3), (50, 5, 1)):
        batch(case, answer, text(n), rows, t, seeded(n))


@get_batch.requires(
    "a text of T + 1 tokens has one piece, a shorter one is a ValueError",
    "How many places are there for the first of T + 1 tokens? Name the two lengths in "
    "the error: that of the text, and T + 1.",
)
def _(answer, case):
    starts = batch(case, answer, text(6), 3, 5, seeded())
    case.equal(starts, torch.zeros_like(starts), "the starts in a text of T + 1 tokens")
    for n, t in ((8, 8), (3, 11)):
        because = f"a text of {n} tokens has no piece of {t} with a token after it"
        given = dict(mentions=(n, t + 1), because=because)
        case.raises(ValueError, answer, text(n), 2, t, **given)


@get_batch.requires(
    "every start is as likely as any other, the first and the last one too, and the rows "
    "are drawn independently",
    "A piece needs T + 1 tokens. Count the starts of a short text on paper, and look up "
    "whether the function that you draw with includes its upper end.",
)
def _(answer, case):
    starts = batch(case, answer, text(9), 2000, 4, seeded(4))
    counts = starts.bincount(minlength=5).tolist()
    case.note(tuple(k for k in range(5) if not counts[k]))
    case.true(
        all(310 < n < 490 for n in counts),
        f"2000 pieces of 4 from 9 tokens started at 0, 1, 2, 3, 4 this often: {counts}. "
        "All five should be about equally frequent.",
    )
    pairs = (5 * starts[:-1] + starts[1:]).bincount(minlength=25)
    case.true(
        bool((pairs > 35).all() and (pairs < 135).all()),
        "Where a row starts depends on where the row before it starts: draw one number "
        "for each row.",
    )


@get_batch.requires(
    "the generator decides what is drawn, and without one `torch.manual_seed`",
    "Hand `generator` on to the function that draws, and set no seed.",
)
def _(answer, case):
    def starts(generator=None):
        return batch(case, answer, text(500), 8, 3, generator)

    one = seeded(6)
    torch.manual_seed(1)
    first, second = starts(one), starts(one)
    untouched = torch.rand(3)
    torch.manual_seed(1)
    kept = torch.equal(untouched, torch.rand(3))
    torch.manual_seed(2)
    again, different = starts(seeded(6)), starts(seeded(7))
    torch.manual_seed(3)
    third, fourth = starts(), starts()
    torch.manual_seed(3)
    fifth = starts()
    same = "A second call gives the first batch again: training would see one for ever."
    conditions = (
        (torch.equal(first, again), "Two generators of one seed give two batches."),
        (not torch.equal(first, second), same),
        (not torch.equal(first, different), "Two seeds give the same batch."),
        (kept, "With a generator given, the global random state changed all the same."),
        (torch.equal(third, fifth), "`torch.manual_seed` decides nothing."),
        (not torch.equal(third, fourth), same),
    )
    case.note(tuple(condition for condition, _ in conditions))
    for condition, otherwise in conditions:
        case.true(condition, otherwise)


@get_batch.requires("other dtypes, strides and devices work too")
def _(answer, case):
    for kind in (torch.int32, torch.uint8):
        batch(case, answer, text(50, kind), 4, 6, seeded(8))
    data = torch.stack([text(50), text(50)], dim=1)[:, 1]
    batch(case, answer, data, 4, 6, seeded(9))
    case.any_device(answer, text(50), 4, 6)


# The learning rate --------------------------------------------------------------------


def slow_rate(step, peak, floor, warmup_steps, total_steps):
    """By the half-angle formula, beside the usual one with 1 + cos."""
    if step < warmup_steps:
        return peak * step / warmup_steps
    part = min((step - warmup_steps) / (total_steps - warmup_steps), 1)
    up = math.cos(math.pi / 2 * part) ** 2
    return up * peak + (1 - up) * floor


def rates_agree(case, answer, steps, peak, floor, warmup_steps, total_steps):
    """The rates at these steps, told by how far up they are."""
    settings = peak, floor, warmup_steps, total_steps
    rates = [case.call(answer, step, *settings) for step in steps]
    for step, rate in zip(steps, rates, strict=True):
        if not isinstance(rate, numbers.Real):
            kind = type(rate).__name__
            raise Explained(f"The rate is of type {kind}; return a float.")
        right = slow_rate(step, *settings)
        if abs(rate - right) <= 1e-9 * peak:
            continue
        lowest, low, where = 0.0, "0", f"{step} of {warmup_steps} steps of warm-up"
        if step >= warmup_steps:
            done = (step - warmup_steps) / (total_steps - warmup_steps)
            lowest, low, where = floor, "the floor", f"{done:.3g} of the fall behind it"
        up, yours = ((r - lowest) / (peak - lowest) for r in (right, rate))
        with case.unrecorded():  # so that it is the call that is shown
            case.call(answer, step, *settings)
        raise Explained(
            f"Step {step} has {where}: the rate should be {right:.4g}, {up:.3g} of the "
            f"way from {low} to the peak; yours is {rate:.4g}, {yours:.3g} of the way."
        )


@learning_rate.requires(
    "it rises in a straight line from 0 and reaches the peak at step warmup_steps"
)
def _(answer, case):
    rates_agree(case, answer, (2, 4, 0, 1, 3), 3e-3, 2e-4, 4, 20)
    rates_agree(case, answer, (50, *range(101)), 0.5, 0.1, 100, 1000)


@learning_rate.requires("from there it falls along half a cosine")
def _(answer, case):
    rates_agree(case, answer, (12, 8, 16, *range(4, 20)), 3e-3, 2e-4, 4, 20)
    rates_agree(case, answer, range(10, 110), 0.5, 0.1, 10, 110)


@learning_rate.requires("at step total_steps it is the floor, and stays there")
def _(answer, case):
    rates_agree(case, answer, (20, 21, 36, 52, 10_000), 3e-3, 2e-4, 4, 20)
    rates_agree(case, answer, range(15), 0.2, 0.0, 3, 12)


@learning_rate.requires(
    "without warm-up it starts at the peak",
    "Nothing may be divided by `warmup_steps` when it is 0.",
)
def _(answer, case):
    rates_agree(case, answer, range(26), 1e-2, 1e-3, 0, 10)


# AdamW --------------------------------------------------------------------------------

PLAIN = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.0}
DECAYS = PLAIN | {"weight_decay": 0.5}
SHAPES = ((3, 4), (5,), (2, 3, 2))
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 0.1}


def torch_adamw(parameters, **options):
    return torch.optim.AdamW(parameters, foreach=False, **options)


def moves(build, gradients, **options):
    """By how much each step moves a number that starts at 2."""
    p = nn.Parameter(torch.tensor([[2.0]]))
    optimizer, path = build([p], **options), [2.0]
    for gradient in gradients:
        p.grad = torch.tensor([[gradient]])
        optimizer.step()
        path.append(p.item())
    return torch.tensor(path).diff()


def by_hand(case, answer, why, gradients, n=None, **options):
    """Steps of one number, with options that leave one part of the formula.

    n: how many are compared; the others only tell one mistake from another.
    """
    options = PLAIN | options

    def take_steps(gradients, **options):
        return moves(answer, gradients, **options)

    found = case.call_in_place(take_steps, gradients, **options)[:n]
    truth = moves(torch_adamw, gradients[:n], **options)
    if not torch.allclose(found, truth, rtol=1e-4, atol=1e-6):
        given = ", ".join(f"{g:g}" for g in gradients[:n])
        right, yours = (
            ", ".join(f"{x:+.4f}" for x in each.tolist()) for each in (truth, found)
        )
        raise Explained(
            f"{why}: with gradients {given} a number of 2 should move by {right}; "
            f"yours moves by {yours}.",
            (found, truth),
        )


def parameters_of(shapes=SHAPES, seed=0, kind=torch.float32, layout=torch.clone):
    given = [probe(*s, seed=seed + i, dtype=kind) for i, s in enumerate(shapes)]
    return [nn.Parameter(layout(each)) for each in given]


def values(parameters):
    return tuple(p.detach().clone() for p in parameters)


def take_step(optimizer, parameters, step, scale=1.0, without=()):
    """An update by gradients that depend on the step, growing and turning."""
    for i, p in enumerate(parameters):
        given = dict(seed=100 + 10 * step + i, scale=scale * (1 + step) / 2)
        p.grad = None if i in without else probe(*p.shape, **given, dtype=p.dtype)
    optimizer.step()


def updated(build, steps, scale=1.0, without=(), given=None, **options):
    """How much parameters of several shapes change; some may lack gradients."""
    parameters = parameters_of(**given or {})
    optimizer, before = build(parameters, **options), values(parameters)
    for step in range(steps):
        missing = without[step] if without else ()
        take_step(optimizer, parameters, step, scale, missing)
    return tuple(p - old for p, old in zip(values(parameters), before, strict=True))


def by_groups(build, steps):
    """Groups with options of their own, under a schedule."""
    first, second, third = parameters = parameters_of(seed=96)
    groups = [
        {"params": [first], "weight_decay": 0.9, "lr": 0.3},
        {"params": [second, third], "betas": (0.5, 0.7), "eps": 0.2},
    ]
    optimizer = build(groups, **PLAIN)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / (step + 1)
        take_step(optimizer, parameters, step)
    return values(parameters)


def stopped_and_resumed(build, steps):
    """One optimizer goes on from the state of another, which goes on too."""
    parameters = parameters_of(seed=105)
    optimizer = build(parameters, **DECAYS)
    for step in range(steps):
        take_step(optimizer, parameters, step)
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    resumed = build(copies, lr=7.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(steps, 2 * steps):
        take_step(resumed, copies, step)
        take_step(optimizer, parameters, step + 3)
    return values([*copies, *parameters])


def follows(case, answer, scenario=updated, tolerance=None, **settings):
    """The answer gives in this scenario what torch's own AdamW gives."""

    def take_steps(**settings):
        return scenario(answer, **settings)

    found = case.call_in_place(take_steps, **settings)
    truth = scenario(torch_adamw, **settings)
    change = "the change of " if scenario is updated else ""
    for i, (actual, expected) in enumerate(zip(found, truth, strict=True)):
        allowed = tolerance or TOLERANCES[expected.dtype]
        what = f"{change}parameter {i}"
        case.close(actual, expected, what, like=expected, tolerance=allowed)


@AdamW.requires(
    "the first step moves each number against its gradient g, by lr · |g| / (|g| + eps)"
)
def _(answer, case):
    why = "At step 1 the corrected means are the gradient itself and its square"
    by_hand(case, answer, why, (3.0, 1.0, -2.0), n=1)
    why = "With betas (0, 0) and eps 2 a step is lr · g / (|g| + 2)"
    by_hand(case, answer, why, (3.0, -0.5), betas=(0.0, 0.0), eps=2.0)
    follows(case, answer, steps=1, **PLAIN | {"eps": 0.3})


@AdamW.requires(
    "later steps use running means of the gradient and of its square, each corrected "
    "before eps is added",
    "Both means start at 0 and are therefore too small at first. What is the sum of the "
    "weights that the gradients have in them after n steps?",
)
def _(answer, case):
    why = "With betas (0.5, 0) the corrected mean is divided by the newest |g|"
    by_hand(case, answer, why, (1.0, 3.0, -2.0), betas=(0.5, 0.0))
    why = "With betas (0, 0.5) the newest g is divided by the corrected square's root"
    by_hand(case, answer, why, (1.0, 3.0, -2.0), betas=(0.0, 0.5))
    by_hand(case, answer, "With betas (0.8, 0.95)", (1.0, 3.0, -2.0))
    why = "eps is added to the root of the corrected square"
    by_hand(case, answer, why, (1.0, 3.0), eps=2.0)
    follows(case, answer, steps=7, **PLAIN)
    follows(case, answer, steps=4, scale=1e-6, **PLAIN | {"eps": 1e-5})


@AdamW.requires(
    "weight decay takes lr · weight_decay of the old parameter, beside Adam's step",
    "Decoupled: the decay does not enter the two means.",
)
def _(answer, case):
    why = "With gradients of 0 there is the decay alone, of lr · weight_decay = 0.05"
    by_hand(case, answer, why, (0.0, 0.0), weight_decay=0.5)
    why = "The decay, 0.05 of the number before the step, is added to Adam's step"
    by_hand(case, answer, why, (3.0, -0.5), betas=(0.0, 0.0), weight_decay=0.5)
    follows(case, answer, steps=6, **PLAIN | {"lr": 0.3, "weight_decay": 0.7})


@AdamW.requires(
    "without options it does what torch's does without options",
    "Compare the defaults of lr, betas, eps and weight_decay with those asked for.",
)
def _(answer, case):
    for scale in (1.0, 1e-6):  # beside gradients of 1e-6 the default eps shows
        follows(case, answer, steps=3, scale=scale, tolerance=2e-6)


@AdamW.requires(
    "each group has its own options, and they are read anew at every step",
    "`self.param_groups` is a list of dicts; a schedule writes a new `lr` into them "
    "between two steps.",
)
def _(answer, case):
    follows(case, answer, steps=3, scenario=by_groups)


@AdamW.requires(
    "a parameter without a gradient stays as it is, and counts its own steps",
    "A layer that was not used has `grad` None: no decay either, and its first gradient "
    "is its step 1.",
)
def _(answer, case):
    for without in ([(1,), (1,), (), (0,), ()], [(1,)]):
        follows(case, answer, steps=len(without), without=without, **DECAYS)


@AdamW.requires(
    "parameters change in place, gradients do not, and no graph is kept",
    "The model holds the very tensors that the optimizer was given. Write into them, "
    "under `torch.no_grad()`.",
)
def _(answer, case):
    def take_steps(steps):
        parameters = parameters_of()
        optimizer, kept = answer(parameters, **DECAYS), []
        memory = [p.data_ptr() for p in parameters]
        for step in range(steps):
            take_step(optimizer, parameters, step)
            after = [p.grad for p in parameters]
            take_step(SimpleNamespace(step=int), parameters, step)  # the same gradients
            kept += map(same_tensors, after, [p.grad for p in parameters])
        states = [v for s in optimizer.state.values() for v in s.values()]
        tracked = [v for v in states if getattr(v, "requires_grad", False)]
        tracked += [p for p in parameters if p.grad_fn or not p.requires_grad]
        return all(kept), memory == [p.data_ptr() for p in parameters], not tracked

    gradients, same, untracked = case.call_in_place(take_steps, steps=2)
    case.true(gradients, "The gradients were changed. Others may still read them.")
    case.true(same, "The parameters moved to new memory instead of changing in place.")
    case.true(
        untracked, "A graph or its gradient hangs on the parameters or the state."
    )


def same_tensors(one, other):
    return one is not None and torch.equal(one, other)


@AdamW.requires(
    "state_dict() holds all that the next step needs, and nothing of another optimizer",
    "What you keep between steps belongs into `self.state[p]`. Training is interrupted "
    "and goes on from a file; what is kept elsewhere is lost.",
)
def _(answer, case):
    follows(case, answer, steps=3, scenario=stopped_and_resumed)


@AdamW.requires(
    "float64 and bfloat16, gradients of any layout, and any device work",
    "`torch.zeros_like(p)` has the dtype, the layout and the device of p; "
    "`torch.zeros(p.shape)` has its own.",
)
def _(answer, case):
    follows(case, answer, steps=4, given=dict(kind=torch.float64), **DECAYS)
    follows(case, answer, steps=3, given=dict(kind=torch.bfloat16), **PLAIN)
    follows(case, answer, steps=2, given=dict(layout=strided), **PLAIN)

    def take_a_step(p, gradient):
        p = nn.Parameter(p)
        p.grad = gradient
        optimizer = answer([p], **PLAIN)
        optimizer.step()
        # Writing into a tensor on the CPU is let through here, and is not on a GPU.
        kept = [v for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
        elsewhere = [v for v in kept if v.ndim and v.device != p.device]
        return elsewhere[0] if elsewhere else p.detach()

    case.any_device(take_a_step, probe(3, 4), probe(3, 4, seed=1))


# Clipping -----------------------------------------------------------------------------


def with_gradients(seed=0, scale=1.0, kind=torch.float32, without=(), turned=False):
    parameters = parameters_of(((3, 4), (7,), (2, 5), (6,)), seed=seed, kind=kind)
    for i, p in enumerate(parameters):
        given = dict(seed=seed + 50 + i, scale=scale * (i + 1), dtype=kind)
        gradient = probe(*p.shape, **given)
        if turned and p.ndim > 1:
            gradient = gradient.T.contiguous().T
        p.grad = None if i in without else gradient
    return parameters


def clips(case, answer, share, handed=list, relative=None, **given):
    """Clip to `share` of the length, and compare with one long vector, rescaled."""
    parameters = with_gradients(**given)
    old, gradients = values(parameters), [p.grad for p in parameters]
    before = [None if g is None else g.double().clone() for g in gradients]
    length = math.sqrt(sum(float(g.square().sum()) for g in before if g is not None))
    max_norm = share * length or 1.0

    def clip(max_norm):
        return answer(handed(parameters), max_norm)

    total = case.call_in_place(clip, max_norm=max_norm)
    case.note(tuple(p.grad for p in parameters))
    factor = min(1.0, max_norm / (length or 1.0))
    for i, (p, g) in enumerate(zip(parameters, before, strict=True)):
        if g is None:
            none = p.grad is None
            case.true(none, f"Parameter {i} had no gradient, and has one now.")
            continue
        what = f"the gradient of parameter {i} (length {length:.3g}, {max_norm=:.3g})"
        loose = (relative or 1e-5) * float(g.abs().max()) * factor
        case.close(p.grad, factor * g, what, like=p, tolerance=loose)
    case.is_tensor(total, "the length, which is returned,")
    loose = (1e-2 if relative else 1e-5) * length + 1e-9
    what = "the length before, which is returned,"
    case.close(total.double(), length, what, tolerance=loose)
    if not all(p.grad is g for p, g in zip(parameters, gradients, strict=True)):
        raise Explained(
            "`p.grad` is a new tensor. It must be changed in place: others, such as "
            "`DistributedDataParallel`, hold the same memory."
        )
    case.true(
        all(map(torch.equal, values(parameters), old)),
        "The parameters themselves were changed; only their gradients are to be.",
    )


@clip_gradients.requires(
    "a long gradient gets the length max_norm and keeps its direction",
    "All gradients together are one vector. Find its length first, then multiply all of "
    "them with one factor.",
)
def _(answer, case):
    for share, scale in ((0.01, 1), (0.5, 1), (0.95, 1), (1e-4, 1e3)):
        clips(case, answer, share, scale=scale)


@clip_gradients.requires(
    "a gradient that is short enough stays as it is, and zeros stay zeros",
    "The factor is never above 1. And what is max_norm over a length of 0?",
)
def _(answer, case):
    for share, scale in ((1.05, 1), (100.0, 1), (30.0, 1e-3), (1.0, 0)):
        clips(case, answer, share, scale=scale)


@clip_gradients.requires(
    "parameters without a gradient are left out, and none at all have the length 0"
)
def _(answer, case):
    for share, without in ((0.3, (1,)), (3.0, (0, 3)), (1.0, (0, 1, 2, 3))):
        clips(case, answer, share, without=without)


@clip_gradients.requires(
    "what model.parameters() gives, which can be run through only once, will do",
    "A generator is empty after the first loop. Make a list of what you need twice.",
)
def _(answer, case):
    for share in (0.4, 4.0):
        clips(case, answer, share, handed=iter)


@clip_gradients.requires(
    "half precision, float64 and gradients of any layout work too",
    "300² is more than float16 can hold. `norm` squares in a wider format; you by hand "
    "do not.",
)
def _(answer, case):
    clips(case, answer, 0.5, kind=torch.float64)
    clips(case, answer, 0.5, turned=True)
    clips(case, answer, 0.01, kind=torch.float16, scale=120, relative=0.01)
    clips(case, answer, 0.3, kind=torch.bfloat16, relative=0.03)


# All of it together -------------------------------------------------------------------

training = IntegrationCheck(
    "training",
    lesson="training",
    parts={
        "cross_entropy": "training",
        "get_batch": "training",
        "learning_rate": "training",
        "AdamW": "training",
        "clip_gradients": "training",
        "Transformer": "forward_pass",
        "TransformerConfig": "forward_pass",
    },
)

# Each token but one decides the next; it comes from the token two back otherwise.
RHYME = torch.tensor([0, 1, 2, 3, 1, 4, 5, 1, 6, 2, 5, 3] * 12)


def small_model(parts):
    torch.manual_seed(0)
    sizes = dict(vocab_size=7, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1)
    config = parts["TransformerConfig"](**sizes, d_head=8, d_ff=24, max_len=12)
    return parts["Transformer"](config)


@training.requires("a new model's loss is about that of guessing evenly")
def _(parts, case):
    model = small_model(parts)
    inputs, targets = parts["get_batch"](RHYME, 8, 12, seeded(3))
    loss = case.call_in_place(parts["cross_entropy"], model(inputs), targets).item()
    case.true(
        abs(loss - math.log(7)) < 0.3,
        f"The loss of a new model is {loss:.2f}; guessing evenly among 7 tokens gives "
        f"{math.log(7):.2f}.",
    )


@training.requires(
    "the loss at one position depends on no later token but its own target",
    "If the targets are one step ahead and the mask hides the future, changing the last "
    "input changes only the last prediction.",
)
def _(parts, case):
    model = small_model(parts)
    inputs, targets = parts["get_batch"](RHYME, 3, 12, seeded(4))
    case.note("targets are inputs" if torch.equal(inputs, targets) else "")
    inner = targets[:, :-1].clone()
    case.equal(inputs[:, 1:].clone(), inner, "the inputs from the second on")
    changed = inputs.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 7
    with torch.no_grad():
        before, after = (
            float(parts["cross_entropy"](model(ids)[:, :-1], targets[:, :-1]))
            for ids in (inputs, changed)
        )
    case.true(
        abs(before - after) < 1e-5,
        f"The loss before the last position went from {before:.4f} to {after:.4f} when "
        "the last input changed: the model sees what it is to predict.",
    )


@training.requires(
    "a short training brings the loss of a regular text near 0",
    "All parts passed alone. Are they the ones of this notebook, or older versions?",
)
def _(parts, case):
    def train(steps):
        model, generator = small_model(parts), seeded(11)
        optimizer = parts["AdamW"](model.parameters(), lr=1.0, weight_decay=0.01)
        losses = []
        for step in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = parts["learning_rate"](step, 2e-2, 2e-3, 5, steps)
            inputs, targets = parts["get_batch"](RHYME, 8, 12, generator)
            loss = parts["cross_entropy"](model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            parts["clip_gradients"](model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return losses

    losses = case.call_in_place(train, steps=45)
    end = sum(losses[-5:]) / 5
    case.true(
        end < 0.5,
        f"After 45 steps on a text that repeats itself the loss is {end:.2f}; it began "
        f"at {losses[0]:.2f}, and below 0.5 is expected.",
    )
