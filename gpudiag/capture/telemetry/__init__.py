"""Samples of clocks, power, temperature and load beside the steps: a thread, and the sources that it asks."""
