"""What can be true of two numbers, strings or lists."""

import math
from collections import Counter
from collections.abc import Mapping

import torch

from utils.check.difference.facts import close
from utils.check.difference.wording import factor_words, offset_words

NUMBER_TOLERANCE = 64 * torch.finfo(torch.float32).eps  # for Python's floats


def numbers(actual: float, expected: float, sizes: Mapping[str, float]) -> str | None:
    if actual == expected or not math.isfinite(expected):
        return None
    if not math.isfinite(actual):
        return f"The value is {actual}."
    if actual == 0:
        return "The value is 0."
    if close(actual, -expected, NUMBER_TOLERANCE):
        return "The value has the opposite sign."
    if close(abs(actual - expected), 1, NUMBER_TOLERANCE):
        return f"The value is {offset_words(actual - expected, {})}."
    if expected == 0:
        return None
    ratio, shift = actual / expected, actual - expected
    if close(ratio, 2, NUMBER_TOLERANCE) or close(ratio, 0.5, NUMBER_TOLERANCE):
        return f"The value is {factor_words(ratio, {})}."
    scaled = factor_words(ratio, sizes) if ratio > 0 else ""
    moved_by = offset_words(shift, sizes)
    named = [words for words in (scaled, moved_by) if ";" in words]
    return f"The value is {named[0]}." if len(named) == 1 else None


def sequences(actual, expected) -> str | None:
    came, asked = len(actual), len(expected)
    part = "characters" if isinstance(expected, str) else "elements"
    if not asked:
        return None
    if not came:
        return "It is empty."
    if came != asked:
        count = f"There {'is' if abs(came - asked) == 1 else 'are'} {abs(came - asked)}"
        count = f"{count} {part if abs(came - asked) > 1 else part[:-1]}"
        shorter, longer = (actual, expected)[:: 1 if came < asked else -1]
        word = "few" if came < asked else "many"
        at = {"end": longer[: len(shorter)], "start": longer[-len(shorter) :]}
        for place, rest in at.items():
            if rest == shorter:
                return f"{count} too {word}, at the {place}; the others are right."
    elif all(type(x) in (int, float) for x in (*actual, *expected)):
        shifts = {a - e for a, e in zip(actual, expected, strict=True)}
        if len(shifts) == 1 and len(set(expected)) > 1:
            return f"Each element is {offset_words(shifts.pop(), {})}."
    if came > 2 and actual == expected[::-1]:
        return f"The {part} are right but reversed."
    if came > 2 and Counter(actual) == Counter(expected):
        return f"The {part} are right but in another order."
    if isinstance(expected, str) and actual.casefold() == expected.casefold():
        return "It is right but for upper and lower case."
    if isinstance(expected, str | bytes) and actual.split() == expected.split():
        return "It is right but for white space."
    pairs = list(zip(actual, expected, strict=False))
    right = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if right >= 2:
        return f"The first {right} {part} are right, the next is not."
    wrong = [i for i, (a, b) in enumerate(pairs) if a != b]
    if came == asked and len(wrong) == 1 and came > 2:
        return f"All {part} but the one at {wrong[0]} (counted from 0) are right."
    return None


def values(actual, expected, sizes: Mapping[str, float]) -> str | None:
    kinds = type(actual), type(expected)
    came, asked = (kind.__name__ for kind in kinds)
    plain = bool not in kinds and all(issubclass(k, int | float) for k in kinds)
    ordered = all(issubclass(k, list | tuple) for k in kinds)
    if kinds[0] != kinds[1]:
        equal = list(actual) == list(expected) if ordered else actual == expected
        if equal is True:
            return f"The value is right, but of type {came} instead of {asked}."
        if not plain and not ordered:
            return f"The value is of type {came} instead of {asked}."
    if plain:
        return numbers(actual, expected, sizes)
    if ordered:
        return sequences(list(actual), list(expected))
    return sequences(actual, expected) if kinds[0] in (str, bytes) else None
