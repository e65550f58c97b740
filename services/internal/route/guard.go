package route

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// ErrNotAllowed is any endpoint or address that a Guard refuses. Its text names no rule and no
// address, for it goes to callers; what wraps it is for the log.
var ErrNotAllowed = errors.New("endpoint is not allowed")

// GuardConfig is one rule for the scheduler, which registers endpoints, and the gateway, which
// dials them.
type GuardConfig struct {
	CIDRs    []string // networks whose addresses are allowed
	Schemes  []string
	Loopback bool // allow loopback addresses too

	// Resolve returns the addresses of a host name; nil: the system's resolver.
	Resolve func(ctx context.Context, host string) ([]netip.Addr, error)
}

// DefaultCIDRs are the private networks of RFC 1918 and RFC 4193.
var DefaultCIDRs = []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"} //nolint:gochecknoglobals // a constant list

// DefaultSchemes are what node agents serve.
var DefaultSchemes = []string{"http", "https"} //nolint:gochecknoglobals // a constant list

// Guard decides which endpoints a node may have and which addresses may be dialled for it.
type Guard struct {
	prefixes []netip.Prefix
	schemes  []string
	loopback bool
	resolve  func(ctx context.Context, host string) ([]netip.Addr, error)
}

// NewGuard returns the guard of c, or an error that names the network or scheme that is wrong.
func NewGuard(c GuardConfig) (*Guard, error) {
	g := &Guard{loopback: c.Loopback, resolve: c.Resolve}
	if g.resolve == nil {
		g.resolve = func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		}
	}
	for _, text := range c.CIDRs {
		prefix, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil {
			return nil, fmt.Errorf("endpoint CIDR %q is no network, such as 10.0.0.0/8: %w", text, err)
		}
		g.prefixes = append(g.prefixes, prefix.Masked())
	}
	for _, scheme := range c.Schemes {
		scheme = strings.ToLower(strings.TrimSpace(scheme))
		if scheme != "http" && scheme != "https" {
			return nil, fmt.Errorf("endpoint scheme %q: only http and https are spoken", scheme)
		}
		g.schemes = append(g.schemes, scheme)
	}
	if len(g.schemes) == 0 {
		return nil, errors.New("no endpoint scheme is allowed: name http, https or both")
	}
	return g, nil
}

// Form returns endpoint as it is stored, its scheme in lower case and without a trailing slash, and the
// URL it is. It refuses what is no absolute URL of an allowed scheme with host and port 1 to 65535, and
// what has userinfo, a path, a query or a fragment. It does not judge the address.
func (g *Guard) Form(endpoint string) (string, *url.URL, error) {
	refuse := func(why string) (string, *url.URL, error) {
		return "", nil, fmt.Errorf("%w: %s", ErrNotAllowed, why)
	}
	for i := range len(endpoint) {
		if c := endpoint[i]; c <= ' ' || c >= 0x7f {
			return refuse("a byte that is not printable ASCII")
		}
	}
	if strings.ContainsAny(endpoint, "?#@\\%") {
		return refuse("userinfo, query, fragment or an escape")
	}
	u, err := url.Parse(endpoint)
	if err != nil {
		return refuse("no URL")
	}
	switch {
	case !slices.Contains(g.schemes, u.Scheme):
		return refuse("scheme")
	case u.Opaque != "" || u.Host == "" || u.Hostname() == "":
		return refuse("no host")
	case u.Path != "" && u.Path != "/":
		return refuse("path")
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	if err != nil || port == 0 || u.Port() != strconv.FormatUint(port, 10) {
		return refuse("port")
	}
	return u.Scheme + "://" + u.Host, u, nil
}

// Check returns endpoint as it is stored if its form and every address its host has are allowed.
// All errors but a cancelled context are ErrNotAllowed.
func (g *Guard) Check(ctx context.Context, endpoint string) (string, error) {
	stored, u, err := g.Form(endpoint)
	if err != nil {
		return "", err
	}
	host := u.Hostname()
	if addr, err := netip.ParseAddr(host); err == nil {
		// Another spelling of one address would escape whoever compares text.
		if addr.Zone() != "" || addr.String() != host {
			return "", fmt.Errorf("%w: address is not in canonical form", ErrNotAllowed)
		}
		return stored, g.Allow(addr)
	}
	if endsInNumber(host) {
		return "", fmt.Errorf("%w: a host that ends in a number must be an address", ErrNotAllowed)
	}
	addrs, err := g.resolve(ctx, host)
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	if err != nil || len(addrs) == 0 {
		return "", fmt.Errorf("%w: host does not resolve", ErrNotAllowed)
	}
	for _, addr := range addrs {
		if err := g.Allow(addr); err != nil {
			return "", err
		}
	}
	return stored, nil
}

// Resolves reports whether Check would ask the resolver about endpoint, which may take its time.
func (g *Guard) Resolves(endpoint string) bool {
	_, u, err := g.Form(endpoint)
	if err != nil {
		return false
	}
	_, err = netip.ParseAddr(u.Hostname())
	return err != nil && !endsInNumber(u.Hostname())
}

// endsInNumber reports whether the last label is a number, decimal or hexadecimal: resolvers may
// take such a host for an IPv4 address in an old spelling (WHATWG URL, "ends in a number").
func endsInNumber(host string) bool {
	host = strings.TrimSuffix(host, ".")
	label := host[strings.LastIndexByte(host, '.')+1:]
	if label == "" {
		return false
	}
	if digits := strings.TrimLeft(label, "0123456789"); digits == "" {
		return true
	}
	_, err := strconv.ParseUint(label, 0, 64)
	return err == nil || strings.EqualFold(label, "0x")
}

// Allow returns an error that is ErrNotAllowed unless addr may be dialled. IPv4-mapped IPv6 is
// judged as IPv4. Loopback needs GuardConfig.Loopback or a network that covers it, link-local
// addresses a network; unspecified, multicast and broadcast are never allowed.
func (g *Guard) Allow(addr netip.Addr) error {
	addr = addr.Unmap().WithZone("")
	switch {
	case !addr.IsValid(), addr.IsUnspecified(), addr.IsMulticast(), addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return fmt.Errorf("%w: address of a kind that is never dialled", ErrNotAllowed)
	case addr.IsLoopback() && g.loopback:
		return nil
	}
	for _, prefix := range g.prefixes {
		if !prefix.Contains(addr) {
			continue
		}
		// A network as wide as 0.0.0.0/0 does not mean this machine: loopback and link-local are
		// covered only by a network that lies inside theirs.
		if addr.IsLoopback() && !prefix.Addr().IsLoopback() || addr.IsLinkLocalUnicast() && !prefix.Addr().IsLinkLocalUnicast() {
			continue
		}
		return nil
	}
	return fmt.Errorf("%w: address outside the allowed networks", ErrNotAllowed)
}

// Control is for net.Dialer: it judges the address that is really dialled, after resolution, so
// that a name whose answer has changed gains nothing.
func (g *Guard) Control(_, address string, _ syscall.RawConn) error {
	addrPort, err := netip.ParseAddrPort(address)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotAllowed, err)
	}
	return g.Allow(addrPort.Addr())
}
