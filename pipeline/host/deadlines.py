"""The waits of the supervisor."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated

import msgspec

from pipeline.errors import BadConfig
from pipeline.run.heartbeat import COMPILE_PATIENCE

Seconds = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Every wait of the supervisor in seconds; each can be set by TRNPIPE_<NAME>, e.g. TRNPIPE_PROGRESS_SECONDS=1800.

    Attributes:
        startup_seconds: from a rank's start to its first heartbeat. Importing the frameworks from a cold image takes a minute.
        progress_seconds: between two heartbeats. The slowest single things between two are the rendezvous of a gang whose
            hosts are still being started and the upload of a large checkpoint. A rank that compiles asks for longer.
        patience_seconds: the longest that a heartbeat may ask for; on Batch the whole attempt.
        publish_seconds: between two looks into the run folder, and two signs of life left there.
        peer_grace_seconds: from one rank's failure until the node's other ranks are ended: time to say what they saw.
        upload_seconds: then until they are killed: time for a checkpoint on its way. Together with `stale_seconds` and the one
            before it stays below the minute in which a gang ends that has lost a node.
        stop_seconds: from SIGTERM to SIGKILL. Batch leaves a container 30 seconds between its own two.
        stale_seconds: silence after which a node of the gang counts as gone: several publications long, and short enough for
            the main node to end within a minute of the loss.
        peer_start_seconds: for the other nodes of a gang to show themselves. Batch starts them after the main node, and each
            pulls an image; less than progress_seconds, so that the missing node is named rather than the waiting rank.
        settle_seconds: for the nodes of a gang to say how they ended, once one has failed.
        outlive_seconds: for other nodes to finish what they still upload, when the main node is done.
        attempt_seconds: after which Batch ends the attempt; infinite outside Batch.
        wind_down_seconds: before that, for a stage that resumes: time to end a step and to upload a checkpoint. At most a quarter
            of the attempt.
    """

    startup_seconds: Seconds = 600
    progress_seconds: Seconds = 900
    patience_seconds: Seconds = COMPILE_PATIENCE
    publish_seconds: Seconds = 2
    peer_grace_seconds: Seconds = 5
    upload_seconds: Seconds = 15
    stop_seconds: Seconds = 20
    stale_seconds: Seconds = 30
    peer_start_seconds: Seconds = 720
    settle_seconds: Seconds = 15
    outlive_seconds: Seconds = 600
    attempt_seconds: Seconds = math.inf
    wind_down_seconds: Seconds = 600

    @property
    def lead_seconds(self) -> float:
        """Seconds before the attempt's end at which a stage that resumes is interrupted."""
        return min(self.wind_down_seconds, self.attempt_seconds / 4)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Deadlines:
        """Read the variables that are set; the others have their defaults.

        Raises:
            BadConfig: a variable is not a number of seconds.
        """
        found = {each.name: text for each in fields(cls) if (text := environment.get(f"TRNPIPE_{each.name.upper()}"))}
        # What may take as long as the whole attempt, a compilation, may take as long as the deployment's attempts do.
        patience = found.get("attempt_seconds", COMPILE_PATIENCE)
        try:
            return msgspec.convert({"patience_seconds": patience, **found}, cls, strict=False)
        except msgspec.ValidationError as error:
            raise BadConfig(
                "invalid deadline",
                value=[f"TRNPIPE_{name.upper()}={text}" for name, text in found.items()],
                rule=f"a number of seconds: {error}",
                remedy="correct it in the deployment's setting `environment`",
            ) from error
