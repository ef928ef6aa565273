"""Stripe's own SDK, with the gateway as its API.

    client.py http://HOST:PORT

Each line of stdin is a call: {"do": "create" | "retrieve", "key", "amount", "retries"}. Each line of stdout is what came of it.
"""

import json
import sys

import stripe

stripe.enable_telemetry = False
client = stripe.StripeClient("sk_test_1", base_addresses={"api": sys.argv[1]})


def call(asked):
    options = {"max_network_retries": asked.get("retries", 0)}
    if "key" in asked:
        options["idempotency_key"] = asked["key"]
    if asked["do"] == "retrieve":
        return client.v1.payment_intents.retrieve("pi_1", options=options)
    return client.v1.payment_intents.create({"amount": asked["amount"], "currency": "usd"}, options)


for line in sys.stdin:
    try:
        made = call(json.loads(line))
        headers = made.last_response.headers
        told = {"id": made.id, "replayed": headers.get("idempotent-replayed"), "key": headers.get("idempotency-key")}
    except stripe.StripeError as error:
        inner = (error.json_body or {}).get("error", {})
        told = {
            "error": type(error).__name__,
            "status": error.http_status,
            "type": inner.get("type"),
            "code": inner.get("code"),
            "message": error.user_message,
            "key": (error.headers or {}).get("idempotency-key"),
        }
    print(json.dumps(told), flush=True)
