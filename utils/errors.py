"""Errors that a notebook shows as one sentence instead of a traceback."""


class CourseError(Exception):
    """Something that the reader can put right; the message names the remedy."""

    def _render_traceback_(self):
        """IPython shows these lines in place of a traceback."""
        return str(self).splitlines()


class PartMissing(CourseError, NotImplementedError):
    """A part is used that nobody has written, in a copy without reference answers."""


class CheckFailed(CourseError):
    """An answer is wrong or not written, in a mode where that must not pass."""
