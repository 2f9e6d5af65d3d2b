"""Part of the session's agent: what a half-typed name may become, found without running code of the guest."""

import builtins
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME_LIMIT = 1000  # names that a half-typed one may become


def names(text: str, scope: "dict[str, Any]") -> "list[str]":
    """Returns what a half-typed name may become: names of the scope, or of what is before its last dot.

    It looks at what is there and runs no code of the guest: no property, no `__getattr__`, no `__dir__`.
    """
    *path, last = text.split(".")
    spaces = [scope, vars(builtins)]
    for number, name in enumerate(path):
        place = next((place for place, space in enumerate(spaces) if name in space), None)
        if place is None:
            return []
        value = spaces[place][name]
        if number and place and any("__get__" in owner.__dict__ for owner in type.mro(type(value))):
            return []  # a property of the class, say: what it would come to is not known without calling it
        spaces = _spaces(value)
    found = {name for space in spaces for name in islice(space, 100_000) if type(name) is str}
    wanted = {name for name in found if name.startswith(last) and name.isidentifier() and len(name) <= 100}
    if not last.startswith("_"):
        wanted = {name for name in wanted if not name.startswith("_")}
    return sorted(wanted)[:NAME_LIMIT]


def _spaces(value: object) -> "list[dict[str, Any]]":
    """Returns the dictionaries in which the attributes of a value are found."""
    spaces = []
    classes = type.mro(value) if issubclass(type(value), type) else ()
    for owner in (value, *classes, *type.mro(type(value))):
        try:
            space = object.__getattribute__(owner, "__dict__")
        except AttributeError:
            continue
        spaces.append(dict(islice(space.items(), 100_000)))
    return spaces
