"""Lesson 01: the recurrent cell, the sequence, the LSTM, gradients over distance."""

import math

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from utils.check.exercise import Exercise
from utils.probe import probe, probe_ids, strided

rnn_cell = Exercise("rnn_cell", lesson="rnn_baseline")
rnn = Exercise("rnn", lesson="rnn_baseline")
lstm_cell = Exercise("lstm_cell", lesson="rnn_baseline")
gradient_reach = Exercise("gradient_reach", lesson="rnn_baseline")
RNNLanguageModel = Exercise("RNNLanguageModel", lesson="rnn_baseline")


# What PyTorch computes; its matrices are the transposed ones --------------------------


def torch_cell(x, h, w_x, w_h, b):
    return torch.rnn_tanh_cell(x, h, w_x.T, w_h.T, b, torch.zeros_like(b))


def torch_rnn(x, h0, w_x, w_h, b):
    weights = [w_x.T, w_h.T, b, torch.zeros_like(b)]
    states, _ = torch.rnn_tanh(
        x, h0[None], weights, True, 1, 0.0, False, False, True
    )  # has biases, layers, dropout, training, both directions, batch first
    return states


def torch_lstm(x, h, c, w_x, w_h, b):
    return torch.lstm_cell(x, (h, c), w_x.T, w_h.T, b, torch.zeros_like(b))


def agrees(case, answer, oracle, *inputs):
    """As `case.agrees`, for the two results of an LSTM too."""
    if oracle is not torch_lstm:
        case.agrees(answer, oracle, *inputs)
        return
    result = case.call(answer, *inputs)
    case.is_tuple(result, 2, "the result (h, c)")
    expected = torch_lstm(*[each.double() for each in inputs])
    case.close(result[1], expected[1], "`c`", like=inputs[0])
    case.close(result[0], expected[0], "`h` (`c` is right)", like=inputs[0])


# Inputs -------------------------------------------------------------------------------


def cell_inputs(batch=2, d=3, n=5, seed=0, dtype=torch.float32, blocks=1):
    return (
        probe(batch, d, seed=seed, dtype=dtype),
        probe(batch, n, seed=seed + 1, scale=0.5, dtype=dtype),
        probe(d, blocks * n, seed=seed + 2, scale=0.6, dtype=dtype),
        probe(n, blocks * n, seed=seed + 3, scale=0.5, dtype=dtype),
        probe(blocks * n, seed=seed + 4, scale=0.7, dtype=dtype),
    )


def rnn_inputs(batch=2, time=7, d=3, n=5, seed=0, dtype=torch.float32):
    x = probe(batch, time, d, seed=seed + 7, dtype=dtype)
    return (x, *cell_inputs(batch, d, n, seed, dtype)[1:])


def lstm_inputs(batch=2, d=3, n=5, seed=0, dtype=torch.float32):
    x, h, *weights = cell_inputs(batch, d, n, seed, dtype, blocks=4)
    return (x, h, probe(batch, n, seed=seed + 7, scale=1.5, dtype=dtype), *weights)


# rnn_cell, rnn and lstm_cell ----------------------------------------------------------


@rnn_cell.requires(
    "the new state is tanh of input, old state and bias together",
    "Three things are added: the input times its matrix, the state times its own, and "
    "the bias. The tanh comes last.",
)
def _(answer, case):
    for batch, d, n in ((2, 3, 5), (1, 7, 4), (3, 4, 4)):
        agrees(case, answer, torch_cell, *cell_inputs(batch, d, n, seed=10 * n))


@rnn.requires(
    "each step starts from the state of the one before, the first from h0, and all "
    "states come back",
    "Print the shape of what you hand to the cell at each step: `(B, D)` and `(B, H)`. "
    "The first step has a state before it too: the one that is handed in.",
)
def _(answer, case):
    for batch, time, d, n in ((2, 7, 3, 5), (5, 3, 2, 7), (2, 1, 3, 5), (1, 6, 3, 5)):
        agrees(case, answer, torch_rnn, *rnn_inputs(batch, time, d, n, seed=20))


@rnn.requires(
    "batch and time stay apart when they are equally large, and a second call does not "
    "remember the first",
    "With B = T the shapes cannot tell batch from time. Which dimension does your loop "
    "run over, and along which do you put the states together?",
)
def _(answer, case):
    for batch, time, d, n in ((4, 4, 4, 4), (3, 40, 2, 5), (3, 40, 2, 5)):
        agrees(case, answer, torch_rnn, *rnn_inputs(batch, time, d, n, seed=60))


def with_gates(i, f, o):
    """Inputs whose gates have these sums, whatever x and h are; 200 is wide open."""
    x, h, c, w_x, w_h, b = lstm_inputs(seed=110)
    for block, total in ((0, i), (1, f), (3, o)):
        columns = slice(5 * block, 5 * block + 5)
        w_x[:, columns], w_h[:, columns], b[columns] = 0, 0, total
    return x, h, c, w_x, w_h, b


@lstm_cell.requires(
    "input gate open and forget gate shut: the memory is the candidate; the other way "
    "round: it stays",
    "The four blocks i, f, g, o follow each other in the last dimension. A gate is open "
    "where its sum is far above 0, and shut where it is far below.",
)
def _(answer, case):
    case.call(answer, *lstm_inputs())  # tells one mistake from another
    agrees(case, answer, torch_lstm, *with_gates(i=200, f=-200, o=200))
    agrees(case, answer, torch_lstm, *with_gates(i=-200, f=200, o=200))


@lstm_cell.requires(
    "h and c are those of the formulas, with the gates in the order i, f, g, o",
    "Compare c first: it needs only i, f and g, and may be larger than 1. If c is right "
    "and h is not, look at o.",
)
def _(answer, case):
    for batch, d, n in ((2, 3, 5), (1, 7, 6), (3, 5, 4), (4, 3, 1)):
        x, h, c, *weights = lstm_inputs(batch, d, n, seed=10 * n)
        agrees(case, answer, torch_lstm, x, h, c, *weights)
        agrees(case, answer, torch_lstm, x, h, 20 * c, *weights)


def shared(exercise, oracle, inputs):
    """What all three must do."""

    @exercise.requires(
        "large sums give no overflow, and gradients flow back to every argument",
        "NaN: an exponential overflows, which may show in the gradient alone; which "
        "functions of torch never do? Zeros: something has cut the graph.",
    )
    def _(answer, case):
        case.gradients_agree(answer, oracle, *inputs(seed=90))
        x, *rest = inputs(batch=3, seed=70)
        x[0], x[2] = 400 * x[0], -400 * x[2]
        agrees(case, answer, oracle, x, *rest)
        case.gradients_agree(answer, oracle, x, *rest)

    @exercise.requires(
        "other dtypes, memory that is not contiguous and another device work too",
        "Where you create a tensor, give it the dtype of the input.",
    )
    def _(answer, case):
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            agrees(case, answer, oracle, *inputs(seed=40, dtype=dtype))
        x, *rest = inputs(seed=50)
        agrees(case, answer, oracle, *map(strided, (x, *rest)))
        agrees(case, answer, oracle, x.mT.contiguous().mT, *rest)
        case.any_device(answer, x, *rest)


shared(rnn_cell, torch_cell, cell_inputs)
shared(rnn, torch_rnn, rnn_inputs)
shared(lstm_cell, torch_lstm, lstm_inputs)


# gradient_reach -----------------------------------------------------------------------


def reach_by_differences(layer, x):
    """The same by central differences in float64: no gradient is taken.

    Holds for layers whose batch rows do not meet.
    """
    x, step = x.detach().double(), 1e-5
    slopes = torch.zeros_like(x)
    with torch.no_grad():
        for t in range(x.shape[1]):
            for d in range(x.shape[2]):
                shift = torch.zeros_like(x)
                shift[:, t, d] = step
                change = layer(x + shift) - layer(x - shift)  # (B, T, H)
                slopes[:, t, d] = change[:, -1].sum(-1) / (2 * step)
    return slopes.norm(dim=-1).mean(0)


def a_layer_that_halves(x):
    """h_t = x_t + h_{t−1}/2: the gradient halves with each step back."""
    h, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = x[:, t] + h / 2
        states.append(h)
    return torch.stack(states, dim=1)


def a_layer_that_mixes(x):
    """Each output sees all steps and two features, and not linearly."""
    n = x.shape[1]
    a = probe(n, n, seed=120).to(x.dtype)
    return torch.sin(torch.einsum("ts,bsd->btd", a, x)) * x.flip(-1)


class ALayerThatSquares(nn.Module):
    """Sums squares up to each step, 3 → 5, and gives 7 times as much in training."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(probe(3, 5, seed=130))

    def forward(self, x):
        y = ((x @ self.w.to(x.dtype)) ** 2).cumsum(1)
        return (7 if self.training else 1) * y


def reach_agrees(case, answer, layer, x, call=None):
    expected = reach_by_differences(layer, x)  # before the answer can change the layer
    actual = (call or case.call)(answer, layer, x)
    # Differences are exact to some 1e−9 only; nothing asked for here is finer.
    case.close(actual, expected, "the reach of each step", like=x)
    return actual


@gradient_reach.requires(
    "for a layer that halves its memory at each step the reach halves too",
    "For h_t = x_t + h_{t−1}/2 the last state is x_T + x_{T−1}/2 + …: what is its "
    "gradient? `torch.autograd.grad` needs one number, and an input that asks for "
    "gradients, and returns a tuple.",
)
def _(answer, case):
    reach_agrees(case, answer, a_layer_that_halves, probe(2, 5, 3, seed=140))


@gradient_reach.requires(
    "it is the norm over D, per step and sequence, averaged over the batch, of the "
    "gradient of the last output alone",
    "The gradient has the shape of `x`, `(B, T, D)`. Which dimension does the norm take "
    "away, which the mean, and in which order?",
)
def _(answer, case):
    rows = torch.tensor([1.0, -1.0, 30.0])[:, None, None]
    reach_agrees(case, answer, ALayerThatSquares(), rows * probe(3, 5, 3, seed=180))
    reach_agrees(case, answer, a_layer_that_mixes, probe(2, 5, 3, seed=190))
    reach_agrees(case, answer, a_layer_that_mixes, probe(3, 1, 4, seed=200))


@gradient_reach.requires("the layer stays as it is: parameters, gradients and mode")
def _(answer, case):
    for before in (None, probe(3, 5, seed=220)):
        layer = ALayerThatSquares().train(before is None)
        layer.w.grad = None if before is None else before.clone()
        reach_agrees(case, answer, layer, probe(2, 4, 3, seed=230))
        after = layer.w.grad
        kept = None not in (before, after) and torch.equal(after, before)
        case.true(
            kept or after is before,
            "After the call the gradient that the layer's parameters held is gone."
            if after is None
            else "After the call the layer's parameters hold another gradient than "
            "before: `backward()` adds to it, `torch.autograd.grad` does not.",
        )
        unchanged = torch.equal(layer.w, probe(3, 5, seed=130))
        case.true(
            layer.w.requires_grad and unchanged, "It changed the layer's parameters."
        )
        case.true(
            layer.training == (before is None),
            "After the call the layer is in another mode, training or eval.",
        )


@gradient_reach.requires(
    "the caller's x is left alone, and may itself come from another computation"
)
def _(answer, case):
    x, leaf = probe(2, 4, 3, seed=240), probe(2, 4, 3, seed=250).requires_grad_()
    for given in (x, leaf, 2 * leaf):
        before = given.requires_grad
        call = case.call_in_place
        reach = reach_agrees(case, answer, a_layer_that_mixes, given, call)
        case.true(
            given.requires_grad == before,
            "After the call the caller's `x` "
            f"{'no longer asks' if before else 'asks'} for gradients: mark a copy.",
        )
        case.true(
            x.grad is None and leaf.grad is None,
            "After the call the caller's `x` holds a gradient that it did not have.",
        )
        case.true(
            not reach.requires_grad,
            "The result is still attached to a graph: it is a measurement.",
        )


@gradient_reach.requires(
    "float64, bfloat16, memory that is not contiguous and another device work too"
)
def _(answer, case):
    for dtype in (torch.float64, torch.bfloat16):
        x = probe(2, 5, 3, seed=260, dtype=dtype)
        reach_agrees(case, answer, a_layer_that_halves, x)
    reach_agrees(case, answer, a_layer_that_mixes, strided(probe(2, 5, 3, seed=280)))
    case.any_device(answer, a_layer_that_halves, probe(2, 4, 3))


# RNNLanguageModel ---------------------------------------------------------------------


def logits_of(ids, embedding, w_x, w_h, b, head):
    """The same from PyTorch's own parts."""
    x = F.embedding(ids, embedding)
    states = torch_rnn(x, x.new_zeros(len(ids), len(b)), w_x, w_h, b)
    return F.linear(states, head)


def loaded(case, answer, v=11, d=3, n=5, dtype=torch.float32):
    """A model with known weights, and the same weights in float64."""
    weights = {
        "embedding": probe(v, d, seed=300, dtype=dtype),
        "w_x": probe(d, n, seed=301, scale=0.6, dtype=dtype),
        "w_h": probe(n, n, seed=302, scale=0.5, dtype=dtype),
        "b": probe(n, seed=303, scale=0.7, dtype=dtype),
        "head": probe(v, n, seed=304, dtype=dtype),
    }
    model = case.load(case.call(answer, v, d, n).to(dtype), **weights)
    return model, {name: w.double() for name, w in weights.items()}


@RNNLanguageModel.requires(
    "its parameters are embedding, w_x, w_h, b and head, and nothing else",
    "`w_x`, `w_h` and `b` are one `nn.Parameter` each, laid out as `rnn` wants them; "
    "`head` is a linear layer without bias.",
)
def _(answer, case):
    v, d, n = 11, 3, 5
    model = case.call(answer, v, d, n)
    for name in ("w_x", "w_h", "b"):
        case.true(
            not isinstance(getattr(model, name, None), nn.Module),
            f"`{name}` is a layer. `rnn` wants the numbers themselves, in one "
            "`nn.Parameter`: the weight of an `nn.Linear` is the transposed matrix, and "
            "it brings a bias.",
        )
    case.parameters(
        model, embedding=(v, d), w_x=(d, n), w_h=(n, n), b=(n,), head=(v, n)
    )


@RNNLanguageModel.requires(
    "logits (B, T, V): the embedded tokens run through the RNN, then the head",
    "Embedding, `rnn` from a state of zeros, head; print the shape after each.",
)
def _(answer, case):
    for v, d, n, batch, time in ((11, 3, 5, 2, 4), (11, 3, 5, 3, 1), (7, 4, 4, 4, 4)):
        model, weights = loaded(case, answer, v, d, n)
        ids = probe_ids(batch, time, below=v, seed=time)
        case.close(case.call(model, ids), logits_of(ids, **weights))


@RNNLanguageModel.requires(
    "a second call starts afresh, in training and in eval mode",
    "The state belongs to one call. Nothing about it is kept in `self`.",
)
def _(answer, case):
    model, weights = loaded(case, answer)
    for batch, mode in ((2, True), (2, True), (1, False), (2, False)):
        ids = probe_ids(batch, 5, below=11, seed=batch)
        case.close(case.call(model.train(mode), ids), logits_of(ids, **weights))


@RNNLanguageModel.requires(
    "float64, bfloat16 and another device work too",
    "The first state must have the dtype of the weights.",
)
def _(answer, case):
    ids = probe_ids(2, 4, below=11, seed=6)
    for dtype, tolerance in ((torch.float64, None), (torch.bfloat16, 0.2)):
        model, weights = loaded(case, answer, dtype=dtype)
        like, expected = probe(1, dtype=dtype), logits_of(ids, **weights)
        case.close(case.call(model, ids), expected, like=like, tolerance=tolerance)
    case.any_device(loaded(case, answer)[0], ids)


@RNNLanguageModel.requires(
    "every parameter gets the gradient that PyTorch's own RNN would give it",
    "All five must be part of the computation, at every step.",
)
def _(answer, case):
    model, weights = loaded(case, answer)
    ids = probe_ids(2, 6, below=11, seed=7)
    owned = dict(model.named_parameters())
    names = [n if n in owned else f"{n}.weight" for n in weights]

    def forward(embedding, w_x, w_h, b, head):
        given = (embedding, w_x, w_h, b, head)
        return functional_call(model, dict(zip(names, given, strict=True)), (ids,))

    def oracle(*weights):
        return logits_of(ids, *weights)

    case.gradients_agree(forward, oracle, *(w.float() for w in weights.values()))


@RNNLanguageModel.requires(
    "it starts with weights drawn at random, of a size that training can begin with"
)
def _(answer, case):
    v, d, n = 50, 24, 40
    model, other = case.call(answer, v, d, n), case.call(answer, v, d, n)
    for name in ("w_x", "w_h"):
        weight = getattr(model, name).detach()
        case.true(
            not torch.equal(weight, getattr(other, name)),
            f"`{name}` is the same in two new models: draw it at random.",
        )
        case.true(
            int(torch.linalg.matrix_rank(weight)) > 1,
            f"`{name}` starts with all rows alike, so all units would learn the same.",
        )
    for each in (model, case.call(answer, v, 64 * n, 4 * n)):
        at = "With {} inputs and {} units".format(*each.w_x.shape)
        radius = torch.linalg.eigvals(each.w_h.detach()).abs().max().item()
        case.true(
            0.3 < radius < 2,
            f"{at} `w_h` starts with a spectral radius of {radius:.2g}. Near 1 a state "
            "neither fades within a step or two nor saturates: `w_h` may be orthogonal, "
            "or random and divided by the root of the number of units.",
        )
        length = each.w_x.detach().square().sum(0).mean().sqrt().item()
        case.true(
            0.1 < length < 3,
            f"{at} the columns of `w_x` start with a length of {length:.2g}. Near 1 the "
            "sum over the inputs is about as large as one of them: divide random "
            "numbers by the root of the number of inputs.",
        )
    case.true(not model.b.any(), "`b` does not start at zero.")
    ids = probe_ids(8, 20, below=v, seed=8)
    with torch.no_grad(), case.unrecorded():
        logits = case.call(model, ids)
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten()).item()
    case.true(
        loss < math.log(v) + 1.5,
        f"A new model's loss is {loss:.2f} on random tokens, where guessing evenly "
        f"gives {math.log(v):.2f}: the first logits are too large. `nn.Linear` starts "
        "at a size that fits.",
    )
