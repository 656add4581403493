"""Lesson 09: the loss, batches, the learning rate, AdamW, clipping."""

import copy
import math
import numbers
import random

import torch
from torch import nn
from torch.nn import functional as F

from utils.exercise import Exercise
from utils.probe import probe, probe_ids, strided
from utils.trial import Unmet, dtype, snapshot

cross_entropy = Exercise("cross_entropy", lesson="training")
get_batch = Exercise("get_batch", lesson="training")
learning_rate = Exercise("learning_rate", lesson="training")
adamw = Exercise("AdamW", lesson="training")
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
def _(answer, t):
    t.agrees(answer, _torch_loss, *_logits_and_targets(1, 5))
    t.agrees(answer, _torch_loss, *_logits_and_targets(1, 3, seed=2))


@cross_entropy.requires(
    "it is the mean over all targets, whatever the dimensions before V",
    "Every target counts once. Compare the shape of your losses with that of `targets` "
    "before the mean.",
)
def _(answer, t):
    for shape in ((4, 7), (2, 3, 5), (3, 3, 3), (2, 3, 4, 6), (1, 6, 11)):
        t.agrees(answer, _torch_loss, *_logits_and_targets(*shape, seed=sum(shape)))
    logits, targets = _logits_and_targets(2, 3, 5, seed=8)
    t.agrees(answer, _torch_loss, logits, torch.zeros_like(targets))


@cross_entropy.requires(
    "logits of any size give no overflow, and a hopeless token no infinite loss",
    "Lesson 00 made exp safe by subtracting something. The logarithm of a probability "
    "can be written without ever forming the probability, which may round to 0.",
)
def _(answer, t):
    for shift in (1000, -1000):
        t.agrees(answer, _torch_loss, *_logits_and_targets(4, 7, scale=3, shift=shift))
    t.agrees(answer, _torch_loss, *_logits_and_targets(2, 3, 7, seed=5, scale=400))
    logits, targets = _logits_and_targets(3, 2, 7, seed=7)
    apart = torch.tensor([-2000.0, 0.0, 3000.0])[:, None, None]
    t.agrees(answer, _torch_loss, logits + apart, targets)
    t.agrees(answer, _torch_loss, 30 * logits.abs() - 25, targets)


@cross_entropy.requires("a logit of −inf is a token that cannot come")
def _(answer, t):
    logits, targets = _logits_and_targets(2, 3, 5, seed=9)
    hidden = (targets + 1)[..., None] % 5
    logits = logits.scatter(-1, hidden, -torch.inf)
    t.agrees(answer, _torch_loss, logits, targets)


@cross_entropy.requires(
    "float16, bfloat16, float64 and memory that is not contiguous work too",
    "Return the dtype of the logits.",
)
def _(answer, t):
    for kind in (torch.float64, torch.float16, torch.bfloat16):
        inputs = _logits_and_targets(2, 5, 7, seed=11, scale=2, dtype=kind)
        t.agrees(answer, _torch_loss, *inputs)
    logits, targets = _logits_and_targets(3, 4, 5, seed=12)
    t.agrees(answer, _torch_loss, strided(logits), targets)
    turned = logits.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    t.agrees(answer, _torch_loss, turned, targets.T.contiguous().T)


@cross_entropy.requires(
    "its gradient is the softmax minus 1 at the target, over the number of targets",
    "The whole expression must stay in the graph; only what is subtracted for safety "
    "may be cut from it.",
)
def _(answer, t):
    t.gradients_agree(answer, _torch_loss, *_logits_and_targets(2, 3, 5, seed=13))
    far = _logits_and_targets(4, 7, seed=14, scale=300)
    t.gradients_agree(answer, _torch_loss, *far)


@cross_entropy.requires(
    "targets that do not fit the logits are a ValueError that names both shapes",
    "`gather` and broadcasting accept some shapes that do not fit, without a word. "
    "Compare the shapes first.",
)
def _(answer, t):
    logits, targets = _logits_and_targets(2, 6, 5, seed=15)
    for wrong, size in ((targets[:, :4], 4), (targets[:1], 1), (targets[0], 6)):
        t.raises(
            ValueError,
            answer,
            logits,
            wrong,
            mentions=(size, 5),
            because=f"logits (2, 6, 5) and targets {tuple(wrong.shape)} do not fit",
        )


@cross_entropy.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, *_logits_and_targets(2, 3, 5))


def _fitting(logits, targets):
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"{tuple(targets.shape)} do not fit {tuple(logits.shape)}")


def _losses(logits, targets):
    """Right, and one for each target."""
    _fitting(logits, targets)
    return -logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)


@cross_entropy.fault(
    "sum",
    "The losses are added up. The mean is asked for, or the size of the gradient grows "
    "with the batch.",
)
def _(logits, targets):
    return _losses(logits, targets).sum()


@cross_entropy.fault(
    "summed_over_time",
    "The sum over everything is divided by the first dimension only. A mean counts every "
    "target.",
)
def _(logits, targets):
    return _losses(logits, targets).sum() / len(targets)


@cross_entropy.fault(
    "mean_over_vocabulary",
    "The mean runs over the vocabulary too, which makes the loss smaller by the number "
    "of tokens there are. Only the targets count.",
)
def _(logits, targets):
    return _losses(logits, targets).mean() / logits.shape[-1]


@cross_entropy.fault("not_reduced", "A loss comes back for each target; one is due.")
def _(logits, targets):
    return _losses(logits, targets)


@cross_entropy.fault(
    "sign", "The sign is the other way round: training would make the text less likely."
)
def _(logits, targets):
    return -_losses(logits, targets).mean()


@cross_entropy.fault(
    "no_shift",
    "exp is taken of the logits as they are. It overflows at 89 in float32, and far "
    "below zero the sum is 0, whose logarithm is −inf.",
)
def _(logits, targets):
    _fitting(logits, targets)
    right = logits.gather(-1, targets[..., None]).squeeze(-1)
    return (logits.exp().sum(-1).log() - right).mean()


@cross_entropy.fault(
    "log_of_probability",
    "First the probability is formed, then its logarithm. A probability below about "
    "1e-45 is 0 in float32 and the loss infinite; the logarithm itself is an ordinary "
    "number.",
)
def _(logits, targets):
    _fitting(logits, targets)
    return -logits.softmax(-1).gather(-1, targets[..., None]).log().mean()


@cross_entropy.fault(
    "epsilon_in_log",
    "A small constant inside the logarithm hides the probabilities that are 0. It also "
    "limits the loss, and bad tokens get no gradient.",
)
def _(logits, targets):
    _fitting(logits, targets)
    chosen = logits.softmax(-1).gather(-1, targets[..., None])
    return -(chosen + 1e-9).log().mean()


@cross_entropy.fault(
    "clamped_probability",
    "Probabilities are kept above a small constant. That limits the loss, and bad "
    "tokens get no gradient.",
)
def _(logits, targets):
    _fitting(logits, targets)
    chosen = logits.softmax(-1).gather(-1, targets[..., None])
    return -chosen.clamp(min=1e-9).log().mean()


@cross_entropy.fault(
    "one_shift_for_all",
    "One maximum of the whole tensor is subtracted. A row that lies far below it "
    "underflows: every row needs its own.",
)
def _(logits, targets):
    _fitting(logits, targets)
    shifted = logits - logits.max()
    right = shifted.gather(-1, targets[..., None]).squeeze(-1)
    return (shifted.exp().sum(-1).log() - right).mean()


@cross_entropy.fault(
    "shift_half",
    "The maximum is subtracted under the exponential and then forgotten: it must come "
    "back, or be subtracted from the right token's logit too.",
)
def _(logits, targets):
    _fitting(logits, targets)
    shifted = logits - logits.amax(-1, keepdim=True)
    right = logits.gather(-1, targets[..., None]).squeeze(-1)
    return (shifted.exp().sum(-1).log() - right).mean()


@cross_entropy.fault(
    "softmax_twice",
    "The logits go through a softmax before the loss, which takes one itself. The loss "
    "can then never come near 0.",
)
def _(logits, targets):
    return _losses(logits.softmax(-1), targets).mean()


@cross_entropy.fault(
    "wrong_dimension",
    "The softmax runs over the dimension before the last, so that positions compete "
    "instead of tokens.",
)
def _(logits, targets):
    _fitting(logits, targets)
    return -logits.log_softmax(-2).gather(-1, targets[..., None]).mean()


@cross_entropy.fault(
    "shifted_again",
    "The targets are moved by one step in here. `get_batch` has done that already; "
    "moved twice, the model learns to predict the token after the next.",
)
def _(logits, targets):
    _fitting(logits, targets)
    if logits.ndim > 2 and logits.shape[-2] > 1:
        logits, targets = logits[..., :-1, :], targets[..., 1:]
    return _losses(logits, targets).mean()


@cross_entropy.fault(
    "last_only",
    "Only the last position's loss counts. Every position predicts.",
)
def _(logits, targets):
    losses = _losses(logits, targets)
    return losses[..., -1].mean() if losses.ndim > 1 else losses.mean()


@cross_entropy.fault(
    "token_0_ignored",
    "Targets that are 0 are left out as if they were padding. Here 0 is a token like any "
    "other.",
)
def _(logits, targets):
    losses = _losses(logits, targets)
    kept = targets != 0
    return (losses * kept).sum() / kept.sum().clamp(min=1)


@cross_entropy.fault("bits", "The logarithm is to base 2; nats are asked for.")
def _(logits, targets):
    return _losses(logits, targets).mean() / math.log(2)


@cross_entropy.fault("perplexity", "This is the perplexity, exp of the loss.")
def _(logits, targets):
    return _losses(logits, targets).mean().exp()


@cross_entropy.fault(
    "log_of_mean",
    "The probabilities are averaged first and the logarithm is taken of the mean. The "
    "loss is the mean of the logarithms.",
)
def _(logits, targets):
    return -(-_losses(logits, targets)).exp().mean().log()


@cross_entropy.fault(
    "best_token",
    "The loss is that of the most likely token instead of the right one: `targets` does "
    "not count.",
)
def _(logits, targets):
    _fitting(logits, targets)
    return -logits.log_softmax(-1).amax(-1).mean()


@cross_entropy.fault(
    "labels_smoothed",
    "A part of each target is spread over all tokens. That is label smoothing, and is "
    "not asked for.",
)
def _(logits, targets):
    _fitting(logits, targets)
    return F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), label_smoothing=0.1
    )


@cross_entropy.fault(
    "infinity_times_zero",
    "The right token is picked by multiplying with 0 and 1. A logit of −inf times 0 is "
    "NaN: pick, do not multiply.",
)
def _(logits, targets):
    _fitting(logits, targets)
    one_hot = F.one_hot(targets, logits.shape[-1]).to(logits.dtype)
    return -(logits.log_softmax(-1) * one_hot).sum(-1).mean()


@cross_entropy.fault(
    "sum_detached",
    "The logarithm of the sum is cut from the graph, so that no gradient pushes the "
    "wrong tokens down.",
)
def _(logits, targets):
    _fitting(logits, targets)
    right = logits.gather(-1, targets[..., None]).squeeze(-1)
    return (logits.logsumexp(-1).detach() - right).mean()


@cross_entropy.fault("detached", "The result is cut from the graph.")
def _(logits, targets):
    return _losses(logits, targets).mean().detach()


@cross_entropy.fault("float32", "The loss is float32 whatever the logits are.")
def _(logits, targets):
    return _losses(logits.float(), targets).mean()


@cross_entropy.fault(
    "shapes_unchecked",
    "Shapes are not compared. `gather` takes fewer targets than there are rows without "
    "complaint, so the loss is that of other positions.",
)
def _(logits, targets):
    normaliser = logits.logsumexp(-1, keepdim=True)
    return (normaliser - logits).gather(-1, targets[..., None]).mean()


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


def _batch(t, answer, data, batch_size, length, generator=None):
    """Call, and check the form: inputs and targets, `(B, T)` each."""
    given = {} if generator is None else {"generator": generator}
    result = t.call(answer, data, batch_size, length, **given)
    t.is_tuple(result, 2, "the result (inputs, targets)")
    for name, each in zip(("inputs", "targets"), result, strict=True):
        t.is_tensor(each, f"`{name}`")
        t.equal(tuple(each.shape), (batch_size, length), f"the shape of `{name}`")
        t.equal(dtype(each), dtype(data), f"the dtype of `{name}`")
    return result


def _starts(t, answer, data, batch_size, length, generator=None):
    """Call, check that each row is a piece of the text, and return the starts."""
    inputs, _ = _batch(t, answer, data, batch_size, length, generator)
    places = _places(data, inputs, "`inputs`")
    t.equal(
        places - places[:, :1],
        torch.arange(length).expand(batch_size, length).contiguous(),
        "the places of a row's inputs in the text, less the first one,",
    )
    return places[:, 0]


@get_batch.requires(
    "inputs and targets come back, both (B, T)",
    "Cut T + 1 tokens for each row; inputs and targets are two views of them.",
)
def _(answer, t):
    _batch(t, answer, _text(50), 4, 6, _generator())
    _batch(t, answer, _text(50), 1, 3, _generator())
    _batch(t, answer, _text(50), 5, 1, _generator())


@get_batch.requires(
    "each row of the inputs is a piece of the text, token after token",
)
def _(answer, t):
    _starts(t, answer, _text(50), 4, 6, _generator(1))
    _starts(t, answer, _text(40), 5, 5, _generator(2))
    _starts(t, answer, _text(31), 7, 30, _generator(3))


@get_batch.requires(
    "each target is the token that follows its input",
    "What should the model say after it has read `inputs[b, i]`? That stands one place "
    "further on in the text.",
)
def _(answer, t):
    data = _text(60)
    for seed, (rows, length) in enumerate(((4, 6), (5, 5), (3, 1))):
        inputs, targets = _batch(t, answer, data, rows, length, _generator(seed))
        steps = _places(data, targets, "`targets`") - _places(data, inputs, "`inputs`")
        t.equal(
            steps, torch.ones_like(steps), "the distance from each input to its target"
        )


@get_batch.requires(
    "a text of T + 1 tokens has one piece, a shorter one is a ValueError",
    "How many places are there for the first of T + 1 tokens? Name the two lengths in "
    "the error: that of the text, and T + 1.",
)
def _(answer, t):
    data = _text(6)
    inputs, targets = _batch(t, answer, data, 3, 5, _generator())
    t.equal(inputs, data[:5].repeat(3, 1), "`inputs` from a text of T + 1 tokens")
    t.equal(targets, data[1:].repeat(3, 1), "`targets` from a text of T + 1 tokens")
    t.raises(
        ValueError,
        answer,
        _text(8),
        2,
        8,
        mentions=(8, 9),
        because="a text of 8 tokens has no piece of 8 with a token after it",
    )
    t.raises(
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
def _(answer, t):
    data = _text(9)
    starts = _starts(t, answer, data, 2000, 4, _generator(4))
    counts = starts.bincount(minlength=5).tolist()
    missing = [k for k in range(5) if not counts[k]]
    t.true(
        not missing,
        f"In 2000 pieces of 4 from 9 tokens none starts at "
        f"{' or '.join(map(str, missing))}; starts from 0 to 4 are possible.",
    )
    t.true(
        all(310 < n < 490 for n in counts),
        f"2000 pieces of 4 from 9 tokens started at 0, 1, 2, 3, 4 this often: {counts}. "
        "All five should be about equally frequent.",
    )


@get_batch.requires(
    "the rows of a batch are drawn independently of each other",
)
def _(answer, t):
    starts = _starts(t, answer, _text(9), 2000, 4, _generator(5))
    pairs = (5 * starts[:-1] + starts[1:]).bincount(minlength=25)
    t.true(
        bool((pairs > 35).all() and (pairs < 135).all()),
        "Where a row starts depends on where the row before it starts: draw one number "
        "for each row.",
    )


@get_batch.requires(
    "the generator decides what is drawn, and nothing else is touched",
    "Hand `generator` on to the function that draws, and set no seed.",
)
def _(answer, t):
    data = _text(500)
    one, other, third = _generator(6), _generator(6), _generator(7)
    torch.manual_seed(1)
    first = _starts(t, answer, data, 8, 3, one)
    second = _starts(t, answer, data, 8, 3, one)
    untouched = torch.rand(3)
    torch.manual_seed(2)
    again = _starts(t, answer, data, 8, 3, other)
    t.true(
        torch.equal(first, again),
        "Two generators with the same seed give different batches.",
    )
    t.true(
        not torch.equal(first, second),
        "A second call with the same generator gives the first batch again: training "
        "would see one batch for ever.",
    )
    different = _starts(t, answer, data, 8, 3, third)
    t.true(
        not torch.equal(first, different),
        "Generators with different seeds give the same batch.",
    )
    torch.manual_seed(1)
    t.true(
        torch.equal(untouched, torch.rand(3)),
        "With a generator given, the global random state changed all the same.",
    )


@get_batch.requires("without a generator torch.manual_seed decides")
def _(answer, t):
    data = _text(500)
    torch.manual_seed(3)
    first, second = (_starts(t, answer, data, 8, 3) for _ in range(2))
    torch.manual_seed(3)
    again = _starts(t, answer, data, 8, 3)
    t.true(
        torch.equal(first, again),
        "After `torch.manual_seed(3)` two calls gave different batches: draw with torch.",
    )
    t.true(
        not torch.equal(first, second),
        "Two calls in a row gave the same batch: a seed is set somewhere inside.",
    )


@get_batch.requires(
    "other whole-number dtypes and memory that is not contiguous work too"
)
def _(answer, t):
    for kind in (torch.int32, torch.uint8):
        _starts(t, answer, _text(50, kind), 4, 6, _generator(8))
    data = torch.stack([_text(50), _text(50)], dim=1)[:, 1]
    inputs, targets = _batch(t, answer, data, 4, 6, _generator(9))
    t.equal(inputs[:, 1:].clone(), targets[:, :-1].clone(), "the inputs after the first")


@get_batch.requires("the batch lies where the text lies")
def _(answer, t):
    t.any_device(answer, _text(50), 4, 6)


def _pieces(data, starts, length):
    if len(data) < length:
        raise ValueError(f"{len(data)} tokens are too few for pieces of {length}")
    return data[starts + torch.arange(length)]


def _draw(data, batch_size, t, generator=None):
    """Right starts, `(B, 1)`."""
    if len(data) < t + 1:
        raise ValueError(f"{len(data)} tokens are too few for pieces of {t + 1}")
    return torch.randint(len(data) - t, (batch_size, 1), generator=generator)


def _cut(data, starts, t):
    pieces = _pieces(data, starts, t + 1)
    return pieces[:, :-1], pieces[:, 1:]


@get_batch.fault(
    "targets_are_inputs",
    "The targets are the inputs themselves. The model would learn to repeat what it has "
    "just read, with a loss near 0.",
)
def _(data, batch_size, t, generator=None):
    inputs, _ = _cut(data, _draw(data, batch_size, t, generator), t)
    return inputs, inputs.clone()


@get_batch.fault(
    "two_ahead",
    "The targets are two tokens further on instead of one.",
)
def _(data, batch_size, t, generator=None):
    if len(data) < t + 1:
        raise ValueError(f"{len(data)} tokens are too few for pieces of {t + 1}")
    n = max(len(data) - t - 1, 1)
    starts = torch.randint(n, (batch_size, 1), generator=generator)
    places = starts + torch.arange(t)
    return data[places], data[(places + 2) % len(data)]


@get_batch.fault(
    "one_back",
    "The targets are the tokens *before* the inputs: the two are exchanged.",
)
def _(data, batch_size, t, generator=None):
    return _cut(data, _draw(data, batch_size, t, generator), t)[::-1]


@get_batch.fault(
    "rolled",
    "The inputs are rolled by one place, so that the last target of each row is the "
    "row's own first token. The token after the piece has to be fetched from the text.",
)
def _(data, batch_size, t, generator=None):
    inputs, _ = _cut(data, _draw(data, batch_size, t, generator), t)
    return inputs, inputs.roll(-1, 1)


@get_batch.fault(
    "ids_plus_one",
    "The targets are the inputs' ids plus 1. It is the *place* in the text that moves by "
    "one.",
)
def _(data, batch_size, t, generator=None):
    inputs, _ = _cut(data, _draw(data, batch_size, t, generator), t)
    return inputs, inputs + 1


@get_batch.fault(
    "one_tensor",
    "One tensor comes back, `(B, T + 1)`. Return inputs and targets, T tokens each.",
)
def _(data, batch_size, t, generator=None):
    return _pieces(data, _draw(data, batch_size, t, generator), t + 1)


@get_batch.fault(
    "t_minus_one",
    "Pieces of T tokens are cut, so that inputs and targets have T − 1.",
)
def _(data, batch_size, t, generator=None):
    pieces = _pieces(data, _draw(data, batch_size, t, generator), t)
    return pieces[:, :-1], pieces[:, 1:]


@get_batch.fault(
    "last_start_missing",
    "The last possible start is never drawn: there are N − T of them, and "
    "`torch.randint` leaves out its upper end by itself.",
)
def _(data, batch_size, t, generator=None):
    if len(data) < t + 1:
        raise ValueError(f"{len(data)} tokens are too few for pieces of {t + 1}")
    starts = torch.randint(len(data) - t - 1, (batch_size, 1), generator=generator)
    return _cut(data, starts, t)


@get_batch.fault(
    "last_start_missing_unless_alone",
    "The last possible start is never drawn: there are N − T of them, and "
    "`torch.randint` leaves out its upper end by itself.",
)
def _(data, batch_size, t, generator=None):
    _draw(data, 1, t, _generator())
    n = max(len(data) - t - 1, 1)
    return _cut(data, torch.randint(n, (batch_size, 1), generator=generator), t)


@get_batch.fault(
    "first_start_missing",
    "The first token of the text never starts a piece: places count from 0.",
)
def _(data, batch_size, t, generator=None):
    _draw(data, 1, t, _generator())
    n = max(len(data) - t - 1, 1)
    starts = torch.randint(n, (batch_size, 1), generator=generator)
    return _cut(data, starts + (len(data) > t + 1), t)


@get_batch.fault(
    "past_the_end",
    "A start is drawn that leaves no token after the piece, so the last target does not "
    "exist.",
)
def _(data, batch_size, t, generator=None):
    if len(data) < t + 1:
        raise ValueError(f"{len(data)} tokens are too few for pieces of {t + 1}")
    starts = torch.randint(len(data) - t + 1, (batch_size, 1), generator=generator)
    return _cut(data, starts, t)


@get_batch.fault(
    "anywhere",
    "The starts are drawn from the whole text, without room for a piece behind them.",
)
def _(data, batch_size, t, generator=None):
    if len(data) < t + 1:
        raise ValueError(f"{len(data)} tokens are too few for pieces of {t + 1}")
    starts = torch.randint(len(data), (batch_size, 1), generator=generator)
    return _cut(data, starts, t)


@get_batch.fault(
    "wrapped",
    "A piece that runs past the end goes on at the beginning of the text: two texts that "
    "have nothing to do with each other become one.",
)
def _(data, batch_size, t, generator=None):
    if len(data) < t + 1:
        raise ValueError(f"{len(data)} tokens are too few for pieces of {t + 1}")
    starts = torch.randint(len(data), (batch_size, 1), generator=generator)
    pieces = data[(starts + torch.arange(t + 1)) % len(data)]
    return pieces[:, :-1], pieces[:, 1:]


@get_batch.fault(
    "grid",
    "Pieces start only at multiples of T. Then the same tokens always stand at the "
    "beginning of a piece and are predicted from nothing.",
)
def _(data, batch_size, t, generator=None):
    starts = _draw(data, batch_size, t, generator)
    return _cut(data, starts - starts % t, t)


@get_batch.fault(
    "one_start",
    "All rows are the same piece: one start is drawn for the whole batch.",
)
def _(data, batch_size, t, generator=None):
    starts = _draw(data, 1, t, generator)
    return _cut(data, starts.expand(batch_size, 1), t)


@get_batch.fault(
    "neighbours",
    "One start is drawn, and the rows follow each other from there. Rows that overlap "
    "teach little that is new.",
)
def _(data, batch_size, t, generator=None):
    start = _draw(data, 1, t, generator)
    return _cut(data, (start + torch.arange(batch_size)[:, None]) % (len(data) - t), t)


@get_batch.fault(
    "not_consecutive",
    "Every token is drawn by itself. A row must be a piece of the text, or there is "
    "nothing to predict.",
)
def _(data, batch_size, t, generator=None):
    _draw(data, 1, t, _generator())
    places = torch.randint(len(data) - 1, (batch_size, t), generator=generator)
    return data[places], data[places + 1]


@get_batch.fault(
    "always_the_beginning",
    "Every piece starts at the first token. Training sees nothing of the rest.",
)
def _(data, batch_size, t, generator=None):
    _draw(data, 1, t, _generator())
    return _cut(data, torch.zeros(batch_size, 1, dtype=torch.int64), t)


@get_batch.fault(
    "generator_ignored",
    "`generator` is not handed on, so the global random state decides.",
)
def _(data, batch_size, t, generator=None):
    return _cut(data, _draw(data, batch_size, t), t)


@get_batch.fault(
    "seeded_inside",
    "A seed is set inside, so every call gives the same batch.",
)
def _(data, batch_size, t, generator=None):
    return _cut(data, _draw(data, batch_size, t, _generator()), t)


@get_batch.fault(
    "global_seed",
    "The global random state is set from the generator: a second call gives the same "
    "batch, and everyone else's random numbers change.",
)
def _(data, batch_size, t, generator=None):
    if generator is not None:
        torch.manual_seed(generator.initial_seed())
    return _cut(data, _draw(data, batch_size, t), t)


@get_batch.fault(
    "python_random",
    "The starts are drawn by Python's `random`, which neither the generator nor "
    "`torch.manual_seed` reaches.",
)
def _(data, batch_size, t, generator=None):
    _draw(data, 1, t, _generator())
    numbers = [[random.randrange(len(data) - t)] for _ in range(batch_size)]
    return _cut(data, torch.tensor(numbers), t)


@get_batch.fault(
    "time_first", "The batch is turned: `(T, B)` instead of `(B, T)`."
)
def _(data, batch_size, t, generator=None):
    inputs, targets = _cut(data, _draw(data, batch_size, t, generator), t)
    return inputs.T, targets.T


@get_batch.fault(
    "always_int64", "The batch is int64 whatever the text is; keep its dtype."
)
def _(data, batch_size, t, generator=None):
    inputs, targets = _cut(data, _draw(data, batch_size, t, generator), t)
    return inputs.long(), targets.long()


@get_batch.fault(
    "length_unchecked",
    "A text that is too short is not refused, so the error comes from deep inside and "
    "does not say what is wrong.",
)
def _(data, batch_size, t, generator=None):
    starts = torch.randint(len(data) - t, (batch_size, 1), generator=generator)
    pieces = data[starts + torch.arange(t + 1)]
    return pieces[:, :-1], pieces[:, 1:]


# learning_rate ----------------------------------------------------------------------


def _rate(step, peak, floor, warmup_steps, total_steps):
    """By the half-angle formula, beside the usual one with 1 + cos."""
    if step < warmup_steps:
        return peak * step / warmup_steps
    part = min((step - warmup_steps) / (total_steps - warmup_steps), 1)
    up = math.cos(math.pi / 2 * part) ** 2
    return up * peak + (1 - up) * floor


def _agree_rate(t, answer, step, peak, floor, warmup_steps, total_steps):
    found = t.call(answer, step, peak, floor, warmup_steps, total_steps)
    if not isinstance(found, numbers.Real):
        what = "None: is a `return` missing?" if found is None else type(found).__name__
        raise Unmet(f"The rate is {what} Return a float.".replace("r R", "r. R"))
    t.close(
        torch.tensor(float(found), dtype=torch.float64),
        _rate(step, peak, floor, warmup_steps, total_steps),
        f"the rate at step {step}",
        tolerance=1e-9 * peak,
    )


@learning_rate.requires(
    "it rises in a straight line from 0 and reaches the peak at step warmup_steps",
    "Which part of the way has step 1 behind it, if the whole way has `warmup_steps`?",
)
def _(answer, t):
    for step in (0, 1, 2, 3, 4):
        _agree_rate(t, answer, step, 3e-3, 2e-4, 4, 20)
    for step in (1, 7, 50, 99):
        _agree_rate(t, answer, step, 0.5, 0.1, 100, 1000)


@learning_rate.requires(
    "from there it falls along half a cosine",
    "First find the part of the fall that lies behind: 0 at step `warmup_steps`, 1 at "
    "step `total_steps`. The cosine of π times it goes from 1 to −1; you need something "
    "that goes from 1 to 0.",
)
def _(answer, t):
    for step in (8, 12, 16):
        _agree_rate(t, answer, step, 3e-3, 2e-4, 4, 20)
    for step in (100, 101, 400, 550, 700, 999):
        _agree_rate(t, answer, step, 0.5, 0.1, 100, 1000)


@learning_rate.requires(
    "at step total_steps it is the floor, and stays there",
    "A cosine goes up again after its lowest point.",
)
def _(answer, t):
    for step in (20, 21, 30, 36, 52, 1000):
        _agree_rate(t, answer, step, 3e-3, 2e-4, 4, 20)


@learning_rate.requires(
    "without warm-up it starts at the peak",
    "Nothing may be divided by `warmup_steps` when it is 0.",
)
def _(answer, t):
    for step in (0, 1, 5, 9, 10, 11, 15, 25):
        _agree_rate(t, answer, step, 1e-2, 1e-3, 0, 10)


@learning_rate.requires("a floor of 0, and one as high as the peak, work too")
def _(answer, t):
    for step in (0, 1, 3, 5, 8, 11, 12, 14):
        _agree_rate(t, answer, step, 0.2, 0.0, 3, 12)
        _agree_rate(t, answer, step, 0.2, 0.2, 3, 12)


def _schedule(warm=None, part=None, shape=None, after=None):
    """A right schedule, of which one piece can be replaced."""
    warm = warm or (lambda s, peak, floor, w: peak * s / w)
    part = part or (lambda s, w, n: (s - w) / (n - w))
    shape = shape or (lambda p, hi, lo: lo + (hi - lo) * (1 + math.cos(math.pi * p)) / 2)
    after = after or (lambda s, peak, floor, w, n: floor)

    def rate(step, peak, floor, warmup_steps, total_steps):
        if step < warmup_steps:
            return warm(step, peak, floor, warmup_steps)
        if step >= total_steps:
            return after(step, peak, floor, warmup_steps, total_steps)
        return shape(part(step, warmup_steps, total_steps), peak, floor)

    return rate


def _cosine(part, peak, floor):
    return floor + (peak - floor) * (1 + math.cos(math.pi * part)) / 2


learning_rate.fault(
    "one_step_early",
    "The warm-up counts from 1, so it reaches the peak one step too early. In this "
    "course the first update is step 1, and step 0 has the rate 0.",
    _schedule(warm=lambda s, peak, floor, w: peak * (s + 1) / w),
)
learning_rate.fault(
    "one_step_late",
    "The warm-up is one step behind: step 1 already has a part of the way behind it.",
    _schedule(warm=lambda s, peak, floor, w: peak * max(s - 1, 0) / w),
)
learning_rate.fault(
    "warmup_plus_one",
    "The warm-up is divided by `warmup_steps + 1`, and does not reach the peak in a "
    "straight line.",
    _schedule(warm=lambda s, peak, floor, w: peak * (s + 1) / (w + 1)),
)
learning_rate.fault(
    "warmup_slope",
    "The warm-up rises by `1 / (warmup_steps + 1)` a step; the last one is then larger.",
    _schedule(warm=lambda s, peak, floor, w: peak * s / (w + 1)),
)
learning_rate.fault(
    "warmup_from_floor",
    "The warm-up starts at the floor. It starts at 0, below the floor.",
    _schedule(warm=lambda s, peak, floor, w: floor + (peak - floor) * s / w),
)
learning_rate.fault(
    "warmup_at_least_floor",
    "The rate is kept above the floor during the warm-up as well. The floor is for the "
    "end.",
    _schedule(warm=lambda s, peak, floor, w: max(floor, peak * s / w)),
)
learning_rate.fault(
    "warmup_constant",
    "The rate is the peak from the first step: there is no warm-up.",
    _schedule(warm=lambda s, peak, floor, w: peak),
)
learning_rate.fault(
    "warmup_whole_numbers",
    "The step is divided with `//`, so that the rate is 0 until the warm-up ends.",
    _schedule(warm=lambda s, peak, floor, w: peak * (s // w)),
)


@learning_rate.fault(
    "warmup_multiplied",
    "The cosine already falls during the warm-up. It starts when the warm-up ends.",
)
def _(step, peak, floor, warmup_steps, total_steps):
    warm = min(step / warmup_steps, 1) if warmup_steps else 1
    return warm * _cosine(min(step / total_steps, 1), peak, floor)


@learning_rate.fault(
    "warmup_not_subtracted",
    "The fall counts steps from the very start, so that the rate jumps down when the "
    "warm-up ends.",
)
def _(step, peak, floor, warmup_steps, total_steps):
    if step < warmup_steps:
        return peak * step / warmup_steps
    return _cosine(min(step / total_steps, 1), peak, floor)


learning_rate.fault(
    "never_reaches_floor",
    "The steps after the warm-up are divided by `total_steps`, so the fall is not "
    "finished at step `total_steps`. It has `total_steps - warmup_steps` steps.",
    _schedule(part=lambda s, w, n: (s - w) / n),
)


@learning_rate.fault(
    "total_after_warmup",
    "The fall takes `total_steps` steps after the warm-up. Here `total_steps` counts the "
    "warm-up as well.",
)
def _(step, peak, floor, warmup_steps, total_steps):
    if step < warmup_steps:
        return peak * step / warmup_steps
    return _cosine(min((step - warmup_steps) / total_steps, 1), peak, floor)


learning_rate.fault(
    "floor_one_step_early",
    "The fall is over one step too early: the floor belongs to step `total_steps`.",
    _schedule(part=lambda s, w, n: min((s - w) / (n - w - 1), 1)),
)
learning_rate.fault(
    "fall_one_step_ahead",
    "The fall is one step ahead: at step `warmup_steps` the rate is the peak itself.",
    _schedule(part=lambda s, w, n: (s - w + 1) / (n - w)),
)
learning_rate.fault(
    "linear_fall",
    "The rate falls in a straight line. A cosine is asked for: level at both ends, steep "
    "between.",
    _schedule(shape=lambda p, hi, lo: hi + (lo - hi) * p),
)
learning_rate.fault(
    "quarter_cosine",
    "The cosine runs over a quarter of its period, from 1 to 0, and ends steeply. Half a "
    "period is level at both ends.",
    _schedule(shape=lambda p, hi, lo: lo + (hi - lo) * math.cos(math.pi / 2 * p)),
)
learning_rate.fault(
    "whole_cosine",
    "The cosine runs over a whole period, so that the rate comes back to the peak.",
    _schedule(shape=lambda p, hi, lo: _cosine(2 * p, hi, lo)),
)
learning_rate.fault(
    "degrees",
    "The angle is in degrees; `math.cos` takes radians.",
    _schedule(shape=lambda p, hi, lo: lo + (hi - lo) * (1 + math.cos(180 * p)) / 2),
)
learning_rate.fault(
    "not_halved",
    "1 + cos goes from 2 to 0. Without a half the fall starts at twice its height.",
    _schedule(shape=lambda p, hi, lo: lo + (hi - lo) * (1 + math.cos(math.pi * p))),
)
learning_rate.fault(
    "floor_added",
    "The floor is added to a cosine of the full height, so the rate starts above the "
    "peak. The cosine has the height from the floor to the peak.",
    _schedule(shape=lambda p, hi, lo: lo + hi * (1 + math.cos(math.pi * p)) / 2),
)
learning_rate.fault(
    "floor_cut",
    "The cosine falls to 0 and is cut off at the floor. It is to end at the floor.",
    _schedule(shape=lambda p, hi, lo: max(lo, hi * (1 + math.cos(math.pi * p)) / 2)),
)
learning_rate.fault(
    "exponential",
    "The rate falls by a constant factor. A cosine is asked for.",
    _schedule(
        shape=lambda p, hi, lo: hi * (lo / hi) ** p if lo else hi * (1 - p),
    ),
)
learning_rate.fault(
    "upside_down",
    "The cosine has the wrong sign: the rate rises from the floor to the peak.",
    _schedule(shape=lambda p, hi, lo: _cosine(1 - p, hi, lo)),
)
learning_rate.fault(
    "rises_again",
    "After `total_steps` the cosine goes up again. From there on it is the floor.",
    _schedule(after=lambda s, hi, lo, w, n: _cosine((s - w) / (n - w), hi, lo)),
)
learning_rate.fault(
    "zero_at_the_end",
    "After `total_steps` the rate is 0. It stays at the floor.",
    _schedule(after=lambda s, hi, lo, w, n: 0.0),
)
learning_rate.fault(
    "relative",
    "This is the factor on the peak, as PyTorch's `LambdaLR` wants it; the rate itself "
    "is asked for.",
    lambda step, peak, floor, warmup_steps, total_steps: (
        _rate(step, peak, floor, warmup_steps, total_steps) / peak
    ),
)


@learning_rate.fault(
    "divides_by_zero",
    "It divides by `warmup_steps` even when there is no warm-up, and 0 has no share.",
)
def _(step, peak, floor, warmup_steps, total_steps):
    if step <= warmup_steps:
        return peak * step / warmup_steps
    part = min((step - warmup_steps) / (total_steps - warmup_steps), 1)
    return _cosine(part, peak, floor)


@learning_rate.fault(
    "none_without_warmup",
    "With no warm-up the first step gets the rate 0. It gets the peak.",
)
def _(step, peak, floor, warmup_steps, total_steps):
    if step <= warmup_steps:
        return peak * step / max(warmup_steps, 1)
    part = min((step - warmup_steps) / (total_steps - warmup_steps), 1)
    return _cosine(part, peak, floor)
