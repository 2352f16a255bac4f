"""The PATE procedure: teachers vote on labels of public records, and a student is trained on the noisy labels."""
