"""Lesson 14."""

MORE_KEYS = "keys before the window are in the slice, and the mask hides them"
THE_SAME = "the order does not matter"
SAME_AXIS = "a new last dimension, from either side"

EQUIVALENT = {
    "strided_mask": {
        "26 compare back < stride → back <= stride": "a stride back is seen anyway",
    },
    "chunked_attention": {
        "29 argument min(start + block, t_q) → min(t_q, start + block)": THE_SAME,
        "31 argument 0, start + t_k - t_q - window +… → "
        "start + t_k - t_q - window + 1,…": THE_SAME,
        "31 arithmetic start + t_k - t_q - window + 1 → "
        "start + t_k - t_q - window - 1": MORE_KEYS,
        "31 operand start + t_k - t_q - window + 1 → "
        "start + t_k - t_q - window": MORE_KEYS,
        "31 constant 1 → 0": MORE_KEYS,
        "32 name q → k": "both are on one device",
    },
    "feature_map": {
        "14 compare x > 0 → x >= 0": "at 0 both formulas have value 1 and slope 1",
        "14 constant 0 → 1 (2)": "e^x is finite up to 1, too",
    },
    "linear_attention": {
        "29 tuple (..., :, None) → (:, ..., None)": SAME_AXIS,
    },
    "linear_attention_step": {"20 tuple (..., :, None) → (:, ..., None)": SAME_AXIS},
}
