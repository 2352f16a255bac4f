"""The PATE procedure: teachers vote, noisy labels are charged and released, and a student is trained on them."""
