"""Local training of one client, or of a stack of clients in one computation; evaluation and feature extraction."""
