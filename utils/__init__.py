"""The course's machinery: checks, saved parts, claims, plots and the builder."""
