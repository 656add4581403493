"""What the calls of an answer gave, in a form that another answer's can be held to.

Two answers with the same mistake give the same results, step by step, and where they
raise, they raise the same type of error at the same step.
"""

import linecache
import re
import traceback
from dataclasses import dataclass

import torch
from torch import nn

from utils.check.inputs import is_float

OWN_RAISE = ("raise ", "raise\n", "assert ")


@dataclass(frozen=True)
class Raised:
    """Stands in a recording for a call that raised.

    message: PyTorch's or Python's own, which tells sizes apart. In which words a line
    `raise …` of the answer refuses tells no mistake from another, so it is left out.
    """

    type: str
    message: str = ""


def raised(error) -> Raised:
    frames = traceback.extract_tb(error.__traceback__)
    line = frames[-1].line or "" if frames else ""
    if f"{line}\n".startswith(OWN_RAISE):
        return Raised(type(error).__name__)
    message = re.sub(r"[\w.<>]+\(\)", "f()", str(error))
    return Raised(type(error).__name__, re.sub(r"0x[0-9a-f]+", "", message))


def register_source(filename: str, source: str) -> None:
    """Let tracebacks and `inspect` find code that lies in no file."""
    lines = source.splitlines(keepends=True)
    linecache.cache[filename] = (len(source), None, lines, filename)


def snapshot(result):
    """What a call returned, in a form that can be compared later."""
    if isinstance(result, nn.Module):
        return tuple(sorted(tuple(p.shape) for p in result.parameters()))
    if isinstance(result, torch.Tensor):
        on_meta = result.device.type == "meta"
        return tuple(result.shape) if on_meta else result.detach().cpu().clone()
    if isinstance(result, (tuple, list)):
        return tuple(snapshot(r) for r in result)
    if isinstance(result, dict):
        return {k: snapshot(v) for k, v in result.items()}
    if isinstance(result, (int, float, str, bytes, bool, type(None), Raised)):
        return result
    return type(result).__name__


def same_recording(one: list, other: list, truth: list) -> bool:
    """Do two recordings tell of the same mistake? `truth`: the reference's."""
    truth = [*truth, *[None] * len(one)]
    return len(one) == len(other) and all(map(alike, one, other, truth))


def alike(one, other, truth=None) -> bool:
    """Two snapshots agree, closely enough to be the same mistake.

    `truth`, the reference's snapshot, sets the scale: what two wrong answers
    differ by must be small against what they are wrong by.
    """
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return _alike_tensors(one, other, truth)
    if isinstance(one, tuple) and isinstance(other, tuple):
        truths = truth if isinstance(truth, tuple) else ()
        truths = [*truths, *[None] * (len(one) - len(truths))]
        return len(one) == len(other) and all(map(alike, one, other, truths))
    if isinstance(one, dict) and isinstance(other, dict):
        truth = truth if isinstance(truth, dict) else {}
        return one.keys() == other.keys() and all(
            alike(one[k], other[k], truth.get(k)) for k in one
        )
    if isinstance(one, float) and isinstance(other, float):
        same_nan = one != one and other != other
        close = abs(one - other) <= 1e-6 * max(abs(one), abs(other))
        return same_nan or one == other or close
    return type(one) is type(other) and one == other


def _alike_tensors(one, other, truth):
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not is_float(one):
        return bool((one == other).all())
    eps = torch.finfo(one.dtype).eps
    a, b = one.double(), other.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    infinite = a.isinf() | b.isinf()
    if not torch.equal(a[infinite], b[infinite]):
        return False
    finite = a.isfinite()
    a, b = a[finite], b[finite]
    if a.numel() == 0:
        return True
    scale = max(a.abs().max().item(), b.abs().max().item())
    allowed = 256 * eps * scale
    if isinstance(truth, torch.Tensor) and truth.shape == one.shape:
        wrong_by = (a - truth.double()[finite]).nan_to_num(0.0).abs().max().item()
        if wrong_by > 8 * eps * scale:
            allowed = min(allowed, 0.1 * wrong_by)
    return (a - b).abs().max().item() <= allowed
