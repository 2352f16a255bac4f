"""The harness of hostile replies, in short: no fault today, and faults where an answer is believed."""

import logging

import pytest
import torch

from fl_sim.engines import arrays, wire


def _faults(harness, num_replies):
    total = harness.total_of(harness.attack(num_replies, seed=1))
    assert total.total() == num_replies
    return total, {fault: total[fault] for fault in harness.FAULTS if total[fault]}


def test_no_reply_ends_in_a_traceback_a_wrong_result_or_a_quotation(load_benchmark) -> None:
    harness = load_benchmark("hostile_replies")
    total, faults = _faults(harness, 160)
    assert faults == {}
    assert min(total["refused by name"], total["counted for nothing"]) > 40


@pytest.mark.parametrize(
    ("believed", "fault"),
    [("whole_number", "silently wrong"), ("check_names", "traceback"), ("tensor_in", "traceback")],
)
def test_the_harness_sees_where_an_answer_is_believed(
    load_benchmark, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, believed: str, fault: str
) -> None:
    trusting = {
        "whole_number": lambda value, *_: value,
        "check_names": lambda *_: None,
        "tensor_in": lambda array, *_: torch.from_numpy(array.numpy().copy()),
    }
    for reader in (one for one in (wire, arrays) if hasattr(one, believed)):
        monkeypatch.setattr(reader, believed, trusting[believed])
    with caplog.at_level(logging.CRITICAL):
        _, faults = _faults(load_benchmark("hostile_replies"), 240)
    assert fault in faults
