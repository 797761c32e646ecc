// Probe asks from inside a pod what a test wants to know.
//
//	probe serve PORT TEXT   answers every request with TEXT, until told to end
//	probe fetch URL         prints the answer's status and body; tries for a minute
//	probe exit CODE         ends with that code
package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

const patience = time.Minute

func main() {
	switch {
	case len(os.Args) == 4 && os.Args[1] == "serve":
		serve(os.Args[2], os.Args[3])
	case len(os.Args) == 3 && os.Args[1] == "fetch":
		fetch(os.Args[2])
	case len(os.Args) == 3 && os.Args[1] == "exit":
		code, err := strconv.Atoi(os.Args[2])
		if err != nil {
			fail(err)
		}
		os.Exit(code)
	default:
		fail(fmt.Errorf("usage: probe serve PORT TEXT | probe fetch URL | probe exit CODE"))
	}
}

func serve(port, text string) {
	until, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	answer := func(writer http.ResponseWriter, _ *http.Request) { fmt.Fprint(writer, text) }
	go func() { fail(http.ListenAndServe(":"+port, http.HandlerFunc(answer))) }()
	<-until.Done()
}

// A name is not known in the first moments of its Service, so that a failure is tried again.
func fetch(url string) {
	client := http.Client{Timeout: 5 * time.Second}
	last := error(nil)
	for start := time.Now(); time.Since(start) < patience; time.Sleep(300 * time.Millisecond) {
		response, err := client.Get(url)
		if err != nil {
			last = err
			continue
		}
		body, err := io.ReadAll(response.Body)
		if err != nil {
			fail(err)
		}
		fmt.Printf("%d %s\n", response.StatusCode, body)
		return
	}
	fail(last)
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
