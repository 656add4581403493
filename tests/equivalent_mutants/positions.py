"""Lesson 04."""

EVEN = "the cosine is even"
EQUIVALENT = {
    "sinusoidal": {"22 sign angles.cos() → (-angles).cos()": EVEN},
    "rope": {
        "25 name x → positions": "both are on one device",
        "26 call positions[..., None].float() → positions[..., None]": (
            "whole numbers become float32 in the product"
        ),
        "27 sign angles.cos() → (-angles).cos()": EVEN,
        "28 subscript 0::2 → ::2": "the same slice",
    },
    "alibi_slopes": {"20 subscript 0::2 → ::2": "the same slice"},
    "alibi_bias": {
        "23 call (queries[:, None] - keys).abs() → queries[:, None] - keys": (
            "differs for later keys alone, where any number is right"
        ),
        "23 arithmetic queries[:, None] - keys → keys - queries[:, None]": (
            "a distance has no sign"
        ),
    },
}
