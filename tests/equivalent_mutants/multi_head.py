"""Lesson 03."""

EQUIVALENT = {
    "split_heads": {
        "21 argument 1, 2 → 2, 1": "the same exchange",
    },
    "merge_heads": {
        "13 argument x.transpose(1, 2) → x.transpose(2, 1)": "the same exchange",
    },
}
