"""The prepacked linear layer: the numbers of `nn.Linear`, whatever happens to it."""

import copy
import io

import pytest
import torch
from torch import nn

from utils.real_model import prepacked_linear
from utils.real_model.prepacked_linear import PrepackedLinear, prepack_linears

prepacking_pays = prepacked_linear.prepacking_pays  # as it is without the fixture


@pytest.fixture(autouse=True)
def always_pays(monkeypatch):
    monkeypatch.setattr(
        prepacked_linear, "prepacking_pays", lambda dtype, n_threads: True
    )


def made(d_in=10, d_out=48, bias=False):
    """A prepacked layer whose weights are fixed, as the real model's are."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(d_in, d_out, bias=bias))
    layer.requires_grad_(False)
    prepack_linears(layer)
    return layer[0]


def plain(layer, x):
    return nn.functional.linear(x, layer.weight, layer.bias)


def agrees(layer, tolerance=1e-6):
    x = torch.randn(1, 1, layer.in_features, dtype=layer.weight.dtype)
    torch.testing.assert_close(layer(x), plain(layer, x), rtol=0, atol=tolerance)
    return layer.prepacked is not None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(10,), (1, 10), (1, 1, 10), (3, 10), (2, 1, 10), (2, 2, 10), (0, 10)]
)
def test_results_are_those_of_linear(shape, bias):
    layer = made(bias=bias)
    x = torch.randn(shape)
    assert layer(x).shape == (*shape[:-1], 48)
    torch.testing.assert_close(layer(x), plain(layer, x))
    assert (layer.prepacked is not None) == (0 < x.numel() <= 3 * 10)


def test_rows_of_another_layout_are_read_right():
    layer, x = made(), torch.randn(10, 3).T[1:2]
    torch.testing.assert_close(layer(x), plain(layer, x))


@pytest.mark.parametrize(
    "wrong", [torch.ones(1, 7), torch.ones(1, 10).double(), torch.tensor(1.0)]
)
def test_what_does_not_fit_is_refused_as_by_linear(wrong):
    layer = made()
    with pytest.raises(RuntimeError) as refused:
        layer(wrong)
    with pytest.raises(RuntimeError) as expected:
        plain(layer, wrong)
    assert str(refused.value) == str(expected.value)


def test_blocks_of_24_only():
    layer = made(d_out=50)
    assert not agrees(layer)


def test_is_still_the_linear_layer_with_its_names():
    layer = nn.Linear(10, 48)
    model = nn.Sequential(layer, nn.ReLU())
    names = list(model.state_dict())
    prepack_linears(model)
    assert model[0] is layer and isinstance(layer, PrepackedLinear)
    model(torch.randn(1, 10))
    assert list(model.state_dict()) == names


def test_changed_weights_are_prepacked_again():
    layer = made()
    assert agrees(layer)
    layer.weight[3] = 0
    assert agrees(layer)
    layer.weight = nn.Parameter(torch.randn(48, 10), requires_grad=False)
    assert agrees(layer)
    layer.double()
    assert layer.prepacked is None
    assert agrees(layer)
    assert layer(torch.randn(1, 10).double()).dtype == torch.float64


def test_copies_and_files_hold_no_blocks_of_older_weights():
    layer = made()
    agrees(layer)
    layer.weight[3] = 0
    assert agrees(copy.deepcopy(layer))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert agrees(torch.load(file, weights_only=False))


def test_gradients_flow_where_the_weights_learn():
    layer = made().requires_grad_(True)
    x = torch.randn(1, 10, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.detach().expand(48, -1))
    assert layer.prepacked is None
    fixed = made()
    fixed(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * fixed.weight.sum(0, keepdim=True))


def test_weights_of_inference_mode_are_not_prepacked():
    with torch.inference_mode():
        layer = made()
        assert not agrees(layer)


def test_where_it_is_slower_nothing_is_prepacked(monkeypatch):
    monkeypatch.setattr(
        prepacked_linear, "prepacking_pays", lambda dtype, n_threads: False
    )
    assert not agrees(made())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whether_it_pays_is_tried(dtype):
    assert prepacking_pays(dtype, torch.get_num_threads()) in (True, False)
