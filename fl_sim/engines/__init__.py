"""Engines: how messages reach clients and come back, in this process or on Ray."""
