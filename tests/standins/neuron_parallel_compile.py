"""Stands for the program neuron_parallel_compile, doing and printing what its documents say.

Documents: "PyTorch NeuronX neuron_parallel_compile CLI" and neuron-caching.rst of AWS Neuron SDK 2.29.1; the words of a failed
compilation follow aws-neuron-sdk issue 948 (SDK 2.19). As the program itself does (package torch-neuronx,
torch_neuronx/parallel_compile/neuron_parallel_compile.py), it compiles the graphs that the trial's log calls extracted, whatever
else is in the cache, passes over those that are done or locked, and ends without a summary where the log calls none extracted.
`--command collect` ends after the trial; `--command compile` does not run it and takes all graphs of the cache without a result.
On a host without a device the compiler knows no target of its own (github.com/huggingface/optimum-neuron/pull/961).

Variable STANDIN_TOOL, a JSON object: `trial` (false: the command is not run; it would meet all that is in the cache), `fail`
(what the compiler says of the first graph), `load` (see torch_neuronx/xla.py), `seconds` (that compiling takes), `silent` (no
summary), `lie` (added to the total). Graphs named MODULE_bad... fail in any case. STANDIN_NO_DEVICE: the host has none.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time

from pipeline import store

EXTRACTED = re.compile(r"Extracting graphs \((\S+)/model\.hlo_module\.pb\)")
VERSION = "neuronxcc-2.24.8799.0+6f62ff7c"
NOTHING = "No todo hlos found in cache or hlo_tasklist, parallel_compile return before spawning workers...."
WORDS = "[NLA001]  Unhandled exception with message: tensor size must be more than 0, input1_set"


def log(who: str, text: str) -> None:
    level = "ERROR" if "Failed" in text else "INFO"
    print(f"2026-05-01 20:21:11.000895:  161136  {level} ||{who}||: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--command", default=None, choices=("collect", "compile"))
    parser.add_argument("--num_parallel", type=int, default=None)
    parser.add_argument("run", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    cache, plan = os.environ["NEURON_COMPILE_CACHE_URL"], json.loads(os.environ.get("STANDIN_TOOL", "{}"))
    log("NEURON_CACHE", f"Compile cache path: {cache}")
    folder = f"{cache}/{VERSION}"
    if options.command == "compile":
        if "STANDIN_NO_DEVICE" in os.environ and "NEURON_PLATFORM_TARGET_OVERRIDE" not in os.environ:
            log("NEURON_PARALLEL_COMPILE", "Failed: supply compiler argument target, with one of options trn1, inf2, trn1n")
            return 1
        lines = left_by_a_trial(folder)
    elif plan.get("trial", True):
        code, lines = run_trial(options.run)
        if code:
            log("NEURON_PARALLEL_COMPILE", f"Command {options.run} exited with {code}")
            return code
    else:
        lines = left_by_a_trial(folder)
        for line in lines:
            log("NEURON_CC_WRAPPER", line)
    if options.command == "collect":
        return 0
    time.sleep(plan.get("seconds", 0))
    extracted = sorted({found.group(1).rsplit("/", 1)[1] for line in lines if (found := EXTRACTED.search(line))})
    if not extracted:
        log("NEURON_PARALLEL_COMPILE", NOTHING)
        return 0
    files = {info.uri for info in store.list_objects(folder)}
    taken = ("model.done", "model.hlo_module.pb.lock")
    todo = [module for module in extracted if not any(f"{folder}/{module}/{name}" in files for name in taken)]
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


def run_trial(command: list[str]) -> tuple[int, list[str]]:
    """Its exit status and output, which is passed on line by line."""
    lines = []
    environment = os.environ | {"NEURON_EXTRACT_GRAPHS_ONLY": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, lines


def left_by_a_trial(folder: str) -> list[str]:
    """What a trial would say that met every graph in the cache."""
    uris = [info.uri for info in store.list_objects(folder)]
    places = sorted({uri.rsplit("/", 1)[0] for uri in uris})
    return [
        f"Using a cached neff at {place}/model.neff"
        if f"{place}/model.done" in uris
        else f"Extracting graphs ({place}/model.hlo_module.pb) for ahead-of-time parallel compilation. No compilation was done."
        for place in places
    ]


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
