"""Privacy costs of PATE's noisy votes, and the private publication of a cost that depends on the votes."""
