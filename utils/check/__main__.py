"""`python -m utils.check FILE [NAME …]`: checks the answers in a Python file."""

import argparse
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from utils.check.engine import evaluate
from utils.check.exercise import is_exercise
from utils.check.wording import one_line
from utils.display import any_encoding
from utils.errors import CourseError


def load_file(path: Path) -> dict:
    """The names that a Python file defines."""
    spec = spec_from_file_location(path.stem, path)
    if spec is None or not path.is_file():
        raise CourseError(f"{path} is not a Python file that can be read.")
    module = module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # where classes look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CourseError(
            f"{path} cannot be imported: {type(error).__name__}: {one_line(error)}"
        ) from error
    return vars(module)


def main(arguments=None) -> int:
    any_encoding()
    parser = argparse.ArgumentParser(
        prog="python -m utils.check",
        description="Check answers in a Python file, such as my_transformer/start.py.",
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help="exercises; all in the file if none")
    options = parser.parse_args(arguments)
    try:
        defined = load_file(options.file)
        names = options.names or [n for n in defined if is_exercise(n)]
        if not names:
            raise CourseError(f"{options.file} defines no exercise of this course.")
        for name in names:
            if name not in defined:
                raise CourseError(f"{options.file} does not define `{name}`.")
        reports = [evaluate(defined[name], name) for name in names]
    except CourseError as error:
        print(error, file=sys.stderr)
        return 2
    for report in reports:
        print(report.message)
    return 0 if all(report.status == "passed" for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
