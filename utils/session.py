"""What a notebook's first cell starts: the right kernel, and which lesson this is."""

import os
import sys
from importlib.util import find_spec

from utils.errors import CourseError

NEEDED = ("torch", "matplotlib", "ipywidgets", "tqdm")

lesson: str | None = None  # the file's name without ending, "02_attention"
solved = False


def start(lesson_file: str, solved_notebook: bool = False) -> None:
    """Prepare the kernel for a lesson. The first cell of every notebook calls it.

    A solution notebook takes the reference for all earlier parts and saves nothing.
    """
    global lesson, solved
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise CourseError(
            f"This kernel ({sys.executable}) lacks {', '.join(missing)}. Choose the "
            "course's kernel (menu Kernel, Change Kernel), or install what is missing: "
            f"{sys.executable} -m pip install -r requirements.txt"
        )
    lesson, solved = lesson_file, solved_notebook
    if solved:
        os.environ["COURSE_PARTS"] = "reference"

    import torch

    from utils import error_hints, plots

    if "OMP_NUM_THREADS" not in os.environ:
        # The lessons' models are small. Threads that wait for each other slow them
        # down, by 20 times where other programs use the cores.
        torch.set_num_threads(1)
    plots.use_course_style()
    error_hints.explain_in_notebook()
