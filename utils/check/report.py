"""What came of a check, as data; `rendering` turns it into text and HTML."""

from dataclasses import dataclass

from utils.check import rendering


@dataclass(frozen=True)
class Report:
    """What came of a check.

    status: "passed", "failed" or "todo" (not written, only in part, or skipped
        because this machine cannot run it).
    fault: the short name of the recognised mistake, or None.
    title: what the learner reads first.
    unmet: the requirement that is not met, as a sentence.
    problem: what went wrong with it, with numbers.
    frames: where in the learner's code, a line each.
    call: the call in words.
    explanation: what the mistake is, if it or the error that it raises is known.
    difference: how the result differs, where no known mistake fits.
    hint: on the requirement.
    printed: the last lines that the answer printed.
    verified: the sentences of the requirements that are met.
    n_requirements: how many there are.
    skipped: this machine cannot run the exercise.
    notes: what else the learner is told, such as where the answer was saved.
    """

    name: str
    status: str
    title: str
    fault: str | None = None
    unmet: str = ""
    problem: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    call: str = ""
    explanation: str = ""
    difference: str = ""
    hint: str = ""
    printed: tuple[str, ...] = ()
    verified: tuple[str, ...] = ()
    n_requirements: int = 0
    skipped: bool = False
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The text below the title."""
        return rendering.lines(self)

    @property
    def message(self) -> str:
        """The whole text that the learner reads."""
        return rendering.text(self)

    @property
    def html(self) -> str:
        return rendering.html(self)
