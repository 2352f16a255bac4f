"""Every example runs as its first lines say, in small; and is what it says it is."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fl_sim
from fl_sim.cli.run import parse_experiment
from fl_sim.cli.running_verbs import read_arguments
from fl_sim.kinds import kind_of, title_of
from fl_sim.local_plan import LocalPlan
from fl_sim.params import detached
from fl_sim.testing import check, check_compressor
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import Cohort, LocalSettings, LocalTask, Reply

pytestmark = pytest.mark.usefixtures("quick_accounting")

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMANDS = {
    path.stem: shlex.split(command[1])
    for path in sorted(EXAMPLES.glob("*.py"))
    if (command := re.search(r"^    fl-sim run (.*)$", path.read_text(), re.MULTILINE))
}
SMALL = ["rounds=1", "clients=3", "engine=inprocess"]


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def test_there_is_one_for_every_extension_point() -> None:
    keys = {word.partition("=")[0] for words in COMMANDS.values() for word in words if ":" in word}
    assert keys == {"algorithm", "partition", "data", "model", "aggregator", "preprocess.generator", "compress"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_in_an_example_runs_what_is_in_it(name: str, tmp_path: Path) -> None:
    result = fl_sim.run(parse_experiment(read_arguments([*COMMANDS[name], *SMALL])), out=tmp_path, progress=False)
    assert result.facts["status"] == "finished"
    written = (tmp_path / "config.toml").read_text()
    assert f'"{next(word for word in COMMANDS[name] if f"={name}:" in word).partition("=")[2]}"' in written


def experiment(name: str) -> Any:
    return parse_experiment(read_arguments(COMMANDS[name]))


def test_the_loss_term_keeps_the_laws_and_does_something(tmp_path: Path) -> None:
    distilled = experiment("distillation").algorithm
    assert (kind_of(distilled), title_of(distilled)) == ("distillation:Distilled", "FedGKD")
    check(distilled)
    losses = [
        fl_sim.run({"algorithm": {"kind": "distillation:Distilled", "gamma": gamma}, "model": "logistic", "rounds": 1},
                   out=tmp_path / str(gamma), progress=False).rounds[0].test_loss
        for gamma in (0.0, 5.0)
    ]  # fmt: skip
    assert losses[0] != losses[1]


def test_one_client_of_the_split_holds_its_share() -> None:
    parts = experiment("one_big_client").partition.split(np.zeros(100, np.int64), 4, np.random.default_rng(0))
    assert [len(part) for part in parts] == [70, 10, 10, 10]
    assert sorted(np.concatenate(parts)) == list(range(100))
    with pytest.raises(fl_sim.UserError, match="take 0 < share < 1"):
        fl_sim.run({"partition": {"kind": "one_big_client:OneBigClient", "share": 2.0}})


def test_a_broken_client_does_not_move_the_median_far() -> None:
    updates = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0]), torch.tensor([1e9, -1e9])]
    replies = tuple(Reply(client, {"delta": {"w": update}}, 1, 0.0) for client, update in enumerate(updates))
    aggregate = experiment("median").aggregator.mean(Cohort(1, (*replies, Reply(3, {}, 0, None)), 4, 4.0), "examples")
    assert aggregate.payloads["delta"]["w"].tolist() == [3.0, -1.0]
    assert aggregate.participation == 0.75


def test_half_precision_halves_the_bytes_and_keeps_the_laws(tmp_path: Path) -> None:
    check_compressor(experiment("half_precision").compress)
    result = fl_sim.run({"compress": "half_precision:HalfPrecision", "model": "logistic", "partition": "iid",
                         "rounds": 5, "local": {"learning_rate": 0.05}}, out=tmp_path, progress=False)  # fmt: skip
    assert {record.bytes_up for record in result.rounds} == {10 * (128 + 2 * 650)}
    assert result.final_accuracy is not None
    assert result.final_accuracy > 0.7


def test_without_noise_the_generator_returns_the_means_of_the_classes() -> None:
    from clients.dafl.generator import PrivateRecords  # noqa: PLC0415
    from fl_sim.privacy.mechanisms import Noise  # noqa: PLC0415

    generator = sys.modules["noisy_means"].NoisyMeans(spread=0.0)
    inputs = torch.tensor([0.5, -0.5, 1.0, 0.0]).reshape(4, 1, 1, 1)
    records = PrivateRecords(inputs, torch.tensor([0, 0, 1, 1]), 3)
    bill = generator.bill(4, 3, float("inf"), 1e-5)
    made = generator.generate(records, np.array([1, 2, 0]), bill, Noise.seeded(0), np.random.default_rng(0))
    assert made.flatten().tolist() == [0.0, 0.5, 0.5]
    assert generator.bill(4, 3, 1.0, 1e-5).noise_multiplier > 3


@pytest.mark.usefixtures("cells_in_threads")
def test_the_sweep_draws_its_picture(tmp_path: Path) -> None:
    import sweep  # noqa: PLC0415

    picture = sweep.sweep([0.1, 1.0], [0], {"model": "logistic", "rounds": 1}, tmp_path / "out")
    assert picture.stat().st_size > 1000


OWN_PARTS = {"fedper": {}, "ifca": {}, "private_steps": {}, "adapters": {}}
"""The four that show what a client may begin with, keep, train by and send."""


def _small(name: str, out: Path, **more: Any) -> Any:
    settings = parse_experiment(read_arguments([*COMMANDS[name], "clients=4", "rounds=3", "seed=1"])).model_dump()
    return fl_sim.run({**settings, "engine": "inprocess", **more}, out=out, progress=False)


@pytest.mark.parametrize("name", OWN_PARTS)
def test_plug_ins_of_four_seams_go_on_to_the_same_bits_after_a_resume(name: str, tmp_path: Path) -> None:
    whole = _small(name, tmp_path / "whole")
    _small(name, tmp_path / "run", rounds=2)
    resumed = _small(name, tmp_path / "run")  # a run with fewer rounds is extended
    one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "run"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert whole.facts.get("own_tests") == resumed.facts.get("own_tests")


@pytest.mark.cluster
@pytest.mark.parametrize("name", OWN_PARTS)
def test_plug_ins_of_four_seams_end_in_the_same_bits_on_ray(name: str, one_ray: None, tmp_path: Path) -> None:
    here = _small(name, tmp_path / "here")
    there = _small(name, tmp_path / "there", engine={"kind": "ray", "actors": 2})
    one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in ("here", "there"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert here.facts.get("own_tests") == there.facts.get("own_tests")


@pytest.mark.parametrize("name", ["fedper", "ifca", "private_steps"])
def test_algorithms_of_the_new_seams_keep_the_laws(name: str) -> None:
    check(experiment(name).algorithm)


def test_what_stays_with_a_client_is_not_sent_and_is_trained(tmp_path: Path) -> None:
    """The head keeps its first values at the server, and clients' own models beat the server's on their own records."""
    result = _small("fedper", tmp_path / "run", rounds=20, partition="label-2", local={"learning_rate": 0.1})
    assert (
        result.rounds[0].bytes_up
        < 4 * 99_750 * 4
        < _small("fedper", tmp_path / "all", algorithm="fedavg").rounds[0].bytes_up
    )
    assert result.facts["own_tests"]["accuracy"] > result.final_accuracy + 0.1
    first = load_file(tmp_path / "run" / "model.safetensors")
    untrained = fl_sim.run({**result.experiment.model_dump(), "rounds": 1}, out=tmp_path / "one", progress=False)
    del untrained
    head = load_file(tmp_path / "one" / "model.safetensors")
    assert all(torch.equal(first[key], head[key]) for key in list(first)[-2:])


@pytest.mark.parametrize(
    "promise",
    [
        {"aggregator": {"kind": "global-dp", "noise": "seeded"}},
        {"preprocess": {"kind": "da-fl", "generator": "mean-embedding", "train_on": "synthetic"}},
    ],
)
def test_in_a_private_run_no_code_of_ones_own_asks_clients_for_anything(
    promise: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(fl_sim.UserError, match="EvaluateOwn, code of your own, asks clients for 'evaluate-own'"):
        _small("fedper", tmp_path / "run", **promise)


def test_each_client_of_ifca_trains_one_of_the_models(tmp_path: Path) -> None:
    alone = _small("ifca", tmp_path / "ifca", rounds=10, partition="label-1")
    assert alone.facts["own_tests"]["accuracy"] > 0.4


def test_without_noise_and_clipping_private_steps_are_those_of_plain_sgd_on_the_batch(tmp_path: Path) -> None:
    private = experiment("private_steps").algorithm
    settings = LocalSettings(0.1, 0.0, 0.0, batch_size=100, epochs=1)
    model = nn.Linear(3, 2)
    params = detached(model.named_parameters())
    inputs, labels = torch.randn(20, 3), torch.arange(20) % 2
    task = LocalTask(1, 0, 1, 20, settings, params)
    job = LocalJob(task, LocalPlan(), Records.of(inputs, labels), np.random.default_rng(0))
    [trainer] = private.model_copy(update={"clipping_norm": 1e6, "noise_multiplier": 0.0}).trainers(model)
    assert trainer.supports(job)
    mine, plain = (
        trainer.train(job),
        Trainer(nn.Linear(3, 2), None).train(job),
    )  # a rate of 1: everybody is in the batch
    for name in params:
        torch.testing.assert_close(mine.params[name], plain.params[name])
    [noisy] = private.model_copy(update={"clipping_norm": 1e-3, "noise_multiplier": 0.0}).trainers(model)
    moved = torch.cat([(noisy.train(job).params[name] - params[name]).flatten() for name in params])
    assert float(moved.norm()) <= 0.1 * 1e-3 * (1 + 1e-5)


def test_the_adapters_and_the_head_alone_travel(tmp_path: Path) -> None:
    result = _small("adapters", tmp_path / "run")
    assert result.facts["num_parameters"] == 4 * (64 + 64) + 4 * (64 + 64) + 64 * 10 + 10
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert saved["1.layer.weight"].shape == (64, 64)
    assert float(saved["1.up"].abs().sum()) > 0


def test_what_the_recipes_show_is_in_the_examples() -> None:
    docs = EXAMPLES.parent / "docs"
    recipes = "\n".join(path.read_text() for path in sorted((docs / "adding").glob("*.md")))
    files = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    blocks = re.findall(r"^```python\n(.*?)^```", recipes, re.MULTILINE | re.DOTALL)
    tested_there = "# "  # blocks with a file's name on top: tests/docs/test_own_model_page.py runs them
    shown = [block for block in blocks if "import check" not in block and not block.startswith(tested_there)]
    assert all(any(_lines(block) in _lines(text) for text in files.values()) for block in shown)
    quoted = re.findall(r"^<!-- code: (\w+):(\w+) -->$", recipes, re.MULTILINE)  # tests/docs/test_site.py builds them
    assert len(quoted) >= 5
    assert all(re.search(rf"^(class|def) {name}\b", files[f"{file}.py"], re.MULTILINE) for file, name in quoted)
    elsewhere = {"sweep.py": "(../examples/sweep.py)"}
    pages = recipes + (docs / "from-python.md").read_text()
    assert all(elsewhere.get(name, f"(../../examples/{name})") in pages for name in files)
    for name, words in COMMANDS.items():
        assert any(f"fl-sim run {shlex.join(words[:count])}`" in recipes for count in range(1, len(words) + 1)), name


def _lines(text: str) -> str:
    """Return ``text`` without indentation and blank lines."""
    return "\n".join(stripped for line in text.splitlines() if (stripped := line.strip()))
