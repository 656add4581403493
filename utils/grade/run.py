"""Grades a folder of notebooks: which answers there are, and what each is worth."""

import ast
import json
import os
import queue
import tempfile
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from utils import syllabus
from utils.grade import rules
from utils.grade.namespace import Answer
from utils.grade.server import Client, Gone
from utils.grade.submissions import Submission, collect, defined, parse, runnable
from utils.imports import IMPORT, import_lines
from utils.progress import progress

PASSED, FAILED, TODO, MISSING, ERROR = "passed", "failed", "todo", "missing", "error"
UNGRADED = "ungraded"

# The grader's own reasons, which stand where a fault's name does.
REASONS = {
    "broke_the_check": "The check broke on it.",
    "forbidden": "It reaches for what no answer needs.",
    "grader": "The grader failed on it.",
    "no_verdict": "Its process ended before there was a verdict.",
    "not_defined": "Its cell does not define it, or stops before that.",
    "not_reproduced": "Without checks beside it, it gives other results.",
    "tampered": "It has changed the check, or torch.",
    "time_limit": "Its cell does not come to an end.",
    "unreadable": "The notebook cannot be read.",
}


@dataclass
class Result:
    """What came of one exercise of one learner.

    status: passed, failed, todo (not written), missing (no such cell), error (it
        could not be judged, which earns nothing either), or ungraded (the grader was
        stopped before).
    fault: the short name of the mistake, or one of `REASONS`.
    explanation: what the mistake is, or how the result differs.
    unmet: the requirement that is not met.
    blind: how many of its results were seen a second time, without the checks.
    """

    learner: str
    lesson: syllabus.Lesson
    exercise: str
    status: str = MISSING
    fault: str = ""
    title: str = ""
    lines: list[str] = field(default_factory=list)
    explanation: str = ""
    unmet: str = ""
    blind: int = 0
    graded: bool = False

    @property
    def possible(self) -> int:
        """What counts as all: an extra's points come on top."""
        return self._difficulty if self.exercise in self.lesson.required else 0

    @property
    def points(self) -> int:
        return self._difficulty if self.status == PASSED else 0

    @property
    def _difficulty(self) -> int:
        return self.lesson.exercises[self.exercise]["difficulty"]


@dataclass
class Grades:
    """All results, in the order of learners, lessons and exercises.

    unread: notebooks that could not be graded at all.
    unprotected: what this machine does not protect against, as sentences.
    stopped_by: what ended the grading before its time, if anything.
    """

    results: list[Result]
    submissions: list[Submission]
    unprotected: list[str]
    stopped_by: BaseException | None = None

    @property
    def unread(self) -> list[Submission]:
        return [each for each in self.submissions if each.problem]

    @property
    def n_ungraded(self) -> int:
        return sum(each.status == UNGRADED for each in self.results)

    @property
    def learners(self) -> list[str]:
        return sorted({each.learner for each in self.submissions})


def grade(folder: Path, only: list[str] = (), jobs: int | None = None) -> Grades:
    """Grade every notebook in `folder`, or only those of some lessons.

    Ctrl-C, or an error, ends it early: what is graded until then is returned.
    """
    submissions = collect(Path(folder), only)
    results, waiting = [], queue.SimpleQueue()
    for submission in submissions:
        for name in submission.lesson.exercises if submission.lesson else ():
            result = Result(submission.learner, submission.lesson, name)
            results.append(result)
            if submission.problem:
                _fail(result, ERROR, "unreadable", submission.problem)
            elif name not in submission.cells:
                _fail(result, MISSING, "", f"There is no cell for `{name}`.")
            else:
                waiting.put((result, submission.cells))
                continue
            result.graded = True
    n_waiting = waiting.qsize()
    jobs = max(1, min(jobs or os.cpu_count() or 1, 16, n_waiting))
    done = queue.SimpleQueue()
    calibration = Calibration()
    grades = Grades(results, submissions, [])
    with tempfile.TemporaryDirectory(
        prefix="grade-", ignore_cleanup_errors=True
    ) as place:
        graders = [Grader(waiting, done, calibration, place) for _ in range(jobs)]
        try:
            grades.unprotected = graders[0].unprotected() if n_waiting else []
            for each in graders:
                each.start()
            for _ in progress(n_waiting, "exercises"):
                _next(done).graded = True
        except (KeyboardInterrupt, Exception) as error:
            grades.stopped_by = error
        finally:
            for each in graders:
                each.stop()
    while not done.empty():
        done.get().graded = True
    grades.results = [each if each.graded else _ungraded(each) for each in results]
    return grades


def _next(done) -> Result:
    while True:
        try:
            return done.get(timeout=1)  # without a time, Windows waits through Ctrl-C
        except queue.Empty:
            continue


def _ungraded(result) -> Result:
    """In the place of a result that a stopped grader may still be writing into."""
    title = f"{result.exercise}: not graded"
    return Result(result.learner, result.lesson, result.exercise, UNGRADED, title=title)


def _fail(result, status, fault, *lines):
    result.status, result.fault, result.lines = status, fault, list(lines)
    result.explanation = REASONS.get(fault, "")
    words = {ERROR: "could not be judged", MISSING: "missing", FAILED: "not right yet"}
    result.title = f"{result.exercise}: {words[status]}"


class Grader(threading.Thread):
    """Takes exercises from a queue; has an engine and a blind process of its own."""

    def __init__(self, waiting, done, calibration, folder=None):
        super().__init__(daemon=True)
        self.waiting, self.done, self.calibration = waiting, done, calibration
        self.engine, self.blind = Client("engine", folder), Client("blind", folder)
        self.stopped = False

    def unprotected(self) -> list[str]:
        return self.blind.ask("missing")

    def stop(self):
        self.stopped = True
        self.engine.stop()
        self.blind.stop()

    def run(self):
        while not self.stopped:
            try:
                result, cells = self.waiting.get_nowait()
            except queue.Empty:
                break
            try:
                self.judge(result, cells)
            except Gone as reason:
                _fail(result, ERROR, "no_verdict", _sentence(str(reason)))
            except Exception as error:  # one submission must not stop the others
                _fail(result, ERROR, "grader", f"The grader failed: {error!r}"[:300])
            if self.stopped:
                break
            self.done.put(result)
        self.engine.close()
        self.blind.close()

    def judge(self, result, cells):
        answer = answer_of(result.lesson, result.exercise, cells)
        broken = [
            sentence
            for source in answer.cells
            for sentence in rules.broken(source, result.lesson)
        ]
        if broken:
            _fail(result, FAILED, "forbidden", *broken, FORBIDDEN)
            return
        about = self.engine.ask("examine", answer)
        if about["status"] == ERROR:
            _fail(result, ERROR, about["fault"], *map(_sentence, about["lines"]))
            return
        result.status, result.fault = about["status"], about["fault"]
        result.title, result.lines = about["title"], about["lines"]
        result.unmet = about["unmet"]
        result.explanation = REASONS.get(result.fault) or about["explanation"]
        if result.status == PASSED:
            self.look_blindly(result, answer)

    def look_blindly(self, result, answer):
        """An answer that has passed gives the same results where no check is."""
        script, calls, count = self.calibration.get(self, result)
        if not count:
            return
        ending = self.blind.ask("replay", answer, calls)
        if ending.sent is None:
            _fail(result, ERROR, "not_reproduced", NOT_SENT, _sentence(ending.reason))
            return
        unmet = self.engine.ask("unmet", answer.name, script, ending.sent)
        if unmet == []:
            result.blind = count
        else:
            lines = [f"Not met then: {unmet[0]}."] if unmet else []
            _fail(result, FAILED, "not_reproduced", *NOT_REPRODUCED, *lines)


class Calibration:
    """For each exercise the calls to repeat, with their results and without, and how
    many results the reference gives again in a blind process. Found once, by the first
    grader that needs it."""

    def __init__(self):
        self.known: dict[str, tuple[bytes, bytes, int]] = {}
        self.locks = defaultdict(threading.Lock)

    def get(self, grader, result) -> tuple[bytes, bytes, int]:
        name = result.exercise
        with self.locks[name]:
            if name not in self.known:
                script, calls = grader.engine.ask("script", name)
                reference = answer_of(result.lesson, name, solved(result.lesson))
                endings = [
                    grader.blind.ask("replay", reference, calls, seed)
                    for seed in (0, 1_000_000)
                ]
                runs = [ending.sent for ending in endings]
                count = 0
                if None not in runs:
                    script, count = grader.engine.ask("calibrate", script, runs)
                self.known[name] = (script, calls, count)
            return self.known[name]


FORBIDDEN = "No answer needs that. If this one does, grade it by hand."
NOT_SENT = "It passes, but called once more, apart from its check, it gives nothing."
NOT_REPRODUCED = [
    "It passes, but the results that it gives to the same calls in a process without "
    "checks and reference answers do not.",
    "Look at it by hand: does it read something that a graded answer must not see, or "
    "does it depend on the order of calls?",
]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


# What an answer is made of ------------------------------------------------------------


def answer_of(lesson, name: str, cells: dict[str, str]) -> Answer:
    """The exercise's cell, those of the lesson that it uses, and the instructor's part.

    Imports come from the instructor's notebook, parts of earlier lessons from the
    reference. The lesson's own exercises are the learner's, as in their notebook.
    """
    before = {}
    for each in syllabus.lessons():
        if each.file == lesson.file:
            break
        before.update(dict.fromkeys(each.exercises, each.slug))
    return Answer(
        name,
        [runnable(cells[n]) for n in _needed(lesson, name, cells)],
        lesson.imports,
        before,
        {slug: _module(slug) for slug in set(before.values())},
    )


def _needed(lesson, name, cells) -> list[str]:
    """The exercise itself, last, and the earlier ones whose names its cell uses."""
    order = [n for n in lesson.exercises if n in cells]
    order = order[: order.index(name)]
    wanted, waiting = set(), [name]
    while waiting:
        used = _used(cells[waiting.pop()])
        for other in order:
            if other not in wanted and used & {other, *_bound(cells[other])}:
                wanted.add(other)
                waiting.append(other)
    return [*(n for n in order if n in wanted), name]


def _used(source) -> set[str]:
    tree = parse(source)
    nodes = ast.walk(tree) if tree else ()
    return {n.id for n in nodes if isinstance(n, ast.Name)}


def _bound(source) -> set[str]:
    tree = parse(source)
    imports = [n for n in tree.body if isinstance(n, IMPORT)] if tree else []
    return {name for n in imports for name in import_lines(n)} | defined(source)


def solved(lesson) -> dict[str, str]:
    """The reference's exercise cells, from the solution notebook."""
    path = syllabus.ROOT / "solutions" / f"{lesson.file}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    by_id = {
        cell["metadata"].get("nbgrader", {}).get("grade_id"): cell for cell in cells
    }
    return {name: "".join(by_id[name]["source"]) for name in lesson.exercises}


@cache
def _module(slug: str) -> str:
    path = syllabus.ROOT / "solutions" / f"{slug}.py"
    return path.read_text(encoding="utf-8") if path.is_file() else ""
