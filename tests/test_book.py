"""The book: every lesson, answers folded, a search, and no request to another host."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from utils import book, syllabus

LESSONS = [lesson.file for lesson in syllabus.lessons()]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("book")
    book.build(out)
    return out


class Requests(HTMLParser):
    """What a browser fetches of its own accord when it shows a page."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        about = dict(attributes)
        if tag in ("script", "img", "iframe", "video", "source"):
            self.found.append(about.get("src"))
        if tag == "link" and about.get("rel") not in ("canonical", "search"):
            self.found.append(about.get("href"))


def test_no_page_asks_another_host(site):
    for page in (*site.glob("*.html"), *site.glob("lessons/*.html")):
        requests = Requests()
        requests.feed(page.read_text(encoding="utf-8"))
        for address in filter(None, requests.found):
            assert not re.match(r"(https?:)?//", address), (page, address)
            assert address.startswith("data:") or exists(page, address), (page, address)


def exists(page, address) -> bool:
    return (page.parent / address.partition("?")[0].partition("#")[0]).exists()


@pytest.mark.parametrize("file", LESSONS)
def test_a_lesson_is_whole_and_its_answers_are_folded(site, file):
    page = (site / "lessons" / f"{file}.html").read_text(encoding="utf-8")
    lesson = next(each for each in syllabus.lessons() if each.file == file)
    assert page.count("Show the answer") == len(lesson.exercises)
    assert "find the course's folder" not in page
    text = (syllabus.ROOT / "solutions" / f"{file}.ipynb").read_text(encoding="utf-8")
    assert page.count("_images/") >= text.count('"image/png"')


def test_claims_and_lessons_can_be_searched(site):
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    for name in (*(f"lessons/{file}" for file in LESSONS), "CLAIMS"):
        assert json.dumps(name) in index
    claims = (site / "CLAIMS.html").read_text(encoding="utf-8")
    assert 'href="lessons/02_attention.html"' in claims


def test_formulas_are_set_by_a_local_file(site):
    page = (site / "lessons" / "02_attention.html").read_text(encoding="utf-8")
    (address,) = re.findall(r'src="([^"]*MathJax.js)[^"]*"', page)
    assert exists(site / "lessons" / "page", address)


def test_the_first_page_links_to_pages_of_the_book(site):
    page = (site / "index.html").read_text(encoding="utf-8")
    assert "deployments" not in page
    assert "The capital of France is Paris." in page
    article = page[page.index("<article") : page.index("</article>")]
    for address in re.findall(r'<a [^>]*href="([^"#]+)', article):
        assert exists(site / "index.html", address), address


def test_a_missing_sphinx_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "sphinx.application", None)
    assert book.main([str(tmp_path)]) == 1
    assert "requirements-dev.txt" in capsys.readouterr().err
