<?php

// The parts of PSR-7, PSR-15 and PSR-17 that the middleware uses, and a small implementation.

declare(strict_types=1);

namespace Psr\Http\Message {
    interface StreamInterface extends \Stringable
    {
    }
    interface MessageInterface
    {
        public function getHeaders(): array;
        public function withHeader(string $name, $value): static;
        public function withAddedHeader(string $name, $value): static;
        public function withoutHeader(string $name): static;
        public function getBody(): StreamInterface;
        public function withBody(StreamInterface $body): static;
    }
    interface ResponseInterface extends MessageInterface
    {
        public function getStatusCode(): int;
    }
    interface ServerRequestInterface extends MessageInterface
    {
        public function getMethod(): string;
        public function getRequestTarget(): string;
        public function getServerParams(): array;
    }
    interface ResponseFactoryInterface
    {
        public function createResponse(int $code = 200, string $reasonPhrase = ''): ResponseInterface;
    }
    interface StreamFactoryInterface
    {
        public function createStream(string $content = ''): StreamInterface;
    }
}

namespace Psr\Http\Server {
    use Psr\Http\Message\ResponseInterface;
    use Psr\Http\Message\ServerRequestInterface;

    interface RequestHandlerInterface
    {
        public function handle(ServerRequestInterface $request): ResponseInterface;
    }
    interface MiddlewareInterface
    {
        public function process(ServerRequestInterface $request, RequestHandlerInterface $handler): ResponseInterface;
    }
}

namespace SmallPsr {
    use Psr\Http\Message as Psr;

    final class Stream implements Psr\StreamInterface
    {
        public function __construct(private string $content)
        {
        }
        public function __toString(): string
        {
            return $this->content;
        }
    }

    class Message implements Psr\ResponseInterface, Psr\ServerRequestInterface
    {
        public function __construct(private array $headers, private Psr\StreamInterface $body, private int $status = 200, private array $server = [])
        {
        }
        public function getHeaders(): array
        {
            return $this->headers;
        }
        public function withHeader(string $name, $value): static
        {
            return $this->withoutHeader($name)->withAddedHeader($name, $value);
        }
        public function withAddedHeader(string $name, $value): static
        {
            $next = clone $this;
            $next->headers[$name][] = $value;
            return $next;
        }
        public function withoutHeader(string $name): static
        {
            $next = clone $this;
            $next->headers = array_filter($this->headers, fn ($known) => strcasecmp((string) $known, $name) !== 0, ARRAY_FILTER_USE_KEY);
            return $next;
        }
        public function getBody(): Psr\StreamInterface
        {
            return $this->body;
        }
        public function withBody(Psr\StreamInterface $body): static
        {
            $next = clone $this;
            $next->body = $body;
            return $next;
        }
        public function getStatusCode(): int
        {
            return $this->status;
        }
        public function getMethod(): string
        {
            return $this->server['REQUEST_METHOD'];
        }
        public function getRequestTarget(): string
        {
            return $this->server['REQUEST_URI'];
        }
        public function getServerParams(): array
        {
            return $this->server;
        }
    }

    final class Factory implements Psr\ResponseFactoryInterface, Psr\StreamFactoryInterface
    {
        public function createResponse(int $code = 200, string $reasonPhrase = ''): Psr\ResponseInterface
        {
            return new Message([], new Stream(''), $code);
        }
        public function createStream(string $content = ''): Psr\StreamInterface
        {
            return new Stream($content);
        }
    }
}
