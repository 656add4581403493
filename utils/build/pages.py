"""The pages that are made from all lessons: CLAIMS.md, the course map, the syllabus."""

import json
from itertools import groupby
from operator import itemgetter

import nbformat

from utils.build.errors import BuildError
from utils.build.notebooks import code_cells
from utils.claims import MIME as CLAIM

MAP_BEGIN, MAP_END = "<!-- course map -->", "<!-- end of course map -->"


def syllabus_json(sources) -> str:
    """`utils/syllabus.json`: what the course's tools know of the lessons."""
    lessons = [
        {
            "file": source.file,
            **{key: source.about[key] for key in ("title", "summary", "minutes")},
            "exercises": source.exercises,
            "imports": source.imports(),
        }
        for source in sources
    ]
    return json.dumps({"lessons": lessons}, indent=1, ensure_ascii=False) + "\n"


def claims_page(sources) -> str:
    """CLAIMS.md, from the outputs of the executed solution notebooks."""
    claims = []
    for source in sources:
        path = source.root / "solutions" / f"{source.file}.ipynb"
        if not path.is_file():
            continue
        for cell in code_cells(nbformat.read(path, as_version=4)):
            for output in cell.get("outputs", []):
                about = output.get("data", {}).get(CLAIM)
                if about:
                    claims.append((about["number"], source.file, about))
    order = sorted(claims, key=lambda row: (not row[0].startswith("S"), *row[:2]))
    by_number = groupby(order, itemgetter(0))
    return "\n".join(
        [
            "# What the lessons measured",
            "",
            "Statements that textbooks make (S…) and the lessons' own, each measured "
            "in the notebook named last, which fails if its measurement no longer "
            "supports the verdict: it holds, holds under a condition, does not hold, "
            "or is not decided by what a notebook can run in its minute. Collected "
            "from the executed solution notebooks by `make build`.",
            "",
            "| no | statement | source | measured | verdict | lesson |",
            "|---|---|---|---|---|---|",
            *(_row(number, list(group)) for number, group in by_number),
            "",
        ]
    )


def _row(number, group) -> str:
    """One statement; what several lessons measured of it stands below each other."""

    def column(texts):
        return "<br>".join(dict.fromkeys(text.replace("|", "\\|") for text in texts))

    keys = ("sentence", "source", "measured", "verdict")
    columns = [column(about[key] for *_, about in group) for key in keys]
    columns.append(column(f"[{file}](solutions/{file}.ipynb)" for _, file, _ in group))
    return f"| {number} | {' | '.join(columns)} |"


def _written(exercises) -> str:
    return ", ".join(
        f"`{name}`{' (extra)' * about.get('extra', False)}"
        for name, about in exercises.items()
    )


def with_course_map(readme: str, sources) -> str:
    """The README with the table of lessons between its two markers."""
    rows = [
        f"| [{each.file}](notebooks/{each.file}.ipynb) | {each.about['title']} | "
        f"{_written(each.exercises)} | {each.about['minutes']} |"
        for each in sources
    ]
    hours = round(sum(each.about["minutes"] for each in sources) / 60)
    heads = ["| | lesson | you write | minutes |", "|---|---|---|---|"]
    table = "\n".join([*heads, *rows, "", f"About {hours} hours in all."])
    before, found, rest = readme.partition(MAP_BEGIN)
    _, closed, after = rest.partition(MAP_END)
    if not found or not closed:
        raise BuildError(f"README.md lacks the lines {MAP_BEGIN} and {MAP_END}")
    return f"{before}{MAP_BEGIN}\n{table}\n{MAP_END}{after}"
