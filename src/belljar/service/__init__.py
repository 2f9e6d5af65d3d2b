"""The engine as a service: HTTP, WebSocket and MCP over one path, with records, logs, figures and access.

api, tools      surfaces: routes and MCP tools; parse, ask, print
core            the only one that starts runs and sessions of others
access          who asks, and whether they may; admission: when it is their turn
logs            lines with numbers, live and later
store, bus      where records and events go; sync carries them to a shared store
observe         figures, alerts, spans
records         the data that all of them speak
"""
