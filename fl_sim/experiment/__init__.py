"""Experiments: their settings, how settings are read from text, and the job that combines them with a data set."""
