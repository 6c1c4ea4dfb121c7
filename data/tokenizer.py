"""Text to token ids and back, and the token that ends a document."""

import hashlib
import json
import logging
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from config import TitaniteError, file_errors
from storage import open_store

log = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # a folder
CONFIG = "tokenizer_config.json"
OLDER_CONFIG = "special_tokens_map.json"
SETTLED = "tokenizer_settled.json"  # what transformers makes of the others, where tokenizer.json says otherwise
FILES = (TOKENIZER, CONFIG, OLDER_CONFIG, "added_tokens.json", CHAT_TEMPLATE, SETTLED)
MODEL_CONFIG = "config.json"  # beside a tokenizer: its folder is a model's of Hugging Face
NEEDED = "transformers is not installed; chats, pairs and tools.hf need: pip install -r requirements-tuning.txt"
END_OF_TEXT = "<|endoftext|>"
PROBE = "A b\n\tc0x1F: naïve 日本 🙂."  # a text whose bytes are counted
LEARNT_WORD_BYTES = 2000  # longer words are cut, only while a tokenizer is trained
# Parts of a tokenizer.json that decide the ids of a text, beside the post-processor.
PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens")
# In transformers' order. A tokenizer may name others.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a byte that no other token holds
# Tried in this order if no tokenizer_config.json names the end-of-document token.
KNOWN_EOS = ("<|end_of_text|>", END_OF_TEXT, "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer:
    """A `tokenizers` tokenizer with the ids that training needs. Raises TitaniteError if it lacks them.

    Text never becomes a special token: a document that spells out `<|endoftext|>` does not end there. `declared` are
    the fields of tokenizer_config.json; `given` are the files that the tokenizer was read from, name → content.
    """

    def __init__(
        self,
        raw: RawTokenizer,
        eos_token: str,
        name: str = "tokenizer",
        /,
        given: Mapping[str, bytes] | None = None,
        **declared: Any,
    ):
        raw.no_truncation()
        raw.no_padding()
        named = eos_token.encode() + b"\0" + raw.to_str().encode()
        self.fingerprint: str = hashlib.sha256(named).hexdigest()[:16]
        if getattr(raw.model, "dropout", None):
            log.warning(f"{name}: its dropout is switched off: otherwise a text has other ids each time")
            raw.model.dropout = None
        _add_declared(raw, declared)
        eos_id = raw.token_to_id(eos_token)
        if eos_id is None:
            special = ", ".join(token.content for token in raw.get_added_tokens_decoder().values())
            raise TitaniteError(f"{name}: has no token {eos_token!r}; give --eos-token, one of: {special}")
        raw.encode_special_tokens = True
        self.raw = raw
        self.eos_token = eos_token
        self.eos_id: int = eos_id
        self.chat_template: str = _template_of(declared.pop("chat_template", ""))  # Jinja, "" without one
        self._given = dict(given or {})
        self._given_template = self.chat_template if given else ""
        self.declared = declared
        self.vocab_size: int = max(raw.get_vocab().values()) + 1
        spellings = [eos_token, f"a{eos_token}a", f"a {eos_token} a", f"\n{eos_token}\n"]
        if any(eos_id in encoding.ids for encoding in raw.encode_batch(spellings, add_special_tokens=False)):
            raise TitaniteError(f"{name}: a text that spells out {eos_token!r} would become that token; choose another")
        # What the tokenizer's template puts before a text, such as Llama 3's <|begin_of_text|>. Never an eos.
        template = raw.encode("a")
        before = template.ids[: template.special_tokens_mask.index(0)]
        self.prefix: list[int] = [token for token in before if token != eos_id]

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """Bytes of text that each id stands for [vocab_size], special tokens 0; all 0 if text does not keep its bytes.

        Ids are spelt in letters that each stand for a byte, or as text with ▁ for a space and <0x0A> for a byte.
        """
        for count in (len, _count_bytes):
            lengths = np.zeros(self.vocab_size, np.int64)
            for name, id in self.raw.get_vocab().items():
                lengths[id] = count(name)
            for id, token in self.raw.get_added_tokens_decoder().items():
                lengths[id] = 0 if token.special else len(token.content.encode())
            ids = self.raw.encode(PROBE, add_special_tokens=False).ids
            if 0 <= lengths[ids].sum() - len(PROBE.encode()) <= 1:  # some put a space before a text
                return lengths
        log.info("no bits per byte: the ids of this tokenizer do not stand for all bytes of a text")
        return np.zeros(self.vocab_size, np.int64)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with any bos of the tokenizer's template and without an eos."""
        return self.prefix + self.raw.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids (uint32) of each text as a document: any bos of the template, the text, exactly one eos."""
        documents = []
        for encoding in self.raw.encode_batch_fast(list(texts), add_special_tokens=False):
            ids = array("I", self.prefix)  # takes a list in half the time that numpy needs
            ids.fromlist(encoding.ids)
            ids.append(self.eos_id)
            documents.append(np.frombuffer(ids, np.uint32))
        return documents

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens."""
        return self.raw.decode(list(ids), skip_special_tokens=True)

    def files(self) -> dict[str, bytes]:
        """Its files, name → content: those that it was read from, byte for byte, and what was changed since."""
        files = dict(self._given)
        if TOKENIZER not in files:
            files[TOKENIZER] = self.raw.to_str().encode()
        config = json_object(files.get(CONFIG, b"{}"), CONFIG)
        if content_of(config.get("eos_token")) != self.eos_token:
            first = {"bos_token": self.raw.id_to_token(self.prefix[0])} if self.prefix else {}
            made = {"tokenizer_class": "PreTrainedTokenizerFast", **first, **self.declared, **config}
            files[CONFIG] = (json.dumps(made | {"eos_token": self.eos_token}, indent=2) + "\n").encode()
        if self.chat_template != self._given_template:
            files[CHAT_TEMPLATE] = self.chat_template.encode()
        return files

    def save(self, place: str | Path) -> None:
        """Write its files into a folder or `s3://`, and last tokenizer.json: a kill leaves none without its eos."""
        store = open_store(place)
        files = self.files()
        store.remove([name for name in FILES if name not in files])
        for name in sorted(files, key=lambda name: name == TOKENIZER):
            store.put(name, files[name])


def _count_bytes(name: str) -> int:
    return 1 if BYTE.fullmatch(name) else len(name.replace("▁", " ").encode())


def load_tokenizer(path: str | Path, eos_token: str = "") -> Tokenizer:
    """Load the tokenizer of a tokenizer.json, or of a folder with one; see `parse_tokenizer`. Raises TitaniteError."""
    with file_errors():
        file = Path(path) / TOKENIZER if Path(path).is_dir() else Path(path)
        files = read_files(file.parent) | {TOKENIZER: file.read_bytes()}
    return parse_tokenizer(files, str(file.parent), eos_token)


def read_files(folder: Path, names: Iterable[str] = FILES) -> dict[str, bytes]:
    """Name → content of those of `names`, by default the tokenizer's files, that a folder has. Raises TitaniteError.

    For a model of Hugging Face's, SETTLED is among them where it is needed: a tokenizer is settled where it enters.
    """
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    if (folder / MORE_TEMPLATES).is_dir():
        log.warning(f"{folder}: {MORE_TEMPLATES} are not read, only {CHAT_TEMPLATE}; --chat-template takes another")
    if SETTLED not in files and TOKENIZER in files and (folder / MODEL_CONFIG).is_file():
        files |= _settle(folder, files)
    return files


def _settle(folder: Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """SETTLED, if AutoTokenizer of a model's folder has other ids or special tokens than its tokenizer.json.

    It believes the class in tokenizer_config.json for some models and not for others (transformers 5). Raises
    TitaniteError without transformers.
    """
    try:
        from transformers import AutoTokenizer, logging
    except ImportError:
        advice = (
            "pip install -r requirements-tuning.txt, or copy the tokenizer's files elsewhere, where they count alone"
        )
        raise TitaniteError(
            f"{folder}: how this model's tokenizer splits text is known to transformers: {advice}"
        ) from None
    logging.set_verbosity_error()
    declared = _declared_fields(files, str(folder))
    try:
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        backend = theirs.backend_tokenizer
    except Exception as error:  # of any kind, from any of its classes
        said = " ".join(str(error).split())[:200]
        log.warning(f"{folder}: transformers cannot read the tokenizer, so tokenizer.json counts alone: {said}")
        return {}
    ours = RawTokenizer.from_str(files[TOKENIZER].decode())
    _add_declared(ours, declared)
    special = {key: token for key, token in theirs.special_tokens_map.items() if key in NAMED}
    is_same = all(content_of(declared.get(key)) == token for key, token in special.items())
    if is_same and _segmentation(ours) == _segmentation(backend):
        return {}
    log.info(f"{folder}: its tokenizer is {type(theirs).__name__} to transformers, not its tokenizer.json")
    return {SETTLED: json.dumps({"tokenizer": json.loads(backend.to_str()), "special_tokens": special}).encode()}


def _segmentation(raw: RawTokenizer) -> list[Any]:
    """What decides the ids of a text."""
    parts = json.loads(raw.to_str())
    return [*(_without_empty(parts[name]) for name in PARTS), raw.encode("a").ids]


def _without_empty(value: Any) -> Any:
    """A part of a tokenizer.json without fields that say nothing, and without its dropout."""
    if isinstance(value, dict):
        return {key: _without_empty(part) for key, part in value.items() if part not in (None, "", False)}
    if isinstance(value, list):
        return [_without_empty(part) for part in value]
    return value


def parse_tokenizer(files: Mapping[str, bytes], folder: str, eos_token: str = "") -> Tokenizer:
    """Make a tokenizer from its files, name → content; `folder` is named in errors. Raises TitaniteError.

    A document ends with `eos_token`, or the eos that tokenizer_config.json names, or the first of `KNOWN_EOS`.
    """
    name = f"{folder}/{TOKENIZER}"
    given = {file: content for file, content in files.items() if file in FILES}
    declared = _declared_fields(files, folder)
    try:
        if CHAT_TEMPLATE in files:
            declared["chat_template"] = files[CHAT_TEMPLATE].decode()
        backend = files[TOKENIZER].decode()
        if SETTLED in files:
            settled = json_object(files[SETTLED], f"{folder}/{SETTLED}")
            backend = json.dumps(settled["tokenizer"])
            declared |= settled["special_tokens"]
        raw = RawTokenizer.from_str(backend)
        eos_token = eos_token or content_of(declared.get("eos_token"))
        eos_token = eos_token or next((eos for eos in KNOWN_EOS if raw.token_to_id(eos) is not None), KNOWN_EOS[0])
        return Tokenizer(raw, eos_token, name, given=given, **declared)
    except TitaniteError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise TitaniteError(f"{name}: not a tokenizer: {error}") from None


def _declared_fields(files: Mapping[str, bytes], folder: str) -> dict[str, Any]:
    """The fields of tokenizer_config.json and, in older folders, special_tokens_map.json, as transformers has them."""
    config = json_object(files.get(CONFIG, b"{}"), f"{folder}/{CONFIG}")
    older = json_object(files.get(OLDER_CONFIG, b"{}"), f"{folder}/{OLDER_CONFIG}")
    return config if "added_tokens_decoder" in config else config | older


def _template_of(declared: Any) -> str:
    """The chat template in a tokenizer_config.json. Of several named ones, one that chooses as transformers does."""
    if not isinstance(declared, list):
        return declared or ""
    # At its end a template's line end is no text.
    named = {entry["name"]: entry["template"].removesuffix("\n") for entry in declared}
    default = named.get("default", "")
    if "tool_use" not in named:
        return default
    # Jinja would trim the spaces beside a tag, but keeps those beside an empty text.
    return f"{{% if tools %}}{{{{ '' }}}}{named['tool_use']}{{{{ '' }}}}{{% else %}}{{{{ '' }}}}{default}{{% endif %}}"


def _add_declared(raw: RawTokenizer, declared: Mapping[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json declares, in the order in which transformers adds them."""
    added = {token.content: repr(token) for token in raw.get_added_tokens_decoder().values()}
    names = _named_tokens(declared)
    numbered = declared.get("added_tokens_decoder") or {}
    tokens = []
    for id in sorted(numbered, key=int):
        token = AddedToken(**numbered[id])
        if added.get(token.content) != repr(token):
            token.special = token.special or token.content in names
            tokens.append(token)
    known = {*added, *(token.content for token in tokens)}
    tokens += [AddedToken(name, special=True) for name in names if name not in known]
    raw.add_tokens(tokens)


def _named_tokens(declared: Mapping[str, Any]) -> list[str]:
    """The texts of the special tokens that a tokenizer_config.json names, each once."""
    extra = declared.get("extra_special_tokens") or declared.get("additional_special_tokens") or []
    others = [key for key in declared if key.endswith("_token") and key not in NAMED]
    fields = [declared.get(key) for key in (*NAMED, *others)]
    fields += extra.values() if isinstance(extra, dict) else extra
    texts = map(content_of, fields)
    return list(dict.fromkeys(text for text in texts if isinstance(text, str)))


def content_of(field: Any) -> Any:
    """A token's text, which may stand in an object; other fields as they are."""
    return field.get("content", field) if isinstance(field, dict) else field


def json_object(content: bytes, name: str) -> dict[str, Any]:
    """The JSON object in the content of the file `name`. Raises TitaniteError."""
    try:
        return dict(json.loads(content))
    except (TypeError, ValueError) as error:
        raise TitaniteError(f"{name}: not a JSON object: {error}") from None


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
