"""The benchmark's counting and arithmetic; how long anything takes is not tested."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner

from conftest import TINY
from moonvit.bench.measure import Timing, in_turns, peak_rise
from moonvit.bench.plot import plot
from moonvit.bench.report import Row, as_document, as_text, growth
from moonvit.bench.run import benchmark, of_encoder
from moonvit.bench.work import Work, matrix_product, square_grid, work_of
from moonvit.cli.bench import command, wanted
from moonvit.threads import usable_cores
from moonvit.towers.int8 import int8_lacks


def rows_of(seconds) -> list[Row]:
    """Rows of a machine on which N patches take `seconds(N)`."""
    return [
        Row("x bfloat16", 14 * n, Work(n * n, n * n, n**4), Timing((seconds(n * n),) * 3), 1e9)
        for n in (8, 16, 32, 64)
    ]


def test_turns_are_taken_in_order_after_one_untimed_run_each():
    calls = []
    timings = in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert [len(timing.seconds) for timing in timings.values()] == [2, 2]
    with pytest.raises(ValueError, match="rounds is 0"):
        in_turns({}, 0)


def test_median_and_spread():
    assert Timing((3.0, 1.0, 2.0)).median == 2
    assert Timing((3.0, 1.0, 2.0)).spread == 1


def test_growth_finds_both_parts():
    (found,) = growth(rows_of(lambda n: 3e-4 * n + 5e-8 * n**2))
    assert found.linear == pytest.approx(3e-4, rel=1e-9)
    assert found.quadratic == pytest.approx(5e-8, rel=1e-9)
    assert found.share(4096) == pytest.approx(5e-8 * 4096 / (3e-4 + 5e-8 * 4096))


def test_growth_has_no_negative_part():
    (found,) = growth(rows_of(lambda n: n**0.5))
    assert (found.linear, found.quadratic) == (pytest.approx(found.linear), 0)
    (found,) = growth(rows_of(lambda n: n**2.5))
    assert found.linear == 0
    assert found.quadratic > 0
    assert growth(rows_of(float)[:1]) == []


@pytest.mark.parametrize("grid", [(1, 6, 10), (1, 8, 8)], ids=["resampled", "the table itself"])
def test_work_is_what_the_formulas_say(encoder, grid):
    config = encoder.config
    n = grid[1] * grid[2]
    work = work_of(encoder, grid)
    d, q, f = config.hidden_size, config.qkv_hidden_size, config.intermediate_size
    block = 3 * d * q + q * d + 2 * d * f
    projector = config.merged_size**2 + config.merged_size * config.text_hidden_size
    assert work.linear == 2 * (n * (3 * 14 * 14 * d + config.num_layers * block) + n // 4 * projector)
    assert work.quadratic == 4 * config.num_layers * n * n * q
    assert (work.patches, work.total) == (n, work.linear + work.quadratic)


def test_the_ceiling_multiplies_one_of_the_towers_matrices(encoder):
    product, operations = matrix_product(encoder, 12)
    result = product()
    assert result.dtype == encoder.dtype
    width = encoder.config.merged_size
    assert operations == 2 * result.shape[0] * result.shape[1] * width
    assert square_grid(encoder, 449) == (1, 34, 34)


def test_the_ceiling_is_the_products_own_rate(encoder, monkeypatch):
    """Not the contender's: its time is another one here."""
    contender = of_encoder("ours float32", encoder)
    kinds = []

    def timed(runs, _rounds, _told):
        kinds.extend(name for name in runs if name != contender.name)
        return {name: Timing((8.0,) if name == contender.name else (2.0,)) for name in runs}

    monkeypatch.setattr("moonvit.bench.run.in_turns", timed)
    row = next(benchmark([contender], [28], 1))
    assert len(kinds) == 1
    assert row.ceiling == matrix_product(encoder, 4)[1] / 2.0
    assert row.timing.median == 8.0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a run")
def test_peak_is_what_the_run_held():
    assert 60e6 < peak_rise(lambda: torch.ones(16_000_000)) < 80e6


def test_text_document_and_plot_agree():
    rows = rows_of(lambda n: 3e-4 * n + 5e-8 * n**2)
    text, document = as_text(rows), as_document(rows, {"threads": 2})
    assert "300.0 us a patch, 50.00 ns a pair of them" in text
    first = document["rows"][0]
    assert first["of_ceiling"] == pytest.approx(first["rate"] / first["ceiling"])
    assert first["rate"] == pytest.approx((first["linear"] + first["quadratic"]) / first["median"])
    picture = ElementTree.fromstring(plot(rows))
    dots = [e for e in picture.iter("{http://www.w3.org/2000/svg}circle") if e.get("cx") and len(e)]
    assert len(dots) == len(rows)
    heights = [float(dot.get("cy")) for dot in dots]
    assert heights == sorted(heights, reverse=True)


def test_command_line(tmp_path):
    output, picture = tmp_path / "new" / "b.json", tmp_path / "plots" / "b.svg"
    arguments = ["--model", str(TINY), "--sizes", "28,56", "--dtype", "float32", "--dtype", "bfloat16"]
    done = CliRunner().invoke(
        command, [*arguments, "--rounds", "1", "-o", str(output), "--plot", str(picture)]
    )
    assert done.exit_code == 0, done.output
    document = json.loads(output.read_text())
    assert [(row["side"], row["patches"]) for row in document["rows"]] == [(28, 4)] * 2 + [(56, 16)] * 2
    assert len(document["growth"]) == 2
    assert all(row["median"] > 0 and row["ceiling"] > 0 for row in document["rows"])
    assert "of ceiling" in done.output
    ElementTree.fromstring(picture.read_text())
    wrong = CliRunner().invoke(command, ["--model", str(TINY), "--sizes", "224;448"])
    assert wrong.exit_code == 2
    assert "list of sides in pixels" in wrong.output


@pytest.mark.skipif(bool(int8_lacks()), reason=f"no int8 here: {int8_lacks()}")
def test_rounded_contenders_stand_beside_those_that_can_be_rounded():
    arguments = ["--model", str(TINY), "--sizes", "28", "--rounds", "1", "--quantize", "int8"]
    types = ["--dtype", "float32", "--dtype", "float64", "--backend", "eager"]
    done = CliRunner().invoke(command, [*arguments, *types, "--format", "json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    names = ["moonvit eager float32", "moonvit eager int8 float32", "moonvit eager float64"]
    assert [row["name"] for row in document["rows"]] == names
    plain, rounded, _ = document["rows"]
    assert (plain["linear"], plain["ceiling"]) == (rounded["linear"], rounded["ceiling"])
    assert list(wanted(["bfloat16"], ["compiled", "auto"], "int8")) == [
        ("bfloat16", "compiled", None), ("bfloat16", "auto", None), ("bfloat16", "auto", "int8"),
    ]  # fmt: skip


def test_rows_are_named_after_what_ran_and_come_once():
    arguments = ["--model", str(TINY), "--sizes", "28,56,28", "--rounds", "1", "--format", "json"]
    asked = ["--dtype", "float16", "--backend", "auto", "--backend", "native", "--backend", "auto"]
    done = CliRunner().invoke(command, [*arguments, *asked])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [(row["name"], row["side"]) for row in rows] == [
        ("moonvit eager float16", 28), ("moonvit eager float16", 56)
    ]  # fmt: skip


@pytest.mark.parametrize("option", ["-o", "--plot"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, monkeypatch, option):
    monkeypatch.setattr("moonvit.cli.bench.benchmark", lambda *_: pytest.fail("it ran"))
    (tmp_path / "taken").write_text("")
    place = tmp_path / "taken" / "file"
    done = CliRunner().invoke(command, ["--model", str(TINY), "--sizes", "28", option, str(place)])
    assert done.exit_code == 1
    assert "cannot be written" in done.output


def test_peaks_are_told_in_mebibytes():
    row = Row("x bfloat16", 28, Work(4, 4, 4), Timing((1.0,)), 1e9, peak=300 * 2**20)
    assert as_text([row]).splitlines()[1].split()[-1] == "300"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_a_containers_quota_bounds_the_threads(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    assert usable_cores(tmp_path) == (expected or 64)
