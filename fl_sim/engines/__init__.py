"""Engines: runtimes that deliver messages to clients and return their replies, in this process or on Ray."""
