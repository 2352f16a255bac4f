"""The Flower ClientApp: reads a message, trains on the client's own records, answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients.client_task import Client, ClientTask, Grouped, OnClient, Site, SiteFactory, Starting
from clients.owner import Owner, client_of, discreet, owner_of
from fl_sim.batch_norm import layers_after, placed
from fl_sim.engines import releases, wire
from fl_sim.engines.arrays import reuse_freed_memory
from fl_sim.engines.grid import partition_of, raised
from fl_sim.engines.pieces import Play, Release
from fl_sim.errors import RunError
from fl_sim.handed_out import HandedOut
from fl_sim.kinds import is_own_kind
from fl_sim.local_plan import LocalPlan
from fl_sim.mistakes import shortened
from fl_sim.packed import Held, Packed
from fl_sim.params import check_layout, layout_of, trainable
from fl_sim.printable import in_a_line
from fl_sim.seeding import rng, seed_process
from fl_sim.store.tensors import load_state, save_state
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob
from fl_sim.types import LocalTask, Params, Payloads, Trained

if TYPE_CHECKING:
    from clients.policy import Policy


def build_client_app(site_of: SiteFactory, signer: wire.Signer | None = None) -> ClientApp:
    """Return the ClientApp that every engine runs, in this process, in Ray actors or on Flower's own runtime.

    ``signer``: of the run whose driver started this worker, where its clients' ledgers are the driver's affair.
    """
    reuse_freed_memory()
    app = ClientApp(mods=[discreet])
    turns = _Turns(site_of, signer)

    @app.query()
    def who(message: Message, context: Context) -> Message:
        return Message(releases.who_content(client_of(context)), reply_to=message)

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        client, owner, policy = client_of(context), owner_of(context), _policy(context)
        order = wire.read_order(message.content)
        if order.task == wire.TRAIN:
            if policy:
                own = turns.site(order, client, owner).trains_on_own(order.synthetic)
                policy.check_training(own_records=own)
                if not own:
                    policy.check_pool(order.synthetic)
            turn = turns.turn(message, client, owner)
            [trained] = turn.site.prepare([turn.job])()
            reply = turn.reply(trained)
            turn.check_bits()
            return reply
        asked = turns.client(message, client, owner, policy)
        return Message(task_of(asked).run(asked), reply_to=message)

    return app


def task_of(client: Client) -> ClientTask:
    """Return what a client is asked. Raises RunError for what the experiment does not ask, or a policy forbids."""
    name, tasks = client.order.task, client.site.tasks
    if name not in tasks:
        raise RunError(
            f"the order asks for {in_a_line(shortened(name))!r}, and this experiment asks clients for "
            f"{', '.join([wire.TRAIN, *tasks])} alone: see that the server runs the same version of fl-sim"
        )
    task = tasks[name]
    if client.policy:  # which does not take foreign code's word for what an answer is made of
        client.policy.check_training(own_records=task.reads_records or is_own_kind(task))
    client.site.use_threads()
    return task


def train_together(site_of: SiteFactory, *, stacked: bool = False) -> Play:
    """Return what trains the clients of several messages in one call of the compiled trainer, or as one computation.

    Where something fails, the clients are played again, each by itself, so that the one to blame is known and the
    others are answered. May be called from several threads. Compiled code runs in all of them at once, and Python in
    one at a time, by a lock of their own: Python's own would pass from thread to thread at every operation of PyTorch,
    each time with a wait, a seventh of a round of 100 small clients in all.
    """
    turns, in_python = _Turns(site_of), Lock()

    def trained(messages: Sequence[Message]) -> list[Message]:
        with in_python:
            group = [turns.turn(message, partition_of(message)) for message in messages]
            site, jobs = group[0].site, [turn.job for turn in group]
            train = site.prepare(jobs, stacked=stacked)
        results = train()
        with in_python:
            replies = [turn.reply(result) for turn, result in zip(group, results, strict=True)]
            group[-1].check_bits()  # of what all of them were sent
            return replies

    def play(messages: Sequence[Message]) -> list[Message]:
        try:
            return trained(messages)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (as in fl_sim.engines.grid.answer)
            if len(messages) == 1:
                return [raised(messages[0], error)]
            return [reply for message in messages for reply in play([message])]

    return play


def answer_together(site_of: SiteFactory) -> Release:
    """Return what has several clients answer a task that is ``Grouped``, in one computation."""
    turns = _Turns(site_of)

    def release(messages: Sequence[Message], check: Callable[[], None]) -> list[Message]:
        replies: Sequence[RecordDict | BaseException]
        try:
            clients = [turns.client(message, partition_of(message), check=check) for message in messages]
            task = task_of(clients[0])
            assert isinstance(task, Grouped)
            replies = task.run_together(clients)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (as in fl_sim.engines.grid.answer)
            replies = [error] * len(messages)
        return [
            Message(reply, reply_to=message) if isinstance(reply, RecordDict) else raised(message, reply)
            for message, reply in zip(messages, replies, strict=True)
        ]

    return release


@dataclass(frozen=True)
class _Turn:
    """One client's part in one round.

    ``personal``: the parameters of BatchNorm layers that stay with the client. ``held``: what compression held back.
    ``handed_out``: what the algorithm's code may read.
    """

    message: Message
    order: wire.Order
    site: Site
    job: LocalJob
    personal: tuple[str, ...]
    held: Held
    handed_out: tuple[HandedOut, ...]

    def reply(self, trained: Trained) -> Message:
        """Keep the client's state for its next round, and answer. Raises RunError where training wrote to its model."""
        self.check(self.site.model.forward, *([term.function] if (term := self.job.plan.loss_term) else ()))
        task, layers = self.job.task, layers_after(trained, self.personal)
        if self.personal:  # of which the algorithm sees that they have not moved: nothing of theirs is merged
            resting = {name: task.params[name] for name in self.personal}
            trained = replace(trained, params={**trained.params, **resting})
        whole = trained.params
        if self.site.own:  # of which nothing travels
            task = replace(task, params=_without(task.params, self.site.own))
            trained = replace(trained, params=_without(whole, self.site.own))
        with self.site.drawing("finish", task.client, task.server_round):
            update = self.site.algorithm.finish(task, trained)
        self.check(self.site.algorithm.finish)
        for kept in self.handed_out[1:]:
            kept.check_bits(self.site.algorithm.plan, self.site.algorithm.finish)
        payloads, state = update.payloads, update.state
        packed: dict[str, Packed] = {}
        if self.site.packing:
            order = self.order
            payloads, packed, held = self.site.packing.pack(
                payloads, task.params, self.held, task.client, order.server_round
            )
            if state or trained.num_steps:
                state = wire.with_held(state, held)
        if self.personal and (state or trained.num_steps):
            state = {**state, wire.LAYERS: layers}
        if self.site.own and (state or trained.num_steps):
            state = {**state, wire.OWN: {name: whole[name] for name in self.site.own}}
        payloads = {**payloads, wire.LAYERS: layers} if layers else payloads
        content = wire.update_content(payloads, update.num_examples, update.loss, packed)
        if self.order.state_dir:
            save_state(self.order.state_dir, task.client, self.order.server_round, state)
        elif state:
            content = RecordDict({**content, **wire.kept_records(state)})
        return Message(content, reply_to=self.message)

    def check(self, *methods: Callable[..., Any]) -> None:
        """Raise RunError where one of ``methods``, which have just run, wrote to what the client was sent or keeps."""
        for one in self.handed_out:
            one.check(*methods)

    def check_bits(self) -> None:
        """Raise the same for writes that PyTorch does not count."""
        for one in self.handed_out:
            one.check_bits(self.site.algorithm.plan, self.site.algorithm.finish)


def _without(params: Params, own: Params) -> Params:
    return {name: value for name, value in params.items() if name not in own}


def _with_own_layers(plan: LocalPlan, params: Params, personal: tuple[str, ...]) -> LocalPlan:
    """Return ``plan`` with the ``personal`` layers of ``params`` in the client's previous model.

    The client kept them where it last trained; the algorithm saw them as they were before.
    """
    if plan.contrast is None or not personal:
        return plan
    previous = {**plan.contrast.previous, **{name: params[name] for name in personal}}
    return replace(plan, contrast=replace(plan.contrast, previous=previous))


class _Turns:
    """Reads the messages of a round; what all of them share is unpacked once."""

    def __init__(self, site_of: SiteFactory, signer: wire.Signer | None = None) -> None:
        self._site_of = site_of
        self._signer = signer
        self._last: tuple[RecordDict, tuple[wire.Order, Params, Payloads, HandedOut]] | None = None
        self._one_at_a_time = Lock()  # an engine may call from several threads

    def __reduce__(self) -> tuple[type["_Turns"], tuple[SiteFactory]]:
        """Let Flower's simulation send the app to its actors: there it starts with a lock of its own, and unread.

        And without a signer: no driver of ours started these.
        """
        return _Turns, (self._site_of,)

    def client(
        self,
        message: Message,
        number: int,
        owner: Owner | None = None,
        policy: "Policy | None" = None,
        check: Callable[[], None] = lambda: None,
    ) -> Client:
        """Return the client that a message asks for something. Raises RunError for a ticket that is no reason."""
        order = _at_home(wire.read_order(message.content), owner)
        ticket = self._ticket(message, order.task, number, policy or owner)
        return Client(number, self.site(order, number, owner), order, message.content, policy, ticket, check)

    def _ticket(self, message: Message, task: str, client: int, guard: "Policy | Owner | None") -> wire.Ticket | None:
        """Return the ticket of a message, if it has one. Raises RunError where a ticket is no reason to release.

        That is so everywhere but in a worker that the run's own driver started, where there is no ``guard``.
        """
        if not wire.has_ticket(message.content):
            return None
        if self._signer is None or guard is not None:
            raise RunError(wire.NO_TICKET)
        return self._signer.read(task, client, message.content)

    def site(self, order: wire.Order, client: int = 0, owner: Owner | None = None) -> Site:
        own = (owner.data, client, order.facts) if owner else ()
        with self._one_at_a_time:
            site = self._site_of(order.experiment, order.data_root, *own)
            site.trainer  # noqa: B018 (made once)
        return site

    def turn(self, message: Message, client: int, owner: Owner | None = None) -> _Turn:
        with self._one_at_a_time:
            order, params, broadcast, sent = self._unpacked(message)
        order = _at_home(order, owner)
        site = self.site(order, client, owner)
        records = site.records(client, order.synthetic)
        kept = _kept(order, message, client)
        state, held = wire.without_held(kept)
        broadcast = {**broadcast}
        if site.own:
            both = {**params, **state.pop(wire.OWN, site.own)}
            params = {name: both[name] for name in trainable(site.model)}
        layers = broadcast.pop(wire.LAYERS, {})
        personal = tuple(name for name in layers if name in params)
        params, statistics = placed(params, state.pop(wire.LAYERS, layers))
        settings = site.local_settings(order.learning_rate)
        if most_steps := order.most_steps.get(client):
            settings = replace(settings, steps=most_steps)
        task = LocalTask(
            server_round=order.server_round,
            client=client,
            num_clients=site.num_clients,
            num_examples=len(records),
            settings=settings,
            params=params,
            broadcast=broadcast,
            statistics=statistics,
            state=state,
            pool=site.read_tensors(order.pool) if order.pool else {},
            class_counts=site.class_counts(client, order.synthetic),
        )
        site.use_threads()
        generator = rng(site.seed, "batches", client, order.server_round)
        seeded = partial(seed_process, site.seed, "local", client, order.server_round)
        keeps = {"the pool": task.pool} if task.pool else {}
        keeps |= {f"client state {name!r}": one for name, one in kept.items()}
        # Ours are held to the law by fl_sim.testing.check; a sum over a large pool takes time for each client.
        handed_out = (sent, HandedOut.of(keeps, by_bits=is_own_kind(site.algorithm))) if keeps else (sent,)
        task = _begun(site, task, records)
        with site.drawing("plan", client, order.server_round):
            plan = site.algorithm.plan(task)
        plan = _with_own_layers(plan, task.params, personal)
        job = LocalJob(task, plan, records, generator, seeded)
        turn = _Turn(message, order, site, job, personal, held, handed_out)
        turn.check(site.algorithm.plan, *([site.algorithm.start] if isinstance(site.algorithm, Starting) else ()))
        return turn

    def _unpacked(self, message: Message) -> tuple[wire.Order, Params, Payloads, HandedOut]:
        content = message.content
        if self._last is None or not wire.is_same_round(self._last[0], content):
            params, broadcast = wire.read_task(content)
            groups = {f"the server's {name!r}": one for name, one in broadcast.items()}
            sent = HandedOut.of({"the global model": params, **groups})
            self._last = (content, (wire.read_order(content), params, broadcast, sent))
        return self._last[1]


def _begun(site: Site, task: LocalTask, records: Records) -> LocalTask:
    """Return what the client begins with. Raises ValueError where its model has other names or shapes."""
    if not isinstance(site.algorithm, Starting):
        return task
    with site.drawing("start", task.client, task.server_round):
        begun = site.algorithm.start(task, OnClient(records, site.trainer))
    check_layout("the weights that start returns", begun.params, layout_of(task.params))
    return begun


def _at_home(order: wire.Order, owner: Owner | None) -> wire.Order:
    return owner.order(order) if owner else order


def _kept(order: wire.Order, message: Message, client: int) -> Payloads:
    """Return what a client kept of its last round: from the disk, or from the message where that sees no disk."""
    if order.state_dir:
        return load_state(order.state_dir, client, order.server_round)
    return wire.kept_in(message.content)


def _policy(context: Context) -> "Policy | None":
    """Return the policy of the node's owner, where its configuration names one: policy="/path/of/policy.toml"."""
    path = str(context.node_config.get("policy", ""))
    if not path:
        return None
    from clients.policy import read_policy  # noqa: PLC0415 (the accountants load slowly, and simulations have none)

    return read_policy(Path(path))
