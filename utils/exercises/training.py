"""Lesson 09: the loss, batches, the learning rate, AdamW, clipping."""

import copy
import math
import numbers

import torch
from torch import nn
from torch.nn import functional as F

from utils.check.case import Unmet, dtype, snapshot
from utils.check.exercise import Exercise, Joint, reference_part
from utils.probe import probe, probe_ids, strided

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
    turned, flat = targets.T, targets.flatten()  # as many, in another shape
    for wrong, size in (
        (turned, 6),
        (flat, 12),
        (targets[:, :4], 4),
        (targets[:1], 1),
        (targets[0], 6),
    ):
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


@cross_entropy.fault("detached", "The result is cut from the graph.")
def _(logits, targets):
    return _losses(logits, targets).mean().detach()


@cross_entropy.fault(
    "sum_detached",
    "The logarithm of the sum is cut from the graph, so that no gradient pushes the "
    "wrong tokens down.",
)
def _(logits, targets):
    _fitting(logits, targets)
    right = logits.gather(-1, targets[..., None]).squeeze(-1)
    return (logits.logsumexp(-1).detach() - right).mean()


@cross_entropy.fault("float32", "The loss is float32 whatever the logits are.")
def _(logits, targets):
    return _losses(logits.float(), targets).mean()


@cross_entropy.fault(
    "counts_compared",
    "The numbers of targets are compared instead of the shapes. Targets that are turned "
    "round, (T, B), are as many, and each would be asked of another token.",
)
def _(logits, targets):
    if targets.numel() * logits.shape[-1] != logits.numel():
        raise ValueError(f"{tuple(targets.shape)} do not fit {tuple(logits.shape)}")
    targets = targets.reshape(logits.shape[:-1])
    return _losses(logits, targets).mean()


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
    t.equal(
        inputs[:, 1:].clone(), targets[:, :-1].clone(), "the inputs after the first"
    )


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
    "without_replacement",
    "No two rows start at one place: the starts are drawn without putting them back. Each "
    "row is to be independent of the others, and a short text has fewer places than rows.",
)
def _(data, batch_size, t, generator=None):
    _draw(data, 1, t, _generator())
    starts = torch.randperm(len(data) - t, generator=generator)[:batch_size]
    return _cut(data, starts[:, None], t)


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


@get_batch.fault("time_first", "The batch is turned: `(T, B)` instead of `(B, T)`.")
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
        if found is None:
            raise Unmet("The rate is None: is a `return` missing?")
        raise Unmet(f"The rate is of type {type(found).__name__}; return a float.")
    t.close(
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
def _(answer, t):
    for step in (2, 1, 3, 4, 0):
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
    shape = shape or (
        lambda p, hi, lo: lo + (hi - lo) * (1 + math.cos(math.pi * p)) / 2
    )
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


def _agree_adamw(t, answer, steps, seed=0, kind=torch.float32, scale=1.0, **options):
    """`steps` updates of parameters of several shapes, beside torch's own."""

    def take_steps(steps, **options):
        parameters = _parameters(seed=seed, kind=kind)
        _train(answer, parameters, steps, options, scale=scale)
        return tuple(p.detach().clone() for p in parameters)

    options = {**PLAIN, **options}
    found = t.mutate(take_steps, steps=steps, **options)
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
        t.close(
            actual,
            expected,
            f"parameter {i} after {steps} step{'s' * (steps > 1)}",
            like=_parameters(kind=kind)[i],
            tolerance={torch.bfloat16: 0.1, torch.float64: 1e-10}.get(kind, 2e-5),
        )


@adamw.requires(
    "the first step moves each number by lr against its gradient",
    "After one step the corrected mean is the gradient itself, and the corrected mean "
    "square its square.",
)
def _(answer, t):
    _agree_adamw(t, answer, 1)
    _agree_adamw(t, answer, 1, seed=20, lr=0.02, betas=(0.9, 0.999))


@adamw.requires(
    "later steps use running means of the gradient and of its square, each corrected",
    "Both means start at 0 and are therefore too small at first. What is the sum of the "
    "weights that the gradients have in them after n steps?",
)
def _(answer, t):
    _agree_adamw(t, answer, 2)
    _agree_adamw(t, answer, 7, seed=30)
    _agree_adamw(t, answer, 5, seed=40, betas=(0.95, 0.6))
    _agree_adamw(t, answer, 3, seed=50, betas=(0.0, 0.9))


@adamw.requires(
    "eps is added to the root of the corrected square",
    "Outside of the root, after the correction. With a large eps the order shows.",
)
def _(answer, t):
    _agree_adamw(t, answer, 1, eps=0.3)
    _agree_adamw(t, answer, 6, seed=60, eps=0.3)
    _agree_adamw(t, answer, 4, seed=70, scale=1e-6, eps=1e-5)


@adamw.requires(
    "weight decay takes lr · weight_decay of the old parameter, beside Adam's step",
    "Decoupled: the decay does not enter the two means.",
)
def _(answer, t):
    _agree_adamw(t, answer, 1, weight_decay=0.5)
    _agree_adamw(t, answer, 6, seed=80, lr=0.3, weight_decay=0.7)
    _agree_adamw(t, answer, 4, seed=90, weight_decay=0.5, scale=0.0)


@adamw.requires(
    "without options it does what torch's does without options",
    "Compare the defaults of lr, betas, eps and weight_decay with those asked for.",
)
def _(answer, t):
    def take_steps(steps, scale):
        parameters = _parameters(seed=95)
        _train(answer, parameters, steps, {}, scale=scale)
        return tuple(p.detach().clone() for p in parameters)

    for scale in (1.0, 1e-6):  # beside gradients of 1e-6 the default eps shows
        found = t.mutate(take_steps, steps=3, scale=scale)
        truth = _parameters(seed=95)
        _train(_torch_adamw, truth, 3, {}, scale=scale)
        for i, (actual, expected) in enumerate(zip(found, truth, strict=True)):
            t.close(actual, expected, f"parameter {i}", tolerance=2e-6)


@adamw.requires(
    "each group has its own options, and they are read anew at every step",
    "`self.param_groups` is a list of dicts; a schedule writes a new `lr` into them "
    "between two steps.",
)
def _(answer, t):
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

    found = t.mutate(take_steps, steps=3)
    truth = take_steps(3, _torch_adamw)
    for i, (actual, expected) in enumerate(zip(found, truth, strict=True)):
        t.close(actual, expected, f"parameter {i}", tolerance=2e-5)


@adamw.requires(
    "a parameter without a gradient stays as it is, and counts its own steps",
    "A layer that was not used has `grad` None. No decay either, and when its first "
    "gradient comes, that is its step 1.",
)
def _(answer, t):
    def take_steps(without, build=answer):
        parameters = _parameters(seed=97)
        optimizer = build(parameters, **{**PLAIN, "weight_decay": 0.5})
        for step, left_out in enumerate(without):
            _set_gradients(parameters, step, without=left_out)
            optimizer.step()
        return tuple(p.detach().clone() for p in parameters)

    for without in ([(1,), (1,), (), (0,), ()], [(1,)]):
        found = t.mutate(take_steps, without=without)
        truth = take_steps(without, _torch_adamw)
        for i, (actual, expected) in enumerate(zip(found, truth, strict=True)):
            t.close(actual, expected, f"parameter {i}", tolerance=2e-5)


@adamw.requires(
    "parameters change in place, gradients do not, and no graph is kept",
    "The model holds the very tensors that the optimizer was given. Write into them, "
    "under `torch.no_grad()`.",
)
def _(answer, t):
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

    changes, same, graph = t.mutate(take_steps, steps=2)
    t.true(not changes, f"The gradients were {changes}. Others may still read them.")
    t.true(same, "The parameters moved to new memory instead of changing in place.")
    t.true(not graph, "A graph or its gradient hangs on the parameters or the state.")


@adamw.requires(
    "two optimizers know nothing of each other",
)
def _(answer, t):
    def take_turns(steps):
        one, other = _parameters(seed=99), _parameters(seed=104)
        first, second = answer(one, **PLAIN), answer(other, **{**PLAIN, "lr": 0.3})
        for step in range(steps):
            for parameters, optimizer in ((one, first), (other, second)):
                _set_gradients(parameters, step, seed=len(parameters))
                optimizer.step()
        return tuple(p.detach().clone() for p in (*one, *other))

    found = t.mutate(take_turns, steps=3)
    one, other = _parameters(seed=99), _parameters(seed=104)
    _train(_torch_adamw, one, 3, PLAIN, seed=len(one))
    _train(_torch_adamw, other, 3, {**PLAIN, "lr": 0.3}, seed=len(other))
    for i, (actual, expected) in enumerate(zip(found, (*one, *other), strict=True)):
        t.close(actual, expected, f"parameter {i}", tolerance=2e-5)


@adamw.requires(
    "state_dict() holds all that the next step needs",
    "What you keep between steps belongs into `self.state[p]`. Training is interrupted "
    "and goes on from a file; what is kept elsewhere is lost.",
)
def _(answer, t):
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

    found = t.mutate(stop_and_go_on, steps=3)
    truth = _parameters(seed=105)
    _train(_torch_adamw, truth, 6, {**PLAIN, "weight_decay": 0.5})
    for i, (actual, expected) in enumerate(zip(found, truth, strict=True)):
        t.close(actual, expected, f"parameter {i}", tolerance=2e-5)


@adamw.requires(
    "float64 and bfloat16 parameters, and gradients of any layout, work",
    "`torch.zeros_like(p)` has the dtype, the layout and the device of p; "
    "`torch.zeros(p.shape)` has its own.",
)
def _(answer, t):
    _agree_adamw(t, answer, 4, seed=110, kind=torch.float64, weight_decay=0.3)
    _agree_adamw(t, answer, 3, seed=120, kind=torch.bfloat16, lr=0.05)

    def take_steps(steps, build=answer):
        p = nn.Parameter(strided(probe(3, 4)))
        optimizer = build([p], **PLAIN)
        for step in range(steps):
            p.grad = probe(4, 3, seed=step).T
            optimizer.step()
        return p.detach().clone()

    found = t.mutate(take_steps, steps=2)
    t.close(found, take_steps(2, _torch_adamw), "a strided parameter", tolerance=2e-5)


@adamw.requires("what it keeps lies where the parameter lies")
def _(answer, t):
    def take_a_step(p, gradient):
        p = nn.Parameter(p)
        p.grad = gradient
        optimizer = answer([p], **PLAIN)
        optimizer.step()
        # Writing into a tensor on the CPU is let through here, and is not on a GPU.
        kept = [v for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
        elsewhere = [v for v in kept if v.ndim and v.device != p.device]
        return elsewhere[0] if elsewhere else p.detach()

    t.trace.append("a step elsewhere")
    t.any_device(take_a_step, probe(3, 4), probe(3, 4, seed=1))


class _AdamW(torch.optim.Optimizer):
    """Right, in small pieces, for the faults to replace one of them."""

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    ):
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.of(p), group)

    def of(self, p):
        if not self.state[p]:
            self.state[p].update(n=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        return self.state[p]

    def update(self, p, g, state, group):
        self.means(g, state, group)
        change = self.change(state, group)
        self.decay(p, group)
        p.sub_(group["lr"] * change)

    def means(self, g, state, group):
        beta_1, beta_2 = group["betas"]
        state["n"] += 1
        state["m"] = beta_1 * state["m"] + (1 - beta_1) * g
        state["v"] = beta_2 * state["v"] + (1 - beta_2) * g**2

    def corrections(self, state, group):
        return [1 - beta ** state["n"] for beta in group["betas"]]

    def change(self, state, group):
        one, two = self.corrections(state, group)
        return state["m"] / one / ((state["v"] / two).sqrt() + group["eps"])

    def decay(self, p, group):
        p.mul_(1 - group["lr"] * group["weight_decay"])


@adamw.fault(
    "no_correction",
    "The two means are not corrected. They start at 0, so that the first steps have the "
    "wrong size.",
)
class _NoCorrection(_AdamW):
    def corrections(self, state, group):
        return 1, 1


@adamw.fault(
    "mean_not_corrected",
    "Only the mean square is corrected. The mean of the gradient starts at 0 too.",
)
class _MeanNotCorrected(_AdamW):
    def corrections(self, state, group):
        return 1, super().corrections(state, group)[1]


@adamw.fault(
    "square_not_corrected",
    "Only the mean is corrected. The mean square starts at 0 too, so the first steps "
    "come out too large.",
)
class _SquareNotCorrected(_AdamW):
    def corrections(self, state, group):
        return super().corrections(state, group)[0], 1


@adamw.fault(
    "correction_counts_from_zero",
    "The step number in the correction counts from 0. The first correction is then a "
    "division by 0.",
)
class _FromZero(_AdamW):
    def corrections(self, state, group):
        return [1 - torch.tensor(b) ** (state["n"] - 1) for b in group["betas"]]


@adamw.fault(
    "correction_one_ahead",
    "The step number in the correction is one too large.",
)
class _OneAhead(_AdamW):
    def corrections(self, state, group):
        return [1 - b ** (state["n"] + 1) for b in group["betas"]]


@adamw.fault(
    "correction_without_power",
    "The correction is 1 − β at every step. It is 1 − β to the power of the step number, "
    "and goes to 1.",
)
class _NoPower(_AdamW):
    def corrections(self, state, group):
        return [1 - b for b in group["betas"]]


@adamw.fault(
    "betas_exchanged",
    "The two betas are exchanged: the first belongs to the gradient, the second to its "
    "square.",
)
class _Exchanged(_AdamW):
    def update(self, p, g, state, group):
        super().update(p, g, state, {**group, "betas": group["betas"][::-1]})


@adamw.fault(
    "old_and_new_exchanged",
    "The new gradient gets the weight β and the old mean 1 − β. It is the other way "
    "round: β says how much is kept.",
)
class _OldAndNew(_AdamW):
    def means(self, g, state, group):
        super().means(g, state, {"betas": [1 - b for b in group["betas"]]})


@adamw.fault(
    "not_weighted",
    "The new gradient enters with the weight 1, so that the sums are no means.",
)
class _NotWeighted(_AdamW):
    def means(self, g, state, group):
        beta_1, beta_2 = group["betas"]
        state["n"] += 1
        state["m"] = beta_1 * state["m"] + g
        state["v"] = beta_2 * state["v"] + g**2


@adamw.fault(
    "mean_not_weighted",
    "The new gradient enters the first mean with the weight 1, as in gradient descent "
    "with momentum. Here its weight is 1 − β₁.",
)
class _MeanNotWeighted(_AdamW):
    def means(self, g, state, group):
        old = state["m"]
        super().means(g, state, group)
        state["m"] = group["betas"][0] * old + g


@adamw.fault(
    "first_mean_kept",
    "The first mean starts as the first gradient itself instead of at zero, and is "
    "corrected all the same.",
)
class _FirstMeanKept(_AdamW):
    def means(self, g, state, group):
        if state["n"] == 0:
            state["m"] = g.clone()
        super().means(g, state, group)


@adamw.fault("no_square", "The second mean is one of the gradient's size, not square.")
class _NoSquare(_AdamW):
    def means(self, g, state, group):
        old = state["v"]
        super().means(g, state, group)
        beta = group["betas"][1]
        state["v"] = beta * old + (1 - beta) * g.abs()


@adamw.fault(
    "square_of_mean",
    "The second mean is fed with the square of the running mean instead of that of the "
    "gradient.",
)
class _SquareOfMean(_AdamW):
    def means(self, g, state, group):
        old = state["v"]
        super().means(g, state, group)
        beta = group["betas"][1]
        state["v"] = beta * old + (1 - beta) * state["m"] ** 2


@adamw.fault("no_root", "The mean is divided by the mean square without its root.")
class _NoRoot(_AdamW):
    def change(self, state, group):
        one, two = self.corrections(state, group)
        return state["m"] / one / (state["v"] / two + group["eps"])


@adamw.fault(
    "no_momentum",
    "The gradient itself is divided by the root. Adam takes the running mean.",
)
class _NoMomentum(_AdamW):
    def means(self, g, state, group):
        super().means(g, state, group)
        state["m"] = g * self.corrections(state, group)[0]


@adamw.fault(
    "no_memory",
    "The means start anew at every step, so only the last gradient counts. Keep them in "
    "`self.state[p]`, and begin with zeros only once.",
)
class _NoMemory(_AdamW):
    def of(self, p):
        self.state.pop(p, None)
        return super().of(p)


@adamw.fault("uphill", "The change is added: the loss is climbed instead of descended.")
class _Uphill(_AdamW):
    def change(self, state, group):
        return -super().change(state, group)


@adamw.fault(
    "eps_inside_root",
    "eps is added under the root. Adam adds it to the root, outside.",
)
class _EpsInside(_AdamW):
    def change(self, state, group):
        one, two = self.corrections(state, group)
        return state["m"] / one / (state["v"] / two + group["eps"]).sqrt()


@adamw.fault(
    "eps_before_correction",
    "eps is added to the root before the correction, which changes its size in the first "
    "steps. Some libraries do so; in algorithm 1 of Adam's authors it comes after.",
)
class _EpsBefore(_AdamW):
    def change(self, state, group):
        one, two = self.corrections(state, group)
        return state["m"] / one * two**0.5 / (state["v"].sqrt() + group["eps"])


@adamw.fault("no_eps", "eps is missing: where a gradient is 0, that is 0/0, and NaN.")
class _NoEps(_AdamW):
    def change(self, state, group):
        return super().change(state, {**group, "eps": 0.0})


@adamw.fault(
    "eps_fixed",
    "eps is 1e-8 whatever the option says. Read it from the group, like the others.",
)
class _EpsFixed(_AdamW):
    def change(self, state, group):
        return super().change(state, group | {"eps": 1e-8})


@adamw.fault(
    "eps_as_minimum",
    "eps is used as the least value of the root instead of being added to it.",
)
class _EpsMinimum(_AdamW):
    def change(self, state, group):
        one, two = self.corrections(state, group)
        return state["m"] / one / (state["v"] / two).sqrt().clamp(min=group["eps"])


@adamw.fault(
    "l2_in_gradient",
    "The decay is added to the gradient, which is L2 regularisation. It then goes "
    "through both means, and numbers with large gradients hardly decay: the very thing "
    "that AdamW was made to avoid.",
)
class _L2(_AdamW):
    def update(self, p, g, state, group):
        g = g + group["weight_decay"] * p
        super().update(p, g, state, {**group, "weight_decay": 0.0})


@adamw.fault("no_decay", "`weight_decay` is not used.")
class _NoDecay(_AdamW):
    def decay(self, p, group):
        pass


@adamw.fault(
    "decay_without_lr",
    "The decay is not multiplied with the learning rate, so a schedule does not reach "
    "it.",
)
class _DecayWithoutLr(_AdamW):
    def decay(self, p, group):
        p.mul_(1 - group["weight_decay"])


@adamw.fault(
    "decay_after",
    "The decay is taken of the parameter after Adam's step, so it shrinks the step too. "
    "It is taken of the old value.",
)
class _DecayAfter(_AdamW):
    def update(self, p, g, state, group):
        super().update(p, g, state, {**group, "weight_decay": 0.0})
        self.decay(p, group)


@adamw.fault(
    "vectors_not_decayed",
    "Only matrices decay. Sparing biases and norms is the caller's choice, who makes "
    "groups of parameters for it.",
)
class _VectorsNotDecayed(_AdamW):
    def decay(self, p, group):
        if p.ndim > 1:
            super().decay(p, group)


@adamw.fault(
    "decay_divided",
    "The decay is added to the corrected mean and divided by the root with it. "
    "Decoupled means that nothing divides it.",
)
class _DecayDivided(_AdamW):
    def update(self, p, g, state, group):
        self.means(g, state, group)
        one, two = self.corrections(state, group)
        up = state["m"] / one + group["weight_decay"] * p
        p.sub_(group["lr"] * up / ((state["v"] / two).sqrt() + group["eps"]))


@adamw.fault("grows", "The decay has the wrong sign: parameters grow.")
class _Grows(_AdamW):
    def decay(self, p, group):
        p.mul_(1 + group["lr"] * group["weight_decay"])


@adamw.fault(
    "decay_of_sign",
    "The decay takes the same amount of every number. It takes a share of each.",
)
class _DecayOfSign(_AdamW):
    def decay(self, p, group):
        p.sub_(group["lr"] * group["weight_decay"] * p.sign())


@adamw.fault(
    "decay_without_gradient",
    "Parameters that have no gradient decay all the same. A layer that is not trained "
    "stays as it is.",
)
class _DecaysAll(_AdamW):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    self.decay(p, group)
        super().step()


@adamw.fault(
    "missing_gradient_is_zero",
    "A missing gradient is taken as one of zeros, so the parameter decays and goes on by "
    "its old momentum. Leave it out of the step.",
)
class _MissingIsZero(_AdamW):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g = torch.zeros_like(p) if p.grad is None else p.grad
                self.update(p, g, self.of(p), group)


@adamw.fault(
    "missing_gradient_crashes",
    "A parameter without a gradient stops it: `grad` is None then.",
)
class _MissingCrashes(_AdamW):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, p.grad, self.of(p), group)


@adamw.fault(
    "one_count_for_all",
    "One step number serves all parameters. One that gets its first gradient late is at "
    "its own step 1, and is corrected for that.",
)
class _OneCount(_AdamW):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.steps = 0

    def step(self):
        self.steps += 1
        super().step()

    def corrections(self, state, group):
        return [1 - beta**self.steps for beta in group["betas"]]


@adamw.fault(
    "counted_per_parameter_call",
    "The step number grows with every parameter instead of with every step.",
)
class _CountedPerCall(_AdamW):
    calls = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.calls = 0

    def corrections(self, state, group):
        self.calls += 1
        return [1 - beta**self.calls for beta in group["betas"]]


@adamw.fault(
    "first_group_only",
    "Only the first group's options count. Every group has its own.",
)
class _FirstGroup(_AdamW):
    def update(self, p, g, state, group):
        super().update(p, g, state, self.param_groups[0])


@adamw.fault(
    "first_group_updated",
    "Only the first group's parameters are updated.",
)
class _FirstUpdated(_AdamW):
    def update(self, p, g, state, group):
        if group is self.param_groups[0]:
            super().update(p, g, state, group)


@adamw.fault(
    "options_frozen",
    "The options are those of the constructor. A schedule changes `lr` in "
    "`self.param_groups`, and groups bring their own.",
)
class _Frozen(_AdamW):
    def update(self, p, g, state, group):
        super().update(p, g, state, self.defaults)


@adamw.fault(
    "state_elsewhere",
    "The means are kept outside of `self.state`, so `state_dict()` does not hold them: "
    "training that goes on from a file starts with empty means.",
)
class _Elsewhere(_AdamW):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.kept = {}

    def of(self, p):
        if p not in self.kept:
            zeros = torch.zeros_like(p)
            self.kept[p] = {"n": 0, "m": zeros, "v": zeros}
        return self.kept[p]


@adamw.fault(
    "count_elsewhere",
    "The step number is kept outside of `self.state`, so `state_dict()` does not hold "
    "it: after loading, the correction begins anew.",
)
class _CountElsewhere(_AdamW):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.count = {}

    def corrections(self, state, group):
        key = id(state)
        self.count[key] = self.count.get(key, 0) + 1
        return [1 - beta ** self.count[key] for beta in group["betas"]]


@adamw.fault(
    "gradient_changed",
    "The gradient is changed in place. Others may still read it.",
)
class _GradientChanged(_AdamW):
    def update(self, p, g, state, group):
        super().update(p, g, state, group)
        g.mul_(1 - group["betas"][0])


@adamw.fault(
    "gradients_cleared",
    "The gradients are cleared in `step()`. That is what `zero_grad()` is for.",
)
class _Cleared(_AdamW):
    def step(self):
        super().step()
        self.zero_grad()


@adamw.fault(
    "not_in_place",
    "A new tensor is computed and bound to a name; the parameter itself stays as it was.",
)
class _NotInPlace(_AdamW):
    def update(self, p, g, state, group):
        super().update(p.clone(), g, state, group)


@adamw.fault(
    "new_memory",
    "`p.data` is bound to a new tensor. Whoever else holds the parameter's memory, a tied "
    "head, a view, keeps the old numbers.",
)
class _NewMemory(_AdamW):
    def update(self, p, g, state, group):
        new = p.detach().clone()
        super().update(new, g, state, group)
        p.data = new


@adamw.fault(
    "graph_kept",
    "The update is recorded as if it were part of the model. It belongs under "
    "`torch.no_grad()`, and PyTorch refuses to write into a parameter otherwise.",
)
class _Graph(_AdamW):
    @torch.enable_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.of(p), group)


@adamw.fault(
    "other_defaults",
    "The defaults differ from those that are asked for.",
)
class _Defaults(_AdamW):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1):
        super().__init__(params, lr, betas, eps, weight_decay)


@adamw.fault(
    "defaults_without_decay",
    "Without options nothing decays: the default of `weight_decay` is 0.01.",
)
class _NoDefaultDecay(_AdamW):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, lr, betas, eps, weight_decay)


@adamw.fault(
    "cpu_state",
    "The means are made on the CPU wherever the parameter is.",
)
class _CpuState(_AdamW):
    def of(self, p):
        if not self.state[p]:
            zeros = torch.zeros(p.shape, dtype=p.dtype)
            self.state[p].update(n=0, m=zeros, v=zeros.clone())
        return self.state[p]


@adamw.fault(
    "means_are_one",
    "Both means are one tensor: each is written over the other.",
)
class _OneTensor(_AdamW):
    def of(self, p):
        if not self.state[p]:
            zeros = torch.zeros_like(p)
            self.state[p].update(n=0, m=zeros, v=zeros)
        return self.state[p]

    def means(self, g, state, group):
        beta_1, beta_2 = group["betas"]
        state["n"] += 1
        state["m"].mul_(beta_1).add_((1 - beta_1) * g)
        state["v"].mul_(beta_2).add_((1 - beta_2) * g**2)


@adamw.fault(
    "first_gradient_kept",
    "The mean starts as the first gradient itself instead of at zero, and is corrected "
    "all the same.",
)
class _FirstKept(_AdamW):
    def means(self, g, state, group):
        if state["n"] == 0:
            state["m"], state["v"] = g.clone(), g**2
        super().means(g, state, group)


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


def _clip(t, answer, parameters, share, handed=list, relative=None):
    """Clip to `share` of the length, and compare with one long vector, rescaled."""
    length = _length(parameters)
    max_norm = share * length if length else 1.0
    given = [p.grad for p in parameters]
    before = [None if g is None else g.clone() for g in given]
    values = [p.detach().clone() for p in parameters]

    def clip(max_norm):
        return answer(handed(parameters), max_norm)

    clip.__name__ = "clip_gradients"
    total = t.mutate(clip, max_norm=max_norm)
    t.trace.append(snapshot(tuple(p.grad for p in parameters)))
    factor = min(1.0, max_norm / length) if length else 1.0
    for i, (p, old) in enumerate(zip(parameters, before, strict=True)):
        if old is None:
            t.true(p.grad is None, f"Parameter {i} had no gradient, and has one now.")
            continue
        what = f"the gradient of parameter {i} (length {length:.3g}, {max_norm=:.3g})"
        share_of_error = relative or (2e-6 if p.dtype == torch.float64 else 1e-5)
        loose = share_of_error * float(old.abs().max()) * factor
        t.close(p.grad, factor * old.double(), what, like=old, tolerance=loose)
    if total is None:
        raise Unmet("The length before the clipping must be returned; it is None.")
    if not isinstance(total, (torch.Tensor, numbers.Real)):
        raise Unmet(f"The result is of type {type(total).__name__}; a number is due.")
    total = torch.as_tensor(total)
    t.close(total.double(), length, "the length returned", tolerance=1e-2 * length + 1e-9
            if relative else 1e-5 * length + 1e-9)  # fmt: skip
    t.true(
        all(p.grad is g for p, g in zip(parameters, given, strict=True)),
        "`p.grad` is a new tensor. It must be changed in place: others, such as "
        "`DistributedDataParallel`, hold the same memory.",
    )
    t.true(
        all(torch.equal(p, v) for p, v in zip(parameters, values, strict=True)),
        "The parameters themselves were changed; only their gradients are to be.",
    )


@clip_gradients.requires(
    "a long gradient gets the length max_norm and keeps its direction",
    "All gradients together are one vector. Find its length first, then multiply all of "
    "them with one factor.",
)
def _(answer, t):
    _clip(t, answer, _with_gradients(), 0.5)
    _clip(t, answer, _with_gradients(seed=10), 0.01)
    _clip(t, answer, _with_gradients(seed=20), 0.95)
    _clip(t, answer, _with_gradients(seed=30, scale=1e3), 1e-4)


@clip_gradients.requires(
    "a gradient that is short enough stays as it is",
    "The factor is never above 1.",
)
def _(answer, t):
    for share in (1.05, 2.0, 100.0):
        _clip(t, answer, _with_gradients(seed=40), share)
    _clip(t, answer, _with_gradients(seed=50, scale=1e-3), 30.0)


@clip_gradients.requires(
    "parameters without a gradient are left out, and none at all have the length 0",
)
def _(answer, t):
    _clip(t, answer, _with_gradients(seed=60, without=(1,)), 0.3)
    _clip(t, answer, _with_gradients(seed=70, without=(0, 3)), 3.0)
    _clip(t, answer, _with_gradients(without=(0, 1, 2, 3)), 1.0)


@clip_gradients.requires(
    "what model.parameters() gives, which can be run through only once, will do",
    "A generator is empty after the first loop. Make a list of what you need twice.",
)
def _(answer, t):
    _clip(t, answer, _with_gradients(seed=80), 0.4, handed=iter)
    _clip(t, answer, _with_gradients(seed=90), 4.0, handed=iter)


@clip_gradients.requires(
    "gradients of zeros stay zeros",
    "What is max_norm over a length of 0?",
)
def _(answer, t):
    _clip(t, answer, _with_gradients(scale=0.0), 1.0)


@clip_gradients.requires(
    "half precision, float64 and gradients of any layout work too",
    "300² is more than float16 can hold. `norm` squares in a wider format; you by hand "
    "do not.",
)
def _(answer, t):
    _clip(t, answer, _with_gradients(seed=100, kind=torch.float64), 0.5)
    _clip(t, answer, _with_gradients(seed=110, turned=True), 0.5)
    large = _with_gradients(seed=120, kind=torch.float16, scale=120)
    _clip(t, answer, large, 0.01, relative=0.01)
    wide = _with_gradients(seed=130, kind=torch.bfloat16)
    _clip(t, answer, wide, 0.3, relative=0.03)


def _gradients(parameters):
    return [p.grad for p in parameters if p.grad is not None]


def _norm(gradients):
    norms = [g.norm() for g in gradients]
    return torch.stack(norms).norm() if norms else torch.tensor(0.0)


def _scale(gradients, factor):
    for g in gradients:
        g.mul_(factor)


@clip_gradients.fault(
    "scales_up",
    "Short gradients are made longer: every step would then have the same length, near "
    "the minimum too.",
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    total = _norm(gradients)
    _scale(gradients, max_norm / (total + 1e-6))
    return total


@clip_gradients.fault(
    "per_parameter",
    "Every parameter's gradient is clipped by its own length. That turns the whole "
    "gradient: all of them share one length and one factor.",
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    total = _norm(gradients)
    for g in gradients:
        if g.norm() > max_norm:
            g.mul_(max_norm / g.norm())
    return total


@clip_gradients.fault(
    "by_value",
    "Every number is cut off at max_norm by itself. That turns the gradient; it is to "
    "become shorter.",
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    total = _norm(gradients)
    for g in gradients:
        g.clamp_(-max_norm, max_norm)
    return total


@clip_gradients.fault(
    "sum_of_lengths",
    "The lengths of the parts are added up. Lengths of parts add as squares, under a "
    "root.",
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    total = sum((g.norm() for g in gradients), torch.tensor(0.0))
    if total > max_norm:
        _scale(gradients, max_norm / total)
    return total


@clip_gradients.fault(
    "largest_part",
    "The largest of the parts' lengths is taken for that of the whole.",
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    total = max((g.norm() for g in gradients), default=torch.tensor(0.0))
    if total > max_norm:
        _scale(gradients, max_norm / total)
    return total


@clip_gradients.fault(
    "no_root",
    "The root over the sum of squares is missing.",
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    total = _norm(gradients) ** 2
    if total > max_norm:
        _scale(gradients, max_norm / total)
    return total


@clip_gradients.fault(
    "absolute_sum",
    "The length is the sum of absolute values. The Euclidean one is asked for.",
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    total = sum((g.abs().sum() for g in gradients), torch.tensor(0.0))
    if total > max_norm:
        _scale(gradients, max_norm / total)
    return total


@clip_gradients.fault(
    "mean_square",
    "The squares are averaged instead of added up.",
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    n = sum(g.numel() for g in gradients)
    total = _norm(gradients) / max(n, 1) ** 0.5
    if total > max_norm:
        _scale(gradients, max_norm / total)
    return total


@clip_gradients.fault(
    "used_up",
    "`parameters` is run through twice. What `model.parameters()` gives is empty the "
    "second time, so nothing is clipped.",
)
def _(parameters, max_norm):
    total = _norm([p.grad for p in parameters if p.grad is not None])
    if total > max_norm:
        _scale([p.grad for p in parameters if p.grad is not None], max_norm / total)
    return total


@clip_gradients.fault(
    "new_tensors",
    "`p.grad` is bound to a new tensor instead of being changed.",
)
def _(parameters, max_norm):
    parameters = [p for p in parameters if p.grad is not None]
    total = _norm([p.grad for p in parameters])
    if total > max_norm:
        for p in parameters:
            p.grad = p.grad * (max_norm / total)
    return total


@clip_gradients.fault(
    "not_in_place",
    "Shorter copies are made and dropped; the gradients stay as they were.",
)
def _(parameters, max_norm):
    return _norm(_gradients(parameters))


@clip_gradients.fault(
    "parameters_clipped",
    "The parameters are shortened instead of their gradients.",
)
def _(parameters, max_norm):
    parameters = list(parameters)
    total = _norm([p.detach() for p in parameters])
    if total > max_norm:
        _scale([p.data for p in parameters], max_norm / total)
    return total


@clip_gradients.fault(
    "length_of_parameters",
    "The length is that of the parameters, not of their gradients.",
)
def _(parameters, max_norm):
    parameters = list(parameters)
    total = _norm([p.detach() for p in parameters])
    if total > max_norm:
        _scale(_gradients(parameters), max_norm / total)
    return total


@clip_gradients.fault(
    "length_after",
    "The length after the clipping is returned. The one before tells you how the "
    "training is doing.",
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    total = _norm(gradients)
    if total > max_norm:
        _scale(gradients, max_norm / total)
    return _norm(gradients)


@clip_gradients.fault("nothing_returned", "The length is not returned.")
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    total = _norm(gradients)
    if total > max_norm:
        _scale(gradients, max_norm / total)


@clip_gradients.fault(
    "factor_returned", "The factor is returned; the length is asked for."
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    total = _norm(gradients)
    factor = (max_norm / (total + 1e-12)).clamp(max=1.0)
    _scale(gradients, factor)
    return factor


@clip_gradients.fault(
    "none_crashes",
    "A parameter without a gradient stops it: `grad` is None then.",
)
def _(parameters, max_norm):
    gradients = [p.grad for p in parameters]
    total = _norm(gradients)
    if total > max_norm:
        _scale(gradients, max_norm / total)
    return total


@clip_gradients.fault(
    "nothing_to_clip_crashes",
    "It fails when no parameter has a gradient: there is nothing to stack or to add up.",
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    total = torch.stack([g.norm() for g in gradients]).norm()
    if total > max_norm:
        _scale(gradients, max_norm / total)
    return total


@clip_gradients.fault(
    "zero_over_zero",
    "With gradients of zeros the length is 0, and 0/0 makes them NaN.",
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    total = _norm(gradients)
    factor = max_norm / total if gradients else 1
    for g in gradients:
        g.copy_(torch.where(total > max_norm, g * factor, g * (total / total)))
    return total


@clip_gradients.fault(
    "squares_overflow",
    "The squares are added up in half precision, where 300² is already infinite. The "
    "factor is then 0, and the gradient gone.",
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    squares = sum(((g**2).sum() for g in gradients), torch.tensor(0.0))
    if gradients:
        squares = sum((g**2).sum().to(g.dtype) for g in gradients)
    total = squares.sqrt()
    if total > max_norm:
        _scale(gradients, max_norm / total)
    return total


@clip_gradients.fault(
    "halved_until_short",
    "The gradient is halved until it is short enough. It is to get the length max_norm.",
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    total = _norm(gradients)
    length = total
    while length > max_norm:
        _scale(gradients, 0.5)
        length = length / 2
    return total


@clip_gradients.fault(
    "zeroed",
    "A gradient that is too long is set to zero. It is to be shortened.",
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    total = _norm(gradients)
    if total > max_norm:
        _scale(gradients, 0.0)
    return total


@clip_gradients.fault(
    "divided_by_length",
    "The gradient is divided by its length, which makes it 1 long whatever max_norm is.",
)
def _(parameters, max_norm):
    gradients = _gradients(parameters)
    total = _norm(gradients)
    if total > max_norm:
        _scale(gradients, 1 / total)
    return total


# All of it together -----------------------------------------------------------------

training = Joint(
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


def _losses_of_training(t, parts, steps):
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

    model, losses = t.mutate(train, steps=steps)
    return model, losses


@training.requires("a new model's loss is about that of guessing evenly")
def _(parts, t):
    model = _small_model(parts)
    inputs, targets = parts["get_batch"](_RHYME, 8, 12, _generator(3))
    loss = t.mutate(parts["cross_entropy"], model(inputs), targets).item()
    t.true(
        abs(loss - math.log(7)) < 0.3,
        f"The loss of a new model is {loss:.2f}; guessing evenly among 7 tokens gives "
        f"{math.log(7):.2f}.",
    )


@training.requires(
    "the loss at one position depends on no later token but its own target",
    "If the targets are one step ahead and the mask hides the future, changing the last "
    "input changes only the last prediction.",
)
def _(parts, t):
    model = _small_model(parts)
    inputs, targets = parts["get_batch"](_RHYME, 3, 12, _generator(4))
    t.trace.append("targets are inputs" if torch.equal(inputs, targets) else "")
    t.equal(
        inputs[:, 1:].clone(), targets[:, :-1].clone(), "the inputs from the second on"
    )
    changed = inputs.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 7
    with torch.no_grad():
        before, after = (
            float(parts["cross_entropy"](model(ids)[:, :-1], targets[:, :-1]))
            for ids in (inputs, changed)
        )
    t.trace.append(abs(before - after) < 1e-5)
    t.true(
        abs(before - after) < 1e-5,
        f"The loss before the last position went from {before:.4f} to {after:.4f} when "
        "the last input changed: the model sees what it is to predict.",
    )


@training.requires(
    "a short training brings the loss of a regular text near 0",
    "All parts passed alone. Are they the ones of this notebook, or older versions?",
)
def _(parts, t):
    _, losses = _losses_of_training(t, parts, 60)
    end = sum(losses[-5:]) / 5
    t.true(
        end < 0.5,
        f"After 60 steps on a text that repeats itself the loss is {end:.2f}; it began "
        f"at {losses[0]:.2f}, and below 0.5 is expected.",
    )


def _backwards_model(config):
    """A Transformer that reads from the end: it sees what it is to predict."""
    model = reference_part("forward_pass", "Transformer")(config)
    forward = model.forward
    model.forward = lambda ids: forward(ids.flip(1)).flip(1)
    return model


def _late_batch(data, batch_size, t, generator=None):
    inputs, _ = _cut(data, _draw(data, batch_size, t, generator), t)
    return inputs, inputs.clone()


training.fault(
    "targets_are_inputs",
    "Inputs and targets are the same tokens, so there is nothing to predict.",
    {"get_batch": _late_batch},
)
training.fault(
    "sees_the_future",
    "The model's output at a position depends on later tokens, so the answer is among "
    "its inputs.",
    {"Transformer": _backwards_model},
)


class _Still(_AdamW):
    def update(self, p, g, state, group):
        pass


training.fault(
    "nothing_moves",
    "The optimizer changes nothing that the model uses.",
    {"AdamW": _Still},
)
training.fault(
    "loss_of_probabilities",
    "The loss takes a softmax of what is already one, or adds up what it should average.",
    {"cross_entropy": lambda logits, targets: _losses(logits, targets).sum()},
)
