"""The CDK app: `cdk synth`, `cdk deploy`, or without the CDK CLI `python -m infra.app`, which writes `cdk.out`.

Takes the CDK CLI's `-c KEY=VALUE` itself too: `python -m infra.app -c env=prod -c trnpipe.region=us-east-2`. Needs no AWS
credentials, no Docker, and no Node.js but the packaged one. Ends with 64 when the settings are wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.cdk_context import parse_context, read_context, read_settings
from infra.nodejs import choose_node
from pipeline.errors import TrnpipeError

CDK = "npx aws-cdk@2.1147.0"
"""The CDK CLI of the guides: the oldest that reads what the locked aws-cdk-lib writes (`minimumCliVersion` of an assembly)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Synthesize.

    Args:
        arguments: of the command line; None: this process's.
    """
    parser = argparse.ArgumentParser(prog="python -m infra.app", description="Write the CDK app's cloud assembly to cdk.out.")
    parser.add_argument(
        *("-c", "--context"),
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="over cdk.json: env=NAME for infra/environments/NAME.yaml, trnpipe.KEY=VALUE for one setting",
    )
    try:
        context: dict[str, Any] = parse_context(parser.parse_args(arguments).context)
        # The CDK CLI hands over outdir and its own context itself.
        alone = "CDK_OUTDIR" not in os.environ
        # stdout is for programs.
        synthesize(
            {**read_context(), **context} if alone else context,
            "cdk.out" if alone else None,
            tell=lambda line: sys.stderr.write(f"{line}\n"),
        )
    except TrnpipeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def synthesize(context: Mapping[str, Any], outdir: str | None = None, *, tell: Callable[[str], Any] = lambda _line: None) -> Path:
    """Write the cloud assembly and return its folder.

    Args:
        tell: receives the lines of the cost estimate of a run.

    Raises:
        BadConfig: wrong settings.
    """
    choose_node()
    # CDK starts its Node.js process when it is imported, so not before the choice above.
    from infra.run_cost import expectation
    from infra.stacks import build

    app = build(context, outdir)
    folder = Path(app.synth().directory)
    for line in expectation(read_settings(app.node.get_all_context())):
        tell(line)
    return folder


if __name__ == "__main__":
    sys.exit(main())
