"""What we need of the package `mcp` that it keeps to itself: the only module that touches its private attributes.

A release of the package that changes one of them breaks here, and nowhere else.
"""

from __future__ import annotations

from typing import Any

from mcp.server.mcpserver import MCPServer


def input_schema(server: MCPServer[Any], tool: str) -> dict[str, Any] | None:
    """Returns the JSON schema of a tool's arguments; None if there is no such tool."""
    return server._tool_input_schema(tool)


def refuse_unknown_arguments(server: MCPServer[Any]) -> None:
    """Says in the schema of every tool that it has no arguments but those listed."""
    for tool in server._tool_manager.list_tools():
        tool.parameters["additionalProperties"] = False


async def serve(server: MCPServer[Any], read: Any, write: Any) -> None:
    """Answers what comes on one stream on the other, until the first one ends."""
    lowlevel = server._lowlevel_server
    await lowlevel.run(read, write, lowlevel.create_initialization_options())
