"""The inputs that checks call answers with: sizes that must be told apart differ.

Where two sizes are equal, or one is 1, in the first requirement that sees both, a
mistake between them shows later than it should, and is given the name of another.
"""

from itertools import product

import pytest

from tests.probes import always_one, calls_of, coincidences
from utils import syllabus
from utils.check.exercise import load_all

NAMES = [name for lesson in syllabus.lessons() for name in lesson.exercises]
SQUARE = "a square mask comes first, a rectangular one next"
STEPS = "the smallest case comes first on purpose, the general one next"
INTENDED = {
    "Block": {"x[-2]": STEPS},
    "Transformer": {"ids[-1]": STEPS},
    "shift_right": {"ids[-2]": STEPS},
    "translate": {"source[-2]": STEPS},
    "MultiHeadAttention": {
        (
            "argument 2[-1]",
            "argument 3[-1]",
        ): "matrices by position, none of the answer's"
    },
    "flash_attention": {
        (block, f"{name}[{at}]"): "block sizes come first that are small, then others"
        for block, sizes in (
            ("block_k", ("k-3", "q-3", "v-3")),
            ("block_q", ("k-4", "q-4", "v-4", "q-2")),
        )
        for name, at in (size.split("-", 1) for size in sizes)
        for at in (f"-{at}",)
    },
    "flash_kernel": dict.fromkeys(
        ("q[-3]", "q[-4]", "k[-3]", "k[-4]", "v[-3]", "v[-4]"), "one head comes first"
    )
    | dict.fromkeys(
        (
            tuple(sorted((f"{a}[{i}]", f"{b}[{j}]")))
            for a, i, b, j in product("qkv", (-3, -4), "qkv", (-3, -4))
            if i != j
        ),
        "one row and one head come first",
    ),
    "KVCache": {"n_layers": STEPS},
    "RollingKVCache": {"n_layers": STEPS},
    "cached_forward": {"ids[-1]": STEPS},
    "chunk_mask": {("t_k", "t_q"): SQUARE},
    "sliding_window_mask": {("t_k", "t_q"): SQUARE},
    "sink_mask": {("t_k", "t_q"): SQUARE},
    "strided_mask": {("t_k", "t_q"): SQUARE},
    "alibi_bias": {("t_k", "t_q"): SQUARE},
    "chunked_attention": dict.fromkeys(
        (("k[-2]", "q[-2]"), ("q[-2]", "v[-2]")), "a whole text comes first"
    ),
    "moe_parameters": dict.fromkeys(
        ("k", "n_experts", ("k", "n_experts")), "one expert, a dense layer, comes first"
    ),
    "drop_over_capacity": {"experts[-1]": "k = 1 comes first, then k = 2"},
    "AdamW": {"steps": "one step comes first"},
}


@pytest.mark.parametrize("name", NAMES)
def test_sizes_that_must_be_told_apart_differ(name, monkeypatch):
    calls = calls_of(load_all()[name], monkeypatch)
    found = coincidences(calls) | always_one(calls)
    assert found == set(INTENDED.get(name, {}))


def test_a_coincidence_is_found():
    calls = [[{"t": 4, "d": 4, "n": 1}], [{"t": 4, "d": 5, "n": 2}]]
    assert coincidences(calls) == {("d", "t")}
    assert always_one(calls) == {"n"}
    assert coincidences([[{"t": 4, "d": 5}, {"t": 3, "d": 3}]]) == set()
