"""Each thing that utils/difference.py can say, and when it must be silent."""

import math
import time

import pytest
import torch

from utils.check.difference import describe, describe_values

torch.manual_seed(0)
torch.set_num_threads(1)
X = torch.randn(2, 3, 5, 8)  # batch, head, position, feature
S = torch.randn(5, 5)
P = X.softmax(-1)
MASK = torch.rand(2, 5) < 0.5
MASK[0, 0], MASK[1, 1] = True, False
CAUSAL = torch.ones(6, 6).tril().bool()
INTS = torch.randint(0, 50, (4, 6))
SIZES = {"d_head": 8, "n_heads": 3, "T": 5}


def wrong_where(region, expected=X):
    return torch.where(region, expected * expected + 1, expected)


def at(dim, *positions, expected=X):
    region = torch.zeros_like(expected, dtype=torch.bool)
    region.index_fill_(dim, torch.tensor(positions), True)
    return wrong_where(region, expected)


def norm(x, unbiased=False):
    return (x - x.mean(-1, True)) / (x.var(-1, unbiased, keepdim=True) + 1e-5).sqrt()


def heads_alternate(x):
    return x.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2)


IDS = torch.tensor([[3, 0, 4, 0, 5], [0, 6, 0, 7, 8]])
CLEAN = X[:, 0]  # (2, 5, 8)
NAN_ROWS = CLEAN.masked_fill(~MASK[..., None], math.nan)
TABLE = torch.randn(12, 8)

EQUAL_SHAPES = [
    (X * 8**0.5, X, "2.83 times too large; √8 is 2.83, and `d_head` is 8"),
    (X / 8, X, "8 times too small; `d_head` is 8"),
    (X * 15, X, "15 times too large; `n_heads` is 3 and `T` 5"),
    (X * 25, X, "25 times too large; 5² is 25, and `T` is 5"),
    (X * 2, X, "of the result is twice as large"),
    (X / 2, X, "half of what is expected"),
    (X * math.log(2), X, "logarithms to base 2 and e differ by this factor"),
    (X * math.pi, X, "3.14 times too large; π is 3.14"),
    (X * 1.3, X, "1.3 times too large."),
    (X * -1.3, X, "1.3 times too large, with the opposite sign."),
    (norm(X, True), norm(X), "its square is 8/7, and `d_head` is 8"),
    (-X, X, "has the opposite sign"),
    (X.abs(), X, "none is negative"),
    (X + 1, X, "too large by one."),
    (X - 0.3, X, "too small by 0.3."),
    (INTS - 5, INTS, "too small by 5; `T` is 5"),
    (X.exp(), P, "Each row along the last dimension is right up to a factor"),
    (X - X.mean(-1, True), X, "up to a constant of its own"),
    (S.T, S, "with dimension 0 and the last dimension exchanged"),
    (X.roll(1, 2), X, "stand one position too late along dimension 2"),
    (X.roll(-2, 2), X, "stand 2 positions too early along dimension 2"),
    (X.flip(2), X, "reversed along dimension 2"),
    (X[:, :, [2, 0, 1, 4, 3]], X, "rows along dimension 2 are right but in another"),
    (heads_alternate(X), X, "two halves of the last dimension alternate"),
    (X, heads_alternate(X), "in different halves"),
    (X.sort(-1).values, X, "another order within the last dimension"),
    (X.flatten()[torch.randperm(240)].view_as(X), X, "right ones in another order"),
    (at(2, 2, 3, 4), X, "first 2 positions are right and the rest wrong"),
    (at(2, 1, 2, 3, 4), X, "Only the first position along dimension 2 is right"),
    (at(0, 0, 1, expected=X[0, 0, 0]), X[0, 0, 0], "first 2 positions are wrong"),
    (at(2, 4), X, "Only the last position along dimension 2 is wrong"),
    (at(0, 1), X, "Only the first position along dimension 0 is right"),
    (at(1, 0, 2), X, "Only position 1 (counted from 0) along dimension 1 is right"),
    (at(3, 0, 1, 2, 3), X, "Of the last dimension, the first half is wrong"),
    (at(3, 1, 3, 5, 7), X, "every second position is right, from the first on"),
    (at(3, 1, 6), X, "all at positions 1 and 6 of the last dimension"),
    (wrong_where(torch.eye(5).bool(), S), S, "Only values on the diagonal"),
    (wrong_where(torch.ones(5, 5).triu(1).bool(), S), S, "values above the diagonal"),
    (wrong_where(torch.ones(5, 5).tril(-1).bool(), S), S, "values below the diagonal"),
    (X.relu() + 0.1 * (X == 0), X, "No value of the result is smaller than 0"),
    (X.clamp(max=1), X, "No value of the result is larger than 1"),
    (X.half().float(), X, "float16 numbers, right to that precision"),
    (X.double().cos().float().double(), X.double().cos(), "float32 numbers"),
    (X, X.double(), "right, but of type float32 instead of float64"),
    (INTS.float(), INTS, "right, but of type float32 instead of int64"),
    (X.exp(), X, "e to the power of the expected one"),
    (P.log(), P, "the logarithm of the expected one"),
    (P.softmax(-1), P, "after one more softmax along the last dimension"),
    (X.cumsum(2), X, "sum of the expected ones up to its place along dimension 2"),
    (X.sigmoid(), P, "not 1 everywhere"),
    (X.softmax(2), P, "sum to 1 along dimension 2, and not along the last"),
    (X + X.sin(), norm(X), "the mean of the values is not 0 everywhere"),
    (norm(X) ** 3 - (norm(X) ** 3).mean(-1, True), norm(X), "root mean square"),
    (X[:1].expand_as(X), X, "the same at every position of dimension 0"),
    (X * 0, X, "is the same, 0"),
    (X * math.nan, X, "Every value of the result is NaN"),
    (X.masked_fill(X > 1, math.inf), X, "values are infinite"),
    (S, S.masked_fill(S > 1, -math.inf), "Where an infinity is expected"),
    (X + 0.003 * X.cos(), X, "Nearly right: no value of the result is off"),
    (wrong_where(X.max() == X), X, "1 of 240 values differs: the one at"),
    (~CAUSAL, CAUSAL, "Every value of the result is inverted"),
    (CAUSAL.T, CAUSAL, "exchanged"),
    (CAUSAL.tril(-1), CAUSAL, "values on the diagonal"),
    (torch.ones(6, 6).tril(1).bool(), CAUSAL, "one place above the diagonal"),
    (CAUSAL | True, CAUSAL, "Every value of the result is True"),
    (torch.tensor(8**0.5), torch.tensor(1.0), "2.83 times too large; √8"),
]

WITH_INPUTS = [
    (X, X + X.cos(), {"x": X}, "those of the input `x`, unchanged"),
    (S.T, S.exp(), {"s": S}, "the input `s` with dimensions 0 and 1 exchanged"),
    (X.cos() + X, X.cos(), {"x": X}, "too large by that of `x` at its place"),
    (X.cos(), X.cos() + TABLE[0], {"b": TABLE[0]}, "too small by that of `b`"),
    (X, X * TABLE[0], {"gain": TABLE[0]}, "lacks a factor, that of `gain`"),
    (wrong_where(~MASK[..., None], CLEAN), CLEAN, {"mask": MASK}, "`mask` is False"),
    (wrong_where(X < 0), X, {"x": X * 1.5 + 0 * X}, "where `x` is negative"),
    (wrong_where(X.abs() > 1), X, {"x": X**3}, "where `x` is large in size"),
    (wrong_where(IDS[..., None] == 0, CLEAN), CLEAN, {"ids": IDS}, "where `ids` is 0"),
    (NAN_ROWS, CLEAN, {"mask": MASK[..., None]}, "`mask` is False everywhere"),
    (X * 8**0.5, X, {"q": X, "k": X}, "the last dimension of `q` is 8"),
    (X * 0.1, X, {"p": 0.1}, "`p` is 0.1"),
]

OTHER_SHAPES = [
    (X.transpose(1, 2), X, {}, "dimensions 1 and 2 exchanged"),
    (X.permute(1, 2, 0, 3), X, {}, "dimensions in another order"),
    (X.transpose(1, 2).cos(), X, {}, "The sizes of dimensions 1 and 2"),
    (S[None], S, {}, "right, but a dimension of size 1 is too many: dimension 0"),
    (S, S[:, None], {}, "right, but a dimension of size 1 is missing: dimension 1"),
    (X.flatten(), X, {}, "right, but flattened"),
    (X.flatten(2), X, {}, "right, but in another shape"),
    (X[:, :, 1:], X, {}, "4 positions instead of 5: these are right, and the last 4"),
    (X, X[:, :, :4], {}, "5 positions instead of 4: the first 4 are right"),
    (X[:, :, 1:].cos(), X, {}, "there are 4 positions instead of 5."),
    (torch.cat([X, X], 1), X, {}, "again and again"),
    (X.mean(1), X, {}, "the mean of the expected ones along dimension 1"),
    (S.expand(3, 5, 5), S, {}, "repeated along a new dimension, number 0"),
    (X.cos(), S, {"x": X}, "The shape of the result is that of the input `x`"),
]

VALUES = [
    (4, 3, {}, "too large by one"),
    (6.0, 12.0, {}, "half of what is expected"),
    (-7, 7, {}, "opposite sign"),
    (35, 7, {"T": 5}, "5 times too large; `T` is 5"),
    (12, 7, {"T": 5}, "too large by 5; `T` is 5"),
    (0, 7, {}, "is 0"),
    (math.nan, 7.0, {}, "is nan"),
    (7.0, 7, {}, "right, but of type float instead of int"),
    ("7", 7, {}, "of type str instead of int"),
    ([1, 2, 3], (1, 2, 3), {}, "right, but of type list instead of tuple"),
    ([1, 2, 3, 9, 5, 5], [1, 2, 3, 4, 5, 6], {}, "first 3 elements are right"),
    ([1, 2, 3, 4], [1, 2, 3], {}, "1 element too many, at the end"),
    ([2, 3], [0, 1, 2, 3], {}, "are 2 elements too few, at the start"),
    ([5, 9, 2], [2, 9, 5], {}, "reversed"),
    ([9, 5, 2], [2, 9, 5], {}, "another order"),
    ([3, 7, 4], [2, 6, 3], {}, "Each element is too large by one"),
    ([8, 7, 4], [2, 7, 4], {}, "but the one at 0"),
    ([], [1], {}, "empty"),
    ("Hello", "hello", {}, "upper and lower case"),
    (b"a b ", b"a b", {}, "1 element too many, at the end"),
    (" a  b", "a b ", {}, "white space"),
]


@pytest.mark.parametrize("actual, expected, text", EQUAL_SHAPES)
def test_equal_shapes(actual, expected, text):
    assert text in str(describe(actual, expected, sizes=SIZES))


@pytest.mark.parametrize("actual, expected, inputs, text", WITH_INPUTS + OTHER_SHAPES)
def test_inputs_and_other_shapes(actual, expected, inputs, text):
    assert text in str(describe(actual, expected, inputs=inputs))


@pytest.mark.parametrize("actual, expected, sizes, text", VALUES)
def test_values(actual, expected, sizes, text):
    assert text in str(describe_values(actual, expected, sizes=sizes))


def test_names_of_axes_and_of_the_result():
    axes = ("batch", "head", "query", "key")
    assert "along the `query` dimension" in describe(X.flip(2), X, axes=axes)
    assert "value of the scores" in describe(-X, X, what="the scores")


def test_ambiguous_factor_is_left_unexplained():
    text = describe(X * 8, X, sizes={"T": 8, "d": 8})
    assert text == "Every value of the result is 8 times too large."


SHAPES = [(), (1,), (2,), (7,), (2, 2), (3, 4), (4, 4), (2, 3, 4), (2, 2, 5, 5), (1, 9)]


def drawn(kind, shape):
    if kind == "bool":
        return torch.rand(shape) < 0.5
    if kind == "int":
        return torch.randint(0, 10, shape)
    if kind == "causal":
        return torch.randn(*shape, 6, 6).masked_fill(~CAUSAL, -math.inf).softmax(-1)
    return torch.randn(shape).to(getattr(torch, kind))


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "int", "bool"])
def test_silent_about_unrelated_tensors(kind):
    said = []
    for seed in range(60):
        torch.manual_seed(seed)
        shape = SHAPES[seed % len(SHAPES)]
        if kind == "int" and shape in ((), (1,)):
            continue  # two of ten numbers are often one apart
        actual, expected = drawn(kind, shape), drawn(kind, shape)
        inputs = {
            "x": torch.randn(shape),
            "mask": torch.rand(shape) < 0.5,
            "ids": torch.randint(0, 5, shape),
            "eps": 1e-5,
        }
        said.append(describe(actual, expected, inputs=inputs))
    assert [text for text in said if text] == []


def test_silent_about_unrelated_attention_and_shapes():
    for seed in range(60):
        torch.manual_seed(seed)
        one, other = drawn("causal", (2, 3)), drawn("causal", (2, 3))
        assert "first position" in describe(one, other)  # this sees itself alone
        assert describe(torch.randn(2, 3, 4), torch.randn(5, 3)) is None


TRIVIAL = [
    (torch.full((4, 4), 2.0), torch.full((4, 4), 3.0)),
    (torch.ones(1), torch.tensor([1.37])),
    (torch.ones(1, 1, 1), torch.tensor([[[2.9]]])),
    (torch.zeros(4, 4), torch.zeros(4, 4)),
    (torch.randn(4, 4), torch.zeros(4, 4)),
    (X, X),
    (X + 1e-7, X),
    (torch.zeros(0, 3), torch.zeros(0, 3)),
    (None, X),
    (X, "no tensor"),
    (X.to(torch.complex64), X),
    (torch.eye(2), torch.eye(2).flip(0)),
]


@pytest.mark.parametrize("actual, expected", TRIVIAL)
def test_silent_about_trivial_things(actual, expected):
    assert describe(actual, expected, inputs={"x": X, "n": 3}) is None


@pytest.mark.parametrize(
    "actual, expected",
    [(3, 3), (3.7, 1.2), ("abc", "xyz"), ([4, 8], [1, 9]), (object(), object())],
)
def test_silent_about_unrelated_values(actual, expected):
    assert describe_values(actual, expected, sizes=SIZES) is None


def test_fast():
    actual, expected = torch.randn(2, 4, 25, 50), torch.randn(2, 4, 25, 50)
    inputs = {"x": torch.randn(2, 4, 25, 50), "mask": actual > 0}
    describe(actual, expected, inputs=inputs)
    start = time.perf_counter()
    assert describe(actual, expected, inputs=inputs) is None
    assert time.perf_counter() - start < 0.2  # about 0.02 on an idle core
