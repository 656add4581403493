"""A report as the learner reads it: plain text that never changes, and HTML."""

from utils.check.wording import sentence
from utils.display import MARKS, box


def lines(report) -> list[str]:
    """Everything below the title, a line each."""
    shown = []
    if report.unmet:
        shown.append(f"Not met: {report.unmet}.")
    shown += [sentence(line) for line in report.problem]
    shown += [f"  {frame}" for frame in report.frames]
    if report.call:
        shown.append(f"The call was `{report.call}`.")
    if report.explanation:
        shown.append(f"What happened: {report.explanation}")
    if report.difference:
        shown.append(f"What differs: {report.difference}")
    if report.hint:
        shown.append(f"Hint: {report.hint}")
    if report.printed:
        shown.append("The last lines that your code printed:")
        shown += [f"  {line}" for line in report.printed]
    if report.status == "passed":
        shown += [f"  ✓ {each}" for each in report.verified]
    elif report.verified:
        n_met = len(report.verified)
        shown.append(f"Already right: {n_met} of {report.n_requirements} requirements.")
    return [*shown, *report.notes]


def text(report) -> str:
    return "\n".join([f"{MARKS[report.status]} {report.title}", *lines(report)])


def html(report) -> str:
    return box(report.status, report.title, lines(report))
