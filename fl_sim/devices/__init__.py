"""Clients' devices on a virtual clock: how fast they compute and send, and when they are there."""
