"""The messages between the host and its worker, as types. Both ends are ours; what a guest says is only carried.

The worker's stdin is a socket. A request is one line of JSON; file descriptors come along where a copy of a memory
goes out or in. Where a message has `payload`, that many raw bytes follow its line: they are a session agent's own
JSON, which the worker passes on without reading it.

    in   {"run": 1, "do": "run", "main": "/workspace/main.py", "env": {...}, "memory": 536870912, ...}
    out  {"stream": "stdout", "data": "<base64>"}        as the guest writes it
    out  {"fuel": 1370386}         if its time is up and it seems to wait for something: it may have to be ended with us
    out  {"done": 1, "exit_code": 0, "trap": "", "memory": 41943040, "fuel": 1370386, "cpu_ms": 3.1}

    do: run       runs a program in a fresh instance
        open      starts a session: an instance that stays
        turn      runs one turn of the session; its payload is what the agent asks for
        import    starts an instance that only imports modules, to make a profile of it
        measure   counts the pages of the session's memory that were written: {"pages": 263, "size": 41943040}
        copy_out  writes those pages into the descriptor
        copy_in   starts a session from such a copy
        drop      ends the session
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence


class Facts(TypedDict):
    """What a worker is told when it starts: where the interpreters are, and how it lives."""

    python: str
    javascript: str
    library: str
    fonts: str
    scripts: list[str]
    memory: int
    private: str  # its own folder
    env: dict[str, str]  # that every Python program finds, unless its request says otherwise
    plain: bool  # there is no jail around it
    image: FreshImage | None


class FreshImage(TypedDict):
    """The copy of a memory in which the interpreter has started, and nothing was imported: a file of the store."""

    path: str
    size: int
    pages: int


class ProfileFacts(TypedDict):
    """The copy of a memory in which some modules have been imported."""

    name: str
    size: int
    pages: int


class ClockAndSeed(TypedDict):
    """Deterministic mode: where randomness and time start."""

    seed: int
    start: float


class NewFolder(TypedDict):
    """The folder of a box that is used once, which the worker makes and removes: name -> base64."""

    name: str
    files: dict[str, str]
    main: str


class Surroundings(TypedDict):
    """What a guest finds around it: its variables, its folders (on the host, inside, may it write) and its stdin."""

    env: dict[str, str]
    folders: Sequence[tuple[str, str, bool]]
    stdin: str


class SessionRequest(TypedDict):
    """A request about the session that is open, which needs nothing else: measure, copy_out, drop."""

    do: str


class SessionTurn(SessionRequest):
    """A request for a turn of the session that is open."""

    timeout: float
    memory: int
    fuel: int | None


class Request(Surroundings, total=False):
    """A request about a guest that is to start; which of these are there depends on `do`."""

    run: int
    do: str
    main: str
    args: Sequence[str]
    code: bytes
    language: str
    cwd: str
    memory: int
    timeout: float
    fuel: int | None
    deterministic: ClockAndSeed | None
    profile: ProfileFacts
    make: NewFolder
    agent: str
    modules: Sequence[str]
    size: int
    pages: int
    payload: int
