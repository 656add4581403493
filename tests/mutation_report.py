"""`python -m tests.mutation_report [LESSON …]`: what learners are told of mutants.

For each lesson: how many mutants are equivalent, how many crash, and of the others how
many are named as a fault, described, or neither; the last are listed.
"""

import sys
from collections import Counter
from importlib import import_module

from tests.mutants import build, mutants
from utils import syllabus
from utils.check import evaluate, fault
from utils.check.exercise import load_lesson


def outcome(report) -> str:
    """What a report says of the mistake."""
    if report.status == "passed":
        return "equivalent"
    if report.fault:
        return "named"
    if report.frames and report.problem[0].startswith("Your code raised"):
        return "crashed"
    stopped = report.problem[0].startswith("It ran for more")
    if report.difference or stopped or not report.hint:
        return "described"  # by the difference, or by a problem that needs no hint
    return "neither"


def of_lesson(lesson) -> Counter:
    """How often each outcome occurs in the mutants of a lesson's references."""
    load_lesson(lesson.slug)
    module = import_module(f"solutions.{lesson.slug}")
    counts: Counter = Counter()
    for name in lesson.exercises:
        for mutant in mutants(fault.source_of(lesson.slug, name)):
            try:
                answer = build(mutant, module)
            except Exception:
                counts["crashed"] += 1
                continue
            said = outcome(evaluate(answer, name))
            counts[said] += 1
            if said == "neither":
                print(f"  {name}: {mutant.name}")
    return counts


def share(counts) -> str:
    told, silent = counts["named"] + counts["described"], counts["neither"]
    return f"{told} of {told + silent} named or described"


def main(slugs) -> None:
    total: Counter = Counter()
    for lesson in syllabus.lessons():
        if not slugs or lesson.slug in slugs:
            counts = of_lesson(lesson)
            total += counts
            print(f"{lesson.file}: {dict(counts)}, {share(counts)}", flush=True)
    print(f"all: {dict(total)}, {share(total)}")


if __name__ == "__main__":
    main(sys.argv[1:])
