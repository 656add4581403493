"""The map of the course: every lesson, and how far the learner is."""

from utils import parts
from utils.display import bar, show
from utils.syllabus import ROOT, lessons

__all__ = ["ROOT", "course_map"]


def course_map() -> None:
    """Show every lesson with its exercises, what is done, and what comes next."""
    done = set() if parts.reference_wanted() else parts.saved_names()
    text, rows, following = [], [], None
    for each in lessons():
        required = each.required
        passed = [name for name in required if name in done]
        extras = len(done & (each.exercises.keys() - set(required)))
        more = f", {extras} extra" if extras else ""
        if following is None and len(passed) < len(required):
            following = each
        marks = bar(len(passed), len(required))
        text.append(
            f"{each.number}  {each.title:<44} {each.minutes:>3} min  "
            f"{marks} {len(passed)}/{len(required)}{more}"
        )
        rows.append(
            f"<tr><td>{each.number}</td>"
            f'<td style="text-align:left"><a href="{each.file}.ipynb">{each.title}</a>'
            f"<br><small>{each.summary}</small></td><td>{each.minutes} min</td>"
            f"<td>{marks} {len(passed)} of {len(required)}{more}</td></tr>"
        )
    if following is None:
        last = "Every exercise is solved. `my_transformer` is complete."
    else:
        left = [name for name in following.required if name not in done]
        last = f"Next: lesson {following.number}, {following.title}: {', '.join(left)}."
    show(
        "\n".join([*text, last]),
        '<table><tr><th></th><th style="text-align:left">lesson</th><th>time</th>'
        f"<th>your exercises</th></tr>{''.join(rows)}</table><p>{last}</p>",
    )
