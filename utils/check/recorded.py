"""What a copy without reference answers knows of them: results, and no code.

The errors of every reference, from which tolerances come, and what each known mistake
gave under the requirement that it fails.
"""

import json
from functools import cache
from pathlib import Path

import torch

from utils.check.recording import Raised

FOLDER = Path(__file__).parent.parent / "recorded" / "references"
ERRORS = "errors.json"


@cache
def _all_errors() -> dict:
    path = FOLDER / ERRORS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def recorded_errors(exercise) -> list[list[float]]:
    """How far the reference is from the truth, requirement by requirement."""
    return _all_errors().get(exercise.name, [])


@cache
def recorded_faults(lesson: str) -> dict:
    """By exercise: a list of faults, each with its results by requirement."""
    path = FOLDER / f"{lesson}.pt"
    if not path.is_file():
        return {}
    with torch.serialization.safe_globals([Raised]):
        return torch.load(path, weights_only=True)
