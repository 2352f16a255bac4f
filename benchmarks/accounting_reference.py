"""Print ours, reference and relative difference for every reference point of the accountants.

Run ``python benchmarks/accounting_reference.py`` with the project on the path (about a minute). The reference file
accounting.json is looked for in $FL_SIM_REFERENCE, then in ../shared/reference beside the project. With ``--sweep`` it
needs no file: it compares 1,568 printed epsilons at deltas down to 1e-14 with integrals (``loss_integral``; about half
an hour), and exits with 1 if an epsilon is below its integral.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import dp_event
from loss_integral import larger_delta, poisson_gaussian

from fl_sim.privacy.accounting import bounds, epsilon_of_counts, noise_multiplier
from fl_sim.privacy.events import amplify_fixed_size, amplify_poisson
from fl_sim.privacy.loss_distribution import rounding_error
from fl_sim.privacy.terms import Accountant


def main() -> int:
    """Print the three tables, or sweep."""
    if "--sweep" in sys.argv[1:]:
        return _sweep()
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


def _sweep() -> int:
    """Compare 196 settings at 8 deltas with integrals: print epsilons below the truth, and the rounding errors."""
    generator, below, left_out, most = np.random.default_rng(39), 0, 0, 0.0
    for number in range(196):
        rate = float(10 ** generator.uniform(-2.8, -0.2))
        noise = float(np.exp(generator.uniform(np.log(0.8), np.log(6))))
        # Numbers of steps whose epsilon is about 1 to 40.
        steps = int(np.clip(generator.uniform(0.2, 20) * (noise / rate) ** 2, 100, 600_000))
        counts = {amplify_poisson(dp_event.GaussianDpEvent(noise), rate): steps}
        pair, error = poisson_gaussian(rate, noise), rounding_error(tuple(counts.items()))
        for delta in (1e-5, 1e-8, 1e-9, 1e-10, 1e-11, 1e-12, 1e-13, 1e-14):
            found = bounds(counts, delta)
            truth = larger_delta(pair, steps, found.least)
            below += truth > delta
            left_out += found.pld is None
            if found.pld is not None and found.pld < found.rdp:
                most = max(most, (truth - (delta - error)) / error)
            if truth > delta:
                print(f"BELOW: q {rate!r}, z {noise!r}, {steps} steps, delta {delta}: {found.least} has {truth}")
        if number % 14 == 13:
            print(f"{8 * (number + 1)} epsilons, {below} below the truth, {left_out} without a PLD", flush=True)
    print(f"where a PLD is told, the delta that is true is above what was asked for by at most {most:.3f} of the bound")
    return int(below > 0)


if __name__ == "__main__":
    sys.exit(main())
