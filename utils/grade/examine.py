"""Judges one answer beside the checks, and looks whether it has changed them.

An answer that passes here shares the process with its check. Three things are done
about that: functions of torch and of the checks must still be the same ones; some
known wrong answers must still be rejected in the same process; and a blind run
(`replay`) must give the same results where there is no check at all.
"""

import json
import sys
from types import FunctionType

from utils.check import running
from utils.check.engine import evaluate
from utils.check.exercise import Exercise
from utils.check.time_limit import TimeUp, time_limit
from utils.grade.namespace import Answer, load

CELL_SECONDS = 10
KNOWN_WRONG = 3  # that must fail after an answer has passed

WATCHED = (
    "builtins",
    "copy",
    "inspect",
    "math",
    "torch",
    "torch._C",
    "torch._C._nn",
    "torch._tensor",
    "torch.autograd",
    "torch.functional",
    "torch.linalg",
    "torch.nn",
    "torch.nn.functional",
    "torch.special",
)
WATCHED_PACKAGES = ("torch.nn.modules.", "torch.optim.", "utils.", "solutions.")


def seconds_for(exercise) -> float:
    """The time for one answer in all: its cells, its check, and naming the fault."""
    return CELL_SECONDS + 3 * exercise.seconds + 5


def warm(exercise):
    """What every fork needs: the reference's own results."""
    for requirement in exercise.requirements:
        running.run_reference(exercise, requirement)


def fingerprint() -> dict:
    """Which functions and classes stand under the names that the checks rely on."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name in WATCHED or name.startswith(WATCHED_PACKAGES):
            for key, value in list(vars(module).items()):
                found.update(_entries((name, key), value))
                if isinstance(value, type):
                    for inner, member in list(vars(value).items()):
                        found.update(_entries((name, key, inner), member))
    for exercise in Exercise.registry.values():
        tests = [
            (id(r.test), id(getattr(r.test, "func", r.test).__code__))  # of a partial
            for r in exercise.requirements
        ]
        found["requirements", exercise.name] = tests
    return found


def _entries(key, value):
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, FunctionType):
        yield key, (id(value), id(value.__code__), id(value.__defaults__))
    elif callable(value):
        yield key, id(value)


def changed(before: dict) -> list[str]:
    """The names under which something else stands now."""
    now = fingerprint()
    return [".".join(map(str, key)) for key in before if now.get(key) != before[key]]


def passes_for_right(exercise, answer) -> bool:
    """Does a wrong answer pass every requirement?"""
    for requirement in exercise.requirements:
        errors = running.run_reference(exercise, requirement).errors
        _, problem = running.run(requirement, answer, exercise.seconds, errors)
        if problem is not None:
            return False
    return True


def examine(answer: Answer, before: dict, wrong: list) -> bytes:
    """The report on an answer, as JSON. wrong: answers that must be rejected."""
    exercise, checks = Exercise.registry[answer.name], sys.modules["utils.check"]
    try:
        with time_limit(CELL_SECONDS):
            namespace, problems = load(answer)
    except TimeUp:
        return _json(
            "failed", "time_limit", answer, ["Its cell does not come to an end."]
        )
    finally:
        sys.modules["utils.check"] = checks
    if answer.name not in namespace:
        lines = problems or [f"The cell does not define `{answer.name}`."]
        return _json("failed", "not_defined", answer, lines)
    try:
        report = evaluate(namespace[answer.name], answer.name)
    except BaseException as error:
        lines = [*problems, f"The check broke on it: {type(error).__name__}."]
        return _json("failed", "broke_the_check", answer, lines)
    if report.status == "passed":
        meddled = changed(before)[:3]
        if meddled:
            lines = [f"It has changed {', '.join(f'`{n}`' for n in meddled)}."]
            return _json("failed", "tampered", answer, lines)
        if any(passes_for_right(exercise, each) for each in wrong):
            lines = ["After it, the check accepts answers that are known to be wrong."]
            return _json("failed", "tampered", answer, lines)
    return _json(
        report.status,
        report.fault,
        answer,
        [*problems, *report.lines],
        title=report.title,
        explanation=report.explanation or report.difference,
        unmet=report.unmet,
    )


def _json(status, fault, answer, lines, title="", explanation="", unmet="") -> bytes:
    about = {
        "status": status,
        "fault": fault or "",
        "title": title or f"{answer.name}: not right yet",
        "lines": [str(line)[:2000] for line in lines[:60]],
        "explanation": explanation[:2000],
        "unmet": unmet[:2000],
    }
    return json.dumps(about).encode()
