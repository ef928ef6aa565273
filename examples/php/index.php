<?php
// A payments API without a word about idempotency: php -S 127.0.0.1:3000 index.php
header('Content-Type: application/json');

if ($_SERVER['REQUEST_METHOD'] !== 'POST' || $_SERVER['REQUEST_URI'] !== '/payments') {
    http_response_code(404);
    echo json_encode(['error' => 'POST /payments is all there is']);
    return;
}
$order = json_decode(file_get_contents('php://input'), true);
http_response_code(201);
echo json_encode([
    'id' => bin2hex(random_bytes(4)),          // another one on every run
    'amount' => $order['amount'] ?? null,
    'attempt' => (int) ($_SERVER['HTTP_IBID_ATTEMPT'] ?? 0),
]);
