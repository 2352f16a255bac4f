"""SemiFL: FedAvg as its limit, hidden labels change no bit, the losses of a step, the server's training, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fl_sim
from clients.client_task import OnClient
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.params import detached
from fl_sim.simulation.client_runtime import local_settings
from fl_sim.store.run_directory import read_rounds
from fl_sim.training.courses import follow
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import ClientUpdate, LocalTask, Params
from strategies.distributed_sums import ClientShares
from strategies.fixmatch import Augmentation
from strategies.semifl import SemiFL

STILL = {"rotation": 0, "scale": 0, "shear": 0, "shift": 0, "elastic": 0, "erase": 0}
SETTINGS: dict[str, Any] = {
    "data": "digits", "partition": "iid", "clients": 4, "model": "logistic", "rounds": 3,
    "local": {"learning_rate": 0.1, "batch_size": 50, "momentum": 0.9},
    "algorithm": {"kind": "semifl", "server_records": 60, "threshold": 0.6},
}  # fmt: skip


def ran(out: Path, **settings: Any) -> Params:
    """Return the final model of a run."""
    fl_sim.run({**SETTINGS, **settings}, out=out, progress=False)
    return load_file(out / "model.safetensors")


def same(one: Params, other: Params) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_with_labels_everywhere_it_is_fedavg_and_without_unlabelled_training_fedavg_of_the_labelled_clients(
    tmp_path: Path,
) -> None:
    """To the bit; the second is the lower bound of tables."""
    everybody = {"kind": "semifl", "server_records": 0, "labelled_clients": 4}
    few = {"kind": "semifl", "server_records": 0, "labelled_clients": 2, "unlabelled": False}
    assert same(ran(tmp_path / "1", algorithm=everybody), ran(tmp_path / "2", algorithm="fedavg"))
    assert same(ran(tmp_path / "3", algorithm=few), ran(tmp_path / "4", algorithm="fedavg", forgotten=[2, 3]))


@pytest.mark.parametrize("algorithm", [{"server_records": 60}, {"server_records": 0, "labelled_clients": 1}])
def test_labels_of_unlabelled_records_are_never_read(tmp_path: Path, algorithm: Any) -> None:
    """Other labels for them leave every bit of every round as it is. Other labels of labelled records do not."""
    settings = {**SETTINGS, "algorithm": {**SETTINGS["algorithm"], **algorithm}}
    dataset, job = job_of(experiment_from(settings)).dataset, job_of(experiment_from(settings))
    hidden = np.concatenate([job.shards[client] for client in range(algorithm.get("labelled_clients", 0), 4)])
    shown = np.setdiff1d(np.arange(len(dataset.train)), hidden)
    models = []
    for number, changed in enumerate((hidden[:0], hidden, shown[:30])):
        labels = dataset.train.labels.copy()
        labels[changed] = (labels[changed] + 3) % 10
        arrays = {"x_train": dataset.train.inputs[:, 0], "x_test": dataset.test.inputs[:, 0]}
        np.savez(tmp_path / f"{number}.npz", **arrays, y_train=labels, y_test=dataset.test.labels)
        out = tmp_path / str(number)
        models.append(ran(out, algorithm=settings["algorithm"], data=f"npz:{tmp_path / str(number)}.npz"))
    assert same(models[0], models[1])
    assert not same(models[0], models[2])
    losses = [[one.test_loss for one in read_rounds(tmp_path / number)] for number in "01"]
    assert losses[0] == losses[1]


def test_the_server_trains_after_every_round_and_more_than_its_records_are_learned(tmp_path: Path) -> None:
    """If nobody is confident, the rounds are the server's whole-batch steps. Else unlabelled records help."""
    local = {"steps": 1, "batch_size": 60, "learning_rate": 0.1, "momentum": 0.0}
    algorithm = {"kind": "semifl", "server_records": 60, "threshold": 0.9999999}
    made, job = ran(tmp_path / "1", local=local, algorithm=algorithm), job_of(experiment_from(SETTINGS))
    assert job.set_aside is not None
    assert len(job.set_aside) == 60 == 1437 - len(job.shards.records)
    model, (inputs, labels) = job.model(), job.source(job.set_aside).whole().tensors()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(made[name], value, atol=1e-6)
    local = {"learning_rate": 0.05, "batch_size": 20, "epochs": 10}
    settings = {**SETTINGS, "model": "mlp", "rounds": 4, "sampler": "fixed-size:2", "local": local}
    algorithm = {"kind": "semifl", "server_records": 40, "threshold": 0.9, "mixing": 0}
    found = [
        fl_sim.run(
            {**settings, "algorithm": {**algorithm, "unlabelled": unlabelled}}, out=tmp_path / str(unlabelled),
            progress=False,
        ).final_accuracy
        for unlabelled in (True, False)
    ]  # fmt: skip
    assert found[0] > found[1] + 0.03


def _step(algorithm: SemiFL) -> tuple[Params, LocalTask, torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Return the trained model of client 1 after one step on all its confident records, and what it began with."""
    given = {**SETTINGS, "algorithm": {"kind": "semifl"}, "local": {"learning_rate": 0.1, "batch_size": 10**6}}
    job = job_of(experiment_from({**given, "local": {**given["local"], "momentum": 0, "weight_decay": 0}}))
    model, records = job.model(), job.source(job.dataset.train.take(job.shards[1])).whole()
    params = {name: 30 * value for name, value in detached(model.named_parameters()).items()}
    task = LocalTask(2, 1, 4, len(records), local_settings(job, 0.1), params, initial=params)
    trainer = Trainer(model, None)
    begun = algorithm.start(task, OnClient(records, trainer, seed=5))
    own = LocalJob(begun, algorithm.plan(begun), records, np.random.default_rng(3))
    (trained,) = follow(algorithm, [own], trainer.train_all)
    model.load_state_dict(params)
    guess = model(records.tensors()[0]).softmax(1)
    sure = guess.amax(1) >= algorithm.threshold
    assert 20 < sure.sum() < len(records) == task.num_examples
    assert algorithm.finish(begun, trained).num_examples == sure.sum()
    return trained.params, task, model, (records.tensors()[0][sure], guess.argmax(1)[sure])


def test_a_stack_of_clients_trains_as_they_do_one_by_one(tmp_path: Path) -> None:
    """Batches of pseudo-labelled records have other sizes at every client."""
    models = [ran(tmp_path / str(stack), engine={"kind": "inprocess", "stack": stack}) for stack in (1, 4)]
    assert all(torch.allclose(value, models[1][name], atol=1e-5) for name, value in models[0].items())


@pytest.mark.parametrize("mixing", [0.0, 1e-6])
def test_a_step_lowers_the_cross_entropy_of_confident_pseudo_labels_and_of_mixtures(mixing: float) -> None:
    """Views here are the images. With mixing near 0, a mixture is one of its two records: random ones, or the same."""
    algorithm = SemiFL(threshold=0.7, mixing=mixing, augmentation=Augmentation(**STILL))
    trained, task, model, (inputs, labels) = _step(algorithm)
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    steps = {name: (task.params[name] - value) / 0.1 for name, value in trained.items()}
    plain = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    alike = [torch.allclose(steps[name], plain[name], atol=2e-4) for name in plain]
    assert all(alike) == (mixing == 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"algorithm": {"kind": "semifl", "server_records": 0}}, "nobody has labels, so nothing can be learned"),
     ({"algorithm": {"kind": "semifl", "labelled_clients": 5}}, "labelled_clients=5 is above clients=4"),
     ({"algorithm": {"kind": "semifl", "server_records": 1437}}, "semifl sets 1,437 training records aside"),
     ({"aggregator": "fltrust:10"}, "aggregator fltrust and algorithm semifl both set training records aside"),
     ({"aggregator": "global-dp"}, "no epsilon covers the server's records: set algorithm.server_records=0"),
     ({"local": {"privacy": {"kind": "dp-sgd", "epsilon": 8.0}},
       "algorithm": {"kind": "semifl", "server_records": 0, "labelled_clients": 2}},
      "dp-sgd does not hide whether a client has confident records"),
     ({"server": "fedbuff", "devices": "constant"}, "after each round, but server fedbuff has no rounds"),
     ({"local": {"optimizer": "adam"}}, "its local steps are steps of SGD"),
     ({"local": {"personal": "head"}}, "pseudo-labels need the whole received model: leave local.personal out"),
     ({"local": {"batch_norm": "average"}}, "running statistics: leave local.batch_norm out"),
     ({"evaluate": {"clients": "class-shares"}}, "leave evaluate.clients out"),
     ({"evaluate": {"validation": 0.1}}, "validation=0.1 needs labelled records on every client"),
     ({"sampler": "power-of-choice:2"}, "needs losses, which need labels"),
     ({"attack": "label-flip:1"}, "label-flip changes labels"),
     ({"attack": "backdoor:1"}, "backdoor changes labels"),
     ({"calibrate": "ccvr"}, "ccvr needs the labels of all clients"),
     ({"preprocess": "da-fl"}, "da-fl needs the labels of all clients")],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_words(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        fl_sim.run({**SETTINGS, "rounds": 1, **settings}, out=tmp_path, progress=False)


def test_records_that_are_no_images_are_refused() -> None:
    dataset = job_of(experiment_from(SETTINGS)).dataset
    vectors = replace(dataset.train, inputs=dataset.train.inputs.reshape(len(dataset.train), -1))
    with pytest.raises(UserError, match=r"changed views of images, and records of digits have shape \(64,\): take"):
        SemiFL().check_data(replace(dataset, train=vectors), "none")


def test_global_dp_costs_what_it_costs_fedavg(tmp_path: Path) -> None:
    """Labels at few clients only: an update is a function of the client's records and of what it received."""
    algorithm = {"kind": "semifl", "server_records": 0, "labelled_clients": 2}
    private = {"rounds": 2, "aggregator": {"kind": "global-dp", "noise_multiplier": 1.0}, "sampler": "poisson:0.9"}
    results = [
        fl_sim.run({**SETTINGS, **private, "algorithm": one}, out=tmp_path / str(number), progress=False)
        for number, one in enumerate((algorithm, "fedavg"))
    ]
    epsilons = [[one.epsilon for one in result.privacy] for result in results]
    assert epsilons[0] == epsilons[1] != []


def test_distributed_dp_has_noise_and_weight_1_from_every_client_with_confident_records_or_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients 2 and 3 have no labels and no confident record: their update is 0, and their message is noise."""
    sent, messages = ClientShares.sent, dict[int, tuple[int, ClientUpdate]]()

    def seen(self: ClientShares, came: LocalTask, task: LocalTask, trained: Any, update: ClientUpdate) -> ClientUpdate:
        found = sent(self, came, task, trained, update)
        messages[came.client] = update.num_examples, found
        return found

    monkeypatch.setattr(ClientShares, "sent", seen)
    algorithm = {"kind": "semifl", "server_records": 0, "labelled_clients": 2, "threshold": 0.9999999}
    noise = {"kind": "distributed-dp", "noise_multiplier": 3.0, "noise": "seeded"}
    ran(tmp_path, algorithm=algorithm, rounds=1, aggregator=noise, sampler="full", engine="inprocess")
    assert [messages[client][0] > 0 for client in range(4)] == [True, True, False, False]
    assert {(one.num_examples, one.loss) for _, one in messages.values()} == {(1, None)}
    bits = [one.packed["delta"].bits for _, one in messages.values()]
    assert len({len(one) for one in bits}) == 1
    assert all(len(np.unique(one)) > 10 for one in bits)
