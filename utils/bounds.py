"""Triton's interpreter, made to stop before a pointer leaves its tensor.

The interpreter takes pointers for addresses in this process. One outside its tensor
ends Python, or reads and overwrites what belongs to others.
"""

import sys
from contextlib import contextmanager

import numpy as np
import torch

ADDRESS_BITS = 48  # of a pointer; the bits above say which tensor it began in


class OutsideTensor(IndexError):
    """A kernel was about to read or write outside the tensor that it was given."""


class Numbered(torch.Tensor):
    """A tensor whose number travels with every pointer made from its address."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def data_ptr(self):
        return super().data_ptr() + (self.number << ADDRESS_BITS)


class Memory:
    """Stands for the interpreter's access to memory, which is `unchecked`."""

    def __init__(self, unchecked):
        self.unchecked, self.known = unchecked, []

    def __getattr__(self, name):  # what is no access to memory
        return getattr(self.unchecked, name)

    def load(self, pointers, mask, *more):
        at = self.addresses(pointers, mask, "reads")
        return self.unchecked.load(at, mask, *more)

    def store(self, pointers, values, mask):
        at = self.addresses(pointers, mask, "writes")
        return self.unchecked.store(at, values, mask)

    def atomic_rmw(self, operation, pointers, values, mask, *more):
        at = self.addresses(pointers, mask, "writes")
        return self.unchecked.atomic_rmw(operation, at, values, mask, *more)

    def atomic_cas(self, pointers, *more):
        at = self.addresses(pointers, True, "writes")
        return self.unchecked.atomic_cas(at, *more)

    def number(self, x, parameter):
        """`x`, or each tensor in a tuple `x`, from now on known by a number."""
        if isinstance(x, tuple):
            inside = [self.number(each, parameter) for each in x]
            return type(x)(*inside) if hasattr(x, "_fields") else tuple(inside)
        if isinstance(x, torch.Tensor):
            x = x.as_subclass(Numbered)
            x.number = len(self.known) + 1
            self.known.append((parameter, x))
        return x

    def addresses(self, pointers, mask, does):
        """The addresses of `pointers`, if those in the mask lie in their tensors."""
        numbers = pointers >> np.uint64(ADDRESS_BITS)
        found = pointers & np.uint64((1 << ADDRESS_BITS) - 1)
        for number, (parameter, x) in enumerate(self.known, 1):
            width, storage = x.element_size(), x.untyped_storage()
            at = found.astype(np.int64) - storage.data_ptr()
            outside = (at < 0) | (at + width > storage.nbytes())
            outside &= (numbers == number) & mask
            if outside.any():
                raise OutsideTensor(
                    f"`{parameter}`, a tensor of shape {tuple(x.shape)}, has "
                    f"{storage.nbytes() // width} numbers from 0 on, and this {does} "
                    f"number {at[outside][0] // width}"
                )
        return found


@contextmanager
def pointers_checked():
    """Kernels that are interpreted raise `OutsideTensor` where they would leave one.

    Compiled kernels are not watched, nor those of a Triton that is built otherwise.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    executor = getattr(interpreter, "GridExecutor", None)
    arguments = getattr(executor, "_init_args_hst", None)
    unchecked = getattr(interpreter, "_interpreter", None)
    if arguments is None or unchecked is None:
        yield
        return
    memory = Memory(unchecked)

    def numbered(self, given, by_name):
        memory.known.clear()
        given, by_name = arguments(self, given, by_name)
        given = [memory.number(*each) for each in zip(given, self.arg_names)]  # noqa: B905
        return given, {name: memory.number(x, name) for name, x in by_name.items()}

    interpreter._interpreter, executor._init_args_hst = memory, numbered
    try:
        yield
    finally:
        interpreter._interpreter, executor._init_args_hst = unchecked, arguments
