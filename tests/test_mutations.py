"""The list of faults with which the power of the tests is measured (tests/mutations.py) fits the package."""

import ast
import collections

import mutations

ROOMS = {path.parent.name for path in (mutations.ROOT / "jaxferry").glob("*/__init__.py")}


def test_each_fault_changes_one_place_of_its_file_and_names_tests_that_there_are():
    listed = mutations.read_mutations()
    for each in listed:
        source = (mutations.ROOT / each.path).read_text(encoding="utf-8")
        made = each.mutated(source)
        assert made is not None, f"{each.name}: {each.old!r} occurs {source.count(each.old)} times in {each.path}"
        ast.parse(made)
        assert made != source, each.name
        files = [argument for argument in each.arguments if argument.startswith("tests/")]
        assert files and all((mutations.ROOT / file.partition("::")[0]).is_file() for file in files), each.name
    assert len({each.name for each in listed}) == len(listed)


def test_there_are_faults_in_every_room():
    counts = collections.Counter(each.room for each in mutations.read_mutations())
    assert counts.total() >= 60
    assert {room: count for room, count in counts.items() if count >= 3}.keys() == ROOMS
