"""Judges an answer: tries its requirements, and says in a report what came of it."""

import difflib

from torch import nn

from utils import parts
from utils.check import diagnosis, exercise, running
from utils.check.errors import Crashed, Explained, NotWritten, Skipped
from utils.check.exercise import Exercise
from utils.check.known_errors import meaning_of
from utils.check.learner_code import own_frames, where
from utils.check.report import Report
from utils.check.time_limit import TimeUp
from utils.check.wording import one_line, with_article
from utils.errors import CourseError

PRINTED_LINES = 6  # of what the answer printed, shown with a failure


def evaluate(candidate, name: str | None = None) -> Report:
    """Check `candidate` as the answer to exercise `name`, without showing it.

    candidate: a function or class; for an integration check, its parts by name.
    name: that of the exercise; the candidate's own `__name__` if not given.
    """
    name = name or getattr(candidate, "__name__", type(candidate).__name__)
    asked = find_exercise(name)
    if asked.parts is not None:
        return _evaluate_parts(asked, candidate)
    if isinstance(candidate, parts.Missing):
        return Report(name, "todo", f"{name}: not written yet")
    # `torch.compile` takes longer than a check may; its answer is the one inside.
    candidate = getattr(candidate, "_torchdynamo_orig_callable", candidate)
    unfit = _wrong_kind(candidate, asked)
    if unfit:
        return Report(name, "failed", f"{name}: not right yet", problem=(unfit,))
    return _judge(asked, candidate)


def _evaluate_parts(asked, answers: dict) -> Report:
    missing = set(asked.parts) - set(answers)
    if missing:
        raise CourseError(f"`{asked.name}` needs {', '.join(sorted(missing))} too.")
    for part, answer in answers.items():
        if isinstance(answer, parts.Missing):
            line = f"`{part}` is not written yet, and this joins it to the others."
            return Report(asked.name, "todo", f"{asked.name}: not yet", problem=(line,))
    return _judge(asked, dict(answers))


def find_exercise(name: str) -> Exercise:
    """The exercise called `name`; a `CourseError` says what comes close."""
    found = exercise.find(name)
    if found is None:
        near = difflib.get_close_matches(name, Exercise.registry, n=1)
        raise CourseError(
            f"`{name}` is no exercise of this course"
            + (f"; did you mean `{near[0]}`?" if near else ".")
        )
    return found


def _judge(asked: Exercise, candidate) -> Report:
    verified: list[str] = []
    for requirement, case, problem in running.run_all(asked, candidate):
        if problem is None:
            verified.append(requirement.sentence)
        elif isinstance(problem, NotWritten):
            return _not_written(asked, problem, verified)
        elif isinstance(problem, Skipped):
            title = f"{asked.name}: left out"
            return Report(
                asked.name, "todo", title, problem=(str(problem),), skipped=True
            )
        else:
            return _failed(asked, candidate, requirement, case, problem, verified)
    title = f"{asked.name}: right"
    return Report(asked.name, "passed", title, **_so_far(asked, verified))


def _so_far(asked, verified) -> dict:
    return {"verified": tuple(verified), "n_requirements": len(asked.requirements)}


def _failed(asked, candidate, requirement, case, problem, verified) -> Report:
    fault = diagnosis.name_of(asked, candidate, requirement, case, problem)
    lines, frames = _problem(asked, problem)
    explanation = fault.sentence if fault else _meaning(problem)
    return Report(
        asked.name,
        "failed",
        f"{asked.name}: not right yet",
        fault.name if fault else None,
        unmet=requirement.sentence,
        problem=lines,
        frames=frames,
        call=case.called,
        explanation=explanation,
        difference="" if fault else diagnosis.difference_of(case, problem),
        hint="" if explanation or _speaks_for_itself(problem) else requirement.hint,
        printed=_printed(case),
        **_so_far(asked, verified),
    )


def _problem(asked, problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What went wrong, and where in the learner's code."""
    if isinstance(problem, TimeUp):
        return (
            f"It ran for more than {asked.seconds:g} seconds and was stopped.",
            "Does a loop never end, or does a Python loop run over every single value?",
        ), ()
    if isinstance(problem, Crashed):
        error = problem.error
        kind = with_article(type(error).__name__)
        lines = [f"Your code raised {kind}: {one_line(error)}"]
        if "unexpected keyword argument" in str(error) and not own_frames(error):
            lines.append("Keep the stub's parameter names: callers may use them.")
        return tuple(lines), where(error)
    cause = problem.__cause__
    return (str(problem),), where(cause.error) if isinstance(cause, Crashed) else ()


def _meaning(problem) -> str:
    return meaning_of(problem.error) if isinstance(problem, Crashed) else ""


def _speaks_for_itself(problem) -> bool:
    """Would a hint on the requirement lead away from what went wrong?"""
    slip = isinstance(problem, Crashed) and isinstance(
        problem.error, (NameError, ImportError)
    )
    return slip or isinstance(problem, (Explained, TimeUp))


def _not_written(asked, problem, verified) -> Report:
    frames = own_frames(problem.error)
    inner = frames[-1].name if frames else asked.name
    at = f" (line {frames[-1].lineno} of its cell)" if frames else ""
    return Report(
        asked.name,
        "todo",
        f"{asked.name}: {'only partly' if verified else 'not'} written"
        + ("" if verified else " yet"),
        problem=(f"`{inner}` still raises NotImplementedError{at}.",),
        **_so_far(asked, verified),
    )


def _printed(case) -> tuple[str, ...]:
    printed = case.printed.getvalue().splitlines()
    return tuple(line[:200] for line in printed[-PRINTED_LINES:])


def _wrong_kind(candidate, asked) -> str | None:
    """A sentence if `candidate` cannot be an answer at all."""
    name, reference = asked.name, asked.reference
    if not callable(candidate):
        return (
            f"`{name}` is {with_article(type(candidate).__name__)}: has the name been "
            "used for something else since? Run your exercise cell again."
        )
    if reference is None:
        return None
    if isinstance(candidate, type) and not isinstance(reference, type):
        return f"`{name}` is a class, and the exercise asks for a function."
    if isinstance(candidate, nn.Module) and isinstance(reference, type):
        return f"`{name}` is an object, and the exercise asks for the class itself."
    if isinstance(reference, type) and not isinstance(candidate, type):
        return f"`{name}` is a function, and the exercise asks for a class."
    base = reference.__mro__[1] if isinstance(reference, type) else object
    if base is not object and not issubclass(candidate, base):
        module = ".".join(base.__module__.split(".")[:2])  # torch.nn, not where it lies
        path = f"{module}.{base.__name__}"
        return f"The class `{name}` must inherit from `{path}`."
    return None
