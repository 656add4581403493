"""Which lessons and exercises there are."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Lesson:
    """What a notebook says of itself in its metadata."""

    file: str  # "02_attention"
    title: str
    summary: str
    minutes: int
    exercises: dict[str, dict]  # in order: name → {"difficulty": 1 to 5, "minutes": …}

    @property
    def slug(self) -> str:
        """The file's name without its number: `attention`."""
        return self.file.partition("_")[2]

    @property
    def number(self) -> str:
        return self.file.partition("_")[0]


@cache
def lessons() -> tuple[Lesson, ...]:
    """Every lesson in `notebooks/`, in order; copies under other names are left out."""
    found = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if not re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem):
            continue
        try:
            about = json.loads(path.read_text(encoding="utf-8"))["metadata"]["course"]
            exercises = {each.pop("name"): each for each in about.pop("exercises")}
            found.append(Lesson(path.stem, exercises=exercises, **about))
        except (ValueError, KeyError, TypeError, AttributeError):
            print(
                f"notebooks/{path.name} is damaged, so its lesson is left out. Get it "
                "back with `git checkout`, or build it with `make build`."
            )
    return tuple(found)


def lesson_of(name: str) -> Lesson | None:
    """The lesson in which the exercise `name` is written."""
    return next((each for each in lessons() if name in each.exercises), None)
