"""The state machine: one execution is one run. Its definition is plain data, so that it can be read and tested without CDK;
infra/constructs/workflow.py deploys it.

    read and check the input ─► lock ─► prepare ─► (ingest) ─► (mine) ─► plan ─► health_check ─► (compile) ─► train ─► evaluate
                                           ▲                              └─► embed ─► publish ─┐                         │
                                           └────────────────────────────────────────────────────│────── gate ◄────────────┘
    every other way out ─► keep the failure ─► its words ───────────────────────► report ─► unlock ─► notify ─► end

With compile.where = cpu, collect and precompile come before health_check when compiled sets are missing.
After the gate the run comes back to prepare: the corpus is listed as it is by then, and embedded with the new model, or with
the published one where the new one is refused. A refresh goes straight there. publish sends the run back once more if documents
have changed meanwhile.

The machine's data, from `Settings` on: {execution, share, registry, mode, lock, run: {id, key, uri, since, words, newline}}, and
at the end `outcome`: {result: succeeded | refused | failed, state, Error, Cause}. `run.words.figures` is what the gate said once
it has accepted the model; a line break for the notification comes as data, because no document says how a States.Format has one.
"""

from __future__ import annotations

from typing import Any

from infra.workflow.states import (
    CALL_SECONDS,
    DISCARD,
    State,
    States,
    Targets,
    call,
    call_retry,
    gang,
    job,
    outcome,
    read_result,
    resource,
)
from pipeline.contract import GATE_REFUSED, RunPaths, Stage

LOCK_HELD = "LockHeld"
INPUT_REFUSED = "InputRefused"
"""Errors of the machine's own under which an execution ends, besides `NoSuchGang` and those of infra/workflow/states.py."""

LOCK_NAME = "States.Format('{}/{}', $.registry, $.mode)"

NO_WORDS_YET = {"words": {"figures": ""}, "newline": "\n"}

LAP_MINUTES = 1
LONG_LAP_MINUTES = 60
LONG_WAIT_MINUTES = 120
"""A wait for the lock longer than this takes long laps: a lap makes 18 events (`infra.workflow.states.OTHER_EVENTS`)."""

LONGEST_WAIT_MINUTES = 7 * 24 * 60
"""The configuration's limit too, which no state checks before it holds the lock; a longer wait would use up the events."""


def definition(targets: Targets) -> dict[str, Any]:
    """The state machine in the Amazon States Language (JSONPath)."""
    return {
        "Comment": "One weekly run: retrain a text encoder, judge it, embed the corpus, publish both together.",
        "StartAt": "ReadInput",
        "States": {
            **_input_states(targets, then="NeedsLock"),
            **_lock_states(targets, then="WriteInput"),
            **_write_input(targets, then="prepare"),
            **job(targets, Stage.PREPARE, then="ReadInputs"),
            **read_result(
                targets, "ReadInputs", Stage.PREPARE, "$.inputs", needed=("ingest_children", "mine_children"), then="ChooseIngest"
            ),
            **_array(targets, Stage.INGEST, "$.inputs.metrics.ingest_children", then="ChooseMine", none="ChooseMine"),
            **_array(targets, Stage.MINE, "$.inputs.metrics.mine_children", then="plan", none="plan"),
            **job(targets, Stage.PLAN, then="ReadPlan"),
            **read_result(
                targets, "ReadPlan", Stage.PLAN, "$.plan", needed=("nodes", "embed_children", "next"), then="ChooseNext"
            ),
            "ChooseNext": {
                "Type": "Choice",
                "Choices": [{"Variable": "$.plan.metrics.next", "StringEquals": Stage.EMBED.value, "Next": "ChooseEmbed"}],
                "Default": "ChooseGang",
            },
            **_choose_gang(targets, then="ChoosePrecompile"),
            **_choose("ChoosePrecompile", "precompile", says=True, then="collect", otherwise="health_check"),
            **gang(targets, Stage.COLLECT, then="precompile"),
            **job(targets, Stage.PRECOMPILE, then="health_check"),
            **gang(targets, Stage.HEALTH_CHECK, then="ChooseCompile"),
            # Without a word of plan's, compile looks for itself.
            **_choose("ChooseCompile", "compile", says=False, then="train", otherwise="compile"),
            **gang(targets, Stage.COMPILE, then="train"),
            **gang(targets, Stage.TRAIN, then="evaluate"),
            **job(targets, Stage.EVALUATE, then="ReadScorecard"),
            **_gate(targets, then="prepare", refused="Refused"),
            **_array(targets, Stage.EMBED, "$.plan.metrics.embed_children", then="publish"),
            **job(targets, Stage.PUBLISH, then="ReadPublication"),
            **_after_publish(targets, again="prepare", done="Succeeded", refused="RefusedAndRefreshed"),
            **_outcomes(targets, then="report"),
            **_ending(targets),
        },
    }


def _input_states(targets: Targets, *, then: str) -> States:
    """Check that the input is an object with usable values before anything starts; fill in missing values."""
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
                    "mode": "train",
                },
            },
            "Next": "CheckInput",
        },
        "CheckInput": {
            "Type": "Choice",
            "Choices": [{"Variable": "$.text", "StringMatches": "{*", "Next": "MergeInput"}],
            "Default": "NotAnObject",
        },
        "NotAnObject": outcome(
            "Notify",
            result="failed",
            state="CheckInput",
            Error=INPUT_REFUSED,
            Cause="the execution's input is not a JSON object. rule: it is a partial run configuration, {} at the least. "
            "remedy: see `trnpipe config schema`",
        ),
        "MergeInput": _with_input("States.JsonMerge($.defaults, $.execution, false)"),
        **_check_values(targets, then="Settings"),
        "Settings": {
            "Type": "Pass",
            "Parameters": {
                "execution.$": "$.execution",
                "share.$": "$.input.share",
                "registry.$": "$.input.registry",
                "mode.$": "$.input.mode",
                "lock": {"wait_minutes.$": "$.input.lock.wait_minutes"},
                "run": {
                    "id.$": "$.input.run",
                    "key.$": "States.Format('runs/{}', $.input.run)",
                    "uri.$": f"States.Format('s3://{targets.bucket}/runs/{{}}', $.input.run)",
                    "since.$": "$$.State.EnteredTime",
                    **NO_WORDS_YET,
                },
            },
            "Assign": {"waited": 0},
            "Next": then,
        },
    }


def _check_values(targets: Targets, *, then: str) -> States:
    wait, run, registry = "$.input.lock.wait_minutes", "$.input.run", "$.input.registry"
    has_wait = {"Variable": wait, "IsPresent": True}
    wrong: tuple[dict[str, Any], ...] = (
        {"Not": {"Variable": "$.input.share", "IsString": True}},
        {"Not": {"Variable": "$.input.mode", "IsString": True}},
        {"And": _neither(registry, "IsNull", "IsString")},
        {"And": _neither(run, "IsNull", "IsString")},
        # Neither of them is in a run id, and both lead out of the run's folder.
        {"And": [{"Variable": run, "IsString": True}, {"Variable": run, "StringMatches": "*/*"}]},
        {"And": [{"Variable": run, "IsString": True}, {"Variable": run, "StringMatches": "*.*"}]},
        {"And": [has_wait, {"Not": {"Variable": wait, "IsNumeric": True}}]},
        {"And": [has_wait, {"Variable": wait, "NumericGreaterThan": LONGEST_WAIT_MINUTES}]},
    )
    return {
        "CheckValues": {
            "Type": "Choice",
            "Choices": [
                *({**rule, "Next": "WrongValue"} for rule in wrong),
                # prepare checks everything else, in words that name the key and the rule.
                {"Not": has_wait, "Next": "DefaultWait"},
                {"Variable": run, "IsNull": True, "Next": "NameRun"},
            ],
            "Default": then,
        },
        "WrongValue": outcome(
            "Notify",
            result="failed",
            state="CheckValues",
            Error=INPUT_REFUSED,
            Cause="share, mode, run, registry or lock.wait_minutes cannot be used. rule: share and mode are strings; run and "
            f"registry are strings or null, run without slashes and dots; lock.wait_minutes is a number up to "
            f"{LONGEST_WAIT_MINUTES}. remedy: see `trnpipe config schema`",
        ),
        "DefaultWait": {
            "Type": "Pass",
            "Result": {"wait_minutes": targets.defaults["wait_minutes"]},
            "ResultPath": "$.input.lock",
            "Next": "CheckValues",
        },
        "NameRun": _with_input("States.JsonMerge($.input, $.named, false)"),
    }


def _with_input(value: str) -> State:
    """A state that replaces `input` by the value of an intrinsic function, and has it checked."""
    return {
        "Type": "Pass",
        "Parameters": {"execution.$": "$.execution", "named.$": "$.named", "run.$": "$.run", "input.$": value},
        "Next": "CheckValues",
    }


def _neither(path: str, *tests: str) -> list[dict[str, Any]]:
    return [{"Not": {"Variable": path, test: True}} for test in tests]


def _lock_states(targets: Targets, *, then: str) -> States:
    """One run and one refresh per registry name at a time: a run holds its lock for days, which no refresh waits for.

    An owner that no longer runs has lost its lock: it is taken over by compare-and-swap.
    """
    put = {
        "TableName": targets.lock_table,
        "Item": {
            "name": {"S.$": LOCK_NAME},
            "owner": {"S.$": "$$.Execution.Id"},
            "run": {"S.$": "$.run.id"},
            "since": {"S.$": "$$.State.EnteredTime"},
        },
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
    read = {"TableName": targets.lock_table, "Key": {"name": {"S.$": LOCK_NAME}}, "ConsistentRead": True}
    taken = {"ErrorEquals": ["DynamoDB.ConditionalCheckFailedException"], "ResultPath": None, "Next": "ReadLock"}
    return {
        "NeedsLock": {
            "Type": "Choice",
            "Choices": [{"Variable": "$.registry", "IsNull": True, "Next": then}],
            "Default": "AcquireLock",
        },
        **call(targets, "AcquireLock", "dynamodb:putItem", acquire, then=then, catch=[taken], fields=DISCARD),
        **call(targets, "ReadLock", "dynamodb:getItem", read, then="LockSeen", fields={"ResultPath": "$.lock.seen"}),
        "LockSeen": {
            "Type": "Choice",
            "Choices": [{"Variable": "$.lock.seen.Item", "IsPresent": True, "Next": "ReadOwner"}],
            "Default": "AcquireLock",
        },
        **_look_at_owner(targets, runs="MayWait", gone="TakeOverLock"),
        **call(targets, "TakeOverLock", "dynamodb:putItem", take_over, then=then, catch=[taken], fields=DISCARD),
        **_wait_for_lock(),
    }


def _look_at_owner(targets: Targets, *, runs: str, gone: str) -> States:
    absent = {"ErrorEquals": ["Sfn.ExecutionDoesNotExistException"], "ResultPath": None, "Next": gone}
    alive = [{"Variable": "$.lock.owner.Status", "StringEquals": status} for status in ("RUNNING", "PENDING_REDRIVE")]
    return {
        **call(
            targets,
            "ReadOwner",
            "aws-sdk:sfn:describeExecution",
            # Without input and output, which could exceed what a state may hold.
            {"ExecutionArn.$": "$.lock.seen.Item.owner.S", "IncludedData": "METADATA_ONLY"},
            then="OwnerRuns",
            catch=[absent],
            fields={"ResultSelector": {"Status.$": "$.Status"}, "ResultPath": "$.lock.owner"},
        ),
        "OwnerRuns": {"Type": "Choice", "Choices": [{"Or": alive, "Next": runs}], "Default": gone},
    }


def _wait_for_lock() -> States:
    return {
        "MayWait": {
            "Type": "Choice",
            "Choices": [
                {"Variable": "$waited", "NumericGreaterThanEqualsPath": "$.lock.wait_minutes", "Next": "LockHeld"},
                {"Variable": "$.lock.wait_minutes", "NumericGreaterThan": LONG_WAIT_MINUTES, "Next": "WaitLong"},
            ],
            "Default": "Wait",
        },
        "Wait": _lap(LAP_MINUTES),
        "WaitLong": _lap(LONG_LAP_MINUTES),
        "LockHeld": outcome(
            "Notify",
            result="failed",
            state="AcquireLock",
            Error=LOCK_HELD,
            Cause="States.Format('another run holds registry {}: run {} since {}, execution {}. rule: one run, and one refresh, "
            "per registry name at a time. remedy: wait for it, or start with lock.wait_minutes', $.registry, "
            "$.lock.seen.Item.run.S, $.lock.seen.Item.since.S, $.lock.seen.Item.owner.S)",
        ),
    }


def _lap(minutes: int) -> State:
    return {
        "Type": "Wait",
        "Seconds": minutes * 60,
        "Assign": {"waited.$": f"States.MathAdd($waited, {minutes})"},
        "Next": "ReadLock",
    }


def _write_input(targets: Targets, *, then: str) -> States:
    """`input.json`. The body is an object, not a string: Step Functions writes a string with its quotes escaped."""
    return call(
        targets,
        "WriteInput",
        "aws-sdk:s3:putObject",
        {
            "Bucket": targets.bucket,
            "Key.$": "States.Format('{}/input.json', $.run.key)",
            "ContentType": "application/json",
            "Body": {
                "deployment": dict(targets.deployment),
                "execution.$": "$.execution",
                "execution_arn.$": "$$.Execution.Id",
            },
        },
        then=then,
        fields=DISCARD,
    )


def _choose_gang(targets: Targets, *, then: str) -> States:
    """The plan's node count is in its graphs: it chooses the job definitions, once, for all gangs."""
    gangs = sorted(targets.gangs.items())
    return {
        "ChooseGang": {
            "Type": "Choice",
            "Choices": [
                {"Variable": "$.plan.metrics.nodes", "NumericEquals": nodes, "Next": f"Gang of {nodes}"} for nodes, _ in gangs
            ],
            "Default": "NoSuchGang",
        },
        **{
            f"Gang of {nodes}": {
                "Type": "Pass",
                "Result": {stage.value: arn for stage, arn in arns.items()},
                "ResultPath": "$.gang",
                "Next": then,
            }
            for nodes, arns in gangs
        },
        "NoSuchGang": outcome(
            "report",
            result="failed",
            state="ChooseGang",
            Error="NoSuchGang",
            Cause="States.Format('the plan asks for {} nodes, for which this deployment has no job definitions. rule: "
            f"nodes is one of {', '.join(str(nodes) for nodes, _ in gangs)}. remedy: add it to allowed_nodes and deploy', "
            "$.plan.metrics.nodes)",
        ),
    }


def _choose(name: str, metric: str, *, says: bool, then: str, otherwise: str) -> States:
    """Continue with `then` only where plan's metric has this value."""
    path = f"$.plan.metrics.{metric}"
    clear = {"And": [{"Variable": path, "IsPresent": True}, {"Variable": path, "BooleanEquals": says}], "Next": then}
    return {name: {"Type": "Choice", "Choices": [clear], "Default": otherwise}}


def _gate(targets: Targets, *, then: str, refused: str) -> States:
    """Go on to embed with the new model, or with the published one if the run can; `refused` is the end of a run that cannot."""
    verdict, reason, refresh = "gate.verdict", "gate.reason", "refresh"
    return {
        **read_result(targets, "ReadScorecard", Stage.EVALUATE, "$.scorecard", needed=(verdict, reason, refresh), then="Gate"),
        "Gate": {
            "Type": "Choice",
            "Choices": [
                {"Variable": f"$.scorecard.metrics.{verdict}", "StringEquals": "accepted", "Next": "KeepFigures"},
                {"Variable": f"$.scorecard.metrics.{verdict}", "StringEquals": "refused", "Next": "MayRefresh"},
            ],
            # Nothing is published without a clear yes.
            "Default": "IncompleteScorecard",
        },
        "KeepFigures": {
            "Type": "Pass",
            "Parameters": {"figures.$": f"$.scorecard.metrics.{reason}"},
            "ResultPath": "$.run.words",
            "Next": then,
        },
        "MayRefresh": {
            "Type": "Choice",
            "Choices": [{"Variable": f"$.scorecard.metrics.{refresh}", "BooleanEquals": True, "Next": then}],
            "Default": refused,
        },
    }


def _after_publish(targets: Targets, *, again: str, done: str, refused: str) -> States:
    needed = ("again", "refused", "model", "documents")
    return {
        **read_result(targets, "ReadPublication", Stage.PUBLISH, "$.publication", needed=needed, then="ChooseEnd"),
        "ChooseEnd": {
            "Type": "Choice",
            "Choices": [
                {"Variable": "$.publication.metrics.again", "BooleanEquals": True, "Next": again},
                {"Variable": "$.publication.metrics.refused", "IsString": True, "Next": refused},
            ],
            "Default": done,
        },
    }


def _array(targets: Targets, stage: Stage, children: str, *, then: str, none: str | None = None) -> States:
    """An array job; Batch refuses an array of one, which is therefore a plain job.

    Args:
        children: path of the number of them.
        none: the next state if there are none; None: there always are some.
    """
    single = f"{stage.value} (single)"
    return {
        f"Choose{stage.value.capitalize()}": {
            "Type": "Choice",
            "Choices": [
                *([{"Variable": children, "NumericEquals": 0, "Next": none}] if none else []),
                {"Variable": children, "NumericGreaterThanEquals": 2, "Next": stage.value},
            ],
            "Default": single,
        },
        **job(targets, stage, then=then, more={"ArrayProperties": {"Size.$": children}}),
        **job(targets, stage, then=then, name=single),
    }


def _outcomes(targets: Targets, *, then: str) -> States:
    """The outcomes of a run; every way out passes one of these, or a state that fills `outcome` itself."""
    return {
        "Succeeded": outcome(
            then,
            result="succeeded",
            state=Stage.PUBLISH.value,
            Error="",
            Cause="States.Format('embedded with the model of run {}: {} documents', $.publication.metrics.model, "
            "$.publication.metrics.documents)",
        ),
        "RefusedAndRefreshed": outcome(
            then,
            result="refused",
            state=Stage.EVALUATE.value,
            Error=GATE_REFUSED,
            Cause="States.Format('{}; the documents are embedded with the model of run {}', $.publication.metrics.refused, "
            "$.publication.metrics.model)",
        ),
        "Refused": outcome(
            then,
            result="refused",
            state=Stage.EVALUATE.value,
            Error=GATE_REFUSED,
            Cause="$.scorecard.metrics.gate.reason",
        ),
        # `at` names the state and has empty words in case the error came without a cause, as a timeout does.
        "KeepFailure": {
            "Type": "Pass",
            "Parameters": {
                "run.$": "$.run",
                "share.$": "$.share",
                "registry.$": "$.registry",
                "mode.$": "$.mode",
                "caught.$": "States.JsonMerge($.at, $.caught, false)",
            },
            "Next": "NameFailure",
        },
        # An execution may not end with an error under a name of Step Functions' own (`States.`).
        "NameFailure": outcome(
            "HasWords",
            result="failed",
            state="$.caught.state",
            stage="$.caught.stage",
            started="$.caught.started",
            Error="States.Format('{}: {}', $.caught.state, $.caught.Error)",
            Cause="$.caught.Cause",
        ),
        "HasWords": {
            "Type": "Choice",
            "Choices": [{"Variable": "$.outcome.stage", "StringEquals": "", "Next": "StartedYet"}],
            "Default": "ReadFailure",
        },
        # Before prepare there is nothing to report on, and the run folder may be another run's.
        "StartedYet": {
            "Type": "Choice",
            "Choices": [{"Variable": "$.outcome.started", "BooleanEquals": True, "Next": then}],
            "Default": "OwnsLock",
        },
        **_failure_words(targets, then=then),
    }


def _failure_words(targets: Targets, *, then: str) -> States:
    """Explain a stage's failure by its failure.json, if this execution wrote one."""
    failure_file = RunPaths("{}").failure(Stage.PREPARE).replace(Stage.PREPARE.value, "{}")
    words = "$.failure.words"
    complete = [
        *({"Variable": f"{words}.{key}", "IsPresent": True} for key in ("exit_code", "what", "value", "rule", "remedy", "time")),
        # Both are ISO 8601 in UTC. A resumed run still has the words of the execution before, which are not
        # about a job that has since been cancelled or killed.
        {"Variable": f"{words}.time", "StringGreaterThanPath": "$.run.since"},
    ]
    return {
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
        "WordsComplete": {"Type": "Choice", "Choices": [{"And": complete, "Next": "Explain"}], "Default": then},
        "Explain": outcome(
            then,
            result="failed",
            state="$.outcome.state",
            Error="$.outcome.Error",
            Cause="States.Format('{} ended with exit code {}: {}. value: {}. rule: {}. remedy: {}', $.outcome.state, "
            f"{words}.exit_code, {words}.what, States.JsonToString({words}.value), {words}.rule, {words}.remedy)",
        ),
    }


def _ending(targets: Targets) -> States:
    """report, unlock, notify, end. Nothing here masks the outcome: after a failure each state continues with the next."""
    release = {
        "TableName": targets.lock_table,
        "Key": {"name": {"S.$": LOCK_NAME}},
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
    return {
        **job(targets, Stage.REPORT, then="OwnsLock", on_error="OwnsLock"),
        "OwnsLock": {
            "Type": "Choice",
            "Choices": [{"Variable": "$.registry", "IsNull": True, "Next": "Notify"}],
            "Default": "ReleaseLock",
        },
        **call(targets, "ReleaseLock", "dynamodb:deleteItem", release, then="Notify", on_error="Notify", fields=DISCARD),
        **call(targets, "Notify", "sns:publish", message, then="Outcome", on_error="Outcome", fields=DISCARD),
        "Outcome": {
            "Type": "Choice",
            "Choices": [{"Variable": "$.outcome.result", "StringEquals": "succeeded", "Next": "Done"}],
            "Default": "Failed",
        },
        "Done": {"Type": "Succeed"},
        "Failed": {"Type": "Fail", "ErrorPath": "$.outcome.Error", "CausePath": "$.outcome.Cause"},
    }
