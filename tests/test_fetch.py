"""Fetching from a hub on loopback: only the vision bytes move, and nothing wrong ever loads."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from big_checkpoint import make_big_checkpoint
from conftest import IMAGES, TINY
from hub_server import COMMIT, Faults, HubServer
from moonvit.cli import group
from moonvit.encoder import Encoder
from moonvit.errors import ConfigError, WeightsError
from moonvit.synthetic import make_checkpoint
from moonvit.weights import fetch as fetching
from moonvit.weights.checkpoint import LocalCheckpoint
from moonvit.weights.hub import HubCheckpoint, HubRepo
from moonvit.weights.load import fingerprint
from moonvit.weights.ranges import RemoteFile
from moonvit.weights.rows import embedding_rows
from moonvit.weights.source import fetch_to, find_checkpoint

REPO = "org/k3"
FILES = {path.name: path for path in TINY.iterdir()}
LAST = "model-00003-of-000003.safetensors"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Caches of this test alone, and no pauses between tries."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MOONVIT_CACHE", str(tmp_path / "moonvit"))
    monkeypatch.setattr("moonvit.weights.ranges.pause_before", lambda *_: 0.0)
    monkeypatch.setattr("moonvit.weights.hub.pause_before", lambda *_: 0.0)
    return tmp_path


@pytest.fixture
def hub(place, monkeypatch):
    with HubServer({REPO: FILES}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def environment(server: HubServer, place: Path, **more: str) -> dict[str, str]:
    return os.environ | {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(place / "home"),
        "MOONVIT_CACHE": str(place / "moonvit"),
        **more,
    }


def cli(*words, env):
    return subprocess.run(
        [sys.executable, "-m", "moonvit", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )


def test_fetched_equals_the_original(hub):
    found = find_checkpoint(REPO)
    ours, theirs = LocalCheckpoint(found), LocalCheckpoint(TINY)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name in ours.tensors:
        assert torch.equal(ours.read(name), theirs.read(name))
    assert fingerprint(ours) == fingerprint(theirs)
    header = next(iter(ours.shards.values()))
    assert header.metadata["source"] == REPO
    assert header.metadata["revision"] == COMMIT
    assert header.metadata["etag"]
    assert sorted(p.name for p in found.iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "preprocessor_config.json",
    ]
    assert not list(found.parent.glob(".*.fetching"))


def test_from_pretrained_by_name(hub):
    expected = Encoder.from_pretrained(TINY).encode(IMAGES / "rgb_29x28.png")
    assert (Encoder.from_pretrained(REPO).encode(IMAGES / "rgb_29x28.png") == expected).all()
    moved = hub.sent(".safetensors")
    Encoder.from_pretrained(REPO, revision="main")
    Encoder.from_pretrained(REPO, local_files_only=True)
    Encoder.from_pretrained(REPO, revision=COMMIT, local_files_only=True)
    assert hub.sent(".safetensors") == moved


def test_only_vision_bytes_move(place, monkeypatch):
    """96 shards, 1.1 TB in name: vision bytes and two headers come over, no more than 1 % beside them."""
    source = LocalCheckpoint(TINY)
    vision = {name: source.read(name) for name in source.tensors}
    directory = place / "big"
    directory.mkdir()
    files = make_big_checkpoint(directory, vision)
    assert sum(path.stat().st_size for path in files.values()) > 1.1e12
    files |= {name: FILES[name] for name in ("config.json", "preprocessor_config.json")}
    with HubServer({REPO: files}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        found = find_checkpoint(REPO)
        shards = [files[f"model-{n:05}-of-000096.safetensors"] for n in (95, 96)]
        headers = sum(8 + int.from_bytes(path.open("rb").read(8), "little") for path in shards)
        assert server.sent(".safetensors") <= 1.01 * source.nbytes + headers
        touched = {r.path.rsplit("/", 1)[1] for r in server.requests if r.path.endswith(".safetensors")}
        assert touched == {path.name for path in shards}
    ours = LocalCheckpoint(found)
    assert all(torch.equal(ours.read(name), tensor) for name, tensor in vision.items())


def test_single_file_without_an_index(hub, place):
    from safetensors.torch import save_file

    source = LocalCheckpoint(TINY)
    save_file({name: source.read(name) for name in source.tensors}, place / "model.safetensors")
    hub.repos["org/single"] = {"model.safetensors": place / "model.safetensors"} | {
        name: FILES[name] for name in ("config.json", "preprocessor_config.json")
    }
    assert fingerprint(LocalCheckpoint(find_checkpoint("org/single"))) == fingerprint(source)


def test_neighbours_are_joined(hub):
    checkpoint = HubCheckpoint(HubRepo(REPO))
    parts = fetching.plan_parts(checkpoint)
    assert sum(run.length for part in parts for run in part.runs) == checkpoint.nbytes
    assert sum(len(part.runs) for part in parts) < len(checkpoint.tensors) / 2
    for part in parts:
        assert part.runs[0].target == len(part.head)
        for left, right in zip(part.runs, part.runs[1:], strict=False):
            assert left.target + left.length == right.target
            assert left.source + left.length < right.source


FATAL = {
    "ignore_range": (Faults(ignore_range=True), "ignores byte ranges"),
    "lie": (Faults(lie_by=4), "the answer is"),
    "total": (Faults(lie_total=1), "changed while being read"),
    "etag": (Faults(etag_after=2), "ETag"),
    "loop": (Faults(loop=True), "redirects"),
    "gone": (Faults(status=404), "status 404"),
    "busy": (Faults(status=503), "gave up"),
    "cut for ever": (Faults(drop_at=30_000), "gave up"),
}


@pytest.mark.parametrize("name", FATAL)
def test_misbehaviour_ends_in_an_error(hub, place, name):
    hub.faults, message = FATAL[name]
    with pytest.raises(WeightsError, match=message) as caught:
        find_checkpoint(REPO)
    assert ".safetensors" in str(caught.value)
    with pytest.raises(WeightsError, match="not in the cache"):
        find_checkpoint(REPO, local_files_only=True)
    hub.faults = Faults()
    assert fingerprint(LocalCheckpoint(find_checkpoint(REPO))) == fingerprint(LocalCheckpoint(TINY))


PASSING = {
    "short": Faults(short_by=100, times=5),
    "dropped": Faults(drop_at=30_000, times=2),
    "busy": Faults(status=503, times=3),
    "too many": Faults(status=429, times=3),
}


@pytest.mark.parametrize("name", PASSING)
def test_misbehaviour_that_passes(hub, name):
    hub.faults = PASSING[name]
    assert fingerprint(LocalCheckpoint(find_checkpoint(REPO))) == fingerprint(LocalCheckpoint(TINY))


def test_drop_at_any_byte(hub):
    """A connection cut once anywhere in the file: the result is right."""
    expected = fingerprint(LocalCheckpoint(TINY))
    size = FILES[LAST].stat().st_size
    for number, position in enumerate(random.Random(0).sample(range(size), 12)):
        hub.repos[f"org/n{number}"] = FILES
        hub.faults = Faults(drop_at=position, times=1)
        hub._struck = 0
        assert fingerprint(LocalCheckpoint(find_checkpoint(f"org/n{number}"))) == expected


def test_content_that_changes_between_runs_is_not_mixed(hub, place, monkeypatch):
    """A killed fetch of one revision of a file is not gone on with for another."""
    hub.faults = Faults(drop_at=100_000)
    with pytest.raises(WeightsError):
        find_checkpoint(REPO)
    changed = place / LAST
    data = bytearray(FILES[LAST].read_bytes())
    data[-40_000:] = bytes(40_000)
    changed.write_bytes(data + b"")
    hub.repos[REPO] = FILES | {LAST: changed}
    monkeypatch.setattr(
        HubRepo,
        "open",
        lambda self, file, real=HubRepo.open: (real(self, file)[0], real(self, file)[1] + "-new"),
    )
    hub.faults = Faults()
    directory = place / "expected"
    directory.mkdir()
    for name, path in hub.repos[REPO].items():
        (directory / name).write_bytes(path.read_bytes())
    assert fingerprint(LocalCheckpoint(find_checkpoint(REPO))) == fingerprint(LocalCheckpoint(directory))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_token_stays_with_its_host(place, monkeypatch, host):
    with HubServer({REPO: FILES}, host=host) as other, HubServer({REPO: FILES}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.faults = Faults(redirect_to=other.url, token="hf_secret")
        found = find_checkpoint(REPO, token="hf_secret")
        assert fingerprint(LocalCheckpoint(found)) == fingerprint(LocalCheckpoint(TINY))
        assert all(r.authorization == "Bearer hf_secret" for r in hub.requests)
        assert other.requests
        assert {r.authorization for r in other.requests} == {None}


@pytest.mark.parametrize(
    ("repo", "how", "message"),
    [
        ("org/none", {}, "no such repository"),
        (REPO, {"revision": "nothing"}, "no revision 'nothing'"),
        ("org/none", {"local_files_only": True}, "not in the cache"),
        ("just-a-name", {}, "no such directory"),
        ("a/b/c", {}, "no such directory"),
        ("../up", {}, "no such directory"),
    ],
)
def test_repositories_that_are_not_there(hub, repo, how, message):
    with pytest.raises(WeightsError, match=message):
        find_checkpoint(repo, **how)


def test_gated(hub):
    hub.faults = Faults(token="right")
    with pytest.raises(WeightsError, match="HF_TOKEN"):
        find_checkpoint(REPO, token="wrong")


def test_refused_before_a_tensor_moves(hub, place):
    config = place / "config.json"
    config.write_text(
        FILES["config.json"].read_text().replace('"vt_num_hidden_layers": 3', '"vt_num_hidden_layers": 4')
    )
    hub.repos[REPO] = FILES | {"config.json": config}
    with pytest.raises(WeightsError, match=r"blocks\.3\.norm0\.weight: missing"):
        find_checkpoint(REPO)
    assert hub.sent(".safetensors") < 20_000
    hub.repos["org/bare"] = {name: path for name, path in FILES.items() if name != "preprocessor_config.json"}
    with pytest.raises(ConfigError, match="preprocessor_config.json: no such file"):
        find_checkpoint("org/bare")


@pytest.mark.parametrize("name", ["../../x.safetensors", "/etc/passwd", "https://x/y", "a\\..\\b"])
def test_index_cannot_lead_out(hub, place, name):
    index = place / "model.safetensors.index.json"
    index.write_text(FILES[index.name].read_text().replace(LAST, name.replace("\\", "\\\\")))
    hub.repos[REPO] = FILES | {index.name: index}
    with pytest.raises(WeightsError, match="leads out"):
        find_checkpoint(REPO)
    assert not any("passwd" in r.path for r in hub.requests)


def test_lying_header(hub, place):
    broken = place / LAST
    broken.write_bytes((10**9).to_bytes(8, "little") + FILES[LAST].read_bytes()[8:])
    hub.repos[REPO] = FILES | {LAST: broken}
    with pytest.raises(WeightsError, match=f"{LAST}: header of 1000000000 bytes"):
        find_checkpoint(REPO)
    assert hub.sent(LAST) <= 8


def test_offline_from_the_command_line(hub, place):
    env = environment(hub, place)
    assert cli("fetch", REPO, env=env).returncode == 0
    offline = env | {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = cli("encode", IMAGES / "rgb_29x28.png", "--model", REPO, env=offline)
    assert done.returncode == 0, done.stderr
    gone = cli("encode", IMAGES / "rgb_29x28.png", "--model", "org/other", env=offline)
    assert gone.returncode == 1
    assert "offline" in gone.stderr
    assert len(gone.stderr.splitlines()) == 1
    unreachable = cli("fetch", "org/other", env=env | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert unreachable.returncode == 1
    assert "cannot be reached" in unreachable.stderr
    assert "for a directory, check the path" in unreachable.stderr
    assert "for a directory, check the path" in gone.stderr
    assert len(unreachable.stderr.splitlines()) == 1
    fallback = cli("info", REPO, env=env | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert fallback.returncode == 0, fallback.stderr
    assert "using the cached" in fallback.stderr


def test_fetch_to_a_directory(hub, place):
    env = environment(hub, place)
    done = cli("fetch", REPO, "-o", place / "here", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(place / "here")
    assert fingerprint(LocalCheckpoint(place / "here")) == fingerprint(LocalCheckpoint(TINY))
    again = cli("fetch", REPO, "-o", place / "here", env=env)
    assert again.returncode == 1
    assert "exists already" in again.stderr


def test_two_at_once(hub, place):
    hub.faults = Faults(bandwidth=400_000)
    env = environment(hub, place)
    words = [sys.executable, "-m", "moonvit", "fetch", REPO]
    both = [
        subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1]
    found = Path(outputs[0].decode().strip())
    assert fingerprint(LocalCheckpoint(found)) == fingerprint(LocalCheckpoint(TINY))
    assert hub.sent(".safetensors") < 1.2 * LocalCheckpoint(TINY).nbytes


def test_killed_and_gone_on_with(hub, place):
    """Killed at 20 random moments, each time gone on with: bit-equal, and at most 5 % came twice."""
    make_checkpoint(place / "mid", "mid")
    source = LocalCheckpoint(place / "mid")
    hub.repos[REPO] = {path.name: path for path in (place / "mid").iterdir()}
    hub.faults = Faults(bandwidth=500_000)
    env = environment(hub, place)
    generator = random.Random(1)
    words = [sys.executable, "-m", "moonvit", "fetch", REPO]
    kills = 0
    while kills < 20:
        process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        before = hub.sent(".safetensors")
        aim = before + generator.randrange(20_000, source.nbytes // 22)
        while hub.sent(".safetensors") < aim and process.poll() is None:
            time.sleep(0.002)
        assert process.poll() is None, process.stderr.read()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
        kills += 1
    hub.faults = Faults()
    done = cli("fetch", REPO, env=env)
    assert done.returncode == 0, done.stderr
    found = LocalCheckpoint(Path(done.stdout.strip()))
    assert fingerprint(found) == fingerprint(source)
    headers = sum(8 + header.size for header in source.shards.values())
    data = hub.sent(".safetensors") - 21 * headers
    assert data <= 1.05 * source.nbytes


def test_rows_of_the_text_embedding(hub):
    """From a hub and from a directory: the rows asked for, in order, and nothing else."""
    local, remote = LocalCheckpoint(TINY), HubCheckpoint(HubRepo(REPO))
    ids = [5, 3, 4, 31, 5]
    from safetensors.torch import load_file

    table = load_file(TINY / "model-00002-of-000003.safetensors")["language_model.model.embed_tokens.weight"]
    assert torch.equal(embedding_rows(local, ids), table[ids])
    asked = len(hub.requests)
    assert torch.equal(embedding_rows(remote, ids), table[ids])
    header = local.header("model-00002-of-000003.safetensors").size + 8
    spans = [r.range for r in hub.requests[asked:] if r.range]
    assert len(spans) == 4  # the header's length and text, rows 3 to 5 as one, row 31
    moved = [int(b) - int(a) + 1 for a, b in (s.removeprefix("bytes=").split("-") for s in spans)]
    assert sum(moved) == 4 * 48 * 2 + header
    assert torch.equal(embedding_rows(local, torch.tensor(ids)), table[ids])
    with pytest.raises(TypeError):
        embedding_rows(local, [1.5])
    assert embedding_rows(local, []).shape == (0, 48)
    for bad in (-1, 32):
        with pytest.raises(WeightsError, match=f"token id {bad} is outside the table of 32 rows"):
            embedding_rows(local, [bad])


def test_no_text_embedding(tiny_copy):
    index = tiny_copy / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("embed_tokens", "something_else"))
    with pytest.raises(WeightsError, match="no text embedding table"):
        embedding_rows(LocalCheckpoint(tiny_copy), [1])


@pytest.mark.parametrize("status", [429, 503])
def test_busy_hub_is_asked_again(hub, monkeypatch, status):
    """Questions beside ranges, too, are repeated; a hub that stays busy ends in one line."""
    hub.faults = Faults(api_status=status, times=3)
    find_checkpoint(REPO)
    hub.faults = Faults(api_status=status)
    hub.repos["org/other"] = FILES
    with pytest.raises(WeightsError, match=f"the hub answered: .*{status}"):
        find_checkpoint("org/other")


def test_expired_links_are_asked_for_again(place, monkeypatch):
    """A redirect target that answers 403 now and then: each try goes through the hub again."""
    with HubServer({REPO: FILES}) as store, HubServer({REPO: FILES}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.faults = Faults(redirect_to=store.url)
        store.faults = Faults(status=403, times=3)
        assert fingerprint(LocalCheckpoint(find_checkpoint(REPO))) == fingerprint(LocalCheckpoint(TINY))


@pytest.mark.parametrize("target", ["file:///etc", "ftp://127.0.0.1", "http://[::1", "gopher://x"])
def test_redirects_elsewhere_are_refused(place, hub, target):
    file = RemoteFile("x.safetensors", f"{hub.url}/{REPO}/resolve/{COMMIT}/{LAST}", 1000, {})
    hub.faults = Faults(redirect_to=target)
    with pytest.raises(WeightsError, match="refused a redirect|malformed address"):
        file.read(0, 10)


def test_parts_of_another_source_are_not_taken_up(hub, place, monkeypatch):
    """A fetch into the same place of something else starts afresh, whatever an earlier one left."""
    directory = place / "other"
    make_checkpoint(directory, "tiny", seed=9)
    hub.repos["org/other"] = {path.name: path for path in directory.iterdir()}
    real, calls = fetching._fetch_part, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(fetching, "_fetch_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_to(HubRepo(REPO), place / "out")
    (fetching.unfinished(place / "out") / "stranger.safetensors").write_bytes(b"x")
    monkeypatch.setattr(fetching, "_fetch_part", real)
    fetch_to(HubRepo("org/other"), place / "out")
    assert fingerprint(LocalCheckpoint(place / "out")) == fingerprint(LocalCheckpoint(directory))
    assert not list((place / "out").glob("stranger*"))


@pytest.mark.parametrize("sha", [None, "main", "/etc", "../models--org--secret/abc", "A" * 40, "a" * 39])
def test_commit_must_be_one(hub, place, sha):
    hub.commit = sha
    with pytest.raises(WeightsError, match="names no commit"):
        find_checkpoint(REPO)
    assert not (place / "moonvit").exists()


@pytest.mark.parametrize("damage", ["cut", "gone", "config", "ref"])
def test_damaged_cache_is_fetched_again(hub, place, damage):
    found = find_checkpoint(REPO)
    shard = found / "model-00001-of-00002.safetensors"
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "gone":
        shard.unlink()
    elif damage == "config":
        (found / "config.json").unlink()
    else:
        (found.parent / "refs" / "main").write_text("../../elsewhere")
    with pytest.raises(WeightsError, match="not in the cache"):
        find_checkpoint(REPO, local_files_only=True)
    assert find_checkpoint(REPO) == found
    assert fingerprint(LocalCheckpoint(find_checkpoint(REPO, local_files_only=True))) == fingerprint(
        LocalCheckpoint(TINY)
    )


def test_cache_serves_when_the_hub_does_not(hub, place):
    found = find_checkpoint(REPO)
    hub.faults = Faults(api_status=503)
    assert find_checkpoint(REPO) == found
    asked = len(hub.requests)
    assert find_checkpoint(REPO, revision=COMMIT) == found
    assert len(hub.requests) == asked


def test_large_small_file_is_refused_unread(hub, place):
    big = place / "config.json"
    with big.open("wb") as file:
        file.truncate(600_000_000)
    hub.repos[REPO] = FILES | {"config.json": big}
    with pytest.raises(ConfigError, match="600000000 bytes, the limit is"):
        find_checkpoint(REPO)
    assert hub.sent("config.json") == 0


def test_interrupt_stops_a_fetch_that_hangs(hub, place):
    """A server that stays silent in the middle of a range does not hold up the end of the program."""
    hub.faults = Faults(silent_after=1000)
    words = [sys.executable, "-m", "moonvit", "fetch", REPO]
    process = subprocess.Popen(words, env=environment(hub, place), stderr=subprocess.PIPE, text=True)
    while sum(r.range is not None for r in hub.requests) < 5:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.strip() == "error: interrupted"


def test_full_disk_is_said_before(hub, place, monkeypatch):
    import shutil as tools

    usage = tools.disk_usage(place)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(WeightsError, match="bytes of disk, 1000 are free"):
        find_checkpoint(REPO)


def test_mlx_checkpoint_from_a_hub(hub, place):
    from safetensors.torch import save_file

    source = LocalCheckpoint(TINY)
    tensors = {name: source.read(name).clone() for name in source.tensors}
    patch = "vision_tower.patch_embed.proj.weight"
    turned = tensors | {patch: tensors[patch].permute(0, 2, 3, 1).contiguous()}
    save_file(turned, place / "model.safetensors", metadata={"format": "mlx"})
    configs = {name: FILES[name] for name in ("config.json", "preprocessor_config.json")}
    hub.repos[REPO] = configs | {
        "model.safetensors": place / "model.safetensors",
        "mlx/model.safetensors": TINY / LAST,
    }
    assert torch.equal(LocalCheckpoint(find_checkpoint(REPO)).read(patch), tensors[patch])


def test_nested_rules_come_along(hub, place):
    """`processor_config.json` in place of `preprocessor_config.json`, by fetch and by count."""
    nested = place / "processor_config.json"
    rules = json.loads(FILES["preprocessor_config.json"].read_text())
    nested.write_text(json.dumps({"image_processor": rules, "video_processor": {"fps": 2}}))
    kept = {name: path for name, path in FILES.items() if name != "preprocessor_config.json"}
    hub.repos[REPO] = kept | {nested.name: nested}
    done = CliRunner().invoke(group, ["count", str(IMAGES / "rgb_29x28.png"), "--model", REPO])
    assert done.exit_code == 0, done.output
    assert not hub.sent(".safetensors")
    found = LocalCheckpoint(find_checkpoint(REPO))
    assert found.preprocessor == rules
    assert found.video_rules.values == {"fps": 2}
