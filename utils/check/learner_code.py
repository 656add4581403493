"""Where in a learner's own code an error arose."""

import sys
import traceback
from pathlib import Path

import torch

from utils import syllabus

FRAMES = 3  # of a traceback

NOT_THEIRS = (
    str(syllabus.ROOT / "utils"),
    str(syllabus.ROOT / "solutions"),
    str(Path(torch.__file__).parent),
    sys.prefix,
    sys.base_prefix,
    "<frozen",
)


def own_frames(error) -> list[traceback.FrameSummary]:
    """The frames of an exception that lie in the learner's own code."""
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(NOT_THEIRS) and frame.line
    ]


def where(error) -> tuple[str, ...]:
    """The last few of these frames, a line each."""
    return tuple(
        f"line {frame.lineno}, in {frame.name}: `{frame.line}`"
        for frame in own_frames(error)[-FRAMES:]
    )
