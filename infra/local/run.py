"""`trnpipe local`: one execution of the synthesized state machine on this machine, from options to exit code.

Checks everything that can be checked before anything is started, then synthesizes the CDK app, starts the local endpoint on
the state folder, puts the input files into its bucket, starts the execution and shows it until it ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.local import demo
from infra.local.inputs import find_inputs
from infra.local.state_folder import check_space, check_state_folder, owned
from pipeline.allowed_uris import FILE, is_s3
from pipeline.config import MODEL_URIS, RunConfig, build_config, load_config_file, merge, nested, parse_settings
from pipeline.contract import check_run_id, registry_uri
from pipeline.errors import BadConfig, MissingInput
from pipeline.files import write_atomically
from pipeline.operate.endpoint import NO_USER_FILES, only_environment

if TYPE_CHECKING:
    from infra.local.batch import BatchRunner
    from infra.local.demo import DemoSize
    from infra.local.server import LocalEndpoint
    from infra.local.template import LocalStack
    from pipeline.contract import StageFailure
    from pipeline.operate.progress import Display, StageLine, Tracker

POLL_SECONDS = 1.0
"""Pause between two looks at the execution: each look serializes its whole history."""
SOON_SECONDS = 0.1
"""The same once a job has ended: the execution starts the next one, or ends."""
LOOKS_SOON = 5
INPUT, DEMO, DEMO_CORPUS = "data/input", "data/docstrings", "data/demo-corpus"
CORPUS = "data/corpus"
"""Folders of the bucket: training shards and corpus that the options name, and those of the demo. The demo's rows of earlier
versions, which name no package, are in another folder: a state folder that has them begins with the first weeks again."""
MAX_NODES = 8
DEPLOYMENT_CONFIG: dict[str, Any] = {"nodes": 2, "data": {"ingest_children": 2}, "embed": {"children": 2}}
"""The local deployment's own run configuration, as `config` in cdk.json is a real one's."""

GPU_FILES = ("nvidia*", "nvhost*", "dxg")
"""Device files of NVIDIA's drivers: servers and desktops, Jetson, WSL."""

ONE_NODE_KINDS = ("xla", "neuron")
"""Kinds of device that have one rank in all: their default is one node."""


def run_local(request: LocalRequest, *, plain: bool = False, program: tuple[str, ...] | None = None) -> int:
    """Run the pipeline once on this machine.

    Args:
        plain: print lines even on a terminal.
        program: replaces `trnpipe` in the jobs' commands; None: this installation.

    Returns:
        0; 67 when the gate refused; the failing stage's exit code.

    Raises:
        BadConfig: configuration that cannot work, too little disk space, or another run in the state folder; before anything
            is started.
        SystemExit: 130 or 143 after Ctrl-C or SIGTERM; jobs are ended and files are closed.
    """
    from pipeline.commands.terminal import terminable

    model = None if request.model is None or is_s3(request.model) else Path(request.model.removeprefix(FILE))
    check_space(request.state, (*request.training, *request.corpus), model)
    # From the first import on: moto asks botocore for a session, which refuses a profile that the user's files do not have.
    with terminable(), only_environment(NO_USER_FILES), owned(request.state):
        return _run(request, plain, program)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRequest:
    """The checked options of a local run.

    Attributes:
        state: folder of the bucket, the logs and everything else that is kept.
        given: the user's partial configuration.
        config: the whole configuration as far as it is known before the bucket's name is.
        training, corpus: shard files to put into the bucket.
        kept: whether a refresh goes on with the files that earlier runs were given.
        demo: whether the demo's data is used.
        model: URI of the model to continue from; None: the published one, or that of the run to resume.
        demo_size: name of the demo's size; None: remembered, or chosen by the machine's speed.
    """

    state: Path
    given: dict[str, Any]
    config: RunConfig
    training: tuple[Path, ...]
    corpus: tuple[Path, ...]
    kept: bool
    demo: bool
    model: str | None
    demo_size: str | None

    @classmethod
    def of(
        cls,
        state: Path,
        *,
        inputs: Sequence[Path] = (),
        corpus: Sequence[Path] = (),
        initial: str | None = None,
        parent: str | None = None,
        settings: Sequence[str] = (),
        config_file: Path | None = None,
        nodes: int | None = None,
        device: str | None = None,
        run: str | None = None,
        refresh: bool = False,
        demo_size: str | None = None,
    ) -> LocalRequest:
        """Check the options of the command.

        Args:
            inputs: training shards, or folders of them; without any, and without data.train in the configuration: the demo.
            corpus: corpus shards, or folders of them.
            initial: model of the first run in this state folder; None: the demo's.
            parent: model to continue from; None: what was last published in this state folder, else the initial one.
            settings: `KEY=VALUE` items, over everything else.
            config_file: partial configuration, YAML or JSON.
            nodes: of the gang; None: as configured.
            device: kind of device; None: as configured.
            run: id of an earlier run to resume.
            refresh: whether to embed with the published model instead of training one.
            demo_size: name of the demo's size; None: remembered, or chosen by the machine's speed.

        Raises:
            BadConfig: options, configuration or a state folder that cannot work.
            MissingInput: an input file does not exist.
            BadData: an input file has another form than its name says, or no row.
        """
        state = state.absolute()
        check_state_folder(state)
        from_file = load_config_file(config_file) if config_file else {}
        over = parse_settings(settings)
        if run is None:
            run = merge(from_file, over).get("run")
        # A resumed run has an input already; flags with defaults of their own could only contradict its plan.
        flags = {
            "nodes": nodes,
            "device.kind": device,
            "model.initial": initial,
            "model.parent": parent,
            "mode": "refresh" if refresh else None,
        }
        named = {key: value for key, value in flags.items() if value is not None}
        under = nested(named) if run is None else merge(_earlier_input(state, run), {"run": run})
        given = _absolute(merge(merge(from_file, under), over))
        config = build_config(DEPLOYMENT_CONFIG, given)
        if config.device.kind in ONE_NODE_KINDS and "nodes" not in given and run is None:
            given = {"nodes": 1, **given}
            config = build_config(DEPLOYMENT_CONFIG, given)
        if config.nodes > MAX_NODES:
            raise BadConfig(
                "too many nodes for one machine",
                value=f"nodes = {config.nodes}",
                rule=f"a local run has at most {MAX_NODES} nodes, each a process of its own",
            )
        if config.device.kind == "cuda" and not any(list(Path("/dev").glob(pattern)) for pattern in GPU_FILES):
            raise BadConfig(
                "this machine has no NVIDIA GPU",
                value="device.kind = cuda",
                rule="one GPU per rank",
                remedy="leave --device out: auto takes what there is; if there is a GPU, install its driver",
            )
        if demo_size and (inputs or config.data.training_uris):
            raise BadConfig(
                "the demo brings its own data",
                value=f"--demo {demo_size} and {'--input' if inputs else 'data.train'}",
                remedy="leave one of them out",
            )
        if corpus and config.data.corpus_mode != "files":
            raise BadConfig(
                "--corpus gives files, whatever their folders are",
                value=f"data.corpus_mode = {config.data.corpus_mode}",
                rule="snapshots and deltas have their order by their names, and are read where they are",
                remedy=f"--set data.corpus=[{', '.join(map(str, corpus))}] in place of --corpus",
            )
        training, model = tuple(find_inputs(inputs)), None
        kept = config.mode == "refresh" and not config.data.training_uris and (state / "bucket" / INPUT).is_dir()
        shows_demo = not training and not config.data.training_uris and not kept
        if run is None:
            # Those that jobs read where they are, which prepare would refuse as well.
            local = [uri for uri in (*config.data.training_uris, *config.data.corpus) if not is_s3(uri)]
            list(find_inputs([Path(uri.removeprefix(FILE)) for uri in local]))
            published = config.registry is not None and Path(registry_uri(str(state / "bucket"), config.registry)).is_file()
            if shows_demo and published and not (state / "bucket" / DEMO).is_dir():
                raise BadConfig(
                    "no data is named, and what is published in this state folder is not the demo's",
                    value=state,
                    rule="without data a local run is the demo, whose documents would take the place of yours",
                    remedy="name them with --config, --set data.train=[FILE] or --input; or another folder with --state",
                )
            model = config.model.parent or (None if published else config.model.initial or str(demo.initial_folder()))
        return cls(
            state=state,
            given=given,
            config=config,
            training=training,
            corpus=tuple(find_inputs(corpus)),
            kept=kept,
            demo=shows_demo,
            model=model,
            demo_size=demo_size,
        )

    def files(self) -> tuple[list[str], list[str], list[str] | None]:
        """Return local training shards and folders, those of the corpus, and the training shards that were given to earlier
        runs (None: the run has others)."""
        train, corpus = self.config.data.train, self.config.data.corpus
        earlier = sorted(map(str, (self.state / "bucket" / INPUT).glob("*"))) if self.training else []
        return (
            [*map(str, self.training), *(uri for uri in train if not is_s3(uri))],
            [*map(str, self.corpus), *(uri for uri in corpus if not is_s3(uri))],
            None if any(map(is_s3, train)) else earlier,
        )


def _earlier_input(state: Path, run: Any) -> dict[str, Any]:
    """The execution input of the run to resume, which may have ended before it had a plan.

    Raises:
        BadConfig: no run id.
        MissingInput: there is no such run in the state folder.
    """
    path = state / "bucket/runs" / check_run_id(run) / "input.json"
    if not path.is_file():
        known = sorted(path.parent.name for path in state.glob("bucket/runs/*/input.json"))
        raise MissingInput(
            "there is no such run in the state folder",
            value=run,
            rule=f"runs here: {', '.join(known[-10:]) or 'none'}",
            remedy="name one of them, or the state folder that has it with --state",
        )
    return dict(json.loads(path.read_text())["execution"])


def _run(request: LocalRequest, plain: bool, program: tuple[str, ...] | None) -> int:
    # From here on large libraries are loaded; mistakes have been answered before.
    from rich.console import Console

    from infra.local.template import local_context, read_stack, synthesize
    from pipeline.commands.terminal import note

    console = Console()
    state = request.state
    note(console, f"state folder: {state}")
    released, there = (_names(state / "bucket" / folder) for folder in (DEMO, DEMO_CORPUS))
    size = demo.choose_size(state / "demo", released, request.demo_size, partial(note, console)) if request.demo else None
    note(console, "synthesizing the CDK app" + (", reading docstrings of the installed packages" if request.demo else ""))
    context = local_context(tuple(sorted({1, 2, request.config.nodes})), DEPLOYMENT_CONFIG)
    with ThreadPoolExecutor(max_workers=1) as pool:
        # Node.js works on the templates while the demo's text is read here, where Ctrl-C interrupts it, and the engine is loaded.
        synthesis = pool.submit(synthesize, state / "cdk.out", context)
        from infra.local.batch import BatchRunner
        from infra.local.batch_nodes import THIS_INSTALLATION, BatchSettings
        from infra.local.server import load_services, local_endpoint

        load_services()
        weeks = demo.weekly_shards(state / "demo", rows=size.rows) if size else []
        stack = read_stack(synthesis.result())

    def runner(environment: dict[str, str]) -> BatchRunner:
        settings = BatchSettings(logs=state / "logs", environment=environment, program=program or THIS_INSTALLATION)
        return BatchRunner(stack.job_definitions, stack.queues, settings)

    with local_endpoint(stack, state, runner) as endpoint:
        training, demo_corpus = list(request.training), list[Path]()
        if request.demo:
            documents = [state / "demo" / demo.CORPUS / week.name for week in weeks]
            refresh = request.config.mode == "refresh"
            training = [] if refresh else demo.next_weeks(weeks, released)
            demo_corpus = demo.next_weeks(documents, there) if refresh else documents[: len(released) + len(training)]
        _put_files(endpoint, stack, state, training, DEMO if request.demo else INPUT)
        _put_files(endpoint, stack, state, demo_corpus, DEMO_CORPUS)
        _put_files(endpoint, stack, state, request.corpus, CORPUS)
        execution_input = _execution_input(request, stack, size)
        # Once more, with everything: what prepare would find only after the start.
        build_config(DEPLOYMENT_CONFIG, execution_input)
        return _execute(request, stack, endpoint, execution_input, console, plain)


def _execute(
    request: LocalRequest,
    stack: LocalStack,
    endpoint: LocalEndpoint,
    execution_input: Mapping[str, Any],
    console: Any,
    plain: bool,
) -> int:
    """Start the execution, show it until it ends, and print its outcome."""
    from pipeline.commands.terminal import note
    from pipeline.operate.outcome import conclude
    from pipeline.operate.progress import LiveDisplay, PlainDisplay, Tracker
    from pipeline.operate.run_files import LocalFiles

    started = datetime.now(timezone.utc)
    name = f"{'demo' if request.demo else 'local'}-{started:%Y%m%d-%H%M%S}"
    run_id = request.config.run or name
    tracker = Tracker(LocalFiles(request.state / "bucket/runs" / run_id))
    client = endpoint.client("stepfunctions")
    arn = client.start_execution(stateMachineArn=stack.state_machine_arn, name=name, input=json.dumps(execution_input))[
        "executionArn"
    ]
    note(console, f"run {run_id}: {endpoint.url}, logs in {request.state / 'logs'}")
    display: Display = LiveDisplay(console) if console.is_terminal and not plain else PlainDisplay(console)
    try:
        with display:
            execution = _watch(client, arn, tracker, display, endpoint.batch)
    except (KeyboardInterrupt, SystemExit):
        note(console, f"stopping run {run_id}; resume it with --run {run_id}")
        client.stop_execution(executionArn=arn, cause="stopped at the terminal")
        raise
    return conclude(console, execution, tracker, started, partial(_logs, endpoint.batch))


def _watch(client: Any, arn: str, tracker: Tracker, display: Display, runner: BatchRunner) -> dict[str, Any]:
    """Show the execution until it has ended; DescribeExecution's last answer."""
    soon = 0
    while True:
        execution: dict[str, Any] = client.describe_execution(executionArn=arn)
        tracker.update(client.get_execution_history(executionArn=arn)["events"])
        if (line := tracker.running) and line.jobs:
            [job] = runner.describe({"jobs": line.jobs[-1:]})["jobs"]
            tracker.take_job(job, datetime.now(timezone.utc))
        display.show(tracker)
        if execution["status"] != "RUNNING":
            return execution
        soon = LOOKS_SOON if runner.pause(SOON_SECONDS if soon else POLL_SECONDS) else max(0, soon - 1)


def _logs(runner: BatchRunner, line: StageLine, failure: StageFailure | None) -> Iterator[str]:
    """Log files of the failed stage's last attempts: the node that failed first, the main node's where that is unknown."""
    for job in [job for job in runner.jobs() if job.id in line.jobs[-1:]]:
        for one in [one for one in job.children or [job] if one.status == "FAILED" and one.attempts]:
            node = failure.node if failure and failure.node < len(one.definition.containers) else one.definition.main_node
            attempt = failure.attempt if failure and 0 < failure.attempt <= len(one.attempts) else len(one.attempts)
            yield str(runner.settings.logs / one.log_stream(attempt, node))


def _execution_input(request: LocalRequest, stack: LocalStack, size: DemoSize | None) -> dict[str, Any]:
    """The input of the execution: the user's configuration over the values that a local run fills in."""
    if request.config.run is not None:
        return request.given
    root, data = f"s3://{stack.bucket}", request.config.data
    filled = merge(size.config, demo.two_tasks(f"{root}/{DEMO}/", f"{root}/{DEMO_CORPUS}/")) if size else {}
    if request.model is not None and request.config.model.parent is None:
        filled = merge(filled, {"model": {"initial": request.model}})
    there = request.kept and (request.state / "bucket" / CORPUS).is_dir()
    # Options add to what the configuration names.
    named = {
        **({"train": [*data.train, f"{root}/{INPUT}/"]} if request.training or request.kept else {}),
        **({"corpus": [*data.corpus, f"{root}/{CORPUS}/"]} if request.corpus or there else {}),
    }
    return merge(merge(filled, request.given), {"data": named} if named else {})


def _put_files(endpoint: LocalEndpoint, stack: LocalStack, state: Path, files: Sequence[Path], folder: str) -> None:
    """Put shards into the bucket. The digest in its name makes a file that is given again the same shard."""
    from pipeline.operate.run_files import TYPED_PATHS, json_object
    from pipeline.store import sha256_file

    client = endpoint.client("s3")
    present = _names(endpoint.mirror_folder / folder)
    typed = json_object((state / TYPED_PATHS).read_bytes() if (state / TYPED_PATHS).is_file() else None)
    for path in files:
        name = path.name if folder in (DEMO, DEMO_CORPUS) else f"{sha256_file(path)[:12]}-{path.name}"
        if name not in present:
            client.upload_file(str(path), stack.bucket, f"{folder}/{name}")
        typed[f"s3://{stack.bucket}/{folder}/{name}"] = str(path)
    write_atomically(state / TYPED_PATHS, json.dumps(typed, indent=2).encode())


def _absolute(given: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with local paths made absolute, as job processes have working folders of their own, and the demo's model
    by its folder."""
    changed: dict[str, Any] = {}
    for section, keys in (
        ("model", MODEL_URIS),
        ("data", ("train", "holdout", "corpus", "delete", "tasks")),
        ("evaluate", ("sets",)),
    ):
        values = given.get(section)
        if isinstance(values, Mapping):
            # `demo` is a model, and no file of data.
            named = demo.named_model if section == "model" else str
            changed[section] = {key: _absolute_paths(values[key], named) for key in keys if key in values}
    return merge(given, changed)


def _absolute_paths(value: Any, named: Callable[[str], str]) -> Any:
    """
    Args:
        named: the path that a name stands for.
    """
    if isinstance(value, list):
        return [_absolute_paths(item, named) for item in value]
    if isinstance(value, Mapping):  # a golden set, or files of tasks
        return {key: item if key in ("name", "columns") else _absolute_paths(item, named) for key, item in value.items()}
    return str(Path(named(value)).expanduser().absolute()) if isinstance(value, str) and "://" not in value else value


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
