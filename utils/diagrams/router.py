"""Lesson 12: one token, three experts, k = 2."""

import math

from utils.diagrams.drawing import Drawing

X, SCORES, K = 3.0, [1.0, -0.5, 0.2], 2  # those of the lesson
EXPERTS = [
    ("2x", lambda x: 2 * x),
    ("−x", lambda x: -x),
    ("10 + x", lambda x: 10 + x),
]


def draw() -> Drawing:
    best = sorted(range(len(SCORES)), key=lambda e: -SCORES[e])[:K]
    parts = [math.exp(SCORES[e]) for e in best]
    shares = dict(zip(best, (p / sum(parts) for p in parts), strict=True))
    y = sum(share * EXPERTS[e][1](X) for e, share in shares.items())
    left_out = next(e for e in range(len(SCORES)) if e not in shares)

    terms = [f"{share:.2f} · {EXPERTS[e][1](X):g}" for e, share in shares.items()]

    def signed(number):
        return f"{number:.1f}".replace("-", "−")

    d = Drawing(
        *(760, 352),
        "One token, a router and its two best experts",
        "The router gives three experts the scores "
        f"{', '.join(map(signed, SCORES))}. The {K} highest are kept, experts "
        f"{best[0]} and {best[1]}, and a softmax over them gives the weights "
        f"{', '.join(f'{s:.2f}' for s in shares.values())}. Their results, times "
        f"these weights, add up to {y:.2f}. Expert {left_out} is not asked.",
    )
    left, wide, high = 246, 116, 30
    middles = [left + (e + 0.5) * wide for e in range(len(EXPERTS))]

    def row(y, kind, name, value, **more):
        """A cell for each expert; hatched where the expert is not asked."""
        return d.tensor(
            *(left, y, 1, len(EXPERTS), kind, name),
            values=lambda r, c: value(c),
            hidden=lambda r, c: c not in shares and not name,
            cell=wide,
            height=high,
            **more,
        )

    x = d.tensor(40, 290, 1, 1, "stream", "", "", "one token", cell=40, height=high)
    d.text(60, 309, f"x = {X:g}", size=12)
    d.arrow((x.middle, x.y), (x.middle, 86))
    d.box(28, 50, 84, 34, "router")
    d.arrow((114, 67), (left - 6, 67))
    row(52, "query", "scores", lambda c: signed(SCORES[c]))
    d.arrow((middles[1], 86), (middles[1], 112))
    d.text(middles[1] + 12, 103, f"softmax of the {K} highest", "ink", 12, "start")
    weights = row(
        *(118, "query", "", lambda c: f"{shares[c]:.2f}" if c in shares else ""),
        strength=lambda r, c: 0.4 * (c in shares),
    )
    results = row(
        176, "value", "", lambda c: f"{EXPERTS[c][1](X):g}" if c in shares else ""
    )
    d.text(left - 12, weights.centre + 4, "weights", "query", 13, "end", bold=True)
    d.text(left - 12, results.centre + 4, "results", "value", 13, "end", bold=True)
    d.line((x.right, 305), (middles[max(best)], 305))
    for e, (name, _) in enumerate(EXPERTS):
        asked = e in shares
        middle, kind = middles[e], "learned" if asked else "plain"
        d.box(middle - 50, 234, 100, 34, f"{e}:  {name}", kind=kind)
        if asked:
            d.arrow((middle, 305), (middle, 271))
            d.arrow((middle, 232), (middle, 209))
            d.text(middle, 167, "×", size=15, bold=True)
    d.text(left - 12, 256, "experts", "learned", 13, "end", bold=True)
    d.text(middles[left_out], 290, "not asked", "plain", 12)
    d.arrow((weights.right + 6, 162), (668, 162), above="sum")
    d.tensor(
        *(676, 147, 1, 1, "stream", "y", "", f"{terms[0]} +\n{terms[1]}"),
        values=lambda r, c: f"{y:.2f}",
        cell=46,
        height=high,
    )
    return d
