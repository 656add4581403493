"""Triton's interpreter, made as strict as a GPU.

The interpreter takes pointers for addresses in this process: one outside its tensor
ends Python, or reads and overwrites what belongs to others. And it multiplies float32
exactly where a GPU, unless told otherwise, rounds it to TF32.
"""

import sys
from contextlib import contextmanager

import numpy as np
import torch

ADDRESS_BITS = 48  # of a pointer; the bits above say which tensor it began in
TF32_DROPS = 13  # of the 23 bits of float32's fraction


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


def rounded_to_tf32(operand):
    """A float32 operand of `tl.dot` as a GPU rounds it; others as they are."""
    if operand.data.dtype != np.float32:
        return operand
    half = np.int32(1 << TF32_DROPS - 1)
    bits = (operand.data.view(np.int32) + half) & -np.int32(1 << TF32_DROPS)
    return type(operand)(bits.view(np.float32), operand.dtype)


@contextmanager
def strict():
    """Kernels that are interpreted raise `OutsideTensor`, and know TF32.

    Compiled kernels are not watched, nor those of a Triton that is built otherwise.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    try:
        launcher, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
        unchecked, dot = interpreter._interpreter, builder.create_dot
        arguments = launcher._init_args_hst
    except AttributeError:
        yield
        return
    memory = Memory(unchecked)

    def numbered(self, given, by_name):
        memory.known.clear()
        given, by_name = arguments(self, given, by_name)
        pairs = zip(given, self.arg_names, strict=False)
        given = [memory.number(x, name) for x, name in pairs]
        return given, {name: memory.number(x, name) for name, x in by_name.items()}

    def rounded(self, a, b, added, precision, *more):
        if "TF32" in str(precision) and "TF32x3" not in str(precision):
            a, b = rounded_to_tf32(a), rounded_to_tf32(b)
        return dot(self, a, b, added, precision, *more)

    interpreter._interpreter, launcher._init_args_hst = memory, numbered
    builder.create_dot = rounded
    try:
        yield
    finally:
        interpreter._interpreter, launcher._init_args_hst = unchecked, arguments
        builder.create_dot = dot
