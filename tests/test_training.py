"""Lesson 09: oracles, right answers in other forms, wrong ones no fault lists."""

import copy
import math
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from solutions import training as reference
from tests import notebooks
from utils.check import evaluate
from utils.probe import probe, probe_ids


def accept(answer, name):
    report = evaluate(answer, name)
    assert report.status == "passed", report.message


def reject(answer, name):
    report = evaluate(answer, name)
    assert report.status == "failed", f"a wrong {name} passes"


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


def loss_logsumexp(logits, targets):
    fitting(logits, targets)
    chosen = torch.take_along_dim(logits, targets.unsqueeze(-1), -1).squeeze(-1)
    return (torch.logsumexp(logits, -1) - chosen).mean()


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


def loss_where(logits, targets):
    fitting(logits, targets)
    one_hot = F.one_hot(targets, logits.shape[-1]).bool()
    return -torch.where(one_hot, logits.log_softmax(-1), 0).sum() / targets.numel()


@pytest.mark.parametrize(
    "answer",
    [
        loss_built_in,
        loss_logsumexp,
        loss_flat,
        loss_float64_inside,
        loss_by_rows,
        loss_where,
    ],
)
def test_other_right_losses(answer):
    accept(answer, "cross_entropy")


def long_enough(data, t):
    if data.shape[0] <= t:
        raise ValueError(f"{data.shape[0]} tokens, at least {t + 1} are needed")


def batch_by_slices(data, batch_size, t, generator=None):
    long_enough(data, t)
    starts = torch.randint(0, len(data) - t, (batch_size,), generator=generator)
    x = torch.stack([data[s : s + t] for s in starts])
    y = torch.stack([data[s + 1 : s + 1 + t] for s in starts])
    return x, y


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


def batch_unfold(data, batch_size, t, generator=None):
    long_enough(data, t)
    windows = data.unfold(0, t + 1, 1)
    pieces = windows[torch.randint(len(windows), (batch_size,), generator=generator)]
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


@pytest.mark.parametrize(
    "answer", [batch_by_slices, batch_one_by_one, batch_by_rand, batch_unfold]
)
def test_other_right_batches(answer):
    accept(answer, "get_batch")


def rate_nested(step, peak, floor, warmup_steps, total_steps):
    if warmup_steps > 0 and step <= warmup_steps:
        return step * (peak / warmup_steps)
    done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return floor + 0.5 * (1 + math.cos(math.pi * done)) * (peak - floor)


def rate_by_sine(step, peak, floor, warmup_steps, total_steps):
    if step < warmup_steps:
        return step / warmup_steps * peak
    left = max(total_steps - step, 0) / (total_steps - warmup_steps)
    return floor + (peak - floor) * math.sin(math.pi / 2 * left) ** 2


@pytest.mark.parametrize("answer", [rate_nested, rate_by_sine])
def test_other_right_rates(answer):
    accept(answer, "learning_rate")


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


class Subclass(torch.optim.AdamW):
    pass


@pytest.mark.parametrize("answer", [Plain, OneExpression, Subclass])
def test_other_right_optimizers(answer):
    accept(answer, "AdamW")


def clip_built_in(parameters, max_norm):
    return nn.utils.clip_grad_norm_(parameters, max_norm)


def clip_one_vector(parameters, max_norm):
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    total = torch.cat([g.flatten() for g in gradients]).double().norm()
    for g in gradients:
        g *= min(1.0, max_norm / (total.item() + 1e-12))
    return total


def clip_float(parameters, max_norm):
    parameters = [p for p in parameters if p.grad is not None]
    total = sum(p.grad.double().pow(2).sum().item() for p in parameters) ** 0.5
    if total > max_norm:
        for p in parameters:
            p.grad.data.mul_(max_norm / total)
    return total


@pytest.mark.parametrize("answer", [clip_built_in, clip_one_vector, clip_float])
def test_other_right_clippings(answer):
    accept(answer, "clip_gradients")


# Wrong answers that no fault lists ---------------------------------------------------


def loss_median(logits, targets):
    fitting(logits, targets)
    return -logits.log_softmax(-1).gather(-1, targets[..., None]).median()


def loss_clipped(logits, targets):
    return loss_built_in(logits.clamp(-50, 50), targets)


def loss_nan_hidden(logits, targets):
    fitting(logits, targets)
    logs = logits.softmax(-1).log().gather(-1, targets[..., None])
    return -logs.nan_to_num(neginf=-100.0).mean()


def loss_first_batch_row(logits, targets):
    fitting(logits, targets)
    return loss_built_in(logits[:1], targets[:1])


def loss_shape_of_batch_only(logits, targets):
    if len(targets) != len(logits):
        raise ValueError(f"{targets.shape} and {logits.shape}")
    return loss_built_in(logits[:, : targets.shape[1]], targets)


def loss_in_place(logits, targets):
    fitting(logits, targets)
    logits -= logits.amax(-1, keepdim=True)
    return loss_built_in(logits, targets)


@pytest.mark.parametrize(
    "answer",
    [
        loss_median,
        loss_clipped,
        loss_nan_hidden,
        loss_first_batch_row,
        loss_shape_of_batch_only,
        loss_in_place,
    ],
)
def test_wrong_losses(answer):
    reject(answer, "cross_entropy")


def batch_without_replacement(data, batch_size, t, generator=None):
    long_enough(data, t)
    starts = torch.randperm(len(data) - t, generator=generator)
    starts = starts.repeat(batch_size // len(starts) + 1)[:batch_size, None]
    pieces = data[starts + torch.arange(t + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def batch_lopsided(data, batch_size, t, generator=None):
    long_enough(data, t)
    u = torch.rand(batch_size, 1, generator=generator) ** 2
    pieces = data[(u * (len(data) - t)).long() + torch.arange(t + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def batch_rounded(data, batch_size, t, generator=None):
    long_enough(data, t)
    u = torch.rand(batch_size, 1, generator=generator)
    pieces = data[(u * (len(data) - t - 1)).round().long() + torch.arange(t + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def batch_targets_from_next_row(data, batch_size, t, generator=None):
    x, y = reference.get_batch(data, batch_size, t, generator)
    return x, y.roll(1, 0)


def batch_draws_from_both(data, batch_size, t, generator=None):
    torch.rand(1)
    return reference.get_batch(data, batch_size, t, generator)


@pytest.mark.parametrize(
    "answer",
    [
        batch_without_replacement,
        batch_lopsided,
        batch_rounded,
        batch_targets_from_next_row,
        batch_draws_from_both,
    ],
)
def test_wrong_batches(answer):
    reject(answer, "get_batch")


def rate_tensor(step, peak, floor, warmup_steps, total_steps):
    return torch.tensor(
        reference.learning_rate(step, peak, floor, warmup_steps, total_steps)
    )


def rate_restarts(step, peak, floor, warmup_steps, total_steps):
    return reference.learning_rate(
        step % (2 * total_steps), peak, floor, warmup_steps, total_steps
    )


def rate_floor_only_at_total(step, peak, floor, warmup_steps, total_steps):
    if step > total_steps:
        return floor / 2
    return reference.learning_rate(step, peak, floor, warmup_steps, total_steps)


@pytest.mark.parametrize(
    "answer", [rate_tensor, rate_restarts, rate_floor_only_at_total]
)
def test_wrong_rates(answer):
    reject(answer, "learning_rate")


class DecayScaled(Plain):
    """The decay goes through the root as well."""

    def update(self, p, state, lr, betas, eps, weight_decay, **_):
        super().update(p, state, lr, betas, eps, 0.0)
        p.data.sub_(lr * weight_decay * p.data / (state["exp_avg_sq"].sqrt() + eps))


class Amsgrad(Plain):
    def update(self, p, state, lr, betas, eps, weight_decay, **_):
        old = state["exp_avg_sq"].clone()
        super().update(p, state, lr, betas, eps, weight_decay)
        state["exp_avg_sq"] = torch.maximum(old, state["exp_avg_sq"])


class CorrectionStops(Plain):
    """As if the means were true ones after the fifth step."""

    def update(self, p, state, lr, betas, eps, weight_decay, **_):
        super().update(p, state, lr, betas, eps, weight_decay)
        if state["step"] == 5:
            state["step"] += 1000


class Nesterov(torch.optim.NAdam):
    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    ):
        super().__init__(
            params, lr, betas, eps, weight_decay, decoupled_weight_decay=True
        )


class NoMatrixOnlyDecay(Plain):
    """Only matrices decay: a habit, but nobody asked."""

    def update(self, p, state, lr, betas, eps, weight_decay, **_):
        super().update(p, state, lr, betas, eps, weight_decay * (p.ndim > 1))


class SharedState(Plain):
    """Parameters of one shape share their means."""

    kept: dict = {}  # noqa: RUF012

    def update(self, p, state, **options):
        shared = self.kept.setdefault((tuple(p.shape), p.dtype), state)
        super().update(p, shared, **options)


class L2Torch(torch.optim.Adam):
    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    ):
        super().__init__(params, lr, betas, eps, weight_decay)


@pytest.mark.parametrize(
    "answer",
    [
        DecayScaled,
        Amsgrad,
        CorrectionStops,
        Nesterov,
        NoMatrixOnlyDecay,
        SharedState,
        L2Torch,
    ],
)
def test_wrong_optimizers(answer):
    reject(answer, "AdamW")


def clip_first_two(parameters, max_norm):
    return reference.clip_gradients(list(parameters)[:2], max_norm)


def clip_scaled_twice(parameters, max_norm):
    parameters = list(parameters)
    total = reference.clip_gradients(parameters, max_norm)
    reference.clip_gradients(parameters, 0.9 * max_norm)
    return total


def clip_to_norm_one_more(parameters, max_norm):
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = torch.stack([g.norm() for g in gradients] or [torch.zeros(())]).norm()
    for g in gradients:
        g.mul_(max_norm / (max_norm + total))
    return total


def clip_infinity(parameters, max_norm):
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=math.inf)


def clip_zero_for_missing(parameters, max_norm):
    parameters = list(parameters)
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return reference.clip_gradients(parameters, max_norm)


@pytest.mark.parametrize(
    "answer",
    [
        clip_first_two,
        clip_scaled_twice,
        clip_to_norm_one_more,
        clip_infinity,
        clip_zero_for_missing,
    ],
)
def test_wrong_clippings(answer):
    reject(answer, "clip_gradients")


# Training on several devices ---------------------------------------------------------


def two_processes():
    """The lesson's own function, as it stands in its cell."""
    cells = notebooks.code(notebooks.lesson_notebook("09_training"))
    (cell,) = [cell for cell in cells if "def run_two_processes" in cell]
    names = {}
    exec(cells[1] + "\n" + cell, names)
    return names["run_two_processes"]


def test_without_gloo_the_lesson_says_so(monkeypatch):
    run = two_processes()
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert run() == "this build of PyTorch has no gloo"
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert run() == "this build of PyTorch has no gloo"


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="needs gloo",
)
def test_processes_that_fail_are_a_sentence(monkeypatch):
    run = two_processes()
    monkeypatch.setitem(run.__globals__, "SCRIPT", "raise SystemExit(3)")
    assert run().startswith("the processes ended without a result (exit code ")
    monkeypatch.setattr(sys, "executable", "no such interpreter")
    assert run() == "the processes did not run (FileNotFoundError)"


# Found by wrong answers written from the lesson's text alone --------------------------


def as_many(logits, targets):
    if logits[..., 0].numel() != targets.numel():
        raise ValueError(f"{tuple(logits.shape)} and {tuple(targets.shape)}")
    return reference.cross_entropy(logits, targets.reshape(logits.shape[:-1]))


def shuffled_starts(data, batch_size, t, generator=None):
    if len(data) < t + 1:
        raise ValueError(f"{len(data)} tokens, and {t + 1} are needed")
    starts = torch.randperm(len(data) - t, generator=generator)[:batch_size]
    pieces = torch.stack([data[s : s + t + 1] for s in starts.tolist()])
    return pieces[:, :-1], pieces[:, 1:]


class InPlace(torch.optim.Optimizer):
    """AdamW with operations in place, as most learners write it."""

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    ):
        options = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, options)

    def zeros(self, p):
        return torch.zeros_like(p)

    def start(self, p):
        return dict(n=0, m=self.zeros(p), v=self.zeros(p))

    def weight(self, beta_1):
        return 1 - beta_1

    def decays(self, p):
        return True

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta_1, beta_2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(self.start(p))
                state["n"] += 1
                state["m"].mul_(beta_1).add_(p.grad, alpha=self.weight(beta_1))
                state["v"].mul_(beta_2).addcmul_(p.grad, p.grad, value=1 - beta_2)
                m = state["m"] / (1 - beta_1 ** state["n"])
                v = state["v"] / (1 - beta_2 ** state["n"])
                if self.decays(p):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * m / (v.sqrt() + self.eps(group)))

    def eps(self, group):
        return group["eps"]


class MomentumForm(InPlace):
    def weight(self, beta_1):
        return 1


class StartsAtGradient(InPlace):
    def start(self, p):
        return super().start(p) | dict(m=p.grad.clone())


class MatricesAlone(InPlace):
    def decays(self, p):
        return p.ndim > 1


class EpsForgotten(InPlace):
    def eps(self, group):
        return 1e-8


class OnTheCpu(InPlace):
    def zeros(self, p):
        return torch.zeros(p.shape, dtype=p.dtype)


@pytest.mark.parametrize(
    ("name", "fault", "answer"),
    [
        ("cross_entropy", "counts_compared", as_many),
        ("get_batch", "without_replacement", shuffled_starts),
        ("AdamW", "mean_not_weighted", MomentumForm),
        ("AdamW", "first_mean_kept", StartsAtGradient),
        ("AdamW", "vectors_not_decayed", MatricesAlone),
        ("AdamW", "eps_fixed", EpsForgotten),
        ("AdamW", "cpu_state", OnTheCpu),
    ],
)
def test_mistakes_are_named(name, fault, answer):
    assert evaluate(answer, name).fault == fault


def test_adamw_in_place_is_right():
    accept(InPlace, "AdamW")


class OtherEps(InPlace):
    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01
    ):
        super().__init__(params, lr, betas, eps, weight_decay)


def test_the_default_of_eps_is_looked_at():
    reject(OtherEps, "AdamW")
