"""Make an environment for each peer framework that ``benchmarks/speed.py --peers DIR`` measures.

    python benchmarks/peers/install.py DIR             all of them, one after another
    python benchmarks/peers/install.py DIR fedlab      this one alone

Each gets a virtual environment ``DIR/NAME`` with what pip takes for it, PyTorch among it: about 5 GB each. DIR lies
outside the project. A peer that does not install is reported with pip's last words, and the others go on.
"""

import argparse
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Peer:
    """A framework: what pip is asked for, the script that runs it, and in which of its modes."""

    requirement: str
    script: str
    mode: str

    @property
    def distribution(self) -> str:
        """The name in the package index."""
        return self.requirement.partition("=")[0].partition("[")[0]


PEERS = {
    "pfl": Peer("pfl[pytorch]==0.6.*", "with_pfl.py", "simulated backend"),
    "fedlab": Peer("fedlab==1.3.*", "with_fedlab.py", "standalone pipeline"),
    "fluke-fl": Peer("fluke-fl==0.8.*", "with_fluke.py", "in memory"),
}


def python_of(environments: Path, name: str) -> Path:
    """Return the interpreter of a peer's environment, which need not be there."""
    return environments / name / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def installed(environments: Path) -> dict[str, str]:
    """Return the version of every peer that has an environment under ``environments``."""
    versions = {}
    for name, peer in PEERS.items():
        python = python_of(environments, name)
        if python.exists():
            query = f"import importlib.metadata as metadata; print(metadata.version({peer.distribution!r}))"
            answer = subprocess.run([python, "-c", query], capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                versions[name] = answer.stdout.strip()
    return versions


def install(environments: Path, name: str) -> bool:
    """Make one environment; say how it went."""
    venv.create(environments / name, symlinks=sys.platform != "win32", with_pip=True)
    command = [str(python_of(environments, name)), "-m", "pip", "install", "--quiet", PEERS[name].requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name} does not install on Python {sys.version.split()[0]}:\n{done.stderr[-2000:]}", file=sys.stderr)
        return False
    print(f"{name} {installed(environments)[name]} is in {environments / name}")
    return True


def main() -> None:
    """Install what was asked for; exit 1 when some of it failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", type=Path, metavar="DIR", help="where the environments go")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}; all if none is named")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(PEERS)):
        parser.error(f"no peer is called {', '.join(unknown)}; there are {', '.join(PEERS)}")
    environments = options.environments.resolve()
    if environments.is_relative_to(HERE.parents[1]):
        parser.error(f"{environments} lies inside the project; name a directory outside of it")
    went_well = [install(environments, name) for name in options.names or PEERS]
    sys.exit(not all(went_well))


if __name__ == "__main__":
    main()
