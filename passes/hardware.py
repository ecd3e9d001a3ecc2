"""What a plan must know of the machine: :class:`HardwareProfile`, shipped ones and those of users, as files.

A profile is a TOML or JSON file; the shipped ones in ``profiles/`` say where each number is from, and serve as
templates. ``fsdp-compile calibrate`` measures one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import sympy
import torch

from . import profile_files
from .alpha_beta import ALGORITHMS, ROUNDS, Line, Link, Number, line_across, line_within

SHIPPED = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Network:
    """One level of the network: the links within a node, or those between nodes.

    Attributes:
        latency, bandwidth, overhead: see ``alpha_beta.Link``.
        algorithm: "ring", "tree" or "direct".
        collectives: kinds of collectives that find another link than that, as measured; in order of their names.
    """

    latency: float
    bandwidth: float
    overhead: float = 0.0
    algorithm: str = "ring"
    collectives: tuple[tuple[str, Link], ...] = ()

    def link(self, kind: str) -> Link:
        """What collectives of ``kind`` find."""
        return dict(self.collectives).get(kind) or Link(self.latency, self.bandwidth, self.overhead)


@dataclass(frozen=True)
class HardwareProfile:
    """One rank's share of a machine, and its links. Seconds, bytes per second, FLOP per second.

    Attributes:
        peak_flops: by name of dtype, in order of names; a dtype that is missing computes as "float32".
        memory_bandwidth: of the memory that the rank computes in, reads and writes together.
        kernel_launch: added to each kernel's time: the gap before it while launches are ahead of the device.
        host_bandwidth: between host and device memory, in one direction.
        ranks_in_node: that ``within`` connects; more of them are connected by ``across``.
        achievable_flops, achievable_bandwidth: fractions of ``peak_flops`` and of ``memory_bandwidth`` that large
            kernels reach; the cost model computes with the products.

    Raises:
        ValueError: a number is impossible; the message names it.
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...]
    memory_bandwidth: float
    kernel_launch: float
    host_bandwidth: float
    ranks_in_node: int
    within: Network
    across: Network
    achievable_flops: float = 1.0
    achievable_bandwidth: float = 1.0

    def __post_init__(self) -> None:
        _check(self)

    def flop_rate(self, dtype: torch.dtype) -> float:
        """FLOP/s that a large matrix product of ``dtype`` reaches."""
        peaks = dict(self.peak_flops)
        return peaks.get(str(dtype).removeprefix("torch."), peaks["float32"]) * self.achievable_flops

    @property
    def byte_rate(self) -> float:
        """Bytes/s that a large kernel reads and writes."""
        return self.memory_bandwidth * self.achievable_bandwidth

    def line(self, kind: str, size: Number, in_node: int | None = None) -> Line:
        """Time of a collective as a function of the bytes of the whole.

        Args:
            kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast".
            size: ranks in the group, an int or a positive sympy integer.
            in_node: how many of them sit in each node; default: as many as fit.
        """
        most = in_node or self.ranks_in_node
        near, far = self.within.link(kind), self.across.link(kind)
        inside = line_within(kind, size, near, self.within.algorithm)
        outside = line_across(kind, size, most, near, far, self.across.algorithm)
        if isinstance(size, int):
            return Line(0.0, 0.0) if size == 1 else inside if size <= most else outside

        def by_size(inside: sympy.Expr, outside: sympy.Expr) -> sympy.Expr:
            return sympy.Piecewise((0, sympy.Eq(size, 1)), (inside, size <= most), (outside, True))

        return Line(by_size(inside.fixed, outside.fixed), by_size(inside.per_byte, outside.per_byte))

    def on(self, network: Network) -> HardwareProfile:
        """The same computer on another network, which connects any two ranks alike."""
        return replace(self, within=network, across=network)

    def digest(self) -> bytes:
        """Hash of all numbers, for keys of compile caches."""
        return hashlib.sha256(repr(astuple(self)).encode()).digest()

    @classmethod
    def read(cls, path: str | Path) -> HardwareProfile:
        """Read a ``.toml`` or ``.json`` file, where a table stands for a tuple of pairs.

        Raises:
            ValueError: it has another suffix, is not of that form, or has unknown, missing or impossible entries.
            OSError: it cannot be read.
        """
        try:
            return _from_entries(profile_files.read(Path(path)))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def write(self, path: str | Path) -> None:
        """Write a ``.toml`` or ``.json`` file that ``read`` reads.

        Raises:
            ValueError: it has another suffix.
            OSError: it cannot be written.
        """
        profile_files.write(Path(path), profile_files.plain(self))


def profile(name: str) -> HardwareProfile:
    """A shipped profile by its name, or that of a user by the path of its file.

    Raises:
        ValueError: there is none, or its file is wrong.
    """
    known = sorted(path.stem for path in SHIPPED.glob("*.toml"))
    if name in known:
        return _shipped(name)
    if not profile_files.is_file_name(name):
        raise ValueError(
            f"unknown hardware profile {name!r}; known are {', '.join(known)}, and paths of .toml and .json files"
        )
    if not Path(name).is_file():
        raise ValueError(f"no such hardware profile: {name}")
    return HardwareProfile.read(name)


@cache
def _shipped(name: str) -> HardwareProfile:
    return HardwareProfile.read(SHIPPED / f"{name}.toml")


def _from_entries(entries: Mapping[str, Any]) -> HardwareProfile:
    levels = {level: _network(level, entries[level]) for level in ("within", "across") if level in entries}
    peaks = {key: profile_files.pairs(key, entries[key]) for key in ("peak_flops",) if key in entries}
    return profile_files.build(HardwareProfile, "", {**entries, **levels, **peaks})


def _network(level: str, entries: Any) -> Network:
    entries = profile_files.table(level, entries)
    where = f"{level}.collectives"
    links = profile_files.pairs(where, entries.get("collectives", {}))
    built = tuple(
        (kind, profile_files.build(Link, f"{where}.{kind}", profile_files.table(f"{where}.{kind}", link)))
        for kind, link in links
    )
    return profile_files.build(Network, level, {**entries, "collectives": built})


# -- what is possible -------------------------------------------------------------------------------------------------


def _check(profile: HardwareProfile) -> None:
    for name in ("memory_bandwidth", "host_bandwidth"):
        _check_number(name, getattr(profile, name))
    _check_number("kernel_launch", profile.kernel_launch, zero=True)
    for name in ("achievable_flops", "achievable_bandwidth"):
        _check_number(name, getattr(profile, name), most=1)
    _check_dtypes(profile.peak_flops)
    if not isinstance(profile.ranks_in_node, int) or profile.ranks_in_node < 1:
        raise ValueError(f"ranks_in_node must be a whole number, 1 or more, not {profile.ranks_in_node!r}")
    for level in ("within", "across"):
        _check_network(level, getattr(profile, level))


def _check_dtypes(peaks: tuple[tuple[str, float], ...]) -> None:
    for name, peak in peaks:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"peak_flops has {name!r}, which is no dtype of torch")
        _check_number(f"peak_flops.{name}", peak)
    if "float32" not in dict(peaks):
        raise ValueError("peak_flops lacks 'float32', as which dtypes that are not in it compute")


def _check_network(level: str, network: Network) -> None:
    if network.algorithm not in ALGORITHMS:
        raise ValueError(f"{level}.algorithm must be one of {', '.join(ALGORITHMS)}, not {network.algorithm!r}")
    for kind, _ in network.collectives:
        if kind not in ROUNDS:
            raise ValueError(f"{level}.collectives has {kind!r}; known are {', '.join(ROUNDS)}")
    links: dict[str, Any] = {f"{level}.collectives.{kind}": link for kind, link in network.collectives}
    links[level] = network
    for where, link in links.items():
        _check_number(f"{where}.bandwidth", link.bandwidth)
        _check_number(f"{where}.latency", link.latency, zero=True)
        _check_number(f"{where}.overhead", link.overhead, zero=True)


def _check_number(where: str, value: Any, zero: bool = False, most: float = math.inf) -> None:
    """Finite, at most ``most``, and above 0, or 0 if that is allowed."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not 0 <= value <= most or (value == 0 and not zero):
        limits = ("0 or more" if zero else "above 0") + ("" if most == math.inf else f" and at most {most:g}")
        raise ValueError(f"{where} must be a finite number {limits}, not {value!r}")
