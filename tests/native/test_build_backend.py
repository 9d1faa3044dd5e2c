"""What the build backend says of missing libraries, and when it refuses a wheel."""

import importlib.util
import pathlib
import sys
import types
import zipfile

import pytest

BACKEND = pathlib.Path(__file__).parents[2] / "xla_ffi" / "package" / "backend.py"
WHEEL = "jaxferry-0-py3-none-any.whl"


@pytest.fixture
def backend(monkeypatch):
    """The backend over a scikit-build-core that packs the libraries of the list `built`."""
    monkeypatch.delenv("JAXFERRY_LIBRARIES", raising=False)
    built = []

    def build(directory, settings=None, metadata=None):
        with zipfile.ZipFile(pathlib.Path(directory) / WHEEL, "w") as archive:
            for name in built:
                archive.writestr(f"jaxferry/native/libjaxferry_{name}.so", "")
        return WHEEL

    hooks = dict.fromkeys(("build_wheel", "build_editable", "build_sdist"), build)
    for kind in ("wheel", "editable", "sdist"):
        hooks[f"get_requires_for_build_{kind}"] = lambda settings=None: ["ninja"]
    fake = types.ModuleType("scikit_build_core.build")
    fake.__dict__.update(hooks)
    package = types.ModuleType("scikit_build_core")
    package.build = fake
    monkeypatch.setitem(sys.modules, "scikit_build_core", package)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", fake)
    spec = importlib.util.spec_from_file_location("jaxferry_build_backend", BACKEND)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.built = built
    return module


@pytest.mark.parametrize("kind", ["build_wheel", "build_editable"])
def test_each_missing_library_is_told_with_its_cost_and_remedy(kind, backend, tmp_path, capfd):
    backend.built[:] = ["cuda"]
    assert getattr(backend, kind)(str(tmp_path)) == WHEEL
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("JaxFerry: no cpu library. Without it, layers move by plain JAX copies")
    assert "install a C++ compiler" in line
    assert "`jaxferry build-native --platform cpu`" in line


def test_a_wheel_with_both_libraries_says_nothing(backend, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("JAXFERRY_LIBRARIES", "cpu, cuda")
    backend.built[:] = ["cpu", "cuda"]
    assert backend.build_wheel(str(tmp_path)) == WHEEL
    assert capfd.readouterr().err == ""
    assert (tmp_path / WHEEL).exists()


def test_a_wheel_without_a_demanded_library_is_removed(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXFERRY_LIBRARIES", "cpu,cuda")
    backend.built[:] = ["cpu"]
    with pytest.raises(SystemExit, match="asks for the cuda library, which was not built"):
        backend.build_wheel(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_of_a_library_that_is_not_asked_for_nothing_is_said(backend, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("JAXFERRY_LIBRARIES", "cpu")
    backend.built[:] = ["cpu"]
    assert backend.build_wheel(str(tmp_path)) == WHEEL
    assert capfd.readouterr().err == ""


def test_an_unknown_library_is_refused_before_the_build(backend, monkeypatch):
    monkeypatch.setenv("JAXFERRY_LIBRARIES", "cpu,tpu")
    with pytest.raises(SystemExit, match="JAXFERRY_LIBRARIES must name cpu and cuda, got 'tpu'"):
        backend.get_requires_for_build_wheel()


@pytest.mark.parametrize(
    ("demanded", "has_nvcc", "fetches"), [("cuda", False, True), ("cuda", True, False), ("", False, False)]
)
def test_nvcc_is_fetched_where_its_library_is_demanded_and_the_system_has_none(
    demanded, has_nvcc, fetches, backend, tmp_path, monkeypatch
):
    monkeypatch.setenv("JAXFERRY_LIBRARIES", demanded)
    monkeypatch.setenv("PATH", str(tmp_path))
    if has_nvcc:
        (tmp_path / "nvcc").touch(mode=0o755)
    required = backend.get_requires_for_build_wheel()
    assert required == ["ninja", *(backend.NVCC_PACKAGES if fetches else ())]
