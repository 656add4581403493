"""Which lessons and exercises there are, and how far the learner is."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from utils.errors import CourseError

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


def course_map() -> None:
    """Show every lesson with its exercises, what is done, and what comes next."""
    from utils import parts
    from utils.report import bar, show

    if not lessons():
        raise CourseError(
            "There is no lesson in notebooks/. Get them back with `git checkout "
            "notebooks`, or build them with `make build`."
        )
    done = set() if parts.reference_wanted() else parts.saved_names()
    text, rows, following = [], [], None
    for each in lessons():
        passed = [name for name in each.exercises if name in done]
        if following is None and len(passed) < len(each.exercises):
            following = each
        marks = bar(len(passed), len(each.exercises))
        text.append(
            f"{each.number}  {each.title:<44} {each.minutes:>3} min  "
            f"{marks} {len(passed)}/{len(each.exercises)}"
        )
        rows.append(
            f"<tr><td>{each.number}</td>"
            f'<td style="text-align:left"><a href="{each.file}.ipynb">{each.title}</a>'
            f"<br><small>{each.summary}</small></td><td>{each.minutes} min</td>"
            f"<td>{marks} {len(passed)} of {len(each.exercises)}</td></tr>"
        )
    if following is None:
        last = "Every exercise is solved. `my_transformer` is complete."
    else:
        left = [name for name in following.exercises if name not in done]
        last = f"Next: lesson {following.number}, {following.title}: {', '.join(left)}."
    show(
        "\n".join([*text, last]),
        '<table><tr><th></th><th style="text-align:left">lesson</th><th>time</th>'
        f"<th>your exercises</th></tr>{''.join(rows)}</table><p>{last}</p>",
    )
