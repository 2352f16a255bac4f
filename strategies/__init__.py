"""Federated algorithms, one file each, with aggregators, samplers, servers, attacks and layers."""
