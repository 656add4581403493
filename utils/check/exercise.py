"""What an exercise asks for: its requirements, and the faults that it can name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from utils import syllabus
from utils.check.fault import Fault
from utils.reference import has_reference, reference_answer


@dataclass(frozen=True, eq=False)
class Requirement:
    """A sentence, and a check behind it: `test(answer, case)` raises `Unmet`."""

    sentence: str
    test: Callable
    hint: str


class Exercise:
    """One answer: the function or class `name` of `solutions/<lesson>.py`.

    Its requirements are tried in the order in which they are added.

    seconds: how long an answer may take over all requirements.
    """

    registry: ClassVar[dict[str, "Exercise"]] = {}
    parts: ClassVar[dict[str, str] | None] = None

    def __init__(self, name: str, lesson: str, seconds: float = 10.0):
        self.name, self.lesson, self.seconds = name, lesson, seconds
        self.requirements: list[Requirement] = []
        self.faults: list[Fault] = []
        Exercise.registry[name] = self

    @property
    def reference(self):
        """The course's own answer, or None in a copy without solutions."""
        return reference_answer(self.lesson, self.name)

    def requires(self, sentence: str, hint: str = ""):
        """Decorates `test(answer, case)`, the check behind `sentence`."""

        def add(test):
            self.requirements.append(Requirement(sentence, test, hint))
            return test

        return add

    def fault(self, name: str, sentence: str, *edits, edited: str | None = None):
        """Adds a mistake under its name: edits of the reference, `(old, new)` each.

        Without edits it decorates the wrong answer itself.
        """
        if edits:
            self.faults.append(Fault(name, sentence, edits, None, edited))
            return None

        def add(answer):
            self.faults.append(Fault(name, sentence, (), answer, edited))
            return answer

        return add

    def inherits(self, other: "Exercise", *names: str):
        """The faults of what this exercise calls, for those who write it out again.

        names: of the faults; all that are edits if none is given.
        """
        known = {fault.name for fault in self.faults}
        unknown = set(names) - {fault.name for fault in other.faults}
        if unknown:
            raise LookupError(f"{other.name} has no fault {', '.join(unknown)}")
        for fault in other.faults:
            wanted = fault.name in names if names else fault.name not in known
            if fault.answer is None and wanted:
                edited = fault.edited or other.name
                self.faults.append(replace(fault, edited=edited))


class IntegrationCheck(Exercise):
    """Parts that must fit together: `test(parts, case)` gets them by name.

    parts: the lesson of each answer that takes part, by the answer's name, each
        before `lesson` or in it. A fault says with `edited` which of them it changes.
    """

    def __init__(
        self, name: str, lesson: str, parts: dict[str, str], seconds: float = 10.0
    ):
        super().__init__(name, lesson, seconds)
        self.parts = parts

    @property
    def reference(self):
        """The reference of every part, by name."""
        found = {n: reference_answer(lesson, n) for n, lesson in self.parts.items()}
        return None if None in found.values() else found


# Which exercises there are ------------------------------------------------------------

ROOM = Path(__file__).parent.parent


@cache
def load_lesson(slug: str) -> None:
    """Register the exercises of a lesson, and the faults of each."""
    import_module(f"utils.exercises.{slug}")
    if has_reference(slug):  # a handout has recorded results instead
        import_module(f"utils.faults.{slug}")


@cache
def load_all() -> dict[str, "Exercise"]:
    """The exercises of every lesson, and the integration checks, by name."""
    for path in sorted((ROOM / "exercises").glob("[a-z]*.py")):
        load_lesson(path.stem)
    return Exercise.registry


def is_exercise(name) -> bool:
    """Is this the name of an exercise of the course?"""
    return name in Exercise.registry or syllabus.lesson_of(name) is not None


def find(name: str) -> Exercise | None:
    """The exercise or integration check called `name`."""
    lesson = syllabus.lesson_of(name)
    if lesson is not None:
        load_lesson(lesson.slug)
    if name not in Exercise.registry:
        load_all()
    return Exercise.registry.get(name)
