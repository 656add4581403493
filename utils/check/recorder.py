"""Records what a copy without reference answers must know of them, see `recorded`."""

import io
import json

import torch

from utils.check import diagnosis, running
from utils.check.exercise import Exercise, load_all
from utils.check.recorded import ERRORS
from utils.progress import progress


def files() -> dict[str, bytes]:
    """The files of `recorded.FOLDER` by name."""
    load_all()
    exercises = list(Exercise.registry.values())
    errors = {each.name: _errors(each) for each in exercises}
    lessons: dict[str, dict] = {}
    for each in progress(exercises, "exercises"):
        lessons.setdefault(each.lesson, {})[each.name] = _faults(each)
    found = {ERRORS: json.dumps(errors).encode()}
    for lesson, faults in lessons.items():
        buffer = io.BytesIO()
        torch.save(faults, buffer)
        found[f"{lesson}.pt"] = buffer.getvalue()
    return found


def _errors(exercise) -> list[list[float]]:
    """How far the reference is from the truth: tolerances come from it."""
    return [running.run_reference(exercise, r).errors for r in exercise.requirements]


def _faults(exercise) -> list[dict]:
    """The results of each fault under the first requirement that it fails.

    And under the later ones, where another fault gives the same there.
    """
    requirements = exercise.requirements
    made = []
    for fault in exercise.faults:
        first = diagnosis.first_failing(exercise, fault)
        case, problem = diagnosis.run_fault(exercise, fault, requirements[first])
        twins = diagnosis.failing_like(exercise, first, case, problem)
        last = len(requirements) if len(twins) > 1 else first + 1
        results = {
            n: diagnosis.run_fault(exercise, fault, requirements[n])[0].recording
            for n in range(first, last)
        }
        made.append(
            {"name": fault.name, "sentence": fault.sentence, "results": results}
        )
    return made
