"""Records how the checks call the reference, so that an answer can be called blindly.

The same steps are then gone through with an answer in a process without checks
(`replay`). Then the checks run once more, on a reference that gives the answer's
results in the place of its own: they are data now, and the answer's code is gone.
"""

import functools
import inspect
from dataclasses import replace

import torch
from torch import nn

from utils.check import running
from utils.grade.replay import (
    Foreign,
    Script,
    Step,
    by_name,
    outcome,
    send,
    tensors_in,
)

STEPS = 400
NUMBERS = 300_000  # values of tensors in a script


class Recorder:
    """Wraps the reference, and writes down each call from outside.

    script, found: of an earlier recording, and what came of its steps elsewhere; the
    reference then gives these results.
    """

    def __init__(self, exercise, script=None, found=()):
        self.reference = exercise.reference
        self.played = {
            number: (each, script.steps[number].expected)
            for number, each in enumerate(found)
            if script.steps[number].compared
        }
        self.is_class = isinstance(self.reference, type)
        self.script = Script(exercise.name, self.is_class)
        self.inside = False
        self.made: dict[int, tuple[object, int | None, list]] = {}
        self.numbers = 0
        self.answer = (
            self._class(self.reference)
            if self.is_class
            else self._function(self.reference)
        )

    def _full(self):
        return len(self.script.steps) >= STEPS or self.numbers > NUMBERS

    def _step_of(self, value):
        known = self.made.get(id(value))
        return known[1] if known and known[0] is value else None

    def _add(self, args, kwargs, **more) -> Step:
        step = Step(send(args, self._step_of), send(kwargs, self._step_of), **more)
        self.numbers += sum(t.numel() for t in tensors_in([args, kwargs]))
        self.numbers += sum(t.numel() for t in (step.state or {}).values())
        self.script.steps.append(step)
        return step

    def _function(self, reference):
        @functools.wraps(reference)
        def recorded(*args, **kwargs):
            if self.inside or self._full():
                return reference(*args, **kwargs)
            try:
                step = self._add(args, kwargs)
            except Foreign:
                return reference(*args, **kwargs)
            return self._observe(
                step, lambda: reference(*args, **kwargs), tensors_in([args, kwargs])
            )

        return recorded

    def _observe(self, step, call, inputs):
        """Make the call, and note its outcome with the step."""
        caught = {}

        def once():
            try:
                caught["value"] = call()
            except BaseException as error:
                caught["error"] = error
                raise
            return caught["value"]

        self.inside = True
        try:
            step.expected = outcome(once, inputs)
        finally:
            self.inside = False
        played = self.played.get(len(self.script.steps) - 1)
        if played is not None:
            return instead(*played, caught, inputs)
        if "error" in caught:
            raise caught["error"]
        return caught["value"]

    def _class(self, reference):
        recorder = self

        @functools.wraps(reference.__init__)
        def __init__(made, *args, **kwargs):
            number = None
            if not recorder.inside and not recorder._full():
                try:
                    recorder._add(args, kwargs, expected={"foreign": True})
                    number = len(recorder.script.steps) - 1
                except Foreign:
                    pass
            outer, recorder.inside = recorder.inside, True
            try:
                reference.__init__(made, *args, **kwargs)
            except BaseException:
                if number is not None:
                    recorder.script.steps[number].expected = {"raised": True}
                if recorder.played.get(number, RAISED)[0] == RAISED[0]:
                    raise
            else:
                if recorder.played.get(number, (None,))[0] == RAISED[0]:
                    raise Different
            finally:
                recorder.inside = outer
            if number is not None:
                held = tensors_in([args, kwargs])
                recorder.made[id(made)] = (made, number, held)

        members = {
            name: self._method(name, value)
            for name, value in vars(reference).items()
            if inspect.isfunction(value)
            and (not name.startswith("_") or name == "__call__")
        }
        return type(reference)(
            reference.__name__,
            (reference,),
            {
                "__init__": __init__,
                "__module__": reference.__module__,
                "__qualname__": reference.__qualname__,
                "__doc__": reference.__doc__,
                **members,
            },
        )

    def _method(self, name, method):
        @functools.wraps(method)
        def recorded(made, *args, **kwargs):
            known = self.made.get(id(made))
            if self.inside or self._full() or known is None or known[0] is not made:
                return method(made, *args, **kwargs)
            _, number, held = known
            try:
                step = self._add(
                    args,
                    kwargs,
                    made=number,
                    method=name,
                    held=[send(t, lambda _: None) for t in held],
                    **_state(made),
                )
            except Foreign:
                return method(made, *args, **kwargs)
            return self._observe(
                step,
                lambda: method(made, *args, **kwargs),
                tensors_in([args, kwargs]) + held,
            )

        return recorded


def _state(made) -> dict:
    if not isinstance(made, nn.Module):
        return {}
    named = [*made.named_parameters(), *made.named_buffers()]
    if any(t.device.type != "cpu" for _, t in named):
        raise Foreign
    return {
        "state": {n: t.detach().clone() for n, t in by_name(named).items()},
        "training": made.training,
    }


def script_of(exercise) -> Script:
    """The calls that the requirements of an exercise make, with the results."""
    recorder = Recorder(exercise)
    _try_all(exercise, recorder.answer)
    return recorder.script


def _try_all(exercise, answer) -> list[str]:
    """The sentences of the requirements that an answer does not meet."""
    unmet = []
    for requirement in exercise.requirements:
        errors = running.run_reference(exercise, requirement).errors
        seconds = 10 * exercise.seconds
        _, problem = running.run(requirement, answer, seconds, errors)
        if problem is not None:
            unmet.append(requirement.sentence)
    return unmet


# What came of a script elsewhere ------------------------------------------------------


class Different(Exception):
    """The answer raises where the reference does not, or the other way round."""


def unmet(exercise, script: Script, found) -> list[str] | None:
    """The requirements that the results do not meet; None if they are no results."""
    if not isinstance(found, list) or len(found) != len(script.steps):
        return None
    if not all(isinstance(each, dict) for each in found):
        return None
    return _try_all(exercise, Recorder(exercise, script, found).answer)


class _Instead(torch.autograd.Function):
    """The values of one tensor with the gradients of another."""

    @staticmethod
    def forward(ctx, own, given):
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


RAISED = ({"raised": True}, None)


def instead(played: dict, expected: dict, caught: dict, inputs):
    """Return, raise and leave behind what the answer did, not the reference."""
    pairs = zip(played.get("left", ()), expected.get("left", ()), strict=False)
    for tensor, ((data, grad), (own_data, own_grad)) in zip(
        inputs, pairs, strict=False
    ):
        if not same_exactly(own_data, data):
            tensor.data = data
        if grad is None or own_grad is None or tensor.grad is None:
            tensor.grad = tensor.grad if grad is own_grad else grad
        elif not same_exactly(own_grad, grad):
            tensor.grad.copy_(grad)
    if "result" in played:
        return _shaped_like(caught.get("value"), played["result"])
    if "raised" in played and "error" in caught:
        raise caught["error"]
    raise Different


def same_exactly(one, other) -> bool:
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and bool(((one == other) | ((one != one) & (other != other))).all())
    )


def _shaped_like(own, given):
    """The given result in the containers of the reference's."""
    if isinstance(given, torch.Tensor):
        alike = isinstance(own, torch.Tensor) and own.shape == given.shape
        if alike and own.requires_grad and given.is_floating_point():
            return _Instead.apply(own, given)
        return given
    if isinstance(given, dict):
        kind, values = (
            (type(own), list(own.values())) if isinstance(own, dict) else (dict, [])
        )
        keys = [_hashable(key) for key in given["keys"]]
        return kind(dict(zip(keys, _shaped_like(values, given["values"]), strict=True)))
    if isinstance(given, list):
        parts = own if isinstance(own, (list, tuple)) else ()
        parts = [*parts, *[None] * (len(given) - len(parts))]
        found = [_shaped_like(*pair) for pair in zip(parts, given, strict=False)]
        return found if isinstance(own, list) else tuple(found)
    return given


def _hashable(key):
    return tuple(map(_hashable, key)) if isinstance(key, list) else key


# Which steps say something ------------------------------------------------------------


def calibrate(script: Script, runs: list[list]) -> Script:
    """Look only at what the reference itself gives again, in two blind runs."""
    for step, *found in zip(script.steps, *runs, strict=True):
        step.compared = (
            isinstance(step.expected, dict)
            and "foreign" not in step.expected
            and all(same(step.expected, each) for each in found)
        )
    return script


def without_results(script: Script) -> Script:
    """The calls alone, for a process that must not see what came of them."""
    steps = [replace(step, expected=None, compared=True) for step in script.steps]
    return replace(script, steps=steps)


def results(script: Script) -> int:
    """How many results of an answer are seen."""
    return sum(step.compared and "result" in step.expected for step in script.steps)


def same(expected, actual) -> bool:
    """Equal up to rounding."""
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        return expected.shape == actual.shape and torch.allclose(
            expected.double(), actual.double(), rtol=1e-3, atol=1e-5, equal_nan=True
        )
    if isinstance(expected, dict) and isinstance(actual, dict):
        return expected.keys() == actual.keys() and all(
            same(expected[k], actual[k]) for k in expected
        )
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(same, expected, actual))
    return type(expected) is type(actual) and expected == actual
