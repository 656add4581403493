"""What an exercise asks for: its requirements, and the faults that it can name."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import ClassVar


@dataclass(frozen=True, eq=False)
class Requirement:
    """A sentence, and a check behind it: `test(answer, trial)` raises `Unmet`."""

    sentence: str
    test: Callable
    hint: str


@dataclass(frozen=True, eq=False)
class Fault:
    """A known mistake: a short name, a sentence for the learner, and its code."""

    name: str
    sentence: str
    implementation: object


class Task:
    """Requirements of one thing, tried in the order in which they are added.

    seconds: how long an answer may take over all requirements.
    """

    def __init__(self, name: str, lesson: str, seconds: float = 10.0):
        self.name, self.lesson, self.seconds = name, lesson, seconds
        self.requirements: list[Requirement] = []
        self.faults: list[Fault] = []

    def requires(self, sentence: str, hint: str = ""):
        """Decorates `test(answer, trial)`, the check behind `sentence`."""

        def add(test):
            self.requirements.append(Requirement(sentence, test, hint))
            return test

        return add

    def fault(self, name: str, sentence: str, implementation=None):
        """Adds a wrong answer under its name; decorates it if it is not given."""

        def add(implementation):
            self.faults.append(Fault(name, sentence, implementation))
            return implementation

        return add if implementation is None else add(implementation)


class Exercise(Task):
    """One answer: the function or class `name` of `solutions/<lesson>.py`."""

    registry: ClassVar[dict[str, "Exercise"]] = {}

    def __init__(self, name: str, lesson: str, seconds: float = 10.0):
        super().__init__(name, lesson, seconds)
        self.registry[name] = self

    @property
    def reference(self):
        """The course's own answer, or None in a copy without solutions."""
        return reference_part(self.lesson, self.name)


class Joint(Task):
    """Parts that must fit together: `test(parts, trial)` gets them by name.

    parts: the names of the answers that meet, the lesson of each before or at
    `lesson`. A fault's implementation is a dict that replaces some of them.
    """

    registry: ClassVar[dict[str, "Joint"]] = {}

    def __init__(
        self, name: str, lesson: str, parts: dict[str, str], seconds: float = 10.0
    ):
        super().__init__(name, lesson, seconds)
        self.parts = parts
        self.registry[name] = self

    @property
    def reference(self):
        """The reference of every part, by name."""
        found = {n: reference_part(lesson, n) for n, lesson in self.parts.items()}
        return None if None in found.values() else found


def reference_part(lesson: str, name: str):
    """`name` of `solutions/<lesson>.py`, or None where there are no solutions."""
    if not has_reference(lesson):
        return None
    return getattr(import_module(f"solutions.{lesson}"), name)


def has_reference(lesson: str) -> bool:
    """Does this copy of the course hold the reference answers of a lesson?"""
    try:
        return find_spec(f"solutions.{lesson}") is not None
    except ModuleNotFoundError:
        return False
