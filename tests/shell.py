"""Runs cells in one IPython without a front end; reads and writes JSON."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


def main():
    cells = json.load(sys.stdin)
    settings = Config()
    settings.HistoryManager.enabled = False  # its database may be locked
    shell = InteractiveShell.instance(colors="nocolor", config=settings)
    shown = []
    for source in cells:
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            shell.run_cell(source)
        shown.append(output.getvalue())
    json.dump(shown, sys.__stdout__)


main()
