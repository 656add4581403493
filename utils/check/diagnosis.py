"""Names the mistake in an answer that fails, or describes how its result differs."""

from dataclasses import dataclass
from functools import cache

import torch

from utils.check import difference, running
from utils.check.case import Case
from utils.check.errors import Crashed, Unmet
from utils.check.exercise import Exercise, Requirement
from utils.check.fault import Fault, faulty_answer
from utils.check.recorded import recorded_faults
from utils.check.recording import same_recording
from utils.check.time_limit import TimeUp

# Every exercise can have these two.
STATE = Fault(
    "state",
    "A second call on the same input gives something else. Is something kept from one "
    "call to the next (a default argument such as `=[]`, a global name, an attribute), "
    "or is an argument changed?",
)
RANDOM = Fault(
    "random",
    "Two calls on the same input give different results. Something in it draws random "
    "numbers that it should not: dropout, a weight that is made anew, a layer built "
    "inside the call, or a draw that misses its `generator` or another setting?",
)


@dataclass(frozen=True)
class Known:
    """A fault, and what it gives under the requirements that are known of it."""

    name: str
    sentence: str
    results: dict  # number of the requirement → recording, of a failing one


def name_of(exercise, answer, requirement, case, problem):
    """The known mistake that gives what the answer gave, or None.

    It must meet the requirements before this one, as the answer does. Where several
    do, the requirements after it tell them apart.
    """
    if isinstance(problem, TimeUp):
        return None
    if case.recording:
        at = exercise.requirements.index(requirement)
        known = failing_like(exercise, at, case, problem)
        if len(known) > 1:
            known = _told_apart(exercise, answer, at, known)
        if known:
            return known[0]
    for seed, fault in ((0, STATE), (1, RANDOM)):
        errors = running.run_reference(exercise, requirement).errors
        again, _ = running.run(requirement, answer, exercise.seconds, errors, seed)
        if not same_recording(again.recording, case.recording, []):
            return fault
    return None


def failing_like(exercise, at, case, problem) -> list:
    """The faults that first fail the same requirement, with the same results."""
    requirement = exercise.requirements[at]
    truth = running.run_reference(exercise, requirement).recording
    if exercise.reference is None:
        return [
            known
            for known in _recorded(exercise)
            if min(known.results) == at
            and same_recording(case.recording, known.results[at], truth)
        ]
    found = []
    for fault in exercise.faults:
        theirs, their_problem = run_fault(exercise, fault, requirement)
        if (
            their_problem is not None
            and _kind(their_problem) is _kind(problem)
            and same_recording(case.recording, theirs.recording, truth)
            and _meets_all(exercise, fault, exercise.requirements[:at])
        ):
            found.append(fault)
    return found


def _kind(problem):
    return type(problem.error) if isinstance(problem, Crashed) else Unmet


def _meets_all(exercise, fault, requirements) -> bool:
    return all(run_fault(exercise, fault, each)[1] is None for each in requirements)


def _told_apart(exercise, answer, at, known) -> list:
    """Those of several faults that go on as the answer does."""
    for requirement in exercise.requirements[at + 1 :]:
        if len(known) == 1:
            break
        errors = running.run_reference(exercise, requirement).errors
        theirs, ended = running.run(requirement, answer, exercise.seconds, errors)
        if isinstance(ended, TimeUp):
            break
        truth = running.run_reference(exercise, requirement).recording
        narrowed = [
            each
            for each in known
            if same_recording(
                theirs.recording, _results(exercise, each, requirement), truth
            )
        ]
        known = narrowed or known
    return known


def _results(exercise, known, requirement) -> list:
    if isinstance(known, Known):
        return known.results.get(exercise.requirements.index(requirement), [])
    return run_fault(exercise, known, requirement)[0].recording


@cache
def run_fault(exercise: Exercise, fault: Fault, requirement: Requirement):
    """A known mistake under a requirement: the case, and what went wrong or None."""
    errors = running.run_reference(exercise, requirement).errors
    answer = answer_of(exercise, fault)
    return running.run(requirement, answer, exercise.seconds, errors)


def first_failing(exercise: Exercise, fault: Fault) -> int:
    """The number of the first requirement that a known mistake does not meet."""
    return next(
        n
        for n, requirement in enumerate(exercise.requirements)
        if run_fault(exercise, fault, requirement)[1] is not None
    )


@cache
def answer_of(exercise: Exercise, fault: Fault):
    """The wrong answer that a fault stands for."""
    return faulty_answer(fault, exercise)


@cache
def _recorded(exercise: Exercise) -> list[Known]:
    known = recorded_faults(exercise.lesson).get(exercise.name, [])
    return [Known(**each) for each in known]


def difference_of(case: Case, problem) -> str:
    """What is true and simple of the difference between what came and what should."""
    compared = getattr(problem, "compared", None)
    if compared is None:
        return ""
    if not all(map(torch.is_tensor, compared)):
        return difference.describe_values(*compared, sizes=case.sizes) or ""
    return difference.describe(*compared, inputs=case.inputs, sizes=case.sizes) or ""
