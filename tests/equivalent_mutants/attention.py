"""Lesson 02."""

EQUIVALENT = {
    "attention_weights": {
        "17 argument k.transpose(-2, -1) → k.transpose(-1, -2)": "the same exchange",
        "17 name q → k (2)": "queries and keys have the same width",
    },
}
