package ui

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/events"
	"github.com/routerd/routerd/integration/await"
)

func pageOf(t *testing.T, listen string) *Page {
	t.Helper()
	said := events.New(slog.DiscardHandler, slog.LevelInfo)
	p, err := NewPage(PageConfig{
		Config: Config{Sessions: func() string { return "" }, Now: time.Now, Log: said.Logger()}, Where: listen, Said: said,
		Listen: func(ctx context.Context) (net.Listener, error) {
			return new(net.ListenConfig).Listen(ctx, "tcp", listen)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestNoPage: without ui.listen there is no page, and who asks for it learns how to have one.
func TestNoPage(t *testing.T) {
	t.Parallel()
	p := pageOf(t, "")
	_, err := p.Open(t.Context(), &apiv1.OpenRequest{})
	if p.On() || status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "127.0.0.1:7749") {
		t.Errorf("on: %t, %v", p.On(), err)
	}
}

// TestPageAddressTaken: the daemon goes on while the page's address is taken, says so to who asks, and serves the page
// when the address is free.
func TestPageAddressTaken(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	p := pageOf(t, taken.Addr().String())
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	await.Until(t, "the reason", func() error {
		_, err := p.Open(ctx, &apiv1.OpenRequest{})
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "address already in use") {
			return fmt.Errorf("open: %w", err)
		}
		return nil
	})
	taken.Close()
	var r *apiv1.OpenResponse
	await.Until(t, "the page", func() (err error) {
		r, err = p.Open(ctx, &apiv1.OpenRequest{})
		return err
	})
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := client.Get("http://" + r.GetListen() + "/?token=" + r.GetToken())
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusSeeOther {
		t.Errorf("the token that was given out: %s", resp.Status)
	}
	stop()
	if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("the page ended with %v", err)
	}
}
