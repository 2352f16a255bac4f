"""The client side: the code that runs where a client's records are."""
