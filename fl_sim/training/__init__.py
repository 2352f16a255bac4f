"""Local training of one client, or of many clients in one computation; evaluation and feature extraction."""
