"""Lesson 01: the recurrent cell, the sequence, the LSTM, gradients over distance."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from utils.check.exercise import Exercise
from utils.probe import probe, probe_ids, strided

rnn_cell = Exercise("rnn_cell", lesson="rnn_baseline")
rnn = Exercise("rnn", lesson="rnn_baseline")
lstm_cell = Exercise("lstm_cell", lesson="rnn_baseline")
gradient_reach = Exercise("gradient_reach", lesson="rnn_baseline")
RNNLanguageModel = Exercise("RNNLanguageModel", lesson="rnn_baseline")


# rnn_cell --------------------------------------------------------------------------


def _torch_cell(x, h, w_x, w_h, b):
    """What `nn.RNNCell` computes; its matrices are the transposed ones."""
    return torch.rnn_tanh_cell(x, h, w_x.T, w_h.T, b, torch.zeros_like(b))


def _cell_inputs(batch=2, d=3, n=5, seed=0, scale=1.0, dtype=torch.float32):
    return (
        probe(batch, d, seed=seed, scale=scale, dtype=dtype),
        probe(batch, n, seed=seed + 1, scale=0.5, dtype=dtype),
        probe(d, n, seed=seed + 2, scale=0.6, dtype=dtype),
        probe(n, n, seed=seed + 3, scale=0.5, dtype=dtype),
        probe(n, seed=seed + 4, scale=0.7, dtype=dtype),
    )


@rnn_cell.requires(
    "the new state is tanh of input, old state and bias together",
    "Three things are added: the input times its matrix, the state times its own, and "
    "the bias. The tanh comes last.",
)
def _(answer, case):
    case.agrees(answer, _torch_cell, *_cell_inputs())
    case.agrees(answer, _torch_cell, *_cell_inputs(batch=1, d=7, n=4, seed=10))


@rnn_cell.requires("it works when input and state have the same width")
def _(answer, case):
    case.agrees(answer, _torch_cell, *_cell_inputs(batch=3, d=4, n=4, seed=20))


@rnn_cell.requires(
    "large sums end at −1 or 1, without overflow",
    "Which function of torch gives a tanh that never overflows?",
)
def _(answer, case):
    case.agrees(answer, _torch_cell, *_cell_inputs(seed=30, scale=400))


@rnn_cell.requires(
    "float16, bfloat16, float64 and memory that is not contiguous work too"
)
def _(answer, case):
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        case.agrees(answer, _torch_cell, *_cell_inputs(seed=40, dtype=dtype))
    case.agrees(answer, _torch_cell, *map(strided, _cell_inputs(seed=50)))


@rnn_cell.requires(
    "gradients flow back to the input, the old state and all weights",
    "Training needs the gradient of every one of the five arguments.",
)
def _(answer, case):
    case.gradients_agree(answer, _torch_cell, *_cell_inputs(seed=60))


@rnn_cell.requires(
    "the gradients stay finite for large sums",
    "An exponential that overflows may still give the right value. Its gradient is NaN.",
)
def _(answer, case):
    x, *rest = _cell_inputs(batch=3, seed=70)
    far = torch.tensor([400.0, 1.0, -400.0])[:, None]
    case.gradients_agree(answer, _torch_cell, far * x, *rest)


@rnn_cell.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, *_cell_inputs())


# rnn -------------------------------------------------------------------------------


def _torch_rnn(x, h0, w_x, w_h, b):
    """What `nn.RNN(batch_first=True)` computes, every state."""
    weights = [w_x.T, w_h.T, b, torch.zeros_like(b)]
    states, _ = torch.rnn_tanh(
        x, h0[None], weights, True, 1, 0.0, False, False, True
    )  # has biases, layers, dropout, training, both directions, batch first
    return states


def _rnn_inputs(batch=2, time=4, d=3, n=5, seed=0, dtype=torch.float32):
    x = probe(batch, time, d, seed=seed + 7, dtype=dtype)
    return (x, *_cell_inputs(batch, d, n, seed, dtype=dtype)[1:])


def _states(x, h0, w_x, w_h, b, cell=_torch_cell, between=lambda h: h):
    h, states = h0, []
    for t in range(x.shape[1]):
        h = cell(x[:, t], h, w_x, w_h, b)
        states.append(h)
        h = between(h)
    return states


@rnn.requires(
    "one step is one cell, from h0",
    "The first step has a state before it too: the one that is handed in.",
)
def _(answer, case):
    case.agrees(answer, _torch_rnn, *_rnn_inputs(time=1))
    case.agrees(answer, _torch_rnn, *_rnn_inputs(batch=1, time=1, seed=10))


@rnn.requires(
    "each step starts from the state of the one before, and all states come back",
    "Print the shape of what you hand to the cell at each step: `(B, D)` and `(B, H)`.",
)
def _(answer, case):
    case.agrees(answer, _torch_rnn, *_rnn_inputs(seed=20))
    case.agrees(answer, _torch_rnn, *_rnn_inputs(batch=1, time=6, seed=30))


@rnn.requires(
    "batch and time stay apart when they are equally large",
    "With B = T the shapes cannot tell batch from time. Which dimension does your loop "
    "run over, and along which do you put the states together?",
)
def _(answer, case):
    case.agrees(answer, _torch_rnn, *_rnn_inputs(batch=4, time=4, d=4, n=4, seed=40))
    case.agrees(answer, _torch_rnn, *_rnn_inputs(batch=5, time=3, d=2, n=7, seed=50))


@rnn.requires("a long sequence works, and a second call does not remember the first")
def _(answer, case):
    inputs = _rnn_inputs(batch=3, time=40, d=2, seed=60)
    case.agrees(answer, _torch_rnn, *inputs)
    case.agrees(answer, _torch_rnn, *inputs)


@rnn.requires(
    "float16, bfloat16, float64 and memory that is not contiguous work too",
    "Where you create a tensor, give it the dtype of the input.",
)
def _(answer, case):
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        case.agrees(answer, _torch_rnn, *_rnn_inputs(seed=70, dtype=dtype))
    case.agrees(answer, _torch_rnn, *map(strided, _rnn_inputs(seed=80)))
    x, *rest = _rnn_inputs(batch=4, time=2, seed=90)
    case.agrees(
        answer, _torch_rnn, x.transpose(0, 1).contiguous().transpose(0, 1), *rest
    )


@rnn.requires(
    "gradients flow back through all steps, to h0 and to every input",
    "The state that goes into the next step must still be attached to the graph. If a "
    "variable “has been modified by an inplace operation”, the state was read out of a "
    "buffer that a later step writes to: keep it under a name of its own.",
)
def _(answer, case):
    case.gradients_agree(answer, _torch_rnn, *_rnn_inputs(time=6, seed=100))


@rnn.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, *_rnn_inputs())


# lstm_cell -------------------------------------------------------------------------


def _torch_lstm(x, h, c, w_x, w_h, b):
    """What `nn.LSTMCell` computes; its matrices are the transposed ones."""
    return torch.lstm_cell(x, (h, c), w_x.T, w_h.T, b, torch.zeros_like(b))


def _lstm_inputs(batch=2, d=3, n=5, seed=0, scale=1.0, dtype=torch.float32):
    return (
        probe(batch, d, seed=seed, scale=scale, dtype=dtype),
        probe(batch, n, seed=seed + 1, scale=0.5, dtype=dtype),
        probe(batch, n, seed=seed + 2, scale=1.5, dtype=dtype),
        probe(d, 4 * n, seed=seed + 3, scale=0.6, dtype=dtype),
        probe(n, 4 * n, seed=seed + 4, scale=0.5, dtype=dtype),
        probe(4 * n, seed=seed + 5, scale=0.7, dtype=dtype),
    )


def _agree_pair(case, answer, *inputs):
    result = case.call(answer, *inputs)
    case.is_tuple(result, 2, "the result (h, c)")
    expected = _torch_lstm(*[each.double() for each in inputs])
    for name, actual, true in zip("hc", result, expected, strict=True):
        case.close(actual, true, f"`{name}`", like=inputs[0])


@lstm_cell.requires(
    "h and c are those of the formulas, with the gates in the order i, f, g, o",
    "Compare c first: it needs only i, f and g. If c is right and h is not, look at o.",
)
def _(answer, case):
    _agree_pair(case, answer, *_lstm_inputs())
    _agree_pair(case, answer, *_lstm_inputs(batch=1, d=7, n=6, seed=10))


@lstm_cell.requires("it works with four units, and with one")
def _(answer, case):
    _agree_pair(case, answer, *_lstm_inputs(batch=3, d=5, n=4, seed=20))
    _agree_pair(case, answer, *_lstm_inputs(batch=4, d=3, n=1, seed=30))


@lstm_cell.requires(
    "the memory may be larger than 1, and large sums give no overflow",
    "Only what is shown is squashed. Which functions of torch never overflow?",
)
def _(answer, case):
    x, h, c, *weights = _lstm_inputs(seed=40)
    _agree_pair(case, answer, x, h, 20 * c, *weights)
    _agree_pair(case, answer, *_lstm_inputs(seed=50, scale=400))


@lstm_cell.requires("a second step goes on from the first")
def _(answer, case):
    x, h, c, *weights = _lstm_inputs(seed=60)
    result = case.call(answer, x, h, c, *weights)
    case.is_tuple(result, 2, "the result (h, c)")
    _agree_pair(case, answer, x.flip(0), *[r.detach() for r in result], *weights)


@lstm_cell.requires(
    "float16, bfloat16, float64 and memory that is not contiguous work too"
)
def _(answer, case):
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        _agree_pair(case, answer, *_lstm_inputs(seed=70, dtype=dtype))
    _agree_pair(case, answer, *map(strided, _lstm_inputs(seed=80)))


@lstm_cell.requires(
    "gradients flow back to all six arguments, and stay finite for large sums",
    "The memory c is the path on which a gradient survives: do not cut it, and do not "
    "overwrite it in place. NaN comes from an exponential that overflowed, also from one "
    "that `torch.where` did not choose.",
)
def _(answer, case):
    case.gradients_agree(answer, _torch_lstm, *_lstm_inputs(seed=90))
    case.gradients_agree(answer, _torch_lstm, *_lstm_inputs(seed=100, scale=400))


@lstm_cell.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, *_lstm_inputs())


# gradient_reach --------------------------------------------------------------------


def _by_differences(layer, x):
    """The same by central differences in float64: no gradient is taken.

    Holds for layers whose batch rows do not meet.
    """
    x = x.detach().double()
    step = 1e-5

    def last(x):
        return layer(x)[:, -1].sum(-1)  # (B, T, H) → (B,)

    slopes = torch.zeros_like(x)
    with torch.no_grad():
        for t in range(x.shape[1]):
            for d in range(x.shape[2]):
                shift = torch.zeros_like(x)
                shift[:, t, d] = step
                slopes[:, t, d] = (last(x + shift) - last(x - shift)) / (2 * step)
    return slopes.norm(dim=-1).mean(0)


def a_layer_that_halves(x):
    """h_t = x_t + h_{t−1}/2: the gradient halves with each step back."""
    h, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = x[:, t] + h / 2
        states.append(h)
    return torch.stack(states, dim=1)


def a_recurrent_layer(x):
    """A tanh RNN with fixed weights, 3 → 5."""
    weights = _cell_inputs(d=3, n=5, seed=110)[2:]
    weights = [w.to(x.dtype) for w in weights]
    return torch.stack(_states(x, x.new_zeros(len(x), 5), *weights), dim=1)


def a_layer_that_mixes(x):
    """Every step sees every other, not linearly, so that the order of steps counts."""
    n = x.shape[1]
    a = probe(n, n, seed=120).to(x.dtype)
    return torch.sin(torch.einsum("ts,bsd->btd", a, x)) * x


class ALayerThatSquares(nn.Module):
    """A layer with parameters of its own, 3 → 5, that sums squares up to each step."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(probe(3, 5, seed=130))

    def forward(self, x):
        return ((x @ self.w.to(x.dtype)) ** 2).cumsum(1)


class ALayerWithTwoModes(nn.Module):
    """A layer that gives more in training, so that its mode shows."""

    def forward(self, x):
        return (7 if self.training else 1) * a_layer_that_halves(x)


def _agree_reach(case, answer, layer, x, **kwargs):
    actual = case.call(answer, layer, x, **kwargs)
    # Differences are exact to some 1e−9 only; nothing asked for here is finer.
    case.close(actual, _by_differences(layer, x), "the reach of each step", like=x)


@gradient_reach.requires(
    "for a layer that halves its memory at each step the reach halves too",
    "For h_t = x_t + h_{t−1}/2 the last state is x_T + x_{T−1}/2 + x_{T−2}/4 + …: what "
    "is its gradient with respect to each x_t? Index 0 of the result is the first step. "
    "`torch.autograd.grad` needs one number, and an input that asks for gradients.",
)
def _(answer, case):
    _agree_reach(case, answer, a_layer_that_halves, probe(1, 6, 3, seed=140))
    _agree_reach(case, answer, a_layer_that_halves, probe(4, 5, 1, seed=150))


@gradient_reach.requires(
    "it is the norm over D, per step and sequence, averaged over the batch",
    "The gradient has the shape of `x`, `(B, T, D)`. Which dimension does the norm take "
    "away, which the mean, and in which order?",
)
def _(answer, case):
    x = probe(2, 6, 3, seed=160)
    _agree_reach(case, answer, a_recurrent_layer, x)
    _agree_reach(case, answer, ALayerThatSquares(), probe(4, 5, 3, seed=170))
    rows = torch.tensor([1.0, -1.0, 30.0])[:, None, None]
    _agree_reach(case, answer, ALayerThatSquares(), rows * probe(3, 4, 3, seed=180))


@gradient_reach.requires(
    "only the last output counts, also where every output sees every input",
    "The layer gives an output at each step. One of them is asked for, and all its "
    "features, added up.",
)
def _(answer, case):
    _agree_reach(case, answer, a_layer_that_mixes, probe(2, 5, 3, seed=190))
    _agree_reach(case, answer, a_layer_that_mixes, probe(3, 1, 4, seed=200))


@gradient_reach.requires("steps that do not reach the last output get 0")
def _(answer, case):
    def a_window_of_two(x):
        return x**3 + F.pad(x, (0, 0, 1, 0))[:, :-1] ** 2

    _agree_reach(case, answer, a_window_of_two, probe(2, 5, 3, seed=210))


@gradient_reach.requires(
    "the layer's parameters and their gradients stay as they are",
    "`torch.autograd.grad` returns a gradient; `backward()` adds one to everything that "
    "asks for it, the layer's own parameters included.",
)
def _(answer, case):
    for before in (None, probe(3, 5, seed=220)):
        layer = ALayerThatSquares()
        layer.w.grad = None if before is None else before.clone()
        _agree_reach(case, answer, layer, probe(2, 4, 3, seed=230))
        after = layer.w.grad
        if before is None or after is None:
            same = after is before
        else:
            same = torch.equal(after, before)
        case.true(
            same,
            "After the call the gradient that the layer's parameters held is gone."
            if after is None
            else "After the call the layer's parameters hold another gradient than "
            "before: a measurement must not leave one behind, or the next training "
            "step adds to it.",
        )
        case.true(
            layer.w.requires_grad and torch.equal(layer.w, probe(3, 5, seed=130)),
            "It changed the layer's parameters.",
        )


@gradient_reach.requires(
    "a module is measured in the mode that it is in, and stays in it",
    "Call the layer as it comes.",
)
def _(answer, case):
    for training in (True, False):
        layer = ALayerWithTwoModes().train(training)
        x = probe(2, 4, 3, seed=290)
        expected = _by_differences(layer, x)  # before the answer can change the mode
        case.close(
            case.call(answer, layer, x), expected, "the reach of each step", like=x
        )
        case.true(
            layer.training == training,
            "After the call the layer is in another mode, training or eval, than "
            "before.",
        )


@gradient_reach.requires(
    "the caller's x is left alone, and may itself come from another computation",
    "Work on a copy of `x` that has no history.",
)
def _(answer, case):
    x = probe(2, 4, 3, seed=240)
    actual = case.call_in_place(answer, a_recurrent_layer, x)
    case.close(
        actual, _by_differences(a_recurrent_layer, x), "the reach of each step", like=x
    )
    case.true(
        not x.requires_grad and x.grad is None,
        "After the call the caller's `x` asks for gradients: mark a copy instead.",
    )
    leaf = probe(2, 4, 3, seed=250).requires_grad_()
    for given in (leaf, 2 * leaf):
        actual = case.call_in_place(answer, a_recurrent_layer, given)
        case.close(
            actual,
            _by_differences(a_recurrent_layer, given),
            "the reach of each step",
            like=x,
        )
        case.true(
            leaf.grad is None,
            "After the call the caller's `x` holds a gradient that it did not have.",
        )
        case.true(
            given.requires_grad,
            "After the call the caller's `x` no longer asks for gradients, as it did.",
        )
    case.true(
        not actual.requires_grad,
        "The result is still attached to a graph: it is a measurement.",
    )


@gradient_reach.requires("float64, bfloat16 and memory that is not contiguous work too")
def _(answer, case):
    _agree_reach(
        case, answer, a_layer_that_halves, probe(2, 5, 3, seed=260, dtype=torch.float64)
    )
    _agree_reach(
        case,
        answer,
        a_layer_that_halves,
        probe(2, 5, 3, seed=270, dtype=torch.bfloat16),
    )
    _agree_reach(case, answer, a_recurrent_layer, strided(probe(2, 5, 3, seed=280)))


@gradient_reach.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, a_layer_that_halves, probe(2, 4, 3))


# RNNLanguageModel ------------------------------------------------------------------


def _weights(v, d, n, seed=300):
    return {
        "embedding": probe(v, d, seed=seed),
        "w_x": probe(d, n, seed=seed + 1, scale=0.6),
        "w_h": probe(n, n, seed=seed + 2, scale=0.5),
        "b": probe(n, seed=seed + 3, scale=0.7),
        "head": probe(v, n, seed=seed + 4),
    }


def _logits(ids, embedding, w_x, w_h, b, head):
    """The same from PyTorch's own parts."""
    x = F.embedding(ids, embedding)
    states = _torch_rnn(x, x.new_zeros(len(ids), len(b)), w_x, w_h, b)
    return F.linear(states, head)


def _loaded(case, answer, v=11, d=3, n=5, seed=300):
    """A model with known weights, and the same weights in float64."""
    weights = _weights(v, d, n, seed)
    model = case.load(case.call(answer, v, d, n), **weights)
    return model, {name: w.double() for name, w in weights.items()}


def _drawn(w):
    """In a word, how a parameter starts."""
    alike = bool((w == w.flatten()[0]).all())
    return "differing" if not alike else "constant" if w.any() else "zero"


def _in_range(size, least, most):
    """In words, so that two mistakes of one kind look alike and others do not."""
    return "small" if size <= least else "large" if size >= most else "fits"


def _agree_model(case, model, ids, weights, what="the result"):
    logits = case.call(model, ids)
    case.close(logits, _logits(ids, **weights), what)
    return logits


@RNNLanguageModel.requires(
    "its parameters are embedding, w_x, w_h, b and head, and nothing else",
    "`w_x`, `w_h` and `b` are one `nn.Parameter` each, laid out as `rnn` wants them; "
    "`head` is a linear layer without bias.",
)
def _(answer, case):
    v, d, n = 11, 3, 5
    model, _ = _loaded(case, answer, v, d, n)
    case.parameter_count(model, v * d + d * n + n * n + n + n * v)


@RNNLanguageModel.requires(
    "logits (B, T, V): the embedded tokens run through the RNN, then the head",
    "Embedding, `rnn` from a state of zeros, head; print the shape after each.",
)
def _(answer, case):
    model, weights = _loaded(case, answer)
    case.equal(
        tuple(case.call(model, probe_ids(2, 4, below=11)).shape),
        (2, 4, 11),
        "the shape",
    )
    _agree_model(case, model, probe_ids(2, 4, below=11), weights)
    _agree_model(case, model, probe_ids(3, 1, below=11, seed=1), weights)
    _agree_model(case, model, probe_ids(1, 7, below=11, seed=2), weights)
    model, weights = _loaded(case, answer, v=7, d=4, n=4, seed=310)
    _agree_model(case, model, probe_ids(4, 4, below=7, seed=3), weights)


@RNNLanguageModel.requires(
    "a second call starts afresh, in training and in eval mode",
    "The state belongs to one call. Nothing about it is kept in `self`.",
)
def _(answer, case):
    model, weights = _loaded(case, answer)
    first, second = probe_ids(2, 5, below=11), probe_ids(2, 5, below=11, seed=4)
    _agree_model(case, model, first, weights)
    _agree_model(case, model, second, weights)
    _agree_model(case, model.eval(), first, weights, "the result in eval()")


@RNNLanguageModel.requires(
    "what it predicts after a token does not depend on later tokens",
)
def _(answer, case):
    model, _ = _loaded(case, answer)
    ids = probe_ids(2, 6, below=11, seed=5)
    changed = ids.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    case.equal(
        case.call(model, ids)[:, :4].detach(),
        case.call(model, changed)[:, :4].detach(),
        "the logits before the change",
    )


@RNNLanguageModel.requires(
    "it works after .double() and in bfloat16",
    "The first state must have the dtype of the weights.",
)
def _(answer, case):
    model, weights = _loaded(case, answer)
    ids = probe_ids(2, 4, below=11, seed=6)
    logits = _agree_model(case, model.double(), ids, weights)
    case.equal(str(logits.dtype), "torch.float64", "the dtype after .double()")
    model, weights = _loaded(case, answer)
    weights = {name: w.bfloat16().double() for name, w in weights.items()}
    logits = case.call(model.bfloat16(), ids)
    case.close(logits, _logits(ids, **weights), "the result in bfloat16", tolerance=0.2)


@RNNLanguageModel.requires(
    "every parameter gets the gradient that PyTorch's own RNN would give it",
    "All five must be part of the computation, at every step.",
)
def _(answer, case):
    model, weights = _loaded(case, answer)
    ids = probe_ids(2, 6, below=11, seed=7)
    direction = probe(2, 6, 11, seed=320)
    (case.call(model, ids) * direction).sum().backward()
    for leaf in weights.values():
        leaf.requires_grad_()
    (_logits(ids, **weights) * direction.double()).sum().backward()
    gradients = dict(model.named_parameters())
    for name, leaf in weights.items():
        found = gradients.get(f"{name}.weight", gradients.get(name))
        given = torch.zeros_like(found) if found.grad is None else found.grad
        case.note(given.clone())
        case.close(given, leaf.grad, f"the gradient of `{name}`")


@RNNLanguageModel.requires(
    "it starts with weights drawn at random, of a size that training can begin with",
    "Divide random weights by the root of the number of inputs, or take `w_h` "
    "orthogonal: a state must neither fade nor saturate in the first steps.",
)
def _(answer, case):
    v, d, n = 50, 24, 40
    model, other = case.call(answer, v, d, n), case.call(answer, v, d, n)
    parameters, others = dict(model.named_parameters()), dict(other.named_parameters())
    for name in ("w_x", "w_h"):
        case.note(_drawn(parameters[name]))
        case.true(
            not torch.equal(parameters[name], others[name]),
            f"`{name}` is the same in two new models: draw it at random.",
        )
        smallest = torch.linalg.matrix_rank(parameters[name].detach())
        case.true(
            int(smallest) > 1,
            f"`{name}` starts with all rows alike, so all units would learn the same.",
        )
    radius = torch.linalg.eigvals(parameters["w_h"].detach()).abs().max().item()
    case.note(_in_range(radius, 0.3, 2))
    case.true(
        0.3 < radius < 2,
        f"`w_h` starts with a spectral radius of {radius:.2g}; between 0.3 and 2 a "
        "state neither fades within a step or two nor saturates.",
    )
    wide = case.call(answer, v, d, 4 * n).w_h.detach()
    radius = torch.linalg.eigvals(wide).abs().max().item()
    case.note(_in_range(radius, 0.3, 2))
    case.true(
        0.3 < radius < 2,
        f"With {4 * n} units `w_h` starts with a spectral radius of {radius:.2g}; it fits "
        f"with {n}. The scale must depend on the number of units.",
    )
    size = parameters["w_x"].detach().square().sum(0).mean().sqrt().item()
    case.note(_in_range(size, 0.1, 3))
    case.true(
        0.1 < size < 3,
        f"The columns of `w_x` start with a length of {size:.2g}; near 1, the sum over "
        "the inputs is about as large as one of them.",
    )
    case.true(not parameters["b"].any(), "`b` does not start at zero.")
    ids = probe_ids(8, 20, below=v, seed=8)
    with torch.no_grad(), case.unrecorded():
        logits = case.call(model, ids)
        case.recording[-1] = tuple(
            logits.shape
        )  # the values differ from model to model
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten()).item()
    case.true(
        loss < math.log(v) + 1.5,
        f"A new model's loss is {loss:.2f} on random tokens, where guessing evenly "
        f"gives {math.log(v):.2f}: the first logits are too large.",
    )


@RNNLanguageModel.requires("it creates nothing on another device")
def _(answer, case):
    model, _ = _loaded(case, answer)
    case.any_device(model, probe_ids(2, 4, below=11))
