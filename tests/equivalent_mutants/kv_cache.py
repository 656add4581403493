"""Lesson 10."""

HIDDEN = "what nobody has written is not shown"
LAYERS = "as many layers, or sizes that nobody counts, as lengths"
ONE_QUERY = "one query may look at all keys, so its mask is True everywhere"
BOTH_SIGNS = "queries and keys both change their sign"

EQUIVALENT = {
    "KVCache": {
        "27 function zeros → ones": HIDDEN,
        "28 function zeros → ones": HIDDEN,
        "90 attribute self.lengths → self.k (2)": LAYERS,
        "90 attribute self.lengths → self.shape (2)": LAYERS,
        "90 attribute self.lengths → self.v (2)": LAYERS,
    },
    "cached_forward": {
        "34 tuple [1.0, 0.0] → [0.0, 1.0]": "queries and keys turn a quarter further",
        "40 argument heads.dtype, torch.float32 → torch.float32, heads.dtype": (
            "the order of the types does not matter"
        ),
        "41 sign torch.view_as_complex(wide.unfl… → -(torch.view_as_complex(wide.un…": (
            BOTH_SIGNS
        ),
        "42 sign return → return -": BOTH_SIGNS,
        "54 condition t > 1 or padding is not None → True": ONE_QUERY,
        "54 compare t > 1 → t >= 1": ONE_QUERY,
        "54 constant 1 → 0": ONE_QUERY,
        "54 name padding → model": ONE_QUERY,
    },
    "generate_cached": {
        "48 call ids.clone() → ids": "the same text, though an inference tensor",
    },
    "RollingKVCache": {
        "23 function zeros → ones": HIDDEN,
        "24 function zeros → ones": HIDDEN,
        "65 name k → v": "values have been compared with keys",
        "66 argument max(0, start - self.window + 1) → "
        "max(start - self.window + 1, 0)": "the order does not matter",
        "67 argument , start + t - self.window → + t - self.window, start": (
            "the order does not matter"
        ),
        "79 attribute self.lengths → self.k (2)": LAYERS,
        "79 attribute self.lengths → self.shape (2)": LAYERS,
        "79 attribute self.lengths → self.v (2)": LAYERS,
    },
}
