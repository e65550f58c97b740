// Package flagenv gives each flag of a pflag set its environment variables and its key in a JSON file.
//
// The order is: command line, variables in the order they were declared, file, default. So Apply is
// called after the command line was parsed, and File, whose path may itself come from a variable,
// after Apply. An empty variable is unset.
package flagenv

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"
)

// Keys of pflag annotations.
const (
	variablesKey = "flagenv.variables"
	fileKey      = "flagenv.file" // the value came from a file, which variables override
	nullableKey  = "flagenv.nullable"
)

// Nullable lets the key of flag be null in a file, which sets the flag to the empty text. It panics if
// fs has no such flag.
func Nullable(fs *pflag.FlagSet, flag string) {
	if err := fs.SetAnnotation(flag, nullableKey, nil); err != nil {
		panic(fmt.Sprintf("flagenv: %v", err))
	}
}

// Variables declares the exact variables that are read for flag, in place of its default name. The
// first that is set and not empty wins. It panics if fs has no such flag.
func Variables(fs *pflag.FlagSet, flag string, names ...string) {
	if err := fs.SetAnnotation(flag, variablesKey, names); err != nil {
		panic(fmt.Sprintf("flagenv: %v", err))
	}
}

// Name returns the variable that is read for flag of service unless Variables said otherwise:
// BERTH_<SERVICE>_<FLAG>, or BERTH_<FLAG> where service is empty, with "-" and "." as "_".
func Name(service, flag string) string {
	name := "BERTH_"
	if service != "" {
		name += service + "_"
	}
	return strings.ToUpper(strings.NewReplacer("-", "_", ".", "_").Replace(name + flag))
}

// Names returns the variables that are read for f of service, in order of precedence.
func Names(f *pflag.Flag, service string) []string {
	if names, ok := f.Annotations[variablesKey]; ok {
		return names
	}
	return []string{Name(service, f.Name)}
}

// Apply sets each flag that the command line did not set from its variables, as lookup (os.LookupEnv)
// has them. It returns all mistakes at once, joined; each names variable and value.
func Apply(fs *pflag.FlagSet, service string, lookup func(string) (string, bool)) error {
	var errs []error
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Name == "help" || f.Name == "version" {
			return
		}
		if _, fromFile := f.Annotations[fileKey]; f.Changed && !fromFile {
			return
		}
		for _, name := range Names(f, service) {
			value, ok := lookup(name)
			if !ok || value == "" {
				continue
			}
			if err := set(fs, f, value); err != nil {
				errs = append(errs, fmt.Errorf("%s=%q: %s is wanted", name, value, kind(f)))
				return
			}
			delete(f.Annotations, fileKey)
			return
		}
	})
	return errors.Join(errs...)
}

// set gives f the value text in place of what it has, or leaves it as it is.
func set(fs *pflag.FlagSet, f *pflag.Flag, text string) error {
	list, isList := f.Value.(pflag.SliceValue)
	if !isList {
		before, changed := f.Value.String(), f.Changed
		if err := fs.Set(f.Name, text); err != nil {
			// pflag stores the zero value before it reports what it could not read.
			_ = f.Value.Set(before)
			f.Changed = changed
			return err
		}
		return nil
	}
	// A list that was set once appends, so it is emptied first.
	before := list.GetSlice()
	if err := list.Replace(nil); err != nil {
		return err
	}
	if err := fs.Set(f.Name, text); err != nil {
		return errors.Join(err, list.Replace(before))
	}
	return nil
}

// Describe adds the variables of each flag to its usage, as "(env BERTH_…)". A second call adds nothing.
func Describe(fs *pflag.FlagSet, service string) {
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Name == "help" || f.Name == "version" {
			return
		}
		names := Names(f, service)
		if len(names) == 0 {
			return
		}
		hint := "(env " + strings.Join(names, ", ") + ")"
		if !strings.HasSuffix(f.Usage, hint) {
			f.Usage += " " + hint
		}
	})
}

// kind says in words what a flag takes.
func kind(f *pflag.Flag) string {
	switch f.Value.Type() {
	case "bool":
		return "true or false"
	case "duration":
		return `a duration like "30s"`
	case "int", "int32", "int64":
		return "a whole number"
	case "uint", "uint8", "uint16", "uint32", "uint64":
		return "a whole number from 0"
	case "float32", "float64":
		return "a number"
	}
	return "a " + f.Value.Type()
}
