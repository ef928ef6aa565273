<?php

declare(strict_types=1);

require __DIR__ . '/psr.php';
spl_autoload_register(function (string $class): void {
    $file = __DIR__ . '/../src/' . substr($class, strlen('Ibid\\')) . '.php';
    if (str_starts_with($class, 'Ibid\\') && is_file($file)) {
        require $file;
    }
});
require __DIR__ . '/../src/functions.php';
