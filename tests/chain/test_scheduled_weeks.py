"""Two executions as the schedule of the example environment starts them: light stages, everything else is real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.cdk_context import ENVIRONMENT_KEY, read_context, read_environment
from infra.templates import Stacks
from pipeline import store
from pipeline.contract import Stage
from tests.chain.site import ORCHESTRATION, Site, marked, open_site, parent_files

pytestmark = pytest.mark.slow

SMALL = {"trnpipe.config.data.holdout_fraction": "0.2", "trnpipe.config.gate.undecided": "accept"}
"""What the example leaves to data of a deployment's size, of which there is little here."""

ROWS = 60


def test_the_second_week_continues_from_the_first_on_what_is_new(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    templates = request.config.cache.mkdir("cdk-out-example")
    context = {**read_context(), "aws:cdk:enable-path-metadata": True, ENVIRONMENT_KEY: "example", **SMALL}
    config = read_environment("example")["config"]
    [data], initial = config["data"]["train"], config["model"]["initial"]
    plans = []
    with open_site(ORCHESTRATION, tmp_path, templates, context) as site:
        for uri in (data, initial):
            site.s3.create_bucket(Bucket=store.split(uri)[0])
        for path, content in parent_files(ORCHESTRATION, tmp_path):
            store.write_bytes(f"{initial}{path}", content)
        [weekly] = [
            json.loads(schedule.properties["Target"]["Input"])
            for schedule in Stacks.read(templates).of_type("AWS::Scheduler::Schedule")
            if json.loads(schedule.properties["Target"]["Input"])["mode"] == "train"
        ]
        for week in ("week-1", "week-2"):
            rows = [{"id": f"{week}-{row}", "query": f"query {row}", "document": f"{week} text {row}"} for row in range(ROWS)]
            store.write_bytes(f"{data}{week}.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())
            plans.append(finished(site, week, weekly))
    first, second = plans
    assert (first["parent"]["uri"], first["published"]) == (initial, None)
    assert second["parent"]["run"] == second["published"]["run"] == first["run"]
    assert [shard["uri"] for shard in second["train"]["new"]] == [f"{data}week-2.jsonl"]


def finished(site: Site, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The plan of an execution that succeeds."""
    with marked(site, name):
        execution = site.begin(name, given, "current")
        assert site.finish(execution, ORCHESTRATION.limit_seconds)
    assert execution.ended is not None
    assert execution.ended["status"] == "SUCCEEDED", execution.ended.get("cause")
    plan: dict[str, Any] = store.read_json(site.paths(name).plan)
    replaced = store.read_json(site.paths(name).result(Stage.PUBLISH))["metrics"]["replaced"]
    assert replaced == (plan["published"] or {}).get("run")
    return plan
