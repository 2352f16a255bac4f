"""The build hook for Hatchling: compiles the trainer (C++) during the installation of fl-sim.

If the compilation fails, the installation continues without the compiled trainer. PyTorch then trains all models.
"""

import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeTrainer(BuildHookInterface[Any]):
    """Adds the compiled trainer to wheels. Such a wheel is for one processor architecture only.

    For an editable installation the trainer is compiled in the source folder.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the trainer before Hatchling collects the files."""
        del version
        compiling = _compiling()
        compiling.LIBRARY.unlink(missing_ok=True)  # a library from an earlier build must not get into the wheel
        if compiling.main() == 0:
            build_data["artifacts"].append(f"/fl_sim/native/{compiling.LIBRARY.name}")
            build_data["pure_python"] = False
            # The tool auditwheel later replaces "linux" by the supported versions of Linux.
            build_data["tag"] = f"py3-none-linux_{platform.machine()}"


def _compiling() -> ModuleType:
    """Return the module compiling.py, which compiles the trainer.

    The module is loaded by its file path, because the package fl_sim cannot be imported during its build.
    """
    spec = importlib.util.spec_from_file_location("fl_sim_compiling", Path(__file__).with_name("compiling.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
