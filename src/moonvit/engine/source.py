"""Where the whole of a model lies: a directory, or a repository that is fetched with its text half."""

import os
from pathlib import Path

from moonvit.engine.families import check_text_config, text_family
from moonvit.errors import OfflineError
from moonvit.families import family_of
from moonvit.fields import JSON_LIMIT, parse_json
from moonvit.weights.hub import HubRepo, endpoint
from moonvit.weights.source import local_path

PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "tiktoken.model")
"""What is fetched of a repository: weights, configs, tokenizer."""


def find_whole(
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """The directory of a whole checkpoint; a repository goes into huggingface-hub's own cache.

    A family or a quantisation that cannot be run is refused by `config.json` alone, before the fetch. Where
    the hub cannot be reached, what was fetched before serves.
    """
    path = local_path(path_or_repo)
    if path is not None:
        return path
    from huggingface_hub import snapshot_download

    cache = Path(cache_dir) if cache_dir else None
    repo = HubRepo(str(path_or_repo), revision, token, cache)
    if not local_files_only:
        try:
            _check_config(repo)
        except OfflineError:  # what the cache has will do
            local_files_only = True
    found = repo.asked(
        lambda: snapshot_download(
            repo.name,
            revision=revision,
            token=token,
            cache_dir=cache,
            endpoint=endpoint(),
            local_files_only=local_files_only,
            allow_patterns=list(PATTERNS),
        )
    )
    return Path(found)


def _check_config(repo: HubRepo) -> None:
    where = f"{repo.name}/config.json"
    config = parse_json(repo.download("config.json", JSON_LIMIT), where)
    family = family_of(config, where).name
    text_family(family)
    check_text_config(family, config, where)
