"""How a result looks: plain text that never changes, and its HTML twin."""

import sys
from html import escape

COLOURS = {
    "passed": "#009E73",
    "failed": "#D55E00",
    "todo": "#0072B2",
    "qualified": "#E69F00",
}
MARKS = {"passed": "✓", "failed": "✗", "todo": "○", "qualified": "≈"}


def show(text: str, html: str, **more) -> None:
    """Display in a notebook, print elsewhere. `more`: other MIME types by name."""
    if in_notebook():
        from IPython.display import display

        display({"text/plain": text, "text/html": html, **more}, raw=True)
    else:
        print(text)


def any_encoding() -> None:
    """From now on print `?` for a character that the output's encoding lacks.

    Every command calls it first: redirected on Windows, output goes into a code page
    that has no “✓”.
    """
    if hasattr(sys.stdout, "reconfigure"):  # a test's or a kernel's stream has no need
        sys.stdout.reconfigure(errors="replace")


def in_notebook() -> bool:
    """True in a kernel, which can display; false in a plain Python or IPython."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")


def box(status: str, title: str, lines: list[str]) -> str:
    """HTML: a coloured bar at the left, a bold title, a paragraph a line."""
    body = "".join(f"<div>{code(line)}</div>" for line in lines)
    return (
        f'<div style="border-left: 4px solid {COLOURS[status]}; padding: 2px 10px">'
        f"<div><b>{MARKS[status]} {code(title)}</b></div>{body}</div>"
    )


def code(line: str) -> str:
    """Escape a line for HTML, with `…` set as code and indentation kept."""
    stripped = line.lstrip(" ")
    pieces = escape(stripped, quote=False).split("`")
    for i in range(1, len(pieces), 2):
        pieces[i] = f"<code>{pieces[i]}</code>"
    return "&nbsp;" * (len(line) - len(stripped)) + "".join(pieces)


def bar(done: int, total: int) -> str:
    return "●" * done + "○" * (total - done)
