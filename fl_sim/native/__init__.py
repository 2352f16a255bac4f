"""The compiled trainer, called the kernel: its C++ sources, its compilation and installation, calls from Python."""
