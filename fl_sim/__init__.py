"""fl-sim: federated-learning simulation that is correct, fast and honest about privacy."""
