"""The doctor's calls: classes of real HTTP answers, findings for failed calls, and the list of permissions."""

from __future__ import annotations

import ast
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import botocore.session
import pytest

from infra.doctor import command
from infra.doctor.asking import (
    Aws,
    Check,
    Denied,
    NotAuthenticated,
    Refused,
    Subject,
    Unavailable,
    check,
    examine,
    ok,
    permission,
    policy,
)
from infra.doctor.blueprint import Blueprint
from infra.doctor.printing import exit_code
from pipeline.errors import Defect

CHECKS = (command.check_account.region, *command.ALWAYS, *command.BEFORE, *command.AFTER)


class Service:
    """An endpoint that gives every call of the JSON protocols the same answer, and counts."""

    def __init__(self) -> None:
        self.status, self.body, self.calls = 200, {}, 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        self.calls += 1
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(f"{self.status} it", [("Content-Type", "application/x-amz-json-1.1")])
        return [json.dumps(self.body).encode()]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    class Quiet(WSGIRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    application = Service()
    server = make_server("127.0.0.1", 0, application, handler_class=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    # Five tries with growing pauses would be minutes.
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0)
    yield application
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "AccessDeniedException", Denied),
        (400, "ExpiredTokenException", NotAuthenticated),
        (400, "UnrecognizedClientException", NotAuthenticated),
        (400, "ThrottlingException", Unavailable),
        (500, "InternalServerError", Unavailable),
        (400, "ParameterNotFound", Refused),
    ],
)
def test_answers_are_told_apart(service: Service, status: int, code: str, expected: type[Exception]) -> None:
    service.status, service.body = status, {"__type": code, "message": "words"}
    with pytest.raises(expected) as caught:
        Aws("us-west-2")("ssm", "GetParameter", Name="/one")
    if isinstance(caught.value, Denied):
        assert str(caught.value) == "ssm:GetParameter"
    if isinstance(caught.value, Refused):
        assert (caught.value.code, caught.value.message) == (code, "words")


def test_one_question_is_asked_once(service: Service) -> None:
    service.body = {"Parameter": {"Value": "6"}}
    ask = Aws("us-west-2")
    asked = [threading.Thread(target=ask, args=("ssm", "GetParameter"), kwargs={"Name": "/one"}) for _ in range(5)]
    for thread in asked:
        thread.start()
    for thread in asked:
        thread.join()
    assert ask("ssm", "GetParameter", Name="/one")["Parameter"]["Value"] == "6"
    assert service.calls == 1


def test_without_credentials(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(NotAuthenticated):
        Aws("us-west-2")("ssm", "GetParameter", Name="/one")


def test_an_unknown_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(NotAuthenticated, match="no-such-profile"):
        Aws("us-west-2")


def test_no_answer(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Unavailable):
        Aws("us-west-2")("ssm", "GetParameter", Name="/one")


def asking(*needs: str) -> Check:
    @check("Area", *needs)
    def one(subject: Subject) -> Any:
        yield ok("before")
        subject.ask("ssm", "GetParameter", Name="/one")
        yield ok("after")

    return one


@pytest.mark.parametrize(
    ("answer", "sentences", "code"),
    [
        ({"Parameter": {"Value": "6"}}, ["before", "after"], 0),
        (Denied("ssm:GetParameter"), ["before", "the check needs the permission ssm:GetParameter"], 0),
        (Unavailable("timed out"), ["before", "the service does not answer now"], 75),
        (Refused("Odd", "words"), ["before", "a call failed"], 64),
    ],
    ids=["answered", "denied", "unavailable", "refused"],
)
def test_what_stands_in_the_way_is_a_finding(
    blueprint: Blueprint, look: Any, answer: Any, sentences: list[str], code: int
) -> None:
    findings = look(asking("ssm:GetParameter"), blueprint, {"ssm:GetParameter": answer})
    assert [finding.what for finding in findings] == sentences
    assert {finding.area for finding in findings} == {"Area"}
    assert exit_code(findings) == code


def test_a_check_makes_no_call_that_it_does_not_state(blueprint: Blueprint, look: Any) -> None:
    with pytest.raises(Defect, match="does not state"):
        look(asking("ssm:GetParameters"), blueprint, {"ssm:GetParameter": {"Parameter": {"Value": "6"}}})


def test_findings_come_in_the_order_of_the_checks(blueprint: Blueprint, recorded: Any) -> None:
    both = threading.Barrier(2, timeout=30)
    last = threading.Event()

    def slow(_: Subject) -> Any:
        both.wait()
        last.wait(30)
        yield ok("first")

    def fast(_: Subject) -> Any:
        # Meets the other one: they run side by side.
        both.wait()
        last.set()
        yield ok("second")

    checks = [Check(area="A", needs=(), find=slow), Check(area="B", needs=(), find=fast)]
    subject = Subject(blueprint=blueprint, account="1", after=False, ask=recorded({}))
    assert [finding.what for finding in examine(checks, subject)] == ["first", "second"]


@pytest.mark.parametrize(
    "need", sorted({need for one in CHECKS for need in one.needs} | {*command.check_account.CREDENTIAL_CALLS})
)
def test_every_call_is_one_of_its_service(need: str) -> None:
    service, _, name = need.partition(":")
    assert name in botocore.session.get_session().get_service_model(service).operation_names
    prefix, _, action = permission(need).partition(":")
    assert prefix.replace("-", "").isalnum()
    assert action.isalnum()


def test_every_stated_call_is_made_somewhere() -> None:
    """No check states a call that it does not make: the text of its module names each of them."""
    folder = Path(command.__file__).parent
    for one in CHECKS:
        text = (folder / f"{one.find.__module__.rpartition('.')[2]}.py").read_text() + (folder / "asking.py").read_text()
        words = {
            node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert {need.partition(":")[2] for need in one.needs} <= words


def test_the_policy_names_permissions_not_operations() -> None:
    actions = policy(CHECKS)["Statement"][0]["Action"]
    assert {"budgets:ViewBudget", "s3:ListBucket", "servicequotas:GetServiceQuota"} <= set(actions)
    assert not [action for action in actions if action.split(":")[1].startswith(("Create", "Delete", "Put", "Update"))]
    assert "sts:GetCallerIdentity" in policy(CHECKS, command.check_account.CREDENTIAL_CALLS)["Statement"][0]["Action"]


def test_subject_gives_physical_ids_of_what_is_there(blueprint: Blueprint, recorded: Any) -> None:
    def resource(kind: str, **fields: Any) -> dict[str, Any]:
        named = {"LogicalResourceId": "One", "ResourceType": kind, "ResourceStatus": "CREATE_COMPLETE"}
        return {**named, "LastUpdatedTimestamp": "2026-01-01T00:00:00Z", **fields}

    listed = [resource("A", PhysicalResourceId="1"), resource("A"), resource("B", PhysicalResourceId="2")]
    ask = recorded({"cloudformation:ListStackResources": {"StackResourceSummaries": listed}})
    subject = Subject(blueprint=blueprint, account="1", after=True, ask=ask)
    assert subject.physical("trnpipe", "A") == ["1"]


def test_a_blueprint_is_what_was_synthesized(blueprint: Blueprint) -> None:
    assert (blueprint.pipeline_stack, blueprint.data_stack) == ("trnpipe", "trnpipe-data")
    assert set(blueprint.stacks.templates) == {"trnpipe", "trnpipe-data"}
    assert (blueprint.bootstrap_version, blueprint.bootstrap_parameter) == (6, "/cdk-bootstrap/hnb659fds/version")
