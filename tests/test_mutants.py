"""Every small error in a reference answer is rejected, or known to be none."""

from importlib import import_module
from importlib.util import find_spec

import pytest

from tests.mutants import build, mutants
from utils import syllabus
from utils.check import fault, running
from utils.check.exercise import load_all

SECONDS = 1.5  # for a mutant, some of which never end
NAMES = [name for lesson in syllabus.lessons() for name in lesson.exercises]


def equivalent(lesson: str) -> dict[str, dict[str, str]]:
    """By exercise: the mutants that are right answers, each with the reason."""
    module = f"tests.equivalent_mutants.{lesson}"
    return import_module(module).EQUIVALENT if find_spec(module) else {}


def survives(mutant, exercise, module) -> bool:
    try:
        answer = build(mutant, module)
    except Exception:
        return False
    return all(problem is None for *_, problem in running.run_all(exercise, answer))


@pytest.mark.parametrize("name", NAMES)
def test_every_mutant_is_rejected_or_equivalent(name, monkeypatch):
    exercise = load_all()[name]
    for requirement in exercise.requirements:
        running.run_reference(exercise, requirement)
    module = import_module(f"solutions.{exercise.lesson}")
    right = set(equivalent(exercise.lesson).get(name, {}))
    seconds = exercise.seconds
    survivors = set()
    for mutant in mutants(fault.source_of(exercise.lesson, name)):
        # A right one has all the time there is: the machine may be busy.
        limit = seconds if mutant.name in right else min(seconds, SECONDS)
        monkeypatch.setattr(exercise, "seconds", limit)
        if survives(mutant, exercise, module):
            survivors.add(mutant.name)
    assert survivors == right
