"""Greedy text of every family against the same model run wholly in transformers, float32.

The whole model there computes with its own tower; it is given our prompt and our processor's pixels.
"""

from dataclasses import dataclass, field

import pytest
import torch

import engine_helpers as helpers
from moonvit.engine import Generator, Sampling
from moonvit.engine.media import Clip, Media
from moonvit.engine.session import Session
from moonvit.pixels.base import PixelBatch

pytest.importorskip("transformers")
pytest.importorskip("tiktoken")

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET = 1e-5
"""Relative to the largest logit; float32 sums in another order."""
TOKENS = 32

CLIP = Clip([helpers.picture(64, 48, seed) for seed in range(20, 28)], fps=4.0)
CASES = {
    "one picture": [helpers.picture(150, 90, 1)],
    "three pictures": [helpers.picture(60, 190, 2), helpers.picture(150, 90, 3), helpers.picture(57, 43, 4)],
    "video": [CLIP],
    "pictures and video": [helpers.picture(90, 60, 5), CLIP, helpers.picture(43, 57, 6)],
    "text alone": [],
}


@dataclass
class Pair:
    """A checkpoint's generator and the whole model, and the pixels that were made for each medium."""

    whole: helpers.Whole
    generator: Generator
    pixels: dict[str, list[PixelBatch]] = field(default_factory=dict)

    def see(self, sources) -> list[Media]:
        encoder = self.generator.eyes.encoder
        found = []
        for source in sources:
            taken: list[PixelBatch] = []
            features = type(encoder).features.__get__(encoder)
            encoder.features = lambda batch, taken=taken, run=features: taken.append(batch) or run(batch)
            (media,) = self.generator.see(source)
            del encoder.features
            if taken:
                self.pixels[media.key] = taken
            found.append(media)
        return found

    def asked(self, request) -> helpers.Asked:
        batches = []
        for media in request.media:
            parts = self.pixels[media.key]
            pixels, grids = (torch.cat([getattr(p, n) for p in parts]) for n in ("pixel_values", "grid_thws"))
            batches.append(PixelBatch(pixels, grids, []))
        return helpers.as_asked(self.whole, request, batches)

    def check(self, prompt, media, ids) -> torch.Tensor:
        """The ids are the whole model's, the first logits too; gives back the latter."""
        request = self.generator.request(prompt, media)
        ends = self.generator.format.end_ids
        expected, first_V = helpers.reference_reply(self.whole, self.asked(request), TOKENS, ends)
        assert list(ids) == expected
        pads = (self.generator.format.pad_id("image"), self.generator.format.pad_id("video"))
        found_V = Session(self.generator.text).prefill(request, pads)
        assert float((found_V - first_V).abs().max()) < BUDGET * float(first_V.abs().max())
        return first_V


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    made: dict[str, Pair] = {}

    def get(family: str) -> Pair:
        if family not in made:
            whole = helpers.MAKERS[family](tmp_path_factory.mktemp(family))
            made[family] = Pair(whole, Generator.from_pretrained(whole.directory, dtype="float32"))
        return made[family]

    return get


def cases():
    return [
        (family, case)
        for family in helpers.MAKERS
        for case in CASES
        if not (family == "kimi_vl" and "video" in case)
    ]


@pytest.mark.parametrize(("family", "case"), cases())
def test_greedy(pairs, family, case):
    pair = pairs(family)
    media = pair.see(CASES[case])
    chat = pair.generator.chat("Be brief.")
    reply = chat.ask("what is this?", media, max_new_tokens=TOKENS)
    pair.check(pair.generator.format.encode(chat.turns[:-1]), media, reply.ids)


@pytest.mark.parametrize("family", helpers.MAKERS)
def test_text_is_alive_and_sees_the_picture(pairs, family):
    """Without this, equal texts would say little."""
    pair = pairs(family)
    firsts = []
    for seed in (1, 2):
        (media,) = pair.see([helpers.picture(150, 90, seed)])
        chat = pair.generator.chat()
        reply = chat.ask("what is this?", media, max_new_tokens=TOKENS)
        assert len(set(reply.ids)) >= 5
        prompt = pair.generator.format.encode(chat.turns[:-1])
        firsts.append(pair.check(prompt, [media], reply.ids))
    assert float((firsts[0] - firsts[1]).abs().max()) > 0.05 * float(firsts[0].std())


@pytest.mark.parametrize("family", helpers.MAKERS)
def test_several_turns(pairs, family):
    """Each turn is what the whole model says to the whole conversation; pictures are encoded once."""
    pair = pairs(family)
    media = pair.see([helpers.picture(150, 90, 7)])
    again = [] if family == "kimi_vl" else pair.see([CLIP])
    encoded = pair.generator.eyes.encoded
    chat = pair.generator.chat()
    for question, added in (("what is this?", media), ("and this?", again), ("on the picture?", [])):
        reply = chat.ask(question, added, max_new_tokens=TOKENS)
        pair.check(pair.generator.format.encode(chat.turns[:-1]), chat.media, reply.ids)
    assert pair.generator.eyes.encoded == encoded
    prompt = pair.generator.format.encode(chat.turns[:-1])
    assert reply.prompt_tokens == len(prompt.ids)
    assert reply.computed_tokens <= len(prompt.ids) - prompt.slots[0].start - prompt.slots[0].length


@pytest.mark.parametrize("family", helpers.MAKERS)
def test_streaming_is_the_same(pairs, family):
    pair = pairs(family)
    media = pair.see(CASES["three pictures"])
    whole = pair.generator.generate("what is this?", media, max_new_tokens=TOKENS)
    stream = pair.generator.stream("what is this?", media, max_new_tokens=TOKENS)
    pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == whole.text == pair.generator.format.decode(whole.ids)
    assert stream.reply.ids == whole.ids


@pytest.mark.parametrize("layout", ["native", "raw"])
def test_layouts_of_k25(pairs, tmp_path, layout):
    """Transformers' own names with stacked experts, and what it writes as the original format."""
    expected = pairs("kimi_k25")
    whole = helpers.kimi_k25(tmp_path, layout)
    generator = Generator.from_pretrained(whole.directory, dtype="float32")
    for source in CASES["one picture"]:
        found = generator.generate("what is this?", source, max_new_tokens=8)
        assert found.ids == expected.generator.generate("what is this?", source, max_new_tokens=8).ids


def test_other_types(pairs):
    """bfloat16 stays near float32; its router stays float32, as in transformers."""
    pair = pairs("kimi_k25")
    half = Generator.from_pretrained(pair.whole.directory, dtype="bfloat16").load()
    assert half.text.decoder.layers[1].mlp.gate.weight.dtype == torch.float32
    assert half.text.head.weight.dtype == torch.bfloat16
    logits = []
    for generator in (pair.generator, half):
        media = generator.see(CASES["one picture"])
        chat = generator.chat()
        chat.ask("what?", media, max_new_tokens=1)
        request = generator.request(generator.format.encode(chat.turns[:-1]), media)
        logits.append(Session(generator.text).prefill(request, (generator.format.pad_id("image"),)).float())
    assert helpers.parity.relative_error(logits[1], logits[0]) < 6e-2


def test_seed(pairs):
    generator = pairs("qwen2_vl").generator
    how = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "max_new_tokens": 24}
    texts = [
        generator.generate("what is this?", CASES["one picture"], seed=seed, **how).ids for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert Sampling(temperature=1.0).seed is None
