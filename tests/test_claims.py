"""A claim shows what was measured, and fails when that no longer supports it."""

import re

import pytest

from utils import build, syllabus
from utils.claims import ClaimError, claim, does_not_hold, holds, holds_if, not_decided


def test_shows_sentence_measurement_and_verdict(capsys):
    claim(
        "S00",
        "two is more than one",
        measured="2 against 1",
        verdict=holds(2 > 1),
        source="this test",
    )
    shown = capsys.readouterr().out
    for part in ("S00", "two is more than one", "2 against 1", "holds", "this test"):
        assert part in shown


@pytest.mark.parametrize(
    "verdict",
    [
        holds(1 > 2),
        holds_if("the moon is full", False),
        does_not_hold("one is more", False),
        not_decided("a longer run", False),
    ],
)
def test_raises_when_the_measurement_does_not_support_it(verdict):
    with pytest.raises(ClaimError, match="not supported by what was measured"):
        claim("S00", "…", measured="1 against 2", verdict=verdict, source="this test")


def test_a_verdict_without_a_comparison_is_refused():
    with pytest.raises(TypeError, match="comparison"):
        claim("S00", "…", measured="2", verdict="holds", source="this test")


def test_the_page_lists_every_claim_of_the_executed_notebooks():
    page = (syllabus.ROOT / "CLAIMS.md").read_text(encoding="utf-8")
    for path in build.lesson_paths():
        text = path.read_text(encoding="utf-8")
        numbers = re.findall(r'\nclaim\(\n    "([^"]+)"', text)
        for number in numbers:
            (row,) = re.findall(rf"(?m)^\| {number} \|.*$", page)
            assert f"[{path.stem}]" in row
