// Package containers tests the compose stack on a real engine, through its front door: create, use and
// delete sandboxes while containers die. It is behind the build tag containers; make test/containers runs it.
package containers
