"""What the scenarios do not show. IBID_API names an ibid whose every path is covered; IBID_URL is its gateway."""

import io
import json
import os
import pathlib
import tempfile
import unittest
import uuid
from concurrent.futures import ThreadPoolExecutor

from ibid import Ibid, IbidError, IdempotentWSGI, NotStarted, idempotent, outbound_key
from ibid.callers import OPERATION_HEADER, KeptKeys, httpx_transport, requests_adapter

ADDRESS, URL = os.environ["IBID_API"], os.environ["IBID_URL"]


def call_wsgi(app, headers):
    started = []
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/pay", "REMOTE_ADDR": "192.0.2.1", "wsgi.input": io.BytesIO()}
    for name, value in {"Host": "shop.example.com", **headers}.items():
        environ["HTTP_" + name.upper().replace("-", "_")] = value
    body = b"".join(app(environ, lambda status, told, *_: started.extend([status, dict(told)])))
    return int(started[0][:3]), {name.lower(): value for name, value in started[1].items()}, body


class Handler:
    def __init__(self):
        self.runs = 0

    def __call__(self, environ, start_response):
        self.runs += 1
        start_response("201 Created", [("Content-Type", "text/plain")])
        return [b"paid by %d" % self.runs]


class OutboundKeys(unittest.TestCase):
    def test_keys_are_those_of_every_sdk(self):
        rows = json.loads((pathlib.Path(__file__).parents[2] / "outbound_keys.json").read_text("utf-8"))
        for row in rows:
            self.assertEqual(outbound_key(row["operation"], row["name"]), row["key"])


class Jobs(unittest.TestCase):
    def setUp(self):
        self.ibid, self.key, self.runs = Ibid(ADDRESS), str(uuid.uuid4()), 0

    def job(self, work=None):
        @idempotent(self.ibid, key=lambda order: self.key, name="charge")
        def charge(order):
            self.runs += 1
            return work() if work else {"charged": order}

        return charge

    def test_a_job_runs_once_and_returns_its_first_result_again(self):
        self.assertEqual([self.job()(7), self.job()(7)], [{"charged": 7}] * 2)
        self.assertEqual(self.runs, 1)

    def test_other_arguments_with_the_key_are_refused(self):
        self.job()(7)
        with self.assertRaises(IbidError) as refused:
            self.job()(8)
        self.assertEqual(refused.exception.answer.status, 422)

    def test_an_exception_leaves_the_outcome_unknown(self):
        with self.assertRaises(ZeroDivisionError):
            self.job(lambda: 1 / 0)(7)
        with self.assertRaises(IbidError) as refused:
            self.job()(7)
        self.assertIn("outcome-unknown", str(refused.exception))
        self.assertEqual(self.runs, 1)

    def test_a_job_that_did_not_start_can_run_again(self):
        def fail():
            raise NotStarted()

        with self.assertRaises(NotStarted):
            self.job(fail)(7)
        self.assertEqual(self.job()(7), {"charged": 7})


class Middleware(unittest.TestCase):
    def test_identify_names_the_caller_and_the_client_cannot(self):
        users = iter(["u1", "u2", "u1"])
        handler, key = Handler(), str(uuid.uuid4())
        ibid = Ibid(ADDRESS, identify=lambda environ: {"Authorization": "Bearer " + next(users)})
        app = IdempotentWSGI(handler, ibid)
        headers = {"Idempotency-Key": key, "Authorization": "Bearer forged"}
        bodies = [call_wsgi(app, headers)[2] for _ in range(3)]
        self.assertEqual(bodies, [b"paid by 1", b"paid by 2", b"paid by 1"])

    def test_without_ibid_closed_refuses_and_open_runs_degraded(self):
        handler, headers = Handler(), {"Idempotency-Key": "k"}
        nowhere = "unix:/nowhere/api.sock"
        status, told, _ = call_wsgi(IdempotentWSGI(handler, Ibid(nowhere)), headers)
        self.assertEqual((status, told["retry-after"], handler.runs), (503, "1", 0))
        status, told, body = call_wsgi(IdempotentWSGI(handler, Ibid(nowhere, unreachable="open")), headers)
        self.assertEqual((status, told["idempotency-guarantee"], body), (201, "degraded", b"paid by 1"))
        with self.assertRaises(ValueError):
            Ibid(nowhere, unreachable="maybe")


class Callers(unittest.TestCase):
    def check(self, post):
        with tempfile.TemporaryDirectory() as folder:
            keys, operation = KeptKeys(os.path.join(folder, "keys")), str(uuid.uuid4())
            kept = keys.key(operation)
            self.assertEqual(KeptKeys(keys.path).key(operation), kept, "after a restart")
            first = post(keys, "/flaky", {OPERATION_HEADER: operation})
            self.assertEqual((first.status_code, first.json()["run"] > 0), (201, True), "503 is retried")
            self.assertNotEqual(keys.key(operation), kept, "a final answer ends the operation")
            own = {"Idempotency-Key": str(uuid.uuid4())}
            bodies = {post(keys, "/pay", own).text for _ in range(2)}
            self.assertEqual(len(bodies), 1, "the caller's own key")

    def test_threads_agree_on_the_key_of_an_operation(self):
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(8) as threads:
            keys = KeptKeys(os.path.join(folder, "keys"))
            self.assertEqual(len(set(threads.map(keys.key, ["order-17"] * 50))), 1)

    def test_httpx(self):
        import httpx

        def post(keys, path, headers):
            with httpx.Client(transport=httpx_transport(keys=keys)) as client:
                return client.post(URL + path, json={"amount": 1}, headers=headers)

        self.check(post)

    def test_requests(self):
        import requests

        def post(keys, path, headers):
            with requests.Session() as session:
                session.mount("http://", requests_adapter(keys))
                return session.post(URL + path, json={"amount": 1}, headers=headers)

        self.check(post)


if __name__ == "__main__":
    unittest.main()
