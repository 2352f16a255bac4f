"""fl-sim: federated-learning simulation that is correct, fast and honest about privacy."""

__version__ = "0.1.0"
