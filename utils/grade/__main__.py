"""`python -m utils.grade FOLDER`: a table of learners by exercises."""

import argparse
import sys
from pathlib import Path

from utils import syllabus
from utils.display import any_encoding
from utils.grade import tables
from utils.grade.run import grade


def main(arguments=None) -> int:
    any_encoding()
    parser = argparse.ArgumentParser(
        prog="python -m utils.grade",
        description="Grade a folder of learners' notebooks, loose or one folder each.",
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("grades"),
        help="where the tables and a page per learner go (grades)",
    )
    parser.add_argument(
        "--jobs", type=int, help="exercises at a time; as many as there are cores"
    )
    parser.add_argument(
        "--lesson",
        action="append",
        default=[],
        metavar="02_attention",
        help="only this lesson: its file, its name or its number; may be repeated",
    )
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        print(f"{options.folder} is not a folder.", file=sys.stderr)
        return 2
    known = {
        n for each in syllabus.lessons() for n in (each.file, each.slug, each.number)
    }
    for name in options.lesson:
        if name not in known:
            print(f"There is no lesson {name}.", file=sys.stderr)
            return 2
    out = options.out
    new = not out.exists()
    try:
        tables.try_folder(out)
    except OSError as error:
        print(f"{out} cannot be written: {error.strerror}.", file=sys.stderr)
        return 2
    grades = grade(options.folder, options.lesson, options.jobs)
    if not grades.submissions:
        if new:
            out.rmdir()
        print(f"{options.folder} holds no notebook to grade.", file=sys.stderr)
        return 2
    print(tables.as_text(grades), end="", flush=True)
    for sentence in grades.unprotected:
        print(f"Not protected on this machine: {sentence}.", file=sys.stderr)
    try:
        tables.write(grades, out)
    except OSError as error:
        print(
            f"Not everything could be written to {out}: {error.strerror}. What is "
            "printed above is complete.",
            file=sys.stderr,
        )
        return 1
    print(f"Written to {out}: grades.csv, grades.xml, index.html", end="")
    print(" and a page per learner.")
    return _ending(grades)


def _ending(grades) -> int:
    """The exit status; says why the grading ended early, if it did."""
    if grades.stopped_by is None:
        return 0
    interrupted = isinstance(grades.stopped_by, KeyboardInterrupt)
    reason = "Ctrl-C" if interrupted else repr(grades.stopped_by)
    print(f"Stopped early by {reason}: the tables are partial.", file=sys.stderr)
    return 130 if interrupted else 1


if __name__ == "__main__":
    sys.exit(main())
