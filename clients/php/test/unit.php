<?php

// What the scenarios do not show. IBID_API names an ibid whose every path is covered.

declare(strict_types=1);

require __DIR__ . '/autoload.php';
ini_set('error_log', '/dev/null');

use Ibid\Answer;
use Ibid\Ibid;
use Ibid\NotStarted;
use Ibid\Run;

function check(bool $holds, string $what): void
{
    if (!$holds) {
        echo "$what\n";
        exit(1);
    }
}

$begin = fn (Ibid $ibid) => $ibid->begin(null, 'POST', '/pay', [['host', 'a']], '{}', null);
$closed = $begin(new Ibid('unix:/nowhere/api.sock'));
check($closed instanceof Answer && $closed->status === 503 && in_array(['retry-after', '1'], $closed->headers), 'closed refuses');
$ibid = new Ibid('unix:/nowhere/api.sock', unreachable: 'open');
$open = $begin($ibid);
check($open instanceof Run && $open->isDegraded && $open->isCovered(), 'open runs');
$answer = $ibid->end($open, new Answer(201, [], 'paid'));
check($answer->body === 'paid' && $answer->headers === [['idempotency-guarantee', 'degraded']], 'and says so');
try {
    new Ibid('unix:/nowhere', unreachable: 'maybe');
    check(false, 'there is no third way');
} catch (InvalidArgumentException) {
}
check(!$ibid->covers('GET') && $ibid->covers('POST'), 'methods');

// identify names the caller, and the client cannot.
$users = ['u1', 'u2', 'u1'];
$ibid = new Ibid(getenv('IBID_API'), identify: function (string $source) use (&$users): array {
    check($source === 'the request', 'identify gets the request');
    return ['Authorization' => 'Bearer ' . array_shift($users)];
});
$runs = 0;
$bodies = [];
for ($call = 0; $call < 3; $call++) {
    $sent = [['host', 'a'], ['idempotency-key', 'k-1'], ['authorization', 'Bearer forged'], ['X-Forwarded-For', '198.51.100.7']];
    $begun = $ibid->begin('the request', 'POST', '/pay', $sent, '{}', '192.0.2.1');
    $answer = $begun instanceof Run ? $ibid->end($begun, new Answer(201, [], 'paid by ' . ++$runs)) : $begun;
    $bodies[] = $answer->body;
}
check($bodies === ['paid by 1', 'paid by 2', 'paid by 1'], 'a key is valid for the caller that identify names: ' . json_encode($bodies));

// A handler that did not start can run again, and one that failed cannot.
$ibid = new Ibid(getenv('IBID_API'));
$begin = fn (string $key) => $ibid->begin(null, 'POST', '/pay', [['host', 'a'], ['idempotency-key', $key]], '{}', null);
$ibid->failed($begin('k-2'), new NotStarted());
$again = $begin('k-2');
check($again instanceof Run, 'not started');
$ibid->failed($again, new RuntimeException('oops'));
$refused = $begin('k-2');
check($refused instanceof Answer && str_contains($refused->body, '#outcome-unknown'), 'outcome unknown');
foreach (json_decode(file_get_contents(__DIR__ . '/../../outbound_keys.json'), true, 512, JSON_THROW_ON_ERROR) as $row) {
    check(\Ibid\outboundKey($row['operation'], $row['name']) === $row['key'], 'the keys of outbound calls are those of every SDK');
}
echo "all passed\n";
