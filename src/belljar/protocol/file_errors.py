"""The OSErrors of a sandbox's files on their way over HTTP: a refusal that names the error, and the error again."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from belljar.core import errors

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


@contextmanager
def refused(path: str) -> Iterator[None]:
    """On the server: an OSError of the block becomes the refusal that a caller is told."""
    try:
        yield
    except OSError as error:
        raise _refusal(error, path) from None


@contextmanager
def raised(path: str) -> Iterator[None]:
    """In the client: such a refusal becomes the OSError that it was."""
    try:
        yield
    except errors.BelljarError as error:
        number = getattr(errno, str(error.context.get("errno")), None)
        if not isinstance(number, int):
            raise
        raise OSError(number, os.strerror(number), path) from None


def _refusal(error: OSError, path: str) -> errors.BelljarError:
    context = {"errno": errno.errorcode.get(error.errno or 0, "EIO")}
    message = f"{path}: {error.strerror or error}"
    if error.errno == errno.ENOENT:
        return errors.NotFound(message, fix="list the files first", context=context)
    if error.errno in _DENIED:
        return errors.PolicyDenied(message, fix="the guest could not do this either", context=context)
    return errors.InvalidRequest(message, fix="list the files first", context=context)
