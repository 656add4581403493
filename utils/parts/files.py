"""The files of `my_transformer/`: plain Python, one module per lesson.

Imports come first, then one block per part, each behind a `# part: name` line.
"""

import ast
import os
import re
import time
from contextlib import contextmanager
from importlib.util import decode_source
from pathlib import Path

from utils import syllabus
from utils.imports import IMPORT, import_lines

FOLDER = syllabus.ROOT / "my_transformer"
PART = re.compile(r"^# part: (\w+)\n", re.MULTILINE)
WAIT_SECONDS = 60  # for another notebook that is saving


class Unusable(Exception):
    """Why a file of saved parts cannot be used, to follow its name in a sentence."""


def path_of(lesson: syllabus.Lesson) -> Path:
    return FOLDER / f"{lesson.slug}.py"


def text_of(path: Path) -> str:
    """The text of a file that is valid Python; "" if there is none."""
    try:
        text = decode_source(path.read_bytes())
    except FileNotFoundError:
        return ""
    except (SyntaxError, UnicodeDecodeError) as error:
        raise Unusable("is not saved as UTF-8, an editor may have done that") from error
    try:
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise Unusable(f"is no valid Python any more ({error})") from error
    return text


def part_names(path: Path) -> set[str]:
    """The names of the parts in a file, without running it."""
    return set(PART.findall(text_of(path)))


def read(lesson: syllabus.Lesson) -> tuple[dict[str, str], dict[str, str]]:
    """A lesson's saved file: import lines by the name they bind, blocks by part."""
    head, *pieces = PART.split(text_of(path_of(lesson)))
    imports = {}
    for node in ast.parse(head).body:
        if isinstance(node, IMPORT):
            imports.update(import_lines(node))
        elif ast.unparse(node) not in lesson.imports and not _is_docstring(node):
            raise Unusable(
                "holds lines above its first part that the course did not write (line "
                f"{node.lineno}): move them into a part or delete them"
            )
    blocks = zip(pieces[::2], pieces[1::2], strict=True)
    return imports, {name: block.strip("\n") for name, block in blocks}


def _is_docstring(node) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def write(lesson: syllabus.Lesson, text: str) -> None:
    """Replace a lesson's file at once, so that nobody reads half of it."""
    path = path_of(lesson)
    temporary = path.with_suffix(".py.new")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def one_at_a_time():
    """Only one process at a time is between reading and writing a file.

    The lock is on the package's own `__init__.py` and ends with its process.
    """
    with open(FOLDER / "__init__.py", "rb+") as file:
        _lock(file)
        yield


def _lock(file) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not _try_to_lock(file):
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.05)


def _try_to_lock(file) -> bool:
    """False if another process holds the lock. Closing the file lets go of it."""
    if os.name == "nt":
        import msvcrt

        file.seek(1 << 30)  # behind its end, since what is locked cannot be read
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have no locks
        return True
    return True
