<?php

declare(strict_types=1);

namespace Ibid;

/**
 * Runs a handler that prints its response, as PHP scripts do, and sends the response once it is recorded.
 *
 * The handler runs to its end even if its client disconnects. `exit` inside it counts as its end.
 */
function idempotent(Ibid $ibid, callable $handler): void
{
    if (!$ibid->covers($_SERVER['REQUEST_METHOD'])) {
        $handler();
        return;
    }
    $sent = getallheaders();
    $body = (string) file_get_contents('php://input');
    if ($body === '' && ($_POST !== [] || $_FILES !== [])) {
        // PHP has taken an upload apart: what is compared are its fields and the digests of its files.
        $digest = fn (mixed $file) => is_array($file) ? array_map(fn ($one) => hash_file('sha256', $one), $file) : hash_file('sha256', $file);
        $body = json_encode([$_POST, array_map(fn (array $file) => [$file['name'], $digest($file['tmp_name'])], $_FILES)], JSON_THROW_ON_ERROR);
        $sent = ['Content-Type' => 'application/json'] + array_diff_key($sent, ['Content-Type' => 1, 'Content-Length' => 1]);
    }
    $headers = array_map(fn (string $name, string $value) => [$name, $value], array_keys($sent), $sent);
    $begun = $ibid->begin($_SERVER, $_SERVER['REQUEST_METHOD'], $_SERVER['REQUEST_URI'], $headers, $body, $_SERVER['REMOTE_ADDR'] ?? null);
    if ($begun instanceof Answer) {
        send($begun);
        return;
    }
    foreach (array_keys($_SERVER) as $name) {
        if (str_starts_with((string) $name, 'HTTP_IBID_')) {
            unset($_SERVER[$name]);
        }
    }
    foreach ($begun->headers as [$name, $value]) {
        $_SERVER['HTTP_' . strtoupper(str_replace('-', '_', $name))] = $value;
    }
    if (!$begun->isCovered()) {
        $handler();
        return;
    }
    ignore_user_abort(true);
    $isOver = false;
    $end = function (string $printed) use ($ibid, $begun, &$isOver): void {
        $isOver = true;
        $headers = array_map(fn (string $line) => array_map(trim(...), explode(':', $line, 2)), headers_list());
        send($ibid->end($begun, new Answer((int) http_response_code() ?: 200, $headers, $printed)));
    };
    register_shutdown_function(function () use ($ibid, $begun, $end, &$isOver): void {
        if ($isOver) {
            return;
        }
        // The handler called exit, or PHP gave up.
        $isFatal = ((error_get_last()['type'] ?? 0) & (E_ERROR | E_CORE_ERROR | E_COMPILE_ERROR)) !== 0;
        $isFatal ? $ibid->failed($begun, null) : $end((string) ob_get_clean());
    });
    ob_start();
    try {
        $handler();
    } catch (\Throwable $error) {
        $isOver = true;
        ob_end_clean();
        $ibid->failed($begun, $error);
        // PHP answers 500 only if the handler has set no status.
        header_remove();
        http_response_code(500);
        throw $error;
    }
    $end((string) ob_get_clean());
}

/** The key of a call that a handler makes, from its header `Ibid-Operation`: equal in all attempts, another one for each name. */
function outboundKey(string $operation, string $name): string
{
    $framed = implode('', array_map(fn (string $part) => pack('P', strlen($part)) . $part, [$operation, $name]));
    $bytes = substr(hash('sha256', $framed, true), 0, 16);
    $bytes[6] = chr(ord($bytes[6]) & 0x0f | 0x40);
    $bytes[8] = chr(ord($bytes[8]) & 0x3f | 0x80);
    return vsprintf('%s%s-%s-%s-%s-%s%s%s', str_split(bin2hex($bytes), 4));
}

/** Sends an answer in place of everything that was set before. */
function send(Answer $answer): void
{
    header_remove();
    http_response_code($answer->status);
    foreach ($answer->headers as [$name, $value]) {
        header("$name: $value", false);
    }
    echo $answer->body;
}
