"""ibid makes retries safe: a retried request takes effect once and gets the same response every time.

`IdempotentASGI` and `IdempotentWSGI` wrap an app, `idempotent` wraps a job. All policy is in ibid's own configuration.
`ibid.callers` has the caller's half, for httpx and requests.
"""

from .api import Answer, Ibid, IbidError, NotStarted
from .asgi import IdempotentASGI
from .callers import outbound_key
from .jobs import idempotent
from .wsgi import IdempotentWSGI

__all__ = "Answer", "Ibid", "IbidError", "IdempotentASGI", "IdempotentWSGI", "NotStarted", "idempotent", "outbound_key"
