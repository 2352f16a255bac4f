"""Messages about mistakes in settings."""

import difflib
from collections.abc import Iterable
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from fl_sim.kinds import Choosing, field_defaults, is_settings, kinds

MOST_MISTAKES, MOST_CHARACTERS, MOST_OF_A_MISTAKE, MOST_OF_A_VALUE = 5, 900, 600, 240
"""What one message tells: so many mistakes, as far as so many characters reach; and how many for each, and a value."""


def guess(name: str, valid: Iterable[str]) -> str:
    """Return ' (did you mean ...?)' where something close to ``name`` is valid, else nothing."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def explain(error: ValidationError, settings: type, what: str) -> str:
    """Say a validation error in words a user can act on: the first mistakes, and how many more there are."""
    details = error.errors()
    told = [_cut(_explain_one(detail, settings, what), MOST_OF_A_MISTAKE) for detail in details[:MOST_MISTAKES]]
    while len(told) > 1 and len("; ".join(told)) > MOST_CHARACTERS:
        told.pop()
    more = len(details) - len(told)
    return "; ".join([*told, *([f"and {more} more mistake{'s' * (more > 1)}"] if more else [])])


def shortened(text: str) -> str:
    """Return a value's ``text`` for a message: what is far longer than any setting loses its middle."""
    return _cut(text, MOST_OF_A_VALUE)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def _explain_one(detail: Any, settings: type, what: str) -> str:
    path, group = _locate([str(part) for part in detail["loc"]], settings)
    where = ".".join([*([what] if what else []), *path])
    if detail["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
        valid = list(field_defaults(group))
        meant = elsewhere(path[-1]) or guess(path[-1], valid)
        return f"unknown key {where!r}{meant}; valid here: {', '.join(valid)}"
    if detail["type"] in {"union_tag_not_found", "union_tag_invalid"}:
        known = _names(group, path[-1])
        given = detail["input"].get("kind")
        return (
            f"{where} needs a kind, one of {', '.join(known)}; got {shortened(repr(given))}{guess(str(given), known)}"
        )
    message: str = detail["msg"].removeprefix("Value error, ")
    if not where:
        return message
    return f"{where} = {shortened(repr(detail['input']))}: {message[0].lower()}{message[1:]}{_several(detail, where)}"


def _several(detail: Any, where: str) -> str:
    """Say how several values are tried, where several stand in the place of one."""
    given = detail["input"]
    if not isinstance(given, str) or "," not in given:
        return ""
    return f"; several values are tried by 'fl-sim sweep {where}={shortened(given)}', or by a table's [grid]"


def _locate(location: list[str], settings: type) -> tuple[list[str], type]:
    """Return (the keys a user wrote, the settings class that the last one belongs to).

    pydantic puts the kind it chose into the location, after the key of the union.
    """
    path: list[str] = []
    parts = iter(location)
    for part in parts:
        path.append(part)
        if part not in field_defaults(settings):
            continue
        if (choosing := _choosing(settings, part)) is not None:
            settings = choosing.known(_annotation(settings, part)).get(next(parts, ""), settings)
            continue
        members = [member for member in _members(_annotation(settings, part)) if _has_kind_or_fields(member)]
        if len(members) > 1:
            settings = kinds(_union(members)).get(next(parts, ""), settings)
        elif members:
            settings = members[0]
    return path, settings


def _names(settings: type, field: str) -> list[str]:
    """Return the kinds to choose from in a ``field``."""
    annotation, choosing = _annotation(settings, field), _choosing(settings, field)
    return list(kinds(_union(_members(annotation)))) if choosing is None else choosing.names(annotation)


def _choosing(settings: type, field: str) -> Choosing | None:
    if not issubclass(settings, BaseModel):
        return None
    return next((one for one in settings.model_fields[field].metadata if isinstance(one, Choosing)), None)


def _annotation(settings: type, field: str) -> Any:
    if issubclass(settings, BaseModel):
        return settings.model_fields[field].annotation
    return get_type_hints(settings)[field]


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is not None else (annotation,)


def _union(members: Iterable[type]) -> Any:
    return Union[tuple(members)]  # noqa: UP007 (made at run time)


def _has_kind_or_fields(member: Any) -> bool:
    return isinstance(member, type) and is_settings(member)


OTHER_WORDS: Final = {
    **dict.fromkeys(
        ("lr", "learning_rate", "local_lr", "client_lr", "local_learning_rate"), "local.learning_rate=0.01"
    ),
    **dict.fromkeys(
        ("epochs", "local_epochs", "num_epochs", "local_ep", "num_local_epochs", "local_epoch"), "local.epochs=5"
    ),
    **dict.fromkeys(("local_steps", "num_steps", "local_iterations"), "local.steps=50"),
    **dict.fromkeys(("batch_size", "bs", "batch", "local_bs", "train_batch_size"), "local.batch_size=64"),
    **dict.fromkeys(("optimizer", "opt", "optim"), "local.optimizer=adam"),
    "momentum": "local.momentum=0.9",
    **dict.fromkeys(("weight_decay", "wd", "l2"), "local.weight_decay=1e-5"),
    **dict.fromkeys(("grad_clip", "gradient_clipping"), "local.clip_norm=10"),
    **dict.fromkeys(
        ("num_rounds", "n_rounds", "global_rounds", "communication_rounds", "comm_round", "num_server_rounds"),
        "rounds=50",
    ),
    **dict.fromkeys(
        ("num_clients", "n_clients", "num_partitions", "num_supernodes", "n_parties", "num_users", "num_parties"),
        "clients=10",
    ),
    "dataset_name": "data=mnist",
    **dict.fromkeys(("strategy", "method", "alg", "algo"), "algorithm=fedavg"),
    **dict.fromkeys(("net", "network", "arch", "architecture"), "model=niid-cnn"),
    **dict.fromkeys(("alpha", "beta", "dirichlet_alpha", "dir_alpha"), "partition=dirichlet:0.5"),
    **dict.fromkeys(("split", "partitioner", "non_iid", "iid"), "partition=iid"),
    **dict.fromkeys(
        (
            "fraction_fit",
            "fraction_train",
            "participation_rate",
            "join_ratio",
            "sample_fraction",
            "frac",
            "client_fraction",
        ),
        "sampler=poisson:0.1, or sampler=fixed-size:10",
    ),
    **dict.fromkeys(
        ("clients_per_round", "num_clients_per_round", "min_fit_clients", "client_num_per_round", "cohort_size"),
        "sampler=fixed-size:10",
    ),
    **dict.fromkeys(("mu", "proximal_mu", "prox_mu"), "algorithm=fedprox algorithm.mu=0.01"),
    **dict.fromkeys(("random_seed", "random_state"), "seed=0"),
    **dict.fromkeys(("gpu", "cuda", "use_cuda"), "device=cuda"),
    **dict.fromkeys(("num_workers", "n_jobs", "workers"), "engine=inprocess engine.workers=2"),
    **dict.fromkeys(("noise_multiplier", "sigma"), "aggregator=global-dp aggregator.noise_multiplier=1 (per client)"),
    **dict.fromkeys(
        ("clipping_norm", "max_grad_norm", "clip_norm"),
        "aggregator=global-dp aggregator.clipping_norm=1 (per client), or local.clip_norm=10 (of gradients)",
    ),
    **dict.fromkeys(
        ("epsilon", "target_epsilon"),
        "aggregator=global-dp aggregator.epsilon=8 (per client), preprocess=da-fl preprocess.epsilon=10 (per record)",
    ),
}
"""{word: settings as they are typed here}; only looked up for words that are unknown where they stand."""


def elsewhere(word: str) -> str:
    """Return ' (here: ...)' where ``word`` is one of another framework's, else nothing."""
    return f" (here: {OTHER_WORDS[word]})" if word in OTHER_WORDS else ""
