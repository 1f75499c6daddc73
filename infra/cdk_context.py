"""CDK context: reads cdk.json and `-c` options, and makes the deployment's `Settings` of them. The only reader of CDK context.

Values come from three places, later ones over earlier ones: the object under `trnpipe` in `cdk.json`; with `-c env=prod` the file
`infra/environments/prod.yaml`; and every `-c trnpipe.region=us-east-2` (the value is YAML). Sections are merged key by key, lists
and plain values are replaced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from infra.setting_sections import InvalidSetting
from infra.settings import Settings
from pipeline.config import load_config_file, merge, parse_settings, section_of
from pipeline.errors import BadConfig

CDK_JSON = Path(__file__).parent.parent / "cdk.json"
CONTEXT_KEY = "trnpipe"
ENVIRONMENT_KEY = "env"
ENVIRONMENTS = Path(__file__).parent / "environments"


def parse_context(items: Sequence[str]) -> dict[str, str]:
    """Parse `-c KEY=VALUE` options; later ones take precedence.

    Raises:
        BadConfig: an item is not KEY=VALUE.
    """
    context = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not key or not separator:
            raise BadConfig(
                "an option of the context is not KEY=VALUE",
                value=f"-c {item}",
                rule="as after `cdk deploy -c`",
                remedy="e.g. -c trnpipe.region=us-east-2",
            )
        context[key] = value
    return context


def read_context(path: Path = CDK_JSON) -> dict[str, Any]:
    """Read the context of a cdk.json file.

    Raises:
        BadConfig: no such file, or not JSON.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise BadConfig("cdk.json cannot be read", value=f"{path}: {error}", remedy="restore the file") from error
    if not isinstance(loaded, dict) or not isinstance(loaded.get("context"), dict):
        raise BadConfig("cdk.json has no context", value=path, remedy="restore the file")
    return dict(loaded["context"])


def read_settings(context: Mapping[str, Any], environments: Path = ENVIRONMENTS) -> Settings:
    """Make settings of CDK context: the object under `trnpipe`, the file of the environment under `env`, every `trnpipe.KEY`.

    Args:
        environments: folder of the environments' files.

    Raises:
        BadConfig: a missing, unknown or wrong value, or an unknown environment.
    """
    values = context.get(CONTEXT_KEY)
    if not isinstance(values, Mapping):
        raise BadConfig(
            "the settings are missing",
            value=values,
            rule=f"the CDK context has an object under {CONTEXT_KEY!r}",
            remedy="run in the folder of cdk.json, or pass the context yourself",
        )
    if (name := context.get(ENVIRONMENT_KEY)) is not None:
        values = merge(values, read_environment(name, environments))
    prefix = f"{CONTEXT_KEY}."
    given = [f"{key.removeprefix(prefix)}={value}" for key, value in context.items() if key.startswith(prefix)]
    try:
        return Settings.model_validate(merge(values, parse_settings(given)))
    except ValidationError as error:
        raise _bad_settings(error) from error


def read_environment(name: object, folder: Path = ENVIRONMENTS) -> dict[str, Any]:
    """Read the settings of one environment, which take precedence over those of cdk.json.

    Raises:
        BadConfig: unknown environment, or its file is no YAML object.
    """
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    # Only names of files that were found: none leads to another folder.
    if name not in known:
        raise BadConfig(
            "unknown environment",
            value=f"-c {ENVIRONMENT_KEY}={name}",
            rule="an environment is a file of its name, NAME.yaml, in infra/environments",
            remedy=f"name one of: {', '.join(known)}; or write infra/environments/NAME.yaml (example.yaml explains it)",
        )
    return load_config_file(folder / f"{name}.yaml")


def _bad_settings(error: ValidationError) -> BadConfig:
    found, rules, remedies = [], [], []
    for item in error.errors():
        where = ".".join((CONTEXT_KEY, *map(str, item["loc"])))
        message = item["msg"].removeprefix("Value error, ")
        refused = item.get("ctx", {}).get("error")
        if isinstance(refused, InvalidSetting):
            rules.append(refused.rule)
            remedies.append(refused.remedy)
        elif item["type"] == "missing":
            described = _description(tuple(map(str, item["loc"])))
            remedies.append(f"set {where}" + (f": {described.rstrip('.')}" if described else ""))
        shown = item["type"] != "missing" and bool(item["loc"])
        found.append(f"{where} = {item['input']!r}: {message}" if shown else f"{where}: {message}")
    return BadConfig(
        "the settings of this deployment are not valid",
        value=found,
        rule="; ".join(filter(None, dict.fromkeys(rules))) or "infra/settings.py describes every setting",
        remedy="; ".join(dict.fromkeys(remedies)) or "correct cdk.json, the environment's file, or the -c option",
    )


def _description(names: tuple[str, ...]) -> str | None:
    """The description of a setting in its section."""
    section: type[BaseModel] | None = Settings
    described = None
    for name in names:
        # Keys of a mapping are no fields.
        if section and (field := section.model_fields.get(name)):
            section, described = section_of(field.annotation), field.description
    return described
