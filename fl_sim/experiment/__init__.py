"""Experiments: their settings, the reading of settings from text, and the job (an experiment with its data set)."""
