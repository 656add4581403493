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

MEAN = "return (normaliser - right).mean()"
LARGEST = "logits.amax(dim=-1, keepdim=True)"
NORMALISER = "logits.exp().sum(dim=-1).log()"

cross_entropy.fault(
    "sum",
    "The losses are added up. The mean is asked for, or the size of the gradient grows "
    "with the batch.",
    (".mean()", ".sum()"),
)
cross_entropy.fault(
    "sign",
    "The sign is the other way round: training would make the text less likely.",
    ("normaliser - right", "right - normaliser"),
)
cross_entropy.fault(
    "no_shift",
    "exp is taken of the logits as they are. It overflows at 89 in float32, and far "
    "below zero the sum is 0, whose logarithm is −inf.",
    (f"logits = logits - {LARGEST}", ""),
)
cross_entropy.fault(
    "shifted_by_the_mean",
    "The mean is subtracted under the exponential, not the maximum. A logit that lies "
    "far above the mean of its row still overflows.",
    (LARGEST, "logits.mean(dim=-1, keepdim=True)"),
)
cross_entropy.fault(
    "log_of_probability",
    "First the probability is formed, then its logarithm. A probability below about "
    "1e-45 is 0 in float32 and the loss infinite; the logarithm itself is an ordinary "
    "number.",
    (
        MEAN,
        "p = torch.softmax(logits, -1)\n"
        "    return -p.gather(-1, targets[..., None]).log().mean()",
    ),
)
cross_entropy.fault(
    "epsilon_in_log",
    "A small constant inside the logarithm hides the probabilities that are 0. It also "
    "limits the loss, and bad tokens get no gradient.",
    (
        MEAN,
        "p = torch.softmax(logits, -1)\n"
        "    return -(p.gather(-1, targets[..., None]) + 1e-9).log().mean()",
    ),
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
    "last_only",
    "Only the last position's loss counts. Every position predicts.",
    (
        "(normaliser - right)",
        "(normaliser - right)[..., -1 if targets.ndim > 1 else slice(None)]",
    ),
)
cross_entropy.fault(
    "perplexity",
    "This is the perplexity, exp of the loss.",
    (MEAN, f"{MEAN}.exp()"),
)
cross_entropy.fault(
    "infinity_times_zero",
    "The right token is picked by multiplying with 0 and 1. A logit of −inf times 0 is "
    "NaN: pick, do not multiply.",
    (
        "logits.gather(-1, targets[..., None])[..., 0]",
        "(logits * torch.eye(logits.shape[-1]).to(logits)[targets]).sum(-1)",
    ),
)
cross_entropy.fault(
    "sum_detached",
    "The logarithm of the sum is cut from the graph, so that no gradient pushes the "
    "wrong tokens down.",
    (LARGEST, f"{LARGEST}.detach()"),
    (NORMALISER, f"{NORMALISER}.detach()"),
)

# Batches ------------------------------------------------------------------------------

HIGH = "len(data) - t,"
START = "torch.randint(len(data) - t, (batch_size, 1), generator=generator)"
TARGETS = ", pieces[:, 1:]"
CUT = "data[starts + torch.arange(t + 1)]"

get_batch.fault(
    "targets_are_inputs",
    "The targets are the inputs themselves. The model would learn to repeat what it "
    "has just read, with a loss near 0.",
    (TARGETS, ", pieces[:, :-1]"),
)
get_batch.fault(
    "rolled",
    "The inputs are rolled by one place, so that the last target of each row is the "
    "row's own first token. The token after the piece has to be fetched from the text.",
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
    "anywhere",
    "The starts are drawn from the whole text, without room for a piece behind them.",
    (HIGH, "len(data),"),
)
get_batch.fault(
    "one_start",
    "All rows are the same piece: one start is drawn for the whole batch.",
    (START, f"{START}[:1].expand(batch_size, 1)"),
)
get_batch.fault(
    "not_consecutive",
    "Every token is drawn by itself. A row must be a piece of the text, or there is "
    "nothing to predict.",
    ("(batch_size, 1)", "(batch_size, t)"),
    (CUT, "torch.cat([data[starts], data[starts[:, -1:] + 1]], 1)"),
    (TARGETS, ", data[starts + 1]"),
)
get_batch.fault(
    "without_replacement",
    "No two rows start at one place: the starts are drawn without putting them back. "
    "Each row is to be independent of the others, and a short text has fewer places "
    "than rows.",
    (
        START,
        "torch.randperm(len(data) - t, generator=generator)[:batch_size, None]",
    ),
)
get_batch.fault(
    "generator_ignored",
    "`generator` is not handed on, so the global random state decides.",
    (", generator=generator)", ")"),
)
get_batch.fault(
    "seeded_inside",
    "A seed is set inside, so every call gives the same batch.",
    ("generator=generator", "generator=torch.Generator().manual_seed(0)"),
)

# The learning rate --------------------------------------------------------------------

RISING = "if step < warmup_steps:\n        return peak * step / warmup_steps"
OVER = "if step >= total_steps:\n        return floor"
PROGRESS = "(step - warmup_steps) / (total_steps - warmup_steps)"
FALL = "(1 + math.cos(math.pi * progress)) / 2"
HEIGHT = "floor + (peak - floor) *"

learning_rate.fault(
    "one_step_early",
    "The warm-up counts from 1, so it reaches the peak one step too early. In this "
    "course the first update is step 1, and step 0 has the rate 0.",
    ("peak * step /", "peak * (step + 1) /"),
)
learning_rate.fault(
    "warmup_plus_one",
    "The warm-up is divided by `warmup_steps + 1`, and does not reach the peak in a "
    "straight line.",
    ("peak * step / warmup_steps", "peak * (step + 1) / (warmup_steps + 1)"),
)
learning_rate.fault(
    "warmup_whole_numbers",
    "The step is divided with `//`, so that the rate is 0 until the warm-up ends.",
    ("peak * step / warmup_steps", "peak * (step // warmup_steps)"),
)
learning_rate.fault(
    "warmup_not_subtracted",
    "The fall counts steps from the very start, so that the rate jumps down when the "
    "warm-up ends.",
    (PROGRESS, "step / total_steps"),
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
    "quarter_cosine",
    "The cosine runs over a quarter of its period, from 1 to 0, and ends steeply. "
    "Half a period is level at both ends.",
    (FALL, "math.cos(math.pi / 2 * progress)"),
)
learning_rate.fault(
    "not_halved",
    "1 + cos goes from 2 to 0. Without a half the fall starts at twice its height.",
    (FALL, FALL.removesuffix(" / 2")),
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
    (f"{HEIGHT} {FALL}", f"max(floor, peak * {FALL})"),
)
learning_rate.fault(
    "rises_again",
    "After `total_steps` the cosine goes up again. From there on it is the floor.",
    (OVER, ""),
)
learning_rate.fault(
    "divides_by_zero",
    "It divides by `warmup_steps` even when there is no warm-up, and 0 has no share.",
    ("step < warmup_steps", "step <= warmup_steps"),
)
learning_rate.fault(
    "none_without_warmup",
    "With no warm-up the first step gets the rate 0. It gets the peak.",
    (RISING, RISING.replace("<", "<=").replace("/ warm", "/ max(1, warm") + ")"),
)

# AdamW --------------------------------------------------------------------------------

LINE = "\n" + 16 * " "
N = ' ** state["n"]'
MEAN_KEPT = 'state["mean"].mul_(beta_1).add_((1 - beta_1) * p.grad)'
SQUARE_KEPT = 'state["square"].mul_(beta_2).add_((1 - beta_2) * p.grad**2)'
MEAN_RIGHT = f'mean = state["mean"] / (1 - beta_1{N})'
SQUARE_RIGHT = f'square = state["square"] / (1 - beta_2{N})'
DECAY = 'p.mul_(1 - lr * group["weight_decay"])'
CHANGE = 'p.sub_(lr * mean / (square.sqrt() + group["eps"]))'
ROOT = 'square.sqrt() + group["eps"]'
MISSING = "if p.grad is None:\n                    continue"

AdamW.fault(
    "no_correction",
    "The two means are not corrected. They start at 0, so that the first steps have "
    "the wrong size.",
    (MEAN_RIGHT, 'mean = state["mean"]'),
    (SQUARE_RIGHT, 'square = state["square"]'),
)
AdamW.fault(
    "mean_not_corrected",
    "Only the mean square is corrected. The mean of the gradient starts at 0 too.",
    (MEAN_RIGHT, 'mean = state["mean"]'),
)
AdamW.fault(
    "square_not_corrected",
    "Only the mean is corrected. The mean square starts at 0 too, so the first steps "
    "come out too large.",
    (SQUARE_RIGHT, 'square = state["square"]'),
)
AdamW.fault(
    "correction_counts_from_zero",
    "The step number in the correction counts from 0. The first correction is then a "
    "division by 0.",
    (f"beta_1{N}", 'torch.tensor(beta_1) ** (state["n"] - 1)'),
    (f"beta_2{N}", 'torch.tensor(beta_2) ** (state["n"] - 1)'),
)
AdamW.fault(
    "correction_without_power",
    "The correction is 1 − β at every step. It is 1 − β to the power of the step "
    "number, and goes to 1.",
    (f"beta_1{N}", "beta_1"),
    (f"beta_2{N}", "beta_2"),
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
    (ROOT, '(square + group["eps"]).sqrt()'),
)
AdamW.fault(
    "eps_fixed",
    "eps is 1e-8 whatever the option says. Read it from the group, like the others.",
    ('group["eps"]', "1e-8"),
)
AdamW.fault(
    "l2_in_gradient",
    "The decay is added to the gradient, which is L2 regularisation. It then goes "
    "through both means, and numbers with large gradients hardly decay: the very thing "
    "that AdamW was made to avoid.",
    (
        MEAN_KEPT,
        f'g = p.grad + group["weight_decay"] * p{LINE}'
        + MEAN_KEPT.replace("p.grad", "g"),
    ),
    (SQUARE_KEPT, SQUARE_KEPT.replace("p.grad", "g")),
    (DECAY, ""),
)
AdamW.fault(
    "no_decay",
    "`weight_decay` is not used.",
    (DECAY, ""),
)
AdamW.fault(
    "grows",
    "The decay has the wrong sign: parameters grow.",
    ("p.mul_(1 - lr", "p.mul_(1 + lr"),
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
    "decay_divided",
    "The decay is added to the corrected mean and divided by the root with it. "
    "Decoupled means that nothing divides it.",
    (DECAY, 'mean = mean + group["weight_decay"] * p'),
)
AdamW.fault(
    "decay_without_gradient",
    "Parameters that have no gradient decay all the same. A layer that is not trained "
    "stays as it is.",
    (
        MISSING,
        f"if p.grad is None:{LINE}    {DECAY}{LINE}    continue",
    ),
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
    "options_frozen",
    "The options are those of the constructor. A schedule changes `lr` in "
    "`self.param_groups`, and groups bring their own.",
    (
        'for p in group["params"]',
        'members, group = group["params"], self.defaults\n'
        '            lr, (beta_1, beta_2) = group["lr"], group["betas"]\n'
        "            for p in members",
    ),
)
AdamW.fault(
    "state_elsewhere",
    "The means are kept outside of `self.state`, so `state_dict()` does not hold them: "
    "training that goes on from a file starts with empty means.",
    (
        "state = self.state[p]",
        'state = self.__dict__.setdefault("kept", {}).setdefault(p, {})',
    ),
)
AdamW.fault(
    "not_in_place",
    "A new tensor is computed and bound to a name; the parameter itself stays as it "
    "was.",
    (DECAY, f"p = {DECAY.replace('mul_', 'mul')}"),
)
AdamW.fault(
    "new_memory",
    "`p.data` is bound to a new tensor. Whoever else holds the parameter's memory, a "
    "tied head, a view, keeps the old numbers.",
    (DECAY, f"p.data = {DECAY.replace('mul_', 'mul')}"),
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
    "no_root",
    "The root over the sum of squares is missing.",
    (LENGTH, f"{LENGTH} ** 2"),
)
clip_gradients.fault(
    "used_up",
    "`parameters` is run through twice. What `model.parameters()` gives is empty the "
    "second time, so nothing is clipped.",
    (
        "for g in gradients:",
        "for g in [p.grad for p in parameters if p.grad is not None]:",
    ),
)
clip_gradients.fault(
    "not_in_place",
    "Shorter copies are made and dropped; the gradients stay as they were.",
    (SHORTENED, "g = g * (max_norm / total)"),
)
clip_gradients.fault(
    "length_after",
    "The length after the clipping is returned. The one before tells you how the "
    "training is doing.",
    ("return total", f"return {LENGTH}"),
)
clip_gradients.fault(
    "squares_overflow",
    "The squares are added up in half precision, where 300² is already infinite. The "
    "factor is then 0, and the gradient gone.",
    (LENGTH, "torch.stack([(g**2).sum() for g in gradients]).sum().sqrt()"),
)
clip_gradients.fault(
    "divided_by_length",
    "The gradient is divided by its length, which makes it 1 long whatever max_norm "
    "is.",
    (SHORTENED, "g.div_(total)"),
)

# All of it together -------------------------------------------------------------------

training.fault(
    "targets_are_inputs",
    "Inputs and targets are the same tokens, so there is nothing to predict.",
    (TARGETS, ", pieces[:, :-1]"),
    edited="get_batch",
)
training.fault(
    "sees_the_future",
    "The model's output at a position depends on later tokens, so the answer is among "
    "its inputs.",
    ("block(x, mask, positions)", "block(x, mask.T, positions)"),
    edited="Transformer",
)
training.fault(
    "nothing_moves",
    "The optimizer changes nothing that the model uses.",
    (DECAY, f"p = {DECAY.replace('mul_', 'mul')}"),
    edited="AdamW",
)
training.fault(
    "loss_of_probabilities",
    "The loss takes a softmax of what is already one, or adds up what it should "
    "average.",
    (".mean()", ".sum()"),
    edited="cross_entropy",
)
