"""Greedy text of every family against the same model run wholly in transformers, float32.

The whole model there computes with its own tower; it is given our prompt and our processor's pixels.
"""

import pytest
import torch

from engine_checkpoints import MAKERS, kimi_k25, picture
from engine_helpers import CASES, CLIP, Pair, cases, make_pair
from moonvit.engine import Chat, Generator, Sampling
from moonvit.engine.session import Session
from parity_helpers import relative_error

pytest.importorskip("transformers")
pytest.importorskip("tiktoken")

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET = 1e-5
"""Relative to the largest logit; float32 sums in another order."""
TOKENS = 32


def check(pair: Pair, chat: Chat, ids) -> torch.Tensor:
    """The ids are the whole model's, its logits of every step too; gives back those of the first."""
    compared = pair.compare(chat, ids, TOKENS)
    assert compared.ids == compared.expected
    assert compared.difference < BUDGET * float(compared.expected_logits.abs().max())
    return compared.logits[0]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    made: dict[str, Pair] = {}

    def get(family: str) -> Pair:
        if family not in made:
            made[family] = make_pair(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.mark.parametrize(("family", "case"), cases())
def test_greedy(pairs, family, case):
    pair = pairs(family)
    chat = pair.generator.chat("Be brief.")
    reply = chat.ask("what is this?", pair.see(CASES[case]), max_new_tokens=TOKENS)
    check(pair, chat, reply.ids)


@pytest.mark.parametrize("family", MAKERS)
def test_text_is_alive_and_sees_the_picture(pairs, family):
    """Without this, equal texts would say little."""
    pair = pairs(family)
    firsts = []
    for seed in (1, 2):
        (media,) = pair.see([picture(150, 90, seed)])
        chat = pair.generator.chat()
        reply = chat.ask("what is this?", media, max_new_tokens=TOKENS)
        assert len(set(reply.ids)) >= 5
        firsts.append(check(pair, chat, reply.ids))
    assert float((firsts[0] - firsts[1]).abs().max()) > 0.05 * float(firsts[0].std())


@pytest.mark.parametrize("family", MAKERS)
def test_several_turns(pairs, family):
    """Each turn is what the whole model says to the whole conversation; pictures are encoded once."""
    pair = pairs(family)
    media = pair.see([picture(150, 90, 7)])
    again = [] if family == "kimi_vl" else pair.see([CLIP])
    encoded = pair.generator.eyes.encoded
    chat = pair.generator.chat()
    for question, added in (("what is this?", media), ("and this?", again), ("on the picture?", [])):
        reply = chat.ask(question, added, max_new_tokens=TOKENS)
        check(pair, chat, reply.ids)
    assert pair.generator.eyes.encoded == encoded
    prompt = pair.generator.format.encode(chat.turns[:-1])
    assert reply.prompt_tokens == len(prompt.ids)
    assert reply.computed_tokens <= len(prompt.ids) - prompt.slots[0].start - prompt.slots[0].length


@pytest.mark.parametrize("family", MAKERS)
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
    whole = kimi_k25(tmp_path, layout)
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
    assert relative_error(logits[1], logits[0]) < 6e-2


@pytest.mark.parametrize("family", ["qwen2_vl", "kimi_vl"])
def test_float64(pairs, family):
    """Where no tie is near, the same text as in float32."""
    pair = pairs(family)
    fine = Generator.from_pretrained(pair.whole.directory, dtype="float64")
    for source in CASES["one picture"]:
        found = fine.generate("what is this?", source, max_new_tokens=12)
        assert found.ids == pair.generator.generate("what is this?", source, max_new_tokens=12).ids


def test_seed(pairs):
    generator = pairs("qwen2_vl").generator
    how = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "max_new_tokens": 24}
    texts = [
        generator.generate("what is this?", CASES["one picture"], seed=seed, **how).ids for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert Sampling(temperature=1.0).seed is None
