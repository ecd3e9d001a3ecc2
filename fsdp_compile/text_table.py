"""Tables as text, for people."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], numbers: bool = False) -> list[str]:
    """A line for each row, with columns of equal width, two spaces apart.

    Args:
        rows: of equally many cells.
        numbers: whether all cells but the first of a row go to the right of their columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify = str.rjust if numbers else str.ljust
    return ["  ".join([row[0].ljust(widths[0]), *map(justify, row[1:], widths[1:])]).rstrip() for row in rows]
