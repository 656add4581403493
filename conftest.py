"""Which tests share a worker of pytest-xdist, with `--dist loadfile`."""

import pytest

from utils import syllabus

EXERCISES = "tests/test_exercises.py"


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
