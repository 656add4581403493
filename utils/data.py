"""Data made by rule: tasks of which the right answer is known."""

import torch


def recall_batch(batch, n_items, n_keys, n_values, generator=None):
    """A batch of look-ups: pairs (key, value), then a key whose value is asked for.

    batch: how many sequences.
    n_items: pairs in each; its keys are all different, so `n_items <= n_keys`.
    n_keys, n_values: how many keys and values there are to draw from.
    generator: a `torch.Generator`; the global one if not given.

    Returns:
        Two tensors of whole numbers. `pairs (batch, n_items + 1, 2)`: step t holds key
        `pairs[:, t, 0]` in 0 .. n_keys − 1 and value `pairs[:, t, 1]` in
        0 .. n_values − 1. The last step holds the key asked for, which is one of
        those before it, and `n_values` as a value, which means "which?".
        `answers (batch,)`: the value that stood beside that key.
    """
    if not 1 <= n_items <= n_keys:
        raise ValueError(
            f"n_items is {n_items}, and must lie in 1 .. n_keys = {n_keys}: the keys "
            "of one sequence are all different"
        )
    order = torch.rand(batch, n_keys, generator=generator).argsort(dim=1)
    keys = order[:, :n_items]  # (B, n_keys) → (B, n_items)
    values = torch.randint(n_values, (batch, n_items), generator=generator)
    asked = torch.randint(n_items, (batch, 1), generator=generator)
    which = torch.full((batch, 1), n_values)
    pairs = torch.stack(
        [
            torch.cat([keys, keys.gather(1, asked)], dim=1),
            torch.cat([values, which], dim=1),
        ],
        dim=-1,
    )  # twice (B, n_items + 1) → (B, n_items + 1, 2)
    return pairs, values.gather(1, asked).squeeze(1)
