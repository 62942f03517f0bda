"""`moonvit selftest`."""

import json
import re
import sys
from dataclasses import asdict

import click

from moonvit.cli import options
from moonvit.encoder import Encoder
from moonvit.trace.selftest import Check, selftest


@click.command("selftest")
@options.model
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32", "float64"]),
    default="float32",
    show_default=True,
    help="Type of weights and activations of the tower; the reference is always float64.",
)
@options.norm_eps
@options.device
@click.option("--all", "every", is_flag=True, help="Show every block, not the worst of them.")
@options.output_format("human", "json")
def command(model: str, dtype: str, norm_eps: float | None, device: str, every: bool, kind: str) -> None:
    """Run the tower against an independent float64 implementation in NumPy, on small pictures.

    Prints the relative L2 error of every stage; of the blocks, the worst. The exit code is 1 if one is over
    the budget of its type.
    """
    encoder = Encoder.from_pretrained(model, dtype=dtype, device=device, norm_eps=norm_eps, backend="eager")
    checks = list(selftest(encoder))
    good = all(check.good for check in checks)
    if kind == "json":
        rows = [asdict(check) | {"good": check.good} for check in checks]
        click.echo(json.dumps({"dtype": dtype, "good": good, "checks": rows}, indent=2))
    else:
        _print(checks, dtype, every)
    sys.exit(0 if good else 1)


def _print(checks: list[Check], dtype: str, every: bool) -> None:
    cases = list(dict.fromkeys(check.case for check in checks))
    rows: dict[str, dict[str, Check]] = {}
    for check in checks:
        stage = check.stage if every else re.sub(r"^block\.\d+", "block.*", check.stage)
        worst = rows.setdefault(stage, {}).get(check.case)
        if worst is None or check.error > worst.error:
            rows[stage][check.case] = check
    click.echo(f"{'relative L2 error, ' + dtype:<26}" + "".join(f"{case:>22}" for case in cases))
    for stage, row in rows.items():
        cells = "".join(f"{row[case].error:>20.1e}{'' if row[case].good else ' !':<2}" for case in cases)
        click.echo(f"{stage:<26}{cells}")
    bad = [check for check in checks if not check.good]
    click.echo(
        f"FAIL: {len(bad)} stages over budget, first {bad[0].stage} of {bad[0].case}"
        if bad
        else f"PASS: {len(checks)} stages of {len(cases)} cases within the budgets of {dtype}"
    )
