"""Federated algorithms, one file each, and aggregators, samplers, servers, attacks, and code that wraps rounds."""
