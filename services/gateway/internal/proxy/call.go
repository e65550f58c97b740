package proxy

import (
	"context"
	"io"
	"maps"
	"net/http"
	"net/url"
	"time"

	"berth/services/gateway/internal/routecache"
)

// discardBytes of an unwanted answer are read so that its connection can be used again.
const discardBytes = 64 << 10

// discard ends an answer nobody wants.
func discard(resp *http.Response) {
	if resp.StatusCode != http.StatusSwitchingProtocols {
		_, _ = io.CopyN(io.Discard, resp.Body, discardBytes)
	}
	_ = resp.Body.Close()
}

// NodeCall is one request to one node, with the node key: a create, a list, a clean-up.
type NodeCall struct {
	Node   *routecache.Node
	Method string
	Target string        // raw path and query
	Client *http.Request // whose header goes on by the rules of the proxy; nil: none does
	Raw    string        // the target as the client sent it
	Body   []byte
	Header http.Header   // set in the end
	Within time.Duration // until the answer's header; 0: as long as ctx lives
	Fresh  bool          // on a connection of its own: one that had died while idle would leave the outcome unknown
}

// NodeAnswer is the answer to a NodeCall; its body is the caller's to close. Its header has
// what may go on to a client: marks of the node are read and removed.
type NodeAnswer struct {
	*http.Response
	Full bool // the node has no room for it, and did nothing
}

// Do makes one call, once. NothingSent tells of an error that no byte had left; a node that takes
// longer than Within gives an error that is context.DeadlineExceeded. Redirects are not followed.
func (f *Forwarder) Do(ctx context.Context, c NodeCall) (NodeAnswer, error) {
	header := http.Header{"User-Agent": {""}}
	host := c.Node.Address
	if c.Client != nil {
		out := outgoing{
			client: c.Client, raw: c.Raw, trusted: f.cfg.TrustedProxies,
			keepKey: func([]string) []string { return nil },
		}
		header, host = out.header(), c.Client.Host
		delete(header, "Expect") // the body is here already
	}
	delete(header, "idempotency-key") // the create runs once, whatever the transport thinks
	delete(header, "x-idempotency-key")
	maps.Copy(header, c.Header)
	ctx, cancel := context.WithCancelCause(ctx)
	if c.Within > 0 {
		timer := time.AfterFunc(c.Within, func() { cancel(context.DeadlineExceeded) })
		defer timer.Stop()
	}
	r := &http.Request{
		Method: c.Method, Host: host, Header: header, ContentLength: int64(len(c.Body)),
		URL:   &url.URL{Scheme: c.Node.Scheme, Host: c.Node.Address, Opaque: c.Target},
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
	}
	resp, err := f.withKeys(r.WithContext(ctx), c) //nolint:bodyclose // NodeAnswer's owner closes it
	if err != nil {
		cancel(err)
		return NodeAnswer{}, err
	}
	said := readMark(c.Node, resp)
	passed := make(http.Header, len(resp.Header))
	passHeader(passed, resp.Header)
	resp.Header = passed
	resp.Body = &callBody{ReadCloser: resp.Body, cancel: cancel}
	return NodeAnswer{Response: resp, Full: said.full}, nil
}

// withKeys sends r with the first node key. A node that refuses it has done nothing, so it is asked
// with the next while keys are changed.
func (f *Forwarder) withKeys(r *http.Request, c NodeCall) (*http.Response, error) {
	transport := f.nodes.http1
	if c.Fresh {
		transport = f.nodes.fresh
	}
	for key := 0; ; key++ {
		if key < len(f.deps.NodeKeys) {
			r.Header["X-Api-Key"] = []string{f.deps.NodeKeys[key]}
		}
		if len(c.Body) > 0 {
			r.Body = fixedBody(c.Body)
			// Only where no byte was written the transport asks for it again.
			r.GetBody = func() (io.ReadCloser, error) { return fixedBody(c.Body), nil }
		}
		resp, err := transport.RoundTrip(r)
		if err != nil || resp.StatusCode != http.StatusUnauthorized || key+1 >= len(f.deps.NodeKeys) {
			return resp, err
		}
		discard(resp)
		r.Header = maps.Clone(r.Header) // the transport may still read the other
	}
}

// callBody ends its call's context when it is closed.
type callBody struct {
	io.ReadCloser
	cancel context.CancelCauseFunc
}

// Close closes the body and ends the call.
func (b *callBody) Close() error {
	err := b.ReadCloser.Close()
	b.cancel(nil)
	return err
}
