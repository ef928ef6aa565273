<?php

declare(strict_types=1);

namespace Ibid;

/** The handler runs now. Without an exchange nobody is told how it ends. */
final class Run
{
    /** @param list<array{string, string}> $headers set on the handler's request */
    public function __construct(
        public readonly string $exchange = '',
        public readonly array $headers = [],
        public readonly float $deadline = 0.0,
        public readonly bool $isDegraded = false,
    ) {
    }

    public function isCovered(): bool
    {
        return $this->exchange !== '' || $this->isDegraded;
    }
}
