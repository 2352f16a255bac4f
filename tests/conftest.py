"""What several test files share.

Nothing that takes seconds to import is imported here at once: pytest's workers wait for the process that starts them,
which reads this file too, and runs no test.
"""

import gc
import importlib.util
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings

from fl_sim.engines.own_ray import choose_token
from fl_sim.importing import leave_out
from fl_sim.native import compiling

pytest_plugins = ["fl_sim.testing_fixtures"]

hypothesis_settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis_settings.load_profile("repeatable")

gc.disable()  # until all tests are imported: what that makes stays to the end, and none of it is garbage


def pytest_collection_finish() -> None:
    """Look for garbage from now on, and only in what the tests themselves make."""
    leave_out()
    gc.enable()


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Seed PyTorch, NumPy and ``random``: a test that draws without a seed of its own draws the same values each time.

    Secret noise does not come from these generators and stays secret.
    """
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """No garbage collection in a test that sends SIGINT to its own process.

    Hypothesis is called back at every collection, and Python drops a KeyboardInterrupt that arrives in such a callback.
    """
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def install_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, dict[str, dict[str, str]]], Path]:
    """Install a package that consists of entry points, {group: {name: path}}, in front of all others."""
    from fl_sim import one_of, settings

    def install(name: str, groups: dict[str, dict[str, str]]) -> Path:
        folder = tmp_path / f"of {name}"
        metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"[{group}]\n" + "".join(f"{one} = {path}\n" for one, path in names.items())
                 for group, names in groups.items()]  # fmt: skip
        (metadata / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(folder)
        forget()
        return folder

    def forget() -> None:
        for kept in (
            one_of._installed,
            one_of.entry_points_of_ours,
            one_of._loaded_kind,
            one_of._plain,
            settings.default_of,
        ):
            kept.cache_clear()

    yield install
    monkeypatch.undo()
    forget()


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """One Ray for all tests of a file that ask for it; the engine joins it and leaves it running."""
    start = pytest.importorskip("fl_sim.engines.ray_start")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # they would lack the import path that actors get
        start.start_or_join(start.RayResources(actors=2), 2)
        yield
        start.stop_or_leave()


choose_token()  # for tests that start a Ray of their own, before any test imports Ray

LONGEST = (
    "fl_sim/engines/test_ray_nodes.py", "test_packaging.py", "test_engines_agree.py", "test_peers_personal.py",
    "fl_sim/engines/test_ray.py", "examples", "test_scale_benchmarks.py", "test_workloads.py",
    "fl_sim/simulation/test_flower_deployment.py", "strategies/test_robust_pairs.py", "fl_sim/native/test_bfloat16.py",
    "test_release_audit.py", "docs", "fl_sim/native/test_kernel.py", "fl_sim/native/test_fuzz.py",
    "test_private_records_audit.py", "fl_sim/simulation/test_flower_app.py", "fl_sim/engines/test_own_ray.py",
    "test_agreement_benchmark.py", "fl_sim/simulation/test_noise_from_epsilon.py", "fl_sim/cli/test_table.py",
    "fl_sim/report/test_damage.py", "strategies/test_algorithm.py", "test_house.py", "strategies/pate/test_student.py",
    "fl_sim/test_testing_runs.py", "fl_sim/engines/test_ray_doors.py", "fl_sim/stages/pate/test_run.py",
)  # fmt: skip
"""Files that take some twenty seconds and more: those that wait for processes beside those that compute."""


LONG = (
    "docs", "examples", "test_agreement_benchmark.py", "test_canary_audit.py", "test_damaged_directories.py",
    "test_disk_limits.py", "test_engines_agree.py", "test_fuzz_files.py", "test_fuzz_settings.py",
    "test_gallery_runs.py", "test_gallery_tables.py", "test_hostile_replies.py", "test_kill9.py",
    "test_membership_audit.py", "test_mutants.py", "test_peers.py", "test_peers_personal.py", "test_release_audit.py",
    "test_personal_costs.py",
    "test_roofline_benchmark.py", "test_scale_benchmarks.py", "test_workloads.py", "strategies/test_defaults.py",
    "strategies/test_robust_pairs.py", "fl_sim/privacy/test_accounting_reference.py",
    "fl_sim/privacy/test_small_delta.py", "fl_sim/simulation/test_noise_from_epsilon.py",
    "fl_sim/simulation/test_whole_run_bills.py", "fl_sim/native/test_fuzz.py",
)  # fmt: skip
"""Long tests of what other tests go through as well: benchmarks, pages, galleries, fuzzers and audits. CI runs them
beside those marked ``cluster``, without coverage."""


COVERED_ELSEWHERE = (
    "clients/dafl/dpcgan/test_clipping.py", "clients/dafl/dpcgan/test_stack.py", "clients/dafl/dpcgan/test_training.py",
    "clients/dafl/test_labels.py", "clients/test_private_updates.py", "fl_sim/native/test_bfloat16.py",
    "fl_sim/native/test_terms.py", "fl_sim/privacy/pate/test_labelling_cost.py",
    "fl_sim/privacy/pate/test_smooth_sensitivity.py", "fl_sim/privacy/test_accounting.py",
    "fl_sim/privacy/test_every_release.py", "fl_sim/privacy/test_modular_sums.py", "fl_sim/privacy/test_record_sums.py",
    "fl_sim/report/test_damage.py", "fl_sim/simulation/test_empty_clients.py", "fl_sim/simulation/test_fixed_parts.py",
    "fl_sim/simulation/test_forecast.py", "fl_sim/simulation/test_measuring.py",
    "fl_sim/simulation/test_private_runs.py", "fl_sim/simulation/test_run.py", "fl_sim/simulation/test_two_worlds.py",
    "fl_sim/simulation/test_weights_runs.py", "fl_sim/stages/dafl/test_stage.py",
    "fl_sim/stages/pate/test_statements.py", "fl_sim/stages/test_own_models.py",
    "fl_sim/test_data_images_of_features.py", "fl_sim/test_data_npz.py", "fl_sim/test_interface.py",
    "fl_sim/test_testing_runs.py", "fl_sim/training/test_stacked.py", "fl_sim/training/test_stacked_step.py",
    "fl_sim/training/test_trainer.py", "partitions/test_scheme.py", "strategies/compression/test_compressors.py",
    "strategies/compression/test_pairs.py", "strategies/compression/test_runs.py", "strategies/pate/test_labelling.py",
    "strategies/pate/test_student.py", "strategies/test_algorithm.py", "strategies/test_cfl.py",
    "strategies/test_correlated_noise.py", "strategies/test_distributed_dp.py", "strategies/test_dp_sgd.py",
    "strategies/test_fairness.py", "strategies/test_feddyn.py", "strategies/test_global_dp.py",
    "strategies/test_low_rank.py", "strategies/test_personal_laws.py", "strategies/test_personal_steps.py",
    "test_house.py", "test_private_records_audit.py",
)  # fmt: skip
"""Files that alone go through little of the code, and take much of the time that measuring costs."""


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is not selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the files in the lists, and begin with the longest: no worker is left alone with one of them in the end."""
    long, uncovered = ({Path(__file__).parent / name for name in names} for names in (LONG, COVERED_ELSEWHERE))
    for item in items:
        if long & {item.path, *item.path.parents}:
            item.add_marker("long")
        if item.path in uncovered:
            item.add_marker("no_cover")
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: min(places.get(path, len(places)) for path in (item.path, *item.path.parents)))


@pytest.fixture(scope="session")
def load_benchmark() -> Callable[[str], ModuleType]:
    """Load a script of benchmarks/ from where it lies: other distributions have a package of that name."""
    folder = Path(__file__).resolve().parents[1] / "benchmarks"
    return lambda name: _loaded(folder / f"{name}.py")


@pytest.fixture(scope="session")
def compiler() -> list[str]:
    """The C++ compiler. Tests that need one are skipped where there is none, and fail where it refuses our sources."""
    try:
        return compiling._compiler()
    except compiling.NoCompiler as reason:
        pytest.skip(str(reason))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Compute in one thread, as a run does: pytest's workers keep the cores busy, and threads would spin in waiting."""
    from fl_sim.simulation.client_runtime import fixed_threads

    with fixed_threads(1):
        yield


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c() -> None:
    """Heed Ctrl-C, here and in all processes of the tests: a shell that starts them with ``&`` has it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _no_users_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what Ray starts once for many tests from the user's own ledgers, and all tests from the user's features."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FL_SIM_LEDGERS", str(tmp_path_factory.mktemp("ledgers")))
        patched.setenv("FL_SIM_FEATURES", str(tmp_path_factory.mktemp("features")))
        yield


@pytest.fixture(autouse=True)
def _own_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep pools of synthetic records and ledgers from going from one test to the next, and from the user's own."""
    monkeypatch.setenv("FL_SIM_POOLS", str(tmp_path / ".pools"))
    monkeypatch.setenv("FL_SIM_LEDGERS", str(tmp_path / ".ledgers"))


@pytest.fixture(autouse=True)
def _no_power_cuts(no_fsync: None) -> None:
    """Do not wait for the disk: no power is cut."""


@pytest.fixture(autouse=True)
def _fineness_of_accounting(request: pytest.FixtureRequest, set_fineness: Callable[..., None]) -> None:
    """Let the accountants work as finely as the test asks for; what they remember lasts until a test asks otherwise."""
    quick = "quick_accounting" in request.fixturenames
    coarse = quick or "coarse_losses" in request.fixturenames
    set_fineness(losses=100 if coarse else 1, orders=16 if quick else 1)


@pytest.fixture
def coarse_losses() -> None:
    """Let the PLD accountant work on a grid a hundred times coarser: still an upper bound, in a tenth of the time."""


@pytest.fixture
def quick_accounting() -> None:
    """Let both accountants find a larger upper bound in a tenth of the time, where the figure is not what is tested."""


@pytest.fixture
def cells_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run cells in threads of this process: a worker process takes seconds to start."""
    from fl_sim.tables import workers

    def spawn() -> tuple[SimpleNamespace, Connection]:
        ours, theirs = Pipe()
        thread = threading.Thread(target=workers.work, args=(os.dup(theirs.fileno()),), daemon=True)
        thread.start()
        theirs.close()
        return SimpleNamespace(terminate=ours.close, wait=thread.join, stdin=None), ours

    monkeypatch.setattr(workers, "_spawn", spawn)
    monkeypatch.setattr(workers, "_die_with_parent", lambda: None)


@pytest.fixture(scope="session")
def federations() -> ModuleType:
    """The module of ``Bowl`` and ``Federation``."""
    return _loaded(Path(__file__).with_name("federations.py"))


@pytest.fixture
def stop_after() -> Callable[[int], Any]:
    """Give an observer that ends a run after a round, as Ctrl-C does."""
    from fl_sim.simulation.run_log import Silent

    class StopAfter(Silent):
        def __init__(self, server_round: int) -> None:
            self._last = server_round

        def finished_round(self, record: Any) -> None:
            if record.round == self._last:
                raise KeyboardInterrupt

    return StopAfter


@pytest.fixture
def resumed_like(tmp_path: Path, stop_after: Callable[[int], Any]) -> Callable[[Any, Path], dict[str, Any]]:
    """Give a function that stops an experiment after a round, resumes it, and expects the model in a run directory."""
    from safetensors.torch import load_file

    from fl_sim.simulation.run import run

    def resumed(experiment: Any, whole: Path) -> dict[str, Any]:
        with pytest.raises(KeyboardInterrupt):
            run(experiment, tmp_path / "broken", observer=stop_after(1))
        result = run(experiment, tmp_path / "broken")
        models = [load_file(out / "model.safetensors") for out in (whole, tmp_path / "broken")]
        assert all(models[0][name].equal(models[1][name]) for name in models[0])
        return result

    return resumed


@pytest.fixture
def bowl(federations: ModuleType) -> Callable[[float], Any]:
    return federations.Bowl


@pytest.fixture
def federation(federations: ModuleType) -> type[Any]:
    return federations.Federation


@pytest.fixture
def records(federations: ModuleType) -> Callable[..., Any]:
    return federations.records


@pytest.fixture
def settings(federations: ModuleType) -> Callable[..., Any]:
    return federations.settings


@pytest.fixture
def strategy_of(federations: ModuleType) -> Callable[..., Any]:
    return federations.strategy_of


@pytest.fixture
def reply_of(federations: ModuleType) -> Callable[..., Any]:
    return federations.reply_of


def _loaded(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
