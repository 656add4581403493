"""Pictures: valid, the same each time, described, and readable on two grounds."""

import re
from xml.etree import ElementTree

import pytest

from utils import diagrams, syllabus
from utils.build import BuildError, LessonSource
from utils.diagrams.drawing import DARK, LIGHT, Drawing

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", diagrams.names())
def test_every_picture(name):
    text = diagrams.svg(name)
    assert text == diagrams.svg(name)
    root = ElementTree.fromstring(text)
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert len(title.text.split()) >= 3
    assert description.text.endswith(".")
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    width, height = int(root.get("width")), int(root.get("height"))
    assert width <= 900
    for element in root.iter():
        for key, most in (("x", width), ("y", height), ("cx", width), ("cy", height)):
            if key in element.attrib and element.tag != f"{SVG}pattern":
                assert 0 <= float(element.get(key)) <= most, element.attrib
    assert f"](../diagrams/{name}.svg)" in "".join(
        path.read_text(encoding="utf-8")
        for path in (syllabus.ROOT / "lessons").glob("*.md")
    )


@pytest.mark.parametrize("name", diagrams.names())
def test_letters_do_not_leave_the_card(name):
    """With six tenths of its size for a letter, which is generous."""
    root = ElementTree.fromstring(diagrams.svg(name))
    width = int(root.get("width"))
    for text in root.iter(f"{SVG}text"):
        room = float(text.get("font-size")) * 0.6 * len(text.text)
        share = {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
        left = float(text.get("x")) - share * room
        assert left >= -4, text.text
        assert left + room <= width + 4, text.text


def luminance(colour) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("kind", LIGHT)
def test_letters_can_be_read(palette, kind):
    """Contrast of at least 4.5 to the card and to the cells (WCAG 2.1, 1.4.3)."""
    letters = luminance(palette[kind][2])
    for ground in (palette["ink"][1], palette[kind][1]):
        low, high = sorted((letters, luminance(ground)))
        assert (high + 0.05) / (low + 0.05) >= 4.5


def test_a_tensor_says_where_it_is():
    d = Drawing(300, 200, "A tensor", "Two rows, three columns.")
    area = d.tensor(10, 20, 2, 3, name="X", values=lambda r, c: 3 * r + c)
    assert (area.right, area.bottom, area.middle, area.centre) == (70, 60, 40, 40)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", d.svg())
    assert texts == ["0", "1", "2", "3", "4", "5", "X"]


@pytest.mark.parametrize(
    ("picture", "says"),
    [
        ("![too few words](../diagrams/attention.svg)", "five words"),
        ("![a sentence of five words](../diagrams/none.svg)", "no picture is drawn"),
        ("![a sentence of five words](attention.svg)", "no picture is drawn"),
    ],
)
def test_a_lesson_with_a_wrong_picture_is_refused(tmp_path, picture, says):
    for folder in ("lessons", "solutions", "utils/exercises"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("solutions/start.py", "utils/exercises/start.py"):
        (tmp_path / file).write_bytes((syllabus.ROOT / file).read_bytes())
    lesson = (syllabus.ROOT / "lessons" / "00_start.md").read_text(encoding="utf-8")
    path = tmp_path / "lessons" / "00_start.md"
    path.write_text(f"{lesson}\n{picture}\n", encoding="utf-8")
    with pytest.raises(BuildError, match=says):
        LessonSource(path)
