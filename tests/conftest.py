"""Settings for all tests: JAX runs on the CPU, and hypothesis is deterministic."""

import atexit
import gc
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading

import hypothesis
import pytest

# Packages that compile for a GPU lie beside the environment (tools/gpu-packages); last, so they replace nothing.
GPU_PACKAGES = pathlib.Path(sys.prefix) / "gpu-packages"
if GPU_PACKAGES.is_dir():
    sys.path.append(str(GPU_PACKAGES))

# Before any test module imports jax: where a machine has an accelerator, placement is tested without it all the same.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Processes that tests start, in whatever folder, import the package of this checkout.
ROOT = pathlib.Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

# Many tests train the same small models, some in separate processes, so they share a compilation cache. All processes
# that share the tests use one folder: the first makes it, and the others inherit its name.
_CACHE = os.environ.get("JAXFERRY_TESTS_CACHE", "")
if not _CACHE:
    _CACHE = os.environ["JAXFERRY_TESTS_CACHE"] = tempfile.mkdtemp(prefix="jaxferry-tests-")
    atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Most of a test's time is tracing and lowering; a quarter of that would record the source line of each operation.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# Timings in tests are not measurements and must not enter the user's cache.
os.environ["JAXFERRY_CACHE_DIR"] = os.path.join(_CACHE, f"jaxferry-{os.getpid()}")

# Lines of progress appear on a busy machine, and tests read standard error.
os.environ["JAXFERRY_PROGRESS"] = "off"

# One CPU device is the host, the other one an emulated accelerator (tests/support/accelerator.py).
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"

# A shell's background jobs and their children ignore SIGINT; tests of interrupts need Python's default handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None)
# Shrinking an example can take minutes, which a run of all tests does not have.
_PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
# No optimizations by LLVM, and one module of code for each program.
_QUICK_CODE = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # No kernels of fusions by MLIR. Newer versions have no such choice, and end at flags that they do not know.
    _QUICK_CODE += ["--xla_cpu_use_fusion_emitters=false"]
hypothesis.settings.register_profile("few", derandomize=True, deadline=None, max_examples=7, phases=_PHASES)


def pytest_configure(config):
    """Leaves repetitions, that is further examples of one property, to runs that include the slow tests.

    Runs without them also compile programs for the CPU by the quickest way to code, half of their time. XLA's own
    optimizations, which decide what a program computes and how much memory it takes, stay.
    """
    # An editable installation of another checkout comes before every path.
    found = importlib.util.find_spec("jaxferry")
    if found is None or not pathlib.Path(found.origin).resolve().is_relative_to(ROOT):
        where = "is not installed" if found is None else f"is imported from {found.origin}"
        raise pytest.UsageError(f"the package jaxferry {where}: install that of {ROOT}, by make install-test")
    is_quick = "not slow" in config.option.markexpr
    hypothesis.settings.load_profile("few" if is_quick else "deterministic")
    if is_quick:
        os.environ["XLA_FLAGS"] += " ".join(["", *_QUICK_CODE])


def pytest_ignore_collect(collection_path, config):
    """Leaves modules of slow tests alone to runs that include them: their imports take seconds in each process."""
    is_module = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    if "not slow" in config.option.markexpr and is_module:
        return "\npytestmark = pytest.mark.slow\n" in collection_path.read_text() or None
    return None


_LESS_EFFORT = 64


def pytest_collection_finish(session):
    """Leaves what the imports have made out of every later garbage collection, which tests ask for often.

    Runs without slow tests repeat each measurement of a profile three times alone, with warm caches, lower programs
    quickly, and search for plans with a sixty-fourth of the effort.
    """
    if "not slow" in session.config.option.markexpr:
        search = importlib.import_module("jaxferry.planner.search")
        search.MOST_EFFORT //= _LESS_EFFORT
        search.EFFORT_A_LAYER //= _LESS_EFFORT
        if "jaxferry.training.timers" in sys.modules:
            importlib.import_module("brief").measure_briefly()
        lowering = sys.modules.get("jax._src.interpreters.mlir")
        if hasattr(lowering, "make_ir_context"):
            lowering.make_ir_context = _kept(lowering.make_ir_context)
    if os.environ["JAX_PLATFORMS"] != "cpu":
        # Tests compare with plain Optax in fp32, whatever JAX's default device is.
        importlib.import_module("jaxferry.training.model").ACCELERATOR_DTYPE = None
        # The device may be one in software.
        timers = importlib.import_module("jaxferry.training.timers")
        timers.PRODUCTS_WIDTH, timers.ACCELERATOR_BYTES = 64, 2**20
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


# A process that keeps gigabytes of programs becomes slower and slower; one that keeps none traces them again.
_PROGRAMS_LIMIT_BYTES = 3 << 29


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _kept(make):
    """Makes an MLIR context for each thread and for every 200 programs; JAX makes one for each, a sixth of the time."""
    of_thread = threading.local()

    def context():
        uses = of_thread.uses = getattr(of_thread, "uses", -1) + 1
        if uses % 200 == 0:
            of_thread.context = make()
        return of_thread.context

    return context


@pytest.fixture(autouse=True, scope="module")
def forgotten_programs():
    """Frees JAX's caches after a module where the process has become large.

    What is left of a module is of no concern to the garbage collections that tests of later ones ask for.
    """
    yield
    jax = sys.modules.get("jax")
    if jax is not None and _resident_bytes() > _PROGRAMS_LIMIT_BYTES:
        gc.unfreeze()
        jax.clear_caches()
        gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def cpu_by_default(request, monkeypatch):
    """Makes a CPU JAX's default device in tests that are marked so, where it is another one."""
    import jax  # after the environment is set

    if request.node.get_closest_marker("cpu_device") is None or jax.default_backend() == "cpu":
        yield
        return
    devices = jax.devices
    monkeypatch.setattr(jax, "devices", lambda backend="cpu": devices(backend))
    with jax.default_device(devices("cpu")[0]):
        yield


@pytest.fixture(scope="session")
def gpt():
    """A small model that many tests train."""
    return importlib.import_module("models").mlp(depth=2)


@pytest.fixture
def allowed_nans():
    """Lets a test make a NaN on purpose, in a run of the tests under jax_debug_nans too."""
    import jax  # after the environment is set

    with jax.debug_nans(False):
        yield


def pytest_make_parametrize_id(val):
    """Names functions without addresses: processes that share the tests must agree on the names."""
    return getattr(val, "__name__", None) if callable(val) else None
