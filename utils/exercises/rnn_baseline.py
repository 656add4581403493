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


# rnn_cell -----------------------------------------------------------------------------


def torch_cell(x, h, w_x, w_h, b):
    """What `nn.RNNCell` computes; its matrices are the transposed ones."""
    return torch.rnn_tanh_cell(x, h, w_x.T, w_h.T, b, torch.zeros_like(b))


def cell_inputs(batch=2, d=3, n=5, seed=0, scale=1.0, dtype=torch.float32):
    return (
        probe(batch, d, seed=seed, scale=scale, dtype=dtype),
        probe(batch, n, seed=seed + 1, scale=0.5, dtype=dtype),
        probe(d, n, seed=seed + 2, scale=0.6, dtype=dtype),
        probe(n, n, seed=seed + 3, scale=0.5, dtype=dtype),
        probe(n, seed=seed + 4, scale=0.7, dtype=dtype),
    )


def cell_agrees(case, answer, *inputs):
    case.agrees(answer, torch_cell, *inputs)


@rnn_cell.requires(
    "the new state is tanh of input, old state and bias together",
    "Three things are added: the input times its matrix, the state times its own, and "
    "the bias. The tanh comes last.",
)
def _(answer, case):
    cell_agrees(case, answer, *cell_inputs())
    cell_agrees(case, answer, *cell_inputs(batch=1, d=7, n=4, seed=10))
    cell_agrees(case, answer, *cell_inputs(batch=3, d=4, n=4, seed=20))


@rnn_cell.requires(
    "large sums end at −1 or 1, without overflow",
    "Which function of torch gives a tanh that never overflows?",
)
def _(answer, case):
    cell_agrees(case, answer, *cell_inputs(seed=30, scale=400))


@rnn_cell.requires(
    "gradients flow back to all five arguments, and stay finite for large sums",
    "An exponential that overflows may still give the right value. Its gradient is NaN.",
)
def _(answer, case):
    case.gradients_agree(answer, torch_cell, *cell_inputs(seed=60))
    x, *rest = cell_inputs(batch=3, seed=70)
    far = torch.tensor([400.0, 1.0, -400.0])[:, None]
    case.gradients_agree(answer, torch_cell, far * x, *rest)


# rnn ----------------------------------------------------------------------------------


def torch_rnn(x, h0, w_x, w_h, b):
    """What `nn.RNN(batch_first=True)` computes, every state."""
    weights = [w_x.T, w_h.T, b, torch.zeros_like(b)]
    states, _ = torch.rnn_tanh(
        x, h0[None], weights, True, 1, 0.0, False, False, True
    )  # has biases, layers, dropout, training, both directions, batch first
    return states


def rnn_inputs(batch=2, time=7, d=3, n=5, seed=0, dtype=torch.float32):
    x = probe(batch, time, d, seed=seed + 7, dtype=dtype)
    return (x, *cell_inputs(batch, d, n, seed, dtype=dtype)[1:])


def rnn_agrees(case, answer, *inputs):
    case.agrees(answer, torch_rnn, *inputs)


@rnn.requires(
    "each step starts from the state of the one before, the first from h0, and all "
    "states come back",
    "Print the shape of what you hand to the cell at each step: `(B, D)` and `(B, H)`. "
    "The first step has a state before it too: the one that is handed in.",
)
def _(answer, case):
    rnn_agrees(case, answer, *rnn_inputs(seed=20))
    rnn_agrees(case, answer, *rnn_inputs(batch=5, time=3, d=2, n=7, seed=50))


@rnn.requires(
    "batch and time stay apart when they are equally large",
    "With B = T the shapes cannot tell batch from time. Which dimension does your loop "
    "run over, and along which do you put the states together?",
)
def _(answer, case):
    rnn_agrees(case, answer, *rnn_inputs(batch=4, time=4, d=4, n=4, seed=40))


@rnn.requires(
    "a single step, a single sequence and a long sequence work, and a second call does "
    "not remember the first",
    "With one step or one sequence the result is still `(B, T, H)`.",
)
def _(answer, case):
    rnn_agrees(case, answer, *rnn_inputs(time=1))
    rnn_agrees(case, answer, *rnn_inputs(batch=1, time=6, seed=30))
    for _ in range(2):
        rnn_agrees(case, answer, *rnn_inputs(batch=3, time=40, d=2, seed=60))


@rnn.requires(
    "gradients flow back through all steps, to h0 and to every input",
    "The state that goes into the next step must still be attached to the graph, and no "
    "later step may overwrite it in a buffer.",
)
def _(answer, case):
    case.gradients_agree(answer, torch_rnn, *rnn_inputs(seed=100))


# lstm_cell ----------------------------------------------------------------------------


def torch_lstm(x, h, c, w_x, w_h, b):
    """What `nn.LSTMCell` computes; its matrices are the transposed ones."""
    return torch.lstm_cell(x, (h, c), w_x.T, w_h.T, b, torch.zeros_like(b))


def lstm_inputs(batch=2, d=3, n=5, seed=0, scale=1.0, dtype=torch.float32):
    return (
        probe(batch, d, seed=seed, scale=scale, dtype=dtype),
        probe(batch, n, seed=seed + 1, scale=0.5, dtype=dtype),
        probe(batch, n, seed=seed + 2, scale=1.5, dtype=dtype),
        probe(d, 4 * n, seed=seed + 3, scale=0.6, dtype=dtype),
        probe(n, 4 * n, seed=seed + 4, scale=0.5, dtype=dtype),
        probe(4 * n, seed=seed + 5, scale=0.7, dtype=dtype),
    )


def lstm_agrees(case, answer, *inputs):
    result = case.call(answer, *inputs)
    case.is_tuple(result, 2, "the result (h, c)")
    expected = torch_lstm(*[each.double() for each in inputs])
    case.close(result[1], expected[1], "`c`", like=inputs[0])
    case.close(result[0], expected[0], "`h` (`c` is right)", like=inputs[0])
    return result


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
    "The four blocks are i, f, g, o, in this order. A gate is open where its sum is far "
    "above 0, and shut where it is far below.",
)
def _(answer, case):
    case.call(answer, *lstm_inputs())  # tells one mistake from another
    lstm_agrees(case, answer, *with_gates(i=200, f=-200, o=200))
    lstm_agrees(case, answer, *with_gates(i=-200, f=200, o=200))


@lstm_cell.requires(
    "h and c are those of the formulas, with the gates in the order i, f, g, o",
    "Compare c first: it needs only i, f and g. If c is right and h is not, look at o.",
)
def _(answer, case):
    lstm_agrees(case, answer, *lstm_inputs())
    lstm_agrees(case, answer, *lstm_inputs(batch=1, d=7, n=6, seed=10))
    lstm_agrees(case, answer, *lstm_inputs(batch=3, d=5, n=4, seed=20))
    lstm_agrees(case, answer, *lstm_inputs(batch=4, d=3, n=1, seed=30))


@lstm_cell.requires(
    "the memory may be larger than 1, and large sums give no overflow",
    "Only what is shown is squashed. Which functions of torch never overflow?",
)
def _(answer, case):
    x, h, c, *weights = lstm_inputs(seed=40)
    lstm_agrees(case, answer, x, h, 20 * c, *weights)
    lstm_agrees(case, answer, *lstm_inputs(seed=50, scale=400))


@lstm_cell.requires("a second step goes on from the first")
def _(answer, case):
    x, h, c, *weights = lstm_inputs(seed=60)
    first = lstm_agrees(case, answer, x, h, c, *weights)
    lstm_agrees(case, answer, x.flip(0), *[r.detach() for r in first], *weights)


@lstm_cell.requires(
    "gradients flow back to all six arguments, and stay finite for large sums",
    "The memory c is the path on which a gradient survives: do not cut it, and do not "
    "overwrite it in place. NaN comes from an exponential that overflowed, also from one "
    "that `torch.where` did not choose.",
)
def _(answer, case):
    case.gradients_agree(answer, torch_lstm, *lstm_inputs(seed=90))
    case.gradients_agree(answer, torch_lstm, *lstm_inputs(seed=100, scale=400))


# All three ----------------------------------------------------------------------------


def requires_any_memory(exercise, inputs, agrees):
    """Dtypes, strides and devices, of an exercise with float inputs alone."""

    @exercise.requires(
        "float16, bfloat16, float64 and memory that is not contiguous work too",
        "Where you create a tensor, give it the dtype of the input.",
    )
    def _(answer, case):
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            agrees(case, answer, *inputs(seed=40, dtype=dtype))
        agrees(case, answer, *map(strided, inputs(seed=50)))
        x, *rest = inputs(seed=60)
        agrees(case, answer, x.mT.contiguous().mT, *rest)

    @exercise.requires("it creates nothing on another device")
    def _(answer, case):
        case.any_device(answer, *inputs())


requires_any_memory(rnn_cell, cell_inputs, cell_agrees)
requires_any_memory(rnn, rnn_inputs, rnn_agrees)
requires_any_memory(lstm_cell, lstm_inputs, lstm_agrees)


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


def a_window_of_two(x):
    """Each step sees itself and the one before."""
    return x**3 + F.pad(x, (0, 0, 1, 0))[:, :-1] ** 2


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


def reach_agrees(case, answer, layer, x, call=None):
    expected = reach_by_differences(layer, x)  # before the answer can change the layer
    actual = (call or case.call)(answer, layer, x)
    # Differences are exact to some 1e−9 only; nothing asked for here is finer.
    case.close(actual, expected, "the reach of each step", like=x)
    return actual


@gradient_reach.requires(
    "for a layer that halves its memory at each step the reach halves too",
    "For h_t = x_t + h_{t−1}/2 the last state is x_T + x_{T−1}/2 + x_{T−2}/4 + …: what "
    "is its gradient with respect to each x_t? Index 0 of the result is the first step. "
    "`torch.autograd.grad` needs one number, and an input that asks for gradients.",
)
def _(answer, case):
    reach_agrees(case, answer, a_layer_that_halves, probe(2, 5, 3, seed=140))


@gradient_reach.requires(
    "it is the norm over D, per step and sequence, averaged over the batch",
    "The gradient has the shape of `x`, `(B, T, D)`. Which dimension does the norm take "
    "away, which the mean, and in which order?",
)
def _(answer, case):
    reach_agrees(case, answer, ALayerThatSquares(), probe(4, 5, 3, seed=170))
    rows = torch.tensor([1.0, -1.0, 30.0])[:, None, None]
    reach_agrees(case, answer, ALayerThatSquares(), rows * probe(3, 4, 3, seed=180))


@gradient_reach.requires(
    "only the last output counts, whichever steps each output sees",
    "The layer gives an output at each step. One of them is asked for, and all its "
    "features, added up.",
)
def _(answer, case):
    reach_agrees(case, answer, a_layer_that_mixes, probe(2, 5, 3, seed=190))
    reach_agrees(case, answer, a_layer_that_mixes, probe(3, 1, 4, seed=200))
    reach_agrees(case, answer, a_window_of_two, probe(2, 5, 3, seed=210))


@gradient_reach.requires(
    "the layer's parameters and their gradients stay as they are",
    "`torch.autograd.grad` returns a gradient; `backward()` adds one to everything that "
    "asks for it, the layer's own parameters included.",
)
def _(answer, case):
    for before in (None, probe(3, 5, seed=220)):
        layer = ALayerThatSquares()
        layer.w.grad = None if before is None else before.clone()
        reach_agrees(case, answer, layer, probe(2, 4, 3, seed=230))
        after = layer.w.grad
        kept = None not in (before, after) and torch.equal(after, before)
        case.true(
            kept or after is before,
            "After the call the gradient that the layer's parameters held is gone."
            if after is None
            else "After the call the layer's parameters hold another gradient than "
            "before: a measurement must not leave one behind, or the next training "
            "step adds to it.",
        )
        unchanged = layer.w.requires_grad and torch.equal(
            layer.w, probe(3, 5, seed=130)
        )
        case.true(unchanged, "It changed the layer's parameters.")


@gradient_reach.requires(
    "a module is measured in the mode that it is in, and stays in it",
    "Call the layer as it comes.",
)
def _(answer, case):
    for training in (True, False):
        layer = ALayerWithTwoModes().train(training)
        reach_agrees(case, answer, layer, probe(2, 4, 3, seed=290))
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


@gradient_reach.requires("float64, bfloat16 and memory that is not contiguous work too")
def _(answer, case):
    for dtype in (torch.float64, torch.bfloat16):
        x = probe(2, 5, 3, seed=260, dtype=dtype)
        reach_agrees(case, answer, a_layer_that_halves, x)
    reach_agrees(case, answer, a_layer_that_mixes, strided(probe(2, 5, 3, seed=280)))


@gradient_reach.requires("it creates nothing on another device")
def _(answer, case):
    case.any_device(answer, a_layer_that_halves, probe(2, 4, 3))


# RNNLanguageModel ---------------------------------------------------------------------


def logits_of(ids, embedding, w_x, w_h, b, head):
    """The same from PyTorch's own parts."""
    x = F.embedding(ids, embedding)
    states = torch_rnn(x, x.new_zeros(len(ids), len(b)), w_x, w_h, b)
    return F.linear(states, head)


def loaded(case, answer, v=11, d=3, n=5, seed=300):
    """A model with known weights, and the same weights in float64."""
    weights = {
        "embedding": probe(v, d, seed=seed),
        "w_x": probe(d, n, seed=seed + 1, scale=0.6),
        "w_h": probe(n, n, seed=seed + 2, scale=0.5),
        "b": probe(n, seed=seed + 3, scale=0.7),
        "head": probe(v, n, seed=seed + 4),
    }
    model = case.load(case.call(answer, v, d, n), **weights)
    return model, {name: w.double() for name, w in weights.items()}


def model_agrees(case, model, ids, weights, what="the result"):
    logits = case.call(model, ids)
    case.close(logits, logits_of(ids, **weights), what)
    return logits


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
    model, weights = loaded(case, answer)
    model_agrees(case, model, probe_ids(2, 4, below=11), weights)
    model_agrees(case, model, probe_ids(3, 1, below=11, seed=1), weights)
    model_agrees(case, model, probe_ids(1, 7, below=11, seed=2), weights)
    model, weights = loaded(case, answer, v=7, d=4, n=4, seed=310)
    model_agrees(case, model, probe_ids(4, 4, below=7, seed=3), weights)


@RNNLanguageModel.requires(
    "a second call starts afresh, in training and in eval mode",
    "The state belongs to one call. Nothing about it is kept in `self`.",
)
def _(answer, case):
    model, weights = loaded(case, answer)
    first, second = probe_ids(2, 5, below=11), probe_ids(2, 5, below=11, seed=4)
    model_agrees(case, model, first, weights)
    model_agrees(case, model, second, weights)
    model_agrees(case, model.eval(), first, weights, "the result in eval()")


@RNNLanguageModel.requires(
    "it works after .double() and in bfloat16",
    "The first state must have the dtype of the weights.",
)
def _(answer, case):
    model, weights = loaded(case, answer)
    ids = probe_ids(2, 4, below=11, seed=6)
    logits = model_agrees(case, model.double(), ids, weights)
    case.equal(str(logits.dtype), "torch.float64", "the dtype after .double()")
    model, weights = loaded(case, answer)
    weights = {name: w.bfloat16().double() for name, w in weights.items()}
    logits = case.call(model.bfloat16(), ids)
    expected = logits_of(ids, **weights)
    case.close(logits, expected, "the result in bfloat16", tolerance=0.2)


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


def fits(case, size, least, most, otherwise):
    """`size` lies between; recorded in a word, as it differs from model to model."""
    case.note("small" if size <= least else "large" if size >= most else "fits")
    case.true(least < size < most, otherwise)


@RNNLanguageModel.requires(
    "it starts with weights drawn at random, of a size that training can begin with",
    "Divide random weights by the root of the number of inputs, or take `w_h` "
    "orthogonal: a state must neither fade nor saturate in the first steps.",
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
    wide = case.call(answer, v, 64 * n, 4 * n)
    for each in (model, wide):
        n_inputs, units = each.w_x.shape
        radius = torch.linalg.eigvals(each.w_h.detach()).abs().max().item()
        at = f"With {n_inputs} inputs and {units} units"
        text = (
            f"{at} `w_h` starts with a spectral radius of {radius:.2g}; between 0.3 and "
            "2 a state neither fades within a step or two nor saturates."
        )
        fits(case, radius, 0.3, 2, text)
        length = each.w_x.detach().square().sum(0).mean().sqrt().item()
        text = (
            f"{at} the columns of `w_x` start with a length of {length:.2g}; near 1, the "
            "sum over the inputs is about as large as one of them."
        )
        fits(case, length, 0.1, 3, text)
    case.true(not model.b.any(), "`b` does not start at zero.")
    ids = probe_ids(8, 20, below=v, seed=8)
    with torch.no_grad(), case.unrecorded():
        logits = case.call(model, ids)
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten()).item()
    case.true(
        loss < math.log(v) + 1.5,
        f"A new model's loss is {loss:.2f} on random tokens, where guessing evenly "
        f"gives {math.log(v):.2f}: the first logits are too large.",
    )


@RNNLanguageModel.requires("it creates nothing on another device")
def _(answer, case):
    model, _ = loaded(case, answer)
    case.any_device(model, probe_ids(2, 4, below=11))
