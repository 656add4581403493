"""States what a notebook has measured, and fails when it is no longer true."""

from dataclasses import dataclass

from utils import session
from utils.display import box, show
from utils.errors import CourseError

MIME = "application/vnd.course.claim+json"


@dataclass(frozen=True)
class Verdict:
    """What a measurement says of a statement, and whether it still says so."""

    text: str
    supported: bool


def holds(supported) -> Verdict:
    """The statement holds: `supported` is the comparison that shows it."""
    return Verdict("holds", bool(supported))


def holds_if(condition: str, supported) -> Verdict:
    """The statement holds under a condition, which is said in words."""
    return Verdict(f"holds if {condition}", bool(supported))


def does_not_hold(instead: str, supported) -> Verdict:
    """The statement does not hold; `instead` says what does."""
    return Verdict(f"does not hold: {instead}", bool(supported))


def not_decided(what_would_decide: str, supported=True) -> Verdict:
    """A minute's run does not tell; `what_would_decide` says what would."""
    return Verdict(f"not decided here: {what_would_decide}", bool(supported))


class ClaimError(CourseError):
    """A measurement no longer supports what the lesson says."""


def claim(
    number: str, sentence: str, *, measured: str, verdict: Verdict, source: str
) -> None:
    """Show a statement with its measurement and verdict.

    number: as in CLAIMS.md, such as "S17", or "02.1" for a lesson's own.
    measured: the value in words, with units, such as "0.98 against 0.41 correct".
    verdict: from `holds`, `holds_if`, `does_not_hold` or `not_decided`.
    source: where the statement stands, so that it can be looked up (author, year,
        page), or "this lesson".

    Raises `ClaimError` when the measurement does not support the verdict.
    """
    if not isinstance(verdict, Verdict):
        raise TypeError(
            "a verdict comes from holds(…), holds_if(…), does_not_hold(…) or "
            "not_decided(…), with the comparison that supports it"
        )
    if not verdict.supported:
        raise ClaimError(
            f"{number}, “{sentence}”: the verdict “{verdict.text}” is not supported by "
            f"what was measured here: {measured}."
        )
    about = {"lesson": session.lesson or "", "number": number, "sentence": sentence}
    about |= {"measured": measured, "verdict": verdict.text, "source": source}
    lines = [
        f"Measured: {measured}.",
        f"Verdict: {verdict.text}.",
        f"Source: {source}.",
    ]
    title = f"{number}: {sentence}"
    show(
        "\n".join([title, *(f"  {line}" for line in lines)]),
        box("passed" if verdict.text == "holds" else "qualified", title, lines),
        **{MIME: about},
    )
