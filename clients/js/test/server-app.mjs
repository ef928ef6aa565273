// The app of the scenarios in the framework FRAMEWORK. With IBID_API the SDK wraps it. APPS has the frameworks.
import { appendFileSync, readFileSync } from "node:fs";
import http from "node:http";
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";

import { Ibid, express as ibidExpress, expressErrors, fastify as ibidFastify, nestInterceptor, withIdempotency } from "../server.js";

const require = createRequire(`${process.env.APPS}/`);
const options = process.env.IBID_API && new Ibid({ address: process.env.IBID_API });
const port = Number(process.env.PORT ?? 0);
const listening = (address) => console.error(`listening on http://127.0.0.1:${address.port}`);

async function handle(path, headers) {
  appendFileSync(process.env.RUNS_FILE, `${path}\n`);
  const run = readFileSync(process.env.RUNS_FILE, "utf8").trim().split("\n").length;
  if (path === "/exception") throw new Error("the handler failed");
  if (path === "/killed") process.kill(process.pid, "SIGKILL");
  if (path === "/slow" || path === "/waiting") await sleep(1000);
  const told = { run, attempt: headers["ibid-attempt"] };
  if (path === "/presets/mcp") return JSON.stringify({ jsonrpc: "2.0", id: 1, result: told });
  return path === "/large" ? "x".repeat(300_000) : JSON.stringify(told);
}

const frameworks = {
  express() {
    const express = require("express");
    const app = express();
    if (options) app.use(ibidExpress(options));
    app.use(express.json({ limit: "4mb", strict: false }));
    app.post("/{*path}", async (request, response) => {
      if (request.body === undefined) throw new Error("the body parser found no body");
      const body = await handle(request.path, request.headers);
      response.status(201).set("content-type", "application/json");
      response.write(body.slice(0, 10));
      response.end(body.slice(10));
    });
    if (options) app.use(expressErrors());
    const server = app.listen(port, "127.0.0.1", () => listening(server.address()));
  },

  async fastify() {
    const app = require("fastify")({ bodyLimit: 4 << 20 });
    if (options) await app.register(ibidFastify, { ibid: options });
    app.post("/*", async (request, reply) => {
      if (request.body === undefined) throw new Error("the body parser found no body");
      const body = await handle(request.url, request.raw.headers);
      return reply.code(201).type("application/json").send(body);
    });
    await app.listen({ port, host: "127.0.0.1" });
    listening(app.server.address());
  },

  fetch() {
    const plain = async (request) => {
      await request.json();
      const body = await handle(new URL(request.url).pathname, Object.fromEntries(request.headers));
      return new Response(body, { status: 201, headers: { "content-type": "application/json" } });
    };
    const handler = options ? withIdempotency(plain, options) : plain;
    const server = http.createServer(async (request, response) => {
      try {
        const body = Buffer.concat(await request.toArray());
        const answer = await handler(new Request(`http://${request.headers.host}${request.url}`, { method: request.method, headers: request.headers, body }));
        response.writeHead(answer.status, Object.fromEntries(answer.headers));
        response.end(Buffer.from(await answer.arrayBuffer()));
      } catch {
        response.writeHead(500).end();
      }
    });
    server.listen(port, "127.0.0.1", () => listening(server.address()));
  },

  async nest() {
    require("reflect-metadata");
    const { Controller, HttpException, Module, Post, Req, UseInterceptors } = require("@nestjs/common");
    const { NestFactory } = require("@nestjs/core");
    const { from, lastValueFrom } = require("rxjs");
    class Payments {
      async pay(request) {
        const body = await handle(request.path, request.headers);
        return body.startsWith("{") ? JSON.parse(body) : body;
      }
    }
    const pay = Object.getOwnPropertyDescriptor(Payments.prototype, "pay");
    Post("*path")(Payments.prototype, "pay", pay);
    Req()(Payments.prototype, "pay", 0);
    if (options) UseInterceptors(nestInterceptor(options, { HttpException, from, lastValueFrom }))(Payments.prototype, "pay", pay);
    Controller()(Payments);
    class App {}
    Module({ controllers: [Payments] })(App);
    const app = await NestFactory.create(App, { logger: false, rawBody: true });
    app.useBodyParser("json", { limit: "4mb", strict: false });
    await app.listen(port, "127.0.0.1");
    listening(app.getHttpServer().address());
  },
};

await frameworks[process.env.FRAMEWORK]();
