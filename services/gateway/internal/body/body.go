// Package body reads and checks the JSON bodies of the control plane before anything is reserved or
// sent. Bodies are read to their end without trusting a length; what passes goes on as it came.
package body

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"
)

// MaxBytes bounds a body that is looked into.
const MaxBytes = 1 << 20

const (
	maxDepth         = 64
	maxMetadataBytes = 64 << 10
)

// ErrTooLarge is a body over its limit.
var ErrTooLarge = errors.New("request body too large")

// ErrUnreadable is a body the client did not send in order.
var ErrUnreadable = errors.New("failed to read request body")

// Wrong is a body that says something it may not. Its text names the field and is for the client.
type Wrong struct{ Text string }

// Error returns the text.
func (e *Wrong) Error() string { return e.Text }

// Wrongf returns a Wrong with that text.
func Wrongf(format string, args ...any) error { return &Wrong{Text: fmt.Sprintf(format, args...)} }

// Read returns all of r, ErrTooLarge if it has more than limit bytes, or an error that is
// ErrUnreadable.
func Read(r io.Reader, limit int64) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(r, limit+1))
	if int64(len(text)) > limit {
		return nil, ErrTooLarge
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	return text, nil
}

// Object is one JSON object, by the names of its fields as they were written.
type Object map[string]json.RawMessage

// Parse returns text as an Object. It refuses what is no JSON object, is nested deeper than 64, is
// no UTF-8, or names a field twice, for then two readers would see two values.
func Parse(text []byte) (Object, error) {
	switch trimmed := bytes.TrimLeft(text, " \t\r\n"); {
	case len(trimmed) == 0:
		return nil, Wrongf("body: a JSON object is required")
	case !utf8.Valid(text):
		return nil, Wrongf("body: not UTF-8")
	case tooDeep(text):
		return nil, Wrongf("body: nested deeper than %d", maxDepth)
	case !json.Valid(text):
		return nil, Wrongf("body: not valid JSON")
	case trimmed[0] != '{':
		return nil, Wrongf("body: must be a JSON object")
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	object := Object{}
	if _, err := decoder.Token(); err != nil {
		return nil, Wrongf("body: not valid JSON")
	}
	for decoder.More() {
		name, err := decoder.Token()
		if err != nil {
			return nil, Wrongf("body: not valid JSON")
		}
		field, ok := name.(string)
		if !ok {
			return nil, Wrongf("body: not valid JSON")
		}
		if _, twice := object[field]; twice {
			return nil, Wrongf("%s: given twice", short(field))
		}
		var value json.RawMessage
		if err := decoder.Decode(&value); err != nil {
			return nil, Wrongf("%s: not valid JSON", short(field))
		}
		object[field] = value
	}
	return object, nil
}

// ParseOptional is Parse, but a body of nothing but white space is an empty Object.
func ParseOptional(text []byte) (Object, error) {
	if len(bytes.TrimSpace(text)) == 0 {
		return Object{}, nil
	}
	return Parse(text)
}

// tooDeep counts brackets outside of strings; it need not know more of JSON than where those end.
func tooDeep(text []byte) bool {
	depth, inString := 0, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			if depth++; depth > maxDepth {
				return true
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return false
}

// short keeps a stranger's field name from filling an error.
func short(name string) string {
	const most = 64
	if len(name) <= most {
		return name
	}
	return strings.ToValidUTF8(name[:most], "") + "…"
}

// Whole is a range of whole numbers.
type Whole struct{ Min, Max int64 }

// Whole returns the field as a whole number of r, written in digits. absent: there is no such field;
// null is a value like any other and refused.
func (o Object) Whole(field string, r Whole) (value int64, absent bool, err error) {
	raw, present := o[field]
	if !present {
		return 0, true, nil
	}
	value, err = strconv.ParseInt(string(raw), 10, 64)
	if err != nil || value < r.Min || value > r.Max || raw[0] == '-' && value == 0 {
		return 0, false, Wrongf("%s: must be a whole number from %d to %d", field, r.Min, r.Max)
	}
	return value, false, nil
}

// Text returns the field as a text of 1 to most bytes that is not blank and has no U+0000.
func (o Object) Text(field string, most int) (value string, absent bool, err error) {
	raw, present := o[field]
	if !present {
		return "", true, nil
	}
	if raw[0] != '"' || json.Unmarshal(raw, &value) != nil || strings.TrimSpace(value) == "" {
		return "", false, Wrongf("%s: must be a text that is not blank", field)
	}
	if len(value) > most {
		return "", false, Wrongf("%s: %d bytes, at most %d", field, len(value), most)
	}
	if strings.ContainsRune(value, 0) {
		return "", false, Wrongf(`%s: \u0000 is not allowed`, field)
	}
	return value, false, nil
}

// Bool returns the field as true or false; absent is false.
func (o Object) Bool(field string) (bool, error) {
	switch string(o[field]) {
	case "", "false":
		return false, nil
	case "true":
		return true, nil
	}
	return false, Wrongf("%s: must be true or false", field)
}

// Metadata returns the field as text to text, at most 64 KiB of it in all and without U+0000;
// absent and null are none.
func (o Object) Metadata(field string) (map[string]string, error) {
	raw, present := o[field]
	if !present || string(raw) == "null" {
		return nil, nil //nolint:nilnil // none is a valid value
	}
	var values map[string]*string // a null would otherwise pass as an empty text
	if raw[0] != '{' || json.Unmarshal(raw, &values) != nil {
		return nil, Wrongf("%s: must be an object of texts", field)
	}
	total := 0
	metadata := make(map[string]string, len(values))
	for key, value := range values {
		if value == nil {
			return nil, Wrongf("%s: must be an object of texts", field)
		}
		if total += len(key) + len(*value); total > maxMetadataBytes {
			return nil, Wrongf("%s: over %d bytes in all", field, maxMetadataBytes)
		}
		if strings.ContainsRune(key, 0) || strings.ContainsRune(*value, 0) {
			return nil, Wrongf(`%s: \u0000 is not allowed`, field)
		}
		metadata[key] = *value
	}
	return metadata, nil
}
