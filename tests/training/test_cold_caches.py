"""What empties caches: the sizes that Linux states, and a program that writes more."""

import pytest

from jaxferry.training import UNKNOWN_BYTES, host_cache_bytes


def described(folder, caches):
    """Linux's description of caches: (cpu, index, level, type, cpus that share it, size)."""
    for cpu, index, level, kind, shared, size in caches:
        cache = folder / f"cpu{cpu}" / "cache" / f"index{index}"
        cache.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("shared_cpu_list", shared), ("size", size)):
            (cache / name).write_text(f"{text}\n")
    return folder


def test_a_cache_that_processors_share_counts_once(tmp_path):
    own = [(cpu, 0, 1, kind, str(cpu), "32K") for cpu in (0, 1) for kind in ("Data",)]
    own += [(cpu, 1, 1, "Instruction", str(cpu), "64K") for cpu in (0, 1)]
    shared = [(cpu, 2, 3, "Unified", "0-1", "16M") for cpu in (0, 1)]
    assert host_cache_bytes(described(tmp_path, own + shared)) == 2 * 96 * 2**10 + 16 * 2**20


@pytest.mark.parametrize("size", ["", "many", "K"])
def test_caches_that_are_not_described_have_a_size_all_the_same(tmp_path, size):
    assert host_cache_bytes(described(tmp_path, [(0, 0, 1, "Data", "0", size)])) == UNKNOWN_BYTES
