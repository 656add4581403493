"""Lesson 13."""

EQUIVALENT = {
    "EncoderDecoder": {
        "57 statement if source.numel() == 0: raise V… → pass": "a row without tokens "
        "holds padding alone, which is refused next",
        "57 constant 0 → -1": "a row without tokens is refused next",
        "60 call nonzero().flatten() → nonzero()": "the message still names the row",
    },
    "translate": {"29 sign -1 → 1": "logits of two dimensions"},
}
