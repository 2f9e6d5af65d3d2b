"""All routes of living sandboxes."""

from fastapi import APIRouter

from belljar.service.http.sandboxes import files, interpreters, life, links, ports, processes, snapshots

ROUTERS: tuple[APIRouter, ...] = (
    life.router, processes.router, processes.raw, files.router, files.raw, ports.router, interpreters.router,
    snapshots.router, links.router, links.public,
)  # fmt: skip
