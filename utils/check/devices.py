"""Tells on which device a tensor would lie, on a machine that has one device only."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map


class OnTheCPU(Exception):
    """A tensor is on the CPU where others are not; the message says why."""


# These take a tensor of another device: indices and values from the CPU, or a shape.
CROSSING = ("copy_", "__getitem__", "__setitem__", "view_as", "reshape_as", "expand_as")

LISTED = ("tensor", "as_tensor")  # on the CPU if made of a list, even one of tensors


class FakeDevice(TorchFunctionMode):
    """The inputs are said to be on an accelerator, what names no device on the CPU.

    A machine without an accelerator obeys `.cpu()` and `device="cpu"` in silence, and
    creates where the inputs are what was created without a device. Reading the values
    of a tensor on the CPU is right; returning it, or computing with it and with one
    that is not there, is not.
    """

    HERE = torch.device("cpu:0")
    named = False

    @property
    def message(self):
        """What made a tensor lie on the CPU."""
        if self.named:
            return (
                'It names the CPU, with `.cpu()` or `device="cpu"`, and what is there '
                "meets what is not, or comes back: pass `device=x.device` (lesson 00, "
                "conventions)."
            )
        return (
            "It creates a tensor without saying on which device: pass "
            "`device=x.device`, or use what takes it from another tensor, as "
            "`torch.zeros_like` does (lesson 00, conventions)."
        )

    def on_the_cpu(self, value) -> bool:
        return isinstance(value, torch.Tensor) and getattr(value, "_on_the_cpu", False)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        given = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        cpu = [v for v in given if self.on_the_cpu(v)]
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return torch.device("cpu") if cpu else self.HERE
        where = kwargs.get("device")
        if where is None and name in ("to", "type_as"):
            where = next(
                (v for v in args[1:] if isinstance(v, (str, torch.device))), None
            )
            other = next((v for v in args[1:] if isinstance(v, torch.Tensor)), None)
            if other is not None:
                where = "cpu" if self.on_the_cpu(other) else self.HERE
        if where is not None:
            moved = str(where) == "cpu"
            self.named |= moved
        elif name == "cpu":
            moved = self.named = True
        elif not given or (name in LISTED and isinstance(args[0], (list, tuple))):
            moved = True
        else:
            sides = {self.on_the_cpu(v) for v in given if v.dim() > 0}
            if len(sides) > 1 and name not in CROSSING:
                raise OnTheCPU(self.message)
            wide = [v for v in given if v.dim() > 0] or given
            moved = self.on_the_cpu(given[0] if name in CROSSING else wide[0])
        result = func(*args, **kwargs)

        def mark(value):
            if isinstance(value, torch.Tensor) and moved != self.on_the_cpu(value):
                if any(value is v for v in given):
                    value = value.view(value.shape)
                value._on_the_cpu = moved
            return value

        tensors = any(isinstance(v, torch.Tensor) for v in tree_leaves(result))
        return tree_map(mark, result) if tensors else result
