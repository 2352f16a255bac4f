"""A wrapper around a layer that the user wrote: checks results of methods, and names the layer in error messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from fl_sim.errors import Malformed, RunError
from fl_sim.own_code import error_context
from fl_sim.params import layout_of
from fl_sim.store.run_directory import RoundRecord
from fl_sim.types import Aggregate, Cohort, Payloads, Reply, ServerState, Traffic
from strategies.algorithm import Algorithm
from strategies.layer import Ask, Drawn, Layer, Workload, name_of
from strategies.samplers import Coins

_NUMBERS: Final = {"epsilon", "virtual_seconds", "late", "staleness"}
"""Fields of a line in ``rounds.jsonl`` that a layer may set. The round loop sets the other fields."""


class OwnLayer(Layer):
    """Wraps ``inner``, a layer that the user wrote, and checks the results of its methods."""

    def __init__(self, inner: Layer, num_clients: int) -> None:
        self.inner, self._name, self._num_clients = inner, type(inner).__name__, num_clients

    def ready(self, work: Workload) -> None:
        """Pass the clients' amount of work (numbers of records, local settings, bytes) to the user's layer."""
        with self._errors_of("ready"):
            self.inner.ready(work)

    def begin(self, server_round: int) -> None:
        """Let the user's layer prepare the round."""
        with self._errors_of("begin"):
            self.inner.begin(server_round)

    def consult(self, server_round: int, ask: Ask) -> Traffic:
        """Let the user's layer ask clients before the round. Raises RunError if the result is not a ``Traffic``."""
        with self._errors_of("consult"):
            sent = self.inner.consult(server_round, ask)
        if not isinstance(sent, Traffic):
            raise self._wrong("consult", f"{sent!r}", "a Traffic with the bytes of all questions")
        return sent

    def cohort(self, server_round: int, coins: Coins | None = None) -> Drawn:
        """Return the cohort of the user's layer.

        Raises RunError if the cohort is not a list of the run's client IDs in ascending order.
        """
        with self._errors_of("cohort"):
            drawn = self.inner.cohort(server_round, coins)
        chosen = np.asarray(drawn.clients) if isinstance(drawn, Drawn) else np.array([0.5])
        whole = chosen.ndim == 1 and chosen.dtype.kind in "iu"
        if not whole or (np.diff(chosen, prepend=-1, append=self._num_clients) < 1).any():
            raise self._wrong("cohort", f"{drawn!r}", f"Drawn(clients) with numbers from 0 to {self._num_clients - 1}, "
                              "ascending, none twice")  # fmt: skip
        return drawn

    def sent_to(self, client: int, server: ServerState) -> ServerState:
        """Return the server state for ``client``. Raises RunError if the user's layer changed names or shapes."""
        with self._errors_of("sent_to"):
            sent = self.inner.sent_to(client, server)
        wanted = _sent_layouts(server)
        if not isinstance(sent, ServerState) or _sent_layouts(sent) != wanted:
            got = _sent_layouts(sent) if isinstance(sent, ServerState) else repr(sent)
            raise self._wrong("sent_to", f"{got}", f"a ServerState whose params and broadcast are {wanted}")
        return sent

    def received(self, replies: tuple[Reply, ...]) -> tuple[Reply, ...]:
        """Return the updates that the user's layer keeps.

        Raises RunError if names, shapes or order of the updates changed.
        """
        with self._errors_of("received"):
            answered = tuple(self.inner.received(replies))
        before = {one.client: _layouts(one.payloads) for one in replies}
        clients = [one.client for one in answered]
        if clients != [client for client in before if client in clients]:
            raise self._wrong("received", f"updates of {clients}", f"some of {list(before)}, in their order")
        for one in answered:
            if _layouts(one.payloads) != before[one.client]:
                raise self._wrong("received", f"tensors of {_layouts(one.payloads)}", f"{before[one.client]}")
        return answered

    def lost(self, server_round: int, failed: Mapping[int, Malformed], *, answered: bool) -> None:
        """Pass the failed clients to the user's layer."""
        with self._errors_of("lost"):
            self.inner.lost(server_round, failed, answered=answered)

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the aggregate from the user's layer. Raises RunError if the layer changed names or shapes."""
        with self._errors_of("aggregate"):
            made = self.inner.aggregate(cohort, algorithm, server)
        wanted = _layouts(cohort.replies[0].payloads) if cohort.replies else None
        if made is not None and (not isinstance(made, Aggregate) or wanted not in (None, _layouts(made.payloads))):
            got = _layouts(made.payloads) if isinstance(made, Aggregate) else repr(made)
            raise self._wrong("aggregate", f"{got}", f"an Aggregate of {wanted}, or None")
        return made

    def foreseen(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the aggregate of a hypothetical ``cohort``, by the user's layer."""
        with self._errors_of("foreseen"):
            return self.inner.foreseen(cohort, algorithm, server)

    def merge(self, algorithm: Algorithm, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state. Raises RunError if names or shapes of the model changed."""
        with self._errors_of("merge"):
            merged = self.inner.merge(algorithm, server, aggregate)
        if not isinstance(merged, ServerState) or layout_of(merged.params) != layout_of(server.params):
            got = layout_of(merged.params) if isinstance(merged, ServerState) else repr(merged)
            raise self._wrong("merge", f"{got}", f"a ServerState whose params are {layout_of(server.params)}")
        return merged

    def metrics(self) -> Mapping[str, Any]:
        """Return the layer's fields for the round's line in ``rounds.jsonl``. Raises RunError for unknown fields."""
        with self._errors_of("metrics"):
            said = {**self.inner.metrics()}
        if unknown := set(said) - _NUMBERS:
            raise self._wrong(
                "metrics", f"{min(unknown)!r}", f"fields of a round's line: {', '.join(sorted(_NUMBERS))}"
            )
        return said

    def remarks(self) -> Sequence[str]:
        """Return one sentence for each setting that had no effect in the last round."""
        with self._errors_of("remarks"):
            return [str(one) for one in self.inner.remarks()]

    def affords(self, server_round: int) -> bool:
        """Return True if the privacy budget covers the cost of round ``server_round``."""
        with self._errors_of("affords"):
            return bool(self.inner.affords(server_round))

    @property
    def hides_clients(self) -> bool:
        """Return True if the cohort is secret; then no file contains the size or the losses of the cohort."""
        with self._errors_of("hides_clients"):
            return bool(self.inner.hides_clients)

    def statements(self, rounds: int) -> list[dict[str, object]]:
        """Return the privacy statements of a run with ``rounds`` planned rounds."""
        with self._errors_of("statements"):
            return self.inner.statements(rounds)

    def ended(self, rounds: Sequence[RoundRecord]) -> str:
        """Return the reason for ending the run early, or an empty string to continue."""
        with self._errors_of("ended"):
            return str(self.inner.ended(rounds) or "")

    def conclusions(self, rounds: Sequence[RoundRecord]) -> list[str]:
        """Return warnings for the user at the end of the run."""
        with self._errors_of("conclusions"):
            return [str(one) for one in self.inner.conclusions(rounds)]

    def _errors_of(self, method: str) -> Any:
        return error_context(f"{method} of {self._name}")

    def _wrong(self, method: str, got: str, wanted: str) -> RunError:
        return RunError(f"{method} of layer {self._name} returned {got}: return {wanted}")


def states_of(layers: Sequence[Layer]) -> dict[str, dict[str, Any]]:
    """Return {name of a layer: its state for the checkpoint}. Raises RunError if a state is not made of JSON values."""
    states = {name_of(type(layer)): layer.state() for layer in layers}
    for name, state in states.items():
        try:
            again = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError):
            again = None
        if again != state:
            raise RunError(
                f"state of layer {name} returned {state!r}: return a dict of JSON values by name, as the checkpoint "
                "holds them"
            )
    return {name: dict(state) for name, state in states.items() if state}


def _sent_layouts(server: ServerState) -> dict[str, dict[str, tuple[int, ...]]]:
    return _layouts({"params": server.params, **server.broadcast})


def _layouts(payloads: Payloads) -> dict[str, dict[str, tuple[int, ...]]]:
    return {group: dict(layout_of(params)) for group, params in payloads.items()}
