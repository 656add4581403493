"""Reference answers of lesson 09."""

import math

import torch


def cross_entropy(logits, targets):
    """The mean surprise at the right tokens: minus the log of their probabilities.

    Args:
        logits: `(…, V)`, scores of any size.
        targets: `(…)`, the right token for each row of logits, as int64.

    Returns:
        One number, a tensor without dimensions in the dtype of `logits`: the mean over
        all targets of `log(sum(exp(logits))) - logits[target]`, in nats.

    Raises:
        ValueError: if the shapes do not fit; it names both.
    """
    ### BEGIN SOLUTION
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets {tuple(targets.shape)} do not fit logits {tuple(logits.shape)}"
        )
    logits = logits - logits.amax(dim=-1, keepdim=True)  # (…, V), largest is 0
    normaliser = logits.exp().sum(dim=-1).log()  # (…, V) → (…)
    right = logits.gather(-1, targets[..., None])[..., 0]  # (…, V) → (…, 1) → (…)
    return (normaliser - right).mean()
    ### END SOLUTION


def get_batch(data, batch_size, t, generator=None):
    """Random pieces of a text, and the tokens that come after each of theirs.

    Args:
        data: `(N,)`, the token ids of the whole text, N at least t + 1.
        batch_size: B, the number of pieces. Their starts are drawn independently, each
            possible one with the same probability.
        t: T, the length of a piece.
        generator: a `torch.Generator`; the global one if None.

    Returns:
        `(inputs, targets)`, both `(B, T)` in the dtype of `data`. `targets[b, i]` is
        the token that follows `inputs[b, i]` in the text.

    Raises:
        ValueError: if the text is shorter than t + 1; it names N and t + 1.
    """
    ### BEGIN SOLUTION
    if len(data) < t + 1:
        raise ValueError(f"{len(data)} tokens are too few for pieces of {t + 1}")
    starts = torch.randint(len(data) - t, (batch_size, 1), generator=generator)
    pieces = data[starts + torch.arange(t + 1)]  # (B, 1) + (T+1,) → (B, T+1)
    return pieces[:, :-1], pieces[:, 1:]
    ### END SOLUTION


def learning_rate(step, peak, floor, warmup_steps, total_steps):
    """The rate of a step: a straight line up, half a cosine down, then level.

    Args:
        step: the number of the update, the first being 1.
        peak: the rate at step `warmup_steps`, the largest.
        floor: the rate at step `total_steps` and at all after it.
        warmup_steps: how long the line from 0 to `peak` is; 0 means none.
        total_steps: more than `warmup_steps`.

    Returns:
        A float.

    I. Loshchilov and F. Hutter (2017), SGDR; the warm-up: P. Goyal et al. (2017),
    Accurate, Large Minibatch SGD.
    """
    ### BEGIN SOLUTION
    if step < warmup_steps:
        return peak * step / warmup_steps
    if step >= total_steps:
        return floor
    progress = (step - warmup_steps) / (total_steps - warmup_steps)  # 0 to 1
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2
    ### END SOLUTION


class AdamW(torch.optim.Optimizer):
    """Adam with weight decay that does not go through the gradient.

    Args:
        params: parameters, or groups of them as dicts with options of their own.
        lr: the learning rate, read anew at every step.
        betas: how much of the old mean of the gradient, and of its square, is kept.
        eps: added to the root, outside of it.
        weight_decay: what part of a parameter, times `lr`, each step takes away.

    D. Kingma and J. Ba (2015), Adam; I. Loshchilov and F. Hutter (2019), Decoupled
    Weight Decay Regularization.
    """

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    ):
        ### BEGIN SOLUTION
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)
        ### END SOLUTION

    @torch.no_grad()
    def step(self):
        """Update every parameter that has a gradient, in place."""
        ### BEGIN SOLUTION
        for group in self.param_groups:
            lr, (beta_1, beta_2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["n"] = 0
                    state["mean"] = torch.zeros_like(p)
                    state["square"] = torch.zeros_like(p)
                state["n"] += 1
                state["mean"].mul_(beta_1).add_((1 - beta_1) * p.grad)
                state["square"].mul_(beta_2).add_((1 - beta_2) * p.grad**2)
                mean = state["mean"] / (1 - beta_1 ** state["n"])
                square = state["square"] / (1 - beta_2 ** state["n"])
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(lr * mean / (square.sqrt() + group["eps"]))
        ### END SOLUTION


def clip_gradients(parameters, max_norm):
    """Shorten the gradient if it is too long, without turning it.

    Args:
        parameters: any iterable of parameters, such as `model.parameters()`. Those
            without a gradient are left alone.
        max_norm: the largest length that the gradient of all parameters together,
            taken as one long vector, may have.

    Returns:
        Its length before, a tensor without dimensions. The gradients are changed in
        place, all by the same factor.

    R. Pascanu, T. Mikolov and Y. Bengio (2013), On the Difficulty of Training
    Recurrent Neural Networks.
    """
    ### BEGIN SOLUTION
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    total = torch.stack([g.norm() for g in gradients]).norm()  # of all together
    if total > max_norm:
        for g in gradients:
            g.mul_(max_norm / total)
    return total
    ### END SOLUTION
