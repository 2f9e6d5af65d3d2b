"""The read-only files of a living box and of each of its commands, which share one folder.

A command's own files lie there until another's take their place. Two commands that run at once with different files of
one name each have a folder of their own, and their words are changed accordingly.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping

import anyio

from belljar.backends.containers import archive as docker_files
from belljar.core.plan import INPUTS, Command
from belljar.core.result import File

Lay = Callable[[bytes, list[str]], Awaitable[None]]  # an archive, and the folders that are not needed any more


class Delivery:
    """Gives commands their files."""

    def __init__(self, lay: Lay) -> None:
        self._lay = lay
        self._one_at_a_time = anyio.Lock()
        self._always: Mapping[str, bytes] = {}
        self._there: dict[str, bytes] = {}  # what lies in the common folder
        self._users: dict[str, int] = {}  # how many commands that run use each of these
        self._left: list[str] = []  # folders whose command has ended

    async def begin(
        self, given: Mapping[str, bytes], programs: Mapping[str, bytes], *, there: bool = False
    ) -> None:  # fmt: skip
        """Lays the files that all commands find, and programs; `there`: an earlier server has laid them."""
        self._always = given
        if there:  # nobody knows what else lies there, or which of these is another's by now
            self._users = dict.fromkeys(given, 1)
            return
        self._there = dict(given)
        self._users = dict.fromkeys(given, 1)
        await self._lay(_packed(given, programs), [])

    async def add(self, given: Mapping[str, bytes]) -> None:
        """Lays more files that stay as long as the sandbox does, and that no command's files take the place of."""
        async with self._one_at_a_time:
            await self._lay(_packed(given), [])

    async def give(self, command: Command) -> tuple[tuple[str, ...], Callable[[], None]]:
        """Lays a command's files.

        Returns:
            Its words, and what is to be called when it has ended.
        """
        files = dict(command.files)
        if not files:
            return command.argv, lambda: None
        async with self._one_at_a_time:
            used = any(self._users.get(name) and self._there.get(name) != content for name, content in files.items())
            return await (self._give_folder(command, files) if used else self._give_common(command, files))

    async def _give_common(
        self, command: Command, files: Mapping[str, bytes]
    ) -> tuple[tuple[str, ...], Callable[[], None]]:
        lacking = {name: content for name, content in files.items() if self._there.get(name) != content}
        if lacking:
            for name in lacking:  # if this fails, nobody knows what lies there
                self._there.pop(name, None)
            await self._lay(_packed(lacking), self._taken_left())
            self._there |= lacking
        for name in files:
            self._users[name] = self._users.get(name, 0) + 1

        def done() -> None:
            for name in files:
                self._users[name] -= 1

        return command.argv, done

    async def _give_folder(
        self, command: Command, files: Mapping[str, bytes]
    ) -> tuple[tuple[str, ...], Callable[[], None]]:
        folder = f".run-{secrets.token_hex(4)}"
        given = {f"{folder}/{name}": content for name, content in {**self._always, **files}.items()}
        await self._lay(_packed(given), self._taken_left())

        def moved(word: str) -> str:
            name = word.removeprefix(f"{INPUTS}/")
            return f"{INPUTS}/{folder}/{name}" if name != word and name in files else word

        argv = tuple(map(moved, command.argv))
        return argv, lambda: self._left.append(folder)

    def _taken_left(self) -> list[str]:
        left, self._left = self._left, []
        return left


def _packed(files: Mapping[str, bytes], programs: Mapping[str, bytes] = {}) -> bytes:
    tree = [File(path=path, content=content, read_only=True) for path, content in files.items()]
    tree += [File(path=path, content=content, read_only=True, executable=True) for path, content in programs.items()]
    return docker_files.archive(tree)
