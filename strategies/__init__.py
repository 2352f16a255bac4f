"""Federated algorithms, one file each, with aggregators and samplers."""
