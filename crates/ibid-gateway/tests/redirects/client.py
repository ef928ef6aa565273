"""Sends one request with a library that follows redirects: LIBRARY URL KEY. Prints what came back."""

import json
import sys

import httpx
import requests

library, url, key = sys.argv[1:]
headers = {"Idempotency-Key": key, "Authorization": "Bearer t"}
body = {"name": "lamp"}
if library == "requests":
    answer = requests.post(url, json=body, headers=headers, timeout=30)
    hops = len(answer.history)
else:
    with httpx.Client(follow_redirects=True, timeout=30) as client:
        answer = client.post(url, json=body, headers=headers)
        hops = len(answer.history)
print(
    json.dumps(
        {
            "status": answer.status_code,
            "body": answer.text,
            "replayed": answer.headers.get("idempotent-replayed"),
            "hops": hops,
        }
    )
)
