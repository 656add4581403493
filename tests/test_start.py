"""Lesson 00: softmax against PyTorch's, right answers in other forms, wrong ones."""

import pytest
import torch

from solutions.start import softmax
from tests.answers import fails, passes
from utils.probe import probe


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("shift", [0, 1000, -1000])
def test_the_reference_agrees_with_pytorch(dim, shift):
    scores = probe(3, 4, 5, scale=4, shift=shift, dtype=torch.float64)
    torch.testing.assert_close(softmax(scores, dim), torch.softmax(scores, dim))


def shared(e, dim):
    return e / e.sum(dim, keepdim=True)


def by_loops(scores, dim=-1):
    rows = scores.movedim(dim, -1)
    flat = [torch.softmax(row, 0) for row in rows.reshape(-1, rows.shape[-1])]
    return torch.stack(flat).reshape(rows.shape).movedim(-1, dim)


RIGHT = {
    "log-sum-exp": lambda s, dim=-1: (s - s.logsumexp(dim, keepdim=True)).exp(),
    "float64 inside": lambda s, dim=-1: torch.softmax(s.double(), dim).to(s.dtype),
    "detached shift": lambda s, dim=-1: shared(
        (s - s.amax(dim, keepdim=True).detach()).exp(), dim
    ),
    "loops": by_loops,
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_in_other_forms_pass(name):
    passes(RIGHT[name], "softmax")


WRONG = {
    "squares": lambda s, dim=-1: shared(s.square(), dim),
    "softmin": lambda s, dim=-1: torch.softmax(-s, dim),
    "rounded": lambda s, dim=-1: torch.softmax(s, dim).half().to(s.dtype),
    "only two dimensions": lambda s, dim=-1: torch.softmax(s.reshape(len(s), -1), dim),
    "minimum shifted": lambda s, dim=-1: shared(
        (s - s.amin(dim, keepdim=True)).exp(), dim
    ),
    "without shift, cleaned": lambda s, dim=-1: shared(s.exp(), dim).nan_to_num(),
    "along the first": lambda s, dim=0: torch.softmax(s, dim),
    "float32 inside": lambda s, dim=-1: torch.softmax(s.float(), dim).to(s.dtype),
    "no gradient": lambda s, dim=-1: torch.softmax(s, dim).data,
    "overwritten on the way": lambda s, dim=-1: (lambda e: e.div_(e.sum(dim, True)))(
        (s - s.amax(dim, keepdim=True)).exp()
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_are_rejected_without_a_wrong_name(name):
    assert fails(WRONG[name], "softmax").fault is None


@pytest.mark.parametrize("lowest", [-10.0, -80.0])
def test_a_score_of_minus_infinity_gets_exactly_nothing(lowest):
    def answer(scores, dim=-1):
        return torch.softmax(scores.masked_fill(scores.isinf(), lowest), dim)

    assert "gets the weight 0" in fails(answer, "softmax").message
