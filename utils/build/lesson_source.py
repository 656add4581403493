"""Reads `lessons/*.md` and refuses what breaks a rule."""

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import jupytext

from utils import diagrams
from utils.build.errors import BuildError
from utils.build.references import BEGIN, END, answers
from utils.check import fault
from utils.check.exercise import Exercise
from utils.imports import lesson_imports
from utils.syllabus import ROOT

FURTHER = "\n## Going further\n"


def lesson_paths() -> list[Path]:
    """Every lesson's source, in the order of the course."""
    return sorted((ROOT / "lessons").glob("[0-9][0-9]_*.md"))


class LessonSource:
    """One `lessons/NN_slug.md`, its rules checked."""

    def __init__(self, path: Path):
        self.path, self.root, self.file = path, path.parent.parent, path.stem
        self.slug = path.stem.partition("_")[2]
        self.text = path.read_text(encoding="utf-8")
        parsed = jupytext.reads(self.text, fmt="md")
        self.cells, self.about = parsed.cells, parsed.metadata.get("course", {})
        self.problems: list[str] = []
        self.exercises: dict[str, dict] = {}  # name → difficulty, minutes, "extra"
        solutions = self.root / "solutions" / f"{self.slug}.py"
        self.answers = answers(solutions) if solutions.is_file() else {}
        self._check_front_matter()
        for i, cell in enumerate(self.cells):
            if "exercise" in cell.metadata:
                self._check_exercise(i, cell)
        if self.text.count(FURTHER) > 1:
            self._refuse(FURTHER, "“Going further” stands twice")
        self._check_pictures()
        self._check_nothing_left_over()
        self._check_faults()
        if self.problems:
            raise BuildError("\n".join(self.problems))

    def imports(self) -> list[str]:
        """What the lesson's cells import, apart from the course's own tools."""
        return lesson_imports([c.source for c in self.cells if c.cell_type == "code"])

    def _refuse(self, pattern: str, problem: str) -> None:
        """Note a problem, at the line of the source where `pattern` first stands."""
        found = re.search(pattern, self.text)
        line = self.text[: found.start()].count("\n") + 1 if found else 1
        self.problems.append(f"lessons/{self.path.name}:{line}: {problem}")

    def _check_front_matter(self):
        for key, kind in (("title", str), ("summary", str), ("minutes", int)):
            if not isinstance(self.about.get(key), kind):
                self._refuse("course:", f"the front matter lacks course.{key}")

    def _check_exercise(self, i, cell):
        name = cell.metadata["exercise"]
        fence = rf"(?m)^```python .*exercise=\"{re.escape(str(name))}\""

        def refuse(problem):
            self._refuse(fence, f"exercise {name}: {problem}")

        difficulty, minutes = (cell.metadata.get(k) for k in ("difficulty", "minutes"))
        if name in self.exercises:
            refuse("the name is used twice")
        if not isinstance(difficulty, int) or not 1 <= difficulty <= 5:
            refuse("no difficulty from 1 to 5")
        if not isinstance(minutes, int) or minutes < 1:
            refuse("no minutes")
        if cell.source.strip():
            refuse("its fence must be empty, the builder fills it")
        before = self.cells[i - 1] if i else None
        prose = before.source if before and before.cell_type == "markdown" else ""
        if not re.search(r"^#+ .*Exercise", prose, re.MULTILINE):
            refuse("no heading `Exercise: …` in the text before it")
        hints = re.findall(r"<details>\s*<summary>Hint", prose)
        if len(hints) < 2 or prose.count("<details>") != prose.count("</details>"):
            refuse("fewer than two folded hints (<details><summary>Hint …) before it")
        answer = self.answers.get(name)
        if answer is None:
            refuse(
                f"no reference with {BEGIN} and {END} in solutions/{self.slug}.py, "
                "so no stub either"
            )
        elif BEGIN in answer.stub or END in answer.stub:
            refuse(f"a {BEGIN} without its {END} in solutions/{self.slug}.py")
        elif not ast.get_docstring(ast.parse(answer.source).body[0]):
            refuse("its reference has no docstring")
        after = self.cells[i + 1] if i + 1 < len(self.cells) else None
        if after is None or after.source.strip() != f"{name} = check({name})":
            refuse(f"no check cell `{name} = check({name})` right after it")
        if not self._specified(name):
            refuse(f"no requirements in utils/exercises/{self.slug}.py")
        self.exercises[name] = {"difficulty": difficulty, "minutes": minutes}
        if cell.metadata.get("extra"):
            self.exercises[name]["extra"] = True

    def _specified(self, name) -> bool:
        if not (self.root / "utils" / "exercises" / f"{self.slug}.py").is_file():
            return False
        import_module(f"utils.exercises.{self.slug}")
        known = Exercise.registry.get(name)
        return known is not None and known.lesson == self.slug and known.requirements

    def _check_pictures(self):
        """Every picture is one that `utils.diagrams` draws, and says what it shows."""
        drawn = {f"../diagrams/{name}.svg" for name in diagrams.names()}
        for sentence, target in re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", self.text):
            if target not in drawn:
                self._refuse(re.escape(target), f"no picture is drawn for {target}")
            if len(sentence.split()) < 5:
                self._refuse(
                    re.escape(target),
                    f"{target} lacks a sentence of five words or more for those who "
                    "cannot see it",
                )

    def _check_faults(self):
        """A fault is an edit of the reference, so what it replaces stands there."""
        if find_spec(f"utils.faults.{self.slug}"):
            import_module(f"utils.faults.{self.slug}")
        for exercise in Exercise.registry.values():
            if exercise.lesson == self.slug:
                self.problems += fault.problems(exercise)

    def _check_nothing_left_over(self):
        for name in set(self.answers) - set(self.exercises):
            self.problems.append(
                f"solutions/{self.slug}.py: `{name}` has a marked solution, but "
                f"lessons/{self.path.name} has no such exercise"
            )
        for cell in self.cells:
            if BEGIN in cell.source or END in cell.source:
                self._refuse(
                    "### (BEGIN|END) SOLUTION", "a solution stands in the lesson"
                )
