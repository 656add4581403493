"""`python -m utils.long_runs NAME`: runs an experiment; stopped, it goes on later."""

import argparse
import os
from importlib import import_module
from pathlib import Path

from utils import long_runs


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m utils.long_runs",
        description="Run an experiment that needs more than a minute. What is in its "
        "file already is not run again.",
    )
    parser.add_argument("name", nargs="?", choices=long_runs.names())
    parser.add_argument("--out", type=Path, help="a file; utils/recorded/NAME.json")
    parser.add_argument("--parts", choices=("mine", "reference"), default="reference")
    chosen = parser.parse_args(arguments)
    os.environ["COURSE_PARTS"] = chosen.parts
    if chosen.name is None:
        for name in long_runs.names():
            experiment = import_module(f"utils.long_runs.{name}")
            print(f"{name}: {experiment.ABOUT} About {experiment.MINUTES} minutes.")
        return 0
    out = chosen.out or long_runs.FOLDER / f"{chosen.name}.json"
    try:
        long_runs.run(chosen.name, out)
    except KeyboardInterrupt:
        print(f"\nStopped. What is measured stands in {out}; the same command goes on.")
        return 1
    except OSError as error:
        print(f"{out} cannot be written: {error.strerror}. Give another --out.")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
