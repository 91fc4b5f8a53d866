package spans

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

func env(m map[string]string) func(string) string { return func(k string) string { return m[k] } }

// TestWanted: nothing is sent unless a collector is named.
func TestWanted(t *testing.T) {
	t.Parallel()
	const endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT"
	for name, tt := range map[string]struct {
		env  map[string]string
		want bool
	}{
		"nothing":          {nil, false},
		"service name":     {map[string]string{"OTEL_SERVICE_NAME": "x"}, false},
		"collector":        {map[string]string{endpoint: "http://127.0.0.1:4317"}, true},
		"traces collector": {map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4317"}, true},
		"switched off":     {map[string]string{endpoint: "http://127.0.0.1:4317", "OTEL_SDK_DISABLED": "true"}, false},
		"no traces":        {map[string]string{endpoint: "http://127.0.0.1:4317", "OTEL_TRACES_EXPORTER": "none"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := Wanted(env(tt.env)); got != tt.want {
				t.Errorf("Wanted = %t", got)
			}
			tracer, end, err := FromEnv(t.Context(), env(tt.env), Config{Log: slog.New(slog.DiscardHandler)})
			if err != nil || tracer.Enabled() != tt.want {
				t.Fatalf("FromEnv: enabled %t, %v", tracer.Enabled(), err)
			}
			end()
		})
	}
}

// TestRefused: what cannot be done is refused by the variable's name.
func TestRefused(t *testing.T) {
	t.Parallel()
	for name, value := range map[string]string{"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json", "OTEL_TRACES_EXPORTER": "zipkin"} {
		_, _, err := FromEnv(t.Context(), env(map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", name: value}), Config{})
		if err == nil || !strings.Contains(err.Error(), name+" is "+`"`+value+`"`) {
			t.Errorf("%s=%s: %v", name, value, err)
		}
	}
}

// TestStart: spans have their parts, what they are about, and how they ended.
func TestStart(t *testing.T) {
	t.Parallel()
	recorder := tracetest.NewSpanRecorder()
	tracer := New(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder)))
	ctx, end := tracer.Start(t.Context(), "whole", Int("n", 3), String("s", "x"))
	_, part := tracer.Start(ctx, "part")
	part(errors.New("refused"))
	end(nil)

	spans := recorder.Ended()
	if len(spans) != 2 {
		t.Fatalf("%d spans, want 2", len(spans))
	}
	inner, outer := spans[0], spans[1]
	if inner.Name() != "part" || inner.Parent().SpanID() != outer.SpanContext().SpanID() || inner.Status().Code != codes.Error || inner.Status().Description != "refused" {
		t.Errorf("part: %q of %v, %v", inner.Name(), inner.Parent().SpanID(), inner.Status())
	}
	got := map[string]string{}
	for _, a := range outer.Attributes() {
		got[string(a.Key)] = a.Value.String()
	}
	if d := cmp.Diff(map[string]string{"n": "3", "s": "x"}, got); d != "" || outer.Status().Code != codes.Unset {
		t.Errorf("whole: %v (-want +got):\n%s", outer.Status(), d)
	}
}

// TestNone: the nil Tracer costs no memory.
func TestNone(t *testing.T) {
	var none *Tracer
	ctx := t.Context()
	if n := testing.AllocsPerRun(100, func() {
		_, end := none.Start(ctx, "whole")
		end(nil)
	}); n != 0 {
		t.Errorf("the nil Tracer allocates %v times", n)
	}
}
