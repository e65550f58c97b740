package conformance

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"
)

const (
	path = "/scheduler.v1.Scheduler/"

	// Clients ask every ten seconds whether their connection lives, calls or no calls.
	pingEvery   = 10 * time.Second
	pingTimeout = 20 * time.Second

	// callLimit is the deadline of AgentENV's calls.
	callLimit = 10 * time.Second
)

// fields are what is set of a message, by the contract's names.
type fields = map[string]any

// message returns a message of the frozen contract. A name that AgentENV does not know is a panic.
func message(name string, set fields) *dynamicpb.Message {
	descriptor := frozen().Messages().ByName(protoreflect.Name(name))
	if descriptor == nil {
		panic("AgentENV has no message " + name)
	}
	m := dynamicpb.NewMessage(descriptor)
	text, err := json.Marshal(set)
	if err == nil && set != nil {
		err = protojson.Unmarshal(text, m)
	}
	if err != nil {
		panic(fmt.Sprintf("AgentENV's %s has no %v: %v", name, set, err))
	}
	return m
}

// read returns m as JSON does, by the contract's names; 64-bit numbers are text.
func read(m proto.Message) fields {
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		panic(err)
	}
	out := fields{}
	if err := json.Unmarshal(text, &out); err != nil {
		panic(err)
	}
	return out
}

// at returns what is under keys in a message that was read, or nil.
func at(f fields, keys ...string) any {
	var here any = f
	for _, key := range keys {
		inside, ok := here.(fields)
		if !ok {
			return nil
		}
		here = inside[key]
	}
	return here
}

// refusal is an answer that is not OK, as AgentENV's processes see it: a gRPC code and a text.
type refusal struct {
	code codes.Code
	text string
}

func (r *refusal) Error() string { return fmt.Sprintf("%s: %s", r.code, r.text) }

// refused returns code and text of err: OK for nil, and Unavailable for a transport that broke, as
// tonic and grpc-go have it.
func refused(err error) (codes.Code, string) {
	if err == nil {
		return codes.OK, ""
	}
	if r, ok := errors.AsType[*refusal](err); ok {
		return r.code, r.text
	}
	if s, ok := status.FromError(err); ok {
		return s.Code(), s.Message()
	}
	return codes.Unavailable, err.Error()
}

// wire is one of the ways to call scheduler.v1.
type wire interface {
	call(ctx context.Context, rpc string, request, response proto.Message) error
}

// ask calls one method with what AgentENV sends and returns what it reads.
func ask(ctx context.Context, w wire, rpc string, set fields) (fields, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	response := message(rpc+"Response", nil)
	if err := w.call(ctx, rpc, message(rpc+"Request", set), response); err != nil {
		return nil, err
	}
	return read(response), nil
}

// tonic is the channel of AgentENV's node: HTTP/2 with prior knowledge over one connection that is
// pinged, a length before each message, the status in trailers.
type tonic struct {
	base      string
	transport *http.Transport
}

func newTonic(t *testing.T, address string) *tonic {
	t.Helper()
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	c := &tonic{base: "http://" + address, transport: &http.Transport{
		Protocols: protocols, DisableCompression: true, MaxConnsPerHost: 1,
		HTTP2: &http.HTTP2Config{SendPingTimeout: pingEvery, PingTimeout: pingTimeout},
	}}
	t.Cleanup(c.transport.CloseIdleConnections)
	return c
}

func (c *tonic) call(ctx context.Context, rpc string, request, response proto.Message) error {
	body, err := proto.Marshal(request)
	if err != nil {
		return fmt.Errorf("%s: %w", rpc, err)
	}
	framed := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body)))
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+path+rpc, bytes.NewReader(append(framed, body...)))
	if err != nil {
		return fmt.Errorf("%s: %w", rpc, err)
	}
	r.Header.Set("Content-Type", "application/grpc")
	r.Header.Set("Te", "trailers")
	r.Header.Set("User-Agent", "tonic/0.12.3")
	if end, ok := ctx.Deadline(); ok {
		r.Header.Set("Grpc-Timeout", strconv.FormatInt(time.Until(end).Microseconds(), 10)+"u")
	}
	answer, err := c.transport.RoundTrip(r)
	if err != nil {
		return fmt.Errorf("%s: %w", rpc, err)
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return fmt.Errorf("%s: %w", rpc, err)
	}
	if answer.StatusCode != http.StatusOK || answer.Header.Get("Content-Type") != "application/grpc" {
		return fmt.Errorf("%s: HTTP %d, %s", rpc, answer.StatusCode, answer.Header.Get("Content-Type"))
	}
	ended := answer.Trailer
	if ended.Get("Grpc-Status") == "" {
		ended = answer.Header // a refusal may be all in one frame
	}
	code, err := strconv.ParseUint(ended.Get("Grpc-Status"), 10, 8)
	if err != nil {
		return fmt.Errorf("%s: no grpc-status: %w", rpc, err)
	}
	if code != 0 {
		words, err := url.PathUnescape(ended.Get("Grpc-Message"))
		if err != nil {
			return fmt.Errorf("%s: grpc-message: %w", rpc, err)
		}
		return &refusal{codes.Code(code), words}
	}
	const head = 5
	if len(text) < head || text[0] != 0 || int(binary.BigEndian.Uint32(text[1:])) != len(text)-head {
		return fmt.Errorf("%s: %d bytes are not one message", rpc, len(text))
	}
	return proto.Unmarshal(text[head:], response)
}

// channel is the connection of AgentENV's gateway, which uses grpc-go.
type channel struct{ conn *grpc.ClientConn }

func newChannel(t *testing.T, address string) *channel {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingEvery, Timeout: pingTimeout, PermitWithoutStream: true}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return &channel{conn}
}

func (c *channel) call(ctx context.Context, rpc string, request, response proto.Message) error {
	return c.conn.Invoke(ctx, path+rpc, request, response)
}

// twirp is a script's way: HTTP/1.1 with JSON, or with protobuf where binary is set.
type twirp struct {
	url    string
	binary bool
}

// twirpCodes are the codes that answers have, with what gRPC calls them.
var twirpCodes = map[string]codes.Code{
	"canceled": codes.Canceled, "invalid_argument": codes.InvalidArgument, "deadline_exceeded": codes.DeadlineExceeded, "not_found": codes.NotFound,
	"already_exists": codes.AlreadyExists, "permission_denied": codes.PermissionDenied, "unauthenticated": codes.Unauthenticated,
	"resource_exhausted": codes.ResourceExhausted, "failed_precondition": codes.FailedPrecondition, "unimplemented": codes.Unimplemented,
	"internal": codes.Internal, "unavailable": codes.Unavailable, "bad_route": codes.Unimplemented, "malformed": codes.InvalidArgument,
}

func (c *twirp) call(ctx context.Context, rpc string, request, response proto.Message) error {
	kind, encode, decode := "application/json", protojson.MarshalOptions{UseProtoNames: true}.Marshal, protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal
	if c.binary {
		kind, encode, decode = "application/protobuf", proto.Marshal, proto.Unmarshal
	}
	body, err := encode(request)
	if err != nil {
		return fmt.Errorf("%s: %w", rpc, err)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/twirp"+path+rpc, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("%s: %w", rpc, err)
	}
	r.Header.Set("Content-Type", kind)
	if end, ok := ctx.Deadline(); ok {
		r.Header.Set("X-Twirp-Timeout-Ms", strconv.FormatInt(time.Until(end).Milliseconds(), 10))
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return fmt.Errorf("%s: %w", rpc, err)
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return fmt.Errorf("%s: %w", rpc, err)
	}
	if answer.StatusCode == http.StatusOK {
		return decode(text, response)
	}
	var words struct{ Code, Msg string }
	if err := json.Unmarshal(text, &words); err != nil {
		return fmt.Errorf("%s: HTTP %d: %s", rpc, answer.StatusCode, strings.TrimSpace(string(text)))
	}
	code, known := twirpCodes[words.Code]
	if !known {
		return fmt.Errorf("%s: HTTP %d with code %q", rpc, answer.StatusCode, words.Code)
	}
	return &refusal{code, words.Msg}
}
