"""Prints the notebooks in which a learner has written something, one a line.

`python -m utils.attempted` needs nothing but Python. A lesson counts as begun when one of
its exercise cells no longer raises NotImplementedError.
"""

import json
import re

from utils import syllabus

UNWRITTEN = re.compile(r"^\s*raise NotImplementedError\b", re.MULTILINE)


def begun() -> list[str]:
    """The paths of those notebooks, from the course's folder."""
    found = []
    for lesson in syllabus.lessons():
        path = syllabus.ROOT / "notebooks" / f"{lesson.file}.ipynb"
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        exercises = [
            "".join(cell["source"])
            for cell in cells
            if "exercise" in cell["metadata"].get("tags", [])
        ]
        if any(not UNWRITTEN.search(source) for source in exercises):
            found.append(path.relative_to(syllabus.ROOT).as_posix())
    return found


if __name__ == "__main__":
    print("\n".join(begun()))
