"""`hybridsched policies`: what async_training.dynamic_schedule_policy can name."""

from __future__ import annotations

import typer

from hybridsched.cli.console import print_table


def policies() -> None:
    """List the policies that can be named here, where they come from and what they do."""
    from hybridsched.runtime.policy_loader import list_policies

    print_table(
        ("policy", "what it does", "class", "from"),
        [(name, found.summary, found.cls.__name__, found.origin) for name, found in list_policies().items()],
    )
    typer.echo(
        "Name one in run.yaml: async_training.dynamic_schedule_policy. Copy a YAML to tune it; "
        "policies/example_policy.py shows how to write one."
    )
