"""The program that the job processes of these tests run instead of `trnpipe`: `stage NAME --run URI`, with the contract's files.

TRNPIPE_TEST_SCRIPT holds JSON {stage: {...}}: `exit` a list of exit codes by attempt (the last one repeats), `metrics` of the
result, `value` of the failure, `seconds` to work, `only_attempt` and `only_node` to limit a failure. Everything goes through S3
of the local endpoint.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request

from pipeline.contract import RunPaths, Stage, StageFailure, StageResult, now

METRICS = {
    "prepare": {"ingest_children": 2, "mine_children": 0},
    "plan": {"nodes": 1, "embed_children": 2, "compile": True, "precompile": True},
    "train": {"steps": 10, "pairs_per_second": 123.4},
    "evaluate": {
        "baseline": {"ndcg@10": 0.5, "recall@1": 0.4},
        "new": {"ndcg@10": 0.55, "recall@1": 0.39},
        "gate": {"verdict": "accepted", "reason": "ndcg@10 0.5500 is not below 0.4990"},
        "refresh": False,
    },
    "publish": {"again": False, "refused": None, "model": "run", "documents": 1000},
    "embed": {"documents": 1000, "copied": 600, "documents_per_second": 500.0},
}


def main() -> int:
    stage, paths = Stage(sys.argv[2]), RunPaths(sys.argv[4])
    script = json.loads(os.environ.get("TRNPIPE_TEST_SCRIPT", "{}")).get(stage.value, {})
    attempt, node = int(os.environ["AWS_BATCH_JOB_ATTEMPT"]), int(os.environ.get("AWS_BATCH_JOB_NODE_INDEX", "0"))
    child = int(os.environ.get("AWS_BATCH_JOB_ARRAY_INDEX", "0"))
    sys.stderr.write(f"{stage} attempt {attempt} node {node} child {child}\n")
    put(paths.progress(stage, child or node), {"done": 1, "total": 2, "unit": "pairs", "rate": 7.5, "note": "working"})
    if not node:
        # A gang meets before it works: where the main node ends, the others are ended too, perhaps before they said anything.
        for peer in range(1, int(os.environ.get("AWS_BATCH_JOB_NUM_NODES", "1"))):
            wait_for(paths.progress(stage, peer))
    time.sleep(script.get("seconds", 0))
    codes = script.get("exit", [0])
    code = codes[min(attempt, len(codes)) - 1]
    if code and not (node or child):
        failure = StageFailure(
            stage=stage.value,
            run=paths.run_id,
            exit_code=code,
            what=f"{stage} cannot go on",
            value=script.get("value", ["seen"]),
            rule="it should",
            remedy="help it",
            attempt=attempt,
            time=now(),
        )
        put(paths.failure(stage), json.loads(failure.to_json()))
    if code:
        return code
    if not (node or child):
        metrics = METRICS.get(stage.value, {}) | script.get("metrics", {})
        if stage is Stage.PLAN:  # it comes again once the gate has decided
            metrics = {**metrics, "next": "embed" if exists(paths.result(Stage.EVALUATE)) else "health_check"}
        result = StageResult(
            stage=stage.value, run=paths.run_id, status="done", started=now(), finished=now(), fingerprint="f", metrics=metrics
        )
        put(paths.result(stage), json.loads(result.to_json()))
    return 0


def put(uri: str, record: object) -> None:
    request("PUT", uri, json.dumps(record).encode())


def wait_for(uri: str) -> None:
    deadline = time.monotonic() + 20
    while not exists(uri) and time.monotonic() < deadline:
        time.sleep(0.02)


def exists(uri: str) -> bool:
    try:
        request("HEAD", uri)
    except urllib.error.HTTPError:
        return False
    return True


def request(method: str, uri: str, data: bytes | None = None) -> None:
    # Plain HTTP: a process of an SDK's weight for every node of every stage would make these tests slow.
    address = f"{os.environ['AWS_ENDPOINT_URL']}/{uri.removeprefix('s3://')}"
    credential = f"{os.environ['AWS_ACCESS_KEY_ID']}/20260101/{os.environ['AWS_REGION']}/s3/aws4_request"
    headers = {
        "Authorization": f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders=host, Signature=0",
        "Content-Type": "application/json",
    }
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(urllib.request.Request(address, data=data, headers=headers, method=method)).read()


if __name__ == "__main__":
    sys.exit(main())
