"""What a pass is told, and what it reports."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, MutableSequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cache
from pathlib import Path

from torch.fx import Graph

from .graph_view import all_reduces, copies, frees, gathers, reductions
from .hardware import profile, shipped_digest

Observer = Callable[[str, Graph], None]
Parts = Mapping[str, Graph]  # by name, in the order in which they run


@dataclass(frozen=True)
class PassConfig:
    """The choices a user has. Part of the key of compile caches, but for the last three, which change no graph.

    Attributes:
        bucket: which parameters travel in one collective, and which gradients.

            - "module", the default: those of one ``fully_shard`` module, as in eager; bits are equal to it.
            - "none": each alone.
            - a number of bytes, or a text like "25MB": across modules in order of use, until a bucket is so large.
              Counted is the whole: what a gather brings, what a reduction takes; 1 MB is a million bytes, 1 MiB 2**20.
            - "auto": across modules, as is fastest by the cost model on ``hardware``, in no more memory than
              ``memory_budget``; but those of modules where these are faster; ``plan`` says how. It goes by the time
              and the memory that compute takes, so all ranks must trace tensors of equal sizes.

            All but the default may round sums in another way where three ranks and more reduce, as transports add the
            elements of a buffer in an order that depends on where in it they are; gathers never change bits.
        schedule: launch gathers ahead of their use, and let reductions run on; otherwise wait for each at once.
        memory_budget: peak of live bytes, as ``memory`` counts them, that ``schedule`` may fill; the order of
            collectives then depends on the sizes of activations, so all ranks must trace equal ones. ``None``: the peak
            of FSDP2's eager order, and, but for "auto", its order of collectives. On gloo, what small parameters are
            packed in comes on top.
        regather: which groups the backward gathers again. ``None``: those that ``fully_shard`` says. "auto": of these,
            all but some that are kept where that makes a step faster, by the cost model on ``hardware``, in no more
            memory than ``memory_budget``, or ``None``: than without keeping any; ``keep_unsharded`` says how. All ranks
            must trace tensors of equal sizes.
        hardware: name of a shipped hardware profile ("h100") or path of a file; ``None``: the one for the device.
        measure: simulate the step before and after each pass, for its report; that makes compiling slower.
        dump: directory for a text file after each pass, with its reports and the graphs. A compile that is served from
            a cache runs no passes, and writes nothing.
        verify: check graphs after each pass, see ``verify``; an ``InvalidGraph`` names the pass, the node and what is
            wrong with it. A compile that is served from a cache runs no passes, and verifies nothing.

    Raises:
        ValueError: a choice is none of these.
    """

    bucket: str | int = "module"
    schedule: bool = True
    memory_budget: int | None = None
    regather: str | None = None
    hardware: str | None = None
    measure: bool = False
    dump: str | None = None
    verify: bool = False

    def __post_init__(self) -> None:
        if self.bucket not in BUCKETS:
            _bytes(self.bucket)
        if not isinstance(self.schedule, bool):
            raise ValueError(f"schedule must be True or False, not {self.schedule!r}")
        if self.memory_budget is not None and not _is_number(self.memory_budget, at_least=0):
            raise ValueError(f"memory_budget must be a whole number of bytes or None, not {self.memory_budget!r}")
        if self.regather not in (None, "auto"):
            raise ValueError(f"regather must be None or 'auto', not {self.regather!r}")
        if self.hardware is not None:
            profile(self.hardware)

    @property
    def bucket_bytes(self) -> int | None:
        """The size of buckets, if that is what was chosen."""
        return None if self.bucket in BUCKETS else _bytes(self.bucket)

    def digest(self) -> bytes:
        """Hash of the choices, what they stand for, and the source of all passes: another source, another result."""
        machines = profile(self.hardware).digest() if self.hardware else shipped_digest()
        choices = astuple(replace(self, measure=False, dump=None, verify=False))
        return hashlib.sha256(repr(choices).encode() + machines + source_digest(Path(__file__).parent)).digest()


BUCKETS = ("module", "none", "auto")
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _is_number(value: object, at_least: int) -> bool:
    """Whether ``value`` is an int, of which bools are none here, and that large."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _bytes(size: object) -> int:
    """A size of buckets in bytes.

    Raises:
        ValueError: it is none.
    """
    if _is_number(size, at_least=1):
        return size  # type: ignore[return-value]
    try:
        return parse_bytes(size)
    except ValueError:
        choices = ", ".join(map(repr, BUCKETS))
        message = f'bucket must be {choices}, or a size in bytes like 25_000_000 or "25MB", not {size!r}'
        raise ValueError(message) from None


def parse_bytes(text: object) -> int:
    """The bytes that a text like "25MB" stands for, one at least.

    Raises:
        ValueError: it is no such text.
    """
    parsed = re.fullmatch(rf"(\d+(?:\.\d+)?) *({'|'.join(UNITS)})", text) if isinstance(text, str) else None
    if parsed is None or float(parsed[1]) * UNITS[parsed[2]] < 1:
        raise ValueError(f"expected a size like 80GiB or 25MB, not {text!r}")
    return int(float(parsed[1]) * UNITS[parsed[2]])


@cache
def source_digest(directory: Path) -> bytes:
    """Hash of the Python files in ``directory``, for keys of compile caches."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


@dataclass(frozen=True)
class Traffic:
    """The collectives of a graph, and what is done for them. Bytes are those of this rank's inputs, padding included.

    Attributes:
        copies: kernels of transitions: casts, padding, packing and whatever else reads and writes data.
    """

    gathers: int
    gather_bytes: int
    reductions: int
    reduction_bytes: int
    all_reduces: int
    all_reduce_bytes: int
    copies: int
    frees: int

    @classmethod
    def of(cls, graph: Graph) -> Traffic:
        """Count what is in ``graph``."""
        gathered, reduced, all_reduced = (list(kind(graph)) for kind in (gathers, reductions, all_reduces))
        return cls(
            *(len(gathered), sum(each.input_bytes for each in gathered)),
            *(len(reduced), sum(each.input_bytes for each in reduced)),
            *(len(all_reduced), sum(each.input_bytes for each in all_reduced)),
            *(len(copies(graph)), len(frees(graph))),
        )

    def __add__(self, other: Traffic) -> Traffic:
        """That of both graphs."""
        return Traffic(*map(int.__add__, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Effect:
    """How a step goes, by simulation.

    Attributes:
        exposed: seconds that compute stands still for collectives.
        peak: of live bytes.
    """

    exposed: float
    peak: int


@dataclass(frozen=True)
class Report:
    """What one pass did to one graph.

    Attributes:
        changes: 0 if it left the graph as it was.
        step_before, step_after: of the whole step, if the configuration says to measure it.
    """

    name: str
    changes: int
    before: Traffic
    after: Traffic
    step_before: Effect | None = None
    step_after: Effect | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.changes} changes; {self.figures}"

    @property
    def figures(self) -> str:
        """What is not zero of ``before`` and ``after``, in words; of the step too, if that was measured."""
        rows = zip(fields(self.before), astuple(self.before), astuple(self.after), strict=True)
        steps = [f"{each.name.replace('_', ' ')} {old} -> {new}" for each, old, new in rows if old or new]
        if self.step_before is not None and self.step_after is not None:
            old, new = self.step_before, self.step_after
            steps.append(f"exposed {old.exposed * 1e3:.3f} -> {new.exposed * 1e3:.3f} ms")
            steps.append(f"peak {old.peak} -> {new.peak} bytes")
        return ", ".join(steps)


@dataclass
class PassContext:
    """What the passes of one pipeline share.

    Attributes:
        config: the user's choices.
        observer: called with a stage's name ("joint before", "forward after", ...) and its graph, which it must not
            change. "After" is the plan, for any transport; ``gloo`` rewrites graphs later.
        reports: one for each pass run, in order.
    """

    config: PassConfig = field(default_factory=PassConfig)
    observer: Observer | None = None
    reports: MutableSequence[Report] = field(default_factory=list)

    def observe(self, stage: str, graph: Graph) -> None:
        """Show ``graph`` to the observer."""
        if self.observer is not None:
            self.observer(stage, graph)
