"""Executes solution notebooks, strictly, and keeps their outputs."""

import json
import os
from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from utils.build.errors import BuildError
from utils.build.notebooks import code_cells
from utils.syllabus import ROOT

CELL_SECONDS = 300
WIDGET = "application/vnd.jupyter.widget-view+json"
SETTINGS = {
    "COURSE_BUILD": "1",
    "COURSE_STRICT": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}


def execute(nb, file: str, root: Path = ROOT):
    """Run a solution notebook in `solutions/`; it must neither fail nor warn."""
    before = {key: os.environ.get(key) for key in SETTINGS}
    os.environ.update(SETTINGS)
    try:
        NotebookClient(
            nb,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": str(root / "solutions")}},
        ).execute()
    except CellExecutionError as error:
        raise BuildError(f"solutions/{file}.ipynb fails:\n{error}") from error
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
    nb.metadata["language_info"] = {"name": "python"}
    nb.metadata.pop("widgets", None)
    for cell in code_cells(nb):
        cell.metadata.pop("execution", None)
        # A widget lives in its kernel, under a random id.
        cell.outputs = [o for o in cell.outputs if WIDGET not in o.get("data", {})]
    _refuse_private_output(nb, file, root)
    return nb


def _refuse_private_output(nb, file, root):
    for cell in code_cells(nb):
        for output in cell.outputs:
            if output.get("name") == "stderr":
                raise BuildError(
                    f"solutions/{file}.ipynb writes to stderr, in the cell\n"
                    f"{cell.source}\n{output['text']}"
                )
            text = json.dumps(output)
            for path in (str(root), str(Path.home()) + os.sep, "/tmp/"):
                if path in text:
                    raise BuildError(
                        f"solutions/{file}.ipynb prints a path of this machine "
                        f"({path}), in the cell\n{cell.source}"
                    )
