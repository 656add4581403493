"""Every exercise: the reference passes, every fault is named, a stub earns nothing."""

import time

import pytest

from utils import build, syllabus
from utils.check import evaluate, evaluate_joint
from utils.check.engine import import_specifications
from utils.check.exercise import Exercise, Joint

import_specifications()
LESSONS = [build.LessonSource(path) for path in build.lesson_paths()]
NAMES = [name for lesson in LESSONS for name in lesson.exercises]
FAULTS = [
    pytest.param(name, fault, id=f"{name}-{fault.name}")
    for name in NAMES
    for fault in Exercise.registry[name].faults
]
JOINT_FAULTS = [
    pytest.param(name, fault, id=f"{name}-{fault.name}")
    for name, joint in Joint.registry.items()
    for fault in joint.faults
]


@pytest.mark.parametrize("name", NAMES)
def test_reference_passes_within_a_second(name):
    exercise = Exercise.registry[name]
    report = evaluate(exercise.reference, name)
    assert report.status == "passed", report.message
    assert report.verified == [r.sentence for r in exercise.requirements]
    started = time.process_time()
    evaluate(exercise.reference, name)
    assert time.process_time() - started < 3, "a check takes at most 3 seconds"


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_fault_is_rejected_under_its_own_name(name, fault):
    report = evaluate(fault.implementation, name)
    assert report.status == "failed", f"{fault.name} passes"
    assert report.fault == fault.name, report.message
    assert fault.sentence in report.message


@pytest.mark.parametrize("name", NAMES)
def test_stub_is_not_written_yet(name):
    lesson = syllabus.lesson_of(name)
    source = next(each for each in LESSONS if each.file == lesson.file)
    namespace = vars(__import__(f"solutions.{lesson.slug}", fromlist=["x"])).copy()
    exec(source.answers[name].stub, namespace)
    report = evaluate(namespace[name], name)
    assert (report.status, report.fault) == ("todo", None), report.message


@pytest.mark.parametrize("name", list(Joint.registry))
def test_references_fit_together(name):
    report = evaluate_joint(name, Joint.registry[name].reference)
    assert report.status == "passed", report.message


@pytest.mark.parametrize(("name", "fault"), JOINT_FAULTS)
def test_joint_names_what_does_not_fit(name, fault):
    parts = {**Joint.registry[name].reference, **fault.implementation}
    report = evaluate_joint(name, parts)
    assert (report.status, report.fault) == ("failed", fault.name), report.message


@pytest.mark.parametrize("name", NAMES)
def test_exercise_names_three_faults(name):
    assert len(Exercise.registry[name].faults) >= 3
