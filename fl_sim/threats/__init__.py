"""Attacks on finished runs, such as membership inference and gradient inversion, and the unlearning of a client."""
