"""Privacy costs of PATE's noisy votes, and the publication of a data-dependent cost."""
