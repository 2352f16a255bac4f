"""Messages about mistakes in settings."""

import difflib
from collections.abc import Iterable
from typing import Any, Final, get_args, get_type_hints

from pydantic import BaseModel, ValidationError

from fl_sim.kinds import Choosing, field_defaults, is_settings, kinds

MOST_MISTAKES, MOST_CHARACTERS, MOST_OF_A_MISTAKE, MOST_OF_A_VALUE = 5, 900, 600, 240
"""Limits of one message: mistakes, characters in all, characters of one mistake, characters of a quoted value."""


def guess(name: str, valid: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ' (did you mean ...?)' with the valid name closest to ``name``, empty if none is close.

    Case, hyphens and underscores do not count: MNIST is close to mnist, and CIFAR-10 to cifar10.
    """
    names = list(valid)
    alike = [one for one in names if _bare(one) == _bare(name)]
    close = alike or difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    close = close or difflib.get_close_matches(name.lower(), names, n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


def explain(error: ValidationError, settings: type, what: str) -> str:
    """Return the message of a validation error: the first mistakes, and the number of further ones."""
    details = error.errors()
    told = [_cut(_explain_one(detail, settings, what), MOST_OF_A_MISTAKE) for detail in details[:MOST_MISTAKES]]
    while len(told) > 1 and len("; ".join(told)) > MOST_CHARACTERS:
        told.pop()
    more = len(details) - len(told)
    return "; ".join([*told, *([f"and {more} more mistake{'s' * (more > 1)}"] if more else [])])


def shortened(text: str) -> str:
    """Return a value's ``text`` for a message, without its middle if it is far longer than any setting."""
    return _cut(text, MOST_OF_A_VALUE)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def _bare(name: str) -> str:
    return name.casefold().replace("-", "").replace("_", "")


def _explain_one(detail: Any, settings: type, what: str) -> str:
    path, group = _locate([str(part) for part in detail["loc"]], settings)
    where, given = ".".join([*([what] if what else []), *path]), detail["input"]
    if detail["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
        valid = list(field_defaults(group))
        meant = elsewhere(path[-1]) or guess(path[-1], valid)
        if no := not_offered(path[-1]):
            return f"unknown key {where!r}: {no}"
        return f"unknown key {where!r}{meant}; valid here: {', '.join(valid)}"
    if detail["type"] in {"union_tag_not_found", "union_tag_invalid"}:
        annotation, choosing = _field(group, path[-1])
        known = list(kinds(annotation)) if choosing is None else choosing.names(annotation)
        kind = given.get("kind")
        return f"{where} needs a kind, one of {', '.join(known)}; got {shortened(repr(kind))}{guess(str(kind), known)}"
    message: str = detail["msg"].removeprefix("Value error, ")
    if not where:
        return message
    several = (
        f"; several values are tried by 'fl-sim sweep {where}={shortened(given)}', or by a table's [grid]"
        if isinstance(given, str) and "," in given
        else ""
    )
    return f"{where} = {shortened(repr(given))}: {message[0].lower()}{message[1:]}{several}"


def _locate(location: list[str], settings: type) -> tuple[list[str], type]:
    """Return (the keys that a user wrote, the settings class of the last one).

    pydantic puts the kind it chose into the location, after the key of the union.
    """
    path: list[str] = []
    parts = iter(location)
    for part in parts:
        path.append(part)
        if part not in field_defaults(settings):
            continue
        annotation, choosing = _field(settings, part)
        if choosing is not None:
            settings = choosing.known(annotation).get(next(parts, ""), settings)
            continue
        members = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type) and is_settings(one)]
        if len(members) > 1:
            settings = {field_defaults(one)["kind"]: one for one in members}.get(next(parts, ""), settings)
        elif members:
            settings = members[0]
    return path, settings


def _field(settings: type, name: str) -> tuple[Any, Choosing | None]:
    """Return the annotation of a field, and the mark of one that takes several kinds."""
    if not issubclass(settings, BaseModel):
        return get_type_hints(settings)[name], None
    field = settings.model_fields[name]
    return field.annotation, next((one for one in field.metadata if isinstance(one, Choosing)), None)


_OTHER_WORDS: Final = {
    "local.learning_rate=0.01": "lr learning_rate local_lr client_lr local_learning_rate",
    "local.epochs=5": "epochs local_epochs num_epochs local_ep num_local_epochs local_epoch",
    "local.steps=50": "local_steps num_steps local_iterations",
    "local.batch_size=64": "batch_size bs batch local_bs train_batch_size",
    "local.optimizer=adam": "optimizer opt optim",
    "local.momentum=0.9": "momentum",
    "local.weight_decay=1e-5": "weight_decay wd l2",
    "local.clip_norm=10": "grad_clip gradient_clipping",
    "rounds=50": "num_rounds n_rounds global_rounds communication_rounds comm_round num_server_rounds",
    "clients=10": "num_clients n_clients num_partitions num_supernodes n_parties num_users num_parties",
    "data=mnist": "dataset_name",
    "algorithm=fedavg": "strategy method alg algo",
    "model=niid-cnn": "net network arch architecture",
    "partition=dirichlet:0.5": "alpha beta dirichlet_alpha dir_alpha",
    "partition=iid": "split partitioner non_iid iid",
    "sampler=poisson:0.1, or sampler=fixed-size:10": (
        "fraction_fit fraction_train participation_rate join_ratio sample_fraction frac client_fraction"
    ),
    "sampler=fixed-size:10": "clients_per_round num_clients_per_round min_fit_clients client_num_per_round cohort_size",
    "algorithm=fedprox algorithm.mu=0.01": "mu proximal_mu prox_mu",
    "seed=0": "random_seed random_state",
    "device=cuda": "gpu cuda use_cuda",
    "engine=inprocess engine.workers=2": "num_workers n_jobs workers",
    "aggregator=global-dp aggregator.noise_multiplier=1 (per client)": "noise_multiplier sigma",
    "aggregator=global-dp aggregator.clipping_norm=1 (per client), or local.clip_norm=10 (of gradients)": (
        "clipping_norm max_grad_norm clip_norm"
    ),
    "aggregator=global-dp aggregator.epsilon=8 (per client), preprocess=da-fl preprocess.epsilon=10 (per record)": (
        "epsilon target_epsilon"
    ),
}

OTHER_WORDS: Final = {word: setting for setting, words in _OTHER_WORDS.items() for word in words.split()}
"""{word of other frameworks: our settings}; looked up only for unknown words."""


_DP_SGD: Final = "dp_sgd dpsgd opacus dp private privacy privacy_engine record_level_dp local_dp ldp dp_fedsgd dpfedavg"
_NOT_OFFERED: Final = {
    (
        "noise in the clients' training steps (DP-SGD, Opacus, local DP) is not offered yet. Offered are: per client, "
        "aggregator=global-dp; per record, synthetic records by preprocess=da-fl or labels by algorithm=pate; "
        "docs/privacy.md compares them, and 'fl-sim privacy dp-sgd' does the accounting of a DP-SGD run elsewhere"
    ): _DP_SGD,
}

NOT_OFFERED: Final = {_bare(word): reason for reason, words in _NOT_OFFERED.items() for word in words.split()}
"""{word for a feature that does not exist here: what there is in its place}; looked up only for unknown words."""


def not_offered(word: str) -> str:
    """Return what there is in place of a feature that ``word`` names and fl-sim lacks, empty for all others."""
    return NOT_OFFERED.get(_bare(word), "")


def elsewhere(word: str) -> str:
    """Return ' (here: ...)' with our settings for a ``word`` of another framework, empty for all others."""
    plain = word.lower().replace("-", "_")
    return f" (here: {OTHER_WORDS[plain]})" if plain in OTHER_WORDS else ""
