"""Federated algorithms, one file each, and aggregators, samplers, servers, attacks, and layers (code around rounds)."""
