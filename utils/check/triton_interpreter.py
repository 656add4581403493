"""Triton's interpreter, made as strict as a GPU.

The interpreter takes pointers for addresses in this process: one outside its tensor
ends Python, or reads and overwrites what belongs to others. And it multiplies float32
exactly where a GPU, unless told otherwise, rounds it to TF32. What a mask leaves out of
a load that has no `other` is 0 in it, and anything on a GPU.
"""

import os
import sys
from contextlib import contextmanager
from functools import wraps

import numpy as np
import torch

from utils import triton_mode  # noqa: F401, before Triton is imported
from utils.check.errors import Skipped

try:
    import triton
    import triton.language as tl
except ImportError:  # there is none for Windows and macOS
    triton = tl = None

ADDRESS_BITS = 48  # of a pointer; the bits above say which tensor it began in
TF32_DROPS = 13  # of the 23 bits of float32's fraction
FLOATS = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}


def device():
    """Where kernels are tried, "cpu" interpreted or "cuda" compiled; or `Skipped`."""
    if triton is None:
        raise Skipped(
            "There is no Triton here (it exists for Linux alone, and the course does "
            "not ask for it): leave this exercise out and read on, nothing later needs "
            "it. To try it on Linux: `python -m pip install triton`, and restart the "
            "kernel."
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        if isinstance(tl.max, triton.runtime.JITFunction):
            raise Skipped(
                "Triton was imported before TRITON_INTERPRET=1 was set, and cannot "
                "interpret: restart the kernel, and run the notebook from its first "
                "cell."
            )
        return "cpu"
    if not torch.cuda.is_available():
        raise Skipped(
            "Triton was imported without TRITON_INTERPRET=1, and there is no GPU to "
            "compile for: restart the kernel, and run the notebook from its first cell."
        )
    if torch.cuda.get_device_capability() < (8, 0):
        has = ".".join(map(str, torch.cuda.get_device_capability()))
        raise Skipped(
            f"This GPU has compute capability {has} and the kernel needs 8.0: leave "
            "the exercise out, or set TRITON_INTERPRET=1 and restart the kernel."
        )
    return "cuda"


def plainly(answer):
    """The answer, its exceptions taken out of the interpreter's wrapping."""

    @wraps(answer)
    def call(*args, **kwargs):
        try:
            return answer(*args, **kwargs)
        except Exception as error:
            inner = error
            while type(inner).__name__ == "InterpreterError" and inner.__cause__:
                inner = inner.__cause__
            if inner is error:
                raise
            raise inner from None

    return call


class OutsideTensor(IndexError):
    """A kernel was about to read or write outside the tensor that it was given.

    where: what it was about to do, with a tensor of which shape, at which number.
    """

    def __init__(self, parameter, x, does, number):
        n_numbers = x.untyped_storage().nbytes() // x.element_size()
        super().__init__(
            f"`{parameter}`, a tensor of shape {tuple(x.shape)}, has {n_numbers} "
            f"numbers from 0 on, and this {does} number {number}"
        )
        self.where = does, tuple(x.shape), int(number)


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
                raise OutsideTensor(parameter, x, does, at[outside][0] // width)
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
    """Kernels that are interpreted raise `OutsideTensor`, know TF32, and load NaN.

    Results that a kernel never writes are NaN too, and not what lay there by chance.
    Compiled kernels are not watched, nor those of a Triton that is built otherwise.
    """
    with _unwritten_is_nan(), _watched():
        yield


@contextmanager
def _unwritten_is_nan():
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextmanager
def _watched():
    interpreter = sys.modules.get("triton.runtime.interpreter")
    try:
        launcher, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
        unchecked, dot = interpreter._interpreter, builder.create_dot
        load, handle = builder.create_masked_load, interpreter.TensorHandle
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

    def loaded(self, pointers, mask, other, *more):
        kind = pointers.get_element_ty()
        if other is None and str(kind) in FLOATS:
            nothing = np.full(pointers.data.shape, np.nan, FLOATS[str(kind)])
            other = handle(nothing, kind)
        return load(self, pointers, mask, other, *more)

    interpreter._interpreter, launcher._init_args_hst = memory, numbered
    builder.create_dot, builder.create_masked_load = rounded, loaded
    try:
        yield
    finally:
        interpreter._interpreter, launcher._init_args_hst = unchecked, arguments
        builder.create_dot, builder.create_masked_load = dot, load
