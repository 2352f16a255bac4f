"""``engine=auto`` counts the time that clients' generators take."""

from dataclasses import replace

import pytest

from clients.dafl.dpcgan.settings import DpCgan
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.groups import Auto, InProcess, Ray
from fl_sim.experiment.job import job_of
from fl_sim.simulation import engine_choice
from fl_sim.simulation.engine_choice import choose, seconds_of_stages
from fl_sim.simulation.timing import Stopwatch
from fl_sim.stages.dafl import stage
from fl_sim.testing_fixtures import FakeClock


def test_the_generators_time_is_that_of_all_steps_of_all_clients() -> None:
    def seconds(**generator: int) -> float:
        made = {"kind": "dp-cgan", "discriminator_width": 8, "generator_width": 8, "snapshots": 1, **generator}
        return seconds_of_stages(job_of(experiment_from({"preprocess": {"kind": "da-fl", "generator": made}})))

    few, many = seconds(discriminator_steps=100), seconds(discriminator_steps=100_000)
    assert 0 < few < many / 50
    assert seconds_of_stages(job_of(experiment_from({}))) == 0


def test_what_a_generator_does_before_its_first_step_counts_once_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second passes: the clock is the generator's own."""
    clock = FakeClock()

    def generate(self: DpCgan, *_: object) -> None:
        clock.now += 3.0 + 0.01 * self.discriminator_steps

    monkeypatch.setattr(DpCgan, "generate", generate)
    for steps in (5, 20, 1000):
        made = {"kind": "dp-cgan", "discriminator_steps": steps}
        job = job_of(experiment_from({"clients": 7, "preprocess": {"kind": "da-fl", "generator": made}}))
        [work] = stage.SynthesisStage(job).work()
        watch = Stopwatch(1000.0, clock=clock.thread_time)
        watch.time_all([replace(work, clock=clock.thread_time)])
        assert watch.seconds(replace(work, at_once=1.0)) == pytest.approx(7 * (3.0 + 0.01 * steps))


def test_a_generator_of_one_release_is_timed_as_a_whole() -> None:
    made = experiment_from({"preprocess": {"kind": "da-fl", "generator": "mean-embedding"}})
    assert 0 < seconds_of_stages(job_of(made)) < 60


@pytest.mark.parametrize(("training", "kind"), [(1.0, InProcess), (1000.0, Ray)])
def test_threads_train_generators_in_process_so_that_they_alone_do_not_call_for_ray(
    training: float, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_choice, "cores", lambda: 4)
    monkeypatch.setattr(engine_choice, "trains_natively", lambda *_: False)
    monkeypatch.setattr(engine_choice.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(engine_choice, "estimated_seconds", lambda *_: training)
    monkeypatch.setattr(engine_choice, "seconds_of_stages", lambda _: 370.0)
    engine, why = choose(job_of(experiment_from({"engine": Auto().model_dump(), "preprocess": "da-fl"})))
    assert isinstance(engine, kind)
    assert f"about {training + 100:.0f} s of training in process" in why
