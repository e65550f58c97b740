package route

import (
	"context"
	"errors"
	"net/netip"
	"testing"
)

func TestGuardCheck(t *testing.T) {
	t.Parallel()
	private := GuardConfig{CIDRs: DefaultCIDRs, Schemes: DefaultSchemes}
	dev := GuardConfig{CIDRs: DefaultCIDRs, Schemes: DefaultSchemes, Loopback: true}
	everything := GuardConfig{CIDRs: []string{"0.0.0.0/0", "::/0"}, Schemes: []string{"http"}}
	local := GuardConfig{CIDRs: []string{"127.0.0.2/32", "169.254.0.0/16"}, Schemes: []string{"http"}}
	names := map[string][]netip.Addr{
		"inside.test": {netip.MustParseAddr("10.1.2.3")},
		"mixed.test":  {netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("8.8.8.8")},
		"home.test":   {netip.MustParseAddr("127.0.0.1")},
	}
	tests := map[string]struct {
		rule GuardConfig
		in   string
		want string // "" is refused
	}{
		"a private address passes":                     {private, "http://10.1.2.3:8000", "http://10.1.2.3:8000"},
		"one trailing slash is cut":                    {private, "http://10.1.2.3:8000/", "http://10.1.2.3:8000"},
		"IPv6 in brackets passes":                      {private, "https://[fd00::1]:8000", "https://[fd00::1]:8000"},
		"a name with private addresses passes":         {private, "http://inside.test:8000", "http://inside.test:8000"},
		"a name with one public address is refused":    {private, "http://mixed.test:8000", ""},
		"an unknown name is refused":                   {private, "http://nowhere.test:8000", ""},
		"a name of this machine is refused":            {private, "http://home.test:8000", ""},
		"a public address is refused":                  {private, "http://8.8.8.8:80", ""},
		"loopback is refused":                          {private, "http://127.0.0.1:8000", ""},
		"loopback passes in dev":                       {dev, "http://127.0.0.1:8000", "http://127.0.0.1:8000"},
		"IPv6 loopback passes in dev":                  {dev, "http://[::1]:8000", "http://[::1]:8000"},
		"mapped loopback is judged as IPv4 loopback":   {dev, "http://[::ffff:127.0.0.1]:8000", "http://[::ffff:127.0.0.1]:8000"},
		"everything does not mean this machine":        {everything, "http://127.0.0.1:8000", ""},
		"everything does not mean link-local":          {everything, "http://169.254.169.254:80", ""},
		"everything does not mean the unspecified":     {everything, "http://0.0.0.0:80", ""},
		"everything does not mean broadcast":           {everything, "http://255.255.255.255:80", ""},
		"everything does not mean multicast":           {everything, "http://224.0.0.1:80", ""},
		"a loopback network named is allowed":          {local, "http://127.0.0.2:80", "http://127.0.0.2:80"},
		"a link-local network named is allowed":        {local, "http://169.254.1.1:80", "http://169.254.1.1:80"},
		"another scheme is refused":                    {private, "ftp://10.1.2.3:8000", ""},
		"a scheme not on the list is refused":          {local, "https://127.0.0.2:80", ""},
		"no scheme is refused":                         {private, "10.1.2.3:8000", ""},
		"no port is refused":                           {private, "http://10.1.2.3", ""},
		"port 0 is refused":                            {private, "http://10.1.2.3:0", ""},
		"port 65536 is refused":                        {private, "http://10.1.2.3:65536", ""},
		"a port with a leading zero is refused":        {private, "http://10.1.2.3:080", ""},
		"userinfo is refused":                          {private, "http://u:p@10.1.2.3:8000", ""},
		"a path is refused":                            {private, "http://10.1.2.3:8000/x", ""},
		"a query is refused":                           {private, "http://10.1.2.3:8000?x", ""},
		"an empty query is refused":                    {private, "http://10.1.2.3:8000/?", ""},
		"a fragment is refused":                        {private, "http://10.1.2.3:8000#x", ""},
		"a zone is refused":                            {private, "http://[fd00::1%25lo]:8000", ""},
		"an old spelling of an address is refused":     {dev, "http://0x7f.1:8000", ""},
		"a decimal spelling of an address is refused":  {dev, "http://2130706433:8000", ""},
		"an octal spelling of an address is refused":   {private, "http://10.1.2.03:8000", ""},
		"an uncanonical IPv6 address is refused":       {private, "http://[fd00:0::1]:8000", ""},
		"a host that ends in a number is an address":   {private, "http://inside.7:8000", ""},
		"a blank inside is refused":                    {private, "http://10.1.2.3 :8000", ""},
		"a line break is refused":                      {private, "http://10.1.2.3:8000\r\nX: y", ""},
		"nothing is refused":                           {private, "", ""},
		"a host of IPv6 without brackets is refused":   {private, "http://fd00::1:8000", ""},
		"a backslash that some read as a slash is not": {private, "http://10.1.2.3:8000\\@8.8.8.8", ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g, err := NewGuard(tt.rule)
			if err != nil {
				t.Fatal(err)
			}
			g.resolve = func(_ context.Context, host string) ([]netip.Addr, error) {
				if addrs, ok := names[host]; ok {
					return addrs, nil
				}
				return nil, errors.New("no such host")
			}
			got, err := g.Check(t.Context(), tt.in)
			if err != nil {
				got = ""
				if !errors.Is(err, ErrNotAllowed) {
					t.Errorf("Check(%q) gave %v, which is not ErrNotAllowed", tt.in, err)
				}
			}
			if got != tt.want {
				t.Errorf("Check(%q) = %q, %v; want %q", tt.in, got, err, tt.want)
			}
		})
	}
}

func TestControlJudgesTheAddressReallyDialled(t *testing.T) {
	t.Parallel()
	g, err := NewGuard(GuardConfig{CIDRs: DefaultCIDRs, Schemes: DefaultSchemes})
	if err != nil {
		t.Fatal(err)
	}
	for address, want := range map[string]bool{
		"10.0.0.1:80": true, "[fd00::1]:80": true, "127.0.0.1:80": false, "[::1]:80": false,
		"8.8.8.8:80": false, "[::ffff:10.0.0.1]:80": true, "[::ffff:127.0.0.1]:80": false, "nonsense": false,
	} {
		if err := g.Control("tcp", address, nil); (err == nil) != want {
			t.Errorf("Control(%q) = %v, want allowed %v", address, err, want)
		}
	}
}

func TestNewGuardNamesWhatIsWrong(t *testing.T) {
	t.Parallel()
	for name, rule := range map[string]GuardConfig{
		"a network that is none":   {CIDRs: []string{"10.0.0.0/33"}, Schemes: DefaultSchemes},
		"a scheme nobody speaks":   {CIDRs: DefaultCIDRs, Schemes: []string{"gopher"}},
		"no scheme at all allowed": {CIDRs: DefaultCIDRs},
	} {
		if _, err := NewGuard(rule); err == nil {
			t.Errorf("%s: NewGuard accepted %+v", name, rule)
		}
	}
}
