"""A living sandbox over HTTP, as tests use it."""

from __future__ import annotations

from typing import Any

import httpx2

from attaching import Attached
from witness import eventually

SANDBOXES = "/api/sandboxes"
SECONDS = 30.0


class OpenBox:
    """One that is open: `box.post("pause")`, `box.start("sleep 9")`, `box.attach("processes/p1/terminal")`."""

    def __init__(self, http: httpx2.Client, url: str, id: str) -> None:
        self.http = http
        self.url = url
        self.id = id
        self.path = f"{SANDBOXES}/{id}"

    @classmethod
    def opened(cls, http: httpx2.Client, url: str, **body: object) -> OpenBox:
        answer = http.post(SANDBOXES, json={"backend": "native"} | body)
        assert answer.status_code == 201, answer.text
        return cls(http, url, answer.json()["id"])

    def get(self, route: str = "", /, **params: Any) -> httpx2.Response:
        return self.http.get(f"{self.path}/{route}".rstrip("/"), params=params)

    def post(self, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        return self.http.post(f"{self.path}/{path}", json=body, headers=headers)

    def put(self, route: str, content: Any, /, **params: Any) -> httpx2.Response:
        return self.http.put(f"{self.path}/{route}", content=content, params=params)

    def delete(self, route: str = "", /, **params: Any) -> httpx2.Response:
        return self.http.delete(f"{self.path}/{route}".rstrip("/"), params=params)

    def start(self, command: str | list[str], **body: object) -> str:
        answer = self.post("processes", {"command": command} | body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def process(self, id: str) -> dict[str, Any]:
        told: dict[str, Any] = self.get(f"processes/{id}").json()
        return told

    def ended(self, id: str) -> dict[str, Any]:
        told: dict[str, Any] = self.get(f"processes/{id}/wait", timeout=SECONDS).json()
        assert told["state"] != "running", told
        return told

    def said(self, id: str, text: str) -> str:
        """Waits until a process has written something; all of its output so far."""
        heard = ""

        def look() -> bool:
            nonlocal heard
            heard = "".join(str(chunk["data"]) for chunk in self.get(f"processes/{id}/output").json()["chunks"])
            return text in heard

        assert eventually(look, SECONDS), heard[-1000:]
        return heard

    def sh(self, line: str) -> str:
        told = self.post("run", {"command": ["sh", "-c", line]}).json()
        assert told["exit_code"] == 0, told
        return str(told["stdout"])

    def attach(self, path: str, **rest: Any) -> Attached:
        return Attached(self.url, f"{self.path}/{path}", **rest)
