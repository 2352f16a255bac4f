"""Ways to compress what clients send, one short file each. The stage that uses them is ``fl_sim.packed``."""
