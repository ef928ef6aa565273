<?php

declare(strict_types=1);

namespace Ibid;

use Psr\Http\Message\ResponseFactoryInterface;
use Psr\Http\Message\ResponseInterface;
use Psr\Http\Message\ServerRequestInterface;
use Psr\Http\Message\StreamFactoryInterface;
use Psr\Http\Server\MiddlewareInterface;
use Psr\Http\Server\RequestHandlerInterface;

/** PSR-15 middleware: Slim, Mezzio, and everything that takes such middleware. Put it outside of error handlers. */
final class Middleware implements MiddlewareInterface
{
    public function __construct(
        private readonly Ibid $ibid,
        private readonly ResponseFactoryInterface $responses,
        private readonly StreamFactoryInterface $streams,
    ) {
    }

    public function process(ServerRequestInterface $request, RequestHandlerInterface $handler): ResponseInterface
    {
        if (!$this->ibid->covers($request->getMethod())) {
            return $handler->handle($request);
        }
        $body = (string) $request->getBody();
        $peer = $request->getServerParams()['REMOTE_ADDR'] ?? null;
        $begun = $this->ibid->begin($request, $request->getMethod(), $request->getRequestTarget(), self::pairs($request->getHeaders()), $body, $peer);
        if ($begun instanceof Answer) {
            return $this->response($begun);
        }
        foreach (array_keys($request->getHeaders()) as $name) {
            $request = str_starts_with(strtolower((string) $name), 'ibid-') ? $request->withoutHeader((string) $name) : $request;
        }
        foreach ($begun->headers as [$name, $value]) {
            $request = $request->withHeader($name, $value);
        }
        if (!$begun->isCovered()) {
            return $handler->handle($request);
        }
        ignore_user_abort(true);
        try {
            $response = $handler->handle($request);
            $own = new Answer($response->getStatusCode(), self::pairs($response->getHeaders()), (string) $response->getBody());
        } catch (\Throwable $error) {
            $this->ibid->failed($begun, $error);
            throw $error;
        }
        return $this->response($this->ibid->end($begun, $own));
    }

    private function response(Answer $answer): ResponseInterface
    {
        $response = $this->responses->createResponse($answer->status);
        foreach ($answer->headers as [$name, $value]) {
            $response = $response->withAddedHeader($name, $value);
        }
        return $response->withBody($this->streams->createStream($answer->body));
    }

    /**
     * @param array<string|int, list<string>> $headers
     * @return list<array{string, string}>
     */
    private static function pairs(array $headers): array
    {
        $pairs = [];
        foreach ($headers as $name => $values) {
            foreach ($values as $value) {
                $pairs[] = [(string) $name, $value];
            }
        }
        return $pairs;
    }
}
