"""Experiments that need more than a notebook's minute, and what they gave.

A module of this folder holds one experiment: `ABOUT` says what it compares, `MINUTES`
how long all of it takes on two cores, `SETTINGS` lists its runs, and `measure(setting)`
returns what one of them gave. `python -m utils.long_runs NAME` runs them and writes
`utils/recorded/NAME.json`, which notebooks read with `recorded`.
"""

import json
from datetime import date
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from platform import python_version

from utils.errors import CourseError

FOLDER = Path(__file__).resolve().parent.parent / "recorded"


def names() -> list[str]:
    """Every experiment."""
    modules = Path(__file__).parent.glob("[a-z]*.py")
    return sorted(path.stem for path in modules)


def recorded(name: str) -> dict:
    """What an experiment gave: {"about": …, "rows": [{"setting": …, …}]}.

    Raises `CourseError` if it has not been run, with the command that does.
    """
    try:
        return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CourseError(
            f"utils/recorded/{name}.json is missing or damaged "
            f"({type(error).__name__}). Take it from a fresh copy of the course, or "
            f"run it again: python -m utils.long_runs {name}"
        ) from error


def run(name: str, out: Path, say=print) -> None:
    """Measure every setting that the file `out` does not hold yet, and save each."""
    experiment = import_module(f"utils.long_runs.{name}")
    command = f"python -m utils.long_runs {name}"
    rows = json.loads(out.read_text("utf-8"))["rows"] if out.is_file() else []
    done = [row["setting"] for row in rows]
    for i, setting in enumerate(experiment.SETTINGS, start=1):
        if setting in done:
            continue
        rows.append({"setting": setting, **experiment.measure(**setting)})
        say(f"{i} of {len(experiment.SETTINGS)}: {setting}")
        about = {
            "what": experiment.ABOUT,
            "command": command,
            "date": date.today().isoformat(),
            "versions": {"python": python_version(), "torch": version("torch")},
        }
        _save(out, {"about": about, "rows": rows})


def _save(out: Path, result: dict) -> None:
    """Write beside the file and rename, so that a full disk costs no earlier row."""
    head = json.dumps(result["about"], indent=1, ensure_ascii=False)
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in result["rows"])
    beside = out.with_suffix(".part")
    beside.write_text(f'{{"about": {head},\n"rows": [\n{rows}\n]}}\n', encoding="utf-8")
    beside.replace(out)
