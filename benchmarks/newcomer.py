"""How long do a newcomer's first steps take? Reads pages and types what they say, in a folder of its own.

    python benchmarks/newcomer.py [--data-root ROOT]

For each page: minutes to read its words (150 a minute), to type its blocks (150 characters a minute; nobody need type
them, as they can be copied), and to run them, every command as it stands. Blocks that install are left out. A command
that fails ends the script.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
PAGES = {
    "a first table": "docs/quickstart.md",
    "data of one's own": "docs/tutorials/own-data.md",
    "a method of one's own": "docs/tutorials/own-method.md",
    "a model of one's own": "docs/tutorials/own-model.md",
}
WORDS, CHARACTERS = 150, 150
"""Words and characters per minute, for a reader whose first language is not English and a slow typist."""


def blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, content) of every block of a page."""
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def play(page: Path, folder: Path, environment: dict[str, str]) -> tuple[float, int]:
    """Run a page's blocks in ``folder``; return the seconds and the number of characters typed."""
    seconds, typed = 0.0, 0
    for language, content in blocks(page.read_text()):
        named = re.match(r"# ([\w.]+)\n", content)
        commands: list[list[str]] = []
        if named:
            (folder / named[1]).write_text(content)
        elif language == "python":
            commands = [[sys.executable, "-c", content]]
        elif language == "sh":
            lines = [re.sub(r"\s+#.*", "", line) for line in content.replace("\\\n", " ").splitlines()]
            commands = [
                [sys.executable, "-m", "fl_sim", *shlex.split(line)[1:]] for line in lines if line.startswith("fl-sim ")
            ]
        typed += len(content) if named or commands else 0
        for command in commands:
            start = time.perf_counter()
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{page.name}: {shlex.join(command[2:])[:200]} failed: {done.stderr.strip().splitlines()[-1]}")
            seconds += time.perf_counter() - start
    return seconds, typed


def main() -> None:
    """Print the minutes of each page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", help="where MNIST lies")
    asked = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": str(TOP)}
    if asked.data_root:
        environment["FL_SIM_DATA"] = asked.data_root
    print("| page | read | type | run | minutes |\n|---|---|---|---|---|")
    for what, name in PAGES.items():
        page = TOP / name
        words = len(re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).split())
        with tempfile.TemporaryDirectory() as folder:
            seconds, typed = play(page, Path(folder), environment)
        parts = [words / WORDS, typed / CHARACTERS, seconds / 60]
        print(f"| {what} | {' | '.join(f'{part:.1f}' for part in [*parts, sum(parts)])} |", flush=True)


if __name__ == "__main__":
    main()
