"""Counts the bytes of the tensors that a piece of code creates, on any device."""

import weakref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Within `with LiveBytes() as memory:` counts tensors made there and still alive.

    memory.now: their bytes at this moment.
    memory.peak: the most there have been. Scratch space inside one operation of
        PyTorch is not a tensor and not counted; nor is what existed before.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        before = {id(x.untyped_storage()) for x in _tensors([args, *kwargs.values()])}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in before and id(storage) not in self._known:
                self._add(storage)
        return result

    def _add(self, storage):
        key, size = id(storage), storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, size).atexit = False

    def _remove(self, key, size):
        self._known.discard(key)
        self.now -= size


def _tensors(value):
    """The tensors among what an operation takes or gives."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [x for each in value for x in _tensors(each)]
    return []


def peak_bytes(f, *args) -> int:
    """The most bytes of new tensors alive at once while `f(*args)` runs."""
    with LiveBytes() as memory:
        f(*args)
    return memory.peak


def saved_bytes(f, *args) -> int:
    """The bytes that autograd keeps after `f(*args)` for its backward pass."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = f(*args)
    del result
    return sum(storage.nbytes() for storage in kept.values())
