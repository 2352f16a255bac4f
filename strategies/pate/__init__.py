"""PATE: settings, labelling by the noisy votes of teachers, and students that learn from the labels."""
