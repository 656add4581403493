"""Lesson 09: the reference against PyTorch; other right answers; wrong ones."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from solutions import training as reference
from tests.answers import fails, passes
from utils.check.exercise import find
from utils.probe import probe, probe_ids

# The reference against PyTorch's own ------------------------------------------------


def test_cross_entropy_is_torchs():
    for scale in (1, 300):
        logits = probe(3, 5, 7, scale=scale).double()
        targets = probe_ids(3, 5, below=7)
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        torch.testing.assert_close(reference.cross_entropy(logits, targets), expected)


def test_learning_rate_is_torchs_schedule():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=0.02)
    for step in range(10, 51):
        found = reference.learning_rate(step, 0.3, 0.02, 10, 50)
        assert math.isclose(found, optimizer.param_groups[0]["lr"], rel_tol=1e-9)
        optimizer.step()
        schedule.step()


def train_both(build, steps=12):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = build(model.parameters(), lr=0.05, eps=1e-3, weight_decay=0.2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    x, y = probe(6, 3).double(), probe(6, 2, seed=1).double()
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        schedule.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_adamw_is_torchs_under_a_schedule():
    torch.testing.assert_close(
        train_both(reference.AdamW), train_both(torch.optim.AdamW)
    )


def test_clipping_is_torchs():
    for max_norm in (0.5, 100.0):
        ours = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2, 3))]
        for i, p in enumerate(ours):
            p.grad = probe(*p.shape, seed=i)
        theirs = copy.deepcopy(ours)
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.clone()
        total = nn.utils.clip_grad_norm_(theirs, max_norm)
        torch.testing.assert_close(reference.clip_gradients(ours, max_norm), total)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p.grad, q.grad)


# Right answers in other forms --------------------------------------------------------


def fitting(logits, targets):
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"{targets.shape} and {logits.shape} do not fit")


def loss_built_in(logits, targets):
    fitting(logits, targets)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def loss_flat(logits, targets):
    fitting(logits, targets)
    rows, y = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    largest = rows.detach().max(1, keepdim=True).values
    logs = rows - largest - (rows - largest).exp().sum(1, keepdim=True).log()
    return -logs[torch.arange(len(y), device=y.device), y].sum() / len(y)


def loss_float64_inside(logits, targets):
    fitting(logits, targets)
    rows = logits.double().log_softmax(-1)
    return F.nll_loss(rows.flatten(0, -2), targets.flatten()).to(logits.dtype)


def loss_by_rows(logits, targets):
    fitting(logits, targets)
    rows = zip(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), strict=True)
    losses = [
        (row - row.max()).exp().sum().log() + row.max() - row[y] for row, y in rows
    ]
    return torch.stack(losses).mean()


def long_enough(data, t):
    if data.shape[0] <= t:
        raise ValueError(f"{data.shape[0]} tokens, at least {t + 1} are needed")


def batch_one_by_one(data, batch_size, t, generator=None):
    long_enough(data, t)
    rows = []
    for _ in range(batch_size):
        s = torch.randint(len(data) - t, (), generator=generator).item()
        rows.append(data[s : s + t + 1])
    pieces = torch.stack(rows)
    return [pieces[:, :t], pieces[:, 1:]]


def batch_by_rand(data, batch_size, t, generator=None):
    long_enough(data, t)
    u = torch.rand(batch_size, 1, generator=generator, dtype=torch.float64)
    starts = (u * (len(data) - t)).long()
    places = starts + torch.arange(t)
    return data[places], data[places + 1]


def rate_nested(step, peak, floor, warmup_steps, total_steps):
    if warmup_steps > 0 and step <= warmup_steps:
        return step * (peak / warmup_steps)
    done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return floor + 0.5 * (1 + math.cos(math.pi * done)) * (peak - floor)


class Plain(torch.optim.Optimizer):
    """Right; subclasses change one thing."""

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    ):
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("step", torch.tensor(0.0))
                state.setdefault("exp_avg", torch.zeros_like(p.data))
                state.setdefault("exp_avg_sq", torch.zeros_like(p.data))
                self.update(p, state, **group)
        return loss

    def update(self, p, state, lr, betas, eps, weight_decay, **_):
        b1, b2 = betas
        g = p.grad.data
        state["step"] += 1
        state["exp_avg"].lerp_(g, 1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
        n = state["step"].item()
        denominator = state["exp_avg_sq"].sqrt() / math.sqrt(1 - b2**n) + eps
        p.data.mul_(1 - lr * weight_decay)
        p.data.addcdiv_(state["exp_avg"], denominator, value=-lr / (1 - b1**n))


class OneExpression(Plain):
    def update(self, p, state, lr, betas, eps, weight_decay, **_):
        n = state["step"] = state["step"] + 1
        n = int(n)
        m = state["exp_avg"] = betas[0] * state["exp_avg"] + (1 - betas[0]) * p.grad
        v = state["exp_avg_sq"] = (
            betas[1] * state["exp_avg_sq"] + (1 - betas[1]) * p.grad.square()
        )
        m, v = m / (1 - betas[0] ** n), v / (1 - betas[1] ** n)
        with torch.no_grad():
            p.copy_(p - lr * (m / (v**0.5 + eps) + weight_decay * p))


def clip_one_vector(parameters, max_norm):
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    total = torch.cat([g.flatten() for g in gradients]).double().norm()
    for g in gradients:
        g *= min(1.0, max_norm / (total.item() + 1e-12))
    return total


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (loss_built_in, "cross_entropy"),
        (loss_flat, "cross_entropy"),
        (loss_float64_inside, "cross_entropy"),
        (loss_by_rows, "cross_entropy"),
        (batch_one_by_one, "get_batch"),
        (batch_by_rand, "get_batch"),
        (rate_nested, "learning_rate"),
        (Plain, "AdamW"),
        (OneExpression, "AdamW"),
        (torch.optim.AdamW, "AdamW"),
        (nn.utils.clip_grad_norm_, "clip_gradients"),
        (clip_one_vector, "clip_gradients"),
    ],
)
def test_right_answers_in_other_forms(answer, name):
    passes(answer, name)


# Wrong answers that no fault lists ---------------------------------------------------


def in_cycles(data, batch_size, t, generator=None):
    """Each start comes again only when all others have come."""
    long_enough(data, t)
    starts = torch.randperm(len(data) - t, generator=generator)
    starts = starts.repeat(batch_size // len(starts) + 1)[:batch_size, None]
    pieces = data[starts + torch.arange(t + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def of_the_next_row(data, batch_size, t, generator=None):
    x, y = reference.get_batch(data, batch_size, t, generator)
    return x, y.roll(1, 0)


def draws_from_both(*args, **given):
    torch.rand(1)
    return reference.get_batch(*args, **given)


class CorrectionStops(Plain):
    """As if the means were true ones after the fifth step."""

    def update(self, p, state, lr, betas, eps, weight_decay, **_):
        super().update(p, state, lr, betas, eps, weight_decay)
        if state["step"] == 5:
            state["step"] += 1000


class SharedState(Plain):
    """Parameters of one shape share their means."""

    kept: dict = {}  # noqa: RUF012

    def update(self, p, state, **options):
        shared = self.kept.setdefault((tuple(p.shape), p.dtype), state)
        super().update(p, shared, **options)


class OtherEps(Plain):
    def __init__(self, params, eps=1e-6, **options):
        super().__init__(params, eps=eps, **options)


def clip_twice(parameters, max_norm):
    parameters = list(parameters)
    total = reference.clip_gradients(parameters, max_norm)
    reference.clip_gradients(parameters, 0.9 * max_norm)
    return total


def zero_for_missing(parameters, max_norm):
    parameters = list(parameters)
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    return reference.clip_gradients(parameters, max_norm)


@pytest.mark.parametrize(
    ("answer", "name", "fault", "says"),
    [
        (lambda x, y: loss_built_in(x.clamp(-50, 50), y), "cross_entropy", None, ""),
        (
            lambda x, y: loss_built_in(x, y).exp(),
            "cross_entropy",
            None,
            "token of 1/16 has the loss 2.7726; yours is 16.0000",
        ),
        (in_cycles, "get_batch", None, "depends on where the row before it starts"),
        (of_the_next_row, "get_batch", None, "expected 1: the target is the token"),
        (draws_from_both, "get_batch", None, "the global random state changed"),
        (
            lambda *args: torch.tensor(reference.learning_rate(*args)),
            "learning_rate",
            None,
            "The rate is of type Tensor",
        ),
        (
            lambda step, peak, *rest: reference.learning_rate(
                step % (2 * rest[-1]), peak, *rest
            ),
            "learning_rate",
            None,
            "Step 52 has 3 of the fall behind it",
        ),
        (CorrectionStops, "AdamW", None, ""),
        (SharedState, "AdamW", "state", ""),
        (OtherEps, "AdamW", None, ""),
        (clip_twice, "clip_gradients", None, ""),
        (zero_for_missing, "clip_gradients", None, "had no gradient, and has one now"),
        (
            lambda *args: float(clip_one_vector(*args)),
            "clip_gradients",
            None,
            "of type float, expected a tensor",
        ),
    ],
)
def test_wrong_answers(answer, name, fault, says):
    report = fails(answer, name)
    assert (report.fault, says in report.message) == (fault, True), report.message


def test_a_wrong_loop_is_not_called_random():
    """Its models are made anew in each run."""
    parts = find("training").reference
    parts = parts | {"cross_entropy": lambda *args: 3 * reference.cross_entropy(*args)}
    assert fails(parts, "training").fault is None
