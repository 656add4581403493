"""Lesson 01: oracles, right answers in other forms, wrong ones no fault lists."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from solutions import rnn_baseline as reference
from utils.check import evaluate
from utils.data import recall_batch
from utils.probe import probe, probe_ids


def accept(answer, name):
    report = evaluate(answer, name)
    assert report.status == "passed", report.message


def reject(answer, name):
    report = evaluate(answer, name)
    assert report.status == "failed", f"a wrong {name} passes"


# The reference against PyTorch's own modules ----------------------------------------


def test_rnn_is_torchs_layer():
    layer = nn.RNN(3, 5, batch_first=True).double()
    x, h0 = probe(2, 6, 3).double(), probe(2, 5, seed=1).double()
    b = layer.bias_ih_l0 + layer.bias_hh_l0
    states = reference.rnn(x, h0, layer.weight_ih_l0.T, layer.weight_hh_l0.T, b)
    expected, last = layer(x, h0[None])
    torch.testing.assert_close(states, expected)
    torch.testing.assert_close(states[:, -1], last[0])


def test_lstm_cell_is_torchs_cell():
    cell = nn.LSTMCell(3, 5).double()
    x, h, c = (probe(2, n, seed=n).double() for n in (3, 5, 5))
    b = cell.bias_ih + cell.bias_hh
    found = reference.lstm_cell(x, h, c, cell.weight_ih.T, cell.weight_hh.T, b)
    for actual, expected in zip(found, cell(x, (h, c)), strict=True):
        torch.testing.assert_close(actual, expected)


def test_reach_of_a_module():
    layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    reach = reference.gradient_reach(layer, probe(2, 5, 3))
    assert reach[:-1].eq(0).all() and reach[-1] > 0
    assert all(p.grad is None for p in layer.parameters())


def test_language_model_learns():
    torch.manual_seed(0)
    model = reference.RNNLanguageModel(5, 8, 16)
    ids = torch.arange(40).reshape(4, 10) % 5
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        loss = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


# The recall task ---------------------------------------------------------------------


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


# Right answers in other forms --------------------------------------------------------


def cell_joined(x, h, w_x, w_h, b):
    return torch.cat([x, h], -1).matmul(torch.cat([w_x, w_h])).add(b).tanh()


def cell_einsum(x, h, w_x, w_h, b):
    total = torch.einsum("bd,dh->bh", x, w_x) + torch.einsum("bk,kh->bh", h, w_h)
    return (total + b).tanh()


def cell_linear(x, h, w_x, w_h, b):
    return torch.tanh(F.linear(x, w_x.T, b) + F.linear(h, w_h.mT))


def cell_double(x, h, w_x, w_h, b):
    x, h, w_x, w_h, b = (each.double() for each in (x, h, w_x, w_h, b))
    return torch.tanh(x @ w_x + h @ w_h + b)


def cell_float64_inside(x, h, w_x, w_h, b):
    return cell_double(x, h, w_x, w_h, b).to(x.dtype)


def cell_elementwise(x, h, w_x, w_h, b):
    return torch.tanh(
        (x[:, :, None] * w_x).sum(1) + (h[:, :, None] * w_h).sum(1) + b[None, :]
    )


def cell_by_sigmoid(x, h, w_x, w_h, b):
    return 2 * torch.sigmoid(2 * (x @ w_x + h @ w_h + b)) - 1


def cell_loop(x, h, w_x, w_h, b):
    rows = [torch.tanh(w_x.T @ x[i] + w_h.T @ h[i] + b) for i in range(x.shape[0])]
    return torch.stack(rows)


def cell_addmm(x, h, w_x, w_h, b):
    return torch.addmm(torch.addmm(b, h, w_h), x, w_x).tanh()


def cell_columns(x, h, w_x, w_h, b):
    return torch.tanh(w_x.T @ x.T + w_h.T @ h.T + b[:, None]).T


@pytest.mark.parametrize(
    "answer",
    [
        cell_joined,
        cell_einsum,
        cell_linear,
        cell_float64_inside,
        cell_elementwise,
        cell_loop,
        cell_by_sigmoid,
        cell_addmm,
        cell_columns,
    ],
)
def test_other_right_cells(answer):
    accept(answer, "rnn_cell")


def rnn_buffer(x, h0, w_x, w_h, b):
    states = x.new_empty(x.shape[0], x.shape[1], h0.shape[1])
    h = h0
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ w_x + h @ w_h + b)
        states[:, t] = h
    return states


def rnn_inputs_first(x, h0, w_x, w_h, b):
    projected = x @ w_x + b
    h, states = h0, []
    for step in projected.unbind(1):
        h = torch.tanh(step + h @ w_h)
        states.append(h[:, None])
    return torch.cat(states, dim=1)


def rnn_time_first_inside(x, h0, w_x, w_h, b):
    h, states = h0, []
    for step in x.transpose(0, 1):
        h = torch.tanh(step @ w_x + h @ w_h + b)
        states += [h]
    return torch.stack(states).transpose(0, 1)


def rnn_recursive(x, h0, w_x, w_h, b):
    h = torch.tanh(x[:, 0] @ w_x + h0 @ w_h + b)
    if x.shape[1] == 1:
        return h.unsqueeze(1)
    return torch.cat([h.unsqueeze(1), rnn_recursive(x[:, 1:], h, w_x, w_h, b)], 1)


def rnn_by_sequence(x, h0, w_x, w_h, b):
    rows = []
    for i in range(len(x)):
        h, states = h0[i], []
        for step in x[i]:
            h = torch.tanh(step @ w_x + h @ w_h + b)
            states.append(h)
        rows.append(torch.stack(states))
    return torch.stack(rows)


def rnn_joined_in_time(x, h0, w_x, w_h, b):
    h, states = h0, []
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ w_x + h @ w_h + b)
        states.append(h)
    return torch.cat(states, dim=1).view(len(x), x.shape[1], -1)


@pytest.mark.parametrize(
    "answer",
    [
        rnn_buffer,
        rnn_inputs_first,
        rnn_time_first_inside,
        rnn_recursive,
        rnn_by_sequence,
        rnn_joined_in_time,
    ],
)
def test_other_right_sequences(answer):
    accept(answer, "rnn")


def lstm_slices(x, h, c, w_x, w_h, b):
    z = x @ w_x + h @ w_h + b
    n = h.shape[1]
    i, f = z[:, :n].sigmoid(), z[:, n : 2 * n].sigmoid()
    g, o = z[:, 2 * n : 3 * n].tanh(), z[:, 3 * n :].sigmoid()
    c = f * c + i * g
    return o * c.tanh(), c


def lstm_split_list(x, h, c, w_x, w_h, b):
    z = torch.cat([x, h], 1) @ torch.cat([w_x, w_h]) + b
    i, f, g, o = torch.split(z, h.size(-1), dim=1)
    new = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
    return [o.sigmoid() * new.tanh(), new]


def lstm_four_products(x, h, c, w_x, w_h, b):
    parts = zip(w_x.chunk(4, 1), w_h.chunk(4, 1), b.chunk(4), strict=True)
    i, f, g, o = (x @ u + h @ v + each for u, v, each in parts)
    c = F.sigmoid(f) * c + F.sigmoid(i) * F.tanh(g)
    return F.sigmoid(o) * F.tanh(c), c


def lstm_unflatten(x, h, c, w_x, w_h, b):
    z = (x @ w_x + h @ w_h + b).unflatten(-1, (4, -1))
    i, f, o = z[:, [0, 1, 3]].sigmoid().unbind(1)
    c = f * c + i * z[:, 2].tanh()
    return o * c.tanh(), c


def lstm_own_memory_in_place(x, h, c, w_x, w_h, b):
    i, f, g, o = (x @ w_x + h @ w_h + b).view(len(x), 4, -1).unbind(1)
    c = c.clone()
    c *= f.sigmoid()
    c += i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def lstm_gates_by_tanh(x, h, c, w_x, w_h, b):
    i, f, g, o = torch.tensor_split(x @ w_x + h @ w_h + b, 4, dim=1)
    i, f, o = ((1 + (z / 2).tanh()) / 2 for z in (i, f, o))
    c = f * c + i * g.tanh()
    return o * c.tanh(), c


@pytest.mark.parametrize(
    "answer",
    [
        lstm_slices,
        lstm_split_list,
        lstm_four_products,
        lstm_unflatten,
        lstm_own_memory_in_place,
        lstm_gates_by_tanh,
    ],
)
def test_other_right_lstms(answer):
    accept(answer, "lstm_cell")


def reach_backward_clean(layer, x):
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


def reach_row_by_row(layer, x):
    rows = []
    for i in range(len(x)):
        leaf = x[i : i + 1].detach().clone().requires_grad_()
        rows.append(
            torch.autograd.grad(layer(leaf)[0, -1].sum(), leaf)[0][0].norm(dim=1)
        )
    return torch.stack(rows).mean(0)


def reach_of_a_clone(layer, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(layer(x)[:, -1].sum(), x)
    return g.norm(dim=-1).mean(0)


def reach_puts_gradients_back(layer, x):
    parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    leaf = x.detach().clone().requires_grad_()
    layer(leaf)[:, -1].sum().backward()
    for p, gradient in zip(parameters, before, strict=True):
        p.grad = gradient
    return leaf.grad.norm(dim=-1).mean(0)


@pytest.mark.parametrize(
    "answer",
    [
        reach_backward_clean,
        reach_inputs_only,
        reach_func,
        reach_row_by_row,
        reach_of_a_clone,
        reach_puts_gradients_back,
    ],
)
def test_other_right_reaches(answer):
    accept(answer, "gradient_reach")


class Base(nn.Module):
    """Right; subclasses change one thing."""

    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.w_x = nn.Parameter(torch.empty(d_model, d_hidden))
        self.w_h = nn.Parameter(torch.empty(d_hidden, d_hidden))
        self.b = nn.Parameter(torch.zeros(d_hidden))
        self.head = nn.Linear(d_hidden, vocab_size, bias=False)
        self.d_hidden = d_hidden
        for weight in (self.w_x, self.w_h):
            bound = d_hidden**-0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, ids):
        h = torch.zeros(
            ids.shape[0], self.d_hidden, device=self.b.device, dtype=self.b.dtype
        )
        logits = []
        for t in range(ids.shape[1]):
            x = self.embedding(ids[:, t])
            h = torch.tanh(x @ self.w_x + h @ self.w_h + self.b)
            logits.append(self.head(h))
        return torch.stack(logits, 1)


class Xavier(Base):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        nn.init.xavier_normal_(self.w_x)
        nn.init.xavier_uniform_(self.w_h)


class Normal(Base):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        nn.init.normal_(self.w_h, std=d_hidden**-0.5)
        nn.init.normal_(self.w_x, std=d_model**-0.5)


class ParameterHead(Base):
    """The head as a bare matrix, under the name that its weight would have."""

    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.head = nn.Parameter(torch.randn(vocab_size, d_hidden) / d_hidden**0.5)

    def forward(self, ids):
        x = self.embedding(ids)
        h0 = x.new_zeros(len(x), self.d_hidden)
        return reference.rnn(x, h0, self.w_x, self.w_h, self.b) @ self.head.T


@pytest.mark.parametrize("answer", [Base, Xavier, Normal, ParameterHead])
def test_other_right_models(answer):
    accept(answer, "RNNLanguageModel")


# Wrong answers that no fault lists ---------------------------------------------------


def rnn_truncated(x, h0, w_x, w_h, b):
    states = reference.rnn(x[:, :30], h0, w_x, w_h, b)
    return torch.cat(
        [states, states[:, -1:].expand(-1, max(x.shape[1] - 30, 0), -1)], 1
    )


def rnn_averaged(x, h0, w_x, w_h, b):
    h, states = h0, []
    for t in range(x.shape[1]):
        h = (h + torch.tanh(x[:, t] @ w_x + h @ w_h + b)) / 2
        states.append(h)
    return torch.stack(states, 1)


def rnn_from_first_sequence(x, h0, w_x, w_h, b):
    return reference.rnn(x, h0[:1].expand_as(h0), w_x, w_h, b)


def rnn_state_overwritten(x, h0, w_x, w_h, b):
    states = []
    for t in range(x.shape[1]):
        h0.copy_(torch.tanh(x[:, t] @ w_x + h0 @ w_h + b))
        states.append(h0.clone())
    return torch.stack(states, 1)


def rnn_next_input(x, h0, w_x, w_h, b):
    return reference.rnn(x.roll(-1, 1), h0, w_x, w_h, b)


kept = {}


def rnn_remembers(x, h0, w_x, w_h, b):
    h = kept.get(tuple(h0.shape), h0)
    states = reference.rnn(x, h if h.dtype == x.dtype else h0, w_x, w_h, b)
    kept[tuple(h0.shape)] = states[:, -1].detach()
    return states


def lstm_hard_sigmoid(x, h, c, w_x, w_h, b):
    i, f, g, o = (x @ w_x + h @ w_h + b).chunk(4, dim=-1)
    c = F.hardsigmoid(f) * c + F.hardsigmoid(i) * torch.tanh(g)
    return F.hardsigmoid(o) * torch.tanh(c), c


def lstm_clipped(x, h, c, w_x, w_h, b):
    return reference.lstm_cell(x, h, c.clamp(-10, 10), w_x, w_h, b)


def lstm_bias_twice(x, h, c, w_x, w_h, b):
    return reference.lstm_cell(x, h, c, w_x, w_h, 2 * b)


def lstm_tensor(x, h, c, w_x, w_h, b):
    return torch.stack(reference.lstm_cell(x, h, c, w_x, w_h, b))


def lstm_in_place(x, h, c, w_x, w_h, b):
    new_h, new_c = reference.lstm_cell(x, h, c, w_x, w_h, b)
    c.copy_(new_c.detach())
    return new_h, new_c


def reach_first_row(layer, x):
    return reference.gradient_reach(layer, x[:1])


def reach_max(layer, x):
    leaf = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(layer(leaf)[:, -1].sum(), leaf)
    return g.norm(dim=-1).max(0).values


def reach_median(layer, x):
    leaf = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(layer(leaf)[:, -1].sum(), leaf)
    return g.norm(dim=-1).median(0).values


def reach_times_input(layer, x):
    leaf = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(layer(leaf)[:, -1].sum(), leaf)
    return (g * x).norm(dim=-1).mean(0)


def reach_with_history(layer, x):
    leaf = x.detach().requires_grad_()
    last = layer(leaf)[:, -1].sum()
    (g,) = torch.autograd.grad(last, leaf, create_graph=True)
    return g.norm(dim=-1).mean(0)


def reach_absolute(layer, x):
    leaf = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(layer(leaf)[:, -1].abs().sum(), leaf)
    return g.norm(dim=-1).mean(0)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("rnn_cell", cell_double),  # float64 where float32 came in
        ("rnn_cell", lambda x, h, w_x, w_h, b: F.hardtanh(x @ w_x + h @ w_h + b)),
        ("rnn_cell", lambda x, h, w_x, w_h, b: torch.tanh((x @ w_x + h @ w_h + b) / 2)),
        ("rnn_cell", lambda x, h, w_x, w_h, b: torch.tanh(x @ w_x + h @ w_h + 2 * b)),
        ("rnn_cell", lambda x, h, w_x, w_h, b: torch.tanh(x @ w_x - h @ w_h + b)),
        ("rnn_cell", lambda x, h, w_x, w_h, b: torch.tanh(x @ w_x @ w_h + h + b)),
        ("rnn_cell", lambda x, h, w_x, w_h, b: torch.tanh(x @ w_x + h[:1] @ w_h + b)),
        ("rnn_cell", lambda *all_: reference.rnn_cell(*all_).detach()),
        ("rnn_cell", lambda *all_: None),
        ("rnn", rnn_truncated),
        ("rnn", rnn_averaged),
        ("rnn", rnn_from_first_sequence),
        ("rnn", rnn_state_overwritten),
        ("rnn", rnn_next_input),
        ("rnn", rnn_remembers),
        ("rnn", lambda *all_: (reference.rnn(*all_), 0)),
        ("rnn", lambda *all_: reference.rnn(*all_).transpose(1, 2)),
        ("lstm_cell", lstm_hard_sigmoid),
        ("lstm_cell", lstm_clipped),
        ("lstm_cell", lstm_bias_twice),
        ("lstm_cell", lstm_tensor),
        ("lstm_cell", lstm_in_place),
        ("gradient_reach", reach_first_row),
        ("gradient_reach", reach_max),
        ("gradient_reach", reach_median),
        ("gradient_reach", reach_times_input),
        ("gradient_reach", reach_with_history),
        ("gradient_reach", reach_absolute),
        (
            "gradient_reach",
            lambda layer, x: reference.gradient_reach(layer, x).tolist(),
        ),
    ],
)
def test_other_wrong_answers(name, answer):
    reject(answer, name)


class Normalised(Base):
    def forward(self, ids):
        logits = super().forward(ids)
        return logits - logits.mean(-1, keepdim=True)


class LastRowState(Base):
    """All sequences share the state of the first."""

    def forward(self, ids):
        return super().forward(ids[:1].expand_as(ids))


class FixedEmbedding(Base):
    def forward(self, ids):
        x = self.embedding(ids).detach()
        h0 = x.new_zeros(len(x), self.d_hidden)
        return self.head(reference.rnn(x, h0, self.w_x, self.w_h, self.b))


class TimeFirst(Base):
    def forward(self, ids):
        return super().forward(ids).transpose(0, 1)


class Renamed(Base):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.out = self.head
        del self.head


class SecondBias(Base):
    """A second bias, as in PyTorch's own layer."""

    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.b_2 = nn.Parameter(torch.zeros(d_hidden))


@pytest.mark.parametrize(
    "answer", [Normalised, LastRowState, FixedEmbedding, TimeFirst, Renamed, SecondBias]
)
def test_other_wrong_models(answer):
    reject(answer, "RNNLanguageModel")


def test_language_model_ids_of_any_integer_dtype():
    model = reference.RNNLanguageModel(11, 3, 5)
    ids = probe_ids(2, 4, below=11)
    torch.testing.assert_close(model(ids), model(ids.int()))


# Common mistakes in a form of their own, and the names that they should get -----------


def reach_of_a_tuple(layer, x):
    x = x.detach().clone()
    x.requires_grad = True
    found = torch.autograd.grad(outputs=layer(x)[:, -1, :].sum(), inputs=[x])
    return found.norm(dim=2).mean(dim=0)


def reach_without_a_mark(layer, x):
    (found,) = torch.autograd.grad(layer(x)[:, -1].sum(), x)
    return found.norm(dim=-1).mean(0)


def reach_in_eval_mode(layer, x):
    """Puts the mode back, but has measured another one."""
    training = isinstance(layer, nn.Module) and layer.training
    if training:
        layer.eval()
    reach = reference.gradient_reach(layer, x)
    if training:
        layer.train()
    return reach


def reach_left_in_eval_mode(layer, x):
    if hasattr(layer, "eval"):
        layer = layer.eval()
    return reference.gradient_reach(layer, x)


def reach_from(number):
    """The reach, with something else than the sum of the last output differentiated."""

    def reach(layer, x):
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(number(layer(leaf)[:, -1]), leaf)
        return found.norm(dim=-1).mean(0)

    return reach


def cell_one_exponential(x, h, w_x, w_h, b):
    grown = torch.exp(2 * (x @ w_x + h @ w_h + b))
    return 1 - 2 / (grown + 1)


def cell_joined_in_two_orders(x, h, w_x, w_h, b):
    return torch.tanh(torch.hstack([h, x]) @ torch.vstack([w_x, w_h]) + b)


def rnn_with(cell=reference.rnn_cell, together=torch.stack):
    def rnn(x, h0, w_x, w_h, b):
        h, states = h0, []
        for t in range(x.shape[1]):
            h = cell(x[:, t], h, w_x, w_h, b)
            states.append(h)
        return together(states)

    return rnn


def cell_of_a_detached_state(x, h, w_x, w_h, b):
    return reference.rnn_cell(x, h.detach(), w_x, w_h, b)


def lstm_with(cut):
    def lstm_cell(x, h, c, w_x, w_h, b):
        i, f, g, o = cut(x @ w_x + h @ w_h + b)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    return lstm_cell


def lstm_no_input_gate(x, h, c, w_x, w_h, b):
    _, f, g, o = (x @ w_x + h @ w_h + b).chunk(4, dim=1)
    c = g.tanh() + f.sigmoid() * c
    return o.sigmoid() * c.tanh(), c


class ZerosOfNoDtype(reference.RNNLanguageModel):
    def forward(self, ids):
        h0 = torch.zeros(len(ids), len(self.b))
        x = self.embedding(ids)
        return self.head(reference.rnn(x, h0, self.w_x, self.w_h, self.b))


def rnn_of_features(x, h0, w_x, w_h, b):
    states = [h0]
    for t in range(x.size(2)):
        states.append(reference.rnn_cell(x[:, t], states[-1], w_x, w_h, b))
    return torch.stack(states[1:], dim=1)


def rnn_in_a_narrow_buffer(x, h0, w_x, w_h, b):
    h, states = h0, torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = reference.rnn_cell(x[:, t], h, w_x, w_h, b)
        states[:, t] = h
    return states


def rnn_out_of_its_buffer(x, h0, w_x, w_h, b):
    states = x.new_zeros(len(x), x.shape[1] + 1, len(b))
    states[:, 0] = h0
    for t in range(x.shape[1]):
        states[:, t + 1] = reference.rnn_cell(x[:, t], states[:, t], w_x, w_h, b)
    return states[:, 1:]


def reach_of_the_first_sequence(layer, x):
    x = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(layer(x)[0][-1].sum(), x)
    return found.norm(dim=-1).mean(0)


def lstm_gate_inside(x, h, c, w_x, w_h, b):
    i, f, g, o = (x @ w_x + h @ w_h + b).chunk(4, dim=1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return (o.sigmoid() * c).tanh(), c


class ZerosLikeIds(reference.RNNLanguageModel):
    def forward(self, ids):
        h0 = torch.zeros(len(ids), len(self.b)).to(ids)
        x = self.embedding(ids)
        return self.head(reference.rnn(x, h0, self.w_x, self.w_h, self.b))


class DividedParameters(reference.RNNLanguageModel):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        del self.w_x, self.w_h
        self.w_x = nn.Parameter(torch.randn(d_model, d_hidden)) / d_model**0.5
        self.w_h = nn.Parameter(torch.randn(d_hidden, d_hidden)) / d_hidden**0.5


class LargeHead(reference.RNNLanguageModel):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.head.weight.data.uniform_(-2, 2)


class UniformAroundZero(reference.RNNLanguageModel):
    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__(vocab_size, d_model, d_hidden)
        self.w_h = nn.Parameter(torch.rand(d_hidden, d_hidden) - 0.5)


def cell_with_matrices_on_the_left(x, h, w_x, w_h, b):
    return (w_x @ x + w_h @ h + b).tanh()


def rnn_over_sequences(x, h0, w_x, w_h, b):
    h, states = h0, []
    for each in x:
        h = reference.rnn_cell(each, h, w_x, w_h, b)
        states.append(h)
    return torch.stack(states, dim=1)


def drawn(**scales):
    """A model whose named weights are drawn at these standard deviations."""

    class Drawn(reference.RNNLanguageModel):
        def __init__(self, vocab_size, d_model, d_hidden):
            super().__init__(vocab_size, d_model, d_hidden)
            for name, scale in scales.items():
                nn.init.normal_(getattr(self, name), std=scale)

    return Drawn


@pytest.mark.parametrize(
    ("answer", "name", "fault"),
    [
        (reach_of_a_tuple, "gradient_reach", "tuple_not_unpacked"),
        (reach_without_a_mark, "gradient_reach", "x_not_marked"),
        (cell_with_matrices_on_the_left, "rnn_cell", "w_x_on_the_left"),
        (rnn_over_sequences, "rnn", "sequences_taken_for_steps"),
        (reach_in_eval_mode, "gradient_reach", "eval_mode"),
        (reach_left_in_eval_mode, "gradient_reach", "eval_mode"),
        (reach_from(lambda y: y[:, 0].sum()), "gradient_reach", "norm_of_output"),
        (reach_from(lambda y: y.sum(1).mean()), "gradient_reach", "mean_of_sequences"),
        (reach_from(lambda y: (y**2).sum()), "gradient_reach", "squares_of_output"),
        (cell_one_exponential, "rnn_cell", "tanh_from_one_exponential"),
        (cell_joined_in_two_orders, "rnn_cell", "joined_in_two_orders"),
        (rnn_with(together=lambda s: torch.stack(s, 2)), "rnn", "time_last"),
        (rnn_with(together=lambda s: torch.stack(s, 1).squeeze(1)), "rnn", "squeezed"),
        (
            rnn_with(cell_of_a_detached_state, lambda s: torch.stack(s, 1)),
            "rnn",
            "detached_before_each_step",
        ),
        (lstm_with(lambda z: torch.split(z, 4, 1)), "lstm_cell", "blocks_of_four"),
        (lstm_with(lambda z: torch.chunk(z, 4)), "lstm_cell", "cut_along_the_batch"),
        (lstm_with(lambda z: z.view(4, len(z), -1)), "lstm_cell", "blocks_by_view"),
        (lstm_no_input_gate, "lstm_cell", "no_input_gate"),
        (ZerosOfNoDtype, "RNNLanguageModel", "float32_start"),
        (rnn_of_features, "rnn", "as_many_steps_as_features"),
        (rnn_in_a_narrow_buffer, "rnn", "buffer_like_the_input"),
        (reach_of_the_first_sequence, "gradient_reach", "first_sequence"),
        (lstm_gate_inside, "lstm_cell", "output_gate_inside"),
        (ZerosLikeIds, "RNNLanguageModel", "integer_start"),
        (DividedParameters, "RNNLanguageModel", "scaled_after_wrapping"),
        (UniformAroundZero, "RNNLanguageModel", "w_h_scale_fixed"),
        (LargeHead, "RNNLanguageModel", "head_unscaled"),
        (drawn(w_h=0.02), "RNNLanguageModel", "w_h_too_small"),
        (drawn(w_h=0.8), "RNNLanguageModel", "w_h_unscaled"),
        (drawn(w_x=0.005), "RNNLanguageModel", "w_x_too_small"),
        (drawn(w_x=1.5), "RNNLanguageModel", "w_x_unscaled"),
    ],
)
def test_common_mistakes_are_named(answer, name, fault):
    report = evaluate(answer, name)
    assert (report.status, report.fault) == ("failed", fault), report.message


def test_cleared_gradients_are_the_learners_mistake_not_a_crash():
    def answer(layer, x):
        reach = reference.gradient_reach(layer, x)
        if isinstance(layer, nn.Module):
            layer.zero_grad()
        return reach

    report = evaluate(answer, "gradient_reach")
    assert (report.status, report.fault) == ("failed", "gradients_cleared")
    assert "is gone" in report.message and "raised" not in report.message


def test_a_state_read_out_of_a_buffer_gets_a_hint():
    report = evaluate(rnn_out_of_its_buffer, "rnn")
    assert report.status == "failed"
    assert "keep it under a name of its own" in report.message
