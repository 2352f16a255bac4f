"""Kinds by entry points: ours are what pyproject.toml names, others' join them, and no name is taken in silence."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hatchling.builders.wheel import WheelBuilder

from fl_sim import one_of
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.kinds import field_defaults, is_settings
from fl_sim.one_of import PROTOCOLS
from fl_sim.packed import Size
from fl_sim.params import Layout
from fl_sim.settings import CHECKS, Settings, choices_in, kinds_of
from strategies.fedprox import FedProx

HERE = __name__
PROJECT = Path(__file__).parents[2]
NAMED = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["entry-points"]
FIELDS = sorted(group.removeprefix("fl_sim.") for group in NAMED.keys() - {CHECKS, PROTOCOLS})


class Mine(FedProx):
    """A kind of another package."""


class Halves(Settings):
    """A compressor of another package, which keeps what it leaves out."""

    keeps_error: ClassVar[bool] = True

    def size(self, layout: Layout) -> Size:
        return Size(len(layout))

    def pack(self, update: Any, held: Any, coins: Any) -> Any:
        raise NotImplementedError

    def unpack(self, packed: Any, layout: Any, coins: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def without_pyproject(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let fl-sim be a package that is installed, without its pyproject.toml beside it."""
    monkeypatch.setattr(one_of, "_PYPROJECT", tmp_path / "pyproject.toml")


def test_metadata_of_a_wheel_name_the_same_kinds_as_pyproject(without_pyproject: None, install_package: Any) -> None:
    lines = WheelBuilder(str(PROJECT)).construct_entry_points_file()
    folder = install_package("fl-sim", NAMED)
    (folder / "fl_sim-1.0.dist-info" / "entry_points.txt").write_text(lines)
    one_of._installed.cache_clear()
    one_of.entry_points_of_ours.cache_clear()
    installed = {group: {name: one.path for name, one in one_of.entry_points_of_ours(group).items()} for group in NAMED}
    assert installed == NAMED
    assert experiment_from({"algorithm": "fedprox"}).algorithm == FedProx()


def test_a_checkout_names_its_own_kinds_whatever_is_installed(install_package: Any) -> None:
    install_package("fl-sim", {"fl_sim.algorithm": {"older": "strategies.older:Older"}})
    assert one_of.entry_points_of_ours("fl_sim.algorithm").keys() == NAMED["fl_sim.algorithm"].keys()
    assert experiment_from({"algorithm": "fedprox"}).algorithm == FedProx()


def test_names_stand_in_pyproject_in_the_order_of_metadata() -> None:
    assert {group: list(names) for group, names in NAMED.items()} == {
        group: sorted(names) for group, names in NAMED.items()
    }


@pytest.mark.parametrize("field", FIELDS)
def test_a_name_is_the_kind_of_its_class(field: str) -> None:
    found = kinds_of(field)
    assert found.keys() == NAMED[f"fl_sim.{field}"].keys()
    assert {name: field_defaults(kind)["kind"] for name, kind in found.items()} == {name: name for name in found}
    assert all(is_settings(kind) for kind in found.values())


def test_every_setting_of_several_kinds_but_the_engine_has_its_group() -> None:
    assert set(FIELDS) == {*choices_in(Experiment), "local.privacy", "model"} - {"engine"}
    assert (NAMED[CHECKS].keys() | NAMED[PROTOCOLS].keys()) <= set(FIELDS)


def test_a_kind_is_imported_where_it_is_chosen_and_no_other() -> None:
    code = (
        "import sys; from fl_sim.experiment.experiment import experiment_from as made; made({}); "
        "features = ('clients.dafl', 'strategies.global_dp', 'strategies.pate', 'strategies.private_start', "
        "'strategies.tstr', 'strategies.ccvr', 'strategies.compression.error_feedback', 'strategies.fedprox'); "
        "assert not [one for one in features if one in sys.modules]; made({'algorithm': 'fedprox'}); "
        "assert [one for one in features if one in sys.modules] == ['strategies.fedprox']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_message_lists_names_without_importing_what_they_name(install_package: Any) -> None:
    install_package("fed-broken", {"fl_sim.algorithm": {"fedbroken": "no_such_module:Nothing"}})
    with pytest.raises(UserError, match=r"valid: afl, .*balanced-softmax, .*, worker-momentum, fedbroken, or your own"):
        experiment_from({"algorithm": "fedbrokn"})
    with pytest.raises(UserError, match="'no_such_module:Nothing' cannot be imported: there is no module"):
        experiment_from({"algorithm": "fedbroken"})


@pytest.mark.parametrize("form", ["fedprox", {"kind": "fedprox", "mu": 0.1}, "fedprox:0.1"])
@pytest.mark.parametrize("group", ["fl_sim.algorithm", "fl_sim.kinds"])
def test_a_name_of_ours_is_not_taken_in_silence(install_package: Any, group: str, form: Any) -> None:
    install_package("fed-other", {group: {"fedprox": f"{HERE}:Mine"}})
    with pytest.raises(UserError, match="'fedprox' is the name of two kinds") as refusal:
        experiment_from({"algorithm": form})
    assert "by the package fl-sim" in str(refusal.value)
    assert f"{HERE}:Mine by the package fed-other" in str(refusal.value)
    assert experiment_from({"algorithm": f"{HERE}:Mine"}).algorithm == Mine()


def test_two_packages_that_give_one_name_are_refused(install_package: Any) -> None:
    install_package("fed-one", {"fl_sim.algorithm": {"fedmine": f"{HERE}:Mine"}})
    install_package("fed-two", {"fl_sim.kinds": {"fedmine": f"{HERE}:Mine"}})
    with pytest.raises(UserError, match=r"package fed-.* package fed-.*; uninstall one of the two"):
        experiment_from({"algorithm": "fedmine"})


def test_of_a_package_that_is_installed_twice_the_first_counts(install_package: Any) -> None:
    install_package("fed-one", {"fl_sim.algorithm": {"fedmine": f"{HERE}:Halves"}})
    second = install_package("fed-One", {"fl_sim.algorithm": {"fedmine": f"{HERE}:Mine"}})
    (second / "fed_One-1.0.dist-info").rename(second / "fed_one-1.0.dist-info")
    (second / "fed_one-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: fed-one\nVersion: 1.0\n")
    one_of._installed.cache_clear()
    assert experiment_from({"algorithm": "fedmine"}).algorithm == Mine()


def test_what_no_compression_goes_together_with_holds_for_another_packages_kind(install_package: Any) -> None:
    install_package("fed-halves", {"fl_sim.compress": {"halves": f"{HERE}:Halves"}})
    assert experiment_from({"compress": "halves"}).compress == Halves()
    with pytest.raises(UserError, match=r"compress .*Halves cannot run under aggregator global-dp"):
        experiment_from({"compress": "halves", "aggregator": "global-dp"})


def test_a_setting_without_kinds_of_others_lists_and_takes_none(install_package: Any) -> None:
    install_package("fed-mine", {"fl_sim.kinds": {"mine": f"{HERE}:Mine"}})
    with pytest.raises(UserError, match=r"unknown engine 'mine'[^;]*; valid: auto, inprocess, ray$"):
        experiment_from({"engine": "mine"})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:FedProx", "there is no module 'no_such_module'"),
        ("strategies.fedprox:FedPrix", "did you mean 'FedProx'"),
        ("strategies.fedavg:FedAvg", "strategies.fedavg:FedAvg is no settings class of the kind 'fedprox'"),
        (f"{HERE}:PROJECT", "PROJECT is no settings class of the kind 'fedprox'"),
    ],
)
def test_an_entry_point_of_ours_that_leads_nowhere_is_named(
    without_pyproject: None, install_package: Any, path: str, message: str
) -> None:
    install_package("fl-sim", NAMED | {"fl_sim.algorithm": {**NAMED["fl_sim.algorithm"], "fedprox": path}})
    with pytest.raises(UserError, match=message) as refusal:
        experiment_from({"algorithm": "fedprox"})
    assert "entry point 'fedprox' of the package fl-sim in the group fl_sim.algorithm" in str(refusal.value)
    assert "run 'pip install' again" in str(refusal.value)


def test_metadata_that_are_older_than_the_code_are_told(without_pyproject: None, install_package: Any) -> None:
    install_package("fl-sim", {"console_scripts": {"fl-sim": "fl_sim.__main__:command"}})
    for settings in ({}, {"algorithm": "fedprox"}):
        with pytest.raises(UserError, match=r"is missing, or older than its code.*run 'pip install' again"):
            experiment_from(settings)
