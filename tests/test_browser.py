"""A learner's hour in JupyterLab, in a real browser: `make test-browser`.

Screenshots of every step are kept in `screenshots/`. Without a browser the test is
skipped, and says so.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import nbformat
import pytest

from tests.notebooks import code, copy_of_the_course, environment, lesson_notebook
from utils import syllabus
from utils.display import COLOURS

pytestmark = pytest.mark.browser

SCREENSHOTS = syllabus.ROOT / "screenshots"
SECONDS = 600  # for whatever is waited for: it ends at once when it has happened
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

RIGHT_WEIGHTS = '''\
def attention_weights(q, k, mask=None):
    """My own, with einsum."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / q.shape[-1] ** 0.5
    if mask is None:
        return scores.softmax(-1)
    hidden = torch.logical_not(mask)
    return scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0)'''
WRONG_ATTENTION = """\
def attention(q, k, v, mask=None):
    return attention_weights(q, k, mask)"""
UNLISTED_ATTENTION = f"{WRONG_ATTENTION} @ v * 2"
RIGHT_ATTENTION = f"{WRONG_ATTENTION} @ v"


# A server and a browser -------------------------------------------------------------


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the course, so that the parts of whoever runs this stay as they are."""
    copy = copy_of_the_course(tmp_path_factory.mktemp("browser") / "course")
    for saved in (copy / "my_transformer").glob("[a-z]*.py"):
        saved.unlink()
    return copy


@pytest.fixture(scope="module")
def lab(copy, tmp_path_factory):
    """JupyterLab as `make lab` starts it, with settings and port of its own."""
    home = tmp_path_factory.mktemp("jupyter")
    settings = {
        # Every cell is on the page at once, and nothing asks about news.
        "notebook-extension/tracker": {"windowingMode": "none"},
        "apputils-extension/notification": {"fetchNews": "false"},
    }
    for name, values in settings.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    flags = ["--no-browser", "--IdentityProvider.token=", "--ServerApp.ip=127.0.0.1"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        flags.append("--allow-root")
    log = home / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*make_lab(), *flags],
            cwd=copy,
            env=environment(**{k: str(home / v) for k, v in folders.items()}),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        about = home / "runtime" / f"jpserver-{server.pid}.json"
        until(
            lambda: port_in(about) or server.poll() is not None,
            lambda: f"JupyterLab does not start:\n{log.read_text()}",
        )
        assert server.poll() is None, log.read_text()
        url = f"http://127.0.0.1:{port_in(about)}"
        until(lambda: ask(f"{url}/api") is not None, log.read_text)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def make_lab() -> list[str]:
    """The command behind `make lab`, with this Python."""
    makefile = (syllabus.ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(
        r"^\t\$\(BIN\)/python (-m jupyterlab .*)$", makefile, re.MULTILINE
    )
    return [sys.executable, *found[1].split()]


def port_in(about: Path) -> int | None:
    """The port that a server has noted, once the note is complete."""
    try:
        return json.loads(about.read_text())["port"]
    except (OSError, ValueError):
        return None


def ask(url):
    """What the server says, or None while it does not answer."""
    try:
        with urlopen(url, timeout=60) as reply:
            return json.load(reply)
    except OSError:
        return None


def until(happened, explain=lambda: "It did not happen."):
    """Wait for what the browser cannot tell: a file, a server."""
    end = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < end, explain()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as p:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        path = path or p.chromium.executable_path
        if not Path(path).is_file():
            pytest.skip("There is no Chromium here: nothing was tried in a browser.")
        browser = p.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser, request):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(SECONDS * 1000)
    yield page
    SCREENSHOTS.mkdir(exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{request.node.name}_end.png")
    page.close()


# A notebook in it -------------------------------------------------------------------


class Notebook:
    """One notebook, opened in JupyterLab, used with mouse and keyboard."""

    def __init__(self, page, lab, copy, file):
        self.page, self.lab = page, lab
        self.path = copy / "notebooks" / f"{file}.ipynb"
        notebook = nbformat.read(self.path, as_version=4)
        self.sources = code(notebook)
        folded = sum("jupyter" in cell.metadata for cell in notebook.cells)
        page.goto(f"{lab}/lab/tree/notebooks/{file}.ipynb")
        self.panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        self.cells = self.panel.locator(".jp-CodeCell")
        self.wait(
            "n => document.querySelectorAll('.jp-NotebookPanel:not(.lm-mod-hidden) "
            ".jp-CodeCell .cm-content').length == n",
            len(self.sources) - folded,
        )
        self.wait_for_kernel()

    def wait(self, condition, argument=None):
        self.page.wait_for_function(condition, arg=argument)

    def wait_for_kernel(self):
        """Before its kernel is there, JupyterLab drops what it is asked to run."""
        until(self.has_kernel)
        self.page.locator("#jp-main-statusbar", has_text="| Idle").wait_for()

    def has_kernel(self) -> bool:
        return any(
            session["path"].endswith(self.path.name)
            and session["kernel"]["connections"] > 0
            and session["kernel"]["execution_state"] == "idle"
            for session in ask(f"{self.lab}/api/sessions") or []
        )

    def cell(self, beginning):
        """The code cell whose source begins so."""
        (at,) = [i for i, s in enumerate(self.sources) if s.startswith(beginning)]
        return self.cells.nth(at)

    def unfold(self, beginning):
        """Open a cell of which one line is shown."""
        line = self.cell(beginning).locator(".jp-Placeholder")
        if line.count():
            line.first.click()
            self.cell(beginning).locator(".cm-content").wait_for()

    def prompt(self, beginning) -> str:
        return self.cell(beginning).locator(".jp-InputPrompt").inner_text()

    def write(self, beginning, source):
        """Replace the text of a cell, as somebody does who pastes an answer."""
        self.unfold(beginning)
        editor = self.cell(beginning).locator(".cm-content")
        editor.click()
        self.page.keyboard.press("ControlOrMeta+A")
        self.page.keyboard.insert_text(source)

    def run(self, beginning):
        """Shift+Enter in a cell, and wait until it has run."""
        self.unfold(beginning)
        before = self.prompt(beginning)
        self.cell(beginning).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")
        prompt = self.cell(beginning).locator(".jp-InputPrompt").element_handle()
        self.wait(
            "([prompt, before]) => /^\\[\\d+\\]:$/.test(prompt.innerText)"
            " && prompt.innerText != before",
            [prompt, before],
        )

    def menu(self, *names):
        first, *others = names
        self.page.locator(".lm-MenuBar-itemLabel", has_text=exactly(first)).click()
        for name in others:
            self.page.locator(".lm-Menu-itemLabel", has_text=exactly(name)).click()

    def run_all(self):
        self.menu("Run", "Run All Cells")
        self.wait_for_prompts(r"\[\d+\]:")

    def wait_for_prompts(self, pattern):
        """Until the prompt of every code cell looks so; a folded one shows none."""
        self.wait(
            "pattern => Array.from(document.querySelectorAll("
            "'.jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell .jp-InputPrompt'))"
            ".every(prompt => !prompt.innerText.trim()"
            " || new RegExp(`^${pattern}$`).test(prompt.innerText))",
            pattern,
        )

    def save(self, *sources):
        """Save, and wait until it is on disk with these cells in it."""
        self.page.keyboard.press("ControlOrMeta+S")
        until(lambda: set(sources) <= set(self.on_disk()))
        self.page.locator(".lm-TabBar-tab.lm-mod-current.jp-mod-dirty").wait_for(
            state="detached"
        )

    def on_disk(self) -> list[str]:
        try:
            return code(nbformat.read(self.path, as_version=4))
        except ValueError:  # it is being written
            return []

    def restart_kernel(self):
        self.menu("Kernel", "Restart Kernel and Clear Outputs of All Cells…")
        self.page.locator(".jp-Dialog button.jp-mod-warn", has_text="Restart").click()
        self.wait_for_prompts(r"\[ \]:")
        self.wait_for_kernel()

    def report(self, beginning):
        """What a check cell shows."""
        return Report(self.cell(beginning).locator(".jp-OutputArea-output"))

    def picture(self, name):
        SCREENSHOTS.mkdir(exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")


class Report:
    def __init__(self, outputs):
        outputs.first.scroll_into_view_if_needed()
        assert outputs.count() == 1, outputs.all_inner_texts()
        self.text = outputs.inner_text().replace("\N{NO-BREAK SPACE}", " ")
        bar = outputs.locator("div[style*=border-left]")
        assert bar.is_visible()
        self.colour = bar.evaluate("e => getComputedStyle(e).borderLeftColor")
        self.code = outputs.locator("code").all_inner_texts()

    def assert_shows(self, status, *texts):
        red, green, blue = bytes.fromhex(COLOURS[status][1:])
        assert self.colour == f"rgb({red}, {green}, {blue})", self.text
        for text in texts:
            assert text in self.text
        assert "`" not in self.text  # set as code, not shown as it is written
        assert "Traceback" not in self.text


def show(element):
    """Scroll until it stands in the middle of the page, for a screenshot."""
    element.evaluate("e => e.scrollIntoView({block: 'center'})")


def exactly(name):
    return re.compile(rf"^{re.escape(name)}$")


# What a learner does ----------------------------------------------------------------


def test_a_learner_in_jupyterlab(page, lab, copy):
    lesson = Notebook(page, lab, copy, "02_attention")
    first, setup = (lesson.panel.locator(".jp-Cell").nth(i) for i in (0, 1))
    assert first.locator("h1").is_visible()
    assert "Run this cell first" in setup.locator(".jp-Placeholder").inner_text()
    picture = lesson.panel.locator("img[src*='attention.svg']")
    lesson.wait("img => img.naturalWidth > 500", picture.element_handle())
    lesson.picture("0_first_screen")
    lesson.write("def attention_weights", RIGHT_WEIGHTS)
    lesson.write("def attention(", WRONG_ATTENTION)
    lesson.run_all()

    right = lesson.report("attention_weights = check")
    right.assert_shows(
        "passed", "✓ attention_weights: right", "Saved in my_transformer/attention.py"
    )
    assert "my_transformer/attention.py" in right.code
    lesson.picture("1_right")
    wrong = lesson.report("attention = check")
    wrong.assert_shows(
        "failed",
        "✗ attention: not right yet",
        "What happened: These are the attention weights.",
        "the cells below use the reference",
    )
    lesson.picture("2_wrong")
    unwritten = lesson.report("causal_mask = check")
    unwritten.assert_shows(
        "todo", "○ causal_mask: not written yet", "the cells below use the reference"
    )
    lesson.picture("3_not_written")
    assert page.locator(".jp-RenderedText[data-mime-type*=stderr]").count() == 0

    lesson.write("def attention(", UNLISTED_ATTENTION)
    lesson.run("def attention(")
    lesson.run("attention = check")
    described = lesson.report("attention = check")
    described.assert_shows(
        "failed",
        "✗ attention: not right yet",
        "What differs: Every value of the result is twice as large as expected.",
    )
    lesson.picture("4_described")

    lesson.write("def attention(", RIGHT_ATTENTION)
    lesson.run("def attention(")
    lesson.run("attention = check")
    corrected = lesson.report("attention = check")
    corrected.assert_shows("passed", "✓ attention: right", "Saved in")
    lesson.picture("5_corrected")

    lesson.save(RIGHT_WEIGHTS, RIGHT_ATTENTION)
    lesson.restart_kernel()
    lesson.run(lesson.sources[0])
    assert lesson.prompt(lesson.sources[0]) == "[1]:"

    later = Notebook(page, lab, copy, "03_multi_head")
    later.run(later.sources[0])
    later.run("import ipywidgets")
    shown = later.cell("import ipywidgets").locator(".jp-OutputArea").inner_text()
    assert "SelfAttention: the reference, until yours passes in 02_attention." in shown
    assert "causal_mask: the reference" in shown
    assert "attention:" not in shown.replace("SelfAttention:", "")
    later.write("LETTERS =", "print(whose(attention), whose(causal_mask))")
    later.run("LETTERS =")
    shown = later.cell("LETTERS =").locator(".jp-OutputArea").inner_text()
    assert shown.strip() == "your `attention` the reference `causal_mask`"
    later.picture("6_next_lesson")

    page.goto(f"{lab}/lab/tree/my_transformer/attention.py")
    package = page.locator(".jp-FileEditor .cm-content")
    package.locator("text=# part: attention_weights").wait_for()
    assert "My own, with einsum." in package.inner_text()
    page.screenshot(path=SCREENSHOTS / "7_package.png")


def test_a_slider_redraws_its_figure(page, lab, copy):
    """Lesson 04's arrows, in a notebook of their own: the lesson takes a minute."""
    made = lesson_notebook("04_positions")
    wanted = (
        "# Run this cell first",
        "import ",
        "def rope",
        "rope = check",
        "q = torch",
    )
    made.cells = [
        cell
        for cell in made.cells
        if cell.cell_type == "code" and cell.source.startswith(wanted)
    ]
    assert len(made.cells) >= len(wanted)
    nbformat.write(made, copy / "notebooks" / "arrows.ipynb")
    arrows = Notebook(page, lab, copy, "arrows")
    arrows.run_all()
    cell = arrows.cell("q = torch")
    figure = cell.locator(".widget-output img")
    figure.wait_for()
    before = figure.get_attribute("src")
    readout = cell.locator(".widget-readout").first
    assert readout.inner_text() == "0"
    show(figure)
    arrows.picture("8_slider")
    cell.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    arrows.wait(
        "([cell, before]) => {"
        " const drawn = cell.querySelectorAll('.widget-output img');"
        " return drawn.length == 1 && drawn[0].src != before; }",
        [cell.element_handle(), before],
    )
    assert readout.inner_text() == "1"
    show(figure)
    arrows.picture("9_slider_moved")
