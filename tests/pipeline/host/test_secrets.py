"""Credentials of a job's environment: in no log, no file of the run folder, no file of the node, whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import store
from pipeline.contract import Stage

SECRETS = {"AWS_SECRET_ACCESS_KEY": "planted/secret+PLANTED", "AWS_SESSION_TOKEN": "planted-session-token-PLANTED"}
SIGNED = "https://user:PLANTED@host.example/o?X-Amz-Signature=PLANTED&X-Amz-Security-Token=PLANTED"
USES_STORAGE = "from pipeline import store; store.write_bytes(context.paths.stage(context.stage) + '/x', b'1'); "
ENDINGS = {
    "well": "pass",
    "expected": "from pipeline.errors import BadData; raise BadData('bad', value=os.environ['URI'], rule=os.environ['URI'])",
    "unexpected": "raise ValueError('cannot fetch ' + os.environ['URI'])",
    "said": "import logging; logging.getLogger('trnpipe').info('fetching %s', os.environ['URI']); sys.exit(3)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_credentials_are_written_nowhere(
    plan_run: Callable[..., Any],
    supervise: Callable[..., Any],
    scripted_stage: dict[str, str],
    s3_root: str,
    tmp_path: Path,
    ending: str,
) -> None:
    run = plan_run(s3_root)
    (tmp_path / "tmp").mkdir()
    program = {"TRNPIPE_TEST_RANK": USES_STORAGE + ENDINGS[ending], "URI": SIGNED}
    loud = {"TRNPIPE_LOG_LEVEL": "DEBUG", "TMPDIR": str(tmp_path / "tmp")}
    node = supervise(Stage.HEALTH_CHECK, run.paths.root, **program, **loud, **SECRETS, **scripted_stage)
    code = node.wait()
    assert (code == 0) == (ending == "well"), node.log
    written = {info.uri: store.read_bytes(info.uri).decode(errors="replace") for info in store.list_objects(run.paths.root)}
    written |= {str(path): path.read_text(errors="replace") for path in (tmp_path / "tmp").rglob("*") if path.is_file()}
    written["log"] = node.log
    assert [(name, text) for name, text in written.items() if "PLANTED" in text] == []
    assert run.paths.stage(Stage.HEALTH_CHECK) + "/x" in written
    assert (run.paths.failure(Stage.HEALTH_CHECK) in written) == (ending != "well")


def test_an_unknown_log_level_is_a_bad_setting(
    plan_run: Callable[..., Any], supervise: Callable[..., Any], tmp_path: Path
) -> None:
    node = supervise(Stage.HEALTH_CHECK, plan_run().paths.root, TRNPIPE_LOG_LEVEL="loud")
    assert node.wait() != 0
    assert "unknown log level" in node.log
