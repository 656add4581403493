"""Lesson 09."""

EQUIVALENT = {
    "cross_entropy": {"22 constant 0 → -1": "the dimension has one entry"},
    "learning_rate": dict.fromkeys(
        ("20 compare step >= total_steps → step > total_steps",),
        "the cosine ends at the floor too",
    )
    | dict.fromkeys(
        (
            "22 sign (step - warmup_steps) / (total_… → -((step - warmup_steps) / (tota…",  # noqa: E501
            "22 arithmetic step - warmup_steps → warmup_steps - step",
            "22 arithmetic total_steps - warmup_steps → warmup_steps - total_steps",
            "23 sign math.cos(math.pi * progress) → math.cos(-(math.pi * progress))",
        ),
        "the cosine is even",
    ),
    "clip_gradients": {
        "20 sign return torch.tensor(0.0) → return -torch.tensor(0.0)": "−0 is 0"
    }
    | {"22 compare total > max_norm → total >= max_norm": "the factor is 1 there"},
}
