"""The command ``fsdp-compile``: checks, from a shell, what compiling does to a sharded model, and measures machines.

    fsdp-compile parity MODULE:FACTORY --steps 5 --backend fsdp_eager --nproc 2
    fsdp-compile plan llama3-8b --world-size 8,64,512 --hardware h100 --memory 80GiB
    fsdp-compile compare simulated.json measured.json
    fsdp-compile calibrate machine.toml --nproc 2
    torchrun --nproc-per-node 8 -m fsdp_compile.cli calibrate machine.toml

Exit codes: 0 equal, fits, compared or measured; 1 different, does not fit or a rank failed; 2 bad arguments. torchrun
itself exits with 1 for either failure.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import operator
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from tqdm import tqdm

from . import MixedPrecisionPolicy, plan_search, torch_compat, trace_compare  # the package registers our backends
from .calibrate import MIB, calibrate
from .factory import Factory, FactoryError, llama
from .local_ranks import RankFailed, UsageError, leave, run_ranks
from .measured_trace import TraceError
from .models import SIZES
from .parity import compare_training
from .passes import PassConfig
from .passes.context import parse_bytes
from .passes.profile_files import is_file_name
from .plan_table import as_table
from .planning import make_plan
from .trace_file import write_trace

DTYPES = ("bfloat16", "float16", "float32")


class Parser(argparse.ArgumentParser):
    """Answers a bad argument with one line instead of with its usage as well."""

    def error(self, message: str) -> NoReturn:
        _fail_alike(message)


def main() -> None:
    args = parse_arguments()
    try:
        args.check(args)
        sys.exit(args.start(args))
    except UsageError as error:
        _fail_alike(str(error))
    except FactoryError as error:
        _fail(str(error), 2)
    except RankFailed as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)


# -- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        prog="fsdp-compile",
        description="Checks on torch.compile(fully_shard(model)), and measurements for its cost model.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_parity(commands)
    _add_plan(commands)
    _add_compare(commands)
    _add_calibrate(commands)
    return parser.parse_args()


def _add_parity(commands: Any) -> None:
    parser = commands.add_parser(
        "parity",
        allow_abbrev=False,
        help="train a model eagerly and compiled, and compare",
        description="Train two equal copies of a model, one eagerly and one compiled, and compare losses, gradients "
        "and parameters after each step. FACTORY() returns (model, make_batch); make_batch(step, rank, world) returns "
        "what the model is called with: a tuple, a dict of keyword arguments or one tensor. Exits with 0 if all is "
        "equal, 1 if not.",
    )
    parser.set_defaults(check=check_parity, start=on_ranks, run=run_parity)
    add = parser.add_argument
    add(
        "factory",
        metavar="MODULE:FACTORY",
        help="module name or .py file, and a callable in it; try fsdp_compile.parity:debug_llama",
    )
    add("--steps", type=at_least(1), default=5, help="optimizer steps (default: %(default)s)")
    add("--backend", default="fsdp_eager", help="of torch.compile (default: %(default)s)")
    add("--nproc", type=at_least(1), default=2, help="ranks to start; torchrun decides itself (default: %(default)s)")
    add("--tolerance", type=not_negative, metavar="T", help="accept differences up to T (default: bits must be equal)")
    add("--lr", type=not_negative, default=1e-2, help="learning rate of SGD (default: %(default)s)")
    add("--seed", type=at_least(0), default=0, help="of weights, batches and dropout (default: %(default)s)")
    add("--allow-graph-breaks", action="store_true", help="count graph breaks instead of failing at the first")


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="say how a step will go on ranks that need not exist",
        description="Trace a model without data, run the passes, and print for each number of ranks the simulated time "
        "of a step, what communication is exposed, and what fills the memory, beside what no plan can beat. Needs no "
        "GPU and no memory for the model.",
    )
    parser.set_defaults(check=check_plan, start=run_plan)
    add = parser.add_argument
    add("factory", metavar="MODULE:FACTORY", help=f"as for parity, or one of {', '.join(SIZES)}")
    add("--world-size", type=at_least_each(2), default=[8], metavar="N[,N...]", help="ranks (default: 8)")
    add("--replicas", type=at_least(1), default=1, help="that hold the same shards (HSDP); default: %(default)s")
    add("--hardware", default="h100", help="a shipped profile or a file of calibrate's (default: %(default)s)")
    add("--memory", metavar="SIZE", help="that a device has, like 80GiB; more is called too much")
    add("--search", action="store_true", help="try buckets, resharding and replicas, and say which to take")
    add("--trace", metavar="FILE", type=Path, help="also write a trace for Perfetto or about:tracing, .json")
    add("--bucket", default="module", help='"module", "auto", "none" or a size like 25MB (default: %(default)s)')
    add("--regather", choices=["auto"], help='"auto": keep what saves time unsharded until the backward')
    add("--reshard", type=reshard, help="after forward: true, false or to how many ranks (default: all but the root)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="that is gathered and computed in (default: %(default)s)")
    add("--batch", type=at_least(1), default=1, help="sequences a rank, of built-in models (default: %(default)s)")
    add("--seq", type=at_least(1), default=2048, help="tokens a sequence, of built-in models (default: %(default)s)")


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        allow_abbrev=False,
        help="say how far a simulated step is from a measured one",
        description="Compare a trace that plan --trace wrote with one that torch.profiler exported on a rank, and "
        "print the error of the prediction for each collective and for the step. Exits with 1 if they have other "
        "collectives.",
    )
    parser.set_defaults(check=lambda args: None, start=run_compare)
    parser.add_argument("simulated", metavar="SIMULATED", type=Path, help="written by plan --trace")
    parser.add_argument("measured", metavar="MEASURED", type=Path, help="of torch.profiler, .json or .json.gz")


def _add_calibrate(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        allow_abbrev=False,
        help="measure this machine, and write a hardware profile",
        description="Measure matrix products, copies, launches and collectives on all ranks at once, and write a "
        "hardware profile that the cost model reads. Under torchrun on several nodes, links within and between nodes "
        "are told apart.",
    )
    parser.set_defaults(check=check_calibrate, start=on_ranks, run=run_calibrate)
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="to write: .toml or .json")
    add("--name", help="of the profile (default: that of the file)")
    add("--nproc", type=at_least(2), default=2, help="ranks to start; torchrun decides itself (default: %(default)s)")
    add("--largest", type=at_least(1), metavar="MIB", help="of the collectives (default: 16 MiB on CPU, 256 on GPUs)")


def reshard(text: str) -> bool | int:
    named = {"true": True, "false": False}
    return named[text.lower()] if text.lower() in named else at_least(1)(text)


def at_least_each(least: int) -> Callable[[str], list[int]]:
    return lambda text: [at_least(least)(part) for part in text.split(",")]


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    return parse


def not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number, 0 or more, not {text}")
    return value


def check_parity(args: argparse.Namespace) -> None:
    """Find what is wrong before any rank is started.

    Raises:
        UsageError: an unknown backend, or a factory that cannot be found.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if args.backend not in known:
        raise UsageError(f"unknown backend {args.backend!r}; known are {', '.join(known)}")
    load_factory(args.factory)


def check_plan(args: argparse.Namespace) -> None:
    """Likewise.

    Raises:
        UsageError: an unknown model, hardware or choice, or ranks that do not divide into the replicas.
    """
    try:
        args.memory = args.memory and parse_bytes(args.memory)
        args.config = PassConfig(bucket=_bucket(args.bucket), regather=args.regather, hardware=args.hardware)
        if ":" not in args.factory:
            llama(args.factory, args.batch, args.seq)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if args.search and (args.trace or args.replicas > 1 or args.reshard is not None or args.bucket != "module"):
        raise UsageError("--search chooses --bucket, --reshard and --replicas itself, and writes no --trace")
    if args.trace is not None and not os.access(args.trace.parent, os.W_OK):
        raise UsageError(f"cannot write to directory {args.trace.parent}")
    for ranks in args.world_size:
        if ranks % args.replicas or ranks == args.replicas:
            raise UsageError(f"{ranks} ranks do not divide into {args.replicas} replicas of two shards or more")
    if ":" in args.factory:
        load_factory(args.factory)


def _bucket(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def check_calibrate(args: argparse.Namespace) -> None:
    """Likewise.

    Raises:
        UsageError: the file cannot be written, or there are too few ranks.
    """
    if not is_file_name(args.file.name):
        raise UsageError(f"a hardware profile is a .toml or a .json file, not {args.file.name!r}")
    if not os.access(args.file.parent, os.W_OK):
        raise UsageError(f"cannot write to directory {args.file.parent}")
    if os.environ.get("WORLD_SIZE") == "1":
        raise UsageError("calibrate measures collectives and needs 2 ranks or more; torchrun started 1")


def check_devices(ranks: int) -> None:
    """Find whether ranks of this machine have a device each, if there are any devices.

    Raises:
        UsageError: they have not.
    """
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        raise UsageError(
            f"--nproc {ranks} needs a CUDA device for each rank, and there are {torch.cuda.device_count()}; "
            "take fewer ranks, or set CUDA_VISIBLE_DEVICES= to use the CPU"
        )


def load_factory(spec: str) -> Factory:
    """The callable that ``MODULE:FACTORY`` names; MODULE is a module's name or the path of a file.

    Raises:
        UsageError: there is no such module, file or attribute, it cannot be imported, or it is not callable.
    """
    module_name, _, attribute = spec.rpartition(":")
    if not module_name or not attribute:
        raise UsageError(f"expected MODULE:FACTORY, got {spec!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the console script, unlike `python -m`, does not look here by itself
    path = Path(module_name) if module_name.endswith(".py") else None
    if path and not path.is_file():
        raise UsageError(f"no such file: {path}")
    try:
        module = _import_file(path) if path else importlib.import_module(module_name)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"cannot import {module_name}: {type(error).__name__}: {reason}") from error
    try:
        factory = operator.attrgetter(attribute)(module)
    except AttributeError:
        raise UsageError(f"{module_name} has no attribute {attribute!r}") from None
    if not callable(factory):
        raise UsageError(f"{spec} is not callable but of type {type(factory).__name__}")
    return factory


def _import_file(path: Path) -> ModuleType:
    name = f"_parity_{path.stem}"  # a name that hides no other module
    if name in sys.modules:
        return sys.modules[name]
    sys.path.insert(0, str(path.resolve().parent))  # as for `python FILE`: what lies beside it can be imported
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# -- ranks ------------------------------------------------------------------------------------------------------------


def on_ranks(args: argparse.Namespace) -> int:
    """Run on torchrun's ranks, or on some of this machine; returns the exit code.

    Raises:
        RankFailed, UsageError: some rank raised or died; ranks do not have a device each.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        run_under_torchrun(args)
    check_devices(args.nproc)
    return run_on_local_ranks(args)


def run_under_torchrun(args: argparse.Namespace) -> NoReturn:
    leave(run_rank(args, int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))))


def run_on_local_ranks(args: argparse.Namespace) -> int:
    """Run on ``args.nproc`` ranks of this machine; returns the exit code.

    Raises:
        RankFailed: some rank raised or died.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the ranks, which share this machine's cores
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(_rank_main, args.nproc, args, directory)
        return int(Path(directory, "exit_code").read_text())


def _rank_main(rank: int, world: int, args: argparse.Namespace, directory: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    try:
        exit_code = run_rank(args, rank, dist.FileStore(f"{directory}/rendezvous", world))
    except FactoryError as error:
        raise UsageError(str(error)) from error
    if rank == 0:
        Path(directory, "exit_code").write_text(str(exit_code))


# -- on each rank -----------------------------------------------------------------------------------------------------


def run_rank(args: argparse.Namespace, local_rank: int, store: dist.Store | None = None) -> int:
    """Run the command with a process group; returns its exit code, which is the same on all ranks."""
    rendezvous: dict[str, Any] = {} if store is None else {"store": store}
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        rendezvous["device_id"] = torch.device("cuda", local_rank)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, rank=rank, world_size=world, **rendezvous)
    exit_code = args.run(args)
    dist.destroy_process_group()
    return exit_code


def run_parity(args: argparse.Namespace) -> int:
    """Compare, and print the report on the first rank; 0 if it passed."""
    report = compare_training(
        load_factory(args.factory),
        steps=args.steps,
        backend=args.backend,
        learning_rate=args.lr,
        fullgraph=not args.allow_graph_breaks,
        seed=args.seed,
    )
    passed = report.bitwise_equal if args.tolerance is None else report.within(args.tolerance)
    if dist.get_rank() == 0:
        print(report)
        if args.tolerance is not None:
            print(f"within tolerance {args.tolerance:g}: {'yes' if passed else 'no'}", flush=True)
    return 0 if passed else 1


def run_calibrate(args: argparse.Namespace) -> int:
    """Measure, and write the profile on the first rank."""
    measured = calibrate(args.name or args.file.stem, args.largest and args.largest * MIB)
    if dist.get_rank() == 0:
        measured.write(args.file)
        print(f"{args.file}: profile {measured.name} of {dist.get_world_size()} ranks", flush=True)
    return 0


# -- without ranks ----------------------------------------------------------------------------------------------------


def run_plan(args: argparse.Namespace) -> int:
    """Plan for each number of ranks, or search for each, and print what comes out; 1 if for some nothing fits.

    Raises:
        UsageError: the model cannot be planned.
    """
    factory = load_factory(args.factory) if ":" in args.factory else llama(args.factory, args.batch, args.seq)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, args.dtype), reduce_dtype=torch.float32)
    try:
        return _search(args, factory, policy) if args.search else _plan(args, factory, policy)
    except torch_compat.NOT_ONE_GRAPH as error:
        raise UsageError(f"{args.factory} does not compile into one graph: {_in_one_line(error)}") from error


def run_compare(args: argparse.Namespace) -> int:
    """Compare, and print; 1 if the two are not of the same collectives.

    Raises:
        UsageError: a file is not what it should be.
    """
    try:
        comparison = trace_compare.compare(args.simulated, args.measured)
    except TraceError as error:
        raise UsageError(str(error)) from error
    print(trace_compare.as_table(comparison), end="", flush=True)
    return 0 if comparison.same_model else 1


def _search(args: argparse.Namespace, factory: Factory, policy: MixedPrecisionPolicy) -> int:
    fits = True
    for ranks in args.world_size:
        tried = plan_search.settings(ranks, args.hardware)
        planned = plan_search.plans(factory, ranks, args.config, tried, mp_policy=policy)
        found = [*tqdm(planned, desc=f"{ranks} ranks", total=len(tried), unit="plan", disable=None, leave=False)]
        print(plan_search.as_advice(found, args.memory), flush=True)
        fits &= args.memory is None or any(plan.peak <= args.memory for _, plan in found)
    return 0 if fits else 1


def _plan(args: argparse.Namespace, factory: Factory, policy: MixedPrecisionPolicy) -> int:
    how = {"mp_policy": policy, "reshard_after_forward": args.reshard}
    plans = [
        make_plan(factory, ranks, args.config, args.replicas, **how)
        for ranks in tqdm(args.world_size, desc="planning", unit="world", disable=None, leave=False)
    ]
    print(f"{args.factory} on {args.hardware}, {args.dtype}, buckets: {args.bucket}")
    print(as_table(plans, args.memory), end="", flush=True)
    if args.trace is not None:
        write_trace(plans, args.trace)
    return 0 if args.memory is None or all(plan.peak <= args.memory for plan in plans) else 1


def _in_one_line(error: Exception) -> str:
    """What the error says first, and the last place in the user's code that it names."""
    text = str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    places = re.findall(r'File "([^"]+)", line (\d+)', text)
    return f"{first} ({places[-1][0]}:{places[-1][1]})" if places else first


def _fail_alike(message: str) -> NoReturn:
    """All ranks find the same fault in their arguments: the first one says so."""
    if os.environ.get("RANK", "0") == "0":
        _fail(message, 2)
    sys.exit(2)


def _fail(message: str, exit_code: int) -> NoReturn:
    print(f"fsdp-compile: error: {message}", file=sys.stderr, flush=True)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
