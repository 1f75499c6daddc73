"""Vectors of a hold-out's texts: a run keeps its model's, and takes the published model's from the run that made it.

A hold-out has most texts of the week before. Their vectors would be computed in other batches now, which in fp32 changes them by
about 1e-7: far less than what the gate compares. So they are taken where all else is the same: the token ids, the weights, the
kind of device and its precision, the lengths, the compiled forms, and the installed packages.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline import store
from pipeline.backends.device import Device
from pipeline.contract import RunPaths, Stage, StageResult
from pipeline.errors import BadData, MissingInput, one_line
from pipeline.evaluation.statistics import Integers
from pipeline.evaluation.vectors import Vectors, kept_vectors
from pipeline.host.host import versions
from pipeline.log import log
from pipeline.model.inference import TokenList
from pipeline.plan import RunPlan
from pipeline.run.context import StageContext
from pipeline.run_inputs import Published


def published_vectors(
    context: StageContext, published: Published, device: Device, texts: Sequence[TokenList]
) -> tuple[Integers, Vectors] | None:
    """Return where each text's vector stands among the published model's kept ones, (N,), -1 for none; and those, (n, D) and
    mapped into memory. None: none of them can be used.

    Args:
        device: on which the model would encode them.
    """
    try:
        paths = RunPaths(f"{context.paths.bucket_root}/runs/{published.run}")
        plan = RunPlan.from_json(store.read_bytes(paths.plan))
        result = StageResult.from_json(store.read_bytes(paths.result(Stage.EVALUATE)))
        graphs = context.plan.graphs
        facts = {
            "weights": (result.inputs["model"].sha256, published.sha256),
            "device": ((plan.world.kind, plan.world.precision), (device.kind, device.precision)),
            "lengths": (plan.config.embed.length, context.plan.config.embed.length),
            "compiled forms": (plan.graphs and plan.graphs.infer, graphs and graphs.infer),
            "packages": (result.versions, versions()),
        }
        reason = ", ".join(f"different {name}" for name, (found, expected) in facts.items() if found != expected)
        if not reason:
            return kept_vectors(store.local_file(paths.vectors, context.scratch / "kept"), texts)
    except (MissingInput, BadData) as error:
        reason = one_line(error)
    except (KeyError, IndexError, ValueError, EOFError) as error:
        reason = repr(error)
    log.info("no vectors of the published model are reused: %s", reason)
    return None
