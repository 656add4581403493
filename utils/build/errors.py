"""What the builder refuses."""

from utils.errors import CourseError


class BuildError(CourseError):
    """A source breaks a rule; each line names the file, the line and the rule."""
