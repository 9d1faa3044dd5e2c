"""Where the native libraries lie, and whether a file is a whole library."""

import importlib.metadata
import os
import pathlib
import shutil
import struct

DIRECTORY_VARIABLE = "JAXFERRY_NATIVE_DIR"
FILE_NAMES = {"cpu": "libjaxferry_cpu.so", "CUDA": "libjaxferry_cuda.so"}
PACKAGE_DIRECTORY = pathlib.Path(__file__).resolve().parent
REMEDY = "build it with `jaxferry build-native`"

_COSTS = {
    "cpu": "plain JAX copies move layers, layers read in host memory are loaded, XLA compiles optimizer updates",
    "CUDA": "plain JAX copies move layers, layers read in host memory are loaded",
}


def user_directory() -> pathlib.Path:
    """Returns the user's folder of libraries, for installations that the user cannot write to."""
    data = os.environ.get("XDG_DATA_HOME") or pathlib.Path.home() / ".local" / "share"
    return pathlib.Path(data) / "jaxferry" / "native"


def library_directories() -> list[pathlib.Path]:
    """Returns the folders that are searched for libraries.

    If `JAXFERRY_NATIVE_DIR` is set, that folder alone. Otherwise the package's folder, the folder that pip installed
    into (a different one for an editable installation), and the user's.
    """
    if named := os.environ.get(DIRECTORY_VARIABLE):
        return [pathlib.Path(named)]
    directories = [PACKAGE_DIRECTORY, *_installed_directories(), user_directory()]
    return list(dict.fromkeys(directories))


def describe_missing(platform: str) -> str:
    """Returns one line about a library that is missing, "cpu" or "CUDA": the folders, its cost, the remedy."""
    places = ", ".join(str(directory) for directory in library_directories())
    compilers = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    first = "" if any(map(shutil.which, compilers)) else "install a C++ compiler, then "
    return f"there is no {FILE_NAMES[platform]} in {places}, so {_COSTS[platform]}; {first}{REMEDY}"


def _installed_directories() -> list[pathlib.Path]:
    try:
        files = importlib.metadata.files("jaxferry") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    names = set(FILE_NAMES.values())
    return [pathlib.Path(str(file.locate())).resolve().parent for file in files if file.name in names]


def find_sources() -> pathlib.Path | None:
    """Returns the folder of the C++ sources, in an installed package or beside it in a checkout; None if missing."""
    candidates = (PACKAGE_DIRECTORY / "xla_ffi", PACKAGE_DIRECTORY.parents[1] / "xla_ffi")
    return next((path for path in candidates if (path / "CMakeLists.txt").is_file()), None)


_MAGIC = b"\x7fELF\x02\x01"  # 64-bit, little-endian
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
