package route

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"sync/atomic"
	"testing"
)

// names is a name server that gives every name one address, which may change between two questions.
type names struct {
	answer atomic.Pointer[netip.Addr]
	conn   net.PacketConn
}

func newNames(t *testing.T, first netip.Addr) *names {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n := &names{conn: conn}
	n.answer.Store(&first)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		n.serve()
	}()
	t.Cleanup(func() {
		_ = conn.Close() // ends serve; nothing is left to send
		<-ended
	})
	return n
}

// serve answers questions of one name for A with the address, and for anything else with nothing (RFC 1035,
// section 4).
func (n *names) serve() {
	packet := make([]byte, 512)
	for {
		size, from, err := n.conn.ReadFrom(packet)
		if err != nil {
			return
		}
		end := 12
		for end < size && packet[end] != 0 {
			end += int(packet[end]) + 1
		}
		if end += 5; end > size {
			continue
		}
		out := append([]byte{packet[0], packet[1], 0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0}, packet[12:end]...)
		if binary.BigEndian.Uint16(packet[end-4:]) == 1 {
			address := n.answer.Load().As4()
			out[7] = 1
			out = append(out, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4)
			out = append(out, address[:]...)
		}
		if _, err := n.conn.WriteTo(out, from); err != nil {
			return
		}
	}
}

func (n *names) resolver() *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", n.conn.LocalAddr().String())
	}}
}

// A node registers a name that points to an allowed address, and lets it point elsewhere when somebody dials.
func TestANameThatResolvesOtherwiseWhenItIsDialledIsNotDialled(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var connected atomic.Int64
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			connected.Add(1)
			_ = conn.Close() // it was only counted
		}
	}()
	t.Cleanup(func() { _ = listener.Close(); <-ended })
	port := listener.Addr().(*net.TCPAddr).Port

	dial := func(loopback bool) error {
		t.Helper()
		g, err := NewGuard(GuardConfig{CIDRs: DefaultCIDRs, Schemes: DefaultSchemes, Loopback: loopback})
		if err != nil {
			t.Fatal(err)
		}
		served := newNames(t, netip.MustParseAddr("10.1.2.3"))
		g.resolve = func(ctx context.Context, host string) ([]netip.Addr, error) {
			return served.resolver().LookupNetIP(ctx, "ip", host)
		}
		host := net.JoinHostPort("node.berth.test", strconv.Itoa(port))
		if _, err := g.Check(t.Context(), "http://"+host); err != nil {
			t.Fatalf("Check of a name with an allowed address = %v", err)
		}
		served.answer.Store(new(netip.MustParseAddr("127.0.0.1")))
		conn, err := (&net.Dialer{Resolver: served.resolver(), Control: g.Control}).DialContext(t.Context(), "tcp", host)
		if err == nil {
			_ = conn.Close() // that it was made is all
		}
		return err
	}
	if err := dial(false); !errors.Is(err, ErrNotAllowed) {
		t.Errorf("dialling the name = %v, want %v", err, ErrNotAllowed)
	}
	if got := connected.Load(); got != 0 {
		t.Errorf("%d connections were made to the other address, want none", got)
	}
	if err := dial(true); err != nil { // the address is served: it was the guard that kept it from being dialled
		t.Errorf("dialling where the other address is allowed = %v", err)
	}
}
