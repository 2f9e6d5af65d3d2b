"""A granted folder that the guest uses as a copy, because it could not use the folder itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.to_thread

from belljar.core.display import neutralise
from belljar.core.request import Workspace
from belljar.core.result import Result
from belljar.core.values import few
from belljar.host import git_settings, tree_copy
from belljar.host.tree_copy import CopiedTree, TreeNode

_CLOSING_SECONDS = 60.0
_WARNING = "{names} changed in the copy of the granted folder, and was not copied back: it says what git runs"


class GrantedCopy:
    """Copies a granted folder into a sandbox, and what the guest changed back to the host.

    The copy has all that the folder has: links, permissions, times, empty folders. A folder of which that cannot be
    said is refused. What comes back is written by us, entry by entry, following no link.
    """

    def __init__(
        self,
        workspace: Workspace,
        limit: int,
        *,
        put: Callable[[Sequence[TreeNode]], Awaitable[None]],
        get: Callable[[], Awaitable[CopiedTree]],
    ) -> None:
        """Remembers how to copy; nothing is done yet.

        Args:
            workspace: the folder, and whether the guest may change it.
            limit: how many bytes may be copied in.
            put: writes the entries into the sandbox.
            get: reads all entries of the copy out of the sandbox.
        """
        self._workspace = workspace
        self._limit = limit
        self._put = put
        self._get = get
        self._before: Sequence[TreeNode] = ()
        self._changed = False
        self._kept: list[str] = []  # what of git's settings the last copy did not bring back

    async def copy_in(self) -> None:
        """Puts all that the folder holds into the sandbox.

        Raises:
            PolicyDenied: the folder holds more than the limit, or what cannot be copied as it is.
        """
        path, limit = self._workspace.path, self._limit
        self._before = await anyio.to_thread.run_sync(lambda: tree_copy.read_tree(path, limit=limit))
        await self._put(self._before)

    def note_change(self) -> None:
        """Remembers that the caller has changed the copy: it is brought back even if no run follows."""
        self._changed = True

    async def close(self) -> None:
        """Copies back what the caller changed since the last run."""
        if self._changed:
            with anyio.move_on_after(_CLOSING_SECONDS, shield=True):
                await self.copy_back()

    async def copy_back(self) -> tuple[str, ...]:
        """Writes what the guest changed to the host, if it may change the folder; returns what was left out."""
        self._changed = False
        if not self._workspace.write:
            return ()
        after = await self._get()
        before, self._before = self._before, after.nodes
        if not self._workspace.write_git:
            after, self._kept = _without_git_settings(before, after)
        return await anyio.to_thread.run_sync(tree_copy.bring_back, before, after, self._workspace.path)

    async def finish(self, result: Result) -> Result:
        """Copies back after a run; returns its result with what was left out added to it."""
        left_out = tuple(f"not copied back: {what}" for what in await self.copy_back())
        warnings = (_WARNING.format(names=neutralise(few(self._kept))),) if self._kept else ()
        changes = {"left_out": result.left_out + left_out, "warnings": result.warnings + warnings}
        return result.model_copy(update=changes) if left_out or warnings else result


def _without_git_settings(before: Sequence[TreeNode], after: CopiedTree) -> tuple[CopiedTree, list[str]]:
    """Returns the copy with git's settings as they were, and the names of those that were changed."""
    was, now = ({node.path: node for node in nodes} for nodes in (before, after.nodes))
    if git_settings.GIT not in was:  # a repository that the guest made is its own
        return after, []
    names = [name for name in was.keys() | now.keys() if git_settings.is_setting(name)]
    nodes = [node for node in after.nodes if not git_settings.is_setting(node.path)]
    nodes += [was[name] for name in names if name in was]
    changed = sorted(name for name in names if _text(was.get(name)) != _text(now.get(name)))
    return after._replace(nodes=tuple(nodes)), changed


def _text(node: TreeNode | None) -> object:
    return node and (node.text, node.mode)
