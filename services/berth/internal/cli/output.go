package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/pflag"
)

// output is how a command answers: a table for people or JSON for scripts.
type output struct{ format string }

// The two values of -o.
const (
	formatTable = "table"
	formatJSON  = "json"
)

func (o *output) flags(fs *pflag.FlagSet) {
	o.format = formatTable
	fs.VarP(o, "output", "o", "table or json")
}

// String, Set and Type make output a flag that knows its words.
func (o *output) String() string { return o.format }

// Set takes a format, or says which there are.
func (o *output) Set(text string) error {
	switch text {
	case formatTable, formatJSON:
		o.format = text
		return nil
	}
	return fmt.Errorf("table or json is wanted")
}

// Type is what help shows.
func (o *output) Type() string { return "format" }

func (o *output) json() bool { return o.format == formatJSON }

func (o *output) writeJSON(w io.Writer, value any) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(value)
}

// writeTable writes rows under heads, aligned.
func writeTable(w io.Writer, heads []string, rows [][]string) error {
	table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	lines := append([][]string{heads}, rows...)
	for _, line := range lines {
		cells := make([]string, len(line))
		for i, cell := range line {
			cells[i] = oneLine(cell)
		}
		if _, err := fmt.Fprintln(table, strings.Join(cells, "\t")); err != nil {
			return err
		}
	}
	return table.Flush()
}

// writeFields writes one thing as name and value, a line each; empty values are left out.
func writeFields(w io.Writer, fields [][2]string) error {
	table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	for _, f := range fields {
		if f[1] == "" {
			continue
		}
		if _, err := fmt.Fprintf(table, "%s\t%s\n", f[0], oneLine(f[1])); err != nil {
			return err
		}
	}
	return table.Flush()
}

// oneLine keeps what others chose, such as metadata, from breaking the table or the terminal.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '�'
		}
		return r
	}, s)
}

// age says how long ago t was, in one unit.
func age(t, now time.Time) string {
	if t.IsZero() {
		return "-"
	}
	d := now.Sub(t)
	switch {
	case d < 0:
		return "now"
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// size says bytes in one binary unit.
func size(bytes int64) string {
	const step = 1024
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	value, unit := float64(bytes), 0
	for value >= step && unit < len(units)-1 {
		value /= step
		unit++
	}
	if unit == 0 || value == float64(int64(value)) {
		return fmt.Sprintf("%d %s", int64(value), units[unit])
	}
	return fmt.Sprintf("%.1f %s", value, units[unit])
}
