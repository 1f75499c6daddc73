"""Resuming another run's training in another world: fewer nodes than planned are available, or more.

The order of pairs depends on the bins of a step alone (pipeline/dataset/sampler), so that a checkpoint of step n says for any
number of ranks which pairs have been used, as long as ranks x micro-batches x accumulation and the bins stay what they were.
"""

from __future__ import annotations

from pipeline import store
from pipeline.config import KeyRole, ModelConfig, TrainConfig, keys_of
from pipeline.contract import RunPaths
from pipeline.dataset.steps import step_bins
from pipeline.errors import BadConfig, MissingInput
from pipeline.log import log
from pipeline.plan import ResumedRun, RunPlan
from pipeline.training.checkpoint import MANIFEST_FILE

FREE = frozenset(keys_of(KeyRole.RESUMABLE, TrainConfig))
"""Settings of `train` that may differ: what they decide is compared by itself, or changes nothing of what is computed."""


def resumed_run(plan: RunPlan, paths: RunPaths) -> ResumedRun | None:
    """Return the run whose training this plan resumes, None if it names none. Where that has no checkpoint, the one it resumed.

    Raises:
        MissingInput: there is no such run, or it has no plan or no checkpoint.
        BadConfig: its training is another one.
    """
    name = plan.config.train.resume
    if name is None:
        return None
    earlier = RunPlan.from_json(store.read_bytes(RunPaths(f"{paths.bucket_root}/runs/{name}").plan))
    before, now = _training_facts(earlier), _training_facts(plan)
    differences = [f"{name}: {value} there, {now[name]} here" for name, value in before.items() if value != now[name]]
    if differences:
        raise BadConfig(
            "the run that train.resume names trained something else",
            value=differences,
            rule="parent, rows, steps, bins (ranks x train.micro_batches x train.accumulation in a step) and the settings of"
            " train and model are the same; nodes and ranks may differ",
            remedy="set them as they were there, with data.train naming the same shards, or leave train.resume out; on half the"
            " ranks, double train.accumulation, or train.batch_size, train.batch_tokens and train.micro_batches",
        )
    compete = [one.world.ranks * one.config.train.batch_size for one in (earlier, plan)]
    if compete[0] != compete[1]:
        log.warning("documents that compete for a query: %d until now, %d from now on", *compete)
    folder = RunPaths(f"{paths.bucket_root}/runs/{name}").checkpoints
    if any(one.uri.endswith(MANIFEST_FILE) for one in store.list_objects(folder)):
        return ResumedRun(run=name, fingerprint=earlier.fingerprint)
    if earlier.train.resumed:
        return earlier.train.resumed
    raise MissingInput(
        "the run that train.resume names has no checkpoint",
        value=folder,
        rule="train leaves one every train.checkpoint_every steps; they go after retention.resume_days",
        remedy="leave train.resume out: training then begins with the parent",
    )


def _training_facts(plan: RunPlan) -> dict[str, object]:
    """Return name -> value of everything that must be the same."""
    config, train = plan.config, plan.config.train
    return {
        **{f"train.{name}": getattr(train, name) for name in sorted(type(train).model_fields.keys() - FREE)},
        **{f"model.{name}": getattr(config.model, name) for name in keys_of(KeyRole.LEARNED, ModelConfig)},
        "seed": config.seed,
        "parent's weights (sha256)": plan.parent.sha256,
        "training rows (sha256)": plan.row_files["train.arrow"].sha256,
        "steps": plan.train.steps,
        "bins of a step": step_bins(config, plan.world.ranks),
        "rows, tokens and pairs of a bin": train.bin_shape[:3],
    }
