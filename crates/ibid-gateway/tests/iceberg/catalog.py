"""A small Iceberg REST catalog that keeps its tables in memory, and counts what it does.

    catalog.py WAREHOUSE RUNS

It appends a line to the file RUNS for every operation that took effect, and prints its address once it listens. Metadata
is changed by pyiceberg's own functions.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import update_table_metadata

warehouse, runs = sys.argv[1:]
namespaces, tables = set(), {}
lock = threading.Lock()


class Refused(Exception):
    def __init__(self, status, kind, message):
        self.status, self.kind, self.message = status, kind, message


def ran(what):
    with open(runs, "a") as file:
        file.write(what + "\n")


def shown(name):
    metadata = json.loads(tables[name].model_dump_json())
    return {"metadata-location": f"{warehouse}/{name[1]}/metadata.json", "metadata": metadata, "config": {}}


def create_table(namespace, body):
    name = (namespace, body["name"])
    if name in tables:
        raise Refused(409, "AlreadyExistsException", "the table exists")
    tables[name] = new_table_metadata(
        schema=Schema.model_validate(body["schema"]),
        partition_spec=PartitionSpec(),
        sort_order=UNSORTED_SORT_ORDER,
        location=f"{warehouse}/{body['name']}",
        properties=body.get("properties", {}),
    )
    ran("create-table")
    return shown(name)


def commit(name, body):
    request = CommitTableRequest.model_validate({"identifier": {"namespace": [name[0]], "name": name[1]}, **body})
    try:
        for requirement in request.requirements:
            requirement.validate(tables[name])
    except CommitFailedException as error:
        raise Refused(409, "CommitFailedException", str(error)) from error
    tables[name] = update_table_metadata(tables[name], request.updates)
    ran("commit")
    return shown(name)


def answer(method, path, body):
    match method, path:
        case "GET", ["config"]:
            return 200, {"defaults": {}, "overrides": {}}
        case "POST", ["namespaces"]:
            namespace = body["namespace"][0]
            if namespace in namespaces:
                raise Refused(409, "AlreadyExistsException", "the namespace exists")
            namespaces.add(namespace)
            ran("create-namespace")
            return 200, {"namespace": [namespace], "properties": {}}
        case "POST", ["namespaces", namespace, "tables"]:
            return 200, create_table(namespace, body)
        case _, ["namespaces", namespace, "tables", table] if (namespace, table) not in tables:
            raise Refused(404, "NoSuchTableException", "there is no such table")
        case "GET", ["namespaces", namespace, "tables", table]:
            return 200, shown((namespace, table))
        case "POST", ["namespaces", namespace, "tables", table]:
            return 200, commit((namespace, table), body)
        case "DELETE", ["namespaces", namespace, "tables", table]:
            del tables[(namespace, table)]
            ran("drop-table")
            return 204, None
    raise Refused(404, "NotFoundException", "there is no such path")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_any(self):
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        path = [unquote(part) for part in urlsplit(self.path).path.split("/")[2:]]
        try:
            with lock:
                status, value = answer(self.command, path, body)
        except Refused as refused:
            error = {"message": refused.message, "type": refused.kind, "code": refused.status}
            status, value = refused.status, {"error": error}
        sent = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        if value is not None:
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    do_GET = do_POST = do_DELETE = handle_any

    def handle(self):
        try:
            super().handle()
        except ConnectionError:
            pass

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print("http://%s:%d" % server.server_address, flush=True)
server.serve_forever()
