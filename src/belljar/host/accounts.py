"""Reads `uid:gid` and names of accounts, for the users that guests run as."""

from __future__ import annotations

from collections.abc import Callable

from belljar.core.settings import PRIVATE_UIDS


def guest_user(text: str) -> dict[str, int]:
    """Returns the settings that `uid`, `uid:gid` or the names of an account and its group stand for.

    A number from 65536 on is the first of as many uids, of which each sandbox gets its own. A lower number or a name is
    an account of this host, beside which there are others: all guests share it. A group with another number than the
    user is that of all guests.

    Raises:
        ValueError: There is no such account or group.
    """
    user, colon, group = text.strip().partition(":")
    uid, named = _number(user, _user_id)
    gid = _number(group, _group_id)[0] if colon else uid
    found = {"user_uid": uid, "user_uids": 1 if named or uid < PRIVATE_UIDS else PRIVATE_UIDS}
    return found if gid == uid else found | {"user_gid": gid}


def _number(text: str, named: Callable[[str], int]) -> tuple[int, bool]:
    """A number as it is, or that of an account; and whether it was the name of one."""
    if text.isascii() and text.isdigit():
        return int(text), False
    try:
        return named(text), True
    except (KeyError, ValueError):
        raise ValueError(f"there is no account or group {text[:40]!r} here") from None


def _user_id(name: str) -> int:
    import pwd

    return pwd.getpwnam(name).pw_uid


def _group_id(name: str) -> int:
    import grp

    return grp.getgrnam(name).gr_gid
