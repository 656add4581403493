"""Prints the notebooks in which a learner has attempted an exercise, one per line.

`python -m utils.attempted` needs nothing but Python. An exercise counts as attempted
when its cell no longer raises NotImplementedError.
"""

import re
import sys

from utils import syllabus
from utils.display import any_encoding
from utils.errors import CourseError

UNWRITTEN = re.compile(r"^\s*raise NotImplementedError\b", re.MULTILINE)


def attempted() -> list[str]:
    """The paths of those notebooks, from the course's folder.

    Of a notebook that is missing or damaged it says so, on standard error.
    """
    found = []
    for lesson in syllabus.lessons():
        try:
            cells = syllabus.notebook_cells(lesson)
        except CourseError as problem:
            print(problem, file=sys.stderr)
            continue
        exercises = [
            "".join(cell["source"])
            for cell in cells
            if "exercise" in cell["metadata"].get("tags", [])
        ]
        if any(not UNWRITTEN.search(source) for source in exercises):
            found.append(lesson.notebook.relative_to(syllabus.ROOT).as_posix())
    return found


if __name__ == "__main__":
    any_encoding()
    print("\n".join(attempted()))
