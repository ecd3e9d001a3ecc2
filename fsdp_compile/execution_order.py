"""In which order modules run, as seen so far: what will likely run next can then be gathered ahead of time.

Both orders are those of the program, hence the same on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fsdp_state import FSDPState

MAX_FORWARDS = 4096  # that are remembered without a backward


class ForwardOrder:
    """Forwards with gradients since the last backward, which will go through them from the end."""

    def __init__(self) -> None:
        self._forwards: list[FSDPState] = []
        self._awaited: dict[FSDPState, list[int]] = {}  # positions of the forwards whose backward is still to come

    def record(self, state: FSDPState) -> None:
        if len(self._forwards) >= MAX_FORWARDS:
            self.forget()
        self._awaited.setdefault(state, []).append(len(self._forwards))
        self._forwards.append(state)

    def begin_backward(self, state: FSDPState) -> list[FSDPState]:
        """The backward of the last forward of ``state`` begins; returns what ran before that forward, if anything."""
        awaited = self._awaited.get(state)
        position = awaited.pop() if awaited else 0
        return [self._forwards[position - 1]] if position else []

    def awaits_backward(self, state: FSDPState) -> bool:
        """Whether a backward of some forward of ``state`` is still to come."""
        return bool(self._awaited.get(state))

    def forget(self) -> None:
        self._forwards.clear()
        self._awaited.clear()


class CallPrediction:
    """What a forward of the root calls next, as long as it goes the same way as the forward before."""

    def __init__(self) -> None:
        self._expected: list[FSDPState] = []
        self._calls: list[FSDPState] = []
        self._as_expected = False
        self._gathered_ahead: list[FSDPState] = []

    def begin(self) -> None:
        """A forward of the root begins."""
        self._expected, self._calls, self._as_expected = self._calls, [], True
        self._gathered_ahead = []

    def next_after(self, state: FSDPState) -> list[FSDPState]:
        """``state`` is called; returns what was called after it the last time."""
        self._as_expected &= self._expected[len(self._calls) : len(self._calls) + 1] == [state]
        self._calls.append(state)
        return self._expected[len(self._calls) : len(self._calls) + 1] if self._as_expected else []

    def note_gathered_ahead(self, states: list[FSDPState]) -> None:
        self._gathered_ahead += states

    @property
    def gathered_in_vain(self) -> list[FSDPState]:
        """Of those that were gathered ahead, the ones that have not been called."""
        return [state for state in self._gathered_ahead if state not in self._calls]

    def forget(self) -> None:
        self.begin()
        self._expected = []
