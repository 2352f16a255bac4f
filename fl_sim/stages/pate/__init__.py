"""The PATE procedure: teachers vote, noisy labels are charged to a ledger, and a student is trained on the labels."""
