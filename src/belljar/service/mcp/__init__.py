"""The MCP surface, over stdio and HTTP."""
