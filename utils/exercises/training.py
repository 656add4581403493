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


@cross_entropy.requires(
    "it is minus the log of the right token's probability, the mean over all targets",
    "The probability is the softmax of the row. Take its logarithm on paper first: what "
    "is left of the exponential above, and of the sum below? Then every target counts "
    "once: compare the shape of your losses with that of `targets`.",
)
def _(answer, case):
    logits, targets = scores(9, 5)
    losses = [
        case.call(answer, logits[i : i + 1], targets[i : i + 1]) for i in range(9)
    ]
    for loss in losses:
        case.is_tensor(loss, "the loss")
        case.equal(tuple(loss.shape), (), "the shape of the loss of one row")
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    case.close(
        torch.stack(losses), expected, "the losses of 9 single rows", like=logits
    )
    for shape in ((4, 7), (2, 3, 5), (3, 3, 3), (2, 3, 4, 6), (1, 6, 11)):
        case.agrees(answer, torch_loss, *scores(*shape, seed=sum(shape)))
    logits, targets = scores(2, 3, 5, seed=8)
    case.agrees(answer, torch_loss, logits, torch.zeros_like(targets))


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
    steps, ahead = inputs - inputs[:, :1], targets - inputs
    row = torch.arange(t).repeat(batch_size, 1)
    case.note((torch.equal(steps, row), tuple(ahead.unique().tolist())))
    what = "the places of a row's inputs in the text, less the first one,"
    case.equal(steps, row, what)
    what = "the distance from each input to its target"
    case.equal(ahead, torch.ones_like(ahead), what)
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
    missing = [k for k in range(5) if not counts[k]]
    case.note(tuple(missing))
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


def rates_agree(case, answer, last, *settings, first=0):
    """The rates at the steps from `first` to `last`."""
    found, steps = [], range(first, last + 1)
    for step in steps:
        found.append(case.call(answer, step, *settings))
        if not isinstance(found[-1], numbers.Real):
            kind = type(found[-1]).__name__
            raise Explained(f"The rate is of type {kind}; return a float.")
    expected = [slow_rate(step, *settings) for step in steps]
    found, expected = (torch.tensor(r, dtype=torch.float64) for r in (found, expected))
    what = f"the rates at the steps from {first} to {last}"
    case.close(found, expected, what, tolerance=1e-9 * settings[0])


@learning_rate.requires(
    "it rises in a straight line from 0 and reaches the peak at step warmup_steps",
    "Which part of the way has step 1 behind it, if the whole way has `warmup_steps`?",
)
def _(answer, case):
    rates_agree(case, answer, 4, 3e-3, 2e-4, 4, 20)
    rates_agree(case, answer, 99, 0.5, 0.1, 100, 1000)


@learning_rate.requires(
    "from there it falls along half a cosine",
    "First find the part of the fall that lies behind: 0 at step `warmup_steps`, 1 at "
    "step `total_steps`. The cosine of π times it goes from 1 to −1; you need something "
    "that goes from 1 to 0.",
)
def _(answer, case):
    rates_agree(case, answer, 19, 3e-3, 2e-4, 4, 20)
    rates_agree(case, answer, 109, 0.5, 0.1, 10, 110)


@learning_rate.requires(
    "at step total_steps it is the floor, and stays there",
    "A cosine goes up again after its lowest point.",
)
def _(answer, case):
    rates_agree(case, answer, 60, 3e-3, 2e-4, 4, 20)
    for floor in (0.0, 0.2):
        rates_agree(case, answer, 14, 0.2, floor, 3, 12)
    rates_agree(case, answer, 10_000, 3e-3, 2e-4, 4, 20, first=10_000)


@learning_rate.requires(
    "without warm-up it starts at the peak",
    "Nothing may be divided by `warmup_steps` when it is 0.",
)
def _(answer, case):
    rates_agree(case, answer, 25, 1e-2, 1e-3, 0, 10)


# AdamW --------------------------------------------------------------------------------

PLAIN = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.0}
DECAYS = PLAIN | {"weight_decay": 0.5}
SHAPES = ((3, 4), (5,), (2, 3, 2))
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 0.1}


def torch_adamw(parameters, **options):
    return torch.optim.AdamW(parameters, foreach=False, **options)


def parameters_of(shapes=SHAPES, seed=0, kind=torch.float32):
    given = [probe(*s, seed=seed + i, dtype=kind) for i, s in enumerate(shapes)]
    return [nn.Parameter(each) for each in given]


def values(parameters):
    return tuple(p.detach().clone() for p in parameters)


def take_step(optimizer, parameters, step, scale=1.0, without=()):
    """An update by gradients that depend on the step, growing and turning."""
    for i, p in enumerate(parameters):
        given = dict(seed=100 + 10 * step + i, scale=scale * (1 + step) / 2)
        p.grad = None if i in without else probe(*p.shape, **given, dtype=p.dtype)
    optimizer.step()


def updated(build, steps, seed=0, kind=torch.float32, scale=1.0, **options):
    """How much parameters of several shapes change in some updates."""
    parameters = parameters_of(seed=seed, kind=kind)
    optimizer, before = build(parameters, **options), values(parameters)
    for step in range(steps):
        take_step(optimizer, parameters, step, scale)
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


def with_some_missing(build, without):
    """At each step some parameters have no gradient."""
    parameters = parameters_of(seed=97)
    optimizer = build(parameters, **DECAYS)
    for step, left_out in enumerate(without):
        take_step(optimizer, parameters, step, without=left_out)
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


def strided_update(build, steps):
    p = nn.Parameter(strided(probe(3, 4)))
    optimizer = build([p], **PLAIN)
    for step in range(steps):
        p.grad = probe(4, 3, seed=step).T
        optimizer.step()
    return values([p])


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
    "the first step moves each number against its gradient g, by lr · |g| / (|g| + eps)",
    "After one step the corrected mean is the gradient itself, and the corrected mean "
    "square its square. eps is added to the root, outside of it.",
)
def _(answer, case):
    follows(case, answer, steps=1, **PLAIN | {"eps": 0.3})
    follows(case, answer, steps=1, **PLAIN)
    follows(case, answer, steps=1, seed=20, **PLAIN | {"betas": (0.9, 0.999)})


@AdamW.requires(
    "later steps use running means of the gradient and of its square, each corrected",
    "Both means start at 0 and are therefore too small at first. What is the sum of the "
    "weights that the gradients have in them after n steps?",
)
def _(answer, case):
    follows(case, answer, steps=2, **PLAIN)
    follows(case, answer, steps=7, seed=30, **PLAIN)
    follows(case, answer, steps=5, seed=40, **PLAIN | {"betas": (0.95, 0.6)})
    follows(case, answer, steps=3, seed=50, **PLAIN | {"betas": (0.0, 0.9)})


@AdamW.requires(
    "eps is added to the root of the corrected square",
    "Outside of the root, after the correction. With a large eps the order shows.",
)
def _(answer, case):
    follows(case, answer, steps=6, seed=60, **PLAIN | {"eps": 0.3})
    follows(case, answer, steps=4, seed=70, scale=1e-6, **PLAIN | {"eps": 1e-5})


@AdamW.requires(
    "weight decay takes lr · weight_decay of the old parameter, beside Adam's step",
    "Decoupled: the decay does not enter the two means.",
)
def _(answer, case):
    follows(case, answer, steps=1, **DECAYS)
    follows(case, answer, steps=6, seed=80, **PLAIN | {"lr": 0.3, "weight_decay": 0.7})
    follows(case, answer, steps=4, seed=90, scale=0.0, **DECAYS)


@AdamW.requires(
    "without options it does what torch's does without options",
    "Compare the defaults of lr, betas, eps and weight_decay with those asked for.",
)
def _(answer, case):
    for scale in (1.0, 1e-6):  # beside gradients of 1e-6 the default eps shows
        follows(case, answer, steps=3, seed=95, scale=scale, tolerance=2e-6)


@AdamW.requires(
    "each group has its own options, and they are read anew at every step",
    "`self.param_groups` is a list of dicts; a schedule writes a new `lr` into them "
    "between two steps.",
)
def _(answer, case):
    follows(case, answer, steps=3, scenario=by_groups)


@AdamW.requires(
    "a parameter without a gradient stays as it is, and counts its own steps",
    "A layer that was not used has `grad` None. No decay either, and when its first "
    "gradient comes, that is its step 1.",
)
def _(answer, case):
    for without in ([(1,), (1,), (), (0,), ()], [(1,)]):
        follows(case, answer, without=without, scenario=with_some_missing)


@AdamW.requires(
    "parameters change in place, gradients do not, and no graph is kept",
    "The model holds the very tensors that the optimizer was given. Write into them, "
    "under `torch.no_grad()`.",
)
def _(answer, case):
    def take_steps(steps):
        parameters = parameters_of(seed=98)
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
    follows(case, answer, steps=4, seed=110, kind=torch.float64, **DECAYS)
    follows(case, answer, steps=3, seed=120, kind=torch.bfloat16, **PLAIN)
    follows(case, answer, steps=2, scenario=strided_update)

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
        shape = tuple(p.shape)[::-1] if turned else tuple(p.shape)
        given = probe(*shape, seed=seed + 50 + i, scale=scale * (i + 1)).to(kind)
        p.grad = None if i in without else given.T if turned and p.ndim > 1 else given
    return parameters


def clips(case, answer, parameters, share, handed=list, relative=None):
    """Clip to `share` of the length, and compare with one long vector, rescaled."""
    given = [p.grad for p in parameters]
    before = [None if g is None else g.clone() for g in given]
    old = values(parameters)
    flat = [g.double().flatten() for g in before if g is not None]
    length = float(torch.cat(flat).norm()) if flat else 0.0
    max_norm = share * length or 1.0

    def clip(max_norm):
        return answer(handed(parameters), max_norm)

    clip.__name__ = "clip_gradients"
    total = case.call_in_place(clip, max_norm=max_norm)
    case.note(tuple(p.grad for p in parameters))
    factor = min(1.0, max_norm / length) if length else 1.0
    for i, (p, g) in enumerate(zip(parameters, before, strict=True)):
        if g is None:
            none = p.grad is None
            case.true(none, f"Parameter {i} had no gradient, and has one now.")
            continue
        what = f"the gradient of parameter {i} (length {length:.3g}, {max_norm=:.3g})"
        share_of_error = relative or (2e-6 if p.dtype == torch.float64 else 1e-5)
        loose = share_of_error * float(g.abs().max()) * factor
        case.close(p.grad, factor * g.double(), what, like=g, tolerance=loose)
    case.is_tensor(total, "the length, which is returned,")
    loose = (1e-2 if relative else 1e-5) * length + 1e-9
    case.close(total.double(), length, "the length returned", tolerance=loose)
    case.true(
        all(p.grad is g for p, g in zip(parameters, given, strict=True)),
        "`p.grad` is a new tensor. It must be changed in place: others, such as "
        "`DistributedDataParallel`, hold the same memory.",
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
    for share, seed, scale in ((0.5, 0, 1), (0.01, 10, 1), (0.95, 20, 1)):
        clips(case, answer, with_gradients(seed, scale), share)
    clips(case, answer, with_gradients(30, 1e3), 1e-4)


@clip_gradients.requires(
    "a gradient that is short enough stays as it is, and zeros stay zeros",
    "The factor is never above 1. And what is max_norm over a length of 0?",
)
def _(answer, case):
    for share in (1.05, 2.0, 100.0):
        clips(case, answer, with_gradients(seed=40), share)
    clips(case, answer, with_gradients(seed=50, scale=1e-3), 30.0)
    clips(case, answer, with_gradients(scale=0.0), 1.0)


@clip_gradients.requires(
    "parameters without a gradient are left out, and none at all have the length 0",
)
def _(answer, case):
    clips(case, answer, with_gradients(seed=60, without=(1,)), 0.3)
    clips(case, answer, with_gradients(seed=70, without=(0, 3)), 3.0)
    clips(case, answer, with_gradients(without=(0, 1, 2, 3)), 1.0)


@clip_gradients.requires(
    "what model.parameters() gives, which can be run through only once, will do",
    "A generator is empty after the first loop. Make a list of what you need twice.",
)
def _(answer, case):
    clips(case, answer, with_gradients(seed=80), 0.4, handed=iter)
    clips(case, answer, with_gradients(seed=90), 4.0, handed=iter)


@clip_gradients.requires(
    "half precision, float64 and gradients of any layout work too",
    "300² is more than float16 can hold. `norm` squares in a wider format; you by hand "
    "do not.",
)
def _(answer, case):
    clips(case, answer, with_gradients(seed=100, kind=torch.float64), 0.5)
    clips(case, answer, with_gradients(seed=110, turned=True), 0.5)
    large = with_gradients(seed=120, kind=torch.float16, scale=120)
    clips(case, answer, large, 0.01, relative=0.01)
    wide = with_gradients(seed=130, kind=torch.bfloat16)
    clips(case, answer, wide, 0.3, relative=0.03)


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
