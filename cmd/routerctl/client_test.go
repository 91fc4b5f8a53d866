package main

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestAwaitDeadline: where the daemon says first that the deadline has passed, the command sees it too.
func TestAwaitDeadline(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		err  error
		left time.Duration
		want error
	}{
		{"the daemon's deadline", status.Error(codes.DeadlineExceeded, "context deadline exceeded"), 50 * time.Millisecond, context.DeadlineExceeded},
		{"the stream's end", fmt.Errorf("receive: %w", status.Error(codes.Canceled, "stream terminated by RST_STREAM with error code: CANCEL")), 50 * time.Millisecond, context.DeadlineExceeded},
		{"long before", status.Error(codes.Canceled, "canceled"), time.Hour, nil},
		{"another error", status.Error(codes.NotFound, "no such node"), 500 * time.Millisecond, nil},
		{"no error", nil, 500 * time.Millisecond, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), tc.left)
			defer cancel()
			awaitDeadline(ctx, tc.err)
			if got := ctx.Err(); !errors.Is(got, tc.want) {
				t.Errorf("the command's deadline: %v, want %v", got, tc.want)
			}
		})
	}
}
