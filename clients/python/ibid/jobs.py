"""A decorator for jobs and handlers that no server middleware wraps."""

from __future__ import annotations

import functools
import json
from typing import Any, Callable

from .api import Answer, Ibid, IbidError


def idempotent(ibid: Ibid, key: Callable[..., str], name: str = "") -> Callable[..., Any]:
    """Runs a function once per key, and returns its first result again. Arguments and result must be JSON.

    The operation is `POST /jobs/NAME` for ibid's routes, with its key in the header Idempotency-Key. A refusal raises
    `IbidError`; an exception of the function leaves the outcome unknown, except `NotStarted`.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        target = f"/jobs/{name or function.__name__}"

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            body = json.dumps([args, kwargs], sort_keys=True).encode()
            headers = [("host", "jobs"), ("content-type", "application/json")]
            headers.append(("idempotency-key", key(*args, **kwargs)))
            begun = ibid.wait(ibid.begin((args, kwargs), "POST", target, headers, body, None))
            if isinstance(begun, Answer):
                return _result(begun)
            if not begun.is_covered:
                return function(*args, **kwargs)

            def respond() -> Answer:
                result = json.dumps(function(*args, **kwargs))
                return Answer(200, [("content-type", "application/json")], result.encode())

            return _result(ibid.run(begun, respond))

        return call

    return wrap


def _result(answer: Answer) -> Any:
    if answer.status != 200:
        raise IbidError(answer)
    return json.loads(answer.body)
