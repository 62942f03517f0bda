"""A family's prompts with a checkpoint's tokenizer: turns to ids and slots, and back."""

import os
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from moonvit.errors import ConfigError, PromptError, TokenizerError
from moonvit.fields import JSON_LIMIT, Fields, parse_json, shown
from moonvit.prompt.expand import cut, expand_ids, expand_text, runs, whole_numbers
from moonvit.prompt.forms import FORMS
from moonvit.prompt.parts import Kind, Prompt, Slot, Turn, check_turns
from moonvit.prompt.pieces import Choices, Mark, Pads, Piece, joined
from moonvit.prompt.vocabulary import Vocabulary, open_vocabulary
from moonvit.weights.small import SmallFiles


class PromptFormat:
    """A family's way to write prompts, with the ids of one tokenizer.

    Attributes:
        family: such as "kimi_k3".
        vocabulary: the tokenizer.
        size: ids in all, as `config.json` says or, where it does not, as the tokenizer has.
        end_ids: ids which end an assistant's turn: the family's own and those of `generation_config.json`,
            but for ids outside the vocabulary, which no model of it can give.
    """

    def __init__(
        self,
        family: str,
        vocabulary: Vocabulary,
        config: Mapping[str, Any],
        where: str = "config.json",
        ends: Collection[int] = (),
    ) -> None:
        if family not in FORMS:
            raise PromptError(f"family is {family!r}, expected one of {', '.join(FORMS)}")
        self.family = family
        self.vocabulary = vocabulary
        self._form = FORMS[family]
        self._resolve(Fields(config, where))
        own = {vocabulary.marks[literal] for literal in self._form.ends}
        self.end_ids = frozenset(own | {token for token in ends if 0 <= token < self.size})
        self._pads = frozenset(vocabulary.marks[literal] for literal in self._form.pads.values())

    @classmethod
    def open(cls, checkpoint: SmallFiles | str | os.PathLike[str], family: str | None = None) -> Self:
        """The format of a checkpoint; of one named here only config and tokenizer files are read.

        Args:
            checkpoint: an opened one, or a directory or repository, which need hold no weights.
            family: one of `FORMS`; None is what `config.json` says.

        Raises:
            TokenizerError: for a tokenizer that is missing, broken or lacks a marker.
            ConfigError: where `config.json` gives a marker another id.
            PromptError: for an unknown family.
        """
        if isinstance(checkpoint, str | os.PathLike):
            from moonvit.weights.source import config_files

            checkpoint = config_files(checkpoint)
        where = f"{checkpoint.where}/config.json"
        if family is None:
            from moonvit.families import family_of

            family = family_of(checkpoint.config, where).name
        if family not in FORMS:
            raise PromptError(f"family is {family!r}, expected one of {', '.join(FORMS)}")
        return cls(
            family, open_vocabulary(checkpoint), checkpoint.config, where, _generation_ends(checkpoint)
        )

    def pad_id(self, kind: Kind) -> int:
        """The id that stands for one row of embeddings."""
        return self.vocabulary.marks[self._form.pads[kind]]

    def encode(
        self,
        turns: Sequence[Turn],
        *,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        thinking_effort: str | None = "max",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Prompt:
        """The prompt of a conversation.

        Args:
            turns: the conversation.
            add_generation_prompt: open the assistant's next turn.
            thinking: K3 and K2.5: with or without thoughts; None is with, as their own tokenizers do.
            thinking_effort: K3: "low" to "max", or None to say nothing of it.
            tools: K3: declarations of tools.

        Raises:
            PromptError: for what the family's form does not have, and for text whose ids the model lacks.
        """
        if thinking is not None and not self._form.thinks:
            raise PromptError(f"{self.family} has no thinking mode", "leave thinking out")
        choices = Choices(add_generation_prompt, thinking, thinking_effort, tools)
        pieces = self._form.render(check_turns(turns), choices)
        ids: list[int] = []
        slots: list[Slot] = []
        text = ""
        for piece in joined(self._plain(pieces)) if self._form.joined else self._plain(pieces):
            if isinstance(piece, Pads):
                for tokens in piece.tokens:
                    slots.append(Slot(len(ids), tokens, piece.kind, piece.part))
                    ids += [self.pad_id(piece.kind)] * tokens
                text += self._form.pads[piece.kind]
            elif isinstance(piece, Mark):
                ids.append(self.vocabulary.marks[piece.literal])
                text += piece.literal
            else:
                ids += self._encode_text(piece)
                text += piece
        self.check_ids(ids)
        return Prompt(tuple(ids), tuple(slots), text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, markers written out; `PromptError` for an id outside the vocabulary."""
        return self.vocabulary.decode(self.check_ids(ids))

    def expand(self, ids: Sequence[int], counts: Sequence[int]) -> Prompt:
        """Ids with one pad a slot made into a prompt: the n-th pad comes counts[n] times.

        `PromptError` with both numbers where there are more pads or fewer.
        """
        ids = self.check_ids(ids)
        expanded = tuple(expand_ids(ids, counts, self._pads))
        return Prompt(expanded, self.slots(expanded, counts), self.vocabulary.decode(ids))

    def expand_text(self, text: str, counts: Sequence[int]) -> str:
        """Text of a template with the n-th pad literal repeated counts[n] times.

        For text that no user had a hand in: a pad literal typed there would be taken for one.
        """
        return expand_text(text, counts, frozenset(self._form.pads.values()))

    def count(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Pads of each run of them."""
        return tuple(length for _, length in runs(self.check_ids(ids), self._pads))

    def slots(self, ids: Sequence[int], counts: Sequence[int] | None = None) -> tuple[Slot, ...]:
        """The slots of an expanded prompt, each a run of pads; `part` is the number of the run.

        Args:
            ids: of the prompt.
            counts: rows of the embeddings, to be checked against the runs; chunks of a video without
                anything between them (Qwen2) can only be told apart with them.

        Raises:
            PromptError: where pads and counts differ, with both numbers.
        """
        ids = self.check_ids(ids)
        found = runs(ids, self._pads)
        starts = [start for start, _ in found]
        places = found if counts is None else cut(found, counts)
        return tuple(
            Slot(start, length, self._kind(ids, start), bisect_right(starts, start) - 1)
            for start, length in places
        )

    def check_ids(self, ids: Iterable[int]) -> list[int]:
        """The ids as plain numbers, of a tensor too; `PromptError` for one outside the vocabulary."""
        listed = whole_numbers(ids, "ids")
        for token in listed:
            if not 0 <= token < self.size:
                raise PromptError(f"id {token} is outside the vocabulary of {self.size}")
        return listed

    def _plain(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Optional markers that the tokenizer does not have as text."""
        for piece in pieces:
            if isinstance(piece, Mark) and piece.literal not in self.vocabulary.marks:
                if not piece.optional:
                    raise TokenizerError(f"{self.vocabulary.name}: has no marker {piece.literal}")
                yield piece.literal
            elif piece:
                yield piece

    def _encode_text(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"text that is not Unicode: {error.reason}") from error
        ids = self.vocabulary.encode(text)
        marks = self._marked.intersection(ids)
        if marks:
            raise TokenizerError(
                f"{self.vocabulary.name}: makes the marker of id {min(marks)} out of ordinary text",
                "its markers must be added tokens, not words",
            )
        return ids

    def _kind(self, ids: Sequence[int], start: int) -> Kind:
        """Kimi has one pad for both; what stands between its markers tells which."""
        if self.pad_id("image") != self.pad_id("video"):
            return "image" if ids[start] == self.pad_id("image") else "video"
        marks = self.vocabulary.marks
        begins = {marks[literal] for literal in ("<|media_begin|>", "<|media_start|>") if literal in marks}
        if start > 0 and ids[start - 1] == marks["<|media_content|>"]:
            for place in range(start - 2, max(start - 34, -1), -1):
                if ids[place] in begins:
                    label = self.vocabulary.decode(ids[place + 1 : start - 1])
                    return "video" if label.startswith("video") else "image"
        return "image"

    def _resolve(self, config: Fields) -> None:
        """Find the literals, and hold them against the config."""
        marks = self.vocabulary.marks
        lacking = [literal for literal in self._form.needed if literal not in marks]
        if lacking:
            raise TokenizerError(
                f"{self.vocabulary.name}: has no marker {', '.join(lacking)}",
                f"is it the tokenizer of a {self.family} checkpoint?",
            )
        for literal, names in self._form.fields.items():
            for name in names:
                if config.values.get(name) not in (None, marks[literal]):
                    raise ConfigError(
                        f"{config.where}: field '{name}' is {shown(config.values[name])}, "
                        f"but the tokenizer has {literal} at {marks[literal]}"
                    )
        self.size = self.vocabulary.size
        text = config.section("text_config") if config.values.get("text_config") is not None else config
        for fields in (text, config):
            if "vocab_size" in fields.values:
                self.size = fields.integer("vocab_size", 1, 2**31)
                break
        for literal in self._form.needed:
            if marks[literal] >= self.size:
                raise ConfigError(
                    f"{config.where}: field 'vocab_size' is {self.size}, "
                    f"but the tokenizer has {literal} at {marks[literal]}"
                )
        self._marked = frozenset(marks.values())


def _generation_ends(files: SmallFiles) -> frozenset[int]:
    """`eos_token_id` of `generation_config.json`, one or a list."""
    if "generation_config.json" not in files.file_names():
        return frozenset()
    where = f"{files.where}/generation_config.json"
    fields = Fields(parse_json(files.small_file("generation_config.json", JSON_LIMIT), where), where)
    value = fields.values.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in values):
        raise ConfigError(f"{where}: field 'eos_token_id' is {shown(value)}, expected ids")
    return frozenset(values)
