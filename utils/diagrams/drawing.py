"""Pictures as SVG in one visual language, from the standard library alone.

A tensor is a grid of cells with its name above, its shape and purpose below; an
operation stands on an arrow; what is learned is a rounded box; the residual stream is a
thick line; hatching hides; a dark rim marks what is followed in numbers. Lengths are in
pixels. A drawing stands on a card of its own and has a second palette for dark pages.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from itertools import groupby

CELL = 20
LETTERS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
CODE = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"

# kind: (line, pale fill, letters) on a light page, and on a dark one. The hues are
# those of utils.plots; letters are darker, or lighter, so that they can be read.
LIGHT = {
    "query": ("#0072B2", "#d9e9f4", "#00629a"),
    "key": ("#E69F00", "#fbf0d9", "#8a5a00"),
    "value": ("#009E73", "#d9f0ea", "#00785a"),
    "learned": ("#CC79A7", "#f6e4ee", "#9c3f75"),
    "stream": ("#56B4E9", "#e4f3fc", "#17699a"),
    "alarm": ("#D55E00", "#fae4d6", "#9d4300"),
    "plain": ("#9aa0a6", "#f3f4f5", "#5b616b"),
    "ink": ("#5b616b", "#ffffff", "#1b1e24"),
}
DARK = {
    "query": ("#5aaee0", "#16354a", "#8cc8ee"),
    "key": ("#e0a83a", "#43340f", "#f0c566"),
    "value": ("#35b48f", "#0f3a2f", "#6fd6b6"),
    "learned": ("#d792b9", "#45273a", "#eab4d2"),
    "stream": ("#56B4E9", "#173546", "#93d0f3"),
    "alarm": ("#f0884a", "#4a2810", "#f7a873"),
    "plain": ("#7d858f", "#2a2f36", "#a9b0b9"),
    "ink": ("#a9b0b9", "#1b1e24", "#eceef1"),
}


@dataclass(frozen=True)
class Area:
    """Where something was drawn, so that the next thing can stand beside it."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> float:
        """The x of its centre."""
        return self.x + self.width / 2

    @property
    def centre(self) -> float:
        """The y of its centre."""
        return self.y + self.height / 2


class Drawing:
    """A card with a title, and a description that can be read aloud."""

    def __init__(self, width: int, height: int, title: str, description: str):
        self.width, self.height = width, height
        self.title, self.description = title, description
        self.pieces: list[str] = []

    # Letters --------------------------------------------------------------------------

    def text(
        self, x, y, text, kind="ink", size=13, at="middle", bold=False, code=False
    ) -> None:
        """Lines of text; `y` is the base of the first. at: start, middle or end."""
        for i, line in enumerate(str(text).split("\n")):
            face = f' font-family="{CODE}"' * code + ' font-weight="600"' * bold
            self._add(
                f'<text x="{_n(x)}" y="{_n(y + i * (size + 2))}" class="{kind}-t" '
                f'font-size="{size}" text-anchor="{at}"{face}>{escape(line)}</text>'
            )

    def note(self, x, y, heading, text, shape="", width=290) -> None:
        """A heading, its shape at the right, and a sentence below."""
        self.text(x, y, heading, size=14, at="start", bold=True)
        self.text(x + width, y, shape, "plain", 11, "end", code=True)
        self.text(x, y + 19, text, "plain", 12, "start")

    # Tensors --------------------------------------------------------------------------

    def tensor(
        self,
        x,
        y,
        rows: int,
        cols: int,
        kind: str = "query",
        name: str = "",
        shape: str = "",
        purpose: str = "",
        values: Callable[[int, int], object] | None = None,
        strength: Callable[[int, int], float] | None = None,
        hidden: Callable[[int, int], bool] | None = None,
        labels: Iterable[str] = (),
        heads: Iterable[str] = (),
        followed: tuple[int, int, int, int] | None = None,
        cell: float = CELL,
        height: float | None = None,
        ground: bool = True,
    ) -> Area:
        """A grid of cells.

        values, strength, hidden: of the cell at (row, column): what stands in it, how
            full its colour is (0 to 1), and whether it is hatched.
        labels, heads: beside the rows, above the columns.
        followed: first row, first column, rows and columns inside the dark rim.
        """
        height = height or cell
        area = Area(x, y, cols * cell, rows * height)
        if ground:
            self._rect(*(x, y, area.width, area.height), f'class="{kind}-f"')
        for r in range(rows):
            for c in range(cols):
                left, top = x + c * cell, y + r * height
                if share := strength and min(strength(r, c), 1):
                    full = f'class="{kind}-d" fill-opacity="{round(share, 2):g}"'
                    self._rect(left, top, cell, height, full)
                if hidden and hidden(r, c):
                    self._rect(left, top, cell, height, 'fill="url(#hidden)"')
                if values and (shown := values(r, c)) not in (None, ""):
                    full = strength is not None and strength(r, c) > 0.6
                    size = 11 if len(str(shown)) < 5 else 9.5
                    self.text(
                        left + cell / 2,
                        top + height / 2 + 4,
                        shown,
                        "on" if full else "ink",
                        size,
                    )
        self._grid(area, rows, cols, kind)
        if followed:
            r, c, n_rows, n_cols = followed
            self._rect(
                *(x + c * cell, y + r * height, n_cols * cell, n_rows * height),
                'class="rim"',
            )
        for r, label in enumerate(labels):
            self.text(x - 6, y + (r + 0.5) * height + 4, label, "plain", 12, "end")
        heads = list(heads)
        for c, head in enumerate(heads):
            self.text(x + (c + 0.5) * cell, y - 5, head, "plain", 11)
        above = y - 8 - 14 * bool(heads)
        self.text(area.middle, above, name, kind, 14, bold=True)
        self.text(area.middle, area.bottom + 16, shape, "plain", 11, code=True)
        below = area.bottom + 16 + 18 * bool(shape)
        self.text(area.middle, below, purpose, "plain", 12)
        return area

    def mask(self, x, y, allowed, name="", kind="query", cell=CELL, **more) -> Area:
        """A table of who may look (rows of booleans), in two paths; else a tensor."""
        height = more.get("height") or cell
        shown, hatched = f'class="{kind}-d" fill-opacity="0.45"', 'fill="url(#hidden)"'
        for wanted, look in ((True, shown), (False, hatched)):
            path = ""
            for r, row in enumerate(allowed):
                c = 0
                for may, run in groupby(map(bool, row)):
                    n = len(list(run))
                    if may == wanted:
                        path += f"M{_n(x + c * cell)},{_n(y + r * height)}"
                        path += f"h{_n(n * cell)}v{_n(height)}h{_n(-n * cell)}z"
                    c += n
            if path:
                self._add(f'<path d="{path}" {look}/>')
        rows, cols = len(allowed), len(allowed[0])
        return self.tensor(
            x, y, rows, cols, kind, name, cell=cell, ground=False, **more
        )

    # Boxes, lines, arrows -------------------------------------------------------------

    def box(self, x, y, width, height, text="", kind="learned", size=13) -> Area:
        """What is learned (or another kind), with rounded corners and its name."""
        self._rect(
            x, y, width, height, f'rx="6" class="{kind}-f {kind}-l" stroke-width="1.5"'
        )
        self.text(x + width / 2, y + height / 2 + size * 0.35, text, size=size)
        return Area(x, y, width, height)

    def frame(self, x, y, width, height, text="") -> Area:
        """A dashed frame around what belongs together."""
        self._rect(x, y, width, height, 'rx="8" class="ink-l dashed" fill="none"')
        self.text(x + 12, y + 18, text, "plain", 12, "start")
        return Area(x, y, width, height)

    def line(self, *points, kind="ink", width=1.5, dashed=False) -> None:
        """A line through points (x, y)."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._add(
            f'<polyline points="{path}" class="{kind}-l{" dashed" * dashed}" '
            f'fill="none" stroke-width="{_n(width)}"/>'
        )

    def arrow(self, *points, above="", below="", kind="ink", width=1.5) -> None:
        """An arrow through points; what it does stands above and below its middle."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._add(
            f'<polyline points="{path}" class="{kind}-l" fill="none" '
            f'stroke-width="{_n(width)}" marker-end="url(#{kind}-head)"/>'
        )
        (x, y), (x2, y2) = points[0], points[-1]
        self.text((x + x2) / 2, (y + y2) / 2 - 7, above, size=12)
        self.text((x + x2) / 2, (y + y2) / 2 + 17, below, size=12)

    def curve(self, x, y, x2, y2, bend=20, kind="ink", width=1.5, head=True) -> None:
        """An arrow that bends to its left by `bend`, from one point to another."""
        length = max(((x2 - x) ** 2 + (y2 - y) ** 2) ** 0.5, 1)
        over = (x + x2) / 2 + bend * (y2 - y) / length
        up = (y + y2) / 2 - bend * (x2 - x) / length
        end = f' marker-end="url(#{kind}-head)"' * head
        self._add(
            f'<path d="M{_n(x)},{_n(y)} Q{_n(over)},{_n(up)} {_n(x2)},{_n(y2)}" '
            f'class="{kind}-l" fill="none" stroke-width="{_n(width)}"{end}/>'
        )

    def stream(self, *points) -> None:
        """The residual stream."""
        self.line(*points, kind="stream", width=5)

    def plus(self, x, y) -> None:
        """⊕: what comes from the side is added."""
        self._add(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="9" class="ink-f ink-l" '
            'stroke-width="1.5"/>'
        )
        self.line((x - 5, y), (x + 5, y))
        self.line((x, y - 5), (x, y + 5))

    def dot(self, x, y, kind="ink", radius=3) -> None:
        self._add(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" class="{kind}-d"/>'
        )

    def operator(self, x, y, sign) -> None:
        """A sign between two tensors."""
        self.text(x, y + 5, sign, size=15, bold=True)

    def ring(self, x, y, radius, kind="ink", width=1.5) -> None:
        """A circle's line."""
        self._add(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" class="{kind}-l" '
            f'fill="none" stroke-width="{_n(width)}"/>'
        )

    def times(self, x, y) -> None:
        """⊗: multiplied number by number."""
        self._add(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="9" class="ink-f ink-l" '
            'stroke-width="1.5"/>'
        )
        self.line((x - 4, y - 4), (x + 4, y + 4))
        self.line((x - 4, y + 4), (x + 4, y - 4))

    def sector(self, x, y, radius, start, end, kind="query", strength=0.3) -> None:
        """A piece of a disc between two angles, counter-clockwise from the right."""
        full = f'class="{kind}-d" fill-opacity="{round(strength, 2):g}"'
        if end - start >= 2 * math.pi:
            self._add(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" {full}/>')
            return
        ends = [
            f"{_n(x + radius * math.cos(a))},{_n(y - radius * math.sin(a))}"
            for a in (start, end)
        ]
        self._add(
            f'<path d="M{_n(x)},{_n(y)} L{ends[0]} A{_n(radius)},{_n(radius)} 0 '
            f'{int(end - start > math.pi)} 0 {ends[1]} z" {full}/>'
        )

    def gap(self, x, y, width, height) -> None:
        """Hide what lies there: what comes next passes in front of it."""
        self._rect(x, y, width, height, 'class="ink-f"')

    def flow(self, x, x2, y, width, kind="ink") -> None:
        """A level arrow as wide as what flows."""
        to, half = (1 if x2 > x else -1), width / 2
        tip, head = 8 + half / 2, half + 4
        points = (x, y - half), (x2 - tip * to, y - half), (x2 - tip * to, y - head)
        points += ((x2, y),)
        points += tuple((across, 2 * y - down) for across, down in points[2::-1])
        path = " ".join(f"{_n(across)},{_n(down)}" for across, down in points)
        self._add(f'<polygon points="{path}" class="{kind}-d" fill-opacity="0.75"/>')

    # The file -------------------------------------------------------------------------

    def svg(self) -> str:
        """The picture as the text of a file: the same bytes every time."""
        body = "\n".join(self.pieces)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" '
            f'height="{self.height}" viewBox="0 0 {self.width} {self.height}" '
            f'role="img" aria-labelledby="title desc" font-family="{LETTERS}">\n'
            f'<title id="title">{escape(self.title)}</title>\n'
            f'<desc id="desc">{escape(self.description)}</desc>\n'
            f"<style>\n{_rules(LIGHT, body)}\n.dashed {{stroke-dasharray: 5 4}}\n"
            "@media (prefers-color-scheme: dark) {\n"
            f"{_rules(DARK, body)}\n}}\n</style>\n"
            f"<defs>\n{_defs(body)}\n</defs>\n"
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" '
            f'height="{self.height - 1}" rx="10" class="card"/>\n{body}\n</svg>\n'
        )

    def _grid(self, area, rows, cols, kind):
        across = [area.x + c * area.width / cols for c in range(cols + 1)]
        down = [area.y + r * area.height / rows for r in range(rows + 1)]
        path = "".join(f"M{_n(x)},{_n(area.y)}v{_n(area.height)}" for x in across)
        path += "".join(f"M{_n(area.x)},{_n(y)}h{_n(area.width)}" for y in down)
        self._add(f'<path d="{path}" class="{kind}-l thin" fill="none"/>')

    def _rect(self, x, y, width, height, rest):
        self._add(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" '
            f"{rest}/>"
        )

    def _add(self, piece):
        if "></text>" not in piece:  # no empty text
            self.pieces.append(piece)


def _n(number) -> str:
    return f"{round(number, 1):g}"


def _rules(palette, body) -> str:
    """The style of the kinds that occur in the picture's body."""
    rules = []
    for kind, (line, pale, letters) in palette.items():
        if f"{kind}-" in body or kind == "ink":
            rules.append(
                f".{kind}-l {{stroke: {line}}} .{kind}-f {{fill: {pale}}} "
                f".{kind}-t {{fill: {letters}}} .{kind}-d {{fill: {line}}}"
            )
    line, card, ink = palette["ink"]
    edge = palette["plain"][0]
    rules.append(
        f".card {{fill: {card}; stroke: {edge}; stroke-opacity: 0.5}} "
        f".rim {{fill: none; stroke: {ink}; stroke-width: 1.5}} "
        f".thin {{stroke-width: 0.75}} .on-t {{fill: {card}}} "
        f".hatch {{stroke: {line}; stroke-width: 0.75; opacity: 0.6}}"
    )
    return "\n".join(rules)


def _defs(body) -> str:
    """The arrows' heads and the hatching that the body uses."""
    heads = [
        f'<marker id="{kind}-head" viewBox="0 0 8 8" refX="7" refY="4" '
        f'markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse" '
        f'orient="auto"><path d="M0,0 L8,4 L0,8 z" class="{kind}-d"/></marker>'
        for kind in LIGHT
        if f"#{kind}-head" in body
    ]
    hatch = (
        '<pattern id="hidden" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="6" '
        'class="hatch"/></pattern>'
    )
    return "\n".join([*heads, *[hatch] * ("#hidden" in body)])
