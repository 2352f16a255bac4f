"""The compiled trainer (the kernel): C++ sources, their compilation, and Python code that calls the library."""
