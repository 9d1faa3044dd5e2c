"""The README and the pages under docs/: snippets run, commands have their options, links and pages exist."""

import contextlib
import io
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import typer
import yaml
from safetensors.numpy import save_file

import jaxferry
from examples.common.text import train_byte_bpe
from examples.llama import model as llama
from examples.llama import weights
from jaxferry.checkpoint.pretrained import Source
from jaxferry.cli import COMMANDS, make_app

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SLOW = {"layers.md", "activations.md", "tutorial.md"}  # these measure, or train several steps of a deeper model


def blocks(page, language):
    """The fenced blocks of a page in a language; the empty one is for commands."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def with_code(pages):
    return [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW else [])
        for page in pages
        if blocks(page, "python")
    ]


def loss_fn(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"])
    return jnp.mean(x**2)


def init_fn(key):
    return {f"layer_{i}": {"kernel": jax.random.normal(jax.random.fold_in(key, i), (16, 16))} for i in range(2)}


def names():
    """What a page's snippets may use without defining it: a small model, its batches, its optimizer."""
    rng, batch = jax.random.key(0), np.ones((4, 16), np.float32)
    found = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "loss_fn": loss_fn, "init_fn": init_fn, "rng": rng}
    found |= {"params": init_fn(rng), "batch": batch, "batches": [batch] * 2, "optimizer": optax.adamw(1e-3)}
    return found | {"jaxferry": jaxferry, "source_of": lambda path: Source("/".join(path))}


@pytest.mark.parametrize("page", with_code(PAGES))
def test_the_snippets_of_a_page_run_one_after_another(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXFERRY_CACHE_DIR", str(tmp_path / "cache"))
    namespace = names()
    if page.name == "pretrained.md":
        (tmp_path / "checkpoint").mkdir()
        tensors = {f"{name}/kernel": np.asarray(layer["kernel"]) for name, layer in namespace["params"].items()}
        save_file(tensors, tmp_path / "checkpoint" / "model.safetensors")
    sizes = {}
    if page.name == "chat.md":
        namespace, sizes = {}, {'SIZE = "3.2-1b"': 'SIZE = "tiny"'}  # the page is a whole script
        config = llama.SIZES["tiny"]
        (tmp_path / "checkpoint").mkdir()
        tokenizer = train_byte_bpe([page.read_text()], config.vocab_size)
        weights.save(config, llama.make_init(config)(jax.random.key(0)), tmp_path / "checkpoint", tokenizer)
    for number, block in enumerate(blocks(page, "python")):
        for size, small in sizes.items():
            assert size in block
            block = block.replace(size, small)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, f"{page.name}, snippet {number + 1}", "exec"), namespace)


def command_lines():
    """The lines of all pages that call the command line."""
    for page in PAGES:
        text = re.sub(r"\s+", " ", page.read_text())
        spans = re.findall(r"(?<!`)`(jaxferry [^`]+)`(?!`)", text)
        lines = [line.split("#")[0].strip() for block in blocks(page, "") for line in block.splitlines()]
        yield from ((page.name, line) for line in (*spans, *lines) if line.startswith("jaxferry "))


def test_every_command_in_the_pages_exists_with_its_options():
    found = list(command_lines())
    assert len(found) > 10
    commands = typer.main.get_command(make_app(*COMMANDS)).commands
    for page, line in found:
        words = line.split()[1:]
        if not words or words[0].startswith("-"):
            continue
        assert words[0] in commands, f"{page}: {line}"
        parameters = commands[words[0]].params
        known = {option for each in parameters for option in (*each.opts, *each.secondary_opts)} | {"--help"}
        unknown = [word for word in words[1:] if word.startswith("-") and word not in known]
        assert unknown == [], f"{page}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_of_the_repository_leads_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    blob = re.escape(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["repo_url"] + "/blob/main/")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        local = re.sub(f"^{blob}", f"{ROOT}/", target)
        if not local.startswith("http"):
            assert (page.parent / local).exists(), target


def test_every_page_is_in_the_navigation():
    def files(entry):
        if isinstance(entry, str):
            return [entry]
        return [file for part in (entry if isinstance(entry, list) else entry.values()) for file in files(part)]

    navigation = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(navigation) == sorted(str(page.relative_to(DOCS)) for page in PAGES[1:])


def test_the_notebook_is_the_tutorial():
    cells = json.loads((DOCS / "tutorial.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"]
    assert code == blocks(DOCS / "tutorial.md", "python")
