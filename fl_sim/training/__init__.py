"""Local training: the loop, one client or a stack of clients at a time."""
