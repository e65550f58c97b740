// Package isolation runs sandboxes: process trees with their own user, pid, mount, ipc, uts and
// network namespaces, made by bubblewrap.
//
// # Terms
//
// The backend is what this machine allows, found out once at start by running a real sandbox: a way
// to make namespaces, a way to limit processes, a way to freeze them. The init is pid 1 inside a
// sandbox: this very binary, run again with a hidden argument. The control socket is a socket pair
// between agent and init, inherited, so that no name leads to it.
//
// # Who may do what
//
// In "root" mode bubblewrap runs as root without a user namespace, for only so can it mount any
// workspace; the init keeps what it needs to start the application in a user namespace of its own,
// where the application is an ordinary user that the machine knows as Config.UID. In "user" mode
// bubblewrap makes the user namespace itself, and init and application are the agent's user.
// Either way the application has no capability anywhere.
// The init has no limits of its own: a third run of this binary takes on the application's and becomes it (exec.go).
//
// # Ports
//
// Each sandbox has its own network namespace with only a loopback, so every sandbox has every port.
// The agent cannot connect into it; the init can. It connects and passes the connected socket back
// over the control socket (SCM_RIGHTS). Nothing else leaves or enters.
//
// # Failures
//
//   - The agent dies: the control socket ends and the parent-death signal fires; the init ends, and
//     with pid 1 the kernel kills the namespace. A sandbox frozen by a v1 freezer stays until the
//     next agent on the same data folder thaws and kills it (New).
//   - The init dies: Sandbox.Done is closed; everything in the sandbox is gone.
//   - The application ends: the sandbox stays, its ports refuse; Sandbox.Exited tells.
//   - A message of the init is wrong: the application may have reached it, so nothing in it is
//     trusted beyond the socket it brings.
package isolation
