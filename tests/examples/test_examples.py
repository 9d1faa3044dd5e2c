"""All examples: published sizes, the losses of plain Optax, blocks that share a program, batches, command lines."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import data as gpt2_data
import small_examples
from examples.bert import data as bert_data
from examples.common import digits
from examples.common.training import count_parameters
from examples.llama import sample as llama_sample
from examples.roberta import data as roberta_data
from jaxferry.errors import InputError
from jaxferry.partition import partition, partition_forward
from metrics_files import read_losses, read_metrics
from plain_optax import assert_same_losses
from slowly import slow, slow_but
from small_examples import DROPOUT, IMAGES, LLAMAS, MODELS, SMALL, vocabulary

PUBLISHED = {
    ("gpt2", "124m"): 124_439_808,
    ("gpt2", "medium"): 354_823_168,
    ("gpt2", "xl"): 1_557_611_200,
    # Encoder with pooler; the heads' transform C^2 + C and its LayerNorm 2 C, a bias for each token, and the next
    # sentence's 2 C + 2.
    ("bert", "base"): 109_482_240 + 768**2 + 5 * 768 + 30522 + 2,
    ("bert", "large"): 335_141_888 + 1024**2 + 5 * 1024 + 30522 + 2,
    # With the head for masked tokens and without BERT's pooler.
    ("roberta", "base"): 124_697_433,
    ("roberta", "large"): 355_412_057,
    # For 1000 classes (He et al. 2016), as PyTorch's torchvision counts them.
    ("resnet", "18"): 11_689_512,
    ("resnet", "50"): 25_557_032,
    # For 224 x 224 images and 1000 classes (Dosovitskiy et al. 2021).
    ("vit", "base"): 86_567_656,
    ("vit", "large"): 304_326_632,
    ("llama", "3.2-1b"): 1_235_814_400,
    ("llama", "3.2-3b"): 3_212_749_824,
    ("llama", "qwen2.5-0.5b"): 494_032_768,
    ("llama", "qwen2.5-1.5b"): 1_543_714_304,
    ("llama", "2-7b"): 6_738_415_616,
    ("llama", "2-13b"): 13_015_864_320,
    ("llama", "3-8b"): 8_030_261_248,
}
"""The parameter counts of the published checkpoints."""


@pytest.mark.parametrize(("name", "size"), slow_but([("gpt2", "124m")], PUBLISHED))
def test_sizes_are_the_published_ones(name, size):
    assert count_parameters(MODELS[name].make_init(MODELS[name].SIZES[size])) == PUBLISHED[name, size]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SMALL, *DROPOUT])
def test_losses_agree_with_a_plain_optax_loop(name, cache, text):
    of = small_examples.of(name)
    loss_fn, batches = MODELS[of].make_loss({**SMALL, **DROPOUT}[name]), small_examples.batches_of(name, text)
    optimizer, params = small_examples.optimizer_of(name), small_examples.params_of(name)
    assert_same_losses(loss_fn, optimizer, params, batches, carried=small_examples.carried_of(name))


HEADS = {"bert": ["pooler", "next"], "roberta": []}
SEGMENTS = {
    "gpt2": (["wte", "wpe"], "h_{}", ["ln_f", "wte#2"]),
    "vit": (["patches", "class_token", "positions"], "block_{}", ["ln", "head"]),
    "transformer_xl": (["tokens"], "block_{}", ["tokens#2", "bias"]),
}
for name, own in HEADS.items():
    masked = [*own, "transform", "transform_ln", "tokens#2", "bias"]
    SEGMENTS[name] = (["tokens", "positions", "types", "ln"], "block_{}", masked)
for name, config in LLAMAS.items():
    SEGMENTS[name] = (["embed"], "layers/{}", ["norm", "embed#2" if config.is_tied else "head"])
"""By example: the segments before the blocks, the name of a block, and the segments behind."""


@pytest.mark.parametrize(
    ("name", "rate"),
    slow_but(
        [("gpt2", 0.0), ("gpt2", 0.1)],
        [*((name, 0.0) for name in SEGMENTS), *((name, 0.1) for name in ("gpt2", "bert", "transformer_xl"))],
    ),
)
def test_all_blocks_share_one_program_and_only_the_hidden_state_crosses(name, rate, cache, text):
    of, length = small_examples.of(name), 3
    config = dataclasses.replace(SMALL[name], num_layers=length, **({"dropout": rate} if rate else {}))
    params = jax.eval_shape(MODELS[of].make_init(config), jax.random.key(0))
    batch = small_examples.batches_of(name, text)(0) | ({"key": jax.random.key(0)} if rate else {})
    if of == "transformer_xl":
        batch["memory"] = MODELS[of].empty_memory(config, small_examples.B, small_examples.M, np.float32)
    parts = partition(MODELS[of].make_loss(config), params, (batch,), {})
    first, block, last = SEGMENTS[name]
    names = [*first, *map(block.format, range(length)), *last]
    assert [segment.name for segment in parts.segments] == names
    blocks = parts.segments[len(first) : len(first) + length]
    assert len({segment.program for segment in parts.segments}) == len(names) - length + 1
    assert len({segment.program for segment in blocks}) == 1
    # BERT's blocks also read which tokens are padding.
    if of not in ("bert", "roberta"):
        for segment, before in zip(blocks[1:], blocks, strict=False):
            assert len(segment.inputs) == 1 and segment.inputs[0] in before.outputs
    if of == "llama":
        caches = MODELS[of].make_caches(config, 1, 8, jnp.float32)
        args = (jnp.array([[5]]), caches, 3, 0.5, jax.random.key(0))
        segments = partition_forward(llama_sample.make_decode(config), params, args).segments
        assert [segment.name for segment in segments] == names
        assert len({segment.program for segment in segments[1:-2]}) == 1


def rows_of(seed, step):
    return gpt2_data.Batches(np.arange(1000, dtype=np.uint16), 4, 16, seed)(step)["tokens"]


def labels_of(seed, step):
    return bert_data.Pairs(small_examples.random_tokens(64), 4, 16, seed, vocabulary(64))(step)["labels"]


def images_of(seed, step):
    return digits.Batches(digits.load()[0], 16, seed)(step)["images"]


@pytest.mark.parametrize("draw", [rows_of, *slow(labels_of, images_of)])
def test_a_batch_depends_on_seed_and_step_alone(draw):
    np.testing.assert_array_equal(draw(0, 7), draw(0, 7))
    assert not (draw(0, 8) == draw(0, 7)).all()
    assert not (draw(1, 7) == draw(0, 7)).all()


@pytest.mark.parametrize("make", [gpt2_data.Batches, *slow(bert_data.Pairs, "roberta")])
def test_a_text_shorter_than_a_row_is_refused(make, cache, text):
    tokens, more = np.arange(9, dtype=np.uint16), [vocabulary(100)] if make is bert_data.Pairs else []
    if make == "roberta":
        make, more = roberta_data.FullSentences, [roberta_data.load(text, 300).tokenizer]
    make(tokens, 1, 8, 0, *more)
    with pytest.raises(InputError, match="--seq must be below the 8 tokens"):
        make(tokens[:8], 1, 8, 0, *more)


RUNS = {
    # Steps, the learning rate, what is printed, and how much a loss that is printed falls at least.
    "gpt2": (30, "0.003", "a sample", 0.3),
    "llama": (60, "0.01", "a sample", 1),
    "bert": (150, "0.01", "masked tokens filled in", 1),
    "roberta": (80, "0.01", "masked tokens filled in", 1),
    "transformer_xl": (60, "0.01", "a sample", 1),
    "resnet": (200, "0.05", "of 359 unseen images recognised, with the running averages", 80),
    "vit": (300, "0.005", "of 359 unseen images recognised", 60),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_training_learns_and_a_resumed_run_goes_on_bit_by_bit(name, cache, text, tmp_path, monkeypatch, capsys):
    whole, parts, saved = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl", tmp_path / "saved"
    steps, rate, said, least = RUNS[name]
    small_examples.tiny(monkeypatch, name)
    common = ["--lr", rate]
    more = ["--memory-budget", "8MiB"] if name in IMAGES else ["--sample-tokens", 4]
    assert small_examples.run(name, text, *common, "--steps", steps, "--metrics", whole, *more) == 0
    records, printed = read_metrics(whole), capsys.readouterr().out
    assert [record["step"] for record in records] == list(range(steps))
    assert said in printed
    if name in IMAGES:
        assert records[0].keys() >= {"loss", "accuracy", "images_per_s"}
        assert float(printed.splitlines()[-1].split("%")[0]) > least
    else:
        entry = "masked_loss " if name == "bert" else ": "
        lines = [line for line in printed.splitlines() if "validation" in line]
        before, after = (float(line.split(entry)[1].split(",")[0]) for line in lines)
        assert after < before - least
    told = {"loss", "masked_loss", "next_loss", "masked_accuracy", "next_accuracy"} if name == "bert" else {"loss"}
    assert records[0].keys() >= told
    assert small_examples.run(name, text, *common, "--steps", 3, "--metrics", parts, "--save", saved, *more) == 0
    assert small_examples.run(name, text, *common, "--steps", 6, "--metrics", parts, "--resume", saved, *more) == 0
    assert read_losses(whole)[:6] == read_losses(parts)


BAD_INPUT = [
    *(
        (name, ["--size", "huge"], f"--size must be one of {', '.join(model.SIZES)}, got huge")
        for name, model in MODELS.items()
    ),
    *((name, ["--resume", "no/such/state"], "no/such/state") for name in ("gpt2", "bert", "roberta", "transformer_xl")),
    *((name, ["--data", "no/such/file"], "no/such/file") for name in ("gpt2", "bert")),
    *((name, ["--memory-budget", "much"], "memory_budget must be a number of bytes") for name in ("gpt2", "bert")),
    *(
        (name, ["--seq", "257"], "--seq must be at most the 256 positions of size tiny, got 257")
        for name in ("gpt2", "bert", "roberta")
    ),
    *(
        (name, ["--compute-dtype", "int8"], "--compute-dtype must be one of float32, bfloat16, float16, got int8")
        for name in ("gpt2", "bert")
    ),
    ("gpt2", ["--steps", "many"], "--steps"),
    ("gpt2", ["--batch", "0"], "--batch"),
    ("gpt2", ["--reserve-factor", "1.5"], "reserve_factor must lie in [0, 1], got 1.5"),
    ("gpt2", ["--metrics", "no/such/folder/metrics"], "no/such/folder"),
    ("gpt2", ["--frobnicate"], "--frobnicate"),
    ("bert", ["--seq", "7"], "--seq must be at least 8"),
    ("roberta", ["--seq", "2"], "--seq must be at least 3"),
    ("llama", ["--lora-rank", "-1"], "--lora-rank"),
    ("llama", ["--weights", "no/such/folder"], "there is no no/such/tokenizer.json"),
    ("transformer_xl", ["--memory", "0"], "--memory"),
    ("transformer_xl", ["--seq", "100000"], "--batch times --seq must be below"),
]


@pytest.mark.parametrize(
    ("name", "args", "message"), slow_but([case for case in BAD_INPUT if case[0] == "gpt2"], BAD_INPUT)
)
def test_bad_input_is_one_line_and_status_2(name, args, message, cache, text, capsys):
    assert small_examples.run(name, text, "--steps", "1", *args) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
