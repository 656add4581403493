"""Judges answers in tests."""

from utils.check import evaluate


def passes(answer, name=None):
    report = evaluate(answer, name)
    assert report.status == "passed", report.message
    return report


def fails(answer, name=None, fault=None):
    """It is rejected; under the name `fault`, if one is given."""
    report = evaluate(answer, name)
    assert report.status == "failed", report.message
    if fault is not None:
        assert report.fault == fault, report.message
    return report
