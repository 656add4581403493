"""The learner's own parts: saved in `my_transformer/` when they pass, found later."""

from utils.parts.finding import (
    Missing,
    find,
    missing,
    reference_wanted,
    saved_names,
    whose,
)
from utils.parts.saving import save

__all__ = [
    "Missing",
    "find",
    "missing",
    "reference_wanted",
    "save",
    "saved_names",
    "whose",
]
