// The app of the scenarios. With IBID_API the SDK wraps it.
package main

import (
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"ibid"
)

func handle(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Path
	file, err := os.OpenFile(os.Getenv("RUNS_FILE"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Fprintln(file, path)
	file.Close()
	lines, _ := os.ReadFile(os.Getenv("RUNS_FILE"))
	switch path {
	case "/exception":
		panic("the handler failed")
	case "/killed":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "/slow", "/waiting":
		select {
		case <-time.After(time.Second):
		case <-r.Context().Done():
			panic(http.ErrAbortHandler)
		}
	}
	body := fmt.Sprintf(`{"run":%d,"attempt":%q}`, strings.Count(string(lines), "\n"), r.Header.Get("Ibid-Attempt"))
	switch path {
	case "/large":
		body = strings.Repeat("x", 300000)
	case "/presets/mcp":
		body = fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"result":%s}`, body)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	fmt.Fprint(w, body)
}

func main() {
	var handler http.Handler = http.HandlerFunc(handle)
	if address := os.Getenv("IBID_API"); address != "" {
		wrapped, err := ibid.New(ibid.Options{Address: address})
		if err != nil {
			log.Fatal(err)
		}
		handler = wrapped.Handler(handler)
	}
	// net/http closes the connection of a handler that panics; most apps answer 500.
	answering := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			if recover() != nil {
				w.WriteHeader(http.StatusInternalServerError)
			}
		}()
		handler.ServeHTTP(w, r)
	})
	port := os.Getenv("PORT")
	if port == "" {
		port = "0"
	}
	listener, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("listening on http://%s", listener.Addr())
	log.Fatal(http.Serve(listener, answering))
}
