"""The state machine: one execution is one run. Its definition is plain data (`definition`), so that it can be read and tested
without CDK; `Workflow` deploys it and grants its role exactly what the states call.

    read and check the input ─► lock ─► prepare ─► health_check ─► (compile) ─► train ─► evaluate ─► gate ─► embed ─► publish
                                                                                                                │
    every other way out ─► keep the failure ─► its words ─────────────────────────────────► report ─► unlock ─► notify ─► end

The machine's data, from `Settings` on: {execution, share, registry, lock, run: {id, key, uri, since, words, newline}}, and at the
end `outcome`: {result: succeeded | refused | failed, state, Error, Cause}. `run.words.figures` is what the gate said once it has
accepted the model; a line break for the notification comes as data, because no document says how a States.Format has one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aws_cdk import Stack
from aws_cdk import aws_dynamodb as dynamodb
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_sns as sns
from aws_cdk import aws_stepfunctions as sfn
from constructs import Construct

from infra.console import Console
from infra.cost import COST_TAG, host_names, hourly_prices, most_embed_hosts
from infra.settings import Settings
from infra.states import CALL_SECONDS, DISCARD, States, Targets, call, call_retry, gang, job, read_result, resource
from pipeline.contract import Queue, RunPaths, Stage
from pipeline.prices import CURRENCY

GATE_REFUSED = "GateRefused"
LOCK_HELD = "LockHeld"
INPUT_REFUSED = "InputRefused"
"""Errors of the machine's own under which an execution ends, beside `IncompleteResult` and `NoSuchGang`."""

NO_WORDS_YET = {"words": {"figures": ""}, "newline": "\n"}

LAP_MINUTES = 1
LONG_LAP_MINUTES = 30
LONG_WAIT_MINUTES = 300
"""A wait for the lock longer than this takes long laps: an execution may have 25,000 events, and a lap makes about 25."""

LONGEST_WAIT_MINUTES = 7 * 24 * 60
"""The configuration's limit too, which nobody checks before the lock is there; longer, the events would run out."""


def definition(targets: Targets) -> dict[str, Any]:
    """The state machine in the Amazon States Language (JSONPath)."""
    states: States = {}
    states |= _input_states(targets, then="NeedsLock")
    states |= _lock_states(targets, then="WriteInput")
    states |= _write_input(targets, then="prepare")
    states |= job(targets, Stage.PREPARE, then="ReadPlan")
    states |= _read_plan(targets, then="ChooseGang")
    states |= _choose_gang(targets, then="health_check")
    states |= gang(targets, Stage.HEALTH_CHECK, then="ChooseCompile")
    states |= _choose_compile(missing="compile", complete="train")
    states |= gang(targets, Stage.COMPILE, then="train")
    states |= gang(targets, Stage.TRAIN, then="evaluate")
    states |= job(targets, Stage.EVALUATE, then="ReadScorecard")
    states |= _gate(targets, accepted="ChooseEmbed", refused="Refused")
    states |= _embed(targets, then="publish")
    states |= job(targets, Stage.PUBLISH, then="Succeeded")
    states |= _outcomes(targets, then="report")
    states |= _ending(targets)
    return {
        "Comment": "One weekly run: retrain a text encoder, judge it, embed the corpus, publish both together.",
        "StartAt": "ReadInput",
        "States": states,
    }


def _input_states(targets: Targets, *, then: str) -> States:
    """Make sure of an object with usable values before anything is started; fill in what it leaves out."""
    refusal = {"Type": "Pass", "ResultPath": "$.outcome", "Next": "Notify"}
    wait, run = "$.input.lock.wait_minutes", "$.input.run"
    return {
        "ReadInput": {
            "Type": "Pass",
            "Parameters": {
                "execution.$": "$$.Execution.Input",
                "text.$": "States.JsonToString($$.Execution.Input)",
                # Takes the place of `run: null`.
                "named": {"run.$": "$$.Execution.Name"},
                # What a refusal is published under.
                "run": {"id.$": "$$.Execution.Name", **NO_WORDS_YET},
                "defaults": {
                    "share": targets.defaults["share"],
                    "registry": targets.defaults["registry"],
                    "run.$": "$$.Execution.Name",
                },
            },
            "Next": "CheckInput",
        },
        "CheckInput": {
            "Type": "Choice",
            "Choices": [{"Variable": "$.text", "StringMatches": "{*", "Next": "MergeInput"}],
            "Default": "NotAnObject",
        },
        "NotAnObject": {
            **refusal,
            "Result": {
                "result": "failed",
                "state": "CheckInput",
                "Error": INPUT_REFUSED,
                "Cause": "the execution's input is not a JSON object. rule: it is a partial run configuration, {} at the least. "
                "remedy: see `trnpipe config schema`",
            },
        },
        "MergeInput": {
            "Type": "Pass",
            "Parameters": {
                "execution.$": "$.execution",
                "named.$": "$.named",
                "run.$": "$.run",
                "input.$": "States.JsonMerge($.defaults, $.execution, false)",
            },
            "Next": "CheckValues",
        },
        "CheckValues": {
            "Type": "Choice",
            "Choices": [
                {"Not": {"Variable": "$.input.share", "IsString": True}, "Next": "WrongValue"},
                {"And": _neither("$.input.registry", "IsNull", "IsString"), "Next": "WrongValue"},
                {"And": _neither(run, "IsNull", "IsString"), "Next": "WrongValue"},
                *(
                    # Neither of them is in a run id, and both lead out of the run's folder.
                    {
                        "And": [
                            {"Variable": "$.input.run", "IsString": True},
                            {"Variable": "$.input.run", "StringMatches": part},
                        ],
                        "Next": "WrongValue",
                    }
                    for part in ("*/*", "*.*")
                ),
                {
                    "And": [
                        {"Variable": wait, "IsPresent": True},
                        {"Not": {"Variable": wait, "IsNumeric": True}},
                    ],
                    "Next": "WrongValue",
                },
                {
                    "And": [
                        {"Variable": wait, "IsPresent": True},
                        {"Variable": wait, "NumericGreaterThan": LONGEST_WAIT_MINUTES},
                    ],
                    "Next": "WrongValue",
                },
                # prepare checks everything else, in words that name the key and the rule.
                {"Not": {"Variable": wait, "IsPresent": True}, "Next": "DefaultWait"},
                {"Variable": run, "IsNull": True, "Next": "NameRun"},
            ],
            "Default": "Settings",
        },
        "WrongValue": {
            **refusal,
            "Result": {
                "result": "failed",
                "state": "CheckValues",
                "Error": INPUT_REFUSED,
                "Cause": "share, run, registry or lock.wait_minutes cannot be used. rule: share is a string; run and registry "
                f"are strings or null, run without slashes and dots; lock.wait_minutes is a number up to {LONGEST_WAIT_MINUTES}. "
                "remedy: see `trnpipe config schema`",
            },
        },
        "DefaultWait": {
            "Type": "Pass",
            "Result": {"wait_minutes": targets.defaults["wait_minutes"]},
            "ResultPath": "$.input.lock",
            "Next": "CheckValues",
        },
        "NameRun": {
            "Type": "Pass",
            "Parameters": {
                "execution.$": "$.execution",
                "named.$": "$.named",
                "run.$": "$.run",
                "input.$": "States.JsonMerge($.input, $.named, false)",
            },
            "Next": "CheckValues",
        },
        "Settings": {
            "Type": "Pass",
            "Parameters": {
                "execution.$": "$.execution",
                "share.$": "$.input.share",
                "registry.$": "$.input.registry",
                "lock": {"wait_minutes.$": "$.input.lock.wait_minutes", "waited": 0},
                "run": {
                    "id.$": "$.input.run",
                    "key.$": "States.Format('runs/{}', $.input.run)",
                    "uri.$": f"States.Format('s3://{targets.bucket}/runs/{{}}', $.input.run)",
                    "since.$": "$$.State.EnteredTime",
                    **NO_WORDS_YET,
                },
            },
            "Next": then,
        },
    }


def _neither(path: str, *tests: str) -> list[dict[str, Any]]:
    return [{"Not": {"Variable": path, test: True}} for test in tests]


def _lock_states(targets: Targets, *, then: str) -> States:
    """One run per registry name. An owner that no longer runs has lost its lock: it is taken over by compare-and-swap."""
    item = {
        "name": {"S.$": "$.registry"},
        "owner": {"S.$": "$$.Execution.Id"},
        "run": {"S.$": "$.run.id"},
        "since": {"S.$": "$$.State.EnteredTime"},
    }
    put = {
        "TableName": targets.lock_table,
        "Item": item,
        # `owner` is a reserved word of DynamoDB.
        "ExpressionAttributeNames": {"#owner": "owner"},
    }
    acquire = {
        **put,
        "ConditionExpression": "attribute_not_exists(#owner) OR #owner = :me",
        "ExpressionAttributeValues": {":me": {"S.$": "$$.Execution.Id"}},
    }
    take_over = {
        **put,
        "ConditionExpression": "#owner = :seen",
        "ExpressionAttributeValues": {":seen": {"S.$": "$.lock.seen.Item.owner.S"}},
    }
    read = {"TableName": targets.lock_table, "Key": {"name": {"S.$": "$.registry"}}, "ConsistentRead": True}
    states: States = {
        "NeedsLock": {
            "Type": "Choice",
            "Choices": [{"Variable": "$.registry", "IsNull": True, "Next": then}],
            "Default": "AcquireLock",
        }
    }
    taken = {"ErrorEquals": ["DynamoDB.ConditionalCheckFailedException"], "ResultPath": None, "Next": "ReadLock"}
    states |= call(targets, "AcquireLock", "dynamodb:putItem", acquire, then=then, catch=[taken], fields=DISCARD)
    states |= call(targets, "ReadLock", "dynamodb:getItem", read, then="LockSeen", fields={"ResultPath": "$.lock.seen"})
    states["LockSeen"] = {
        "Type": "Choice",
        "Choices": [{"Variable": "$.lock.seen.Item", "IsPresent": True, "Next": "ReadOwner"}],
        "Default": "AcquireLock",
    }
    gone = {"ErrorEquals": ["Sfn.ExecutionDoesNotExistException"], "ResultPath": None, "Next": "TakeOverLock"}
    states |= call(
        targets,
        "ReadOwner",
        "aws-sdk:sfn:describeExecution",
        # Without input and output, which could exceed what a state may hold.
        {"ExecutionArn.$": "$.lock.seen.Item.owner.S", "IncludedData": "METADATA_ONLY"},
        then="OwnerRuns",
        catch=[gone],
        fields={"ResultSelector": {"Status.$": "$.Status"}, "ResultPath": "$.lock.owner"},
    )
    states["OwnerRuns"] = {
        "Type": "Choice",
        "Choices": [
            {
                "Or": [
                    {"Variable": "$.lock.owner.Status", "StringEquals": "RUNNING"},
                    {"Variable": "$.lock.owner.Status", "StringEquals": "PENDING_REDRIVE"},
                ],
                "Next": "MayWait",
            }
        ],
        "Default": "TakeOverLock",
    }
    states |= call(targets, "TakeOverLock", "dynamodb:putItem", take_over, then=then, catch=[taken], fields=DISCARD)
    states |= {
        "MayWait": {
            "Type": "Choice",
            "Choices": [
                {"Variable": "$.lock.waited", "NumericGreaterThanEqualsPath": "$.lock.wait_minutes", "Next": "LockHeld"},
                {"Variable": "$.lock.wait_minutes", "NumericGreaterThan": LONG_WAIT_MINUTES, "Next": "WaitLong"},
            ],
            "Default": "Wait",
        },
        **_lap("Wait", LAP_MINUTES),
        **_lap("WaitLong", LONG_LAP_MINUTES),
        "LockHeld": {
            "Type": "Pass",
            "Parameters": {
                "result": "failed",
                "state": "AcquireLock",
                "Error": LOCK_HELD,
                "Cause.$": "States.Format('another run holds registry {}: run {} since {}, execution {}. rule: one run per "
                "registry name at a time. remedy: wait for it, or start with lock.wait_minutes', $.registry, "
                "$.lock.seen.Item.run.S, $.lock.seen.Item.since.S, $.lock.seen.Item.owner.S)",
            },
            "ResultPath": "$.outcome",
            "Next": "Notify",
        },
    }
    return states


def _lap(name: str, minutes: int) -> States:
    count = f"Count{name}"
    return {
        name: {"Type": "Wait", "Seconds": minutes * 60, "Next": count},
        count: {
            "Type": "Pass",
            "Parameters": {
                "wait_minutes.$": "$.lock.wait_minutes",
                "waited.$": f"States.MathAdd($.lock.waited, {minutes})",
            },
            "ResultPath": "$.lock",
            "Next": "AcquireLock",
        },
    }


def _write_input(targets: Targets, *, then: str) -> States:
    """`input.json`. The body is an object, not a string: Step Functions writes a string with its quotes escaped."""
    body = {
        "deployment": {
            "config": targets.config,
            "allowed_nodes": sorted(targets.gangs),
            "read": list(targets.read),
            "local_paths": targets.local_paths,
            "prices": {**{queue.value: price for queue, price in targets.prices.items()}, "currency": CURRENCY},
            "hosts": {queue.value: host for queue, host in targets.hosts.items()},
            "embed_hosts": targets.embed_hosts,
        },
        "execution.$": "$.execution",
        "execution_arn.$": "$$.Execution.Id",
    }
    parameters = {
        "Bucket": targets.bucket,
        "Key.$": "States.Format('{}/input.json', $.run.key)",
        "ContentType": "application/json",
        "Body": body,
    }
    return call(targets, "WriteInput", "aws-sdk:s3:putObject", parameters, then=then, fields=DISCARD)


def _read_plan(targets: Targets, *, then: str) -> States:
    return read_result(targets, "ReadPlan", Stage.PREPARE, "$.plan", needed=("nodes", "embed_children"), then=then)


def _choose_gang(targets: Targets, *, then: str) -> States:
    """The plan's node count is in its graphs: it chooses the job definitions, once, for all three gangs."""
    states: States = {
        "ChooseGang": {
            "Type": "Choice",
            "Choices": [
                {"Variable": "$.plan.metrics.nodes", "NumericEquals": nodes, "Next": f"Gang of {nodes}"}
                for nodes in sorted(targets.gangs)
            ],
            "Default": "NoSuchGang",
        }
    }
    for nodes, arns in sorted(targets.gangs.items()):
        states[f"Gang of {nodes}"] = {
            "Type": "Pass",
            "Result": {stage.value: arn for stage, arn in arns.items()},
            "ResultPath": "$.gang",
            "Next": then,
        }
    states["NoSuchGang"] = {
        "Type": "Pass",
        "Parameters": {
            "result": "failed",
            "state": "ChooseGang",
            "Error": "NoSuchGang",
            "Cause.$": "States.Format('the plan asks for {} nodes, for which this deployment has no job definitions. rule: "
            f"nodes is one of {', '.join(map(str, sorted(targets.gangs)))}. remedy: add it to allowed_nodes and deploy', "
            "$.plan.metrics.nodes)",
        },
        "ResultPath": "$.outcome",
        "Next": "report",
    }
    return states


def _choose_compile(*, missing: str, complete: str) -> States:
    """No gang is started to find that there is nothing to compile. Without a clear no the stage is run, and looks for itself."""
    needed = "$.plan.metrics.compile"
    nothing = {"And": [{"Variable": needed, "IsPresent": True}, {"Variable": needed, "BooleanEquals": False}], "Next": complete}
    return {"ChooseCompile": {"Type": "Choice", "Choices": [nothing], "Default": missing}}


def _gate(targets: Targets, *, accepted: str, refused: str) -> States:
    verdict = "$.scorecard.metrics.gate.verdict"
    needed = ("gate.verdict", "gate.reason")
    states = read_result(targets, "ReadScorecard", Stage.EVALUATE, "$.scorecard", needed=needed, then="Gate")
    states["Gate"] = {
        "Type": "Choice",
        "Choices": [
            {"Variable": verdict, "StringEquals": "accepted", "Next": "KeepFigures"},
            {"Variable": verdict, "StringEquals": "refused", "Next": refused},
        ],
        # Nothing is published without a clear yes.
        "Default": "IncompleteScorecard",
    }
    states["KeepFigures"] = {
        "Type": "Pass",
        "Parameters": {"figures.$": "$.scorecard.metrics.gate.reason"},
        "ResultPath": "$.run.words",
        "Next": accepted,
    }
    return states


def _embed(targets: Targets, *, then: str) -> States:
    """An array job; Batch refuses an array of one, which is therefore a plain job."""
    children = "$.plan.metrics.embed_children"
    states: States = {
        "ChooseEmbed": {
            "Type": "Choice",
            "Choices": [{"Variable": children, "NumericGreaterThanEquals": 2, "Next": "embed"}],
            "Default": "embed (single)",
        }
    }
    array = {"ArrayProperties": {"Size.$": children}}
    states |= job(targets, Stage.EMBED, then=then, more=array)
    states |= job(targets, Stage.EMBED, then=then, name="embed (single)")
    return states


def _outcomes(targets: Targets, *, then: str) -> States:
    """How a run can end; every way out passes one of these, or a state that fills `outcome` itself."""
    failure_file = RunPaths("{}").failure(Stage.PREPARE).replace(Stage.PREPARE.value, "{}")
    return {
        "Succeeded": {
            "Type": "Pass",
            "Result": {
                "result": "succeeded",
                "state": Stage.PUBLISH.value,
                "Error": "",
                "Cause": "the model and its embeddings are published",
            },
            "ResultPath": "$.outcome",
            "Next": then,
        },
        "Refused": {
            "Type": "Pass",
            "Parameters": {
                "result": "refused",
                "state": Stage.EVALUATE.value,
                "Error": GATE_REFUSED,
                "Cause.$": "$.scorecard.metrics.gate.reason",
            },
            "ResultPath": "$.outcome",
            "Next": then,
        },
        # `at` names the state and has empty words in case the error came without a cause, as a timeout does.
        "KeepFailure": {
            "Type": "Pass",
            "Parameters": {
                "run.$": "$.run",
                "share.$": "$.share",
                "registry.$": "$.registry",
                "caught.$": "States.JsonMerge($.at, $.caught, false)",
            },
            "Next": "NameFailure",
        },
        # An execution may not end with an error under a name of Step Functions' own (`States.`).
        "NameFailure": {
            "Type": "Pass",
            "Parameters": {
                "result": "failed",
                "state.$": "$.caught.state",
                "stage.$": "$.caught.stage",
                "started.$": "$.caught.started",
                "Error.$": "States.Format('{}: {}', $.caught.state, $.caught.Error)",
                "Cause.$": "$.caught.Cause",
            },
            "ResultPath": "$.outcome",
            "Next": "HasWords",
        },
        "HasWords": {
            "Type": "Choice",
            "Choices": [
                {"Variable": "$.outcome.stage", "StringEquals": "", "Next": "StartedYet"},
            ],
            "Default": "ReadFailure",
        },
        # Before prepare there is nothing to report on, and the run folder may be another run's.
        "StartedYet": {
            "Type": "Choice",
            "Choices": [{"Variable": "$.outcome.started", "BooleanEquals": True, "Next": then}],
            "Default": "OwnsLock",
        },
        "ReadFailure": {
            "Type": "Task",
            "Resource": resource(targets, "aws-sdk:s3:getObject"),
            "Parameters": {
                "Bucket": targets.bucket,
                "Key.$": f"States.Format('{failure_file}', $.run.key, $.outcome.stage)",
            },
            "ResultSelector": {"words.$": "States.StringToJson($.Body)"},
            "ResultPath": "$.failure",
            "TimeoutSeconds": CALL_SECONDS,
            "Retry": call_retry(),
            "Catch": [{"ErrorEquals": ["States.ALL"], "ResultPath": None, "Next": then}],
            "Next": "WordsComplete",
        },
        "WordsComplete": {
            "Type": "Choice",
            "Choices": [
                {
                    "And": [
                        *(
                            {"Variable": f"$.failure.words.{key}", "IsPresent": True}
                            for key in ("exit_code", "what", "value", "rule", "remedy", "time")
                        ),
                        # Both are ISO 8601 in UTC. A run that is taken up again still has the words of the execution before,
                        # which are not about a job that has since been cancelled or killed.
                        {"Variable": "$.failure.words.time", "StringGreaterThanPath": "$.run.since"},
                    ],
                    "Next": "Explain",
                }
            ],
            "Default": then,
        },
        "Explain": {
            "Type": "Pass",
            "Parameters": {
                "result": "failed",
                "state.$": "$.outcome.state",
                "Error.$": "$.outcome.Error",
                "Cause.$": "States.Format('{} ended with exit code {}: {}. value: {}. rule: {}. remedy: {}', $.outcome.state, "
                "$.failure.words.exit_code, $.failure.words.what, States.JsonToString($.failure.words.value), "
                "$.failure.words.rule, $.failure.words.remedy)",
            },
            "ResultPath": "$.outcome",
            "Next": then,
        },
    }


def _ending(targets: Targets) -> States:
    """report, unlock, notify, end. Nothing here masks the outcome: each state's failure goes on to the next."""
    states = job(targets, Stage.REPORT, then="OwnsLock", on_error="OwnsLock")
    release = {
        "TableName": targets.lock_table,
        "Key": {"name": {"S.$": "$.registry"}},
        "ConditionExpression": "#owner = :me",
        "ExpressionAttributeNames": {"#owner": "owner"},
        "ExpressionAttributeValues": {":me": {"S.$": "$$.Execution.Id"}},
    }
    console = targets.console
    lines: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("Run {} {} in {}. {}", ("$.run.id", "$.outcome.result", "$.outcome.state", "$.outcome.Error")),
        ("{}", ("$.outcome.Cause",)),
        ("{}", ("$.run.words.figures",)),
        (f"Report: s3://{targets.bucket}/runs/{{}}/report/index.html {console.report}", ("$.run.id", "$.run.id")),
        (f"Execution: {console.execution}", ("$$.Execution.Id",)),
        (f"Log of its jobs: {console.log}", ("$.run.id",)),
        (f"Dashboard: {console.overview}", ()),
    )
    text = "{}".join(line for line, _ in lines)
    values = [path for _, paths in lines for path in (*paths, "$.run.newline")][:-1]
    message = {
        "TopicArn": targets.topic,
        # At most 100 characters, and no others than those of an execution's name, which has up to 80. What the input calls the
        # run is checked by prepare only, and may be anything.
        "Subject.$": "States.Format('trnpipe: {} {}', $$.Execution.Name, $.outcome.result)",
        "Message.$": f"States.Format('{text}', {', '.join(values)})",
        "MessageAttributes": {"result": {"DataType": "String", "StringValue.$": "$.outcome.result"}},
    }
    states["OwnsLock"] = {
        "Type": "Choice",
        "Choices": [{"Variable": "$.registry", "IsNull": True, "Next": "Notify"}],
        "Default": "ReleaseLock",
    }
    states |= call(targets, "ReleaseLock", "dynamodb:deleteItem", release, then="Notify", on_error="Notify", fields=DISCARD)
    states |= call(targets, "Notify", "sns:publish", message, then="Outcome", on_error="Outcome", fields=DISCARD)
    states["Outcome"] = {
        "Type": "Choice",
        "Choices": [{"Variable": "$.outcome.result", "StringEquals": "succeeded", "Next": "Done"}],
        "Default": "Failed",
    }
    states["Done"] = {"Type": "Succeed"}
    states["Failed"] = {"Type": "Fail", "ErrorPath": "$.outcome.Error", "CausePath": "$.outcome.Cause"}
    return states


class Workflow(Construct):
    """The deployed state machine.

    Attributes:
        state_machine: named after the deployment, so that its own executions can be named in its policy.
        topic: where outcomes are published.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        settings: Settings,
        bucket: s3.IBucket,
        lock_table: dynamodb.ITable,
        topic: sns.ITopic,
        topic_key: kms.IKey,
        queue_arns: Mapping[Queue, str],
        job_arns: Mapping[Stage, str],
        gang_arns: Mapping[int, Mapping[Stage, str]],
        job_names: list[str],
        console: Console,
        log_group: logs.ILogGroup,
    ) -> None:
        super().__init__(scope, construct_id)
        stack = Stack.of(self)
        config = settings.run_config()
        targets = Targets(
            partition=stack.partition,
            console=console,
            bucket=bucket.bucket_name,
            lock_table=lock_table.table_name,
            topic=topic.topic_arn,
            queues=queue_arns,
            jobs=job_arns,
            gangs=gang_arns,
            gang_submit=settings.gang_submit,
            capacity_wait_minutes=settings.capacity_wait_hours * 60,
            config=settings.deployed_config(),
            read=settings.readable(),
            local_paths=settings.local_paths,
            prices=hourly_prices(settings),
            hosts=host_names(settings),
            embed_hosts=most_embed_hosts(settings),
            tags={COST_TAG: settings.name},
            defaults={"share": config.share, "registry": config.registry, "wait_minutes": config.lock.wait_minutes},
        )
        self.state_machine = sfn.StateMachine(
            self,
            "StateMachine",
            state_machine_name=settings.name,
            definition_body=sfn.DefinitionBody.from_string(json.dumps(definition(targets))),
            tracing_enabled=True,
            logs=sfn.LogOptions(destination=log_group, level=sfn.LogLevel.ALL, include_execution_data=True),
        )
        self._grant(settings, bucket, lock_table, topic, topic_key, queue_arns, job_names)

    def _grant(
        self,
        settings: Settings,
        bucket: s3.IBucket,
        lock_table: dynamodb.ITable,
        topic: sns.ITopic,
        topic_key: kms.IKey,
        queue_arns: Mapping[Queue, str],
        job_names: list[str],
    ) -> None:
        """What the states call, action by action; a definition from text brings no permissions of its own."""
        stack = Stack.of(self)
        arn = stack.format_arn
        definitions = [arn(service="batch", resource="job-definition", resource_name=f"{name}:*") for name in job_names]
        jobs = arn(service="batch", resource="job", resource_name="*")
        rule = arn(service="events", resource="rule", resource_name="StepFunctionsGetEventsForBatchJobsRule")
        executions = f"arn:{stack.partition}:states:{stack.region}:{stack.account}:execution:{settings.name}:*"
        statements = [
            (["batch:SubmitJob"], [*definitions, *queue_arns.values()]),
            (["batch:TagResource", "batch:TerminateJob"], [jobs, *definitions]),
            (["batch:DescribeJobs"], ["*"]),
            (["events:PutTargets", "events:PutRule", "events:DescribeRule"], [rule]),
            (["s3:PutObject"], [bucket.arn_for_objects("runs/*/input.json")]),
            # Without it S3 says of an absent object that access is denied.
            (["s3:ListBucket"], [bucket.bucket_arn]),
            (["s3:GetObject"], [bucket.arn_for_objects("runs/*/result.json"), bucket.arn_for_objects("runs/*/failure.json")]),
            (["dynamodb:GetItem", "dynamodb:PutItem", "dynamodb:DeleteItem"], [lock_table.table_arn]),
            (["states:DescribeExecution"], [executions]),
            (["sns:Publish"], [topic.topic_arn]),
            (["kms:GenerateDataKey", "kms:Decrypt"], [topic_key.key_arn]),
        ]
        for actions, resources in statements:
            self.state_machine.add_to_role_policy(iam.PolicyStatement(actions=actions, resources=resources))
