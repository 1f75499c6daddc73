"""Stands for the program neuron_parallel_compile, doing and printing what its documents say.

Documents: "PyTorch NeuronX neuron_parallel_compile CLI" and neuron-caching.rst of AWS Neuron SDK 2.29.1; the words of a failed
compilation follow aws-neuron-sdk issue 948 (SDK 2.19).

Variable STANDIN_TOOL, a JSON object: `trial` (false: the command is not run; what it would write down is in the cache already),
`fail` (what the compiler says of the first graph), `seconds` (that compiling takes), `silent` (no summary), `lie` (added to the
total). Graphs named MODULE_bad... fail in any case.
"""

import argparse
import json
import os
import subprocess
import sys
import time

from pipeline.runtime import store

VERSION = "neuronxcc-2.24.8799.0+6f62ff7c"
WORDS = "[NLA001]  Unhandled exception with message: tensor size must be more than 0, input1_set"


def log(who: str, text: str) -> None:
    level = "ERROR" if "Failed" in text else "INFO"
    print(f"2026-05-01 20:21:11.000895:  161136  {level} ||{who}||: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--command", default=None)
    parser.add_argument("--num_parallel", type=int, default=None)
    parser.add_argument("run", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    cache, plan = os.environ["NEURON_COMPILE_CACHE_URL"], json.loads(os.environ.get("STANDIN_TOOL", "{}"))
    log("NEURON_CACHE", f"Compile cache path: {cache}")
    if plan.get("trial", True):
        code = subprocess.run(options.run, env=os.environ | {"NEURON_EXTRACT_GRAPHS_ONLY": "1"}, check=False).returncode
        if code:
            log("NEURON_PARALLEL_COMPILE", f"Command {options.run} exited with {code}")
            return code
    time.sleep(plan.get("seconds", 0))
    folder = f"{cache}/{VERSION}"
    todo = [
        info.uri.rsplit("/", 2)[1]
        for info in store.list_objects(folder)
        if info.uri.endswith("/model.hlo_module.pb") and not store.exists(f"{info.uri.rsplit('/', 1)[0]}/model.done")
    ]
    log("NEURON_PARALLEL_COMPILE", f"master grab hlos to compile: {todo} by {options.num_parallel}")
    print("....")
    good = {module: compile_(f"{folder}/{module}", module, words(plan, module, todo)) for module in todo}
    graphs = {
        f"{folder}/{module}/model.hlo_module.pb": {"status": status, "retry": 0, "compile_time": 9.77}
        for module, status in good.items()
    }
    if not plan.get("silent"):
        start = {"start_time": 1737076372.65, "compilation_time": 195.3}
        report = {"compilation_summary": {}, "compilation_report": graphs, **start}
        log("NEURON_PARALLEL_COMPILE", json.dumps(report, indent=4))
        log("NEURON_PARALLEL_COMPILE", f"Total graphs: {len(todo) + plan.get('lie', 0)}")
        log("NEURON_PARALLEL_COMPILE", f"Total successful compilations: {sum(good.values())}")
        log("NEURON_PARALLEL_COMPILE", f"Total failed compilations: {len(good) - sum(good.values())}")
    return 0 if all(good.values()) else 1


def words(plan: dict[str, str], module: str, todo: list[str]) -> str | None:
    """What the compiler has against a graph, None if nothing."""
    if module.startswith("MODULE_bad"):
        return WORDS
    return plan.get("fail") if module == todo[0] else None


def compile_(place: str, module: str, objection: str | None) -> bool:
    if objection is None:
        print("\nCompiler status PASS")
        store.write_bytes(f"{place}/model.neff", b"neff")
        store.write_bytes(f"{place}/model.done", b"")
        return True
    command = ["neuronx-cc", "compile", "--target=trn1", f"/tmp/no-user/0cb63090/model.{module}.hlo_module.pb", "--verbose=35"]
    log("NEURON_CC_WRAPPER", f"Failed compilation with {command}: 2026-05-01T14:51:41Z {objection}")
    print("Please open a support ticket")
    store.write_bytes(f"{place}/model.log", b"ERROR 5521 [CommandDriver]: Internal details\n")
    return False


if __name__ == "__main__":
    sys.exit(main())
