"""The client side: the code that runs on the machine with a client's records."""
