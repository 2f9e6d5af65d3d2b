"""What a guest's programs are told of the proxy."""

from __future__ import annotations

PORT = 3128
_PROXY = f"http://127.0.0.1:{PORT}"
_LOCAL = "localhost,127.0.0.1"
_JAVA = " ".join(
    f"-D{scheme}.{name}" for scheme in ("http", "https") for name in ("proxyHost=127.0.0.1", f"proxyPort={PORT}")
)
ENV = {name: _PROXY for word in ("http", "https", "all") for name in (f"{word}_proxy", f"{word}_proxy".upper())}
ENV |= {"no_proxy": _LOCAL, "NO_PROXY": _LOCAL, "NODE_USE_ENV_PROXY": "1", "JAVA_TOOL_OPTIONS": _JAVA}
DENIALS = 20  # at most are in a result; all are events
