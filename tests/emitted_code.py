"""What the wrapper code that Inductor emits does, in order, and whether it leaves memory of collectives alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from fake_world import run_step
from torch._functorch import config as functorch_config
from torch._inductor.utils import get_code
from torch.fx import Graph, Node

from fsdp_compile.passes.graph_view import GATHERS, REDUCTIONS, WAIT

MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

LAUNCH = re.compile(r"(\w+) = torch\.ops\._c10d_functional\.(\w+)\.default\((.*)\)")
WAITED = re.compile(r"torch\.ops\._c10d_functional\.wait_tensor\.default\((\w+)\)")
PART = re.compile(r"(\w+) = (\w+)\[\d+\]")
ALIAS = re.compile(r"(\w+) = (?:reinterpret_tensor\()?(\w+)(?:,.*\)|; del \w+)?  # (?:alias|reuse)")
KERNEL = re.compile(r"(\w+) = async_compile\.cpp_pybinding\(\[(.*?)\], ")
CALL = re.compile(r"(?:(\w+) = )?([\w.]+)\((.*)\)")
NO_ACCESS = ("assert_size_stride", "assert_alignment")


def emitted(model: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[str, str]:
    """The wrapper code of forward and backward. Compiles no kernels and runs nothing, so it is fast."""
    compiled = torch.compile(model, fullgraph=True, options={**options, "fx_graph_cache": False})
    errors: list[Exception] = []

    def step() -> None:
        try:
            run_step(compiled, *inputs)
        except Exception as error:  # what stands in for the forward's code returns nothing, which nobody expects
            errors.append(error)

    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        codes = [code for code in get_code(step) if "def call(" in code]  # the others are kernels
    if len(codes) != 2:
        raise AssertionError(f"{len(codes)} graphs compiled") from errors[0]
    forward, backward = codes
    return forward, backward


def body(code: str) -> list[str]:
    """The lines of the function that runs, without their indent and without mere comments."""
    _, _, after = code.partition("def call(self, args):\n")
    function, _, _ = after.partition("\nrunner = ")
    return [line.strip() for line in function.splitlines() if not line.lstrip().startswith("#")]


def events(code: str) -> list[str]:
    """Launches "L0", "L1", ..., waits for them "W0", ... (one for each output), and matrix products "mm"."""
    found: list[str] = []
    number: dict[str, int] = {}
    for line in body(code):
        if match := LAUNCH.match(line):
            number[match[1]] = len(set(number.values()))
            found.append(f"L{number[match[1]]}")
        elif (match := PART.match(line)) and match[2] in number:
            number[match[1]] = number[match[2]]
        elif match := WAITED.match(line):
            found.append(f"W{number[match[1]]}")
        elif line.startswith(("extern_kernels.mm(", "extern_kernels.addmm(")):
            found.append("mm")
    return found


def events_in(graph: Graph) -> list[str]:
    """The same of an FX graph."""
    found: list[str] = []
    number: dict[Node, int] = {}
    for node in graph.nodes:
        if node.target in (*GATHERS, *REDUCTIONS):
            number[node] = len(number)
            found.append(f"L{number[node]}")
        elif node.target is WAIT:
            output = node.args[0]
            found.append(f"W{number[output if output in number else output.args[0]]}")
        elif node.target in MATMULS:
            found.append("mm")
    return found


class Memory:
    """Follows names of buffers through wrapper code; complains of an access that a collective under way forbids.

    Attributes:
        of: the memory behind each name that is alive.
        sent: by what is waited for, memory that its launch reads until then.
        received: memory that a launch writes until a wait.
    """

    def __init__(self, code: str) -> None:
        self.of: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self.received: set[int] = set()
        self.parts: dict[str, list[int]] = {}  # coalesced launch -> memory of what it sends
        self.inputs: set[str] = set()
        self.writes = {
            name: [not kind.startswith("'const") for kind in kinds.split(", ")] for name, kinds in KERNEL.findall(code)
        }
        self._next = 0

    def run(self, line: str) -> None:
        """Take in one line."""
        if not line or line.startswith(NO_ACCESS):
            return
        if line.endswith("= args"):
            self.inputs.update(re.findall(r"\w+", line.removesuffix("= args")))
        elif match := LAUNCH.match(line):
            self._launch(*match.groups())
        elif match := WAITED.match(line):
            self._wait(match[1])
        elif (match := PART.match(line)) and match[2] in self.parts:
            self._part(match[1], match[2], int(line.partition("[")[2].rstrip("]")))
        elif match := ALIAS.match(line):
            self._alias(*match.groups())
            if "; del " in line:
                self._drop(match[2], reused=True)
        elif line.startswith("del "):
            self._drop(line.removeprefix("del "))
        elif line.startswith("return"):
            self._access(line, [])
            assert not self.received and not self.sent, "never waited for"
        elif match := CALL.match(line):
            self._call(*match.groups())

    def memory(self, name: str) -> int:
        """Of this name; new if it had none."""
        if name not in self.of:
            self._next += 1
            self.of[name] = self._next
        return self.of[name]

    def _names(self, text: str) -> list[str]:
        return [name for name in re.findall(r"\w+", text) if name in self.of or name in self.inputs]

    def _access(self, line: str, written: list[str]) -> None:
        for name in self._names(line):
            assert self.memory(name) not in self.received, f"{name} is used before its wait: {line}"
        for name in written:
            assert self.memory(name) not in self.sent.values(), f"{name} is written while it is being sent: {line}"

    def _launch(self, name: str, kind: str, arguments: str) -> None:
        self._access(arguments, [])
        sent = [self.memory(argument) for argument in self._names(arguments)]
        if kind.endswith("_coalesced"):
            self.parts[name] = sent
        else:
            self._receive(name, sent[0])

    def _part(self, name: str, launch: str, index: int) -> None:
        self._receive(name, self.parts[launch][index])

    def _receive(self, name: str, sent: int) -> None:
        self.of.pop(name, None)
        self.received.add(self.memory(name))
        self.sent[name] = sent

    def _wait(self, name: str) -> None:
        self.received.remove(self.memory(name))  # else a second wait, or one without a launch
        del self.sent[name]

    def _alias(self, name: str, other: str) -> None:
        self.of[name] = self.memory(other)

    def _drop(self, name: str, reused: bool = False) -> None:
        memory = self.of.pop(name, None)
        if memory is not None and (reused or memory not in self.of.values()):
            assert memory not in self.sent.values(), f"{name} is given up while it is being sent"
            assert memory not in self.received, f"{name} is given up before its wait"

    def _call(self, result: str | None, function: str, arguments: str) -> None:
        names = [*map(str.strip, arguments.split(","))]
        if function in self.writes:
            written = [name for name, writes in zip(names, self.writes[function], strict=True) if writes]
        elif function.endswith("_.default"):
            written = self._names(arguments)
        else:
            written = re.findall(r"out=(\w+)", arguments)
        self._access(arguments, [name for name in written if name in self.of])
        if result is not None:
            self.of.pop(result, None)
            self.memory(result)


def check_memory(code: str) -> None:
    """Assert that no launch's input is written or given up, and no output used, before the wait."""
    memory = Memory(code)
    for line in body(code):
        memory.run(line)
