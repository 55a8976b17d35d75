"""What the server gives a client: bytes, seconds and connections. Plain values."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class ServerLimits:
    """Limits of the server. A client that exceeds one is answered if possible, and disconnected."""

    header_bytes: int = 32 * 1024
    """Request line and headers together."""
    body_bytes: int = 1024 * 1024
    header_seconds: float = 10.0
    """From the first byte of a request to the end of its headers."""
    body_seconds: float = 30.0
    """For the whole body."""
    idle_seconds: float = 60.0
    """Between two requests on one connection."""
    write_seconds: float = 10.0
    """Until the client has taken another `CHUNK` of a response."""
    connections: int = 200
    """Open connections. The next one is told 503 and closed."""
