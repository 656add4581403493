"""Lesson 10."""

VALUES = "values have been compared with keys, or are next"
ALIKE = "memory of keys and of values is alike"
HIDDEN = "what nobody has written is not shown"
LAYERS = "as many layers as lengths"
ONE_QUERY = "one query may look at all keys, so its mask is True everywhere"
BOTH_SIGNS = "queries and keys both change their sign"

EQUIVALENT = {
    "KVCache": {
        "26 function zeros → ones": HIDDEN,
        "27 function zeros → ones": HIDDEN,
        "57 attribute self.k → self.v": ALIKE,
        "60 name k → v": VALUES,
        "60 sign -2 → 2": "of four dimensions, the last but one is number 2",
        "63 tuple (('keys', k), ('values', v)) → (('values', v), ('keys', k))": VALUES,
        "69 attribute self.k → self.v": ALIKE,
        "69 attribute self.k → self.v (2)": ALIKE,
        "88 attribute self.lengths → self.k (2)": LAYERS,
        "88 attribute self.lengths → self.v (2)": LAYERS,
    },
    "cached_forward": {
        "33 tuple [1.0, 0.0] → [0.0, 1.0]": "queries and keys turn a quarter further",
        "39 argument heads.dtype, torch.float32 → torch.float32, heads.dtype": (
            "the order of the types does not matter"
        ),
        "40 sign torch.view_as_complex(wide.unfl… → -(torch.view_as_complex(wide.un…": (
            BOTH_SIGNS
        ),
        "41 sign return → return -": BOTH_SIGNS,
        "53 condition t > 1 or padding is not None → True": ONE_QUERY,
        "53 compare t > 1 → t >= 1": ONE_QUERY,
        "53 constant 1 → 0": ONE_QUERY,
        "53 name padding → model": ONE_QUERY,
    },
    "generate_cached": {
        "48 call ids.clone() → ids": "the same text, though an inference tensor",
    },
    "RollingKVCache": {
        "22 function zeros → ones": HIDDEN,
        "23 function zeros → ones": HIDDEN,
        "51 attribute self.k → self.v": ALIKE,
        "52 tuple (('keys', k), ('values', v)) → (('values', v), ('keys', k))": VALUES,
        "53 name k → v": VALUES,
        "59 attribute self.k → self.v": ALIKE,
        "59 attribute self.k → self.v (2)": ALIKE,
        "64 name k → v": VALUES,
        "65 argument max(0, start - self.window + 1) → "
        "max(start - self.window + 1, 0)": "the order does not matter",
        "66 argument , start + t - self.window → + t - self.window, start": (
            "the order does not matter"
        ),
        "78 attribute self.lengths → self.k (2)": LAYERS,
        "78 attribute self.lengths → self.v (2)": LAYERS,
    },
}
