"""Lesson 01: mistakes in the cells, the sequence, the reach, and the language model."""

from utils.exercises.rnn_baseline import (
    RNNLanguageModel,
    gradient_reach,
    lstm_cell,
    rnn,
    rnn_cell,
)

# rnn_cell -----------------------------------------------------------------------------

SUM = "x @ w_x + h @ w_h + b"
SQUASHED = f"torch.tanh({SUM})"

rnn_cell.fault(
    "no_tanh",
    "The sum is returned as it is. Without the tanh the state is not bounded, and any "
    "number of steps is one linear map.",
    (SQUASHED, SUM),
)
rnn_cell.fault(
    "w_h_transposed",
    "`w_h` is applied transposed. It is square, so the shapes cannot tell: rows are "
    "vectors in this course, and stand on the left of a matrix.",
    ("w_h", "w_h.T"),
)
rnn_cell.fault("no_bias", "The bias is not added.", (" + b", ""))
rnn_cell.fault("no_state", "The old state does not enter.", (" + h @ w_h", ""))
rnn_cell.fault("no_input", "The input `x` does not enter.", ("x @ w_x + ", ""))
rnn_cell.fault(
    "bias_outside",
    "The bias is added after the tanh, so the state can leave the range −1 to 1.",
    (" + b)", ") + b"),
)
rnn_cell.fault(
    "state_not_mixed",
    "The old state is added as it is, without its matrix `w_h`.",
    ("h @ w_h", "h"),
)

# rnn ----------------------------------------------------------------------------------

STEPS = "range(x.shape[1])"
STACKED = "torch.stack(states, dim=1)"

rnn.fault(
    "last_state_only",
    "Only the last state comes back. Every state is asked for: a language model "
    "predicts after each token.",
    (STACKED, "h"),
)
rnn.fault(
    "view_instead_of_transpose",
    "The states are `(T, B, H)` in memory and only renamed `(B, T, H)`: view and "
    "reshape keep the order in memory, so the states of different sequences are mixed.",
    (STACKED, "torch.stack(states).view(len(x), x.shape[1], -1)"),
)
rnn.fault(
    "input_view_instead_of_transpose",
    "The input is only renamed `(T, B, D)`: view and reshape move no number, so steps "
    "of different sequences are mixed up.",
    (f"t in {STEPS}", "step in x.reshape(x.shape[1], len(x), -1)"),
    ("x[:, t]", "step"),
)
rnn.fault(
    "sequences_taken_for_steps",
    "A step takes one sequence with all its inputs, `x[t]`: the first dimension of `x` "
    "counts sequences. The cell needs one input of every sequence at each step.",
    (f"t in {STEPS}", "each in x"),
    ("x[:, t]", "each"),
)
rnn.fault(
    "h0_ignored",
    "The first step starts from zeros, whatever `h0` says.",
    ("= h0, []", "= h0 * 0, []"),
)
rnn.fault(
    "always_from_h0",
    "Every step starts from `h0`. The state of the step before must go in, or nothing "
    "is remembered.",
    ("x[:, t], h,", "x[:, t], h0,"),
)
rnn.fault(
    "states_before",
    "The state *before* each step is returned: `h0` stands first and the last state is "
    "missing.",
    ("h0, []", "h0, [h0]"),
    (STACKED, "torch.stack(states[:-1], dim=1)"),
)
rnn.fault(
    "h0_for_the_first_step",
    "`h0` stands where the state after the first step should, and the first input is "
    "never read. `h0` is the state before that step.",
    ("h0, []", "h0, [h0]"),
    (STEPS, "range(1, x.shape[1])"),
)
rnn.fault(
    "detached_between_steps",
    "The state is cut from the graph between two steps: the values are right, but no "
    "gradient passes, so nothing distant can be learned.",
    ("states.append(h)", "states.append(h)\n        h = h.detach()"),
)
rnn.inherits(rnn_cell, "no_tanh", "w_h_transposed", "no_bias", "bias_outside")

# lstm_cell ----------------------------------------------------------------------------

SHOWN = "torch.sigmoid(o) * torch.tanh(c)"

for order in ("i, f, o, g", "f, i, g, o", "f, i, o, g"):
    lstm_cell.fault(
        f"order_{order.replace(', ', '')}",
        f"The blocks are taken as {order}. Here the order is i, f, g, o: input gate, "
        "forget gate, candidate, output gate.",
        ("i, f, g, o", order),
    )
lstm_cell.fault(
    "cut_along_the_batch",
    "The sums are cut along the first dimension, the batch, as unpacking a tensor does "
    "too. The four blocks stand side by side in the last one: say so with `dim`.",
    (", dim=-1", ""),
)
lstm_cell.fault(
    "blocks_by_view",
    "The sums are only renamed `(4, B, H)`: view and reshape keep the order in memory, "
    "row by row, so gates and sequences are mixed up.",
    (".chunk(4, dim=-1)", ".view(4, len(x), -1)"),
)
lstm_cell.fault(
    "swapped",
    "The memory c is returned first. The order is `(h, c)`.",
    (f"{SHOWN}, c", f"c, {SHOWN}"),
)
lstm_cell.fault(
    "h_from_old_memory",
    "h is computed from the memory before the step. It shows the new one.",
    ("c = torch.sigmoid(f) * c", "old, c = c, torch.sigmoid(f) * c"),
    ("torch.tanh(c)", "torch.tanh(old)"),
)
lstm_cell.fault(
    "h_without_tanh",
    "h is the memory times the output gate, without the tanh that keeps it within −1 "
    "and 1.",
    ("torch.tanh(c)", "c"),
)
lstm_cell.fault(
    "candidate_sigmoid",
    "The candidate g goes through a sigmoid. It is what is written, not how much, and "
    "must be able to be negative: tanh.",
    ("torch.tanh(g)", "torch.sigmoid(g)"),
)
lstm_cell.fault(
    "memory_squashed",
    "The memory itself is squashed by the tanh at each step. Only what is shown is: "
    "the memory is carried on as it is, which lets a gradient through.",
    (f"{SHOWN}, c", f"{SHOWN}, torch.tanh(c)"),
)
lstm_cell.fault(
    "no_forget_gate",
    "The old memory is kept in full: the forget gate is missing.",
    ("torch.sigmoid(f) * c", "c"),
)
lstm_cell.fault(
    "no_input_gate",
    "The candidate is written in full: the input gate is missing.",
    ("torch.sigmoid(i) * ", ""),
)
lstm_cell.fault(
    "forget_inverted",
    "The forget gate is read the wrong way round. At 1 it keeps the memory, in spite "
    "of its name.",
    ("torch.sigmoid(f)", "(1 - torch.sigmoid(f))"),
)
lstm_cell.fault("no_bias", "The bias is not added.", (" + b", ""))
lstm_cell.fault("no_state", "The old h does not enter the gates.", (" + h @ w_h", ""))
lstm_cell.fault(
    "state_is_memory",
    "The memory c is multiplied with `w_h` in the place of h. The gates see what was "
    "shown, not the memory.",
    ("h @ w_h", "c @ w_h"),
)

# gradient_reach -----------------------------------------------------------------------

REACH = "gradient.norm(dim=-1).mean(dim=0)"

gradient_reach.fault(
    "tuple_not_unpacked",
    "`torch.autograd.grad` returns a tuple, one gradient for each input that it was "
    "asked about, and a tuple has no norm. Take the gradient out of it.",
    ("(gradient,)", "gradient"),
)
gradient_reach.fault(
    "all_outputs",
    "The outputs of all steps are added up. Then every step reaches itself, and the "
    "distance does not show: only the last output is asked for.",
    ("[:, -1]", ""),
)
gradient_reach.fault(
    "last_sequence",
    "The last sequence of the batch is taken, `[-1]`, instead of the last step of "
    "each.",
    ("[:, -1]", "[-1]"),
)
gradient_reach.fault(
    "norm_over_the_batch",
    "One norm is taken over batch and features together. It is taken for each sequence "
    "by itself, and these are averaged.",
    (REACH, "gradient.norm(dim=(0, 2))"),
)
gradient_reach.fault(
    "averaged_before_the_norm",
    "The gradients are averaged over the batch before the norm. Sequences that pull in "
    "opposite directions then cancel.",
    (REACH, "gradient.mean(dim=0).norm(dim=-1)"),
)

# RNNLanguageModel ---------------------------------------------------------------------

SCALE = " / d_model**0.5"
ORTHOGONAL = "nn.init.orthogonal_(torch.empty(d_hidden, d_hidden))"

RNNLanguageModel.fault(
    "last_only",
    "Logits come back for the last token only. In training every token predicts the "
    "one after it.",
    ("self.head(states)", "self.head(states[:, -1])"),
)
RNNLanguageModel.fault(
    "scaled_after_wrapping",
    "`w_x` and `w_h` are plain tensors. So is the result of `nn.Parameter(…) / …`: "
    "what is computed from a parameter is none. Scale first, then wrap.",
    (f"{SCALE})", f"){SCALE}"),
    (f"nn.Parameter({ORTHOGONAL})", f"nn.Parameter({ORTHOGONAL}) * 1"),
)
RNNLanguageModel.fault(
    "batch_and_time_exchanged",
    "The RNN runs over the batch instead of over time: the first dimension of `ids` "
    "counts sequences.",
    ("self.embedding(ids)", "self.embedding(ids.T)"),
    ("len(ids)", "len(x)"),
    ("self.head(states)", "self.head(states.transpose(0, 1))"),
)
RNNLanguageModel.fault(
    "integer_start",
    "The first state is made from `ids`, so it holds integers as they do. Make it from "
    "something of the weights' dtype: the embedded tokens, or a parameter.",
    ("x.new_zeros", "ids.new_zeros"),
)
RNNLanguageModel.inherits(
    rnn, "states_before", "always_from_h0", "detached_between_steps"
)
