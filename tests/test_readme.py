"""The README's commands and code run as they stand there, on a small checkpoint under the README's name."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine_checkpoints import qwen3_vl
from hub_server import HubServer
from moonvit.synthetic import make_checkpoint

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ ")
]
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder like the repository after `make demo`, checkpoints in miniature, and a hub on loopback."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "examples", folder / "examples")
    make_checkpoint(folder / "build" / "k3-random", "tiny")
    qwen = qwen3_vl(tmp_path_factory.mktemp("qwen")).directory
    homes = {"moonshotai/Kimi-K3.1-Pro": folder / "build" / "k3-random", "Qwen/Qwen3-VL-2B-Instruct": qwen}
    repos = {name: {path.name: path for path in home.iterdir()} for name, home in homes.items()}
    with HubServer(repos) as hub:
        yield folder, os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home")}


def test_there_is_something_to_run():
    assert len([c for c in COMMANDS if c.startswith("moonvit")]) >= 5
    assert CODE


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("moonvit ")])
def test_command(command, place):
    folder, env = place
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", CODE)
def test_code(code, place):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place[0], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_knows_its_targets(command):
    """The targets exist; .ci/run makes them for good."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    done = subprocess.run(
        ["make", "--dry-run", *shlex.split(command)[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_what_the_readme_says_of_the_photograph(place):
    """Tokens and grid in the sample output hold for any K3 checkpoint."""
    words = [sys.executable, "-m", "moonvit", "count", "examples/rocket.jpg"]
    done = subprocess.run(words, cwd=place[0], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:4] == ["368", "640x427", "grid", "1x32x46"]
    assert "grid 1x32x46  368 tokens" in README


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
