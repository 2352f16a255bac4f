"""Figures of runs, partitions and synthetic records."""
