"""PATE's run: teachers vote, labels are paid for, a student learns."""
