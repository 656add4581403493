"""Lesson 09: mistakes in the loss, batches, the rate, AdamW and clipping."""

from utils.exercises.training import (
    AdamW,
    clip_gradients,
    cross_entropy,
    get_batch,
    learning_rate,
    training,
)

# The loss -----------------------------------------------------------------------------

RIGHT = "logits.gather(-1, targets[..., None])[..., 0]"
PICKED = RIGHT.replace("logits", "logits.softmax(-1)")
LARGEST = "logits.amax(dim=-1, keepdim=True)"
NORMALISER = "logits.exp().sum(dim=-1).log()"

cross_entropy.fault(
    "no_shift",
    "The maximum is not subtracted before exp, which overflows at 89 in float32. Far "
    "below zero the sum is 0, whose logarithm is −inf.",
    (f"logits = logits - {LARGEST}", ""),
)
cross_entropy.fault(
    "shifted_by_the_mean",
    "What is subtracted under the exponential is not the maximum: is it the mean? A "
    "logit that lies far above it still overflows.",
    (LARGEST, "logits.mean(dim=-1, keepdim=True)"),
)
cross_entropy.fault(
    "log_of_probability",
    "First the probability is formed, then its logarithm. A probability below about "
    "1e-45 is 0 in float32 and the loss infinite.",
    (RIGHT, f"{PICKED}.log()"),
    ("normaliser - right", "-right"),
)
cross_entropy.fault(
    "epsilon_in_log",
    "A small constant inside the logarithm hides the probabilities that are 0. It also "
    "limits the loss, and bad tokens get no gradient.",
    (RIGHT, f"({PICKED} + 1e-9).log()"),
    ("normaliser - right", "-right"),
)
cross_entropy.fault(
    "one_shift_for_all",
    "One maximum of the whole tensor is subtracted. A row that lies far below it "
    "underflows: every row needs its own.",
    (LARGEST, "logits.max()"),
)
cross_entropy.fault(
    "shift_half",
    "The maximum is subtracted under the exponential and then forgotten: it must come "
    "back, or be subtracted from the right token's logit too.",
    (f"logits = logits - {LARGEST}", f"shifted = logits - {LARGEST}"),
    (NORMALISER, "shifted.exp().sum(dim=-1).log()"),
)
cross_entropy.fault(
    "softmax_twice",
    "The logits go through a softmax before the loss, which takes one itself. The loss "
    "can then never come near 0.",
    (f"logits - {LARGEST}", "logits.softmax(-1)"),
)
cross_entropy.fault(
    "infinity_times_zero",
    "The right token is picked by multiplying with 0 and 1. A logit of −inf times 0 is "
    "NaN: pick, do not multiply.",
    (RIGHT, "(logits * torch.eye(logits.shape[-1]).to(logits)[targets]).sum(-1)"),
)

# Batches ------------------------------------------------------------------------------

HIGH = "len(data) - t,"
TARGETS = ", pieces[:, 1:]"

get_batch.fault(
    "rolled",
    "The inputs are rolled by one place, so that the last target of each row is its own "
    "first token. What comes after the piece has to be fetched from the text.",
    (TARGETS, ", pieces[:, :-1].roll(-1, 1)"),
)
get_batch.fault(
    "last_start_missing",
    "The last possible start is never drawn: there are N − T of them, and "
    "`torch.randint` leaves out its upper end by itself.",
    (HIGH, "len(data) - t - 1,"),
)
get_batch.fault(
    "past_the_end",
    "A start is drawn that leaves no token after the piece, so the last target does "
    "not exist.",
    (HIGH, "len(data) - t + 1,"),
)
get_batch.fault(
    "without_replacement",
    "No two rows start at one place: the starts are drawn without putting them back. "
    "Each row is independent, and a short text has fewer places than rows.",
    (
        "torch.randint(len(data) - t, (batch_size, 1), generator=generator)",
        "torch.randperm(len(data) - t, generator=generator)[:batch_size, None]",
    ),
)

# The learning rate --------------------------------------------------------------------

FALL = "(1 + math.cos(math.pi * progress)) / 2"

learning_rate.fault(
    "one_step_early",
    "The warm-up counts from 1, so it reaches the peak one step too early. In this "
    "course the first update is step 1, and step 0 has the rate 0.",
    ("peak * step /", "peak * (step + 1) /"),
)
learning_rate.fault(
    "warmup_not_subtracted",
    "The fall counts steps from the very start, so that the rate jumps down when the "
    "warm-up ends.",
    ("(step - warmup_steps) / (total_steps - warmup_steps)", "step / total_steps"),
)
learning_rate.fault(
    "never_reaches_floor",
    "The steps after the warm-up are divided by `total_steps`, so the fall is not "
    "finished at step `total_steps`. It has `total_steps - warmup_steps` steps.",
    ("/ (total_steps - warmup_steps)", "/ total_steps"),
)
learning_rate.fault(
    "linear_fall",
    "The rate falls in a straight line. A cosine is asked for: level at both ends, "
    "steep between.",
    (FALL, "(1 - progress)"),
)
learning_rate.fault(
    "floor_added",
    "The floor is added to a cosine of the full height, so the rate starts above the "
    "peak. The cosine has the height from the floor to the peak.",
    ("(peak - floor)", "peak"),
)
learning_rate.fault(
    "floor_cut",
    "The cosine falls to 0 and is cut off at the floor. It is to end at the floor.",
    (f"floor + (peak - floor) * {FALL}", f"max(floor, peak * {FALL})"),
)

# AdamW --------------------------------------------------------------------------------

LINE = "\n" + 16 * " "
N = ' ** state["n"]'
MEAN_RIGHT = f'mean = state["mean"] / (1 - beta_1{N})'
SQUARE_RIGHT = f'square = state["square"] / (1 - beta_2{N})'
DECAY = 'p.mul_(1 - lr * group["weight_decay"])'
CHANGE = 'p.sub_(lr * mean / (square.sqrt() + group["eps"]))'

AdamW.fault(
    "no_correction",
    "The two means are not corrected. They start at 0, so that the first steps have "
    "the wrong size.",
    (MEAN_RIGHT, 'mean = state["mean"]'),
    (SQUARE_RIGHT, 'square = state["square"]'),
)
AdamW.fault(
    "correction_counts_from_zero",
    "The very first step is NaN: does the step number count from 0, so that the "
    "correction 1 − β⁰ divides by 0?",
    (f"beta_1{N}", 'torch.tensor(beta_1) ** (state["n"] - 1)'),
    (f"beta_2{N}", 'torch.tensor(beta_2) ** (state["n"] - 1)'),
)
AdamW.fault(
    "correction_by_a_product",
    "In the correction β is multiplied by the step number. It is taken to the power of "
    "it: `**`, not `*`.",
    (f"beta_1{N}", 'beta_1 * state["n"]'),
    (f"beta_2{N}", 'beta_2 * state["n"]'),
)
AdamW.fault(
    "corrected_means_kept",
    "The corrected means are kept for the next step and corrected there again. The "
    "correction is for this step alone: keep the means as they are.",
    (MEAN_RIGHT, MEAN_RIGHT.replace("mean =", 'mean = state["mean"] =', 1)),
    (SQUARE_RIGHT, SQUARE_RIGHT.replace("square =", 'square = state["square"] =', 1)),
)
AdamW.fault(
    "betas_exchanged",
    "The two betas are exchanged: the first belongs to the gradient, the second to its "
    "square.",
    ("(beta_1, beta_2) =", "(beta_2, beta_1) ="),
)
AdamW.fault(
    "mean_not_weighted",
    "The new gradient enters the first mean with the weight 1, as in gradient descent "
    "with momentum. Here its weight is 1 − β₁.",
    ("(1 - beta_1) * p.grad", "p.grad"),
)
AdamW.fault(
    "no_root",
    "The mean is divided by the mean square without its root.",
    ("square.sqrt()", "square"),
)
AdamW.fault(
    "no_memory",
    "The means start anew at every step, so only the last gradient counts. Keep them "
    "in `self.state[p]`, and begin with zeros only once.",
    ("if not state:", "if True:"),
)
AdamW.fault(
    "eps_inside_root",
    "eps is added under the root. Adam adds it to the root, outside.",
    ('square.sqrt() + group["eps"]', '(square + group["eps"]).sqrt()'),
)
AdamW.fault(
    "l2_in_gradient",
    "The decay is added to the gradient, which is L2 regularisation. It goes through "
    "both means, so that numbers with large gradients hardly decay.",
    ("(1 - beta_1) * p.grad", "(1 - beta_1) * g"),
    ("p.grad**2", "g**2"),
    ("state = self", f'g = p.grad + group["weight_decay"] * p{LINE}state = self'),
    (DECAY, ""),
)
AdamW.fault(
    "decay_without_lr",
    "The decay is not multiplied with the learning rate, so a schedule does not reach "
    "it.",
    ("1 - lr * group", "1 - group"),
)
AdamW.fault(
    "decay_after",
    "The decay is taken of the parameter after Adam's step, so it shrinks the step "
    "too. It is taken of the old value.",
    (DECAY, ""),
    (CHANGE, f"{CHANGE}{LINE}{DECAY}"),
)
AdamW.fault(
    "vectors_not_decayed",
    "Only matrices decay. Sparing biases and norms is the caller's choice, who makes "
    "groups of parameters for it.",
    ("1 - lr * group", "1 - (p.ndim > 1) * lr * group"),
)
AdamW.fault(
    "one_count_for_all",
    "One step number serves all parameters. One that gets its first gradient late is "
    "at its own step 1, and is corrected for that.",
    ("for group in", "self.n = getattr(self, 'n', 0) + 1\n        for group in"),
    (f"beta_1{N}", "beta_1 ** self.n"),
    (f"beta_2{N}", "beta_2 ** self.n"),
)
AdamW.fault(
    "not_in_place",
    "The parameter itself stays as it was: is a new tensor only bound to a name?",
    (DECAY, f"p = {DECAY.replace('mul_', 'mul')}"),
)

# Clipping -----------------------------------------------------------------------------

LENGTH = "torch.stack([g.norm() for g in gradients]).norm()"
TOO_LONG = "if total > max_norm:"
SHORTENED = "g.mul_(max_norm / total)"

clip_gradients.fault(
    "scales_up",
    "Short gradients are made longer: every step would then have the same length, near "
    "the minimum too.",
    (TOO_LONG, "if total > 0:"),
)
clip_gradients.fault(
    "per_parameter",
    "Every parameter's gradient is clipped by its own length. That turns the whole "
    "gradient: all of them share one length and one factor.",
    (SHORTENED, "g.mul_((max_norm / g.norm()).clamp(max=1))"),
)
clip_gradients.fault(
    "by_value",
    "Every number is cut off at max_norm by itself. That turns the gradient; it is to "
    "become shorter.",
    (SHORTENED, "g.clamp_(-max_norm, max_norm)"),
)
clip_gradients.fault(
    "sum_of_lengths",
    "The lengths of the parts are added up. Lengths of parts add as squares, under a "
    "root.",
    (LENGTH, LENGTH.replace("]).norm()", "]).sum()")),
)
clip_gradients.fault(
    "not_in_place",
    "The gradients stay as they were: are shorter copies made, and dropped?",
    (SHORTENED, "g = g * (max_norm / total)"),
)

# All of it together -------------------------------------------------------------------

training.fault(
    "targets_are_inputs",
    "Inputs and targets are the same tokens, so there is nothing to predict.",
    (TARGETS, ", pieces[:, :-1]"),
    edited="get_batch",
)
training.fault(
    "nothing_moves",
    "The optimizer changes nothing that the model uses.",
    (DECAY, f"p = {DECAY.replace('mul_', 'mul')}"),
    edited="AdamW",
)
