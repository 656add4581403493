"""Counts what a call costs, the same on every machine: no clock is read."""

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop

ATEN = torch.ops.aten
FLOPS = flop_registry | {ATEN._scaled_dot_product_flash_attention_for_cpu: sdpa_flop}


class Cost(TorchDispatchMode):
    """Around a call, `with Cost() as cost:`, it counts what the call does.

    flops: floating-point operations of matrix products.
    written: how many numbers were written into tensors; views are free.
    peak_bytes: the most memory that new tensors took at one time. Scratch space
        inside one of PyTorch's operations is no tensor, and not counted.
    bytes_now: what they take at this moment.
    """

    def __init__(self):
        super().__init__()
        self.flops = self.written = self.peak_bytes = 0
        self._alive = {}

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # else the first call imports a compiler, for over a second

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._overloadpacket in FLOPS:
            count = FLOPS[func._overloadpacket]
            self.flops += count(*args, **kwargs, out_val=result)
        if func._schema.is_mutable:  # as much is written as is read
            sizes = [x.numel() for x in _tensors((args[1:], kwargs))]
            self.written += max(sizes, default=_tensors(args)[0].numel())
        elif not any(each.alias_info for each in func._schema.returns):
            for x in _tensors(result):
                self.written += x.numel()
                storage = x.untyped_storage()
                self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.bytes_now)
        return result

    @property
    def bytes_now(self):
        self._alive = {r: n for r, n in self._alive.items() if not r.expired()}
        return sum(self._alive.values())


def _tensors(value):
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def work(f, *args, **kwargs) -> int:
    """Floating-point operations of matrix products, plus numbers written."""
    with Cost() as cost:
        f(*args, **kwargs)
    return cost.flops + cost.written


def peak_bytes(f, *args, **kwargs) -> int:
    """The most memory that the tensors made by the call take at one time."""
    with Cost() as cost:
        f(*args, **kwargs)
    return cost.peak_bytes


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
