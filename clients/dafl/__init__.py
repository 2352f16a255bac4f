"""DA-FL on a client: private label selection, private generators, and the client's synthetic records."""
