"""The engine as a service: HTTP, WebSocket and MCP over one path, with records, logs, metrics and access control.

http, mcp          surfaces: they parse, authenticate, ask `service` and answer
service            admits, records, queues and runs requests of others; its parts are `run_lifecycle`, `queries`,
                   `repeats`, `drain`, `recovery`, `refusals` and `publisher`
sessions, claims   sessions that callers hold open over several requests
auth, admission    who asks, and whether they may; when it is their turn
store, bus, sinks  where records and events go; `store.sync` carries records to a shared store
telemetry          log lines, samples, alerts, metrics
"""
