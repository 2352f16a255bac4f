"""An auditor who has the whole run directory and the screen of a private run finds nothing about single clients."""

import base64
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fl_sim.__main__ import main
from fl_sim.engines import wire
from fl_sim.privacy.mechanisms import Noise
from fl_sim.seeding import rng
from strategies.samplers import Poisson

CLIENTS, ROUNDS, RATE, SEED = 12, 4, 0.4, 3
SETTINGS = (
    f"clients={CLIENTS}", f"rounds={ROUNDS}", f"seed={SEED}", "partition=dirichlet:0.5", "model=logistic",
    "engine=inprocess", "aggregator=global-dp", f"sampler=poisson:{RATE}", "algorithm=scaffold",
)  # fmt: skip


@dataclass
class Secrets:
    """What only the server and the clients may know of a run."""

    key: bytes = b""
    cohorts: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    num_examples: list[int] = field(default_factory=list)
    updates: list[bytes] = field(default_factory=list)

    def found_in(self, content: bytes) -> list[str]:
        """Name what stands in ``content`` as it is, in the forms in which a program might write it."""
        return [name for name, forms in self._forms() if any(form in content for form in forms)]

    def _forms(self) -> Iterator[tuple[str, tuple[bytes, ...]]]:
        yield "the key", (self.key, self.key.hex().encode(), base64.b64encode(self.key))
        for cohort in self.cohorts:
            if len(cohort) > 2:
                yield f"the cohort {cohort}", (str(cohort).encode(), json.dumps(cohort, indent=2).encode())
        yield from ((f"the loss {loss}", (f"{loss:.6f}".encode()[:-1],)) for loss in self.losses)
        yield from (("an update", (update[:64], update[-64:])) for update in self.updates)


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> Secrets:
    """What the run that follows keeps to itself."""
    secrets, read_update, fresh, draw = Secrets(), wire.read_update, Noise.secret, Poisson.sample

    def reading(client: int, *arguments: object) -> object:
        reply = read_update(client, *arguments)  # type: ignore[arg-type]
        secrets.losses += [reply.loss] if reply.loss is not None else []
        secrets.num_examples.append(reply.num_examples)
        secrets.updates += [params.flat.numpy().tobytes() for params in reply.payloads.values() if params.flat.any()]
        return reply

    def noise() -> Noise:
        made = fresh()
        secrets.key = made.key
        return made

    def sample(self: Poisson, *arguments: object) -> object:
        cohort = draw(self, *arguments)  # type: ignore[arg-type]
        secrets.cohorts.append(cohort.tolist())
        return cohort

    monkeypatch.setattr(wire, "read_update", reading)
    monkeypatch.setattr(Noise, "secret", staticmethod(noise))
    monkeypatch.setattr(Poisson, "sample", sample)
    return secrets


def test_nothing_of_what_only_server_and_clients_know_is_written_or_shown(
    secrets: Secrets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["fl-sim", "run", *SETTINGS, "--out", str(out)])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    screen = capfd.readouterr()
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    files |= {"the screen": (screen.out + screen.err).encode(), "the names of files": "\n".join(files).encode()}
    assert {"config.toml", "result.json", "rounds.jsonl", "ledger.jsonl", "the screen"} <= set(files)
    assert len(secrets.cohorts) == ROUNDS
    assert sum(map(len, secrets.cohorts)) == len(secrets.num_examples) > 2 * ROUNDS
    for name, content in files.items():
        assert not secrets.found_in(content), name
        told = secrets.found_in(content + str(secrets.cohorts).encode() + str(secrets.losses[0]).encode())
        assert len(told) > 1, "the auditor is blind"
    # What the directory says of the coins is the seed, and it gives other cohorts.
    config, result = files["config.toml"].decode(), json.loads(files["result.json"])
    assert f"seed = {SEED}" in config
    assert result["seed"] == SEED
    published = [
        Poisson.sample(Poisson(sampling_rate=RATE), CLIENTS, rng(SEED, "sampler", one).random, one).tolist()
        for one in range(1, ROUNDS + 1)
    ]
    assert published != secrets.cohorts[:ROUNDS]
    for line in files["rounds.jsonl"].splitlines():
        record = json.loads(line)
        assert all(record.get(name) is None for name in ("cohort", "train_loss", "seconds", "cohort_size"))
