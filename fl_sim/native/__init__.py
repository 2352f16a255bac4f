"""A compiled trainer for one client: kernel.cpp, how it is built (compiling, hatch_build) and called (kernel)."""
