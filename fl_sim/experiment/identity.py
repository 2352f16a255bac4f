"""Digests of the user's own records and code, which together with the settings identify the inputs of a run."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_sim.data import fingerprint, is_own, sealed_content
from fl_sim.data.naming import own_name, parts_of
from fl_sim.experiment.experiment import Experiment, own_paths, paths_in
from fl_sim.kinds import ReadingFurther
from fl_sim.own_code import digests, edited
from fl_sim.store import private

CURE = (
    "--again (again=True) repeats the run and moves the old files to another folder; another --out keeps the old files "
    "unchanged"
)


@dataclass(frozen=True)
class Identity:
    """Digests of the records and the code from which a result is computed.

    ``records``: the digest of the user's own records, empty for public data sets. ``code``: {module: digest} of the
    user's own modules; an unknown digest is empty. ``is_private``: True if the digest of the records is stored only as
    a hash with a secret key. A plain digest would be unsafe: a person who knows all records except one could find the
    missing record by trying all possible values. ``data``: the name of the data set. ``root``: the first folder in
    which the data set is searched.
    """

    records: str
    code: Mapping[str, str]
    is_private: bool
    data: str = ""
    root: Path | None = None

    def written(self) -> dict[str, Any]:
        """Return the digests for the run directory; empty if neither the records nor the code are the user's own."""
        records = self.records
        if self.is_private and records:
            records = private.keyed(self.records)
        return {name: value for name, value in (("records", records), ("code", dict(self.code))) if value}

    def has_other_records(self, sealed: str) -> bool:
        """Return True if the records have changed since a finished result was computed.

        ``sealed``: the digest of the records that the result stores, a hash with a secret key. Returns False if the
        digests cannot be compared, because the result is from an older version or another machine.
        """
        if not sealed or not self.data:
            return False
        now = sealed_content(self.data, self.root, make_key=False)
        return now.partition(":")[0] == sealed.partition(":")[0] and now != sealed

    def changed(self, recorded: Mapping[str, Any]) -> str:
        """Return a phrase for the user about changes since the digests ``recorded`` were stored.

        The phrase says whether records or code have changed. It is empty if no change is known.
        """
        changes = []
        if self._same_records(recorded) is False:
            changes.append("other records (the data have changed since)")
        if (then := recorded.get("code")) is not None:
            known = {name: digest for name, digest in self.code.items() if digest and then.get(name, digest)}
            names = [name for name, digest in known.items() if then.get(name) != digest]
            names += [name for name in then if name not in self.code]
            if names:
                more = " and more" if len(names) > 3 else ""
                changes.append(f"other code ({', '.join(names[:3])}{more} changed since)")
        return " and ".join(changes)

    def has_records_of(self, recorded: Mapping[str, Any]) -> bool:
        """Return True if the records are the same as when the digests ``recorded`` were stored."""
        return bool(self._same_records(recorded))

    def unverified(self, recorded: Mapping[str, Any]) -> str:
        """Return the inputs that cannot be compared with the stored digests ``recorded``, because a digest is missing.

        The result is "records", "code", "records and code", or "".
        """
        unknown = []
        if self.records and self._same_records(recorded) is None:
            unknown.append("records")
        then = recorded.get("code", {})
        if self.code and (not then or "" in {*then.values(), *self.code.values()}):
            unknown.append("code")
        return " and ".join(unknown)

    def _same_records(self, recorded: Mapping[str, Any]) -> bool | None:
        then = str(recorded.get("records", ""))
        if not then or not self.records:
            return None
        if not self.is_private:
            return then == self.records
        return private.matches(then, self.records)


def identity_of(experiment: Experiment, data_root: Path | None) -> Identity:
    """Return the digests of the user's own records and code that ``experiment`` uses, computed now."""
    data = experiment.data
    further = experiment.algorithm.further_data() if isinstance(experiment.algorithm, ReadingFurther) else ""
    read = [fingerprint(name, data_root, with_test=True) for name in (data, further) if name and is_own(name)]
    records = read[0] if len(read) == 1 else hashlib.sha256("".join(read).encode()).hexdigest() if read else ""
    return Identity(records, digests(_modules(experiment)), experiment.is_private, data, data_root)


def code_in(settings: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the digests of the user's own modules, for a cache key.

    ``settings``: JSON values with the modules' import paths. The result is a list with one dictionary {module: digest}.
    If there is no such module, the list is empty, so that the cache keys of older versions stay valid.
    """
    code = digests(path.partition(":")[0] for path in paths_in(settings))
    return [code] if code else []


def edited_code(experiment: Experiment) -> str:
    """Return a warning if files of the user's own modules have changed since this process imported them; else ""."""
    files = edited(_modules(experiment))
    if not files:
        return ""
    return f"{', '.join(files)} changed after the import: this run uses the old code; start Python again"


def _modules(experiment: Experiment) -> set[str]:
    data = experiment.data
    paths = [*own_paths(experiment), *(part for part in parts_of(data) if is_own(part) and own_name(part) is None)]
    return {path.partition(":")[0] for path in paths}
