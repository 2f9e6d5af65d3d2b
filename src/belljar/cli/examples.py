"""Examples at the end of each command's help: what a newcomer would type first."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "run": (
        "belljar run -c 'print(6 * 7)'",
        "belljar run script.py -- --verbose input.txt   (what follows -- is the script's)",
        "belljar run plot.py --collect '*.png' --out results",
        "belljar run report.py --workspace . --timeout 60 --memory 1G",
        "echo 'console.log(1)' | belljar run --language javascript -",
    ),
    "session": (
        "belljar session",
        "belljar session --backend wasm --timeout 10   (can :checkpoint, :fork and :rollback)",
        "belljar session --out figures",
        "echo '6 * 7' | belljar session --json",
    ),
    "exec": (
        "belljar exec --workspace . -- pytest -q",
        "belljar exec --workspace . --rw -- sh -c 'make && make check'",
        "belljar exec --backend docker --image alpine:3.22 -- uname -a",
    ),
    "test": (
        "belljar test",
        "belljar test . --packages pytest --coverage -- pytest -q tests",
        "belljar test . --failed",
        "belljar test . --report 'build/**/*.xml' --junit results.xml -- make check",
    ),
    "shell": (
        "belljar shell",
        "belljar shell --workspace . --rw --net packages.example.org",
        "belljar shell bs-2e667e04c622411a   (one of a server; Ctrl-] three times leaves it)",
    ),
    "open": (
        "belljar open --label task=42 --expires 8h",
        "belljar open --snapshot snap-0123456789abcdef --json",
    ),
    "close": ("belljar close bs-2e667e04c622411a",),
    "ps": ("belljar ps", "belljar ps --label task=42 --json", "belljar ps bs-2e667e04c622411a --all"),
    "start": (
        "belljar start bs-2e667e04c622411a -- npm run dev",
        "belljar start bs-2e667e04c622411a --pty -- bash",
        "belljar start bs-2e667e04c622411a -- 'make && ./serve > log'",
    ),
    "attach": ("belljar attach bs-2e667e04c622411a p1", "belljar attach bs-2e667e04c622411a p1 --json"),
    "cp": (
        "belljar cp project bs-2e667e04c622411a:/workspace",
        "belljar cp bs-2e667e04c622411a:out/report.pdf .",
    ),
    "port": ("belljar port bs-2e667e04c622411a 3000", "belljar port bs-2e667e04c622411a 3000 8000"),
    "pause": ("belljar pause bs-2e667e04c622411a",),
    "resume": ("belljar resume bs-2e667e04c622411a",),
    "extend": ("belljar extend bs-2e667e04c622411a 2h",),
    "network": (
        "belljar network bs-2e667e04c622411a allow example.org python-packages",
        "belljar network bs-2e667e04c622411a deny example.org",
    ),
    "snapshot": ("belljar snapshot bs-2e667e04c622411a --label step=1",),
    "preview": (
        "belljar preview",
        "belljar preview web --port 5173 --open -- npm run dev",
        "belljar preview web --live --api http://127.0.0.1:9000   (your own backend answers /api)",
    ),
    "snapshots": ("belljar snapshots", "belljar snapshots --remove snap-0123456789abcdef"),
    "fork": ("belljar fork bs-2e667e04c622411a",),
    "doctor": ("belljar doctor", "belljar doctor --json"),
    "setup": ("belljar setup wasm", "belljar setup docker"),
    "languages": ("belljar languages",),
    "mcp": (
        "belljar mcp install claude-code   (shows what it would change, and asks)",
        "belljar mcp --workspace . --net packages.example.org",
        "belljar mcp --http --port 8081",
    ),
    "serve": ("belljar serve", "belljar serve --host 0.0.0.0 --port 8080   (needs a key first)"),
    "top": ("belljar top", "belljar top --once --json"),
    "keys": ("belljar keys create alice --scope run --scope read", "belljar keys list"),
    "records": ("belljar records list", "belljar records show ID"),
    "packages": ("belljar packages list", "belljar packages prune --keep 1G"),
    "images": ("belljar images list", "belljar images build", "belljar images pull python:3.12-slim"),
    "profiles": ("sudo belljar profiles install", "belljar profiles status", "belljar profiles show apparmor"),
    "audit": ("belljar audit show", "belljar audit verify"),
    "attack": ("belljar attack", "belljar attack --backend native"),
    "conformance": ("belljar conformance --backend native",),
    "socket-proxy": ("belljar socket-proxy --help",),
    "version": ("belljar version", "belljar --version"),
}


def epilog(command: str) -> str | None:
    """Returns the examples of a command as the end of its help; line breaks are kept."""
    lines = [f"  {line}" for example in EXAMPLES.get(command, ()) for line in example.splitlines()]
    return "\n".join(("\b", "Examples:", *lines)) if lines else None
