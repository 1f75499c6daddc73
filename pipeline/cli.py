"""The `trnpipe` command: parses options, calls, prints, maps errors to exit codes; nothing else.

Every command imports its modules when it runs, so that help and errors in options appear at once. Only this module of `pipeline`
imports `infra`: the local run drives the deployment's own state machine, and doctor compares with its templates.
"""

from __future__ import annotations

import atexit
import gc
import json
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from pipeline.cli_registry import DEFAULT_STATE, BucketOption, StateOption, registry_app
from pipeline.contract import Stage
from pipeline.errors import ExitCode, TrnpipeError, plain

DEFAULT_STACK = "trnpipe"
CLICK_USAGE_ERROR = 2

app = typer.Typer(
    name="trnpipe",
    help="Retrain a text encoder every week on AWS Trainium and publish fresh embeddings; on one machine with `trnpipe local`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
config_app = typer.Typer(no_args_is_help=True, help="The run's configuration: its schema, and checking a file against it.")
app.add_typer(config_app, name="config")
app.add_typer(registry_app, name="registry")

StackOption = Annotated[str, typer.Option("--stack", help="The deployment: name of its pipeline stack, `name` in cdk.json.")]
LocalOption = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="Instead of a deployment: the local run in progress in this state folder."),
]
LinesOption = Annotated[bool, typer.Option("--plain", help="Print plain lines even on a terminal.")]
ContextOption = Annotated[
    list[str] | None, typer.Option("--context", "-c", metavar="KEY=VALUE", help="As after `cdk deploy -c`; repeat for more.")
]
EnvironmentOption = Annotated[str | None, typer.Option("--env", help="Settings of an environment, as `cdk deploy -c env=NAME`.")]
RefreshOption = Annotated[
    bool, typer.Option("--refresh", help="Train nothing: embed what has changed in the corpus with the published model.")
]


@app.command()
def local(
    input_files: Annotated[
        list[Path] | None,
        typer.Option("--input", metavar="FILE", help="Training shard (JSONL, CSV, TSV, Parquet) or folder; repeat for more."),
    ] = None,
    corpus: Annotated[
        list[Path] | None,
        typer.Option("--corpus", metavar="FILE", help="Corpus shard or folder to embed; without it the documents of the input."),
    ] = None,
    initial: Annotated[
        str | None, typer.Option("--initial", help="Model of the first run; later runs continue from the published model.")
    ] = None,
    parent: Annotated[
        str | None, typer.Option("--parent", help="Model that this run continues from, instead of the published one.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting, e.g. train.steps=200; repeat for more.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML or JSON file with part of the configuration.")] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Nodes of the gang, each a process of its own here (2; on xla 1).")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Device type: auto, cpu, cuda, xla (torch-xla on this CPU) or neuron (auto)."),
    ] = None,
    demo: Annotated[
        Literal["S", "M", "L"] | None,
        typer.Option("--demo", case_sensitive=False, help="Size of the demo; by default what suits this machine's speed."),
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="Id of an earlier run to resume.")] = None,
    refresh: RefreshOption = False,
    state: StateOption = DEFAULT_STATE,
    plain: Annotated[bool, typer.Option("--plain", help="Print plain lines even on a terminal.")] = False,
) -> None:
    """Run the whole weekly pipeline on this machine: the state machine that `cdk deploy` creates, with local processes.

    Without --input it runs the demo: real docstrings of the installed Python packages, continued from all-MiniLM-L6-v2. Each
    demo run releases the next weekly shard, and each --refresh the documents of the next week.
    """
    from infra.local.run import LocalRequest, run_local
    from pipeline.model.inventory import check_local_model

    request = LocalRequest.of(
        state,
        inputs=input_files or (),
        corpus=corpus or (),
        initial=initial,
        parent=parent,
        settings=settings or (),
        config_file=config,
        nodes=nodes,
        device=device,
        demo_size=demo,
        run=run,
        refresh=refresh,
    )
    if request.model is not None:
        check_local_model(request.model, request.config.model.base)
    if request.config.run is None and not request.demo and not refresh:
        from pipeline.commands.first_rows import check_first_rows

        check_first_rows(request.config, *request.files())
    raise typer.Exit(run_local(request, plain=plain))


@app.command()
def init(
    input_files: Annotated[
        list[Path], typer.Option("--input", metavar="FILE", help="Training shard or folder of them; repeat for more.")
    ],
    corpus: Annotated[
        list[Path] | None, typer.Option("--corpus", metavar="FILE", help="Corpus shard or folder to embed.")
    ] = None,
    parent: Annotated[
        str, typer.Option("--parent", metavar="MODEL", help="Model of the first run: its folder, or demo for all-MiniLM-L6-v2.")
    ] = "demo",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A column, e.g. data.columns.document=body; repeat.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The configuration file to write.")] = Path("run.yaml"),
) -> None:
    """Look at training files and write a configuration with the settings that matter, each with the reason for its value."""
    from infra.local.demo import named_model
    from infra.local.inputs import find_inputs
    from pipeline.commands import init as first
    from pipeline.config import parse_settings

    list(find_inputs([*input_files, *(corpus or ())]))
    columns = first.columns_of(parse_settings(settings or []))
    inputs, corpora = [str(path) for path in input_files], [str(path) for path in corpus or ()]
    model = first.read_model(parent, named_model(parent))
    data = first.read_data(inputs, columns, model)
    first.write_config(out, first.choose(data, model, inputs, corpora), data)
    for name, text in first.describe(data, model):
        typer.echo(f"{name:<11}{plain(text)}")
    typer.echo(f"wrote {out}; go on with:\n  trnpipe config check {out} --read\n  trnpipe local --config {out}")


@app.command()
def start(
    file: Annotated[Path | None, typer.Argument(help="YAML or JSON file: part of the configuration.", metavar="[FILE]")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting, e.g. train.epochs=2; repeat for more.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="Id of an earlier run to resume.")] = None,
    share: Annotated[str | None, typer.Option("--share", help="Fair-share identifier of its jobs, e.g. experiments.")] = None,
    wait_lock: Annotated[
        int | None,
        typer.Option("--wait-lock", metavar="MINUTES", min=0, help="How long to wait for a run that holds the registry name."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the execution, and so the new run's id.")] = None,
    refresh: RefreshOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show the run until it ends, and end with its exit code.")] = False,
    lines: LinesOption = False,
    stack: StackOption = DEFAULT_STACK,
    state: LocalOption = None,
) -> None:
    """Start a run of a deployment, after a check of its configuration."""
    from pipeline.operate.start import execution_input

    given = execution_input(file, settings or (), run=run, share=share, wait_lock=wait_lock, name=name, refresh=refresh)
    from rich.console import Console

    from pipeline.operate import start as starting
    from pipeline.operate import watch as watching
    from pipeline.operate.deployment import open_site

    with open_site(stack, state) as site:
        execution = starting.start(site, given, name)
        if watch:
            raise typer.Exit(watching.watch(site, execution, Console(), lines=lines))
        typer.echo(f"run {execution.run} started as execution {execution.name}")
        if link := site.console_link(execution.arn):
            typer.echo(link)
        typer.echo(f"follow it with: trnpipe watch {execution.name} {site.option}")


@app.command()
def watch(
    wanted: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A run or an execution; by default the newest in progress.")
    ] = None,
    lines: LinesOption = False,
    stack: StackOption = DEFAULT_STACK,
    state: LocalOption = None,
) -> None:
    """Show a run until it ends.

    Ends with the run's exit code: 0, 67 (the gate refused), the failed stage's, or 130 (stopped). Ctrl-C does not stop the run.
    """
    from rich.console import Console

    from pipeline.operate.deployment import open_site
    from pipeline.operate.executions import find
    from pipeline.operate.watch import watch as follow

    with open_site(stack, state) as site:
        raise typer.Exit(follow(site, find(site, wanted), Console(), lines=lines))


@app.command()
def stop(
    wanted: Annotated[str, typer.Argument(metavar="ID", help="A run or an execution.")],
    reason: Annotated[
        str, typer.Option("--reason", help="Reason to record with the execution and its jobs.")
    ] = "stopped by an operator",
    stack: StackOption = DEFAULT_STACK,
    state: LocalOption = None,
) -> None:
    """Stop a run: its execution and all its Batch jobs; waits until none of them runs."""
    from rich.console import Console

    from pipeline.operate.deployment import open_site
    from pipeline.operate.executions import find
    from pipeline.operate.stop import stop as end

    with open_site(stack, state) as site:
        end(site, find(site, wanted), reason, Console())


@app.command()
def runs(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    stack: StackOption = DEFAULT_STACK,
    state: Annotated[
        Path | None,
        typer.Option("--state", metavar="DIR", help="Instead of a deployment's runs: those of a state folder, ended ones too."),
    ] = None,
) -> None:
    """List the newest runs: start, duration, outcome, quality of baseline and new model, the replaced model."""
    from pipeline.operate import runs as listing

    found = listing.runs(stack, state, limit)
    if as_json:
        typer.echo(listing.as_json(found))
    else:
        from pipeline.commands.terminal import print_table

        print_table(listing.table(found))


@app.command()
def stage(
    name: Annotated[Stage, typer.Argument(help="Which stage.")],
    run: Annotated[str, typer.Option("--run", help="URI of the run folder, s3://BUCKET/runs/RUN_ID.")],
) -> None:
    """Run one stage on this node, as every container does: start and supervise the node's ranks."""
    from pipeline.host.supervisor import run as supervise

    raise typer.Exit(supervise(name, run))


@app.command()
def search(
    query: Annotated[str, typer.Argument(help="Text to search for; - reads queries from standard input, one per line.")],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many documents.")] = 5,
    locale: Annotated[str | None, typer.Option("--locale", help="Only documents of this locale.")] = None,
    registry: Annotated[str, typer.Option("--registry", help="Name under which the embeddings were published.")] = "current",
    bucket: BucketOption = None,
    state: StateOption = DEFAULT_STATE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per hit.")] = False,
) -> None:
    """Search the published embeddings."""
    from rich.console import Console

    from pipeline.commands import search as searching

    several = query == "-"
    given = [searching.check_query(query)] if not several else (line.decode(errors="replace") for line in sys.stdin.buffer)
    with Console(stderr=True).status("opening the embeddings"):
        find = searching.open_search(bucket=bucket, state=state, registry=registry, locale=locale)
    console, text = Console(), ""
    for text in filter(str.strip, given):
        searching.show(find(text.strip(), count), console, heading=several, as_json=as_json)
    searching.check_query(text)


@app.command()
def tune(
    run: Annotated[str, typer.Argument(help="A planned run: its id, or the URI of its folder.")],
    steps: Annotated[int, typer.Option("--steps", min=4, help="Optimizer steps of each variant.")] = 20,
    vary: Annotated[
        list[str] | None,
        typer.Option("--vary", metavar="KEY=V1,V2,...", help="Values to try instead of the usual ones; repeat for more keys."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=0, help="Most variants to try, the run's own settings aside.")
    ] = None,
    objective: Annotated[
        Literal["samples_per_second", "compile_seconds", "host_memory_bytes"],
        typer.Option("--objective", help="What a variant must improve."),
    ] = "samples_per_second",
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="How much higher the loss on the same batches may be, as a share.")
    ] = 0.02,
    gain: Annotated[float, typer.Option("--gain", min=0, help="Share by which a value must be better to win.")] = 0.02,
    timeout: Annotated[float, typer.Option("--timeout", min=0.01, help="Time limit of a variant's stage, in minutes.")] = 120.0,
    out: Annotated[Path | None, typer.Option("--out", help="YAML file for the best settings, as --config takes it.")] = None,
    bucket: BucketOption = None,
    state: StateOption = DEFAULT_STATE,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole table as JSON.")] = False,
) -> None:
    """Find the fastest settings of device, compiler and batch by short runs of the real stages on this machine.

    Every variant trains a few steps on the run's own rows. The run keeps the table: the same command runs the variants that are
    missing in it.
    """
    from rich.console import Console

    from pipeline.commands import tune as tuning
    from pipeline.commands.terminal import terminable

    console = Console(stderr=as_json)
    with terminable():
        table, best = tuning.search(
            run,
            console,
            bucket=bucket,
            state=state,
            steps=steps,
            vary=vary or (),
            limit=limit,
            objective=objective,
            tolerance=tolerance,
            gain=gain,
            timeout_minutes=timeout,
        )
    tuning.show(table, best, console, objective=objective, tolerance=tolerance, out=out, as_json=as_json)


@app.command()
def parity(
    a: Annotated[str, typer.Argument(help="Run id, or URI of a run folder: the reference.", metavar="A")],
    b: Annotated[str, typer.Argument(help="The run to compare with it.", metavar="B")],
    metric: Annotated[
        str | None, typer.Option("--metric", help="Metric of the verdict (default: ndcg@10, or accuracy); all are shown.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, help="Largest absolute difference to tolerate; 0.001 = 0.1 %.")
    ] = 0.001,
    bucket: BucketOption = None,
    state: StateOption = DEFAULT_STATE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two runs' evaluations step by step, e.g. one on Trainium with one on GPUs: is the quality the same?

    Both runs need the same parent, rows, hold-out, global batch and settings. Ends with 0 (within, or within noise) or 67.
    """
    from rich.console import Console

    from pipeline.commands.parity import compare_runs

    found = compare_runs(a, b, metric=metric, tolerance=tolerance, bucket=bucket, state=state)
    if as_json:
        typer.echo(found.to_json())
    else:
        found.print(Console())
    raise typer.Exit(int(found.exit_code))


@app.command()
def plan(
    parent: Annotated[
        str | None, typer.Option("--parent", help="Model to continue from: folder or URI; only its configuration is read.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="URI of a planned run's folder, instead of --parent.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML or JSON file with part of the configuration.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One setting, e.g. train.batch_size=64; repeat for more."),
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of the gang.")] = None,
    train_rows: Annotated[
        int | None, typer.Option("--train-rows", min=1, help="Pairs to train on; adds hosts, hours and dollars.")
    ] = None,
    corpus_rows: Annotated[int | None, typer.Option("--corpus-rows", min=1, help="Documents to embed; adds the same.")] = None,
    query_tokens: Annotated[float | None, typer.Option("--query-tokens", min=1, help="Mean length of a query.")] = None,
    document_tokens: Annotated[float | None, typer.Option("--document-tokens", min=1, help="Mean length of a document.")] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", metavar="TIME", help="For train and embed together: 90m, 12h, 2d.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate the memory that a run needs on each device and each host, without starting anything.

    With rows or a deadline also the hours of train and embed on various numbers of trn1 and inf2 hosts, their cost, the cheapest
    choice, and what would break first at that size. Ends with 64 and a change that helps if the plan cannot fit; prepare refuses
    the same plans.
    """
    from pipeline.allowed_uris import is_s3
    from pipeline.config import load_config_file, parse_settings
    from pipeline.contract import check_run_folder
    from pipeline.model.inventory import local_model

    layers = [load_config_file(config) if config else {}, parse_settings(settings or []), {"nodes": nodes} if nodes else {}]
    if run:
        check_run_folder(run)
    if parent and not is_s3(parent):
        local_model(parent)
    # Errors in options appear at once: large libraries are loaded only here.
    from rich.console import Console

    from pipeline.commands.planning import parse_hours, report

    found = report(
        parent=parent,
        run=run,
        layers=layers,
        train_rows=train_rows,
        corpus_rows=corpus_rows,
        query_tokens=query_tokens,
        document_tokens=document_tokens,
        deadline_hours=parse_hours(deadline) if deadline else None,
    )
    if as_json:
        typer.echo(json.dumps(found.record(), indent=2))
    else:
        Console().print(found.table())
        if found.estimate:
            Console().print(found.estimate.shown())
    found.require()
    if not as_json:
        typer.echo(found.verdict())


@app.command()
def doctor(
    context: ContextOption = None,
    env: EnvironmentOption = None,
    after: Annotated[bool, typer.Option("--after", help="Check the deployed resources, too.")] = False,
    policy: Annotated[bool, typer.Option("--policy", help="Print the IAM policy that doctor needs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check an AWS account against the deployment's settings, with a remedy for each problem. Only reads.

    Ends with 0 without a problem, with 64 if a setting or the account is wrong, with 75 if AWS did not answer.
    """
    from infra.doctor.command import print_policy, run_doctor

    if policy:
        print_policy()
        return
    raise typer.Exit(run_doctor(context or (), env, after=after, as_json=as_json))


@app.command()
def images(
    kinds: Annotated[str, typer.Option("--kinds", help="Which images: some of cpu, cuda and neuron.")] = "cpu,neuron",
    tag: Annotated[str | None, typer.Option("--tag", help="Their tag; by default `images.tag` of cdk.json.")] = None,
    stack: StackOption = DEFAULT_STACK,
) -> None:
    """Build the container images with CodeBuild in the account and push them: no Docker is needed here.

    Prints each phase of the build and at the end the settings that name the images, as YAML. Ends with 64 and the end of the log
    if the build fails. The data stack must be deployed.
    """
    from infra.cdk_context import CDK_JSON, CONTEXT_KEY, read_context
    from pipeline.operate.image_build import build_images

    tag = tag or read_context()[CONTEXT_KEY]["images"]["tag"]
    typer.echo(build_images(stack, kinds.split(","), tag, CDK_JSON.parent), nl=False)


@app.command()
def ami(
    copy: Annotated[str | None, typer.Option("--copy", metavar="AMI_ID", help="Copy this one into the account.")] = None,
    context: ContextOption = None,
    env: EnvironmentOption = None,
) -> None:
    """List Amazon's AMIs that should hold Neuron driver 2.27, the oldest first; changes nothing without --copy.

    With --copy it copies one, tags the copy with the presumed driver, which health_check confirms on the first host, writes the
    SSM parameter of the setting `ami`, and prints the setting. Ends with 66 if the region has no such AMI.
    """
    from infra.cdk_context import read_settings
    from infra.doctor.blueprint import chosen_context
    from infra.settings import AMI_PARAMETER, DEFAULT_AMI_PARAMETER
    from pipeline.operate import neuron_ami
    from pipeline.operate.deployment import Site

    settings = read_settings(chosen_context(context or (), env))
    site = Site("", region=settings.region)
    if copy is None:
        for image in neuron_ami.find_amis(site):
            typer.echo(f"{image['ImageId']}  {image['CreationDate'][:10]}  {image['Name']}")
        return
    named = AMI_PARAMETER.fullmatch(settings.ami or "")
    typer.echo(f"ami: {neuron_ami.copy_ami(site, copy, named['name'] if named else DEFAULT_AMI_PARAMETER)}")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of the configuration."""
    from pipeline.config import RunConfig

    typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))


@config_app.command("check")
def config_check(
    file: Annotated[Path, typer.Argument(help="YAML or JSON file.")],
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Settings laid over the file.")] = None,
    bucket: Annotated[str | None, typer.Option("--bucket", help="s3://BUCKET of the deployment, to check URIs against.")] = None,
    readable: Annotated[
        list[str] | None,
        typer.Option("--readable", metavar="URI", help="A folder of the deployment's setting `read`; repeat for more."),
    ] = None,
    read: Annotated[bool, typer.Option("--read", help="Read the first rows of its files, too.")] = False,
) -> None:
    """Check a configuration file; prints the whole resolved configuration.

    With --bucket it also checks that a run of that deployment may read every URI; without it, it lists what each URI needs.
    With --read it refuses files whose first rows a run would refuse.
    """
    from pipeline.allowed_uris import AllowedUris, is_s3
    from pipeline.config import build_config, load_config_file, parse_settings

    config = build_config(load_config_file(file), parse_settings(settings or []))
    if bucket:
        own, *others = (f"{bucket.rstrip('/')}/{folder}" for folder in ("data", "runs", "graphs"))
        AllowedUris(own=own, read=(*others, *(readable or ()))).check(config.uris())
    if read:
        from pipeline.commands.first_rows import check_first_rows

        check_first_rows(config, config.data.train, config.data.corpus)
    typer.echo(config.model_dump_json(indent=2))
    for key, uri in () if bucket else config.uris():
        needs = "the deployment's bucket, or its setting `read`" if is_s3(uri) else "a local run"
        typer.echo(f"note: {key}: {uri} needs {needs}", err=True)


@registry_app.command("rollback")
def registry_rollback(
    run: Annotated[str, typer.Argument(help="Id of an earlier run, whose model is published again.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting of the refresh; repeat for more.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML or JSON file with part of the configuration: the data, with --state.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show the refresh until it ends, and end with its exit code.")] = False,
    lines: LinesOption = False,
    stack: StackOption = DEFAULT_STACK,
    state: LocalOption = None,
) -> None:
    """Go back to an earlier model: refresh the embeddings with it, publish both together, and hold newer models.

    What later runs were trained on is new again to the next one.
    """
    chosen = [*(settings or ()), f"rollback={json.dumps(run)}"]
    if state is None:
        start(config, settings=chosen, refresh=True, watch=watch, lines=lines, stack=stack)
    else:
        local(settings=chosen, config=config, refresh=True, state=state, plain=lines)


def main() -> NoReturn:
    """Entry point: expected failures become four plain lines and their exit code."""
    # At exit Python collects garbage twice among the many objects of large libraries, which end anyway.
    atexit.register(gc.freeze)
    try:
        app()
    except TrnpipeError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(int(error.exit_code))
    except BrokenPipeError:
        sys.exit(int(ExitCode.DONE))
    except SystemExit as end:
        # Click ends with 2 after a wrong command line; here that is a bad configuration.
        sys.exit(int(ExitCode.BAD_CONFIG) if end.code == CLICK_USAGE_ERROR else end.code)
    sys.exit(int(ExitCode.DONE))


if __name__ == "__main__":
    main()
