"""The command ``python -m fl_sim.native``: it compiles the kernel in this folder, like an installation of fl-sim."""

import sys

from fl_sim.native.compiling import main

sys.exit(main())
