"""An invoices API for many tenants, without a word about idempotency: python3 app.py 3000

The header X-Tenant-Id comes from the proxy in front, which has authenticated the caller.
"""

import json
import sqlite3
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DATABASE = "invoices.db"


def database():
    connection = sqlite3.connect(DATABASE, timeout=10)
    connection.execute("CREATE TABLE IF NOT EXISTS invoices (number INTEGER PRIMARY KEY, tenant TEXT, amount INTEGER)")
    return connection


class Invoices(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != "/api/invoices":
            return self.respond(404, {"error": "there is only /api/invoices"})
        try:
            amount = int(json.loads(body)["amount"])
        except (ValueError, TypeError, KeyError):
            return self.respond(400, {"error": "amount: expected a number"})
        with database() as connection:
            added = connection.execute("INSERT INTO invoices (tenant, amount) VALUES (?, ?)", (self.tenant(), amount))
        self.respond(201, {"invoice": added.lastrowid, "amount": amount})

    def do_GET(self):
        with database() as connection:
            rows = connection.execute("SELECT count(*) FROM invoices WHERE tenant = ?", (self.tenant(),))
            self.respond(200, {"invoices": rows.fetchone()[0]})

    def tenant(self):
        return self.headers.get("X-Tenant-Id", "")

    def respond(self, status, content):
        body = json.dumps(content).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Invoices).serve_forever()
