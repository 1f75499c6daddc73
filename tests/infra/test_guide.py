"""README.md, CONTRIBUTING.md and docs/: every command, link, file and setting in them exists, every configuration is valid, and
every alarm has its section."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache
from itertools import pairwise, takewhile
from pathlib import Path
from string import Template
from typing import Any

import botocore.session
import pytest
import typer
import yaml
from botocore import xform_name
from botocore.exceptions import UnknownServiceError
from pydantic import BaseModel
from typer.exceptions import TyperException

from docs import configuration
from infra import runbook
from infra.app import CDK
from infra.cdk_context import read_context, read_settings
from infra.doctor import check_deployed
from infra.local.demo import Pair
from infra.setting_sections import Schedule
from infra.settings import Settings
from pipeline.cli import app
from pipeline.config import RunConfig, RunInput, build_config, merge, parse_settings
from pipeline.errors import BadConfig
from tests.pipeline.read_rows import TrainingRow, read_training_rows

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / "infra" / "environments"
PAGES = {
    path: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
}
RUNBOOK = PAGES[ROOT / runbook.GUIDE]
DEPLOY = PAGES[ROOT / "docs/deploy.md"]
GPUS = PAGES[ROOT / "docs/gpus.md"]
GUIDES = DEPLOY + RUNBOOK


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def blocks(text: str, *languages: str) -> Iterator[str]:
    """The fenced blocks in one of the languages, without the indentation of a list."""
    for indentation, language, block in re.findall(r"^( *)```([^\n]*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE):
        if language in languages:
            yield re.sub(f"^{indentation}", "", block, flags=re.MULTILINE)


LANGUAGES = ("bash", "console", "json", "mermaid", "python", "yaml", "")
"""Of fenced blocks, each with its test; one without a language is output."""

LONGEST_README = 1800
"""Words. What is longer belongs into docs/."""

SYSTEM_PROGRAMS = ("sudo", "git", "curl", "tar", "modinfo", "head", "hf", "ls", "xargs", "psql", "neuron-profile")
"""Programs of the host; the tests do not know their options."""

CLI_COMMANDS: dict[tuple[str, str], set[str]] = {
    ("s3", "cp"): {"--recursive"},
    ("ecr", "get-login-password"): set(),
    ("logs", "tail"): {"--since", "--filter-pattern", "--follow"},
}
"""Commands of the AWS CLI that are no operations of a service, with the options that the guide uses."""

CLI_OPTIONS = {"--query", "--output", "--region", "--profile"}
CDK_OPTIONS = {
    "bootstrap": {"--qualifier"},
    "deploy": {"--all", "-c"},
    "diff": {"--all", "-c"},
    "destroy": {"-c"},
    "import": set[str](),
}
DOCKER = {"login": {"--username", "--password-stdin"}, "tag": set[str](), "push": set[str]()}


NAME_ALONE = re.compile(r"trnpipe (\w+)")
"""A command that a sentence speaks of, without the arguments that it takes."""


def commands() -> Iterator[str]:
    """Every command of the fenced blocks, also those inside $( ) and behind a pipe, and inline ones with their arguments."""
    typed: list[str] = []
    for text in PAGES.values():
        typed += [line for block in blocks(text, "bash") for line in joined_lines(block)]
        typed += [line[2:] for block in blocks(text, "console") for line in joined_lines(block) if line.startswith("$ ")]
        inline = re.findall(r"`((?:\w+=\S+ )*(?:aws|trnpipe|npx|make|python|pytest) [^`]+)`", prose(text).replace("\n", " "))
        typed += [line for line in inline if not NAME_ALONE.fullmatch(line)]
    for line in typed:
        inner = re.findall(r"^\w+=\$\((.*)\)$", line)
        yield from (part.strip() for part in re.split(r"\s\|\s", inner[0] if inner else line))


def joined_lines(block: str) -> list[str]:
    """The lines of a block, those that a backslash continues as one."""
    return [line for line in re.sub(r"\\\n", "", block).splitlines() if line.strip()]


COMMANDS = sorted(set(commands()))


@lru_cache
def service(name: str) -> Any:
    return botocore.session.get_session().get_service_model(name)


def check_aws(words: list[str]) -> None:
    name, command, *rest = words
    if (name, command) in CLI_COMMANDS:
        allowed = CLI_COMMANDS[name, command] | CLI_OPTIONS
    else:
        try:
            model = service({"s3api": "s3"}.get(name, name))
        except UnknownServiceError as error:
            raise AssertionError(f"no service {name}") from error
        if command == "wait":
            waiters = botocore.session.get_session().get_waiter_model(name)
            waiter = {xform_name(each, "-"): each for each in waiters.waiter_names}
            command, *rest = rest
            assert command in waiter, f"aws {name} wait {command}"
            operation = model.operation_model(waiters.get_waiter(waiter[command]).operation)
        else:
            operations = {xform_name(each, "-"): each for each in model.operation_names}
            assert command in operations, f"aws {name} {command}"
            operation = model.operation_model(operations[command])
        members = operation.input_shape.members
        options = {f"--{xform_name(each, '-')}" for each in members}
        options |= {f"--no-{xform_name(each, '-')}" for each, shape in members.items() if shape.type_name == "boolean"}
        allowed = options | CLI_OPTIONS | ({"--max-results"} & options)
        required = {f"--{xform_name(each, '-')}" for each in operation.input_shape.required_members}
        given = {re.sub("^--no-", "--", word) for word in rest}
        assert required <= given, f"aws {name} {command} needs {sorted(required - given)}"
    assert {word for word in rest if word.startswith("--")} <= allowed, f"aws {name} {command}"


def check_trnpipe(words: list[str]) -> None:
    """As the command line reads them, without doing anything.

    Raises:
        TyperException: it would refuse them.
    """
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, name
        command = command.commands[name]
    # Places that people fill in stand for values.
    command.make_context(command.name, [re.sub(r"\$\w+", "value", word) for word in words])


def check_docker(words: list[str]) -> None:
    command, *rest = words
    assert {word for word in rest if word.startswith("-")} <= DOCKER[command]


def check_cdk(words: list[str]) -> None:
    tool, command, *rest = words
    assert f"npx {tool}" == CDK
    assert {word for word in rest if word.startswith("-")} <= CDK_OPTIONS[command]
    for option, value in pairwise(rest):
        if option != "-c":
            continue
        key, _, given = value.partition("=")
        if key == "env":
            assert given in {path.stem for path in ENVIRONMENTS.glob("*.yaml")} | made_environments()
        else:
            assert key.startswith("trnpipe."), key
            assert is_field(Settings, key.removeprefix("trnpipe."))


def made_environments() -> set[str]:
    """Environments that the guide has people write."""
    return set(re.findall(r"^cp \S+ infra/environments/(\w+)\.yaml$", DEPLOY, re.MULTILINE))


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = [word for word in words if "=" not in word]
    assert set(targets) <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    for variable in variables:
        assert re.search(rf"^{variable} \?=|\$\({variable}\)", makefile, re.MULTILINE), variable
    if "local" in targets:
        check_trnpipe(["local", *shlex.split(variables.get("ARGS", ""))])


SCRIPTS = dict(
    found for text in PAGES.values() for found in re.findall(r"`(\w+\.py)[^`]*`[^`]*\n```python\n(.*?)```", text, re.DOTALL)
)
"""Scripts that a page has people write: name, from the sentence before the block -> text."""


def check_python(words: list[str]) -> None:
    """A module or a script that reads the options given to it."""
    module, rest = (words[1], words[2:]) if words[0] == "-m" else (None, words[1:])
    if module:
        spec = importlib.util.find_spec(module)
        assert spec, module
        assert spec.origin, module
    text = Path(spec.origin).read_text(encoding="utf-8") if module else SCRIPTS.get(words[0]) or (ROOT / words[0]).read_text()
    assert [word for word in rest if word.startswith("-") and f'"{word}"' not in text] == [], words


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_to_be_typed_exists(command: str) -> None:
    words = shlex.split(command, comments=True)
    assigned = list(takewhile(lambda word: re.fullmatch(r"[A-Z_]+=.*", word), words))
    program, *words = words[len(assigned) :]
    if program == "aws":
        check_aws(words)
    elif program.removeprefix(".venv/bin/") == "trnpipe":
        check_trnpipe(words)
    elif program == "npx":
        check_cdk(words)
    elif program == "docker":
        check_docker(words)
    elif program == "make":
        check_make([*assigned, *words])
    elif program == "python":
        check_python(words)
    elif program.removeprefix(".venv/bin/") == "pytest":
        assert [word for word in words if "/" in word and not (ROOT / word).exists()] == []
    elif program == "cp":
        source = Path(words[0])
        assert (ROOT / source).is_file() or source.stem in made_environments()
        assert (ROOT / words[1]).parent == ENVIRONMENTS
    elif program not in ("source", "export", "cd", "for", "done"):
        assert program in SYSTEM_PROGRAMS, program


STARTED_HERE = {"trnpipe": ["-m", "pipeline.cli"], "python": []}
"""Programs of the guides that the test below starts -> what Python gets in their place."""


def test_the_guides_run_up_to_their_first_call_of_aws(tmp_path: Path) -> None:
    """In the order of the pages, in a copy of the clone, without credentials: what needs no account succeeds, and everything else
    fails for the want of credentials alone."""
    for name in (
        "infra",
        "pipeline",
        "cdk.json",
        "Makefile",
        ".dockerignore",
        "containers",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    ):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (tmp_path / "first.yaml").write_text("nodes: 1\n")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": str(tmp_path),
        "AWS_EC2_METADATA_DISABLED": "true",
        **dict.fromkeys(("BUCKET", "GPU_BUCKET"), "some-bucket"),
    }
    succeeded, known = list[str](), set[tuple[str, ...]]()
    for line in dict.fromkeys(line for page in (DEPLOY, GPUS) for block in blocks(page, "bash") for line in joined_lines(block)):
        program, *words = (Template(word).safe_substitute(environment) for word in shlex.split(line))
        if program == "export":
            environment |= dict(word.split("=", 1) for word in words)
        if program == "cp":
            shutil.copy(*(tmp_path / word for word in words))
        # Once for each environment: what else the options of a command may be, the test above says.
        started = (program, *takewhile(lambda word: not word.startswith("-"), words), *re.findall(r"env[ =](\w+)", line))
        if program not in STARTED_HERE or started in known:
            continue
        known.add(started)
        command = [sys.executable, *STARTED_HERE[program], *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode == 0:
            succeeded.append(line)
        else:
            told = f"{line}\n{done.stdout}{done.stderr}"
            assert re.search("credentials", told), told
            assert "Traceback" not in told, told
    assert succeeded == ["python -m infra.local.demo demo", "python -m infra.app -c env=prod", "trnpipe config check first.yaml"]
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {"pairs", "model"}


def test_commands_that_sentences_name_exist() -> None:
    known: Any = typer.main.get_command(app)
    named = {name for text in PAGES.values() for name in re.findall(f"`{NAME_ALONE.pattern}`", prose(text))}
    assert {"start", "plan"} <= named
    assert named <= set(known.commands)


def test_commands_that_are_wrong_are_found() -> None:
    for wrong in (
        "aws ec2 describe-instance-type-offering",
        "aws ec2 describe-images --image-id x",
        "aws dynamodb delete-table",
        "aws nosuch thing",
    ):
        with pytest.raises(AssertionError):
            check_aws(shlex.split(wrong)[1:])
    for wrong in ("start --wach", "runs -n some", "search"):
        with pytest.raises(TyperException):
            check_trnpipe(shlex.split(wrong))
    with pytest.raises(TyperException):
        check_make(["local", "ARGS=--wach"])
    for wrong in ("lokal", "local DEVISE=xla"):
        with pytest.raises(AssertionError):
            check_make(shlex.split(wrong))
    for wrong in ("-m infra.gone", "-m tests.chain.chaos --runz 1"):
        with pytest.raises(AssertionError):
            check_python(shlex.split(wrong))
    with pytest.raises(AssertionError):
        check_cdk(shlex.split(f"{CDK} deploy -c trnpipe.schedul.enabled=true")[1:])


def is_field(section: Any, path: str) -> bool:
    """Whether a dotted path names a setting, or a key of a free map; what is below a free-form `config` names one of a run's."""
    name, _, rest = path.partition(".")
    if section is Settings and name == "config" and rest:
        return is_run_setting(rest)
    fields = getattr(section, "model_fields", {})
    if name not in fields:
        return False
    if not rest:
        return True
    if fields[name].annotation == dict[str, str]:
        return True
    kinds = (fields[name].annotation, *getattr(fields[name].annotation, "__args__", ()))
    return any(is_field(kind, rest) for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))


def is_run_setting(path: str) -> bool:
    return is_field(RunConfig, path) or is_field(RunInput, path)


def test_every_setting_in_the_table_exists() -> None:
    table = DEPLOY[DEPLOY.index("| setting |") : DEPLOY.index("CDK refuses wrong settings")]
    rows = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(named) > 15
    assert [name for name in named if not is_field(Settings, name)] == []


def test_every_setting_in_the_text_exists() -> None:
    """Words that are spelled like a setting: words in code with an underscore or a dot between lower-case parts."""
    inline = re.findall(r"`([a-z]+(?:[_.][a-z_]+)*)(?::[^`]*)?`", prose(GUIDES))
    files = {"cdk.json"}
    named = {name for name in inline if re.search(r"[_.]", name)} - files
    assert {"gate.max_drop", "keep_hosts_minutes", "share_decay_seconds"} <= named
    known = {name for name in named if is_field(Settings, name) or is_field(Schedule, name) or is_run_setting(name)}
    assert named - known == set()


def test_every_setting_on_a_command_line_exists() -> None:
    overrides = {name for text in PAGES.values() for name in re.findall(r"--(?:set|vary) '?([a-z_.0-9]+)=", text)}
    assert {"data.train", "train.steps", "nodes"} <= overrides
    assert [name for name in sorted(overrides) if not is_run_setting(name)] == []


def anchors(page: str) -> dict[str, str]:
    """Anchor of every heading, as GitHub makes it -> the heading."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"): heading for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(PAGES[linked]), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:infra|pipeline|containers|docs|tests)/[\w./*-]*)`", prose(PAGES[page]))
    # Capitals stand for a name to fill in.
    assert [name for name in named if not re.search("[A-Z]{3}", name) and not [*ROOT.glob(name)]] == []


def test_every_folder_of_the_product_has_its_purpose() -> None:
    named = set(re.findall(r"^\| `([\w/]+)/` \|", PAGES[ROOT / "docs/internals.md"], re.MULTILINE))
    folders = {str(path.parent.relative_to(ROOT)) for top in ("infra", "pipeline") for path in (ROOT / top).rglob("*.py")}
    assert folders <= named


def test_the_readme_is_short() -> None:
    assert len(PAGES[ROOT / "README.md"].split()) <= LONGEST_README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_are_in_a_language_that_a_test_reads(page: Path) -> None:
    fences = re.findall(r"^ *```(.*)$", PAGES[page], re.MULTILINE)
    assert len(fences) == 2 * len(list(blocks(PAGES[page], *LANGUAGES)))
    assert [line for block in blocks(PAGES[page], "") for line in block.splitlines() if line.startswith("$ ")] == []


def check_configuration(partial: Mapping[str, Any]) -> None:
    """Validate part of a run configuration, or else of a deployment's settings.

    Raises:
        BadConfig: a key or a value that is refused.
    """
    if partial.keys() & RunConfig.model_fields.keys():
        build_config(partial)
    else:
        read_settings({"trnpipe": merge(read_context()["trnpipe"], partial)})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_yaml_json_and_python_are_valid(page: Path) -> None:
    for block in blocks(PAGES[page], "yaml"):
        check_configuration(yaml.safe_load(block))
    for block in blocks(PAGES[page], "json"):
        json.loads(block)
    for block in blocks(PAGES[page], "python"):
        compile(block, page.name, "exec")


def test_blocks_that_are_wrong_are_found() -> None:
    for wrong in ({"train": {"stepz": 1}}, {"nodes": "two"}, {"schedules": {"weekly": {"enable": True}}}, {"shedule": {}}):
        with pytest.raises(BadConfig):
            check_configuration(wrong)
    text = "- a\n\n    ```yaml\n    nodes: 1\n    ```\n```sh\ntrnpipe\n```\n"
    assert list(blocks(text, "yaml")) == ["nodes: 1\n"]
    assert list(blocks(text, "sh")) == ["trnpipe\n"]


def test_every_section_of_a_report_is_explained() -> None:
    template = (ROOT / "pipeline/stages/report.html.j2").read_text(encoding="utf-8")
    sections = re.findall(r"<h2>([^<{]+)</h2>", template)
    assert len(sections) > 6
    assert [name for name in sections if name not in PAGES[ROOT / "docs/report.md"]] == []


def test_the_first_week_s_script_writes_rows_that_its_configuration_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sample/pairs").mkdir(parents=True)
    for week in range(11):
        pairs = [Pair(f"id-{week}-{row}", f"query {row}", f"document {week} {row},\nsecond line") for row in range(5)]
        Path(f"sample/pairs/week-{week:02d}.jsonl.gz").write_bytes(
            gzip.compress("".join(json.dumps(asdict(pair)) + "\n" for pair in pairs).encode())
        )
    exec(SCRIPTS["make_pairs.py"], {})
    [typed] = {line for line in COMMANDS if line.startswith("trnpipe init ") and "columns" in line}
    given = [value for option, value in pairwise(shlex.split(typed)) if option == "--set"]
    columns = parse_settings(given)["data"]["columns"]
    read = {path.name: list(read_training_rows(str(path), columns)) for path in tmp_path.glob("*.csv")}
    assert {name: len(rows) for name, rows in read.items()} == {"pairs.csv": 30, "next-week.csv": 5, "broken-week.csv": 20}
    assert all(isinstance(row, TrainingRow) for rows in read.values() for row in rows)
    right, wrong = read["next-week.csv"][0], read["broken-week.csv"][0]
    assert (right.id, right.query, right.document) == ("id-6-0", "query 0", "document 6 0,\nsecond line")
    assert (wrong.id, wrong.query, wrong.document) == ("id-7-1", "query 0", "document 7 1,\nsecond line")


def test_the_configuration_reference_is_up_to_date() -> None:
    assert configuration.PAGE.read_text(encoding="utf-8") == configuration.page(), "`make docs` writes it anew"


@pytest.mark.parametrize("model", [RunConfig, Settings], ids=lambda model: model.__name__)
def test_every_key_has_a_description(model: type[BaseModel]) -> None:
    bare = [
        f"{section.__name__}.{name}"
        for section in sections_of(model)
        for name, field in section.model_fields.items()
        if not field.description and field.annotation not in sections_of(model)
    ]
    assert bare == []


def sections_of(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The model and every section in it."""
    inner = [one for field in model.model_fields.values() for one in configuration.sections_in(field.annotation)]
    return [model, *(section for one in inner for section in sections_of(one))]


def test_every_alarm_has_its_section_and_every_section_its_alarm(deployment: Any) -> None:
    alarms = {str(alarm["AlarmName"]).removeprefix("trnpipe-") for alarm in deployment.resources("AWS::CloudWatch::Alarm")}
    assert alarms <= set(runbook.RUNBOOK), "infra/runbook.py has no advice for an alarm of the template"
    sections = {anchor for anchor in anchors(RUNBOOK) if anchor.startswith("alarm-")}
    assert sections == {place.partition("#")[2] for place in runbook.RUNBOOK.values()}
    for alarm in deployment.resources("AWS::CloudWatch::Alarm"):
        name = str(alarm["AlarmName"]).removeprefix("trnpipe-")
        assert runbook.RUNBOOK[name] in alarm["AlarmDescription"]


def test_reasons_of_a_blocked_queue_are_those_that_the_doctor_knows_and_jobs_are_cancelled_for_the_first(deployment: Any) -> None:
    table = RUNBOOK[RUNBOOK.index("| reason |") :]
    told = re.findall(r"^\| `([A-Z0-9_:]+)` \|", table, re.MULTILINE)
    assert set(told) == set(check_deployed.REASONS)
    queues = deployment.resources("AWS::Batch::JobQueue")
    assert set(told[:3]) == {action["Reason"] for queue in queues for action in queue["JobStateTimeLimitActions"]}


def test_everything_that_a_removal_leaves_behind_is_in_the_list(deployment: Any) -> None:
    """The page deletes named resources by name, others one by one with a placeholder."""
    removal = RUNBOOK[RUNBOOK.index("## Remove") :]
    deleting = {
        "AWS::S3::Bucket": ("aws s3api delete-bucket", None),
        "AWS::DynamoDB::Table": ("aws dynamodb delete-table", "TableName"),
        "AWS::ECR::Repository": ("aws ecr delete-repository", "RepositoryName"),
        "AWS::Logs::LogGroup": ("aws logs delete-log-group", "LogGroupName"),
    }
    kept = [
        resource
        for template in (deployment.data, deployment.pipeline)
        for resource in template["Resources"].values()
        if resource.get("DeletionPolicy", "Delete") != "Delete"
    ]
    assert {resource["Type"] for resource in kept} == deleting.keys()
    for kind, (command, name) in deleting.items():
        typed = [line for line in removal.splitlines() if line.startswith(command)]
        found = [resource["Properties"] for resource in kept if resource["Type"] == kind]
        assert len(typed) == len(found), kind
        for properties in found:
            if name in properties:
                text = str(properties[name]).replace("trnpipe", "$NAME")
                assert any(text in shlex.split(line) for line in typed), text
    assert "aws batch deregister-job-definition" in removal
