// Package listing gathers what no single node knows: the nodes, from SQL, and the sandboxes of a
// tenant, from all nodes at once.
//
// Nodes know states and metadata, SQL knows whose a sandbox is. A node that cannot be asked, is too
// slow or talks nonsense is missing, and the answer says so; it never blinds the rest. Only when no
// node answered is there no list.
//
// Not yet here: suspended sandboxes that no node holds, cursors handed on to nodes, lists from memory
// while PostgreSQL is gone.
package listing
