"""What came of a class: tables as text and CSV, JUnit XML, and a page a learner."""

import csv
import hashlib
import io
import os
import re
import unicodedata
from collections import Counter
from html import escape
from pathlib import Path
from xml.etree import ElementTree

from utils import syllabus
from utils.display import box, code
from utils.grade.run import (
    ERROR,
    FAILED,
    MISSING,
    PASSED,
    TODO,
    UNGRADED,
    Grades,
    Result,
)

WORDS = {
    PASSED: "✓",
    TODO: "not written",
    MISSING: "missing",
    UNGRADED: "not graded",
}
BOX = {PASSED: "passed", TODO: "todo", MISSING: "todo", UNGRADED: "todo"}


def word(result: Result) -> str:
    """A result in a table: ✓, the fault's name, or why there is none."""
    if result.status in WORDS:
        return WORDS[result.status]
    return result.fault or ("wrong" if result.status == FAILED else "error")


def _rows(grades: Grades):
    """For each learner and lesson, the results."""
    found: dict[tuple, list[Result]] = {}
    for result in grades.results:
        found.setdefault((result.learner, result.lesson.file), []).append(result)
    return found


def as_text(grades: Grades) -> str:
    """A table per lesson, learners by exercises, and the faults of the class."""
    pieces = partial(grades)
    rows = _rows(grades)
    for lesson in syllabus.lessons():
        table = [["", *map(lesson.marked, lesson.exercises), "points"]]
        for (learner, file), results in rows.items():
            if file == lesson.file:
                points = sum(r.points for r in results)
                possible = sum(r.possible for r in results)
                table.append([learner, *map(word, results), f"{points}/{possible}"])
        if len(table) > 1:
            pieces.append(f"{lesson.file}\n{_aligned(table)}")
    for each in grades.unread:
        pieces.append(f"{each.learner}: {_shown(each.path.name)}: {each.problem}.")
    pieces.append(faults_as_text(grades))
    return "\n\n".join(piece for piece in pieces if piece) + "\n"


def partial(grades: Grades) -> list[str]:
    """A sentence, if not everything is graded."""
    total, left = len(grades.results), grades.n_ungraded
    if not left:
        return []
    return [f"Partial: {total - left} of {total} exercises are graded."]


def _aligned(table) -> str:
    widths = [max(map(_width, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell + " " * (width - _width(cell))
            for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in table
    )


def _width(text) -> int:
    """Columns of a terminal that a text takes."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(bool(unicodedata.combining(c)) for c in text)


def _shown(name: str) -> str:
    name = name.encode("utf-8", "replace").decode("utf-8")
    return "".join(c if c.isprintable() else "?" for c in name)


# The class ----------------------------------------------------------------------------


def faults(grades: Grades) -> list[tuple[str, str, int, str]]:
    """Exercise, fault, how many learners made it, and what the fault is.

    Failures without a name are counted by the requirement that is not met.
    """
    counts = Counter(
        (result.exercise, word(result), _sentence(result))
        for result in grades.results
        if result.status in (FAILED, ERROR)
    )
    found = [(*key[:2], n, key[2]) for key, n in counts.items()]
    return sorted(found, key=lambda row: (-row[2], row))


def _sentence(result: Result) -> str:
    if result.fault:
        return result.explanation
    if result.unmet:
        return f"Not met: {result.unmet}."
    return (result.lines or [""])[0]


def faults_as_text(grades: Grades) -> str:
    found = faults(grades)
    if not found:
        return ""
    table = [[f"{n} ×", exercise, fault, text] for exercise, fault, n, text in found]
    return "What went wrong how often\n" + _aligned(table)


# For other programs -------------------------------------------------------------------


def as_csv(grades: Grades) -> str:
    """One line per learner and exercise."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            *("learner", "lesson", "exercise", "status", "fault"),
            *("points", "possible", "results_seen_twice"),
        ]
    )
    for r in grades.results:
        writer.writerow(
            [
                _no_formula(r.learner),
                r.lesson.file,
                r.exercise,
                r.status,
                r.fault,
                r.points,
                r.possible,
                r.blind,
            ]
        )
    return out.getvalue()


def _no_formula(text: str) -> str:
    """A name that a spreadsheet does not compute."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def as_junit(grades: Grades) -> str:
    """A suite per learner and lesson, a case per exercise."""
    top = ElementTree.Element("testsuites")
    for (learner, file), results in _rows(grades).items():
        suite = ElementTree.SubElement(
            top,
            "testsuite",
            name=_for_xml(f"{learner}: {file}"),
            tests=str(len(results)),
            failures=str(sum(r.status in (FAILED, TODO, MISSING) for r in results)),
            errors=str(sum(r.status == ERROR for r in results)),
            skipped=str(sum(r.status == UNGRADED for r in results)),
        )
        for r in results:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=_for_xml(f"{learner}.{file}"),
                name=r.exercise,
            )
            if r.status != PASSED:
                kind = {ERROR: "error", UNGRADED: "skipped"}.get(r.status, "failure")
                about = ElementTree.SubElement(case, kind, message=word(r))
                about.text = _for_xml("\n".join([r.title, *r.lines]))
    ElementTree.indent(top)
    return ElementTree.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def _for_xml(text: str) -> str:
    return re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


# A page per learner -------------------------------------------------------------------

STYLE = (
    "body { font-family: sans-serif; max-width: 60em; margin: 2em auto } "
    "table { border-collapse: collapse } "
    "td, th { padding: 2px 10px; text-align: left; vertical-align: top } "
    ".report { margin: 0.8em 0 }"
)


def page_name(learner: str) -> str:
    """A file name that no learner's name can lead elsewhere."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", learner).strip("-")[:40]
    mark = hashlib.sha256(learner.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{plain or 'learner'}-{mark}.html"


def learner_page(grades: Grades, learner: str) -> str:
    """The feedback on every exercise, as the notebook would have shown it."""
    body = []
    for (who, _), results in _rows(grades).items():
        if who != learner:
            continue
        points, possible = (
            sum(r.points for r in results),
            sum(r.possible for r in results),
        )
        lesson = results[0].lesson
        body.append(f"<h2>{code(f'{lesson.number} {lesson.title}')}</h2>")
        body.append(f"<p>{points} of {possible} points</p>")
        for r in results:
            box_ = box(BOX.get(r.status, "failed"), r.title, r.lines)
            body.append(f'<div class="report">{box_}</div>')
    for each in grades.submissions:
        if each.learner == learner:
            notes = [*([f"{each.problem}."] if each.problem else []), *each.notes]
            for note in notes:
                body.append(f"<p>{escape(_shown(each.path.name))}: {code(note)}</p>")
    return _page(learner, "".join(body))


def class_page(grades: Grades) -> str:
    """All learners, with links to their pages, and the faults of the class."""
    rows = _rows(grades)
    body = [f"<p>{escape(sentence)}</p>" for sentence in partial(grades)]
    for lesson in syllabus.lessons():
        lines = []
        for (learner, file), results in rows.items():
            if file == lesson.file:
                cells = "".join(f"<td>{escape(word(r))}</td>" for r in results)
                points = sum(r.points for r in results)
                link = f'<a href="{page_name(learner)}">{escape(learner)}</a>'
                lines.append(f"<tr><td>{link}</td>{cells}<td>{points}</td></tr>")
        if lines:
            head = "".join(
                f"<th>{lesson.marked(name)}</th>" for name in lesson.exercises
            )
            body.append(
                f"<h2>{lesson.number} {escape(lesson.title)}</h2><table><tr><th></th>"
                f"{head}<th>points</th></tr>{''.join(lines)}</table>"
            )
    for each in grades.unread:
        body.append(
            f"<p>{escape(each.learner)}: {escape(_shown(each.path.name))}: "
            f"{escape(each.problem)}.</p>"
        )
    found = faults(grades)
    if found:
        lines = "".join(
            f"<tr><td>{n}</td><td>{e}</td><td>{escape(f)}</td><td>{code(text)}</td></tr>"
            for e, f, n, text in found
        )
        body.append(f"<h2>What went wrong how often</h2><table>{lines}</table>")
    return _page("The class", "".join(body))


def _page(title, body) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}'
        f"</title><style>{STYLE}</style><h1>{escape(title)}</h1>{body}</html>\n"
    )


# The files ----------------------------------------------------------------------------


def try_folder(out: Path) -> None:
    """Make the folder, and see that it can be written: an `OSError` says why not."""
    out.mkdir(parents=True, exist_ok=True)
    probe = out / ".probe"
    try:
        probe.write_bytes(b"probe")
    finally:
        probe.unlink(missing_ok=True)


def write(grades: Grades, out: Path) -> None:
    """All of it into one folder; a file is replaced when it is whole."""
    out.mkdir(parents=True, exist_ok=True)
    files = {
        "grades.txt": as_text(grades),
        "grades.csv": as_csv(grades),
        "grades.xml": as_junit(grades),
        "index.html": class_page(grades),
        **{page_name(each): learner_page(grades, each) for each in grades.learners},
    }
    unfinished = out / ".unfinished"
    try:
        for name, text in files.items():
            unfinished.write_bytes(text.encode("utf-8", "replace"))
            os.replace(unfinished, out / name)
    finally:
        unfinished.unlink(missing_ok=True)
