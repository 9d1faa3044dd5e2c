"""Checks that a shared library's file is whole: loading a truncated one kills the process (SIGBUS)."""

import os
import pathlib
import struct

_MAGIC = b"\x7fELF\x02\x01"
"""64-bit, little-endian."""
_HEADER = struct.Struct("<16x2HI3QI6H")
_SEGMENT = struct.Struct("<2I6Q")


def check_is_whole(path: pathlib.Path) -> None:
    """Raises OSError if an ELF file ends before its segments or its table of sections, which lies at the end.

    Files of other formats pass: the system's loader reports them.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
        if not header.startswith(_MAGIC):
            return
        if len(header) < _HEADER.size:
            raise OSError(f"the file ends after {size} bytes, within its header")
        _, _, _, _, segments, sections, _, _, segment_size, num_segments, section_size, num_sections, _ = (
            _HEADER.unpack(header)
        )
        file.seek(segments)
        table = file.read(segment_size * num_segments)
    ends = [segments + segment_size * num_segments, sections + section_size * num_sections]
    for start in range(0, len(table) - _SEGMENT.size + 1, segment_size or _SEGMENT.size):
        _, _, offset, _, _, file_size, _, _ = _SEGMENT.unpack_from(table, start)
        ends.append(offset + file_size)
    if size < max(ends):
        raise OSError(f"the file is truncated: it has {size} of {max(ends)} bytes")
