"""The compiled trainer, called the kernel: its C++ sources, its compilation and installation, and calls from Python."""
