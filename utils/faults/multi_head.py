"""Lesson 03: mistakes in heads, shared keys and values, and their count."""

from utils.exercises.multi_head import (
    MultiHeadAttention,
    attention_parameters,
    masks_and_heads,
    merge_heads,
    repeat_kv,
    split_heads,
)

# split_heads --------------------------------------------------------------------------

SPLIT = "x.unflatten(-1, (n_heads, -1)).transpose(1, 2)"

split_heads.fault(
    "reshaped_straight",
    "The memory is read in the final shape without exchanging dimensions. Columns lie "
    "side by side in memory, so head 0 gets some tokens whole, not a part of each.",
    (SPLIT, "x.reshape(len(x), n_heads, x.shape[1], -1)"),
)
split_heads.fault(
    "not_transposed",
    "The heads stand behind the time: `(B, T, H, Dh)`. Attention works on the last two "
    "dimensions, so it would mix the heads of one token.",
    (".transpose(1, 2)", ""),
)
split_heads.fault(
    "every_other_column",
    "The columns are dealt out like cards: head 0 gets the columns 0, H, 2H, … A head "
    "is a run of neighbouring columns: cut the width into (heads, d_head).",
    (SPLIT, "x.unflatten(-1, (-1, n_heads)).permute(0, 3, 1, 2)"),
)
split_heads.fault(
    "heads_and_batch_exchanged",
    "The heads are made by a view that starts from the batch: its rows are mixed. With "
    "one row a batch it hides.",
    (SPLIT, f"{SPLIT}.reshape(n_heads, len(x), x.shape[1], -1).transpose(0, 1)"),
)

# merge_heads --------------------------------------------------------------------------

MERGED = "x.transpose(1, 2).flatten(2)"
COLLECTED = "x.permute(0, 2, 3, 1).flatten(2)"

merge_heads.fault(
    "not_transposed_back",
    "The memory is read in the final shape while the heads still stand before the "
    "time, so each row holds several positions of one head.",
    (MERGED, "x.reshape(x.shape[0], x.shape[2], -1)"),
)
merge_heads.fault(
    "only_flattened",
    "Time and columns are joined, and the heads are still a dimension of their own: "
    "`(B, H, T·Dh)`. Heads and columns have to be neighbours first.",
    (".transpose(1, 2)", ""),
)
merge_heads.fault(
    "joined_along_time",
    "The heads are put one after the other along the time: `(B, H·T, Dh)`. They belong "
    "side by side in the last dimension.",
    (MERGED, "x.flatten(1, 2)"),
)

# repeat_kv ----------------------------------------------------------------------------

REPEATED = "x.repeat_interleave(group_size, dim=1)"

repeat_kv.fault(
    "tiled",
    "The heads come in turn, 0, 1, 0, 1, where neighbours must share: 0, 0, 1, 1. It "
    "hides where every head is its own and where one head serves all.",
    (REPEATED, "x.repeat(1, group_size, 1, 1)"),
)
for dim, name, what in ((0, "the_batch", "row of the batch"), (2, "time", "position")):
    repeat_kv.fault(
        f"repeated_along_{name}",
        f"Every {what} is repeated instead of every head.",
        ("dim=1", f"dim={dim}"),
    )

# MultiHeadAttention: projections ------------------------------------------------------

Q = "q = split_heads(self.w_q(x), self.n_heads)"
K = "k = split_heads(self.w_k(x), self.n_kv_heads)"
V = "v = split_heads(self.w_v(x), self.n_kv_heads)"
LOOK = "attention(q, k, v, mask)"
MIXED = f"merge_heads({LOOK})"
SHARED = "k, v = repeat_kv(k, group_size), repeat_kv(v, group_size)"
GROUP = "self.n_heads // self.n_kv_heads"

MultiHeadAttention.fault(
    "no_output_projection",
    "w_o is made and never used. Without it nothing mixes what the heads found.",
    (f"self.w_o({MIXED})", MIXED),
)
MultiHeadAttention.fault(
    "group_size_for_kv_heads",
    "`n_kv_heads` is taken for the size of a group. It is the number of key and value "
    "heads; a group is n_heads // n_kv_heads query heads.",
    (
        "self.n_heads, self.n_kv_heads =",
        "n_kv_heads = n_heads // n_kv_heads if n_kv_heads < n_heads else n_heads\n"
        "        self.n_heads, self.n_kv_heads =",
    ),
)
MultiHeadAttention.fault(
    "weights_shared",
    "Keys and values come from one and the same layer. What a token is found by and "
    "what it hands over are two projections.",
    (
        "self.w_v = nn.Linear(d_model, n_kv_heads * d_head, bias=False)",
        "self.w_v = self.w_k",
    ),
)


def projected_by(*sources):
    """Edits: queries, keys and values come from these layers, or are `x` itself."""
    places = zip((Q, K, V), ("w_q", "w_k", "w_v"), sources, strict=True)
    for line, own, source in places:
        if source != own:
            made = "x" if source == "x" else f"self.{source}(x)"
            yield line, line.replace(f"self.{own}(x)", made)


for name, *sources in (
    ("keys_and_values_exchanged", "w_q", "w_v", "w_k"),
    ("queries_and_keys_exchanged", "w_k", "w_q", "w_v"),
    ("queries_compared_with_queries", "w_q", "w_q", "w_v"),
    ("values_compared_with_keys", "w_v", "w_k", "w_v"),
    ("keys_compared_with_keys", "w_k", "w_k", "w_v"),
    ("queries_compared_with_values", "w_q", "w_v", "w_v"),
    ("values_not_projected", "w_q", "w_k", "w_k"),
    ("queries_averaged", "w_q", "w_k", "w_q"),
    ("input_taken_for_queries", "x", "w_k", "w_v"),
    ("input_taken_for_keys", "w_q", "x", "w_v"),
    ("input_taken_for_values", "w_q", "w_k", "x"),
):
    MultiHeadAttention.fault(
        name,
        "Queries, keys and values come from {}, {} and {}. Each has a layer of its "
        "own: w_q, w_k and w_v.".format(*sources),
        *projected_by(*sources),
    )

# MultiHeadAttention: heads ------------------------------------------------------------

for name, divisor, factor in (
    ("scaled_by_d_model", "√d_model", "(q.shape[-1] / x.shape[-1]) ** 0.5"),
    ("scaled_by_all_heads", "√(n_heads·d_head)", "self.n_heads ** -0.5"),
    ("scaled_twice", "√d_head twice", "q.shape[-1] ** -0.5"),
    ("not_scaled", "1", "q.shape[-1] ** 0.5"),
):
    MultiHeadAttention.fault(
        name,
        f"The scores are divided by {divisor}. Each is a sum over the d_head columns "
        "of one head, so √d_head is the divisor, and `attention` divides by it.",
        (LOOK, f"attention(q * {factor}, k, v, mask)"),
    )
MultiHeadAttention.inherits(
    split_heads, "reshaped_straight", "every_other_column", "heads_and_batch_exchanged"
)
MultiHeadAttention.inherits(merge_heads, "not_transposed_back")
MultiHeadAttention.inherits(repeat_kv, "tiled")
MultiHeadAttention.fault(
    "merged_interleaved",
    "The results of the heads are mixed column by column: the first of each, then the "
    "second. They lie side by side, head 0 first; w_o counts on it.",
    (MERGED, COLLECTED),
    edited="merge_heads",
)
for name, sentence, split, merged in (
    (
        "reshaped_both_ways",
        "Split and merge each read memory in the final shape, without exchanging "
        "dimensions. The stream comes back, but a head gets some tokens whole.",
        "view(len(x), self.{}, x.shape[1], -1)",
        "reshape(*x.shape[:2], -1)",
    ),
    (
        "interleaved_both_ways",
        "The columns are dealt out to the heads like cards and collected in the same "
        "way. A head is a run of neighbouring columns: loaded weights count on it.",
        "unflatten(-1, (-1, self.{})).permute(0, 3, 1, 2)",
        "permute(0, 2, 3, 1).flatten(2)",
    ),
):
    MultiHeadAttention.fault(
        name,
        sentence,
        (Q, f"q = self.w_q(x).{split.format('n_heads')}"),
        (K, f"k = self.w_k(x).{split.format('n_kv_heads')}"),
        (V, f"v = self.w_v(x).{split.format('n_kv_heads')}"),
        (MIXED, f"{LOOK}.{merged}"),
    )
MultiHeadAttention.fault(
    "heads_mixed_instead_of_tokens",
    "The heads stand behind the time, so attention mixes the heads of one token and no "
    "token ever sees another.",
    (LOOK, "attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)"),
)
for number in ("n_kv_heads", "n_heads"):
    MultiHeadAttention.fault(
        f"repeated_{number}_times",
        f"Each key and value head is repeated {number} times. It serves n_heads // "
        "n_kv_heads query heads, the size of a group.",
        (GROUP, f"self.{number}"),
    )
MultiHeadAttention.fault(
    "kv_not_repeated",
    "Keys or values are not repeated, so the number of their heads does not match that "
    "of the queries.",
    (SHARED, ""),
)

# MultiHeadAttention: masks and rotation -----------------------------------------------

ROTATED = "q, k = rotate(q), rotate(k)"
IF_GIVEN = f"if rotate is not None:\n            {ROTATED}"

MultiHeadAttention.fault(
    "mask_dropped",
    "The mask does not reach attention: every query sees every key.",
    (LOOK, "attention(q, k, v)"),
)
MultiHeadAttention.fault(
    "mask_inverted",
    "The mask is read the other way round. Here True means “may look”; "
    "`nn.MultiheadAttention` means the opposite.",
    (LOOK, "attention(q, k, v, None if mask is None else ~mask)"),
)
MultiHeadAttention.fault("rotate_unused", "`rotate` is never called.", (IF_GIVEN, ""))
for name, what, rotated in (
    ("only_queries_rotated", "Only the queries are rotated.", "q = rotate(q)"),
    ("only_keys_rotated", "Only the keys are rotated.", "k = rotate(k)"),
    (
        "values_rotated_too",
        "The values are rotated too.",
        "q, k, v = rotate(q), rotate(k), rotate(v)",
    ),
):
    MultiHeadAttention.fault(
        name,
        f"{what} Queries and keys are, each by its own position, so that the score "
        "depends on the distance; what is found there stays as it is.",
        (ROTATED, rotated),
    )
MultiHeadAttention.fault(
    "rotated_before_the_split",
    "The queries and keys are rotated before they are split, as if all heads were one "
    "wide vector. Each head is rotated by itself.",
    (IF_GIVEN, ""),
    (Q, Q.replace("self.w_q(x)", "rotate(self.w_q(x)) if rotate else self.w_q(x)")),
    (K, K.replace("self.w_k(x)", "rotate(self.w_k(x)) if rotate else self.w_k(x)")),
)
MultiHeadAttention.fault(
    "rotated_before_the_transpose",
    "The queries and keys are rotated while they are still `(B, T, H, Dh)`, and the "
    "head is taken for the position: the second dimension from the end.",
    (ROTATED, "q, k = (rotate(y.transpose(1, 2)).transpose(1, 2) for y in (q, k))"),
)

# attention_parameters -----------------------------------------------------------------

COUNT = "2 * d_model * d_head * (n_heads + n_kv_heads)"

for name, count, sentence in (
    (
        "four_squares",
        "4 * d_model**2",
        "4·d_model² counts four square matrices. They are square only if the heads "
        "fill d_model and share nothing.",
    ),
    (
        "sharing_ignored",
        "4 * d_model * d_head * n_heads",
        "Keys and values are counted with as many heads as the queries.",
    ),
    (
        "no_output_projection",
        "d_model * d_head * (n_heads + 2 * n_kv_heads)",
        "One of w_q and w_o is missing. w_o leads back from the heads to d_model.",
    ),
    (
        "keys_or_values_forgotten",
        "d_model * d_head * (2 * n_heads + n_kv_heads)",
        "Keys and values are counted once. Each has a matrix of its own.",
    ),
    (
        "keys_and_values_forgotten",
        "2 * d_model * d_head * n_heads",
        "Only two matrices are counted, as wide as w_q and w_o: w_k and w_v are "
        "missing.",
    ),
    (
        "d_head_ignored",
        "2 * d_model * (d_model // n_heads) * (n_heads + n_kv_heads)",
        "d_head is taken to be d_model / n_heads. It is a number of its own.",
    ),
):
    attention_parameters.fault(name, sentence, (COUNT, count))

# Do the parts fit together? -----------------------------------------------------------

SEEN = "torch.ones(t_q, t_k, dtype=torch.bool).tril(diagonal=t_k - t_q)"

masks_and_heads.fault(
    "mask_means_the_opposite",
    "causal_mask marks with True what is hidden, and attention reads True as “may "
    "look”. Each meaning is in use somewhere; in this course both say “may look”.",
    (SEEN, f"~{SEEN}"),
    edited="causal_mask",
)
masks_and_heads.fault(
    "attention_reads_the_opposite",
    "attention hides the keys where the mask is True, and causal_mask marks with True "
    "what may be seen.",
    ("q, k, mask", "q, k, None if mask is None else ~mask"),
    edited="attention",
)
masks_and_heads.fault(
    "queries_are_the_first_positions",
    "causal_mask takes the queries for the first positions, and these queries are the "
    "last: with more keys than queries it must be aligned at the bottom right.",
    ("t_k - t_q)", "0)"),
    edited="causal_mask",
)
masks_and_heads.fault(
    "heads_behind_time",
    "split_heads and merge_heads agree on `(B, T, H, Dh)`, and attention reads the "
    "last two dimensions: it mixes the heads of one token, and no token sees another.",
)(
    {
        "split_heads": lambda x, n_heads: x.unflatten(-1, (n_heads, -1)),
        "merge_heads": lambda x: x.flatten(2),
    }
)
masks_and_heads.fault(
    "reshaped_both_ways",
    "split_heads and merge_heads both read memory straight in the final shape, so one "
    "undoes the other. But a head gets some tokens whole, not a part of each.",
)(
    {
        "split_heads": lambda x, n_heads: x.reshape(len(x), n_heads, x.shape[1], -1),
        "merge_heads": lambda x: x.reshape(len(x), x.shape[2], -1),
    }
)
masks_and_heads.fault(
    "heads_shared_in_turn",
    "repeat_kv hands out the shared heads in turn, 0, 1, 0, 1, and the queries from "
    "split_heads expect them for neighbours, 0, 0, 1, 1.",
    (REPEATED, "x.repeat(1, group_size, 1, 1)"),
    edited="repeat_kv",
)
