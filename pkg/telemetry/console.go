package telemetry

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
)

const (
	colorReset = "\x1b[0m"
	colorFaint = "\x1b[2m"
)

var levelColors = map[slog.Level]string{
	slog.LevelDebug: "\x1b[2m", slog.LevelInfo: "\x1b[32m", slog.LevelWarn: "\x1b[33m", slog.LevelError: "\x1b[31m",
}

// console writes one line a record for people: time, level, message, then the attributes.
type console struct {
	mu    *sync.Mutex // one line at a time, over all handlers made from the first
	out   io.Writer
	level slog.Leveler
	color bool
	group string // prefix of keys, ends in a dot
	attrs string // rendered, with a blank in front of each
}

func newConsole(out io.Writer, level slog.Leveler, color bool) *console {
	return &console{mu: new(sync.Mutex), out: out, level: level, color: color}
}

func (c *console) Enabled(_ context.Context, level slog.Level) bool { return level >= c.level.Level() }

func (c *console) WithAttrs(attrs []slog.Attr) slog.Handler {
	with := *c
	var b strings.Builder
	for _, a := range attrs {
		c.append(&b, c.group, a)
	}
	with.attrs += b.String()
	return &with
}

func (c *console) WithGroup(name string) slog.Handler {
	if name == "" {
		return c
	}
	with := *c
	with.group += name + "."
	return &with
}

func (c *console) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	if !r.Time.IsZero() {
		c.paint(&b, colorFaint, r.Time.Format("15:04:05.000"))
		b.WriteByte(' ')
	}
	c.paint(&b, levelColors[r.Level], fmt.Sprintf("%-5s", r.Level))
	b.WriteByte(' ')
	b.WriteString(quoteLine(r.Message))
	b.WriteString(c.attrs)
	r.Attrs(func(a slog.Attr) bool {
		c.append(&b, c.group, a)
		return true
	})
	b.WriteByte('\n')
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := io.WriteString(c.out, b.String())
	return err
}

func (c *console) append(b *strings.Builder, prefix string, a slog.Attr) {
	value := a.Value.Resolve()
	if a.Key == "" && value.Kind() != slog.KindGroup {
		return
	}
	if value.Kind() == slog.KindGroup {
		if a.Key != "" {
			prefix += a.Key + "."
		}
		for _, inner := range value.Group() {
			c.append(b, prefix, inner)
		}
		return
	}
	b.WriteByte(' ')
	c.paint(b, colorFaint, prefix+a.Key+"=")
	b.WriteString(quoteValue(text(value)))
}

func (c *console) paint(b *strings.Builder, color, text string) {
	if !c.color || color == "" {
		b.WriteString(text)
		return
	}
	b.WriteString(color + text + colorReset)
}

func text(v slog.Value) string {
	switch v.Kind() {
	case slog.KindDuration:
		return v.Duration().String()
	case slog.KindTime:
		return v.Time().Format(time.RFC3339Nano)
	default:
		return v.String()
	}
}

// quoteLine keeps a message on its line, whatever a caller put into it.
func quoteLine(s string) string {
	if strings.ContainsFunc(s, unicode.IsControl) {
		return strconv.Quote(s)
	}
	return s
}

// quoteValue quotes what would not read back as one value.
func quoteValue(s string) string {
	if s == "" || strings.ContainsFunc(s, func(r rune) bool {
		return unicode.IsControl(r) || r == ' ' || r == '"' || r == '='
	}) {
		return strconv.Quote(s)
	}
	return s
}
