"""Directories from anywhere: whatever is in their files, a report says so in a line each and shows the rest."""

import io
import json
import os
import random

import numpy as np
import pytest
import typer
from matplotlib.figure import Figure
from typer.testing import CliRunner

from fl_sim.cli.verbs import report
from fl_sim.errors import UserError
from fl_sim.privacy import bill

app = typer.Typer()
app.command()(report)

ODD = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1", "0", "1e308", "9" * 400, "9" * 5000, "null", "true", '""', '"x"',
    "[]", "{}", "[" * 2000 + "]" * 2000, '"\\ud800"', "[[1]]", '{"kind": "da-fl"}', '{"kind": 1}', "[null]", "1.5",
)  # fmt: skip
"""Values that take the place of another one, as JSON."""


@pytest.fixture
def places(tmp_path, write_experiment, monkeypatch):
    """Three runs that a report shows in full: under Global DP, with synthetic records, and with PATE."""
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)  # what is drawn is tested elsewhere
    monkeypatch.setattr(bill, "_MOST_BY_PLD", 0)  # and so is the PLD
    dp = write_experiment("runs/dp", seed=1)
    pools = [write_experiment(f"runs/pool-{epsilon}", preprocess={"epsilon": epsilon}) for epsilon in (1.0, 10.0)]
    pate = write_experiment("runs/pate", algorithm={"kind": "pate"})
    event = {"kind": "poisson", "sampling_rate": 0.1, "event": {"kind": "gaussian", "noise_multiplier": 1.0}}
    paid = {"unit": "client", "epsilon": 3.0, "delta": 1e-5, "ledger": "0123456789abcdef", "guarantee": "(3, 1e-5)"}
    change(dp / "result.json", privacy=[paid | {"planned_events": [{"event": event, "times": 10}]}])
    mechanism = {"kind": "confident", "sigma": 4.0, "threshold": 20.0, "sigma_threshold": 15.0}
    change(pate / "result.json", pate={
        "teachers": 10, "mechanism": mechanism, "evaluation_records": 100, "queries_asked": 9, "queries_answered": 5,
        "label_accuracy": 0.9, "student": "fixmatch", "private_kept": True,
    }, privacy=[paid | {"unit": "record"}])  # fmt: skip
    told = {"confusion": [[3, 1], [0, 4]], "client_accuracy": 0.5, "client_worst_tenth": 0.25,
            "client_quantiles": [0.1 * step for step in range(11)]}  # fmt: skip
    change(pools[0] / "result.json", measures=told)
    np.save(pate / "votes.npy", np.full((9, 3), 3))
    facts = {"labels": {"kind": "bounded-range", "epsilon": 0.1}, "generator": event["event"], "generator_steps": 3}
    for pool in pools:
        made = json.loads((pool / "result.json").read_text())["preprocess"]
        change(pool / "result.json", preprocess=made | {"clients": [one | {"facts": facts} for one in made["clients"]]})
    return tmp_path / "runs"


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def shown(places):
    result = CliRunner().invoke(app, [str(places), "--json", "--out", str(places / "report")])
    if isinstance(result.exception, UserError):
        return None
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout, parse_constant=pytest.fail)


def odd_value(content, chance):
    """Replace one value of a JSON text, wherever it is."""
    value = json.loads(content)
    paths = list(_paths(value))
    *outer, last = chance.choice(paths)
    inner = value
    for key in outer:
        inner = inner[key]
    if chance.random() < 0.2:
        del inner[last]
        return json.dumps(value).encode()
    inner[last] = "@@"
    return json.dumps(value).replace('"@@"', chance.choice(ODD)).encode()


def _paths(value, before=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield (*before, key)
        yield from _paths(one, (*before, key))


def damaged(path, chance):
    """Return other content for a file."""
    content = path.read_bytes()
    kind = chance.randrange(5)
    if path.suffix in {".json", ".jsonl"} and kind < 3:
        return odd_value(content, chance)
    if path.suffix == ".toml" and kind < 3:
        lines = content.decode().splitlines(keepends=True)
        number = chance.choice([number for number, line in enumerate(lines) if "=" in line])
        lines[number] = f"{lines[number].split('=')[0]}= {chance.choice([*ODD, 'inf', 'nan', '1979-05-27', '0x_'])}\n"
        return "".join(lines).encode()
    if kind == 3:
        return content[: chance.randrange(len(content))]
    at = chance.randrange(len(content))
    return content[:at] + chance.randbytes(chance.randrange(1, 9)) + content[at + chance.randrange(9) :]


def assert_damage_costs_no_more_than_its_run(places, trials, seed):
    chance = random.Random(seed)
    files = sorted(path for path in places.rglob("*") if path.is_file() and path.suffix != ".png")
    for _ in range(trials):
        path = chance.choice(files)
        content = path.read_bytes()
        path.write_bytes(damaged(path, chance))
        told = shown(places)
        if told is not None:
            assert told["runs"] >= 3
            for problem in told["problems"]:
                assert str(path.parent) == problem["dir"]
        path.write_bytes(content)


def test_damaged_files_cost_a_report_no_more_than_their_run(places):
    assert len(shown(places)["problems"]) == 0
    assert_damage_costs_no_more_than_its_run(places, 4, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_thousand_damaged_files_cost_a_report_no_more_than_their_run(places, seed):
    assert_damage_costs_no_more_than_its_run(places, 100, seed)


def _npy(shape):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": shape})
    return header.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dp/config.toml", b"a = " + b"[" * 50_000),
        ("dp/config.toml", b".".join([b"a"] * 20_000) + b" = 1"),
        ("dp/config.toml", b"a" * 2**21),
        ("dp/result.json", b"[" * 100_000),
        ("dp/result.json", b'{"a": ' * 100_000),
        ("dp/result.json", b" " * (2**26 + 1)),
        ("dp/rounds.jsonl", b"[" * 100_000 + b"\n"),
        ("pate/votes.npy", _npy((2**40, 10))),
        ("pate/votes.npy", _npy((0, 10)) + b"x"),
        ("pool-1.0/result.json", None),
    ],
)
def test_bombs_take_no_time_and_no_memory(places, name, content):
    path = places / name
    if content is None:
        clients = [{"counts": [10**9] * 3, "refused": ""}] * 2
        made = json.loads(path.read_text())["preprocess"] | {"clients": clients}
        content = json.dumps(json.loads(path.read_text()) | {"preprocess": made}).encode()
    path.write_bytes(content)
    told = shown(places)
    assert [problem["dir"] for problem in told["problems"]] == [str(path.parent)]
    assert "\n" not in told["problems"][0]["error"]
    assert len(told["problems"][0]["error"]) < 1000


def test_what_is_no_file_is_not_waited_for(places):
    (places / "dp" / "result.json").unlink()
    os.mkfifo(places / "dp" / "result.json")
    (places / "pate" / "config.toml").unlink()
    (places / "pate" / "config.toml").symlink_to("/dev/zero")
    told = shown(places)
    assert sorted(problem["dir"] for problem in told["problems"]) == [str(places / "dp"), str(places / "pate")]
