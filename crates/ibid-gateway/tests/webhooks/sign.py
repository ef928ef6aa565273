"""Signs or verifies one delivery with its sender's own library.

One JSON object on standard input: {"do": "sign" | "verify", "sender", "secret", "body"} with "id" and "at" (seconds) to
sign, or "headers" to verify. One on standard output: {"headers": {...}} or {"believed": true | false}.
"""

import json
import sys
from datetime import datetime, timezone

import standardwebhooks.webhooks
import stripe
import svix.webhooks


def sign(asked):
    sender, body = asked["sender"], asked["body"]
    if sender == "stripe":
        return {
            "Stripe-Signature": stripe.WebhookSignature.generate_signature_header(
                body, asked["secret"], timestamp=asked["at"]
            )
        }
    library, prefix = {
        "standard": (standardwebhooks.webhooks.Webhook, "webhook"),
        "svix": (svix.webhooks.Webhook, "svix"),
    }[sender]
    time = datetime.fromtimestamp(asked["at"], tz=timezone.utc)
    return {
        f"{prefix}-id": asked["id"],
        f"{prefix}-timestamp": str(asked["at"]),
        f"{prefix}-signature": library(asked["secret"]).sign(asked["id"], time, body),
    }


def believed(asked):
    sender, secret, body, headers = (asked[name] for name in ("sender", "secret", "body", "headers"))
    try:
        if sender == "stripe":
            stripe.WebhookSignature.verify_header(body, headers["Stripe-Signature"], secret, tolerance=300)
        else:
            library = {"standard": standardwebhooks.webhooks.Webhook, "svix": svix.webhooks.Webhook}[sender]
            library(secret).verify(body.encode(), headers)
    except (
        standardwebhooks.webhooks.WebhookVerificationError,
        svix.webhooks.WebhookVerificationError,
        stripe.SignatureVerificationError,
    ):
        return False
    return True


asked = json.load(sys.stdin)
answer = {"headers": sign(asked)} if asked["do"] == "sign" else {"believed": believed(asked)}
json.dump(answer, sys.stdout)
