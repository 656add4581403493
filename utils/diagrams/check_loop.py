"""Lesson 00: an exercise's way from the first line to the next lesson."""

from utils.diagrams.drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        *(800, 214),
        "What happens to an exercise",
        "You write a function and run its check. If it is right, it is saved as your "
        "own, and the next lesson imports it. If it is not right yet, the check names "
        "the mistake and you write again. If it is not written yet, the reference "
        "takes its place, and you can read on.",
    )
    y, height = 84, 46
    write = d.box(30, y, 110, height, "write", "query", 15)
    check = d.box(252, y, 110, height, "check", "ink", 15)
    save = d.box(452, y, 120, height, "save", "value", 15)
    after = d.box(660, y, 112, height, "next lesson", "query", 15)

    d.arrow((write.right + 5, y + 23), (check.x - 5, y + 23), above="run both cells")
    d.arrow((check.right + 5, y + 23), (save.x - 5, y + 23), kind="value", width=2.5)
    d.text((check.right + save.x) / 2, y + 14, "✓ right", "value", 13, bold=True)
    d.arrow((save.right + 5, y + 23), (after.x - 5, y + 23), above="imports it")

    d.arrow(
        *((check.middle, y + height + 4), (check.middle, 172), (write.middle, 172)),
        (write.middle, y + height + 5),
        kind="alarm",
        width=2,
    )
    middle = (write.middle + check.middle) / 2
    d.text(middle, 164, "✗ not right yet", "alarm", 13, bold=True)
    d.text(middle, 190, "the mistake and its numbers", "plain", 12)

    d.arrow(
        *((check.middle, y - 4), (check.middle, 44), (after.middle, 44)),
        (after.middle, y - 5),
        kind="plain",
        width=2,
    )
    middle = (check.middle + after.middle) / 2
    d.text(middle, 36, "○ not written yet", "plain", 13, bold=True)
    d.text(middle, 62, "the reference stands in, you can read on", "plain", 12)

    d.text(
        save.middle, y + height + 18, "my_transformer/start.py", "plain", 11, code=True
    )
    d.text(save.middle, y + height + 35, "your own package", "plain", 12)
    d.text(after.middle, y + height + 18, "runs on your code", "plain", 12)
    return d
