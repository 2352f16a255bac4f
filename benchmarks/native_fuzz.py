"""The compiled trainer against PyTorch on networks, records and settings that nobody would think of.

Every case is drawn from its number: convolutions of any kernel, stride and padding, pooling, GroupNorm, residual
blocks, linear layers, dropout; records of odd shapes; batches that fill no vector; momentum, and all that a plan can
ask for: a proximal term, offsets, a mixing pool, shifted logits, distillation, an ascent, contrasts; moved images.
What both trainers make of it is held against the same training in float64, on three sets of records: one alone may
hang on a ReLU or a maximum that the last bit decides. A client must also end in the same bits whoever was trained
before it in its thread, be it one of nothing but NaN.

    python benchmarks/native_fuzz.py [--cases 1000] [--first 0] [--json]
    python benchmarks/native_fuzz.py --sanitized [--cases 200]

``--sanitized`` compiles the trainer with gcc's AddressSanitizer and UndefinedBehaviorSanitizer and runs every case
through it, in a process of its own that ends at the first finding. Exits with 1 where a case fails.
"""

import argparse
import copy
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_sim.local_plan import Ascent, Contrast, Distillation, LocalPlan, Mix, Pull, Suppression
from fl_sim.models import ResidualBlock
from fl_sim.native.compiling import compile_kernel
from fl_sim.native.kernel import Kernel, load_kernel
from fl_sim.native.layers import FIELDS, Stack, describe
from fl_sim.native.request import RECEIVED, Draws, KernelJob
from fl_sim.params import detached, flattened
from fl_sim.seeding import rng, torch_kept
from fl_sim.training.loop import train
from fl_sim.types import Augment, LocalSettings, LocalTask, Params, Trained

ROUNDING = 1e-5
"""How far results may lie from float64's, as a share of how far training moved the model, where PyTorch's do not."""

LAST_BITS = 1e-6
"""The same as a share of the numbers' own size, for training that hardly moves them, and of numbers of size 1."""

AS_PYTORCH = 10.0
"""The largest allowed ratio of the compiled trainer's error to PyTorch's error, both relative to float64."""

RECORD_SETS = 3

WITH_MIX = ("ascent", "gradient_scale", "step_offset")
TERMS = (*WITH_MIX, "logit_scale", "logit_shift", "distillation", "suppression", "contrast", "pull")
"""Fields of a plan that are drawn by their names; the first go with a mixing pool, too."""

OPTIONS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1", "-fno-omit-frame-pointer"]
FOUND = 66
"""The exit code of a process with sanitizers if the sanitizers find a fault."""


@dataclass(frozen=True)
class Case:
    """A network and how it is trained: ``count`` records of ``shape``; ``parts``: what the plan adds to local SGD."""

    number: int
    model: nn.Module
    shape: tuple[int, ...]
    classes: int
    count: int
    settings: LocalSettings
    parts: frozenset[str]

    def records(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``count`` records and labels."""
        generator = torch.Generator().manual_seed(1000 * self.number + seed)
        inputs = torch.randn(self.count, *self.shape, generator=generator)
        return inputs, torch.randint(0, self.classes, (self.count,), generator=generator)

    def plan(self, params: Params) -> LocalPlan:
        """Return the plan: the additions of the drawn parts to local SGD."""
        generator = torch.Generator().manual_seed(self.number)

        def like(scale: float) -> Params:
            return {name: scale * torch.randn(value.shape, generator=generator) for name, value in params.items()}

        pool = torch.randn(4, *self.shape, generator=generator)
        proportions = torch.rand(4, self.classes, generator=generator)
        mix = Mix(pool, proportions / proportions.sum(1, keepdim=True), 0.2, "fedmix" in self.parts)
        plan = LocalPlan(
            gradient_offset=like(0.01) if "offset" in self.parts else None,
            proximal_mu=0.5 if "proximal" in self.parts else 0.0,
            momentum_buffers=like(0.02) if "warm" in self.parts else None,
            mix=mix if self.parts & {"fedmix", "naivemix"} else None,
        )
        return replace(plan, **self._terms(like(0.1), params, generator))

    def _terms(self, noise: Params, params: Params, generator: torch.Generator) -> dict[str, Any]:
        """Return the changes of loss and gradient by the drawn parts."""
        width = _last(self.model).in_features

        def number() -> float:
            return float(torch.rand((), generator=generator))

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        def some() -> torch.Tensor:
            return torch.rand(self.classes, generator=generator) < 0.7

        terms = {
            "gradient_scale": 0.2 + number(),
            "step_offset": {key: 0.1 * value for key, value in noise.items()},
            "logit_scale": 1 + 0.5 * numbers(self.classes),
            "logit_shift": numbers(self.classes),
            "distillation": Distillation(number(), 0.5 + 2 * number(), some(), number() < 0.5),
            "suppression": Suppression(numbers(self.classes).abs(), number()),
            "ascent": Ascent(number(), number() < 0.5, 1.0 if number() < 0.5 else number()),
            "contrast": Contrast(number(), 0.3 + number(), {key: params[key] + noise[key] for key in params}),
            "pull": Pull(numbers(self.classes, width), some(), number()),
        }
        return {name: terms[name] for name in terms if name in self.parts}


class Masks(nn.Dropout):
    """Leaves out what the compiled trainer does: NumPy's Philox, counted as dropout.h says."""

    def __init__(self, key: int, number: int, probability: float) -> None:
        super().__init__(float(np.float32(probability)))
        self.key, self.number, self.passes = key, number, 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` after dropout, shape (n, *shape)."""
        if not self.training:
            return values
        count, features = len(values), values[0].numel()
        draws = [
            np.random.Philox(key=self.key, counter=[0, octet, self.number, self.passes]).random_raw(4 * features)
            for octet in range(-(-count // 8))
        ]
        words = np.concatenate([own.view("<u4").reshape(features, 8).T for own in draws])[:count]
        self.passes += 1
        kept = torch.from_numpy(words >= int(self.p * 2**32)).reshape(values.shape)
        return values * kept / (1 - self.p)


def with_masks(model: nn.Module, key: int) -> nn.Module:
    """Return ``model`` with the compiled trainer's masks in place of its own dropout."""
    dropouts = [name for name, part in model.named_modules() if type(part) is nn.Dropout]
    for number, name in enumerate(dropouts):
        part = model.get_submodule(name)
        assert isinstance(part, nn.Dropout)
        model.set_submodule(name, Masks(key, number, part.p))
    return model


class _Drawn:
    """Layers added one after another; ``shape``: what the last one writes."""

    def __init__(self, draw: np.random.Generator, shape: tuple[int, ...]) -> None:
        self.draw, self.shape = draw, shape
        self.layers: list[nn.Module] = []

    def add(self, layer: nn.Module) -> bool:
        """Add ``layer`` where it writes anything."""
        try:
            with torch.no_grad():
                made = layer(torch.zeros(1, *self.shape))
        except (RuntimeError, ValueError):  # its window is larger than what is left
            return False
        self.layers.append(layer)
        self.shape = tuple(made.shape[1:])
        return True

    def one(self, *choices: int) -> int:
        return int(self.draw.choice(choices))

    def convolution(self, *, plain: bool = False) -> nn.Conv2d:
        inputs, outputs = self.shape[0], self.one(1, 2, 3, 5, 8, 9, 16, 17, 20)
        if plain or self.draw.random() < 0.5:  # those with ways of their own: 3 x 3 and 5 x 5, stride 1
            kernel = self.one(3, 3, 5)
            return nn.Conv2d(inputs, outputs, kernel, padding=self.one(0, kernel // 2, kernel - 1))
        kernel_y, kernel_x = self.one(1, 2, 3, 4, 5, 7), self.one(1, 2, 3, 4, 5, 7)
        return nn.Conv2d(
            inputs, outputs, (kernel_y, kernel_x), (self.one(1, 1, 2, 3), self.one(1, 1, 2, 3)),
            (self.one(*range(kernel_y)), self.one(*range(kernel_x))), bias=bool(self.draw.random() < 0.7),
        )  # fmt: skip

    def pooling(self) -> nn.Module:
        if self.draw.random() < 0.5:
            return nn.MaxPool2d(2)
        kernel = self.one(1, 2, 3, 4)
        return nn.MaxPool2d(kernel, self.one(1, 2, 3), self.one(*range(kernel // 2 + 1)))

    def norm(self) -> nn.Module:
        channels = self.shape[0]
        parts = self.one(*(part for part in range(1, channels + 1) if channels % part == 0))
        return nn.GroupNorm(parts, channels, eps=float(self.draw.choice([1e-5, 0.1])))

    def block(self) -> nn.Module:
        channels, outputs, stride, bias = self.shape[0], self.one(4, 8, 32), self.one(1, 2), self.draw.random() < 0.5
        block = ResidualBlock(8, 8, 1)
        block.body = nn.Sequential(
            nn.Conv2d(channels, outputs, 3, stride, 1, bias=bias), nn.GroupNorm(2, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=bias),
        )  # fmt: skip
        block.shortcut = nn.Conv2d(channels, outputs, 1, stride)
        if stride == 1 and self.draw.random() < 0.4:
            block.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=bias))
            block.shortcut = nn.Identity()
        if self.draw.random() < 0.5:
            block.body.append(nn.GroupNorm(1, block.body[-1].out_channels))
        if self.draw.random() < 0.3:  # a sum of sums
            block.body.append(_block_within(block.body[-1]))
        return block


def _block_within(last: nn.Module) -> nn.Module:
    """Return a block that takes and gives what ``last``, a convolution or a norm, gives."""
    channels = last.out_channels if isinstance(last, nn.Conv2d) else last.num_channels
    block = ResidualBlock(8, 8, 1)
    block.body, block.shortcut = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.Identity()
    return block


def case_of(number: int) -> Case:
    """Draw a case from its number."""
    draw = rng(0, "native-fuzz", number)
    with torch_kept():
        torch.manual_seed(number)
        is_flat, classes = draw.random() < 0.15, int(draw.integers(1, 14))
        shape = (int(draw.integers(1, 70)),) if is_flat else tuple(int(draw.integers(1, top)) for top in (6, 19, 19))
        drawn = _Drawn(draw, shape)
        if not is_flat:
            _add_planes(drawn)
        _add_linear(drawn, classes)
    has_norm = any(isinstance(module, nn.GroupNorm) for module in drawn.layers) or any(
        isinstance(module, ResidualBlock) for module in drawn.layers
    )
    mixes = ["", "", "naivemix"] if has_norm else ["", "naivemix", "fedmix"]  # GroupNorm has second derivatives
    parts = {part for part in ("offset", "proximal", "warm") if draw.random() < 0.3} | {str(draw.choice(mixes))}
    settings = LocalSettings(
        float(draw.choice([0.003, 0.02])), float(draw.choice([0.0, 0.5, 0.9])), float(draw.choice([0.0, 1e-2])),
        int(draw.choice([1, 3, 8, 15, 16, 17, 33, 64, 100])), int(draw.integers(1, 3)),
    )  # fmt: skip
    count = int(draw.choice([1, 2, 7, 16, 17, 31, 33, 50]))
    parts |= {
        term for term in TERMS if draw.random() < 0.15 and (term in WITH_MIX or not parts & {"naivemix", "fedmix"})
    }
    settings = replace(settings, clip_norm=float(draw.choice([0.0, 0.0, 0.3, 3.0])))
    if not is_flat and not parts & RECEIVED and draw.random() < 0.4:
        black = tuple(draw.standard_normal(shape[0]).astype(np.float32).tolist())
        augment = Augment(int(draw.choice([0, 1, 4, 30])), draw.random() < 0.5, black, bool(draw.random() < 0.5))
        settings = replace(settings, augment=augment)
    layers = _with_dropout(drawn.layers, rng(0, "native-fuzz-dropout", number))
    return Case(number, nn.Sequential(*layers), shape, classes, count, settings, frozenset(parts - {""}))


def _with_dropout(layers: list[nn.Module], draw: np.random.Generator) -> list[nn.Module]:
    """Have one model in four leave out some of what enters its layers with weights."""
    share = 0.5 if draw.random() < 0.25 else 0.0
    made: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear | ResidualBlock) and draw.random() < share:
            made.append(nn.Dropout(float(draw.choice([0.1, 0.5, 0.9]))))
        made.append(layer)
    return made


def _last(model: nn.Module) -> nn.Linear:
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


def _add_planes(drawn: _Drawn) -> None:
    kinds = ["convolution", "convolution", "pooling", "norm", "relu", "block"]
    for _ in range(int(drawn.draw.integers(1, 5))):
        kind = str(drawn.draw.choice(kinds))
        if kind == "convolution":
            drawn.add(drawn.convolution())
            if drawn.draw.random() < 0.6:
                behind = [nn.ReLU(), nn.MaxPool2d(2)]  # fused, in either order
                for layer in behind if drawn.draw.random() < 0.5 else behind[::-1]:
                    drawn.add(layer)
        elif kind == "relu":
            drawn.add(nn.ReLU())
        else:
            drawn.add({"pooling": drawn.pooling, "norm": drawn.norm, "block": drawn.block}[kind]())
    if drawn.draw.random() < 0.2:
        drawn.add(nn.AdaptiveAvgPool2d(1))
    drawn.layers.append(nn.Flatten())
    drawn.shape = (math.prod(drawn.shape),)


def _add_linear(drawn: _Drawn, classes: int) -> None:
    for _ in range(int(drawn.draw.integers(0, 3))):
        drawn.add(nn.Linear(drawn.shape[0], drawn.one(1, 3, 8, 16, 21), bias=bool(drawn.draw.random() < 0.7)))
        if drawn.draw.random() < 0.7:
            drawn.add(nn.ReLU())
    drawn.add(nn.Linear(drawn.shape[0], classes, bias=bool(drawn.draw.random() < 0.7)))


def fault_of(kernel: Kernel, case: Case) -> str:
    """Return in words what the compiled trainer does wrong with ``case``, nothing where it does nothing wrong."""
    stack = describe(case.model, case.shape)
    if stack is None:
        return "the compiled trainer does not take it"
    found: list[str] = []
    for seed in range(RECORD_SETS):
        said = _distance(kernel, stack, case, seed)
        found += [said] if said else []
        if not said:
            break
    return found[0] if len(found) == RECORD_SETS else leftover(kernel, stack, case)


def lesson_of(case: Case, seed: int = 0, params: Params | None = None) -> KernelJob:
    """Return the job for the compiled trainer."""
    params = params or detached(case.model.named_parameters())
    task, plan = LocalTask(1, 0, 1, case.count, case.settings, params), case.plan(params)
    return KernelJob(task, plan, *case.records(seed), Draws.of(task, plan, case.count, rng(0, "draws")))


def _distance(kernel: Kernel, stack: Stack, case: Case, seed: int) -> str:
    """Return how the compiled trainer and PyTorch lie apart from float64 where the first lies too far, else nothing."""
    lesson = lesson_of(case, seed)
    [found] = kernel.train(stack, [lesson])
    expected, exact = (_by_pytorch(case, lesson, dtype) for dtype in (torch.float32, torch.float64))
    if list(found.params) != list(exact.params) or found.momentum_buffers.keys() != exact.momentum_buffers.keys():
        return "it hands back other tensors than PyTorch"
    for what, start in (("params", lesson.task.params), ("momentum_buffers", {})):
        ours, theirs, truth = (_flat(getattr(trained, what)) for trained in (found, expected, exact))
        moved = truth - _flat(start) if start else truth
        allowed = ROUNDING * float(moved.norm()) + LAST_BITS * (1 + float(truth.norm()))
        allowed += AS_PYTORCH * float((theirs - truth).norm())
        if math.isfinite(allowed) and not float((ours - truth).norm()) <= allowed:
            return f"{what} lie {float((ours - truth).norm()):.3g} from float64's, where {allowed:.3g} is allowed"
    losses = [one.loss or 0.0 for one in (found, expected, exact)]
    if not abs(losses[0] - losses[2]) <= 1e-5 * (1 + abs(losses[2])) + AS_PYTORCH * abs(losses[1] - losses[2]):
        return f"the loss is {losses[0]}, float64's is {losses[2]}"
    return _logits_apart(kernel, stack, case, lesson)


def _by_pytorch(case: Case, lesson: KernelJob, dtype: torch.dtype) -> Trained:
    def cast(params: Params | None) -> Params | None:
        return None if params is None else {name: value.to(dtype) for name, value in params.items()}

    task, plan, inputs, labels, _ = lesson
    mix = None if plan.mix is None else replace(
        plan.mix, inputs=plan.mix.inputs.to(dtype), labels=plan.mix.labels.to(dtype)
    )  # fmt: skip
    contrast = plan.contrast and replace(plan.contrast, previous=cast(plan.contrast.previous))
    plan = replace(
        plan, gradient_offset=cast(plan.gradient_offset), momentum_buffers=cast(plan.momentum_buffers), mix=mix,
        contrast=contrast, step_offset=cast(plan.step_offset),
    )  # fmt: skip
    task = replace(task, params=cast(task.params) or {})
    model = with_masks(copy.deepcopy(case.model), lesson.draws.masks).to(dtype)
    return train(model, task, plan, inputs.to(dtype), labels, rng(0, "draws"))


def _logits_apart(kernel: Kernel, stack: Stack, case: Case, lesson: KernelJob) -> str:
    found = kernel.infer(stack, flattened(lesson.task.params).flat, lesson.inputs).double()
    with torch.no_grad():
        model = copy.deepcopy(case.model).eval()
        theirs, exact = model(lesson.inputs).double(), model.double()(lesson.inputs.double())
    allowed = 1e-5 * (1 + float(exact.abs().max())) + AS_PYTORCH * float((theirs - exact).abs().max())
    apart = float((found - exact).abs().max())
    return "" if apart <= allowed else f"logits lie {apart:.3g} from float64's, where {allowed:.3g} is allowed"


def leftover(kernel: Kernel, stack: Stack, case: Case) -> str:
    """Say so where a client ends in other bits behind one whose weights and records are NaN and infinite."""
    lesson = lesson_of(case)
    wrong = {name: torch.full_like(value, torch.nan) for name, value in lesson.task.params.items()}
    poison = lesson_of(case, params=wrong)._replace(inputs=torch.full_like(lesson.inputs, torch.inf))
    with ThreadPoolExecutor(1) as fresh:
        [alone] = fresh.submit(kernel.train, stack, [lesson]).result()
    behind = kernel.train(stack, [poison, lesson, poison, lesson])
    same = [_same_bits(alone.params, behind[at].params) and alone.loss == behind[at].loss for at in (1, 3)]
    return "" if all(same) or alone.loss != alone.loss else "a client ends in other bits behind one of NaN"


def _same_bits(left: Params, right: Params) -> bool:
    return bool(torch.equal(flattened(left).flat, flattened(right).flat))


def _flat(params: Params) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.float64), *(value.double().reshape(-1) for value in params.values())])


def faults(kernel: Kernel, numbers: range) -> Iterator[tuple[int, str]]:
    """Yield (number, what is wrong) of every case that fails."""
    for number in numbers:
        case = case_of(number)
        if said := fault_of(kernel, case):
            yield (
                number,
                f"{said}: records {case.shape} x {case.count}, {case.settings}, {sorted(case.parts)}, {case.model}",
            )


def overrun(kernel: Kernel) -> None:
    """Have the trainer write past the end of a tensor, which sanitizers must find."""
    case = case_of(0)
    right = describe(case.model, case.shape)
    assert right is not None
    layers = right.layers.copy()
    layers[-1, FIELDS.index("outputs")] -= 1
    short = Stack(layers, right.input_shape, right.layout)  # room for one class less than
    vars(short)["pointers"] = right.pointers  # the library is told of
    kernel.infer(short, flattened(detached(case.model.named_parameters())).flat, case.records(0)[0])


def sanitized(first: int, cases: int) -> int:
    """Run the cases through a trainer compiled with sanitizers, in a process of its own; return its exit code.

    1 where the sanitizers do not find a fault that is there.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernel.so"
        compile_kernel(library, OPTIONS)
        command = [sys.executable, __file__, "--library", str(library)]
        planted = subprocess.run([*command, "--overrun"], env=_with_sanitizers(), capture_output=True, check=False)
        if planted.returncode != FOUND or b"heap-buffer-overflow" not in planted.stderr:
            print(f"the sanitizers are not at work: a planted fault ended in {planted.returncode}: {planted.stderr!r}")
            return 1
        command += ["--first", str(first), "--cases", str(cases)]
        code = subprocess.run(command, env=_with_sanitizers(), check=False).returncode
        print("the sanitizers found the planted fault, and " + ("no other" if code != FOUND else "another, see above"))
        return code


def _with_sanitizers() -> dict[str, str]:
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()  # noqa: S607
        for name in ("libasan.so", "libstdc++.so")
    ]
    return {
        **os.environ, "LD_PRELOAD": " ".join(libraries), "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode={FOUND}",
        "ASAN_OPTIONS": f"detect_leaks=0:exitcode={FOUND}:allocator_may_return_null=1", "CXX": "g++",
    }  # fmt: skip


def main() -> int:
    """Run the cases and say how many failed."""
    parser = argparse.ArgumentParser(description="The compiled trainer against PyTorch on random networks.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--library", type=Path, help="another compiled trainer than the one that is installed")
    parser.add_argument("--sanitized", action="store_true")
    parser.add_argument("--overrun", action="store_true", help="write past a tensor's end: sanitizers must find it")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.sanitized:
        return sanitized(asked.first, asked.cases)
    kernel, why_not = load_kernel(asked.library) if asked.library else load_kernel()
    if kernel is None:
        print(f"there is no native trainer here: {why_not}")
        return 2
    torch.set_num_threads(1)
    if asked.overrun:
        overrun(kernel)
        return 0
    failed = dict(faults(kernel, range(asked.first, asked.first + asked.cases)))
    for number, said in [] if asked.json else failed.items():
        print(f"case {number}: {said}")
    print(
        json.dumps({"cases": asked.cases, "failed": failed})
        if asked.json
        else f"{asked.cases} cases, {len(failed)} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
