"""Mutants of the references that are right, one module per lesson, with the reason."""
