"""Checks an answer, says what is right or wrong, and names the mistake."""

import argparse
import ast
import difflib
import json
import linecache
import os
import sys
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from torch import nn

from utils import parts, session, syllabus
from utils.check.case import (
    Crashed,
    Explained,
    LeftEarly,
    LeftOut,
    NotWritten,
    Trial,
    Unmet,
    a,
    alike,
)
from utils.check.exercise import Exercise, Fault, Joint
from utils.check.time_limit import TimeUp, time_limit
from utils.display import MARKS, box, show
from utils.errors import CheckFailed, CourseError

PRINTED_LINES = 6  # of what the answer printed, shown with a failure
FRAMES = 3  # of a learner's traceback
RECORDED = (
    Path(__file__).parent.parent / "recorded" / "reference_errors.json"
)  # in a handout


@dataclass(frozen=True)
class Report:
    """What came of a check.

    status: "passed", "failed" or "todo" (not written, only in part, or left out
        because this machine cannot run it).
    fault: the short name of the recognised mistake, or None.
    message: the whole text that the learner reads.
    verified: the sentences of the requirements that were met.
    left_out: this machine cannot run the exercise.
    """

    name: str
    status: str
    fault: str | None
    title: str
    lines: list[str] = field(default_factory=list)
    verified: list[str] = field(default_factory=list)
    left_out: bool = False

    @property
    def message(self) -> str:
        lines = [f"{MARKS[self.status]} {self.title}", *self.lines]
        return "\n".join(lines)

    @property
    def html(self) -> str:
        return box(self.status, self.title, self.lines)


def check(answer, name: str | None = None):
    """Check an answer, show the report, and return the answer to go on with.

    Right: the learner's own, which is saved in `my_transformer` too. Wrong or not
    written: the reference, so that the rest of the notebook runs; in strict mode
    (`COURSE_STRICT=1`, or under nbgrader) it raises `CheckFailed` instead. Where there
    is no reference: what is wrong as it stands, and for what is not written a
    stand-in that says so when it is used.
    """
    name = _name_of(answer, name, sys._getframe(1))
    exercise = find_exercise(name)
    reference = exercise.reference
    stands_in = "the reference" if reference is not None else "a stand-in"
    if isinstance(answer, parts.Missing) or (reference and answer is reference):
        report = Report(
            name,
            "todo",
            None,
            f"{name}: nothing new to check",
            [
                f"The last check put {stands_in} in the place of your answer. "
                "Run your exercise cell again, then this one. If you just did, it "
                f"stopped with an error, or it defines another name than `{name}`."
            ],
        )
        saved = []
    else:
        report = evaluate(answer, name)
        saved = parts.save(name, answer) if report.status == "passed" else []
    lines = [*report.lines, *saved]
    if report.status != "passed" and not (report.left_out and reference is not None):
        lines.append(_goes_on_with(report, reference))
    shown = Report(name, report.status, report.fault, report.title, lines)
    show(shown.message, shown.html)
    if report.status != "passed" and strict() and not _excused(report):
        raise CheckFailed(report.title)
    if report.status == "passed":
        return answer
    if reference is None:
        return answer if report.status == "failed" else parts.missing(name)
    return reference


def _goes_on_with(report, reference) -> str:
    if reference is not None:
        return "Until yours passes, the cells below use the reference."
    if report.status == "failed":
        use = "use yours as it stands"
    else:
        use = "that need it stop with a sentence"
    return f"This copy holds no reference answers, so the cells below {use}."


def check_joint(name: str, **answers):
    """Check that parts which pass alone fit together, and show the report.

    answers: the parts by name, the learner's own or the reference, as this
    notebook uses them.
    """
    report = evaluate_joint(name, answers)
    show(report.message, report.html)
    if report.status != "passed" and strict():
        raise CheckFailed(report.title)


def evaluate(candidate, name: str | None = None) -> Report:
    """Check `candidate` as the answer to exercise `name`, without showing it.

    name: that of the exercise; the candidate's own `__name__` if not given.
    """
    name = name or getattr(candidate, "__name__", type(candidate).__name__)
    exercise = find_exercise(name)
    if isinstance(candidate, parts.Missing):
        return Report(name, "todo", None, f"{name}: not written yet")
    unfit = _wrong_kind(candidate, exercise)
    if unfit:
        return Report(name, "failed", None, f"{name}: not right yet", [unfit])
    return _run(exercise, candidate)


def evaluate_joint(name: str, answers: dict) -> Report:
    """Check the joint `name` on `answers`, the parts by name."""
    if name not in Joint.registry:
        import_specifications()
    if name not in Joint.registry:
        raise CourseError(f"`{name}` is no joint of this course.")
    joint = Joint.registry[name]
    missing = set(joint.parts) - set(answers)
    if missing:
        raise CourseError(f"The joint `{name}` needs {', '.join(sorted(missing))} too.")
    for part, answer in answers.items():
        if isinstance(answer, parts.Missing):
            line = f"`{part}` is not written yet, and this joins it to the others."
            return Report(name, "todo", None, f"{name}: not yet", [line])
    return _run(joint, dict(answers))


def strict() -> bool:
    """Must an unwritten or wrong answer raise?"""
    return os.environ.get("COURSE_STRICT") == "1" or bool(
        os.environ.get("NBGRADER_EXECUTION")
    )


def _excused(report) -> bool:
    """May a solution notebook go on although this machine left the exercise out?

    A learner's must not, nor any under nbgrader: what was not run earns nothing.
    """
    graded = os.environ.get("NBGRADER_EXECUTION")
    return report.left_out and session.solved and not graded


# Running the requirements --------------------------------------------------------


def _run(task, candidate) -> Report:
    verified: list[str] = []
    left = task.seconds
    for requirement in task.requirements:
        errors = _reference_trial(task, requirement).errors
        started = time.perf_counter()
        trial, problem = _attempt(requirement, candidate, left, errors)
        left = max(left - (time.perf_counter() - started), 0.1)
        if problem is None:
            verified.append(requirement.sentence)
        elif isinstance(problem, NotWritten):
            return _not_written(task, problem, verified)
        elif isinstance(problem, LeftOut):
            title = f"{task.name}: left out"
            return Report(
                task.name, "todo", None, title, [str(problem)], verified, True
            )
        else:
            fault = None
            if not isinstance(problem, TimeUp):
                fault = _recognise(task, candidate, requirement, trial, problem)
            return _failed(task, requirement, trial, problem, fault, verified)
    lines = [f"  ✓ {sentence}" for sentence in verified]
    return Report(task.name, "passed", None, f"{task.name}: right", lines, verified)


def _attempt(requirement, answer, seconds, reference_errors=(), seed=0, enough=None):
    """Try one requirement: the trial, and what went wrong or None."""
    trial = Trial(list(reference_errors), enough=enough)
    problem = None
    try:
        with _settled(seed), time_limit(seconds):
            requirement.test(answer, trial)
    except (Unmet, Crashed, LeftOut, LeftEarly, NotWritten, TimeUp) as caught:
        problem = caught
    except Exception as caught:  # while the check reads what the answer returned
        problem = Crashed(caught, trial.called)
    return trial, problem


@cache
def _reference_trial(task, requirement) -> Trial:
    """The reference under the same requirement: its errors and its results.

    A copy without the reference knows its errors alone.
    """
    if task.reference is None:
        errors = _recorded_errors().get(_key(task), [])
        at = task.requirements.index(requirement)
        return Trial(errors=errors[at] if at < len(errors) else [])
    return _attempt(requirement, task.reference, 10 * task.seconds)[0]


def _key(task) -> str:
    return f"{type(task).__name__} {task.name}"


@cache
def _recorded_errors() -> dict:
    if not RECORDED.is_file():
        return {}
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def reference_errors() -> dict[str, list[list[float]]]:
    """How far every reference is from the truth, comparison by comparison.

    The tolerance of a check comes from this, so a copy without the reference answers
    needs it, as `RECORDED`.
    """
    import_specifications()
    return {
        _key(task): [_reference_trial(task, each).errors for each in task.requirements]
        for task in (*Exercise.registry.values(), *Joint.registry.values())
    }


def _recognise(task, candidate, requirement, trial, problem):
    """The fault that gives what the candidate gave, or None.

    Where several do under the requirement that failed, those that meet the earlier
    requirements, as the candidate does, come first, and the later requirements tell
    the rest apart.
    """

    def attempt(requirement, seed=0):
        errors = _reference_trial(task, requirement).errors
        return _attempt(requirement, candidate, task.seconds, errors, seed)

    matching = [
        fault
        for fault in task.faults
        if _matches(task, fault, requirement, trial, problem)
    ]
    at = task.requirements.index(requirement)
    earlier, later = task.requirements[:at], task.requirements[at + 1 :]
    if len(matching) > 1:
        meeting = [
            fault
            for fault in matching
            if all(_fault_trial(task, fault, each)[1] is None for each in earlier)
        ]
        matching = meeting or matching
    for other in later:
        if len(matching) <= 1:
            break
        theirs, ended = attempt(other)
        if isinstance(ended, TimeUp):
            break
        narrowed = [f for f in matching if _matches(task, f, other, theirs)]
        matching = narrowed or matching
    if matching:
        return matching[0]
    for seed, fault in ((0, STATE), (1, RANDOM)):
        again, _ = attempt(requirement, seed)
        same = len(again.trace) == len(trial.trace) and all(
            map(alike, again.trace, trial.trace)
        )
        if not same:
            return fault
    return None


# Every exercise can have these two.
STATE = Fault(
    "state",
    "A second call on the same input gives something else. Is something kept from one "
    "call to the next (a default argument such as `=[]`, a global name, an attribute), "
    "or is an argument changed?",
    None,
)
RANDOM = Fault(
    "random",
    "Two calls on the same input give different results. Something in it draws random "
    "numbers that it should not: dropout, a weight that is made anew, a layer built "
    "inside the call, or a draw that misses its `generator` or another setting?",
    None,
)


def _matches(task, fault, requirement, trial, problem=None) -> bool:
    """Does the fault's code give the same results as those in `trial`?

    problem: what went wrong for the candidate, if it must go wrong here.
    """
    truth = _reference_trial(task, requirement).trace
    truth = [*truth, *[None] * len(trial.trace)]
    n_same = 0  # a trace only grows, so that its entries are compared once

    def differs(trace):
        nonlocal n_same
        while n_same < min(len(trace), len(trial.trace)):
            if not alike(trial.trace[n_same], trace[n_same], truth[n_same]):
                return True
            n_same += 1
        return False

    early = None if trial.retold else differs
    theirs, their_problem = _fault_trial(task, fault, requirement, early)
    if not trial.trace or len(theirs.trace) < len(trial.trace):
        return False
    if problem is not None:
        if their_problem is None:
            return False
        # An error in the backward pass leaves no trace, and may come later there.
        late = len(theirs.trace) > len(trial.trace)
        if late and _error_type(their_problem) is not _error_type(problem):
            return False
    return not differs(theirs.trace)


def _error_type(problem):
    return type(problem.error) if isinstance(problem, Crashed) else problem


_fault_trials = {}


def _fault_trial(task, fault, requirement, differs=None):
    """The fault's code under a requirement: the trial, and what went wrong or None.

    The trial may end early where its trace differs. What was run is kept.
    """
    key = task, fault, requirement
    if key in _fault_trials:
        trial, problem = _fault_trials[key]
        ended = not isinstance(problem, LeftEarly)
        if ended or (differs is not None and differs(trial.trace)):
            return trial, problem
    answer = fault.implementation
    if isinstance(task, Joint):
        answer = {**(task.reference or {}), **answer}
    errors = _reference_trial(task, requirement).errors
    seconds = task.seconds
    found = _attempt(requirement, answer, seconds, errors, enough=differs)
    _fault_trials[key] = found
    return found


@contextmanager
def _settled(seed):
    """Global state that an answer may depend on: set now, restored after."""
    random, dtype = torch.random.get_rng_state(), torch.get_default_dtype()
    grad = torch.is_grad_enabled()
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    try:
        yield
    finally:
        torch.random.set_rng_state(random)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)


# Words -----------------------------------------------------------------------------


def _failed(task, requirement, trial, problem, fault, verified) -> Report:
    lines = [f"Not met: {requirement.sentence}."]
    if isinstance(problem, TimeUp):
        lines += [
            f"It ran for more than {task.seconds:g} seconds and was stopped.",
            "Does a loop never end, or does a Python loop run over every single value?",
        ]
    elif isinstance(problem, Crashed):
        lines += _traceback(problem.error)
    else:
        lines.append(_sentence(str(problem)))
        if isinstance(problem.__cause__, Crashed):
            lines += _where(problem.__cause__.error)
    if trial.called:
        lines.append(f"The call was `{trial.called}`.")
    if fault is not None:
        lines.append(f"What happened: {fault.sentence}")
    elif requirement.hint and not _speaks_for_itself(problem):
        lines.append(f"Hint: {requirement.hint}")
    lines += _printed(trial)
    lines += _already(task, verified)
    return Report(
        task.name,
        "failed",
        fault.name if fault else None,
        f"{task.name}: not right yet",
        lines,
        verified,
    )


def _speaks_for_itself(problem) -> bool:
    """Would a hint on the requirement lead away from what went wrong?"""
    slip = isinstance(problem, Crashed) and isinstance(
        problem.error, (NameError, ImportError)
    )
    return slip or isinstance(problem, (Explained, TimeUp))


def _not_written(task, problem, verified) -> Report:
    where = _own_frames(problem.error)
    inner = where[-1].name if where else task.name
    line = f" (line {where[-1].lineno} of its cell)" if where else ""
    lines = [f"`{inner}` still raises NotImplementedError{line}."]
    if not verified:
        return Report(task.name, "todo", None, f"{task.name}: not written yet", lines)
    lines += _already(task, verified)
    title = f"{task.name}: only partly written"
    return Report(task.name, "todo", None, title, lines, verified)


def _already(task, verified) -> list[str]:
    if not verified:
        return []
    return [f"Already right: {len(verified)} of {len(task.requirements)} requirements."]


def _sentence(text: str) -> str:
    """A capital letter in front, unless a name from the code stands there."""
    first = text.split(" ", 1)[0]
    a_word = first.isalpha() and (len(first) > 1 or first == "a")
    return text[:1].upper() + text[1:] if a_word else text


def _printed(trial) -> list[str]:
    printed = trial.printed.getvalue().splitlines()
    if not printed:
        return []
    shown = [f"  {line[:200]}" for line in printed[-PRINTED_LINES:]]
    return ["The last lines that your code printed:", *shown]


NOT_THEIRS = (
    str(syllabus.ROOT / "utils"),
    str(syllabus.ROOT / "solutions"),
    str(Path(torch.__file__).parent),
    sys.prefix,
    sys.base_prefix,
    "<frozen",
)


def _own_frames(error) -> list[traceback.FrameSummary]:
    """The frames of an exception that lie in the learner's own code."""
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(NOT_THEIRS)
    ]


def _traceback(error) -> list[str]:
    """A learner's exception in few lines: where in their cell, and what."""
    lines = [f"Your code raised {a(type(error).__name__)}: {_one_line(error)}"]
    if "unexpected keyword argument" in str(error) and not _own_frames(error):
        lines.append("Keep the stub's parameter names: callers may use them.")
    return lines + _where(error)


def _where(error) -> list[str]:
    return [
        f"  line {frame.lineno}, in {frame.name}: `{frame.line}`"
        for frame in _own_frames(error)[-FRAMES:]
    ]


def _one_line(error) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:299] + "…"


# Which exercise ---------------------------------------------------------------------


@cache
def import_specifications() -> None:
    """Register the exercises and joints of every lesson."""
    for path in sorted((Path(__file__).parent.parent / "exercises").glob("[a-z]*.py")):
        import_module(f"utils.exercises.{path.stem}")


def is_exercise(name) -> bool:
    """Is this the name of an exercise of the course?"""
    return name in Exercise.registry or syllabus.lesson_of(name) is not None


def find_exercise(name: str) -> Exercise:
    """The exercise called `name`; a `CourseError` says what comes close."""
    lesson = syllabus.lesson_of(name)
    if lesson is not None:
        import_module(f"utils.exercises.{lesson.slug}")
    if name not in Exercise.registry:
        import_specifications()
    if name not in Exercise.registry:
        near = difflib.get_close_matches(name, Exercise.registry, n=1)
        raise CourseError(
            f"`{name}` is no exercise of this course"
            + (f"; did you mean `{near[0]}`?" if near else ".")
        )
    return Exercise.registry[name]


def _name_of(answer, name, frame) -> str:
    """The exercise that `check(answer)` means: given, in the call, or the answer's."""
    if name is not None:
        return name
    if isinstance(answer, str):
        raise CourseError(f"Write check({answer}), without quotes.")
    written = _argument_in_call(frame)
    if is_exercise(written):
        return written
    own = getattr(answer, "__name__", None)
    return own if is_exercise(own) else written or own or type(answer).__name__


def _argument_in_call(frame) -> str | None:
    """`x` where the calling line reads `check(x)`."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    try:
        tree = ast.parse(line.strip())
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") == "check"
            and node.args
            and isinstance(node.args[0], ast.Name)
        ):
            return node.args[0].id
    return None


def _wrong_kind(candidate, exercise) -> str | None:
    """A sentence if `candidate` cannot be an answer at all."""
    name, reference = exercise.name, exercise.reference
    if not callable(candidate):
        return (
            f"`{name}` is {a(type(candidate).__name__)}: has the name been used for "
            "something else since? Run your exercise cell again."
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


# The command line ------------------------------------------------------------------


def load_file(path: Path) -> dict:
    """The names that a Python file defines."""
    spec = spec_from_file_location(path.stem, path)
    if spec is None or not path.is_file():
        raise CourseError(f"{path} is not a Python file that can be read.")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CourseError(
            f"{path} cannot be imported: {type(error).__name__}: {_one_line(error)}"
        ) from error
    return vars(module)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m utils.check",
        description="Check answers in a Python file, such as my_transformer/start.py.",
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help="exercises; all in the file if none")
    options = parser.parse_args(arguments)
    try:
        defined = load_file(options.file)
        names = options.names or [n for n in defined if is_exercise(n)]
        if not names:
            raise CourseError(f"{options.file} defines no exercise of this course.")
        for name in names:
            if name not in defined:
                raise CourseError(f"{options.file} does not define `{name}`.")
        reports = [evaluate(defined[name], name) for name in names]
    except CourseError as error:
        print(error, file=sys.stderr)
        return 2
    for report in reports:
        print(report.message)
    return 0 if all(report.status == "passed" for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
