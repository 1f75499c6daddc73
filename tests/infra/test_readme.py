"""infra/README.md, the guide and the runbook: everything it tells people to type exists, and every alarm has its section."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import typer
from botocore import xform_name
from botocore.exceptions import UnknownServiceError
from pydantic import BaseModel
from typer.exceptions import TyperException

from infra import runbook
from infra.settings import Settings
from pipeline.cli import app
from pipeline.config import RunConfig, RunInput

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / "infra" / "environments"
README = ROOT / runbook.GUIDE
TEXT = README.read_text(encoding="utf-8")
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)

ON_THE_HOST = ("sudo", "curl", "tar", "modinfo", "printf")
"""What is typed while an AMI is made: system programs, of which nothing here can know the options."""

CLI_COMMANDS: dict[tuple[str, str], set[str]] = {
    ("s3", "cp"): {"--recursive"},
    ("ecr", "get-login-password"): set(),
    ("logs", "tail"): {"--since", "--filter-pattern", "--follow"},
}
"""Commands that the AWS CLI has beside the services' operations, and the options of theirs that the guide uses."""

CLI_OPTIONS = {"--query", "--output", "--region", "--profile"}
CDK_OPTIONS = {
    "bootstrap": set[str](),
    "deploy": {"--all", "-c"},
    "diff": {"--all", "-c"},
    "destroy": {"-c"},
    "import": set[str](),
}
DOCKER = {"login": {"--username", "--password-stdin"}, "tag": set[str](), "push": set[str]()}


def commands() -> Iterator[str]:
    """Every command of the fenced blocks, also those inside $( ) and behind a pipe, and the inline ones with arguments."""
    typed: list[str] = []
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL):
        typed += [line.strip() for line in re.sub(r"\\\n", "", block).splitlines() if line.strip()]
    typed += re.findall(r"`((?:aws|trnpipe|npx|make|python -m infra)[^`]* [^`]+)`", PROSE)
    for line in typed:
        inner = re.findall(r"^\w+=\$\((.*)\)$", line)
        yield from (part.strip() for part in re.split(r"\s\|\s", inner[0] if inner else line))


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
    assert tool == "aws-cdk@2"
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
    return set(re.findall(r"^cp \S+ infra/environments/(\w+)\.yaml$", TEXT, re.MULTILINE))


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_to_be_typed_exists(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "aws":
        check_aws(words)
    elif program == "trnpipe":
        check_trnpipe(words)
    elif program == "npx":
        check_cdk(words)
    elif program == "docker":
        check_docker(words)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words if "=" not in word} <= set(targets)
        for variable in (word.partition("=")[0] for word in words if "=" in word):
            assert re.search(rf"^{variable} \?=", (ROOT / "Makefile").read_text(), re.MULTILINE), variable
    elif program == "python":
        assert words[0] == "-m"
        assert importlib.util.find_spec(words[1]) is not None
        assert set(words[2::2]) <= {"-c"}
    elif program == "cp":
        source = Path(words[0])
        assert (ROOT / source).is_file() or source.stem in made_environments()
        assert (ROOT / words[1]).parent == ENVIRONMENTS
    elif program not in ("source", "export", "cd"):
        assert program in ON_THE_HOST, program


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
    with pytest.raises(AssertionError):
        check_cdk(shlex.split("aws-cdk@2 deploy -c trnpipe.schedul.enabled=true"))


def is_field(section: Any, path: str) -> bool:
    """Whether a dotted path names a setting; what is below a free-form `config` names one of a run's."""
    name, _, rest = path.partition(".")
    if section is Settings and name == "config" and rest:
        return is_run_setting(rest)
    fields = getattr(section, "model_fields", {})
    if name not in fields:
        return False
    if not rest:
        return True
    kinds = (fields[name].annotation, *getattr(fields[name].annotation, "__args__", ()))
    return any(is_field(kind, rest) for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))


def is_run_setting(path: str) -> bool:
    return is_field(RunConfig, path) or is_field(RunInput, path)


def test_every_setting_in_the_table_exists() -> None:
    table = TEXT[TEXT.index("| setting |") : TEXT.index("Wrong ones are refused")]
    rows = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(named) > 15
    assert [name for name in named if not is_field(Settings, name)] == []


def test_every_setting_in_the_text_exists() -> None:
    """What is spelled like one: words in code with an underscore or a dot between lower-case parts."""
    inline = re.findall(r"`([a-z]+(?:[_.][a-z_]+)*)(?::[^`]*)?`", PROSE)
    files = {"cdk.json"}
    named = {name for name in inline if re.search(r"[_.]", name)} - files
    assert {"gate.max_drop", "keep_hosts_minutes", "schedule.enabled"} <= named
    assert [name for name in sorted(named) if not is_field(Settings, name) and not is_run_setting(name)] == []
    overrides = re.findall(r"--set ([a-z_.]+)=", TEXT)
    assert len(overrides) > 3
    assert [name for name in overrides if not is_run_setting(name)] == []


def anchors() -> dict[str, str]:
    """Anchor of every heading, as GitHub makes it -> the heading."""
    headings = re.findall(r"^#+ (.+)$", PROSE, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"): heading for heading in headings}


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        path, _, anchor = target.partition("#")
        assert not path or (README.parent / path).exists(), target
        assert path or anchor in anchors(), target


def test_every_alarm_has_its_section_and_every_section_its_alarm(deployment: Any) -> None:
    alarms = {str(alarm["AlarmName"]).removeprefix("trnpipe-") for alarm in deployment.resources("AWS::CloudWatch::Alarm")}
    assert alarms <= set(runbook.RUNBOOK), "infra/runbook.py has no advice for an alarm of the template"
    sections = {anchor for anchor in anchors() if anchor.startswith("alarm-")}
    assert sections == {place.partition("#")[2] for place in runbook.RUNBOOK.values()}
    for alarm in deployment.resources("AWS::CloudWatch::Alarm"):
        name = str(alarm["AlarmName"]).removeprefix("trnpipe-")
        assert runbook.RUNBOOK[name] in alarm["AlarmDescription"]


def test_reasons_of_a_blocked_queue_are_those_that_jobs_are_cancelled_for(deployment: Any) -> None:
    table = TEXT[TEXT.index("| reason |") :]
    told = set(re.findall(r"^\| `([A-Z_:]+)` \|", table, re.MULTILINE))
    queues = deployment.resources("AWS::Batch::JobQueue")
    assert told == {action["Reason"] for queue in queues for action in queue["JobStateTimeLimitActions"]}
