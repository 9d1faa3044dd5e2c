"""Parses and formats bytes and seconds."""

import decimal
import re

from jaxferry.errors import InputError

_BINARY = {"": 1, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
MAX_BYTES = 2**53
"""The largest size: sums of such sizes fit into a machine word, and each is exact as a float."""

_DIGITS_OF_A_BYTE = 13
"""So many digits after the point tell one byte of a TiB."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]I?)?B?\s*", re.IGNORECASE)


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Reads a size such as `"8GiB"`, `"1.5 GB"`, `"4096"` or `4096`, rounded down to whole bytes.

    `KiB`, `MiB`, `GiB`, `TiB` are powers of 1024; `KB`, `MB`, `GB`, `TB` are powers of 1000; the B is optional.

    Args:
      size: the size; an integer is a number of bytes.
      name: the argument's name, for error messages.

    Raises:
      InputError: if it is not a size, is negative, or exceeds 8 PiB.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise InputError(f"{name} must not be negative, got {size}")
        return _at_most(size, size, name)
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise InputError(f'{name} must be a number of bytes or a size such as "8GiB" or "500MB", got {size!r}')
    unit = (match[2] or "").upper()
    return _at_most(int(decimal.Decimal(match[1]) * (_BINARY | _DECIMAL)[unit]), size, name)


def _at_most(num_bytes: int, size: int | str, name: str) -> int:
    if num_bytes > MAX_BYTES:
        raise InputError(f"{name} must be at most 8 PiB (2**53 bytes), got {str(size)[:40]}")
    return num_bytes


def format_bytes(num_bytes: float, num_more_digits: int = 0) -> str:
    """Formats a size with three or four digits and a binary unit: `format_bytes(1536)` is `"1.50 KiB"`."""
    sign, value = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value /= 1024
    else:
        unit = "TiB"
    digits = 0 if value >= 1000 else 2 if value < 10 else 1
    return f"{sign}{value:.{0 if unit == 'B' else digits + num_more_digits}f} {unit}"


def format_apart(*sizes: int) -> list[str]:
    """Formats sizes that a reader compares: as `format_bytes` does, with so many digits that unequal ones differ."""
    for num_more_digits in range(_DIGITS_OF_A_BYTE):
        shown = [format_bytes(size, num_more_digits) for size in sizes]
        if len(set(shown)) == len(set(sizes)):
            return shown
    return [f"{size} B" for size in sizes]


def format_seconds(seconds: float) -> str:
    """Formats a duration with a suitable unit: `format_seconds(0.0123)` is `"12.30 ms"`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0 s"
