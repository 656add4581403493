"""Lesson 08."""

EQUIVALENT = {
    "TransformerConfig": dict.fromkeys(
        (
            "40 tuple vocab_size', 'd_model', 'n_laye… → n_kv_heads', 'd_head', 'd_ff', …",  # noqa: E501
            "41 tuple vocab_size', 'd_model → d_model', 'vocab_size",
            "41 tuple d_model', 'n_layers → n_layers', 'd_model",
            "41 tuple n_layers', 'n_heads → n_heads', 'n_layers",
            "42 tuple n_kv_heads', 'd_head → d_head', 'n_kv_heads",
            "42 tuple d_head', 'd_ff → d_ff', 'd_head",
            "42 tuple d_ff', 'max_len → max_len', 'd_ff",
            "46 tuple ('llama', 'gpt2') → ('gpt2', 'llama')",
        ),
        "the order decides only which of two errors comes first",
    ),
    "Block": dict.fromkeys(
        ("28 loop self.modules() → list(self.modules())[1:]",),
        "the block itself is no linear layer",
    ),
    "Transformer": dict.fromkeys(
        ("51 argument block(x, mask, positions) → block(x, mask)",),
        "positions from 0 on are the default",
    ),
    "sample": dict.fromkeys(
        (
            "23 sign -1 → 1",
            "31 sign -1 → 1",
            "32 sign -1 → 1",
            "37 sign -1 → 1",
            "38 sign -1 → 1",
            "39 sign -1 → 1",
        ),
        "the logits have two dimensions",
    )
    | {"32 argument sort(dim=-1, → sort(": "the last dimension is the default"}
    | dict.fromkeys(
        ("32 call logits.float() → logits",),
        "rounding alone: what is divided is at most 0",
    )
    | dict.fromkeys(
        (
            "33 arithmetic scaled - scaled[:, :1] → scaled + scaled[:, :1]",
            "33 operand scaled - scaled[:, :1] → scaled",
        ),
        "softmax takes no notice of a shift",
    )
    | dict.fromkeys(
        (
            "36 operand top_p is not None and top_p < 1 → top_p is not None",
            "36 compare top_p < 1 → top_p <= 1",
            "36 constant 1 → 2",
        ),
        "with top_p = 1 only rounding cuts",
    )
    | dict.fromkeys(
        ("38 compare p.cumsum(dim=-1) - p >= top_p → p.cumsum(dim=-1) - p > top_p",),
        "differs only where a sum is top_p to the last bit",
    ),
}
