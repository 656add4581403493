"""Finds probes in which two sizes coincide, so that a check cannot tell them apart."""

from dataclasses import fields, is_dataclass
from itertools import combinations

import torch

from utils.check import running
from utils.check.case import Case
from utils.check.wording import argument_names


def sizes_of(name: str, value) -> dict[str, int]:
    """The sizes in an argument: dimensions counted from the end, and whole numbers."""
    if isinstance(value, torch.Tensor):
        return {f"{name}[{-i}]": n for i, n in enumerate(reversed(value.shape), 1)}
    if type(value) is int:
        return {name: value}
    if is_dataclass(value):
        return {
            f"{name}.{f.name}": getattr(value, f.name)
            for f in fields(value)
            if type(getattr(value, f.name)) is int
        }
    return {}


def calls_of(exercise, monkeypatch) -> list[list[dict[str, int]]]:
    """For each requirement, the sizes in each call of the reference that returns."""
    found, original = [], Case._run

    def recording(case, f, args, kwargs):
        names = argument_names(f, args, kwargs)
        sizes = {}
        for name, value in zip(names, [*args, *kwargs.values()], strict=True):
            sizes |= sizes_of(name, value)
        result = original(case, f, args, kwargs)
        found[-1].append(sizes)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Case, "_run", recording)
        for requirement in exercise.requirements:
            found.append([])
            running.run(requirement, exercise.reference, 10 * exercise.seconds)
    return found


def coincidences(calls) -> set[tuple[str, str]]:
    """Pairs of sizes that differ in some call, and never where it is looked first.

    The first requirement in which both occur is the one that is to tell them apart.
    """
    everywhere = [sizes for each in calls for sizes in each]
    pairs = {pair for sizes in everywhere for pair in combinations(sorted(sizes), 2)}
    found = set()
    for a, b in pairs:
        if all(_one_size(s[a], s[b]) for s in everywhere if a in s and b in s):
            continue
        for requirement in calls:
            both = [s for s in requirement if a in s and b in s]
            if both:
                if all(s[a] == s[b] for s in both):
                    found.add((a, b))
                break
    return found


def _one_size(a, b) -> bool:
    """The same size under two names, one of them perhaps to be broadcast."""
    return a == b or 1 in (a, b)


def always_one(calls) -> set[str]:
    """Sizes that are larger than 1 in some call, and 1 wherever it is looked first."""
    found = set()
    for name in {n for each in calls for sizes in each for n in sizes}:
        for requirement in calls:
            sizes = [s[name] for s in requirement if name in s]
            if sizes:
                larger = any(s.get(name, 1) > 1 for each in calls for s in each)
                if larger and all(n == 1 for n in sizes):
                    found.add(name)
                break
    return found
