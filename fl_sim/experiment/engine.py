"""How a run's work is spread over processors: the settings of ``engine``. Results are the same by all of them."""

from typing import Literal, TypeAlias

from pydantic import Field

from fl_sim.settings import Settings


class Auto(Settings):
    """The faster engine for the job, by a timed step of it; the run says which was taken and why.

    ``threads``: torch threads of each worker.
    """

    kind: Literal["auto"] = "auto"
    threads: int = Field(1, ge=1)


class InProcess(Settings):
    """Every client in this process, ``workers`` at a time (0: one a core).

    Models that draw random numbers while they train (dropout), and models of the user's own classes, go one client
    after another. ``threads``: torch threads of each worker. ``stack``: how many clients are trained as one computation
    over stacked parameters (0: 100 on a GPU, 1 on a CPU, where it does not pay); the last bits depend on it.
    ``graphs``: whether a GPU is given each step of a stack as one CUDA graph, after the first few.
    """

    kind: Literal["inprocess"] = "inprocess"
    threads: int = Field(1, ge=1)
    workers: int = Field(0, ge=0)
    stack: int = Field(0, ge=0)
    graphs: bool = True


class Ray(Settings):
    """Ray actors, each with ``cpus`` processors and ``gpus`` GPUs (fractions share one).

    ``actors`` 0 means as many as the cluster has room for. ``address`` joins a running cluster; its machines need
    fl-sim installed, but no data, and no disk that others see. ``threads``: torch threads in each actor. ``stack``: how
    many clients an actor trains as one computation over stacked parameters (0: with a GPU its share of a round, at most
    100, else 1); the last bits depend on it.
    """

    kind: Literal["ray"] = "ray"
    actors: int = Field(0, ge=0)
    cpus: float = Field(1.0, ge=0)
    gpus: float = Field(0.0, ge=0)
    address: str = ""
    threads: int = Field(1, ge=1)
    stack: int = Field(0, ge=0)


Engine: TypeAlias = Auto | InProcess | Ray
