"""Costs per op family, peaks in force, classification of every kernel."""
