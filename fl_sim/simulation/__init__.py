"""The simulation of a run: its preparation, the main loop over rounds, and the client runtime of workers."""
