// Package gatewaytest has the other processes of a gateway as tests need them: schedulers that speak
// real Twirp on real addresses, and nodes that do over a socket what a script says.
package gatewaytest
