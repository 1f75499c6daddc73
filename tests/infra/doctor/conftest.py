"""Fixtures of the doctor's tests: recorded answers, checked against the services' models, and synthesized deployments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import botocore.session
import pytest
from botocore.model import ListShape, MapShape, Shape, StringShape, StructureShape
from botocore.validate import ParamValidator

from infra.cdk_context import read_settings
from infra.doctor.asking import Check, DoctorFinding, Subject
from infra.doctor.blueprint import Blueprint, read_blueprint

ACCOUNT = "123456789012"
Answers = Mapping[str, Any]


@lru_cache
def operation(service: str, name: str) -> Any:
    return botocore.session.get_session().get_service_model(service).operation_model(name)


def wrong_shape(value: Any, shape: Shape) -> Iterator[str]:
    """Yield the violations of a shape in a value: unknown members, wrong types, words outside an enumeration."""
    if report := ParamValidator().validate(value, shape).generate_report():
        yield report
    yield from _outside_enumeration(value, shape)


def _outside_enumeration(value: Any, shape: Shape) -> Iterator[str]:
    if isinstance(shape, StructureShape) and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _outside_enumeration(inner, shape.members[key])
    elif isinstance(shape, ListShape):
        for inner in value:
            yield from _outside_enumeration(inner, shape.member)
    elif isinstance(shape, MapShape):
        for inner in value.values():
            yield from _outside_enumeration(inner, shape.value)
    elif isinstance(shape, StringShape) and shape.enum and value not in shape.enum:
        yield f"{value!r} is none of {shape.enum}"


class Recorded:
    """Answers as an account gave them: `service:Operation` -> answer, an error, or a function of the parameters.

    Every request and every answer must be as the service's model describes it.
    """

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, service: str, name: str, **parameters: Any) -> dict[str, Any]:
        self.asked.append((f"{service}:{name}", parameters))
        model = operation(service, name)
        if model.input_shape is not None:
            assert not list(wrong_shape(parameters, model.input_shape)), (service, name, parameters)
        answer = self.answers[f"{service}:{name}"]
        if callable(answer):
            answer = answer(parameters)
        if isinstance(answer, Exception):
            raise answer
        # CloudFormation's templates, which are objects by themselves, are text in the model.
        shown = {key: value for key, value in answer.items() if key != "TemplateBody"}
        assert not list(wrong_shape(shown, model.output_shape)), (service, name, answer)
        return dict(answer)


@pytest.fixture(scope="session")
def blueprint(deployment: Any) -> Blueprint:
    """The deployment of cdk.json, with a VPC of its own."""
    return read_blueprint(deployment.folder, read_settings(deployment.context))


@pytest.fixture(scope="session")
def other_blueprint(other_deployment: Any) -> Blueprint:
    """An existing VPC, a capacity reservation, images of its own, inf2 for embed, addresses to notify."""
    return read_blueprint(other_deployment.folder, read_settings(other_deployment.context))


@pytest.fixture(scope="session")
def smoke_blueprint(smoke_deployment: Any) -> Blueprint:
    """Small hosts without accelerators."""
    return read_blueprint(smoke_deployment.folder, read_settings(smoke_deployment.context))


@pytest.fixture(scope="session")
def gpu_blueprint(gpu_deployment: Any) -> Blueprint:
    """Hosts with GPUs."""
    return read_blueprint(gpu_deployment.folder, read_settings(gpu_deployment.context))


Look = Callable[..., list[DoctorFinding]]


@pytest.fixture
def look() -> Look:
    """Run one check over recorded answers."""

    def run(check: Check, blueprint: Blueprint, answers: Answers, *, after: bool = False, **settings: Any) -> list[DoctorFinding]:
        if settings:
            blueprint = dataclasses.replace(blueprint, settings=blueprint.settings.model_copy(update=settings))
        return check(Subject(blueprint=blueprint, account=ACCOUNT, after=after, ask=Recorded(answers)))

    return run


def bad(findings: list[DoctorFinding]) -> list[tuple[str, str]]:
    """Level and sentence of everything that is not well."""
    return [(finding.level, finding.what) for finding in findings if finding.level != "ok"]


@pytest.fixture(name="bad", scope="session")
def _bad() -> Callable[[list[DoctorFinding]], list[tuple[str, str]]]:
    return bad


@pytest.fixture(scope="session")
def recorded() -> type[Recorded]:
    return Recorded
