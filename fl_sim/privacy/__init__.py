"""Privacy: what a mechanism releases, what it costs, who adds it up, and how to catch it cheating."""
