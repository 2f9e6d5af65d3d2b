"""The OpenAPI document is what the server does: schemathesis makes up requests from it, good and bad ones."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import checks

from belljar.core.model import Model
from belljar.core.settings import Settings
from belljar.service.http import openapi as examples
from belljar.service.http.app import create_app
from lanes import examples as budget
from serving import served

pytestmark = pytest.mark.engine
_CONFIG = '[service]\nrate = "100000/minute"\nsessions = 2\n'
_CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


document = create_app(Settings()).openapi()
# Without the schemes of keys: else most requests would carry a made-up one, and be answered with 401.
open_document = copy.deepcopy(document)
del open_document["components"]["securitySchemes"]
for _operation in (each for methods in open_document["paths"].values() for each in methods.values()):
    _operation.pop("security", None)
schema = schemathesis.openapi.from_dict(open_document)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(MAX_CONTAINERS="4", SANDBOX_GLOBAL_MAX_TIMEOUT_SECONDS="2", config=_CONFIG) as server:
        yield server.url


@schema.parametrize()
@settings(max_examples=budget(20), deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_one_that_the_document_promises(case: schemathesis.Case, url: str) -> None:
    answer = case.call(base_url=url, timeout=30)
    assert answer.status_code != 500, answer.text  # 503 may be true of an engine that is not here
    case.validate_response(answer, checks=_CHECKS)


def exchanged() -> set[str]:
    """The names of all that is sent or answered, alone or as the items of a list."""
    found = set()
    for operation in (each for methods in document["paths"].values() for each in methods.values()):
        for side in (operation.get("requestBody", {}), *operation["responses"].values()):
            for content in side.get("content", {}).values():
                found |= set(re.findall(r"#/components/schemas/(\w+)", str(content)))
    return found


def test_whatever_is_sent_or_answered_has_an_example_that_is_one_of_its_kind() -> None:
    kinds: dict[str, type[Model]] = {type(each).__name__: type(each) for each in examples.BODIES + examples.ANSWERS}
    assert {"Execute", "Executed", "RunRecord", "Problem", "Readiness", "BackendLanguage"} <= exchanged()
    for name in exchanged():
        shown: list[Any] = document["components"]["schemas"][name].get("examples", [])
        assert shown, f"{name} has no example"
        for example in shown:
            understood = kinds[name].model_validate(example).model_dump(mode="json")
            assert understood | example == understood, name


def test_the_document_says_how_a_key_is_sent_and_that_probes_need_none() -> None:
    schemes = document["components"]["securitySchemes"]
    assert {(each["type"], each.get("scheme") or each.get("name")) for each in schemes.values()} == {
        ("http", "bearer"), ("apiKey", "X-API-Key"),
    }  # fmt: skip
    for path, methods in document["paths"].items():
        for operation in methods.values():
            wanted = {name for each in operation.get("security", ()) for name in each}
            assert wanted == (set() if path in ("/healthz", "/readyz") else set(schemes)), path


def test_every_parameter_has_an_example() -> None:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert all("example" in each for each in operation.get("parameters", ())), path


def test_every_answer_in_json_has_a_model_and_is_not_just_any_object() -> None:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                told = answer.get("content", {}).get("application/json")
                assert told is None or "#/components/schemas/" in str(told), (path, status)
