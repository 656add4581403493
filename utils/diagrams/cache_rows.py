"""Lesson 10: every row again in each pass, against one new row."""

from utils.diagrams.drawing import Drawing

WORDS = ["The", "lamp", "went", "out", "and", "nobody", "woke"]
PROMPT = 4  # words that are given; the others are written, one a pass
PASSES = range(PROMPT, len(WORDS) + 1)  # the length of the text in each pass
KINDS = ("query", "key", "value")


def rows_read(prompt: int, new: int) -> tuple[int, int]:
    """Rows computed to write `new` tokens: whole text again, and through the cache."""
    return sum(prompt + i for i in range(new)), prompt + new - 1


def draw() -> Drawing:
    again, cached = rows_read(PROMPT, len(PASSES))
    again_40, cached_40 = rows_read(5, 40)
    d = Drawing(
        *(830, 306),
        "Reading the whole text again, or one row",
        f"{len(PASSES)} tokens are written behind a prompt of {PROMPT} words. Given "
        f"the whole text each time, the model computes {again} rows of queries, keys "
        f"and values. With the keys and values in a cache it computes {cached}: the "
        "prompt once, then one row a pass, whose query meets the kept keys.",
    )
    for left, name, kept in (
        (78, "the whole text again", False),
        (488, "through the cache", True),
    ):
        d.text(left, 34, name, size=14, at="start", bold=True)
        for i, length in enumerate(PASSES):
            x = left + 82 * i
            old = length - 1 if kept and i else 0  # rows that come from the cache
            for c, kind in enumerate(KINDS):
                at = x + 20 * c
                if old and kind != "query":
                    d.tensor(at, 70, old, 1, kind)
                d.mask(at, 70 + 20 * old, [[True]] * (length - old), kind=kind)
                d.text(at + 10, 63, kind[0], kind, 12, bold=True)
            if i:
                end = 70 + 20 * (length - 1)
                d.tensor(x, end, 1, 3, "ink", followed=(0, 0, 1, 3), ground=False)
                d.text(x - 6, end + 14, WORDS[length - 1], "plain", 12, "end")
            d.text(x + 30, 234, f"reads {length - old}", size=12)
        for r, word in enumerate(WORDS[:PROMPT]):
            d.text(left - 6, 84 + 20 * r, word, "plain", 12, "end")
        rows, many = (cached, cached_40) if kept else (again, again_40)
        d.text(left, 266, f"{rows} rows, to write {len(PASSES)} tokens", at="start")
        d.text(left, 286, f"behind 5, to write 40: {many}", "plain", 12, "start")
    d.text(804, 266, "pale: kept from before", "plain", 12, "end")
    return d
