"""Buckets that runs read beside the deployment's own: are they there, and can hosts reach them."""

from __future__ import annotations

from infra.doctor.asking import Denied, Findings, Refused, Subject, check, ok, problem, warning

GONE = ("404", "NoSuchBucket")


@check("Storage", "s3:HeadBucket")
def buckets(subject: Subject) -> Findings:
    settings = subject.settings
    config = settings.run_config()
    uris = [*settings.readable(), *([config.compile.cache] if config.compile.cache else [])]
    for name in sorted({uri.removeprefix("s3://").partition("/")[0] for uri in uris}):
        try:
            region = subject.ask("s3", "HeadBucket", Bucket=name).get("BucketRegion", settings.region)
        except Denied:
            yield warning(
                f"the bucket {name} does not let you look",
                rule="jobs have roles of their own: its policy must let those read, if it is of another account",
                remedy=f"aws s3api get-bucket-policy --bucket {name}, with credentials of its owner",
            )
            continue
        except Refused as refused:
            if refused.code not in GONE:
                raise
            yield problem(
                f"the bucket {name} is not there",
                value=refused,
                rule="the settings name it, so every run would end with 66",
                remedy="correct the URI in `read` or `config`",
            )
            continue
        if region == settings.region:
            yield ok("bucket", f"{name} in {region}")
        elif settings.vpc is None:
            yield problem(
                f"the bucket {name} is in another region",
                value=region,
                rule=f"hosts have no way to the internet, and the S3 endpoint of their VPC reaches {settings.region} only",
                remedy=f"replicate it to {settings.region}, or deploy into a VPC with a NAT gateway",
            )
        else:
            yield warning(
                f"the bucket {name} is in another region",
                value=region,
                rule="gateway endpoints reach buckets of their own region only; what is read through NAT costs by the gigabyte",
                remedy=f"replicate it to {settings.region}",
            )
