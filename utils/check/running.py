"""Runs a requirement on an answer, under a time limit and with settled global state."""

import time
from contextlib import contextmanager
from functools import cache

import torch

from utils.check.case import Case
from utils.check.errors import Crashed, NotWritten, Skipped, Unmet
from utils.check.exercise import Exercise, Requirement
from utils.check.recorded import recorded_errors
from utils.check.time_limit import TimeUp, time_limit


def run(
    requirement: Requirement, answer, seconds: float, reference_errors=(), seed=0
) -> tuple[Case, Exception | TimeUp | None]:
    """Try one requirement: the case, and what went wrong or None."""
    case = Case(list(reference_errors))
    try:
        with settled(seed), time_limit(seconds):
            requirement.test(answer, case)
    except (Unmet, Crashed, Skipped, NotWritten, TimeUp) as problem:
        return case, problem
    except Exception as error:  # while the check reads what the answer returned
        return case, Crashed(error)
    return case, None


@cache
def run_reference(exercise: Exercise, requirement: Requirement) -> Case:
    """The reference under a requirement: its errors and its results.

    A copy without the reference knows its errors alone.
    """
    if exercise.reference is None:
        errors = recorded_errors(exercise)
        n = exercise.requirements.index(requirement)
        return Case(errors=errors[n] if n < len(errors) else [])
    errors: list[float] = []
    while True:
        case, problem = run(
            requirement, exercise.reference, 10 * exercise.seconds, errors
        )
        # Its own error in one comparison must not keep it from the next.
        if problem is None or len(case.errors) <= len(errors):
            return case
        errors = case.errors


def run_all(exercise: Exercise, answer):
    """Each requirement in order with its case and problem; ends after a problem."""
    left = exercise.seconds
    for requirement in exercise.requirements:
        errors = run_reference(exercise, requirement).errors
        started = time.perf_counter()
        case, problem = run(requirement, answer, left, errors)
        left = max(left - (time.perf_counter() - started), 0.1)
        yield requirement, case, problem
        if problem is not None:
            return


@contextmanager
def settled(seed):
    """Global state that an answer may depend on: set now, restored after."""
    random, dtype = torch.random.get_rng_state(), torch.get_default_dtype()
    device, grad = torch.get_default_device(), torch.is_grad_enabled()
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    try:
        yield
    finally:
        torch.random.set_rng_state(random)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
