"""What PATE's noisy votes cost."""
