"""The OpenAPI document is what the server does: schemathesis makes up requests from it, good and bad ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import checks

from belljar.service.api import create_app
from belljar.settings import Settings
from serving import served

pytestmark = pytest.mark.engine
_CONFIG = '[service]\nrate = "100000/minute"\nsessions = 2\n'
_CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


schema = schemathesis.openapi.from_dict(create_app(Settings()).openapi())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(MAX_CONTAINERS="4", SANDBOX_GLOBAL_MAX_TIMEOUT_SECONDS="2", config=_CONFIG) as server:
        yield server.url


@schema.parametrize()
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_one_that_the_document_promises(case: schemathesis.Case, url: str) -> None:
    answer = case.call(base_url=url, timeout=30)
    assert answer.status_code != 500, answer.text  # 503 may be true of an engine that is not here
    case.validate_response(answer, checks=_CHECKS)
