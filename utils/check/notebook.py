"""The check cells of a notebook: show the report, save what is right, go on."""

import os
from dataclasses import replace

from utils import parts, session
from utils.check.engine import evaluate, find_exercise
from utils.check.report import Report
from utils.display import show
from utils.errors import CheckFailed, CourseError


def check(answer, name: str | None = None):
    """Check an answer, show the report, and return the answer to go on with.

    name: that of the exercise, which the builder writes into each check cell; the
        answer's own `__name__` if not given.

    Right: the learner's own, which is saved in `my_transformer` too. Wrong or not
    written: the reference, so that the rest of the notebook runs; in strict mode
    (`COURSE_STRICT=1`, or under nbgrader) it raises `CheckFailed` instead. Where there
    is no reference: what is wrong as it stands, and for what is not written a
    stand-in that says so when it is used.
    """
    if isinstance(answer, str):
        raise CourseError(f"Write check({answer}), without quotes.")
    name = name or getattr(answer, "__name__", type(answer).__name__)
    reference = find_exercise(name).reference
    if isinstance(answer, parts.Missing) or (reference and answer is reference):
        report = _nothing_new(name, reference)
    else:
        report = evaluate(answer, name)
    notes = []
    if report.status == "passed":
        notes += parts.save(name, answer, passes=lambda x: _why_not(x, name))
    elif not (report.skipped and reference is not None):
        notes.append(_goes_on_with(report, reference))
    _show(replace(report, notes=tuple(notes)))
    if report.status != "passed" and strict() and not _excused(report):
        raise CheckFailed(report.title)
    if report.status == "passed":
        return answer
    if reference is None:
        return answer if report.status == "failed" else parts.missing(name)
    return reference


def check_joint(name: str, **answers) -> None:
    """Check that parts which pass alone fit together, and show the report.

    answers: the parts by name, the learner's own or the reference, as this
    notebook uses them.
    """
    report = evaluate(answers, name)
    _show(report)
    if report.status != "passed" and strict():
        raise CheckFailed(report.title)


def strict() -> bool:
    """Must an unwritten or wrong answer raise?"""
    return os.environ.get("COURSE_STRICT") == "1" or bool(
        os.environ.get("NBGRADER_EXECUTION")
    )


def _show(report):
    show(report.message, report.html)


def _nothing_new(name, reference) -> Report:
    stands_in = "the reference" if reference is not None else "a stand-in"
    line = (
        f"The last check put {stands_in} in the place of your answer. Run your "
        "exercise cell again, then this one. If you just did, it stopped with an "
        f"error, or it defines another name than `{name}`."
    )
    return Report(name, "todo", f"{name}: nothing new to check", problem=(line,))


def _why_not(answer, name) -> str | None:
    """What keeps a saved part from passing, or None."""
    report = evaluate(answer, name)
    return None if report.status == "passed" else " ".join(report.lines[:2])


def _goes_on_with(report, reference) -> str:
    if reference is not None:
        return "Until yours passes, the cells below use the reference."
    if report.status == "failed":
        use = "use yours as it stands"
    else:
        use = "that need it stop with a sentence"
    return f"This copy holds no reference answers, so the cells below {use}."


def _excused(report) -> bool:
    """May a solution notebook go on although this machine cannot run the exercise?

    A learner's must not, nor any under nbgrader: what was not run earns nothing.
    """
    graded = os.environ.get("NBGRADER_EXECUTION")
    return report.skipped and session.solved and not graded
