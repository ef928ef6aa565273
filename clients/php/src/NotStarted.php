<?php

declare(strict_types=1);

namespace Ibid;

/** Thrown by a handler that provably did nothing: the key is free again. */
final class NotStarted extends \RuntimeException
{
}
