"""Lesson 13: who tells the writer what, in 2014, 2015 and 2017."""

from utils.diagrams.drawing import Drawing

READS, WRITES = "3May", "-03"
BOX, PITCH = 40, 58
READER = [("reader", i) for i in range(len(READS))]
WRITER = [("writer", i) for i in range(len(WRITES))]


def links(year: int) -> dict[str, list]:
    """Who is told by whom, directly: pairs (from, to)."""
    chains = [(c[i], c[i + 1]) for c in (READER, WRITER) for i in range(len(c) - 1)]
    across = [(r, w) for r in READER for w in WRITER]
    among = [(a, b) for a in READER for b in READER if a != b]
    among += [(a, b) for a in WRITER for b in WRITER if a < b]
    found = {"chain": [], "bridge": [], "across": [], "among": []}
    if year < 2017:
        found["chain"], found["bridge"] = chains, [(READER[-1], WRITER[0])]
    if year > 2014:
        found["across"] = across
    if year == 2017:
        found["among"] = among
    return found


def steps(year: int) -> int:
    """The shortest way from the first box of the reader to the last of the writer."""
    pairs = [pair for some in links(year).values() for pair in some]
    reached, n = {READER[0]}, 0
    while WRITER[-1] not in reached:
        reached |= {b for a, b in pairs if a in reached}
        n += 1
    return n


def draw() -> Drawing:
    years = {
        2014: "all of it through one vector",
        2015: "look again at every state",
        2017: "no chains: attention alone",
    }
    n = {year: steps(year) for year in years}
    d = Drawing(
        *(830, 306),
        "Three ways to read and write, 2014 to 2017",
        "In 2014 one RNN reads, and its last state is the first state of the RNN "
        "that writes: from the first letter read to the last one written are "
        f"{n[2014]} steps. In 2015 the writer also looks at all the reader's states, "
        f"each time it writes: {n[2015]} step. In 2017 the chains are gone, and "
        f"attention is left: {n[2017]}.",
    )
    d.text(20, 109, "writer", "query", 12, "start")
    d.text(20, 221, "reader", "key", 12, "start")
    for i, (year, says) in enumerate(years.items()):
        left = 74 + 254 * i
        d.text(left, 36, year, size=14, at="start", bold=True)
        d.text(left + 46, 36, says, "plain", 12, "start")
        where = {r: (left + PITCH * r[1], 196) for r in READER}
        where |= {w: (left + PITCH * (w[1] + 0.5), 84) for w in WRITER}

        def middle(who, where=where):
            return where[who][0] + BOX / 2

        found = links(year)
        for a, b in found["chain"]:
            y = where[a][1] + BOX / 2
            d.arrow((where[a][0] + BOX + 2, y), (where[b][0] - 2, y))
        for a, b in found["bridge"]:
            alone = not found["across"]
            kind, width = ("alarm", 3) if alone else ("ink", 1.5)
            way = (middle(a), 194), (middle(a), 160), (middle(b), 160), (middle(b), 128)
            d.arrow(*way, kind=kind, width=width)
        for a, b in found["across"]:
            if b == WRITER[-1]:
                d.line((middle(a), 194), (middle(b), 126), kind="key")
        for a, b in found["among"]:
            if a < b:
                reads = a in READER
                y = 238 if reads else 82
                bend = 14 + 14 * (b[1] - a[1])
                d.curve(
                    middle(a), y, middle(b), y, -bend if reads else bend, head=False
                )
        for who, letter in zip(READER + WRITER, READS + WRITES, strict=True):
            reads = who in READER
            d.tensor(
                *(*where[who], 1, 1, "key" if reads else "query"),
                values=lambda r, c, letter=letter: letter,
                cell=BOX,
                followed=(0, 0, 1, 1) if who in (READER[0], WRITER[-1]) else None,
            )
        far = f"from “3” to “3”: {n[year]} step{'s' * (n[year] > 1)}"
        d.text(left, 290, far, size=12, at="start")
    return d
