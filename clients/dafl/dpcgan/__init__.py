"""The differentially private conditional GAN."""
