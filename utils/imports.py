"""Import statements as text, one line per name that they bind."""

import ast
import re

IMPORT = (ast.Import, ast.ImportFrom)


def import_lines(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """An import statement as one line for each name that it binds."""
    lines = {}
    for alias in node.names:
        bound = alias.asname or alias.name.split(".")[0]
        single = (
            ast.Import([alias])
            if isinstance(node, ast.Import)
            else ast.ImportFrom(node.module, [alias], node.level)
        )
        lines[bound] = ast.unparse(single)
    return lines


def lesson_imports(sources: list[str]) -> list[str]:
    """What a lesson's cells import, apart from the course's own tools.

    In a cell that holds nothing but imports and what decides on them (`try: import
    triton`), the deciding statements are kept, whole.
    """
    found = []
    for source in sources:
        body = ast.parse(re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", source)).body
        deciding = any(isinstance(node, IMPORT) for node in body) and all(
            isinstance(node, (*IMPORT, ast.If, ast.Try)) for node in body
        )
        for node in body:
            if isinstance(node, IMPORT):
                found += [] if _of_utils(node) else import_lines(node).values()
            elif deciding:
                found.append(ast.unparse(node))
    return list(dict.fromkeys(found))


def _of_utils(node) -> bool:
    module = getattr(node, "module", None) or node.names[0].name
    return module.split(".")[0] == "utils"
