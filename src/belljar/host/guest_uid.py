"""The uid of a guest, and its group where that has another number."""

from __future__ import annotations


class GuestUid(int):
    """The uid of guests whose group has another number. A plain number is its own group."""

    group: int

    @classmethod
    def of(cls, uid: int, group: int | None) -> int:
        """Returns the uid, with its group if that is another."""
        if group in (None, uid):
            return uid
        found = cls(uid)
        found.group = group or 0
        return found


def group_of(uid: int) -> int:
    """Returns the gid of the guests with this uid."""
    return uid.group if isinstance(uid, GuestUid) else int(uid)
