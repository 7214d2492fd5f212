"""The step breakdown."""
