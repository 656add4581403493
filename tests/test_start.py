"""Lesson 00: softmax against PyTorch's, right answers in other forms, wrong ones."""

import pytest
import torch

from solutions.start import softmax
from utils.check import evaluate
from utils.probe import probe


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("shift", [0, 1000, -1000])
def test_the_reference_agrees_with_pytorch(dim, shift):
    scores = probe(3, 4, 5, scale=4, shift=shift, dtype=torch.float64)
    torch.testing.assert_close(softmax(scores, dim), torch.softmax(scores, dim))


def by_loops(scores, dim=-1):
    rows = scores.movedim(dim, -1)
    flat = [torch.softmax(row, 0) for row in rows.reshape(-1, rows.shape[-1])]
    return torch.stack(flat).reshape(rows.shape).movedim(-1, dim)


RIGHT = {
    "log-sum-exp": lambda s, dim=-1: (s - s.logsumexp(dim, keepdim=True)).exp(),
    "float64 inside": lambda s, dim=-1: torch.softmax(s.double(), dim).to(s.dtype),
    "detached shift": lambda s, dim=-1: (lambda e: e / e.sum(dim, keepdim=True))(
        (s - s.amax(dim, keepdim=True).detach()).exp()
    ),
    "loops": by_loops,
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_in_other_forms_pass(name):
    report = evaluate(RIGHT[name], "softmax")
    assert report.status == "passed", report.message


WRONG = {
    "squares": lambda s, dim=-1: s.square() / s.square().sum(dim, keepdim=True),
    "base two": lambda s, dim=-1: torch.softmax(s * 0.6931, dim),
    "softmin": lambda s, dim=-1: torch.softmax(-s, dim),
    "rounded": lambda s, dim=-1: torch.softmax(s, dim).half().to(s.dtype),
    "only two dimensions": lambda s, dim=-1: torch.softmax(s.reshape(len(s), -1), dim),
    "minimum shifted": lambda s, dim=-1: (lambda e: e / e.sum(dim, keepdim=True))(
        (s - s.amin(dim, keepdim=True)).exp()
    ),
    "float32 inside": lambda s, dim=-1: torch.softmax(s.float(), dim).to(s.dtype),
    "no gradient": lambda s, dim=-1: torch.softmax(s, dim).data,
    "a little too large": lambda s, dim=-1: torch.softmax(s, dim) + 1e-4,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_that_no_fault_lists_are_rejected(name):
    assert evaluate(WRONG[name], "softmax").status == "failed"
