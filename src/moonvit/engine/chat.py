"""Conversations of several turns; a picture is encoded once, and what was computed is gone on from."""

import time
from collections.abc import Callable
from collections.abc import Generator as Pieces
from typing import TYPE_CHECKING, Any

from moonvit.engine.media import Look, Media, as_list
from moonvit.engine.reply import Reply, Stream
from moonvit.engine.sampling import Sampling, as_sampling
from moonvit.engine.session import Session
from moonvit.errors import MoonvitError
from moonvit.prompt import Turn

if TYPE_CHECKING:
    from moonvit.engine.generator import Generator

LEFT = "a later question of this conversation was asked before the stream was read to its end"

THOUGHTS_END = "</think>"
"""What stands between a K2.5 model's thoughts and its answer."""


class Chat:
    """A conversation with a `Generator`; one thread at a time, while several may have one each.

    Attributes:
        turns: all so far, the model's own among them.
        media: their pictures and videos, in order, with their embeddings.
    """

    def __init__(
        self, generator: "Generator", system: str | None = None, *, thinking: bool | None = None
    ) -> None:
        self.generator = generator
        self.thinking = thinking
        self.turns: list[Turn] = [] if system is None else [Turn("system", (system,))]
        self.media: list[Media] = []
        self._session = Session(generator.text)
        self._latest: object = None

    def ask(
        self,
        text: str,
        media: Any = (),
        *,
        sampling: Sampling | None = None,
        look: Look | None = None,
        **how: Any,
    ) -> Reply:
        """The reply to a further question; arguments and errors as of `Generator.generate`."""
        return self.stream(text, media, sampling=sampling, look=look, **how).reply

    def stream(
        self,
        text: str,
        media: Any = (),
        *,
        sampling: Sampling | None = None,
        look: Look | None = None,
        **how: Any,
    ) -> Stream:
        """As `ask`, piece by piece. Pictures are read and checked at once, the text model runs as read from.

        The turns become part of the conversation with the last piece; a stream that is left before leaves
        no trace, and cannot be read further when the next question has been asked: `MoonvitError`.
        """
        began = time.perf_counter()
        chosen = as_sampling(sampling, how)
        eyes = self.generator.eyes
        opened = [eyes.open(source, look or Look()) for source in as_list(media)]
        parts = tuple(item.part for item in opened)
        turn = Turn("user", (*parts, text) if text else parts)
        prompt = self.generator.format.encode([*self.turns, turn], thinking=self.thinking)
        self.generator.room(len(prompt.ids), chosen)
        seen = eyes.see(opened)
        request = self.generator.request(prompt, [*self.media, *seen])
        pictures = time.perf_counter() - began
        self._latest = mine = object()

        def pieces() -> Pieces[str, None, Reply]:
            run = self.generator.run(request, chosen, self._session)
            reply = yield from unless_left(run, lambda: self._latest is mine)
            reply.seconds["pictures"] = pictures
            self.turns += [turn, self._answer(reply.text)]
            self.media += seen
            return reply

        return Stream(pieces())

    def _answer(self, text: str) -> Turn:
        """The model's turn, its thoughts apart where the family writes any."""
        if self.generator.family != "kimi_k25" or self.thinking is False:
            return Turn("assistant", (text,))
        thoughts, mark, answer = text.partition(THOUGHTS_END)
        return Turn("assistant", (answer,) if mark else (), reasoning=thoughts)


def unless_left(run: Pieces[str, None, Reply], good: Callable[[], bool]) -> Pieces[str, None, Reply]:
    """What `run` gives; `MoonvitError` once it is asked for more when that is no longer good."""
    while good():
        try:
            piece = next(run)
        except StopIteration as end:
            reply: Reply = end.value
            return reply
        yield piece
    run.close()
    raise MoonvitError(LEFT, "a conversation has one stream at a time; begin another with Generator.chat")
