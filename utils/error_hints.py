"""Explains errors that follow from an exercise cell not run, or a part not written."""

import linecache
import symtable
import traceback

from utils import syllabus
from utils.errors import PartMissing
from utils.reference import has_reference


def explain_in_notebook() -> None:
    """From now on, show such errors as a sentence instead of a traceback."""
    from utils.display import in_notebook

    if not in_notebook():
        return
    from IPython import get_ipython

    whole = has_reference(syllabus.lessons()[0].slug)
    # Without reference answers, a cell that stops may break any cell below it.
    errors = (NameError, PartMissing) if whole else (Exception,)
    explain = Explanations()
    get_ipython().set_custom_exc(errors, explain)


class Explanations:
    """IPython's handler of exceptions; remembers which names a stopped cell owes."""

    def __init__(self):
        self.owed: dict[str, str] = {}  # by name: the sentence of the missing part
        self.last = ""

    def __call__(self, shell, kind, error, trace, tb_offset=None):
        name = error.name if isinstance(error, NameError) else None
        if isinstance(error, PartMissing):
            self.last = str(error)
            self._owes(trace)
            lines = self.last.splitlines()
        elif syllabus.lesson_of(name) is not None:
            lines = [f"`{name}` is not defined yet: run its exercise cell first."]
        elif name in self.owed:
            self.last = self.owed[name]
            self._owes(trace)
            lines = [f"`{name}` comes from a cell that stopped:"]
            lines += self.last.splitlines()
        else:
            lines = self._as_ever(shell, kind, error, trace, tb_offset)
            if self.last:
                self._owes(trace)
                lines += ["", "This may follow from a cell that stopped:"]
                lines += self.last.splitlines()
        shell._showtraceback(kind, error, lines)
        return lines

    def _owes(self, trace):
        self.owed.update(dict.fromkeys(bound_by_cell(trace), self.last))

    @staticmethod
    def _as_ever(shell, kind, error, trace, tb_offset) -> list[str]:
        if hasattr(error, "_render_traceback_"):
            return list(error._render_traceback_())
        return list(
            shell.InteractiveTB.structured_traceback(
                kind, error, trace, tb_offset=tb_offset
            )
        )


def bound_by_cell(trace) -> list[str]:
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
