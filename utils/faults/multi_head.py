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
DEALT = "x.unflatten(-1, (-1, n_heads)).permute(0, 3, 1, 2)"
STRAIGHT = "x.reshape(len(x), n_heads, x.shape[1], -1)"

split_heads.fault(
    "reshaped_straight",
    "The memory is read in the final shape without exchanging dimensions. A row's "
    "columns lie side by side in memory, so head 0 gets whole tokens of the first part "
    "of the sequence instead of a part of every token.",
    (SPLIT, STRAIGHT),
)
split_heads.fault(
    "not_transposed",
    "The heads stand behind the time: `(B, T, H, Dh)`. Attention works on the last two "
    "dimensions, so it would mix the heads of one token instead of the tokens of one "
    "head.",
    (".transpose(1, 2)", ""),
)
split_heads.fault(
    "batch_and_time_exchanged",
    "Batch and time have changed places: `(T, B, H, Dh)`. The batch stays where it is; "
    "what should stand in front of the time are the heads.",
    (".transpose(1, 2)", ".transpose(0, 1)"),
)
split_heads.fault(
    "every_other_column",
    "The columns are dealt out like cards: head 0 gets the columns 0, H, 2H, … A head "
    "is a run of neighbouring columns; cut the width into (heads, d_head), in that "
    "order.",
    (SPLIT, DEALT),
)
split_heads.fault(
    "heads_and_batch_exchanged",
    "The heads are made by a view that starts from the batch: its rows are mixed, and "
    "what belongs to one sequence ends up in another. With one row a batch it hides.",
    (SPLIT, f"{SPLIT}.reshape(n_heads, len(x), x.shape[1], -1).transpose(0, 1)"),
)
split_heads.fault(
    "n_heads_taken_for_d_head",
    "Each head is `n_heads` wide. `n_heads` is how many heads there are; their width "
    "is what remains of the columns for each.",
    ("(n_heads, -1)", "(-1, n_heads)"),
)
split_heads.fault(
    "split_along_time",
    "The sequence is cut into pieces, and each head gets some positions. Every head "
    "sees every position, and some columns of each.",
    (SPLIT, "x.unflatten(1, (n_heads, -1))"),
)

# merge_heads --------------------------------------------------------------------------

MERGED = "x.transpose(1, 2).flatten(2)"
COLLECTED = "x.permute(0, 2, 3, 1).flatten(2)"

merge_heads.fault(
    "not_transposed_back",
    "The memory is read in the final shape while the heads still stand before the "
    "time. Each row of the result then holds several positions of one head instead of "
    "one position of every head. With one head or one position it hides.",
    (MERGED, "x.reshape(x.shape[0], x.shape[2], -1)"),
)
merge_heads.fault(
    "columns_interleaved",
    "The columns of the heads alternate: head 0's first, head 1's first, … Each head's "
    "columns stay together.",
    (MERGED, COLLECTED),
)
merge_heads.fault(
    "heads_and_batch_exchanged",
    "The heads are joined with the rows of the batch, so that sequences are mixed. "
    "With one row a batch it hides.",
    (
        MERGED,
        "x.reshape(x.shape[1], len(x), *x.shape[2:]).permute(1, 2, 0, 3).flatten(2)",
    ),
)
merge_heads.fault(
    "only_flattened",
    "Time and columns are joined, and the heads are still a dimension of their own: "
    "`(B, H, T·Dh)`. Heads and columns belong together, so they have to be neighbours "
    "first.",
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
repeat_kv.fault(
    "repeated_along_the_batch",
    "The rows of the batch are repeated instead of the heads.",
    ("dim=1", "dim=0"),
)
repeat_kv.fault(
    "repeated_along_time",
    "Every position is repeated instead of every head: the sequence has become longer.",
    ("dim=1", "dim=2"),
)
repeat_kv.fault(
    "no_dimension_given",
    "Without a dimension, repeating flattens the whole tensor.",
    (", dim=1", ""),
)
repeat_kv.fault(
    "group_size_taken_for_the_total",
    "There are `group_size` heads in all afterwards. It is the number of query heads "
    "that share each head.",
    ("group_size", "group_size // x.shape[1]"),
)

# MultiHeadAttention: projections ------------------------------------------------------

Q = "q = split_heads(self.w_q(x), self.n_heads)"
K = "k = split_heads(self.w_k(x), self.n_kv_heads)"
V = "v = split_heads(self.w_v(x), self.n_kv_heads)"
LOOK = "attention(q, k, v, mask)"
MIXED = f"merge_heads({LOOK})"
SHARED = "k, v = repeat_kv(k, group_size), repeat_kv(v, group_size)"
D_HEAD = "d_model // n_heads if d_head is None else d_head"

MultiHeadAttention.fault(
    "no_output_projection",
    "w_o is made and never used. Without it the heads lie side by side and nothing "
    "mixes what they found.",
    (f"self.w_o({MIXED})", MIXED),
)
MultiHeadAttention.fault(
    "kv_not_narrowed",
    "w_k and w_v are as wide as w_q. With fewer key and value heads they are narrower: "
    "that is what sharing saves.",
    ("w_k = nn.Linear(d_model, n_kv_heads", "w_k = nn.Linear(d_model, n_heads"),
    ("w_v = nn.Linear(d_model, n_kv_heads", "w_v = nn.Linear(d_model, n_heads"),
)
MultiHeadAttention.fault(
    "group_size_for_kv_heads",
    "`n_kv_heads` is taken for the size of a group. It is the number of key and value "
    "heads; a group is n_heads // n_kv_heads query heads.",
    ("None else n_kv_heads", "None else n_heads // n_kv_heads"),
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
MultiHeadAttention.fault(
    "given_d_head_refused",
    "A d_model is refused although `d_head` is given. Then d_model may be any number, "
    "whatever the heads are.",
    ("d_head is None and d_model % n_heads", "d_model % n_heads"),
)
MultiHeadAttention.fault(
    "divided_the_wrong_way_round",
    "The number of key and value heads is tested for being a multiple of the query "
    "heads. It is the other way round: several query heads share one.",
    ("if n_heads % n_kv_heads", "if n_kv_heads % n_heads"),
)
MultiHeadAttention.fault(
    "keys_and_values_exchanged",
    "w_k makes the values and w_v the keys. Trained from the start it would work; with "
    "weights loaded by name it does not.",
    (K, K.replace("k =", "v =")),
    (V, V.replace("v =", "k =")),
)
MultiHeadAttention.fault(
    "queries_and_keys_exchanged",
    "w_k makes the queries and w_q the keys, so every weight stands on the wrong side "
    "of the diagonal.",
    (Q, Q.replace("w_q", "w_k")),
    (K, K.replace("w_k", "w_q")),
)
MultiHeadAttention.fault(
    "queries_compared_with_queries",
    "The queries are compared with themselves; w_k plays no part.",
    (K, K.replace("w_k", "w_q")),
)
MultiHeadAttention.fault(
    "keys_compared_with_keys",
    "The keys are compared with themselves; w_q plays no part.",
    (Q, Q.replace("w_q", "w_k")),
)
MultiHeadAttention.fault(
    "queries_averaged",
    "The queries are averaged in place of the values; w_v plays no part.",
    (V, V.replace("w_v", "w_q")),
)
MultiHeadAttention.fault(
    "input_taken_for_values",
    "x itself is averaged; w_v plays no part.",
    (V, V.replace("self.w_v(x)", "x")),
)
MultiHeadAttention.fault(
    "values_not_projected",
    "The values are keys: w_v plays no part.",
    (V, V.replace("w_v", "w_k")),
)

# MultiHeadAttention: heads ------------------------------------------------------------

MultiHeadAttention.fault(
    "scaled_by_d_model",
    "The scores are divided by √d_model. Each head's dot products run over d_head "
    "columns; with one head both are the same, and it hides.",
    (LOOK, "attention(q * (q.shape[-1] / x.shape[-1]) ** 0.5, k, v, mask)"),
)
MultiHeadAttention.fault(
    "scaled_by_all_heads",
    "The scores are divided by the root of n_heads·d_head, the width of all heads. "
    "Each head's dot products run over d_head columns.",
    (LOOK, "attention(q / self.n_heads ** 0.5, k, v, mask)"),
)
MultiHeadAttention.fault(
    "scaled_by_the_length",
    "The scores are divided by the root of the number of positions. They sum over the "
    "d_head numbers of queries and keys, so it is d_head that counts.",
    (LOOK, "attention(q * (q.shape[-1] / x.shape[1]) ** 0.5, k, v, mask)"),
)
MultiHeadAttention.fault(
    "scaled_twice",
    "The scores are divided by √d_head twice: `attention` already does it.",
    (LOOK, "attention(q / q.shape[-1] ** 0.5, k, v, mask)"),
)
MultiHeadAttention.fault(
    "not_scaled",
    "The scores are not divided by √d_head.",
    (LOOK, "attention(q * q.shape[-1] ** 0.5, k, v, mask)"),
)
MultiHeadAttention.fault(
    "merged_without_transposing",
    "The heads are merged while they still stand before the time, so each row holds "
    "several positions of one head.",
    (MIXED, f"{LOOK}.reshape(*x.shape[:2], -1)"),
)
MultiHeadAttention.fault(
    "split_without_transposing",
    "The heads are read out of memory in the final shape, without exchanging "
    "dimensions: a head gets some tokens whole, instead of a part of each.",
    (SPLIT, STRAIGHT),
    edited="split_heads",
)
MultiHeadAttention.fault(
    "reshaped_both_ways",
    "Split and merge each read memory in the final shape, without exchanging "
    "dimensions. The shapes are right and the stream comes back, but a head gets some "
    "tokens whole, instead of a part of each.",
    (Q, "q = self.w_q(x).view(len(x), self.n_heads, x.shape[1], -1)"),
    (K, "k = self.w_k(x).view(len(x), self.n_kv_heads, x.shape[1], -1)"),
    (V, "v = self.w_v(x).view(len(x), self.n_kv_heads, x.shape[1], -1)"),
    (MIXED, f"{LOOK}.reshape(*x.shape[:2], -1)"),
)
MultiHeadAttention.fault(
    "heads_mixed_instead_of_tokens",
    "The heads stand behind the time, so attention mixes the heads of one token and no "
    "token ever sees another.",
    (LOOK, "attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)"),
)
MultiHeadAttention.fault(
    "columns_interleaved",
    "The columns are dealt out to the heads like cards. A head is a run of "
    "neighbouring columns; loaded weights rely on it.",
    (SPLIT, DEALT),
    edited="split_heads",
)
MultiHeadAttention.fault(
    "merged_interleaved",
    "The results of the heads are mixed column by column: the first column of each, "
    "then the second. They lie side by side, head 0 first; w_o counts on it.",
    (MERGED, COLLECTED),
    edited="merge_heads",
)
MultiHeadAttention.fault(
    "interleaved_both_ways",
    "The columns are dealt out to the heads like cards and collected in the same way. "
    "Trained from the start it would work; loaded weights count on a head being a run "
    "of neighbouring columns.",
    (Q, "q = self.w_q(x).unflatten(-1, (-1, self.n_heads)).permute(0, 3, 1, 2)"),
    (K, "k = self.w_k(x).unflatten(-1, (-1, self.n_kv_heads)).permute(0, 3, 1, 2)"),
    (V, "v = self.w_v(x).unflatten(-1, (-1, self.n_kv_heads)).permute(0, 3, 1, 2)"),
    (MIXED, f"{LOOK}.permute(0, 2, 3, 1).flatten(2)"),
)
MultiHeadAttention.fault(
    "no_heads",
    "Nothing is split: one look of full width, whatever n_heads says.",
    (MIXED, "attention(self.w_q(x), self.w_k(x), self.w_v(x), mask)"),
)
MultiHeadAttention.inherits(split_heads, "heads_and_batch_exchanged")
MultiHeadAttention.fault(
    "softmax_over_queries",
    "The softmax runs over the queries. It runs over the keys, the last dimension.",
    (LOOK, "(q @ k.mT / q.shape[-1] ** 0.5).softmax(-2) @ v"),
)
MultiHeadAttention.fault(
    "kv_tiled",
    "The key and value heads come in turn, 0, 1, 0, 1, where neighbouring query heads "
    "must share: 0, 0, 1, 1. It hides where every head is its own and where one serves "
    "all.",
    (REPEATED, "x.repeat(1, group_size, 1, 1)"),
    edited="repeat_kv",
)
MultiHeadAttention.fault(
    "repeated_n_kv_heads_times",
    "Each head is repeated n_kv_heads times. It serves n_heads // n_kv_heads query "
    "heads, the size of a group; where nothing is shared, that is one.",
    ("self.n_heads // self.n_kv_heads", "self.n_kv_heads"),
)
MultiHeadAttention.fault(
    "repeated_n_heads_times",
    "Each key and value head is repeated n_heads times. It serves the query heads of "
    "its group alone, n_heads // n_kv_heads of them; where nothing is shared, that is "
    "one.",
    ("self.n_heads // self.n_kv_heads", "self.n_heads"),
)
MultiHeadAttention.fault(
    "kv_not_repeated",
    "Keys or values are not repeated, so the number of their heads does not match that "
    "of the queries.",
    (SHARED, ""),
)

# MultiHeadAttention: masks ------------------------------------------------------------

SIZE = "len(x), 1, x.shape[1], x.shape[1]"
BLIND = "~mask.any(-1, keepdim=True)"

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
MultiHeadAttention.fault(
    "masked_after_the_softmax",
    "The mask sets weights to 0 after the softmax, so that the rest no longer sums to "
    "1. Masked scores must be left out of the softmax.",
    (
        "attention_weights(q, k, mask)",
        "attention_weights(q, k) * (1 if mask is None else mask)",
    ),
    edited="attention",
)
MultiHeadAttention.fault(
    "always_causal",
    "Later positions are hidden although no mask was given. Who calls it decides.",
    (LOOK, "attention(q, k, v, x.new_ones(x.shape[1], x.shape[1]).tril().bool())"),
)
MultiHeadAttention.fault(
    "masks_tiled",
    "Heads and batch are one dimension, and the masks are repeated in the wrong order "
    "along it: a row gets another row's mask. It hides with one row, and where all "
    "masks are equal.",
    (
        SHARED,
        f"{SHARED}\n        if mask is not None:\n"
        f"            tiled = mask.expand({SIZE}).repeat(self.n_heads, 1, 1, 1)\n"
        "            mask = tiled.view(len(x), self.n_heads, *tiled.shape[2:])",
    ),
)
MultiHeadAttention.fault(
    "padding_is_an_average",
    "A query that may look at nothing gets the average of all values, hidden ones "
    "included: the softmax of equal large negative scores is uniform. It must get "
    "zeros.",
    (
        MIXED,
        f"merge_heads({LOOK} if mask is None else "
        f"attention(q.masked_fill({BLIND}, 0), k, v, mask | {BLIND}))",
    ),
)
MultiHeadAttention.fault(
    "nan_in_the_gradient",
    "The result is right, but the gradient is NaN: the weights of a query that may "
    "look at nothing are NaN, and only the output is put in order. The values get "
    "their gradient through the weights, so overwrite those.",
    (
        "attention_weights(q, k, mask) @ v",
        "attention_weights(q, k) @ v if mask is None else (\n"
        "        (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)\n"
        "        .softmax(-1) @ v\n"
        "    ).nan_to_num(0)",
    ),
    edited="attention",
)
MultiHeadAttention.fault(
    "mask_left_out_in_eval",
    "In eval() the mask is left out. It says who may look at whom in training and "
    "after it alike.",
    (LOOK, "attention(q, k, v, mask if self.training else None)"),
)

# MultiHeadAttention: rotation ---------------------------------------------------------

IF_GIVEN = "if rotate is not None:\n            q, k = rotate(q), rotate(k)"
ROTATED = "q, k = rotate(q), rotate(k)"

MultiHeadAttention.fault(
    "rotate_not_guarded",
    "`rotate` is None when nobody hands one in, and None cannot be called. Ask whether "
    "there is one: `if rotate is not None`.",
    (IF_GIVEN, ROTATED),
)
MultiHeadAttention.fault("rotate_unused", "`rotate` is never called.", (IF_GIVEN, ""))
MultiHeadAttention.fault(
    "only_queries_rotated",
    "Only the queries are rotated. The score must depend on the distance between query "
    "and key, so both are turned by their own position.",
    (ROTATED, "q = rotate(q)"),
)
MultiHeadAttention.fault(
    "only_keys_rotated",
    "Only the keys are rotated. The score must depend on the distance between query "
    "and key, so both are turned by their own position.",
    (ROTATED, "k = rotate(k)"),
)
MultiHeadAttention.fault(
    "values_rotated_too",
    "The values are rotated as well. Positions decide where a query looks; what is "
    "found there stays as it is.",
    (ROTATED, "q, k, v = rotate(q), rotate(k), rotate(v)"),
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
    "The queries and keys are rotated while they are still `(B, T, H, Dh)`. The "
    "rotation takes the second dimension from the end for the position, which is the "
    "head there.",
    (
        ROTATED,
        "q, k = (rotate(each.transpose(1, 2)).transpose(1, 2) for each in (q, k))",
    ),
)
MultiHeadAttention.fault(
    "input_rotated",
    "The input is rotated instead of the queries and the keys, so the values are "
    "turned too, and all heads as one vector.",
    (IF_GIVEN, ""),
    (Q, f"x = x if rotate is None else rotate(x)\n        {Q}"),
)

# attention_parameters -----------------------------------------------------------------

COUNT = "2 * d_model * d_head * (n_heads + n_kv_heads)"

attention_parameters.fault(
    "four_squares",
    "4·d_model² counts four square matrices. They are square only if the heads fill "
    "d_model and share nothing.",
    (COUNT, "4 * d_model**2"),
)
attention_parameters.fault(
    "sharing_ignored",
    "Keys and values are counted with as many heads as the queries. Shared heads have "
    "fewer weights.",
    ("n_kv_heads", "n_heads"),
)
attention_parameters.fault(
    "no_output_projection",
    "One of w_q and w_o is missing. w_o is the way back from the heads to d_model.",
    (COUNT, "d_model * d_head * (n_heads + 2 * n_kv_heads)"),
)
attention_parameters.fault(
    "biases_counted",
    "Biases are counted. These layers have none.",
    (COUNT, f"{COUNT} + (n_heads + 2 * n_kv_heads) * d_head + d_model"),
)
attention_parameters.fault(
    "keys_or_values_forgotten",
    "Keys and values are counted once. Each has a matrix of its own.",
    (COUNT, "d_model * d_head * (2 * n_heads + n_kv_heads)"),
)
attention_parameters.fault(
    "keys_and_values_forgotten",
    "Two of the four matrices are counted, as wide as w_q and w_o. w_k and w_v are "
    "missing.",
    (" + n_kv_heads", ""),
)
attention_parameters.fault(
    "all_narrowed",
    "All four matrices are counted with n_kv_heads. w_q and w_o have n_heads.",
    ("n_heads + n_kv_heads", "2 * n_kv_heads"),
)
attention_parameters.fault(
    "d_head_ignored",
    "d_head is taken to be d_model / n_heads. It is a number of its own.",
    ("d_head", "(d_model // n_heads)"),
)
attention_parameters.fault(
    "square_output",
    "w_o is counted as d_model × d_model. It leads from n_heads·d_head to d_model.",
    (COUNT, "d_model * d_head * (n_heads + 2 * n_kv_heads) + d_model**2"),
)
attention_parameters.fault(
    "group_size_for_kv_heads",
    "The size of a group, n_heads // n_kv_heads, stands where the number of key and "
    "value heads should.",
    ("n_kv_heads", "n_heads // n_kv_heads"),
)

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
    "rows_are_keys",
    "causal_mask has the keys down and the queries across, and attention takes rows "
    "for queries.",
    (SEEN, f"{SEEN}.T"),
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
    "split_heads and merge_heads agree with each other on reading memory straight in "
    "the final shape, so one undoes the other. But a head gets some tokens whole then, "
    "instead of a part of each.",
)(
    {
        "split_heads": lambda x, n_heads: x.reshape(len(x), n_heads, x.shape[1], -1),
        "merge_heads": lambda x: x.reshape(len(x), x.shape[2], -1),
    }
)
masks_and_heads.fault(
    "merge_does_not_undo_split",
    "split_heads puts the heads before the time, and merge_heads reads the memory as "
    "if they stood behind it. A stream that is split and merged must come back.",
    (MERGED, "x.reshape(x.shape[0], x.shape[2], -1)"),
    edited="merge_heads",
)
masks_and_heads.fault(
    "heads_shared_in_turn",
    "repeat_kv hands out the shared heads in turn, 0, 1, 0, 1, and the queries from "
    "split_heads expect them for neighbours, 0, 0, 1, 1.",
    (REPEATED, "x.repeat(1, group_size, 1, 1)"),
    edited="repeat_kv",
)
