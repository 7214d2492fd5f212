"""Documented numbers that rules compare: each with a unit, a source, and a reason where it is missing."""
