"""The MCP server: tools for models, over the same `Service` and `Sessions` as every other surface."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, InputRequiredResult, Tool, ToolAnnotations
from pydantic import ValidationError

from belljar.core import errors
from belljar.core.version import __version__
from belljar.service.mcp import content as answer
from belljar.service.mcp import sdk
from belljar.service.mcp.boxes import Boxes
from belljar.service.mcp.calls import CallerOf, Calls, OperatorGrants, listed
from belljar.service.mcp.files import FileTools
from belljar.service.mcp.previews import PreviewTools
from belljar.service.mcp.processes import ProcessTools
from belljar.service.mcp.tests import TestTools
from belljar.service.mcp.tools import Tools
from belljar.service.previews.previews import Previews
from belljar.service.sandboxes.sandboxes import Sandboxes
from belljar.service.service import Service
from belljar.service.sessions import Sessions

ALIASES = frozenset(("run_code",))  # names that can be called, and are not listed


class ToolServer(MCPServer[Any]):
    """The SDK's, with our errors: they name the argument, and say what to do; and with names that are not listed."""

    async def list_tools(self) -> list[Tool]:
        """Lists one tool for each job: a second name for one would only cost every conversation its description."""
        return [tool for tool in await super().list_tools() if tool.name not in ALIASES]

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        given = {argument: value for argument, value in arguments.items() if value is not None}  # null: left out
        try:
            self._check_names(name, given)
            return await super().call_tool(name, given, context)
        except errors.BelljarError as error:
            return answer.of_problem(error)
        except ToolError as error:
            if isinstance(error.__cause__, errors.BelljarError):
                return answer.of_problem(error.__cause__)
            if isinstance(error.__cause__, ValidationError):
                return answer.of_problem(errors.from_validation(error.__cause__, name))
            raise

    def _check_names(self, name: str, given: dict[str, Any]) -> None:
        """Refuses arguments that the tool does not have: to ignore them would be to ignore what was asked for."""
        schema = sdk.input_schema(self, name)
        known = schema["properties"] if schema else given
        if unknown := [argument for argument in given if argument not in known]:
            message, fix = errors.unknown_name(unknown[0], known, f"argument of {name}")
            raise errors.InvalidRequest(message, fix=fix)


def create_server(
    service: Service, sessions: Sessions, caller_of: CallerOf, *, grants: OperatorGrants | None = None,
    previews: Previews | None = None,
) -> ToolServer:  # fmt: skip
    """Returns the server with all its tools.

    Args:
        service: what runs things.
        sessions: what callers hold open.
        caller_of: finds who calls.
        grants: what its operator lets models' code have.
        previews: those of the service around it; None: its own, seen at ports of this machine.
    """
    logging.getLogger("mcp").setLevel(logging.WARNING)  # below that it logs the ids of MCP sessions
    calls = Calls(service, sessions, caller_of, grants)
    tools, net = Tools(calls, boxes := Boxes(calls)), bool(calls.hosts)
    server = ToolServer(
        "belljar", title="Belljar", version=__version__, subscriptions=False, log_level="WARNING",
        description="Runs code that nobody has read yet, where it can do no harm.",
        instructions=(
            "Runs code in sandboxes. A program's own failure is a normal answer: read its status, mend the code, run "
            "it again. An answer with isError was refused, or is Belljar's fault. For one program, execute_code; to "
            'work on a project (files, servers, tests), session_open(kind="sandbox"), whose session_id the other tools '
            f"take. Network: {listed(calls.hosts)} be reached.{_folders_told(grants or OperatorGrants())}"
        ),
    )  # fmt: skip
    once = _once(net, "write" in calls.folders)
    tests = (TestTools(calls, boxes).run_tests, "Run tests", _hints(destroys=True, net=net))  # in a session, maybe
    given = [*_run_tools(tools, net, once), tests, *_process_tools(ProcessTools(calls, boxes), net)]
    previews = previews or Previews(service, sessions, Sandboxes(service, sessions))
    given += _preview_tools(PreviewTools(calls, previews), net)
    for tool, title, hints in [*given, *_file_tools(FileTools(calls, boxes))]:
        server.add_tool(tool, title=title, annotations=hints, structured_output=True)
    alias = f"The same as execute_code, under the name that other servers use. {Tools.execute_code.__doc__}"
    server.add_tool(
        tools.execute_code, "run_code", title="Run code", description=alias, annotations=once,
        structured_output=True,
    )  # fmt: skip
    sdk.refuse_unknown_arguments(server)
    return server


def _folders_told(grants: OperatorGrants) -> str:
    change = "may be changed" if grants.write else "is read-only"
    told = f" The user's folder is at /workspace and {change}." if grants.workspace else ""
    return told + (" Python has the user's packages." if grants.packages else "")


def _once(net: bool, writes: bool) -> ToolAnnotations:
    """A fresh sandbox is thrown away: nothing changes, however often it is done. But what goes out to a host may change
    and destroy there what it likes, and so may code in a folder that it may write to: then the worst is said. Never
    read-only: it uses the machine."""
    lasting = net or writes
    return ToolAnnotations(
        read_only_hint=False, destructive_hint=lasting, idempotent_hint=not lasting, open_world_hint=net
    )


def _hints(*, reads: bool = False, destroys: bool = False, again: bool = False, net: bool = False) -> ToolAnnotations:
    return ToolAnnotations(
        read_only_hint=reads, destructive_hint=destroys, idempotent_hint=again or reads, open_world_hint=net
    )


_Row = tuple[Callable[..., Any], str, ToolAnnotations]


def _run_tools(tools: Tools, net: bool, once: ToolAnnotations) -> list[_Row]:
    """What a session's code does, it may do to that session's files and variables: that is the environment meant."""
    return [
        (tools.execute_code, "Execute code", once),
        (tools.execute_file, "Execute a file", once),
        (tools.run_command, "Run a command", _hints(destroys=True, net=net)),  # in a session, if one is named
        (tools.session_open, "Open a session", _hints()),
        (tools.session_run, "Run in a session", _hints(destroys=True, net=net)),
        (tools.session_fork, "Fork a session", _hints()),
        (tools.session_close, "Close a session", _hints(destroys=True, again=True)),
        (tools.list_languages, "List languages", _hints(reads=True)),
    ]


def _process_tools(tools: ProcessTools, net: bool) -> list[_Row]:
    return [
        (tools.start_process, "Start a process", _hints(destroys=True, net=net)),
        (tools.read_output, "Read a process's output", _hints(reads=True)),
        (tools.write_input, "Write to a process", _hints(destroys=True, net=net)),  # a shell does what it is told
        (tools.wait_for_port, "Wait for a port", _hints(reads=True)),
        (tools.list_processes, "List processes", _hints(reads=True)),
        (tools.stop_process, "Stop a process", _hints(destroys=True, again=True)),
    ]


def _preview_tools(tools: PreviewTools, net: bool) -> list[_Row]:
    return [
        (tools.start_preview, "Start a preview", _hints(destroys=True, net=net)),
        (tools.preview_status, "Look at a preview", _hints(reads=True)),
        (tools.stop_preview, "Stop a preview", _hints(destroys=True, again=True)),
    ]


def _file_tools(tools: FileTools) -> list[_Row]:
    return [
        (tools.file_write, "Write a file", _hints(destroys=True, again=True)),
        (tools.file_read, "Read a file", _hints(reads=True)),
        (tools.file_edit, "Edit a file", _hints(destroys=True)),
        (tools.file_list, "List files", _hints(reads=True)),
    ]
