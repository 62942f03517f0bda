"""Comparing runs: measures, foreign dumps, layouts, verdicts, and the report in a real browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from conftest import TINY
from moonvit.cli import group
from moonvit.ops.grid import block_order
from moonvit.trace.compare import as_document, compare
from moonvit.trace.dump import Dump, DumpError, parse_renames, renamed
from moonvit.trace.html import comparison_page
from moonvit.trace.metrics import distance
from moonvit.trace.stages import AFTER, BEFORE, IN_BLOCK

ROOT = Path(__file__).parent.parent
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def run(*arguments):
    return CliRunner().invoke(group, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "ref.safetensors"
    assert run("trace", "--pattern", "ramp", "--model", TINY, "-o", path, "--dtype", "float64").exit_code == 0
    return path


@pytest.fixture
def stages(reference):
    """The reference's stages in float32, without the grid."""
    return {name: value.float() for name, value in load_file(reference).items() if name != "grid_thws"}


def write_raw(folder, stages):
    """What a C program does."""
    folder.mkdir()
    (folder / "shapes.json").write_text(json.dumps({name: list(v.shape) for name, v in stages.items()}))
    for name, value in stages.items():
        (folder / f"{name}.f32").write_bytes(value.numpy().astype("<f4").tobytes())


def test_measures_by_hand():
    want = np.array([[3.0, 4.0], [0.0, 2.0]])
    d = distance(np.array([[3.0, 4.0], [2.0, 0.0]]), want)
    assert d.max_abs == 2
    assert d.relative_l2 == pytest.approx((8 / 29) ** 0.5)
    assert d.min_cosine == pytest.approx(0)
    assert d.token_errors == pytest.approx([0, 2**0.5])
    assert d.pcc == pytest.approx(float(np.corrcoef([3, 4, 2, 0], [3, 4, 0, 2])[0, 1]))
    assert distance(np.ones((2, 2)), np.ones((2, 2))).pcc is None
    assert not distance(np.array([[np.nan]]), np.ones((1, 1))).finite


def test_a_token_of_zeros_is_no_fault_but_a_wrong_one_is():
    want = np.array([[0.0, 0.0], [1.0, 1.0]])
    assert distance(want + [[1e-9, 0], [0, 0]], want).min_cosine == pytest.approx(1)
    assert distance(want + [[1.0, 0], [0, 0]], want).token_errors[0] > 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_right_run_agrees(dtype, reference, tmp_path):
    mine = tmp_path / "mine.safetensors"
    run("trace", "--pattern", "ramp", "--model", TINY, "-o", mine, "--dtype", dtype)
    result = run("compare", mine, reference)
    assert result.exit_code == 0
    assert f"within the {dtype} budgets" in result.stdout


@pytest.mark.parametrize("kind", ["safetensors", "npz", "raw"])
def test_foreign_dumps_read_back(kind, stages, reference, tmp_path):
    wanted = {name: stages[name] for name in ("embed", "block.00", "block.01.q", "projected")}
    path = tmp_path / ("mine" if kind == "raw" else f"mine.{kind}")
    if kind == "raw":
        write_raw(path, wanted)
    elif kind == "npz":
        np.savez(path, **{name: value.numpy() for name, value in wanted.items()})
    else:
        save_file(wanted, path)
    dump = Dump(path)
    assert sorted(dump.names) == sorted(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(dump.read(name), value.double().numpy())
    comparison = compare(dump, Dump(reference))
    assert comparison.good
    assert [stage.name for stage in comparison.stages] == ["embed", "block.00", "block.01.q", "projected"]
    assert "pixels" in comparison.only_reference


def test_a_raw_dump_says_its_grids_in_its_shapes(stages, tmp_path):
    write_raw(tmp_path / "mine", {"embed": stages["embed"]})
    for grids in ([1, 4, 6], [[1, 2, 6], [1, 2, 6]]):
        shapes = {"embed": [24, 64], "grid_thws": grids}
        (tmp_path / "mine/shapes.json").write_text(json.dumps(shapes))
        dump = Dump(tmp_path / "mine")
        assert dump.grids() == [tuple(grid) for grid in np.atleast_2d(grids).tolist()]
        assert dump.names == ["embed"]


def test_the_porting_page_lists_every_stage():
    page = (ROOT / "docs/porting.md").read_text()
    for name in (*BEFORE, *IN_BLOCK, *AFTER):
        assert re.search(rf"`(block\.NN\.)?{name}`", page), name


def test_names_are_mapped():
    pairs = parse_renames(["layers.{}.out=block.{}", "emb=embed"])
    assert renamed("layers.7.out", pairs) == "block.07"
    assert renamed("emb", pairs) == "embed"
    assert renamed("other", pairs) == "other"
    with pytest.raises(DumpError, match="equally many"):
        parse_renames(["a.{}=b"])


def test_a_map_on_the_command_line(stages, reference, tmp_path):
    np.savez(tmp_path / "m.npz", **{f"layers.{i}": stages[f"block.{i:02}"].numpy() for i in range(3)})
    result = run("compare", tmp_path / "m.npz", reference, "--map", "layers.{}=block.{}", "--format", "json")
    assert [stage["name"] for stage in json.loads(result.stdout)["stages"]] == [
        "block.00",
        "block.01",
        "block.02",
    ]
    (tmp_path / "map.json").write_text(json.dumps({"layers.{}": "block.{}"}))
    assert run("compare", tmp_path / "m.npz", reference, "--map", tmp_path / "map.json").exit_code == 0
    with pytest.raises(DumpError, match="--map"):
        compare(Dump(tmp_path / "m.npz"), Dump(reference))


def test_layouts_are_found_and_reported(stages, reference, tmp_path):
    places = block_order([(1, 4, 6)], 2)
    mine = {
        "pixels": stages["pixels"][places],
        "embed": stages["embed"][places].T.contiguous(),
        "block.00.q": stages["block.00.q"][places].transpose(0, 1).contiguous(),
        "block.00": stages["block.00"][places][None].contiguous(),
        "projected": stages["projected"].flatten(),
    }
    save_file(mine, tmp_path / "m.safetensors")
    comparison = compare(Dump(tmp_path / "m.safetensors"), Dump(reference))
    assert comparison.good
    assert comparison.order == "block"
    notes = {stage.name: stage.note for stage in comparison.stages}
    assert notes == {
        **{"pixels": "", "embed": "axes transposed", "block.00.q": "heads first"},
        **{"block.00": "", "projected": ""},
    }
    assert "merge-block order" in run("compare", tmp_path / "m.safetensors", reference).stdout
    assert run("compare", tmp_path / "m.safetensors", reference, "--order", "raster").exit_code == 1


def test_the_first_bad_token_and_channel(stages, reference, tmp_path):
    stages["block.01"][7, 33] += 0.5
    stages["projected"][4, 11] -= 0.25
    save_file(stages, tmp_path / "m.safetensors")
    result = run("compare", tmp_path / "m.safetensors", reference, "--format", "json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["first_diverging"] == "block.01"
    bad = {s["name"]: s["first_bad"] for s in document["stages"] if not s["good"]}
    assert list(bad) == ["block.01", "projected"]
    assert (bad["block.01"]["t_row_column"], bad["block.01"]["channel"]) == ([0, 1, 1], 33)
    assert (bad["projected"]["t_row_column"], bad["projected"]["channel"]) == ([0, 1, 1], 11)
    assert "DIVERGES first at block.01" in run("compare", tmp_path / "m.safetensors", reference).stdout


def test_nan_and_wrong_shapes_diverge(stages, reference, tmp_path):
    stages["embed"][3, 2] = torch.nan
    stages["block.00"] = stages["block.00"][:-1].clone()
    save_file(stages, tmp_path / "m.safetensors")
    comparison = compare(Dump(tmp_path / "m.safetensors"), Dump(reference))
    bad = {stage.name: stage for stage in comparison.stages if not stage.good}
    assert list(bad) == ["embed", "block.00"]
    assert bad["embed"].first_bad.row == 3
    assert "shape [23, 64]" in bad["block.00"].note
    json.dumps(as_document(comparison), allow_nan=False)


@pytest.mark.parametrize(
    ("shapes", "data", "message"),
    [
        ({"embed": [2, 3]}, b"\0" * 20, "20 bytes"),
        ({"../embed": [1]}, b"\0" * 4, "cannot be a file name"),
        ({"embed": [-1]}, b"", "list of sides"),
        ([1], b"", "expected an object"),
    ],
)
def test_bad_raw_dumps_are_refused(shapes, data, message, tmp_path):
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    (tmp_path / "embed.f32").write_bytes(data)
    with pytest.raises(DumpError, match=message):
        Dump(tmp_path).read("embed")


def test_pickled_arrays_are_refused(tmp_path):
    np.savez(tmp_path / "m.npz", embed=np.array([{}], dtype=object))
    with pytest.raises(DumpError, match="not a plain array"):
        Dump(tmp_path / "m.npz").read("embed")


def report(stages, reference, tmp_path):
    stages["block.01"][7] *= 1.01
    stages["<script>alert(1)</script>"] = torch.zeros(2)
    save_file(stages, tmp_path / "m.safetensors")
    path = tmp_path / "report.html"
    result = run("compare", tmp_path / "m.safetensors", reference, "--format", "html", "-o", path)
    assert result.exit_code == 1
    return path


def test_the_report_needs_nothing_else_and_escapes_names(stages, reference, tmp_path):
    page = report(stages, reference, tmp_path).read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    for outside in ("http:", "https:", "src=", "@import", "url("):
        assert outside not in page
    assert page.count("<circle") == len(compare(Dump(tmp_path / "m.safetensors"), Dump(reference)).stages)
    assert "prefers-color-scheme: dark" in page


@pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium")
def test_the_report_opens_in_a_browser_without_errors(stages, reference, tmp_path):
    path = report(stages, reference, tmp_path)
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --enable-logging=stderr --v=0 --dump-dom"
    command = [BROWSER, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr
    assert "Worst tokens of block.01" in done.stdout
    assert done.stdout.count("</circle>") == 43


def test_a_full_depth_report_is_drawn(tmp_path):
    """A long chart labels few stages; a large grid is pooled; a clip has a map a frame."""
    grid = torch.tensor([[2, 80, 100]])
    names = [f"block.{i:02}{end}" for i in range(27) for end in (".norm0", "")]
    stages = {name: torch.rand(16000, 2) for name in names}
    save_file({**stages, "grid_thws": grid}, tmp_path / "ref.safetensors")
    stages["block.20"] = stages["block.20"] + 1
    save_file(stages, tmp_path / "m.safetensors")
    page = comparison_page(compare(Dump(tmp_path / "m.safetensors"), Dump(tmp_path / "ref.safetensors")))
    assert page.count("<circle") == 54
    assert page.count("<figure>") == 4
    assert "block.20, frame 1" in page
    assert len(page) < 2_000_000
