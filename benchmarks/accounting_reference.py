"""Print ours, reference and relative difference for every reference point of the accountants.

Run ``python benchmarks/accounting_reference.py`` with the project on the path (about a minute). The reference file
accounting.json is looked for in $FL_SIM_REFERENCE, then in ../shared/reference beside the project.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from dp_accounting import dp_event

from fl_sim.privacy.accounting import Accountant, amplify_fixed_size, amplify_poisson, epsilon_of_counts
from fl_sim.privacy.planning import noise_multiplier


def main() -> int:
    """Print the three tables."""
    default = Path(__file__).resolve().parents[2] / "shared" / "reference"
    path = Path(os.environ.get("FL_SIM_REFERENCE", default)) / "accounting.json"
    if not path.is_file():
        print(
            f"no reference at {path}: set FL_SIM_REFERENCE to the directory that holds accounting.json", file=sys.stderr
        )
        return 2
    reference = json.loads(path.read_text())
    print("| q | noise | steps | sampling, accountant | reference | ours | relative difference |")
    print("|---|---|---|---|---|---|---|")
    for row in reference["rows"]:
        _print_row(row)
    print("\n| q | steps | epsilon | accountant | reference noise | ours | relative difference |")
    print("|---|---|---|---|---|---|---|")
    for row in reference["calibration"]:
        _print_calibration(row)
    return 0


def _print_row(row: dict[str, Any]) -> None:
    gaussian = dp_event.GaussianDpEvent(row["sigma"])
    poisson = amplify_poisson(gaussian, row["q"])
    values = row["epsilon"]
    points = [(poisson, "rdp", "poisson, RDP", "dpacc_rdp"), (poisson, "pld", "poisson, PLD", "dpacc_pld")]
    if "wor_pld_truncated_upper" in values:
        fixed = amplify_fixed_size(gaussian, row["B"], row["N"])
        points += [
            (fixed, "pld", "fixed-size, PLD", "wor_pld_truncated_upper"),
            (
                fixed,
                "rdp",
                "fixed-size, RDP (reference: a looser theorem)",
                "wor_rdp_replace_one_correct_nm_half_sigma",
            ),
            (fixed, "pld", "fixed-size, PLD against the proven LOWER bound", "wor_lower_bound_instance"),
        ]
    for event, accountant, what, key in points:
        ours = epsilon_of_counts({event: row["steps"]}, row["delta"], accountant=accountant)
        head = f"| {row['q']:.5g} | {row['sigma']:g} | {row['steps']} | {what}"
        print(f"{head} | {values[key]:.6f} | {ours:.6f} | {ours / values[key] - 1:+.1e} |", flush=True)


def _print_calibration(row: dict[str, Any]) -> None:
    accountants: tuple[Accountant, ...] = ("rdp", "pld")
    for accountant in accountants:
        amplify = partial(amplify_poisson, sampling_rate=row["q"])
        ours = noise_multiplier(amplify, row["steps"], row["eps"], row["delta"], accountant=accountant)
        expected = row[f"sigma_{accountant}"]
        head = f"| {row['q']:.5g} | {row['steps']} | {row['eps']:g} | {accountant}"
        print(f"{head} | {expected:.6f} | {ours:.6f} | {ours / expected - 1:+.1e} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
