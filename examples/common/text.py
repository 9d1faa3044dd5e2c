"""Text to tokens: a tokenizer trained once on the corpus, its tokens cached.

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
    """A tokenizer, and the text in its tokens: unsigned vectors, the validation part from the end of the text."""

    tokenizer: Tokenizer
    train: np.ndarray
    validation: np.ndarray


def load(path, vocab_size, train_tokenizer, name, separator=None):
    """Reads the text under `path`, or Python's own library for None, as tokens below `vocab_size`.

    Args:
      path: a text file or a folder of them, or None.
      vocab_size: the most tokens that the tokenizer may have.
      train_tokenizer: makes a Tokenizer of `(texts, vocab_size)`; `train_byte_bpe`, for instance.
      name: of the folder in the cache; two kinds of tokenizers need two names.
      separator: a token of the tokenizer that follows each text, or None.

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
    """As `load`, in the tokens of pretrained weights: of the `tokenizer.json` beside them.

    Args:
      path: as for `load`.
      vocab_size: the model's.
      weights: the folder of the weights, or a file in it.

    Raises:
      InputError: if there is no tokenizer, or it has more tokens than the model.
    """
    file = (weights if weights.is_dir() else weights.parent) / "tokenizer.json"
    if not file.exists():
        raise InputError(f"--weights needs the tokenizer of the weights beside them: there is no {file}")
    tokenizer = Tokenizer.from_file(str(file))
    if tokenizer.get_vocab_size() > vocab_size:
        raise InputError(f"{file} has {tokenizer.get_vocab_size()} tokens, the model only {vocab_size}")
    name = f"pretrained-{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"
    return load(path, vocab_size, lambda texts, size: tokenizer, name)


def read_library():
    """The sources of Python's standard library, without its tests and what was installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    other = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = (file for file in sorted(root.rglob("*.py")) if not other.intersection(file.relative_to(root).parts))
    return [text for file in files if (text := read_text(file))]


def read_texts(path):
    """The text of a file, or of every text file below a folder in the order of their names, hidden ones left out."""
    if not path.exists():
        raise InputError(f"--data must name a text file or a folder, got {path}, which does not exist")
    files = [path]
    if path.is_dir():
        found = sorted(path.rglob("*"))
        files = [f for f in found if f.is_file() and not any(p.startswith(".") for p in f.relative_to(path).parts)]
    texts = [text for file in files if (text := read_text(file))]
    if not texts:
        raise InputError(f"--data must name a text file or a folder that holds some, got {path} without UTF-8 text")
    return texts


def read_text(file):
    """The file's text; None where it is not UTF-8, as a picture among the texts is not."""
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError:
        return None


def cache_folder():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxferry"


def replace_file(file, write):
    """Writes a file so that no other process ever sees half of it."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    with open(part, "wb") as stream:
        write(stream)
    part.replace(file)


def train_byte_bpe(texts, vocab_size, special_tokens=()):
    """A byte-level BPE, GPT-2's and RoBERTa's: it can spell any text. Special tokens have the first ids."""
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
    """All texts as one vector; in pieces, so that a long file does not wait for one core."""
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    end = [] if separator is None else [np.array([tokenizer.token_to_id(separator)], dtype)]
    pieces = [[text[i : i + PIECE_CHARS] for i in range(0, len(text), PIECE_CHARS)] for text in texts]
    encoded = iter(tokenizer.encode_batch_fast([piece for text in pieces for piece in text]))
    return np.concatenate(
        [part for text in pieces for part in [*(np.array(next(encoded).ids, dtype) for _ in text), *end]]
    )
