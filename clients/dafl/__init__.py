"""DA-FL on a client: labels, generators, and the share that is released."""
