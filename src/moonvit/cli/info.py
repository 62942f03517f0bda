"""`moonvit info`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from moonvit.cli import options, printable
from moonvit.config import PatchRules, TowerConfig, check_agreement
from moonvit.errors import ConfigError
from moonvit.families import family_of
from moonvit.weights.index import Checkpoint
from moonvit.weights.load import checkpoint_faults, stored_shapes, tower_only
from moonvit.weights.source import find_checkpoint, local_checkpoint


@click.command("info")
@click.argument("model", metavar="M")
@options.revision
@options.output_format("human", "json")
def command(model: str, revision: str | None, kind: str) -> None:
    """Show geometry, tensors, shards and pixel rules of checkpoint M, and what is wrong with it.

    Reads headers only. The exit code is 1 if the checkpoint cannot be loaded.
    """
    document = describe_checkpoint(local_checkpoint(find_checkpoint(model, revision=revision)))
    if kind == "json":
        click.echo(json.dumps(document, indent=2))
    else:
        _print(document)
    sys.exit(1 if document["faults"] else 0)


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """All that headers and configs tell, as one JSON-like document."""
    faults: list[str] = []
    vision, pixels = _configs(checkpoint, faults)
    expected: dict[str, tuple[int, ...]] = {}
    if vision is not None:
        model = family_of(checkpoint.config).empty_model(vision, projector=not tower_only(checkpoint))
        expected = stored_shapes(model, checkpoint)
        faults += checkpoint_faults(checkpoint, expected)
    else:
        faults += checkpoint.faults
    return {
        "path": checkpoint.where,
        "family": vision.model_type if vision else None,
        "geometry": asdict(vision) | {"head_dim": vision.head_dim} if vision else None,
        "preprocessor": asdict(pixels) if pixels else None,
        "tensors": {"found": len(checkpoint.tensors), "expected": len(expected) or None},
        "names": {"prefixes": checkpoint.reading.prefixes, "wrappers": checkpoint.reading.wrappers},
        "projector": not tower_only(checkpoint),
        "parameters": sum(_count(stored.entry.shape) for stored in checkpoint.tensors.values()),
        "bytes": checkpoint.nbytes,
        "dtypes": checkpoint.stored_types,
        "shards": _shards(checkpoint),
        "faults": faults,
    }


def _configs(checkpoint: Checkpoint, faults: list[str]) -> tuple[TowerConfig | None, PatchRules | None]:
    vision = pixels = None
    try:
        family = family_of(checkpoint.config)
    except ConfigError as error:
        faults.append(str(error))
        return None, None
    try:
        vision = family.vision(checkpoint.config, "config.json")
    except ConfigError as error:
        faults.append(str(error))
    try:
        rules = checkpoint.picture_rules
        pixels = family.pixels(rules.values, rules.where.removeprefix(f"{checkpoint.where}/"))
        if vision is not None:
            check_agreement(vision, pixels, Path(checkpoint.where).name)
    except ConfigError as error:
        faults.append(str(error))
    return vision, pixels


def _shards(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    rows = []
    for shard in checkpoint.shards:
        held = [s.entry for s in checkpoint.tensors.values() if s.shard == shard]
        rows.append({"file": shard, "tensors": len(held), "bytes": sum(entry.nbytes for entry in held)})
    return rows


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for side in shape:
        total *= side
    return total


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(f'"{printable(part)}"' for part in parts)


def _print(document: dict[str, Any]) -> None:
    click.echo(document["path"])
    for title in ("geometry", "preprocessor"):
        for key, value in (document[title] or {}).items():
            click.echo(f"  {title + '.' + key:<32} {json.dumps(value)}")
    tensors = document["tensors"]
    click.echo(
        f"  {tensors['found']} of {tensors['expected'] or '?'} tensors, "
        f"{document['parameters']:,} parameters, {document['bytes']:,} bytes, {' '.join(document['dtypes'])}"
    )
    names = document["names"]
    if any(names["prefixes"]):
        click.echo(f"  names: read behind {_listed(names['prefixes'])}")
    if names["wrappers"]:
        click.echo(f"  names: read without the wrappers {_listed(names['wrappers'])}")
    for shard in document["shards"]:
        click.echo(f"  {shard['file']}: {shard['tensors']} vision tensors, {shard['bytes']:,} bytes")
    if not document["projector"]:
        click.echo("  no projector: the tower can be used alone")
    for fault in document["faults"]:
        click.echo(f"  fault: {printable(fault)}")
    click.echo("  cannot be loaded" if document["faults"] else "  complete")
