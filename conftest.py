"""Which tests share a worker, with `--dist loadgroup`."""

import pytest

from utils import course


def pytest_collection_modifyitems(config, items):
    """A file's tests stay together; those of the exercises go by lesson."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        group = item.nodeid.partition("::")[0]
        if group == "tests/test_exercises.py":
            lesson = course.lesson_of(item.callspec.params["name"])
            group = lesson.slug if lesson else "joints"
        item.add_marker(pytest.mark.xdist_group(group))
