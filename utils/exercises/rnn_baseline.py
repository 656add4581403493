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
language_model = Exercise("RNNLanguageModel", lesson="rnn_baseline")


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
def _(answer, t):
    t.agrees(answer, _torch_cell, *_cell_inputs())
    t.agrees(answer, _torch_cell, *_cell_inputs(batch=1, d=7, n=4, seed=10))


@rnn_cell.requires("it works when input and state have the same width")
def _(answer, t):
    t.agrees(answer, _torch_cell, *_cell_inputs(batch=3, d=4, n=4, seed=20))


@rnn_cell.requires(
    "large sums end at −1 or 1, without overflow",
    "Which function of torch gives a tanh that never overflows?",
)
def _(answer, t):
    t.agrees(answer, _torch_cell, *_cell_inputs(seed=30, scale=400))


@rnn_cell.requires(
    "float16, bfloat16, float64 and memory that is not contiguous work too"
)
def _(answer, t):
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        t.agrees(answer, _torch_cell, *_cell_inputs(seed=40, dtype=dtype))
    t.agrees(answer, _torch_cell, *map(strided, _cell_inputs(seed=50)))


@rnn_cell.requires(
    "gradients flow back to the input, the old state and all weights",
    "Training needs the gradient of every one of the five arguments.",
)
def _(answer, t):
    t.gradients_agree(answer, _torch_cell, *_cell_inputs(seed=60))


@rnn_cell.requires(
    "the gradients stay finite for large sums",
    "An exponential that overflows may still give the right value. Its gradient is NaN.",
)
def _(answer, t):
    x, *rest = _cell_inputs(batch=3, seed=70)
    far = torch.tensor([400.0, 1.0, -400.0])[:, None]
    t.gradients_agree(answer, _torch_cell, far * x, *rest)


@rnn_cell.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, *_cell_inputs())


@rnn_cell.fault(
    "no_tanh",
    "The sum is returned as it is. Without the tanh the state is not bounded, and any "
    "number of steps is one linear map.",
)
def _(x, h, w_x, w_h, b):
    return x @ w_x + h @ w_h + b


@rnn_cell.fault(
    "sigmoid", "The squashing function is a sigmoid, which is never below 0."
)
def _(x, h, w_x, w_h, b):
    return torch.sigmoid(x @ w_x + h @ w_h + b)


@rnn_cell.fault("relu", "The function around the sum is a ReLU; tanh is asked for.")
def _(x, h, w_x, w_h, b):
    return torch.relu(x @ w_x + h @ w_h + b)


@rnn_cell.fault(
    "w_h_transposed",
    "`w_h` is applied transposed. It is square, so the shapes cannot tell: rows are "
    "vectors in this course, and stand on the left of a matrix.",
)
def _(x, h, w_x, w_h, b):
    return torch.tanh(x @ w_x + h @ w_h.T + b)


@rnn_cell.fault(
    "w_x_transposed",
    "`w_x` is applied transposed. That crashes, unless input and state are equally "
    "wide: rows are vectors in this course, and stand on the left of a matrix.",
)
def _(x, h, w_x, w_h, b):
    return torch.tanh(x @ w_x.T + h @ w_h + b)


@rnn_cell.fault(
    "w_x_on_the_left",
    "`w_x` stands on the left of the input. Rows are vectors in this course: the batch "
    "stands on the left, its matrix on the right.",
)
def _(x, h, w_x, w_h, b):
    return torch.tanh(w_x @ x + h @ w_h + b)


@rnn_cell.fault(
    "w_h_on_the_left",
    "`w_h` stands on the left of the state. Rows are vectors in this course: the batch "
    "stands on the left, its matrix on the right.",
)
def _(x, h, w_x, w_h, b):
    return torch.tanh(x @ w_x + w_h @ h + b)


@rnn_cell.fault("no_bias", "The bias is not added.")
def _(x, h, w_x, w_h, b):
    return torch.tanh(x @ w_x + h @ w_h)


@rnn_cell.fault(
    "no_state",
    "The old state does not enter. A cell like this forgets everything at each step.",
)
def _(x, h, w_x, w_h, b):
    return torch.tanh(x @ w_x + b)


@rnn_cell.fault("no_input", "The input `x` does not enter.")
def _(x, h, w_x, w_h, b):
    return torch.tanh(h @ w_h + b)


@rnn_cell.fault(
    "bias_outside",
    "The bias is added after the tanh, so the state can leave the range −1 to 1.",
)
def _(x, h, w_x, w_h, b):
    return torch.tanh(x @ w_x + h @ w_h) + b


@rnn_cell.fault(
    "two_tanhs",
    "Input and state go through a tanh each. The tanh belongs around their sum.",
)
def _(x, h, w_x, w_h, b):
    return torch.tanh(x @ w_x) + torch.tanh(h @ w_h + b)


@rnn_cell.fault(
    "state_outside",
    "Only the input goes through the tanh. The state's part belongs inside as well, or "
    "the state grows without bound.",
)
def _(x, h, w_x, w_h, b):
    return torch.tanh(x @ w_x + b) + h @ w_h


@rnn_cell.fault(
    "state_not_mixed",
    "The old state is added as it is, without its matrix `w_h`.",
)
def _(x, h, w_x, w_h, b):
    return torch.tanh(x @ w_x + h + b)


@rnn_cell.fault(
    "state_added_after",
    "The old state is added to the new one. A plain recurrent cell replaces it; adding "
    "is what a residual connection does.",
)
def _(x, h, w_x, w_h, b):
    return h + torch.tanh(x @ w_x + h @ w_h + b)


@rnn_cell.fault(
    "elementwise",
    "The state is multiplied with the diagonal of `w_h` only, so no number of the "
    "state sees another.",
)
def _(x, h, w_x, w_h, b):
    return torch.tanh(x @ w_x + h * w_h.diagonal() + b)


@rnn_cell.fault(
    "tanh_by_hand",
    "This tanh is built from exponentials. They overflow for large sums, and inf/inf "
    "is NaN.",
)
def _(x, h, w_x, w_h, b):
    z = x @ w_x + h @ w_h + b
    return (z.exp() - (-z).exp()) / (z.exp() + (-z).exp())


@rnn_cell.fault(
    "tanh_from_one_exponential",
    "This tanh is built from an exponential that overflows for large sums. The value is "
    "still right, but the gradient is infinity times 0, NaN.",
)
def _(x, h, w_x, w_h, b):
    return 1 - 2 / ((2 * (x @ w_x + h @ w_h + b)).exp() + 1)


@rnn_cell.fault(
    "joined_in_two_orders",
    "Input and state are joined in one order and their matrices in the other, so that "
    "rows of `w_x` meet numbers of the state. The shapes fit either way.",
)
def _(x, h, w_x, w_h, b):
    return torch.tanh(torch.cat([h, x], dim=-1) @ torch.cat([w_x, w_h]) + b)


@rnn_cell.fault(
    "state_detached",
    "The old state is cut from the graph. Then no step can learn what it should have "
    "kept for a later one.",
)
def _(x, h, w_x, w_h, b):
    return torch.tanh(x @ w_x + h.detach() @ w_h + b)


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
def _(answer, t):
    t.agrees(answer, _torch_rnn, *_rnn_inputs(time=1))
    t.agrees(answer, _torch_rnn, *_rnn_inputs(batch=1, time=1, seed=10))


@rnn.requires(
    "each step starts from the state of the one before, and all states come back",
    "Print the shape of what you hand to the cell at each step: `(B, D)` and `(B, H)`.",
)
def _(answer, t):
    t.agrees(answer, _torch_rnn, *_rnn_inputs(seed=20))
    t.agrees(answer, _torch_rnn, *_rnn_inputs(batch=1, time=6, seed=30))


@rnn.requires(
    "batch and time stay apart when they are equally large",
    "With B = T the shapes cannot tell batch from time. Which dimension does your loop "
    "run over, and along which do you put the states together?",
)
def _(answer, t):
    t.agrees(answer, _torch_rnn, *_rnn_inputs(batch=4, time=4, d=4, n=4, seed=40))
    t.agrees(answer, _torch_rnn, *_rnn_inputs(batch=5, time=3, d=2, n=7, seed=50))


@rnn.requires("a long sequence works, and a second call does not remember the first")
def _(answer, t):
    inputs = _rnn_inputs(batch=3, time=40, d=2, seed=60)
    t.agrees(answer, _torch_rnn, *inputs)
    t.agrees(answer, _torch_rnn, *inputs)


@rnn.requires(
    "float16, bfloat16, float64 and memory that is not contiguous work too",
    "Where you create a tensor, give it the dtype of the input.",
)
def _(answer, t):
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        t.agrees(answer, _torch_rnn, *_rnn_inputs(seed=70, dtype=dtype))
    t.agrees(answer, _torch_rnn, *map(strided, _rnn_inputs(seed=80)))
    x, *rest = _rnn_inputs(batch=4, time=2, seed=90)
    t.agrees(answer, _torch_rnn, x.transpose(0, 1).contiguous().transpose(0, 1), *rest)


@rnn.requires(
    "gradients flow back through all steps, to h0 and to every input",
    "The state that goes into the next step must still be attached to the graph. If a "
    "variable “has been modified by an inplace operation”, the state was read out of a "
    "buffer that a later step writes to: keep it under a name of its own.",
)
def _(answer, t):
    t.gradients_agree(answer, _torch_rnn, *_rnn_inputs(time=6, seed=100))


@rnn.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, *_rnn_inputs())


@rnn.fault(
    "last_state_only",
    "Only the last state comes back. Every state is asked for: a language model "
    "predicts after each token.",
)
def _(x, h0, w_x, w_h, b):
    return _states(x, h0, w_x, w_h, b)[-1]


@rnn.fault(
    "time_first",
    "The states are put together with time in front, `(T, B, H)`; here the batch comes "
    "first.",
)
def _(x, h0, w_x, w_h, b):
    return torch.stack(_states(x, h0, w_x, w_h, b))


@rnn.fault(
    "time_last",
    "The states are put together with time at the end, `(B, H, T)`; here it comes "
    "second.",
)
def _(x, h0, w_x, w_h, b):
    return torch.stack(_states(x, h0, w_x, w_h, b), dim=-1)


@rnn.fault(
    "squeezed",
    "A dimension of size 1 is dropped, by `squeeze()` for instance. With one step or one "
    "sequence the result is still `(B, T, H)`.",
)
def _(x, h0, w_x, w_h, b):
    return torch.stack(_states(x, h0, w_x, w_h, b), dim=1).squeeze()


@rnn.fault(
    "view_instead_of_transpose",
    "The states are `(T, B, H)` in memory and only renamed `(B, T, H)` with view or "
    "reshape. That keeps the order in memory, so the states of different sequences "
    "are mixed up.",
)
def _(x, h0, w_x, w_h, b):
    states = torch.stack(_states(x, h0, w_x, w_h, b))
    return states.reshape(states.shape[1], states.shape[0], -1)


@rnn.fault(
    "input_view_instead_of_transpose",
    "The input is turned into `(T, B, D)` with view or reshape. That renames the "
    "dimensions without moving a number, so steps of different sequences are mixed up.",
)
def _(x, h0, w_x, w_h, b):
    steps = x.reshape(x.shape[1], x.shape[0], -1)
    return torch.stack(_states(steps.transpose(0, 1), h0, w_x, w_h, b), dim=1)


def _any_cell(x, h, w_x, w_h, b):
    """The cell in products, which broadcast where batches do not fit."""
    return torch.tanh(x @ w_x + h @ w_h + b)


@rnn.fault(
    "over_the_batch",
    "The loop runs over the first dimension, the batch, as if it were time. The first "
    "dimension of `x` counts sequences, and the second the steps.",
)
def _(x, h0, w_x, w_h, b):
    states = _states(x.transpose(0, 1), h0, w_x, w_h, b, cell=_any_cell)
    return torch.stack(states, dim=0)


@rnn.fault(
    "sequences_taken_for_steps",
    "The loop takes one sequence after the other, with all its steps at once. The first "
    "dimension of `x` counts sequences; at each step the cell needs one input of every "
    "sequence.",
)
def _(x, h0, w_x, w_h, b):
    states = _states(x.transpose(0, 1), h0, w_x, w_h, b, cell=_any_cell)
    return torch.stack(states, dim=1)


@rnn.fault(
    "as_many_steps_as_sequences",
    "The loop runs as often as there are sequences, `len(x)`. The steps are the second "
    "dimension of `x`.",
)
def _(x, h0, w_x, w_h, b):
    h, states = h0, []
    for t in range(len(x)):
        h = _torch_cell(x[:, t], h, w_x, w_h, b)
        states.append(h)
    return torch.stack(states, dim=1)


@rnn.fault(
    "as_many_steps_as_features",
    "The loop runs as often as an input has numbers, `x.shape[-1]`. The steps are the "
    "second dimension of `x`.",
)
def _(x, h0, w_x, w_h, b):
    h, states = h0, []
    for t in range(x.shape[-1]):
        h = _torch_cell(x[:, t], h, w_x, w_h, b)
        states.append(h)
    return torch.stack(states, dim=1)


@rnn.fault(
    "buffer_like_the_input",
    "The states are written into a buffer of the input's shape, `(B, T, D)`. A state has "
    "H numbers.",
)
def _(x, h0, w_x, w_h, b):
    states = torch.zeros_like(x)
    for t, h in enumerate(_states(x, h0, w_x, w_h, b)):
        states[:, t] = h
    return states


@rnn.fault(
    "steps_taken_from_the_batch",
    "The loop runs over the steps, but takes `x[t]`, which is sequence t. The first "
    "dimension of `x` is the batch.",
)
def _(x, h0, w_x, w_h, b):
    h, states = h0, []
    for t in range(x.shape[1]):
        h = _any_cell(x[t], h, w_x, w_h, b)
        states.append(h)
    return torch.stack(states, dim=1)


@rnn.fault("h0_ignored", "The first step starts from zeros, whatever `h0` says.")
def _(x, h0, w_x, w_h, b):
    return torch.stack(_states(x, torch.zeros_like(h0), w_x, w_h, b), dim=1)


@rnn.fault(
    "always_from_h0",
    "Every step starts from `h0`. The state of the step before must go in, or nothing "
    "is remembered.",
)
def _(x, h0, w_x, w_h, b):
    states = [_torch_cell(x[:, t], h0, w_x, w_h, b) for t in range(x.shape[1])]
    return torch.stack(states, dim=1)


@rnn.fault(
    "states_before",
    "The state *before* each step is returned: `h0` stands first and the last state is "
    "missing.",
)
def _(x, h0, w_x, w_h, b):
    return torch.stack([h0, *_states(x, h0, w_x, w_h, b)][:-1], dim=1)


@rnn.fault(
    "h0_included",
    "`h0` is returned as well, so there are T + 1 states. Return the one after each step.",
)
def _(x, h0, w_x, w_h, b):
    return torch.stack([h0, *_states(x, h0, w_x, w_h, b)], dim=1)


@rnn.fault(
    "side_by_side",
    "The states are joined along their own width, `(B, T·H)`. Time needs a dimension of "
    "its own.",
)
def _(x, h0, w_x, w_h, b):
    return torch.cat(_states(x, h0, w_x, w_h, b), dim=1)


@rnn.fault(
    "backwards",
    "The sequence is read from its end, so that every state has seen the future.",
)
def _(x, h0, w_x, w_h, b):
    return torch.stack(_states(x.flip(1), h0, w_x, w_h, b), dim=1).flip(1)


@rnn.fault(
    "reversed_states",
    "The states are right, but come back in reverse order.",
)
def _(x, h0, w_x, w_h, b):
    return torch.stack(_states(x, h0, w_x, w_h, b)[::-1], dim=1)


@rnn.fault(
    "one_state_repeated",
    "All steps show the last state: the list holds one tensor T times, which each step "
    "overwrote in place.",
)
def _(x, h0, w_x, w_h, b):
    states = _states(x, h0, w_x, w_h, b)
    return torch.stack([states[-1]] * len(states), dim=1)


@rnn.fault(
    "first_step_repeated",
    "Every step reads the first input. The step number must choose it.",
)
def _(x, h0, w_x, w_h, b):
    first = x[:, :1].expand(-1, x.shape[1], -1)
    return torch.stack(_states(first, h0, w_x, w_h, b), dim=1)


@rnn.fault(
    "first_step_skipped",
    "The loop leaves out the first step: it begins at the second input.",
)
def _(x, h0, w_x, w_h, b):
    return torch.stack(_states(x[:, 1:], h0, w_x, w_h, b), dim=1)


@rnn.fault(
    "last_step_skipped",
    "The loop leaves out the last step: it ends one input early.",
)
def _(x, h0, w_x, w_h, b):
    return torch.stack(_states(x[:, :-1], h0, w_x, w_h, b), dim=1)


@rnn.fault(
    "no_tanh",
    "The steps are linear: there is no tanh around the sum.",
)
def _(x, h0, w_x, w_h, b):
    def linear(x, h, w_x, w_h, b):
        return x @ w_x + h @ w_h + b

    return torch.stack(_states(x, h0, w_x, w_h, b, cell=linear), dim=1)


@rnn.fault(
    "detached_between_steps",
    "The state is cut from the graph between two steps. The values are right, but no "
    "gradient passes more than one step back, so nothing distant can be learned.",
)
def _(x, h0, w_x, w_h, b):
    states = _states(x, h0, w_x, w_h, b, between=torch.Tensor.detach)
    return torch.stack(states, dim=1)


@rnn.fault(
    "detached_before_each_step",
    "Each step gets a state that is cut from the graph, the first one too. The values "
    "are right, but no gradient leaves its step, so nothing distant can be learned.",
)
def _(x, h0, w_x, w_h, b):
    states = _states(x, h0.detach(), w_x, w_h, b, between=torch.Tensor.detach)
    return torch.stack(states, dim=1)


@rnn.fault(
    "float32_buffer",
    "The states are written into a buffer that is float32 whatever comes in.",
)
def _(x, h0, w_x, w_h, b):
    return torch.stack(_states(x, h0, w_x, w_h, b), dim=1).float()


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


def _agree_pair(t, answer, *inputs):
    result = t.call(answer, *inputs)
    t.is_tuple(result, 2, "the result (h, c)")
    expected = _torch_lstm(*[each.double() for each in inputs])
    for name, actual, true in zip("hc", result, expected, strict=True):
        t.close(actual, true, f"`{name}`", like=inputs[0])


@lstm_cell.requires(
    "h and c are those of the formulas, with the gates in the order i, f, g, o",
    "Compare c first: it needs only i, f and g. If c is right and h is not, look at o.",
)
def _(answer, t):
    _agree_pair(t, answer, *_lstm_inputs())
    _agree_pair(t, answer, *_lstm_inputs(batch=1, d=7, n=6, seed=10))


@lstm_cell.requires("it works with four units, and with one")
def _(answer, t):
    _agree_pair(t, answer, *_lstm_inputs(batch=3, d=5, n=4, seed=20))
    _agree_pair(t, answer, *_lstm_inputs(batch=4, d=3, n=1, seed=30))


@lstm_cell.requires(
    "the memory may be larger than 1, and large sums give no overflow",
    "Only what is shown is squashed. Which functions of torch never overflow?",
)
def _(answer, t):
    x, h, c, *weights = _lstm_inputs(seed=40)
    _agree_pair(t, answer, x, h, 20 * c, *weights)
    _agree_pair(t, answer, *_lstm_inputs(seed=50, scale=400))


@lstm_cell.requires("a second step goes on from the first")
def _(answer, t):
    x, h, c, *weights = _lstm_inputs(seed=60)
    result = t.call(answer, x, h, c, *weights)
    t.is_tuple(result, 2, "the result (h, c)")
    _agree_pair(t, answer, x.flip(0), *[r.detach() for r in result], *weights)


@lstm_cell.requires(
    "float16, bfloat16, float64 and memory that is not contiguous work too"
)
def _(answer, t):
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        _agree_pair(t, answer, *_lstm_inputs(seed=70, dtype=dtype))
    _agree_pair(t, answer, *map(strided, _lstm_inputs(seed=80)))


@lstm_cell.requires(
    "gradients flow back to all six arguments, and stay finite for large sums",
    "The memory c is the path on which a gradient survives: do not cut it, and do not "
    "overwrite it in place. NaN comes from an exponential that overflowed, also from one "
    "that `torch.where` did not choose.",
)
def _(answer, t):
    t.gradients_agree(answer, _torch_lstm, *_lstm_inputs(seed=90))
    t.gradients_agree(answer, _torch_lstm, *_lstm_inputs(seed=100, scale=400))


@lstm_cell.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, *_lstm_inputs())


def _gates(x, h, w_x, w_h, b):
    return (x @ w_x + h @ w_h + b).chunk(4, dim=-1)


def _lstm_from(i, f, g, o, c):
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _lstm_fault(name, sentence):
    """A fault written as a function of the four sums and the old memory."""

    def add(from_gates):
        def implementation(x, h, c, w_x, w_h, b):
            return from_gates(*_gates(x, h, w_x, w_h, b), c)

        lstm_cell.fault(name, sentence, implementation)
        return from_gates

    return add


@_lstm_fault(
    "order_ifog",
    "The last two blocks are exchanged: this is i, f, o, g. Here the candidate g comes "
    "third and the output gate last.",
)
def _(i, f, o, g, c):
    return _lstm_from(i, f, g, o, c)


@_lstm_fault(
    "order_figo",
    "Input and forget gate are exchanged: the first block is i, the second f.",
)
def _(f, i, g, o, c):
    return _lstm_from(i, f, g, o, c)


@_lstm_fault(
    "order_iofg",
    "The blocks are taken as i, o, f, g, which is ONNX's order. Here it is i, f, g, o.",
)
def _(i, o, f, g, c):
    return _lstm_from(i, f, g, o, c)


@_lstm_fault(
    "order_igfo",
    "The blocks are taken as i, g, f, o, which is the order of TensorFlow's first LSTM. "
    "Here it is i, f, g, o.",
)
def _(i, g, f, o, c):
    return _lstm_from(i, f, g, o, c)


@_lstm_fault(
    "order_fiog",
    "The blocks are taken as f, i, o, g, the order in which many texts list the gates. "
    "Here it is i, f, g, o.",
)
def _(f, i, o, g, c):
    return _lstm_from(i, f, g, o, c)


@lstm_cell.fault(
    "interleaved",
    "The gates are taken from every fourth column. They are four blocks, each of H "
    "columns side by side.",
)
def _(x, h, c, w_x, w_h, b):
    z = x @ w_x + h @ w_h + b
    return _lstm_from(*z.unflatten(-1, (-1, 4)).unbind(-1), c)


@lstm_cell.fault(
    "blocks_of_four",
    "`split(4)` cuts blocks of four columns. Four blocks are asked for, of H columns "
    "each: `chunk` takes their number.",
)
def _(x, h, c, w_x, w_h, b):
    i, f, g, o = (x @ w_x + h @ w_h + b).split(4, dim=-1)
    return _lstm_from(i, f, g, o, c)


@lstm_cell.fault(
    "cut_along_the_batch",
    "The sums are cut along the first dimension, the batch. The four blocks stand side "
    "by side in the last one: say so with `dim`.",
)
def _(x, h, c, w_x, w_h, b):
    i, f, g, o = (x @ w_x + h @ w_h + b).chunk(4)
    return _lstm_from(i, f, g, o, c)


@lstm_cell.fault(
    "blocks_by_view",
    "The sums are renamed `(4, B, H)` with view or reshape. That keeps the order in "
    "memory, where the four blocks of one row follow each other, so gates and sequences "
    "are mixed up.",
)
def _(x, h, c, w_x, w_h, b):
    z = x @ w_x + h @ w_h + b
    return _lstm_from(*z.reshape(4, len(x), -1), c)


@_lstm_fault("swapped", "The memory c is returned first. The order is `(h, c)`.")
def _(i, f, g, o, c):
    return _lstm_from(i, f, g, o, c)[::-1]


@_lstm_fault("h_only", "Only h comes back. The next step needs the memory c as well.")
def _(i, f, g, o, c):
    return _lstm_from(i, f, g, o, c)[0]


@_lstm_fault(
    "h_from_old_memory",
    "h is computed from the memory before the step. It shows the new one.",
)
def _(i, f, g, o, c):
    return torch.sigmoid(o) * torch.tanh(c), _lstm_from(i, f, g, o, c)[1]


@_lstm_fault(
    "h_without_tanh",
    "h is the memory times the output gate, without the tanh that keeps it within "
    "−1 and 1.",
)
def _(i, f, g, o, c):
    c = _lstm_from(i, f, g, o, c)[1]
    return torch.sigmoid(o) * c, c


@_lstm_fault(
    "output_gate_inside",
    "The output gate is multiplied before the tanh. It stands outside: o · tanh(c).",
)
def _(i, f, g, o, c):
    c = _lstm_from(i, f, g, o, c)[1]
    return torch.tanh(torch.sigmoid(o) * c), c


@_lstm_fault(
    "candidate_sigmoid",
    "The candidate g goes through a sigmoid. It is what is written, not how much, and "
    "must be able to be negative: tanh.",
)
def _(i, f, g, o, c):
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.sigmoid(g)
    return torch.sigmoid(o) * torch.tanh(c), c


@_lstm_fault("candidate_linear", "The candidate g is written without its tanh.")
def _(i, f, g, o, c):
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * g
    return torch.sigmoid(o) * torch.tanh(c), c


@_lstm_fault(
    "gates_tanh",
    "The gates go through a tanh. A gate says how much, from 0 to 1: sigmoid.",
)
def _(i, f, g, o, c):
    c = torch.tanh(f) * c + torch.tanh(i) * torch.tanh(g)
    return torch.tanh(o) * torch.tanh(c), c


@_lstm_fault(
    "gates_linear",
    "The gates are used as they are, without the sigmoid that opens them.",
)
def _(i, f, g, o, c):
    c = f * c + i * torch.tanh(g)
    return o * torch.tanh(c), c


@_lstm_fault(
    "memory_squashed",
    "The memory itself is squashed by the tanh at each step. Only what is shown is; the "
    "memory is carried on as it is, which is what lets a gradient through.",
)
def _(i, f, g, o, c):
    h, c = _lstm_from(i, f, g, o, c)
    return h, torch.tanh(c)


@_lstm_fault(
    "no_forget_gate",
    "The old memory is kept in full: the forget gate is missing. The LSTM of 1997 was "
    "like that; the gate came in 2000.",
)
def _(i, f, g, o, c):
    c = c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


@_lstm_fault(
    "no_input_gate",
    "The candidate is written in full: the input gate, which says how much of it, is "
    "missing.",
)
def _(i, f, g, o, c):
    c = torch.sigmoid(f) * c + torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


@_lstm_fault(
    "coupled_gates",
    "What is written is weighted with 1 minus the forget gate. That is a GRU's way; here "
    "the input gate decides by itself.",
)
def _(i, f, g, o, c):
    c = torch.sigmoid(f) * c + (1 - torch.sigmoid(f)) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


@_lstm_fault(
    "forget_inverted",
    "The forget gate is read the wrong way round. At 1 it keeps the memory, in spite of "
    "its name.",
)
def _(i, f, g, o, c):
    c = (1 - torch.sigmoid(f)) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


@_lstm_fault(
    "forget_bias_added",
    "1 is added to the forget gate. That is a way to choose the initial bias, and "
    "belongs into `b`, not into the cell.",
)
def _(i, f, g, o, c):
    return _lstm_from(i, f + 1, g, o, c)


@lstm_cell.fault("no_bias", "The bias is not added.")
def _(x, h, c, w_x, w_h, b):
    return _lstm_from(*_gates(x, h, w_x, w_h, 0 * b), c)


@lstm_cell.fault("no_state", "The old h does not enter the gates.")
def _(x, h, c, w_x, w_h, b):
    return _lstm_from(*_gates(x, 0 * h, w_x, w_h, b), c)


@lstm_cell.fault(
    "state_is_memory",
    "The memory c is multiplied with `w_h` in the place of h. The gates see what was "
    "shown, not the memory.",
)
def _(x, h, c, w_x, w_h, b):
    return _lstm_from(*_gates(x, c, w_x, w_h, b), c)


@_lstm_fault(
    "sigmoid_by_hand",
    "The sigmoid is built from an exponential. Far below zero that overflows: the value "
    "is still right, its gradient is NaN.",
)
def _(i, f, g, o, c):
    i, f, o = (1 / (1 + (-z).exp()) for z in (i, f, o))
    c = f * c + i * torch.tanh(g)
    return o * torch.tanh(c), c


@_lstm_fault(
    "memory_detached",
    "The memory is cut from the graph. It is the very path on which a gradient travels "
    "far.",
)
def _(i, f, g, o, c):
    return _lstm_from(i, f, g, o, c.detach())


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


def _agree_reach(t, answer, layer, x, **kwargs):
    actual = t.call(answer, layer, x, **kwargs)
    # Differences are exact to some 1e−9 only; nothing asked for here is finer.
    t.close(actual, _by_differences(layer, x), "the reach of each step", like=x)


@gradient_reach.requires(
    "for a layer that halves its memory at each step the reach halves too",
    "For h_t = x_t + h_{t−1}/2 the last state is x_T + x_{T−1}/2 + x_{T−2}/4 + …: what "
    "is its gradient with respect to each x_t? Index 0 of the result is the first step. "
    "`torch.autograd.grad` needs one number, and an input that asks for gradients.",
)
def _(answer, t):
    _agree_reach(t, answer, a_layer_that_halves, probe(1, 6, 3, seed=140))
    _agree_reach(t, answer, a_layer_that_halves, probe(4, 5, 1, seed=150))


@gradient_reach.requires(
    "it is the norm over D, per step and sequence, averaged over the batch",
    "The gradient has the shape of `x`, `(B, T, D)`. Which dimension does the norm take "
    "away, which the mean, and in which order?",
)
def _(answer, t):
    x = probe(2, 6, 3, seed=160)
    _agree_reach(t, answer, a_recurrent_layer, x)
    _agree_reach(t, answer, ALayerThatSquares(), probe(4, 5, 3, seed=170))
    rows = torch.tensor([1.0, -1.0, 30.0])[:, None, None]
    _agree_reach(t, answer, ALayerThatSquares(), rows * probe(3, 4, 3, seed=180))


@gradient_reach.requires(
    "only the last output counts, also where every output sees every input",
    "The layer gives an output at each step. One of them is asked for, and all its "
    "features, added up.",
)
def _(answer, t):
    _agree_reach(t, answer, a_layer_that_mixes, probe(2, 5, 3, seed=190))
    _agree_reach(t, answer, a_layer_that_mixes, probe(3, 1, 4, seed=200))


@gradient_reach.requires("steps that do not reach the last output get 0")
def _(answer, t):
    def a_window_of_two(x):
        return x**3 + F.pad(x, (0, 0, 1, 0))[:, :-1] ** 2

    _agree_reach(t, answer, a_window_of_two, probe(2, 5, 3, seed=210))


@gradient_reach.requires(
    "the layer's parameters and their gradients stay as they are",
    "`torch.autograd.grad` returns a gradient; `backward()` adds one to everything that "
    "asks for it, the layer's own parameters included.",
)
def _(answer, t):
    for before in (None, probe(3, 5, seed=220)):
        layer = ALayerThatSquares()
        layer.w.grad = None if before is None else before.clone()
        _agree_reach(t, answer, layer, probe(2, 4, 3, seed=230))
        after = layer.w.grad
        if before is None or after is None:
            same = after is before
        else:
            same = torch.equal(after, before)
        t.true(
            same,
            "After the call the gradient that the layer's parameters held is gone."
            if after is None
            else "After the call the layer's parameters hold another gradient than "
            "before: a measurement must not leave one behind, or the next training "
            "step adds to it.",
        )
        t.true(
            layer.w.requires_grad and torch.equal(layer.w, probe(3, 5, seed=130)),
            "It changed the layer's parameters.",
        )


@gradient_reach.requires(
    "a module is measured in the mode that it is in, and stays in it",
    "Call the layer as it comes.",
)
def _(answer, t):
    for training in (True, False):
        layer = ALayerWithTwoModes().train(training)
        x = probe(2, 4, 3, seed=290)
        expected = _by_differences(layer, x)  # before the answer can change the mode
        t.close(t.call(answer, layer, x), expected, "the reach of each step", like=x)
        t.true(
            layer.training == training,
            "After the call the layer is in another mode, training or eval, than "
            "before.",
        )


@gradient_reach.requires(
    "the caller's x is left alone, and may itself come from another computation",
    "Work on a copy of `x` that has no history.",
)
def _(answer, t):
    x = probe(2, 4, 3, seed=240)
    actual = t.mutate(answer, a_recurrent_layer, x)
    t.close(
        actual, _by_differences(a_recurrent_layer, x), "the reach of each step", like=x
    )
    t.true(
        not x.requires_grad and x.grad is None,
        "After the call the caller's `x` asks for gradients: mark a copy instead.",
    )
    leaf = probe(2, 4, 3, seed=250).requires_grad_()
    for given in (leaf, 2 * leaf):
        actual = t.mutate(answer, a_recurrent_layer, given)
        t.close(
            actual,
            _by_differences(a_recurrent_layer, given),
            "the reach of each step",
            like=x,
        )
        t.true(
            leaf.grad is None,
            "After the call the caller's `x` holds a gradient that it did not have.",
        )
        t.true(
            given.requires_grad,
            "After the call the caller's `x` no longer asks for gradients, as it did.",
        )
    t.true(
        not actual.requires_grad,
        "The result is still attached to a graph: it is a measurement.",
    )


@gradient_reach.requires("float64, bfloat16 and memory that is not contiguous work too")
def _(answer, t):
    _agree_reach(
        t, answer, a_layer_that_halves, probe(2, 5, 3, seed=260, dtype=torch.float64)
    )
    _agree_reach(
        t, answer, a_layer_that_halves, probe(2, 5, 3, seed=270, dtype=torch.bfloat16)
    )
    _agree_reach(t, answer, a_recurrent_layer, strided(probe(2, 5, 3, seed=280)))


@gradient_reach.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, a_layer_that_halves, probe(2, 4, 3))


def _gradient(layer, x, pick=lambda y: y[:, -1].sum()):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(pick(layer(x)), x)[0]


def _reach(gradient):
    return gradient.norm(dim=-1).mean(0)


@gradient_reach.fault(
    "tuple_not_unpacked",
    "`torch.autograd.grad` returns a tuple, one gradient for each input that it was "
    "asked about, and a tuple has no norm. Take the gradient out of it.",
)
def _(layer, x):
    x = x.detach().requires_grad_()
    return _reach(torch.autograd.grad(layer(x)[:, -1].sum(), x))


@gradient_reach.fault(
    "x_not_marked",
    "Nothing asks for gradients where the layer runs, so no graph is recorded and there "
    "is nothing to go back through. `detach()` gives a tensor without history, which "
    "does not ask yet: mark it before it goes into the layer.",
)
def _(layer, x):
    x = x.detach()
    return _reach(torch.autograd.grad(layer(x)[:, -1].sum(), x)[0])


@gradient_reach.fault(
    "not_added_up",
    "The last output has many numbers, and a gradient is taken of one. Add them up "
    "first, over the batch and the features.",
)
def _(layer, x):
    return _reach(_gradient(layer, x, lambda y: y[:, -1]))


@gradient_reach.fault(
    "all_outputs",
    "The outputs of all steps are added up. Then every step reaches itself, and the "
    "distance does not show: only the last output is asked for.",
)
def _(layer, x):
    return _reach(_gradient(layer, x, lambda y: y.sum()))


@gradient_reach.fault(
    "first_output",
    "The first output is taken instead of the last: it cannot depend on what comes later.",
)
def _(layer, x):
    return _reach(_gradient(layer, x, lambda y: y[:, 0].sum()))


@gradient_reach.fault(
    "last_sequence",
    "The last sequence of the batch is taken, `[-1]`, instead of the last step of each.",
)
def _(layer, x):
    return _reach(_gradient(layer, x, lambda y: y[-1].sum()))


@gradient_reach.fault(
    "last_feature",
    "The last feature of every output is taken, instead of all features of the last step.",
)
def _(layer, x):
    return _reach(_gradient(layer, x, lambda y: y[..., -1].sum()))


@gradient_reach.fault(
    "mean_of_features",
    "The features of the last output are averaged; they are to be added up.",
)
def _(layer, x):
    return _reach(_gradient(layer, x, lambda y: y[:, -1].mean(-1).sum()))


@gradient_reach.fault(
    "mean_of_last",
    "The gradient is that of a mean over the batch and its features. `sum()` is asked "
    "for; the average over the batch is taken of the norms, at the end.",
)
def _(layer, x):
    return _reach(_gradient(layer, x, lambda y: y[:, -1].mean()))


@gradient_reach.fault(
    "mean_of_sequences",
    "The last outputs are averaged over the batch, so each gradient is that much "
    "smaller. They are added up; the average is taken of the norms, at the end.",
)
def _(layer, x):
    return _reach(_gradient(layer, x, lambda y: y[:, -1].sum(-1).mean()))


@gradient_reach.fault(
    "first_sequence",
    "Only the first sequence's last output is differentiated. Those of all sequences are "
    "added up.",
)
def _(layer, x):
    return _reach(_gradient(layer, x, lambda y: y[0, -1].sum()))


@gradient_reach.fault(
    "squares_of_output",
    "The squares of the last output are added up before the gradient is taken. The "
    "outputs themselves are asked for.",
)
def _(layer, x):
    return _reach(_gradient(layer, x, lambda y: y[:, -1].square().sum()))


@gradient_reach.fault(
    "norm_of_output",
    "The last output becomes one number in another way than by adding up: its norm is "
    "taken, or one of its features. The sum is asked for; the norm comes later, over "
    "the gradient.",
)
def _(layer, x):
    return _reach(_gradient(layer, x, lambda y: y[:, -1].norm(dim=-1).sum()))


@gradient_reach.fault(
    "norm_over_the_batch",
    "One norm is taken over batch and features together. It is taken for each sequence "
    "by itself, and these are averaged.",
)
def _(layer, x):
    return _gradient(layer, x).norm(dim=(0, 2))


@gradient_reach.fault(
    "averaged_before_the_norm",
    "The gradients are averaged over the batch before the norm. Sequences that pull in "
    "opposite directions then cancel.",
)
def _(layer, x):
    return _gradient(layer, x).mean(0).norm(dim=-1)


@gradient_reach.fault(
    "summed_over_the_batch",
    "The norms are added up over the batch instead of averaged, so the result grows "
    "with the batch.",
)
def _(layer, x):
    return _gradient(layer, x).norm(dim=-1).sum(0)


@gradient_reach.fault(
    "not_averaged", "The average over the batch is missing: `(B, T)`."
)
def _(layer, x):
    return _gradient(layer, x).norm(dim=-1)


@gradient_reach.fault(
    "norm_over_time",
    "The norm is taken over time, so there is one number for each feature. It is taken "
    "over the features, for each step.",
)
def _(layer, x):
    return _gradient(layer, x).norm(dim=1).mean(0)


@gradient_reach.fault(
    "absolute_sum", "The absolute values are added up; the Euclidean norm is asked for."
)
def _(layer, x):
    return _gradient(layer, x).abs().sum(-1).mean(0)


@gradient_reach.fault(
    "absolute_mean",
    "The absolute values are averaged; the Euclidean norm is asked for.",
)
def _(layer, x):
    return _gradient(layer, x).abs().mean(-1).mean(0)


@gradient_reach.fault("squared", "The root of the norm is missing: these are squares.")
def _(layer, x):
    return _gradient(layer, x).square().sum(-1).mean(0)


@gradient_reach.fault(
    "root_mean_square",
    "The squares are averaged over the features; a norm adds them up.",
)
def _(layer, x):
    return _gradient(layer, x).square().mean(-1).sqrt().mean(0)


@gradient_reach.fault(
    "root_after_the_mean",
    "The squares are averaged over the batch and the root is taken last. The average is "
    "one of norms, so the root comes first.",
)
def _(layer, x):
    return _gradient(layer, x).square().sum(-1).mean(0).sqrt()


@gradient_reach.fault(
    "by_distance",
    "The result is ordered by distance, the last step first. Index t belongs to step t.",
)
def _(layer, x):
    return _reach(_gradient(layer, x)).flip(0)


@gradient_reach.fault(
    "relative_to_the_last",
    "The result is divided by its value at the last step. The norms themselves are asked "
    "for.",
)
def _(layer, x):
    reach = _reach(_gradient(layer, x))
    return reach / reach[-1]


@gradient_reach.fault(
    "of_the_input",
    "This is the norm of the input, not of a gradient.",
)
def _(layer, x):
    return _reach(x)


@gradient_reach.fault(
    "backward",
    "`backward()` also adds to the gradients of the layer's parameters. The next "
    "training step would see them; `torch.autograd.grad` only returns what is asked for.",
)
def _(layer, x):
    x = x.detach().clone().requires_grad_()
    layer(x)[:, -1].sum().backward()
    return _reach(x.grad)


@gradient_reach.fault(
    "gradients_cleared",
    "The gradients of the layer's parameters are thrown away. They are the caller's: "
    "leave them as they were.",
)
def _(layer, x):
    reach = _reach(_gradient(layer, x))
    if isinstance(layer, nn.Module):
        layer.zero_grad()
    return reach


@gradient_reach.fault(
    "eval_mode",
    "The layer is put into eval mode. It is the caller's, and is measured in the mode "
    "that it is in.",
)
def _(layer, x):
    if isinstance(layer, nn.Module):
        layer.eval()
    return _reach(_gradient(layer, x))


@gradient_reach.fault(
    "x_marked",
    "`requires_grad_()` is called on the caller's `x`. From then on every computation "
    "with it records a graph: mark a detached copy.",
)
def _(layer, x):
    x.requires_grad_()
    return _reach(torch.autograd.grad(layer(x)[:, -1].sum(), x)[0]).detach()


@gradient_reach.fault(
    "x_unmarked",
    "The caller's own `x` is marked, and the mark is taken off again, which fails for "
    "the result of another computation and is wrong for an `x` that asked before. Mark "
    "a detached copy.",
)
def _(layer, x):
    x.requires_grad_()
    reach = _reach(torch.autograd.grad(layer(x)[:, -1].sum(), x)[0]).detach()
    x.requires_grad_(False)
    return reach


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


def _loaded(t, answer, v=11, d=3, n=5, seed=300):
    """A model with known weights, and the same weights in float64."""
    weights = _weights(v, d, n, seed)
    model = t.load(t.call(answer, v, d, n), **weights)
    return model, {name: w.double() for name, w in weights.items()}


def _drawn(w):
    """In a word, how a parameter starts."""
    alike = bool((w == w.flatten()[0]).all())
    return "differing" if not alike else "constant" if w.any() else "zero"


def _in_range(size, least, most):
    """In words, so that two mistakes of one kind look alike and others do not."""
    return "small" if size <= least else "large" if size >= most else "fits"


def _agree_model(t, model, ids, weights, what="the result"):
    logits = t.call(model, ids)
    t.close(logits, _logits(ids, **weights), what)
    return logits


@language_model.requires(
    "its parameters are embedding, w_x, w_h, b and head, and nothing else",
    "`w_x`, `w_h` and `b` are one `nn.Parameter` each, laid out as `rnn` wants them; "
    "`head` is a linear layer without bias.",
)
def _(answer, t):
    v, d, n = 11, 3, 5
    model, _ = _loaded(t, answer, v, d, n)
    t.parameter_count(model, v * d + d * n + n * n + n + n * v)


@language_model.requires(
    "logits (B, T, V): the embedded tokens run through the RNN, then the head",
    "Embedding, `rnn` from a state of zeros, head; print the shape after each.",
)
def _(answer, t):
    model, weights = _loaded(t, answer)
    t.equal(
        tuple(t.call(model, probe_ids(2, 4, below=11)).shape), (2, 4, 11), "the shape"
    )
    _agree_model(t, model, probe_ids(2, 4, below=11), weights)
    _agree_model(t, model, probe_ids(3, 1, below=11, seed=1), weights)
    _agree_model(t, model, probe_ids(1, 7, below=11, seed=2), weights)
    model, weights = _loaded(t, answer, v=7, d=4, n=4, seed=310)
    _agree_model(t, model, probe_ids(4, 4, below=7, seed=3), weights)


@language_model.requires(
    "a second call starts afresh, in training and in eval mode",
    "The state belongs to one call. Nothing about it is kept in `self`.",
)
def _(answer, t):
    model, weights = _loaded(t, answer)
    first, second = probe_ids(2, 5, below=11), probe_ids(2, 5, below=11, seed=4)
    _agree_model(t, model, first, weights)
    _agree_model(t, model, second, weights)
    _agree_model(t, model.eval(), first, weights, "the result in eval()")


@language_model.requires(
    "what it predicts after a token does not depend on later tokens",
)
def _(answer, t):
    model, _ = _loaded(t, answer)
    ids = probe_ids(2, 6, below=11, seed=5)
    changed = ids.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    t.equal(
        t.call(model, ids)[:, :4].detach(),
        t.call(model, changed)[:, :4].detach(),
        "the logits before the change",
    )


@language_model.requires(
    "it works after .double() and in bfloat16",
    "The first state must have the dtype of the weights.",
)
def _(answer, t):
    model, weights = _loaded(t, answer)
    ids = probe_ids(2, 4, below=11, seed=6)
    logits = _agree_model(t, model.double(), ids, weights)
    t.equal(str(logits.dtype), "torch.float64", "the dtype after .double()")
    model, weights = _loaded(t, answer)
    weights = {name: w.bfloat16().double() for name, w in weights.items()}
    logits = t.call(model.bfloat16(), ids)
    t.close(logits, _logits(ids, **weights), "the result in bfloat16", tolerance=0.2)


@language_model.requires(
    "every parameter gets the gradient that PyTorch's own RNN would give it",
    "All five must be part of the computation, at every step.",
)
def _(answer, t):
    model, weights = _loaded(t, answer)
    ids = probe_ids(2, 6, below=11, seed=7)
    direction = probe(2, 6, 11, seed=320)
    (t.call(model, ids) * direction).sum().backward()
    for leaf in weights.values():
        leaf.requires_grad_()
    (_logits(ids, **weights) * direction.double()).sum().backward()
    gradients = dict(model.named_parameters())
    for name, leaf in weights.items():
        found = gradients.get(f"{name}.weight", gradients.get(name))
        given = torch.zeros_like(found) if found.grad is None else found.grad
        t.trace.append(given.clone())
        t.close(given, leaf.grad, f"the gradient of `{name}`")


@language_model.requires(
    "it starts with weights drawn at random, of a size that training can begin with",
    "Divide random weights by the root of the number of inputs, or take `w_h` "
    "orthogonal: a state must neither fade nor saturate in the first steps.",
)
def _(answer, t):
    v, d, n = 50, 24, 40
    model, other = t.call(answer, v, d, n), t.call(answer, v, d, n)
    parameters, others = dict(model.named_parameters()), dict(other.named_parameters())
    for name in ("w_x", "w_h"):
        t.trace.append(_drawn(parameters[name]))
        t.true(
            not torch.equal(parameters[name], others[name]),
            f"`{name}` is the same in two new models: draw it at random.",
        )
        smallest = torch.linalg.matrix_rank(parameters[name].detach())
        t.true(
            int(smallest) > 1,
            f"`{name}` starts with all rows alike, so all units would learn the same.",
        )
    radius = torch.linalg.eigvals(parameters["w_h"].detach()).abs().max().item()
    t.trace.append(_in_range(radius, 0.3, 2))
    t.true(
        0.3 < radius < 2,
        f"`w_h` starts with a spectral radius of {radius:.2g}; between 0.3 and 2 a "
        "state neither fades within a step or two nor saturates.",
    )
    wide = t.call(answer, v, d, 4 * n).w_h.detach()
    radius = torch.linalg.eigvals(wide).abs().max().item()
    t.trace.append(_in_range(radius, 0.3, 2))
    t.true(
        0.3 < radius < 2,
        f"With {4 * n} units `w_h` starts with a spectral radius of {radius:.2g}; it fits "
        f"with {n}. The scale must depend on the number of units.",
    )
    size = parameters["w_x"].detach().square().sum(0).mean().sqrt().item()
    t.trace.append(_in_range(size, 0.1, 3))
    t.true(
        0.1 < size < 3,
        f"The columns of `w_x` start with a length of {size:.2g}; near 1, the sum over "
        "the inputs is about as large as one of them.",
    )
    t.true(not parameters["b"].any(), "`b` does not start at zero.")
    ids = probe_ids(8, 20, below=v, seed=8)
    with torch.no_grad(), t.unfinished():
        logits = t.call(model, ids)
        t.trace[-1] = tuple(logits.shape)  # the values differ from model to model
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten()).item()
    t.true(
        loss < math.log(v) + 1.5,
        f"A new model's loss is {loss:.2f} on random tokens, where guessing evenly "
        f"gives {math.log(v):.2f}: the first logits are too large.",
    )


@language_model.requires("it creates nothing on another device")
def _(answer, t):
    model, _ = _loaded(t, answer)
    t.any_device(model, probe_ids(2, 4, below=11))


class _Model(nn.Module):
    """A right model in small pieces, for the faults to replace one of them."""

    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.w_x = nn.Parameter(torch.randn(d_model, d_hidden) / d_model**0.5)
        self.w_h = nn.Parameter(torch.randn(d_hidden, d_hidden) / d_hidden**0.5)
        self.b = nn.Parameter(torch.zeros(d_hidden))
        self.head = nn.Linear(d_hidden, vocab_size, bias=False)

    def start(self, x):
        return x.new_zeros(len(x), len(self.b))

    def states(self, x):
        h0 = self.start(x)
        weights = (self.w_x, self.w_h, self.b)
        return torch.stack(_states(x, h0, *weights, cell=_any_cell), dim=1)

    def forward(self, ids):
        return self.head(self.states(self.embedding(ids)))


@language_model.fault(
    "state_kept",
    "The last state of one call is the first of the next. The same tokens then give "
    "other logits the second time.",
)
class _StateKept(_Model):
    kept = None

    def start(self, x):
        fits = self.kept is not None and len(self.kept) == len(x)
        return self.kept.to(x) if fits else super().start(x)

    def states(self, x):
        states = super().states(x)
        self.kept = states[:, -1].detach()
        return states


@language_model.fault(
    "last_only",
    "Logits come back for the last token only. In training every token predicts the "
    "one after it.",
)
class _LastOnly(_Model):
    def forward(self, ids):
        return super().forward(ids)[:, -1]


@language_model.fault(
    "probabilities",
    "The logits go through a softmax. The loss of lesson 09 takes one itself, and two "
    "of them flatten the gradient.",
)
class _Probabilities(_Model):
    def forward(self, ids):
        return super().forward(ids).softmax(-1)


@language_model.fault(
    "log_probabilities",
    "The logits go through a log-softmax; the scores themselves are asked for.",
)
class _LogProbabilities(_Model):
    def forward(self, ids):
        return super().forward(ids).log_softmax(-1)


@language_model.fault(
    "head_bias", "`head` has a bias. `nn.Linear` adds one unless told not to."
)
class _HeadBias(_Model):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.head = nn.Linear(d_hidden, vocab_size)


@language_model.fault(
    "h0_learned",
    "The first state is a parameter. It is zeros here, and nothing to be learned.",
)
class _LearnedStart(_Model):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.h0 = nn.Parameter(torch.zeros(d_hidden))

    def start(self, x):
        return self.h0.expand(len(x), -1)


@language_model.fault(
    "plain_tensors",
    "`w_x`, `w_h` and `b` are plain tensors. Only an `nn.Parameter` is found by an "
    "optimizer, by `.double()` and by whoever loads weights.",
)
class _PlainTensors(_Model):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        for name in ("w_x", "w_h", "b"):
            value = getattr(self, name).detach()
            delattr(self, name)
            setattr(self, name, value.requires_grad_())


@language_model.fault(
    "scaled_after_wrapping",
    "`w_x` and `w_h` are plain tensors. So is the result of `nn.Parameter(…) / …`: what "
    "is computed from a parameter is none. Scale first, then wrap.",
)
class _ScaledAfterWrapping(_Model):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        for name in ("w_x", "w_h"):
            parameter = getattr(self, name)
            delattr(self, name)
            setattr(self, name, parameter / 1)


@language_model.fault(
    "linear_layers",
    "`w_x` and `w_h` are `nn.Linear` layers, whose weight is the transposed matrix and "
    "which bring a bias each. `rnn` wants the matrices themselves.",
)
class _LinearLayers(_Model):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        del self.w_x, self.w_h
        self.w_x = nn.Linear(d_model, d_hidden)
        self.w_h = nn.Linear(d_hidden, d_hidden)


@language_model.fault(
    "random_start",
    "The first state is random, so the same tokens never give the same logits twice.",
)
class _RandomStart(_Model):
    def start(self, x):
        torch.manual_seed(0)
        return torch.randn_like(super().start(x))


@language_model.fault("ones_start", "The first state is ones instead of zeros.")
class _OnesStart(_Model):
    def start(self, x):
        return torch.ones_like(super().start(x))


@language_model.fault(
    "states_before",
    "The logits at a token come from the state before it, so the model has not read the "
    "token that it goes on from.",
)
class _StatesBefore(_Model):
    def states(self, x):
        states = super().states(x)
        return torch.cat([self.start(x)[:, None], states[:, :-1]], dim=1)


@language_model.fault(
    "backwards",
    "The tokens are read from the end, so that each prediction has seen the future.",
)
class _Backwards(_Model):
    def states(self, x):
        return super().states(x.flip(1)).flip(1)


@language_model.fault(
    "no_recurrence",
    "Every token starts from the zero state, so that each prediction rests on one token.",
)
class _NoRecurrence(_Model):
    def states(self, x):
        return torch.tanh(x @ self.w_x + self.b)


@language_model.fault(
    "batch_and_time_exchanged",
    "The RNN runs over the batch instead of over time: the first dimension of `ids` "
    "counts sequences.",
)
class _Exchanged(_Model):
    def states(self, x):
        return super().states(x.transpose(0, 1)).transpose(0, 1)


@language_model.fault(
    "detached",
    "The state is cut from the graph between two steps, so nothing that lies further "
    "back than one token can be learned.",
)
class _Detached(_Model):
    def states(self, x):
        weights = (self.w_x, self.w_h, self.b)
        states = _states(x, self.start(x), *weights, between=torch.Tensor.detach)
        return torch.stack(states, dim=1)


@language_model.fault(
    "dropout",
    "Dropout is applied in the model. None is asked for.",
)
class _Dropout(_Model):
    def states(self, x):
        torch.manual_seed(0)
        return F.dropout(super().states(x), 0.1, self.training)


@language_model.fault(
    "float32_start",
    "The first state is float32 whatever the weights are, which stops the model after "
    "`.double()`.",
)
class _Float32Start(_Model):
    def start(self, x):
        return torch.zeros(len(x), len(self.b), device=x.device)


@language_model.fault(
    "integer_start",
    "The first state is made from `ids`, so it holds integers as they do. Make it from "
    "something of the weights' dtype: the embedded tokens, or a parameter.",
)
class _IntegerStart(_Model):
    def forward(self, ids):
        h0 = ids.new_zeros(len(ids), len(self.b))
        weights = (self.w_x, self.w_h, self.b)
        states = _states(self.embedding(ids), h0, *weights, cell=_any_cell)
        return self.head(torch.stack(states, dim=1))


@language_model.fault(
    "cpu_start",
    "The first state is created on the CPU, wherever the model is.",
)
class _CpuStart(_Model):
    def start(self, x):
        return torch.zeros(len(x), len(self.b), dtype=x.dtype)


@language_model.fault(
    "w_h_unscaled",
    "`w_h` starts too large, with a standard deviation of 1 for instance. Each state is "
    "then a sum of H numbers of that size, the tanh saturates, and its gradient is gone "
    "from the start.",
)
class _Unscaled(_Model):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.w_h = nn.Parameter(torch.randn(d_hidden, d_hidden))


@language_model.fault(
    "w_h_too_small",
    "`w_h` starts too small. The next state then keeps next to nothing of the last one, "
    "and the gradient fades within a step or two. Which size gives a sum of H numbers "
    "the size of one of them?",
)
class _TooSmall(_Model):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.w_h = nn.Parameter(0.01 * torch.randn(d_hidden, d_hidden))


@language_model.fault(
    "w_h_scale_fixed",
    "`w_h` starts at the same scale whatever H is. Each number of the next state is a "
    "sum over H numbers, so the scale must fall as H grows, with its root.",
)
class _FixedScale(_Model):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.w_h = nn.Parameter(0.25 * torch.randn(d_hidden, d_hidden))


@language_model.fault(
    "w_x_unscaled",
    "`w_x` starts too large, with a standard deviation of 1 for instance. The sum over "
    "the D numbers of a token is then much larger than one of them, and the tanh "
    "saturates.",
)
class _InputsUnscaled(_Model):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.w_x = nn.Parameter(torch.randn(d_model, d_hidden))


@language_model.fault(
    "w_x_too_small",
    "`w_x` starts too small, so that a token hardly moves the state. Which size gives a "
    "sum of D numbers the size of one of them?",
)
class _InputsTooSmall(_Model):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.w_x = nn.Parameter(0.01 * torch.randn(d_model, d_hidden))


@language_model.fault(
    "head_unscaled",
    "`head` starts too large, with a standard deviation of 1 for instance. Each logit is "
    "a sum over H numbers, so a new model is sure of what it cannot know. `nn.Linear` "
    "starts at a size that fits.",
)
class _HeadUnscaled(_Model):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        nn.init.normal_(self.head.weight)


@language_model.fault("b_drawn", "`b` is drawn at random; it starts at zero.")
class _DrawnBias(_Model):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.b = nn.Parameter(torch.randn(d_hidden))


@language_model.fault(
    "w_h_zeros",
    "`w_h` starts at zero, so that no state reaches the next one.",
)
class _Zeros(_Model):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.w_h = nn.Parameter(torch.zeros(d_hidden, d_hidden))


@language_model.fault(
    "w_x_zeros",
    "`w_x` starts at zero, so that no token reaches a state, and the gradients of all "
    "that the head could read start at zero as well.",
)
class _ZeroInputs(_Model):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.w_x = nn.Parameter(torch.zeros(d_model, d_hidden))


@language_model.fault(
    "constant_weights",
    "The weights start at one constant. Units that start alike stay alike: they get the "
    "same gradient for ever.",
)
class _Constant(_Model):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.w_x = nn.Parameter(torch.full((d_model, d_hidden), 1 / d_model))
        self.w_h = nn.Parameter(torch.full((d_hidden, d_hidden), 1 / d_hidden))
