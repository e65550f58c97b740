package telemetry

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sys/unix"
)

const (
	formatAuto    = "auto"
	formatConsole = "console"
	formatJSON    = "json"
)

func parseLevel(text string) (slog.Level, error) {
	switch strings.ToLower(text) {
	case "debug":
		return slog.LevelDebug, nil
	case "info", "":
		return slog.LevelInfo, nil
	case "warn", "warning":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	}
	return 0, fmt.Errorf("BERTH_LOG_LEVEL=%q (--log-level): debug, info, warn or error is wanted", text)
}

func parseFormat(text string) (string, error) {
	switch strings.ToLower(text) {
	case formatAuto, "":
		return formatAuto, nil
	case formatConsole:
		return formatConsole, nil
	case formatJSON:
		return formatJSON, nil
	}
	return "", fmt.Errorf("BERTH_LOG_FORMAT=%q (--log-format): auto, console or json is wanted", text)
}

func newHandler(out io.Writer, format string, level slog.Leveler) slog.Handler {
	terminal := IsTerminal(out)
	if format == formatConsole || format == formatAuto && terminal {
		return newConsole(out, level, terminal && !noColor())
	}
	return slog.NewJSONHandler(out, &slog.HandlerOptions{Level: level})
}

// IsTerminal reports whether out is a terminal, on which lines for people make sense.
func IsTerminal(out io.Writer) bool {
	file, ok := out.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return err == nil
}

// noColor follows the convention of no-color.org: any text in NO_COLOR means no colour.
func noColor() bool {
	value, ok := os.LookupEnv("NO_COLOR") //nolint:forbidigo // a convention of terminals, not a setting of Berth
	return ok && value != ""
}

// withTrace adds the ids of the span in ctx, so that a line can be found from its trace and back.
type withTrace struct{ slog.Handler }

func (h withTrace) Handle(ctx context.Context, r slog.Record) error {
	if span := trace.SpanContextFromContext(ctx); span.IsValid() {
		r = r.Clone()
		r.AddAttrs(slog.String("trace_id", span.TraceID().String()), slog.String("span_id", span.SpanID().String()))
	}
	return h.Handler.Handle(ctx, r)
}

func (h withTrace) WithAttrs(attrs []slog.Attr) slog.Handler {
	return withTrace{h.Handler.WithAttrs(attrs)}
}

func (h withTrace) WithGroup(name string) slog.Handler {
	return withTrace{h.Handler.WithGroup(name)}
}
