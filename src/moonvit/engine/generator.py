"""Pictures and words in, text out."""

import os
import time
from collections.abc import Generator as Pieces
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from moonvit.configs.qwen import QwenConfig
from moonvit.encoder import Encoder, as_device, as_dtype
from moonvit.engine.chat import Chat
from moonvit.engine.families import check_text_config, text_config, text_family
from moonvit.engine.library import require_transformers
from moonvit.engine.media import Eyes, Look, Media, as_list
from moonvit.engine.reply import Finish, Reply, Stream
from moonvit.engine.sampling import Sampler, Sampling
from moonvit.engine.session import Request, Session, make_request
from moonvit.engine.source import find_whole
from moonvit.engine.streaming import TextStream
from moonvit.engine.text import TextModel
from moonvit.errors import ConfigError, PromptError
from moonvit.families import family_of
from moonvit.fields import Fields
from moonvit.pixels.decode import Limits
from moonvit.prompt import Prompt, PromptFormat
from moonvit.weights.checkpoint import LocalCheckpoint

NEW_TOKENS = 512
"""Tokens of a reply where nothing else is said."""


@dataclass
class Generator:
    """A tower, a tokenizer and a text model, all of one checkpoint.

    The weights of the text model are read when the first token is wanted, after everything else about the
    first request has been found right; `load` reads them at once.

    Attributes:
        eyes: the encoder with its memory for pictures.
        format: how the family writes prompts.
        text: the text model.
        per_second: steps on the time axis in a second of a video (Qwen2.5-VL), else 0.
    """

    eyes: Eyes
    format: PromptFormat
    text: TextModel
    per_second: int = 0

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | os.PathLike[str],
        *,
        dtype: str | torch.dtype = "bfloat16",
        device: str | torch.device = "cpu",
        norm_eps: float | None = None,
        backend: str = "auto",
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        limits: Limits | None = None,
    ) -> Self:
        """Open a whole checkpoint: config, tokenizer, vision half, and the text half as far as its headers.

        Args:
            path_or_repo: a directory, or a repository, which is fetched whole.
            dtype: of both halves' weights and activations.
            device: where both run.
            norm_eps: as `Encoder.from_pretrained`, like all that follow.
            backend: of the tower.
            revision: branch, tag or commit of the repository.
            token: for the hub.
            cache_dir: for fetched files; None is huggingface-hub's own.
            local_files_only: use the cache and no network.
            limits: on pictures, before they are decoded.

        Raises:
            MoonvitError: for a family without a text model here, and where transformers is missing.
            ConfigError, TokenizerError, WeightsError: for what is wrong with the checkpoint.
        """
        dtype, device = as_dtype(dtype), as_device(device)
        directory = find_whole(
            path_or_repo,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )
        checkpoint = LocalCheckpoint(directory)
        where = str(directory / "config.json")
        family = family_of(checkpoint.config, where).name
        kind = text_family(family)
        check_text_config(family, checkpoint.config, where)
        require_transformers()
        written = PromptFormat.open(checkpoint, family)
        encoder = Encoder.from_pretrained(
            directory, dtype=dtype, device=device, norm_eps=norm_eps, backend=backend, limits=limits
        )
        config, tied = text_config(family, checkpoint.config, where)
        if config.hidden_size != encoder.config.text_hidden_size:
            raise ConfigError(
                f"{where}: the text model is {config.hidden_size} wide, "
                f"the tower's embeddings are {encoder.config.text_hidden_size}"
            )
        per_second = 0
        if kind.timed:
            vision = Fields(checkpoint.config, where).section("vision_config")
            per_second = vision.integer("tokens_per_second", 1, 1000)
        return cls(Eyes(encoder), written, TextModel(kind, config, tied, checkpoint), per_second)

    @property
    def family(self) -> str:
        return self.eyes.encoder.family

    def load(self) -> Self:
        """Read the text model's weights, unless they are there."""
        if not self.text.loaded:
            self.text.load(self.eyes.encoder.dtype, self.eyes.encoder.device)
        return self

    def chat(self, system: str | None = None, *, thinking: bool | None = None) -> Chat:
        """A conversation of several turns; see `Chat`."""
        return Chat(self, system, thinking=thinking)

    def generate(
        self,
        text: str,
        media: Any = (),
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        look: Look | None = None,
        thinking: bool | None = None,
        **how: Any,
    ) -> Reply:
        """The reply to one question.

        Args:
            text: the question; markers typed in it are text.
            media: a picture or video, or a list of them, which stand before the text: whatever
                `Encoder.encode` takes, the path of a video, a `Clip` or a `Media`.
            system: the system's turn.
            sampling: how tokens are chosen; greedy by default.
            look: how pictures are read.
            thinking: K2.5: with thoughts (the default) or without.
            **how: fields of `Sampling`, such as `max_new_tokens=64`.

        Raises:
            ImageError: for a picture or video that cannot be used.
            PromptError: for a conversation longer than the model's context.
        """
        return self.chat(system, thinking=thinking).ask(text, media, sampling=sampling, look=look, **how)

    def stream(
        self,
        text: str,
        media: Any = (),
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        look: Look | None = None,
        thinking: bool | None = None,
        **how: Any,
    ) -> Stream:
        """As `generate`, piece by piece; `Stream.reply` is the whole."""
        return self.chat(system, thinking=thinking).stream(text, media, sampling=sampling, look=look, **how)

    def see(self, media: Any, look: Look | None = None) -> list[Media]:
        """Pictures and videos encoded for use in any number of conversations."""
        return self.eyes.see([self.eyes.open(source, look or Look()) for source in as_list(media)])

    def request(self, prompt: Prompt, media: Sequence[Media]) -> Request:
        """A prompt made elsewhere, such as by `format.expand`, with its media.

        `PromptError` where slots and embeddings do not go together, and for media of another tower.
        """
        for item in media:
            item.check(self.family, self.text.config.hidden_size)
        config = self.eyes.encoder.config
        axial = config if isinstance(config, QwenConfig) else None
        return make_request(prompt, media, axial, self.per_second)

    def run(
        self, request: Request, sampling: Sampling, session: Session | None = None
    ) -> Pieces[str, None, Reply]:
        """The reply to a request, piece by piece; the generator's value is the whole."""
        most = self.room(len(request.prompt.ids), sampling)
        began = time.perf_counter()
        self.load()
        loaded = time.perf_counter()
        session = session or Session(self.text)
        pads = (self.format.pad_id("image"), self.format.pad_id("video"))
        sampler = Sampler(sampling)
        stream = TextStream(self.format.decode, sampling.stop)
        token = sampler.choose(session.prefill(request, pads))
        seconds = {"weights": loaded - began, "prefill": time.perf_counter() - loaded}
        ids: list[int] = []
        text = ""
        finish: Finish = "length"
        while True:
            ids.append(token)
            if token in self.format.end_ids:
                finish = "end"
                break
            piece = stream.push(token)
            text += piece
            if piece:
                yield piece
            if stream.stopped:
                finish = "stop"
                break
            if len(ids) == most:
                break
            token = sampler.choose(session.advance(token))
        rest = stream.finish()
        if rest:
            yield rest
        if stream.stopped:
            finish = "stop"
        seconds["decode"] = time.perf_counter() - loaded - seconds["prefill"]
        return Reply(
            text=text + rest,
            ids=tuple(ids),
            prompt_tokens=len(request.prompt.ids),
            computed_tokens=session.computed,
            finish=finish,
            seconds=seconds,
        )

    def room(self, tokens: int, sampling: Sampling) -> int:
        """Tokens that a reply may have behind so many; `PromptError` where they do not fit."""
        left = self.text.context - tokens
        wanted = sampling.max_new_tokens
        if left < 1 or (wanted is not None and wanted > left):
            new = f" and {wanted} new ones" if wanted is not None else ""
            hint = "shorten the conversation or lower max_tokens, the budget of each picture"
            if left >= 1:
                hint = f"lower max_new_tokens to {left}, or max_tokens, the budget of each picture"
            raise PromptError(
                f"{tokens} tokens of conversation{new} do not fit into the model's "
                f"{self.text.context} (max_position_embeddings)",
                hint,
            )
        return min(wanted or NEW_TOKENS, left)
