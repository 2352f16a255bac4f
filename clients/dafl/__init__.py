"""DA-FL on a client: private label selection, generators of synthetic records, and the share that a client releases."""
