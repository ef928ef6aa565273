"""pyiceberg, with a transport adapter that gives each operation a key.

    client.py URL

Each line of stdin is an operation: namespace, create, load, append, set, rows, drop,
lifetime. Each line of stdout is what became of it.
"""

import os
import sys
import time
import uuid

import pyarrow as pa
import requests
from pyiceberg.catalog.rest import RestCatalog
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

url = sys.argv[1]


def uuid7():
    value = int.from_bytes((time.time_ns() // 10**6).to_bytes(6, "big") + os.urandom(10), "big")
    return str(uuid.UUID(int=value & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62))


class KeyAdapter(HTTPAdapter):
    def send(self, request, **options):
        if request.method in ("POST", "DELETE"):
            request.headers["Idempotency-Key"] = uuid7()
        return super().send(request, **options)


catalog = RestCatalog("test", uri=url, token="spark")
retries = Retry(total=5, allowed_methods=None, backoff_factor=0.1)
catalog._session.mount(url, KeyAdapter(max_retries=retries))
rows = pa.table({"n": pa.array([1], pa.int64())})
table = None


def run(operation):
    global table
    match operation:
        case "lifetime":
            return requests.get(f"{url}/v1/config", timeout=10).json().get("idempotency-key-lifetime")
        case "namespace":
            catalog.create_namespace("ns")
        case "create":
            table = catalog.create_table("ns.t", schema=rows.schema)
        case "load":
            table = catalog.load_table("ns.t")
        case "append":
            table.append(rows)
        case "set":
            table.transaction().set_properties({"at": str(time.time_ns())}).commit_transaction()
        case "drop":
            catalog.drop_table("ns.t")
        case "rows":
            return len(catalog.load_table("ns.t").scan().to_arrow())
    return "done"


for line in sys.stdin:
    try:
        print(run(line.strip()), flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
        print(repr(error), file=sys.stderr, flush=True)
