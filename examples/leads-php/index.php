<?php

// A lead form. POST /api/leads appends the lead to leads.jsonl, in place of a CRM; GET /api/leads counts the leads.

declare(strict_types=1);

require __DIR__ . '/vendor/autoload.php';

use Ibid\Ibid;

use function Ibid\idempotent;

const LEADS = __DIR__ . '/leads.jsonl';

function respond(int $status, array $content): void
{
    http_response_code($status);
    header('Content-Type: application/json');
    echo json_encode($content), "\n";
}

function count_leads(): int
{
    return is_file(LEADS) ? count(file(LEADS)) : 0;
}

function create_lead(): void
{
    $lead = json_decode((string) file_get_contents('php://input'), true) ?? $_POST;
    if (!filter_var($lead['email'] ?? null, FILTER_VALIDATE_EMAIL)) {
        respond(422, ['status' => 'error', 'message' => 'email: expected an address']);
        return;
    }
    $file = fopen(LEADS, 'a+');
    flock($file, LOCK_EX);
    $number = count_leads() + 1;
    fwrite($file, json_encode(['lead' => $number] + $lead) . "\n");
    fclose($file);
    respond(201, ['status' => 'success', 'lead' => $number]);
}

// A lost lead costs more than a duplicate: if ibid cannot be reached, the form goes on without it.
$ibid = new Ibid('unix:' . __DIR__ . '/ibid.sock', unreachable: 'open');

match ($_SERVER['REQUEST_METHOD'] . ' ' . parse_url($_SERVER['REQUEST_URI'], PHP_URL_PATH)) {
    'POST /api/leads' => idempotent($ibid, create_lead(...)),
    'GET /api/leads' => respond(200, ['leads' => count_leads()]),
    default => respond(404, ['status' => 'error', 'message' => 'there is only /api/leads']),
};
