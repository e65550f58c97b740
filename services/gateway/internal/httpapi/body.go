package httpapi

import (
	"errors"
	"io"
	"net/http"
	"os"
	"time"

	"berth/services/gateway/internal/body"
	"berth/services/gateway/internal/proxy"
)

// check looks at the body of one call before anything is sent.
type check func(text []byte) error

// read reads a body that is looked into, whole, and checks it. A client that sends nothing for too long
// is a proxy.ClientTimeout.
func (a *API) read(x *exchange, r *http.Request, looksRight check) ([]byte, error) {
	p := patient{Reader: r.Body, within: a.cfg.IdleTimeout, conn: http.NewResponseController(x)}
	text, err := body.Read(&p, body.MaxBytes)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		// The deadline stays: before it answers, the server would wait for the rest of the body.
		timeout := proxy.ClientTimeout()
		return nil, &timeout
	case err != nil:
		_ = p.conn.SetReadDeadline(time.Now().Add(restWithin)) // likewise
		return nil, err
	}
	_ = p.conn.SetReadDeadline(time.Time{}) // a writer without deadlines had none before
	return text, looksRight(text)
}

// restWithin is how long the rest of a refused body may take to arrive, so that its sender hears why.
const restWithin = time.Second

// patient is a client's body whose reads wait for so long each; zero is for ever.
type patient struct {
	io.Reader
	within time.Duration
	conn   *http.ResponseController
}

func (p *patient) Read(b []byte) (int, error) {
	if p.within > 0 {
		_ = p.conn.SetReadDeadline(time.Now().Add(p.within))
	}
	return p.Reader.Read(b)
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
