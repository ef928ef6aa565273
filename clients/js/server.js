// For apps: asks ibid before a handler runs, and tells it afterwards (docs/exchange-api.md). All policy is in ibid's own
// configuration. For Express (and everything that uses its middleware), Fastify, fetch-style handlers and NestJS.
import { createHash, randomBytes, randomUUID } from "node:crypto";
import http from "node:http";
import { Readable } from "node:stream";

const PAUSES = [0, 100, 300, 600, 1000];
const METHODS = ["POST", "PUT", "PATCH", "DELETE"];
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** The key of a call that a handler makes, from its header `Ibid-Operation`: equal in all attempts, another one for each name. */
export function outboundKey(operation, name) {
  const hash = createHash("sha256");
  for (const part of [operation, name].map((text) => Buffer.from(text))) {
    const length = Buffer.alloc(8);
    length.writeUInt32LE(part.length);
    hash.update(length).update(part);
  }
  const bytes = hash.digest().subarray(0, 16);
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  return bytes.toString("hex").replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

/** Thrown by a handler that provably did nothing: the key is free again. */
export class NotStarted extends Error {}

export class Ibid {
  constructor({ address = process.env.IBID_API, token, unreachable = "closed", identify, methods = METHODS, timeout = 60_000 }) {
    if (!address) throw new TypeError("address: expected \"unix:PATH\" or \"127.0.0.1:PORT\", got nothing");
    if (!["closed", "open"].includes(unreachable)) throw new TypeError(`unreachable: expected "closed" or "open", got "${unreachable}"`);
    const [, host, port] = /^(.*):(\d+)$/.exec(address) ?? [];
    const place = address.startsWith("unix:") ? { socketPath: address.slice(5) } : { host, port };
    const headers = { "content-type": "application/json", ...(token && { authorization: `Bearer ${token}` }) };
    Object.assign(this, { unreachable, identify, methods, timeout });
    this.options = { ...place, method: "POST", headers, agent: new http.Agent({ keepAlive: true }) };
  }

  covers(method) {
    return this.methods.includes(method);
  }

  /** Decides about a request: `{answer}` goes to the client, `{run}` runs the handler. */
  async begin(source, { method, target, headers, body, peer }) {
    const named = Object.entries((await this.identify?.(source)) ?? {});
    if (named.length) {
      const replaced = new Set([...named.map(([name]) => name.toLowerCase()), "x-forwarded-for"]);
      headers = [...headers.filter(([name]) => !replaced.has(name.toLowerCase())), ...named];
      if (peer) headers.push(["x-forwarded-for", peer]);
      peer = "127.0.0.1";
    }
    const id = randomBytes(16).toString("hex");
    const message = { id, method, target, headers, body_base64: body.toString("base64"), peer };
    let wasSent = false;
    for (const pause of PAUSES) {
      if (pause) await sleep(pause);
      const { status, found, error, unsent } = await this.call("/v1/exchanges", message);
      if (unsent && !wasSent) {
        console.error(`ibid cannot be reached: ${error.message}`);
        return this.unreachable === "open" ? { run: { degraded: true, headers: [] } } : { answer: unavailable("ibid cannot be reached") };
      }
      wasSent ||= Boolean(error);
      if (status === 201) return { run: { ...found, deadline: Date.now() + found.deadline_ms } };
      if (status === 204) return { run: null };
      if (status === 200) return { answer: decode(found.answer) };
      if (status && status !== 503) {
        console.error(`ibid refused a call: ${status} ${found.detail}`);
        return { answer: { ...unavailable(found.detail), status: status === 413 ? 413 : 503 } };
      }
    }
    return { answer: unavailable("ibid did not answer; nothing was run, so send the request again") };
  }

  /** Records the handler's response. Returns what goes to the client. */
  async end(run, own) {
    if (run.degraded) return { ...own, headers: [...own.headers, ["idempotency-guarantee", "degraded"]] };
    const { status, headers, body } = own;
    return this.finish(run, "end", { status, headers, body_base64: body.toString("base64") }, own);
  }

  async failed(run, error) {
    if (run.degraded) return unavailable("the handler failed");
    return this.finish(run, "failed", { how: error instanceof NotStarted ? "not-started" : "unknown" }, unavailable("the handler failed"));
  }

  async finish(run, verb, message, own) {
    for (let pause = 100; ; pause = Math.min(pause + 100, 1000)) {
      const { status, found, error } = await this.call(`/v1/exchanges/${run.exchange}/${verb}`, message);
      if (status === 200) return decode(found.answer);
      if ((status && status !== 503) || Date.now() > run.deadline) {
        console.error(`the end of an exchange was not recorded: ${error?.message ?? found.detail}`);
        return { ...own, headers: [...own.headers, ["idempotency-stored", "false"]] };
      }
      await sleep(pause);
    }
  }

  /** Sends a call. `unsent`: no connection was made. */
  call(path, message) {
    const body = JSON.stringify(message);
    return new Promise((resolve) => {
      const options = { ...this.options, path, headers: { ...this.options.headers, "content-length": Buffer.byteLength(body) } };
      let isConnected = false;
      const request = http.request(options, async (response) => {
        try {
          const text = Buffer.concat(await response.toArray()).toString();
          resolve({ status: response.statusCode, found: text ? JSON.parse(text) : {} });
        } catch (error) {
          resolve({ error });
        }
      });
      request.on("socket", (socket) => {
        if (request.reusedSocket || !socket.connecting) isConnected = true;
        else socket.once("connect", () => (isConnected = true));
      });
      request.setTimeout(this.timeout, () => request.destroy(new Error("ibid did not answer in time")));
      // ibid may have closed an idle connection. Every call can be sent again.
      const again = (error) => this.call(path, message).then((reply) => (reply.unsent ? { error } : reply));
      request.on("error", (error) => resolve(request.reusedSocket ? again(error) : { error, unsent: !isConnected }));
      request.end(body);
    });
  }
}

const decode = ({ status, headers, body_base64 }) => ({ status, headers, body: Buffer.from(body_base64, "base64") });

function unavailable(detail) {
  const problem = { type: "about:blank", title: "Service Unavailable", status: 503, detail };
  const headers = [["content-type", "application/problem+json"], ["retry-after", "1"]];
  return { status: 503, headers, body: Buffer.from(JSON.stringify(problem)) };
}

/** The pairs of a flat list such as `rawHeaders`. */
const pairs = (flat) => Array.from({ length: flat.length / 2 }, (_, at) => [flat[2 * at], flat[2 * at + 1]]);

/** Names that repeat as several pairs. */
const headerPairs = (headers) => Object.entries(headers).flatMap(([name, value]) => [value].flat().map((one) => [name, String(one)]));

/** What the handler gets: its own Ibid-* headers, not the client's. */
function setRunHeaders(headers, run) {
  for (const name of Object.keys(headers)) if (name.toLowerCase().startsWith("ibid-")) delete headers[name];
  for (const [name, value] of run?.headers ?? []) headers[name] = value;
}

/** Reads the whole body and puts it back, so that body parsers find it. */
function readBody(request) {
  return new Promise((resolve, reject) => {
    const chunks = [];
    const look = () => {
      for (let chunk = request.read(); chunk !== null; chunk = request.read()) chunks.push(chunk);
      if (!request.complete) return;
      request.off("readable", look).off("error", reject).off("close", gone);
      const body = Buffer.concat(chunks);
      if (body.length) request.unshift(body);
      resolve(body);
    };
    const gone = () => reject(new Error("the client broke off its request"));
    request.on("readable", look).on("error", reject).on("close", gone);
    look();
  });
}

const requestOf = (request, body) =>
  ({ method: request.method, target: request.originalUrl ?? request.url, headers: pairs(request.rawHeaders), body, peer: request.socket.remoteAddress });

const RUN = Symbol("the exchange of a request");

/** Middleware for Express, and for everything that uses such middleware. Put it before body parsers. */
export function express(options) {
  const ibid = options instanceof Ibid ? options : new Ibid(options);
  return async (request, response, next) => {
    if (!ibid.covers(request.method)) return next();
    try {
      const body = await readBody(request);
      const { answer, run } = await ibid.begin(request, requestOf(request, body));
      if (answer) return send(response, answer);
      setRunHeaders(request.headers, run);
      if (run) capture(ibid, request, response, run);
      next();
    } catch (error) {
      next(error);
    }
  };
}

/** Express's error handler, to be put last: an exception leaves the outcome unknown. Without it, the 500 of the app counts as a response. */
export function expressErrors() {
  return async (error, request, response, next) => {
    const held = request[RUN];
    if (held) {
      held.release();
      await held.ibid.failed(held.run, error);
    }
    next(error);
  };
}

function send(response, { status, headers, body }) {
  for (const name of response.getHeaderNames()) response.removeHeader(name);
  response.statusCode = status;
  for (const [name, value] of headers) response.appendHeader(name, value);
  response.end(body);
}

/** Holds the response back until it is recorded. */
function capture(ibid, request, response, run) {
  const { write, end, writeHead, flushHeaders } = response;
  const chunks = [];
  const add = (chunk, encoding) => chunk && typeof chunk !== "function" && chunks.push(Buffer.from(chunk, typeof encoding === "string" ? encoding : undefined));
  const release = () => {
    Object.assign(response, { write, end, writeHead, flushHeaders });
    delete request[RUN];
  };
  request[RUN] = { ibid, run, release };
  response.flushHeaders = () => {};
  response.writeHead = (status, ...more) => {
    response.statusCode = status;
    const headers = more.at(-1);
    if (headers && typeof headers === "object") for (const [name, value] of Array.isArray(headers) ? pairs(headers) : Object.entries(headers)) response.setHeader(name, value);
    return response;
  };
  response.write = (chunk, encoding, done) => {
    add(chunk, encoding);
    [encoding, done].find((one) => typeof one === "function")?.();
    return true;
  };
  response.end = (chunk, encoding, done) => {
    add(chunk, encoding);
    const own = { status: response.statusCode, headers: headerPairs(response.getHeaders()), body: Buffer.concat(chunks) };
    release();
    // A second end while this one is recorded must not send anything.
    response.write = response.end = () => response;
    ibid.end(run, own).then((answer) => {
      Object.assign(response, { write, end });
      send(response, answer);
      [chunk, encoding, done].find((one) => typeof one === "function")?.();
    });
    return response;
  };
}

/** A Fastify plugin: `app.register(fastify, options)`. */
export async function fastify(app, options) {
  const ibid = options.ibid ?? new Ibid(options);
  app.addHook("preParsing", async (request, reply, payload) => {
    if (!ibid.covers(request.method)) return payload;
    const body = Buffer.concat(await payload.toArray());
    const { answer, run } = await ibid.begin(request, requestOf(request.raw, body));
    if (answer) {
      reply.code(answer.status);
      for (const [name, value] of answer.headers) reply.header(name, value);
      return reply.send(answer.body);
    }
    setRunHeaders(request.raw.headers, run);
    request[RUN] = run;
    return Object.assign(Readable.from(body.length ? [body] : []), { receivedEncodedLength: body.length });
  });
  app.addHook("onError", async (request, reply, error) => {
    const run = request[RUN];
    // Errors of status 4xx are responses that the app chose.
    if (!run || (error.statusCode ?? 500) < 500) return;
    request[RUN] = null;
    await ibid.failed(run, error);
  });
  app.addHook("onSend", async (request, reply, payload) => {
    const run = request[RUN];
    if (!run) return payload;
    request[RUN] = null;
    const body = payload?.pipe ? Buffer.concat(await payload.toArray()) : Buffer.from(payload ?? "");
    const answer = await ibid.end(run, { status: reply.statusCode, headers: headerPairs(reply.getHeaders()), body });
    for (const name of Object.keys(reply.getHeaders())) reply.removeHeader(name);
    reply.code(answer.status);
    for (const [name, value] of answer.headers) if (name !== "content-length") reply.header(name, value);
    return answer.body;
  });
}
// The hooks are for the whole app, not only for this plugin.
fastify[Symbol.for("skip-override")] = true;

/** Wraps a fetch-style handler: Next.js route handlers, Hono, Bun, Deno. */
export function withIdempotency(handler, options = {}) {
  const ibid = options instanceof Ibid ? options : new Ibid(options);
  return async (request, ...context) => {
    if (!ibid.covers(request.method)) return handler(request, ...context);
    const url = new URL(request.url);
    const body = Buffer.from(await request.arrayBuffer());
    const headers = [...request.headers];
    if (!request.headers.has("host")) headers.push(["host", url.host]);
    const { answer, run } = await ibid.begin(request, { method: request.method, target: url.pathname + url.search, headers, body, peer: options.peer?.(request) });
    if (answer) return toResponse(answer);
    const own = Object.fromEntries(headers);
    setRunHeaders(own, run);
    const again = new Request(request.url, { method: request.method, headers: own, body: body.length ? body : undefined });
    if (!run) return handler(again, ...context);
    let response;
    try {
      response = await handler(again, ...context);
      response = { status: response.status, headers: [...response.headers], body: Buffer.from(await response.arrayBuffer()) };
    } catch (error) {
      await ibid.failed(run, error);
      throw error;
    }
    return toResponse(await ibid.end(run, response));
  };
}

function toResponse({ status, headers, body }) {
  return new Response([204, 205, 304].includes(status) ? null : body, { status, headers });
}

/** A NestJS interceptor on Express, for handlers that return JSON or text. `rxjs` and `@nestjs/common` are the app's own. */
export function nestInterceptor(options, { HttpException, from, lastValueFrom }) {
  const ibid = options instanceof Ibid ? options : new Ibid(options);
  const reply = (response, { status, headers, body }) => {
    for (const [name, value] of headers) if (name !== "content-length") response.setHeader(name, value);
    const isJson = headers.some(([name, value]) => name === "content-type" && /[/+]json/.test(value));
    const value = body.length ? (isJson ? JSON.parse(body) : body.toString()) : undefined;
    if (status >= 400) throw new HttpException(value, status);
    response.status(status);
    return from([value]);
  };
  return {
    async intercept(context, next) {
      const [request, response] = [context.switchToHttp().getRequest(), context.switchToHttp().getResponse()];
      if (!ibid.covers(request.method)) return next.handle();
      const body = request.rawBody ?? Buffer.from(request.body === undefined ? "" : JSON.stringify(request.body));
      const told = requestOf(request, body);
      told.headers = told.headers.filter(([name]) => name.toLowerCase() !== "content-length");
      const { answer, run } = await ibid.begin(request, told);
      if (answer) return reply(response, answer);
      setRunHeaders(request.headers, run);
      if (!run) return next.handle();
      let value;
      try {
        value = await lastValueFrom(next.handle(), { defaultValue: undefined });
      } catch (error) {
        const status = error.getStatus?.() ?? 500;
        if (status >= 500) await ibid.failed(run, error);
        else await ibid.end(run, { status, headers: [["content-type", "application/json"]], body: Buffer.from(JSON.stringify(error.getResponse())) });
        throw error;
      }
      const [text, type] = typeof value === "string" ? [value, "text/html"] : [JSON.stringify(value) ?? "", "application/json"];
      const headers = [...headerPairs(response.getHeaders()), ["content-type", `${type}; charset=utf-8`]];
      return reply(response, await ibid.end(run, { status: response.statusCode, headers, body: Buffer.from(text) }));
    },
  };
}

/** A new key: a UUID. */
export const generateIdempotencyKey = () => randomUUID();

/** Whether a key is a UUID or 16 to 255 letters, digits, `_` and `-` (`key.format = "token"`). */
export const isValidIdempotencyKey = (key) => typeof key === "string" && /^[A-Za-z0-9_-]{16,255}$/.test(key);

/** The key of a request's headers (`Headers`, or an object as Node has it), or null. */
export function extractIdempotencyKey(headers, name = "idempotency-key") {
  const value = typeof headers.get === "function" ? headers.get(name) : headers[name.toLowerCase()];
  return typeof value === "string" && value.trim() ? value.trim().replace(/^"(.*)"$/, "$1") : null;
}

/** Does nothing and returns 0: ibid removes expired keys by itself (`store.sweep_every`). For code that calls it daily. */
export const cleanupOldIdempotencyKeys = async () => 0;
