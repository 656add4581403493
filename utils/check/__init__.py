"""Checks answers: says what is right or wrong, and names the mistake."""

from utils.check.engine import check, check_joint, evaluate, evaluate_joint

__all__ = ["check", "check_joint", "evaluate", "evaluate_joint"]
