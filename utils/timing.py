"""Measures how long something takes, in ways that a busy machine disturbs little."""

import math
import time

import torch


def seconds(f, *args, repeats: int = 7) -> float:
    """The least time of `repeats` calls `f(*args)`, after one call to warm up."""
    f(*args)
    return min(_once(f, args) for _ in range(repeats))


def _once(f, args) -> float:
    _wait()
    started = time.perf_counter()
    f(*args)
    _wait()
    return time.perf_counter() - started


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_in_turn(functions: dict, repeats: int = 7) -> dict:
    """The least time of each function without arguments, measured in turn.

    For ratios: what slows the machine for a while then slows all of them.
    """
    best = dict.fromkeys(functions, math.inf)
    for f in functions.values():
        f()
    for _ in range(repeats):
        for name, f in functions.items():
            best[name] = min(best[name], _once(f, ()))
    return best


def fitted_exponent(sizes, costs) -> float:
    """p of the best fit `cost ∝ size^p`: the slope of a line through the logarithms."""
    x = torch.tensor([math.log(s) for s in sizes])
    y = torch.tensor([math.log(c) for c in costs])
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())
