"""Every exercise: the reference passes, every fault is named, a stub earns nothing."""

import time

import pytest

from utils import build, syllabus
from utils.check import diagnosis, evaluate, fault
from utils.check.exercise import Exercise, load_all

load_all()
LESSONS = [build.LessonSource(path) for path in build.lesson_paths()]
NAMES = [name for lesson in LESSONS for name in lesson.exercises]
EVERY = list(Exercise.registry)
FAULTS = [
    pytest.param(name, each, id=f"{name}-{each.name}")
    for name in EVERY
    for each in Exercise.registry[name].faults
]


@pytest.mark.parametrize("name", EVERY)
def test_reference_passes_within_a_second(name):
    exercise = Exercise.registry[name]
    report = evaluate(exercise.reference, name)
    assert report.status == "passed", report.message
    assert list(report.verified) == [r.sentence for r in exercise.requirements]
    started = time.process_time()
    evaluate(exercise.reference, name)
    assert time.process_time() - started < 3, "a check takes at most 3 seconds"


@pytest.mark.parametrize("name", EVERY)
def test_every_edit_stands_in_the_reference(name):
    assert list(fault.problems(Exercise.registry[name])) == []


@pytest.mark.parametrize(("name", "known"), FAULTS)
def test_fault_is_rejected_under_its_own_name(name, known):
    exercise = Exercise.registry[name]
    report = evaluate(diagnosis.answer_of(exercise, known), name)
    assert report.status == "failed", f"{known.name} passes"
    assert report.fault == known.name, report.message
    assert known.sentence == report.explanation


@pytest.mark.parametrize("name", EVERY)
def test_no_fault_has_the_name_or_the_edits_of_another(name):
    faults = Exercise.registry[name].faults
    assert len({each.name for each in faults}) == len(faults)
    edits = [(each.edited, each.edits) for each in faults if each.edits]
    assert len(set(edits)) == len(edits)


@pytest.mark.parametrize("name", NAMES)
def test_stub_is_not_written_yet(name):
    lesson = syllabus.lesson_of(name)
    source = next(each for each in LESSONS if each.file == lesson.file)
    namespace = vars(__import__(f"solutions.{lesson.slug}", fromlist=["x"])).copy()
    exec(source.answers[name].stub, namespace)
    report = evaluate(namespace[name], name)
    assert (report.status, report.fault) == ("todo", None), report.message
