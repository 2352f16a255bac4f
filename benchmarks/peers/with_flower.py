"""Flower (Beutel et al. 2020) does the job on its own simulation: ``python with_flower.py JOB``.

As in Flower's quickstarts: its FedAvg in a ServerApp, a plain PyTorch loop in a ClientApp, ``run_simulation`` with a
core for each worker. Every worker holds the records of all clients. Clients train in other processes than the one that
says whose turn it is, so they count their own steps and records, and their replies say how many.
"""

import logging
import os
import sys
import time
from itertools import count
from pathlib import Path

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0"}

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from job import Job, Turns, given, pipes, read
from torch.nn import functional

LONGEST_ROUND = 3_600.0  # seconds


def client_app(path: str) -> ClientApp:
    """Return the app that trains the client of a node."""
    app = ClientApp()
    read_once: list[Job] = []  # by each worker

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if not read_once:
            torch.set_num_threads(1)
            read_once.append(read(Path(path)))
        job = read_once[0]
        way, network = job.way, job.network()
        network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        inputs, labels = job.shards[int(context.node_config["partition-id"])]
        optimizer, steps, records = torch.optim.SGD(network.parameters(), way.learning_rate, way.momentum), 0, 0
        for _ in range(way.epochs):
            for batch in torch.randperm(len(labels)).split(way.batch_size):
                optimizer.zero_grad()
                functional.cross_entropy(network(inputs[batch]), labels[batch]).backward()
                optimizer.step()
                steps, records = steps + 1, records + len(batch)
        told = MetricRecord({"num-examples": len(labels), "steps": steps, "records": records})
        return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "told": told}), reply_to=message)

    return app


def server_app(job: Job, turns: Turns, network: torch.nn.Module) -> ServerApp:
    """Return the app that leads, round by round, until no more are wanted."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        while len(list(grid.get_node_ids())) < job.clients:
            time.sleep(0.05)
        strategy = FedAvg(
            fraction_train=job.cohort / job.clients, fraction_evaluate=0.0,
            min_train_nodes=job.cohort, min_available_nodes=job.clients,
        )  # fmt: skip
        arrays = ArrayRecord(network.state_dict())
        for server_round in count(1):
            messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
            replies = list(grid.send_and_receive(messages, timeout=LONGEST_ROUND))
            if failed := [reply.error.reason for reply in replies if reply.has_error()]:
                raise RuntimeError(f"{len(failed)} of {len(replies)} clients failed: {failed[0]}")
            told = [reply.content.metric_records["told"] for reply in replies]
            merged, _ = strategy.aggregate_train(server_round, replies)
            assert merged is not None
            arrays = merged
            network.load_state_dict(arrays.to_torch_state_dict())
            steps, records = (sum(int(str(one[what])) for one in told) for what in ("steps", "records"))
            turns.counted(steps, records, len(told))
            try:
                turns.end_of_round()
            except SystemExit:
                return

    return app


def main() -> None:
    """Run FedAvg until no more rounds are wanted."""
    requests, answers = pipes()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    job = given()
    network = job.network()
    run_simulation(
        server_app(job, Turns(job, lambda: network, requests, answers), network),
        client_app(sys.argv[1]),
        job.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    main()
