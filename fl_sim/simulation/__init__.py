"""Simulation: what is prepared, the main loop over rounds, and what a worker needs to play a client."""
