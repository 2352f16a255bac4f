"""The compiled trainer, called the kernel: its C++ sources, its compilation, and its calls from Python."""
