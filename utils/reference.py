"""The reference answers, where this copy of the course holds them."""

from importlib import import_module
from importlib.util import find_spec


def has_reference(slug: str) -> bool:
    """Does this copy hold the reference answers of a lesson?"""
    try:
        return find_spec(f"solutions.{slug}") is not None
    except ModuleNotFoundError:
        return False


def reference_answer(slug: str, name: str):
    """`name` of `solutions/<slug>.py`, or None where there are no solutions."""
    if not has_reference(slug):
        return None
    return getattr(import_module(f"solutions.{slug}"), name)
