"""PATE (private aggregation of teacher ensembles): teachers label by noisy votes, students learn from the labels."""
