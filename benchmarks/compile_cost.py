"""What compiling a sharded model costs: time to compile, host time of a compiled step, a start from warm caches.

    python benchmarks/compile_cost.py compile --layers 8 16 32 64
    python benchmarks/compile_cost.py steady --rounds 20 --json steady.json
    python benchmarks/compile_cost.py warm

``compile``. The first forward and backward of a Llama with tiny weights, in one process as a rank of 8 whose
collectives do nothing: sharded with backend "fsdp_eager", against the same unsharded with "aot_eager". Both go through
Dynamo and AOTAutograd and generate no code, so that what is left between them is sharding's: tracing the state machine,
the graph's additional nodes on their way through AOTAutograd and the partitioner, and the passes.

``steady``. Host time of a forward and backward whose kernels take next to nothing: ours compiled with "fsdp_eager"
against torch's ``fully_shard``, eager. Compiled and eager code run the same operators through different executors, the
one generated Python below guards and AOTAutograd's wrapper, the other ``nn.Module`` and autograd. So each has the step
of an unsharded model under its own executor subtracted: of ours that of one compiled with "aot_eager", of torch's that
of an eager one. What is left is what sharding costs: guards on the state machine, more inputs through the wrapper, and
collectives with their copies here; hooks and the same collectives there. Once in one process without transport, and
once on two gloo ranks, where handing tensors over and waking up count as well. Whole steps are in the table too, for
what the compiler saves elsewhere is not in the difference.

``warm``. The first forward and backward in a new process on two gloo ranks, Inductor compiling: with an empty cache
directory, and again with what that run has left there. Imports, the model and the connections are not in it.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two ranks share the cores

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from comparison import Comparison, compare  # noqa: E402
from contestants import Contestant, Task, llama_task, make_ours, make_plain, make_torch  # noqa: E402
from harness import Measured, finish, join, on_ranks, positive, report, write  # noqa: E402
from rounds import read_clocks, run_rounds  # noqa: E402
from torch_compat import compile_phases, reset_compile_phases  # noqa: E402

from fsdp_compile import backend  # noqa: E402
from fsdp_compile.models import SIZES, Llama, LlamaConfig, shard_llama  # noqa: E402
from fsdp_compile.torch_compat import join_imaginary_world  # noqa: E402

MILLI = 1e3
COMPILE_WORLD, COMPILE_GOAL_LAYERS, COMPILE_GOAL = 8, 32, 1.25
STEADY_WORLD, STEADY_GOAL = 2, 0.7
WARM_WORLD, WARM_GOAL, WARM_BACKENDS = 2, 0.4, ("inductor", "fsdp")

Seconds = dict[str, list[float]]  # of a clock or a phase, one sample a round


def main() -> None:
    args = parse_arguments()
    measure, contestants = COMMANDS[args.what]
    report(lambda: {args.what: measure(args)}, args, contestants)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    compiling = commands.add_parser("compile", help="time to compile, by number of layers")
    compiling.add_argument("--layers", type=positive, nargs="+", default=[8, 16, 32, 64], help="in ascending order")
    steady = commands.add_parser("steady", help="host time of a compiled step")
    steady.add_argument("--layers", type=positive, default=32, help="default: %(default)s")
    steady.add_argument("--steps", type=positive, default=5, help="timed steps a block (default: %(default)s)")
    warm = commands.add_parser("warm", help="the first step of a second process")
    warm.add_argument("--layers", type=positive, default=4, help="default: %(default)s")
    for command, rounds in ((compiling, 3), (steady, 10), (warm, 2)):
        command.add_argument("--rounds", type=positive, default=rounds, help="of all (default: %(default)s)")
        command.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers there")
    return parser.parse_args()


def tiny(layers: int) -> LlamaConfig:
    return LlamaConfig(dim=16, layers=layers, heads=2, kv_heads=1, ffn_dim=32, vocab=32)


def first_step(model: Any, tokens: torch.Tensor) -> dict[str, float]:
    """Seconds on each clock of the first forward and backward."""
    start = read_clocks()
    model(tokens).square().mean().backward()
    return {clock: end - start[clock] for clock, end in read_clocks().items()}


def add(samples: Seconds, seconds: dict[str, float]) -> None:
    for name, value in seconds.items():
        samples.setdefault(name, []).append(value)


# -- compile ----------------------------------------------------------------------------------------------------------

# Phases of Dynamo's own accounts that do not overlap; the rest is all else, bytecode and the step itself for example.
PHASES = {
    "Dynamo traces": "bytecode_tracing",
    "guards": "build_guards",
    "AOTAutograd": "create_aot_dispatcher_function",
}
PARTS_OF_AOT = {
    "AOTAutograd: metadata": "aot_collect_metadata",
    "AOTAutograd: joint trace": "aot_trace_joint_graph",
}


def compile_rank(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    torch.set_num_threads(1)
    join_imaginary_world(COMPILE_WORLD)
    names = ["unsharded", "ours"]
    for name in names:  # what only a process's first compile pays
        compile_once(2, name)
    samples: dict[str, dict[str, Seconds]] = {str(layers): {name: {} for name in names} for layers in args.layers}
    for round_number in range(args.rounds):
        print(f"round {round_number + 1} of {args.rounds} ...", file=sys.stderr, flush=True)
        for layers in args.layers:
            for name in names:
                add(samples[str(layers)][name], compile_once(layers, name))
        names.reverse()  # a drift of the machine favours none
    write({"samples": samples}, directory)


def compile_once(layers: int, name: str) -> dict[str, float]:
    """Seconds of a first step: on each clock, and of wall time by phase."""
    torch.compiler.reset()
    model = Llama(tiny(layers))
    if name == "ours":
        shard_llama(model)
    compiled = torch.compile(model, backend="fsdp_eager" if name == "ours" else "aot_eager", fullgraph=True)
    gc.collect()
    reset_compile_phases()
    stopwatch = PassStopwatch()
    with backend.observed(stopwatch):
        seconds = first_step(compiled, torch.zeros(1, 8, dtype=torch.int64))
    found = compile_phases()
    phases = {phase: found.get(key, 0.0) for phase, key in PHASES.items()}
    parts = {part: found.get(key, 0.0) for part, key in PARTS_OF_AOT.items()}
    parts["AOTAutograd: our passes"] = stopwatch.seconds
    phases["rest"] = seconds["wall"] - sum(phases.values())
    return {**seconds, **phases, **parts}


class PassStopwatch:
    """An observer of the passes: seconds between what it is shown before and after them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __call__(self, stage: str, graph: torch.fx.Graph) -> None:
        now = read_clocks()["wall"]
        if stage.endswith(" before"):
            self._start = now
        else:
            self.seconds += now - self._start


def measure_compile(args: argparse.Namespace) -> Measured:
    numbers = on_ranks(compile_rank, 1, args)
    by_layers = {layers: numbers["samples"][str(layers)] for layers in args.layers}
    rows = []
    for clock, goal in (("process", COMPILE_GOAL), ("wall", None)):
        for layers, of in by_layers.items():
            goal_here = goal if layers == COMPILE_GOAL_LAYERS else None
            quantity = f"compile: {layers} layers, {'CPU' if clock == 'process' else clock} time"
            rows.append(compare(quantity, "s", 1, of["ours"][clock], of["unsharded"][clock], goal_here))
    rows += growth_rows(by_layers)
    reference = COMPILE_GOAL_LAYERS if COMPILE_GOAL_LAYERS in by_layers else args.layers[-1]
    print(phase_table(reference, by_layers[reference]))
    return rows, numbers


def growth_rows(by_layers: dict[int, dict[str, Seconds]]) -> list[Comparison]:
    """What each further layer costs; equal for any number of layers if compiling is linear."""
    rows = []
    steps = list(zip(by_layers, list(by_layers)[1:], strict=False))
    increments = {
        (few, many): {
            name: [
                (b - a) / (many - few)
                for a, b in zip(by_layers[few][name]["process"], by_layers[many][name]["process"], strict=True)
            ]
            for name in ("ours", "unsharded")
        }
        for few, many in steps
    }
    for (few, many), of in increments.items():
        rows.append(compare(f"compile: a layer from {few} to {many}", "ms", MILLI, of["ours"], of["unsharded"]))
    if len(steps) > 1:
        first, last = increments[steps[0]], increments[steps[-1]]
        growth = {name: [b / a for a, b in zip(first[name], last[name], strict=True)] for name in first}
        rows.append(compare("compile: the last of these to the first", "times", 1, growth["ours"], growth["unsharded"]))
    return rows


def phase_table(layers: int, of: dict[str, Seconds]) -> str:
    lines = [f"wall time of compiling {layers} layers by phase, seconds: ours, unsharded, added"]
    for phase in (*PHASES, "rest", *PARTS_OF_AOT, "AOTAutograd: our passes"):
        ours, unsharded = median(of["ours"][phase]), median(of["unsharded"][phase])
        lines.append(f"  {phase:26}{ours:8.2f}{unsharded:8.2f}{ours - unsharded:8.2f}")
    return "\n".join(lines)


# -- steady -----------------------------------------------------------------------------------------------------------


def steady_rank(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    join(rank, world, directory)
    contestants = steady_contestants(args.layers)
    finish(contestants, {"samples": run_rounds(contestants, args.rounds, args.steps, timed_update=False)}, directory)


def steady_without_transport_rank(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    torch.set_num_threads(1)
    join_imaginary_world(STEADY_WORLD)
    contestants = steady_contestants(args.layers)
    write({"samples": run_rounds(contestants, args.rounds, args.steps, timed_update=False)}, directory)


def steady_contestants(layers: int) -> dict[str, Contestant]:
    task = llama_task(tiny(layers), batch=1, seq=8)
    return {
        "ours": compiled(task, make_ours(task), "fsdp_eager"),
        "plain_compiled": compiled(task, make_plain(task), "aot_eager"),
        "torch": make_torch(task),
        "plain": make_plain(task),
    }


def compiled(task: Task, contestant: Contestant, backend_name: str) -> Contestant:
    contestant.model = torch.compile(contestant.model, backend=backend_name, fullgraph=True)  # type: ignore[assignment]
    return contestant


def measure_steady(args: argparse.Namespace) -> Measured:
    found = {
        "no transport": on_ranks(steady_without_transport_rank, 1, args),
        "gloo": on_ranks(steady_rank, STEADY_WORLD, args),
    }
    rows = []
    for transport, numbers in found.items():
        samples = numbers["samples"]
        for clock, said in (("thread", "CPU time"), ("wall", "wall time")):
            ours, torchs = over(samples, "ours", "plain_compiled", clock), over(samples, "torch", "plain", clock)
            goal = STEADY_GOAL if clock == "thread" else None
            rows.append(compare(f"steady: sharding's {said}, {transport}", "ms", MILLI, ours, torchs, goal))
        for quantity, ours_name, torchs_name in (
            ("steady: whole step's CPU time", "ours", "torch"),
            ("steady: the same unsharded, compiled and eager", "plain_compiled", "plain"),
        ):
            ours, torchs = samples[ours_name]["thread"], samples[torchs_name]["thread"]
            rows.append(compare(f"{quantity}, {transport}", "ms", MILLI, ours, torchs))
    return rows, found


def over(samples: dict[str, dict[str, list[float]]], name: str, plain: str, clock: str) -> list[float]:
    """What the step costs more than the unsharded one under the same executor."""
    return [a - b for a, b in zip(samples[name][clock], samples[plain][clock], strict=True)]


# -- warm -------------------------------------------------------------------------------------------------------------


def warm_rank(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = args.cache
    join(rank, world, directory)
    model = shard_llama(Llama(replace(SIZES["debug"], layers=args.layers)))
    compiled_model = torch.compile(model, backend=args.backend, fullgraph=True)
    dist.barrier()
    seconds = first_step(compiled_model, torch.zeros(2, 32, dtype=torch.int64))
    slowest = torch.tensor([seconds["wall"]])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        write({"wall": slowest.item()}, directory)
    dist.barrier()


def measure_warm(args: argparse.Namespace) -> Measured:
    samples: dict[str, Seconds] = {name: {} for name in WARM_BACKENDS}
    for _ in range(args.rounds):
        for name in WARM_BACKENDS:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
                chosen = argparse.Namespace(**vars(args), backend=name, cache=cache)
                for state in ("cold", "warm"):
                    add(samples[name], {state: on_ranks(warm_rank, WARM_WORLD, chosen)["wall"]})
    rows = [
        compare(f"warm: first step, backend {name}", "s", 1, of["warm"], of["cold"], WARM_GOAL)
        for name, of in samples.items()
    ]
    return rows, {"samples": samples}


COMMANDS: dict[str, tuple[Any, tuple[str, str]]] = {
    "compile": (measure_compile, ("ours", "unsharded")),
    "steady": (measure_steady, ("ours", "torch")),
    "warm": (measure_warm, ("warm", "cold")),
}


if __name__ == "__main__":
    main()
