"""The command ``python -m fl_sim.native``: compile the native trainer in this folder, as an installation does."""

import sys

from fl_sim.native.compiling import main

sys.exit(main())
