"""Lesson 08."""

EQUIVALENT = {
    "sample": dict.fromkeys(
        (
            "31 sign -1 → 1",
            "32 sign -1 → 1",
            "37 sign -1 → 1",
            "38 sign -1 → 1",
            "39 sign -1 → 1",
        ),
        "the logits have two dimensions",
    )
    | {"32 argument sort(dim=-1, → sort(": "the last dimension is the default"}
    | dict.fromkeys(
        ("32 call logits.float() → logits",),
        "rounding alone: what is divided is at most 0",
    )
    | dict.fromkeys(
        (
            "33 arithmetic scaled - scaled[:, :1] → scaled + scaled[:, :1]",
            "33 operand scaled - scaled[:, :1] → scaled",
        ),
        "softmax takes no notice of a shift",
    )
    | dict.fromkeys(
        (
            "36 operand top_p is not None and top_p < 1 → top_p is not None",
            "36 compare top_p < 1 → top_p <= 1",
            "36 constant 1 → 2",
        ),
        "with top_p = 1 only rounding cuts",
    )
    | dict.fromkeys(
        ("38 compare p.cumsum(dim=-1) - p >= top_p → p.cumsum(dim=-1) - p > top_p",),
        "differs only where a sum is top_p to the last bit",
    ),
}
