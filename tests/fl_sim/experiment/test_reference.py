"""The reference holds every setting that there is, with what it takes, its default and its meaning."""

from dataclasses import fields
from pathlib import Path

from pydantic import BaseModel

from fl_sim.data.naming import OPTIONS, SETTINGS
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.reference import Group, groups, meaning
from fl_sim.kinds import field_defaults
from fl_sim.settings import kinds_of


def group(name: str, kind: str = "") -> Group:
    [found] = [one for one in groups() if (one.name, one.kind) == (name, kind)]
    return found


def test_every_setting_has_a_type_and_a_meaning() -> None:
    without = [(one.name, one.kind, setting.name) for one in groups() for setting in one.settings
               if not setting.meaning or not setting.takes]  # fmt: skip
    assert without == []
    assert [(one.name, one.kind) for one in groups() if not one.about] == []


def test_no_field_of_the_tree_is_left_out() -> None:
    written: dict[str, set[str]] = {}
    for one in groups():
        written.setdefault(f"{one.name}={one.kind}", set()).update(setting.name for setting in one.settings)
    assert written["="] == set(Experiment.model_fields)
    for kind, algorithm in kinds_of("algorithm").items():
        assert written[f"algorithm={kind}"] == {
            f"algorithm.{name}" for name in field_defaults(algorithm) if name != "kind"
        }
    seen = {name for names in written.values() for name in names}
    assert _paths(Experiment(), "") - seen == set()
    assert {"partition.min_size", "algorithm.student.augmentation.rotation", "preprocess.labels.least_share"} <= seen


def _paths(value: object, prefix: str) -> set[str]:
    names = [*type(value).model_fields] if isinstance(value, BaseModel) else [one.name for one in fields(value)]  # type: ignore[arg-type]
    found = {prefix + name for name in names if name != "kind"}
    for name in names:
        inner = getattr(value, name)
        if isinstance(inner, BaseModel) or hasattr(inner, "__dataclass_fields__"):
            found |= _paths(inner, f"{prefix}{name}.")
    return found


def test_defaults_are_those_that_an_experiment_starts_from() -> None:
    settings = [setting for name in ("", "local", "evaluate") for setting in group(name).settings]
    typed = [f"{one.name}={one.default}" for one in settings if one.default not in {"", "left out"}]
    assert len(typed) > 30
    assert experiment_from(with_overrides({}, typed)) == Experiment()


def test_a_setting_without_a_default_says_that_it_must_be_given() -> None:
    needed = {one.name for part in groups() for one in part.settings if one.default == "none, it must be given"}
    assert "devices.path" in needed
    assert not [one for part in groups() for one in part.settings if "Undefined" in one.default]


def test_what_a_setting_takes_is_in_words() -> None:
    takes = {setting.name: setting.takes for name in ("", "local") for setting in group(name).settings}
    assert takes["clients"] == "whole number, at least 1, at most 1,000,000"
    assert takes["device"] == "auto, cpu or cuda"
    assert takes["local.momentum"] == "number, at least 0, below 1"
    assert takes["partition"] == (
        "colour, dirichlet, domain, drift, feature-noise, iid, invert, label-K, natural, permute-labels, quantity, "
        "rotate or shards"
    )


def test_a_meaning_is_what_the_docstring_says_of_the_field_alone() -> None:
    documentation = """What it is, by ``b``.

    ``a``: the first. It goes on. ``b``: the second, unlike ``a``. And on.

    A last word. Also ``c`` counts.
    """
    known = {"a", "b", "c", "d"}
    assert meaning(documentation, "a", known) == "The first. It goes on."
    assert meaning(documentation, "b", known) == "The second, unlike ``a``. And on."
    assert meaning(documentation, "c", known) == "Also ``c`` counts."
    assert meaning(documentation, "d", known) == ""
    assert meaning("v <- v + ``tau``.", "tau", {"tau"}) == "v <- v + ``tau``."


def test_settings_of_the_users_own_records_are_in_it_as_on_their_page() -> None:
    assert {key for keys in OPTIONS.values() for key in keys} == set(SETTINGS)
    page = (Path(__file__).parents[3] / "docs/data.md").read_text()
    assert [key for key in SETTINGS if f"`data.{key}" not in page] == []
    assert [setting.name for setting in group("data", "medmnist").settings] == ["data.classes", "data.val"]


def test_a_large_bound_is_written_as_a_power_of_ten() -> None:
    assert group("aggregator", "centred-clipping").settings[0].takes == "number, above 0, at most 1e+30"
