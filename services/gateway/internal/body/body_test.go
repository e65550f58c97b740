package body_test

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"berth/services/gateway/internal/body"
)

func TestABodyIsReadToItsEndAndNoFurtherThanItsLimit(t *testing.T) {
	t.Parallel()
	if got, err := body.Read(iotest.OneByteReader(strings.NewReader("abc")), 3); err != nil || string(got) != "abc" {
		t.Errorf("Read of 3 bytes, limit 3 = %q, %v", got, err)
	}
	if _, err := body.Read(strings.NewReader("abcd"), 3); !errors.Is(err, body.ErrTooLarge) {
		t.Errorf("Read of 4 bytes, limit 3: %v, want ErrTooLarge", err)
	}
	if _, err := body.Read(iotest.ErrReader(io.ErrUnexpectedEOF), 3); !errors.Is(err, body.ErrUnreadable) {
		t.Errorf("Read of a cut body: %v, want ErrUnreadable", err)
	}
}

func TestOnlyOneShallowObjectIsABody(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ in, wrong string }{
		"an object passes":                         {`{"a":1}`, ""},
		"white space around it passes":             {" \n{} ", ""},
		"64 levels pass":                           {strings.Repeat(`{"a":`, 63) + "[]" + strings.Repeat("}", 63), ""},
		"brackets in texts are no levels":          {`{"a":"` + strings.Repeat("[", 200) + `\"{"}`, ""},
		"65 levels do not":                         {strings.Repeat(`{"a":`, 64) + "[]" + strings.Repeat("}", 64), "body: nested deeper than 64"},
		"half a mebibyte of brackets does not":     {strings.Repeat("[", 1<<19), "body: nested deeper than 64"},
		"nothing is refused":                       {"", "body: a JSON object is required"},
		"an array is refused":                      {"[]", "body: must be a JSON object"},
		"a text is refused":                        {`"a"`, "body: must be a JSON object"},
		"half an object is refused":                {`{"a":`, "body: not valid JSON"},
		"something after it is refused":            {`{} {}`, "body: not valid JSON"},
		"bytes that are no text are refused":       {"{\"a\":\"\xff\"}", "body: not UTF-8"},
		"two values for one name are refused":      {`{"timeout":60,"timeout":-1}`, "timeout: given twice"},
		"also where one of them spells it escaped": {`{"timeout":60,"\u0074imeout":-1}`, "timeout: given twice"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := body.Parse([]byte(tt.in))
			checkWrong(t, err, tt.wrong)
		})
	}
	if o, err := body.ParseOptional([]byte(" \n")); err != nil || len(o) != 0 {
		t.Errorf("ParseOptional of blanks = %v, %v; want an empty object", o, err)
	}
}

func checkWrong(t *testing.T, err error, want string) {
	t.Helper()
	if want == "" {
		if err != nil {
			t.Errorf("refused: %v", err)
		}
		return
	}
	if wrong, ok := errors.AsType[*body.Wrong](err); !ok || wrong.Text != want {
		t.Errorf("err = %v, want %q", err, want)
	}
}

func TestATimeIsAWholeNumberInItsRange(t *testing.T) {
	t.Parallel()
	const wrong = "timeout: must be a whole number from 1 to 2592000"
	// The values of case C-33.
	for _, value := range []string{`0`, `-1`, `-3600`, `-0`, `2592001`, `2147483648`, `1e300`, `1.5`, `60.0`, `6e1`, `"60"`, `null`, `true`, `[]`, `{}`} {
		o, err := body.Parse([]byte(`{"timeout":` + value + `}`))
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = o.Whole("timeout", body.Whole{Min: 1, Max: 2592000})
		checkWrong(t, err, wrong)
	}
	o, err := body.Parse([]byte(`{"timeout": 60 }`))
	if err != nil {
		t.Fatal(err)
	}
	if got, absent, err := o.Whole("timeout", body.Whole{Min: 1, Max: 60}); got != 60 || absent || err != nil {
		t.Errorf("Whole = %d, %t, %v; want 60", got, absent, err)
	}
	if _, absent, err := o.Whole("duration", body.Whole{Min: 1, Max: 60}); !absent || err != nil {
		t.Errorf("Whole of an absent field = %t, %v", absent, err)
	}
}

func TestTextsAreNeitherBlankNorLongNorNUL(t *testing.T) {
	t.Parallel()
	tests := map[string]string{
		`"base"`:                           "",
		`""`:                               "templateID: must be a text that is not blank",
		`" "`:                              "templateID: must be a text that is not blank",
		`7`:                                "templateID: must be a text that is not blank",
		`null`:                             "templateID: must be a text that is not blank",
		`"a\u0000"`:                        `templateID: \u0000 is not allowed`,
		`"` + strings.Repeat("a", 9) + `"`: "templateID: 9 bytes, at most 8",
	}
	for value, want := range tests {
		o, err := body.Parse([]byte(`{"templateID":` + value + `}`))
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = o.Text("templateID", 8)
		checkWrong(t, err, want)
	}
}

func TestMetadataIsTextToText(t *testing.T) {
	t.Parallel()
	big := strings.Repeat("a", 64<<10)
	tests := map[string]struct {
		in    string
		want  map[string]string
		wrong string
	}{
		"none":                           {`null`, nil, ""},
		"texts pass, emoji too":          {`{"a":"1","b":"😀\n\""}`, map[string]string{"a": "1", "b": "😀\n\""}, ""},
		"64 KiB pass":                    {`{"":"` + big + `"}`, map[string]string{"": big}, ""},
		"a byte more does not":           {`{"k":"` + big + `"}`, nil, "metadata: over 65536 bytes in all"},
		"a number is no text":            {`{"a":1}`, nil, "metadata: must be an object of texts"},
		"null is no text":                {`{"a":null}`, nil, "metadata: must be an object of texts"},
		"a list is no object":            {`["a"]`, nil, "metadata: must be an object of texts"},
		"PostgreSQL cannot hold a NUL":   {`{"a":"\u0000"}`, nil, `metadata: \u0000 is not allowed`},
		"nor one in a key":               {`{"\u0000":"a"}`, nil, `metadata: \u0000 is not allowed`},
		"an object inside is no text":    {`{"a":{"b":"c"}}`, nil, "metadata: must be an object of texts"},
		"an escaped backslash is no \\u": {`{"a":"\\u0000"}`, map[string]string{"a": `\u0000`}, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o, err := body.Parse([]byte(`{"metadata":` + tt.in + `}`))
			if err != nil {
				t.Fatal(err)
			}
			got, err := o.Metadata("metadata")
			checkWrong(t, err, tt.wrong)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("Metadata(%.60s) (-want +got):\n%s", tt.in, diff)
			}
		})
	}
}
