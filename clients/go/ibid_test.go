package ibid

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
)

func send(t *testing.T, options Options) (*httptest.ResponseRecorder, int) {
	t.Helper()
	wrapped, err := New(options)
	if err != nil {
		t.Fatal(err)
	}
	runs := 0
	handler := wrapped.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		runs++
		w.WriteHeader(http.StatusCreated)
	}))
	response := httptest.NewRecorder()
	handler.ServeHTTP(response, httptest.NewRequest("POST", "/pay", strings.NewReader("{}")))
	return response, runs
}

func TestClosedRefusesAndOpenRunsDegraded(t *testing.T) {
	closed, runs := send(t, Options{Address: "unix:/nowhere/api.sock"})
	if closed.Code != 503 || closed.Header().Get("Retry-After") != "1" || runs != 0 {
		t.Fatal(closed, runs)
	}
	open, runs := send(t, Options{Address: "unix:/nowhere/api.sock", Unreachable: "open"})
	if open.Code != 201 || open.Header().Get("Idempotency-Guarantee") != "degraded" || runs != 1 {
		t.Fatal(open, runs)
	}
	if _, err := New(Options{Unreachable: "maybe"}); err == nil {
		t.Fatal("there is no third way")
	}
}

func TestOutboundKeysAreThoseOfEverySDK(t *testing.T) {
	text, err := os.ReadFile("../outbound_keys.json")
	if err != nil {
		t.Fatal(err)
	}
	var rows []struct{ Operation, Name, Key string }
	if err := json.Unmarshal(text, &rows); err != nil || len(rows) == 0 {
		t.Fatal(err, rows)
	}
	for _, row := range rows {
		if key := OutboundKey(row.Operation, row.Name); key != row.Key {
			t.Fatal(row, key)
		}
	}
}

func TestIdentifyReplacesWhatTheClientSent(t *testing.T) {
	sent := pairs{{"Authorization", "forged"}, {"Accept", "a"}, {"X-Forwarded-For", "1.2.3.4"}}
	headers, peer := identified(sent, map[string]string{"authorization": "Bearer u1"}, "192.0.2.1")
	want := pairs{{"x-forwarded-for", "192.0.2.1"}, {"authorization", "Bearer u1"}, {"Accept", "a"}}
	if len(headers) != 3 || headers[0] != want[0] || headers[1] != want[1] || headers[2] != want[2] || peer != "127.0.0.1" {
		t.Fatal(headers, peer)
	}
}

func TestHeaderValuesAreBytes(t *testing.T) {
	found := headerPairs(http.Header{"X": {"\xe9"}})
	if found[0][1] != "é" || latin1(found[0][1]) != "\xe9" {
		t.Fatal(found)
	}
}
