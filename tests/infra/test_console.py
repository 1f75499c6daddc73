"""Links into the console."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import unquote

import pytest

from infra.console import Console

CONSOLE = Console(region="us-west-2", bucket="the-bucket", job_logs="/search/jobs", dashboard="search")


def test_the_log_s_link_says_group_and_run_as_the_console_escapes_them() -> None:
    link = CONSOLE.log.format("week-1")
    home, _, place = link.partition("#")
    assert home == "https://console.aws.amazon.com/cloudwatch/home?region=us-west-2"
    assert place == "logsV2:log-groups/log-group/$252Fsearch$252Fjobs/log-events$3FfilterPattern$3D$2522week-1$2522"
    # What the console makes of it.
    assert (
        unquote(unquote(place.replace("$", "%"))) == 'logsV2:log-groups/log-group//search/jobs/log-events?filterPattern="week-1"'
    )


@pytest.mark.parametrize(
    ("region", "domain"),
    [
        ("eu-central-1", "console.aws.amazon.com"),
        ("cn-north-1", "console.amazonaws.cn"),
        ("us-gov-west-1", "console.amazonaws-us-gov.com"),
    ],
)
def test_every_link_leads_to_the_region_s_own_console(region: str, domain: str) -> None:
    console = replace(CONSOLE, region=region)
    links = [console.execution, console.log, console.report, console.overview, console.job_log_group, console.bucket_objects]
    for link in [*links, console.machine("arn")]:
        assert link.startswith(f"https://{domain}/"), link
        assert f"region={region}" in link, link
    for link in links[:3]:
        assert link.count("{}") == 1, link
