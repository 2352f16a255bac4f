"""Write the rated sentences of $FL_SIM_DATA/sentences/sentences.csv as good and bad ones, by source.

    python benchmarks/fine_tune/sentences.py [results/sentences.csv]

A sentence with a mean rating above 0.5 (of -4 to 4) is good, one below -0.5 is bad; all others are left out.
"""

import csv
import os
import sys
from pathlib import Path


def main() -> None:
    """Write the table."""
    source = Path(os.environ["FL_SIM_DATA"]) / "sentences/sentences.csv"
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "results/sentences.csv")
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open(newline="", encoding="utf-8") as given, target.open("w", newline="", encoding="utf-8") as made:
        lines = csv.writer(made)
        lines.writerow(["text", "mood", "source"])
        for row in csv.DictReader(given):
            rating = float(row["rating"])
            if abs(rating) > 0.5:
                lines.writerow([row["text"], "good" if rating > 0 else "bad", row["source"]])


if __name__ == "__main__":
    main()
