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
rnn_cell.fault(
    "w_x_transposed",
    "`w_x` is applied transposed, and its sizes do not fit: rows are vectors in this "
    "course, and stand on the left of a matrix.",
    ("w_x", "w_x.T"),
)
rnn_cell.fault(
    "w_x_on_the_left",
    "`w_x` stands on the left of the input. Rows are vectors in this course: the batch "
    "stands on the left, its matrix on the right.",
    ("x @ w_x", "w_x @ x"),
)
rnn_cell.fault("no_bias", "The bias is not added.", (" + b", ""))
rnn_cell.fault(
    "no_state",
    "The old state does not enter. A cell like this forgets everything at each step.",
    (" + h @ w_h", ""),
)
rnn_cell.fault("no_input", "The input `x` does not enter.", ("x @ w_x + ", ""))
rnn_cell.fault(
    "bias_outside",
    "The bias is added after the tanh, so the state can leave the range −1 to 1.",
    (" + b)", ") + b"),
)
rnn_cell.fault(
    "two_tanhs",
    "Input and state go through a tanh each. The tanh belongs around their sum.",
    (SUM, "x @ w_x) + torch.tanh(h @ w_h + b"),
)
rnn_cell.fault(
    "state_not_mixed",
    "The old state is added as it is, without its matrix `w_h`.",
    ("h @ w_h", "h"),
)
rnn_cell.fault(
    "tanh_by_hand",
    "This tanh is built from exponentials. They overflow for large sums, and inf/inf "
    "is NaN.",
    (
        f"return {SQUASHED}",
        f"z = {SUM}\n    return (z.exp() - (-z).exp()) / (z.exp() + (-z).exp())",
    ),
)
rnn_cell.fault(
    "tanh_from_one_exponential",
    "This tanh is built from an exponential that overflows for large sums. The value "
    "is still right, but the gradient is infinity times 0, NaN.",
    (SQUASHED, f"1 - 2 / ((2 * ({SUM})).exp() + 1)"),
)
rnn_cell.fault(
    "joined_in_two_orders",
    "Input and state are joined in one order and their matrices in the other, so that "
    "rows of `w_x` meet numbers of the state. The shapes fit either way.",
    (SUM, "torch.cat([h, x], dim=-1) @ torch.cat([w_x, w_h]) + b"),
)
rnn_cell.fault(
    "state_detached",
    "The old state is cut from the graph. Then no step can learn what it should have "
    "kept for a later one.",
    ("h @", "h.detach() @"),
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
    "The states are `(T, B, H)` in memory and only renamed `(B, T, H)` with view or "
    "reshape. That keeps the order in memory, so the states of different sequences are "
    "mixed up.",
    (STACKED, "torch.stack(states).view(len(x), x.shape[1], -1)"),
)
rnn.fault(
    "input_view_instead_of_transpose",
    "The input is turned into `(T, B, D)` with view or reshape. That renames the "
    "dimensions without moving a number, so steps of different sequences are mixed up.",
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
    "buffer_like_the_input",
    "The states are written into a buffer of the input's shape, `(B, T, D)`. A state "
    "has H numbers.",
    ("h0, []", "h0, torch.zeros_like(x)"),
    ("states.append(h)", "states[:, t] = h"),
    (STACKED, "states"),
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
    "backwards",
    "The sequence is read from its end, so that every state has seen the future.",
    (STEPS, "reversed(range(x.shape[1]))"),
    (STACKED, "torch.stack(states[::-1], dim=1)"),
)
rnn.fault(
    "first_step_repeated",
    "Every step reads the first input. The step number must choose it.",
    ("x[:, t]", "x[:, 0]"),
)
rnn.fault(
    "detached_between_steps",
    "The state is cut from the graph between two steps. The values are right, but no "
    "gradient passes more than one step back, so nothing distant can be learned.",
    ("states.append(h)", "states.append(h)\n        h = h.detach()"),
)
rnn.inherits(
    rnn_cell, "no_tanh", "w_h_transposed", "no_bias", "bias_outside", "state_detached"
)

# lstm_cell ----------------------------------------------------------------------------

SUMS = f"({SUM}).chunk(4, dim=-1)"
MEMORY = "torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)"
SHOWN = "torch.sigmoid(o) * torch.tanh(c)"

lstm_cell.fault(
    "order_ifog",
    "The last two blocks are exchanged: this is i, f, o, g. Here the candidate g comes "
    "third and the output gate last.",
    ("i, f, g, o", "i, f, o, g"),
)
lstm_cell.fault(
    "order_figo",
    "Input and forget gate are exchanged: the first block is i, the second f.",
    ("i, f, g, o", "f, i, g, o"),
)
lstm_cell.fault(
    "order_fiog",
    "The blocks are taken as f, i, o, g, the order in which many texts list the gates. "
    "Here it is i, f, g, o.",
    ("i, f, g, o", "f, i, o, g"),
)
lstm_cell.fault(
    "interleaved",
    "The gates are taken from every fourth column. They are four blocks, each of H "
    "columns side by side.",
    (".chunk(4, dim=-1)", ".unflatten(-1, (-1, 4)).unbind(-1)"),
)
lstm_cell.fault(
    "blocks_of_four",
    "More than four blocks come out: `split(4)`, for one, cuts blocks of four columns. "
    "Four blocks are asked for, of H columns each: `chunk` takes their number.",
    ("chunk", "split"),
)
lstm_cell.fault(
    "cut_along_the_batch",
    "The sums are cut along the first dimension, the batch, as unpacking a tensor does "
    "too. The four blocks stand side by side in the last one: say so with `dim`.",
    (", dim=-1", ""),
)
lstm_cell.fault(
    "blocks_by_view",
    "The sums are renamed `(4, B, H)` with view or reshape. That keeps the order in "
    "memory, where the four blocks of one row follow each other, so gates and "
    "sequences are mixed up.",
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
    (f"c = {MEMORY}\n    return {SHOWN}, c", f"return {SHOWN}, {MEMORY}"),
)
lstm_cell.fault(
    "h_without_tanh",
    "h is the memory times the output gate, without the tanh that keeps it within −1 "
    "and 1.",
    ("torch.tanh(c)", "c"),
)
lstm_cell.fault(
    "output_gate_inside",
    "The output gate is multiplied before the tanh. It stands outside: o · tanh(c).",
    (SHOWN, "torch.tanh(torch.sigmoid(o) * c)"),
)
lstm_cell.fault(
    "candidate_sigmoid",
    "The candidate g goes through a sigmoid. It is what is written, not how much, and "
    "must be able to be negative: tanh.",
    ("torch.tanh(g)", "torch.sigmoid(g)"),
)
lstm_cell.fault(
    "candidate_linear",
    "The candidate g is written without its tanh.",
    ("torch.tanh(g)", "g"),
)
lstm_cell.fault(
    "memory_squashed",
    "The memory itself is squashed by the tanh at each step. Only what is shown is; "
    "the memory is carried on as it is, which is what lets a gradient through.",
    (f"{SHOWN}, c", f"{SHOWN}, torch.tanh(c)"),
)
lstm_cell.fault(
    "no_forget_gate",
    "The old memory is kept in full: the forget gate is missing. The LSTM of 1997 was "
    "like that; the gate came in 2000.",
    ("torch.sigmoid(f) * c", "c"),
)
lstm_cell.fault(
    "no_input_gate",
    "The candidate is written in full: the input gate, which says how much of it, is "
    "missing.",
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
lstm_cell.fault(
    "sigmoid_by_hand",
    "The sigmoid is built from an exponential. Far below zero that overflows: the "
    "value is still right, its gradient is NaN.",
    (MEMORY, "1 / (1 + (-f).exp()) * c + 1 / (1 + (-i).exp()) * torch.tanh(g)"),
    ("torch.sigmoid(o)", "1 / (1 + (-o).exp())"),
)
lstm_cell.fault(
    "memory_detached",
    "The memory is cut from the graph. It is the very path on which a gradient travels "
    "far.",
    ("torch.sigmoid(f) * c", "torch.sigmoid(f) * c.detach()"),
)

# gradient_reach -----------------------------------------------------------------------

LAST = "layer(x)[:, -1].sum()"
REACH = "gradient.norm(dim=-1).mean(dim=0)"

gradient_reach.fault(
    "tuple_not_unpacked",
    "`torch.autograd.grad` returns a tuple, one gradient for each input that it was "
    "asked about, and a tuple has no norm. Take the gradient out of it.",
    ("(gradient,)", "gradient"),
)
gradient_reach.fault(
    "x_not_marked",
    "Nothing asks for gradients where the layer runs, so no graph is recorded and "
    "there is nothing to go back through. `detach()` gives a tensor without history, "
    "which does not ask yet: mark it before it goes into the layer.",
    (".requires_grad_()", ""),
)
gradient_reach.fault(
    "not_added_up",
    "What is differentiated, the first argument of `torch.autograd.grad`, has many "
    "numbers; it must be a single one. Add up the last output, over the batch and the "
    "features.",
    (".sum()", ""),
)
gradient_reach.fault(
    "all_outputs",
    "The outputs of all steps are added up. Then every step reaches itself, and the "
    "distance does not show: only the last output is asked for.",
    ("[:, -1]", ""),
)
gradient_reach.fault(
    "first_output",
    "The first output is taken instead of the last: it cannot depend on what comes "
    "later.",
    ("[:, -1]", "[:, 0]"),
)
gradient_reach.fault(
    "last_sequence",
    "The last sequence of the batch is taken, `[-1]`, instead of the last step of "
    "each.",
    ("[:, -1]", "[-1]"),
)
gradient_reach.fault(
    "mean_of_last",
    "The gradient is that of a mean over the batch and its features. `sum()` is asked "
    "for; the average over the batch is taken of the norms, at the end.",
    (".sum()", ".mean()"),
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
gradient_reach.fault(
    "norm_over_time",
    "The norm is taken over time, so there is one number for each feature. It is taken "
    "over the features, for each step.",
    ("norm(dim=-1)", "norm(dim=1)"),
)
gradient_reach.fault(
    "root_after_the_mean",
    "The squares are averaged over the batch and the root is taken last. The average "
    "is one of norms, so the root comes first.",
    (REACH, "gradient.square().sum(dim=-1).mean(dim=0).sqrt()"),
)
gradient_reach.fault(
    "eval_mode",
    "The layer is put into eval mode. It is the caller's, and is measured in the mode "
    "that it is in.",
    ("layer(x)", "(layer.eval() if isinstance(layer, nn.Module) else layer)(x)"),
)

# RNNLanguageModel ---------------------------------------------------------------------

SCALE = " / d_model**0.5"
ORTHOGONAL = "nn.init.orthogonal_(torch.empty(d_hidden, d_hidden))"
START = "x.new_zeros(len(ids), len(self.b))"
NORMAL = "torch.randn(d_hidden, d_hidden)"

RNNLanguageModel.fault(
    "last_only",
    "Logits come back for the last token only. In training every token predicts the "
    "one after it.",
    ("self.head(states)", "self.head(states[:, -1])"),
)
RNNLanguageModel.fault(
    "probabilities",
    "The logits go through a softmax. The loss of lesson 09 takes one itself, and two "
    "of them flatten the gradient.",
    ("self.head(states)", "self.head(states).softmax(-1)"),
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
RNNLanguageModel.fault(
    "w_h_unscaled",
    "`w_h` starts too large, with a standard deviation of 1 for instance. Each state "
    "is then a sum of H numbers of that size, the tanh saturates, and its gradient is "
    "gone from the start.",
    (ORTHOGONAL, NORMAL),
)
RNNLanguageModel.fault(
    "w_h_too_small",
    "`w_h` starts too small. The next state then keeps next to nothing of the last "
    "one, and the gradient fades within a step or two. Which size gives a sum of H "
    "numbers the size of one of them?",
    (ORTHOGONAL, f"0.01 * {NORMAL}"),
)
RNNLanguageModel.fault(
    "w_h_scale_fixed",
    "`w_h` starts at a scale that does not fall as H grows. Each number of the next "
    "state is a sum over H numbers, so the scale must fall with the root of H.",
    (ORTHOGONAL, f"0.22 * {NORMAL}"),
)
RNNLanguageModel.fault(
    "w_x_unscaled",
    "`w_x` starts too large, with a standard deviation of 1 for instance. The sum over "
    "the D numbers of a token is then much larger than one of them, and the tanh "
    "saturates.",
    (SCALE, ""),
)
RNNLanguageModel.fault(
    "w_x_too_small",
    "`w_x` starts too small, so that a token hardly moves the state. Which size gives "
    "a sum of D numbers the size of one of them?",
    (SCALE, " / 100"),
)
RNNLanguageModel.fault(
    "w_x_scale_not_of_d_model",
    "The scale of `w_x` does not fall enough as D grows. A sum over the D numbers of a "
    "token grows with the root of D, so it is D that counts, not H.",
    (SCALE, SCALE.replace("d_model", "d_hidden")),
)
RNNLanguageModel.fault(
    "w_x_divided_by_d_model",
    "`w_x` starts smaller and smaller as D grows: divided by D itself, for instance. A "
    "sum of D numbers grows with the root of D.",
    (SCALE, " / d_model"),
)
RNNLanguageModel.fault(
    "head_unscaled",
    "`head` starts too large, with a standard deviation of 1 for instance. Each logit "
    "is a sum over H numbers, so a new model is sure of what it cannot know. "
    "`nn.Linear` starts at a size that fits.",
    ("bias=False)", "bias=False)\n        nn.init.normal_(self.head.weight)"),
)
RNNLanguageModel.inherits(
    rnn, "states_before", "backwards", "always_from_h0", "detached_between_steps"
)
