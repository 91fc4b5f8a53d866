// Package spans says where the time of an operation went, to a collector of
// OpenTelemetry traces: https://opentelemetry.io/docs/specs/otel/. It is set up by
// the environment variables of that specification, and does nothing without them.
package spans

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Attr is what is said of a span; names follow OpenTelemetry's conventions where
// there is one.
type Attr = attribute.KeyValue

// String returns an Attr.
func String(key, value string) Attr { return attribute.String(key, value) }

// Int is String of a number.
func Int(key string, value int) Attr { return attribute.Int(key, value) }

// Tracer starts spans. The nil Tracer is one that costs nothing and records
// nothing. Its methods are safe for concurrent use.
type Tracer struct{ tracer trace.Tracer }

// closing bounds the sending of what is left when the daemon ends.
const closing = 3 * time.Second

// Wanted reports whether the environment asks for traces: a collector is named,
// and nothing says that there shall be none.
func Wanted(getenv func(string) string) bool {
	switch {
	case strings.EqualFold(getenv("OTEL_SDK_DISABLED"), "true"), getenv("OTEL_TRACES_EXPORTER") == "none":
		return false
	}
	return getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
}

// Config says who speaks.
type Config struct {
	Service string // the name of the service, unless OTEL_SERVICE_NAME gives one
	Version string
	Node    string
	Log     *slog.Logger
}

// FromEnv returns the tracer that the environment asks for, and a function that
// sends what is left and ends it; a nil Tracer where it asks for none. A collector
// that does not answer delays nothing: what it does not take is lost, and the log
// says so.
func FromEnv(ctx context.Context, getenv func(string) string, c Config) (*Tracer, func(), error) {
	if !Wanted(getenv) {
		return nil, func() {}, nil
	}
	for _, name := range []string{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"} {
		if p := getenv(name); p != "" && p != "grpc" {
			return nil, nil, fmt.Errorf("%s is %q: only grpc is possible; set it to grpc, and OTEL_EXPORTER_OTLP_ENDPOINT to the collector's port for that, which is 4317 as a rule", name, p)
		}
	}
	if e := getenv("OTEL_TRACES_EXPORTER"); e != "" && e != "otlp" {
		return nil, nil, fmt.Errorf("OTEL_TRACES_EXPORTER is %q: only otlp and none are possible", e)
	}
	exporter, err := otlptracegrpc.New(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("set up traces as OTEL_EXPORTER_OTLP_… say: %w", err)
	}
	about, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", c.Service), attribute.String("service.version", c.Version), attribute.String("host.name", c.Node)),
		resource.WithFromEnv()) // which goes before
	if err != nil {
		return nil, nil, fmt.Errorf("set up traces: OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	// The library has no other way to say that a collector does not answer.
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { c.Log.Warn("traces were not sent", "error", err) }))
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(about))
	end := func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closing)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			c.Log.Warn("the last traces were not sent", "error", err)
		}
	}
	return New(provider), end, nil
}

// New returns a tracer whose spans go to a provider.
func New(p trace.TracerProvider) *Tracer {
	return &Tracer{p.Tracer("github.com/routerd/routerd")}
}

// Start begins a span, as part of the one in ctx if there is one, and returns a
// context for its parts and the function that ends it, with the error of what was
// done.
func (t *Tracer) Start(ctx context.Context, name string, attrs ...Attr) (context.Context, func(error)) {
	if t == nil {
		return ctx, ignore
	}
	ctx, span := t.tracer.Start(ctx, name, trace.WithAttributes(attrs...))
	return ctx, func(err error) {
		if err != nil {
			span.RecordError(err)
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}

// Enabled reports whether spans go anywhere.
func (t *Tracer) Enabled() bool { return t != nil }

func ignore(error) {}
