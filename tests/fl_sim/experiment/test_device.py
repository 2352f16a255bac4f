"""The device and the precision of training: what is asked for, or a refusal that says why."""

import ctypes

import pytest
import torch

from fl_sim.errors import UserError
from fl_sim.experiment import device
from fl_sim.experiment.device import device_of, precision_of
from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.native.kernel import Kernel


def _made(*overrides):
    return experiment_from(with_overrides({}, list(overrides)))


def test_the_device_is_the_one_asked_for(monkeypatch):
    assert device_of(_made("device=cpu")).type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(_made()).type == "cpu"
    with pytest.raises(UserError, match=r"device=cuda, but .*no CUDA device.*: set device=cpu"):
        device_of(_made("device=cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(_made()).type == "cuda"


def test_a_precision_is_refused_where_it_would_change_nothing(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    stacked = ("engine=inprocess", "engine.stack=4")
    assert precision_of(_made(), cpu) == "float32"
    assert precision_of(_made("local.precision=bfloat16", *stacked), cpu) == "bfloat16"
    for overrides in (["local.precision=tf32"], ["local.precision=tf32", *stacked]):
        with pytest.raises(UserError, match="has no effect on a CPU"):
            precision_of(_made(*overrides), cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert precision_of(_made("local.precision=tf32"), gpu) == "tf32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UserError, match=r"local\.precision=tf32 has no effect on a GPU older than"):
        precision_of(_made("local.precision=tf32"), gpu)
    with pytest.raises(UserError, match="bfloat16"):
        _made("local.precision=float16")


def test_bfloat16_on_a_cpu_needs_a_compiled_trainer_and_a_processor_that_have_it(monkeypatch):
    cpu, asked = torch.device("cpu"), _made("local.precision=bfloat16")
    for kernel, why_not in (
        (Kernel(ctypes.CDLL(None), 16, has_bfloat16=False), "this processor has no avx512_bf16; leave it out"),
        (None, "no native trainer is here: it was not compiled"),
    ):
        monkeypatch.setattr(device, "load_kernel", lambda found=kernel: (found, "it was not compiled"))
        with pytest.raises(UserError, match=f"local.precision=bfloat16 needs the native trainer.*, and {why_not}"):
            precision_of(asked, cpu)
    kernel = Kernel(ctypes.CDLL(None), 16, has_bfloat16=True)
    monkeypatch.setattr(device, "load_kernel", lambda: (kernel, ""))
    assert precision_of(asked, cpu) == "bfloat16"
