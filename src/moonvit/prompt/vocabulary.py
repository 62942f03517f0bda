"""A checkpoint's tokenizer, cut to what prompts need: markers by literal, and text in which none is seen.

`tiktoken.model` (Kimi) is read with tiktoken, `tokenizer.json` with tokenizers; both come with the extra
`engine`. Nothing in the files is executed.
"""

import json
import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from moonvit.errors import ConfigError, MoonvitError, TokenizerError
from moonvit.fields import JSON_LIMIT, Fields, parse_json, shown
from moonvit.weights.small import SmallFiles

TOKENIZER_LIMIT = 64 * 2**20
"""Bytes of a tokenizer file."""

RESERVED = 256
"""Ids behind the ordinary ones that a Kimi tokenizer keeps for markers."""

_PIECE, _RUN = 400_000, 25_000  # characters that tiktoken takes at once, in all and without a break

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How Kimi's tokenizers split text; source: `tokenization_kimi.py` of the released checkpoints."""


class Vocabulary(Protocol):
    """What prompts need of a tokenizer.

    Attributes:
        name: its file, for errors.
        marks: {literal: id} of all markers.
        size: one more than the highest id.
    """

    name: str
    marks: Mapping[str, int]
    size: int

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; no marker is seen in it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, markers written out; broken UTF-8 becomes U+FFFD, an id of nothing no text."""
        ...


def open_vocabulary(files: SmallFiles) -> Vocabulary:
    """The tokenizer of a checkpoint; `TokenizerError` where there is none or it is broken."""
    names = files.file_names()
    if files.where.lower().endswith(".gguf"):
        raise TokenizerError(
            f"{files.where}: is a mmproj file, which has no tokenizer", "give the directory of the checkpoint"
        )
    if "tiktoken.model" in names:
        return TiktokenVocabulary(files, names)
    if "tokenizer.json" in names:
        return JsonVocabulary(files)
    raise TokenizerError(
        f"{files.where}: no tiktoken.model and no tokenizer.json",
        "prompts need the checkpoint's tokenizer files; put them beside config.json",
    )


class TiktokenVocabulary:
    """A Kimi tokenizer: ranks in `tiktoken.model`, markers in `tokenizer_config.json`."""

    def __init__(self, files: SmallFiles, names: Sequence[str]) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise _missing("tiktoken") from error
        self.name = f"{files.where}/tiktoken.model"
        ranks = _ranks(_read(files, "tiktoken.model"), self.name)
        named = _added_tokens(files) if "tokenizer_config.json" in names else {}
        first = len(ranks)
        self.marks: Mapping[str, int] = {
            named.get(n, f"<|reserved_token_{n}|>"): n for n in range(first, first + RESERVED)
        }
        if len(self.marks) != RESERVED:
            raise TokenizerError(f"{files.where}/tokenizer_config.json: a marker is named twice")
        self.size = first + RESERVED
        try:
            self._model = tiktoken.Encoding(
                "kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=dict(self.marks)
            )
        except (ValueError, KeyError, AssertionError) as error:
            raise TokenizerError(f"{self.name}: not a tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        with _panics(self.name):
            return [token for piece in _pieces(text) for token in self._model.encode_ordinary(piece)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([token for token in ids if token < self.size])


class JsonVocabulary:
    """A `tokenizer.json`; a second copy without its added tokens encodes ordinary text."""

    def __init__(self, files: SmallFiles) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise _missing("tokenizers") from error
        self.name = f"{files.where}/tokenizer.json"
        data = _read(files, "tokenizer.json")
        try:
            content = Fields(parse_json(data, self.name), self.name).values
            plain = {**content, **dict.fromkeys(("post_processor", "truncation", "padding"))}
            plain["added_tokens"] = []
            self._model = tokenizers.Tokenizer.from_buffer(data)
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain))
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"{self.name}: not a tokenizer: {error}") from error
        added = self._model.get_added_tokens_decoder()
        self.marks: Mapping[str, int] = {token.content: n for n, token in added.items()}
        self.size = 1 + max(self._model.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> list[int]:
        with _panics(self.name):
            return list(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode(list(ids), skip_special_tokens=False))


def _read(files: SmallFiles, name: str) -> bytes:
    try:
        return files.small_file(name, TOKENIZER_LIMIT)
    except ConfigError as error:
        raise TokenizerError(error.message, error.hint) from error


def _ranks(data: bytes, where: str) -> dict[bytes, int]:
    """The lines of a tiktoken file: a token in base64 and its rank; ranks run from 0 without a gap."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            token = b64decode(token, validate=True)
        except (ValueError, Base64Error) as error:
            raise TokenizerError(f"{where}: line {number} is not a token and its rank") from error
        if not (rank.isdigit() and len(rank) < 10):
            raise TokenizerError(f"{where}: line {number} is not a token and its rank")
        if token in ranks:
            raise TokenizerError(f"{where}: line {number} has the token of an earlier one")
        ranks[token] = int(rank)
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{where}: ranks do not run from 0 to {len(ranks) - 1}")
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:
        raise TokenizerError(
            f"{where}: has no token for the byte {lacking[0]}", "not every text can be written"
        )
    return ranks


def _added_tokens(files: SmallFiles) -> dict[int, str]:
    """{id: literal} of `added_tokens_decoder`."""
    where = f"{files.where}/tokenizer_config.json"
    config = Fields(parse_json(files.small_file("tokenizer_config.json", JSON_LIMIT), where), where)
    if "added_tokens_decoder" not in config.values:
        return {}
    added = config.section("added_tokens_decoder").values
    found: dict[int, str] = {}
    for number, token in added.items():
        content = token.get("content") if isinstance(token, Mapping) else None
        if not re.fullmatch("0|[1-9][0-9]{0,8}", number) or not isinstance(content, str):
            raise TokenizerError(f"{where}: added_tokens_decoder holds {shown(number)}: {shown(token)}")
        found[int(number)] = content
    return found


def _pieces(text: str) -> Iterator[str]:
    """Text cut as Kimi's own tokenizer cuts it: no run of words or blanks too long for tiktoken."""
    for start in range(0, len(text), _PIECE):
        part = text[start : start + _PIECE]
        begin, length, blank = 0, 0, part[0].isspace()
        for place, character in enumerate(part):
            if character.isspace() != blank:
                length, blank = 1, not blank
                continue
            length += 1
            if length > _RUN:
                yield part[begin:place]
                begin, length = place, 1
        yield part[begin:]


@contextmanager
def _panics(where: str) -> Iterator[None]:
    """A panic of the Rust behind both libraries, which is no Exception, as an error of ours."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{where}: fails on this text: {error}") from error


def _missing(library: str) -> MoonvitError:
    return MoonvitError(f"prompts need {library}, which is not installed", "pip install 'moonvit[engine]'")
