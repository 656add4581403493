"""Copies and conversions of what an answer is called with."""

import copy

import torch
from torch import nn

from utils.probe import probe_ids


def is_float(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def first_float(values):
    return next((v for v in values if is_float(v)), None)


def fresh(value):
    """A copy of tensors and containers, with the same strides; modules as they are."""
    if isinstance(value, torch.Tensor):
        return _fresh_tensor(value)
    if type(value) in (tuple, list):
        return type(value)(fresh(v) for v in value)
    if isinstance(value, dict):
        return {k: fresh(v) for k, v in value.items()}
    return value


def _fresh_tensor(x):
    if x.grad_fn is not None:
        return x
    data = x.detach()
    copied = torch.empty(0, dtype=data.dtype, device=data.device).set_(
        data.untyped_storage().clone(),
        data.storage_offset(),
        data.size(),
        data.stride(),
    )
    return copied.requires_grad_(x.requires_grad)


def unchanged(before, after) -> bool:
    """Is an input after the call what it was before?"""
    if isinstance(before, torch.Tensor):
        if before.shape != after.shape or before.dtype != after.dtype:
            return False
        same = (before == after) | ((before != before) & (after != after))
        return bool(same.all())
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) and all(map(unchanged, before, after))
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(
            unchanged(before[k], after[k]) for k in before
        )
    return before is after or same_value(before, after)


def same_value(one, other) -> bool:
    try:
        return bool(one == other)
    except Exception:
        return False


def convert(value, change):
    """`change` applied to every tensor and module in a container."""
    if isinstance(value, (torch.Tensor, nn.Module)):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(convert(v, change) for v in value)
    if isinstance(value, dict):
        return {k: convert(v, change) for k, v in value.items()}
    return value


def in_float64(value):
    return convert(value, lambda x: x.detach().double() if is_float(x) else x)


def rounded_once(value):
    """In float64, with every number moved by its dtype's epsilon, up or down."""

    def move(x):
        if not is_float(x):
            return x
        up_or_down = probe_ids(*x.shape, below=2, seed=77) * 2 - 1
        return x.detach().double() * (1 + torch.finfo(x.dtype).eps * up_or_down)

    return convert(value, move)


def to_meta(value):
    """On the device that computes shapes alone; modules as copies."""

    def move(x):
        return (copy.deepcopy(x) if isinstance(x, nn.Module) else x).to("meta")

    return convert(value, move)
