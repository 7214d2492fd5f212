"""Experiments: two ways of training compared by processes that are alive together and take turns."""
