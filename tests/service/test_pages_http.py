"""The pages for people: where things are, and the API to read and to try, from this server alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx2
import pytest

import belljar
from serving import Server, served

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served() as it:
        yield it


def policy(answer: httpx2.Response) -> dict[str, list[str]]:
    rules = [rule.split() for rule in answer.headers["content-security-policy"].split(";")]
    return {rule[0]: rule[1:] for rule in rules}


def test_a_program_is_told_where_things_are_as_json_and_a_browser_as_a_page(server: Server) -> None:
    told = httpx2.get(f"{server.url}/", headers={"Accept": "application/json"})
    assert (told.json()["name"], told.json()["version"]) == ("belljar", belljar.__version__)
    page = httpx2.get(f"{server.url}/", headers={"Accept": "text/html,application/xhtml+xml"})
    assert page.headers["content-type"].startswith("text/html")
    assert {told.headers["vary"], page.headers["vary"]} == {"Accept"}
    for path in told.json()["links"].values():
        assert f'href="{path.lstrip("/")}"' in page.text
        assert httpx2.get(f"{server.url}{path}", timeout=60).status_code != 404, path
    assert "<script" not in page.text


def test_the_api_is_shown_by_files_of_this_server_alone(server: Server) -> None:
    page = httpx2.get(f"{server.url}/docs")
    assert page.status_code == 200
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(links) == 4
    for link in links:
        if link == "data:,":
            continue
        assert "//" not in link
        asset = httpx2.get(f"{server.url}/{link}")
        assert (asset.status_code, asset.headers["x-content-type-options"]) == (200, "nosniff")
        assert asset.headers["content-type"].split(";")[0] in ("text/javascript", "text/css")
        assert len(asset.content) > 100
    assert "SwaggerUIBundle" in httpx2.get(f"{server.url}/docs/assets/start.js").text
    rules = policy(page)
    assert (rules["default-src"], rules["script-src"], rules["connect-src"]) == (["'none'"], ["'self'"], ["'self'"])


def test_no_other_file_of_that_package_or_this_machine_is_served(server: Server) -> None:
    for name in ("redoc.standalone.js", "..%2f__init__.py", "%2e%2e/core.py", "../../../etc/passwd"):
        answer = httpx2.get(f"{server.url}/docs/assets/{name}")
        assert answer.status_code == 404, name
        assert json.loads(answer.text)["kind"] in ("not_found", "http")
