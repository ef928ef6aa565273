<?php

// What the scenarios do not show, without an ibid.

declare(strict_types=1);

require __DIR__ . '/autoload.php';
ini_set('error_log', '/dev/null');

use Ibid\Answer;
use Ibid\Ibid;
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
foreach (json_decode(file_get_contents(__DIR__ . '/../../outbound_keys.json'), true, 512, JSON_THROW_ON_ERROR) as $row) {
    check(\Ibid\outboundKey($row['operation'], $row['name']) === $row['key'], 'the keys of outbound calls are those of every SDK');
}
echo "all passed\n";
