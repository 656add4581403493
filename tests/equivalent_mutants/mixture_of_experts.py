"""Lesson 12."""

EQUIVALENT = {
    "top_k_routing": {
        "23 argument logits.topk(k, dim=-1) → logits.topk(k)": "the default",
        "23 sign -1 → 1": "scores of two dimensions",
        "25 sign -1 → 1": "scores of two dimensions",
        "26 sign -1 → 1": "scores of two dimensions",
    },
    "MixtureOfExperts": {
        "42 tuple (token, place, None) → (token, None, place)": "also (n, 1)",
    },
    "drop_over_capacity": {
        "22 argument queue, n_experts → queue": "columns for the experts that occur",
    },
}
