package flagenv

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// maxFileBytes is far above any configuration and far below what would hurt.
const maxFileBytes = 1 << 20

// File sets flags from a JSON file of nested objects. keys maps each known key, its levels joined by
// dots, to its flag; a key that maps to "" is known and ignored. Flags that the command line or a
// variable set keep their value. A list becomes its values joined by commas; a value that is itself an
// object, or a list of objects, reaches the flag as JSON. A duration is a text like "30s".
//
// All mistakes are returned at once, joined; each names the file, the key and the value. An unknown key
// is one.
func File(fs *pflag.FlagSet, path string, keys map[string]string) error {
	root, err := readObject(path)
	if err != nil {
		return err
	}
	var (
		errs   []error
		values = map[string]string{} // flag → text
	)
	walk("", root, keys, func(key string, value any) {
		flag, known := keys[key]
		switch {
		case !known:
			errs = append(errs, fmt.Errorf("%s: unknown key %q; known are %s", path, key, knownBeside(key, keys)))
			return
		case flag == "":
			return
		}
		f := fs.Lookup(flag)
		if f == nil {
			panic(fmt.Sprintf("flagenv: key %q names the flag %q, which does not exist", key, flag))
		}
		text, err := flagText(f, value)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %s: %w", path, key, err))
			return
		}
		values[flag] = text
	})
	for _, flag := range slices.Sorted(maps.Keys(values)) {
		f := fs.Lookup(flag)
		if f.Changed {
			continue
		}
		if err := set(fs, f, values[flag]); err != nil {
			errs = append(errs, fmt.Errorf("%s: %s is %q: %s is wanted", path, keyOf(flag, keys), values[flag], kind(f)))
			continue
		}
		if f.Annotations == nil {
			f.Annotations = map[string][]string{}
		}
		f.Annotations[fileKey] = []string{path}
	}
	return errors.Join(errs...)
}

// FromFile reports whether File set flag of fs. It is false where fs has no such flag.
func FromFile(fs *pflag.FlagSet, flag string) bool {
	f := fs.Lookup(flag)
	if f == nil {
		return false
	}
	_, fromFile := f.Annotations[fileKey]
	return fromFile
}

func readObject(path string) (map[string]any, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w; give the path of a readable JSON file", err)
	}
	defer func() { _ = file.Close() }()
	text, err := io.ReadAll(io.LimitReader(file, maxFileBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read configuration %s: %w", path, err)
	}
	if len(text) > maxFileBytes {
		return nil, fmt.Errorf("read configuration %s: larger than %d bytes", path, maxFileBytes)
	}
	var root map[string]any
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	if err := decoder.Decode(&root); err != nil {
		return nil, fmt.Errorf("read configuration %s, line %d: it must be one JSON object: %w", path, lineOf(text, err), err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read configuration %s: it must be one JSON object, and something follows it", path)
	}
	return root, nil
}

// lineOf returns the line of text, from 1 on, at which err found a mistake; what is cut short is wrong at
// its end.
func lineOf(text []byte, err error) int {
	offset := int64(len(text))
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		offset = min(offset, syntax.Offset)
	}
	if kind, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		offset = min(offset, kind.Offset)
	}
	return 1 + bytes.Count(text[:offset], []byte("\n"))
}

// walk calls f for each leaf, and for each inner object that keys knows as a whole, in order of keys.
func walk(prefix string, object map[string]any, keys map[string]string, f func(key string, value any)) {
	for _, name := range slices.Sorted(maps.Keys(object)) {
		key, value := prefix+name, object[name]
		inner, isObject := value.(map[string]any)
		if _, whole := keys[key]; isObject && !whole && isPrefix(key, keys) {
			walk(key+".", inner, keys, f)
			continue
		}
		f(key, value)
	}
}

func isPrefix(key string, keys map[string]string) bool {
	for known := range keys {
		if strings.HasPrefix(known, key+".") {
			return true
		}
	}
	return false
}

// knownBeside lists the keys that share the longest known parent of key.
func knownBeside(key string, keys map[string]string) string {
	parent := key
	for {
		cut := strings.LastIndexByte(parent, '.')
		if cut < 0 {
			return strings.Join(slices.Sorted(maps.Keys(keys)), ", ")
		}
		parent = parent[:cut]
		var beside []string
		for known := range keys {
			if strings.HasPrefix(known, parent+".") {
				beside = append(beside, known)
			}
		}
		if len(beside) > 0 {
			slices.Sort(beside)
			return strings.Join(beside, ", ")
		}
	}
}

func keyOf(flag string, keys map[string]string) string {
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		if keys[key] == flag {
			return key
		}
	}
	return flag
}

// flagText returns value as the text that the flag's own parser reads.
func flagText(f *pflag.Flag, value any) (string, error) {
	switch v := value.(type) {
	case string:
		return v, nil
	case bool:
		if f.Value.Type() != "bool" {
			return "", fmt.Errorf("it is %t: %s is wanted", v, kind(f))
		}
		return fmt.Sprint(v), nil
	case json.Number:
		if t := f.Value.Type(); t == "duration" || t == "bool" {
			return "", fmt.Errorf("it is %s: %s is wanted", v, kind(f))
		}
		return v.String(), nil
	case nil:
		if _, ok := f.Annotations[nullableKey]; ok {
			return "", nil
		}
		return "", errors.New("it is null; leave it out for the default")
	case []any:
		var parts []string
		for _, item := range v {
			switch item := item.(type) {
			case string:
				parts = append(parts, item)
			case json.Number:
				parts = append(parts, item.String())
			default:
				return asJSON(value)
			}
		}
		return strings.Join(parts, ","), nil
	}
	return asJSON(value)
}

func asJSON(value any) (string, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return "", fmt.Errorf("write as JSON: %w", err)
	}
	return string(text), nil
}
