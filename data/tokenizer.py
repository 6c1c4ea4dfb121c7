"""Text to token ids and back, and the token that ends a document."""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from config import TitaniteError, file_errors
from records import write_atomically

log = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
OLDER_CONFIG = "special_tokens_map.json"
END_OF_TEXT = "<|endoftext|>"
PROBE = "A b\n\tc0x1F: naïve 日本 🙂."  # a text whose bytes are counted
LEARNT_WORD_BYTES = 2000  # longer words are cut, only while a tokenizer is trained
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a byte that no other token holds
# Tried in this order if no tokenizer_config.json names the end-of-document token.
KNOWN_EOS = ("<|end_of_text|>", END_OF_TEXT, "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer:
    """A `tokenizers` tokenizer with the ids that training needs. Raises TitaniteError if it lacks them.

    Text never becomes a special token: a document that spells out `<|endoftext|>` does not end there.
    """

    def __init__(self, raw: RawTokenizer, eos_token: str, name: str = "tokenizer", /, **declared: Any):
        eos_id = raw.token_to_id(eos_token)
        if eos_id is None:
            special = ", ".join(token.content for token in raw.get_added_tokens_decoder().values())
            raise TitaniteError(f"{name}: has no token {eos_token!r}; give --eos-token, one of: {special}")
        raw.no_truncation()
        raw.no_padding()
        raw.encode_special_tokens = True
        self.raw = raw
        self.eos_token = eos_token
        self.chat_template: str = declared.pop("chat_template", "")  # Jinja, "" without one
        self.eos_id: int = eos_id
        ids = raw.get_vocab()
        self.vocab_size: int = max(ids.values()) + 1
        self.fingerprint: str = fingerprint(raw.to_str().encode(), eos_token)
        spellings = [eos_token, f"a{eos_token}a", f"a {eos_token} a", f"\n{eos_token}\n"]
        if any(eos_id in encoding.ids for encoding in raw.encode_batch(spellings, add_special_tokens=False)):
            raise TitaniteError(f"{name}: a text that spells out {eos_token!r} would become that token; choose another")
        # What the tokenizer's template puts before a text, such as Llama 3's <|begin_of_text|>. Never an eos.
        template = raw.encode("a")
        before = template.ids[: template.special_tokens_mask.index(0)]
        self.prefix: list[int] = [token for token in before if token != eos_id]
        # The fields of tokenizer_config.json, such as its class, and those that name a token: bos_token, pad_token.
        bos = {"bos_token": raw.id_to_token(self.prefix[0])} if self.prefix else {}
        self.declared = {key: _content(field) for key, field in (bos | declared | {"eos_token": eos_token}).items()}
        self.special = {key: token for key, token in self.declared.items() if key[-6:] == "_token" and token in ids}
        self.bos_id = ids.get(self.special.get("bos_token", ""))

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """Bytes of text that each id stands for [vocab_size], special tokens 0; all 0 if text does not keep its bytes.

        Ids are spelt in letters that each stand for a byte, or as text with ▁ for a space and <0x0A> for a byte.
        """
        names, added = self.raw.get_vocab(), self.raw.get_added_tokens_decoder()
        for count in (len, lambda name: 1 if BYTE.fullmatch(name) else len(name.replace("▁", " ").encode())):
            lengths = np.zeros(self.vocab_size, np.int64)
            for name, id in names.items():
                lengths[id] = count(name)
            for id, token in added.items():
                lengths[id] = 0 if token.special else len(token.content.encode())
            ids = self.raw.encode(PROBE, add_special_tokens=False).ids
            if 0 <= lengths[ids].sum() - len(PROBE.encode()) <= 1:  # some put a space before a text
                return lengths
        log.info("no bits per byte: the ids of this tokenizer do not stand for all bytes of a text")
        return np.zeros(self.vocab_size, np.int64)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with any bos of the tokenizer's template and without an eos."""
        return self.prefix + self.raw.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text as a document: any bos of the template, the text, exactly one eos."""
        encodings = self.raw.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[*self.prefix, *encoding.ids, self.eos_id] for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens."""
        return self.raw.decode(list(ids), skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Write declared fields, any chat template, and last tokenizer.json: a kill leaves none without its eos."""
        write_atomically(folder / CONFIG, (json.dumps(self.declared) + "\n").encode())
        (folder / CHAT_TEMPLATE).unlink(missing_ok=True)
        if self.chat_template:
            write_atomically(folder / CHAT_TEMPLATE, self.chat_template.encode())
        write_atomically(folder / TOKENIZER, self.raw.to_str().encode())


def load_tokenizer(path: str | Path, eos_token: str = "") -> Tokenizer:
    """Load the tokenizer of a tokenizer.json, or of a folder with one; see `parse_tokenizer`. Raises TitaniteError."""
    with file_errors():
        file = Path(path) / TOKENIZER if Path(path).is_dir() else Path(path)
        beside = [file.with_name(name) for name in (CONFIG, OLDER_CONFIG, CHAT_TEMPLATE)]
        files = {other.name: other.read_bytes() for other in beside if other.is_file()} | {TOKENIZER: file.read_bytes()}
    return parse_tokenizer(files, str(file.parent), eos_token)


def parse_tokenizer(files: Mapping[str, bytes], folder: str, eos_token: str = "") -> Tokenizer:
    """Make a tokenizer from its files, name → content; `folder` is named in errors. Raises TitaniteError.

    A document ends with `eos_token`, or the eos that tokenizer_config.json names, or the first of `KNOWN_EOS`.
    """
    name = f"{folder}/{TOKENIZER}"
    eos_token = eos_token or declared_eos(files, folder)
    declared = _declared_fields(files, folder)
    template = declared.get("chat_template") or ""
    try:
        if CHAT_TEMPLATE in files:
            template = files[CHAT_TEMPLATE].decode()
        elif isinstance(template, list):  # several, of which the default one is for conversations
            template = {entry["name"]: entry["template"] for entry in template}.get("default", "")
        raw = RawTokenizer.from_str(files[TOKENIZER].decode())
        eos_token = eos_token or next((eos for eos in KNOWN_EOS if raw.token_to_id(eos) is not None), KNOWN_EOS[0])
        return Tokenizer(raw, eos_token, name, **declared | {"chat_template": template})
    except TitaniteError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise TitaniteError(f"{name}: not a tokenizer: {error}") from None


def declared_eos(files: Mapping[str, bytes], folder: str) -> str:
    """The eos token that a tokenizer_config.json among `files` names, or "". Raises TitaniteError."""
    return _content(_declared_fields(files, folder).get("eos_token")) or ""


def _declared_fields(files: Mapping[str, bytes], folder: str) -> dict[str, Any]:
    """The fields of tokenizer_config.json and, in older folders, special_tokens_map.json, as transformers has them."""
    config, older = (json_object(files.get(name, b"{}"), f"{folder}/{name}") for name in (CONFIG, OLDER_CONFIG))
    return config if "added_tokens_decoder" in config else config | older


def _content(field: Any) -> Any:
    """A token's text, which may stand in an object; other fields as they are."""
    return field.get("content", field) if isinstance(field, dict) else field


def json_object(content: bytes, name: str) -> dict[str, Any]:
    """The JSON object in the content of the file `name`. Raises TitaniteError."""
    try:
        return dict(json.loads(content))
    except (TypeError, ValueError) as error:
        raise TitaniteError(f"{name}: not a JSON object: {error}") from None


def fingerprint(content: bytes, eos_token: str) -> str:
    """16 hex digits that name a tokenizer, given the tokenizer.json that `Tokenizer.save` writes."""
    return hashlib.sha256(eos_token.encode() + b"\0" + content).hexdigest()[:16]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` tokens, including `<|endoftext|>`, on `texts`."""
    raw = RawTokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Training time grows with the square of a word's length, and a text may be one word of a million letters.
    raw.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(LEARNT_WORD_BYTES)])
    raw.decoder = decoders.ByteLevel()
    all_bytes = sorted(pre_tokenizers.ByteLevel.alphabet())
    options: dict[str, Any] = {"special_tokens": [END_OF_TEXT], "initial_alphabet": all_bytes, "show_progress": False}
    raw.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    raw.pre_tokenizer = words
    return Tokenizer(raw, END_OF_TEXT)
