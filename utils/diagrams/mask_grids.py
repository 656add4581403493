"""Lesson 02: causal, rectangular, padding and combined masks as grids."""

from utils.diagrams.drawing import Drawing

T, T_Q, T_K, REAL = 4, 2, 5, 2
CELL, TOP = 28, 92


def causal(query, key):
    return key <= query


def real(key):
    return key < REAL


def draw() -> Drawing:
    d = Drawing(
        *(812, 300),
        "Four masks as grids",
        "Rows are queries and columns are keys; a filled cell may be looked at, a "
        f"hatched one is hidden. Causal: {T} queries see themselves and what is "
        f"before. With {T_Q} queries and {T_K} keys the queries are the last ones. "
        f"Padding: of {T} keys {REAL} are real, for every query. Both together: a key "
        "must be allowed by both.",
    )

    def mask(x, y, rows, cols, may_look, name="", first=0, heads=True, **rest):
        return d.tensor(
            *(x, y, rows, cols, "query", name),
            strength=lambda r, c: 0.55 if may_look(r + first, c) else 0,
            hidden=lambda r, c: not may_look(r + first, c),
            heads=map(str, range(cols * heads)),
            cell=CELL,
            **rest,
        )

    square, bottom = TOP + T * CELL / 2, TOP + T * CELL
    x, earlier = 58, T_K - T_Q
    area = d.tensor(
        *(x, bottom - T_K * CELL, earlier, T_K, "plain"),
        heads=map(str, range(T_K)),
        cell=CELL,
    )
    name = f"causal_mask({T_Q}, {T_K})"
    d.text(area.middle, area.y - 22, name, "query", 14, bold=True)
    mask(
        *(x, bottom - T_Q * CELL, T_Q, T_K, causal),
        first=earlier,
        heads=False,
        labels=map(str, range(earlier, T_K)),
        shape="(T_q, T_k)",
        purpose="the queries are\nthe last positions",
    )
    rows = [str(row) for row in range(T)]
    area = mask(
        *(284, TOP, T, T, causal, f"causal_mask({T})"),
        labels=rows,
        shape="(T, T)",
        purpose="nobody\nlooks ahead",
    )
    d.operator(area.right + 32, square, "&")
    area = mask(
        *(460, square - CELL / 2, 1, T, lambda query, key: real(key)),
        name="padding_mask",
        shape="(1, T)",
        purpose=f"{REAL} of {T} keys are real:\none row for all queries",
    )
    d.operator(area.right + 32, square, "=")
    mask(
        *(642, TOP, T, T, lambda query, key: causal(query, key) and real(key)),
        name="both must allow",
        labels=rows,
        shape="(T, T)",
        purpose="hide keys,\nnot queries",
    )
    d.tensor(300, 268, 1, 1, "query", strength=lambda r, c: 0.55, cell=16)
    d.text(324, 281, "True: may look", "plain", 12, "start")
    d.tensor(440, 268, 1, 1, "query", hidden=lambda r, c: True, cell=16)
    d.text(464, 281, "False: hidden", "plain", 12, "start")
    return d
