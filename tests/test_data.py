"""Texts and tasks that lessons read and train on."""

import pytest
import torch

from utils import texts
from utils.data import recall_batch
from utils.errors import CourseError


def test_texts_are_long_and_refuse_more_than_there_is():
    assert len(texts.english(130_000)) == 130_000
    assert texts.english(1000) == texts.english(5000)[:1000]
    with pytest.raises(CourseError, match="asked for"):
        texts.code(10**9)


def test_recall_batch_can_be_answered_and_has_enough_keys():
    pairs, answers = recall_batch(50, 6, 9, 4, torch.Generator().manual_seed(0))
    assert pairs.shape == (50, 7, 2) and answers.shape == (50,)
    for row, answer in zip(pairs.tolist(), answers.tolist(), strict=True):
        table = dict(row[:-1])
        key, which = row[-1]
        assert len(table) == 6 and which == 4
        assert table[key] == answer
        assert set(table) <= set(range(9)) and set(table.values()) <= set(range(4))
    with pytest.raises(ValueError, match=r"5.*4"):
        recall_batch(2, 5, 4, 3)
