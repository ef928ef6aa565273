<?php

declare(strict_types=1);

namespace Ibid;

/** Where ibid is, and how an app uses it (docs/exchange-api.md). */
final class Ibid
{
    private const PAUSES_MS = [0, 100, 300, 600, 1000];

    /**
     * @param string $address "unix:/run/ibid/api.sock", or "127.0.0.1:8082" with a token
     * @param string $unreachable "closed" answers 503 if no connection can be made; "open" runs the handler unprotected
     * @param ?\Closure $identify returns headers such as ['X-User-Id' => 'u1'] for a request that the app has
     *     authenticated itself; they replace what the client sent under these names
     * @param list<string> $methods the methods that ibid is asked about
     */
    public function __construct(
        private readonly string $address,
        private readonly ?string $token = null,
        private readonly string $unreachable = 'closed',
        private readonly ?\Closure $identify = null,
        private readonly array $methods = ['POST', 'PUT', 'PATCH', 'DELETE'],
        private readonly float $timeout = 60.0,
    ) {
        if (!in_array($unreachable, ['closed', 'open'], true)) {
            throw new \InvalidArgumentException("unreachable: expected 'closed' or 'open', got '$unreachable'");
        }
    }

    public function covers(string $method): bool
    {
        return in_array($method, $this->methods, true);
    }

    /**
     * Decides about a request: an Answer goes to the client, a Run runs the handler.
     *
     * @param list<array{string, string}> $headers
     */
    public function begin(mixed $source, string $method, string $target, array $headers, string $body, ?string $peer): Answer|Run
    {
        $named = $this->identify === null ? [] : ($this->identify)($source);
        if ($named !== []) {
            $replaced = [...array_map(strtolower(...), array_keys($named)), 'x-forwarded-for'];
            $headers = array_values(array_filter($headers, fn (array $pair) => !in_array(strtolower($pair[0]), $replaced, true)));
            foreach ($named as $name => $value) {
                $headers[] = [$name, $value];
            }
            if ($peer !== null) {
                $headers[] = ['x-forwarded-for', $peer];
            }
            $peer = '127.0.0.1';
        }
        $message = ['id' => bin2hex(random_bytes(16)), 'method' => $method, 'target' => $target, 'peer' => $peer,
            'headers' => Answer::recode($headers, 'ISO-8859-1', 'UTF-8'), 'body_base64' => base64_encode($body)];
        $wasSent = false;
        foreach (self::PAUSES_MS as $pause) {
            usleep($pause * 1000);
            [$status, $found] = $this->call('/v1/exchanges', $message);
            if ($status === 0 && !$wasSent) {
                error_log("ibid cannot be reached: {$found['detail']}");
                return $this->unreachable === 'open' ? new Run(isDegraded: true) : Answer::unavailable('ibid cannot be reached');
            }
            $wasSent = $wasSent || $status < 0;
            if ($status === 201) {
                $deadline = microtime(true) + $found['deadline_ms'] / 1000;
                return new Run($found['exchange'], Answer::recode($found['headers'], 'UTF-8', 'ISO-8859-1'), $deadline);
            }
            if ($status === 204) {
                return new Run();
            }
            if ($status === 200) {
                return Answer::decode($found['answer']);
            }
            if ($status > 0 && $status !== 503) {
                error_log("ibid refused a call: {$found['detail']}");
                return Answer::unavailable($found['detail'], $status === 413 ? 413 : 503);
            }
        }
        return Answer::unavailable('ibid did not answer; nothing was run, so send the request again');
    }

    /** Records the handler's response. Returns what goes to the client. */
    public function end(Run $run, Answer $own): Answer
    {
        if ($run->isDegraded) {
            return $own->with('idempotency-guarantee', 'degraded');
        }
        $message = ['status' => $own->status, 'headers' => Answer::recode($own->headers, 'ISO-8859-1', 'UTF-8'), 'body_base64' => base64_encode($own->body)];
        return $this->finish($run, 'end', $message, $own);
    }

    /** The handler failed. A NotStarted frees the key; otherwise the outcome is unknown. */
    public function failed(Run $run, ?\Throwable $error): void
    {
        if ($run->exchange !== '') {
            $how = $error instanceof NotStarted ? 'not-started' : 'unknown';
            $this->finish($run, 'failed', ['how' => $how], Answer::unavailable('the handler failed'));
        }
    }

    /** @param array<string, mixed> $message */
    private function finish(Run $run, string $verb, array $message, Answer $own): Answer
    {
        for ($pause = 100; ; $pause = min($pause + 100, 1000)) {
            [$status, $found] = $this->call("/v1/exchanges/{$run->exchange}/$verb", $message);
            if ($status === 200) {
                return Answer::decode($found['answer']);
            }
            if (($status > 0 && $status !== 503) || microtime(true) > $run->deadline) {
                error_log('the end of an exchange was not recorded: ' . ($found['detail'] ?? $status));
                return $own->with('idempotency-stored', 'false');
            }
            usleep($pause * 1000);
        }
    }

    /**
     * Sends a call on a connection of its own. Status 0: no connection was made; -1: there was no answer.
     *
     * @param array<string, mixed> $message
     * @return array{int, array<string, mixed>}
     */
    private function call(string $path, array $message): array
    {
        $target = str_starts_with($this->address, 'unix:') ? 'unix://' . substr($this->address, 5) : "tcp://{$this->address}";
        $connection = @stream_socket_client($target, $code, $why, $this->timeout);
        if ($connection === false) {
            return [0, ['detail' => $why]];
        }
        $body = json_encode($message, JSON_THROW_ON_ERROR | JSON_UNESCAPED_SLASHES);
        $token = $this->token === null ? '' : "authorization: Bearer {$this->token}\r\n";
        $head = "POST $path HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n";
        stream_set_timeout($connection, (int) $this->timeout);
        $request = "$head{$token}content-length: " . strlen($body) . "\r\n\r\n$body";
        while ($request !== '' && ($written = @fwrite($connection, $request)) > 0) {
            $request = substr($request, $written);
        }
        $reply = (string) @stream_get_contents($connection);
        fclose($connection);
        [$head, $body] = explode("\r\n\r\n", $reply, 2) + ['', ''];
        $length = preg_match('/\r\ncontent-length: *(\d+)/i', $head, $found) ? (int) $found[1] : 0;
        if (!preg_match('/^HTTP\/1\.1 (\d{3})/', $head, $found) || strlen($body) !== $length) {
            return [-1, ['detail' => 'ibid closed the connection without an answer']];
        }
        return [(int) $found[1], $body === '' ? [] : json_decode($body, true, flags: JSON_THROW_ON_ERROR)];
    }
}
