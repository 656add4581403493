"""Which lessons and exercises there are, as `utils.build` found them in `lessons/`.

Notebooks are not asked: learners edit, copy, rename and delete them.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from utils.errors import CourseError

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "utils" / "syllabus.json"


@dataclass(frozen=True)
class Lesson:
    """One lesson, as its source describes it.

    exercises: by name, in order, {"difficulty": 1 to 5, "minutes": …}, and
        "extra": True for those that nothing later needs.
    imports: what its cells import, without the course's tools: a line per name, and
        whole statements where `try` or `if` decides on an import.
    """

    file: str  # "02_attention"
    title: str
    summary: str
    minutes: int
    exercises: dict[str, dict]
    imports: list[str]

    @property
    def slug(self) -> str:
        """The file's name without its number: `attention`."""
        return self.file.partition("_")[2]

    @property
    def number(self) -> str:
        return self.file.partition("_")[0]

    @property
    def required(self) -> list[str]:
        """The exercises that are no extras."""
        return [n for n, about in self.exercises.items() if not about.get("extra")]

    def marked(self, name: str) -> str:
        """The exercise's name, and whether it is an extra."""
        return name if name in self.required else f"{name} (extra)"

    @property
    def notebook(self) -> Path:
        """Where the learner's notebook lies, unless they have moved it."""
        return ROOT / "notebooks" / f"{self.file}.ipynb"


@cache
def lessons() -> tuple[Lesson, ...]:
    """Every lesson, in order."""
    try:
        listed = json.loads(FILE.read_text(encoding="utf-8"))["lessons"]
        return tuple(Lesson(**each) for each in listed)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CourseError(
            f"{FILE} is missing or damaged ({type(error).__name__}). Take that file "
            "from a fresh copy of the course."
        ) from error


def lesson_of(name: str) -> Lesson | None:
    """The lesson in which the exercise `name` is written."""
    return next((each for each in lessons() if name in each.exercises), None)


def notebook_cells(lesson: Lesson) -> list[dict]:
    """The cells of the learner's notebook; `CourseError` says how to get it back."""
    place = f"notebooks/{lesson.file}.ipynb"
    again = f"take {place} from a fresh copy of the course."
    try:
        cells = json.loads(lesson.notebook.read_text(encoding="utf-8"))["cells"]
        for cell in cells:
            "".join(cell["source"])
            dict(cell["metadata"])
        return cells
    except FileNotFoundError:
        raise CourseError(
            f"{place} is not there. If you did not move it, {again}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CourseError(
            f"{place} cannot be read ({type(error).__name__}). Give it another name, "
            f"so that what you wrote in it is kept; then {again}"
        ) from error
