package route

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"testing"
)

// FuzzCheck: what passes says one thing to everybody who reads it, and names an address that may be dialled.
func FuzzCheck(f *testing.F) {
	for _, seed := range []string{
		"http://10.0.0.1:8000", "https://[fd00::1]:1/", "http://inside.test:80", "HTTP://10.0.0.1:80", "http://u@10.0.0.1:80",
		"http://[::ffff:10.0.0.1]:80", "http://0x7f.1:80", "http://[fe80::1%25eth0]:80", "http://10.0.0.1:080", "http://10.0.0.1:80//",
		"http://a.test.:80", "http://%31%30.0.0.1:80", "http://10.0.0.1:80;x", "http://[::1]:80", "http://8.8.8.8:80", "//10.0.0.1:80",
	} {
		f.Add(seed)
	}
	g, err := NewGuard(GuardConfig{CIDRs: DefaultCIDRs, Schemes: DefaultSchemes})
	if err != nil {
		f.Fatal(err)
	}
	g.resolve = func(_ context.Context, host string) ([]netip.Addr, error) {
		if strings.HasSuffix(host, ".test") {
			return []netip.Addr{netip.MustParseAddr("10.1.2.3")}, nil
		}
		return nil, errors.New("no such host")
	}
	f.Fuzz(func(t *testing.T, endpoint string) {
		stored, err := g.Check(t.Context(), endpoint)
		if err != nil {
			if !errors.Is(err, ErrNotAllowed) {
				t.Fatalf("Check(%q) = %v, want ErrNotAllowed", endpoint, err)
			}
			return
		}
		if again, err := g.Check(t.Context(), stored); err != nil || again != stored {
			t.Errorf("Check(%q) = %q, and that is %q, %v", endpoint, stored, again, err)
		}
		u, err := url.Parse(stored)
		if err != nil {
			t.Fatalf("Check(%q) = %q, which is no URL: %v", endpoint, stored, err)
		}
		if want := u.Scheme + "://" + u.Host; stored != want || u.User != nil {
			t.Errorf("Check(%q) = %q, want scheme, host and port alone: %q", endpoint, stored, want)
		}
		host, port, err := net.SplitHostPort(u.Host)
		if err != nil {
			t.Fatalf("Check(%q) = %q, which nobody can dial: %v", endpoint, stored, err)
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			t.Errorf("Check(%q) passes port %q", endpoint, port)
		}
		if addr, err := netip.ParseAddr(host); err == nil && (!addr.Unmap().IsPrivate() || g.Control("tcp", u.Host, nil) != nil) {
			t.Errorf("Check(%q) passes %s, which may not be dialled", endpoint, addr)
		} else if err != nil && !strings.HasSuffix(host, ".test") {
			t.Errorf("Check(%q) passes host %q, which does not resolve", endpoint, host)
		}
	})
}

// FuzzControl: the address that is dialled is judged as an address, or refused.
func FuzzControl(f *testing.F) {
	for _, seed := range []string{"10.0.0.1:80", "[fd00::1]:80", "[::ffff:127.0.0.1]:80", "[fe80::1%lo]:80", "10.0.0.1", "host:80", "10.0.0.1:99999", ""} {
		f.Add(seed)
	}
	g, err := NewGuard(GuardConfig{CIDRs: DefaultCIDRs, Schemes: DefaultSchemes})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, address string) {
		err := g.Control("tcp", address, nil)
		if err != nil {
			if !errors.Is(err, ErrNotAllowed) {
				t.Errorf("Control(%q) = %v, want ErrNotAllowed", address, err)
			}
			return
		}
		host, _, splitErr := net.SplitHostPort(address)
		addr, parseErr := netip.ParseAddr(host)
		if splitErr != nil || parseErr != nil || !addr.Unmap().WithZone("").IsPrivate() {
			t.Errorf("Control(%q) lets it be dialled", address)
		}
	})
}
