"""The reference answers, one module a lesson, and the executed solution notebooks."""
