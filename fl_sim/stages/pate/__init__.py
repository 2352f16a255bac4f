"""The PATE procedure: teachers vote on labels, and a student is trained on the noisy result, at a privacy cost."""
