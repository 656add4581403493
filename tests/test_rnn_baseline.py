"""Lesson 01: the references, right answers in other forms, wrong ones of no fault."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from solutions.rnn_baseline import (
    RNNLanguageModel,
    gradient_reach,
    lstm_cell,
    rnn,
    rnn_cell,
)
from tests.answers import fails, passes
from utils.probe import probe

# The references against PyTorch's own modules -----------------------------------------


def test_rnn_and_lstm_cell_are_torchs_layers():
    x, h, c = (probe(2, *size).double() for size in ((6, 3), (5,), (5,)))
    layer, cell = nn.RNN(3, 5, batch_first=True).double(), nn.LSTMCell(3, 5).double()
    w_x, w_h, b_x, b_h = layer.parameters()
    states = rnn(x, h, w_x.T, w_h.T, b_x + b_h)
    torch.testing.assert_close(states, layer(x, h[None])[0])
    w_x, w_h, b_x, b_h = cell.parameters()
    actual = lstm_cell(x[:, 0], h, c, w_x.T, w_h.T, b_x + b_h)
    torch.testing.assert_close(actual, cell(x[:, 0], (h, c)))


def test_language_model_learns():
    torch.manual_seed(0)
    model = RNNLanguageModel(5, 8, 16)
    ids = torch.arange(40).reshape(4, 10) % 5
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        loss = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


# Right answers in other forms ---------------------------------------------------------


def cell_in_float64(*inputs):
    return rnn_cell(*(each.double() for each in inputs))


@pytest.mark.parametrize(
    "answer",
    [
        lambda x, h, u, w, b: (torch.cat([x, h], -1) @ torch.cat([u, w]) + b).tanh(),
        lambda x, *rest: cell_in_float64(x, *rest).to(x.dtype),
        lambda x, h, u, w, b: torch.stack(
            [torch.tanh(u.T @ x[i] + w.T @ h[i] + b) for i in range(len(x))]
        ),
        lambda x, h, u, w, b: 2 * torch.sigmoid(2 * (x @ u + h @ w + b)) - 1,
    ],
)
def test_other_right_cells(answer):
    passes(answer, "rnn_cell")


def lstm(sums=lambda x, h, u, w, b: x @ u + h @ w + b, cut=None, gate=torch.sigmoid):
    def answer(x, h, c, w_x, w_h, b):
        z = sums(x, h, w_x, w_h, b)
        i, f, g, o = cut(z) if cut else z.chunk(4, dim=1)
        c = torch.addcmul(gate(f) * c, gate(i), g.tanh())
        return [gate(o) * c.tanh(), c]

    return answer


def four_products(x, h, w_x, w_h, b):
    parts = zip(w_x.chunk(4, 1), w_h.chunk(4, 1), b.chunk(4), strict=True)
    return torch.cat([x @ u + h @ v + each for u, v, each in parts], 1)


@pytest.mark.parametrize(
    "answer",
    [
        lstm(),
        lstm(four_products),
        lstm(cut=lambda z: z.view(len(z), 4, -1).unbind(1)),
        lstm(gate=lambda z: (1 + (z / 2).tanh()) / 2),
    ],
)
def test_other_right_lstms(answer):
    passes(answer, "lstm_cell")


def reach_inputs_only(layer, x):
    leaf = x.detach().clone().requires_grad_(True)
    layer(leaf).select(1, -1).sum().backward(inputs=[leaf])
    return torch.linalg.vector_norm(leaf.grad, dim=2).mean(dim=0)


def reach_puts_gradients_back(layer, x):
    parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    leaf = x.detach().clone().requires_grad_()
    layer(leaf)[:, -1].sum().backward()
    for p, gradient in zip(parameters, before, strict=True):
        p.grad = gradient
    return leaf.grad.norm(dim=-1).mean(0)


@pytest.mark.parametrize("answer", [reach_inputs_only, reach_puts_gradients_back])
def test_other_right_reaches(answer):
    passes(answer, "gradient_reach")


class Loop(RNNLanguageModel):
    """Token by token, with the first weights of PyTorch's own layer."""

    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        for weight in (self.w_x, self.w_h):
            nn.init.uniform_(weight, -(d_hidden**-0.5), d_hidden**-0.5)

    def forward(self, ids):
        h = torch.zeros(len(ids), len(self.b)).to(self.b)
        logits = []
        for t in range(ids.shape[1]):
            h = rnn_cell(self.embedding(ids[:, t]), h, self.w_x, self.w_h, self.b)
            logits.append(self.head(h))
        return torch.stack(logits, 1)


class ParameterHead(RNNLanguageModel):
    """The head as a bare matrix, under the name that its weight would have."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        weight = self.head.weight
        del self.head
        self.head = weight

    def forward(self, ids):
        h0 = self.b.new_zeros(len(ids), len(self.b))
        return rnn(self.embedding(ids), h0, self.w_x, self.w_h, self.b) @ self.head.T


def starting(change):
    """A model whose first weights are changed by `change(model, d_model, d_hidden)`."""

    class Starting(RNNLanguageModel):
        def __init__(self, vocab_size, d_model, d_hidden):
            super().__init__(vocab_size, d_model, d_hidden)
            with torch.no_grad():
                change(self, d_model, d_hidden)

    return Starting


@pytest.mark.parametrize("answer", [Loop, ParameterHead])
def test_other_right_models(answer):
    passes(answer, "RNNLanguageModel")


# Wrong answers that no fault lists, or in another form than the fault -----------------


KEPT = {}


def rnn_remembers(x, h0, *weights):
    key = h0.shape, h0.dtype
    KEPT[key] = states = rnn(x, KEPT.get(key, h0[:, None])[:, -1].detach(), *weights)
    return states


def reach_by(number=torch.sum, average=torch.mean, **how):
    """The reach of another number of the last output, or averaged in another way."""

    def reach(layer, x):
        leaf = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(number(layer(leaf)[:, -1]), leaf, **how)
        return average(g.norm(dim=-1), 0)

    return reach


def reach_clears_gradients(layer, x):
    reach = gradient_reach(layer, x)
    if isinstance(layer, nn.Module):
        layer.zero_grad()
    return reach


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("rnn_cell", cell_in_float64),  # where float32 came in
        ("rnn_cell", lambda x, h, u, w, b: torch.tanh(x @ u + h[:1] @ w + b)),
        ("rnn", lambda x, *w: rnn(torch.cat([x[:, :30], 0 * x[:, 30:]], 1), *w)),
        ("lstm_cell", lstm(gate=F.hardsigmoid)),
        ("lstm_cell", lambda x, h, c, *w: lstm_cell(x, h, c.clamp(-9, 9), *w)),
        ("lstm_cell", lambda x, h, c, *w: (lstm_cell(x, h, c, *w)[0], c)),
        ("gradient_reach", lambda layer, x: gradient_reach(layer, x[:1])),
        ("gradient_reach", reach_by(average=torch.amax)),
        ("gradient_reach", reach_by(create_graph=True)),
        ("gradient_reach", reach_by(lambda y: y.abs().sum())),
    ],
)
def test_other_wrong_answers(name, answer):
    assert fails(answer, name).fault is None


# What the learner reads ---------------------------------------------------------------


def output_gate_left_out(*inputs):
    c = lstm_cell(*inputs)[1]
    return torch.tanh(c), c


def layers_for_matrices(model, d_model, d_hidden):
    del model.w_x
    model.w_x = nn.Linear(d_model, d_hidden)


def x_scaled_by_d_hidden(model, d_model, d_hidden):
    model.w_x.normal_(std=d_hidden**-0.5)


def drawn(name, scale):
    """The named weights start at this standard deviation, whatever the sizes are."""
    return starting(lambda model, *_: model.get_parameter(name).normal_(std=scale))


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("rnn", rnn_remembers, "Is something kept from one call to the next"),
        ("lstm_cell", output_gate_left_out, "`c` is right"),
        ("gradient_reach", reach_clears_gradients, "parameters held is gone"),
        # Not that the widths of the layer are exchanged.
        ("RNNLanguageModel", starting(layers_for_matrices), "`w_x` is a layer"),
        ("RNNLanguageModel", starting(x_scaled_by_d_hidden), "160 units the columns"),
        ("RNNLanguageModel", drawn("w_x", 0.005), "40 units the columns"),
        ("RNNLanguageModel", drawn("w_h", 0.8), "40 units `w_h`"),
        ("RNNLanguageModel", drawn("w_h", 0.02), "40 units `w_h`"),
        ("RNNLanguageModel", drawn("w_h", 0.25), "160 units `w_h`"),
        ("RNNLanguageModel", drawn("head.weight", 1.2), "first logits are too large"),
    ],
)
def test_what_is_wrong_is_told(name, answer, said):
    assert said in fails(answer, name).message
