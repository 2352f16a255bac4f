"""Simulation of clients' devices (speed, bandwidth, availability) and of the virtual clock."""
