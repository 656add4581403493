"""What a notebook's first cell starts: the right kernel, and which lesson this is."""

import linecache
import os
import symtable
import sys
import traceback
from importlib.util import find_spec

from utils.errors import CourseError, PartMissing

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

    from utils import plots

    if "OMP_NUM_THREADS" not in os.environ:
        # The lessons' models are small. Threads that wait for each other slow them
        # down, by 20 times where other programs use the cores.
        torch.set_num_threads(1)
    plots.use_course_style()
    _explain_what_is_missing()


def _explain_what_is_missing() -> None:
    """Errors that follow from an exercise cell not run, or a part not written.

    The NameError of a check before its exercise becomes a sentence. So does that of
    a name which a cell above would have bound, had a part not been missing.
    """
    from utils.report import in_notebook

    if not in_notebook():
        return
    from IPython import get_ipython

    from utils.course import lesson_of

    wanting: dict[str, str] = {}  # names that no cell bound, and the sentence why

    def explain(shell, error_type, error, trace, tb_offset=None):
        name = getattr(error, "name", None)
        if isinstance(error, PartMissing):
            sentence = str(error)
            wanting.update(dict.fromkeys(_bound_by_cell(trace), sentence))
        elif name and lesson_of(name) is not None:
            sentence = f"`{name}` is not defined yet: run its exercise cell first."
        elif name in wanting:
            sentence = f"`{name}` comes from a cell that stopped. {wanting[name]}"
            wanting.update(dict.fromkeys(_bound_by_cell(trace), wanting[name]))
        else:
            sentence = None
        lines = (
            [sentence]
            if sentence
            else shell.InteractiveTB.structured_traceback(
                error_type, error, trace, tb_offset=tb_offset
            )
        )
        shell._showtraceback(error_type, error, lines)
        return lines

    get_ipython().set_custom_exc((NameError, PartMissing), explain)


def _bound_by_cell(trace) -> list[str]:
    """The names that the cell in which an error arose binds at its top level."""
    for frame in traceback.extract_tb(trace):
        source = "".join(linecache.getlines(frame.filename))
        if frame.name.startswith("<") and source:
            try:
                table = symtable.symtable(source, "cell", "exec")
            except SyntaxError:  # a line for IPython
                return []
            return [s.get_name() for s in table.get_symbols() if s.is_assigned()]
    return []
