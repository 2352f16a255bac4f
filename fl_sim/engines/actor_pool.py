"""The pool of Ray actors of a run: starts, replaces and ends actors, and measures the speed of each.

Nodes of a Ray cluster may join or leave during the run. The pool fills the present nodes with actors.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fl_sim.engines.own_ray import is_there
from fl_sim.engines.ray_start import DIRECT, ENVIRONMENT, RayResources, import_path, is_installed, last_line
from fl_sim.errors import RunError

# isort: split
# ray must be imported after ray_start, because ray_start sets environment variables that Ray reads at its import
import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fl_sim.engines.version_check import CheckedActor, source_files, versions

LOOK_SECONDS = 1.0
"""Seconds between two checks of the Ray cluster. A check finds nodes that joined or left, and a lost head process."""

WAIT_SECONDS = 600.0
"""Seconds that a run waits for a node to join while the Ray cluster has no usable node."""

START_SECONDS = 60.0
"""Seconds after which the user gets a warning about a worker that has not started. A worker first imports torch."""

MAX_STARTS = 3
"""The number of actors that may die during their start on one node. After that, the node is not used any more."""

_pickling: Any = cloudpickle
_pickling.register_pickle_by_value(sys.modules[CheckedActor.__module__])


@dataclass
class Node:
    """A node (machine) of Ray, and the number of actors that fit on the node.

    ``refused``: the reason why the node is not used, empty for a usable node. ``died``: the number of actors that died
    on the node during their start.
    """

    name: str
    host: str
    port: int
    room: int
    refused: str = ""
    died: int = 0

    def __str__(self) -> str:
        """Return the node's short name and its address, for messages to the user."""
        return f"node {self.name[:12]} at {self.host}"


@dataclass(eq=False)
class Worker:
    """A Ray actor with its node and its measured speed.

    ``step_seconds``: seconds per minibatch step, infinite before the first measurement. ``calls``: the unfinished
    calls, in the order in which the actor answers them. ``has``: the IDs of the message contents that the actor
    received with its last call and still stores. A message content is the model and the settings that the clients of a
    round share. ``is_warm``: True after the first answered call, which also loads the data and therefore takes longer.
    ``since``: the time of the actor's start. If the start takes too long, the user gets one warning, and ``since``
    becomes infinite, so that no second warning follows.
    """

    actor: Any
    node: Node
    step_seconds: float = math.inf
    calls: list[Any] = field(default_factory=list)
    has: frozenset[int] = frozenset()
    is_warm: bool = False
    since: float = field(default_factory=time.monotonic)

    def lacks(self, contents: Mapping[int, Any]) -> dict[int, Any]:
        """Return the message contents to send with the next call, as {ID: content}.

        None replaces a content that the actor still stores. An actor stores only the contents of its last call.
        """
        sent = {number: None if number in self.has else content for number, content in contents.items()}
        self.has = frozenset(sent)
        return sent

    def took(self, seconds: float, steps: int) -> None:
        """Update ``step_seconds`` after a call that took ``seconds`` for ``steps`` minibatch steps.

        The first call is not measured, because it also loads the data. If it were measured, the worker would seem too
        slow, and would get no further batch.
        """
        if not self.is_warm:
            self.is_warm = True
            return
        now = seconds / steps
        self.step_seconds = now if math.isinf(self.step_seconds) else (self.step_seconds + now) / 2

    def kill(self) -> None:
        """Kill the actor's process."""
        with suppress(RayError):
            ray.kill(self.actor)


@dataclass
class ActorPool:
    """All workers of a ``RayGrid``: the list ``ready`` and the mapping ``starting`` ({start call: worker}).

    ``arguments``: the arguments with which each actor starts (``CheckedActor.start``), as Ray references to encrypted
    values. ``most``: the largest allowed number of workers. ``modules``: names of the user's own modules; a node with
    another version of a module is refused. ``is_own``: True if this run started Ray. ``is_remote``: True if nodes are
    other machines. Such nodes may join and leave, and the versions of their software are checked. ``say``: prints a
    message about nodes to the user.
    """

    resources: RayResources
    key: bytes
    arguments: Sequence[Any]
    most: int
    modules: Sequence[str]
    is_own: bool
    is_remote: bool
    say: Callable[[str], None]
    ready: list[Worker] = field(default_factory=list)
    starting: dict[Any, Worker] = field(default_factory=dict)
    _nodes: dict[str, Node] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)
    _looked: float = -math.inf
    _alone_since: float | None = None

    @property
    def workers(self) -> list[Worker]:
        """Return the ready workers and the starting workers."""
        return [*self.ready, *self.starting.values()]

    @property
    def calls(self) -> dict[Any, Worker]:
        """Return the calls that ready workers have not finished, as {call: worker}."""
        return {call: worker for worker in self.ready for call in worker.calls}

    def update(self, wanted: int) -> list[Any]:
        """Update the list of Ray's nodes, and start workers until the pool has ``wanted`` workers.

        Returns the unfinished calls of workers whose node has left the cluster.
        """
        if time.monotonic() - self._looked < LOOK_SECONDS and len(self.workers) >= min(wanted, self._room):
            return []
        self._looked = time.monotonic()
        for worker in self.starting.values():
            if time.monotonic() - worker.since > START_SECONDS:
                worker.since = math.inf
                self.say(
                    f"{worker.node} of the Ray cluster is not used yet: its worker has not started in "
                    f"{START_SECONDS:g} s (see Ray's log files on that node); until it starts, other nodes do its work"
                )
        there = {one["NodeID"]: one for one in ray.nodes() if one["Alive"]}  # type: ignore[no-untyped-call]
        lost = [name for name in self._nodes if name not in there]
        calls = [call for name in lost for call in self._forget(self._nodes[name])]
        for name, one in there.items():
            room = _room(one["Resources"], self.resources) if self.is_remote else self.most
            if name not in self._nodes and name not in self._gone and room:
                self._nodes[name] = Node(name, one["NodeManagerAddress"], one["NodeManagerPort"], room)
        while len(self.workers) < min(wanted, self.most) and (node := self._roomiest()):
            self._start(node)
        return calls

    def wait_for_nodes(self) -> None:
        """Wait about a second for a node to join the cluster.

        Raises RunError after ``WAIT_SECONDS`` in total, or if the present nodes were all refused.
        """
        if refused := [node for node in self._nodes.values() if node.refused]:
            reasons = "; ".join(f"{node}: {node.refused}" for node in refused)
            raise RunError(f"no node of the Ray cluster can be used ({reasons})")
        now = time.monotonic()
        if self._alone_since is None:
            self._alone_since = now
            self.say(
                f"the Ray cluster has no node with room for an actor (engine.cpus={self.resources.cpus:g}, "
                f"engine.gpus={self.resources.gpus:g}): waiting up to {WAIT_SECONDS:g} s for a further node to join by "
                "ray start"
            )
        if now - self._alone_since > WAIT_SECONDS:
            raise RunError(
                f"no node joined the Ray cluster in {WAIT_SECONDS:g} s: start nodes, and then the same command again, "
                "and the run goes on after its last finished round"
            )
        time.sleep(min(LOOK_SECONDS, WAIT_SECONDS))

    def check_has_workers(self) -> None:
        """Raise RunError if the pool has no worker at the deadline of a round.

        In this case no client caused the timeout: the cluster had no node for the clients.
        """
        if not self.workers:
            raise RunError(
                "the Ray cluster had no usable node when the round's timeout ended: start nodes, and then the same "
                "command again, and the run goes on after its last finished round"
            )

    def started(self, call: Any) -> str:
        """Process an answer of a starting worker: its software versions, or later None, which means that it is ready.

        ``call``: the finished call. Returns "", or the reason why no worker can start on the node.
        """
        worker = self.starting.pop(call)
        try:
            found = ray.get(call)
        except RayError as error:
            return self._did_not_start(worker, error)
        if found is None:  # the method CheckedActor.start has answered, so the worker is ready
            self.ready.append(worker)
            self._alone_since = None
            return ""
        here = versions(list(self.modules))
        other = [
            f"it has {what} {found[what]}, and this machine has {here[what]}" for what in here
            if found[what] != here[what] and not (what.startswith("module ") and found[what] == "none")
        ]  # fmt: skip
        if other:
            worker.kill()
            why = f"{', '.join(other)}; install the same version there, and start Ray on the node again"
            self._refuse(worker.node, why)
            return why
        self._start_handler(worker)
        return ""

    def remove_dead(self, worker: Worker) -> list[Any] | None:
        """Remove a dead worker from the pool.

        Returns None if the worker's node still runs. Otherwise removes the node, and returns the unfinished calls of
        the other workers on that node.
        """
        worker.kill()
        self.ready = [one for one in self.ready if one is not worker]
        # if a node accepts no connection, the node is lost; Ray itself detects this only later
        if not self.is_remote or is_there(f"{worker.node.host}:{worker.node.port}"):
            return None
        return self._forget(worker.node)

    def end_busy(self) -> None:
        """Kill all workers with unfinished calls. The engine does this after a deadline or Ctrl-C."""
        for worker in self.calls.values():
            worker.kill()
        self.ready = [worker for worker in self.ready if not worker.calls]

    def close(self) -> None:
        """Kill all workers."""
        for worker in self.workers:
            worker.kill()
        self.ready, self.starting = [], {}

    @property
    def _room(self) -> int:
        return min(self.most, sum(node.room for node in self._nodes.values() if not node.refused))

    def _roomiest(self) -> Node | None:
        """Return the usable node with room for the largest number of further actors; None if all nodes are full."""
        taken = [worker.node for worker in self.workers]
        free = {name: node.room - sum(one is node for one in taken) for name, node in self._nodes.items()}
        best = max(
            (node for node in self._nodes.values() if not node.refused), key=lambda node: free[node.name], default=None
        )
        return best if best and free[best.name] > 0 else None

    def _start(self, node: Node) -> None:
        where = NodeAffinitySchedulingStrategy(node.name, soft=False)
        options: dict[str, Any] = {
            "num_cpus": self.resources.cpus, "num_gpus": self.resources.gpus, "scheduling_strategy": where
        }  # fmt: skip
        if not self.is_own:
            direct = DIRECT if self.is_remote else {}
            options["runtime_env"] = {"env_vars": {**ENVIRONMENT, **direct, "PYTHONPATH": import_path()}}
        # The actor has a second thread, which can report the finished replies while a client hangs in the first thread.
        remote: Any = ray.remote
        actor_class = remote(concurrency_groups={"progress": 1}, max_restarts=0)(CheckedActor)
        worker = Worker(actor_class.options(**options).remote(), node)
        if self.is_remote:
            self.starting[worker.actor.versions.remote(list(self.modules))] = worker
        else:
            self._start_handler(worker)

    def _start_handler(self, worker: Worker) -> None:
        self.starting[worker.actor.start.remote(self.key, list(self.arguments))] = worker

    def _did_not_start(self, worker: Worker, error: RayError) -> str:
        if self.remove_dead(worker) is not None:
            return ""
        worker.node.died += 1
        if isinstance(error, RayActorError) and worker.node.died < MAX_STARTS:
            return ""
        why = f"no worker can start: {last_line(error)}"
        self._refuse(worker.node, why)
        return why

    def _refuse(self, node: Node, why: str) -> None:
        node.refused = why
        if self.is_remote:
            self.say(f"{node} of the Ray cluster is not used: {why}")

    def _forget(self, node: Node) -> list[Any]:
        """Remove a node and its workers from the pool, and return the unfinished calls of these workers."""
        self._nodes.pop(node.name, None)
        self._gone.add(node.name)
        calls = [call for call, worker in self.calls.items() if worker.node is node]
        gone = [worker for worker in self.workers if worker.node is node]
        if not node.refused:
            self.say(f"{node} of the Ray cluster is lost: other nodes repeat its unfinished work")
        for worker in gone:
            worker.kill()
        self.ready = [worker for worker in self.ready if worker.node is not node]
        self.starting = {call: worker for call, worker in self.starting.items() if worker.node is not node}
        return calls


def pickled(value: Any) -> bytes:
    """Pickle ``value`` by cloudpickle, so that functions and classes of the running script are included."""
    content: bytes = _pickling.dumps(value)
    return content


def sources_of(modules: Iterable[str]) -> dict[str, bytes]:
    """Return the source files of the user's own modules as {path relative to the import path: content}.

    Files of installed packages are left out.
    """
    files = {name: file for module in modules for name, file in source_files(module).items()}
    return {name: file.read_bytes() for name, file in files.items() if not is_installed(file)}


def _room(there: dict[str, float], resources: RayResources) -> int:
    """Return the number of actors that fit on a node if all processors and GPUs of the node are free.

    ``there``: the resources of the node, as Ray reports them.
    """
    processors, graphics = there.get("CPU", 0.0), there.get("GPU", 0.0)
    room = int(processors / resources.cpus) if resources.cpus else int(processors)
    return min(room, int(graphics / resources.gpus)) if resources.gpus else room
