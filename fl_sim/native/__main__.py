"""The command ``python -m fl_sim.native``: it compiles the kernel in this folder, as an installation of fl-sim does."""

import sys

from fl_sim.native.compiling import main

sys.exit(main())
