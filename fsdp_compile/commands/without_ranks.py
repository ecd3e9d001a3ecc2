"""What commands share that trace a model on ranks which do not exist."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tqdm import tqdm

from .. import torch_compat
from ..factory import BY_FACTORY, Factory, language_model
from ..local_ranks import UsageError
from ..models import SIZES
from ..passes import PassConfig
from ..policies import MixedPrecisionPolicy
from .arguments import at_least, at_least_each, load_factory, mesh_shapes, reshard

DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the ranks, the machine, and what a user can choose."""
    add = parser.add_argument
    add("factory", metavar="MODULE:FACTORY", help=f"as for parity, or a model: {', '.join(SIZES)}")
    add("--world-size", type=at_least_each(2), metavar="N[,N...]", help="ranks (default: 8)")
    add("--replicas", type=at_least(1), default=1, help="that hold the same shards (HSDP); default: %(default)s")
    add("--mesh", type=mesh_shapes, metavar="RxS[,RxS...]", help="instead of both: replicas, and shards, like 4x8")
    add("--hardware", default="h100", help="a shipped profile or a file of calibrate's (default: %(default)s)")
    add("--bucket", default="module", help='"module", "auto", "none" or a size like 25MB (default: %(default)s)')
    add("--regather", choices=["auto"], help='"auto": keep what saves time unsharded until the backward')
    add("--reshard", type=reshard, help="after forward: true, false or to how many ranks (default: all but the root)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="that is gathered and computed in (default: %(default)s)")
    add("--batch", type=at_least(1), default=1, help="sequences a rank, of built-in models (default: %(default)s)")
    add("--seq", type=at_least(1), default=2048, help="tokens a sequence, of built-in models (default: %(default)s)")


def check(args: argparse.Namespace) -> None:
    """Find what is wrong before anything is traced; adds ``config``, and ``worlds``: numbers of ranks and of replicas.

    Raises:
        UsageError: an unknown model, hardware or choice, or ranks that do not divide into the replicas.
    """
    args.bucket = int(args.bucket) if args.bucket.isdecimal() else args.bucket
    try:
        args.config = PassConfig(bucket=args.bucket, regather=args.regather, hardware=args.hardware)
        factory_of(args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    args.worlds = _worlds(args)


def _worlds(args: argparse.Namespace) -> list[tuple[int, int]]:
    if args.mesh is not None and (args.world_size is not None or args.replicas > 1):
        raise UsageError("--mesh says how many ranks and replicas there are: leave out --world-size and --replicas")
    meshes = [(replicas * shards, replicas) for replicas, shards in args.mesh or []]
    worlds = meshes or [(ranks, args.replicas) for ranks in args.world_size or [8]]
    for ranks, replicas in worlds:
        if ranks % replicas or ranks == replicas:
            raise UsageError(f"{ranks} ranks do not divide into {replicas} replicas of two shards or more")
    return worlds


def factory_of(args: argparse.Namespace) -> Factory:
    """What makes the model that is named."""
    return load_factory(args.factory) if ":" in args.factory else language_model(args.factory, args.batch, args.seq)


def policy_of(args: argparse.Namespace) -> MixedPrecisionPolicy:
    """Parameters are gathered in the chosen dtype, gradients reduced in float32."""
    return MixedPrecisionPolicy(param_dtype=getattr(torch, args.dtype), reduce_dtype=torch.float32)


def heading(args: argparse.Namespace, sharding: str) -> str:
    """What was traced, for what; a factory that shards its model chooses the dtype too."""
    dtype = "" if sharding == BY_FACTORY else f", {args.dtype}"
    return f"{args.factory} on {args.hardware}{dtype}"


def each_world(args: argparse.Namespace, doing: str) -> Iterator[tuple[int, int]]:
    """Numbers of ranks and of replicas, with a bar that shows how far it is."""
    return iter(tqdm(args.worlds, desc=doing, unit="world", disable=None, leave=False))


@contextmanager
def one_graph(args: argparse.Namespace) -> Iterator[None]:
    """Inside, a graph break that is not allowed is said in one line.

    Raises:
        UsageError: there is one.
    """
    try:
        yield
    except torch_compat.NOT_ONE_GRAPH as error:
        raise UsageError(f"{args.factory} does not compile into one graph: {_in_one_line(error)}") from error


def _in_one_line(error: Exception) -> str:
    """What the error says first, and the last place in the user's code that it names."""
    text = str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    places = re.findall(r'File "([^"]+)", line (\d+)', text)
    return f"{first} ({places[-1][0]}:{places[-1][1]})" if places else first
