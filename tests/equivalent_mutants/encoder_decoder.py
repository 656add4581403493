"""Lesson 13."""

EQUIVALENT = {
    "translate": {"29 sign -1 → 1": "logits of two dimensions"},
}
