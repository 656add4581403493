"""Where an exercise's name leads: to the learner's own part, or what stands in."""

import importlib
import os
import sys

from utils import session, syllabus
from utils.errors import PartMissing
from utils.parts.files import Unusable, part_names, path_of
from utils.reference import has_reference, reference_answer


def reference_wanted() -> bool:
    """Are earlier lessons' parts taken from the reference in this process?

    `COURSE_PARTS` decides, `mine` or `reference`. Without it: the reference in
    strict mode, under nbgrader and under pytest.
    """
    choice = os.environ.get("COURSE_PARTS")
    if choice in ("mine", "reference"):
        return choice == "reference"
    return any(
        os.environ.get(name)
        for name in ("COURSE_STRICT", "NBGRADER_EXECUTION", "PYTEST_VERSION")
    )


def find(name: str):
    """The learner's own part called `name`, or the reference until theirs passes.

    In a copy without reference answers, what is not written is a stand-in that says
    so when it is used.
    """
    lesson = syllabus.lesson_of(name)
    if lesson is None:
        raise AttributeError(f"`{name}` is no part of this course")
    reference = has_reference(lesson.slug)
    if not (reference and reference_wanted()):
        own = _load_own(lesson, name)
        if own is not None:
            return own
        where = f"until yours passes in {lesson.file}"
        _say_once(f"{name}: {'the reference' if reference else 'missing'}, {where}.")
    return reference_answer(lesson.slug, name) if reference else missing(name)


def _load_own(lesson, name):
    if name not in _saved_in(lesson):
        return None
    file = f"my_transformer/{lesson.slug}.py"
    try:
        return getattr(importlib.import_module(f"my_transformer.{lesson.slug}"), name)
    except ModuleNotFoundError as error:
        _say_once(
            f"{file} needs {error.name}, which this Python ({sys.executable}) lacks. "
            "Choose the course's kernel."
        )
    except Exception as error:
        problem = f"cannot be loaded ({type(error).__name__}: {error})"
        _say_once(f"{file} {problem}. {MEND}")
    return None


MEND = (
    "Its parts are not used: mend the file, or give it another name and run that "
    "lesson again."
)


def _saved_in(lesson) -> set[str]:
    try:
        return part_names(path_of(lesson))
    except Unusable as problem:
        _say_once(f"my_transformer/{lesson.slug}.py {problem}. {MEND}")
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        _say_once(f"my_transformer/{lesson.slug}.py {problem}. {MEND}")
    return set()


def saved_names() -> set[str]:
    """Every part that the learner has saved."""
    return set().union(*map(_saved_in, syllabus.lessons()))


_said: set[str] = set()


def _say_once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        print(line)


class Missing(type):
    """The type of a stand-in for a part that nobody has written.

    The stand-in is a class, because a lesson may call a part, ask it for an
    attribute or inherit from it. The first two raise `PartMissing`.
    """

    def __call__(cls, *arguments, **keywords):
        raise PartMissing(cls.sentence)

    def __getattr__(cls, name):
        if name.startswith("_"):  # somebody looks at it, nobody uses it
            raise AttributeError(name)
        raise PartMissing(cls.sentence)


def missing(name: str) -> Missing:
    """What goes in the place of `name` until somebody writes it."""
    lesson = syllabus.lesson_of(name)
    where = f" (lesson {lesson.file})" if lesson else ""
    sentence = (
        f"`{name}` is not written yet{where}, and it is needed here.\n"
        "This copy of the course holds no reference answers."
    )
    return Missing(name, (), {"sentence": sentence, "__module__": "my_transformer"})


def whose(part) -> str:
    """“your `x`” or “the reference `x`”, for the experiments to say what ran."""
    if isinstance(part, Missing):
        return f"the missing `{part.__name__}`"
    module = getattr(part, "__module__", None) or ""
    name = getattr(part, "__name__", type(part).__name__)
    theirs = not (session.solved or module.startswith("solutions."))
    return f"{'your' if theirs else 'the reference'} `{name}`"
