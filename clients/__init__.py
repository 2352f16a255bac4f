"""What runs on a simulated device."""
