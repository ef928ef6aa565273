// A stock @grpc/grpc-js client: client.mjs TARGET DESCRIPTORS SCENARIO
//
// Plays one scenario against a shop (examples/tonic) and prints what it saw as JSON; the test judges it. Messages are
// made from the descriptor set, answers are kept as the bytes that came. client.py does the same with grpcio.
//
// Its modules are not beside it: scripts/tools installs them, and the test says where (NODE_MODULES).

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";

const require = createRequire(process.env.NODE_MODULES + "/");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const protobuf = require("protobufjs");

const [target, descriptors, scenario] = process.argv.slice(2);
// No single step takes longer, or the scenario fails.
const PATIENCE_MS = 20_000;
// The service config of the example's README: the library itself tries again, no code of ours does.
const RETRY = readFileSync(new URL("retry.json", import.meta.url), "utf8");

const { Orders } = grpc.loadPackageDefinition(
  loader.loadFileDescriptorSetFromBuffer(readFileSync(descriptors), { keepCase: true, longs: Number, defaults: true }),
).shop;

const { root: google } = protobuf.parse(`
  syntax = "proto3";
  package google.rpc;
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
  message Duration { int64 seconds = 1; int32 nanos = 2; }
  message RetryInfo { Duration retry_delay = 1; }
  message FieldViolation { string field = 1; string description = 2; }
  message BadRequest { repeated FieldViolation field_violations = 1; }
`, { keepCase: true });
const rpc = (name) => google.lookupType("google.rpc." + name);

const base64 = (bytes) => Buffer.from(bytes).toString("base64");
const entries = (...pairs) => pairs.map(([name, value]) => ({ name, value: Buffer.from(value) }));
const asIs = (bytes) => bytes;

const connections = [];
function connect({ retry = false, gzip = false } = {}) {
  const options = { "grpc.enable_retries": retry ? 1 : 0, "grpc.enable_http_proxy": 0 };
  if (retry) options["grpc.service_config"] = RETRY;
  if (gzip) options["grpc.default_compression_algorithm"] = grpc.compressionAlgorithms.gzip;
  // Without this, channels with the same options share connections, and what one leaves behind.
  options["grpc.use_local_subchannel_pool"] = 1;
  const client = new grpc.Client(target, grpc.credentials.createInsecure(), options);
  connections.push(client);
  return client;
}

const deadlineIn = (ms) => ({ deadline: Date.now() + ms });

function metadataOf(key, more = []) {
  const metadata = new grpc.Metadata();
  for (const [name, value] of more) metadata.add(name, value);
  if (key !== undefined) metadata.add("idempotency-key", key);
  return metadata;
}

// Starts a call; `seen` is all that can be seen of it, once it has ended.
function call(client, method, request, { key, metadata, timeout = PATIENCE_MS } = {}) {
  const { path, requestSerialize, responseDeserialize } = Orders.service[method];
  let started;
  let initial;
  const seen = new Promise((resolve) => {
    let body;
    started = client.makeUnaryRequest(
      path, requestSerialize, asIs, request, metadataOf(key, metadata), deadlineIn(timeout), (_, bytes) => { body = bytes; },
    );
    started.on("metadata", (metadata) => { initial = metadata; });
    started.on("status", (status) => setImmediate(() => resolve(outcome(status, initial, body, responseDeserialize))));
  });
  return { seen, initial: () => initial, cancel: () => started.cancel() };
}

// Of the moment, or of this client: the number of tries before this one, which the library puts there.
const NOT_ANSWERED = new Set(["date", "grpc-previous-rpc-attempts"]);

function told(metadata) {
  const pairs = Object.entries(metadata?.toJSON() ?? {}).filter(([name]) => !NOT_ANSWERED.has(name));
  pairs.sort(([a], [b]) => (a < b ? -1 : 1));
  return pairs.flatMap(([name, values]) =>
    values.map((value) => [name, name.endsWith("-bin") ? base64(value) : value]));
}

function detailsOf(status) {
  const [bytes] = status.metadata.get("grpc-status-details-bin");
  const found = {};
  if (bytes === undefined) return found;
  const told = rpc("Status").decode(bytes);
  if (told.code !== status.code || told.message !== status.details) throw new Error(`details say ${JSON.stringify(told)}`);
  for (const { type_url, value } of told.details) {
    const name = type_url.replace("type.googleapis.com/google.rpc.", "");
    const detail = rpc(name).decode(value);
    if (name === "ErrorInfo") Object.assign(found, { reason: detail.reason, domain: detail.domain });
    else if (name === "RetryInfo") found.retry_ms = Number(detail.retry_delay.seconds) * 1000 + detail.retry_delay.nanos / 1e6;
    else if (name === "BadRequest") found.fields = detail.field_violations.map(({ field }) => field);
    else throw new Error(`an unexpected ${type_url}`);
  }
  return found;
}

function outcome(status, initial, body, parse) {
  const seen = {
    code: status.code, message: status.details, initial: told(initial), trailing: told(status.metadata), details: {}, body: null,
  };
  if (status.code !== grpc.status.OK) return { ...seen, details: detailsOf(status) };
  const parsed = parse(body);
  seen.body = { length: body.length, sha256: createHash("sha256").update(body).digest("hex") };
  // As the bytes are for Stats, whose answer has other fields.
  return {
    ...seen, parsed, id: parsed.id, amount: parsed.amount,
    echo: (parsed.played?.metadata ?? []).map(({ name, value }) => [name, base64(value)]),
  };
}

async function ask(...args) {
  const { parsed, ...seen } = await call(...args).seen;
  return seen;
}

async function stats(client, key) {
  const { parsed, ...seen } = await call(client, "Stats", { key }).seen;
  if (!parsed) throw new Error(JSON.stringify(seen));
  return { begun: parsed.begun, finished: parsed.finished };
}

async function open(client, gate) {
  const seen = await ask(client, "Open", { gate }, { key: "open-" + gate });
  if (seen.code !== 0) throw new Error(JSON.stringify(seen));
}

async function until(what, isSo) {
  const end = Date.now() + PATIENCE_MS;
  while (!(await isSo())) {
    if (Date.now() > end) throw new Error("waited for " + what);
    await sleep(10);
  }
}

const create = (script = {}, amount = 1) => ({ item: "tea", amount, script });

async function times(count, make) {
  const all = [];
  for (let nth = 0; nth < count; nth++) all.push(await make(nth));
  return all;
}

// A call that its client gives up while it runs, and makes again.
async function left(key, leave) {
  const client = connect();
  const retrying = connect({ retry: true });
  const before = await stats(client, key);
  const lost = await leave(client, create({ gate: key }), key);
  const running = await stats(client, key);
  await open(client, key);
  await until("its end", async () => (await stats(client, key)).finished === 1);
  const again = await times(2, () => ask(retrying, "Create", create({ gate: key }), { key }));
  return { before, lost, running, again, stats: await stats(client, key) };
}

async function chat(client, key) {
  const { path, requestSerialize, responseDeserialize } = Orders.service.Chat;
  const stream = client.makeBidiStreamRequest(path, requestSerialize, responseDeserialize, metadataOf(key), deadlineIn(PATIENCE_MS));
  const code = new Promise((resolve) => stream.on("status", (status) => resolve(status.code)));
  stream.on("error", () => {}); // the status says it
  const notes = stream[Symbol.asyncIterator]();
  const said = [];
  for (const text of ["one", "two"]) {
    stream.write({ text });
    // The next is not sent before this one is answered: buffered, the call would stand still.
    said.push((await notes.next()).value.text);
  }
  stream.end();
  let rest = 0;
  while (!(await notes.next()).done) rest++;
  return { said, rest, code: await code };
}

async function watch(client, key) {
  const { path, requestSerialize, responseDeserialize } = Orders.service.Watch;
  const gate = "watch-" + key;
  const stream = client.makeServerStreamRequest(
    path, requestSerialize, responseDeserialize, { order: "o", count: 3, gate }, metadataOf(key), deadlineIn(PATIENCE_MS),
  );
  const code = new Promise((resolve) => stream.on("status", (status) => resolve(status.code)));
  stream.on("error", () => {});
  const orders = stream[Symbol.asyncIterator]();
  await orders.next();
  // The others are not sent before the gate is open: buffered, the first would not have come.
  await open(client, gate);
  let rest = 0;
  while (!(await orders.next()).done) rest++;
  return { rest, code: await code };
}

// Services that are not in the descriptor set, by hand.
function raw(client, path, bytes) {
  return new Promise((resolve) => {
    let body;
    const started = client.makeUnaryRequest(
      path, asIs, asIs, Buffer.from(bytes), new grpc.Metadata(), deadlineIn(PATIENCE_MS), (_, bytes) => { body = bytes; },
    );
    started.on("status", ({ code }) => setImmediate(() => resolve({ code, body })));
  });
}

const scenarios = {
  async first() {
    const client = connect();
    const answer = await ask(client, "Create", create({ echo_metadata: true }), { key: "first" });
    return { answer, stats: await stats(client, "first") };
  },

  async replay() {
    const client = connect();
    const script = {
      headers: entries(["x-shelf", "a"], ["x-shelf", "b"]),
      trailers: entries(["x-cost", "3"], ["x-proof-bin", [0x00, 0xff]]),
    };
    const info = rpc("ErrorInfo").encode({ reason: "SOLD_OUT", domain: "shop" }).finish();
    const details = rpc("Status").encode({
      code: 5, message: "no tea left", details: [{ type_url: "type.googleapis.com/google.rpc.ErrorInfo", value: info }],
    }).finish();
    const failing = { ...script, code: 5, message: "no tea left", details };
    const ok = await times(3, () => ask(client, "Create", create(script), { key: "ok" }));
    const failed = await times(3, () => ask(client, "Create", create(failing), { key: "failed" }));
    return { ok, failed, stats: [await stats(client, "ok"), await stats(client, "failed")] };
  },

  async mismatch() {
    const client = connect();
    const answers = await times(3, (nth) => ask(client, "Create", create({}, [1, 2, 1][nth]), { key: "one" }));
    answers.push(await ask(client, "Pay", { order: "tea", amount: 1 }, { key: "one" }));
    return { answers, stats: await stats(client, "one") };
  },

  async missing_key() {
    const client = connect();
    return { answer: await ask(client, "Create", create()), stats: await stats(client, "") };
  },

  // The test opens the gate once two calls were refused: one that does not try again, and the first try of one that does.
  async in_progress() {
    const client = connect();
    const retrying = connect({ retry: true });
    const request = create({ gate: "busy" });
    const held = ask(client, "Create", request, { key: "busy" });
    await until("the first to run", async () => (await stats(client, "busy")).begun === 1);
    const refused = await ask(client, "Create", request, { key: "busy" });
    const { seen, initial } = call(retrying, "Create", request, { key: "busy" });
    const { parsed, ...retried } = await seen;
    const tries = Number(initial().get("grpc-previous-rpc-attempts")[0]);
    return { refused, retried, tries_before: tries, first: await held, stats: await stats(client, "busy") };
  },

  async deadline() {
    return left("deadline", async (client, request, key) => {
      const lost = await ask(client, "Create", request, { key, timeout: 2000 });
      await until("it to run", async () => (await stats(client, key)).begun === 1);
      return lost;
    });
  },

  async cancelled() {
    return left("cancelled", async (client, request, key) => {
      const started = call(client, "Create", request, { key });
      await until("it to run", async () => (await stats(client, key)).begun === 1);
      started.cancel();
      return { code: (await started.seen).code };
    });
  },

  async gzip() {
    const [packing, plain] = [connect({ gzip: true }), connect()];
    const request = create({ echo_metadata: true, padding: 2000, message: "long enough to be worth it ".repeat(40) });
    const packed = await ask(packing, "Create", request, { key: "gzip" });
    const unpacked = await ask(plain, "Create", request, { key: "gzip" });
    return { packed, plain: unpacked, stats: await stats(plain, "gzip") };
  },

  async binary_metadata() {
    const client = connect();
    const twice = (name) => [[name, Buffer.from([0x00, 0x01, 0xff])], [name, Buffer.from([0xfe])]];
    const seen = entries(...twice("seen-bin"));
    const request = create({ echo_metadata: true, headers: seen, trailers: seen });
    const answers = await times(2, () => ask(client, "Create", request, { key: "bin", metadata: twice("trace-bin") }));
    return { answers, stats: await stats(client, "bin") };
  },

  async messages() {
    const client = connect();
    const request = create({ code: 9, message: "Größe 100 % – tab\t, line\n, \u{1f4a5}" });
    const answers = await times(2, () => ask(client, "Create", request, { key: "text" }));
    return { answers, stats: await stats(client, "text") };
  },

  async empty() {
    const client = connect();
    const asked = await times(2, () => ask(client, "Create", {}, { key: "asked" }));
    const given = await times(2, () => ask(client, "Refund", { script: { empty: true } }, { key: "given" }));
    return { asked, given, stats: [await stats(client, "asked"), await stats(client, "given")] };
  },

  async big() {
    const client = connect();
    const kept = await times(2, () => ask(client, "Create", create({ padding: 300_000 }), { key: "kept" }));
    const large = await times(2, () => ask(client, "Create", create({ padding: 2_000_000 }), { key: "large" }));
    return { kept, large, stats: [await stats(client, "kept"), await stats(client, "large")] };
  },

  async streams() {
    const client = connect();
    const chats = await times(2, () => chat(client, "stream"));
    return { chats, watched: await times(2, () => watch(client, "stream")) };
  },

  async concurrent() {
    const client = connect();
    const request = create({ gate: "all" });
    let done = 0;
    const calls = await times(50, () => {
      const seen = ask(client, "Create", request, { key: "all" });
      seen.then(() => done++);
      return [seen]; // in an array, so that nobody waits for it here
    });
    await until("all but one to be refused", () => done === 49);
    await open(client, "all");
    const answers = await Promise.all(calls.flat());
    const retrying = connect({ retry: true });
    const again = await Promise.all(Array.from({ length: 50 }, () => ask(retrying, "Create", request, { key: "all" })));
    return { answers, again, stats: await stats(client, "all") };
  },

  async reflection() {
    // list_services = 7: "*"; the answer's list_services_response = 6 { service = 1 { name = 1 } }
    const client = connect();
    const stream = client.makeBidiStreamRequest(
      "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", asIs, asIs, new grpc.Metadata(), deadlineIn(PATIENCE_MS),
    );
    const answers = stream[Symbol.asyncIterator]();
    const { root } = protobuf.parse(`
      syntax = "proto3";
      message Answer { oneof message_response { Files files = 4; List list = 6; } }
      message Files { repeated bytes file_descriptor_proto = 1; }
      message List { repeated Service service = 1; }
      message Service { string name = 1; }
    `, { keepCase: true });
    const answer = async () => root.lookupType("Answer").decode((await answers.next()).value);
    stream.write(Buffer.from([0x3a, 1, 0x2a]));
    const services = (await answer()).list.service.map(({ name }) => name).sort();
    // file_containing_symbol = 4
    stream.write(Buffer.concat([Buffer.from([0x22, 11]), Buffer.from("shop.Orders")]));
    const [file] = (await answer()).files.file_descriptor_proto;
    stream.end();
    // A set of this one file.
    const writer = protobuf.Writer.create().uint32(10).bytes(file);
    const loaded = loader.loadFileDescriptorSetFromBuffer(Buffer.from(writer.finish()));
    return { services, methods: Object.keys(loaded["shop.Orders"]) };
  },

  async health() {
    const client = connect();
    const request = (service) => Buffer.concat([Buffer.from([0x0a, service.length]), Buffer.from(service)]);
    const status = (bytes) => (bytes[0] === 0x08 ? bytes[1] : 0);
    const known = await raw(client, "/grpc.health.v1.Health/Check", request("shop.Orders"));
    const stream = client.makeServerStreamRequest(
      "/grpc.health.v1.Health/Watch", asIs, asIs, request("shop.Orders"), new grpc.Metadata(), deadlineIn(PATIENCE_MS),
    );
    stream.on("error", () => {}); // it is cancelled below
    const watched = status((await stream[Symbol.asyncIterator]().next()).value);
    stream.cancel();
    const { code } = await raw(client, "/grpc.health.v1.Health/Check", request("nobody"));
    return { status: status(known.body), watched, unknown: code };
  },
};

console.log(JSON.stringify(await scenarios[scenario]()));
for (const client of connections) client.close();
