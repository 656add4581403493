"""Checks answers: says what is right or wrong, and names the mistake."""

from utils.check.engine import evaluate
from utils.check.notebook import check, check_joint
from utils.check.report import Report

__all__ = ["Report", "check", "check_joint", "evaluate"]
