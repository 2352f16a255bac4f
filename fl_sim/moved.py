"""Moved modules and names: the old place works for one more release of fl-sim, and a warning names the new place."""

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any, Final

MOVED: Final[Mapping[str, str]] = {
    "clients.clamped": "clients.images",
    "clients.class_moments": "clients.moments",
    "clients.dafl.clamped": "clients.images",
    "clients.dafl.dpcgan.client": "clients.dafl.dpcgan.training",
    "clients.dafl.dpcgan.compiled": "clients.dafl.dpcgan.training",
    "clients.dafl.dpcgan.weights": "clients.dafl.dpcgan.training",
    "clients.dafl.forest_model": "clients.dafl.marginals",
    "clients.dafl.gaussian": "clients.dafl.noisy_moments",
    "clients.dafl.mean_embedding": "clients.dafl.noisy_moments",
    "clients.dafl.table": "clients.dafl.marginals",
    "clients.dafl.warping": "clients.images",
    "clients.forest": "clients.teacher",
    "clients.frequencies": "clients.images",
    "clients.owner": "clients.app",
    "clients.release": "clients.policy",
    "clients.symmetric": "clients.moments",
    "clients.warping": "clients.images",
    "fl_sim.batch_norm": "fl_sim.params",
    "fl_sim.cli.arguments": "fl_sim.cli.running_verbs",
    "fl_sim.cli.data_card": "fl_sim.cli.data",
    "fl_sim.cli.data_verbs": "fl_sim.cli.verbs",
    "fl_sim.cli.export": "fl_sim.cli.report",
    "fl_sim.cli.gallery": "fl_sim.cli.report",
    "fl_sim.cli.init": "fl_sim.tables",
    "fl_sim.cli.options": "fl_sim.cli.running_verbs",
    "fl_sim.cli.partition": "fl_sim.cli.data",
    "fl_sim.cli.pictures": "fl_sim.cli.report",
    "fl_sim.cli.plan": "fl_sim.cli.run",
    "fl_sim.cli.printed_plan": "fl_sim.cli.printed",
    "fl_sim.cli.printed_table": "fl_sim.cli.printed",
    "fl_sim.cli.privacy.labels": "fl_sim.cli.privacy",
    "fl_sim.cli.privacy.verbs": "fl_sim.cli.privacy",
    "fl_sim.cli.result_verbs": "fl_sim.cli.verbs",
    "fl_sim.cli.settings": "fl_sim.cli.run",
    "fl_sim.cli.sweep": "fl_sim.cli.run",
    "fl_sim.cli.table": "fl_sim.cli.run",
    "fl_sim.cli.waiting": "fl_sim.cli.screen",
    "fl_sim.cli.watch": "fl_sim.cli.report",
    "fl_sim.data.card": "fl_sim.data.dataset",
    "fl_sim.data.checked": "fl_sim.data.dataset",
    "fl_sim.data.columns": "fl_sim.data.table_columns",
    "fl_sim.data.content": "fl_sim.data.reading",
    "fl_sim.data.digits": "fl_sim.data.public_sets",
    "fl_sim.data.folder": "fl_sim.data.pictures",
    "fl_sim.data.idx": "fl_sim.data.public_sets",
    "fl_sim.data.integrity": "fl_sim.data.reading",
    "fl_sim.data.known": "fl_sim.data.naming",
    "fl_sim.data.listed": "fl_sim.data.dataset",
    "fl_sim.data.made_images": "fl_sim.data.scattering",
    "fl_sim.data.medmnist": "fl_sim.data.npz",
    "fl_sim.data.naming_words": "fl_sim.data.naming",
    "fl_sim.data.npz_clients": "fl_sim.data.npz",
    "fl_sim.data.own": "fl_sim.data.reading",
    "fl_sim.data.public_images": "fl_sim.data.public_sets",
    "fl_sim.data.spelling": "fl_sim.data.table_file",
    "fl_sim.data.table_features": "fl_sim.data.table_columns",
    "fl_sim.data.table_roles": "fl_sim.data.table_columns",
    "fl_sim.data.table_words": "fl_sim.data.table",
    "fl_sim.data.testing_part": "fl_sim.data.table",
    "fl_sim.data.torchvision_files": "fl_sim.data.public_sets",
    "fl_sim.data.uci": "fl_sim.data.public_sets",
    "fl_sim.data.unit_range": "fl_sim.data.dataset",
    "fl_sim.data.whitening": "fl_sim.data.scattering",
    "fl_sim.devices.fleet": "fl_sim.devices.settings",
    "fl_sim.devices.profile": "fl_sim.devices.settings",
    "fl_sim.devices.schedule": "fl_sim.devices.clock",
    "fl_sim.engines.apart": "fl_sim.engines.remote",
    "fl_sim.engines.envelope": "fl_sim.engines.remote",
    "fl_sim.engines.inprocess": "fl_sim.engines.grid",
    "fl_sim.engines.own_modules": "fl_sim.engines.remote",
    "fl_sim.engines.pieces": "fl_sim.engines.batching",
    "fl_sim.engines.ray_crew": "fl_sim.engines.actor_pool",
    "fl_sim.engines.ray_gate": "fl_sim.engines.version_check",
    "fl_sim.engines.ray_keeper": "fl_sim.engines.own_ray",
    "fl_sim.engines.ray_token": "fl_sim.engines.own_ray",
    "fl_sim.engines.releases": "fl_sim.engines.wire",
    "fl_sim.engines.tensor_records": "fl_sim.engines.arrays",
    "fl_sim.engines.work": "fl_sim.engines.batching",
    "fl_sim.entry_points": "fl_sim.one_of",
    "fl_sim.experiment.engine": "fl_sim.experiment.groups",
    "fl_sim.experiment.evaluate": "fl_sim.experiment.groups",
    "fl_sim.experiment.local": "fl_sim.experiment.groups",
    "fl_sim.experiment.own_records": "fl_sim.experiment.node_job",
    "fl_sim.handed_out": "fl_sim.params",
    "fl_sim.import_path": "fl_sim.own_code",
    "fl_sim.late_torch": "fl_sim.importing",
    "fl_sim.model_names": "fl_sim.settings",
    "fl_sim.native.adversaries": "fl_sim.native.perceptrons",
    "fl_sim.native.checks": "fl_sim.native.request",
    "fl_sim.native.normals": "fl_sim.native.kernel",
    "fl_sim.native.work": "fl_sim.native.layers",
    "fl_sim.own_model": "fl_sim.models",
    "fl_sim.own_sources": "fl_sim.own_code",
    "fl_sim.printable": "fl_sim.mistakes",
    "fl_sim.privacy.charge_log": "fl_sim.privacy.ledger",
    "fl_sim.privacy.filter": "fl_sim.privacy.accounting",
    "fl_sim.privacy.grid": "fl_sim.privacy.mechanisms",
    "fl_sim.privacy.one_run": "fl_sim.privacy.audit",
    "fl_sim.privacy.pate.gnmax": "fl_sim.privacy.pate.labelling_cost",
    "fl_sim.privacy.pate.lnmax": "fl_sim.privacy.pate.labelling_cost",
    "fl_sim.privacy.planned": "fl_sim.privacy.bill",
    "fl_sim.privacy.planning": "fl_sim.privacy.accounting",
    "fl_sim.privacy.pure": "fl_sim.privacy.events",
    "fl_sim.privacy.rounding": "fl_sim.privacy.terms",
    "fl_sim.report.bills": "fl_sim.report.payments",
    "fl_sim.report.curve": "fl_sim.report.measures",
    "fl_sim.report.figures.found": "fl_sim.report.figures.by_epsilon",
    "fl_sim.report.figures.records": "fl_sim.report.figures.samples",
    "fl_sim.report.figures.sheet": "fl_sim.report.figures.samples",
    "fl_sim.report.further": "fl_sim.report.table",
    "fl_sim.report.page_data": "fl_sim.report.page",
    "fl_sim.report.page_tables": "fl_sim.report.page_sections",
    "fl_sim.report.page_words": "fl_sim.report.page_sections",
    "fl_sim.report.progress_line": "fl_sim.report.progress",
    "fl_sim.report.release": "fl_sim.report.files",
    "fl_sim.report.spread": "fl_sim.report.measures",
    "fl_sim.report.sweep": "fl_sim.report.figures.sweep",
    "fl_sim.report.table_json": "fl_sim.report.table_files",
    "fl_sim.report.table_markdown": "fl_sim.report.table_files",
    "fl_sim.report.table_progress": "fl_sim.report.progress",
    "fl_sim.report.targets": "fl_sim.report.page_sections",
    "fl_sim.report.tex": "fl_sim.report.table_files",
    "fl_sim.report.tidy": "fl_sim.report.table_files",
    "fl_sim.report.watch_view": "fl_sim.report.watching",
    "fl_sim.running_statistics": "fl_sim.params",
    "fl_sim.same_records": "fl_sim.types",
    "fl_sim.sequences": "fl_sim.models",
    "fl_sim.settings_file": "fl_sim.settings",
    "fl_sim.simulation.asynchronous": "fl_sim.stages.asynchronous",
    "fl_sim.simulation.calibration": "fl_sim.stages.ccvr",
    "fl_sim.simulation.capacity": "fl_sim.simulation.client_runtime",
    "fl_sim.simulation.clocks": "strategies.timed",
    "fl_sim.simulation.dafl": "fl_sim.stages.dafl",
    "fl_sim.simulation.dafl.bill": "fl_sim.stages.dafl.bill",
    "fl_sim.simulation.dafl.pool": "fl_sim.stages.dafl.pool",
    "fl_sim.simulation.dafl.synthesis": "fl_sim.stages.dafl.pool",
    "fl_sim.simulation.desk": "fl_sim.simulation.remote_workers",
    "fl_sim.simulation.estimate": "fl_sim.simulation.forecast",
    "fl_sim.simulation.extending": "fl_sim.simulation.resuming",
    "fl_sim.simulation.measures": "fl_sim.simulation.run_log",
    "fl_sim.simulation.moments_bill": "fl_sim.stages.ccvr",
    "fl_sim.simulation.pace": "fl_sim.simulation.timing",
    "fl_sim.simulation.pate": "fl_sim.stages.pate",
    "fl_sim.simulation.pate.asking": "fl_sim.stages.pate.procedure",
    "fl_sim.simulation.pate.ensemble": "fl_sim.stages.pate.noisy_labels",
    "fl_sim.simulation.pate.noisy_labels": "fl_sim.stages.pate.noisy_labels",
    "fl_sim.simulation.pate.planned": "fl_sim.stages.pate.statements",
    "fl_sim.simulation.pate.procedure": "fl_sim.stages.pate.procedure",
    "fl_sim.simulation.pate.run": "fl_sim.stages.pate.run",
    "fl_sim.simulation.pate.standing": "fl_sim.stages.pate.run",
    "fl_sim.simulation.pate.statements": "fl_sim.stages.pate.statements",
    "fl_sim.simulation.planned_bill": "fl_sim.simulation.rounds",
    "fl_sim.simulation.pools": "fl_sim.simulation.stage",
    "fl_sim.simulation.preparation": "fl_sim.simulation.stage",
    "fl_sim.simulation.procedure": "fl_sim.simulation.rounds",
    "fl_sim.simulation.repeating": "fl_sim.simulation.resuming",
    "fl_sim.simulation.result": "fl_sim.simulation.run_log",
    "fl_sim.simulation.site": "fl_sim.simulation.client_runtime",
    "fl_sim.simulation.starting": "fl_sim.stages.private_start",
    "fl_sim.simulation.stopwatch": "fl_sim.simulation.timing",
    "fl_sim.simulation.summaries": "fl_sim.stages.ccvr",
    "fl_sim.simulation.travelling": "fl_sim.simulation.remote_workers",
    "fl_sim.simulation.tstr": "fl_sim.stages.tstr",
    "fl_sim.simulation.work": "fl_sim.simulation.timing",
    "fl_sim.stages.dafl.client": "fl_sim.stages.dafl.stage",
    "fl_sim.stages.dafl.synthesis": "fl_sim.stages.dafl.pool",
    "fl_sim.stages.pate.asking": "fl_sim.stages.pate.procedure",
    "fl_sim.stages.pate.ensemble": "fl_sim.stages.pate.noisy_labels",
    "fl_sim.stages.pate.planned": "fl_sim.stages.pate.statements",
    "fl_sim.stages.pate.standing": "fl_sim.stages.pate.run",
    "fl_sim.store.checkpoint": "fl_sim.store.run_directory",
    "fl_sim.store.locks": "fl_sim.store.files",
    "fl_sim.store.seal": "fl_sim.store.tensors",
    "fl_sim.store.secret_key": "fl_sim.store.private",
    "fl_sim.store.unheard": "fl_sim.store.private",
    "fl_sim.tables.budget": "fl_sim.tables.workers",
    "fl_sim.tables.files": "fl_sim.tables",
    "fl_sim.tables.forerunner": "fl_sim.tables.earlier_runs",
    "fl_sim.tables.names": "fl_sim.tables.labels",
    "fl_sim.tables.points": "fl_sim.tables.plan",
    "fl_sim.tables.seeds": "fl_sim.tables.labels",
    "fl_sim.tables.strangers": "fl_sim.tables.earlier_runs",
    "fl_sim.tables.tuning_forecast": "fl_sim.tables.forecast",
    "fl_sim.tables.tuning_optuna": "fl_sim.tables.tuning_space",
    "fl_sim.tables.tuning_runs": "fl_sim.tables.tuning",
    "fl_sim.tables.tuning_settings": "fl_sim.tables.tuning_space",
    "fl_sim.tables.tuning_trials": "fl_sim.tables.tuning",
    "fl_sim.tables.tuning_words": "fl_sim.tables.tuning",
    "fl_sim.tables.words": "fl_sim.tables.labels",
    "fl_sim.tables.worker": "fl_sim.tables.workers",
    "fl_sim.testing_compressor": "fl_sim.testing",
    "fl_sim.testing_engine": "fl_sim.testing_runs",
    "fl_sim.tracking.following": "fl_sim.tracking.observers",
    "fl_sim.tracking.mlflow": "fl_sim.tracking.trackers",
    "fl_sim.tracking.names": "fl_sim.tracking.trackers",
    "fl_sim.tracking.sending": "fl_sim.tracking.observers",
    "fl_sim.tracking.subject": "fl_sim.tracking.observers",
    "fl_sim.tracking.tensorboard": "fl_sim.tracking.trackers",
    "fl_sim.tracking.trackio": "fl_sim.tracking.trackers",
    "fl_sim.tracking.wandb": "fl_sim.tracking.trackers",
    "fl_sim.training.adam": "fl_sim.training.optimizer",
    "fl_sim.training.ascent": "fl_sim.training.optimizer",
    "fl_sim.training.augmenting": "fl_sim.training.records",
    "fl_sim.training.clipping": "fl_sim.training.optimizer",
    "fl_sim.training.cuda_graphs": "fl_sim.training.stacked",
    "fl_sim.training.frechet": "fl_sim.training.features",
    "fl_sim.training.measures": "fl_sim.training.evaluation",
    "fl_sim.training.objective": "fl_sim.training.loop",
    "fl_sim.training.precision": "fl_sim.training.records",
    "fl_sim.training.stack_kind": "fl_sim.training.stacked_step",
    "fl_sim.training.terms": "fl_sim.training.losses",
    "fl_sim.write_guard": "fl_sim.params",
    "partitions.dirichlet": "partitions.label_skew",
    "partitions.errors": "partitions.scheme",
    "partitions.feature_noise": "partitions.feature_skew",
    "partitions.iid": "partitions.quantity",
    "partitions.label_k": "partitions.label_skew",
    "partitions.natural": "partitions.feature_skew",
    "partitions.parts": "partitions.scheme",
    "partitions.shards": "partitions.label_skew",
    "strategies.compression.bits": "strategies.compression.quantization",
    "strategies.compression.none": "strategies.compression",
    "strategies.compression.power_sgd": "strategies.compression.error_feedback",
    "strategies.compression.qsgd": "strategies.compression.quantization",
    "strategies.compression.rand_k": "strategies.compression.error_feedback",
    "strategies.compression.settings": "strategies.compression.layer",
    "strategies.compression.sign_sgd": "strategies.compression.error_feedback",
    "strategies.compression.top_k": "strategies.compression.error_feedback",
    "strategies.pate.augmentation": "strategies.pate.student",
    "strategies.pate.mechanisms": "strategies.pate.labelling",
    "strategies.pate.neighbours": "strategies.pate.semi_supervised",
    "strategies.pate.public_split": "strategies.pate.settings",
    "strategies.pate.student_forest": "strategies.pate.student",
    "strategies.pate.student_gan": "strategies.pate.semi_supervised",
    "strategies.pate.student_resnet": "strategies.pate.student",
    "strategies.widths": "strategies.sizes",
}
"""{old import path of a module: new import path of its content}."""

MOVED_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "fl_sim.experiment.job": {
        "device_of": "fl_sim.experiment.device",
        "has_gpus_elsewhere": "fl_sim.experiment.device",
        "moving_of": "fl_sim.experiment.shards",
        "own_job": "fl_sim.experiment.node_job",
        "precision_of": "fl_sim.experiment.device",
        "public_facts": "fl_sim.experiment.node_job",
        "shards_of": "fl_sim.experiment.shards",
    },
}
"""{module: {public name that was there: new import path of its module}}. Such a module calls ``moved_name``."""


def moved_name(module: str, name: str) -> Any:
    """Return a public name that has moved out of ``module``, with a DeprecationWarning.

    A module with moved names calls this function in its ``__getattr__``. Raises AttributeError for any other name.
    """
    if (new := MOVED_NAMES[module].get(name)) is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warning = f"{module}.{name} has moved: from {new} import {name}, because the next release removes the old place"
    warnings.warn(warning, DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(new), name)


class _Moved(Loader):
    """A module loader for the old import path of a moved module: it imports the module at the new path instead."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return None. Python then creates an empty module, and ``exec_module`` replaces it by the moved module."""
        del spec
        return None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, MOVED[module.__name__]
        sys.modules[old] = importlib.import_module(new)
        warning = f"{old} has moved to {new}: import {new}, because the next release removes the old path"
        warnings.warn(warning, DeprecationWarning, stacklevel=2)


class Finder(MetaPathFinder):
    """An entry of ``sys.meta_path`` that finds modules at their old import paths.

    This entry must come before Python's own finders. Otherwise a submodule of a moved folder would be loaded twice.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the import spec for ``fullname``, the old path of a module; None if no module had this old path."""
        del path, target
        return spec_from_loader(fullname, _Moved(), is_package=True) if fullname in MOVED else None
