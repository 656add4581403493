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
from utils.data import recall_batch
from utils.probe import probe, probe_ids

# The references against PyTorch's own modules -----------------------------------------


def test_rnn_is_torchs_layer():
    layer = nn.RNN(3, 5, batch_first=True).double()
    x, h0 = probe(2, 6, 3).double(), probe(2, 5, seed=1).double()
    b = layer.bias_ih_l0 + layer.bias_hh_l0
    states = rnn(x, h0, layer.weight_ih_l0.T, layer.weight_hh_l0.T, b)
    torch.testing.assert_close(states, layer(x, h0[None])[0])


def test_lstm_cell_is_torchs_cell():
    cell = nn.LSTMCell(3, 5).double()
    x, h, c = (probe(2, n, seed=n).double() for n in (3, 5, 5))
    b = cell.bias_ih + cell.bias_hh
    actual = lstm_cell(x, h, c, cell.weight_ih.T, cell.weight_hh.T, b)
    torch.testing.assert_close(actual, cell(x, (h, c)))


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


def test_language_model_takes_ids_of_any_integer_dtype():
    model, ids = RNNLanguageModel(11, 3, 5), probe_ids(2, 4, below=11)
    torch.testing.assert_close(model(ids), model(ids.int()))


def test_recall_batch_can_be_answered():
    pairs, answers = recall_batch(50, 6, 9, 4, torch.Generator().manual_seed(0))
    assert pairs.shape == (50, 7, 2) and answers.shape == (50,)
    for row, answer in zip(pairs.tolist(), answers.tolist(), strict=True):
        table = dict(row[:-1])
        key, which = row[-1]
        assert len(table) == 6 and which == 4
        assert table[key] == answer
        assert set(table) <= set(range(9)) and set(table.values()) <= set(range(4))


def test_recall_batch_refuses_more_items_than_keys():
    with pytest.raises(ValueError, match=r"5.*4"):
        recall_batch(2, 5, 4, 3)


# Right answers in other forms ---------------------------------------------------------


def cell_in_float64(*inputs):
    return rnn_cell(*(each.double() for each in inputs))


@pytest.mark.parametrize(
    "answer",
    [
        lambda x, h, u, w, b: (torch.cat([x, h], -1) @ torch.cat([u, w]) + b).tanh(),
        lambda x, h, u, w, b: torch.tanh(F.linear(x, u.T, b) + F.linear(h, w.mT)),
        lambda x, *rest: cell_in_float64(x, *rest).to(x.dtype),
        lambda x, h, u, w, b: torch.tanh(
            (x[:, :, None] * u).sum(1) + (h[:, :, None] * w).sum(1) + b[None, :]
        ),
        lambda x, h, u, w, b: torch.stack(
            [torch.tanh(u.T @ x[i] + w.T @ h[i] + b) for i in range(len(x))]
        ),
        lambda x, h, u, w, b: 2 * torch.sigmoid(2 * (x @ u + h @ w + b)) - 1,
        lambda x, h, u, w, b: torch.addmm(torch.addmm(b, h, w), x, u).tanh(),
        lambda x, h, u, w, b: torch.tanh(u.T @ x.T + w.T @ h.T + b[:, None]).T,
    ],
)
def test_other_right_cells(answer):
    passes(answer, "rnn_cell")


def rnn_buffer(x, h0, w_x, w_h, b):
    states = x.new_empty(x.shape[0], x.shape[1], h0.shape[1])
    h = h0
    for t in range(x.shape[1]):
        states[:, t] = h = torch.tanh(x[:, t] @ w_x + h @ w_h + b)
    return states


def rnn_inputs_first(x, h0, w_x, w_h, b):
    h, states = h0, []
    for step in (x @ w_x + b).unbind(1):
        h = torch.tanh(step + h @ w_h)
        states.append(h[:, None])
    return torch.cat(states, dim=1)


def rnn_by_sequence(x, h0, *weights):
    rows = []
    for i in range(len(x)):
        h, states = h0[i], []
        for step in x[i]:
            h = rnn_cell(step, h, *weights)
            states.append(h)
        rows.append(torch.stack(states))
    return torch.stack(rows)


@pytest.mark.parametrize("answer", [rnn_buffer, rnn_inputs_first, rnn_by_sequence])
def test_other_right_sequences(answer):
    passes(answer, "rnn")


def lstm(sums=lambda x, h, u, w, b: x @ u + h @ w + b, cut=None, gate=torch.sigmoid):
    def answer(x, h, c, w_x, w_h, b):
        z = sums(x, h, w_x, w_h, b)
        i, f, g, o = cut(z) if cut else z.chunk(4, dim=1)
        c = torch.addcmul(gate(f) * c, gate(i), g.tanh())
        return [gate(o) * c.tanh(), c]

    return answer


def lstm_own_memory_in_place(x, h, c, w_x, w_h, b):
    i, f, g, o = (x @ w_x + h @ w_h + b).tensor_split(4, dim=-1)
    c = c.clone()
    c *= f.sigmoid()
    c += i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def four_products(x, h, w_x, w_h, b):
    parts = zip(w_x.chunk(4, 1), w_h.chunk(4, 1), b.chunk(4), strict=True)
    return torch.cat([x @ u + h @ v + each for u, v, each in parts], 1)


@pytest.mark.parametrize(
    "answer",
    [
        lstm(),
        lstm(four_products),
        lstm(lambda x, h, u, w, b: torch.cat([x, h], 1) @ torch.cat([u, w]) + b),
        lstm(cut=lambda z: z.T.unflatten(0, (4, -1)).mT),
        lstm(cut=lambda z: z.split(z.shape[1] // 4, dim=1)),
        lstm(cut=lambda z: z.view(len(z), 4, -1).unbind(1)),
        lstm(gate=lambda z: (1 + (z / 2).tanh()) / 2),
        lstm_own_memory_in_place,
    ],
)
def test_other_right_lstms(answer):
    passes(answer, "lstm_cell")


def reach_of_ones(layer, x):
    leaf = x.detach().clone().requires_grad_(True)
    y = layer(leaf)[:, -1, :]
    (g,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    return g.pow(2).sum(-1).sqrt().mean(0)


def reach_inputs_only(layer, x):
    leaf = x.detach().clone().requires_grad_(True)
    layer(leaf).select(1, -1).sum().backward(inputs=[leaf])
    return torch.linalg.vector_norm(leaf.grad, dim=2).mean(dim=0)


def reach_func(layer, x):
    g = torch.func.grad(lambda x: layer(x)[:, -1].sum())(x.detach())
    return g.norm(dim=2).sum(0) / len(x)


def reach_puts_gradients_back(layer, x):
    parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    leaf = x.detach().clone().requires_grad_()
    layer(leaf)[:, -1].sum().backward()
    for p, gradient in zip(parameters, before, strict=True):
        p.grad = gradient
    return leaf.grad.norm(dim=-1).mean(0)


@pytest.mark.parametrize(
    "answer", [reach_of_ones, reach_inputs_only, reach_func, reach_puts_gradients_back]
)
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

    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        del self.head
        self.head = nn.Parameter(torch.randn(vocab_size, d_hidden) / d_hidden**0.5)

    def forward(self, ids):
        x = self.embedding(ids)
        h0 = x.new_zeros(len(x), len(self.b))
        return rnn(x, h0, self.w_x, self.w_h, self.b) @ self.head.T


def starting(change):
    """A model whose first weights are changed by `change(model, d_model, d_hidden)`."""

    class Starting(RNNLanguageModel):
        def __init__(self, vocab_size, d_model, d_hidden):
            super().__init__(vocab_size, d_model, d_hidden)
            with torch.no_grad():
                change(self, d_model, d_hidden)

    return Starting


def normal(model, d_model, d_hidden):
    nn.init.normal_(model.w_x, std=d_model**-0.5)
    nn.init.normal_(model.w_h, std=d_hidden**-0.5)


@pytest.mark.parametrize("answer", [Loop, ParameterHead, starting(normal)])
def test_other_right_models(answer):
    passes(answer, "RNNLanguageModel")


# Wrong answers that no fault lists, or in another form than the fault -----------------


def rnn_missing_the_first_input(x, h0, *weights):
    h = h0
    states = [h]
    for t in range(1, x.size(1)):
        h = rnn_cell(x[:, t], h, *weights)
        states.append(h)
    return torch.stack(states, dim=1)


KEPT = {}


def rnn_remembers(x, h0, *weights):
    h = KEPT.get(h0.shape, h0)
    states = rnn(x, h if h.dtype == x.dtype else h0, *weights)
    KEPT[h0.shape] = states[:, -1].detach()
    return states


def rnn_out_of_its_buffer(x, h0, *weights):
    states = x.new_zeros(len(x), x.shape[1] + 1, h0.shape[1])
    states[:, 0] = h0
    for t in range(x.shape[1]):
        states[:, t + 1] = rnn_cell(x[:, t], states[:, t], *weights)
    return states[:, 1:]


def reach_by(number, average=lambda norms: norms.mean(0), **how):
    """The reach of another number of the last output, or averaged in another way."""

    def reach(layer, x):
        leaf = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(number(layer(leaf)[:, -1]), leaf, **how)
        return average(g.norm(dim=-1))

    return reach


def reach_clears_gradients(layer, x):
    reach = gradient_reach(layer, x)
    if isinstance(layer, nn.Module):
        layer.zero_grad()
    return reach


def reach_unmarks_x(layer, x):
    x.requires_grad_()
    (g,) = torch.autograd.grad(layer(x)[:, -1].sum(), x)
    x.requires_grad_(False)
    return g.norm(dim=-1).mean(0)


@pytest.mark.parametrize(
    ("name", "answer", "fault"),
    [
        ("rnn_cell", cell_in_float64, None),  # where float32 came in
        ("rnn_cell", lambda x, h, u, w, b: torch.tanh(x @ u + h[:1] @ w + b), None),
        ("rnn_cell", lambda *inputs: rnn_cell(*inputs).detach(), None),
        ("rnn", rnn_missing_the_first_input, "h0_for_the_first_step"),
        (
            "rnn",
            lambda x, *rest: rnn(x * (torch.arange(x.shape[1]) < 30)[:, None], *rest),
            None,
        ),
        ("rnn", rnn_remembers, "state"),
        ("rnn", rnn_out_of_its_buffer, None),
        ("rnn", lambda x, *rest: rnn(x.roll(-1, 1), *rest), None),
        ("rnn", lambda *inputs: (rnn(*inputs), 0), None),
        ("lstm_cell", lstm(gate=F.hardsigmoid), None),
        ("lstm_cell", lambda x, h, c, *w: lstm_cell(x, h, c.clamp(-9, 9), *w), None),
        ("lstm_cell", lambda *inputs: torch.stack(lstm_cell(*inputs)), None),
        ("lstm_cell", lambda x, h, c, *w: (lstm_cell(x, h, c, *w)[0], c), None),
        ("gradient_reach", lambda layer, x: gradient_reach(layer, x[:1]), None),
        ("gradient_reach", reach_by(torch.sum, lambda n: n.amax(0)), None),
        ("gradient_reach", reach_by(torch.sum, create_graph=True), None),
        ("gradient_reach", reach_by(lambda y: y.abs().sum()), None),
        ("gradient_reach", reach_by(lambda y: y[:, 0].sum()), None),
        ("gradient_reach", reach_clears_gradients, None),
        ("gradient_reach", reach_unmarks_x, None),
    ],
)
def test_other_wrong_answers(name, answer, fault):
    assert fails(answer, name).fault == fault


class EmbeddingDetached(RNNLanguageModel):
    def forward(self, ids):
        x = self.embedding(ids).detach()
        h0 = x.new_zeros(len(x), len(self.b))
        return self.head(rnn(x, h0, self.w_x, self.w_h, self.b))


def second_bias(model, d_model, d_hidden):
    model.b_2 = nn.Parameter(torch.zeros(d_hidden))


def drawn(name, scale):
    """The named weights start at this standard deviation, whatever the sizes are."""
    return starting(lambda model, *_: model.get_parameter(name).normal_(std=scale))


def x_scaled_by_d_hidden(model, d_model, d_hidden):
    model.w_x.normal_(std=d_hidden**-0.5)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (EmbeddingDetached, None),
        (starting(second_bias), None),
        (starting(x_scaled_by_d_hidden), "w_x_scale_not_of_d_model"),
        (drawn("w_x", 0.2), "w_x_scale_not_of_d_model"),
        (drawn("w_x", 1.5), "w_x_unscaled"),
        (drawn("w_x", 0.005), "w_x_too_small"),
        (drawn("w_h", 0.8), "w_h_unscaled"),
        (drawn("w_h", 0.02), "w_h_too_small"),
        (drawn("w_h", 0.25), "w_h_scale_fixed"),
        (drawn("head.weight", 1.2), "head_unscaled"),
    ],
)
def test_other_wrong_models(answer, fault):
    assert fails(answer, "RNNLanguageModel").fault == fault


# What the learner reads ---------------------------------------------------------------


def test_a_linear_layer_for_a_matrix_is_not_told_to_exchange_its_widths():
    def layers(model, d_model, d_hidden):
        del model.w_x, model.w_h
        model.w_x = nn.Linear(d_model, d_hidden)
        model.w_h = nn.Linear(d_hidden, d_hidden)

    message = fails(starting(layers), "RNNLanguageModel").message
    assert "`w_x` is a layer" in message and "nn.Parameter" in message
    assert "width" not in message


def test_gradients_that_are_gone_are_no_crash():
    message = fails(reach_clears_gradients, "gradient_reach").message
    assert "is gone" in message and "raised" not in message


def test_a_right_memory_is_told_apart_from_a_wrong_output():
    def output_gate_left_out(*inputs):
        c = lstm_cell(*inputs)[1]
        return torch.tanh(c), c

    assert "`c` is right" in fails(output_gate_left_out, "lstm_cell").message
