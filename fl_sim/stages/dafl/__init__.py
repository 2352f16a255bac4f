"""DA-FL's pool of synthetic records: made once, kept, paid for."""
