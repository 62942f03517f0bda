"""Places of tokens against `get_rope_index` of transformers, over random layouts; the model is not needed."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonvit.engine.media import Media
from moonvit.engine.positions import Span, axial_positions, plain_positions
from moonvit.engine.session import spans_of
from moonvit.prompt import Chunk, Image, Slot, Video

pytest.importorskip("transformers")

PAD = {"image": 7, "video": 8}
PICTURE = st.tuples(st.just("image"), st.just(1), st.integers(1, 5), st.integers(1, 5), st.just(1.0))
VIDEO = st.tuples(
    st.just("video"), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.floats(0.01, 3.0)
)
LAYOUTS = st.lists(st.tuples(st.integers(1, 4), PICTURE | VIDEO), max_size=5)


def reference(family: str):
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    kind = {"qwen2_vl": Qwen2VLModel, "qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}[family]
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=4)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = partial(kind.get_vision_position_ids, model)
    return partial(kind.get_rope_index, model)


def laid_out(layout, family, tail):
    """Ids, slots and media of a prompt; Qwen3 puts text between the chunks of a video."""
    ids: list[int] = []
    slots: list[Slot] = []
    media: list[Media] = []
    for part, (text, (kind, frames, rows, columns, interval)) in enumerate(layout):
        ids += [1] * text
        for frame in range(frames):
            if frame and family == "qwen3_vl":
                ids += [2, 3]
            slots.append(Slot(len(ids), rows * columns, kind, part))
            ids += [PAD[kind]] * (rows * columns)
        place = Image((1, 1), rows * columns) if kind == "image" else Video((Chunk("", 1),) * frames)
        grids = ((1, 2 * rows, 2 * columns),) * frames
        media.append(Media(place, (), (), grids, interval, str(part), ""))
    return ids + [1] * tail, slots, media


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@settings(max_examples=60, deadline=None)
@given(layout=LAYOUTS, tail=st.integers(1, 4))
def test_axial_positions(family, layout, tail):
    ids, slots, media = laid_out(layout, family, tail)
    per_second = 4 if family == "qwen2_5_vl" else 0
    found = axial_positions(len(ids), spans_of(slots, media, 2, per_second))
    kinds = [{7: 1, 8: 2}.get(token, 0) for token in ids]
    grids = {"image": [], "video": []}
    for item in media:
        kind = "image" if isinstance(item.part, Image) else "video"
        grids[kind].append([len(item.grids), *item.grids[0][1:]])
    seconds = [item.interval for item in media if isinstance(item.part, Video)]
    expected, _ = reference(family)(
        torch.tensor([ids]),
        torch.tensor([kinds]),
        image_grid_thw=torch.tensor(grids["image"]) if grids["image"] else None,
        video_grid_thw=torch.tensor(grids["video"]) if grids["video"] else None,
        second_per_grid_ts=torch.tensor(seconds) if seconds else None,
    )
    assert torch.equal(found.prompt, expected[:, 0])
    written = found.model_input(len(ids), len(ids) + 2)[:, 0]
    assert torch.equal(written, expected[:, 0, -1:] + torch.tensor([1, 2]))


def test_by_hand():
    found = axial_positions(8, [Span(start=1, frames=2, rows=1, columns=2, interval=2.5)])
    assert found.prompt.tolist() == [
        [0, 1, 1, 3, 3, 3, 4, 5],
        [0, 1, 1, 1, 1, 3, 4, 5],
        [0, 1, 2, 1, 2, 3, 4, 5],
    ]
    assert found.model_input(8, 10)[:, 0].tolist() == [[6, 7]] * 3


def test_model_input_goes_on_behind_the_prompt():
    found = axial_positions(6, [Span(1, 1, 2, 2)])
    assert found.model_input(3, 8)[:, 0].tolist() == [[1, 1, 3, 4, 5], [2, 2, 3, 4, 5], [1, 2, 3, 4, 5]]
    assert found.model_input(7, 9).shape == (3, 1, 2)
    assert found.model_input(7, 9)[0].tolist() == [[5, 6]]
    assert plain_positions(3).model_input(1, 5).tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("spans", [[Span(3, 1, 2, 2)], [Span(0, 1, 1, 3), Span(2, 1, 1, 1)]])
def test_spans_must_fit(spans):
    with pytest.raises(ValueError, match="do not fit into 6"):
        axial_positions(6, spans)


def test_empty():
    assert axial_positions(0, []).prompt.shape == (3, 0)
    assert plain_positions(0).prompt.shape == (0,)


def test_written_text_goes_on_behind_the_last_token():
    """Not behind the furthest time of a slow video, and axis by axis where a picture comes last."""
    slow = axial_positions(6, [Span(start=1, frames=3, rows=1, columns=1, interval=8.0)])
    assert slow.prompt[0].tolist() == [0, 1, 9, 17, 2, 3]
    assert slow.model_input(5, 8)[:, 0].tolist() == [[3, 4, 5]] * 3
    bare = axial_positions(5, [Span(1, 1, 2, 2)])
    assert bare.model_input(5, 6)[:, 0].tolist() == [[2], [3], [3]]
