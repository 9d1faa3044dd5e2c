"""Text to tokens: trains a tokenizer once on the corpus and caches the tokens.

files -> texts -> tokenizer (cached) -> tokens (cached) -> train | validation
"""

import dataclasses
import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxferry.errors import InputError

VALIDATION_SHARE = 0.05
PIECE_CHARS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A tokenizer and its tokens of the text, as unsigned vectors; the end of the text is for validation."""

    tokenizer: Tokenizer
    train: np.ndarray
    validation: np.ndarray


def load(path, vocab_size, train_tokenizer, name, separator=None):
    """Reads the text under `path` as tokens below `vocab_size`.

    Args:
      path: a text file or a folder of text files; None for Python's standard library.
      vocab_size: maximum size of the tokenizer's vocabulary.
      train_tokenizer: makes a Tokenizer from `(texts, vocab_size)`, for example `train_byte_bpe`.
      name: the folder's name in the cache; each kind of tokenizer needs its own.
      separator: a token to append to each text, or None.

    Raises:
      InputError: if there is no UTF-8 text under the path.
    """
    texts = read_library() if path is None else read_texts(Path(path))
    digest = hashlib.sha256(str(vocab_size).encode())
    for text in texts:
        digest.update(text.encode())
    folder = cache_folder() / name / digest.hexdigest()[:32]
    tokenizer_file, tokens_file = folder / "tokenizer.json", folder / "tokens.npy"
    if not tokens_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(texts, vocab_size)
        replace_file(tokenizer_file, lambda file: file.write(tokenizer.to_str().encode()))
        replace_file(tokens_file, lambda file: np.save(file, encode(tokenizer, texts, separator)))
    tokens = np.load(tokens_file, mmap_mode="r")
    split = len(tokens) - int(len(tokens) * VALIDATION_SHARE)
    return Corpus(Tokenizer.from_file(str(tokenizer_file)), tokens[:split], tokens[split:])


def load_pretrained(path, vocab_size, weights):
    """Like `load`, but with the tokenizer of pretrained weights, `tokenizer.json` beside them.

    Args:
      path: as in `load`.
      vocab_size: the model's vocabulary size.
      weights: the folder of the weights, or a file in it.

    Raises:
      InputError: if there is no tokenizer, or it has more tokens than the model.
    """
    file = (weights if weights.is_dir() else weights.parent) / "tokenizer.json"
    if not file.exists():
        raise InputError(f"--weights needs the weights' tokenizer in the same folder: there is no {file}")
    tokenizer = Tokenizer.from_file(str(file))
    if tokenizer.get_vocab_size() > vocab_size:
        raise InputError(f"{file} has {tokenizer.get_vocab_size()} tokens, but the model has only {vocab_size}")
    name = f"pretrained-{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"
    return load(path, vocab_size, lambda texts, size: tokenizer, name)


def read_library():
    """Reads the sources of Python's standard library, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    other = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = (file for file in sorted(root.rglob("*.py")) if not other.intersection(file.relative_to(root).parts))
    return [text for file in files if (text := read_text(file))]


def read_texts(path):
    """Reads a text file, or all text files below a folder except hidden ones, ordered by name."""
    if not path.exists():
        raise InputError(f"--data must name a text file or a folder, got {path}, which does not exist")
    files = [path]
    if path.is_dir():
        found = sorted(path.rglob("*"))
        files = [f for f in found if f.is_file() and not any(p.startswith(".") for p in f.relative_to(path).parts)]
    texts = [text for file in files if (text := read_text(file))]
    if not texts:
        raise InputError(f"--data must name a text file or a folder with text files; {path} holds no UTF-8 text")
    return texts


def read_text(file):
    """Returns the file's text, or None if it is not UTF-8, for example an image among the texts."""
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError:
        return None


def cache_folder():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxferry"


def replace_file(file, write):
    """Writes a file atomically: no other process ever reads a partial one."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    with open(part, "wb") as stream:
        write(stream)
    part.replace(file)


def train_byte_bpe(texts, vocab_size, special_tokens=()):
    """Trains a byte-level BPE, as in GPT-2 and RoBERTa, which can encode any text. Special tokens get the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special_tokens),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer, texts, separator=None):
    """Encodes all texts as one vector, in pieces, so that several cores share a long file."""
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    end = [] if separator is None else [np.array([tokenizer.token_to_id(separator)], dtype)]
    pieces = [[text[i : i + PIECE_CHARS] for i in range(0, len(text), PIECE_CHARS)] for text in texts]
    encoded = iter(tokenizer.encode_batch_fast([piece for text in pieces for piece in text]))
    return np.concatenate(
        [part for text in pieces for part in [*(np.array(next(encoded).ids, dtype) for _ in text), *end]]
    )
