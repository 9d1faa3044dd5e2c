"""The layers of the package: no module imports from a higher layer, and no modules import each other in a circle."""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import jaxferry.errors

ROOT = Path(jaxferry.errors.__file__).parent

# The rooms, lowest first, on the ground files. `weights` is a package of its own that only the command line imports.
LAYERS = (
    ("errors", "modes", "records", "settings", "units"),
    ("native",),
    ("processes",),
    ("partition",),
    ("costs",),
    ("step", "weights"),
    ("planner",),
    ("transport",),
    ("optimizer",),
    ("engine",),
    ("checkpoint",),
    ("training",),
    ("cli",),
    ("__main__",),
    ("",),
)
CHECKOUT = ROOT.parent
# Commands and tables are no library, and checkpoints are one package with one face: `jaxferry.checkpoint`.
ROOMS = [name for names in LAYERS[1:-3] for name in names if name != "checkpoint"]
USERS = ("jaxferry", "tests", "examples", "benchmarks")
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# The simulator and the engine run the same task list and never know of each other.
SIMULATOR = {"step.machine", "step.shared_work", "step.simulation"}

# Optional, or needed by checkpoints alone: the only packages that a function may import.
OPTIONAL = {"matplotlib", "orbax", "safetensors", "xxhash"}


def find_modules(root):
    """All modules below a package's folder, by name relative to it; the package itself is the empty name."""
    modules = {}
    for file in root.rglob("*.py"):
        parts = file.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return modules


def find_imports(file, package, modules):
    """The package's own modules that a file imports, at its top or in any function; relative imports are not used."""
    targets = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == package or name.startswith(f"{package}."):
                name = name[len(package) + 1 :]
                targets.add(name if name in modules else name.rpartition(".")[0])
    return targets


def import_graph(root):
    """Each module with the set of modules of the same package that it imports."""
    modules = find_modules(root)
    return {name: find_imports(file, root.name, modules) for name, file in modules.items()}


def offered(room):
    """What a room offers, by its stub: each name with the file that defines it."""
    stub = ROOT / room / "__init__.pyi"
    found = ast.parse(stub.read_text()).body if stub.exists() else []
    return {alias.name: f"{room}.{node.module}" for node in found for alias in node.names}


@functools.cache
def names_imported(file):
    """Pairs of a module of the package and a name that a file imports from there."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    pairs = [(node.module or "", alias.name) for node in nodes for alias in node.names]
    prefix = f"{ROOT.name}."
    return [(module.removeprefix(prefix), name) for module, name in pairs if module.startswith(prefix)]


def with_packages(graph):
    """Adds parent packages: importing a.b runs a, unless the importer is in a. Leaves out the root."""
    return {
        name: {
            part
            for target in targets
            for part in [target, *packages_of(target)]
            if part and part != name and not name.startswith(f"{part}.")
        }
        | {target for target in targets if target and target != name}
        for name, targets in graph.items()
        if name
    }


def test_processes_that_tests_start_import_this_checkout(tmp_path):
    code = "import jaxferry, pathlib; print(pathlib.Path(jaxferry.__file__).resolve().parents[1])"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(Path(__file__).resolve().parents[1])]


def packages_of(name):
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def layer_of(name):
    """The entry of LAYERS that a module belongs to; None for one that has no place there."""
    for candidate in [name, *reversed(packages_of(name))]:
        if candidate in RANKS:
            return candidate
    return None


def upward_imports(graph):
    """Pairs of modules; the first imports the second from a higher layer."""
    pairs = [(name, target) for name, targets in graph.items() for target in targets]
    return [(name, target) for name, target in pairs if RANKS[layer_of(name)] < RANKS[layer_of(target)]]


def find_cycle(graph):
    """The names along a circle of imports, or None."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


@pytest.fixture(scope="module")
def graph():
    return import_graph(ROOT)


def test_every_module_has_a_layer(graph):
    assert [name for name in graph if layer_of(name) is None] == []


def test_no_module_imports_from_a_higher_layer(graph):
    assert upward_imports(graph) == []


def test_no_modules_import_each_other_in_a_circle(graph):
    assert find_cycle(with_packages(graph)) is None


def test_simulator_and_engine_do_not_know_each_other():
    of_step = offered("step")
    simulated = {name for name, module in of_step.items() if module in SIMULATOR}
    assert {"simulate", "steady_step_s"} <= simulated
    for name, file in find_modules(ROOT).items():
        imported = names_imported(file)
        if name.startswith("engine."):
            assert not {each for module, each in imported if module == "step"} & simulated, name
        if name in SIMULATOR:
            assert not any(module.startswith("engine") for module, _ in imported), name


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_offers_what_others_import_from_it(room):
    others = [file for folder in USERS for file in (CHECKOUT / folder).rglob("*.py")]
    others = [file for file in others if ROOT / room not in file.parents]
    wanted = {name for file in others for module, name in names_imported(file) if module == room}
    modules = {name.removeprefix(f"{room}.") for name in find_modules(ROOT) if name.startswith(f"{room}.")}
    assert wanted - modules == set(offered(room))


def test_others_import_from_rooms_and_not_from_their_files():
    found = []
    for folder in USERS:
        for file in (CHECKOUT / folder).rglob("*.py"):
            own = file.relative_to(ROOT).parts[0] if ROOT in file.parents else None
            modules = {module for module, _ in names_imported(file)}
            found += [(file.name, each) for each in modules if each.split(".")[0] in {*ROOMS} - {own} and "." in each]
    assert found == []


def test_functions_import_nothing_but_heavy_optional_packages():
    inner: list[tuple[str, str]] = []
    for name, file in find_modules(ROOT).items():
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    inner += [(name, alias.name) for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    inner.append((name, node.module or "."))
    assert [(name, imported) for name, imported in inner if imported.split(".")[0] not in OPTIONAL] == []


@pytest.fixture
def package(tmp_path):
    """Writes a package from a dict of file names and sources."""

    def write(sources):
        for name, source in sources.items():
            file = tmp_path / "pack" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        return import_graph(tmp_path / "pack")

    return write


def test_an_import_within_a_function_counts(package):
    graph = package({"errors.py": "def f():\n    from pack.cli import main\n", "cli.py": "import pack.errors\n"})
    assert upward_imports(graph) == [("errors", "cli")]
    assert set(find_cycle(with_packages(graph))) == {"errors", "cli"}


def test_a_circle_through_a_package_is_seen(package):
    graph = package(
        {
            "engine/trace/__init__.py": "from pack.engine.trace import recorder\n",
            "engine/trace/recorder.py": "from pack.engine.step import StepResult\n",
            "engine/trace/marks.py": "",
            "engine/step.py": "from pack.engine.trace.marks import Marks\n",
        }
    )
    assert upward_imports(graph) == []
    assert set(find_cycle(with_packages(graph))) == {"engine.trace", "engine.trace.recorder", "engine.step"}


def test_imports_downward_are_fine(package):
    graph = package({"errors.py": "import os\n", "units.py": "from pack.errors import InputError\n", "cli.py": ""})
    assert (upward_imports(graph), find_cycle(with_packages(graph))) == ([], None)
