"""What a snapshot of a living sandbox is, as data: its files are kept elsewhere."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from belljar.core.model import Model
from belljar.core.request import MAX_LABELS, LabelName, LabelText
from belljar.core.values import Moment, Text

MOST_LEFT_OUT = 100  # that are told by name
_Line = Annotated[Text, Field(max_length=8192)]
_Lines = Annotated[tuple[_Line, ...], Field(max_length=MOST_LEFT_OUT + 1)]
_Folder = Annotated[Text, Field(max_length=4096, pattern=r"^/.")]


class BoxSnapshot(Model):
    """The files of a living sandbox at one moment, kept: `Sandbox.open(snapshot=...)` begins with them.

    It holds files, folders and links, with their permissions and times. No process, no memory, and no granted folder is
    in it.
    """

    id: str = Field(pattern=r"^snap-[0-9a-f]{16}$")
    """Its name."""
    created: Moment
    """When it was made, in seconds since 1970; in JSON as ISO 8601 text."""
    labels: Annotated[Mapping[LabelName, LabelText], Field(max_length=MAX_LABELS)] = Field(default_factory=dict)
    """Names and values of yours, to find it by."""
    size: int = Field(0, ge=0)
    """Bytes of its files."""
    files: int = Field(0, ge=0)
    """How many files it has."""
    stored: int = Field(0, ge=0)
    """Bytes that had to be kept for it: what earlier snapshots hold is kept once."""
    folders: Annotated[tuple[_Folder, ...], Field(max_length=16)] = ()
    """The folders whose contents it holds."""
    home: _Folder = "/home/user"
    """The home among them."""
    box: Annotated[Text, Field(max_length=256)] = ""
    """The id of the sandbox."""
    backend: Annotated[Text, Field(max_length=64)] = ""
    """The backend that had it."""
    quiet: bool = False
    """Whether the sandbox was paused while its files were read, so that all of them are of one moment."""
    left_out: _Lines = ()
    """What could not be kept, and why; the first hundred."""
    warnings: _Lines = ()
    """What else it does not hold."""
    owner: Annotated[Text, Field(max_length=256)] = ""
    """Whose it is, where a service keeps those of several callers."""
