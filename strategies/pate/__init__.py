"""PATE: noisy votes of teachers, their cost, and the students that learn from them."""
