"""Privacy costs of PATE's noisy votes, and the publication of a cost that was computed from the votes."""
