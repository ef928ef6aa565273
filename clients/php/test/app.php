<?php

// The app of the scenarios, as a plain script and as PSR-15 (STYLE). With IBID_API the SDK wraps it.

declare(strict_types=1);

require __DIR__ . '/autoload.php';

use Ibid\Ibid;
use Ibid\Middleware;
use Psr\Http\Message\ResponseInterface;
use Psr\Http\Message\ServerRequestInterface;
use Psr\Http\Server\RequestHandlerInterface;

use function Ibid\idempotent;

function handle(string $path, ?string $attempt): string
{
    $file = getenv('RUNS_FILE');
    file_put_contents($file, "$path\n", FILE_APPEND | LOCK_EX);
    $run = count(file($file));
    if ($path === '/exception') {
        throw new RuntimeException('the handler failed');
    }
    if ($path === '/killed') {
        posix_kill(getmypid(), SIGKILL);
    }
    if ($path === '/slow' || $path === '/waiting') {
        sleep(1);
    }
    $told = ['run' => $run, 'attempt' => $attempt];
    if ($path === '/presets/mcp') {
        $told = ['jsonrpc' => '2.0', 'id' => 1, 'result' => $told];
    }
    return $path === '/large' ? str_repeat('x', 300_000) : json_encode($told);
}

$ibid = getenv('IBID_API') ? new Ibid(getenv('IBID_API')) : null;
$path = parse_url($_SERVER['REQUEST_URI'], PHP_URL_PATH);

if (getenv('STYLE') === 'plain') {
    $handler = function () use ($path): void {
        http_response_code(201);
        header('Content-Type: application/json');
        echo handle($path, $_SERVER['HTTP_IBID_ATTEMPT'] ?? null);
        // Scripts often end so.
        exit;
    };
    $ibid === null ? $handler() : idempotent($ibid, $handler);
    return;
}

$factory = new SmallPsr\Factory();
$handler = new class ($factory, $path) implements RequestHandlerInterface {
    public function __construct(private SmallPsr\Factory $factory, private string $path)
    {
    }
    public function handle(ServerRequestInterface $request): ResponseInterface
    {
        $attempt = array_change_key_case($request->getHeaders())['ibid-attempt'][0] ?? null;
        $body = $this->factory->createStream(handle($this->path, $attempt));
        return $this->factory->createResponse(201)->withHeader('Content-Type', 'application/json')->withBody($body);
    }
};
$headers = array_map(fn ($value) => [$value], getallheaders());
$request = new SmallPsr\Message($headers, $factory->createStream((string) file_get_contents('php://input')), 200, $_SERVER);
$response = $ibid === null ? $handler->handle($request) : (new Middleware($ibid, $factory, $factory))->process($request, $handler);
http_response_code($response->getStatusCode());
foreach ($response->getHeaders() as $name => $values) {
    foreach ($values as $value) {
        header("$name: $value", false);
    }
}
echo $response->getBody();
