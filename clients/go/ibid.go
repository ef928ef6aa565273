// Package ibid makes handlers safe to retry: a retried request takes effect once and gets the same response every time.
//
// ibid runs beside the app and decides by its own configuration. This package carries the messages of its exchange API
// (docs/exchange-api.md):
//
//	idempotent, err := ibid.New(ibid.Options{Address: "unix:/run/ibid/api.sock"})
//	http.ListenAndServe(":8000", idempotent.Handler(mux))
package ibid

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"time"
)

// Options say where ibid is, and how an app uses it.
type Options struct {
	// Address is "unix:/run/ibid/api.sock", or "127.0.0.1:8082" with a Token.
	Address string
	Token   string
	// Unreachable decides what happens if no connection can be made: "closed" (the default) answers 503, "open" runs
	// the handler unprotected.
	Unreachable string
	// Identify returns headers such as {"X-User-Id": "u1"} for a request that the app has authenticated itself. They
	// replace what the client sent under these names.
	Identify func(*http.Request) map[string]string
	// Methods are those that ibid is asked about. POST, PUT, PATCH and DELETE by default.
	Methods []string
	// Timeout is how long to wait for ibid: longer than the longest wait_timeout. A minute by default.
	Timeout time.Duration
}

// NotStarted is what a handler panics with if it provably did nothing: the key is free again.
var NotStarted = errors.New("the handler did not start")

// Ibid wraps handlers.
type Ibid struct {
	options Options
	client  http.Client
	url     string
}

type pairs [][2]string

type answer struct {
	Status  int    `json:"status"`
	Headers pairs  `json:"headers"`
	Body    []byte `json:"body_base64"`
}

type beginCall struct {
	ID      string  `json:"id"`
	Method  string  `json:"method"`
	Target  string  `json:"target"`
	Headers pairs   `json:"headers"`
	Body    []byte  `json:"body_base64"`
	Peer    *string `json:"peer"`
}

// reply is every message that ibid sends.
type reply struct {
	Answer     *answer `json:"answer"`
	Exchange   string  `json:"exchange"`
	Headers    pairs   `json:"headers"`
	DeadlineMs int64   `json:"deadline_ms"`
	Detail     string  `json:"detail"`
}

// run is a handler that runs now. Without an exchange nobody is told how it ends.
type run struct {
	exchange   string
	headers    pairs
	deadline   time.Time
	isDegraded bool
}

// New checks the options. It opens no connection.
func New(options Options) (*Ibid, error) {
	switch options.Unreachable {
	case "":
		options.Unreachable = "closed"
	case "closed", "open":
	default:
		return nil, fmt.Errorf("ibid: Unreachable: expected \"closed\" or \"open\", got %q", options.Unreachable)
	}
	if options.Methods == nil {
		options.Methods = []string{"POST", "PUT", "PATCH", "DELETE"}
	}
	if options.Timeout == 0 {
		options.Timeout = time.Minute
	}
	i := &Ibid{options: options, url: "http://" + options.Address}
	transport := &http.Transport{MaxIdleConnsPerHost: 64}
	if strings.HasPrefix(options.Address, "unix:") {
		path := strings.TrimPrefix(options.Address, "unix:")
		i.url = "http://localhost"
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}
	}
	i.client = http.Client{Transport: transport, Timeout: options.Timeout}
	return i, nil
}

// Handler wraps a handler. It runs to its end even if its client disconnects. A panic leaves the outcome unknown.
func (i *Ibid) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !i.covers(r.Method) {
			next.ServeHTTP(w, r)
			return
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // The client broke off its request.
		}
		decided, begun := i.begin(r, body)
		if decided != nil {
			decided.send(w)
			return
		}
		for name := range r.Header {
			if strings.HasPrefix(name, "Ibid-") {
				delete(r.Header, name)
			}
		}
		for _, pair := range begun.headers {
			r.Header.Set(pair[0], pair[1])
		}
		if begun.exchange == "" && !begun.isDegraded {
			r.Body = io.NopCloser(bytes.NewReader(body))
			next.ServeHTTP(w, r)
			return
		}
		r = r.WithContext(detached{r.Context()})
		r.Body = io.NopCloser(bytes.NewReader(body))
		i.end(begun, i.record(begun, next, r)).send(w)
	})
}

// record runs the handler and returns its response.
func (i *Ibid) record(begun run, next http.Handler, r *http.Request) *answer {
	recorder := recorder{header: http.Header{}}
	defer func() {
		if reason := recover(); reason != nil {
			how := "unknown"
			if reason == any(NotStarted) {
				how = "not-started"
			}
			i.failed(begun, how)
			panic(reason)
		}
	}()
	next.ServeHTTP(&recorder, r)
	recorder.WriteHeader(http.StatusOK)
	// A body without bytes must not be nil, which JSON has as null.
	return &answer{recorder.status, headerPairs(recorder.sent), []byte(recorder.body.String())}
}

// OutboundKey is the key of a call that a handler makes, from its header Ibid-Operation: equal in all attempts, another
// one for each name.
func OutboundKey(operation, name string) string {
	var framed []byte
	for _, part := range []string{operation, name} {
		framed = append(binary.LittleEndian.AppendUint64(framed, uint64(len(part))), part...)
	}
	key := sha256.Sum256(framed)
	key[6], key[8] = key[6]&0x0f|0x40, key[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", key[:4], key[4:6], key[6:8], key[8:10], key[10:16])
}

func (i *Ibid) covers(method string) bool {
	for _, covered := range i.options.Methods {
		if covered == method {
			return true
		}
	}
	return false
}

// begin returns an answer for the client, or how the handler runs.
func (i *Ibid) begin(r *http.Request, body []byte) (*answer, run) {
	var random [16]byte
	if _, err := rand.Read(random[:]); err != nil {
		return unavailable(503, "no randomness"), run{}
	}
	headers := append(headerPairs(r.Header), [2]string{"host", r.Host})
	peer, _, _ := net.SplitHostPort(r.RemoteAddr)
	if i.options.Identify != nil {
		headers, peer = identified(headers, i.options.Identify(r), peer)
	}
	call := beginCall{hex.EncodeToString(random[:]), r.Method, r.RequestURI, headers, body, &peer}
	if peer == "" {
		call.Peer = nil
	}
	wasSent := false
	for _, pause := range []time.Duration{0, 100, 300, 600, 1000} {
		time.Sleep(pause * time.Millisecond)
		status, found, sent, err := i.call("/v1/exchanges", call)
		if err != nil && !sent && !wasSent {
			log.Printf("ibid cannot be reached: %v", err)
			if i.options.Unreachable == "open" {
				return nil, run{isDegraded: true}
			}
			return unavailable(503, "ibid cannot be reached"), run{}
		}
		wasSent = wasSent || err != nil
		switch {
		case err != nil || status == 503:
		case status == 201:
			deadline := time.Now().Add(time.Duration(found.DeadlineMs) * time.Millisecond)
			return nil, run{exchange: found.Exchange, headers: found.Headers, deadline: deadline}
		case status == 204:
			return nil, run{}
		case status == 200:
			return found.Answer, run{}
		default:
			log.Printf("ibid refused a call: %d %s", status, found.Detail)
			if status != 413 {
				status = 503
			}
			return unavailable(status, found.Detail), run{}
		}
	}
	return unavailable(503, "ibid did not answer; nothing was run, so send the request again"), run{}
}

// identified replaces what the client sent under these names, and makes ibid believe it.
func identified(headers pairs, named map[string]string, peer string) (pairs, string) {
	if len(named) == 0 {
		return headers, peer
	}
	replaced := map[string]bool{"X-Forwarded-For": true}
	kept := pairs{{"x-forwarded-for", peer}}
	for name, value := range named {
		replaced[textproto.CanonicalMIMEHeaderKey(name)] = true
		kept = append(kept, [2]string{name, value})
	}
	for _, pair := range headers {
		if !replaced[textproto.CanonicalMIMEHeaderKey(pair[0])] {
			kept = append(kept, pair)
		}
	}
	return kept, "127.0.0.1"
}

func (i *Ibid) end(begun run, own *answer) *answer {
	if begun.isDegraded {
		return own.with("Idempotency-Guarantee", "degraded")
	}
	return i.finish(begun, "end", own, own)
}

func (i *Ibid) failed(begun run, how string) {
	if begun.exchange != "" {
		i.finish(begun, "failed", map[string]string{"how": how}, unavailable(503, "the handler failed"))
	}
}

// finish repeats a call until the deadline.
func (i *Ibid) finish(begun run, verb string, message any, own *answer) *answer {
	for pause := 100 * time.Millisecond; ; pause += 100 * time.Millisecond {
		status, found, _, err := i.call("/v1/exchanges/"+begun.exchange+"/"+verb, message)
		if status == 200 {
			return found.Answer
		}
		if err == nil && status != 503 || time.Now().After(begun.deadline) {
			log.Printf("the end of an exchange was not recorded: %d %s %v", status, found.Detail, err)
			return own.with("Idempotency-Stored", "false")
		}
		if pause > time.Second {
			pause = time.Second
		}
		time.Sleep(pause)
	}
}

// call also returns whether the call may have reached ibid.
func (i *Ibid) call(path string, message any) (status int, found reply, sent bool, err error) {
	content, err := json.Marshal(message)
	if err != nil {
		return 0, found, false, err
	}
	trace := &httptrace.ClientTrace{WroteHeaders: func() { sent = true }}
	ctx := httptrace.WithClientTrace(context.Background(), trace)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, i.url+path, bytes.NewReader(content))
	if err != nil {
		return 0, found, false, err
	}
	request.Header.Set("Content-Type", "application/json")
	// Without a value it is not sent; it tells the transport that the call can be sent again.
	request.Header["Idempotency-Key"] = nil
	if i.options.Token != "" {
		request.Header.Set("Authorization", "Bearer "+i.options.Token)
	}
	response, err := i.client.Do(request)
	if err != nil {
		return 0, found, sent, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && len(text) > 0 {
		err = json.Unmarshal(text, &found)
	}
	if err != nil {
		return 0, found, true, err
	}
	return response.StatusCode, found, true, nil
}

func unavailable(status int, detail string) *answer {
	problem := map[string]any{"type": "about:blank", "title": http.StatusText(status), "status": status, "detail": detail}
	body, _ := json.Marshal(problem)
	return &answer{status, pairs{{"Content-Type", "application/problem+json"}, {"Retry-After", "1"}}, body}
}

func (a *answer) with(name, value string) *answer {
	return &answer{a.Status, append(append(pairs{}, a.Headers...), [2]string{name, value}), a.Body}
}

func (a *answer) send(w http.ResponseWriter) {
	for _, pair := range a.Headers {
		w.Header().Add(pair[0], latin1(pair[1]))
	}
	w.WriteHeader(a.Status)
	_, _ = w.Write(a.Body)
}

// headerPairs encodes header values: in messages each byte is a character.
func headerPairs(header http.Header) pairs {
	found := pairs{}
	for name, values := range header {
		for _, value := range values {
			runes := make([]rune, len(value))
			for at := range runes {
				runes[at] = rune(value[at])
			}
			found = append(found, [2]string{name, string(runes)})
		}
	}
	return found
}

func latin1(text string) string {
	var value []byte
	for _, char := range text {
		value = append(value, byte(char))
	}
	return string(value)
}

// recorder holds a response back until it is recorded.
type recorder struct {
	header, sent http.Header
	status       int
	body         bytes.Buffer
}

func (r *recorder) Header() http.Header { return r.header }

func (r *recorder) WriteHeader(status int) {
	if r.status == 0 && status >= 200 {
		r.status, r.sent = status, r.header.Clone()
	}
}

func (r *recorder) Write(data []byte) (int, error) {
	r.WriteHeader(http.StatusOK)
	return r.body.Write(data)
}

// detached is the context of a request whose client may leave.
type detached struct{ context.Context }

func (detached) Deadline() (time.Time, bool) { return time.Time{}, false }
func (detached) Done() <-chan struct{}       { return nil }
func (detached) Err() error                  { return nil }
