package httpapi

import (
	"net/http"
	"time"

	"berth/services/gateway/internal/body"
)

// check looks at the body of one call before anything is sent.
type check func(text []byte) error

// read reads a body that is looked into, whole, and checks it.
func (a *API) read(r *http.Request, looksRight check) ([]byte, error) {
	text, err := body.Read(r.Body, body.MaxBytes)
	if err != nil {
		return nil, err
	}
	return text, looksRight(text)
}

// The bounds of times in bodies.
const (
	maxRefresh = 3600
)

func (a *API) timeouts(least int64) body.Whole {
	return body.Whole{Min: least, Max: int64(a.cfg.MaxTimeout / time.Second)}
}

// connectBody: {"timeout": 1…}, absent for the node's default. /v2 makes the whole body optional.
func (a *API) connectBody(optional bool) check {
	parse := body.Parse
	if optional {
		parse = body.ParseOptional
	}
	return func(text []byte) error {
		o, err := parse(text)
		if err != nil {
			return err
		}
		if _, _, err = o.Whole("timeout", a.timeouts(1)); err != nil {
			return err
		}
		_, err = o.Bool("memory")
		return err
	}
}

// resumeBody: {"timeout": 1…}, absent for the node's default.
func (a *API) resumeBody(text []byte) error {
	o, err := body.Parse(text)
	if err != nil {
		return err
	}
	_, _, err = o.Whole("timeout", a.timeouts(1))
	return err
}

// timeoutBody: {"timeout": 0…}; 0 is "end now".
func (a *API) timeoutBody(text []byte) error {
	o, err := body.Parse(text)
	if err != nil {
		return err
	}
	_, absent, err := o.Whole("timeout", a.timeouts(0))
	if err == nil && absent {
		return body.Wrongf("timeout: is required")
	}
	return err
}

// refreshBody: {"duration": 1 to 3600}, absent for the node's default.
func (a *API) refreshBody(text []byte) error {
	o, err := body.Parse(text)
	if err != nil {
		return err
	}
	_, _, err = o.Whole("duration", body.Whole{Min: 1, Max: maxRefresh})
	return err
}
