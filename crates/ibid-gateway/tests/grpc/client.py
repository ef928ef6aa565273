"""A stock grpcio client: client.py TARGET DESCRIPTORS SCENARIO

Plays one scenario against a shop (examples/tonic) and prints what it saw as JSON; the test judges it. Messages are made
from the descriptor set, answers are kept as the bytes that came. client.mjs does the same with @grpc/grpc-js.
"""

import base64
import hashlib
import json
import pathlib
import queue
import sys
import time

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

TARGET, DESCRIPTORS, SCENARIO = sys.argv[1:]
# No single step takes longer, or the scenario fails.
PATIENCE_S = 20
# The service config of the example's README: the library itself tries again, no code of ours does.
RETRY = (pathlib.Path(__file__).parent / "retry.json").read_text()

pool = descriptor_pool.DescriptorPool()
with open(DESCRIPTORS, "rb") as file:
    for described in descriptor_pb2.FileDescriptorSet.FromString(file.read()).file:
        pool.Add(described)


def message(name, **fields):
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop." + name))(**fields)


def entries(*pairs):
    return [{"name": name, "value": value} for name, value in pairs]


def connect(retry=False, compression=None):
    options = [("grpc.enable_retries", 1 if retry else 0), ("grpc.enable_http_proxy", 0)]
    if retry:
        options.append(("grpc.service_config", RETRY))
    return grpc.insecure_channel(TARGET, options=options, compression=compression)


def as_is(data):
    return data


def call(channel, method, request, key=None, metadata=(), timeout=PATIENCE_S):
    """Starts a call."""
    metadata = list(metadata) + ([("idempotency-key", key)] if key is not None else [])
    stub = channel.unary_unary("/shop.Orders/" + method, request_serializer=as_is, response_deserializer=as_is)
    return stub.future(request.SerializeToString(deterministic=True), metadata=metadata, timeout=timeout)


def told(metadata):
    pairs = [(name, value) for name, value in metadata or () if name != "date"]
    # Not in the order in which names came, which means nothing; values of one name keep theirs.
    pairs.sort(key=lambda pair: pair[0])
    return [[name, base64.b64encode(value).decode() if name.endswith("-bin") else value] for name, value in pairs]


def details(status):
    """What the library makes of grpc-status-details-bin."""
    found = {}
    for detail in status.details if status else ():
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo, error_details_pb2.BadRequest):
            if not detail.Is(kind.DESCRIPTOR):
                continue
            value = kind.FromString(detail.value)
            if kind is error_details_pb2.ErrorInfo:
                found |= {"reason": value.reason, "domain": value.domain}
            elif kind is error_details_pb2.RetryInfo:
                found["retry_ms"] = value.retry_delay.ToMilliseconds()
            else:
                found["fields"] = [violation.field for violation in value.field_violations]
    return found


def outcome(started, answer="Order"):
    """Waits for a call's end, and says all that can be seen of it."""
    code = started.code()
    seen = {
        "code": code.value[0],
        "message": started.details(),
        "initial": told(started.initial_metadata()),
        "trailing": told(started.trailing_metadata()),
        "details": {},
        "body": None,
    }
    if code is grpc.StatusCode.OK:
        body = started.result()
        seen["body"] = {"length": len(body), "sha256": hashlib.sha256(body).hexdigest()}
        parsed = message(answer)
        parsed.ParseFromString(body)
        seen["id"] = parsed.id
        seen["amount"] = parsed.amount
        seen["echo"] = [[entry.name, base64.b64encode(entry.value).decode()] for entry in parsed.played.metadata]
    else:
        # Fails if code or message in the details are others than in the status.
        seen["details"] = details(rpc_status.from_call(started))
    return seen


def stats(channel, key):
    started = call(channel, "Stats", message("StatsRequest", key=key))
    reply = message("StatsReply")
    reply.ParseFromString(started.result())
    return {"begun": reply.begun, "finished": reply.finished}


def open_gate(channel, gate):
    call(channel, "Open", message("OpenRequest", gate=gate), key="open-" + gate).result()


def until(what, is_so):
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError("waited for " + what)
        time.sleep(0.01)


def create(amount=1, **script):
    return message("CreateRequest", item="tea", amount=amount, script=script)


def first():
    with connect() as channel:
        answer = outcome(call(channel, "Create", create(echo_metadata=True), key="first"))
        return {"answer": answer, "stats": stats(channel, "first")}


def replay():
    script = {
        "headers": entries(("x-shelf", b"a"), ("x-shelf", b"b")),
        "trailers": entries(("x-cost", b"3"), ("x-proof-bin", b"\x00\xff")),
    }
    status = status_pb2.Status(code=5, message="no tea left")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="SOLD_OUT", domain="shop"))
    failing = {**script, "code": 5, "message": "no tea left", "details": status.SerializeToString()}
    with connect() as channel:
        ok = [outcome(call(channel, "Create", create(**script), key="ok")) for _ in range(3)]
        failed = [outcome(call(channel, "Create", create(**failing), key="failed")) for _ in range(3)]
        return {"ok": ok, "failed": failed, "stats": [stats(channel, "ok"), stats(channel, "failed")]}


def mismatch():
    with connect() as channel:
        answers = [outcome(call(channel, "Create", create(amount), key="one")) for amount in (1, 2, 1)]
        other = message("PayRequest", order="tea", amount=1)
        answers.append(outcome(call(channel, "Pay", other, key="one"), "Receipt"))
        return {"answers": answers, "stats": stats(channel, "one")}


def missing_key():
    with connect() as channel:
        return {"answer": outcome(call(channel, "Create", create())), "stats": stats(channel, "")}


def in_progress():
    """The test opens the gate once two calls were refused: one that does not try again, and the first try of one that does."""
    with connect() as channel, connect(retry=True) as retrying:
        held = call(channel, "Create", create(gate="busy"), key="busy")
        until("the first to run", lambda: stats(channel, "busy")["begun"] == 1)
        refused = outcome(call(channel, "Create", create(gate="busy"), key="busy"))
        retried = call(retrying, "Create", create(gate="busy"), key="busy")
        return {
            "refused": refused,
            "retried": outcome(retried),
            "first": outcome(held),
            "stats": stats(channel, "busy"),
        }


def left(key, leave):
    """A call that its client gives up while it runs, and makes again."""
    with connect() as channel, connect(retry=True) as retrying:
        before = stats(channel, key)
        lost = leave(channel, create(gate=key), key)
        running = stats(channel, key)
        open_gate(channel, key)
        until("its end", lambda: stats(channel, key)["finished"] == 1)
        again = [outcome(call(retrying, "Create", create(gate=key), key=key)) for _ in range(2)]
        return {"before": before, "lost": lost, "running": running, "again": again, "stats": stats(channel, key)}


def deadline():
    def leave(channel, request, key):
        lost = outcome(call(channel, "Create", request, key=key, timeout=2))
        until("it to run", lambda: stats(channel, key)["begun"] == 1)
        return lost

    return left("deadline", leave)


def cancelled():
    def leave(channel, request, key):
        started = call(channel, "Create", request, key=key)
        until("it to run", lambda: stats(channel, key)["begun"] == 1)
        started.cancel()
        # A cancelled future has no details in its metadata to be read.
        return {"code": started.code().value[0]}

    return left("cancelled", leave)


def gzip():
    request = create(echo_metadata=True, padding=2000, message="long enough to be worth it " * 40)
    with connect(compression=grpc.Compression.Gzip) as packing, connect() as plain:
        packed = outcome(call(packing, "Create", request, key="gzip"))
        unpacked = outcome(call(plain, "Create", request, key="gzip"))
        return {"packed": packed, "plain": unpacked, "stats": stats(plain, "gzip")}


def binary_metadata():
    twice = (("seen-bin", b"\x00\x01\xff"), ("seen-bin", b"\xfe"))
    request = create(echo_metadata=True, headers=entries(*twice), trailers=entries(*twice))
    sent = [("trace-bin", b"\x00\x01\xff"), ("trace-bin", b"\xfe")]
    with connect() as channel:
        answers = [outcome(call(channel, "Create", request, key="bin", metadata=sent)) for _ in range(2)]
        return {"answers": answers, "stats": stats(channel, "bin")}


def messages():
    request = create(code=9, message="Größe 100 % – tab\t, line\n, \U0001f4a5")
    with connect() as channel:
        answers = [outcome(call(channel, "Create", request, key="text")) for _ in range(2)]
        return {"answers": answers, "stats": stats(channel, "text")}


def empty():
    refund = message("RefundRequest", script={"empty": True})
    with connect() as channel:
        asked = [outcome(call(channel, "Create", message("CreateRequest"), key="asked")) for _ in range(2)]
        given = [outcome(call(channel, "Refund", refund, key="given"), "Receipt") for _ in range(2)]
        return {"asked": asked, "given": given, "stats": [stats(channel, "asked"), stats(channel, "given")]}


def big():
    with connect() as channel:
        kept = [outcome(call(channel, "Create", create(padding=300_000), key="kept")) for _ in range(2)]
        large = [outcome(call(channel, "Create", create(padding=2_000_000), key="large")) for _ in range(2)]
        return {"kept": kept, "large": large, "stats": [stats(channel, "kept"), stats(channel, "large")]}


def chat(channel, key):
    notes = queue.SimpleQueue()
    stub = channel.stream_stream("/shop.Orders/Chat", request_serializer=as_is, response_deserializer=as_is)
    heard = stub(iter(notes.get, None), metadata=[("idempotency-key", key)], timeout=PATIENCE_S)
    said = []
    for text in ("one", "two"):
        notes.put(message("Note", text=text).SerializeToString())
        # The next is not sent before this one is answered: buffered, the call would stand still.
        note = message("Note")
        note.ParseFromString(next(heard))
        said.append(note.text)
    notes.put(None)
    rest = list(heard)
    return {"said": said, "rest": len(rest), "code": heard.code().value[0]}


def watch(channel, key):
    stub = channel.unary_stream("/shop.Orders/Watch", request_serializer=as_is, response_deserializer=as_is)
    request = message("WatchRequest", order="o", count=3, gate="watch-" + key)
    orders = stub(request.SerializeToString(), metadata=[("idempotency-key", key)], timeout=PATIENCE_S)
    next(orders)
    # The others are not sent before the gate is open: buffered, the first would not have come.
    open_gate(channel, "watch-" + key)
    return {"rest": len(list(orders)), "code": orders.code().value[0]}


def streams():
    with connect() as channel:
        return {
            "chats": [chat(channel, "stream") for _ in range(2)],
            "watched": [watch(channel, "stream") for _ in range(2)],
        }


def concurrent():
    request = create(gate="all")
    with connect() as channel:
        calls = [call(channel, "Create", request, key="all") for _ in range(50)]
        until("all but one to be refused", lambda: sum(started.done() for started in calls) == 49)
        open_gate(channel, "all")
        answers = [outcome(started) for started in calls]
    with connect(retry=True) as channel:
        again = [call(channel, "Create", request, key="all") for _ in range(50)]
        again = [outcome(started) for started in again]
        return {"answers": answers, "again": again, "stats": stats(channel, "all")}


def reflection():
    with connect() as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = sorted(database.get_services())
        orders = descriptor_pool.DescriptorPool(database).FindServiceByName("shop.Orders")
        return {"services": services, "methods": [method.name for method in orders.methods]}


def health():
    with connect() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="shop.Orders")
        status = stub.Check(request, timeout=PATIENCE_S).status
        watched = stub.Watch(request, timeout=PATIENCE_S)
        first_seen = next(watched).status
        watched.cancel()
        unknown = stub.Check.future(health_pb2.HealthCheckRequest(service="nobody"), timeout=PATIENCE_S)
        return {"status": status, "watched": first_seen, "unknown": unknown.code().value[0]}


SCENARIOS = [
    first, replay, mismatch, missing_key, in_progress, deadline, cancelled, gzip, binary_metadata, messages, empty, big,
    streams, concurrent, reflection, health,
]  # fmt: skip

print(json.dumps({scenario.__name__: scenario for scenario in SCENARIOS}[SCENARIO]()))
