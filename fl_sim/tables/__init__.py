"""Tables: a grid of experiments, its workers and its words."""
