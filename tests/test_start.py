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
    "sorted": lambda s, dim=-1: (lambda e: e / e.sum(dim, keepdim=True))(
        (s - s.sort(dim, descending=True).values.narrow(dim, 0, 1)).exp()
    ),
    "dimensions exchanged": lambda s, dim=-1: (
        ((lambda e: e / e.sum(0))((s.transpose(0, dim) - s.amax(dim)).exp())).transpose(
            0, dim
        )
        if s.dim() == 2
        else torch.softmax(s, dim)
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_in_other_forms_pass(name):
    passes(RIGHT[name], "softmax")


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
    "a low score for −inf": lambda s, dim=-1: torch.softmax(
        s.masked_fill(s.isinf(), -10.0), dim
    ),
    "overwritten on the way": lambda s, dim=-1: (lambda e: e.div_(e.sum(dim, True)))(
        (s - s.amax(dim, keepdim=True)).exp()
    ),
    "a little too large": lambda s, dim=-1: torch.softmax(s, dim) + 1e-4,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_that_no_fault_lists_are_rejected(name):
    fails(WRONG[name], "softmax")


def by_the_mean(scores, dim=-1):
    shifted = scores - torch.mean(scores, dim=dim, keepdim=True)
    return shifted.exp() / shifted.exp().sum(dim=dim, keepdim=True)


def by_a_pair(scores, dim=-1):
    e = torch.exp(scores - torch.max(scores, dim=dim, keepdim=True))
    return e / e.sum(dim=dim, keepdim=True)


def along_the_first(scores, dim=0):
    largest = scores.max(dim, keepdim=True).values
    exponentials = (scores - largest).exp()
    return exponentials / exponentials.sum(dim, keepdim=True)


def without_shift_cleaned(scores, dim=-1):
    exponentials = scores.exp()
    return (exponentials / exponentials.sum(dim, keepdim=True)).nan_to_num()


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (by_the_mean, "mean_subtracted"),
        (by_a_pair, "max_is_a_pair"),
        (along_the_first, None),
        (without_shift_cleaned, None),
    ],
)
def test_common_mistakes_are_named(answer, fault):
    fails(answer, "softmax", fault)


def overwriting(scores, dim=-1):
    scores = scores.clone()
    scores -= scores.amax(dim, keepdim=True)
    exponentials = scores.exp()
    return exponentials / exponentials.sum(dim, keepdim=True)


def test_numbers_overwritten_in_place_are_not_taken_for_a_detach():
    report = fails(overwriting, "softmax")
    assert report.fault is None
    assert "has overwritten numbers" in report.message


@pytest.mark.parametrize("lowest", [-10.0, -80.0])
def test_a_score_of_minus_infinity_gets_exactly_nothing(lowest):
    def answer(scores, dim=-1):
        return torch.softmax(scores.masked_fill(scores.isinf(), lowest), dim)

    assert "gets the weight 0" in fails(answer, "softmax").message
