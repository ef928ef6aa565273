"""Charges and then mails, each a call to another service under a key of its own. Dies between the two on its first run."""

import http.client
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from ibid import outbound_key

SERVICE = sys.argv[1]


def call(path, key):
    service = http.client.HTTPConnection(SERVICE)
    service.request("POST", path, b"{}", {"Content-Type": "application/json", "Idempotency-Key": key, "Authorization": "Bearer shop"})
    status = service.getresponse().status
    assert status == 201, status


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        operation = self.headers["Ibid-Operation"]
        call("/charge", outbound_key(operation, "charge"))
        if self.headers["Ibid-Attempt"] == "1":
            os._exit(9)
        call("/mail", outbound_key(operation, "mail"))
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()


server = HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
print(server.server_port, flush=True)
server.serve_forever()
