"""Buckets that runs read besides the deployment's own: whether they exist, hosts reach them, and jobs may decrypt them."""

from __future__ import annotations

from infra.doctor.asking import Denied, Findings, Refused, Subject, check, ok, problem, warning
from infra.settings import Settings

GONE = ("404", "NoSuchBucket")


def bucket_names(settings: Settings) -> list[str]:
    """The buckets of all inputs and of a shared compile cache, sorted."""
    config = settings.run_config()
    uris = [*settings.readable(), *([config.compile.cache] if config.compile.cache else [])]
    return sorted({uri.removeprefix("s3://").partition("/")[0] for uri in uris})


@check("Storage", "s3:HeadBucket")
def buckets(subject: Subject) -> Findings:
    settings = subject.settings
    for name in bucket_names(settings):
        try:
            region = subject.ask("s3", "HeadBucket", Bucket=name).get("BucketRegion", settings.region)
        except Denied:
            yield warning(
                f"the bucket {name} denies access to these credentials",
                rule="jobs have roles of their own: its policy must let those read, if it is of another account",
                remedy=f"aws s3api get-bucket-policy --bucket {name}, with credentials of its owner",
            )
            continue
        except Refused as refused:
            if refused.code not in GONE:
                raise
            yield problem(
                f"the bucket {name} does not exist",
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
                rule="gateway endpoints reach buckets of their own region only; reads through NAT are charged by the gigabyte",
                remedy=f"replicate it to {settings.region}",
            )


@check("Model")
def initial_model(subject: Subject) -> Findings:
    if subject.settings.run_config().model.initial is None:
        yield warning(
            "model.initial is not set",
            rule="the first run has no published model to continue from: without an initial one it ends with 64",
            remedy="set model.initial in the deployment's `config`, or pass it to the first `trnpipe start`",
        )


@check("Storage", "s3:GetBucketEncryption")
def encryption(subject: Subject) -> Findings:
    settings = subject.settings
    keys = (*settings.kms_keys, *([settings.customer_key] if settings.customer_key else []))
    for name in bucket_names(subject.settings):
        absent = (*GONE, "ServerSideEncryptionConfigurationNotFoundError")
        try:
            answer = subject.seek(absent, "s3", "GetBucketEncryption", Bucket=name)
        except Denied:
            yield warning(
                f"the encryption of the bucket {name} cannot be read",
                rule="jobs may decrypt with the keys under `kms_keys` only",
                remedy=f"aws s3api get-bucket-encryption --bucket {name}, with credentials of its owner",
            )
            continue
        rules = answer["ServerSideEncryptionConfiguration"]["Rules"] if answer else []
        used = [rule.get("ApplyServerSideEncryptionByDefault", {}).get("KMSMasterKeyID", "") for rule in rules]
        # Without a key, or with AWS's own, every principal of the account may decrypt through S3.
        for key in (key for key in used if key and "alias/aws/" not in key):
            if any(known == key or known.endswith(f"/{key}") for known in keys):
                yield ok("encryption", f"{name}: {key}")
            elif ":alias/" in key or key.startswith("alias/"):
                yield warning(
                    f"the bucket {name} names its key by an alias",
                    value=key,
                    rule="`kms_keys` has the ARN of the key behind it",
                    remedy=f"aws kms describe-key --key-id {key} --query KeyMetadata.Arn prints the ARN: is it there?",
                )
            else:
                yield problem(
                    f"jobs may not decrypt the bucket {name}",
                    value=key,
                    rule="S3 returns an encrypted object only to roles that may decrypt with its key",
                    remedy=f"add the ARN of {key} to `kms_keys` and deploy",
                )
