"""Which notebooks are tests, and which tests share a worker of pytest-xdist."""

import pytest

from utils import syllabus

EXERCISES = "tests/test_exercises.py"


def pytest_ignore_collect(collection_path):
    """Copies of notebooks are no tests, unless they are asked for by name."""
    if collection_path.suffix != ".ipynb":
        return None
    files = {lesson.file for lesson in syllabus.lessons()}
    return True if collection_path.stem not in files else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Files stay together, and of the exercises, by far the most, each lesson."""
    from xdist.scheduler import LoadFileScheduling

    class ByLesson(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            if file != EXERCISES:
                return super()._split_scope(nodeid)
            name = test.partition("[")[2].rstrip("]").partition("-")[0]
            lesson = syllabus.lesson_of(name)
            return f"{file}::{lesson.slug if lesson else 'joints'}"

    if config.getvalue("dist") == "loadfile":
        return ByLesson(config, log)
    return None
