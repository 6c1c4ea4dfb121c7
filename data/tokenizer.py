"""Text to token ids and back, and the token that ends a document."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from config import TitaniteError
from records import write_atomically

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
LEARNT_WORD_BYTES = 2000  # longer words are cut, only while a tokenizer is trained
# Tried in this order if no tokenizer_config.json names the end-of-document token.
KNOWN_EOS = ("<|end_of_text|>", END_OF_TEXT, "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer:
    """A `tokenizers` tokenizer with the ids that training needs. Raises TitaniteError if it lacks them.

    Text never becomes a special token. A document that spells out `<|endoftext|>` is encoded
    as those characters, so documents end exactly where `encode_documents` ends them.
    """

    def __init__(self, raw: RawTokenizer, eos_token: str, name: str = "tokenizer", chat_template: str = ""):
        eos_id = raw.token_to_id(eos_token)
        if eos_id is None:
            raise TitaniteError(f"{name}: has no token {eos_token!r}; its special tokens are {_special_tokens(raw)}")
        raw.no_truncation()
        raw.no_padding()
        raw.encode_special_tokens = True
        self.raw = raw
        self.eos_token = eos_token
        self.chat_template = chat_template  # Jinja, "" without one
        self.eos_id: int = eos_id
        self.vocab_size: int = max(raw.get_vocab().values()) + 1
        self.fingerprint: str = fingerprint(raw.to_str().encode(), eos_token)
        try:
            template = raw.encode("a")
            spellings = (eos_token, f"a{eos_token}a", f"a {eos_token} a", f"\n{eos_token}\n")
            spelt_out = [token for text in spellings for token in raw.encode(text, add_special_tokens=False).ids]
            text_begins = template.special_tokens_mask.index(0)
        except Exception as error:  # tokenizers raises bare Exception
            raise TitaniteError(f"{name}: cannot encode the letter a: {error}") from None
        if eos_id in spelt_out:
            raise TitaniteError(
                f"{name}: a text that spells out {eos_token!r} would become that token and end a document; "
                "choose a token that is marked as special and that the model does not find in text"
            )
        # What the tokenizer's template puts before a text, such as Llama 3's <|begin_of_text|>. Never an eos.
        self.prefix: list[int] = [token for token in template.ids[:text_begins] if token != eos_id]
        self.bos_id: int | None = self.prefix[0] if self.prefix else None

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
        """Write tokenizer_config.json with the eos token, any chat template, and tokenizer.json to `folder`.

        Writes each atomically, in this order: even after a kill a tokenizer.json has its eos token beside it.
        """
        config = json.dumps({"eos_token": self.eos_token}) + "\n"
        if not self.chat_template:
            (folder / CHAT_TEMPLATE).unlink(missing_ok=True)
        for name, text in ((CONFIG, config), (CHAT_TEMPLATE, self.chat_template), (TOKENIZER, self.raw.to_str())):
            if text:
                write_atomically(folder / name, text.encode())


def load_tokenizer(path: str | Path, eos_token: str = "") -> Tokenizer:
    """Load the tokenizer of a tokenizer.json, or of a folder with one. Raises TitaniteError.

    The token that ends a document is `eos_token`, else the one that a tokenizer_config.json
    beside the file names, else the first of `KNOWN_EOS` in the vocabulary.
    """
    try:
        file = Path(path) / TOKENIZER if Path(path).is_dir() else Path(path)
        content = file.read_bytes()
        beside = [file.with_name(name) for name in (CONFIG, CHAT_TEMPLATE)]
        files = {other.name: other.read_bytes() for other in beside if other.is_file()}
    except FileNotFoundError as error:
        raise TitaniteError(f"{error.filename}: no such tokenizer file") from None
    except OSError as error:
        raise TitaniteError(f"{error.filename}: cannot be read: {error.strerror}") from None
    declared = eos_token or declared_eos(files.get(CONFIG, b"{}"), str(file.with_name(CONFIG)))
    return parse_tokenizer(content, declared, str(file), find_chat_template(files, str(file.parent)))


def parse_tokenizer(content: bytes, eos_token: str, name: str, chat_template: str) -> Tokenizer:
    """Make a tokenizer from the content of a tokenizer.json; see load_tokenizer. Raises TitaniteError."""
    raw = parse_raw(content, name)
    return Tokenizer(raw, eos_token or _known_eos(raw, name), name, chat_template)


def parse_raw(content: bytes, name: str) -> RawTokenizer:
    """The `tokenizers` tokenizer of a tokenizer.json's content. Raises TitaniteError."""
    try:
        return RawTokenizer.from_str(content.decode())
    except Exception as error:  # tokenizers raises bare Exception
        raise TitaniteError(f"{name}: not a tokenizer.json: {error}") from None


def find_chat_template(files: Mapping[str, bytes], folder: str) -> str:
    """The chat template among a tokenizer's files in `folder` (name → content), or "". Raises TitaniteError."""
    found = json_object(files.get(CONFIG, b"{}"), f"{folder}/{CONFIG}").get("chat_template") or ""
    try:
        if CHAT_TEMPLATE in files:
            return files[CHAT_TEMPLATE].decode()
        if isinstance(found, str):
            return found
        return next((entry["template"] for entry in found if entry["name"] == "default"), "")  # named templates
    except (UnicodeDecodeError, KeyError, TypeError) as error:
        raise TitaniteError(f"{folder}: not a valid chat template: {type(error).__name__} {error}") from None


def declared_eos(content: bytes, name: str) -> str:
    """The eos token that the content of a tokenizer_config.json names, or "". Raises TitaniteError."""
    declared = json_object(content, name).get("eos_token") or ""
    eos = declared.get("content") if isinstance(declared, dict) else declared
    if not isinstance(eos, str):
        raise TitaniteError(f"{name}: eos_token = {json.dumps(declared)}: must be the token's text")
    return eos


def json_object(content: bytes, name: str) -> dict[str, Any]:
    """The JSON object in the content of the file `name`. Raises TitaniteError."""
    try:
        found = json.loads(content)
    except ValueError as error:
        raise TitaniteError(f"{name}: not a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise TitaniteError(f"{name}: not a JSON object, but {type(found).__name__}")
    return found


def fingerprint(content: bytes, eos_token: str) -> str:
    """16 hex digits that name a tokenizer, given the tokenizer.json that `Tokenizer.save` writes."""
    return hashlib.sha256(eos_token.encode() + b"\0" + content).hexdigest()[:16]


def _known_eos(raw: RawTokenizer, name: str) -> str:
    for token in KNOWN_EOS:
        if raw.token_to_id(token) is not None:
            return token
    raise TitaniteError(
        f"{name}: has no known token that ends a document, such as {', '.join(KNOWN_EOS)}; "
        f"its special tokens are {_special_tokens(raw)}"
    )


def _special_tokens(raw: RawTokenizer) -> str:
    return ", ".join(token.content for token in raw.get_added_tokens_decoder().values()) or "none"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` tokens, including `<|endoftext|>`, on `texts`."""
    raw = RawTokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Training time grows with the square of a word's length, and a text may be one word of a million letters.
    raw.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(LEARNT_WORD_BYTES)])
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    raw.pre_tokenizer = words
    return Tokenizer(raw, END_OF_TEXT)
