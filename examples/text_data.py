"""Text as bytes: which files, what is held out, and which windows a rank reads at a step."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MAX_BYTES = 64 << 20  # of text read; what comes after is ignored
HELD_OUT = 20  # one piece in so many is held out
PIECE = 16 << 10  # bytes; small, so that held-out text comes from all over the text


class TextError(Exception):
    """The text cannot be used; the message says why."""


class Text:
    """Text split in two: pieces to train on and pieces to evaluate on.

    Args:
        source: a file, a directory, or ``None`` for Python's standard library.
        seq: window length; a window has one byte more, the last target.

    Raises:
        TextError: nothing to read, or too little of it.
    """

    def __init__(self, source: str | None, seq: int) -> None:
        text = b"\n".join(_contents(source))[:MAX_BYTES]
        needed = HELD_OUT * (seq + 1)
        if len(text) < needed:
            where = source or "the standard library"
            raise TextError(f"{where} has {len(text)} bytes of text; a window of {seq} bytes needs at least {needed}")
        size = min(PIECE, len(text) // HELD_OUT)
        pieces = [text[start : start + size] for start in range(0, len(text) - size + 1, size)]
        self.seq = seq
        self.held_out = _as_array(pieces[HELD_OUT - 1 :: HELD_OUT])
        del pieces[HELD_OUT - 1 :: HELD_OUT]
        self.train = _as_array(pieces)

    def train_windows(self, seed: int, step: int, count: int) -> np.ndarray:
        """``count`` random windows, (count, seq + 1) uint8: a function of its arguments, so there is no state to save.

        All ranks draw the same windows for a step and then each takes its own.
        """
        starts = np.random.default_rng((seed, step)).integers(0, len(self.train) - self.seq, count)
        return self._windows(self.train, starts)

    def held_out_windows(self, count: int) -> np.ndarray:
        """``count`` evenly spaced windows, (count, seq + 1) uint8."""
        starts = np.linspace(0, len(self.held_out) - self.seq - 1, count).astype(np.int64)
        return self._windows(self.held_out, starts)

    def held_out_line(self) -> bytes:
        """A line of the held-out text, without its end: something to continue."""
        lines = self.held_out[: 16 << 10].tobytes().splitlines()
        return max(lines[1:20], key=len, default=b"")[:64]

    def _windows(self, text: np.ndarray, starts: np.ndarray) -> np.ndarray:
        return text[starts[:, None] + np.arange(self.seq + 1)]


def _as_array(pieces: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(pieces), dtype=np.uint8)


def _contents(source: str | None) -> Iterator[bytes]:
    """The files' contents in a fixed order, up to ``MAX_BYTES`` in all."""
    total = 0
    for path in _files(source):
        try:
            content = path.read_bytes()
        except OSError as error:
            if source is not None and path == Path(source):
                raise TextError(f"cannot read {source}: {error.strerror}") from None
            continue  # one unreadable file in a directory
        if b"\0" in content[:1024]:
            continue  # not text
        yield content
        total += len(content)
        if total >= MAX_BYTES:
            return


def _files(source: str | None) -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib") if source is None else source)
    if not root.exists():
        raise TextError(f"no such file or directory: {root}")
    if not root.is_dir():
        yield root
        return
    for path in sorted(root.rglob("*.py" if source is None else "*")):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts)
        installed = source is None and parts[0] in ("site-packages", "dist-packages", "test")
        if path.is_file() and not hidden and not installed:
            yield path
