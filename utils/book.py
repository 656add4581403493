"""The course as a site to read: `python -m utils.book [FOLDER]`, or `make book`.

All executed lessons with their figures, answers folded, CLAIMS.md, and a search that
runs in the reader's browser. Nothing is executed, and no page asks another host.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from utils import syllabus
from utils.display import any_encoding
from utils.errors import CourseError

ROOT = syllabus.ROOT
SETTINGS = {
    "project": "Build a Transformer",
    "extensions": ["myst_nb"],
    "html_theme": "sphinx_book_theme",
    "html_title": "Build a Transformer",
    "html_static_path": ["static"],
    "html_css_files": ["book.css"],
    "html_copy_source": False,
    "html_show_sphinx": False,
    "html_theme_options": {
        "navbar_persistent": [],  # its search field asks for a key that few know
        "show_navbar_depth": 1,
        "use_download_button": False,
        "use_fullscreen_button": False,
    },
    "mathjax_path": "mathjax/MathJax.js?config=TeX-AMS-MML_HTMLorMML",
    "mathjax2_config": {"tex2jax": {"inlineMath": [["\\(", "\\)"]]}},
    "myst_enable_extensions": ["dollarmath"],
    "myst_heading_anchors": 3,
    "nb_execution_mode": "off",
    "nb_merge_streams": True,
    "suppress_warnings": ["mystnb.unknown_mime_type", "misc.highlighting_failure"],
}
STYLE = """\
/* Pictures follow the page's theme themselves; the theme would invert them. */
html[data-theme="light"] {color-scheme: light}
html[data-theme="dark"] {color-scheme: dark}
html[data-theme="dark"] .bd-content img[src$=".svg"] {filter: none; background: none}
.bd-content img {max-width: 100%}
"""


def lesson_page(text: str) -> dict:
    """An executed notebook without its set-up cell; answers and measures folded."""
    notebook = json.loads(text)
    kept = []
    for cell in notebook["cells"]:
        tags = cell["metadata"].get("tags", [])
        if "bootstrap" in tags:
            continue
        hidden = cell["metadata"].get("jupyter", {}).get("source_hidden")
        if "exercise" in tags or hidden:
            show = "Show the answer" if "exercise" in tags else "Show the code"
            cell["metadata"]["tags"] = [*tags, "hide-input"]
            hide = show.replace("Show", "Hide")
            prompts = {"code_prompt_show": show, "code_prompt_hide": hide}
            cell["metadata"]["mystnb"] = prompts
        kept.append(cell)
    return notebook | {"cells": kept}


def index_page(readme: str, lessons) -> str:
    """The book's first page: the README up to its installation, then all lessons."""
    start = readme.partition("\n## Start\n")[0]
    start = re.sub(r"(?s)\n\[The book\].*?\n\n", "\n", start, count=1)  # it is here
    start = re.sub(r"\]\(notebooks/(\w+)\.ipynb\)", r"](lessons/\1.ipynb)", start)
    listed = "\n".join(f"lessons/{each.file}" for each in lessons)
    return f"{start}\n\n```{{toctree}}\n:hidden:\n\n{listed}\nCLAIMS\n```\n"


def prepare(source: Path) -> None:
    """Write what Sphinx reads."""
    (source / "lessons").mkdir(parents=True)
    for each in syllabus.lessons():
        text = (ROOT / "solutions" / f"{each.file}.ipynb").read_text(encoding="utf-8")
        page = source / "lessons" / f"{each.file}.ipynb"
        page.write_text(json.dumps(lesson_page(text)), encoding="utf-8")
    for folder in ("diagrams", "docs/images"):
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, source / folder)
    claims = (ROOT / "CLAIMS.md").read_text(encoding="utf-8")
    claims = claims.replace("](solutions/", "](lessons/")
    (source / "CLAIMS.md").write_text(claims, encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    index = index_page(readme, syllabus.lessons())
    (source / "index.md").write_text(index, encoding="utf-8")
    static = source / "static"
    static.mkdir()
    (static / "book.css").write_text(STYLE, encoding="utf-8")
    _copy_mathjax(static / "mathjax")


def _copy_mathjax(target: Path) -> None:
    """MathJax as its package for Jupyter brings it, without what no page loads."""
    import jupyter_server_mathjax

    installed = Path(jupyter_server_mathjax.__file__).parent / "static"
    shutil.copytree(installed, target)


def build(out: Path) -> None:
    """Write the site into the folder `out`; warnings are errors."""
    try:
        from sphinx.application import Sphinx
        from sphinx.errors import SphinxError
        from sphinx.util.docutils import docutils_namespace
    except ImportError:
        raise CourseError(
            "The book needs Sphinx and its theme: "
            "python -m pip install -r requirements-dev.txt"
        ) from None
    with (
        tempfile.TemporaryDirectory() as folder,
        docutils_namespace(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of the theme: what Sphinx will drop
        source = Path(folder) / "source"
        prepare(source)
        try:
            app = Sphinx(
                *(source, None, out, Path(folder) / "doctrees", "html"),
                confoverrides=SETTINGS,
                status=None,
                warningiserror=True,
            )
            app.build()
        except (SphinxError, OSError) as error:
            raise CourseError(f"The book was not built: {error}") from None


def main(arguments=None) -> int:
    any_encoding()
    parser = argparse.ArgumentParser(
        prog="python -m utils.book",
        description="Write the course as a site to read, from its executed notebooks.",
    )
    default = ROOT / "build" / "book"
    parser.add_argument("folder", nargs="?", type=Path, default=default)
    chosen = parser.parse_args(arguments)
    try:
        build(chosen.folder)
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"The book is in {chosen.folder}: open index.html there.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
