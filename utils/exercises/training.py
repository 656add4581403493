"""Lesson 09: the loss, batches, the learning rate, AdamW, clipping."""

import copy
import math
import numbers

import torch
from torch import nn
from torch.nn import functional as F

from utils.check.errors import Unmet
from utils.check.recording import snapshot
from utils.check.wording import dtype
from utils.check.exercise import Exercise, IntegrationCheck
from utils.probe import probe, probe_ids, strided

cross_entropy = Exercise("cross_entropy", lesson="training")
get_batch = Exercise("get_batch", lesson="training")
learning_rate = Exercise("learning_rate", lesson="training")
AdamW = Exercise("AdamW", lesson="training")
clip_gradients = Exercise("clip_gradients", lesson="training")


# cross_entropy ----------------------------------------------------------------------


def _torch_loss(logits, targets):
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def _logits_and_targets(*shape, seed=0, dtype=torch.float32, **size):
    targets = probe_ids(*shape[:-1], below=shape[-1], seed=seed + 1)
    return probe(*shape, seed=seed, dtype=dtype, **size), targets


@cross_entropy.requires(
    "for one row it is minus the log of the right token's probability",
    "The probability is the softmax of the row. Take its logarithm on paper first: what "
    "is left of the exponential above, and of the sum below?",
)
def _(answer, case):
    case.agrees(answer, _torch_loss, *_logits_and_targets(1, 5))
    case.agrees(answer, _torch_loss, *_logits_and_targets(1, 3, seed=2))


@cross_entropy.requires(
    "it is the mean over all targets, whatever the dimensions before V",
    "Every target counts once. Compare the shape of your losses with that of `targets` "
    "before the mean.",
)
def _(answer, case):
    for shape in ((4, 7), (2, 3, 5), (3, 3, 3), (2, 3, 4, 6), (1, 6, 11)):
        case.agrees(answer, _torch_loss, *_logits_and_targets(*shape, seed=sum(shape)))
    logits, targets = _logits_and_targets(2, 3, 5, seed=8)
    case.agrees(answer, _torch_loss, logits, torch.zeros_like(targets))


@cross_entropy.requires(
    "logits of any size give no overflow, and a hopeless token no infinite loss",
    "Lesson 00 made exp safe by subtracting something. The logarithm of a probability "
    "can be written without ever forming the probability, which may round to 0.",
)
def _(answer, case):
    for shift in (1000, -1000):
        case.agrees(
            answer, _torch_loss, *_logits_and_targets(4, 7, scale=3, shift=shift)
        )
    case.agrees(answer, _torch_loss, *_logits_and_targets(2, 3, 7, seed=5, scale=400))
    logits, targets = _logits_and_targets(3, 2, 7, seed=7)
    apart = torch.tensor([-2000.0, 0.0, 3000.0])[:, None, None]
    case.agrees(answer, _torch_loss, logits + apart, targets)
    case.agrees(answer, _torch_loss, 30 * logits.abs() - 25, targets)


@cross_entropy.requires("a logit of −inf is a token that cannot come")
def _(answer, case):
    logits, targets = _logits_and_targets(2, 3, 5, seed=9)
    hidden = (targets + 1)[..., None] % 5
    logits = logits.scatter(-1, hidden, -torch.inf)
    case.agrees(answer, _torch_loss, logits, targets)


@cross_entropy.requires(
    "float16, bfloat16, float64 and memory that is not contiguous work too",
    "Return the dtype of the logits.",
)
def _(answer, case):
    for kind in (torch.float64, torch.float16, torch.bfloat16):
        inputs = _logits_and_targets(2, 5, 7, seed=11, scale=2, dtype=kind)
        case.agrees(answer, _torch_loss, *inputs)
    logits, targets = _logits_and_targets(3, 4, 5, seed=12)
    case.agrees(answer, _torch_loss, strided(logits), targets)
    turned = logits.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    case.agrees(answer, _torch_loss, turned, targets.T.contiguous().T)


@cross_entropy.requires(
    "its gradient is the softmax minus 1 at the target, over the number of targets",
    "The whole expression must stay in the graph; only what is subtracted for safety "
    "may be cut from it.",
)
def _(answer, case):
    case.gradients_agree(answer, _torch_loss, *_logits_and_targets(2, 3, 5, seed=13))
    far = _logits_and_targets(4, 7, seed=14, scale=300)
    case.gradients_agree(answer, _torch_loss, *far)


@cross_entropy.requires(
    "targets that do not fit the logits are a ValueError that names both shapes",
    "`gather` and broadcasting accept some shapes that do not fit, without a word. "
    "Compare the shapes first.",
)
def _(answer, case):
    logits, targets = _logits_and_targets(2, 6, 5, seed=15)
    turned, flat = targets.T, targets.flatten()  # as many, in another shape
    for wrong, size in (
        (turned, 6),
        (flat, 12),
        (targets[:, :4], 4),
        (targets[:1], 1),
        (targets[0], 6),
    ):
        case.raises(
            ValueError,
            answer,
            logits,
            wrong,
            mentions=(size, 5),
            because=f"logits (2, 6, 5) and targets {tuple(wrong.shape)} do not fit",
        )


@cross_entropy.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, *_logits_and_targets(2, 3, 5))


# get_batch --------------------------------------------------------------------------


def _text(n, dtype=torch.int64, first=3):
    """n different tokens in mixed order."""
    step = next(k for k in (7, 11, 13, 17) if math.gcd(k, n) == 1)
    return (torch.arange(n) * step % n + first).to(dtype)


def _places(data, tokens, what):
    """Where in `data`, all tokens of which are different, `tokens` stand."""
    found = tokens[..., None].long() == data.long()
    if not found.any(-1).all():
        raise Unmet(f"{what} hold tokens that are not in the text.")
    return found.int().argmax(-1)


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _batch(case, answer, data, batch_size, length, generator=None):
    """Call, and check the form: inputs and targets, `(B, T)` each."""
    given = {} if generator is None else {"generator": generator}
    result = case.call(answer, data, batch_size, length, **given)
    case.is_tuple(result, 2, "the result (inputs, targets)")
    for name, each in zip(("inputs", "targets"), result, strict=True):
        case.is_tensor(each, f"`{name}`")
        case.equal(tuple(each.shape), (batch_size, length), f"the shape of `{name}`")
        case.equal(dtype(each), dtype(data), f"the dtype of `{name}`")
    return result


def _starts(case, answer, data, batch_size, length, generator=None):
    """Call, check that each row is a piece of the text, and return the starts."""
    inputs, _ = _batch(case, answer, data, batch_size, length, generator)
    places = _places(data, inputs, "`inputs`")
    case.equal(
        places - places[:, :1],
        torch.arange(length).expand(batch_size, length).contiguous(),
        "the places of a row's inputs in the text, less the first one,",
    )
    return places[:, 0]


@get_batch.requires(
    "inputs and targets come back, both (B, T)",
    "Cut T + 1 tokens for each row; inputs and targets are two views of them.",
)
def _(answer, case):
    _batch(case, answer, _text(50), 4, 6, _generator())
    _batch(case, answer, _text(50), 1, 3, _generator())
    _batch(case, answer, _text(50), 5, 1, _generator())


@get_batch.requires(
    "each row of the inputs is a piece of the text, token after token",
)
def _(answer, case):
    _starts(case, answer, _text(50), 4, 6, _generator(1))
    _starts(case, answer, _text(40), 5, 5, _generator(2))
    _starts(case, answer, _text(31), 7, 30, _generator(3))


@get_batch.requires(
    "each target is the token that follows its input",
    "What should the model say after it has read `inputs[b, i]`? That stands one place "
    "further on in the text.",
)
def _(answer, case):
    data = _text(60)
    for seed, (rows, length) in enumerate(((4, 6), (5, 5), (3, 1))):
        inputs, targets = _batch(case, answer, data, rows, length, _generator(seed))
        steps = _places(data, targets, "`targets`") - _places(data, inputs, "`inputs`")
        case.equal(
            steps, torch.ones_like(steps), "the distance from each input to its target"
        )


@get_batch.requires(
    "a text of T + 1 tokens has one piece, a shorter one is a ValueError",
    "How many places are there for the first of T + 1 tokens? Name the two lengths in "
    "the error: that of the text, and T + 1.",
)
def _(answer, case):
    data = _text(6)
    inputs, targets = _batch(case, answer, data, 3, 5, _generator())
    case.equal(inputs, data[:5].repeat(3, 1), "`inputs` from a text of T + 1 tokens")
    case.equal(targets, data[1:].repeat(3, 1), "`targets` from a text of T + 1 tokens")
    case.raises(
        ValueError,
        answer,
        _text(8),
        2,
        8,
        mentions=(8, 9),
        because="a text of 8 tokens has no piece of 8 with a token after it",
    )
    case.raises(
        ValueError,
        answer,
        _text(3),
        2,
        11,
        mentions=(3, 12),
        because="a text of 3 tokens is too short for pieces of 11",
    )


@get_batch.requires(
    "every start is as likely as any other, the first and the last one too",
    "A piece needs T + 1 tokens. Count the starts of a short text on paper, and look up "
    "whether the function that you draw with includes its upper end.",
)
def _(answer, case):
    data = _text(9)
    starts = _starts(case, answer, data, 2000, 4, _generator(4))
    counts = starts.bincount(minlength=5).tolist()
    missing = [k for k in range(5) if not counts[k]]
    case.true(
        not missing,
        f"In 2000 pieces of 4 from 9 tokens none starts at "
        f"{' or '.join(map(str, missing))}; starts from 0 to 4 are possible.",
    )
    case.true(
        all(310 < n < 490 for n in counts),
        f"2000 pieces of 4 from 9 tokens started at 0, 1, 2, 3, 4 this often: {counts}. "
        "All five should be about equally frequent.",
    )


@get_batch.requires(
    "the rows of a batch are drawn independently of each other",
)
def _(answer, case):
    starts = _starts(case, answer, _text(9), 2000, 4, _generator(5))
    pairs = (5 * starts[:-1] + starts[1:]).bincount(minlength=25)
    case.true(
        bool((pairs > 35).all() and (pairs < 135).all()),
        "Where a row starts depends on where the row before it starts: draw one number "
        "for each row.",
    )


@get_batch.requires(
    "the generator decides what is drawn, and nothing else is touched",
    "Hand `generator` on to the function that draws, and set no seed.",
)
def _(answer, case):
    data = _text(500)
    one, other, third = _generator(6), _generator(6), _generator(7)
    torch.manual_seed(1)
    first = _starts(case, answer, data, 8, 3, one)
    second = _starts(case, answer, data, 8, 3, one)
    untouched = torch.rand(3)
    torch.manual_seed(2)
    again = _starts(case, answer, data, 8, 3, other)
    case.true(
        torch.equal(first, again),
        "Two generators with the same seed give different batches.",
    )
    case.true(
        not torch.equal(first, second),
        "A second call with the same generator gives the first batch again: training "
        "would see one batch for ever.",
    )
    different = _starts(case, answer, data, 8, 3, third)
    case.true(
        not torch.equal(first, different),
        "Generators with different seeds give the same batch.",
    )
    torch.manual_seed(1)
    case.true(
        torch.equal(untouched, torch.rand(3)),
        "With a generator given, the global random state changed all the same.",
    )


@get_batch.requires("without a generator torch.manual_seed decides")
def _(answer, case):
    data = _text(500)
    torch.manual_seed(3)
    first, second = (_starts(case, answer, data, 8, 3) for _ in range(2))
    torch.manual_seed(3)
    again = _starts(case, answer, data, 8, 3)
    case.true(
        torch.equal(first, again),
        "After `torch.manual_seed(3)` two calls gave different batches: draw with torch.",
    )
    case.true(
        not torch.equal(first, second),
        "Two calls in a row gave the same batch: a seed is set somewhere inside.",
    )


@get_batch.requires(
    "other whole-number dtypes and memory that is not contiguous work too"
)
def _(answer, case):
    for kind in (torch.int32, torch.uint8):
        _starts(case, answer, _text(50, kind), 4, 6, _generator(8))
    data = torch.stack([_text(50), _text(50)], dim=1)[:, 1]
    inputs, targets = _batch(case, answer, data, 4, 6, _generator(9))
    case.equal(
        inputs[:, 1:].clone(), targets[:, :-1].clone(), "the inputs after the first"
    )


@get_batch.requires("the batch lies where the text lies")
def _(answer, case):
    case.any_device(answer, _text(50), 4, 6)


# learning_rate ----------------------------------------------------------------------


def _rate(step, peak, floor, warmup_steps, total_steps):
    """By the half-angle formula, beside the usual one with 1 + cos."""
    if step < warmup_steps:
        return peak * step / warmup_steps
    part = min((step - warmup_steps) / (total_steps - warmup_steps), 1)
    up = math.cos(math.pi / 2 * part) ** 2
    return up * peak + (1 - up) * floor


def _agree_rate(case, answer, step, peak, floor, warmup_steps, total_steps):
    found = case.call(answer, step, peak, floor, warmup_steps, total_steps)
    if not isinstance(found, numbers.Real):
        if found is None:
            raise Unmet("The rate is None: is a `return` missing?")
        raise Unmet(f"The rate is of type {type(found).__name__}; return a float.")
    case.close(
        torch.tensor(float(found), dtype=torch.float64),
        torch.tensor(
            _rate(step, peak, floor, warmup_steps, total_steps), dtype=torch.float64
        ),
        f"the rate at step {step}",
        tolerance=1e-9 * peak,
    )


@learning_rate.requires(
    "it rises in a straight line from 0 and reaches the peak at step warmup_steps",
    "Which part of the way has step 1 behind it, if the whole way has `warmup_steps`?",
)
def _(answer, case):
    for step in (2, 1, 3, 4, 0):
        _agree_rate(case, answer, step, 3e-3, 2e-4, 4, 20)
    for step in (1, 7, 50, 99):
        _agree_rate(case, answer, step, 0.5, 0.1, 100, 1000)


@learning_rate.requires(
    "from there it falls along half a cosine",
    "First find the part of the fall that lies behind: 0 at step `warmup_steps`, 1 at "
    "step `total_steps`. The cosine of π times it goes from 1 to −1; you need something "
    "that goes from 1 to 0.",
)
def _(answer, case):
    for step in (8, 12, 16):
        _agree_rate(case, answer, step, 3e-3, 2e-4, 4, 20)
    for step in (100, 101, 400, 550, 700, 999):
        _agree_rate(case, answer, step, 0.5, 0.1, 100, 1000)


@learning_rate.requires(
    "at step total_steps it is the floor, and stays there",
    "A cosine goes up again after its lowest point.",
)
def _(answer, case):
    for step in (20, 21, 30, 36, 52, 1000):
        _agree_rate(case, answer, step, 3e-3, 2e-4, 4, 20)


@learning_rate.requires(
    "without warm-up it starts at the peak",
    "Nothing may be divided by `warmup_steps` when it is 0.",
)
def _(answer, case):
    for step in (0, 1, 5, 9, 10, 11, 15, 25):
        _agree_rate(case, answer, step, 1e-2, 1e-3, 0, 10)


@learning_rate.requires("a floor of 0, and one as high as the peak, work too")
def _(answer, case):
    for step in (0, 1, 3, 5, 8, 11, 12, 14):
        _agree_rate(case, answer, step, 0.2, 0.0, 3, 12)
        _agree_rate(case, answer, step, 0.2, 0.2, 3, 12)


# AdamW ------------------------------------------------------------------------------

PLAIN = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.0}
SHAPES = ((3, 4), (5,), (2, 3, 2))


def _parameters(shapes=SHAPES, seed=0, kind=torch.float32):
    return [
        nn.Parameter(probe(*shape, seed=seed + i, dtype=kind))
        for i, shape in enumerate(shapes)
    ]


def _set_gradients(parameters, step, seed=100, scale=1.0, without=()):
    """A gradient for each parameter that depends on the step, growing and turning."""
    for i, p in enumerate(parameters):
        size = scale * (1 + step) / 2
        given = probe(*p.shape, seed=seed + 10 * step + i, scale=size, dtype=p.dtype)
        p.grad = None if i in without else given


def _train(build, parameters, steps, options, **gradients):
    optimizer = build(parameters, **options)
    for step in range(steps):
        _set_gradients(parameters, step, **gradients)
        optimizer.step()
    return optimizer


def _torch_adamw(parameters, **options):
    return torch.optim.AdamW(parameters, foreach=False, **options)


def _in_double(parameters):
    return [nn.Parameter(p.detach().double()) for p in parameters]


def _agree_adamw(case, answer, steps, seed=0, kind=torch.float32, scale=1.0, **options):
    """`steps` updates of parameters of several shapes, beside torch's own."""

    def take_steps(steps, **options):
        parameters = _parameters(seed=seed, kind=kind)
        _train(answer, parameters, steps, options, scale=scale)
        return tuple(p.detach().clone() for p in parameters)

    options = {**PLAIN, **options}
    found = case.call_in_place(take_steps, steps=steps, **options)
    truth = _in_double(_parameters(seed=seed, kind=kind))
    given = [[] for _ in range(steps)]
    optimizer = _torch_adamw(truth, **options)
    for step in range(len(given)):
        like = _parameters(seed=seed, kind=kind)
        _set_gradients(like, step, scale=scale)
        for p, q in zip(truth, like, strict=True):
            p.grad = q.grad.double()
        optimizer.step()
    for i, (actual, expected) in enumerate(zip(found, truth, strict=True)):
        case.close(
            actual,
            expected,
            f"parameter {i} after {steps} step{'s' * (steps > 1)}",
            like=_parameters(kind=kind)[i],
            tolerance={torch.bfloat16: 0.1, torch.float64: 1e-10}.get(kind, 2e-5),
        )


@AdamW.requires(
    "the first step moves each number by lr against its gradient",
    "After one step the corrected mean is the gradient itself, and the corrected mean "
    "square its square.",
)
def _(answer, case):
    _agree_adamw(case, answer, 1)
    _agree_adamw(case, answer, 1, seed=20, lr=0.02, betas=(0.9, 0.999))


@AdamW.requires(
    "later steps use running means of the gradient and of its square, each corrected",
    "Both means start at 0 and are therefore too small at first. What is the sum of the "
    "weights that the gradients have in them after n steps?",
)
def _(answer, case):
    _agree_adamw(case, answer, 2)
    _agree_adamw(case, answer, 7, seed=30)
    _agree_adamw(case, answer, 5, seed=40, betas=(0.95, 0.6))
    _agree_adamw(case, answer, 3, seed=50, betas=(0.0, 0.9))


@AdamW.requires(
    "eps is added to the root of the corrected square",
    "Outside of the root, after the correction. With a large eps the order shows.",
)
def _(answer, case):
    _agree_adamw(case, answer, 1, eps=0.3)
    _agree_adamw(case, answer, 6, seed=60, eps=0.3)
    _agree_adamw(case, answer, 4, seed=70, scale=1e-6, eps=1e-5)


@AdamW.requires(
    "weight decay takes lr · weight_decay of the old parameter, beside Adam's step",
    "Decoupled: the decay does not enter the two means.",
)
def _(answer, case):
    _agree_adamw(case, answer, 1, weight_decay=0.5)
    _agree_adamw(case, answer, 6, seed=80, lr=0.3, weight_decay=0.7)
    _agree_adamw(case, answer, 4, seed=90, weight_decay=0.5, scale=0.0)


@AdamW.requires(
    "without options it does what torch's does without options",
    "Compare the defaults of lr, betas, eps and weight_decay with those asked for.",
)
def _(answer, case):
    def take_steps(steps, scale):
        parameters = _parameters(seed=95)
        _train(answer, parameters, steps, {}, scale=scale)
        return tuple(p.detach().clone() for p in parameters)

    for scale in (1.0, 1e-6):  # beside gradients of 1e-6 the default eps shows
        found = case.call_in_place(take_steps, steps=3, scale=scale)
        truth = _parameters(seed=95)
        _train(_torch_adamw, truth, 3, {}, scale=scale)
        for i, (actual, expected) in enumerate(zip(found, truth, strict=True)):
            case.close(actual, expected, f"parameter {i}", tolerance=2e-6)


@AdamW.requires(
    "each group has its own options, and they are read anew at every step",
    "`self.param_groups` is a list of dicts; a schedule writes a new `lr` into them "
    "between two steps.",
)
def _(answer, case):
    def take_steps(steps, build=answer):
        first, second, third = parameters = _parameters(seed=96)
        groups = [
            {"params": [first], "weight_decay": 0.9, "lr": 0.3},
            {"params": [second, third], "betas": (0.5, 0.7), "eps": 0.2},
        ]
        optimizer = build(groups, lr=0.1, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.0)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] / (step + 1)
            _set_gradients(parameters, step)
            optimizer.step()
        return tuple(p.detach().clone() for p in parameters)

    found = case.call_in_place(take_steps, steps=3)
    truth = take_steps(3, _torch_adamw)
    for i, (actual, expected) in enumerate(zip(found, truth, strict=True)):
        case.close(actual, expected, f"parameter {i}", tolerance=2e-5)


@AdamW.requires(
    "a parameter without a gradient stays as it is, and counts its own steps",
    "A layer that was not used has `grad` None. No decay either, and when its first "
    "gradient comes, that is its step 1.",
)
def _(answer, case):
    def take_steps(without, build=answer):
        parameters = _parameters(seed=97)
        optimizer = build(parameters, **{**PLAIN, "weight_decay": 0.5})
        for step, left_out in enumerate(without):
            _set_gradients(parameters, step, without=left_out)
            optimizer.step()
        return tuple(p.detach().clone() for p in parameters)

    for without in ([(1,), (1,), (), (0,), ()], [(1,)]):
        found = case.call_in_place(take_steps, without=without)
        truth = take_steps(without, _torch_adamw)
        for i, (actual, expected) in enumerate(zip(found, truth, strict=True)):
            case.close(actual, expected, f"parameter {i}", tolerance=2e-5)


@AdamW.requires(
    "parameters change in place, gradients do not, and no graph is kept",
    "The model holds the very tensors that the optimizer was given. Write into them, "
    "under `torch.no_grad()`.",
)
def _(answer, case):
    def take_steps(steps):
        parameters = _parameters(seed=98)
        memory = [p.data_ptr() for p in parameters]
        optimizer = answer(parameters, **{**PLAIN, "weight_decay": 0.5})
        changes = set()
        for step in range(steps):
            _set_gradients(parameters, step)
            before = [p.grad.clone() for p in parameters]
            optimizer.step()
            for p, old in zip(parameters, before, strict=True):
                if p.grad is None or not p.grad.any():
                    changes.add("cleared")
                elif not torch.equal(p.grad, old):
                    changes.add("changed")
        same = [p.data_ptr() for p in parameters] == memory
        graph = any(p.grad_fn is not None or not p.requires_grad for p in parameters)
        states = [v for s in optimizer.state.values() for v in s.values()]
        graph = graph or any(getattr(v, "requires_grad", False) for v in states)
        return " and ".join(sorted(changes)), same, graph

    changes, same, graph = case.call_in_place(take_steps, steps=2)
    case.true(not changes, f"The gradients were {changes}. Others may still read them.")
    case.true(same, "The parameters moved to new memory instead of changing in place.")
    case.true(
        not graph, "A graph or its gradient hangs on the parameters or the state."
    )


@AdamW.requires(
    "two optimizers know nothing of each other",
)
def _(answer, case):
    def take_turns(steps):
        one, other = _parameters(seed=99), _parameters(seed=104)
        first, second = answer(one, **PLAIN), answer(other, **{**PLAIN, "lr": 0.3})
        for step in range(steps):
            for parameters, optimizer in ((one, first), (other, second)):
                _set_gradients(parameters, step, seed=len(parameters))
                optimizer.step()
        return tuple(p.detach().clone() for p in (*one, *other))

    found = case.call_in_place(take_turns, steps=3)
    one, other = _parameters(seed=99), _parameters(seed=104)
    _train(_torch_adamw, one, 3, PLAIN, seed=len(one))
    _train(_torch_adamw, other, 3, {**PLAIN, "lr": 0.3}, seed=len(other))
    for i, (actual, expected) in enumerate(zip(found, (*one, *other), strict=True)):
        case.close(actual, expected, f"parameter {i}", tolerance=2e-5)


@AdamW.requires(
    "state_dict() holds all that the next step needs",
    "What you keep between steps belongs into `self.state[p]`. Training is interrupted "
    "and goes on from a file; what is kept elsewhere is lost.",
)
def _(answer, case):
    def stop_and_go_on(steps):
        parameters = _parameters(seed=105)
        options = {**PLAIN, "weight_decay": 0.5}
        optimizer = _train(answer, parameters, steps, options)
        saved = copy.deepcopy(optimizer.state_dict())
        copies = [nn.Parameter(p.detach().clone()) for p in parameters]
        again = answer(copies, lr=7.0)
        again.load_state_dict(saved)
        for step in range(steps, 2 * steps):
            _set_gradients(copies, step)
            again.step()
        return tuple(p.detach().clone() for p in copies)

    found = case.call_in_place(stop_and_go_on, steps=3)
    truth = _parameters(seed=105)
    _train(_torch_adamw, truth, 6, {**PLAIN, "weight_decay": 0.5})
    for i, (actual, expected) in enumerate(zip(found, truth, strict=True)):
        case.close(actual, expected, f"parameter {i}", tolerance=2e-5)


@AdamW.requires(
    "float64 and bfloat16 parameters, and gradients of any layout, work",
    "`torch.zeros_like(p)` has the dtype, the layout and the device of p; "
    "`torch.zeros(p.shape)` has its own.",
)
def _(answer, case):
    _agree_adamw(case, answer, 4, seed=110, kind=torch.float64, weight_decay=0.3)
    _agree_adamw(case, answer, 3, seed=120, kind=torch.bfloat16, lr=0.05)

    def take_steps(steps, build=answer):
        p = nn.Parameter(strided(probe(3, 4)))
        optimizer = build([p], **PLAIN)
        for step in range(steps):
            p.grad = probe(4, 3, seed=step).T
            optimizer.step()
        return p.detach().clone()

    found = case.call_in_place(take_steps, steps=2)
    case.close(
        found, take_steps(2, _torch_adamw), "a strided parameter", tolerance=2e-5
    )


@AdamW.requires("what it keeps lies where the parameter lies")
def _(answer, case):
    def take_a_step(p, gradient):
        p = nn.Parameter(p)
        p.grad = gradient
        optimizer = answer([p], **PLAIN)
        optimizer.step()
        # Writing into a tensor on the CPU is let through here, and is not on a GPU.
        kept = [v for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
        elsewhere = [v for v in kept if v.ndim and v.device != p.device]
        return elsewhere[0] if elsewhere else p.detach()

    case.note("a step elsewhere")
    case.any_device(take_a_step, probe(3, 4), probe(3, 4, seed=1))


# clip_gradients ---------------------------------------------------------------------


def _with_gradients(seed=0, scale=1.0, kind=torch.float32, without=(), turned=False):
    parameters = _parameters(((3, 4), (7,), (2, 5), (6,)), seed=seed, kind=kind)
    for i, p in enumerate(parameters):
        size = scale * (i + 1)
        shape = tuple(p.shape)[::-1] if turned else tuple(p.shape)
        given = probe(*shape, seed=seed + 50 + i, scale=size).to(kind)
        p.grad = None if i in without else given.T if turned and p.ndim > 1 else given
    return parameters


def _length(parameters):
    given = [p.grad.double().flatten() for p in parameters if p.grad is not None]
    return float((torch.cat(given) ** 2).sum() ** 0.5) if given else 0.0


def _clip(case, answer, parameters, share, handed=list, relative=None):
    """Clip to `share` of the length, and compare with one long vector, rescaled."""
    length = _length(parameters)
    max_norm = share * length if length else 1.0
    given = [p.grad for p in parameters]
    before = [None if g is None else g.clone() for g in given]
    values = [p.detach().clone() for p in parameters]

    def clip(max_norm):
        return answer(handed(parameters), max_norm)

    clip.__name__ = "clip_gradients"
    total = case.call_in_place(clip, max_norm=max_norm)
    case.note(snapshot(tuple(p.grad for p in parameters)))
    factor = min(1.0, max_norm / length) if length else 1.0
    for i, (p, old) in enumerate(zip(parameters, before, strict=True)):
        if old is None:
            case.true(
                p.grad is None, f"Parameter {i} had no gradient, and has one now."
            )
            continue
        what = f"the gradient of parameter {i} (length {length:.3g}, {max_norm=:.3g})"
        share_of_error = relative or (2e-6 if p.dtype == torch.float64 else 1e-5)
        loose = share_of_error * float(old.abs().max()) * factor
        case.close(p.grad, factor * old.double(), what, like=old, tolerance=loose)
    if total is None:
        raise Unmet("The length before the clipping must be returned; it is None.")
    if not isinstance(total, (torch.Tensor, numbers.Real)):
        raise Unmet(f"The result is of type {type(total).__name__}; a number is due.")
    total = torch.as_tensor(total)
    case.close(total.double(), length, "the length returned", tolerance=1e-2 * length + 1e-9
            if relative else 1e-5 * length + 1e-9)  # fmt: skip
    case.true(
        all(p.grad is g for p, g in zip(parameters, given, strict=True)),
        "`p.grad` is a new tensor. It must be changed in place: others, such as "
        "`DistributedDataParallel`, hold the same memory.",
    )
    case.true(
        all(torch.equal(p, v) for p, v in zip(parameters, values, strict=True)),
        "The parameters themselves were changed; only their gradients are to be.",
    )


@clip_gradients.requires(
    "a long gradient gets the length max_norm and keeps its direction",
    "All gradients together are one vector. Find its length first, then multiply all of "
    "them with one factor.",
)
def _(answer, case):
    _clip(case, answer, _with_gradients(), 0.5)
    _clip(case, answer, _with_gradients(seed=10), 0.01)
    _clip(case, answer, _with_gradients(seed=20), 0.95)
    _clip(case, answer, _with_gradients(seed=30, scale=1e3), 1e-4)


@clip_gradients.requires(
    "a gradient that is short enough stays as it is",
    "The factor is never above 1.",
)
def _(answer, case):
    for share in (1.05, 2.0, 100.0):
        _clip(case, answer, _with_gradients(seed=40), share)
    _clip(case, answer, _with_gradients(seed=50, scale=1e-3), 30.0)


@clip_gradients.requires(
    "parameters without a gradient are left out, and none at all have the length 0",
)
def _(answer, case):
    _clip(case, answer, _with_gradients(seed=60, without=(1,)), 0.3)
    _clip(case, answer, _with_gradients(seed=70, without=(0, 3)), 3.0)
    _clip(case, answer, _with_gradients(without=(0, 1, 2, 3)), 1.0)


@clip_gradients.requires(
    "what model.parameters() gives, which can be run through only once, will do",
    "A generator is empty after the first loop. Make a list of what you need twice.",
)
def _(answer, case):
    _clip(case, answer, _with_gradients(seed=80), 0.4, handed=iter)
    _clip(case, answer, _with_gradients(seed=90), 4.0, handed=iter)


@clip_gradients.requires(
    "gradients of zeros stay zeros",
    "What is max_norm over a length of 0?",
)
def _(answer, case):
    _clip(case, answer, _with_gradients(scale=0.0), 1.0)


@clip_gradients.requires(
    "half precision, float64 and gradients of any layout work too",
    "300² is more than float16 can hold. `norm` squares in a wider format; you by hand "
    "do not.",
)
def _(answer, case):
    _clip(case, answer, _with_gradients(seed=100, kind=torch.float64), 0.5)
    _clip(case, answer, _with_gradients(seed=110, turned=True), 0.5)
    large = _with_gradients(seed=120, kind=torch.float16, scale=120)
    _clip(case, answer, large, 0.01, relative=0.01)
    wide = _with_gradients(seed=130, kind=torch.bfloat16)
    _clip(case, answer, wide, 0.3, relative=0.03)


# All of it together -----------------------------------------------------------------

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


def _small_model(parts):
    config = parts["TransformerConfig"](
        vocab_size=7,
        d_model=16,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        d_head=8,
        d_ff=24,
        max_len=12,
    )
    return parts["Transformer"](config)


# Each token but one decides the next; it comes from the token two back otherwise.
_RHYME = torch.tensor([0, 1, 2, 3, 1, 4, 5, 1, 6, 2, 5, 3] * 12)


def _losses_of_training(case, parts, steps):
    """The loss at each step of a short training, through `t` for the trace."""

    def train(steps):
        model, generator = _small_model(parts), _generator(11)
        optimizer = parts["AdamW"](model.parameters(), lr=1.0, weight_decay=0.01)
        losses = []
        for step in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = parts["learning_rate"](step, 2e-2, 2e-3, 5, steps)
            inputs, targets = parts["get_batch"](_RHYME, 8, 12, generator)
            loss = parts["cross_entropy"](model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            parts["clip_gradients"](model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return model, losses

    model, losses = case.call_in_place(train, steps=steps)
    return model, losses


@training.requires("a new model's loss is about that of guessing evenly")
def _(parts, case):
    model = _small_model(parts)
    inputs, targets = parts["get_batch"](_RHYME, 8, 12, _generator(3))
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
    model = _small_model(parts)
    inputs, targets = parts["get_batch"](_RHYME, 3, 12, _generator(4))
    case.note("targets are inputs" if torch.equal(inputs, targets) else "")
    case.equal(
        inputs[:, 1:].clone(), targets[:, :-1].clone(), "the inputs from the second on"
    )
    changed = inputs.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 7
    with torch.no_grad():
        before, after = (
            float(parts["cross_entropy"](model(ids)[:, :-1], targets[:, :-1]))
            for ids in (inputs, changed)
        )
    case.note(abs(before - after) < 1e-5)
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
    _, losses = _losses_of_training(case, parts, 60)
    end = sum(losses[-5:]) / 5
    case.true(
        end < 0.5,
        f"After 60 steps on a text that repeats itself the loss is {end:.2f}; it began "
        f"at {losses[0]:.2f}, and below 0.5 is expected.",
    )
