"""`Case.any_device`: what would lie on the CPU shows on a machine without a GPU."""

import pytest
import torch
from torch import nn

from utils.check.case import Case
from utils.check.errors import Explained
from utils.probe import probe, probe_ids


class Shift(nn.Module):
    """Adds a table, held as a buffer or as a plain attribute."""

    def __init__(self, buffer):
        super().__init__()
        table = torch.arange(3.0)
        if buffer:
            self.register_buffer("table", table)
        else:
            self.table = table

    def forward(self, x):
        return x + self.table


def refused(f, *args, saying="device=x.device"):
    with pytest.raises(Explained) as told:
        Case().any_device(f, *args)
    assert saying in str(told.value)


def with_values(f):
    """The same after a look at the values, which the meta device has not."""

    def g(x):
        assert x.abs().sum().item() > 0
        return f(x)

    return g


ON_THE_INPUTS_DEVICE = {
    "zeros_like": lambda x: torch.zeros_like(x) + x,
    "device named": lambda x: x + torch.arange(x.shape[-1], device=x.device),
    "moved by to": lambda x: x + torch.arange(x.shape[-1]).to(x.device),
    "moved by to(x)": lambda x: x + torch.arange(x.shape[-1]).to(x),
    "new_tensor": lambda x: x + x.new_tensor([1.0, 2.0, 3.0]),
    "a number from the CPU": lambda x: x * torch.tensor(2.0),
    "indices from the CPU": lambda x: x[:, torch.tensor([0, 2])],
    "worked on the CPU, and back": lambda x: (x.cpu() + torch.ones(3)).to(x.device),
    "values read": lambda x: x * max(x.flatten().tolist()),
    "written into": lambda x: torch.empty_like(x).copy_(torch.ones(3)),
    "a list of rows": lambda x: torch.stack([row * 2 for row in x]),
}
ON_THE_CPU = {
    "zeros": lambda x: torch.zeros(x.shape) + x,
    "arange": lambda x: x + torch.arange(x.shape[-1]),
    "result of cpu()": lambda x: x.cpu() * 2,
    "result of to": lambda x: x.to("cpu"),
    "made of a list": lambda x: torch.tensor(x.tolist()),
    "made of a list of tensors": lambda x: torch.tensor([row.sum() for row in x]),
    "device='cpu'": lambda x: x + torch.ones(3, device="cpu"),
    "filled row by row": lambda x: _filled(x),
}


def _filled(x):
    out = torch.zeros(x.shape)
    for i, row in enumerate(x):
        out[i] = row
    return out


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("case", ON_THE_INPUTS_DEVICE)
def test_what_stays_with_its_inputs_passes(case, values):
    f = ON_THE_INPUTS_DEVICE[case]
    Case().any_device(with_values(f) if values else f, probe(2, 3))


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("case", ON_THE_CPU)
def test_what_lies_on_the_cpu_is_refused(case, values):
    f = ON_THE_CPU[case]
    refused(with_values(f) if values else f, probe(2, 3))


def test_tables_of_modules_move_as_buffers_only():
    Case().any_device(Shift(buffer=True), probe(2, 3))
    refused(Shift(buffer=False), probe(2, 3))


def test_one_of_several_results_is_enough():
    refused(lambda x: (x, {"second": torch.ones(2)}), probe(2, 3))


def test_a_text_made_on_the_cpu_is_found():
    refused(lambda ids: torch.tensor([[*ids[0].tolist(), 1]]), probe_ids(1, 4, below=5))


def test_it_leaves_no_trace_and_no_change():
    case, x, module = Case(), probe(2, 3), nn.BatchNorm1d(3)
    case.call(torch.sin, x)
    case.any_device(module, x)
    case.any_device(lambda x: x.add_(1), x)
    assert len(case.recording) == 1
    assert torch.equal(x, probe(2, 3))
    assert module.num_batches_tracked == 0


def test_the_call_is_told_as_the_learner_knows_it():
    def shifted(x):
        return torch.zeros(3)

    case = Case()
    with pytest.raises(Explained):
        case.any_device(with_values(shifted), probe(2, 3))
    assert case.called == "g(x=tensor(2, 3))"
