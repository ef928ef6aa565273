<?php

declare(strict_types=1);

namespace Ibid;

/** A response for the client. */
final class Answer
{
    /** @param list<array{string, string}> $headers */
    public function __construct(
        public readonly int $status,
        public readonly array $headers,
        public readonly string $body,
    ) {
    }

    public function with(string $name, string $value): self
    {
        return new self($this->status, [...$this->headers, [$name, $value]], $this->body);
    }

    /**
     * Header values are bytes here, and text of the same characters (ISO 8859-1) in messages.
     *
     * @param list<array{string, string}> $headers
     * @return list<array{string, string}>
     */
    public static function recode(array $headers, string $from, string $to): array
    {
        $recode = fn (string $text) => preg_match('/[\x80-\xff]/', $text) ? (string) iconv($from, $to, $text) : $text;
        return array_map(fn (array $pair) => [$pair[0], $recode($pair[1])], $headers);
    }

    /** @param array<string, mixed> $found */
    public static function decode(array $found): self
    {
        return new self($found['status'], self::recode($found['headers'], 'UTF-8', 'ISO-8859-1'), base64_decode($found['body_base64'], true));
    }

    public static function unavailable(string $detail, int $status = 503): self
    {
        $problem = ['type' => 'about:blank', 'title' => 'Service Unavailable', 'status' => $status, 'detail' => $detail];
        return new self($status, [['content-type', 'application/problem+json'], ['retry-after', '1']], json_encode($problem, JSON_THROW_ON_ERROR));
    }
}
