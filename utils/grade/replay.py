"""Calls an answer as the checks do, where there are no checks and no references.

A script is a list of steps: making an object, or calling it, or calling a function,
each with its inputs. What comes of them goes back as numbers.
"""

import copy
import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from types import SimpleNamespace

import torch
from torch import nn


class Foreign(Exception):
    """A value that cannot be sent to another process."""


@dataclass
class Number:
    """A tensor as an input: its values, its gradient, and what kind of tensor it is."""

    data: torch.Tensor
    grad: torch.Tensor | None
    requires_grad: bool
    parameter: bool


@dataclass
class Made:
    """An object that an earlier step of the script has made."""

    step: int


@dataclass
class Record:
    """An instance of a dataclass: the name of its class, and its fields."""

    name: str
    fields: dict


@dataclass
class Step:
    """Make an object (`made` and `method` are None), call a function, or a method."""

    args: object
    kwargs: object
    made: int | None = None
    method: str | None = None
    state: dict | None = None  # of a module, before the call
    training: bool = True
    held: list | None = None  # tensors that the object was made with, as they are now
    expected: object = None
    compared: bool = True


@dataclass
class Script:
    name: str
    is_class: bool
    steps: list[Step] = field(default_factory=list)


def send(value, made):
    """A value as an input of a step; `made` gives the step of a known object."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.is_sparse:
            raise Foreign
        grad = value.grad if value.is_leaf else None
        return Number(
            value.detach().clone(),
            None if grad is None else grad.detach().clone(),
            value.requires_grad,
            isinstance(value, nn.Parameter),
        )
    if made(value) is not None:
        return Made(made(value))
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(send(each, made) for each in value)
    if type(value) is dict:
        return {send(k, made): send(v, made) for k, v in value.items()}
    if type(value) is SimpleNamespace:
        return SimpleNamespace(**{k: send(v, made) for k, v in vars(value).items()})
    if is_dataclass(value) and not isinstance(value, type):
        named = {f.name: getattr(value, f.name) for f in fields(value)}
        return Record(
            type(value).__name__, {k: send(v, made) for k, v in named.items()}
        )
    if isinstance(value, nn.Module) and all(
        _of_torch(type(each)) for each in value.modules()
    ):
        return copy.deepcopy(value)
    plain = (int, float, str, bytes, bool, type(None), range)
    if type(value) in (*plain, torch.dtype, torch.device, torch.Size):
        return value
    if callable(value) and _of_torch(value):
        return value
    raise Foreign


def _of_torch(value) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] == "torch"


def receive(value, objects):
    """The input that `send` has sent."""
    if isinstance(value, Number):
        made = value.data.clone()
        if value.parameter:
            made = nn.Parameter(made, requires_grad=value.requires_grad)
        elif value.requires_grad:
            made.requires_grad_()
        if value.grad is not None:
            made.grad = value.grad.clone()
        return made
    if isinstance(value, Made):
        return objects[value.step]
    if isinstance(value, Record):
        found = {k: receive(v, objects) for k, v in value.fields.items()}
        return make_dataclass(value.name, found)(**found)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(receive(each, objects) for each in value)
    if type(value) is dict:
        return {receive(k, objects): receive(v, objects) for k, v in value.items()}
    if type(value) is SimpleNamespace:
        return SimpleNamespace(
            **{k: receive(v, objects) for k, v in vars(value).items()}
        )
    return value


def tensors_in(value) -> list[torch.Tensor]:
    """Every tensor among the inputs, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for each in value for t in tensors_in(each)]
    if isinstance(value, dict):
        return [t for each in value.values() for t in tensors_in(each)]
    return []


def result(value):
    """What a call returned, as plain values and tensors."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise Foreign
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [result(each) for each in value]
    if isinstance(value, dict):
        return {"keys": result(list(value)), "values": result(list(value.values()))}
    if isinstance(value, (int, float, str, bytes, bool, type(None))):
        return value
    raise Foreign


def outcome(call, inputs) -> object:
    """What a call gives: its result, and what it left in the tensors it was given."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            value = call()
    except BaseException:
        return {"raised": True}
    try:
        left = [(t.detach().clone(), t.grad) for t in inputs]
        return {"result": result(value), "left": result(left)}
    except Foreign:
        return {"foreign": True}


def run(script: Script, answer, seed: int) -> list:
    """Go through the steps; what came of each."""
    objects, held, found = {}, {}, []
    for number, step in enumerate(script.steps):
        torch.manual_seed(seed + number)
        args, kwargs = receive(step.args, objects), receive(step.kwargs, objects)
        if script.is_class and step.made is None:
            found.append({"foreign": True})
            try:
                objects[number] = answer(*args, **kwargs)
            except BaseException:
                found[-1] = {"raised": True}
                objects[number] = None
            held[number] = tensors_in([args, kwargs])
            continue
        inputs = tensors_in([args, kwargs])
        target = answer
        if script.is_class:
            made = objects[step.made]
            if not _put_back(step, made, held[step.made]):
                found.append({"state": False})
                continue
            inputs = inputs + held[step.made]
            target = getattr(made, step.method, None)
        found.append(outcome(lambda t=target: t(*args, **kwargs), inputs))  # noqa: B023
    return found


def _put_back(step, made, held) -> bool:
    """Give an object the state that the step was recorded with."""
    for tensor, number in zip(held, step.held or (), strict=True):
        tensor.data = number.data.clone()
        tensor.grad = None if number.grad is None else number.grad.clone()
    if step.state is None:
        return True
    if not isinstance(made, nn.Module):
        return False
    own = by_name([*made.named_parameters(), *made.named_buffers()])
    for name, value in step.state.items():
        if name not in own or own[name].shape != value.shape:
            return False
        own[name].data = value.clone()
    made.train(step.training)
    return True


def by_name(named) -> dict:
    """Tensors of a module; a bare parameter `w_q` may stand for `w_q.weight`."""
    return {name.removesuffix(".weight"): tensor for name, tensor in named}


def dump_results(found: list) -> bytes:
    buffer = io.BytesIO()
    torch.save(found, buffer)
    return buffer.getvalue()


def load_results(data: bytes) -> list:
    """Results from a process that is not trusted; holds tensors and plain values."""
    return torch.load(io.BytesIO(data), weights_only=True)
