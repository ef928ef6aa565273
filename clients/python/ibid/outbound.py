"""Keys of the calls that a handler makes to other services."""

import hashlib
import uuid


def outbound_key(operation: str, name: str) -> str:
    """The key of a call that a handler makes: equal in all attempts, another one for each name.

    `operation` is the header `Ibid-Operation` of the handler's request.
    """
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in (operation.encode(), name.encode()))
    return str(uuid.UUID(bytes=hashlib.sha256(framed).digest()[:16], version=4))
