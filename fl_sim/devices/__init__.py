"""Clients' devices and the virtual clock: speeds of computing and sending, and availability."""
