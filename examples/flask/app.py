"""A payments API without a word about idempotency: pip install flask && python app.py 3000"""

import secrets
import sys

from flask import Flask, jsonify, request

app = Flask(__name__)


@app.post("/payments")
def pay():
    order = request.get_json(silent=True) or {}
    payment = {
        "id": secrets.token_hex(4),  # another one on every run
        "amount": order.get("amount"),
        "attempt": int(request.headers.get("Ibid-Attempt", 0)),
    }
    return jsonify(payment), 201


if __name__ == "__main__":
    app.run(host="127.0.0.1", port=int(sys.argv[1]) if len(sys.argv) > 1 else 3000)
