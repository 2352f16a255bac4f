"""Clients and a model that fail on demand; test_ray.py copies this file to a place of the user's own."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fl_sim.engines.batching import BatchHandler, answer

FLAG = Path(__file__).with_name("flag.json")


def misbehave(action: str) -> None:
    if action == "raise":
        raise ValueError("my data is bad")
    if action == "exit":
        sys.exit(3)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "hang":
        time.sleep(1000)
    if action == "spin":
        while True:
            pass


def order(action: str, client: int, *, once: str = "", seconds: float = 0.0) -> RecordDict:
    """Return a message content at which ``client`` does ``action``; the first time only where ``once`` names a file."""
    return RecordDict({"order": ConfigRecord({"action": action, "client": client, "once": once, "seconds": seconds})})


def client_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        asked = message.content.config_records["order"]
        client = int(str(context.node_config["partition-id"]))
        time.sleep(float(str(asked["seconds"])))
        once = Path(str(asked["once"])) if asked["once"] else None
        if client == asked["client"] and not (once and once.exists()):
            if once:
                once.touch()
            misbehave(str(asked["action"]))
        report = {"client": client, "pid": os.getpid(), "threads": torch.get_num_threads()}
        return Message(RecordDict({"report": MetricRecord(report)}), reply_to=message)

    return app


def player() -> BatchHandler:
    """Return what answers several messages at a time."""
    app = client_app()
    return lambda messages: [answer(app, message, 8) for message in messages]


def broken_app() -> ClientApp:
    raise RuntimeError("no such library")


class Misbehaving(nn.Module):
    """Logistic regression that, once FLAG is there, dies of the record that FLAG holds."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_features, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(inputs.flatten(1))
        if self.training and FLAG.exists():
            record = torch.tensor(json.loads(FLAG.read_text()))
            if (inputs.flatten(1) == record).all(1).any():
                misbehave("kill")
        return outputs


def model(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Misbehaving(torch.Size(input_shape).numel(), num_classes)
