"""Examples of what is sent and answered about living sandboxes, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from belljar.core.box_snapshot import BoxSnapshot
from belljar.core.model import Model
from belljar.core.net_change import NetworkRecord
from belljar.core.process import BoxProcess, Chunk, FileStat, PtySize
from belljar.protocol import living, previews

_LABEL = "bs-7d1e60b2c94f4a35-bb8-6af9e1c0-r5qgpmxgse3rpaz5ejutc3spda"
_SANDBOX, _AT = "bs-7d1e60b2c94f4a35", 1_794_787_200.25

BODIES: tuple[Model, ...] = (
    living.OpenSandbox(backend="native", labels={"task": "42"}, expires=3600.0),
    living.Extend(seconds=600.0),
    living.ChangeNetwork(allow=("example.org", "*.example.net"), deny=("files.example.net",)),
    living.SandboxTurn(command=("ls", "-la"), cwd="app"),
    living.SandboxTurn(code="print(6 * 7)"),
    living.StartProcess(command="npm run dev", cwd="app", environment={"PORT": "3000"}),
    living.StartProcess(command="bash", pty=PtySize(columns=80, rows=24), id="shell"),
    living.SendSignal(signal="TERM"),
    living.Resize(columns=120, rows=40),
    living.MakeDir(path="out/plots"),
    living.MoveFile(path="a.txt", to="b.txt"),
    living.OpenInterpreter(language="python"),
    living.InterpreterTurn(code="x = 41"),
    living.Complete(text="os.pa"),
    living.MakeSnapshot(labels={"task": "42"}),
    living.ForkSandbox(),
    living.MakeLink(path="out/report.pdf", seconds=600),
    previews.StartPreview(project_path="/srv/projects/web", command="npm run dev", port=5173),
    previews.ExtendPreview(seconds=1800.0),
    previews.ExposePort(seconds=600.0),
)
_STAT = FileStat(path="/workspace/notes.txt", kind="file", size=120, mode=0o644, modified=_AT)
_CHUNK = Chunk(seq=7, stream="stdout", data=b"listening on 3000\n")
ANSWERS: tuple[Model, ...] = (
    living.SandboxRecord(
        id=_SANDBOX, caller="ci", backend="native", created=_AT, expires=_AT + 3600, labels={"task": "42"},
        features=("dial", "pause", "pty", "watch"), interpreters=("bash", "python"),
    ),
    living.ProcessRecord(id="p1", pid=7, command="npm run dev", state="running", started=_AT, last=7),
    living.SignalSent(sent=True),
    living.StdinWritten(written=6),
    _CHUNK,
    living.OutputPage(chunks=(_CHUNK,), last=7, over=False),
    BoxProcess(pid=7, command="node server.js", started=_AT, cpu_ms=120.5, memory=41_943_040),
    _STAT,
    living.FilePage(files=(_STAT,)),
    living.Exists(exists=True),
    living.Made(made=True),
    living.Listening(listening=True),
    living.InterpreterRecord(id="bi-4cb0e21d90f6a357", language="python", turns=2),
    living.Interrupted(interrupted=True),
    BoxSnapshot(
        id="snap-8c1f0a3b5d7e9f24", created=_AT, labels={"task": "42"}, size=20_480, files=3, stored=8_192,
        folders=("/home/user", "/workspace"), box=_SANDBOX, backend="native", quiet=True, owner="ci",
    ),
    living.SignedLink(url="/links/eyJzYW5kYm94?signature=5f1c", method="GET", expires=_AT + 600),
    living.Names(names=("path", "pathsep")),
    NetworkRecord(mode="listed", net=("*.example.net", "example.org"), denied=("files.example.net",)),
    previews.PreviewRecord(
        container_id=_SANDBOX, url=f"http://{_LABEL}.localhost:8080/", path_url=f"/preview/{_LABEL}/", status="running",
        logs=("ready in 320 ms",), port=5173, expires=_AT + 1800,
        findings=(
            previews.PreviewFinding(
                kind="missing", message="Cannot find module 'left-pad'", suggestion="install it", timestamp=_AT
            ),
        ),
    ),
    previews.ExposedPort(
        url=f"http://{_LABEL}.localhost:8080/", path_url=f"/preview/{_LABEL}/", port=3000, expires=_AT + 600
    ),
)  # fmt: skip
PARAMETERS: dict[str, Any] = {
    "label": ["task:42"], "process": "p1", "since": 7, "wait": 0, "timeout": 30, "depth": 1, "mode": "755",
    "Range": "bytes=0-99", "port": 3000, "interpreter": "bi-4cb0e21d90f6a357",
    "snapshot": "snap-8c1f0a3b5d7e9f24",
}  # fmt: skip
