"""fl-sim: federated-learning simulation that is correct, fast and honest about privacy.

>>> import fl_sim
>>> result = fl_sim.run({"algorithm": "scaffold", "rounds": 1}, out=folder, progress=False)
>>> len(result.rounds), result.privacy
(1, ())
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_sim.moved import Finder

if TYPE_CHECKING:
    from fl_sim.errors import RunError, UserError
    from fl_sim.experiment.experiment import Experiment
    from fl_sim.interface import RunResult, TableResult, load_model, run, table

__version__ = "0.1.0"

__all__ = [
    "Experiment",
    "RunError",
    "RunResult",
    "TableResult",
    "UserError",
    "__version__",
    "load_model",
    "run",
    "table",
]

_MODULE_OF = {
    "Experiment": "fl_sim.experiment.experiment",
    "RunError": "fl_sim.errors",
    "RunResult": "fl_sim.interface",
    "TableResult": "fl_sim.interface",
    "UserError": "fl_sim.errors",
    "load_model": "fl_sim.interface",
    "run": "fl_sim.interface",
    "table": "fl_sim.interface",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use. So ``fl-sim --help`` starts fast, without importing torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fl_sim' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__


def _refuse_shadows() -> None:
    """Raise ImportError if a user's file or folder, such as ``clients.py``, hides fl-sim's package of the same name."""
    here = Path(__file__).resolve().parents[1]
    for name in ("strategies", "clients", "partitions"):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None
        if found is not None and found != here / name / "__init__.py":
            is_folder = found.name == "__init__.py"
            shadow, folder = (f"{name}/", found.parents[1]) if is_folder else (found.name, found.parent)
            raise ImportError(
                f"{shadow} in {folder} hides fl-sim's package {name}: rename it, or start Python in another folder"
            )


_refuse_shadows()
sys.meta_path.insert(0, Finder())
