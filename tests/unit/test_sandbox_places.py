"""What one caller may have of the things that all callers share: some of it is left for the others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from belljar.core import errors
from belljar.living import snapshots
from belljar.protocol.living import MakeSnapshot
from belljar.protocol.records import Caller
from belljar.service.auth.access import LOCAL_USER
from belljar.service.sandboxes.places import Places
from belljar.service.sandboxes.sandboxes import Sandboxes
from belljar.service.service import Service
from belljar.settings import load

pytestmark = pytest.mark.anyio


class Keeping:
    """A sandbox of which any number of snapshots can be taken."""

    async def snapshot(self, **asked: object) -> str:
        return "snap"


@pytest.mark.parametrize(
    ("caller", "refused"),
    [
        (Caller(name="ann", scopes=frozenset({"sessions"}), key="abc"), True),
        (Caller(name="jwt:ann", scopes=frozenset({"sessions"})), True),
        (Caller(name=LOCAL_USER, scopes=frozenset({"sessions"})), False),
    ],
)
async def test_no_caller_but_the_only_one_takes_the_room_for_all_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caller: Caller, refused: bool
) -> None:
    settings = load({"BELLJAR_DATA_DIR": str(tmp_path)})
    most = settings.living.snapshots

    async def listed(engine: object, owner: str) -> list[None]:
        return [None] * (most - 1)

    monkeypatch.setattr(snapshots, "listed", listed)
    all_of_them, held = Sandboxes(Service(settings), cast(Any, None)), cast(Any, SimpleNamespace(box=Keeping()))
    if refused:
        with pytest.raises(errors.Busy, match=f"you have {most - 1} snapshots"):
            await all_of_them.snapshot(held, caller, MakeSnapshot())
    else:
        assert await all_of_them.snapshot(held, caller, MakeSnapshot()) == cast(Any, "snap")


def test_one_caller_leaves_places_for_others_and_gets_them_back() -> None:
    places = Places("copies of yours", each=1, total=2)
    with places.taken("ann"), places.taken("bob"):
        with pytest.raises(errors.Busy, match="1 copies of yours"), places.taken("ann"):
            pass
        with pytest.raises(errors.Busy, match="all copies of yours are taken"), places.taken("cid"):
            pass
    with places.taken("ann"), places.taken("cid"):
        pass
