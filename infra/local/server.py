"""The local AWS endpoint: moto's S3, DynamoDB, SNS, STS and Step Functions, and our own Batch, behind one loopback address.

A WSGI layer in front of moto answers Batch's calls with the process runner, and ECS's few about a job's own host; keeps the
bucket and the lock table in the state folder (written before a request is answered); lets conditional writes of one key happen
one at a time; and, when an execution is stopped, starts what EventBridge would (`LocalStack.watches`): the watch that ends the
jobs of an execution that polled them, which Step Functions leaves running, here as in a deployed account. While the endpoint
is up, this process sees no AWS setting of its user: nothing here can reach a real account. Batch jobs are processes of the
user, so only this user may submit any: requests must be signed under a key that is made for this endpoint and known to its
clients alone, neither to other users of the machine nor to pages in a browser. The same user's operator commands
(`trnpipe watch --state`) learn it from a file that only its owner may read.
"""

from __future__ import annotations

import hmac
import io
import json
import logging
import re
import secrets
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError
from moto.core.base_backend import BackendDict
from moto.core.config import default_user_config
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server
from werkzeug.wrappers import Request, Response

from infra.local import definitions, ecs
from infra.local.batch import BatchRunner
from infra.local.definitions import REGION
from infra.local.mirror import Mirror
from infra.local.moto_adapter import adapted
from infra.local.template import LocalStack, machine_arn
from pipeline.files import write_atomically
from pipeline.operate.endpoint import NO_USER_FILES, EndpointRecord, announced, only_environment

HOST = "127.0.0.1"
MUTATIONS = re.compile(r"DynamoDB_\d+\.(PutItem|UpdateItem|DeleteItem|BatchWriteItem|TransactWriteItems)")
SIGNED = re.compile(r"Credential=(?P<key>[^/\s]+)/[^/]+/[^/]+/(?P<service>[^/]+)/aws4_request")

STOP_SECONDS = 10.0
"""After which a stopped execution has ended."""

SERVICES = ("s3", "sts", "dynamodb", "sns", "stepfunctions")
"""Moto's services. It loads each at its first request."""

WsgiApplication = Callable[[dict[str, Any], Any], Iterable[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEndpoint:
    """A running endpoint.

    Attributes:
        url, batch: address and Batch service.
        mirror_folder: the bucket as plain files.
        session: one for all clients: it reads each of AWS's large descriptions once.
    """

    url: str
    batch: BatchRunner
    mirror_folder: Path
    session: boto3.session.Session
    _making: threading.Lock = field(default_factory=threading.Lock)

    def client(self, service: str) -> Any:
        """A client of this endpoint."""
        with self._making:
            return self.session.client(service, config=Config(retries={"max_attempts": 0}))


@contextmanager
def local_endpoint(
    stack: LocalStack,
    state: Path,
    runner: Callable[[dict[str, str]], BatchRunner],
    front: Callable[[WsgiApplication], WsgiApplication] = lambda application: application,
) -> Iterator[LocalEndpoint]:
    """Keep the endpoint up inside the block, with the stack's resources created and the state folder loaded.

    Args:
        stack: the resources to create.
        state: the state folder: `bucket/KEY`, `lock.json`. This process holds its lock (infra/local/state_folder.py).
        runner: makes the Batch runner from the variables that job processes need to find the endpoint.
        front: wraps the application that answers every request; how a test makes services fail.
    """
    with ExitStack() as exit_stack:
        exit_stack.enter_context(mock.patch.dict(default_user_config["stepfunctions"], execute_state_machine=True))
        # The engine logs every error that the state machine catches; the history has them all.
        logger = logging.getLogger("moto")
        exit_stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        BackendDict.reset()
        key = secrets.token_hex(16)
        application = _Application(stack, state)
        server = make_server(HOST, 0, _guarded(front(application), key), threaded=True, request_handler=_QuietHandler)
        url = f"http://{HOST}:{server.server_port}"
        environment = endpoint_environment(url, key)
        exit_stack.enter_context(only_environment({**environment, "MOTO_PORT": str(server.server_port)}))
        batch = application.batch = runner(environment)
        endpoint = LocalEndpoint(url=url, batch=batch, mirror_folder=state / "bucket", session=boto3.session.Session())
        exit_stack.enter_context(adapted(batch.pause))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="local-endpoint", daemon=True)
        thread.start()
        exit_stack.callback(server.server_close)
        exit_stack.callback(thread.join)
        exit_stack.callback(server.shutdown)
        exit_stack.callback(batch.close)
        endpoint.client("s3").create_bucket(Bucket=stack.bucket)
        endpoint.client("dynamodb").create_table(**stack.table)
        for topic in stack.topics:
            endpoint.client("sns").create_topic(Name=topic)
        machines = {stack.state_machine: stack.definition, **stack.watches}
        for name, definition in machines.items():
            endpoint.client("stepfunctions").create_state_machine(name=name, definition=definition, roleArn=stack.role_arn)
        exit_stack.callback(_stop_executions, endpoint.client("stepfunctions"), machines)
        exit_stack.callback(application.watches.clear)
        application.load(endpoint.client("dynamodb"))
        exit_stack.enter_context(announced(state, EndpointRecord(state_machine=stack.state_machine_arn, environment=environment)))
        yield endpoint


def _stop_executions(client: Any, machines: Iterable[str]) -> None:
    """Stop all executions, as a machine that is switched off does: no further state runs, and locks stay."""
    for machine in machines:
        for execution in client.list_executions(stateMachineArn=machine_arn(machine), statusFilter="RUNNING")["executions"]:
            # moto's engine answers with an error where an execution has only just begun.
            with suppress(ClientError):
                client.stop_execution(executionArn=execution["executionArn"])


def load_services() -> None:
    """Load the services early, which moto would otherwise load at their first requests."""
    for service in SERVICES:
        import_module(f"moto.{service}.urls")


def endpoint_environment(url: str, key: str) -> dict[str, str]:
    """Return the environment with which any AWS SDK calls the local endpoint and nothing else.

    Args:
        key: the id of the only access key that the endpoint knows. Its secret is not used: the endpoint verifies no signatures.
    """
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": "local",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        **NO_USER_FILES,
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": f"{HOST},localhost",
        "no_proxy": f"{HOST},localhost",
    }


def _guarded(application: WsgiApplication, key: str) -> WsgiApplication:
    """Let pass what the endpoint's own clients send, and nothing else.

    Args:
        key: the access key's id.
    """

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        signed = SIGNED.search(environ.get("HTTP_AUTHORIZATION", ""))
        if environ.get("HTTP_HOST") not in {f"{name}:{environ['SERVER_PORT']}" for name in (HOST, "localhost")}:
            # A page whose name was made to mean this machine sends its own name here (DNS rebinding).
            objection = "this endpoint has no other name than its loopback address"
        elif "HTTP_ORIGIN" in environ:
            objection = "this endpoint answers no web page"
        # Containers ask for their metadata without credentials; the task id in the path is a secret of each task's own.
        elif ecs.METADATA_PATH.fullmatch(environ["PATH_INFO"]) or (
            signed and hmac.compare_digest(signed["key"].encode(), key.encode())
        ):
            return application(environ, start_response)
        else:
            objection = "this endpoint answers the processes of its own run only"
        return _json_response({"__type": "AccessDeniedException", "message": objection}, 403)(environ, start_response)

    return answer


class _Application:
    """The WSGI layer in front of moto.

    Attributes:
        watches: ARNs of state machines that are started when an execution of the stack's is stopped.
    """

    def __init__(self, stack: LocalStack, state: Path) -> None:
        self.batch: BatchRunner
        self._moto: WsgiApplication = DomainDispatcherApplication(create_backend_app)
        self._stack = stack
        self._mirror = Mirror(stack.bucket, state / "bucket", state / "tmp")
        self.watches = [machine_arn(watch) for watch in stack.watches]
        self._lock_file = state / "lock.json"
        self._lock_items = threading.Lock()
        self._dynamodb: Any = None
        self._keys: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def load(self, dynamodb: Any) -> None:
        """Fill moto from the state folder."""
        self._mirror.load()
        if self._lock_file.is_file():
            for item in json.loads(self._lock_file.read_text()):
                dynamodb.put_item(TableName=self._stack.table["TableName"], Item=item)
        self._dynamodb = dynamodb

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        return self._choose(Request(environ, populate_request=False))(environ, start_response)

    def _choose(self, request: Request) -> WsgiApplication:
        """Return what answers a request: a response of our own, or moto."""
        signed = SIGNED.search(request.headers.get("Authorization", ""))
        service = signed["service"] if signed else ""
        target = request.headers.get("X-Amz-Target", "")
        match service:
            case "batch" | "ecs":
                return self._answer_jobs(service, target, request)
            case "" if ecs.METADATA_PATH.fullmatch(request.path):
                found = ecs.metadata(self.batch.hosts, request.path)
                return _json_response(found or {}, 404 if found is None else 200)
            case "s3":
                return self._answer_s3(request)
        if target == "AWSStepFunctions.StopExecution":
            return self._stop_execution(request)
        if self._dynamodb is not None and MUTATIONS.fullmatch(target):
            response = self._answer_by_moto(request)
            with self._lock_items:
                items = self._dynamodb.scan(TableName=self._stack.table["TableName"])["Items"]
                write_atomically(self._lock_file, json.dumps(items, indent=1).encode())
            return response
        return self._moto

    def _answer_by_moto(self, request: Request) -> Response:
        return Response.from_app(self._moto, request.environ)

    def _answer_jobs(self, service: str, target: str, request: Request) -> Response:
        asked = json.loads(request.get_data() or b"{}")
        try:
            if service == "batch":
                return _json_response(self.batch.call(request.path.removeprefix("/v1/"), asked))
            return _json_response(ecs.call(self.batch.hosts, target.removeprefix("AmazonEC2ContainerServiceV20141113."), asked))
        except definitions.ClientError as error:
            # Batch's protocol names the error in a header, that of ECS in the body.
            kind = "ClientException"
            return _json_response({"__type": kind, "message": str(error)}, 400, {"x-amzn-ErrorType": kind})

    def _answer_s3(self, request: Request) -> WsgiApplication:
        bucket, _, key = request.path.lstrip("/").partition("/")
        if bucket != self._stack.bucket:
            return self._moto
        if request.method == "POST" and "delete" in request.args:
            response = self._answer_by_moto(request)
            self._mirror.store_all()
            return response
        # Parts of an upload change no object until it is completed.
        part, upload = "partNumber" in request.args, "uploadId" in request.args
        changes = {"PUT": not part, "POST": upload, "DELETE": not upload}
        if not key or not changes.get(request.method, False):
            return self._moto
        # Invariant: one change of a key at a time, so that what a conditional write has checked still holds when it writes.
        with self._keys[key]:
            if request.method != "DELETE" and (objection := self._mirror.objection(key)):
                request.get_data()
                return Response(
                    f"<Error><Code>InvalidRequest</Code><Message>{objection}</Message></Error>", 400, mimetype="application/xml"
                )
            response = self._answer_by_moto(request)
            self._mirror.store(key)
            return response

    def _stop_execution(self, request: Request) -> Response:
        asked = request.get_data()
        request.environ["wsgi.input"] = io.BytesIO(asked)
        response = self._answer_by_moto(request)
        execution = json.loads(asked)["executionArn"]
        executions = self._stack.state_machine_arn.replace(":stateMachine:", ":execution:")
        if response.status_code == 200 and execution.startswith(f"{executions}:"):
            client = boto3.session.Session().client("stepfunctions")
            # EventBridge reports an execution after its end; moto ends it in its own thread, after it has answered.
            deadline = time.monotonic() + STOP_SECONDS
            while client.describe_execution(executionArn=execution)["status"] == "RUNNING" and time.monotonic() < deadline:
                time.sleep(0.05)
            for watch in self.watches:
                # moto gives an execution without a name none at all.
                client.start_execution(stateMachineArn=watch, name=str(uuid.uuid4()), input=json.dumps({"execution": execution}))
        return response


def _json_response(answer: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        json.dumps(answer),
        status,
        {"x-amzn-RequestId": str(uuid.uuid4()), **(headers or {})},
        mimetype="application/json",
    )


class _QuietHandler(MotoRequestHandler):  # type: ignore[misc]
    """One line per request on the terminal would bury the run's own."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nothing."""
