"""The command `python -m utils.build`.

It writes what has changed and executes a solution notebook only when something that
it depends on has changed; `--check` writes nothing and exits with 1 if anything would
change.
"""

import argparse
import sys

from utils.build import BuildError, build
from utils.display import any_encoding


def main(arguments=None) -> int:
    any_encoding()
    parser = argparse.ArgumentParser(prog="python -m utils.build", description=__doc__)
    parser.add_argument("lessons", nargs="*", help="execute only these, 02_attention …")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1")
    parser.add_argument("--force", action="store_true", help="execute in any case")
    options = parser.parse_args(arguments)
    try:
        changed = build(options.check, options.lessons, options.force)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    for path in changed:
        print(f"{'out of date' if options.check else 'built'}: {path}")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
