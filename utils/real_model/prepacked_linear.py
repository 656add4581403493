"""A linear layer that is as fast as memory where its input has one row, or few."""

from functools import cache

import torch
from torch import nn

from utils.timing import seconds_in_turn

WIDTH = 24  # outputs in a block
MOST_ROWS = 3  # from four on, PyTorch's product for many rows is as fast


class PrepackedLinear(nn.Linear):
    """`nn.Linear` with a second copy of its weights, for inputs of few rows.

    One row times a matrix uses each weight once, so nothing should limit it but reading
    them. How near a library comes depends on their order in memory. One core of an AMD
    EPYC, PyTorch 2.13, 1,536 outputs of 576 inputs: 11 GB/s by rows, as `nn.Linear` has
    them; 18 by columns; 27 in blocks of 24 outputs, where adding all weights up reaches
    29. Two cores: 11, 18 and 40 (a product of one row runs on one core, blocks are
    shared out). Inference libraries call it prepacking.

    The copy is made when the first such input comes, and again when the weights have
    changed. What is changed through `weight.data` is not seen.
    """

    prepacked = None  # or the weight, its version, and the blocks made from it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., in_features) → (..., out_features)."""
        if not self._is_for_blocks(x):
            return super().forward(x)
        blocks = self._blocks()
        rows = x.reshape(1, -1, self.in_features).expand(len(blocks), -1, -1)
        y = torch.bmm(rows, blocks).transpose(0, 1)  # row, block, output in the block
        y = y.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def _is_for_blocks(self, x):
        w = self.weight
        if (*x.shape[-1:], x.dtype, x.device) != (self.in_features, w.dtype, w.device):
            return False  # `nn.Linear` says what is wrong
        if not 0 < x.numel() <= MOST_ROWS * self.in_features or len(w) % WIDTH:
            return False
        if torch.is_grad_enabled() and w.requires_grad:
            return False
        if w.device.type != "cpu" or w.is_inference():  # the latter counts no changes
            return False
        return prepacking_pays(w.dtype, torch.get_num_threads())

    def _blocks(self):
        """The weights as (out_features / WIDTH, in_features, WIDTH)."""
        weight = self.weight
        if self.prepacked is not None:
            origin, version, blocks = self.prepacked
            if origin is weight and version == weight._version:
                return blocks
        blocks = _in_blocks(weight.detach())
        self.prepacked = weight, weight._version, blocks
        return blocks

    def _apply(self, *args, **kwargs):  # another dtype or device
        self.prepacked = None
        return super()._apply(*args, **kwargs)

    def __getstate__(self):  # a copy, or a file
        return self.__dict__ | {"prepacked": None}


def prepack_linears(model: nn.Module) -> None:
    """Let every `nn.Linear` of the model be a `PrepackedLinear`; the objects stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = PrepackedLinear


def _in_blocks(weight):
    return weight.unflatten(0, (-1, WIDTH)).mT.contiguous()


@cache
def prepacking_pays(dtype: torch.dtype, n_threads: int) -> bool:
    """Is it faster for this dtype, on this machine's threads? Tried once for each.

    The matrix has 14 million weights, more than a processor's cache holds.
    """
    row = torch.ones(1, 576, dtype=dtype)
    weight = row.expand(1024 * WIDTH, -1).contiguous()
    rows, blocks = row.expand(1024, 1, -1), _in_blocks(weight)
    products = {
        "blocks": lambda: torch.bmm(rows, blocks),
        "rows": lambda: nn.functional.linear(row, weight),
    }
    found = seconds_in_turn(products, repeats=3)
    return found["blocks"] < found["rows"]
